//! Memory of a program that its agent gives, range by range: the node's side of
//! [`bowline_host_wire::agent`].
//!
//! A program may be stopped, or lie. No access takes longer than [`LIMIT`], nor do all those of one
//! request; and all that are slow take no more of the node's time than each user has
//! ([`Patience`]). After one that does, or an answer that is none, the memory is gone for good.

use std::collections::BTreeMap;
use std::fmt;
use std::io::{IoSlice, IoSliceMut};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use bowline_base::Errno;
use bowline_host_wire::agent::{
    ANSWER_HEAD, Answer, BYTES_MAX, GRANTS_MAX, Kind, RANGES_MAX, Request,
};
use bowline_rds_driver::{ForeignMemory, RdmaMemory};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno as SystemErrno;
use rustix::net::sockopt::{set_socket_passcred, socket_cookie};
use rustix::net::{SendAncillaryBuffer, SendFlags, Shutdown, getpeername, sendmsg, shutdown};

use crate::arrivals;
use crate::caller::{Caller, Credentials, is_unnamed, take_descriptors};
use crate::closer::Passed;

/// Longest time that an access takes, and all accesses for one request of a program.
pub(crate) const LIMIT: Duration = Duration::from_millis(250);
/// An answer that takes no longer is not slow.
const PROMPT: Duration = Duration::from_millis(1);
/// How long the node waits for slow answers of the programs of one user, beside [`PROMPT`] for
/// each: so long at most, and a fourth of the time.
const PATIENCE: Duration = Duration::from_secs(1);
const PATIENCE_COMES_BACK: u32 = 4;
/// Most agents of one user: each has a descriptor here for as long as something uses its memory.
pub(crate) const AGENTS_MAX: usize = 256;
/// Most answers to requests of a node before this one that are skipped, after a hand-over.
const STALE_MAX: u32 = 4;
/// Most times that the program changes a word while the node changes it.
const SWAPS_MAX: u32 = 1000;

/// Agents that are in use, by the number that the system gives each socket once.
static KNOWN: Mutex<Vec<(u64, Weak<Agent>)>> = Mutex::new(Vec::new());

/// How long the node waits for the programs of each user who was slow.
static PATIENCES: Mutex<BTreeMap<u32, Arc<Mutex<Patience>>>> = Mutex::new(BTreeMap::new());

/// How much longer the node waits for slow answers of a user, at a time.
#[derive(Debug)]
struct Patience {
    left: Duration,
    at: Instant,
}

impl Patience {
    fn new() -> Self {
        Self { left: PATIENCE, at: Instant::now() }
    }

    fn of(user: u32) -> Arc<Mutex<Self>> {
        let new = || Arc::new(Mutex::new(Self::new()));
        Arc::clone(locked(&PATIENCES).entry(user).or_insert_with(new))
    }

    fn left(&mut self, now: Instant) -> Duration {
        let more = now.saturating_duration_since(self.at) / PATIENCE_COMES_BACK;
        self.left = (self.left + more).min(PATIENCE);
        self.at = now;
        self.left
    }

    /// An answer has taken so long.
    fn take(&mut self, waited: Duration) {
        self.left = self.left.saturating_sub(waited.saturating_sub(PROMPT));
    }
}

/// The agent of a process.
pub(crate) struct Agent {
    /// Whose process it is.
    user: u32,
    patience: Arc<Mutex<Patience>>,
    /// When the accesses for the request under way are to be done.
    until: Mutex<Option<Instant>>,
    socket: Passed,
    /// What was given back and not said yet.
    given_back: Mutex<Vec<u64>>,
    /// Held for one request: the sequence number of the last.
    turn: Mutex<u64>,
    gone: AtomicBool,
    /// What any call has given, for operations; in it keys are the same for all grants.
    memory: Mutex<Weak<RdmaMemory>>,
}

impl fmt::Debug for Agent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Agent").field("gone", &self.gone).finish_non_exhaustive()
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Looks at all agents.
pub(crate) fn look_at_all() {
    // Dropped without the lock, which an agent takes when it goes.
    let all: Vec<Arc<Agent>> = locked(&KNOWN).iter().filter_map(|(_, a)| a.upgrade()).collect();
    all.iter().for_each(|agent| agent.look());
    let now = Instant::now();
    let is_kept = |patience: &Arc<Mutex<Patience>>| {
        Arc::strong_count(patience) > 1 || locked(patience).left(now) < PATIENCE
    };
    locked(&PATIENCES).retain(|_, patience| is_kept(patience));
}

impl Agent {
    /// Takes the descriptor that a process has sent, if it is one end of a pair that this process
    /// has made.
    ///
    /// # Errors
    /// EBADF for any other descriptor; EMFILE when its user has as many as there may be.
    pub(crate) fn of(descriptor: Passed, caller: &Caller) -> Result<Arc<Self>, Errno> {
        // This end may have a name: the system gives one to who sends and asks who does
        // (SO_PASSCRED), as a node before this one has done. A connection to somebody's server has
        // one at the other end.
        let is_pair = arrivals::may_be_socket_of_node(&descriptor)
            && getpeername(&descriptor).is_ok_and(|name| name.as_ref().is_none_or(is_unnamed));
        let is_callers =
            |peer: Credentials| (peer.process, peer.user) == (caller.process, caller.user);
        if !is_pair || !Credentials::of_peer(&descriptor).is_ok_and(is_callers) {
            return Err(Errno::EBADF);
        }
        let cookie = socket_cookie(&descriptor).map_err(|_| Errno::EBADF)?;
        let mut known = locked(&KNOWN);
        let found = known.iter().find(|(known, _)| *known == cookie);
        if let Some(agent) = found.and_then(|(_, agent)| agent.upgrade()) {
            // Not the last descriptor of the socket: closing it is nothing.
            drop(descriptor.into_inner());
            return Ok(agent);
        }
        known.retain(|(_, agent)| agent.strong_count() > 0);
        let is_of_user = |agent: Arc<Self>| agent.user == caller.user;
        let own = known.iter().filter(|(_, agent)| agent.upgrade().is_some_and(is_of_user));
        if own.count() >= AGENTS_MAX {
            return Err(Errno::EMFILE);
        }
        take_descriptors(&descriptor, false);
        // Who sends on it, the system is to say: the program may have given its end away.
        set_socket_passcred(&descriptor, true).map_err(|_| Errno::EBADF)?;
        let agent = Arc::new(Self::new(descriptor, caller.user, Patience::of(caller.user)));
        known.push((cookie, Arc::downgrade(&agent)));
        Ok(agent)
    }

    fn new(socket: Passed, user: u32, patience: Arc<Mutex<Patience>>) -> Self {
        let begun = u64::from(std::process::id()) << 40;
        Self {
            user,
            patience,
            until: Mutex::default(),
            socket,
            given_back: Mutex::default(),
            turn: Mutex::new(begun),
            gone: AtomicBool::new(false),
            memory: Mutex::default(),
        }
    }

    /// A request of the program is executed until what is returned is dropped.
    pub(crate) fn begin(&self) -> Work<'_> {
        *locked(&self.until) = Some(Instant::now() + LIMIT);
        Work(self)
    }

    /// When an access that begins now is to be done.
    fn until(&self) -> Instant {
        let limit = Instant::now() + LIMIT;
        locked(&self.until).map_or(limit, |until| until.min(limit))
    }

    /// Takes what the program has sent without being asked: answers to a node before this one, or
    /// descriptors, among them perhaps one without which its channel had ended.
    fn look(&self) {
        let Ok(_turn) = self.turn.try_lock() else { return };
        let mut head = [0; ANSWER_HEAD];
        for _ in 0..=STALE_MAX {
            match self.receive(&mut head, &mut []) {
                Ok(_) | Err(SystemErrno::INTR) => {}
                Err(SystemErrno::AGAIN) => return,
                Err(_) => return self.give_up(),
            }
        }
    }

    /// The memory is gone for good. The program learns of it, and makes another pair when it needs
    /// one.
    fn give_up(&self) {
        // Pairs with the loads in `tell` and `ask`. One that misses it finds the socket shut down.
        self.gone.store(true, Ordering::Release);
        let _ = shutdown(&self.socket, Shutdown::Both);
    }

    /// Gives back what was given under a number.
    fn give_back(&self, grant: u64) {
        let mut all = locked(&self.given_back);
        all.push(grant);
        self.tell(&mut all);
    }

    /// Tells the agent what was given back, as much as it takes now.
    fn tell(&self, all: &mut Vec<u64>) {
        while !all.is_empty() && !self.gone.load(Ordering::Acquire) {
            let count = all.len().min(GRANTS_MAX);
            let (kind, len) = (Kind::Forget, count as u64);
            let head = Request { kind, grant: 0, sequence: 0, at: 0, len }.emit();
            let numbers: Vec<u8> = all[..count].iter().flat_map(|n| n.to_ne_bytes()).collect();
            if self.send(&[IoSlice::new(&head), IoSlice::new(&numbers)]).is_err() {
                return;
            }
            all.drain(..count);
        }
    }

    fn send(&self, pieces: &[IoSlice<'_>]) -> Result<(), SystemErrno> {
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        loop {
            match sendmsg(&self.socket, pieces, &mut SendAncillaryBuffer::default(), flags) {
                Err(SystemErrno::INTR) => {}
                sent => return sent.map(drop),
            }
        }
    }

    /// Waits until the socket is ready.
    fn wait(&self, events: PollFlags, until: Instant) -> Result<(), SystemErrno> {
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let limit = Timespec {
                tv_sec: left.as_secs().cast_signed(),
                tv_nsec: left.subsec_nanos().into(),
            };
            match poll(&mut [PollFd::new(&self.socket, events)], Some(&limit)) {
                Ok(0) => return Err(SystemErrno::TIMEDOUT),
                Err(SystemErrno::INTR) => {}
                ready => return ready.map(drop),
            }
        }
    }

    /// The next message: how many bytes came behind its head. Of one that is longer than `out`
    /// there is one more.
    fn receive(&self, head: &mut [u8; ANSWER_HEAD], out: &mut [u8]) -> Result<usize, SystemErrno> {
        let mut more = [0];
        let pieces = [&mut head[..], out, &mut more];
        let pieces = &mut pieces.map(IoSliceMut::new);
        let arrival = arrivals::receive_pieces(&self.socket, pieces, Some(self.user))?;
        if !arrival.descriptors.is_empty() {
            return Err(SystemErrno::PROTO);
        }
        arrival.len.checked_sub(ANSWER_HEAD).ok_or(SystemErrno::PROTO)
    }

    /// Asks the agent; `false` if it refuses, or is gone. The bytes of its answer fill `out`.
    fn ask(&self, until: Instant, request: Request, payload: &[u8], out: &mut [u8]) -> bool {
        if request.at.checked_add(request.len).is_none() {
            return false; // no memory, and no request
        }
        let mut turn = locked(&self.turn);
        if self.gone.load(Ordering::Acquire) {
            return false;
        }
        self.tell(&mut locked(&self.given_back));
        *turn += 1;
        let request = Request { sequence: *turn, ..request };
        let begun = Instant::now();
        let patience = locked(&self.patience).left(begun);
        let until = until.min(begun + PROMPT + patience);
        let answered = self.exchange(&request, payload, until, out);
        locked(&self.patience).take(begun.elapsed());
        if answered.is_err() {
            self.give_up();
        }
        answered == Ok(0)
    }

    fn exchange(
        &self,
        request: &Request,
        payload: &[u8],
        until: Instant,
        out: &mut [u8],
    ) -> Result<u32, SystemErrno> {
        let head = request.emit();
        let pieces = [IoSlice::new(&head), IoSlice::new(payload)];
        while let Err(error) = self.send(&pieces) {
            if error != SystemErrno::AGAIN {
                return Err(error);
            }
            self.wait(PollFlags::OUT, until)?;
        }
        let mut stale = 0;
        let mut head = [0; ANSWER_HEAD];
        loop {
            match self.receive(&mut head, out) {
                Ok(bytes) => {
                    if let Some(errno) = Answer::parse(&head, request, bytes, out.len()) {
                        return Ok(errno);
                    }
                    stale += 1;
                    if stale > STALE_MAX || Answer::sequence(&head) >= request.sequence {
                        return Err(SystemErrno::PROTO);
                    }
                }
                Err(SystemErrno::AGAIN) => self.wait(PollFlags::IN, until)?,
                Err(SystemErrno::INTR) => {}
                Err(error) => return Err(error),
            }
        }
    }
}

const fn request(kind: Kind, grant: u32, at: u64, len: usize) -> Request {
    Request { kind, grant, sequence: 0, at, len: len as u64 }
}

/// Accesses to what was given by one call, or with 0 by any.
impl Agent {
    fn read_given(&self, grant: u32, at: u64, out: &mut [u8]) -> usize {
        let until = self.until();
        let mut done = 0;
        for chunk in out.chunks_mut(BYTES_MAX) {
            let Some(at) = at.checked_add(done as u64) else { break };
            if !self.ask(until, request(Kind::Read, grant, at, chunk.len()), &[], chunk) {
                break;
            }
            done += chunk.len();
        }
        done
    }

    fn write_given(&self, grant: u32, at: u64, bytes: &[u8]) -> usize {
        let until = self.until();
        let mut done = 0;
        for chunk in bytes.chunks(BYTES_MAX) {
            let Some(at) = at.checked_add(done as u64) else { break };
            if !self.ask(until, request(Kind::Write, grant, at, chunk.len()), chunk, &mut []) {
                break;
            }
            done += chunk.len();
        }
        done
    }

    /// One step as seen by the program's threads, too.
    fn update_given(&self, grant: u32, at: u64, change: &mut dyn FnMut(u64) -> u64) -> Option<u64> {
        let until = self.until();
        let mut word = [0; 8];
        let read = request(Kind::Read, grant, at, 8);
        if !at.is_multiple_of(8) || !self.ask(until, read, &[], &mut word) {
            return None;
        }
        for _ in 0..SWAPS_MAX {
            let old = u64::from_ne_bytes(word);
            let words = [word, change(old).to_ne_bytes()].concat();
            if !self.ask(until, request(Kind::Swap, grant, at, 8), &words, &mut word) {
                return None;
            }
            if u64::from_ne_bytes(word) == old {
                return Some(old);
            }
        }
        None
    }

    fn has_given(&self, grant: u32, ranges: &[(u64, u64)]) -> bool {
        let until = self.until();
        ranges.chunks(RANGES_MAX).all(|ranges| {
            let bytes = |&(at, len): &(u64, u64)| [at.to_ne_bytes(), len.to_ne_bytes()].concat();
            let payload: Vec<u8> = ranges.iter().flat_map(bytes).collect();
            self.ask(until, request(Kind::Has, grant, 0, ranges.len()), &payload, &mut [])
        })
    }
}

/// What any call has given.
impl ForeignMemory for Agent {
    fn read(&self, at: u64, out: &mut [u8]) -> usize {
        self.read_given(0, at, out)
    }

    fn write(&self, at: u64, bytes: &[u8]) -> usize {
        self.write_given(0, at, bytes)
    }

    fn update(&self, at: u64, change: &mut dyn FnMut(u64) -> u64) -> Option<u64> {
        self.update_given(0, at, change)
    }

    fn has(&self, ranges: &[(u64, u64)]) -> bool {
        self.has_given(0, ranges)
    }
}

/// A request that is executed.
#[must_use]
pub(crate) struct Work<'a>(&'a Agent);

impl Drop for Work<'_> {
    fn drop(&mut self) {
        *locked(&self.0.until) = None;
    }
}

/// What was given by one call, until nothing uses it any more.
#[derive(Debug)]
pub(crate) struct Grant {
    agent: Arc<Agent>,
    /// What the program calls it.
    number: u64,
    /// By which name its agent is asked for it, or 0.
    name: u32,
    /// What any call has given, kept for the grants that come.
    memory: Arc<RdmaMemory>,
}

impl Agent {
    /// What a call has given under a number, which is given back when nothing uses it any more.
    /// Unless `is_named`, the program is of before, and its agent cannot tell it from what other
    /// calls have given.
    pub(crate) fn grant(self: &Arc<Self>, number: u64, is_named: bool) -> Arc<Grant> {
        let mut known = locked(&self.memory);
        let memory = known.upgrade().unwrap_or_else(|| {
            let memory = RdmaMemory::of_process(Arc::clone(self) as _);
            *known = Arc::downgrade(&memory);
            memory
        });
        let name = if is_named { number as u32 } else { 0 };
        Arc::new(Grant { agent: Arc::clone(self), number, name, memory })
    }
}

impl Grant {
    /// For operations of the program, for devices. Keys are the same for all grants.
    pub(crate) fn for_operations(self: &Arc<Self>) -> Arc<RdmaMemory> {
        self.memory.guarded(Arc::clone(self) as _)
    }

    /// What is done until what is returned is dropped has one limit of time.
    pub(crate) fn begin(&self) -> Work<'_> {
        self.agent.begin()
    }
}

/// This and nothing that other calls give, even at the same addresses.
impl ForeignMemory for Grant {
    fn read(&self, at: u64, out: &mut [u8]) -> usize {
        self.agent.read_given(self.name, at, out)
    }

    fn write(&self, at: u64, bytes: &[u8]) -> usize {
        self.agent.write_given(self.name, at, bytes)
    }

    fn update(&self, at: u64, change: &mut dyn FnMut(u64) -> u64) -> Option<u64> {
        self.agent.update_given(self.name, at, change)
    }

    fn has(&self, ranges: &[(u64, u64)]) -> bool {
        self.agent.has_given(self.name, ranges)
    }
}

impl Drop for Grant {
    /// Says so to the agent at once, without waiting: the program may need the room. That is a
    /// system call wherever an operation ends, under the lock of the core as well.
    fn drop(&mut self) {
        self.agent.give_back(self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use std::mem::MaybeUninit;
    use std::os::fd::{AsFd, OwnedFd};
    use std::thread;

    use bowline_host_wire::agent::REQUEST_HEAD;
    use rustix::net::sockopt::set_socket_linger;
    use rustix::net::{
        AddressFamily, RecvFlags, SendAncillaryMessage, SocketFlags, SocketType, recv, send,
        socketpair,
    };

    /// Longer than one access may take, and shorter than two.
    const SOON: Duration = LIMIT.saturating_mul(2).saturating_sub(Duration::from_millis(1));

    fn agent() -> (OwnedFd, Arc<Agent>) {
        let kind = SocketType::SEQPACKET;
        let (program, end) =
            socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).unwrap();
        // It takes descriptors, as before Linux 6.16.
        (program, Arc::new(new(end, &Arc::new(Mutex::new(Patience::new())))))
    }

    fn new(end: OwnedFd, patience: &Arc<Mutex<Patience>>) -> Agent {
        Agent::new(Passed::new(None, end), 77_001, Arc::clone(patience))
    }

    /// The next request of the node.
    fn next(program: &OwnedFd) -> (Request, Vec<u8>) {
        let mut message = vec![0; REQUEST_HEAD + BYTES_MAX];
        let (len, _) = recv(program, &mut message[..], RecvFlags::empty()).unwrap();
        message.truncate(len);
        let (request, payload) = Request::parse(&message).expect("a request");
        (request, payload.to_vec())
    }

    fn answer(to: &Request, errno: u32, bytes: &[u8]) -> Vec<u8> {
        let head = Answer { kind: to.kind, errno, sequence: to.sequence }.emit();
        [&head[..], bytes].concat()
    }

    /// It is gone: no access succeeds, and none waits.
    fn is_gone(agent: &Agent) -> bool {
        let begun = Instant::now();
        (0..1000).all(|_| agent.read(8, &mut [0; 8]) == 0)
            && agent.write(8, &[0; 8]) == 0
            && agent.update(8, &mut |old| old).is_none()
            && !agent.has(&[(8, 8)])
            && begun.elapsed() < LIMIT
    }

    /// Answers what `answers` says of each request, until the node ends the connection.
    fn program(
        end: OwnedFd,
        mut answers: impl FnMut(&Request, &[u8]) -> Vec<u8> + Send + 'static,
    ) -> thread::JoinHandle<()> {
        thread::spawn(move || {
            let mut message = vec![0; REQUEST_HEAD + BYTES_MAX];
            while let Ok((len @ 1.., _)) = recv(&end, &mut message[..], RecvFlags::empty()) {
                let (request, payload) = Request::parse(&message[..len]).expect("a request");
                if request.kind != Kind::Forget {
                    let _ = send(&end, &answers(&request, payload), SendFlags::NOSIGNAL);
                }
            }
        })
    }

    // tests [RMR-12]
    #[test]
    fn long_accesses_are_made_of_requests_that_are_not_too_long() {
        let (end, agent) = agent();
        let other = program(end, |request, payload| match request.kind {
            Kind::Read => answer(request, 0, &vec![request.at as u8; request.len as usize]),
            Kind::Write if request.at + payload.len() as u64 > 150_000 => answer(request, 14, b""),
            Kind::Swap => answer(request, 0, &9_u64.to_ne_bytes()),
            _ => answer(request, 0, b""),
        });
        let mut bytes = vec![0; 100_000];
        assert_eq!(agent.read(5, &mut bytes), 100_000);
        assert_eq!((bytes[0], bytes[BYTES_MAX]), (5, 5));
        assert_eq!(agent.write(50_001, &bytes), BYTES_MAX, "the rest was refused");
        assert!(agent.has(&vec![(8, 8); 3000]));
        assert_eq!(agent.read(u64::MAX - 70_000, &mut bytes), BYTES_MAX, "it does not wrap around");
        assert_eq!(agent.read(0, &mut []), 0);
        // The word is another at first, as when the program changes it.
        let mut seen = Vec::new();
        let mut change = |old| {
            seen.push(old);
            old + 1
        };
        assert_eq!(agent.update(8, &mut change), Some(9));
        assert_eq!(seen, [0x0808_0808_0808_0808, 9]);
        drop(agent);
        other.join().unwrap();
    }

    // tests [RMR-12]
    #[test]
    fn what_is_not_the_answer_ends_it_for_good() {
        type Lies = fn(&Request) -> Vec<u8>;
        let lies: [(&str, Lies); 9] = [
            ("nothing", |_| Vec::new()),
            ("half a head", |_| vec![0; ANSWER_HEAD - 1]),
            ("too few bytes", |request| answer(request, 0, &[0; 7])),
            ("too many", |request| answer(request, 0, &[0; 9])),
            ("very many", |request| answer(request, 0, &vec![0; BYTES_MAX])),
            ("bytes of an error", |request| answer(request, 14, &[0; 8])),
            ("of another kind", |request| {
                answer(&Request { kind: Kind::Swap, ..*request }, 0, &[0; 8])
            }),
            ("of the next", |request| {
                answer(&Request { sequence: request.sequence + 1, ..*request }, 0, &[0; 8])
            }),
            ("of those before", |request| {
                answer(&Request { sequence: request.sequence - 1, ..*request }, 0, &[0; 8])
            }),
        ];
        for (name, lie) in lies {
            let (end, agent) = agent();
            let other = program(end, move |request, _| lie(request));
            let begun = Instant::now();
            assert_eq!(agent.read(8, &mut [7; 8]), 0, "{name}");
            assert!(begun.elapsed() < SOON && is_gone(&agent), "{name}");
            other.join().expect("the program sees the end");
        }
    }

    // tests [RMR-12]
    #[test]
    fn who_does_not_answer_holds_the_node_up_once() {
        let (end, agent) = agent();
        let begun = Instant::now();
        assert_eq!(agent.read(8, &mut [0; 8]), 0);
        assert!((LIMIT..SOON).contains(&begun.elapsed()), "{:?}", begun.elapsed());
        // An answer that comes then is none.
        let (request, _) = next(&end);
        let late = send(&end, &answer(&request, 0, &[7; 8]), SendFlags::NOSIGNAL);
        assert!(late.is_err() && is_gone(&agent));
        // Nor does who takes nothing, whether the requests have room or not.
        let (_end, agent) = self::agent();
        for grant in 0..30_000 {
            agent.give_back(grant);
        }
        let begun = Instant::now();
        assert_eq!(agent.write(8, &[0; BYTES_MAX]), 0);
        assert!(begun.elapsed() < SOON && is_gone(&agent));
    }

    // tests [RMR-12]
    #[test]
    fn an_agent_that_answers_slowly_has_one_limit_for_an_access() {
        let (end, agent) = agent();
        let other = program(end, |request, _| {
            thread::sleep(LIMIT / 10);
            answer(request, 0, &vec![1; request.len as usize])
        });
        let begun = Instant::now();
        assert!(agent.read(8, &mut vec![0; 20 * BYTES_MAX]) < 20 * BYTES_MAX);
        assert!(begun.elapsed() < SOON && is_gone(&agent));
        other.join().unwrap();
        // A word that is another each time is no way to keep the node.
        let (end, agent) = self::agent();
        let mut word = 0_u64;
        let other = program(end, move |request, _| {
            word += 1;
            answer(request, 0, &word.to_ne_bytes())
        });
        let begun = Instant::now();
        assert_eq!(agent.update(8, &mut |old| old + 1), None);
        assert!(begun.elapsed() < SOON);
        drop(agent);
        other.join().unwrap();
    }

    /// Each answer comes in time, and all of them too slowly: with an end, which is the end for
    /// what else the user has that is slow.
    // tests [RMR-12]
    #[test]
    fn who_answers_slowly_all_the_time_is_not_waited_for() {
        let patience = Arc::new(Mutex::new(Patience::new()));
        let pair = || {
            let kind = SocketType::SEQPACKET;
            socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).unwrap()
        };
        let slow = |end| {
            program(end, |request, _| {
                thread::sleep(LIMIT / 10);
                answer(request, 0, &vec![1; request.len as usize])
            })
        };
        let (end, theirs) = pair();
        let (agent, other) = (new(theirs, &patience), slow(end));
        let count = (0..1000).take_while(|_| agent.read(8, &mut [0; 8]) == 8).count();
        assert!(count >= 10, "{count}: some slow answers are none of anybody's");
        assert!(count < 100 && is_gone(&agent), "{count}");
        other.join().unwrap();
        let (end, theirs) = pair();
        let (agent, other) = (new(theirs, &patience), slow(end));
        let count = (0..1000).take_while(|_| agent.read(8, &mut [0; 8]) == 8).count();
        assert!(count < 10 && is_gone(&agent), "{count}");
        other.join().unwrap();
        // Who is prompt is not held to account, for long; nor is anybody after a while.
        let mut patience = Patience::new();
        let begun = patience.at;
        (0..100_000).for_each(|_| patience.take(PROMPT));
        assert_eq!(patience.left(begun), PATIENCE);
        patience.take(PATIENCE * 2);
        assert_eq!(patience.left(begun), Duration::ZERO);
        assert_eq!(patience.left(begun + PATIENCE), PATIENCE / PATIENCE_COMES_BACK);
        assert_eq!(patience.left(begun + PATIENCE * 60), PATIENCE);
    }

    /// A request may be about a thousand places: it has one limit.
    // tests [RMR-12]
    #[test]
    fn all_accesses_for_a_request_have_one_limit() {
        let (end, agent) = agent();
        let other = program(end, |request, _| {
            thread::sleep(LIMIT / 10);
            answer(request, 0, &vec![1; request.len as usize])
        });
        let work = agent.begin();
        let count = (0..1000).take_while(|_| agent.read(8, &mut [0; 8]) == 8).count();
        assert!(count < 10 && is_gone(&agent), "{count}");
        drop(work);
        other.join().unwrap();
    }

    /// A TCP socket whose close waits for as long as its peer does not read.
    fn lingering() -> (std::net::TcpStream, std::net::TcpStream) {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let socket = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (peer, _) = listener.accept().unwrap();
        set_socket_linger(&socket, Some(Duration::from_secs(20))).unwrap();
        socket.set_nonblocking(true).unwrap();
        while std::io::Write::write(&mut &socket, &[0; 1 << 16]).is_ok() {}
        (socket, peer)
    }

    fn send_with(end: &OwnedFd, message: &[u8], descriptor: impl AsFd) {
        let descriptor = [descriptor.as_fd()];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        control.push(SendAncillaryMessage::ScmRights(&descriptor));
        sendmsg(end, &[IoSlice::new(message)], &mut control, SendFlags::NOSIGNAL).unwrap();
    }

    // tests [RMR-12]
    #[test]
    fn descriptors_that_come_along_are_closed_by_somebody_else() {
        let (end, agent) = agent();
        let (socket, _peer) = lingering();
        send_with(&end, &[0; ANSWER_HEAD + 8], &socket);
        drop(socket);
        let begun = Instant::now();
        assert_eq!(agent.read(8, &mut [0; 8]), 0);
        assert!(begun.elapsed() < SOON && is_gone(&agent));

        // One that nobody has taken when all ends.
        let (end, agent) = self::agent();
        let (socket, _peer) = lingering();
        send_with(&end, b"unasked", &socket);
        drop(socket);
        let begun = Instant::now();
        drop(agent);
        assert!(begun.elapsed() < SOON);
    }

    /// What a peer uses by a key is asked for by what the key was for.
    // tests [RMR-13]
    #[test]
    fn regions_are_asked_for_by_the_number_under_which_they_were_given() {
        let (end, agent) = agent();
        let asked = Arc::new(Mutex::new(Vec::new()));
        let all = Arc::clone(&asked);
        let other = program(end, move |request, _| {
            locked(&all).push((request.kind, request.grant));
            answer(request, 0, &vec![0; if request.kind == Kind::Read { 8 } else { 0 }])
        });
        let grant = agent.grant(1 << 32 | 7, true);
        assert_eq!(grant.write(8, &[0; 8]), 8);
        grant.for_operations().write(8, &[0; 8]);
        assert!(grant.has(&[(8, 8)]) && grant.read(8, &mut [0; 8]) == 8);
        let older = agent.grant(8, false);
        assert_eq!(older.read(8, &mut [0; 8]), 8);
        let expected =
            [(Kind::Write, 7), (Kind::Write, 0), (Kind::Has, 7), (Kind::Read, 7), (Kind::Read, 0)];
        assert_eq!(*locked(&asked), expected);
        drop((grant, older, agent));
        other.join().unwrap();
    }

    // tests [RMR-12]
    #[test]
    fn what_nothing_uses_any_more_is_given_back() {
        let (end, agent) = agent();
        let memory = |number| agent.grant(number, true).for_operations();
        let (first, second) = (memory(7), memory(8));
        let also = first.guarded(Arc::new(()));
        drop(first);
        drop(second);
        let numbers = |(request, payload): (Request, Vec<u8>)| {
            let numbers =
                payload.chunks_exact(8).map(|n| u64::from_ne_bytes(n.try_into().unwrap()));
            (request.kind, numbers.collect::<Vec<_>>())
        };
        assert_eq!(numbers(next(&end)), (Kind::Forget, vec![7]));
        assert_eq!(numbers(next(&end)), (Kind::Forget, vec![8]));
        drop(also);
        // What there was no room for is told later.
        let held: Vec<_> = (0..5000).map(memory).collect();
        drop(held);
        let mut told = Vec::new();
        rustix::io::ioctl_fionbio(&end, true).unwrap();
        while told.len() < 5000 {
            let mut message = vec![0; REQUEST_HEAD + BYTES_MAX];
            match recv(&end, &mut message[..], RecvFlags::empty()) {
                Ok((len, _)) => {
                    let (request, payload) = Request::parse(&message[..len]).expect("a request");
                    told.extend(numbers((request, payload.to_vec())).1);
                }
                Err(SystemErrno::AGAIN) => agent.tell(&mut locked(&agent.given_back)),
                Err(error) => panic!("{error} after {}", told.len()),
            }
        }
        assert!(told.iter().copied().eq(0..5000));
    }
}
