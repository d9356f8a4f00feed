//! Mistakes with mapped disks: error texts that say what to check, and disks that stay mapped.

use std::{fs, path::Path, thread, time::Duration};

use serde_json::{Value, json};

use crate::support::{Done, Folder, Running, control, run, start};
use bowline_testkit::skipped;

fn own(host: u8) -> String {
    format!("127.61.{host}.11")
}

fn server_ip(host: u8) -> String {
    format!("127.61.{host}.1")
}

fn path(host: u8) -> String {
    format!("{}@{}", own(host), server_ip(host))
}

fn export(folder: &Folder, host: u8, more: &[&str]) -> Running {
    let address = server_ip(host);
    let words = ["rnbd", "export", "--memory", "disk0=1MiB", "--memory", "disk1=1MiB"];
    let words = [&words[..], &["-I", &address, "--no-control"], more].concat();
    let mut server = start(folder, &words);
    server.expect(&format!("listening on {address}:"));
    server
}

fn map(folder: &Folder, host: u8, more: &[&str]) -> Running {
    let words = ["rnbd", "map", "disk0", "--from", "s1", "--path", &path(host)];
    start(folder, &[&words[..], more].concat())
}

fn mapped(folder: &Folder, host: u8, more: &[&str]) -> Running {
    let mut client = map(folder, host, more);
    client.expect("mapped disk0 ");
    client
}

fn rnbd(folder: &Folder, words: &str) -> Done {
    let words: Vec<&str> = ["rnbd"].into_iter().chain(words.split(' ')).collect();
    run(folder, &words)
}

fn disks(folder: &Folder) -> Vec<(String, String)> {
    let all = rnbd(folder, "client device list json").exits(0).out;
    let all: Value = serde_json::from_str(&all).expect("JSON");
    let all = all["imports"].as_array().cloned().unwrap_or_default();
    let text = |disk: &Value, key: &str| disk[key].as_str().expect("text").to_owned();
    all.iter().map(|disk| (text(disk, "mapping_path"), text(disk, "access_mode"))).collect()
}

fn plain(path: &Path) -> &str {
    path.to_str().expect("a plain path")
}

fn end(process: Running) {
    process.signal("-TERM");
    process.finish().exits(0);
}

#[test]
fn disks_that_are_mapped_again_keep_their_process() {
    // tests [NB-42]
    let folder = Folder::new();
    let server = export(&folder, 1, &[]);
    let socket = folder.path().join("control");
    let client = mapped(&folder, 1, &["--control", plain(&socket)]);
    let write = |path: &str, value: &str| {
        let line = json!({"version": 1, "op": "write", "path": path, "value": value});
        control(&socket, &line.to_string())
    };
    let words = format!("sessname=s1 device_path=disk0 path=ip:{}", path(1).replace('@', "@ip:"));
    assert_eq!(write("/block/rnbd0/rnbd/unmap_device", "force"), json!({"ok": null}));
    // The next command may map the disk again a little later.
    thread::sleep(Duration::from_millis(100));
    assert_eq!(write("/class/rnbd-client/ctl/map_device", &words), json!({"ok": null}));
    thread::sleep(Duration::from_millis(1500));
    assert_eq!(write("/block/rnbd0/rnbd/unmap_device", "force"), json!({"ok": null}));
    client.finish().exits(0);
    end(server);
}

#[test]
fn words_that_work_themselves_refuse_to_simulate() {
    let folder = Folder::new();
    let server = export(&folder, 9, &[]);
    let disk = format!("disk0 --from s1 --path {}", path(9));
    for (options, word, what) in [
        ("--simulate", format!("verify {disk} --time 1"), "--simulate"),
        ("-d", format!("verify {disk} --time 1"), "--debug"),
        ("--sysfs /nonexistent", format!("map {disk}"), "--sysfs"),
        ("-s", "export --memory disk1=1MiB --no-control".to_owned(), "--simulate"),
        ("--control /nonexistent/socket", format!("verify {disk} --time 1"), "--control"),
    ] {
        let done = rnbd(&folder, &format!("{options} {word}")).exits(2);
        assert!(done.err.contains(what), "{}", done.err);
    }
    end(server);
}

#[test]
fn words_without_a_port_mean_that_of_the_client() {
    // tests [NB-34] [NB-42]
    let folder = Folder::new();
    let server = export(&folder, 2, &["-p", "2000"]);
    let client =
        mapped(&folder, 2, &["-p", "2000", "--path-dead", "0.5", "--connect-timeout", "1"]);
    rnbd(&folder, "map disk1 from s1 ro").exits(0);
    rnbd(&folder, "remap s1 force").exits(0);
    let pair = |disk: &str, access: &str| (disk.to_owned(), access.to_owned());
    assert_eq!(disks(&folder), [pair("disk0", "rw"), pair("disk1", "ro")]);
    rnbd(&folder, "unmap disk1").exits(0);
    rnbd(&folder, &format!("map disk1 from s2 {} ro", path(2))).exits(0);
    assert_eq!(disks(&folder), [pair("disk0", "rw"), pair("disk1", "ro")]);

    // A disk that cannot be mapped again is reported.
    server.signal("-KILL");
    server.finish();
    let ip = path(2).replace('@', "@ip:");
    let done = rnbd(&folder, "remap s1 force");
    assert_ne!(done.code, Some(0));
    done.complains(&[
        "s1 has not answered for disk0",
        "unmapped now",
        &format!("`rnbd map disk0 from s1 ip:{ip} rw`"),
    ]);
    drop(client);
}

#[test]
fn a_session_that_is_not_admitted_is_told_so() {
    // tests [RT-64]
    let folder = Folder::new();
    let server = export(&folder, 3, &["--allow", "127.61.99.0/24"]);
    let done = map(&folder, 3, &[]).finish().exits(256 - 1);
    assert!(!done.err.contains("writing"), "{done:?}");
    done.complains(&["127.61.3.1 does not accept", "--allow"]);
    end(server);
}

#[test]
fn a_name_that_is_taken_is_told_with_a_way_out() {
    // tests [RS-48]
    let folder = Folder::new();
    let server = export(&folder, 8, &[]);
    let first = mapped(&folder, 8, &["--no-control"]);
    let other = "127.61.8.12@127.61.8.1";
    let words = ["rnbd", "map", "disk1", "--from", "s1", "--path", other, "--no-control"];
    // Perhaps the other one has lost its power, and the server has not noticed.
    let patience = ["--connect-timeout", "2"];
    let mut done = run(&folder, &[&words[..], &patience].concat()).exits(256 - 104);
    assert!(!done.err.contains("no server"), "{done:?}");
    let (first_line, rest) = done.err.split_once('\n').expect("two lines");
    assert!(first_line.ends_with("trying again for 2 s"), "{done:?}");
    done.err = rest.to_owned();
    done.complains(&["refused the connection", "uses the name", "--from NAME --path 127.61.8.12@"]);
    drop(first);
    end(server);
}

/// They move no cursor and forge no lines of a terminal or a log.
#[test]
fn names_with_control_characters_are_shown_escaped() {
    let folder = Folder::new();
    let address = server_ip(19);
    let name = "a\x1b[2J\nexport b=1MiB";
    let words = ["rnbd", "export", "--memory", name, "-I", &address];
    let mut server = start(&folder, &words);
    server.expect(r"export a\u001b[2J\nexport b bytes=1048576");
    let shown = |words: &str| {
        let out = rnbd(&folder, words).exits(0).out;
        assert!(!out.contains('\x1b') && out.contains(r"a\u001b[2J\nexport b"), "{words}: {out}");
    };
    shown("exports");
    let client = {
        let words = ["rnbd", "map", "a\x1b[2J\nexport b", "--from", "s1", "--path", &path(19)];
        let mut client = start(&folder, &words);
        client.expect(r"mapped a\u001b[2J\nexport b bytes=");
        client
    };
    for words in ["list", "client device list", "server device list csv", "show rnbd0"] {
        shown(words);
    }
    client.signal("-INT");
    client.finish().exits(0);
    end(server);
}

/// As after a loss of power: nobody tells the server that its client is gone, since the notes of
/// what was connected are gone as well, and it takes the client that comes back for another one.
#[test]
fn a_client_that_comes_back_after_power_loss_is_let_in() {
    // tests [RS-48]
    let (server_folder, before, after) = (Folder::new(), Folder::new(), Folder::new());
    let server = export(&server_folder, 18, &[]);
    let first = mapped(&before, 18, &["--no-control"]);
    first.signal("-KILL");
    let _ = first.finish();
    let mut again = map(&after, 18, &["--no-control"]);
    again.expect("mapped disk0 ");
    again.until_told("has not noticed yet that an earlier client of this name is gone");
    again.signal("-INT");
    again.finish().exits(0);
    end(server);
}

#[test]
fn of_several_paths_not_all_are_said_to_be_silent() {
    let folder = Folder::new();
    let server = export(&folder, 4, &[]);
    let silent = ["--path", "127.61.4.12@127.61.4.2", "--connect-timeout", "0.3"];
    map(&folder, 4, &silent)
        .finish()
        .exits(146)
        .complains(&["no answer from one of 127.61.4.1, 127.61.4.2 within 0.3 s"]);
    end(server);
}

#[test]
fn front_ends_that_cannot_be_opened_are_named() {
    let folder = Folder::new();
    let server = export(&folder, 5, &[]);
    let refused = |front_end: &str, place: &Path| {
        map(&folder, 5, &[front_end, plain(place)]).finish().exits(1)
    };
    let missing = folder.path().join("missing/disk.sock");
    refused("--nbd", &missing).complains(&["disk0", plain(&missing), "No such file"]);
    let long = folder.path().join("n".repeat(120));
    refused("--nbd", &long).complains(&["disk0", plain(&long), "File name too long"]);
    let file = folder.write("victim", "precious");
    refused("--nbd", &file).complains(&["disk0", plain(&file), "Address already in use"]);
    let done = refused("--fuse", &file);
    assert!(!done.err.contains("FUSE"), "FUSE is not what is wrong: {done:?}");
    done.complains(&["cannot mount", plain(&file), "File exists"]);
    assert_eq!(fs::read_to_string(&file).expect("it is there"), "precious");
    end(server);
}

#[test]
fn a_file_that_is_too_small_for_a_load_is_told_so() {
    let folder = Folder::new();
    let file = folder.write("small", &"x".repeat(100));
    let verify = |more: &[&str]| {
        let words = ["rnbd", "verify", "--file", plain(&file)];
        run(&folder, &[&words[..], more].concat()).exits(234)
    };
    verify(&[]).complains(&["small", "smaller than a block of 512 bytes", "65536"]);
    verify(&["--span", "4k"]).complains(&["--span 4096", "65536"]);
    fs::write(&file, "x".repeat(1000)).expect("a file");
    verify(&[]).complains(&["it has 512 bytes", "65536"]);
}

#[test]
fn what_kill_9_leaves_behind_is_in_nobodys_way() {
    let folder = Folder::new();
    let server = export(&folder, 6, &[]);
    let [files, tree, nbd] = ["my files", "tree", "nbd"].map(|name| folder.path().join(name));
    let front_ends = ["--fuse", plain(&files), "--tree", plain(&tree), "--nbd", plain(&nbd)];
    let mut client = map(&folder, 6, &front_ends);
    if !client.hears("mapped disk0 ") {
        let done = client.finish();
        assert!(done.err.contains("FUSE needs"), "{done:?}");
        skipped::without_fuse(done.err.trim());
        return end(server);
    }
    for _ in 0..2 {
        client.signal("-KILL");
        client.finish();
        assert!(fs::metadata(&files).is_err(), "a dead mount");
        client = restarted(&folder, &front_ends);
        assert_eq!(fs::metadata(files.join("rnbd0")).expect("the disk").len(), 1 << 20);
        assert!(tree.join("class").is_dir());
        let sockets = fs::read_dir(folder.path().join("bowline/rnbd")).expect("a folder");
        let sockets: Vec<_> = sockets.map(|entry| entry.expect("a socket").file_name()).collect();
        assert_eq!(sockets, [format!("map-{}.sock", client.id()).as_str()]);
    }
    end(client);
    for dir in [files, tree] {
        assert!(fs::read_dir(dir).expect("an empty folder").next().is_none());
    }
    end(server);
}

/// Maps the disk again as soon as the server has noticed that the client before is dead [NB-61].
fn restarted(folder: &Folder, front_ends: &[&str]) -> Running {
    loop {
        let mut client = map(folder, 6, front_ends);
        if client.hears("mapped disk0 ") {
            return client;
        }
        let done = client.finish();
        assert!(
            done.err.contains("refused the connection") || done.err.contains("for writing"),
            "{done:?}"
        );
        thread::sleep(Duration::from_millis(200));
    }
}

#[test]
fn addresses_are_no_names_of_sessions() {
    // tests [RT-68]
    let folder = Folder::new();
    let server = export(&folder, 7, &[]);
    let parts = ["without . and /", "127-61-7-1"];
    let words = ["rnbd", "map", "disk0", "--from", "127.61.7.1", "--path", &path(7)];
    run(&folder, &words).exits(234).complains(&parts);
    let client = mapped(&folder, 7, &["-I", "127.61.7.12"]);
    rnbd(&folder, "map disk1 from 127.61.7.1 ip:127.61.7.12@ip:127.61.7.1")
        .exits(234)
        .complains(&parts);
    // An invalid path is a usage error in every command.
    rnbd(&folder, "add s1 foo").exits(234).complains(&["\"foo\" is not a path"]);
    rnbd(&folder, "recover s1 add-missing").exits(256 - 6).complains(&["s1", "@SERVER"]);
    end(client);

    // A session that is named after an address knows its server.
    let words = ["rnbd", "map", "disk0", "--from", "127.61.7.1"];
    let mut client = start(&folder, &words);
    client.expect("mapped disk0 ");
    let name =
        rnbd(&folder, "client session list sessname csv noheaders notree nototals").exits(0).out;
    rnbd(&folder, &format!("recover {} add-missing", name.trim().trim_matches('"'))).exits(0);
    end(client);
    end(server);
}

#[test]
fn a_disk_that_is_mapped_already_and_a_wrong_value_are_explained() {
    let folder = Folder::new();
    let _server = export(&folder, 40, &[]);
    let client = mapped(&folder, 40, &[]);
    client.until_logged("no program can use rnbd0 yet: --nbd SOCKET");
    rnbd(&folder, "map disk0 from s1")
        .exits(256 - 17)
        .complains(&["disk0 of session s1 is mapped already as rnbd0", "`rnbd list`"]);
    rnbd(&folder, "map nosuch from s1")
        .exits(256 - 2)
        .complains(&["s1 has no disk nosuch", "`rnbd exports` there"]);
    rnbd(&folder, "policy s1 foo")
        .exits(2)
        .complains(&["\"foo\" is not a policy", "round-robin, min-inflight or min-latency"]);
    let set = |file: &str, value: &str| run(&folder, &["rtrs", "set", file, value]).exits(234);
    let attempts = "class/rtrs-client/s1/max_reconnect_attempts";
    set(attempts, "nine").complains(&["\"nine\" is not between -1", "and 9999"]);
    set(attempts, "10000").complains(&["\"10000\" is not between -1"]);
    let usage = "\"gone\" is not as in: echo <normal|force> > unmap_device";
    set("block/rnbd0/rnbd/unmap_device", "gone").complains(&[usage]);
}

#[test]
fn a_list_of_another_machine_says_that_the_protocol_has_none() {
    // tests [NB-78]
    let folder = Folder::new();
    for words in ["list 192.0.2.1", "list server.example", "client list ip:fe80::1"] {
        let done = rnbd(&folder, words).exits(2);
        let name = words.rsplit(' ').next().expect("a name");
        done.complains(&[name, "no message that lists the disks", "`rnbd exports` there"]);
    }
}
