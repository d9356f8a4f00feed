//! Connections by librdmacm.
//!
//! Queue pairs are not tied to the library's ids, since they exist before their connections; they
//! their states are changed here, with the attributes that the kernel's connection manager gives
//! (`rdma_init_qp_attr`) [CMA-12].
//!
//! ```text active                                      passive connect: resolve address
//! CONNECT_REQUEST -> event ADDR_RESOLVED: resolve route                accept: INIT, RTR, RTS,
//! send REP ROUTE_RESOLVED: send REQ                    ESTABLISHED -> event CONNECT_RESPONSE:
//! INIT, RTR, RTS, send RTU -> event ``` All work with ids is done under one lock. Events of the
//! library are acknowledged before the lock is released, so that no id is destroyed while one of
//! its events is in use.

use core::ffi::c_int;
use core::mem::zeroed;
use core::ptr::NonNull;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::net::{IpAddr, SocketAddr, SocketAddrV4, SocketAddrV6};
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bowline_verbs::{
    CmEvent, CmId, ConnParam, ConnRequest, Error, Feature, InvalidReason, Object, QpState, Qpn,
    RejectReason, RequestPart,
};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};

use crate::context::name_of;
use crate::error::{address, check, last_errno, system};
use crate::ffi::{
    EventChannel, IbvQpAttr, OPTION_ID, OPTION_ID_REUSEADDR, OPTION_ID_TOS, PS_TCP, RdmaConnParam,
    RdmaId, mask,
};
use crate::load::{Libraries, Unavailable};
use crate::qp::Qp;

/// Timeout of resolving an address, and of a route, in milliseconds.
const RESOLVE_MS: c_int = 5000;
/// Connection requests that the kernel queues for a listener.
const BACKLOG: c_int = 128;
/// Largest number of connection requests that wait for the program.
const REQUESTS: usize = 1024;
/// Largest private data of a request [CMA-5], a reply and a refusal [CMA-13], in bytes.
const CONNECT_DATA: usize = 56;
const ACCEPT_DATA: usize = 196;
const REJECT_DATA: usize = 148;

/// Listeners and connections of a device.
#[derive(Debug)]
pub(crate) struct Cm {
    libs: &'static Libraries,
    device: String,
    most_rd_atomic: u8,
    channel: NonNull<EventChannel>,
    state: Mutex<State>,
    arrived: Condvar,
}

// SAFETY: librdmacm allows every call from any thread.
unsafe impl Send for Cm {}
// SAFETY: as above.
unsafe impl Sync for Cm {}

#[derive(Debug, Default)]
struct State {
    last: u32,
    ids: BTreeMap<CmId, Id>,
    names: HashMap<*mut RdmaId, CmId>,
    events: VecDeque<CmEvent>,
}

// SAFETY: the pointers are only names here; see `Cm`.
unsafe impl Send for State {}

/// A listener or connection.
#[derive(Debug)]
struct Id {
    raw: *mut RdmaId,
    phase: Phase,
    /// The queue pair, as long as the connection uses it.
    qp: Option<Arc<Qp>>,
    param: ConnParam,
    /// Reads and atomics that the peer answers at a time.
    peer_answers: u8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Listening,
    Resolving,
    Connecting,
    Requested,
    Accepted,
    Up,
    /// This side has disconnected.
    Leaving,
    Over,
}

/// A copy of an event of the library.
#[derive(Debug)]
struct LibraryEvent {
    id: *mut RdmaId,
    listener: *mut RdmaId,
    kind: u32,
    status: c_int,
    private_data: Vec<u8>,
    responder_resources: u8,
    initiator_depth: u8,
    qpn: u32,
}

/// Kinds of events, `enum rdma_cm_event_type`.
mod kind {
    pub(super) const ADDR_RESOLVED: u32 = 0;
    pub(super) const ADDR_ERROR: u32 = 1;
    pub(super) const ROUTE_RESOLVED: u32 = 2;
    pub(super) const ROUTE_ERROR: u32 = 3;
    pub(super) const CONNECT_REQUEST: u32 = 4;
    pub(super) const CONNECT_RESPONSE: u32 = 5;
    pub(super) const CONNECT_ERROR: u32 = 6;
    pub(super) const UNREACHABLE: u32 = 7;
    pub(super) const REJECTED: u32 = 8;
    pub(super) const ESTABLISHED: u32 = 9;
    pub(super) const DISCONNECTED: u32 = 10;
    pub(super) const DEVICE_REMOVAL: u32 = 11;
    pub(super) const TIMEWAIT_EXIT: u32 = 15;
}

impl Cm {
    /// Opens the event channel; `device` is the name of the device that connections are to use.
    pub(crate) fn new(
        libs: &'static Libraries,
        device: &str,
        most_rd_atomic: u8,
    ) -> Result<Self, Unavailable> {
        // SAFETY: needs nothing.
        let channel = unsafe { (libs.rdma.create_event_channel)() };
        let channel = NonNull::new(channel).ok_or_else(|| {
            let what = "opening /dev/infiniband/rdma_cm (is the module rdma_ucm loaded?)";
            system(what, last_errno())
        })?;
        let (state, arrived) = (Mutex::default(), Condvar::new());
        let cm = Self { libs, device: device.to_owned(), most_rd_atomic, channel, state, arrived };
        let failed = |e: rustix::io::Errno| system("the event channel", e.raw_os_error());
        let flags = fcntl_getfl(cm.fd()).map_err(failed)?;
        fcntl_setfl(cm.fd(), flags | OFlags::NONBLOCK).map_err(failed)?;
        Ok(cm)
    }

    /// Readable when [`run`](Self::run) has something to do.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the channel lives as long as `self`; the field does not change.
        let fd = unsafe { self.channel.as_ref() }.fd;
        // SAFETY: open as long as the channel.
        unsafe { BorrowedFd::borrow_raw(fd) }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells whether a connection uses this queue pair.
    pub(crate) fn holds(&self, qpn: Qpn) -> bool {
        self.lock().holds(qpn)
    }

    pub(crate) fn listen(&self, at: SocketAddr) -> Result<CmId, Error> {
        let mut st = self.lock();
        let raw = self.create_id()?;
        let listening = self.bind(raw, at).and_then(|()| {
            // SAFETY: `raw` was just made.
            check(unsafe { (self.libs.rdma.listen)(raw, BACKLOG) })
                .map_err(|errno| address(at, errno))
        });
        self.kept(raw, listening)?;
        Ok(st.add(Id::new(raw, Phase::Listening)))
    }

    pub(crate) fn connect(
        &self,
        qp: Arc<Qp>,
        local: Option<SocketAddr>,
        remote: SocketAddr,
        param: &ConnParam,
    ) -> Result<CmId, Error> {
        led_by_device(param)?;
        RequestPart::ConnectData.check(param.private_data.len() as u64, CONNECT_DATA as u64)?;
        let mut st = self.lock();
        st.usable(&qp)?;
        let raw = self.create_id()?;
        let begun = local.map_or(Ok(()), |local| self.bind_shared(raw, local)).and_then(|()| {
            self.set_tos(raw, param.tos)?;
            let mut to = storage(remote);
            let at = (&raw mut to).cast::<libc::sockaddr>();
            let resolve = self.libs.rdma.resolve_addr;
            // SAFETY: `raw` was just made; no source is given; the destination is only read.
            check(unsafe { resolve(raw, core::ptr::null_mut(), at, RESOLVE_MS) })
                .map_err(|errno| address(remote, errno))
        });
        self.kept(raw, begun)?;
        let id = Id { qp: Some(qp), param: param.clone(), ..Id::new(raw, Phase::Resolving) };
        Ok(st.add(id))
    }

    pub(crate) fn accept(&self, id: CmId, qp: Arc<Qp>, param: &ConnParam) -> Result<(), Error> {
        led_by_device(param)?;
        RequestPart::AcceptData.check(param.private_data.len() as u64, ACCEPT_DATA as u64)?;
        let mut st = self.lock();
        st.usable(&qp)?;
        let conn = st.requested(id)?;
        let mut param = param.clone();
        param.responder_resources = param.responder_resources.min(self.most_rd_atomic);
        let most = conn.peer_answers.min(self.most_rd_atomic);
        param.initiator_depth = param.initiator_depth.min(most);
        self.move_qp(conn.raw, &qp, &param, true)?;
        let mut out = conn_param(&param, qp.qpn);
        // SAFETY: `raw` is an id of ours; the parameters and the data are only read.
        let sent = check(unsafe { (self.libs.rdma.accept)(conn.raw, &raw mut out) });
        if let Err(errno) = sent {
            // The connection is lost, and with it what the queue pair was moved for.
            let _ = qp.go(QpState::Err);
            conn.phase = Phase::Over;
            return Err(system("accepting a connection", errno));
        }
        conn.phase = Phase::Accepted;
        (conn.qp, conn.param) = (Some(qp), param);
        Ok(())
    }

    pub(crate) fn reject(&self, id: CmId, private_data: &[u8]) -> Result<(), Error> {
        RequestPart::RejectData.check(private_data.len() as u64, REJECT_DATA as u64)?;
        let mut st = self.lock();
        let conn = st.requested(id)?;
        conn.phase = Phase::Over;
        self.send_reject(conn.raw, private_data)
    }

    pub(crate) fn disconnect(&self, id: CmId) -> Result<(), Error> {
        let mut st = self.lock();
        let conn = st.ids.get_mut(&id).ok_or(Error::NoSuch(Object::Connection))?;
        match conn.phase {
            Phase::Up | Phase::Accepted => {}
            Phase::Leaving | Phase::Over => return Ok(()),
            _ => return Err(Error::Invalid(InvalidReason::NotEstablished)),
        }
        conn.phase = Phase::Leaving;
        self.leave(conn);
        Ok(())
    }

    pub(crate) fn destroy(&self, id: CmId) -> Result<(), Error> {
        let mut st = self.lock();
        let mut conn = st.ids.remove(&id).ok_or(Error::NoSuch(Object::CmId))?;
        st.names.remove(&conn.raw);
        st.events.retain(|event| of(event) != id);
        self.end(&mut conn);
        Ok(())
    }

    /// Waits for the next event of any connection, at most `limit`.
    pub(crate) fn event(&self, limit: Duration) -> Result<CmEvent, Error> {
        let deadline = Instant::now().checked_add(limit);
        let mut st = self.lock();
        loop {
            if let Some(event) = st.events.pop_front() {
                return Ok(event);
            }
            let left = deadline.map_or(limit, |at| at.saturating_duration_since(Instant::now()));
            if left.is_zero() {
                return Err(Error::TimedOut);
            }
            let woken = self.arrived.wait_timeout(st, left);
            st = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Handles all events of the library. Returns their number, and whether one reported that this
    /// device is gone. An event of another device does not count, to which a connection may have
    /// been routed, nor does a changed address.
    pub(crate) fn run(&self) -> (usize, bool) {
        let mut st = self.lock();
        let before = st.events.len();
        let (mut count, mut removed) = (0, false);
        while let Some(happened) = self.next() {
            count += 1;
            removed |= happened.kind == kind::DEVICE_REMOVAL
                && st.names.contains_key(&happened.id)
                && self.is_ours(happened.id) == Some(true);
            if happened.kind == kind::CONNECT_REQUEST {
                self.requested(&mut st, happened);
            } else {
                self.progress(&mut st, happened);
            }
        }
        if st.events.len() > before {
            self.arrived.notify_all();
        }
        (count, removed)
    }

    /// Returns the library's next event, copied and acknowledged.
    fn next(&self) -> Option<LibraryEvent> {
        let mut event = core::ptr::null_mut();
        // SAFETY: the channel lives as long as `self`, and does not block.
        let result =
            unsafe { (self.libs.rdma.get_cm_event)(self.channel.as_ptr(), &raw mut event) };
        if result != 0 {
            return None;
        }
        // SAFETY: the library's, which stays until it is acknowledged below.
        let got = unsafe { event.as_ref() }?;
        let len = usize::from(got.conn.private_data_len);
        let data = got.conn.private_data.cast::<u8>();
        let private_data = if data.is_null() {
            Vec::new()
        } else {
            // SAFETY: the event has this many bytes of data.
            unsafe { core::slice::from_raw_parts(data, len) }.to_vec()
        };
        let happened = LibraryEvent {
            id: got.id,
            listener: got.listen_id,
            kind: got.event,
            status: got.status,
            private_data,
            responder_resources: got.conn.responder_resources,
            initiator_depth: got.conn.initiator_depth,
            qpn: got.conn.qp_num,
        };
        // SAFETY: taken above, and nothing refers to it any more.
        unsafe { (self.libs.rdma.ack_cm_event)(event) };
        Some(happened)
    }

    /// Handles a connection request, for which the library has made an id.
    fn requested(&self, st: &mut State, happened: LibraryEvent) {
        let raw = happened.id;
        let waiting = st.ids.values().filter(|id| id.phase == Phase::Requested).count();
        let listener = st.names.get(&happened.listener).copied();
        let (Some(listener), true, true) =
            (listener, self.is_ours(raw) == Some(true), waiting < REQUESTS)
        else {
            // It may be gone already, which is as good.
            let _ = self.send_reject(raw, &[]);
            // SAFETY: the id of the event, which nobody else knows.
            unsafe { (self.libs.rdma.destroy_id)(raw) };
            return;
        };
        let (local, remote) = addresses(raw);
        let mut private_data = happened.private_data;
        private_data.resize(CONNECT_DATA, 0);
        // The library tells what this side is to have: the peer's depth is what is answered here.
        let request = ConnRequest {
            listener,
            local,
            remote,
            private_data,
            responder_resources: happened.initiator_depth,
            initiator_depth: happened.responder_resources,
            remote_qpn: Qpn(happened.qpn),
        };
        let peer_answers = happened.initiator_depth;
        let id = st.add(Id { peer_answers, ..Id::new(raw, Phase::Requested) });
        st.events.push_back(CmEvent::ConnectRequest { id, request });
    }

    /// Handles an event of a listener or connection [CMA-14].
    fn progress(&self, st: &mut State, happened: LibraryEvent) {
        let Some(&id) = st.names.get(&happened.id) else {
            return;
        };
        let Some(conn) = st.ids.get_mut(&id) else {
            return;
        };
        let event = match (happened.kind, conn.phase) {
            (kind::ADDR_RESOLVED, Phase::Resolving) => {
                let ours = self.is_ours(conn.raw) == Some(true);
                // SAFETY: an id of ours.
                let went =
                    ours && unsafe { (self.libs.rdma.resolve_route)(conn.raw, RESOLVE_MS) } == 0;
                (!went).then_some(CmEvent::Unreachable { id })
            }
            (kind::ROUTE_RESOLVED, Phase::Resolving) => {
                conn.phase = Phase::Connecting;
                let qpn = conn.qp.as_ref().map_or(Qpn(0), |qp| qp.qpn);
                let mut param = conn_param(&conn.param, qpn);
                param.responder_resources = param.responder_resources.min(self.most_rd_atomic);
                param.initiator_depth = param.initiator_depth.min(self.most_rd_atomic);
                // SAFETY: an id of ours; the parameters and the data are only read.
                let result = unsafe { (self.libs.rdma.connect)(conn.raw, &raw mut param) };
                (result != 0).then_some(CmEvent::Unreachable { id })
            }
            (kind::CONNECT_RESPONSE, Phase::Connecting) => Some(match self.established(conn) {
                Ok(()) => {
                    conn.phase = Phase::Up;
                    let mut private_data = happened.private_data;
                    private_data.resize(ACCEPT_DATA, 0);
                    CmEvent::Established {
                        id,
                        private_data,
                        responder_resources: happened.responder_resources,
                        initiator_depth: happened.initiator_depth,
                    }
                }
                // Destroying the id notifies the peer.
                Err(_) => CmEvent::Unreachable { id },
            }),
            (kind::ESTABLISHED, Phase::Accepted) => {
                conn.phase = Phase::Up;
                Some(CmEvent::Established {
                    id,
                    private_data: Vec::new(),
                    responder_resources: conn.param.responder_resources,
                    initiator_depth: conn.param.initiator_depth,
                })
            }
            (kind::REJECTED, Phase::Connecting | Phase::Accepted) => {
                let mut private_data = happened.private_data;
                private_data.resize(REJECT_DATA, 0);
                let reason = u16::try_from(happened.status).unwrap_or(0);
                Some(CmEvent::Rejected { id, reason: RejectReason(reason), private_data })
            }
            (
                kind::ADDR_ERROR | kind::ROUTE_ERROR | kind::CONNECT_ERROR | kind::UNREACHABLE,
                Phase::Resolving | Phase::Connecting | Phase::Accepted,
            ) => Some(CmEvent::Unreachable { id }),
            (kind::DISCONNECTED | kind::DEVICE_REMOVAL, Phase::Up | Phase::Accepted) => {
                // Answers the peer.
                self.leave(conn);
                Some(CmEvent::Disconnected { id })
            }
            (kind::DISCONNECTED, Phase::Leaving) => Some(CmEvent::Disconnected { id }),
            (kind::TIMEWAIT_EXIT, _) => Some(CmEvent::TimewaitExit { id }),
            _ => None,
        };
        let Some(event) = event else {
            return;
        };
        if !matches!(event, CmEvent::Established { .. }) {
            conn.over();
        }
        st.events.push_back(event);
    }

    /// Handles the peer's acceptance: moves the queue pair to RTS, and confirms to the peer.
    fn established(&self, conn: &Id) -> Result<(), Error> {
        let qp = conn.qp.as_ref().ok_or(Error::NoSuch(Object::QueuePair))?;
        self.move_qp(conn.raw, qp, &conn.param, false)?;
        // SAFETY: an id of ours.
        check(unsafe { (self.libs.rdma.establish)(conn.raw) })
            .map_err(|errno| system("establishing a connection", errno))
    }

    /// Moves a queue pair from RESET or INIT to RTS, with the connection manager's attributes.
    fn move_qp(
        &self,
        raw: *mut RdmaId,
        qp: &Qp,
        param: &ConnParam,
        passive: bool,
    ) -> Result<(), Error> {
        let fresh = qp.state()? == QpState::Reset;
        for state in [QpState::Init, QpState::Rtr, QpState::Rts] {
            let mut attr = IbvQpAttr { qp_state: state as u32, ..IbvQpAttr::default() };
            let mut what: c_int = 0;
            let ask = self.libs.rdma.init_qp_attr;
            // SAFETY: an id of ours; both may be written to.
            check(unsafe { ask(raw, &raw mut attr, &raw mut what) })
                .map_err(|errno| system("asking for the attributes of a connection", errno))?;
            match state {
                // The rights are the program's if it has set them.
                QpState::Init if !fresh => what &= !mask::ACCESS,
                QpState::Rtr => {
                    attr.min_rnr_timer = param.min_rnr_timer;
                    if passive {
                        attr.max_dest_rd_atomic = param.responder_resources;
                    }
                }
                QpState::Rts => {
                    if passive {
                        attr.max_rd_atomic = param.initiator_depth;
                    }
                    attr.timeout = param.ack_timeout.unwrap_or(attr.timeout);
                }
                _ => {}
            }
            qp.modify(&attr, what)?;
        }
        Ok(())
    }

    fn create_id(&self) -> Result<*mut RdmaId, Error> {
        let mut raw = core::ptr::null_mut();
        let none = core::ptr::null_mut();
        let create = self.libs.rdma.create_id;
        // SAFETY: the channel lives as long as `self`, and ids are destroyed before it.
        check(unsafe { create(self.channel.as_ptr(), &raw mut raw, none, PS_TCP) })
            .map_err(|errno| system("making an id of the connection manager", errno))?;
        Ok(raw)
    }

    /// Destroys an id if `outcome` is an error; returns `outcome`.
    fn kept(&self, raw: *mut RdmaId, outcome: Result<(), Error>) -> Result<(), Error> {
        if outcome.is_err() {
            // SAFETY: just made, and no event of it is in use.
            unsafe { (self.libs.rdma.destroy_id)(raw) };
        }
        outcome
    }

    /// Binds an id to an address, which must be one of this device unless it is a wildcard.
    fn bind(&self, raw: *mut RdmaId, at: SocketAddr) -> Result<(), Error> {
        let mut addr = storage(at);
        let addr = (&raw mut addr).cast::<libc::sockaddr>();
        // SAFETY: an id just made; the address is only read.
        check(unsafe { (self.libs.rdma.bind_addr)(raw, addr) })
            .map_err(|errno| address(at, errno))?;
        match self.is_ours(raw) {
            Some(false) => Err(Error::AddrNotAvailable),
            None if !at.ip().is_unspecified() => Err(Error::AddrNotAvailable),
            _ => Ok(()),
        }
    }

    /// Binds an id for a connection: several connections may share a local port [RT-35].
    fn bind_shared(&self, raw: *mut RdmaId, at: SocketAddr) -> Result<(), Error> {
        if at.port() != 0 {
            let mut on: c_int = 1;
            let value = (&raw mut on).cast();
            let set = self.libs.rdma.set_option;
            // SAFETY: an id just made; the number of the size given is only read.
            check(unsafe { set(raw, OPTION_ID, OPTION_ID_REUSEADDR, value, size_of::<c_int>()) })
                .map_err(|errno| system("sharing a port", errno))?;
        }
        self.bind(raw, at)
    }

    /// Tells whether an id belongs to this device; `None` when it belongs to none yet.
    fn is_ours(&self, raw: *mut RdmaId) -> Option<bool> {
        // SAFETY: ids live until they are destroyed, under the lock that the caller holds.
        let verbs = unsafe { raw.as_ref() }?.verbs;
        name_of(self.libs, verbs).map(|name| name == self.device)
    }

    fn set_tos(&self, raw: *mut RdmaId, mut tos: u8) -> Result<(), Error> {
        if tos == 0 {
            return Ok(());
        }
        let at = (&raw mut tos).cast();
        let set = self.libs.rdma.set_option;
        // SAFETY: an id just made; the one byte is only read.
        check(unsafe { set(raw, OPTION_ID, OPTION_ID_TOS, at, 1) })
            .map_err(|errno| system("setting the type of service", errno))
    }

    fn send_reject(&self, raw: *mut RdmaId, data: &[u8]) -> Result<(), Error> {
        let len = u8::try_from(data.len()).unwrap_or(u8::MAX);
        let at = data.as_ptr().cast();
        // SAFETY: an id of ours or of an event; `len` bytes are only read.
        check(unsafe { (self.libs.rdma.reject)(raw, at, len) })
            .map_err(|errno| system("refusing a connection", errno))
    }

    /// Disconnects, or confirms the peer's disconnect.
    fn leave(&self, conn: &Id) {
        if let Some(qp) = &conn.qp {
            // It may be there already.
            let _ = qp.go(QpState::Err);
        }
        // SAFETY: an id of ours. A refusal means that the connection is over.
        unsafe { (self.libs.rdma.disconnect)(conn.raw) };
    }

    /// Destroys an id that was removed from the tables.
    fn end(&self, conn: &mut Id) {
        match conn.phase {
            Phase::Up | Phase::Accepted => self.leave(conn),
            Phase::Requested => {
                // It may be gone already, which is as good.
                let _ = self.send_reject(conn.raw, &[]);
            }
            _ => {}
        }
        conn.over();
        // SAFETY: an id of ours, nobody knows it any more and all its events are acknowledged.
        unsafe { (self.libs.rdma.destroy_id)(conn.raw) };
    }
}

impl Drop for Cm {
    fn drop(&mut self) {
        let mut ids = core::mem::take(&mut self.lock().ids);
        ids.values_mut().for_each(|conn| self.end(conn));
        // SAFETY: made by `new`; its ids are gone.
        unsafe { (self.libs.rdma.destroy_event_channel)(self.channel.as_ptr()) };
    }
}

impl State {
    fn add(&mut self, id: Id) -> CmId {
        loop {
            self.last = self.last.wrapping_add(1);
            let name = CmId(self.last);
            if !self.ids.contains_key(&name) {
                self.names.insert(id.raw, name);
                self.ids.insert(name, id);
                return name;
            }
        }
    }

    fn holds(&self, qpn: Qpn) -> bool {
        self.ids.values().any(|id| id.qp.as_ref().is_some_and(|qp| qp.qpn == qpn))
    }

    /// Checks that a connection can be made with this queue pair.
    fn usable(&self, qp: &Qp) -> Result<(), Error> {
        if self.holds(qp.qpn) {
            return Err(Error::Busy(Object::QueuePair));
        }
        match qp.state()? {
            QpState::Reset | QpState::Init => Ok(()),
            state => Err(Error::Invalid(InvalidReason::StateToConnect(state))),
        }
    }

    fn requested(&mut self, id: CmId) -> Result<&mut Id, Error> {
        match self.ids.get_mut(&id) {
            Some(conn) if conn.phase == Phase::Requested => Ok(conn),
            Some(_) => Err(Error::Invalid(InvalidReason::NotARequest)),
            None => Err(Error::NoSuch(Object::Connection)),
        }
    }
}

impl Id {
    fn new(raw: *mut RdmaId, phase: Phase) -> Self {
        Self { raw, phase, qp: None, param: ConnParam::default(), peer_answers: 0 }
    }

    /// Marks the connection as over: its queue pair goes to ERROR and is released.
    fn over(&mut self) {
        if self.phase != Phase::Listening {
            self.phase = Phase::Over;
        }
        if let Some(qp) = self.qp.take() {
            // One that never left RESET stays there.
            let _ = qp.go(QpState::Err);
        }
    }
}

/// Returns the connection of an event.
fn of(event: &CmEvent) -> CmId {
    match event {
        CmEvent::ConnectRequest { id, .. }
        | CmEvent::Established { id, .. }
        | CmEvent::Rejected { id, .. }
        | CmEvent::Unreachable { id }
        | CmEvent::Disconnected { id }
        | CmEvent::TimewaitExit { id } => *id,
        _ => CmId(0),
    }
}

/// Returns the parameters for librdmacm, which point to the private data.
/// Refuses a queue pair that the program leads.
fn led_by_device(param: &ConnParam) -> Result<(), Error> {
    if param.is_led { Err(Error::NotSupported(Feature::LedQueuePair)) } else { Ok(()) }
}

fn conn_param(param: &ConnParam, qpn: Qpn) -> RdmaConnParam {
    RdmaConnParam {
        private_data: param.private_data.as_ptr().cast(),
        private_data_len: u8::try_from(param.private_data.len()).unwrap_or(u8::MAX),
        responder_resources: param.responder_resources,
        initiator_depth: param.initiator_depth,
        flow_control: 0,
        retry_count: param.retry_count.min(7),
        rnr_retry_count: param.rnr_retry_count.min(7),
        srq: 0,
        qp_num: qpn.0,
    }
}

fn storage(addr: SocketAddr) -> libc::sockaddr_storage {
    // SAFETY: numbers, for which zero is a value.
    let mut out: libc::sockaddr_storage = unsafe { zeroed() };
    let at = &raw mut out;
    match addr {
        SocketAddr::V4(addr) => {
            // SAFETY: as above.
            let mut to: libc::sockaddr_in = unsafe { zeroed() };
            to.sin_family = libc::AF_INET as libc::sa_family_t;
            to.sin_port = addr.port().to_be();
            to.sin_addr.s_addr = u32::from_ne_bytes(addr.ip().octets());
            // SAFETY: the storage has room for every kind of address, and is aligned for it.
            unsafe { at.cast::<libc::sockaddr_in>().write(to) };
        }
        SocketAddr::V6(addr) => {
            // SAFETY: as above.
            let mut to: libc::sockaddr_in6 = unsafe { zeroed() };
            to.sin6_family = libc::AF_INET6 as libc::sa_family_t;
            to.sin6_port = addr.port().to_be();
            to.sin6_flowinfo = addr.flowinfo();
            to.sin6_addr.s6_addr = addr.ip().octets();
            to.sin6_scope_id = addr.scope_id();
            // SAFETY: as above.
            unsafe { at.cast::<libc::sockaddr_in6>().write(to) };
        }
    }
    out
}

fn socket_addr(from: &libc::sockaddr_storage) -> SocketAddr {
    let at = core::ptr::from_ref(from);
    if c_int::from(from.ss_family) == libc::AF_INET6 {
        // SAFETY: of that family, and the storage is aligned for it.
        let addr = unsafe { &*at.cast::<libc::sockaddr_in6>() };
        let ip = addr.sin6_addr.s6_addr.into();
        let port = u16::from_be(addr.sin6_port);
        return SocketAddrV6::new(ip, port, addr.sin6_flowinfo, addr.sin6_scope_id).into();
    }
    // SAFETY: as above; any other family is shown as what its bytes would mean.
    let addr = unsafe { &*at.cast::<libc::sockaddr_in>() };
    let ip = addr.sin_addr.s_addr.to_ne_bytes().into();
    SocketAddrV4::new(ip, u16::from_be(addr.sin_port)).into()
}

/// Returns the addresses of an id: local and peer's.
fn addresses(raw: *mut RdmaId) -> (SocketAddr, SocketAddr) {
    // SAFETY: ids live until they are destroyed, under the lock that the caller holds.
    match unsafe { raw.as_ref() } {
        Some(id) => (socket_addr(&id.src_addr), socket_addr(&id.dst_addr)),
        None => {
            let nowhere = SocketAddr::new(IpAddr::from([0; 4]), 0);
            (nowhere, nowhere)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_come_back_as_they_were_given() {
        for text in ["10.99.0.11:7174", "[fd99::b]:7174", "0.0.0.0:0", "[fe80::1%3]:9"] {
            let addr: SocketAddr = text.parse().unwrap();
            assert_eq!(socket_addr(&storage(addr)), addr);
        }
    }

    // tests [CMA-5], [CMA-13]
    #[test]
    fn private_data_have_their_limits() {
        let check = |len| RequestPart::ConnectData.check(len, CONNECT_DATA as u64);
        assert_eq!(check(56), Ok(()));
        assert!(matches!(check(57), Err(Error::Invalid(InvalidReason::TooLong { .. }))));
        let param = ConnParam { private_data: vec![1; 56], retry_count: 9, ..ConnParam::default() };
        let out = conn_param(&param, Qpn(17));
        assert_eq!((out.private_data_len, out.retry_count, out.qp_num), (56, 7, 17));
    }
}
