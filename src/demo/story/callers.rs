//! The story's client: all that it does with the library is in this file.

use std::time::Duration;

use futures_util::StreamExt;
use serde_json::json;
use tokio::{
    task::{JoinHandle, JoinSet},
    time::Instant,
};
use tokio_util::sync::CancellationToken;

use super::{board::Board, narrator::Narrator, words};
use crate::{
    client::{ConsulService, FailoverEvent, Fallback, GrpcClient, ServiceOptions},
    consul::ConsulConfig,
    demo::{
        calls::{self, Client, Method},
        cli::Failure,
        pb,
        screen::Tone,
        text::ms,
    },
};

/// Calls a second, the three methods in turn.
pub(crate) const RATE: f64 = 60.0;
/// The deadline of every call.
pub(crate) const DEADLINE: Duration = Duration::from_secs(2);
/// So many failed calls of a method and an act are told one by one; its sums have them all.
pub(crate) const TOLD: u64 = 3;
/// A server of the own datacenter must be usable for so long before calls
/// return to it. Short, so that the story is.
const FAILBACK: Duration = Duration::from_secs(1);

/// The client and its calls; dropping it ends both at once.
pub(crate) struct Callers {
    consul: ConsulService,
    counter: GrpcClient,
    stop: CancellationToken,
    pace: JoinHandle<()>,
    /// Aborts its task when dropped.
    events: JoinSet<()>,
}

impl Callers {
    /// Makes a client of the agent at `url` and starts calling at once: calls wait
    /// for the first server.
    pub(crate) fn start(url: &str, board: &Board, narrator: &Narrator) -> Result<Self, Failure> {
        let consul = ConsulService::builder(ConsulConfig::new(url)?)
            .name("dc1")
            .service(ServiceOptions::new("counter").descriptors(pb::FILE_DESCRIPTOR_SET))
            .fallback(Fallback::nearest())
            .failback_after(FAILBACK)
            .build()?;
        let counter = consul.grpc_client("counter")?;

        let mut happening = counter.events();
        let mut events = JoinSet::new();
        let (teller, books) = (narrator.clone(), board.clone());
        events.spawn(async move {
            while let Some(event) = happening.next().await {
                let told = words::tell(&event);
                teller.say(told.tone, told.kind, &told.text, told.more);
                note(&books, &event);
            }
        });

        let stop = CancellationToken::new();
        let client = Client::new(counter.channel());
        let (board, narrator) = (board.clone(), narrator.clone());
        let pace = calls::pace(RATE, stop.clone(), DEADLINE * 2, move |number| {
            let (client, board, narrator) = (client.clone(), board.clone(), narrator.clone());
            let method = Method::ALL[(number % 3) as usize];
            async move {
                let id = number.to_string();
                let call = board.write(|tally| tally.begin(method, id.clone(), Instant::now()));
                let result = calls::call(client, method, id, DEADLINE).await;
                ended(&board, &narrator, call, result);
            }
        });
        Ok(Self { consul, counter, stop, pace: tokio::spawn(pace), events })
    }

    /// How many servers of the own datacenter have a ready connection.
    pub(crate) fn usable(&self) -> usize {
        self.counter.status().datacenters.first().map_or(0, |own| own.ready)
    }

    /// Stops calling, waits for the calls under way, and ends the client.
    pub(crate) async fn end(mut self) {
        self.stop.cancel();
        // It ends by itself: every call has its deadline.
        let _ = (&mut self.pace).await;
        self.consul.shutdown().await;
        self.events.shutdown().await;
    }
}

impl Drop for Callers {
    fn drop(&mut self) {
        self.pace.abort();
    }
}

fn note(board: &Board, event: &FailoverEvent) {
    if let FailoverEvent::Rebound { to, took, .. } = event {
        board.write(|tally| tally.rebound(to.to_string(), *took, Instant::now()));
    }
}

fn ended(board: &Board, narrator: &Narrator, call: usize, result: Result<calls::Answer, calls::Failed>) {
    let now = Instant::now();
    let failure = result.as_ref().err().cloned();
    let (call, failures) = board.write(|tally| {
        let call = tally.end(call, now, result).map(|call| (call.method, call.id.clone(), now - call.began));
        let failures = call.as_ref().map_or(0, |(method, ..)| tally.failed_now(*method));
        (call, failures)
    });
    let (Some(failed), Some((method, id, took))) = (failure, call) else { return };
    let text = words::failure(method, &id, took, &failed);
    let more = json!({
        "method": method.name(), "id": id, "took_ms": ms(took),
        "code": format!("{:?}", failed.code), "message": failed.message,
        "instance": failed.instance, "may_have_run": failed.may_have_run,
    });
    if failures > TOLD {
        return narrator.object("failed", &text, more);
    }
    let tone = if method == Method::Increment { Tone::Notice } else { Tone::Bad };
    narrator.say(tone, "failed", &text, more);
}
