#![doc = include_str!("../README.md")]

pub mod client;
pub mod consul;
#[cfg(feature = "demo")]
pub mod demo;
mod instance;
mod not_primary;
mod role;
pub mod server;
#[cfg(feature = "testkit")]
pub mod testkit;

pub use instance::{Instance, InstanceId, Snapshot};
pub use not_primary::{NotPrimary, PrimaryLost};
pub use role::{FencingToken, Primary, Role};
