//! What tells this process from all others.

use std::hash::{BuildHasher, RandomState};

use crate::server::store::Nonce;

/// 128 bits of the operating system's chance, which `RandomState` is keyed with.
pub(super) fn fresh() -> Nonce {
    let half = || RandomState::new().hash_one(std::process::id());
    Nonce::new(&format!("{:016x}{:016x}", half(), half()))
}
