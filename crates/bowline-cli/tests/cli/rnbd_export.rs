//! Exports: their names, clients and sizes.

use crate::support::{Folder, Running, run, start};

/// Starts a server at an address of the test's own, and waits until it listens.
fn export(folder: &Folder, host: u8, more: &[&str]) -> Running {
    let address = format!("127.46.{host}.1");
    let mut server = start(folder, &[&["rnbd", "export", "-I", &address], more].concat());
    server.expect(&format!("listening on {address}:1234"));
    server
}

/// Starts a client of a disk, with this name for its session.
fn map(folder: &Folder, host: u8, disk: &str, session: &str, more: &[&str]) -> Running {
    let path = format!("127.46.{host}.11@127.46.{host}.1");
    let words = ["rnbd", "map", disk, "--from", session, "--path", &path];
    start(folder, &[&words[..], more].concat())
}

fn end(part: Running) -> String {
    part.signal("-TERM");
    part.finish().exits(0).err
}

#[test]
fn exports_are_opened_by_those_they_are_granted_to() {
    // tests [NB-50]
    let folder = Folder::new();
    let words = "--memory disk0=1MiB --memory disk1=1MiB --grant disk0=ro --grant disk0=rw@vm*";
    let words: Vec<&str> = words.split(' ').collect();
    let server = export(&folder, 1, &words);
    const EACCES: i32 = 256 - 13;
    map(&folder, 1, "disk0", "s1", &[]).finish().exits(EACCES);
    map(&folder, 1, "disk0", "vm1", &["--access", "migration"]).finish().exits(EACCES);
    let mut reader = map(&folder, 1, "disk0", "s1", &["--access", "ro"]);
    reader.expect("mapped disk0 bytes=1048576");
    end(reader);
    let mut writer = map(&folder, 1, "disk0", "vm1", &[]);
    writer.expect("mapped disk0 bytes=1048576");
    end(writer);
    let mut free = map(&folder, 1, "disk1", "s1", &["--access", "migration"]);
    free.expect("mapped disk1 bytes=1048576");
    end(free);
    let log = end(server);
    // Each line has its time in front, and where a session came from if it is still there.
    let told = log.lines().filter_map(|line| line.split_once("Z session "));
    let told = told.map(|(_, line)| line.split(" from ").next().expect("a first part"));
    let wanted = "s1: connected\ns1: may not open disk0 rw: Permission denied\ns1: disconnected\n\
        vm1: connected\nvm1: may not open disk0 migration: Permission denied\nvm1: disconnected\n\
        s1: connected\ns1: opened disk0 ro\ns1: closed disk0\ns1: disconnected\n\
        vm1: connected\nvm1: opened disk0 rw\nvm1: closed disk0\nvm1: disconnected\n\
        s1: connected\ns1: opened disk1 migration\ns1: closed disk1\ns1: disconnected";
    assert_eq!(told.collect::<Vec<_>>().join("\n"), wanted, "{log}");
    let words = ["rnbd", "export", "--memory", "disk0=1MiB", "--grant", "disk1=ro"];
    run(&folder, &words).exits(2).complains(&["--grant disk1", "no such export"]);
}

#[test]
fn exports_are_listed_whether_anybody_has_them_open_or_not() {
    let folder = Folder::new();
    let exports = || run(&folder, &["rnbd", "exports"]);
    exports().exits(256 - 2).complains(&["nothing runs here"]);
    let server = export(&folder, 13, &["--memory", "disk0=1MiB", "--memory", "disk1=2MiB"]);
    let mut client = map(&folder, 13, "disk1", "s1", &["--access", "ro"]);
    client.expect("mapped disk1");
    server.until_told("session s1: connected from 127.46.13.11\n");
    let wanted = "export disk0 bytes=1048576 open by nobody\n\
        export disk1 bytes=2097152 open by s1 (ro)\n";
    assert_eq!(exports().exits(0).out, wanted);
    let done = run(&folder, &["rnbd", "exports", "--json", "-v"]).exits(0);
    let all: serde_json::Value = serde_json::from_str(&done.out).expect("JSON");
    assert_eq!(all[0]["name"], "disk0");
    assert_eq!(all[1]["bytes"], 2 << 20);
    let open = serde_json::json!([{ "session": "s1", "access_mode": "ro" }]);
    assert_eq!(all[1]["open_by"], open);
    assert_eq!(done.err.matches("reading ").count(), 2, "{done:?}");
    // tests [NB-65]
    let list = run(&folder, &["rnbd", "server", "list", "csv", "noheaders"]).exits(0).out;
    assert_eq!(list, "\"s1\",\"disk1\",\"disk1\",\"ro\"\n,\"disk0\",\"disk0\",\n");
    let shown = run(&folder, &["rnbd", "server", "show", "disk0"]).exits(0).out;
    assert!(shown.contains("disk0"), "{shown}");
    run(&folder, &["rnbd", "close", "disk0"])
        .exits(256 - 2)
        .complains(&["no session has disk0 open"]);
    end(client);
    end(server);
}

#[test]
fn what_runs_without_disks_is_said_to_have_none() {
    let folder = Folder::new();
    let words = ["node", "--address", "127.46.14.1", "--no-sandbox", "--no-programs"];
    let mut node = start(&folder, &words);
    node.expect("ready");
    for (words, said) in [
        (&["rnbd", "list"][..], "no disks are mapped or exported at"),
        (&["rnbd", "exports"], "nothing is exported at"),
        (&["rtrs", "list"], "no sessions at"),
    ] {
        let done = run(&folder, words).exits(0);
        assert_eq!(done.out, "", "{done:?}");
        done.complains(&[said, "node-127.46.14.1-"]);
    }
    assert_eq!(run(&folder, &["rnbd", "exports", "--json"]).exits(0).out, "[]\n");
}

#[test]
fn sessions_for_which_there_is_no_memory_are_refused_and_the_server_says_so() {
    // tests [RT-66]
    let folder = Folder::new();
    let words = ["rnbd", "export", "--memory", "disk0=1MiB", "--session-memory", "63MiB"];
    run(&folder, &words).exits(2).complains(&["--session-memory", "67108864 of one session"]);
    let server = export(&folder, 8, &["--memory", "disk0=1MiB", "--session-memory", "127MiB"]);
    let mut first = map(&folder, 8, "disk0", "s1", &[]);
    first.expect("mapped disk0 bytes=1048576");
    let path = "127.46.8.12@127.46.8.1";
    let refused = run(&folder, &["rnbd", "map", "disk0", "--from", "s2", "--path", path]);
    refused.exits(256 - 12);
    server.until_told("1 of them because --session-memory is full: it has room for 1 of 64 MiB");
    end(first);
    end(server);
}

#[test]
fn nobody_writes_to_memory_that_is_read_only() {
    let folder = Folder::new();
    let mut server = export(&folder, 2, &["--memory", "disk0=1MiB", "--ro"]);
    server.expect("export disk0 bytes=1048576 ro");
    map(&folder, 2, "disk0", "s1", &[]).finish().exits(256 - 13);
    let mut reader = map(&folder, 2, "disk0", "s1", &["--access", "ro"]);
    reader.expect("mapped disk0");
    end(reader);
    end(server);
}

#[test]
fn a_forced_close_is_told_of() {
    // tests [NB-50] [NB-21]
    let folder = Folder::new();
    let server = export(&folder, 3, &["--memory", "disk0=1MiB"]);
    let mut client = map(&folder, 3, "disk0", "s1", &[]);
    client.expect("mapped disk0");
    run(&folder, &["rnbd", "server", "close", "disk0", "s2"]).exits(254);
    run(&folder, &["rnbd", "server", "close", "disk0", "s1"]).exits(0);
    end(client);
    let log = end(server);
    assert!(log.lines().any(|line| line == "export disk0 closed by force for session s1"), "{log}");
}

#[test]
fn files_that_grow_are_looked_at_again() {
    let folder = Folder::new();
    let path = folder.write("disk0.img", "");
    let set_len = |bytes| {
        let file = std::fs::File::options().write(true).open(&path).expect("the file");
        file.set_len(bytes).expect("its length");
    };
    set_len(4 << 20);
    let file = format!("disk0={}", path.display());
    let mut server = export(&folder, 4, &["--file", &file]);
    server.expect("export disk0 bytes=4194304");
    set_len(8 << 20);
    let mut client = map(&folder, 4, "disk0", "s1", &[]);
    client.expect("mapped disk0 bytes=8388608");
    set_len(2 << 20);
    server.signal("-HUP");
    server.expect("export disk0 bytes=2097152");
    end(client);
    end(server);
}

#[test]
fn what_is_no_whole_block_is_told_to_be_left_out() {
    let folder = Folder::new();
    let path = folder.write("b.img", &"x".repeat(100));
    let file = format!("b={}", path.display());
    let memory = ["--memory", "a=1000", "--memory", "c=1024"];
    let mut server = export(&folder, 7, &[&memory[..], &["--file", &file]].concat());
    server.expect("export a bytes=512").expect("export b bytes=0").expect("export c bytes=1024");
    std::fs::write(&path, "x".repeat(1537)).expect("a file");
    server.signal("-HUP");
    server.expect("export b bytes=1536");
    std::fs::write(&path, "x".repeat(2048)).expect("a file");
    server.signal("-HUP");
    server.expect("export b bytes=2048");
    let told = end(server);
    let told: Vec<&str> = told
        .lines()
        .map(|line| line.split_once(" are not exported").expect("a remainder").0)
        .collect();
    let all = [
        "export a: the last 488 of its 1000 bytes",
        "export b: the last 100 of its 100 bytes",
        "export b: the last 1 of its 1537 bytes",
    ];
    assert_eq!(told, all);
}

#[test]
fn a_file_that_is_not_there_any_more_is_told_of() {
    let folder = Folder::new();
    let path = folder.write("r.img", &"x".repeat(4096));
    let file = format!("r={}", path.display());
    let mut server = export(&folder, 6, &["--file", &file]);
    server.expect("export r bytes=4096");
    // Sizes are printed last, so that a test that waits for them has all other lines.
    let told = |server: &mut Running, bytes: u64| {
        let file = std::fs::File::options().write(true).open(folder.path().join("open"));
        file.expect("the file that was opened").set_len(bytes).expect("its length");
        server.signal("-HUP");
        server.expect(&format!("export r bytes={bytes}"));
    };
    std::fs::hard_link(&path, folder.path().join("open")).expect("another name");
    told(&mut server, 8192);
    let new = folder.write("new", "");
    std::fs::rename(new, &path).expect("another file");
    told(&mut server, 4096);
    std::fs::remove_file(&path).expect("the file");
    told(&mut server, 8192);
    let note = |what: &str| {
        let path = path.display();
        format!("export r: {path} {what}; the file opened at the start is still served\n")
    };
    assert_eq!(end(server), note("was replaced by another file") + &note("is gone"));
}

#[test]
fn whoever_has_a_file_open_that_was_replaced_can_be_closed() {
    // tests [NB-40] [NB-21]: one name, two files
    let folder = Folder::new();
    let images = folder.path().join("images");
    std::fs::create_dir(&images).expect("a folder");
    let file = |name: &str, mib: u64| {
        let file = std::fs::File::create(images.join(name)).expect("a file");
        file.set_len(mib << 20).expect("its length");
    };
    file("a.img", 1);
    let server = export(&folder, 5, &["--dir", images.to_str().expect("a plain path")]);
    let map = |session: &str, host: u8, bytes: u64| {
        let path = format!("127.46.5.{host}@127.46.5.1");
        let mut client =
            start(&folder, &["rnbd", "map", "a.img", "--from", session, "--path", &path]);
        client.expect(&format!("mapped a.img bytes={bytes}"));
        client
    };
    let words = |words: &str| {
        let words: Vec<&str> = ["rnbd"].into_iter().chain(words.split(' ')).collect();
        run(&folder, &words)
    };
    let list = || words("server device list sessname,devname csv noheaders").exits(0).out;
    let first = map("s1", 11, 1 << 20);
    file("new.img", 2);
    std::fs::rename(images.join("new.img"), images.join("a.img")).expect("another inode");
    let second = map("s2", 12, 2 << 20);
    assert_eq!(list(), "\"s1\",\"a.img\"\n\"s2\",\"a.img~2\"\n");
    let tree = words("tree --path class/rnbd-server/ctl/devices").exits(0).out;
    assert!(["\"s1\"", "\"s2\""].iter().all(|session| tree.contains(session)), "{tree}");
    // Both sessions have opened it under this name, and the error names both.
    let refused = words("server close a.img").exits(2);
    refused.complains(&["several sessions have a.img open", ": s1, s2"]);
    words("server close a.img s3").exits(254).complains(&["no session has a.img open"]);
    words("server close a.img s2").exits(0);
    assert_eq!(list(), "\"s1\",\"a.img\"\n");
    words("set class/rnbd-server/ctl/devices/a.img/sessions/s1/force_close 1").exits(0);
    assert_eq!(list(), "");
    end(second);
    let third = map("s3", 13, 2 << 20);
    file("new.img", 4);
    std::fs::rename(images.join("new.img"), images.join("a.img")).expect("another inode");
    let fourth = map("s4", 14, 4 << 20);
    words("server close a.img force").exits(0);
    assert_eq!(list(), "");
    for client in [first, third, fourth] {
        end(client);
    }
    let closed = |device: &str, session: &str| {
        format!("export {device} closed by force for session {session}\n")
    };
    let all = [("a.img~2", "s2"), ("a.img", "s1"), ("a.img", "s3"), ("a.img~2", "s4")];
    let all: String = all.iter().map(|(device, session)| closed(device, session)).collect();
    let log = end(server);
    let closes = log.lines().filter(|line| line.starts_with("export "));
    assert_eq!(closes.map(|line| line.to_owned() + "\n").collect::<String>(), all, "{log}");
}
