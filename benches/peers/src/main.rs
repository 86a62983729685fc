//! ginepro under the faults of `cargo bench --bench failover`, in the same columns.
//!
//! `cargo run --release --manifest-path benches/peers/Cargo.toml -- --runs 5`. It is
//! given both addresses by a registry that never changes its mind, as ours is there.

#![forbid(unsafe_code)]

#[path = "../../common/mod.rs"]
mod common;
#[path = "../../failover/run.rs"]
mod run;
#[path = "../../failover/table.rs"]
#[allow(dead_code, reason = "bars are for ours")]
mod table;

use std::{collections::HashSet, env, net::SocketAddr, time::Duration};

use common::{ROLE, backend, option, report};
use ginepro::{LoadBalancedChannel, LookupService, ServiceDefinition};
use run::{Client, Fault, Run};
use tonic13::{client::Grpc, codec::ProstCodec, codegen::http::uri::PathAndQuery};

type Outcome = Result<(), Box<dyn std::error::Error>>;

/// `counter.v1`, for prost 0.13.
#[derive(Clone, PartialEq, prost::Message)]
struct IncrementRequest {
    #[prost(uint64, tag = "1")]
    by: u64,
    #[prost(string, tag = "2")]
    request_id: String,
}

#[derive(Clone, PartialEq, prost::Message)]
struct CounterReply {
    #[prost(uint64, tag = "1")]
    value: u64,
}

struct Fixed([u16; 2]);

#[async_trait::async_trait]
impl LookupService for Fixed {
    async fn resolve_service_endpoints(
        &self,
        _: &ServiceDefinition,
    ) -> Result<HashSet<SocketAddr>, anyhow::Error> {
        Ok(self.0.iter().map(|port| SocketAddr::from(([127, 0, 0, 1], *port))).collect())
    }
}

#[derive(Clone)]
struct Ginepro(LoadBalancedChannel);

impl Client for Ginepro {
    async fn call(&mut self, request_id: String, deadline: Duration) -> Result<u64, String> {
        let mut grpc = Grpc::new(self.0.clone());
        grpc.ready().await.map_err(|_| "NotReady".to_owned())?;
        let mut request = tonic13::Request::new(IncrementRequest { by: 1, request_id });
        request.set_timeout(deadline);
        let path = PathAndQuery::from_static("/counter.v1.Counter/Increment");
        let codec = ProstCodec::<IncrementRequest, CounterReply>::default();
        match grpc.unary(request, path, codec).await {
            Ok(reply) => Ok(reply.into_inner().value),
            Err(status) => Err(format!("{:?}", status.code())),
        }
    }
}

fn main() -> Outcome {
    if let Ok(role) = env::var(ROLE) {
        return backend::serve(&role);
    }
    let runs = option("--runs", 5);
    report::preface();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        for fault in Fault::ALL {
            let mut found: Vec<Run> = Vec::new();
            for _ in 0..runs {
                found.push(run::run(fault, connect).await?);
            }
            table::head(fault, runs);
            table::row("ginepro 0.9.3", &found);
        }
        Ok::<_, Box<dyn std::error::Error>>(())
    })?;
    println!("load {} at the end", report::load());
    Ok(())
}

async fn connect(ports: [u16; 2]) -> Result<(Ginepro, usize), Box<dyn std::error::Error>> {
    let service = ServiceDefinition::from_parts("counter", ports[0])?;
    let channel =
        LoadBalancedChannel::builder(service).lookup_service(Fixed(ports)).channel().await?;
    Ok((Ginepro(channel), 0))
}
