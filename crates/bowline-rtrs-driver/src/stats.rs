//! What an engine has done.

bowline_base::driver_stats! {
    /// Looks at completion queues.
    polls,
    /// Those of them that found nothing.
    empty_polls,
    /// Waits for completions.
    waits,
    /// Completions taken.
    completions,
    /// Batches of work requests given to devices.
    batches,
    /// Send work requests in them.
    sends,
    /// Receives in them.
    receives,
    /// Requests given to sessions of this side.
    requests,
    /// Requests that servers of this side were given.
    served,
    /// Naps of background threads while programs drive their sessions themselves.
    naps,
    /// Other threads made runnable.
    hand_overs,
    /// Events of the connection manager.
    cm_events,
}
