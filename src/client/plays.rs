//! How a property is tried out many times over.

use proptest::{
    prelude::*,
    test_runner::{Config, RngAlgorithm, TestError, TestRng, TestRunner},
};

/// Which cases are tried.
#[derive(Clone, Copy)]
pub(crate) struct Cases {
    count: u32,
    /// Others each time.
    others: bool,
}

impl Cases {
    /// So many, the same each time.
    pub(crate) fn fixed(count: u32) -> Self {
        Self { count, others: false }
    }

    /// The same, or as many others as `PLAYS` says, where somebody wants to search for what is not known yet.
    pub(crate) fn fixed_or_searched(count: u32) -> Self {
        let others: Option<u32> = std::env::var("PLAYS").ok().map(|text| text.parse().expect("a number"));
        Self { count: others.unwrap_or(count), others: others.is_some() }
    }

    /// Tries them. An error tells what was broken, and by which case, made smaller in so many steps at most.
    pub(crate) fn try_out<S: Strategy>(
        self,
        max_shrink_iters: u32,
        cases: &S,
        test: impl Fn(S::Value) -> Result<(), TestCaseError>,
    ) -> Result<(), String> {
        let config =
            Config { cases: self.count, failure_persistence: None, max_shrink_iters, ..Config::default() };
        let mut runner = match self.others {
            false => TestRunner::new_with_rng(config, TestRng::deterministic_rng(RngAlgorithm::ChaCha)),
            true => TestRunner::new(config),
        };
        runner.run(cases, test).map_err(|error| match error {
            TestError::Fail(reason, case) => format!("{reason}\n{case:#?}"),
            TestError::Abort(reason) => panic!("{reason}"),
        })
    }
}
