//! Registries that do not wait for news, and say when to ask again.

use super::*;
use crate::client::registry::Listing;

/// Tells of each question, and answers at once.
struct Polled(mpsc::UnboundedSender<(Option<u64>, Instant)>, Duration);

impl Registry for Polled {
    fn ask(&self, question: registry::Question) -> Asking {
        let _ = self.0.send((question.seen, Instant::now()));
        let listing = Listing::new([Instance::new("a", "a", 80, "here")]).again_in(self.1);
        Box::pin(async move { Ok(listing) })
    }
}

async fn asked_at(again_in: Duration, refresh: bool) -> Vec<Duration> {
    let (sender, mut questions) = mpsc::unbounded_channel();
    let (registry, start) = (Arc::new(Polled(sender, again_in)), Instant::now());
    let settings = ResolverSettings::default();
    let resolver = Resolver::run(registry, "counter".into(), settings, Half, tracing::Span::none());
    let mut times = Vec::new();
    for question in 0..4 {
        let (seen, at) = questions.recv().await.unwrap();
        assert_eq!(seen, None, "nobody is asked to wait who gives no version");
        times.push(at - start);
        if refresh && question == 0 {
            settle().await;
            sleep(again_in / 3).await;
            resolver.refresh().await.unwrap();
        }
    }
    times
}

#[tokio::test(start_paused = true)]
async fn it_is_asked_again_when_it_said() {
    let seconds = |times: Vec<Duration>| times.into_iter().map(|it| it.as_secs()).collect::<Vec<_>>();
    assert_eq!(seconds(asked_at(Duration::from_secs(30), false).await), [0, 30, 60, 90]);
    // What somebody asked for meanwhile is as fresh, and counts.
    assert_eq!(seconds(asked_at(Duration::from_secs(30), true).await), [0, 10, 40, 70]);
}

#[tokio::test(start_paused = true)]
async fn one_that_says_nothing_is_not_asked_without_a_pause() {
    let times = asked_at(Duration::ZERO, false).await;
    assert_eq!(times.iter().map(Duration::as_millis).collect::<Vec<_>>(), [0, 0, 0, 250]);
}

/// Waits for news, but no longer than 10 s, and says so.
struct Hasty(mpsc::UnboundedSender<(Option<u64>, bool)>);

impl Registry for Hasty {
    fn ask(&self, question: registry::Question) -> Asking {
        let _ = self.0.send((question.seen, question.begins));
        let waits = Duration::from_secs(10).min(question.wait);
        let mut listing = Listing::new([Instance::new("a", "a", 80, "here")]).version(7);
        listing.waited_for = Some(waits);
        Box::pin(async move {
            if question.seen.is_some() {
                sleep(waits).await;
            }
            Ok(listing)
        })
    }
}

#[tokio::test(start_paused = true)]
async fn one_that_waits_less_than_it_may_has_not_ended_early() {
    let (sender, mut questions) = mpsc::unbounded_channel();
    let (registry, settings) = (Arc::new(Hasty(sender)), ResolverSettings::default());
    let _resolver = Resolver::run(registry, "counter".into(), settings, Half, tracing::Span::none());
    let mut asked = Vec::new();
    for _ in 0..4 {
        asked.push(questions.recv().await.unwrap());
    }
    assert_eq!(asked, [(None, true), (Some(7), false), (Some(7), false), (Some(7), false)]);
}
