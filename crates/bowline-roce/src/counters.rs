//! Counters of a device, declared once: external name and meaning.

use bowline_base::counters;

counters! {
    /// Every counter of a device; monotonic.
    pub struct Counters {
        /// Datagrams received.
        rx_packets,
        /// Bytes of received datagrams, from the first header to the ICRC.
        rx_bytes,
        /// Datagrams whose payloads were received at their destination.
        rx_landed,
        /// Datagrams sent.
        tx_packets,
        /// Bytes of datagrams sent, from the first header to the ICRC.
        tx_bytes,
        /// Bursts sent.
        tx_bursts,
        /// Bytes over which ICRCs of sent packets were computed.
        tx_icrc_bytes,
        /// Bytes over which ICRCs of received packets were computed.
        rx_icrc_bytes,
        /// Dropped: sent to an address that is not one of the device's [RX-2].
        drop_address,
        /// Dropped: unknown opcode, or a length that does not fit the opcode [RX-3].
        drop_malformed,
        /// Dropped: header version or reserved queue pair number [RX-4].
        drop_header,
        /// Dropped: no such queue pair [RX-5].
        drop_no_qp,
        /// Dropped: the opcode is not one of the queue pair's transport [RX-5].
        drop_transport,
        /// Dropped: the queue pair is not ready for the packet [RX-5].
        drop_state,
        /// Dropped: not from the peer of the connection [RX-6].
        drop_peer,
        /// Dropped: partition key [RX-7].
        drop_pkey,
        /// Dropped: queue key [RX-8].
        drop_qkey,
        /// Dropped: ICRC [RX-9].
        drop_icrc,
        /// ICRCs of IPv4 packets found correct by solving for the identification [ICRC-31].
        icrc_solved,
        /// Congestion notifications received [HDR-14].
        rx_cnp,
        /// Congestion notifications sent [CC-6].
        tx_cnp,
        /// Datagrams, or several of one burst, that arrived with a congestion mark.
        rx_marked,
        /// Management datagrams dropped: unknown to the connection manager, or the send queue was
        /// full.
        drop_mad,
        /// Management datagrams received.
        rx_mads,
        /// Management datagrams sent.
        tx_mads,
        /// Messages of the connection manager that match no connection or state [CM-52].
        cm_ignored,
        /// Connection requests dropped because there are too many connections.
        cm_overflow,
        /// Unproven connections forgotten to make room for others [CM-57].
        cm_pushed_out,
        /// Messages of the connection manager resent [CM-40] to [CM-42].
        cm_resent,
        /// Messages of the connection manager given up because no answer came.
        cm_timeouts,
        /// Requests executed: messages, and reads and atomics.
        requests_executed,
        /// Duplicate request packets [RSP-3].
        requests_duplicate,
        /// Request packets discarded: after a gap without being kept, or while no receive is
        /// posted.
        requests_discarded,
        /// Request packets that arrived after a gap and were kept.
        requests_kept,
        /// Kept request packets executed after the gap was filled.
        requests_replayed,
        /// Acknowledgements sent.
        acks_sent,
        /// Acknowledgements repeated in case the last one was lost [RSP-24].
        acks_repeated,
        /// Sequence NAKs sent [RSP-2].
        naks_sequence_sent,
        /// Invalid request NAKs sent.
        naks_invalid_sent,
        /// Remote access NAKs sent.
        naks_access_sent,
        /// Remote operational NAKs sent.
        naks_operation_sent,
        /// Gaps reported to peers that take such reports [CC-10].
        gaps_reported,
        /// NAKs sent because no receive was posted [RSP-12].
        rnr_naks_sent,
        /// Acknowledgements, read responses and atomic answers received.
        responses_received,
        /// Responses that no request waits for.
        responses_ignored,
        /// Sequence NAKs received.
        naks_sequence_received,
        /// Reports of gaps received.
        gap_reports_received,
        /// RNR NAKs received.
        rnr_naks_received,
        /// NAKs received that ended a connection.
        naks_fatal_received,
        /// Go-backs: retransmissions of everything from a PSN on.
        go_backs,
        /// Retransmissions of a single missing packet.
        repairs,
        /// Probes of a silent peer by retransmitting one packet.
        probes,
        /// Request packets retransmitted.
        packets_resent,
        /// Peers to which packets are sent one by one because bursts do not arrive [ICRC-23].
        bursts_given_up,
        /// Expired retransmission timers.
        timeouts,
        /// Connections given up because no answer came.
        retries_exceeded,
        /// Completion queues overrun.
        cq_overruns,
        /// Received datagrams dropped because no receive was posted or it was too small [RX-12].
        ud_dropped,
        /// Messages of unreliable connections dropped: a packet was lost, no receive was posted, or
        /// the message was not allowed [UC-4], [UC-5].
        uc_messages_dropped,
        /// Queue pairs that went to ERR without being asked to.
        qp_errors,
    }
}
