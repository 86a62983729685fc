//! Other datacenters, asked through the own agent.

use serde_json::json;
use tokio::time::timeout;
use tonic_failover::testkit::Registration;

use super::world::{LONG, World, answer, ids, is_waiting};

fn service(id: &str) -> Registration {
    Registration::new("s", id, "127.0.0.1", 1)
}

pub(crate) async fn the_own_one_comes_first(world: World) {
    let answer = world.get("/v1/catalog/datacenters").await;
    assert_eq!(answer.json(), json!(["dc1", "dc2"]));
    assert_eq!(answer.index(), None);
    assert_eq!(world.dc2.get("/v1/catalog/datacenters").await.unwrap().json(), json!(["dc2", "dc1"]));
}

pub(crate) async fn a_question_is_forwarded(world: World) {
    world.register(service("here")).await;
    world.dc2.register(&service("there")).await.unwrap();
    assert_eq!(world.ids("s").await, ["here"]);
    assert_eq!(world.ids("s?dc=").await, ["here"]);
    assert_eq!(world.ids("s?dc=dc1").await, ["here"]);
    let there = world.get("/v1/health/service/s?dc=dc2&passing").await;
    assert_eq!(ids(&there.json()), ["there"]);
    assert_eq!(there.json()[0]["Node"]["Datacenter"], "dc2");
    assert_eq!(there.header("x-consul-knownleader"), Some("true"));
    assert_eq!(world.get("/v1/catalog/services?dc=dc2").await.json(), json!({ "consul": [], "s": [] }));
}

pub(crate) async fn a_blocking_question_is_forwarded(world: World) {
    let index = world.get("/v1/health/service/s?dc=dc2").await.index().unwrap();
    let mut question = world.ask(&format!("/v1/health/service/s?dc=dc2&index={index}&wait=30s"));
    world.register(service("here")).await;
    assert!(is_waiting(&mut question).await);
    world.dc2.register(&service("there")).await.unwrap();
    assert_eq!(ids(&answer(question).await.json()), ["there"]);
}

pub(crate) async fn an_unknown_one_is_refused_with_an_index_that_means_nothing(world: World) {
    for name in ["nowhere", "DC2"] {
        for path in ["/v1/health/service/s", "/v1/catalog/services"] {
            let answer = world.dc1.get(&format!("{path}?dc={name}")).await.unwrap();
            assert_eq!((answer.status.as_u16(), answer.text().as_str()), (500, "No path to datacenter"));
            assert_eq!(answer.index(), Some(1));
            assert_eq!(answer.header("x-consul-knownleader"), Some("false"));
            assert_eq!(answer.header("x-consul-lastcontact"), Some("0"));
        }
    }
}

pub(crate) async fn a_dead_one_is_refused_and_still_listed(mut world: World) {
    world.dc2.register(&service("there")).await.unwrap();
    let index = world.get("/v1/health/service/s?dc=dc2").await.index().unwrap();
    let mut question = world.ask(&format!("/v1/health/service/s?dc=dc2&index={index}&wait=60s"));
    assert!(is_waiting(&mut question).await);
    world.kill_last().await;
    let cut = answer(question).await;
    assert_eq!((cut.status.as_u16(), cut.text().as_str()), (500, "rpc error making call: EOF"));
    assert_eq!(cut.index(), Some(1));
    let refused = async {
        loop {
            let answer = world.dc1.get("/v1/health/service/s?dc=dc2&stale").await.unwrap();
            assert_eq!(answer.status, 500);
            assert_eq!(answer.index(), Some(1));
            if answer.text().contains("connection refused") {
                return answer;
            }
        }
    };
    let refused = timeout(LONG, refused).await.expect("it is refused");
    assert!(
        refused.text().starts_with("rpc error getting client: failed to get conn: "),
        "{}",
        refused.text()
    );
    assert_eq!(world.get("/v1/catalog/datacenters").await.json(), json!(["dc1", "dc2"]));
}
