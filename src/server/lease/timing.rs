//! The times of a lease, validated together.

use std::{ops::RangeInclusive, time::Duration};

use super::CampaignError;

/// What a lease's length may be. Below, a scheduler's ordinary delays look like deaths; above, it
/// is no failover.
pub(super) const LENGTHS: RangeInclusive<Duration> = Duration::from_millis(100)..=Duration::from_secs(300);
/// The clocks of two machines may run so much apart and still not meet: the margin is at least the
/// length through this. Linux slews a clock by up to 0.05 % (`adjtimex(2)`), a crystal is off by 0.01 %.
const MARGIN_PER_LENGTH: u32 = 100;

/// The times of a lease.
#[derive(Clone, Copy, Debug)]
pub(super) struct Timing {
    /// A standby takes over what has not changed for so long.
    pub(super) length: Duration,
    /// Between two renewals, and between a standby's reads.
    pub(super) renewal: Duration,
    /// A holder stops so much before its lease is over.
    pub(super) margin: Duration,
}

// === impl Timing ===

impl Default for Timing {
    fn default() -> Self {
        Self {
            length: Duration::from_secs(2),
            renewal: Duration::from_millis(400),
            margin: Duration::from_millis(300),
        }
    }
}

impl Timing {
    pub(super) fn check(&self) -> Result<(), CampaignError> {
        let Self { length, renewal, margin } = *self;
        let refuse = |setting, value, expected| Err(CampaignError::setting(setting, value, expected));
        if !LENGTHS.contains(&length) {
            return refuse("length", length, "100 ms to 5 min".to_owned());
        }
        let least = length / MARGIN_PER_LENGTH;
        if margin < least {
            return refuse(
                "margin",
                margin,
                format!("{least:?} or more, a hundredth of length = {length:?}"),
            );
        }
        if margin >= length {
            return refuse("margin", margin, format!("less than length = {length:?}"));
        }
        if renewal < length / 100 {
            return refuse("renewal", renewal, format!("{:?} or more, a hundredth of length", length / 100));
        }
        // One that fails must cost nothing: the next one is sent while the holder is still primary.
        let most = (length - margin) / 2;
        if renewal >= most {
            let expected = format!(
                "less than {most:?}, so that of two renewals one may fail within length = {length:?} less margin = {margin:?}"
            );
            return refuse("renewal", renewal, expected);
        }
        Ok(())
    }

    /// For so long a holder is primary, from before it sent a renewal.
    pub(super) fn held(&self) -> Duration {
        self.length - self.margin
    }

    /// Reads further apart than this leave a standby out of contact: it has not seen what
    /// happened in between. One that fails is forgiven.
    pub(super) fn contact(&self) -> Duration {
        self.length / 2
    }

    /// Before something that failed is tried again while there is time to lose.
    pub(super) fn soon(&self) -> Duration {
        self.renewal / 4
    }

    /// Between two reads, however often a store says that there is news.
    pub(super) fn least(&self) -> Duration {
        self.renewal / 8
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(length: u64, renewal: u64, margin: u64) -> String {
        let ms = Duration::from_millis;
        let timing = Timing { length: ms(length), renewal: ms(renewal), margin: ms(margin) };
        timing.check().expect_err("refused").to_string()
    }

    #[test]
    fn the_defaults_are_possible_and_take_over_within_three_seconds() {
        let timing = Timing::default();
        timing.check().unwrap();
        // The last heartbeat is seen a renewal late, the takeover goes out at most a read's spacing late.
        let worst = timing.renewal + timing.length + timing.least();
        assert!(worst < Duration::from_millis(2500), "{worst:?}");
    }

    #[test]
    fn impossible_times_are_refused_with_their_names_and_what_would_be_right() {
        let cases = [
            (refused(0, 0, 0), "length = 0ns is not usable: 100 ms to 5 min"),
            (refused(300_001, 400, 3_001), "length = 300.001s is not usable"),
            (refused(2_000, 0, 300), "renewal = 0ns is not usable: 20ms or more"),
            (refused(2_000, 850, 300), "renewal = 850ms is not usable: less than 850ms"),
            (refused(2_000, 400, 0), "margin = 0ns is not usable: 20ms or more"),
            (refused(2_000, 400, 2_000), "margin = 2s is not usable: less than length = 2s"),
            (refused(2_000, 400, 1_200), "renewal = 400ms is not usable: less than 400ms"),
        ];
        for (error, expected) in cases {
            assert!(error.contains(expected), "{error}: {expected}");
        }
    }
}
