//! The client half: from a service's name to answered calls.
//!
//! A call must never wait for the registry, and the registry must never wait for
//! a call. So there are two halves: one task for each service listens to a registry,
//! dials, ejects and publishes what is ready; each call picks from what is
//! published, sends, judges, and reports what it found. They meet in a watch
//! channel and a channel of reports.
//!
//! ```text
//!  registry --> resolver --> worker (fleet: pure) --> watch<Binding> --> FailoverChannel
//!                              ^                                              |
//!                              +----------------- reports --------------------+
//! ```
//!
//! Start at [`ConsulService`], or at [`Services`] for any other [`registry`];
//! [`GrpcClient::channel`] is what generated clients take.

mod admission;
mod answer;
mod attempt;
mod balance;
mod binding;
mod builder;
mod call;
mod channel;
mod choice;
mod connector;
mod datacenters;
mod deadline;
mod details;
mod endpoint;
mod error;
mod event;
mod fleet;
mod frames;
#[cfg(any(test, feature = "testkit"))]
#[doc(hidden)]
pub mod fuzz;
mod handle;
mod head;
mod headers;
mod health;
mod hook;
mod latecomers;
mod mechanisms;
mod methods;
mod misspelt;
mod options;
mod outcome;
#[cfg(test)]
mod plays;
mod policy;
mod primary;
mod recording;
pub mod registry;
mod replay;
mod report;
mod resolver;
mod response;
mod retry;
mod service;
mod service_config;
mod services;
mod signal;
mod socket;
#[cfg(feature = "testkit")]
mod stages;
mod status;
#[cfg(test)]
mod tests;
mod together;
mod traffic;
mod weights;
mod worker;

#[cfg(any(test, feature = "testkit"))]
#[doc(hidden)]
pub use self::mechanisms::Mechanism;
#[cfg(feature = "testkit")]
pub use self::stages::stages;
pub use self::{
    binding::Binding,
    builder::ConsulServiceBuilder,
    call::Served,
    channel::FailoverChannel,
    choice::CallOptions,
    datacenters::Fallback,
    error::{BuildError, CallError, CallErrorKind, NotReady, UnknownService, UpdateError},
    event::{EventStream, FailoverEvent, RebindCause},
    handle::GrpcClient,
    hook::{CallFailure, Drain},
    options::{Policy, ServiceOptions},
    policy::{HedgingPolicy, MethodOptions, RetryPolicy},
    resolver::RegistryDoubt,
    service::ConsulService,
    service_config::{ServiceConfig, ServiceConfigError},
    services::{Services, ServicesBuilder},
    status::{DatacenterStatus, ServiceStatus},
};
