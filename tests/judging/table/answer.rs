/// The response stopped without a status: ours, and not the transport's.
#[derive(Debug, thiserror::Error)]
#[error("the response ended without a status")]
pub(crate) struct NoEnd;
