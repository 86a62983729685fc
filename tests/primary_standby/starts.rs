//! Two instances that start at the same instant: one is primary, never both.

use std::{collections::BTreeSet, time::Duration};

use tokio::time::Instant;

use crate::{
    common::SOON,
    world::{A, Ask, B, Kind, NAMES, World},
};

/// So often in a test run; `STARTS` says otherwise.
const STARTS: usize = 20;
/// So long both are watched after one has answered first: whoever started with it has made up its
/// mind by then.
const WATCHED: Duration = Duration::from_millis(300);

async fn one_is_primary(kind: Kind) {
    let Some(mut world) = World::of(kind).await else { return };
    let starts = std::env::var("STARTS").map_or(STARTS, |text| text.parse().expect("a number"));
    for start in 0..starts {
        world.lease_number(start);
        world.start_together().await;
        let began = Instant::now();
        let (mut primaries, mut values, mut since) = (BTreeSet::new(), BTreeSet::new(), None);
        while since.is_none_or(|since: Instant| since.elapsed() < WATCHED) {
            assert!(began.elapsed() < SOON, "nobody becomes primary");
            let (a, b) = (Ask::Increment, Ask::Increment);
            let (a, b) = tokio::join!(world.ask(A, &a), world.ask(B, &b));
            for ack in [a, b].into_iter().flatten() {
                assert!(values.insert(ack.value), "{} was given twice", ack.value);
                primaries.insert((ack.token, ack.instance));
                since.get_or_insert_with(Instant::now);
            }
        }
        assert_eq!(primaries.len(), 1, "{primaries:?}");
        let (token, instance) = primaries.into_iter().next().unwrap();
        let other = if instance == NAMES[A] { B } else { A };
        assert_eq!(token, 1);
        world.backend(other).says(&format!("standby of {instance}")).await;
        for who in [A, B] {
            world.kill(who).await;
        }
    }
}

#[tokio::test]
async fn on_consul_of_two_that_start_together_one_is_primary() {
    one_is_primary(Kind::Consul).await;
}

#[tokio::test]
async fn on_files_of_two_that_start_together_one_is_primary() {
    one_is_primary(Kind::Files).await;
}
