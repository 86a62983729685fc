//! What a test has switched off; `client::Mechanism` says why there is such a thing.

/// What is left out.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Without {
    /// The places for reads are kept apart by datacenter.
    pub(crate) lanes: bool,
    /// Another agent is asked where one fails, or is cut off from its leader.
    pub(crate) next_agent: bool,
    /// A wish to be left alone holds for all who ask.
    pub(crate) quiet: bool,
}
