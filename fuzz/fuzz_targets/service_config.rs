//! See `src/client/fuzz.rs` for what must hold.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| tonic_failover::client::fuzz::service_config(data));
