//! The switchboard: what an agent does wrong on purpose.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use http::StatusCode;
use parking_lot::Mutex;
use tokio::{
    sync::watch,
    time::{Instant, sleep},
};

use super::node::Node;

/// How long a leaderless Consul lets a default read wait before it refuses:
/// 7.0 to 7.3 s were measured, its `rpc_hold_timeout` is 7 s.
const HOLD: Duration = Duration::from_secs(7);

/// Switches an agent's faults on. Each switch works at once on what is asked from
/// then on. A blocking query that waits for news at that moment is treated by each in
/// its own way, and its documentation says so: where it "waits on", it meets the fault
/// when it is answered, so a test that is to see the fault soon gives the client a short
/// `wait` of its own, or cuts its connection with `drop_connections().off()`. A fault
/// stays on until its [`Switch`] is turned off or all are [cleared](Faults::clear).
/// Dropping a [`Switch`] leaves the fault on.
///
/// # What a real Consul does
/// `tests/conformance/faults.rs` makes a real Consul 1.8.7 do the same and compares
/// status, headers and body: [`refuse`](Self::refuse) (the process killed),
/// [`hang`](Self::hang) (stopped), [`no_leader`](Self::no_leader) (two of three servers
/// killed), [`status`](Self::status) with 403 (an unknown token),
/// [`rate_limit`](Self::rate_limit) (`limits.rpc_rate` of a client agent, which sends no
/// `Retry-After`), [`limit_connections`](Self::limit_connections)
/// (`limits.http_max_conns_per_client`), [`reset_index`](Self::reset_index) (a snapshot
/// restored), [`partition`](Self::partition) (the other datacenter's server killed),
/// [`hang_datacenter`](Self::hang_datacenter) (stopped), [`unjoined`](Self::unjoined) (the own
/// server restarted), and
/// [`Agent::restart_empty`](super::Agent::restart_empty);
/// `tests/conformance/acl.rs` does it with [`filtered`](Self::filtered).
///
/// These have no counterpart that a real one could be made to show:
/// [`garbage`](Self::garbage), [`oversized`](Self::oversized) and
/// [`answer_at_once`](Self::answer_at_once) are what something between client and agent
/// does, a proxy or a captive portal; [`lose_answers`](Self::lose_answers) is a connection that breaks at
/// the worst moment; [`never_end`](Self::never_end) is a defect, of an agent or of
/// the way to it; [`drop_connections`](Self::drop_connections) is a device that cuts
/// them; [`slow`](Self::slow) is a busy machine, which cannot be had at will;
/// [`empty`](Self::empty) gathers what many causes look like, of which the list hidden
/// from a token and the lost data are compared.
#[derive(Clone, Copy, Debug)]
pub struct Faults<'a> {
    node: &'a Arc<Node>,
    scope: Scope,
}

/// One fault that was switched on.
#[derive(Clone, Debug)]
pub struct Switch {
    table: Arc<Table>,
    id: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scope {
    All,
    /// `/v1/health` alone.
    Health,
}

#[derive(Clone, Debug)]
pub(crate) enum Effect {
    Hang,
    Slow(Duration),
    Status(StatusCode, Bytes),
    Garbage,
    Oversized(usize),
    RateLimit(Duration),
    Empty(String),
    Filtered(String),
    AtOnce,
    Endless,
    Connections(usize),
    NoLeader(Duration),
    Partition(String),
    HangDatacenter(String),
    Unjoined,
    DropConnections,
    LoseAnswers,
    Refuse,
}

#[derive(Clone, Debug)]
pub(crate) struct Rule {
    id: u64,
    scope: Scope,
    pub(crate) effect: Effect,
    pub(crate) since: Instant,
}

/// The faults that are on.
#[derive(Debug, Default)]
pub(crate) struct Table {
    rules: Mutex<Rules>,
    changed: watch::Sender<()>,
}

#[derive(Debug, Default)]
struct Rules {
    on: Vec<Rule>,
    ids: u64,
    /// How often connections were to be cut, so that a fault which is on for a
    /// blink cuts them all the same.
    cuts: u64,
}

// === impl Faults ===

impl<'a> Faults<'a> {
    pub(crate) fn new(node: &'a Arc<Node>) -> Self {
        Self { node, scope: Scope::All }
    }

    /// The same switches for health requests only (`/v1/health/...`). Concerns
    /// [`hang`](Self::hang), [`slow`](Self::slow), [`status`](Self::status),
    /// [`rate_limit`](Self::rate_limit), [`garbage`](Self::garbage) and [`oversized`](Self::oversized).
    #[must_use]
    pub fn health_only(self) -> Self {
        Self { scope: Scope::Health, ..self }
    }

    /// Answers nothing. Requests that arrive, and answers that are due, wait
    /// until the fault is off and go on then, as with a stopped process.
    /// A query that waits for news waits on.
    pub fn hang(&self) -> Switch {
        self.on(Effect::Hang)
    }

    /// Lets every request wait this long before it is looked at.
    /// A query that waits for news waits on, and is answered as ever.
    pub fn slow(&self, by: Duration) -> Switch {
        self.on(Effect::Slow(by))
    }

    /// Answers every request with this status and body, and the headers of a refusal
    /// by Consul's servers, the index 1 among them. Codes other than 200 to 999 are
    /// sent as 500; 200 is an answer of a form that Consul does not use, for example
    /// `status(200, "{}")`. A query that waits for news waits on.
    pub fn status(&self, code: u16, body: impl Into<Bytes>) -> Switch {
        let code = StatusCode::from_u16(code).ok().filter(|it| !it.is_informational());
        self.on(Effect::Status(code.unwrap_or(StatusCode::INTERNAL_SERVER_ERROR), body.into()))
    }

    /// Answers 429 with a `Retry-After` of so many whole seconds, at least one, which
    /// proxies send and Consul 1.8 leaves out (for that, `status(429, "")`). A query
    /// that waits for news waits on.
    pub fn rate_limit(&self, retry_after: Duration) -> Switch {
        self.on(Effect::RateLimit(retry_after))
    }

    /// Answers 200 with a body that is no JSON. A query that waits for news waits on.
    pub fn garbage(&self) -> Switch {
        self.on(Effect::Garbage)
    }

    /// Answers 200 with an empty list of `bytes` bytes: valid, and far too long. A query
    /// that waits for news waits on.
    pub fn oversized(&self, bytes: usize) -> Switch {
        self.on(Effect::Oversized(bytes))
    }

    /// Answers 200 with an empty list for one service, its index unmoved, as real
    /// Consul does for a token that lost its rights. Blocked queries for it end
    /// at once, when it is switched on and when it is switched off.
    pub fn empty(&self, service: impl Into<String>) -> Switch {
        self.on(Effect::Empty(service.into()))
    }

    /// Hides one service from all tokens, as `default_policy = "deny"` does from one
    /// without `service:read` on it: as [`empty`](Self::empty), and the question for
    /// single rights (`/v1/internal/acl/authorize`) says so. While this is off, that
    /// question finds ACLs disabled. Blocked queries end as with `empty`; in a real
    /// Consul they wait on, since no right that is taken away wakes them.
    pub fn filtered(&self, service: impl Into<String>) -> Switch {
        self.on(Effect::Filtered(service.into()))
    }

    /// Answers blocking queries at once, whatever their index, as a proxy does that
    /// drops it. Those that wait end at once as well.
    pub fn answer_at_once(&self) -> Switch {
        self.on(Effect::AtOnce)
    }

    /// Lets blocking queries never end, whatever changes and whatever their wait is.
    /// Those without an index are answered. When it is switched off, those that waited go
    /// on: what has changed or is over by then is answered at once.
    pub fn never_end(&self) -> Switch {
        self.on(Effect::Endless)
    }

    /// Takes so many connections and resets what comes above them, instead of
    /// Consul's 200. All that are there are cut first, and with them the queries that
    /// wait. A query whose client has gone counts until its wait is over, as with a real one.
    /// A real one closes what comes above; a client sees a reset or an end then, as chance
    /// will have it, and here always the reset.
    pub fn limit_connections(&self, most: usize) -> Switch {
        self.on(Effect::Connections(most))
    }

    /// Takes the datacenter's leader away: default and consistent reads are
    /// refused after 7 s, blocked ones at once; stale ones are answered, with
    /// `X-Consul-KnownLeader: false`. Requests to the agent itself work on.
    /// Concerns what other agents ask of this datacenter as well. (A real server that
    /// has never had a leader refuses stale reads too.)
    pub fn no_leader(&self) -> Switch {
        self.no_leader_after(HOLD)
    }

    /// The same with another wait than 7 s, for tests in a hurry.
    pub fn no_leader_after(&self, wait: Duration) -> Switch {
        self.on(Effect::NoLeader(wait))
    }

    /// Cuts this agent off from another datacenter, as if its port refused:
    /// requests for it get 500 at once, blocked ones too. It stays listed.
    pub fn partition(&self, datacenter: impl Into<String>) -> Switch {
        self.on(Effect::Partition(datacenter.into()))
    }

    /// Lets the way to another datacenter hang: requests for it wait, and get
    /// 500 after 40 s, which is the longest that was measured. A query about it that
    /// waits for news does so too; switched off earlier, they are answered.
    pub fn hang_datacenter(&self, datacenter: impl Into<String>) -> Switch {
        self.on(Effect::HangDatacenter(datacenter.into()))
    }

    /// Knows no other datacenter, as a server does that has just been restarted and has not
    /// joined the others yet: it lists its own alone, and requests for another get 500
    /// `No path to datacenter`. A query about another that waits for news waits on.
    pub fn unjoined(&self) -> Switch {
        self.on(Effect::Unjoined)
    }

    /// Closes every connection, and every new one as soon as it is there. Queries that
    /// wait end with theirs.
    pub fn drop_connections(&self) -> Switch {
        self.on(Effect::DropConnections)
    }

    /// Does what every request of another method than GET asks for, and closes its connection in
    /// place of an answer: whoever asked cannot know whether it was done. GETs, and the queries
    /// that wait among them, are answered; transactions that only read are not.
    pub fn lose_answers(&self) -> Switch {
        self.on(Effect::LoseAnswers)
    }

    /// Closes every connection, the waiting queries' among them, and refuses new ones, as
    /// a dead process does. The port stays this agent's. Takes effect within moments, on and off.
    pub fn refuse(&self) -> Switch {
        self.on(Effect::Refuse)
    }

    /// Lets every index fall below any before, as the restore of a snapshot
    /// does. Happens once. Blocked queries end at once with the index they had
    /// asked with.
    pub fn reset_index(&self) {
        self.node.catalog.lock().fall();
        self.node.changed();
    }

    /// Switches every fault off.
    pub fn clear(&self) {
        let table = &self.node.faults;
        table.rules.lock().on.clear();
        table.changed.send_replace(());
    }

    fn on(&self, effect: Effect) -> Switch {
        let table = &self.node.faults;
        let mut rules = table.rules.lock();
        rules.ids += 1;
        let id = rules.ids;
        rules.cuts +=
            u64::from(matches!(effect, Effect::DropConnections | Effect::Refuse | Effect::Connections(_)));
        rules.on.push(Rule { id, scope: self.scope, effect, since: Instant::now() });
        drop(rules);
        table.changed.send_replace(());
        Switch { table: Arc::clone(table), id }
    }
}

// === impl Switch ===

impl Switch {
    /// Switches this fault off. Of no effect where it is off already.
    pub fn off(&self) {
        self.table.rules.lock().on.retain(|rule| rule.id != self.id);
        self.table.changed.send_replace(());
    }
}

// === impl Table ===

impl Table {
    pub(crate) fn subscribe(&self) -> watch::Receiver<()> {
        self.changed.subscribe()
    }

    /// The newest fault of the kind that `pick` looks for.
    pub(crate) fn find<T>(&self, pick: impl Fn(&Rule) -> Option<T>) -> Option<T> {
        self.rules.lock().on.iter().rev().find_map(pick)
    }

    /// The same among those that concern a request.
    pub(crate) fn of<T>(&self, health: bool, pick: impl Fn(&Effect) -> Option<T>) -> Option<T> {
        self.find(|rule| if rule.scope == Scope::All || health { pick(&rule.effect) } else { None })
    }

    pub(crate) fn is(&self, picked: impl Fn(&Effect) -> bool) -> bool {
        self.find(|rule| picked(&rule.effect).then_some(())).is_some()
    }

    pub(crate) fn cuts(&self) -> u64 {
        self.rules.lock().cuts
    }

    /// Waits while `on` says so, `limit` at most; true where it said so to the end.
    pub(crate) async fn hold(&self, limit: Option<Duration>, on: impl Fn(&Self) -> bool) -> bool {
        let mut changed = self.subscribe();
        let over = async {
            match limit {
                Some(limit) => sleep(limit).await,
                None => std::future::pending().await,
            }
        };
        tokio::pin!(over);
        loop {
            changed.mark_unchanged();
            if !on(self) {
                return false;
            }
            tokio::select! {
                // The sender lives in `self`, so the channel cannot close.
                _ = changed.changed() => {}
                () = &mut over => return true,
            }
        }
    }
}
