//! What each stage of a call costs, for the bench: every one is run by itself,
//! many times, on the very code that calls run.

use std::{
    hint::black_box,
    sync::Arc,
    task::{Context, Waker},
    time::Duration,
};

use bytes::Bytes;
use futures_util::FutureExt;
use http::{HeaderMap, HeaderValue, Request, Response};
use http_body::Frame;
use http_body_util::StreamBody;
use tokio::{
    sync::{mpsc, watch},
    time::{Instant, sleep},
};
use tonic::{Status, body::Body, transport};

use super::{
    admission::Admission,
    balance::Picker,
    binding::Binding,
    deadline::Deadline,
    endpoint::{Endpoint, Link},
    frames::{Frames, Kept},
    head::Head,
    methods::Methods,
    options::{Policy, ServiceOptions},
    policy::{MethodOptions, Rules},
    replay::ReplayBody,
};
use crate::Instance;

/// How often a stage is run for one value, and how many values there are: the least counts.
const TIMES: u32 = 5000;
const VALUES: usize = 25;
const PATH: &str = "/counter.v1.Counter/Get";

/// Each stage and its cost in ns. To be called on a runtime.
#[doc(hidden)]
pub async fn stages() -> Vec<(&'static str, f64)> {
    let mut all = Vec::new();
    let options = ServiceOptions::new("counter");
    let budget = options.budget();
    let mut methods = Methods::new(Rules::new(&MethodOptions::new(), 5));
    methods.declare_safe(PATH);
    let (reports, _kept) = mpsc::unbounded_channel();
    let channel = transport::Endpoint::from_static("http://127.0.0.1:1").connect_lazy();
    let instance = Arc::new(Instance::new("i", "127.0.0.1", 1, "dc1"));
    let endpoint = Arc::new(Endpoint::new(instance.clone(), channel, Link::new(1, reports)));
    let (_sender, binding) = watch::channel(Binding::new(1, vec![endpoint.clone()]));
    let picker = Picker::new(Policy::PickFirst, 0);
    let cx = &mut Context::from_waker(Waker::noop());

    let head = request().into_parts().0;
    all.push(("clock, one reading", least(Instant::now)));
    all.push(("deadline", least(|| Deadline::of(None, options.default_timeout, Instant::now()))));
    all.push(("retry budget", least(|| budget.begun())));
    all.push(("method, what is known of it", least(|| methods.get(PATH))));
    let made = least(request);
    all.push((
        "capture of the body",
        least(|| ReplayBody::capture(request().into_body(), 65536, false, cx)) - made,
    ));
    let admission = Admission::new(&options.traffic);
    all.push(("a place among the calls", least(|| admission.begin().map(|()| admission.end()).is_ok())));
    all.push(("pick", least(|| picker.pick(&binding.borrow(), &[]))));
    let whole = ReplayBody::capture(request().into_body(), 65536, false, cx).expect("a body without errors");
    all.push(("body of an attempt", least(|| whole.attempt())));
    all.push(("head of an attempt", least(|| Head::of(&head))));
    all.push(("timer, begun and dropped", least(|| sleep(Duration::from_millis(50)).now_or_never())));
    all.push(("word of the instance", least(|| endpoint.link().succeeded())));
    all.push(("answer, boxed", least(|| Body::new(Frames::ending(Kept::default(), Some(HeaderMap::new()))))));
    let plain = least(|| Response::new(()));
    let told = least(|| {
        let mut response = Response::new(());
        response.extensions_mut().insert(super::Served { instance: instance.clone(), attempts: 1 });
        response
    });
    all.push(("who served, said in the response", told - plain));
    all
}

/// A unary request as tonic's generated clients make it, or nearly so.
fn request() -> Request<Body> {
    let frame = Ok::<_, Status>(Frame::data(Bytes::from_static(b"sixteen bytes it")));
    let mut request = Request::new(Body::new(StreamBody::new(tokio_stream::once(frame))));
    request.headers_mut().insert("te", HeaderValue::from_static("trailers"));
    request.headers_mut().insert("content-type", HeaderValue::from_static("application/grpc"));
    *request.uri_mut() = http::Uri::from_static(PATH);
    request
}

/// The least mean time of one run, in ns.
fn least<T>(mut stage: impl FnMut() -> T) -> f64 {
    let value = |_| {
        let begun = Instant::now();
        for _ in 0..TIMES {
            black_box(stage());
        }
        begun.elapsed().as_nanos() as f64 / f64::from(TIMES)
    };
    (0..VALUES).map(value).fold(f64::INFINITY, f64::min)
}
