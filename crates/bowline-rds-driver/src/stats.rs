//! Counters of the driver: system calls, copies, wake-ups.

bowline_base::driver_stats! {
    /// Writes to connections.
    writes,
    /// Reads from connections, including those that found nothing.
    reads,
    /// Reads and polls that found nothing. How many of them a thread makes before it sleeps depends
    /// on time, not on messages.
    empty_looks,
    /// Calls that wait for, or poll, the readiness of connections.
    waits,
    /// Calls that ask how much TCP has acknowledged, or make it acknowledge.
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
    /// Posts of frames over RDMA, each of one or more.
    rdma_doorbells,
    /// Frames posted over RDMA.
    rdma_frames_sent,
    /// Frames received over RDMA.
    rdma_frames_received,
    /// Polls of completion queues.
    rdma_polls,
}

impl DriverStats {
    /// Returns the number of system calls that moved data: all but the polls that found nothing.
    pub fn busy_syscalls(&self) -> u64 {
        self.syscalls() - self.empty_looks
    }

    /// Returns the number of all system calls, including those of the background thread; each
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
