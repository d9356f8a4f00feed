//! Sessions of several IO connections, engines of several devices, and IPv6.

use crate::common;
use bowline_testkit::skipped;

use std::net::{IpAddr, Ipv6Addr, SocketAddr, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::SeqCst;
use std::thread::ThreadId;
use std::time::Duration;

use crate::common::load::Load;
use crate::common::{Pair, Store, at, bytes, device_with, eventually, hasty, ip, write_and_read};
use bowline_roce_driver::{SoftConfig, SoftDevice};
use bowline_rtrs_driver::client::{
    Completed, Completer, Done, PathState, Permit, PermitKind, Session, SessionBuilder, Wait,
};
use bowline_rtrs_driver::server::{Server, ServerConfig};
use bowline_rtrs_driver::{Dir, Engine, EngineConfig, Errno, Geometry, PORT, Policy};
use bowline_verbs::Device;

/// [RT-24], [RT-37]: permits of several processors and threads, and the loss of a path under load.
#[test]
fn requests_take_the_connection_of_their_processor() {
    for (net, refresh) in [(80, true), (81, false)] {
        let config = ServerConfig { always_invalidate: refresh, ..ServerConfig::default() };
        let pair = Pair::with(net, 2, config, hasty);
        let builder = pair.builder("four", 2).io_connections(4).policy(Policy::RoundRobin);
        let session = Session::open(&pair.client_engine, builder).unwrap();
        assert_eq!(pair.client_device.in_use().qps, 10, "two paths of five connections");
        std::thread::scope(|scope| {
            for cpu in 0..8_u16 {
                let (session, server) = (&session, &pair.server);
                scope.spawn(move || {
                    let region = session.region(8192).unwrap();
                    let permit = session.get_permit_on(PermitKind::Io, Wait::Forever, cpu).unwrap();
                    for round in 0..60_u8 {
                        let offset = usize::from(cpu) * 65_536;
                        let pattern = [round ^ cpu as u8; 4096];
                        region.buffer().write(0, &pattern);
                        let data = [region.piece(0, 4096)];
                        session.call(Dir::Write, &permit, &at(offset), &data).unwrap();
                        let data = [region.piece(4096, 4096)];
                        session.call(Dir::Read, &permit, &at(offset), &data).unwrap();
                        assert_eq!(bytes(&region, 4096, 4096), pattern);
                        if (cpu, round) == (0, 20) {
                            let path = server.sessions()[0].paths[0].path;
                            server.disconnect_path(path).unwrap();
                        }
                    }
                    session.put_permit(permit);
                });
            }
        });
        eventually("both paths are up", || {
            session.paths().iter().all(|path| path.state == PathState::Connected)
        });
        session.close();
        eventually("nothing is left", || pair.client_device.in_use().qps == 0);
    }
    let pair = Pair::new(82, 1, ServerConfig::default());
    let many = pair.builder("many", 1).io_connections(4096);
    let refused = Session::open(&pair.client_engine, many).map(drop);
    assert_eq!(refused.map_err(|error| error.errno()), Err(Errno::EINVAL));
    let session = pair.session(1);
    assert_eq!(pair.client_device.in_use().qps, 2, "a device whose connections share a socket");
    write_and_read(&session, 0, 4096);
    let none = pair.builder("none", 1).io_connections(0);
    let session = Session::open(&pair.client_engine, none).unwrap();
    write_and_read(&session, 0, 4096);
}

/// [RS-8], [RS-20]: a path on each of two devices; threads wait, poll and use callbacks; one of the
/// devices loses its network.
#[test]
fn an_engine_has_several_devices() {
    const NET: u8 = 83;
    let soft = |host| {
        device_with(hasty(SoftConfig { addrs: vec![ip(NET, host)], ..SoftConfig::default() }))
    };
    let devices: Vec<Arc<SoftDevice>> = vec![soft(1), soft(2)];
    let servers: Vec<Arc<SoftDevice>> = vec![soft(101), soft(102)];
    let engine = |devices: &[Arc<SoftDevice>]| {
        let devices = devices.iter().map(|device| Arc::clone(device) as Arc<dyn Device>).collect();
        Engine::new(devices, EngineConfig::default()).unwrap()
    };
    let (client_engine, server_engine) = (engine(&devices), engine(&servers));
    let store = Store::new();
    let server = common::serve(&server_engine, Arc::clone(&store) as _);
    let paths = [(Some(ip(NET, 1)), ip(NET, 101)), (Some(ip(NET, 2)), ip(NET, 102))];
    let builder = SessionBuilder::new("two").unwrap().paths(&paths).policy(Policy::RoundRobin);
    let session = Session::open(&client_engine, builder).unwrap();
    let ports: Vec<_> = session.paths().iter().map(|path| path.port.0).collect();
    assert_eq!(ports, [0, 1]);
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let session = &session;
            scope.spawn(move || {
                for n in 0..20 {
                    write_and_read(session, thread * 65_536 + n * 512, 4096);
                }
            });
        }
    });
    // A thread that writes and reads in turn may have one path for each: only the sums are certain.
    for path in session.paths() {
        assert_eq!(path.stats.reads + path.stats.writes, 80, "{path:?}");
    }
    let load = Load::new(&session, Dir::Write, 16, 4096);
    for cut in [0, 1] {
        load.start(u64::MAX);
        std::thread::sleep(Duration::from_millis(30));
        devices[cut].cut(ip(NET, cut as u8 + 1), None, true);
        let state = |path: usize| session.paths()[path].state;
        eventually("the loss is noticed", || state(cut) == PathState::Reconnecting);
        let before = load.done.load(SeqCst);
        eventually("it goes on", || load.done.load(SeqCst) > before + 100);
        devices[cut].cut(ip(NET, cut as u8 + 1), None, false);
        eventually("the path comes back", || state(cut) == PathState::Connected);
        load.end();
    }
    assert_eq!(*load.errors.lock().unwrap(), Vec::<i32>::new());
    drop(load);
    session.close();
    server.close();
    eventually("nothing is left", || devices.iter().all(|device| device.in_use().qps == 0));
}

/// [RS-30]: IPv6, where this machine has any.
#[test]
fn paths_may_be_of_ipv6() {
    if let Err(error) = UdpSocket::bind((Ipv6Addr::LOCALHOST, 0)) {
        return skipped::because(format_args!("no IPv6: {error}"));
    }
    let loopback = IpAddr::V6(Ipv6Addr::LOCALHOST);
    // One address: client and server share one device.
    let device = device_with(SoftConfig { addrs: vec![loopback], ..SoftConfig::default() });
    let engine = common::engine(&device);
    let store = Store::new();
    let anywhere = [SocketAddr::new(IpAddr::V6(Ipv6Addr::UNSPECIFIED), PORT)];
    let config = ServerConfig::default();
    let server = Server::open(&engine, &anywhere, config, Arc::clone(&store) as _).unwrap();
    let builder = SessionBuilder::new("six").unwrap().path(None, loopback).io_connections(2);
    let session = Session::open(&engine, builder).unwrap();
    let path = &session.paths()[0];
    assert_eq!((path.src.ip(), path.dst.ip()), (loopback, loopback));
    for len in [0, 1, 4096, 65_536] {
        write_and_read(&session, len, len);
    }
    assert_eq!(store.served.load(SeqCst), 8);
    session.close();
    server.close();
    eventually("nothing is left", || device.in_use().qps == 0);
}

/// [RS-31]: requests on poll connections complete when the program polls, and at no other time; the
/// loss of a path needs no poll.
#[test]
fn polled_requests_end_when_they_are_polled() {
    let pair = Pair::with(84, 2, ServerConfig::default(), hasty);
    let open = |polled| {
        let builder = pair.builder("polled", 2).io_connections(1).poll_connections(polled);
        Session::open(&pair.client_engine, builder.policy(Policy::RoundRobin))
    };
    let session = open(2).unwrap();
    assert_eq!(pair.client_device.in_use().qps, 8);
    assert_eq!((session.poll_queue(0), session.poll_queue(2)), (Some(0), None));
    let region = session.region(65_536).unwrap();
    let done = Arc::new(Ends::default());
    let submit = |permit: &Permit, n: usize| {
        let told = Done { to: Arc::clone(&done) as _, tag: n as u64 };
        let data = [region.piece(n * 512, 512)];
        session.request(Dir::Read, permit, &at(n * 512), &data, told).unwrap();
    };
    let take = |cpu| session.get_permit_on(PermitKind::Polled, Wait::No, cpu).unwrap();
    let permits: Vec<Permit> = (0..8).map(take).collect();
    // The engine does not touch a queue that was polled recently.
    let start = std::time::Instant::now();
    session.poll_queue(1).unwrap();
    for (n, permit) in permits.iter().enumerate() {
        submit(permit, n);
    }
    eventually("all are answered", || pair.store.served.load(SeqCst) == 8);
    // Half of the requests use the second queue, which no thread polls for now.
    while done.0.lock().unwrap().len() < 4 && start.elapsed() < common::PATIENCE {
        session.poll_queue(0).unwrap();
    }
    let mut first = done.0.lock().unwrap().clone();
    first.sort_unstable();
    if start.elapsed() < Duration::from_millis(100) {
        assert_eq!(first, [0, 2, 4, 6], "those of the first queue, and no others");
    }
    eventually("the others too", || {
        session.poll_queue(1).unwrap();
        done.0.lock().unwrap().len() == 8
    });
    permits.into_iter().for_each(|permit| session.put_permit(permit));
    // Threads that wait for the same poll.
    std::thread::scope(|scope| {
        for cpu in 0..4 {
            let (session, region) = (&session, &region);
            scope.spawn(move || {
                let permit = session.get_permit_on(PermitKind::Polled, Wait::Forever, cpu).unwrap();
                for n in 0..100 {
                    let data = [region.piece(usize::from(cpu) * 4096, 4096)];
                    session.call(Dir::Read, &permit, &at(n * 64), &data).unwrap();
                }
                session.put_permit(permit);
            });
        }
    });
    // Without a poll the path is lost all the same; its requests complete on the other one.
    let permit = take(1);
    pair.client_device.cut(ip(84, 1), None, true);
    pair.client_device.cut(ip(84, 2), None, true);
    submit(&permit, 9);
    eventually("it fails", || done.0.lock().unwrap().len() == 9);
    eventually("no path is connected", || session.poll_queue(0).is_none());
    pair.client_device.cut(ip(84, 1), None, false);
    pair.client_device.cut(ip(84, 2), None, false);
    eventually("the paths come back", || {
        session.paths().iter().all(|path| path.state == PathState::Connected)
    });
    session.call(Dir::Read, &permit, &at(0), &[region.piece(0, 4096)]).unwrap();
    session.put_permit(permit);
    drop(region);
    session.close();
    eventually("nothing is left", || {
        let left = pair.client_device.in_use();
        left.qps + left.cqs == 0
    });
    let many = open(u16::MAX).map(drop).map_err(|error| error.errno());
    assert_eq!(many, Err(Errno::EINVAL));
}

/// [RS-31]: the only thread of a program waits for a permit while all of them are out on poll
/// connections.
#[test]
fn who_waits_for_a_polled_permit_polls() {
    let geometry = Geometry::new(4, 28_672, 4096).unwrap();
    let pair = Pair::new(85, 1, ServerConfig { geometry, ..ServerConfig::default() });
    let builder = pair.builder("waiting", 1).io_connections(1).poll_connections(2);
    let session = Session::open(&pair.client_engine, builder).unwrap();
    let region = session.region(4096).unwrap();
    let told = Arc::new(ToldHere { times: AtomicUsize::new(0), here: std::thread::current().id() });
    let take = |wait| session.get_permit(PermitKind::Polled, wait);
    let take_all = || -> Vec<Permit> { std::iter::from_fn(|| take(Wait::No)).collect() };
    let mut rounds = 0;
    for _ in 0..10 {
        let permits = take_all();
        for permit in &permits {
            let done = Done { to: Arc::clone(&told) as _, tag: 0 };
            session.request(Dir::Read, permit, &at(0), &[region.piece(0, 4096)], done).unwrap();
        }
        // Permits are free when their requests complete, which a thread has to notice.
        permits.into_iter().for_each(|permit| session.put_permit(permit));
        let before = told.times.load(SeqCst);
        session.put_permit(take(Wait::Forever).unwrap());
        rounds += usize::from(told.times.load(SeqCst) > before);
        eventually("all are answered", || {
            (0..2).for_each(|index| _ = session.poll_queue(index).unwrap());
            session.inflight() == 0
        });
    }
    // The engine polls the queues a few times a second, and may have been first.
    assert!(rounds > 5, "{rounds}");
    let permits = take_all();
    assert_eq!(permits.len(), 3);
    assert!(take(Wait::For(Duration::from_millis(1))).is_none(), "none comes back");
    permits.into_iter().for_each(|permit| session.put_permit(permit));
}

/// [RT-28], [RT-66]: connections for whose completions the device has no room are refused, and
/// existing ones continue.
#[test]
fn a_full_completion_queue_refuses_connections() {
    const NET: u8 = 86;
    let geometry = Geometry::new(16, 28_672, 4096).unwrap();
    let config = ServerConfig { geometry, ..ServerConfig::default() };
    // Room for one session of two connections.
    let short = |mut soft: SoftConfig| {
        if soft.addrs[0] == ip(NET, 101) {
            soft.core.limits.cqes = 2800;
        }
        soft
    };
    let pair = Pair::with(NET, 1, config, short);
    let open = |name| {
        let builder = pair.builder(name, 1).io_connections(1);
        Session::open(&pair.client_engine, builder).map_err(|error| error.errno())
    };
    let session = open("first").unwrap();
    assert_eq!(open("second").map(drop), Err(Errno::ENOMEM));
    write_and_read(&session, 0, 4096);
    assert_eq!(session.paths()[0].state, PathState::Connected);
    session.close();
    eventually("there is room again", || open("third").is_ok());
}

/// Counts the completions reported to the test's thread.
struct ToldHere {
    times: AtomicUsize,
    here: ThreadId,
}

impl Completer for ToldHere {
    fn completed(&self, _: &[Completed]) {
        let here = std::thread::current().id() == self.here;
        self.times.fetch_add(usize::from(here), SeqCst);
    }
}

/// Tags of requests that have ended.
#[derive(Default)]
struct Ends(std::sync::Mutex<Vec<u64>>);

impl Completer for Ends {
    fn completed(&self, done: &[Completed]) {
        self.0.lock().unwrap().extend(done.iter().map(|done| done.tag));
    }
}
