//! Nodes that talk: quickstart, node, ping, info, send and recv.

use std::{
    io::Write,
    net::TcpListener,
    os::unix::net::UnixStream,
    path::PathBuf,
    time::{Duration, Instant},
};

use bowline::rds::Node;
use bowline_testkit::skipped;

use crate::support::{Folder, Running, control, run, start, start_as};

/// Starts a node and waits until it is ready.
fn node(folder: &Folder, address: &str, more: &[&str]) -> Running {
    let mut words = vec!["node", "--address", address];
    words.extend(more);
    let mut node = start(folder, &words);
    node.expect("ready");
    node
}

fn socket(folder: &Folder, address: &str) -> PathBuf {
    folder.path().join("bowline").join(format!("{address}.sock"))
}

/// Names of the members of a JSON object.
fn members(text: &str) -> Vec<String> {
    let value: serde_json::Value = serde_json::from_str(text).expect("JSON");
    value.as_object().expect("an object").keys().cloned().collect()
}

#[test]
fn the_quickstart_passes_and_tells_what_it_did() {
    let folder = Folder::new();
    let done = run(
        &folder,
        &[
            "quickstart",
            "--only",
            "rds",
            "--bytes",
            "64MiB",
            "--local",
            "127.41.1.1",
            "--remote",
            "127.41.1.2",
        ],
    )
    .exits(0);
    let verdict: Vec<&str> = done.out.lines().filter(|line| line.starts_with("PASS")).collect();
    assert_eq!(verdict.len(), 1, "{done:?}");
    for part in ["node A  127.41.1.1", "node B  127.41.1.2", "6 times", "Next", "exactly once"] {
        assert!(done.out.contains(part), "no {part:?} in {done:?}");
    }
    assert_eq!(done.err, "");
    // It is not in PATH, so what to do next begins with where it is.
    let next = done.out.lines().find(|line| line.contains(" node --address")).expect("a line");
    let program = next.split_whitespace().next().expect("a command");
    let found = std::fs::canonicalize(program).expect("a path from here");
    let own = std::fs::canonicalize(env!("CARGO_BIN_EXE_bowline")).expect("the command");
    assert_eq!(found, own, "{next}");
}

#[test]
fn the_quickstart_is_readable_for_programs() {
    let folder = Folder::new();
    let words = ["quickstart", "--only", "rds", "--bytes", "8MiB", "--cuts", "2", "--json"];
    let words = [&words[..], &["--local", "127.41.2.1", "--remote", "127.41.2.2"]].concat();
    let done = run(&folder, &words).exits(0);
    let object: serde_json::Value = serde_json::from_str(&done.out).expect("one JSON object");
    assert_eq!(object["pass"], true);
    assert_eq!(object["cuts"], 2);
    assert!(object["connections_cut"].as_u64() >= Some(2), "{object}");
    assert!(object["bytes"].as_u64() >= Some(8 << 20), "{object}");
    assert!(object["round_trip_usec"]["p50"].as_u64().is_some(), "{object}");
}

#[test]
fn the_quickstart_over_rdma_passes_and_compares_what_is_written_and_read() {
    let folder = Folder::new();
    let words = ["quickstart", "--only", "rds", "--rdma", "--bytes", "32MiB", "--cuts", "4"];
    let words = [&words[..], &["--local", "127.41.14.1", "--remote", "127.41.14.2"]].concat();
    let done = run(&folder, &words).exits(0);
    for part in ["over RDMA", "2. Node B writes and reads", "ends its RDMA", "4 RDMA", "PASS"] {
        assert!(done.out.contains(part), "no {part:?} in {done:?}");
    }
    assert_eq!(done.err, "");
    let done = run(&folder, &[&words[..], &["--json"]].concat()).exits(0);
    let object: serde_json::Value = serde_json::from_str(&done.out).expect("one JSON object");
    assert_eq!(object["pass"], true);
    assert!(object["connections_cut"].as_u64() >= Some(4), "{object}");
    let operations = object["remote"]["operations"].as_u64();
    assert!(operations >= Some(2), "{object}");
    assert_eq!(object["remote"]["bytes"].as_u64(), operations.map(|n| n << 20));
}

#[test]
fn the_quickstart_does_not_pass_when_a_node_dies_or_the_user_stops_it() {
    let folder = Folder::new();
    let words = ["quickstart", "--bytes", "1000GiB"];
    for (near, far, kill) in
        [("127.41.13.1", "127.41.13.2", true), ("127.41.13.3", "127.41.13.4", false)]
    {
        let words = [&words[..], &["--local", near, "--remote", far]].concat();
        let mut quickstart = start(&folder, &words);
        let told = quickstart.expect("a second process, ").said().lines().last();
        let pid = told.and_then(|line| line.rsplit(' ').next()).expect("a process").to_owned();
        quickstart.expect("2. Moving");
        if kill {
            let status = std::process::Command::new("kill").args(["-KILL", &pid]).status();
            assert!(status.expect("kill runs").success());
        } else {
            quickstart.signal("-INT");
        }
        let done = quickstart.finish().exits(1);
        assert!(!done.out.contains("PASS"), "{done:?}");
        if kill {
            assert!(done.out.contains("the second process ended"), "{done:?}");
        } else {
            done.complains(&["without a result"]);
        }
    }
}

#[test]
fn a_node_answers_pings_and_questions_and_stops_when_told() {
    let folder = Folder::new();
    let node = node(&folder, "127.41.3.1", &["--echo", "4000"]);
    let ping = run(&folder, &["ping", "-c", "3", "-i", "50ms", "-I", "127.41.3.2", "127.41.3.1"])
        .exits(0)
        .out;
    let lines: Vec<&str> = ping.lines().collect();
    for (index, line) in lines[..3].iter().enumerate() {
        let (number, rest) = line.split_once(": ").expect("a colon");
        assert_eq!(number, format!("{:4}", index + 1), "{ping}");
        let usec = rest.strip_suffix(" usec").expect("a unit");
        assert!(usec.parse::<u64>().is_ok(), "{ping}");
    }
    assert_eq!(lines[4], "--- 127.41.3.1 rds ping statistics ---");
    assert!(lines[5].starts_with("3 requests sent, 3 replies received, 0% lost"), "{ping}");
    assert!(lines[6].starts_with("round trip min/avg/max/mdev = "), "{ping}");

    let text = run(&folder, &["info", "-cknp"]).exits(0).out;
    let sections: Vec<&str> = text.split("\n\n").collect();
    assert_eq!(sections.len(), 4, "{text}");
    let heads: Vec<Vec<&str>> =
        sections.iter().map(|section| section.trim_start().lines().take(2).collect()).collect();
    assert_eq!(heads[0], ["Counters:", "              CounterName            Value"]);
    assert_eq!(
        heads[1],
        [
            "RDS Sockets:",
            "      BoundAddr BPort        ConnAddr CPort     SndBuf     RcvBuf    Inode",
        ]
    );
    assert_eq!(
        heads[2],
        [
            "RDS Connections:",
            "      LocalAddr      RemoteAddr  Tos           NextTX           NextRX Flgs",
        ]
    );
    assert_eq!(heads[3][0], "RDS Paths:");
    assert!(sections[0].contains("\n               conn_reset "), "{text}");
    assert!(sections[1].contains("\n     127.41.3.1  4000         0.0.0.0     0  268435456"));
    assert!(sections[2].contains("\n     127.41.3.1      127.41.3.2    0 "), "{text}");

    let object: serde_json::Value =
        serde_json::from_str(&run(&folder, &["info", "--json"]).exits(0).out).expect("JSON");
    assert_eq!(object["node"]["addresses"], serde_json::json!(["127.41.3.1"]));
    let pings = object["counters"].as_array().expect("counters").iter();
    let pings = pings.filter(|counter| counter["name"] == "recv_ping").map(|c| &c["value"]);
    assert!(pings.clone().all(|value| value.as_u64() >= Some(3)) && pings.count() == 1);
    assert_eq!(object["sockets"][0]["bound_port"], 4000);
    assert_eq!(object["connections"][0]["remote_addr"], "127.41.3.2");

    let rdma = run(&folder, &["info", "-I"]).exits(0);
    rdma.complains(&["Protocol not available"]);

    node.signal("-TERM");
    let done = node.finish().exits(0);
    assert!(done.out.contains("stopped; peers have acknowledged everything"), "{done:?}");
    run(&folder, &["info"]).exits(1).complains(&["no node runs here"]);
}

#[test]
fn rds_ping_is_called_as_by_scripts() {
    let folder = Folder::new();
    let _node = node(&folder, "127.41.16.1", &[]);
    let alias = folder.path().join("rds-ping");
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_bowline"), &alias).expect("a link");
    let words = ["-n", "1", "-c", "2", "-i", "10ms", "-I", "127.41.16.2", "127.41.16.1"];
    let done = start_as(alias.as_ref(), &folder, &words).finish().exits(0);
    assert!(done.out.contains("2 requests sent, 2 replies received, 0% lost"), "{done:?}");
}

#[test]
fn a_ping_from_the_address_of_a_node_goes_through_that_node() {
    let folder = Folder::new();
    let near = node(&folder, "127.41.11.1", &[]);
    let _far = node(&folder, "127.41.11.2", &[]);
    for destination in ["127.41.11.2", "127.41.11.1"] {
        let words = ["ping", "-c", "2", "-i", "20ms", "-I", "127.41.11.1", destination];
        let done = run(&folder, &words).exits(0);
        assert!(done.out.starts_with("   1: "), "{done:?}");
        assert!(done.out.contains("\n2 requests sent, 2 replies received, 0% lost"), "{done:?}");
    }
    let words = ["ping", "-c", "1", "-W", "0.3", "-I", "127.41.11.1", "127.41.11.3"];
    let done = run(&folder, &words).exits(1);
    assert!(done.out.starts_with("   1: ERROR: Connection refused\n"), "{done:?}");
    // The same, measured by the node.
    let control = folder.path().join("bowline/127.41.11.1.sock");
    let control = control.to_str().expect("a path");
    let words = ["ping", "-c", "1", "-W", "0.3", "--control", control, "127.41.11.3"];
    let done = run(&folder, &words).exits(1);
    assert!(done.out.starts_with("   1: ERROR: Connection refused\n"), "{done:?}");
    near.signal("-TERM");
    let done = near.finish();
    assert!(done.out.contains("Z peer 127.41.11.2: paths up ("), "{done:?}");
}

#[test]
fn a_ping_without_an_answer_fails() {
    let folder = Folder::new();
    let words = ["ping", "-c", "2", "-i", "0.1", "-W", "0.4", "-I", "127.41.4.1", "127.41.4.2"];
    let done = run(&folder, &words).exits(1);
    assert!(done.out.contains("   1: ERROR: Connection refused\n"), "{done:?}");
    assert!(done.out.contains("2 requests sent, 0 replies received, 100% lost"), "{done:?}");
}

#[test]
fn a_ping_tells_a_host_that_is_silent_from_one_that_refuses() {
    let folder = Folder::new();
    // It accepts connections and says nothing.
    let _silent = TcpListener::bind("127.41.4.4:16385").expect("a listener");
    let words = ["ping", "--json", "-c", "1", "-W", "0.4", "-I", "127.41.4.3", "127.41.4.4"];
    let done = run(&folder, &words).exits(1);
    assert!(done.out.contains("\"errno\":110"), "{done:?}");
}

#[test]
fn an_interrupted_ping_prints_its_summary() {
    let folder = Folder::new();
    let _node = node(&folder, "127.41.5.1", &[]);
    let words = ["ping", "--json", "-i", "10ms", "-I", "127.41.5.2", "127.41.5.1"];
    let mut ping = start(&folder, &words);
    ping.expect("\"sequence\":5");
    ping.signal("-INT");
    let done = ping.finish().exits(0);
    let last = done.out.lines().last().expect("a line");
    let summary: serde_json::Value = serde_json::from_str(last).expect("JSON");
    assert_eq!(summary["type"], "summary");
    assert!(summary["received"].as_u64() >= Some(5), "{summary}");
}

#[test]
fn a_taken_port_is_explained() {
    let folder = Folder::new();
    let _other = TcpListener::bind("127.41.6.1:16385").expect("a free port");
    let done = run(&folder, &["node", "--address", "127.41.6.1"]).exits(1);
    done.complains(&["16385", "127.41.6.1"]);
}

#[test]
fn several_nodes_need_a_choice_and_a_killed_one_does_not_count() {
    let folder = Folder::new();
    let first = node(&folder, "127.41.7.1", &[]);
    let second = node(&folder, "127.41.7.2", &[]);
    run(&folder, &["info"]).exits(1).complains(&["127.41.7.1.sock", "127.41.7.2.sock"]);
    let path = socket(&folder, "127.41.7.2");
    run(&folder, &["info", "-c", "--control", path.to_str().expect("a plain path")]).exits(0);
    second.signal("-KILL");
    assert_eq!(second.finish().code, None);
    assert!(path.exists());
    run(&folder, &["info", "-c"]).exits(0);
    // A new node replaces the stale socket.
    let _third = node(&folder, "127.41.7.2", &[]);
    run(&folder, &["info", "-c", "--control", path.to_str().expect("a plain path")]).exits(0);
    drop(first);
}

#[test]
fn a_control_socket_makes_no_folder_but_that_of_its_user() {
    let folder = Folder::new();
    let missing = folder.path().join("missing");
    let place = missing.join("x.sock");
    let place = place.to_str().expect("a plain path");
    let done = run(&folder, &["node", "--address", "127.41.15.2", "--control", place]).exits(1);
    done.complains(&[place, "there is no folder", "make it"]);
    assert!(!missing.exists());
}

#[test]
fn an_echo_at_any_port_says_which_one() {
    let folder = Folder::new();
    let mut node = start(&folder, &["node", "--address", "127.41.15.3", "--echo", "0"]);
    node.expect("ready");
    let said = node.said();
    assert!(said.contains("echo on 127.41.15.3:") && !said.contains(":0\n"), "{said}");
}

#[test]
fn a_control_folder_that_all_may_write_is_refused() {
    let folder = Folder::new();
    let place = folder.path().join("bowline");
    std::fs::create_dir(&place).expect("a folder");
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o777);
    std::fs::set_permissions(&place, mode).expect("a mode");
    let words = ["node", "--address", "127.41.15.1"];
    let done = run(&folder, &words).exits(1);
    done.complains(&["others", place.to_str().expect("a plain path"), "0777", "--control PATH"]);
    assert!(std::fs::read_dir(&place).expect("a folder").next().is_none(), "no socket is there");
}

#[test]
fn the_control_socket_has_a_version_and_refuses_what_it_does_not_know() {
    let folder = Folder::new();
    let _node = node(&folder, "127.41.8.1", &["--sysctl", "net.rds.max_unacked_packets=5"]);
    let path = socket(&folder, "127.41.8.1");
    let ask = |line: &str| control(&path, line);
    let list = ask(r#"{"version":1,"op":"list","path":"/class/rds"}"#);
    assert_eq!(list["ok"][0]["name"], "node");
    let newer = ask(r#"{"version":2,"op":"list","path":"/class/rds"}"#);
    assert_eq!((&newer["ok"], &newer["version"]), (&false.into(), &1.into()));
    assert!(newer["error"].as_str().is_some_and(|text| text.contains("update the server")));
    for line in ["", "{}", "[]", r#"{"version":1}"#, r#"{"version":1,"op":"fly","path":"/"}"#] {
        assert_eq!(ask(line)["ok"], false, "{line}");
    }
    // As bowline asked before nodes had a tree.
    let older = ask(r#"{"version":1,"command":"info"}"#);
    assert!(older["error"].as_str().is_some_and(|text| text.contains("older")), "{older}");
    assert_eq!((&older["ok"], &older["version"]), (&false.into(), &1.into()));
    let file = "/class/rds/node/sysctl/net.rds.max_unacked_packets";
    let read = format!(r#"{{"version":1,"op":"read","path":"{file}"}}"#);
    assert_eq!(ask(&read)["ok"], 5);
    let write = |value: &str| format!(r#"{{"op":"write","path":"{file}","value":"{value}"}}"#);
    assert_eq!(ask(&write("6"))["ok"], serde_json::Value::Null);
    assert_eq!(ask(&read)["ok"], 6);
    assert_eq!(ask(&write("six"))["errno"], 22);
    let command = |name: &str, value: &str| {
        let path = format!("/class/rds/node/{name}");
        ask(&format!(r#"{{"op":"write","path":"{path}","value":"{value}"}}"#))
    };
    assert_eq!(command("drop", "127.41.8.2")["ok"], 0);
    assert_eq!(command("drop", "everything")["errno"], 22);
    assert_eq!(command("probe", "127.41.8.1 127.41.8.2")["errno"], 22);
    assert_eq!(command("probe", "127.41.8.1 127.41.8.2 1 1")["errno"], 22);
    // Nobody listens there, which may be known within that time.
    let probed = command("probe", "127.41.8.1 127.41.8.2 1");
    assert!(probed["errno"] == 110 || probed["errno"] == 111, "{probed}");
    assert!(command("probe", "127.41.8.1 127.41.8.1 60000")["ok"].as_u64() > Some(0));
}

/// A node can be read and set by the commands of the control tree, as sessions and disks can.
#[test]
fn a_node_is_part_of_the_control_tree() {
    let folder = Folder::new();
    let _node = node(&folder, "127.41.14.1", &[]);
    run(&folder, &["ping", "-c", "2", "-i", "10ms", "-I", "127.41.14.2", "127.41.14.1"]).exits(0);
    let socket = socket(&folder, "127.41.14.1");
    let socket = socket.to_str().expect("a plain path");
    let rtrs = |words: &[&str]| run(&folder, &[&["rtrs", "--control", socket], words].concat());
    let get = |file: &str| rtrs(&["get", &format!("class/rds/node/{file}")]).exits(0).out;

    let all: serde_json::Value =
        serde_json::from_str(&rtrs(&["tree", "--path", "class/rds/node"]).exits(0).out)
            .expect("JSON");
    let all = &all[socket];
    assert_eq!(all["addresses"], "127.41.14.1");
    assert!(all["counters"]["recv_ping"].as_u64() >= Some(2), "{all}");
    assert_eq!(all["sysctl"]["net.rds.ping_enable"], 1);
    let connection = &all["connections"]["ip:127.41.14.1@ip:127.41.14.2"];
    assert_eq!((&connection["peer"], &connection["transport"]), (&"bowline".into(), &"tcp".into()));
    assert!(connection["paths"]["7"]["state"].is_string(), "{connection}");
    assert!(all.get("info").is_none(), "a document is not part of it");

    // The document has the shape of `info --json`.
    let json = run(&folder, &["info", "--json"]).exits(0).out;
    assert_eq!(members(&get("info")), members(&json));

    let setting = "class/rds/node/sysctl/net.rds.max_unacked_packets";
    rtrs(&["set", setting, "7"]).exits(0);
    let short = run(&folder, &["sysctl", "max_unacked_packets"]).exits(0).out;
    assert_eq!(short, "max_unacked_packets = 7\n");
    rtrs(&["set", setting, "many"]).exits(234);
    // The settings have a kernel's files too.
    assert_eq!(rtrs(&["get", "proc/sys/net/rds/max_unacked_packets"]).exits(0).out, "7\n");
    rtrs(&["set", "proc/sys/net/rds/tcp/rds_tcp_sndbuf", "65536"]).exits(0);
    rtrs(&["set", "proc/sys/net/rds/tcp/rds_tcp_sndbuf", "1"]).exits(234);
    let all = run(&folder, &["sysctl", "--json"]).exits(0).out;
    let all: serde_json::Value = serde_json::from_str(&all).expect("JSON");
    assert_eq!(all["net.rds.tcp.rds_tcp_sndbuf"], 65536);
    assert_eq!(all["net.rds.max_unacked_packets"], 7);
    let one = rtrs(&["get", "proc/sys/net/rds/ping_enable", "--json"]).exits(0).out;
    let one: serde_json::Value = serde_json::from_str(&one).expect("JSON");
    assert_eq!(one["value"], 1);
    rtrs(&["set", "class/rds/node/counters/recv_ping", "0"]).exits(243);
    rtrs(&["get", "class/rds/node/sysctl/net.rds.nothing"]).exits(254);
    assert_eq!(get("drop"), "Usage: echo <address>|all > drop\n");
}

#[test]
fn a_node_is_a_folder_of_files() {
    let folder = Folder::new();
    let files = folder.path().join("files");
    let words = ["node", "--address", "127.41.14.4", "--drain", "0", "--tree"];
    let mut node = start(&folder, &[&words[..], &[files.to_str().expect("a path")]].concat());
    if !node.hears("ready") {
        let done = node.finish();
        assert!(done.err.contains("FUSE"), "{done:?}");
        return skipped::without_fuse(done.err.trim());
    }
    let place = files.join("class/rds/node");
    let read = |file: &str| std::fs::read_to_string(place.join(file)).expect("a file");
    let write = |file: &str, text: &str| {
        let error = std::fs::write(place.join(file), text).err();
        error.and_then(|error| error.raw_os_error())
    };
    assert_eq!(read("addresses"), "127.41.14.4\n");
    assert_eq!(write("sysctl/net.rds.max_unacked_packets", "8\n"), None);
    assert_eq!(read("sysctl/net.rds.max_unacked_packets"), "8\n");
    assert_eq!(write("sysctl/net.rds.max_unacked_packets", "many\n"), Some(22));
    assert_eq!(write("../../../../proc/sys/net/rds/ping_enable", "0\n"), None);
    assert_eq!(read("sysctl/net.rds.ping_enable"), "0\n");
    assert_eq!(write("../../../../proc/sys/net/rds/ping_enable", "1\n"), None);
    let json = run(&folder, &["info", "--json"]).exits(0).out;
    assert_eq!(members(&read("info")), members(&json));
    assert_eq!(write("probe", "127.41.14.4 127.41.14.4 9000\n"), None);
    assert!(matches!(write("probe", "127.41.14.4 127.41.14.9 1\n"), Some(110 | 111)));
    assert_eq!(write("drop", "all\n"), None);
    node.signal("-TERM");
    node.finish().exits(0);
    assert_eq!(std::fs::read_dir(&files).expect("a folder").count(), 0, "nothing is mounted");
}

#[test]
fn a_socket_without_a_node_is_told_of() {
    let folder = Folder::new();
    let words = ["rnbd", "export", "--memory", "disk0=1MiB", "-I", "127.41.14.3", "--control"];
    let place = folder.path().join("export.sock");
    let place = place.to_str().expect("a plain path");
    let mut export = start(&folder, &[&words[..], &[place]].concat());
    export.expect("export disk0");
    for words in [&["info"][..], &["sysctl"], &["sysctl", "ping_enable=0"], &["drop"]] {
        let done = run(&folder, &[words, &["--control", place]].concat()).exits(1);
        done.complains(&[place, "is not a node", "/class/rds/node", "--control PATH"]);
    }
    // A node older than the control tree: it does not know the request.
    let place = folder.path().join("old.sock");
    let listener = std::os::unix::net::UnixListener::bind(&place).expect("a socket");
    let old = std::thread::spawn(move || {
        let (mut client, _) = listener.accept().expect("a client");
        let answer = r#"{"version":1,"ok":false,"error":"not a known request"}"#;
        writeln!(client, "{answer}").expect("an answer");
        // It goes on waiting for requests.
        std::io::read_to_string(client).expect("the end")
    });
    let place = place.to_str().expect("a plain path");
    let done = run(&folder, &["info", "--control", place]).exits(1);
    done.complains(&[place, "it speaks another protocol", "update the older"]);
    assert!(old.join().expect("no panic").contains(r#""path":"/class/rds/node/info""#));
}

#[test]
fn clients_that_are_silent_or_have_left_keep_nobody_from_a_node() {
    let folder = Folder::new();
    let _node = node(&folder, "127.41.18.1", &[]);
    let path = socket(&folder, "127.41.18.1");
    let list = r#"{"version":1,"op":"list","path":"/class/rds/node/connections"}"#;
    let ask = || assert!(control(&path, list)["ok"].is_array());
    let connect = || UnixStream::connect(&path).expect("a control socket");
    let begin = Instant::now();
    let silent: Vec<UnixStream> = (0..100).map(|_| connect()).collect();
    ask();
    drop(silent);
    // No node answers there, and the command does not wait for one.
    let probe = r#"{"version":1,"op":"write","path":"/class/rds/node/probe","value":"127.41.18.1 127.41.18.9 60000"}"#;
    for _ in 0..100 {
        writeln!(connect(), "{probe}").expect("a request");
    }
    ask();
    assert!(begin.elapsed() < Duration::from_secs(30), "{:?}", begin.elapsed());
}

#[test]
fn settings_and_connections_of_a_running_node_can_be_changed() {
    let folder = Folder::new();
    let near = node(&folder, "127.41.12.1", &[]);
    let words = ["ping", "-c", "1", "-I", "127.41.12.2", "127.41.12.1"];
    run(&folder, &words).exits(0);
    let name = "net.rds.max_unacked_packets";
    let change = format!("{name}=6");
    let done = run(&folder, &["sysctl", &change]).exits(0);
    assert_eq!(done.out, format!("{name} = 6\n"));
    let all = run(&folder, &["sysctl"]).exits(0).out;
    assert!(all.contains(&format!("{name} = 6\n")), "{all}");
    assert!(all.lines().count() >= 7 && all.lines().all(|line| line.starts_with("net.rds.")));
    run(&folder, &["sysctl", "net.rds.nothing"]).exits(1).complains(&["net.rds.nothing"]);
    assert_eq!(all.matches("min").count(), 1, "each is listed once: {all}");
    run(&folder, &["drop", "elsewhere"]).exits(2).complains(&["elsewhere"]);
    let nobody = run(&folder, &["drop", "127.41.12.9"]).exits(1);
    nobody.complains(&["no connection to 127.41.12.9", "`bowline info -n`"]);
    let shown = run(&folder, &["info"]).exits(0).out;
    assert!(shown.contains(", addresses: 127.41.12.1\n"), "{shown}");
    let _far = node(&folder, "127.41.12.3", &["--no-control"]);
    let words = ["ping", "-c", "1", "-I", "127.41.12.1", "127.41.12.3"];
    run(&folder, &words).exits(0);
    let cut = run(&folder, &["drop", "127.41.12.3"]).exits(0).out;
    let (number, rest) = cut.split_once(' ').expect("a number");
    assert!(number.parse::<u32>().is_ok_and(|number| number > 0), "{cut}");
    assert_eq!(rest, "connections cut\n");
    run(&folder, &words).exits(0);
    near.signal("-INT");
    near.finish().exits(0);
}

#[test]
fn a_bad_setting_is_named() {
    let folder = Folder::new();
    let words =
        ["node", "--address", "127.41.9.1", "--sysctl", "net.rds.reconnect_max_delay_ms=-1"];
    run(&folder, &words).exits(2).complains(&["net.rds.reconnect_max_delay_ms", "-1"]);
}

#[test]
fn a_stream_goes_through_messages() {
    let folder = Folder::new();
    let data: Vec<u8> = (0..300_000u32).map(|i| (i.wrapping_mul(i) >> 7) as u8).collect();
    let input = folder.path().join("in");
    let output = folder.path().join("out");
    std::fs::write(&input, &data).expect("a file");
    let (input, output) = (input.to_str().expect("a path"), output.to_str().expect("a path"));
    let words = ["recv", "-s", "127.41.10.2:5000", "-f", output, "--once", "-i", "50ms"];
    let receiver = start(&folder, &words);
    // `recv` does not report when it starts to wait for messages; earlier ones are lost.
    receiver.until_told("0 messages");
    let words = ["send", "-s", "127.41.10.1:5000", "-d", "127.41.10.2:5000", "-m", "10k"];
    run(&folder, &[&words[..], &["-f", input, "-l", "250000"]].concat()).exits(0);
    receiver.finish().exits(0);
    assert!(std::fs::read(output).expect("a file") == data[..250_000], "the stream differs");
}

#[test]
fn a_receiver_that_is_stopped_does_not_stop_what_goes_to_others() {
    let folder = Folder::new();
    let all = 16 << 20;
    let input = folder.write("in", &"x".repeat(all));
    let receiver = |address: &str, output: &str| {
        let output = folder.path().join(output);
        let words = ["recv", "-s", address, "-f", output.to_str().expect("a path"), "--once"];
        let receiver = start(&folder, &[&words[..], &["-i", "50ms"]].concat());
        receiver.until_told("0 messages");
        (receiver, output)
    };
    let (first, first_output) = receiver("127.41.17.2:5000", "first");
    let (second, second_output) = receiver("127.41.17.3:5000", "second");
    first.signal("-STOP");
    let words = ["send", "-s", "127.41.17.1:5000", "-m", "64k", "-f"];
    let to = ["-d", "127.41.17.2:5000", "-d", "127.41.17.3:5000"];
    let input = [input.to_str().expect("a path")];
    let sender = start(&folder, &[&words[..], &input, &to].concat());
    let len = |path: &PathBuf| std::fs::metadata(path).expect("a file").len();
    let start = Instant::now();
    while len(&second_output) < 12 << 20 {
        assert!(start.elapsed() < Duration::from_secs(50), "{} bytes", len(&second_output));
        std::thread::sleep(Duration::from_millis(20));
    }
    first.signal("-CONT");
    sender.finish().exits(0);
    first.finish().exits(0);
    second.finish().exits(0);
    assert!(len(&first_output) > 0);
    assert_eq!(len(&first_output) + len(&second_output), all as u64);
}

#[test]
fn a_stream_is_not_mixed_with_what_others_send() {
    let folder = Folder::new();
    let limit = Some(Duration::from_secs(20));
    let socket = |address: &str| {
        let node = Node::builder().address(address).build();
        node.expect("a node").bind((address, 5000)).expect("a socket")
    };
    let (sender, stranger) = (socket("127.41.18.2"), socket("127.41.18.3"));
    for (number, more) in [&[][..], &["--from", "127.41.18.2"]].into_iter().enumerate() {
        let address = format!("127.41.18.1{number}:5000");
        let words = ["recv", "-s", &address, "--once", "-i", "50ms"];
        let receiver = start(&folder, &[&words[..], more].concat());
        receiver.until_told("0 messages");
        // The messages arrive in this order. Without --from the first one is received.
        let begin = number * 2;
        let steps = [(&stranger, "z"), (&stranger, ""), (&sender, "a"), (&stranger, "z")];
        let rest = [(&stranger, ""), (&sender, "b"), (&sender, "")];
        for (from, text) in steps[2 - begin..].iter().chain(&rest) {
            from.send_to(text.as_bytes(), &address).expect("sent");
            from.flush(limit).expect("taken");
        }
        let done = receiver.finish().exits(0);
        assert_eq!(done.out, "ab", "{done:?}");
        let told = done.err.matches("messages of 127.41.18.3:5000 are ignored").count();
        assert_eq!(told, 1, "{done:?}");
        let count = format!("{} messages of other senders", 2 + begin);
        assert!(done.err.contains(&count), "{done:?}");
    }
}

/// Routing would send from 127.0.0.1, where no node is.
#[test]
fn a_ping_through_a_node_comes_from_an_address_of_that_node() {
    let folder = Folder::new();
    let _near = node(&folder, "127.41.161.1", &[]);
    let _far = node(&folder, "127.41.161.2", &[]);
    let through = socket(&folder, "127.41.161.1");
    let through = ["--control", through.to_str().expect("a plain path")];
    let ping = |more: &[&str]| {
        run(&folder, &[&["ping", "-c", "2", "-W", "20"], &through[..], more].concat())
    };
    let done = ping(&["127.41.161.2"]).exits(0);
    assert!(done.out.contains("2 replies received"), "{done:?}");
    ping(&["-I", "127.41.161.9", "127.41.161.2"])
        .exits(2)
        .complains(&["127.41.161.9", "127.41.161.1"]);
    ping(&["::1"]).exits(2).complains(&["family", "127.41.161.1"]);
}

/// Puts the library that `run` preloads next to the command, as a build of the workspace does.
pub(crate) fn build_library() {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let words = ["build", "--quiet", "--locked", "--package", "bowline-preload"];
    let status = std::process::Command::new(cargo).args(words).status().expect("cargo starts");
    assert!(status.success(), "the library is not built");
}

#[test]
fn a_program_runs_on_the_sockets_of_a_node() {
    build_library();
    let folder = Folder::new();
    let none = run(&folder, &["run", "--node=require", "python3", "-c", ""]).exits(1);
    assert!(none.err.contains("start one with `bowline node`"), "{none:?}");
    let mut node = node(&folder, "127.41.40.1", &[]);
    let program = "from socket import *\n\
                   s = socket(AF_RDS, SOCK_SEQPACKET)\n\
                   s.bind(('127.41.40.1', 4000))\n\
                   s.sendto(b'hello', ('127.41.40.1', 4000))\n\
                   print(s.recv(100), flush=True)\n\
                   s.recv(100)\n";
    let mut program = start(&folder, &["run", "--", "python3", "-c", program]);
    program.expect("b'hello'");
    let shown = run(&folder, &["info", "-k"]).exits(0);
    assert!(shown.out.contains("127.41.40.1") && shown.out.contains("4000"), "{shown:?}");
    program.signal("-KILL");
    program.finish();
    let control = folder.path().join("bowline/127.41.40.1.sock");
    let control = control.to_str().expect("a plain path");
    for (words, code, part) in [
        (&["run", "no-such-program"][..], 127, "no such command"),
        (&["run", "--node", "/nonexistent", "true"], 1, "/nonexistent"),
        (&["run", "--node", control, "true"], 2, "is a control socket"),
    ] {
        let done = run(&folder, words).exits(code);
        assert!(done.err.contains(part), "{done:?}");
    }
    run(&folder, &["run"]).exits(2);
    // Another node of this user serves no programs, and says so.
    let mut other = start(&folder, &["node", "--address", "127.41.40.2"]);
    other.expect("ready");
    assert!(other.said().contains("another node"), "{}", other.said());
    other.signal("-TERM");
    other.finish().exits(0);
    node.signal("-TERM");
    node.expect("stopped");
    node.finish().exits(0);
}
