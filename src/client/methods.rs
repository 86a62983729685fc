//! What is known about the methods of a service: which may be repeated, and
//! which answer with a single message.

use std::collections::{HashMap, HashSet};

use prost::Message;
use prost_types::{FileDescriptorSet, method_options::IdempotencyLevel};

/// What the options and the descriptors say of each method, by its path
/// (`/package.Service/Method`).
#[derive(Clone, Debug, Default)]
pub(crate) struct Methods {
    safe: HashSet<String>,
    /// Known from the descriptors; absent where nothing is known.
    unary_response: HashMap<String, bool>,
}

impl Methods {
    /// Reads `idempotency_level` from a file descriptor set: `NO_SIDE_EFFECTS`
    /// and `IDEMPOTENT` make a method safe to repeat.
    pub(crate) fn read(&mut self, descriptors: &[u8]) -> Result<(), prost::DecodeError> {
        for file in FileDescriptorSet::decode(descriptors)?.file {
            let package = file.package().to_owned();
            for service in &file.service {
                let name = if package.is_empty() {
                    service.name().to_owned()
                } else {
                    format!("{package}.{}", service.name())
                };
                for method in &service.method {
                    let path = format!("/{name}/{}", method.name());
                    let level = method.options.as_ref().map(|o| o.idempotency_level()).unwrap_or_default();
                    if matches!(level, IdempotencyLevel::NoSideEffects | IdempotencyLevel::Idempotent) {
                        self.safe.insert(path.clone());
                    }
                    self.unary_response.insert(path, !method.server_streaming());
                }
            }
        }
        Ok(())
    }

    /// Declares one method safe to repeat.
    pub(crate) fn declare_safe(&mut self, path: impl Into<String>) {
        self.safe.insert(path.into());
    }

    pub(crate) fn is_safe(&self, path: &str) -> bool {
        self.safe.contains(path)
    }

    /// True where the descriptors say that the answer is one message.
    pub(crate) fn has_unary_response(&self, path: &str) -> bool {
        self.unary_response.get(path).copied().unwrap_or(false)
    }
}

/// Whether `path` has the form `/package.Service/Method`.
pub(crate) fn is_path(path: &str) -> bool {
    path.strip_prefix('/')
        .and_then(|rest| rest.split_once('/'))
        .is_some_and(|(service, method)| !service.is_empty() && !method.is_empty() && !method.contains('/'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idempotency_levels_are_read_from_the_descriptor_set() {
        let mut methods = Methods::default();
        methods.read(crate::demo::pb::FILE_DESCRIPTOR_SET).unwrap();
        assert!(methods.is_safe("/counter.v1.Counter/Get"), "NO_SIDE_EFFECTS");
        assert!(methods.is_safe("/counter.v1.Counter/Add"), "IDEMPOTENT");
        assert!(!methods.is_safe("/counter.v1.Counter/Increment"), "says nothing");
        assert!(!methods.is_safe("/counter.v1.Counter/Nothing"), "does not exist");
        assert!(methods.has_unary_response("/counter.v1.Counter/Get"));
        assert!(!methods.has_unary_response("/counter.v1.Counter/Watch"));
    }

    #[test]
    fn rubbish_is_no_descriptor_set() {
        assert!(Methods::default().read(b"\xff\xff\xff").is_err());
    }

    #[test]
    fn a_path_names_service_and_method() {
        assert!(is_path("/counter.v1.Counter/Get"));
        for bad in ["", "/", "Get", "counter.v1.Counter/Get", "/a/", "//b", "/a/b/c"] {
            assert!(!is_path(bad), "{bad:?}");
        }
    }
}
