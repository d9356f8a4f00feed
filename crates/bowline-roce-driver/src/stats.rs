//! What the driver itself did: system calls, packets, bytes.

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
    /// Buffers that held several packets merged by the system (UDP_GRO).
    gro_buffers,
    /// Packets received.
    packets_received,
    /// Bytes received, from BTH to ICRC.
    bytes_received,
    /// Packets received straight to where their payloads belong.
    packets_landed,
    /// Buffers that were to be received so, and held something else, often an acknowledgement: put
    /// together again.
    landings_missed,
    /// Received buffers of no use: cut off, or from no address.
    unusable,
    /// Packets thrown away, received or to be sent, because the settings or `cut` ask for it.
    packets_dropped,
    /// Times a send had to wait for room in the socket's buffer.
    send_waits,
    /// Packets not sent because the system refused; they count as lost.
    packets_refused,
    /// Those of them longer than the path carries: a wrong MTU setting [ICRC-20].
    packets_too_long,
    /// Times sending several packets at once was refused and given up [ICRC-22].
    gso_refused,
    /// Sleeps for the network or for the background thread's next look.
    sleeps,
    /// Writes to and reads from event descriptors.
    eventfds,
    /// Other threads made runnable.
    hand_overs,
    /// Turns of the background thread.
    helper_turns,
    /// Packets that could not be written to the capture file.
    capture_errors,
}

impl DriverStats {
    /// Returns the system calls for the network that moved something.
    pub fn udp_syscalls(&self) -> u64 {
        self.sends + self.receives
    }
}
