//! Who may do what: users of the machine, and peers.

use std::process::{Command, Output};

use bowline_testkit::skipped;

use crate::nodes::build_library;
use crate::support::{Folder, run, start};

const USER: &str = "77001";

/// Runs a Python program on the node of a folder as another user; `None` if that cannot be tried.
fn run_as_other(folder: &Folder, user: &str, program: &str) -> Output {
    let (user, group) = (format!("--reuid={user}"), format!("--regid={user}"));
    Command::new("setpriv")
        .args([&user, &group, "--clear-groups", env!("CARGO_BIN_EXE_bowline"), "run"])
        .args(["python3", "-c", &format!("from socket import *\n{program}")])
        .env("XDG_RUNTIME_DIR", folder.path())
        .output()
        .expect("setpriv starts")
}

/// Tells whether other users can be tried here; if not, the test is skipped.
fn has_other_users() -> bool {
    let own = env!("CARGO_BIN_EXE_bowline");
    let mut setpriv = Command::new("setpriv");
    let can = setpriv.args(["--reuid=77001", "--clear-groups", own, "--version"]).output();
    let can = can.is_ok_and(|output| output.status.success());
    if !can {
        skipped::because("no setpriv, not root, or others cannot start what was built");
    }
    can
}

/// Root's node serves one more user, who may bind to some ports; all others hear that they may not.
#[test]
fn users_of_the_list_have_sockets_and_others_do_not() {
    if !has_other_users() {
        return;
    }
    build_library();
    let folder = Folder::new();
    let text = "[access]\nusers = [77001]\n[[access.bind]]\nports = [\"4000-4009\"]\n";
    let file = folder.write("node.toml", text);
    let file = file.to_str().expect("a plain path");
    let mut node = start(&folder, &["node", "--address", "127.41.41.1", "--config", file]);
    node.expect("ready");
    let program = "s = socket(AF_RDS, SOCK_SEQPACKET)\n\
                   try: s.bind(('127.41.41.1', 3999))\n\
                   except PermissionError as e: print(e.errno)\n\
                   s.bind(('127.41.41.1', 4000))\n\
                   s.sendto(b'hello', ('127.41.41.1', 4000))\n\
                   print(s.recv(100))";
    let done = run_as_other(&folder, USER, program);
    assert_eq!(String::from_utf8_lossy(&done.stdout), "13\nb'hello'\n", "{done:?}");
    node.expect("user 77001 may not bind there (1)");
    let command = |user: &str, words: &[&str]| {
        let (user, group) = (format!("--reuid={user}"), format!("--regid={user}"));
        let mut command = Command::new("setpriv");
        command.args([&user, &group, "--clear-groups", env!("CARGO_BIN_EXE_bowline")]);
        let done = command.args(words).env("XDG_RUNTIME_DIR", folder.path()).output();
        let done = done.expect("setpriv starts");
        (done.status.code(), String::from_utf8_lossy(&done.stderr).into_owned())
    };
    // Commands are programs like others.
    let send = ["send", "--no-end", "-f", "/dev/null", "-d", "127.41.41.1:4001", "-s"];
    let done = command(USER, &[&send[..], &["127.41.41.1:4000"]].concat());
    assert_eq!(done.0, Some(0), "{done:?}");
    let done = command(USER, &[&send[..], &["127.41.41.1:3999"]].concat());
    assert!(done.0 == Some(1) && done.1.contains("does not let this user bind"), "{done:?}");
    let done = command("77002", &[&send[..], &["127.41.41.1:4000"]].concat());
    assert!(done.0 == Some(1) && done.1.contains("does not serve this user"), "{done:?}");
    let done = run_as_other(&folder, "77002", "socket(AF_RDS, SOCK_SEQPACKET)");
    assert!(String::from_utf8_lossy(&done.stderr).contains("Errno 13"), "{done:?}");
    node.expect("user 77002 may not have sockets");
    // Sockets of the node it may have, but not ask the node.
    for command in ["info", "drop"] {
        let program = env!("CARGO_BIN_EXE_bowline");
        let mut asked = Command::new("setpriv");
        asked.args(["--reuid=77001", "--regid=77001", "--clear-groups", program, command]);
        let done = asked.env("XDG_RUNTIME_DIR", folder.path()).output().expect("setpriv starts");
        let text = String::from_utf8_lossy(&done.stderr);
        let wanted = "a node of another user serves programs at ";
        assert!(text.contains(wanted) && text.contains("only that user and root may"), "{text}");
    }
    let shown = run(&folder, &["info", "-c"]).exits(0);
    assert!(shown.out.contains("bl_programs_refused"), "{shown:?}");
    node.signal("-TERM");
    node.finish().exits(0);
}

/// Without a list the place itself keeps others out.
#[test]
fn other_users_do_not_even_reach_a_node_without_a_list() {
    if !has_other_users() {
        return;
    }
    build_library();
    let folder = Folder::new();
    let mut node = start(&folder, &["node", "--address", "127.41.41.2"]);
    node.expect("ready");
    let done = run_as_other(&folder, USER, "socket(AF_RDS, SOCK_SEQPACKET)");
    assert!(String::from_utf8_lossy(&done.stderr).contains("Permission denied"), "{done:?}");
    node.signal("-TERM");
    node.finish().exits(0);
}

// tests
#[test]
fn only_peers_of_the_list_connect_and_are_sent_to() {
    build_library();
    let folder = Folder::new();
    let words = ["--allow-peer", "127.41.42.0/24", "--deny-peer", "127.41.42.3"];
    let words = [&["node", "--address", "127.41.42.1"], &words[..]].concat();
    let mut node = start(&folder, &words);
    node.expect("ready");
    let ping = |from| run(&folder, &["ping", "-c", "1", "-I", from, "127.41.42.1"]);
    ping("127.41.42.2").exits(0);
    for stranger in ["127.41.42.3", "127.41.43.1"] {
        ping(stranger).exits(1);
        node.expect(&format!("peer {stranger}: connection refused, the list of peers"));
    }
    let program = "from socket import *\n\
                   s = socket(AF_RDS, SOCK_SEQPACKET)\n\
                   s.bind(('127.41.42.1', 4000))\n\
                   s.sendto(b'x', ('127.41.42.2', 4000))\n\
                   s.sendto(b'x', ('127.41.42.3', 4000))";
    let done = run(&folder, &["run", "python3", "-c", program]).exits(1);
    assert!(done.err.contains("[Errno 113] No route to host"), "{done:?}");
    let shown = run(&folder, &["info", "-n"]).exits(0);
    assert!(shown.out.contains("127.41.42.2") && !shown.out.contains("127.41.42.3"), "{shown:?}");
    node.signal("-TERM");
    node.finish();
}

#[test]
fn mistakes_in_who_may_do_what_are_told() {
    let folder = Folder::new();
    for (words, part) in [
        (["--allow-user", "no-such-user"], "no user \"no-such-user\""),
        (["--allow-group", "no-such-group"], "no group \"no-such-group\""),
        (["--allow-peer", "10.0.0.0/40"], "10.0.0.0/40"),
        (["--deny-peer", "::ffff:10.0.0.1"], "IPv4"),
    ] {
        let done = run(&folder, &[&["node", "--address", "127.41.41.3"], &words[..]].concat());
        assert!(done.exits(2).err.contains(part), "{part}");
    }
    let file = folder.write("node.toml", "[[access.bind]]\nports = [\"9-8\"]\n");
    let file = file.to_str().expect("a plain path");
    run(&folder, &["node", "--config", file]).exits(2).complains(&["node.toml:2:", "9-8"]);
}
