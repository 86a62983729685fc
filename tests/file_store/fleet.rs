//! The processes of a test, and what they have told.

use std::{
    collections::BTreeMap,
    env,
    io::{BufRead, BufReader, Write},
    path::Path,
    process::{Child, ChildStdin, Command, Stdio},
    sync::mpsc,
    thread::JoinHandle,
};

use rustix::process::{Pid, Signal, kill_process};

use crate::{
    child::{DIRECTORY, PART},
    history::{Call, Kind, Outcome},
};

/// A child, which ends with this.
pub(crate) struct Process {
    child: Child,
    reader: Option<JoinHandle<()>>,
    pub(crate) lines: mpsc::Receiver<String>,
    /// Those that were looked at already.
    told: Vec<String>,
}

/// What one process has told.
#[derive(Debug, Default)]
pub(crate) struct Told {
    pub(crate) calls: Vec<Call>,
    /// From when until when it took itself for the primary, by its own clock.
    pub(crate) primary: Vec<(u64, u64)>,
    pub(crate) tokens: Vec<u64>,
}

impl Process {
    /// Starts this very program again, as `part` of the test.
    pub(crate) fn start(part: &str, directory: &Path, durable: bool) -> Self {
        let mut command = Command::new(env::current_exe().unwrap());
        command.args(["a_child_of_these_tests_lives", "--exact", "--nocapture", "--test-threads=1"]);
        command.env(PART, part).env(DIRECTORY, directory);
        if durable {
            command.env("FILE_STORE_TEST_DURABLE", "1");
        }
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        let (tell, lines) = mpsc::channel();
        let reader = std::thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                if let Some((_, line)) = line.split_once("@ ")
                    && tell.send(line.to_owned()).is_err()
                {
                    return;
                }
            }
        });
        Self { child, reader: Some(reader), lines, told: Vec::new() }
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    pub(crate) fn write(&mut self, line: &str) {
        let stdin: &mut ChildStdin = self.child.stdin.as_mut().unwrap();
        writeln!(stdin, "{line}").unwrap();
    }

    /// Kills it, and takes in what it has told.
    pub(crate) fn kill(mut self) -> Told {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        self.reader.take().unwrap().join().unwrap();
        let mut told = std::mem::take(&mut self.told);
        told.extend(self.lines.try_iter());
        Told::of(&told)
    }

    /// Until when it takes itself for the primary, as far as it has told; and how many terms it has begun.
    pub(crate) fn primary_until(&mut self) -> (u64, usize) {
        self.told.extend(self.lines.try_iter());
        let told = Told::of(&self.told);
        (told.primary.last().map_or(0, |(_, until)| *until), told.tokens.len())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Told {
    fn of(lines: &[String]) -> Self {
        let mut told = Self::default();
        let mut calls: BTreeMap<u64, Call> = BTreeMap::new();
        for line in lines {
            let words: Vec<_> = line.split(' ').collect();
            let number = |word: usize| words.get(word).and_then(|word| word.parse::<u64>().ok());
            // The last line of a killed process may be cut.
            let outcome = match (words[0], number(1), number(2), number(3)) {
                ("call", Some(id), _, Some(called)) => {
                    let kind = if words[2] == "get" { Kind::Get } else { Kind::Increment };
                    calls.insert(id, Call { called, kind, outcome: Outcome::Open });
                    continue;
                }
                ("answer", Some(id), Some(returned), Some(value)) => {
                    (id, Outcome::Answered { returned, value })
                }
                ("undone", Some(id), ..) => (id, Outcome::Undone),
                ("term", Some(token), Some(from), Some(until)) => {
                    told.primary.push((from, until));
                    told.tokens.push(token);
                    continue;
                }
                _ => continue,
            };
            if let Some(call) = calls.get_mut(&outcome.0) {
                call.outcome = outcome.1;
            }
        }
        told.calls = calls.into_values().collect();
        told.tokens.dedup();
        told
    }
}
