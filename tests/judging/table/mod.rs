//! The table as it stands in the source, so that it can be asked directly, and the
//! two types of its neighbours that it speaks of.

#![allow(dead_code, reason = "asked only about errors of the transport")]

pub(crate) mod answer;
#[path = "../../../src/client/outcome.rs"]
pub(crate) mod outcome;
pub(crate) mod report;
