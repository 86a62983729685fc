use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::consul::secrets::Secrets;

fn read(body: &[u8], wanted: Wanted<'_>) -> Result<(Snapshot, Vec<SkippedEntry>), RegistryError> {
    let headers = http02::HeaderMap::new();
    super::read(&Answer::new(200, headers, body.to_vec(), true, Secrets::default()), wanted)
}

const NEAR: Wanted<'_> = Wanted { warning: false, meta: &[], from_afar: false };
const AFAR: Wanted<'_> = Wanted { from_afar: true, ..NEAR };
const WARNING: Wanted<'_> = Wanted { warning: true, ..NEAR };

/// An entry as Consul 1.8.7 gives it.
fn entry(id: &str, address: &str, port: i64) -> Value {
    json!({
        "Node": {
            "ID": "5f2a6f1c-0b2b-9a4f-6f0e-1c7a8b9d0e1f", "Node": "n1", "Address": "10.0.0.1", "Datacenter": "dc1",
            "TaggedAddresses": {"lan": "10.0.0.1", "lan_ipv4": "10.0.0.1", "wan": "192.0.2.1", "wan_ipv4": "192.0.2.1"},
            "Meta": {"consul-network-segment": ""}, "CreateIndex": 9, "ModifyIndex": 10
        },
        "Service": {
            "ID": id, "Service": "counter", "Tags": [], "Address": address,
            "TaggedAddresses": {"lan_ipv4": {"Address": address, "Port": port}},
            "Meta": null, "Port": port, "Weights": {"Passing": 1, "Warning": 1}, "EnableTagOverride": false,
            "Proxy": {"MeshGateway": {}, "Expose": {}}, "Connect": {}, "CreateIndex": 12, "ModifyIndex": 12
        },
        "Checks": [check("serfHealth", "passing"), check(&format!("service:{id}"), "passing")]
    })
}

fn check(id: &str, status: &str) -> Value {
    json!({"Node": "n1", "CheckID": id, "Name": id, "Status": status, "Notes": "", "Output": "", "Definition": {}})
}

fn with(mut entry: Value, pointer: &str, value: Value) -> Value {
    *entry.pointer_mut(pointer).expect("the entry has this part") = value;
    entry
}

fn take(entries: Vec<Value>, wanted: Wanted<'_>) -> (Vec<Instance>, Vec<SkippedEntry>) {
    let body = serde_json::to_vec(&entries).unwrap();
    let (snapshot, skipped) = read(&body, wanted).unwrap();
    (snapshot.instances.iter().map(|it| (**it).clone()).collect(), skipped)
}

fn authorities(entries: Vec<Value>, wanted: Wanted<'_>) -> Vec<String> {
    take(entries, wanted).0.iter().map(|it| it.id.to_string()).collect()
}

#[test]
fn an_ordinary_entry_keeps_all_that_is_known_of_it() {
    let mut one = entry("counter-1", "10.0.0.7", 50051);
    one["Service"]["Tags"] = json!(["v1", "", "v1", "primary"]);
    one["Service"]["Meta"] = json!({"zone": "a"});
    one["Service"]["Weights"] = json!({"Passing": 10, "Warning": 2});
    let (instances, skipped) = take(vec![one], NEAR);
    assert_eq!(skipped, []);
    let [instance] = &instances[..] else { panic!("{instances:?}") };
    assert_eq!(instance.id.authority(), "10.0.0.7:50051");
    assert_eq!((&*instance.name, &*instance.datacenter, &*instance.node), ("counter-1", "dc1", "n1"));
    assert_eq!(instance.tags, ["v1", "primary"]);
    assert_eq!(instance.meta["zone"], "a");
    assert_eq!((instance.weight, instance.warning), (10, false));
}

#[test]
fn without_an_address_of_its_own_it_is_at_its_nodes() {
    assert_eq!(authorities(vec![entry("a", "", 80)], NEAR), ["10.0.0.1:80"]);
    let no_node = with(entry("a", "", 80), "/Node/Address", json!(""));
    assert_eq!(take(vec![no_node], NEAR).1[0].reason, SkipReason::NoAddress);
}

#[test]
fn from_afar_the_wan_address_counts_and_an_address_of_the_service_goes_before_one_of_the_node() {
    let wan = with(
        entry("a", "10.0.0.7", 80),
        "/Service/TaggedAddresses",
        json!({"wan": {"Address": "198.51.100.7", "Port": 8080}}),
    );
    assert_eq!(authorities(vec![wan.clone()], NEAR), ["10.0.0.7:80"]);
    assert_eq!(authorities(vec![wan.clone()], AFAR), ["198.51.100.7:8080"]);
    let portless = with(wan, "/Service/TaggedAddresses/wan/Port", json!(0));
    assert_eq!(authorities(vec![portless], AFAR), ["198.51.100.7:80"]);
    assert_eq!(authorities(vec![entry("a", "10.0.0.7", 80)], AFAR), ["10.0.0.7:80"]);
    assert_eq!(authorities(vec![entry("a", "", 80)], AFAR), ["192.0.2.1:80"]);
}

#[test]
fn ipv6_gets_brackets_and_names_stay() {
    let entries =
        ["2001:db8::7", "[2001:db8::8]", "backend-a", "a_b.example."].map(|it| entry(it, it, 80)).to_vec();
    assert_eq!(
        authorities(entries, NEAR),
        ["[2001:db8::7]:80", "[2001:db8::8]:80", "backend-a:80", "a_b.example.:80"]
    );
}

#[test]
fn impossible_ports_and_addresses_are_skipped_and_told() {
    for port in [0, -1, 70_000] {
        let (instances, skipped) = take(vec![entry("a", "10.0.0.7", port), entry("b", "10.0.0.8", 80)], NEAR);
        assert_eq!(instances.len(), 1);
        assert_eq!((&*skipped[0].id, &*skipped[0].node), ("a", "n1"));
        assert_eq!(skipped[0].reason, SkipReason::Port(port));
    }
    for address in ["0.0.0.0", "::", "a b", "http://a", "a/b", "é", "a..b", ".", "user@host", "fe80::1%eth0"]
    {
        let skipped = take(vec![entry("a", address, 80)], NEAR).1;
        assert_eq!(skipped[0].reason, SkipReason::Address(address.to_owned()), "{address}");
    }
}

#[test]
fn a_bad_entry_costs_only_itself() {
    let good = || entry("good", "10.0.0.8", 80);
    for bad in [
        json!(null),
        json!(7),
        json!({}),
        json!({"Node": null, "Service": {"ID": "a"}}),
        with(entry("a", "x", 1), "/Service/Port", json!("80")),
        with(entry("a", "x", 1), "/Service/Tags", json!("v1")),
        with(entry("a", "x", 1), "/Service/Meta", json!({"a": 1})),
        with(entry("a", "x", 1), "/Checks", json!([7])),
    ] {
        let (instances, skipped) = take(vec![bad.clone(), good()], NEAR);
        assert_eq!(instances.len(), 1, "{bad}");
        assert!(matches!(skipped[0].reason, SkipReason::NotUnderstood(_)), "{bad}");
    }
}

#[test]
fn what_is_missing_has_its_default() {
    let (instances, skipped) = take(
        vec![json!({"Node": {"Address": "10.0.0.1"}, "Service": {"Service": "counter", "Port": 80}})],
        NEAR,
    );
    assert_eq!((instances.len(), skipped.len()), (1, 0));
    assert_eq!((&*instances[0].name, instances[0].weight), ("counter", 1));
}

#[test]
fn the_worst_check_decides_the_nodes_included() {
    let states = |checks: Value| with(entry("a", "10.0.0.7", 80), "/Checks", checks);
    let critical = states(json!([check("serfHealth", "critical"), check("service:a", "passing")]));
    let warning = states(json!([check("serfHealth", "passing"), check("service:a", "warning")]));
    let node_down = states(json!([check("_node_maintenance", "critical")]));
    let down = states(json!([check("_service_maintenance:a", "passing")]));
    let strange = states(json!([check("x", "splendid")]));
    for never in [critical, node_down, down, strange] {
        assert_eq!(authorities(vec![never.clone()], WARNING), [""; 0], "{never}");
    }
    assert_eq!(authorities(vec![warning.clone()], NEAR), [""; 0]);
    let weighed = with(warning, "/Service/Weights", json!({"Passing": 10, "Warning": 0}));
    let instance = &take(vec![weighed], WARNING).0[0];
    assert_eq!((instance.warning, instance.weight), (true, 1));
    assert_eq!(authorities(vec![states(json!(null))], NEAR).len(), 1);
}

#[test]
fn weights_stay_within_what_consul_takes() {
    for (given, taken) in [(json!(-4), 1), (json!(0), 1), (json!(7), 7), (json!(9_000_000), 65_535)] {
        let one = with(entry("a", "10.0.0.7", 80), "/Service/Weights/Passing", given);
        assert_eq!(take(vec![one], NEAR).0[0].weight, taken);
    }
}

#[test]
fn two_entries_with_one_address_are_one_instance_the_healthier_in_the_place_of_the_first() {
    let warning = with(entry("a", "10.0.0.7", 80), "/Checks/1/Status", json!("warning"));
    let entries =
        vec![warning, entry("b", "10.0.0.8", 80), entry("c", "10.0.0.7", 80), entry("d", "10.0.0.7", 80)];
    let names: Vec<_> = take(entries, WARNING).0.into_iter().map(|it| it.name).collect();
    assert_eq!(names, ["c", "b"]);
}

#[test]
fn metadata_is_compared_exactly_and_absence_is_no_match() {
    let meta = [("zone".to_owned(), "a".to_owned())];
    let wanted = Wanted { meta: &meta, ..NEAR };
    let entries = vec![
        with(entry("yes", "10.0.0.1", 80), "/Service/Meta", json!({"zone": "a", "x": "y"})),
        with(entry("no", "10.0.0.2", 80), "/Service/Meta", json!({"zone": "A"})),
        entry("none", "10.0.0.3", 80),
    ];
    assert_eq!(authorities(entries, wanted), ["10.0.0.1:80"]);
}

#[test]
fn a_body_that_is_no_list_is_an_error() {
    for bad in ["", "null", "{}", "[", "[{}", "[] x", "<html>", "7", "\"[]\""] {
        assert!(read(bad.as_bytes(), NEAR).is_err(), "{bad}");
    }
    assert!(read(&b"[".repeat(100_000), NEAR).is_err());
    assert!(read(b"[\xff]", NEAR).is_err());
}

#[test]
fn a_list_without_a_single_entry_is_an_error_and_no_empty_list() {
    for bad in [
        r#"[{"error":"upstream unavailable","code":503}]"#,
        "[null]",
        "[[]]",
        r#"["dc1","dc2"]"#,
        "[1,2]",
        r#"[{"Node":{},"Service":[]}]"#,
    ] {
        assert!(read(bad.as_bytes(), NEAR).is_err(), "{bad}");
    }
    assert!(read(b"[]", NEAR).is_ok());
    let (instances, skipped) = take(vec![json!({"Service": {"ID": "a"}}), json!(null)], NEAR);
    assert_eq!((instances.len(), skipped.len()), (0, 2), "one entry is a list of entries, if a bad one");
}

fn any_json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f32>().prop_map(Value::from),
        ".{0,12}".prop_map(Value::from),
        Just(json!("passing")),
        Just(json!("10.0.0.9")),
    ];
    let key = prop::sample::select(vec![
        "Node",
        "Service",
        "Checks",
        "ID",
        "Address",
        "Port",
        "Tags",
        "Meta",
        "Weights",
        "Passing",
        "wan",
        "Status",
        "TaggedAddresses",
        "other",
    ]);
    leaf.prop_recursive(4, 48, 6, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::btree_map(key.clone().prop_map(str::to_owned), inner, 0..6)
                .prop_map(|it| Value::Object(it.into_iter().collect())),
        ]
    })
}

proptest! {
    #[test]
    fn any_bytes_are_read_or_refused(body in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = read(&body, NEAR);
    }

    #[test]
    fn strange_entries_never_hide_an_ordinary_one(
        mut strange in prop::collection::vec(any_json(), 0..5),
        place in any::<prop::sample::Index>(),
        warning: bool,
        from_afar: bool,
    ) {
        strange.insert(place.index(strange.len() + 1), entry("good", "10.1.2.3", 4567));
        let (instances, _) = take(strange, Wanted { warning, meta: &[], from_afar });
        prop_assert!(instances.iter().any(|it| it.name == "good"));
    }

    #[test]
    fn one_part_changed_at_random_gives_an_instance_with_a_usable_address_or_none(
        part in prop::sample::select(vec![
            "/Node", "/Node/Address", "/Node/Datacenter", "/Node/TaggedAddresses", "/Service", "/Service/ID",
            "/Service/Address", "/Service/Port", "/Service/Tags", "/Service/Meta", "/Service/Weights",
            "/Service/Weights/Passing", "/Service/TaggedAddresses", "/Checks", "/Checks/0", "/Checks/0/Status",
        ]),
        value in any_json(),
        from_afar: bool,
    ) {
        let changed = with(entry("a", "10.0.0.7", 80), part, value);
        let body = json!([changed]).to_string();
        let wanted = Wanted { warning: true, meta: &[], from_afar };
        let shaped = changed["Service"].is_object();
        prop_assert_eq!(read(body.as_bytes(), wanted).is_ok(), shaped);
        if !shaped {
            return Ok(());
        }
        let (instances, skipped) = take(vec![changed], wanted);
        prop_assert!(instances.len() + skipped.len() <= 1);
        for instance in instances {
            let uri = format!("http://{}/", instance.id).parse::<http::Uri>();
            prop_assert!(uri.is_ok_and(|it| it.port_u16().is_some()), "{}", instance.id);
            prop_assert!(instance.weight >= 1);
        }
    }
}
