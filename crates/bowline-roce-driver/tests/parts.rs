//! Several devices of one address, as of several processes: a host, and guests.

mod common;

use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use bowline_roce_driver::{
    FormerConnections, Guest, Host, Joined, PollMode, PortSpace, SoftConfig, SoftDevice,
};
use bowline_verbs::{CmEvent, Device, Error, Qpn, SendOp, Status};
use common::{PATIENCE, connect_to, ip, open, unconnected};
use rustix::net::{
    AddressFamily, Shutdown, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, listen,
    shutdown, socket_with,
};

/// A host, where guests find it, and its folder, which is removed at the end.
struct Hosted {
    addr: IpAddr,
    path: PathBuf,
    folder: PathBuf,
    device: Arc<SoftDevice>,
}

impl Drop for Hosted {
    fn drop(&mut self) {
        // Guests that end write their lists in it at the same time.
        let begun = Instant::now();
        while std::fs::remove_dir_all(&self.folder).is_err() && begun.elapsed() < PATIENCE {
            thread::sleep(Duration::from_millis(1));
        }
    }
}

fn listener(path: &Path) -> OwnedFd {
    let kind = SocketType::SEQPACKET;
    let socket = socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).unwrap();
    bind(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
    listen(&socket, 8).unwrap();
    socket
}

fn hosted(addr: IpAddr) -> Hosted {
    let folder = std::env::temp_dir().join(format!("bowline-parts-{}-{addr}", std::process::id()));
    std::fs::create_dir(&folder).unwrap();
    let path = folder.join("rdma.sock");
    let socket = listener(&path);
    let former_connections = FormerConnections::In(folder.clone());
    let config = SoftConfig { addrs: vec![addr], former_connections, ..SoftConfig::default() };
    let (host, device) = Host::open(config).unwrap();
    thread::spawn(move || {
        while let Ok(guest) = accept_with(&socket, SocketFlags::CLOEXEC) {
            let host = host.clone();
            // What a guest does wrong, it sees itself.
            thread::spawn(move || host.serve(guest));
        }
    });
    Hosted { addr, path, folder, device }
}

impl Hosted {
    fn guest(&self) -> (Guest, Arc<SoftDevice>) {
        Joined::at(&self.path).unwrap().open(SoftConfig::default()).unwrap()
    }

    fn at(&self, port: u16) -> SocketAddr {
        SocketAddr::new(self.addr, port)
    }
}

#[test]
fn every_part_connects_with_every_other_and_with_strangers() {
    let hosted = hosted(ip(60, 1));
    let (one, first) = hosted.guest();
    let (two, second) = hosted.guest();
    let stranger = open(ip(60, 2));
    let clients = [&first, &second, &hosted.device, &stranger];
    let mut ports = 7000..;
    for (server, guest) in [(&first, Some(&one)), (&second, Some(&two)), (&hosted.device, None)] {
        for client in clients.iter().filter(|client| !Arc::ptr_eq(client, server)) {
            let port = ports.next().unwrap();
            if let Some(guest) = guest {
                guest.listen(PortSpace::Tcp, hosted.at(port)).unwrap();
            }
            let (near, far) = connect_to(client, server, 65536, port);
            near.post(1, SendOp::Write(far.remote(0)), 0, 60000);
            near.done(1);
            far.post(2, SendOp::Read(near.remote(0)), 0, 60000);
            far.done(2);
            client.disconnect(near.id).unwrap();
            for side in [&near, &far] {
                let event = side.dev.cm_event(PATIENCE).unwrap();
                assert!(matches!(event, CmEvent::Disconnected { .. }), "{event:?}");
            }
            for side in [&near, &far] {
                side.dev.destroy_id(side.id).unwrap();
            }
        }
    }
}

/// A service in any part is found from any other, and by strangers.
#[test]
fn every_part_finds_the_services_of_every_other() {
    let hosted = hosted(ip(60, 8));
    let (one, first) = hosted.guest();
    let (two, second) = hosted.guest();
    let stranger = open(ip(60, 9));
    let clients = [&first, &second, &hosted.device, &stranger];
    let mut ports = 7000..;
    for (server, guest) in [(&first, Some(&one)), (&second, Some(&two)), (&hosted.device, None)] {
        for client in clients.iter().filter(|client| !Arc::ptr_eq(client, server)) {
            let at = hosted.at(ports.next().unwrap());
            if let Some(guest) = guest {
                guest.listen(PortSpace::Udp, at).unwrap();
            }
            let listener = server.listen_datagrams(at).unwrap();
            let asking = client.look_up(None, at, b"who").unwrap();
            let asked = match server.cm_event(PATIENCE).unwrap() {
                CmEvent::ConnectRequest { id, request } if request.listener == listener => id,
                event => panic!("{event:?}"),
            };
            server.answer(asked, Qpn(77), 88, b"I").unwrap();
            match client.cm_event(PATIENCE).unwrap() {
                CmEvent::Found { id, qpn, qkey, .. } => {
                    assert_eq!((id, qpn, qkey), (asking, Qpn(77), 88));
                }
                event => panic!("{event:?}"),
            }
        }
    }
    // Ports of connections are others.
    hosted.device.listen_datagrams(hosted.at(6999)).unwrap();
    assert!(matches!(one.listen(PortSpace::Udp, hosted.at(6999)), Err(Error::AddrInUse(_))));
    one.listen(PortSpace::Tcp, hosted.at(6999)).unwrap();
}

#[test]
fn a_guest_has_no_port_any_more_when_its_host_is_gone() {
    let addr = ip(60, 13);
    let folder = std::env::temp_dir().join(format!("bowline-parts-{}-{addr}", std::process::id()));
    std::fs::create_dir(&folder).unwrap();
    let path = folder.join("rdma.sock");
    let socket = listener(&path);
    let former_connections = FormerConnections::Nowhere;
    let config = SoftConfig { addrs: vec![addr], former_connections, ..SoftConfig::default() };
    let (host, own) = Host::open(config).unwrap();
    let serving = thread::spawn(move || {
        let guest = accept_with(&socket, SocketFlags::CLOEXEC).unwrap();
        let connection = guest.try_clone().unwrap();
        (connection, thread::spawn(move || host.serve(guest)))
    });
    let (_guest, device) = Joined::at(&path).unwrap().open(SoftConfig::default()).unwrap();
    let (connection, served) = serving.join().unwrap();
    assert!(std::net::UdpSocket::bind((addr, 4791)).is_err());
    shutdown(&connection, Shutdown::Both).unwrap();
    served.join().unwrap().unwrap();
    drop((connection, own));
    // The program of the guest lives, and so does what it has of the device.
    let begun = Instant::now();
    while std::net::UdpSocket::bind((addr, 4791)).is_err() {
        assert!(begun.elapsed() < PATIENCE, "somebody has the port");
        thread::sleep(Duration::from_millis(1));
    }
    assert!(device.is_closed());
    assert_eq!(device.create_cq(1), Err(Error::Closed));
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn a_host_shares_as_many_addresses_as_it_can() {
    let addrs: Vec<IpAddr> = (1..=66).map(|last| ip(61, last)).collect();
    let _taken = std::net::UdpSocket::bind((addrs[0], 4791)).unwrap();
    let config = SoftConfig { addrs: addrs.clone(), ..SoftConfig::default() };
    let (host, device) = Host::open(config).unwrap();
    assert_eq!(host.addrs(), addrs[1..65], "another one has the first, and one is too many");
    assert_eq!(device.attr().addrs, host.addrs());
    assert_eq!(host.addrs().len(), Host::ADDRS_MAX);
}

#[test]
fn a_port_is_of_one_part() {
    let hosted = hosted(ip(60, 3));
    let ((one, _first), (two, _second)) = (hosted.guest(), hosted.guest());
    hosted.device.listen(hosted.at(7000)).unwrap();
    assert!(
        matches!(one.listen(PortSpace::Tcp, hosted.at(7000)), Err(Error::AddrInUse(_))),
        "the host's"
    );
    one.listen(PortSpace::Tcp, hosted.at(7001)).unwrap();
    assert!(matches!(two.listen(PortSpace::Tcp, hosted.at(7001)), Err(Error::AddrInUse(_))));
    let any = SocketAddr::from(([0; 4], 7001));
    assert!(matches!(two.listen(PortSpace::Tcp, any), Err(Error::AddrInUse(_))));
    let any = SocketAddr::from(([0; 16], 7001));
    assert!(
        matches!(two.listen(PortSpace::Tcp, any), Err(Error::AddrInUse(_))),
        "of both families"
    );
    two.unlisten(PortSpace::Tcp, hosted.at(7001));
    assert!(
        matches!(two.listen(PortSpace::Tcp, hosted.at(7001)), Err(Error::AddrInUse(_))),
        "another's stays"
    );
    one.unlisten(PortSpace::Tcp, hosted.at(7001));
    let listens_in_time = |guest: &Guest, at| {
        let begun = Instant::now();
        while guest.listen(PortSpace::Tcp, at).is_err() {
            assert!(begun.elapsed() < PATIENCE, "{at} is not free");
            thread::sleep(Duration::from_millis(1));
        }
    };
    listens_in_time(&two, any);
    drop(two);
    // One that is gone has no ports.
    listens_in_time(&one, hosted.at(7001));
}

#[test]
fn a_guest_that_is_gone_leaves_nothing_to_its_peers() {
    let hosted = hosted(ip(60, 4));
    let (one, first) = hosted.guest();
    let stranger = open(ip(60, 5));
    one.listen(PortSpace::Tcp, hosted.at(7000)).unwrap();
    let sides = connect_to(&stranger, &first, 4096, 7000);
    // Its connection is listed a moment after it is established.
    let is_listed = |entry: std::fs::DirEntry| {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        // A file beside it, of another ending, takes its place.
        let is_list = name.starts_with("roce-part") && name.ends_with(".connections");
        is_list && std::fs::read_to_string(entry.path()).is_ok_and(|text| !text.is_empty())
    };
    let begun = Instant::now();
    while !std::fs::read_dir(&hosted.folder).unwrap().flatten().any(is_listed) {
        assert!(begun.elapsed() < PATIENCE, "no list");
        thread::sleep(Duration::from_millis(1));
    }
    // As if killed: its device says nothing any more.
    first.cut(hosted.addr, None, true);
    drop(one);
    let event = stranger.cm_event(PATIENCE).unwrap();
    assert!(matches!(event, CmEvent::Disconnected { .. }) && event.id() == sides.0.id, "{event:?}");
    // Its calls fail, as of a card that was pulled out.
    let begun = Instant::now();
    while let Ok(pd) = first.alloc_pd() {
        assert!(begun.elapsed() < PATIENCE);
        // Fails if the device has gone since.
        let _ = first.dealloc_pd(pd);
    }
    assert_eq!(first.alloc_pd(), Err(Error::Closed));
}

#[test]
fn parts_are_given_again_and_not_at_once() {
    let hosted = hosted(ip(60, 6));
    let qpn = |device: &Arc<SoftDevice>| unconnected(device, 4096).qp.0;
    let (one, first) = hosted.guest();
    let was = qpn(&first) >> 16;
    assert_ne!(was, 0, "the host's own");
    drop((one, first));
    let (_two, second) = hosted.guest();
    assert_ne!(qpn(&second) >> 16, was);
    assert_eq!(qpn(&hosted.device) >> 16, 0);
}

/// What two guests send each other goes by memory, with the network's promises.
#[test]
fn guests_send_each_other_by_memory() {
    let hosted = hosted(ip(60, 10));
    let (one, first) = hosted.guest();
    let (_two, second) = hosted.guest();
    one.listen(PortSpace::Tcp, hosted.at(7000)).unwrap();
    let (near, far) = connect_to(&second, &first, 1 << 20, 7000);
    let pattern: Vec<u8> = (0..1 << 20).map(|at: u32| (at / 7) as u8).collect();
    near.buffer.write(0, &pattern);
    let mut rounds = 0;
    let by_memory = |device: &SoftDevice| device.stats().ring_sends;
    let begun = Instant::now();
    while by_memory(&first) < 1000 || by_memory(&second) < 1000 {
        assert!(begun.elapsed() < PATIENCE, "{:?} {:?}", first.stats(), second.stats());
        far.buffer.clear(0, 1 << 20);
        near.post(1, SendOp::Write(far.remote(0)), 0, 1 << 20);
        near.done(1);
        let mut came = vec![0; 1 << 20];
        far.buffer.read(0, &mut came);
        assert!(came == pattern, "round {rounds}");
        // And back, in small pieces.
        for at in 0..64 {
            far.post(2, SendOp::Read(near.remote(at * 100)), at * 100, 100);
            far.done(2);
        }
        rounds += 1;
    }
    let [sent, came] = [second.stats().ring_sends, first.stats().ring_receives];
    assert!(sent.abs_diff(came) <= 1, "{sent} {came}");
    assert_eq!(first.stats().packets_refused + second.stats().packets_refused, 0);
    for device in [&first, &second] {
        let counters = device.counters();
        let gaps = counters.naks_sequence_sent + counters.requests_kept + counters.gaps_reported;
        assert_eq!(gaps, 0, "in order");
    }
}

/// One that leaves takes its rings along: another of its number has new ones.
#[test]
fn a_number_that_is_given_again_has_new_rings() {
    let hosted = hosted(ip(60, 11));
    let (one, first) = hosted.guest();
    let talk = |device: &Arc<SoftDevice>, port| {
        one.listen(PortSpace::Tcp, hosted.at(port)).unwrap();
        let (near, far) = connect_to(device, &first, 4096, port);
        let before = [device.stats(), first.stats()].map(|stats| stats.ring_sends);
        let begun = Instant::now();
        while device.stats().ring_sends < before[0] + 10
            || first.stats().ring_sends < before[1] + 10
        {
            assert!(begun.elapsed() < PATIENCE, "{:?} {:?}", device.stats(), first.stats());
            near.post(1, SendOp::Write(far.remote(0)), 0, 4096);
            near.done(1);
        }
        device.disconnect(near.id).unwrap();
        for side in [&near, &far] {
            let event = side.dev.cm_event(PATIENCE).unwrap();
            assert!(matches!(event, CmEvent::Disconnected { .. }), "{event:?}");
            side.dev.destroy_id(side.id).unwrap();
        }
    };
    let (two, second) = hosted.guest();
    let number = unconnected(&second, 4096).qp.0 >> 16;
    talk(&second, 7000);
    drop((two, second));
    let mut joined = hosted.guest();
    while unconnected(&joined.1, 4096).qp.0 >> 16 != number {
        joined = hosted.guest();
    }
    talk(&joined.1, 7001);
}

/// A thread that sleeps for what comes by memory is woken, whatever the background thread does at
/// that moment, which has slept on the same before.
#[test]
fn who_waits_for_memory_is_woken() {
    let hosted = hosted(ip(60, 12));
    let config = SoftConfig { poll: PollMode::Sleep, ..SoftConfig::default() };
    let (one, first) = Joined::at(&hosted.path).unwrap().open(config).unwrap();
    let (_two, second) = hosted.guest();
    one.listen(PortSpace::Tcp, hosted.at(7000)).unwrap();
    let (near, far) = connect_to(&second, &first, 4096, 7000);
    let (short, long) = (Duration::from_micros(500), Duration::from_secs(2));
    let send = |id| {
        near.post(id, SendOp::Send, 0, 64);
        near.done(id);
    };
    let receive = |id| {
        let completion = far.completion();
        assert_eq!((completion.wr_id, completion.status), (id, Status::Success));
    };
    let mut sent_by_memory = 0;
    for id in 0..400 {
        far.post_recv(id, 0, 4096);
        // It has led and leaves the lead, which the background thread takes; then it leads again.
        while first.wait_cq(far.cq, false, Some(short)).unwrap() {}
        thread::scope(|scope| {
            let waiting = scope.spawn(|| first.wait_cq(far.cq, false, Some(long)).unwrap());
            thread::sleep(Duration::from_micros(id * 7 % 300));
            send(id);
            assert!(waiting.join().unwrap(), "message {id} woke nobody: {:?}", first.stats());
        });
        receive(id);
        sent_by_memory = second.stats().ring_sends;
    }
    assert!(sent_by_memory > 300, "{sent_by_memory}");
}
