//! The role goes from one to another, and nobody who calls sees it.

use std::time::Duration;

use tokio::time::sleep;
use tonic::Code;
use tonic_failover::client::{FailoverEvent, HedgingPolicy, MethodOptions, Policy};

use crate::{
    common::{Method, SOON, event, until},
    node::{Node, UNSTORED, runs},
    stage::{Calls, Stage, increment, options, served},
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_role_moves_under_callers_and_no_call_fails_and_each_runs_once() {
    for policy in [Policy::PickFirst, Policy::RoundRobin, Policy::LeastRequest] {
        let (a, b) = (Node::start("a"), Node::start("b"));
        let stage = Stage::ready(options().policy(policy), vec![a.instance(), b.instance()]).await;
        a.leads(1);
        let callers = Calls::start(&stage, 32, Method::Increment);
        callers.go_on_for(64).await;
        for token in 2..7 {
            let (from, to) = if token % 2 == 0 { (&a, &b) } else { (&b, &a) };
            from.stands_by(None);
            // For a while there is none, and then the old one knows who is, or does not.
            sleep(Duration::from_millis(30)).await;
            to.leads(token);
            if token % 3 == 0 {
                from.stands_by(Some(to.as_primary(token)));
            }
            callers.go_on_for(64).await;
        }
        let tally = callers.stop(&format!("{policy:?}")).await;
        assert!(tally.resent > 0, "{policy:?}: it was noticed");
        let runs = runs(&[&a, &b]);
        assert_eq!(runs.len(), tally.calls, "{policy:?}: each has run");
        assert!(runs.values().all(|&times| times == 1), "{policy:?}: and once");
        for (node, parity) in [(&a, 1), (&b, 0)] {
            let terms = node.journal.lock();
            assert!(terms.iter().all(|(_, token)| token % 2 == parity), "{policy:?}: in its own terms");
        }
        let ejected = stage.client.status().datacenters[0].ejected;
        assert_eq!(ejected, 0, "{policy:?}: nobody is ejected for being a standby");
    }
}

/// The first call after a move goes to who was the primary before.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_long_request_that_was_refused_arrives_whole_at_the_primary() {
    let (a, b) = (Node::start("a"), Node::start("b"));
    let stage = Stage::ready(options(), vec![a.instance(), b.instance()]).await;
    a.leads(1);
    assert_eq!(stage.increment("short", SOON).await.unwrap().0, "a");
    a.stands_by(None);
    b.leads(2);
    // Less than what a tonic server takes by default, and more than fits into a window of HTTP/2.
    let long = "x".repeat(3 << 20);
    let (name, attempts) = stage.increment(&long, SOON).await.unwrap();
    assert_eq!((name.as_str(), attempts > 1), ("b", true), "{attempts}");
    assert_eq!(b.journal.lock().iter().map(|(id, _)| id.len()).collect::<Vec<_>>(), [long.len()]);
}

/// As when the store is away for a while: what is under way may have been stored, then nobody is primary, then
/// the same one is again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_primary_whose_store_was_away_is_called_again_as_soon_as_it_is_back() {
    let (a, b) = (Node::start("a"), Node::start("b"));
    let options = options().failures_to_eject(2).panic_threshold(0).ejection(2 * SOON, 2 * SOON);
    let stage = Stage::ready(options, vec![a.instance(), b.instance()]).await;
    for token in 1..4 {
        a.leads(2 * token);
        assert_eq!(stage.increment("x", SOON).await.unwrap().0, "a");
        stage.until_primary("a").await;
        for _ in 0..2 {
            let status = stage.increment(UNSTORED, SOON).await.unwrap_err();
            assert_eq!((status.code(), status.message()), (Code::Unavailable, "it may have been stored"));
        }
        a.stands_by(None);
        let waits = tokio::spawn(increment(stage.channel(), "y".to_owned(), SOON));
        until(&stage.client, "nobody is primary", |c| c.status().primary.is_none()).await;
        a.leads(2 * token + 1);
        // Were it ejected for its answers, it would not be tried before the deadline.
        let reply = waits.await.unwrap().unwrap();
        assert_eq!(served(&reply).0, "a");
        assert_eq!(stage.client.status().datacenters[0].ejected, 0);
        a.stands_by(None);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hand_over_waits_for_the_calls_in_flight_and_its_callers_see_nothing() {
    let (a, b) = (Node::start("a"), Node::start("b"));
    let stage = Stage::ready(options(), vec![a.instance(), b.instance()]).await;
    a.leads(1);
    *a.work.lock() = Duration::from_millis(50);
    let callers = Calls::start(&stage, 8, Method::Increment);
    callers.go_on_for(50).await;
    a.fence.close();
    a.fence.idle().await;
    let ran = a.ran();
    a.stands_by(None);
    b.leads(2);
    callers.go_on_for(50).await;
    let tally = callers.stop("a hand-over").await;
    assert_eq!(a.ran(), ran, "nothing ran after it was closed");
    assert_eq!(ran + b.ran(), tally.calls);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn status_binding_and_events_tell_who_is_primary() {
    let (a, b) = (Node::start("a"), Node::start("b"));
    let stage = Stage::ready(options(), vec![a.instance(), b.instance()]).await;
    let mut events = stage.client.events();
    let line = stage.client.status().to_string();
    assert!(line.contains("no primary known, 2 known"), "{line}");
    for (token, to, from) in [(1, &b, None), (2, &a, Some(&b))] {
        if let Some(from) = from {
            from.stands_by(Some(to.as_primary(token)));
        }
        to.leads(token);
        assert_eq!(stage.increment("x", SOON).await.unwrap().0, to.name);
        let told = event(&mut events, "another is the primary", |event| match event {
            FailoverEvent::PrimaryChanged { from, to, token, .. } => {
                Some((from.as_ref().map(|it| it.name.clone()), to.name.clone(), token.map(|it| it.get())))
            }
            _ => None,
        });
        let token = from.map(|_| token);
        assert_eq!(told.await, (from.map(|it| it.name.to_owned()), to.name.to_owned(), token), "hinted");
        stage.until_primary(to.name).await;
        let bound = stage.client.binding().instance().unwrap().name.clone();
        assert_eq!(bound, to.name, "who uses the binding's own channel is led there too");
        let line = stage.client.status().to_string();
        let words = token.map_or("primary".to_owned(), |token| format!("primary of term {token}"));
        assert_eq!(line, format!("{}@here ready, {words}, 2 known", to.name));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_primary_is_not_hedged_to_a_standby() {
    let nodes = [Node::start("a"), Node::start("b"), Node::start("c")];
    let hedging = MethodOptions::new().hedging(HedgingPolicy::new(Duration::from_millis(5)));
    let options = options().method("/", hedging).safe_method("/counter.v1.Counter/Increment");
    let stage = Stage::ready(options, nodes.iter().map(Node::instance).collect()).await;
    nodes[0].leads(1);
    stage.increment("found", SOON).await.unwrap();
    stage.until_primary("a").await;
    *nodes[0].work.lock() = Duration::from_millis(100);
    let asked: Vec<_> = nodes.iter().map(Node::asked).collect();
    for n in 0..5 {
        assert_eq!(stage.increment(&format!("{n}"), SOON).await.unwrap(), ("a".to_owned(), 1));
    }
    let more: Vec<_> = nodes.iter().zip(asked).map(|(node, before)| node.asked() - before).collect();
    assert_eq!(more, [5, 0, 0]);
}
