//! Checks, their status and their life.

use std::time::Duration;

use serde_json::json;
use tokio::{net::TcpListener, time::Instant};
use tokio_stream::wrappers::TcpListenerStream;
use tonic_failover::testkit::{Check, Registration};
use tonic_health::ServingStatus;

use super::world::{World, own_checks};

const MINUTE: Duration = Duration::from_secs(60);

fn service(id: &str) -> Registration {
    Registration::new("s", id, "", 0)
}

fn pairs(statuses: &[(&str, &str)]) -> Vec<(String, String)> {
    statuses.iter().map(|(id, status)| ((*id).to_owned(), (*status).to_owned())).collect()
}

pub(crate) async fn a_ttl_check_expires_and_passes_again(world: World) {
    let ttl = Duration::from_millis(300);
    let start = Instant::now();
    world.register(service("a").check(Check::ttl(ttl).passing())).await;
    world.until_status("s", "critical").await;
    assert!(start.elapsed() >= ttl);
    assert_eq!(own_checks(&world.health("s").await[0])[0]["Output"], "TTL expired");
    world.dc1.put("/v1/agent/check/pass/service:a?note=well", "").await.unwrap();
    assert_eq!(world.statuses("s").await, pairs(&[("service:a", "passing")]));
    assert_eq!(own_checks(&world.health("s").await[0])[0]["Output"], "well");
    world.until_status("s", "critical").await;
    let output = own_checks(&world.health("s").await[0])[0]["Output"].clone();
    assert_eq!(output, "TTL expired (last output before timeout follows): well");
}

pub(crate) async fn a_ttl_heartbeat_that_repeats_itself_stays_in_the_agent(world: World) {
    world.register(service("a").check(Check::ttl(MINUTE))).await;
    world.dc1.put("/v1/agent/check/pass/service:a?note=one", "").await.unwrap();
    let index = world.index("s").await;
    world.dc1.put("/v1/agent/check/pass/service:a?note=two", "").await.unwrap();
    assert_eq!(world.index("s").await, index);
    assert_eq!(own_checks(&world.health("s").await[0])[0]["Output"], "one");
    assert_eq!(world.get("/v1/agent/checks").await.json()["service:a"]["Output"], "two");
}

pub(crate) async fn only_ttl_checks_take_heartbeats(world: World) {
    world.register(service("a").check(Check::tcp("127.0.0.1:1"))).await;
    world.register(service("b")).await;
    world.dc1.maintenance("b", true).await.unwrap();
    for check in ["service:a", "service:b", "nobody", "_service_maintenance:b"] {
        for verb in ["pass", "warn", "fail"] {
            let answer = world.dc1.put(&format!("/v1/agent/check/{verb}/{check}"), "").await.unwrap();
            assert_eq!(answer.status, 500);
            assert_eq!(answer.text(), format!("CheckID {check:?} does not have associated TTL"));
            assert_eq!(answer.index(), None, "the agent itself says so");
        }
    }
}

pub(crate) async fn update_gives_status_and_output(world: World) {
    world.register(service("a").check(Check::ttl(MINUTE))).await;
    let update = async |body: serde_json::Value| {
        world.dc1.put("/v1/agent/check/update/service:a", body.to_string()).await.unwrap()
    };
    assert_eq!(update(json!({ "Status": "warning", "Output": "hm" })).await.status, 200);
    let check = own_checks(&world.health("s").await[0])[0].clone();
    assert_eq!((&check["Status"], &check["Output"]), (&json!("warning"), &json!("hm")));
    let refused = update(json!({ "Status": "fine" })).await;
    assert_eq!((refused.status.as_u16(), refused.text().as_str()), (400, "Invalid check status: 'fine'"));
}

pub(crate) async fn registering_again_keeps_the_status(world: World) {
    world.register(service("a").check(Check::ttl(MINUTE).passing())).await;
    let index = world.index("s").await;
    world.register(service("a").check(Check::ttl(MINUTE))).await;
    assert_eq!(world.statuses("s").await, pairs(&[("service:a", "passing")]));
    assert_eq!(world.index("s").await, index);
    world.dc1.fail("a").await.unwrap();
    world.register(service("a").tag("new").check(Check::ttl(MINUTE).passing())).await;
    assert_eq!(world.statuses("s").await, pairs(&[("service:a", "critical")]));
    let check = own_checks(&world.health("s").await[0])[0].clone();
    assert_eq!(check["ServiceTags"], json!(["new"]));
}

pub(crate) async fn registering_again_starts_the_ttl_anew(world: World) {
    let ttl = Duration::from_secs(2);
    let it = || service("a").check(Check::ttl(ttl).passing());
    world.register(it()).await;
    tokio::time::sleep(ttl / 2).await;
    let again = Instant::now();
    world.register(it()).await;
    world.until_status("s", "critical").await;
    assert!(again.elapsed() >= ttl);
}

pub(crate) async fn checks_stay_until_they_are_replaced(world: World) {
    world.register(service("a").check(Check::ttl(MINUTE))).await;
    world.register(service("a")).await;
    assert_eq!(world.statuses("s").await, pairs(&[("service:a", "critical")]));
    world.register(service("a").check(Check::ttl(MINUTE).id("x").passing())).await;
    assert_eq!(world.statuses("s").await, pairs(&[("service:a", "critical"), ("x", "passing")]));
    let path = "/v1/agent/service/register?replace-existing-checks=true";
    let body = service("a").check(Check::ttl(MINUTE).id("x")).to_json().to_string();
    assert_eq!(world.dc1.put(path, body).await.unwrap().status, 200);
    let left = world.statuses("s").await;
    assert_eq!(left.iter().map(|it| it.0.as_str()).collect::<Vec<_>>(), ["x"]);
}

pub(crate) async fn several_checks_are_numbered_and_an_id_has_one_owner(world: World) {
    let ttl = || Check::ttl(MINUTE).passing();
    world.register(service("a").check(ttl()).check(ttl().id("x")).check(Check::ttl(MINUTE))).await;
    let wanted = [("service:a:1", "passing"), ("service:a:3", "critical"), ("x", "passing")];
    assert_eq!(world.statuses("s").await, pairs(&wanted));
    world.register(Registration::new("t", "b", "", 0).check(ttl().id("x"))).await;
    assert_eq!(world.statuses("s").await, pairs(&wanted[..2]));
    assert_eq!(world.statuses("t").await, pairs(&[("x", "passing")]));
}

pub(crate) async fn a_tcp_check_follows_the_listener(world: World) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let target = listener.local_addr().unwrap().to_string();
    world.register(service("a").check(Check::tcp(&target))).await;
    assert_eq!(world.ids("s?passing").await, [""; 0], "critical until it was looked at");
    world.until_status("s", "passing").await;
    let output = own_checks(&world.health("s").await[0])[0]["Output"].clone();
    assert_eq!(output, format!("TCP connect {target}: Success"));
    drop(listener);
    world.until_status("s", "critical").await;
}

pub(crate) async fn a_grpc_check_follows_the_health_service(world: World) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let target = listener.local_addr().unwrap().to_string();
    let (reporter, health) = tonic_health::server::health_reporter();
    reporter.set_service_status("up", ServingStatus::Serving).await;
    reporter.set_service_status("down", ServingStatus::NotServing).await;
    let router = tonic::transport::Server::builder().add_service(health);
    let server = tokio::spawn(router.serve_with_incoming(TcpListenerStream::new(listener)));
    for (name, service, status) in [
        ("all", "", "passing"),
        ("slash", "/", "passing"),
        ("up", "/up", "passing"),
        ("down", "/down", "critical"),
        ("unknown", "/unknown", "critical"),
    ] {
        let check = Check::grpc(format!("{target}{service}")).timeout(Duration::from_secs(2));
        // From the other status, so that each must be found out.
        let check = if status == "critical" { check.passing() } else { check };
        world.register(Registration::new(name, name, "", 0).check(check)).await;
    }
    for (name, status) in [
        ("all", "passing"),
        ("slash", "passing"),
        ("up", "passing"),
        ("down", "critical"),
        ("unknown", "critical"),
    ] {
        world.until_status(name, status).await;
        let check = own_checks(&world.health(name).await[0])[0].clone();
        assert_eq!(check["Type"], "grpc");
        let output = check["Output"].as_str().unwrap().to_owned();
        match name {
            "down" => assert_eq!(output, "gRPC application didn't report service healthy"),
            "unknown" => assert!(output.contains("code = NotFound"), "{output}"),
            _ => assert!(output.ends_with("success"), "{output}"),
        }
    }
    reporter.set_service_status("up", ServingStatus::NotServing).await;
    world.until_status("up", "critical").await;
    server.abort();
    world.until_status("all", "critical").await;
}

pub(crate) async fn deregistering_takes_the_checks_along(world: World) {
    world.register(service("a").check(Check::ttl(MINUTE))).await;
    world.dc1.maintenance("a", true).await.unwrap();
    world.dc1.deregister("a").await.unwrap();
    world.dc1.deregister("a").await.unwrap();
    assert_eq!(world.health("s").await, json!([]));
    assert_eq!(world.get("/v1/agent/checks").await.json(), json!({}));
    assert!(world.dc1.pass("a").await.is_err());
    world.register(service("a")).await;
    assert_eq!(world.ids("s?passing").await, ["a"], "it comes back without them");
}
