//! Where a lease and the state beside it are kept, as the command line says it.

use std::path::PathBuf;

/// Where a lease and the state beside it are kept.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LeaseAt {
    /// In Consul's key/value store.
    Consul {
        /// What the keys begin with; `None`: `services/` and the service's name.
        prefix: Option<String>,
    },
    /// In a directory that all instances see; it is made where it is missing.
    Files(PathBuf),
}

/// Reads `consul`, `consul:services/counter` or `file:/var/lib/counter`.
pub(super) fn parse_lease(text: &str) -> Result<LeaseAt, String> {
    match text.split_once(':') {
        None if text == "consul" => Ok(LeaseAt::Consul { prefix: None }),
        Some(("consul", prefix)) if !prefix.is_empty() => {
            Ok(LeaseAt::Consul { prefix: Some(prefix.to_owned()) })
        }
        Some(("file", dir)) if !dir.is_empty() => Ok(LeaseAt::Files(dir.into())),
        _ => Err(format!("{text:?} is no store of a lease: write consul, consul:PREFIX or file:DIR")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_store_is_named_by_its_kind_and_its_place() {
        assert_eq!(parse_lease("consul"), Ok(LeaseAt::Consul { prefix: None }));
        assert_eq!(parse_lease("consul:a/b"), Ok(LeaseAt::Consul { prefix: Some("a/b".into()) }));
        assert_eq!(parse_lease("file:/tmp/x:y"), Ok(LeaseAt::Files("/tmp/x:y".into())));
        for wrong in ["", "consul:", "file", "file:", "Consul"] {
            assert!(parse_lease(wrong).is_err(), "{wrong}");
        }
    }
}
