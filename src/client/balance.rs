//! Which of a binding's endpoints the next attempt goes to: pure.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use super::{binding::Binding, endpoint::Endpoint, options::Policy};

/// The picker of one service. Every clone of a channel shares it.
#[derive(Debug)]
pub(crate) struct Picker {
    policy: Policy,
    turn: AtomicUsize,
}

impl Picker {
    pub(crate) fn new(policy: Policy) -> Self {
        Self { policy, turn: AtomicUsize::new(0) }
    }

    /// A usable endpoint, one not in `tried` if there is one.
    pub(crate) fn pick(&self, binding: &Binding, tried: &[u64]) -> Option<Arc<Endpoint>> {
        let endpoints = binding.endpoints();
        let start = match self.policy {
            Policy::PickFirst => 0,
            Policy::RoundRobin if endpoints.len() > 1 => self.turn.fetch_add(1, Ordering::Relaxed),
            Policy::RoundRobin => 0,
        };
        let mut fallback = None;
        for i in 0..endpoints.len() {
            let endpoint = &endpoints[start.wrapping_add(i) % endpoints.len()];
            if !endpoint.is_usable() {
                continue;
            }
            if !tried.contains(&endpoint.serial()) {
                return Some(endpoint.clone());
            }
            fallback.get_or_insert(endpoint);
        }
        fallback.cloned()
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::mpsc;
    use tonic::transport::Endpoint as TonicEndpoint;

    use super::*;
    use crate::{Instance, client::endpoint::Link};

    fn binding(n: u64) -> Binding {
        let (reports, _) = mpsc::unbounded_channel();
        let endpoints = (1..=n)
            .map(|serial| {
                let instance = Arc::new(Instance::new(format!("i{serial}"), "127.0.0.1", 1, "dc1"));
                let channel = TonicEndpoint::from_static("http://127.0.0.1:1").connect_lazy();
                Arc::new(Endpoint::new(instance, channel, Link::new(serial, reports.clone())))
            })
            .collect();
        Binding::new(1, endpoints)
    }

    fn picks(picker: &Picker, binding: &Binding, tried: &[u64], n: usize) -> Vec<u64> {
        (0..n).filter_map(|_| picker.pick(binding, tried)).map(|e| e.serial()).collect()
    }

    #[tokio::test]
    async fn pick_first_stays_with_the_preferred_one() {
        assert_eq!(picks(&Picker::new(Policy::PickFirst), &binding(3), &[], 3), [1, 1, 1]);
    }

    #[tokio::test]
    async fn round_robin_gives_each_its_turn() {
        assert_eq!(picks(&Picker::new(Policy::RoundRobin), &binding(3), &[], 6), [1, 2, 3, 1, 2, 3]);
    }

    #[tokio::test]
    async fn what_is_lost_is_passed_over_before_the_worker_has_said_so() {
        let binding = binding(2);
        binding.endpoints()[0].link().retire();
        assert_eq!(picks(&Picker::new(Policy::PickFirst), &binding, &[], 1), [2]);
        binding.endpoints()[1].link().retire();
        assert!(picks(&Picker::new(Policy::PickFirst), &binding, &[], 1).is_empty());
    }

    #[tokio::test]
    async fn another_than_the_tried_one_is_preferred_but_not_insisted_on() {
        let picker = Picker::new(Policy::PickFirst);
        assert_eq!(picks(&picker, &binding(2), &[1], 1), [2]);
        assert_eq!(picks(&picker, &binding(1), &[1], 1), [1]);
        assert!(picks(&picker, &Binding::default(), &[], 1).is_empty());
    }
}
