//! Requests between two devices on 127.0.0.0/8.

use std::os::fd::AsFd;
use std::sync::{Arc, Mutex};

use crate::common::{Pair, STORE, at, bytes, eventually, ip, write_and_read};
use bowline_rtrs_driver::client::{
    Completed, Completer, Done, PermitKind, Req, Session, SessionBuilder, Wait,
};
use bowline_rtrs_driver::server::{LinkEv, ServerConfig};
use bowline_rtrs_driver::{Dir, Errno};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

fn config(always_invalidate: bool) -> ServerConfig {
    ServerConfig { always_invalidate, ..ServerConfig::default() }
}

fn session(pair: &Pair, paths: u8, counts_keys: bool) -> Arc<Session> {
    let builder = pair.builder("test", paths).counts_keys(counts_keys);
    Session::open(&pair.client_engine, builder).unwrap()
}

/// [RT-39], [RT-44], [RT-47], [RT-50], [RT-99]: without refresh of keys, with keys that are counted
/// and with keys that are told, over one path and two.
#[test]
fn what_is_written_is_read() {
    for (net, paths, refresh, counts) in [
        (1, 1, true, true),
        (2, 1, false, true),
        (3, 2, true, true),
        (4, 2, false, false),
        (219, 1, true, false),
        (220, 2, true, false),
    ] {
        let pair = Pair::new(net, paths, config(refresh));
        let session = session(&pair, paths, counts);
        let attrs = session.attrs().unwrap();
        assert_eq!((attrs.queue_depth, attrs.max_io), (511, 126_976));
        for len in [0, 1, 511, 4096, 4097, 5000, 12_800, 65_536, 125_000, attrs.max_io as usize] {
            write_and_read(&session, 4096 * 3 + len, len);
        }
        let (reads, writes): (Vec<_>, Vec<_>) =
            session.paths().iter().map(|path| (path.stats.reads, path.stats.writes)).unzip();
        assert_eq!((reads.iter().sum::<u64>(), writes.iter().sum::<u64>()), (10, 10));
        session.close();
        eventually("the server hears of it", || {
            matches!(pair.store.links.lock().unwrap()[..], [
                LinkEv::Connected { session: a, .. },
                LinkEv::Disconnected { session: b }
            ] if a == b)
        });
    }
}

struct Count(Mutex<Vec<Completed>>);

impl Completer for Count {
    fn completed(&self, done: &[Completed]) {
        self.0.lock().unwrap().extend_from_slice(done);
    }
}

/// Many requests at once, in batches; this thread and the engine's both take completions.
#[test]
fn many_requests_go_at_once() {
    let pair = Pair::new(5, 2, config(true));
    let session = pair.session(2);
    const COUNT: usize = 200;
    let region = session.region(2 * COUNT * 512).unwrap();
    let pattern: Vec<u8> = (0..COUNT * 512).map(|i| (i / 512) as u8 ^ i as u8).collect();
    region.buffer().write(0, &pattern);
    let done = Arc::new(Count(Mutex::default()));
    let permits: Vec<_> =
        (0..COUNT).map(|_| session.get_permit(PermitKind::Io, Wait::No).unwrap()).collect();
    for (dir, base) in [(Dir::Write, 0), (Dir::Read, COUNT * 512)] {
        let usr: Vec<_> = (0..COUNT).map(|n| at(n * 512)).collect();
        let data: Vec<_> = (0..COUNT).map(|n| [region.piece(base + n * 512, 512)]).collect();
        let mut requests = permits.iter().enumerate().map(|(n, permit)| Req {
            dir,
            permit,
            usr: &usr[n],
            data: &data[n],
            done: Done { to: Arc::clone(&done) as _, tag: n as u64 },
        });
        assert_eq!(session.request_batch(&mut requests).unwrap(), COUNT);
        eventually("all end", || {
            if dir == Dir::Write {
                session.wait(session.ended(), Some(std::time::Duration::from_millis(10)));
            }
            done.0.lock().unwrap().len() == COUNT
        });
        let mut all = std::mem::take(&mut *done.0.lock().unwrap());
        all.sort_by_key(|done| done.tag);
        assert!(all.iter().zip(0..).all(|(done, n)| (done.tag, done.errno) == (n, 0)));
    }
    assert_eq!(bytes(&region, COUNT * 512, COUNT * 512), pattern);
    permits.into_iter().for_each(|permit| session.put_permit(permit));
}

/// Threads that wait for their own requests take each other's completions. A request that completes
/// between a program's poll and its wait does not block the wait.
#[test]
fn what_has_ended_already_is_not_waited_for() {
    let pair = Pair::new(19, 1, config(true));
    let session = pair.session(1);
    let permit = session.get_permit(PermitKind::Io, Wait::No).unwrap();
    let region = session.region(4096).unwrap();
    let done = Arc::new(Count(Mutex::default()));
    let seen = session.ended();
    let (usr, data) = (at(0), [region.piece(0, 4096)]);
    let completer = Done { to: Arc::clone(&done) as _, tag: 0 };
    let req = Req { dir: Dir::Write, permit: &permit, usr: &usr, data: &data, done: completer };
    session.request_batch(&mut std::iter::once(req)).unwrap();
    // Another thread takes the completion, as the background thread may.
    std::thread::scope(|scope| {
        scope.spawn(|| {
            eventually("it ends", || {
                session.poll();
                done.0.lock().unwrap().len() == 1
            });
        });
    });
    eventually("it is counted", || session.ended() == seen + 1);
    let start = std::time::Instant::now();
    assert!(session.wait(seen, Some(std::time::Duration::from_secs(20))));
    assert!(start.elapsed() < std::time::Duration::from_secs(10));
    // No further request completes.
    assert!(!session.wait(seen + 1, Some(std::time::Duration::from_millis(20))));
    session.put_permit(permit);
}

/// A thread that serves a client as well takes the ends of its requests itself, from the background
/// thread too, and is woken by its client.
#[test]
fn a_thread_takes_turns_with_its_client() {
    let pair = Pair::new(20, 1, config(true));
    let session = pair.session(1);
    let permit = session.get_permit(PermitKind::Io, Wait::No).unwrap();
    let region = session.region(4096).unwrap();
    let done = Arc::new(Count(Mutex::default()));
    let (mut near, far) = std::os::unix::net::UnixStream::pair().unwrap();
    let mut own = 0;
    for round in 0..200 {
        let (usr, data) = (at(0), [region.piece(0, 4096)]);
        let completer = Done { to: Arc::clone(&done) as _, tag: round };
        let req = Req { dir: Dir::Write, permit: &permit, usr: &usr, data: &data, done: completer };
        session.request_batch(&mut std::iter::once(req)).unwrap();
        let is_waiting = || done.0.lock().unwrap().len() as u64 == round;
        eventually("it ends", || {
            own += session.take_turn(far.as_fd(), is_waiting).unwrap_or(0);
            !is_waiting()
        });
        session.leave();
    }
    assert!(own > 0, "none of 200 in turns");
    // The client ends a turn in which nothing else comes.
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(std::time::Duration::from_millis(5));
            std::io::Write::write_all(&mut near, b"x").unwrap();
        });
        eventually("a turn", || session.take_turn(far.as_fd(), || true) == Some(0));
    });
    assert_eq!(std::io::Read::read(&mut &far, &mut [0; 2]).unwrap(), 1);
    session.leave();
    session.put_permit(permit);
}

#[test]
fn threads_wait_for_their_own_requests() {
    let pair = Pair::new(6, 1, config(true));
    let session = pair.session(1);
    std::thread::scope(|scope| {
        for thread in 0..6 {
            let session = &session;
            scope.spawn(move || {
                for n in 0..40 {
                    write_and_read(session, thread * 65_536 + n * 8, 4096);
                }
            });
        }
    });
}

/// [RT-45], [RT-50], [RT-99]: an error affects that request only, and renews the key of its chunk.
#[test]
fn errors_come_back_with_their_requests() {
    for (net, counts_keys) in [(7, true), (221, false)] {
        let pair = Pair::new(net, 1, config(true));
        errors_come_back(&session(&pair, 1, counts_keys));
    }
}

fn errors_come_back(session: &Session) {
    let permit = session.get_permit(PermitKind::Io, Wait::No).unwrap();
    let region = session.region(8192).unwrap();
    let call =
        |dir, usr: &[u8], data: &[_]| session.call(dir, &permit, usr, data).map_err(|e| e.errno());
    let piece = [region.piece(0, 8192)];
    assert_eq!(call(Dir::Write, &at(STORE), &piece), Err(Errno::EIO));
    assert_eq!(call(Dir::Read, &at(STORE), &piece), Err(Errno::EIO));
    assert_eq!(call(Dir::Read, b"short", &piece), Err(Errno::EINVAL));
    assert_eq!(call(Dir::Read, &[0; 5000], &piece), Err(Errno::EMSGSIZE));
    assert_eq!(call(Dir::Read, &at(0), &[region.piece(1, 8192)]), Err(Errno::EINVAL));
    assert_eq!(call(Dir::Read, &at(0), &piece), Ok(()));
    session.put_permit(permit);
    write_and_read(session, 0, 4096);
}

/// [RT-98]: memory is released by the heartbeats of a session that has nothing else to send.
#[test]
fn memory_that_is_dropped_is_released() {
    for (net, refresh) in [(87, true), (88, false)] {
        let pair = Pair::new(net, 1, config(refresh));
        let session = pair.session(1);
        let before = pair.client_device.in_use().mrs;
        write_and_read(&session, 0, 4096);
        eventually("it is", || pair.client_device.in_use().mrs == before);
        assert_eq!(session.paths()[0].stats.reconnects, 0);
        write_and_read(&session, 0, 4096);
    }
}

/// [RS-24]: a session opens with all paths or with none, and reports the reason.
#[test]
fn a_session_that_cannot_be_opened_leaves_nothing() {
    let pair = Pair::new(8, 1, config(true));
    let open = |builder: SessionBuilder| {
        Session::open(&pair.client_engine, builder).map(drop).map_err(|error| error.errno())
    };
    let nowhere = pair.builder("a", 1).port(4321);
    assert_eq!(open(nowhere), Err(Errno::ECONNRESET), "nobody listens");
    let stranger = SessionBuilder::new("a").unwrap().path(Some(ip(8, 77)), ip(8, 101));
    assert_eq!(open(stranger), Err(Errno::EADDRNOTAVAIL));
    assert_eq!(open(SessionBuilder::new("a").unwrap()), Err(Errno::EINVAL));
    assert_eq!(SessionBuilder::new("a/b").map(drop).map_err(|e| e.errno()), Err(Errno::EINVAL));
    let both = pair.builder("a", 1).path(Some(ip(8, 1)), ip(8, 101));
    assert_eq!(open(both), Err(Errno::EEXIST), "the same path twice");
    eventually("nothing is left", || {
        let [a, b] = [&pair.client_device, &pair.server_device].map(|device| device.in_use());
        a.qps + b.qps + a.mrs + b.mrs == 0
    });
}

/// [RS-41]: requests of the processor that takes their completions have not migrated, those of
/// another have.
#[test]
fn completions_are_counted_on_the_processor_that_takes_them() {
    let allowed = sched_getaffinity(None).unwrap();
    let mut processors = (0..CpuSet::MAX_CPU).filter(|&cpu| allowed.is_set(cpu));
    let (Some(other), Some(here)) = (processors.next(), processors.next_back()) else {
        eprintln!("skipped: this machine has one processor");
        return;
    };
    // A separate thread, since all threads it starts stay on its processor too.
    let pinned = std::thread::spawn(move || {
        let mut only = CpuSet::new();
        only.set(here);
        sched_setaffinity(None, &only).unwrap();
        let pair = Pair::new(214, 1, ServerConfig::default());
        let session = pair.session(1);
        let run = |cpu: usize| {
            let permit = session.get_permit_on(PermitKind::Io, Wait::Forever, cpu as u16).unwrap();
            for _ in 0..7 {
                session.call(Dir::Read, &permit, &at(0), &[]).unwrap();
            }
            session.put_permit(permit);
            let stats = session.paths().remove(0).stats;
            (stats.migration_from, stats.migration_to)
        };
        assert_eq!(run(here), (vec![], vec![]));
        let (from, to) = run(other);
        assert_eq!((from.get(other), from.iter().sum()), (Some(&7), 7));
        assert_eq!((to.get(here), to.iter().sum()), (Some(&7), 7));
    });
    pinned.join().unwrap();
}

/// User messages may be as long as the session says, and no longer than the server accepts.
#[test]
fn user_messages_are_as_long_as_the_session_has_room_for() {
    let pair = Pair::new(209, 1, config(true));
    let long_enough = pair.server.config().geometry.max_hdr() as u16;
    for (max_usr, most) in
        [(0, 40), (512, 552), (3000, 3048), (long_enough, 4072), (u16::MAX, 4072)]
    {
        let builder = pair.builder("usr", 1).max_usr(max_usr);
        let session = Session::open(&pair.client_engine, builder).unwrap();
        assert_eq!(session.attrs().unwrap().max_hdr, most + 24, "{max_usr}");
        let permit = session.get_permit(PermitKind::Io, Wait::Forever).unwrap();
        let region = session.region(8).unwrap();
        let say = |len: u32| {
            let usr = vec![7; len as usize];
            session.call(Dir::Read, &permit, &usr, &[region.piece(0, 8)]).unwrap_err().errno()
        };
        // The store takes messages of 8 bytes only, and says so.
        assert_eq!(say(most), Errno::EINVAL, "{max_usr}: it was there");
        assert_eq!(say(most + 1), Errno::EMSGSIZE, "{max_usr}");
        assert_eq!(say(70_000), Errno::EMSGSIZE, "{max_usr}");
        drop(permit);
        session.close();
    }
    let session = pair.session(1);
    assert_eq!(session.attrs().unwrap().max_hdr, 576, "as it is if nothing is said");
}
