//! How many allocations a call takes, against a raw tonic `Channel`.
//!
//! `cargo bench --bench call_path_allocations`. A program of its own: an allocator that
//! counts costs time, and more of it to whoever allocates more.

#![allow(clippy::unwrap_used, reason = "a measurement may fail")]

#[path = "common/mod.rs"]
mod common;
#[path = "call_path/stack.rs"]
#[allow(dead_code, reason = "a part of it is used")]
mod stack;

use std::{alloc::System, env};

use common::{
    ROLE,
    backend::{self, Backend, Settings},
    report::{self, bar},
};
use stack::{Caller, Method, Ours, instance};
use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};
use tonic::transport::Endpoint;
use tonic_failover::{client::Policy, demo::pb::counter_client::CounterClient};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

const CALLS: usize = 2000;

/// What one call takes.
#[derive(Clone, Copy)]
struct Taken {
    allocations: f64,
    bytes: f64,
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    if let Ok(role) = env::var(ROLE) {
        return backend::serve(&role);
    }
    report::preface();
    let server = Backend::start(&Settings::new(1))?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let raw = CounterClient::new(Endpoint::from_shared(server.address())?.connect().await?);
        let ours = Ours::new([instance(server.port)], Policy::PickFirst);
        ours.until_ready(1).await;
        for (method, name) in [(Method::Safe, "safe"), (Method::Unsafe, "unsafe")] {
            let theirs = taken(raw.clone(), method).await;
            let our = taken(ours.caller(), method).await;
            println!(
                "{name} method: raw {:.2} allocations, {:.0} bytes; ours {:.2} allocations, {:.0} bytes",
                theirs.allocations, theirs.bytes, our.allocations, our.bytes
            );
            bar(&format!("allocations beyond raw, {name} method"), our.allocations - theirs.allocations, 6.0);
        }
        Ok::<_, tonic::transport::Error>(())
    })?;
    Ok(())
}

async fn taken(mut caller: impl Caller, method: Method) -> Taken {
    for _ in 0..CALLS / 10 {
        caller.call(method).await.expect("no call fails");
    }
    let region = Region::new(ALLOCATOR);
    for _ in 0..CALLS {
        caller.call(method).await.expect("no call fails");
    }
    let change = region.change();
    let calls = CALLS as f64;
    Taken {
        allocations: (change.allocations + change.reallocations) as f64 / calls,
        bytes: change.bytes_allocated as f64 / calls,
    }
}
