//! What must hold for any service config: run on chance by the tests, and by the
//! fuzz target in `fuzz/`.

use super::{ServiceConfig, ServiceOptions};

/// Reads `data` as a service config, and builds with it.
///
/// # Panics
/// Where what was read is not as it must be.
pub fn service_config(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    match ServiceConfig::from_json(text) {
        Ok(config) => {
            let options = ServiceOptions::new("x").service_config(config);
            assert!(options.check().is_ok(), "what is read can be built with");
            assert!(options.methods().is_ok(), "what is read can be built with");
            let _ = options.budget();
        }
        Err(error) => assert!(!error.problem.is_empty()),
    }
}
