//! The client's events in words for those who have never seen one.

use std::time::Duration;

use serde_json::{Value, json};

use crate::{
    Instance,
    client::{FailoverEvent, RebindCause},
    demo::{
        calls::{Failed, Method},
        screen::Tone,
        text::{self, duration},
    },
};

/// An event as the story tells it.
pub(crate) struct Told {
    pub(crate) tone: Tone,
    pub(crate) kind: &'static str,
    pub(crate) text: String,
    pub(crate) more: Value,
}

pub(crate) fn tell(event: &FailoverEvent) -> Told {
    use FailoverEvent as E;
    let (tone, kind, text, more) = match event {
        E::Rebound { from, to, cause, took, .. } => {
            let more = json!({
                "from": from.as_ref().map(ToString::to_string), "to": to.to_string(),
                "cause": cause.to_string(), "took_ms": text::ms(*took),
            });
            let to = place(to);
            let took = duration(*took);
            let text = match from {
                None => format!("the client has found {to}, {took} after it began to look"),
                Some(from) => {
                    let from = &from.name;
                    match cause {
                        RebindCause::FailedBack => format!("calls return to {to} (rebound in {took})"),
                        _ => {
                            format!("{}: calls now go to {to} (rebound in {took})", why(*cause, from))
                        }
                    }
                }
            };
            (Tone::Good, "rebound", text, more)
        }
        E::Ejected { instance, cause, retry_in, .. } => {
            let text = format!(
                "{} gets no more calls; a probe tries it again in {}",
                instance.name,
                duration(*retry_in)
            );
            let more = json!({ "instance": instance.to_string(), "cause": cause });
            (Tone::Notice, "ejected", text, more)
        }
        E::Readmitted { instance, .. } => {
            let text = format!("{} has answered a probe and may be called again", instance.name);
            (Tone::Good, "readmitted", text, json!({ "instance": instance.to_string() }))
        }
        E::FellBack { from, to, .. } => {
            let text = format!("{from} has no usable server left: over to {to}");
            (Tone::Notice, "fell_back", text, json!({ "from": from, "to": to }))
        }
        E::FailedBack { from, to, .. } => {
            let text = format!("{to} has been usable for a while: back from {from}");
            (Tone::Good, "failed_back", text, json!({ "from": from, "to": to }))
        }
        E::Unusable { reason, .. } => {
            let text = "no server is usable at this moment; calls wait for one".to_owned();
            (Tone::Notice, "unusable", text, json!({ "reason": reason }))
        }
        other => (Tone::Notice, "event", other.to_string(), json!({})),
    };
    Told { tone, kind, text, more }
}

/// A failed call, and what that means for the caller.
pub(crate) fn failure(method: Method, id: &str, took: Duration, failed: &Failed) -> String {
    let begin = format!("{method} {id} failed after {}", duration(took));
    match (&failed.instance, failed.may_have_run) {
        (Some(instance), Some(true)) if method == Method::Increment => {
            format!("{begin}: {instance} may have run it, so it is not sent again")
        }
        _ => format!("{begin}: {failed}"),
    }
}

fn why(cause: RebindCause, from: &str) -> String {
    match cause {
        RebindCause::ConnectionLost => format!("connection to {from} lost"),
        RebindCause::GoingAway => format!("{from} says that it is going away"),
        RebindCause::Unresponsive => format!("{from} has fallen silent"),
        RebindCause::LeftRegistry => format!("{from} is no longer in the registry"),
        other => format!("{from}: {other}"),
    }
}

fn place(instance: &Instance) -> String {
    format!("{} in {}", instance.name, instance.datacenter)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn a_rebind_tells_why_where_and_how_fast() {
        let instance = |name: &str, dc: &str| Arc::new(Instance::new(name, "127.0.0.1", 1, dc));
        let rebound = |from, cause| FailoverEvent::Rebound {
            service: "counter".into(),
            from,
            to: instance("counter-b", "dc2"),
            cause,
            took: Duration::from_micros(800),
        };
        let a = || Some(instance("counter-a", "dc1"));
        let cases = [
            (
                rebound(a(), RebindCause::ConnectionLost),
                "connection to counter-a lost: calls now go to counter-b in dc2 (rebound in 0.8 ms)",
            ),
            (rebound(a(), RebindCause::FailedBack), "calls return to counter-b in dc2 (rebound in 0.8 ms)"),
            (
                rebound(None, RebindCause::Found),
                "the client has found counter-b in dc2, 0.8 ms after it began to look",
            ),
        ];
        for (event, words) in cases {
            assert_eq!(tell(&event).text, words);
        }
    }

    #[test]
    fn a_failure_tells_who_had_the_call_and_why_it_was_not_saved() {
        let mut failed = Failed {
            code: tonic::Code::Unavailable,
            message: "connection lost".into(),
            instance: Some("counter-a".into()),
            may_have_run: Some(true),
        };
        let took = Duration::from_millis(12);
        assert_eq!(
            failure(Method::Increment, "17", took, &failed),
            "Increment 17 failed after 12 ms: counter-a may have run it, so it is not sent again"
        );
        failed.instance = None;
        assert_eq!(
            failure(Method::Get, "1", took, &failed),
            "Get 1 failed after 12 ms: connection lost (Unavailable)"
        );
    }
}
