//! The end of a process whose disks are in use.

use std::{
    fs::{self, DirEntry},
    io,
    path::PathBuf,
    time::{Duration, Instant},
};

use crate::{
    nbd::{FLUSH, Nbd, WRITE},
    support::{Folder, Running, run, start},
};

/// How many requests of the client's disk are in flight, and how many wait.
const QUEUE: &str = "block/rnbd0/bowline/queue";

/// Starts a server of a file, and a client with the disk at an NBD socket.
fn pair(folder: &Folder, host: u8) -> (Running, Running, PathBuf) {
    let address = format!("127.60.{host}.1");
    let image = folder.write("disk0.img", "");
    fs::File::options().write(true).open(&image).expect("it").set_len(1 << 20).expect("a length");
    let file = format!("disk0={}", image.display());
    let mut server = start(folder, &["rnbd", "export", "--file", &file, "-I", &address]);
    server.expect(&format!("listening on {address}:1234"));
    let socket = folder.path().join("nbd");
    let path = format!("127.60.{host}.11@{address}");
    let words = ["rnbd", "map", "disk0", "--from", "s1", "--path", &path];
    let place = socket.to_str().expect("a plain path");
    let mut client = start(folder, &[&words[..], &["--nbd", place]].concat());
    client.expect("mapped disk0");
    (server, client, socket)
}

#[test]
fn requests_that_were_sent_are_answered_and_made_durable_before_the_end() {
    let folder = Folder::new();
    let (server, client, socket) = pair(&folder, 2);
    // The counters of the export last as long as somebody has it open.
    let words = ["rnbd", "map", "disk0", "--access", "ro", "--from", "s2"];
    let mut reader = start(&folder, &[&words[..], &["--path", "127.60.2.12@127.60.2.1"]].concat());
    reader.expect("mapped disk0");
    let mut nbd = Nbd::connect(&socket);
    assert_eq!(nbd.ask(WRITE, 0, 4096), 0);
    server.signal("-STOP");
    let count = 40;
    (0..count).for_each(|n| nbd.send(WRITE, n * 4096, 4096));
    client.signal("-TERM");
    let own = std::process::id();
    client.until_logged(&format!("(pid {own}) at nbd {}", socket.display()));
    server.signal("-CONT");
    (0..count).for_each(|_| assert_eq!(nbd.answer(), 0));
    client.finish().exits(0);
    assert!(nbd.has_ended() && !socket.exists());
    let control = folder.path().join(format!("bowline/rnbd/export-{}.sock", server.id()));
    let control = control.to_str().expect("a plain path");
    let stat =
        run(&folder, &["rnbd", "get", "block/disk0/stat", "--control", control]).exits(0).out;
    let flushes = stat.split_ascii_whitespace().nth(15).expect("17 numbers");
    assert_eq!(flushes, "1", "{stat}");
    for part in [reader, server] {
        part.signal("-TERM");
        part.finish().exits(0);
    }
}

#[test]
fn writers_of_the_file_do_not_hold_up_the_end() {
    use std::os::unix::fs::FileExt;
    let folder = Folder::new();
    let address = "127.60.4.1";
    let mut server = start(&folder, &["rnbd", "export", "--memory", "disk0=1MiB", "-I", address]);
    server.expect("listening on");
    let files = folder.path().join("files");
    fs::create_dir(&files).expect("a folder");
    let words = ["rnbd", "map", "disk0", "--from", "s1", "--path", "127.60.4.11@127.60.4.1"];
    let place = files.to_str().expect("a plain path");
    let mut client = start(&folder, &[&words[..], &["--fuse", place]].concat());
    if !client.hears("mapped disk0") {
        return bowline_testkit::skipped::without_fuse(client.finish().err);
    }
    let file = fs::File::options().write(true).open(files.join("rnbd0")).expect("the file");
    std::thread::scope(|threads| {
        for n in 0..4 {
            let file = &file;
            // It ends with the process that serves the file.
            threads.spawn(move || while file.write_at(&[n; 4096], u64::from(n) << 12).is_ok() {});
        }
        client.signal("-TERM");
        let done = client.finish();
        assert!(!done.err.contains("not answered in time"), "{done:?}");
    });
    server.signal("-TERM");
    server.finish().exits(0);
}

#[test]
fn an_end_in_which_not_all_was_served_says_so() {
    let folder = Folder::new();
    let (server, client, socket) = pair(&folder, 3);
    let mut nbd = Nbd::connect(&socket);
    assert_eq!(nbd.ask(WRITE, 0, 4096), 0);
    server.signal("-STOP");
    // A thread that runs on another processor may do so for a moment.
    let is_stopped = |thread: io::Result<DirEntry>| {
        let stat = fs::read_to_string(thread.expect("a thread").path().join("stat"));
        stat.is_ok_and(|stat| stat.contains(") T "))
    };
    let threads = format!("/proc/{}/task", server.id());
    while !fs::read_dir(&threads).expect("a process").all(is_stopped) {}
    nbd.send(WRITE, 0, 4096);
    // A request that the end finds unread in the socket is refused, and not one in flight.
    let begun = Instant::now();
    let control = folder.path().join(format!("bowline/rnbd/map-{}.sock", client.id()));
    let asks = ["rnbd", "get", QUEUE, "--control", control.to_str().expect("a plain path")];
    while run(&folder, &asks).exits(0).out == "0 0\n" {
        assert!(begun.elapsed() < Duration::from_secs(10), "the write is not in flight");
    }
    client.signal("-TERM");
    let done = client.finish().exits(1);
    // The path may be found dead before patience ends.
    let all =
        ["rnbd0: requests not answered in time: 1", "rnbd0: requests that failed at the end: 1"];
    assert!(all.iter().any(|line| done.err.contains(line)), "{done:?}");
    drop(server);
}

#[test]
fn a_write_that_is_not_durable_when_the_server_is_lost_fails_the_end() {
    // tests [NB-73]
    for (host, flushes, code) in [(45, false, 1), (46, true, 0)] {
        let folder = Folder::new();
        let (server, mut client, socket) = pair(&folder, host);
        let mut nbd = Nbd::connect(&socket);
        assert_eq!(nbd.ask(WRITE, 0, 4096), 0);
        if flushes {
            assert_eq!(nbd.ask(FLUSH, 0, 0), 0);
        }
        server.signal("-TERM");
        server.finish().exits(0);
        client.expect("rnbd0 offline");
        client.signal("-TERM");
        let done = client.finish().exits(code);
        let line = "rnbd0: what was written was not made durable: its server is not connected";
        assert_eq!(done.err.contains(line), !flushes, "{done:?}");
    }
}

#[test]
fn a_second_signal_that_cuts_off_the_last_flush_says_so() {
    // tests [NB-73]
    let folder = Folder::new();
    let (server, client, socket) = pair(&folder, 47);
    let mut nbd = Nbd::connect(&socket);
    assert_eq!(nbd.ask(WRITE, 0, 4096), 0);
    server.signal("-STOP");
    client.signal("-TERM");
    client.until_logged("cuts off");
    // Signals that follow at once are the same request.
    let pid = client.id().to_string();
    let ended = std::thread::spawn(move || client.finish());
    while !ended.is_finished() {
        // One that is gone is not there any more.
        let _ = std::process::Command::new("kill").args(["-TERM", &pid]).output();
        std::thread::sleep(Duration::from_millis(50));
    }
    let done = ended.join().expect("it ends").exits(128 + 15);
    let line = "rnbd0: what was written was not made durable: a second signal cut off the flush";
    assert!(done.err.contains(line), "{done:?}");
    drop(server);
}
