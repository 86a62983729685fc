//! Asking Consul: the only module that knows the crates it is asked with.
//!
//! `consulrs` has no health endpoint, no time limits and no bound on an answer;
//! it panics on some addresses, tokens and headers and escapes names twice. So
//! the endpoints here are our own, run through its client with our own HTTP
//! settings; nothing of these crates shows outside.
//!
//! ```text
//! ConsulConfig -> ConsulClient -- HealthQuery --> transport -> agent
//!                       ^                            |
//!                       +-- HealthAnswer <- instances (pure), RegistryError
//! ```
//!
//! ```no_run
//! use tonic_failover::consul::{ConsulClient, ConsulConfig, HealthQuery};
//!
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! let consul = ConsulClient::new(ConsulConfig::from_env()?)?;
//! let answer = consul.healthy_instances(&HealthQuery::new("counter")?).await?;
//! for instance in &answer.snapshot.instances {
//!     println!("{instance} listens on {}", instance.id);
//! }
//! # Ok(()) }
//! ```

mod access;
mod agent_service;
mod agents;
mod answer;
mod client;
mod config;
mod error;
#[cfg(any(test, feature = "testkit"))]
#[doc(hidden)]
pub mod fuzz;
mod index;
mod instances;
mod kv;
mod lanes;
mod listed;
#[cfg(any(test, feature = "testkit"))]
mod mechanisms;
mod name;
mod pool;
mod query;
mod quiet;
mod refusal;
mod registration;
mod repeat;
mod secrets;
mod token;
mod transport;
mod txn;

pub(crate) use access::AccessProbe;
pub use access::Denied;
pub use agent_service::AgentService;
pub use answer::{HealthAnswer, SkipReason, SkippedEntry};
pub use client::ConsulClient;
pub use config::{ConfigError, ConsulConfig};
pub use error::RegistryError;
pub use index::{BlockingIndex, IndexStep};
pub(crate) use kv::{KvAnswer, KvEntry};
#[cfg(any(test, feature = "testkit"))]
pub(crate) use mechanisms::Without;
pub use name::{InvalidName, ServiceName};
pub use query::{Consistency, HealthQuery};
pub use registration::{Check, InvalidRegistration, ServiceRegistration};
pub(crate) use txn::{Objection, Txn, TxnAnswer, TxnError, TxnFailure, Unanswered};
