//! The trait that every provider implements.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use bowline_base::count::Described;

use crate::{
    Access, AsyncEvent, Buffer, CmEvent, CmId, Completion, ConnParam, DeviceAttr, Error, Feature,
    MwBind, MwType, PathStats, QpAttr, QpInit, QpState, RecvWr, SendFlags, SendWr, SrqAttr,
    SrqChange, SrqInit,
};

/// Id of a protection domain of one device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PdId(pub u32);

/// Id of a completion queue of one device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CqId(pub u32);

/// Number of a queue pair, 24 bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Qpn(pub u32);

impl Qpn {
    /// Stands for all queue pairs attached to a multicast group.
    pub const MULTICAST: Self = Self(0xff_ffff);
}

/// Id of a shared receive queue of one device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SrqId(pub u32);

/// Keys of a memory region.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct MrKeys {
    /// Local key, for requests of this side.
    pub lkey: u32,
    /// Remote key, for requests of the peer.
    pub rkey: u32,
}

/// An RDMA device. All calls may be made from any thread.
pub trait Device: Send + Sync {
    /// Returns name, addresses and limits.
    fn attr(&self) -> DeviceAttr;

    /// Returns the index of the interface of a local link-local address; 0 if unknown.
    fn link_of(&self, _addr: IpAddr) -> u32 {
        0
    }

    /// Returns the fault that has kept packets from being sent in the last seconds, if the provider
    /// knows of one.
    fn fault(&self) -> Option<Error> {
        None
    }

    /// Returns the fault that has kept packets from being sent to one peer in the last seconds, if
    /// the provider knows of one.
    fn fault_to(&self, _peer: IpAddr) -> Option<Error> {
        None
    }

    /// Returns what the device has counted since it was opened. A device of which the system counts
    /// returns nothing.
    fn counts(&self) -> Vec<Described> {
        Vec::new()
    }

    /// Returns what is known about the paths to the peers of queue pairs. A device that leaves
    /// congestion to its hardware returns nothing.
    fn paths(&self) -> Vec<PathStats> {
        Vec::new()
    }

    /// Makes a protection domain.
    ///
    /// # Errors
    /// [`Error::Limit`].
    fn alloc_pd(&self) -> Result<PdId, Error>;

    /// Removes a protection domain.
    ///
    /// # Errors
    /// [`Error::NoSuch`]; [`Error::Busy`] while a region, queue pair or domain is left in it.
    fn dealloc_pd(&self, pd: PdId) -> Result<(), Error>;

    /// Makes a protection domain within another: its queue pairs and their peers may use the
    /// regions of both, while those of the outer domain may not use the inner one's. So a
    /// program has memory for all its peers, and memory for some of them.
    ///
    /// # Errors
    /// As [`alloc_pd`](Self::alloc_pd); [`Error::NoSuch`]; [`Error::NotSupported`].
    fn alloc_inner_pd(&self, _outer: PdId) -> Result<PdId, Error> {
        Err(Error::NotSupported(Feature::InnerDomain))
    }

    /// Registers `len` bytes of a buffer from `offset` on. The region's first byte has address
    /// `iova`, or that of the memory when that is `None`.
    ///
    /// # Errors
    /// [`Error::NoSuch`], [`Error::Invalid`], [`Error::Limit`], [`Error::System`].
    fn reg_mr(
        &self,
        pd: PdId,
        buffer: &Arc<Buffer>,
        offset: usize,
        len: usize,
        iova: Option<u64>,
        access: Access,
    ) -> Result<MrKeys, Error>;

    /// Makes a region for fast registration [MR-6], free at first.
    ///
    /// # Errors
    /// [`Error::NotSupported`]; as [`reg_mr`](Self::reg_mr).
    fn alloc_mr(&self, pd: PdId) -> Result<MrKeys, Error>;

    /// Removes a region by its present local key, or the one it was created with. Copies in
    /// progress are finished first.
    ///
    /// # Errors
    /// [`Error::NoSuch`]; [`Error::Busy`] while a window is bound to it.
    fn dereg_mr(&self, lkey: u32) -> Result<(), Error>;

    /// Withdraws the present keys of regions of [`reg_mr`](Self::reg_mr) from peers: at once, not
    /// in the order of a queue. The rest of an unfinished WRITE to them is refused; a READ that was
    /// accepted before is answered, again if it is repeated. Local use continues. All keys are
    /// checked first; on an error nothing has changed.
    ///
    /// # Errors
    /// [`Error::NoSuch`]; [`Error::Invalid`] for a key that is withdrawn already;
    /// [`Error::Busy`] while a window is bound to one; [`Error::NotSupported`].
    fn withdraw_keys(&self, _rkeys: &[u32]) -> Result<(), Error> {
        Err(Error::NotSupported(Feature::WithdrawKeys))
    }

    /// Renews withdrawn keys: peers have access again, under new keys, which differ from the
    /// present ones in the low byte only ([`next_key`](crate::next_key)). Takes pairs of the
    /// present and the new key. The key a region was registered with still names it for
    /// [`dereg_mr`](Self::dereg_mr), and for nothing else. All keys are checked first; on an error
    /// nothing has changed.
    ///
    /// # Errors
    /// [`Error::NoSuch`]; [`Error::Invalid`] for a key that is not withdrawn, and for a new key
    /// that does not belong to the region or is not new; [`Error::NotSupported`].
    fn renew_keys(&self, _keys: &[(u32, u32)]) -> Result<(), Error> {
        Err(Error::NotSupported(Feature::RenewKeys))
    }

    /// Creates an unbound memory window and returns its first key, which grants nothing. A window
    /// is named by the upper 24 bits of its keys, so every key it has had names it [MR-9].
    ///
    /// # Errors
    /// [`Error::NoSuch`], [`Error::Limit`], [`Error::NotSupported`].
    fn alloc_mw(&self, pd: PdId, kind: MwType) -> Result<u32, Error>;

    /// Binds a window of type 1, in the order of a queue pair's send queue; a length of 0 ends the
    /// binding. Returns the key that is valid from then on; the previous key becomes invalid. The
    /// request completes as [`WcOpcode::BindMw`](crate::WcOpcode::BindMw) with `id`.
    ///
    /// # Errors
    /// As [`post_send`](Self::post_send); [`Error::Invalid`] for a window of type 2.
    fn bind_mw(
        &self,
        qp: Qpn,
        window: u32,
        id: u64,
        to: &MwBind,
        flags: SendFlags,
    ) -> Result<u32, Error>;

    /// Removes a window, bound or not.
    ///
    /// # Errors
    /// [`Error::NoSuch`].
    fn dealloc_mw(&self, window: u32) -> Result<(), Error>;

    /// Makes a completion queue.
    ///
    /// # Errors
    /// [`Error::Limit`].
    fn create_cq(&self, depth: usize) -> Result<CqId, Error>;

    /// Removes a completion queue.
    ///
    /// # Errors
    /// [`Error::NoSuch`]; [`Error::Busy`] while a queue pair uses it.
    fn destroy_cq(&self, cq: CqId) -> Result<(), Error>;

    /// Appends up to `max` completions to `out` without waiting; returns how many.
    ///
    /// # Errors
    /// [`Error::NoSuch`]; [`Error::Closed`].
    fn poll_cq(&self, cq: CqId, out: &mut Vec<Completion>, max: usize) -> Result<usize, Error>;

    /// Waits until the queue has an entry (with `solicited`, one that was sent solicited or is an
    /// error), at most `limit`; tells whether it has one. Existing entries are checked first, so
    /// none is missed between polling and waiting.
    ///
    /// # Errors
    /// As [`poll_cq`](Self::poll_cq).
    fn wait_cq(&self, cq: CqId, solicited: bool, limit: Option<Duration>) -> Result<bool, Error>;

    /// As [`wait_cq`](Self::wait_cq) for any entry, but ends too when `other` can be read or was
    /// hung up, soon after that if the thread polls before it sleeps: for one thread that serves
    /// both. `None`, at once: another thread waits for the device, and this one would not notice
    /// `other`.
    ///
    /// # Errors
    /// As [`poll_cq`](Self::poll_cq).
    fn wait_cq_or(
        &self,
        cq: CqId,
        other: BorrowedFd<'_>,
        limit: Duration,
    ) -> Result<Option<bool>, Error>;

    /// Makes a queue pair, in RESET.
    ///
    /// # Errors
    /// [`Error::NoSuch`], [`Error::Invalid`], [`Error::Limit`].
    fn create_qp(&self, init: &QpInit) -> Result<Qpn, Error>;

    /// Changes a queue pair [QP-1].
    ///
    /// # Errors
    /// [`Error::NoSuch`]; [`Error::Invalid`] naming the attribute that is missing or not allowed.
    fn modify_qp(&self, qp: Qpn, attr: &QpAttr) -> Result<(), Error>;

    /// Returns the state and attributes of a queue pair.
    ///
    /// # Errors
    /// [`Error::NoSuch`].
    fn query_qp(&self, qp: Qpn) -> Result<(QpState, QpAttr), Error>;

    /// Removes a queue pair; what is posted on it never completes.
    ///
    /// # Errors
    /// [`Error::NoSuch`]; [`Error::Busy`] while a connection holds it.
    fn destroy_qp(&self, qp: Qpn) -> Result<(), Error>;

    /// Posts send requests in order; on an error tells how many were accepted.
    ///
    /// # Errors
    /// [`Error::NoSuch`], [`Error::Invalid`], [`Error::QueueFull`].
    fn post_send(&self, qp: Qpn, wrs: &[SendWr<'_>]) -> Result<(), (usize, Error)>;

    /// Posts receive requests in order; on an error tells how many were accepted.
    ///
    /// # Errors
    /// As [`post_send`](Self::post_send); [`Error::Invalid`] for a queue pair with a shared receive
    /// queue.
    fn post_recv(&self, qp: Qpn, wrs: &[RecvWr<'_>]) -> Result<(), (usize, Error)>;

    /// Makes a shared receive queue [SRQ-1]: queue pairs made with it take their receives from it.
    ///
    /// # Errors
    /// [`Error::NoSuch`], [`Error::Invalid`], [`Error::Limit`], [`Error::NotSupported`].
    fn create_srq(&self, _init: &SrqInit) -> Result<SrqId, Error> {
        Err(Error::NotSupported(Feature::SharedReceiveQueue))
    }

    /// Changes the size of a shared receive queue, or arms its limit [SRQ-4]. On an error nothing
    /// has changed.
    ///
    /// # Errors
    /// [`Error::NoSuch`]; [`Error::Invalid`] for a size below the number of posted receives, and
    /// for a limit above the size; [`Error::Limit`]; [`Error::NotSupported`].
    fn modify_srq(&self, _srq: SrqId, _change: &SrqChange) -> Result<(), Error> {
        Err(Error::NotSupported(Feature::SharedReceiveQueue))
    }

    /// Returns the sizes and the limit of a shared receive queue.
    ///
    /// # Errors
    /// [`Error::NoSuch`], [`Error::NotSupported`].
    fn query_srq(&self, _srq: SrqId) -> Result<SrqAttr, Error> {
        Err(Error::NotSupported(Feature::SharedReceiveQueue))
    }

    /// Removes a shared receive queue; what is posted on it never completes.
    ///
    /// # Errors
    /// [`Error::NoSuch`]; [`Error::Busy`] while a queue pair uses it; [`Error::NotSupported`].
    fn destroy_srq(&self, _srq: SrqId) -> Result<(), Error> {
        Err(Error::NotSupported(Feature::SharedReceiveQueue))
    }

    /// Posts receive requests to a shared receive queue, in order; on an error tells how many were
    /// accepted.
    ///
    /// # Errors
    /// [`Error::NoSuch`], [`Error::Invalid`], [`Error::QueueFull`], [`Error::NotSupported`].
    fn post_srq_recv(&self, _srq: SrqId, _wrs: &[RecvWr<'_>]) -> Result<(), (usize, Error)> {
        Err((0, Error::NotSupported(Feature::SharedReceiveQueue)))
    }

    /// Returns the next asynchronous event, waiting at most `limit`.
    ///
    /// # Errors
    /// [`Error::TimedOut`]; [`Error::Closed`].
    fn async_event(&self, limit: Duration) -> Result<AsyncEvent, Error>;

    /// Listens for connections to a port of an address of this device, or of all of them.
    ///
    /// # Errors
    /// [`Error::AddrInUse`], [`Error::AddrNotAvailable`].
    fn listen(&self, at: SocketAddr) -> Result<CmId, Error>;

    /// Connects; the outcome is an event.
    ///
    /// # Errors
    /// [`Error::Invalid`], [`Error::NoSuch`], [`Error::AddrNotAvailable`].
    fn connect(
        &self,
        local: Option<SocketAddr>,
        remote: SocketAddr,
        param: &ConnParam,
    ) -> Result<CmId, Error>;

    /// Accepts a connection request.
    ///
    /// # Errors
    /// [`Error::Invalid`], [`Error::NoSuch`].
    fn accept(&self, id: CmId, param: &ConnParam) -> Result<(), Error>;

    /// Refuses a connection request, with at most 148 bytes of data.
    ///
    /// # Errors
    /// [`Error::Invalid`], [`Error::NoSuch`].
    fn reject(&self, id: CmId, private_data: &[u8]) -> Result<(), Error>;

    /// Returns the attributes of the transition to INIT, RTR or RTS of a connection's queue pair
    /// that the program leads ([`ConnParam::is_led`]).
    ///
    /// # Errors
    /// [`Error::NoSuch`]; [`Error::Invalid`] for other states, and for RTR and RTS before the
    /// peer's values are known; [`Error::NotSupported`].
    fn connection_attr(&self, _id: CmId, _to: QpState) -> Result<QpAttr, Error> {
        Err(Error::NotSupported(Feature::LedQueuePair))
    }

    /// Completes a connect that the peer has accepted ([`CmEvent::Responded`]).
    ///
    /// # Errors
    /// [`Error::NoSuch`]; [`Error::Invalid`] in another state; [`Error::NotSupported`].
    fn establish(&self, _id: CmId) -> Result<(), Error> {
        Err(Error::NotSupported(Feature::LedQueuePair))
    }

    /// Notes that a message has arrived on the queue pair of an accepted request: its connection is
    /// established, although the peer's message that says so has not come. Returns whether this was
    /// news.
    ///
    /// # Errors
    /// [`Error::NoSuch`]; [`Error::Invalid`] before the request is accepted;
    /// [`Error::NotSupported`].
    fn note_established(&self, _id: CmId) -> Result<bool, Error> {
        Err(Error::NotSupported(Feature::LedQueuePair))
    }

    /// Ends a connection: its queue pair goes to ERR and everything posted on it is flushed.
    ///
    /// # Errors
    /// [`Error::NoSuch`].
    fn disconnect(&self, id: CmId) -> Result<(), Error>;

    /// Destroys a listener or connection; a connection is ended if necessary.
    ///
    /// # Errors
    /// [`Error::NoSuch`].
    fn destroy_id(&self, id: CmId) -> Result<(), Error>;

    /// Returns the next event of any connection, waiting at most `limit`.
    ///
    /// # Errors
    /// [`Error::TimedOut`]; [`Error::Closed`].
    fn cm_event(&self, limit: Duration) -> Result<CmEvent, Error>;
}
