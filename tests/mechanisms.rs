//! Each mechanism carries its fault test: what that holds to be true is not true
//! when the mechanism is switched off. The fault tests themselves are in
//! `registry_faults.rs`, `registry_doubts.rs`, `datacenters.rs` and `instance_death.rs`.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod common;

use std::{
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use common::{
    Backend,
    acl::{Guarded, in_readme},
    bound, builder, get, register,
    stage::{first, impatient},
    steady, until, until_bound_to,
};
use tokio::{
    net::TcpListener,
    task::JoinSet,
    time::{Instant, timeout},
};
use tonic_failover::{
    client::{
        ConsulService, ConsulServiceBuilder, DatacenterStatus, Fallback, GrpcClient, Mechanism,
        ServiceOptions,
    },
    consul::ConsulConfig,
    testkit::{Agent, Cluster, Faults, Switch},
};

/// Long enough to see that something does not come about.
const NEVER: Duration = Duration::from_millis(1500);

/// Two instances and a client that has both ready.
struct Bench {
    agent: Agent,
    client: GrpcClient,
    backends: [Backend; 2],
}

impl Bench {
    async fn set(without: Option<Mechanism>) -> Self {
        Self::with(without, |url| impatient(url).wait(common::SOON)).await
    }

    async fn with(without: Option<Mechanism>, builder: impl FnOnce(&str) -> ConsulServiceBuilder) -> Self {
        let agent = Agent::start("dc1").await.unwrap();
        let backends = [Backend::start("a").await, Backend::start("b").await];
        for backend in &backends {
            register(agent.registry(), "counter", &backend.name, backend.port).await;
        }
        let client = client(builder(&agent.url()), without);
        until(&client, "both are ready", |c| first(c).ready == 2).await;
        Self { agent, client, backends }
    }

    /// How often it was asked for instances.
    fn asked(&self) -> u64 {
        self.agent.counters().requests_to("/v1/health")
    }

    /// Whether the status comes to be so; what is to come is waited for longer.
    async fn comes_about(&self, expected: bool, is_so: impl Fn(&DatacenterStatus) -> bool) -> bool {
        let wait = if expected { common::SOON } else { 3 * NEVER };
        within(wait, &self.client, |c| is_so(&first(c))).await
    }

    /// Whether a call is answered, in a while.
    async fn serves(&self) -> bool {
        timeout(NEVER, get(self.client.channel())).await.is_ok_and(|it| it.is_ok())
    }
}

fn client(builder: ConsulServiceBuilder, without: Option<Mechanism>) -> GrpcClient {
    let builder = match without {
        Some(mechanism) => builder.without(mechanism),
        None => builder,
    };
    builder.service(steady()).build().unwrap().grpc_client("counter").unwrap()
}

async fn within(wait: Duration, client: &GrpcClient, is_so: impl Fn(&GrpcClient) -> bool) -> bool {
    let met = async {
        while !is_so(client) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(wait, met).await.is_ok()
}

#[tokio::test]
async fn the_last_known_good_list_is_what_serves_when_the_registry_fails() {
    type Fault = fn(&Faults<'_>) -> Switch;
    let faults: [(&str, Fault); 13] = [
        ("cannot connect", |f| f.refuse()),
        ("closed the connection", |f| f.limit_connections(0)),
        ("closed the connection", |f| f.drop_connections()),
        ("did not answer", |f| f.hang()),
        ("no leader", |f| f.status(500, "No cluster leader")),
        ("no server", |f| f.status(500, "No known Consul servers")),
        ("no way to datacenter", |f| f.status(500, "No path to datacenter")),
        ("refuses the token", |f| f.status(403, "ACL not found")),
        ("does not have", |f| f.status(404, "")),
        ("fewer requests", |f| f.rate_limit(Duration::from_secs(1))),
        ("not understood", |f| f.garbage()),
        ("not understood", |f| f.status(200, "{}")),
        ("larger than", |f| f.oversized(17 << 20)),
    ];
    let each = async |without: Option<Mechanism>, holds: bool| {
        let bench = Bench::set(without).await;
        for (words, fault) in faults {
            bench.agent.wait_for(|it| it.blocked == 1).await.unwrap();
            let fault = fault(&bench.agent.faults());
            // What waits for news would not meet it for long.
            bench.agent.faults().drop_connections().off();
            until(&bench.client, words, |c| first(c).registry_error.is_some_and(|it| it.contains(words)))
                .await;
            assert_eq!(first(&bench.client).known == 2, holds, "{without:?}: {words}");
            fault.off();
            until(&bench.client, "it answers", |c| first(c).registry_error.is_none()).await;
            assert_eq!(first(&bench.client).known, 2, "{without:?}: after {words}");
        }
        bench.agent.wait_for(|it| it.blocked == 1).await.unwrap();
        bench.agent.faults().refuse();
        until(&bench.client, "it is lost", |c| first(c).registry_error.is_some()).await;
        assert_eq!(bench.serves().await, holds, "{without:?}");
    };
    tokio::join!(each(None, true), each(Some(Mechanism::KeepOnError), false));
}

#[tokio::test]
async fn the_last_known_good_list_is_what_serves_when_the_list_is_empty() {
    for (without, holds) in [(None, true), (Some(Mechanism::KeepOnEmpty), false)] {
        for fault in ["emptied", "hidden from the token", "restarted without its data"] {
            let bench = Bench::set(without).await;
            match fault {
                "emptied" => _ = bench.agent.faults().empty("counter"),
                "hidden from the token" => _ = bench.agent.faults().filtered("counter"),
                _ => bench.agent.restart_empty().await,
            }
            until(&bench.client, "it was heard", |c| {
                let status = first(c);
                status.known == 0 || status.empty_since.is_some() || status.denied.is_some()
            })
            .await;
            let serves = bench.serves().await;
            assert_eq!((first(&bench.client).known == 2, serves), (holds, holds), "{without:?}: {fault}");
        }
    }
}

#[tokio::test]
async fn demotion_is_what_moves_calls_to_another_datacenter_when_a_list_stays_empty() {
    for (without, holds) in [(None, true), (Some(Mechanism::Demotion), false)] {
        let [dc1, dc2] = Cluster::start(["dc1", "dc2"]).await.unwrap().into_agents().try_into().unwrap();
        let (near, far) = (Backend::start("near").await, Backend::start("far").await);
        register(dc1.registry(), "counter", "near", near.port).await;
        register(dc2.registry(), "counter", "far", far.port).await;
        let quick = builder(&dc1.url()).fallback(Fallback::nearest());
        let client = client(quick.demote_after(Duration::from_millis(200)), without);
        until_bound_to(&client, "near").await;
        dc1.faults().empty("counter");
        until(&client, "it was heard", |c| first(c).empty_since.is_some()).await;
        let wait = if holds { common::SOON } else { NEVER };
        let moved = within(wait, &client, |c| bound(c).as_deref() == Some("far")).await;
        assert_eq!(moved, holds, "{without:?}");
    }
}

#[tokio::test]
async fn the_reset_of_the_index_is_what_shows_changes_after_a_fall() {
    for (without, holds) in [(None, true), (Some(Mechanism::IndexReset), false)] {
        let bench = Bench::set(without).await;
        bench.agent.wait_for(|it| it.blocked == 1).await.unwrap();
        bench.agent.faults().reset_index();
        register(bench.agent.registry(), "counter", "c", bench.backends[0].port + 1).await;
        let wait = if holds { common::SOON } else { NEVER };
        let seen = within(wait, &bench.client, |c| first(c).known == 3).await;
        assert_eq!(seen, holds, "{without:?}");
    }
}

/// The limits have no switch: a setting that no fault reaches is as good.
const NO_LIMIT: Duration = Duration::from_secs(3600);

#[tokio::test]
async fn the_limit_of_a_requests_time_is_what_tells_of_a_registry_that_hangs() {
    for (limit, holds) in [(Duration::from_millis(700), true), (NO_LIMIT, false)] {
        let bench = Bench::with(None, |url| timed(url, limit)).await;
        bench.agent.faults().hang();
        assert_eq!(bench.comes_about(holds, |it| it.stale_since.is_some()).await, holds, "{limit:?}");
    }
}

#[tokio::test]
async fn the_limit_of_a_blocking_query_is_what_brings_news_where_one_never_ends() {
    for (limit, holds) in [(Duration::from_millis(700), true), (NO_LIMIT, false)] {
        let bench = Bench::with(None, |url| timed(url, limit)).await;
        bench.agent.faults().never_end();
        bench.agent.wait_for(|it| it.blocked == 1).await.unwrap();
        register(bench.agent.registry(), "counter", "c", bench.backends[0].port + 1).await;
        assert_eq!(bench.comes_about(holds, |it| it.known == 3).await, holds, "{limit:?}");
    }
}

fn timed(url: &str, limit: Duration) -> ConsulServiceBuilder {
    let config = ConsulConfig::new(url).unwrap().request_timeout(limit);
    ConsulService::builder(config).wait(Duration::from_secs(1))
}

#[tokio::test]
async fn the_limit_of_an_answers_size_is_what_keeps_an_endless_one_from_being_read() {
    for (limit, holds) in [(16 << 20, true), (usize::MAX, false)] {
        let sized = |url: &str| {
            let config = ConsulConfig::new(url).unwrap().max_answer_bytes(limit);
            ConsulService::builder(config).wait(Duration::from_secs(1))
        };
        let bench = Bench::with(None, sized).await;
        bench.agent.faults().oversized(17 << 20);
        until(&bench.client, "it was heard", |c| {
            first(c).registry_error.is_some() || first(c).empty_since.is_some()
        })
        .await;
        let told = first(&bench.client).registry_error;
        assert_eq!(told.is_some_and(|it| it.contains("larger than")), holds, "{limit}");
    }
}

#[tokio::test]
async fn the_quiet_is_what_spares_a_registry_that_asks_for_fewer_requests() {
    for (without, holds) in [(None, true), (Some(Mechanism::Quiet), false)] {
        let bench = Bench::with(without, impatient).await;
        bench.agent.faults().rate_limit(Duration::from_secs(60));
        until(&bench.client, "it is told", |c| first(c).stale_since.is_some()).await;
        let asked = bench.asked();
        let spared = if holds {
            tokio::time::sleep(2 * NEVER).await;
            bench.asked() == asked
        } else {
            bench.agent.wait_for(|it| it.requests_to("/v1/health") > asked + 2).await.is_err()
        };
        assert_eq!(spared, holds, "{without:?}");
    }
}

#[tokio::test]
async fn spacing_is_what_makes_no_hot_loop_of_answers_that_pour_in() {
    for (without, holds) in [(None, true), (Some(Mechanism::Spacing), false)] {
        let bench = Bench::set(without).await;
        bench.agent.faults().answer_at_once();
        let (asked, since) = (bench.asked(), Instant::now());
        tokio::time::sleep(NEVER).await;
        // Two at once and then four a second at the most.
        let most = 3.0 + since.elapsed().as_secs_f64() * 4.0;
        let asked = bench.asked() - asked;
        println!("{without:?}: asked {asked} times in {:?}", since.elapsed());
        #[expect(clippy::cast_precision_loss, reason = "it is small")]
        let spaced = asked as f64 <= most;
        assert_eq!(spaced, holds, "{without:?}: {asked}");
        assert!(holds || asked > 30, "{asked}");
    }
}

#[tokio::test]
async fn the_look_at_the_leader_is_what_tells_that_answers_are_old() {
    for (without, holds) in [(None, true), (Some(Mechanism::Behind), false)] {
        let bench = Bench::with(without, impatient).await;
        bench.agent.faults().no_leader();
        let asked = bench.asked();
        bench.agent.wait_for(|it| it.requests_to("/v1/health") > asked + 2).await.unwrap();
        let status = first(&bench.client);
        let told = (status.stale_since.is_some(), status.doubt.is_some());
        assert_eq!(told, (holds, holds), "{without:?}: {status:?}");
    }
}

#[tokio::test]
async fn seats_are_what_bounds_the_connections_of_many_services() {
    const SERVICES: usize = 12;
    for (without, most) in [(None, 4), (Some(Mechanism::Seats), SERVICES)] {
        let agent = Agent::start("dc1").await.unwrap();
        let builder = builder(&agent.url()).max_long_polls(4).read_at_least_every(NEVER);
        let builder = (0..SERVICES).fold(builder, |it, at| it.service(ServiceOptions::new(format!("s{at}"))));
        let builder = match without {
            Some(mechanism) => builder.without(mechanism),
            None => builder,
        };
        let service = builder.build().unwrap();
        let _clients: Vec<_> =
            (0..SERVICES).map(|at| service.grpc_client(&format!("s{at}")).unwrap()).collect();
        // Each has asked, and those without a seat have read again.
        agent
            .wait_for(|it| {
                it.requests.len() >= SERVICES && it.requests_to("/v1/health") >= 24 && it.blocked >= most
            })
            .await
            .unwrap();
        assert_eq!(agent.counters().most_blocked, most, "{without:?}");
    }
}

#[tokio::test]
async fn giving_seats_up_is_what_leaves_connections_to_reads() {
    const SERVICES: usize = 24;
    for (without, holds) in [(None, true), (Some(Mechanism::GivenUpSeats), false)] {
        let agent = Agent::start("dc1").await.unwrap();
        for at in 0..SERVICES {
            register(agent.registry(), &format!("s{at}"), &format!("i{at}"), 1).await;
        }
        agent.faults().limit_connections(6);
        let (_service, clients) = many(SERVICES, builder(&agent.url()).read_at_least_every(NEVER), without);
        let fresh = |c: &GrpcClient| first(c).known == 1 && first(c).stale_since.is_none();
        // Each was so at some time.
        let mut left: Vec<_> = clients.iter().collect();
        let all = async {
            while !left.is_empty() {
                left.retain(|it| !fresh(it));
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        let wait = if holds { 2 * common::SOON } else { 4 * NEVER };
        assert_eq!(timeout(wait, all).await.is_ok(), holds, "{without:?}");
    }
}

#[tokio::test]
async fn lanes_are_what_keeps_a_datacenter_that_hangs_from_holding_up_others() {
    const SERVICES: usize = 60;
    for (without, holds) in [(None, true), (Some(Mechanism::Lanes), false)] {
        let [dc1, _dc2, dc3] =
            Cluster::start(["dc1", "dc2", "dc3"]).await.unwrap().into_agents().try_into().unwrap();
        for at in 0..SERVICES {
            register(dc3.registry(), &format!("s{at}"), &format!("i{at}"), 1).await;
        }
        dc1.faults().hang_datacenter("dc2");
        let patient = ConsulConfig::new(&dc1.url()).unwrap().request_timeout(2 * common::SOON);
        let builder = ConsulService::builder(patient).fallback(Fallback::datacenters(["dc2", "dc3"]));
        let (_service, clients) = many(SERVICES, builder, without);
        let known =
            |c: &GrpcClient| c.status().datacenters.iter().any(|it| it.name == "dc3" && it.known == 1);
        let all = async {
            while !clients.iter().all(known) {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        let wait = if holds { common::SOON } else { 4 * NEVER };
        assert_eq!(timeout(wait, all).await.is_ok(), holds, "{without:?}");
    }
}

/// Clients of services `s0`, `s1` and so on, at whose instances nobody listens: the lists are the matter.
fn many(
    services: usize,
    builder: ConsulServiceBuilder,
    without: Option<Mechanism>,
) -> (ConsulService, Vec<GrpcClient>) {
    let options = |at| ServiceOptions::new(format!("s{at}")).ejection(common::SOON, common::SOON);
    let builder = (0..services).fold(builder, |it, at| it.service(options(at)));
    let builder = match without {
        Some(mechanism) => builder.without(mechanism),
        None => builder,
    };
    let service = builder.build().unwrap();
    let clients = (0..services).map(|at| service.grpc_client(&format!("s{at}")).unwrap()).collect();
    (service, clients)
}

#[tokio::test]
async fn asking_the_next_agent_is_what_knows_better_where_one_is_cut_off() {
    let on_and_off = [(None, true), (Some(Mechanism::NextAgent), false)];
    for (fault, (without, holds)) in
        ["cut off", "gone"].into_iter().flat_map(|it| on_and_off.map(|on| (it, on)))
    {
        let other = Agent::start("dc1").await.unwrap();
        let bench = Bench::with(without, |url| {
            let config = ConsulConfig::new(url).unwrap().more_agents([other.url()]).unwrap();
            ConsulService::builder(config.request_timeout(Duration::from_millis(700)))
                .wait(Duration::from_secs(1))
        })
        .await;
        for backend in &bench.backends {
            register(other.registry(), "counter", &backend.name, backend.port).await;
        }
        match fault {
            "cut off" => _ = bench.agent.faults().no_leader(),
            _ => _ = bench.agent.faults().refuse(),
        }
        let told = |it: &DatacenterStatus| it.stale_since.is_some();
        assert_eq!(bench.comes_about(!holds, told).await, !holds, "{without:?}: {fault}");
    }
}

#[tokio::test]
async fn confirming_an_absence_is_what_keeps_a_datacenter_that_is_not_listed_for_a_moment() {
    for (without, holds) in [(None, true), (Some(Mechanism::Confirmation), false)] {
        let [dc1, dc2] = Cluster::start(["dc1", "dc2"]).await.unwrap().into_agents().try_into().unwrap();
        let (near, far) = (Backend::start("near").await, Backend::start("far").await);
        register(dc1.registry(), "counter", "near", near.port).await;
        register(dc2.registry(), "counter", "far", far.port).await;
        let client = client(builder(&dc1.url()).fallback(Fallback::nearest()).keep_warm(true), without);
        let warm = |c: &GrpcClient| c.status().datacenters.get(1).is_some_and(|it| it.ready == 1);
        until(&client, "the other one is warm", warm).await;
        dc1.faults().unjoined();
        // The list is a minute old, and asked for again.
        let lists = dc1.counters().requests_to("/v1/catalog/datacenters");
        tokio::time::pause();
        tokio::time::advance(Duration::from_secs(61)).await;
        tokio::time::resume();
        dc1.wait_for(|it| it.requests_to("/v1/catalog/datacenters") > lists).await.unwrap();
        let wait = if holds { NEVER } else { common::SOON };
        let given_up = within(wait, &client, |c| c.status().datacenters.len() == 1).await;
        assert_eq!(given_up, !holds, "{without:?}");
    }
}

/// A token that is set stays; one in a file is read again for each request.
#[tokio::test]
async fn reading_the_file_again_is_what_follows_an_exchange_of_tokens() {
    let Some(guarded) = Guarded::start().await else { return };
    let a = Backend::start("a").await;
    register(&guarded.root, "counter", "a", a.port).await;
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("token");
    guarded.policy("client", &in_readme("a client")).await;
    for (from_file, holds) in [(true, true), (false, false)] {
        let old = guarded.token("client").await;
        std::fs::write(&file, &old.secret).unwrap();
        let config = ConsulConfig::new(&guarded.url()).unwrap();
        let config = if from_file { config.token_file(&file) } else { config.token(&old.secret) };
        let client = client(ConsulService::builder(config).wait(Duration::from_secs(1)), None);
        client.ready().await.unwrap();
        guarded.delete(&old).await;
        until(&client, "it is refused", |c| c.status().to_string().contains("refuses the token")).await;
        let new = guarded.token("client").await;
        std::fs::write(&file, &new.secret).unwrap();
        let wait = if holds { common::SOON } else { 2 * NEVER };
        assert_eq!(within(wait, &client, |c| first(c).stale_since.is_none()).await, holds);
    }
}

#[tokio::test]
async fn ejection_is_what_leaves_an_instance_alone_that_the_registry_still_lists() {
    for (without, holds) in [(None, true), (Some(Mechanism::Ejection), false)] {
        // Accepts, and hangs up: passing, as far as the registry can tell.
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let dialled = Arc::new(AtomicU64::new(0));
        let mut tasks = JoinSet::new();
        let count = Arc::clone(&dialled);
        tasks.spawn(async move {
            while listener.accept().await.is_ok() {
                count.fetch_add(1, Ordering::Relaxed);
            }
        });
        let (agent, good) = (Agent::start("dc1").await.unwrap(), Backend::start("good").await);
        register(agent.registry(), "counter", "good", good.port).await;
        register(agent.registry(), "counter", "bad", port).await;
        let client = client(builder(&agent.url()), without);
        until_bound_to(&client, "good").await;
        until(&client, "the bad one is known", |c| first(c).known == 2).await;
        tokio::time::sleep(NEVER).await;
        let dialled = dialled.load(Ordering::Relaxed);
        println!("{without:?}: dialled {dialled} times");
        assert_eq!(dialled <= 6, holds, "{without:?}: {dialled}");
    }
}

/// The table in `docs/registry.md`: a fault, its tests, its mechanism, its switch.
#[test]
fn the_table_of_faults_names_tests_that_exist() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let entries = std::fs::read_dir(root.join("tests")).unwrap().map(|it| it.unwrap().path());
    let all: String = entries.filter_map(|it| std::fs::read_to_string(it).ok()).collect();
    let text = std::fs::read_to_string(root.join("docs/registry.md")).unwrap();
    let table = text.split("| fault | test | mechanism | switch |").nth(1).expect("the table is there");
    let rows: Vec<_> = table.lines().skip(2).take_while(|line| line.starts_with('|')).collect();
    assert!(rows.len() >= 20, "each fault has its row");
    for row in rows {
        let cells: Vec<_> = row.split('|').collect();
        let named: Vec<_> = cells[2].split('`').skip(1).step_by(2).collect();
        assert!(!named.is_empty() && cells[4].contains('`'), "no test or no switch: {row}");
        for test in named {
            let there = all.contains(&format!("fn {test}(")) || all.contains(&format!("{test}:"));
            assert!(there, "no such test: {test}");
        }
    }
}
