use proptest::prelude::*;

use super::*;
use crate::client::policy::{MethodOptions, RetryPolicy, Rules, Throttling};

const LOST: Setback = Setback::Lost;
const BUSY: Setback = Setback::Status(Code::Unavailable, Pushback::Unsaid);

fn retry() -> Retry {
    Retry::new(Budget::share(0.0, 1), CallWithout::default())
}

fn throttled(max_tokens: u32) -> Retry {
    Retry::new(Budget::tokens(Throttling { max_tokens, token_ratio: 1.0 }), CallWithout::default())
}

fn rules(policy: RetryPolicy) -> RetryRules {
    Rules::new(&MethodOptions::new().retry(policy), 4).retry
}

fn tries(made: u32) -> Tries {
    Tries { made, ..Tries::default() }
}

/// Sends again until that ends: the waits before each.
fn waits(retry: &Retry, rules: &RetryRules, setbacks: &[Setback], safe: bool) -> Vec<Duration> {
    let mut tries = Tries::default();
    let mut waits = Vec::new();
    for setback in setbacks {
        tries.made += 1;
        match retry.again(rules, *setback, safe, true, &mut tries) {
            Some(wait) => waits.push(wait),
            None => break,
        }
    }
    waits
}

#[tokio::test]
async fn what_was_never_sent_is_resent_up_to_the_cap() {
    let (retry, rules) = (retry(), rules(RetryPolicy::new()));
    let again = |replayable, made| {
        retry.again(&rules, Setback::NeverSent, false, replayable, &mut tries(made)).is_some()
    };
    assert!(again(true, 3));
    assert!(!again(true, 4), "the cap");
    assert!(!again(false, 1), "the body is gone");
}

#[tokio::test]
async fn what_was_refused_is_resent_once() {
    let (retry, rules, mut tries) = (retry(), rules(RetryPolicy::new()), tries(1));
    assert!(retry.again(&rules, Setback::Refused, false, true, &mut tries).is_some());
    assert!(retry.again(&rules, Setback::Refused, false, true, &mut tries).is_none());
    assert!(!tries.ran);
}

#[tokio::test]
async fn what_may_have_run_is_resent_only_if_safe_and_within_the_budget() {
    let (retry, rules) = (retry(), rules(RetryPolicy::new()));
    assert!(retry.again(&rules, LOST, false, true, &mut tries(1)).is_none());
    let resent = (0..100).filter(|_| retry.again(&rules, LOST, true, true, &mut tries(1)).is_some());
    assert_eq!(resent.count(), 10, "one a second over the window of ten");
}

#[tokio::test]
async fn a_policys_attempts_are_counted_apart_from_those_that_never_ran() {
    let policy = RetryPolicy::new().max_attempts(2).retry_on([Code::Unavailable]);
    let rules = rules(policy);
    let unseen = [Setback::NeverSent, Setback::Refused, Setback::NeverSent];
    let all = [&unseen[..], &[BUSY, BUSY]].concat();
    assert_eq!(waits(&retry(), &rules, &all, false).len(), 4, "three unseen, and one of the policy's");
    assert_eq!(waits(&retry(), &rules, &[Setback::NeverSent; 10], false).len(), 4, "a cap for all");
    assert_eq!(waits(&retry(), &rules, &[LOST, LOST], false).len(), 1, "UNAVAILABLE is named");
}

#[tokio::test]
async fn the_first_resend_is_immediate_and_later_ones_wait_longer_and_longer() {
    let retry = retry();
    assert_eq!(retry.pace(1), Duration::ZERO);
    let mut shortest = Duration::ZERO;
    for made in 2..40 {
        let full = Backoff::OURS.wait(made - 2, 0.5);
        let wait = retry.pace(made);
        assert!(full >= shortest, "{made}");
        assert!(wait >= full.mul_f64(0.799) && wait <= full.mul_f64(1.201), "{made}: {wait:?}");
        shortest = full;
    }
    assert_eq!(shortest, Backoff::OURS.max);
}

#[tokio::test]
async fn a_policys_back_off_begins_at_once_and_anew_after_a_servers_word() {
    let ms = Duration::from_millis;
    let policy = RetryPolicy::new()
        .max_attempts(9)
        .backoff(ms(100), ms(1000), 3.0)
        .jitter(0.0)
        .retry_on([Code::Unavailable]);
    let told = Setback::Status(Code::Unavailable, Pushback::After(ms(77)));
    let setbacks = [BUSY, LOST, BUSY, BUSY, told, BUSY, BUSY];
    let waits = waits(&retry(), &rules(policy), &setbacks, false);
    assert_eq!(waits, [100, 300, 900, 1000, 77, 100, 300].map(ms));
}

#[tokio::test]
async fn a_server_that_says_never_is_obeyed_and_costs_a_token() {
    let retry = throttled(10);
    let rules = rules(RetryPolicy::new().retry_on([Code::Unavailable]));
    for code in [Code::Unavailable, Code::InvalidArgument].repeat(3) {
        let never = Setback::Status(code, Pushback::Never);
        assert!(retry.again(&rules, never, true, true, &mut tries(1)).is_none());
    }
    assert!(!retry.budget.pay(), "six of ten tokens are gone");
}

#[tokio::test]
async fn a_servers_time_makes_no_fatal_status_one_to_resend() {
    let told = Setback::Status(Code::InvalidArgument, Pushback::After(Duration::ZERO));
    let retry = throttled(1);
    assert!(retry.again(&rules(RetryPolicy::new()), told, true, true, &mut tries(1)).is_none());
    assert!(retry.budget.pay(), "and costs nothing");
}

#[tokio::test]
async fn tokens_are_taken_for_what_is_meant_to_be_resent_whether_or_not_it_is() {
    let rules = rules(RetryPolicy::new().max_attempts(2).retry_on([Code::Unavailable]));
    let fails = |retry: &Retry, setback, replayable, made| {
        retry.again(&rules, setback, false, replayable, &mut Tries { counted: made - 1, ..tries(made) })
    };
    let retry = throttled(10);
    assert!(fails(&retry, BUSY, true, 1).is_some());
    assert!(fails(&retry, BUSY, true, 2).is_none(), "the last attempt");
    assert!(fails(&retry, LOST, false, 1).is_none(), "the body is gone");
    assert!(fails(&retry, Setback::Status(Code::NotFound, Pushback::Unsaid), true, 1).is_none());
    assert!(fails(&retry, Setback::NeverSent, true, 1).is_some());
    assert!(fails(&retry, BUSY, true, 1).is_some(), "four are gone, six are left");
    assert!(fails(&retry, BUSY, true, 1).is_none(), "five are left: half");
    retry.budget.succeeded();
    retry.budget.succeeded();
    assert!(fails(&retry, BUSY, true, 1).is_some(), "seven, of which it took one");
}

fn setback() -> impl Strategy<Value = Setback> {
    let pushback = prop_oneof![
        3 => Just(Pushback::Unsaid),
        1 => (0_u64..100).prop_map(|ms| Pushback::After(Duration::from_millis(ms))),
        1 => Just(Pushback::Never),
    ];
    let code = prop::sample::select(vec![Code::Unavailable, Code::Aborted, Code::NotFound]);
    prop_oneof![
        Just(Setback::NeverSent),
        Just(Setback::Refused),
        Just(LOST),
        (code, pushback).prop_map(|(code, pushback)| Setback::Status(code, pushback)),
    ]
}

proptest! {
    /// Calls of all kinds with all kinds of setbacks, one after the other, on one
    /// budget: what must hold of every step.
    #[test]
    fn no_call_is_resent_that_must_not_be(
        calls in prop::collection::vec((any::<bool>(), prop::collection::vec(setback(), 1..20)), 1..20),
        named in prop::option::of(prop::sample::subsequence(vec![Code::Unavailable, Code::Aborted], 0..=2)),
        attempts in prop::option::of(1_u32..6), tokens in prop::option::of(1_u32..20),
    ) {
        let mut policy = RetryPolicy::new();
        policy.max_attempts = attempts;
        policy.codes = named.clone().map(|codes| codes.into_iter().collect());
        let rules = rules(policy);
        let named = |code| named.as_ref().is_some_and(|codes| codes.contains(&code));
        let retry = match tokens {
            Some(max_tokens) => throttled(max_tokens),
            None => retry(),
        };
        let mut paid = 0;
        let mut left = tokens.map(|tokens| u64::from(tokens) * 2);
        for (safe, setbacks) in calls {
            let (mut tries, mut unpaid_refusals, mut ran) = (Tries::default(), 0, 0);
            for setback in setbacks {
                tries.made += 1;
                let counted = tries.counted;
                let wait = retry.again(&rules, setback, safe, true, &mut tries);
                let cost = tries.counted - counted;
                let declared = match setback {
                    Setback::Status(code, _) => named(code) || (safe && policy_is_default(&rules, code)),
                    Setback::Refused | Setback::Lost => safe || named(Code::Unavailable),
                    Setback::NeverSent => false,
                };
                let never = matches!(setback, Setback::Status(_, Pushback::Never));
                let unseen = setback == Setback::NeverSent
                    || (setback == Setback::Refused && unpaid_refusals == 0);
                if let Some(left) = &mut left
                    && !unseen
                    && (declared || never)
                {
                    *left = left.saturating_sub(2);
                }
                unpaid_refusals += u32::from(setback == Setback::Refused && unseen);
                prop_assert_eq!(cost, u32::from(wait.is_some() && !unseen), "what is seen is paid for");
                if wait.is_none() {
                    let full = tries.made == rules.sends || tries.counted + 1 == rules.attempts;
                    let spent = match left {
                        Some(left) => left <= u64::from(tokens.unwrap_or_default()),
                        None => paid == 10,
                    };
                    prop_assert!(full || never || !(declared || unseen) || spent, "no reason: {:?}", setback);
                    break;
                }
                paid += cost;
                ran += u32::from(!matches!(setback, Setback::NeverSent | Setback::Refused));
                prop_assert!(unseen || declared, "may have run, and is not safe: {:?}", setback);
                prop_assert!(!never, "the server has said no");
                prop_assert!(tries.made < rules.sends && tries.counted < rules.attempts);
                prop_assert!(tokens.is_some() || paid <= 10, "beyond the budget");
                prop_assert_eq!(tries.ran, ran > 0);
            }
        }
    }
}

fn policy_is_default(rules: &RetryRules, code: Code) -> bool {
    rules.codes.is_none() && code == Code::Unavailable
}

#[tokio::test]
async fn the_jitter_of_a_policy_without_a_back_off_varies_our_own_pace() {
    let retry = Retry::new(Budget::share(0.0, 1000), CallWithout::default());
    let exactly = rules(RetryPolicy::new().jitter(0.0));
    assert_eq!(waits(&retry, &exactly, &[LOST; 3], true), [0, 20, 32].map(Duration::from_millis));
}
