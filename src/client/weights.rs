//! Shares by weight, without a schedule to build or a lock to take.

use std::sync::Arc;

use super::endpoint::Endpoint;

/// 2^64 divided by the golden ratio: multiples of it, modulo 2^64, spread more
/// evenly than those of any other number (Knuth, The Art of Computer Programming,
/// vol. 3, 6.4), so that turns come evenly too: the heavy one's between the others'.
const STRIDE: u64 = 0x9E37_79B9_7F4A_7C15;

/// The weights of a set of endpoints that do not all have the same.
#[derive(Debug)]
pub(crate) struct Weights {
    /// The running total, up to and with each of them.
    upto: Vec<u64>,
}

impl Weights {
    /// `None` where all are equal: then nothing need be weighed. A weight of 0 counts as 1.
    pub(crate) fn of(endpoints: &[Arc<Endpoint>]) -> Option<Self> {
        Self::new(endpoints.iter().map(|endpoint| endpoint.instance().weight))
    }

    fn new(weights: impl Iterator<Item = u32> + Clone) -> Option<Self> {
        let mut weights = weights.map(|weight| u64::from(weight.max(1)));
        let first = weights.clone().next()?;
        if weights.clone().all(|weight| weight == first) {
            return None;
        }
        let mut total = 0;
        let upto = std::iter::from_fn(|| {
            total += weights.next()?;
            Some(total)
        });
        Some(Self { upto: upto.collect() })
    }

    /// Whose turn it is. Over many turns each has its share, over few nearly so.
    pub(crate) fn turn(&self, turn: u64) -> usize {
        self.at(turn.wrapping_mul(STRIDE))
    }

    /// Who holds this point of the whole, which is 2^64.
    pub(crate) fn at(&self, point: u64) -> usize {
        let total = self.upto.last().copied().unwrap_or(0);
        let point = (u128::from(point) * u128::from(total)) >> 64;
        self.upto.partition_point(|&upto| u128::from(upto) <= point)
    }

    pub(crate) fn get(&self, index: usize) -> u64 {
        let before = index.checked_sub(1).map_or(0, |before| self.upto[before]);
        self.upto[index] - before
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn weights(list: &[u32]) -> Option<Weights> {
        Weights::new(list.iter().copied())
    }

    #[test]
    fn equal_weights_are_not_weighed() {
        assert!(weights(&[]).is_none() && weights(&[7]).is_none() && weights(&[3, 3, 3]).is_none());
        assert!(weights(&[0, 1]).is_none(), "0 counts as 1");
    }

    #[test]
    fn turns_of_a_heavy_one_come_between_those_of_the_light_ones() {
        let weights = weights(&[2, 1, 1]).unwrap();
        let turns: Vec<_> = (0..400).map(|turn| weights.turn(turn)).collect();
        let light = turns.windows(3).all(|w| w.contains(&0));
        assert!(light, "never three turns in a row for the light ones: {turns:?}");
    }

    proptest! {
        #[test]
        fn each_has_its_share_whatever_the_weights(
            list in proptest::collection::vec(prop_oneof![0..10_u32, Just(65_535), Just(u32::MAX)], 2..20),
            first in any::<u64>(),
        ) {
            const TURNS: u64 = 2_000;
            let Some(weights) = weights(&list) else { return Ok(()) };
            let mut counts = vec![0_u32; list.len()];
            for turn in 0..TURNS {
                counts[weights.turn(first.wrapping_add(turn))] += 1;
            }
            let total: f64 = list.iter().map(|&w| f64::from(w.max(1))).sum();
            for (&weight, &count) in list.iter().zip(&counts) {
                let due = TURNS as f64 * f64::from(weight.max(1)) / total;
                prop_assert!((f64::from(count) - due).abs() <= 8.0, "{count} turns of {due:.1}: {list:?}");
            }
        }
    }
}
