//! `counter.v1.Operator`: the planned hand-over, asked for from outside.

use tokio::time::Instant;
use tonic::{Request, Response, Status};

use super::primary::Candidate;
use crate::{
    NotPrimary,
    demo::pb::{HandOverReply, HandOverRequest, operator_server},
};

/// It is not behind the fence, which a hand-over waits to be empty.
#[derive(Clone)]
pub(super) struct Operator(pub(super) Candidate);

#[tonic::async_trait]
impl operator_server::Operator for Operator {
    async fn hand_over(&self, request: Request<HandOverRequest>) -> Result<Response<HandOverReply>, Status> {
        let HandOverRequest { to } = request.into_inner();
        let lease = &self.0.lease;
        if lease.token().is_none() {
            return Err(NotPrimary::new(lease.primary()).into());
        }
        if to == lease.instance() {
            return Err(Status::failed_precondition(format!("{to} is the primary already")));
        }
        let began = Instant::now();
        let to = Some(to).filter(|to| !to.is_empty());
        let handed = lease.hand_over(to.as_deref()).await;
        let handed = handed.map_err(|error| Status::aborted(super::text::chain(&error)))?;
        let took_ms = u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX);
        let (primary, token) = handed.to.map_or_else(Default::default, |it| (it.instance, it.token.get()));
        Ok(Response::new(HandOverReply { primary, token, took_ms }))
    }
}
