//! Attributes of devices and queue pairs.

use std::net::IpAddr;
use std::time::Duration;

use crate::{Access, CqId, Mtu, PdId, Qpn};

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
    /// Most memory regions.
    pub max_mr: usize,
    /// Most memory windows; 0: there are none.
    pub max_mw: usize,
    /// Most reads and atomics a queue pair answers at once.
    pub max_qp_rd_atom: u8,
    /// Most bytes sent inline.
    pub max_inline: usize,
    /// [`SendOp::RegMr`](crate::SendOp::RegMr) works.
    pub fast_registration: bool,
    /// [`SendOp::Flush`](crate::SendOp::Flush) and
    /// [`SendOp::AtomicWrite`](crate::SendOp::AtomicWrite) work.
    pub flush: bool,
    /// [`Device::withdraw_keys`](crate::Device::withdraw_keys) and
    /// [`Device::renew_keys`](crate::Device::renew_keys) work.
    pub key_refresh: bool,
    /// Packets of one size that follow one another leave together, and one that is shorter behind
    /// them: so many bytes of WRITEs without immediate, in rows that fill packets, with one call.
    /// Who has many messages to send does well to send what fills packets first and what is short
    /// after it. 0: nothing is gained.
    pub burst: usize,
    /// Entries of a completion queue take memory while they are there, and not from its beginning
    /// on.
    pub lazy_cq: bool,
}

/// Transport service of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum QpType {
    /// Reliable connection.
    Rc,
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
    /// Send queue drained: no request is begun, those begun are finished [QP-3].
    Sqd = 4,
    /// Send queue error (UD): a datagram could not be sent, what was posted behind it is flushed,
    /// and receives go on. Back to RTS by [`Device::modify_qp`](crate::Device::modify_qp).
    Sqe = 5,
    /// Error: everything posted is flushed.
    Err = 6,
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

/// What a queue pair is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QpInit {
    /// Protection domain.
    pub pd: PdId,
    /// Where sends complete.
    pub send_cq: CqId,
    /// Where receives complete.
    pub recv_cq: CqId,
    /// Transport service.
    pub qp_type: QpType,
    /// Sizes.
    pub cap: QpCap,
    /// Every send completes with an entry, flagged `SIGNALED` or not.
    pub sq_sig_all: bool,
}

/// Where the packets of a connected queue pair go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AddressVector {
    /// Own address (source GID).
    pub local: IpAddr,
    /// The peer's (destination GID).
    pub remote: IpAddr,
    /// Flow label, from which the UDP source port comes [OUT-2].
    pub flow_label: u32,
    /// Type of service or traffic class.
    pub tos: u8,
}

/// Attributes to change; `None` leaves one as it is. Which are needed for a transition: QP-1.
/// Alternate paths and migration are not offered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QpAttr {
    /// The state to go to.
    pub state: Option<QpState>,
    /// The state the queue pair is thought to be in: nothing is changed if it is in another.
    pub cur_state: Option<QpState>,
    /// Port; `None` for INIT: the first one of the device.
    pub port: Option<u8>,
    /// Index of the partition key; `None` for INIT: 0.
    pub pkey_index: Option<u16>,
    /// What the peer may do.
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
    /// Reads and atomics outstanding as requester.
    pub max_rd_atomic: Option<u8>,
    /// Reads and atomics answered at once.
    pub max_dest_rd_atomic: Option<u8>,
    /// Code of the delay asked for when no receive is posted [RSP-13].
    pub min_rnr_timer: Option<u8>,
    /// Code of the acknowledgement timeout, 4.096 us x 2^n; 0: never.
    pub timeout: Option<u8>,
    /// Retransmissions before giving up, at most 7.
    pub retry_cnt: Option<u8>,
    /// The same after RNR NAKs; 7: for ever.
    pub rnr_retry: Option<u8>,
    /// Time without any acknowledgement after which the peer is given up, instead of what the
    /// device makes of timeout and retransmissions. Only the soft device has this; others ignore
    /// it.
    pub give_up: Option<Duration>,
    /// On the way to SQD: [`AsyncEvent::SqDrained`] is to tell when what was begun is finished.
    pub sqd_notify: Option<bool>,
    /// Told only: the queue pair is in SQD, and something begun is not finished yet.
    pub sq_draining: Option<bool>,
}

/// Something that happened to a device or queue pair without being asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum AsyncEvent {
    /// A queue pair is in error for a reason no completion tells [QP-10].
    QpFatal(Qpn),
    /// The first packet came on a queue pair that is not in RTS yet.
    CommEstablished(Qpn),
    /// A queue pair in SQD has finished everything it had begun [QP-3].
    SqDrained(Qpn),
    /// A completion queue has overrun and is of no more use.
    CqError(CqId),
    /// The device is gone, or can do nothing more: nothing need complete there any more, not even
    /// as flushed. Told once. That an address of it has changed is not this.
    DeviceFatal,
}
