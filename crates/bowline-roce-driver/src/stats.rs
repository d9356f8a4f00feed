//! Statistics of the driver: system calls, packets, bytes.

bowline_base::driver_stats! {
    /// Calls that sent, one burst or several small ones each.
    sends,
    /// Bursts of several packets (UDP_SEGMENT).
    gso_sends,
    /// Packets sent.
    packets_sent,
    /// Bytes sent, from BTH to ICRC.
    bytes_sent,
    /// Calls that received something.
    receives,
    /// Calls that found nothing.
    empty_looks,
    /// Bursts sent to other processes of the host by memory, without a call.
    ring_sends,
    /// Bursts received from other processes of the host by memory, without a call.
    ring_receives,
    /// Buffers that held several packets merged by the system (UDP_GRO).
    gro_buffers,
    /// Packets received.
    packets_received,
    /// Bytes received, from BTH to ICRC.
    bytes_received,
    /// Packets whose payloads were received at their destination.
    packets_landed,
    /// Buffers received in place that held something else, often an acknowledgement, and were
    /// reassembled.
    landings_missed,
    /// Received buffers that were unusable: truncated, or without a sender address.
    unusable,
    /// Datagrams, or runs of them merged by the system, that a socket lost, mostly because its
    /// receive buffer was full; told with the next one received. `bowline devices` says how to
    /// enlarge it.
    receive_overflows,
    /// Packets dropped on receipt or before sending, because the settings or `cut` ask for it.
    packets_dropped,
    /// Times a send had to wait for room in the socket's buffer, or in memory.
    send_waits,
    /// Packets not sent because the system refused; they count as lost.
    packets_refused,
    /// Refused packets that were longer than the path carries: a wrong MTU setting [ICRC-20].
    packets_too_long,
    /// Times a burst was refused, after which bursts are no longer sent [ICRC-22].
    gso_refused,
    /// Sleeps on the sockets, or of the background thread until its next turn.
    sleeps,
    /// Writes to and reads from event descriptors.
    eventfds,
    /// Wake-ups of other threads.
    hand_overs,
    /// Turns of the background thread.
    helper_turns,
    /// Packets that could not be written to the capture file.
    capture_errors,
}

impl DriverStats {
    /// Returns the number of network system calls that moved data.
    pub fn udp_syscalls(&self) -> u64 {
        self.sends + self.receives
    }
}
