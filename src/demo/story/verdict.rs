//! Whether anything failed that should not have. Pure.

use super::{
    journal::{Journal, times},
    tally::{Act, Call, Excuse, Tally},
};
use crate::demo::{calls::Method, text::count};

/// One promise, held or not.
#[derive(Debug)]
pub(crate) struct Check {
    pub(crate) held: bool,
    pub(crate) text: String,
}

/// Holds the calls against the promises. `journals` are those of all processes,
/// in the order in which they were started.
pub(crate) fn judge(tally: &Tally, journals: &[Journal]) -> Vec<Check> {
    let mut checks = vec![safe(tally, Method::Get), safe(tally, Method::Add), increments(tally, journals)];
    checks.extend(gentle(tally));
    checks.push(once(tally, journals));
    let broken: usize = journals.iter().map(|journal| journal.broken).sum();
    if broken > 0 {
        checks.push(Check {
            held: false,
            text: format!("{} cannot be read", count(broken as u64, "journal line")),
        });
    }
    let open = tally.calls().iter().filter(|call| call.end.is_none()).count();
    if open > 0 {
        checks.push(Check { held: false, text: format!("{} never ended", count(open as u64, "call")) });
    }
    checks
}

fn safe(tally: &Tally, method: Method) -> Check {
    let (all, failed) = of(tally, method);
    let calls = count(all, "call");
    let text = match failed {
        0 => format!("{method}: {calls}, none failed"),
        _ => format!("{method}: {calls}, {failed} failed; none may, for a {method} can be resent"),
    };
    Check { held: failed == 0 && all > 0, text }
}

/// Nobody can know whether an `Increment` ran that a process took with it; every
/// other one must be answered. Held act by act, so that none excuses another's.
fn increments(tally: &Tally, journals: &[Journal]) -> Check {
    let (all, failed) = of(tally, Method::Increment);
    let calls = count(all, "call");
    let mut excused_in_all = 0;
    for (number, act) in tally.acts().iter().enumerate() {
        let in_act =
            |call: &&Call| call.act == number && call.method == Method::Increment && has_failed(call);
        let failed = tally.calls().iter().filter(in_act).count();
        let excused = excused(tally, act, journals);
        excused_in_all += excused;
        if failed > excused {
            let text = format!(
                "Increment: {failed} failed in act \"{}\", and only {excused} had a reason: the hands of a process that died or hung",
                act.title,
            );
            return Check { held: false, text };
        }
    }
    let text = match failed {
        0 => format!("Increment: {calls}, none failed"),
        _ => format!(
            "Increment: {calls}, {failed} failed, of the {excused_in_all} that were in the hands of a process which died or hung"
        ),
    };
    Check { held: all > 0, text }
}

fn excused(tally: &Tally, act: &Act, journals: &[Journal]) -> usize {
    match act.excuse {
        Excuse::None | Excuse::Gentle => 0,
        Excuse::Killed(process) => {
            journals.get(process).map_or(0, |journal| journal.in_hand(Method::Increment).count())
        }
        Excuse::Paused { from, until } => tally.out_between(Method::Increment, from, until).count(),
    }
}

/// A server that is asked to end costs nobody anything.
fn gentle(tally: &Tally) -> Option<Check> {
    let act = tally.acts().iter().position(|act| act.excuse == Excuse::Gentle)?;
    let (sums, _) = tally.sums_of(act);
    let calls = count(sums.answered + sums.failed, "call");
    let failed = if sums.failed == 0 { "none".to_owned() } else { sums.failed.to_string() };
    Some(Check { held: sums.failed == 0, text: format!("SIGTERM: {calls} around it, {failed} failed") })
}

fn once(tally: &Tally, journals: &[Journal]) -> Check {
    let times = times(journals, Method::Increment);
    let repeated = times.values().filter(|times| **times > 1).count();
    let answered = tally.calls().iter().filter(|call| {
        call.method == Method::Increment && call.end.as_ref().is_some_and(|end| end.result.is_ok())
    });
    let missing = answered.filter(|call| !times.contains_key(call.id.as_str())).count();
    let of = format!("{} server processes", journals.len());
    let text = match (repeated, missing) {
        (0, 0) => format!("no Increment ran twice, by the journals of {of}"),
        (0, _) => format!("{missing} answered Increments are in no journal of {of}"),
        _ => format!("{} reached two servers, by the journals of {of}", count(repeated as u64, "Increment")),
    };
    Check { held: repeated == 0 && missing == 0, text }
}

fn of(tally: &Tally, method: Method) -> (u64, u64) {
    let calls = tally.calls().iter().filter(|call| call.method == method);
    calls.fold((0, 0), |(all, failed), call| (all + 1, failed + u64::from(has_failed(call))))
}

fn has_failed(call: &Call) -> bool {
    call.end.as_ref().is_some_and(|end| end.result.is_err())
}

#[cfg(test)]
#[path = "verdict_tests.rs"]
mod tests;
