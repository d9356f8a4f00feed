//! A node under the simulator: the real [`Core`] over a real [`Node`] of RDS.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, SystemTime};

use bowline_base::{Errno, Instant};
use bowline_host::core::{
    Arrival, Bell, Caller, Credentials, Descriptor, HeapMemory, Opened, Outside, Owner,
    ProcessMemory, Rds, SharedMemory, Shown,
};
use bowline_host_wire::{Area, ChannelId, FILL_TOKEN_LEN, SocketHandle};
use bowline_rds::{
    Error as CoreError, Interest, Node, Output, Readiness, Received, RecvOpts, SendMsg, Sent,
    SocketId,
};
use bowline_rds_driver::Error;

use super::kernel::{self, End, Events, Fd, Kind, Token};
use super::push::{LOCK, half, set_half};
use super::sabotage::Sabotage;
use super::shared::Shared;

/// An owner of locks that is none.
const NOBODY: u32 = 0x7777_7777;

/// What wakes a node that sleeps.
#[derive(Debug, Default)]
pub(super) struct SimBell {
    rung: AtomicBool,
    /// It makes no sound.
    pub(super) is_dumb: AtomicBool,
}

impl SimBell {
    pub(super) fn is_rung(&self) -> bool {
        self.rung.load(Ordering::Relaxed)
    }
}

/// The bell as the core has it.
#[derive(Clone, Debug, Default)]
pub(super) struct BellOf(pub(super) Arc<SimBell>);

impl Bell for BellOf {
    fn ring(&self) {
        if !self.0.is_dumb.load(Ordering::Relaxed) {
            self.0.rung.store(true, Ordering::Relaxed);
        }
    }

    fn silence(&self) {
        self.0.rung.store(false, Ordering::Relaxed);
    }
}

/// Who waits for a socket, and for what.
type Waiters = HashMap<SocketId, Vec<(Interest, Waker)>>;

/// A message that is held back: its socket, destination and bytes.
type Held = (SocketId, Option<SocketAddr>, Vec<u8>);

/// The RDS node, and who waits for its sockets.
pub(super) struct RdsNode {
    pub(super) node: RefCell<Node>,
    waiters: RefCell<Waiters>,
    /// What the driver is to do: everything but wake-ups.
    pub(super) outputs: RefCell<Vec<Output>>,
    pub(super) shared: Rc<Shared>,
    /// A message that is sent later than the next.
    held: RefCell<Option<Held>>,
    sends: Cell<u64>,
}

fn is_transient(error: CoreError) -> bool {
    matches!(
        error,
        CoreError::QueueFull
            | CoreError::Congested
            | CoreError::HandshakePending
            | CoreError::Empty
    )
}

fn overlap(a: Interest, b: Interest) -> bool {
    [Interest::READ, Interest::WRITE].into_iter().any(|i| a.contains(i) && b.contains(i))
}

impl RdsNode {
    pub(super) fn new(node: Node, shared: Rc<Shared>) -> Self {
        Self {
            node: RefCell::new(node),
            waiters: RefCell::default(),
            outputs: RefCell::default(),
            shared,
            held: RefCell::new(None),
            sends: Cell::new(0),
        }
    }

    fn now(&self) -> Instant {
        Instant::from_nanos(self.shared.now.get())
    }

    /// Calls a function with the node, and wakes those for whom something has happened.
    pub(super) fn call<R>(&self, f: impl FnOnce(&mut Node, Instant) -> R) -> R {
        let result = f(&mut self.node.borrow_mut(), self.now());
        self.carry_out();
        result
    }

    fn carry_out(&self) {
        loop {
            let output = self.node.borrow_mut().poll_output();
            match output {
                None => return,
                Some(Output::Wake { socket, ready }) => self.wake(socket, ready),
                Some(Output::Event(_)) => {}
                Some(other) => self.outputs.borrow_mut().push(other),
            }
        }
    }

    fn wake(&self, socket: SocketId, ready: Interest) {
        let mut rest: Option<Interest> = None;
        let mut woken = Vec::new();
        if let Some(waiters) = self.waiters.borrow_mut().get_mut(&socket) {
            waiters.retain(|(interest, waker)| {
                let hit = overlap(*interest, ready);
                if hit {
                    woken.push(waker.clone());
                } else {
                    rest = Some(rest.map_or(*interest, |rest| rest | *interest));
                }
                !hit
            });
        }
        if let Some(rest) = rest {
            let _ = self.node.borrow_mut().register(socket, rest);
        }
        woken.into_iter().for_each(Waker::wake);
    }

    /// Makes one attempt for a task, which is woken when another may succeed.
    fn poll<T>(
        &self,
        id: SocketId,
        interest: Interest,
        cx: &Context<'_>,
        once: impl FnOnce(&mut Node, Instant) -> Result<T, CoreError>,
    ) -> Poll<Result<T, Error>> {
        self.shared.interleave();
        let result = once(&mut self.node.borrow_mut(), self.now());
        let result = match result {
            Err(error) if is_transient(error) => None,
            done => Some(done),
        };
        if result.is_none() {
            if let Err(error) = self.node.borrow_mut().register(id, interest) {
                self.carry_out();
                return Poll::Ready(Err(error.into()));
            }
            let mut waiters = self.waiters.borrow_mut();
            let waiters = waiters.entry(id).or_default();
            match waiters.iter_mut().find(|(_, waker)| waker.will_wake(cx.waker())) {
                Some((known, _)) => *known = *known | interest,
                None => waiters.push((interest, cx.waker().clone())),
            }
        }
        self.carry_out();
        self.shared.interleave();
        match result {
            Some(done) => Poll::Ready(done.map_err(Error::from)),
            None => Poll::Pending,
        }
    }

    /// A message was sent, and is to be written.
    fn sent(&self, sent: Result<Sent, CoreError>) -> Result<usize, CoreError> {
        let sent = sent?;
        if let Some(link) = sent.link {
            self.outputs.borrow_mut().push(Output::Transmit { link });
        }
        Ok(sent.len)
    }

    /// Sends, with the mistakes of the run.
    fn attempt(
        &self,
        node: &mut Node,
        now: Instant,
        id: SocketId,
        msg: &SendMsg<'_>,
    ) -> Result<usize, CoreError> {
        let wrong = |how| self.shared.sabotage == Some(how);
        let mut msg = *msg;
        if wrong(Sabotage::Promise) {
            msg.promised = true;
        }
        let mut bytes: Vec<u8> =
            msg.payload.iter().flat_map(|piece| piece.iter()).copied().collect();
        self.sends.set(self.sends.get() + 1);
        let is_turn = self.sends.get().is_multiple_of(7);
        if wrong(Sabotage::FlipByte) && is_turn {
            let middle = bytes.len() / 2;
            if let Some(byte) = bytes.get_mut(middle) {
                *byte ^= 1;
            }
            let pieces = [std::io::IoSlice::new(&bytes)];
            msg.payload = &pieces;
            return self.sent(node.send(now, id, &msg));
        }
        if wrong(Sabotage::DropSend) && is_turn {
            return Ok(bytes.len());
        }
        if wrong(Sabotage::SwapSends) {
            if let Some((id, name, bytes)) = self.held.borrow_mut().take() {
                let done = self.sent(node.send(now, id, &msg));
                let pieces = [std::io::IoSlice::new(&bytes)];
                let late = SendMsg { name, payload: &pieces, promised: true, ..SendMsg::default() };
                let _ = self.sent(node.send(now, id, &late));
                return done;
            }
            if is_turn && node.send_room(id, msg.name).is_some_and(|room| room > bytes.len()) {
                let len = bytes.len();
                *self.held.borrow_mut() = Some((id, msg.name, bytes));
                return Ok(len);
            }
        }
        let done = self.sent(node.send(now, id, &msg));
        if wrong(Sabotage::SendTwice) && is_turn && done.is_ok() {
            let _ = self.sent(node.send(now, id, &msg));
        }
        done
    }
}

/// The node as the core has it.
#[derive(Clone)]
pub(super) struct SimRds(pub(super) Rc<RdsNode>);

impl Rds for SimRds {
    fn with_core<R>(&self, f: impl FnOnce(&mut Node, Instant) -> R) -> R {
        self.0.shared.interleave();
        self.0.call(f)
    }

    fn send(&self, id: SocketId, msg: &SendMsg<'_>) -> Result<usize, Error> {
        self.0.shared.interleave();
        let sent = self.0.call(|node, now| self.0.attempt(node, now, id, msg));
        self.0.shared.interleave();
        Ok(sent?)
    }

    fn poll_send(
        &self,
        id: SocketId,
        msg: &SendMsg<'_>,
        cx: &Context<'_>,
    ) -> Poll<Result<usize, Error>> {
        self.0.poll(id, Interest::WRITE, cx, |node, now| self.0.attempt(node, now, id, msg))
    }

    fn poll_recv(
        &self,
        id: SocketId,
        opts: RecvOpts,
        cx: &Context<'_>,
    ) -> Poll<Result<Received, Error>> {
        self.0.poll(id, Interest::READ, cx, |node, now| {
            if node.has_backlog() {
                node.process(now, None, usize::MAX);
            }
            node.recv(now, id, opts)
        })
    }

    fn poll_lend(
        &self,
        id: SocketId,
        cx: &Context<'_>,
        put: impl FnMut(SocketAddr, usize, &mut dyn Iterator<Item = &[u8]>) -> bool,
    ) -> Poll<Result<usize, Error>> {
        self.0.poll(id, Interest::READ, cx, |node, now| node.lend(now, id, put))
    }

    fn poll_ready(
        &self,
        id: SocketId,
        interest: Interest,
        cx: &Context<'_>,
    ) -> Poll<Result<Readiness, Error>> {
        let (read, write) = (interest.contains(Interest::READ), interest.contains(Interest::WRITE));
        self.0.poll(id, interest, cx, |node, _| {
            let ready = node.readiness(id)?;
            let is_ready = read && ready.readable || write && ready.writable;
            if is_ready { Ok(ready) } else { Err(CoreError::Empty) }
        })
    }

    fn poll_flush(&self, id: SocketId, cx: &Context<'_>) -> Poll<Result<(), Error>> {
        self.0.poll(id, Interest::WRITE, cx, |node, _| {
            if node.is_flushed(id)? { Ok(()) } else { Err(CoreError::QueueFull) }
        })
    }

    fn bind(&self, id: SocketId, name: SocketAddr) -> Result<(), Error> {
        Ok(self.0.call(|node, _| node.bind(id, name))?)
    }

    fn close(&self, id: SocketId) {
        if self.0.shared.sabotage == Some(Sabotage::KeepSocket) {
            return;
        }
        self.0.call(|node, now| node.close(now, id));
        let waiters = self.0.waiters.borrow_mut().remove(&id).unwrap_or_default();
        waiters.into_iter().for_each(|(_, waker)| waker.wake());
    }

    fn rdma_register(
        &self,
        _id: SocketId,
        _memory: &Arc<bowline_rds_driver::RdmaMemory>,
        _part: Range<usize>,
        _peer: Option<IpAddr>,
        _use_once: bool,
    ) -> Result<u64, Error> {
        Err(CoreError::NotSupported.into())
    }

    fn rdma_free(&self, id: SocketId, cookie: u64) -> Result<(), Error> {
        Ok(self.0.call(|node, _| node.free_region(id, cookie))?)
    }

    fn wall_clock(&self, at: Instant) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_nanos(at.as_nanos())
    }
}

/// A descriptor that programs have a hand in.
pub(super) struct SimDescriptor {
    pub(super) fd: Fd,
    pub(super) shared: Rc<Shared>,
}

impl SimDescriptor {
    fn socket(&self) -> Result<&Rc<End>, Errno> {
        match &self.fd {
            Fd::End(end) => Ok(end),
            Fd::Memory(_) => Err(Errno::ENOTSOCK),
        }
    }
}

impl Descriptor for SimDescriptor {
    type Given = Fd;

    fn send(&self, bytes: &[u8], given: &[Fd]) -> Result<usize, Errno> {
        self.shared.interleave();
        let end = self.socket()?;
        if end.is_packet() && self.shared.is_wrong(Sabotage::LoseToken, 3) {
            return Ok(bytes.len());
        }
        let sent = end.send(bytes, given).map_err(Errno);
        self.shared.interleave();
        sent
    }

    fn receive(&self, to: &mut [u8], _otherwise: Owner) -> Result<Arrival<Self>, Errno> {
        self.shared.interleave();
        let end = self.socket()?;
        let taken = end.receive(to.len()).map_err(Errno)?;
        let is_fill = taken.bytes.is_empty() || taken.bytes.len() == FILL_TOKEN_LEN;
        if self.shared.sabotage == Some(Sabotage::TakeForFill) && end.is_packet() && !is_fill {
            return Err(Errno::EAGAIN);
        }
        to[..taken.bytes.len()].copy_from_slice(&taken.bytes);
        let own = |fd| Self { fd, shared: Rc::clone(&self.shared) };
        Ok(Arrival {
            len: taken.bytes.len(),
            descriptors: taken.given.into_iter().map(own).collect(),
            sender: Some(end.peer()),
        })
    }

    fn is_all_read(&self) -> bool {
        self.shared.interleave();
        self.shared.sabotage != Some(Sabotage::NeverRead)
            && self.socket().is_ok_and(|end| end.is_all_read())
    }

    fn unread(&self) -> u64 {
        self.shared.interleave();
        self.socket().map_or(0, |end| end.unread() as u64)
    }

    fn has_ended(&self) -> bool {
        self.shared.interleave();
        self.socket().is_ok_and(|end| end.is_over())
    }

    fn prepare(&self) -> Result<(), Errno> {
        Ok(())
    }

    fn cookie(&self) -> Result<u64, Errno> {
        Ok(self.socket()?.cookie())
    }

    fn may_be_wanted(&self) -> bool {
        self.socket().is_ok_and(|end| end.is_packet())
    }

    fn offered_by(&self, _sender: Credentials) -> Option<Caller> {
        None
    }

    fn owned_by(self, _owner: Owner) -> Self {
        self
    }

    fn end(self) {
        if let Ok(end) = self.socket() {
            end.shut();
        }
    }
}

/// Memory of a socket.
#[derive(Debug)]
pub(super) struct SimMemory(pub(super) Rc<HeapMemory>);

impl SharedMemory for SimMemory {
    type Given = Fd;

    fn area(&self) -> Area {
        self.0.area()
    }

    fn share(&self) -> Result<Fd, Errno> {
        Ok(Fd::Memory(Rc::clone(&self.0)))
    }
}

/// The outside of a node's core.
pub(super) struct Sim {
    pub(super) shared: Rc<Shared>,
    pub(super) events: Rc<Events>,
    /// Messages that a socket's pair takes.
    pub(super) tokens: usize,
}

impl Outside for Sim {
    type Rds = SimRds;
    type Descriptor = SimDescriptor;
    type Given = Fd;
    type Memory = SimMemory;
    type Bell = BellOf;

    fn now(&self) -> Instant {
        Instant::from_nanos(self.shared.now.get())
    }

    fn random(&self) -> u64 {
        self.shared.random()
    }

    fn largest_buffers(&self) -> (usize, usize) {
        (212_992, 212_992)
    }

    fn is_behind(&self, _owner: Owner) -> bool {
        false
    }

    fn open(&self) -> Result<Opened<Self>, Errno> {
        let cookies = [self.shared.number(), self.shared.number()];
        let [end, theirs] = kernel::pair(Kind::Packet, self.tokens, cookies);
        let memory = Rc::new(HeapMemory::new());
        Ok(Opened {
            end: SimDescriptor { fd: Fd::End(end), shared: Rc::clone(&self.shared) },
            cookie: cookies[1],
            inode: cookies[1],
            memory: SimMemory(Rc::clone(&memory)),
            given: vec![Fd::End(theirs), Fd::Memory(memory)],
        })
    }

    fn watch_channel(&self, number: ChannelId, stream: &SimDescriptor) -> Result<(), Errno> {
        stream.socket()?.watch(&self.events, Token::Channel(number.0));
        Ok(())
    }

    fn watch_socket(&self, handle: SocketHandle, end: &SimDescriptor) -> Result<(), Errno> {
        end.socket()?.watch(&self.events, Token::Socket(handle.0));
        Ok(())
    }

    fn unwatch(&self, descriptor: &SimDescriptor) {
        if let Ok(end) = descriptor.socket() {
            end.unwatch();
        }
        if self.shared.sabotage == Some(Sabotage::KeepLock) {
            for (_, memory) in self.shared.memories.borrow().values() {
                let memory = memory.upgrade().filter(|memory| half(memory, LOCK) != 0);
                memory.inspect(|memory| set_half(memory, LOCK, NOBODY));
            }
        }
    }

    fn process_memory(
        &self,
        _descriptor: SimDescriptor,
        _shown: &Shown<'_>,
    ) -> Result<ProcessMemory, Errno> {
        Err(Errno::EBADF)
    }

    fn watch_memory(
        &self,
        _memory: &mut ProcessMemory,
        _descriptor: SimDescriptor,
        _process: i32,
    ) -> Result<(), Errno> {
        Err(Errno::EBADF)
    }

    fn name_successor(
        &self,
        _stream: &SimDescriptor,
        _asked: (i32, i32, i64),
    ) -> Result<(), Errno> {
        Err(Errno::EACCES)
    }

    fn pause(&self) {
        self.shared.interleave();
    }
}
