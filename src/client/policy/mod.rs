//! How a method is called: its time, its further attempts, its hedges.
//!
//! ```text
//!  MethodOptions, ServiceConfig --build--> Rules, one for each method (methods.rs)
//!                                            |
//!           call: judge an attempt --> Retry (retry.rs): again? when? --> Budget pays
//! ```

mod backoff;
mod budget;
mod codes;
mod options;
mod pushback;
mod rules;
mod settings;

pub use self::options::{HedgingPolicy, MethodOptions, RetryPolicy};
pub(crate) use self::{
    backoff::Backoff,
    budget::{Budget, Throttling, thousandths},
    codes::Codes,
    pushback::Pushback,
    rules::{HedgeRules, RetryRules, Rules},
};
