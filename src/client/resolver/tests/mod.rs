//! The loop alone, against questions answered by hand, on a paused clock.

#[cfg(feature = "testkit")]
mod live;
mod many;
mod polled;

use std::io;

use futures_util::future::join_all;
use parking_lot::Mutex;
use tokio::time::{Instant, sleep, timeout};

use super::*;
use crate::{
    client::registry::{self, Asking},
    consul::{Denied, HealthAnswer, SkipReason, SkippedEntry},
    instance::{Instance, Snapshot},
};

type Outcome = Result<HealthAnswer, RegistryError>;

/// Hands each question to the test.
struct ByHand(mpsc::UnboundedSender<Question>);

struct Question {
    after: Option<u64>,
    wait: Duration,
    at: Instant,
    answer: oneshot::Sender<Outcome>,
}

impl Registry for ByHand {
    fn ask(&self, question: registry::Question) -> Asking {
        let (answer, outcome) = oneshot::channel();
        let _ =
            self.0.send(Question { after: question.seen, wait: question.wait, at: Instant::now(), answer });
        Box::pin(async move { Ok(outcome.await.expect("the test answers what it takes")?.into()) })
    }
}

/// Draws the middle of every range.
struct Half;

impl Rng for Half {
    fn next_u64(&mut self) -> u64 {
        1 << 63
    }
}

struct Bench {
    resolver: Resolver,
    resolved: watch::Receiver<Resolved>,
    questions: mpsc::UnboundedReceiver<Question>,
}

impl Bench {
    fn new() -> Self {
        let (sender, questions) = mpsc::unbounded_channel();
        let (registry, settings) = (Arc::new(ByHand(sender)), ResolverSettings::default());
        let resolver = Resolver::run(registry, "counter".into(), settings, Half, tracing::Span::none());
        let resolved = resolver.watch();
        Self { resolver, resolved, questions }
    }

    async fn question(&mut self) -> Question {
        self.questions.recv().await.expect("the resolver runs")
    }

    /// The next news.
    async fn news(&mut self) -> Resolved {
        timeout(Duration::from_secs(3600), self.resolved.changed()).await.expect("there is news").unwrap();
        self.resolved.borrow_and_update().clone()
    }

    async fn no_news(&mut self) {
        settle().await;
        assert!(!self.resolved.has_changed().unwrap());
    }

    /// Starts a refresh, and waits until it has asked.
    async fn refresh(&mut self) -> (tokio::task::JoinHandle<Result<Resolved, RegistryError>>, Question) {
        let refresh = tokio::spawn(self.resolver.refresh());
        (refresh, self.question().await)
    }
}

#[tokio::test(start_paused = true)]
async fn a_registry_that_drops_the_index_is_asked_once_a_second_until_it_gives_one_again() {
    let mut bench = Bench::new();
    let mut times = Vec::new();
    for _ in 0..20 {
        let question = bench.question().await;
        assert_eq!(question.after, None);
        times.push(question.at);
        let without = HealthAnswer { index: None, ..answer(1, &["a"]) };
        question.answer.send(Ok(without)).expect("the question is still asked");
    }
    let pauses: Vec<_> = times.windows(2).map(|it| it[1] - it[0]).collect();
    assert!(pauses[8..].iter().all(|it| it.as_secs() == 1), "{pauses:?}");
    settle().await;
    let resolved = bench.resolved.borrow_and_update().clone();
    assert_eq!(resolved.doubt, Some(RegistryDoubt::NotBlocking));
    assert!(resolved.episode.is_none() && resolved.error.is_none(), "it is not stale");
    good(bench.question().await, 7, &["a"]);
    let waiting = bench.question().await;
    assert_eq!(waiting.after, Some(7));
    sleep(Duration::from_secs(2)).await;
    good(waiting, 8, &["a", "b"]);
    settle().await;
    assert_eq!(bench.resolved.borrow().doubt, None);
}

/// Lets all tasks do what they can do now.
async fn settle() {
    for _ in 0..20 {
        tokio::task::yield_now().await;
    }
}

fn answer(index: u64, names: &[&str]) -> HealthAnswer {
    let instances = names.iter().map(|name| Arc::new(Instance::new(*name, name, 80, "dc1"))).collect();
    HealthAnswer {
        snapshot: Snapshot { instances },
        agent: "http://127.0.0.1:8500".into(),
        index: Some(index),
        known_leader: Some(true),
        last_contact: Some(Duration::ZERO),
        filtered_by_acl: false,
        denied: None,
        skipped: Vec::new(),
    }
}

fn good(question: Question, index: u64, names: &[&str]) {
    question.answer.send(Ok(answer(index, names))).expect("the question is still asked");
}

fn bad(question: Question, error: RegistryError) {
    question.answer.send(Err(error)).expect("the question is still asked");
}

fn names(resolved: &Resolved) -> Vec<String> {
    resolved.snapshot.iter().flat_map(|it| &it.instances).map(|it| it.name.clone()).collect()
}

#[tokio::test(start_paused = true)]
async fn the_first_answer_is_published_and_the_next_question_waits_beyond_it() {
    let mut bench = Bench::new();
    assert!(bench.resolved.borrow().snapshot.is_none());
    let first = bench.question().await;
    assert_eq!(first.after, None);
    good(first, 7, &["a"]);
    let resolved = bench.news().await;
    assert_eq!((names(&resolved), resolved.answers), (vec!["a".to_owned()], 1));
    assert_eq!(bench.question().await.after, Some(7));
}

#[tokio::test(start_paused = true)]
async fn the_same_again_is_counted_and_is_no_news() {
    let mut bench = Bench::new();
    good(bench.question().await, 7, &["a"]);
    let before = bench.news().await;
    sleep(Duration::from_secs(5)).await;
    good(bench.question().await, 8, &["a"]);
    bench.no_news().await;
    let after = bench.resolved.borrow().clone();
    assert_eq!(after.answers, 2);
    assert_eq!(after.answered_at.unwrap() - before.answered_at.unwrap(), Duration::from_secs(5));
    assert_eq!(bench.question().await.after, Some(8));
}

#[tokio::test(start_paused = true)]
async fn a_list_hidden_from_the_token_is_unknown_and_not_empty() {
    let mut bench = Bench::new();
    let hidden = |index| HealthAnswer { denied: Some(Denied::Service), ..answer(index, &[]) };
    good(bench.question().await, 7, &["a"]);
    bench.news().await;
    for index in [7, 8] {
        assert!(bench.question().await.answer.send(Ok(hidden(index))).is_ok());
    }
    let resolved = bench.news().await;
    assert_eq!((names(&resolved), resolved.denied), (vec!["a".to_owned()], Some(Denied::Service)));
    assert!(resolved.hidden_since.is_some() && resolved.empty_since.is_none());
    // Read again, and really empty.
    good(bench.question().await, 9, &[]);
    let resolved = bench.news().await;
    assert!(resolved.hidden_since.is_none() && resolved.empty_since.is_some() && resolved.denied.is_none());
    assert!(bench.question().await.answer.send(Ok(hidden(9))).is_ok());
    let resolved = bench.news().await;
    assert!(resolved.hidden_since.is_some() && resolved.empty_since.is_none());
    // A part of a list is a list.
    let part = HealthAnswer { denied: Some(Denied::Part), ..answer(10, &["b"]) };
    assert!(bench.question().await.answer.send(Ok(part)).is_ok());
    let resolved = bench.news().await;
    assert_eq!((names(&resolved), resolved.denied), (vec!["b".to_owned()], Some(Denied::Part)));
    assert!(resolved.hidden_since.is_none() && resolved.empty_since.is_none());
}

#[tokio::test(start_paused = true)]
async fn a_failure_keeps_the_list_and_forgets_the_index() {
    let mut bench = Bench::new();
    good(bench.question().await, 7, &["a"]);
    bench.news().await;
    bad(bench.question().await, RegistryError::NoLeader);
    let failing = bench.news().await;
    assert_eq!(names(&failing), ["a"]);
    assert!(matches!(failing.error, Some(RegistryError::NoLeader)));
    // The same trouble again is no news, another one is; its beginning stays.
    let again = bench.question().await;
    assert_eq!(again.after, None);
    bad(again, RegistryError::NoLeader);
    bench.no_news().await;
    bad(bench.question().await, RegistryError::NotFound);
    let other = bench.news().await;
    let since = |it: &Resolved| it.episode.as_ref().map(|it| it.since);
    assert_eq!(since(&other), since(&failing));
    // The list is followed at once; that the registry is back is to be seen.
    good(bench.question().await, 3, &["b"]);
    let settling = bench.news().await;
    assert_eq!((names(&settling), settling.doubt), (vec!["b".to_owned()], Some(RegistryDoubt::Settling)));
    assert!(settling.error.is_none() && since(&settling) == since(&failing));
    assert_eq!(bench.question().await.after, Some(3));
}

/// Answers well, a second after each question, until the registry counts as back.
async fn settled(bench: &mut Bench, index: u64, names: &[&str]) -> Duration {
    let begun = Instant::now();
    while bench.resolved.borrow().episode.is_some() {
        let question = bench.question().await;
        assert!(question.wait <= Duration::from_secs(1), "it is asked soon: {:?}", question.wait);
        if question.after.is_some() {
            sleep(question.wait).await;
        }
        good(question, index, names);
        settle().await;
    }
    begun.elapsed()
}

#[tokio::test(start_paused = true)]
async fn one_loss_with_a_good_answer_in_it_is_one_episode() {
    let mut bench = Bench::new();
    good(bench.question().await, 7, &["a"]);
    bench.news().await;
    bad(bench.question().await, RegistryError::NoServers);
    let lost = bench.news().await.episode.expect("it is lost");
    for _ in 0..3 {
        // A server that has not noticed yet, and then has.
        good(bench.question().await, 8, &["a"]);
        assert!(bench.news().await.episode.is_some());
        let cut_off = HealthAnswer { known_leader: Some(false), ..answer(8, &["a"]) };
        assert!(bench.question().await.answer.send(Ok(cut_off)).is_ok());
        assert_eq!(bench.news().await.episode.expect("it lasts").since, lost.since);
    }
    let took = settled(&mut bench, 9, &["a"]).await;
    assert!(took <= Duration::from_secs(5), "it is told soon: {took:?}");
    let back = bench.resolved.borrow_and_update().clone();
    assert_eq!((back.doubt, back.episode.is_some()), (None, false));
    // From then on it is waited for as ever.
    assert_eq!(bench.question().await.wait, ResolverSettings::default().wait);
}

#[tokio::test(start_paused = true)]
async fn a_server_without_a_leader_is_followed_in_what_is_newer_and_not_in_what_is_older() {
    let mut bench = Bench::new();
    let cut_off = |index, names: &[&str]| HealthAnswer { known_leader: Some(false), ..answer(index, names) };
    good(bench.question().await, 9, &["a", "b"]);
    bench.news().await;
    bad(bench.question().await, RegistryError::NoServers);
    bench.news().await;
    // Restarted, it knows no more than its last snapshot, or nothing.
    let mut asked = Vec::new();
    for list in [&["a"][..], &[]] {
        let question = bench.question().await;
        assert_eq!(question.after, None);
        asked.push(question.at);
        assert!(question.answer.send(Ok(cut_off(4, list))).is_ok());
        settle().await;
        let resolved = bench.resolved.borrow_and_update().clone();
        assert_eq!((names(&resolved), resolved.empty_since), (vec!["a".to_owned(), "b".to_owned()], None));
        assert!(matches!(resolved.doubt, Some(RegistryDoubt::Behind { .. })));
    }
    assert_eq!(asked[1] - asked[0], Duration::from_secs(1), "it is not pressed");
    assert!(bench.question().await.answer.send(Ok(cut_off(10, &["b", "c"]))).is_ok());
    assert_eq!(names(&bench.news().await), ["b", "c"]);
    // With its leader it knows what is so, whatever its index.
    good(bench.question().await, 4, &["d"]);
    assert_eq!(names(&bench.news().await), ["d"]);
}

#[tokio::test(start_paused = true)]
async fn a_refresh_that_finds_the_registry_cut_off_shortens_the_wait_for_news() {
    let mut bench = Bench::new();
    good(bench.question().await, 7, &["a"]);
    bench.news().await;
    let patient = bench.question().await;
    let (refresh, question) = bench.refresh().await;
    let cut_off = HealthAnswer { known_leader: Some(false), ..answer(7, &["a"]) };
    assert!(question.answer.send(Ok(cut_off)).is_ok());
    refresh.await.unwrap().unwrap();
    settle().await;
    assert!(patient.answer.is_closed(), "it would not say for long that the registry is back");
    assert!(settled(&mut bench, 7, &["a"]).await <= Duration::from_secs(5));
}

#[tokio::test(start_paused = true)]
async fn while_the_list_is_empty_no_question_waits_longer_than_it_has_been() {
    let mut bench = Bench::new();
    good(bench.question().await, 7, &["a"]);
    let patient = bench.question().await;
    assert_eq!(patient.wait, Duration::from_secs(60));
    let (refresh, question) = bench.refresh().await;
    good(question, 7, &[]);
    refresh.await.unwrap().unwrap();
    settle().await;
    assert!(patient.answer.is_closed());
    // The index has not moved with the list: it may be full again, and nobody is woken.
    let next = bench.question().await;
    assert_eq!(next.after, None);
    good(next, 7, &[]);
    let mut waits = Vec::new();
    for _ in 0..7 {
        let next = bench.question().await;
        waits.push(next.wait.as_secs());
        assert_eq!(next.after, Some(7));
        sleep(next.wait).await;
        good(next, 7, &[]);
    }
    assert_eq!(waits, [1, 1, 2, 5, 10, 10, 10]);
}

#[tokio::test(start_paused = true)]
async fn a_question_that_fails_late_does_not_break_in_on_a_registry_that_wants_to_be_left_alone() {
    let mut bench = Bench::new();
    good(bench.question().await, 7, &["a"]);
    bench.news().await;
    let blocking = bench.question().await;
    let (refresh, question) = bench.refresh().await;
    let begun = Instant::now();
    bad(blocking, RegistryError::RateLimited { retry_after: Some(Duration::from_secs(30)) });
    bench.news().await;
    bad(question, RegistryError::TimedOut { after: Duration::from_secs(1) });
    assert!(refresh.await.unwrap().is_err());
    assert!(bench.question().await.at - begun >= Duration::from_secs(30));
}

#[tokio::test(start_paused = true)]
async fn questions_after_failures_come_ever_later_up_to_the_bound() {
    let mut bench = Bench::new();
    let mut last = Instant::now();
    let mut delays = Vec::new();
    for _ in 0..8 {
        let question = bench.question().await;
        delays.push((question.at - last).as_millis());
        last = question.at;
        bad(question, RegistryError::NotFound);
    }
    assert_eq!(delays, [0, 100, 200, 400, 800, 1600, 2500, 2500]);
}

#[tokio::test(start_paused = true)]
async fn an_emptied_list_is_told_and_the_last_one_kept() {
    let mut bench = Bench::new();
    good(bench.question().await, 7, &["a"]);
    assert!(bench.news().await.empty_since.is_none());
    good(bench.question().await, 8, &[]);
    let empty = bench.news().await;
    assert_eq!((names(&empty), empty.empty_since), (vec!["a".to_owned()], empty.answered_at));
    sleep(Duration::from_secs(1)).await;
    good(bench.question().await, 9, &[]);
    bench.no_news().await;
    assert_eq!(bench.resolved.borrow().empty_since, empty.empty_since);
    good(bench.question().await, 10, &["a"]);
    assert!(bench.news().await.empty_since.is_none());
}

#[tokio::test(start_paused = true)]
async fn a_service_without_instances_is_an_answer() {
    let mut bench = Bench::new();
    good(bench.question().await, 7, &[]);
    let resolved = bench.news().await;
    assert_eq!(resolved.snapshot, Some(Snapshot::default()));
    assert!(resolved.empty_since.is_some());
}

#[tokio::test(start_paused = true)]
async fn after_a_fallen_index_the_next_question_has_none() {
    let mut bench = Bench::new();
    good(bench.question().await, 42, &["a"]);
    good(bench.question().await, 12, &["b"]);
    settle().await;
    assert_eq!(names(&bench.resolved.borrow()), ["b"]);
    let next = bench.question().await;
    assert_eq!(next.after, None);
    good(next, 12, &["b"]);
    assert_eq!(bench.question().await.after, Some(12));
}

#[tokio::test(start_paused = true)]
async fn an_answer_without_an_index_makes_no_hot_loop() {
    let mut bench = Bench::new();
    let begun = Instant::now();
    for _ in 0..20 {
        let question = bench.question().await;
        assert_eq!(question.after, None);
        let nothing = HealthAnswer { index: None, ..answer(1, &["a"]) };
        question.answer.send(Ok(nothing)).unwrap();
    }
    assert!(begun.elapsed() >= 16 * ResolverSettings::default().spacing);
}

#[tokio::test(start_paused = true)]
async fn churn_is_followed_at_once_and_then_in_steps() {
    let mut bench = Bench::new();
    let begun = Instant::now();
    let mut asked = Vec::new();
    for index in 1..=6 {
        let question = bench.question().await;
        asked.push((question.at - begun).as_millis());
        good(question, index, &["a"]);
    }
    assert_eq!(asked, [0, 0, 0, 250, 500, 750]);
}

#[tokio::test(start_paused = true)]
async fn a_hundred_refreshes_at_once_are_one_question() {
    let mut bench = Bench::new();
    good(bench.question().await, 7, &["a"]);
    bench.news().await;
    let blocking = bench.question().await;
    let all: Vec<_> = (0..100).map(|_| tokio::spawn(bench.resolver.refresh())).collect();
    let question = bench.question().await;
    assert_eq!(question.after, None);
    settle().await;
    good(question, 8, &["b"]);
    for resolved in join_all(all).await {
        assert_eq!(names(&resolved.unwrap().unwrap()), ["b"]);
    }
    assert_eq!(names(&bench.news().await), ["b"]);
    assert!(bench.questions.try_recv().is_err(), "one question only");
    assert!(!blocking.answer.is_closed(), "the blocking question is left alone");
}

#[tokio::test(start_paused = true)]
async fn a_refresh_is_not_undone_by_the_older_answer_of_the_blocking_question() {
    let mut bench = Bench::new();
    good(bench.question().await, 7, &["a"]);
    bench.news().await;
    let blocking = bench.question().await;
    let (refresh, question) = bench.refresh().await;
    good(question, 9, &["new"]);
    refresh.await.unwrap().unwrap();
    assert_eq!(names(&bench.news().await), ["new"]);
    good(blocking, 8, &["old"]);
    bench.no_news().await;
    assert_eq!(names(&bench.resolved.borrow()), ["new"]);
    assert_eq!(bench.question().await.after, None, "asks afresh, in case the index has fallen");
}

#[tokio::test(start_paused = true)]
async fn a_refresh_that_finds_a_fallen_index_restarts_the_blocking_question() {
    let mut bench = Bench::new();
    good(bench.question().await, 42, &["a"]);
    let blocking = bench.question().await;
    let (refresh, question) = bench.refresh().await;
    good(question, 12, &["b"]);
    assert_eq!(names(&refresh.await.unwrap().unwrap()), ["b"]);
    settle().await;
    assert!(blocking.answer.is_closed());
    assert_eq!(bench.question().await.after, None);
}

#[tokio::test(start_paused = true)]
async fn a_refresh_that_fails_makes_the_blocking_question_be_asked_anew() {
    let mut bench = Bench::new();
    good(bench.question().await, 7, &["a"]);
    bench.news().await;
    let blocking = bench.question().await;
    let (refresh, question) = bench.refresh().await;
    bad(question, RegistryError::NoServers);
    assert!(matches!(refresh.await.unwrap(), Err(RegistryError::NoServers)));
    let failing = bench.news().await;
    assert_eq!(names(&failing), ["a"]);
    assert!(failing.error.is_some());
    assert!(blocking.answer.is_closed());
    good(bench.question().await, 7, &["a"]);
    assert!(bench.news().await.error.is_none());
}

#[tokio::test(start_paused = true)]
async fn a_refresh_that_succeeds_ends_the_back_off() {
    let mut bench = Bench::new();
    for _ in 0..12 {
        bad(bench.question().await, RegistryError::NotFound);
    }
    let (refresh, question) = bench.refresh().await;
    let at = question.at;
    good(question, 7, &["a"]);
    refresh.await.unwrap().unwrap();
    let next = bench.question().await;
    assert_eq!((next.after, next.at), (Some(7), at));
}

#[tokio::test(start_paused = true)]
async fn a_registry_that_wants_to_be_left_alone_is() {
    let mut bench = Bench::new();
    let first = bench.question().await;
    let begun = Instant::now();
    bad(first, RegistryError::RateLimited { retry_after: Some(Duration::from_secs(30)) });
    bench.news().await;
    sleep(Duration::from_secs(10)).await;
    let refused = bench.resolver.refresh().await.unwrap_err();
    assert_eq!(refused.retry_after(), Some(Duration::from_secs(20)));
    let next = bench.question().await;
    assert_eq!(next.at - begun, Duration::from_millis(30_100));
}

#[tokio::test(start_paused = true)]
async fn a_faulty_wish_to_be_left_alone_does_not_blind_for_ever() {
    let mut bench = Bench::new();
    bad(bench.question().await, RegistryError::RateLimited { retry_after: Some(Duration::MAX) });
    let begun = Instant::now();
    assert!(bench.question().await.at - begun <= Duration::from_secs(301));
}

#[tokio::test(start_paused = true)]
async fn dropping_the_resolver_ends_its_questions_and_its_listeners() {
    let mut bench = Bench::new();
    good(bench.question().await, 7, &["a"]);
    bench.news().await;
    let blocking = bench.question().await;
    let (refresh, question) = bench.refresh().await;
    let late = bench.resolver.refresh();
    drop(bench.resolver);
    assert!(matches!(refresh.await.unwrap(), Err(RegistryError::Closed)));
    assert!(matches!(late.await, Err(RegistryError::Closed)));
    assert!(blocking.answer.is_closed() && question.answer.is_closed());
    assert!(bench.resolved.changed().await.is_err());
}

#[tokio::test(start_paused = true)]
async fn a_refresh_whose_caller_has_gone_is_published_all_the_same() {
    let mut bench = Bench::new();
    good(bench.question().await, 7, &["a"]);
    bench.news().await;
    let _blocking = bench.question().await;
    let (refresh, question) = bench.refresh().await;
    refresh.abort();
    settle().await;
    good(question, 8, &["b"]);
    assert_eq!(names(&bench.news().await), ["b"]);
}

#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().extend(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[tokio::test(start_paused = true)]
async fn each_trouble_is_one_line_when_it_begins_and_one_when_it_ends() {
    let log = Log::default();
    let writer = log.clone();
    let subscriber = tracing_subscriber::fmt().with_ansi(false).with_writer(move || writer.clone()).finish();
    let _guard = tracing::subscriber::set_default(subscriber);
    let mut bench = Bench::new();
    for _ in 0..5 {
        bad(bench.question().await, RegistryError::NoLeader);
    }
    let skipped =
        SkippedEntry { id: "odd".to_owned(), node: "n1".to_owned(), reason: SkipReason::Port(70_000) };
    for index in 1..=5 {
        let odd = HealthAnswer {
            skipped: vec![skipped.clone()],
            known_leader: Some(false),
            ..answer(index, &["a"])
        };
        bench.question().await.answer.send(Ok(odd)).unwrap();
    }
    settled(&mut bench, 6, &["a"]).await;
    bench.question().await;
    let text = String::from_utf8(log.0.lock().clone()).unwrap();
    for line in [
        "the registry is lost",
        "the registry is back",
        "70000 is no port",
        "is cut off from its leader",
        "in touch with its leader again",
    ] {
        assert_eq!(text.matches(line).count(), 1, "{line}: {text}");
    }
    assert_eq!(text.lines().count(), 5, "{text}");
}
