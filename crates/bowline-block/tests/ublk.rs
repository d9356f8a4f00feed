//! The block device front end, on a machine that has ublk; otherwise the tests report a skip.

use std::fs::OpenOptions;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::thread;
use std::time::{Duration, Instant};

use bowline_block::backend::{self, Backend, BackendDone, BackendIo, BackendSpec};
use bowline_block::front::ublk::{self, DeviceId, Ublk, UblkOptions};
use bowline_block::{Limits, LocalDevice, sync};
use bowline_verbs::Buffer;

use bowline_testkit::skipped;

fn memory() -> Arc<dyn Backend> {
    backend::open(BackendSpec::Memory { bytes: 64 << 20, block: 512 }).expect("memory")
}

fn attach(options: UblkOptions) -> Option<(Ublk, Arc<LocalDevice>)> {
    attach_store(memory(), options)
}

fn attach_store(store: Arc<dyn Backend>, options: UblkOptions) -> Option<(Ublk, Arc<LocalDevice>)> {
    let disk = LocalDevice::new("disk", store);
    attached(ublk::attach(disk.clone(), options)).map(|ublk| (ublk, disk))
}

fn attached(attached: std::io::Result<Ublk>) -> Option<Ublk> {
    match attached {
        Ok(ublk) => Some(ublk),
        Err(error)
            if matches!(
                error.kind(),
                std::io::ErrorKind::NotFound | std::io::ErrorKind::PermissionDenied
            ) =>
        {
            skipped::because(error);
            None
        }
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn a_block_device_appears_works_and_goes() {
    let Some((ublk, disk)) = attach(UblkOptions::default()) else { return };
    let device = OpenOptions::new().read(true).write(true).open(ublk.path()).expect("opened");
    let data: Vec<u8> = (0..1_000_000_u32).flat_map(|i| i.to_le_bytes()).collect();
    device.write_all_at(&data, 1 << 20).expect("written");
    device.sync_all().expect("flushed");
    let mut there = vec![0; 1 << 20];
    sync::read_at(&*disk, 1 << 20, &mut there).expect("read");
    assert!(there == data[..1 << 20], "what was written is on the disk");
    let path = ublk.path().display().to_string();
    for command in [
        format!("test $(blockdev --getsize64 {path}) = 67108864"),
        format!("blkdiscard -o 1048576 -l 4096 {path}"),
        format!("blkdiscard -z -o 1052672 -l 4096 {path}"),
        format!("mkfs.ext4 -q -F {path} && fsck.ext4 -fn {path}"),
        format!(
            "fio --name=v --filename={path} --direct=1 --rw=randrw --bssplit=512/20:4k/50:512k/30 \
             --size=32m --iodepth=32 --ioengine=libaio --verify=crc32c \
             --verify_state_save=0 --fsync=32"
        ),
    ] {
        let tool = command.split(' ').find(|word| *word != "test").unwrap_or_default();
        let out = Command::new("timeout").args(["60", "sh", "-c", &command]).output().expect("sh");
        let text = String::from_utf8_lossy(&out.stderr).into_owned();
        if out.status.code() == Some(127) {
            skipped::without(tool);
            continue;
        }
        assert!(out.status.success(), "{command}: {text}");
    }
    sync::read_at(&*disk, 1 << 20, &mut there[..4096]).expect("read");
    let path = ublk.path().to_owned();
    drop(device);
    drop(ublk);
    assert!(!path.exists(), "the device is gone");
}

/// A store that has zeroes written for it, but cannot discard.
struct WithoutDiscard(Arc<dyn Backend>);

impl Backend for WithoutDiscard {
    fn limits(&self) -> Limits {
        Limits { discard: None, ..self.0.limits() }
    }

    fn submit(&self, io: &mut Vec<BackendIo>, done: &Arc<dyn BackendDone>) {
        self.0.submit(io, done);
    }

    fn region(&self) -> Option<Arc<Buffer>> {
        self.0.region()
    }

    fn resize(&self) -> std::io::Result<u64> {
        self.0.resize()
    }
}

#[test]
fn zeroes_are_written_where_nothing_can_be_discarded() {
    // tests [NB-52]
    let store = Arc::new(WithoutDiscard(memory()));
    assert!(store.limits().max_write_zeroes > 0);
    let Some((ublk, disk)) = attach_store(store, UblkOptions::default()) else { return };
    let device = OpenOptions::new().read(true).write(true).open(ublk.path()).expect("opened");
    device.write_all_at(&[7; 8192], 0).expect("written");
    device.sync_all().expect("flushed");
    let name = ublk.path().file_name().expect("a name").to_string_lossy().into_owned();
    let limit = |of: &str| std::fs::read_to_string(format!("/sys/block/{name}/queue/{of}"));
    assert_eq!(limit("discard_max_bytes").expect("said").trim(), "0");
    assert_ne!(limit("write_zeroes_max_bytes").expect("said").trim(), "0");
    let zero = rustix::fs::FallocateFlags::ZERO_RANGE | rustix::fs::FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(&device, zero, 4096, 4096).expect("zeroed");
    let mut there = [1; 8192];
    sync::read_at(&*disk, 0, &mut there).expect("read");
    assert!(there[..4096] == [7; 4096] && there[4096..] == [0; 4096]);
}

#[test]
fn a_read_only_device_is_not_written() {
    let mut options = UblkOptions::default();
    options.read_only = true;
    let Some((ublk, _)) = attach(options) else { return };
    let device = OpenOptions::new().read(true).write(true).open(ublk.path());
    assert!(device.is_err() || device.is_ok_and(|device| device.write_at(&[0; 512], 0).is_err()));
}

#[test]
fn who_keeps_a_device_open_keeps_nobody_else() {
    let Some((ublk, _disk)) = attach(UblkOptions::default()) else { return };
    let path = ublk.path().to_owned();
    let open = OpenOptions::new().read(true).open(&path).expect("opened");
    let begin = Instant::now();
    drop(ublk);
    assert!(begin.elapsed() < Duration::from_secs(15), "{:?}", begin.elapsed());
    assert!(!path.exists(), "the device is gone");
    let mut block = [0; 512];
    open.read_exact_at(&mut block, 0).expect_err("and can be read no more");
}

#[test]
fn a_device_that_is_claimed_is_in_use() {
    // tests [NB-37]
    let Some((ublk, _)) = attach(UblkOptions::default()) else { return };
    let claim = || {
        let mut options = OpenOptions::new();
        options.custom_flags(libc::O_EXCL);
        options.read(true).open(ublk.path())
    };
    let claimed = claim().expect("nobody has it");
    assert!(!ublk.disable_if_unused());
    drop(claimed);
    assert!(ublk.disable_if_unused() && ublk.disable_if_unused());
    assert_eq!(claim().map_err(|error| error.raw_os_error()).err(), Some(Some(libc::EBUSY)));
    ublk.enable();
    assert!(claim().is_ok());
    assert!(ublk.disable_if_unused());
    let path = ublk.path().to_owned();
    drop(ublk);
    assert!(!path.exists(), "the device is gone though it was shut");
}

const BLOCK: usize = 4096;

/// Writes, flushes and reads back until it is to stop; returns the longest time that one took.
fn use_until(stop: &AtomicBool, writes: &AtomicU64, path: &Path) -> Duration {
    let direct = OpenOptions::new().read(true).write(true).custom_flags(libc::O_DIRECT).open(path);
    let device = direct.expect("opened");
    let mut longest = Duration::ZERO;
    for round in 1_u64.. {
        if stop.load(SeqCst) {
            break;
        }
        let begun = Instant::now();
        let offset = round % 64 * BLOCK as u64;
        let block = Aligned([round as u8; BLOCK]);
        device.write_all_at(&block.0, offset).expect("written");
        if round % 8 == 0 {
            device.sync_data().expect("flushed");
        }
        let mut there = Aligned([0; BLOCK]);
        device.read_exact_at(&mut there.0, offset).expect("read");
        assert!(there.0 == block.0, "round {round}");
        longest = longest.max(begun.elapsed());
        writes.store(round, SeqCst);
    }
    longest
}

#[repr(align(4096))]
struct Aligned([u8; BLOCK]);

#[test]
fn users_wait_while_a_device_has_no_server() {
    // tests [NB-75]
    let disk = LocalDevice::new("disk", memory());
    let mut kept = None;
    let made =
        ublk::attach_recoverable(disk.clone(), UblkOptions::default(), 0x1234_5678_9abc, |id| {
            kept = Some(*id);
            Ok(())
        });
    let Some(mut device) = attached(made) else { return };
    let path = device.path().to_owned();
    let id = device.device().expect("recoverable");
    assert_eq!(Some(id), kept, "known before it is used");
    assert_eq!(id.tag, 0x1234_5678_9abc);
    let (stop, writes) = (AtomicBool::new(false), AtomicU64::new(0));
    let (device, longest, resumed) = thread::scope(|scope| {
        let user = scope.spawn(|| use_until(&stop, &writes, &path));
        let advance = || {
            let enough = writes.load(SeqCst) + 20;
            while writes.load(SeqCst) < enough {
                assert!(!user.is_finished(), "the user has failed");
                thread::sleep(Duration::from_millis(1));
            }
        };
        let mut resumed = Vec::new();
        for pauses in [true, false, true] {
            advance();
            let begun = Instant::now();
            if pauses {
                device.pause();
                while !device.is_paused() {
                    thread::sleep(Duration::from_millis(1));
                }
            }
            assert_eq!(device.hand_over(), Some(id));
            let left = begun.elapsed();
            assert!(path.exists());
            device = ublk::resume(disk.clone(), UblkOptions::default(), &id).expect("resumed");
            device.unpause();
            resumed.push((left, begun.elapsed()));
        }
        advance();
        device.pause();
        device.unpause();
        advance();
        stop.store(true, SeqCst);
        (device, user.join().expect("no request fails"), resumed)
    });
    println!("longest write and read: {longest:?}; left and resumed after: {resumed:?}");
    // One that was resumed and not owned is left once more.
    drop(device);
    let other = DeviceId { tag: 7, ..id };
    let refused = ublk::resume(disk.clone(), UblkOptions::default(), &other);
    assert_eq!(refused.unwrap_err().kind(), std::io::ErrorKind::NotFound);
    let shorter =
        backend::open(BackendSpec::Memory { bytes: 1 << 20, block: 512 }).expect("memory");
    let shorter = LocalDevice::new("disk", shorter);
    let refused = ublk::resume(shorter, UblkOptions::default(), &id);
    assert_eq!(refused.unwrap_err().kind(), std::io::ErrorKind::InvalidInput);
    let device = ublk::resume(disk.clone(), UblkOptions::default(), &id).expect("resumed");
    device.unpause();
    device.own();
    drop(device);
    assert!(!path.exists(), "the device is gone");
    let gone = ublk::resume(disk, UblkOptions::default(), &id);
    assert_eq!(gone.unwrap_err().kind(), std::io::ErrorKind::NotFound);
}
