//! RDMA programs that are killed and restarted while their peer still has the connection.

use std::fs;
use std::time::{Duration, Instant};

use crate::support::{Folder, Running, run, start};

fn listening(folder: &Folder, words: &[&str]) -> Running {
    let mut server = start(folder, words);
    server.expect("listening");
    server
}

/// Waits until the connection of a process is noted.
pub(crate) fn until_noted(folder: &Folder, address: &str) {
    let end = Instant::now() + Duration::from_secs(20);
    let name = format!("-{address}.connections");
    let noted = || {
        let own = format!("bowline/roce-{}", rustix::process::geteuid());
        let Ok(files) = fs::read_dir(folder.path().join(own)) else { return false };
        files.flatten().any(|file| file.file_name().to_string_lossy().ends_with(&name))
    };
    while !noted() {
        assert!(Instant::now() < end, "no connection of {address} is noted");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// The server serves one client at a time, and would wait for the pings of a killed one for ever if
/// it were not told of its end.
// tests [CM-53]
#[test]
fn a_client_that_was_killed_is_served_again_at_once() {
    let folder = Folder::new();
    for (server, client, words) in [
        ("127.41.60.1", "127.41.60.2", &["rping", "-i", "100"][..]),
        ("127.41.60.3", "127.41.60.4", &["perf", "--op", "send", "--duration", "60"][..]),
    ] {
        let waiting = listening(&folder, &[words[0], "-s", "--persistent", "-I", server]);
        let to = ["-c", server, "-I", client];
        let first = start(&folder, &[words, &to].concat());
        until_noted(&folder, client);
        first.signal("-KILL");
        let _ = first.finish();
        let again = match words[0] {
            "rping" => run(&folder, &[&["rping", "-C", "3", "-V"][..], &to].concat()),
            _ => run(&folder, &[&["perf", "--op", "send", "--count", "20"][..], &to].concat()),
        };
        again.exits(0);
        waiting.signal("-INT");
        let _ = waiting.finish();
    }
}

/// The restarted server does not know the queue pair and drops the pings silently: unless told of
/// the former server's end, the client would give up and report no answer.
// tests [CM-53]
#[test]
fn a_client_hears_at_once_that_its_server_was_killed_and_is_back() {
    let folder = Folder::new();
    let words = ["rping", "-s", "-P", "-I", "127.41.61.1"];
    let server = listening(&folder, &words);
    let client = start(&folder, &["rping", "-c", "127.41.61.1", "-I", "127.41.61.2", "-i", "0.5"]);
    until_noted(&folder, "127.41.61.1");
    until_noted(&folder, "127.41.61.2");
    server.signal("-KILL");
    let _ = server.finish();
    let _next = listening(&folder, &words);
    let done = client.finish().exits(1);
    assert!(done.err.contains("the peer has ended the connection"), "{done:?}");
}
