//! Which instances an answer holds.

use std::time::Duration;

use serde_json::json;
use tonic_failover::testkit::{Check, Registration};

use super::world::{World, own_checks};

const NONE: [&str; 0] = [];

pub(crate) async fn passing_drops_warning_and_critical(world: World) {
    for id in ["a", "b", "c"] {
        world.register(Registration::new("s", id, "", 0).check(Check::ttl(Duration::from_secs(60)))).await;
    }
    world.dc1.pass("a").await.unwrap();
    world.dc1.warn("b").await.unwrap();
    assert_eq!(world.ids("s").await, ["a", "b", "c"]);
    for query in ["passing", "passing=", "passing=1", "passing=true", "passing=T"] {
        assert_eq!(world.ids(&format!("s?{query}")).await, ["a"], "{query}");
    }
    for query in ["passing=0", "passing=false"] {
        assert_eq!(world.ids(&format!("s?{query}")).await, ["a", "b", "c"], "{query}");
    }
    assert_eq!(world.dc1.passing("s").await.unwrap(), ["a"]);
    world.dc1.fail("a").await.unwrap();
    assert_eq!(world.ids("s?passing").await, NONE);
}

pub(crate) async fn maintenance_is_a_critical_check(world: World) {
    world.register(Registration::new("s", "a", "", 0)).await;
    let index = world.index("s").await;
    let path = "/v1/agent/service/maintenance/a?enable=true&reason=repairs";
    assert_eq!(world.dc1.put(path, "").await.unwrap().status, 200);
    assert_eq!(world.ids("s?passing").await, NONE);
    assert!(world.index("s").await > index);
    let check = &own_checks(&world.health("s").await[0])[0];
    assert_eq!(check["CheckID"], "_service_maintenance:a");
    assert_eq!(check["Name"], "Service Maintenance Mode");
    assert_eq!((&check["Notes"], &check["Type"]), (&json!("repairs"), &json!("maintenance")));
    // Again, and registering again, change nothing.
    let index = world.index("s").await;
    world.dc1.maintenance("a", true).await.unwrap();
    world.register(Registration::new("s", "a", "", 0)).await;
    assert_eq!(world.ids("s?passing").await, NONE);
    assert_eq!(world.index("s").await, index);
    world.dc1.maintenance("a", false).await.unwrap();
    assert_eq!(world.ids("s?passing").await, ["a"]);
    world.dc1.maintenance("a", false).await.unwrap();
    world.dc1.maintenance("a", true).await.unwrap();
    let notes = own_checks(&world.health("s").await[0])[0]["Notes"].clone();
    assert!(
        notes.as_str().unwrap().starts_with("Maintenance mode is enabled for this service, but no reason")
    );
}

pub(crate) async fn all_tags_must_be_there_in_any_case(world: World) {
    world.register(Registration::new("s", "a", "", 0).tag("V1").tag("blue")).await;
    world.register(Registration::new("s", "b", "", 0).tag("v1")).await;
    assert_eq!(world.ids("s?tag=v1").await, ["a", "b"]);
    assert_eq!(world.ids("s?tag=V1&tag=BLUE").await, ["a"]);
    assert_eq!(world.ids("s?tag=v1&tag=green").await, NONE);
    assert_eq!(world.ids("s?tag=").await, NONE);
    world.register(Registration::new("s", "c", "", 0).tag("")).await;
    assert_eq!(world.ids("s?tag=").await, ["c"], "an empty tag is a tag");
}

/// The question with a filter.
fn filtered(filter: &str) -> String {
    let filter: String = url::form_urlencoded::byte_serialize(filter.as_bytes()).collect();
    format!("s?filter={filter}")
}

pub(crate) async fn filters_choose(world: World) {
    let one =
        Registration::new("s", "a", "", 0).tag("v-1").tag("2").tag("x.y").meta("k", "v-1").meta("n", "1");
    world.register(one).await;
    world.register(Registration::new("s", "b", "", 0).tag("V-1").meta("k", "w")).await;
    for (filter, wanted) in [
        (r#"Service.Meta["k"] == "v-1""#, &["a"][..]),
        ("Service.Meta.k==`v-1`", &["a"]),
        ("Service.Meta.k == w", &["b"]),
        ("Service.Meta.n == 1", &["a"]),
        (r#"Service.Meta["nope"] == x"#, &[]),
        ("2 in Service.Tags", &["a"]),
        ("x.y in Service.Tags", &["a"]),
        (r#""V-1" in Service.Tags"#, &["b"]),
        ("Service.Tags contains 2", &["a"]),
        (r#"Service.Tags contains "x.y" and Service.Meta["k"] == "v-1" and 2 in Service.Tags"#, &["a"]),
        (r#"Service.Tags contains "x.y" and Service.Meta["k"] == w"#, &[]),
        ("", &["a", "b"]),
    ] {
        assert_eq!(world.ids(&filtered(filter)).await, wanted, "{filter}");
    }
}

pub(crate) async fn bad_filters_are_refused_by_the_servers(world: World) {
    for filter in [
        "xyz",
        " ",
        "Service.Nope == x",
        r#"Service.Meta["k"] == v-1"#,
        r#"Service.Meta["k"] == v and"#,
        r#"Service.Meta["k"]=="v"and"2" in Service.Tags"#,
        r#"Service.Meta["k"]=="v" AND "2" in Service.Tags"#,
        "service.tags contains 2",
        "Service.Meta[k] == v",
        "2 IN Service.Tags",
        "2in Service.Tags",
        "Service.Tags contains 01",
        "_x in Service.Tags",
    ] {
        let answer = world.dc1.get(&format!("/v1/health/service/{}", filtered(filter))).await.unwrap();
        assert_eq!(answer.status, 500, "{filter}");
        assert!(answer.text().starts_with("Failed to create boolean expression evaluator: "), "{filter}");
        assert_eq!(answer.index(), Some(1), "an index that means nothing");
        assert_eq!(answer.header("x-consul-knownleader"), Some("false"));
    }
}

pub(crate) async fn node_metadata_chooses(world: World) {
    world.register(Registration::new("s", "a", "", 0)).await;
    assert_eq!(world.ids("s?node-meta=consul-network-segment:").await, ["a"]);
    assert_eq!(world.ids("s?node-meta=no:such").await, NONE);
    assert_eq!(world.ids("s?node-meta=no").await, NONE);
}

pub(crate) async fn near_is_taken(world: World) {
    world.register(Registration::new("s", "a", "", 0)).await;
    assert_eq!(world.ids("s?near=_agent").await, ["a"]);
    assert_eq!(world.ids("s?near=nobody").await, ["a"]);
}
