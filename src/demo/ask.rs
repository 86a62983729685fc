//! `demo call` and `demo hand-over`: one question to an instance, or to the primary.

use std::{error::Error, net::SocketAddr, process::ExitCode, time::Duration};

use clap::{Args, ValueEnum};
use http::Uri;
use serde_json::json;
use tonic::{Request, Response, Status, body::Body, client::GrpcService, transport::Endpoint};

use super::{
    cli::Failure,
    pb::{
        self, AddRequest, CounterReply, GetRequest, HandOverRequest, IncrementRequest,
        counter_client::CounterClient, operator_client::OperatorClient,
    },
    screen::{Screen, Tone},
    text::{self, duration, run_id},
};
use crate::{
    NotPrimary,
    client::{CallError, ConsulService, ServiceOptions},
};

/// How long one question may take. Our choice: a takeover and a little more.
const CALL: Duration = Duration::from_secs(5);
/// The same of a hand-over, which waits for calls in flight and for the other's takeover.
const HAND_OVER: Duration = Duration::from_secs(15);

/// Whom to ask.
#[derive(Args, Clone, Debug)]
struct Whom {
    /// The instance at this address, whoever is primary. Without it the primary of the service is
    /// found in Consul.
    #[arg(long, value_name = "ADDRESS:PORT")]
    at: Option<SocketAddr>,

    /// The service.
    #[arg(long, env = "DEMO_SERVICE", default_value = "counter")]
    service: String,
}

/// What `demo call` calls.
#[derive(Args, Clone, Debug)]
pub(crate) struct CallOptions {
    /// What to do with the counter.
    #[arg(value_enum, default_value_t = What::Increment)]
    what: What,

    #[command(flatten)]
    whom: Whom,

    /// The request key of `add`: one that was added before counts no more. Default: a new one.
    #[arg(long, value_name = "KEY")]
    key: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum What {
    Increment,
    Add,
    Get,
}

/// Whom `demo hand-over` makes the primary.
#[derive(Args, Clone, Debug)]
pub(crate) struct HandOverOptions {
    /// The instance that is to take over. Default: whichever comes first.
    #[arg(long, value_name = "NAME")]
    to: Option<String>,

    #[command(flatten)]
    whom: Whom,
}

/// One call; its answer as JSON.
pub(crate) async fn call(options: CallOptions, screen: Screen) -> Result<ExitCode, Failure> {
    let CallOptions { what, whom, key } = options;
    let reply = match whom.at {
        Some(at) => one(direct(at)?, what, key).await,
        None => {
            let consul = primary_of(&whom.service, CALL)?;
            one(consul.grpc_client(&whom.service)?.channel(), what, key).await
        }
    };
    match reply {
        Ok(reply) => {
            let CounterReply { value, instance, .. } = reply.into_inner();
            screen.line(json!({ "counter": value, "instance": instance }));
            Ok(ExitCode::SUCCESS)
        }
        Err(status) => Err(refused(&status)),
    }
}

/// A planned hand-over.
pub(crate) async fn hand_over(options: HandOverOptions, screen: Screen) -> Result<ExitCode, Failure> {
    let HandOverOptions { to, whom } = options;
    let mut request = Request::new(HandOverRequest { to: to.unwrap_or_default() });
    request.set_timeout(HAND_OVER);
    let reply = match whom.at {
        Some(at) => OperatorClient::new(direct(at)?).hand_over(request).await,
        None => {
            let consul = primary_of(&whom.service, HAND_OVER)?;
            let channel = consul.grpc_client(&whom.service)?.channel();
            OperatorClient::new(channel).hand_over(request).await
        }
    };
    let reply = reply.map_err(|status| refused(&status))?.into_inner();
    if reply.primary.is_empty() {
        return Err("nobody has taken over in time; the old primary campaigns on, or is primary again".into());
    }
    let took = duration(Duration::from_millis(reply.took_ms));
    let text =
        format!("{} is primary, term {}, {took} after the last call was let in", reply.primary, reply.token);
    screen.line(screen.paint(Tone::Good, text));
    Ok(ExitCode::SUCCESS)
}

async fn one<T>(channel: T, what: What, key: Option<String>) -> Result<Response<CounterReply>, Status>
where
    T: GrpcService<Body>,
    T::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    T::ResponseBody: http_body::Body<Data = bytes::Bytes> + Send + 'static,
    <T::ResponseBody as http_body::Body>::Error: Into<Box<dyn std::error::Error + Send + Sync>> + Send,
{
    fn within<M>(message: M) -> Request<M> {
        let mut request = Request::new(message);
        request.set_timeout(CALL);
        request
    }
    let mut client = CounterClient::new(channel);
    let id = key.unwrap_or_else(run_id);
    match what {
        What::Increment => client.increment(within(IncrementRequest { by: 1, request_id: id })).await,
        What::Add => client.add(within(AddRequest { request_key: id, by: 1 })).await,
        What::Get => client.get(within(GetRequest { request_id: id })).await,
    }
}

fn direct(at: SocketAddr) -> Result<tonic::transport::Channel, Failure> {
    let uri = Uri::builder().scheme("http").authority(at.to_string()).path_and_query("/").build()?;
    Ok(Endpoint::from(uri).connect_timeout(CALL).connect_lazy())
}

fn primary_of(service: &str, deadline: Duration) -> Result<ConsulService, Failure> {
    let options = ServiceOptions::new(service)
        .descriptors(pb::FILE_DESCRIPTOR_SET)
        .default_timeout(deadline)
        .primary_only();
    Ok(ConsulService::from_env()?.service(options).build()?)
}

/// In the origin's words, where it is no more than the standby's answer.
fn refused(status: &Status) -> Failure {
    match NotPrimary::of(status) {
        Some(NotPrimary { primary: Some(primary), .. }) => {
            format!("NOT_PRIMARY: the primary is {primary}").into()
        }
        Some(_) => "NOT_PRIMARY".into(),
        None => {
            let told = format!("{:?}: {}", status.code(), status.message());
            // Ours says it all in its message; the transport's does not.
            match status.source() {
                Some(cause) if CallError::of(status).is_none() => {
                    format!("{told}: {}", text::chain(cause)).into()
                }
                _ => told.into(),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn where_nobody_listens_the_answer_says_so_once_and_in_words() {
        let nobody = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let status = one(direct(nobody).unwrap(), What::Get, None).await.unwrap_err();
        let told = refused(&status).to_string();
        assert!(told.starts_with("Unavailable: ") && told.contains("refused"), "{told}");
        assert!(!told.contains("source: ") && !told.contains("message: "), "{told}");
    }
}
