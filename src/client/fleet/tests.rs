use proptest::prelude::*;

use super::*;

/// A connection is a number here.
type Conn = u32;

struct Bench {
    fleet: Fleet<Conn>,
    now: Instant,
    conns: u32,
}

impl Settings {
    /// Those that tests have, where they want none other.
    pub(crate) fn of_tests() -> Self {
        Self {
            policy: Policy::PickFirst,
            spares: 1,
            registry_order: true,
            ejection: Ejection { first: Duration::from_millis(500), at_most: Duration::from_secs(30) },
            failback_after: Duration::from_secs(5),
            demote_after: Duration::from_secs(4),
            keep_warm: false,
            panic_threshold: 50,
            primary_only: false,
            watches_health: false,
            seed: 7,
            without: FleetWithout::default(),
        }
    }
}

fn settings() -> Settings {
    Settings::of_tests()
}

fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

impl Bench {
    fn new(settings: Settings, others: usize) -> Self {
        let now = Instant::now();
        let mut fleet = Fleet::new(settings, now);
        fleet.set_others(&vec![None; others]);
        Self { fleet, now, conns: 0 }
    }

    fn list(&mut self, tier: usize, names: &[&str]) -> Vec<Conn> {
        let instances = names
            .iter()
            .map(|name| Arc::new(Instance::new(*name, name, 1, format!("dc{}", tier + 1))))
            .collect();
        let word = Word { answered: true, ..Word::default() };
        self.fleet.hear(tier, word, Some(&Snapshot { instances }))
    }

    /// As `list`, with these in the state of warning.
    fn list_warning(&mut self, names: &[&str], warning: &[&str]) {
        let instance = |name: &&str| {
            let mut instance = Instance::new(*name, name, 1, "dc1");
            instance.warning = warning.contains(name);
            Arc::new(instance)
        };
        let instances = names.iter().map(instance).collect();
        let word = Word { answered: true, ..Word::default() };
        self.fleet.hear(0, word, Some(&Snapshot { instances }));
    }

    fn plan(&mut self) -> Plan<Conn> {
        self.fleet.plan(self.now)
    }

    /// Plans, and lets every dial succeed except to `dead`; until nothing is dialled.
    fn settle(&mut self, dead: &[&str]) -> Plan<Conn> {
        loop {
            let mut plan = self.plan();
            for (tier, &ask) in plan.ask.clone().iter().enumerate() {
                if ask && tier > 0 && self.fleet.tiers[tier].asked_since.is_none() {
                    self.fleet.asked(tier, self.now);
                }
            }
            let dials = std::mem::take(&mut plan.dial);
            if dials.is_empty() {
                return plan;
            }
            for Dial { key, attempt } in dials {
                if dead.iter().any(|name| key.id.authority().starts_with(name)) {
                    self.fleet.refused(&key, attempt, "refused".into(), 0.5, self.now);
                } else {
                    self.conns += 1;
                    self.fleet.connected(&key, attempt, self.conns, self.now).expect("wanted");
                }
            }
        }
    }

    /// The names that are bound, the preferred one first.
    fn bound(&self, plan: &Plan<Conn>) -> Vec<String> {
        let name = |conn: Conn| {
            let members = self.fleet.tiers.iter().flat_map(|t| t.members.values());
            members
                .filter(|m| matches!(m.link, Link::Ready { conn: c, .. } if c == conn))
                .map(|m| m.instance.name.clone())
                .next()
                .expect("known")
        };
        plan.bound.iter().flat_map(|b| b.endpoints.iter().map(|&c| name(c))).collect()
    }

    fn conn(&self, name: &str) -> Conn {
        let members = self.fleet.tiers.iter().flat_map(|t| t.members.values());
        members
            .filter(|m| m.instance.name == name)
            .find_map(|m| match m.link {
                Link::Ready { conn, .. } => Some(conn),
                _ => None,
            })
            .expect("connected")
    }

    fn lose(&mut self, name: &str) {
        let conn = self.conn(name);
        self.fleet.lost(|&c| c == conn, false, "lost", 0.5, self.now);
    }
}

#[tokio::test]
async fn pick_first_connects_one_and_a_spare_and_no_more() {
    let mut bench = Bench::new(settings(), 0);
    bench.list(0, &["a", "b", "c"]);
    let plan = bench.settle(&[]);
    assert_eq!(bench.bound(&plan), ["a", "b"]);
}

#[tokio::test]
async fn a_connection_is_replaced_in_its_place_and_not_after_it_is_gone() {
    let mut bench = Bench::new(settings(), 0);
    bench.list(0, &["a", "b"]);
    bench.settle(&[]);
    let old = bench.conn("a");
    assert_eq!(bench.fleet.replace(|&c| c == old, 99), None);
    let plan = bench.settle(&[]);
    assert_eq!(bench.bound(&plan), ["a", "b"]);
    assert_eq!((bench.conn("a"), plan.retire), (99, vec![]));
    assert_eq!(bench.fleet.replace(|&c| c == old, 100), Some(100));
}

#[tokio::test]
async fn what_passes_is_connected_and_preferred_to_what_warns() {
    let mut bench = Bench::new(Settings { spares: 0, ..settings() }, 0);
    bench.list(0, &["a", "b"]);
    let plan = bench.settle(&[]);
    assert_eq!(bench.bound(&plan), ["a"]);
    bench.list_warning(&["a", "b"], &["a"]);
    let plan = bench.settle(&[]);
    assert_eq!(bench.bound(&plan), ["b"]);
    // Among equals the one in use stays.
    bench.list_warning(&["a", "b"], &["a", "b"]);
    let plan = bench.settle(&[]);
    assert_eq!(bench.bound(&plan), ["b"]);
}

#[tokio::test]
async fn round_robin_leaves_out_what_warns_while_another_passes() {
    let mut bench = Bench::new(Settings { policy: Policy::RoundRobin, ..settings() }, 0);
    bench.list_warning(&["a", "b", "c"], &["a", "b"]);
    let plan = bench.settle(&[]);
    assert_eq!(bench.bound(&plan), ["c"]);
    bench.lose("c");
    let plan = bench.settle(&["c"]);
    assert_eq!(bench.bound(&plan), ["a", "b"]);
}

#[tokio::test]
async fn round_robin_connects_all() {
    let mut bench = Bench::new(Settings { policy: Policy::RoundRobin, ..settings() }, 0);
    bench.list(0, &["a", "b", "c"]);
    let plan = bench.settle(&[]);
    assert_eq!(bench.bound(&plan), ["a", "b", "c"]);
}

#[tokio::test]
async fn the_preferred_instance_stays_preferred_when_better_ones_appear() {
    let mut bench = Bench::new(settings(), 0);
    bench.list(0, &["b"]);
    bench.settle(&[]);
    bench.list(0, &["a", "b"]);
    let plan = bench.settle(&[]);
    assert_eq!(bench.bound(&plan), ["b", "a"]);
}

#[tokio::test]
async fn a_lost_one_is_replaced_by_its_spare_and_dialled_again_at_once() {
    let mut bench = Bench::new(settings(), 0);
    bench.list(0, &["a", "b", "c"]);
    bench.settle(&[]);
    bench.lose("a");
    let plan = bench.plan();
    assert_eq!(bench.bound(&plan), ["b"]);
    assert_eq!(plan.dial.len(), 1);
    assert_eq!(plan.dial[0].key.id.authority(), "a:1");
}

#[tokio::test]
async fn a_refused_one_rests_and_another_is_dialled_in_its_place() {
    let mut bench = Bench::new(settings(), 0);
    bench.list(0, &["a", "b", "c"]);
    bench.settle(&[]);
    bench.lose("a");
    let plan = bench.settle(&["a"]);
    assert_eq!(bench.bound(&plan), ["b", "c"]);
    assert_eq!(bench.fleet.status(0, bench.now).ejected, 1);
}

#[tokio::test]
async fn silent_hosts_hold_nobody_up() {
    let mut bench = Bench::new(Settings { spares: 0, ..settings() }, 0);
    bench.list(0, &["a", "b", "c"]);
    let first = bench.plan();
    assert_eq!(first.dial.len(), 1);
    assert_eq!(first.wake, Some(bench.now + tier::HEAD_START), "nothing has answered: try another soon");
    assert!(bench.plan().dial.is_empty(), "not before");
    bench.now += tier::HEAD_START;
    assert_eq!(bench.plan().dial.len(), 1);
    bench.now += tier::HEAD_START;
    assert_eq!(bench.plan().dial.len(), 1);
}

#[tokio::test]
async fn an_instance_that_left_the_list_goes_at_once_and_its_connection_is_given_back() {
    let mut bench = Bench::new(settings(), 0);
    bench.list(0, &["a", "b"]);
    bench.settle(&[]);
    let a = bench.conn("a");
    assert_eq!(bench.list(0, &["b"]), [a]);
    let plan = bench.plan();
    assert_eq!(bench.bound(&plan), ["b"]);
}

#[tokio::test]
async fn news_of_a_return_ends_the_rest() {
    let mut bench = Bench::new(settings(), 0);
    bench.list(0, &["a", "b"]);
    bench.settle(&["a"]);
    assert!(bench.plan().dial.is_empty(), "resting");
    bench.list(0, &["b"]);
    bench.list(0, &["a", "b"]);
    assert_eq!(bench.plan().dial.len(), 1, "the registry has seen it come back");
}

#[tokio::test]
async fn a_list_that_is_suddenly_empty_keeps_the_instances_and_their_return_ends_the_rest() {
    let mut bench = Bench::new(settings(), 0);
    bench.list(0, &["a", "b"]);
    bench.settle(&["b"]);
    let empty = Word { answered: true, empty_since: Some(bench.now), ..Word::default() };
    assert!(bench.fleet.hear(0, empty, Some(&Snapshot::default())).is_empty());
    let plan = bench.plan();
    assert_eq!(bench.bound(&plan), ["a"]);
    bench.list(0, &["a", "b"]);
    assert_eq!(bench.plan().dial.len(), 1);
}

#[tokio::test]
async fn nothing_usable_here_asks_the_others_and_the_first_usable_one_wins() {
    let mut bench = Bench::new(settings(), 2);
    bench.list(0, &["a"]);
    let plan = bench.settle(&[]);
    assert_eq!(plan.ask, [true, false, false], "no need");
    bench.lose("a");
    let plan = bench.settle(&["a"]);
    assert_eq!(plan.ask, [true, true, true], "all at once");
    bench.list(2, &["z"]);
    let plan = bench.settle(&["a"]);
    assert_eq!(plan.bound.as_ref().map(|b| b.tier), Some(2), "the nearer one has not answered");
    bench.list(1, &["y"]);
    let plan = bench.settle(&["a"]);
    assert_eq!(plan.bound.as_ref().map(|b| b.tier), Some(1), "and is moved to as soon as it does");
    assert_eq!(plan.ask, [true, true, false], "the farther one is no longer needed");
}

#[tokio::test]
async fn calls_return_once_the_own_datacenter_has_been_usable_for_a_while() {
    let mut bench = Bench::new(settings(), 1);
    bench.list(0, &["a"]);
    bench.settle(&["a"]);
    bench.list(1, &["z"]);
    let plan = bench.settle(&["a"]);
    assert_eq!(plan.bound.as_ref().map(|b| b.tier), Some(1));
    bench.now += ms(700);
    let plan = bench.settle(&[]);
    assert_eq!(plan.bound.as_ref().map(|b| b.tier), Some(1), "not yet");
    let due = plan.wake.expect("due");
    assert_eq!(due, bench.now + settings().failback_after);
    bench.now = due;
    let plan = bench.plan();
    assert_eq!(bench.bound(&plan), ["a"]);
    assert_eq!(plan.retire.len(), 1, "the other datacenter's connection is given up after the move");
    assert_eq!(plan.ask, [true, false]);
}

#[tokio::test]
async fn an_unsteady_own_datacenter_is_not_returned_to() {
    let mut bench = Bench::new(settings(), 1);
    bench.list(0, &["a"]);
    bench.settle(&["a"]);
    bench.list(1, &["z"]);
    bench.settle(&["a"]);
    bench.now += ms(700);
    bench.settle(&[]);
    bench.now += ms(4000);
    bench.lose("a");
    bench.settle(&["a"]);
    bench.now += ms(2000);
    bench.settle(&[]);
    bench.now += ms(4900);
    let plan = bench.settle(&[]);
    assert_eq!(plan.bound.as_ref().map(|b| b.tier), Some(1), "it was lost in between");
}

#[tokio::test]
async fn a_list_that_stays_empty_is_demoted_and_remains_the_last_resort() {
    let mut bench = Bench::new(settings(), 1);
    bench.list(0, &["a"]);
    bench.settle(&[]);
    let empty = Word { answered: true, empty_since: Some(bench.now), ..Word::default() };
    bench.fleet.hear(0, empty, None);
    let plan = bench.settle(&[]);
    assert_eq!(plan.ask, [true, false]);
    assert_eq!(plan.wake, Some(bench.now + settings().demote_after));
    bench.now += settings().demote_after;
    let plan = bench.settle(&[]);
    assert_eq!(plan.ask, [true, true]);
    assert_eq!(bench.bound(&plan), ["a"], "nothing better has answered");
    bench.list(1, &["z"]);
    let plan = bench.settle(&[]);
    assert_eq!(plan.bound.as_ref().map(|b| b.tier), Some(1));
    bench.lose("z");
    let plan = bench.settle(&["z"]);
    assert_eq!(bench.bound(&plan), ["a"], "the last resort");
}

#[tokio::test]
async fn a_connection_that_is_being_replaced_is_no_reason_to_leave_the_datacenter() {
    let mut bench = Bench::new(Settings { keep_warm: true, ..settings() }, 1);
    bench.list(0, &["a"]);
    bench.settle(&[]);
    bench.list(1, &["z"]);
    bench.settle(&[]);
    bench.lose("a");
    let plan = bench.plan();
    assert!(plan.bound.is_none(), "a is dialled again this moment");
    assert!(!plan.hopeless);
    bench.now += tier::HEAD_START;
    let plan = bench.plan();
    assert_eq!(bench.bound(&plan), ["z"], "it has had its head start");
}

#[tokio::test]
async fn kept_warm_one_connection_to_each_other_datacenter_is_ready() {
    let mut bench = Bench::new(Settings { keep_warm: true, ..settings() }, 1);
    bench.list(0, &["a"]);
    bench.settle(&[]);
    bench.list(1, &["y", "z"]);
    let plan = bench.settle(&[]);
    assert_eq!(bench.bound(&plan), ["a"]);
    assert_eq!(bench.fleet.status(1, bench.now).ready, 1);
    bench.lose("a");
    let plan = bench.settle(&["a"]);
    assert_eq!(bench.bound(&plan).first().map(String::as_str), Some("y"), "without asking anybody first");
}

#[tokio::test]
async fn a_long_rest_is_cut_short_when_nothing_else_is_left() {
    let mut bench = Bench::new(settings(), 0);
    bench.list(0, &["a", "b"]);
    bench.settle(&["a"]);
    for _ in 0..12 {
        bench.now += Duration::from_secs(40);
        bench.settle(&["a"]);
    }
    bench.lose("b");
    bench.settle(&["a", "b"]);
    bench.now += ms(500);
    let plan = bench.plan();
    assert!(plan.dial.iter().any(|d| d.key.id.authority() == "a:1"), "waiting gains nothing");
}

#[tokio::test]
async fn a_late_answer_to_a_given_up_attempt_is_handed_back() {
    let mut bench = Bench::new(settings(), 0);
    bench.list(0, &["a"]);
    let dial = bench.plan().dial.remove(0);
    bench.list(0, &["b"]);
    assert_eq!(bench.fleet.connected(&dial.key, dial.attempt, 1, bench.now), Err(1));
}

#[tokio::test]
async fn what_is_known_of_a_datacenter_moves_with_it() {
    let mut bench = Bench::new(settings(), 2);
    bench.list(0, &[]);
    bench.settle(&[]);
    bench.list(1, &["b"]);
    bench.list(2, &["c"]);
    let plan = bench.settle(&[]);
    assert_eq!(bench.bound(&plan), ["b"]);
    let b = bench.conn("b");
    // A new one comes in between, which has not been heard yet.
    assert_eq!(bench.fleet.set_others(&[None, Some(1), Some(2)]), Vec::<Conn>::new());
    assert_eq!((bench.fleet.bound_tier(), bench.fleet.len()), (Some(2), 4));
    let plan = bench.settle(&[]);
    assert_eq!((plan.bound.expect("it stays").endpoints, plan.retire), (vec![b], Vec::new()));
    // One that is no more gives its connections up.
    assert_eq!(bench.fleet.set_others(&[Some(3)]), [b]);
    assert_eq!(bench.fleet.bound_tier(), None);
    let plan = bench.settle(&[]);
    assert_eq!(bench.bound(&plan), ["c"]);
}

#[tokio::test]
async fn an_attempt_under_way_ends_well_though_its_datacenter_has_moved() {
    let mut bench = Bench::new(settings(), 2);
    bench.list(0, &[]);
    bench.settle(&[]);
    bench.list(2, &["c"]);
    let Dial { key, attempt } = bench.plan().dial.remove(0);
    bench.fleet.set_others(&[Some(2), Some(1)]);
    assert_eq!(bench.fleet.connected(&key, attempt, 1, bench.now), Ok(false));
    let plan = bench.settle(&[]);
    assert_eq!(bench.bound(&plan), ["c"]);
}

#[tokio::test(start_paused = true)]
async fn where_hundreds_are_wanted_a_few_are_dialled_at_a_time() {
    let names: Vec<String> = (0..100).map(|n| format!("i{n:03}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let mut bench = Bench::new(Settings { policy: Policy::RoundRobin, ..settings() }, 0);
    bench.list(0, &names);
    let mut first = bench.plan().dial;
    assert_eq!(first.len(), 32);
    assert!(bench.plan().dial.is_empty(), "until one has ended");
    let Dial { key, attempt } = first.remove(0);
    bench.fleet.connected(&key, attempt, 1, bench.now).expect("wanted");
    assert_eq!(bench.plan().dial.len(), 1);
    // The silent hold nobody up.
    bench.now += ms(250);
    let plan = bench.plan();
    assert_eq!(plan.dial.len(), 32);
    assert!(plan.wake.is_some());
    bench.now += ms(250);
    assert_eq!(bench.settle(&[]).bound.expect("bound").endpoints.len(), 1 + 100 - 33 - 32);
}

#[tokio::test]
async fn who_is_listed_no_longer_is_used_until_one_that_is_listed_is_ready_and_not_dialled_again() {
    let mut bench = Bench::new(settings(), 0);
    bench.list(0, &["a", "b"]);
    bench.settle(&[]);
    let (a, b) = (bench.conn("a"), bench.conn("b"));
    assert_eq!(bench.list(0, &["c"]), Vec::<Conn>::new(), "calls have nowhere else to go");
    let plan = bench.settle(&["c"]);
    assert_eq!(bench.bound(&plan), ["a", "b"]);
    let status = bench.fleet.status(0, bench.now);
    assert_eq!((status.known, status.ready, status.ejected, status.unlisted), (1, 0, 1, 2));
    // One that fails has nobody who speaks for it.
    bench.lose("a");
    let plan = bench.settle(&["c"]);
    assert_eq!(bench.bound(&plan), ["b"]);
    assert_eq!(bench.fleet.status(0, bench.now).unlisted, 1);
    // Nothing that is listed is ready: it is tried soon.
    bench.now += ms(500);
    let plan = bench.settle(&[]);
    assert_eq!(bench.bound(&plan), ["c"]);
    assert_eq!((plan.retire, bench.fleet.status(0, bench.now).unlisted), (vec![b], 0));
    assert_ne!(bench.conn("c"), a);
}

#[tokio::test]
async fn who_is_listed_no_longer_comes_behind_every_other_datacenter() {
    let mut bench = Bench::new(settings(), 1);
    bench.list(0, &["a"]);
    bench.settle(&[]);
    bench.list(0, &["c"]);
    let plan = bench.settle(&["c"]);
    assert_eq!((bench.bound(&plan), plan.ask), (vec!["a".to_owned()], vec![true, true]));
    bench.list(1, &["z"]);
    let plan = bench.settle(&["c"]);
    assert_eq!(bench.bound(&plan), ["z"]);
    bench.lose("z");
    let plan = bench.settle(&["c", "z"]);
    assert_eq!(bench.bound(&plan), ["a"], "the last resort");
    bench.now += ms(500);
    let plan = bench.settle(&["z"]);
    assert_eq!(bench.bound(&plan), ["c"]);
}

#[tokio::test]
async fn who_is_listed_again_is_one_like_any_other() {
    let mut bench = Bench::new(settings(), 0);
    bench.list(0, &["a"]);
    bench.settle(&[]);
    let a = bench.conn("a");
    bench.list(0, &["c"]);
    bench.settle(&["c"]);
    bench.list(0, &["a", "c"]);
    let plan = bench.settle(&["c"]);
    assert_eq!((bench.bound(&plan), bench.conn("a")), (vec!["a".to_owned()], a));
    let status = bench.fleet.status(0, bench.now);
    assert_eq!((status.known, status.ready, status.unlisted), (2, 1, 0));
}

#[tokio::test]
async fn what_is_to_forget_the_list_on_purpose_forgets_all_of_it() {
    let mut bench = Bench::new(settings(), 0);
    bench.list(0, &["a"]);
    bench.settle(&[]);
    let a = bench.conn("a");
    assert_eq!(bench.list(0, &[]), [a]);
    assert!(bench.settle(&[]).bound.is_none());
}

/// Instances by number, of which one is good and the others say nothing or refuse.
struct Crowd {
    bench: Bench,
    refuses: Vec<bool>,
    /// For each the number of its latest dial.
    dialled: Vec<u64>,
    dials: u64,
    /// Attempts that nobody answers: when they end.
    silent: Vec<(Instant, Key, u64)>,
    /// The latest dials.
    recent: Vec<Instant>,
}

impl Crowd {
    const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);

    fn new(settings: Settings, refuses: Vec<bool>) -> Self {
        let mut bench = Bench::new(settings, 1);
        let names: Vec<String> = (0..refuses.len()).map(|n| format!("i{n:04}")).collect();
        bench.list(0, &names.iter().map(String::as_str).collect::<Vec<_>>());
        let dialled = vec![0; refuses.len()];
        Self { bench, refuses, dialled, dials: 0, silent: Vec::new(), recent: Vec::new() }
    }

    fn number(key: &Key) -> usize {
        key.id.authority()[1..5].parse().expect("a number")
    }

    /// One plan and what comes of it. Returns what is bound; moves the clock to the next event, if any,
    /// where nothing more happens at once.
    fn step(&mut self, good: Option<usize>) -> Plan<Conn> {
        let now = self.bench.now;
        for (_, key, attempt) in self.silent.extract_if(.., |(ends, ..)| *ends <= now) {
            self.bench.fleet.refused(&key, attempt, "silent".into(), 0.5, now);
        }
        let members = || {
            let number = |id: &InstanceId| Self::number(&Key { tier: 0, id: id.clone() });
            self.bench.fleet.tiers[0].members.iter().map(move |(id, member)| (number(id), member))
        };
        let starving = self.bench.fleet.is_starving();
        let waits = |m: &Member<Conn>| {
            matches!(m.link, Link::Idle) && m.rests_until(starving).is_none_or(|until| until <= now)
        };
        let idle: Vec<_> = members().filter(|(_, m)| waits(m)).map(|(number, _)| number).collect();
        let lost = members().find(|(_, m)| matches!(m.turn(), member::Turn::Lost { .. })).map(|it| it.0);
        let mut plan = self.bench.plan();
        let dials = std::mem::take(&mut plan.dial);
        let chosen: Vec<_> = dials.iter().map(|dial| Self::number(&dial.key)).collect();
        let left = idle.iter().filter(|n| !chosen.contains(n)).map(|&n| self.dialled[n]).min();
        for Dial { key, attempt } in dials {
            let number = Self::number(&key);
            assert!(
                lost == Some(number) || left.is_none_or(|left| self.dialled[number] <= left),
                "{number} has its turn before one that has waited longer"
            );
            self.dials += 1;
            self.dialled[number] = self.dials;
            self.recent.push(now);
            if good == Some(number) {
                self.bench.conns += 1;
                self.bench.fleet.connected(&key, attempt, self.bench.conns, now).expect("wanted");
            } else if self.refuses[number] {
                self.bench.fleet.refused(&key, attempt, "refused".into(), 0.5, now);
            } else {
                self.silent.push((now + Self::CONNECT_TIMEOUT, key, attempt));
            }
        }
        self.recent.retain(|&at| now - at < tier::HEAD_START);
        assert!(
            self.recent.len() <= dialling::DIALS_AT_ONCE + dialling::FAILURES_AT_ONCE,
            "a flood of dials"
        );
        if chosen.is_empty() {
            let ends = self.silent.iter().map(|(ends, ..)| *ends).min();
            let next = [plan.wake, ends].into_iter().flatten().min();
            self.bench.now = next.unwrap_or(now + tier::HEAD_START);
        }
        plan
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// Whatever place it has, however long all of them have been out before, and whatever it was itself.
    #[test]
    fn the_one_that_answers_is_dialled_soon_among_any_number_that_do_not(
        refuses in prop::collection::vec(any::<bool>(), 1..300),
        good in any::<prop::sample::Index>(),
        spares in 0..3_usize,
        outage in 0..8000_u64,
        served_before in any::<bool>(),
        settled in any::<bool>(),
    ) {
        let count = refuses.len();
        let good = good.index(count);
        let mut crowd = Crowd::new(Settings { spares, ..settings() }, refuses);
        let is_bound = |plan: &Plan<Conn>| plan.bound.is_some();
        let reach = |crowd: &mut Crowd| {
            let within = ms(3000) + ms(1000) * u32::try_from(count).expect("few") / 128;
            let latest = crowd.bench.now + within;
            while !is_bound(&crowd.step(Some(good))) {
                assert!(crowd.bench.now <= latest, "one among {count} was not dialled within {within:?}");
            }
        };
        if served_before {
            reach(&mut crowd);
            let lost = crowd.bench.now + ms(if settled { 20_000 } else { 0 });
            while crowd.bench.now < lost {
                crowd.step(Some(good));
                if count <= 1 + spares {
                    break;
                }
            }
            let name = format!("i{good:04}");
            crowd.bench.lose(&name);
            prop_assert!(is_bound(&crowd.step(Some(good))) || is_bound(&crowd.step(Some(good))), "first of all");
            crowd.bench.lose(&name);
        }
        let ends = crowd.bench.now + ms(outage);
        while crowd.bench.now < ends {
            crowd.step(None);
        }
        reach(&mut crowd);
    }
}

#[tokio::test]
async fn a_datacenter_full_of_silent_instances_has_one_head_start_and_no_more() {
    let mut crowd = Crowd::new(settings(), vec![false; 400]);
    let start = crowd.bench.now;
    loop {
        let plan = crowd.step(None);
        if plan.ask[1] {
            assert!(plan.hopeless && plan.need_others);
            break;
        }
        assert!(crowd.bench.now <= start + tier::HEAD_START, "nobody else has been asked");
    }
}

#[tokio::test]
async fn where_one_is_in_use_its_missing_spares_are_sought_one_at_a_time() {
    let mut crowd = Crowd::new(settings(), vec![false; 40]);
    while crowd.step(Some(0)).bound.is_none() {}
    let (start, before) = (crowd.bench.now, crowd.dials);
    while crowd.bench.now < start + ms(5000) {
        crowd.step(Some(0));
    }
    let dials = crowd.dials - before;
    assert!((15..=21).contains(&dials), "{dials} dials in 5 s");
}

const NAMES: [[&str; 3]; 2] = [["a", "b", "c"], ["x", "y", "z"]];

fn named(tier: usize, mask: u8) -> Vec<&'static str> {
    let at = |n: usize| (mask >> n & 1 == 1).then_some(NAMES[tier][n]);
    (0..3).filter_map(at).collect()
}

#[derive(Clone, Debug)]
enum Step {
    /// The registry of a datacenter lists these; never none.
    List(usize, u8),
    /// These are dead from now on, and lose their connections.
    Dead(u8, u8),
    Wait(u64),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        (0..2_usize, 1..8_u8).prop_map(|(tier, mask)| Step::List(tier, mask)),
        (0..8_u8, 0..8_u8).prop_map(|(here, there)| Step::Dead(here, there)),
        (0..8000_u64).prop_map(Step::Wait),
    ]
}

proptest! {
    /// Whatever the registries list and whoever dies.
    #[test]
    fn something_is_bound_while_anything_is_connected_and_what_is_listed_goes_first(
        steps in prop::collection::vec(step(), 1..40),
        keep_warm in any::<bool>(),
        round_robin in any::<bool>(),
    ) {
        let policy = if round_robin { Policy::RoundRobin } else { Policy::PickFirst };
        let mut bench = Bench::new(Settings { keep_warm, policy, ..settings() }, 1);
        let mut dead: Vec<&str> = Vec::new();
        // The own datacenter has been heard: until then it has its head start.
        bench.list(0, &named(0, 1));
        for step in steps {
            match step {
                Step::List(tier, mask) => drop(bench.list(tier, &named(tier, mask))),
                Step::Dead(here, there) => {
                    dead = named(0, here).into_iter().chain(named(1, there)).collect();
                    let members = || bench.fleet.tiers.iter().flat_map(|t| t.members.values());
                    let lost = |m: &&Member<Conn>| m.is_ready() && dead.contains(&m.instance.name.as_str());
                    let lost: Vec<_> = members().filter(lost).map(|m| m.instance.name.clone()).collect();
                    lost.iter().for_each(|name| bench.lose(name));
                }
                Step::Wait(time) => bench.now += ms(time),
            }
            let plan = bench.settle(&dead);
            // What is given up in one plan is gone in the next.
            let plan = if plan.retire.is_empty() { plan } else { bench.settle(&dead) };
            let ready = |m: &Member<Conn>| m.is_ready();
            let any = |is_so: fn(&Member<Conn>) -> bool| {
                bench.fleet.tiers.iter().flat_map(|t| t.members.values()).any(is_so)
            };
            prop_assert_eq!(plan.bound.is_some(), any(ready));
            let bound = bench.bound(&plan);
            let unlisted = |name: &String| {
                let mut members = bench.fleet.tiers.iter().flat_map(|t| t.members.values());
                members.any(|m| m.unlisted && m.instance.name == *name)
            };
            prop_assert!(!any(Member::is_ready_by_list) || !bound.iter().any(unlisted));
            for tier in &bench.fleet.tiers {
                let left = tier.members.values().filter(|m| m.unlisted).count();
                prop_assert!(left == 0 || !tier.has_ready());
                prop_assert!(tier.members.values().all(|m| !m.unlisted || m.is_ready()));
            }
        }
    }
}

#[test]
fn without_a_primary_whoever_was_ejected_is_soon_tried_again_for_it_may_be_the_one() {
    let mut bench = Bench::new(Settings { primary_only: true, ..settings() }, 0);
    bench.list(0, &["a", "b"]);
    bench.settle(&[]);
    let id = |name: &str| Instance::new(name, name, 1, "dc1").id;
    bench.fleet.prefer(Some(&id("a")));
    let b = bench.conn("b");
    // Ejected so often that its rest is a long one.
    for _ in 0..12 {
        let conn = bench.conn("b");
        bench.fleet.eject(|it| *it == conn, "silent".into(), 0.5, bench.now);
        bench.now += ms(60_000);
        bench.settle(&[]);
    }
    assert_ne!(bench.conn("b"), b);
    let conn = bench.conn("b");
    bench.fleet.eject(|it| *it == conn, "silent".into(), 0.5, bench.now);
    bench.now += ms(600);
    assert!(bench.plan().dial.is_empty(), "the primary is there: the other is left alone");
    bench.fleet.prefer(None);
    let dialled: Vec<_> = bench.plan().dial.into_iter().map(|it| it.key.id).collect();
    assert_eq!(dialled, [id("b")], "nobody is known to be the primary");
    bench.fleet.prefer(Some(&id("b")));
    let again = bench.plan().dial;
    assert!(again.is_empty(), "one attempt at a time: {again:?}");
}
