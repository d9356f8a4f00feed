//! One device for several users in a process.
//!
//! Events of connections come from a device to whoever asks first. Here each goes to the user that
//! has made the listener or the connection:
//!
//! ```text
//!   user 0: cm_event --.                     .-- queue of user 0
//!                       > one of them reads -+
//!   user 1: cm_event --'   the device        '-- queue of user 1
//! ```

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bowline_base::count::Described;

use crate::{
    Access, AsyncEvent, Buffer, CmEvent, CmId, Completion, ConnParam, CqId, Device, DeviceAttr,
    Error, MrKeys, MwBind, MwType, PathStats, PdId, QpAttr, QpInit, QpState, Qpn, RecvWr,
    SendFlags, SendWr, SrqAttr, SrqChange, SrqId, SrqInit,
};

/// Asynchronous events kept for a user that does not ask for them.
const ASYNC_EVENTS_MAX: usize = 64;

/// A device as one of its users has it. Objects other than listeners and connections belong to
/// nobody: users do not touch those of others. Each user gets all asynchronous events.
#[derive(Clone)]
pub struct SharedDevice {
    desk: Arc<Desk>,
    user: usize,
}

struct Desk {
    device: Arc<dyn Device>,
    /// Held while a listener or a connection comes or goes, so that its owner is known before its
    /// events are given out. Taken before `state`.
    changing: Mutex<()>,
    state: Mutex<State>,
    /// An event was given out, or nobody reads the device.
    given: Condvar,
}

#[derive(Default)]
struct State {
    owners: HashMap<CmId, usize>,
    users: Vec<Events>,
    /// A user reads events of connections from the device.
    is_read: bool,
}

#[derive(Default)]
struct Events {
    cm: VecDeque<CmEvent>,
    other: VecDeque<AsyncEvent>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl SharedDevice {
    /// Shares a device among `N` users. Nobody else may ask it for events.
    pub fn split<const N: usize>(device: Arc<dyn Device>) -> [Self; N] {
        let users = (0..N).map(|_| Events::default()).collect();
        let desk = Arc::new(Desk {
            device,
            changing: Mutex::default(),
            state: Mutex::new(State { users, ..State::default() }),
            given: Condvar::new(),
        });
        core::array::from_fn(|user| Self { desk: Arc::clone(&desk), user })
    }

    fn device(&self) -> &dyn Device {
        &*self.desk.device
    }

    /// Notes that a new listener or connection is this user's.
    fn owned(&self, make: impl FnOnce(&dyn Device) -> Result<CmId, Error>) -> Result<CmId, Error> {
        let _changing = lock(&self.desk.changing);
        let id = make(self.device())?;
        lock(&self.desk.state).owners.insert(id, self.user);
        Ok(id)
    }
}

impl Desk {
    /// Gives an event to the user it is for.
    fn give(&self, event: CmEvent) {
        let changing = lock(&self.changing);
        let mut state = lock(&self.state);
        let owner = match &event {
            CmEvent::ConnectRequest { request, .. } => state.owners.get(&request.listener),
            event => state.owners.get(&event.id()),
        };
        let Some(owner) = owner.copied() else {
            drop((state, changing));
            // The listener of a request was just closed. Other events come too late as well.
            if let CmEvent::ConnectRequest { id, .. } = event {
                let _ = self.device.destroy_id(id);
            }
            return;
        };
        state.owners.insert(event.id(), owner);
        state.users[owner].cm.push_back(event);
    }
}

impl fmt::Debug for SharedDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedDevice").field("user", &self.user).finish_non_exhaustive()
    }
}

/// Passes calls on to the device.
macro_rules! passed_on {
    ($(fn $name:ident(&self $(, $arg:ident: $type:ty)*) $(-> $result:ty)?;)*) => {
        $(fn $name(&self $(, $arg: $type)*) $(-> $result)? { self.device().$name($($arg),*) })*
    };
}

impl Device for SharedDevice {
    passed_on! {
        fn attr(&self) -> DeviceAttr;
        fn link_of(&self, addr: IpAddr) -> u32;
        fn fault(&self) -> Option<Error>;
        fn fault_to(&self, peer: IpAddr) -> Option<Error>;
        fn counts(&self) -> Vec<Described>;
        fn paths(&self) -> Vec<PathStats>;
        fn alloc_pd(&self) -> Result<PdId, Error>;
        fn dealloc_pd(&self, pd: PdId) -> Result<(), Error>;
        fn alloc_inner_pd(&self, outer: PdId) -> Result<PdId, Error>;
        fn reg_mr(
            &self,
            pd: PdId,
            buffer: &Arc<Buffer>,
            offset: usize,
            len: usize,
            iova: Option<u64>,
            access: Access
        ) -> Result<MrKeys, Error>;
        fn alloc_mr(&self, pd: PdId) -> Result<MrKeys, Error>;
        fn dereg_mr(&self, lkey: u32) -> Result<(), Error>;
        fn withdraw_keys(&self, rkeys: &[u32]) -> Result<(), Error>;
        fn renew_keys(&self, keys: &[(u32, u32)]) -> Result<(), Error>;
        fn alloc_mw(&self, pd: PdId, kind: MwType) -> Result<u32, Error>;
        fn bind_mw(
            &self,
            qp: Qpn,
            window: u32,
            id: u64,
            to: &MwBind,
            flags: SendFlags
        ) -> Result<u32, Error>;
        fn dealloc_mw(&self, window: u32) -> Result<(), Error>;
        fn create_cq(&self, depth: usize) -> Result<CqId, Error>;
        fn destroy_cq(&self, cq: CqId) -> Result<(), Error>;
        fn poll_cq(&self, cq: CqId, out: &mut Vec<Completion>, max: usize) -> Result<usize, Error>;
        fn wait_cq(
            &self,
            cq: CqId,
            solicited: bool,
            limit: Option<Duration>
        ) -> Result<bool, Error>;
        fn wait_cq_or(
            &self,
            cq: CqId,
            other: BorrowedFd<'_>,
            limit: Duration
        ) -> Result<Option<bool>, Error>;
        fn create_qp(&self, init: &QpInit) -> Result<Qpn, Error>;
        fn modify_qp(&self, qp: Qpn, attr: &QpAttr) -> Result<(), Error>;
        fn query_qp(&self, qp: Qpn) -> Result<(QpState, QpAttr), Error>;
        fn destroy_qp(&self, qp: Qpn) -> Result<(), Error>;
        fn post_send(&self, qp: Qpn, wrs: &[SendWr<'_>]) -> Result<(), (usize, Error)>;
        fn post_recv(&self, qp: Qpn, wrs: &[RecvWr<'_>]) -> Result<(), (usize, Error)>;
        fn create_srq(&self, init: &SrqInit) -> Result<SrqId, Error>;
        fn modify_srq(&self, srq: SrqId, change: &SrqChange) -> Result<(), Error>;
        fn query_srq(&self, srq: SrqId) -> Result<SrqAttr, Error>;
        fn destroy_srq(&self, srq: SrqId) -> Result<(), Error>;
        fn post_srq_recv(&self, srq: SrqId, wrs: &[RecvWr<'_>]) -> Result<(), (usize, Error)>;
        fn accept(&self, id: CmId, param: &ConnParam) -> Result<(), Error>;
        fn reject(&self, id: CmId, private_data: &[u8]) -> Result<(), Error>;
        fn connection_attr(&self, id: CmId, to: QpState) -> Result<QpAttr, Error>;
        fn establish(&self, id: CmId) -> Result<(), Error>;
        fn note_established(&self, id: CmId) -> Result<bool, Error>;
        fn disconnect(&self, id: CmId) -> Result<(), Error>;
    }

    fn async_event(&self, limit: Duration) -> Result<AsyncEvent, Error> {
        if let Some(event) = lock(&self.desk.state).users[self.user].other.pop_front() {
            return Ok(event);
        }
        let event = self.device().async_event(limit)?;
        let mut state = lock(&self.desk.state);
        for (_, other) in state.users.iter_mut().enumerate().filter(|(at, _)| *at != self.user) {
            if other.other.len() == ASYNC_EVENTS_MAX {
                other.other.pop_front();
            }
            other.other.push_back(event);
        }
        Ok(event)
    }

    fn listen(&self, at: SocketAddr) -> Result<CmId, Error> {
        self.owned(|device| device.listen(at))
    }

    fn connect(
        &self,
        local: Option<SocketAddr>,
        remote: SocketAddr,
        param: &ConnParam,
    ) -> Result<CmId, Error> {
        self.owned(|device| device.connect(local, remote, param))
    }

    fn destroy_id(&self, id: CmId) -> Result<(), Error> {
        let _changing = lock(&self.desk.changing);
        self.device().destroy_id(id)?;
        lock(&self.desk.state).owners.remove(&id);
        Ok(())
    }

    fn cm_event(&self, limit: Duration) -> Result<CmEvent, Error> {
        let begun = Instant::now();
        let mut state = lock(&self.desk.state);
        loop {
            if let Some(event) = state.users[self.user].cm.pop_front() {
                return Ok(event);
            }
            let left = limit.saturating_sub(begun.elapsed());
            if !state.is_read {
                state.is_read = true;
                drop(state);
                let read = self.device().cm_event(left).map(|event| self.desk.give(event));
                state = lock(&self.desk.state);
                state.is_read = false;
                self.desk.given.notify_all();
                read?;
            } else if left.is_zero() {
                return Err(Error::TimedOut);
            } else {
                let waited = self.desk.given.wait_timeout(state, left);
                state = waited.unwrap_or_else(PoisonError::into_inner).0;
            }
        }
    }
}
