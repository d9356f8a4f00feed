//! Counters of a run.

use crate::engine::numbers::numbers;

numbers! {
    /// Sums over one run of a cluster, or over many.
    Stats {
        /// Steps taken.
        steps,
        /// Messages accepted by a node.
        sent,
        /// Messages received by applications.
        received,
        /// Payload bytes received by applications.
        received_bytes,
        /// Sends refused because a queue was full, a port congested or a handshake not done.
        refused,
        /// TCP connects begun.
        connects,
        /// Connects over RDMA begun.
        rdma_connects,
        /// Connections broken between their ends.
        cuts,
        /// Processes and machines stopped.
        crashes,
        /// Sockets closed and opened again.
        reopened,
        /// Faults of any kind.
        faults,
        /// Messages that a kernel peer lost or duplicated as its own rules allow.
        kernel_quirks,
        /// How often a path of a kernel peer found that path 0 had not caught up.
        kernel_tries,
        /// Virtual time in milliseconds.
        virtual_ms,
    }
}
