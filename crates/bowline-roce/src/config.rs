//! Settings of a device.

use std::net::IpAddr;
use std::time::Duration;

use bowline_verbs::Mtu;
use bowline_wire::roce::IcrcPolicy;

use crate::cm::CmConfig;
use crate::congestion::Congestion;

/// Settings of a device, fixed at its creation.
#[derive(Clone, Debug)]
pub struct Config {
    /// Node GUID: stable, not 0, and unlike that of any other node [CM-37].
    pub guid: u64,
    /// Addresses of the port; at least one.
    pub addrs: Vec<IpAddr>,
    /// Largest path MTU.
    pub mtu: Mtu,
    /// How the ICRC of received packets is checked.
    pub icrc: IcrcPolicy,
    /// Send several packets as one burst (UDP GSO). They carry IPv4 identifications that count from
    /// 0 [ICRC-21], so the driver must send them in that way.
    pub gso: bool,
    /// UDP source port of all packets; `None`: one per connection, as rxe and NICs do [OUT-2].
    pub source_port: Option<u16>,
    /// The highest byte of all queue pair numbers and communication ids; `None`: any. Devices that
    /// share an address are distinguished by it.
    pub part: Option<u8>,
    /// What limits the packets in flight [REQ-6].
    pub congestion: Congestion,
    /// When a silent peer is given up.
    pub give_up: GiveUp,
    /// Shortest retransmission timer. A multiple of the round-trip time is added to it [REQ-22].
    pub retransmit_min: Duration,
    /// How long an acknowledgement may be delayed to be sent with later packets, where only small
    /// packets are sent one by one; 0: not at all. Changed with
    /// [`Device::set_ack_delay`](crate::Device::set_ack_delay).
    pub ack_delay: Duration,
    /// Settings of the connection manager.
    pub cm: CmConfig,
    /// Limits on the number of objects.
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
            part: None,
            congestion: Congestion::default(),
            give_up: GiveUp::default(),
            retransmit_min: Duration::from_millis(10),
            ack_delay: Duration::ZERO,
            cm: CmConfig::default(),
            limits: Limits::default(),
        }
    }
}

/// When a silent peer is given up [REQ-12], [REQ-22].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum GiveUp {
    /// After the queue pair's retry count times its timeout without progress, at least one timeout:
    /// 3.8 s with retry count 7 and timeout code 17.
    #[default]
    RetryCount,
    /// The same, but a retry count of 7 means for ever, as with rxe.
    RetryCountSevenForever,
    /// After this time without progress.
    After(Duration),
}

/// Limits on the number of objects.
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
    /// Shared receive queues.
    pub srqs: usize,
    /// Work requests of one queue, shared ones included.
    pub wrs: usize,
    /// Elements of a gather or scatter list.
    pub sges: usize,
    /// Bytes sent inline by one request.
    pub inline: usize,
    /// Concurrent READs and atomics of a queue pair, in each direction [QP-5].
    pub rd_atomic: u8,
    /// Bytes of packets kept after a gap, for all queue pairs together; 0: none are kept.
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
            srqs: 1 << 16,
            wrs: 1 << 16,
            sges: 256,
            inline: 4096,
            rd_atomic: 128,
            reorder_bytes: 64 << 20,
        }
    }
}
