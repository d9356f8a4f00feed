//! Waiting for what happens to sockets: a thread has a descriptor, which everything that it waits
//! for makes readable.

use core::cell::RefCell;
use core::ffi::c_int;
use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::process;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bowline_verbs::{CmEvent, CmId as Number, CqId};
use rustix::event::{EventfdFlags, eventfd};

use crate::events::lock;

/// A thread's own descriptor.
#[derive(Debug)]
pub(super) struct Waker(OwnedFd);

impl Waker {
    fn new() -> Option<Arc<Self>> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        Some(Arc::new(Self(eventfd(0, flags).ok()?)))
    }

    /// That of the calling thread; `None`: there is no descriptor left. A child of `fork` gets one
    /// of its own: what it reads from its parent's, the parent would miss.
    pub(super) fn own() -> Option<Arc<Self>> {
        thread_local! {
            /// With the process that it is of.
            static OWN: RefCell<Option<(u32, Arc<Waker>)>> = const { RefCell::new(None) };
        }
        let own = OWN.try_with(|own| {
            let mut own = own.borrow_mut();
            let id = process::id();
            match &*own {
                Some((of, waker)) if *of == id => Some(Arc::clone(waker)),
                _ => {
                    let waker = Self::new()?;
                    *own = Some((id, Arc::clone(&waker)));
                    Some(waker)
                }
            }
        });
        own.unwrap_or_else(|_| Self::new())
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    pub(super) fn raw(&self) -> c_int {
        self.0.as_raw_fd()
    }

    fn wake(&self) {
        // A number that is at its end can be read already.
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }

    /// Forgets what has woken the thread.
    pub(super) fn clear(&self) {
        let mut count = [0; 8];
        // Nothing to read: nothing has.
        let _ = rustix::io::read(&self.0, &mut count[..]);
    }

    /// Waits until the thread is woken; `None`: without end. Returns whether it was.
    ///
    /// # Errors
    /// `EINTR`.
    pub(super) fn wait(&self, limit: Option<Duration>) -> Result<bool, c_int> {
        let mut fds = [libc::pollfd { fd: self.raw(), events: libc::POLLIN, revents: 0 }];
        poll(&mut fds, limit).map(|ready| ready > 0)
    }
}

/// The system's `poll`; `None`: without end.
pub(super) fn poll(fds: &mut [libc::pollfd], limit: Option<Duration>) -> Result<c_int, c_int> {
    let limit = limit.map(|limit| libc::timespec {
        tv_sec: limit.as_secs().try_into().unwrap_or(libc::time_t::MAX),
        tv_nsec: limit.subsec_nanos().into(),
    });
    let limit = limit.as_ref().map_or(core::ptr::null(), core::ptr::from_ref);
    let count = fds.len() as libc::nfds_t;
    // SAFETY: as many entries as are counted, and a time or null.
    let ready = unsafe { libc::ppoll(fds.as_mut_ptr(), count, limit, core::ptr::null()) };
    if ready >= 0 {
        return Ok(ready);
    }
    Err(std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EINVAL))
}

/// What happens to a socket, and who waits for it. The device adds to it under its own lock, so
/// nothing here calls the device.
#[derive(Debug, Default)]
pub(crate) struct Signal {
    wakers: Mutex<Vec<Arc<Waker>>>,
    /// Events of connections that nobody has looked at.
    events: Mutex<VecDeque<CmEvent>>,
    /// The device is gone.
    is_removed: AtomicBool,
}

impl Signal {
    /// Wakes all that wait.
    pub(crate) fn wake(&self) {
        lock(&self.wakers).iter().for_each(|waker| waker.wake());
    }

    /// Wakes all but one of those that wait.
    pub(super) fn wake_others(&self, own: Option<&Arc<Waker>>) {
        let wakers = lock(&self.wakers);
        let is_other = |waker: &&Arc<Waker>| own.is_none_or(|own| !Arc::ptr_eq(own, waker));
        wakers.iter().filter(is_other).for_each(|waker| waker.wake());
    }

    fn push(&self, event: CmEvent) {
        lock(&self.events).push_back(event);
        self.wake();
    }

    pub(super) fn next_event(&self) -> Option<CmEvent> {
        lock(&self.events).pop_front()
    }

    /// Takes back a request that nobody has looked at; returns whether there was one.
    fn take_back_request(&self, number: Number) -> bool {
        let is_request =
            |event: &CmEvent| matches!(event, CmEvent::ConnectRequest { id, .. } if *id == number);
        let mut events = lock(&self.events);
        let at = events.iter().position(is_request);
        at.and_then(|at| events.remove(at)).is_some()
    }

    fn remove(&self) {
        // Read by threads that are woken behind this.
        self.is_removed.store(true, Ordering::Release);
        self.wake();
    }

    pub(super) fn is_removed(&self) -> bool {
        // Pairs with the store above: whoever was woken by it sees it.
        self.is_removed.load(Ordering::Acquire)
    }

    pub(super) fn add(&self, waker: &Arc<Waker>) {
        lock(&self.wakers).push(Arc::clone(waker));
    }

    /// Takes back one [`add`](Self::add).
    pub(super) fn remove_waker(&self, waker: &Arc<Waker>) {
        let mut wakers = lock(&self.wakers);
        if let Some(at) = wakers.iter().position(|other| Arc::ptr_eq(other, waker)) {
            wakers.swap_remove(at);
        }
    }
}

/// A thread that waits for a socket, until this is dropped.
pub(super) struct Waiting<'a>(pub(super) &'a Signal, pub(super) &'a Arc<Waker>);

impl<'a> Waiting<'a> {
    pub(super) fn new(signal: &'a Signal, waker: &'a Arc<Waker>) -> Self {
        signal.add(waker);
        Self(signal, waker)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.remove_waker(self.1);
    }
}

/// The sockets of the process, by what the device calls their parts.
#[derive(Debug, Default)]
pub(crate) struct Signals {
    queues: HashMap<u32, Arc<Signal>>,
    numbers: HashMap<u32, Arc<Signal>>,
}

impl Signals {
    pub(super) fn add_queue(&mut self, cq: CqId, signal: &Arc<Signal>) {
        self.queues.insert(cq.0, Arc::clone(signal));
    }

    pub(super) fn remove_queue(&mut self, cq: CqId) {
        self.queues.remove(&cq.0);
    }

    /// Has events of a connection, lookup or listener come to a socket, with those that came
    /// before it was known.
    pub(super) fn add_number(
        &mut self,
        number: Number,
        signal: &Arc<Signal>,
        early: Option<Vec<CmEvent>>,
    ) {
        self.numbers.insert(number.0, Arc::clone(signal));
        early.into_iter().flatten().for_each(|event| {
            // Nobody else has seen it.
            let _ = self.report(event);
        });
    }

    pub(super) fn remove_number(&mut self, number: Number) {
        self.numbers.remove(&number.0);
    }

    /// The same for a listener, with the requests that it has not accepted.
    pub(super) fn remove_listener(&mut self, number: Number) {
        if let Some(signal) = self.numbers.remove(&number.0) {
            self.numbers.retain(|_, other| !Arc::ptr_eq(other, &signal));
        }
    }

    /// Wakes the socket of a completion queue, if it is one of a socket.
    pub(crate) fn report_completion(&self, cq: CqId) {
        if let Some(signal) = self.queues.get(&cq.0) {
            signal.wake();
        }
    }

    /// Gives a socket its event, or gives it back: it is not of a socket. A request that ends
    /// before its socket has looked at it leaves nothing, so that no more of them wait than the
    /// device keeps.
    pub(crate) fn report(&mut self, event: CmEvent) -> Option<CmEvent> {
        let number = event.id();
        let of = match &event {
            CmEvent::ConnectRequest { request, .. } => request.listener,
            _ => number,
        };
        let Some(signal) = self.numbers.get(&of.0).map(Arc::clone) else { return Some(event) };
        if of != number {
            // Until it is accepted, what happens to it is the listener's.
            self.numbers.insert(number.0, Arc::clone(&signal));
        } else if signal.take_back_request(number) {
            self.numbers.remove(&number.0);
            return None;
        }
        signal.push(event);
        None
    }

    pub(crate) fn report_removal(&self) {
        self.queues.values().chain(self.numbers.values()).for_each(|signal| signal.remove());
    }
}

#[cfg(test)]
mod tests {
    use bowline_verbs::ConnRequest;

    use super::*;

    /// The child takes what has woken it, and what has woken the parent stays.
    #[test]
    fn a_child_does_not_take_its_parents_wake_ups() {
        let own = Waker::own().unwrap();
        own.wake();
        // SAFETY: the child makes a descriptor, reads from it and ends.
        let child = unsafe { libc::fork() };
        assert!(child >= 0);
        if child == 0 {
            if let Some(waker) = Waker::own() {
                waker.clear();
            }
            // SAFETY: ends the child without what is registered for the parent's end.
            unsafe { libc::_exit(0) };
        }
        // SAFETY: the status is not asked for.
        assert_eq!(unsafe { libc::waitpid(child, core::ptr::null_mut(), 0) }, child);
        assert_eq!(own.wait(Some(Duration::ZERO)), Ok(true));
        own.clear();
    }

    /// A request of a listener.
    fn request(listener: Number, id: Number) -> CmEvent {
        let request = ConnRequest {
            listener,
            local: ([10, 0, 0, 1], 1).into(),
            remote: ([10, 0, 0, 2], 2).into(),
            private_data: Vec::new(),
            responder_resources: 0,
            initiator_depth: 0,
            remote_qpn: bowline_verbs::Qpn(3),
        };
        CmEvent::ConnectRequest { id, request }
    }

    /// A peer sends requests to a listener whose program makes no call. The device keeps few of
    /// them, and reports the end of each of the others: what is kept here is no more.
    #[test]
    fn requests_that_end_before_they_are_looked_at_take_no_memory() {
        const PENDING: u32 = 128;
        let (listener, other) = (Arc::<Signal>::default(), Arc::<Signal>::default());
        let mut signals = Signals::default();
        let at = Number(1);
        signals.add_number(at, &listener, None);
        signals.add_number(Number(2), &other, None);
        for number in 10..10_000 {
            assert_eq!(signals.report(request(at, Number(number))), None);
            if let Some(oldest) = number.checked_sub(PENDING).filter(|oldest| *oldest >= 10) {
                let gone = CmEvent::Unreachable { id: Number(oldest) };
                assert_eq!(signals.report(gone), None);
            }
            assert!(lock(&listener.events).len() <= PENDING as usize);
            assert!(signals.numbers.len() <= PENDING as usize + 2);
        }
        assert_eq!(listener.next_event(), Some(request(at, Number(10_000 - PENDING))));
        // Nor does a listener that has ended leave anything.
        signals.remove_listener(at);
        assert_eq!(signals.numbers.keys().collect::<Vec<_>>(), [&2]);
    }

    /// A request is its listener's until it is accepted; then what happens to it is the new
    /// socket's, until that has ended.
    #[test]
    fn events_come_to_the_socket_that_a_connection_belongs_to() {
        let (listener, accepted) = (Arc::<Signal>::default(), Arc::<Signal>::default());
        let mut signals = Signals::default();
        let (at, id) = (Number(1), Number(2));
        let asks = request(at, id);
        let early = signals.report(asks.clone());
        assert_eq!(early, Some(asks.clone()), "nobody listens");
        signals.add_number(at, &listener, early.map(|event| vec![event]));
        assert_eq!(listener.next_event(), Some(asks));
        assert_eq!(signals.report(CmEvent::Disconnected { id }), None);
        assert_eq!(listener.next_event(), Some(CmEvent::Disconnected { id }));
        signals.add_number(id, &accepted, None);
        let waker = Waker::own().unwrap();
        let waiting = Waiting::new(&accepted, &waker);
        assert_eq!(waker.wait(Some(Duration::ZERO)), Ok(false));
        assert_eq!(signals.report(CmEvent::Disconnected { id }), None);
        assert_eq!((listener.next_event(), accepted.next_event().is_some()), (None, true));
        assert_eq!(waker.wait(None), Ok(true));
        drop(waiting);
        waker.clear();
        signals.report_removal();
        assert!(accepted.is_removed() && waker.wait(Some(Duration::ZERO)) == Ok(false));
        signals.remove_number(id);
        assert!(signals.report(CmEvent::Disconnected { id }).is_some());
    }
}
