//! One call, from the generated client to its response's headers.
//!
//! ```text
//! capture the body -> pick an endpoint -> attempt -> judge -+-> hand over
//!                          ^                                |
//!                          +------ pause <- may be resent --+
//! ```

use std::{
    future::{Future, poll_fn},
    pin::pin,
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
use tonic::{Code, Status, body::Body, transport};
use tower::Service;

use super::{
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

/// After so long a wait a call starts to listen for its instance being given
/// up. Nearly all calls are over by then and are spared the registration.
const LISTEN_AFTER: Duration = Duration::from_millis(50);

/// The longest time between two suspicions of one long call.
const LONGEST_PATIENCE: Duration = Duration::from_secs(5);

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
}

/// How one attempt ended.
enum Ended {
    Response(Response<Body>),
    Failed(transport::Error),
    /// The instance was given up while the call waited for it.
    Abandoned,
    DeadlinePassed,
}

impl CallContext {
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

    /// A usable endpoint; waits for one up to `limit`.
    async fn pick(
        &self,
        tries: &Tries,
        deadline: &Deadline,
        limit: &mut Option<Instant>,
    ) -> Result<Arc<Endpoint>, CallError> {
        let shared = &*self.shared;
        if let Some(endpoint) = shared.picker.pick(&shared.binding.borrow(), &tries.on) {
            return Ok(endpoint);
        }
        // All waits of one call together are bounded.
        let limit =
            *limit.get_or_insert_with(|| deadline.at().min(Instant::now() + shared.options.fail_fast_after));
        if !shared.starving.swap(true, Ordering::AcqRel) {
            let _ = shared.reports.send(Report::Starved);
        }
        let mut binding = shared.binding.clone();
        loop {
            if let Some(endpoint) = shared.picker.pick(&binding.borrow_and_update(), &tries.on) {
                return Ok(endpoint);
            }
            let kind = match timeout_at(limit, binding.changed()).await {
                Ok(Ok(())) => continue,
                Ok(Err(_)) => CallErrorKind::Closed,
                Err(_) if limit >= deadline.at() => CallErrorKind::DeadlineExceeded,
                Err(_) => {
                    let reason = shared
                        .status
                        .borrow()
                        .reason()
                        .unwrap_or_else(|| "the last one was just lost".to_owned());
                    CallErrorKind::NothingUsable { reason }
                }
            };
            return Err(CallError::new(kind, None, tries.made).after(tries));
        }
    }

    /// Sends one attempt and waits for its response's headers.
    async fn attempt(&self, endpoint: &Arc<Endpoint>, request: Request<Body>, deadline: Instant) -> Ended {
        let link = endpoint.link();
        // A clone, polled and called: a channel that was not polled itself panics.
        let mut channel = endpoint.channel().clone();
        let mut send = pin!(async move {
            poll_fn(|cx| channel.poll_ready(cx)).await?;
            channel.call(request).await
        });
        let started = Instant::now();
        let mut patience = self.shared.options.suspect_after;
        let mut window = started;
        let mut listening = false;
        let mut timer = pin!(sleep_until(deadline.min(started + LISTEN_AFTER.min(patience))));
        loop {
            tokio::select! {
                biased;
                result = &mut send => {
                    return match result {
                        Ok(response) => Ended::Response(response),
                        Err(error) => Ended::Failed(error),
                    };
                }
                () = link.abandoned().cancelled(), if listening => return Ended::Abandoned,
                () = &mut timer => {
                    let now = Instant::now();
                    if now >= deadline {
                        return Ended::DeadlinePassed;
                    }
                    listening = true;
                    if now >= window + patience {
                        if !link.heard_since(window) {
                            endpoint.suspect();
                            patience = (patience * 2).min(LONGEST_PATIENCE);
                        }
                        window = now;
                    }
                    timer.as_mut().reset(deadline.min(window + patience));
                }
            }
        }
    }

    /// Looks at a response's headers: `Err` when the call is to be sent again.
    fn judge_response(
        &self,
        response: &Response<Body>,
        endpoint: &Endpoint,
        safe: bool,
        replayable: bool,
        tries: &mut Tries,
    ) -> Result<(), ()> {
        // Without a status here the response has begun, and ends in its trailers.
        let Some(status) = outcome::status_in_headers(response) else {
            endpoint.link().heard_now();
            return Ok(());
        };
        let code = status.code();
        if outcome::counts_against(code) {
            endpoint.link().failed(self.failures_to_eject());
        } else {
            endpoint.link().succeeded();
        }
        if code == Code::Ok {
            return Ok(());
        }
        let resend = outcome::worth_resending(code)
            && self.shared.retry.may_resend(Proof::MayHaveRun, safe, replayable, tries);
        self.failed(Some(endpoint.instance()), tries.made, &status, resend);
        if resend { Err(()) } else { Ok(()) }
    }

    /// Judges an attempt that got no response: the error for the caller, or
    /// `None` when the call is to be sent again.
    fn judge_failure(
        &self,
        error: transport::Error,
        endpoint: &Endpoint,
        safe: bool,
        replayable: bool,
        tries: &mut Tries,
    ) -> Option<CallError> {
        let verdict = outcome::judge(&error);
        match verdict.lost {
            Some(cause) => endpoint.link().lose(cause),
            None if verdict.timed_out => {}
            None => endpoint.link().failed(self.failures_to_eject()),
        }
        let resend =
            !verdict.timed_out && self.shared.retry.may_resend(verdict.proof, safe, replayable, tries);
        let kind = match verdict.proof {
            _ if verdict.timed_out => CallErrorKind::DeadlineExceeded,
            Proof::NeverSent => CallErrorKind::NeverSent,
            Proof::Refused => CallErrorKind::Refused,
            Proof::MayHaveRun if verdict.lost.is_none() => CallErrorKind::StreamReset,
            Proof::MayHaveRun => CallErrorKind::ConnectionLost,
        };
        self.resend_or(
            resend,
            CallError::new(kind, Some(endpoint.instance().clone()), tries.made)
                .after(tries)
                .caused_by(Arc::new(error)),
        )
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
    let body = poll_fn(|cx| {
        let body = body.take().expect("polled once: it is ready at once");
        Poll::Ready(ReplayBody::capture(body, limit, cx))
    })
    .await;
    let safe = shared.methods.is_safe(head.uri.path());
    let unary = shared.methods.has_unary_response(head.uri.path());
    let context = Arc::new(CallContext { shared, uri: head.uri.clone() });

    let mut tries = Tries::default();
    let mut wait_limit = None;
    loop {
        let endpoint = match context.pick(&tries, &deadline, &mut wait_limit).await {
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
        let request = assemble(&head, attempt_body, &tries, &deadline);
        let ended = context.attempt(&endpoint, request, deadline.at()).await;
        let replayable = body.is_replayable();
        let error = match ended {
            Ended::Response(response) => {
                match context.judge_response(&response, &endpoint, safe, replayable, &mut tries) {
                    Ok(()) => {
                        return Ok(hand_over(
                            response,
                            context,
                            endpoint,
                            tries.made,
                            deadline.of_body(unary),
                        ));
                    }
                    Err(()) => None,
                }
            }
            Ended::Failed(error) => context.judge_failure(error, &endpoint, safe, replayable, &mut tries),
            Ended::Abandoned => {
                let resend = context.shared.retry.may_resend(Proof::MayHaveRun, safe, replayable, &mut tries);
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

fn assemble(head: &request::Parts, body: Body, tries: &Tries, deadline: &Deadline) -> Request<Body> {
    let mut request = Request::new(body);
    *request.method_mut() = head.method.clone();
    *request.uri_mut() = head.uri.clone();
    *request.version_mut() = head.version;
    *request.headers_mut() = head.headers.clone();
    *request.extensions_mut() = head.extensions.clone();
    if tries.made > 1 {
        deadline.lower(request.headers_mut(), Instant::now());
    }
    if tries.counted > 0 {
        request.headers_mut().insert(PREVIOUS_ATTEMPTS, HeaderValue::from(tries.counted));
    }
    request
}

fn hand_over(
    response: Response<Body>,
    context: Arc<CallContext>,
    endpoint: Arc<Endpoint>,
    attempts: u32,
    deadline: Option<Instant>,
) -> Response<Body> {
    let served = Served { instance: endpoint.instance().clone(), attempts };
    let mut response =
        response.map(|body| Body::new(WatchedBody::new(body, context, endpoint, attempts, deadline)));
    response.extensions_mut().insert(served);
    response
}

/// What a call's future is: boxed once a call.
pub(crate) type CallFuture =
    std::pin::Pin<Box<dyn Future<Output = Result<Response<Body>, CallError>> + Send>>;
