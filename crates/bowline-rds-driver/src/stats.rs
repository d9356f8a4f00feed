//! What the driver itself did: system calls, copies, wake-ups.

bowline_base::driver_stats! {
    /// Writes to connections.
    writes,
    /// Reads from connections, those that found nothing included.
    reads,
    /// Reads and looks that found nothing; how many a thread makes that looks before it sleeps
    /// depends on time, not on messages.
    empty_looks,
    /// Waits for, or looks at, the readiness of connections.
    waits,
    /// Looks at how much TCP has acknowledged, and calls to have it acknowledge.
    ioctls,
    /// Writes to and reads from event descriptors.
    eventfds,
    /// Calls that set up or tear down connections.
    setups,
    /// Other threads made runnable: parked callers and the background thread.
    hand_overs,
    /// Bytes written to connections.
    bytes_written,
    /// Bytes read from connections.
    bytes_read,
    /// Payload bytes copied from the application into send queues.
    bytes_copied_in,
    /// Payload bytes handed to the application, copied out once.
    bytes_copied_out,
    /// Turns of the background thread.
    helper_turns,
}

impl DriverStats {
    /// Returns the system calls that moved something: all but the looks that found nothing.
    pub fn busy_syscalls(&self) -> u64 {
        self.syscalls() - self.empty_looks
    }

    /// Returns the system calls of all kinds, those of the background thread included; each
    /// hand-over between threads counts as one.
    pub fn syscalls(&self) -> u64 {
        self.writes
            + self.reads
            + self.waits
            + self.ioctls
            + self.eventfds
            + self.setups
            + self.hand_overs
    }
}
