//! Exports and disks of a node: from its configuration file, and by commands while it runs.

use std::{
    fs::File,
    io::Read,
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
};

use crate::{
    nbd::{Nbd, WRITE},
    support::{Folder, Running, run, start},
};

/// Exit statuses of `rnbd` for these errors.
const NOT_FOUND: i32 = 256 - 2;
const BUSY: i32 = 256 - 16;
const EXISTS: i32 = 256 - 17;
const TIMED_OUT: i32 = 256 - 110;

/// Starts a node with a configuration file, without waiting for it.
fn begin(folder: &Folder, address: &str, tables: &str) -> Running {
    let text = format!("address = [\"{address}\"]\n{tables}");
    let file = folder.write(&format!("{address}.toml"), &text);
    start(folder, &["node", "--no-programs", "--config", file.to_str().expect("plain")])
}

fn node(folder: &Folder, address: &str, tables: &str) -> Running {
    let mut node = begin(folder, address, tables);
    node.expect("ready; ");
    node
}

fn end(node: Running) -> String {
    node.signal("-TERM");
    node.finish().exits(0).err
}

fn image(folder: &Folder, name: &str, bytes: u64) -> PathBuf {
    let path = folder.path().join(name);
    File::create(&path).expect("a file").set_len(bytes).expect("its size");
    path
}

/// Whether an NBD server answers there.
fn greets(socket: &Path) -> bool {
    let Ok(mut client) = UnixStream::connect(socket) else { return false };
    client.read_exact(&mut [0; 18]).is_ok()
}

/// A node that has given up access to files cannot take it back.
#[test]
fn a_node_without_disks_in_its_file_takes_none() {
    let folder = Folder::new();
    let file = image(&folder, "a.img", 1 << 20);
    let confined = node(&folder, "127.210.30.1", "");
    let words = ["rnbd", "export", "a", &format!("file={}", file.display())];
    let done = run(&folder, &words).exits(255);
    done.complains(&["[disks]", "--no-sandbox"]);
    end(confined);
    let open = node(&folder, "127.210.30.1", "sandbox = false\n");
    run(&folder, &words).exits(0);
    end(open);
}

#[test]
fn one_node_exports_a_file_and_another_maps_it() {
    let (folder, other) = (Folder::new(), Folder::new());
    let file = image(&folder, "disk 0.img", 8 << 20);
    let nbd = other.path().join("disk0.sock");
    let tables = format!(
        "[[export]]\nname = \"disk0\"\nfile = \"{}\"\ngrant = [\"rw@b*\"]\n",
        file.display()
    );
    let mut server = node(&folder, "127.210.1.1", &tables);
    assert!(
        server.said().contains("disks are served at 127.210.1.1:1234\nexport disk0 bytes=8388608")
    );
    let tables = format!(
        "[[map]]\ndevice = \"disk0\"\nfrom = \"b1\"\npath = [\"127.210.1.2@127.210.1.1\"]\n\
         outage = 5\nnbd = \"{}\"\n",
        nbd.display()
    );
    let client = node(&other, "127.210.1.2", &tables);
    assert!(client.said().contains("mapped disk0 bytes=8388608 at rnbd0, nbd "), "before ready");
    assert!(greets(&nbd));
    server.until_told("session b1: opened disk0 rw");
    let listed = run(&other, &["rnbd", "list", "noheaders"]).exits(0).out;
    assert!(listed.contains("disk0") && listed.contains("rnbd0"), "{listed}");
    let exports = run(&folder, &["rnbd", "exports"]).exits(0).out;
    assert_eq!(exports, "export disk0 bytes=8388608 open by b1 (rw)\n");
    // SIGHUP has sizes looked at again.
    File::options().write(true).open(&file).expect("it").set_len(4 << 20).expect("its size");
    server.signal("-HUP");
    server.expect("export disk0 bytes=4194304");
    end(client);
    assert!(!nbd.exists());
    end(server);
}

#[test]
fn one_address_exports_a_disk_and_maps_another() {
    let (folder, other) = (Folder::new(), Folder::new());
    let tables = |name: &str, from: u8, to: u8| {
        format!(
            "metrics = \"127.210.2.{to}:0\"\n[[export]]\nname = \"{name}\"\nmemory = \"1MiB\"\n[[map]]\n\
             device = \"of-{from}\"\nfrom = \"by-{to}\"\npath = [\"127.210.2.{to}@127.210.2.{from}\"]\nstay = true\n\
             connect-timeout = 1\n"
        )
    };
    // Each needs the other: the first is up without its disk, and gets it when the second runs.
    let mut one = node(&folder, "127.210.2.1", &tables("of-1", 2, 1));
    one.until_told("not mapped: of-2 from by-1: ");
    let two = node(&other, "127.210.2.2", &tables("of-2", 1, 2));
    one.expect("mapped of-2 bytes=1048576 at rnbd0");
    assert!(two.said().contains("mapped of-1 bytes=1048576 at rnbd0"));
    let text = one.said().lines().find_map(|line| line.strip_prefix("metrics at http://"));
    let place = text.and_then(|text| text.split('/').next()).expect("a place").to_owned();
    let mut stream = std::net::TcpStream::connect(place).expect("metrics");
    std::io::Write::write_all(&mut stream, b"GET /metrics HTTP/1.0\r\n\r\n").expect("a request");
    let mut metrics = String::new();
    stream.read_to_string(&mut metrics).expect("metrics");
    for wanted in [
        "bowline_rnbd_export_size_bytes{export=\"of-1\"} 1048576",
        "bowline_rnbd_disk_open{device=\"rnbd0\",session=\"by-1\",path=\"of-2\"} 1",
        "bowline_rds_connections 0",
        "bowline_rtrs_client_path_connected{session=\"by-1\"",
        "bowline_rtrs_server_sessions 1",
    ] {
        assert!(metrics.contains(wanted), "no {wanted} in {metrics}");
    }
    // Both have a disk of the other open.
    end(one);
    end(two);
}

#[test]
fn exports_and_disks_come_and_go_while_a_node_runs() {
    // tests [NB-63] [NB-64]
    let (folder, other) = (Folder::new(), Folder::new());
    let server = node(&folder, "127.210.3.1", "[disks]\n");
    let client = node(&other, "127.210.3.2", "[disks]\n");
    let serve = |words: &str| {
        let words: Vec<&str> = words.split(' ').collect();
        run(&folder, &[&["rnbd"], &words[..]].concat())
    };
    let use_disks = |words: &str| {
        let words: Vec<&str> = words.split(' ').collect();
        run(&other, &[&["rnbd"], &words[..]].concat())
    };
    serve("exports").exits(0);
    let file = image(&folder, "disk1.img", 2 << 20);
    serve(&format!("export disk1 file={} ro=true", file.display())).exits(0);
    serve("export disk2 memory=1MiB grant=rw@s*").exits(0);
    let exports =
        "export disk1 bytes=2097152 ro open by nobody\nexport disk2 bytes=1048576 open by nobody\n";
    assert_eq!(serve("exports").exits(0).out, exports);
    serve("export disk1 memory=1MiB").exits(EXISTS).complains(&["an export of this name"]);
    serve("export disk3 file=/nowhere/x").exits(NOT_FOUND);
    serve("export disk3 memory=1MiB bock=512")
        .exits(2)
        .complains(&["unknown key `bock`; known keys: name"]);
    serve("export disk3").exits(2);
    serve("unexport disk3").exits(NOT_FOUND);

    let nbd = other.path().join("two.sock");
    let path = "ip:127.210.3.2@ip:127.210.3.1";
    use_disks(&format!("map disk2 from s1 {path} nbd={} outage=5", nbd.display())).exits(0);
    assert!(greets(&nbd));
    use_disks("map disk1 from s1 ro").exits(0);
    use_disks("map disk1 from s1 ro").exits(EXISTS);
    use_disks("map disk9 from s1 nbds=/x")
        .exits(2)
        .complains(&["unknown key `nbds`; known keys: access"]);
    // Nobody answers there, and that is no reason for others to wait.
    use_disks("map disk1 from s9 ip:127.210.3.2@ip:127.210.3.9 connect-timeout=1").exits(TIMED_OUT);
    serve("unexport disk2").exits(BUSY).complains(&["it is open", "`unexport disk2 force`"]);
    // Where the disk was is kept for it.
    use_disks("unmap rnbd0").exits(0);
    assert!(!nbd.exists());
    use_disks("map disk2 from s1").exits(0);
    assert!(greets(&nbd));
    serve("unexport disk2 --force").exits(0);
    use_disks("unmap disk2 --force").exits(0);
    use_disks(&format!("map disk2 from s1 {path}")).exits(NOT_FOUND);
    assert_eq!(use_disks("list noheaders nototals csv").exits(0).out.lines().count(), 1);
    end(client);
    assert_eq!(serve("exports").exits(0).out.lines().count(), 1);
    serve("unexport disk1").exits(0);
    let log = end(server);
    assert!(log.contains("session s1: opened disk2 rw"), "{log}");
}

#[test]
fn a_bad_entry_is_named_with_its_line() {
    let folder = Folder::new();
    for (tables, parts) in [
        ("[disks]\nqueue = 5\n", ["127.210.4.1.toml:2: [disks]: unknown key `queue`"; 2]),
        ("[disks]\nchunk = 1\n", [":2: [disks]: --queue-depth 512 with --chunk 1", "8192"]),
        (
            "[[export]]\nname = \"a\"\n",
            [":2: [[export]] number 1 (a): ", "file, memory or nbd-backend is missing"],
        ),
        (
            "[[export]]\nname = \"a\"\nmemory = 4096\n[[export]]\nmemory = 4096\n",
            [":5: [[export]] number 2: ", "a name is missing"],
        ),
        (
            "[[map]]\ndevice = \"d\"\nfrom = \"s\"\npath = [\"10.0.0.1\"]\noutage = \"never\"\n",
            [":2: [[map]] number 1 (d): ", "outage: \"never\" is not a time"],
        ),
        ("[[map]]\ndevice = \"d\"\n", [":2: [[map]] number 1 (d): ", "from is missing"]),
        ("[[map]]\nfrom = \"s\"\n", [":2: [[map]] number 1: ", "device is missing"]),
        ("[[map]]\ndevice = \"d\"\nfrom = \"s\"\npath = [\"x\"]\n", ["\"x\" is not a path", "(d)"]),
        (
            "[[export]]\nname = \"a\"\nmemory = 4096\n[[export]]\nname = \"a\"\nfile = \"/x\"\n",
            [":5: [[export]] number 2 (a): ", "another entry has the same name"],
        ),
        (
            "[[map]]\ndevice = \"d\"\nfrom = \"s\"\nnbd = \"/n\"\n\
             [[map]]\ndevice = \"e\"\nfrom = \"s\"\nnbd = \"/n\"\n",
            [":6: [[map]] number 2 (e): ", "another entry uses /n"],
        ),
        ("[[map]]\nstayy = false\n", ["unknown key `stayy`; known keys: device, from", "stay"]),
        ("[[maps]]\n", [":2: unknown field `maps`", "map"]),
    ] {
        begin(&folder, "127.210.4.1", tables).finish().exits(2).complains(&parts);
    }
}

#[test]
fn what_fails_at_the_start_stops_nothing_else() {
    let folder = Folder::new();
    let tables = "[[export]]\nname = \"gone\"\nfile = \"/nowhere/x\"\n\
        [[export]]\nname = \"there\"\nmemory = 4096\n\
        [[map]]\ndevice = \"a\"\nfrom = \"s1\"\npath = [\"127.210.5.2@127.210.5.9\"]\n\
        [[map]]\ndevice = \"b\"\nfrom = \"s2\"\npath = [\"127.210.5.1@127.210.5.9\"]\nconnect-timeout = 1\nstay = true\n\
        [[map]]\ndevice = \"there\"\nfrom = \"s3\"\npath = [\"127.210.5.1@127.210.5.1\"]\n";
    let node = node(&folder, "127.210.5.1", tables);
    // The third disk of the file has the third name, whether the others are there or not.
    assert!(node.said().contains("mapped there bytes=4096 at rnbd2"), "{}", node.said());
    node.until_told("not exported: export gone of /nowhere/x: No such file");
    node.until_told("not mapped: a from s1: 127.210.5.2 is not an address of the node's disks");
    node.until_told("not mapped: b from s2: no answer from 127.210.5.9 within 1 s");
    // It ends at once although one is still being tried.
    end(node);
}

/// A server that is killed takes no disk with it, and does not delay the end of a node.
#[test]
fn a_disk_outlives_its_server_and_not_its_node() {
    let (folder, other) = (Folder::new(), Folder::new());
    let file = image(&folder, "d.img", 1 << 20);
    let exports = format!("[[export]]\nname = \"d\"\nfile = \"{}\"\n", file.display());
    let server = node(&folder, "127.210.7.1", &exports);
    let nbd = other.path().join("d.sock");
    let maps = format!(
        "[[map]]\ndevice = \"d\"\nfrom = \"s\"\npath = [\"127.210.7.2@127.210.7.1\"]\nnbd = \"{}\"\n",
        nbd.display()
    );
    let mut client = node(&other, "127.210.7.2", &maps);
    server.signal("-KILL");
    drop(server);
    client.expect("rnbd0 offline");
    let server = node(&folder, "127.210.7.1", &exports);
    client.expect("rnbd0 online");
    let mut user = UnixStream::connect(&nbd).expect("the disk");
    user.read_exact(&mut [0; 18]).expect("a greeting");
    server.signal("-KILL");
    drop(server);
    client.expect("rnbd0 offline");
    end(client);
}

#[test]
fn a_command_whose_address_is_taken_names_the_node() {
    let (folder, other) = (Folder::new(), Folder::new());
    let tables = "[[export]]\nname = \"a\"\nmemory = 4096\n";
    let server = node(&folder, "127.210.6.1", tables);
    let pid = format!("process {}, the node at ", server.id());
    let words = ["rnbd", "export", "--memory", "b=4096", "-I", "127.210.6.1"];
    run(&folder, &words).exits(1).complains(&[
        "UDP port 4791 of 127.210.6.1 is in use by",
        &pid,
        "/bowline/rnbd/node-",
        "`bowline rnbd export NAME file=PATH`",
    ]);
    let words = ["rnbd", "map", "a", "--from", "s", "--path", "127.210.6.1@127.210.6.1"];
    run(&folder, &words).exits(1).complains(&[&pid, "`bowline rnbd map DEVICE from SERVER`"]);
    let words = ["rping", "-s", "-I", "127.210.6.1"];
    run(&folder, &words).exits(1).complains(&[&pid, "or give another address"]);
    // Nor does another node have it, which says so before it serves anything.
    let text =
        format!("address = [\"127.210.6.2\"]\n{tables}[disks]\naddress = [\"127.210.6.1\"]\n");
    let file = other.write("taken.toml", &text);
    let words = ["node", "--no-programs", "--config", file.to_str().expect("plain")];
    let done = run(&other, &words).exits(1);
    assert!(done.err.contains("UDP port 4791 of 127.210.6.1 is in use by process"), "{done:?}");
    end(server);
}

#[test]
fn a_node_whose_disk_has_lost_its_server_before_a_flush_says_so_at_its_end() {
    let (folder, other) = (Folder::new(), Folder::new());
    let file = image(&folder, "disk0.img", 1 << 20);
    let tables = format!("[[export]]\nname = \"disk0\"\nfile = \"{}\"\n", file.display());
    let server = node(&folder, "127.210.9.1", &tables);
    let socket = other.path().join("disk0.sock");
    let tables = format!(
        "[[map]]\ndevice = \"disk0\"\nfrom = \"b1\"\npath = [\"127.210.9.2@127.210.9.1\"]\n\
         nbd = \"{}\"\n",
        socket.display()
    );
    let mut client = node(&other, "127.210.9.2", &tables);
    let mut nbd = Nbd::connect(&socket);
    assert_eq!(nbd.ask(WRITE, 0, 4096), 0);
    end(server);
    client.expect("rnbd0 offline");
    client.signal("-TERM");
    let done = client.finish().exits(1);
    let line = "rnbd0: what was written was not made durable: its server is not connected";
    assert!(done.err.contains(line), "{done:?}");
}
