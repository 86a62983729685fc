//! `demo story --primary-standby`: one counter, a primary and a standby, and all that can happen to a
//! primary, while eight callers add without pause. In the end everything acknowledged has been counted.

mod acts;
mod books;
mod callers;
mod duo;
mod store;
mod wire;

use std::{path::Path, process::ExitCode};

use serde_json::json;

use self::{
    acts::Play,
    books::Books,
    callers::{ATTEMPT, CALLERS, Callers},
    duo::Duo,
    store::Store,
};
use super::{narrator::Narrator, registry::Choice, verdict::Check};
use crate::demo::{
    cli::Failure,
    screen::Tone,
    text::{chain, count, duration},
};

pub(crate) use self::store::StoreKind;

pub(super) async fn tell(
    kind: StoreKind,
    choice: Choice,
    dir: &Path,
    narrator: &Narrator,
) -> Result<ExitCode, Failure> {
    narrator.plain(Tone::Title, "One counter, a primary and a standby");
    let (store, words) = Store::start(kind, choice, dir).await?;
    narrator.fact("Store", &words);
    narrator.fact("Servers", "counter-a and counter-b; each a process of its own, one of them primary");
    let text = format!(
        "{CALLERS} callers that Add without pause; each attempt is given {}, and made again with its key",
        duration(ATTEMPT)
    );
    narrator.fact("Client", &text);

    let mut duo = Duo::set(store, dir).await?;
    let mut callers = Callers::start(&duo)?;
    let play = Play { duo: &mut duo, callers: &mut callers, narrator, act: 0 };
    let played = play.run().await;
    let counted = match played {
        Ok(counted) => counted,
        Err(error) => {
            narrator.plain(Tone::Notice, "");
            for line in duo.explain() {
                narrator.plain(Tone::Quiet, &line);
            }
            duo.strike().await;
            return Err(format!("the story stopped: {}", chain(&*error)).into());
        }
    };
    duo.strike().await;
    Ok(callers.books(|books| conclude(books, counted, narrator)))
}

/// The table and the verdict.
fn conclude(books: &Books, counted: u64, narrator: &Narrator) -> ExitCode {
    narrator.plain(Tone::Quiet, "");
    for (number, line) in books.table().iter().enumerate() {
        narrator.plain(if number == 0 { Tone::Title } else { Tone::Quiet }, &format!("  {line}"));
    }
    let again = count(books.again, "attempt");
    narrator.plain(Tone::Quiet, &format!("  ({again} failed and made again with the same key)"));
    narrator.plain(Tone::Quiet, "");
    let checks = books.judge(counted);
    for Check { held, text } in &checks {
        let (tone, word) = if *held { (Tone::Good, "  ok    ") } else { (Tone::Bad, "  WRONG ") };
        narrator.painted(&format!("{}{text}", narrator.screen().paint(tone, word)));
    }
    let held = checks.iter().all(|check| check.held);
    let text = match held {
        true => "Everything that was acknowledged has been counted, once.",
        false => "Something was lost or counted twice, or two were primary.",
    };
    narrator.plain(Tone::Quiet, "");
    narrator.plain(if held { Tone::Good } else { Tone::Bad }, text);
    let promises: Vec<_> = checks.iter().map(|it| json!({ "held": it.held, "text": it.text })).collect();
    let more = json!({
        "held": held, "acknowledged": books.acknowledged(), "counted": counted, "promises": promises,
    });
    narrator.object("verdict", text, more);
    if held { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
