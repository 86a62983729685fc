//! Which of a binding's endpoints the next attempt goes to: pure.

#[cfg(test)]
mod tests;

use std::{
    ops::Deref,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use super::{binding::Binding, endpoint::Endpoint, options::Policy, weights::Weights};

/// The picker of one service. Every clone of a channel shares it.
#[derive(Debug)]
pub(crate) struct Picker {
    policy: Policy,
    /// Where the drawing of lots begins.
    seed: u64,
    turn: AtomicU64,
}

/// An endpoint chosen for one attempt. Where the policy looks at how busy each
/// is, this is part of it for as long as it lives: until the attempt is over or
/// dropped, or its response's body is.
#[derive(Debug)]
pub(crate) struct Chosen {
    endpoint: Arc<Endpoint>,
    counted: bool,
}

// === impl Picker ===

impl Picker {
    pub(crate) fn new(policy: Policy, seed: u64) -> Self {
        Self { policy, seed, turn: AtomicU64::new(0) }
    }

    /// A usable endpoint, one not in `tried` if there is one.
    #[inline]
    pub(crate) fn pick(&self, binding: &Binding, tried: &[u64]) -> Option<Chosen> {
        let endpoints = binding.endpoints();
        let start = match self.policy {
            Policy::RoundRobin if endpoints.len() > 1 => {
                let turn = self.turn.fetch_add(1, Ordering::Relaxed);
                match binding.weights() {
                    None => in_turn(turn, endpoints.len()),
                    Some(weights) => weights.turn(turn),
                }
            }
            Policy::LeastRequest if endpoints.len() > 1 => self.less_busy(binding, tried),
            Policy::PickFirst | Policy::RoundRobin | Policy::LeastRequest => 0,
        };
        let mut fallback = None;
        for i in 0..endpoints.len() {
            let endpoint = &endpoints[(start + i) % endpoints.len()];
            if !endpoint.is_usable() {
                continue;
            }
            if !tried.contains(&endpoint.serial()) {
                return Some(self.choose(endpoint));
            }
            fallback.get_or_insert(endpoint);
        }
        fallback.map(|endpoint| self.choose(endpoint))
    }

    /// This very one.
    #[inline]
    pub(crate) fn choose(&self, endpoint: &Arc<Endpoint>) -> Chosen {
        let counted = self.policy == Policy::LeastRequest;
        if counted {
            endpoint.link().begin();
        }
        Chosen { endpoint: endpoint.clone(), counted }
    }

    /// The less busy of two (gRFC A48, Envoy's `LEAST_REQUEST`): the one whose turn it
    /// is, and another drawn by lot. Both drawn by lot, as there, would do as well
    /// under load; but one in turn gives even shares while there is nothing to choose.
    ///
    /// Weights decide how often each is considered. The second goes first where, with
    /// this call too, it will be no busier for its weight than the first is
    /// already. With equal weights that is: where it has fewer calls. Comparing
    /// calls for each weight alone, an idle heavy one would always win.
    fn less_busy(&self, binding: &Binding, tried: &[u64]) -> usize {
        let (endpoints, weights) = (binding.endpoints(), binding.weights());
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        let (first, second) = pair(turn, mixed(turn ^ self.seed), endpoints.len(), weights);
        let fits = |i: usize| endpoints[i].is_usable() && !tried.contains(&endpoints[i].serial());
        let busy = |i: usize| u64::from(endpoints[i].link().in_flight());
        let weight = |i: usize| weights.map_or(1, |weights| weights.get(i));
        match (fits(first), fits(second)) {
            (true, true) if (busy(second) + 1) * weight(first) <= busy(first) * weight(second) => second,
            (false, true) => second,
            _ => first,
        }
    }
}

/// One in turn and one by lot; another one where weights do not say otherwise.
fn pair(turn: u64, lot: u64, count: usize, weights: Option<&Weights>) -> (usize, usize) {
    if let Some(weights) = weights {
        return (weights.turn(turn), weights.at(lot));
    }
    let first = in_turn(turn, count);
    let further = (u128::from(lot) * (count as u128 - 1)) >> 64;
    (first, (first + 1 + further as usize) % count)
}

#[inline]
fn in_turn(turn: u64, count: usize) -> usize {
    (turn % count as u64) as usize
}

/// One number of many that look random: the finalizer of SplitMix64 (Steele, Lea
/// and Flood, "Fast splittable pseudorandom number generators", 2014). It needs no
/// state of its own, and so no lock.
fn mixed(n: u64) -> u64 {
    let n = n.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let n = (n ^ (n >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let n = (n ^ (n >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    n ^ (n >> 31)
}

// === impl Chosen ===

impl Deref for Chosen {
    type Target = Arc<Endpoint>;

    #[inline]
    fn deref(&self) -> &Arc<Endpoint> {
        &self.endpoint
    }
}

impl Drop for Chosen {
    #[inline]
    fn drop(&mut self) {
        if self.counted {
            self.endpoint.link().end();
        }
    }
}
