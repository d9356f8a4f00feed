//! Nodes that are killed, or stuck, while one hands over to another.

use std::{
    io::Read,
    os::unix::net::{UnixListener, UnixStream},
    path::Path,
    thread,
};

use bowline_host::{HandOver, NodeConnection};

use crate::support::{Folder, Running, run, start};

/// A node that serves programs in a folder.
fn node(folder: &Folder, place: &Path, address: &str, more: &[&str]) -> Running {
    let words = ["node", "--address", address, "--programs", place.to_str().unwrap()];
    let mut node = start(folder, &[&words[..], more].concat());
    node.expect("ready");
    node
}

fn is_served(place: &Path) -> bool {
    NodeConnection::open(place).is_ok_and(|mut node| node.namespace().is_ok())
}

/// Its queue is full, and it accepts nobody.
#[test]
fn a_node_that_accepts_nobody_is_not_waited_for_for_ever() {
    let folder = Folder::new();
    let place = folder.path().join("host.sock");
    let listener = UnixListener::bind(&place).unwrap();
    rustix::net::listen(&listener, 0).unwrap();
    let _waits = UnixStream::connect(&place).unwrap();
    let path = place.to_str().unwrap();
    let run_it = run(&folder, &["run", "--node", path, "true"]).exits(1);
    // Without the library there is another complaint.
    if !run_it.err.contains("libbowline_preload.so") {
        run_it.complains(&["no node serves programs here", "accepted no connection for 2 s"]);
    }
    let words = ["node", "--address", "127.41.72.9", "--replace", "--programs", path];
    run(&folder, &words)
        .exits(1)
        .complains(&["cannot replace the node", "accepted no connection for 10 s"]);
    let waiting = start(&folder, &words);
    waiting.signal("-TERM");
    assert_eq!(waiting.finish().code, None, "it is killed by the signal");
}

#[test]
fn a_node_stays_whose_successor_is_killed_after_it_has_begun() {
    let folder = Folder::new();
    let place = folder.path().join("host.sock");
    let mut first = node(&folder, &place, "127.41.72.1", &[]);
    for _ in 0..2 {
        let (all, successor) = {
            let place = place.clone();
            let asked = thread::spawn(move || HandOver::receive(&place).unwrap().unwrap());
            first.expect("handing over");
            asked.join().unwrap()
        };
        successor.dismiss().expect("it waits");
        drop((all, successor));
        first.until_told("has ended before it served, and this node continues");
        first.expect("ready");
        assert!(is_served(&place));
        run(&folder, &["info", "-c"]).exits(0);
        run(&folder, &["ping", "-c", "1", "127.41.72.1", "-I", "127.41.72.2"]).exits(0);
    }
    // Another one can replace it after that.
    let mut next = node(&folder, &place, "127.41.72.1", &["--replace"]);
    first.expect("handed over");
    first.finish().exits(0);
    assert!(is_served(&place));
    run(&folder, &["info", "-c"]).exits(0);
    next.signal("-TERM");
    next.expect("stopped");
}

#[test]
fn a_successor_begins_whose_node_is_killed() {
    let folder = Folder::new();
    let place = folder.path().join("host.sock");
    let first = node(&folder, &place, "127.41.72.3", &[]);
    let (all, successor) = HandOver::receive(&place).unwrap().unwrap();
    first.signal("-KILL");
    let _ = first.finish();
    successor.dismiss().expect("nobody can have taken it back");
    drop((all, successor));
    assert!(!is_served(&place));
    // One that takes everything back has said so, whatever became of it.
    let first = node(&folder, &place, "127.41.72.3", &[]);
    let (_all, successor) = HandOver::receive(&place).unwrap().unwrap();
    first.until_told("this node continues");
    first.signal("-KILL");
    let _ = first.finish();
    let error = successor.dismiss().unwrap_err();
    assert!(error.to_string().contains("taken everything back"), "{error}");
}

#[test]
fn a_node_starts_where_the_one_that_it_replaces_is_killed() {
    let folder = Folder::new();
    let place = folder.path().join("host.sock");
    let listener = UnixListener::bind(&place).unwrap();
    let killed = thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        // It has heard the request, and says nothing.
        stream.read_exact(&mut [0; 32]).unwrap();
        drop((listener, stream));
    });
    let mut next = node(&folder, &place, "127.41.72.4", &["--replace"]);
    killed.join().unwrap();
    next.until_told("has ended before it handed over");
    assert!(is_served(&place));
    next.signal("-TERM");
    next.expect("stopped");
}
