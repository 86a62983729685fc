//! What is known of a service, and what an answer or a failure makes of it. Only a good
//! answer that holds instances replaces those that are known: one that is empty does not,
//! nor one whose entries all name nothing to connect to, which is not even empty.

use std::sync::Arc;

use tokio::time::Instant;

use super::{Episode, Failure, RegistryDoubt, Without};
use crate::{
    consul::{Denied, HealthAnswer, RegistryError},
    instance::Snapshot,
};

/// What is known of the service.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub(crate) struct Resolved {
    /// The last list that had instances, or an empty one where there never were
    /// any. `None`: the registry has never answered.
    pub(crate) snapshot: Option<Snapshot>,
    /// When the last good answer came.
    pub(crate) answered_at: Option<Instant>,
    /// What the last question failed with; `None` once one has been answered.
    pub(crate) error: Option<RegistryError>,
    /// Where that question was asked.
    pub(crate) asked: Option<Arc<str>>,
    /// What is wrong with the answers, though they come.
    pub(crate) doubt: Option<RegistryDoubt>,
    /// The episode in which what is known is not confirmed: questions fail, or are
    /// answered by a server that is cut off, or are answered again only just.
    pub(crate) episode: Option<Arc<Episode>>,
    /// Since when the registry has said that there are no instances.
    pub(crate) empty_since: Option<Instant>,
    /// How many entries of the last list name nothing to connect to, and the first of them.
    pub(crate) skipped: usize,
    pub(crate) first_skipped: Option<Arc<str>>,
    /// What the token may not read, by the last good answer.
    pub(crate) denied: Option<Denied>,
    /// Since when the list has been hidden from the token: it comes empty, and
    /// that says nothing.
    pub(crate) hidden_since: Option<Instant>,
    /// The address of the agent that gave the last good answer.
    pub(crate) agent: Option<Arc<str>>,
    /// How many good answers there have been.
    pub(crate) answers: u64,
}

// === impl Resolved ===

impl Resolved {
    /// Notes that a good answer came, from where, and how far it can be trusted.
    /// True where that is news.
    pub(super) fn came(
        &mut self,
        answer: &HealthAnswer,
        doubt: Option<RegistryDoubt>,
        episode: Option<Arc<Episode>>,
        now: Instant,
    ) -> bool {
        self.answers += 1;
        self.answered_at = Some(now);
        // An episode that begins or ends is another doubt.
        self.episode = episode;
        let other_doubt = std::mem::replace(&mut self.doubt, doubt) != doubt;
        let back = self.error.take().is_some();
        // Other registries have none.
        let agent = Some(&answer.agent).filter(|it| !it.is_empty());
        let other_agent = self.agent.as_ref() != agent;
        if other_agent {
            self.agent = agent.cloned();
        }
        back || other_doubt || other_agent
    }

    /// Takes over what a good answer says. True where that is news.
    pub(super) fn take(&mut self, answer: &HealthAnswer, now: Instant, without: Without) -> bool {
        let empty = answer.is_empty();
        let first = answer.skipped.first().map(|it| it.to_string().into());
        let skipped = self.skipped != answer.skipped.len() || self.first_skipped != first;
        (self.skipped, self.first_skipped) = (answer.skipped.len(), first);
        let unusable = !empty && answer.snapshot.instances.is_empty();
        let denied = std::mem::replace(&mut self.denied, answer.denied) != self.denied;
        // A list that the token may not read is not empty, it is unknown.
        let hidden_since = (empty && self.denied.is_some()).then(|| self.hidden_since.unwrap_or(now));
        let hidden = std::mem::replace(&mut self.hidden_since, hidden_since).is_some();
        let keeps = !(empty && without.keep_on_empty);
        let empty_since = (empty && keeps && hidden_since.is_none()).then(|| self.empty_since.unwrap_or(now));
        let was_empty = std::mem::replace(&mut self.empty_since, empty_since).is_some();
        let other = if !keeps {
            self.snapshot.replace(Snapshot::default()) != Some(Snapshot::default())
        } else if empty || unusable {
            self.snapshot.get_or_insert_default();
            false
        } else {
            let other = self.snapshot.as_ref() != Some(&answer.snapshot);
            if other {
                self.snapshot = Some(answer.snapshot.clone());
            }
            other
        };
        denied || skipped || hidden != hidden_since.is_some() || was_empty != empty_since.is_some() || other
    }

    /// Notes a failure. True where it is another one than before.
    pub(super) fn failed(
        &mut self,
        failure: Failure,
        episode: Option<Arc<Episode>>,
        without: Without,
    ) -> bool {
        self.episode = episode;
        self.doubt = None;
        if without.keep_on_error {
            self.snapshot = Some(Snapshot::default());
            self.empty_since = None;
        }
        let kind = std::mem::discriminant::<RegistryError>;
        let Failure { error, asked } = failure;
        let elsewhere = std::mem::replace(&mut self.asked, asked.clone()) != asked;
        let before = self.error.replace(error.clone());
        match (&before, &error) {
            // A kind for everything: what it says tells them apart.
            (Some(RegistryError::Other { source: old }), RegistryError::Other { source: new }) => {
                old.to_string() != new.to_string()
            }
            _ => elsewhere || before.as_ref().map(kind) != Some(kind(&error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{
        consul::{SkipReason, SkippedEntry},
        instance::Instance,
    };

    #[derive(Clone, Debug)]
    enum Step {
        Answered { names: Vec<String>, skipped: bool, denied: bool, leaderless: bool },
        Failed,
    }

    fn step() -> impl Strategy<Value = Step> {
        let names = prop::collection::vec("[abc]", 0..3);
        prop_oneof![
            3 => (names, any::<[bool; 3]>()).prop_map(|(names, [skipped, denied, leaderless])| {
                Step::Answered { names, skipped, denied, leaderless }
            }),
            1 => Just(Step::Failed),
        ]
    }

    proptest! {
        #[test]
        fn what_is_known_is_replaced_by_a_list_with_entries_and_by_nothing_else(
            steps in prop::collection::vec(step(), 0..40),
        ) {
            let (mut resolved, now, without) = (Resolved::default(), Instant::now(), Without::default());
            let mut known = Vec::new();
            for step in steps {
                match step {
                    Step::Answered { names, skipped, denied, leaderless } => {
                        let instances = names.iter().map(|it| Arc::new(Instance::new(it, it, 80, "dc1")));
                        let mut answer = HealthAnswer::of(Snapshot { instances: instances.collect() });
                        if skipped {
                            let (id, node) = ("a".to_owned(), "n".to_owned());
                            answer.skipped.push(SkippedEntry { id, node, reason: SkipReason::Port(0) });
                        }
                        let empty = names.is_empty() && !skipped;
                        answer.denied = denied.then_some(Denied::Part);
                        answer.known_leader = Some(!leaderless);
                        resolved.came(&answer, RegistryDoubt::of(&answer), None, now);
                        resolved.take(&answer, now, without);
                        prop_assert_eq!(resolved.empty_since.is_some(), empty && !denied);
                        prop_assert_eq!(resolved.hidden_since.is_some(), empty && denied);
                        prop_assert_eq!(resolved.doubt.is_some(), leaderless);
                        prop_assert!(resolved.error.is_none());
                        if !names.is_empty() {
                            known = names;
                        }
                    }
                    Step::Failed => {
                        let failure = Failure { error: RegistryError::NoLeader, asked: None };
                        resolved.failed(failure, None, without);
                        prop_assert!(resolved.error.is_some() && resolved.doubt.is_none());
                    }
                }
                let now_known = resolved.snapshot.iter().flat_map(|it| &it.instances);
                prop_assert_eq!(now_known.map(|it| it.name.clone()).collect::<Vec<_>>(), known.clone());
            }
        }
    }
}
