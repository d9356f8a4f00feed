//! A mapped disk through its front ends, NBD, a file and vhost-user, used by common programs while
//! paths are cut. Programs that are not installed are reported as skipped.
//!
//! `BOWLINE_CHURN_SECONDS` sets for how many seconds a path is killed every two seconds; the
//! default is eight.

mod common;
#[path = "../../bowline-block/tests/common/guest.rs"]
mod guest;
use bowline_testkit::skipped;

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::{Duration, Instant};

use bowline_block::front::fuse::{self, FuseOptions};
use bowline_block::front::nbd::{self, NbdOptions, NbdServer};
use bowline_block::front::vhost_user::{self, VhostUserOptions};
use bowline_block::{BlockDevice, sync};
use bowline_rnbd::client::Outage;
use bowline_rnbd_driver::{Disk, Exports, FileOptions};
use common::{Rig, SOON, SOON_ENOUGH, Stop};
use guest::{DATA, FLUSH, Guest, IN, Memory, OUT};

const BYTES: u64 = 64 << 20;
/// Longest time of a request while a path is lost, on the slowest machine; usual are 0.7 s.
const PAUSE: Duration = Duration::from_secs(10);

/// An exported temporary file, removed at the end.
struct Store(PathBuf);

impl Store {
    fn new(name: &str) -> (Self, Exports) {
        let path = std::env::temp_dir().join(format!("bowline-{name}-{}", std::process::id()));
        let file = std::fs::File::create_new(&path).expect("a file");
        file.set_len(BYTES).expect("its size");
        let mut exports = Exports::new();
        exports.file("disk0", &path, FileOptions::default()).expect("exported");
        (Self(path), exports)
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn serve(disk: &Arc<Disk>, name: &str) -> (NbdServer, String) {
    let path = std::env::temp_dir().join(format!("bowline-{name}-{}.sock", std::process::id()));
    let server = nbd::serve(Arc::clone(disk) as _, &path, NbdOptions::default()).expect("served");
    (server, format!("nbd+unix:///?socket={}", path.display()))
}

/// Runs a program for at most a minute; `None` when it is not installed.
fn run(program: &str, args: &[&str]) -> Option<String> {
    let out = Command::new("timeout").arg("60").arg(program).args(args).output().ok()?;
    if out.status.code() == Some(127) {
        skipped::without(program);
        return None;
    }
    let text = String::from_utf8_lossy(&[out.stdout, out.stderr].concat()).into_owned();
    assert!(out.status.success(), "{program} {args:?}: {text}");
    Some(text)
}

/// Cuts the paths of a session in turn while `work` runs; returns the number of cuts.
fn while_paths_are_cut(rig: &Rig, session: &str, work: impl FnOnce()) -> usize {
    let stop = AtomicBool::new(false);
    std::thread::scope(|threads| {
        let cutting = threads.spawn(|| {
            let mut cuts = 0;
            while !stop.load(SeqCst) {
                rig.cut_for(session, &[(cuts % 2) as u8], Duration::from_millis(900));
                std::thread::sleep(Duration::from_millis(900));
                // The next path is cut after this one is back.
                rig.until("it is back", || rig.is_connected(session));
                cuts += 1;
            }
            cuts
        });
        let end = Stop(&stop);
        work();
        drop(end);
        cutting.join().expect("every loss was noticed, and every path came back")
    })
}

#[test]
fn an_image_goes_there_and_back_over_nbd() {
    let (_store, exports) = Store::new("doors-copy");
    let rig = Rig::with_paths(31, exports, 2);
    let disk = rig.map("disk0", &rig.options("copy")).expect("mapped");
    let (server, uri) = serve(&disk, "doors-copy");
    let file = |name: &str| {
        std::env::temp_dir().join(format!("bowline-doors-{name}-{}", std::process::id()))
    };
    let (from, back) = (file("from"), file("back"));
    std::fs::write(&from, common::pattern(BYTES as usize, 7)).expect("an image");
    let [text_from, text_back] = [&from, &back].map(|path| path.display().to_string());
    if run("nbdcopy", &["--flush", &text_from, &uri]).is_some() {
        run("nbdcopy", &["--connections=4", &uri, &text_back]);
        assert!(
            std::fs::read(&from).expect("image") == std::fs::read(&back).expect("copy"),
            "the image came back"
        );
        // RNBD does not say which ranges the server has allocated.
        let map = run("nbdinfo", &["--map", &uri]).expect("it comes with nbdcopy");
        let extent: Vec<_> = map.split_whitespace().take(3).collect();
        assert_eq!(extent, ["0", &BYTES.to_string(), "0"], "{map}");
        run("qemu-img", &["compare", "-f", "raw", "-F", "raw", &text_from, &uri]);
    }
    run(
        "qemu-io",
        &[
            "-f",
            "raw",
            &uri,
            "-c",
            "write -f -P 0x11 1M 64k",
            "-c",
            "write -z 4k 8k",
            "-c",
            "read -P 0 4k 8k",
            "-c",
            "discard 1M 64k",
            "-c",
            "read -P 0 1M 64k",
            "-c",
            "flush",
        ],
    );
    for path in [from, back] {
        let _ = std::fs::remove_file(path);
    }
    drop(server);
    rig.client.unmap(&disk).expect("nothing uses it any more");
}

#[test]
fn fio_verifies_over_nbd_while_paths_are_cut() {
    let (_store, exports) = Store::new("doors-fio");
    let rig = Rig::hasty(32, exports, 2, SOON_ENOUGH);
    let disk = rig.map("disk0", &rig.options("fio")).expect("mapped");
    let (server, uri) = serve(&disk, "doors-fio");
    let uri = format!("--uri={uri}");
    let Some(engines) = run("fio", &["--enghelp"]) else { return };
    if !engines.contains("nbd") {
        return skipped::because("fio without its nbd engine");
    }
    let cuts = while_paths_are_cut(&rig, "fio", || {
        for _ in 0..2 {
            let text = run(
                "fio",
                &[
                    "--name=verify",
                    "--ioengine=nbd",
                    &uri,
                    "--rw=randrw",
                    "--bssplit=512/20:4k/50:64k/20:256k/10",
                    "--size=48m",
                    "--iodepth=32",
                    "--rate=12m",
                    "--verify=crc32c",
                    "--verify_state_save=0",
                    "--fsync=16",
                ],
            );
            assert!(text.is_some_and(|text| text.contains("err= 0")));
        }
    });
    assert!(cuts >= 2, "both paths were cut: {cuts}");
    drop(server);
    assert_eq!(rig.server.in_flight(), 0);
}

#[test]
fn a_file_system_is_made_on_the_file() {
    let (_store, exports) = Store::new("doors-mkfs");
    let rig = Rig::hasty(33, exports, 2, SOON_ENOUGH);
    let disk = rig.map("disk0", &rig.options("mkfs")).expect("mapped");
    let dir = std::env::temp_dir().join(format!("bowline-doors-{}", std::process::id()));
    std::fs::create_dir(&dir).expect("a directory");
    let mount = match fuse::mount(Arc::clone(&disk) as _, &dir, "disk.img", FuseOptions::default())
    {
        Ok(mount) => mount,
        Err(error) => {
            skipped::without_fuse(error);
            std::fs::remove_dir(&dir).expect("removed");
            return;
        }
    };
    let file = dir.join("disk.img").display().to_string();
    let source = env!("CARGO_MANIFEST_DIR");
    let cuts = while_paths_are_cut(&rig, "mkfs", || {
        if run("mkfs.ext4", &["-q", "-F", "-d", source, &file]).is_some() {
            run("fsck.ext4", &["-f", "-n", &file]);
            run("debugfs", &["-R", "cat /Cargo.toml", &file]);
        }
    });
    assert!(cuts >= 1);
    drop(mount);
    std::fs::remove_dir(&dir).expect("nothing is mounted there any more");
    // Data written through the file is seen by other users of the disk: ext4's magic number.
    let mut block = [0; 4096];
    sync::read_at(&*disk, 0, &mut block).expect("read");
    if run("mkfs.ext4", &["-V"]).is_some() {
        assert_eq!(block[1024 + 56..][..2], [0x53, 0xef]);
    }
    assert_eq!(disk.limits().bytes, BYTES);
}

/// For how long paths are killed.
fn churn() -> Duration {
    let seconds = std::env::var("BOWLINE_CHURN_SECONDS").ok();
    Duration::from_secs(seconds.map_or(8, |text| text.parse().expect("a number of seconds")))
}

/// The results of a fio run: numbers of 4 KiB requests, and the longest latency.
#[derive(Debug)]
struct Load {
    writes: u64,
    verified: u64,
    longest: Duration,
}

/// Runs fio, which writes and verifies all the time that paths are killed; `None` when it is not
/// installed.
fn verify(args: &[&str], time: Duration) -> Option<Load> {
    let runtime = format!("--runtime={}", time.as_secs());
    let limit = (time.as_secs() + 60).to_string();
    let mut command = Command::new("timeout");
    command.args([&limit, "fio", "--name=churn", "--bs=4k", "--rw=randwrite", "--verify=crc32c"]);
    command.args(["--verify_backlog=256", "--verify_fatal=1", "--verify_state_save=0"]);
    command.args(["--time_based", &runtime, "--minimal", "--group_reporting"]).args(args);
    let out = command.output().expect("timeout is installed");
    if out.status.code() == Some(127) {
        skipped::without("fio");
        return None;
    }
    let text = String::from_utf8_lossy(&[out.stdout, out.stderr].concat()).into_owned();
    assert!(out.status.success(), "fio {args:?}: {text}");
    let line = text.lines().find(|line| line.starts_with("3;")).expect("a line of figures");
    let fields: Vec<&str> = line.split(';').collect();
    let number = |field: usize| fields[field - 1].parse::<f64>().expect("a number");
    assert_eq!(fields[4], "0", "{text}");
    // Fields of version 3 of the format: KiB, and the longest time in microseconds.
    Some(Load {
        verified: number(6) as u64 / 4,
        writes: number(47) as u64 / 4,
        longest: Duration::from_micros(number(15).max(number(56)) as u64),
    })
}

/// Kills the paths in turn, one every two seconds, while `work` runs; each is back after 0.9
/// seconds. Returns the number of kills.
fn while_paths_are_killed(rig: &Rig, work: impl FnOnce()) -> usize {
    let stop = AtomicBool::new(false);
    let start = Instant::now();
    std::thread::scope(|threads| {
        let killing = threads.spawn(|| {
            let mut kills: usize = 0;
            while !stop.load(SeqCst) {
                let next = start + Duration::from_secs(2) * (kills as u32 + 1);
                let path = (kills % 2) as u8;
                rig.cut(path, true);
                std::thread::sleep(Duration::from_millis(900));
                rig.cut(path, false);
                kills += 1;
                std::thread::sleep(next.saturating_duration_since(Instant::now()));
            }
            kills
        });
        let end = Stop(&stop);
        work();
        drop(end);
        killing.join().expect("it only sleeps")
    })
}

fn patient(rig: &Rig, session: &str) -> bowline_rnbd_driver::MapOptions {
    // The outage handling that `bowline rnbd map` uses for its front ends.
    rig.options(session).outage(Outage::Queue(Duration::from_secs(30)))
}

#[test]
fn nothing_fails_over_nbd_while_a_path_is_killed_every_two_seconds() {
    let (_store, exports) = Store::new("churn-nbd");
    let rig = Rig::hasty(34, exports, 2, SOON);
    let disk = rig.map("disk0", &patient(&rig, "churn")).expect("mapped");
    let (server, uri) = serve(&disk, "churn-nbd");
    let Some(engines) = run("fio", &["--enghelp"]) else { return };
    if !engines.contains("nbd") {
        return skipped::because("fio without its nbd engine");
    }
    let uri = format!("--uri={uri}");
    let mut load = None;
    let kills = while_paths_are_killed(&rig, || {
        let args = ["--ioengine=nbd", &uri, "--size=48m", "--iodepth=16"];
        load = verify(&args, churn());
    });
    let load = load.expect("fio is installed");
    println!("NBD: {kills} kills in {:?}, no error: {load:?}", churn());
    assert!(kills as u64 >= churn().as_secs() / 2, "{kills}");
    assert!(load.verified > 100 && load.writes > 100 && load.longest < PAUSE, "{load:?}");
    drop(server);
    assert_eq!(rig.server.in_flight(), 0);
}

/// An NBD request that writes a block of 4 KiB, or reads it.
fn request(command: u8, block: u64) -> Vec<u8> {
    let mut message = 0x2560_9513_u32.to_be_bytes().to_vec();
    message.extend([0, 0, 0, command]);
    message.extend(block.to_be_bytes());
    message.extend((block * 4096).to_be_bytes());
    message.extend(4096_u32.to_be_bytes());
    if command == 1 {
        message.extend([7; 4096]);
    }
    message
}

#[test]
fn clients_that_hung_up_in_an_outage_keep_no_other_out() {
    // tests [NB-53]
    let rig = Rig::hasty(39, common::memory(BYTES), 1, SOON);
    let disk = rig.map("disk0", &patient(&rig, "left")).expect("mapped");
    let path = std::env::temp_dir().join(format!("bowline-left-{}.sock", std::process::id()));
    let mut options = NbdOptions::default();
    options.max_connections = 2;
    let server = nbd::serve(Arc::clone(&disk) as _, &path, options).expect("served");
    let get = |client: &mut UnixStream, len: usize| {
        let mut out = vec![0; len];
        client.read_exact(&mut out).map(|()| out)
    };
    let connect = || {
        let mut client = UnixStream::connect(&path).expect("connected");
        client.set_read_timeout(Some(Duration::from_secs(20))).expect("set");
        get(&mut client, 18).expect("a place");
        client.write_all(b"\0\0\0\x03IHAVEOPT\0\0\0\x01\0\0\0\0").expect("sent");
        get(&mut client, 10).expect("the export");
        client
    };
    rig.cut(0, true);
    rig.until("it is away", || common::state(&disk) == "closed");
    let (read, write, disconnect) = (0, 1, 2);
    // More clients than may have hung up while the disk has requests of them.
    for block in 0..20 {
        let mut requests = [request(write, block), request(read, block)].concat();
        if block % 2 == 0 {
            requests.extend(request(disconnect, 0));
        }
        connect().write_all(&requests).expect("sent");
    }
    let mut present = connect();
    present.write_all(&request(read, 19)).expect("sent");
    rig.cut(0, false);
    assert_eq!(get(&mut present, 16).expect("a reply")[4..8], [0; 4]);
    assert_eq!(
        get(&mut present, 4096).expect("the data"),
        [0; 4096],
        "a client hung up without NBD_CMD_DISC"
    );
    present.write_all(&request(read, 18)).expect("sent");
    assert_eq!(get(&mut present, 16).expect("a reply")[4..8], [0; 4]);
    assert_eq!(get(&mut present, 4096).expect("the data"), [7; 4096], "a client sent NBD_CMD_DISC");
    drop(present);
    rig.until("all have left", || server.connections() == 0);
}

#[test]
fn nothing_fails_in_the_file_while_a_path_is_killed_every_two_seconds() {
    let (_store, exports) = Store::new("churn-fuse");
    let rig = Rig::hasty(35, exports, 2, SOON);
    let disk = rig.map("disk0", &patient(&rig, "churn")).expect("mapped");
    let dir = std::env::temp_dir().join(format!("bowline-churn-{}", std::process::id()));
    std::fs::create_dir(&dir).expect("a directory");
    let mount = match fuse::mount(Arc::clone(&disk) as _, &dir, "disk.img", FuseOptions::default())
    {
        Ok(mount) => mount,
        Err(error) => {
            skipped::without_fuse(error);
            std::fs::remove_dir(&dir).expect("removed");
            return;
        }
    };
    let file = format!("--filename={}", dir.join("disk.img").display());
    let mut load = None;
    let kills = while_paths_are_killed(&rig, || {
        let args = [
            "--ioengine=psync",
            &file,
            "--size=12m",
            "--numjobs=4",
            "--offset_increment=12m",
            "--thread",
        ];
        load = verify(&args, churn());
    });
    if let Some(load) = load {
        println!("file: {kills} kills in {:?}, no error: {load:?}", churn());
        assert!(kills as u64 >= churn().as_secs() / 2, "{kills}");
        assert!(load.verified > 100 && load.writes > 100 && load.longest < PAUSE, "{load:?}");
    }
    drop(mount);
    std::fs::remove_dir(&dir).expect("nothing is mounted there any more");
    assert_eq!(rig.server.in_flight(), 0);
}

#[test]
fn a_machine_reads_what_it_has_written_while_paths_are_cut() {
    // tests [NB-66]
    let (_store, exports) = Store::new("doors-machine");
    let rig = Rig::hasty(190, exports, 2, SOON);
    let disk = rig.map("disk0", &rig.options("machine")).expect("mapped");
    let path = std::env::temp_dir().join(format!("bowline-doors-{}.sock", std::process::id()));
    let trouble = |why: &str| panic!("{why}");
    let server =
        vhost_user::serve(Arc::clone(&disk) as _, &path, VhostUserOptions::default(), trouble);
    let server = server.expect("served");
    let memory = Memory::new();
    let cuts = while_paths_are_cut(&rig, "machine", || {
        let mut guest = Guest::start(&path, &memory, 0);
        guest.add_queue(64);
        let end = Instant::now() + Duration::from_secs(4);
        let mut round = 0_u8;
        while Instant::now() < end {
            round = round.wrapping_add(1);
            // Whole pieces go to the disk directly, many short ones by a copy.
            let pieces: Vec<(u64, u32)> = match round % 3 {
                0 => vec![(DATA, 4096)],
                1 => vec![(DATA, 128 << 10)],
                _ => (0..32).map(|at| (DATA + at * 8192, 4096)).collect(),
            };
            let bytes = pieces.iter().map(|(_, len)| *len as usize).sum::<usize>();
            for (guest, len) in &pieces {
                memory.put(*guest, &vec![round; *len as usize]);
            }
            let queue = &mut guest.queues[usize::from(round) % 2];
            let sector = u64::from(round) * 1024 % (BYTES / 512 - 1024);
            assert_eq!(queue.run(OUT, sector, &pieces), 0);
            assert_eq!(queue.run(FLUSH, 0, &[]), 0);
            assert_eq!(queue.run(IN, sector, &[(DATA + (1 << 20), bytes as u32)]), 0);
            assert_eq!(memory.get(DATA + (1 << 20), bytes), vec![round; bytes]);
            let mut bytes_of_disk = vec![0; bytes];
            sync::read_at(&*disk, sector * 512, &mut bytes_of_disk).expect("read");
            assert_eq!(bytes_of_disk, vec![round; bytes]);
        }
    });
    assert!(cuts >= 2, "both paths were cut: {cuts}");
    drop(server);
    assert_eq!(rig.server.in_flight(), 0);
}
