//! The agent: a thread that answers requests of nodes.

use core::ffi::{c_int, c_void};
use core::mem::MaybeUninit;
use core::ptr;
use core::sync::atomic::Ordering::{Relaxed, SeqCst};
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64};

use bowline_host_wire::agent::{
    ANSWER_HEAD, Answer, BYTES_MAX, Kind, REQUEST_HEAD, Request, words,
};
use bowline_host_wire::watch::look_at_each;

use super::own::{self, SWAP_STACK};
use super::table::{Found, Wanted};
use super::{Access, TABLE, connections};
use crate::channel::Descriptors;
use crate::system::{self, system};
use crate::watch;

const NONE: u32 = 0;
const STARTING: u32 = 1;
const RUNNING: u32 = 2;
const ENDING: u32 = 3;
/// It is about to close the descriptor that wakes it.
const ENDED: u32 = 4;

/// Bytes of its stack; large buffers are elsewhere.
const STACK: usize = 64 << 10;
/// How long other threads wait for the start or end of the agent, and for its current access, which
/// takes long only if the program's own memory is slow.
const PATIENCE_MS: u32 = 1000;

/// This and all below are in one order (SeqCst), in three pairs: an access that begins and the look
/// at the table, with a range that is taken out and the look at accesses; a thread that counts
/// itself in `WAKING` and looks at the state, with the agent that changes it and looks at `WAKING`;
/// and each state that is stored with the loads of it, for the descriptor in `WAKE`.
static STATE: AtomicU32 = AtomicU32::new(NONE);
/// The process whose thread it is.
static PROCESS: AtomicI32 = AtomicI32::new(0);
/// An eventfd that wakes it.
static WAKE: AtomicI32 = AtomicI32::new(-1);
/// Threads that are about to wake it.
static WAKING: AtomicU32 = AtomicU32::new(0);
/// Odd while it is in the program's memory.
static ACCESSES: AtomicU64 = AtomicU64::new(0);

pub(super) fn is_running() -> bool {
    STATE.load(SeqCst) != NONE
}

/// Waits a limited time for a condition.
fn wait_until(mut is_so: impl FnMut() -> bool) -> bool {
    for _ in 0..PATIENCE_MS {
        if is_so() {
            return true;
        }
        system::pause();
    }
    is_so()
}

/// Waits for the end of an access that began before this call. The order matters: the agent
/// announces an access before it reads the table.
pub(super) fn wait_for_access() {
    let before = ACCESSES.load(SeqCst);
    if before % 2 == 1 && PROCESS.load(SeqCst) == system::getpid() {
        wait_until(|| ACCESSES.load(SeqCst) != before);
    }
}

/// Starts the agent unless there is one. A process that has the memory of another starts none: it
/// would be the other's, and end with this process.
pub(super) fn start<D: Descriptors>() -> Result<(), c_int> {
    if !D::are_kept() {
        return Err(libc::EOPNOTSUPP);
    }
    let may_start = || match STATE.compare_exchange(NONE, STARTING, SeqCst, SeqCst) {
        Ok(_) => Some(true),
        Err(RUNNING) => Some(false),
        Err(_) => None,
    };
    let mut decided = None;
    wait_until(|| {
        decided = may_start();
        decided.is_some()
    });
    if !decided.ok_or(libc::EAGAIN)? {
        let is_own = PROCESS.load(SeqCst) == system::getpid();
        return if is_own { Ok(()) } else { Err(libc::EOPNOTSUPP) };
    }
    let started = start_thread::<D>();
    STATE.store(if started.is_ok() { RUNNING } else { NONE }, SeqCst);
    started
}

fn start_thread<D: Descriptors>() -> Result<(), c_int> {
    let pid = system::getpid();
    own::probe(pid).map_err(|_| libc::EFAULT)?;
    let wake = system!(SYS_eventfd2, 0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK)? as c_int;
    let wake = D::opened(wake);
    begin_anew_after_fork::<D>();
    WAKE.store(wake, SeqCst);
    PROCESS.store(pid, SeqCst);
    let blocked = Signals::block();
    let agent = std::thread::Builder::new().name("bowline-memory".into()).stack_size(STACK);
    let started = agent.spawn(move || run::<D>(pid, wake));
    blocked.restore();
    if started.is_err() {
        close_wake::<D>();
        return Err(libc::EAGAIN);
    }
    Ok(())
}

/// The signals that a thread had blocked. No signal of the program's is handled on the small stack
/// of the agent; the C library leaves out those that it needs itself.
struct Signals(libc::sigset_t);

impl Signals {
    fn block() -> Self {
        let mut all = MaybeUninit::uninit();
        // SAFETY: fills the set.
        unsafe { libc::sigfillset(all.as_mut_ptr()) };
        let mut before = MaybeUninit::zeroed();
        // SAFETY: the first set was filled, and the other is to be written.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr()) };
        // SAFETY: integers, which were zeroes at first.
        Self(unsafe { before.assume_init() })
    }

    fn restore(&self) {
        // SAFETY: the set is one; none is to be written.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.0, ptr::null_mut()) };
    }
}

fn begin_anew_after_fork<D: Descriptors>() {
    static DONE: AtomicBool = AtomicBool::new(false);
    extern "C" fn after_fork<D: Descriptors>() {
        STATE.store(NONE, SeqCst);
        ACCESSES.store(0, SeqCst);
        WAKING.store(0, SeqCst);
        TABLE.clear();
        connections::forget::<D>();
        close_wake::<D>();
    }
    if !DONE.swap(true, SeqCst) {
        // SAFETY: the function is there as long as this library, which is never unloaded: programs
        // do not unload what was preloaded, nor what has a thread.
        unsafe { libc::pthread_atfork(None, None, Some(after_fork::<D>)) };
    }
}

fn close_wake<D: Descriptors>() {
    let wake = WAKE.swap(-1, SeqCst);
    if wake >= 0 {
        D::closes(wake);
        system::close(wake);
    }
}

/// Wakes the agent, which then checks its connections.
pub(super) fn wake() {
    // The order matters: the side that closes the descriptor reads this count after it has set the
    // state.
    WAKING.fetch_add(1, SeqCst);
    if matches!(STATE.load(SeqCst), RUNNING | ENDING) {
        let one = 1_u64;
        let _ = system!(SYS_write, WAKE.load(SeqCst), ptr::from_ref(&one), size_of::<u64>());
    }
    WAKING.fetch_sub(1, SeqCst);
}

/// The descriptors of this module.
pub(super) fn descriptors() -> impl Iterator<Item = c_int> {
    connections::descriptors().chain([WAKE.load(SeqCst)])
}

/// Ends the agent, and waits until its descriptors are closed.
pub(super) fn end() {
    let is_own = PROCESS.load(SeqCst) == system::getpid();
    if is_own && STATE.compare_exchange(RUNNING, ENDING, SeqCst, Relaxed).is_ok() {
        TABLE.take_out(|_| true);
        wake();
        wait_until(|| STATE.load(SeqCst) == NONE);
    }
}

/// State of the agent.
struct Agent {
    pid: c_int,
    /// One byte more than the longest request: a request that is cut is malformed.
    input: Vec<u8>,
    output: Vec<u8>,
    stack: Box<[u8; SWAP_STACK]>,
}

fn run<D: Descriptors>(pid: c_int, wake: c_int) {
    let mut agent = Agent {
        pid,
        input: vec![0; REQUEST_HEAD + BYTES_MAX + 1],
        output: vec![0; ANSWER_HEAD + BYTES_MAX],
        stack: Box::new([0; SWAP_STACK]),
    };
    let mut numbers = Vec::new();
    let mut events = Vec::new();
    loop {
        let is_ending = STATE.load(SeqCst) == ENDING;
        if is_ending {
            connections::open().for_each(|(number, _)| connections::end(number));
        }
        let is_left = connections::close_ended::<D>();
        if is_ending && !is_left {
            break;
        }
        let event = |fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
        numbers.clear();
        events.clear();
        events.push(event(wake));
        for (number, fd) in connections::open() {
            numbers.push(number);
            events.push(event(fd));
        }
        wait_for(&mut events, is_left || is_ending);
        if events[0].revents != 0 {
            let mut count = 0_u64;
            let _ = system!(SYS_read, wake, ptr::from_mut(&mut count), size_of::<u64>());
        }
        for (number, event) in numbers.iter().zip(&events[1..]) {
            if event.revents != 0 && agent.serve(*number, event.fd).is_none() {
                connections::end(*number);
            }
        }
    }
    // The order matters: nobody begins to wake one that has ended, and its number may be another's
    // when it is closed.
    STATE.store(ENDED, SeqCst);
    if wait_until(|| WAKING.load(SeqCst) == 0) {
        close_wake::<D>();
    }
    STATE.store(NONE, SeqCst);
}

/// Waits until one of the descriptors is ready, or for a moment if asked.
fn wait_for(events: &mut [libc::pollfd], is_brief: bool) {
    let moment = libc::timespec { tv_sec: 0, tv_nsec: 2_000_000 };
    let limit = if is_brief { ptr::from_ref(&moment) } else { ptr::null() };
    let none = ptr::null::<c_void>();
    if system!(SYS_ppoll, events.as_mut_ptr(), events.len(), limit, none, 0).is_err() {
        events.iter_mut().for_each(|event| event.revents = 0);
    }
}

/// Announces to other threads that the agent accesses the program's memory, until dropped.
struct InMemory;

impl InMemory {
    fn enter() -> Self {
        ACCESSES.fetch_add(1, SeqCst);
        Self
    }
}

impl Drop for InMemory {
    fn drop(&mut self) {
        ACCESSES.fetch_add(1, SeqCst);
    }
}

impl Agent {
    /// Answers one request of a connection; `None` ends it.
    fn serve(&mut self, number: usize, fd: c_int) -> Option<()> {
        let flags = libc::MSG_DONTWAIT | libc::MSG_TRUNC;
        let len = match system::recv(fd, &mut self.input, flags) {
            Err(libc::EINTR | libc::EAGAIN) => return Some(()),
            got => got.ok().filter(|len| *len > 0)?,
        };
        let input = core::mem::take(&mut self.input);
        let answered = input.get(..len).and_then(Request::parse).and_then(|(request, payload)| {
            if request.kind == Kind::Forget {
                forget(number, payload);
                return Some(());
            }
            let done = self.execute(number, &request, payload);
            let (errno, len) = done.map_or_else(|errno| (errno.cast_unsigned(), 0), |len| (0, len));
            let answer = Answer { kind: request.kind, errno, sequence: request.sequence };
            self.output[..ANSWER_HEAD].copy_from_slice(&answer.emit());
            let answer = &self.output[..ANSWER_HEAD + len];
            // A node that does not read its replies ends the connection.
            system::send(fd, answer, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL).ok().map(drop)
        });
        self.input = input;
        answered
    }

    /// Executes a request; returns the length of the reply in bytes.
    fn execute(
        &mut self,
        number: usize,
        &Request { kind, grant, at, len, .. }: &Request,
        payload: &[u8],
    ) -> Result<usize, c_int> {
        let find = |at, len, access| {
            let wanted = Wanted { grant, at, len, access };
            TABLE.find(number, &wanted).ok_or(libc::EFAULT)
        };
        let bytes = &mut self.output[ANSWER_HEAD..];
        let _in_memory = InMemory::enter();
        match kind {
            Kind::Read => {
                let found = find(at, len, Some(Access::Read))?;
                let bytes = bytes.get_mut(..len as usize).ok_or(libc::EINVAL)?;
                own::read(self.pid, at, bytes)?;
                // Bytes of a range withdrawn during the access are not sent, nor what something
                // else has in its place.
                // What was at a page for a moment may not be mapped any more.
                let mut pages = look_at_each(at, len);
                if TABLE.is_still(found) && pages.all(|[page, len, _]| is_there(found, page, len)) {
                    Ok(bytes.len())
                } else {
                    Err(libc::EFAULT)
                }
            }
            Kind::Write => {
                let found = find(at, len, Some(Access::Write))?;
                if !is_there(found, at, len) {
                    return Err(libc::EFAULT);
                }
                own::write(self.pid, at, payload).map(|()| 0)
            }
            Kind::Has => {
                for range in payload.chunks_exact(16) {
                    let [at, len] = words(range).ok_or(libc::EINVAL)?;
                    find(at, len, None)?;
                    if len == 0 || !system::populate(at, len, false) {
                        return Err(libc::EFAULT);
                    }
                }
                Ok(0)
            }
            Kind::Swap => {
                let found = find(at, len, Some(Access::Both))?;
                let words = words(payload).ok_or(libc::EINVAL)?;
                if !is_there(found, at, len) {
                    return Err(libc::EFAULT);
                }
                let before = own::swap(self.pid, at, words, &mut self.stack)?;
                bytes[..8].copy_from_slice(&before.to_ne_bytes());
                if TABLE.is_still(found) && is_there(found, at, len) {
                    Ok(8)
                } else {
                    Err(libc::EFAULT)
                }
            }
            Kind::Forget => Err(libc::EINVAL),
        }
    }
}

/// Tells whether memory is still what was given.
fn is_there(found: Found, at: u64, len: u64) -> bool {
    !found.is_watched || watch::known().is_some_and(|watch| watch::is_there(watch, at, len))
}

/// The node returns the ranges of these grants.
fn forget(number: usize, payload: &[u8]) {
    let mut grants: Vec<u64> =
        payload.chunks_exact(8).filter_map(words).map(|[grant]| grant).collect();
    grants.sort_unstable();
    TABLE.take_out(|entry| {
        entry.owner.connection == number && grants.binary_search(&entry.owner.grant).is_ok()
    });
}
