//! What pays for attempts beyond the first: a share of all calls, or gRPC's tokens.

use std::{
    sync::atomic::{AtomicU32, Ordering},
    time::Duration,
};

use tower::retry::budget::{Budget as _, TpsBudget};

/// How long the share looks back.
const WINDOW: Duration = Duration::from_secs(10);

/// The budget of one service.
pub(crate) enum Budget {
    Share(Share),
    Tokens(Tokens),
}

/// So many a second, and this share of all calls.
pub(crate) struct Share {
    budget: TpsBudget,
    /// So many calls make one deposit, of as many times its worth.
    every: u32,
    calls: AtomicU32,
}

/// To make a deposit costs more than the rest of what a call does here: ten make one. Tower counts in
/// whole parts of a deposit, so that of a small share so many make one as are worth an attempt; and
/// it takes no share above 1000.
fn calls_a_deposit(share: f32) -> u32 {
    match share {
        0.0 | 0.1..=10.0 => 10,
        small if small < 0.1 => small.recip().ceil() as u32,
        _ => 1,
    }
}

impl Budget {
    pub(crate) fn share(ratio: f32, per_second: u32) -> Self {
        let every = calls_a_deposit(ratio);
        let budget = TpsBudget::new(WINDOW, per_second, ratio * every as f32);
        Self::Share(Share { budget, every, calls: AtomicU32::new(0) })
    }

    pub(crate) fn tokens(throttling: Throttling) -> Self {
        Self::Tokens(Tokens::full(throttling))
    }

    /// A call has begun.
    #[inline]
    pub(crate) fn begun(&self) {
        let Self::Share(share) = self else { return };
        // Two at once may count as one: then there is less to spend, never more.
        let calls = share.calls.load(Ordering::Relaxed) + 1;
        share.calls.store(if calls < share.every { calls } else { 0 }, Ordering::Relaxed);
        if calls >= share.every {
            share.budget.deposit();
        }
    }

    /// An attempt was answered well.
    #[inline]
    pub(crate) fn succeeded(&self) {
        if let Self::Tokens(tokens) = self {
            tokens.give();
        }
    }

    /// An attempt failed in a way that another attempt is meant for, or the
    /// server asked for none. Whether there will be one does not matter.
    pub(crate) fn failed(&self) {
        if let Self::Tokens(tokens) = self {
            tokens.take();
        }
    }

    /// Whether there may be another attempt, which is then made.
    pub(crate) fn pay(&self) -> bool {
        match self {
            Self::Share(share) => share.budget.withdraw(),
            Self::Tokens(tokens) => tokens.are_enough(),
        }
    }
}

/// `retryThrottling` of gRFC A6.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Throttling {
    /// 1 to 1000 (gRFC A6; the upper bound is that of grpc-go).
    pub(crate) max_tokens: u32,
    /// More than nothing; three decimals count.
    pub(crate) token_ratio: f64,
}

/// The token count of gRFC A6: a failure takes one, a success gives back a part
/// of one, and while no more than half of them are left nothing is resent.
pub(crate) struct Tokens {
    /// In thousandths, which are exact.
    left: AtomicU32,
    most: u32,
    ratio: u32,
}

const ONE: u32 = 1000;

impl Tokens {
    fn full(Throttling { max_tokens, token_ratio }: Throttling) -> Self {
        let most = max_tokens.saturating_mul(ONE);
        Self { left: AtomicU32::new(most), most, ratio: thousandths(token_ratio) }
    }

    fn give(&self) {
        // Nearly always there are all of them: a read, and nothing is written.
        if self.left.load(Ordering::Relaxed) < self.most {
            let more = |left: u32| Some(left.saturating_add(self.ratio).min(self.most));
            let _ = self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more);
        }
    }

    fn take(&self) {
        let less = |left: u32| Some(left.saturating_sub(ONE));
        let _ = self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
    }

    fn are_enough(&self) -> bool {
        self.left.load(Ordering::Relaxed) > self.most / 2
    }
}

/// A share in thousandths; what is finer is cut off, as gRPC's C core does.
pub(crate) fn thousandths(ratio: f64) -> u32 {
    // What is written as 4.107 is a little less, or more, than that. A cast
    // saturates, and takes what is no number for nothing.
    (ratio * f64::from(ONE) + 1e-6) as u32
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_share_of_calls_is_that_share_whatever_it_is() {
        for share in [0.0, 0.001, 0.007, 0.07, 0.0999, 0.1, 0.15, 0.2, 0.5, 0.99, 1.0, 1.5, 10.0, 10.1, 70.0]
        {
            let budget = Budget::share(share, 0);
            let calls = 20_000;
            (0..calls).for_each(|_| budget.begun());
            let fair = f64::from(share) * f64::from(calls);
            let paid = (0..3_000_000).take_while(|_| budget.pay()).count() as f64;
            assert!(paid <= fair * 1.05 && paid >= fair * 0.95, "{share}: {paid} of {fair}");
        }
        for share in [100.0, 100.1, 1000.0, f32::MIN_POSITIVE] {
            Budget::share(share, 0).begun();
        }
    }

    fn tokens(max_tokens: u32, token_ratio: f64) -> Budget {
        Budget::tokens(Throttling { max_tokens, token_ratio })
    }

    #[test]
    fn nothing_is_resent_from_half_of_the_tokens_down() {
        let budget = tokens(10, 0.1);
        for left in (0..10).rev() {
            budget.failed();
            assert_eq!(budget.pay(), left > 5, "{left} of 10 are left");
        }
        budget.failed();
        let successes = (0..).take_while(|_| {
            budget.succeeded();
            !budget.pay()
        });
        assert_eq!(successes.count() + 1, 51, "from none to more than 5, by tenths");
    }

    #[test]
    fn an_attempt_itself_costs_no_token() {
        let budget = tokens(2, 1.0);
        assert!((0..100).all(|_| budget.pay()));
    }

    #[test]
    fn three_decimals_count() {
        for (ratio, expected) in [(0.001, 1), (0.1, 100), (0.1239, 123), (2.5, 2500), (0.0009, 0), (-1.0, 0)]
        {
            assert_eq!(thousandths(ratio), expected, "{ratio}");
        }
        assert_eq!(thousandths(f64::NAN), 0);
        assert_eq!(thousandths(f64::MAX), u32::MAX);
    }

    proptest! {
        /// A model with whole numbers: gRFC A6's words.
        #[test]
        fn the_count_stays_within_its_bounds(
            most in 1_u32..=1000, ratio in 1_u32..5000, ends in prop::collection::vec(any::<bool>(), 0..300),
        ) {
            let budget = tokens(most, f64::from(ratio) / 1000.0);
            let mut left = u64::from(most) * 1000;
            for good in ends {
                if good {
                    budget.succeeded();
                    left = (left + u64::from(ratio)).min(u64::from(most) * 1000);
                } else {
                    budget.failed();
                    left = left.saturating_sub(1000);
                }
                prop_assert_eq!(budget.pay(), left > u64::from(most) * 500);
            }
        }
    }
}
