//! Faults that the promises do not allow, to prove that the judges notice. Tests only.

/// What a run does wrong on purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sabotage {
    /// A write is carried out once more, later: what a request overtaken by its repetition would do
    /// if the server did not let them wait for each other.
    DoubleWrite,
    /// A permit is not given back.
    ForgetPermit,
    /// The end of a request is told twice.
    CompleteTwice,
    /// The client can reach a chunk while the server has it.
    NoWithdraw,
    /// An answer names another request.
    WrongId,
    /// Requests move to other paths before the queue pairs of the old one are dead.
    EarlyDrain,
    /// A request is forgotten.
    DropRequest,
    /// The key told is not the key made.
    StaleKey,
    /// No new key is made.
    NoRenew,
    /// A write is acknowledged before it is carried out.
    EarlyAnswer,
    /// Memory stays registered.
    LeakRegion,
}
