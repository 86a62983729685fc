use tokio::sync::mpsc;
use tonic::transport::Endpoint as TonicEndpoint;

use super::*;
use crate::{Instance, client::endpoint::Link};

fn weighted(weights: &[u32]) -> Binding {
    let (reports, _) = mpsc::unbounded_channel();
    let endpoints = (1..).zip(weights).map(|(serial, &weight)| {
        let mut instance = Instance::new(format!("i{serial}"), "127.0.0.1", 1, "dc1");
        instance.weight = weight;
        let channel = TonicEndpoint::from_static("http://127.0.0.1:1").connect_lazy();
        Arc::new(Endpoint::new(Arc::new(instance), channel, Link::new(serial, reports.clone())))
    });
    Binding::new(1, endpoints.collect())
}

fn binding(n: usize) -> Binding {
    weighted(&vec![1; n])
}

fn picker(policy: Policy) -> Picker {
    Picker::new(policy, 7)
}

fn picks(picker: &Picker, binding: &Binding, tried: &[u64], n: usize) -> Vec<u64> {
    (0..n).filter_map(|_| picker.pick(binding, tried)).map(|e| e.serial()).collect()
}

/// How many of `n` picks went to each, every one over before the next.
fn shares(picker: &Picker, binding: &Binding, n: usize) -> Vec<usize> {
    let picks = picks(picker, binding, &[], n);
    binding.endpoints().iter().map(|e| picks.iter().filter(|&&p| p == e.serial()).count()).collect()
}

#[tokio::test]
async fn pick_first_stays_with_the_preferred_one() {
    assert_eq!(picks(&picker(Policy::PickFirst), &binding(3), &[], 3), [1, 1, 1]);
}

#[tokio::test]
async fn round_robin_gives_each_its_turn() {
    assert_eq!(picks(&picker(Policy::RoundRobin), &binding(3), &[], 6), [1, 2, 3, 1, 2, 3]);
}

#[tokio::test]
async fn round_robin_gives_turns_by_weight() {
    let shares = shares(&picker(Policy::RoundRobin), &weighted(&[70, 20, 10]), 1000);
    for (share, due) in shares.iter().zip([700, 200, 100]) {
        assert!(share.abs_diff(due) <= 5, "{shares:?}");
    }
}

#[tokio::test]
async fn what_is_lost_is_passed_over_before_the_worker_has_said_so() {
    for policy in [Policy::PickFirst, Policy::RoundRobin, Policy::LeastRequest] {
        let binding = binding(2);
        binding.endpoints()[0].link().retire();
        assert_eq!(picks(&picker(policy), &binding, &[], 3), [2, 2, 2], "{policy:?}");
        binding.endpoints()[1].link().retire();
        assert!(picks(&picker(policy), &binding, &[], 1).is_empty());
    }
}

#[tokio::test]
async fn another_than_the_tried_one_is_preferred_but_not_insisted_on() {
    for policy in [Policy::PickFirst, Policy::LeastRequest] {
        let picker = picker(policy);
        assert_eq!(picks(&picker, &binding(2), &[1], 3), [2, 2, 2]);
        assert_eq!(picks(&picker, &binding(1), &[1], 1), [1]);
        assert!(picks(&picker, &Binding::default(), &[], 1).is_empty());
    }
}

#[tokio::test]
async fn least_request_evens_out_what_is_in_flight() {
    let (picker, binding) = (picker(Policy::LeastRequest), binding(4));
    let held: Vec<_> = (0..400).map(|_| picker.pick(&binding, &[]).unwrap()).collect();
    for endpoint in binding.endpoints() {
        assert!(endpoint.link().in_flight().abs_diff(100) <= 3, "{}", endpoint.link().in_flight());
    }
    drop(held);
    assert!(binding.endpoints().iter().all(|e| e.link().in_flight() == 0), "a dropped call counts no more");
}

#[tokio::test]
async fn least_request_leaves_a_slow_instance_alone() {
    let (picker, binding) = (picker(Policy::LeastRequest), binding(3));
    let slow: Vec<_> = (0..5).map(|_| picker.choose(&binding.endpoints()[0])).collect();
    assert_eq!(shares(&picker, &binding, 300)[0], 0, "each other one has nothing to do");
    drop(slow);
    let shares = shares(&picker, &binding, 3000);
    assert_eq!(shares, [1000, 1000, 1000], "with nothing to choose, each has its turn");
}

#[tokio::test]
async fn least_request_follows_the_weights_when_idle_and_when_busy() {
    let (picker, binding) = (picker(Policy::LeastRequest), weighted(&[70, 20, 10]));
    let shares = shares(&picker, &binding, 10_000);
    for (share, due) in shares.iter().zip([7000, 2000, 1000]) {
        assert!(share.abs_diff(due) <= 5, "idle: {shares:?}");
    }
    let held: Vec<_> = (0..1000).map(|_| picker.pick(&binding, &[]).unwrap()).collect();
    for (endpoint, due) in binding.endpoints().iter().zip([700_u32, 200, 100]) {
        assert!(endpoint.link().in_flight().abs_diff(due) <= 15, "busy: {}", endpoint.link().in_flight());
    }
    drop(held);
}

#[tokio::test]
async fn only_least_request_counts() {
    let (picker, binding) = (picker(Policy::RoundRobin), binding(2));
    let _held = picker.pick(&binding, &[]);
    assert!(binding.endpoints().iter().all(|e| e.link().in_flight() == 0));
}
