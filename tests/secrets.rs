//! Tokens and passwords are shown nowhere. Alone in its program, for it takes the
//! whole program's log.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod common;

use std::{error::Error, fmt::Debug, fs, io, sync::Arc, time::Duration};

use axum::{
    Router,
    extract::Request,
    response::{AppendHeaders, IntoResponse},
};
use common::{Backend, acl::Guarded, get, record::Record, register, steady, until};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::{net::TcpListener, sync::watch};
use tokio_util::task::AbortOnDropHandle;
use tonic_failover::{
    client::{ConsulService, ConsulServiceBuilder, Fallback, GrpcClient},
    consul::{Check, ConsulClient, ConsulConfig, HealthQuery, ServiceRegistration},
    testkit::{Agent, Switch},
};

const TOKEN: &str = "0dd5ec2e-7a11-4f5e-9b1d-a1b2c3d4e5f6";
const IN_FILE: &str = "f11e70ce-0000-4f5e-9b1d-a1b2c3d4e5f6";
const LATER: &str = "1a7e2000-1111-4f5e-9b1d-a1b2c3d4e5f6";
const PASSWORD: &str = "open-sesame-4711";
/// `ali:` and the password in base64.
const ENCODED: &str = "YWxpOm9wZW4tc2VzYW1lLTQ3MTE=";

/// All that was said.
#[derive(Clone, Default)]
struct Said(Arc<Mutex<Vec<u8>>>);

impl Said {
    fn text(&self) -> String {
        String::from_utf8_lossy(&self.0.lock()).into_owned()
    }

    fn shown(&self, what: &(impl Debug + ?Sized)) {
        self.0.lock().extend(format!("{what:?}\n{what:#?}\n").into_bytes());
    }

    fn error(&self, error: &(dyn Error + 'static)) {
        let mut next = Some(error);
        while let Some(error) = next {
            self.0.lock().extend(format!("{error}\n").into_bytes());
            self.shown(error);
            next = error.source();
        }
    }

    /// All that a client says of itself.
    fn status(&self, client: &GrpcClient) {
        self.0.lock().extend(format!("{}\n", client.status()).into_bytes());
        self.shown(&client.status());
        self.shown(client);
        self.shown(client.consul_service());
    }
}

impl io::Write for Said {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn listen() -> Said {
    let said = Said::default();
    let writer = said.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(tracing::Level::TRACE)
        .with_ansi(false)
        .with_writer(move || writer.clone())
        .finish();
    tracing::subscriber::set_global_default(subscriber).unwrap();
    said
}

fn nothing_shown(said: &Said, more: &[&str]) {
    let text = said.text();
    assert!(text.contains("TRACE") && text.contains("tonic_failover"), "something was logged");
    for secret in [TOKEN, IN_FILE, LATER, PASSWORD, ENCODED].iter().chain(more) {
        let lines: Vec<_> = text.lines().filter(|line| line.contains(secret)).collect();
        assert!(lines.is_empty(), "{secret} is shown: {lines:#?}");
    }
}

/// Faults of somebody who repeats what he was sent.
fn echo(agent: &Agent, code: u16, secret: &str) -> Switch {
    let body = format!("{secret} {PASSWORD} Basic {ENCODED}");
    let body = if code == 200 { serde_json::json!(body).to_string() } else { body };
    agent.faults().status(code, body)
}

fn builder(config: ConsulConfig) -> ConsulServiceBuilder {
    ConsulService::builder(config)
        .wait(Duration::from_secs(1))
        .service(steady().fail_fast_after(Duration::from_millis(300)))
}

async fn lost(client: &GrpcClient, said: &Said) {
    until(client, "it is lost", |c| {
        c.status().datacenters.first().is_some_and(|dc| dc.registry_error.is_some())
    })
    .await;
    said.status(client);
    if let Err(error) = client.consul_service().update_grpc_client("counter").await {
        said.error(&error);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_token_and_no_password_is_shown_anywhere() {
    let said = listen();
    let agent = Agent::start("dc1").await.unwrap();
    let a = Backend::start("a").await;
    register(agent.registry(), "counter", "a", a.port).await;
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("token");
    fs::write(&file, IN_FILE).unwrap();

    let plain = || {
        let config = ConsulConfig::new(&agent.url()).unwrap();
        config.basic_auth(format!("ali:{PASSWORD}")).request_timeout(Duration::from_millis(700))
    };
    for (config, secret) in [(plain().token(TOKEN), TOKEN), (plain().token_file(&file), IN_FILE)] {
        said.shown(&config);
        said.shown(&builder(config.clone()));
        let client = builder(config).build().unwrap().grpc_client("counter").unwrap();
        let record = Record::of(&client);
        client.ready().await.unwrap();
        // Each once with an answer to every question; those that give none, for one client.
        let count = if secret == TOKEN { 8 } else { 4 };
        let faults: [&dyn Fn() -> Switch; 8] = [
            &|| echo(&agent, 403, secret),
            &|| echo(&agent, 500, secret),
            &|| echo(&agent, 401, secret),
            &|| echo(&agent, 200, secret),
            &|| agent.faults().garbage(),
            &|| agent.faults().hang(),
            &|| agent.faults().drop_connections(),
            &|| agent.faults().refuse(),
        ];
        for fault in &faults[..count] {
            let fault = fault();
            lost(&client, &said).await;
            fault.off();
            until(&client, "it is back", |c| c.status().datacenters[0].stale_since.is_none()).await;
        }
        let hidden = agent.faults().filtered("counter");
        until(&client, "it is hidden", |c| c.status().datacenters[0].denied.is_some()).await;
        said.status(&client);
        hidden.off();
        // Files that cannot be used, and one that can.
        for content in ["", &format!("{LATER}\n{LATER}"), &format!("{LATER}\u{1}"), LATER] {
            fs::write(&file, content).unwrap();
            let _ = client.consul_service().update_grpc_client("counter").await;
        }
        let fault = echo(&agent, 403, if secret == TOKEN { TOKEN } else { LATER });
        lost(&client, &said).await;
        fault.off();
        said.0.lock().extend(format!("{:#?}\n", record.words()).into_bytes());
        said.status(&client);
        client.consul_service().clone().shutdown().await;
        said.error(&client.ready_within(Duration::ZERO).await.unwrap_err());
        fs::write(&file, IN_FILE).unwrap();
    }

    // Without anything that answers.
    let nowhere = ConsulConfig::new(common::NOWHERE).unwrap().token(TOKEN);
    let client = builder(nowhere.basic_auth(format!("ali:{PASSWORD}"))).build().unwrap();
    let client = client.grpc_client("counter").unwrap();
    said.error(&get(client.channel()).await.unwrap_err());
    said.error(&client.ready_within(Duration::from_millis(50)).await.unwrap_err());

    // Settings that cannot be used.
    let line = "\n";
    fs::write(&file, format!("{IN_FILE}{line}{IN_FILE}")).unwrap();
    for config in [
        plain().token(format!("{TOKEN}{line}")),
        plain().token_file(&file),
        plain().basic_auth(format!(":{PASSWORD}")),
    ] {
        said.error(&builder(config).build().unwrap_err());
    }
    let vars = |name: &str| match name {
        "CONSUL_HTTP_TOKEN" => Some(format!("{TOKEN}{line}").into()),
        "CONSUL_HTTP_AUTH" => Some(format!(":{PASSWORD}").into()),
        _ => None,
    };
    said.error(&builder(ConsulConfig::from_vars(vars).unwrap()).build().unwrap_err());
    repeated_in_a_list(&said).await;
    exchanged_while_waiting(&said, &file).await;
    nothing_shown(&said, &[]);
    real(&said).await;
}

/// A registry that answers like this.
async fn registry<F>(answer: impl Fn(Request) -> F + Clone + Send + Sync + 'static) -> (String, Serving)
where
    F: Future<Output = Value> + Send + 'static,
{
    let handler = move |request: Request| {
        let answer = answer(request);
        async move {
            let headers = AppendHeaders([("x-consul-index", "7"), ("x-consul-knownleader", "true")]);
            (headers, answer.await.to_string()).into_response()
        }
    };
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let serving = axum::serve(listener, Router::<()>::new().fallback(handler));
    (url, AbortOnDropHandle::new(tokio::spawn(async move { _ = serving.await })))
}

type Serving = AbortOnDropHandle<()>;

fn entry(name: &str, port: u16) -> Value {
    json!({ "Node": { "Node": name, "Datacenter": name }, "Service": {
        "ID": name, "Address": "127.0.0.1", "Port": port, "Tags": [name], "Meta": { name: name },
    }})
}

/// A proxy that repeats what it was sent in what looks like the answer.
async fn repeated_in_a_list(said: &Said) {
    let a = Backend::start("a").await;
    for port in [0, a.port] {
        let (url, _serving) = registry(move |request: Request| async move {
            let sent = request.headers().iter();
            let sent: Vec<_> = sent.map(|(name, value)| format!("{name}: {}", value.to_str().unwrap())).collect();
            match request.uri().path() {
                "/v1/catalog/datacenters" => json!(sent),
                _ if port == 0 => json!(sent),
                _ => {
                    let text = sent.join("\n");
                    let address = json!({ "Node": {}, "Service": { "ID": text, "Address": text, "Port": 1 } });
                    json!([entry(&text, port), entry(&text, 0), address, sent, { "Node": sent, "Service": {} }])
                }
            }
        })
        .await;
        let config = ConsulConfig::new(&url).unwrap().token(TOKEN).basic_auth(format!("ali:{PASSWORD}"));
        let asker = ConsulClient::new(config.clone()).unwrap();
        said.shown(&asker.datacenters().await);
        match asker.healthy_instances(&HealthQuery::new("counter").unwrap()).await {
            Ok(answer) => {
                let skipped: Vec<_> = answer.skipped.iter().map(|it| format!("{it}\n")).collect();
                assert_eq!(skipped.len(), 4, "{skipped:?}");
                said.0.lock().extend(skipped.concat().into_bytes());
                said.shown(&answer);
            }
            Err(error) => said.error(&error),
        }
        let client = builder(config).fallback(Fallback::nearest()).build().unwrap();
        let client = client.grpc_client("counter").unwrap();
        let record = Record::of(&client);
        until(&client, "it heard something", |c| {
            let dc = &c.status().datacenters[0];
            if port == 0 { dc.registry_error.is_some() || dc.answered } else { dc.ready == 1 }
        })
        .await;
        until(&client, "the datacenters are known", |c| port != 0 || c.status().datacenters.len() > 1).await;
        said.status(&client);
        said.0.lock().extend(format!("{:#?}\n", record.words()).into_bytes());
    }
}

/// The answer to a question that has waited repeats a token that is in use no longer,
/// and one that was sent with another question since.
async fn exchanged_while_waiting(said: &Said, file: &std::path::Path) {
    fs::write(file, IN_FILE).unwrap();
    let a = Backend::start("a").await;
    let (port, later) = (a.port, watch::Sender::new(false));
    let (url, _serving) = registry(move |request: Request| {
        let later = later.clone();
        async move {
            let token = request.headers().get("x-consul-token").unwrap().to_str().unwrap().to_owned();
            if token == LATER {
                later.send_replace(true);
            } else if request.uri().query().unwrap_or_default().contains("index=") {
                later.subscribe().wait_for(|it| *it).await.unwrap();
                return json!(format!("x-consul-token={token}, later {LATER}"));
            }
            json!([entry("a", port)])
        }
    })
    .await;
    let config = ConsulConfig::new(&url).unwrap().token_file(file);
    let service = builder(config).wait(Duration::from_secs(60)).build().unwrap();
    let client = service.grpc_client("counter").unwrap();
    let record = Record::of(&client);
    client.ready().await.unwrap();
    fs::write(file, LATER).unwrap();
    // Whoever asks meanwhile is sent the other one, by whom the question that waits ends.
    client.consul_service().update_grpc_client("counter").await.unwrap();
    record.until("it is told", |r| r.episodes().0 > 0).await;
    said.status(&client);
    said.0.lock().extend(format!("{:#?}\n", record.words()).into_bytes());
    assert!(said.text().contains("x-consul-token=(hidden), later (hidden)"));
}

/// The same on a Consul that refuses.
async fn real(said: &Said) {
    let Some(guarded) = Guarded::start().await else { return };
    let token = guarded.token_for("client", &common::acl::in_readme("a client")).await;
    let config = ConsulConfig::new(&guarded.url()).unwrap().token(&token.secret);
    let asker = ConsulClient::new(config.clone()).unwrap();
    said.shown(&asker);
    let entry = ServiceRegistration::new("counter", "b", "127.0.0.1", 2).unwrap();
    let entry = entry.check(Check::ttl(Duration::from_secs(10)));
    said.error(&asker.register(&entry).await.unwrap_err());
    said.error(&asker.deregister("b").await.unwrap_err());
    said.error(&asker.pass_check("service:b").await.unwrap_err());
    let client = builder(config).build().unwrap().grpc_client("counter").unwrap();
    until(&client, "it answers", |c| c.status().datacenters.first().is_some_and(|dc| dc.answered)).await;
    guarded.delete(&token).await;
    lost(&client, said).await;
    said.error(&asker.denied(&HealthQuery::new("counter").unwrap()).await.unwrap_err());
    nothing_shown(said, &[&token.secret]);
}
