//! Programs of C in `tests/c`, built with the installed headers and run with this library.

use std::env;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::process::Command;

use bowline_testkit::skipped;

/// A folder with the library under both of its names and with a program, removed at the end.
struct Folder(PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Builds a program and runs it at an address; the test is reported as skipped where it cannot be
/// built.
fn run(name: &str, addr: &str) {
    let folder = Folder(env::temp_dir().join(format!("bowline-{name}-{}", std::process::id())));
    fs::create_dir(&folder.0).unwrap();
    for name in ["libibverbs.so.1", "librdmacm.so.1"] {
        symlink(env!("CARGO_BIN_EXE_bowline-ibverbs"), folder.0.join(name)).unwrap();
    }
    let source = format!("{}/tests/c/{name}.c", env!("CARGO_MANIFEST_DIR"));
    let program = folder.0.join(name);
    let gcc = Command::new("gcc")
        .args(["-Wall", "-o"])
        .arg(&program)
        .args([&source, "-lrdmacm", "-libverbs"])
        .output();
    let Ok(gcc) = gcc else { return skipped::without("gcc") };
    let said = String::from_utf8_lossy(&gcc.stderr);
    if !gcc.status.success() && (said.contains("No such file") || said.contains("cannot find -l")) {
        return skipped::because("no headers of verbs; install libibverbs-dev and librdmacm-dev");
    }
    assert!(gcc.status.success() && said.is_empty(), "{said}");
    let ran = Command::new(&program)
        .arg(addr)
        .env("LD_LIBRARY_PATH", &folder.0)
        .env("BOWLINE_VERBS_ADDRS", addr)
        .output()
        .unwrap();
    let said = [&ran.stdout[..], &ran.stderr].concat();
    assert!(ran.status.success(), "{}: {}", ran.status, String::from_utf8_lossy(&said));
}

#[test]
fn shared_receive_queues_are_as_the_manual_says() {
    run("shared_receives", "127.81.6.1");
}

#[test]
fn unreliable_connections_send_what_is_posted_in_any_way() {
    run("unreliable", "127.81.6.2");
}

#[test]
fn a_queue_pair_that_has_gone_is_not_looked_at_when_its_id_leaves_a_group() {
    run("groups", "127.81.6.3");
}

#[test]
fn a_device_whose_node_has_gone_is_not_listed() {
    run("no_node", "127.81.6.4");
}

#[test]
fn what_is_changed_after_it_was_made_is_as_the_manual_says() {
    run("again", "127.81.6.5");
}

#[test]
fn a_child_opens_a_device_of_its_own() {
    run("forked", "127.81.6.6");
}

#[test]
fn sockets_over_rdma_are_as_the_manual_says() {
    run("rsocket", "127.81.6.7");
}

/// [RSK-8]
#[test]
fn the_end_of_a_peer_is_an_end_whenever_it_is_noticed() {
    run("rsocket_ends", "127.81.6.10");
}

#[test]
fn a_child_leaves_the_sockets_of_its_parent_alone() {
    run("rsocket_forked", "127.81.6.13");
}

#[test]
fn calls_of_endpoints_that_fail_leave_nobody_waiting() {
    run("endpoints", "127.81.6.14");
}

/// [RSK-2] to [RSK-9]
#[test]
fn peers_of_sockets_that_do_not_follow_the_protocol_cost_their_connection() {
    run("rsocket_hostile", "127.81.6.8");
}
