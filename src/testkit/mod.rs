//! Test agents: a real `consul` as a child process.

mod answer;
mod process;
mod registry;

pub use answer::{Answer, RequestError};
pub use process::{Builder as ConsulBuilder, ConsulProcess, Ports, SignalError, StartError};
pub use registry::{Registry, registry};
