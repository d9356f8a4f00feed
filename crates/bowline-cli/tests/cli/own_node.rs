//! `bowline run` where no node runs: it starts one, which ends with its programs.

use bowline_testkit::skipped;

use crate::links::{apart, succeeded};
use crate::nodes::build_library;
use crate::support::Folder;

/// What the scripts have in common. `one` receives a message at 127.0.0.1 and `two` sends it.
const COMMON: &str = r#"
    unset XDG_CONFIG_HOME
    PLACES="$XDG_RUNTIME_DIR/bowline/rds"
    # The node that was started here has its lock until it ends.
    node_is_gone() { n=0; until flock -n "$PLACES"/host*.lock true; do n=$((n + 1)); [ $n -lt 600 ] || fail "a node is left"; sleep 0.1; done; }
    # Runs a program on a socket, which succeeds, and what is said goes to "err"; the node ends after it.
    binds() { "$BOWLINE" run python3 -c "$bound" > "$AT/bound.out" 2> "$AT/err" || fail "$(cat "$AT/err")"; grep -q bound "$AT/bound.out"; }
    # No program is run, for a reason that has these words.
    refused() { code=0; "$BOWLINE" run touch "$AT/ran" 2> "$AT/err" || code=$?; [ $code = 1 ] && [ ! -e "$AT/ran" ] && grep -q "$1" "$AT/err" || fail "$code, without $1: $(cat "$AT/err")"; }
    node_runs() { ! flock -n "$PLACES"/host*.lock true || fail "no node runs"; }
    bound='from socket import *; s = socket(AF_RDS, SOCK_SEQPACKET); s.bind(("127.0.0.1", 0)); print("bound", flush=True)'
    one='from socket import *; s = socket(AF_RDS, SOCK_SEQPACKET); s.bind(("127.0.0.1", 4000)); print("waits", flush=True); print(s.recv(9).decode(), flush=True)'
    two='from socket import *; s = socket(AF_RDS, SOCK_SEQPACKET); s.bind(("127.0.0.1", 0)); s.sendto(b"hello", ("127.0.0.1", 4000))'
"#;

fn in_a_machine_without_nodes(script: &str) {
    build_library();
    let folder = Folder::new();
    let Some(done) = apart(&folder, &format!("{COMMON}\n{script}")) else { return };
    succeeded(&done);
}

#[test]
fn a_node_is_started_for_a_program_and_ends_with_it() {
    in_a_machine_without_nodes(
        r#"
        "$BOWLINE" run python3 -c "$bound" > "$AT/bound.out" 2> "$AT/err" || { cat "$AT/err" >&2; fail run; }
        grep -q bound "$AT/bound.out"
        [ "$(wc -l < "$AT/err")" = 1 ] || fail "$(cat "$AT/err")"
        grep -q "no node ran here; started one .* on all addresses of this machine; it ends with the last of them; its log: $PLACES/host" "$AT/err"
        node_is_gone
        grep -q "no program is left" "$PLACES"/host*.log
        # The next one has its own, and says so too.
        "$BOWLINE" run python3 -c "$bound" > "$AT/bound.out" 2> "$AT/err"
        grep -q "started one" "$AT/err"
        # Its exit status is that of the program, which sees no other process as its child.
        code=0
        "$BOWLINE" run python3 -c 'import os, sys
try: os.wait()
except ChildProcessError: sys.exit(7)' 2> "$AT/err" || code=$?
        [ $code = 7 ] || fail "exit status $code"
        node_is_gone
        "#,
    );
}

#[test]
fn two_shells_share_a_node_and_the_last_one_ends_it() {
    in_a_machine_without_nodes(
        r#"
        mkfifo "$AT/hold"
        begin first "$BOWLINE" run sh -c 'echo holds; read line < "$AT/hold"'
        heard first holds
        begin one "$BOWLINE" run python3 -c "$one"
        heard one waits
        node_runs
        # The first one, which has started the node, ends.
        echo end > "$AT/hold"
        wait $(cat "$AT/first.pid")
        "$BOWLINE" run python3 -c "$two" 2> "$AT/err"
        [ ! -s "$AT/err" ] || fail "$(cat "$AT/err")"
        heard one hello
        wait $(cat "$AT/one.pid")
        node_is_gone
        "#,
    );
}

#[test]
fn programs_that_begin_at_the_same_time_start_one_node() {
    in_a_machine_without_nodes(
        r#"
        for n in 1 2 3 4 5 6; do
            begin same$n "$BOWLINE" run python3 -c "$bound; import time; time.sleep(1)"
        done
        for n in 1 2 3 4 5 6; do
            wait $(cat "$AT/same$n.pid") || fail "the one of $n"
        done
        [ "$(cat "$AT"/same?.out | grep -c "started one")" = 1 ] || fail "nodes"
        [ "$(cat "$AT"/same?.out | grep -c bound)" = 6 ] || fail "programs"
        node_is_gone
        "#,
    );
}

/// Children that outlive the program, those that close all that they do not know, and signals of
/// the terminal, which go to its group.
#[test]
fn children_keep_the_node_and_terminal_signals_do_not_reach_it() {
    in_a_machine_without_nodes(
        r#"
        # In a session of its own.
        begin shell setsid "$BOWLINE" run sh -c 'echo $$; (trap "" TERM; echo begins; sleep 1; exec python3 -c "$0") & read line' "$bound"
        heard shell begins
        env kill -TERM -- -$(grep -m 1 "^[0-9]*$" "$AT/shell.out")
        heard shell bound
        node_is_gone
        # A program that closes all descriptors keeps it by being there, and what it has begun by its socket.
        begin closing "$BOWLINE" run python3 -c "import os, time; os.closerange(3, 4096); time.sleep(1)
$bound; s.set_inheritable(True)
if os.fork(): os._exit(0)
time.sleep(1); s.sendto(b'x', s.getsockname()); print(s.recv(2).decode() + 'y', flush=True)"
        heard closing xy
        node_is_gone
        "#,
    );
}

#[test]
fn a_node_is_required_on_request_and_found_where_it_runs() {
    in_a_machine_without_nodes(
        r#"
        code=0; "$BOWLINE" run --node=require true 2> "$AT/err" || code=$?
        [ $code = 1 ] && grep -q "no node serves programs here (.*): start one with .bowline node., or leave out --node=require" "$AT/err" || fail "$code: $(cat "$AT/err")"
        ! ls "$PLACES"/host*.lock 2> "$AT/none" || fail "a lock"
        code=0; "$BOWLINE" run --node="$AT/none.sock" true 2> "$AT/err" || code=$?
        [ $code = 1 ] && grep -q "$AT/none.sock: No such file.*: start one with .bowline node., with --programs and this path" "$AT/err" || fail "$code: $(cat "$AT/err")"
        begin node "$BOWLINE" node --address 127.0.0.1
        heard node ready
        for words in "" "--node=require"; do
            "$BOWLINE" run $words python3 -c "$bound" > "$AT/bound.out" 2> "$AT/err"
            [ ! -s "$AT/err" ] || fail "$(cat "$AT/err")"
        done
        ! ls "$PLACES"/host*.lock 2> "$AT/none" || fail "a lock"
        kill $(cat "$AT/node.pid")
        wait $(cat "$AT/node.pid")
        # Others have an address: the node has the rest.
        ip address add 10.9.9.9/32 dev lo
        begin other "$BOWLINE" node --address 10.9.9.9 --control "$AT/other.sock" --programs "$AT/other.host"
        heard other ready
        "$BOWLINE" run python3 -c "$bound" > "$AT/bound.out" 2> "$AT/err"
        grep -q "for programs of this user, on 127.0.0.1[;,]" "$AT/err" || fail "$(cat "$AT/err")"
        "#,
    );
}

/// Exit statuses and signals are those that a shell sees without `bowline run`.
#[test]
fn a_program_ends_as_it_would_without_a_node() {
    in_a_machine_without_nodes(
        r#"
        ends() { code=0; "$BOWLINE" run "$@" > "$AT/ends.out" 2> "$AT/err" || code=$?; }
        for signal in TERM KILL SEGV PIPE; do
            expected=0; sh -c "kill -$signal \$\$" || expected=$?
            ends sh -c "kill -$signal \$\$"
            [ $code = $expected ] || fail "SIG$signal: $code, not $expected"
        done
        # The process that the shell has started is the program.
        begin waiting "$BOWLINE" run sh -c 'trap "echo caught; exit 5" TERM; echo waits; while :; do sleep 0.1; done'
        heard waiting waits
        kill -TERM $(cat "$AT/waiting.pid")
        code=0; wait $(cat "$AT/waiting.pid") || code=$?
        [ $code = 5 ] || fail "SIGTERM of another: $code"
        heard waiting caught
        for stream in "" "trap '' USR1;" "trap '' PIPE;"; do
            sh -c "$stream exec grep ^Sig[BIC] /proc/self/status" > "$AT/signals"
            ends sh -c "$stream exec \"$BOWLINE\" run grep ^Sig[BIC] /proc/self/status"
            cmp "$AT/signals" "$AT/ends.out" || fail "$(cat "$AT/ends.out")"
        done
        node_is_gone
        # It fails to run these programs, and starts no node for them.
        rm "$PLACES"/*
        fails() { [ $code = $1 ] && grep -q "$2" "$AT/err" && [ "$(wc -l < "$AT/err")" = 1 ] || fail "$code: $(cat "$AT/err")"; }
        mkdir "$AT/bin"
        : > "$AT/bin/text"
        ends no-such-command; fails 127 "no-such-command: no such command"
        ends "$AT/none"; fails 127 "$AT/none: no such command"
        ends "$AT/bin"; fails 126 "cannot run $AT/bin: is a directory"
        ends "$AT/bin/text"; fails 126 "cannot run $AT/bin/text: permission denied"
        ends "$AT/bin/text/x"; fails 126 "cannot run $AT/bin/text/x: Not a directory"
        PATH="$PATH:$AT/bin" ends text; fails 126 "cannot run $AT/bin/text: permission denied"
        printf '#!/no/interpreter\n' > "$AT/bin/script"; chmod 755 "$AT/bin/script"
        ends "$AT/bin/script"; fails 127 "cannot run $AT/bin/script: No such file"
        # Without PATH not from the folder of the process.
        cp "$AT/bin/text" "$AT/bin/here"; chmod 755 "$AT/bin/here"
        code=0; (cd "$AT/bin" && env -u PATH "$BOWLINE" run here 2> "$AT/err") || code=$?; fails 127 "here: no such command"
        [ -z "$(ls "$PLACES")" ] || fail "a node was started: $(ls "$PLACES")"
        "#,
    );
}

/// A user without a folder of run-time files, as in a container.
#[test]
fn without_its_own_folder_a_user_has_one_for_temporary_files() {
    in_a_machine_without_nodes(
        r#"
        # What is no folder is of no use as one.
        : > "$AT/file"
        export XDG_RUNTIME_DIR="$AT/file" TMPDIR="$AT"
        begin one "$BOWLINE" run python3 -c "$one"
        heard one waits
        grep -q "ask it with --control $AT/bowline-$(id -u)/host" "$AT/one.out"
        "$BOWLINE" info -k --control "$AT/bowline-$(id -u)"/host*.control | grep -q "127.0.0.1 .*4000" || fail info
        "$BOWLINE" run python3 -c "$two" 2> "$AT/err"
        heard one hello
        # Others could replace what is in such a folder.
        wait $(cat "$AT/one.pid")
        chmod 777 "$AT/bowline-$(id -u)"
        refused "$AT/file/.*; $AT/bowline-.* has mode 0777.*; set XDG_RUNTIME_DIR to a folder that only you may write"
        "#,
    );
}

/// Others could write to the folder, and made links there, before it was closed to them.
#[test]
fn a_node_is_started_with_files_of_its_own_and_no_links() {
    in_a_machine_without_nodes(
        r#"
        export TMPDIR="$AT"
        binds
        node_is_gone
        echo precious > "$AT/precious"
        for file in "$PLACES"/host*.log "$PLACES"/host*.lock; do
            for words in "-s" ""; do
                rm "$file"
                ln $words "$AT/precious" "$file"
                refused "$file is a link, or not a file of this user: remove it"
                grep -q precious "$AT/precious" || fail "it has written to $file, a link"
            done
            # Nor does it wait for who reads a pipe.
            rm "$file"
            mkfifo "$file"
            refused "$file is a link, or not a file of this user"
            rm "$file"
        done
        ln -s "$AT/nowhere" "$PLACES/link"
        mv "$PLACES/link" "$file"
        refused "$file is a link"
        [ ! -e "$AT/nowhere" ] || fail "it has created what a link leads to"
        rm "$file"
        binds
        node_is_gone
        # Where others may write now it starts none, but in the folder for temporary files.
        chmod 777 "$PLACES"
        rm "$PLACES"/*
        binds
        grep -q "its log: $AT/bowline-$(id -u)/host" "$AT/err" || fail "$(cat "$AT/err")"
        [ -z "$(ls "$PLACES")" ] || fail "files: $(ls "$PLACES")"
        PLACES="$AT/bowline-$(id -u)"
        node_is_gone
        # That one is a link.
        mv "$PLACES" "$AT/theirs"
        ln -s "$AT/theirs" "$PLACES"
        refused "$PLACES is a symbolic link"
        "#,
    );
}

/// As root, with the environment of another user, who has made folders beforehand.
#[test]
fn a_node_of_root_is_in_no_folder_of_another_user() {
    if !rustix::process::geteuid().is_root() {
        skipped::because("only root can give folders away");
        return;
    }
    in_a_machine_without_nodes(
        r#"
        begins_in() { binds; grep -q "its log: $1/host" "$AT/err" || fail "not in $1: $(cat "$AT/err")"; PLACES=$1; node_is_gone; }
        mkdir "$AT/own" "$AT/theirs"
        chown 65534 "$AT/theirs"
        export TMPDIR="$AT/own" XDG_RUNTIME_DIR="$AT/theirs"
        begins_in /run/bowline/rds
        # A folder of root's, in one where the other user can rename it.
        mkdir "$AT/theirs/own"
        XDG_RUNTIME_DIR="$AT/theirs/own"
        begins_in /run/bowline/rds
        [ -z "$(ls "$AT/theirs/own")" ] || fail "it has created something there"
        # As the package has it, for the service.
        unset XDG_RUNTIME_DIR
        rm /run/bowline/rds/*
        chown 65534 /run/bowline/rds
        begins_in "$AT/own/bowline-0"
        [ -z "$(ls /run/bowline/rds)" ] || fail "files: $(ls /run/bowline/rds)"
        rm "$AT/own/bowline-0"/*
        chown 65534 "$AT/own/bowline-0"
        refused "/run/bowline/rds belongs to user 65534 .*; $AT/own/bowline-0 belongs to user 65534 .*; set XDG_RUNTIME_DIR to a folder that only you may write"
        [ -z "$(ls "$AT/own/bowline-0")" ] || fail "it has created something there"
        TMPDIR="$AT/theirs"
        refused "$AT/theirs belongs to user 65534"
        [ "$(ls "$AT/theirs")" = own ] || fail "it has created something there"
        "#,
    );
}

/// The node outlives the program, and what the program has closed is closed.
#[test]
fn a_node_has_nothing_open_that_the_program_was_given() {
    in_a_machine_without_nodes(
        r#"
        mkfifo "$AT/pipe" "$AT/hold"
        begin reader sh -c 'cat "$AT/pipe"; echo ended'
        begin holder "$BOWLINE" run sh -c 'echo given >&9; exec 9>&-; echo closed; read line < "$AT/hold"' 9> "$AT/pipe"
        heard holder closed
        heard reader ended
        grep -q given "$AT/reader.out"
        node_runs
        echo end > "$AT/hold"
        node_is_gone
        "#,
    );
}

/// Whoever listened when it was looked for has ended before it was asked to stay.
#[test]
fn a_node_that_has_just_ended_is_not_taken_for_one_that_stays() {
    in_a_machine_without_nodes(
        r#"
        mkdir -m 700 -p "$PLACES"
        # It ends with the second connection: the first one asks whose it is.
        begin ending python3 -c 'import os, socket, sys
place = sys.argv[1]
s = socket.socket(socket.AF_UNIX); s.bind(place); s.listen(); print("listens", flush=True)
s.accept()[0].close()
last, _ = s.accept()
os.unlink(place); s.close(); last.close()' "$PLACES/host.sock"
        heard ending listens
        binds
        grep -q "started one" "$AT/err" || fail "$(cat "$AT/err")"
        node_is_gone
        "#,
    );
}

/// The library of verbs, where it is built.
fn has_verbs_library() -> bool {
    let library =
        std::path::Path::new(env!("CARGO_BIN_EXE_bowline")).with_file_name("bowline-ibverbs");
    if !library.is_file() {
        skipped::because("no bowline-ibverbs beside the command; build the workspace");
    }
    library.is_file()
}

fn has_verbs_tools() -> bool {
    let is_there = std::process::Command::new("rping").arg("-h").output().is_ok();
    if !is_there {
        skipped::because("no rping; install rdmacm-utils and ibverbs-utils");
    }
    is_there
}

#[test]
fn devices_shows_what_verbs_programs_will_see() {
    if !has_verbs_library() {
        return;
    }
    in_a_machine_without_nodes(
        r#"
        devices() { code=0; "$BOWLINE" devices "$@" > "$AT/devices.out" 2> "$AT/err" || code=$?; cat "$AT/devices.out" "$AT/err" >&2; }
        shows() { grep -q "$1" "$AT/devices.out" || fail "no $1"; }
        nobody_has_the_port() { ! grep -q ":12B7" /proc/net/udp /proc/net/udp6 || fail "somebody has opened UDP port 4791"; }
        devices
        [ $code = 0 ]
        shows "bowline run.: bowline0, port 1 active, MTU 4096, GUID [0-9a-f]\{16\}$"
        shows "library  /.*/bowline-ibverbs$"
        shows "node     none runs; .bowline run. starts one"
        shows "GID   0  RoCE v2  lo         127.0.0.1$"
        # Nothing was started, and of a node that runs nothing is opened.
        [ -z "$(ls "$PLACES")" ] || fail "a node was started"
        mkfifo "$AT/hold"
        begin holder "$BOWLINE" run sh -c 'echo holds; read line < "$AT/hold"'
        heard holder holds
        devices
        [ $code = 0 ]
        shows "node     $PLACES/host.*.sock, process [0-9]*, used by no program$"
        shows "GID   0  RoCE v2  lo         127.0.0.1$"
        nobody_has_the_port
        echo end > "$AT/hold"
        node_is_gone
        # Addresses that others have.
        begin taker python3 -c 'from socket import *; import time
s = socket(AF_INET, SOCK_DGRAM); s.bind(("", 4791)); print("taken", flush=True); time.sleep(60)'
        heard taker taken
        begin taker6 python3 -c 'from socket import *; import time
s = socket(AF_INET6, SOCK_DGRAM); s.setsockopt(IPPROTO_IPV6, IPV6_V6ONLY, 1); s.bind(("::", 4791)); print("taken", flush=True); time.sleep(60)'
        heard taker6 taken
        devices
        [ $code = 1 ]
        shows "bowline run.: no device$"
        shows "left out .*lo  *127.0.0.1: process $(cat "$AT/taker.pid") (python3) has UDP port 4791 there$"
        grep -q "get no device: no address is left" "$AT/err"
        devices --json
        [ $code = 1 ]
        python3 -c 'import json, sys
seen = json.loads(open(sys.argv[1]).readlines()[0])["verbs_programs"]
assert not seen["device"] and seen["gids"] == [] and "no address is left" in seen["trouble"], seen
assert {"address": "127.0.0.1", "interface": "lo"}.items() <= seen["left_out"][0].items(), seen
assert seen["left_out"][0]["holder"]["pid"] == int(sys.argv[2]), seen' "$AT/devices.out" $(cat "$AT/taker.pid")
        kill $(cat "$AT/taker.pid") $(cat "$AT/taker6.pid")
        wait $(cat "$AT/taker.pid") $(cat "$AT/taker6.pid") || true
        # Without the library.
        mkdir "$AT/bin"
        cp "$BOWLINE" "$AT/bin/bowline"
        BUILT=$BOWLINE
        BOWLINE=$AT/bin/bowline
        devices
        [ $code = 1 ]
        grep -q "get no device: bowline-ibverbs is not there" "$AT/err"
        BOWLINE=$BUILT
        # A machine with a device of its own.
        mount -t tmpfs tmpfs /sys/class
        mkdir -p /sys/class/infiniband/mlx5_0
        devices
        [ $code = 0 ]
        shows "this machine has RDMA devices, which they keep: mlx5_0$"
        "#,
    );
}

#[test]
fn devices_shows_the_programs_that_have_one_and_the_guid_that_they_see() {
    if !has_verbs_library() || !has_verbs_tools() {
        return;
    }
    in_a_machine_without_nodes(
        r#"
        begin rping "$BOWLINE" run rping -s -P -a 127.0.0.1
        n=0
        until "$BOWLINE" devices --json > "$AT/devices.out" && grep -q '"programs":1' "$AT/devices.out"; do
            n=$((n + 1)); [ $n -lt 100 ] || fail "$(cat "$AT/devices.out")"; sleep 0.1
        done
        guid=$(sed 's/.*"guid":"\([0-9a-f]*\)".*"gids".*/\1/' "$AT/devices.out")
        "$BOWLINE" run ibv_devinfo > "$AT/devinfo.out" 2> "$AT/err" || fail "$(cat "$AT/err")"
        [ "$(sed -n 's/.*node_guid:[[:space:]]*//p' "$AT/devinfo.out" | tr -d :)" = "$guid" ] || fail "$guid: $(cat "$AT/devinfo.out")"
        kill $(cat "$AT/rping.pid")
        wait $(cat "$AT/rping.pid") || true
        node_is_gone
        "#,
    );
}

/// Files of a device in /sys, for programs that read them, and what the system has beside them.
#[test]
fn programs_read_the_device_in_sys_and_dev() {
    if !has_verbs_library() {
        return;
    }
    in_a_machine_without_nodes(
        r#"
        # An address that the device does not have.
        ip address add 10.8.0.1/32 dev lo
        begin taker python3 -c 'from socket import *; import time
s = socket(AF_INET, SOCK_DGRAM); s.bind(("10.8.0.1", 4791)); print("taken", flush=True); time.sleep(60)'
        heard taker taken
        mkfifo "$AT/hold"
        begin holder "$BOWLINE" run sh -c 'echo holds; read line < "$AT/hold"'
        heard holder holds
        in_run() { "$BOWLINE" run "$@" 2> "$AT/err" || fail "$*: $(cat "$AT/err")"; }
        is() { [ "$2" = "$1" ] || fail "$1, not $2"; }
        S=/sys/class/infiniband
        [ ! -e $S ] && [ ! -e /dev/infiniband ] || exit 0
        is bowline0 "$(in_run ls $S)"
        is "/sys/class/infiniband/bowline0" "$(in_run sh -c "echo $S/*")"
        in_run ls -laR $S /dev/infiniband > "$AT/list"
        [ ! -s "$AT/err" ] || fail "$(cat "$AT/err")"
        is "abi_version uverbs0" "$(echo $(in_run ls /sys/class/infiniband_verbs))"
        is "4: ACTIVE" "$(in_run cat $S/bowline0/ports/1/state)"
        is "0000:0000:0000:0000:0000:ffff:7f00:0001" "$(in_run cat $S//bowline0/./ports/1/pkeys/../gids/0)"
        is "RoCE v2" "$(in_run head -n 1 $S/bowline0/ports/1/gid_attrs/types/0)"
        is lo "$(in_run sh -c "read name < $S/bowline0/ports/1/gid_attrs/ndevs/0; echo \$name")"
        is -1 "$(in_run python3 -c "print(open('$S/bowline0/device/numa_node').read().strip())")"
        is "$S/bowline0/device" "$(in_run realpath $S/bowline0/ports/../device/)"
        is bowline0 "$(in_run cat /sys/class/infiniband_verbs/uverbs0/ibdev)"
        in_run find $S -name node_guid > "$AT/found"
        is "$S/bowline0/node_guid" "$(cat "$AT/found")"
        # Of the device's own file there is the name.
        in_run test -r /dev/infiniband/uverbs0
        is uverbs0 "$(in_run ls /dev/infiniband)"
        # What is not there, or not the device's, is as the system has it.
        in_run python3 -B - <<'END'
import errno, os
S = "/sys/class/infiniband"
def fails(wanted, call, *args):
    try: call(*args)
    except OSError as error: assert error.errno == wanted, (call, args, error)
    else: raise AssertionError((call, args))
for path in [S + "/mlx5_0", S + "_other", S + "/../../../node", S + "/../../../sys/none",
             "/dev/infiniband/uverbs1", "/sys/class/../class/infiniband",
             S + "/bowline0/" + "x" * 600]:
    for call in [os.stat, os.lstat, os.listdir, os.readlink, open]:
        fails(errno.ENOENT, call, path)
fails(errno.ENODEV, os.open, "/dev/infiniband/uverbs0", os.O_RDWR)
fails(errno.EACCES, os.open, S + "/bowline0/node_desc", os.O_WRONLY)
fails(errno.EACCES, open, S + "/bowline0/node_desc", "r+")
fails(errno.EINVAL, os.readlink, S + "/bowline0")
assert not os.access(S + "/bowline0/node_desc", os.W_OK) and os.access(S, os.R_OK)
# What leads out of the folder leads to the system's.
for path, meant in [(S + "/..", "/sys/class"), (S + "/bowline0/../../net/lo", "/sys/class/net/lo"),
                    (S + "/../../../../etc/passwd", "/etc/passwd"), (S + "/../../..", "/"),
                    ("/dev/infiniband/../null", "/dev/null")]:
    assert os.path.samefile(path, meant), path
assert os.path.isdir(S + "/bowline0/ports") and os.stat("/sys/class/net/lo")
# Relative paths are the system's.
os.chdir("/sys/class")
assert "infiniband" not in os.listdir(".") and not os.path.exists("infiniband/bowline0")
fails(errno.ENOENT, os.chdir, S)
# But below an open folder they are below that.
folder = os.open(S + "/bowline0", os.O_RDONLY | os.O_DIRECTORY)
assert os.read(os.open("node_type", os.O_RDONLY, dir_fd=folder), 99) == b"1: CA\n"
END
        # The calls of libibverbs have the same GUID.
        if command -v ibv_devinfo; then
            guid=$(in_run cat $S/bowline0/node_guid)
            in_run ibv_devinfo > "$AT/devinfo.out"
            grep -q "node_guid:.*$guid" "$AT/devinfo.out"
            in_run ibv_devices > "$AT/devices.out"
            grep -q "bowline0.*$(echo $guid | tr -d :)" "$AT/devices.out"
        fi
        # Without `bowline run` there is nothing.
        [ ! -e $S ]
        # In a machine that has a device, nothing of ours.
        mount -t tmpfs tmpfs /sys/class
        mkdir -p $S/mlx5_0
        is mlx5_0 "$(in_run ls $S)"
        ! "$BOWLINE" run cat $S/bowline0/node_guid 2> "$AT/err" || fail "a device that is not there"
        echo end > "$AT/hold"
        node_is_gone
        "#,
    );
}

/// The same table of GIDs by all ways to ask for it: calls, files, and `devices`.
#[test]
fn several_addresses_have_their_gids_and_interfaces() {
    if !has_verbs_library() {
        return;
    }
    in_a_machine_without_nodes(
        r#"
        ip link add v0 type veth peer name w0
        ip link set v0 addrgenmode none up
        ip link set w0 addrgenmode none up
        ip address add 10.9.0.1/24 dev v0
        ip address add 10.9.0.2/24 dev w0
        ip address add fd09::1/64 dev v0 nodad
        ip address add fe80::9/64 dev w0 nodad
        "$BOWLINE" devices --json > "$AT/devices.out" || fail devices
        "$BOWLINE" run python3 -B - "$AT/devices.out" <<'END' || fail "$(cat "$AT/devices.out")"
import ctypes as C, ipaddress, json, socket, sys
seen = json.loads(open(sys.argv[1]).readlines()[0])["verbs_programs"]
wanted = [(gid["address"], gid["interface"]) for gid in seen["gids"]]
first = [("10.9.0.2", "w0"), ("10.9.0.1", "v0"), ("fd09::1", "v0"), ("fe80::9", "w0")]
assert wanted[:4] == first and ("127.0.0.1", "lo") in wanted, wanted
lib = C.CDLL("libibverbs.so.1")
class Entry(C.Structure):
    _fields_ = [("gid", C.c_uint8 * 16), ("index", C.c_uint32), ("port", C.c_uint32),
                ("type", C.c_uint32), ("ndev", C.c_uint32)]
def shown(entry):
    at = ipaddress.ip_address(bytes(entry.gid))
    assert entry.type == 2 and entry.port == 1
    return str(at.ipv4_mapped or at), socket.if_indextoname(entry.ndev)
lib.ibv_get_device_list.restype = C.POINTER(C.c_void_p)
lib.ibv_open_device.restype = C.c_void_p
context = C.c_void_p(lib.ibv_open_device(C.c_void_p(lib.ibv_get_device_list(None)[0])))
assert context.value, "no device"
table = (Entry * 64)()
lib._ibv_query_gid_table.restype = C.c_ssize_t
count = lib._ibv_query_gid_table(context, table, C.c_size_t(64), 0, C.c_size_t(C.sizeof(Entry)))
assert [shown(entry) for entry in table[:count]] == wanted, count
assert [entry.index for entry in table[:count]] == list(range(count))
for index in range(count):
    one = Entry()
    assert lib._ibv_query_gid_ex(context, 1, index, C.byref(one), 0, C.c_size_t(C.sizeof(one))) == 0
    assert shown(one) == wanted[index] and one.index == index
    gid = (C.c_uint8 * 16)()
    assert lib.ibv_query_gid(context, 1, index, gid) == 0 and bytes(gid) == bytes(one.gid)
    port = "/sys/class/infiniband/bowline0/ports/1/"
    text = open(f"{port}gids/{index}").read().strip()
    assert bytes.fromhex(text.replace(":", "")) == bytes(gid), text
    assert open(f"{port}gid_attrs/ndevs/{index}").read().strip() == wanted[index][1]
assert lib._ibv_query_gid_ex(context, 1, count, C.byref(one), 0, C.c_size_t(C.sizeof(one))) != 0
END
        node_is_gone
        "#,
    );
}

/// The system's library by a path in the program, and programs without a loader.
#[test]
fn programs_that_nothing_can_be_put_before_are_named() {
    if !has_verbs_library() {
        return;
    }
    let builds = |flag: &str| {
        let mut compiler = std::process::Command::new("cc");
        compiler.args(["-x", "c", "-", flag, "-o", "/dev/null"]);
        let child = compiler.stdin(std::process::Stdio::piped()).spawn();
        child.is_ok_and(|mut child| {
            let mut input = child.stdin.take().expect("a pipe");
            std::io::Write::write_all(&mut input, b"int main(void) { return 0; }").is_ok() && {
                drop(input);
                child.wait().is_ok_and(|status| status.success())
            }
        })
    };
    if !builds("-static") {
        return skipped::because("no C compiler, or no static C library");
    }
    in_a_machine_without_nodes(
        r#"
        mkdir "$AT/own"
        touch "$AT/own/libibverbs.so.1"
        echo 'int main(void) { return 7; }' > "$AT/main.c"
        cc "$AT/main.c" -static -o "$AT/static"
        code=0
        "$BOWLINE" run "$AT/static" 2> "$AT/err" || code=$?
        [ $code = 126 ] || fail "exit status $code"
        grep -q "/static is linked statically, so its calls cannot be intercepted" "$AT/err"
        runs() { code=0; "$BOWLINE" run "$AT/$1" 2> "$AT/err" || code=$?; [ $code = 7 ] || fail "exit status $code of $1: $(cat "$AT/err")"; }
        named() { grep -q "/$1 has .*/own/libibverbs.so.1 by its RPATH" "$AT/err"; }
        cc "$AT/main.c" -Wl,--disable-new-dtags,-rpath,'/nonexistent:$ORIGIN/own' -o "$AT/first"
        runs first
        named first || fail "$(cat "$AT/err")"
        # Those of today come behind what `bowline run` puts first, and others have none.
        cc "$AT/main.c" -Wl,--enable-new-dtags,-rpath,'$ORIGIN/own' -o "$AT/later"
        runs later
        ! named later || fail "it is not first"
        cc "$AT/main.c" -Wl,--disable-new-dtags,-rpath,'$ORIGIN' -o "$AT/other"
        runs other
        ! named other || fail "there is no such library"
        node_is_gone
        "#,
    );
}

/// Programs of Debian, which know nothing of bowline, at the one address that they share.
#[test]
fn programs_that_speak_verbs_have_a_device_of_the_node() {
    if !has_verbs_library() || !has_verbs_tools() {
        return;
    }
    in_a_machine_without_nodes(
        r#"
        "$BOWLINE" run ibv_devinfo -v > "$AT/devinfo.out" 2> "$AT/err" || fail "$(cat "$AT/err")"
        grep -q "hca_id:.bowline0" "$AT/devinfo.out"
        grep -q "127.0.0.1, RoCE v2" "$AT/devinfo.out"
        node_is_gone
        grep -q "RDMA for programs on 127.0.0.1" "$PLACES"/host*.log
        # One node for all that follows.
        mkfifo "$AT/hold"
        begin holder "$BOWLINE" run sh -c 'echo holds; read line < "$AT/hold"'
        heard holder holds
        # A server and a client, by the connection manager and without it. One that is early asks again.
        again() { n=0; until "$@"; do n=$((n + 1)); [ $n -lt 100 ] || fail "$*"; sleep 0.1; done; }
        begin rping "$BOWLINE" run rping -s -a 127.0.0.1 -C 5 -v
        again "$BOWLINE" run rping -c -a 127.0.0.1 -C 5 -v > "$AT/client.out" 2>&1
        [ "$(grep -c "^ping data: rdma-ping" "$AT/client.out")" = 5 ] || fail pings
        wait $(cat "$AT/rping.pid")
        begin pingpong "$BOWLINE" run ibv_rc_pingpong -g 0 -n 100
        again "$BOWLINE" run ibv_rc_pingpong -g 0 -n 100 127.0.0.1 > "$AT/client.out" 2>&1
        grep -q "100 iters" "$AT/client.out"
        wait $(cat "$AT/pingpong.pid")
        # On a network that is bad by choice.
        begin bad "$BOWLINE" run --capture "$AT/packets" ibv_rc_pingpong -g 0 -n 100 -c
        again "$BOWLINE" run --impair 'duplicate=2%,way=in' --impair delay=50us --seed 7 \
            ibv_rc_pingpong -g 0 -n 100 -c 127.0.0.1 > "$AT/client.out" 2> "$AT/client.err"
        grep -qF "bowline run: a bad network: --impair 'duplicate=2%,way=in' --impair 'delay=50us" "$AT/client.err"
        grep -qF -e "--seed 7" "$AT/client.err"
        wait $(cat "$AT/bad.pid")
        [ $(stat -c %s "$AT/packets") -gt 100000 ] || fail "no packets written"
        ! "$BOWLINE" run --impair loss=2 ibv_devinfo 2> "$AT/client.err" || fail "it is no share"
        grep -q "a share from 0% to 100% is wanted" "$AT/client.err"
        # A server that is killed leaves nothing: the next one has its port.
        begin killed "$BOWLINE" run rping -s -P -a 127.0.0.1
        heard_port() { "$BOWLINE" run rping -c -a 127.0.0.1 -C 1 > "$AT/client.out" 2>&1; }
        again heard_port
        kill -9 $(cat "$AT/killed.pid")
        begin rping "$BOWLINE" run rping -s -a 127.0.0.1 -C 5
        again "$BOWLINE" run rping -c -a 127.0.0.1 -C 5 > "$AT/client.out" 2>&1
        wait $(cat "$AT/rping.pid")
        # Nor does the connection of one that is killed: its peer does not wait for it.
        begin server "$BOWLINE" run rping -s -a 127.0.0.1
        begin client "$BOWLINE" run rping -c -a 127.0.0.1
        n=0
        until grep -q . "$XDG_RUNTIME_DIR"/bowline/roce-0/roce-part*.connections 2> /dev/null; do
            n=$((n + 1)); [ $n -lt 100 ] || fail "no list of connections: $(ls "$XDG_RUNTIME_DIR"/bowline/roce-*)"
            kill -0 $(cat "$AT/client.pid") 2> /dev/null || begin client "$BOWLINE" run rping -c -a 127.0.0.1
            sleep 0.1
        done
        kill -9 $(cat "$AT/client.pid")
        n=0
        while kill -0 $(cat "$AT/server.pid") 2> /dev/null; do n=$((n + 1)); [ $n -lt 100 ] || fail "the server waits"; sleep 0.1; done
        echo end > "$AT/hold"
        node_is_gone
        "#,
    );
}
