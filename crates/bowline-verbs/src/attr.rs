//! Attributes of devices and queue pairs.

use core::fmt;
use std::net::IpAddr;
use std::time::Duration;

use crate::{Access, CqId, Mtu, PdId, Qpn, SrqId};

/// Limits of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceAttr {
    /// Name, such as `bowline0` or `rxe0`.
    pub name: String,
    /// Provider: `soft` or `rdma-core`.
    pub provider: &'static str,
    /// Node GUID, stable and not 0.
    pub guid: u64,
    /// Addresses (GIDs) of its port.
    pub addrs: Vec<IpAddr>,
    /// Largest path MTU of its port.
    pub mtu: Mtu,
    /// Most queue pairs.
    pub max_qp: usize,
    /// Most work requests of one queue.
    pub max_qp_wr: usize,
    /// Most elements of a gather or scatter list.
    pub max_sge: usize,
    /// Most completion queues.
    pub max_cq: usize,
    /// Most entries of a completion queue.
    pub max_cqe: usize,
    /// Most shared receive queues; 0: not supported.
    pub max_srq: usize,
    /// Most receives posted on a shared receive queue.
    pub max_srq_wr: usize,
    /// Most elements of a scatter list of a shared receive queue.
    pub max_srq_sge: usize,
    /// Most memory regions.
    pub max_mr: usize,
    /// Most memory windows; 0: not supported.
    pub max_mw: usize,
    /// Most READs and atomics that a queue pair answers concurrently.
    pub max_qp_rd_atom: u8,
    /// Most bytes sent inline.
    pub max_inline: usize,
    /// [`SendOp::RegMr`](crate::SendOp::RegMr) is supported.
    pub fast_registration: bool,
    /// [`SendOp::Flush`](crate::SendOp::Flush) and
    /// [`SendOp::AtomicWrite`](crate::SendOp::AtomicWrite) are supported.
    pub flush: bool,
    /// [`Device::withdraw_keys`](crate::Device::withdraw_keys) and
    /// [`Device::renew_keys`](crate::Device::renew_keys) are supported.
    pub key_refresh: bool,
    /// [`Device::alloc_inner_pd`](crate::Device::alloc_inner_pd) is supported.
    pub inner_pds: bool,
    /// Payload bytes of WRITEs without immediate that one system call can send, if they are posted
    /// in a row and fill their packets. Consecutive packets of one size are sent together, and a
    /// shorter one may follow them. Programs with many messages should post the ones that fill
    /// packets first, and short ones after them. 0: there is nothing to gain.
    pub burst: usize,
    /// A completion queue takes memory only for the entries it holds, not for its full depth.
    pub lazy_cq: bool,
}

/// Transport service of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum QpType {
    /// Reliable connection.
    Rc,
    /// Unreliable connection: messages and writes arrive whole and in order, or not at all.
    Uc,
    /// Unreliable datagram.
    Ud,
}

/// State of a queue pair, with the kernel's numbers [RX-5].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum QpState {
    /// New.
    #[default]
    Reset = 0,
    /// Receives may be posted.
    Init = 1,
    /// Ready to receive.
    Rtr = 2,
    /// Ready to send.
    Rts = 3,
    /// Send queue drained: no request is started, and started ones are completed [QP-3].
    Sqd = 4,
    /// Send queue error (UC, UD): a message could not be sent, the requests posted behind it are
    /// flushed, and receiving continues. [`Device::modify_qp`](crate::Device::modify_qp) leads back
    /// to RTS.
    Sqe = 5,
    /// Error: all posted requests are flushed.
    Err = 6,
}

/// The name that verbs have for the state, such as `RTS`.
impl fmt::Display for QpState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Reset => "RESET",
            Self::Init => "INIT",
            Self::Rtr => "RTR",
            Self::Rts => "RTS",
            Self::Sqd => "SQD",
            Self::Sqe => "SQE",
            Self::Err => "ERR",
        })
    }
}

/// Sizes of a queue pair's queues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QpCap {
    /// Send work requests outstanding.
    pub max_send_wr: usize,
    /// Receives posted.
    pub max_recv_wr: usize,
    /// Elements of a gather list.
    pub max_send_sge: usize,
    /// Elements of a scatter list.
    pub max_recv_sge: usize,
    /// Bytes sent inline.
    pub max_inline: usize,
}

impl Default for QpCap {
    fn default() -> Self {
        Self {
            max_send_wr: 128,
            max_recv_wr: 128,
            max_send_sge: 4,
            max_recv_sge: 4,
            max_inline: 256,
        }
    }
}

/// Creation attributes of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QpInit {
    /// Protection domain.
    pub pd: PdId,
    /// Completion queue of sends.
    pub send_cq: CqId,
    /// Completion queue of receives.
    pub recv_cq: CqId,
    /// Transport service.
    pub qp_type: QpType,
    /// Shared receive queue, from which the queue pair takes its receives. The sizes of its own
    /// receive queue do not count then.
    pub srq: Option<SrqId>,
    /// Sizes.
    pub cap: QpCap,
    /// Every send produces a completion, flagged `SIGNALED` or not.
    pub sq_sig_all: bool,
}

/// Creation attributes of a shared receive queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SrqInit {
    /// Protection domain of the memory of its receives. That of a queue pair may be another one.
    pub pd: PdId,
    /// Most receives posted.
    pub max_wr: usize,
    /// Most elements of a scatter list.
    pub max_sge: usize,
}

/// Attributes of a shared receive queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SrqAttr {
    /// Most receives posted.
    pub max_wr: usize,
    /// Most elements of a scatter list.
    pub max_sge: usize,
    /// [`AsyncEvent::SrqLimitReached`] is sent, once, when fewer receives are posted; 0: never.
    pub limit: usize,
}

/// Attributes of a shared receive queue to change; `None` leaves an attribute as it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SrqChange {
    /// Most receives posted.
    pub max_wr: Option<usize>,
    /// Arms the limit, or disarms it with 0.
    pub limit: Option<usize>,
}

/// Addresses of the packets of a connected queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AddressVector {
    /// Local address (source GID).
    pub local: IpAddr,
    /// Remote address (destination GID).
    pub remote: IpAddr,
    /// Flow label, from which the UDP source port is derived [OUT-2].
    pub flow_label: u32,
    /// Type of service or traffic class.
    pub tos: u8,
}

/// Attributes to change; `None` leaves an attribute as it is. QP-1 lists the attributes that a
/// transition needs. Alternate paths and migration are not supported.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QpAttr {
    /// The state to go to.
    pub state: Option<QpState>,
    /// The expected present state: nothing is changed if the queue pair is in another one.
    pub cur_state: Option<QpState>,
    /// Port; `None` for INIT: the first one of the device.
    pub port: Option<u8>,
    /// Index of the partition key; `None` for INIT: 0.
    pub pkey_index: Option<u16>,
    /// Rights of the peer.
    pub access: Option<Access>,
    /// Queue key (UD).
    pub qkey: Option<u32>,
    /// Address vector.
    pub av: Option<AddressVector>,
    /// Path MTU.
    pub path_mtu: Option<Mtu>,
    /// The peer's queue pair.
    pub dest_qpn: Option<Qpn>,
    /// First packet sequence number (PSN) expected, 24 bits.
    pub rq_psn: Option<u32>,
    /// First PSN sent, 24 bits.
    pub sq_psn: Option<u32>,
    /// Most READs and atomics outstanding as requester.
    pub max_rd_atomic: Option<u8>,
    /// Most READs and atomics answered concurrently.
    pub max_dest_rd_atomic: Option<u8>,
    /// Code of the delay requested by RNR NAKs, when no receive is posted [RSP-13].
    pub min_rnr_timer: Option<u8>,
    /// Code of the acknowledgement timeout, 4.096 us x 2^n; 0: never.
    pub timeout: Option<u8>,
    /// Retransmissions before giving up, at most 7.
    pub retry_cnt: Option<u8>,
    /// Retransmissions after RNR NAKs; 7: for ever.
    pub rnr_retry: Option<u8>,
    /// Time without any acknowledgement after which the peer is given up; overrides the time that
    /// follows from timeout and retry count. Only the soft device supports this; others ignore it.
    pub give_up: Option<Duration>,
    /// For the transition to SQD: send [`AsyncEvent::SqDrained`] when all started requests are
    /// complete.
    pub sqd_notify: Option<bool>,
    /// Read-only: the queue pair is in SQD, and a started request is not complete yet.
    pub sq_draining: Option<bool>,
}

/// Asynchronous event of a device, a queue pair, or a completion or shared receive queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum AsyncEvent {
    /// A queue pair is in ERR for a reason that no completion shows [QP-10].
    QpFatal(Qpn),
    /// The first packet arrived at a queue pair that is not in RTS yet.
    CommEstablished(Qpn),
    /// A queue pair in SQD has completed all started requests [QP-3].
    SqDrained(Qpn),
    /// A completion queue has overrun and is unusable.
    CqError(CqId),
    /// A shared receive queue has fewer receives than its limit, which is disarmed now [SRQ-4].
    SrqLimitReached(SrqId),
    /// A queue pair with a shared receive queue is in ERR, and takes no receive from it any more:
    /// the one that it had has completed [SRQ-5].
    LastWqeReached(Qpn),
    /// The device is gone or unusable: requests need not complete any more, not even as flushed.
    /// Reported once. A changed address of the device is not reported like this.
    DeviceFatal,
}
