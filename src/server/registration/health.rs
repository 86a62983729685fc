//! `grpc.health.v1` as the registration has it: SERVING, as a standby too, until it leaves.

use std::{pin::Pin, sync::Arc};

use futures_util::{Stream, StreamExt, stream};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};
use tonic_health::pb::{
    HealthCheckRequest, HealthCheckResponse, health_check_response::ServingStatus, health_server::Health,
};

/// Answers for the server as a whole (the empty name) and for the gRPC services named.
///
/// It does not follow the probe: that asks through the listener for this very answer, and
/// would never see the end of what it had caused itself.
#[derive(Clone, Debug)]
pub struct RegistrationHealth {
    pub(super) names: Arc<[String]>,
    /// False once, at the end.
    pub(super) serving: watch::Receiver<bool>,
    /// Ends the streams that have nothing to say.
    pub(super) stopping: CancellationToken,
}

// === impl RegistrationHealth ===

impl RegistrationHealth {
    fn knows(&self, name: &str) -> bool {
        name.is_empty() || self.names.iter().any(|it| it == name)
    }
}

#[tonic::async_trait]
impl Health for RegistrationHealth {
    async fn check(
        &self,
        request: Request<HealthCheckRequest>,
    ) -> Result<Response<HealthCheckResponse>, Status> {
        if !self.knows(&request.get_ref().service) {
            return Err(Status::not_found("no such service here"));
        }
        Ok(Response::new(answer(*self.serving.borrow())))
    }

    type WatchStream = Pin<Box<dyn Stream<Item = Result<HealthCheckResponse, Status>> + Send>>;

    /// SERVING at once, NOT_SERVING when it leaves, and then the stream's end. Of a service that
    /// is not here it says SERVICE_UNKNOWN
    /// (<https://github.com/grpc/grpc/blob/master/doc/health-checking.md>).
    async fn watch(
        &self,
        request: Request<HealthCheckRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        if self.knows(&request.get_ref().service) {
            let mut serving = self.serving.clone();
            serving.mark_changed();
            return Ok(Response::new(Box::pin(stream::unfold(Some(serving), next))));
        }
        let unknown = HealthCheckResponse { status: ServingStatus::ServiceUnknown.into() };
        let told = stream::iter([Ok(unknown)]).chain(stream::pending());
        Ok(Response::new(Box::pin(told.take_until(self.stopping.clone().cancelled_owned()))))
    }
}

/// What a watcher is told next, and who tells the rest: after NOT_SERVING there is none.
async fn next(
    serving: Option<watch::Receiver<bool>>,
) -> Option<(Result<HealthCheckResponse, Status>, Option<watch::Receiver<bool>>)> {
    let mut serving = serving?;
    serving.changed().await.ok()?;
    let serves = *serving.borrow_and_update();
    Some((Ok(answer(serves)), serves.then_some(serving)))
}

fn answer(serves: bool) -> HealthCheckResponse {
    let status = if serves { ServingStatus::Serving } else { ServingStatus::NotServing };
    HealthCheckResponse { status: status.into() }
}
