//! Test agents.
