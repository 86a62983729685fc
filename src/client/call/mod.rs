//! One call, from the generated client to its response's headers.
//!
//! ```text
//! capture the body --+--> first.rs: pick -> send -> good answer -----> hand over
//!                    |                       | anything else              ^
//!                    |                       v                            |
//!                    +--> serial.rs: pick -> attempt -> judge ------------+
//!                    |       ^                            |               |
//!                    |       +-- pause <- may be resent --+               |
//!                    +--> hedge.rs: the same, several at once, where the rules say so
//!                    +--> follow.rs: the same, at the primary alone
//! ```

mod context;
mod first;
mod follow;
mod hedge;
mod serial;

use std::{
    sync::{Arc, atomic::AtomicBool},
    task::{Context, Waker},
};

use http::{Extensions, HeaderName, HeaderValue, Request, Response, uri::PathAndQuery};
use tokio::{
    sync::{mpsc, watch},
    time::Instant,
};
use tonic::{Status, body::Body};

pub(crate) use self::{context::CallContext, first::CallFuture};
use self::{first::Stay, serial::Started};
use super::{
    admission::Admission,
    answer::Answer,
    balance::{Chosen, Picker},
    binding::Binding,
    choice::{CallOptions, Reach},
    deadline::Deadline,
    error::{CallError, CallErrorKind},
    head::Head,
    hook::CallFailure,
    latecomers::Latecomers,
    mechanisms::{CallMechanism, CallWithout},
    methods::Methods,
    options::ServiceOptions,
    primary::Lookout,
    replay::ReplayBody,
    report::Report,
    response::WatchedBody,
    retry::{Retry, Tries},
    services::Lifetime,
    status::ServiceStatus,
};
use crate::Instance;

/// gRFC A6: how many attempts came before this one.
const PREVIOUS_ATTEMPTS: HeaderName = HeaderName::from_static("grpc-previous-rpc-attempts");

/// In a response's extensions: who served the call.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Served {
    /// The instance that answered; it names its datacenter.
    pub instance: Arc<Instance>,
    /// How many attempts the call took; 1 when the first one succeeded.
    pub attempts: u32,
}

/// What all calls of one service share.
pub(crate) struct CallShared {
    pub(crate) options: Arc<ServiceOptions>,
    pub(crate) methods: Methods,
    pub(crate) picker: Picker,
    pub(crate) retry: Retry,
    pub(crate) admission: Admission,
    /// Where calls are to go to the primary alone.
    pub(crate) lookout: Option<Arc<Lookout>>,
    pub(crate) binding: watch::Receiver<Binding>,
    /// What else is connected, for calls that want to go there.
    pub(crate) reach: watch::Receiver<Reach>,
    pub(crate) status: watch::Receiver<ServiceStatus>,
    pub(crate) reports: mpsc::UnboundedSender<Report>,
    /// The worker has been told that a caller starves, and has not answered yet.
    pub(crate) starving: Arc<AtomicBool>,
    pub(crate) latecomers: Arc<Latecomers>,
    pub(crate) without: CallWithout,
}

impl CallShared {
    #[cold]
    fn refuse(&self, kind: CallErrorKind, method: &str) -> CallError {
        let error = CallError::new(kind, None, 0);
        self.failed(method, None, 0, error.status(), false);
        error
    }

    /// Tells the hook of one failed attempt.
    #[cold]
    fn failed(
        &self,
        method: &str,
        instance: Option<&Arc<Instance>>,
        attempt: u32,
        status: &Status,
        resent: bool,
    ) {
        let service = &*self.options.name;
        tracing::debug!(service, method, attempt, resent, code = ?status.code(), "gRPC call failed");
        if let Some(hook) = &self.options.hook {
            hook(&CallFailure { service, method, instance: instance.map(|i| &**i), attempt, status, resent });
        }
    }
}

/// What the clones of a channel share, and each of its calls holds until its response begins.
pub(crate) struct Line {
    pub(crate) shared: Arc<CallShared>,
    _lifetime: Arc<Lifetime>,
}

/// A call that is to be run: its request, taken apart.
struct Call {
    context: CallContext,
    head: Head,
    body: ReplayBody,
    /// The request's, for the response's to be made of.
    extensions: Extensions,
    since: Instant,
    deadline: Deadline,
    /// The header does not tell the deadline.
    untold: bool,
}

/// How a call came to its response.
struct Answered {
    answer: Answer,
    endpoint: Chosen,
    attempts: u32,
}

/// A request without its body, from which each attempt's is made.
struct Outgoing<'a> {
    head: &'a Head,
    /// When the call began.
    since: Instant,
    deadline: Deadline,
    /// The header does not tell the deadline.
    untold: bool,
    /// The first attempt did not begin with the call.
    waited: bool,
}

/// Begins one call: what needs no waiting is done at once. Dropping the future cancels the call, here
/// and on the server.
pub(crate) fn start(line: &Arc<Line>, request: Request<Body>) -> CallFuture {
    let (since, shared) = (Instant::now(), &line.shared);
    let (mut parts, body) = request.into_parts();
    let extensions = std::mem::take(&mut parts.extensions);
    let wishes = extensions.get::<CallOptions>().map(CallOptions::boxed);
    let path = parts.uri.path_and_query().cloned().unwrap_or_else(|| PathAndQuery::from_static("/"));
    let context = match CallContext::begin(shared, path, wishes) {
        Ok(context) => context,
        Err(error) => return CallFuture::refused(error),
    };
    let (head, timeout) = Head::of(&parts);
    let mut deadline = Deadline::of(timeout, shared.options.default_timeout, since);
    // What the options say of the deadline; the caller has not told the server of it.
    let timeout = context.rules().timeout;
    let untold = timeout.is_some();
    deadline = deadline.within(timeout, since);
    if context.lacks(CallMechanism::Deadline) {
        deadline = Deadline::none(since);
    }
    // Nor is such a call's body polled.
    if deadline.at() <= since {
        return CallFuture::refused(context.give_up(CallError::new(
            CallErrorKind::DeadlineExceeded,
            None,
            0,
        )));
    }
    let record = context.lookout().is_some();
    let limit = shared.options.request_limit(record);
    // Whoever takes what is not there yet polls it again.
    let body = match ReplayBody::capture(body, limit, record, &mut Context::from_waker(Waker::noop())) {
        Ok(body) => body,
        Err(status) => {
            return CallFuture::refused(context.give_up(CallError::of_request(status, None, 0)));
        }
    };
    let call = Call { context, head, body, extensions, since, deadline, untold };
    CallFuture::of(call, parts, Stay::on(line))
}

/// Goes on with a call that is not over with a good answer to its first attempt, or had none yet.
async fn go_on(
    mut call: Box<Call>,
    started: Option<Started>,
    stay: Stay,
) -> Result<Response<Body>, CallError> {
    let Call { context, head, body, since, deadline, untold, .. } = &mut *call;
    let request = Outgoing::new(head, *since, *deadline, *untold);
    let answered = match context.hedging() {
        // Boxed, for what is seldom needed must not make every call's future larger.
        _ if context.lookout().is_some() => Box::pin(follow::run(context, request, body)).await?,
        Some(rules) if body.is_whole() => Box::pin(hedge::run(context, rules, request, body)).await?,
        _ => serial::run(context, request, body, started).await?,
    };
    // Whoever keeps the future alone has got his answer.
    drop(stay);
    Ok(answered.hand_over(*call))
}

// === impl Line ===

impl Line {
    pub(crate) fn new(shared: Arc<CallShared>, lifetime: Arc<Lifetime>) -> Self {
        Self { shared, _lifetime: lifetime }
    }
}

// === impl Outgoing ===

impl<'a> Outgoing<'a> {
    #[inline]
    fn new(head: &'a Head, since: Instant, deadline: Deadline, untold: bool) -> Self {
        Self { head, since, deadline, untold, waited: false }
    }

    /// The next attempt's request; `tries` counts it.
    fn attempt(&self, path: &PathAndQuery, body: Body, tries: &Tries) -> Request<Body> {
        self.tell(self.head.request(path.clone(), body), tries)
    }

    /// Tells the server what it is to know of an attempt.
    #[inline]
    fn tell(&self, mut request: Request<Body>, tries: &Tries) -> Request<Body> {
        if self.untold || self.waited || tries.made > 1 {
            self.deadline.lower(request.headers_mut(), Instant::now());
        }
        if tries.counted > 0 {
            request.headers_mut().insert(PREVIOUS_ATTEMPTS, HeaderValue::from(tries.counted));
        }
        request
    }

    /// When the attempt that `tries` counted last begins: the clock is read only if need be.
    #[inline]
    fn began(&self, tries: &Tries) -> Instant {
        if self.waited || tries.made > 1 { Instant::now() } else { self.since }
    }
}

// === impl Answered ===

impl Answered {
    /// The caller's response. Its extensions are put into `map`, which nobody needs
    /// any more: two allocations less.
    #[inline]
    fn hand_over(self, call: Call) -> Response<Body> {
        let Call { context, body: request, extensions: mut map, deadline, .. } = call;
        let until = deadline.of_body(context.has_unary_response());
        let Self { answer, endpoint, attempts } = self;
        let served = Served { instance: endpoint.instance().clone(), attempts };
        let mut response = match answer {
            Answer::Whole { response, .. } => response.map(Body::new),
            Answer::Begun { response, has_status } => response.map(|body| {
                let request = request.goes_on();
                Body::new(WatchedBody::new(body, has_status, context, endpoint, attempts, until, request))
            }),
        };
        if response.extensions().is_empty() {
            map.clear();
            *response.extensions_mut() = map;
        }
        response.extensions_mut().insert(served);
        response
    }
}
