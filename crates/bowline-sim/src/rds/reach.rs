//! Everything that runs of RDS nodes can reach, declared for [`Coverage`], so that what no seed
//! reaches shows.

use bowline_rds::Node;

use super::plan::{FaultKind, NodeKind};
use crate::engine::coverage::Coverage;

/// Kinds of nodes that behave differently towards each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A bowline node that acknowledges end to end, with 8 paths or 1.
    EndToEnd8,
    EndToEnd1,
    /// A bowline node that goes by TCP's acknowledgements, with 8 paths or 1.
    Plain8,
    Plain1,
    /// A kernel 6.12, a kernel that tells its generation, and a kernel from before multipath.
    Kernel,
    LaterKernel,
    OldKernel,
}

impl Kind {
    pub(crate) fn of(node: &NodeKind) -> Self {
        match node {
            NodeKind::Bowline { end_to_end: true, paths: 1, .. } => Self::EndToEnd1,
            NodeKind::Bowline { end_to_end: true, .. } => Self::EndToEnd8,
            NodeKind::Bowline { paths: 1, .. } => Self::Plain1,
            NodeKind::Bowline { .. } => Self::Plain8,
            NodeKind::Kernel(flavour) if !flavour.multipath => Self::OldKernel,
            NodeKind::Kernel(flavour) if flavour.later => Self::LaterKernel,
            NodeKind::Kernel(_) => Self::Kernel,
        }
    }

    fn class(self) -> usize {
        match self {
            Self::EndToEnd8 | Self::EndToEnd1 => 0,
            Self::Plain8 | Self::Plain1 => 1,
            Self::Kernel | Self::LaterKernel | Self::OldKernel => 2,
        }
    }
}

/// Number of kinds.
const KINDS: usize = 7;
/// Index of the first kind that is a kernel. Kernels are not simulated among themselves.
const FIRST_KERNEL: usize = 4;

macro_rules! to_every_kind {
    ($from:literal) => {
        [
            concat!($from, " -> end to end 8"),
            concat!($from, " -> end to end 1"),
            concat!($from, " -> plain 8"),
            concat!($from, " -> plain 1"),
            concat!($from, " -> kernel"),
            concat!($from, " -> later kernel"),
            concat!($from, " -> old kernel"),
        ]
    };
}

const PAIRS: [[&str; KINDS]; KINDS] = [
    to_every_kind!("end to end 8"),
    to_every_kind!("end to end 1"),
    to_every_kind!("plain 8"),
    to_every_kind!("plain 1"),
    to_every_kind!("kernel"),
    to_every_kind!("later kernel"),
    to_every_kind!("old kernel"),
];

macro_rules! on_every_class {
    ($what:literal) => {
        [concat!($what, ", end to end"), concat!($what, ", plain"), concat!($what, ", kernel")]
    };
}

/// Returns the names of a fault on hosts of three classes; some faults do not occur on the third,
/// the kernels.
fn fault_names(kind: FaultKind) -> [&'static str; 3] {
    match kind {
        FaultKind::Cut => on_every_class!("connection cut"),
        FaultKind::Crash => on_every_class!("process dies"),
        FaultKind::Reboot => on_every_class!("machine goes off"),
        FaultKind::Partition => on_every_class!("no way in both directions"),
        FaultKind::OneWay => on_every_class!("no way in one direction"),
        FaultKind::Stall => on_every_class!("process stalls"),
        FaultKind::StopReader => on_every_class!("reader stops"),
        FaultKind::Reopen => on_every_class!("socket opened again"),
        FaultKind::Cancel => on_every_class!("sender cancels"),
        FaultKind::AddressLoss => on_every_class!("address lost"),
        FaultKind::AddressMove => on_every_class!("address moves"),
        FaultKind::DropLinks => on_every_class!("operator drops connections"),
        FaultKind::Delay => on_every_class!("everything is slow"),
        FaultKind::Shutdown => on_every_class!("node ends in order"),
        FaultKind::HandOver => on_every_class!("node hands over"),
        FaultKind::Crowd => on_every_class!("many connections come at once"),
    }
}

/// Tells whether a fault occurs on bowline nodes only.
const fn not_of_kernels(kind: FaultKind) -> bool {
    matches!(kind, FaultKind::Shutdown | FaultKind::HandOver)
}

/// Counters of the core that stay 0 in these runs: those that exist for tools only or that a
/// driver counts, and those of limits that no plan comes near.
const NEVER_COUNTED: [&str; 48] = [
    "recv_drop_bad_checksum",
    "recv_drop_dead_sock",
    "recv_deliver_raced",
    "recv_immediate_retry",
    "recv_delayed_retry",
    "send_lock_contention",
    "send_lock_queue_raced",
    "send_immediate_retry",
    "send_delayed_retry",
    "send_drop_acked",
    "page_remainder_hit",
    "page_remainder_miss",
    "send_stuck_rm",
    "tcp_connect_raced",
    "tcp_listen_closed_stale",
    "ib_ack_send_failure",
    "ib_evt_handler_call",
    "ib_rdma_mr_1m_pool_depleted",
    "ib_rdma_mr_1m_pool_flush",
    "ib_rdma_mr_1m_pool_wait",
    "ib_rdma_mr_1m_reused",
    "ib_rdma_mr_1m_used",
    "ib_rdma_mr_8k_pool_depleted",
    "ib_rdma_mr_8k_pool_flush",
    "ib_rdma_mr_8k_pool_wait",
    "ib_rdma_mr_8k_reused",
    "ib_rdma_mr_8k_used",
    "ib_rx_cq_event",
    "ib_rx_refill_from_cq",
    "ib_rx_refill_from_thread",
    "ib_rx_ring_empty",
    "ib_tasklet_call",
    "ib_tx_cq_event",
    "ib_tx_credit_updates",
    "ib_tx_sg_mapping_failure",
    "ib_tx_stalled",
    // They exist with several programs on a node, or a list of peers.
    "bl_peers_not_permitted",
    "bl_programs_refused",
    // Peers of the simulation break no rules.
    "bl_peer_errors",
    "bl_peer_oversized",
    "bl_peer_nonsense",
    // There are never more peers than a node accepts.
    "bl_peers_reclaimed",
    // Every run does these.
    "recv_delivered",
    "recv_queued",
    "send_queued",
    "copy_to_user",
    "copy_from_user",
    "tcp_data_ready_calls",
];

/// Groups and names, except those of pairs, faults and counters.
const OTHERS: [(&str, &[&str]); 12] = [
    (
        "tcp",
        &[
            "SYN lost",
            "SYN refused",
            "SYN comes to a host that was restarted meanwhile",
            "SYN given up",
            "SYN-ACK lost",
            "SYN-ACK comes to another host",
            "last packet of the handshake lost",
            "handshake completed by a segment",
            "data lost",
            "data comes to another host",
            "data comes to an end that is broken",
            "data comes to an end that is closed",
            "acknowledgement lost",
            "retransmission timeout",
            "window probe",
            "user timeout",
            "keepalive timeout",
            "keepalive answered by a reset",
            "reset received",
            "reset lost",
            "reset comes to another host",
            "reset of an end that is closed",
            "connect refused by a reset",
            "closed with bytes unread",
            "closed by a listener",
            "send buffer full",
            "another port than was asked for",
        ],
    ),
    (
        "cut",
        &[
            "reset to both",
            "reset to one",
            "black hole",
            "FIN to both",
            "at a byte",
            "while connecting",
        ],
    ),
    (
        "driver",
        &[
            "read refused by the node",
            "connection checked",
            "cut with bytes unread",
            "drain took too long",
            "hand-over cuts a connection",
            "not all peers could be told of the end",
            "connection waits for a successor",
            "write reported late",
            "write failed",
        ],
    ),
    (
        "kernel",
        &[
            "drops a message as old",
            "doubles a message",
            "drops a message of a restarted peer's",
            "resets a connection because no path is free",
            "resets a knock",
            "sends on without the path count",
            "peer restarted",
            "two paths change places",
            "messages wait on paths that are no more",
            "a path waits for path 0",
        ],
    ),
    (
        "kernel over RDMA",
        &[
            "gets a message",
            "drops a duplicate",
            "is asked to acknowledge",
            "drops a connection for a later request",
            "refuses while it connects",
            "refuses while a connection ends",
            "repeats numbers of an earlier boot",
        ],
    ),
    (
        "excused",
        &[
            "socket or process gone",
            "cancelled",
            "acknowledged and not read by a kernel",
            "begun on a dead machine's connection",
            "begun there by less than its name",
            "dropped by a kernel",
        ],
    ),
    (
        "send",
        &[
            "queue full",
            "congested",
            "waits for the peer's kind",
            "a kernel's sender waits",
            "empty",
            "too short for its name",
            "up to 64 KiB",
            "up to 1 MiB",
            "above 1 MiB",
        ],
    ),
    (
        "receive",
        &[
            "again in a new process",
            "after an address came back",
            "ahead of one on another connection",
            "again, on a kernel's overtaken connection",
            "late, as a kernel dropped it at first",
            "over RDMA",
            "over TCP where RDMA is served",
        ],
    ),
    (
        "rdma",
        &[
            "REQ lost",
            "REQ repeated",
            "REQ comes again",
            "REQ comes again after the connection",
            "REQ of an attempt that was given up",
            "REQ without a listener",
            "REQ refused by the node",
            "REP lost",
            "REP repeated",
            "REP comes to an attempt that was given up",
            "RTU lost",
            "REJ lost",
            "DREQ received",
            "DREQ lost",
            "CM gives up",
            "established by a frame",
            "frame lost",
            "frames sent again",
            "frame comes to an end that has broken",
            "frame of an end that has broken",
            "frames taken after the end",
            "no receive posted",
            "retries exceeded",
            "cut on both sides",
            "cut on one side, which tells",
            "cut on one side, silently",
            "posting reported late",
            "receives posted late",
            "receives refused by the node",
            "hand-over ends a connection",
            "long frames",
            "receives are never posted",
            "both connect at once",
            "a type of service",
            "REQ comes to a node that took the address",
            "accepted for an address that has moved",
        ],
    ),
    (
        "ops",
        &[
            "write",
            "read",
            "fetch-add",
            "compare-swap",
            "refused",
            "refusal lost",
            "broken before a request",
            "broken in a request",
            "broken after a request",
            "not taken by the device",
            "a fence waits",
            "silent message",
            "region announced",
            "region taken back",
            "region used",
            "region released",
            "reported: success",
            "reported: remote error",
            "reported: cancelled",
            "reported: dropped",
            "reported: other error",
        ],
    ),
    ("recovered within", &["1 s", "5 s", "15 s", "40 s"]),
    ("orderly end", &["judged", "judged over RDMA", "a fault came between"]),
];

/// Declares everything that a run can reach.
pub(crate) fn declare(coverage: &mut Coverage) {
    for (group, names) in OTHERS {
        coverage.declare(group, names);
    }
    for kind in FaultKind::ALL {
        let classes = if not_of_kernels(kind) { 2 } else { 3 };
        coverage.declare("fault", &fault_names(kind)[..classes]);
    }
    for (from, names) in PAIRS.iter().enumerate() {
        let to = if from >= FIRST_KERNEL { FIRST_KERNEL } else { KINDS };
        coverage.declare("pair", &names[..to]);
    }
    for (name, _) in bowline_rds::Counters::default().iter() {
        if !NEVER_COUNTED.contains(&name) {
            coverage.declare("core", &[name]);
        }
    }
}

/// Counts a fault on a host of this kind.
pub(crate) fn fault(coverage: &mut Coverage, what: FaultKind, host: Kind) {
    coverage.hit("fault", fault_names(what)[host.class()]);
}

/// Adds the counters of a node.
pub(crate) fn node(coverage: &mut Coverage, node: &Node) {
    for (name, count) in node.counters().iter() {
        if count > 0 && !NEVER_COUNTED.contains(&name) {
            coverage.add("core", name, count);
        }
    }
}

/// Messages received, by pairs of kinds.
#[derive(Debug, Default)]
pub(crate) struct Pairs([[u64; KINDS]; KINDS]);

impl Pairs {
    pub(crate) fn count(&mut self, from: Kind, to: Kind) {
        self.0[from as usize][to as usize] += 1;
    }

    pub(crate) fn tell(&self, coverage: &mut Coverage) {
        for (from, row) in self.0.iter().enumerate() {
            for (to, count) in row.iter().enumerate().filter(|(_, count)| **count > 0) {
                coverage.add("pair", PAIRS[from][to], *count);
            }
        }
    }
}
