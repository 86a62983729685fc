//! Agents for tests: a Consul in the test's own process, and real ones.
//!
//! What talks to Consul is best tried on Consul, and [`ConsulProcess`] runs real
//! agents on ports of their own, to be killed, paused and restarted. But not every
//! machine has one, and no real one falls leaderless, answers rubbish or lets its
//! index fall when a test wants it to. So there is [`Agent`]: real HTTP on
//! loopback, with Consul's blocking queries, indexes, checks and odd answers, and
//! a [switchboard of faults](Faults). It shares no code with this crate's client,
//! so that it cannot share a misreading; one suite (`tests/conformance.rs`) runs
//! the same cases on it and on a real Consul 1.8.7.
//!
//! ```text
//!             Registration, Check                 the code under test
//!                     |                                    |
//!                 Registry ----- HTTP on loopback ---------+
//!                     |                                    |
//!      +--------------+-------------+                      |
//!      v                            v                      v
//! ConsulProcess                   Agent ---joined--- Agent (Cluster)
//! consul agent, one process       | connections, Counters
//! each; kill, pause, restart      | Faults: hang, slow, status, no leader, ...
//!                                 | API: health, agent, catalog, status, kv, txn
//!                                 v
//!                               catalog <-- TTL, TCP and GRPC checks
//! ```
//!
//! # Example
//! ```
//! use tonic_failover::testkit::{Agent, Registration};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let agent = Agent::start("dc1").await?;
//! agent.registry().register(&Registration::new("counter", "counter-1", "127.0.0.1", 4000)).await?;
//! let fault = agent.faults().status(500, "No cluster leader");
//! // ... point what is to be tested at `agent.url()`, look at `agent.counters()` ...
//! fault.off();
//! assert_eq!(agent.registry().passing("counter").await?, ["counter-1"]);
//! # Ok(()) }
//! ```
//!
//! `examples/own_tests.rs` is a whole test: code under test, two gRPC servers, a client
//! of this crate, and a registry that goes away under its calls. [`Faults`] says of each
//! switch what it does to a query that waits, and how far a real Consul does the same.
//!
//! # Limits of the embedded agent
//! No ACLs but [`Faults::filtered`], no TLS, sessions (so no locks on keys), prepared queries, nodes other than the
//! agent's own, gossip or `?cached`. Filters know `==` on `Service.Meta`, `in` and `contains`
//! on `Service.Tags`, and `and`. Without a leader, registrations show at once in
//! stale reads, where a real agent hands them on later.

mod agent;
mod answer;
mod port;
mod process;
mod registration;
mod registry;

pub use agent::{Agent, AgentError, Cluster, Counters, Faults, NotSeen, Switch};
pub use answer::{Answer, RequestError};
pub use port::Port;
pub use process::{Builder as ConsulBuilder, ConsulCluster, ConsulProcess, Ports, SignalError, StartError};
pub use registration::{Check, Registration};
pub use registry::{Registry, registry};
