//! `counter.v1.Operator`: the planned hand-over, asked for from outside.

use tokio::time::{Instant, timeout};
use tonic::{Request, Response, Status};

use super::primary::{Candidate, LAST_CALLS};
use crate::{
    NotPrimary,
    demo::pb::{HandOverReply, HandOverRequest, operator_server},
    server::FenceLayer,
};

/// It is not behind the fence, which a hand-over waits to be empty.
#[derive(Clone)]
pub(super) struct Operator(pub(super) Candidate);

/// Opens the fence again, however a hand-over ends: in the next term of this instance, or in this one
/// where it was broken off.
struct Opens(FenceLayer);

impl Drop for Opens {
    fn drop(&mut self) {
        self.0.open();
    }
}

#[tonic::async_trait]
impl operator_server::Operator for Operator {
    async fn hand_over(&self, request: Request<HandOverRequest>) -> Result<Response<HandOverReply>, Status> {
        let HandOverRequest { to } = request.into_inner();
        let Candidate { lease, fence, .. } = &self.0;
        if lease.token().is_none() {
            return Err(NotPrimary::new(lease.primary()).into());
        }
        if to == lease.instance() {
            return Err(Status::failed_precondition(format!("{to} is the primary already")));
        }
        let began = Instant::now();
        let opens = Opens(fence.clone());
        fence.close();
        // What does not end in time is refused by the store, later.
        let _ = timeout(LAST_CALLS, fence.idle()).await;
        let to = Some(to).filter(|to| !to.is_empty());
        let handed = lease.hand_over(to.as_deref()).await;
        drop(opens);
        let handed = handed.map_err(|error| Status::aborted(super::text::chain(&error)))?;
        let took_ms = u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX);
        let (primary, token) = handed.to.map_or_else(Default::default, |it| (it.instance, it.token.get()));
        Ok(Response::new(HandOverReply { primary, token, took_ms }))
    }
}
