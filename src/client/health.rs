//! The health of one connected instance, as it tells it itself: `grpc.health.v1`
//! Watch (gRFC A17).

use std::{sync::Arc, time::Duration};

use tokio::{sync::mpsc, time::sleep};
use tonic::{Code, Status};
use tonic_health::pb::{
    HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient,
};
use tower::util::rng::{HasherRng, Rng};

use super::{details::Checked, endpoint::Endpoint, fleet::Ejection};

/// Between two streams: gRPC's connection back-off, which gRFC A17 refers to.
const PAUSES: Ejection = Ejection { first: Duration::from_secs(1), at_most: Duration::from_secs(120) };

/// Whether the instance behind the connection of this number is serving.
pub(crate) struct HealthWord {
    pub(crate) serial: u64,
    pub(crate) serving: bool,
}

/// What is listened to, and who is told.
pub(crate) struct HealthWatch {
    pub(crate) endpoint: Arc<Endpoint>,
    pub(crate) service: Arc<str>,
    pub(crate) words: mpsc::Sender<HealthWord>,
}

impl HealthWatch {
    /// Listens to the instance for as long as the future lives, and says whether it is
    /// serving: at first, and whenever that changes.
    ///
    /// A server without the health service counts as serving. Everything it says but
    /// SERVING means that it is not. A stream that ends says nothing: the last word holds.
    pub(crate) async fn run(self) {
        let mut rng = HasherRng::new();
        let (mut said, mut failures) = (None, 0);
        loop {
            let mut heard = false;
            match self.listen(&mut said, &mut heard).await {
                Err(status) if status.code() == Code::Unimplemented => return self.say(true).await,
                ended => {
                    tracing::debug!(instance = %self.endpoint.instance(), ?ended, "a health stream has ended");
                }
            }
            failures = if heard { 1 } else { failures + 1 };
            sleep(PAUSES.after(failures, rng.next_f64())).await;
        }
    }

    /// One stream, to its end.
    async fn listen(&self, said: &mut Option<bool>, heard: &mut bool) -> Result<(), Status> {
        let request = HealthCheckRequest { service: self.service.as_ref().to_owned() };
        let mut client = HealthClient::new(Checked(self.endpoint.channel().clone()));
        let mut words = client.watch(request).await?.into_inner();
        while let Some(word) = words.message().await? {
            *heard = true;
            self.endpoint.link().heard();
            let serving = word.status() == ServingStatus::Serving;
            if said.replace(serving) != Some(serving) {
                self.say(serving).await;
            }
        }
        Ok(())
    }

    async fn say(&self, serving: bool) {
        // The worker has ended where nobody listens.
        let _ = self.words.send(HealthWord { serial: self.endpoint.serial(), serving }).await;
    }
}
