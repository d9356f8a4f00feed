//! A node that has no descriptors left, in a process of its own.

use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use bowline::rds::Paths;
use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::common::{LIMIT, addr, builder, ip};
use crate::memory::alone;
use crate::raw::try_dial;
use crate::scene::{ECHO, FRIEND, NODE, answer, exchange};

/// Descriptors a process has open.
pub(crate) fn descriptors() -> u64 {
    std::fs::read_dir("/proc/self/fd").unwrap().count() as u64
}

/// Processor time a process has used, in ticks of a hundredth of a second.
fn ticks(process: u32) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap();
    let fields: Vec<_> = stat.rsplit(") ").next().unwrap().split(' ').collect();
    fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
}

#[test]
#[ignore = "not a test: the process that a_node_without_descriptors_goes_on_serving starts"]
fn child_with_few_descriptors() {
    let node = builder(947, NODE).paths(Paths::One).build().unwrap();
    let echo = node.bind(addr(947, NODE, ECHO)).unwrap();
    let few = Rlimit { current: Some(descriptors() + 24), ..getrlimit(Resource::Nofile) };
    setrlimit(Resource::Nofile, few).unwrap();
    println!("ready.");
    echo.set_recv_timeout(Some(Duration::from_secs(60)));
    answer(&echo);
    node.shutdown(LIMIT);
}

#[test]
fn a_node_without_descriptors_goes_on_serving() {
    let _alone = alone();
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "descriptors::child_with_few_descriptors", "--ignored", "--nocapture"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap().ends_with("ready.")), "the child begins");
    let to = addr(947, NODE, ECHO);
    let socket = |n: u8| {
        let node = builder(947, n).paths(Paths::One).build().unwrap();
        let socket = node.bind(addr(947, n, ECHO)).unwrap();
        socket.set_recv_timeout(Some(LIMIT));
        socket
    };
    let friend = socket(FRIEND);
    exchange(&friend, to, 0);

    // A connection for which the node has no descriptor may be closed while this side is still
    // connecting.
    let crowd: Vec<_> = (0..100)
        .filter_map(|n| match try_dial(ip(947, 1 + n % 20), ip(947, NODE), None) {
            Ok(mut stream) => {
                drop(stream.write(b"x"));
                Some(stream)
            }
            Err(Errno::CONNRESET) => None,
            Err(errno) => panic!("{errno}"),
        })
        .collect();
    assert!(crowd.len() > 50, "{} connections", crowd.len());
    // A peer that connects, and one that the node has to connect to.
    let (smaller, larger) = (socket(199), socket(202));
    for socket in [&smaller, &larger] {
        socket.send_to(b"patient", to).unwrap();
    }
    for round in 0..100 {
        exchange(&friend, to, round);
    }
    let before = ticks(child.id());
    thread::sleep(Duration::from_millis(500));
    let used = ticks(child.id()) - before;
    for socket in [&smaller, &larger] {
        socket.set_nonblocking(true);
        let nothing = socket.recv(&mut [0; 16]).unwrap_err();
        assert_eq!(nothing.errno(), 11, "there are no descriptors for it");
        socket.set_nonblocking(false);
    }
    println!("used {used} hundredths of a second of 50 while out of descriptors");
    assert!(used <= 25, "it must not spin: {used} of 50");

    drop(crowd);
    for socket in [&smaller, &larger] {
        let mut buf = [0; 16];
        let n = socket.recv(&mut buf).unwrap();
        assert_eq!(buf[..n], *b"patient");
    }
    exchange(&friend, to, 1);
    friend.send_to(b"", to).unwrap();
    assert!(child.wait().unwrap().success());
}
