//! What happens to a primary, and how long it takes until the other one answers.

use std::time::Duration;

use rustix::process::Signal;
use tokio::time::{Instant, sleep, timeout};
use tonic_failover::{
    demo::pb::counter_client::CounterClient,
    testkit::{ConsulCluster, ConsulProcess},
};

use crate::{
    history::Kind,
    ms,
    workload::Workload,
    world::{A, Ask, B, Client, NAMES, Stalls, World, ask},
};

/// Between two looks for an answer.
const LOOK: Duration = Duration::from_millis(5);
/// How long anything is waited for.
const BOUND: Duration = Duration::from_secs(90);
/// So long increments are measured.
pub(crate) const STEADY: Duration = Duration::from_secs(10);
/// By so many clients.
pub(crate) const CLIENTS: usize = 8;

/// What becomes of the primary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Strike {
    Kill,
    KillWithAgent,
    Terminate,
    Hang,
}

/// One takeover.
pub(crate) struct Taken {
    pub(crate) after: Duration,
    /// The worst that this process was late meanwhile.
    pub(crate) stall: Duration,
}

impl Strike {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Kill => "kill -9",
            Self::KillWithAgent => "kill -9 with its agent",
            Self::Terminate => "SIGTERM",
            Self::Hang => "takes no connections",
        }
    }
}

/// Strikes whoever is primary, again and again; the struck one comes back as a standby. A client that
/// asks without pause, and waits for its answer, tells when the other one is primary.
pub(crate) async fn takeovers(
    world: &mut World,
    strike: Strike,
    runs: usize,
    mut cluster: Option<&mut ConsulCluster>,
) -> Vec<Taken> {
    let mut taken = Vec::new();
    let client = world.client();
    for _ in 0..runs {
        let primary = world.until_primary().await;
        let other = A + B - primary;
        // It knows who is primary and who might be, as one does that has been running.
        answers(&client, primary).await;
        let knows_both = async {
            while client.ready() < NAMES.len() {
                sleep(LOOK).await;
            }
        };
        timeout(BOUND, knows_both).await.expect("it connects to both");
        let stalls = Stalls::watch();
        let mut struck = None;
        let began = Instant::now();
        match strike {
            Strike::Kill => world.kill(primary).await,
            Strike::KillWithAgent => {
                if let Some(cluster) = cluster.as_deref_mut() {
                    cluster.agents_mut()[primary].kill().await.expect("it runs");
                }
                world.kill(primary).await;
            }
            // It ends while the other takes over.
            Strike::Terminate => {
                world.signal(primary, Signal::TERM);
                struck = world.backends[primary].take();
            }
            Strike::Hang => world.signal(primary, Signal::USR1),
        }
        answers(&client, other).await;
        taken.push(Taken { after: began.elapsed(), stall: stalls.worst() });
        if let Some(mut ending) = struck {
            ending.ended().await;
        }
        if strike == Strike::KillWithAgent
            && let Some(cluster) = cluster.as_deref_mut()
        {
            cluster.agents_mut()[primary].restart().await.expect("its agent starts again");
        }
        if strike == Strike::Hang {
            world.signal(primary, Signal::USR2);
        } else {
            world.start(primary).await;
        }
        world.backend(primary).says(&format!("standby of {}", NAMES[other])).await;
    }
    taken
}

/// Calls until `who` is the one that answers, as the primary.
async fn answers(client: &Client, who: usize) {
    let wait = async {
        loop {
            let asked = ask(CounterClient::new(client.channel.clone()), &Ask::Increment, BOUND).await;
            match asked {
                Ok(ack) if ack.instance == NAMES[who] => return,
                // The one before, which still answers.
                Ok(_) => {}
                // What may have run when its server was struck is not repeated for the caller.
                Err(_) => sleep(LOOK).await,
            }
        }
    };
    timeout(BOUND, wait).await.expect("the other takes over");
}

/// Clients increment without pause: how many a second, and how long each takes.
pub(crate) async fn rate(store: &str, world: &World) {
    world.until_primary().await;
    let client = world.client();
    let workload = Workload::start(&client.channel, &[Kind::Increment; CLIENTS]);
    let began = Instant::now();
    sleep(STEADY).await;
    let ops = workload.stop().await;
    let acknowledged = ops.iter().filter(|op| op.ack.is_some());
    let mut took: Vec<_> = acknowledged.map(|op| op.ended - op.began).collect();
    print_rate(store, &mut took, began.elapsed());
}

/// What each acknowledged increment took, all of them within `since`.
pub(crate) fn print_rate(store: &str, took: &mut [Duration], since: Duration) {
    took.sort();
    let at = |part: usize| took.get(took.len() * part / 100).copied().unwrap_or_default();
    println!(
        "{store}: acknowledged increments of {CLIENTS} clients: {:.0} a second, p50 {:.1} ms, p99 {:.1} ms",
        took.len() as f64 / since.as_secs_f64(),
        ms(at(50)),
        ms(at(99))
    );
}

/// Kills the leader of Consul; how long nobody was primary, whoever it was before and after.
pub(crate) async fn leader_dies(servers: &mut [ConsulProcess], runs: usize) -> Vec<Taken> {
    let mut gaps = Vec::new();
    for run in 0..runs {
        let leader = leader_of(servers).await;
        // Both instances ask a server that stays.
        let stays = (leader + 1) % servers.len();
        let url = servers[stays].url();
        let mut world = World::at([url.clone(), url.clone()], url);
        world.lease_number(run);
        world.start_both().await;
        let client = world.client();
        let workload = Workload::start(&client.channel, &[Kind::Add; 8]);
        workload.go_on_for(50).await;
        let stalls = Stalls::watch();
        servers[leader].kill().await.expect("it runs");
        // Over when it goes on after a gap; a gap of some kind there is, for each write needs a leader.
        sleep(Duration::from_secs(1)).await;
        workload.go_on_for_within(50, BOUND).await;
        let stall = stalls.worst();
        let ops = workload.stop().await;
        let mut ends: Vec<_> = ops.iter().filter(|op| op.ack.is_some()).map(|op| op.ended).collect();
        ends.sort();
        let after = ends.windows(2).map(|two| two[1] - two[0]).max().unwrap_or_default();
        gaps.push(Taken { after, stall });
        servers[leader].restart().await.expect("it starts again");
    }
    gaps
}

async fn leader_of(servers: &[ConsulProcess]) -> usize {
    let look = async {
        loop {
            for server in servers {
                let Ok(answer) = server.registry().get("/v1/status/leader").await else { continue };
                let leader = answer.json();
                let port = leader.as_str().and_then(|it| it.rsplit(':').next()?.parse::<u16>().ok());
                if let Some(place) = servers.iter().position(|it| Some(it.ports().server) == port) {
                    return place;
                }
            }
            sleep(LOOK).await;
        }
    };
    timeout(BOUND, look).await.expect("there is a leader")
}
