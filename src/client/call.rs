//! One call, from the generated client to its response's headers.
//!
//! ```text
//! capture the body -> pick an endpoint -> attempt -> judge -+-> hand over
//!                          ^                                |
//!                          +------ pause <- may be resent --+
//! ```

use std::{
    future::{Future, poll_fn},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::Poll,
    time::Duration,
};

use http::{HeaderName, HeaderValue, Request, Response, request};
use tokio::{
    sync::{mpsc, watch},
    time::{Instant, sleep_until, timeout_at},
};
use tonic::{Code, Status, body::Body};

use super::{
    answer::Answer,
    attempt::{Ended, Failure, attempt},
    balance::Picker,
    binding::Binding,
    deadline::Deadline,
    endpoint::Endpoint,
    error::{CallError, CallErrorKind},
    hook::CallFailure,
    methods::Methods,
    options::ServiceOptions,
    outcome::{self, Proof},
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
    pub(crate) binding: watch::Receiver<Binding>,
    pub(crate) status: watch::Receiver<ServiceStatus>,
    pub(crate) reports: mpsc::UnboundedSender<Report>,
    /// The worker has been told that a caller starves, and has not answered yet.
    pub(crate) starving: Arc<AtomicBool>,
}

/// One call.
pub(crate) struct CallContext {
    shared: Arc<CallShared>,
    uri: http::Uri,
    /// The method may be repeated.
    safe: bool,
    /// Its answer is known to be a single message.
    unary: bool,
}

impl CallContext {
    fn new(shared: Arc<CallShared>, uri: http::Uri) -> Self {
        let safe = shared.methods.is_safe(uri.path());
        let unary = shared.methods.has_unary_response(uri.path());
        Self { shared, uri, safe, unary }
    }

    /// How much of an answer is taken in before it is handed over.
    fn whole(&self) -> Option<usize> {
        (self.safe && self.unary).then_some(self.shared.options.replay_limit)
    }

    pub(crate) fn failures_to_eject(&self) -> u32 {
        self.shared.options.failures_to_eject
    }

    /// Tells the hook of one failed attempt.
    pub(crate) fn failed(
        &self,
        instance: Option<&Arc<Instance>>,
        attempt: u32,
        status: &Status,
        resent: bool,
    ) {
        tracing::debug!(
            service = %self.shared.options.name, method = self.uri.path(), attempt, resent,
            code = ?status.code(), "gRPC call failed"
        );
        if let Some(hook) = &self.shared.options.hook {
            hook(&CallFailure {
                service: &self.shared.options.name,
                method: self.uri.path(),
                instance: instance.map(|i| &**i),
                attempt,
                status,
                resent,
            });
        }
    }

    /// The call fails for its caller.
    fn give_up(&self, error: CallError) -> CallError {
        self.failed(error.instance(), error.attempts(), error.status(), false);
        error
    }

    /// A usable endpoint; waits for one as long as there is `patience`, and takes
    /// the wait from it.
    async fn pick(
        &self,
        tries: &Tries,
        deadline: &Deadline,
        patience: &mut Duration,
    ) -> Result<Arc<Endpoint>, CallError> {
        let shared = &*self.shared;
        if let Some(endpoint) = shared.picker.pick(&shared.binding.borrow(), &tries.on) {
            return Ok(endpoint);
        }
        let started = Instant::now();
        let limit = deadline.at().min(started + *patience);
        if !shared.starving.swap(true, Ordering::AcqRel) {
            let _ = shared.reports.send(Report::Starved);
        }
        let mut binding = shared.binding.clone();
        loop {
            if let Some(endpoint) = shared.picker.pick(&binding.borrow_and_update(), &tries.on) {
                *patience = patience.saturating_sub(started.elapsed());
                return Ok(endpoint);
            }
            let error = match timeout_at(limit, binding.changed()).await {
                Ok(Ok(())) => continue,
                Ok(Err(_)) => CallError::new(CallErrorKind::Closed, None, tries.made),
                Err(_) => {
                    let reason = shared.status.borrow().reason();
                    let reason = reason.unwrap_or_else(|| "the last one was just lost".to_owned());
                    if limit >= deadline.at() {
                        CallError::new(CallErrorKind::DeadlineExceeded, None, tries.made).because(&reason)
                    } else {
                        CallError::new(CallErrorKind::NothingUsable { reason }, None, tries.made)
                    }
                }
            };
            return Err(error.after(tries));
        }
    }

    /// Looks at an answer: false when the call is to be sent again.
    fn judge_answer(
        &self,
        answer: &Answer,
        endpoint: &Endpoint,
        body: &mut ReplayBody,
        tries: &mut Tries,
    ) -> bool {
        // Without a status yet the response has begun, and ends in its trailers.
        let Some(status) = answer.status() else {
            endpoint.link().heard_now();
            return true;
        };
        let code = status.code();
        if outcome::counts_against(code) {
            endpoint.link().failed(self.failures_to_eject());
        } else {
            endpoint.link().succeeded();
        }
        if code == Code::Ok {
            return true;
        }
        let resend = outcome::worth_resending(code)
            && self.shared.retry.may_resend(Proof::MayHaveRun, self.safe, body.reclaim(), tries);
        self.failed(Some(endpoint.instance()), tries.made, &status, resend);
        !resend
    }

    /// Judges an attempt that got no answer: the error for the caller, or
    /// `None` when the call is to be sent again.
    fn judge_failure(
        &self,
        failure: Failure,
        endpoint: &Endpoint,
        body: &mut ReplayBody,
        tries: &mut Tries,
    ) -> Option<CallError> {
        let Failure { verdict, cut, error } = failure;
        match verdict.lost {
            Some(cause) => endpoint.link().lose(cause),
            None if verdict.timed_out => {}
            None => endpoint.link().failed(self.failures_to_eject()),
        }
        let resend = !verdict.timed_out
            && self.shared.retry.may_resend(verdict.proof, self.safe, body.reclaim(), tries);
        let kind = match verdict.proof {
            _ if verdict.timed_out => CallErrorKind::DeadlineExceeded,
            _ if cut => CallErrorKind::ResponseCut,
            Proof::NeverSent => CallErrorKind::NeverSent,
            Proof::Refused => CallErrorKind::Refused,
            Proof::MayHaveRun if verdict.lost.is_none() => CallErrorKind::StreamReset,
            Proof::MayHaveRun => CallErrorKind::ConnectionLost,
        };
        let instance = Some(endpoint.instance().clone());
        self.resend_or(resend, CallError::new(kind, instance, tries.made).after(tries).caused_by(error))
    }

    /// Tells the hook, and gives the error back unless the call is sent again.
    fn resend_or(&self, resend: bool, error: CallError) -> Option<CallError> {
        self.failed(error.instance(), error.attempts(), error.status(), resend);
        (!resend).then_some(error)
    }
}

/// Runs one call. Dropping the future cancels it, here and on the server.
pub(crate) async fn run(
    shared: Arc<CallShared>,
    request: Request<Body>,
) -> Result<Response<Body>, CallError> {
    let (head, body) = request.into_parts();
    let deadline = Deadline::of(&head.headers, shared.options.default_timeout, Instant::now());
    shared.retry.begin();
    let limit = shared.options.replay_limit;
    let mut body = Some(body);
    let mut body = poll_fn(|cx| {
        let body = body.take().expect("polled once: it is ready at once");
        Poll::Ready(ReplayBody::capture(body, limit, cx))
    })
    .await;
    let context = Arc::new(CallContext::new(shared, head.uri.clone()));

    let mut tries = Tries::default();
    // For all waits of the call together, and not for what it waits for answers.
    let mut patience = context.shared.options.fail_fast_after;
    loop {
        let endpoint = match context.pick(&tries, &deadline, &mut patience).await {
            Ok(endpoint) => endpoint,
            Err(error) => return Err(context.give_up(error)),
        };
        if tries.made > 0 && Instant::now() >= deadline.at() {
            let error = CallError::new(CallErrorKind::DeadlineExceeded, None, tries.made).after(&tries);
            return Err(context.give_up(error));
        }
        tries.made += 1;
        tries.on.push(endpoint.serial());
        let attempt_body = body.attempt().expect("a body that is gone is not resent");
        let late = tries.made > 1 || patience < context.shared.options.fail_fast_after;
        let request = assemble(&head, attempt_body, tries.counted, late.then_some(&deadline));
        let suspect_after = context.shared.options.suspect_after;
        let given_up = if context.safe { endpoint.link().left() } else { endpoint.link().abandoned() };
        let ended =
            attempt(&endpoint, request, context.whole(), suspect_after, given_up, deadline.at()).await;
        let error = match ended {
            Ended::Answered(answer) => {
                if context.judge_answer(&answer, &endpoint, &mut body, &mut tries) {
                    let until = deadline.of_body(context.unary);
                    return Ok(hand_over(answer, context, endpoint, tries.made, until));
                }
                None
            }
            Ended::Failed(failure) => context.judge_failure(failure, &endpoint, &mut body, &mut tries),
            Ended::Abandoned => {
                let retry = &context.shared.retry;
                let resend = retry.may_resend(Proof::MayHaveRun, context.safe, body.reclaim(), &mut tries);
                let instance = Some(endpoint.instance().clone());
                context.resend_or(resend, CallError::new(CallErrorKind::Unresponsive, instance, tries.made))
            }
            Ended::DeadlinePassed => {
                let instance = Some(endpoint.instance().clone());
                Some(context.give_up(CallError::new(CallErrorKind::DeadlineExceeded, instance, tries.made)))
            }
        };
        if let Some(error) = error {
            return Err(error);
        }
        pause(&context.shared.retry, &tries, deadline.at()).await;
    }
}

/// Waits before the next attempt. A deadline that ends the wait is found by the attempt.
async fn pause(retry: &Retry, tries: &Tries, deadline: Instant) {
    let pause = retry.pause(tries);
    if !pause.is_zero() {
        sleep_until(deadline.min(Instant::now() + pause)).await;
    }
}

/// `previous` attempts may have run; `deadline` where some of the time has passed.
fn assemble(head: &request::Parts, body: Body, previous: u32, deadline: Option<&Deadline>) -> Request<Body> {
    let mut request = Request::new(body);
    *request.method_mut() = head.method.clone();
    *request.uri_mut() = head.uri.clone();
    *request.version_mut() = head.version;
    *request.headers_mut() = head.headers.clone();
    *request.extensions_mut() = head.extensions.clone();
    if let Some(deadline) = deadline {
        deadline.lower(request.headers_mut(), Instant::now());
    }
    if previous > 0 {
        request.headers_mut().insert(PREVIOUS_ATTEMPTS, HeaderValue::from(previous));
    }
    request
}

fn hand_over(
    answer: Answer,
    context: Arc<CallContext>,
    endpoint: Arc<Endpoint>,
    attempts: u32,
    deadline: Option<Instant>,
) -> Response<Body> {
    let served = Served { instance: endpoint.instance().clone(), attempts };
    let mut response = match answer {
        Answer::Whole(response) => response.map(Body::new),
        Answer::Begun(response) => {
            let has_status = outcome::status_in_headers(&response).is_some();
            response.map(|body| {
                Body::new(WatchedBody::new(body, has_status, context, endpoint, attempts, deadline))
            })
        }
    };
    response.extensions_mut().insert(served);
    response
}

/// What a call's future is: boxed once a call.
pub(crate) type CallFuture =
    std::pin::Pin<Box<dyn Future<Output = Result<Response<Body>, CallError>> + Send>>;
