//! `--background`: a command returns as soon as a process of its own does the work.

use crate::links::{apart, succeeded};
use crate::support::{Folder, run};

fn on_a_machine(script: &str) {
    let folder = Folder::new();
    // `began NAME` notes the process that NAME has started in the background.
    let began = r#"began() { sed -n 's/^process \([0-9]*\) runs in the background; `kill \1` ends it$/\1/p' "$AT/$1.out" > "$AT/$1.pid"; [ -s "$AT/$1.pid" ] || fail "no process in $1"; }"#;
    if let Some(done) = apart(&folder, &format!("{began}\n{script}")) {
        succeeded(&done);
    }
}

#[test]
fn a_node_answers_when_the_command_has_returned() {
    on_a_machine(
        r#"
        "$BOWLINE" node --address 127.0.0.1 --background > "$AT/node.out" 2>&1
        began node
        "$BOWLINE" ping -c 1 127.0.0.1 > "$AT/ping.out" 2>&1
        # It is in no group of processes that a terminal stops with this one.
        [ "$(ps -o pgid= -p $(cat "$AT/node.pid") | tr -d ' ')" = "$(cat "$AT/node.pid")" ] || fail "its group"
        # Programs that it starts get nothing of who has waited.
        P=$(cat "$AT/node.pid")
        [ "$(readlink /proc/$P/fd/0)" = /dev/null ] || fail "its input"
        ! tr '\0' '\n' < /proc/$P/environ | grep -q BOWLINE_BACKGROUND || fail "its environment"
        # What it says comes to the same place.
        grep -q "ready; ask with" "$AT/node.out"
        kill $(cat "$AT/node.pid")
        heard node stopped
        "#,
    );
}

/// A shell's `$(..)` reads until nobody has the pipe: the process in the background leaves it, and
/// keeps a file.
#[test]
fn who_reads_the_output_of_the_command_does_not_wait_for_the_process() {
    on_a_machine(
        r#"
        x=$(timeout 50 "$BOWLINE" node --address 127.0.0.1 --background 2>&1)
        case "$x" in *"ready; ask with"*) ;; *) fail "it says $x" ;; esac
        kill $(echo "$x" | sed -n 's/^process \([0-9]*\) runs in the background.*/\1/p')
        x=$("$BOWLINE" rnbd export --memory disk0=16MiB -I 127.0.0.2 --background 2> "$AT/export.err")
        echo "$x" > "$AT/export.out"
        began export
        x=$("$BOWLINE" rnbd map disk0 --from demo --path 127.0.0.3@127.0.0.2 --nbd "$AT/disk0.sock" --background 2>&1)
        echo "$x" > "$AT/map.out"
        began map
        kill $(cat "$AT/map.pid")
        kill $(cat "$AT/export.pid")
        "#,
    );
}

#[test]
fn what_does_not_start_says_why_and_has_its_exit_status() {
    on_a_machine(
        r#"
        "$BOWLINE" node --address 127.0.0.1 --background > "$AT/node.out" 2>&1
        began node
        code=0; "$BOWLINE" node --address 127.0.0.1 --background > "$AT/second.out" 2>&1 || code=$?
        [ $code = 1 ] && grep -q "another node has" "$AT/second.out" || fail "exit status $code"
        ! grep -q "in the background" "$AT/second.out" || fail "it says that it runs"
        code=0; "$BOWLINE" node --config "$AT/none.toml" --background > "$AT/third.out" 2>&1 || code=$?
        [ $code != 0 ] && grep -q "none.toml" "$AT/third.out" || fail "exit status $code"
        code=0; "$BOWLINE" rnbd map none --from demo --path 127.0.0.3@127.0.0.2 --background --connect-timeout 1 > "$AT/fourth.out" 2>&1 || code=$?
        [ $code != 0 ] || fail "exit status $code"
        "#,
    );
}

#[test]
fn who_stops_the_waiting_command_stops_the_process_in_the_background() {
    on_a_machine(
        r#"
        begin map "$BOWLINE" rnbd map none --from demo --path 127.0.0.3@127.0.0.2 --background --connect-timeout 90
        P=$(cat "$AT/map.pid")
        n=0; until C=$(ps -o pid= --ppid $P | tr -d ' ') && [ -n "$C" ] && [ "$(readlink /proc/$C/fd/0)" = /dev/null ]; do n=$((n + 1)); [ $n -lt 600 ] || fail "no process"; sleep 0.1; done
        echo $C > "$AT/other.pid"
        kill -TERM $P
        code=0; wait $P || code=$?
        [ $code != 0 ] || fail "exit status $code"
        ! kill -0 $C 2> "$AT/none" || fail "it runs still"
        ! grep -q "in the background" "$AT/map.out" || fail "it says that it runs"
        "#,
    );
}

#[test]
fn what_belongs_to_a_terminal_does_not_run_in_the_background() {
    let folder = Folder::new();
    let export = ["rnbd", "export", "--memory", "disk0=1MiB", "--background", "--run", "true"];
    let path = "127.72.10.2@127.72.10.1";
    let map = ["rnbd", "map", "disk0", "--from", "s1", "--path", path, "--background"];
    for words in [&export[..], &[&map[..], &["--run", "true"]].concat()] {
        run(&folder, words).exits(2).complains(&["--background", "--run"]);
    }
    run(&folder, &["node", "--background", "--example-config"]).exits(2);
}

#[test]
fn a_disk_is_there_when_the_commands_have_returned() {
    on_a_machine(
        r#"
        "$BOWLINE" rnbd export --memory disk0=16MiB -I 127.0.0.2 --background > "$AT/export.out" 2>&1
        began export
        "$BOWLINE" rnbd map disk0 --from demo --path 127.0.0.3@127.0.0.2 --nbd "$AT/disk0.sock" --background > "$AT/map.out" 2>&1
        began map
        [ -S "$AT/disk0.sock" ] || fail "no socket"
        "$BOWLINE" rnbd unmap rnbd0 > "$AT/unmap.out" 2>&1
        n=0; while kill -0 $(cat "$AT/map.pid") 2> "$AT/none"; do n=$((n + 1)); [ $n -lt 600 ] || fail "it does not end"; sleep 0.1; done
        "#,
    );
}
