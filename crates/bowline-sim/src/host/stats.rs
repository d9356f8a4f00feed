//! What a run did, in numbers.

use crate::engine::numbers::numbers;

numbers! {
    /// Sums over one run of nodes and their programs, or many.
    Stats {
        /// Steps taken.
        steps,
        /// Steps of programs in the middle of what a node did.
        between,
        /// Messages pushed to a ring.
        pushed,
        /// Messages that the node was asked to send.
        asked,
        /// Messages refused because there was no room.
        refused,
        /// Messages taken from a ring.
        taken,
        /// Messages received from the node.
        received,
        /// Bytes of messages that programs have.
        bytes,
        /// Requests to wake the node.
        wakes,
        /// Wake tokens that programs took.
        tokens,
        /// Sockets opened.
        sockets,
        /// Processes started.
        processes,
        /// Processes that share the sockets of another.
        forks,
        /// Processes killed.
        kills,
        /// Words of shared memory overwritten.
        lies,
        /// Nodes killed.
        nodes_killed,
        /// Nodes that handed over.
        hand_overs,
        /// Requests that were refused for a quota.
        quotas,
        /// Virtual time, milliseconds.
        virtual_ms,
    }
}
