//! Test agents.

mod agent;
mod answer;
mod process;
mod registration;
mod registry;

pub use agent::{Agent, AgentError, Cluster, Counters, Faults, NotSeen, Switch};
pub use answer::{Answer, RequestError};
pub use process::{Builder as ConsulBuilder, ConsulProcess, Ports, SignalError, StartError};
pub use registration::{Check, Registration};
pub use registry::{Registry, registry};
