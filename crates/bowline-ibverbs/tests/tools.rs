//! Programs of Debian that speak verbs, as they are: a pair of each, at two addresses of this
//! machine, or at one that they share.

use std::env;
use std::fs;
use std::io::Read;
use std::net::IpAddr;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use bowline_roce_driver::{FormerConnections, Host, SoftConfig};
use bowline_testkit::skipped;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, listen, socket_with,
};

/// Longest run of a tool, on the slowest machine.
const PATIENCE: Duration = Duration::from_secs(60);
/// How long a client may fail because its server does not listen yet.
const STARTING: Duration = Duration::from_secs(20);
const PAUSE: Duration = Duration::from_millis(100);

/// A folder with the library under the names that programs ask for, removed at the end; and
/// variables of the programs.
struct Names(PathBuf, Vec<(&'static str, String)>);

impl Drop for Names {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn names(of: &str) -> Names {
    let folder = env::temp_dir().join(format!("bowline-verbs-{of}-{}", std::process::id()));
    fs::create_dir(&folder).unwrap();
    for name in ["libibverbs.so.1", "librdmacm.so.1", "libmlx5.so.1", "libefa.so.1"] {
        symlink(env!("CARGO_BIN_EXE_bowline-ibverbs"), folder.join(name)).unwrap();
    }
    Names(folder, Vec::new())
}

/// Where a device of a tool is: alone at an address, or among those of a host.
#[derive(Clone, Copy)]
enum At<'a> {
    Addr(&'a str),
    Node(&'a Path),
}

struct Tool(Child);

impl Drop for Tool {
    fn drop(&mut self) {
        // One that has ended needs no end.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn start(names: &Names, at: At<'_>, words: &[&str]) -> Tool {
    let mut command = Command::new(words[0]);
    command.args(&words[1..]).env("LD_LIBRARY_PATH", &names.0).stdin(Stdio::null());
    match at {
        At::Addr(addr) => command.env("BOWLINE_VERBS_ADDRS", addr),
        At::Node(path) => command.env("BOWLINE_VERBS_NODE", path),
    };
    command.envs(names.1.iter().map(|(name, value)| (name, value)));
    Tool(command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap())
}

/// Waits for the end; returns whether it was a success, and what was said.
fn end(mut tool: Tool) -> (bool, String) {
    let mut said = [tool.0.stdout.take().map(|out| Box::new(out) as Box<dyn Read + Send>), None];
    said[1] = tool.0.stderr.take().map(|err| Box::new(err) as Box<dyn Read + Send>);
    let readers = said.map(|stream| {
        thread::spawn(move || {
            let mut text = String::new();
            // What is no text is not looked for.
            let _ = stream.map(|mut stream| stream.read_to_string(&mut text));
            text
        })
    });
    let begun = Instant::now();
    let status = loop {
        if let Some(status) = tool.0.try_wait().unwrap() {
            break Some(status);
        }
        if begun.elapsed() > PATIENCE {
            let _ = tool.0.kill();
            break None;
        }
        thread::sleep(PAUSE);
    };
    let text = readers.map(|reader| reader.join().unwrap()).concat();
    (status.is_some_and(|status| status.success()), text)
}

/// Runs a pair that must succeed. A client that comes before its server listens comes again.
fn pair(
    names: &Names,
    [server_at, client_at]: [At<'_>; 2],
    server: &[&str],
    client: &[&str],
) -> String {
    let begun = Instant::now();
    let mut serves = start(names, server_at, server);
    thread::sleep(PAUSE);
    loop {
        let (is_good, said) = end(start(names, client_at, client));
        let is_over = serves.0.try_wait().unwrap().is_some();
        if is_good || is_over || begun.elapsed() > STARTING {
            let (served, server_said) = end(serves);
            assert!(is_good && served, "{client:?}: {said}\n{server:?}: {server_said}");
            return said + &server_said;
        }
        thread::sleep(PAUSE);
    }
}

/// Runs a client until it succeeds: its server may not listen yet.
fn until_good(run: impl Fn() -> (bool, String)) {
    let begun = Instant::now();
    while let (false, said) = run() {
        assert!(begun.elapsed() < STARTING, "{said}");
        thread::sleep(PAUSE);
    }
}

fn is_there(tool: &str, package: &str) -> bool {
    let is_there =
        Command::new(tool).arg("-h").stdout(Stdio::null()).stderr(Stdio::null()).status();
    if is_there.is_err() {
        skipped::because(format!("no {tool}; install {package}"));
    }
    is_there.is_ok()
}

/// The words of a tool that needs its own TCP port, and the client's with the server's address.
fn with_port(words: &str, port: u16, server: &str) -> [Vec<String>; 2] {
    let all: Vec<String> = words.split(' ').map(str::to_owned).collect();
    let port = ["-p".to_owned(), port.to_string()];
    let serves = [&all[..], &port].concat();
    let asks = [&serves[..], &[server.to_owned()]].concat();
    [serves, asks]
}

fn run_all(names: &Names, at: [At<'_>; 2], server: &str, tools: &[&str], first_port: u16) {
    for (words, port) in tools.iter().zip(first_port..) {
        let both = with_port(words, port, server);
        let [serves, asks] =
            both.each_ref().map(|words| words.iter().map(String::as_str).collect::<Vec<_>>());
        pair(names, at, &serves, &asks);
    }
}

const PINGPONG: [&str; 11] = [
    "ibv_rc_pingpong -g 0 -n 100",
    "ibv_rc_pingpong -g 0 -n 100 -e",
    "ibv_rc_pingpong -g 0 -n 100 -N",
    "ibv_rc_pingpong -g 0 -n 100 -t",
    "ibv_rc_pingpong -g 0 -n 100 -c",
    "ibv_ud_pingpong -g 0 -n 100 -s 512",
    "ibv_ud_pingpong -g 0 -n 100 -e -s 512",
    "ibv_uc_pingpong -g 0 -n 100",
    "ibv_uc_pingpong -g 0 -n 100 -e",
    "ibv_srq_pingpong -g 0 -n 100",
    "ibv_srq_pingpong -g 0 -n 100 -e",
];
const PERFTEST: [&str; 15] = [
    "ib_write_bw -x 0 -n 100",
    "ib_send_bw -x 0 -n 100 -e",
    "ib_read_bw -x 0 -n 100",
    "ib_atomic_bw -x 0 -n 100",
    "ib_write_lat -x 0 -n 100",
    "ib_send_lat -x 0 -n 100",
    "ib_send_bw -c UD -x 0 -n 100 -s 512",
    "ib_send_bw -c UC -x 0 -n 100 -s 4096",
    "ib_write_bw -c UC -x 0 -n 100",
    "ib_send_lat -c UC -x 0 -n 100",
    "ib_write_lat -c UC -x 0 -n 100",
    "ib_send_bw -x 0 -n 100 -q 3 --use-srq",
    "ib_send_lat -x 0 -n 100 --use-srq",
    "ib_write_bw -x 0 -n 100 -q 3 -b",
    "ib_write_bw -R -n 100",
];

#[test]
fn a_device_is_shown_with_its_addresses() {
    if !is_there("ibv_devinfo", "ibverbs-utils") {
        return;
    }
    let names = names("devinfo");
    let (is_good, said) = end(start(&names, At::Addr("127.81.0.1"), &["ibv_devinfo", "-v"]));
    assert!(is_good, "{said}");
    for wanted in ["hca_id:\tbowline0", "PORT_ACTIVE", "::ffff:127.81.0.1, RoCE v2"] {
        assert!(said.contains(wanted), "{wanted}: {said}");
    }
}

#[test]
fn pingpong_rdma_core_tests_passes() {
    if is_there("ibv_rc_pingpong", "ibverbs-utils") {
        let names = names("pingpong");
        let at = [At::Addr("127.81.1.1"), At::Addr("127.81.1.2")];
        run_all(&names, at, "127.81.1.1", &PINGPONG, 18600);
    }
}

#[test]
fn perftest_passes() {
    if is_there("ib_write_bw", "perftest") {
        let names = names("perftest");
        let at = [At::Addr("127.81.2.1"), At::Addr("127.81.2.2")];
        run_all(&names, at, "127.81.2.1", &PERFTEST, 18620);
    }
}

#[test]
fn connections_of_rdmacm_utils_pass() {
    if !is_there("rping", "rdmacm-utils") {
        return;
    }
    let names = names("rdmacm");
    let at = [At::Addr("127.81.3.1"), At::Addr("127.81.3.2")];
    let to = "127.81.3.1";
    let run = |server: &str, client: &str| {
        let [server, client] = [server, client].map(|words| words.split(' ').collect::<Vec<_>>());
        pair(&names, at, &server, &client)
    };
    let said = run(&format!("rping -s -a {to} -C 5 -v"), &format!("rping -c -a {to} -C 5 -v"));
    assert_eq!(said.matches("ping data: rdma-ping-").count(), 10, "{said}");
    run(
        &format!("ucmatose -b {to} -c 3 -C 4 -S 5000"),
        &format!("ucmatose -s {to} -c 3 -C 4 -S 5000"),
    );
    // Ids move to another channel for their end.
    run(&format!("ucmatose -b {to} -m -a 14"), &format!("ucmatose -s {to} -m -a 14"));
    run(&format!("rdma_server -s {to}"), &format!("rdma_client -s {to}"));
    run("rdma_xserver -c r", &format!("rdma_xclient -s {to} -c r"));
    // The programs lead their queue pairs themselves.
    let said =
        run(&format!("rping -s -a {to} -C 5 -v -q"), &format!("rping -c -a {to} -C 5 -v -q"));
    assert_eq!(said.matches("ping data: rdma-ping-").count(), 10, "{said}");
    run(&format!("rping -s -a {to} -C 5 -q"), &format!("rping -c -a {to} -C 5"));
    run(&format!("rping -s -a {to} -C 5"), &format!("rping -c -a {to} -C 5 -q"));
    // The server of this one serves for ever.
    let _server = start(&names, at[0], &["cmtime", "-b", to]);
    until_good(|| end(start(&names, at[1], &["cmtime", "-s", to, "-c", "20"])));
}

/// A host for processes that share one address.
fn hosted(addr: IpAddr, path: &Path, folder: &Path) {
    let kind = SocketType::SEQPACKET;
    let listener = socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).unwrap();
    bind(&listener, &SocketAddrUnix::new(path).unwrap()).unwrap();
    listen(&listener, 8).unwrap();
    let former_connections = FormerConnections::In(folder.to_owned());
    let config = SoftConfig { addrs: vec![addr], former_connections, ..SoftConfig::default() };
    let (host, device) = Host::open(config).unwrap();
    thread::spawn(move || {
        let _device = device;
        while let Ok(guest) = accept_with(&listener, SocketFlags::CLOEXEC) {
            let host = host.clone();
            thread::spawn(move || match Host::answer_look(&guest, || Some(host.clone())) {
                // What a guest does wrong, it sees itself.
                Ok(false) => host.serve(guest),
                answered => answered.map(drop),
            });
        }
    });
}

#[test]
fn processes_share_an_address() {
    if !is_there("ibv_rc_pingpong", "ibverbs-utils") || !is_there("rping", "rdmacm-utils") {
        return;
    }
    let names = names("shared");
    let path = names.0.join("node.sock");
    hosted([127, 81, 4, 1].into(), &path, &names.0);
    let at = [At::Node(&path); 2];
    let to = "127.81.4.1";
    run_all(&names, at, to, &PINGPONG[..2], 18660);
    let words = format!("rping -a {to} -C 5 -v");
    let both = ["-s", "-c"].map(|side| format!("{words} {side}"));
    let [server, client] = both.each_ref().map(|words| words.split(' ').collect::<Vec<_>>());
    pair(&names, at, &server, &client);
    if is_there("ib_write_bw", "perftest") {
        run_all(&names, at, to, &["ib_write_bw -x 0 -n 100", "ib_write_bw -R -n 100"], 18670);
    }
}

#[test]
fn a_bad_network_is_survived_and_written_down() {
    if !is_there("ib_write_bw", "perftest") || !is_there("ibv_devinfo", "ibverbs-utils") {
        return;
    }
    let mut names = names("bad");
    let capture = names.0.join("packets.pcapng").display().to_string();
    let bad = "loss=3%,duplicate=2%,corrupt=2%,reorder=2%,delay=100us±100us";
    names.1 = vec![
        ("BOWLINE_VERBS_CAPTURE", capture),
        ("BOWLINE_VERBS_IMPAIR", bad.to_owned()),
        ("BOWLINE_VERBS_SEED", "7".to_owned()),
    ];
    let at = [At::Addr("127.81.9.1"), At::Addr("127.81.9.2")];
    // Not a pingpong: a side that has got its last message ends, and nobody repeats what
    // acknowledged it.
    run_all(&names, at, "127.81.9.1", &["ib_write_bw -x 0 -n 300 -s 4096"], 18690);
    // Of two processes, one has the file, and the other one beside it.
    let files: Vec<_> = fs::read_dir(&names.0).unwrap().map(|file| file.unwrap().path()).collect();
    let is_capture = |file: &&PathBuf| file.to_string_lossy().contains("packets.pcapng");
    let sizes: Vec<u64> =
        files.iter().filter(is_capture).map(|file| file.metadata().unwrap().len()).collect();
    assert!(
        sizes.len() >= 2 && sizes.iter().filter(|size| **size > 300 * 1024).count() == 2,
        "{sizes:?}"
    );

    names.1 = vec![("BOWLINE_VERBS_IMPAIR", "loss=2".to_owned())];
    let (is_good, said) = end(start(&names, at[0], &["ibv_devinfo"]));
    assert!(!is_good && said.contains("loss=2: a share from 0% to 100% is wanted"), "{said}");
}

#[test]
fn datagrams_of_rdmacm_utils_pass() {
    if !is_there("rping", "rdmacm-utils") {
        return;
    }
    let names = names("datagrams");
    let run = |at: [At<'_>; 2], to: &str| {
        let [server, client] = ["-b", "-s"].map(|way| ["udaddy", way, to, "-c", "3"]);
        pair(&names, at, &server, &client);
    };
    run([At::Addr("127.81.5.1"), At::Addr("127.81.5.2")], "127.81.5.1");
    // Two processes of one address, and one of another.
    let path = names.0.join("node.sock");
    hosted([127, 81, 5, 3].into(), &path, &names.0);
    run([At::Node(&path); 2], "127.81.5.3");
    run([At::Node(&path), At::Addr("127.81.5.4")], "127.81.5.3");
}

#[test]
fn multicast_of_rdmacm_utils_passes() {
    if !is_there("rping", "rdmacm-utils") {
        return;
    }
    let names = names("multicast");
    // The sender sends once, and waits for nobody: it sends until the receiver has enough.
    let heard = |group: &str, receiver: At<'_>, at: &str, sender: At<'_>, from: &str| {
        let mut hears = start(&names, receiver, &["mckey", "-m", group, "-b", at]);
        let begun = Instant::now();
        while hears.0.try_wait().unwrap().is_none() {
            assert!(begun.elapsed() < STARTING, "nothing is heard");
            let words = ["mckey", "-m", group, "-b", from, "-s", "-o"];
            let (is_good, said) = end(start(&names, sender, &words));
            assert!(is_good, "{said}");
            thread::sleep(PAUSE);
        }
        let (is_good, said) = end(hears);
        assert!(is_good, "{said}");
    };
    let (to, from) = ("127.81.6.1", "127.81.6.2");
    heard("239.81.6.1", At::Addr(to), to, At::Addr(from), from);
    // Processes of one address, and of another.
    let path = names.0.join("node.sock");
    let shared = "127.81.6.3";
    hosted(shared.parse().unwrap(), &path, &names.0);
    let node = At::Node(&path);
    heard("239.81.6.2", node, shared, node, shared);
    heard("239.81.6.2", node, shared, At::Addr(from), from);
}

/// rdma-core's own tests, which Debian has beside its package of pyverbs.
#[test]
fn tests_rdma_core_tests_pass() {
    const TESTS: &str = "/usr/share/doc/rdma-core/tests";
    if !Path::new(TESTS).join("base.py.gz").is_file() {
        return skipped::because(format!("no {TESTS}; install python3-pyverbs with its documents"));
    }
    let names = names("pyverbs");
    let copied = Command::new("cp").args(["-r", TESTS]).arg(&names.0).status().unwrap();
    let tests = names.0.join("tests");
    let unpacked = Command::new("gunzip").arg("-r").arg(&tests).status().unwrap();
    assert!(copied.success() && unpacked.success());
    // Some of them are two processes.
    let (path, addr) = (names.0.join("node.sock"), "127.81.14.1");
    hosted(addr.parse().unwrap(), &path, &names.0);
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/rdma_core_tests.py");
    // Debian's modules are for Debian's Python.
    let words = ["/usr/bin/python3", script, tests.to_str().unwrap(), addr];
    let (is_good, said) = end(start(&names, At::Node(&path), &words));
    assert!(is_good, "{said}");
}

/// [RSK-1] to [RSK-10]: with rdma-core at the other end, interop.
#[test]
fn sockets_of_rdmacm_utils_pass() {
    if !is_there("rping", "rdmacm-utils") {
        return;
    }
    let names = names("sockets");
    let at = [At::Addr("127.81.7.1"), At::Addr("127.81.7.2")];
    let to = "127.81.7.1";
    let run = |at: [At<'_>; 2], to: &str, words: &str| {
        let both = ["-b", "-s"].map(|side| format!("{words} {side} {to}"));
        let [server, client] = both.each_ref().map(|words| words.split(' ').collect::<Vec<_>>());
        pair(&names, at, &server, &client);
    };
    for way in ["b", "n", "a", "v"] {
        run(at, to, &format!("rstream -C 20 -I 3 -S 3000 -T {way}"));
        run(at, to, &format!("riostream -C 20 -I 3 -S 3000 -T {way}"));
    }
    // More than all buffers at once, and a queue of messages that is used several times over.
    run(at, to, "rstream -C 2 -I 2 -S 700000 -T v");
    run(at, to, "rstream -C 2000 -I 2 -S 1 -T v");
    run(at, to, "rstream -C 20 -I 3 -S 3000 -B 4096 -T r");
    // Two processes of one address.
    let path = names.0.join("node.sock");
    hosted([127, 81, 7, 3].into(), &path, &names.0);
    run([At::Node(&path); 2], "127.81.7.3", "rstream -C 20 -I 3 -S 3000 -T v");
}

#[test]
fn a_file_is_copied_by_rcopy_of_rdmacm_utils() {
    if !is_there("rping", "rdmacm-utils") {
        return;
    }
    let names = names("rcopy");
    let bytes: Vec<u8> = (0..500_003_u32).map(|n| (n % 253) as u8).collect();
    let [from, to] = ["from", "to"].map(|name| names.0.join(name));
    fs::write(&from, &bytes).unwrap();
    // The server of this one serves for ever.
    let _server = start(&names, At::Addr("127.81.8.1"), &["rcopy"]);
    let destination = format!("127.81.8.1:{}", to.display());
    let words = ["rcopy", from.to_str().unwrap(), &destination];
    until_good(|| end(start(&names, At::Addr("127.81.8.2"), &words)));
    assert!(fs::read(&to).unwrap() == bytes);
}

/// [RSK-14]
#[test]
fn datagram_sockets_of_rdmacm_utils_pass() {
    if !is_there("rping", "rdmacm-utils") {
        return;
    }
    let names = names("udpong");
    let run = |at: [At<'_>; 2], to: &str, way: &str| {
        // The server of this one serves for ever.
        let _server = start(&names, at[0], &["udpong", "-b", to, "-T", way]);
        let words = ["udpong", "-s", to, "-C", "50", "-S", "600", "-T", way];
        until_good(|| end(start(&names, at[1], &words)));
    };
    for way in ["b", "n", "a", "e"] {
        run([At::Addr("127.81.10.1"), At::Addr("127.81.10.2")], "127.81.10.1", way);
    }
    let path = names.0.join("node.sock");
    hosted([127, 81, 10, 3].into(), &path, &names.0);
    run([At::Node(&path); 2], "127.81.10.3", "b");
}
