//! `rnbd map --run` and `rnbd export --run`: disks for as long as a command.

use std::{thread, time::Duration};

use bowline_testkit::skipped;

use crate::support::{Done, Folder, Running, run, start};

fn export(folder: &Folder, host: u8) -> Running {
    let address = format!("127.71.{host}.1");
    let words = ["rnbd", "export", "--memory", "disk0=1MiB", "-I", &address];
    let mut server = start(folder, &words);
    server.expect("export disk0 bytes=");
    server
}

fn map(host: u8, command: &str) -> Vec<String> {
    let path = format!("127.71.{host}.11@127.71.{host}.1");
    let words = ["rnbd", "map", "disk0", "--from", "s1", "--path", &path, "--run", command];
    words.map(str::to_owned).to_vec()
}

fn start_map(folder: &Folder, host: u8, command: &str, more: &[&str]) -> Running {
    let words = map(host, command);
    let words: Vec<&str> = words.iter().map(String::as_str).chain(more.iter().copied()).collect();
    start(folder, &words)
}

fn run_map(folder: &Folder, host: u8, command: &str) -> Done {
    start_map(folder, host, command, &[]).finish()
}

/// Nothing of the sockets that were made for commands is left.
fn nothing_is_left(folder: &Folder) {
    let left: Vec<_> = std::fs::read_dir(folder.path())
        .expect("a folder")
        .flatten()
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .filter(|name| name.starts_with("bowline-map-"))
        .collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn a_command_has_the_disk_and_its_exit_status_is_that_of_the_map() {
    let folder = Folder::new();
    let _server = export(&folder, 1);
    let done = run_map(&folder, 1, "test -S \"$unixsocket\" && echo \"$uri\"; exit 7").exits(7);
    // Standard output is the command's alone.
    assert!(done.out.starts_with("nbd+unix:///?socket=/"), "{done:?}");
    assert_eq!(done.out.lines().count(), 1, "{done:?}");
    assert!(done.err.contains("mapped disk0 bytes=1048576 at rnbd0, nbd "), "{done:?}");
    nothing_is_left(&folder);
    run_map(&folder, 1, "true").exits(0);
    run_map(&folder, 1, "no-such-program-of-anybody").exits(127);
    run_map(&folder, 1, "/").exits(126);
    run_map(&folder, 1, "kill -KILL $$").exits(128 + 9);
    // The disk is free again.
    let exports = run(&folder, &["rnbd", "exports"]).exits(0).out;
    assert!(exports.contains("open by nobody"), "{exports}");
    nothing_is_left(&folder);
}

#[test]
fn tools_of_nbd_take_the_address() {
    let folder = Folder::new();
    let _server = export(&folder, 2);
    if std::process::Command::new("qemu-io").arg("--version").output().is_err() {
        return skipped::without("qemu-io");
    }
    let command = "qemu-io -f raw -c 'write -P 7 4k 4k' -c 'read -P 7 4k 4k' \"$uri\"";
    let done = run_map(&folder, 2, command).exits(0);
    assert!(done.out.contains("read 4096/4096 bytes at offset 4096"), "{done:?}");
}

#[test]
fn a_disk_at_a_socket_of_the_user_stays_there_and_a_file_is_given_by_its_path() {
    let folder = Folder::new();
    let _server = export(&folder, 3);
    let socket = folder.path().join("a b.sock");
    let socket = socket.to_str().expect("plain");
    let command = "test \"$unixsocket\" = \"$WANTED\" && echo \"$uri\" && test -z \"$dev\"";
    let command = format!("WANTED='{socket}'; {command}");
    let done = start_map(&folder, 3, &command, &["--nbd", socket]).finish().exits(0);
    assert!(done.out.ends_with("/a%20b.sock\n"), "{done:?}");

    let dir = folder.path().join("files");
    let dir = dir.to_str().expect("plain");
    let command = "head -c 512 \"$dev\" | wc -c";
    let done = start_map(&folder, 3, command, &["--fuse", dir]).finish();
    if done.code == Some(1) && done.err.contains("FUSE") {
        return skipped::without_fuse(done.err.trim());
    }
    assert_eq!(done.exits(0).out.trim(), "512");
}

/// Neither the first nor a later signal ends the map while its command has not ended.
#[test]
fn signals_are_passed_on_to_the_command() {
    let folder = Folder::new();
    let _server = export(&folder, 4);
    let command = "n=0; trap 'n=$((n+1)); echo term $n; [ $n = 2 ] && exit 5' TERM; \
                   trap 'echo user' USR1; echo ready; \
                   for turn in $(seq 1000); do sleep 0.02; done";
    let mut client = start_map(&folder, 4, command, &[]);
    client.expect("ready");
    client.signal("-USR1");
    client.expect("user");
    client.signal("-TERM");
    client.expect("term 1");
    // Within half a second it would be the same request to stop.
    thread::sleep(Duration::from_millis(700));
    client.signal("-TERM");
    client.expect("term 2");
    client.finish().exits(5);
    nothing_is_left(&folder);

    let mut client = start_map(&folder, 4, "echo ready; exec sleep 60", &[]);
    client.expect("ready");
    client.signal("-INT");
    client.finish().exits(128 + 2);
}

#[test]
fn a_command_that_needs_no_more_is_not_kept_by_a_server_that_is_gone() {
    let folder = Folder::new();
    let server = export(&folder, 5);
    let go = folder.path().join("go");
    let command =
        format!("echo ready; while [ ! -e '{}' ]; do sleep 0.02; done; exit 3", go.display());
    let more = ["--outage", "600", "--path-dead", "0.5", "--connect-timeout", "1"];
    let mut client = start_map(&folder, 5, &command, &more);
    client.expect("ready");
    drop(server);
    client.until_told(" lost, 0 of 1 connected");
    folder.write("go", "");
    client.finish().exits(3);
}

#[test]
fn a_server_runs_for_as_long_as_a_command() {
    let folder = Folder::new();
    let words = ["rnbd", "export", "--memory", "disk0=1MiB", "-I", "127.71.6.1"];
    let bowline = env!("CARGO_BIN_EXE_bowline");
    let command = format!(
        "echo \"$address $port\"; {bowline} rnbd map disk0 --from s1 --path 127.71.6.11@\"$address\" \
         --run 'echo mapped; exit 9'"
    );
    let done = run(&folder, &[&words[..], &["--run", &command]].concat()).exits(9);
    assert_eq!(done.out, "127.71.6.1 1234\nmapped\n");
    assert!(done.err.contains("listening on 127.71.6.1:1234\n"), "{done:?}");
}

#[test]
fn what_makes_no_sense_with_a_command_is_refused() {
    let folder = Folder::new();
    let words = ["rnbd", "map", "disk0", "--run", "true"];
    run(&folder, &words).exits(2).complains(&["--from"]);
    let words = map(7, "true");
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    for option in ["--stay", "--replace"] {
        run(&folder, &[&words[..], &[option]].concat())
            .exits(2)
            .complains(&["cannot be used with"]);
    }
}

/// Runs a job file of `bench/fio` on a disk; returns its jobs, or `None` where fio lacks something.
fn fio(folder: &Folder, host: u8, file: &str, more: &[&str]) -> Option<Vec<serde_json::Value>> {
    let place = format!("{}/../../bench/fio/{file}", env!("CARGO_MANIFEST_DIR"));
    let command = format!("RUNTIME=1 fio --output-format=json '{place}'");
    let done = start_map(folder, host, &command, more).finish();
    if done.code == Some(127) {
        skipped::without("fio");
        return None;
    }
    if done.err.contains("engine nbd not loadable") || done.err.contains("FUSE") {
        skipped::because(done.err.trim());
        return None;
    }
    let out = done.exits(0).out;
    // Its engine says before that it has connected.
    let begin = out.find('{').expect("an object");
    let object: serde_json::Value = serde_json::from_str(&out[begin..]).expect("JSON");
    Some(object["jobs"].as_array().expect("jobs").clone())
}

#[test]
fn the_job_files_of_fio_run_on_a_disk() {
    let folder = Folder::new();
    let words = ["rnbd", "export", "--memory", "disk0=256MiB", "-I", "127.71.8.1"];
    let mut server = start(&folder, &words);
    server.expect("export disk0 bytes=");
    let dir = folder.path().join("files");
    let fuse = ["--fuse", dir.to_str().expect("plain")];
    for (file, more) in [("nbd.fio", &[][..]), ("file.fio", &fuse), ("verify.fio", &[])] {
        let Some(jobs) = fio(&folder, 8, file, more) else { continue };
        assert_eq!(jobs.len(), if file == "verify.fio" { 1 } else { 6 }, "{file}");
        for job in jobs {
            let ios = ["read", "write"].map(|kind| job[kind]["total_ios"].as_u64().unwrap_or(0));
            let name = &job["jobname"];
            assert!(job["error"] == 0 && ios.iter().sum::<u64>() > 0, "{file}, {name}: {job}");
        }
    }
}
