//! Programs of `bowline run` on two machines, which are network namespaces that end with the test.

use crate::links::{apart, succeeded};
use crate::nodes::build_library;
use crate::support::Folder;

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

/// Connections are dropped at either end, and the wire is cut for a second, while eight programs
/// send: each message comes once and in order.
#[test]
fn programs_of_two_machines_lose_nothing_when_connections_are_cut() {
    build_library();
    let folder = Folder::new();
    let programs = concat!(env!("CARGO_MANIFEST_DIR"), "/../bowline-preload/tests/programs");
    let script = r#"
        touch "$AT/go"
        sleep 0.7
        "$BOWLINE" drop --control "$AT/near.sock" > /dev/null
        sleep 0.7
        ip link set v0 down
        sleep 1
        ip link set v0 up
        sleep 0.7
        "$BOWLINE" drop --control "$AT/far.sock" > /dev/null
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
    let script = format!("PROGRAMS={programs}\n{TWO_MACHINES}\n{script}");
    let Some(done) = apart(&folder, &script) else { return };
    let out = succeeded(&done);
    let counts: Vec<u32> = out.lines().filter_map(|l| l.split(' ').next()?.parse().ok()).collect();
    assert!(counts.len() == 8 && counts.iter().all(|n| *n > 50), "{out}");
}
