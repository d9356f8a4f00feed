//! The echo service of a node, which serves many over one socket.

use std::{net::SocketAddr, time::Duration};

use bowline::rds::{Node, Socket};

use crate::support::{Folder, Running, start};

/// Far above what an answer takes, and below what waiting for a deaf peer would add up to.
const PATIENCE: Duration = Duration::from_secs(20);

fn echo(folder: &Folder, address: &str) -> (Running, SocketAddr) {
    let words = ["node", "--address", address, "--echo", "4000", "--no-control", "--drain", "0"];
    let mut node = start(folder, &words);
    node.expect("ready");
    (node, format!("{address}:4000").parse().expect("an address"))
}

fn client(address: &str) -> (Node, Socket) {
    let node = Node::builder().address(address.parse().expect("an address")).build();
    let node = node.expect("a node");
    let socket = another(&node, address);
    (node, socket)
}

fn another(node: &Node, address: &str) -> Socket {
    let socket = node.bind(format!("{address}:0").parse().expect("an address")).expect("a socket");
    socket.set_recv_timeout(Some(PATIENCE));
    socket.set_send_timeout(Some(PATIENCE));
    socket
}

/// Asks and insists on the answer.
fn ask(socket: &Socket, to: SocketAddr, question: &[u8]) {
    socket.send_to(question, to).expect("sent");
    let answer = socket.recv_message().expect("an answer");
    assert_eq!((answer.source(), answer.to_vec()), (to, question.to_vec()));
}

#[test]
fn one_that_reads_no_answers_does_not_stop_others() {
    let folder = Folder::new();
    let (mut node, to) = echo(&folder, "127.41.14.1");
    let (near, deaf) = client("127.41.14.2");
    let neighbour = another(&near, "127.41.14.2");
    let (_far, other) = client("127.41.14.3");
    // All that a default send buffer holds, then more than what is kept for one receiver.
    for part in [2, 200] {
        for _ in 0..part {
            deaf.send_to(&[7; 60_000], to).expect("sent");
        }
        for round in 0..12 {
            ask(&other, to, &[round; 2000]);
            ask(&neighbour, to, &[round; 2000]);
        }
    }
    node.expect("answers dropped that nobody takes");
    // What was kept for it still comes.
    for _ in 0..100 {
        assert_eq!(deaf.recv_message().expect("an answer").len(), 60_000);
    }
    drop((deaf, neighbour, near));
    ask(&other, to, b"who is gone does not stop it either");
}

#[test]
fn a_congested_peer_does_not_stop_others_and_gets_its_answers_later() {
    let folder = Folder::new();
    let (_node, to) = echo(&folder, "127.41.14.4");
    let (_near, slow) = client("127.41.14.5");
    let (_far, other) = client("127.41.14.6");
    slow.set_recv_buffer(1152).expect("a buffer");
    for number in 0..200_u8 {
        slow.send_to(&[number; 1000], to).expect("sent");
        slow.send_to(&[], to).expect("sent");
    }
    for round in 0..12 {
        ask(&other, to, &[round; 100]);
    }
    for number in 0..200_u8 {
        let answer = slow.recv_message().expect("an answer").to_vec();
        assert_eq!(answer, [number; 1000]);
        assert!(slow.recv_message().expect("an answer").is_empty());
    }
}
