//! What is registered, and whose it is.

use std::time::Duration;

use serde_json::{Value, json};
use tokio::{sync::watch, time::Instant};
use tonic_failover::{FencingToken, Role, server::RegistrationStatus};

use super::world::{World, until, until_registered, until_status};
use crate::common::SOON;

/// No test of these ends with it.
const FOR_EVER: Duration = Duration::from_secs(3600);

pub(crate) async fn it_is_found_with_all_that_was_given(world: World) {
    let registration = world.a().tag("v2").meta("rack", "b").weights(7, 2).start().unwrap();
    world.until_passing(&["a"]).await;
    until_registered(&registration).await;
    let it = world.service().await;
    assert_eq!((&it["ID"], &it["Address"], &it["Port"]), (&json!("a"), &json!("127.0.0.1"), &json!(4000)));
    assert_eq!((&it["Tags"], &it["Meta"]["rack"]), (&json!(["v2"]), &json!("b")));
    assert_eq!(it["Weights"], json!({ "Passing": 7, "Warning": 2 }));
    assert_eq!(it["Meta"]["nonce"].as_str().unwrap().len(), 32);
    assert_eq!(it["Meta"]["role"], Value::Null, "nothing is said of roles");
    registration.leave().await;
    assert!(world.listed("").await.is_empty());
    assert!(matches!(registration.status(), RegistrationStatus::Left { instead: None }));
}

pub(crate) async fn it_is_registered_again_whenever_it_was_forgotten_or_changed(mut world: World) {
    let _registration = world.a().tag("v2").start().unwrap();
    world.until_passing(&["a"]).await;
    for _ in 0..2 {
        world.start_empty().await;
        world.until_passing(&["a"]).await;
    }
    world.registry().deregister("a").await.unwrap();
    world.until_passing(&["a"]).await;
    // Somebody changes the entry by hand, and says nothing of the nonce's meaning.
    let mut entry = world.service().await;
    entry["Name"] = entry["Service"].take();
    entry["Tags"] = json!(["v1"]);
    let entry = json!({
        "ID": "a", "Name": "s", "Address": "127.0.0.1", "Port": 4000, "Tags": ["v1"], "Meta": entry["Meta"],
    });
    let answer = world.registry().put("/v1/agent/service/register", entry.to_string()).await.unwrap();
    assert!(answer.status.is_success());
    until("the tag is back", async || world.service().await["Tags"] == json!(["v2"])).await;
    world.until_passing(&["a"]).await;
    // The check alone.
    if let World::Real(consul) = &world {
        let answer = consul.registry().put("/v1/agent/check/deregister/service:a", "").await.unwrap();
        assert!(answer.status.is_success());
        let checks = async || consul.registry().get("/v1/agent/checks").await.unwrap().json();
        until("the check is back", async || checks().await["service:a"]["Status"] == "passing").await;
    }
}

pub(crate) async fn an_older_process_of_the_same_instance_gives_way(world: World) {
    let old = world.at(4000).heartbeat(FOR_EVER).start().unwrap();
    until_registered(&old).await;
    // As after kill -9: nothing is said to Consul.
    drop(old);
    let new = world.at(4001).start().unwrap();
    until_registered(&new).await;
    assert_eq!(world.service().await["Port"], 4001);
    assert_eq!(world.listed("").await.len(), 1);
    new.leave().await;
    assert!(world.listed("").await.is_empty());
}

pub(crate) async fn another_process_that_takes_the_id_is_let_be_and_told_of(world: World) {
    let first = world.at(4000).start().unwrap();
    until_registered(&first).await;
    let second = world.at(4001).start().unwrap();
    until_registered(&second).await;
    let displaced = |it: &RegistrationStatus| matches!(it, RegistrationStatus::Displaced { .. });
    let status = until_status(&first, "displaced", displaced).await;
    let RegistrationStatus::Displaced { by } = status else { panic!("{status}") };
    assert_eq!((by.port, by.id.as_str()), (4001, "a"));
    // It is back when the other has gone, and displaces nobody.
    second.leave().await;
    until_registered(&first).await;
    assert_eq!(world.service().await["Port"], 4000);
    let third = world.at(4002).start().unwrap();
    until_registered(&third).await;
    first.leave().await;
    let status = first.status();
    let RegistrationStatus::Left { instead: Some(by) } = status else { panic!("{status}") };
    assert_eq!(by.port, 4002);
    assert_eq!(world.service().await["Port"], 4002, "what is another's is not taken out");
    assert!(third.status().is_registered());
}

/// A role that holds for as long as a test.
fn primary(token: u64) -> Role {
    Role::Primary { token: FencingToken::new(token), until: Instant::now() + FOR_EVER }
}

pub(crate) async fn a_change_of_role_moves_tag_and_metadata_and_leaves_the_check_passing(world: World) {
    let (role, follow) = watch::channel(Role::Unknown);
    let registration = world.a().tag("v2").follow(follow).start().unwrap();
    world.until_passing(&["a"]).await;
    until_registered(&registration).await;
    // Every list that Consul gives meanwhile, without a gap.
    let registry = world.registry().clone();
    let (end, ended) = watch::channel(false);
    let watcher = tokio::spawn(async move {
        let (mut index, mut lists) = (0, Vec::new());
        while !*ended.borrow() {
            let path = format!("/v1/health/service/s?passing&index={index}&wait=1s");
            let answer = registry.get_within(&path, SOON).await.unwrap();
            index = answer.index().unwrap();
            lists.push(answer.json());
        }
        lists
    });
    let said = async |tags: Value, role: &str, token: Value| {
        until(role, async || {
            let it = world.service().await;
            it["Tags"] == tags && it["Meta"]["role"] == role && it["Meta"]["token"] == token
        })
        .await;
    };
    said(json!(["v2"]), "unknown", Value::Null).await;
    for term in 1..=5 {
        role.send_replace(Role::Standby { primary: None });
        said(json!(["v2", "standby"]), "standby", Value::Null).await;
        role.send_replace(primary(term));
        said(json!(["v2", "primary"]), "primary", json!(term.to_string())).await;
    }
    // A primary whose time is over is none, though nobody says so.
    role.send_replace(Role::Primary { token: FencingToken::new(6), until: Instant::now() });
    said(json!(["v2"]), "unknown", Value::Null).await;
    role.send_replace(primary(7));
    said(json!(["v2", "primary"]), "primary", json!("7")).await;
    // A lease that has ended knows nothing.
    drop(role);
    said(json!(["v2"]), "unknown", Value::Null).await;
    end.send_replace(true);
    let lists = watcher.await.unwrap();
    assert!(lists.len() > 5, "{}", lists.len());
    for list in &lists {
        let ids: Vec<_> = list.as_array().unwrap().iter().map(|it| it["Service"]["ID"].clone()).collect();
        assert_eq!(ids, ["a"], "it stays in the list: {list}");
    }
    assert!(registration.status().is_registered());
}

pub(crate) async fn an_operators_maintenance_outlives_a_change_of_role(world: World) {
    let (role, follow) = watch::channel(Role::Standby { primary: None });
    let _registration = world.a().follow(follow).start().unwrap();
    world.until_passing(&["a"]).await;
    world.registry().maintenance("a", true).await.unwrap();
    world.until_passing(&[]).await;
    role.send_replace(primary(1));
    until("the role is told", async || world.service().await["Meta"]["role"] == "primary").await;
    world.until_passing(&[]).await;
    world.registry().maintenance("a", false).await.unwrap();
    world.until_passing(&["a"]).await;
}
