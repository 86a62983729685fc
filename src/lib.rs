//! A gRPC client that keeps answering while instances, datacenters and Consul
//! itself come and go.

pub mod client;
pub mod consul;
#[cfg(feature = "demo")]
pub mod demo;
mod instance;
#[cfg(feature = "testkit")]
pub mod testkit;

pub use instance::{Instance, InstanceId, Snapshot};
