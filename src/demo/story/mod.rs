//! `demo story`: one client, three servers, two datacenters, and everything that
//! can happen to them, checked against the servers' journals.

mod acts;
mod board;
mod callers;
mod journal;
mod narrator;
mod process;
mod registry;
mod report;
mod stage;
mod standby;
mod tally;
mod verdict;
mod words;

use std::{fs, path::PathBuf, process::ExitCode};

use clap::Args;
use serde_json::json;
use tempfile::TempDir;

use self::{
    acts::{Play, SERVERS},
    board::Board,
    callers::{DEADLINE, RATE},
    narrator::Narrator,
    registry::{Choice, Registry},
    stage::Stage,
    standby::StoreKind,
};
use super::{
    calls::SLOW,
    cli::Failure,
    screen::{Screen, Tone},
    signals::Signals,
    text::duration,
};

/// How the story is told.
#[derive(Args, Clone, Debug)]
pub(crate) struct Options {
    /// The registry to start for the story: auto takes a consul from $CONSUL_BIN, PATH or
    /// target/consul, and the embedded agents where there is none.
    #[arg(long, value_enum, default_value_t = Choice::Auto)]
    registry: Choice,

    /// Tell of a primary and its standby instead: one counter, of which nothing may be lost.
    #[arg(long)]
    primary_standby: bool,

    /// Where primary and standby keep their lease and the counter.
    #[arg(long, value_enum, default_value_t = StoreKind::Consul, requires = "primary_standby")]
    store: StoreKind,

    /// Keep the servers' journals and logs in DIR.
    #[arg(long, value_name = "DIR")]
    keep: Option<PathBuf>,

    /// One JSON object a line, for machines; the last one is the verdict.
    #[arg(long)]
    json: bool,
}

/// Exit code of a program ended by Ctrl-C: 128 and the signal's number.
const INTERRUPTED: u8 = 130;

pub(crate) async fn run(options: Options, mut signals: Signals, screen: Screen) -> Result<ExitCode, Failure> {
    let narrator = Narrator::new(screen, options.json);
    tokio::select! {
        code = tell(&options, &narrator) => code,
        signal = signals.next() => {
            narrator.still();
            narrator.say(Tone::Notice, "interrupted", &format!("interrupted by {signal}"), json!({}));
            Ok(ExitCode::from(INTERRUPTED))
        }
        () = narrator.screen().closed() => Ok(ExitCode::from(INTERRUPTED)),
    }
}

async fn tell(options: &Options, narrator: &Narrator) -> Result<ExitCode, Failure> {
    let temporary;
    let dir = match &options.keep {
        Some(dir) => {
            fs::create_dir_all(dir)
                .map_err(|error| format!("cannot make {} (--keep): {error}", dir.display()))?;
            dir.clone()
        }
        None => {
            temporary = TempDir::with_prefix("demo-story-")?;
            temporary.path().to_owned()
        }
    };
    if options.primary_standby {
        return standby::tell(options.store, options.registry, &dir, narrator).await;
    }
    narrator.plain(Tone::Title, "One client, three servers, two datacenters");
    let registry = Registry::start(options.registry).await?;
    narrator.fact("Registry", registry.words());
    narrator.fact("Servers", "counter-a and counter-b in dc1, counter-c in dc2; each a process of its own");
    let each = (RATE / 3.0).round();
    narrator.fact(
        "Client",
        &format!("{each} Get, {each} Add and {each} Increment a second, each given {}", duration(DEADLINE)),
    );

    let mut stage = Stage::set(registry, &dir, &SERVERS)?;
    let board = Board::new();
    let play = Play { stage: &mut stage, board: &board, narrator };
    let played = tokio::select! {
        played = play.run() => played,
        () = narrator.animate(&board) => Ok(()),
    };
    narrator.still();
    if let Err(error) = played {
        narrator.plain(Tone::Notice, "");
        for line in stage.explain() {
            narrator.plain(Tone::Quiet, &line);
        }
        stage.strike().await;
        return Err(format!("the story stopped: {}", super::text::chain(&*error)).into());
    }
    let journals = stage.journals();
    stage.strike().await;
    let journals = journals?;
    Ok(conclude(&board, &journals, narrator))
}

/// The table and the verdict.
fn conclude(board: &Board, journals: &[journal::Journal], narrator: &Narrator) -> ExitCode {
    let (table, checks) = board.read(|tally| (report::table(tally), verdict::judge(tally, journals)));
    narrator.plain(Tone::Quiet, "");
    for (number, line) in table.iter().enumerate() {
        narrator.plain(if number == 0 { Tone::Title } else { Tone::Quiet }, &format!("  {line}"));
    }
    let slow = duration(SLOW);
    narrator.plain(
        Tone::Quiet,
        &format!(
            "  (resent: sent again elsewhere, unseen by the caller; slow: answered after more than {slow})"
        ),
    );
    narrator.plain(Tone::Quiet, "");
    for check in &checks {
        let (tone, word) = if check.held { (Tone::Good, "  ok    ") } else { (Tone::Bad, "  WRONG ") };
        let word = narrator.screen().paint(tone, word);
        narrator.painted(&format!("{word}{}", check.text));
    }
    let held = checks.iter().all(|check| check.held);
    let text = if held {
        "Every call that could be saved was answered."
    } else {
        "A call failed that should not have, or ran twice."
    };
    narrator.plain(Tone::Quiet, "");
    narrator.plain(if held { Tone::Good } else { Tone::Bad }, text);
    let acts = board.read(report::json);
    let promises: Vec<_> = checks.iter().map(|it| json!({ "held": it.held, "text": it.text })).collect();
    narrator.object("verdict", text, json!({ "held": held, "acts": acts, "promises": promises }));
    if held { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
