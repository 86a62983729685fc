//! What happens to the primary, act by act. Every step waits for what it should lead to.

use std::time::Duration;

use rustix::process::Signal;
use serde_json::json;
use tokio::time::{Instant, sleep};
use tonic::Request;

use super::{
    callers::Callers,
    duo::{Duo, NAMES},
    store::Store,
};
use crate::demo::{
    cli::Failure,
    pb::{HandOverRequest, operator_client::OperatorClient},
    screen::Tone,
    story::narrator::Narrator,
    text::{duration, ms},
};

/// How long anything may take that should come within three seconds; the story fails behind it.
const BOUND: Duration = Duration::from_secs(30);
/// After each takeover the callers go on until so many more are acknowledged.
const CALM: usize = 100;
/// How long the primary stands still.
const PAUSE: Duration = Duration::from_secs(5);

pub(super) struct Play<'a> {
    pub(super) duo: &'a mut Duo,
    pub(super) callers: &'a mut Callers,
    pub(super) narrator: &'a Narrator,
    /// How many acts there have been.
    pub(super) act: usize,
}

/// The primary when something happens to it.
struct Struck {
    name: &'static str,
    token: u64,
    at: Instant,
}

impl Play<'_> {
    /// Plays all acts, and says what was counted in the end.
    pub(super) async fn run(mut self) -> Result<u64, Failure> {
        self.open("start", "the first to start is primary, the other its standby");
        let began = Instant::now();
        for name in NAMES {
            let pid = self.duo.start(name).await?;
            self.say(Tone::Quiet, "started", &format!("{name} is started (process {pid})"));
        }
        self.taken_over(&Struck { name: "", token: 0, at: began }, "the start").await?;

        self.open("kill", "it dies without a word; the lease runs out");
        let struck = self.strike("killed", "SIGKILL to")?;
        self.duo.kill(struck.name).await?;
        self.taken_over(&struck, "the kill").await?;
        self.duo.start(struck.name).await?;

        self.open("stop", "it is asked to end, as at every deployment; the lease is given up at once");
        let struck = self.strike("terminated", "SIGTERM to")?;
        self.duo.terminate(struck.name).await?;
        self.taken_over(&struck, "SIGTERM").await?;
        self.duo.start(struck.name).await?;

        self.open("pause", "it stands still for 5 s, and does not know it when it wakes");
        let struck = self.strike("paused", "SIGSTOP to")?;
        self.duo.signal(struck.name, Signal::STOP)?;
        self.taken_over(&struck, "SIGSTOP").await?;
        sleep(PAUSE.saturating_sub(struck.at.elapsed())).await;
        self.duo.signal(struck.name, Signal::CONT)?;
        self.stepped_down(&struck).await?;

        self.consul().await?;
        self.cut_off().await?;

        self.open("hang", "its process lives, but it takes no connections any more");
        let struck = self.strike("blocked", "no more connections for")?;
        self.duo.signal(struck.name, Signal::USR1)?;
        self.taken_over(&struck, "that").await?;
        self.stepped_down(&struck).await?;
        self.duo.signal(struck.name, Signal::USR2)?;

        self.open("hand over", "planned: calls in flight end, the other takes over at once");
        let struck = self.strike("handing_over", "demo hand-over for")?;
        let to = self.duo.other(struck.name).to_owned();
        let at = format!("http://127.0.0.1:{}", self.duo.port(struck.name));
        let mut request = Request::new(HandOverRequest { to });
        request.set_timeout(BOUND);
        OperatorClient::connect(at).await?.hand_over(request).await?;
        self.taken_over(&struck, "the command").await?;

        self.callers.counted(BOUND).await
    }

    /// Consul dies and comes back with its data: nobody can renew meanwhile.
    async fn consul(&mut self) -> Result<(), Failure> {
        let title = "restart Consul";
        match self.duo.store() {
            Store::Consul(_) => {}
            Store::Embedded(_) => {
                let text = "left out: the embedded agent forgets the lease when it ends";
                self.open(title, "it comes back with its data");
                self.say(Tone::Quiet, "skipped", text);
                return Ok(());
            }
            Store::Files(_) => return Ok(()),
        }
        self.open(title, "no lease can be renewed, so nobody counts, until it is back with its data");
        let began = Instant::now();
        let text = "SIGKILL to Consul, and a new start on its data";
        self.say(Tone::Notice, "killed", text);
        if let Store::Consul(consul) = self.duo.store_mut() {
            consul.restart().await?;
        }
        self.say(Tone::Quiet, "started", &format!("Consul is back, {} later", duration(began.elapsed())));
        // Whether the old primary goes on or another takes over is left to them.
        self.taken_over(&Struck { name: "", token: 0, at: Instant::now() }, "its return").await
    }

    async fn cut_off(&mut self) -> Result<(), Failure> {
        if self.duo.store().url().is_none() {
            return Ok(());
        }
        self.open("cut off", "the primary alone does not reach Consul; clients reach it all the same");
        let struck = self.strike("cut_off", "no way to Consul any more for")?;
        self.duo.cut(struck.name, true);
        self.taken_over(&struck, "the cut").await?;
        self.stepped_down(&struck).await?;
        self.duo.cut(struck.name, false);
        Ok(())
    }

    /// Something is about to happen to the primary.
    fn strike(&self, kind: &str, what: &str) -> Result<Struck, Failure> {
        let primary = self.callers.books(|books| books.latest().cloned()).ok_or("nobody has answered yet")?;
        let name = NAMES.into_iter().find(|name| *name == primary.instance).ok_or("a stranger answers")?;
        self.say(Tone::Notice, kind, &format!("{what} {name}, the primary of term {}", primary.token));
        Ok(Struck { name, token: primary.token, at: Instant::now() })
    }

    /// Waits for the first answer of a later term; then the callers go on for a while.
    async fn taken_over(&mut self, struck: &Struck, event: &str) -> Result<(), Failure> {
        let what = "the first answer of another primary";
        let (since, token) = (struck.at, struck.token);
        let ack = self.callers.until(what, BOUND, |books| books.first_after(since, token).cloned()).await?;
        let took = ack.ended - struck.at;
        self.callers.books(|books| books.close(&ack, took));
        let text = format!(
            "{} is primary, term {}: first answer {} after {event}",
            ack.instance,
            ack.token,
            duration(took)
        );
        let more = json!({ "primary": ack.instance, "token": ack.token, "after_ms": ms(took) });
        self.narrator.say(Tone::Good, "primary", &text, more);
        let enough = self.callers.books(|books| books.acknowledged()) + CALM;
        let what = "the callers to go on";
        self.callers.until(what, BOUND, |books| (books.acknowledged() >= enough).then_some(())).await
    }

    /// The old one has noticed.
    async fn stepped_down(&self, struck: &Struck) -> Result<(), Failure> {
        self.duo.says(struck.name, &[&format!("lost primary role, of term {}", struck.token)]).await?;
        self.say(Tone::Good, "stepped_down", &format!("{} says: lost primary role", struck.name));
        Ok(())
    }

    fn open(&mut self, title: &str, expected: &str) {
        self.act += 1;
        let title = format!("{}  {title}", self.act);
        self.callers.books(|books| books.open(&title, Instant::now()));
        self.narrator.act(&title, expected);
    }

    fn say(&self, tone: Tone, kind: &str, text: &str) {
        self.narrator.say(tone, kind, text, json!({}));
    }
}
