//! What a run did, in numbers.

use crate::engine::numbers::numbers;

numbers! {
    /// Sums over one run of sessions and disks, or many.
    Stats {
        /// Steps taken.
        steps,
        /// Datagrams sent.
        sent,
        /// Datagrams lost on their way.
        lost,
        /// Sessions begun.
        sessions,
        /// Sessions that could not be opened.
        unopened,
        /// Disks mapped.
        mapped,
        /// Disks that could not be mapped, and were tried again later.
        not_mapped,
        /// Disks given up while the program went on.
        given_up,
        /// The same with requests under way.
        given_up_busy,
        /// Requests of programs.
        requests,
        /// Requests that failed.
        failed,
        /// Bytes read and written.
        bytes,
        /// Operations of the server's storage.
        operations,
        /// Paths that came up.
        paths_up,
        /// Paths that were lost.
        paths_lost,
        /// Requests that moved to another path.
        failovers,
        /// Requests that waited for a chunk another path's request still had.
        waits,
        /// Answers of operations whose path was gone.
        late_answers,
        /// READs whose data went to several places.
        scattered,
        /// Keys the server left to the client to invalidate.
        keys_left,
        /// Writes of the server with keys that were not good any more.
        late_writes,
        /// Requests sent again after an outage.
        resent,
        /// Times a session lost its last path.
        outages,
        /// Paths the server closed because a rule was broken.
        violations,
        /// Writes of hostile clients.
        attacks,
        /// Machines that died.
        crashes,
        /// Faults of any kind.
        faults,
        /// Times lines held what they were given, and delivered it late.
        holds,
        /// Machines that fell silent.
        silences,
        /// Paths that were given up for it.
        silences_noticed,
        /// Queue pairs of devices that failed without a word.
        muted,
        /// Servers that were closed and started again.
        restarts,
        /// Times a program looked, in the end, whether every path was back, and one was not.
        waits_for_paths,
        /// Virtual time, milliseconds.
        virtual_ms,
    }
}
