//! The server half: two instances of one service, one of them primary at a time.
//!
//! A lease in a [`store`] says who. Its holder renews it, stops by its own clock before
//! anyone else can have taken it over, and writes only in transactions that fail once
//! another holds it. So a crash costs the lease's length, and never a write.
//!
//! ```text
//!  LeaseStore (Consul, files) <--> Lease --watch<Role>--> FenceLayer, FencedState
//!                                    ^                    Registration, application
//!                                  Probe (through the serving listener)
//! ```
//!
//! | to | take |
//! |---|---|
//! | be primary or standby, and know which | [`Lease`], with a [`ConsulLeaseStore`](store::ConsulLeaseStore), or on one host a [`FileLeaseStore`](store::FileLeaseStore) |
//! | refuse calls as a standby | [`FenceLayer`], around a generated service |
//! | keep a state that only the primary writes | [`FencedState`] |
//! | be found in Consul, with or without a lease, and leave it in order | [`Registration`] |
//! | lose the lease, or the place in Consul, where nothing is served | [`Probe`] |
//!
//! The [crate's page](crate#primary-and-standby) has a whole server of these, and all their settings. A client goes to the
//! primary with `primary_only()` in its `ServiceOptions`.

mod fence;
mod lease;
mod life;
mod probe;
mod pulse;
mod registration;
mod role_source;
mod state;
pub mod store;

pub use fence::{Fence, FenceFuture, FenceLayer};
pub use lease::{CampaignError, HandOverError, HandedOver, Lease, LeaseBuilder};
pub use probe::{Probe, ProbeError};
pub use registration::{
    NotDrained, Registration, RegistrationBuilder, RegistrationError, RegistrationHealth, RegistrationStatus,
};
pub use role_source::RoleSource;
pub use state::{FencedState, FencedStateBuilder, InvalidState, StateError, UpdateError};
