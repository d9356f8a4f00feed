//! RDMA verbs: the plain types of memory regions, queue pairs, work requests, completions and
//! connections, and the trait [`Device`] that providers implement: RoCEv2 in userspace, rdma-core,
//! the simulator.
//!
//! Names and numbers are those of the verbs that C programs know (`ibv_*`, `rdma_*`); enumerations
//! have the kernel's values. Spec: `docs/spec/roce.md`.

mod access;
mod attr;
mod buffer;
mod callback;
mod cm;
mod device;
mod error;
mod foreign;
mod invalid;
mod path;
mod prefetch;
mod share;
mod wc;
mod wr;

pub use access::{Access, Mtu, MwBind, MwType, next_key};
pub use attr::{
    AddressVector, AsyncEvent, DeviceAttr, QpAttr, QpCap, QpInit, QpState, QpType, SrqAttr,
    SrqChange, SrqInit,
};
pub use buffer::{Buffer, HUGE_PAGE, Mem};
pub use callback::catch_callback_panic;
pub use cm::{CmEvent, CmId, CmMessage, ConnParam, ConnRequest, RejectReason};
pub use device::{CqId, Device, MrKeys, PdId, Qpn, SrqId};
pub use error::{Error, Feature, Object, Resource};
pub use foreign::{ForeignMemory, ProcessFile};
pub use invalid::{InvalidReason, QpAttrName, RequestPart};
pub use path::PathStats;
pub use prefetch::prefetch;
pub use share::SharedDevice;
pub use wc::{Completion, Status, WcOpcode};
pub use wr::{FlushOf, Piece, Placement, RecvWr, Remote, SendFlags, SendOp, SendWr, Sge, UdDest};
