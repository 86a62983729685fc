//! A read of some datacenter's catalog: the way there, and the wait for a change.

use std::{sync::Arc, time::Duration};

use axum::{
    Json,
    response::{IntoResponse, Response},
};
use http::HeaderValue;
use serde_json::Value;
use tokio::time::{Instant, sleep_until};
use tower::util::rng::{HasherRng, Rng};

use super::{
    super::{
        catalog::{Catalog, Subject},
        faults::{Effect, Table},
        node::{Node, Peer},
        waiting::Waiting,
    },
    query::Query,
    refusal::Refusal,
};

/// How long a request to a datacenter that hangs waits at the most: 32 to 40 s
/// were measured.
const DATACENTER_HANGS: Duration = Duration::from_secs(40);

/// The servers' port, which nobody listens on here:
/// <https://developer.hashicorp.com/consul/docs/install/ports>
const REFUSED: &str = "rpc error getting client: failed to get conn: \
                       dial tcp <nil>->127.0.0.1:8300: connect: connection refused";
const BROKEN: &str = "rpc error making call: EOF";

/// A read under way.
struct Read<'a> {
    node: &'a Arc<Node>,
    query: &'a Query,
    subject: Subject<'a>,
    /// Whose catalog is asked.
    target: Arc<Node>,
}

/// Reads with `look`, after a change where the query asks for one.
pub(crate) async fn read(
    node: &Arc<Node>,
    query: &Query,
    subject: Subject<'_>,
    look: impl Fn(&Catalog) -> Response,
) -> Result<Response, Refusal> {
    let target = route(node, query).await?;
    Read { node, query, subject, target }.answer(look).await
}

/// The agent that `query` is for.
pub(super) async fn route(node: &Arc<Node>, query: &Query) -> Result<Arc<Node>, Refusal> {
    let other = query.datacenter.as_deref().filter(|name| *name != node.datacenter);
    let target = match other {
        None => Arc::clone(node),
        Some(other) => {
            if node.faults.hold(Some(DATACENTER_HANGS), |faults| hangs(faults, other)).await {
                return Err(Refusal::servers(BROKEN));
            }
            match node.peer(other) {
                Peer::Unknown => return Err(Refusal::servers("No path to datacenter")),
                Peer::Closed => return Err(Refusal::servers(REFUSED)),
                Peer::Open(_) if is_partitioned(&node.faults, other) => {
                    return Err(Refusal::servers(REFUSED));
                }
                Peer::Open(peer) => peer,
            }
        }
    };
    if let Some((wait, _)) = leaderless(&target.faults)
        && !query.stale
        && target.faults.hold(Some(wait), |faults| leaderless(faults).is_some()).await
    {
        return Err(Refusal::servers("No cluster leader"));
    }
    Ok(target)
}

// === impl Read ===

impl Read<'_> {
    async fn answer(&self, look: impl Fn(&Catalog) -> Response) -> Result<Response, Refusal> {
        let mut waiting = None;
        let answer = self.answer_after(&mut waiting, look).await;
        if let Some(waiting) = waiting {
            waiting.end();
        }
        answer
    }

    async fn answer_after(
        &self,
        waiting: &mut Option<Waiting>,
        look: impl Fn(&Catalog) -> Response,
    ) -> Result<Response, Refusal> {
        let mut moved = self.target.subscribe();
        let mut ours = self.node.faults.subscribe();
        let mut theirs = self.target.faults.subscribe();
        let emptied = self.is_emptied();
        // Spreads the herd, as Consul does:
        // https://developer.hashicorp.com/consul/api-docs/features/blocking
        let jitter = (self.query.wait / 16).mul_f64(HasherRng::new().next_f64());
        let deadline = Instant::now() + self.query.wait + jitter;
        let epoch = self.target.catalog.lock().epoch();
        loop {
            moved.mark_unchanged();
            ours.mark_unchanged();
            theirs.mark_unchanged();
            self.interrupted().await?;
            {
                let catalog = self.target.catalog.lock();
                let index = catalog.index_of(self.subject);
                let fell = catalog.epoch() != epoch;
                let faults = &self.target.faults;
                let endless = faults.is(|it| matches!(it, Effect::Endless));
                let moved = index > self.query.index
                    || fell
                    || emptied != self.is_emptied()
                    || Instant::now() >= deadline;
                let at_once = self.query.index == 0 || faults.is(|it| matches!(it, Effect::AtOnce));
                if at_once || (moved && !endless) {
                    let answer = if self.is_emptied() {
                        Json(Value::Array(Vec::new())).into_response()
                    } else {
                        look(&catalog)
                    };
                    return Ok(self.respond(if fell { self.query.index } else { index }, answer));
                }
            }
            waiting.get_or_insert_with(|| Waiting::new(self.node, &moved, deadline));
            tokio::select! {
                // All senders live in what `self` holds, so no channel can close.
                _ = moved.changed() => {}
                _ = ours.changed() => {}
                _ = theirs.changed() => {}
                () = sleep_until(deadline), if Instant::now() < deadline => {}
            }
        }
    }

    /// Whether the way to the target is gone by now.
    async fn interrupted(&self) -> Result<(), Refusal> {
        if !Arc::ptr_eq(self.node, &self.target) {
            let name = self.target.datacenter.as_str();
            let hung = self.node.faults.hold(Some(DATACENTER_HANGS), |faults| hangs(faults, name)).await;
            if hung || self.target.is_closed() || is_partitioned(&self.node.faults, name) {
                return Err(Refusal::servers(BROKEN));
            }
        }
        if !self.query.stale && leaderless(&self.target.faults).is_some() {
            return Err(Refusal::servers(BROKEN));
        }
        Ok(())
    }

    fn is_emptied(&self) -> bool {
        let Subject::Service(name) = self.subject else { return false };
        self.target.faults.is(
            |effect| matches!(effect, Effect::Empty(service) | Effect::Filtered(service) if service == name),
        )
    }

    fn respond(&self, index: u64, mut answer: Response) -> Response {
        let leaderless = leaderless(&self.target.faults);
        let contact = leaderless.map_or(0, |(_, since)| since.elapsed().as_millis());
        let consistency = match (self.query.stale, self.query.consistent) {
            (true, _) => "stale",
            (_, true) => "consistent",
            _ => "leader",
        };
        let headers = answer.headers_mut();
        headers.insert("x-consul-index", HeaderValue::from(index));
        let known = if leaderless.is_some() { "false" } else { "true" };
        headers.insert("x-consul-knownleader", HeaderValue::from_static(known));
        headers.insert("x-consul-lastcontact", HeaderValue::from(u64::try_from(contact).unwrap_or(u64::MAX)));
        headers.insert("x-consul-effective-consistency", HeaderValue::from_static(consistency));
        answer
    }
}

/// How long a read waits for a leader that is not there, and since when it is not.
pub(crate) fn leaderless(faults: &Table) -> Option<(Duration, Instant)> {
    faults.find(|rule| match rule.effect {
        Effect::NoLeader(wait) => Some((wait, rule.since)),
        _ => None,
    })
}

fn is_partitioned(faults: &Table, datacenter: &str) -> bool {
    faults.is(|effect| matches!(effect, Effect::Partition(name) if name == datacenter))
}

fn hangs(faults: &Table, datacenter: &str) -> bool {
    faults.is(|effect| matches!(effect, Effect::HangDatacenter(name) if name == datacenter))
}
