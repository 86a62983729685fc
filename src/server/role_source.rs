//! Where the role of this instance is learnt.

use tokio::sync::watch;
use tokio_util::task::TaskTracker;

use super::lease::Lease;
use crate::role::Role;

/// A [`Lease`], which goes on as long as this is kept; or a receiver of a role that comes from elsewhere.
#[derive(Clone, Debug)]
pub struct RoleSource {
    pub(super) role: watch::Receiver<Role>,
    /// What a hand-over of the lease waits for.
    pub(super) calls: Option<TaskTracker>,
    _lease: Option<Lease>,
}

impl From<&Lease> for RoleSource {
    fn from(lease: &Lease) -> Self {
        Self { role: lease.role(), calls: Some(lease.calls().clone()), _lease: Some(lease.clone()) }
    }
}

impl From<watch::Receiver<Role>> for RoleSource {
    fn from(role: watch::Receiver<Role>) -> Self {
        Self { role, calls: None, _lease: None }
    }
}

impl From<&watch::Receiver<Role>> for RoleSource {
    fn from(role: &watch::Receiver<Role>) -> Self {
        role.clone().into()
    }
}
