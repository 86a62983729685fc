use std::time::Duration;

use tokio::time::Instant;

use super::*;
use crate::demo::calls::{Answer, Failed};

fn ok() -> Result<Answer, Failed> {
    Ok(Answer { instance: "a".into(), datacenter: "dc1".into(), attempts: 1 })
}

fn failed() -> Result<Answer, Failed> {
    let message = "gone".to_owned();
    Err(Failed { code: tonic::Code::Unavailable, message, instance: None, may_have_run: Some(true) })
}

/// One act with these calls of `Increment`, and one good call of each other method.
fn played(excuse: Excuse, results: Vec<Result<Answer, Failed>>) -> Tally {
    let mut tally = Tally::default();
    let now = Instant::now();
    tally.open("the act");
    tally.excuse(excuse);
    for method in [Method::Get, Method::Add] {
        let call = tally.begin(method, "x".into(), now);
        tally.end(call, now, ok());
    }
    for (number, result) in results.into_iter().enumerate() {
        let call = tally.begin(Method::Increment, number.to_string(), now);
        tally.end(call, now, result);
    }
    tally
}

fn lost(tally: &Tally, journals: &[&str]) -> Vec<String> {
    let journals: Vec<_> = journals.iter().map(|text| Journal::parse(text)).collect();
    judge(tally, &journals).into_iter().filter(|check| !check.held).map(|check| check.text).collect()
}

#[test]
fn all_is_well_when_only_what_a_dead_process_had_in_hand_failed() {
    let tally = played(Excuse::Killed(0), vec![ok(), failed()]);
    let journal = "received Increment 0\nanswered Increment 0\nreceived Increment 1\n";
    assert_eq!(lost(&tally, &[journal]), [""; 0]);
}

#[test]
fn a_failure_more_than_the_dead_process_had_in_hand_is_one_too_many() {
    let tally = played(Excuse::Killed(0), vec![failed(), failed()]);
    let lost = lost(&tally, &["received Increment 1\n"]);
    assert!(
        lost[0].starts_with("Increment: 2 failed in act \"the act\", and only 1 had a reason"),
        "{lost:?}"
    );
}

#[test]
fn in_an_act_without_a_death_no_failure_is_excused() {
    let tally = played(Excuse::None, vec![failed()]);
    assert_eq!(lost(&tally, &["received Increment 0\n"]).len(), 1);
}

#[test]
fn sigterm_excuses_nothing() {
    let tally = played(Excuse::Gentle, vec![failed()]);
    let lost = lost(&tally, &["received Increment 0\n"]);
    assert_eq!(lost.len(), 2, "{lost:?}");
    assert_eq!(lost[1], "SIGTERM: 3 calls around it, 1 failed");
}

#[test]
fn a_paused_process_excuses_what_was_out_meanwhile() {
    let from = Instant::now();
    let tally = played(Excuse::Paused { from, until: from + Duration::from_secs(1) }, vec![failed()]);
    assert_eq!(lost(&tally, &["received Increment 0\n"]), [""; 0]);
}

#[test]
fn an_increment_in_two_journals_ran_twice() {
    let tally = played(Excuse::None, vec![ok()]);
    let lost = lost(&tally, &["received Increment 0\n", "received Increment 0\n"]);
    assert_eq!(lost, ["1 Increment reached two servers, by the journals of 2 server processes"]);
}

#[test]
fn an_answer_without_a_journal_line_is_noticed() {
    let tally = played(Excuse::None, vec![ok()]);
    assert_eq!(lost(&tally, &["", ""]), ["1 answered Increments are in no journal of 2 server processes"]);
}

#[test]
fn a_get_never_fails_and_silence_proves_nothing() {
    let mut tally = played(Excuse::Killed(0), vec![ok()]);
    let now = Instant::now();
    let call = tally.begin(Method::Get, "y".into(), now);
    tally.end(call, now, failed());
    tally.begin(Method::Get, "z".into(), now);
    let journal = "received Increment 0\n";
    let lost = lost(&tally, &[journal]);
    assert!(lost[0].starts_with("Get: 3 calls, 1 failed"), "{lost:?}");
    assert_eq!(lost[1], "1 call never ended");
    assert_eq!(self::lost(&Tally::default(), &[]).len(), 3, "no calls, no promise held");
}
