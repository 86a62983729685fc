//! One call, from the generated client to its response's headers.
//!
//! ```text
//! capture the body --+--> serial.rs: pick -> attempt -> judge -+-> hand over
//!                    |       ^                                 |
//!                    |       +------ pause <- may be resent ---+
//!                    |
//!                    +--> hedge.rs: the same, several at once, where the rules say so
//!                    +--> follow.rs: the same, at the primary alone
//! ```

mod context;
mod follow;
mod hedge;
mod serial;

use std::{
    future::{Future, poll_fn},
    sync::{Arc, atomic::AtomicBool},
    task::Poll,
    time::Duration,
};

use http::{Extensions, HeaderName, HeaderValue, Request, Response};
use tokio::{
    sync::{mpsc, watch},
    time::Instant,
};
use tonic::{Status, body::Body};

pub(crate) use self::context::CallContext;
use super::{
    admission::Admission,
    answer::{self, Answer},
    balance::{Chosen, Picker},
    binding::Binding,
    choice::{CallOptions, Reach},
    deadline::Deadline,
    error::CallError,
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
    pub(crate) admission: Arc<Admission>,
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
    /// Tells the hook of one failed attempt.
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

/// What a call's future is: boxed once a call.
pub(crate) type CallFuture =
    std::pin::Pin<Box<dyn Future<Output = Result<Response<Body>, CallError>> + Send>>;

/// A call that is to be run: its request, taken apart.
///
/// Made before the call's future is, and lent to it: what an `async fn` is given
/// for good lies in its future twice, and one of 4 KiB is slowly made and moved.
pub(crate) struct Call {
    shared: Arc<CallShared>,
    head: Head,
    body: Option<Body>,
    /// The request's, for the response's to be made of.
    extensions: Extensions,
    since: Instant,
    deadline: Deadline,
}

/// How a call came to its response.
struct Answered {
    answer: Answer,
    endpoint: Chosen,
    attempts: u32,
}

/// A request without its body, from which each attempt's is made.
struct Outgoing<'a> {
    head: &'a mut Head,
    /// When the call began.
    since: Instant,
    deadline: Deadline,
    /// The header does not tell the deadline.
    untold: bool,
    /// The first attempt did not begin with the call.
    waited: bool,
}

/// Runs one call, once. Dropping the future cancels it, here and on the server.
pub(crate) async fn run(call: &mut Call) -> Result<Response<Body>, CallError> {
    let context = call.begin()?;
    let record = context.lookout().is_some();
    let limit = context.shared().options.request_limit(record);
    let mut body = poll_fn(|cx| {
        let body = call.body.take().expect("polled once: it is ready at once");
        Poll::Ready(ReplayBody::capture(body, limit, record, cx))
    })
    .await;
    let request = call.outgoing(context.rules().timeout);
    let deadline = request.deadline;
    let answered = match context.hedging() {
        // Boxed as well: it is larger, and not everybody's.
        _ if context.lookout().is_some() => Box::pin(follow::run(&context, request, &mut body)).await?,
        // Boxed, for what is seldom needed must not make every call's future larger.
        Some(rules) if body.is_whole() => Box::pin(hedge::run(&context, rules, request, &body)).await?,
        // By reference: what is moved into a future is kept twice.
        _ => serial::run(&context, request, &mut body).await?,
    };
    let until = deadline.of_body(context.has_unary_response());
    Ok(answered.hand_over(context, until, std::mem::take(&mut call.extensions)))
}

// === impl Call ===

impl Call {
    pub(crate) fn new(shared: Arc<CallShared>, request: Request<Body>) -> Self {
        let (mut head, body) = request.into_parts();
        let since = Instant::now();
        let deadline = Deadline::of(&head.headers, shared.options.default_timeout, since);
        let extensions = std::mem::take(&mut head.extensions);
        Self { shared, head: Head::new(head), body: Some(body), extensions, since, deadline }
    }

    /// What is known of the call at once. Not in the future itself, which would keep
    /// a place for each step of it.
    fn begin(&self) -> Result<CallContext, CallError> {
        let (shared, uri) = (&self.shared, self.head.uri());
        let under_way = shared.admission.begin().map_err(|kind| {
            let error = CallError::new(kind, None, 0);
            shared.failed(uri.path(), None, 0, error.status(), false);
            error
        })?;
        shared.retry.budget.begun();
        let wishes = self.extensions.get::<CallOptions>().cloned();
        Ok(CallContext::new(shared.clone(), uri.clone(), wishes, under_way))
    }

    /// `timeout` is what the options say of the deadline; the caller has not told
    /// the server of it.
    fn outgoing(&mut self, timeout: Option<Duration>) -> Outgoing<'_> {
        let mut deadline = self.deadline.within(timeout, self.since);
        if self.shared.without.lacks(CallMechanism::Deadline) {
            deadline = Deadline::none(self.since);
        }
        let untold = timeout.is_some();
        Outgoing { head: &mut self.head, since: self.since, deadline, untold, waited: false }
    }
}

// === impl Outgoing ===

impl Outgoing<'_> {
    /// The next attempt's request; `tries` counts it.
    fn attempt(&mut self, body: Body, tries: &Tries) -> Request<Body> {
        let mut request = self.head.request(body);
        if self.untold || self.waited || tries.made > 1 {
            self.deadline.lower(request.headers_mut(), Instant::now());
        }
        if tries.counted > 0 {
            request.headers_mut().insert(PREVIOUS_ATTEMPTS, HeaderValue::from(tries.counted));
        }
        request
    }

    /// When the attempt that `tries` counted last begins: the clock is read only if need be.
    fn began(&self, tries: &Tries) -> Instant {
        if self.waited || tries.made > 1 { Instant::now() } else { self.since }
    }
}

// === impl Answered ===

impl Answered {
    /// The caller's response. Its extensions are put into `map`, which nobody needs
    /// any more: two allocations less.
    fn hand_over(self, context: CallContext, until: Option<Instant>, mut map: Extensions) -> Response<Body> {
        let Self { answer, endpoint, attempts } = self;
        let served = Served { instance: endpoint.instance().clone(), attempts };
        let mut response = match answer {
            Answer::Whole(response) => response.map(Body::new),
            Answer::Begun(response) => {
                let has_status = answer::tell(response.headers());
                response.map(|body| {
                    Body::new(WatchedBody::new(body, has_status, context, endpoint, attempts, until))
                })
            }
        };
        if response.extensions().is_empty() {
            map.clear();
            *response.extensions_mut() = map;
        }
        response.extensions_mut().insert(served);
        response
    }
}
