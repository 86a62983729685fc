//! A snapshot of what one service is bound to, and why not where it is not.

use std::{fmt, sync::Arc, time::Duration};

use tokio::time::Instant;

use super::resolver::RegistryDoubt;
use crate::{FencingToken, Instance, consul::Denied, instance::Shown};

/// The name of the own datacenter until the registry has told it.
pub(crate) const UNNAMED: &str = "local";

/// The state of one service at one moment. It promises nothing about the next one.
///
/// Its `Display` is one line: `counter-1@dc1 ready, 2 known, 1 ejected`, or, where calls go to the primary
/// alone, `counter-a@dc1 ready, primary of term 3, 2 known`. It names the preferred instance; how many are
/// ready is in [`DatacenterStatus::ready`].
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct ServiceStatus {
    /// The service's name.
    pub service: Arc<str>,
    /// The generation of the binding last published.
    pub generation: u64,
    /// The preferred instance, if any is usable; where calls are spread
    /// ([`Policy`](super::Policy)), one of those that they go to.
    pub bound: Option<Arc<Instance>>,
    /// Whether calls go to the primary alone.
    pub primary_only: bool,
    /// The primary, where calls go to it alone and it is known and connected.
    pub primary: Option<Arc<Instance>>,
    /// The token of its term, where that is known.
    pub token: Option<FencingToken>,
    /// The datacenters, the own one first, then in the order of preference.
    pub datacenters: Vec<DatacenterStatus>,
    /// Whether the service has been shut down: nothing follows any more.
    pub closed: bool,
}

/// What is known of a service in one datacenter.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct DatacenterStatus {
    /// Its name; `local` until the registry has told it.
    pub name: String,
    /// Whether it is being asked at all: others than the own one only on need.
    pub asked: bool,
    /// Instances that the registry lists, or listed when it last knew any.
    pub known: usize,
    /// Of them, those with a ready connection.
    pub ready: usize,
    /// Of them, those left alone after a failure.
    pub ejected: usize,
    /// Instances that are on the list no longer and are still connected: the last
    /// resort, as none of those that are listed is ready.
    pub unlisted: usize,
    /// Of the ready ones, those that say that they are not serving, where that is watched.
    pub not_serving: usize,
    /// What went wrong with the last of the ejected ones.
    pub last_failure: Option<String>,
    /// Since when the list has been empty, where it held instances before: they
    /// are still used, and later demoted behind every other datacenter.
    pub empty_since: Option<Instant>,
    /// True once they are.
    pub demoted: bool,
    /// Since when what is known has not been confirmed: the registry does not
    /// answer (then see `registry_error`), is cut off from its leader or has only just come
    /// back (see `doubt`), or
    /// hides the list from the token (see `denied`). What it said before is still used.
    pub stale_since: Option<Instant>,
    /// Entries of the last list that name nothing to connect to, and are left out.
    pub skipped: usize,
    /// The first of them, and what is wrong with it.
    pub first_skipped: Option<Arc<str>>,
    /// Why the registry does not answer.
    pub registry_error: Option<String>,
    /// What is wrong with a registry that answers.
    pub doubt: Option<RegistryDoubt>,
    /// What the token may not read, where that is known.
    pub denied: Option<Denied>,
    /// The address of the agent that answered last; of several, the one in use.
    pub agent: Option<Arc<str>>,
    /// Whether the registry has ever answered.
    pub answered: bool,
}

impl ServiceStatus {
    /// Before the worker has begun: the own datacenter is about to be asked.
    pub(crate) fn at_start(service: Arc<str>) -> Self {
        let own = DatacenterStatus { name: UNNAMED.to_owned(), asked: true, ..DatacenterStatus::default() };
        Self { service, datacenters: vec![own], ..Self::default() }
    }

    /// Whether an instance is usable.
    pub fn is_ready(&self) -> bool {
        self.bound.is_some()
    }

    /// Why nothing is usable; `None` when something is.
    pub fn reason(&self) -> Option<String> {
        if self.is_ready() {
            return None;
        }
        if self.closed {
            return Some("shut down".to_owned());
        }
        let reasons: Vec<_> =
            self.datacenters.iter().filter(|d| d.asked).map(DatacenterStatus::reason).collect();
        Some(if reasons.is_empty() { "not asked yet".to_owned() } else { reasons.join("; ") })
    }
}

impl DatacenterStatus {
    fn reason(&self) -> String {
        let name = Shown(&self.name);
        let mut text = match (self.known, self.answered) {
            (0, true) if self.skipped > 0 => {
                let first = self.first_skipped.as_deref().unwrap_or_default();
                format!("{name} lists {}, none of which can be connected to ({first})", self.skipped)
            }
            (0, true) => format!("{name} lists no healthy instance"),
            (0, false) => format!("{name} has not answered yet"),
            (known, _) => match &self.last_failure {
                Some(failure) => format!("{name} lists {known}, none answers ({failure})"),
                None => format!("{name} lists {known}, none has answered yet"),
            },
        };
        if let Some(denied) = &self.denied {
            text.push_str(&format!(", {denied}"));
        }
        if let Some(error) = &self.registry_error {
            text.push_str(&format!(", its registry: {error}"));
        }
        text
    }
}

impl fmt::Display for ServiceStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(bound) = &self.bound else {
            return write!(f, "{}: nothing usable: {}", self.service, self.reason().unwrap_or_default());
        };
        let (known, ejected) = self
            .datacenters
            .iter()
            .fold((0, 0), |(known, ejected), d| (known + d.known, ejected + d.ejected));
        write!(f, "{bound} ready, ")?;
        match (&self.primary, self.token) {
            (Some(primary), _) if primary.id != bound.id => write!(f, "primary {primary}, ")?,
            (Some(_), Some(token)) => write!(f, "primary of term {token}, ")?,
            (Some(_), None) => f.write_str("primary, ")?,
            (None, _) if self.primary_only => f.write_str("no primary known, ")?,
            (None, _) => {}
        }
        write!(f, "{known} known")?;
        if ejected > 0 {
            write!(f, ", {ejected} ejected")?;
        }
        let not_serving: usize = self.datacenters.iter().map(|d| d.not_serving).sum();
        if not_serving > 0 {
            write!(f, ", {not_serving} not serving")?;
        }
        for datacenter in &self.datacenters {
            let name = Shown(&datacenter.name);
            if let Some(since) = datacenter.stale_since {
                write!(f, ", {name} stale for {}", Seconds(since.elapsed()))?;
                match (&datacenter.registry_error, &datacenter.denied, datacenter.doubt) {
                    (Some(error), _, _) => write!(f, " ({error})")?,
                    (None, Some(denied), _) => write!(f, " ({denied})")?,
                    (None, None, Some(doubt)) => write!(f, " ({doubt})")?,
                    (None, None, None) => {}
                }
            } else if let Some(denied) = &datacenter.denied {
                write!(f, ", {name}: {denied}")?;
            } else if let Some(doubt) = datacenter.doubt {
                write!(f, ", registry of {name}: {doubt}")?;
            }
            if datacenter.unlisted > 0 {
                write!(f, ", {} no longer listed in {name}", datacenter.unlisted)?;
            }
            if let Some(since) = datacenter.empty_since {
                write!(f, ", {name} lists none for {}", Seconds(since.elapsed()))?;
                if datacenter.demoted {
                    f.write_str(" (its last known are the last resort)")?;
                }
            }
        }
        Ok(())
    }
}

struct Seconds(Duration);

impl fmt::Display for Seconds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.1} s", self.0.as_secs_f64())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(datacenter: DatacenterStatus) -> ServiceStatus {
        ServiceStatus { service: "counter".into(), datacenters: vec![datacenter], ..ServiceStatus::default() }
    }

    fn dc1() -> DatacenterStatus {
        DatacenterStatus { name: "dc1".into(), asked: true, ..DatacenterStatus::default() }
    }

    #[tokio::test(start_paused = true)]
    async fn one_line_says_what_is_bound_known_ejected_and_stale() {
        let mut status = status(DatacenterStatus { known: 2, ready: 1, ejected: 1, answered: true, ..dc1() });
        status.bound = Some(Arc::new(Instance::new("counter-1", "127.0.0.1", 1, "dc1")));
        assert_eq!(status.to_string(), "counter-1@dc1 ready, 2 known, 1 ejected");
        status.datacenters[0].stale_since = Some(Instant::now());
        status.datacenters[0].registry_error = Some("connection refused".into());
        tokio::time::advance(Duration::from_millis(2500)).await;
        assert_eq!(
            status.to_string(),
            "counter-1@dc1 ready, 2 known, 1 ejected, dc1 stale for 2.5 s (connection refused)"
        );
        status.datacenters[0] = DatacenterStatus { known: 1, unlisted: 1, answered: true, ..dc1() };
        assert_eq!(status.to_string(), "counter-1@dc1 ready, 1 known, 1 no longer listed in dc1");
    }

    #[tokio::test(start_paused = true)]
    async fn a_name_that_is_none_fills_no_status_and_moves_no_cursor() {
        let name = format!("a\u{1b}[2J\n{}", "x".repeat(100_000));
        let odd = DatacenterStatus { name, unlisted: 1, empty_since: Some(Instant::now()), ..dc1() };
        let mut status = status(odd);
        for bound in [None, Some(Arc::new(Instance::new("a", "a", 1, status.datacenters[0].name.clone())))] {
            status.bound = bound;
            for stale in [None, Some(Instant::now())] {
                status.datacenters[0].stale_since = stale;
                for denied in [None, Some(Denied::Part)] {
                    status.datacenters[0].denied = denied;
                    for doubt in [None, Some(RegistryDoubt::Settling)] {
                        status.datacenters[0].doubt = doubt;
                        let line = status.to_string();
                        assert!(line.len() < 1000 && !line.contains(char::is_control), "{line:.2000}");
                    }
                }
            }
        }
    }

    #[test]
    fn it_says_why_nothing_is_usable() {
        let cases = [
            (dc1(), "dc1 has not answered yet"),
            (DatacenterStatus { answered: true, ..dc1() }, "dc1 lists no healthy instance"),
            (
                DatacenterStatus {
                    answered: true,
                    skipped: 2,
                    first_skipped: Some("no port".into()),
                    ..dc1()
                },
                "dc1 lists 2, none of which can be connected to (no port)",
            ),
            (DatacenterStatus { known: 2, ..dc1() }, "dc1 lists 2, none has answered yet"),
            (
                DatacenterStatus { known: 2, last_failure: Some("refused".into()), ..dc1() },
                "dc1 lists 2, none answers (refused)",
            ),
            (
                DatacenterStatus { answered: true, denied: Some(Denied::Service), ..dc1() },
                "dc1 lists no healthy instance, the token may not read the service",
            ),
            (
                DatacenterStatus { registry_error: Some("timed out".into()), ..dc1() },
                "dc1 has not answered yet, its registry: timed out",
            ),
        ];
        for (datacenter, reason) in cases {
            assert_eq!(status(datacenter).to_string(), format!("counter: nothing usable: {reason}"));
        }
    }
}
