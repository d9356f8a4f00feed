//! Counters of a device, declared once: name for the outside, and meaning.

macro_rules! counters {
    ($($(#[doc = $doc:literal])+ $name:ident,)+) => {
        /// Every counter of a device; monotonic.
        #[derive(Clone, Debug, Default, PartialEq, Eq)]
        pub struct Counters {
            $($(#[doc = $doc])+ pub $name: u64,)+
        }

        impl Counters {
            /// Names and values.
            pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((stringify!($name), self.$name)),+].into_iter()
            }
        }
    };
}

counters! {
    /// Datagrams received.
    rx_packets,
    /// Their bytes, from the first header to the ICRC.
    rx_bytes,
    /// Datagrams received whose payloads were put where they belong by the driver.
    rx_landed,
    /// Datagrams sent.
    tx_packets,
    /// Their bytes.
    tx_bytes,
    /// Bursts they were sent in.
    tx_bursts,
    /// Bytes of packets that their ICRC was computed over, to send them.
    tx_icrc_bytes,
    /// Bytes of packets that the ICRC was computed over, to check them.
    rx_icrc_bytes,
    /// Dropped: to an address that is not one of the device [RX-2].
    drop_address,
    /// Dropped: unknown opcode, or a length that does not fit it [RX-3].
    drop_malformed,
    /// Dropped: header version or reserved queue pair number [RX-4].
    drop_header,
    /// Dropped: no such queue pair [RX-5].
    drop_no_qp,
    /// Dropped: the opcode is not of the queue pair's transport [RX-5].
    drop_transport,
    /// Dropped: the queue pair is not ready for it [RX-5].
    drop_state,
    /// Dropped: not from the peer of the connection [RX-6].
    drop_peer,
    /// Dropped: partition key [RX-7].
    drop_pkey,
    /// Dropped: queue key [RX-8].
    drop_qkey,
    /// Dropped: ICRC [RX-9].
    drop_icrc,
    /// ICRCs of IPv4 packets that only solving for the identification has found right [ICRC-31].
    icrc_solved,
    /// Congestion notifications, ignored [HDR-14].
    rx_cnp,
    /// Management datagrams dropped because nothing takes them.
    drop_mad,
    /// Management datagrams received.
    rx_mads,
    /// Management datagrams sent.
    tx_mads,
    /// Messages of the connection manager that fit nothing [CM-52].
    cm_ignored,
    /// Connection requests dropped because there are too many connections.
    cm_overflow,
    /// Connections nothing has proved anybody to be behind, forgotten to make room for others
    /// [CM-57].
    cm_pushed_out,
    /// Messages of the connection manager sent again [CM-40] to [CM-42].
    cm_resent,
    /// Messages of the connection manager given up for want of an answer.
    cm_timeouts,
    /// Requests executed: messages, and reads and atomics.
    requests_executed,
    /// Request packets that came again [RSP-3].
    requests_duplicate,
    /// Request packets discarded: after a gap and not kept, or while a receive is missing.
    requests_discarded,
    /// Request packets that came after a gap, and were kept.
    requests_kept,
    /// Those of them carried out when what was missing had come.
    requests_replayed,
    /// Acknowledgements sent.
    acks_sent,
    /// Acknowledgements sent again in case the last one was lost [RSP-24].
    acks_repeated,
    /// Sequence NAKs sent [RSP-2].
    naks_sequence_sent,
    /// Invalid request NAKs sent.
    naks_invalid_sent,
    /// Remote access NAKs sent.
    naks_access_sent,
    /// Remote operational NAKs sent.
    naks_operation_sent,
    /// NAKs sent because no receive was posted [RSP-12].
    rnr_naks_sent,
    /// Acknowledgements, read responses and atomic answers received.
    responses_received,
    /// Answers that no request waits for.
    responses_ignored,
    /// Sequence NAKs received.
    naks_sequence_received,
    /// RNR NAKs received.
    rnr_naks_received,
    /// NAKs received that ended a connection.
    naks_fatal_received,
    /// Times a requester went back, and sent again all that followed.
    go_backs,
    /// Times it sent again only what was missing.
    repairs,
    /// Times it asked a silent peer, by sending one packet again, how far it has come.
    probes,
    /// Request packets sent again.
    packets_resent,
    /// Peers that are sent packets one by one since bursts do not arrive [ICRC-23].
    bursts_given_up,
    /// Retransmission timers run out.
    timeouts,
    /// Connections given up for want of an answer.
    retries_exceeded,
    /// Completion queues overrun.
    cq_overruns,
    /// Datagrams received that found no receive, or one too small [RX-12].
    ud_dropped,
    /// Queue pairs that went to error by themselves.
    qp_errors,
}
