//! The demo program, as a library: `src/bin/demo.rs` is thin.

mod agent;
mod ask;
pub mod backend;
mod calls;
mod cli;
mod client;
mod screen;
mod signals;
mod story;
mod text;

pub use cli::main;

/// The generated `Counter` service.
#[allow(missing_docs, clippy::all)]
pub mod pb {
    tonic::include_proto!("counter.v1");

    /// The descriptors of `counter.v1`, as the proto compiler wrote them.
    pub const FILE_DESCRIPTOR_SET: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/counter.bin"));
}
