//! What is refused, and in which words.

use serde_json::json;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::timeout,
};
use tonic_failover::testkit::Registration;

use super::world::{LONG, World};

pub(crate) async fn bad_parameters_are_named(world: World) {
    for (query, text) in [
        ("index=abc", "Invalid index"),
        ("index=-1", "Invalid index"),
        ("wait=abc", "Invalid wait time"),
        ("wait=1", "Invalid wait time"),
        ("passing=maybe", "Invalid value for ?passing"),
        ("stale&consistent", "Cannot specify ?stale with ?consistent, conflicting semantics."),
    ] {
        let answer = world.dc1.get(&format!("/v1/health/service/a?{query}")).await.unwrap();
        assert_eq!((answer.status.as_u16(), answer.text().as_str()), (400, text), "{query}");
        assert_eq!(answer.index(), None);
    }
    let unnamed = world.dc1.get("/v1/health/service/").await.unwrap();
    assert_eq!((unnamed.status.as_u16(), unnamed.text().as_str()), (400, "Missing service name"));
}

pub(crate) async fn bad_registrations_are_named(world: World) {
    let interval = "Invalid check: Interval must be > 0 for Script, HTTP, or TCP checks";
    let ttl = "Invalid check: TTL must be > 0 for TTL checks";
    for (body, text) in [
        ("", "Request decode failed: EOF"),
        ("{}", "Missing service name"),
        (r#"{"ID":"x"}"#, "Missing service name"),
        (r#"{"Nme":"x"}"#, r#"Request decode failed: json: unknown field "Nme""#),
        (r#"{"Name":"x","Check":{"H2PING":"a"}}"#, r#"Request decode failed: json: unknown field "H2PING""#),
        (r#"{"Name":"x","Check":{"ID":"a"}}"#, r#"Request decode failed: json: unknown field "ID""#),
        (
            r#"{"Name":"x","Port":"1"}"#,
            "Request decode failed: json: cannot unmarshal string into Go struct field",
        ),
        (
            r#"{"Name":"x","Tags":"t"}"#,
            "Request decode failed: json: cannot unmarshal string into Go struct field",
        ),
        (r#"{"Name":"x","Meta":{"a":1}}"#, "Request decode failed: json: cannot unmarshal number into"),
        (r#"{"Name":"x","Port":1.5}"#, "Request decode failed: json: cannot unmarshal number"),
        (
            r#"{"Name":"x","Meta":{"a b":"c"}}"#,
            "Invalid Service Meta: Couldn't load metadata pair ('a b', 'c')",
        ),
        (
            r#"{"Name":"x","Weights":{"Passing":0,"Warning":1}}"#,
            "Invalid Weights: Passing must be greater than 0",
        ),
        (r#"{"Name":"x","Weights":{"Passing":-1}}"#, "Invalid Weights: Passing must be greater than 0"),
        (
            r#"{"Name":"x","Check":{"TTL":"2"}}"#,
            r#"Request decode failed: time: missing unit in duration "2""#,
        ),
        (
            r#"{"Name":"x","Check":{"TTL":"1x"}}"#,
            r#"Request decode failed: time: unknown unit "x" in duration"#,
        ),
        (r#"{"Name":"x","Check":{"TTL":"abc"}}"#, "Request decode failed: time: invalid duration"),
        (r#"{"Name":"x","Check":{"TTL":""}}"#, "Request decode failed: time: invalid duration"),
        (r#"{"Name":"x","Check":{"TTL":"-1s"}}"#, ttl),
        (r#"{"Name":"x","Check":{"TTL":"0s","Name":"a"}}"#, ttl),
        (r#"{"Name":"x","Check":{"Name":"a"}}"#, ttl),
        (r#"{"Name":"x","Checks":[{}]}"#, ttl),
        (r#"{"Name":"x","Check":{"TCP":"127.0.0.1:1"}}"#, interval),
        (r#"{"Name":"x","Check":{"GRPC":"127.0.0.1:1","Interval":"0s"}}"#, interval),
        (
            r#"{"Name":"x","Check":{"TCP":"127.0.0.1:1","Interval":"1s","TTL":"1s"}}"#,
            "Invalid check: Interval and TTL cannot both be specified",
        ),
        (
            r#"{"Name":"x","Check":{"TTL":"1s","Status":"well"}}"#,
            "Status for checks must 'passing', 'warning', 'critical'",
        ),
    ] {
        let answer = world.dc1.put("/v1/agent/service/register", body).await.unwrap();
        assert_eq!(answer.status, 400, "{body}: {}", answer.text());
        assert!(answer.text().starts_with(text), "{body}: {}", answer.text());
    }
    for body in ["rubbish", "[]", "{", r#"{"Name":"x""#] {
        let answer = world.dc1.put("/v1/agent/service/register", body).await.unwrap();
        assert_eq!(answer.status, 400, "{body}");
        assert!(answer.text().starts_with("Request decode failed: "), "{body}: {}", answer.text());
    }
    assert_eq!(world.get("/v1/agent/services").await.json(), json!({}));
}

pub(crate) async fn odd_registrations_are_taken(world: World) {
    for body in [
        r#"{"Name":"x"} and more"#,
        r#"{"Name":"x","Meta":null,"Tags":null,"Check":null,"Checks":null,"Port":null,"Weights":null}"#,
        r#"{"Name":"x","Check":{}}"#,
        r#"{"Name":"x","Check":{"TTL":"0s"}}"#,
        r#"{"Name":"x","Check":{"TTL":2000000000}}"#,
        r#"{"Name":"x","Check":{"TTL":"1m1.5s","deregister_critical_service_after":"1m"}}"#,
        r#"{"NAME":"x","tagged_addresses":{"lan":{"address":"10.0.0.1","port":4}}}"#,
        r#"{"Name":"x","Check":{"TCP":"127.0.0.1:1","Interval":"1ms","SuccessBeforePassing":2,"FailuresBeforeCritical":2}}"#,
    ] {
        let answer = world.dc1.put("/v1/agent/service/register", body).await.unwrap();
        assert_eq!((answer.status.as_u16(), answer.text().as_str()), (200, ""), "{body}");
    }
    assert_eq!(world.ids("x").await, ["x"]);
}

pub(crate) async fn bad_maintenance_is_named(world: World) {
    world.register(Registration::new("s", "a", "", 0)).await;
    for (path, status, text) in [
        ("a", 400, "Missing value for enable"),
        ("a?enable=perhaps", 400, r#"Invalid value for enable: "perhaps""#),
        ("nobody?enable=true", 404, r#"No service registered with ID "nobody""#),
        ("?enable=true", 400, "Missing service ID"),
    ] {
        let answer = world.dc1.put(&format!("/v1/agent/service/maintenance/{path}"), "").await.unwrap();
        assert_eq!((answer.status.as_u16(), answer.text().as_str()), (status, text), "{path}");
    }
    assert!(world.dc1.maintenance("nobody", false).await.is_err());
}

pub(crate) async fn other_methods_and_paths_are_refused(world: World) {
    assert_eq!(world.dc1.get("/v1/no/such/path").await.unwrap().status, 404);
    for path in ["/v1/agent/service/register", "/v1/agent/check/pass/x"] {
        let answer = world.dc1.get(path).await.unwrap();
        assert_eq!(answer.status, 405, "{path}");
        assert!(answer.header("allow").unwrap().contains("PUT"));
    }
    assert_eq!(world.dc1.put("/v1/health/service/a", "").await.unwrap().status, 405);
}

/// Sends a request on a connection of its own and says whether it was answered.
async fn is_answered(stream: &mut TcpStream) -> bool {
    let request = b"GET /v1/status/leader HTTP/1.1\r\nHost: agent\r\n\r\n";
    if stream.write_all(request).await.is_err() {
        return false;
    }
    let mut byte = [0];
    let read = timeout(LONG, stream.read(&mut byte)).await.expect("an answer or an end");
    read.is_ok_and(|count| count > 0)
}

pub(crate) async fn the_two_hundred_and_first_connection_is_reset(world: World) {
    let address = world.dc1.url().trim_start_matches("http://").to_owned();
    // Connections that were closed before count until the agent has seen it, so
    // they are replaced until all of them hold.
    let fill = async {
        let mut open = Vec::new();
        while open.len() < 200 {
            let mut stream = TcpStream::connect(&address).await.unwrap();
            if is_answered(&mut stream).await {
                open.push(stream);
            }
        }
        open
    };
    let open = timeout(LONG, fill).await.expect("200 fit");
    let mut more = TcpStream::connect(&address).await.unwrap();
    assert!(!is_answered(&mut more).await);
    drop(open);
    let freed = async { while !is_answered(&mut TcpStream::connect(&address).await.unwrap()).await {} };
    timeout(LONG, freed).await.expect("there is room again");
}
