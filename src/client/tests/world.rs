//! In place of the network and the instances: HTTP/2 servers at the ends of pipes in memory,
//! which keep a journal of the calls that reach them.

use std::{
    collections::BTreeMap,
    future::{Future, pending},
    io,
    pin::{Pin, pin},
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use futures_util::stream::{FuturesUnordered, StreamExt};
use http::{HeaderMap, HeaderValue, Request, Response, Uri};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use tokio::{
    io::{DuplexStream, duplex},
    sync::watch,
    task::JoinSet,
    time::{Instant, sleep},
};

use crate::{Instance, InstanceId};

pub(super) const SITES: usize = 4;

/// What a pipe holds.
const PIPE: usize = 64 * 1024;

/// From here to there.
const WAY: Duration = Duration::from_millis(1);

/// How long a slow one takes.
const SLOW: Duration = Duration::from_millis(200);

/// The number of a call, in its headers.
pub(super) const ID: &str = "x-id";

/// What an instance says with UNAVAILABLE.
pub(super) const BUSY: &str = "busy";

/// A message without fields: good for every answer.
const NOTHING: Bytes = Bytes::from_static(&[0; 5]);

/// How an instance takes calls. Probes are answered by all but those that are frozen or down.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mood {
    Up,
    /// Answers well, after a while.
    Slow,
    /// Runs them and says UNAVAILABLE.
    Bad,
    /// Refuses them unprocessed.
    Refuses,
    /// Runs them and breaks the answer off.
    BreaksOff,
    /// Runs them and never answers.
    Stuck,
    /// Keeps its connections and does nothing, until it goes on.
    Frozen,
    /// Dies of the next one, before it runs.
    DiesBefore,
    /// Dies of the next one, after it has run.
    DiesAfter,
    /// Dies of the next one, in the middle of the answer.
    DiesAmid,
    Down,
}

/// What became of a call at one instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    Ran,
    /// It ran, and is never answered.
    Stuck,
    /// Refused unprocessed.
    Refused,
    /// Its instance died before it ran.
    Died,
}

/// What the instances know of one call.
#[derive(Clone, Debug, Default)]
pub(super) struct Record {
    /// In the order of arrival, with the instance.
    pub(super) fates: Vec<(usize, Fate)>,
    /// The most attempts before one that arrived, by its own word.
    pub(super) resent: u32,
}

/// What an instance's connections are told.
#[derive(Clone, Copy)]
struct Told {
    mood: Mood,
    /// How often all connections were closed, and were told to go away.
    cuts: u32,
    leaves: u32,
}

struct Site {
    told: watch::Sender<Told>,
    /// When it last was otherwise than answering well.
    disturbed: Mutex<Instant>,
}

#[derive(Clone)]
pub(super) struct World {
    sites: Arc<[Site; SITES]>,
    journal: Arc<Mutex<BTreeMap<u64, Record>>>,
    connections: Arc<Mutex<JoinSet<()>>>,
}

pub(super) fn instance(site: usize) -> Instance {
    Instance::new(format!("i{site}"), "127.0.0.1", u16::try_from(site).unwrap() + 1, "dc1")
}

pub(super) fn site_of(id: &InstanceId) -> usize {
    (0..SITES).find(|&site| instance(site).id == *id).expect("one of ours")
}

// === impl Record ===

impl Record {
    /// How often it ran.
    pub(super) fn ran(&self) -> usize {
        self.fates.iter().filter(|(_, fate)| matches!(fate, Fate::Ran | Fate::Stuck)).count()
    }
}

// === impl World ===

impl World {
    pub(super) fn new() -> Self {
        let site = |_| Site {
            told: watch::Sender::new(Told { mood: Mood::Up, cuts: 0, leaves: 0 }),
            disturbed: Mutex::new(Instant::now()),
        };
        Self {
            sites: Arc::new(std::array::from_fn(site)),
            journal: Arc::default(),
            connections: Arc::default(),
        }
    }

    pub(super) fn mood(&self, site: usize) -> Mood {
        self.sites[site].told.borrow().mood
    }

    pub(super) fn becomes(&self, site: usize, mood: Mood) {
        self.disturb(site, |told| told.mood = mood);
    }

    /// All its connections are closed.
    pub(super) fn cut(&self, site: usize) {
        self.disturb(site, |told| told.cuts += 1);
    }

    /// It takes no more calls on the connections that it has (GOAWAY).
    pub(super) fn goes_away(&self, site: usize) {
        self.disturb(site, |told| told.leaves += 1);
    }

    fn disturb(&self, site: usize, how: impl FnOnce(&mut Told)) {
        *self.sites[site].disturbed.lock() = Instant::now();
        self.sites[site].told.send_modify(how);
    }

    /// Since when it has been answering well, undisturbed.
    pub(super) fn good_since(&self, site: usize) -> Option<Instant> {
        (self.mood(site) == Mood::Up).then(|| *self.sites[site].disturbed.lock())
    }

    pub(super) fn record(&self, id: u64) -> Record {
        self.journal.lock().get(&id).cloned().unwrap_or_default()
    }

    /// How many attempts were resent within the budget, as far as they arrived: by the client's own word,
    /// or, where that is more, by what has run again.
    pub(super) fn resent(&self) -> u32 {
        let again = |record: &Record| u32::try_from(record.ran().saturating_sub(1)).unwrap();
        self.journal.lock().values().map(|record| record.resent.max(again(record))).sum()
    }

    /// One connection as its instance serves it: while that lives, and not while it is frozen.
    async fn serve(self, site: usize, pipe: DuplexStream) {
        let mut told = self.sites[site].told.subscribe();
        let first = *told.borrow();
        let mut serving = pin!(self.clone().answer(site, pipe));
        loop {
            let now = *told.borrow_and_update();
            if now.mood == Mood::Down || now.cuts != first.cuts {
                return;
            }
            tokio::select! {
                biased;
                _ = told.changed() => {}
                () = &mut serving, if now.mood != Mood::Frozen => return,
            }
        }
    }

    async fn answer(self, site: usize, pipe: DuplexStream) {
        let mut told = self.sites[site].told.subscribe();
        let leaves = told.borrow().leaves;
        let Ok(mut connection) = h2::server::handshake(pipe).await else { return };
        let mut calls = FuturesUnordered::new();
        let mut going = false;
        loop {
            if !going && told.borrow_and_update().leaves != leaves {
                going = true;
                connection.graceful_shutdown();
            }
            tokio::select! {
                biased;
                _ = told.changed() => {}
                Some(()) = calls.next(), if !calls.is_empty() => {}
                call = connection.accept() => match call {
                    Some(Ok((request, respond))) => calls.push(self.clone().take(site, request, respond)),
                    Some(Err(_)) | None => return,
                }
            }
        }
    }

    /// One call, or a probe. Who cares no more for the answer does not get it.
    async fn take(
        self,
        site: usize,
        request: Request<h2::RecvStream>,
        mut respond: h2::server::SendResponse<Bytes>,
    ) {
        let (head, mut body) = request.into_parts();
        let number = |name: &str| head.headers.get(name).and_then(|it| it.to_str().ok()?.parse::<u64>().ok());
        let id = number(ID);
        let mood = if id.is_some() { self.mood(site) } else { Mood::Up };
        if let Some(id) = id {
            let resent = number("grpc-previous-rpc-attempts").map_or(0, |it| u32::try_from(it).unwrap());
            let mut journal = self.journal.lock();
            let record = journal.entry(id).or_default();
            record.resent = record.resent.max(resent);
            // Written down as soon as it is here, as the worst that may be.
            record.fates.push((
                site,
                match mood {
                    Mood::Refuses => Fate::Refused,
                    Mood::DiesBefore => Fate::Died,
                    Mood::Stuck => Fate::Stuck,
                    _ => Fate::Ran,
                },
            ));
        }
        match mood {
            Mood::Refuses => return respond.send_reset(h2::Reason::REFUSED_STREAM),
            Mood::DiesBefore | Mood::DiesAfter => return self.becomes(site, Mood::Down),
            Mood::Stuck => return pending().await,
            Mood::Slow => sleep(SLOW).await,
            _ => {}
        }
        while let Some(Ok(_)) = body.data().await {}
        let mut response = Response::new(());
        response.headers_mut().insert("content-type", HeaderValue::from_static("application/grpc"));
        if mood == Mood::Bad {
            response.headers_mut().insert("grpc-status", HeaderValue::from_static("14"));
            response.headers_mut().insert("grpc-message", HeaderValue::from_static(BUSY));
            let _ = respond.send_response(response, true);
            return;
        }
        let Ok(mut stream) = respond.send_response(response, false) else { return };
        let _ = stream.send_data(NOTHING, false);
        if !matches!(mood, Mood::BreaksOff | Mood::DiesAmid) {
            let ends = [("grpc-status".parse().unwrap(), HeaderValue::from_static("0"))];
            let _ = stream.send_trailers(HeaderMap::from_iter(ends));
            return;
        }
        // So that it is on its way.
        sleep(WAY).await;
        if mood == Mood::DiesAmid {
            return self.becomes(site, Mood::Down);
        }
        stream.send_reset(h2::Reason::NO_ERROR);
    }
}

impl tower::Service<Uri> for World {
    type Response = TokioIo<DuplexStream>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<Self::Response>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let world = self.clone();
        let port = uri.port_u16().expect("instances have ports");
        let site = usize::from(port) - 1;
        Box::pin(async move {
            sleep(WAY).await;
            if world.mood(site) == Mood::Down {
                return Err(io::ErrorKind::ConnectionRefused.into());
            }
            let (here, there) = duplex(PIPE);
            let mut connections = world.connections.lock();
            while connections.try_join_next().is_some() {}
            connections.spawn(world.clone().serve(site, there));
            drop(connections);
            Ok(TokioIo::new(here))
        })
    }
}
