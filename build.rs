//! Compiles the demo's proto, for the `demo` feature alone.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed=build.rs");
    #[cfg(feature = "demo")]
    demo::compile()?;
    Ok(())
}

#[cfg(feature = "demo")]
mod demo {
    use std::{env, fs, path::PathBuf};

    use prost::Message;

    /// protox reads the proto, so no `protoc` is needed. The descriptor set is
    /// written beside the code: the client reads from it which methods are safe.
    pub(crate) fn compile() -> Result<(), Box<dyn std::error::Error>> {
        println!("cargo::rerun-if-changed=proto");
        let descriptors =
            protox::compile(["counter/v1/counter.proto", "counter/v1/operator.proto"], ["proto"])?;
        let out = PathBuf::from(env::var("OUT_DIR")?);
        fs::write(out.join("counter.bin"), descriptors.encode_to_vec())?;
        tonic_prost_build::configure().compile_fds(descriptors)?;
        Ok(())
    }
}
