//! Interfaces of link-local addresses, in network namespaces that end with their test.

use std::process::{Command, Output, Stdio};

use bowline_testkit::skipped;

use crate::support::Folder;

/// Runs a script as root of its own network namespace, with an empty `/run`, where no node of this
/// machine is. `None` where that is not possible.
pub(crate) fn apart(folder: &Folder, script: &str) -> Option<Output> {
    let manners = [&["-mn"][..], &["-rmn"]];
    let works = |manner: &&&[&str]| {
        let mut try_out = Command::new("unshare");
        let words = "mount -t tmpfs tmpfs /run; ip link set lo up; ip link add x0 type veth peer \
                     name x1; unshare -n true";
        try_out.args(**manner).args(["sh", "-ec", words]).stderr(Stdio::null());
        try_out.status().is_ok_and(|status| status.success())
    };
    let Some(manner) = manners.iter().find(works) else {
        skipped::because("no network and mount namespaces for this user, or no veth");
        return None;
    };
    let common = r#"
        mount -t tmpfs tmpfs /run
        ip link set lo up
        trap 'kill $(cat "$AT"/*.pid) 2> /dev/null || true' EXIT
        fail() { echo "failed: $*" >&2; cat "$AT"/*.out >&2; exit 1; }
        # Waits until a line of a file has a text.
        heard() { n=0; until grep -q "$2" "$AT/$1.out"; do n=$((n + 1)); [ $n -lt 600 ] || fail "no $2 in $1"; sleep 0.1; done; }
        # Starts a command under a name. What an earlier one of that name said is gone before anybody looks.
        begin() { name=$1; shift; : > "$AT/$name.out"; "$@" > "$AT/$name.out" 2>&1 & echo $! > "$AT/$name.pid"; }
    "#;
    let done = Command::new("timeout")
        .args(["100", "unshare"])
        .args(*manner)
        .args(["sh", "-exc", &format!("{common}\n{script}")])
        .env("XDG_RUNTIME_DIR", folder.path())
        .env("BOWLINE", env!("CARGO_BIN_EXE_bowline"))
        .env("AT", folder.path())
        .output();
    Some(done.expect("unshare runs"))
}

#[track_caller]
pub(crate) fn succeeded(done: &Output) -> String {
    let (out, err) = (String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr));
    assert_eq!(done.status.code(), Some(0), "{out}{err}");
    out.into_owned()
}

/// Two links between two namespaces, the same addresses on both: fe80::1 here, fe80::2 there.
const TWO_LINKS: &str = r#"
    begin there unshare -n sleep 120
    P=$(cat "$AT/there.pid")
    n=0; until [ "$(readlink /proc/$P/ns/net)" != "$(readlink /proc/$$/ns/net)" ]; do n=$((n + 1)); [ $n -lt 600 ] || fail "no other namespace"; sleep 0.1; done
    there() { nsenter -t $P -n "$@"; }
    for k in 0 1; do
        ip link add v$k type veth peer name w$k
        ip link set w$k netns $P
        ip link set v$k addrgenmode none up
        there ip link set w$k addrgenmode none up
        ip address add fe80::1/64 dev v$k nodad
        there ip address add fe80::2/64 dev w$k nodad
    done
"#;

#[test]
fn a_scope_is_part_of_what_connects() {
    let folder = Folder::new();
    let script = r#"
        begin far0 nsenter -t $P -n "$BOWLINE" rping -s -P -I fe80::2%w0
        begin far1 nsenter -t $P -n "$BOWLINE" rping -s -P -I fe80::2%w1
        heard far0 listening
        heard far1 listening
        for words in "-c fe80::2%v1 -I fe80::1%v1" "-c fe80::2%v1 -I fe80::1" "-c fe80::2%v1" "-c fe80::2 -I fe80::1%v1"; do
            "$BOWLINE" rping $words -C 3 -V -W 20 > "$AT/near.out" 2>&1 || fail "$words"
        done
        "$BOWLINE" rping -c fe80::2%v0 -C 3 -V -W 20 > "$AT/near.out" 2>&1 || fail v0
        [ "$(grep -c "3 pings" "$AT/far0.out")" = 1 ] || fail "the first link"
        [ "$(grep -c "3 pings" "$AT/far1.out")" = 4 ] || fail "the second link"
        refused() { code=$1; text=$2; shift 2; rc=0; "$@" > "$AT/near.out" 2>&1 || rc=$?; [ $rc = $code ] && grep -q "$text" "$AT/near.out" || fail "$rc of $*"; }
        refused 2 "different links" "$BOWLINE" rping -c fe80::2%v1 -I fe80::1%v0
        refused 1 "name one, as in" "$BOWLINE" rping -c fe80::2 -I fe80::1
        refused 1 "name the interface" "$BOWLINE" rping -c fe80::2
    "#;
    let Some(done) = apart(&folder, &format!("{TWO_LINKS}\n{script}")) else { return };
    succeeded(&done);
}

#[test]
fn the_paths_of_disks_have_scopes() {
    let folder = Folder::new();
    // Only the second link leads to the server.
    let script = r#"
        begin far nsenter -t $P -n "$BOWLINE" rnbd export --memory d0=1MiB --memory d1=1MiB -I fe80::2%w1 --no-control
        heard far "export d1"
        for path in "fe80::1%v1@fe80::2%v1" "ip:fe80::1%v1@ip:fe80::2%v1" "fe80::1,fe80::2%v1" "fe80::2%v1"; do
            begin near "$BOWLINE" rnbd map d0 --from s1 --path "$path" --nbd "$AT/disk" --connect-timeout 20
            heard near "mapped"
            "$BOWLINE" rnbd client path list pathname csv noheaders | grep -q "ip:fe80::1@ip:fe80::2" || fail "list of $path"
            if [ "$path" = "fe80::2%v1" ]; then
                # To a session of that name there are other paths: on another link than its device they are none.
                rc=0; "$BOWLINE" rnbd client path add s1 "fe80::1%v0@fe80::2%v0" 2> "$AT/add.out" || rc=$?
                [ $rc = 237 ] || fail "adding gives $rc"
            fi
            "$BOWLINE" rnbd unmap rnbd0
            wait $(cat "$AT/near.pid")
        done
        begin near "$BOWLINE" rnbd map d0 --from fe80::2%v1 --nbd "$AT/disk" --connect-timeout 20
        heard near "mapped"
        "$BOWLINE" rnbd unmap rnbd0
        wait $(cat "$AT/near.pid")
        rc=0; "$BOWLINE" rnbd map d0 --from s1 --path "fe80::1%v1@fe80::2%v1" --path "fe80::1%v0@fe80::2%v0" --nbd "$AT/disk" > "$AT/near.out" 2>&1 || rc=$?
        [ $rc = 2 ] && grep -q "fe80::1 is on two links" "$AT/near.out" || fail "two links: $rc"
    "#;
    let Some(done) = apart(&folder, &format!("{TWO_LINKS}\n{script}")) else { return };
    succeeded(&done);
}

#[test]
fn rds_nodes_have_scopes() {
    let folder = Folder::new();
    let script = r#"
        refused() { code=$1; text=$2; shift 2; rc=0; "$@" > "$AT/near.out" 2>&1 || rc=$?; [ $rc = $code ] && grep -q "$text" "$AT/near.out" || fail "$rc of $*"; }
        pinged() { "$BOWLINE" info -c --control "$AT/$1.sock" | awk '$1 == "recv_ping" { print $2 }'; }
        end() { kill $(cat "$AT/$1.pid"); wait $(cat "$AT/$1.pid") 2> /dev/null || true; rm "$AT/$1.pid"; }
        for k in 0 1; do
            begin far$k nsenter -t $P -n "$BOWLINE" node --address fe80::2%w$k --control "$AT/far$k.sock"
            heard far$k ready
        done
        for words in "fe80::2%v1 -I fe80::1%v1" "fe80::2%v1 -I fe80::1" "fe80::2%v1" "fe80::2 -I fe80::1%v1"; do
            "$BOWLINE" ping -c 3 -i 10ms -W 20 $words > "$AT/near.out" 2>&1 || fail "$words"
        done
        [ "$(pinged far0)" = 0 ] || fail "the first link"
        [ "$(pinged far1)" -ge 12 ] || fail "the second link"
        "$BOWLINE" ping -c 3 -i 10ms -W 20 fe80::2%v0 > "$AT/near.out" 2>&1 || fail v0
        [ "$(pinged far0)" -ge 3 ] || fail "the first link, later"

        refused 2 "fe80::1%.* and fe80::2%.* are on different links" "$BOWLINE" ping -c 1 fe80::2%v1 -I fe80::1%v0
        refused 2 "name the interface" "$BOWLINE" ping -c 1 fe80::2 -I fe80::1
        refused 1 "name the interface" "$BOWLINE" ping -c 1 fe80::2
        refused 2 "name the interface" "$BOWLINE" node --address fe80::1 --no-control
        refused 2 "no interface v7" "$BOWLINE" node --address fe80::1%v7 --no-control
        refused 2 "not link-local" "$BOWLINE" node --address fd00::1%v0 --no-control
        refused 2 "one address on two links" "$BOWLINE" node --address fe80::1%v0 --address fe80::1%v1 --no-control
        refused 2 "different links" "$BOWLINE" send -s [fe80::1%v0]:5000 -d [fe80::2%v1]:4000 -f /dev/null
        refused 2 "different links" "$BOWLINE" recv -s [fe80::1%v0]:5000 --from fe80::2%v1
        refused 2 "name the interface" "$BOWLINE" recv -s [fe80::1]:5000

        # A node that runs is asked by its address, and the larger one begins, too.
        echo 'address = ["fe80::1%v1"]' > "$AT/near.toml"
        begin node "$BOWLINE" node --config "$AT/near.toml"
        heard node ready
        "$BOWLINE" ping -c 2 -i 10ms -W 20 fe80::2%v1 > "$AT/near.out" 2>&1 || fail "through a node"
        "$BOWLINE" ping -c 2 -i 10ms -W 20 fe80::2 --control "$XDG_RUNTIME_DIR"/bowline/fe80::1%*.sock > "$AT/near.out" 2>&1 || fail "by its socket"
        "$BOWLINE" ping -c 2 -i 10ms -W 20 fe80::1 --control "$AT/far1.sock" > "$AT/near.out" 2>&1 || fail "from the larger"
        "$BOWLINE" info --json --control "$XDG_RUNTIME_DIR"/bowline/fe80::1%*.sock | grep -q '"fe80::1%[0-9]' || fail "facts"
        refused 2 "not on a link of the node" "$BOWLINE" drop fe80::2%v0
        "$BOWLINE" drop fe80::2%v1 > "$AT/near.out" 2>&1 || fail drop
        grep -q "^[1-9]" "$AT/near.out" || fail "drop of nothing"
        # An equal peer on the other link is no peer of this node.
        refused 1 "" timeout 60 nsenter -t $P -n "$BOWLINE" ping -c 1 -W 1 fe80::1 --control "$AT/far0.sock"
        end node

        end far1
        head -c 300000 /dev/urandom > "$AT/sent"
        begin far1 nsenter -t $P -n "$BOWLINE" recv --once -i 50ms -s [fe80::2%w1]:4000 --from fe80::1%w1 -f "$AT/taken"
        # What comes before `recv` waits for messages is lost, the mark of the end included.
        heard far1 "0 messages"
        "$BOWLINE" send -s [fe80::1%v1]:5000 -d [fe80::2]:4000 -f "$AT/sent" > "$AT/near.out" 2>&1 || fail send
        wait $(cat "$AT/far1.pid") || fail recv
        cmp "$AT/sent" "$AT/taken" || fail "other bytes"
    "#;
    let Some(done) = apart(&folder, &format!("{TWO_LINKS}\n{script}")) else { return };
    succeeded(&done);
}

#[test]
fn a_link_that_carries_less_than_before_is_named_as_the_reason() {
    let folder = Folder::new();
    let script = r#"
        begin far "$BOWLINE" perf -s -I 127.44.40.1
        heard far listening
        begin near "$BOWLINE" perf -c 127.44.40.1 -I 127.44.40.2 --op write --duration 60
        heard far "write of"
        ip link set lo mtu 1500
        rc=0; wait $(cat "$AT/near.pid") || rc=$?
        [ $rc = 1 ] || fail "status $rc"
        cat "$AT/near.out"
    "#;
    let Some(done) = apart(&folder, script) else { return };
    let said = succeeded(&done);
    assert!(
        said.contains("the path carries less than the MTU") && said.contains("127.44.40.1"),
        "{said}"
    );
}

#[test]
fn a_path_that_is_lost_is_told_of_with_the_reason_at_this_end() {
    let folder = Folder::new();
    let script = r#"
        ip link add v0 type veth peer name w0
        begin there unshare -n sleep 120
        P=$(cat "$AT/there.pid")
        n=0; until [ "$(readlink /proc/$P/ns/net)" != "$(readlink /proc/$$/ns/net)" ]; do n=$((n + 1)); [ $n -lt 600 ] || fail "no other namespace"; sleep 0.1; done
        ip link set w0 netns $P
        ip address add 10.9.0.1/24 dev v0; ip link set v0 up
        nsenter -t $P -n sh -ec "ip address add 10.9.0.2/24 dev w0; ip link set w0 up"
        begin far nsenter -t $P -n "$BOWLINE" rnbd export --memory d0=1MiB -I 10.9.0.2 --no-control --path-dead 1
        heard far "export d0"
        begin near "$BOWLINE" rnbd map d0 --from s1 --path 10.9.0.1@10.9.0.2 --nbd "$AT/disk" --no-control --path-dead 1 --heartbeat 1
        heard near "mapped"
        ip link delete v0
        heard near "lost, 0 of 1 connected: sending to 10.9.0.2: "
        heard far "lost: .*: sending to 10.9.0.1: "
        # A server to which there is no route.
        rc=0; "$BOWLINE" rnbd map d0 --from s2 --path 127.44.41.1@192.0.2.1 --connect-timeout 1 --no-control > "$AT/none.out" 2>&1 || rc=$?
        grep -q "no answer from 192.0.2.1 within 1 s: sending to 192.0.2.1: " "$AT/none.out" || fail "$rc: $(cat "$AT/none.out")"
    "#;
    let Some(done) = apart(&folder, script) else { return };
    succeeded(&done);
}

/// A queue that is always full, and a link that is far slower than the requests come, are no reason
/// to give a path up: heartbeats wait in the queue, but are answered.
#[test]
fn a_congested_path_is_not_a_dead_path() {
    let folder = Folder::new();
    let script = r#"
        ip link add v0 type veth peer name w0
        begin there unshare -n sleep 120
        P=$(cat "$AT/there.pid")
        n=0; until [ "$(readlink /proc/$P/ns/net)" != "$(readlink /proc/$$/ns/net)" ]; do n=$((n + 1)); [ $n -lt 600 ] || fail "no other namespace"; sleep 0.1; done
        ip link set w0 netns $P
        ip address add 10.9.0.1/24 dev v0; ip link set v0 up
        nsenter -t $P -n sh -ec "ip address add 10.9.0.2/24 dev w0; ip link set w0 up"
        SLOW="root tbf rate 10mbit burst 16kb limit 48kb"
        { tc qdisc add dev v0 $SLOW && nsenter -t $P -n tc qdisc add dev w0 $SLOW; } 2> /dev/null || { echo "no tbf"; exit; }
        begin far nsenter -t $P -n "$BOWLINE" rnbd export --memory d0=4MiB -I 10.9.0.2 --no-control --path-dead 1
        heard far "export d0"
        "$BOWLINE" rnbd verify d0 --from s1 --path 10.9.0.1@10.9.0.2 --time 6 --span 1MiB --depth 16 --outage fail \
            --path-dead 1 --heartbeat 1 --json > "$AT/near.out" 2>&1 || fail verify
        grep -q '"failed":0,.*"failovers":0,.*"state":"connected","failovers":0,"reconnects":0' "$AT/near.out" || fail "the path was lost"
        grep -q " lost" "$AT/far.out" && fail "the server has lost the path"
        cat "$AT/near.out"
    "#;
    let Some(done) = apart(&folder, script) else { return };
    let said = succeeded(&done);
    if said.trim() == "no tbf" {
        return skipped::because("no queue with a rate (tbf of tc)");
    }
    println!("{said}");
}

/// As at a boot: for some seconds the system asks whether another machine has an address.
#[test]
fn an_address_that_is_tentative_is_waited_for() {
    let folder = Folder::new();
    let script = r#"
        ip link add v0 type veth peer name w0
        echo 3 > /proc/sys/net/ipv6/conf/v0/dad_transmits
        ip link set v0 up
        ip link set w0 up
        ip address add fd00:45::1/64 dev v0
        begin node "$BOWLINE" node --address fd00:45::1 --rdma --control "$AT/node.sock" --no-programs
        begin disks "$BOWLINE" rnbd export --memory disk0=1MiB -I fd00:45::1 --no-control
        heard node "waiting up to 10 s for fd00:45::1, which is tentative"
        heard disks "waiting up to 10 s for fd00:45::1, which is tentative"
        # One of the two has the UDP port.
        begun() { grep -q "$2" "$AT/$1.out" && grep -q "in use" "$AT/$3.out"; }
        n=0; until begun node ready disks || begun disks "listening on" node; do
            n=$((n + 1)); [ $n -lt 600 ] || fail "neither has begun"; sleep 0.1
        done
        # It asks for longer than anybody waits.
        echo 100 > /proc/sys/net/ipv6/conf/v0/dad_transmits
        ip address add fd00:45::2/64 dev v0
        rc=0; "$BOWLINE" node --address fd00:45::2 --no-control --no-programs > "$AT/late.out" 2>&1 || rc=$?
        [ $rc = 1 ] && grep -q "fd00:45::2 is still tentative; is its link up?" "$AT/late.out" || fail "$rc"
    "#;
    let Some(done) = apart(&folder, script) else { return };
    succeeded(&done);
}
