//! The counter: a number, who watches it, and the keys already added.

use std::collections::{HashMap, VecDeque};

use parking_lot::Mutex;
use tokio::sync::watch;
use tonic::Status;

/// How many request keys are remembered. Our choice: hours of the demo's rate,
/// and a few megabytes.
const KEYS: usize = 100_000;

/// The longest request key; our choice.
const LONGEST_KEY: usize = 256;

/// One instance's number. It is not shared with other instances.
pub(super) struct Counter {
    value: watch::Sender<u64>,
    keys: Mutex<Keys>,
}

/// The keys already added and the value each gave, the oldest first to go.
#[derive(Default)]
struct Keys {
    values: HashMap<String, u64>,
    order: VecDeque<String>,
}

impl Counter {
    pub(super) fn new() -> Self {
        Self { value: watch::Sender::new(0), keys: Mutex::default() }
    }

    pub(super) fn get(&self) -> u64 {
        *self.value.borrow()
    }

    pub(super) fn increment(&self, by: u64) -> Result<u64, Status> {
        let mut result = Ok(0);
        self.value.send_if_modified(|value| {
            result = sum(*value, by);
            let old = *value;
            if let Ok(sum) = result {
                *value = sum;
            }
            old != *value
        });
        result
    }

    /// As [`increment`](Self::increment), once for each key: a repetition gets
    /// the first answer again.
    pub(super) fn add(&self, key: &str, by: u64) -> Result<u64, Status> {
        check_key(key)?;
        // Held until the key is in, so that two of one key cannot both add.
        let mut keys = self.keys.lock();
        if let Some(value) = keys.values.get(key) {
            return Ok(*value);
        }
        let value = self.increment(by)?;
        if keys.order.len() == KEYS
            && let Some(oldest) = keys.order.pop_front()
        {
            keys.values.remove(&oldest);
        }
        keys.order.push_back(key.to_owned());
        keys.values.insert(key.to_owned(), value);
        Ok(value)
    }

    /// The value now and after changes; one who reads slowly gets the newest.
    pub(super) fn watch(&self) -> watch::Receiver<u64> {
        self.value.subscribe()
    }
}

pub(super) fn sum(value: u64, by: u64) -> Result<u64, Status> {
    let sum = value.checked_add(by);
    sum.ok_or_else(|| Status::out_of_range(format!("adding {by} goes beyond {}", u64::MAX)))
}

pub(super) fn check_key(key: &str) -> Result<(), Status> {
    if key.is_empty() || key.len() > LONGEST_KEY {
        let length = key.len();
        return Err(Status::invalid_argument(format!(
            "request_key has {length} bytes: choose 1 to {LONGEST_KEY}, unlike any other request's"
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_counts_once_and_gets_its_answer_again() {
        let counter = Counter::new();
        assert_eq!(counter.add("k", 2).unwrap(), 2);
        assert_eq!(counter.increment(3).unwrap(), 5);
        assert_eq!(counter.add("k", 2).unwrap(), 2);
        assert_eq!(counter.get(), 5);
    }

    #[test]
    fn a_missing_key_and_a_sum_that_does_not_fit_are_refused() {
        let counter = Counter::new();
        assert_eq!(counter.add("", 1).unwrap_err().code(), tonic::Code::InvalidArgument);
        counter.increment(u64::MAX).unwrap();
        assert_eq!(counter.add("k", 1).unwrap_err().code(), tonic::Code::OutOfRange);
        assert_eq!(counter.get(), u64::MAX);
        assert_eq!(counter.add("k", 0).unwrap(), u64::MAX, "a refused key is free again");
    }

    #[test]
    fn the_oldest_keys_are_forgotten_first() {
        let counter = Counter::new();
        for n in 0..=KEYS {
            counter.add(&n.to_string(), 1).unwrap();
        }
        let sum = counter.get();
        counter.add(&KEYS.to_string(), 1).unwrap();
        assert_eq!(counter.get(), sum);
        counter.add("0", 1).unwrap();
        assert_eq!(counter.get(), sum + 1);
    }
}
