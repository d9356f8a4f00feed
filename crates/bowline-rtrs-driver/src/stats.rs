//! Counters of an engine.

bowline_base::driver_stats! {
    /// Polls of completion queues.
    polls,
    /// Polls that found no completion.
    empty_polls,
    /// Waits for completions.
    waits,
    /// Completions taken.
    completions,
    /// Batches of work requests given to devices.
    batches,
    /// Send work requests in these batches.
    sends,
    /// Receive work requests in these batches.
    receives,
    /// Requests submitted to sessions of this engine.
    requests,
    /// Requests handed to handlers of this engine's servers.
    served,
    /// Naps of background threads while threads of the program take completions themselves.
    naps,
    /// Times another thread was woken.
    hand_overs,
    /// Events of the connection manager.
    cm_events,
}
