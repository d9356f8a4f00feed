//! Commands of `bowline rnbd` on trees of files: one captured from a kernel, and those that bowline
//! mounts, also over /sys, for scripts.

use std::{
    fs,
    path::PathBuf,
    process::{Command, Stdio},
};

use serde_json::Value;

use crate::support::{Done, Folder, Running, run, start};
use bowline_testkit::skipped;

/// Files of Linux 6.12, both sides, as `path` and `| text` lines.
const KERNEL: [&str; 2] = [
    include_str!("../../../bowline-rnbd-driver/testdata/sysfs-client.txt"),
    include_str!("../../../bowline-rnbd-driver/testdata/sysfs-server.txt"),
];
const FIRST: &str = "ip:10.99.0.11@ip:10.99.0.12";
const SECOND: &str = "ip:10.99.1.11@ip:10.99.1.12";

/// Lays the captured files out below a folder; returns where.
fn kernel(folder: &Folder) -> PathBuf {
    let root = folder.path().join("sys");
    let mut file: Option<(PathBuf, String)> = None;
    let keep = |file: &mut Option<(PathBuf, String)>| {
        if let Some((path, text)) = file.take() {
            fs::create_dir_all(path.parent().expect("a folder")).expect("folders");
            fs::write(path, text).expect("a file");
        }
    };
    for line in KERNEL.iter().flat_map(|text| text.lines()) {
        if let Some(text) = line.strip_prefix("        | ") {
            let (_, all) = file.as_mut().expect("a line of a file");
            *all += &format!("{text}\n");
            continue;
        }
        keep(&mut file);
        match line.split_once(" /sys/") {
            Some((mode, path)) if mode.starts_with('-') => {
                file = Some((root.join(path), String::new()));
            }
            // Links lead up, or to devices that have no files here.
            _ => {}
        }
    }
    keep(&mut file);
    let disk = root.join("block/rnbd0");
    fs::write(disk.join("stat"), "3 0 8 0 1 0 2 0 0 0 0 0 0 0 0 0 0\n").expect("a file");
    root
}

struct Tree<'a> {
    folder: &'a Folder,
    root: PathBuf,
}

impl Tree<'_> {
    fn run(&self, words: &str) -> Done {
        let root = self.root.to_str().expect("a plain path");
        let words: Vec<&str> = words.split_whitespace().collect();
        run(self.folder, &[&["rnbd", "--sysfs", root], &words[..]].concat())
    }

    fn out(&self, words: &str) -> String {
        self.run(words).exits(0).out
    }

    /// Asserts what is printed for each write, and with -d what is then in the last of the files.
    #[track_caller]
    fn writes(&self, words: &str, writes: &[(&str, &str)]) {
        let root = self.root.display();
        let said: String = writes
            .iter()
            .map(|(value, path)| format!("echo '{value}' > {root}/{path}\n"))
            .collect();
        assert_eq!(self.out(&format!("-s {words}")), said);
        assert_eq!(self.out(&format!("-d {words}")), said);
        let (value, path) = writes.last().expect("a write");
        assert_eq!(fs::read_to_string(self.root.join(path)).expect("a file"), *value);
    }
}

#[test]
fn a_kernels_files_are_shown() {
    // tests [NB-41] [NB-43] [NB-44]
    let folder = Folder::new();
    let tree = Tree { folder: &folder, root: kernel(&folder) };
    assert_eq!(
        tree.out("client device list +rx_sect,tx_sect"),
        "Session  Mapping Path  Device  State  Access Mode  RX      TX      \n\
         s1       /dev/ram0     rnbd0   open   rw           4.000K  1.000K  \n"
            .replace("RX      TX      ", "    RX      TX  ")
    );
    assert_eq!(tree.out("server device list noheaders"), "s1  /dev/ram0  ram0  rw  \n");
    assert_eq!(
        tree.out("client session list notree nototals"),
        "Session name  State      PS  MP       TX       RX  Reconnects  \n\
         s1            connected  UU  MI  16.008M  16.020M           0  \n"
    );
    let session = tree.out("client session show s1");
    assert!(session.contains(&format!("─ rxe0 1 {FIRST}  \n")), "{session}");
    assert!(session.contains(&format!("─ rxe1 1 {SECOND}  \n")), "{session}");
    assert_eq!(
        tree.out(&format!("client path show {FIRST} csv pathname,hca_name,hca_port,rx_bytes")),
        format!("pathname,hca_name,hca_port,rx_bytes\n\"{FIRST}\",\"rxe0\",1,16798184\n")
    );
    // Both sides, as both directories are there; 6.12 counts no requests in flight for a server.
    let all: Value = serde_json::from_str(&tree.out("session list all json")).expect("json");
    assert_eq!(all["outgoing sessions"][0]["act_path_cnt"], 2);
    assert_eq!(all["incoming sessions"][0]["path_cnt"], 2);
    assert_eq!(all["incoming sessions"][0]["inflights"], 0);
    assert_eq!(all["incoming sessions"][0]["hostname"], Value::Null);
    fs::write(tree.root.join("class/rtrs-server/s1/clt_hostname"), "alpha\n").expect("a file");
    assert!(tree.out("server session show alpha").contains("Hostname      alpha\n"));
    assert_eq!(well_formed(&tree.out("dump xml")), Ok(1 + 6 + 8));
    tree.run("show nothing").exits(254).complains(&["nothing"]);
    tree.run("list nonsense").exits(2).complains(&["nonsense"]);
}

/// Returns how many elements have elements in them, the outermost too.
fn well_formed(xml: &str) -> Result<usize, String> {
    let mut open: Vec<(&str, bool)> = Vec::new();
    let mut nested = 0;
    for part in xml.split('<').skip(1) {
        let (tag, text) = part.split_once('>').ok_or("a tag without an end")?;
        if text.contains('&') || tag.contains([' ', '"']) {
            return Err(format!("{part:?}"));
        }
        match tag.strip_prefix('/') {
            None => {
                if let Some((_, full)) = open.last_mut() {
                    nested += usize::from(!std::mem::replace(full, true));
                }
                open.push((tag, false));
            }
            Some(tag) if open.pop().is_some_and(|(name, _)| name == tag) => {}
            Some(tag) => return Err(format!("{tag} ends where it was not open")),
        }
    }
    if open.is_empty() { Ok(nested) } else { Err(format!("{open:?} without an end")) }
}

#[test]
fn a_kernels_files_are_written_as_the_original_does() {
    // tests [NB-42]
    let folder = Folder::new();
    let tree = Tree { folder: &folder, root: kernel(&folder) };
    let ctl = "class/rnbd-client/ctl/map_device";
    let disk = |name: &str| format!("block/rnbd0/rnbd/{name}");
    let session = "class/rtrs-client/s1";
    let path = |path: &str, name: &str| format!("{session}/paths/{path}/{name}");
    tree.writes(
        "map /dev/ram1 from beta ip:10.1.0.1@ip:10.1.0.2 10.2.0.2 ro",
        &[(
            "sessname=beta device_path=/dev/ram1 path=ip:10.1.0.1@ip:10.1.0.2 path=ip:10.2.0.2 access_mode=ro",
            ctl,
        )],
    );
    tree.writes("map d from s1", &[("sessname=s1 device_path=d", ctl)]);
    tree.writes(
        "map d from x gid:fe80::1@gid:fe80::2",
        &[("sessname=x device_path=d path=gid:fe80::1@gid:fe80::2", ctl)],
    );
    let host = fs::read_to_string("/proc/sys/kernel/hostname").expect("a name");
    let host = host.trim().split('.').next().expect("a name");
    tree.writes(
        "map d from 127.1.0.2",
        &[(&format!("sessname={host}_127-0-0-1@127-1-0-2 device_path=d path=ip:127.1.0.2"), ctl)],
    );
    tree.writes("resize rnbd0 3 M", &[("6144", &disk("resize"))]);
    tree.writes("unmap /dev/ram0", &[("normal", &disk("unmap_device"))]);
    tree.writes("unmap rnbd0 force", &[("force", &disk("unmap_device"))]);
    tree.writes("remap rnbd0", &[("1", &disk("remap_device"))]);
    tree.writes(
        "path add s1 10.3.0.1,10.3.0.2",
        &[("ip:10.3.0.1@ip:10.3.0.2", &format!("{session}/add_path"))],
    );
    tree.writes(&format!("delete {FIRST}"), &[("1", &path(FIRST, "remove_path"))]);
    tree.writes(
        &format!("readd s1 {SECOND}"),
        &[("1", &path(SECOND, "remove_path")), (SECOND, &format!("{session}/add_path"))],
    );
    tree.writes(&format!("client path disconnect {SECOND}"), &[("1", &path(SECOND, "disconnect"))]);
    fs::write(tree.root.join(path(SECOND, "state")), "disconnected\n").expect("a file");
    assert!(tree.out("client session list").contains("connected"));
    tree.writes("recover s1", &[("1", &path(SECOND, "reconnect"))]);
    tree.writes("recover all", &[("1", &path(SECOND, "reconnect"))]);
    tree.writes("reconnect 10.99.1.12", &[("1", &path(SECOND, "reconnect"))]);
    let said = tree.out("-s session reconnect s1");
    let order: Vec<&str> =
        said.lines().map(|line| line.rsplit('/').next().expect("a name")).collect();
    assert_eq!(order, ["disconnect", "disconnect", "reconnect", "reconnect"]);
    fs::write(tree.root.join(disk("state")), "closed\n").expect("a file");
    tree.writes("recover rnbd0", &[("1", &disk("remap_device"))]);
    let paths = "class/rtrs-server/s1/paths";
    tree.writes(
        &format!("server disconnect {FIRST}"),
        &[("1", &format!("{paths}/{FIRST}/disconnect"))],
    );
    assert_eq!(tree.out("-s server session disconnect s1").lines().count(), 2);
    tree.writes(
        "close ram0 s1",
        &[("1", "class/rnbd-server/ctl/devices/ram0/sessions/s1/force_close")],
    );
    tree.writes("policy s1 RR", &[("RR", &format!("{session}/mpath_policy"))]);
    assert_eq!(tree.out("policy s1"), "RR");
    let stats = tree.out(&format!("client path stats {FIRST}"));
    assert!(stats.contains("  rdma               261 16798184 256 16785408 0 0\n"), "{stats}");
    tree.writes(&format!("client path reset {FIRST}"), &[("1", &path(FIRST, "stats/reset_all"))]);
    tree.writes(
        &format!("server path reset {FIRST}"),
        &[("1", &format!("{paths}/{FIRST}/stats/rdma"))],
    );
    // The error of the write is the result.
    fs::remove_file(tree.root.join(disk("resize"))).expect("a file");
    tree.run("resize rnbd0 1M").exits(254).complains(&["resize", "No such file"]);
    run(&folder, &["rnbd", "--sysfs", "/nowhere", "list"]).exits(254).complains(&["/nowhere"]);
}

/// An export and a map with mounted trees; `None` where that is not possible.
struct Pair {
    server: Running,
    client: Running,
    trees: [PathBuf; 2],
}

fn pair(folder: &Folder, host: u8) -> Option<Pair> {
    let trees = ["server", "client"].map(|name| folder.path().join(name));
    let [server_tree, client_tree] =
        trees.each_ref().map(|dir| dir.to_str().expect("a plain path"));
    let at = |index: u8| format!("127.44.{host}.{index}");
    let words = "rnbd export --memory disk0=4MiB --memory disk1=1MiB --tree";
    let words: Vec<&str> = words.split(' ').collect();
    let (first, second) = (at(1), at(2));
    let mut server =
        start(folder, &[&words[..], &[server_tree, "-I", &first, "-I", &second]].concat());
    if !server.hears("listening on ") {
        let done = server.finish();
        assert!(done.err.contains("FUSE"), "{done:?}");
        skipped::without_fuse(done.err.trim());
        return None;
    }
    let (path, own) = (format!("{}@{first}", at(11)), at(12));
    let words = ["rnbd", "map", "disk0", "--from", "s1", "--path", &path, "-I", &own, "--stay"];
    let nbd = folder.path().join("disk");
    let front_ends = ["--nbd", nbd.to_str().expect("a plain path"), "--tree", client_tree];
    let mut client = start(folder, &[&words[..], &front_ends].concat());
    client.expect("mapped disk0 bytes=4194304 at rnbd0");
    Some(Pair { server, client, trees })
}

impl Pair {
    fn end(self) {
        for part in [self.client, self.server] {
            part.signal("-TERM");
            part.finish().exits(0);
        }
        for tree in self.trees {
            assert!(fs::read_dir(tree).expect("an empty folder").next().is_none());
        }
    }
}

#[test]
fn mounted_files_and_sockets_say_and_do_the_same() {
    let folder = Folder::new();
    let Some(pair) = pair(&folder, 1) else { return };
    let [server, client] = pair.trees.clone();
    let tree = Tree { folder: &folder, root: client };
    let near = |words: &str| {
        let words: Vec<&str> = ["rnbd"].into_iter().chain(words.split_whitespace()).collect();
        run(&folder, &words)
    };
    for target in ["device", "session", "path"] {
        for format in ["", "csv", "json", "xml"] {
            let words = format!("client {target} list all {format}");
            assert_eq!(tree.out(&words), near(&words).exits(0).out);
        }
    }
    assert!(tree.run("-v list").exits(0).err.starts_with("reading "));
    let second = "ip:127.44.1.12@ip:127.44.1.2";
    tree.out(&format!("add s1 {second}"));
    tree.run(&format!("add s1 {second}")).exits(239);
    tree.out(&format!("client path disconnect {second}"));
    let state = || {
        let all: Value = serde_json::from_str(&tree.out("path list json")).expect("json");
        all["outgoing paths"][1]["state"].clone()
    };
    assert_eq!(state(), "disconnected");
    tree.out(&format!("reconnect {second}"));
    assert_eq!(state(), "connected");
    tree.out("session reconnect s1");
    tree.out("recover s1");
    tree.out(&format!("readd {second}"));
    tree.out(&format!("delete s1 {second}"));
    tree.run(&format!("delete s1 {second}")).exits(254);

    tree.out("map disk1 from s1 ro");
    tree.run("map disk1 from s1").exits(239);
    tree.run("map disk2 from s1").exits(254);
    assert_eq!(
        tree.out("client device list"),
        "Session  Mapping Path  Device  State  Access Mode  \n\
         s1       disk0         rnbd0   open   rw           \n\
         s1       disk1         rnbd1   open   ro           \n"
    );
    tree.out("resize rnbd0 1M");
    assert_eq!(fs::read_to_string(tree.root.join("block/rnbd0/size")).expect("a file"), "2048\n");
    // EALREADY, the kernel's error for an open disk.
    tree.run("remap rnbd0").exits(256 - 114);
    tree.out("remap s1 force");

    let far = Tree { folder: &folder, root: server };
    assert_eq!(
        far.out("list devname,access_mode csv"),
        near("server list devname,access_mode csv").out
    );
    far.run("close disk0 s2").exits(254);
    far.out("close disk1 s1");
    // The client learns of it with its next request, and has to unmap by force.
    tree.out("unmap disk1 force");
    far.out("server session disconnect s1");
    tree.out("recover s1");
    tree.out("unmap rnbd0 force");
    assert_eq!(tree.out("list json"), "{\n  \"imports\": []\n}\n");
    pair.end();
}

/// Runs a script with mounted trees in place of those of /sys; `None` where that is not possible.
fn inside(folder: &Folder, setup: &str, script: &str) -> Option<Done> {
    let manners = [&["-m"][..], &["-rm"]];
    let works = |manner: &&&[&str]| {
        let mut try_out = Command::new("unshare");
        try_out.args(**manner).args(["sh", "-c", "mount --bind /proc/self /sys/class"]);
        try_out.stderr(Stdio::null()).status().is_ok_and(|status| status.success())
    };
    let Some(manner) = manners.iter().find(works) else {
        skipped::because("no mount namespaces for this user");
        return None;
    };
    let empty = folder.path().join("empty");
    fs::create_dir_all(&empty).expect("a folder");
    let done = Command::new("unshare")
        .args(*manner)
        .args(["sh", "-ec", &format!("{setup}\n{script}")])
        // A folder without control sockets: commands find everything below /sys.
        .env("XDG_RUNTIME_DIR", empty)
        .env("RNBD", format!("{} rnbd", env!("CARGO_BIN_EXE_bowline")))
        .env("AT", folder.path())
        .env("LC_ALL", "C")
        .output()
        .expect("unshare runs");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("text");
    Some(Done { code: done.status.code(), out: text(done.stdout), err: text(done.stderr) })
}

#[test]
fn scripts_for_a_kernel_work_on_mounted_files() {
    // tests [NB-34] [NB-36] [NB-37] [NB-40] [NB-45]
    let folder = Folder::new();
    let Some(pair) = pair(&folder, 2) else { return };
    // The folders whose links lead to each other, as they are below /sys.
    let setup =
        "for dir in class block devices/virtual; do mount --bind $AT/client/$dir /sys/$dir; done";
    let script = r#"
        cd /sys/class/rtrs-client/s1
        cat /sys/block/rnbd0/rnbd/state mpath_policy paths/*/hca_port
        echo min-latency > mpath_policy
        cat mpath_policy
        echo 9999 > max_reconnect_attempts
        cat max_reconnect_attempts
        echo ip:127.44.2.12@ip:127.44.2.2 > add_path
        ls paths
        cat paths/*/state
        echo 1 > paths/ip:127.44.2.12@ip:127.44.2.2/disconnect
        cat paths/ip:127.44.2.12@ip:127.44.2.2/state
        echo 1 > paths/ip:127.44.2.12@ip:127.44.2.2/reconnect
        cat paths/ip:127.44.2.12@ip:127.44.2.2/state
        echo 1 > paths/ip:127.44.2.12@ip:127.44.2.2/remove_path
        cd /sys/class/rnbd-client/ctl
        head -c 30 map_device; echo
        echo "sessname=s1 device_path=disk1 access_mode=ro" > map_device
        ls devices; readlink devices/disk1@s1
        cat devices/disk1@s1/ro devices/disk1@s1/size devices/disk1@s1/rnbd/access_mode
        ! sh -c '/bin/echo "sessname=s1 device_path=disk1" > map_device'
        ! sh -c '/bin/echo "sessname=s1 device_path=disk9" > map_device'
        ! sh -c '/bin/echo "sessname=s1" > map_device'
        $RNBD list noheaders
        $RNBD -d unmap rnbd1
        echo normal > /sys/block/rnbd0/rnbd/unmap_device
        ls /sys/block
    "#;
    let Some(done) = inside(&folder, setup, script) else { return pair.end() };
    let done = done.exits(0);
    assert_eq!(
        done.out,
        "open\n\
         min-inflight (MI: 1)\n\
         1\n\
         min-latency (ML: 2)\n\
         9999\n\
         ip:127.44.2.11@ip:127.44.2.1\n\
         ip:127.44.2.12@ip:127.44.2.2\n\
         connected\n\
         connected\n\
         disconnected\n\
         connected\n\
         Usage: echo \"[dest_port=server\n\
         disk0@s1\n\
         disk1@s1\n\
         ../../../block/rnbd1\n\
         1\n\
         2048\n\
         ro\n\
         s1  disk0  rnbd0  open  rw  \n\
         s1  disk1  rnbd1  open  ro  \n\
         echo 'normal' > /sys/block/rnbd1/rnbd/unmap_device\n"
    );
    let errors: Vec<&str> =
        done.err.lines().map(|line| line.rsplit(": ").next().unwrap_or(line)).collect();
    assert_eq!(errors, ["File exists", "No such file or directory", "Invalid argument"]);

    // A disk again, for the server's side; the whole tree stands over /sys.
    run(&folder, &["rnbd", "map", "disk0", "from", "s1", "127.44.2.11@127.44.2.1"]).exits(0);
    let script = r#"
        cat /sys/module/rnbd_server/parameters/port_nr
        cd /sys/class/rnbd-server/ctl/devices
        ls
        cat disk0/sessions/s1/access_mode disk0/sessions/s1/read_only disk0/block_dev/size
        cat /sys/class/rtrs-server/s1/paths/*/src_addr
        $RNBD list csv
        ! sh -c 'echo 2 > disk0/sessions/s1/force_close'
        echo 1 > disk0/sessions/s1/force_close
        ls
        ! $RNBD close disk0
        $RNBD server session disconnect s1
    "#;
    let done = inside(&folder, "mount --bind $AT/server /sys", script).expect("as before").exits(0);
    assert_eq!(
        done.out,
        "1234\n\
         disk0\n\
         rw\n\
         0\n\
         8192\n\
         ip:127.44.2.11\n\
         sessname,mapping_path,devname,access_mode\n\
         \"s1\",\"disk0\",\"disk0\",\"rw\"\n"
    );
    assert!(done.err.ends_with("error: no session has disk0 open\n"), "{}", done.err);
    pair.end();
}

#[test]
fn a_kernel_is_meant_where_no_process_answers() {
    let folder = Folder::new();
    let root = kernel(&folder);
    assert!(root.ends_with("sys"));
    let setup = "mount --bind $AT/sys /sys";
    let script = "$RNBD client list noheaders; $RNBD -s unmap rnbd0; $RNBD session list notree noheaders nototals B";
    let Some(done) = inside(&folder, setup, script) else { return };
    assert_eq!(
        done.exits(0).out,
        "s1  /dev/ram0  rnbd0  open  rw  \n\
         echo 'normal' > /sys/block/rnbd0/rnbd/unmap_device\n\
         s1  connected  UU  MI  16785408  16798184  0  \n\
         s1  2  16785408  16798184  0  \n"
    );
}
