//! Instances that answer UNAVAILABLE, or not in time, again and again.
//!
//! One that has enough peers is ejected. The only one there is, or one of too many that
//! answer badly, stays in use, for it does answer; but others are looked for, in other
//! datacenters too, and once there are enough the bad one goes, unless it has got better
//! meanwhile.

use std::time::Duration;

use tokio::time::Instant;

use super::Worker;
use crate::client::event::RebindCause;

/// How often it is looked whether an instance in doubt has got better.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

impl Worker {
    pub(super) fn on_failing(&mut self, serial: u64) {
        // What follows from it is settled in the next step.
        self.fleet.doubt(|e| e.serial() == serial, true);
        self.want_look_up();
    }

    /// Returns when to look again, where doubts remain.
    pub(super) fn settle_doubts(&mut self, now: Instant) -> Option<Instant> {
        let mut again = None;
        for endpoint in self.fleet.doubted() {
            let serial = endpoint.serial();
            if !endpoint.link().is_failing(self.options.failures_to_eject) {
                self.fleet.doubt(|e| e.serial() == serial, false);
            } else if self.fleet.can_do_without(|e| e.serial() == serial) {
                self.take_out(&endpoint, RebindCause::Failing, now, now);
            } else {
                again = Some(now + LOOK_AGAIN);
            }
        }
        again
    }
}
