//! Counters, declared once: name on the wire of the info interface, and meaning.
//! Spec: `docs/spec/rds.md`, section 10.3.

use bowline_base::counters;

counters! {
    /// Every counter of a node, the kernel's in its order, then those that only bowline has;
    /// monotonic.
    pub struct Counters {
        /// Path resets.
        conn_reset,
        /// RDMA header checksum failures.
        recv_drop_bad_checksum,
        /// Duplicates dropped.
        recv_drop_old_seq,
        /// Messages for a port nobody is bound to.
        recv_drop_no_sock,
        /// Messages for a socket that is closing.
        recv_drop_dead_sock,
        /// A second reader took the message first.
        recv_deliver_raced,
        /// Messages handed to the application, peeks included.
        recv_delivered,
        /// Messages queued on sockets.
        recv_queued,
        /// Receive worker had to go on at once.
        recv_immediate_retry,
        /// Receive worker had to wait for memory.
        recv_delayed_retry,
        /// Messages that asked for an acknowledgement.
        recv_ack_required,
        /// Bytes read by RDMA.
        recv_rdma_bytes,
        /// Pings answered.
        recv_ping,
        /// A socket's send accounting reached 0.
        send_queue_empty,
        /// Messages refused because the send queue was full.
        send_queue_full,
        /// The transmitter was busy.
        send_lock_contention,
        /// Another sender went on already.
        send_lock_queue_raced,
        /// Send worker had to go on at once.
        send_immediate_retry,
        /// Send worker had to wait.
        send_delayed_retry,
        /// Never incremented by the kernel.
        send_drop_acked,
        /// Messages that asked for an acknowledgement.
        send_ack_required,
        /// Messages queued, pings and pongs included.
        send_queued,
        /// RDMA operations.
        send_rdma,
        /// Bytes written by RDMA.
        send_rdma_bytes,
        /// Probe pings, and pongs, sent by the node itself.
        send_pong,
        /// Payload allocator reuse.
        page_remainder_hit,
        /// Payload allocator new page.
        page_remainder_miss,
        /// Payload bytes given to applications.
        copy_to_user,
        /// Payload bytes taken from applications.
        copy_from_user,
        /// Ports that became congested.
        cong_update_queued,
        /// Congestion maps received.
        cong_update_received,
        /// Sends refused, and pongs suppressed, because of congestion.
        cong_send_error,
        /// Blocking sends that waited for congestion to end.
        cong_send_blocked,
        /// Payload bytes queued on sockets.
        recv_bytes_added_to_sock,
        /// Payload bytes taken off sockets.
        recv_bytes_freed_fromsock,
        /// A message that made no progress.
        send_stuck_rm,
        /// Connections refused because both sides connected at once.
        ib_connect_raced,
        /// Connections given up because the peer connected again.
        ib_listen_closed_stale,
        /// Batches of received frames handled.
        ib_evt_handler_call,
        /// The same.
        ib_tasklet_call,
        /// Completions of sends handled.
        ib_tx_cq_event,
        /// Sending stopped since as many frames were outstanding as may be.
        ib_tx_ring_full,
        /// Sending stopped for want of credits.
        ib_tx_throttle,
        /// Never incremented.
        ib_tx_sg_mapping_failure,
        /// Never incremented.
        ib_tx_stalled,
        /// Frames sent that announced credits.
        ib_tx_credit_updates,
        /// Batches of received frames handled.
        ib_rx_cq_event,
        /// Never incremented.
        ib_rx_ring_empty,
        /// Times that receives were posted again.
        ib_rx_refill_from_cq,
        /// Never incremented.
        ib_rx_refill_from_thread,
        /// Posting of receives stopped because a memory limit was reached.
        ib_rx_alloc_limit,
        /// Frames received.
        ib_rx_total_frags,
        /// Messages received, congestion maps included.
        ib_rx_total_incs,
        /// Frames received that announced credits.
        ib_rx_credit_updates,
        /// Acknowledgement frames sent.
        ib_ack_sent,
        /// Never incremented.
        ib_ack_send_failure,
        /// Acknowledgements put off since another was outstanding.
        ib_ack_send_delayed,
        /// Acknowledgements that went out with a message.
        ib_ack_send_piggybacked,
        /// Acknowledgement frames received.
        ib_ack_received,
        /// Regions of up to two pages registered.
        ib_rdma_mr_8k_alloc,
        /// Such regions released.
        ib_rdma_mr_8k_free,
        /// Never incremented.
        ib_rdma_mr_8k_used,
        /// Never incremented.
        ib_rdma_mr_8k_pool_flush,
        /// Never incremented.
        ib_rdma_mr_8k_pool_wait,
        /// Such regions refused at the node's limit.
        ib_rdma_mr_8k_pool_depleted,
        /// Larger regions registered.
        ib_rdma_mr_1m_alloc,
        /// Such regions released.
        ib_rdma_mr_1m_free,
        /// Never incremented.
        ib_rdma_mr_1m_used,
        /// Never incremented.
        ib_rdma_mr_1m_pool_flush,
        /// Never incremented.
        ib_rdma_mr_1m_pool_wait,
        /// Such regions refused at the node's limit.
        ib_rdma_mr_1m_pool_depleted,
        /// Never incremented.
        ib_rdma_mr_8k_reused,
        /// Never incremented.
        ib_rdma_mr_1m_reused,
        /// Compare-and-swaps done.
        ib_atomic_cswp,
        /// Fetch-and-adds done.
        ib_atomic_fadd,
        /// Reads that brought data.
        tcp_data_ready_calls,
        /// Times TCP reported progress.
        tcp_write_space_calls,
        /// Writes that TCP took only in part.
        tcp_sndbuf_full,
        /// Never incremented by the kernel.
        tcp_connect_raced,
        /// Never incremented by the kernel.
        tcp_listen_closed_stale,
        /// TCP connections put in service.
        links_up => "bl_links_up",
        /// TCP connections accepted.
        links_accepted => "bl_links_accepted",
        /// TCP connections refused because of a limit.
        links_refused => "bl_links_refused",
        /// TCP connections refused because the list of peers does not permit the peer.
        peers_not_permitted => "bl_peers_not_permitted",
        /// Requests of programs on a host's node that its policy or a quota refused.
        programs_refused => "bl_programs_refused",
        /// Knocks sent: connections opened so that the peer, with the smaller address, connects.
        knocks_sent => "bl_knocks_sent",
        /// Knocks received.
        knocks_received => "bl_knocks_received",
        /// Connections dropped because the peer broke a rule.
        peer_errors => "bl_peer_errors",
        /// Connections renewed to get a fresh congestion map, since an older map may have come
        /// last.
        map_refreshes => "bl_map_refreshes",
        /// Frames longer than allowed.
        peer_oversized => "bl_peer_oversized",
        /// Congestion maps of a wrong length, ignored.
        peer_nonsense => "bl_peer_nonsense",
        /// Acknowledgement frames sent to bowline nodes.
        acks_sent => "bl_acks_sent",
        /// Acknowledgement frames received.
        acks_received => "bl_acks_received",
        /// Messages sent again.
        retransmits => "bl_retransmits",
        /// Peers found to have restarted.
        peer_restarts => "bl_peer_restarts",
        /// Messages dropped because the process they were started for is gone.
        send_drop_restart => "bl_send_drop_restart",
        /// Pongs not sent because too many were queued.
        pongs_dropped => "bl_pongs_dropped",
        /// Reads stopped because a memory limit was reached.
        read_pauses => "bl_read_pauses",
        /// Connections dropped because unfinished messages held too much memory.
        partials_dropped => "bl_partials_dropped",
        /// Peers that never sent a whole message, forgotten to make room for newer ones.
        strangers_forgotten => "bl_strangers_forgotten",
        /// Idle peers forgotten to make room.
        peers_reclaimed => "bl_peers_reclaimed",
        /// Payload bytes copied inside the node on receive, in addition to the copy to the
        /// application.
        rx_copied_bytes => "bl_rx_copied_bytes",
    }
}
