//! Nodes of several network namespaces with one folder of runtime files: each command and each
//! program takes the node of its own, whatever those of the others do.

use crate::links::{apart, succeeded};
use crate::nodes::build_library;
use crate::support::Folder;

/// A second namespace beside this one, where the same addresses are other ones, and a node in each:
/// `near` here, which was first, and `far` there.
const TWO_NODES: &str = r#"
    begin there unshare -n sleep 120
    P=$(cat "$AT/there.pid")
    n=0; until [ "$(readlink /proc/$P/ns/net)" != "$(readlink /proc/$$/ns/net)" ]; do n=$((n + 1)); [ $n -lt 600 ] || fail "no other namespace"; sleep 0.1; done
    nsenter -t $P -n ip link set lo up
    here() { "$@"; }
    there() { nsenter -t $P -n "$@"; }
    begin near "$BOWLINE" node --address 127.0.0.1 --address 127.152.1.1 --sysctl net.rds.max_unacked_packets=11
    heard near ready
    # What a command prints, and that it ends well, and soon: a node that stands still is asked for 2 s.
    asked() { where=$1; shift; $where timeout 10 "$BOWLINE" "$@" > "$AT/asked.out" 2>&1 || fail "$? of $*: $(cat "$AT/asked.out")"; }
    has() { grep -q "$1" "$AT/asked.out" || fail "no $1 in $(cat "$AT/asked.out")"; }
    refused() { where=$1; text=$2; shift 2; rc=0; $where timeout 10 "$BOWLINE" "$@" > "$AT/asked.out" 2>&1 || rc=$?; [ $rc = 1 ] || fail "$rc of $*"; has "$text"; }
    SOCKET="import socket; socket.socket(socket.AF_RDS, socket.SOCK_SEQPACKET).bind(('ADDRESS', 0)); print('bound')"
    # Each command takes the node of a namespace: by an address and a setting that it alone has.
    is_taken() { # WHERE ADDRESS SETTING
        asked $1 info --json
        has "\"$2\""
        asked $1 sysctl net.rds.max_unacked_packets
        has "= $3"
        asked $1 drop
        asked $1 ping -c 1 -W 5 -I $2 $2
        has "$2"
        asked $1 run -- python3 -c "$(echo "$SOCKET" | sed "s/ADDRESS/$2/")"
        has bound
    }
"#;

fn with_two_nodes(script: &str) {
    build_library();
    let folder = Folder::new();
    let Some(done) = apart(&folder, &format!("{TWO_NODES}\n{script}")) else { return };
    succeeded(&done);
}

#[test]
fn commands_and_programs_take_the_node_of_their_namespace() {
    with_two_nodes(
        r#"
        refused there "no node runs in this network namespace" info
        refused there "serves another network namespace" run --node=require -- python3 -c "print(1)"
        # At the same address, which is the same name.
        begin far nsenter -t $P -n "$BOWLINE" node --address 127.0.0.1 --address 127.152.1.2 --sysctl net.rds.max_unacked_packets=12
        heard far ready
        grep -q "are served at" "$AT/far.out" || fail "it serves no programs"
        is_taken here 127.152.1.1 11
        is_taken there 127.152.1.2 12
        # A second one of a namespace serves no programs, whoever was first.
        begin more nsenter -t $P -n "$BOWLINE" node --address 127.152.1.3
        heard more ready
        heard more "are served by another node"
        refused there "several nodes run" info
        grep -q 127.152.1.3.sock "$AT/asked.out" || fail "no list"
        kill $(cat "$AT/more.pid")
        heard more stopped

        # The first stands still, and then is gone.
        kill -STOP $(cat "$AT/near.pid")
        is_taken there 127.152.1.2 12
        refused here "one runs that does not answer" info
        kill -CONT $(cat "$AT/near.pid")
        is_taken here 127.152.1.1 11
        # The second, likewise.
        kill -STOP $(cat "$AT/far.pid")
        is_taken here 127.152.1.1 11
        kill -KILL $(cat "$AT/far.pid")
        is_taken here 127.152.1.1 11
        refused there "no node runs in this network namespace" info
        kill -KILL $(cat "$AT/near.pid")
        refused here "no node runs here" info
        refused there "no node runs here" info
        # Which has the usual names changes nothing.
        begin far nsenter -t $P -n "$BOWLINE" node --address 127.0.0.1 --address 127.152.1.2 --sysctl net.rds.max_unacked_packets=12
        heard far ready
        [ -S "$AT/bowline/rds/host.sock" ] || fail "the usual name is free"
        begin near "$BOWLINE" node --address 127.0.0.1 --address 127.152.1.1 --sysctl net.rds.max_unacked_packets=11
        heard near ready
        is_taken here 127.152.1.1 11
        is_taken there 127.152.1.2 12
        # Another process goes on in a node's place, and nowhere else.
        begin near2 "$BOWLINE" node --address 127.0.0.1 --address 127.152.1.1 --sysctl net.rds.max_unacked_packets=13 --replace
        heard near2 ready
        heard near "handed over"
        is_taken here 127.152.1.1 13
        is_taken there 127.152.1.2 12
        "#,
    );
}

/// One that starts while the node with the usual names stands still has names of its own.
#[test]
fn a_node_starts_beside_one_that_stands_still() {
    with_two_nodes(
        r#"
        kill -STOP $(cat "$AT/near.pid")
        begin far nsenter -t $P -n "$BOWLINE" node --address 127.0.0.1 --address 127.152.1.2 --sysctl net.rds.max_unacked_packets=12
        heard far ready
        grep -q "are served at" "$AT/far.out" || fail "it serves no programs"
        is_taken there 127.152.1.2 12
        # Nobody is accepted where nobody reads: also then.
        python3 -c "
import socket, sys, time
all = []
for path in sys.argv[1:]:
    while True:
        one = socket.socket(socket.AF_UNIX)
        one.setblocking(False)
        try:
            one.connect(path)
        except BlockingIOError:
            break
        all.append(one)
print('full', flush=True)
time.sleep(60)" "$AT/bowline/127.0.0.1.sock" "$AT/bowline/rds/host.sock" > "$AT/full.out" & echo $! > "$AT/full.pid"
        heard full full
        is_taken there 127.152.1.2 12
        begin far2 nsenter -t $P -n "$BOWLINE" node --address 127.0.0.1 --address 127.152.1.2 --sysctl net.rds.max_unacked_packets=14 --replace
        heard far2 ready
        heard far "handed over"
        is_taken there 127.152.1.2 14
        "#,
    );
}

/// Of nodes that start at the same moment, none has less than it would have alone.
#[test]
fn nodes_of_two_namespaces_start_at_once() {
    with_two_nodes(
        r#"
        kill $(cat "$AT/near.pid")
        heard near stopped
        for n in 1 2 3 4 5; do
            begin near "$BOWLINE" node --address 127.0.0.1 --address 127.152.1.1 --sysctl net.rds.max_unacked_packets=11
            begin far nsenter -t $P -n "$BOWLINE" node --address 127.0.0.1 --address 127.152.1.2 --sysctl net.rds.max_unacked_packets=12
            heard near ready
            heard far ready
            is_taken here 127.152.1.1 11
            is_taken there 127.152.1.2 12
            kill $(cat "$AT/near.pid" "$AT/far.pid")
            heard near stopped
            heard far stopped
        done
        "#,
    );
}

/// Commands for disks take the processes of their namespace, nodes among them.
#[test]
fn commands_for_disks_take_what_runs_in_their_namespace() {
    with_two_nodes(
        r#"
        none_there() { rc=0; there timeout 10 "$BOWLINE" "$@" > "$AT/asked.out" 2>&1 || rc=$?; [ $rc != 0 ] || fail "$*"; has "runs in this network namespace"; has "$AT/bowline/rnbd/"; }
        head -c 65536 /dev/zero > "$AT/image"
        begin disks "$BOWLINE" node --address 127.152.2.1 --no-sandbox --no-programs
        begin server "$BOWLINE" rnbd export --memory of-here=1MiB -I 127.152.2.2
        heard disks ready
        heard server "export of-here"
        none_there rnbd export stray file="$AT/image"
        none_there rnbd map of-here from here 127.152.2.1@127.152.2.2
        none_there rnbd exports
        none_there rnbd list
        none_there rtrs tree
        asked here rtrs tree
        has '"network_namespace"'
        # With one there as well, each has its own.
        begin far nsenter -t $P -n "$BOWLINE" rnbd export --memory of-there=1MiB -I 127.152.2.2
        heard far "export of-there"
        asked there rnbd exports
        has of-there
        ! grep -q of-here "$AT/asked.out" || fail "those of others"
        asked here rnbd exports
        has of-here
        ! grep -q -e of-there -e stray "$AT/asked.out" || fail "those of others"
        asked there rtrs tree
        ! grep -q of-here "$AT/asked.out" || fail "those of others"
        # Whoever names the socket of another may have it.
        asked there rnbd --control "$(ls "$AT"/bowline/rnbd/export-*.sock | head -n 1)" exports
        "#,
    );
}
