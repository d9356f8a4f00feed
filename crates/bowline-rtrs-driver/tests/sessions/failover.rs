//! Paths that are lost, cut and closed under load, and sessions and servers that end.

use crate::common;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::{Duration, Instant};

use crate::common::load::Load;
use crate::common::tasks::block_on;
use crate::common::{PATIENCE, Pair, Slow, at, eventually, hasty, ip, write_and_read};
use bowline_rtrs_driver::client::{
    LinkEv, PathEv, PathState, PermitKind, Session, SessionBuilder, Wait,
};
use bowline_rtrs_driver::server::{Server, ServerConfig};
use bowline_rtrs_driver::{Dir, Errno, HbConfig, PORT, PathId, Policy};

fn state(session: &Session, path: PathId) -> Option<PathState> {
    session.paths().iter().find(|view| view.id == path).map(|view| view.state)
}

/// [RS-8], [RT-88], [RT-91]: requests of a cut path complete on the other one, and the path is
/// reconnected.
#[test]
fn a_cut_path_costs_no_request() {
    let pair = Pair::with(50, 2, ServerConfig::default(), hasty);
    let heartbeat = HbConfig { probe_interval: Duration::from_millis(200), ..HbConfig::default() };
    let builder = pair.builder("cut", 2).policy(Policy::RoundRobin).heartbeat(heartbeat);
    let session = Session::open(&pair.client_engine, builder).unwrap();
    let paths: Vec<PathId> = session.paths().iter().map(|view| view.id).collect();
    let load = Load::new(&session, Dir::Write, 16, 4096);
    for (cut, other) in [(0, 1), (1, 0)] {
        load.start(u64::MAX);
        std::thread::sleep(Duration::from_millis(50));
        pair.client_device.cut(ip(50, cut as u8 + 1), None, true);
        eventually("the loss is noticed", || {
            state(&session, paths[cut]) == Some(PathState::Reconnecting)
        });
        assert_eq!(state(&session, paths[other]), Some(PathState::Connected));
        let before = load.done.load(SeqCst);
        eventually("it goes on", || load.done.load(SeqCst) > before + 100);
        pair.client_device.cut(ip(50, cut as u8 + 1), None, false);
        eventually("the path comes back", || {
            state(&session, paths[cut]) == Some(PathState::Connected)
        });
        load.end();
    }
    assert_eq!(*load.errors.lock().unwrap(), Vec::<i32>::new());
    let failovers: u64 = session.paths().iter().map(|view| view.stats.failovers).sum();
    assert!(failovers > 0, "requests have moved");
    drop(load);
    write_and_read(&session, 0, 65_536);
}

/// [RS-16], [RS-17]: the program is told of each loss and reconnection of a path, in order with
/// those of the whole session; a panic of its callback is contained.
#[test]
fn each_path_is_told_of() {
    const NET: u8 = 208;
    let pair = Pair::with(NET, 2, ServerConfig::default(), hasty);
    let (sender, told) = std::sync::mpsc::channel();
    let on_link = {
        let sender = sender.clone();
        move |event| sender.send(Err(event)).unwrap()
    };
    let on_path = move |event: PathEv| {
        let peer = if event.src.ip() == ip(NET, 1) { 101 } else { 102 };
        assert_eq!(event.dst, (ip(NET, peer), PORT).into());
        sender.send(Ok((event.id, event.state))).unwrap();
        assert_ne!(event.state, PathState::Connected, "planted: who is told of a path panics");
    };
    let heartbeat = HbConfig { probe_interval: Duration::from_millis(200), ..HbConfig::default() };
    let builder = pair.builder("told", 2).heartbeat(heartbeat).on_link(on_link).on_path(on_path);
    let session = Session::open(&pair.client_engine, builder).unwrap();
    let [first, second] = [0, 1].map(|at| session.paths()[at].id);
    let next = || told.recv_timeout(PATIENCE).unwrap();
    let until = |wanted| while next() != wanted {};
    until(Ok((first, PathState::Connected)));
    until(Ok((second, PathState::Connected)));
    let cut = |host, on| pair.client_device.cut(ip(NET, host), None, on);
    cut(1, true);
    assert_eq!(next(), Ok((first, PathState::Reconnecting)));
    cut(1, false);
    until(Ok((first, PathState::Connected)));
    session.disconnect_path(first).unwrap();
    let closed = [PathState::Closing, PathState::Closed].map(|state| Ok((first, state)));
    assert_eq!([next(), next()], closed);
    cut(2, true);
    assert_eq!(next(), Ok((second, PathState::Reconnecting)));
    until(Err(LinkEv::Disconnected));
    cut(2, false);
    until(Ok((second, PathState::Connected)));
    assert_eq!(next(), Err(LinkEv::Reconnected));
    session.remove_path(first).unwrap();
    until(Ok((first, PathState::Dead)));
    session.close();
}

/// [RS-8], N3: the reset of a path by the server costs little time.
#[test]
fn a_reset_path_is_left_at_once() {
    let pair = Pair::new(51, 2, ServerConfig::default());
    let session = pair.session(2);
    let load = Load::new(&session, Dir::Read, 16, 4096);
    load.start(u64::MAX);
    std::thread::sleep(Duration::from_millis(100));
    let path = pair.server.sessions()[0].paths[0].path;
    pair.server.disconnect_path(path).unwrap();
    std::thread::sleep(Duration::from_millis(300));
    load.end();
    assert_eq!(*load.errors.lock().unwrap(), Vec::<i32>::new());
    let pause = load.finish(0, false);
    println!("longest pause {pause:?}");
    // 50 ms is the target; a silent path is given up after 3.8 s.
    assert!(pause < Duration::from_secs(3), "{pause:?}");
    eventually("both paths are back", || {
        session.paths().iter().all(|view| view.state == PathState::Connected)
    });
    drop(load);
}

/// [RS-34], [RS-37] to [RS-39]: paths are added and removed under load.
#[test]
fn paths_come_and_go() {
    let pair = Pair::with(52, 2, ServerConfig::default(), hasty);
    let session = Session::open(&pair.client_engine, pair.builder("go", 1)).unwrap();
    let load = Load::new(&session, Dir::Write, 8, 4096);
    load.start(u64::MAX);
    let second = session.add_path(Some(ip(52, 2)), ip(52, 102)).unwrap();
    let again = session.add_path(Some(ip(52, 2)), ip(52, 102));
    assert_eq!(again.unwrap_err().errno(), Errno::EEXIST);
    let first = session.paths()[0].id;
    session.disconnect_path(first).unwrap();
    assert_eq!(state(&session, first), Some(PathState::Closed));
    session.reconnect_path(first).unwrap();
    assert_eq!(state(&session, first), Some(PathState::Connected));
    session.remove_path(second).unwrap();
    assert_eq!(session.paths().len(), 1);
    for command in [Session::remove_path, Session::disconnect_path, Session::reconnect_path] {
        assert_eq!(command(&session, second).unwrap_err().errno(), Errno::ENOTCONN, "it is gone");
    }
    load.end();
    assert_eq!(*load.errors.lock().unwrap(), Vec::<i32>::new());
}

/// [RS-16], [RS-17]: the end and the return of the last path are told; requests fail in between.
#[test]
fn an_outage_is_told() {
    let pair = Pair::with(53, 1, ServerConfig::default(), hasty);
    let (lost, back) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let counts = (Arc::clone(&lost), Arc::clone(&back));
    let builder = pair.builder("outage", 1).on_link(move |event| {
        match event {
            LinkEv::Disconnected => counts.0.fetch_add(1, SeqCst),
            LinkEv::Reconnected => counts.1.fetch_add(1, SeqCst),
        };
    });
    let session = Session::open(&pair.client_engine, builder).unwrap();
    let permit = session.get_permit(PermitKind::Io, Wait::No).unwrap();
    pair.client_device.cut(ip(53, 1), None, true);
    let start = Instant::now();
    let failed = session.call(Dir::Read, &permit, &at(0), &[]).unwrap_err();
    assert_eq!(failed.errno(), Errno::ECONNABORTED);
    assert!(start.elapsed() < PATIENCE / 2);
    eventually("it is told", || lost.load(SeqCst) == 1);
    let refused = session.call(Dir::Read, &permit, &at(0), &[]).unwrap_err();
    assert_eq!(refused.errno(), Errno::ECONNABORTED);
    assert_eq!(session.attrs().unwrap_err().errno(), Errno::ECOMM);
    pair.client_device.cut(ip(53, 1), None, false);
    eventually("and told", || back.load(SeqCst) == 1);
    session.call(Dir::Read, &permit, &at(0), &[]).unwrap();
    session.put_permit(permit);
}

/// Nothing is left of sessions that were closed or dropped.
#[test]
fn a_hundred_sessions_leave_nothing() {
    let pair = Pair::new(54, 2, ServerConfig::default());
    for round in 0..100 {
        let paths = 1 + round % 2;
        let session = pair.session(paths);
        if round % 10 == 0 {
            write_and_read(&session, 0, 4096);
        }
        if round % 3 == 0 {
            drop(session);
            eventually("the server forgets it", || pair.server.sessions().is_empty());
        } else {
            session.close();
        }
    }
    eventually("nothing is left", || {
        let a = pair.client_device.in_use();
        let b = pair.server_device.in_use();
        let client = (a.pds, a.cqs, a.qps, a.mrs, a.events);
        // The remaining objects are the server's own.
        client == (0, 0, 0, 0, 0) && (b.pds, b.cqs, b.qps, b.mrs, b.events) == (1, 1, 0, 0, 0)
    });
    // The device objects of a session are released just before its end is reported.
    eventually("each end is told", || pair.store.links.lock().unwrap().len() >= 200);
    assert_eq!(pair.store.links.lock().unwrap().len(), 200);
    let Pair { server, server_device, .. } = pair;
    server.close();
    drop(server);
    eventually("nor of the server", || {
        let b = server_device.in_use();
        (b.pds, b.cqs, b.listeners) == (0, 0, 0)
    });
}

/// Futures need no runtime: a background thread takes the completions.
#[test]
fn requests_are_futures() {
    let pair = Pair::new(55, 1, ServerConfig::default());
    let session = pair.session(1);
    let region = session.region(8192).unwrap();
    region.buffer().write(0, b"from the future");
    let permit = session.get_permit(PermitKind::Io, Wait::No).unwrap();
    block_on(async {
        session.call_async(Dir::Write, &permit, &at(64), &[region.piece(0, 4096)]).await.unwrap();
        session.call_async(Dir::Read, &permit, &at(64), &[region.piece(4096, 4096)]).await.unwrap();
        let error = session.call_async(Dir::Read, &permit, b"", &[]).await.unwrap_err();
        assert_eq!(error.errno(), Errno::EINVAL);
    });
    assert_eq!(common::bytes(&region, 4096, 15), b"from the future");
    // A future that is dropped in flight: the permit is free when the request has ended, and not
    // before.
    drop(session.call_async(Dir::Read, &permit, &at(0), &[region.piece(4096, 4096)]));
    session.put_permit(permit);
    write_and_read(&session, 0, 4096);
}

/// Permits run out, are waited for and return; answers come from any thread, in any order.
#[test]
fn permits_are_waited_for() {
    let pair = Pair::new(56, 1, ServerConfig::default());
    pair.server.close();
    let handler = Arc::new(Slow::default());
    let config = ServerConfig {
        geometry: bowline_rtrs_driver::Geometry::new(4, 28_672, 4096).unwrap(),
        ..ServerConfig::default()
    };
    let at_address = [std::net::SocketAddr::new(ip(56, 101), PORT)];
    let server =
        Server::open(&pair.server_engine, &at_address, config, Arc::clone(&handler) as _).unwrap();
    let session = pair.session(1);
    let permits: Vec<_> =
        std::iter::from_fn(|| session.get_permit(PermitKind::Io, Wait::No)).collect();
    assert_eq!(permits.len(), 3, "one is kept for service messages");
    assert!(session.get_permit(PermitKind::Io, Wait::For(Duration::from_millis(20))).is_none());
    let calls: Vec<_> =
        permits.iter().map(|permit| session.call_async(Dir::Read, permit, &at(0), &[])).collect();
    permits.into_iter().for_each(|permit| session.put_permit(permit));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            eventually("all have come", || handler.0.lock().unwrap().len() == 3);
            std::thread::sleep(Duration::from_millis(20));
            for request in handler.0.lock().unwrap().drain(..).rev() {
                server.respond(&mut std::iter::once((request.op, Errno::ENOSPC.neg(), None)));
            }
        });
        let start = Instant::now();
        let permit = session.get_permit(PermitKind::Io, Wait::Forever).unwrap();
        assert!(start.elapsed() < PATIENCE);
        session.put_permit(permit);
    });
    for call in calls {
        assert_eq!(block_on(call).unwrap_err().errno(), Errno::ENOSPC);
    }
}

/// When a server or a device is closed, its clients notice.
#[test]
fn ends_are_clean() {
    let pair = Pair::with(57, 1, ServerConfig::default(), hasty);
    let session = pair.session(1);
    write_and_read(&session, 0, 4096);
    pair.server_engine.close();
    let permit = session.get_permit(PermitKind::Io, Wait::No).unwrap();
    eventually("the client knows", || session.call(Dir::Read, &permit, &at(0), &[]).is_err());
    session.put_permit(permit);
    pair.client_engine.close();
    assert!(session.attrs().is_err());
    assert!(session.region(4096).is_err());
    assert!(session.get_permit(PermitKind::Io, Wait::Forever).is_none());
    assert!(Session::open(&pair.client_engine, pair.builder("late", 1)).is_err());
}

/// [RT-91], [RS-48]: a session name that becomes free at the server soon, such as that of a killed
/// client, is waited for.
#[test]
fn a_name_that_becomes_free_is_waited_for() {
    let pair = Pair::with(61, 1, ServerConfig::default(), hasty);
    let first = Session::open(&pair.client_engine, pair.builder("same", 1)).unwrap();
    // Another program: here the name is free.
    let engine = common::engine(&common::device(&[ip(61, 2)]));
    let open = || {
        let builder = SessionBuilder::new("same").unwrap();
        Session::open(&engine, builder.path(Some(ip(61, 2)), ip(61, 101)))
    };
    assert_eq!(open().map(drop).map_err(|error| error.errno()), Err(Errno::ECONNRESET));
    let refused = || pair.server.counters().paths_refused;
    let before = refused();
    let second = std::thread::scope(|scope| {
        let second = scope.spawn(open);
        eventually("it is refused", || refused() > before);
        first.close();
        second.join().unwrap()
    });
    write_and_read(&second.unwrap(), 0, 4096);
}

/// [RS-24]: a name in use in this process is refused, for any server; one that becomes free soon is
/// waited for.
#[test]
fn a_name_is_used_once() {
    let pair = Pair::with(215, 1, ServerConfig::default(), hasty);
    let other = Pair::with(216, 1, ServerConfig::default(), hasty);
    let open = |server| {
        let builder = SessionBuilder::new("same").unwrap().path(Some(ip(215, 1)), server);
        Session::open(&pair.client_engine, builder).map_err(|error| error.errno())
    };
    let (server, elsewhere) = (ip(215, 101), ip(216, 101));
    let first = open(server).unwrap();
    assert_eq!(open(server).map(drop), Err(Errno::EEXIST));
    assert_eq!(open(elsewhere).map(drop), Err(Errno::EEXIST));
    assert_eq!(other.server.sessions().len(), 0, "not even asked");
    let second = std::thread::scope(|scope| {
        let second = scope.spawn(|| open(server));
        std::thread::sleep(Duration::from_millis(300));
        Arc::clone(&first).close();
        second.join().unwrap()
    });
    let second = second.unwrap();
    // The remains of the first session do not release the name of the second.
    drop(first);
    assert_eq!(open(elsewhere).map(drop), Err(Errno::EEXIST));
    drop(second);
    write_and_read(&open(elsewhere).unwrap(), 0, 4096);
}

/// A program that closes its device first gets errors, and no thread is left running.
#[test]
fn a_closed_device_is_an_error() {
    let pair = Pair::with(58, 1, ServerConfig::default(), hasty);
    let session = pair.session(1);
    pair.client_device.close();
    let start = Instant::now();
    eventually("requests fail", || {
        session.get_permit(PermitKind::Io, Wait::No).is_none_or(|permit| {
            let failed = session.call(Dir::Read, &permit, &at(0), &[]).is_err();
            session.put_permit(permit);
            failed
        })
    });
    pair.client_engine.close();
    pair.server_engine.close();
    assert!(start.elapsed() < PATIENCE);
}

/// The background thread takes completions while no other thread does. A thread that waits takes
/// them itself again; otherwise each of its requests would cost a wake-up.
#[test]
fn who_waits_takes_completions_again() {
    const CALLS: u64 = 400;
    let pair = Pair::new(60, 1, ServerConfig::default());
    let session = pair.session(1);
    let region = session.region(4096).unwrap();
    let permit = session.get_permit(PermitKind::Io, Wait::Forever).unwrap();
    for _ in 0..3 {
        // Until the background thread polls.
        let asleep = || pair.client_engine.stats().waits;
        let before = asleep();
        eventually("the background thread waits", || asleep() > before + 1);
        let hand_overs = || pair.client_engine.stats().hand_overs;
        let before = hand_overs();
        for _ in 0..CALLS {
            session.call(Dir::Read, &permit, &at(0), &[region.piece(0, 4096)]).unwrap();
        }
        let since = hand_overs() - before;
        // A few, if the machine stalls so long that the background thread takes over.
        assert!(since < CALLS / 4, "{since} of {CALLS} were handed over");
    }
    session.put_permit(permit);
}

/// A thread that waits now and then does not keep the background thread from calling completion
/// callbacks.
#[test]
fn requests_of_functions_go_on_beside_a_thread_that_waits() {
    const TIME: Duration = Duration::from_millis(400);
    let pair = Pair::new(62, 1, ServerConfig::default());
    let session = pair.session(1);
    let region = session.region(4096).unwrap();
    let permit = session.get_permit(PermitKind::Io, Wait::Forever).unwrap();
    let load = Load::new(&session, Dir::Read, 16, 4096);
    load.start(u64::MAX);
    let during = |calls: bool| {
        let (before, start) = (load.done.load(SeqCst), Instant::now());
        while start.elapsed() < TIME {
            if calls {
                session.call(Dir::Read, &permit, &at(0), &[region.piece(0, 4096)]).unwrap();
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        load.done.load(SeqCst) - before
    };
    // The scheduler decides who runs: one undisturbed pair of ten shows the cost.
    let pairs = (0..10).map(|_| (during(false), during(true)));
    let kept = pairs.inspect(|pair| println!("alone and beside: {pair:?}"));
    let kept = kept.filter(|(alone, beside)| *beside >= alone / 4).count();
    load.end();
    assert!(kept > 0, "a thread that waits keeps others");
    session.put_permit(permit);
}

/// Threads with nothing to do sleep.
#[test]
fn idle_threads_sleep() {
    let pair = Pair::new(59, 1, ServerConfig::default());
    let session = pair.session(1);
    write_and_read(&session, 0, 4096);
    std::thread::sleep(Duration::from_millis(600));
    let start = Instant::now();
    let before = [pair.client_engine.stats(), pair.server_engine.stats()];
    std::thread::sleep(Duration::from_secs(1));
    let after = [pair.client_engine.stats(), pair.server_engine.stats()];
    // Four polls a second, and heartbeats.
    let most = (20.0 * start.elapsed().as_secs_f64()) as u64;
    for (after, before) in after.into_iter().zip(before) {
        let since = after - before;
        let all = [since.polls, since.waits, since.naps];
        assert!(all.iter().all(|count| *count <= most), "{since:?}, at most {most}");
    }
}
