//! `demo agent`: the embedded agents in the foreground.

use clap::Args;

use super::{
    cli::Failure,
    screen::{Screen, Tone},
    signals::Signals,
};
use crate::testkit::Cluster;

/// Which agents to run.
#[derive(Args, Clone, Debug)]
pub(crate) struct Options {
    /// The datacenters, one agent each; they know of each other.
    #[arg(default_values = ["dc1", "dc2"], value_name = "DATACENTER")]
    datacenters: Vec<String>,
}

pub(crate) async fn run(options: Options, mut signals: Signals, screen: Screen) -> Result<(), Failure> {
    let cluster = Cluster::start(options.datacenters).await?;
    for agent in cluster.agents() {
        let name = screen.paint(Tone::Title, agent.datacenter());
        screen.line(format!("{name}  CONSUL_HTTP_ADDR={}", agent.url()));
    }
    screen.line(screen.paint(Tone::Quiet, "They forget everything when they end. Ctrl-C ends them."));
    tokio::select! {
        _ = signals.next() => {}
        () = screen.closed() => {}
    }
    Ok(())
}
