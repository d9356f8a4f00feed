//! Sessions of several IO connections, engines of several devices, and IPv6.

mod common;

use std::net::{IpAddr, Ipv6Addr, SocketAddr, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use bowline_roce::{Config, GiveUp};
use bowline_roce_driver::{SoftConfig, SoftDevice};
use bowline_rtrs_driver::client::{PathState, PermitKind, Session, SessionBuilder, Wait};
use bowline_rtrs_driver::server::{Server, ServerConfig};
use bowline_rtrs_driver::{Dir, Engine, EngineConfig, Errno, PORT, Policy};
use bowline_verbs::Device;
use common::load::Load;
use common::{Pair, Store, at, bytes, device_with, eventually, ip, write_and_read};

fn hasty(soft: SoftConfig) -> SoftConfig {
    let core = Config { give_up: GiveUp::After(Duration::from_millis(500)), ..Config::default() };
    SoftConfig { core, ..soft }
}

/// [RT-24], [RT-37]: permits of several processors, several threads, and the loss of a path under them.
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
    assert_eq!(refused.map_err(|error| error.errno()), Err(Errno::EINVAL.0));
    let session = pair.session(1);
    assert_eq!(pair.client_device.in_use().qps, 2, "a device whose connections share a socket");
    write_and_read(&session, 0, 4096);
    let none = pair.builder("none", 1).io_connections(0);
    let session = Session::open(&pair.client_engine, none).unwrap();
    write_and_read(&session, 0, 4096);
}

/// [RS-8], [RS-20]: a path on each of two devices; threads wait, poll, and are told by callbacks; one of
/// the devices loses its wire.
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
    let everywhere = [SocketAddr::new(IpAddr::from([0, 0, 0, 0]), PORT)];
    let config = ServerConfig::default();
    let server =
        Server::open(&server_engine, &everywhere, config, Arc::clone(&store) as _).unwrap();
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
    for path in session.paths() {
        assert!(path.stats.reads > 20, "{path:?}");
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
        eventually("all end", || session.inflight() == 0);
    }
    assert_eq!(load.errors.lock().unwrap()[..], []);
    drop(load);
    session.close();
    server.close();
    eventually("nothing is left", || devices.iter().all(|device| device.in_use().qps == 0));
}

/// [RS-30]: IPv6, where this machine has any.
#[test]
fn paths_may_be_of_ipv6() {
    if let Err(error) = UdpSocket::bind((Ipv6Addr::LOCALHOST, 0)) {
        println!("skipped: no IPv6 here: {error}");
        return;
    }
    let loopback = IpAddr::V6(Ipv6Addr::LOCALHOST);
    // One address: client and server are of one device.
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
