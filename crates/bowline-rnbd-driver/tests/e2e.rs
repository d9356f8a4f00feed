//! A server of exports and a client of disks in one process, over the soft device on loopback.

mod common;

use std::sync::Arc;
use std::time::Duration;

use bowline_block::backend::BackendSpec;
use bowline_block::sync::{self, Durable};
use bowline_block::{BlockDevice, Errno};
use bowline_rnbd::client::{Outage, State};
use bowline_rnbd_driver::tree::{self, Exports as _};
use bowline_rnbd_driver::{
    Client, Disk, ExportServer, Exports, FileOptions, MapOptions, ServerConfig,
};
use bowline_roce::GiveUp;
use bowline_rtrs_driver::client::ReadKeys;
use bowline_rtrs_driver::{Geometry, server::ServerConfig as RtrsConfig};
use bowline_wire::rnbd::Access;
use common::{Rig, SOON, SOON_ENOUGH, Stop, load, memory, pattern, state};

const MIB: u64 = 1 << 20;

fn check(disk: &Disk, offset: u64, len: usize, seed: u64) {
    let mut out = vec![0; len];
    sync::read_at(disk, offset, &mut out).unwrap();
    assert_eq!(out, pattern(len, seed), "at {offset}");
}

#[test]
fn data_of_every_length_is_read_as_written() {
    let rig = Rig::new(1, memory(16 * MIB));
    let disk = rig.map("disk0", &rig.options("what")).unwrap();
    assert_eq!(disk.limits().bytes, 16 * MIB);
    assert_eq!(disk.local_name(), "rnbd0");
    // From one block to several times the largest IO of the session.
    for (n, len) in [512, 4096, 65_536, 126_976, 1 << 20].into_iter().enumerate() {
        let offset = n as u64 * 2 * MIB + 512;
        sync::write_at(&*disk, offset, &pattern(len, n as u64), Durable::Later).unwrap();
        check(&disk, offset, len, n as u64);
    }
    sync::flush(&*disk).unwrap();
    sync::write_zeroes(&*disk, 512, 512).unwrap();
    let mut out = [1; 512];
    sync::read_at(&*disk, 512, &mut out).unwrap();
    assert_eq!(out, [0; 512]);
    sync::discard(&*disk, 0, 1 << 20).unwrap();
    let mut past = [0; 1024];
    assert_eq!(sync::read_at(&*disk, 16 * MIB - 512, &mut past), Err(Errno::EIO));
    assert_eq!(sync::read_at(&*disk, 100, &mut past), Err(Errno::EINVAL));
    let stats = disk.info().unwrap().stats;
    assert_eq!((stats.writes, stats.written_bytes), (5, 512 + 4096 + 65_536 + 126_976 + MIB));
    rig.client.unmap(&disk).unwrap();
    assert!(rig.client.sessions().is_empty(), "the last disk ends the session");
    assert_eq!(rig.server.opens(), []);
}

#[test]
fn every_length_that_a_session_allows_is_carried_out() {
    // tests [NB-30]: all clients use the limit of the session, not that of the storage
    let path = std::env::temp_dir().join(format!("bowline-long-{}", std::process::id()));
    std::fs::File::create(&path).unwrap().set_len(8 * MIB).unwrap();
    let mut exports = memory(8 * MIB);
    for (name, direct) in [("direct", true), ("buffered", false)] {
        exports.file(name, &path, FileOptions { direct, ..FileOptions::default() }).unwrap();
    }
    let null = bowline_block::backend::open(BackendSpec::Null).unwrap();
    exports.backend("null", null).unwrap();
    let geometry = Geometry::of_chunk(32, 4 << 20, 4096).unwrap();
    let rtrs = RtrsConfig { geometry, ..RtrsConfig::default() };
    let rig = Rig::with_config(12, exports, 1, ServerConfig { rtrs, ..ServerConfig::default() });
    for name in ["disk0", "direct", "buffered"] {
        let disk = rig.map(name, &rig.options("long")).unwrap();
        assert_eq!(disk.limits().max_io, (4 << 20) - 4096, "{name}");
        for (n, len) in [1 << 20, 2 << 20, (3 << 20) + 512].into_iter().enumerate() {
            let (offset, seed) = (n as u64 * 512 + 4096, n as u64 + 1);
            sync::write_at(&*disk, offset, &pattern(len, seed), Durable::Later).unwrap();
            check(&disk, offset, len, seed);
        }
        let stats = disk.info().unwrap().stats;
        assert_eq!((stats.writes, stats.reads), (3, 3), "{name}: none was split by the client");
        rig.client.unmap(&disk).unwrap();
    }
    let disk = rig.map("null", &rig.options("long")).unwrap();
    let mut out = pattern(3 << 20, 1);
    sync::read_at(&*disk, 0, &mut out).unwrap();
    assert!(out.iter().all(|byte| *byte == 0));
    std::fs::remove_file(path).unwrap();
}

#[test]
fn a_file_has_the_size_of_its_last_open_or_resize() {
    // tests [NB-37] [NB-24]
    let dir = std::env::temp_dir().join(format!("bowline-grows-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let files = ["disk0", "below"].map(|name| std::fs::File::create(dir.join(name)).unwrap());
    let set_len = |bytes| files.iter().for_each(|file| file.set_len(bytes).unwrap());
    set_len(MIB);
    let mut exports = memory(MIB);
    exports.file("file", &dir.join("disk0"), FileOptions::default()).unwrap();
    exports.directory(&dir, FileOptions::default()).unwrap();
    let rig = Rig::new(13, exports);
    assert_eq!(rig.server.resize_all().len(), 0, "nothing has changed");
    set_len(2 * MIB);
    let first = ["file", "below"].map(|name| rig.map(name, &rig.options("s1")).unwrap());
    let sizes = |disks: &[Arc<Disk>; 2]| disks.each_ref().map(|disk| disk.limits().bytes);
    assert_eq!(sizes(&first), [2 * MIB; 2], "grown before they were opened");
    set_len(4 * MIB);
    let ro = MapOptions { access: Access::Ro, ..rig.options("s2") };
    let second = ["file", "below"].map(|name| rig.map(name, &ro).unwrap());
    assert_eq!(sizes(&second), [4 * MIB; 2], "grown while others have them open");
    set_len(8 * MIB);
    // A client may set any size [NB-37]; the server checks against the real one.
    first.iter().chain(&second).for_each(|disk| disk.resize(8 * MIB).unwrap());
    let write = |disk: &Disk| sync::write_at(disk, 6 * MIB, &[7; 4096], Durable::Later);
    for disk in &first {
        assert_eq!(write(disk), Err(Errno::EIO), "nobody has looked");
    }
    assert_eq!(rig.server.resize("file").unwrap(), 8 * MIB);
    assert_eq!((write(&first[0]), write(&first[1])), (Ok(()), Err(Errno::EIO)));
    let changed = rig.server.resize_all();
    let changed: Vec<_> = changed.into_iter().map(|(name, n)| (name, n.unwrap())).collect();
    assert_eq!(changed, [("below".to_owned(), 8 * MIB)]);
    assert_eq!(write(&first[1]), Ok(()));
    set_len(MIB);
    assert_eq!(rig.server.resize_all().len(), 2);
    for disk in first {
        assert_eq!(write(&disk), Err(Errno::EIO), "a smaller one does not grow by a write");
    }
    assert!(files.iter().all(|file| file.metadata().unwrap().len() == MIB));
    let missing = rig.server.resize("missing").unwrap_err();
    assert_eq!(missing.errno(), Errno::ENOENT);
    std::fs::remove_dir_all(dir).unwrap();
}

#[test]
fn a_read_only_name_is_not_written_and_does_not_limit_other_names() {
    // tests [NB-17] [NB-19] [NB-58]
    let path = std::env::temp_dir().join(format!("bowline-names-{}", std::process::id()));
    std::fs::write(&path, [7; 1 << 20]).unwrap();
    let mut exports = Exports::new();
    for (name, read_only, block) in
        [("safe", true, 512), ("work", false, 512), ("large", false, 4096)]
    {
        let options = FileOptions { read_only, block, ..FileOptions::default() };
        exports.file(name, &path, options).unwrap();
    }
    std::fs::remove_file(&path).unwrap();
    let rig = Rig::new(18, exports);
    let ro = |session| MapOptions { access: Access::Ro, ..rig.options(session) };
    let rw = |session| rig.options(session);
    let refused = |name, options: &MapOptions| rig.map(name, options).unwrap_err().errno();
    let first_byte = |disk: &Disk| {
        let mut out = [0; 512];
        sync::read_at(disk, 0, &mut out).unwrap();
        out[0]
    };
    // First opened by the writable name, then by the read-only one.
    let work = rig.map("work", &ro("s1")).unwrap();
    assert_eq!(refused("safe", &rw("s2")), Errno::EACCES);
    rig.client.unmap(&work).unwrap();
    // And the other way around.
    let safe = rig.map("safe", &ro("s1")).unwrap();
    assert_eq!(refused("safe", &rw("s2")), Errno::EACCES);
    assert_eq!(first_byte(&safe), 7);
    assert_eq!(refused("large", &rw("s2")), Errno::EACCES, "who reads has smaller blocks");
    let work = rig.map("work", &rw("s2")).unwrap();
    sync::write_at(&*work, 0, &[8; 512], Durable::Later).unwrap();
    assert_eq!(first_byte(&safe), 8);
    assert_eq!(sync::write_at(&*safe, 0, &[9; 512], Durable::Later), Err(Errno::EPERM));
    assert_eq!(refused("safe", &rw("s3")), Errno::EACCES);
    assert_eq!(refused("work", &rw("s3")), Errno::EPERM, "one writes, whatever the names");
    rig.client.unmap(&work).unwrap();
    let work = rig.map("work", &rw("s3")).unwrap();
    assert_eq!(first_byte(&work), 8);
    rig.client.unmap(&work).unwrap();
    rig.client.unmap(&safe).unwrap();
    assert_eq!(rig.server.opens(), []);
}

#[test]
fn access_is_arbitrated_and_errors_are_the_servers() {
    // tests [NB-19] [NB-17] [NB-35] [NB-58]
    let rig = Rig::new(2, memory(MIB));
    let (s1, s2) = (rig.options("s1"), rig.options("s2"));
    let first = rig.map("disk0", &s1).unwrap();
    let errno = |result: Result<Arc<Disk>, bowline_rnbd_driver::Error>| result.unwrap_err().errno();
    assert_eq!(errno(rig.map("disk0", &s1)), Errno::EEXIST);
    assert_eq!(errno(rig.map("none", &s1)), Errno::ENOENT);
    assert_eq!(errno(rig.map("a..b", &s1)), Errno::EINVAL);
    assert_eq!(errno(rig.map("disk0", &s2)), Errno::EPERM);
    assert_eq!(errno(rig.map("disk0", &MapOptions::new("s3"))), Errno::ENXIO);
    let migration = MapOptions { access: Access::Migration, ..s2 };
    let second = rig.map("disk0", &migration).unwrap();
    let ro = MapOptions { access: Access::Ro, ..rig.options("s3") };
    let third = rig.map("disk0", &ro).unwrap();
    let refused = sync::write_at(&*third, 0, &[0; 512], Durable::Later);
    assert_eq!(refused, Err(Errno::EPERM));
    assert_eq!(rig.server.opens().len(), 3);
    for disk in [first, second, third] {
        rig.client.unmap(&disk).unwrap();
    }
    assert_eq!(rig.server.opens(), []);
}

#[test]
fn a_disk_is_mapped_and_unmapped_again_and_again() {
    let rig = Rig::new(3, memory(MIB));
    for round in 0..20 {
        let disk = rig.map("disk0", &rig.options("cycle")).unwrap();
        sync::write_at(&*disk, 0, &pattern(4096, round), Durable::Later).unwrap();
        check(&disk, 0, 4096, round);
        rig.client.unmap(&disk).unwrap();
    }
    assert_eq!(rig.server.opens(), []);
}

#[test]
fn load_of_many_threads_is_verified() {
    let rig = Rig::new(4, memory(16 * MIB));
    let disk = rig.map("disk0", &rig.options("load")).unwrap();
    let report = load(&disk, 4, Duration::from_millis(700), || {});
    assert_eq!(report.failed, 0, "{report:?}");
    assert!(report.verified >= 100, "{report:?}");
    assert_eq!(rig.server.in_flight(), 0);
}

#[test]
fn requests_wait_out_a_cut_of_the_only_path() {
    // tests [NB-54] [NB-16]
    let rig = Rig::hasty(5, memory(16 * MIB), 1, SOON);
    let options = rig.options("cut").outage(Outage::Queue(Duration::from_secs(15)));
    let disk = rig.map("disk0", &options).unwrap();
    let report = load(&disk, 2, Duration::from_millis(3500), || {
        std::thread::sleep(Duration::from_millis(300));
        rig.cut_for("cut", &[0], Duration::from_millis(1200));
    });
    assert_eq!(report.failed, 0, "{report:?}");
    assert!(report.longest > Duration::from_millis(500), "the cut was felt: {report:?}");
    let stats = disk.info().unwrap().stats;
    assert!(stats.resent > 0, "{stats:?}");
}

#[test]
fn one_of_two_paths_is_cut_and_nothing_fails() {
    let rig = Rig::hasty(6, memory(16 * MIB), 2, SOON_ENOUGH);
    let disk = rig.map("disk0", &rig.options("two")).unwrap();
    let report = load(&disk, 2, Duration::from_millis(2500), || {
        std::thread::sleep(Duration::from_millis(200));
        rig.cut_for("two", &[0], Duration::from_millis(1200));
    });
    assert_eq!(report.failed, 0, "{report:?}");
    let offline = disk.info().unwrap().stats.resent;
    assert_eq!(offline, 0, "paths are changed below, not here");
}

#[test]
fn without_a_queue_a_cut_fails_requests_and_the_disk_comes_back() {
    // tests [NB-27] [NB-32]
    let rig = Rig::hasty(7, memory(MIB), 1, SOON_ENOUGH);
    let disk = rig.map("disk0", &rig.options("fast")).unwrap();
    rig.cut(0, true);
    let mut out = [0; 512];
    assert_eq!(sync::read_at(&*disk, 0, &mut out), Err(Errno::EIO));
    rig.until("the disk is closed", || state(&disk) == "closed");
    assert_eq!(sync::read_at(&*disk, 0, &mut out), Err(Errno::EIO));
    rig.cut(0, false);
    rig.until("the disk is open", || state(&disk) == "open");
    sync::read_at(&*disk, 0, &mut out).unwrap();
}

#[test]
fn a_forced_close_ends_io_until_the_disk_is_remapped() {
    // tests [NB-21] [NB-37]
    let rig = Rig::new(8, memory(MIB));
    let disk = rig.map("disk0", &rig.options("force")).unwrap();
    assert_eq!(disk.remap(), Err(Errno::EALREADY));
    let former = rig.server.opens()[0].id.device;
    assert_eq!(tree::Exports::force_close(&*rig.server, "disk0", "nobody"), Err(Errno::ENOENT));
    tree::Exports::force_close(&*rig.server, "disk0", "force").unwrap();
    assert_eq!(sync::write_at(&*disk, 0, &[1; 512], Durable::Later), Err(Errno::EIO));
    assert_eq!(state(&disk), "closed");
    disk.remap().unwrap();
    sync::write_at(&*disk, 0, &[1; 512], Durable::Later).unwrap();
    assert_ne!(rig.server.opens()[0].id.device, former, "no id comes twice");
    let exports = rig.server.exports();
    assert_eq!((exports.len(), exports[0].traffic.writes), (1, 1));
    rig.client.unmap(&disk).unwrap();
}

#[test]
fn a_forced_close_while_reads_are_answered_ends_no_path() {
    // tests [NB-21]: answers are sent from the exported memory
    let mut exports = memory(MIB);
    exports.memory("disk1", MIB, 512).unwrap();
    let rig = Rig::new(22, exports);
    let options = rig.options("forced").outage(Outage::FailFast);
    let disks = ["disk0", "disk1"].map(|name| rig.map(name, &options).unwrap());
    let stop = std::sync::atomic::AtomicBool::new(false);
    let relaxed = std::sync::atomic::Ordering::Relaxed;
    std::thread::scope(|scope| {
        let _end = Stop(&stop);
        for disk in &disks {
            scope.spawn(|| {
                let mut out = vec![0; 64 << 10];
                while !stop.load(relaxed) {
                    // The read of the closed disk fails; the disk is remapped below.
                    let read = sync::read_at(&**disk, 0, &mut out);
                    assert!(read.is_ok() || disk.name() == "disk1", "{read:?}");
                }
            });
        }
        for _ in 0..100 {
            std::thread::sleep(Duration::from_millis(3));
            tree::Exports::force_close(&*rig.server, "disk1", "forced").unwrap();
            rig.until("the disk is closed", || state(&disks[1]) == "closed");
            disks[1].remap().unwrap();
        }
    });
    let session = rig.client.session("forced").unwrap();
    let stats = session.paths().remove(0).stats;
    assert_eq!((stats.reconnects, stats.reconnects_failed), (0, 0), "{stats:?}");
}

#[test]
fn requests_that_wait_for_a_lost_session_can_be_made_to_fail() {
    // tests [NB-54]
    let rig = Rig::hasty(19, memory(MIB), 1, SOON_ENOUGH);
    let wait = Outage::Queue(Duration::from_secs(3600));
    let disk = rig.map("disk0", &rig.options("impatient").outage(wait)).unwrap();
    let write = || sync::write_at(&*disk, 0, &[1; 512], Durable::Later);
    write().unwrap();
    let waits = || disk.info().is_some_and(|info| info.state == State::Closed && info.waiting == 1);
    rig.cut(0, true);
    std::thread::scope(|threads| {
        let waiting = threads.spawn(write);
        rig.until("a request waits for the session", waits);
        disk.fail_fast();
        assert_eq!(waiting.join().unwrap(), Err(Errno::EIO));
    });
    assert_eq!(write(), Err(Errno::EIO));
    // The disk is still mapped, and works again with the session.
    rig.cut(0, false);
    rig.until("it is back", || write().is_ok());
    rig.client.unmap(&disk).unwrap();
}

#[test]
fn a_disk_that_outlives_its_client_answers_with_errors() {
    let rig = Rig::new(23, memory(MIB));
    let wait = Outage::Queue(Duration::from_secs(3600));
    let client = Client::new(Arc::clone(rig.client_engine()), MapOptions::new("default"));
    let disk = client.map_with("disk0", &rig.options("outlived").outage(wait)).unwrap();
    sync::write_at(&*disk, 0, &[1; 512], Durable::Later).unwrap();
    drop(client);
    assert_eq!(sync::write_at(&*disk, 0, &[1; 512], Durable::Later), Err(Errno::EIO));
    rig.until("the server has closed it", || rig.server.opens().is_empty());
    rig.until("it is gone", || disk.info().is_none());
}

#[test]
fn disks_may_have_keys_for_single_reads_and_many_connections() {
    // tests [RT-24] [RT-37] [RT-43] [RS-8]
    let rig = Rig::hasty(11, memory(16 * MIB), 2, SOON_ENOUGH);
    let (read_keys, io_connections) = (ReadKeys::PerRequest, Some(3));
    let options = MapOptions { read_keys, io_connections, ..rig.options("keys") };
    let disk = rig.map("disk0", &options).unwrap();
    assert_eq!(rig.client_device.in_use().qps, 8);
    let report = load(&disk, 4, Duration::from_millis(2000), || {
        std::thread::sleep(Duration::from_millis(200));
        rig.cut_for("keys", &[1], Duration::from_millis(1000));
    });
    assert_eq!(report.failed, 0, "{report:?}");
    assert!(report.verified > 10, "{report:?}");
    rig.client.unmap(&disk).unwrap();
    rig.until("no key is left", || rig.client_device.in_use().bound == 0);
}

/// Carries out a command to map as the tree does; returns its errno.
fn command(client: &Client, command: &str) -> Result<(), Errno> {
    tree::Disks::map(client, &command.parse().unwrap())
}

#[test]
fn a_path_uses_the_port_before_it_and_later_ones_the_last() {
    // tests [NB-34]
    let rig = Rig::with_paths(17, Exports::new(), 3);
    // At port 1234 there is a server without disks.
    let at = [(0, 98), (1, 99), (2, 97)].map(|(path, port)| (rig.server_ip(path), port).into());
    let config = ServerConfig::default();
    let server = ExportServer::open(rig.server_engine(), &at, config, memory(MIB)).unwrap();
    let path = |index| format!("path=ip:{}@ip:{}", rig.client_ip(index), rig.server_ip(index));
    let map = |words: &str| command(&rig.client, &format!("sessname=s1 device_path=disk0 {words}"));
    assert_eq!(map(&format!("{} dest_port=98", path(0))), Err(Errno::ENOENT));
    let words = format!("dest_port=98 {} dest_port=99 {} dest_port=97", path(0), path(1));
    assert_eq!(map(&words), Ok(()));
    let session = rig.client.session("s1").unwrap();
    session.add_path(Some(rig.client_ip(2)), rig.server_ip(2)).unwrap();
    let ports: Vec<u16> = session.paths().iter().map(|path| path.dst.port()).collect();
    assert_eq!(ports, [98, 99, 97]);
    drop(session);
    tree::Disks::unmap(&*rig.client, "rnbd0", false).unwrap();
    server.close();
}

#[test]
fn a_path_without_a_port_goes_to_the_port_of_the_client() {
    // tests [NB-34]
    let rig = Rig::with_paths(24, Exports::new(), 2);
    let at = [0, 1].map(|path| (rig.server_ip(path), 98).into());
    let config = ServerConfig::default();
    let server = ExportServer::open(rig.server_engine(), &at, config, memory(MIB)).unwrap();
    let defaults = MapOptions { port: 98, ..MapOptions::new("usual") };
    let client = Client::new(Arc::clone(rig.client_engine()), defaults);
    let path = |index| format!("path=ip:{}@ip:{}", rig.client_ip(index), rig.server_ip(index));
    let map = |words: &str| command(&client, &format!("sessname=s1 device_path=disk0 {words}"));
    // At port 1234 there is a server without disks.
    assert_eq!(map(&format!("dest_port=1234 {}", path(0))), Err(Errno::ENOENT));
    assert_eq!(map(&path(0)), Ok(()));
    let session = client.session("s1").unwrap();
    session.add_path(Some(rig.client_ip(1)), rig.server_ip(1)).unwrap();
    let ports: Vec<u16> = session.paths().iter().map(|path| path.dst.port()).collect();
    assert_eq!(ports, [98, 98]);
    drop(session);
    client.close();
    server.close();
}

#[test]
fn a_session_with_poll_queues_has_their_connections_and_one_disk() {
    // tests [NB-35] [NB-37] [RT-24]
    let mut exports = memory(MIB);
    exports.memory("disk1", MIB, 512).unwrap();
    let rig = Rig::with_paths(16, exports, 2);
    let path = |index| format!("path=ip:{}@ip:{}", rig.client_ip(index), rig.server_ip(index));
    let map = |words: &str| command(&rig.client, &format!("sessname={words}"));
    assert_eq!(map(&format!("s1 device_path=disk0 {} nr_poll_queues=1", path(0))), Ok(()));
    // On the device of the tests, a path has one connection for IO and one for service messages.
    assert_eq!(rig.client_device.in_use().qps, 3);
    let info = rig.client.disks();
    assert_eq!(tree::Disks::disks(&*rig.client)[0].poll_queues, 1);
    sync::write_at(&*info[0], 0, &pattern(4096, 3), Durable::Later).unwrap();
    check(&info[0], 0, 4096, 3);
    drop(info);
    assert_eq!(map("s1 device_path=disk0"), Err(Errno::EEXIST));
    assert_eq!(map("s1 device_path=disk1"), Err(Errno::EINVAL));
    assert_eq!(map("s1 device_path=disk1 nr_poll_queues=1"), Err(Errno::EINVAL));
    assert_eq!(map(&format!("s2 device_path=disk1 {}", path(1))), Ok(()));
    assert_eq!(map("s2 device_path=disk0 access_mode=ro nr_poll_queues=1"), Err(Errno::EINVAL));
    assert_eq!(map("s2 device_path=disk0 access_mode=ro"), Ok(()));
    let queues: Vec<u32> =
        tree::Disks::disks(&*rig.client).iter().map(|disk| disk.poll_queues).collect();
    assert_eq!(queues, [1, 0, 0]);
    for name in ["rnbd0", "rnbd1", "rnbd2"] {
        tree::Disks::unmap(&*rig.client, name, false).unwrap();
    }
    assert_eq!(rig.client_device.in_use().qps, 0);
}

#[test]
fn listing_disks_does_not_use_them() {
    // tests [NB-37]
    let rig = Rig::new(14, memory(MIB));
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|threads| {
        for _ in 0..2 {
            threads.spawn(|| {
                while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                    drop(rig.client.disks());
                    drop(tree::Disks::disks(&*rig.client));
                }
            });
        }
        let results: Vec<Result<(), Errno>> = (0..20)
            .map(|_| {
                // A panic here would leave the threads running.
                let mapped = rig.map("disk0", &rig.options("list"));
                mapped.map(drop).map_err(|error| error.errno())?;
                tree::Disks::unmap(&*rig.client, "rnbd0", false)
            })
            .collect();
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        assert_eq!(results, [Ok(()); 20]);
    });
}

#[test]
fn a_server_with_one_chunk_is_slow_and_serves_everything() {
    // tests [NB-60]
    let mut exports = memory(16 * MIB);
    exports.memory("disk1", MIB, 512).unwrap();
    let mut config = ServerConfig::default();
    let default = config.rtrs.geometry;
    let max_io = default.chunk() - default.max_hdr();
    config.rtrs.geometry = Geometry::new(1, max_io, default.max_hdr()).unwrap();
    let rig = Rig::open(15, exports, 2, config, GiveUp::After(SOON_ENOUGH));
    for io_connections in [None, Some(2)] {
        let disk = rig.map("disk0", &MapOptions { io_connections, ..rig.options("one") }).unwrap();
        // Disks are mapped, unmapped and remapped while requests keep the only chunk busy.
        let report = load(&disk, 4, Duration::from_millis(1500), || {
            for _ in 0..5 {
                let other = rig.map("disk1", &rig.options("one")).unwrap();
                sync::write_at(&*other, 0, &[1; 512], Durable::Now).unwrap();
                rig.client.unmap(&other).unwrap();
            }
        });
        assert_eq!(report.failed, 0, "{report:?}");
        assert!(report.verified > 20, "{report:?}");
        rig.client.unmap(&disk).unwrap();
    }
    assert_eq!(rig.server.in_flight(), 0);
    let options = rig.options("cut").outage(Outage::Queue(Duration::from_secs(15)));
    let disk = rig.map("disk0", &options).unwrap();
    let report = load(&disk, 2, Duration::from_millis(3500), || {
        std::thread::sleep(Duration::from_millis(300));
        rig.cut_for("cut", &[0, 1], Duration::from_millis(1200));
    });
    assert_eq!(report.failed, 0, "{report:?}");
    assert!(disk.info().unwrap().stats.resent > 0);
}
