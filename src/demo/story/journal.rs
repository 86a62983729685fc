//! What a server's journal proves after its death.

use std::collections::{HashMap, HashSet};

use crate::demo::{
    backend::{ANSWERED, RECEIVED},
    calls::Method,
};

/// One process's journal, read.
#[derive(Debug, Default)]
pub(crate) struct Journal {
    received: Vec<(String, String)>,
    answered: HashSet<(String, String)>,
    /// Lines that are none of a journal.
    pub(crate) broken: usize,
}

impl Journal {
    /// Reads the text that the backend wrote.
    pub(crate) fn parse(text: &str) -> Self {
        let mut journal = Self::default();
        for line in text.lines() {
            let words: Vec<&str> = line.split(' ').collect();
            match words[..] {
                [RECEIVED, method, id] => journal.received.push((method.to_owned(), id.to_owned())),
                [ANSWERED, method, id] => {
                    journal.answered.insert((method.to_owned(), id.to_owned()));
                }
                _ => journal.broken += 1,
            }
        }
        journal
    }

    /// The requests of `method` that came and were not answered.
    pub(crate) fn in_hand(&self, method: Method) -> impl Iterator<Item = &str> {
        let of_method = self.received.iter().filter(move |(name, _)| name == method.name());
        of_method.filter(|request| !self.answered.contains(*request)).map(|(_, id)| id.as_str())
    }

    fn received(&self, method: Method) -> impl Iterator<Item = &str> {
        self.received.iter().filter(move |(name, _)| name == method.name()).map(|(_, id)| id.as_str())
    }
}

/// How often each request of `method` reached any of the processes.
pub(crate) fn times<'a>(
    journals: impl IntoIterator<Item = &'a Journal>,
    method: Method,
) -> HashMap<&'a str, u32> {
    let mut times = HashMap::new();
    for journal in journals {
        for id in journal.received(method) {
            *times.entry(id).or_default() += 1;
        }
    }
    times
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_came_without_an_answer_was_in_hand() {
        let text = "received Get 1\nreceived Increment 2\nanswered Get 1\nreceived Increment 3\n\
                    answered Increment 2\nreceived Add 4\n";
        let journal = Journal::parse(text);
        assert_eq!(journal.in_hand(Method::Increment).collect::<Vec<_>>(), ["3"]);
        assert_eq!(journal.in_hand(Method::Add).collect::<Vec<_>>(), ["4"]);
        assert_eq!(journal.in_hand(Method::Get).count(), 0);
        assert_eq!(journal.broken, 0);
    }

    #[test]
    fn a_request_that_reached_two_processes_is_counted_twice() {
        let journals = ["received Increment 1\nreceived Increment 2\n", "received Increment 2\n"];
        let journals = journals.map(Journal::parse);
        let times = times(&journals, Method::Increment);
        assert_eq!((times["1"], times["2"]), (1, 2));
    }

    #[test]
    fn lines_of_something_else_are_counted_as_broken() {
        assert_eq!(Journal::parse("received Get\nrubbish\n\nreceived Get 1\n").broken, 3);
    }
}
