//! What a run did, in numbers.

use crate::stats::numbers;

numbers! {
    /// Sums over one run of devices or many.
    Stats {
        /// Steps taken.
        steps,
        /// Datagrams sent.
        sent,
        /// Datagrams that came to a device.
        datagrams,
        /// Datagrams lost on their way.
        lost,
        /// Datagrams damaged.
        damaged,
        /// Connections begun.
        connects,
        /// Queue pairs made.
        sides,
        /// Sides that could send.
        established,
        /// Connections refused.
        refused,
        /// Requests posted.
        posted,
        /// Entries of completion queues.
        completions,
        /// Messages received.
        received,
        /// Payload bytes of requests and receives completed.
        bytes,
        /// Queues that failed.
        failed,
        /// Devices that died.
        crashes,
        /// Virtual time, milliseconds.
        virtual_ms,
    }
}
