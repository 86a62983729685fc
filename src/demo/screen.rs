//! Standard output: lines, and on a terminal one live line under them.
//!
//! In a pipe, in a file and on a dumb terminal there are plain lines only.

use std::{
    env,
    fmt::Display,
    io::{self, IsTerminal, Write},
    sync::Arc,
};

use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;

/// What a piece of text means; the colour follows from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tone {
    /// A title.
    Title,
    /// As it should be.
    Good,
    /// Something was lost and is being dealt with.
    Notice,
    /// As it should not be.
    Bad,
    /// Less important than the rest.
    Quiet,
}

impl Tone {
    fn code(self) -> &'static str {
        match self {
            Tone::Title => "1",
            Tone::Good => "32",
            Tone::Notice => "33",
            Tone::Bad => "1;31",
            Tone::Quiet => "2",
        }
    }
}

/// Where the program writes. Cheap to clone; all clones write to one place.
#[derive(Clone)]
pub(crate) struct Screen {
    shared: Arc<Shared>,
}

struct Shared {
    /// A live line may be drawn and redrawn.
    alive: bool,
    colour: bool,
    state: Mutex<State>,
    closed: CancellationToken,
}

struct State {
    out: Box<dyn Write + Send>,
    live: String,
}

impl Screen {
    /// Standard output. Colour and life on a terminal, unless `NO_COLOR`
    /// (<https://no-color.org>) or `TERM=dumb` say otherwise.
    pub(crate) fn stdout() -> Self {
        let terminal = io::stdout().is_terminal() && env::var_os("TERM").is_some_and(|term| term != "dumb");
        let no_colour = env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        Self::new(Box::new(io::stdout()), terminal, terminal && !no_colour)
    }

    /// A screen that nobody sees.
    pub(crate) fn none() -> Self {
        Self::new(Box::new(io::sink()), false, false)
    }

    fn new(out: Box<dyn Write + Send>, alive: bool, colour: bool) -> Self {
        let state = Mutex::new(State { out, live: String::new() });
        Self { shared: Arc::new(Shared { alive, colour, state, closed: CancellationToken::new() }) }
    }

    /// Whether [`live`](Self::live) shows anything.
    pub(crate) fn is_alive(&self) -> bool {
        self.shared.alive
    }

    /// `text` in the colour of `tone`, where there is colour.
    pub(crate) fn paint(&self, tone: Tone, text: impl Display) -> String {
        if self.shared.colour { format!("\x1b[{}m{text}\x1b[0m", tone.code()) } else { text.to_string() }
    }

    /// Writes one line, above the live one.
    pub(crate) fn line(&self, text: impl Display) {
        let mut state = self.shared.state.lock();
        let out = if state.live.is_empty() {
            format!("{text}\n")
        } else {
            format!("\r\x1b[2K{text}\n{}", state.live)
        };
        self.write(&mut state, &out);
    }

    /// Replaces the live line; does nothing where there is none. An empty text removes it.
    pub(crate) fn live(&self, text: &str) {
        if !self.shared.alive {
            return;
        }
        let mut state = self.shared.state.lock();
        let text = fit(text, columns());
        if text == state.live {
            return;
        }
        let out = format!("\r\x1b[2K{text}");
        state.live = text;
        self.write(&mut state, &out);
    }

    /// Ends when nobody reads any more (`demo client | head`).
    pub(crate) async fn closed(&self) {
        self.shared.closed.cancelled().await;
    }

    fn write(&self, state: &mut State, text: &str) {
        let written = state.out.write_all(text.as_bytes()).and_then(|()| state.out.flush());
        if let Err(error) = written
            && error.kind() == io::ErrorKind::BrokenPipe
        {
            self.shared.closed.cancel();
        }
    }
}

/// The live line must not stay behind in the shell's prompt.
impl Drop for Shared {
    fn drop(&mut self) {
        let state = self.state.get_mut();
        if !state.live.is_empty() {
            let _ = state.out.write_all(b"\r\x1b[2K").and_then(|()| state.out.flush());
        }
    }
}

/// The terminal's width; 80 where it does not say.
pub(crate) fn columns() -> usize {
    match rustix::termios::tcgetwinsize(io::stdout()) {
        Ok(size) if size.ws_col > 0 => usize::from(size.ws_col),
        _ => 80,
    }
}

/// Cuts `text` so that it fits on one line of `columns`, colour codes not
/// counted: a live line that wraps could not be taken back.
fn fit(text: &str, columns: usize) -> String {
    let room = columns.saturating_sub(1);
    let (mut used, mut in_code, mut cut) = (0, false, false);
    let mut fitted = String::with_capacity(text.len());
    for c in text.chars() {
        if in_code || c == '\x1b' {
            // Codes are kept behind the cut as well: the last one resets the colour.
            in_code = c != 'm';
            fitted.push(c);
        } else if used < room {
            used += 1;
            fitted.push(c);
        } else {
            cut = true;
        }
    }
    if cut && !fitted.contains('\x1b') && room > 1 {
        fitted.pop();
        fitted.push('…');
    }
    fitted
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Clone, Default)]
    struct Paper(Arc<Mutex<Vec<u8>>>);

    impl Paper {
        fn text(&self) -> String {
            String::from_utf8(self.0.lock().clone()).unwrap()
        }
    }

    impl Write for Paper {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    struct Closed;

    impl Write for Closed {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(io::ErrorKind::BrokenPipe.into())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn in_a_pipe_there_are_plain_lines_only() {
        let paper = Paper::default();
        let screen = Screen::new(Box::new(paper.clone()), false, false);
        screen.live("calling");
        screen.line(screen.paint(Tone::Bad, "one"));
        drop(screen);
        assert_eq!(paper.text(), "one\n");
    }

    #[test]
    fn the_live_line_stays_under_the_lines_and_goes_at_the_end() {
        let paper = Paper::default();
        let screen = Screen::new(Box::new(paper.clone()), true, true);
        screen.live("calling");
        screen.line(screen.paint(Tone::Good, "one"));
        drop(screen);
        let (clear, green) = ("\r\x1b[2K", "\x1b[32mone\x1b[0m");
        assert_eq!(paper.text(), format!("{clear}calling{clear}{green}\ncalling{clear}"));
    }

    #[test]
    fn a_live_line_never_wraps_and_keeps_its_codes() {
        assert_eq!(fit("short", 10), "short");
        assert_eq!(fit("much too long", 8), "much t…");
        assert_eq!(fit("\x1b[32mmuch too long\x1b[0m", 8), "\x1b[32mmuch to\x1b[0m");
    }

    #[tokio::test]
    async fn a_reader_that_left_is_noticed_and_harmless() {
        let screen = Screen::new(Box::new(Closed), false, false);
        screen.line("one");
        screen.closed().await;
    }
}
