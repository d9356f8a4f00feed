//! What a run did, in numbers.

use crate::engine::numbers::numbers;

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
        /// Datagrams of programs received.
        letters,
        /// Payload bytes of requests and receives completed.
        bytes,
        /// Queues that failed.
        failed,
        /// Datagrams that devices dropped for their ICRC.
        icrc_drops,
        /// Datagrams whose payloads landed.
        landed,
        /// Request packets that devices sent again.
        resent,
        /// Request packets that came again.
        repeated,
        /// Receives that were missing.
        rnr_naks,
        /// Peers given up for want of an answer.
        given_up,
        /// Messages of connection managers sent again.
        cm_resent,
        /// Devices that died.
        crashes,
        /// Virtual time, milliseconds.
        virtual_ms,
    }
}
