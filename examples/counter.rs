//! The README's client, whole: `CONSUL_HTTP_ADDR=... cargo run --features demo --example counter`
//!
//! A registry and servers to try it with: `cargo demo agent dc1`, and
//! `CONSUL_HTTP_ADDR=... cargo demo backend` once or twice.

use tonic_failover::{
    client::{ConsulService, Fallback, ServiceOptions},
    demo::pb::{FILE_DESCRIPTOR_SET, IncrementRequest, counter_client::CounterClient},
};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let consul = ConsulService::from_env()?
        .service(ServiceOptions::new("counter").descriptors(FILE_DESCRIPTOR_SET))
        .fallback(Fallback::nearest())
        .build()?;
    let counter = consul.grpc_client("counter")?;
    let mut client = CounterClient::new(counter.channel());
    let reply = client.increment(IncrementRequest { by: 1, ..Default::default() }).await?;
    println!("{:?} from {}", reply.get_ref(), counter.status());
    consul.shutdown().await;
    Ok(())
}
