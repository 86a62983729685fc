//! One call, from the generated client to its response's headers.
//!
//! ```text
//! capture the body --+--> serial.rs: pick -> attempt -> judge -+-> hand over
//!                    |       ^                                 |
//!                    |       +------ pause <- may be resent ---+
//!                    |
//!                    +--> hedge.rs: the same, several at once, where the rules say so
//! ```

mod context;
mod hedge;
mod serial;

use std::{
    future::{Future, poll_fn},
    sync::{Arc, atomic::AtomicBool},
    task::Poll,
};

use http::{HeaderName, HeaderValue, Request, Response, request};
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
    choice::Reach,
    deadline::Deadline,
    error::CallError,
    hook::CallFailure,
    methods::Methods,
    options::ServiceOptions,
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
    pub(crate) binding: watch::Receiver<Binding>,
    /// What else is connected, for calls that want to go there.
    pub(crate) reach: watch::Receiver<Reach>,
    pub(crate) status: watch::Receiver<ServiceStatus>,
    pub(crate) reports: mpsc::UnboundedSender<Report>,
    /// The worker has been told that a caller starves, and has not answered yet.
    pub(crate) starving: Arc<AtomicBool>,
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

/// Runs one call. Dropping the future cancels it, here and on the server.
pub(crate) async fn run(
    shared: Arc<CallShared>,
    request: Request<Body>,
) -> Result<Response<Body>, CallError> {
    let (context, mut request, body) = begin(shared, request)?;
    let limit = context.shared().options.replay_limit;
    let mut body = Some(body);
    let mut body = poll_fn(|cx| {
        let body = body.take().expect("polled once: it is ready at once");
        Poll::Ready(ReplayBody::capture(body, limit, cx))
    })
    .await;
    match context.hedging() {
        // Boxed, for what is seldom needed must not make every call's future larger.
        Some(rules) if body.is_whole() => Box::pin(hedge::run(&context, rules, &mut request, &body)).await,
        // By reference: what is moved into a future is kept twice.
        _ => serial::run(&context, &mut request, &mut body).await,
    }
}

/// What is known of the call at once. Not in the future itself, which would keep
/// a place for each step of it.
fn begin(
    shared: Arc<CallShared>,
    request: Request<Body>,
) -> Result<(Arc<CallContext>, Outgoing, Body), CallError> {
    let (head, body) = request.into_parts();
    let under_way = shared.admission.begin().map_err(|kind| {
        let error = CallError::new(kind, None, 0);
        shared.failed(head.uri.path(), None, 0, error.status(), false);
        error
    })?;
    let context = Arc::new(CallContext::new(shared, &head, under_way));
    context.shared().retry.budget.begun();
    let (now, timeout) = (Instant::now(), context.rules().timeout);
    let deadline = Deadline::of(&head.headers, context.shared().options.default_timeout, now);
    // What the options say of the deadline the caller has not told the server.
    let request = Outgoing { head, deadline: deadline.within(timeout, now), late: timeout.is_some() };
    Ok((context, request, body))
}

/// A request without its body, from which each attempt's is made.
struct Outgoing {
    head: request::Parts,
    deadline: Deadline,
    /// Some of the time has passed, or the header does not tell it.
    late: bool,
}

impl Outgoing {
    /// The next attempt's request; `tries` counts it.
    fn attempt(&self, body: Body, tries: &Tries) -> Request<Body> {
        let head = &self.head;
        let mut request = Request::new(body);
        *request.method_mut() = head.method.clone();
        *request.uri_mut() = head.uri.clone();
        *request.version_mut() = head.version;
        *request.headers_mut() = head.headers.clone();
        *request.extensions_mut() = head.extensions.clone();
        if self.late || tries.made > 1 {
            self.deadline.lower(request.headers_mut(), Instant::now());
        }
        if tries.counted > 0 {
            request.headers_mut().insert(PREVIOUS_ATTEMPTS, HeaderValue::from(tries.counted));
        }
        request
    }
}

fn hand_over(
    answer: Answer,
    context: Arc<CallContext>,
    endpoint: Chosen,
    attempts: u32,
    deadline: &Deadline,
) -> Response<Body> {
    let served = Served { instance: endpoint.instance().clone(), attempts };
    let mut response = match answer {
        Answer::Whole(response) => response.map(Body::new),
        Answer::Begun(response) => {
            let has_status = answer::tell(response.headers());
            let until = deadline.of_body(context.has_unary_response());
            response
                .map(|body| Body::new(WatchedBody::new(body, has_status, context, endpoint, attempts, until)))
        }
    };
    response.extensions_mut().insert(served);
    response
}
