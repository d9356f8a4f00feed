//! What a service manager sees of the commands that serve: sd_notify(3), sd_listen_fds(3), a user
//! without privileges.

use std::{
    fs,
    os::{
        fd::OwnedFd,
        linux::net::SocketAddrExt,
        unix::net::{SocketAddr, UnixDatagram, UnixListener, UnixStream},
    },
    time::Duration,
};

use crate::disk_clients::{end, export, map};
use crate::nodes::build_library;
use crate::rnbd_successors::Successor;
use crate::support::{Folder, Running, run, start_as, start_from};

const BOWLINE: &str = env!("CARGO_BIN_EXE_bowline");
const DEADLINE: Duration = Duration::from_secs(60);
/// Hands its standard input over as a manager does, and becomes the program of its arguments.
const HAND_OVER: &str = "exec 3<&0 </dev/null; LISTEN_PID=$$ LISTEN_FDS=1 exec \"$@\"";

/// A manager that listens to one service.
struct Manager(UnixDatagram);

impl Manager {
    /// Starts a command that has to show every 300 ms that it is alive.
    fn start(folder: &Folder, words: &[&str]) -> (Self, Running) {
        let place = folder.path().join("notify");
        let socket = UnixDatagram::bind(&place).expect("a socket");
        Self::at(socket, &place.display().to_string(), folder, words)
    }

    fn at(socket: UnixDatagram, place: &str, folder: &Folder, words: &[&str]) -> (Self, Running) {
        socket.set_read_timeout(Some(DEADLINE)).expect("a time limit");
        let notify = format!("NOTIFY_SOCKET={place}");
        let words = [&[&*notify, "WATCHDOG_USEC=300000", BOWLINE], words].concat();
        (Self(socket), start_as("env".as_ref(), folder, &words))
    }

    /// The next message.
    fn hears(&self) -> String {
        let mut text = [0; 4096];
        let len = self.0.recv(&mut text).expect("a message in time");
        String::from_utf8_lossy(&text[..len]).into_owned()
    }

    /// The next message that contains `part`.
    #[track_caller]
    fn hears_of(&self, part: &str) -> String {
        let mut before = Vec::new();
        while before.len() < 1000 {
            let message = self.hears();
            if message.contains(part) {
                return message;
            }
            before.push(message);
        }
        panic!("no {part:?} in {before:?}");
    }
}

#[test]
fn a_node_tells_that_it_serves_lives_and_stops() {
    let folder = Folder::new();
    let (manager, mut node) = Manager::start(&folder, &["node", "--address", "127.146.1.1"]);
    let first = manager.hears();
    assert!(first.starts_with("READY=1\nSTATUS=serving; 0 of 0 peers"), "{first}");
    // What is ready answers, and so does what programs connect to.
    run(&folder, &["info", "-c"]).exits(0);
    UnixStream::connect(folder.path().join("bowline/rds/host.sock")).expect("it serves programs");
    for _ in 0..3 {
        manager.hears_of("WATCHDOG=1");
    }
    run(&folder, &["ping", "-c", "1", "-I", "127.146.1.2", "127.146.1.1"]).exits(0);
    let status = manager.hears_of("STATUS=");
    assert!(status.contains(" of 1 peers connected"), "{status}");
    node.expect("ready");
    node.signal("-TERM");
    let last = manager.hears_of("STOPPING=1");
    assert!(last.contains("EXTEND_TIMEOUT_USEC=15000000"), "5 s to drain and 10 s more: {last}");
    node.finish().exits(0);
}

/// A confined node reaches no abstract name but that of its manager.
#[test]
fn a_manager_may_have_an_abstract_name() {
    let folder = Folder::new();
    let name = format!("bowline-test-manager-{}", std::process::id());
    let address = SocketAddr::from_abstract_name(&name).expect("an address");
    let socket = UnixDatagram::bind_addr(&address).expect("a socket");
    let words = ["node", "--address", "127.146.9.1", "--keep-programs"];
    let (manager, mut node) = Manager::at(socket, &format!("@{name}"), &folder, &words);
    manager.hears_of("READY=1");
    manager.hears_of("WATCHDOG=1");
    node.expect("ready");
    node.signal("-TERM");
    // Descriptors come as well.
    manager.hears_of("FDSTORE=1");
    manager.hears_of("BARRIER=1");
    node.finish();
}

/// A process that is stopped is not dead, and does not say that it lives.
#[test]
fn a_node_that_hangs_is_silent() {
    let folder = Folder::new();
    let (manager, node) = Manager::start(&folder, &["node", "--address", "127.146.2.1"]);
    manager.hears_of("WATCHDOG=1");
    node.signal("-STOP");
    manager.0.set_read_timeout(Some(Duration::from_millis(600))).expect("a time limit");
    // Messages of before may wait still; then there is silence for twice the watchdog's time.
    let silent = (0..100).any(|_| manager.0.recv(&mut [0; 4096]).is_err());
    assert!(silent, "who is stopped says nothing");
    manager.0.set_read_timeout(Some(DEADLINE)).expect("a time limit");
    node.signal("-CONT");
    manager.hears_of("WATCHDOG=1");
    node.signal("-TERM");
    node.finish().exits(0);
}

#[test]
fn disks_are_there_when_their_server_and_their_client_say_so() {
    let (folder, other) = (Folder::new(), Folder::new());
    let words = ["rnbd", "export", "--memory", "d=1MiB", "-I", "127.146.3.1"];
    let (server, mut export) = Manager::start(&folder, &words);
    assert!(server.hears().starts_with("READY=1\n"));
    export.expect("export d");
    let disk = other.path().join("d.nbd");
    let path = "127.146.3.2@127.146.3.1";
    let nbd = disk.to_string_lossy();
    let words = ["rnbd", "map", "d", "--from", "s", "--path", path, "--nbd", &*nbd];
    let (client, map) = Manager::start(&other, &words);
    assert!(client.hears().starts_with("READY=1\n"));
    UnixStream::connect(&disk).expect("the disk is served");
    client.hears_of("WATCHDOG=1");
    export.signal("-HUP");
    let reloading = server.hears_of("RELOADING=1");
    assert!(reloading.contains("MONOTONIC_USEC="), "{reloading}");
    server.hears_of("READY=1");
    map.signal("-TERM");
    client.hears_of("STOPPING=1");
    map.finish().exits(0);
    export.signal("-TERM");
    server.hears_of("STOPPING=1");
    export.finish().exits(0);
}

/// The watchdog of a process that hands over is fed, and the next one becomes the main process.
#[test]
fn a_service_continues_in_the_process_that_replaces_its_own() {
    // tests [NB-70]
    let folder = Folder::new();
    let (server, _) = export(&folder, 26, &[]);
    let place = folder.path().join("nbd.sock");
    let doors = ["--nbd", place.to_str().expect("a plain path")];
    let path = "127.75.26.11@127.75.26.1";
    let words = ["rnbd", "map", "disk0", "--from", "s1", "--path", path];
    let (manager, client) = Manager::start(&folder, &[&words[..], &doors].concat());
    manager.hears_of("READY=1");
    // One that is slow, and is never ready.
    let mut slow = Successor::connect(&folder, &client);
    slow.ask(26, Some(&place), None, Duration::from_secs(60));
    slow.take_all();
    manager.0.set_nonblocking(true).expect("no waiting");
    while manager.0.recv(&mut [0; 4096]).is_ok() {}
    manager.0.set_nonblocking(false).expect("waiting");
    manager.0.set_read_timeout(Some(Duration::from_millis(300))).expect("the watchdog's time");
    for _ in 0..5 {
        assert_eq!(manager.hears(), "WATCHDOG=1");
    }
    drop(slow);
    manager.0.set_read_timeout(Some(DEADLINE)).expect("a time limit");
    manager.hears_of("READY=1");

    // It has no manager in its environment.
    let mut next = map(&folder, 26, &[&doors[..], &["--replace"]].concat());
    next.expect("mapped disk0 ");
    let main = manager.hears_of("MAINPID=");
    assert!(main.starts_with(&format!("MAINPID={}\n", next.id())), "{main}");
    manager.hears_of("BARRIER=1");
    let done = client.finish().exits(0);
    assert!(done.out.contains("handed over\n"), "{done:?}");
    for _ in 0..3 {
        manager.hears_of("WATCHDOG=1");
    }
    next.signal("-TERM");
    manager.hears_of("STOPPING=1");
    next.finish().exits(0);
    end(server);
}

/// A process with a manager of its own leaves the other's service to end.
#[test]
fn a_service_ends_whose_process_is_replaced_by_another_service() {
    // tests [NB-70]
    let (folder, other) = (Folder::new(), Folder::new());
    let (server, _) = export(&folder, 27, &[]);
    let place = folder.path().join("nbd.sock");
    let control = folder.path().join("control.sock");
    let path = "127.75.27.11@127.75.27.1";
    let words = ["rnbd", "--control", control.to_str().expect("a plain path"), "map", "disk0"];
    let more = ["--from", "s1", "--path", path, "--nbd", place.to_str().expect("a plain path")];
    let words = [&words[..], &more].concat();
    let (manager, client) = Manager::start(&folder, &words);
    manager.hears_of("READY=1");
    let (its_own, next) = Manager::start(&other, &[&words[..], &["--replace"]].concat());
    its_own.hears_of("READY=1");
    let last = manager.hears_of("STOPPING=1");
    assert!(!last.contains("MAINPID"), "{last}");
    client.finish().exits(0);
    its_own.hears_of("WATCHDOG=1");
    next.signal("-TERM");
    next.finish().exits(0);
    end(server);
}

#[test]
fn a_node_is_ready_when_its_disks_are_there() {
    let folder = Folder::new();
    let nbd = folder.path().join("d.nbd");
    let text = format!(
        "address = [\"127.146.7.1\"]\n[[export]]\nname = \"d\"\nmemory = \"1MiB\"\n[[map]]\ndevice = \"d\"\n\
         from = \"s\"\npath = [\"127.146.7.1@127.146.7.1\"]\nnbd = \"{}\"\n",
        nbd.display()
    );
    let file = folder.write("node.toml", &text);
    let words = ["node", "--config", &file.to_string_lossy()];
    let (manager, node) = Manager::start(&folder, &words);
    let ready = manager.hears();
    assert!(ready.starts_with("READY=1\n"), "{ready}");
    assert!(ready.ends_with(", 1 of 1 disks mapped, 1 exported"), "{ready}");
    UnixStream::connect(&nbd).expect("the disk is served");
    node.signal("-HUP");
    manager.hears_of("RELOADING=1");
    manager.hears_of("READY=1");
    node.signal("-TERM");
    let last = manager.hears_of("STOPPING=1");
    assert!(last.contains("EXTEND_TIMEOUT_USEC=32000000"), "as above, and 17 s for disks: {last}");
    node.finish().exits(0);
}

#[test]
fn a_node_serves_the_socket_that_it_is_handed() {
    let folder = Folder::new();
    let place = folder.path().join("handed.sock");
    let listener = UnixListener::bind(&place).expect("a socket");
    let handed = || OwnedFd::from(listener.try_clone().expect("a copy"));
    let words = ["-c", HAND_OVER, "sh", BOWLINE, "node", "--address", "127.146.4.1"];
    // Who connects before it runs is served when it does.
    let early = UnixStream::connect(&place).expect("the manager listens");
    let mut node = start_from(handed(), "sh", &folder, &words);
    node.expect(&format!("are served at {}", place.display()));
    node.expect("ready");
    drop(early);
    let usual = folder.path().join("bowline/rds/host.sock");
    assert!(!usual.exists(), "the socket of the manager stands for its own");
    node.signal("-TERM");
    node.finish().exits(0);
    assert!(place.exists(), "the manager's file is not the node's to remove");
    // The next one that connects finds the manager, which starts a node again.
    let late = UnixStream::connect(&place).expect("the manager listens");
    let mut again = start_from(handed(), "sh", &folder, &words);
    again.expect("ready");
    drop(late);
}

/// Programs' sockets are in the manager's store while the node is away.
#[test]
fn programs_notice_nothing_of_a_restart_by_the_manager() {
    build_library();
    let folder = Folder::new();
    let tests = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/cli");
    let [manager, program] = ["manager.py", "kept.py"].map(|name| format!("{tests}/{name}"));
    let place = folder.path().join("handed.sock");
    let (at, place) = (folder.path().to_str().unwrap(), place.to_str().unwrap());
    let node = [BOWLINE, "node", "--address", "127.146.7.1", "--keep-programs", "--no-control"];
    let run = [BOWLINE, "run", "--node", place, "--", "python3", "-B", &program, at, "127.146.7.1"];
    let words = [&["-B", &manager, at][..], &node, &["--"], &run].concat();
    let done = start_as("python3".as_ref(), &folder, &words).finish().exits(0);
    assert!(done.out.contains("all kept"), "{}", done.out);
}

#[test]
fn what_is_no_socket_to_listen_at_is_refused() {
    let folder = Folder::new();
    let words = ["-c", HAND_OVER, "sh", BOWLINE, "node", "--address", "127.146.5.1"];
    let file = fs::File::open("/dev/null").expect("/dev/null");
    let done = start_from(file, "sh", &folder, &words).finish().exits(1);
    done.complains(&["cannot use the socket that the service manager passed"]);
    let (end, _other) = UnixStream::pair().expect("a pair");
    let done = start_from(OwnedFd::from(end), "sh", &folder, &words).finish().exits(1);
    done.complains(&["it is not a listening unix socket"]);
    // Descriptors of another process are none of its business.
    let words = ["LISTEN_PID=1", "LISTEN_FDS=1", BOWLINE, "node", "--address", "127.146.5.1"];
    let mut node = start_as("env".as_ref(), &folder, &words);
    node.expect("ready");
}

/// Port 16385 is above 1024, so a node needs no privilege and no capability.
#[test]
fn a_node_runs_without_privileges() {
    if !rustix::process::geteuid().is_root() {
        return bowline_testkit::skipped::because("only root can become another user");
    }
    let folder = Folder::new();
    rustix::fs::chown(folder.path(), Some(rustix::fs::Uid::from_raw(65_534)), None).expect("chown");
    let user = ["--reuid", "nobody", "--clear-groups", "--inh-caps=-all", "--bounding-set=-all"];
    let words = [&user[..], &["--no-new-privs", BOWLINE, "node", "--address", "127.146.6.1"]];
    let mut node = start_as("setpriv".as_ref(), &folder, &words.concat());
    node.expect("ready");
    run(&folder, &["ping", "-c", "1", "-I", "127.146.6.2", "127.146.6.1"]).exits(0);
    node.signal("-TERM");
    node.finish().exits(0);
}
