//! Slices of calls lying side by side.

use rustix::time::{ClockId, clock_gettime};
use tokio::{task::JoinSet, time::Instant};

use super::{
    common::stats::Median,
    stack::{Caller, Method},
};

/// What one slice took, for each call, in ns.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Slice {
    /// CPU time of this process: the client's alone.
    pub(crate) cpu: f64,
    pub(crate) wall: f64,
}

/// Callers that make a slice's calls, all at once.
pub(crate) struct Side<C> {
    callers: Vec<C>,
    method: Method,
    /// Who answered how many calls.
    pub(crate) answered: Vec<u64>,
}

/// What pairs of slices say.
#[derive(Clone, Debug)]
pub(crate) struct Paired {
    pub(crate) cpu: Median,
    pub(crate) wall: Median,
    /// The medians of one call, in ns: the first kind's and the second's.
    pub(crate) ns: (f64, f64),
    /// The second's CPU less the first's, in ns.
    pub(crate) difference: Median,
}

impl<C: Caller> Side<C> {
    pub(crate) fn new(caller: C, callers: usize, method: Method) -> Self {
        Self { callers: vec![caller; callers], method, answered: vec![0; 8] }
    }

    /// `calls` calls, shared among the callers.
    pub(crate) async fn slice(&mut self, calls: usize) -> Slice {
        let (cpu, wall) = (cpu_time(), Instant::now());
        let count = self.run(calls).await as f64;
        let wall = wall.elapsed().as_nanos() as f64 / count;
        Slice { cpu: (cpu_time() - cpu) / count, wall }
    }

    /// The same without measuring it; how many calls were made.
    pub(crate) async fn run(&mut self, calls: usize) -> usize {
        let each = calls.div_ceil(self.callers.len());
        let count = each * self.callers.len();
        let method = self.method;
        let mut running = JoinSet::new();
        for mut caller in self.callers.drain(..) {
            running.spawn(async move {
                let mut answered = [0_u64; 8];
                for _ in 0..each {
                    let server = caller.call(method).await.expect("no call fails");
                    answered[server as usize % 8] += 1;
                }
                (caller, answered)
            });
        }
        while let Some(done) = running.join_next().await {
            let (caller, answered) = done.expect("no caller panics");
            self.callers.push(caller);
            self.answered.iter_mut().zip(answered).for_each(|(sum, n)| *sum += n);
        }
        count
    }
}

/// `pairs` times a slice of each side, first the one first and then the other.
pub(crate) async fn compare<A: Caller, B: Caller>(
    first: &mut Side<A>,
    second: &mut Side<B>,
    calls: usize,
    pairs: usize,
) -> Paired {
    for _ in 0..5 {
        first.slice(calls).await;
        second.slice(calls).await;
    }
    let mut all = Vec::with_capacity(pairs);
    for pair in 0..pairs {
        // Whoever comes second finds warmer caches, or a neighbour that has awoken.
        all.push(if pair % 2 == 0 {
            let one = first.slice(calls).await;
            (one, second.slice(calls).await)
        } else {
            let two = second.slice(calls).await;
            (first.slice(calls).await, two)
        });
    }
    let of = |value: fn(&(Slice, Slice)) -> f64| Median::of(all.iter().map(value).collect());
    Paired {
        cpu: of(|(a, b)| b.cpu / a.cpu),
        wall: of(|(a, b)| b.wall / a.wall),
        ns: (of(|(a, _)| a.cpu).mid, of(|(_, b)| b.cpu).mid),
        difference: of(|(a, b)| b.cpu - a.cpu),
    }
}

/// CPU time of this process up to now, in ns.
fn cpu_time() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 * 1e9 + time.tv_nsec as f64
}
