//! Keys and transactions: what leases are made of.

use std::time::Duration;

use serde_json::{Value, json};
use tonic_failover::testkit::Answer;

use super::world::{SHORT, World, answer, is_waiting};

async fn put(world: &World, key_and_query: &str, value: impl Into<Vec<u8>>) -> (u16, String) {
    let answer = world.dc1.put(&format!("/v1/kv/{key_and_query}"), value.into()).await.unwrap();
    (answer.status.as_u16(), answer.text().trim_end().to_owned())
}

async fn get(world: &World, key_and_query: &str) -> Answer {
    world.dc1.get(&format!("/v1/kv/{key_and_query}")).await.unwrap()
}

async fn delete(world: &World, key_and_query: &str) -> (u16, String) {
    let answer = world.dc1.delete(&format!("/v1/kv/{key_and_query}")).await.unwrap();
    (answer.status.as_u16(), answer.text().trim_end().to_owned())
}

async fn txn(world: &World, operations: Value) -> (u16, Value) {
    let answer = world.dc1.put("/v1/txn", operations.to_string()).await.unwrap();
    assert_eq!(answer.index(), None, "no transaction has an index");
    (answer.status.as_u16(), answer.json())
}

fn kv(verb: &str, key: &str, more: Value) -> Value {
    let mut operation = json!({ "Verb": verb, "Key": key });
    for (name, value) in more.as_object().unwrap() {
        operation[name] = value.clone();
    }
    json!({ "KV": operation })
}

/// When a key was last written.
async fn index(world: &World, key: &str) -> u64 {
    get(world, key).await.json()[0]["ModifyIndex"].as_u64().unwrap()
}

fn ok() -> (u16, String) {
    (200, "true".to_owned())
}

fn no() -> (u16, String) {
    (200, "false".to_owned())
}

/// What stood against a transaction.
fn whats(body: &Value) -> Vec<(u64, String)> {
    let errors = body["Errors"].as_array().unwrap().iter();
    errors.map(|it| (it["OpIndex"].as_u64().unwrap(), it["What"].as_str().unwrap().to_owned())).collect()
}

pub(crate) async fn a_key_is_read_as_it_was_written(world: World) {
    let missing = get(&world, "a").await;
    assert_eq!((missing.status.as_u16(), missing.text().as_str()), (404, ""));
    assert!(missing.index().is_some_and(|it| it > 0));
    for header in ["x-consul-knownleader", "x-consul-lastcontact"] {
        assert!(missing.header(header).is_some(), "{header}");
    }
    assert_eq!(put(&world, "a?flags=18446744073709551615", "v\u{e9}\n").await, ok());
    let answer = get(&world, "a").await;
    let at = answer.json()[0]["ModifyIndex"].as_u64().unwrap();
    assert_eq!(answer.index(), Some(at));
    let entry = json!({
        "LockIndex": 0, "Key": "a", "Flags": u64::MAX, "Value": "dsOpCg==", "CreateIndex": at, "ModifyIndex": at,
    });
    assert_eq!(answer.json(), json!([entry]));
    let raw = get(&world, "a?raw").await;
    assert_eq!(&raw.body[..], "v\u{e9}\n".as_bytes());
    assert_eq!(put(&world, "a", "").await, ok());
    let empty = get(&world, "a").await.json();
    assert_eq!((&empty[0]["Value"], &empty[0]["Flags"]), (&Value::Null, &json!(0)));
    assert_eq!(empty[0]["CreateIndex"], json!(at));
    for key in ["a%20b", "%C3%A9", "x/y/", "50%25%3F%23", "a+b"] {
        assert_eq!(put(&world, key, "1").await, ok(), "{key}");
        assert_eq!(get(&world, key).await.json().as_array().unwrap().len(), 1, "{key}");
    }
}

pub(crate) async fn the_very_same_once_more_moves_no_index(world: World) {
    put(&world, "a?flags=1", "1").await;
    let before = index(&world, "a").await;
    put(&world, "b", "1").await;
    put(&world, "a?flags=1", "1").await;
    assert_eq!(index(&world, "a").await, before);
    let (status, body) = txn(&world, json!([kv("set", "a", json!({ "Flags": 1, "Value": "MQ==" }))])).await;
    assert_eq!((status, &body["Results"][0]["KV"]["ModifyIndex"]), (200, &json!(before)));
    put(&world, "a?flags=2", "1").await;
    assert!(index(&world, "a").await > before);
}

pub(crate) async fn a_write_may_go_by_an_index(world: World) {
    assert_eq!(put(&world, "a?cas=7", "1").await, no(), "there is none");
    assert_eq!(put(&world, "a?cas=0", "1").await, ok());
    assert_eq!(put(&world, "a?cas=0", "2").await, no(), "there is one");
    let at = index(&world, "a").await;
    assert_eq!(put(&world, &format!("a?cas={}", at + 1), "2").await, no());
    assert_eq!(put(&world, &format!("a?cas={at}"), "2").await, ok());
    assert_eq!(delete(&world, &format!("a?cas={at}")).await, no());
    let at = index(&world, "a").await;
    assert_eq!(delete(&world, &format!("a?cas={at}")).await, ok());
    assert_eq!(delete(&world, &format!("a?cas={at}")).await, ok(), "it is gone");
    assert_eq!(get(&world, "a").await.status, 404);
}

pub(crate) async fn keys_are_listed_and_deleted_by_how_they_begin(world: World) {
    for key in ["p/a", "p/b", "p", "q", "pq"] {
        put(&world, key, key).await;
    }
    let keys = |answer: &Answer| -> Vec<String> {
        let json = answer.json();
        json.as_array().unwrap().iter().map(|it| it["Key"].as_str().unwrap().to_owned()).collect()
    };
    let below = get(&world, "p/?recurse").await;
    assert_eq!(keys(&below), ["p/a", "p/b"]);
    assert_eq!(below.index(), Some(index(&world, "p/b").await));
    assert_eq!(keys(&get(&world, "p?recurse").await), ["p", "p/a", "p/b", "pq"]);
    assert_eq!(keys(&get(&world, "?recurse").await).len(), 5);
    assert_eq!(get(&world, "p?keys").await.json(), json!(["p", "p/a", "p/b", "pq"]));
    assert_eq!(delete(&world, "p/a").await, ok());
    assert_eq!(delete(&world, "p/a").await, ok(), "one that is not there");
    let gone = get(&world, "p/?recurse").await;
    assert_eq!(keys(&gone), ["p/b"]);
    assert!(gone.index() > below.index());
    assert_eq!(delete(&world, "p/?recurse").await, ok());
    let none = get(&world, "p/?recurse").await;
    assert_eq!((none.status.as_u16(), none.text().as_str()), (404, ""));
    assert!(none.index() > gone.index());
    assert_eq!(get(&world, "p/?keys").await.status, 404);
    assert_eq!(keys(&get(&world, "?recurse").await), ["p", "pq", "q"]);
}

pub(crate) async fn a_question_about_keys_waits_for_its_own(world: World) {
    put(&world, "p/a", "1").await;
    put(&world, "q", "1").await;
    let below = get(&world, "p/?recurse").await.index().unwrap();
    let mut one = world.ask(&format!("/v1/kv/p/a?index={below}&wait=15s"));
    let mut all = world.ask(&format!("/v1/kv/p/?recurse&index={below}&wait=15s"));
    put(&world, "q", "2").await;
    put(&world, "p/a", "1").await;
    assert!(is_waiting(&mut one).await && is_waiting(&mut all).await, "nothing of theirs has changed");
    put(&world, "p/b", "1").await;
    let all = answer(all).await;
    assert_eq!(all.json().as_array().unwrap().len(), 2);
    assert!(is_waiting(&mut one).await);
    put(&world, "p/a", "2").await;
    let one = answer(one).await;
    assert_eq!(one.index(), Some(index(&world, "p/a").await));
    // What is deleted wakes as well, and so does what comes.
    let mut gone = world.ask(&format!("/v1/kv/p/a?index={}&wait=15s", one.index().unwrap()));
    assert!(is_waiting(&mut gone).await);
    delete(&world, "p/a").await;
    let gone = answer(gone).await;
    assert_eq!(gone.status, 404);
    assert!(gone.index() > one.index());
    let mut back = world.ask(&format!("/v1/kv/p/a?index={}&wait=15s", gone.index().unwrap()));
    assert!(is_waiting(&mut back).await);
    put(&world, "p/a", "3").await;
    assert_eq!(answer(back).await.status, 200);
    // A wait that ends brings the same once more.
    let now = get(&world, "p/a").await;
    let same = world.ask(&format!("/v1/kv/p/a?index={}&wait={}ms", now.index().unwrap(), SHORT.as_millis()));
    let same = answer(same).await;
    assert_eq!((same.index(), same.json()), (now.index(), now.json()));
}

pub(crate) async fn what_keys_refuse_is_named(world: World) {
    let missing = (400, "Missing key name".to_owned());
    assert_eq!(put(&world, "", "1").await, missing);
    assert_eq!(delete(&world, "").await, missing);
    assert_eq!(get(&world, "").await.status, 400);
    let parse = |text: &str| (500, format!("strconv.ParseUint: parsing {text:?}: invalid syntax"));
    assert_eq!(put(&world, "a?cas=x", "1").await, parse("x"));
    assert_eq!(put(&world, "a?flags=-1", "1").await, parse("-1"));
    assert_eq!(put(&world, "a?cas", "1").await, parse(""));
    assert_eq!(
        put(&world, "a?cas=1&acquire=x", "1").await,
        (400, "Conflicting flags: acquire=x&cas=1".to_owned())
    );
    assert_eq!(
        delete(&world, "a?cas=1&recurse").await,
        (400, "Conflicting flags: cas=1&recurse=".to_owned())
    );
    assert_eq!(put(&world, "a", vec![b'x'; 512 << 10]).await, ok());
    let (status, text) = put(&world, "a", vec![b'x'; (512 << 10) + 1]).await;
    assert_eq!(status, 413);
    assert_eq!(
        text,
        "Request body(524289 bytes) too large, max size: 524288 bytes. See \
         https://www.consul.io/docs/agent/options.html#kv_max_value_size."
    );
    assert_eq!(world.dc1.post("/v1/kv/a", "").await.unwrap().status, 405);
    assert_eq!(world.dc1.get("/v1/txn").await.unwrap().status, 405);
}

pub(crate) async fn a_transaction_is_done_as_a_whole_or_not_at_all(world: World) {
    put(&world, "lease?flags=3", "holder").await;
    let at = index(&world, "lease").await;
    let fence = kv("check-index", "lease", json!({ "Index": at }));
    let write = |index: u64| kv("cas", "data", json!({ "Index": index, "Value": "MQ==", "Flags": 3 }));
    let (status, body) = txn(&world, json!([fence, write(0)])).await;
    assert_eq!((status, &body["Errors"]), (200, &Value::Null));
    let entry = |key: &str, created: u64| {
        json!({ "KV": {
            "LockIndex": 0, "Key": key, "Flags": 3, "Value": null, "CreateIndex": created, "ModifyIndex": created,
        } })
    };
    let written = index(&world, "data").await;
    assert_eq!(body, json!({ "Results": [entry("lease", at), entry("data", written)], "Errors": null }));

    let stale = kv("check-index", "lease", json!({ "Index": at + 1 }));
    let (status, body) = txn(&world, json!([stale, write(0), write(written)])).await;
    assert_eq!((status, &body["Results"]), (409, &Value::Null));
    let expected = [
        (0, format!("failed index check for key \"lease\", current modify index {at} != {}", at + 1)),
        (1, "failed to set key \"data\", index is stale".to_owned()),
    ];
    assert_eq!(whats(&body), expected);
    assert_eq!(index(&world, "data").await, written, "nothing was done");

    // Operations see those before them.
    let both = json!([
        kv("delete-tree", "d", json!({})),
        kv("get", "data", json!({})),
        kv("set", "data", json!({ "Value": "Mg==" })),
        kv("check-not-exists", "lease", json!({})),
    ]);
    let (status, body) = txn(&world, both).await;
    let expected = [(1, "key \"data\" doesn't exist".to_owned()), (3, "key \"lease\" exists".to_owned())];
    assert_eq!((status, whats(&body)), (409, expected.to_vec()));
    let moved = json!([
        kv("delete-tree", "d", json!({})),
        kv("check-not-exists", "data", json!({})),
        kv("set", "data2", json!({ "Value": "Mg==" })),
        kv("delete", "lease", json!({})),
        kv("delete-cas", "gone", json!({ "Index": 3 })),
    ]);
    let (status, body) = txn(&world, moved).await;
    assert_eq!((status, body["Results"].as_array().map(Vec::len)), (200, Some(1)), "{body}");
    assert_eq!(get(&world, "?keys").await.json(), json!(["data2"]));
}

pub(crate) async fn a_transaction_that_only_reads_says_so(world: World) {
    put(&world, "a", "1").await;
    let at = index(&world, "a").await;
    let asked = json!([kv("check-index", "a", json!({ "Index": at })), kv("get", "a", json!({}))]);
    for mode in ["", "?consistent"] {
        let answer = world.dc1.put(&format!("/v1/txn{mode}"), asked.to_string()).await.unwrap();
        let entry = |value: Value| {
            json!({ "KV": {
                "LockIndex": 0, "Key": "a", "Flags": 0, "Value": value, "CreateIndex": at, "ModifyIndex": at,
            } })
        };
        let expected = json!({
            "Results": [entry(Value::Null), entry("MQ==".into())], "Errors": null, "Index": 0, "LastContact": 0,
            "KnownLeader": true, "ConsistencyLevel": "",
        });
        assert_eq!((answer.status.as_u16(), answer.json()), (200, expected), "{mode}");
        for (header, value) in [("x-consul-knownleader", "true"), ("x-consul-lastcontact", "0")] {
            assert_eq!(answer.header(header), Some(value), "{mode}");
        }
        assert_eq!(answer.index(), None);
    }
    let tree = json!([kv("get-tree", "a", json!({}))]);
    assert_eq!(txn(&world, tree).await.1["Results"].as_array().unwrap().len(), 1);
    let missing = json!([kv("get", "b", json!({}))]);
    let (status, body) = txn(&world, missing).await;
    assert_eq!((status, whats(&body)), (409, vec![(0, "key \"b\" doesn't exist".to_owned())]));
}

pub(crate) async fn what_transactions_refuse_is_named(world: World) {
    put(&world, "a", "1").await;
    for (operation, what) in [
        (kv("check-index", "b", json!({ "Index": 1 })), "failed to check index, key \"b\" doesn't exist"),
        (kv("cas", "b", json!({ "Index": 1 })), "failed to set key \"b\", index is stale"),
        (kv("delete-cas", "a", json!({ "Index": 1 })), "failed to delete key \"a\", index is stale"),
        (
            kv("check-session", "b", json!({ "Session": "s" })),
            "failed to check session, key \"b\" doesn't exist",
        ),
        (
            kv("check-session", "a", json!({ "Session": "s" })),
            "failed session check for key \"a\", current session \"\" != \"s\"",
        ),
        (
            kv("lock", "a", json!({ "Session": "0d5ec2e0-7a11-4f5e-9b1d-a1b2c3d4e5f6" })),
            "invalid session \"0d5ec2e0-7a11-4f5e-9b1d-a1b2c3d4e5f6\"",
        ),
        (
            kv("lock", "a", json!({ "Session": "s" })),
            "failed session lookup: index error: UUID must be 36 characters",
        ),
        (kv("lock", "a", json!({})), "missing session"),
        (
            kv("unlock", "a", json!({ "Session": "s" })),
            "failed to unlock key \"a\", lock isn't held, or is held by another session",
        ),
        (kv("zap", "a", json!({})), "unknown KV verb \"zap\""),
        (kv("set", "", json!({})), "Must provide key"),
    ] {
        let (status, body) = txn(&world, json!([operation])).await;
        assert_eq!((status, whats(&body)), (409, vec![(0, what.to_owned())]), "{operation}");
    }
    for body in ["", "{", "{}", "rubbish", r#"[{"KV":{"Verb":"set","Key":"a","Value":"*"}}]"#] {
        let answer = world.dc1.put("/v1/txn", body).await.unwrap();
        assert_eq!(answer.status, 400, "{body}: {}", answer.text());
        assert!(answer.text().starts_with("Failed to parse body: "), "{body}: {}", answer.text());
    }
    let many = |count: usize| Value::from(vec![kv("get", "a", json!({})); count]).to_string();
    assert_eq!(world.dc1.put("/v1/txn", many(64)).await.unwrap().status, 200);
    let answer = world.dc1.put("/v1/txn", many(65)).await.unwrap();
    let text = "Transaction contains too many operations (65 > 64)";
    assert_eq!((answer.status.as_u16(), answer.text().as_str()), (413, text));
    let body = |size: usize| {
        let empty = json!([kv("set", "a", json!({ "Value": "" }))]).to_string();
        empty
            .replace("\"Value\":\"\"", &format!("\"Value\":\"{}\"", "A".repeat((size - empty.len()) / 4 * 4)))
    };
    let (fits, does_not) = (body(512 << 10), body((512 << 10) + 4));
    assert!(fits.len() <= 512 << 10 && does_not.len() > 512 << 10);
    assert_eq!(world.dc1.put("/v1/txn", fits).await.unwrap().status, 200);
    let answer = world.dc1.put("/v1/txn", does_not).await.unwrap();
    let text = "Request body(524292 bytes) too large, max size: 524288 bytes. See \
                https://www.consul.io/docs/agent/options.html#txn_max_req_len.";
    assert_eq!((answer.status.as_u16(), answer.text().as_str()), (413, text));
}

pub(crate) async fn keys_go_when_an_agent_in_memory_is_restarted(mut world: World) {
    put(&world, "a", "1").await;
    world.restart_first().await;
    // A leader may take its time.
    let gone = async {
        while get(&world, "a").await.status != 404 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(super::world::LONG, gone).await.expect("the key is gone");
}

pub(crate) async fn keys_of_another_datacenter_are_asked_for_through_ones_own(world: World) {
    assert_eq!(put(&world, "a?dc=dc2", "1").await, ok());
    assert_eq!(get(&world, "a").await.status, 404);
    assert_eq!(get(&world, "a?dc=dc2").await.status, 200);
    assert_eq!(world.dc2.get("/v1/kv/a").await.unwrap().status, 200);
    let asked = json!([kv("check-not-exists", "a", json!({}))]).to_string();
    for (query, status) in [("?dc=dc2", 409), ("", 200)] {
        let answer = world.dc1.put(&format!("/v1/txn{query}"), asked.clone()).await.unwrap();
        assert_eq!(answer.status, status, "{query}");
    }
    let (status, text) = put(&world, "a?dc=dc9", "1").await;
    assert_eq!((status, text.as_str()), (500, "No path to datacenter"));
}
