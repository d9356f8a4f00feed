//! A node that goes on in another process.

use std::io::ErrorKind;

use bowline_rds::{Config, Error, Node, SocketId};

use crate::support::*;

fn saved(lab: &mut Lab) -> Vec<u8> {
    let mut bytes = Vec::new();
    let now = lab.now;
    lab.node.close_links(now);
    lab.settle();
    lab.node.save(now, &mut bytes).unwrap();
    bytes
}

/// A node with a peer, something to send to another, something unread and something lent.
fn used() -> (Lab, [SocketId; 2]) {
    let mut lab = Lab::new(config(B));
    let link = lab.kernel(A, 1);
    let sockets = ["10.0.0.2:5000", "10.0.0.2:5001"].map(|name| lab.bound(name));
    lab.deliver(link, &[data(2, 9, 5000, b"lent"), data(3, 9, 5000, b"unread")]);
    lab.node.lend(lab.now, sockets[0], |_, len, _| len == 4).unwrap();
    lab.send(sockets[1], "10.0.0.9:9", b"waits").unwrap();
    lab.node.set_recv_buffer(sockets[1], 2000).unwrap();
    for _ in 0..3 {
        lab.send(sockets[0], "10.0.0.2:5001", &[7; 1000]).unwrap();
    }
    (lab, sockets)
}

fn check(lab: &mut Lab, [a, b]: [SocketId; 2]) {
    lab.node.check_invariants();
    let info = lab.node.info();
    assert_eq!((info.sockets[0].recv_messages, info.sockets[1].recv_messages), (2, 3));
    let bound = |n: usize| info.sockets[n].bound.map(|at| at.port());
    assert_eq!((bound(0), bound(1)), (Some(5000), Some(5001)));
    assert!(info.sockets[1].congested && !info.sockets[0].congested);
    assert_eq!(lab.send(a, "10.0.0.2:5001", b"more"), Err(Error::Congested));
    assert_eq!(lab.node.send_messages(b), Ok(1), "sent and not acknowledged");
    lab.node.give_back(lab.now, a, 1);
    assert_eq!(lab.counter("recv_delivered"), 1);
    assert_eq!(lab.recv(a).map(|got| text(&got)), Ok(b"unread".to_vec()));
    assert_eq!(lab.recv_all(b).len(), 3);
    lab.node.check_invariants();
}

/// Number and length of each unread message from another node.
fn received(lab: &Lab) -> Vec<(u64, u32)> {
    let info = lab.node.info();
    let from_peer = info.recv.iter().filter(|row| row.remote.ip() == ip(A));
    from_peer.map(|row| (row.seq, row.len)).collect()
}

#[test]
fn what_waits_goes_on_in_another_process() {
    let (mut lab, sockets) = used();
    let bytes = saved(&mut lab);
    let other = Config { generation: 99, paths: 1, ..config(B) };
    lab.node = Node::resume(other, lab.now, &*bytes).unwrap();
    let Config { generation, paths, .. } = config(B);
    let is = lab.node.config();
    assert_eq!((is.generation, is.paths), (generation, paths), "peers know it by these");
    assert_eq!(received(&lab), [(2, 4), (3, 6)]);
    check(&mut lab, sockets);
    let new = lab.bound("10.0.0.2:5002");
    assert!(!sockets.contains(&new));
}

#[test]
fn what_cannot_be_read_is_no_node() {
    let (mut lab, _) = used();
    let bytes = saved(&mut lab);
    let now = lab.now;
    for len in [0, 1, 7, 8, 9, 20, 60, bytes.len() / 2, bytes.len() - 1] {
        let error = Node::resume(config(B), now, &bytes[..len]).unwrap_err();
        let kinds = [ErrorKind::InvalidData, ErrorKind::UnexpectedEof];
        assert!(kinds.contains(&error.kind()), "{len} bytes: {error}");
    }
    let mut newer = bytes;
    let at = newer.windows(6).position(|six| six == b"format").unwrap() + 6;
    newer[at] += 1;
    let error = Node::resume(config(B), now, &*newer).unwrap_err();
    assert_eq!(error.to_string(), "it is saved in format 2, this is 1");
}

/// A node that an earlier version has saved. If this fails, what is read needs a default for what
/// is new, or a new version number of what is written.
#[test]
fn what_an_earlier_version_has_saved_can_be_read() {
    let (mut lab, sockets) = used();
    lab.node = Node::resume(config(B), lab.now, &include_bytes!("saved-1.bin")[..]).unwrap();
    // That version does not save from whom it has lent messages.
    assert_eq!(received(&lab), [(3, 6)]);
    check(&mut lab, sockets);
}
