//! Two servers, one of which is killed, stopped or frozen under load: what the
//! callers notice.
//!
//! `cargo bench --bench failover`, `-- --runs 1` for a quick look. 20,000 calls at
//! 2,000 a second from 32 callers, with a deadline of 2 s and a handler of 5 ms; the
//! one server is struck after 3 s, and back after 5 s (frozen: 9 s). What was executed
//! is read from the servers' journals. Other crates' clients are measured by
//! `cargo run --release --manifest-path benches/peers/Cargo.toml`, in the same way.

#![allow(clippy::unwrap_used, reason = "a measurement may fail")]

#[path = "../common/mod.rs"]
mod common;
mod run;
mod table;

use std::{env, time::Duration};

use common::{ROLE, backend, option, report};
use run::{Client, Fault, Run};
use tonic::{
    Request, Status,
    transport::{Channel, Endpoint},
};
use tonic_failover::{
    Instance,
    client::{FailoverChannel, GrpcClient, Policy, ServiceOptions, Services, registry::StaticList},
    demo::pb::{
        CounterReply, FILE_DESCRIPTOR_SET, GetRequest, IncrementRequest, counter_client::CounterClient,
    },
};

type Outcome = Result<(), Box<dyn std::error::Error>>;

/// The clients that are compared.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Raw,
    BalanceList,
    /// With HTTP/2 pings and a bound on connecting, without which tonic finds no black hole.
    BalanceListPings,
    Ours(Policy, Method),
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Method {
    Safe,
    Unsafe,
}

const KINDS: [(Kind, &str); 7] = [
    (Kind::Raw, "raw Channel"),
    (Kind::BalanceList, "balance_list"),
    (Kind::BalanceListPings, "balance_list with pings"),
    (Kind::Ours(Policy::RoundRobin, Method::Safe), "ours, round robin, safe method"),
    (Kind::Ours(Policy::RoundRobin, Method::Unsafe), "ours, round robin, unsafe method"),
    (Kind::Ours(Policy::PickFirst, Method::Safe), "ours, pick first, safe method"),
    (Kind::Ours(Policy::PickFirst, Method::Unsafe), "ours, pick first, unsafe method"),
];

fn main() -> Outcome {
    if let Ok(role) = env::var(ROLE) {
        return backend::serve(&role);
    }
    let runs = option("--runs", 5);
    let only = env::args().skip_while(|arg| arg != "--only").nth(1);
    report::preface();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let mut calm = 0.0;
        for fault in Fault::ALL {
            if only.as_deref().is_none_or(|only| only == fault.name()) {
                scene(fault, runs, &mut calm).await?;
            }
        }
        Ok::<_, Box<dyn std::error::Error>>(())
    })?;
    println!("load {} at the end", report::load());
    println!("other clients: cargo run --release --manifest-path benches/peers/Cargo.toml -- --runs {runs}");
    Ok(())
}

/// All clients under one fault, taking turns. `calm` is the longest gap of ours
/// without any fault.
async fn scene(fault: Fault, runs: usize, calm: &mut f64) -> Outcome {
    let kinds: Vec<_> = KINDS
        .into_iter()
        .filter(|(kind, _)| match (fault, kind) {
            (_, Kind::BalanceListPings) => fault == Fault::Stop,
            // What it shows beside the other is what becomes of calls that may not be made anew.
            (Fault::KillAmidCalls, Kind::BalanceList | Kind::Ours(_, Method::Safe)) => false,
            _ => true,
        })
        .collect();
    let mut all = vec![Vec::new(); kinds.len()];
    for _ in 0..runs {
        for ((kind, _), found) in kinds.iter().zip(&mut all) {
            found.push(one(fault, *kind).await?);
        }
    }
    table::head(fault, runs);
    for ((_, name), found) in kinds.iter().zip(&all) {
        table::row(name, found);
    }
    for ((kind, name), found) in kinds.iter().zip(&all) {
        if let Kind::Ours(policy, method) = kind {
            bars(fault, *policy, *method, name, found, calm);
        }
    }
    Ok(())
}

fn bars(fault: Fault, policy: Policy, method: Method, name: &str, runs: &[Run], calm: &mut f64) {
    use report::bar;
    let most = |column: fn(&Run) -> f64| table::most(runs, column);
    let place = |what: &str| format!("{}, {name}: {what}", fault.name());
    if fault == Fault::Calm {
        *calm = calm.max(table::median(runs, |it| it.gap));
    }
    if method == Method::Safe || matches!(fault, Fault::Calm | Fault::Terminate) {
        bar(&place("failed"), most(|it| it.failed), 0.0);
    } else if fault == Fault::Kill {
        bar(
            &place("failures beyond those that a handler had begun"),
            most(|it| it.failed - it.executed_though_failed),
            0.0,
        );
    } else if fault == Fault::KillAmidCalls {
        bar(
            &place("failures that neither a handler had begun nor a dying process had taken"),
            most(|it| it.failed - it.executed_though_failed - it.sent_to_the_dying),
            0.0,
        );
    }
    if method == Method::Unsafe {
        bar(&place("executed twice"), most(|it| it.executed_twice), 0.0);
    }
    match fault {
        Fault::Kill | Fault::KillAmidCalls if *calm > 0.0 => {
            bar(&place("longest gap, median, ms"), table::median(runs, |it| it.gap), *calm + 10.0);
        }
        Fault::Stop => {
            if method == Method::Safe {
                bar(&place("slowest, ms"), most(|it| it.slowest), 2000.0);
            }
            bar(&place("longest gap, ms"), most(|it| it.gap), 1200.0);
            bar(&place("calls into the freeze once it was detected"), most(|it| it.into_the_freeze), 0.0);
        }
        Fault::Calm | Fault::Kill | Fault::KillAmidCalls | Fault::Terminate => {}
    }
    // Pick first stays where it is.
    if policy == Policy::RoundRobin && matches!(fault, Fault::Kill | Fault::KillAmidCalls | Fault::Terminate)
    {
        bar(&place("traffic back, ms"), most(table::back), 1000.0);
    }
}

async fn one(fault: Fault, kind: Kind) -> Result<Run, Box<dyn std::error::Error>> {
    let result = run::run(fault, async |ports: [u16; 2]| {
        let ends = ports
            .iter()
            .map(|port| Endpoint::from_shared(format!("http://127.0.0.1:{port}")))
            .collect::<Result<Vec<_>, _>>()?;
        let client = match kind {
            Kind::Raw => (Any::Raw(CounterClient::new(ends[0].connect().await?)), 0),
            Kind::BalanceList => (Any::Raw(CounterClient::new(Channel::balance_list(ends.into_iter()))), 0),
            Kind::BalanceListPings => {
                let half = Duration::from_millis(500);
                let ends = ends.into_iter().map(|end| {
                    end.connect_timeout(half)
                        .http2_keep_alive_interval(half)
                        .keep_alive_timeout(half)
                        .keep_alive_while_idle(true)
                });
                (Any::Raw(CounterClient::new(Channel::balance_list(ends))), 0)
            }
            Kind::Ours(policy, method) => ours(ports, policy, method).await,
        };
        Ok::<_, tonic::transport::Error>(client)
    });
    result.await
}

/// Our client, and which of the servers it prefers.
async fn ours(ports: [u16; 2], policy: Policy, method: Method) -> (Any, usize) {
    let list = StaticList::new();
    list.set("counter", ports.map(|port| Instance::new(format!("i-{port}"), "127.0.0.1", port, "here")));
    let options = ServiceOptions::new("counter").descriptors(FILE_DESCRIPTOR_SET).policy(policy);
    let services = Services::builder(list).service(options).build().expect("the settings are right");
    let client = services.grpc_client("counter").expect("it is among the options");
    while client.status().datacenters[0].ready < 2 {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    let bound = client.binding().instance().map(|it| it.id.authority().to_owned()).unwrap_or_default();
    let struck = ports.iter().position(|port| bound.ends_with(&format!(":{port}"))).unwrap_or_default();
    (Any::Ours(CounterClient::new(client.channel()), method, client), struck)
}

#[derive(Clone)]
enum Any {
    Raw(CounterClient<Channel>),
    Ours(
        CounterClient<FailoverChannel>,
        Method,
        #[allow(dead_code, reason = "keeps it")] GrpcClient<Services>,
    ),
}

impl Client for Any {
    async fn call(&mut self, id: String, deadline: Duration) -> Result<u64, String> {
        let result = match self {
            Self::Raw(client) => client.increment(increment(id, deadline)).await,
            Self::Ours(client, Method::Unsafe, _) => client.increment(increment(id, deadline)).await,
            Self::Ours(client, Method::Safe, _) => {
                let mut request = Request::new(GetRequest { request_id: id });
                request.set_timeout(deadline);
                client.get(request).await
            }
        };
        outcome(result)
    }
}

fn increment(request_id: String, deadline: Duration) -> Request<IncrementRequest> {
    let mut request = Request::new(IncrementRequest { by: 1, request_id });
    request.set_timeout(deadline);
    request
}

fn outcome(result: Result<tonic::Response<CounterReply>, Status>) -> Result<u64, String> {
    match result {
        Ok(reply) => Ok(reply.into_inner().value),
        Err(status) => Err(format!("{:?}", status.code())),
    }
}
