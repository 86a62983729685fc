use std::ops::Add;

use proptest::prelude::*;

use super::*;

const MS: Duration = Duration::from_millis(1);

/// `a`, `b` and the like, on ports of their own; tags as given.
fn instance(name: &str, claim: Option<Option<u64>>) -> Arc<Instance> {
    let mut instance = Instance::new(name, "127.0.0.1", port(name), "dc1");
    if let Some(token) = claim {
        instance.tags.push("primary".to_owned());
        if let Some(token) = token {
            instance.meta.insert("token".to_owned(), token.to_string());
        }
    }
    Arc::new(instance)
}

fn port(name: &str) -> u16 {
    u16::from(name.as_bytes()[0])
}

fn id(name: &str) -> InstanceId {
    InstanceId::new("127.0.0.1", port(name))
}

fn hint(name: &str, token: u64) -> Option<Primary> {
    Some(Primary::new(name, id(name), FencingToken::new(token)))
}

struct Play {
    claims: Claims,
    start: Instant,
    at: u32,
}

impl Play {
    /// Two or more that the registry lists with these claims.
    fn of(listed: &[(&str, Option<Option<u64>>)]) -> Self {
        let mut play = Self { claims: Claims::default(), start: Instant::now(), at: 0 };
        play.lists(listed);
        play
    }

    fn lists(&mut self, listed: &[(&str, Option<Option<u64>>)]) {
        self.claims.listed(listed.iter().map(|(name, claim)| (instance(name, *claim), true)));
    }

    fn now(&self) -> Instant {
        self.start.add(self.at * MS)
    }

    /// A call goes to it and comes back, a millisecond each way.
    fn refused(&mut self, name: &str, hint: Option<Primary>) {
        let (id, sent) = (id(name), self.now());
        self.at += 1;
        self.claims.refused(Attempt { id: &id, serial: 1, sent }, hint);
        self.at += 1;
    }

    fn answered(&mut self, name: &str) {
        let (id, sent) = (id(name), self.now());
        self.at += 1;
        self.claims.answered(Attempt { id: &id, serial: 1, sent }, self.now());
        self.at += 1;
    }

    /// Its name, its token, and whether all calls may go there.
    fn leader(&self) -> Option<(String, Option<u64>, bool)> {
        let leader = self.claims.leader()?;
        let token = leader.token.map(FencingToken::get);
        Some((leader.instance.name.clone(), token, leader.open.is_some()))
    }

    fn tries(&mut self, names: &[&str]) -> Result<usize, u128> {
        let ids: Vec<_> = names.iter().map(|name| id(name)).collect();
        let ids: Vec<_> = ids.iter().collect();
        let now = self.now();
        let place = self.claims.next(&ids, now).map_err(|due| (due.unwrap() - now).as_millis())?;
        self.claims.trying(ids[place], 0.0, now);
        Ok(place)
    }
}

fn leads(name: &str, token: Option<u64>, open: bool) -> Option<(String, Option<u64>, bool)> {
    Some((name.to_owned(), token, open))
}

#[test]
fn what_the_registry_claims_is_tried_and_then_open_to_all() {
    let mut play = Play::of(&[("a", Some(Some(3))), ("b", None)]);
    assert_eq!(play.leader(), leads("a", Some(3), false));
    play.answered("a");
    assert_eq!(play.leader(), leads("a", Some(3), true));
}

#[test]
fn a_hint_with_a_greater_token_beats_tags_that_lag() {
    let mut play = Play::of(&[("a", Some(Some(3))), ("b", None)]);
    play.answered("a");
    play.refused("a", hint("b", 4));
    assert_eq!(play.leader(), leads("b", Some(4), false));
    play.answered("b");
    assert_eq!(play.leader(), leads("b", Some(4), true), "and the tag is still a's");
    play.lists(&[("a", Some(Some(3))), ("b", None)]);
    assert_eq!(play.leader(), leads("b", Some(4), true));
    play.lists(&[("a", None), ("b", Some(Some(4)))]);
    assert_eq!(play.leader(), leads("b", Some(4), true));
    play.lists(&[("a", Some(Some(5))), ("b", Some(Some(4)))]);
    assert_eq!(play.leader(), leads("a", Some(5), false), "the registry may be first, too");
}

#[test]
fn a_hint_with_a_lower_token_is_ignored() {
    let mut play = Play::of(&[("a", None), ("b", Some(Some(4))), ("c", None)]);
    play.answered("b");
    play.refused("c", hint("a", 3));
    assert_eq!(play.leader(), leads("b", Some(4), true));
}

#[test]
fn what_an_instance_says_of_itself_beats_what_others_say_of_it() {
    let mut play = Play::of(&[("a", Some(Some(3))), ("b", None)]);
    play.refused("a", None);
    assert_eq!(play.leader(), None);
    play.refused("b", hint("a", 3));
    assert_eq!(play.leader(), None, "it has refused in that very term");
    play.refused("b", hint("a", 5));
    assert_eq!(play.leader(), leads("a", Some(5), false), "and may have won another");
}

#[test]
fn a_tag_without_a_token_counts_again_when_it_has_been_away() {
    let mut play = Play::of(&[("a", Some(None)), ("b", None)]);
    assert_eq!(play.leader(), leads("a", None, false));
    play.refused("a", None);
    play.lists(&[("a", Some(None)), ("b", None)]);
    assert_eq!(play.leader(), None, "it lags");
    play.lists(&[("a", None), ("b", None)]);
    play.lists(&[("a", Some(None)), ("b", None)]);
    assert_eq!(play.leader(), leads("a", None, false));
}

#[test]
fn an_instance_that_serves_proves_older_claims_wrong_and_not_newer_ones() {
    let mut play = Play::of(&[("a", Some(Some(9))), ("b", None)]);
    play.answered("b");
    assert_eq!(play.leader(), leads("b", None, true), "the one with the tag is silent, say");
    play.lists(&[("a", Some(Some(10))), ("b", None)]);
    assert_eq!(play.leader(), leads("a", Some(10), false));
}

#[test]
fn a_liar_with_the_greatest_token_costs_one_attempt() {
    let mut play = Play::of(&[("a", Some(Some(3))), ("b", None), ("c", None)]);
    play.answered("a");
    play.refused("c", hint("b", u64::MAX));
    assert_eq!(play.leader(), leads("b", Some(u64::MAX), false));
    play.refused("b", hint("a", 3));
    assert_eq!(play.leader(), leads("a", Some(3), true));
    play.refused("c", hint("b", u64::MAX));
    assert_eq!(play.leader(), leads("a", Some(3), true), "not twice");
}

#[test]
fn who_names_itself_while_it_refuses_is_not_believed() {
    let mut play = Play::of(&[("a", None), ("b", None)]);
    play.refused("a", hint("a", 7));
    assert_eq!(play.leader(), None);
}

#[test]
fn who_is_not_listed_is_looked_for_and_never_leads() {
    let mut play = Play::of(&[("a", None), ("b", None)]);
    play.refused("a", hint("x", 7));
    assert_eq!((play.leader(), play.claims.sought().cloned()), (None, hint("x", 7)));
    play.lists(&[("a", None), ("b", None), ("x", None)]);
    assert_eq!((play.leader(), play.claims.sought()), (leads("x", Some(7), false), None));
    play.lists(&[("a", None), ("b", None)]);
    assert_eq!(play.leader(), None, "it has left");
}

#[test]
fn an_address_that_the_registry_writes_otherwise_is_found_by_the_name() {
    let mut play = Play::of(&[("a", None), ("b", None)]);
    let elsewhere = InstanceId::new("b.internal", 1);
    play.refused("a", Some(Primary::new("b", elsewhere, FencingToken::new(2))));
    assert_eq!(play.leader(), leads("b", Some(2), false));
}

#[test]
fn news_that_is_older_than_what_is_known_changes_nothing() {
    let mut play = Play::of(&[("a", None), ("b", None)]);
    let (a, b, early) = (id("a"), id("b"), play.now());
    play.at += 5;
    play.answered("b");
    play.claims.refused(Attempt { id: &b, serial: 1, sent: early }, None);
    assert_eq!(play.leader(), leads("b", None, true), "it was sent before b became the primary");
    play.claims.answered(Attempt { id: &a, serial: 1, sent: early }, play.now());
    assert_eq!(play.leader(), leads("b", None, true), "a long call of the primary before");
    play.refused("b", None);
    assert_eq!(play.leader(), None);
}

#[test]
fn who_does_not_refuse_in_time_is_open_only_if_it_is_claimed() {
    let mut play = Play::of(&[("a", Some(Some(3))), ("b", None)]);
    let (a, b, sent) = (id("a"), id("b"), play.now());
    play.at += 25;
    play.claims.not_refused(Attempt { id: &b, serial: 2, sent });
    assert_eq!(play.leader(), leads("a", Some(3), false), "a silent one is not the primary for it");
    play.claims.not_refused(Attempt { id: &a, serial: 1, sent });
    assert_eq!(play.leader(), leads("a", Some(3), true));
    play.claims.refused(Attempt { id: &a, serial: 1, sent }, None);
    assert_eq!(play.leader(), None, "its refusal came late");
}

#[test]
fn a_primary_that_is_connected_anew_is_tried_first() {
    let mut play = Play::of(&[("a", Some(Some(3))), ("b", None)]);
    play.answered("a");
    let (a, sent) = (id("a"), play.now());
    play.claims.not_refused(Attempt { id: &a, serial: 2, sent });
    assert_eq!(play.claims.leader().and_then(|leader| leader.open), Some(2));
}

#[test]
fn instances_are_tried_in_turn_the_claimed_one_first_and_none_too_often() {
    let mut play = Play::of(&[("a", None), ("b", Some(Some(3)))]);
    assert_eq!(play.tries(&["a", "b"]), Ok(1), "the claimed one");
    play.refused("b", None);
    assert_eq!(play.tries(&["a", "b"]), Ok(0));
    play.refused("a", None);
    assert_eq!(play.tries(&["a", "b"]), Err(1), "5 ms after the first, and 4 have passed");
    play.at = 5;
    assert_eq!(play.tries(&["a", "b"]), Ok(1));
    assert_eq!(play.tries(&["a", "b"]), Err(2));
    play.at = 7;
    assert_eq!(play.tries(&["a", "b"]), Ok(0));
}

#[test]
fn whom_a_new_word_names_is_tried_at_once_and_once() {
    let mut play = Play::of(&[("a", None), ("b", None)]);
    assert_eq!(play.tries(&["a", "b"]), Ok(0));
    play.refused("a", None);
    assert_eq!(play.tries(&["a", "b"]), Ok(1));
    play.refused("b", hint("a", 4));
    assert_eq!(play.tries(&["a", "b"]), Ok(0), "it rested");
    play.refused("a", None);
    assert!(play.tries(&["a"]).is_err());
    play.lists(&[("a", Some(Some(4))), ("b", None)]);
    assert!(play.tries(&["a"]).is_err(), "that has been refuted");
    play.lists(&[("a", Some(Some(5))), ("b", None)]);
    assert!(play.tries(&["a"]).is_err(), "two in a row are not heeded");
    play.at += 10;
    assert_eq!(play.tries(&["a"]), Ok(0));
    play.refused("a", None);
    play.lists(&[("a", Some(Some(6))), ("b", None)]);
    assert_eq!(play.tries(&["a"]), Ok(0));
    play.lists(&[("a", Some(Some(6))), ("b", None)]);
    assert!(play.tries(&["a"]).is_err(), "that is no new word");
}

/// On a fast network and on one on which a try takes longer than any rest.
#[test]
fn those_who_name_each_other_with_ever_greater_tokens_keep_nobody_from_being_tried() {
    for round_trip in [1, 150] {
        let mut play = Play::of(&[("a", None), ("b", None), ("c", None), ("d", None)]);
        let (mut tried, end, mut token) = ([0_usize; 4], 15_000, 0);
        while play.at < end {
            match play.tries(&["a", "b", "c", "d"]) {
                Ok(place) => {
                    tried[place] += 1;
                    token += 1;
                    play.at += round_trip;
                    match place {
                        0 => play.refused("a", hint("b", token)),
                        1 => play.refused("b", hint("a", token)),
                        // By an address of which the registry does not know that it is the same.
                        2 => {
                            let elsewhere = InstanceId::new("c.internal", 1);
                            play.refused("c", Some(Primary::new("c", elsewhere, FencingToken::new(token))));
                        }
                        _ => play.refused("d", None),
                    }
                }
                Err(due) => play.at += u32::try_from(due).unwrap().max(1),
            }
        }
        let [a, b, c, d] = tried;
        assert!(c.abs_diff(d) <= 1 && 10 < d, "{round_trip}: {tried:?}");
        assert!(a.max(b) <= 2 * d + 2, "{round_trip}: {tried:?}");
        assert!(a + b + c + d <= 2 * 4 * 15_000 / 50, "{round_trip}: {tried:?}");
    }
}

#[test]
fn two_primaries_of_one_term_do_not_share_a_lease() {
    let rivals = |listed: &[(&str, Option<Option<u64>>)]| {
        let rivals = Play::of(listed).claims.rivals()?;
        Some((rivals.instances.map(|it| it.name.clone()), rivals.token.get()))
    };
    let both = ["a", "c"].map(str::to_owned);
    assert_eq!(rivals(&[("a", Some(Some(3))), ("b", None), ("c", Some(Some(3)))]), Some((both, 3)));
    assert_eq!(rivals(&[("a", Some(Some(3))), ("b", None), ("c", Some(Some(4)))]), None, "a's tag lags");
    assert_eq!(rivals(&[("a", Some(None)), ("b", Some(None))]), None, "nothing is known of their terms");
    assert_eq!(rivals(&[("a", Some(Some(3))), ("a", Some(Some(3)))]), None, "one, registered twice");
}

/// How often an instance is tried until so many ms have passed without a primary.
fn tries_within(play: &mut Play, ms: u32) -> usize {
    let end = play.at + ms;
    let mut tries = 0;
    while play.at < end {
        match play.tries(&["a"]) {
            Ok(_) => tries += 1,
            Err(due) => play.at += u32::try_from(due).unwrap().max(1),
        }
    }
    tries
}

#[test]
fn the_longer_the_search_the_less_often_an_instance_is_tried_and_the_next_search_begins_anew() {
    let mut play = Play::of(&[("a", None), ("b", None)]);
    for _ in 0..2 {
        assert_eq!(tries_within(&mut play, 20), 4, "at 0, 5, 10 and 15 ms");
        assert!((8..=12).contains(&tries_within(&mut play, 180)));
        assert_eq!(tries_within(&mut play, 2000), 40);
        play.answered("b");
        play.refused("b", None);
        play.at += 100;
    }
}

#[derive(Clone, Debug)]
enum Step {
    Lists([Option<Option<u64>>; 3]),
    Refused(usize, Option<(usize, u64)>),
    Answered(usize),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let token = prop_oneof![4 => 0..6_u64, 1 => Just(u64::MAX)];
    let claim = prop::option::of(prop::option::of(token.clone()));
    let step = prop_oneof![
        [claim.clone(), claim.clone(), claim].prop_map(Step::Lists),
        (0..3_usize, prop::option::of((0..4_usize, token))).prop_map(|(by, hint)| Step::Refused(by, hint)),
        (0..3_usize).prop_map(Step::Answered),
    ];
    prop::collection::vec(step, 0..40)
}

const NAMES: [&str; 4] = ["a", "b", "c", "x"];

proptest! {
    /// Whatever was said before: the true primary is found by trying each twice at most, and no word of
    /// others afterwards takes the calls away from it for longer than one attempt.
    #[test]
    fn the_primary_is_found_whatever_was_said_before(steps in steps(), primary in 0..3_usize, lies in steps()) {
        let mut play = Play::of(&[("a", None), ("b", None), ("c", None)]);
        let step = |play: &mut Play, step: &Step| match step {
            Step::Lists(claims) => {
                let listed: Vec<_> = NAMES.iter().copied().zip(*claims).collect();
                play.lists(&listed);
            }
            Step::Refused(by, named) => play.refused(NAMES[*by], named.and_then(|(who, token)| hint(NAMES[who], token))),
            Step::Answered(by) => play.answered(NAMES[*by]),
        };
        for it in &steps {
            step(&mut play, it);
        }
        // Now it is this one, and whoever is tried says so, or lies about it.
        let mut lies = lies.into_iter();
        // Each in its turn, and each once before that.
        for _ in 0..6 {
            if play.leader().is_some_and(|(name, _, open)| open && name == NAMES[primary]) {
                break;
            }
            play.at += 100;
            let open = play.leader().filter(|(_, _, open)| *open).map(|(name, ..)| name);
            let whom = match open {
                Some(name) => NAMES.iter().position(|it| *it == name).unwrap(),
                None => play.tries(&NAMES[..3]).expect("all have rested"),
            };
            if whom == primary {
                play.answered(NAMES[whom]);
            } else {
                let lie = match lies.next() { Some(Step::Refused(_, named)) => named, _ => None };
                play.refused(NAMES[whom], lie.and_then(|(who, token)| hint(NAMES[who], token)));
            }
        }
        prop_assert_eq!(play.leader().map(|(name, _, open)| (name, open)), Some((NAMES[primary].to_owned(), true)));
    }
}
