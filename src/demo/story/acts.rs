//! What happens, act by act. Every step waits for what it should lead to, with a
//! bound; none waits for time to pass.

use std::time::Duration;

use serde_json::json;
use tokio::time::{Instant, sleep, timeout};

use super::{
    board::Board,
    callers::{Callers, DEADLINE, TOLD},
    narrator::Narrator,
    stage::Stage,
    tally::Excuse,
};
use crate::demo::{
    calls::{Answer, Method},
    cli::Failure,
    screen::Tone,
    text::{duration, ms},
};

/// The servers and their datacenters.
pub(super) const SERVERS: [(&str, &str); 3] = [(A, "dc1"), (B, "dc1"), (C, "dc2")];
const A: &str = "counter-a";
const B: &str = "counter-b";
const C: &str = "counter-c";

/// How long anything may take that should come within a second or two. Our
/// choice: generous, for a busy machine; the story fails behind it.
const BOUND: Duration = Duration::from_secs(20);
/// After each change the client calls on until each method has been answered so
/// often by the server that took over.
const CALM: usize = 40;
/// A server is killed while its journal has an `Increment` without an answer that
/// the client sent no longer ago than this: then the next one is not on its way,
/// of which nobody could tell whether it arrived.
const JUST_SENT: Duration = Duration::from_millis(25);

pub(super) struct Play<'a> {
    pub(super) stage: &'a mut Stage,
    pub(super) board: &'a Board,
    pub(super) narrator: &'a Narrator,
}

impl Play<'_> {
    /// Plays all acts and ends the client.
    pub(super) async fn run(mut self) -> Result<(), Failure> {
        self.open("1  start", "the client knows nothing but the registry, and calls before it has a server");
        self.start(A)?;
        let callers = Callers::start(&self.stage.registry().url("dc1"), self.board, self.narrator)?;
        self.answered_by(Instant::now(), "the client's start", A, |answer| answer.instance == A).await?;
        self.start(B)?;
        self.start(C)?;
        self.two_at_home(&callers).await?;
        self.listed("dc2").await?;
        self.close().await?;

        self.open("2  kill a", "it dies without a word; the client should carry on with counter-b");
        self.kill(A, |answer| answer.instance == B, B).await?;

        self.open("3  kill b", "dc1 has no server left; the client should go over to counter-c in dc2");
        self.kill(B, |answer| answer.instance == C, C).await?;

        self.open(
            "4  restart a",
            "dc1 has a server again; once it has been usable for a second, the client should return",
        );
        self.restart(&[A]).await?;

        self.open("5  stop a", "it is asked to end, as at every deployment; no call may fail");
        self.stop(A).await?;

        self.open("6  restart both", "dc1 is complete again; the client should return to it");
        self.restart(&[A, B]).await?;
        self.two_at_home(&callers).await?;

        self.open(
            "7  pause one",
            "the server hangs, no connection breaks; the client must find out by itself",
        );
        self.pause(&callers).await?;

        callers.end().await;
        Ok(())
    }

    /// Kills `victim` while it has work in hand; then `heir` should answer.
    async fn kill(&mut self, victim: &str, fits: fn(&Answer) -> bool, heir: &str) -> Result<(), Failure> {
        let id = self.in_hand(victim).await?;
        let text = format!("SIGKILL to {victim}, which has Increment {id} in its hands");
        self.say(Tone::Notice, "killed", &text, victim);
        let killed = Instant::now();
        let life = self.stage.kill(victim).await?;
        self.board.write(|tally| tally.excuse(Excuse::Killed(life)));
        self.answered_by(killed, "the kill", heir, fits).await?;
        self.calm(killed, heir, fits).await?;
        self.close().await
    }

    /// Starts servers of dc1; then one of dc1 should answer.
    async fn restart(&mut self, servers: &[&str]) -> Result<(), Failure> {
        let started = Instant::now();
        for server in servers {
            self.start(server)?;
        }
        let at_home = |answer: &Answer| answer.datacenter == "dc1";
        self.answered_by(started, "the restart", "dc1", at_home).await?;
        // From the return on: until then dc2 answered, as it should.
        self.calm(Instant::now(), "dc1", at_home).await?;
        self.close().await
    }

    async fn stop(&mut self, server: &str) -> Result<(), Failure> {
        let asked = Instant::now();
        self.board.write(|tally| tally.excuse(Excuse::Gentle));
        self.say(Tone::Notice, "terminated", &format!("SIGTERM to {server}"), server);
        let (stage, board) = (&mut *self.stage, self.board);
        let elsewhere = move |answer: &Answer| answer.instance != A;
        let (ended, answer) =
            tokio::join!(stage.terminate(server), first_answer(board, asked, "another server", elsewhere),);
        ended?;
        let (at, by) = answer?;
        let text = format!("{server} has ended well, its calls all answered");
        self.say(Tone::Good, "ended", &text, server);
        self.first(&by, at - asked, "SIGTERM");
        self.calm(Instant::now(), "another server", elsewhere).await?;
        self.close().await
    }

    async fn pause(&mut self, callers: &Callers) -> Result<(), Failure> {
        let victim = self.board.read(|tally| tally.latest().map(|answer| answer.instance.clone()));
        let victim = victim.ok_or("nobody has answered yet")?;
        let act = self.board.read(super::tally::Tally::act);
        let from = Instant::now();
        self.stage.pause(&victim)?;
        self.say(
            Tone::Notice,
            "paused",
            &format!("SIGSTOP to {victim}: it stands still, its connections open"),
            &victim,
        );
        let what = "the client to go from the paused server to another";
        let until = self
            .board
            .until(what, BOUND, |tally| tally.rebinds(act).map(|it| it.at).find(|at| *at >= from))
            .await?;
        self.board.write(|tally| tally.excuse(Excuse::Paused { from, until }));
        let other = |answer: &Answer| answer.instance != victim;
        self.answered_by(from, "the pause", "another server", other).await?;
        self.calm(until, "another server", other).await?;
        self.board.settled(BOUND + DEADLINE).await?;
        self.untold();
        self.stage.resume(&victim)?;
        self.say(
            Tone::Notice,
            "resumed",
            &format!("SIGCONT to {victim}: it goes on as if nothing had been"),
            &victim,
        );
        let resumed = Instant::now();
        self.two_at_home(callers).await?;
        let text = format!("{victim} may be called again, {} after it woke", duration(resumed.elapsed()));
        self.say(Tone::Good, "usable", &text, &victim);
        self.board.settled(BOUND).await?;
        self.sums();
        Ok(())
    }

    fn start(&mut self, server: &str) -> Result<(), Failure> {
        let pid = self.stage.start(server)?;
        self.say(Tone::Quiet, "started", &format!("{server} is started (process {pid})"), server);
        Ok(())
    }

    /// Waits for a moment when `server` has an `Increment` in its hands.
    async fn in_hand(&self, server: &str) -> Result<String, Failure> {
        let look = async {
            loop {
                let sent =
                    self.board.read(|tally| tally.just_out(Instant::now(), JUST_SENT).map(str::to_owned));
                if let Some(id) = sent
                    && self.stage.has_in_hand(server, Method::Increment, &id)?
                {
                    return Ok::<_, Failure>(id);
                }
                sleep(Duration::from_millis(1)).await;
            }
        };
        timeout(BOUND, look).await.map_err(|_| format!("{server} never had an Increment in its hands"))?
    }

    /// Waits for the first answer to a call begun since, by one that fits.
    async fn answered_by(
        &self,
        since: Instant,
        event: &str,
        who: &str,
        fits: impl Fn(&Answer) -> bool,
    ) -> Result<(), Failure> {
        let (at, by) = first_answer(self.board, since, who, fits).await?;
        self.first(&by, at - since, event);
        Ok(())
    }

    fn first(&self, by: &Answer, after: Duration, event: &str) {
        let (instance, datacenter, took) = (&by.instance, &by.datacenter, duration(after));
        let text = format!("first answer from {instance} in {datacenter}, {took} after {event}");
        let more = json!({ "instance": by.instance, "after_ms": ms(after) });
        self.narrator.say(Tone::Good, "first_answer", &text, more);
    }

    /// Lets the client call on for a while.
    async fn calm(&self, since: Instant, who: &str, fits: impl Fn(&Answer) -> bool) -> Result<(), Failure> {
        let what = format!("{CALM} calls of each method answered by {who}");
        let enough = |tally: &super::tally::Tally| (tally.answered(since, &fits) >= CALM).then_some(());
        Ok(self.board.until(what, BOUND, enough).await?)
    }

    /// Waits until the client holds connections to both servers of dc1.
    async fn two_at_home(&self, callers: &Callers) -> Result<(), Failure> {
        let wait = async {
            while callers.usable() < 2 {
                sleep(Duration::from_millis(10)).await;
            }
        };
        Ok(timeout(BOUND, wait).await.map_err(|_| "the client never had both servers of dc1 ready")?)
    }

    /// Waits until the registry of `datacenter` lists a healthy server.
    async fn listed(&self, datacenter: &str) -> Result<(), Failure> {
        let registry = crate::testkit::registry(self.stage.registry().url(datacenter));
        let wait = async {
            loop {
                let answer = registry.get("/v1/health/service/counter?passing").await;
                if answer.is_ok_and(|answer| answer.json().as_array().is_some_and(|all| !all.is_empty())) {
                    return;
                }
                sleep(Duration::from_millis(20)).await;
            }
        };
        Ok(timeout(BOUND, wait)
            .await
            .map_err(|_| format!("the registry of {datacenter} never listed a server"))?)
    }

    fn open(&self, title: &str, expected: &str) {
        self.board.write(|tally| tally.open(title));
        self.narrator.act(title, expected);
    }

    /// Ends an act: with every call that began in it, and a line of sums.
    async fn close(&self) -> Result<(), Failure> {
        self.board.settled(BOUND).await?;
        self.untold();
        self.sums();
        Ok(())
    }

    /// How many failures there were beside those told one by one.
    fn untold(&self) {
        for method in Method::ALL {
            let failed = self.board.read(|tally| tally.failed_now(method));
            if failed > TOLD {
                let text = format!("{} more {method} calls failed in the same way", failed - TOLD);
                self.narrator.say(Tone::Notice, "more_failed", &text, json!({ "method": method.name() }));
            }
        }
    }

    fn sums(&self) {
        let sums = self.board.read(|tally| tally.sums_of(tally.act()).0);
        let more = json!({
            "answered": sums.answered, "resent": sums.resent, "slow": sums.slow, "failed": sums.failed,
        });
        self.narrator.say(Tone::Quiet, "act_over", &sums.line(), more);
    }

    fn say(&self, tone: Tone, kind: &str, text: &str, server: &str) {
        self.narrator.say(tone, kind, text, json!({ "server": server }));
    }
}

async fn first_answer(
    board: &Board,
    since: Instant,
    who: &str,
    fits: impl Fn(&Answer) -> bool,
) -> Result<(Instant, Answer), Failure> {
    let look = |tally: &super::tally::Tally| {
        tally.first_answer(since, &fits).map(|(at, answer)| (at, answer.clone()))
    };
    Ok(board.until(format!("an answer from {who}"), BOUND, look).await?)
}
