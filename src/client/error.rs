//! One error type for each operation.

use std::{error::Error, fmt, sync::Arc, time::Duration};

use tonic::{Code, Status};

use super::{retry::Tries, status::ServiceStatus};
use crate::{Instance, consul::RegistryError};

/// Why a [`ConsulService`](super::ConsulService) or [`Services`](super::Services)
/// could not be built.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BuildError {
    /// The Consul settings are not usable.
    #[error(transparent)]
    Consul(#[from] crate::consul::ConfigError),
    /// A service's name cannot be asked for.
    #[error(transparent)]
    Name(#[from] crate::consul::InvalidName),
    /// The wait of blocking queries is outside of what Consul takes.
    #[error("wait = {value:?} is not usable: 1 s to 10 min (Consul's limit)")]
    Wait {
        /// What was given.
        value: Duration,
    },
    /// The number of long polls is outside of what leaves Consul's limit alone.
    #[error("max_long_polls = {value} is not usable: 1 to 128 (Consul takes 200 connections in all)")]
    MaxLongPolls {
        /// What was given.
        value: usize,
    },
    /// The time between two reads is not usable.
    #[error("read_at_least_every = {value:?} is not usable: 100 ms to 10 min")]
    ReadAtLeastEvery {
        /// What was given.
        value: Duration,
    },
    /// No service was named.
    #[error("no service was named: add at least one with `service(ServiceOptions::new(\"name\"))`")]
    NoService,
    /// The same service was named twice.
    #[error("service {name:?} was named twice: each needs one `ServiceOptions`")]
    DuplicateService {
        /// The name.
        name: String,
    },
    /// A setting of a service is impossible.
    #[error("service {service:?}: {setting} = {value} is not usable: {expected}")]
    Setting {
        /// The service.
        service: String,
        /// The setting's name.
        setting: &'static str,
        /// What was given.
        value: String,
        /// What would be right.
        expected: &'static str,
    },
    /// The descriptors do not know what a setting names, and know what it was probably meant for.
    #[error("service {service:?}: {setting} = {value} is not in the descriptors: was {} meant?", meant.join(" or "))]
    Misspelt {
        /// The service.
        service: String,
        /// The setting's name.
        setting: &'static str,
        /// What was given.
        value: String,
        /// What they know that is like it, or that the same service offers.
        meant: Vec<String>,
    },
    /// The file descriptor set could not be read.
    #[error("service {service:?}: descriptors is not a file descriptor set as protoc or protox writes it")]
    Descriptors {
        /// The service.
        service: String,
        /// What prost says.
        source: prost::DecodeError,
    },
    /// There is no tokio runtime to run on.
    #[error(
        "build() needs a running tokio runtime: call it from within `#[tokio::main]` or `Runtime::enter`"
    )]
    NoRuntime,
    /// The tokio runtime lacks what everything here needs.
    #[error("build() needs a tokio runtime with {lacks} enabled: make it with `Builder::enable_all`")]
    Runtime {
        /// `timers`, or `IO`.
        lacks: &'static str,
    },
}

/// A service that the [`ConsulService`](super::ConsulService) or
/// [`Services`](super::Services) was not built with.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown service {name:?}: the known ones are {}", known.join(", "))]
pub struct UnknownService {
    /// The name asked for.
    pub name: String,
    /// The names there are.
    pub known: Vec<String>,
}

/// Why `update_grpc_client` gives no binding.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum UpdateError {
    /// The service is unknown.
    #[error(transparent)]
    Unknown(#[from] UnknownService),
    /// The registry did not answer, and no instance known from before does.
    #[error("the registry could not be asked, and no instance known from before answers")]
    Registry(#[source] RegistryError),
    /// The registry answered, and no instance does.
    #[error("no instance is usable: {reason}")]
    NothingUsable {
        /// The status' reason at that moment.
        reason: String,
    },
    /// The `ConsulService`, or whatever else it belongs to, has been shut down.
    #[error("the service has been shut down")]
    Closed,
}

/// Nothing became usable in the time given to [`ready`](super::GrpcClient::ready),
/// or nothing will, because the service has been shut down.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{} is not ready{}: {}", status.service, after(*waited), status.reason().unwrap_or_default())]
pub struct NotReady {
    /// How long was waited; nothing where there was nothing to wait for.
    pub waited: Duration,
    /// The state of things at the end of it.
    pub status: Box<ServiceStatus>,
}

fn after(waited: Duration) -> String {
    if waited.is_zero() { String::new() } else { format!(" after {waited:?}") }
}

/// A call that failed on our side of the wire.
///
/// A caller of a generated client gets an ordinary [`Status`] (UNAVAILABLE,
/// DEADLINE_EXCEEDED or RESOURCE_EXHAUSTED, or what the request itself came to) whose source is this. A status
/// that came over the wire is passed on as it came and has none. See [`CallError::of`].
pub struct CallError(Box<Inner>);

struct Inner {
    kind: CallErrorKind,
    instance: Option<Arc<Instance>>,
    attempts: u32,
    /// An attempt before the last one may have run.
    ran_before: bool,
    /// What tonic finds in the chain: the code and the text for the caller. The
    /// transport's own error is its source.
    status: Status,
}

/// What ended a failed call.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum CallErrorKind {
    /// No instance was usable within the fail-fast bound.
    NothingUsable {
        /// The status' reason at that moment.
        reason: String,
    },
    /// The deadline passed.
    DeadlineExceeded,
    /// The connection failed under a call that may have run.
    ConnectionLost,
    /// The server reset this one stream, or sent on it what cannot be taken (no HTTP/2, or headers above
    /// 16 KiB); the call may have run. Its cause says which.
    StreamReset,
    /// The instance fell silent and did not answer a probe; the call may have run.
    Unresponsive,
    /// No answer came within the time of one attempt
    /// ([`RetryPolicy::attempt_timeout`](super::RetryPolicy::attempt_timeout)); the call may have run.
    AttemptTimedOut,
    /// It was refused unprocessed as often as it may be resent.
    Refused,
    /// It never left, and was tried as often as one call may be.
    NeverSent,
    /// The response had begun when the connection or its stream ended.
    ResponseCut,
    /// The request itself failed: a message is larger than its client may send, its stream panicked, or the
    /// caller has cancelled it by tonic's handle. The status is that of the request, as tonic has it.
    RequestFailed,
    /// Where [`CallOptions`](super::CallOptions) wanted it to go, nothing is usable.
    NotAsChosen {
        /// What was wanted.
        choice: String,
        /// Why it cannot be had.
        reason: String,
    },
    /// The deadline passed, and no instance was found to be the primary, where calls go to it
    /// alone ([`primary_only`](super::ServiceOptions::primary_only)). Its cause is the last refusal, if there
    /// was one.
    NoPrimary {
        /// How far the search had come.
        reason: String,
    },
    /// As many calls are under way, or wait, as may.
    TooMany {
        /// The setting that says how many may.
        setting: &'static str,
        /// How many that are.
        limit: usize,
    },
    /// The response, or a stream of requests, was still coming when the time was over that
    /// [`drain_after`](super::ServiceOptions::drain_after) gives to an instance that has left.
    Drained,
    /// The handle's `ConsulService` has been shut down.
    Closed,
}

impl CallError {
    pub(crate) fn new(kind: CallErrorKind, instance: Option<Arc<Instance>>, attempts: u32) -> Self {
        let code = match kind {
            CallErrorKind::DeadlineExceeded | CallErrorKind::NoPrimary { .. } => Code::DeadlineExceeded,
            CallErrorKind::TooMany { .. } => Code::ResourceExhausted,
            CallErrorKind::RequestFailed => Code::Internal,
            _ => Code::Unavailable,
        };
        let status = Status::new(code, describe(&kind, instance.as_deref(), attempts));
        Self(Box::new(Inner { kind, instance, attempts, ran_before: false, status }))
    }

    /// The request came to this by itself.
    pub(crate) fn of_request(status: Status, instance: Option<Arc<Instance>>, attempts: u32) -> Self {
        let kind = CallErrorKind::RequestFailed;
        Self(Box::new(Inner { kind, instance, attempts, ran_before: false, status }))
    }

    /// Adds why it came to that. Before a cause is set.
    pub(crate) fn because(mut self, reason: &str) -> Self {
        let status = &self.0.status;
        self.0.status = Status::new(status.code(), format!("{}: {reason}", status.message()));
        self
    }

    /// Takes into account what earlier attempts may have done.
    pub(crate) fn after(mut self, tries: &Tries) -> Self {
        self.0.ran_before = tries.ran;
        self
    }

    /// So many were made, of which this need not be the last.
    pub(crate) fn of_attempts(mut self, made: u32) -> Self {
        self.0.attempts = made;
        self
    }

    pub(crate) fn caused_by(mut self, cause: Arc<dyn Error + Send + Sync>) -> Self {
        self.0.status.set_source(cause);
        self
    }

    /// Finds the typed error behind a status. `None` where the status came over the wire.
    pub fn of(status: &Status) -> Option<&CallError> {
        let mut next = status.source();
        while let Some(error) = next {
            if let Some(found) = error.downcast_ref::<CallError>() {
                return Some(found);
            }
            next = error.source();
        }
        None
    }

    /// What ended the call.
    pub fn kind(&self) -> &CallErrorKind {
        &self.0.kind
    }

    /// The status the caller gets.
    pub fn status(&self) -> &Status {
        &self.0.status
    }

    /// The instance of the last attempt.
    pub fn instance(&self) -> Option<&Arc<Instance>> {
        self.0.instance.as_ref()
    }

    /// How many attempts reached a connection.
    pub fn attempts(&self) -> u32 {
        self.0.attempts
    }

    /// False only where it is proven that no server ran the call, in any attempt.
    pub fn may_have_run(&self) -> bool {
        self.0.ran_before || self.0.kind.may_have_run(self.0.attempts)
    }
}

impl CallErrorKind {
    /// Whether the last attempt may have run.
    fn may_have_run(&self, attempts: u32) -> bool {
        match self {
            CallErrorKind::NothingUsable { .. }
            | CallErrorKind::NotAsChosen { .. }
            | CallErrorKind::NoPrimary { .. }
            | CallErrorKind::TooMany { .. }
            | CallErrorKind::Refused
            | CallErrorKind::NeverSent
            | CallErrorKind::Closed => false,
            CallErrorKind::DeadlineExceeded | CallErrorKind::RequestFailed => attempts > 0,
            CallErrorKind::ConnectionLost
            | CallErrorKind::StreamReset
            | CallErrorKind::Unresponsive
            | CallErrorKind::AttemptTimedOut
            | CallErrorKind::Drained
            | CallErrorKind::ResponseCut => true,
        }
    }
}

fn describe(kind: &CallErrorKind, instance: Option<&Instance>, attempts: u32) -> String {
    let to = instance.map(|i| format!(" to {i}")).unwrap_or_default();
    match kind {
        CallErrorKind::NothingUsable { reason } => format!("no instance is usable: {reason}"),
        CallErrorKind::DeadlineExceeded if attempts == 0 => {
            "deadline exceeded before the call was sent".to_owned()
        }
        CallErrorKind::DeadlineExceeded => format!("deadline exceeded in attempt {attempts}{to}"),
        CallErrorKind::ConnectionLost => format!("connection{to} lost; the call may have run"),
        CallErrorKind::StreamReset => format!("stream{to} was reset; the call may have run"),
        CallErrorKind::Unresponsive => format!("instance fell silent{to}; the call may have run"),
        CallErrorKind::AttemptTimedOut => {
            format!("attempt {attempts}{to} was not answered in its time; the call may have run")
        }
        CallErrorKind::Refused => format!("refused unprocessed in attempt {attempts}{to}"),
        CallErrorKind::NeverSent => format!("never sent in {attempts} attempts, the last{to}"),
        CallErrorKind::ResponseCut => format!("the response to a call{to} was cut in its middle"),
        CallErrorKind::RequestFailed => "the request failed before it was sent to its end".to_owned(),
        CallErrorKind::NotAsChosen { choice, reason } => format!("{choice} is not usable: {reason}"),
        CallErrorKind::NoPrimary { reason } => format!("no instance is known to be the primary: {reason}"),
        CallErrorKind::TooMany { setting, limit } => {
            format!("too many calls at once: {setting} = {limit}")
        }
        CallErrorKind::Drained => format!("the response to a call{to} was ended: the instance has left"),
        CallErrorKind::Closed => "the service has been shut down".to_owned(),
    }
}

/// Short: it stands beside the same message in the `Display` of tonic's `Status`.
impl fmt::Debug for CallError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = format!("{:?}", self.0.kind);
        let kind = kind.split([' ', '{', '(']).next().unwrap_or_default();
        let ran = if self.may_have_run() { "may have run" } else { "never ran" };
        write!(f, "CallError({kind}, attempts: {}, {ran})", self.0.attempts)
    }
}

impl fmt::Display for CallError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0.status.message())
    }
}

impl Error for CallError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        // tonic takes the code from the first status in the chain.
        Some(&self.0.status)
    }
}

/// An error and what it comes down to, in one line: between the two only layers
/// say that they failed too.
pub(crate) fn in_brief(error: &(dyn std::error::Error + 'static)) -> String {
    let mut last = error;
    while let Some(cause) = last.source() {
        last = cause;
    }
    let (first, last) = (error.to_string(), last.to_string());
    if first.ends_with(&last) { first } else { format!("{first}: {last}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("{0}")]
    struct Told(&'static str, #[source] Option<Box<Told>>);

    #[test]
    fn a_cause_is_told_once() {
        let cause = Told("reset by peer", None);
        let error = Told("cannot ask", Some(Box::new(Told("broken: reset by peer", Some(Box::new(cause))))));
        assert_eq!(in_brief(&error), "cannot ask: reset by peer");
    }

    #[test]
    fn a_caller_sees_the_code_and_finds_the_typed_error_and_its_cause() {
        let cause = std::io::Error::other("broken pipe");
        let error = CallError::new(CallErrorKind::ConnectionLost, None, 1).caused_by(Arc::new(cause));
        let status = Status::from_error(Box::new(error));
        assert_eq!(status.code(), Code::Unavailable);
        let found = CallError::of(&status).expect("typed");
        assert!(found.may_have_run());
        let io = found.source().and_then(Error::source).expect("cause");
        assert_eq!(io.to_string(), "broken pipe");
    }

    #[test]
    fn an_unknown_service_lists_the_known_ones() {
        let error = UnknownService { name: "x".into(), known: vec!["a".into(), "b".into()] };
        assert_eq!(error.to_string(), "unknown service \"x\": the known ones are a, b");
    }

    #[test]
    fn an_attempt_that_may_have_run_is_not_forgotten_when_the_next_finds_nothing() {
        let nothing = || CallErrorKind::NothingUsable { reason: String::new() };
        let mut tries = Tries::default();
        tries.ran = true;
        assert!(CallError::new(nothing(), None, 1).after(&tries).may_have_run());
        assert!(!CallError::new(nothing(), None, 0).after(&Tries::default()).may_have_run());
    }

    #[test]
    fn a_deadline_before_any_attempt_proves_that_nothing_ran() {
        assert!(!CallError::new(CallErrorKind::DeadlineExceeded, None, 0).may_have_run());
        assert!(CallError::new(CallErrorKind::DeadlineExceeded, None, 1).may_have_run());
    }
}
