//! See `src/consul/fuzz.rs` for what must hold.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| tonic_failover::consul::fuzz::answer(data));
