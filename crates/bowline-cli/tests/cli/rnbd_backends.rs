//! `rnbd export` of what NBD servers serve, and with faults for tests.

use std::{
    io::{Read, Write},
    os::unix::net::{UnixListener, UnixStream},
    path::Path,
    process::{Child, Command, Stdio},
    sync::mpsc::{Receiver, Sender, channel},
    thread,
    time::{Duration, Instant},
};

use bowline_testkit::skipped;
use serde_json::Value;

use crate::disk_clients::{Nbd, PATIENCE};
use crate::support::{Folder, Running, run, start};

/// An NBD server of others at a socket; it is killed when it is dropped.
struct Server(Child);

impl Server {
    /// Starts a program that serves at `socket`; `None` where it is not installed.
    fn start(program: &str, words: &[&str], socket: &Path) -> Option<Self> {
        let mut command = Command::new(program);
        let command = command.args(words).stdin(Stdio::null()).stdout(Stdio::null());
        let Ok(child) = command.spawn() else {
            skipped::without(program);
            return None;
        };
        let mut server = Self(child);
        let began = Instant::now();
        while !socket.exists() {
            let ended = server.0.try_wait().expect("a status");
            assert!(ended.is_none() && began.elapsed() < Duration::from_secs(60), "{ended:?}");
            thread::sleep(Duration::from_millis(10));
        }
        Some(server)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn export(folder: &Folder, host: u8, words: &[&str]) -> Running {
    let address = format!("127.72.{host}.1");
    let mut server = start(folder, &[&["rnbd", "export", "-I", &address], words].concat());
    server.expect("listening on");
    server
}

/// Writes and reads all of a disk, and compares.
fn verify(folder: &Folder, host: u8, seconds: &str) -> Value {
    let path = format!("127.72.{host}.11@127.72.{host}.1");
    let words =
        ["rnbd", "verify", "disk0", "--from", "s1", "--path", &path, "--json", "-T", seconds];
    let done = run(folder, &words).exits(0);
    serde_json::from_str(&done.out).expect("one JSON object")
}

fn socket(folder: &Folder) -> (std::path::PathBuf, String) {
    let socket = folder.path().join("server.sock");
    let uri = format!("nbd+unix:///disk0?socket={}", socket.display());
    (socket, uri)
}

#[test]
fn a_qcow2_image_is_exported_by_its_nbd_server() {
    let folder = Folder::new();
    let image = folder.path().join("image.qcow2");
    let image = image.to_str().expect("plain");
    let made =
        Command::new("qemu-img").args(["create", "-q", "-f", "qcow2", image, "16M"]).status();
    if made.is_err() {
        return skipped::without("qemu-img");
    }
    let (socket, uri) = socket(&folder);
    let place = socket.to_str().expect("plain");
    let words = ["-f", "qcow2", "-x", "disk0", "-k", place, "-t", "--discard=unmap", image];
    let Some(server) = Server::start("qemu-nbd", &words, &socket) else { return };
    let mut exports = export(&folder, 1, &["--nbd-backend", &uri]);
    exports.expect("export disk0 bytes=16777216");
    assert_eq!(verify(&folder, 1, "2")["pass"], true);
    exports.signal("-TERM");
    exports.finish().exits(0);
    drop(server);
    let checked = Command::new("qemu-img").args(["check", "-q", image]).status();
    assert!(checked.expect("qemu-img").success());
}

#[test]
fn a_plug_in_of_nbdkit_is_exported_and_may_be_started_again() {
    let folder = Folder::new();
    let (socket, uri) = socket(&folder);
    let store = folder.path().join("store");
    std::fs::File::create_new(&store).expect("a file").set_len(8 << 20).expect("its size");
    let (place, store) = (socket.to_str().expect("plain"), store.to_str().expect("plain"));
    let words = ["-f", "-U", place, "file", store];
    let Some(server) = Server::start("nbdkit", &words, &socket) else { return };
    let named = format!("disk0={uri}");
    let _exports = export(&folder, 2, &["--nbd-backend", &named]);
    assert_eq!(verify(&folder, 2, "1")["pass"], true);
    // What was not flushed might be lost with the server, and the next flush would say so.
    let path = "127.72.2.11@127.72.2.1";
    let flush = ["--run", "qemu-io -f raw -c flush \"$uri\""];
    let map = ["rnbd", "map", "disk0", "--from", "s1", "--path", path];
    let flushed = run(&folder, &[&map[..], &flush].concat());
    if flushed.code == Some(127) {
        return skipped::without("qemu-io");
    }
    flushed.exits(0);
    drop(server);
    let _ = std::fs::remove_file(&socket);
    let _server = Server::start("nbdkit", &words, &socket);
    assert_eq!(verify(&folder, 2, "1")["pass"], true);
}

/// bowline's own door is an NBD server like any other, and the command of a map can be a server.
#[test]
fn a_disk_of_one_server_is_exported_by_another_one() {
    let folder = Folder::new();
    let _first = export(&folder, 3, &["--memory", "disk0=8MiB"]);
    let bowline = env!("CARGO_BIN_EXE_bowline");
    let command = format!(
        "{bowline} rnbd export --nbd-backend again=\"$uri\" -I 127.72.4.1 --run '{bowline} rnbd verify again \
         --from s2 --path 127.72.4.11@127.72.4.1 -T 1 --json'"
    );
    let words = ["rnbd", "map", "disk0", "--from", "s1", "--path", "127.72.3.11@127.72.3.1"];
    let done = run(&folder, &[&words[..], &["--run", &command]].concat()).exits(0);
    let object: Value = serde_json::from_str(&done.out).expect("one JSON object");
    assert_eq!(object["pass"], true);
    assert!(done.err.contains("export again bytes=8388608"), "{done:?}");
}

#[test]
fn an_export_of_a_server_can_be_added_and_its_mistakes_are_named() {
    let folder = Folder::new();
    let mut exports = export(&folder, 5, &["--memory", "disk1=1MiB"]);
    let (socket, uri) = socket(&folder);
    let word = format!("nbd-backend={uri}");
    run(&folder, &["rnbd", "export", "disk0", &word]).exits(254);
    exports.until_told("NBD server nbd+unix:///disk0?socket=");
    let place = socket.to_str().expect("plain");
    let words = ["-f", "-U", place, "memory", "1M"];
    let Some(_server) = Server::start("nbdkit", &words, &socket) else { return };
    run(&folder, &["rnbd", "export", "disk0", &word]).exits(0);
    exports.expect("export disk0 bytes=1048576");
    run(&folder, &["rnbd", "export", "--nbd-backend", "disk0=x"]).exits(2).complains(&["nbd://"]);
    let words = ["rnbd", "export", "-I", "127.72.5.2", "--nbd-backend", "nbd://127.72.5.9:1/a"];
    run(&folder, &words).exits(1).complains(&["NBD server nbd://127.72.5.9:1/a", "refused"]);
}

#[test]
fn filters_fail_requests_by_lot_and_hold_them_back() {
    let folder = Folder::new();
    let filters = ["--filter", "error=50%,seed=7", "--filter", "delay-read=30ms"];
    let _exports = export(&folder, 6, &[&["--memory", "disk0=1MiB"], &filters[..]].concat());
    let path = "127.72.6.11@127.72.6.1";
    let words = ["rnbd", "map", "disk0", "--from", "s1", "--path", path, "--fuse"];
    let dir = folder.path().join("files");
    let dir = dir.to_str().expect("plain");
    // Each read is of one block, by no cache; the shell counts how many of 40 fail.
    let command = "failed=0; for n in $(seq 40); do \
                   dd if=\"$dev\" of=/dev/null iflag=direct bs=4k count=1 skip=$n 2>/dev/null || \
                   failed=$((failed+1)); done; echo $failed";
    let began = Instant::now();
    let done = run(&folder, &[&words[..], &[dir, "--run", command]].concat());
    if done.code == Some(1) && done.err.contains("FUSE") {
        return skipped::without_fuse(done.err.trim());
    }
    let failed: u32 = done.exits(0).out.trim().parse().expect("a number");
    assert!((5..36).contains(&failed), "{failed}");
    assert!(began.elapsed() >= Duration::from_millis(30 * u64::from(40 - failed)));
    for (text, wanted) in [("error=2", "rate"), ("delay=1", "error=RATE"), ("rate=0", "passes")] {
        let words = ["rnbd", "export", "--memory", "disk0=1MiB", "--filter", text];
        run(&folder, &words).exits(2).complains(&[wanted]);
    }
}

/// What an NBD server gets.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Got {
    Connection,
    Command(u16),
    End,
}

const WRITE: u16 = 1;
const DISC: u16 = 2;
const FLUSH: u16 = 3;

/// Serves one client of a disk of 1 MiB with a cache, which answers everything but `silent`.
fn serve_one(mut stream: UnixStream, silent: Option<u16>, got: &Sender<Got>) -> Option<()> {
    let reply = |option: u32, kind: u32, data: &[u8]| {
        let numbers = [option, kind, data.len() as u32].map(u32::to_be_bytes).concat();
        [&0x0003_e889_0455_65a9_u64.to_be_bytes()[..], &numbers, data].concat()
    };
    stream.write_all(b"NBDMAGICIHAVEOPT\0\x03").ok()?;
    stream.read_exact(&mut [0; 4 + 16]).ok()?;
    stream.write_all(&reply(8, 1 << 31 | 1, b"")).ok()?;
    let mut option = [0; 16];
    stream.read_exact(&mut option).ok()?;
    let len = u32::from_be_bytes(option[12..].try_into().ok()?);
    stream.read_exact(&mut vec![0; len as usize]).ok()?;
    // Has flags, and flushes.
    let export = [&[0, 0][..], &(1_u64 << 20).to_be_bytes(), &5_u16.to_be_bytes()].concat();
    stream.write_all(&[reply(7, 3, &export), reply(7, 1, b"")].concat()).ok()?;
    got.send(Got::Connection).ok()?;
    loop {
        let mut request = [0; 28];
        if stream.read_exact(&mut request).is_err() {
            return got.send(Got::End).ok();
        }
        let command = u16::from_be_bytes([request[6], request[7]]);
        let len = u32::from_be_bytes(request[24..].try_into().ok()?) as usize;
        got.send(Got::Command(command)).ok()?;
        if command == WRITE {
            stream.read_exact(&mut vec![0; len]).ok()?;
        }
        if command != DISC && Some(command) != silent {
            let data = vec![0; if command == 0 { len } else { 0 }];
            let head = [&[0x67, 0x44, 0x66, 0x98, 0, 0, 0, 0], &request[8..16]].concat();
            stream.write_all(&[head, data].concat()).ok()?;
        }
    }
}

/// Starts an NBD server; returns what it gets on all connections.
fn nbd_server(socket: &Path, silent: Option<u16>) -> Receiver<Got> {
    let listener = UnixListener::bind(socket).expect("a socket");
    let (sender, got) = channel();
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let sender = sender.clone();
            thread::spawn(move || serve_one(stream, silent, &sender));
        }
    });
    got
}

/// Writes a block of the export, without a flush; returns the process that has it mapped.
fn written(folder: &Folder, host: u8) -> (Running, Nbd) {
    let path = format!("127.72.{host}.11@127.72.{host}.1");
    let door = folder.path().join("door.sock");
    let place = door.to_str().expect("plain");
    let words = ["rnbd", "map", "disk0", "--from", "s1", "--path", &path, "--nbd", place];
    let mut client = start(folder, &words);
    client.expect("mapped disk0 ");
    let mut nbd = Nbd::connect(&door).expect("connected");
    nbd.send(0, 1).expect("sent");
    nbd.reply();
    (client, nbd)
}

/// Returns what the server gets until `last`, without reads.
fn until(got: &Receiver<Got>, last: Got) -> Vec<Got> {
    let mut all = Vec::new();
    while all.last() != Some(&last) {
        let next = got.recv_timeout(PATIENCE).unwrap_or_else(|_| panic!("no {last:?}: {all:?}"));
        all.extend(Some(next).filter(|next| *next != Got::Command(0)));
    }
    all
}

/// A flush of the next process covers what was written by its own connection only.
#[test]
fn an_export_that_is_replaced_flushes_and_leaves_its_server_before_the_next_one_connects() {
    // tests [NB-77]
    let folder = Folder::new();
    let (socket, uri) = socket(&folder);
    let got = nbd_server(&socket, None);
    let words = ["--nbd-backend", uri.as_str()];
    let first = export(&folder, 7, &words);
    let (_client, mut nbd) = written(&folder, 7);
    assert_eq!(until(&got, Got::Command(WRITE)), [Got::Connection, Got::Command(WRITE)]);
    let second = export(&folder, 7, &[&words[..], &["--replace"]].concat());
    let wanted = [Got::Command(FLUSH), Got::Command(DISC), Got::End, Got::Connection];
    assert_eq!(until(&got, Got::Connection), wanted);
    first.finish().exits(0);
    // The next one serves its clients.
    nbd.send(1, 1).expect("sent");
    nbd.reply();
    assert_eq!(until(&got, Got::Command(WRITE)), [Got::Command(WRITE)]);
    second.signal("-TERM");
    assert_eq!(until(&got, Got::End), wanted[..3]);
    second.finish().exits(0);
}

#[test]
fn an_export_ends_when_its_server_does_not_answer_or_a_filter_holds_requests_back() {
    // tests [NB-77]
    let folder = Folder::new();
    let (socket, uri) = socket(&folder);
    let got = nbd_server(&socket, Some(FLUSH));
    let exports = export(&folder, 8, &["--nbd-backend", &uri]);
    let (_client, _nbd) = written(&folder, 8);
    until(&got, Got::Command(WRITE));
    exports.signal("-TERM");
    let done = exports.finish();
    assert!(done.err.contains("closing export disk0"), "{done:?}");
    done.exits(0);

    let folder = Folder::new();
    let filter = ["--memory", "disk0=1MiB", "--filter", "delay-write=3600"];
    let exports = export(&folder, 9, &filter);
    let path = "127.72.9.11@127.72.9.1";
    let door = folder.path().join("door.sock");
    let place = door.to_str().expect("plain");
    let words = ["rnbd", "map", "disk0", "--from", "s1", "--path", path, "--nbd", place];
    let mut client = start(&folder, &words);
    client.expect("mapped disk0 ");
    let mut nbd = Nbd::connect(&door).expect("connected");
    nbd.send(0, 1).expect("sent");
    // A second request that has been answered shows that the first one is there.
    nbd.read(1);
    exports.signal("-TERM");
    exports.finish().exits(0);
}
