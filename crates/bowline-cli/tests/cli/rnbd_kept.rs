//! Disks whose process is killed while a service manager has the descriptors of their front ends:
//! the next process resumes them, and programs notice a pause.

use std::{
    fs::{self, File, OpenOptions},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::{Duration, Instant},
};

use bowline_testkit::skipped;

use crate::disk_clients::{
    Nbd, PATIENCE, Shared, Stop, WRITERS, compare, content, end, export, joined, map, read_file,
    with_fuse, write_file,
};
use crate::support::{Folder, Running, run, start_as};

/// A service manager that starts `rnbd map`, and starts it again whenever it is killed.
pub(crate) struct Keeper(pub(crate) Running);

impl Keeper {
    fn start(folder: &Folder, host: u8, more: &[&str]) -> Self {
        let path = format!("127.75.{host}.11@127.75.{host}.1");
        let map = ["rnbd", "map", "disk0", "--from", "s1", "--path", &path];
        Self::start_as(folder, &[&[env!("CARGO_BIN_EXE_bowline")], &map[..], more].concat())
    }

    /// Starts another command so.
    pub(crate) fn start_as(folder: &Folder, command: &[&str]) -> Self {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/cli/keeper.py");
        let socket = folder.path().join("notify").display().to_string();
        Self(start_as("python3".as_ref(), folder, &[&["-B", script, &socket], command].concat()))
    }

    /// As [`with_fuse`].
    pub(crate) fn with_fuse(self, line: &str) -> Option<Self> {
        with_fuse(self.0, line).map(Self)
    }

    /// Waits until the process runs, and returns its number.
    pub(crate) fn started(&mut self) -> u32 {
        self.0.expect("started ");
        let line = self.0.said().lines().last().expect("a line");
        line.strip_prefix("started ").and_then(|id| id.parse().ok()).expect("a number")
    }
}

pub(crate) fn kill(process: u32) {
    let killed = Command::new("kill").args(["-KILL", &process.to_string()]).status();
    assert!(killed.expect("kill runs").success());
}

#[test]
fn a_file_stays_open_when_its_process_is_killed() {
    // tests [NB-72]
    let folder = Folder::new();
    let (server, image) = export(&folder, 30, &[]);
    let (dir, place) = (folder.path().join("files"), folder.path().join("nbd.sock"));
    let text = |path: &Path| path.to_str().expect("a plain path").to_owned();
    let doors = ["--fuse", &text(&dir), "--nbd", &text(&place)];
    let mut keeper = Keeper::start(&folder, 30, &doors);
    let mut process = keeper.started();
    let Some(mut keeper) = keeper.with_fuse("stored bowline-disk") else { return };
    for name in ["stored bowline-nbd", "stored bowline-fuse", "ready"] {
        keeper.0.expect(name);
    }
    let file = dir.join("rnbd0");
    let file = OpenOptions::new().read(true).write(true).open(file).expect("the disk");
    let shared = Shared::default();
    let (written, gaps) = thread::scope(|scope| {
        let stop = Stop(&shared);
        let (file, place, shared) = (&file, &place, &shared);
        // The same blocks again and again: what is written late would be seen.
        let write = |writer| move || write_file(file, writer, 4, false, shared);
        let mut writers: Vec<_> = (1..=WRITERS).map(|writer| scope.spawn(write(writer))).collect();
        writers.push(scope.spawn(|| Nbd::write_and_reconnect(place, 0, shared)));
        for round in 0..4 {
            shared.advance();
            if round == 3 {
                // Requests are on their way for sure.
                server.signal("-STOP");
                thread::sleep(Duration::from_millis(50));
            }
            kill(process);
            keeper.0.expect("ended -9, has 3");
            process = keeper.started();
            if round == 3 {
                server.signal("-CONT");
            }
            keeper.0.expect("ready");
        }
        shared.advance();
        drop(stop);
        joined(writers)
    });
    println!("longest times without an answer: {gaps:?}");
    compare(&written, &image, |block| read_file(&file, block));
    // The process of now knows that the file is open.
    let unmap = run(&folder, &["rnbd", "unmap", "rnbd0"]);
    assert_ne!(unmap.code, Some(0), "{unmap:?}");
    drop(file);
    keeper.0.signal("-TERM");
    let done = keeper.0.finish().exits(0);
    for name in ["bowline-disk", "bowline-nbd", "bowline-fuse"] {
        assert_eq!(done.out.matches(&format!("stored {name}\n")).count(), 1, "{done:?}");
        assert_eq!(done.out.matches(&format!("removed {name}\n")).count(), 1, "{done:?}");
    }
    assert!(done.out.ends_with("ended 0, has 0\n"), "{done:?}");
    assert!(!place.exists());
    let mounts = fs::read_to_string("/proc/self/mountinfo").expect("mounts");
    assert!(!mounts.contains(&text(&dir)), "{mounts}");
    end(server);
}

/// What is kept is the next process's, too, which is in the service of the former one.
#[test]
fn a_process_that_has_replaced_another_one_may_be_killed() {
    // tests [NB-72] [NB-70]
    let folder = Folder::new();
    let (server, _) = export(&folder, 33, &[]);
    let (dir, place) = (folder.path().join("files"), folder.path().join("nbd.sock"));
    let text = |path: &Path| path.to_str().expect("a plain path").to_owned();
    let doors = ["--fuse", &text(&dir), "--nbd", &text(&place)];
    let mut keeper = Keeper::start(&folder, 33, &doors);
    keeper.started();
    let Some(mut keeper) = keeper.with_fuse("stored bowline-disk") else { return };
    keeper.0.expect("ready");
    let mut next = map(&folder, 33, &[&doors[..], &["--replace"]].concat());
    keeper.0.expect(&format!("continues in {}", next.id()));
    next.expect("mapped disk0 ");
    let file = OpenOptions::new().read(true).write(true).open(dir.join("rnbd0")).expect("the disk");
    file.write_all_at(&content(1, 1), 0).expect("written");
    next.signal("-KILL");
    assert_eq!(next.finish().code, None, "it was killed");
    keeper.0.expect("ended None, has 3");
    keeper.started();
    assert!(read_file(&file, 0) == content(1, 1));
    keeper.0.expect("ready");
    let unmap = run(&folder, &["rnbd", "unmap", "rnbd0"]);
    assert_ne!(unmap.code, Some(0), "the file is open: {unmap:?}");
    drop(file);
    keeper.0.signal("-TERM");
    let done = keeper.0.finish().exits(0);
    assert_eq!(done.out.matches("stored bowline-fuse\n").count(), 1, "{done:?}");
    assert!(done.out.ends_with("ended 0, has 0\n"), "{done:?}");
    end(server);
}

#[test]
fn what_was_kept_of_another_disk_is_given_up() {
    // tests [NB-72]
    let folder = Folder::new();
    let (server, _) = export(&folder, 31, &[]);
    let (place, other) = (folder.path().join("nbd.sock"), folder.path().join("other.sock"));
    let file = folder.write("socket", place.to_str().expect("a plain path"));
    // The place of the socket is read by each process, as from a unit's settings.
    let script = format!(
        "exec \"$0\" rnbd map disk0 --from s1 --path 127.75.31.11@127.75.31.1 --nbd \"$(cat {})\"",
        file.display()
    );
    let words = ["sh", "-c", &script, env!("CARGO_BIN_EXE_bowline")];
    let mut keeper = Keeper::start_as(&folder, &words);
    let process = keeper.started();
    keeper.0.expect("stored bowline-disk").expect("ready");
    fs::write(&file, other.to_str().expect("a plain path")).expect("written");
    kill(process);
    keeper.started();
    keeper.0.expect("removed bowline-nbd").expect("stored bowline-nbd").expect("ready");
    keeper.0.until_logged("is of another disk");
    assert!(!place.exists());
    Nbd::connect(&other).expect("connected").read(0);
    keeper.0.signal("-TERM");
    let done = keeper.0.finish().exits(0);
    assert!(done.out.ends_with("has 0\n"), "{done:?}");
    end(server);
}

/// A mount that nobody can resume blocks everybody who looks at it, while the manager has it.
#[test]
fn what_cannot_be_resumed_is_mounted_again() {
    // tests [NB-72]
    let folder = Folder::new();
    let (server, _) = export(&folder, 34, &[]);
    let dir = folder.path().join("files");
    let mut keeper = Keeper::start(&folder, 34, &["--fuse", dir.to_str().expect("a plain path")]);
    let process = keeper.started();
    let Some(mut keeper) = keeper.with_fuse("stored bowline-fuse") else { return };
    keeper.0.expect("ready");
    keeper.0.signal("-USR1");
    keeper.0.expect("lost bowline-disk");
    kill(process);
    keeper.0.expect("ended -9, has 1");
    keeper.started();
    keeper.0.expect("removed bowline-fuse").expect("stored bowline-fuse").expect("ready");
    let file = OpenOptions::new().read(true).open(dir.join("rnbd0")).expect("the disk");
    read_file(&file, 0);
    drop(file);
    keeper.0.signal("-TERM");
    keeper.0.finish().exits(0);
    end(server);
}

/// Waits until the state that is kept of a disk says whether all that was answered is durable.
fn until_noted(process: u32, byte: u8) {
    let begun = Instant::now();
    while noted(process) != byte {
        assert!(begun.elapsed() < PATIENCE, "{byte} is never noted");
        thread::sleep(Duration::from_millis(5));
    }
}

fn noted(process: u32) -> u8 {
    let open = fs::read_dir(format!("/proc/{process}/fd")).expect("it runs").flatten();
    let is_state = |path: &PathBuf| {
        let target = fs::read_link(path).unwrap_or_default();
        target.to_string_lossy().starts_with("/memfd:bowline-disk")
    };
    let state = open.map(|entry| entry.path()).find(is_state).expect("a state");
    let mut byte = [0];
    // Behind the number of opens.
    File::open(state).and_then(|file| file.read_exact_at(&mut byte, 8)).expect("read");
    byte[0]
}

/// A server that is away when the process starts again: users wait, and the manager learns of it.
/// What may be lost by that is said, and no more.
#[test]
fn a_process_that_was_killed_waits_for_its_server_and_can_be_stopped() {
    // tests [NB-72]
    for (host, writes, flushes) in [(32, false, false), (35, true, true), (36, true, false)] {
        let folder = Folder::new();
        let (server, _) = export(&folder, host, &[]);
        let place = folder.path().join("nbd.sock");
        let doors = ["--nbd", place.to_str().expect("a plain path")];
        let mut keeper = Keeper::start(&folder, host, &doors);
        let process = keeper.started();
        keeper.0.expect("stored bowline-disk").expect("ready");
        until_noted(process, b' ');
        let mut nbd = Nbd::connect(&place).expect("connected");
        if writes {
            nbd.send(3, 3).expect("asked");
            assert_eq!(nbd.reply(), 3);
            assert_eq!(noted(process), b'\n', "before the answer");
        }
        if flushes {
            nbd.flush();
            until_noted(process, b' ');
        }
        end(server);
        kill(process);
        keeper.started();
        keeper.0.until_logged("resuming what an earlier process");
        assert!(place.exists());
        keeper.0.signal("-TERM");
        let begun = Instant::now();
        let done = keeper.0.finish().exits(1);
        assert!(begun.elapsed() < PATIENCE, "{done:?}");
        assert_eq!(done.err.contains("may not be durable"), writes && !flushes, "{done:?}");
        assert!(done.out.ends_with("ended 1, has 0\n"), "{done:?}");
        assert!(!place.exists());
    }
}

/// Starts a process that resumes an NBD server, and a block device of which there is a record only.
fn resumed(folder: &Folder, host: u8, place: &Path) -> Running {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/cli/resumed.py");
    let nbd = place.to_str().expect("a plain path");
    let path = format!("127.75.{host}.11@127.75.{host}.1");
    let state = serde_json::json!({ "device": null, "service": { "map": {
        "device": "disk0", "session": "s1", "servers": [format!("127.75.{host}.1")],
        "front_ends": { "nbd": place, "fuse": null, "ublk": true, "vhost-user": null },
    }}});
    let state = state.to_string();
    let words = ["-B", script, nbd, &state, env!("CARGO_BIN_EXE_bowline"), "rnbd", "map", "disk0"];
    let more = ["--from", "s1", "--path", &path, "--nbd", nbd, "--ublk"];
    start_as("python3".as_ref(), folder, &[&words[..], &more].concat())
}

/// A process that has everything of a former one, and cannot serve it, leaves nothing behind.
#[test]
fn a_block_device_that_is_not_resumed_ends_with_its_record() {
    // tests [NB-75]
    if fs::exists("/dev/ublk-control").expect("a folder") {
        return skipped::because("there is ublk, and its devices are not for this test");
    }
    let folder = Folder::new();
    let place = folder.path().join("nbd.sock");
    let records = folder.path().join("bowline/rnbd");
    fs::create_dir_all(&records).expect("a folder");
    let record = records.join("ublk-7.json");
    let left = || {
        let disk = serde_json::json!({
            "session": "s1", "device": "disk0", "servers": ["127.75.43.1"],
        });
        let contents = serde_json::json!({ "id": 7, "tag": 5, "disk": disk });
        fs::write(&record, contents.to_string()).expect("written");
    };
    // The server is away until it is stopped.
    left();
    let mut process = resumed(&folder, 43, &place);
    process.expect("resuming what an earlier process");
    assert!(record.exists());
    process.signal("-TERM");
    process.finish().exits(1);
    assert!(!record.exists() && !place.exists());

    // It is there: what can be resumed is served.
    let (server, _) = export(&folder, 43, &[]);
    left();
    let mut process = resumed(&folder, 43, &place);
    process.expect("mapped disk0 ");
    Nbd::connect(&place).expect("connected").read(0);
    process.signal("-TERM");
    let done = process.finish().exits(1);
    assert!(done.err.contains("rnbd0: not taken back: ublk: no block device"), "{done:?}");
    assert!(!record.exists() && !place.exists());
    end(server);
}
