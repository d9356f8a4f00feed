//! Counters of a run.

use crate::engine::numbers::numbers;

numbers! {
    /// Sums over one run of devices, or over many.
    Stats {
        /// Steps taken.
        steps,
        /// Datagrams sent.
        sent,
        /// Datagrams that reached a device.
        datagrams,
        /// Datagrams lost on their way.
        lost,
        /// Datagrams damaged.
        damaged,
        /// Connections that programs began.
        connects,
        /// Queue pairs made.
        sides,
        /// Sides that reached the stage in which they could send.
        established,
        /// Connections refused.
        refused,
        /// Requests posted.
        posted,
        /// Entries of completion queues.
        completions,
        /// Messages received.
        received,
        /// UD datagrams that programs received.
        letters,
        /// Payload bytes of requests and receives completed.
        bytes,
        /// Queues that failed.
        failed,
        /// Datagrams that devices dropped because of their ICRC.
        icrc_drops,
        /// Datagrams whose payloads were placed directly in their final memory.
        landed,
        /// Request packets that devices sent again.
        resent,
        /// Request packets that came again.
        repeated,
        /// Times that a message found no receive.
        rnr_naks,
        /// Peers given up because they did not answer.
        given_up,
        /// Messages of connection managers sent again.
        cm_resent,
        /// Devices that died.
        crashes,
        /// Virtual time, milliseconds.
        virtual_ms,
    }
}
