//! What a device is told once.

use std::net::IpAddr;
use std::time::Duration;

use bowline_verbs::Mtu;
use bowline_wire::roce::IcrcPolicy;

use crate::cm::CmConfig;

/// Settings of a device, fixed at its creation.
#[derive(Clone, Debug)]
pub struct Config {
    /// Node GUID: stable, not 0, and unlike that of any other node [CM-37].
    pub guid: u64,
    /// Addresses of the port; at least one.
    pub addrs: Vec<IpAddr>,
    /// Largest path MTU.
    pub mtu: Mtu,
    /// What is checked of an ICRC.
    pub icrc: IcrcPolicy,
    /// Several packets go into one burst. They carry IPv4 identifications that count from 0
    /// [ICRC-21], so the driver must send them so.
    pub gso: bool,
    /// UDP source port of everything sent; `None`: one for each connection, as rxe and NICs have it
    /// [OUT-2].
    pub source_port: Option<u16>,
    /// Most packets sent and not acknowledged, of one queue pair: 16 to 4096 [REQ-6].
    pub window: u32,
    /// When a peer that does not answer is given up.
    pub give_up: GiveUp,
    /// Shortest retransmission timer. The time of an answer comes on top of it [REQ-22].
    pub retransmit_min: Duration,
    /// How long an acknowledgement may wait to go out with later answers, where only small ones go
    /// out one by one; 0: not at all. To be changed with
    /// [`Device::set_ack_delay`](crate::Device::set_ack_delay).
    pub ack_delay: Duration,
    /// The connection manager's own settings.
    pub cm: CmConfig,
    /// Bounds of number.
    pub limits: Limits,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            guid: 1,
            addrs: Vec::new(),
            mtu: Mtu::M4096,
            icrc: IcrcPolicy::default(),
            gso: true,
            source_port: None,
            window: 240,
            give_up: GiveUp::default(),
            retransmit_min: Duration::from_millis(10),
            ack_delay: Duration::ZERO,
            cm: CmConfig::default(),
            limits: Limits::default(),
        }
    }
}

/// When a peer that does not answer is given up [REQ-12], [REQ-22].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum GiveUp {
    /// After the queue pair's retry count times its timeout without any progress: 3.8 s with 7 and
    /// 17; at least one timeout.
    #[default]
    RetryCount,
    /// The same, but a retry count of 7 is for ever, as rxe has it.
    RetryCountSevenForever,
    /// After this time without any progress.
    After(Duration),
}

/// Bounds of number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Protection domains.
    pub pds: usize,
    /// Memory regions.
    pub mrs: usize,
    /// Memory windows.
    pub mws: usize,
    /// Completion queues.
    pub cqs: usize,
    /// Entries of a completion queue.
    pub cqes: usize,
    /// Queue pairs.
    pub qps: usize,
    /// Work requests of one queue.
    pub wrs: usize,
    /// Elements of a gather or scatter list.
    pub sges: usize,
    /// Bytes sent inline.
    pub inline: usize,
    /// Reads and atomics of a queue pair at once, in either direction [QP-5].
    pub rd_atomic: u8,
    /// Bytes kept of packets that came after a gap, of all queue pairs together; 0: none are kept.
    #[doc(alias = "held")]
    pub reorder_bytes: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            pds: 1 << 16,
            mrs: 1 << 18,
            mws: 1 << 18,
            cqs: 1 << 16,
            cqes: 1 << 25,
            qps: 1 << 16,
            wrs: 1 << 16,
            sges: 256,
            inline: 4096,
            rd_atomic: 128,
            reorder_bytes: 64 << 20,
        }
    }
}
