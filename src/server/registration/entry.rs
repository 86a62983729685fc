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

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::role::FencingToken;

    fn entry(sign: Sign) -> Entry {
        Entry {
            service: "counter".to_owned(),
            id: "a".to_owned(),
            address: InstanceId::new("::1", 4000),
            tags: vec!["v2".to_owned()],
            meta: [("rack".to_owned(), "b".to_owned())].into(),
            weights: None,
            sign,
            deregister_critical_after: Some(Duration::from_secs(90)),
            nonce: Nonce::new("n1"),
        }
    }

    /// What an agent would answer.
    fn registered(entry: &Entry, wanted: &Wanted) -> AgentService {
        let definition = serde_json::to_value(entry.definition(wanted).unwrap()).unwrap();
        let mut found = definition.clone();
        found["Service"] = definition["Name"].clone();
        serde_json::from_value(found).unwrap()
    }

    #[test]
    fn what_was_registered_is_known_again_and_what_has_changed_is_not() {
        let now = Instant::now();
        let entry = entry(Sign::Heartbeat(Duration::from_secs(1)));
        let standby = Role::Standby { primary: None };
        let wanted = entry.wanted(Some(&standby), now);
        let found = registered(&entry, &wanted);
        assert_eq!(entry.compare(None, &wanted), Found::Nothing);
        assert_eq!(entry.compare(Some(found.clone()), &wanted), Found::AsWanted);
        let other_role = entry.wanted(Some(&Role::Unknown), now);
        assert_eq!(entry.compare(Some(found.clone()), &other_role), Found::Outdated);
        let moved = AgentService { port: 4001, ..found.clone() };
        assert_eq!(entry.compare(Some(moved), &wanted), Found::Outdated);
        for nonce in [None, Some("n2")] {
            let mut other = found.clone();
            other.meta.remove(NONCE);
            other.meta.extend(nonce.map(|it| (NONCE.to_owned(), it.to_owned())));
            assert_eq!(entry.compare(Some(other.clone()), &wanted), Found::Another(other));
        }
    }

    #[test]
    fn a_role_is_shown_for_as_long_as_it_holds() {
        let (now, second) = (Instant::now(), Duration::from_secs(1));
        let entry = entry(Sign::Heartbeat(second));
        let primary = Role::Primary { token: FencingToken::new(3), until: now + second };
        let shown = |role: Option<&Role>, now| {
            let wanted = entry.wanted(role, now);
            (wanted.tags.join(" "), wanted.meta.get(ROLE).cloned(), wanted.meta.get(TOKEN).cloned())
        };
        let role = |role: &str| Some(role.to_owned());
        assert_eq!(shown(None, now), ("v2".to_owned(), None, None));
        assert_eq!(shown(Some(&primary), now), ("v2 primary".to_owned(), role("primary"), role("3")));
        assert_eq!(shown(Some(&primary), now + second), ("v2".to_owned(), role("unknown"), None));
        let standby = Role::Standby { primary: None };
        assert_eq!(shown(Some(&standby), now), ("v2 standby".to_owned(), role("standby"), None));
    }

    #[test]
    fn the_agent_is_told_how_to_find_out_and_when_to_give_up() {
        let second = Duration::from_secs(1);
        for (sign, check) in [
            (Sign::Heartbeat(second), json!({ "TTL": "1000ms" })),
            (Sign::Tcp(second), json!({ "TCP": "[::1]:4000", "Interval": "1000ms", "Timeout": "1000ms" })),
            (Sign::Grpc(second), json!({ "GRPC": "[::1]:4000", "Interval": "1000ms", "Timeout": "1000ms" })),
        ] {
            let entry = entry(sign);
            let definition = entry.definition(&entry.wanted(None, Instant::now())).unwrap();
            let mut told = serde_json::to_value(definition).unwrap()["Check"].take();
            let told = told.as_object_mut().unwrap();
            assert_eq!(told.remove("CheckID").unwrap(), "service:a");
            assert_eq!(told.remove("DeregisterCriticalServiceAfter").unwrap(), "90000ms");
            assert_eq!(json!(told), check);
        }
    }
}
