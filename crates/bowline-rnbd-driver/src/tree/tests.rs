//! The tree against files captured from Linux 6.12.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use bowline_ctl::{Errno, Refused, Sys, Tree};
use bowline_rnbd::{Failures, Latencies};
use bowline_wire::rnbd::Access;

use super::*;

const CLIENT: &str = include_str!("../../testdata/sysfs-client.txt");
const SERVER: &str = include_str!("../../testdata/sysfs-server.txt");

#[derive(Default)]
struct Fake {
    /// How often all disks were looked at.
    looks: AtomicUsize,
    done: Mutex<Vec<String>>,
}

impl Fake {
    fn did(&self, what: String) {
        self.done.lock().unwrap().push(what);
    }
}

impl Disks for Fake {
    fn map(&self, spec: &MapSpec) -> Result<(), Errno> {
        self.did(format!("map {spec}"));
        Err(Errno::EEXIST)
    }

    fn disks(&self) -> Vec<DiskInfo> {
        self.looks.fetch_add(1, Ordering::Relaxed);
        vec![DiskInfo {
            name: "rnbd0".to_owned(),
            mapping_path: "/dev/ram0".to_owned(),
            session: "s1".to_owned(),
            access: Access::Rw,
            state: DiskState::Open,
            poll_queues: 0,
            bytes: 1 << 20,
            traffic: Traffic {
                reads: 3,
                read_bytes: 4096,
                write_bytes: 1024,
                ..Traffic::default()
            },
            failures: Failures::default(),
            queue: Queue { in_flight: 2, waiting: 1 },
            read_latencies: Latencies::default(),
            write_latencies: Latencies::default(),
        }]
    }

    fn unmap(&self, disk: &str, force: bool) -> Result<(), Errno> {
        self.did(format!("unmap {disk} {force}"));
        if force { Ok(()) } else { Err(Errno::EBUSY) }
    }

    fn resize(&self, disk: &str, sectors: u64, force: bool) -> Result<(), Refused> {
        let force = if force { " force" } else { "" };
        self.did(format!("resize {disk} {sectors}{force}"));
        Ok(())
    }

    fn remap(&self, disk: &str) -> Result<(), Errno> {
        self.did(format!("remap {disk}"));
        Err(Errno::EALREADY)
    }
}

impl Exports for Fake {
    fn exports(&self) -> Vec<ExportInfo> {
        let export = |name: &str, opens| ExportInfo {
            name: name.to_owned(),
            bytes: 1 << 30,
            read_only: false,
            traffic: Traffic::default(),
            failures: Failures::default(),
            opens,
        };
        let open = OpenInfo {
            session: "s1".to_owned(),
            access: Access::Rw,
            mapping_path: "/dev/ram0".to_owned(),
        };
        vec![export("images/idle", Vec::new()), export("ram0", vec![open])]
    }

    fn force_close(&self, export: &str, session: &str) -> Result<(), Errno> {
        self.did(format!("close {export} {session}"));
        Ok(())
    }
}

impl ExportCommands for Fake {
    fn export(&self, text: &str) -> Result<(), Errno> {
        self.did(format!("export {text}"));
        Ok(())
    }

    fn unexport(&self, export: &str, force: bool) -> Result<(), Errno> {
        self.did(format!("unexport {export} {force}"));
        if force { Ok(()) } else { Err(Errno::EBUSY) }
    }
}

#[test]
fn commands_add_exports_and_take_them_away() {
    // tests [NB-64]
    let fake = Arc::<Fake>::default();
    let exports: Arc<dyn Exports> = Arc::<Fake>::clone(&fake);
    let commands: Arc<dyn ExportCommands> = Arc::<Fake>::clone(&fake);
    let tree = Sys::new().class("rnbd-server", server_node(exports, Some(commands))).tree();
    let write =
        |file: &str, value: &str| tree.write(&format!("/class/rnbd-server/ctl/{file}"), value);
    assert_eq!(write("export_device", "name=a file=/srv/a\n"), Ok(()));
    assert_eq!(write("unexport_device", "a b normal"), Err(Errno::EBUSY));
    assert_eq!(write("unexport_device", "a b force\n"), Ok(()));
    for text in ["", "a", "a 1"] {
        assert_eq!(write("unexport_device", text), Err(Errno::EINVAL), "{text}");
    }
    let wanted = ["export name=a file=/srv/a", "unexport a b false", "unexport a b true"];
    assert_eq!(*fake.done.lock().unwrap(), wanted);
    let read = |file: &str| tree.read(&format!("/class/rnbd-server/ctl/{file}")).unwrap();
    assert!(read("export_device").to_string().starts_with("Usage: echo \"name="));
    assert!(read("unexport_device").to_string().starts_with("Usage: "));
}

fn tree(fake: &Arc<Fake>) -> Tree {
    let disks: Arc<dyn Disks> = Arc::<Fake>::clone(fake);
    let exports: Arc<dyn Exports> = Arc::<Fake>::clone(fake);
    let blocks = |name: &str, node: Arc<dyn Node>| (name.to_owned(), node);
    let both = {
        let (disks, exports) = (disks_node(Arc::clone(&disks)), exports_node(Arc::clone(&exports)));
        DynamicDir(move || {
            disks.dirs().into_iter().chain(exports.dirs()).map(|(n, d)| blocks(&n, d)).collect()
        })
    };
    let parameters = Parameters { dev_search_path: "/".to_owned(), port_nr: 1234 };
    Sys::new()
        .class("rnbd-client", client_node(disks))
        .class("rnbd-server", server_node(exports, None))
        .blocks(Arc::new(both))
        .module("rnbd_server", Arc::new(parameters))
        .tree()
}

/// Returns a section of a capture, as [`Tree::listing`] prints it.
fn section(capture: &str, name: &str) -> String {
    let start = format!("== /sys{name}\n");
    let lines = capture.split_once(&start).unwrap().1.lines();
    let lines = lines.take_while(|line| !line.starts_with("== "));
    lines.map(|line| line.replace(" /sys/", " /") + "\n").collect()
}

#[test]
fn files_modes_links_and_texts_are_those_of_linux() {
    // tests [NB-34] [NB-36] [NB-37] [NB-39] [NB-40]
    let tree = tree(&Arc::default());
    for (capture, path) in [
        (CLIENT, "/class/rnbd-client/ctl"),
        (CLIENT, "/block/rnbd0/rnbd"),
        (SERVER, "/class/rnbd-server/ctl"),
        (SERVER, "/module/rnbd_server/parameters"),
    ] {
        assert_eq!(tree.listing(path).unwrap(), section(capture, path), "{path}");
    }
}

#[test]
fn a_look_at_all_disks_asks_for_them_once() {
    let fake = Arc::<Fake>::default();
    let tree = tree(&fake);
    let all = tree.dump("/").unwrap().to_string();
    assert!(all.contains("\"nr_poll_queues\"") && all.contains("\"last_failure\""), "{all}");
    // For the folder of disks, and for links to them.
    let looks = fake.looks.load(Ordering::Relaxed);
    assert!(looks <= 4, "{looks} looks");
}

#[test]
fn what_only_bowline_tells_is_in_a_folder_of_its_own() {
    // tests [NB-67]
    let tree = tree(&Arc::default());
    let read = |path: &str| tree.read(path).unwrap().to_string();
    assert_eq!(read("/block/rnbd0/bowline/queue"), "2 1\n");
    assert_eq!(read("/block/rnbd0/bowline/last_failure"), "none\n");
    assert_eq!(read("/block/rnbd0/bowline/read_latencies"), "\n");
    assert_eq!(read("/block/ram0/bowline/failed_requests"), "0\n");
    assert_eq!(tree.read("/block/ram0/bowline/queue"), Err(Errno::ENOENT));
}

#[test]
fn links_lead_to_block_devices() {
    // tests [NB-36] [NB-40] [NB-44]
    let tree = tree(&Arc::default());
    let read = |path: &str| tree.read(path).unwrap().to_string();
    assert_eq!(read("/class/rnbd-client/ctl/devices/!dev!ram0@s1/size"), "2048\n");
    assert_eq!(read("/class/rnbd-server/ctl/devices/ram0/block_dev/size"), "2097152\n");
    assert_eq!(read("/block/images!idle/ro"), "0\n");
    let stat = read("/block/rnbd0/stat");
    let fields: Vec<&str> = stat.split_ascii_whitespace().collect();
    assert_eq!((fields.len(), fields[2], fields[6]), (17, "8", "2"));
}

#[test]
fn commands_reach_disks_and_exports_and_mistakes_do_not() {
    // tests [NB-34] [NB-35] [NB-37] [NB-40] [NB-21]
    let fake = Arc::<Fake>::default();
    let tree = tree(&fake);
    let map = "sessname=s1 device_path=/dev/ram0 path=ip:10.99.0.1";
    let ctl = "/class/rnbd-client/ctl/map_device";
    assert_eq!(tree.write(ctl, &format!(" {map}\n")), Err(Errno::EEXIST));
    assert_eq!(tree.write(ctl, "sessname=s1"), Err(Errno::EINVAL));
    let disk = |name: &str, value: &str| tree.write(&format!("/block/rnbd0/rnbd/{name}"), value);
    assert_eq!(disk("unmap_device", "normal\n"), Err(Errno::EBUSY));
    assert_eq!(disk("unmap_device", "force"), Ok(()));
    assert_eq!(disk("unmap_device", "1"), Err(Errno::EINVAL));
    assert_eq!(disk("resize", "0x800"), Ok(()));
    assert_eq!(disk("resize", "512 force"), Ok(()));
    for wrong in ["1k", "force", "512 normal", "512 force force", "512force"] {
        assert_eq!(disk("resize", wrong), Err(Errno::EINVAL), "{wrong}");
    }
    assert_eq!(disk("remap_device", "1\n"), Err(Errno::EALREADY));
    assert_eq!(disk("remap_device", "2"), Err(Errno::EINVAL));
    let open = "/class/rnbd-server/ctl/devices/ram0/sessions/s1/force_close";
    assert_eq!(tree.write(open, "1"), Ok(()));
    assert_eq!(tree.write(open, "0"), Err(Errno::EINVAL));
    for side in ["client", "server"] {
        assert_eq!(
            tree.write(&format!("/class/rnbd-{side}/ctl/uevent"), "add"),
            Err(Errno::EINVAL),
            "{side}"
        );
    }
    assert_eq!(
        *fake.done.lock().unwrap(),
        [
            &format!("map {map}"),
            "unmap rnbd0 false",
            "unmap rnbd0 true",
            "resize rnbd0 2048",
            "resize rnbd0 512 force",
            "remap rnbd0",
            "close ram0 s1",
        ]
    );
}
