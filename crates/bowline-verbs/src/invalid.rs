//! What is invalid in the arguments of a verb.

use core::fmt;
use std::net::IpAddr;

use crate::{Error, Mtu, MwType, QpState, QpType};

/// Why a verb is invalid: an argument or attribute, or the state of its object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum InvalidReason {
    /// The transition needs an attribute that is not given [QP-1].
    AttrMissing(QpAttrName),
    /// The transition does not allow a change of this attribute [QP-1].
    AttrNotAllowed(QpAttrName),
    /// An attribute is above its limit.
    AttrTooLarge {
        /// The attribute.
        attr: QpAttrName,
        /// Its largest value.
        limit: u32,
        /// The value given.
        given: u32,
    },
    /// An attribute has a value that does not exist.
    AttrValue(QpAttrName),
    /// There is no such transition between states, or none that stays in a state [QP-1].
    Transition {
        /// The state of the queue pair.
        from: QpState,
        /// The state asked for.
        to: QpState,
    },
    /// The queue pair is in this state, and not in the one of
    /// [`QpAttr::cur_state`](crate::QpAttr::cur_state).
    CurState(QpState),
    /// A started request is not complete, and the attribute applies to it [QP-3].
    NotDrained,
    /// The queue pair is in this state, and sends need one in RTS [QP-2].
    StateToSend(QpState),
    /// The queue pair is in this state, and receives need one in INIT [QP-2].
    StateToReceive(QpState),
    /// The queue pair is in this state, and a connection needs one in RESET or INIT.
    StateToConnect(QpState),
    /// A connection needs a queue pair of type RC.
    TypeToConnect,
    /// A queue pair of this type does not execute requests of this kind.
    RequestOfOtherType(QpType),
    /// A part of a request is too long.
    TooLong {
        /// The part, which has a unit.
        part: RequestPart,
        /// The most that is possible.
        limit: u64,
        /// The length given.
        given: u64,
    },
    /// The queue pair may have no READ or atomic outstanding.
    NoReads,
    /// A READ or atomic has inline bytes, where its answer needs memory.
    InlineRead,
    /// An atomic is not of 8 bytes, or not aligned at the peer [REQ-18].
    AtomicOperand,
    /// A FLUSH has no placement, or has bytes of its own.
    FlushOperand,
    /// A window of this type is not bound by this verb [MR-9].
    WindowType(MwType),
    /// Window and queue pair are of two protection domains.
    WindowPd,
    /// The region does not lie within the buffer.
    OutsideBuffer,
    /// A region lets peers write, and this side not.
    RemoteWriteOnly,
    /// The region's last address is above 2^64 - 1.
    AddressWrap,
    /// The key is withdrawn already.
    KeyWithdrawn,
    /// The key is not withdrawn.
    KeyNotWithdrawn,
    /// The new key is the present one, or differs in more than the low byte.
    NewKey,
    /// A completion queue of no entry, or of fewer than it has.
    NoEntries,
    /// A receive is posted on a queue pair that has a shared receive queue.
    SharedReceives,
    /// A shared receive queue of no receive, or of fewer than are posted.
    SrqSize,
    /// The limit of a shared receive queue is above its size.
    SrqLimit,
    /// The completion queue has overrun.
    CqOverrun,
    /// Local and remote address are of two families.
    AddrFamilies,
    /// The remote address is unspecified or multicast, or lacks its port.
    RemoteAddr,
    /// The connection is not a request, or one that is answered already.
    NotARequest,
    /// Only queue pairs of type UD receive what is sent to a multicast group.
    TypeToAttach,
    /// The address is not one of a multicast group.
    NotMulticast(IpAddr),
    /// There is no connection yet.
    NotEstablished,
    /// The connection is not one that the peer has accepted and this side has not completed.
    NotResponded,
    /// There are no attributes of this state for a connection, or not yet.
    NoConnectionAttr(QpState),
    /// A device without an address.
    NoAddr,
    /// Several interfaces have this link-local address.
    SeveralInterfaces(IpAddr),
    /// The interface carries no path MTU [HDR-8]; its MTU in bytes.
    InterfaceMtu(usize),
    /// An interface does not carry the path MTU asked for [HDR-8].
    PathMtu {
        /// The largest path MTU that all interfaces carry.
        limit: Mtu,
        /// The path MTU asked for.
        given: Mtu,
    },
    /// The device refuses attributes of a queue pair, and does not say which.
    AttrRefused,
    /// The device refuses a region or its rights, and does not say which.
    RegionRefused,
    /// The device refuses a request, and does not say why.
    RequestRefused,
}

impl fmt::Display for InvalidReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::AttrMissing(attr) => return write!(f, "{attr} is needed"),
            Self::AttrNotAllowed(attr) => return attr.write_not_allowed(f),
            Self::AttrTooLarge { attr, limit, given } => {
                return attr.write_too_large(f, *limit, *given);
            }
            Self::AttrValue(attr) => return attr.write_value(f),
            Self::Transition { from, to } if from == to => {
                return write!(f, "no attribute of a queue pair in {from} can be changed");
            }
            Self::Transition { from, to } => {
                return write!(f, "the queue pair cannot go from {from} to {to}");
            }
            Self::CurState(state) => {
                return write!(f, "the queue pair is in {state}, not in the state of cur_state");
            }
            Self::NotDrained => "the send queue is not drained yet",
            Self::StateToSend(state) => {
                return write!(f, "sends need a queue pair in RTS, and this one is in {state}");
            }
            Self::StateToReceive(state) => {
                return write!(f, "receives need a queue pair in INIT, and this one is in {state}");
            }
            Self::StateToConnect(state) => {
                return write!(
                    f,
                    "a queue pair to connect must be in RESET or INIT, and this one is in {state}"
                );
            }
            Self::TypeToConnect => "only reliable queue pairs can be connected",
            Self::RequestOfOtherType(QpType::Rc) => "datagrams are for UD queue pairs",
            Self::RequestOfOtherType(QpType::Uc) => {
                "a UC queue pair sends and writes, and has no reads, atomics or invalidations"
            }
            Self::RequestOfOtherType(QpType::Ud) => "a UD queue pair sends datagrams only",
            Self::TooLong { part, limit, given } => return part.write_too_long(f, *limit, *given),
            Self::NoReads => "the queue pair may have no read outstanding: its max_rd_atomic is 0",
            Self::InlineRead => "reads and atomics need memory, not inline bytes",
            Self::AtomicOperand => "atomics are of 8 bytes, aligned at the peer",
            Self::FlushOperand => "a flush needs a placement and has no payload",
            Self::WindowType(MwType::Type1) => "a window of type 1 is bound by bind_mw",
            Self::WindowType(MwType::Type2) => "a window of type 2 is bound by a send request",
            Self::WindowPd => "window and queue pair are of two protection domains",
            Self::OutsideBuffer => "the region is not within the buffer",
            Self::RemoteWriteOnly => "a peer may write only where this side may",
            Self::AddressWrap => "the addresses of the region wrap",
            Self::KeyWithdrawn => "the key is invalidated already",
            Self::KeyNotWithdrawn => "the key is not invalidated",
            Self::NewKey => "the new key must differ in the low byte only",
            Self::NoEntries => "a completion queue needs room for an entry, and for those it has",
            Self::SharedReceives => {
                "receives of this queue pair are posted on its shared receive queue"
            }
            Self::SrqSize => {
                "a shared receive queue needs room for a receive, and for all that are posted"
            }
            Self::SrqLimit => "the limit of a shared receive queue is at most its size",

            Self::CqOverrun => "the completion queue has overrun",
            Self::AddrFamilies => "the addresses are of different families",
            Self::RemoteAddr => "the remote address is not one to connect to",
            Self::NotARequest => "not a connection request, or one already answered",
            Self::TypeToAttach => "only UD queue pairs are attached to multicast groups",
            Self::NotMulticast(addr) => return write!(f, "{addr} is no multicast address"),
            Self::NotEstablished => "there is no connection yet",
            Self::NotResponded => "the peer has not accepted, or the connection is complete",
            Self::NoConnectionAttr(state) => {
                return write!(f, "the connection has no attributes for {state}, or not yet");
            }
            Self::NoAddr => "a device needs at least one address",
            Self::SeveralInterfaces(addr) => {
                return write!(
                    f,
                    "several interfaces have the address {addr}: name one, as in {addr}%eth0"
                );
            }
            Self::InterfaceMtu(mtu) => {
                return write!(f, "the interface's MTU of {mtu} bytes is below 352");
            }
            Self::PathMtu { limit, given } => {
                return write!(
                    f,
                    "the path MTU asked for, {}, does not fit an interface's MTU: \
                     {} is the largest",
                    given.bytes(),
                    limit.bytes()
                );
            }
            Self::AttrRefused => {
                "an attribute is missing, not allowed in this state, or out of range for the device"
            }
            Self::RegionRefused => "the device refuses this region or these rights",
            Self::RequestRefused => {
                "the device refuses the request, or its state does not allow it"
            }
        })
    }
}

/// Name of an attribute of a queue pair: a field of [`QpAttr`](crate::QpAttr).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[doc(alias = "ibv_qp_attr_mask")]
#[non_exhaustive]
pub enum QpAttrName {
    /// `cur_state`.
    CurState,
    /// `port`.
    Port,
    /// `pkey_index`.
    PkeyIndex,
    /// `access`.
    Access,
    /// `qkey`.
    Qkey,
    /// `av`.
    Av,
    /// `path_mtu`, in bytes where it is a number.
    PathMtu,
    /// `dest_qpn`.
    DestQpn,
    /// `rq_psn`.
    RqPsn,
    /// `sq_psn`.
    SqPsn,
    /// `max_rd_atomic`.
    MaxRdAtomic,
    /// `max_dest_rd_atomic`.
    MaxDestRdAtomic,
    /// `min_rnr_timer`.
    MinRnrTimer,
    /// `timeout`.
    Timeout,
    /// `retry_cnt`.
    RetryCnt,
    /// `rnr_retry`.
    RnrRetry,
    /// `sqd_notify`.
    SqdNotify,
    /// `sq_draining`.
    SqDraining,
}

impl QpAttrName {
    fn write_not_allowed(self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::CurState => write!(f, "{self} does not apply to this transition"),
            Self::SqdNotify => write!(f, "{self} applies to the transition to SQD only"),
            Self::SqDraining => write!(f, "{self} is read-only"),
            _ => write!(f, "{self} cannot be changed now"),
        }
    }

    fn write_too_large(self, f: &mut fmt::Formatter<'_>, limit: u32, given: u32) -> fmt::Result {
        match self {
            Self::DestQpn | Self::RqPsn | Self::SqPsn => {
                write!(f, "{self} is {given:#x}, which has more than 24 bits")
            }
            Self::PathMtu => write!(f, "{self} is {given}, above the MTU of the port, {limit}"),
            _ => write!(f, "{self} is {given}, above the limit of {limit}"),
        }
    }

    fn write_value(self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::DestQpn => write!(f, "{self} is not that of a connection"),
            Self::Port => write!(f, "there is one port, and it has number 1"),
            Self::PkeyIndex => write!(f, "there is one partition key, of index 0"),
            Self::Av => write!(f, "both addresses of {self} must be of one family"),
            _ => write!(f, "there is no such {self}"),
        }
    }
}

impl fmt::Display for QpAttrName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::CurState => "cur_state",
            Self::Port => "port",
            Self::PkeyIndex => "pkey_index",
            Self::Access => "access",
            Self::Qkey => "qkey",
            Self::Av => "av",
            Self::PathMtu => "path_mtu",
            Self::DestQpn => "dest_qpn",
            Self::RqPsn => "rq_psn",
            Self::SqPsn => "sq_psn",
            Self::MaxRdAtomic => "max_rd_atomic",
            Self::MaxDestRdAtomic => "max_dest_rd_atomic",
            Self::MinRnrTimer => "min_rnr_timer",
            Self::Timeout => "timeout",
            Self::RetryCnt => "retry_cnt",
            Self::RnrRetry => "rnr_retry",
            Self::SqdNotify => "sqd_notify",
            Self::SqDraining => "sq_draining",
        })
    }
}

/// A part of a work request or connection request that can be too long.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RequestPart {
    /// The gather list of a send request, in elements.
    GatherList,
    /// The scatter list of a receive request, in elements.
    ScatterList,
    /// The scatter list of a receive for a shared receive queue, in elements.
    SharedScatterList,
    /// Inline bytes of a send request.
    Inline,
    /// The bytes of a message.
    Message,
    /// The bytes of a datagram.
    Datagram,
    /// The answer to a READ, in packets.
    Read,
    /// Private data of a connection request, in bytes [CMA-5].
    ConnectData,
    /// Private data of an acceptance, in bytes [CMA-13].
    AcceptData,
    /// Private data of a refusal, in bytes [CMA-13].
    RejectData,
}

impl RequestPart {
    /// Checks the length of this part against its limit.
    ///
    /// # Errors
    /// [`InvalidReason::TooLong`].
    #[inline]
    pub const fn check(self, given: u64, limit: u64) -> Result<(), Error> {
        if given > limit {
            return Err(Error::Invalid(InvalidReason::TooLong { part: self, limit, given }));
        }
        Ok(())
    }

    fn write_too_long(self, f: &mut fmt::Formatter<'_>, limit: u64, given: u64) -> fmt::Result {
        let from = match self {
            Self::GatherList => {
                return write!(
                    f,
                    "the gather list has {given} elements, \
                     and max_send_sge of the queue pair is {limit}"
                );
            }
            Self::ScatterList => {
                return write!(
                    f,
                    "the scatter list has {given} elements, \
                     and max_recv_sge of the queue pair is {limit}"
                );
            }
            Self::SharedScatterList => {
                return write!(
                    f,
                    "the scatter list has {given} elements, \
                     and max_sge of the shared receive queue is {limit}"
                );
            }
            Self::Inline => {
                return write!(
                    f,
                    "{given} bytes are inline, and max_inline of the queue pair is {limit}"
                );
            }
            Self::Message => {
                return write!(f, "the message has {given} bytes; the most is {limit}: split it");
            }
            Self::Datagram => {
                return write!(f, "the datagram has {given} bytes; the most is one MTU, {limit}");
            }
            Self::Read => {
                return write!(f, "the read has {given} packets; the most is {limit}: split it");
            }
            Self::ConnectData => "a connect",
            Self::AcceptData => "an accept",
            Self::RejectData => "a refusal",
        };
        write!(f, "{from} carries at most {limit} bytes of private data, not {given}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The texts name what is wrong, what was given and what would do.
    #[test]
    fn reasons_tell_what_would_do() {
        let too_large = |attr, limit, given| InvalidReason::AttrTooLarge { attr, limit, given };
        let too_long = |part, limit, given| InvalidReason::TooLong { part, limit, given };
        for (reason, text) in [
            (InvalidReason::AttrMissing(QpAttrName::Access), "access is needed"),
            (InvalidReason::AttrNotAllowed(QpAttrName::Qkey), "qkey cannot be changed now"),
            (InvalidReason::AttrNotAllowed(QpAttrName::SqDraining), "sq_draining is read-only"),
            (InvalidReason::AttrValue(QpAttrName::Port), "there is one port, and it has number 1"),
            (
                too_large(QpAttrName::MinRnrTimer, 31, 40),
                "min_rnr_timer is 40, above the limit of 31",
            ),
            (
                too_large(QpAttrName::RqPsn, 0xff_ffff, 1 << 24),
                "rq_psn is 0x1000000, which has more than 24 bits",
            ),
            (
                too_large(QpAttrName::PathMtu, 1024, 2048),
                "path_mtu is 2048, above the MTU of the port, 1024",
            ),
            (
                InvalidReason::Transition { from: QpState::Reset, to: QpState::Rts },
                "the queue pair cannot go from RESET to RTS",
            ),
            (
                InvalidReason::Transition { from: QpState::Rtr, to: QpState::Rtr },
                "no attribute of a queue pair in RTR can be changed",
            ),
            (
                too_long(RequestPart::GatherList, 4, 5),
                "the gather list has 5 elements, and max_send_sge of the queue pair is 4",
            ),
            (
                too_long(RequestPart::ConnectData, 56, 57),
                "a connect carries at most 56 bytes of private data, not 57",
            ),
            (
                InvalidReason::SeveralInterfaces("fe80::1".parse().unwrap()),
                "several interfaces have the address fe80::1: name one, as in fe80::1%eth0",
            ),
        ] {
            assert_eq!(reason.to_string(), text);
        }
    }
}
