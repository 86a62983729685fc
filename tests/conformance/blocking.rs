//! Indexes, and queries that wait for them to move.

use std::time::Duration;

use serde_json::json;
use tokio::time::{Instant, sleep, timeout};
use tonic_failover::testkit::{Check, Registration};

use super::world::{LONG, SHORT, World, answer, ids, is_waiting};

fn plain(name: &str) -> Registration {
    Registration::new(name, name, "", 0)
}

fn beating(name: &str) -> Registration {
    plain(name).check(Check::ttl(Duration::from_secs(60)))
}

pub(crate) async fn an_index_is_never_0_and_moves_for_its_own_service(world: World) {
    assert!(world.index("nobody").await > 0);
    world.register(beating("a")).await;
    let index = world.index("a").await;
    world.register(plain("b")).await;
    world.register(plain("b").tag("x")).await;
    world.dc1.deregister("b").await.unwrap();
    world.register(beating("a")).await;
    assert_eq!(world.index("a").await, index);
    for change in 0..5 {
        let before = world.index("a").await;
        match change {
            0 => world.dc1.pass("a").await.unwrap(),
            1 => world.dc1.fail("a").await.unwrap(),
            2 => world.register(plain("a").tag("x")).await,
            3 => world.dc1.maintenance("a", true).await.unwrap(),
            _ => world.dc1.deregister("a").await.unwrap(),
        }
        assert!(world.index("a").await > before, "change {change}");
    }
}

pub(crate) async fn a_query_blocks_until_its_service_changes(world: World) {
    world.register(beating("a")).await;
    for change in 0..5 {
        let index = world.index("a").await;
        let mut question = world.ask(&format!("/v1/health/service/a?index={index}&wait=30s"));
        assert!(is_waiting(&mut question).await);
        match change {
            0 => world.dc1.pass("a").await.unwrap(),
            1 => world.register(plain("a").tag("x")).await,
            2 => world.register(Registration::new("a", "a-2", "", 0)).await,
            3 => world.dc1.maintenance("a", true).await.unwrap(),
            _ => world.dc1.deregister("a-2").await.unwrap(),
        }
        let answer = answer(question).await;
        assert!(answer.index().unwrap() > index, "change {change}");
    }
}

pub(crate) async fn a_query_for_an_unknown_service_wakes_when_it_comes_or_any_dies_out(world: World) {
    let ask = async || {
        let index = world.index("late").await;
        let mut question = world.ask(&format!("/v1/health/service/late?index={index}&wait=30s"));
        assert!(is_waiting(&mut question).await);
        (question, index)
    };
    // Nothing has died out yet: every change of anything counts.
    let (question, index) = ask().await;
    world.register(plain("other")).await;
    let news = answer(question).await;
    assert_eq!(news.json(), json!([]));
    assert!(news.index().unwrap() > index);
    // From now on only that a service dies out does, or that it comes itself.
    let (question, index) = ask().await;
    world.dc1.deregister("other").await.unwrap();
    assert!(answer(question).await.index().unwrap() > index);
    let (mut question, _) = ask().await;
    world.register(plain("other")).await;
    world.register(plain("other").tag("x")).await;
    assert!(is_waiting(&mut question).await);
    world.register(plain("late")).await;
    assert_eq!(ids(&answer(question).await.json()), ["late"]);
    // And back: the last instance goes.
    let (question, index) = ask().await;
    world.dc1.deregister("late").await.unwrap();
    let gone = answer(question).await;
    assert_eq!(gone.json(), json!([]));
    assert!(gone.index().unwrap() > index);
}

pub(crate) async fn unrelated_changes_and_unchanged_repetitions_wake_nobody(world: World) {
    world.register(beating("a")).await;
    world.register(beating("b")).await;
    world.dc1.pass("a").await.unwrap();
    let index = world.index("a").await;
    let mut question = world.ask(&format!("/v1/health/service/a?index={index}&wait=30s"));
    world.dc1.pass("b").await.unwrap();
    world.dc1.deregister("b").await.unwrap();
    world.dc1.pass("a").await.unwrap();
    world.register(beating("a")).await;
    assert!(is_waiting(&mut question).await);
    question.abort();
    assert_eq!(world.index("a").await, index);
}

pub(crate) async fn a_wait_ends_with_the_same_index(world: World) {
    world.register(plain("a")).await;
    let index = world.index("a").await;
    let start = Instant::now();
    let answer = answer(world.ask(&format!("/v1/health/service/a?index={index}&wait=400ms"))).await;
    assert!(start.elapsed() >= Duration::from_millis(400));
    assert_eq!(answer.index(), Some(index));
    assert_eq!(ids(&answer.json()), ["a"]);
}

pub(crate) async fn an_index_in_the_future_waits_and_gives_the_real_one(world: World) {
    world.register(plain("a")).await;
    let start = Instant::now();
    let question = world.ask("/v1/health/service/a?index=999999&wait=600ms");
    world.register(plain("a").tag("x")).await;
    let answer = answer(question).await;
    assert!(start.elapsed() >= Duration::from_millis(600), "a change does not wake it");
    assert_eq!(answer.index(), Some(world.index("a").await));
}

pub(crate) async fn index_0_and_an_older_index_do_not_block(world: World) {
    world.register(plain("a")).await;
    let index = world.index("a").await;
    for query in ["index=0&wait=30s".to_owned(), format!("index={}&wait=30s", index - 1), "index=".to_owned()]
    {
        let asked = timeout(LONG, world.ask(&format!("/v1/health/service/a?{query}"))).await;
        assert_eq!(asked.expect(&query).unwrap().index(), Some(index));
    }
}

pub(crate) async fn an_agent_in_memory_loses_everything_when_restarted(mut world: World) {
    world.register(beating("a")).await;
    for tag in 0..20 {
        world.register(beating("a").tag(tag.to_string())).await;
    }
    let index = world.index("a").await;
    let (registry, path) = (world.dc1.clone(), format!("/v1/health/service/a?index={index}&wait=30s"));
    let cut = tokio::spawn(async move { registry.get_within(&path, LONG).await });
    sleep(SHORT).await;
    world.restart_first().await;
    cut.await.unwrap().expect_err("a question under way is cut off");
    assert_eq!(world.health("a").await, json!([]));
    assert!(world.index("a").await < index);
    assert_eq!(world.get("/v1/agent/services").await.json(), json!({}));
    assert!(world.dc1.pass("a").await.is_err());
}

pub(crate) async fn the_list_of_services_blocks_too(world: World) {
    let index = world.get("/v1/catalog/services").await.index().unwrap();
    let mut question = world.ask(&format!("/v1/catalog/services?index={index}&wait=30s"));
    assert!(is_waiting(&mut question).await);
    world.register(plain("a")).await;
    let answer = answer(question).await;
    assert!(answer.index().unwrap() > index);
    assert_eq!(answer.json(), json!({ "a": [], "consul": [] }));
}
