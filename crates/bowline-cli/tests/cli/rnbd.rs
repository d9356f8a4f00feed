//! Disks: export, map, verify, and the commands that show and change them.

use std::{fs, os::unix::fs::FileExt};

use serde_json::Value;

use crate::support::{Folder, Running, run, start};

const SIGINT: u32 = 2;

fn export(folder: &Folder, host: u8, more: &[&str]) -> Running {
    let addresses = [format!("127.43.{host}.1"), format!("127.43.{host}.2")];
    let words =
        ["rnbd", "export", "--memory", "disk0=32MiB", "-I", &addresses[0], "-I", &addresses[1]];
    let mut server = start(folder, &[&words[..], more].concat());
    server.expect(&format!("listening on {}:1234, {}:1234", addresses[0], addresses[1]));
    server
}

fn path(host: u8, index: u8) -> String {
    format!("127.43.{host}.{}@127.43.{host}.{index}", index + 10)
}

fn mapped(folder: &Folder, host: u8, more: &[&str]) -> Running {
    let path = path(host, 1);
    let own = format!("127.43.{host}.12");
    let words = ["rnbd", "map", "disk0", "--from", "s1", "--path", &path, "-I", &own];
    start(folder, &[&words[..], more].concat())
}

fn json(folder: &Folder, words: &[&str]) -> Value {
    let done = run(folder, &[words, &["json"]].concat()).exits(0);
    serde_json::from_str(&done.out).expect("one JSON object")
}

#[test]
fn a_mapped_disk_is_looked_at_changed_and_unmapped() {
    let folder = Folder::new();
    let mut server = export(&folder, 1, &["--memory", "disk1=1MiB"]);
    server.expect("export disk0 bytes=33554432");
    let nbd = folder.path().join("disk0.nbd");
    let mut client = mapped(&folder, 1, &["--nbd", nbd.to_str().expect("a plain path")]);
    client.expect("mapped disk0 bytes=33554432 at rnbd0, nbd ");
    assert!(nbd.exists());

    let all = json(&folder, &["rnbd", "list"]);
    assert_eq!(all["imports"][0]["devname"], "rnbd0");
    assert_eq!(all["imports"][0]["state"], "open");
    assert_eq!(all["exports"][0]["sessname"], "s1");

    run(&folder, &["rnbd", "add", "s1", &path(1, 2)]).exits(0);
    // EEXIST, the kernel's error for an existing path.
    run(&folder, &["rnbd", "path", "add", "s1", &path(1, 2)]).exits(239);
    let sessions = json(&folder, &["rtrs", "client", "list", "all"]);
    let session = &sessions["outgoing sessions"][0];
    assert_eq!(session["path_uu"], "UU");
    assert_eq!(session["mp_short"], "MI");
    run(&folder, &["rtrs", "policy", "s1", "round-robin"]).exits(0);
    assert_eq!(run(&folder, &["rtrs", "policy", "s1"]).exits(0).out, "round-robin (RR: 0)\n");
    run(&folder, &["rnbd", "client", "path", "disconnect", &path(1, 2)]).exits(0);
    let paths = json(&folder, &["rnbd", "client", "path", "list"]);
    assert_eq!(paths["outgoing paths"][1]["state"], "disconnected");
    run(&folder, &["rnbd", "recover", "s1"]).exits(0);
    run(&folder, &["rnbd", "delete", "s1", &path(1, 2)]).exits(0);

    // A second disk of the same session; a third that does not exist.
    run(&folder, &["rnbd", "map", "disk1", "from", "s1", "ro"]).exits(0);
    assert!(folder.path().join("disk0.nbd.rnbd1").exists());
    run(&folder, &["rnbd", "map", "disk1", "from", "s1"]).exits(239);
    run(&folder, &["rnbd", "map", "disk2", "from", "s1"]).exits(254);
    let table = run(&folder, &["rnbd", "client", "device", "list"]).exits(0).out;
    assert_eq!(
        table,
        "Session  Mapping Path  Device  State  Access Mode  \n\
         s1       disk0         rnbd0   open   rw           \n\
         s1       disk1         rnbd1   open   ro           \n"
    );
    let next = |words: &[&str]| run(&folder, &[&["rnbd", "-c"], words].concat()).exits(0).out;
    assert_eq!(next(&["client", "unmap"]), "rnbd0\nrnbd1\n");
    assert_eq!(next(&["map", "disk9", "from"]), "s1\n");
    assert_eq!(
        next(&["path", "delete", "s1"]),
        format!("ip:{}\n", path(1, 1).replace('@', "@ip:"))
    );
    assert_eq!(completed(&folder, "bowline rnbd unmap "), "rnbd0 rnbd1\n");
    assert_eq!(
        completed(&folder, "bowline rnbd path delete s1 ip:127.43.1.11@ip:12"),
        "127.43.1.1\n"
    );
    assert_eq!(completed(&folder, "rnbd client sess"), "session\n");
    assert_eq!(completed(&folder, "bowline rnbd ex"), "exports export\n");
    assert_eq!(completed(&folder, "bowline rtrs policy "), "s1\n");
    let said = run(&folder, &["rnbd", "-s", "unmap", "rnbd1"]).exits(0).out;
    assert_eq!(said, "echo 'normal' > /block/rnbd1/rnbd/unmap_device\n");
    run(&folder, &["rnbd", "unmap", "rnbd1"]).exits(0);
    run(&folder, &["rnbd", "unmap", "disk0"]).exits(0);
    client.finish().exits(0);
    assert!(!nbd.exists());
    server.signal("-TERM");
    server.finish().exits(0);
}

/// What bash offers behind a line; a shell without its completions fails.
fn completed(folder: &Folder, line: &str) -> String {
    let script = run(folder, &["completions", "bash"]).exits(0).out;
    let program = env!("CARGO_BIN_EXE_bowline");
    let bin = folder.path().join("bin");
    fs::create_dir_all(&bin).expect("a folder");
    for name in ["bowline", "rnbd"] {
        // A second call finds what the first has made.
        let _ = std::os::unix::fs::symlink(program, bin.join(name));
    }
    let ask = "COMP_LINE=$1 COMP_POINT=${#1}; read -ra COMP_WORDS <<< \"$1\"; \
               [[ $1 == *' ' ]] && COMP_WORDS+=(''); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); \
               _bowline_words \"${COMP_WORDS[0]}\" \"${COMP_WORDS[-1]}\"; echo \"${COMPREPLY[*]}\"";
    let done = std::process::Command::new("bash")
        .args(["-c", &format!("{script}\n{ask}"), "bash", line])
        .env("PATH", format!("{}:/usr/bin:/bin", bin.display()))
        .env("XDG_RUNTIME_DIR", folder.path())
        .output()
        .expect("bash runs");
    String::from_utf8(done.stdout).expect("text")
}

#[test]
fn every_byte_is_compared_over_two_paths() {
    let folder = Folder::new();
    let _server = export(&folder, 2, &["--no-control"]);
    let (first, second) = (path(2, 1), path(2, 2));
    let words = ["rnbd", "verify", "disk0", "--from", "s1", "--path", &first, "--path", &second];
    let words = [&words[..], &["-T", "3", "--span", "8MiB", "--json"]].concat();
    let done = run(&folder, &words).exits(0);
    let object: Value = serde_json::from_str(&done.out).expect("one JSON object");
    assert_eq!(object["pass"], true);
    assert_eq!(object["damaged_blocks"], 0);
    assert!(object["operations"].as_u64() > Some(0), "{object}");
    assert!(object["durable_writes"].as_u64() > Some(0), "{object}");
    assert!(object["flushes"].as_u64() > Some(0), "{object}");
    assert_eq!(object["failovers"], 0, "{}", done.err);
    let paths = object["paths"].as_array().expect("a list");
    assert!(paths.len() == 2 && paths.iter().all(|path| path["state"] == "connected"), "{object}");
    let words = ["rnbd", "verify", "nothing", "--from", "s2", "--path", &first];
    run(&folder, &words).exits(254).complains(&["nothing"]);
}

#[test]
fn the_quickstart_breaks_paths_and_loses_nothing() {
    let folder = Folder::new();
    let done = run(&folder, &["quickstart", "--only", "rnbd", "--json"]).exits(0);
    let object: Value = serde_json::from_str(&done.out).expect("one JSON object");
    assert_eq!(object["pass"], true);
    assert_eq!(object["disk"]["failed"], 0);
    assert!(object["disk"]["failovers"].as_u64() > Some(0), "{object}");
    assert!(object["disk"]["longest_pause_ms"].as_u64().is_some(), "{object}");
    assert!(object["disk"]["files"].as_u64() > Some(100), "{object}");
    assert!(object["disk"]["tree_bytes"].as_u64() > Some(10 << 20), "{object}");
    // Under load, and at the end.
    assert!(object["disk"]["tree_reads"].as_u64() >= Some(2), "{object}");
}

#[test]
fn the_quickstart_notices_files_that_change_on_the_disk() {
    let folder = Folder::new();
    let mut quickstart = start(&folder, &["quickstart", "--only", "rnbd"]);
    quickstart.expect("path 2 goes silent");
    let entries = fs::read_dir(folder.path()).expect("a folder").flatten();
    let image = entries.map(|entry| entry.path().join("disk.img")).find(|image| image.exists());
    let image = image.expect("an image");
    let file = fs::OpenOptions::new().write(true).open(&image).expect("it opens");
    // The files are in the second half.
    file.write_all_at(&[0x5a; 4096], 136 << 20).expect("it is changed");
    let done = quickstart.finish().exits(1);
    assert!(done.out.contains("FAIL") && !done.out.contains("PASS"), "{done:?}");
    assert!(done.out.contains("125 files") && done.out.contains("not as it was"), "{done:?}");
    assert!(!image.parent().is_some_and(std::path::Path::exists), "{image:?} is left");
}

#[test]
fn mistakes_say_what_to_look_at() {
    let folder = Folder::new();
    let _server = export(&folder, 3, &["--no-control"]);
    let map = |words: &[&str]| run(&folder, &[&["rnbd", "map"], words].concat());
    let there = path(3, 1);
    map(&["nothing", "--from", "s1", "--path", &there])
        .exits(254)
        .complains(&["has no disk nothing"]);
    map(&["disk0", "--from", "s1", "--path", &there, "--port", "99"])
        .exits(152)
        .complains(&["127.43.3.1", "no server on port 99"]);
    let nobody = ["disk0", "--from", "s1", "--path", "127.43.3.8@127.43.3.9"];
    map(&[&nobody[..], &["--connect-timeout", "0.2"]].concat())
        .exits(146)
        .complains(&["no answer from 127.43.3.9 within 0.2 s"]);
    map(&["disk0", "--from", "s1", "--path", "9.9.9.9@127.43.3.1"])
        .exits(1)
        .complains(&["9.9.9.9", "ip address"]);
    map(&["disk0", "--from"]).exits(2).complains(&["bowline rnbd map --help"]);
    run(&folder, &["rnbd", "export", "--memory", "a=1"]).exits(2).complains(&["less than a block"]);
    assert!(run(&folder, &["rnbd", "list", "--help"]).exits(0).out.contains("migration"));

    // A command can also be told not to wait.
    let waiting = start(&folder, &[&["rnbd", "map"], &nobody[..]].concat());
    waiting.until_it_heeds(SIGINT);
    std::thread::sleep(std::time::Duration::from_millis(300));
    waiting.signal("-INT");
    waiting.finish().exits(1).complains(&["stopped before the disk was mapped"]);
}
