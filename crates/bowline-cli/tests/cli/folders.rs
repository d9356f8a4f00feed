//! Where commands look for control sockets: in the folder of the user, and in that of services.

use std::{
    fs,
    process::{Command, Stdio},
};

use bowline_testkit::skipped;

use crate::support::{Folder, run};

#[test]
fn where_nothing_runs_the_words_say_where_they_looked() {
    let folder = Folder::new();
    let own = folder.path().display().to_string();
    let looked = format!("(looked in {own}/bowline/rnbd and /run/bowline/rnbd");
    for words in [&["list"][..], &["server", "list"], &["show", "x"], &["unmap", "x"]] {
        let done = run(&folder, &[&["rnbd"], words].concat());
        if fs::exists("/sys/class/rnbd-client").unwrap_or(false) || !done.err.contains("nothing") {
            skipped::because("something runs on this machine");
            return;
        }
        done.exits(254).complains(&["nothing runs here", &looked]);
    }
    let looked = format!("no node runs here (looked in {own}/bowline and /run/bowline");
    run(&folder, &["info"]).exits(1).complains(&[&looked]);
}

/// As after `sudo -E`: the folder of the environment is another user's, or bowline's folder in it.
#[test]
fn folders_of_another_user_are_left_out() {
    const STRANGER: Option<u32> = Some(65_534);
    let folder = Folder::new();
    if std::os::unix::fs::chown(folder.path(), STRANGER, None).is_err() {
        skipped::because("only root can give folders away");
        return;
    }
    let own = folder.path().display().to_string();
    let is_looked_in = || run(&folder, &["info"]).err.contains(&own);
    assert!(!is_looked_in());
    let others = folder.path().join("bowline/rds");
    fs::create_dir_all(&others).expect("folders");
    std::os::unix::fs::chown(folder.path(), Some(0), None).expect("given back");
    assert!(is_looked_in());
    let said = |words: &[&str]| run(&folder, words).err;
    assert!(said(&["run", "--node=require", "true"]).contains(&own));
    std::os::unix::fs::chown(&others, STRANGER, None).expect("given away");
    assert!(!said(&["run", "--node=require", "true"]).contains(&own));
    // A link of another user that leads to a folder of this one's.
    fs::remove_dir(&others).expect("empty");
    std::os::unix::fs::symlink("/root", &others).expect("a link");
    assert!(said(&["run", "--node=require", "true"]).contains(&own));
    std::os::unix::fs::lchown(&others, STRANGER, None).expect("given away");
    assert!(!said(&["run", "--node=require", "true"]).contains(&own));
}

/// Runs a script in which /run is a folder of the test, since only root may write to the real one;
/// `None` where that is not possible.
fn with_own_run(folder: &Folder, script: &str) -> Option<String> {
    let manners = [&["-m"][..], &["-rm"]];
    let works = |manner: &&&[&str]| {
        let mut try_out = Command::new("unshare");
        try_out.args(**manner).args(["mount", "--bind", "/tmp", "/run"]).stderr(Stdio::null());
        try_out.status().is_ok_and(|status| status.success())
    };
    let Some(manner) = manners.iter().find(works) else {
        skipped::because("no mount namespaces for this user");
        return None;
    };
    let common = r#"
        mkdir "$AT/run" "$AT/user"
        mount --bind "$AT/run" /run
        : > "$AT/pids"
        trap 'kill $(cat "$AT/pids")' EXIT
        heard() {
            n=0
            until grep -q "$2" "$AT/$1"; do n=$((n + 1)); [ $n -lt 600 ] || { cat "$AT/$1" >&2; exit 1; }; sleep 0.1; done
        }
    "#;
    let done = Command::new("unshare")
        .args(*manner)
        .args(["sh", "-ec", &format!("{common}\n{script}")])
        .env("XDG_RUNTIME_DIR", folder.path().join("user"))
        .env("BOWLINE", env!("CARGO_BIN_EXE_bowline"))
        .env("AT", folder.path())
        .output()
        .expect("unshare runs");
    let (out, err) = (String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr));
    assert_eq!(done.status.code(), Some(0), "{out}{err}");
    Some(out.into_owned())
}

#[test]
fn what_services_serve_is_found_from_a_login() {
    let folder = Folder::new();
    let out = with_own_run(
        &folder,
        r#"
        (
            unset XDG_RUNTIME_DIR
            "$BOWLINE" rnbd export --memory disk7=1MiB -I 127.44.30.1 > "$AT/export" 2>&1 & echo $! >> "$AT/pids"
            "$BOWLINE" node --address 127.44.30.1 > "$AT/node" 2>&1 & echo $! >> "$AT/pids"
        )
        heard export "^export disk7"
        heard node ready
        "$BOWLINE" rtrs tree
        "$BOWLINE" rnbd server list
        "$BOWLINE" info -c
        "$BOWLINE" sysctl net.rds.tcp.rds_tcp_sndbuf
        "#,
    );
    let Some(out) = out else { return };
    assert!(out.contains("/run/bowline/rnbd/export-") && out.contains("disk7"), "{out}");
    assert!(out.contains("CounterName"), "{out}");
}

/// Root may ask the node of every user, and means its own.
#[test]
fn another_users_node_does_not_hide_ones_own() {
    if !rustix::process::geteuid().is_root() {
        skipped::because("only root can start a node for another user");
        return;
    }
    let folder = Folder::new();
    let out = with_own_run(
        &folder,
        r#"
        chmod 755 "$AT"
        mkdir -m 1777 /run/bowline
        cp "$BOWLINE" "$AT/bowline"
        setpriv --reuid 65534 --regid 65534 --clear-groups "$AT/bowline" node --address 127.44.31.1 \
            --control /run/bowline/other.sock --no-programs > "$AT/other" 2>&1 & echo $! >> "$AT/pids"
        heard other ready
        # Where there is no other it is asked.
        "$BOWLINE" info -c > "$AT/asked"
        "$BOWLINE" node --address 127.44.31.2 > "$AT/own" 2>&1 & echo $! >> "$AT/pids"
        heard own ready
        : > "$AT/user/bowline/stale.sock"
        "$BOWLINE" sysctl net.rds.max_unacked_packets=17
        "$BOWLINE" drop
        "$BOWLINE" info -c > "$AT/asked"
        "$BOWLINE" sysctl --control /run/bowline/other.sock net.rds.max_unacked_packets
        # Two of its own are several.
        "$BOWLINE" node --address 127.44.31.3 > "$AT/second" 2>&1 & echo $! >> "$AT/pids"
        heard second ready
        code=0; "$BOWLINE" info -c 2> "$AT/several" || code=$?
        grep "several nodes run" "$AT/several" && [ $code = 1 ]
        "#,
    );
    let Some(out) = out else { return };
    let lines: Vec<&str> = out.lines().collect();
    assert_eq!(lines[0], "net.rds.max_unacked_packets = 17");
    assert_eq!(lines[1], "0 connections cut");
    assert_ne!(lines[2], lines[0], "{out}");
    assert!(!lines[3].contains("other.sock"), "{out}");
}
