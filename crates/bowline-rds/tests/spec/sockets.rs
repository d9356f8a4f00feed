//! Sections 6.4, 6.5 and 8: bind, connect, options, receiving.

use std::time::Duration;

use bowline_rds::{Config, Control, Error, Interest, LatencyTrace, RecvOpts, Sysctl, Transport};

use crate::support::*;

fn bind(lab: &mut Lab, at: &str) -> Result<bowline_rds::SocketId, Error> {
    let s = lab.node.socket().expect("a socket");
    lab.node.bind(s, addr(at)).map(|()| s)
}

// tests
#[test]
fn bind_refuses_what_is_no_address_of_one_host() {
    let mut lab = Lab::smaller();
    for bad in [
        "0.0.0.0:5",
        "255.255.255.255:5",
        "224.0.0.1:5",
        "[::]:5",
        "[ff02::1]:5",
        "[::ffff:0.0.0.0]:5",
        "[::ffff:255.255.255.255]:5",
        "[fe80::1]:5",
    ] {
        assert_eq!(bind(&mut lab, bad).map_err(|e| e.errno().0), Err(22), "{bad}");
    }
    assert_eq!(bind(&mut lab, "10.0.0.1:1"), Err(Error::ReservedPort));
    assert_eq!(Error::ReservedPort.errno(), 22);
    // what is no address of the node is found first
    assert_eq!(bind(&mut lab, "10.0.0.99:1"), Err(Error::AddrNotAvailable));
    let s = bind(&mut lab, "10.0.0.1:5").expect("bound");
    assert_eq!(lab.node.bind(s, addr("10.0.0.1:6")), Err(Error::AlreadyBound));
    assert_eq!(Error::AlreadyBound.errno(), 22);
    assert_eq!(lab.node.local_addr(s), Ok(Some(addr("10.0.0.1:5"))));
}

// tests
#[test]
fn an_address_and_port_belong_to_one_socket() {
    let mut lab = Lab::new(Config { addrs: vec![ip(A), ip(B)], ..Config::default() });
    assert_eq!(bind(&mut lab, "10.9.9.9:5"), Err(Error::AddrNotAvailable));
    assert_eq!(Error::AddrNotAvailable.errno(), 99);
    let s = bind(&mut lab, "10.0.0.1:5").expect("bound");
    assert_eq!(lab.node.transport(s), Ok(Some(Transport::Tcp)));
    assert_eq!(bind(&mut lab, "10.0.0.1:5"), Err(Error::AddrInUse));
    assert_eq!(bind(&mut lab, "[::ffff:10.0.0.1]:5"), Err(Error::AddrInUse), "the same [R-803]");
    assert_eq!(Error::AddrInUse.errno(), 98);
    bind(&mut lab, "10.0.0.2:5").expect("another address");
    lab.node.close(lab.now, s);
    let again = bind(&mut lab, "[::ffff:10.0.0.1]:5").expect("free again");
    assert_eq!(lab.node.local_addr(again), Ok(Some(addr("10.0.0.1:5"))), "shown as IPv4");
}

// tests
#[test]
fn the_transport_is_chosen_once() {
    let mut lab = Lab::new(Config::default());
    lab.node.add_local(ip(A));
    let s = lab.node.socket().expect("a socket");
    assert_eq!(lab.node.transport(s), Ok(None));
    for (number, errno) in [(-1, 22), (3, 22), (0, 92), (1, 92)] {
        let result = lab.node.set_transport(s, number);
        assert_eq!(result.map_err(|e| e.errno().0), Err(errno), "{number}");
    }
    lab.node.set_transport(s, 2).expect("TCP");
    assert_eq!(lab.node.set_transport(s, 2), Err(Error::NotSupported));
    assert_eq!(lab.node.bind(s, addr("10.9.9.9:5")), Err(Error::TransportAddress));
    assert_eq!(Error::TransportAddress.errno(), 92);
    assert_eq!(lab.node.transport(s), Ok(Some(Transport::Tcp)), "the choice stays");
    assert_eq!(lab.node.bind(s, addr("10.0.0.1:1")), Err(Error::ReservedPort));
    assert_eq!(lab.node.transport(s), Ok(None), "and is gone after this error");
    lab.node.set_transport(s, 2).expect("TCP");
    lab.node.bind(s, addr("127.0.0.1:5")).expect("TCP takes 127/8 when asked");
    assert_eq!(lab.node.transport(s), Ok(Some(Transport::Tcp)));
    let t = bind(&mut lab, "127.0.0.2:5").expect("bound");
    assert_eq!(lab.node.transport(t), Ok(Some(Transport::Loopback)));
    assert_eq!(lab.node.set_transport(t, 2), Err(Error::NotSupported));
    assert_eq!(
        bind(&mut lab, "[::1]:5").map(|s| lab.node.transport(s)),
        Ok(Ok(Some(Transport::Loopback)))
    );
}

// tests
#[test]
fn port_0_takes_any_free_port_above_1() {
    let mut lab = Lab::smaller();
    let mut seen = std::collections::HashSet::new();
    for _ in 0..2000 {
        let s = bind(&mut lab, "10.0.0.1:0").expect("bound");
        let port = lab.node.local_addr(s).expect("a socket").expect("bound").port();
        assert!(port > 1 && seen.insert(port));
    }
    lab.node.check_invariants();
    let mut config = config(A);
    config.limits.sockets = 70_000;
    let mut full = Lab::new(config);
    for _ in 2..=u16::MAX {
        bind(&mut full, "10.0.0.1:0").expect("one of 65534");
    }
    assert_eq!(bind(&mut full, "10.0.0.1:0"), Err(Error::AddrInUse));
}

// tests
#[test]
fn connect_stores_a_destination_and_does_nothing_else() {
    let mut lab = Lab::smaller();
    let s = lab.node.socket().expect("a socket");
    assert_eq!(lab.node.peer_addr(s), Err(Error::NotConnected));
    assert_eq!(Error::NotConnected.errno(), 107);
    for (bad, errno) in [
        ("0.0.0.0:5", 89),
        ("224.0.0.1:5", 22),
        ("255.255.255.255:5", 22),
        ("[::]:5", 91),
        ("[ff02::1]:5", 91),
        ("[::ffff:0.0.0.0]:5", 91),
        ("[::ffff:224.0.0.1]:5", 91),
        ("[fe80::1]:5", 22),
    ] {
        let result = lab.node.connect(s, addr(bad));
        assert_eq!(result.map_err(|e| e.errno().0), Err(errno), "{bad}");
    }
    lab.node.connect(s, addr("10.0.0.2:5000")).expect("connected");
    lab.node.connect(s, addr("10.0.0.2:5001")).expect("and again");
    assert_eq!(lab.node.peer_addr(s), Ok(addr("10.0.0.2:5001")));
    assert_eq!(lab.node.local_addr(s), Ok(None));
    lab.settle();
    assert!(lab.connects.is_empty());
    // A scope other than the bound one.
    let mut lab = Lab::new(Config { addrs: vec![ip("fe80::1")], ..Config::default() });
    let s = bind(&mut lab, "[fe80::1%3]:5").expect("bound");
    assert_eq!(lab.node.connect(s, addr("[fe80::2%4]:5")), Err(Error::ScopeMismatch));
    lab.node.connect(s, addr("[fe80::2%3]:5")).expect("connected");
    let t = lab.node.socket().expect("a socket");
    lab.node.connect(t, addr("[fe80::2%4]:5")).expect("connected");
    assert_eq!(lab.node.bind(t, addr("[fe80::1%3]:6")), Err(Error::ScopeMismatch));
    assert_eq!(Error::ScopeMismatch.errno(), 22);
}

// tests the limits of a node, and their errors
#[test]
fn sockets_and_peers_are_bounded() {
    let mut config = config(A);
    config.limits.sockets = 2;
    config.limits.peers = 2;
    let mut lab = Lab::new(config);
    let s = lab.bound("10.0.0.1:4000");
    lab.bound("10.0.0.1:4001");
    assert_eq!(lab.node.socket(), Err(Error::TooManySockets));
    assert_eq!(Error::TooManySockets.errno(), 23);
    lab.send(s, "10.0.0.2:5", b"x").expect("sent");
    lab.send(s, "10.0.0.3:5", b"x").expect("sent");
    assert_eq!(lab.send(s, "10.0.0.4:5", b"x"), Err(Error::TooManyPeers));
    assert_eq!(Error::TooManyPeers.errno(), 12);
    // A peer without messages makes room [B-18], even if a probe for it is still queued.
    lab.node.cancel_sent_to(lab.now, s, addr("10.0.0.2:5")).expect("cancelled");
    lab.send(s, "10.0.0.4:5", b"x").expect("sent");
    assert_eq!(lab.counter("bl_peers_reclaimed"), 1);
}

// tests
#[test]
fn receiving_on_an_unbound_socket_finds_nothing() {
    let mut lab = Lab::smaller();
    let s = lab.node.socket().expect("a socket");
    assert_eq!(lab.recv(s).err(), Some(Error::Empty));
    assert_eq!(Error::Empty.errno(), 11);
    lab.node.close(lab.now, s);
    assert_eq!(lab.recv(s).err(), Some(Error::BadSocket));
}

// tests
#[test]
fn a_peek_leaves_the_message_and_a_short_buffer_loses_the_rest() {
    let (mut lab, s, link) = at(B, 5000).kernel(1);
    lab.deliver(link, &[data(2, 9, 5000, b"0123456789"), data(3, 10, 5000, b"")]);
    let peek = RecvOpts { peek: true, want_control: true, ..RecvOpts::default() };
    for _ in 0..2 {
        let got = lab.node.recv(lab.now, s, peek).expect("a message");
        let rope = got.data.expect("data");
        assert_eq!(rope.len(), 10, "the length is known");
        let mut short = [0; 4];
        assert_eq!(rope.copy_to(&mut short), 4);
        assert_eq!(&short, b"0123");
    }
    assert_eq!(lab.node.info().sockets[0].recv_bytes, 10);
    assert_eq!(lab.counter("recv_delivered"), 2, "peeks count");
    assert_eq!(text(&lab.recv(s).expect("a message")), b"0123456789");
    let empty = lab.recv(s).expect("the empty one");
    assert_eq!((empty.source, text(&empty)), (Some(addr("10.0.0.1:10")), vec![]));
    assert_eq!(lab.counter("recv_bytes_added_to_sock"), 10);
    assert_eq!(lab.counter("recv_bytes_freed_fromsock"), 10);
}

// tests for IPv6, T-20
#[test]
fn ipv6_peers_are_named_with_their_scope() {
    let mut lab = Lab::new(Config { addrs: vec![ip("fe80::2")], ..Config::default() });
    let s = lab.node.socket().expect("a socket");
    lab.node.bind(s, addr("[fe80::2%3]:5000")).expect("bound");
    let link = lab
        .node
        .handle_accepted(lab.now, addr("[fe80::2%3]:16385"), addr("[fe80::1%3]:40000"))
        .expect("accepted");
    lab.deliver(link, &[data(1, 9, 5000, b"six")]);
    assert_eq!(lab.recv(s).expect("a message").source, Some(addr("[fe80::1%3]:9")));
}

fn of_link(links: &[(&str, u32)]) -> Lab {
    let links: Vec<_> = links.iter().map(|(of, link)| (of.parse().unwrap(), *link)).collect();
    let addrs = links.iter().map(|(of, _)| std::net::IpAddr::V6(*of)).collect();
    Lab::new(Config { addrs, links, ..Config::default() })
}

// tests
#[test]
fn a_link_local_address_is_bound_on_its_interface_only() {
    let mut lab = of_link(&[("fe80::2", 3)]);
    assert_eq!(bind(&mut lab, "[fe80::2%4]:5"), Err(Error::AddrNotAvailable));
    let s = bind(&mut lab, "[fe80::2]:5").expect("bound");
    assert_eq!(lab.node.local_addr(s), Ok(Some(addr("[fe80::2%3]:5"))));
    lab.node.connect(s, addr("[fe80::9]:7")).expect("connected");
    assert_eq!(lab.node.peer_addr(s), Ok(addr("[fe80::9%3]:7")));
    lab.send(s, "[fe80::9]:5", b"x").expect("sent");
    assert_eq!(lab.send(s, "[fe80::9%4]:5", b"x"), Err(Error::ScopeMismatch));
    lab.settle();
    let (_, remote, _) = lab.connects[0];
    assert_eq!(remote, addr("[fe80::9%3]:16385"));
}

// tests
#[test]
fn an_equal_address_on_another_interface_is_a_peers() {
    let mut lab = of_link(&[("fe80::2", 3), ("fe80::5", 4)]);
    let s = bind(&mut lab, "[fe80::5]:5000").expect("bound");
    let accepted = |lab: &mut Lab, remote| {
        lab.node.handle_accepted(lab.now, addr("[fe80::5%4]:16385"), addr(remote))
    };
    assert!(accepted(&mut lab, "[fe80::5%4]:40000").is_err());
    let link = accepted(&mut lab, "[fe80::2%4]:40000").expect("accepted");
    lab.deliver(link, &[data(1, 9, 5000, b"six")]);
    assert_eq!(lab.recv(s).expect("a message").source, Some(addr("[fe80::2%4]:9")));
}

// tests
#[test]
fn one_link_local_address_of_the_two_is_enough_for_a_scope() {
    for (own, here, there, source) in [
        ("[fe80::2%3]:5000", "[fe80::2%3]:16385", "[fd00::1]:40000", "[fd00::1]:9"),
        ("[fec0::2]:5000", "[fec0::2]:16385", "[fe80::1%3]:40000", "[fe80::1%3]:9"),
        ("[fe80::2%3]:5000", "[fe80::2%3]:16385", "[fe80::1%3]:40000", "[fe80::1%3]:9"),
    ] {
        let ip = addr(own).ip();
        let mut lab = Lab::new(Config { addrs: vec![ip], ..Config::default() });
        let s = bind(&mut lab, own).expect("bound");
        let link = lab.node.handle_accepted(lab.now, addr(here), addr(there)).expect("accepted");
        lab.deliver(link, &[data(1, 9, 5000, b"six")]);
        let from = lab.recv(s).expect("a message").source.expect("a sender");
        assert_eq!((from.ip(), from.port()), (addr(source).ip(), 9), "{own}");
        let answered = lab.send(s, &from.to_string(), b"y");
        answered.expect("to where it came from");
        assert_eq!(lab.node.info().connections.len(), 1, "{own}");
    }
}

// tests
#[test]
fn only_messages_queued_while_enabled_carry_a_time() {
    let (mut lab, s, link) = at(B, 5000).kernel(1);
    lab.deliver(link, &[data(2, 9, 5000, b"before")]);
    lab.node.set_timestamp(s, true).expect("set");
    lab.ms(5);
    let at = lab.now;
    lab.deliver(link, &[data(3, 9, 5000, b"while")]);
    lab.ms(5);
    lab.node.set_timestamp(s, false).expect("set");
    lab.deliver(link, &[data(4, 9, 5000, b"after")]);
    let control: Vec<_> = (0..3).map(|_| lab.recv(s).expect("a message").control).collect();
    assert_eq!(control, [vec![], vec![Control::Timestamp(at)], vec![]]);
}

// tests
#[test]
fn latency_is_measured_between_the_points_asked_for() {
    let (mut lab, s, link) = at(B, 5000).kernel(1);
    let bad = LatencyTrace { count: 4, positions: [0; 3] };
    assert_eq!(lab.node.set_latency_trace(s, bad), Err(Error::Fault));
    assert_eq!(Error::Fault.errno(), 14);
    let trace = LatencyTrace { count: 3, positions: [0, 1, 2] };
    lab.node.set_latency_trace(s, trace).expect("set");
    lab.node.set_timestamp(s, true).expect("set");
    let bytes = data(2, 9, 5000, b"in two parts").bytes();
    lab.feed(link, &bytes[..50]);
    lab.ms(3);
    lab.feed(link, &bytes[50..]);
    let queued = lab.now;
    lab.ms(4);
    let got = lab.recv(s).expect("a message");
    let [Control::Timestamp(at), Control::Latency { trace: back, nanos }] = got.control[..] else {
        panic!("{:?}", got.control)
    };
    assert_eq!((at, back), (queued, trace));
    assert_eq!(nanos.iter().sum::<u64>(), 7_000_000, "{nanos:?}");
    assert_eq!(nanos[2], 4_000_000);
    // A bad position leaves it off.
    let bad = LatencyTrace { count: 1, positions: [3, 0, 0] };
    assert_eq!(lab.node.set_latency_trace(s, bad), Err(Error::Fault));
    lab.node.set_timestamp(s, false).expect("set");
    lab.deliver(link, &[data(3, 9, 5000, b"x")]);
    assert!(lab.recv(s).expect("a message").control.is_empty());
}

// tests: times of a message that came before the option count from then on
#[test]
fn latency_of_a_message_that_waited_counts_from_the_option() {
    let (mut lab, s, link) = at(B, 5000).kernel(1);
    lab.deliver(link, &[data(2, 9, 5000, b"before")]);
    lab.ms(3);
    let trace = LatencyTrace { count: 3, positions: [0, 1, 2] };
    lab.node.set_latency_trace(s, trace).expect("set");
    lab.ms(4);
    let got = lab.recv(s).expect("a message");
    assert_eq!(got.control, [Control::Latency { trace, nanos: [0, 0, 4_000_000] }]);
}

// tests: a remote key comes first
#[test]
fn a_remote_key_is_handed_over() {
    let (mut lab, s, link) = at(B, 5000).kernel(1);
    lab.node.set_timestamp(s, true).expect("set");
    let mut frame = data(2, 9, 5000, b"x");
    frame.header.ext[..9].copy_from_slice(&[3, 0xde, 0xad, 0xbe, 0xef, 0, 0, 0, 0x40]);
    lab.deliver(link, &[frame]);
    let control = lab.recv(s).expect("a message").control;
    assert_eq!(control, [Control::RdmaDest(0x40_dead_beef), Control::Timestamp(lab.now)]);
}

// tests
#[test]
fn messages_reach_only_the_address_they_came_to() {
    let mut lab = Lab::new(Config { addrs: vec![ip(B), ip("10.0.0.9")], ..Config::default() });
    let link = lab.kernel(A, 1);
    let elsewhere = lab.bound("10.0.0.9:5000");
    lab.deliver(link, &[data(2, 9, 5000, b"x")]);
    assert_eq!(lab.counter("recv_drop_no_sock"), 1);
    assert_eq!(lab.recv(elsewhere).err(), Some(Error::Empty));
    let s = lab.bound("10.0.0.2:5000");
    lab.node.connect(s, addr("10.0.0.77:1")).expect("connected");
    lab.deliver(link, &[data(3, 9, 5000, b"from anybody")]);
    assert_eq!(lab.recv_all(s), [b"from anybody"]);
}

// tests one wake-up for a registered reader
#[test]
fn a_reader_is_woken_once() {
    let (mut lab, s, link) = at(B, 5000).kernel(1);
    lab.deliver(link, &[data(2, 9, 5000, b"x")]);
    assert!(lab.wakes.is_empty(), "nobody asked");
    lab.node.register(s, Interest::READ).expect("registered");
    lab.deliver(link, &[data(3, 9, 5000, b"x"), data(4, 9, 5000, b"x")]);
    assert_eq!(lab.wakes, [(s, Interest::READ)]);
    assert!(lab.node.readiness(s).expect("ready").readable);
}

// tests, and the ranges of section 5.1 and 6.2
#[test]
fn options_are_stored() {
    let mut lab = Lab::smaller();
    let s = lab.node.socket().expect("a socket");
    assert_eq!(lab.node.send_buffer(s), Ok(106_496));
    assert_eq!(lab.node.recv_buffer(s), Ok(106_496));
    lab.node.set_send_buffer(s, 1).expect("set");
    assert_eq!(lab.node.send_buffer(s), Ok(2304));
    assert_eq!(lab.node.recverr(s), Ok(false));
    lab.node.set_recverr(s, true).expect("set");
    assert_eq!(lab.node.recverr(s), Ok(true));
}

// tests [R-901] [D-3] and section 9
#[test]
fn sysctls_have_the_kernels_ranges() {
    let mut lab = Lab::smaller();
    let set = |lab: &mut Lab, name: &str, value| {
        lab.node.set_sysctl(lab.now, name, value).map_err(|e| e.errno().0)
    };
    for (name, value, result) in [
        ("net.rds.reconnect_min_delay_ms", 0, Err(22)),
        ("net.rds.reconnect_min_delay_ms", 2000, Err(22)),
        ("net.rds.reconnect_min_delay_ms", 500, Ok(())),
        ("net.rds.reconnect_max_delay_ms", 1, Err(22)),
        ("net.rds.reconnect_max_delay_ms", 500, Ok(())),
        ("reconnect_delay_min_ms", 7, Ok(())),
        ("net.rds.reconnect_delay_max_ms", -1, Err(22)),
        ("net.rds.max_unacked_packets", -5, Ok(())),
        ("net.rds.max_unacked_bytes", 0, Ok(())),
        ("net.rds.ping_enable", 17, Err(22)),
        ("net.rds.ping_enable", 0, Ok(())),
        ("net.rds.ping_enable", 1, Ok(())),
        ("net.rds.tcp.rds_tcp_sndbuf", 4607, Err(22)),
        ("net.rds.tcp.rds_tcp_sndbuf", 4608, Ok(())),
        ("net.rds.tcp.rds_tcp_sndbuf", 0, Err(22)),
        ("net.rds.tcp.rds_tcp_rcvbuf", 2303, Err(22)),
        ("net.rds.tcp.rds_tcp_rcvbuf", 2304, Ok(())),
        ("net.rds.nothing", 1, Err(92)),
    ] {
        assert_eq!(set(&mut lab, name, value), result, "{name} = {value}");
    }
    assert_eq!(lab.node.sysctl("net.rds.reconnect_delay_min_ms"), Some(7));
    assert_eq!(lab.node.sysctl("net.rds.ping_enable"), Some(1));
    assert_eq!(lab.node.sysctl("net.rds.max_unacked_packets"), Some(-5));
    assert_eq!(lab.node.sysctl("net.rds.nothing"), None);
    let Sysctl { reconnect_max_delay_ms, max_unacked_bytes, .. } = Sysctl::default();
    assert_eq!((reconnect_max_delay_ms, max_unacked_bytes), (1000, 16_777_216));
    // Odd budgets do no harm.
    let s = lab.bound("10.0.0.1:4000");
    for _ in 0..5 {
        lab.send(s, "10.0.0.2:5", b"x").expect("sent");
    }
}

// tests and section 9: a new TCP buffer size drops the connections, after draining
#[test]
fn a_new_tcp_buffer_drains_every_connection() {
    let (mut lab, s, link) = at(B, 5000).kernel(1);
    for _ in 0..2 {
        lab.node.set_sysctl(lab.now, "net.rds.tcp.rds_tcp_rcvbuf", 100_000).expect("set");
        lab.settle();
    }
    assert_eq!(lab.closes, [(link, bowline_rds::CloseHow::Drain)], "once");
    lab.deliver(link, &[data(2, 9, 5000, b"was on its way")]);
    assert_eq!(lab.recv_all(s), [b"was on its way"]);
    lab.send(s, "10.0.0.1:4000", b"later").expect("sent");
    assert!(lab.frames(link).is_empty(), "nothing is written any more");
    lab.fail(link, bowline_rds::CloseReason::Eof);
    lab.advance(Duration::from_secs(1));
    let again = lab.accept(A);
    lab.deliver(again, &[map_of(&[])]);
    assert_eq!(lab.data_frames(again).len(), 1);
}
