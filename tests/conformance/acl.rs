//! What a token that may not read is told. The embedded agent has no tokens: its
//! fault hides a service from everybody.

use serde_json::{Value, json};
use tonic_failover::testkit::{Agent, ConsulProcess, Registration, Registry};

use super::world::World;

const RIGHTS: &str = "/v1/internal/acl/authorize";
const ROOT: &str = "b1a7c1de-0e5b-4d0a-8c53-54f6f7b06a4e";

fn rights() -> String {
    let right =
        |resource: &str, segment: &str| json!({ "Resource": resource, "Access": "read", "Segment": segment });
    json!([right("service", "s"), right("node", ""), right("service", "other")]).to_string()
}

pub(crate) async fn rights_are_not_told_where_acls_are_off(world: World) {
    let answer = world.dc1.post(RIGHTS, rights()).await.unwrap();
    assert_eq!((answer.status.as_u16(), answer.text().as_str()), (401, "ACL support disabled"));
    assert_eq!(answer.index(), None);
    for other in [world.dc1.get(RIGHTS).await.unwrap(), world.dc1.put(RIGHTS, "").await.unwrap()] {
        assert_eq!(other.status, 405);
    }
}

/// The index of the service `s`.
async fn index(registry: &Registry) -> Option<u64> {
    registry.get("/v1/health/service/s").await.unwrap().index()
}

/// What somebody sees who may read all but the service `s`; `all` may read that too,
/// or is as good as who may.
async fn hidden(all: &Registry, seen: &Registry) {
    // A young leader enters the check of its own node, `serfHealth`, in its own time,
    // and that moves the index of what is registered there: only what was read while it
    // stood still can be compared.
    let still = async {
        loop {
            let before = index(all).await;
            let answer = seen.get("/v1/health/service/s?passing&stale").await.unwrap();
            if index(all).await == before {
                return (before, answer);
            }
        }
    };
    let (index, answer) = tokio::time::timeout(super::world::LONG, still).await.expect("it stands still");
    assert!(index.is_some());
    assert_eq!((answer.status.as_u16(), answer.json(), answer.index()), (200, json!([]), index));
    assert_eq!(answer.header("x-consul-knownleader"), Some("true"));
    assert_eq!(answer.header("x-consul-results-filtered-by-acls"), None, "1.8 does not tell");
    let answer = seen.post(RIGHTS, rights()).await.unwrap();
    assert_eq!((answer.status.as_u16(), answer.index()), (200, None));
    let right = |resource: &str, segment: &str, allow: bool| {
        let mut right = json!({ "Resource": resource, "Access": "read", "Allow": allow });
        if !segment.is_empty() {
            right["Segment"] = Value::from(segment);
        }
        right
    };
    let told =
        json!([right("service", "s", false), right("node", "", true), right("service", "other", true)]);
    assert_eq!(answer.json(), told);
    let none = seen.post(RIGHTS, "[]").await.unwrap();
    assert_eq!((none.status.as_u16(), none.json()), (200, json!([])));
    let bad = seen.post(RIGHTS, "{}").await.unwrap();
    assert_eq!(bad.status, 400);
    assert!(bad.text().starts_with("Bad request: Failed to decode request body: "), "{}", bad.text());
    let nowhere = seen.post(&format!("{RIGHTS}?dc=dc9"), rights()).await.unwrap();
    assert_eq!((nowhere.status.as_u16(), nowhere.text().as_str()), (500, "No path to datacenter"));
}

#[tokio::test]
async fn embedded() {
    let agent = Agent::start("dc1").await.unwrap();
    agent.registry().register(&Registration::new("s", "a", "127.0.0.1", 1)).await.unwrap();
    let before = index(agent.registry()).await;
    agent.faults().filtered("s");
    // The fault hides it from all, and moves no index.
    assert_eq!(index(agent.registry()).await, before);
    hidden(agent.registry(), agent.registry()).await;
}

#[tokio::test]
async fn real() {
    let Some(bin) = ConsulProcess::find() else {
        eprintln!("SKIPPED acl::real: no Consul found. Install the package `consul`, or set CONSUL_BIN.");
        return;
    };
    let acl = format!(r#"acl {{ enabled = true default_policy = "deny" tokens {{ master = "{ROOT}" }} }}"#);
    let agent = ConsulProcess::builder(bin).hcl(acl).start().await.unwrap();
    let root = agent.registry().clone().token(ROOT);
    let ready = async {
        // The first leader may still be setting the tokens up.
        while !root.get("/v1/acl/tokens").await.unwrap().status.is_success() {
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(super::world::LONG, ready).await.expect("the tokens are set up");
    root.register(&Registration::new("s", "a", "127.0.0.1", 1)).await.unwrap();
    let rules = r#"service "other" { policy = "read" } node_prefix "" { policy = "read" }"#;
    let policy = json!({ "Name": "other", "Rules": rules });
    assert_eq!(root.put("/v1/acl/policy", policy.to_string()).await.unwrap().status, 200);
    let token = json!({ "Policies": [{ "Name": "other" }] });
    let token = root.put("/v1/acl/token", token.to_string()).await.unwrap().json();
    let seen = agent.registry().clone().token(token["SecretID"].as_str().unwrap());
    hidden(&root, &seen).await;
    let unknown = agent.registry().clone().token("unknown");
    let refused = unknown.post(RIGHTS, rights()).await.unwrap();
    assert_eq!((refused.status.as_u16(), refused.text().as_str()), (403, "ACL not found"));
}
