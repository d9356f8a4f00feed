//! The echo service of a node, which serves many senders over one socket.

use std::{
    io::Write,
    net::{SocketAddr, TcpStream},
    time::Duration,
};

use bowline::rds::{Node, Socket};
use rustix::net::{AddressFamily, SocketType, sockopt};

use crate::support::{Folder, Running, start};

/// Far above the time of an answer, and below the sum of waits for a peer that does not read.
const PATIENCE: Duration = Duration::from_secs(20);

fn echo(folder: &Folder, address: &str, more: &[&str]) -> (Running, SocketAddr) {
    let words = ["node", "--address", address, "--echo", "4000", "--no-control", "--drain", "0"];
    let mut node = start(folder, &[&words[..], more].concat());
    node.expect("ready");
    (node, format!("{address}:4000").parse().expect("an address"))
}

fn client(address: &str) -> (Node, Socket) {
    let node = Node::builder().address(address).build();
    let node = node.expect("a node");
    let socket = another(&node, address);
    (node, socket)
}

fn another(node: &Node, address: &str) -> Socket {
    let socket = node.bind((address, 0)).expect("a socket");
    socket.set_recv_timeout(Some(PATIENCE));
    socket.set_send_timeout(Some(PATIENCE));
    socket
}

/// Sends a message, and fails without an answer.
fn ask(socket: &Socket, to: SocketAddr, question: &[u8]) {
    socket.send_to(question, to).expect("sent");
    let answer = socket.recv_message().expect("an answer");
    assert_eq!((answer.source(), answer.to_vec()), (to, question.to_vec()));
}

#[test]
fn one_that_reads_no_answers_does_not_stop_others() {
    let folder = Folder::new();
    let (mut node, to) = echo(&folder, "127.41.14.1", &[]);
    let (near, deaf) = client("127.41.14.2");
    let neighbour = another(&near, "127.41.14.2");
    let (_far, other) = client("127.41.14.3");
    // A full default send buffer, then more than the share of one receiver.
    for part in [2, 200] {
        for _ in 0..part {
            deaf.send_to(&[7; 60_000], to).expect("sent");
        }
        for round in 0..12 {
            ask(&other, to, &[round; 2000]);
            ask(&neighbour, to, &[round; 2000]);
        }
    }
    node.expect("replies dropped: the clients do not read");
    // The answers kept for it still arrive.
    for _ in 0..100 {
        assert_eq!(deaf.recv_message().expect("an answer").len(), 60_000);
    }
    drop((deaf, neighbour, near));
    ask(&other, to, b"who is gone does not stop it either");
}

#[test]
fn a_congested_peer_does_not_stop_others_and_gets_its_answers_later() {
    let folder = Folder::new();
    let (_node, to) = echo(&folder, "127.41.14.4", &[]);
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

/// A peer with a smaller address that sends messages and neither reads nor acknowledges: nothing
/// leaves the other side's send queue.
fn mute(from: &str, to: &str, sockets: u16, bytes: usize) -> TcpStream {
    let socket = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None);
    let socket = socket.expect("a socket");
    sockopt::set_socket_recv_buffer_size(&socket, 4096).expect("a buffer");
    let place = |address: &str, port| SocketAddr::new(address.parse().expect("an address"), port);
    rustix::net::bind(&socket, &place(from, 0)).expect("an address");
    rustix::net::connect(&socket, &place(to, 16385)).expect("a node");
    let mut stream = TcpStream::from(socket);
    stream.set_write_timeout(Some(PATIENCE)).expect("a timeout");
    let frame = |sequence: u64, ports: [u16; 2], ext: [u8; 16], payload: &[u8]| {
        let mut frame = Vec::with_capacity(48 + payload.len());
        frame.extend(sequence.to_be_bytes());
        frame.extend([0; 8]);
        frame.extend((payload.len() as u32).to_be_bytes());
        ports.iter().for_each(|port| frame.extend(port.to_be_bytes()));
        frame.extend([0; 8]);
        frame.extend(ext);
        frame.extend(payload);
        frame
    };
    // The first frame of a bowline node: one path, and its generation.
    let greeting = [5, 0, 1, 6, 0, 0, 0, 1, 8, 0, 0x42, 0x10, 0, 0x10, 0, 0];
    stream.write_all(&frame(0, [1, 0], greeting, &[])).expect("a greeting");
    let question = vec![7; bytes];
    for number in 0..sockets {
        let one = frame(u64::from(number) + 2, [5000 + number, 4000], [0; 16], &question);
        stream.write_all(&one).expect("a question");
    }
    stream
}

#[test]
fn many_sockets_of_one_host_that_acknowledges_nothing_do_not_stop_others() {
    let folder = Folder::new();
    let (mut node, to) = echo(&folder, "127.41.19.250", &["--send-buffer", "4MiB"]);
    let (_far, other) = client("127.41.19.3");
    let _mute = mute("127.41.19.2", "127.41.19.250", 200, 20_000);
    node.expect("replies dropped: the clients do not read");
    for round in 0..12 {
        ask(&other, to, &[round; 2000]);
    }
}

#[test]
fn many_hosts_that_acknowledge_nothing_make_way_for_others() {
    let folder = Folder::new();
    let (mut node, to) = echo(&folder, "127.41.19.251", &["--send-buffer", "4MiB"]);
    let (_far, other) = client("127.41.19.5");
    let mut streams = Vec::new();
    for host in 0..12 {
        streams.push(mute(&format!("127.41.19.1{host:02}"), "127.41.19.251", 30, 20_000));
        for round in 0..12 {
            ask(&other, to, &[round; 2000]);
        }
    }
    node.expect("replies dropped: the clients do not read");
    node.expect("paths down");
    for round in 0..12 {
        ask(&other, to, &[round; 2000]);
    }
}
