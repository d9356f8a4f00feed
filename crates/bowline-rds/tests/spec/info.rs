//! Section 10: what the node tells about itself, in the kernel's layouts.

use bowline_rds::{CloseReason, Config, Counters, Error, Info, MessageInfo};

use crate::support::*;

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_ne_bytes(bytes[at..at + 4].try_into().expect("4 bytes"))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_ne_bytes(bytes[at..at + 8].try_into().expect("8 bytes"))
}

/// Items of a table.
fn items(lab: &Lab, option: u32) -> Vec<Vec<u8>> {
    let table = lab.node.info_option(option).expect("a table");
    table.bytes.chunks(table.item_size).map(<[u8]>::to_vec).collect()
}

/// A node with something in every table: one message of each kind.
fn full() -> Lab {
    let (mut lab, s, link) = at(B, 4000).paths(1).kernel(1);
    lab.node.connect(s, addr("10.0.0.1:7000")).expect("connected");
    lab.deliver(link, &[data(70, 9, 4000, b"received")]);
    lab.acks = false;
    lab.room = 10;
    lab.send(s, "10.0.0.1:5000", b"started").expect("sent");
    lab.send(s, "10.0.0.1:5001", b"waiting").expect("sent");
    lab
}

// tests [R-1001] [R-1002] [R-1005], T-21: sizes, also of empty tables
#[test]
fn item_sizes_are_the_kernels() {
    let sizes = [
        (10_000, 40),
        (10_001, 42),
        (10_003, 26),
        (10_004, 26),
        (10_005, 26),
        (10_006, 28),
        (10_007, 41),
        (10_011, 65),
        (10_012, 50),
        (10_013, 50),
        (10_014, 50),
        (10_015, 52),
        (10_016, 64),
    ];
    for lab in [Lab::larger(), full()] {
        for (option, size) in sizes {
            let table = lab.node.info_option(option).expect("a table");
            assert_eq!(table.item_size, size, "{option}");
            assert_eq!(table.bytes.len() % size, 0);
        }
        for option in [10_002, 10_008, 10_009, 10_010, 10_017, 9_999, 10_018, 0] {
            assert_eq!(lab.node.info_option(option), Err(Error::NoSuchOption), "{option}");
        }
    }
    assert_eq!(Error::NoSuchOption.errno(), 92);
}

#[test]
fn tables_are_read_as_they_are_written() {
    let lab = full();
    let table = |option| match lab.node.info_option(option) {
        Ok(table) => Ok(Some(table.bytes)),
        Err(Error::NoSuchOption) => Ok(None),
        Err(other) => Err(other),
    };
    let (read, own) = (Info::from_tables(table).unwrap(), lab.node.info());
    let text = |rows: &[MessageInfo]| format!("{rows:?}");
    assert_eq!(text(&read.send), text(&own.send));
    assert_eq!(text(&read.retrans), text(&own.retrans));
    assert_eq!(text(&read.recv), text(&own.recv));
    assert_eq!([read.send.len(), read.retrans.len(), read.recv.len()], [1, 1, 1]);
    let ([found], [socket]) = (&read.sockets[..], &own.sockets[..]) else { panic!("one socket") };
    assert_eq!((found.bound, found.connected), (socket.bound, socket.connected));
    assert_eq!(
        (found.send_buffer, found.recv_buffer, found.inode),
        (socket.send_buffer, socket.recv_buffer, socket.inode)
    );
    assert_eq!((found.send_bytes, found.recv_bytes, found.recv_messages), (14, 8, 1));
    let ([found], [conn]) = (&read.connections[..], &own.connections[..]) else {
        panic!("one connection")
    };
    assert_eq!(
        (found.local, found.remote, found.transport, found.flags),
        (conn.local, conn.remote, conn.transport, conn.flags)
    );
    assert_eq!((found.next_tx_seq, found.next_rx_seq), (conn.next_tx_seq, conn.next_rx_seq));
    let ([found], [link]) = (&read.links[..], &own.links[..]) else { panic!("one link") };
    assert_eq!((found.local, found.remote), (link.local, link.remote));
    assert_eq!(
        (found.last_sent_nxt, found.last_expected_una, found.last_seen_una),
        (link.last_sent_nxt, link.last_expected_una, link.last_seen_una)
    );
    assert!(read.paths.is_empty() && read.rdma.is_none());
    // Another node's may be cut anywhere, or absent.
    let cut = |option| table(option).map(|bytes| bytes.map(|bytes| bytes[..7].to_vec()));
    let read = Info::from_tables(cut).unwrap();
    assert!(read.sockets.is_empty() && read.connections.is_empty() && read.send.is_empty());
    let nothing = Info::from_tables(|_| Ok::<_, Error>(None)).unwrap();
    assert!(nothing.links.is_empty());
}

// tests 10.3: names and their order; [OBS-2]
#[test]
fn counters_have_the_kernels_names_and_order() {
    let names: Vec<_> = Counters::default().iter().map(|(name, _)| name).collect();
    assert_eq!(
        names[..80],
        [
            "conn_reset",
            "recv_drop_bad_checksum",
            "recv_drop_old_seq",
            "recv_drop_no_sock",
            "recv_drop_dead_sock",
            "recv_deliver_raced",
            "recv_delivered",
            "recv_queued",
            "recv_immediate_retry",
            "recv_delayed_retry",
            "recv_ack_required",
            "recv_rdma_bytes",
            "recv_ping",
            "send_queue_empty",
            "send_queue_full",
            "send_lock_contention",
            "send_lock_queue_raced",
            "send_immediate_retry",
            "send_delayed_retry",
            "send_drop_acked",
            "send_ack_required",
            "send_queued",
            "send_rdma",
            "send_rdma_bytes",
            "send_pong",
            "page_remainder_hit",
            "page_remainder_miss",
            "copy_to_user",
            "copy_from_user",
            "cong_update_queued",
            "cong_update_received",
            "cong_send_error",
            "cong_send_blocked",
            "recv_bytes_added_to_sock",
            "recv_bytes_freed_fromsock",
            "send_stuck_rm",
            "ib_connect_raced",
            "ib_listen_closed_stale",
            "ib_evt_handler_call",
            "ib_tasklet_call",
            "ib_tx_cq_event",
            "ib_tx_ring_full",
            "ib_tx_throttle",
            "ib_tx_sg_mapping_failure",
            "ib_tx_stalled",
            "ib_tx_credit_updates",
            "ib_rx_cq_event",
            "ib_rx_ring_empty",
            "ib_rx_refill_from_cq",
            "ib_rx_refill_from_thread",
            "ib_rx_alloc_limit",
            "ib_rx_total_frags",
            "ib_rx_total_incs",
            "ib_rx_credit_updates",
            "ib_ack_sent",
            "ib_ack_send_failure",
            "ib_ack_send_delayed",
            "ib_ack_send_piggybacked",
            "ib_ack_received",
            "ib_rdma_mr_8k_alloc",
            "ib_rdma_mr_8k_free",
            "ib_rdma_mr_8k_used",
            "ib_rdma_mr_8k_pool_flush",
            "ib_rdma_mr_8k_pool_wait",
            "ib_rdma_mr_8k_pool_depleted",
            "ib_rdma_mr_1m_alloc",
            "ib_rdma_mr_1m_free",
            "ib_rdma_mr_1m_used",
            "ib_rdma_mr_1m_pool_flush",
            "ib_rdma_mr_1m_pool_wait",
            "ib_rdma_mr_1m_pool_depleted",
            "ib_rdma_mr_8k_reused",
            "ib_rdma_mr_1m_reused",
            "ib_atomic_cswp",
            "ib_atomic_fadd",
            "tcp_data_ready_calls",
            "tcp_write_space_calls",
            "tcp_sndbuf_full",
            "tcp_connect_raced",
            "tcp_listen_closed_stale",
        ]
    );
    assert!(names[80..].iter().all(|n| n.starts_with("bl_")), "the rest are bowline's own");
    assert!(names.iter().all(|n| n.len() <= 31), "31 characters and a NUL");
    let lab = full();
    let table = items(&lab, 10_000);
    // Without RDMA its counters are not listed.
    let listed = lab.node.listed_counters();
    assert_eq!((table.len(), listed.len()), (names.len() - 39, names.len() - 39));
    for (item, (name, value)) in table.iter().zip(listed) {
        assert_eq!(&item[..name.len()], name.as_bytes());
        assert!(item[name.len()..32].iter().all(|b| *b == 0));
        assert_eq!(u64_at(item, 32), value);
    }
}

// tests the layouts of 10.2
#[test]
fn connections_are_laid_out_as_the_kernels() {
    let lab = full();
    let item = &items(&lab, 10_001)[0];
    assert_eq!(u64_at(item, 8), 71, "next_rx_seq");
    assert_eq!(u64_at(item, 0), lab.node.info().connections[0].next_tx_seq);
    assert_eq!(item[16..24], [10, 0, 0, 2, 10, 0, 0, 1]);
    assert_eq!(&item[24..40], b"tcp\0\0\0\0\0\0\0\0\0\0\0\0\0");
    assert_eq!(item[40..42], [4, 0], "connected, no tos");
    let item = &items(&lab, 10_011)[0];
    let mapped = |last| [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 0, last];
    assert_eq!(item[16..32], mapped(2));
    assert_eq!(item[32..48], mapped(1));
    assert_eq!((&item[48..51], item[64]), (&b"tcp"[..], 4));
}

// tests the layouts of 10.2, and the real addresses of R-1008
#[test]
fn messages_are_listed_by_queue() {
    let lab = full();
    let retrans = items(&lab, 10_004);
    let send = items(&lab, 10_003);
    let started = retrans.iter().find(|i| u32_at(i, 8) == 7).expect("the started one");
    assert_eq!(started[12..20], [10, 0, 0, 2, 10, 0, 0, 1], "laddr, faddr [R-1008]");
    assert_eq!(started[20..24], [0x0f, 0xa0, 0x13, 0x88], "ports 4000 and 5000");
    assert_eq!(started[24..26], [0, 0]);
    let waiting = send.iter().find(|i| i[22..24] == [0x13, 0x89]).expect("the waiting one");
    assert_eq!(u64_at(waiting, 0), u64_at(started, 0) + 1);
    let recv = &items(&lab, 10_005)[0];
    assert_eq!((u64_at(recv, 0), u32_at(recv, 8)), (70, 8));
    assert_eq!(recv[12..24], [10, 0, 0, 2, 10, 0, 0, 1, 0x0f, 0xa0, 0, 9]);
    for option in [10_012, 10_013, 10_014] {
        assert_eq!(items(&lab, option).len(), items(&lab, option - 9).len());
        for item in items(&lab, option) {
            assert_eq!(item[22..28], [0xff, 0xff, 10, 0, 0, 2]);
            assert_eq!(item[38..44], [0xff, 0xff, 10, 0, 0, 1]);
        }
    }
}

// tests [R-1006] and the layouts of 10.2
#[test]
fn sockets_are_listed_with_their_buffers() {
    let mut lab = full();
    let unbound = lab.node.socket().expect("a socket");
    lab.node.set_send_buffer(unbound, 5000).expect("set");
    let four = items(&lab, 10_006);
    assert_eq!(four.len(), 1, "unbound ones are in the IPv6 form only");
    let item = &four[0];
    assert_eq!((u32_at(item, 0), u32_at(item, 16)), (106_496, 106_496));
    assert_eq!(item[4..12], [10, 0, 0, 2, 10, 0, 0, 1]);
    assert_eq!(item[12..16], [0x0f, 0xa0, 0x1b, 0x58], "ports 4000 and 7000");
    let six = items(&lab, 10_015);
    assert_eq!(six.len(), 2);
    let free = six.iter().find(|i| u32_at(i, 0) == 5000).expect("the unbound one");
    assert!(free[4..40].iter().all(|b| *b == 0));
    assert_ne!(u64_at(&six[0], 44), u64_at(&six[1], 44), "inode numbers differ");
}

// tests [R-1013]
#[test]
fn a_socket_has_the_inode_of_its_file_or_a_number_that_no_file_has() {
    let mut lab = Lab::larger();
    let [own, theirs, others] = [5000, 5001, 5002].map(|n| lab.bound(&format!("10.0.0.2:{n}")));
    lab.node.set_owner(theirs, 99, 4711);
    lab.node.set_owner(others, 98, 4711);
    for (option, at) in [(10_006, 20), (10_015, 44)] {
        let inodes: Vec<u64> = items(&lab, option).iter().map(|item| u64_at(item, at)).collect();
        assert!(inodes[0] >= 1 << 32, "{inodes:?}");
        assert_eq!(inodes[1..], [4711, 4711]);
        for socket in [own, theirs, others] {
            let shown = lab.node.info_option_of(option, |id| id == socket).expect("a table");
            assert_eq!(shown.bytes.len(), shown.item_size, "not chosen by its inode");
        }
    }
}

// tests [R-1006]: IPv6 objects are in the IPv6 tables only
#[test]
fn ipv6_is_left_out_of_the_old_tables() {
    let mut lab = Lab::new(Config { addrs: vec![ip("2001:db8::1")], ..Config::default() });
    let s = lab.bound("[2001:db8::1]:4000");
    lab.send(s, "[2001:db8::2]:5000", b"x").expect("sent");
    for option in [10_001, 10_003, 10_004, 10_005, 10_006, 10_007] {
        assert!(items(&lab, option).is_empty(), "{option}");
    }
    assert_eq!(items(&lab, 10_011).len(), 1);
    assert_eq!(items(&lab, 10_012).len(), 2, "the probe and the message");
    assert_eq!(items(&lab, 10_015).len(), 1);
}

// tests [R-1007] and the layouts of 10.2
#[test]
fn tcp_connections_tell_what_is_missing() {
    let mut lab = Lab::larger();
    let link = lab.accept_from(addr("10.0.0.1:41000")).expect("accepted");
    let before = &items(&lab, 10_007)[0];
    assert_eq!(before[0..4], [10, 0, 0, 2]);
    assert_eq!(before[4..6], [0x40, 0x01], "port 16385");
    assert_eq!(before[6..12], [10, 0, 0, 1, 0xa0, 0x28], "port 41000");
    assert_eq!((u64_at(before, 12), u64_at(before, 20)), (48, 0), "idle");
    let bytes = data(2, 9, 5000, &[0; 100]).bytes();
    lab.feed(link, &bytes[..40]);
    let item = &items(&lab, 10_007)[0];
    assert_eq!((u64_at(item, 12), u64_at(item, 20)), (8, 0));
    lab.feed(link, &bytes[40..60]);
    let item = &items(&lab, 10_016)[0];
    assert_eq!((u64_at(item, 36), u64_at(item, 44)), (0, 88));
    assert_eq!(item[16..18], [0x40, 0x01]);
    lab.fail(link, CloseReason::Eof);
    assert!(items(&lab, 10_007).is_empty());
}

// tests the flags of a connection
#[test]
fn connection_flags_follow_path_0() {
    let (mut lab, _) = at(A, 4000).sends("10.0.0.2:5000", b"x");
    let flags = |lab: &Lab| items(lab, 10_001)[0][40];
    assert_eq!(flags(&lab), 2, "connecting");
    let link = lab.establish();
    assert_eq!(flags(&lab), 4, "connected");
    lab.fail(link, CloseReason::Reset);
    assert_eq!(flags(&lab), 0, "down until the next attempt");
}
