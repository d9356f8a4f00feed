//! Programs that use the library attach to the host's node, and have its sockets.

mod common;

use std::io::IoSlice;
use std::net::SocketAddr;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use bowline::rds::{Control, Error, ErrorKind, Event, Interest, Node, SendControl, Socket};
use bowline_host::{Host, Policy, Quota};
use bowline_testkit::skipped;
use common::{LIMIT, addr, builder};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Longest wait for what must not come.
const SHORT: Duration = Duration::from_millis(50);

/// A node with two addresses that serves programs.
struct Scene {
    test: u16,
    node: Node,
    host: Option<Host>,
    place: PathBuf,
}

impl Scene {
    /// `test` is unique among all tests.
    fn new(test: u16) -> Self {
        Self::with_policy(test, Policy::default())
    }

    fn with_policy(test: u16, policy: Policy) -> Self {
        let node = builder(test, 1).address(common::ip(test, 2)).build().unwrap();
        let folder = std::env::temp_dir().join(format!("bowline-h{test}-{}", std::process::id()));
        std::fs::create_dir(&folder).unwrap();
        let place = folder.join("host.sock");
        let listener = UnixListener::bind(&place).unwrap();
        let host = Host::start(node.driver().clone(), listener, policy, Quota::NONE).unwrap();
        Self { test, node, host: Some(host), place }
    }

    fn a(&self, port: u16) -> SocketAddr {
        addr(self.test, 1, port)
    }

    fn b(&self, port: u16) -> SocketAddr {
        addr(self.test, 2, port)
    }

    /// A socket of a program of its own.
    fn socket(&self, at: SocketAddr) -> Socket {
        limited(Node::at(&self.place).unwrap().bind(at).unwrap())
    }

    /// Two of them, one at each address.
    fn pair(&self, port: u16) -> (Socket, Socket) {
        (self.socket(self.a(port)), self.socket(self.b(port)))
    }

    /// Another node goes on in the place of this one, as a process that starts would.
    fn replace(&mut self) {
        let all = self.host.take().unwrap().hand_over().unwrap();
        let listeners = self.node.hand_over(all.writer().unwrap()).unwrap();
        let (host, _, state) = all.open().unwrap();
        let next = builder(self.test, 1).address(common::ip(self.test, 2));
        self.node = next.resume(state, listeners, || Ok(())).unwrap();
        let driver = self.node.driver().clone();
        let host = Host::resume(driver, host, None, Policy::default(), Quota::NONE);
        self.host = Some(host.unwrap());
    }

    /// Nothing is left of programs that have closed their sockets.
    fn is_empty_again(&self) {
        let begun = std::time::Instant::now();
        while !self.node.info().sockets.is_empty() {
            assert!(begun.elapsed() < LIMIT, "sockets are left");
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        self.host = None;
        let _ = std::fs::remove_dir_all(self.place.parent().unwrap());
    }
}

fn limited(socket: Socket) -> Socket {
    socket.set_recv_timeout(Some(LIMIT));
    socket.set_send_timeout(Some(LIMIT));
    socket
}

/// Message number `n`: of any length, some too long for the ring.
fn message(n: usize) -> Vec<u8> {
    let len = match n % 97 {
        0 => 0,
        96 => 90_000,
        some => some * 61 % 5000,
    };
    (0..len).map(|at| (at + n) as u8).collect()
}

fn errno(result: Result<impl std::fmt::Debug, Error>) -> i32 {
    result.unwrap_err().errno().0
}

#[test]
fn messages_arrive_whole_and_in_order_both_ways() {
    const COUNT: usize = 3000;
    let scene = Scene::new(230);
    let (a, b) = scene.pair(4000);
    assert_eq!(a.local_addr(), Some(scene.a(4000)));
    let ends = [(&a, scene.b(4000)), (&b, scene.a(4000))];
    std::thread::scope(|scope| {
        for (own, peer) in ends {
            scope.spawn(move || {
                for n in 0..COUNT {
                    assert_eq!(own.send_to(&message(n), peer).unwrap(), message(n).len());
                }
            });
            scope.spawn(move || {
                for n in 0..COUNT {
                    let got = own.recv_message().unwrap();
                    assert_eq!((got.source(), got.to_vec()), (peer, message(n)), "{n}");
                }
            });
        }
    });
    drop((a, b));
    scene.is_empty_again();
}

/// Over TCP, with a node that is embedded in its program.
#[test]
fn a_socket_of_another_node_is_reached_as_from_that_node() {
    let scene = Scene::new(231);
    let far = builder(231, 3).build().unwrap();
    let far = limited(far.bind(addr(231, 3, 4000)).unwrap());
    let near = scene.socket(scene.a(0));
    near.connect(addr(231, 3, 4000)).unwrap();
    assert_eq!(near.peer_addr(), far.local_addr());
    let mut buf = vec![0; 100_000];
    for n in 0..500 {
        near.send(&message(n)).unwrap();
        let (len, from) = far.recv_from(&mut buf).unwrap();
        assert_eq!(buf[..len], message(n));
        far.send_to(&buf[..len], from).unwrap();
        let len = near.recv(&mut buf).unwrap();
        assert_eq!(buf[..len], message(n));
    }
    near.flush(Some(LIMIT)).unwrap();
}

#[test]
fn batches_pieces_and_cut_messages_are_as_on_a_node_of_the_process() {
    let scene = Scene::new(232);
    let (a, b) = scene.pair(4000);
    let to = scene.b(4000);
    let batch: Vec<Vec<u8>> = (1..20).map(message).collect();
    let batch: Vec<(SocketAddr, &[u8])> = batch.iter().map(|m| (to, m.as_slice())).collect();
    assert_eq!(a.send_batch(&batch).unwrap(), batch.len());
    let mut got = Vec::new();
    while got.len() < batch.len() {
        b.recv_batch(&mut got, 7).unwrap();
    }
    for (got, (_, sent)) in got.iter().zip(&batch) {
        assert_eq!(got.to_vec(), *sent);
    }
    let pieces = [&b"to"[..], b"", b"gether"].map(IoSlice::new);
    assert_eq!(a.send_vectored_to(&pieces, to).unwrap(), 8);
    assert_eq!(b.peek_message().unwrap().to_vec(), b"together");
    let mut short = [0; 4];
    assert_eq!(b.recv_from(&mut short).unwrap(), (4, scene.a(4000)));
    assert_eq!(&short, b"toge");
    // The rest is lost.
    b.set_nonblocking(true);
    assert!(b.recv_from(&mut short).unwrap_err().is_would_block());
}

#[test]
fn who_must_not_wait_does_not_and_who_may_waits_no_longer_than_the_limit() {
    let scene = Scene::new(233);
    let (a, b) = scene.pair(4000);
    let mut buf = [0; 10];
    a.set_recv_timeout(Some(SHORT));
    let late = a.recv_from(&mut buf).unwrap_err();
    assert!(late.is_timed_out() && late.errno() == 110, "{late}");
    a.set_recv_timeout(Some(Duration::ZERO));
    assert!(a.recv_from(&mut buf).unwrap_err().is_timed_out());
    assert!(a.wait(Interest::READ, Some(SHORT)).unwrap_err().is_timed_out());
    a.wait(Interest::READ | Interest::WRITE, Some(SHORT)).unwrap();
    let ready = a.poll().unwrap();
    assert!(!ready.readable && ready.writable, "{ready:?}");
    a.set_nonblocking(true);
    assert!(a.recv_message().unwrap_err().is_would_block());
    // A wait ends when something comes.
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| a.wait(Interest::READ, Some(LIMIT)));
        b.send_to(b"now", scene.a(4000)).unwrap();
        waits.join().unwrap().unwrap();
    });
    assert!(a.poll().unwrap().readable);
    assert_eq!(shown(&a), PollFlags::IN | PollFlags::OUT);
    assert_eq!(a.recv(&mut buf).unwrap(), 3);
    assert_eq!(shown(&a), PollFlags::OUT);
    // Nobody reads, and the socket's buffer is full.
    b.set_send_timeout(Some(SHORT));
    let full = loop {
        match b.send_to(&[0; 1000], scene.a(4000)) {
            Ok(_) => {}
            Err(error) => break error,
        }
    };
    assert!(full.is_timed_out(), "{full}");
}

/// What the descriptor of a socket shows.
fn shown(socket: &Socket) -> PollFlags {
    let fd = socket.event_fd().unwrap();
    let mut one = [PollFd::new(&fd, PollFlags::IN | PollFlags::OUT)];
    poll(&mut one, Some(&Timespec::default())).unwrap();
    one[0].revents()
}

#[test]
fn a_congested_destination_is_refused_and_told_of_when_it_is_free() {
    let scene = Scene::new(234);
    let (a, b) = scene.pair(4000);
    b.set_recv_buffer(4096).unwrap();
    assert_eq!(b.recv_buffer().unwrap(), 4096);
    a.set_nonblocking(true);
    a.set_cong_monitor(true).unwrap();
    let mut sent = 0;
    let refused = loop {
        match a.send_to(&message(50), scene.b(4000)) {
            Ok(_) => sent += 1,
            Err(error) if error.errno() == 11 => std::thread::yield_now(),
            Err(error) => break error,
        }
    };
    assert!(refused.errno() == 105 && refused.is_would_block(), "{refused}");
    for _ in 0..sent {
        assert_eq!(b.recv_message().unwrap().to_vec(), message(50));
    }
    a.wait(Interest::READ, Some(LIMIT)).unwrap();
    // Whoever takes messages only is not held up by the notification.
    assert_eq!(errno(a.recv_from(&mut [0; 10])), 11);
    let notification = a.recv_message().unwrap();
    assert!(notification.is_notification());
    let [Control::CongestionUpdate(ports)] = notification.control() else {
        panic!("{notification:?}")
    };
    assert_ne!(ports & 1 << (4000 % 64), 0);
    a.send_to(b"again", scene.b(4000)).unwrap();
    assert_eq!(b.recv_message().unwrap().to_vec(), b"again");
    // Who may wait is woken by the reader.
    a.set_nonblocking(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..200 {
                a.send_to(&message(50), scene.b(4000)).unwrap();
            }
        });
        scope.spawn(|| (0..200).for_each(|_| drop(b.recv_message().unwrap())));
    });
}

#[test]
fn options_of_the_socket_reach_the_node() {
    let scene = Scene::new(235);
    let (a, b) = scene.pair(4000);
    a.set_send_buffer(30_000).unwrap();
    assert_eq!(a.send_buffer().unwrap(), 30_000);
    assert_eq!(errno(a.send_to(&[0; 30_001], scene.b(4000))), 90);
    b.set_timestamp(true).unwrap();
    let before = std::time::SystemTime::now();
    a.send_to(b"when", scene.b(4000)).unwrap();
    let got = b.recv_message().unwrap();
    let [Control::Timestamp(at)] = got.control() else { panic!("{got:?}") };
    assert!(*at + LIMIT > before && *at < before + LIMIT, "{at:?}");
    // As on a node of this process.
    for control in [SendControl::RdmaDest(7), SendControl::ZcopyCookie(7), SendControl::RdmaArgs] {
        let own = scene.node.bind(scene.a(0)).unwrap();
        let send = |socket: &Socket| {
            errno(socket.send_message(Some(scene.b(4000)), &[IoSlice::new(b"x")], &[control]))
        };
        assert_eq!(send(&a), send(&own), "{control:?}");
    }
    let node = Node::at(&scene.place).unwrap();
    let delivered = node.counters().into_iter().find(|(name, _)| *name == "recv_delivered");
    assert_eq!(delivered, Some(("recv_delivered", 1)));
    assert_eq!(errno(a.bind(scene.a(4001))), 22);
    assert_eq!(errno(node.bind(scene.a(4000))), 98);
    assert_eq!(errno(node.bind(addr(1, 1, 4000))), 99);
    assert_eq!(errno(node.socket().unwrap().send_to(b"x", scene.b(4000))), 107);
}

/// The system's limit on what sockets may ask for is one of kernels. A buffer beyond the quota is
/// refused with words that say what to change, and stays as it is.
#[test]
fn buffers_are_as_large_as_asked_within_the_quota() {
    let scene = Scene::new(251);
    let (a, b) = scene.pair(4000);
    a.set_send_buffer(64 << 20).unwrap();
    b.set_recv_buffer(48 << 20).unwrap();
    assert_eq!((a.send_buffer().unwrap(), b.recv_buffer().unwrap()), (64 << 20, 48 << 20));
    a.send_to(&[7; 1 << 20], scene.b(4000)).unwrap();
    assert_eq!(b.recv_message().unwrap().to_vec(), [7; 1 << 20]);

    let user = rustix::process::getuid().as_raw();
    let quota = Quota { send_bytes: 3 << 20, recv_bytes: 2 << 20, ..Quota::NONE };
    let quotas = [(user, quota)].into();
    let scene = Scene::with_policy(252, Policy { quotas, ..Policy::default() });
    let a = scene.socket(scene.a(4000));
    a.set_send_buffer(1 << 20).unwrap();
    for refused in [a.set_send_buffer(3 << 20 | 1), a.set_recv_buffer(2 << 20 | 1)] {
        let error = refused.unwrap_err();
        assert_eq!((error.kind(), errno(Err::<(), _>(error.clone()))), (ErrorKind::Limit, 105));
        assert!(error.to_string().contains("`send-bytes`"), "{error}");
    }
    assert_eq!(a.send_buffer().unwrap(), 1 << 20);
}

/// Also those that the node has pushed to the ring of the socket.
// tests [R-1011]
#[test]
fn unread_messages_are_listed_until_the_program_takes_them() {
    const COUNT: usize = 5;
    let scene = Scene::new(246);
    let (a, b) = scene.pair(4000);
    for n in 0..COUNT {
        a.send_to(&[0; 100], scene.b(4000)).unwrap();
        let begun = std::time::Instant::now();
        while scene.node.info().recv.len() <= n {
            assert!(begun.elapsed() < LIMIT, "message {n} has not come");
        }
    }
    assert!(b.wait(Interest::READ, Some(LIMIT)).is_ok());
    // Each has the host's thread look at active sockets. After 32 looks these are idle.
    (0..100).for_each(|_| drop(scene.node.info()));
    for left in (0..COUNT).rev() {
        assert_eq!(b.recv_message().unwrap().len(), 100);
        let info = scene.node.info();
        let rows: Vec<_> = info.recv.iter().map(|row| (row.local, row.remote, row.len)).collect();
        assert_eq!(rows, vec![(scene.b(4000), scene.a(4000), 100); left]);
        let socket = info.sockets.iter().find(|socket| socket.bound == b.local_addr()).unwrap();
        assert_eq!((socket.recv_messages, socket.recv_bytes), (left, left * 100));
    }
}

#[test]
fn what_is_sent_to_nobody_is_waited_for_and_can_be_cancelled() {
    let scene = Scene::new(236);
    let a = scene.socket(scene.a(4000));
    let nobody = addr(236, 9, 4000);
    for _ in 0..3 {
        a.send_to(b"kept", nobody).unwrap();
    }
    assert!(a.flush(Some(SHORT)).unwrap_err().is_timed_out());
    std::thread::scope(|scope| {
        let flushed = scope.spawn(|| a.flush(Some(LIMIT)));
        a.cancel_all().unwrap();
        flushed.join().unwrap().unwrap();
    });
    a.send_to(b"kept", nobody).unwrap();
    let begun = std::time::Instant::now();
    // The node takes it off the ring in a moment.
    while a.outstanding().unwrap().is_empty() {
        assert!(begun.elapsed() < LIMIT, "nothing is outstanding");
    }
    let [kept] = a.outstanding().unwrap()[..] else { panic!("one destination") };
    assert_eq!((kept.to, kept.messages, kept.bytes), (nobody, 1, 4));
    a.cancel_sent_to(nobody).unwrap();
    a.flush(Some(LIMIT)).unwrap();
}

// tests [R-1001]
#[test]
fn a_program_sees_its_sockets_messages_and_connections() {
    let scene = Scene::new(249);
    let (a, _b) = scene.pair(4000);
    let nobody = addr(249, 9, 4000);
    a.send_to(&message(0), scene.b(4000)).unwrap();
    a.send_to(b"kept", nobody).unwrap();
    let node = Node::at(&scene.place).unwrap();
    let begun = std::time::Instant::now();
    let info = loop {
        let info = node.info();
        // The node takes messages off the ring in a moment.
        if !info.recv.is_empty() && info.send.len() + info.retrans.len() > 0 {
            break info;
        }
        assert!(begun.elapsed() < LIMIT, "{info:?}");
    };
    let bound: Vec<_> = info.sockets.iter().map(|socket| socket.bound.unwrap()).collect();
    assert!(bound.contains(&scene.a(4000)) && bound.contains(&scene.b(4000)), "{bound:?}");
    assert_eq!(bound.len(), 2, "{bound:?}");
    let kept = info.send.iter().chain(&info.retrans).find(|row| row.remote == nobody).unwrap();
    assert_eq!((kept.local, kept.len), (scene.a(4000), 4));
    assert_eq!((info.recv[0].local, info.recv[0].remote), (scene.b(4000), scene.a(4000)));
    assert!(info.connections.iter().any(|conn| conn.remote == nobody.ip()), "{info:?}");
    let short = node.info_without_messages();
    assert!(short.send.is_empty() && short.retrans.is_empty() && short.recv.is_empty());
    assert_eq!(short.sockets.len(), 2);
}

#[test]
fn what_is_the_owners_is_not_for_programs() {
    let scene = Scene::new(237);
    let node = Node::at(&scene.place).unwrap();
    assert!(node.is_of_host() && !scene.node.is_of_host());
    for refused in [
        node.sysctl("net.rds.ping_enable").unwrap_err(),
        node.set_sysctl("net.rds.ping_enable", 0).unwrap_err(),
    ] {
        assert_eq!(refused.errno(), 95, "{refused}");
    }
    assert!(node.hand_over(Vec::new()).is_err());
    assert!(!node.shutdown(LIMIT) && node.drop_connections(None) == 0);
    assert!(node.events().is_empty() && node.info().sockets.is_empty());
    node.bind(scene.a(4000)).unwrap();
}

#[test]
fn a_close_ends_the_waits_of_other_threads_and_loses_what_is_unread() {
    let scene = Scene::new(238);
    let (a, b) = scene.pair(4000);
    for n in 0..50 {
        a.send_to(&message(n), scene.b(4000)).unwrap();
    }
    b.wait(Interest::READ, Some(LIMIT)).unwrap();
    b.close();
    assert_eq!(errno(b.recv_message()), 9);
    assert_eq!(errno(b.send_to(b"x", scene.a(4000))), 9);
    assert_eq!(errno(b.event_fd()), 9);
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| a.recv_message());
        // It is in its call soon; and if it is not, its call fails all the same.
        std::thread::sleep(SHORT);
        a.close();
        assert_eq!(errno(waits.join().unwrap()), 9);
    });
    scene.is_empty_again();
    // Their ports are free, and nothing of before is there.
    let (_, b) = scene.pair(4000);
    b.set_nonblocking(true);
    assert!(b.recv_message().unwrap_err().is_would_block());
}

#[test]
fn a_node_that_ends_is_told_of() {
    let mut scene = Scene::new(239);
    let node = Node::at(&scene.place).unwrap();
    let (a, b) = scene.pair(4000);
    // Both sides may post, and nobody is asked.
    for _ in 0..10 {
        a.send_to(b"x", scene.b(4000)).unwrap();
    }
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| while b.recv_message().is_ok() {});
        let flushes = scope.spawn(|| a.wait(Interest::READ, Some(LIMIT)));
        std::thread::sleep(SHORT);
        scene.host = None;
        waits.join().unwrap();
        assert_eq!(errno(flushes.join().unwrap()), 100);
    });
    let ended = b.recv_message().unwrap_err();
    assert_eq!(ended.errno(), 100);
    assert!(ended.to_string().contains("bowline node"), "{ended}");
    assert_eq!(errno(a.send_to(b"x", scene.b(4000))), 100);
    assert_eq!(errno(a.flush(None)), 100);
    assert_eq!(errno(node.socket()), 100);
    assert!(node.counters().is_empty());
}

/// A program that has sent and ends has sent, as with a kernel: what the node only gathered is
/// written before the socket is closed.
#[test]
fn what_a_program_sent_before_it_ended_arrives() {
    let scene = Scene::new(244);
    let far = builder(244, 3).build().unwrap();
    let far = limited(far.bind(addr(244, 3, 4000)).unwrap());
    let warms = scene.socket(scene.a(4000));
    for _ in 0..50 {
        warms.send_to(b"before", addr(244, 3, 4000)).unwrap();
        far.recv_message().unwrap();
        std::thread::sleep(Duration::from_millis(2));
    }
    warms.flush(Some(LIMIT)).unwrap();
    for round in 0..20_u32 {
        let program = scene.socket(scene.a(4000 + 1 + round as u16));
        for number in 0..50_u32 {
            program.send_to(&number.to_be_bytes(), addr(244, 3, 4000)).unwrap();
        }
        drop(program);
        for number in 0..50_u32 {
            let came = far.recv_message().unwrap();
            assert_eq!(came.to_vec(), number.to_be_bytes(), "round {round}");
        }
    }
}

/// As at SIGTERM: the host's node ends right after a program has received the last message.
#[test]
fn what_programs_received_is_acknowledged_before_their_node_ends() {
    for round in 0..4 {
        let mut scene = Scene::new(245);
        let far = builder(245, 3).build().unwrap();
        let a = limited(far.bind(addr(245, 3, 4000)).unwrap());
        let program = scene.socket(scene.b(4000));
        std::thread::scope(|threads| {
            threads.spawn(|| {
                for number in 0..500_u32 {
                    a.send_to(&number.to_be_bytes(), scene.b(4000)).unwrap();
                }
            });
            for number in 0..500_u32 {
                assert_eq!(program.recv_message().unwrap().to_vec(), number.to_be_bytes());
            }
        });
        scene.host = None;
        assert!(scene.node.shutdown(LIMIT), "round {round}");
        a.flush(Some(LIMIT)).unwrap();
        let begun = std::time::Instant::now();
        while !far.events().iter().any(|event| matches!(event, Event::PeerEnded { .. })) {
            assert!(begun.elapsed() < LIMIT, "nobody says that the node has ended");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

#[test]
fn a_node_that_is_not_there_is_asked_for() {
    for place in ["/nowhere/host.sock", &"/far".repeat(50)] {
        let absent = Node::at(place).unwrap_err();
        assert_eq!(absent.errno(), 97, "{absent}");
        assert!(absent.to_string().contains("start one with `bowline node`"), "{absent}");
    }
}

#[test]
fn threads_share_a_socket() {
    const COUNT: usize = 2000;
    let scene = Scene::new(240);
    let (a, b) = scene.pair(4000);
    let (to, end) = (scene.b(4000), &[0xff; 8]);
    let read = || {
        let mut all = Vec::new();
        loop {
            let got = b.recv_message().unwrap().to_vec();
            if got == end {
                return all;
            }
            all.push(u64::from_ne_bytes(got.try_into().unwrap()));
        }
    };
    let [mut all, more] = std::thread::scope(|scope| {
        let readers = [scope.spawn(read), scope.spawn(read)];
        let write = |first: usize| {
            for n in (first..COUNT).step_by(2) {
                a.send_to(&(n as u64).to_ne_bytes(), to).unwrap();
            }
        };
        let writers = [0, 1].map(|first| scope.spawn(move || write(first)));
        for writer in writers {
            writer.join().unwrap();
        }
        for _ in 0..2 {
            a.send_to(end, to).unwrap();
        }
        readers.map(|reader| reader.join().unwrap())
    });
    for reader in [&all, &more] {
        // Of each writer, in its order.
        for first in [0, 1] {
            assert!(reader.iter().filter(|n| *n % 2 == first).is_sorted());
        }
    }
    all.extend(more);
    all.sort_unstable();
    assert!(all.into_iter().eq(0..COUNT as u64));
}

/// The node hands over to one that goes on in its place; a flush that waits goes on waiting.
#[test]
fn a_node_that_is_replaced_keeps_its_sockets() {
    let mut scene = Scene::new(241);
    let (a, b) = scene.pair(4000);
    let waiting = scene.socket(scene.a(4001));
    waiting.send_to(b"to nobody", addr(241, 9, 4000)).unwrap();
    a.send_to(b"before", scene.b(4000)).unwrap();
    b.wait(Interest::READ, Some(LIMIT)).unwrap();
    std::thread::scope(|scope| {
        let flushed = scope.spawn(|| waiting.flush(Some(LIMIT)));
        // It is in its call soon; and if it is not, it asks the next node.
        std::thread::sleep(SHORT);
        scene.replace();
        a.send_to(b"after", scene.b(4000)).unwrap();
        assert_eq!(b.recv_message().unwrap().to_vec(), b"before");
        assert_eq!(b.recv_message().unwrap().to_vec(), b"after");
        waiting.cancel_all().unwrap();
        flushed.join().unwrap().unwrap();
    });
}

/// The other side of the next test, in a process of its own: sends back what it gets.
#[test]
#[ignore = "is run by another test"]
fn a_process_that_sends_back() {
    let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let before = descriptors();
    let own: SocketAddr = std::env::var("OWN").unwrap().parse().unwrap();
    let socket = limited(Node::of_host().unwrap().bind(own).unwrap());
    loop {
        let got = socket.recv_message().unwrap();
        socket.send_to(&got.to_vec(), got.source()).unwrap();
        if got.to_vec() == b"end" {
            break;
        }
    }
    socket.flush(Some(LIMIT)).unwrap();
    drop(socket);
    assert_eq!(descriptors(), before);
}

#[test]
fn another_process_finds_the_node_of_the_host() {
    let scene = Scene::new(242);
    let mut other = Command::new(std::env::current_exe().unwrap());
    other.args(["--ignored", "--exact", "a_process_that_sends_back"]);
    other.env("BOWLINE_RDS_SOCKET", &scene.place).env("OWN", scene.b(4000).to_string());
    let mut other = other.stdout(Stdio::null()).spawn().unwrap();
    let socket = scene.socket(scene.a(4000));
    says_back(&socket, scene.b(4000));
    assert!(other.wait().unwrap().success());
}

/// A peer that is about to bind its socket sends back what it gets, up to `end`.
fn says_back(socket: &Socket, peer: SocketAddr) {
    socket.set_recv_timeout(Some(SHORT));
    let begun = std::time::Instant::now();
    loop {
        socket.send_to(b"are you there?", peer).unwrap();
        match socket.recv_message() {
            Ok(_) => break,
            Err(error) => assert!(error.is_timed_out() && begun.elapsed() < LIMIT, "{error}"),
        }
    }
    socket.set_recv_timeout(Some(LIMIT));
    let next = || loop {
        let got = socket.recv_message().unwrap().to_vec();
        if got != b"are you there?" {
            return got;
        }
    };
    for n in 0..500 {
        socket.send_to(&message(n), peer).unwrap();
        assert_eq!(next(), message(n), "{n}");
    }
    socket.send_to(b"end", peer).unwrap();
    assert_eq!(next(), b"end");
}

/// A program of Python that knows nothing of bowline, with the preload library.
#[test]
fn a_preloaded_program_is_a_peer_as_any_other() {
    const PROGRAM: &str = "
import socket, sys
s = socket.socket(21, socket.SOCK_SEQPACKET)
s.bind((sys.argv[1], 4000))
while True:
    data, peer = s.recvfrom(100000)
    s.sendto(data, peer)
    if data == b'end':
        break
";
    if Command::new("python3").arg("--version").output().is_err() {
        return skipped::because("there is no python3");
    }
    let scene = Scene::new(243);
    let mut other = Command::new("python3");
    other.args(["-c", PROGRAM, &scene.b(0).ip().to_string()]);
    other.env("LD_PRELOAD", preload_library()).env("BOWLINE_RDS_SOCKET", &scene.place);
    let mut other = other.spawn().unwrap();
    let socket = scene.socket(scene.a(4000));
    says_back(&socket, scene.b(4000));
    assert!(other.wait().unwrap().success());
}

/// The preload library, which cargo does not build for tests.
fn preload_library() -> PathBuf {
    // This program is in target/PROFILE/deps.
    let own = std::env::current_exe().unwrap();
    let folder = own.parent().and_then(Path::parent).unwrap();
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["build", "--quiet", "--package", "bowline-preload", "--target-dir"]);
    cargo.arg(folder.parent().unwrap());
    if folder.ends_with("release") {
        cargo.arg("--release");
    }
    let status = cargo.current_dir(env!("CARGO_MANIFEST_DIR")).status().unwrap();
    assert!(status.success(), "cargo builds the library");
    folder.join("libbowline_preload.so")
}

#[test]
fn a_socket_in_a_log_is_one_line() {
    let scene = Scene::new(893);
    let a = scene.socket(scene.a(4000));
    let local = scene.a(4000);
    assert_eq!(
        format!("{a:?}"),
        format!("Socket {{ local: Some({local}), peer: None, node: host }}")
    );
    assert_eq!(format!("{:?}", Node::at(&scene.place).unwrap()), "Node(host)");
}

/// Sockets of the host's node in tasks: all calls, on one thread.
#[cfg(feature = "tokio")]
mod tasks {
    use super::*;

    fn runtime() -> tokio::runtime::Runtime {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
    }

    #[test]
    fn tasks_exchange_messages() {
        const ROUNDS: u32 = 500;
        let scene = Scene::new(890);
        let (a, b) = scene.pair(4000);
        let (at_a, at_b) = (scene.a(4000), scene.b(4000));
        runtime().block_on(async {
            let server = async {
                for round in 0..ROUNDS {
                    let mut buf = [0; 8];
                    let message = if round % 2 == 0 {
                        b.recv_async().await.unwrap().to_vec()
                    } else {
                        let (len, from) = b.recv_from_async(&mut buf).await.unwrap();
                        assert_eq!(from, at_a);
                        buf[..len].to_vec()
                    };
                    b.send_to_async(&message, at_a).await.unwrap();
                }
            };
            let client = async {
                for i in 0..ROUNDS {
                    a.send_vectored_to_async(&[IoSlice::new(&i.to_be_bytes())], at_b)
                        .await
                        .unwrap();
                    a.wait_async(Interest::READ).await.unwrap();
                    assert_eq!(a.recv_async().await.unwrap().to_vec(), i.to_be_bytes());
                }
                a.flush_async().await.unwrap();
            };
            let both = async { tokio::join!(server, client) };
            tokio::time::timeout(LIMIT, both).await.unwrap();
        });
    }

    #[test]
    fn tasks_wait_for_room_and_for_time_limits() {
        const COUNT: u32 = 3000;
        let scene = Scene::new(891);
        let (a, b) = scene.pair(4000);
        let to = scene.b(4000);
        runtime().block_on(async {
            b.set_recv_timeout(Some(SHORT));
            assert_eq!(b.recv_async().await.unwrap_err().errno(), 110);
            b.set_recv_timeout(None);
            // More than both buffers hold: it waits for room, and for a congested port.
            let sender = async {
                for i in 0..COUNT {
                    let mut message = [0; 2000];
                    message[..4].copy_from_slice(&i.to_be_bytes());
                    a.send_to_async(&message, to).await.unwrap();
                }
            };
            let receiver = async {
                let mut messages = Vec::new();
                while messages.len() < COUNT as usize {
                    b.recv_batch_async(&mut messages, 16).await.unwrap();
                    tokio::task::yield_now().await;
                }
                for (i, message) in (0..COUNT).zip(&messages) {
                    assert_eq!(message.to_vec()[..4], i.to_be_bytes());
                }
            };
            let both = async { tokio::join!(sender, receiver) };
            tokio::time::timeout(LIMIT, both).await.unwrap();
        });
    }

    /// Several tasks wait for one socket: each message comes to one of them.
    #[test]
    fn tasks_share_a_socket() {
        let scene = Scene::new(892);
        let (a, b) = scene.pair(4000);
        let to = scene.b(4000);
        runtime().block_on(async {
            let one = || async { b.recv_async().await.unwrap().to_vec()[0] };
            let send = async {
                tokio::time::sleep(SHORT).await;
                for number in 1..=3_u8 {
                    a.send_to_async(&[number], to).await.unwrap();
                }
            };
            let all = async { tokio::join!(one(), one(), one(), send) };
            let (x, y, z, ()) = tokio::time::timeout(LIMIT, all).await.unwrap();
            let mut came = [x, y, z];
            came.sort_unstable();
            assert_eq!(came, [1, 2, 3]);
        });
    }
}
