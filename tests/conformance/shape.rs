//! What answers look like.

use std::time::Duration;

use serde_json::{Value, json};
use tonic_failover::testkit::{Check, Registration};

use super::world::{World, own_checks};

/// Everything that differs from one agent to the next, taken out.
fn scrubbed(mut value: Value) -> Value {
    match &mut value {
        Value::Object(fields) => {
            for (key, field) in fields {
                *field = match key.as_str() {
                    "CreateIndex" | "ModifyIndex" => json!(field.is_u64()),
                    // A UUID.
                    "ID" if field.as_str().is_some_and(|id| id.len() == 36) => json!("uuid"),
                    "Meta" if field.get("consul-network-segment").is_some() => json!("node meta"),
                    _ => scrubbed(field.take()),
                };
            }
        }
        Value::Array(items) => items.iter_mut().for_each(|item| *item = scrubbed(item.take())),
        _ => {}
    }
    value
}

fn node() -> Value {
    json!({
        "ID": "uuid", "Node": "dc1-s1", "Address": "127.0.0.1", "Datacenter": "dc1", "Meta": "node meta",
        "TaggedAddresses": {
            "lan": "127.0.0.1", "lan_ipv4": "127.0.0.1", "wan": "127.0.0.1", "wan_ipv4": "127.0.0.1",
        },
        "CreateIndex": true, "ModifyIndex": true,
    })
}

fn serf_health() -> Value {
    json!({
        "Node": "dc1-s1", "CheckID": "serfHealth", "Name": "Serf Health Status", "Status": "passing",
        "Notes": "", "Output": "Agent alive and reachable", "ServiceID": "", "ServiceName": "",
        "ServiceTags": [], "Type": "", "Definition": {}, "CreateIndex": true, "ModifyIndex": true,
    })
}

pub(crate) async fn an_entry_has_every_field_of_a_real_one(world: World) {
    let counter = Registration::new("counter", "counter-1", "127.0.0.1", 4000)
        .tag("V1")
        .tag("")
        .meta("rack", "b")
        .weight(3)
        .tagged_address("wan", "10.1.2.3", 9)
        .check(Check::ttl(Duration::from_secs(60)).passing());
    world.register(counter).await;
    let wanted = json!([{
        "Node": node(),
        "Service": {
            "ID": "counter-1", "Service": "counter", "Tags": ["V1", ""], "Address": "127.0.0.1", "Port": 4000,
            "TaggedAddresses": {
                "lan_ipv4": { "Address": "127.0.0.1", "Port": 4000 },
                "wan": { "Address": "10.1.2.3", "Port": 9 },
                "wan_ipv4": { "Address": "127.0.0.1", "Port": 4000 },
            },
            "Meta": { "rack": "b" }, "Weights": { "Passing": 3, "Warning": 1 }, "EnableTagOverride": false,
            "Proxy": { "MeshGateway": {}, "Expose": {} }, "Connect": {},
            "CreateIndex": true, "ModifyIndex": true,
        },
        "Checks": [serf_health(), {
            "Node": "dc1-s1", "CheckID": "service:counter-1", "Name": "Service 'counter' check",
            "Status": "passing", "Notes": "", "Output": "", "ServiceID": "counter-1", "ServiceName": "counter",
            "ServiceTags": ["V1", ""], "Type": "ttl", "Definition": {}, "CreateIndex": true, "ModifyIndex": true,
        }],
    }]);
    assert_eq!(scrubbed(world.health("counter").await), wanted);
}

pub(crate) async fn what_is_not_given_has_its_default(world: World) {
    world.register_json(&json!({ "Name": "bare" })).await;
    let wanted = json!([{
        "Node": node(),
        "Service": {
            "ID": "bare", "Service": "bare", "Tags": [], "Address": "", "Port": 0, "Meta": null,
            "Weights": { "Passing": 1, "Warning": 1 }, "EnableTagOverride": false,
            "Proxy": { "MeshGateway": {}, "Expose": {} }, "Connect": {},
            "CreateIndex": true, "ModifyIndex": true,
        },
        "Checks": [serf_health()],
    }]);
    assert_eq!(scrubbed(world.health("bare").await), wanted);
    assert_eq!(world.ids("bare?passing").await, ["bare"], "nothing checks it, so it passes");
    assert_eq!(world.health("consul").await[0]["Service"]["Address"], "");
}

pub(crate) async fn addresses_that_are_ip_addresses_are_tagged(world: World) {
    for (id, address, tags) in [
        ("four", "10.0.0.1", &["lan_ipv4", "wan_ipv4"][..]),
        ("six", "fe80::1", &["lan_ipv6", "wan_ipv6"]),
        ("name", "host.example", &[]),
        ("none", "", &[]),
    ] {
        world.register(Registration::new(id, id, address, 7)).await;
        let service = &world.health(id).await[0]["Service"];
        let tagged = service["TaggedAddresses"].as_object().cloned().unwrap_or_default();
        assert_eq!(tagged.keys().collect::<Vec<_>>(), tags, "{address}");
        for it in tagged.values() {
            assert_eq!(*it, json!({ "Address": address, "Port": 7 }));
        }
        assert_eq!(service["Address"], address);
    }
}

pub(crate) async fn odd_ports_and_addresses_come_through(world: World) {
    for port in [-1, 0, 65_535, 70_000] {
        world.register(Registration::new("odd", "odd", "127.0.0.1", port)).await;
        assert_eq!(world.health("odd").await[0]["Service"]["Port"], port);
    }
    for address in ["0.0.0.0", "::", "[::]"] {
        let body = json!({ "Name": "any", "Address": address });
        let answer = world.dc1.put("/v1/agent/service/register", body.to_string()).await.unwrap();
        assert_eq!(
            (answer.status.as_u16(), answer.text().as_str()),
            (400, "Invalid service address"),
            "{body}"
        );
    }
}

pub(crate) async fn instances_with_one_address_are_both_listed_by_id(world: World) {
    for id in ["c", "a", "b"] {
        world.register(Registration::new("twin", id, "127.0.0.1", 9)).await;
    }
    assert_eq!(world.ids("twin").await, ["a", "b", "c"]);
    assert_eq!(world.ids("TWIN").await, ["a", "b", "c"], "names are found in any case");
    let index = world.index("Twin").await;
    assert_eq!(index, world.index("twin").await);
}

pub(crate) async fn names_and_ids_may_hold_odd_characters(world: World) {
    world.register_json(&json!({ "Name": "two words/é", "ID": "a/b c" })).await;
    assert_eq!(world.ids("two%20words/%C3%A9").await, ["a/b c"]);
    assert_eq!(world.ids("two%20words%2F%C3%A9").await, ["a/b c"]);
    assert_eq!(world.dc1.passing("two words/é").await.unwrap(), ["a/b c"]);
    world.dc1.deregister("a/b c").await.unwrap();
    assert_eq!(world.ids("two%20words/%C3%A9").await, [""; 0]);
}

pub(crate) async fn the_agents_own_lists_differ_from_the_catalogs(world: World) {
    let it = Registration::new("a", "a-1", "127.0.0.1", 1).check(Check::ttl(Duration::from_secs(60)));
    world.register(it).await;
    let services = json!({ "a-1": {
        "ID": "a-1", "Service": "a", "Tags": [], "Meta": {}, "Port": 1, "Address": "127.0.0.1",
        "TaggedAddresses": {
            "lan_ipv4": { "Address": "127.0.0.1", "Port": 1 },
            "wan_ipv4": { "Address": "127.0.0.1", "Port": 1 },
        },
        "Weights": { "Passing": 1, "Warning": 1 }, "EnableTagOverride": false,
    } });
    assert_eq!(world.get("/v1/agent/services").await.json(), services);
    let checks = json!({ "service:a-1": {
        "Node": "dc1-s1", "CheckID": "service:a-1", "Name": "Service 'a' check", "Status": "critical",
        "Notes": "", "Output": "", "ServiceID": "a-1", "ServiceName": "a", "ServiceTags": [], "Type": "ttl",
        "Definition": {}, "CreateIndex": 0, "ModifyIndex": 0,
    } });
    assert_eq!(world.get("/v1/agent/checks").await.json(), checks);
}

pub(crate) async fn the_agent_tells_of_one_service_what_it_has_registered(world: World) {
    let it = Registration::new("a", "a/1", "127.0.0.1", 1).tag("x").tag("").meta("rack", "b").weight(3);
    world.register(it).await;
    world.register(Registration::new("b", "b-1", "", 0)).await;
    let wanted = [
        json!({
            "ID": "a/1", "Service": "a", "Tags": ["x", ""], "Meta": { "rack": "b" }, "Port": 1,
            "Address": "127.0.0.1",
            "TaggedAddresses": {
                "lan_ipv4": { "Address": "127.0.0.1", "Port": 1 },
                "wan_ipv4": { "Address": "127.0.0.1", "Port": 1 },
            },
            "Weights": { "Passing": 3, "Warning": 1 }, "EnableTagOverride": false,
        }),
        json!({
            "ID": "b-1", "Service": "b", "Tags": [], "Meta": {}, "Port": 0, "Address": "",
            "Weights": { "Passing": 1, "Warning": 1 }, "EnableTagOverride": false,
        }),
    ];
    let mut hashes = Vec::new();
    for wanted in wanted {
        let answer = world.get(&format!("/v1/agent/service/{}", wanted["ID"].as_str().unwrap())).await;
        let mut it = answer.json();
        let hash = it.as_object_mut().unwrap().remove("ContentHash").unwrap();
        assert_eq!(it, wanted);
        assert_eq!(answer.header("x-consul-contenthash"), hash.as_str());
        assert_eq!(answer.index(), None, "the agent answers for itself");
        hashes.push(hash);
    }
    assert_ne!(hashes[0], hashes[1]);
    for unknown in ["nobody", "consul", ""] {
        let answer = world.dc1.get(&format!("/v1/agent/service/{unknown}")).await.unwrap();
        assert_eq!((answer.status.as_u16(), answer.text()), (404, format!("unknown service ID: {unknown}")));
    }
}

pub(crate) async fn the_catalog_lists_services_with_their_tags(world: World) {
    world.register(Registration::new("a", "a-1", "", 0).tag("x").tag("y")).await;
    world.register(Registration::new("a", "a-2", "", 0).tag("y").tag("z")).await;
    let mut services = world.get("/v1/catalog/services").await.json();
    // In no order.
    services["a"].as_array_mut().unwrap().sort_by_key(ToString::to_string);
    assert_eq!(services, json!({ "a": ["x", "y", "z"], "consul": [] }));
}

pub(crate) async fn an_agent_tells_about_itself(world: World) {
    let about = world.get("/v1/agent/self").await.json();
    assert_eq!(about["Config"]["Datacenter"], "dc1");
    assert_eq!(about["Config"]["NodeName"], "dc1-s1");
    assert_eq!(about["Config"]["Server"], true);
    assert_eq!(about["Member"]["Name"], "dc1-s1");
    assert_eq!(about["Member"]["Tags"]["dc"], "dc1");
    assert!(about["Config"]["Version"].is_string());
    let leader = world.get("/v1/status/leader").await;
    assert!(leader.json().as_str().unwrap().starts_with("127.0.0.1:"));
    assert_eq!(leader.index(), None);
}

pub(crate) async fn weights_left_out_are_one_or_nothing(world: World) {
    world.register_json(&json!({ "Name": "a", "Weights": { "Passing": 4 } })).await;
    assert_eq!(world.health("a").await[0]["Service"]["Weights"], json!({ "Passing": 4, "Warning": 0 }));
    world.register_json(&json!({ "name": "a", "port": 3 })).await;
    let service = &world.health("a").await[0]["Service"];
    assert_eq!(service["Weights"], json!({ "Passing": 1, "Warning": 1 }));
    assert_eq!(service["Port"], 3, "fields are known in any case");
}

pub(crate) async fn reads_carry_consuls_headers(world: World) {
    for (query, consistency) in [("", "leader"), ("?stale", "stale"), ("?consistent", "consistent")] {
        let answer = world.get(&format!("/v1/health/service/nobody{query}")).await;
        assert_eq!(answer.header("x-consul-knownleader"), Some("true"));
        assert_eq!(answer.header("x-consul-lastcontact"), Some("0"));
        assert_eq!(answer.header("x-consul-effective-consistency"), Some(consistency));
        assert_eq!(answer.header("content-type"), Some("application/json"));
        assert_eq!(answer.json(), json!([]));
    }
    world.register(Registration::new("a", "a", "", 0).check(Check::tcp("127.0.0.1:1").id("x"))).await;
    let checks = own_checks(&world.health("a").await[0]);
    assert_eq!((checks[0]["CheckID"].as_str(), checks[0]["Type"].as_str()), (Some("x"), Some("tcp")));
}
