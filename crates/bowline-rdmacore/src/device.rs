//! The device: names of objects, the background thread, the trait.

use core::ffi::c_void;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use bowline_verbs::{
    Access, AsyncEvent, Buffer, CmEvent, CmId, Completion, ConnParam, CqId, Device, DeviceAttr,
    Error, Feature, InvalidReason, MrKeys, Mtu, MwBind, MwType, Object, PdId, QpAttr, QpCap,
    QpInit, QpState, QpType, Qpn, RecvWr, SendFlags, SendOp, SendWr,
};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};

use crate::cm::Cm;
use crate::context::{Context, Gid, Mr, Pd, names};
use crate::cq::Cq;
use crate::error::system;
use crate::ffi::{IbvAsyncEvent, IbvQp, WrBind};
use crate::load::{Libraries, Unavailable};
use crate::mw::{Mw, info};
use crate::qp::{Qp, attributes, present};
use crate::watch::Watch;

/// Most asynchronous events kept; then the oldest are dropped, but not that the device is gone.
const EVENTS: usize = 1024;
/// Numbers of inline bytes that a device is asked for, largest first.
const INLINE: [usize; 6] = [512, 256, 128, 64, 32, 16];

/// A device of this machine.
#[derive(Clone, Debug)]
pub struct Listed {
    /// Its name.
    pub name: String,
    /// Its addresses and limits, or why it cannot be used.
    pub attr: Result<DeviceAttr, Unavailable>,
}

/// Lists the RDMA devices of this machine.
///
/// # Errors
/// Every [`Unavailable`] but one of a single device.
pub fn list() -> Result<Vec<Listed>, Unavailable> {
    let libs = Libraries::open()?;
    let look = |name: String| {
        let attr = Context::open(libs, &name).and_then(|context| Ok(context.attr()?));
        Listed { name, attr }
    };
    Ok(names(libs)?.into_iter().map(look).collect())
}

/// An RDMA device used through rdma-core.
///
/// A completion queue of depth n holds n sends and n receives. A process must not `fork` and go on
/// using a device in the child.
#[derive(Debug)]
pub struct RdmaCoreDevice {
    inner: Arc<Inner>,
    attr: DeviceAttr,
    stop: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Inner {
    // In the order in which they may be dropped.
    cm: Cm,
    tables: RwLock<Tables>,
    async_events: Mutex<VecDeque<AsyncEvent>>,
    async_arrived: Condvar,
    context: Arc<Context>,
}

/// Objects by their names.
#[derive(Debug, Default)]
struct Tables {
    last: u32,
    qps: HashMap<Qpn, Arc<Qp>>,
    cqs: BTreeMap<CqId, Arc<Cq>>,
    /// By the upper 24 bits of their keys; dropped before the regions they are bound to.
    mws: HashMap<u32, Mw>,
    mrs: HashMap<u32, Mr>,
    pds: BTreeMap<PdId, Arc<Pd>>,
}

impl Tables {
    /// A number not given out before, as long as there are some.
    fn number(&mut self) -> u32 {
        loop {
            self.last = self.last.wrapping_add(1);
            let n = self.last;
            if !self.cqs.contains_key(&CqId(n)) && !self.pds.contains_key(&PdId(n)) {
                return n;
            }
        }
    }

    fn pd(&self, pd: PdId) -> Result<Arc<Pd>, Error> {
        self.pds.get(&pd).cloned().ok_or(Error::NoSuch(Object::ProtectionDomain))
    }

    fn cq(&self, cq: CqId) -> Result<Arc<Cq>, Error> {
        self.cqs.get(&cq).cloned().ok_or(Error::NoSuch(Object::CompletionQueue))
    }

    fn mw(&self, window: u32) -> Result<&Mw, Error> {
        self.mws.get(&(window >> 8)).ok_or(Error::NoSuch(Object::MemoryWindow))
    }

    /// What a send request that binds a window says to libibverbs; good as long as nothing is
    /// removed.
    fn binding(&self, key: u32, to: &MwBind) -> Result<WrBind, Error> {
        let window = self.mw(key)?;
        if window.kind() != MwType::Type2 {
            return Err(Error::Invalid(InvalidReason::WindowType(MwType::Type1)));
        }
        let region = self.mrs.get(&to.lkey).ok_or(Error::NoSuch(Object::MemoryRegion))?;
        Ok(WrBind { mw: window.raw(), rkey: key, info: info(to, region) })
    }

    fn qp(&self, qp: Qpn) -> Result<Arc<Qp>, Error> {
        self.qps.get(&qp).cloned().ok_or(Error::NoSuch(Object::QueuePair))
    }
}

impl RdmaCoreDevice {
    /// Opens a device by its name, such as `rxe0`.
    ///
    /// # Errors
    /// Every [`Unavailable`].
    pub fn open(name: &str) -> Result<Self, Unavailable> {
        let libs = Libraries::open()?;
        let context = Arc::new(Context::open(libs, name)?);
        let mut attr = context.attr()?;
        attr.max_inline = most_inline(&context, attr.mtu);
        // SAFETY: the descriptor is open as long as the context.
        let events = unsafe { BorrowedFd::borrow_raw(context.async_fd()) };
        let failed = |what: &'static str| {
            move |error: rustix::io::Errno| Unavailable::from(system(what, error.raw_os_error()))
        };
        let flags = fcntl_getfl(events).map_err(failed("asynchronous events"))?;
        fcntl_setfl(events, flags | OFlags::NONBLOCK).map_err(failed("asynchronous events"))?;
        let stop = eventfd(0, EventfdFlags::CLOEXEC).map_err(failed("an event descriptor"))?;
        let stop = Arc::new(stop);
        let inner = Arc::new(Inner {
            cm: Cm::new(libs, context.name(), attr.max_qp_rd_atom)?,
            tables: RwLock::default(),
            async_events: Mutex::default(),
            async_arrived: Condvar::new(),
            context,
        });
        let (for_thread, until) = (Arc::clone(&inner), Arc::clone(&stop));
        let thread = std::thread::Builder::new()
            .name("bowline-rdma".to_owned())
            .spawn(move || for_thread.run(&until))
            .map_err(|error| {
                system("starting a thread", error.raw_os_error().unwrap_or(libc::EAGAIN))
            })?;
        Ok(Self { inner, attr, stop, thread: Some(thread) })
    }

    fn read(&self) -> RwLockReadGuard<'_, Tables> {
        self.inner.read()
    }

    fn write(&self) -> RwLockWriteGuard<'_, Tables> {
        self.inner.tables.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn gids(&self) -> Vec<Gid> {
        self.inner.context.gids()
    }
}

impl Drop for RdmaCoreDevice {
    fn drop(&mut self) {
        // It counts to 1, which cannot fail.
        let _ = rustix::io::write(&*self.stop, &1_u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            // A panic of that thread has been reported on standard error.
            let _ = thread.join();
        }
    }
}

impl Inner {
    fn read(&self) -> RwLockReadGuard<'_, Tables> {
        self.tables.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the events of the connection manager and of the device until `stop`.
    fn run(&self, stop: &OwnedFd) {
        // SAFETY: the descriptor is open as long as the context.
        let events = unsafe { BorrowedFd::borrow_raw(self.context.async_fd()) };
        let (mut cm_watch, mut device_watch) = (Watch::default(), Watch::default());
        loop {
            // `poll` reports errors of every descriptor, asked for or not, so one that has failed
            // is left out.
            let unless_over = |watch: &Watch, fd| if watch.is_over() { stop.as_fd() } else { fd };
            let mut fds = [
                stop.as_fd(),
                unless_over(&cm_watch, self.cm.fd()),
                unless_over(&device_watch, events),
            ]
            .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
            // An interrupted sleep is one that ended early.
            let _ = poll(&mut fds, None);
            let [stopped, cm, events] = fds.map(|fd| fd.revents());
            if !stopped.is_empty() {
                return;
            }
            if cm_watch.is_ready(cm) {
                let (count, removed) = self.cm.run();
                if cm_watch.took(cm, count) | removed {
                    self.push(AsyncEvent::DeviceFatal);
                }
            }
            if device_watch.is_ready(events) && device_watch.took(events, self.take_async()) {
                self.push(AsyncEvent::DeviceFatal);
            }
        }
    }

    /// Takes the device's events; returns how many there were.
    fn take_async(&self) -> usize {
        let verbs = &self.context.libs.verbs;
        let mut count = 0;
        loop {
            let mut event = IbvAsyncEvent { element: core::ptr::null_mut(), event_type: 0 };
            // SAFETY: the context is open and does not block.
            if unsafe { (verbs.get_async_event)(self.context.raw(), &raw mut event) } != 0 {
                return count;
            }
            count += 1;
            let translated = self.translate(event.event_type, event.element);
            // SAFETY: the event just taken.
            unsafe { (verbs.ack_async_event)(&raw mut event) };
            if let Some(event) = translated {
                self.push(event);
            }
        }
    }

    /// What an event means, `enum ibv_event_type`. Its object exists until it is acknowledged.
    fn translate(&self, kind: u32, element: *mut c_void) -> Option<AsyncEvent> {
        match kind {
            0 => {
                let tables = self.read();
                let raw = element.cast();
                let mut cqs = tables.cqs.values();
                let cq = cqs.find(|cq| cq.sends() == raw || cq.receives() == raw)?;
                Some(AsyncEvent::CqError(cq.id))
            }
            1..=5 => {
                // SAFETY: these events are of queue pairs.
                let qp = unsafe { element.cast::<IbvQp>().as_ref() }?;
                let qpn = Qpn(qp.qp_num);
                Some(match kind {
                    4 => AsyncEvent::CommEstablished(qpn),
                    5 => AsyncEvent::SqDrained(qpn),
                    _ => AsyncEvent::QpFatal(qpn),
                })
            }
            8 => Some(AsyncEvent::DeviceFatal),
            _ => None,
        }
    }

    fn push(&self, event: AsyncEvent) {
        let mut events = self.async_events.lock().unwrap_or_else(PoisonError::into_inner);
        keep(&mut events, event);
        drop(events);
        self.async_arrived.notify_all();
    }
}

/// Adds an event. A device that fails may also report each of its queue pairs.
fn keep(events: &mut VecDeque<AsyncEvent>, event: AsyncEvent) {
    if event == AsyncEvent::DeviceFatal && events.contains(&event) {
        return;
    }
    if events.len() >= EVENTS
        && let Some(oldest) = events.iter().position(|event| *event != AsyncEvent::DeviceFatal)
    {
        events.remove(oldest);
    }
    events.push_back(event);
}

/// The inline bytes a queue pair of this device can have; only making one tells.
fn most_inline(context: &Arc<Context>, mtu: Mtu) -> usize {
    let attempt = || {
        let pd = Arc::new(Pd::new(context, PdId(0))?);
        let cq = Arc::new(Cq::new(context, CqId(0), 1)?);
        let cap = QpCap {
            max_send_wr: 1,
            max_recv_wr: 1,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline: 0,
        };
        let init = QpInit {
            pd: PdId(0),
            send_cq: CqId(0),
            recv_cq: CqId(0),
            srq: None,
            qp_type: QpType::Rc,
            cap,
            sq_sig_all: false,
        };
        let mut sizes = INLINE.into_iter();
        let most = sizes.find(|&max_inline| {
            let init = QpInit { cap: QpCap { max_inline, ..cap }, ..init };
            Qp::new(&init, Arc::clone(&pd), Arc::clone(&cq), Arc::clone(&cq), mtu).is_ok()
        });
        Ok::<usize, Error>(most.unwrap_or(0))
    };
    attempt().unwrap_or(0)
}

impl Device for RdmaCoreDevice {
    fn attr(&self) -> DeviceAttr {
        self.attr.clone()
    }

    fn alloc_pd(&self) -> Result<PdId, Error> {
        let mut tables = self.write();
        let id = PdId(tables.number());
        tables.pds.insert(id, Arc::new(Pd::new(&self.inner.context, id)?));
        Ok(id)
    }

    fn dealloc_pd(&self, pd: PdId) -> Result<(), Error> {
        let mut tables = self.write();
        tables.pd(pd)?;
        let used = tables.qps.values().any(|qp| qp.pd.id == pd)
            || tables.mrs.values().any(|mr| mr.pd.id == pd)
            || tables.mws.values().any(|mw| mw.pd.id == pd);
        if used {
            return Err(Error::Busy(Object::ProtectionDomain));
        }
        tables.pds.remove(&pd);
        Ok(())
    }

    fn reg_mr(
        &self,
        pd: PdId,
        buffer: &Arc<Buffer>,
        offset: usize,
        len: usize,
        iova: Option<u64>,
        access: Access,
    ) -> Result<MrKeys, Error> {
        if buffer.is_foreign() {
            return Err(Error::NotSupported(Feature::ForeignMemory));
        }
        // Pinning memory takes time: not under the lock.
        let id = pd;
        let pd = self.read().pd(id)?;
        let mr = Mr::new(&pd, buffer, offset, len, iova, access)?;
        let keys = mr.keys();
        let mut tables = self.write();
        // The queue pair may have been removed in the meantime.
        tables.pd(id)?;
        tables.mrs.insert(keys.lkey, mr);
        Ok(keys)
    }

    fn alloc_mr(&self, _: PdId) -> Result<MrKeys, Error> {
        // [VERBS-1]
        Err(Error::NotSupported(Feature::FastRegistration))
    }

    fn dereg_mr(&self, lkey: u32) -> Result<(), Error> {
        let mr = self.write().mrs.remove(&lkey);
        let mut mr = mr.ok_or(Error::NoSuch(Object::MemoryRegion))?;
        // Not under the lock: unpinning takes time.
        let done = mr.deregister();
        if done.is_err() {
            self.write().mrs.insert(lkey, mr);
        }
        done
    }

    fn alloc_mw(&self, pd: PdId, kind: MwType) -> Result<u32, Error> {
        let mut tables = self.write();
        let window = Mw::new(&tables.pd(pd)?, kind)?;
        let key = window.key();
        tables.mws.insert(key >> 8, window);
        Ok(key)
    }

    fn bind_mw(
        &self,
        qp: Qpn,
        window: u32,
        id: u64,
        to: &MwBind,
        flags: SendFlags,
    ) -> Result<u32, Error> {
        let mut tables = self.write();
        let qp = tables.qp(qp)?;
        let none = Error::NoSuch(Object::MemoryWindow);
        let mut mw = tables.mws.remove(&(window >> 8)).ok_or(none)?;
        let region = tables.mrs.get(&to.lkey);
        let result = if mw.kind() != MwType::Type1 {
            Err(Error::Invalid(InvalidReason::WindowType(MwType::Type2)))
        } else if mw.pd.id != qp.pd.id {
            Err(Error::Invalid(InvalidReason::WindowPd))
        } else if let Some(region) = region {
            mw.bind(qp.raw(), id, info(to, region), flags)
        } else {
            Err(Error::NoSuch(Object::MemoryRegion))
        };
        // The device may give it quite another key.
        tables.mws.insert(mw.key() >> 8, mw);
        result
    }

    fn dealloc_mw(&self, window: u32) -> Result<(), Error> {
        let gone = self.write().mws.remove(&(window >> 8));
        gone.map(drop).ok_or(Error::NoSuch(Object::MemoryWindow))
    }

    fn create_cq(&self, depth: usize) -> Result<CqId, Error> {
        let id = CqId(self.write().number());
        let cq = Arc::new(Cq::new(&self.inner.context, id, depth)?);
        self.write().cqs.insert(id, cq);
        Ok(id)
    }

    fn destroy_cq(&self, cq: CqId) -> Result<(), Error> {
        let mut tables = self.write();
        tables.cq(cq)?;
        if tables.qps.values().any(|qp| qp.send_cq.id == cq || qp.recv_cq.id == cq) {
            return Err(Error::Busy(Object::CompletionQueue));
        }
        let gone = tables.cqs.remove(&cq);
        // An event of it may be looked up before it can be destroyed.
        drop(tables);
        drop(gone);
        Ok(())
    }

    fn poll_cq(&self, cq: CqId, out: &mut Vec<Completion>, max: usize) -> Result<usize, Error> {
        let cq = self.read().cq(cq)?;
        cq.poll(out, max)
    }

    fn wait_cq(&self, cq: CqId, solicited: bool, limit: Option<Duration>) -> Result<bool, Error> {
        let cq = self.read().cq(cq)?;
        // Only one that has another descriptor does not wait for the one that sleeps.
        Ok(cq.wait(solicited, None, limit)?.unwrap_or(false))
    }

    fn wait_cq_or(
        &self,
        cq: CqId,
        other: BorrowedFd<'_>,
        limit: Duration,
    ) -> Result<Option<bool>, Error> {
        let cq = self.read().cq(cq)?;
        cq.wait(false, Some(other), Some(limit))
    }

    fn create_qp(&self, init: &QpInit) -> Result<Qpn, Error> {
        if init.srq.is_some() {
            return Err(Error::NotSupported(Feature::SharedReceiveQueue));
        }
        let tables = self.read();
        let pd = tables.pd(init.pd)?;
        let (send_cq, recv_cq) = (tables.cq(init.send_cq)?, tables.cq(init.recv_cq)?);
        // The device takes its time: not under the lock.
        drop(tables);
        let mut init = *init;
        // What programs ask for without a need must not keep them from a device with less.
        init.cap.max_inline = init.cap.max_inline.min(self.attr.max_inline);
        let qp = Qp::new(&init, pd, send_cq, recv_cq, self.attr.mtu)?;
        let qpn = qp.qpn;
        let mut tables = self.write();
        // Objects that it uses may have been removed in the meantime.
        let there = tables.pd(init.pd).and(tables.cq(init.send_cq)).and(tables.cq(init.recv_cq));
        if let Err(error) = there {
            // The queue pair is removed when the lock is free.
            drop(tables);
            return Err(error);
        }
        tables.qps.insert(qpn, Arc::new(qp));
        Ok(qpn)
    }

    fn modify_qp(&self, qp: Qpn, attr: &QpAttr) -> Result<(), Error> {
        let qp = self.read().qp(qp)?;
        let (attr, what) = attributes(attr, &self.gids())?;
        qp.modify(&attr, what)
    }

    fn query_qp(&self, qp: Qpn) -> Result<(QpState, QpAttr), Error> {
        let qp = self.read().qp(qp)?;
        Ok(present(&qp.query()?, &self.gids(), qp.kind))
    }

    fn destroy_qp(&self, qp: Qpn) -> Result<(), Error> {
        if self.inner.cm.holds(qp) {
            return Err(Error::Busy(Object::QueuePair));
        }
        let gone = self.write().qps.remove(&qp);
        gone.map(drop).ok_or(Error::NoSuch(Object::QueuePair))
    }

    fn post_send(&self, qp: Qpn, wrs: &[SendWr<'_>]) -> Result<(), (usize, Error)> {
        if wrs.iter().any(|wr| matches!(wr.op, SendOp::BindMw { .. })) {
            // Windows and regions stay, and are this call's alone, as long as the tables are held.
            let tables = self.write();
            let qp = tables.qp(qp).map_err(|error| (0, error))?;
            return qp.send(wrs, &|key, to| tables.binding(key, to));
        }
        let qp = self.read().qp(qp).map_err(|error| (0, error))?;
        qp.send(wrs, &|_, _| Err(Error::NoSuch(Object::MemoryWindow)))
    }

    fn post_recv(&self, qp: Qpn, wrs: &[RecvWr<'_>]) -> Result<(), (usize, Error)> {
        let qp = self.read().qp(qp).map_err(|error| (0, error))?;
        qp.receive(wrs)
    }

    fn async_event(&self, limit: Duration) -> Result<AsyncEvent, Error> {
        let deadline = Instant::now().checked_add(limit);
        let inner = &self.inner;
        let mut events = inner.async_events.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(event) = events.pop_front() {
                return Ok(event);
            }
            let left = deadline.map_or(limit, |at| at.saturating_duration_since(Instant::now()));
            if left.is_zero() {
                return Err(Error::TimedOut);
            }
            let woken = inner.async_arrived.wait_timeout(events, left);
            events = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn listen(&self, at: SocketAddr) -> Result<CmId, Error> {
        self.inner.cm.listen(at)
    }

    fn connect(
        &self,
        local: Option<SocketAddr>,
        remote: SocketAddr,
        param: &ConnParam,
    ) -> Result<CmId, Error> {
        let qp = self.read().qp(param.qpn)?;
        self.inner.cm.connect(qp, local, remote, param)
    }

    fn accept(&self, id: CmId, param: &ConnParam) -> Result<(), Error> {
        let qp = self.read().qp(param.qpn)?;
        self.inner.cm.accept(id, qp, param)
    }

    fn reject(&self, id: CmId, private_data: &[u8]) -> Result<(), Error> {
        self.inner.cm.reject(id, private_data)
    }

    fn disconnect(&self, id: CmId) -> Result<(), Error> {
        self.inner.cm.disconnect(id)
    }

    fn destroy_id(&self, id: CmId) -> Result<(), Error> {
        self.inner.cm.destroy(id)
    }

    fn cm_event(&self, limit: Duration) -> Result<CmEvent, Error> {
        self.inner.cm.event(limit)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_a_device_is_not_lost_among_those_of_its_queue_pairs() {
        let mut events = VecDeque::new();
        keep(&mut events, AsyncEvent::DeviceFatal);
        (0..2 * EVENTS as u32).for_each(|n| keep(&mut events, AsyncEvent::QpFatal(Qpn(n))));
        keep(&mut events, AsyncEvent::DeviceFatal);
        assert_eq!(events.len(), EVENTS);
        assert_eq!(events.front(), Some(&AsyncEvent::DeviceFatal));
        assert_eq!(events.back(), Some(&AsyncEvent::QpFatal(Qpn(2 * EVENTS as u32 - 1))));
    }
}
