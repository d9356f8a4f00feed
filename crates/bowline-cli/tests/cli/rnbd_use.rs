//! Commands for mapped disks that are in use by their front ends.

use std::{
    fs::{self, File},
    io::{Read, Write},
    os::unix::{
        fs::PermissionsExt,
        net::{UnixListener, UnixStream},
    },
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use serde_json::{Value, json};

use crate::support::{Folder, Running, control, run, start};
use bowline_testkit::skipped;

/// Exit status of `rnbd` for EBUSY.
const BUSY: i32 = 256 - 16;
/// The same for EINVAL.
const INVALID: i32 = 256 - 22;

fn export(folder: &Folder, host: u8, more: &[&str]) -> Running {
    let address = format!("127.58.{host}.1");
    let words = ["rnbd", "export", "--memory", "disk0=1MiB", "--memory", "disk1=1MiB"];
    let mut server = start(folder, &[&words[..], &["-I", &address], more].concat());
    server.expect(&format!("listening on {address}:"));
    server
}

fn path(host: u8) -> String {
    format!("127.58.{host}.11@127.58.{host}.1")
}

fn mapped(folder: &Folder, host: u8, more: &[&str]) -> Running {
    let path = path(host);
    let words = ["rnbd", "map", "disk0", "--from", "s1", "--path", &path];
    let mut client = start(folder, &[&words[..], more].concat());
    client.expect("mapped disk0 ");
    client
}

fn end(server: Running) {
    server.signal("-TERM");
    server.finish().exits(0);
}

/// Whether FUSE works here; the tests that need it end otherwise.
fn fuse_works(folder: &Folder, host: u8) -> bool {
    let dir = folder.path().join("probe");
    let address = format!("127.58.{host}.9");
    let words = ["rnbd", "export", "--memory", "a=1MiB", "-I", &address];
    let tree = dir.to_str().expect("a plain path");
    let mut server = start(folder, &[&words[..], &["--no-control", "--tree", tree]].concat());
    let works = server.hears("export a bytes=");
    if works {
        end(server);
    } else {
        let done = server.finish();
        assert!(done.err.contains("FUSE"), "{done:?}");
        skipped::without_fuse(done.err.trim());
    }
    works
}

#[test]
fn a_disk_whose_file_is_open_stays_until_it_is_closed() {
    // tests [NB-37]
    let folder = Folder::new();
    if !fuse_works(&folder, 1) {
        return;
    }
    let server = export(&folder, 1, &[]);
    let [dir, nbd] = ["files", "nbd"].map(|name| folder.path().join(name));
    let [dir_text, nbd_text] = [&dir, &nbd].map(|path| path.to_str().expect("a plain path"));
    let client = mapped(&folder, 1, &["--fuse", dir_text, "--nbd", nbd_text, "--stay"]);
    let unmap = |words: &[&str]| run(&folder, &[&["rnbd", "unmap", "rnbd0"], words].concat());
    let place = dir.join("rnbd0");
    let reads = |file: &mut File| file.read(&mut [0; 512]).is_ok_and(|count| count == 512);

    let mut file = File::open(&place).expect("the disk");
    unmap(&[]).exits(BUSY);
    // Nothing has changed, neither for the program that has the disk open nor for new ones, by
    // either front end.
    assert!(reads(&mut file) && reads(&mut File::open(&place).expect("the disk")));
    assert!(greets(&nbd));
    unmap(&[]).exits(BUSY);
    // The system reports a close a little later, which must not be a reason to refuse.
    drop(file);
    unmap(&[]).exits(0);
    assert!(!place.exists() && !nbd.exists());

    run(&folder, &["rnbd", "map", "disk0", "from", "s1", &path(1)]).exits(0);
    let mut file = File::open(&place).expect("the disk");
    assert!(reads(&mut file));
    unmap(&["force"]).exits(0);
    assert!(!place.exists() && !reads(&mut file));
    end(client);
    end(server);
}

/// Whether an NBD server answers there.
fn greets(socket: &Path) -> bool {
    connected(socket).is_some()
}

fn connected(socket: &Path) -> Option<UnixStream> {
    let mut client = UnixStream::connect(socket).ok()?;
    let mut greeting = [0; 18];
    client.read_exact(&mut greeting).is_ok().then_some(client)
}

#[test]
fn a_disk_of_a_machine_stays_until_the_machine_has_gone() {
    // tests [NB-37] [NB-66]
    let folder = Folder::new();
    let server = export(&folder, 30, &[]);
    let place = folder.path().join("machine");
    // The socket of a process that was killed.
    drop(UnixListener::bind(&place).expect("a socket"));
    let words = ["--vhost-user", place.to_str().expect("a plain path"), "--stay"];
    let mut client = mapped(&folder, 30, &words);
    let mode = fs::metadata(&place).expect("the socket").permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    // A question for features, and its answer of 8 bytes.
    let question = [1_u32, 1, 0].map(u32::to_ne_bytes).concat();
    let mut machine = UnixStream::connect(&place).expect("it listens");
    machine.write_all(&question).expect("asked");
    machine.read_exact(&mut [0; 20]).expect("answered");
    run(&folder, &["rnbd", "unmap", "rnbd0"]).exits(BUSY);
    machine.write_all(&[0xff; 12]).expect("nonsense");
    client.expect("rnbd0: disconnected from a machine: what came is no message of vhost-user");
    run(&folder, &["rnbd", "unmap", "rnbd0"]).exits(0);
    assert!(!place.exists());

    run(&folder, &["rnbd", "map", "disk0", "from", "s1", &path(30)]).exits(0);
    let mut machine = UnixStream::connect(&place).expect("it listens again");
    machine.write_all(&question).expect("asked");
    machine.read_exact(&mut [0; 20]).expect("answered");
    end(client);
    assert!(!place.exists());
    end(server);
}

#[test]
fn a_disk_with_a_connection_stays_until_that_ends() {
    // tests [NB-37]
    let folder = Folder::new();
    let server = export(&folder, 2, &[]);
    let nbd = folder.path().join("nbd");
    let client = mapped(&folder, 2, &["--nbd", nbd.to_str().expect("a plain path")]);
    let connection = connected(&nbd).expect("an NBD server");
    run(&folder, &["rnbd", "unmap", "rnbd0"])
        .exits(BUSY)
        .complains(&["close its users", "`unmap rnbd0 force`"]);
    assert!(greets(&nbd), "others are let in still");
    drop(connection);
    run(&folder, &["rnbd", "unmap", "rnbd0"]).exits(0);
    client.finish().exits(0);
    end(server);
}

#[test]
fn looking_at_disks_keeps_none() {
    // tests [NB-37]
    let folder = Folder::new();
    let server = export(&folder, 3, &["--no-control"]);
    let socket = folder.path().join("control");
    let client = mapped(&folder, 3, &["--stay", "--control", socket.to_str().expect("plain")]);
    let ended = std::sync::atomic::AtomicBool::new(false);
    let write = |path: &str, value: &str| {
        let line = json!({"version": 1, "op": "write", "path": path, "value": value});
        control(&socket, &line.to_string())
    };
    thread::scope(|threads| {
        for _ in 0..2 {
            threads.spawn(|| {
                while !ended.load(std::sync::atomic::Ordering::Relaxed) {
                    control(&socket, r#"{"op":"dump","path":"/"}"#);
                }
            });
        }
        let map = format!("sessname=s1 device_path=disk1 path=ip:{}", path(3).replace('@', "@ip:"));
        let answers: Vec<[Value; 2]> = (0..20)
            .map(|_| {
                let mapped = write("/class/rnbd-client/ctl/map_device", &map);
                [mapped, write("/block/rnbd1/rnbd/unmap_device", "normal")]
            })
            .collect();
        ended.store(true, std::sync::atomic::Ordering::Relaxed);
        let fine = json!({"ok": null});
        assert!(answers.iter().flatten().all(|answer| *answer == fine), "{answers:?}");
    });
    end(client);
    end(server);
}

#[test]
fn the_command_that_ends_the_process_is_answered() {
    let folder = Folder::new();
    let server = export(&folder, 4, &["--no-control"]);
    let client = mapped(&folder, 4, &["--path-dead", "0.5", "--connect-timeout", "1"]);
    // The server is silent, so giving up the session takes a while.
    server.signal("-STOP");
    let asked = Instant::now();
    let done = run(&folder, &["rnbd", "unmap", "rnbd0", "force"]);
    server.signal("-CONT");
    assert!(asked.elapsed() > Duration::from_millis(300), "it was not that quick");
    done.exits(0);
    client.finish().exits(0);
    end(server);
}

#[test]
fn the_first_signal_ends_what_waits_for_a_server_that_says_nothing() {
    // tests [NB-38]
    let folder = Folder::new();
    // Long enough that the path does not count as lost meanwhile.
    let patient = ["--path-dead", "300", "--no-control"];
    for (host, more) in [(15, &[][..]), (16, &["--timeout", "1"])] {
        let server = export(&folder, host, &["--no-control"]);
        let nbd = folder.path().join("nbd");
        let front_end = ["--nbd", nbd.to_str().expect("a plain path")];
        let client = mapped(&folder, host, &[&patient[..], &front_end, more].concat());
        server.signal("-STOP");
        let asked = Instant::now();
        client.signal("-TERM");
        client.finish().exits(0);
        assert!(asked.elapsed() < Duration::from_secs(30), "{more:?}: {:?}", asked.elapsed());
        server.signal("-KILL");
        server.finish();

        let server = export(&folder, host, &["--no-control"]);
        let path = path(host);
        let words = ["rnbd", "verify", "disk0", "--from", "s2", "--path", &path, "--time", "300"];
        let verify = start(&folder, &[&words[..], &patient[..2], more].concat());
        verify.until_it_heeds(15);
        // Requests are under way by then, on all but the slowest machines.
        thread::sleep(Duration::from_secs(1));
        server.signal("-STOP");
        thread::sleep(Duration::from_millis(100));
        let asked = Instant::now();
        verify.signal("-TERM");
        verify.finish().exits(1);
        assert!(asked.elapsed() < Duration::from_secs(30), "{more:?}: {:?}", asked.elapsed());
    }
}

fn is_mapped(folder: &Folder) -> bool {
    run(folder, &["rnbd", "list"]).exits(0).out.contains("rnbd1")
}

/// How long a front end's folder is waited for, less the start of a command.
const OPENING: Duration = Duration::from_millis(2500);

/// A client with `disk0` at a socket, and a command that maps `disk1` beside it, whose front end
/// cannot be opened until the folder is free, for three seconds at most.
struct Opening {
    client: Running,
    mapping: Running,
    nbd: PathBuf,
    folder: File,
    since: Instant,
}

fn opening(folder: &Folder, host: u8) -> Opening {
    let place = folder.path().join("doors");
    fs::create_dir(&place).expect("a folder");
    let nbd = place.join("nbd");
    let client = mapped(folder, host, &["--stay", "--nbd", nbd.to_str().expect("a plain path")]);
    let place = File::open(&place).expect("the folder");
    place.lock().expect("nobody has it");
    let since = Instant::now();
    let mapping = start(folder, &["rnbd", "map", "disk1", "from", "s1"]);
    while !is_mapped(folder) {
        assert!(since.elapsed() < Duration::from_secs(20), "it is not mapped");
        thread::sleep(Duration::from_millis(5));
    }
    Opening { client, mapping, nbd, folder: place, since }
}

#[test]
fn front_ends_that_are_being_opened_keep_only_their_own_disk() {
    // tests [NB-37]
    // One success in ten is enough: a machine may be too slow to unmap while the front ends are
    // being opened.
    assert!((0..10).any(|_| unmaps_beside_front_ends_that_are_being_opened()), "it waits for them");
}

/// Unmaps one disk while the front ends of another are being opened; returns whether the command
/// did not wait.
fn unmaps_beside_front_ends_that_are_being_opened() -> bool {
    let folder = Folder::new();
    let server = export(&folder, 8, &["--no-control"]);
    let Opening { client, mapping, nbd, folder: place, since } = opening(&folder, 8);
    run(&folder, &["rnbd", "unmap", "rnbd0"]).exits(0);
    assert!(!nbd.exists());
    let has_not_waited = since.elapsed() < OPENING;
    // An unmap of the disk itself waits until its front ends are open.
    let unmapping = start(&folder, &["rnbd", "unmap", "rnbd1"]);
    thread::sleep(Duration::from_millis(200));
    let was_there = is_mapped(&folder) && !nbd.with_extension("rnbd1").exists();
    // When a front end cannot be opened in time, its disk is unmapped.
    assert!(was_there || since.elapsed() > OPENING);
    drop(place);
    let mapped = mapping.finish().code == Some(0);
    let unmapped = unmapping.finish().code == Some(0);
    assert!((mapped && unmapped) || since.elapsed() > OPENING);
    assert!(!nbd.with_extension("rnbd1").exists());
    end(client);
    end(server);
    has_not_waited
}

#[test]
fn front_ends_that_are_being_opened_at_the_end_are_closed_too() {
    let folder = Folder::new();
    let server = export(&folder, 9, &["--no-control"]);
    let Opening { client, mapping, nbd, folder: place, .. } = opening(&folder, 9);
    client.signal("-TERM");
    thread::sleep(Duration::from_millis(300));
    drop(place);
    client.finish().exits(0);
    // Too late, or just before the end.
    assert!(mapping.finish().code.is_some());
    assert!(!nbd.exists() && !nbd.with_extension("rnbd1").exists());
    end(server);
}

#[test]
fn the_place_of_a_disk_is_never_that_of_another() {
    let folder = Folder::new();
    let server = export(&folder, 10, &["--no-control"]);
    let words = ["--memory", "disk0=2MiB", "-I", "127.58.11.1", "--no-control"];
    let mut other = start(&folder, &[&["rnbd", "export"][..], &words].concat());
    other.expect("listening on ");
    let nbd = folder.path().join("nbd");
    let place = nbd.to_str().expect("a plain path");
    let more = ["--stay", "--nbd", place, "-I", "127.58.11.11"];
    let mut client = mapped(&folder, 10, &more);
    let words = |words: &str| {
        run(&folder, &[&["rnbd"], &words.split(' ').collect::<Vec<_>>()[..]].concat()).exits(0);
    };
    words("unmap rnbd0");
    client.expect("rnbd0 unmapped");
    assert!(!nbd.exists());
    // A client that reconnects to the socket expects the disk that was there.
    words(&format!("map disk1 from s1 {}", path(10)));
    let mut told = |disk: &str| {
        client.expect(&format!("mapped {disk} ")).said().lines().last().map(str::to_owned)
    };
    let at = |disk: &str, bytes: u32, places: &str| {
        Some(format!("mapped {disk} bytes={bytes} at {places}"))
    };
    assert_eq!(told("disk1"), at("disk1", 1 << 20, &format!("rnbd0, nbd {place}.rnbd0")));
    assert!(!nbd.exists() && nbd.with_extension("rnbd0").exists());
    words(&format!("map disk0 from s2 {}", path(11)));
    assert_eq!(told("disk0"), at("disk0", 2 << 20, &format!("rnbd1, nbd {place}.rnbd1")));
    assert!(!nbd.exists());
    words("map disk0 from s1");
    assert_eq!(told("disk0"), at("disk0", 1 << 20, &format!("rnbd2, nbd {place}")));
    assert_eq!(size(&nbd), 1 << 20);
    // Two disks have this name on their servers: the error says which they are.
    let refused = run(&folder, &["rnbd", "unmap", "disk0"]).exits(2);
    refused.complains(&[
        "disk0 is the name of several devices",
        "rnbd1 of session s2",
        "rnbd2 of session s1",
    ]);
    words("unmap rnbd1");
    client.expect("rnbd1 unmapped");
    end(client);
    end(server);
    end(other);
}

#[test]
fn the_folder_of_a_disk_is_never_that_of_another() {
    let folder = Folder::new();
    if !fuse_works(&folder, 12) {
        return;
    }
    let server = export(&folder, 12, &["--no-control"]);
    let dir = folder.path().join("files");
    let client = mapped(&folder, 12, &["--stay", "--fuse", dir.to_str().expect("a plain path")]);
    // Nor does another process mount over it.
    for front_end in ["--fuse", "--tree"] {
        let words = ["rnbd", "map", "disk1", "--from", "s2", "--path", "127.58.12.12@127.58.12.1"];
        let place = dir.to_str().expect("a plain path");
        let done = run(&folder, &[&words[..], &[front_end, place]].concat()).exits(1);
        assert!(!done.err.contains("FUSE"), "FUSE is not what is wrong: {done:?}");
        done.complains(&[place, "has mounted it"]);
    }
    assert!(dir.join("rnbd0").exists());
    run(&folder, &["rnbd", "unmap", "rnbd0"]).exits(0);
    run(&folder, &["rnbd", "map", "disk1", "from", "s1", &path(12)]).exits(0);
    assert!(!dir.join("rnbd0").exists() && dir.with_extension("rnbd0").join("rnbd0").exists());
    run(&folder, &["rnbd", "map", "disk0", "from", "s1"]).exits(0);
    assert!(dir.join("rnbd1").exists());
    end(client);
    end(server);
}

#[test]
fn changes_of_all_disks_are_told() {
    let folder = Folder::new();
    if !fuse_works(&folder, 5) {
        return;
    }
    let server = export(&folder, 5, &["--no-control"]);
    let [dir, nbd] = ["files", "nbd"].map(|name| folder.path().join(name));
    let [dir_text, nbd_text] = [&dir, &nbd].map(|path| path.to_str().expect("a plain path"));
    let mut client = mapped(&folder, 5, &["--fuse", dir_text, "--nbd", nbd_text]);
    run(&folder, &["rnbd", "map", "disk1", "from", "s1"]).exits(0);
    let later = [dir.with_extension("rnbd1").join("rnbd1"), nbd.with_extension("rnbd1")];
    let open = File::open(&later[0]).expect("the disk");
    assert_eq!(size(&later[1]), 1 << 20);
    run(&folder, &["rnbd", "resize", "rnbd1", "512K", "force"]).exits(0);
    client.expect("rnbd1 bytes=524288");
    // The file follows, and so do NBD's connections from now on.
    assert_eq!(open.metadata().expect("there").len(), 512 << 10);
    assert_eq!(fs::metadata(&later[0]).expect("there").len(), 512 << 10);
    assert_eq!(size(&later[1]), 512 << 10);
    run(&folder, &["rnbd", "resize", "rnbd0", "256K"]).exits(0);
    client.expect("rnbd0 bytes=262144");
    assert!(!client.said().contains("rnbd1 bytes=262144"));
    drop(open);
    end(client);
    end(server);
}

#[test]
fn a_disk_does_not_grow_beyond_its_export() {
    // tests [NB-74] [NB-37]
    let folder = Folder::new();
    let image = folder.write("disk0.img", "");
    let set_len = |bytes| {
        let file = File::options().write(true).open(&image).expect("the file");
        file.set_len(bytes).expect("its size");
    };
    set_len(1 << 20);
    let file = format!("disk0={}", image.display());
    let mut server = start(&folder, &["rnbd", "export", "--file", &file, "-I", "127.58.40.1"]);
    server.expect("listening on");
    let socket = folder.path().join("nbd");
    let mut client = mapped(&folder, 40, &["--nbd", socket.to_str().expect("plain")]);
    let resize = |to: &str| run(&folder, &["rnbd", "resize", "rnbd0", to]);
    let refused = resize("2M").exits(INVALID);
    refused.complains(&[
        "the last of 4096 sectors",
        "ends before",
        "(the disk has 2048)",
        "SIGHUP",
    ]);
    let control = "block/rnbd0/rnbd/resize";
    run(&folder, &["rnbd", "set", control, "2049"]).exits(INVALID).complains(&["of 2049 sectors"]);
    assert_eq!(size(&socket), 1 << 20);
    // What was asked for is no failure of the storage.
    let listed = run(&folder, &["rnbd", "client", "list", "errors", "csv", "noheaders"]);
    assert_eq!(listed.exits(0).out, "0\n");
    set_len(2 << 20);
    resize("2M").exits(INVALID);
    server.signal("-HUP");
    server.expect("export disk0 bytes=2097152");
    resize("3M").exits(INVALID);
    resize("2M").exits(0);
    client.expect("rnbd0 bytes=2097152");
    assert_eq!(size(&socket), 2 << 20);
    end(client);
    end(server);
}

#[test]
fn a_disk_that_is_in_use_does_not_become_smaller_unless_forced() {
    // tests [NB-74]
    let folder = Folder::new();
    if !fuse_works(&folder, 41) {
        return;
    }
    let server = export(&folder, 41, &["--no-control"]);
    let [dir, nbd, machines] = ["files", "nbd", "machines"].map(|name| folder.path().join(name));
    let [dir_text, nbd_text, machines_text] =
        [&dir, &nbd, &machines].map(|path| path.to_str().expect("a plain path"));
    let options = ["--fuse", dir_text, "--nbd", nbd_text, "--vhost-user", machines_text];
    let mut client = mapped(&folder, 41, &options);
    let resize = |words: &[&str]| run(&folder, &[&["rnbd", "resize", "rnbd0"], words].concat());
    let own = format!("(pid {})", std::process::id());
    let busy = |place: String| {
        let done = resize(&["512K"]).exits(BUSY);
        let advice = "or `resize rnbd0 512K force`";
        done.complains(&["in use: ", &own, &place, advice]);
        let done = run(&folder, &["rnbd", "set", "block/rnbd0/rnbd/resize", "1024"]).exits(BUSY);
        done.complains(&[&own, &place]);
    };

    let connection = connected(&nbd).expect("an NBD server");
    busy(format!("at nbd {nbd_text}"));
    assert!(greets(&nbd), "nothing has changed for others");
    // It may become as large as it is, or larger if its export is.
    resize(&["1M"]).exits(0);
    drop(connection);
    let machine = UnixStream::connect(&machines).expect("a socket for machines");
    busy(format!("at vhost-user {machines_text}"));
    drop(machine);
    let file = File::open(dir.join("rnbd0")).expect("the file");
    busy(format!("at file {dir_text}/rnbd0"));
    assert_eq!(file.metadata().expect("there").len(), 1 << 20);
    run(&folder, &["rnbd", "set", "block/rnbd0/rnbd/resize", "1536 force"]).exits(0);
    client.expect("rnbd0 bytes=786432");
    drop(file);
    resize(&["512K"]).exits(0);
    client.expect("rnbd0 bytes=524288");
    assert!(greets(&nbd));
    File::open(dir.join("rnbd0")).expect("open again for all");
    end(client);
    end(server);
}

/// Reads the size that an NBD server reports.
fn size(socket: &Path) -> u64 {
    use std::io::Write;
    let mut client = connected(socket).expect("an NBD server");
    // Negotiation without zero padding, then the option EXPORT_NAME with the empty name.
    client.write_all(&3_u32.to_be_bytes()).expect("flags");
    client.write_all(b"IHAVEOPT\0\0\0\x01\0\0\0\0").expect("an option");
    let mut answer = [0; 8];
    client.read_exact(&mut answer).expect("an answer");
    u64::from_be_bytes(answer)
}

#[test]
fn refusals_have_their_reasons() {
    // tests [NB-35]
    let folder = Folder::new();
    let image = folder.path().join("image");
    fs::write(&image, vec![0; 1 << 20]).expect("a file");
    let image = format!("image={}", image.display());
    let address = "127.58.6.1";
    let words = ["rnbd", "export", "--file", &image, "--ro", "-I", address, "--no-control"];
    let mut read_only = start(&folder, &words);
    read_only.expect("listening on ");
    let there = format!("127.58.6.12@{address}");
    let map = |disk: &str| run(&folder, &["rnbd", "map", disk, "--from", "s2", "--path", &there]);
    map("image").exits(256 - 13).complains(&[
        "does not open image for rw",
        "read-only there",
        "--access ro",
    ]);
    end(read_only);
    let server = export(&folder, 6, &["--no-control"]);
    let client = mapped(&folder, 6, &[]);
    map("disk0")
        .exits(256 - 1)
        .complains(&["does not open disk0 for rw", "another session has it open for writing"]);
    run(&folder, &["rnbd", "remap", "rnbd0", "force"])
        .exits(256 - 114)
        .complains(&["it is open", "`remap s1 force`"]);
    end(client);
    end(server);
}

#[test]
fn poll_queues_are_for_a_session_of_one_disk() {
    // tests [NB-35] [NB-37]
    let folder = Folder::new();
    let server = export(&folder, 7, &["--no-control"]);
    let socket = folder.path().join("control");
    let options = ["--stay", "--control", socket.to_str().expect("plain"), "-I", "127.58.7.12"];
    let client = mapped(&folder, 7, &options);
    let map = |words: &str| {
        let path = "/class/rnbd-client/ctl/map_device";
        let value = format!("device_path=disk1 nr_poll_queues=1 {words}");
        let line = json!({"version": 1, "op": "write", "path": path, "value": value});
        control(&socket, &line.to_string())["errno"].clone()
    };
    assert_eq!(map("sessname=s1"), 22, "it is there, without poll queues");
    assert_eq!(map("sessname=s2 path=ip:127.58.7.12@ip:127.58.7.1"), Value::Null);
    let line = r#"{"op":"read","path":"/block/rnbd1/rnbd/nr_poll_queues"}"#;
    assert_eq!(control(&socket, line), json!({"ok": 1}));
    run(&folder, &["rnbd", "--control", socket.to_str().expect("plain"), "unmap", "rnbd1"])
        .exits(0);
    end(client);
    end(server);
}

/// A client with these front ends whose server is gone for good, and whose requests may wait for it
/// for ten minutes; and its control socket.
fn stranded(folder: &Folder, host: u8, front_ends: &[&str]) -> (Running, PathBuf) {
    let server = export(folder, host, &["--no-control"]);
    let socket = folder.path().join("control");
    let more =
        ["--control", socket.to_str().expect("plain"), "--outage", "600", "--path-dead", "0.5"];
    let mut client =
        mapped(folder, host, &[&more[..], &["--connect-timeout", "1"], front_ends].concat());
    // The server ends without a disconnect.
    drop(server);
    client.expect("rnbd0 offline");
    (client, socket)
}

/// Waits until a request of the disk waits.
fn until_one_waits(socket: &Path) {
    let read = json!({"version": 1, "op": "read", "path": "/block/rnbd0/stat"}).to_string();
    for _ in 0..1000 {
        let answer = control(socket, &read);
        let stat = answer["ok"].as_str().unwrap_or_default();
        if stat.split_whitespace().nth(8) == Some("1") {
            return;
        }
        thread::sleep(Duration::from_millis(10));
    }
    panic!("no request waits: {}", control(socket, &read));
}

/// Ends the use of a disk whose server is gone: unmaps it by force, or ends the process.
fn give_up(folder: &Folder, socket: &Path, client: Running, by_force: bool) {
    if by_force {
        let words =
            ["rnbd", "unmap", "rnbd0", "force", "--control", socket.to_str().expect("plain")];
        run(folder, &words).exits(0);
    } else {
        client.signal("-TERM");
    }
    // At the end of the process it counts that a request has failed.
    let log = client.finish().exits(i32::from(!by_force)).err;
    // With the time, as a server's lines have it.
    let (time, line) = log.split_once(' ').expect("a time");
    assert!(time.len() == "2026-11-30T17:00:00Z".len() && time.ends_with('Z'), "{log}");
    assert!(line.starts_with("session s1: path 127."), "{log}");
    assert!(line.contains(" lost, 0 of 1 connected\n"), "{log}");
}

#[test]
fn requests_to_a_server_that_is_gone_fail_before_the_front_ends_close() {
    // tests [NB-37] [NB-54]
    use std::io::Write;
    for (host, by_force) in [(21, true), (22, false)] {
        let folder = Folder::new();
        let nbd = folder.path().join("nbd");
        let front_ends = ["--nbd", nbd.to_str().expect("plain")];
        let (client, socket) = stranded(&folder, host, &front_ends);
        let mut user = connected(&nbd).expect("an NBD server");
        // Negotiation without zero padding, then the option EXPORT_NAME with the empty name.
        user.write_all(&3_u32.to_be_bytes()).expect("flags");
        user.write_all(b"IHAVEOPT\0\0\0\x01\0\0\0\0").expect("an option");
        user.read_exact(&mut [0; 10]).expect("size and flags");
        // A read of the first block.
        user.write_all(b"\x25\x60\x95\x13\0\0\0\0cookies!\0\0\0\0\0\0\0\0\0\0\x02\0")
            .expect("a request");
        until_one_waits(&socket);
        give_up(&folder, &socket, client, by_force);
        let mut answer = Vec::new();
        user.read_to_end(&mut answer).expect("the end of the connection");
        assert_eq!(answer, b"\x67\x44\x66\x98\0\0\0\x05cookies!", "EIO, and then the end");
    }
}

#[test]
fn a_verified_load_that_is_to_end_waits_for_no_lost_server() {
    // tests [NB-54]
    let folder = Folder::new();
    let server = export(&folder, 25, &[]);
    let path = path(25);
    let words = ["rnbd", "verify", "disk0", "--from", "s1", "--path", &path, "-T", "60"];
    let more =
        ["--span", "64KiB", "--outage", "600", "--path-dead", "0.5", "--connect-timeout", "1"];
    let load = start(&folder, &[&words[..], &more].concat());
    let begun = Instant::now();
    while !run(&folder, &["rnbd", "exports"]).exits(0).out.contains("open by s1") {
        assert!(begun.elapsed() < Duration::from_secs(20), "the disk is not opened");
        thread::sleep(Duration::from_millis(20));
    }
    thread::sleep(Duration::from_millis(500));
    drop(server);
    thread::sleep(Duration::from_secs(2));
    load.signal("-TERM");
    load.finish().exits(1);
}

#[test]
fn who_reads_the_file_of_a_disk_whose_server_is_gone_keeps_nobody() {
    // tests [NB-37] [NB-54]
    let folder = Folder::new();
    if !fuse_works(&folder, 23) {
        return;
    }
    for (host, by_force) in [(23, true), (24, false)] {
        let folder = Folder::new();
        let dir = folder.path().join("files");
        let (client, socket) = stranded(&folder, host, &["--fuse", dir.to_str().expect("plain")]);
        let mut file = File::open(dir.join("rnbd0")).expect("the disk");
        let reader = thread::spawn(move || file.read(&mut [0; 512]));
        until_one_waits(&socket);
        give_up(&folder, &socket, client, by_force);
        let read = reader.join().expect("it only reads");
        assert_eq!(read.expect_err("nobody answers").raw_os_error(), Some(5), "EIO");
    }
}
