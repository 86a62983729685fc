/// Why a connection is out of use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LossCause {
    Closed,
    GoingAway,
}
