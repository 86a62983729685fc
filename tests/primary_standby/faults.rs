//! What may happen to an instance, and how it is undone.

use std::time::Duration;

use rustix::process::Signal;
use tokio::time::sleep;
use tonic_failover::testkit::ConsulProcess;

use crate::world::{A, B, NAMES, World};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// SIGKILL, and a new process after a while.
    Kill,
    /// SIGTERM, and a new process after a while.
    Terminate,
    /// SIGSTOP and SIGCONT.
    Pause,
    /// It takes no connections for a while.
    Deaf,
    /// A planned hand-over to the other.
    HandOver,
    /// Its way to Consul is cut for a while.
    CutOff,
    /// Consul is killed, and started again with its data.
    Consul,
    /// Of several servers the leader is killed, and started again with its data.
    Leader,
    /// SIGKILL with its agent, and new processes after a while.
    KillWithAgent,
}

impl Fault {
    pub(crate) const OF_FILES: [Self; 5] =
        [Self::Kill, Self::Terminate, Self::Pause, Self::Deaf, Self::HandOver];
    pub(crate) const OF_CONSUL: [Self; 7] =
        [Self::Kill, Self::Terminate, Self::Pause, Self::Deaf, Self::HandOver, Self::CutOff, Self::Consul];
    pub(crate) const OF_A_CLUSTER: [Self; 8] = [
        Self::Kill,
        Self::Terminate,
        Self::Pause,
        Self::Deaf,
        Self::HandOver,
        Self::CutOff,
        Self::Leader,
        Self::KillWithAgent,
    ];
}

/// Lets it happen to `who`, lasts for `pause`, and undoes it.
pub(crate) async fn strike(world: &mut World, fault: Fault, who: usize, pause: Duration) {
    match fault {
        Fault::Kill => {
            world.kill(who).await;
            sleep(pause).await;
            world.start(who).await;
        }
        Fault::Terminate => {
            world.terminate(who).await;
            sleep(pause).await;
            world.start(who).await;
        }
        Fault::Pause => {
            world.signal(who, Signal::STOP);
            sleep(pause).await;
            world.signal(who, Signal::CONT);
        }
        Fault::Deaf => {
            world.signal(who, Signal::USR1);
            sleep(pause).await;
            world.signal(who, Signal::USR2);
        }
        Fault::HandOver => hand_over(world, who).await,
        Fault::CutOff => {
            world.cut_off(who, true);
            sleep(pause).await;
            world.cut_off(who, false);
        }
        Fault::Consul => {
            let consul = world.consul.as_mut().expect("this fault is of Consul's");
            consul.kill().await.unwrap();
            sleep(pause / 2).await;
            consul.restart().await.unwrap();
        }
        Fault::Leader => {
            let cluster = world.cluster.as_mut().expect("this fault is of a cluster's");
            let Some(leader) = cluster.leader().await else { return };
            cluster.kill(&[leader]).await.unwrap();
            sleep(pause).await;
            cluster.restart(&[leader]).await.unwrap();
        }
        Fault::KillWithAgent => {
            agent_of(world, who).kill().await.unwrap();
            world.kill(who).await;
            sleep(pause).await;
            agent_of(world, who).restart().await.unwrap();
            world.start(who).await;
        }
    }
}

fn agent_of(world: &mut World, who: usize) -> &mut ConsulProcess {
    &mut world.cluster.as_mut().expect("this fault is of a cluster's").agents_mut()[who]
}

/// Asks `who` to hand over; a standby refuses, which is well.
async fn hand_over(world: &World, who: usize) {
    use tonic_failover::demo::pb::{HandOverRequest, operator_client::OperatorClient};
    let at = format!("http://127.0.0.1:{}", world.port(who));
    if let Ok(mut operator) = OperatorClient::connect(at).await {
        let to = NAMES[A + B - who].to_owned();
        let _ = operator.hand_over(HandOverRequest { to }).await;
    }
}
