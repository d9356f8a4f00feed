//! RDMA verbs, and the devices that carry them out.
//!
//! Programs that use [`rtrs`](crate::rtrs) or `rnbd` need a [`Device`] and nothing else
//! from here: a [`SoftDevice`], which is RoCEv2 over UDP sockets of this process, or, with the
//! feature `rdma-core`, a device of the machine.
//!
//! [`guide::rdma_write`](crate::guide::rdma_write) is a whole program.

pub use bowline_roce::{
    CmConfig, Config as RoceConfig, Congestion, Counters as RoceCounters, GiveUp,
    Limits as RoceLimits,
};
pub use bowline_roce_driver::{
    DriverStats as SoftStats, EarlySockets, FormerConnections, IcrcPolicy, Impairment,
    ImpairmentError, Impairments, InUse, PollMode, ROCE_PORT, SoftConfig, SoftDevice, Watch,
};
pub use bowline_verbs::{
    Access, AddressVector, AsyncEvent, Buffer, CmEvent, CmId, CmMessage, Completion, ConnParam,
    ConnRequest, CqId, Device, DeviceAttr, Error, Feature, FlushOf, ForeignMemory, HUGE_PAGE,
    InvalidReason, Mem, MrKeys, Mtu, MwBind, MwType, Object, PathStats, PdId, Piece, Placement,
    QpAttr, QpAttrName, QpCap, QpInit, QpState, QpType, Qpn, RecvWr, RejectReason, Remote,
    RequestPart, Resource, SendFlags, SendOp, SendWr, Sge, SharedDevice, SrqAttr, SrqChange, SrqId,
    SrqInit, Status, UdDest, WcOpcode,
};

#[cfg(feature = "rdma-core")]
pub use bowline_rdmacore::{RdmaCoreDevice, Unavailable};
