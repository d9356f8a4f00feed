//! Open devices of a server: all are shown and can be closed, however files and names change below.

mod common;

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use bowline_block::sync::{self, Durable};
use bowline_block::{BlockDevice as _, Errno};
use bowline_rnbd_driver::server::Moved;
use bowline_rnbd_driver::tree::{self, Exports as _};
use bowline_rnbd_driver::{Disk, Exports, FileOptions, MapOptions};
use bowline_wire::rnbd::Access;
use common::Rig;

const MIB: u64 = 1 << 20;

/// A directory of the test, gone at its end.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        let dir = std::env::temp_dir().join(format!("bowline-opens-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        Self(dir.canonicalize().unwrap())
    }

    fn file(&self, name: &str, bytes: u64) -> PathBuf {
        let path = self.0.join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::File::create(&path).unwrap().set_len(bytes).unwrap();
        path
    }

    /// Puts another file in the place of one.
    fn replace(&self, name: &str, bytes: u64) {
        let new = self.file("new", bytes);
        std::fs::rename(new, self.0.join(name)).unwrap();
    }

    fn exports(&self) -> Exports {
        let mut exports = Exports::new();
        exports.directory(&self.0, FileOptions::default()).unwrap();
        exports
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // The system clears its temporary files where this fails.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// The rows of the control tree: device, bytes, session and mapping path.
fn shown(rig: &Rig) -> Vec<(String, u64, String, String)> {
    let all = rig.server.exports();
    // Directories have the names without slashes [NB-36].
    let mut places: Vec<String> = all.iter().map(|export| export.name.replace('/', "!")).collect();
    places.sort();
    places.dedup();
    assert_eq!(places.len(), all.len(), "several have one place: {all:?}");
    let each = all.iter().flat_map(|export| {
        export.opens.iter().map(|open| {
            (export.name.clone(), export.bytes, open.session.clone(), open.mapping_path.clone())
        })
    });
    each.collect()
}

fn row(device: &str, mib: u64, session: &str, path: &str) -> (String, u64, String, String) {
    (device.to_owned(), mib * MIB, session.to_owned(), path.to_owned())
}

fn force_close(rig: &Rig, device: &str, session: &str) -> Result<(), Errno> {
    tree::Exports::force_close(&*rig.server, device, session)
}

fn writes(disk: &Disk) -> Result<(), Errno> {
    sync::write_at(disk, 0, &[1; 512], Durable::Later)
}

#[test]
fn a_file_that_took_the_name_of_an_open_one_is_another_device() {
    // tests [NB-40] [NB-21]
    let scratch = Scratch::new("replaced");
    scratch.file("a.img", MIB);
    let rig = Rig::new(91, scratch.exports());
    let [first, second] = ["s1", "s2"].map(|session| rig.options(session));
    let old = rig.map("a.img", &first).unwrap();
    scratch.replace("a.img", 2 * MIB);
    let new = rig.map("a.img", &second).unwrap();
    let all = [row("a.img", 1, "s1", "a.img"), row("a.img~2", 2, "s2", "a.img")];
    assert_eq!(shown(&rig), all);
    writes(&old).unwrap();
    writes(&new).unwrap();
    assert_eq!(force_close(&rig, "a.img", "s2"), Err(Errno::ENOENT));
    force_close(&rig, "a.img~2", "s2").unwrap();
    assert_eq!(writes(&new), Err(Errno::EIO));
    writes(&old).unwrap();
    assert_eq!(shown(&rig), all[..1]);
    force_close(&rig, "a.img", "s1").unwrap();
    assert_eq!(writes(&old), Err(Errno::EIO));
    assert!(rig.server.opens().is_empty());
    // The name is free.
    new.remap().unwrap();
    assert_eq!(shown(&rig), [row("a.img", 2, "s2", "a.img")]);
}

#[test]
fn one_session_has_several_files_of_one_name_open() {
    // tests [NB-40] [NB-21]
    let scratch = Scratch::new("several");
    scratch.file("a.img", MIB);
    // A file with the name that the tree would give the device.
    scratch.file("a.img~2", 4 * MIB);
    let rig = Rig::new(92, scratch.exports());
    let options = rig.options("s1");
    let names = ["a.img", "/a.img", "a.img~2", "//a.img"];
    let disks = [1, 2, 4, 3].into_iter().zip(names).map(|(mib, name)| {
        if name.ends_with("/a.img") {
            scratch.replace("a.img", mib * MIB);
        }
        rig.map(name, &options).unwrap()
    });
    let disks: Vec<_> = disks.collect();
    let all = [
        row("a.img", 1, "s1", "a.img"),
        row("a.img~2", 2, "s1", "/a.img"),
        row("a.img~2~2", 4, "s1", "a.img~2"),
        row("a.img~3", 3, "s1", "//a.img"),
    ];
    assert_eq!(shown(&rig), all);
    for (at, (device, ..)) in all.iter().enumerate() {
        force_close(&rig, device, "s1").unwrap();
        assert_eq!(shown(&rig), all[at + 1..]);
    }
    assert!(disks.iter().all(|disk| writes(disk) == Err(Errno::EIO)));
}

#[test]
fn a_file_does_not_take_the_place_of_a_named_export() {
    // tests [NB-40] [NB-21]: whoever comes first
    let scratch = Scratch::new("beside");
    scratch.file("a.img", 2 * MIB);
    scratch.file("in/b.img", 4 * MIB);
    for (net, names) in [(93, ["/a.img", "a.img"]), (94, ["a.img", "/a.img"])] {
        let mut exports = scratch.exports();
        exports.memory("a.img", MIB, 512).unwrap();
        // Its directory in the tree would have the same name.
        exports.memory("in!b.img", 3 * MIB, 512).unwrap();
        let rig = Rig::new(net, exports);
        let session = |name| if name == "a.img" { "honest" } else { "hidden" };
        let disks = names.map(|name| rig.map(name, &rig.options(session(name))).unwrap());
        let both = ["in/b.img", "in!b.img"].map(|name| rig.map(name, &rig.options("s3")).unwrap());
        let all = [
            row("a.img", 1, "honest", "a.img"),
            row("a.img~2", 2, "hidden", "/a.img"),
            row("in!b.img", 3, "s3", "in!b.img"),
            row("in/b.img~2", 4, "s3", "in/b.img"),
        ];
        assert_eq!(shown(&rig), all);
        for (device, _, session, _) in &all {
            force_close(&rig, device, session).unwrap();
        }
        assert!(disks.iter().chain(&both).all(|disk| writes(disk) == Err(Errno::EIO)));
        assert_eq!(shown(&rig), []);
    }
}

#[test]
fn a_device_keeps_its_name_while_it_is_open() {
    // tests [NB-40] [NB-21]: also when a writer opens a store that was read-only
    let scratch = Scratch::new("keeps");
    let path = scratch.file("a.img", MIB);
    let mut exports = Exports::new();
    for (name, read_only) in [("gold", true), ("work", false)] {
        let options = FileOptions { read_only, ..FileOptions::default() };
        exports.file(name, &path, options).unwrap();
    }
    let rig = Rig::new(96, exports);
    let reader = MapOptions { access: Access::Ro, ..rig.options("s1") };
    let reader = rig.map("gold", &reader).unwrap();
    let writer = rig.map("work", &rig.options("s2")).unwrap();
    assert_eq!(shown(&rig), [row("gold", 1, "s1", "gold"), row("gold", 1, "s2", "work")]);
    force_close(&rig, "gold", "s2").unwrap();
    assert_eq!(writes(&writer), Err(Errno::EIO));
    sync::read_at(&*reader, 0, &mut [0; 512]).unwrap();
    assert_eq!(shown(&rig), [row("gold", 1, "s1", "gold")]);
}

/// Returns how many descriptors of this process refer to a file, under any name.
fn descriptors(path: &Path) -> usize {
    let file = std::fs::metadata(path).unwrap();
    let own = std::fs::read_dir("/proc/self/fd").unwrap();
    // Descriptors of other tests come and go.
    let all = own.filter_map(|entry| std::fs::metadata(entry.unwrap().path()).ok());
    all.filter(|fd| (fd.dev(), fd.ino()) == (file.dev(), file.ino())).count()
}

#[test]
fn a_file_is_opened_once_for_all_sessions() {
    // tests [NB-58]
    let scratch = Scratch::new("once");
    let below = scratch.file("below", MIB);
    let named = scratch.file("named", MIB);
    std::fs::hard_link(&below, scratch.0.join("link")).unwrap();
    let mut exports = scratch.exports();
    exports.file("disk0", &named, FileOptions::default()).unwrap();
    let rig = Rig::new(95, exports);
    assert_eq!([&below, &named].map(|path| descriptors(path)), [0, 1]);
    let map = |name: &str, session: &str, access| {
        rig.map(name, &MapOptions { access, ..rig.options(session) }).unwrap()
    };
    let disks = [
        map("below", "s1", Access::Rw),
        map("below", "s2", Access::Migration),
        map("link", "s3", Access::Ro),
        map("disk0", "s1", Access::Rw),
        map("named", "s2", Access::Migration),
    ];
    assert_eq!(rig.server.opens().len(), disks.len());
    assert_eq!([&below, &named].map(|path| descriptors(path)), [1, 1]);
    for disk in &disks[..2] {
        rig.client.unmap(disk).unwrap();
        assert_eq!(descriptors(&below), 1);
    }
    for disk in &disks[2..] {
        rig.client.unmap(disk).unwrap();
    }
    // A released file is closed a little later; a named export stays open.
    rig.until("the file is closed", || descriptors(&below) == 0);
    assert_eq!(descriptors(&named), 1);
}

#[test]
fn a_file_moved_from_its_path_is_reported_and_still_served() {
    let scratch = Scratch::new("moved");
    let [a, b] = ["a", "b"].map(|name| scratch.file(name, MIB));
    let mut exports = Exports::new();
    exports.memory("memory", MIB, 512).unwrap();
    exports.file("a", &a, FileOptions::default()).unwrap();
    exports.file("b", &b, FileOptions::default()).unwrap();
    let rig = Rig::new(97, exports);
    let disk = rig.map("a", &rig.options("s1")).unwrap();
    sync::write_at(&*disk, 0, &[7; 4096], Durable::Later).unwrap();
    assert_eq!(rig.server.moved(), []);
    scratch.replace("a", MIB);
    std::fs::remove_file(&b).unwrap();
    let moved = |export: &str, path: &Path, missing| {
        let (export, path) = (export.to_owned(), path.to_owned());
        Moved { export, path, missing }
    };
    let gone = moved("b", &b, Some(Errno::ENOENT));
    assert_eq!(rig.server.moved(), [moved("a", &a, None), gone.clone()]);
    let again = MapOptions { access: Access::Ro, ..rig.options("s2") };
    let mut out = [0; 4096];
    sync::read_at(&*rig.map("a", &again).unwrap(), 0, &mut out).unwrap();
    assert_eq!(out, [7; 4096]);
    std::fs::remove_file(&a).unwrap();
    std::fs::create_dir(&a).unwrap();
    assert_eq!(rig.server.moved(), [moved("a", &a, None), gone]);
}

#[test]
fn exports_come_and_go_while_clients_are_served() {
    // tests [NB-64]
    let mut exports = Exports::new();
    exports.memory("kept", MIB, 512).unwrap();
    let rig = Rig::new(239, exports);
    let kept = rig.map("kept", &rig.options("s1")).unwrap();
    let missing = rig.map("new", &rig.options("s1")).unwrap_err();
    assert_eq!(missing.errno(), Errno::ENOENT);
    rig.server.add(|exports| exports.memory("new", MIB, 512)).unwrap();
    let again = rig.server.add(|exports| exports.memory("new", MIB, 512)).unwrap_err();
    assert_eq!(again.errno(), Errno::EEXIST);
    let new = rig.map("new", &rig.options("s1")).unwrap();
    assert_eq!(writes(&new), Ok(()));
    let busy = rig.server.remove("new", false).unwrap_err();
    assert_eq!((busy.errno(), writes(&new)), (Errno::EBUSY, Ok(())));
    rig.server.remove("new", true).unwrap();
    assert!(writes(&new).is_err());
    rig.client.unmap(&new).unwrap();
    assert_eq!(rig.map("new", &rig.options("s1")).unwrap_err().errno(), Errno::ENOENT);
    assert_eq!(rig.server.remove("new", true).unwrap_err().errno(), Errno::ENOENT);
    // The name is free for something else, and what was closed is not open.
    rig.server.add(|exports| exports.memory("new", 2 * MIB, 512)).unwrap();
    let new = rig.map("new", &rig.options("s1")).unwrap();
    assert_eq!(new.limits().bytes, 2 * MIB);
    rig.client.unmap(&new).unwrap();
    rig.server.remove("new", false).unwrap();
    assert_eq!(writes(&kept), Ok(()));
    assert_eq!(shown(&rig), [row("kept", 1, "s1", "kept")]);
}

#[test]
fn a_server_that_does_not_answer_delays_no_other() {
    let mut exports = Exports::new();
    exports.memory("disk0", MIB, 512).unwrap();
    let rig = Rig::new(238, exports);
    // A socket that nobody reads.
    let socket = std::net::UdpSocket::bind("127.80.238.201:4791").unwrap();
    let silent = socket.local_addr().unwrap().ip();
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| {
            let options = MapOptions::new("silent").path(Some(rig.client_ip(0)), silent);
            rig.map("disk0", &options).unwrap_err().errno()
        });
        // Both are mapped and unmapped while the other one waits for half a minute.
        for number in [None, Some(7)] {
            let options = MapOptions { number, ..rig.options("s1") };
            let disk = rig.map("disk0", &options).unwrap();
            assert_eq!(disk.local_name(), format!("rnbd{}", number.unwrap_or(0)));
            rig.client.unmap(&disk).unwrap();
        }
        assert!(!waits.is_finished());
        rig.client_engine().close();
        assert_ne!(waits.join().unwrap(), Errno(0));
    });
}
