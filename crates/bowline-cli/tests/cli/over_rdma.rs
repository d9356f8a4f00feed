//! Nodes over RDMA, on the soft device.

use std::{fs, path::PathBuf};

use crate::{
    nodes::build_library,
    support::{Done, Folder, Running, run, start},
};

fn node(folder: &Folder, address: &str, more: &[&str]) -> Running {
    let mut node = start(folder, &[&["node", "--address", address], more].concat());
    node.expect("ready");
    node
}

fn place(folder: &Folder, address: &str) -> PathBuf {
    folder.path().join(format!("bowline/{address}.sock"))
}

/// Asks a node.
fn ask(folder: &Folder, words: &[&str], address: &str) -> Done {
    let place = place(folder, address);
    run(folder, &[words, &["--control", place.to_str().expect("text")]].concat())
}

// tests [OBS-3], [OBS-4]
#[test]
fn two_nodes_over_rdma_answer_and_show_it() {
    let folder = Folder::new();
    let served = node(&folder, "127.88.1.1", &["--rdma", "--no-programs"]);
    assert!(served.said().contains("node on 127.88.1.1, RDS over RDMA and TCP"));
    assert!(!served.said().contains("not confined: devices"), "{}", served.said());
    let more = ["--rdma=soft@127.88.1.2", "--address", "127.88.1.3", "--no-programs"];
    let other = node(&folder, "127.88.1.2", &more);
    assert!(other.said().contains("node on 127.88.1.2, RDS over RDMA and TCP"));
    assert!(other.said().contains("node on 127.88.1.3, RDS over TCP"));
    let before = ask(&folder, &["info", "-I"], "127.88.1.1").exits(0);
    assert_eq!(before.out.lines().count(), 3, "no connection yet: {before:?}");
    // Each of the other's addresses over its transport.
    for (from, to) in [("127.88.1.2", "127.88.1.1"), ("127.88.1.3", "127.88.1.1")] {
        let words = ["ping", "-c", "2", "-i", "10ms", "-I", from, to];
        assert!(ask(&folder, &words, "127.88.1.2").exits(0).out.contains("2 replies"));
    }
    let shown = ask(&folder, &["info", "-Iv"], "127.88.1.1").exits(0);
    let rows: Vec<Vec<&str>> =
        shown.out.lines().skip(3).map(|line| line.split_whitespace().collect()).collect();
    let [row] = &rows[..] else { panic!("one connection: {shown:?}") };
    let gids = ["::ffff:127.88.1.1", "::ffff:127.88.1.2"];
    assert_eq!(row[..6], ["127.88.1.1", "127.88.1.2", "0", "0", gids[0], gids[1]]);
    let numbers = row[6..].join(" ");
    // Two bowline nodes agree on fewer and longer receives than a kernel has.
    assert!(numbers.starts_with("send_wr=256, recv_wr="), "{numbers}");
    let rest = ", send_sge=8, rdma_mr_max=4096, rdma_mr_size=257, cache_allocs=0";
    assert!(numbers.ends_with(rest), "{numbers}");
    let json = ask(&folder, &["info", "--json"], "127.88.1.1").exits(0);
    let json: serde_json::Value = serde_json::from_str(&json.out).expect("JSON");
    let connections = json["connections"].as_array().expect("connections").iter();
    let mut transports: Vec<&str> =
        connections.filter_map(|row| row["transport"].as_str()).collect();
    transports.sort_unstable();
    assert_eq!(transports, ["infiniband", "tcp"]);
    assert_eq!(json["ib_connections"][0]["local_dev"], gids[0]);
    let counters = ask(&folder, &["info", "-c"], "127.88.1.1").exits(0);
    assert!(counters.out.contains(" ib_rx_total_incs "), "{counters:?}");
    let once = ask(&folder, &["top", "--json", "-n", "1"], "127.88.1.1");
    assert!(once.out.contains("\"transport\":\"infiniband\""), "{once:?}");
}

// tests [OBS-4]
#[test]
fn a_node_without_rdma_has_nothing_of_it() {
    let folder = Folder::new();
    let _node = node(&folder, "127.88.2.1", &["--no-programs"]);
    let shown = ask(&folder, &["info", "-I"], "127.88.2.1").exits(0);
    assert!(shown.err.contains("Protocol not available"), "{shown:?}");
    let all = ask(&folder, &["info"], "127.88.2.1").exits(0);
    assert!(!all.out.contains("IB Connections") && !all.out.contains(" ib_"), "{all:?}");
}

#[test]
fn the_tools_speak_rdma_with_a_device_of_their_own() {
    let folder = Folder::new();
    let text: Vec<u8> = (0..3_000_000_u32).map(|i| (i ^ (i >> 9)) as u8).collect();
    let (input, output) = (folder.path().join("in"), folder.path().join("out"));
    fs::write(&input, &text).expect("a file");
    let words = ["recv", "--rdma", "-s", "127.88.3.1:5000", "--once", "-i", "50ms", "-f"];
    let receiver = start(&folder, &[&words[..], &[output.to_str().expect("text")]].concat());
    receiver.until_told("0 messages");
    let held = run(&folder, &["rping", "-s", "-I", "127.88.3.1"]).exits(1);
    assert!(held.err.contains("UDP port 4791 of 127.88.3.1 is in use"), "{held:?}");
    let words = ["send", "--rdma", "-s", "127.88.3.2:5000", "-d", "127.88.3.1:5000", "-m", "64k"];
    let more = ["-f", input.to_str().expect("text")];
    run(&folder, &[&words[..], &more].concat()).exits(0);
    receiver.finish().exits(0);
    assert!(fs::read(&output).expect("a file") == text, "every byte");

    let mut passive = start(&folder, &["stress", "--rdma", "-r", "127.88.3.3", "-p", "4300"]);
    passive.expect("waiting for incoming connection");
    let words = ["stress", "--rdma", "-r", "127.88.3.4", "-s", "127.88.3.3", "-p", "4300"];
    let more = ["-T", "1", "-t", "2", "-d", "4", "-q", "20k", "-v", "-z"];
    run(&folder, &[&words[..], &more].concat()).exits(0);
    passive.finish().exits(0);

    let _node = node(&folder, "127.88.3.5", &["--rdma", "--no-programs"]);
    let ping = |more: &[&str]| {
        let words = [&["ping", "-c", "1", "127.88.3.5"], more].concat();
        run(&folder, &words)
    };
    ping(&["--rdma", "-I", "127.88.3.6"]).exits(0);
    let there = ping(&["--rdma", "-I", "127.88.3.5"]).exits(2);
    assert!(there.err.contains("leave it out here"), "{there:?}");
    let other = ping(&["--rdma=soft@127.88.3.7", "-I", "127.88.3.6"]).exits(2);
    assert!(other.err.contains("leave out @127.88.3.7"), "{other:?}");
    let none = ping(&["--rdma=no_such0", "-I", "127.88.3.6"]).exits(1);
    assert!(none.err.contains("no_such0"), "{none:?}");
}

#[test]
fn a_device_that_is_held_by_another_process_is_told_of() {
    let folder = Folder::new();
    let mut server = start(&folder, &["rping", "-s", "-I", "127.88.4.1"]);
    server.expect("listening");
    let words = ["node", "--address", "127.88.4.1", "--rdma"];
    let done = run(&folder, &words).exits(1);
    assert!(done.err.contains("UDP port 4791 of 127.88.4.1 is in use"), "{done:?}");
    let done = run(&folder, &[&words[..], &["--no-sandbox"]].concat()).exits(1);
    let held = format!("in use by process {}", server.id());
    assert!(done.err.contains(&held), "a confined node does not see by whom: {done:?}");
    let config = folder.write("node.toml", "address = [\"127.88.4.2\"]\nrdma = [\"127.88.4.2\"]\n");
    let words = ["node", "--config", config.to_str().expect("text")];
    run(&folder, &words).exits(2).complains(&["node.toml:2: ", "soft@ADDRESS"]);
}

/// Disks have a share in the device of RDS, and end with the node that is replaced.
#[test]
fn a_node_has_rds_and_disks_on_one_device() {
    let folder = Folder::new();
    let text = "address = [\"127.88.6.1\", \"127.88.6.2\"]\nrdma = [\"soft@127.88.6.1\"]\n\
                [disks]\naddress = [PLACES]\n[[export]]\nname = \"d\"\nmemory = \"1MiB\"\n";
    let both = text.replace("PLACES", "\"127.88.6.1\", \"127.88.6.2\"");
    let config = folder.write("both.toml", &both);
    let refused = run(&folder, &["node", "--config", config.to_str().expect("text")]).exits(1);
    assert!(
        refused.err.contains("RDS over RDMA of this node uses UDP port 4791 of 127.88.6.1"),
        "{refused:?}"
    );
    let config = folder.write("node.toml", &text.replace("PLACES", "\"127.88.6.1\""));
    let words = ["node", "--replace", "--config", config.to_str().expect("text")];
    let used = || {
        let path = "127.88.6.3@127.88.6.1";
        let words = ["rnbd", "verify", "d", "--from", "s1", "--path", path, "-T", "1"];
        run(&folder, &[&words[..], &["--span", "512KiB"]].concat()).exits(0);
        let words = ["ping", "--rdma", "-c", "2", "-i", "10ms", "-I", "127.88.6.4", "127.88.6.1"];
        run(&folder, &words).exits(0);
    };
    let mut first = start(&folder, &words);
    first.expect("disks are served at 127.88.6.1:").expect("ready");
    used();
    let mut second = start(&folder, &words);
    second.expect("replacing the node").expect("disks are served at 127.88.6.1:").expect("ready");
    first.finish().exits(0);
    used();
    second.signal("-INT");
    second.finish().exits(0);
}

/// A program sends and receives while its node is replaced: the next one gets the port of the soft
/// device, although somebody is looking at the former one.
#[test]
fn a_node_over_rdma_is_replaced_without_loss() {
    build_library();
    let folder = Folder::new();
    let config = folder.write("node.toml", "address = [\"127.88.5.1\"]\nrdma = [\"soft\"]\n");
    let words = ["node", "--config", config.to_str().expect("text"), "--replace"];
    let mut first = start(&folder, &words);
    first.expect("ready");
    let _far = node(&folder, "127.88.5.2", &["--rdma", "--echo", "5", "--no-programs"]);
    let place = place(&folder, "127.88.5.1");
    let looks = ["info", "-c", "-w", "50ms", "--control", place.to_str().expect("text")];
    let mut looks = start(&folder, &looks);
    looks.expect("ib_rx_total_incs");
    let program = "from socket import *\n\
                   s = socket(AF_RDS, SOCK_SEQPACKET)\n\
                   s.setsockopt(276, 8, 0)\n\
                   s.bind(('127.88.5.1', 4000))\n\
                   print('transport', s.getsockopt(276, 8), flush=True)\n\
                   import os\n\
                   i = 0\n\
                   while not os.path.exists('END'):\n\
                   \x20   text = b'%d ' % i + b'x' * (i % 9000)\n\
                   \x20   s.sendto(text, ('127.88.5.2', 5))\n\
                   \x20   assert s.recv(20000) == text, i\n\
                   \x20   i += 1\n\
                   print('all came', flush=True)\n";
    let end = folder.path().join("end");
    let program = program.replace("END", end.to_str().expect("text"));
    let mut program = start(&folder, &["run", "--", "python3", "-c", &program]);
    program.expect("transport 0");
    let mut second = start(&folder, &words);
    second.expect("replacing the node").expect("ready").expect("127.88.5.2: paths up");
    assert!(first.finish().exits(0).out.contains("handed over"));
    fs::write(&end, "").expect("a file");
    program.expect("all came");
    program.finish().exits(0);
    let shown = ask(&folder, &["info", "-I"], "127.88.5.1").exits(0);
    assert!(shown.out.contains("::ffff:127.88.5.2"), "{shown:?}");
}
