//! What a run of a cluster counts.

use crate::engine::numbers::numbers;

numbers! {
    /// Sums over one run of a cluster or many.
    Stats {
        /// Steps taken.
        steps,
        /// Messages accepted by a node.
        sent,
        /// Messages handed to a receiver.
        received,
        /// Payload bytes handed to a receiver.
        received_bytes,
        /// Sends refused because a queue was full, a port congested or a handshake not done.
        refused,
        /// TCP connects begun.
        connects,
        /// TCP connections broken between their ends.
        cuts,
        /// Processes and machines stopped.
        crashes,
        /// Sockets closed and opened again.
        reopened,
        /// Faults of any kind.
        faults,
        /// Messages that a kernel peer lost or doubled by its own rules.
        kernel_quirks,
        /// Virtual time, milliseconds.
        virtual_ms,
    }
}
