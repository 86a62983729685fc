//! The resolver on real sockets and a real Consul.

use serde_json::json;
use tokio::{
    io::AsyncReadExt,
    net::{TcpListener, TcpStream},
    time::timeout,
};

use super::super::*;
use crate::{
    client::registry::ConsulQuery,
    consul::{ConsulClient, ConsulConfig, HealthQuery},
    testkit::ConsulProcess,
};

/// How long anything may take on a machine that is busy with much else.
const PATIENCE: Duration = Duration::from_secs(30);

async fn agent() -> Option<ConsulProcess> {
    let Some(bin) = ConsulProcess::find() else {
        eprintln!("SKIPPED: no consul found; install it or set CONSUL_BIN");
        return None;
    };
    Some(ConsulProcess::builder(bin).start().await.unwrap())
}

fn watch_at(url: &str) -> Resolver {
    let config = ConsulConfig::new(url).unwrap().request_timeout(Duration::from_secs(2));
    let client = ConsulClient::new(config).unwrap();
    let query = HealthQuery::new("counter").unwrap();
    let registry = Arc::new(ConsulQuery::new(client, query));
    Resolver::spawn(registry, "counter".into(), "(own)", ResolverSettings::default())
}

async fn register(agent: &ConsulProcess, id: &str, port: u16) {
    let service = json!({"Name": "counter", "ID": id, "Address": "10.0.0.7", "Port": port});
    let answer = agent.registry().put("/v1/agent/service/register", service.to_string()).await.unwrap();
    assert!(answer.status.is_success(), "{}", answer.text());
}

async fn until(resolver: &Resolver, met: impl FnMut(&Resolved) -> bool) -> Resolved {
    let mut resolved = resolver.watch();
    let met = timeout(PATIENCE, resolved.wait_for(met)).await;
    met.expect("it happens in time").expect("the resolver runs").clone()
}

fn names(resolved: &Resolved) -> Vec<&str> {
    let instances = resolved.snapshot.iter().flat_map(|it| &it.instances);
    let mut names: Vec<_> = instances.map(|it| &*it.name).collect();
    names.sort_unstable();
    names
}

#[tokio::test]
async fn instances_that_come_and_go_are_news() {
    let Some(agent) = agent().await else { return };
    let resolver = watch_at(&agent.url());
    let first = until(&resolver, |it| it.snapshot.is_some()).await;
    assert!(names(&first).is_empty() && first.empty_since.is_some());
    register(&agent, "a", 1).await;
    until(&resolver, |it| names(it) == ["a"] && it.empty_since.is_none()).await;
    register(&agent, "b", 2).await;
    until(&resolver, |it| names(it) == ["a", "b"]).await;
    agent.registry().put("/v1/agent/service/deregister/a", "").await.unwrap();
    until(&resolver, |it| names(it) == ["b"]).await;
    agent.registry().put("/v1/agent/service/deregister/b", "").await.unwrap();
    let emptied = until(&resolver, |it| it.empty_since.is_some()).await;
    assert_eq!(names(&emptied), ["b"], "the last that were there are remembered");
}

#[tokio::test]
async fn an_agent_that_dies_and_comes_back_with_nothing_is_followed() {
    let Some(mut agent) = agent().await else { return };
    let resolver = watch_at(&agent.url());
    for port in 1..=20 {
        register(&agent, "a", port).await;
    }
    until(&resolver, |it| names(it) == ["a"]).await;
    agent.kill().await.unwrap();
    let lost = until(&resolver, |it| it.error.is_some()).await;
    assert_eq!(names(&lost), ["a"]);
    assert!(lost.episode.is_some());
    let refused = resolver.refresh().await.unwrap_err();
    assert!(matches!(refused, RegistryError::Unreachable { .. }), "{refused:?}");
    agent.restart().await.unwrap();
    let back = until(&resolver, |it| it.episode.is_none()).await;
    assert!(back.empty_since.is_some() && back.error.is_none());
    // Its index is far lower than before, and what happens now is seen at once.
    register(&agent, "b", 2).await;
    until(&resolver, |it| names(it) == ["b"]).await;
}

#[tokio::test]
async fn a_refresh_finds_out_that_an_agent_stands_still_and_that_it_goes_on() {
    let Some(agent) = agent().await else { return };
    register(&agent, "a", 1).await;
    let resolver = watch_at(&agent.url());
    until(&resolver, |it| names(it) == ["a"]).await;
    agent.pause().await.unwrap();
    // The signal takes a moment to stop all of its threads.
    let error = loop {
        if let Err(error) = resolver.refresh().await {
            break error;
        }
    };
    assert!(matches!(error, RegistryError::TimedOut { .. }), "{error:?}");
    let failing = until(&resolver, |it| it.error.is_some()).await;
    assert_eq!(names(&failing), ["a"]);
    agent.resume().unwrap();
    until(&resolver, |it| it.error.is_none()).await;
    let refreshed = resolver.refresh().await.unwrap();
    assert_eq!(names(&refreshed), ["a"]);
}

#[tokio::test]
async fn many_refreshes_and_changes_at_once_end_in_the_present_state() {
    let Some(agent) = agent().await else { return };
    let resolver = watch_at(&agent.url());
    for round in 0..15 {
        let refreshes: Vec<_> = (0..8).map(|_| tokio::spawn(resolver.refresh())).collect();
        register(&agent, "a", 100 + round).await;
        let resolved = resolver.refresh().await.unwrap();
        for refresh in refreshes {
            refresh.await.unwrap().unwrap();
        }
        assert!(resolved.answers > 0);
    }
    let at_last = |it: &Resolved| {
        let list = it.snapshot.as_ref().map(|it| it.instances.as_slice());
        matches!(list, Some([one]) if one.id.authority() == "10.0.0.7:114")
    };
    until(&resolver, at_last).await;
}

/// Accepts, and waits until a request has come.
async fn request(listener: &TcpListener) -> TcpStream {
    let (mut stream, _) = timeout(PATIENCE, listener.accept()).await.unwrap().unwrap();
    assert_ne!(timeout(PATIENCE, stream.read(&mut [0; 4096])).await.unwrap().unwrap(), 0);
    stream
}

#[tokio::test]
async fn dropping_the_resolver_closes_the_connections_of_its_questions() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let resolver = watch_at(&format!("http://{}", listener.local_addr().unwrap()));
    let mut blocking = request(&listener).await;
    let waiting = tokio::spawn(resolver.refresh());
    let mut refresh = request(&listener).await;
    drop(resolver);
    for stream in [&mut blocking, &mut refresh] {
        assert_eq!(timeout(PATIENCE, stream.read(&mut [0; 64])).await.unwrap().unwrap_or(0), 0);
    }
    assert!(matches!(waiting.await.unwrap(), Err(RegistryError::Closed)));
}
