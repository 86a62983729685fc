//! The steps by which the first design was to be accepted, and what it asks of a standby.

use std::{process::Stdio, time::Duration};

use rustix::process::Signal;
use tokio::{
    io::{AsyncBufReadExt, BufReader},
    time::{Instant, sleep, timeout},
};
use tonic::Code;
use tonic_failover::NotPrimary;

use crate::{
    common::SOON,
    history::Ack,
    world::{A, Ask, B, Kind, NAMES, Stalls, TAKEOVER, World},
};

/// 1, 2 from the first; the other refuses; the first dies; 3 from the other, in time.
async fn takes_over(kind: Kind) {
    let Some(mut world) = World::of(kind).await else { return };
    world.start_both().await;
    let by_a = |value| (value, NAMES[A].to_owned());
    for value in [1, 2] {
        let ack = world.ask(A, &Ask::Increment).await.unwrap();
        assert_eq!((ack.value, ack.instance), by_a(value));
    }
    let refused = world.ask(B, &Ask::Increment).await.unwrap_err();
    assert_eq!(refused.code(), Code::Unavailable);
    let primary = NotPrimary::of(&refused).expect("it says why").primary.expect("it names the primary");
    assert_eq!(primary.instance, NAMES[A]);
    assert_eq!(primary.address.authority(), format!("127.0.0.1:{}", world.port(A)));
    assert_eq!(world.ask(A, &Ask::Get).await.unwrap().value, 2, "the refused one has changed nothing");

    world.kill(A).await;
    let ack = taken_over_in_time(&world, B).await;
    assert_eq!((ack.value, ack.instance.as_str()), (3, NAMES[B]));
    assert!(ack.token > 1, "a new term");
    world.backend(B).says("became PRIMARY").await;

    // The first comes back, as a standby.
    world.start(A).await;
    world.backend(A).says("standby of counter-b").await;
    assert!(NotPrimary::of(&world.ask(A, &Ask::Increment).await.unwrap_err()).is_some());
    assert_eq!(world.ask(B, &Ask::Increment).await.unwrap().value, 4);

    // It is given the role by name, and dies: whoever gave it has stood back for it, and does so no longer.
    let (done, said) = demo(None, &["hand-over", "--to", NAMES[A], "--at", &at(&world, B)]).await;
    assert!(done && said.contains("counter-a is primary"), "{said}");
    // By the lease: it learns so itself a moment later.
    world.backend(A).says("became PRIMARY").await;
    assert_eq!(world.ask(A, &Ask::Increment).await.unwrap().value, 5);
    world.kill(A).await;
    let ack = taken_over_in_time(&world, B).await;
    assert_eq!((ack.value, ack.instance.as_str()), (6, NAMES[B]));

    // Nor is it waited for longer where it is dead already.
    let b = at(&world, B);
    let given = tokio::spawn(async move { demo(None, &["hand-over", "--to", NAMES[A], "--at", &b]).await });
    let refused = async {
        while world.ask(B, &Ask::Get).await.is_ok() {
            sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(SOON, refused).await.expect("it is given up");
    let ack = taken_over_in_time(&world, B).await;
    assert_eq!((ack.value, ack.instance.as_str()), (7, NAMES[B]));
    let (done, said) = given.await.unwrap();
    assert!(!done && said.contains("nobody has taken over in time"), "{said}");
}

/// The first answer of an instance whose primary has just been killed.
async fn taken_over_in_time(world: &World, by: usize) -> Ack {
    let (stalls, killed) = (Stalls::watch(), Instant::now());
    let ack = loop {
        match timeout(SOON, world.ask(by, &Ask::Increment)).await.expect("it answers") {
            Ok(ack) => break ack,
            Err(status) => assert!(NotPrimary::of(&status).is_some(), "{status:?}"),
        }
        sleep(Duration::from_millis(5)).await;
    };
    let took = killed.elapsed();
    assert!(took <= TAKEOVER + stalls.worst(), "{took:?}, the machine stood still for {:?}", stalls.worst());
    ack
}

fn at(world: &World, who: usize) -> String {
    format!("127.0.0.1:{}", world.port(who))
}

#[tokio::test]
async fn on_consul_the_standby_goes_on_from_the_last_value_within_three_seconds() {
    takes_over(Kind::Consul).await;
}

#[tokio::test]
async fn on_files_the_standby_goes_on_from_the_last_value_within_three_seconds() {
    takes_over(Kind::Files).await;
}

/// One that was deposed while it stood still says so, and can be primary again.
async fn steps_down(kind: Kind) {
    let Some(mut world) = World::of(kind).await else { return };
    world.start_both().await;
    world.ask(A, &Ask::Add("k".into())).await.unwrap();
    world.signal(A, Signal::STOP);
    world.backend(B).says("became PRIMARY").await;
    let second = world.ask(B, &Ask::Increment).await.unwrap();
    assert_eq!(second.value, 2);
    world.signal(A, Signal::CONT);
    world.backend(A).says("lost primary role").await;
    world.backend(A).says("standby of counter-b").await;
    assert!(NotPrimary::of(&world.ask(A, &Ask::Increment).await.unwrap_err()).is_some());
    world.terminate(B).await;
    world.backend(A).says("became PRIMARY").await;
    let again = world.ask(A, &Ask::Add("k".into())).await.unwrap();
    assert_eq!(again.value, 1, "its key has been counted");
    let third = world.ask(A, &Ask::Increment).await.unwrap();
    assert_eq!(third.value, 3);
    assert!(third.token > second.token);
}

#[tokio::test]
async fn on_consul_a_deposed_primary_steps_down_and_can_be_primary_again() {
    steps_down(Kind::Consul).await;
}

#[tokio::test]
async fn on_files_a_deposed_primary_steps_down_and_can_be_primary_again() {
    steps_down(Kind::Files).await;
}

/// What takes no connection any more is taken over, though its process lives.
async fn hangs(kind: Kind) {
    let Some(mut world) = World::of(kind).await else { return };
    world.start_both().await;
    world.ask(A, &Ask::Increment).await.unwrap();
    world.signal(A, Signal::USR1);
    world.backend(A).says("lost primary role").await;
    world.backend(B).says("became PRIMARY").await;
    assert_eq!(world.ask(B, &Ask::Increment).await.unwrap().value, 2);
    world.signal(A, Signal::USR2);
    world.terminate(B).await;
    world.backend(A).says("became PRIMARY").await;
    assert_eq!(world.ask(A, &Ask::Increment).await.unwrap().value, 3);
}

#[tokio::test]
async fn on_consul_a_primary_that_takes_no_connections_is_taken_over() {
    hangs(Kind::Consul).await;
}

#[tokio::test]
async fn on_files_a_primary_that_takes_no_connections_is_taken_over() {
    hangs(Kind::Files).await;
}

/// The command line, as the README has it: what it printed, and whether it succeeded.
async fn demo(consul: Option<&str>, arguments: &[&str]) -> (bool, String) {
    let mut command = tokio::process::Command::new(env!("CARGO_BIN_EXE_demo"));
    command.args(arguments).stdin(Stdio::null()).kill_on_drop(true);
    if let Some(consul) = consul {
        command.env("CONSUL_HTTP_ADDR", consul);
    }
    let output = timeout(SOON, command.output()).await.expect("it ends").unwrap();
    let text = [output.stdout, output.stderr].map(|it| String::from_utf8_lossy(&it).into_owned()).concat();
    (output.status.success(), text)
}

#[tokio::test]
async fn by_hand_two_instances_on_one_host_count_and_refuse() {
    let world = World::of(Kind::Files).await.unwrap();
    let mut world = world.with(&["--access-log"]);
    world.start_both().await;
    let (a, b) = (at(&world, A), at(&world, B));
    for value in [1, 2] {
        let (done, said) = demo(None, &["call", "--at", &a]).await;
        assert!(done, "{said}");
        assert_eq!(said.trim(), format!(r#"{{"counter":{value},"instance":"counter-a"}}"#));
    }
    let (done, said) = demo(None, &["call", "--at", &b]).await;
    assert!(!done && said.contains("NOT_PRIMARY: the primary is counter-a at 127.0.0.1:"), "{said}");
    // Each instance names itself in its access log.
    world.backend(A).says("counter-a: POST /counter.v1.Counter/Increment answered").await;
    world.backend(B).says("counter-b: POST /counter.v1.Counter/Increment Unavailable").await;
    let (done, said) = demo(None, &["hand-over", "--to", "counter-b", "--at", &a]).await;
    assert!(done && said.contains("counter-b is primary, term 2"), "{said}");
    world.backend(B).says("became PRIMARY").await;
    let (done, said) = demo(None, &["call", "--at", &b]).await;
    assert!(done && said.contains(r#""counter":3"#), "{said}");
    let (done, said) = demo(None, &["hand-over", "--to", "counter-b", "--at", &b]).await;
    assert!(!done && said.contains("counter-b is the primary already"), "{said}");
}

#[tokio::test]
async fn a_backend_whose_store_is_away_says_why_it_is_not_primary() {
    let folder = tempfile::tempdir().unwrap();
    let lease = folder.path().join("lease");
    let mut command = tokio::process::Command::new(env!("CARGO_BIN_EXE_demo"));
    command
        .args(["backend", "--no-consul", "--name", "a", "--lease"])
        .arg(format!("file:{}", lease.display()));
    command.env_remove("RUST_LOG").env("NO_COLOR", "1");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
    let mut backend = command.spawn().unwrap();
    let mut said = BufReader::new(backend.stdout.take().unwrap()).lines();
    let mut logged = BufReader::new(backend.stderr.take().unwrap()).lines();
    let told = async {
        while !said.next_line().await.unwrap().expect("it goes on").contains("became PRIMARY") {}
        std::fs::rename(&lease, folder.path().join("away")).unwrap();
        loop {
            let line = logged.next_line().await.unwrap().expect("it goes on");
            if line.contains("the lease's store does not answer") {
                return line;
            }
        }
    };
    let line = timeout(SOON, told).await.expect("it is told");
    assert!(line.contains(lease.to_str().unwrap()), "{line}");
}

#[tokio::test]
async fn the_primary_is_found_in_consul_and_hands_over_on_command() {
    let Some(mut world) = World::of(Kind::Consul).await else { return };
    world.start_both().await;
    let consul = world.consul.as_ref().unwrap().url();
    let (done, said) = demo(Some(&consul), &["call"]).await;
    assert!(done && said.contains(r#"{"counter":1,"instance":"counter-a"}"#), "{said}");
    let (done, said) = demo(Some(&consul), &["hand-over", "--to", "counter-b"]).await;
    assert!(done && said.contains("counter-b is primary, term 2"), "{said}");
    world.backend(A).says("lost primary role").await;
    world.backend(A).says("standby of counter-b").await;
    let (done, said) = demo(Some(&consul), &["call"]).await;
    assert!(done && said.contains(r#"{"counter":2,"instance":"counter-b"}"#), "{said}");
}

#[tokio::test]
async fn alone_and_restarted_an_instance_is_primary_again() {
    let mut world = World::of(Kind::Files).await.unwrap();
    world.start(A).await;
    world.backend(A).says("became PRIMARY").await;
    let first = world.ask(A, &Ask::Increment).await.unwrap();
    world.kill(A).await;
    world.start(A).await;
    world.backend(A).says("became PRIMARY").await;
    let second = world.ask(A, &Ask::Increment).await.unwrap();
    assert_eq!((first.value, second.value), (1, 2));
    assert!(second.token > first.token);
}

#[tokio::test]
async fn rubbish_in_place_of_the_lease_and_the_state_crashes_nobody() {
    let mut world = World::of(Kind::Files).await.unwrap();
    world.start_both().await;
    world.ask(A, &Ask::Increment).await.unwrap();
    let folder = world.path("lease-0");
    for file in std::fs::read_dir(&folder).unwrap() {
        let path = file.unwrap().path();
        std::fs::write(&path, "rubbish").unwrap();
    }
    // Whoever is primary after that: the state cannot be read, which is said, and both live on.
    let look = async {
        loop {
            for who in [A, B] {
                if let Err(status) = world.ask(who, &Ask::Increment).await
                    && NotPrimary::of(&status).is_none()
                    && status.message().contains("state")
                {
                    return;
                }
            }
            sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(SOON, look).await.expect("the state is said to be unreadable");
    for who in [A, B] {
        world.terminate(who).await;
    }
}
