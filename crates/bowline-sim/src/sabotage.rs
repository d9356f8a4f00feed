//! Faults that the promises do not allow, to prove that the judges notice. Tests only.

/// What a run does wrong on purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(not(test), expect(dead_code, reason = "only tests do wrong on purpose"))]
pub(crate) enum Sabotage {
    /// Frames vanish from the stream after TCP acknowledged them.
    DropFrame,
    /// A byte of a payload changes.
    FlipByte,
    /// A received message is handed over twice.
    Double,
    /// Two messages change places.
    Swap,
    /// A reader is not woken.
    LoseWake,
    /// Something accepted is never released.
    Leak,
}
