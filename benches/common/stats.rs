//! Medians with their intervals.

use std::fmt;

/// A median and the interval in which it lies with 95 % confidence.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Median {
    pub(crate) low: f64,
    pub(crate) mid: f64,
    pub(crate) high: f64,
}

impl Median {
    /// Of these values. The interval is that of the order statistics (the sign
    /// test's): it supposes nothing about how the values are distributed.
    pub(crate) fn of(mut values: Vec<f64>) -> Self {
        values.sort_by(f64::total_cmp);
        let n = values.len();
        let Some(last) = n.checked_sub(1) else {
            return Self { low: f64::NAN, mid: f64::NAN, high: f64::NAN };
        };
        let half = 1.96 * (n as f64).sqrt() / 2.0;
        let at = |rank: f64| values[(rank.max(0.0) as usize).min(last)];
        let middle = n as f64 / 2.0;
        let mid = (values[last / 2] + values[n / 2]) / 2.0;
        Self { low: at((middle - half).floor() - 1.0), mid, high: at((middle + half).ceil()) }
    }
}

/// `1.012 [1.003, 1.020]`.
impl fmt::Display for Median {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let places = f.precision().unwrap_or(3);
        write!(f, "{:.places$} [{:.places$}, {:.places$}]", self.mid, self.low, self.high)
    }
}
