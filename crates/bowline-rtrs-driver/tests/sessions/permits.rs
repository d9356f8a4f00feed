//! Permits that are waited for, by threads and by tasks.

use crate::common;
use std::cell::Cell;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use crate::common::tasks::{Woken, block_on, run};
use crate::common::{PATIENCE, Pair, at, eventually, write_and_read};
use bowline_rtrs_driver::client::{GetPermit, Permit, PermitKind, Session, Wait};
use bowline_rtrs_driver::server::ServerConfig;
use bowline_rtrs_driver::{Dir, Errno, Geometry};

/// Permits for IO of the sessions here.
const COUNT: usize = 3;

/// A server with `COUNT` chunks, and one for service messages.
fn few(net: u8) -> (Pair, Arc<Session>) {
    let geometry = Geometry::new(COUNT as u16 + 1, 28_672, 4096).unwrap();
    let pair = Pair::new(net, 1, ServerConfig { geometry, ..ServerConfig::default() });
    let session = pair.session(1);
    (pair, session)
}

fn take_all(session: &Session) -> Vec<Permit> {
    let permits: Vec<_> =
        std::iter::from_fn(|| session.get_permit(PermitKind::Io, Wait::No)).collect();
    assert_eq!(permits.len(), COUNT);
    permits
}

/// Many more tasks than permits, on one thread: no permit is lost, no task is passed over, and
/// nothing blocks.
#[test]
fn more_tasks_than_permits_take_turns() {
    const TASKS: usize = 300;
    const ROUNDS: usize = 4;
    let (_pair, session) = few(230);
    let region = session.region(TASKS * 2048).unwrap();
    let rounds = Cell::new([0; TASKS]);
    let task = |n: usize| {
        let (session, region, rounds) = (&session, &region, &rounds);
        let (out, back) = (region.piece(n * 2048, 1024), region.piece(n * 2048 + 1024, 1024));
        async move {
            for round in 0..ROUNDS {
                let pattern = [n as u8 ^ round as u8; 1024];
                region.buffer().write(n * 2048, &pattern);
                for (dir, piece) in [(Dir::Write, out), (Dir::Read, back)] {
                    let permit = session.get_permit_async(PermitKind::Io).await.unwrap();
                    let call = session.call_async(dir, &permit, &at(n * 1024), &[piece]);
                    // Some tasks put their permit back at once, others later.
                    if n.is_multiple_of(2) {
                        session.put_permit(permit);
                        call.await.unwrap();
                    } else {
                        call.await.unwrap();
                        session.put_permit(permit);
                    }
                }
                assert_eq!(common::bytes(region, n * 2048 + 1024, 1024), pattern);
                let mut all = rounds.get();
                all[n] = round + 1;
                rounds.set(all);
                let (least, most) = (all.iter().min().unwrap(), all.iter().max().unwrap());
                assert!(most - least <= 2, "task {n} of {TASKS} is ahead: {all:?}");
            }
        }
    };
    run((0..TASKS).map(|n| Box::pin(task(n)) as Pin<Box<_>>).collect());
    take_all(&session).into_iter().for_each(|permit| session.put_permit(permit));
}

/// [RS-26]: tasks and threads get permits in the order in which they asked, and none is overtaken.
#[test]
fn tasks_and_threads_wait_in_one_line() {
    let (pair, session) = few(231);
    let mut held = take_all(&session);
    let mut put = || session.put_permit(held.pop().unwrap());
    let [first, third] = [(); 2].map(|()| Arc::new(Woken::default()));
    let (mut a, mut c) =
        (session.get_permit_async(PermitKind::Io), session.get_permit_async(PermitKind::Io));
    assert_eq!(first.poll(&mut a), None);
    let got = AtomicBool::new(false);
    let hand_overs = || pair.client_engine.stats().hand_overs;
    let before = hand_overs();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let permit = session.get_permit(PermitKind::Io, Wait::Forever).unwrap();
            got.store(true, SeqCst);
            session.put_permit(permit);
        });
        // A waiting task makes sure that a thread takes completions.
        eventually("the thread waits", || hand_overs() > before);
        assert_eq!(third.poll(&mut c), None);
        put();
        eventually("the first is woken", || first.count() == 1);
        assert_eq!(session.get_permit(PermitKind::Io, Wait::No), None, "it is the first's");
        std::thread::sleep(Duration::from_millis(20));
        assert!(!got.load(SeqCst) && third.count() == 0);
        let permit = first.poll(&mut a).unwrap().unwrap();
        // The thread gets it, and the permit it puts back goes to the third.
        put();
        eventually("the thread has one, then the task", || got.load(SeqCst) && third.count() == 1);
        session.put_permit(permit);
    });
    session.put_permit(third.poll(&mut c).unwrap().unwrap());
    put();
    take_all(&session).into_iter().for_each(|permit| session.put_permit(permit));
}

/// In whatever state a future is dropped, the next one that waits gets the permit.
#[test]
fn a_future_that_is_dropped_passes_its_permit_on() {
    let (_pair, session) = few(232);
    let mut held = take_all(&session);
    let wakers = [(); 4].map(|()| Arc::new(Woken::default()));
    let mut waits = [(); 4].map(|()| Some(session.get_permit_async(PermitKind::Io)));
    for (waker, wait) in wakers.iter().zip(&mut waits) {
        assert_eq!(waker.poll(wait.as_mut().unwrap()), None);
    }
    let counts = || wakers.each_ref().map(|waker| waker.count());
    // A future that was never polled, and one that waits.
    drop(session.get_permit_async(PermitKind::Io));
    waits[1] = None;
    session.put_permit(held.pop().unwrap());
    assert_eq!(counts(), [1, 0, 0, 0]);
    // One that was woken.
    waits[0] = None;
    assert_eq!(counts(), [1, 0, 1, 0]);
    let permit = wakers[2].poll(waits[2].as_mut().unwrap()).unwrap().unwrap();
    // A future that is ready, and polled again.
    assert_eq!(wakers[2].poll(waits[2].as_mut().unwrap()), None);
    waits[2] = None;
    assert_eq!(counts(), [1, 0, 1, 0]);
    session.put_permit(permit);
    assert_eq!(counts(), [1, 0, 1, 1]);
    waits[3] = None;
    held.drain(..).for_each(|permit| session.put_permit(permit));
    take_all(&session).into_iter().for_each(|permit| session.put_permit(permit));
}

struct Bomb;

impl Wake for Bomb {
    fn wake(self: Arc<Self>) {
        panic!("planted: a waker panics");
    }
}

/// A task that moves to another executor is woken there; a waker that panics does not affect
/// others.
#[test]
fn the_last_waker_counts() {
    let (_pair, session) = few(233);
    let mut held = take_all(&session);
    let [former, latter, other] = [(); 3].map(|()| Arc::new(Woken::default()));
    let mut moving = session.get_permit_async(PermitKind::Io);
    let mut bomb = session.get_permit_async(PermitKind::Io);
    let mut last = session.get_permit_async(PermitKind::Io);
    let waker = Waker::from(Arc::new(Bomb));
    assert!(Pin::new(&mut bomb).poll(&mut Context::from_waker(&waker)).is_pending());
    assert_eq!(former.poll(&mut moving), None);
    assert_eq!(other.poll(&mut last), None);
    assert_eq!(latter.poll(&mut moving), None);
    held.drain(..).for_each(|permit| session.put_permit(permit));
    assert_eq!([&former, &latter, &other].map(|waker| waker.count()), [0, 1, 1]);
    for wait in [bomb, moving, last] {
        held.push(block_on(wait).unwrap());
    }
    held.drain(..).for_each(|permit| session.put_permit(permit));
}

/// [RT-37]: the permit reserved for service messages goes to tasks that wait for one of that kind,
/// and they do not wait behind IO.
#[test]
fn service_messages_have_a_line_of_their_own() {
    let (_pair, session) = few(234);
    let mut held = take_all(&session);
    let [io, service] = [(); 2].map(|()| Arc::new(Woken::default()));
    let mut for_io = session.get_permit_async(PermitKind::Io);
    assert_eq!(io.poll(&mut for_io), None);
    let kept = block_on(session.get_permit_async(PermitKind::Service)).unwrap();
    let mut for_service = session.get_permit_async(PermitKind::Service);
    assert_eq!(service.poll(&mut for_service), None);
    session.put_permit(kept);
    assert_eq!((io.count(), service.count()), (0, 1));
    let kept = service.poll(&mut for_service).unwrap().unwrap();
    assert_eq!(kept.kind(), PermitKind::Service);
    session.put_permit(kept);
    assert_eq!(io.count(), 0, "not for IO");
    session.put_permit(held.pop().unwrap());
    assert_eq!(io.count(), 1);
    held.push(io.poll(&mut for_io).unwrap().unwrap());
    held.drain(..).for_each(|permit| session.put_permit(permit));
}

/// Without a permit reserved for messages, the first one that asked gets the next permit.
#[test]
fn without_a_kept_permit_all_wait_in_one_order() {
    let geometry = Geometry::new(1, 28_672, 4096).unwrap();
    let pair = Pair::new(242, 1, ServerConfig { geometry, ..ServerConfig::default() });
    let session = pair.session(1);
    let mut permit = session.get_permit(PermitKind::Io, Wait::No).unwrap();
    let kinds = [PermitKind::Service, PermitKind::Io, PermitKind::Service, PermitKind::Io];
    let mut line = kinds.map(|kind| (session.get_permit_async(kind), Arc::new(Woken::default())));
    for (future, woken) in &mut line {
        assert_eq!(woken.poll(future), None);
    }
    for (future, woken) in &mut line {
        session.put_permit(permit);
        assert_eq!(woken.count(), 1);
        permit = woken.poll(future).unwrap().unwrap();
    }
    session.put_permit(permit);
}

/// Takes its permit as soon as it is called, and puts it back at once.
struct Brief {
    session: Arc<Session>,
    future: Mutex<GetPermit>,
    done: Arc<AtomicUsize>,
}

impl Brief {
    fn look(self: &Arc<Self>) {
        let waker = Waker::from(Arc::clone(self));
        let looked =
            Pin::new(&mut *self.future.lock().unwrap()).poll(&mut Context::from_waker(&waker));
        if let Poll::Ready(permit) = looked {
            self.session.put_permit(permit.unwrap());
            self.done.fetch_add(1, SeqCst);
        }
    }
}

impl Wake for Brief {
    fn wake(self: Arc<Self>) {
        self.look();
    }
}

/// Each of many programs of callbacks gives its permit to the next from within its callback.
#[test]
fn a_row_of_callbacks_is_no_recursion() {
    const COUNT: usize = 20_000;
    let (_pair, session) = few(243);
    let mut held = take_all(&session);
    let done = Arc::new(AtomicUsize::new(0));
    for _ in 0..COUNT {
        let future = Mutex::new(session.get_permit_async(PermitKind::Io));
        let (session, done) = (Arc::clone(&session), Arc::clone(&done));
        Arc::new(Brief { session, future, done }).look();
    }
    let first = held.pop().unwrap();
    let of_thread = Arc::clone(&session);
    let small = std::thread::Builder::new().stack_size(256 << 10);
    small.spawn(move || of_thread.put_permit(first)).unwrap().join().unwrap();
    assert_eq!(done.load(SeqCst), COUNT);
    held.drain(..).for_each(|permit| session.put_permit(permit));
}

/// [RS-25]: waiting tasks are told as soon as the session is being closed, even while the close
/// waits for permits that they hold. A permit that was granted and not taken yet does not delay the
/// close.
#[test]
fn a_session_that_is_closed_ends_those_who_wait() {
    let (_pair, session) = few(235);
    let mut held = take_all(&session);
    let woken = Arc::new(Woken::default());
    let mut never_looks = session.get_permit_async(PermitKind::Io);
    assert_eq!(woken.poll(&mut never_looks), None);
    session.put_permit(held.pop().unwrap());
    assert_eq!(woken.count(), 1);
    let ended = AtomicUsize::new(0);
    let closed = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let refused = block_on(session.get_permit_async(PermitKind::Io)).unwrap_err();
                assert_eq!(refused.errno(), Errno::ENODEV);
                ended.fetch_add(1, SeqCst);
            });
            scope.spawn(|| {
                assert_eq!(session.get_permit(PermitKind::Io, Wait::Forever), None);
                ended.fetch_add(1, SeqCst);
            });
        }
        std::thread::sleep(Duration::from_millis(100));
        assert_eq!(ended.load(SeqCst), 0);
        scope.spawn(|| {
            Arc::clone(&session).close();
            closed.store(true, SeqCst);
        });
        eventually("all are told", || ended.load(SeqCst) == 4);
        assert!(!closed.load(SeqCst), "permits are out still");
        let late = block_on(session.get_permit_async(PermitKind::Io)).unwrap_err();
        assert_eq!(late.errno(), Errno::ENODEV);
        held.drain(..).for_each(|permit| session.put_permit(permit));
        eventually("it is closed", || closed.load(SeqCst));
    });
    let late = block_on(never_looks).unwrap_err();
    assert_eq!(late.errno(), Errno::ENODEV);
}

/// The drop of a session, and the loss of its devices, end the waits as well.
#[test]
fn nobody_waits_for_a_session_that_is_gone() {
    let (pair, session) = few(236);
    let held = take_all(&session);
    let wait = session.get_permit_async(PermitKind::Io);
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| block_on(wait));
        std::thread::sleep(Duration::from_millis(100));
        drop(session);
        assert_eq!(waiter.join().unwrap().unwrap_err().errno(), Errno::ENODEV);
    });
    drop(held);
    let session = Session::open(&pair.client_engine, pair.builder("other", 1)).unwrap();
    let held = take_all(&session);
    let wait = session.get_permit_async(PermitKind::Io);
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| block_on(wait));
        std::thread::sleep(Duration::from_millis(100));
        pair.client_device.close();
        assert_eq!(waiter.join().unwrap().unwrap_err().errno(), Errno::ENODEV);
    });
    drop(held);
}

/// The same, at any moment: no waiting task is forgotten.
#[test]
fn sessions_are_closed_under_load() {
    let geometry = Geometry::new(COUNT as u16 + 1, 28_672, 4096).unwrap();
    let pair = Pair::new(238, 1, ServerConfig { geometry, ..ServerConfig::default() });
    for round in 0..20 {
        let session = pair.session(1);
        std::thread::scope(|scope| {
            for thread in 0..6 {
                let session = &session;
                scope.spawn(move || {
                    loop {
                        let permit = if thread < 3 {
                            block_on(session.get_permit_async(PermitKind::Io)).ok()
                        } else {
                            session.get_permit(PermitKind::Io, Wait::Forever)
                        };
                        let Some(permit) = permit else { break };
                        drop(session.call_async(Dir::Read, &permit, &at(0), &[]));
                        session.put_permit(permit);
                    }
                });
            }
            std::thread::sleep(Duration::from_micros(round * 300));
            Arc::clone(&session).close();
        });
    }
}

struct Xorshift(u64);

impl Xorshift {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 20) % limit
    }
}

/// Threads that take, await, block on, give up and hold permits at random: each that waits to the
/// end gets one, and none is lost.
#[test]
fn no_permit_and_no_turn_is_lost() {
    const THREADS: u64 = 8;
    const ROUNDS: usize = 10_000;
    let (_pair, session) = few(237);
    std::thread::scope(|scope| {
        for seed in 1..=THREADS {
            let session = &session;
            scope.spawn(move || {
                let mut random = Xorshift(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
                for round in 0..ROUNDS {
                    let kind = match random.below(8) {
                        0 => PermitKind::Service,
                        1 => PermitKind::Polled,
                        _ => PermitKind::Io,
                    };
                    let mut wait = session.get_permit_async(kind);
                    let woken = Arc::new(Woken::default());
                    let permit = match random.below(7) {
                        0 => session.get_permit(kind, Wait::No),
                        1 => {
                            let limit = Duration::from_micros(random.below(200));
                            session.get_permit(kind, Wait::For(limit))
                        }
                        2 => session.get_permit(kind, Wait::Forever),
                        // Polled several times, and dropped.
                        3 => (0..random.below(3)).find_map(|_| woken.poll(&mut wait)?.ok()),
                        // Dropped when woken, or ready.
                        4 => woken.poll(&mut wait).map(Result::unwrap).or_else(|| {
                            let start = Instant::now();
                            while woken.count() == 0 {
                                assert!(start.elapsed() < PATIENCE, "never woken");
                                std::thread::yield_now();
                            }
                            None
                        }),
                        _ => Some(block_on(&mut wait).unwrap()),
                    };
                    drop(wait);
                    let Some(permit) = permit else { continue };
                    if random.below(4) == 0 {
                        std::thread::yield_now();
                    }
                    // Some come back with a completion.
                    if round.is_multiple_of(8) && kind == PermitKind::Io {
                        drop(session.call_async(Dir::Read, &permit, &at(0), &[]));
                    }
                    session.put_permit(permit);
                }
            });
        }
    });
    eventually("all requests end", || session.inflight() == 0);
    let held = take_all(&session);
    let kept = session.get_permit(PermitKind::Service, Wait::No).unwrap();
    held.into_iter().chain([kept]).for_each(|permit| session.put_permit(permit));
    write_and_read(&session, 0, 4096);
}
