//! What only a scripted server can be made to say.

use tonic_failover::consul::{BlockingIndex, RegistryError};

use super::{
    scripted::{Reply, Scripted, answer},
    *,
};

async fn ask(reply: Reply) -> Result<tonic_failover::consul::HealthAnswer, RegistryError> {
    let server = Scripted::always(reply).await;
    let config = ConsulConfig::new(&server.url()).unwrap().max_answer_bytes(1 << 20);
    let config = config.request_timeout(Duration::from_secs(10));
    ConsulClient::new(config).unwrap().healthy_instances(&query("counter")).await
}

async fn refused(status: &str, headers: &str, body: impl AsRef<[u8]>) -> RegistryError {
    ask(answer(status, headers, body)).await.unwrap_err()
}

#[tokio::test]
async fn every_way_of_knowing_nothing_is_told_apart() {
    use RegistryError::*;
    let index = "X-Consul-Index: 1\r\n";
    assert!(matches!(refused("500 Oops", index, "No cluster leader").await, NoLeader));
    let wrapped = "rpc error making call: No cluster leader";
    assert!(matches!(refused("500 Oops", index, wrapped).await, NoLeader));
    assert!(matches!(refused("500 Oops", index, "No known Consul servers").await, NoServers));
    assert!(matches!(refused("500 Oops", index, "No path to datacenter").await, NoPath { .. }));
    assert!(
        matches!(refused("403 No", index, "Permission denied").await, Forbidden { message } if message == "Permission denied")
    );
    assert!(matches!(refused("404 No", "", "").await, NotFound));
    assert!(
        matches!(refused("400 No", "", "Invalid index").await, Status { code: 400, body } if body == "Invalid index")
    );
    assert!(matches!(refused("429 No", "", "").await, RateLimited { retry_after: None }));
    assert!(matches!(refused("503 No", "", "busy").await, Status { code: 503, .. }));
    for status in ["429 No", "503 No"] {
        let error = refused(status, "Retry-After: 7\r\n", "").await;
        assert_eq!(error.retry_after(), Some(Duration::from_secs(7)));
    }
    for odd in ["-1", "soon", "Wed, 21 Oct 2015 07:28:00 GMT", "99999999999999999999999", "\u{e9}"] {
        let error = refused("429 No", &format!("Retry-After: {odd}\r\n"), "").await;
        assert!(matches!(error, RateLimited { retry_after: None }), "{odd}");
    }
    for body in ["", "null", "{}", "[", "<html>", "[] []"] {
        let error = refused("200 OK", "X-Consul-Index: 9\r\n", body).await;
        assert!(matches!(error, NotUnderstood { .. }), "{body}: {error:?}");
        assert!(std::error::Error::source(&error).is_some());
    }
    assert!(matches!(refused("204 Nothing", "", "").await, NotUnderstood { .. }));
}

#[tokio::test]
async fn a_refusals_text_is_cut_short_and_fit_for_one_line() {
    let long = format!("first\n\u{1b}[31m{}", "x".repeat(9000));
    let RegistryError::Status { code: 500, body } = refused("500 Oops", "", long).await else { panic!() };
    assert!(body.starts_with("first  [31mxxx") && body.ends_with('…'), "{body}");
    assert!(body.chars().count() <= 301);
    let no_text = refused("500 Oops", "", b"\xff\xfe").await;
    assert!(matches!(no_text, RegistryError::Status { code: 500, .. }));
}

#[tokio::test]
async fn a_refusal_without_end_is_not_waited_for() {
    let head = b"HTTP/1.1 500 Oops\r\ntransfer-encoding: chunked\r\n\r\n".to_vec();
    let mut chunk = b"1000\r\n".to_vec();
    chunk.extend([b'x'; 0x1000]);
    chunk.extend(b"\r\n");
    let error = ask(Reply::SendForEver(head, chunk)).await.unwrap_err();
    assert!(matches!(error, RegistryError::Status { code: 500, .. }), "{error:?}");
}

#[tokio::test]
async fn a_refusal_whose_body_does_not_end_is_still_that_refusal() {
    for (status, headers) in [("403 No", ""), ("429 Slow", "Retry-After: 60\r\n")] {
        let head = format!("HTTP/1.1 {status}\r\n{headers}transfer-encoding: chunked\r\n\r\n2\r\nno\r\n");
        let server = Scripted::always(Reply::SendAndHang(head.into_bytes())).await;
        // Its own time holds for the body, even where the question's is shorter.
        let config = ConsulConfig::new(&server.url()).unwrap().request_timeout(Duration::from_millis(300));
        let client = ConsulClient::new(config).unwrap();
        let error = client.healthy_instances(&query("counter")).await.unwrap_err();
        eventually(|| async { server.open() == 0 }).await;
        match error {
            RegistryError::Forbidden { message } => assert_eq!(message, "no"),
            error => assert_eq!(error.retry_after(), Some(Duration::from_secs(60)), "{error:?}"),
        }
    }
}

fn reply(reply: Reply) -> Vec<u8> {
    let Reply::Send(bytes) = reply else { panic!("another reply") };
    bytes
}

#[tokio::test]
async fn a_kept_connection_that_is_closed_on_a_question_costs_one_repeat_and_no_error() {
    let good = reply(answer("200 OK", "X-Consul-Index: 7\r\n", "[]"));
    let server = Scripted::always(Reply::SendThenClose(good, 1)).await;
    let client = client(&server.url());
    for round in 1..=5 {
        client.healthy_instances(&query("counter")).await.unwrap();
        assert_eq!(server.requests().len(), 2 * round - 1, "all but the first are put twice");
    }
    // What may have changed something is not put again.
    let error = client.pass_check("x").await.unwrap_err();
    assert!(matches!(error, RegistryError::Reset { .. }), "{error:?}");
    assert_eq!(server.requests().len(), 10);
}

#[tokio::test]
async fn an_agent_that_takes_no_more_connections_is_asked_twice_and_told() {
    let good = reply(answer("200 OK", "X-Consul-Index: 7\r\n", "[]"));
    let server = Scripted::always(Reply::SendOnce(good)).await;
    let client = client(&server.url());
    client.healthy_instances(&query("counter")).await.unwrap();
    let error = client.healthy_instances(&query("counter")).await.unwrap_err();
    assert!(matches!(error, RegistryError::Reset { .. }), "{error:?}");
    assert_eq!(server.requests().len(), 3);
    // One that has never answered cannot have closed a connection that was kept.
    let server = Scripted::always(Reply::SendThenClose(Vec::new(), 0)).await;
    let silent = super::client(&server.url());
    let error = silent.healthy_instances(&query("counter")).await.unwrap_err();
    assert!(matches!(error, RegistryError::Reset { .. }), "{error:?}");
    assert_eq!(server.requests().len(), 1);
}

#[tokio::test]
async fn an_answer_is_read_up_to_the_limit_whether_its_length_is_told_or_not() {
    let mib = 1 << 20;
    let fits = format!("[{}]", " ".repeat(mib - 2));
    assert!(ask(answer("200 OK", "", fits)).await.is_ok());
    let nineteen = vec![b' '; 19 * mib];
    let error = refused("200 OK", "", nineteen).await;
    assert!(matches!(error, RegistryError::TooLarge { limit } if limit == mib), "{error:?}");
    let head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n".to_vec();
    let mut chunk = b"10000\r\n".to_vec();
    chunk.extend([b' '; 0x10000]);
    chunk.extend(b"\r\n");
    let error = ask(Reply::SendForEver(head, chunk)).await.unwrap_err();
    assert!(matches!(error, RegistryError::TooLarge { .. }), "{error:?}");
}

#[tokio::test]
async fn odd_headers_are_no_index_and_no_panic() {
    for (headers, index) in [
        ("", None),
        ("X-Consul-Index: 7\r\n", Some(7)),
        ("X-Consul-Index: 0\r\n", None),
        ("X-Consul-Index: -1\r\n", None),
        ("X-Consul-Index: abc\r\n", None),
        ("X-Consul-Index: \u{e9}\r\nX-Consul-KnownLeader: \u{e9}\r\nX-Cache: \u{e9}\r\n", None),
        ("X-Consul-Index: 7\r\nX-Consul-Index: 8\r\n", Some(7)),
        ("X-Consul-Index: 99999999999999999999999\r\n", None),
    ] {
        let answer = ask(answer("200 OK", headers, "[]")).await.unwrap();
        assert_eq!(answer.index, index, "{headers}");
        assert_eq!(answer.known_leader, None);
    }
    let headers = "X-Consul-Results-Filtered-By-ACLs: true\r\nX-Consul-KnownLeader: false\r\n\
                   X-Consul-LastContact: 1500\r\n";
    let answer = ask(answer("200 OK", headers, "[]")).await.unwrap();
    assert!(answer.filtered_by_acl);
    assert_eq!(answer.denied, Some(tonic_failover::consul::Denied::Part));
    assert_eq!(answer.known_leader, Some(false));
    assert_eq!(answer.last_contact, Some(Duration::from_millis(1500)));
}

#[tokio::test]
async fn a_server_that_hangs_is_given_up() {
    let limit = Duration::from_millis(300);
    for sent in ["", "HTTP/1.1 200 OK\r\n", "HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n["] {
        let server = Scripted::always(Reply::SendAndHang(sent.into())).await;
        let config = ConsulConfig::new(&server.url()).unwrap().request_timeout(limit);
        let client = ConsulClient::new(config).unwrap();
        let error = client.healthy_instances(&query("counter")).await.unwrap_err();
        assert!(matches!(error, RegistryError::TimedOut { after } if after == limit), "{sent}: {error:?}");
        eventually(|| async { server.open() == 0 }).await;
    }
}

#[tokio::test]
async fn a_broken_connection_is_told_from_none() {
    let unanswered = ask(Reply::Send(Vec::new())).await.unwrap_err();
    assert!(matches!(unanswered, RegistryError::Reset { .. }), "{unanswered:?}");
    let begun = "HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n[";
    let error = ask(Reply::Send(begun.into())).await.unwrap_err();
    assert!(matches!(error, RegistryError::Interrupted { .. }), "{error:?}");
    let port = {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        listener.local_addr().unwrap().port()
    };
    let nobody = client(&format!("http://127.0.0.1:{port}")).healthy_instances(&query("counter")).await;
    let error = nobody.unwrap_err();
    assert!(matches!(error, RegistryError::Unreachable { .. }), "{error:?}");
    let no_host = client("http://nobody.invalid:8500").healthy_instances(&query("counter")).await;
    assert!(matches!(no_host, Err(RegistryError::Unreachable { .. } | RegistryError::TimedOut { .. })));
}

#[tokio::test]
async fn what_is_no_http_is_not_understood() {
    let tls = [0x15, 3, 1, 0, 2, 2, 0x46].as_slice();
    let length = b"HTTP/1.1 200 OK\r\ncontent-length: -2\r\n\r\n[]".as_slice();
    let headers = format!("HTTP/1.1 200 OK\r\nx: {}\r\n\r\n", "x".repeat(1 << 20));
    for rubbish in [b"SSH-2.0-x\r\n\r\n".as_slice(), b"220 mail ESMTP\r\n", tls, length, headers.as_bytes()] {
        let error = ask(Reply::Send(rubbish.to_vec())).await.unwrap_err();
        assert!(matches!(error, RegistryError::NotUnderstood { .. }), "{error:?}");
        assert!(std::error::Error::source(&error).is_some());
    }
}

#[tokio::test]
async fn a_waiting_question_that_is_cut_off_is_followed_by_a_read_and_costs_no_error() {
    let list =
        r#"[{"Node":{"Node":"n","Address":"127.0.0.1"},"Service":{"ID":"a","Service":"counter","Port":1}}]"#;
    let good = reply(answer("200 OK", "X-Consul-Index: 3\r\n", list));
    let proxy = reply(answer("504 Gateway Time-out", "", "<html>"));
    for cut in [None, Some(proxy)] {
        let server = Scripted::waiting(cut, good.clone()).await;
        let client = client(&server.url());
        let (index, wait) = (BlockingIndex::from(7), Duration::from_secs(60));
        let answer = client.watch_instances(&query("counter"), index, wait).await.unwrap();
        // The lower index of an agent that has come back.
        assert_eq!((answer.index, answer.snapshot.instances.len()), (Some(3), 1));
        let asked = server.requests();
        assert_eq!(asked.iter().map(|it| it.contains("index=")).collect::<Vec<_>>(), [true, false]);
    }
    // Once: what the read meets with is told.
    let server = Scripted::always(Reply::Send(Vec::new())).await;
    let client = client(&server.url());
    let error =
        client.watch_instances(&query("counter"), 7.into(), Duration::from_secs(60)).await.unwrap_err();
    assert!(matches!(error, RegistryError::Reset { .. }), "{error:?}");
    assert_eq!(server.requests().len(), 2);
}

#[tokio::test]
async fn one_wish_to_be_left_alone_holds_for_all_questions_about_that_datacenter() {
    let server = Scripted::always(answer("429 Slow", "Retry-After: 60\r\n", "")).await;
    let client = client(&server.url());
    for service in ["a", "b", "c"] {
        let error = client.healthy_instances(&query(service)).await.unwrap_err();
        assert!(error.retry_after().is_some_and(|it| it > Duration::from_secs(30)), "{error:?}");
    }
    let heard = |path: &str| server.requests().iter().filter(|it| it.contains(path)).count();
    assert_eq!(heard("/v1/health"), 1);
    client.healthy_instances(&query("a").datacenter("dc2")).await.unwrap_err();
    assert_eq!(heard("/v1/health"), 2, "another datacenter has not said so");
}

#[tokio::test]
async fn an_address_that_swallows_connections_is_given_up_after_the_connect_time_out() {
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let listener = socket.listen(1).unwrap();
    let address = listener.local_addr().unwrap();
    // Nobody accepts: once the queue is full, the system drops what comes.
    let mut queued = Vec::new();
    while let Ok(stream) =
        tokio::time::timeout(Duration::from_millis(200), tokio::net::TcpStream::connect(address)).await
    {
        queued.push(stream.unwrap());
    }
    let config = ConsulConfig::new(&address.to_string()).unwrap();
    let config = config.connect_timeout(Duration::from_millis(200)).request_timeout(10 * PATIENCE);
    let client = ConsulClient::new(config).unwrap();
    let asked = query("counter");
    let asking = tokio::time::timeout(PATIENCE, client.healthy_instances(&asked));
    let error = asking.await.unwrap().unwrap_err();
    assert!(matches!(error, RegistryError::Unreachable { .. }), "{error:?}");
}

#[tokio::test]
async fn dropping_the_question_closes_its_connection() {
    let server = Scripted::always(Reply::SendAndHang(Vec::new())).await;
    let client = client(&server.url());
    let watching = tokio::spawn(async move {
        client.watch_instances(&query("counter"), BlockingIndex::from(7), Duration::from_secs(60)).await
    });
    eventually(|| async { server.requests().len() == 1 }).await;
    watching.abort();
    eventually(|| async { server.open() == 0 }).await;
}

#[tokio::test]
async fn a_redirect_is_not_followed() {
    let elsewhere = Scripted::always(answer("200 OK", "", "[]")).await;
    for status in ["301 Moved", "302 Found", "307 Moved", "308 Moved"] {
        let location = format!("Location: {}/v1/health/service/counter\r\n", elsewhere.url());
        let error = refused(status, &location, "").await;
        assert!(matches!(error, RegistryError::Status { code: 301..=308, .. }), "{error:?}");
    }
    assert_eq!(elsewhere.requests().len(), 0);
}
