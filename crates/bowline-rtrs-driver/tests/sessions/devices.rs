//! Engines with several devices, some of which fail.

use std::net::{IpAddr, SocketAddr};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::common::frail::Frail;
use crate::common::{
    PATIENCE, Slow, Store, at, bytes, device, device_with, engine, eventually, far, ip, serve,
    write_and_read,
};
use bowline_roce_driver::{SoftConfig, SoftDevice};
use bowline_rtrs_driver::client::{
    Completed, Completer, Done, LinkEv, PathState, PermitKind, Session, SessionBuilder, Wait,
};
use bowline_rtrs_driver::server::{Server, ServerConfig};
use bowline_rtrs_driver::{Dir, Engine, EngineConfig, Errno, HbConfig, PORT, Policy, Poll};
use bowline_verbs::Device;

fn engine_of(devices: &[Arc<SoftDevice>]) -> Arc<Engine> {
    let devices = devices.iter().map(|device| Arc::clone(device) as Arc<dyn Device>);
    Engine::new(devices.collect(), EngineConfig::default()).unwrap()
}

/// Heartbeats are rare, so that failures must be noticed in other ways.
fn no_heartbeat() -> HbConfig {
    let never = Duration::from_secs(3600);
    HbConfig { interval: never, probe_interval: never, ..HbConfig::default() }
}

struct Tell(Mutex<Sender<Completed>>);

impl Tell {
    fn new() -> (Arc<Self>, Receiver<Completed>) {
        let (sender, told) = channel();
        (Arc::new(Self(Mutex::new(sender))), told)
    }
}

impl Completer for Tell {
    fn completed(&self, done: &[Completed]) {
        let sender = self.0.lock().unwrap();
        done.iter().for_each(|done| sender.send(*done).unwrap());
    }
}

/// A session with a path on each of two devices.
fn two_paths(net: u8, name: &str) -> SessionBuilder {
    SessionBuilder::new(name)
        .unwrap()
        .paths(&[(Some(ip(net, 1)), ip(net, 101)), (Some(ip(net, 2)), ip(net, 102))])
        .policy(Policy::RoundRobin)
}

fn states(session: &Session) -> Vec<PathState> {
    session.paths().iter().map(|path| path.state).collect()
}

/// [RS-8]: requests of a closed device continue on another one. None ends while the server can
/// still answer it, and the session lives.
#[test]
fn requests_of_a_closed_device_move_to_the_other() {
    for (net, gone) in [(120, 0), (121, 1)] {
        let devices = [device(&[ip(net, 1)]), device(&[ip(net, 2)])];
        let closed = Arc::clone(&devices[gone]);
        moves(net, devices.map(|device| device as _), gone, no_heartbeat(), || closed.close());
    }
}

/// [RT-31], [RS-8]: the same for a device that reports its failure. It drains no queue.
#[test]
fn requests_of_a_device_that_fails_move_to_the_other() {
    for (net, gone) in [(131, 0), (132, 1)] {
        let (devices, frail) = with_frail(net, gone);
        moves(net, devices, gone, no_heartbeat(), || frail.fail());
    }
}

/// [RT-100]: the same for a device that fails silently. Its silence is noticed, and that its queues
/// are not drained.
#[test]
fn requests_of_a_device_that_falls_mute_move_to_the_other() {
    const NET: u8 = 133;
    let interval = Duration::from_secs(1);
    let heartbeat = HbConfig { interval, probe_interval: interval, ..HbConfig::default() };
    let (devices, frail) = with_frail(NET, 0);
    moves(NET, devices, 0, heartbeat, || frail.fall_mute());
}

/// Two devices, one of which can fail.
fn with_frail(net: u8, frail: usize) -> ([Arc<dyn Device>; 2], Arc<Frail>) {
    let mut devices = [1, 2].map(|host| device(&[ip(net, host)]) as Arc<dyn Device>);
    let made = Frail::new(&device(&[ip(net, 3 + frail as u8)]));
    devices[frail] = Arc::clone(&made) as _;
    (devices, made)
}

/// Requests in flight on two devices, one of which is lost, continue on the other.
fn moves(
    net: u8,
    devices: [Arc<dyn Device>; 2],
    gone: usize,
    heartbeat: HbConfig,
    lose: impl Fn(),
) {
    let slow = Arc::new(Slow::default());
    let far = far(net, Arc::clone(&slow) as _);
    let [first, second] = devices.each_ref().map(|device| device.attr().addrs[0]);
    let engine = Engine::new(devices.into(), EngineConfig::default()).unwrap();
    let builder = SessionBuilder::new("move")
        .unwrap()
        .paths(&[(Some(first), ip(net, 101)), (Some(second), ip(net, 102))])
        .policy(Policy::RoundRobin)
        .heartbeat(heartbeat);
    let session = Session::open(&engine, builder).unwrap();

    let (done, told) = Tell::new();
    let region = session.region(8192).unwrap();
    let permits: Vec<_> =
        (0..2).map(|_| session.get_permit(PermitKind::Io, Wait::No).unwrap()).collect();
    for (tag, permit) in (0..).zip(&permits) {
        let done = Done { to: Arc::clone(&done) as _, tag };
        let data = [region.piece(4096 * tag as usize, 4096)];
        session.request(Dir::Read, permit, &at(0), &data, done).unwrap();
    }
    eventually("both are there", || slow.asked() == 2);
    assert_eq!(session.paths().iter().map(|path| path.inflight).collect::<Vec<_>>(), [1, 1]);

    lose();
    eventually("the path is lost", || states(&session)[gone] != PathState::Connected);
    assert_eq!(states(&session)[1 - gone], PathState::Connected);
    eventually("its request has moved", || session.paths()[1 - gone].inflight == 2);
    assert!(told.try_recv().is_err(), "an end is told while the server can still answer");
    let mut ends = Vec::new();
    eventually("both are answered", || {
        slow.answer(&far.server);
        ends.extend(told.try_iter());
        ends.len() == 2
    });
    ends.sort_by_key(|end| end.tag);
    assert_eq!(ends, [0, 1].map(|tag| Completed { tag, errno: 0 }));
    assert_eq!(bytes(&region, 0, 8192), [9; 8192]);
    region.buffer().write(0, &[7; 8192]);

    // Memory can still be registered, and later requests complete.
    let new = session.region(4096).unwrap();
    let done = Done { to: done as _, tag: 5 };
    session.request(Dir::Read, &permits[0], &at(0), &[new.piece(0, 4096)], done).unwrap();
    eventually("it is there", || slow.asked() == 1);
    slow.answer(&far.server);
    assert_eq!(told.recv_timeout(PATIENCE).unwrap(), Completed { tag: 5, errno: 0 });
    assert_eq!(bytes(&region, 0, 8192), [7; 8192], "nothing is written late");
    permits.into_iter().for_each(|permit| session.put_permit(permit));
    drop((region, new));
    session.close();
    eventually("nothing is left at the server", || far.device.in_use().qps == 0);
}

/// The first device has the thread that looks at the clock for all.
#[test]
fn timers_of_a_session_outlive_the_first_device() {
    const NET: u8 = 122;
    let _far = far(NET, Store::new());
    let devices = [device(&[ip(NET, 1)]), device(&[ip(NET, 2)])];
    let engine = engine_of(&devices);
    let heartbeat = HbConfig { probe_interval: Duration::from_millis(200), ..HbConfig::default() };
    let builder = two_paths(NET, "timers").heartbeat(heartbeat);
    let session = Session::open(&engine, builder).unwrap();
    devices[0].close();
    eventually("its path is lost", || states(&session)[0] == PathState::Reconnecting);
    devices[1].cut(ip(NET, 2), None, true);
    eventually("silence is noticed", || states(&session)[1] == PathState::Reconnecting);
    devices[1].cut(ip(NET, 2), None, false);
    eventually("and connected again", || states(&session)[1] == PathState::Connected);
    write_and_read(&session, 0, 4096);
}

/// With the last device the session is over: requests end, later ones are refused, and the program
/// is told of the loss.
#[test]
fn the_last_device_ends_the_session() {
    const NET: u8 = 123;
    let slow = Arc::new(Slow::default());
    let far = far(NET, Arc::clone(&slow) as _);
    let devices = [device(&[ip(NET, 1)]), device(&[ip(NET, 2)])];
    let engine = engine_of(&devices);
    let (sender, links) = channel();
    let sender = Mutex::new(sender);
    let builder =
        two_paths(NET, "last").on_link(move |event| sender.lock().unwrap().send(event).unwrap());
    let session = Session::open(&engine, builder).unwrap();
    let (to, told) = Tell::new();
    let permit = session.get_permit(PermitKind::Io, Wait::No).unwrap();
    let done = |tag| Done { to: Arc::clone(&to) as _, tag };
    session.request(Dir::Read, &permit, &at(0), &[], done(1)).unwrap();
    eventually("it is there", || slow.asked() == 1);
    devices.iter().for_each(|device| device.close());
    let end = told.recv_timeout(PATIENCE).unwrap();
    assert_eq!((end.tag, end.errno), (1, Errno::ECONNABORTED.neg()));
    assert_eq!(links.recv_timeout(PATIENCE).unwrap(), LinkEv::Disconnected);
    eventually("it is over", || session.region(4096).is_err());
    let refused = session.request(Dir::Read, &permit, &at(0), &[], done(2)).unwrap_err();
    assert_eq!(refused.errno(), Errno::ECONNABORTED);
    session.poll();
    session.put_permit(permit);
    session.close();
    assert!(told.try_recv().is_err(), "told once");
    // The request may also have arrived by the other path, when the first device was closed.
    eventually("the server forgets it", || {
        slow.answer(&far.server);
        far.server.sessions().is_empty()
    });
}

/// A server continues on its remaining devices, and still closes paths there.
#[test]
fn a_server_goes_on_without_one_of_its_devices() {
    for (net, gone) in [(124, 0), (125, 1)] {
        let theirs = [device(&[ip(net, 101)]), device(&[ip(net, 102)])];
        let server_engine = engine_of(&theirs);
        let server = serve(&server_engine, Store::new());
        let soft = SoftConfig { addrs: vec![ip(net, 1), ip(net, 2)], ..SoftConfig::default() };
        let engine = engine(&device_with(soft));
        let session = Session::open(&engine, two_paths(net, "server")).unwrap();
        theirs[gone].close();
        eventually("its path is gone", || server.sessions()[0].paths.len() == 1);
        write_and_read(&session, 0, 4096);
        server.close();
        assert_eq!(theirs[1 - gone].in_use().qps, 0, "closed when it says so");
        drop(session);
    }
}

/// [RT-100]: a close does not wait for a device that drains no queue.
#[test]
fn a_session_on_a_mute_device_can_be_closed() {
    const NET: u8 = 134;
    let theirs = device(&[ip(NET, 101)]);
    let server_engine = engine(&theirs);
    let at = [SocketAddr::new(ip(NET, 101), PORT)];
    let _server =
        Server::open(&server_engine, &at, ServerConfig::default(), Store::new() as _).unwrap();
    let frail = Frail::new(&device(&[ip(NET, 1)]));
    let engine = Engine::new(vec![Arc::clone(&frail) as _], EngineConfig::default()).unwrap();
    let builder = SessionBuilder::new("mute").unwrap().path(Some(ip(NET, 1)), ip(NET, 101));
    let session = Session::open(&engine, builder.heartbeat(no_heartbeat())).unwrap();
    frail.fall_mute();
    let closing = std::thread::spawn(move || session.close());
    eventually("it is closed", || closing.is_finished());
    closing.join().unwrap();
}

/// [RS-19]: a server notices the failure of a device also when its threads never sleep, and the
/// threads end.
#[test]
fn a_server_that_spins_hears_of_a_device_that_fails() {
    const NET: u8 = 135;
    let frail = Frail::new(&device(&[ip(NET, 101)]));
    let theirs: Vec<Arc<dyn Device>> = vec![device(&[ip(NET, 102)]), Arc::clone(&frail) as _];
    let spin = EngineConfig { poll: Poll::Spin };
    let server_engine = Engine::new(theirs, spin).unwrap();
    let anywhere = [SocketAddr::new(IpAddr::from([0, 0, 0, 0]), PORT)];
    let config = ServerConfig { heartbeat: no_heartbeat(), ..ServerConfig::default() };
    let server = Server::open(&server_engine, &anywhere, config, Store::new() as _).unwrap();
    let ours = device(&[ip(NET, 11), ip(NET, 12)]);
    let engine = engine(&ours);
    let builder = SessionBuilder::new("spin")
        .unwrap()
        .paths(&[(Some(ip(NET, 11)), ip(NET, 101)), (Some(ip(NET, 12)), ip(NET, 102))])
        .heartbeat(no_heartbeat());
    let session = Session::open(&engine, builder).unwrap();
    assert_eq!(server.sessions()[0].paths.len(), 2);
    // Two threads that look for completions, the one for memory, the engine and this test.
    assert!(Arc::strong_count(&server) >= 5);
    frail.fail();
    eventually("its path is gone", || server.sessions()[0].paths.len() == 1);
    eventually("nobody looks for completions there", || Arc::strong_count(&server) == 4);
    write_and_read(&session, 0, 4096);
    server.close();
    drop(session);
}

/// A session or server that is opened later leaves out devices that have failed or can create
/// nothing; what needs such a device is refused with its name.
#[test]
fn what_is_opened_later_does_without_a_device_that_is_gone() {
    for (net, lose) in [
        (136, (|frail, _| Frail::fail(frail)) as fn(&Frail, &SoftDevice)),
        (137, |_, soft| soft.close()),
        (138, |frail, _| frail.fill_up()),
    ] {
        let _far = far(net, Store::new());
        let named = |name: &str, host| {
            let (name, addrs) = (name.to_owned(), vec![ip(net, host)]);
            device_with(SoftConfig { name, addrs, ..SoftConfig::default() })
        };
        let soft = named("lost", 1);
        let frail = Frail::new(&soft);
        let devices = vec![Arc::clone(&frail) as Arc<dyn Device>, named("left", 2)];
        let engine = Engine::new(devices, EngineConfig::default()).unwrap();
        let path = |host| (Some(ip(net, host)), ip(net, 100 + host));
        let before = SessionBuilder::new("before").unwrap().paths(&[path(1), path(2)]);
        let before = Session::open(&engine, before).unwrap();
        lose(&frail, &soft);
        if net != 138 {
            eventually("it is noticed", || states(&before)[0] != PathState::Connected);
        }

        let later = SessionBuilder::new("later").unwrap().paths(&[path(2)]);
        let later = Session::open(&engine, later).unwrap();
        write_and_read(&later, 0, 4096);
        // Any address will do, except those of the remaining device.
        let any = SessionBuilder::new("any").unwrap().path(None, ip(net, 101));
        let any = Session::open(&engine, any).unwrap();
        write_and_read(&any, 0, 4096);
        assert_eq!(any.paths()[0].src.ip(), ip(net, 2));
        let gone = SessionBuilder::new("gone").unwrap().paths(&[path(1), path(2)]);
        let refused = Session::open(&engine, gone).unwrap_err();
        let (errno, why) = match net {
            138 => (Errno::ENOMEM, "lost: the limit of memory is reached"),
            _ => (Errno::ENODEV, "lost is gone"),
        };
        assert_eq!(refused.errno(), errno);
        assert_eq!(refused.to_string(), format!("finding a device for a path: {why}"));
        let refused = later.add_path(Some(ip(net, 1)), ip(net, 101)).unwrap_err();
        assert_eq!(refused.to_string(), format!("finding a device for a path: {why}"));

        let open = |at| {
            let at = [SocketAddr::new(at, 4321)];
            Server::open(&engine, &at, ServerConfig::default(), Store::new() as _)
        };
        let server = open(IpAddr::from([0, 0, 0, 0])).unwrap();
        server.close();
        let refused = open(ip(net, 1)).unwrap_err();
        assert_eq!((refused.errno(), refused.to_string()), (errno, format!("listening: {why}")));
        later.close();
        any.close();
        before.close();
    }
}

/// Without any device that can be used there is nothing to be opened.
#[test]
fn the_last_device_is_needed() {
    const NET: u8 = 139;
    let devices = [device(&[ip(NET, 1)]), device(&[ip(NET, 2)])];
    let engine = engine_of(&devices);
    devices.iter().for_each(|device| device.close());
    let builder = SessionBuilder::new("none").unwrap().path(None, ip(NET, 101));
    let refused = Session::open(&engine, builder).unwrap_err();
    assert_eq!(refused.to_string(), "preparing a device: bowline0 is gone");
    assert_eq!(refused.errno(), Errno::ENODEV);
}
