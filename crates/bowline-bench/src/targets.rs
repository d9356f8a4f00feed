//! What must be reached, as ratios to what was measured in the same round, and the verdicts.

use crate::args::Suite;
use crate::results::Results;
use crate::stats::{Spread, spread};

/// Two runs of an anchor further apart than this share of their mean mark the round as disturbed.
pub(crate) const ANCHOR_LIMIT: f64 = 0.20;
/// Fewer undisturbed rounds than this decide nothing.
const ROUNDS_MIN: usize = 3;

/// A figure that is missed is at its ceiling from this share of what bare sockets reach.
const NEAR_CEILING: f64 = 0.85;

/// Which figure of a measurement counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Metric {
    /// Messages per second; more is better.
    Rate,
    /// Payload bytes per second, for messages of different sizes; more is better.
    ByteRate,
    /// Median round trip; less is better.
    P50,
    /// Round trip that one in a hundred exceeds; less is better.
    P99,
    /// System calls per message of the receiver; less is better.
    RxSyscalls,
    /// System calls per message of the sender; less is better.
    TxSyscalls,
    /// Acknowledgements per message that the receiver sends; less is better.
    RxAcks,
    /// Bytes of memory each; less is better.
    Bytes,
    /// Packets with data per message, both ways; less is better.
    DataPackets,
    /// Seconds of the longest pause between two answers, of all rounds; less is better.
    Pause,
    /// Messages that failed, in the worst of all rounds; less is better.
    Failed,
}

impl Metric {
    /// Says whether a smaller figure is the better one.
    pub(crate) const fn smaller_is_better(self) -> bool {
        !matches!(self, Self::Rate | Self::ByteRate)
    }

    /// Says whether a single measurement decides, because noise cannot touch it.
    const fn is_exact(self) -> bool {
        !matches!(self, Self::Rate | Self::ByteRate | Self::P50 | Self::P99)
    }

    /// Says whether the worst round is what counts.
    const fn is_of_the_worst(self) -> bool {
        matches!(self, Self::Pause | Self::Failed)
    }
}

/// Names of entries of a cell.
pub(crate) type Labels = &'static [&'static str];

/// What a figure is compared with.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Against {
    /// The best of these rivals, in the same round.
    Best(Labels),
    /// The rival at the index of our better entry, in the same round.
    SameIndex(Labels),
    /// A number.
    Limit(f64),
}

/// One target.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Target {
    pub(crate) id: &'static str,
    pub(crate) what: &'static str,
    pub(crate) block: &'static str,
    /// Names of what is judged in the cell; the better one of each round counts.
    pub(crate) own: Labels,
    pub(crate) metric: Metric,
    pub(crate) against: Against,
    pub(crate) must: f64,
    pub(crate) goal: f64,
    /// Bare sockets that do only the minimum for the figure, and their rivals.
    pub(crate) ceiling: Option<(Labels, Against)>,
}

impl Target {
    /// The labels of everything that is measured for this target.
    #[cfg(test)]
    pub(crate) fn labels(&self) -> impl Iterator<Item = &'static str> {
        let ceiling = self.ceiling.iter().flat_map(|(labels, _)| *labels);
        self.own.iter().chain(self.rivals()).chain(ceiling).copied()
    }

    /// The target that judges the ceiling instead of bowline.
    fn ceiling_target(&self) -> Option<Self> {
        self.ceiling.map(|(own, against)| Self { own, against, ..*self })
    }

    const fn with_ceiling(self, own: Labels, against: Against) -> Self {
        Self { ceiling: Some((own, against)), ..self }
    }

    /// The labels of what the figure is compared with.
    pub(crate) fn rivals(&self) -> impl Iterator<Item = &&'static str> {
        match self.against {
            Against::Best(labels) | Against::SameIndex(labels) => labels.iter(),
            Against::Limit(_) => [].iter(),
        }
    }

    /// What the figure is compared with, for a table.
    pub(crate) fn against_text(&self) -> String {
        match self.against {
            Against::Best(labels) => labels.join("|"),
            Against::SameIndex(labels) => format!("{} alike", labels.first().unwrap_or(&"")),
            Against::Limit(_) => "absolute".into(),
        }
    }
}

const TCPB: Against = Against::Best(&["tcpb"]);
const ZMQ: Against = Against::Best(&["zmq"]);
const FABRICS: Against = Against::Best(&["ofi-net", "ofi-rxm", "ucx"]);
const TCP1: Against = Against::Best(&["tcp1"]);
const TCPS: Against = Against::Best(&["tcpb", "tcpz", "tcp1"]);

const fn target(
    id: &'static str,
    what: &'static str,
    block: &'static str,
    own: Labels,
    metric: Metric,
    against: Against,
    (must, goal): (f64, f64),
) -> Target {
    Target { id, what, block, own, metric, against, must, goal, ceiling: None }
}

/// Targets of RDS.
#[rustfmt::skip]
pub(crate) const RDS: &[Target] = &[
    target("R1", "64 B messages", "stream/64", &["bowline"], Metric::Rate, TCPB, (0.10, 0.16)),
    target("R2", "64 B messages", "stream/64", &["bowline"], Metric::Rate, ZMQ, (1.0, 1.5)),
    target("R3", "64 B messages", "stream/64", &["bowline"], Metric::Rate, FABRICS, (10.0, 16.0)),
    target("R4", "1 KiB messages", "stream/1024", &["bowline"], Metric::Rate, TCPB, (0.55, 0.75)),
    target("R5", "1 KiB messages", "stream/1024", &["bowline"], Metric::Rate, ZMQ, (1.8, 2.5)),
    target("R5", "1 KiB messages", "stream/1024", &["bowline"], Metric::Rate, FABRICS, (8.0, 12.0)),
    target("R6", "8 KiB messages", "stream/8192", &["bowline"], Metric::Rate, TCPB, (0.75, 0.90)),
    target("R7", "8 KiB messages", "stream/8192", &["bowline"], Metric::Rate, ZMQ, (3.0, 4.0)),
    target("R7", "8 KiB messages", "stream/8192", &["bowline"], Metric::Rate, Against::Best(&["nanomsg"]), (1.4, 2.0)),
    target("R7", "8 KiB messages", "stream/8192", &["bowline"], Metric::Rate, FABRICS, (3.0, 4.0)),
    target("R8", "64 KiB messages", "stream/65536", &["bowline"], Metric::Rate, TCPB, (0.85, 0.95)),
    target("R8", "64 KiB messages", "stream/65536", &["bowline"], Metric::Rate, FABRICS, (0.9, 1.05)),
    target("R9", "1 MiB messages", "stream/1048576", &["bowline"], Metric::Rate, TCPS, (0.80, 0.92)).with_ceiling(&["tcpk"], TCPS),
    target("R9", "1 MiB messages", "stream/1048576", &["bowline"], Metric::Rate, FABRICS, (1.1, 1.4)),
    target("R10", "64 B round trip, polling, p50", "rtt-spin/64", &["bowline"], Metric::P50, TCP1, (1.35, 1.15)),
    target("R10", "4 KiB round trip, polling, p50", "rtt-spin/4096", &["bowline"], Metric::P50, TCP1, (1.35, 1.15)),
    target("R11", "64 B round trip, polling, p50", "rtt-spin/64", &["bowline"], Metric::P50, Against::Best(&["ofi-net", "ucx"]), (1.10, 0.95)),
    target("R11", "4 KiB round trip, polling, p50", "rtt-spin/4096", &["bowline"], Metric::P50, Against::Best(&["ofi-net", "ucx"]), (1.10, 0.95)),
    target("R12", "64 B round trip, sleeping, p50", "rtt-sleep/64", &["bowline"], Metric::P50, TCP1, (1.15, 1.05)),
    target("R12", "64 B round trip, sleeping, p99", "rtt-sleep/64", &["bowline"], Metric::P99, TCP1, (1.3, 1.1)),
    target("R13", "64 B round trip, sleeping, p50", "rtt-sleep/64", &["bowline"], Metric::P50, ZMQ, (0.90, 0.75)),
    target("R14", "16 to 1, 64 B", "many/64", &["bowline"], Metric::Rate, ZMQ, (1.0, 1.5)),
    target("R14", "16 to 1, 1 KiB", "many/1024", &["bowline"], Metric::Rate, ZMQ, (2.5, 4.0)),
    target("R14", "16 to 1, 8 KiB", "many/8192", &["bowline"], Metric::Rate, ZMQ, (4.0, 6.0)),
    target("R15", "16 to 1, 1 KiB", "many/1024", &["bowline"], Metric::Rate, TCPB, (0.35, 0.6)),
    target("R15", "16 to 1, 8 KiB", "many/8192", &["bowline"], Metric::Rate, TCPB, (0.6, 0.9)),
    target("R16", "16 to 1, 1 KiB", "many/1024", &["bowline"], Metric::Rate, TCP1, (8.0, 12.0)),
    target("R17", "16 sockets, 64 KiB, 8 paths", "paths/65536", &["8-paths"], Metric::Rate, Against::Best(&["1-path"]), (1.4, 1.8)).with_ceiling(&["tcpz-8"], Against::Best(&["tcpz-1"])),
    target("S1", "others while one receiver sleeps", "slow/1024", &["one-asleep"], Metric::Rate, Against::Best(&["all-awake"]), (0.9, 1.0)),
    target("C1", "syscalls per 64 B message, sender", "stream/64", &["bowline"], Metric::TxSyscalls, Against::Limit(1.0), (0.01, 0.005)),
    target("C1", "syscalls per 64 B message, receiver", "stream/64", &["bowline"], Metric::RxSyscalls, Against::Limit(1.0), (0.01, 0.005)),
    target("C2", "syscalls per 8 KiB message, sender", "stream/8192", &["bowline"], Metric::TxSyscalls, Against::Limit(1.0), (0.25, 0.15)),
    target("C2", "syscalls per 8 KiB message, receiver", "stream/8192", &["bowline"], Metric::RxSyscalls, Against::Limit(1.0), (0.25, 0.15)),
    target("C3", "syscalls per sleeping round trip", "rtt-sleep/64", &["bowline"], Metric::TxSyscalls, Against::Limit(1.0), (4.0, 3.0)),
    target("M1", "bytes of an idle socket", "idle-sockets", &["bowline"], Metric::Bytes, Against::Limit(1.0), (2048.0, 1024.0)),
    target("M2", "bytes of an idle connection", "idle-connections", &["bowline"], Metric::Bytes, Against::Limit(1.0), (65536.0, 32768.0)),
];

const UDP_GSO: Against = Against::Best(&["udp-gso"]);
const UDP: Against = Against::Best(&["udp"]);
const LOSSLESS: Against = Against::Best(&["lossless"]);
/// Packets of 1 MiB at MTU 4096: what counts per packet is measured per message.
const PACKETS: Against = Against::Limit(256.0);

/// Targets of RoCEv2.
#[rustfmt::skip]
pub(crate) const ROCE: &[Target] = &[
    target("V1", "WRITE 1 MiB, MTU 4096", "bulk/4096", &["write"], Metric::ByteRate, UDP_GSO, (0.65, 0.85)),
    target("V2", "WRITE 1 MiB, MTU 4096", "bulk/4096", &["write"], Metric::ByteRate, Against::Best(&["tcpz"]), (0.4, 0.6)),
    target("V3", "WRITE 1 MiB, MTU 1024", "bulk/1024", &["write"], Metric::ByteRate, UDP_GSO, (0.5, 0.75)),
    target("V4", "READ 1 MiB, MTU 4096", "bulk/4096", &["read"], Metric::ByteRate, Against::Best(&["write"]), (0.8, 0.95)),
    target("V5", "SEND 64 B, depth 128", "send/64", &["send"], Metric::Rate, UDP_GSO, (0.15, 0.3)),
    target("V6", "SEND 64 B round trip, polling, p50", "ping/64", &["send"], Metric::P50, UDP, (1.6, 1.3)),
    target("V6", "WRITE with imm., round trip, p50", "ping/64", &["write-imm"], Metric::P50, UDP, (1.6, 1.3)),
    target("V7", "WRITE 1 MiB, 0.1 % random loss", "loss/1048576", &["loss-0.1%"], Metric::Rate, LOSSLESS, (0.7, 0.9)),
    target("V7", "WRITE 1 MiB, 1 % random loss", "loss/1048576", &["loss-1%"], Metric::Rate, LOSSLESS, (0.25, 0.5)),
    target("C7", "syscalls per 4 KiB packet, sender", "bulk/4096", &["write"], Metric::TxSyscalls, PACKETS, (0.10, 0.08)),
    target("C7", "syscalls per 4 KiB packet, receiver", "bulk/4096", &["write"], Metric::RxSyscalls, PACKETS, (0.10, 0.08)),
    target("C8", "ACKs per 4 KiB packet", "bulk/4096", &["write"], Metric::RxAcks, PACKETS, (1.0 / 15.0, 1.0 / 30.0)),
];

const RR_UDP: Against = Against::Best(&["rr-udp"]);
const NBDKIT: Against = Against::Best(&["nbdkit"]);
/// With threads that may meet on one processor, or not.
const UNBOUND: Against = Against::Best(&["nbdkit-unbound"]);
/// With the system's congestion control, which nbdkit gets unless its socket is made by another
/// program.
const NBDKIT_AS_IS: Against = Against::Best(&["nbdkit-as-is"]);
const ONE_PATH: Against = Against::Best(&["rtrs"]);
const ABSOLUTE: Against = Against::Limit(1.0);
/// RTRS, polling and sleeping, for the better of the two.
const OWN: Labels = &["rtrs", "rtrs-adaptive"];
/// The same without a refresh of keys.
const KEPT: Against = Against::SameIndex(&["rtrs-kept-keys", "rtrs-kept-keys-adaptive"]);
/// A request and an answer. What connects a session is counted too, and is less than the hundredth.
const TWO_PACKETS: (f64, f64) = (2.01, 2.01);

/// Targets of RTRS.
#[rustfmt::skip]
pub(crate) const RTRS: &[Target] = &[
    target("T1", "read 4 KiB, depth 32", "read/4096x32", OWN, Metric::Rate, RR_UDP, (0.25, 0.45)),
    target("T1", "write 4 KiB, depth 32", "write/4096x32", OWN, Metric::Rate, RR_UDP, (0.25, 0.45)),
    target("T2", "read 4 KiB, depth 32", "read/4096x32", OWN, Metric::Rate, NBDKIT, (2.5, 4.0)),
    target("T2", "write 4 KiB, depth 32", "write/4096x32", OWN, Metric::Rate, NBDKIT, (2.5, 4.0)),
    target("T3", "read 4 KiB, depth 128", "read/4096x128", OWN, Metric::Rate, RR_UDP, (0.25, 0.45)),
    target("T3", "write 4 KiB, depth 128", "write/4096x128", OWN, Metric::Rate, RR_UDP, (0.25, 0.45)),
    target("T3", "read 4 KiB, depth 128", "read/4096x128", OWN, Metric::Rate, NBDKIT, (2.5, 4.5)),
    target("T3", "write 4 KiB, depth 128", "write/4096x128", OWN, Metric::Rate, NBDKIT, (2.5, 4.5)),
    target("T4", "read 4 KiB, both polling, p50", "ping-spin/4096", &["rtrs"], Metric::P50, RR_UDP, (1.8, 1.4)),
    target("T5", "read 4 KiB, both sleeping, p50", "ping-sleep/4096", &["rtrs"], Metric::P50, RR_UDP, (1.25, 1.1)),
    target("T5", "read 4 KiB, both sleeping, p50", "ping-sleep/4096", &["rtrs"], Metric::P50, NBDKIT, (1.05, 0.9)),
    target("T5", "read 4 KiB, sleeping, unbound, p50", "ping-sleep/4096", &["rtrs-unbound"], Metric::P50, UNBOUND, (1.05, 0.9)).with_ceiling(&["rr-udp-unbound"], UNBOUND),
    target("T6", "read 128 KiB, depth 16", "read/131072x16", OWN, Metric::ByteRate, NBDKIT, (0.8, 1.2)),
    target("T6", "read 128 KiB, depth 16", "read/131072x16", OWN, Metric::ByteRate, NBDKIT_AS_IS, (0.8, 1.2)),
    target("T6", "read 1 MiB, depth 4", "read/1048576x4", OWN, Metric::ByteRate, NBDKIT, (0.8, 1.2)),
    target("T6", "read 1 MiB, depth 4", "read/1048576x4", OWN, Metric::ByteRate, NBDKIT_AS_IS, (0.8, 1.2)),
    target("T7", "write 128 KiB, depth 16", "write/131072x16", OWN, Metric::ByteRate, RR_UDP, (0.4, 0.6)),
    target("T7", "write 128 KiB, depth 16", "write/131072x16", OWN, Metric::ByteRate, NBDKIT, (1.0, 1.5)).with_ceiling(&["rr-udp-crc"], NBDKIT),
    target("T7", "write 128 KiB, depth 16", "write/131072x16", OWN, Metric::ByteRate, NBDKIT_AS_IS, (1.0, 1.5)),
    target("T8", "read, depth 128, two paths, round-robin", "read/4096x128", &["2-paths-round-robin"], Metric::Rate, ONE_PATH, (0.95, 1.2)),
    target("T8", "read, depth 128, two paths, min-inflight", "read/4096x128", &["2-paths-min-inflight"], Metric::Rate, ONE_PATH, (0.95, 1.2)),
    target("T8", "read, depth 128, two paths, min-latency", "read/4096x128", &["2-paths-min-latency"], Metric::Rate, ONE_PATH, (0.95, 1.2)),
    target("T8", "write, depth 128, two paths, round-robin", "write/4096x128", &["2-paths-round-robin"], Metric::Rate, ONE_PATH, (0.95, 1.2)),
    target("T8", "write, depth 128, two paths, min-inflight", "write/4096x128", &["2-paths-min-inflight"], Metric::Rate, ONE_PATH, (0.95, 1.2)),
    target("T8", "write, depth 128, two paths, min-latency", "write/4096x128", &["2-paths-min-latency"], Metric::Rate, ONE_PATH, (0.95, 1.2)),
    target("T9", "read 4 KiB, keys refreshed", "read/4096x32", OWN, Metric::Rate, KEPT, (0.85, 0.95)),
    target("T9", "write 4 KiB, keys refreshed", "write/4096x32", OWN, Metric::Rate, KEPT, (0.85, 0.95)),
    target("N3", "a path reset: longest pause, s", "failover/4096x32", &["reset"], Metric::Pause, ABSOLUTE, (1.0, 0.05)),
    target("N3", "a path reset: requests failed", "failover/4096x32", &["reset"], Metric::Failed, ABSOLUTE, (0.0, 0.0)),
    target("C9", "syscalls per read of 4 KiB, client", "read/4096x32", OWN, Metric::TxSyscalls, ABSOLUTE, (0.5, 0.25)),
    target("C9", "syscalls per read of 4 KiB, server", "read/4096x32", OWN, Metric::RxSyscalls, ABSOLUTE, (0.5, 0.25)),
    target("C9", "syscalls per write of 4 KiB, client", "write/4096x32", OWN, Metric::TxSyscalls, ABSOLUTE, (0.5, 0.25)),
    target("C9", "syscalls per write of 4 KiB, server", "write/4096x32", OWN, Metric::RxSyscalls, ABSOLUTE, (0.5, 0.25)),
    target("C10", "packets per read of 4 KiB", "read/4096x32", &["rtrs"], Metric::DataPackets, ABSOLUTE, TWO_PACKETS),
    target("C10", "packets per write of 2 KiB", "write/2048x32", &["rtrs"], Metric::DataPackets, ABSOLUTE, TWO_PACKETS),
];

/// RNBD and RTRS, polling and sleeping, for the better of the two.
const DISK: Labels = &["rnbd", "rnbd-adaptive"];
const TRANSPORT: Against = Against::Best(OWN);
const ONE_CPU: Against = Against::Best(&["nbdkit-one-cpu"]);

/// Targets of RNBD.
#[rustfmt::skip]
pub(crate) const RNBD: &[Target] = &[
    target("N1", "read 4 KiB, depth 32", "read/4096x32", DISK, Metric::Rate, TRANSPORT, (0.85, 0.95)),
    target("N1", "write 4 KiB, depth 32", "write/4096x32", DISK, Metric::Rate, TRANSPORT, (0.85, 0.95)),
    target("N2", "read 4 KiB, depth 32", "read/4096x32", DISK, Metric::Rate, NBDKIT, (2.2, 3.5)),
    target("N2", "write 4 KiB, depth 32", "write/4096x32", DISK, Metric::Rate, NBDKIT, (2.2, 3.5)),
    target("N2", "read 4 KiB, depth 32", "read/4096x32", DISK, Metric::Rate, Against::Best(&["qemu-nbd"]), (4.0, 7.0)),
    target("N2", "write 4 KiB, depth 32", "write/4096x32", DISK, Metric::Rate, Against::Best(&["qemu-nbd"]), (4.0, 7.0)),
    target("N2", "read 4 KiB, depth 32", "read/4096x32", DISK, Metric::Rate, Against::Best(&["tgt"]), (5.0, 9.0)),
    target("N4", "write 4 KiB, NBD socket, unbound, p99", "door-write/4096", &["door-nbd-unbound"], Metric::P99, UNBOUND, (4.0, 2.0)),
    target("N4", "write 4 KiB, file, unbound, p99", "door-write/4096", &["door-fuse-unbound"], Metric::P99, UNBOUND, (4.0, 2.0)),
    target("N4", "write 4 KiB, NBD socket, one CPU, p99", "door-write/4096", &["door-nbd-one-cpu"], Metric::P99, ONE_CPU, (4.0, 2.0)),
    target("N4", "write 4 KiB, file, one CPU, p99", "door-write/4096", &["door-fuse-one-cpu"], Metric::P99, ONE_CPU, (4.0, 2.0)),
];

/// Doors of a mapped disk, one of them each.
const NBD_SOCKET: Labels = &["door-nbd"];
const FILE: Labels = &["door-fuse"];

/// Targets of the doors of a disk.
#[rustfmt::skip]
pub(crate) const DOORS: &[Target] = &[
    target("N5", "NBD socket, read 4 KiB, depth 1", "doors/read/4096x1", NBD_SOCKET, Metric::Rate, NBDKIT, (0.7, 1.0)),
    target("N5", "NBD socket, write 4 KiB, depth 1", "doors/write/4096x1", NBD_SOCKET, Metric::Rate, NBDKIT, (0.7, 1.0)),
    target("N5", "NBD socket, read 4 KiB, depth 32", "doors/read/4096x32", NBD_SOCKET, Metric::Rate, NBDKIT, (1.2, 1.5)),
    target("N5", "NBD socket, write 4 KiB, depth 32", "doors/write/4096x32", NBD_SOCKET, Metric::Rate, NBDKIT, (1.0, 1.2)),
    target("N5", "NBD socket, read 128 KiB, depth 16", "doors/read/131072x16", NBD_SOCKET, Metric::Rate, NBDKIT, (0.9, 1.0)),
    target("N5", "NBD socket, write 128 KiB, depth 16", "doors/write/131072x16", NBD_SOCKET, Metric::Rate, NBDKIT, (0.65, 0.8)),
    target("N6", "file, read 4 KiB, depth 1", "doors/read/4096x1", FILE, Metric::Rate, NBDKIT, (0.8, 1.0)),
    target("N6", "file, write 4 KiB, depth 1", "doors/write/4096x1", FILE, Metric::Rate, NBDKIT, (0.8, 1.0)),
    target("N6", "file, read 4 KiB, depth 32", "doors/read/4096x32", FILE, Metric::Rate, NBDKIT, (0.9, 1.1)),
    target("N6", "file, write 4 KiB, depth 32", "doors/write/4096x32", FILE, Metric::Rate, NBDKIT, (0.9, 1.1)),
    target("N6", "file, read 128 KiB, depth 16", "doors/read/131072x16", FILE, Metric::Rate, NBDKIT, (0.8, 1.0)),
    target("N6", "file, write 128 KiB, depth 16", "doors/write/131072x16", FILE, Metric::Rate, NBDKIT, (0.8, 1.0)),
];

/// The targets of a suite.
pub(crate) const fn of(suite: Suite) -> &'static [Target] {
    match suite {
        Suite::Rds => RDS,
        Suite::Roce => ROCE,
        Suite::Rtrs => RTRS,
        Suite::Rnbd => RNBD,
        Suite::Doors => DOORS,
    }
}

/// What became of a target.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Verdict {
    /// It is met.
    Pass,
    /// It is not.
    Fail(String),
    /// The rounds do not tell.
    Undecided(String),
    /// It is not, and bare sockets do not reach it on this machine either.
    Ceiling(String),
    /// It was not measured.
    Skipped(String),
}

impl Verdict {
    /// One word for a table.
    pub(crate) const fn word(&self) -> &'static str {
        match self {
            Self::Pass => "pass",
            Self::Fail(_) => "FAIL",
            Self::Undecided(_) => "undecided",
            Self::Ceiling(_) => "ceiling",
            Self::Skipped(_) => "skipped",
        }
    }

    /// Why, where there is more to say.
    pub(crate) fn why(&self) -> &str {
        match self {
            Self::Pass => "",
            Self::Fail(why) | Self::Undecided(why) | Self::Ceiling(why) | Self::Skipped(why) => why,
        }
    }
}

/// A target and how it came out.
#[derive(Clone, Debug)]
pub(crate) struct Outcome {
    pub(crate) target: Target,
    /// Ratio over the rounds that count, or over all when none does.
    pub(crate) ratio: Option<Spread>,
    /// Ratio of bowline's CPU time per message to the anchor's, both sides together.
    pub(crate) cpu: Option<f64>,
    /// Rounds that were not disturbed.
    pub(crate) good_rounds: usize,
    /// Median of the same ratio for bare sockets.
    pub(crate) ceiling: Option<f64>,
    /// Largest share of the machine that others used in the rounds that count.
    pub(crate) foreign: f64,
    pub(crate) verdict: Verdict,
}

/// One round's ratio.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Round {
    pub(crate) ratio: f64,
    pub(crate) cpu: Option<f64>,
    pub(crate) foreign: f64,
    pub(crate) disturbed: bool,
}

/// Judges every one of `targets` for which anything was measured.
pub(crate) fn judge(
    targets: &[Target],
    results: &Results,
    missing: &dyn Fn(&str) -> Option<String>,
) -> Vec<Outcome> {
    targets
        .iter()
        .filter(|target| results.has_block(target.block))
        .map(|&target| {
            let rounds = results.rounds(&target);
            let error = target.own.iter().find_map(|label| results.error(target.block, label));
            let needed = target.rivals().chain(target.own);
            let absent = needed.filter_map(|label| missing(label)).next();
            let ceiling = target.ceiling_target().map(|t| results.rounds(&t)).unwrap_or_default();
            let good = ceiling.iter().filter(|r| !r.disturbed);
            let ceiling = crate::stats::median(good.map(|r| r.ratio));
            judge_one(target, &rounds, ceiling, error, absent)
        })
        .collect()
}

fn judge_one(
    target: Target,
    rounds: &[Round],
    ceiling: Option<f64>,
    error: Option<String>,
    absent: Option<String>,
) -> Outcome {
    let good: Vec<Round> = rounds.iter().copied().filter(|r| !r.disturbed).collect();
    let worst = target.metric.is_of_the_worst();
    let used = if good.is_empty() || worst { rounds } else { &good };
    let mut ratio = spread(used.iter().map(|r| r.ratio));
    if let Some(ratio) = ratio.as_mut().filter(|_| worst) {
        ratio.mid = used.iter().map(|r| r.ratio).fold(f64::MIN, f64::max);
        ratio.high = ratio.mid;
    }
    let verdict = match (error, ratio) {
        (Some(error), _) => Verdict::Fail(error),
        (None, None) => Verdict::Skipped(absent.unwrap_or_else(|| "not measured".into())),
        (None, Some(ratio)) => match decide(&target, ratio, good.len(), rounds.len()) {
            Verdict::Fail(_) if ceiling.is_some_and(|c| is_near(&target, ratio.mid, c)) => {
                Verdict::Ceiling("out of reach on this machine".into())
            }
            verdict => verdict,
        },
    };
    Outcome {
        target,
        ratio,
        cpu: crate::stats::median(used.iter().filter_map(|r| r.cpu)),
        good_rounds: good.len(),
        ceiling,
        foreign: used.iter().map(|r| r.foreign).fold(0.0, f64::max),
        verdict,
    }
}

/// Tells whether a figure is near what bare sockets reach, and that is not enough.
fn is_near(target: &Target, ratio: f64, ceiling: f64) -> bool {
    if target.metric.smaller_is_better() {
        ceiling > target.must && ratio <= ceiling / NEAR_CEILING
    } else {
        ceiling < target.must && ratio >= ceiling * NEAR_CEILING
    }
}

fn decide(target: &Target, ratio: Spread, good: usize, all: usize) -> Verdict {
    let smaller = target.metric.smaller_is_better();
    if target.metric.is_exact() {
        return match meets(ratio.mid, target.must, smaller) {
            true => Verdict::Pass,
            false => Verdict::Fail(String::new()),
        };
    }
    decide_by_rounds(target.must, smaller, ratio, good, all)
}

fn meets(figure: f64, must: f64, smaller: bool) -> bool {
    if smaller { figure <= must } else { figure >= must }
}

/// Tells whether a figure that varies from round to round is reached; `good` of `all` rounds were
/// not disturbed.
pub(crate) fn decide_by_rounds(
    must: f64,
    smaller: bool,
    ratio: Spread,
    good: usize,
    all: usize,
) -> Verdict {
    let met = meets(ratio.mid, must, smaller);
    if good < ROUNDS_MIN {
        let lean = if met { "met" } else { "not met" };
        return Verdict::Undecided(format!("{good} of {all} rounds undisturbed; {lean} in these"));
    }
    if ratio.low < must && must < ratio.high {
        return Verdict::Undecided("the rounds lie on both sides".into());
    }
    if met { Verdict::Pass } else { Verdict::Fail(String::new()) }
}

/// Exit status: 0 all met, 1 one is not, 3 some undecided.
pub(crate) fn exit_status<'a>(verdicts: impl Iterator<Item = &'a Verdict> + Clone) -> i32 {
    let any = |f: fn(&Verdict) -> bool| verdicts.clone().any(f);
    if any(|v| matches!(v, Verdict::Fail(_))) {
        1
    } else if any(|v| matches!(v, Verdict::Undecided(_))) {
        3
    } else {
        0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(index: usize, ratios: &[f64], disturbed: usize) -> Outcome {
        let rounds: Vec<Round> = ratios
            .iter()
            .enumerate()
            .map(|(i, &ratio)| Round { ratio, cpu: None, foreign: 0.0, disturbed: i < disturbed })
            .collect();
        judge_one(RDS[index], &rounds, None, None, None)
    }

    #[test]
    fn a_target_passes_fails_or_stays_open() {
        // R1 must reach 0.10 of tcpb.
        assert_eq!(outcome(0, &[0.12, 0.13, 0.11], 0).verdict, Verdict::Pass);
        assert_eq!(outcome(0, &[0.05, 0.06, 0.07], 0).verdict.word(), "FAIL");
        assert_eq!(outcome(0, &[0.05, 0.12, 0.15], 0).verdict.word(), "undecided");
        assert_eq!(outcome(0, &[0.12, 0.13], 0).verdict.word(), "undecided");
        assert_eq!(outcome(0, &[], 0).verdict.word(), "skipped");
    }

    #[test]
    fn disturbed_rounds_do_not_count() {
        let o = outcome(0, &[0.01, 0.01, 0.12, 0.13, 0.14], 2);
        assert_eq!((o.verdict, o.good_rounds), (Verdict::Pass, 3));
        let o = outcome(0, &[0.01, 0.01, 0.12, 0.13, 0.14], 3);
        assert_eq!(o.verdict.word(), "undecided");
    }

    #[test]
    fn what_bare_sockets_do_not_reach_is_no_failure() {
        let r17 = RDS.iter().find(|t| t.id == "R17").unwrap();
        let rounds = [Round { ratio: 0.9, cpu: None, foreign: 0.0, disturbed: false }; 3];
        let at = |ceiling| judge_one(*r17, &rounds, ceiling, None, None).verdict.word();
        let words = [at(Some(1.0)), at(Some(1.5)), at(None), at(Some(1.2))];
        assert_eq!(words, ["ceiling", "FAIL", "FAIL", "FAIL"], "0.9 is far from 1.2");
        // Times: at most 1.05.
        let unbound = RTRS.iter().find(|t| t.own == ["rtrs-unbound"]).unwrap();
        let rounds = [Round { ratio: 2.2, cpu: None, foreign: 0.0, disturbed: false }; 3];
        let at = |ceiling| judge_one(*unbound, &rounds, ceiling, None, None).verdict.word();
        let words = [at(Some(2.0)), at(Some(1.5)), at(None), at(Some(1.0))];
        assert_eq!(words, ["ceiling", "FAIL", "FAIL", "FAIL"], "2.2 is far from 1.5");
    }

    #[test]
    fn smaller_is_better_for_times_and_one_look_is_enough_for_memory() {
        let at = |id| RDS.iter().position(|t| t.id == id).unwrap();
        assert_eq!(outcome(at("R10"), &[1.2, 1.2, 1.2], 0).verdict, Verdict::Pass);
        assert_eq!(outcome(at("R10"), &[1.5, 1.5, 1.5], 0).verdict.word(), "FAIL");
        assert_eq!(outcome(at("M1"), &[900.0], 0).verdict, Verdict::Pass);
        assert_eq!(outcome(at("M1"), &[9000.0], 0).verdict.word(), "FAIL");
    }

    #[test]
    fn of_pauses_and_failures_the_worst_round_counts() {
        let at = |what| RTRS.iter().find(|t| t.id == "N3" && t.metric == what).unwrap();
        let round = |ratio| Round { ratio, cpu: None, foreign: 0.0, disturbed: false };
        let judge = |what, ratios: &[f64]| {
            let rounds: Vec<Round> = ratios.iter().map(|&ratio| round(ratio)).collect();
            judge_one(*at(what), &rounds, None, None, None)
        };
        assert_eq!(judge(Metric::Failed, &[0.0, 0.0, 0.0]).verdict, Verdict::Pass);
        assert_eq!(judge(Metric::Failed, &[0.0, 1.0, 0.0, 0.0, 0.0]).verdict.word(), "FAIL");
        let pauses = judge(Metric::Pause, &[0.01, 0.02, 0.4, 0.01]);
        assert_eq!(pauses.ratio.map(|r| r.mid), Some(0.4));
        assert_eq!(pauses.verdict, Verdict::Pass);
    }

    #[test]
    fn an_error_of_the_library_is_a_failure_and_a_missing_peer_is_not() {
        let failed = judge_one(RDS[0], &[], None, Some("wrong tail".into()), None);
        assert_eq!(failed.verdict, Verdict::Fail("wrong tail".into()));
        let skipped = judge_one(RDS[1], &[], None, None, Some("libzmq5".into()));
        assert_eq!(skipped.verdict, Verdict::Skipped("libzmq5".into()));
        let status = |all: &[&Outcome]| exit_status(all.iter().map(|o| &o.verdict));
        assert_eq!(status(&[&skipped]), 0);
        assert_eq!(status(&[&skipped, &failed]), 1);
        assert_eq!(status(&[&outcome(0, &[0.2], 0)]), 3);
    }
}
