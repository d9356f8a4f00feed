//! File stores in a killed process and on a full file system.

use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use bowline_block::backend::{self, Backend, BackendSpec};
use bowline_block::sync::{self, Durable};
use bowline_block::{BlockDevice, Errno, LocalDevice};

use bowline_testkit::skipped;

const BLOCK: usize = 4096;

fn open(path: &Path, bytes: u64, direct: bool) -> Arc<LocalDevice> {
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .open(path)
        .expect("the file opens");
    if bytes > 0 && file.metadata().expect("metadata").len() < bytes {
        file.set_len(bytes).expect("the file grows");
    }
    let spec = BackendSpec::File { fd: file.into(), read_only: false, block: 512, direct };
    let backend: Arc<dyn Backend> = backend::open(spec).expect("the store opens");
    LocalDevice::new("file", backend)
}

/// Returns the contents of block `i` in a generation.
fn content(i: u64, generation: u64) -> Vec<u8> {
    (0..BLOCK as u64 / 8)
        .flat_map(|word| (i << 40 ^ generation << 16 ^ word).to_le_bytes())
        .collect()
}

/// Runs one of the ignored tests of this file in a separate process.
fn child(command: &mut Command, test: &str, path: &Path) -> Child {
    command
        .args(["--exact", test, "--ignored", "--nocapture", "--test-threads=1"])
        .env("BOWLINE_BLOCK_CHILD", path)
        .stdout(Stdio::piped())
        .stderr(Stdio::inherit())
        .spawn()
        .expect("this program starts again")
}

fn path_of_child() -> Option<std::path::PathBuf> {
    std::env::var_os("BOWLINE_BLOCK_CHILD").map(Into::into)
}

/// What was flushed, or written through, is in the file after the process was killed: nothing
/// acknowledged is held back in the process. (The page cache outlives a process. That the disk
/// below is told is in `src/backend/tests/flush.rs`.)
#[test]
fn flushed_data_outlives_kill_9() {
    let program = std::env::current_exe().expect("this program");
    for round in 0..3 {
        let path =
            std::env::temp_dir().join(format!("bowline-kill9-{}-{round}", std::process::id()));
        let mut process = child(&mut Command::new(&program), "writes_until_killed", &path);
        let lines = BufReader::new(process.stdout.take().expect("piped")).lines();
        let mut flushed = 0;
        for line in lines {
            let line = line.expect("a line");
            if let Some(n) = line.strip_prefix("flushed ") {
                flushed = n.parse().expect("a number");
                if flushed >= 10 + round * 7 {
                    break;
                }
            }
        }
        process.kill().expect("SIGKILL");
        process.wait().expect("it ends");
        assert!(flushed > 0, "the process wrote something");
        let disk = open(&path, 0, round % 2 == 0);
        let mut block = vec![0; BLOCK];
        for i in 0..16_u64 {
            sync::read_at(&*disk, i * BLOCK as u64, &mut block).expect("read");
            // A later generation may have reached the file without having been acknowledged.
            let word = u64::from_le_bytes(block[..8].try_into().expect("8 bytes"));
            let generation = (word ^ i << 40) >> 16;
            assert!(generation >= flushed, "block {i}: {generation} of {flushed}");
            assert_eq!(block, content(i, generation), "block {i} is whole");
        }
        std::fs::remove_file(&path).expect("removed");
    }
}

#[test]
#[ignore = "the process that is killed by another test"]
fn writes_until_killed() {
    let Some(path) = path_of_child() else { return };
    let disk = open(&path, 16 * BLOCK as u64, true);
    for generation in 1.. {
        for i in 0..16 {
            let durable = if generation % 2 == 0 { Durable::Now } else { Durable::Later };
            let data = content(i, generation);
            sync::write_at(&*disk, i * BLOCK as u64, &data, durable).expect("written");
        }
        if generation % 2 == 1 {
            sync::flush(&*disk).expect("flushed");
        }
        println!("flushed {generation}");
    }
}

/// A full file system answers ENOSPC to that write; older data stay readable, and writes succeed
/// again once there is room.
#[test]
fn a_full_file_system_is_enospc_for_that_write_only() {
    let dir = std::env::temp_dir().join(format!("bowline-full-{}", std::process::id()));
    std::fs::create_dir(&dir).expect("a directory");
    let program = std::env::current_exe().expect("this program");
    // A tmpfs of 1 MiB in a mount namespace of its own.
    let mount = |then: &str| {
        let mut command = Command::new("unshare");
        command
            .args(["--map-root-user", "--mount", "sh", "-c"])
            .arg(format!("mount -t tmpfs -o size=1m none '{}' && {then}", dir.display()));
        command
    };
    let can = mount("true").stderr(Stdio::null()).status();
    if can.is_ok_and(|status| status.success()) {
        let mut command = mount("exec \"$@\"");
        command.arg("sh").arg(&program);
        let out = child(&mut command, "fills_a_file_system", &dir.join("disk"))
            .wait_with_output()
            .expect("it ends");
        let text = String::from_utf8_lossy(&out.stdout);
        assert!(out.status.success() && text.contains("went on"), "{text}");
    } else {
        skipped::because("no mount namespaces for this user");
    }
    std::fs::remove_dir(&dir).expect("removed");
}

#[test]
#[ignore = "the process that another test runs in a mount namespace"]
fn fills_a_file_system() {
    let Some(path) = path_of_child() else { return };
    let disk = open(&path, 4 << 20, true);
    assert!(disk.limits().write_cache);
    let data = vec![7; 64 << 10];
    let mut written = 0;
    let full = loop {
        match sync::write_at(&*disk, written, &data, Durable::Later) {
            Ok(()) => written += data.len() as u64,
            Err(errno) => break errno,
        }
    };
    assert_eq!(full, Errno::ENOSPC);
    assert!(written >= 512 << 10, "{written}");
    let mut back = vec![0; data.len()];
    sync::read_at(&*disk, 0, &mut back).expect("what was written is there");
    assert_eq!(back, data);
    sync::discard(&*disk, 0, 256 << 10).expect("room is made");
    sync::write_at(&*disk, written, &data, Durable::Later).expect("and used");
    println!("went on");
}

/// A block device is opened with its own block size and without the page cache, and discards if it
/// supports that.
#[test]
fn a_block_device_keeps_its_own_blocks() {
    let path = std::env::temp_dir().join(format!("bowline-loop-{}", std::process::id()));
    File::create_new(&path).expect("a file").set_len(8 << 20).expect("its size");
    let made = Command::new("losetup")
        .args(["--find", "--show", "--sector-size", "4096"])
        .arg(&path)
        .stderr(Stdio::null())
        .output();
    let device = match made {
        Ok(out) if out.status.success() => String::from_utf8_lossy(&out.stdout).trim().to_owned(),
        _ => {
            skipped::because("no loop devices for this user");
            std::fs::remove_file(&path).expect("removed");
            return;
        }
    };
    let result = std::panic::catch_unwind(|| {
        let disk = open(Path::new(&device), 0, true);
        let limits = disk.limits();
        assert_eq!((limits.bytes, limits.logical), (8 << 20, 4096));
        let data = vec![0x33; 64 << 10];
        sync::write_at(&*disk, 4096, &data, Durable::Now).expect("written");
        let small = sync::write_at(&*disk, 512, &data[..512], Durable::Later);
        assert_eq!(small, Err(Errno::EINVAL));
        let mut back = vec![0; 64 << 10];
        sync::read_at(&*disk, 4096, &mut back).expect("read");
        assert_eq!(back, data);
        sync::write_zeroes(&*disk, 8192, 4096).expect("zeroed");
        sync::read_at(&*disk, 4096, &mut back).expect("read");
        assert!(back[4096..8192].iter().all(|byte| *byte == 0) && back[8192] == 0x33);
        let name = Path::new(&device).file_name().expect("a name").to_str().expect("text");
        let queue = |limit: &str| -> u64 {
            let text = std::fs::read_to_string(format!("/sys/block/{name}/queue/{limit}"));
            text.expect("a limit").trim().parse().expect("a number")
        };
        assert_eq!(u64::from(limits.max_io), queue("max_hw_sectors_kb") * 1024);
        assert_eq!(u64::from(limits.max_segments), queue("max_segments"));
        assert!(!limits.secure_erase, "sysfs says nothing of it");
        let discard = limits.discard.expect("a loop device makes holes in its file");
        assert_eq!(u64::from(discard.granularity), queue("discard_granularity"));
        let long = vec![0x44; 3 << 20];
        sync::write_at(&*disk, 1 << 20, &long, Durable::Later)
            .expect("longer than the queue's limit");
        let mut read = vec![0; 3 << 20];
        sync::read_at(&*disk, 1 << 20, &mut read).expect("read");
        assert!(read == long);
        // More requests at a time than there are threads.
        std::thread::scope(|scope| {
            for piece in 0..8 {
                let disk = &disk;
                scope.spawn(move || {
                    sync::discard(&**disk, piece << 20, 1 << 20).expect("discarded");
                });
            }
        });
        sync::flush(&*disk).expect("flushed");
        sync::read_at(&*disk, 1 << 20, &mut read).expect("read");
        assert!(read.iter().all(|byte| *byte == 0), "a loop device reads as holes do");
        let blocks = std::fs::metadata(&path).expect("the file").blocks();
        assert_eq!(blocks, 0, "all of it was freed");
    });
    Command::new("losetup").args(["--detach", &device]).status().expect("losetup is there");
    std::fs::remove_file(&path).expect("removed");
    if let Err(panic) = result {
        std::panic::resume_unwind(panic);
    }
}
