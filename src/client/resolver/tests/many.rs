//! More services than long polls, on a paused clock.

use super::*;

const SEATS: usize = 3;
const SERVICES: usize = 20;
const EVERY: Duration = Duration::from_secs(10);

/// A registry that answers as Consul does, and counts.
struct World {
    indexes: Vec<watch::Sender<u64>>,
    seen: Mutex<Seen>,
}

#[derive(Default)]
struct Seen {
    polls: usize,
    most_polls: usize,
    /// When each service was last asked about, or waited for.
    last: Vec<Option<Instant>>,
    longest_unread: Duration,
    /// How often each had a long poll.
    turns: Vec<u32>,
    first: Vec<Instant>,
    failing: bool,
    /// Answers, and knows no leader.
    leaderless: bool,
    reads: usize,
}

struct Fake(Arc<World>, usize);

/// A question under way; it may be given up.
struct Asked {
    world: Arc<World>,
    at: usize,
    waits: bool,
}

impl Asked {
    fn new(world: &Arc<World>, at: usize, waits: bool) -> Self {
        world.begin(at, waits);
        Self { world: Arc::clone(world), at, waits }
    }
}

impl Drop for Asked {
    fn drop(&mut self) {
        let mut seen = self.world.seen.lock();
        seen.last[self.at] = Some(Instant::now());
        seen.polls -= usize::from(self.waits);
    }
}

impl Registry for Fake {
    fn ask(&self, question: registry::Question) -> Asking {
        let (world, at) = (Arc::clone(&self.0), self.1);
        let registry::Question { seen: after, wait, .. } = question;
        Box::pin(async move {
            let mut index = world.indexes[at].subscribe();
            let asked = Asked::new(&world, at, after.is_some());
            if let Some(after) = after {
                // Consul adds up to a sixteenth.
                let _ = timeout(wait * 33 / 32, index.wait_for(|it| *it > after)).await;
            } else {
                sleep(Duration::from_millis(1)).await;
            }
            drop(asked);
            if world.seen.lock().failing {
                return Err(RegistryError::NoServers);
            }
            let index = *index.borrow();
            let mut answer = answer(index, &[&index.to_string()]);
            answer.known_leader = Some(!world.seen.lock().leaderless);
            Ok(answer.into())
        })
    }
}

impl World {
    fn new() -> Arc<Self> {
        let seen = Seen { last: vec![None; SERVICES], turns: vec![0; SERVICES], ..Seen::default() };
        Arc::new(Self {
            indexes: (0..SERVICES).map(|_| watch::Sender::new(7)).collect(),
            seen: Mutex::new(seen),
        })
    }

    fn watch(self: &Arc<Self>) -> Vec<Resolver> {
        let settings = ResolverSettings { turns: Turns::new(SEATS, EVERY), ..ResolverSettings::default() };
        (0..SERVICES)
            .map(|at| {
                let (fake, settings) = (Arc::new(Fake(Arc::clone(self), at)), settings.clone());
                Resolver::run(fake, "counter".into(), settings, HasherRng::new(), tracing::Span::none())
            })
            .collect()
    }

    fn begin(&self, at: usize, waits: bool) {
        let (seen, now) = (&mut *self.seen.lock(), Instant::now());
        match seen.last[at] {
            Some(last) => seen.longest_unread = seen.longest_unread.max(now - last),
            None => seen.first.push(now),
        }
        seen.reads += usize::from(!waits);
        if waits {
            seen.turns[at] += 1;
            seen.polls += 1;
            seen.most_polls = seen.most_polls.max(seen.polls);
        }
    }

    fn change(&self, at: usize) {
        self.indexes[at].send_modify(|it| *it += 1);
    }
}

/// Changes one service, and says how long it took to be known.
async fn unseen(world: &World, resolvers: &[Resolver], at: usize) -> Duration {
    let (mut resolved, begun) = (resolvers[at].watch(), Instant::now());
    world.change(at);
    let now = world.indexes[at].borrow().to_string();
    let known = resolved.wait_for(|it| names(it) == [now.as_str()]);
    drop(timeout(Duration::from_secs(3600), known).await.expect("it is seen").unwrap());
    begun.elapsed()
}

#[tokio::test(start_paused = true)]
async fn beyond_the_long_polls_services_take_turns_and_each_is_read_in_time() {
    let world = World::new();
    let resolvers = world.watch();
    sleep(Duration::from_secs(600)).await;
    {
        let seen = world.seen.lock();
        assert_eq!(seen.most_polls, SEATS);
        assert!(seen.longest_unread <= EVERY, "{:?}", seen.longest_unread);
        // A round is 7 turns of some 10 s.
        let (least, most) = (seen.turns.iter().min(), seen.turns.iter().max());
        assert!(least >= Some(&6) && most <= Some(&12), "{:?}", seen.turns);
    }
    for at in 0..SERVICES {
        assert!(unseen(&world, &resolvers, at).await <= EVERY);
    }
}

#[tokio::test(start_paused = true)]
async fn a_service_that_keeps_changing_keeps_its_long_poll_and_the_others_share_the_rest() {
    let world = World::new();
    let resolvers = world.watch();
    sleep(Duration::from_secs(100)).await;
    while unseen(&world, &resolvers, 0).await > Duration::ZERO {
        sleep(Duration::from_secs(3)).await;
    }
    let before = world.seen.lock().turns.clone();
    for _ in 0..200 {
        sleep(Duration::from_secs(3)).await;
        assert_eq!(unseen(&world, &resolvers, 0).await, Duration::ZERO);
    }
    let seen = world.seen.lock();
    assert_eq!(seen.most_polls, SEATS);
    assert!(seen.longest_unread <= EVERY, "{:?}", seen.longest_unread);
    let turns: Vec<_> = seen.turns.iter().zip(before).map(|(now, before)| now - before).collect();
    assert!(turns[1..].iter().all(|it| *it >= 4), "{turns:?}");
}

#[tokio::test(start_paused = true)]
async fn with_seats_for_all_none_is_ever_taken_away() {
    let world = World::new();
    let mut resolvers = world.watch();
    sleep(Duration::from_secs(600)).await;
    resolvers.truncate(SEATS);
    sleep(Duration::from_secs(300)).await;
    let before = world.seen.lock().turns.clone();
    sleep(Duration::from_secs(600)).await;
    let seen = world.seen.lock();
    assert_eq!(seen.polls, SEATS);
    let turns: Vec<_> = seen.turns.iter().zip(before).map(|(now, before)| now - before).collect();
    assert!(turns[..SEATS].iter().all(|it| (9..=11).contains(it)), "of a minute each: {turns:?}");
    assert!(turns[SEATS..].iter().all(|it| *it == 0), "who has left asks no more: {turns:?}");
}

#[tokio::test(start_paused = true)]
async fn an_outage_leaves_no_seat_behind_and_retries_are_spread() {
    let world = World::new();
    let resolvers = world.watch();
    sleep(Duration::from_secs(100)).await;
    world.seen.lock().failing = true;
    sleep(Duration::from_secs(60)).await;
    assert!(resolvers.iter().all(|it| it.watch().borrow().error.is_some()));
    assert_eq!(world.seen.lock().polls, 0, "what does not answer is not waited for");
    world.seen.lock().failing = false;
    let back = Instant::now();
    let mut at: Vec<_> = Vec::new();
    for resolver in &resolvers {
        let mut resolved = resolver.watch();
        let answered = resolved.wait_for(|it| it.error.is_none()).await.unwrap().answered_at;
        at.push(answered.expect("it has answered") - back);
    }
    assert!(at.iter().all(|it| *it <= ResolverSettings::default().backoff_max + Duration::from_millis(1)));
    at.sort();
    at.dedup();
    assert!(at.len() > SERVICES / 2, "not all in the same moment: {at:?}");
    sleep(Duration::from_secs(60)).await;
    assert_eq!(world.seen.lock().polls, SEATS);
}

#[tokio::test(start_paused = true)]
async fn a_registry_cut_off_from_its_leader_is_asked_every_second_also_without_a_seat() {
    let world = World::new();
    let resolvers = world.watch();
    sleep(Duration::from_secs(60)).await;
    world.seen.lock().leaderless = true;
    sleep(Duration::from_secs(20)).await;
    assert!(resolvers.iter().all(|it| it.watch().borrow().episode.is_some()));
    let reads = {
        let seen = &mut *world.seen.lock();
        (seen.longest_unread, seen.most_polls) = (Duration::ZERO, 0);
        seen.reads
    };
    sleep(Duration::from_secs(20)).await;
    {
        let seen = world.seen.lock();
        assert_eq!(seen.most_polls, SEATS);
        assert!(seen.longest_unread <= Duration::from_millis(1500), "{:?}", seen.longest_unread);
        assert!(seen.reads - reads <= SERVICES * 21, "{}", seen.reads - reads);
    }
    world.seen.lock().leaderless = false;
    let back = Instant::now();
    for resolver in &resolvers {
        resolver.watch().wait_for(|it| it.episode.is_none()).await.unwrap();
    }
    assert!(back.elapsed() <= Duration::from_secs(6), "{:?}", back.elapsed());
}
