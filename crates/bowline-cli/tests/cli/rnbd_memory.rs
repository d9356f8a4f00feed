//! Memory of a disk at both ends under the largest load, as the README of `bowline-rnbd-driver`
//! states it.

use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use crate::support::{Folder, Running, run, start};
use bowline_testkit::skipped;

const MIB: u64 = 1 << 20;
/// Depth times chunk size, of the default settings.
const CHUNKS: u64 = 512 * 128 * 1024;
/// Data of requests under way, of an NBD connection, and how many there are: as much as all chunks.
const CONNECTION: u64 = 8 * MIB;
const CONNECTIONS: u64 = CHUNKS / CONNECTION;
/// The stated bound of everything else.
const REST: u64 = 16 * MIB;

/// A line of what the system says of a process's memory, bytes.
fn memory(process: &Running, line: &str) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{}/status", process.id())).expect("it runs");
    let found = text.lines().find_map(|found| found.strip_prefix(line)).expect("there is one");
    let kib = found.trim_start_matches(':').trim().trim_end_matches(" kB");
    kib.parse::<u64>().expect("a number") * 1024
}

/// Copies with `nbdcopy`, as often at a time as there are connections, with as many requests as the
/// front end takes; tells whether there is such a program.
fn copies(from: &str, to: &str) -> bool {
    let words = ["60", "nbdcopy", "--connections=1", "--requests=64", "--request-size=1048576"];
    let copy = |_| {
        let mut nbdcopy = Command::new("timeout");
        nbdcopy.args(words).args([from, to]).stdin(Stdio::null()).stderr(Stdio::piped());
        nbdcopy.spawn().expect("it starts")
    };
    let all: Vec<Child> = (0..CONNECTIONS).map(copy).collect();
    let all = all.into_iter().map(|one| one.wait_with_output().expect("it runs"));
    let all: Vec<Output> = all.collect();
    if all.iter().all(|done| done.status.code() == Some(127)) {
        skipped::without("nbdcopy");
        return false;
    }
    assert!(all.iter().all(|done| done.status.success()), "{all:?}");
    true
}

// tests [RT-66]
#[test]
fn a_disk_takes_no_more_memory_than_its_chunks_and_its_clients() {
    let folder = Folder::new();
    let [store, data, nbd] = ["store", "data", "nbd"].map(|name| folder.path().join(name));
    let size = 32 * MIB;
    std::fs::File::create(&store).and_then(|file| file.set_len(size)).expect("a file");
    std::fs::write(&data, vec![0x5a; size as usize]).expect("a file");
    let [store, data, nbd] = [&store, &data, &nbd].map(|path| path.to_str().expect("a plain path"));

    let export = format!("disk0={store}");
    let words = ["rnbd", "export", "--file", &export, "--buffered", "-I", "127.59.1.1"];
    let mut server = start(&folder, &words);
    server.expect("export disk0 ");
    let path = "127.59.1.11@127.59.1.1";
    let words = ["rnbd", "map", "disk0", "--from", "s1", "--path", path, "--nbd", nbd];
    let mut client = start(&folder, &words);
    client.expect("mapped disk0 ");
    let before = [&server, &client].map(|process| memory(process, "VmRSS"));

    let uri = format!("nbd+unix:///?socket={nbd}");
    if !(copies(data, &uri) && copies(&uri, "null:")) {
        return;
    }
    let peak = [&server, &client].map(|process| memory(process, "VmHWM"));
    let [of_server, of_client] = std::array::from_fn(|at| peak[at] - before[at]);
    println!("server: {of_server} more, client: {of_client} more");
    assert!(of_server > CHUNKS / 2, "{of_server}: the load has used few chunks");
    assert!(of_server <= CHUNKS + REST, "server: {of_server}");
    assert!(of_client <= CONNECTIONS * CONNECTION + REST, "client: {of_client}");
    // Nothing is left of ended connections, nor of many in succession.
    for _ in 0..3 {
        copies(data, &uri);
        let end = Instant::now() + Duration::from_secs(3);
        let now = || memory(&client, "VmRSS").saturating_sub(before[1]);
        while now() > REST {
            assert!(Instant::now() < end, "client: {} left", now());
            std::thread::sleep(Duration::from_millis(20));
        }
    }
    let of_client = memory(&client, "VmHWM") - before[1];
    assert!(of_client <= CONNECTIONS * CONNECTION + REST, "client, at last: {of_client}");
    assert!(
        std::fs::read(store).is_ok_and(|there| there == vec![0x5a; size as usize]),
        "other data"
    );

    run(&folder, &["rnbd", "unmap", "rnbd0"]).exits(0);
    client.finish().exits(0);
    server.signal("-TERM");
    server.finish().exits(0);
}
