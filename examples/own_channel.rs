//! For those who handle tonic channels themselves: take each binding's, and say
//! when it fails. Run it like the other example.

use std::time::Duration;

use tonic_failover::{
    client::{ConsulService, ServiceOptions},
    demo::pb::{GetRequest, counter_client::CounterClient},
};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let consul = ConsulService::from_env()?.service(ServiceOptions::new("counter")).build()?;
    let counter = consul.grpc_client("counter")?;
    let mut bindings = counter.subscribe();
    for _ in 0..10 {
        // The newest binding; empty before the first instance is found.
        let binding = bindings.borrow_and_update().clone();
        let Some(channel) = binding.channel() else {
            bindings.changed().await?;
            continue;
        };
        match CounterClient::new(channel).get(GetRequest::default()).await {
            Ok(reply) => println!("{} from {}", reply.get_ref().value, reply.get_ref().instance),
            Err(status) => {
                println!("{status}");
                // Many callers may say so: the first on this generation counts.
                counter.report_failure(binding.generation());
                bindings.changed().await?;
            }
        }
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    Ok(())
}
