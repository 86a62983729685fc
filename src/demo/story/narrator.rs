//! How the story is told: lines with the time since its start, one live line
//! under them on a terminal, or one JSON object a line.

use std::sync::Arc;

use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::time::Instant;

use super::{board::Board, tally::Sums};
use crate::demo::{
    screen::{Screen, Tone, columns},
    text::{count, ms},
};

/// Cheap to clone.
#[derive(Clone)]
pub(crate) struct Narrator {
    shared: Arc<Shared>,
}

struct Shared {
    screen: Screen,
    json: bool,
    began: Instant,
    /// Title of the act being played.
    act: Mutex<String>,
}

const SPINNER: [char; 4] = ['-', '\\', '|', '/'];
/// Where a story's words begin: after the time.
const INDENT: usize = 12;

impl Narrator {
    pub(crate) fn new(screen: Screen, json: bool) -> Self {
        let shared = Shared { screen, json, began: Instant::now(), act: Mutex::default() };
        Self { shared: Arc::new(shared) }
    }

    pub(crate) fn screen(&self) -> &Screen {
        &self.shared.screen
    }

    /// A line of the opening.
    pub(crate) fn fact(&self, name: &str, text: &str) {
        if self.shared.json {
            return self.object(&format!("opening_{}", name.to_lowercase()), text, json!({}));
        }
        let name = self.shared.screen.paint(Tone::Title, format!("{name:<9}"));
        self.shared.screen.line(format!("  {name}  {text}"));
    }

    /// A line without a time.
    pub(crate) fn plain(&self, tone: Tone, text: &str) {
        self.painted(&self.shared.screen.paint(tone, text));
    }

    /// As [`plain`](Self::plain), in its own colours.
    pub(crate) fn painted(&self, text: &str) {
        if !self.shared.json {
            self.shared.screen.line(text);
        }
    }

    /// The title of an act, and what should happen in it.
    pub(crate) fn act(&self, title: &str, expected: &str) {
        title.clone_into(&mut self.shared.act.lock());
        if self.shared.json {
            return self.object("act", title, json!({ "expected": expected }));
        }
        let screen = &self.shared.screen;
        screen.line("");
        screen.line(format!("{}: {expected}", screen.paint(Tone::Title, title)));
    }

    /// Something that happened.
    pub(crate) fn say(&self, tone: Tone, kind: &str, text: &str, more: Value) {
        if self.shared.json {
            return self.object(kind, text, more);
        }
        let screen = &self.shared.screen;
        let time = screen.paint(Tone::Quiet, format!("{:>8.2} s", self.shared.began.elapsed().as_secs_f64()));
        let width = if screen.is_alive() { columns().saturating_sub(1).max(60) } else { 100 };
        let mut margin = time;
        for line in wrap(text, width - INDENT) {
            screen.line(format!("{margin}  {}", screen.paint(tone, line)));
            margin = " ".repeat(INDENT - 2);
        }
    }

    /// Redraws the live line. Ends with the story.
    pub(crate) async fn animate(&self, board: &Board) {
        let shared = &self.shared;
        if !shared.screen.is_alive() || shared.json {
            return std::future::pending().await;
        }
        for turn in (0..SPINNER.len()).cycle() {
            let (who, sums) = board.read(|tally| {
                let who = tally.latest().map(|it| format!("{} in {}", it.instance, it.datacenter));
                (who, tally.sums)
            });
            let who = who.unwrap_or_else(|| "nobody yet".to_owned());
            let seconds = shared.began.elapsed().as_secs_f64();
            let act = shared.act.lock().clone();
            let text =
                format!("{seconds:>8.1} s {} {act}: answered by {who}; {}", SPINNER[turn], sums.line());
            shared.screen.live(&shared.screen.paint(Tone::Notice, text));
            tokio::time::sleep(std::time::Duration::from_millis(100)).await;
        }
    }

    /// Removes the live line.
    pub(crate) fn still(&self) {
        self.shared.screen.live("");
    }

    /// For machines only.
    pub(crate) fn object(&self, kind: &str, text: &str, mut more: Value) {
        if self.shared.json {
            more["seconds"] = ((ms(self.shared.began.elapsed())).round() / 1e3).into();
            more["event"] = kind.into();
            more["text"] = text.into();
            self.shared.screen.line(more);
        }
    }
}

impl Sums {
    /// `93 calls answered, 2 of them resent, 0 slow, 1 failed`.
    pub(crate) fn line(&self) -> String {
        let Sums { answered, resent, slow, failed } = self;
        format!(
            "{} answered, {resent} of them resent, {slow} slow; {failed} failed",
            count(*answered, "call")
        )
    }
}

/// Breaks a text at blanks into lines of at most `width`, where words allow.
fn wrap(text: &str, width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split(' ') {
        let line = lines.last_mut().expect("the first line is there from the start");
        if line.is_empty() {
            line.push_str(word);
        } else if line.chars().count() + 1 + word.chars().count() <= width {
            line.push(' ');
            line.push_str(word);
        } else {
            lines.push(word.to_owned());
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_sentences_break_between_words() {
        assert_eq!(wrap("one two three", 7), ["one two", "three"]);
        assert_eq!(wrap("one", 2), ["one"]);
    }
}
