//! What is to be registered, and how what is found compares with it. Pure.

use std::{collections::BTreeMap, time::Duration};

use tokio::time::Instant;

use crate::{
    consul::{AgentService, Check, InvalidRegistration, ServiceRegistration},
    instance::InstanceId,
    role::Role,
    server::store::Nonce,
};

/// The key of the metadata that tells one process's registration from another's.
pub(super) const NONCE: &str = "nonce";
/// The keys of the metadata that follow the role.
pub(super) const ROLE: &str = "role";
pub(super) const TOKEN: &str = "token";
/// The tags that follow the role.
pub(super) const PRIMARY: &str = "primary";
pub(super) const STANDBY: &str = "standby";

/// How the agent learns that the instance lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sign {
    /// We say so, three times within this.
    Heartbeat(Duration),
    /// It connects, this often.
    Tcp(Duration),
    /// It asks `grpc.health.v1`, this often.
    Grpc(Duration),
}

/// What is to be registered, but for what follows the role.
#[derive(Clone, Debug)]
pub(super) struct Entry {
    pub(super) service: String,
    pub(super) id: String,
    pub(super) address: InstanceId,
    pub(super) tags: Vec<String>,
    pub(super) meta: BTreeMap<String, String>,
    pub(super) weights: Option<(u16, u16)>,
    pub(super) sign: Sign,
    pub(super) deregister_critical_after: Option<Duration>,
    pub(super) nonce: Nonce,
}

/// What follows the role, and the rest of what may be read back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Wanted {
    tags: Vec<String>,
    meta: BTreeMap<String, String>,
}

/// What the agent has under our id, held against what is wanted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// Nothing.
    Nothing,
    /// What is wanted.
    AsWanted,
    /// This process's, and not as it is wanted.
    Outdated,
    /// Another process's.
    Another(AgentService),
}

// === impl Entry ===

impl Entry {
    /// What is to be there in this role at `now`. Without one nothing is said of roles.
    pub(super) fn wanted(&self, role: Option<&Role>, now: Instant) -> Wanted {
        let (mut tags, mut meta) = (self.tags.clone(), self.meta.clone());
        meta.insert(NONCE.to_owned(), self.nonce.as_str().to_owned());
        let mut is = |role: &str| meta.insert(ROLE.to_owned(), role.to_owned());
        match role {
            None => {}
            Some(role) => match (role.primary_at(now), role) {
                (Some(token), _) => {
                    is(PRIMARY);
                    tags.push(PRIMARY.to_owned());
                    meta.insert(TOKEN.to_owned(), token.to_string());
                }
                (None, Role::Standby { .. }) => {
                    is(STANDBY);
                    tags.push(STANDBY.to_owned());
                }
                // A primary whose time is over knows as little.
                (None, Role::Unknown | Role::Primary { .. }) => {
                    is("unknown");
                }
            },
        }
        Wanted { tags, meta }
    }

    /// How `found` compares with what is wanted.
    pub(super) fn compare(&self, found: Option<AgentService>, wanted: &Wanted) -> Found {
        let Some(found) = found else { return Found::Nothing };
        if found.meta.get(NONCE).map(String::as_str) != Some(self.nonce.as_str()) {
            return Found::Another(found);
        }
        let same = found.name == self.service
            && found.address == self.address.host()
            && found.port == i64::from(self.address.port())
            && found.tags == wanted.tags
            && found.meta == wanted.meta;
        if same { Found::AsWanted } else { Found::Outdated }
    }

    /// The definition to register.
    pub(super) fn definition(&self, wanted: &Wanted) -> Result<ServiceRegistration, InvalidRegistration> {
        let (host, port) = (self.address.host(), self.address.port());
        let mut it = ServiceRegistration::new(&self.service, &self.id, host, port)?.check(self.check());
        for tag in &wanted.tags {
            it = it.tag(tag);
        }
        for (key, value) in &wanted.meta {
            it = it.meta(key, value);
        }
        Ok(match self.weights {
            Some((passing, warning)) => it.weights(passing, warning),
            None => it,
        })
    }

    fn check(&self) -> Check {
        let check = match self.sign {
            Sign::Heartbeat(ttl) => Check::ttl(ttl),
            Sign::Tcp(interval) => Check::tcp(self.address.authority(), interval).timeout(interval),
            Sign::Grpc(interval) => Check::grpc(self.address.authority(), interval).timeout(interval),
        };
        match self.deregister_critical_after {
            Some(after) => check.deregister_critical_after(after),
            None => check,
        }
    }
}
