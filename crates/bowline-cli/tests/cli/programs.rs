//! Programs of `bowline run` on two machines, which are network namespaces that end with the test.

use crate::links::{apart, succeeded};
use crate::nodes::build_library;
use crate::support::{Folder, run, start};

/// A wire between two namespaces: 10.77.0.1 here, 10.77.0.2 there; a node at each end, and four
/// programs, which wait.
const TWO_MACHINES: &str = r#"
    begin there unshare -n sleep 120
    P=$(cat "$AT/there.pid")
    n=0; until [ "$(readlink /proc/$P/ns/net)" != "$(readlink /proc/$$/ns/net)" ]; do n=$((n + 1)); [ $n -lt 600 ] || fail "no other namespace"; sleep 0.1; done
    there() { nsenter -t $P -n "$@"; }
    ip link add v0 type veth peer name w0
    ip link set w0 netns $P
    ip address add 10.77.0.1/24 dev v0
    there ip address add 10.77.0.2/24 dev w0
    ip link set v0 up
    there ip link set w0 up
    begin near "$BOWLINE" node --address 10.77.0.1 --programs "$AT/near.host" --control "$AT/near.sock"
    begin far nsenter -t $P -n "$BOWLINE" node --address 10.77.0.2 --programs "$AT/far.host" --control "$AT/far.sock"
    heard near ready
    heard far ready
    PORTS="5000 5001 5002 5003"
    for port in $PORTS; do
        flow="python3 -B $PROGRAMS/flow.py"
        begin near$port "$BOWLINE" run --node "$AT/near.host" $flow 10.77.0.1 10.77.0.2 $port 4 65536 "$AT"
        begin far$port nsenter -t $P -n "$BOWLINE" run --node "$AT/far.host" $flow 10.77.0.2 10.77.0.1 $port 4 65536 "$AT"
    done
    for port in $PORTS; do
        heard near$port ready
        heard far$port ready
    done
"#;

/// The flows end, and each got what its partner has sent.
const THE_FLOWS_END: &str = r#"
    for port in $PORTS; do
        heard near$port "^got"
        heard far$port "^got"
    done
    touch "$AT/end"
    for port in $PORTS; do
        for name in near$port far$port; do
            wait $(cat "$AT/$name.pid") || fail "$name"
        done
        said() { sed -n "s/^$2 //p" "$AT/$1$port.out"; }
        [ "$(said near sent)" = "$(said far got)" ] || fail "to the far one, port $port"
        [ "$(said far sent)" = "$(said near got)" ] || fail "to the near one, port $port"
        said near sent
        said far sent
    done
"#;

/// Runs a script while eight programs send; each message must come once and in order.
fn flows_lose_nothing_in(script: &str) {
    build_library();
    let folder = Folder::new();
    let programs = concat!(env!("CARGO_MANIFEST_DIR"), "/../bowline-preload/tests/programs");
    let script = format!("PROGRAMS={programs}\n{TWO_MACHINES}\n{script}\n{THE_FLOWS_END}");
    let Some(done) = apart(&folder, &script) else { return };
    let out = succeeded(&done);
    let counts: Vec<u32> = out.lines().filter_map(|l| l.split(' ').next()?.parse().ok()).collect();
    assert!(counts.len() == 8 && counts.iter().all(|n| *n > 10), "{out}");
}

/// Connections are dropped at either end, and the wire is cut for a second.
#[test]
fn programs_of_two_machines_lose_nothing_when_connections_are_cut() {
    flows_lose_nothing_in(
        r#"
        touch "$AT/go"
        sleep 0.7
        "$BOWLINE" drop --control "$AT/near.sock" > /dev/null
        sleep 0.7
        ip link set v0 down
        sleep 1
        ip link set v0 up
        sleep 0.7
        "$BOWLINE" drop --control "$AT/far.sock" > /dev/null
        "#,
    );
}

/// Each node in turn is replaced by another process.
#[test]
fn programs_of_two_machines_lose_nothing_when_nodes_are_replaced() {
    flows_lose_nothing_in(
        r#"
        replace() {
            begin $1$3 $4 "$BOWLINE" node --address $2 --programs "$AT/$1.host" --control "$AT/$1.sock" --replace
            heard $1$3 "^replacing the node"
            heard $1$3 ready
            wait $(cat "$AT/$5.pid") || fail "$5 ended badly"
            heard $5 "handed over"
        }
        touch "$AT/go"
        sleep 0.7
        replace near 10.77.0.1 2 "" near
        sleep 0.5
        replace far 10.77.0.2 2 "nsenter -t $P -n" far
        sleep 0.5
        replace near 10.77.0.1 3 "" near2
        [ "$("$BOWLINE" info -k --control "$AT/near.sock" | grep -c "10.77.0.1 .*500[0-3]")" = 4 ] || fail "sockets"
        "#,
    );
}

/// A successor that cannot begin, or that is gone, costs the former node and its programs nothing.
#[test]
fn a_node_whose_successor_fails_goes_on() {
    build_library();
    let folder = Folder::new();
    let place = folder.path().join("host.sock");
    let place = place.to_str().unwrap();
    let node = ["node", "--address", "127.41.71.1", "--programs", place];
    let mut first = start(&folder, &node);
    first.expect("ready");
    let programs = concat!(env!("CARGO_MANIFEST_DIR"), "/../bowline-preload/tests/programs");
    let script = format!("{programs}/steady.py");
    let words = ["run", "--node", place, "--", "python3", "-B", &script];
    let steady = start(&folder, &[&words[..], &["127.41.71.1", "127.41.71.1", "6"]].concat());
    let mut goes_on = || {
        first.expect("handing over");
        first.expect("ready");
        // It can make no control socket, and has taken its own back.
        run(&folder, &["info", "-c"]).exits(0);
        run(&folder, &["sysctl", "net.rds.max_unacked_packets"]).exits(0);
    };
    // Seen when the settings are tried: everything was asked for by then.
    let bad = ["--replace", "--sysctl", "net.rds.max_unacked_packets=8", "--sysctl", "no_such=1"];
    let done = run(&folder, &[&node[..], &bad].concat()).exits(2);
    assert!(done.err.contains("no_such"), "{done:?}");
    goes_on();
    // Another process has an address that it wants as well.
    let taken = std::net::TcpListener::bind("127.41.71.9:16385").unwrap();
    let words = [&node[..], &["--address", "127.41.71.9", "--replace"]].concat();
    let done = run(&folder, &words).exits(1);
    assert!(done.err.contains("is in use"), "{done:?}");
    drop(taken);
    goes_on();
    // One that asks and goes away: operation 15, version 3, version 2 of what is handed over, and 1
    // of the node's state.
    let mut frame = [0u8; 32];
    frame[..4].copy_from_slice(&32u32.to_ne_bytes());
    frame[4] = 15;
    frame[8..16].copy_from_slice(&1i64.to_ne_bytes());
    frame[16..20].copy_from_slice(&3i32.to_ne_bytes());
    frame[20..24].copy_from_slice(&2i32.to_ne_bytes());
    let mut asks = std::os::unix::net::UnixStream::connect(place).unwrap();
    std::io::Write::write_all(&mut asks, &frame).unwrap();
    drop(asks);
    goes_on();
    steady.finish().exits(0);
    first.signal("-INT");
    first.finish().exits(0);
    // What a confined node leaves is of no use to anybody.
    let top = folder.path();
    for folder in ["bowline", "bowline/rnbd"] {
        for entry in std::fs::read_dir(top.join(folder)).unwrap().flatten() {
            let path = entry.path();
            let listens = || std::os::unix::net::UnixStream::connect(&path).is_ok();
            assert!(path.is_dir() || !listens(), "{path:?}");
        }
    }
}

/// Without a manager there is nobody to leave sockets with: the node ends as usual.
#[test]
fn a_node_without_a_manager_keeps_nothing() {
    let folder = Folder::new();
    let mut node = start(&folder, &["node", "--address", "127.41.72.1", "--keep-programs"]);
    node.expect("ready");
    node.signal("-TERM");
    let done = node.finish().exits(0);
    assert!(done.out.contains("peers have acknowledged everything"), "{done:?}");
}

/// What can be seen to be wrong before costs the former node nothing.
#[test]
fn a_node_that_cannot_replace_another_leaves_it_be() {
    let folder = Folder::new();
    let programs = folder.path().join("host.sock");
    let place = ["--programs", programs.to_str().unwrap()];
    // There is none: it starts as usual.
    let words = [&["node", "--address", "127.41.70.1", "--replace"][..], &place].concat();
    let mut first = start(&folder, &words);
    first.expect("ready");
    let bad = [&["node", "--address", "127.41.70.1", "--replace", "--paths", "3"][..], &place];
    run(&folder, &bad.concat()).exits(2).complains(&["paths must be 8 or 1"]);
    let none = ["node", "--replace", "--no-programs"];
    run(&folder, &none).exits(2).complains(&["--no-programs"]);
    first.signal("-INT");
    first.finish().exits(0);
}
