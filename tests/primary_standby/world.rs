//! Two instances of the counter that share a lease, as processes, on either store.

use std::{path::PathBuf, time::Duration};

use rustix::process::Signal;
use tempfile::TempDir;
use tokio::time::{Instant, sleep, timeout};
use tonic::{Request, Status, transport::Endpoint};
use tonic_failover::{
    Instance,
    client::{ConsulService, FailoverChannel, ServiceOptions, Services, registry::StaticList},
    consul::ConsulConfig,
    demo::pb::{self, AddRequest, CounterReply, GetRequest, IncrementRequest, counter_client::CounterClient},
    testkit::{ConsulCluster, ConsulProcess, Port},
};

use crate::{
    common::{self, Backend, SOON, proxy::Proxy},
    history::Ack,
};

/// What is promised: a crash is taken over within this.
pub(crate) const TAKEOVER: Duration = Duration::from_secs(3);

/// Where the lease and the state are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// One server, and each instance's way to it can be cut.
    Consul,
    /// Three servers, and a client agent for each instance, to which the way can be cut.
    Cluster,
    Files,
}

/// The store, and the two instances.
pub(crate) struct World {
    pub(crate) kind: Kind,
    pub(crate) consul: Option<ConsulProcess>,
    pub(crate) cluster: Option<ConsulCluster>,
    folder: TempDir,
    /// For every instance its own way to Consul, where it can be cut.
    proxies: Vec<Proxy>,
    /// The same as addresses.
    ways: Vec<String>,
    /// Where clients look, in Consul.
    registry: Option<String>,
    ports: Vec<Port>,
    more: Vec<String>,
    /// Tells one lease of this store from the others.
    lease: usize,
    pub(crate) backends: Vec<Option<Backend>>,
}

pub(crate) const NAMES: [&str; 2] = ["counter-a", "counter-b"];
pub(crate) const A: usize = 0;
pub(crate) const B: usize = 1;

// === impl World ===

impl World {
    /// The store alone; `None`, loudly, where there is no consul.
    pub(crate) async fn of(kind: Kind) -> Option<Self> {
        let folder = tempfile::tempdir().unwrap();
        let (mut consul, mut cluster, mut proxies, mut registry) = (None, None, Vec::new(), None);
        if kind == Kind::Cluster {
            let started = ConsulCluster::start(common::consul_bin()?, 3, NAMES.len() + 1).await;
            let started = started.expect("consul starts");
            for agent in &started.agents()[..NAMES.len()] {
                proxies.push(Proxy::before(agent.ports().http).await);
            }
            registry = Some(started.agents()[NAMES.len()].url());
            cluster = Some(started);
        }
        if kind == Kind::Consul {
            let bin = common::consul_bin()?;
            // With a data folder: a restart keeps what it has.
            let process = ConsulProcess::builder(bin).datacenter("dc1").server(folder.path().join("consul"));
            let process = process.start().await.expect("consul starts");
            for _ in NAMES {
                proxies.push(Proxy::before(process.ports().http).await);
            }
            registry = Some(process.url());
            consul = Some(process);
        }
        let ways = proxies.iter().map(Proxy::url).collect();
        Some(Self { consul, cluster, proxies, ..Self::plain(kind, folder, ways, registry) })
    }

    /// On a Consul that others keep: each instance has its own agent, clients ask another.
    #[allow(dead_code, reason = "the bench uses it")]
    pub(crate) fn at(agents: [String; 2], registry: String) -> Self {
        Self::plain(Kind::Consul, tempfile::tempdir().unwrap(), agents.to_vec(), Some(registry))
    }

    fn plain(kind: Kind, folder: TempDir, ways: Vec<String>, registry: Option<String>) -> Self {
        let ports = NAMES.iter().map(|_| Port::free().unwrap()).collect();
        let backends = NAMES.iter().map(|_| None).collect();
        let (consul, cluster, proxies, more) = (None, None, Vec::new(), Vec::new());
        Self { kind, consul, cluster, folder, proxies, ways, registry, ports, more, lease: 0, backends }
    }

    /// With further options of all instances.
    pub(crate) fn with(mut self, more: &[&str]) -> Self {
        self.more.extend(more.iter().map(|it| (*it).to_owned()));
        self
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// From now on instances are started for another lease, with a state of its own.
    pub(crate) fn lease_number(&mut self, number: usize) {
        self.lease = number;
    }

    fn lease(&self) -> String {
        match self.kind {
            Kind::Consul | Kind::Cluster => format!("consul:services/counter/{}", self.lease),
            Kind::Files => format!("file:{}", self.path(&format!("lease-{}", self.lease)).display()),
        }
    }

    /// Starts an instance, on the port it had before.
    pub(crate) async fn start(&mut self, who: usize) {
        self.backends[who] = Some(self.started(who).await);
    }

    /// Starts both at the same time.
    pub(crate) async fn start_together(&mut self) {
        let (a, b) = tokio::join!(self.started(A), self.started(B));
        self.backends = vec![Some(a), Some(b)];
    }

    async fn started(&self, who: usize) -> Backend {
        let lease = self.lease();
        let mut more = vec!["--lease", &lease, "--blockable"];
        let consul = match self.kind {
            Kind::Consul | Kind::Cluster => self.ways[who].clone(),
            Kind::Files => {
                more.push("--no-consul");
                common::NOWHERE.to_owned()
            }
        };
        more.extend(self.more.iter().map(String::as_str));
        Backend::start_with(NAMES[who], self.port(who), &consul, &more).await
    }

    /// Starts a, and b when a is primary.
    pub(crate) async fn start_both(&mut self) {
        self.start(A).await;
        self.backend(A).says("became PRIMARY").await;
        self.start(B).await;
        self.backend(B).says("standby of counter-a").await;
    }

    pub(crate) fn backend(&mut self, who: usize) -> &mut Backend {
        self.backends[who].as_mut().expect("it has been started")
    }

    pub(crate) async fn kill(&mut self, who: usize) {
        self.backends[who].take().expect("it has been started").kill().await;
    }

    pub(crate) async fn terminate(&mut self, who: usize) {
        self.backends[who].take().expect("it has been started").terminate().await;
    }

    pub(crate) fn signal(&self, who: usize, signal: Signal) {
        self.backends[who].as_ref().expect("it has been started").signal(signal);
    }

    /// Takes an instance's way to Consul away, or gives it back.
    pub(crate) fn cut_off(&self, who: usize, cut: bool) {
        match cut {
            true => self.proxies[who].stop(),
            false => self.proxies[who].go_on(),
        }
    }

    pub(crate) fn port(&self, who: usize) -> u16 {
        self.ports[who].number()
    }

    /// One instance, asked directly.
    pub(crate) async fn ask(&self, who: usize, what: &Ask) -> Result<Ack, Status> {
        let to = Endpoint::from_shared(format!("http://{}", self.ports[who].addr())).unwrap();
        let channel = to.connect_timeout(SOON).connect_lazy();
        ask(CounterClient::new(channel), what, Duration::from_secs(2)).await
    }

    /// Who is primary: the one that answers, of those that can be asked.
    pub(crate) async fn primary(&self) -> Option<usize> {
        for who in [A, B] {
            if self.backends[who].is_some() {
                let answer = timeout(Duration::from_secs(1), self.ask(who, &Ask::Get)).await;
                if matches!(answer, Ok(Ok(_))) {
                    return Some(who);
                }
            }
        }
        None
    }

    /// Waits for a primary.
    pub(crate) async fn until_primary(&self) -> usize {
        let wait = async {
            loop {
                if let Some(who) = self.primary().await {
                    return who;
                }
                sleep(Duration::from_millis(20)).await;
            }
        };
        timeout(SOON, wait).await.expect("somebody becomes primary")
    }

    /// A client that goes to the primary only, whatever it is kept alive by.
    pub(crate) fn client(&self) -> Client {
        let options = || ServiceOptions::new("counter").descriptors(pb::FILE_DESCRIPTOR_SET).primary_only();
        match &self.registry {
            Some(url) => {
                let config = ConsulConfig::new(url).unwrap();
                let service = ConsulService::builder(config).service(options()).build().unwrap();
                let channel = service.grpc_client("counter").unwrap().channel();
                Client { channel, keeps: Keeps::Consul(service) }
            }
            None => {
                let list = StaticList::new();
                let instances = NAMES.iter().zip(&self.ports);
                let instances =
                    instances.map(|(name, port)| Instance::new(*name, "127.0.0.1", port.number(), "here"));
                list.set("counter", instances.collect::<Vec<_>>());
                let services = Services::builder(list).service(options()).build().unwrap();
                let channel = services.grpc_client("counter").unwrap().channel();
                Client { channel, keeps: Keeps::List(services) }
            }
        }
    }
}

/// A client of the primary.
pub(crate) struct Client {
    pub(crate) channel: FailoverChannel,
    #[allow(dead_code, reason = "it keeps the client alive, and the bench asks it")]
    keeps: Keeps,
}

#[allow(dead_code, reason = "they keep the client alive, and the bench asks them")]
enum Keeps {
    Consul(ConsulService),
    List(Services),
}

#[allow(dead_code, reason = "the bench asks")]
impl Client {
    /// How many instances it is connected to.
    pub(crate) fn ready(&self) -> usize {
        let status = match &self.keeps {
            Keeps::Consul(service) => service.grpc_client("counter").map(|it| it.status()),
            Keeps::List(services) => services.grpc_client("counter").map(|it| it.status()),
        };
        status.unwrap().datacenters.first().map_or(0, |it| it.ready)
    }
}

/// A question.
#[derive(Clone, Debug)]
pub(crate) enum Ask {
    Get,
    Increment,
    Add(String),
}

/// Asks, and gives what was acknowledged.
pub(crate) async fn ask<T>(mut client: CounterClient<T>, what: &Ask, within: Duration) -> Result<Ack, Status>
where
    T: tonic::client::GrpcService<tonic::body::Body>,
    T::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    T::ResponseBody: http_body::Body<Data = bytes::Bytes> + Send + 'static,
    <T::ResponseBody as http_body::Body>::Error: Into<Box<dyn std::error::Error + Send + Sync>> + Send,
{
    fn request<M>(message: M, within: Duration) -> Request<M> {
        let mut request = Request::new(message);
        request.set_timeout(within);
        request
    }
    let response = match what {
        Ask::Get => client.get(request(GetRequest::default(), within)).await,
        Ask::Increment => {
            client.increment(request(IncrementRequest { by: 1, ..Default::default() }, within)).await
        }
        Ask::Add(key) => client.add(request(AddRequest { request_key: key.clone(), by: 1 }, within)).await,
    }?;
    let token = response.metadata().get("fencing-token").expect("the fence has let it in");
    let token = token.to_str().unwrap().parse().unwrap();
    let CounterReply { value, instance, .. } = response.into_inner();
    Ok(Ack { value, instance, token })
}

/// The worst that a task of this process was late, while it lives: what the machine did to everyone.
pub(crate) struct Stalls {
    worst: std::sync::Arc<parking_lot::Mutex<Duration>>,
    _task: tokio::task::JoinSet<()>,
}

impl Stalls {
    pub(crate) fn watch() -> Self {
        let worst = std::sync::Arc::default();
        let mut task = tokio::task::JoinSet::new();
        let own: std::sync::Arc<parking_lot::Mutex<Duration>> = std::sync::Arc::clone(&worst);
        let every = Duration::from_millis(5);
        task.spawn(async move {
            loop {
                let before = Instant::now();
                sleep(every).await;
                let late = before.elapsed().saturating_sub(every);
                let mut worst = own.lock();
                *worst = late.max(*worst);
            }
        });
        Self { worst, _task: task }
    }

    pub(crate) fn worst(&self) -> Duration {
        *self.worst.lock()
    }
}
