//! What is known about the methods of a service: which may be repeated, which
//! answer with a single message, and the rules that their calls go by.

use std::collections::BTreeMap;

use prost::Message;
use prost_types::{FileDescriptorSet, method_options::IdempotencyLevel};

use super::{misspelt::Described, policy::Rules};

/// What the options, the descriptors and the service config say of each method.
///
/// Asked once a call, and ordered: a few comparisons take a third of the time that
/// hashing the path does.
#[derive(Clone, Debug)]
pub(crate) struct Methods {
    /// By path, `/package.Service/Method`.
    known: BTreeMap<String, Method>,
    /// The rules of all other methods of a service, by `/package.Service/`.
    services: BTreeMap<String, usize>,
    /// The first are those of all others.
    rules: Vec<Rules>,
}

/// What is known of one method.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Method {
    /// It may be repeated.
    pub(crate) safe: bool,
    /// The descriptors say that its answer is one message.
    pub(crate) unary_response: bool,
    /// Where its rules stand; `None` until it is resolved, where it has none of its own.
    rules: Option<usize>,
}

/// What rules may be given to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Name<'a> {
    /// `/package.Service/Method`
    Method(&'a str),
    /// `/package.Service/`
    Service(&'a str),
    /// `/`
    All,
}

// === impl Methods ===

impl Methods {
    /// Knows nothing yet: all calls go by `rules`.
    pub(crate) fn new(rules: Rules) -> Self {
        Self { known: BTreeMap::new(), services: BTreeMap::new(), rules: vec![rules] }
    }

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
                    let known = self.known.entry(format!("/{name}/{}", method.name())).or_default();
                    let level = method.options.as_ref().map(|o| o.idempotency_level()).unwrap_or_default();
                    known.safe |=
                        matches!(level, IdempotencyLevel::NoSideEffects | IdempotencyLevel::Idempotent);
                    known.unary_response = !method.server_streaming();
                }
            }
        }
        Ok(())
    }

    /// What the descriptors read so far name, as long as nothing has been declared.
    pub(crate) fn described(&self) -> Described {
        Described::of(self.known.keys())
    }

    /// Declares one method safe to repeat.
    pub(crate) fn declare_safe(&mut self, path: &str) {
        self.known.entry(path.to_owned()).or_default().safe = true;
    }

    /// Whether a method that `name` covers is known to be safe.
    pub(crate) fn any_safe(&self, name: Name<'_>) -> bool {
        self.known.iter().any(|(path, method)| {
            method.safe
                && match name {
                    Name::Method(name) => path == name,
                    Name::Service(service) => path.starts_with(service),
                    Name::All => true,
                }
        })
    }

    /// Gives rules to a name, in place of those it has.
    pub(crate) fn rule(&mut self, name: Name<'_>, rules: Rules) {
        let place = self.rules.len();
        match name {
            Name::All => self.rules[0] = rules,
            Name::Service(service) => {
                self.services.insert(service.to_owned(), place);
                self.rules.push(rules);
            }
            Name::Method(path) => {
                self.known.entry(path.to_owned()).or_default().rules = Some(place);
                self.rules.push(rules);
            }
        }
    }

    /// Gives each known method the rules of the most specific name, so that a
    /// call need not look for them.
    pub(crate) fn resolved(mut self) -> Self {
        for (path, method) in &mut self.known {
            method.rules = method.rules.or_else(|| service_rules(&self.services, path));
        }
        self
    }

    /// What is known of the method with this path.
    #[inline]
    pub(crate) fn get(&self, path: &str) -> Method {
        match self.known.get(path) {
            Some(method) => *method,
            None => Method { rules: service_rules(&self.services, path), ..Method::default() },
        }
    }

    /// The rules of a method that it gave.
    #[inline]
    pub(crate) fn rules(&self, method: Method) -> &Rules {
        &self.rules[method.rules.unwrap_or(0)]
    }
}

#[cold]
fn service_rules(services: &BTreeMap<String, usize>, path: &str) -> Option<usize> {
    if services.is_empty() {
        return None;
    }
    let end = path.rfind('/')? + 1;
    services.get(&path[..end]).copied()
}

// === impl Name ===

impl<'a> Name<'a> {
    pub(crate) fn parse(name: &'a str) -> Option<Self> {
        let rest = name.strip_prefix('/')?;
        if rest.is_empty() {
            return Some(Self::All);
        }
        match rest.split_once('/')? {
            ("", _) => None,
            (_, "") => Some(Self::Service(name)),
            (_, method) if method.contains('/') => None,
            _ => Some(Self::Method(name)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::client::policy::MethodOptions;

    fn rules(seconds: u64) -> Rules {
        Rules::new(&MethodOptions::new().timeout(Duration::from_secs(seconds)), 5)
    }

    #[test]
    fn idempotency_levels_are_read_from_the_descriptor_set() {
        let mut methods = Methods::new(rules(1));
        methods.read(crate::demo::pb::FILE_DESCRIPTOR_SET).unwrap();
        assert!(methods.get("/counter.v1.Counter/Get").safe, "NO_SIDE_EFFECTS");
        assert!(methods.get("/counter.v1.Counter/Add").safe, "IDEMPOTENT");
        assert!(!methods.get("/counter.v1.Counter/Increment").safe, "says nothing");
        assert!(!methods.get("/counter.v1.Counter/Nothing").safe, "does not exist");
        assert!(methods.get("/counter.v1.Counter/Get").unary_response);
        assert!(!methods.get("/counter.v1.Counter/Watch").unary_response);
    }

    #[test]
    fn rubbish_is_no_descriptor_set() {
        assert!(Methods::new(rules(1)).read(b"\xff\xff\xff").is_err());
    }

    #[test]
    fn the_most_specific_rules_hold() {
        let mut methods = Methods::new(rules(1));
        methods.declare_safe("/a.B/Safe");
        methods.declare_safe("/a.B/Both");
        methods.rule(Name::Service("/a.B/"), rules(2));
        methods.rule(Name::Method("/a.B/Both"), rules(3));
        methods.rule(Name::Method("/c.D/Own"), rules(4));
        let methods = methods.resolved();
        let seconds = |path: &str| methods.rules(methods.get(path)).timeout.unwrap().as_secs();
        for (path, expected) in
            [("/a.B/Safe", 2), ("/a.B/Both", 3), ("/a.B/Any", 2), ("/c.D/Own", 4), ("/c.D/Any", 1), ("*", 1)]
        {
            assert_eq!(seconds(path), expected, "{path}");
        }
        assert!(methods.get("/a.B/Both").safe && methods.get("/a.B/Safe").safe);
        assert!(!methods.get("/c.D/Own").safe);
    }

    #[test]
    fn a_name_is_a_method_a_service_or_all() {
        assert_eq!(Name::parse("/counter.v1.Counter/Get"), Some(Name::Method("/counter.v1.Counter/Get")));
        assert_eq!(Name::parse("/counter.v1.Counter/"), Some(Name::Service("/counter.v1.Counter/")));
        assert_eq!(Name::parse("/"), Some(Name::All));
        for bad in ["", "Get", "/a", "counter.v1.Counter/Get", "//b", "//", "/a/b/c", "/a//"] {
            assert_eq!(Name::parse(bad), None, "{bad:?}");
        }
    }
}
