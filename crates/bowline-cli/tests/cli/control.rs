//! The control tree by commands: as JSON, file by file, and beside a process that hangs.

use std::{
    fs,
    os::unix::net::UnixListener,
    path::PathBuf,
    thread,
    time::{Duration, Instant},
};

use serde_json::Value;

use crate::support::{Done, Folder, Running, run, start};

/// An export and a client of it, with arguments for both.
fn pair(folder: &Folder, host: u8, more: &[&str]) -> [Running; 2] {
    let at = |index: u8| format!("127.47.{host}.{index}");
    let words = ["rnbd", "export", "--memory", "disk0=1MiB", "-I", &at(1)];
    let mut server = start(folder, &[&words[..], more].concat());
    server.expect("export disk0");
    let path = format!("{}@{}", at(11), at(1));
    let words = ["rnbd", "map", "disk0", "--from", "s1", "--path", &path];
    let mut client = start(folder, &[&words[..], more].concat());
    client.expect("mapped disk0");
    [server, client]
}

fn rtrs(folder: &Folder, words: &str) -> Done {
    let words: Vec<&str> = ["rtrs"].into_iter().chain(words.split_whitespace()).collect();
    run(folder, &words)
}

fn out(folder: &Folder, words: &str) -> String {
    rtrs(folder, words).exits(0).out
}

fn json(text: &str) -> Value {
    serde_json::from_str(text).expect("JSON")
}

#[test]
fn any_file_is_read_and_written_by_its_path() {
    let folder = Folder::new();
    let pair = pair(&folder, 1, &[]);
    let paths = "class/rtrs-client/s1/paths/ip:127.47.1.11@ip:127.47.1.1";
    let attempts = "class/rtrs-client/s1/max_reconnect_attempts";
    assert_eq!(out(&folder, &format!("get {attempts}")), "-1\n");
    assert_eq!(out(&folder, &format!("set {attempts} 7")), "");
    assert_eq!(out(&folder, &format!("get /{attempts}")), "7\n");
    // The error of the file is the exit status: EINVAL, ERANGE, ENOENT, EACCES, EISDIR.
    rtrs(&folder, &format!("set {attempts} 10000")).exits(234).complains(&[attempts]);
    rtrs(&folder, &format!("set {attempts} 99999999999")).exits(222);
    rtrs(&folder, "get class/rtrs-client/s2/mpath_policy").exits(254);
    rtrs(&folder, "set module/rtrs_server/parameters/max_chunk_size 1").exits(243);
    rtrs(&folder, "get class/rtrs-client").exits(235);
    assert!(out(&folder, &format!("get {paths}/cur_latency")).ends_with(" ns\n"));
    out(&folder, &format!("set {paths}/stats/rdma 1"));
    assert_eq!(out(&folder, &format!("get {paths}/stats/rdma")), "0 0 0 0 0 0\n");
    // Through a symbolic link, as with files.
    assert_eq!(out(&folder, "get class/rnbd-client/ctl/devices/disk0@s1/rnbd/state"), "open\n");
    assert_eq!(out(&folder, &format!("-s set {attempts} 3")), format!("echo '3' > /{attempts}\n"));
    // Two processes have a disk of this name, and the command names one of them.
    let both = folder.path().join("other.sock");
    let place = both.to_str().expect("a plain path");
    let words = ["rnbd", "export", "--memory", "d=1MiB", "-I", "127.47.1.2"];
    let mut other =
        start(&folder, &[&words[..], &["--no-invalidate", "--control", place]].concat());
    other.expect("export d");
    let parameter = "module/rtrs_server/parameters/always_invalidate";
    assert_eq!(out(&folder, &format!("get {parameter}")), "Y\n");
    assert_eq!(out(&folder, &format!("--control {place} get {parameter}")), "N\n");
    let third = folder.path().join("bowline/rnbd/third.sock");
    std::os::unix::fs::symlink(&both, &third).expect("a link");
    rtrs(&folder, &format!("get {parameter}")).exits(2).complains(&["third.sock", "--control"]);
    drop(pair);
    let words = ["rnbd", "map", "d", "--from", "s9", "--path", "127.47.1.12@127.47.1.2"];
    let mut client = start(&folder, &[&words[..], &["--max-reconnects", "3"]].concat());
    client.expect("mapped d");
    assert_eq!(out(&folder, "get class/rtrs-client/s9/max_reconnect_attempts"), "3\n");
}

#[test]
fn the_tree_is_one_json_object() {
    let folder = Folder::new();
    let _pair = pair(&folder, 2, &[]);
    let all = json(&out(&folder, "tree"));
    let all = all.as_object().expect("a member for each process");
    let places: Vec<&str> = all.keys().map(|place| place.rsplit('/').next().unwrap()).collect();
    assert!(places[0].starts_with("export-") && places[1].starts_with("map-"), "{places:?}");
    let client = &all.values().nth(1).expect("the client");
    assert_eq!(client["devices"]["virtual"]["rtrs-client"]["s1"]["max_reconnect_attempts"], -1);
    let session = json(&out(&folder, "tree --path class/rtrs-client/s1"));
    let session = session.as_object().expect("one process").values().next().expect("the client");
    assert_eq!(session["mpath_policy"], "min-inflight (MI: 1)");
    assert_eq!(session["paths"]["ip:127.47.2.11@ip:127.47.2.1"]["state"], "connected");
    assert_eq!(json(&out(&folder, "server tree")).as_object().map(|all| all.len()), Some(1));
    rtrs(&folder, "tree class/rtrs-client/s2").exits(254).complains(&["s2"]);

    // Words that print anything print JSON when asked.
    assert_eq!(json(&out(&folder, "list --json")), json(&out(&folder, "list json")));
    let stats = json(&out(&folder, "client stats s1 --json"));
    assert_eq!(stats.as_array().map(Vec::len), Some(1));
    assert_eq!(stats[0]["path"], "ip:127.47.2.11@ip:127.47.2.1");
    assert!(stats[0]["stats"]["rdma"].is_object(), "{stats}");
    let policy = json(&out(&folder, "policy s1 --json"));
    assert_eq!(policy["policy"], "min-inflight (MI: 1)");
    let file = json(&out(&folder, "get class/rtrs-client/s1/mpath_policy --json"));
    assert_eq!(file["value"], "min-inflight (MI: 1)");
    let file = json(&out(&folder, "get class/rtrs-client/s1/max_reconnect_attempts --json"));
    assert_eq!(file["value"], -1);

    // Arguments that name no session, or nothing at all.
    let all = json(&out(&folder, "dump json"));
    assert_eq!(all["imports"][0]["mapping_path"], "disk0");
    assert_eq!(all["outgoing paths"][0]["sessname"], "s1");
    assert_eq!(json(&out(&folder, "client dump json")).as_object().map(|all| all.len()), Some(3));
    assert!(out(&folder, "devs list").contains("disk0"));
    assert!(out(&folder, "verbose list notree").contains("s1"));
    assert!(out(&folder, "version").starts_with("bowline "));
    assert!(out(&folder, "help").contains("get FILE"));
    assert!(out(&folder, "list --help").contains("get FILE"));
    let next = |words: &str| out(&folder, &format!("-c {words}"));
    assert!(next("").contains("tree\n") && !next("").contains("export\n"));
    assert_eq!(next("show"), "s1\n");
}

#[test]
fn paths_are_meant_where_a_path_is_named() {
    // tests [NB-41]
    let folder = Folder::new();
    let _pair = pair(&folder, 5, &[]);
    let path = "ip:127.47.5.11@ip:127.47.5.1";
    let state = || {
        let all = out(&folder, "client path list state csv noheaders nototals");
        all.trim().to_owned()
    };
    assert_eq!(state(), "\"connected\"");
    assert!(out(&folder, &format!("show {path} json")).contains(path));
    rtrs(&folder, &format!("disconnect {path}")).exits(2).complains(&["`client` or `server`"]);
    rtrs(&folder, "client disconnect s1").exits(2).complains(&["client path", "server session"]);
    rtrs(&folder, "show ip:127.47.5.1").exits(254).complains(&["`path` before the word"]);
    rtrs(&folder, &format!("client disconnect {path}")).exits(0);
    assert_eq!(state(), "\"disconnected\"");
}

#[test]
fn what_is_known_of_the_network_is_told_on_both_sides() {
    // tests [RS-50]
    let folder = Folder::new();
    let _pair = pair(&folder, 6, &[]);
    let path = "paths/ip:127.47.6.11@ip:127.47.6.1";
    let tree = json(&out(&folder, "tree"));
    let text = tree.to_string();
    assert_eq!(text.matches("least_round_trip_usec").count(), 2, "{text}");
    for side in ["client", "server"] {
        let file = format!("class/rtrs-{side}/s1/{path}/stats/network");
        assert_eq!(out(&folder, &format!("get {file}")).split_whitespace().count(), 11);
        rtrs(&folder, &format!("set {file} 1")).exits(243);
        let all = json(&out(&folder, &format!("{side} stats s1 --json")));
        let network = &all[0]["stats"]["network"];
        assert!(network["least_round_trip_usec"].as_u64() > Some(0), "{side}: {all}");
        // No delay limits the window within a host [CC-1].
        assert_eq!(network["window"], 0, "{side}: {all}");
        let text = out(&folder, &format!("{side} stats s1"));
        for name in ["network ", " window ", " lost_gaps ", " resent ", " cnps_received "] {
            assert!(text.contains(name), "{side}: {text}");
        }
    }
}

#[test]
fn the_files_of_one_kernel_are_served_when_asked_for() {
    // tests [RS-43] [RS-44] [RS-46]
    let folder = Folder::new();
    let _pair = pair(&folder, 3, &["--files", "6.12"]);
    let path = "paths/ip:127.47.3.11@ip:127.47.3.1";
    let words = |side: &str| {
        let text = out(&folder, &format!("get class/rtrs-{side}/s1/{path}/stats/rdma"));
        text.split_whitespace().count()
    };
    assert_eq!((words("client"), words("server")), (6, 4));
    for file in [
        "rtrs-client/s1/mp_policy".to_owned(),
        format!("rtrs-client/s1/{path}/stats/rdma_lat"),
        format!("rtrs-client/s1/{path}/stats/cpu_migration"),
        format!("rtrs-server/s1/{path}/stats/reset_all"),
        format!("rtrs-server/s1/{path}/stats/wc_completion"),
        format!("rtrs-server/s1/{path}/stats/network"),
        format!("rtrs-client/s1/{path}/stats/network"),
    ] {
        rtrs(&folder, &format!("get class/{file}")).exits(254);
    }
    rtrs(&folder, &format!("set class/rtrs-client/s1/{path}/stats/reset_all 0")).exits(234);
    let words = ["rnbd", "export", "--memory", "d=1MiB", "--files", "5.4"];
    run(&folder, &words).exits(2).complains(&["5.4", "6.12"]);
}

#[test]
fn a_process_that_hangs_is_told_of_and_left_out() {
    let folder = Folder::new();
    let [server, _client] = pair(&folder, 4, &[]);
    server.signal("-STOP");
    // One socket never accepts; the other accepts and never answers.
    let place = folder.path().join("bowline/rnbd/silent.sock");
    let listener = UnixListener::bind(&place).expect("a socket");
    thread::spawn(move || listener.incoming().map(std::mem::forget).count());
    let list = run(&folder, &["rnbd", "client", "list", "noheaders"]).exits(0);
    assert_eq!(list.out, "s1  disk0  rnbd0  open  rw  \n");
    assert!(list.err.contains("export-") && list.err.contains("silent.sock"), "{list:?}");
    assert_eq!(list.err.lines().count(), 2, "{list:?}");
    assert!(rtrs(&folder, "list").exits(0).out.contains("s1"));
    // All sockets are queried at the same time: one after the other would take two seconds each.
    let others: Vec<(PathBuf, UnixListener)> = (0..20)
        .map(|n| place.with_file_name(format!("silent-{n}.sock")))
        .map(|place| (place.clone(), UnixListener::bind(&place).expect("a socket")))
        .collect();
    let begin = Instant::now();
    let list = run(&folder, &["rnbd", "client", "list", "noheaders"]).exits(0);
    assert_eq!(list.err.lines().count(), 2 + others.len(), "{list:?}");
    assert!(begin.elapsed() < Duration::from_secs(30), "{:?}", begin.elapsed());
    for (place, listener) in others {
        drop(listener);
        fs::remove_file(place).expect("it was there");
    }
    let words = ["rnbd", "list", "--control", place.to_str().expect("a plain path")];
    run(&folder, &words).exits(256 - 110).complains(&["silent.sock", "timed out"]);
    rtrs(&folder, "policy s1 round-robin").exits(0);
    // The process that hangs may have a disk rnbd0, too: the command must not guess.
    fs::rename(&place, place.with_file_name("map-1.sock")).expect("another name");
    let unmap = ["rnbd", "unmap", "rnbd0", "force"];
    let refused = run(&folder, &unmap).exits(256 - 110);
    assert!(refused.err.contains("map-1.sock does not answer, and may have"), "{refused:?}");
    let sockets = fs::read_dir(folder.path().join("bowline/rnbd")).expect("a folder").flatten();
    let is_own = |name: &str| name.starts_with("map-") && name != "map-1.sock";
    let own = sockets.map(|entry| entry.path());
    let own = own
        .into_iter()
        .find(|place| place.file_name().and_then(|name| name.to_str()).is_some_and(is_own));
    let own = own.expect("the socket of the client");
    let chosen = ["--control", own.to_str().expect("a plain path")];
    run(&folder, &[&unmap[..], &chosen].concat()).exits(0);
}
