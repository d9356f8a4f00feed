//! What a run did, in numbers.

/// Sums over one run or many.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Steps taken.
    pub steps: u64,
    /// Messages accepted by a node.
    pub sent: u64,
    /// Messages handed to a receiver.
    pub received: u64,
    /// Payload bytes handed to a receiver.
    pub received_bytes: u64,
    /// Sends refused because a queue was full, a port congested or a handshake not done.
    pub refused: u64,
    /// TCP connects begun.
    pub connects: u64,
    /// TCP connections broken between their ends.
    pub cuts: u64,
    /// Processes and machines stopped.
    pub crashes: u64,
    /// Sockets closed and opened again.
    pub reopened: u64,
    /// Faults of any kind.
    pub faults: u64,
    /// Messages that a kernel peer lost or doubled by its own rules.
    pub kernel_quirks: u64,
    /// Virtual time, milliseconds.
    pub virtual_ms: u64,
}

impl Stats {
    /// Adds the numbers of another run.
    pub fn add(&mut self, other: &Self) {
        self.steps += other.steps;
        self.sent += other.sent;
        self.received += other.received;
        self.received_bytes += other.received_bytes;
        self.refused += other.refused;
        self.connects += other.connects;
        self.cuts += other.cuts;
        self.crashes += other.crashes;
        self.reopened += other.reopened;
        self.faults += other.faults;
        self.kernel_quirks += other.kernel_quirks;
        self.virtual_ms += other.virtual_ms;
    }

    /// Names and values, in the order of the fields.
    pub fn fields(&self) -> [(&'static str, u64); 12] {
        [
            ("steps", self.steps),
            ("sent", self.sent),
            ("received", self.received),
            ("received_bytes", self.received_bytes),
            ("refused", self.refused),
            ("connects", self.connects),
            ("cuts", self.cuts),
            ("crashes", self.crashes),
            ("reopened", self.reopened),
            ("faults", self.faults),
            ("kernel_quirks", self.kernel_quirks),
            ("virtual_ms", self.virtual_ms),
        ]
    }
}
