//! The load generator: against itself, and against a scripted original.

use std::{
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    thread,
    time::Duration,
};

use bowline::rds::Node;

use crate::support::{Done, Folder, Running, run, start};

const HEADING: &str = "tsks   tx/s   rx/s  tx+rx K/s    mbi K/s    mbo K/s tx us/c   rtt us cpu %";

#[test]
fn two_sides_measure_each_other() {
    let folder = Folder::new();
    let mut passive = start(&folder, &["stress", "-r", "127.41.20.2", "-p", "4100"]);
    passive.expect("waiting for incoming connection on 127.41.20.2:4100");
    let words = ["stress", "-r", "127.41.20.1", "-s", "127.41.20.2", "-p", "4100"];
    let more = ["-T", "2", "-t", "2", "-d", "4", "-q", "2k", "-v"];
    let active = run(&folder, &[&words[..], &more].concat()).exits(0);
    let lines: Vec<&str> = active.out.lines().collect();
    assert_eq!(
        lines[..4],
        [
            "connecting to 127.41.20.2:4100",
            "negotiated options, tasks will start in 2 seconds",
            "Starting up....",
            HEADING,
        ]
    );
    assert_eq!(lines.len(), 8, "{active:?}");
    assert_eq!(lines[6], "-".repeat(45));
    let average = lines[7].strip_suffix("  (average)").expect("the average");
    for line in [lines[4], lines[5], average] {
        let cells: Vec<f64> =
            line.split_whitespace().map(|cell| cell.parse().expect("a number")).collect();
        assert_eq!(cells.len(), 9, "{line}");
        assert_eq!((cells[0], cells[8]), (2.0, -1.0), "{line}");
        assert!(cells[1] > 0.0 && cells[2] > 0.0 && cells[7] > 0.0, "{line}");
    }
    let passive = passive.finish().exits(0);
    assert!(passive.out.contains("accepted connection from 127.41.20.1:"), "{passive:?}");
    assert!(passive.out.ends_with("  (average)\n"), "{passive:?}");
}

#[test]
fn messages_are_sent_without_copying_them() {
    let folder = Folder::new();
    let more = ["-p", "4150", "--zerocopy"];
    let mut passive = start(&folder, &[&["stress", "-r", "127.41.36.2"][..], &more].concat());
    passive.expect("waiting for incoming connection");
    let words = ["stress", "-r", "127.41.36.1", "-s", "127.41.36.2", "-T", "1", "-v"];
    let last = ["-q", "200k", "-d", "3", "-t", "2"];
    let active = run(&folder, &[&words[..], &more, &last].concat()).exits(0);
    let line = active.out.lines().last().and_then(|line| line.strip_suffix("  (average)"));
    let kib = line.and_then(|line| line.split_whitespace().nth(3)).expect("an average");
    assert!(kib.parse::<f64>().expect("a number") > 0.0, "{active:?}");
    passive.finish().exits(0);
}

#[test]
fn the_active_side_sends_the_old_block_and_one_byte() {
    let folder = Folder::new();
    let listener = TcpListener::bind("127.41.21.2:4200").expect("a free port");
    let words = ["stress", "-r", "127.41.21.1", "-s", "127.41.21.2", "-p", "4200", "-o", "-z"];
    let active = start(&folder, &[&words[..], &["-T", "1", "-d", "3", "-t", "2"]].concat());
    let (mut stream, peer) = listener.accept().expect("a connection");
    assert_eq!(peer.ip().to_string(), "127.41.21.1");
    stream.set_read_timeout(Some(Duration::from_secs(20))).expect("a timeout");
    let mut block = [0; 60];
    stream.read_exact(&mut block).expect("a block and a byte");
    let mut wanted = vec![0, 0, 0, 3, 0, 0, 4, 0, 0, 0, 0, 63, 0, 0, 0, 0];
    wanted.extend([127, 41, 21, 2, 127, 41, 21, 1, 0x10, 0x68, 0, 2, 0, 0, 0, 1]);
    wanted.extend([1, 0, 0, 0, 0, 0, 1, 0, 0, 1, 0, 0, 0xff, 1, 0]);
    wanted.extend([0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(block[..59], wanted);
    stream.write_all(&[0]).expect("the answer");
    // No task answers the requests, so nothing is measured; the run still ends normally.
    let mut rest = Vec::new();
    stream.read_to_end(&mut rest).expect("the end of the run");
    assert!(rest.is_empty(), "{rest:?}");
    let done = active.finish().exits(0);
    assert_eq!(done.out.lines().count(), 1, "only the summary: {done:?}");
}

#[test]
fn the_passive_side_obeys_both_blocks() {
    let folder = Folder::new();
    for (port, new) in [("4300", false), ("4301", true)] {
        let mut passive = start(&folder, &["stress", "-r", "127.41.22.2", "-p", port]);
        passive.expect("waiting for incoming connection");
        let target = format!("127.41.22.2:{port}");
        let mut stream = TcpStream::connect(&target).expect("a listener");
        stream.set_read_timeout(Some(Duration::from_secs(20))).expect("a timeout");
        let number: u16 = port.parse().expect("a port");
        let mut block = Vec::new();
        if new {
            block.extend(b"2.0.7\0\0\0\0\0\0\0\0\0\0\0");
        }
        block.extend([0, 0, 0, 1, 0, 0, 4, 0, 0, 0, 0, 63, 0, 0, 0, 0]);
        block.extend([127, 41, 22, 2, 127, 41, 22, 1]);
        block.extend(number.to_be_bytes());
        block.extend([0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 1, 0, 0, 0xff, 0, 0]);
        block.extend([0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0]);
        if new {
            block.extend([4, 0]);
        }
        stream.write_all(&block).expect("the block is taken");
        stream.write_all(&[0x5a]).expect("the start is taken");
        let mut byte = [0xff];
        stream.read_exact(&mut byte).expect("the passive side is ready");
        passive.expect("negotiated options");
        drop(stream);
        let done = passive.finish().exits(0);
        assert!(done.out.contains(HEADING), "{done:?}");
    }
}

#[test]
fn failures_of_a_run_are_explained() {
    let folder = Folder::new();
    let words = ["stress", "-r", "127.41.23.1", "-s", "127.41.23.2", "-p", "4400"];
    let done = run(&folder, &words).exits(1);
    done.complains(&["127.41.23.2:4400", "--connect-retries"]);
    let listener = TcpListener::bind("127.41.23.2:4400").expect("a free port");
    let done = run(&folder, &[&words[..], &["-D", "4096"]].concat()).exits(1);
    done.complains(&["both sides with --rdma", "without -D"]);
    drop(listener);
    for (more, wanted) in [
        (&["-D", "512k", "-I", "3"][..], "1048576 bytes"),
        (&["-D", "4k", "-I", "513"], "512 buffers"),
        (&["-D", "4k", "--rdma-cache-mrs", "1"], "--rdma-use-get-mr 1"),
        (&["-D", "4k", "--rdma-alignment", "4097"], "4096"),
    ] {
        let done = run(&folder, &[&words[..], &["--rdma"], more].concat()).exits(2);
        assert!(done.err.contains(wanted), "no {wanted} in {done:?}");
    }

    let mut passive = start(&folder, &["stress", "-r", "127.41.23.2", "-p", "4400"]);
    passive.expect("waiting");
    let mut stream = TcpStream::connect("127.41.23.2:4400").expect("a listener");
    // A block that would need terabytes of buffers.
    let mut block = [0xff; 59];
    block[12..16].fill(0);
    stream.write_all(&block).expect("the block is taken");
    passive.finish().exits(1).complains(&["out of bounds"]);

    // The side that accepts has no --rdma.
    let mut passive = start(&folder, &["stress", "-r", "127.41.23.2", "-p", "4400"]);
    passive.expect("waiting");
    let done = run(&folder, &[&words[..], &["-D", "4k", "--rdma"]].concat()).exits(1);
    done.complains(&["the peer closed the connection"]);
    passive.finish().exits(1).complains(&["both sides with --rdma", "without -D"]);
}

/// Returns the columns of RDMA, in and out, of the average.
fn moved(done: &Done) -> [f64; 2] {
    let average = done.out.lines().find_map(|line| line.strip_suffix("  (average)"));
    let cells: Vec<f64> = average
        .unwrap_or_else(|| panic!("no average in {done:?}"))
        .split_whitespace()
        .map(|cell| cell.parse().expect("a number"))
        .collect();
    [cells[4], cells[5]]
}

/// Runs both sides over RDMA; returns what they printed.
fn over_rdma(net: &str, more: &[&str]) -> [Done; 2] {
    let folder = Folder::new();
    let (near, far) = (format!("127.41.{net}.1"), format!("127.41.{net}.2"));
    let mut passive = start(&folder, &["stress", "-r", &far, "-p", "4800", "--rdma"]);
    passive.expect("waiting for incoming connection");
    let words = ["stress", "-r", &near, "-s", &far, "-p", "4800", "--rdma", "-T", "2", "-v"];
    let active = run(&folder, &[&words[..], more].concat()).exits(0);
    [active, passive.finish().exits(0)]
}

#[test]
fn remote_reads_and_writes_bring_what_they_should() {
    thread::scope(|scope| {
        let both_ways: [(&str, &[&str]); 5] = [
            ("28", &["-D", "4k", "-d", "4", "-t", "2", "--rdma-use-once", "1"]),
            ("29", &["-D", "16k", "-I", "4", "--rdma-alignment", "77", "--rdma-key-o-meter"]),
            ("30", &["-D", "64k", "-t", "3", "--rdma-use-get-mr", "1", "--rdma-cache-mrs", "1"]),
            ("31", &["-D", "1m", "-d", "2", "--rdma-use-get-mr", "1"]),
            ("35", &["-D", "4k", "-q", "100k", "--zerocopy"]),
        ];
        for (net, more) in both_ways {
            scope.spawn(move || {
                for done in over_rdma(net, more) {
                    assert!(moved(&done).iter().all(|rate| *rate > 0.0), "{more:?}: {done:?}");
                    let meter = done.err.matches(" RDMA keys were issued, ").count();
                    assert_eq!(meter, usize::from(net == "29"), "{done:?}");
                }
            });
        }
        // The active side alone asks; its memory is read, or written.
        for (net, mode, out) in [("32", "1", 1), ("33", "2", 0)] {
            scope.spawn(move || {
                let more = ["-D", "64k", "-o", "-M", mode];
                let [active, passive] = over_rdma(net, &more).map(|done| moved(&done));
                assert!(active[out] > 0.0 && passive[1 - out] > 0.0, "{active:?}, {passive:?}");
                assert_eq!((active[1 - out], passive[out]), (0.0, 0.0));
            });
        }
    });
}

#[test]
fn the_block_says_which_reads_and_writes_are_wanted() {
    let folder = Folder::new();
    let listener = TcpListener::bind("127.41.34.2:4900").expect("a free port");
    let words = ["stress", "-r", "127.41.34.1", "-s", "127.41.34.2", "-p", "4900", "--rdma"];
    let more = ["-D", "4k", "-I", "3", "-M", "2", "--rdma-alignment", "258", "--rdma-use-get-mr"];
    let last = ["1", "--rdma-cache-mrs", "1", "--rdma-use-fence", "0", "--rdma-key-o-meter"];
    let active = start(&folder, &[&words[..], &more, &last].concat());
    let (mut stream, _) = listener.accept().expect("a connection");
    stream.set_read_timeout(Some(Duration::from_secs(20))).expect("a timeout");
    let mut block = [0; 59];
    stream.read_exact(&mut block).expect("a block");
    assert_eq!(block[12..16], [0, 0, 0x10, 0]);
    assert_eq!(block[39..], [0, 1, 0, 1, 1, 0xff, 0, 2, 0, 0, 0, 3, 0, 0, 1, 2, 0, 0, 0, 0]);
    drop(stream);
    active.finish().exits(1).complains(&["the peer closed the connection"]);
}

/// Starts both sides and waits until they measure.
fn both(folder: &Folder, net: &str, port: &str, seconds: &str) -> (Running, Running) {
    let (near, far) = (format!("{net}.1"), format!("{net}.2"));
    let mut passive = start(folder, &["stress", "-r", &far, "-p", port]);
    passive.expect("waiting for incoming connection");
    let words = ["stress", "-r", &near, "-s", &far, "-p", port, "-T", seconds];
    let mut active = start(folder, &words);
    active.expect(HEADING);
    passive.expect(HEADING);
    (active, passive)
}

#[test]
fn messages_of_strangers_are_ignored() {
    let folder = Folder::new();
    let (mut active, mut passive) = both(&folder, "127.41.24", "4500", "4");
    let address = "127.41.24.3";
    let node = Node::builder().address(address).build();
    let node = node.expect("a node");
    let stranger = node.bind((address, 4501));
    let stranger = stranger.expect("a socket");
    for to in ["127.41.24.1:4501", "127.41.24.2:4501"] {
        for len in [16, 0, 2000] {
            stranger.send_to(&vec![7; len], to).expect("sent");
        }
    }
    stranger.flush(Some(Duration::from_secs(20))).expect("both have taken it");
    for side in [&mut active, &mut passive] {
        side.until_told("ignored");
    }
    for side in [active, passive] {
        let done = side.finish().exits(0);
        assert_eq!(done.err.matches("127.41.24.3:4501").count(), 1, "told once: {done:?}");
        assert!(done.err.contains("3 messages from others"), "{done:?}");
        let average = done.out.lines().last().and_then(|l| l.strip_suffix("  (average)"));
        let sent = average.and_then(|line| line.split_whitespace().nth(1)).expect("a rate");
        assert!(sent.parse::<f64>().expect("a number") > 0.0, "{done:?}");
    }
}

#[test]
fn a_peer_that_vanishes_is_a_failure() {
    let folder = Folder::new();
    let (active, passive) = both(&folder, "127.41.25", "4600", "50");
    passive.signal("-KILL");
    passive.finish();
    active.finish().exits(1).complains(&["the peer ended before"]);
    let (active, passive) = both(&folder, "127.41.26", "4600", "50");
    active.signal("-KILL");
    active.finish();
    passive.finish().exits(1).complains(&["the peer ended before"]);
}

#[test]
fn another_version_is_named_and_strangers_at_the_control_port_end_nothing() {
    let folder = Folder::new();
    let mut passive = start(&folder, &["stress", "-r", "127.41.27.2", "-p", "4700"]);
    passive.expect("waiting");
    drop(TcpStream::connect("127.41.27.2:4700").expect("a listener"));
    passive.until_told("waiting for another");
    let mut stream = TcpStream::connect("127.41.27.2:4700").expect("a listener");
    let opening = b"2.3.11\0\0\0\0\0\0\0\0\0\0{\"req_depth\":1,\"recv_addr\":\"fd00::1\"}";
    stream.write_all(opening).expect("the opening is taken");
    let done = passive.finish().exits(1);
    let last = done.err.lines().last().expect("a line");
    assert!(last.contains("rds-stress 2.3.11") && last.contains("rds-stress 2.0.7"), "{done:?}");
}
