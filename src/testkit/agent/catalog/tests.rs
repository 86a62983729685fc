use super::*;

fn catalog() -> Catalog {
    let text = str::to_owned;
    Catalog::new(NodeRecord { id: text("id"), name: text("dc1-s1"), datacenter: text("dc1") })
}

fn register(catalog: &mut Catalog, body: &str) {
    let definition = Definition::read(body.as_bytes()).unwrap();
    catalog.register(definition, false, Instant::now());
}

fn status(catalog: &Catalog, name: &str) -> Value {
    catalog.health(name, &Choice::default())[0]["Checks"][1]["Status"].clone()
}

const A: Subject<'_> = Subject::Service("a");
const B: Subject<'_> = Subject::Service("b");

#[test]
fn an_index_moves_for_its_own_service_only() {
    let mut catalog = catalog();
    register(&mut catalog, r#"{"Name":"a","Check":{"TTL":"1s"}}"#);
    let index = catalog.index_of(A);
    register(&mut catalog, r#"{"Name":"b"}"#);
    catalog.deregister("b");
    assert_eq!(catalog.index_of(A), index);
    catalog.set("service:a", Health::Passing, "", Instant::now());
    assert!(catalog.index_of(A) > index);
}

#[test]
fn nothing_moves_without_a_change() {
    let mut catalog = catalog();
    let body = r#"{"Name":"a","Tags":["x"],"Check":{"TTL":"1s","Status":"passing"}}"#;
    register(&mut catalog, body);
    let index = catalog.index_of(A);
    register(&mut catalog, body);
    register(&mut catalog, r#"{"Name":"a","Tags":["x"],"Check":{"TTL":"1s","Status":"critical"}}"#);
    catalog.set("service:a", Health::Passing, "still", Instant::now());
    assert_eq!(catalog.index_of(A), index);
    assert_eq!(status(&catalog, "a"), "passing");
}

#[test]
fn the_index_of_an_unknown_service_is_never_0_and_moves_when_one_dies_out() {
    let mut catalog = catalog();
    let first = catalog.index_of(B);
    assert!(first > 0);
    register(&mut catalog, r#"{"Name":"a"}"#);
    let second = catalog.index_of(B);
    assert!(second > first, "nothing has died out yet");
    catalog.deregister("a");
    let third = catalog.index_of(B);
    assert!(third > second);
    register(&mut catalog, r#"{"Name":"a"}"#);
    assert_eq!(catalog.index_of(B), third);
}

#[test]
fn a_fallen_index_is_lower_than_any_before_and_grows_again() {
    let mut catalog = catalog();
    let fresh = catalog.index_of(A);
    register(&mut catalog, r#"{"Name":"a"}"#);
    catalog.fall();
    let fallen = catalog.index_of(A);
    assert!(0 < fallen && fallen < fresh);
    register(&mut catalog, r#"{"Name":"a","Tags":["x"]}"#);
    assert!(catalog.index_of(A) > fallen);
}

#[test]
fn a_check_id_belongs_to_the_service_that_named_it_last() {
    let mut catalog = catalog();
    register(&mut catalog, r#"{"Name":"a","Check":{"CheckID":"x","TTL":"1s"}}"#);
    let index = catalog.index_of(A);
    register(&mut catalog, r#"{"Name":"b","Check":{"CheckID":"x","TTL":"1s"}}"#);
    assert_eq!(catalog.health("a", &Choice::default())[0]["Checks"].as_array().unwrap().len(), 1);
    assert_eq!(catalog.health("b", &Choice::default())[0]["Checks"].as_array().unwrap().len(), 2);
    assert!(catalog.index_of(A) > index);
}

#[test]
fn a_service_that_stays_critical_is_overdue_after_a_minute_at_the_least() {
    let mut catalog = catalog();
    register(&mut catalog, r#"{"Name":"a","Check":{"TTL":"1s","DeregisterCriticalServiceAfter":"1s"}}"#);
    let start = Instant::now();
    assert!(catalog.overdue(start + Duration::from_secs(30)).is_empty());
    assert_eq!(catalog.overdue(start + Duration::from_secs(61)), ["a"]);
    catalog.set("service:a", Health::Passing, "", start);
    assert!(catalog.overdue(start + Duration::from_secs(61)).is_empty());
}
