//! Commands whose address belongs to a node of the machine are that node's programs.

use std::{
    path::Path,
    thread,
    time::{Duration, Instant},
};

use bowline::rds::Node;

use crate::{
    links::{apart, succeeded},
    support::{Folder, Running, run, start},
};

fn node(folder: &Folder, words: &[&str]) -> Running {
    let mut node = start(folder, &[&["node"], words].concat());
    node.expect("ready");
    node
}

fn text(path: &Path) -> &str {
    path.to_str().expect("a path")
}

#[test]
fn send_recv_and_ping_use_the_node_that_runs() {
    let folder = Folder::new();
    let _node = node(&folder, &["--address", "127.49.1.1", "--address", "127.49.1.2"]);
    let input = folder.write("in", &"0123456789".repeat(100_000));
    let outputs = [1, 2].map(|n| folder.path().join(format!("out{n}")));
    let receivers = ["127.49.1.2:5000", "127.49.1.2:5001"];
    let receivers: Vec<Running> = receivers
        .into_iter()
        .zip(&outputs)
        .map(|(at, to)| {
            let words = ["recv", "--once", "-i", "50ms", "-s", at, "-f", text(to)];
            let receiver = start(&folder, &words);
            receiver.until_logged("0 messages");
            receiver
        })
        .collect();
    let words = ["send", "-s", "127.49.1.1:5000", "-m", "8k", "-f", text(&input)];
    let to = ["-d", "127.49.1.2:5000", "-d", "127.49.1.2:5001"];
    run(&folder, &[&words[..], &to].concat()).exits(0);
    receivers.into_iter().for_each(|receiver| _ = receiver.finish().exits(0));
    let len = |path| std::fs::metadata(path).expect("a file").len();
    assert_eq!(outputs.iter().map(len).sum::<u64>(), 1_000_000);
    let words = ["ping", "-c", "2", "-i", "10ms", "-I", "127.49.1.1", "127.49.1.2"];
    run(&folder, &words).exits(0);
    // Sockets of programs are the node's.
    let counters = run(&folder, &["info", "--json"]).exits(0).out;
    let counters: serde_json::Value = serde_json::from_str(&counters).expect("JSON");
    let sent = counters["counters"].as_array().expect("rows");
    let sent = sent.iter().find(|row| row["name"] == "send_queued").expect("a counter");
    assert!(sent["value"].as_u64().expect("a number") > 100, "{sent}");
}

#[test]
fn stress_measures_between_two_addresses_of_the_node_that_runs() {
    let folder = Folder::new();
    let _node = node(&folder, &["--address", "127.49.2.1", "--address", "127.49.2.2"]);
    let mut passive = start(&folder, &["stress", "-r", "127.49.2.2", "-p", "4200"]);
    passive.expect("waiting for incoming connection");
    let words = ["stress", "-r", "127.49.2.1", "-s", "127.49.2.2", "-p", "4200", "-T", "1", "-v"];
    let done = run(&folder, &[&words[..], &["-t", "2", "-d", "4"]].concat()).exits(0);
    assert!(done.out.ends_with("  (average)\n"), "{done:?}");
    passive.finish().exits(0);
    // What a program of a node cannot do is said, with what can be done.
    let mut passive = start(&folder, &["stress", "-r", "127.49.2.2", "-p", "4201"]);
    passive.expect("waiting for incoming connection");
    let words = ["stress", "-r", "127.49.2.1", "-s", "127.49.2.2", "-p", "4201", "--rdma"];
    let done = run(&folder, &words).exits(1);
    done.complains(&["has no RDMA at 127.49.2.1", "process ", "leave out --rdma"]);
}

#[test]
fn a_node_that_a_command_cannot_use_is_named_with_its_process() {
    let folder = Folder::new();
    let other = node(&folder, &["--address", "127.49.3.1", "--no-programs"]);
    let words = ["recv", "-s", "127.49.3.1:5000"];
    let process = format!("process {}, bowline", other.id());
    run(&folder, &words).exits(1).complains(&["127.49.3.1:16385", &process]);
    // Where another address is given there is no obstacle.
    let words = ["ping", "-c", "1", "-I", "127.49.3.2", "127.49.3.1"];
    run(&folder, &words).exits(0);
}

/// Between two addresses of one node there is no connection, and nothing is wrong with that.
#[test]
fn send_waits_for_a_receiver_that_takes_nothing_for_a_while() {
    let folder = Folder::new();
    let _node = node(&folder, &["--address", "127.49.6.1", "--address", "127.49.6.2"]);
    let input = folder.write("in", &"x".repeat(20 << 20));
    for (from, to) in
        [("127.49.6.1:5000", "127.49.6.2:5000"), ("127.49.6.3:5000", "127.49.6.1:5000")]
    {
        let words = ["recv", "--once", "-i", "50ms", "-s", to, "-f", "/dev/null"];
        let receiver = start(&folder, &words);
        receiver.until_logged("0 messages");
        receiver.signal("-STOP");
        let words = ["send", "-s", from, "-d", to, "-m", "64k", "-f", text(&input), "-W", "2"];
        let sender = start(&folder, &words);
        sender.until_logged(&format!("waiting for {to} to take more"));
        // Longer than it waits for a host that does not answer.
        thread::sleep(Duration::from_secs(3));
        receiver.signal("-CONT");
        sender.finish().exits(0);
        receiver.finish().exits(0);
    }
}

/// What became of the bytes of `send`.
#[test]
fn send_says_that_nobody_took_its_bytes() {
    let folder = Folder::new();
    let input = folder.write("in", &"x".repeat(10_000));
    let send = |local: &str, to: &str, more: &[&str]| {
        let words = ["send", "-s", local, "-d", to, "-f", text(&input), "-W", "1.5"];
        run(&folder, &[&words[..], more].concat())
    };
    let _node = node(&folder, &["--address", "127.49.4.1"]);
    // Nobody has bound the port; from a node of its own, and from the one that runs.
    for local in ["127.49.4.2:5000", "127.49.4.1:5000"] {
        let done = send(local, "127.49.4.1:5999", &[]).exits(1);
        let said = ["waiting for 127.49.4.1:5999 to confirm", "has not confirmed its 9.8 KiB"];
        assert!(said.iter().all(|part| done.err.contains(part)), "{done:?}");
        send(local, "127.49.4.1:5999", &["--no-end"]).exits(0);
        // No node runs there.
        let begin = Instant::now();
        let done = send(local, "127.49.4.9:5000", &[]).exits(1);
        assert!(begin.elapsed().as_secs() < 20, "{done:?}");
        let said = ["waiting for a node at 127.49.4.9:5000 (refused)", "no connection to"];
        assert!(said.iter().all(|part| done.err.contains(part)), "{done:?}");
    }
}

#[test]
fn send_says_that_a_receiver_took_a_part_or_nothing() {
    let folder = Folder::new();
    let input = folder.write("in", &"x".repeat(10_000));
    let words = ["recv", "-i", "50ms", "-s", "127.49.5.1:5000", "-f", "/dev/null"];
    let receiver = start(&folder, &words);
    receiver.until_logged("0 messages");
    let send = |from: &str| {
        let words = ["send", "-s", from, "-d", "127.49.5.1:5000", "-f", text(&input)];
        run(&folder, &[&words[..], &["-W", "2"]].concat())
    };
    send("127.49.5.2:5000").exits(0);
    // A stream without an end, in which another one comes to nothing, and whose rest is counted
    // with it.
    let stranger = Node::builder().address("127.49.5.3").build().expect("a node");
    let socket = stranger.bind("127.49.5.3:5000").expect("a socket");
    socket.send_to(b"begun", "127.49.5.1:5000").expect("sent");
    receiver.until_logged("4 messages");
    send("127.49.5.2:5000").exits(1).complains(&["has ignored its 9.8 KiB", "--from"]);
    drop((socket, stranger));
    let done = send("127.49.5.3:5000").exits(1);
    let said = ["has written 4 messages", "of the 3, 9.8 KiB"];
    assert!(said.iter().all(|part| done.err.contains(part)), "{done:?}");
    send("127.49.5.2:5000").exits(0);
}

/// Two commands and a verbs program's place at one address: each has a part of it.
#[test]
fn rping_and_perf_share_the_address_of_the_node_that_runs() {
    let folder = Folder::new();
    let script = r#"
        ip address add 10.79.0.1/32 dev lo
        begin node "$BOWLINE" node
        heard node ready
        for words in "rping -C 3 -V" "perf -o write -n 10"; do
            begin server "$BOWLINE" ${words%% *} -s -I 10.79.0.1
            heard server "listening on 10.79.0.1"
            "$BOWLINE" $words -c 10.79.0.1 -I 10.79.0.1 > "$AT/client.out" 2>&1 || fail "$words"
            kill $(cat "$AT/server.pid") 2> /dev/null || true
            wait $(cat "$AT/server.pid") || true
        done
        heard node "RDMA for programs on .*10.79.0.1"
        # A second listener of the port hears that there is one.
        begin server "$BOWLINE" rping -s -I 10.79.0.1
        heard server listening
        rc=0; "$BOWLINE" perf -s -I 10.79.0.1 > "$AT/second.out" 2>&1 || rc=$?
        [ $rc = 1 ] && grep -q "another process listens" "$AT/second.out" || fail "$rc"
    "#;
    let Some(done) = apart(&folder, script) else { return };
    succeeded(&done);
}
