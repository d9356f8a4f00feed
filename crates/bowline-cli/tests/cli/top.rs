//! `bowline top`: what it prints, and what it leaves of a terminal.

use std::{
    io::{Read, Write},
    process::{ChildStdin, Command, Stdio},
};

use bowline_testkit::skipped;

use crate::support::{Folder, Running, run, start};

fn node(folder: &Folder, address: &str) -> Running {
    let mut node =
        start(folder, &["node", "--address", address, "--no-programs", "--echo", "4000"]);
    node.expect("ready");
    node
}

fn socket(folder: &Folder, address: &str) -> String {
    folder.path().join(format!("bowline/{address}.sock")).display().to_string()
}

#[test]
fn elsewhere_than_on_a_terminal_views_follow_one_another() {
    let folder = Folder::new();
    let _node = node(&folder, "127.48.11.1");
    let done = run(&folder, &["top", "-n", "2", "-d", "0.1"]).exits(0);
    assert!(!done.out.contains('\x1b'), "{done:?}");
    assert_eq!(done.out.matches("bowline 0").count(), 2, "{done:?}");
    assert!(done.out.contains("127.48.11.1:4000"), "{done:?}");
    run(&folder, &["top", "-d", "0.01"]).exits(2).complains(&["the minimum is 0.1"]);
}

#[test]
fn json_has_a_line_for_each_view_with_rates_from_the_second_on() {
    let folder = Folder::new();
    let (_one, _two) = (node(&folder, "127.48.12.1"), node(&folder, "127.48.12.2"));
    run(&folder, &["ping", "-c", "1", "-I", "127.48.12.1", "127.48.12.2"]).exits(0);
    let control = socket(&folder, "127.48.12.1");
    let words = ["top", "--json", "-n", "2", "-d", "0.1", "--control", &control];
    let done = run(&folder, &words).exits(0);
    let views: Vec<serde_json::Value> =
        done.out.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    assert_eq!(views.len(), 2);
    assert!(views[0]["seconds"].is_null() && views[0]["totals"]["sent_messages"].is_null());
    assert!(views[1]["seconds"].as_f64().expect("a time") > 0.0);
    let connection = &views[1]["connections"][0];
    assert_eq!(connection["remote_addr"], "127.48.12.2");
    assert_eq!(connection["state"], "up");
    assert!(connection["sent_bytes"].is_number() && connection["last_end"].is_null());
    run(&folder, &["drop", "--control", &control]).exits(0);
    // Cutting goes on after the answer; the reason is there once it is done.
    let words = ["top", "--json", "-n", "100", "-d", "0.1", "--control", &control];
    start(&folder, &words).expect("\"reason\":\"ended by this node\"");
}

#[test]
fn a_peer_that_is_away_is_told_of_with_the_reason() {
    let folder = Folder::new();
    let _node = node(&folder, "127.48.13.1");
    let words = ["ping", "-c", "1", "-i", "0.3", "-I", "127.48.13.1", "127.48.13.2"];
    run(&folder, &words).exits(1);
    let done = run(&folder, &["top", "-n", "1"]).exits(0);
    let mut lines = done.out.lines().skip_while(|line| !line.contains("127.48.13.2"));
    assert!(lines.next().expect("a line").contains(" 0/"), "{done:?}");
    assert!(lines.next().expect("its reason").ends_with(" ago: refused"), "{done:?}");
}

#[test]
fn a_node_that_ends_ends_it_with_an_error() {
    let folder = Folder::new();
    let node = node(&folder, "127.48.14.1");
    let mut top = start(&folder, &["top", "-d", "0.1"]);
    top.expect("127.48.14.1");
    drop(node);
    top.finish().exits(1).complains(&["broke off", "look at its output"]);
}

/// Runs a command line in a terminal of its own; `then` is done once the first view is there, with
/// what stands on the terminal and with its keyboard. Returns all that was written.
fn in_terminal(
    folder: &Folder,
    line: &str,
    then: impl FnOnce(&str, &mut ChildStdin),
) -> Option<String> {
    if Command::new("script").arg("--version").stdout(Stdio::null()).status().is_err() {
        skipped::without("script");
        return None;
    }
    let mut terminal = Command::new("timeout")
        .args(["60", "script", "-qec", line, "/dev/null"])
        .env("XDG_RUNTIME_DIR", folder.path())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("script starts");
    let mut out = terminal.stdout.take().expect("output");
    // Open to the end: an end of the input ends the command as well.
    let mut keyboard = terminal.stdin.take().expect("a keyboard");
    let mut then = Some(then);
    let mut text = String::new();
    let mut buf = [0; 4096];
    loop {
        let len = out.read(&mut buf).expect("output");
        if len == 0 {
            break;
        }
        text.push_str(&String::from_utf8_lossy(&buf[..len]));
        if text.contains("SOCKET")
            && let Some(then) = then.take()
        {
            then(&text, &mut keyboard);
        }
    }
    terminal.wait().expect("an end");
    Some(text)
}

const ENTER: &str = "\x1b[?1049h\x1b[?25l";
const LEAVE: &str = "\x1b[?25h\x1b[?1049l";

#[test]
fn keys_end_it_and_the_terminal_is_as_before() {
    let folder = Folder::new();
    let _node = node(&folder, "127.48.15.1");
    let program = env!("CARGO_BIN_EXE_bowline");
    for (words, keys) in
        [("-d 0.1", b"q".as_slice()), ("-d 0.1", b"\x03"), ("-d 0.1 -n 2", b""), ("-d 60", b"xyq")]
    {
        let line = format!("stty -g; {program} top {words}; echo status $?; stty -g");
        let press = |_: &str, keyboard: &mut ChildStdin| keyboard.write_all(keys).expect("keys");
        let Some(text) = in_terminal(&folder, &line, press) else { return };
        let (before, rest) = text.split_once(ENTER).expect("a screen of its own");
        let (_, after) = rest.split_once(LEAVE).expect("the first screen again");
        let after = after.trim().strip_prefix("status 0").expect("no error").trim();
        assert_eq!(before.trim(), after, "{words}");
    }
}

#[test]
fn a_signal_or_a_lost_node_leaves_the_first_screen_too() {
    let folder = Folder::new();
    let mut node = Some(node(&folder, "127.48.16.1"));
    let line = format!("echo pid $$; exec {} top -d 0.1", env!("CARGO_BIN_EXE_bowline"));
    let end = |text: &str, _: &mut ChildStdin| {
        let pid = text.lines().next().and_then(|line| line.strip_prefix("pid "));
        let pid = pid.expect("a process").trim();
        assert!(Command::new("kill").arg(pid).status().expect("kill runs").success());
    };
    let Some(text) = in_terminal(&folder, &line, end) else { return };
    assert!(text.contains(ENTER) && text.trim_end().ends_with(LEAVE), "{text:?}");
    let text = in_terminal(&folder, &line, |_, _| drop(node.take())).expect("a terminal");
    let (_, after) = text.split_once(LEAVE).expect("the first screen again");
    assert!(after.contains("look at its output"), "{text:?}");
}
