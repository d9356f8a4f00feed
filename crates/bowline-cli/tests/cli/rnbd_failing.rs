//! Storage that fails: reported by its server, by its clients and in lists, until it works again.

use std::process::{Command, Stdio};

use bowline_testkit::skipped;

use crate::{
    nbd::{Nbd, TRIM, WRITE},
    support::{Folder, Running, run, start, start_from},
};

const ENOSPC: u32 = 28;

/// Starts a server of a file of 4 MiB on a file system of 1 MiB, in a mount namespace of its own;
/// `None` where that is not possible.
fn on_a_small_file_system(folder: &Folder, address: &str) -> Option<Running> {
    let manners = [&["-m"][..], &["-rm"]];
    let small = folder.path().join("small");
    std::fs::create_dir(&small).expect("a folder");
    let small = small.to_str().expect("a plain path");
    let mount = "mount -t tmpfs -o size=1m none \"$0\"";
    let works = |manner: &&&[&str]| {
        let mut try_out = Command::new("unshare");
        try_out.args(**manner).args(["sh", "-c", mount, small]);
        try_out.stderr(Stdio::null()).status().is_ok_and(|status| status.success())
    };
    let Some(manner) = manners.iter().find(works) else {
        skipped::because("no mount namespaces for this user");
        return None;
    };
    let script = format!("{mount} && truncate -s 4M \"$0/disk0.img\" && exec \"$@\"");
    let file = format!("disk0={small}/disk0.img");
    let program = env!("CARGO_BIN_EXE_bowline");
    let serve = [program, "rnbd", "export", "--file", &file, "-I", address];
    let words = [manner, &["sh", "-c", &script, small][..], &serve].concat();
    let mut server = start_from(Stdio::null(), "unshare", folder, &words);
    server.expect(&format!("listening on {address}:1234"));
    Some(server)
}

#[test]
fn a_full_file_system_is_reported_on_both_sides_until_there_is_room_again() {
    // tests [NB-67]
    let folder = Folder::new();
    let Some(server) = on_a_small_file_system(&folder, "127.60.1.1") else { return };
    let socket = folder.path().join("nbd");
    let place = socket.to_str().expect("a plain path");
    let words = ["rnbd", "map", "disk0", "--from", "s1", "--path", "127.60.1.11@127.60.1.1"];
    let mut client = start(&folder, &[&words[..], &["--nbd", place]].concat());
    client.expect("mapped disk0");
    let mut nbd = Nbd::connect(&socket);
    let list = |side: &str| run(&folder, &["rnbd", side, "list", "csv", "noheaders"]).exits(0).out;
    assert_eq!(list("client"), "\"s1\",\"disk0\",\"rnbd0\",\"open\",\"rw\"\n");

    // One piece of a request: failures are counted by pieces.
    const STEP: u32 = 64 << 10;
    let results: Vec<u32> = (0..32).map(|n| nbd.ask(WRITE, n * u64::from(STEP), STEP)).collect();
    assert!(results[0] == 0 && results[31] == ENOSPC, "{results:?}");
    let failed = results.iter().filter(|errno| **errno == ENOSPC).count();
    server.until_logged("disk0.img): ");
    server.until_logged(
        "the last to write: No space left on device (ENOSPC): its file system is full",
    );
    client.until_logged("rnbd0: storage behind session s1: ");
    client
        .until_logged("the last to write: No space left on device (ENOSPC): the log of the server");
    for side in ["client", "server"] {
        let listed = list(side);
        assert!(listed.contains(&format!(",{failed},\"write ENOSPC 20")), "{listed}");
        assert!(listed.ends_with("Z\",\"failing\"\n"), "{listed}");
    }
    let exports = run(&folder, &["rnbd", "exports"]).exits(0).out;
    assert!(exports.ends_with(&format!(" failing: ENOSPC, {failed} requests\n")), "{exports}");

    assert_eq!(nbd.ask(TRIM, 0, 4 * STEP), 0);
    assert_eq!(nbd.ask(WRITE, 24 * u64::from(STEP), STEP), 0);
    server.until_logged("disk0.img): works again: writes succeed");
    client.until_logged("rnbd0: storage behind session s1: works again: writes succeed");
    for side in ["client", "server"] {
        let listed = list(side);
        assert!(listed.contains(&format!(",{failed},\"write ENOSPC 20")), "{listed}");
        assert!(listed.ends_with("Z\",\"ok\"\n"), "{listed}");
    }
    drop(nbd);
    for part in [client, server] {
        part.signal("-TERM");
        part.finish().exits(0);
    }
}
