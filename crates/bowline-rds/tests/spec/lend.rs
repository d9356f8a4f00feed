//! Messages that are lent to a reader, and sends that were promised room.

use std::net::SocketAddr;

use bowline_rds::{Error, SendMsg, SocketId};

use crate::support::*;

fn lend(lab: &mut Lab, id: SocketId, most: usize) -> Result<Vec<(SocketAddr, Vec<u8>)>, Error> {
    let mut lent = Vec::new();
    let now = lab.now;
    let count = lab.node.lend(now, id, |from, len, pieces| {
        if lent.len() == most {
            return false;
        }
        let bytes = pieces.collect::<Vec<_>>().concat();
        assert_eq!(bytes.len(), len);
        lent.push((from, bytes));
        true
    })?;
    assert_eq!(count, lent.len());
    lab.node.check_invariants();
    Ok(lent)
}

fn give_back(lab: &mut Lab, id: SocketId, count: usize) {
    let now = lab.now;
    lab.node.give_back(now, id, count);
    lab.node.check_invariants();
}

fn is_congested(lab: &Lab, port: u16) -> bool {
    lab.node.info().sockets.iter().any(|s| s.bound.is_some_and(|b| b.port() == port) && s.congested)
}

// tests
#[test]
fn what_is_lent_waits_for_its_reader() {
    let mut lab = Lab::larger();
    let a = lab.bound("10.0.0.2:5000");
    let b = lab.bound("10.0.0.2:5001");
    assert_eq!(lend(&mut lab, b, 9).unwrap_err(), Error::Empty);
    lab.node.set_recv_buffer(b, 4000).unwrap();
    for n in 0..3 {
        lab.send(a, "10.0.0.2:5001", &[n; 1500]).unwrap();
    }
    assert!(is_congested(&lab, 5001));
    let lent = lend(&mut lab, b, 2).unwrap();
    assert_eq!(lent, [0, 1].map(|n| (addr("10.0.0.2:5000"), vec![n; 1500])));
    assert!(is_congested(&lab, 5001), "it was lent only");
    assert_eq!(lend(&mut lab, b, 9).unwrap().len(), 1);
    assert_eq!(lend(&mut lab, b, 9).unwrap_err(), Error::Empty);
    give_back(&mut lab, b, 1);
    assert!(is_congested(&lab, 5001), "3000 bytes");
    give_back(&mut lab, b, 1);
    assert!(!is_congested(&lab, 5001), "1500 bytes");
    give_back(&mut lab, b, 9);
    lab.send(a, "10.0.0.2:5001", b"last").unwrap();
    lend(&mut lab, b, 9).unwrap();
    let now = lab.now;
    lab.node.close(now, b);
    lab.node.check_invariants();
}

/// Sender, number and length of each message that is listed as unread.
fn unread(lab: &Lab) -> Vec<(SocketAddr, u64, u32)> {
    lab.node.info().recv.iter().map(|row| (row.remote, row.seq, row.len)).collect()
}

// tests [R-1012]
#[test]
fn what_is_lent_is_delivered_when_it_is_given_back() {
    let (mut lab, s, link) = at(B, 5000).kernel(1);
    let counted = |lab: &Lab| ["recv_delivered", "copy_to_user"].map(|name| lab.counter(name));
    lab.deliver(
        link,
        &[data(2, 9, 5000, b"12345"), data(3, 9, 5000, b"123"), data(4, 9, 5000, b"")],
    );
    lend(&mut lab, s, 2).unwrap();
    assert_eq!(counted(&lab), [0, 0]);
    give_back(&mut lab, s, 1);
    assert_eq!(counted(&lab), [1, 5]);
    lend(&mut lab, s, 9).unwrap();
    give_back(&mut lab, s, 1);
    assert_eq!(counted(&lab), [2, 8]);
    let now = lab.now;
    lab.node.close(now, s);
    assert_eq!(counted(&lab), [2, 8], "nobody has taken the last one");
}

// tests [R-1011]
#[test]
fn what_is_lent_is_listed_until_it_is_given_back() {
    let (mut lab, s, link) = at(B, 5000).kernel(1);
    lab.deliver(link, &[data(2, 9, 5000, b"a"), data(3, 8, 5000, b""), data(5, 9, 5000, b"abc")]);
    let all = [("10.0.0.1:9", 2, 1), ("10.0.0.1:8", 3, 0), ("10.0.0.1:9", 5, 3)];
    let all = all.map(|(from, seq, len)| (addr(from), seq, len));
    let check = |lab: &Lab, given_back: usize| {
        let left = &all[given_back..];
        assert_eq!(unread(lab), left);
        let socket = &lab.node.info_without_messages().sockets[0];
        let bytes: u32 = left.iter().map(|(_, _, len)| len).sum();
        assert_eq!((socket.recv_messages, socket.recv_bytes), (left.len(), bytes as usize));
        for (option, item_size) in [(10_005, 26), (10_014, 50)] {
            let table = lab.node.info_option(option).unwrap();
            assert_eq!((table.item_size, table.bytes.len()), (item_size, left.len() * item_size));
            for (item, (_, seq, len)) in table.bytes.chunks(item_size).zip(left) {
                assert_eq!(item[..8], seq.to_ne_bytes());
                assert_eq!(item[8..12], len.to_ne_bytes());
            }
            let shown = lab.node.info_option_of(option, |_| true).unwrap();
            assert_eq!(shown, table);
            assert!(lab.node.info_option_of(option, |_| false).unwrap().bytes.is_empty());
        }
    };
    check(&lab, 0);
    lend(&mut lab, s, 2).unwrap();
    check(&lab, 0);
    give_back(&mut lab, s, 1);
    check(&lab, 1);
    lend(&mut lab, s, 9).unwrap();
    check(&lab, 1);
    give_back(&mut lab, s, 2);
    check(&lab, 3);
}

// tests
#[test]
fn a_promise_is_kept_and_nothing_beyond_it() {
    let mut lab = Lab::larger();
    let a = lab.bound("10.0.0.2:5000");
    let b = lab.bound("10.0.0.2:5001");
    let to = Some(addr("10.0.0.2:5001"));
    lab.node.set_recv_buffer(b, 4000).unwrap();
    assert_eq!(lab.node.send_room(a, to), Some(4000));
    lab.send(a, "10.0.0.2:5001", &[0; 1000]).unwrap();
    assert_eq!(lab.node.send_room(a, to), Some(3000));
    lab.send(a, "10.0.0.2:5001", &[0; 3001]).unwrap();
    assert_eq!(lab.node.send_room(a, to), None, "congested");
    assert_eq!(lab.node.send_room(a, None), None, "not connected");
    let full = lab.send(a, "10.0.0.2:5001", b"one more").unwrap_err();
    assert_eq!(full, Error::Congested);
    let payload = [std::io::IoSlice::new(b"promised")];
    let promised = SendMsg { name: to, payload: &payload, promised: true, ..SendMsg::default() };
    let now = lab.now;
    lab.node.send(now, a, &promised).unwrap();
    assert_eq!(lend(&mut lab, b, 9).unwrap().len(), 3);
    // A far destination has room until its map says otherwise, or the queue is full.
    let link = lab.kernel(A, 1);
    lab.send(a, "10.0.0.1:4000", b"x").unwrap();
    assert_eq!(lab.node.send_room(a, Some(addr("10.0.0.1:4000"))), Some(usize::MAX));
    lab.deliver(link, &[map_of(&[4000])]);
    assert_eq!(lab.node.send_room(a, Some(addr("10.0.0.1:4000"))), None);
    let promised = SendMsg { name: Some(addr("10.0.0.1:4000")), ..promised };
    let now = lab.now;
    lab.node.send(now, a, &promised).unwrap();
    lab.node.check_invariants();
}

/// Empty messages need no room in bytes, but there is a limit to their number.
// tests
#[test]
fn a_promise_does_not_exceed_the_number_of_messages() {
    let mut small = config(B);
    small.limits.send_messages_per_socket = 3;
    let mut lab = Lab::new(small);
    let a = lab.bound("10.0.0.2:5000");
    let to = Some(addr("10.9.9.9:4000"));
    let empty = SendMsg { name: to, promised: true, ..SendMsg::default() };
    let now = lab.now;
    for _ in 0..3 {
        lab.node.send(now, a, &empty).unwrap();
    }
    assert_eq!(lab.node.send(now, a, &empty), Err(Error::QueueFull));
}
