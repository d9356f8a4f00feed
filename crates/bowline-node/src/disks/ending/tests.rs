use std::{
    fs::File,
    net::{IpAddr, SocketAddr},
    os::unix::{
        fs::{FileExt, symlink},
        net::{UnixListener, UnixStream},
    },
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

use bowline_block::{
    Errno, IoOp, Limits,
    backend::{Backend, BackendDone, BackendIo, BackendResult},
    front::nbd::{self, NbdOptions},
    sync::Durable,
};
use bowline_rnbd_driver::{
    client::{Client, MapOptions},
    server::{ExportServer, Exports, ServerConfig},
};
use bowline_roce_driver::{SoftConfig, SoftDevice};
use bowline_rtrs_driver::{Engine, EngineConfig, PORT};
use bowline_testkit::skipped;
use rustix::fs::{MemfdFlags, memfd_create};

use super::*;
use crate::disks::{
    DiskFrontEnds, FrontEndConfig, HandedFrontEnds, Parcel, PreparedFrontEnds, kept,
    noted::NotedDisk,
};

const BYTES: u64 = 1 << 20;

/// Storage that notes what it was asked for, and answers it.
#[derive(Default)]
struct Noting {
    asked: Mutex<Vec<IoOp>>,
    /// Errno of flushes, negative.
    flush: Mutex<i32>,
    /// Holds while writes are not answered.
    writes: Mutex<()>,
}

impl Noting {
    fn asked(&self) -> Vec<IoOp> {
        self.asked.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn count(&self, op: IoOp) -> usize {
        self.asked().into_iter().filter(|asked| *asked == op).count()
    }
}

impl Backend for Noting {
    fn limits(&self) -> Limits {
        Limits { write_cache: true, ..Limits::plain(BYTES) }
    }

    fn submit(&self, io: &mut Vec<BackendIo>, done: &Arc<dyn BackendDone>) {
        for io in io.drain(..) {
            self.asked.lock().unwrap_or_else(PoisonError::into_inner).push(io.op);
            let errno = match io.op {
                IoOp::Write => {
                    drop(self.writes.lock());
                    0
                }
                IoOp::Flush => *self.flush.lock().unwrap_or_else(PoisonError::into_inner),
                _ => 0,
            };
            done.done(&[BackendResult { token: io.token, errno, direct: None }]);
        }
    }

    fn resize(&self) -> std::io::Result<u64> {
        Ok(BYTES)
    }
}

/// A server and a client with front ends, in one process.
struct Rig {
    stores: Vec<Arc<Noting>>,
    server: Arc<ExportServer>,
    client: Arc<Client>,
    disks: Vec<Arc<Disk>>,
    front_ends: Arc<DiskFrontEnds>,
    folder: PathBuf,
}

impl Rig {
    /// Maps this many disks.
    fn new(net: u8, count: usize) -> Self {
        let engine = |host| {
            let ip = IpAddr::from([127, 62, net, host]);
            let config = SoftConfig { addrs: vec![ip], ..SoftConfig::default() };
            let device = Arc::new(SoftDevice::open(config).unwrap());
            (ip, Engine::new(vec![device], EngineConfig::default()).unwrap())
        };
        let stores: Vec<Arc<Noting>> = (0..count).map(|_| Arc::default()).collect();
        let mut exports = Exports::new();
        for (number, store) in stores.iter().enumerate() {
            exports.backend(&format!("disk{number}"), Arc::<Noting>::clone(store)).unwrap();
        }
        let (there, engine_there) = engine(1);
        let places = [SocketAddr::new(there, PORT)];
        let server = ExportServer::open(&engine_there, &places, ServerConfig::default(), exports);
        let (here, engine_here) = engine(11);
        let client = Client::new(engine_here, MapOptions::new("s"));
        let options = MapOptions::new("s").path(Some(here), there);
        let map = |number| client.map_with(&format!("disk{number}"), &options).unwrap();
        let disks = (0..count).map(map).collect();
        let (notices, _) = mpsc::channel();
        let front_ends =
            DiskFrontEnds::new(Arc::clone(&client), FrontEndConfig::default(), notices);
        let name = format!("bowline-ending-{net}-{}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        fs::create_dir(&folder).unwrap();
        Self { stores, server: server.unwrap(), client, disks, front_ends, folder }
    }

    /// Mounts each disk; returns the open files, or `None` where nothing can be mounted.
    fn mounted(&self) -> Option<Vec<File>> {
        let mut files = Vec::new();
        for (number, disk) in self.disks.iter().enumerate() {
            let dir = self.folder.join(number.to_string());
            let config = FrontEndConfig { fuse: Some(dir.clone()), ..FrontEndConfig::default() };
            if let Err(trouble) = self.front_ends.open(disk, &config) {
                skipped::without_fuse(trouble);
                return None;
            }
            let file = File::options().read(true).write(true).open(dir.join(disk.local_name()));
            files.push(file.unwrap());
        }
        Some(files)
    }

    fn write(&self, disk: usize) {
        sync::write_at(&*self.disks[disk], 0, &[7; 4096], Durable::Later).unwrap();
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        self.client.close();
        self.server.close();
        let _ = fs::remove_dir_all(&self.folder);
    }
}

#[test]
fn one_look_through_all_processes_finds_the_users_of_all_files() {
    let proc = std::env::temp_dir().join(format!("bowline-holders-{}", std::process::id()));
    let files = [Path::new("/mnt/a/rnbd0"), Path::new("/mnt/b/rnbd1")];
    for (pid, targets) in [
        ("10", &["/mnt/a/rnbd0", "/mnt/a/rnbd0", "/dev/null"][..]),
        ("11", &["/mnt/b/rnbd1", "/mnt/a/rnbd0"]),
        ("12", &["/mnt/a/rnbd00"]),
        ("self", &["/mnt/a/rnbd0"]),
    ] {
        let fds = proc.join(pid).join("fd");
        fs::create_dir_all(&fds).unwrap();
        for (fd, target) in targets.iter().enumerate() {
            symlink(target, fds.join(fd.to_string())).unwrap();
        }
    }
    let found: Vec<_> = holders(&proc, &files).into_iter().collect();
    assert_eq!(found, [(10, 0), (11, 0), (11, 1)]);
    fs::remove_dir_all(proc).unwrap();
}

#[test]
fn no_write_is_taken_after_the_last_flush() {
    // tests [NB-73]
    let rig = Rig::new(1, 1);
    let Some(files) = rig.mounted() else { return };
    let store = &rig.stores[0];
    let is_over = AtomicBool::new(false);
    thread::scope(|threads| {
        for n in 0..4 {
            let (file, is_over) = (&files[0], &is_over);
            // An error ends no writer: a later write must not be taken either.
            threads.spawn(move || {
                while !is_over.load(Ordering::Relaxed) {
                    let _ = file.write_at(&[n; 4096], u64::from(n) << 12);
                }
            });
        }
        while store.count(IoOp::Write) < 100 {
            thread::yield_now();
        }
        let mut unserved = rig.front_ends.finish();
        rig.front_ends.close(&mut unserved);
        is_over.store(true, Ordering::Relaxed);
        assert!(unserved.outcome().is_ok(), "{unserved:?}");
    });
    let asked = store.asked();
    assert_eq!(asked.last(), Some(&IoOp::Flush), "{} requests", asked.len());
}

#[test]
fn a_request_that_is_taken_at_the_end_and_not_answered_is_reported() {
    // tests [NB-73]
    let rig = Rig::new(6, 1);
    let held = rig.stores[0].writes.lock().unwrap();
    let mut unserved = Unserved::default();
    thread::scope(|threads| {
        let (taken, disk) = (AtomicBool::new(false), &rig.disks[0]);
        unserved.finish(&rig.disks, Instant::now() + Duration::from_millis(300), |_| {
            // A client's request is in its socket when the end begins, and is read only then.
            if !taken.swap(true, Ordering::Relaxed) {
                threads.spawn(|| sync::write_at(&**disk, 0, &[7; 4096], Durable::Later));
            }
            true
        });
        drop(held);
    });
    assert_eq!(unserved.lines, ["rnbd0: requests not answered in time: 1"]);
}

#[test]
fn front_ends_close_at_the_same_time() {
    let rig = Rig::new(2, 6);
    // A file that stays open keeps each mount from ending for two seconds.
    let Some(files) = rig.mounted() else { return };
    let began = Instant::now();
    let mut unserved = rig.front_ends.finish();
    rig.front_ends.close(&mut unserved);
    let took = began.elapsed();
    assert!(took < CLOSE_PATIENCE + FINISH_PATIENCE, "{took:?}");
    assert!(unserved.outcome().is_ok(), "{unserved:?}");
    drop(files);
}

fn prepared(front_ends: FrontEnds) -> PreparedFrontEnds {
    PreparedFrontEnds { front_ends, places: Vec::new() }
}

#[test]
fn a_front_end_that_was_being_opened_at_the_end_is_refused_and_what_it_took_is_flushed() {
    let rig = Rig::new(3, 1);
    let (disk, place) = (&rig.disks[0], rig.folder.join("nbd"));
    let opening = {
        let device: Arc<dyn BlockDevice> = Arc::<Disk>::clone(disk);
        let served = nbd::serve(device, &place, NbdOptions::default()).unwrap();
        FrontEnds { nbd: Some(served), ..FrontEnds::default() }
    };
    rig.front_ends.begin_opening(disk, false).unwrap();
    let client = UnixStream::connect(&place).unwrap();
    rig.write(0);
    let mut unserved = rig.front_ends.finish();
    let trouble = rig.front_ends.begin(disk, prepared(opening)).unwrap_err();
    assert_eq!(trouble.errno, Errno::ENODEV);
    assert!(UnixStream::connect(&place).is_err(), "nobody is served any more");
    assert_eq!(rig.stores[0].asked().last(), Some(&IoOp::Flush));
    rig.front_ends.close(&mut unserved);
    assert!(unserved.outcome().is_ok(), "{unserved:?}");
    drop(client);
}

#[test]
fn what_a_front_end_that_is_refused_could_not_flush_is_reported() {
    let rig = Rig::new(4, 1);
    let disk = &rig.disks[0];
    *rig.stores[0].flush.lock().unwrap() = -5;
    rig.front_ends.begin_opening(disk, false).unwrap();
    rig.write(0);
    let mut unserved = rig.front_ends.finish();
    rig.front_ends.begin(disk, prepared(FrontEnds::default())).unwrap_err();
    rig.client.unmap(disk).unwrap();
    rig.front_ends.close(&mut unserved);
    let line = "rnbd0: what was written was not made durable: Input/output error";
    assert_eq!(unserved.lines, [line]);
}

#[test]
fn what_is_not_flushed_yet_is_known_until_it_is() {
    // tests [NB-73]
    let rig = Rig::new(5, 2);
    rig.write(1);
    let cut = "rnbd1: what was written was not made durable: a second signal cut off the flush";
    assert_eq!(rig.front_ends.unflushed(), [cut]);
    sync::flush(&*rig.disks[1]).unwrap();
    assert!(rig.front_ends.unflushed().is_empty());
    rig.write(0);
    rig.server.close();
    while rig.disks[0].info().unwrap().state == State::Open {
        thread::sleep(POLL_INTERVAL);
    }
    let mut unserved = rig.front_ends.finish();
    rig.front_ends.close(&mut unserved);
    let lost = "rnbd0: what was written was not made durable: its server is not connected";
    assert_eq!(unserved.lines, [lost]);
}

/// Of a hand-over that has failed: what is busy by then is reported, and tried again for a while.
#[test]
fn what_cannot_be_taken_back_stops_nothing_else_and_is_named_at_the_end() {
    // tests [NB-70]
    let rig = Rig::new(6, 1);
    let (disk, name) = (&rig.disks[0], rig.disks[0].local_name());
    let [nbd, machines] = ["nbd", "machines"].map(|name| rig.folder.join(name));
    let config = FrontEndConfig {
        nbd: Some(nbd.clone()),
        vhost_user: Some(machines.clone()),
        ..FrontEndConfig::default()
    };
    let prepare =
        |takes_back| rig.front_ends.prepare(disk, &config, HandedFrontEnds::default(), takes_back);
    let regain = |within| {
        rig.front_ends.regain(disk, within);
        while rig.front_ends.cannot_hand_over(name).is_some() {
            thread::sleep(POLL_INTERVAL);
        }
    };
    let busy = UnixListener::bind(&machines).unwrap();
    // A process to which another one has handed over leaves all to that.
    assert_eq!(prepare(false).unwrap_err().errno, Errno::EADDRINUSE);
    let begun = prepare(true).unwrap();
    rig.front_ends.begin(disk, begun).unwrap();
    UnixStream::connect(&nbd).unwrap();
    assert!(!rig.front_ends.has_lost_all(name));
    // It is free in time.
    thread::scope(|threads| {
        threads.spawn(move || {
            thread::sleep(POLL_INTERVAL);
            drop(busy);
        });
        regain(FINISH_PATIENCE);
    });
    UnixStream::connect(&machines).unwrap();
    let all = rig.front_ends.hand_over(name, FINISH_PATIENCE, &mut || {}).unwrap();

    // It is not.
    let _busy = UnixListener::bind(&machines).unwrap();
    let begun = rig.front_ends.prepare(disk, &config, all, true).unwrap();
    rig.front_ends.begin(disk, begun).unwrap();
    regain(POLL_INTERVAL);
    UnixStream::connect(&nbd).unwrap();
    let mut unserved = rig.front_ends.finish();
    rig.front_ends.close(&mut unserved);
    let place = machines.display();
    let line = format!(
        "{name}: not taken back: vhost-user {place}: cannot listen on {place}: \
         Address already in use (os error 98)"
    );
    assert_eq!(unserved.lines, [line]);
    assert!(unserved.outcome().is_err());
}

#[test]
fn a_disk_of_which_nothing_could_be_taken_back_is_of_no_use() {
    let rig = Rig::new(7, 1);
    let (disk, name) = (&rig.disks[0], rig.disks[0].local_name());
    let nbd = rig.folder.join("nbd");
    let _busy = UnixListener::bind(&nbd).unwrap();
    let config = FrontEndConfig { nbd: Some(nbd.clone()), ..FrontEndConfig::default() };
    let begun = rig.front_ends.prepare(disk, &config, HandedFrontEnds::default(), true).unwrap();
    rig.front_ends.begin(disk, begun).unwrap();
    // Who has the socket keeps it.
    UnixStream::connect(&nbd).unwrap();
    rig.front_ends.regain(disk, FINISH_PATIENCE);
    assert!(rig.front_ends.has_lost_all(name), "nothing of it is tried again");
}

/// A disk of machines, which hand nothing over but that.
#[test]
fn what_a_process_has_not_flushed_the_next_one_flushes() {
    // tests [NB-70] [NB-73]
    let serve = |rig: &Rig, handed: HandedFrontEnds| {
        let (disk, machines) = (&rig.disks[0], rig.folder.join("machines"));
        let config = FrontEndConfig { vhost_user: Some(machines), ..FrontEndConfig::default() };
        let begun = rig.front_ends.prepare(disk, &config, handed, false).unwrap();
        rig.front_ends.begin(disk, begun).unwrap();
    };
    let hand_over = |rig: &Rig| {
        let name = rig.disks[0].local_name();
        let handed = rig.front_ends.hand_over(name, FINISH_PATIENCE, &mut || {}).unwrap();
        // As the next process gets it.
        let state = handed.pack().unwrap().state;
        HandedFrontEnds::unpack(Parcel { state, ..Parcel::default() }).unwrap()
    };
    let former = Rig::new(8, 1);
    serve(&former, HandedFrontEnds::default());
    let nothing = hand_over(&former);
    assert_eq!(nothing.is_unflushed, Some(false), "nobody has written");
    serve(&former, nothing);
    former.write(0);
    sync::flush(&*former.disks[0]).unwrap();
    let flushed = hand_over(&former);
    assert_eq!(flushed.is_unflushed, Some(false));
    serve(&former, flushed);
    former.write(0);
    let written = hand_over(&former);
    assert_eq!(written.is_unflushed, Some(true));
    // The next one may give it on, and else flushes it.
    let next = Rig::new(9, 1);
    serve(&next, written);
    let written = hand_over(&next);
    assert_eq!(written.is_unflushed, Some(true), "nobody has flushed");
    serve(&next, written);
    let mut unserved = next.front_ends.finish();
    next.front_ends.close(&mut unserved);
    assert!(unserved.outcome().is_ok(), "{unserved:?}");
    assert_eq!(next.stores[0].asked(), [IoOp::Flush]);
}

/// One that does not know the note leaves it as it is, whatever it answers.
#[test]
fn a_note_is_not_believed_that_another_version_may_have_had() {
    // tests [NB-72]
    let rig = Rig::new(11, 1);
    let (disk, name) = (&rig.disks[0], rig.disks[0].local_name());
    let nbd = rig.folder.join("nbd");
    let config = FrontEndConfig { nbd: Some(nbd.clone()), ..FrontEndConfig::default() };
    let file = Arc::new(memfd_create("note", MemfdFlags::CLOEXEC).unwrap());
    rustix::io::pwrite(&file, &[0; 16], 0).unwrap();
    kept::note_unflushed(&file, false);
    let serve = |nbd, is_unflushed| {
        let kept = Some(Arc::clone(&file));
        let handed = HandedFrontEnds { nbd: Some(nbd), kept, is_unflushed, ..Default::default() };
        let begun = rig.front_ends.prepare(disk, &config, handed, false).unwrap();
        rig.front_ends.begin(disk, begun).unwrap();
    };
    let listener = Arc::new(UnixListener::bind(&nbd).unwrap());
    serve(nbd::Handed { listener, clients: Vec::new() }, Some(false));
    assert!(!kept::may_be_unflushed(&file), "its former process knew it");
    let handed = rig.front_ends.hand_over(name, FINISH_PATIENCE, &mut || {}).unwrap();
    assert!(kept::may_be_unflushed(&file), "the next one may be killed, and not know it");
    // One that has it from such a version, which says nothing else either.
    kept::note_unflushed(&file, false);
    serve(handed.nbd.unwrap(), None);
    assert!(kept::may_be_unflushed(&file));
    rig.front_ends.note_durable(name);
    assert!(kept::may_be_unflushed(&file), "until this one has flushed");
    sync::flush(&*rig.disks[0]).unwrap();
    rig.front_ends.note_durable(name);
    assert!(!kept::may_be_unflushed(&file));
}

/// For the next process of a service, should this one be killed.
#[test]
fn a_change_is_noted_until_it_is_durable() {
    // tests [NB-72]
    let rig = Rig::new(10, 1);
    let disk = &rig.disks[0];
    let file = memfd_create("note", MemfdFlags::CLOEXEC).unwrap();
    rustix::io::pwrite(&file, &[0; 16], 0).unwrap();
    let file = Arc::new(file);
    kept::note_unflushed(&file, false);
    let noted = NotedDisk::new(disk, Some(&file));
    let withdrawn = |is_inherited| {
        noted.withdraw_if(|| is_durable(disk, is_inherited));
        !kept::may_be_unflushed(&file)
    };
    sync::read_at(&*noted, 0, &mut [0; 4096]).unwrap();
    assert!(withdrawn(false));
    sync::write_at(&*noted, 0, &[7; 4096], Durable::Later).unwrap();
    assert!(!withdrawn(false));
    sync::flush(&*noted).unwrap();
    assert!(withdrawn(false));
    sync::write_at(&*noted, 0, &[7; 4096], Durable::Now).unwrap();
    assert!(kept::may_be_unflushed(&file), "it is not known before the answer");
    assert!(withdrawn(false));
    // Another process has that file next.
    sync::write_at(&*noted, 0, &[7; 4096], Durable::Later).unwrap();
    drop(noted);
    let next = NotedDisk::new(disk, Some(&file));
    next.withdraw_if(|| false);
    assert!(kept::may_be_unflushed(&file));
    next.withdraw_if(|| true);
    assert!(!kept::may_be_unflushed(&file));
    // A new file says nothing yet.
    let other = Arc::new(memfd_create("note", MemfdFlags::CLOEXEC).unwrap());
    next.note_in(&other);
    sync::write_at(&*next, 0, &[7; 4096], Durable::Later).unwrap();
    next.withdraw_if(|| true);
    assert!(!kept::may_be_unflushed(&other) && !kept::may_be_unflushed(&file));
}
