//! Nodes in network namespaces of their own: IPv6, all addresses of a machine, a machine that is
//! switched off. Needs root and iproute2; without them each test says that it is skipped.

use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, ToSocketAddrs};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use bowline::rds::{Node, Socket};

mod common;
use bowline_testkit::skipped;
use common::LIMIT;

const PORT: u16 = 4000;

fn ip(args: &str) -> bool {
    let status = Command::new("ip").args(args.split(' ')).stderr(Stdio::null()).status();
    status.is_ok_and(|status| status.success())
}

/// Two namespaces joined by a virtual cable. `a` has 10.9.0.1, fd00:9::1 and fe80::9:1, `b` the
/// same with 2.
struct Cable {
    name: String,
}

impl Drop for Cable {
    fn drop(&mut self) {
        for end in ["a", "b"] {
            ip(&format!("netns del {}", self.namespace(end)));
        }
    }
}

impl Cable {
    /// `None`, and a line that says so, where namespaces cannot be made.
    fn lay(test: &str) -> Option<Self> {
        let cable = Self { name: format!("bl{}{test}", std::process::id() % 100_000) };
        if !ip(&format!("netns add {}", cable.namespace("a"))) {
            skipped::because("no network namespaces (needs root and iproute2)");
            return None;
        }
        assert!(ip(&format!("netns add {}", cable.namespace("b"))));
        cable.join();
        Some(cable)
    }

    fn namespace(&self, end: &str) -> String {
        format!("{}{end}", self.name)
    }

    fn join(&self) {
        let [a, b] = ["a", "b"].map(|end| self.namespace(end));
        // Names of the ends are local to the namespaces.
        assert!(ip(&format!("-n {a} link add cable type veth peer name cable netns {b}")));
        for (space, n) in [(a, 1), (b, 2)] {
            assert!(ip(&format!("-n {space} addr add 10.9.0.{n}/24 dev cable")));
            assert!(ip(&format!("-n {space} addr add fd00:9::{n}/64 dev cable nodad")));
            assert!(ip(&format!("-n {space} addr add fe80::9:{n}/64 dev cable nodad")));
            assert!(ip(&format!("-n {space} link set lo up")));
            assert!(ip(&format!("-n {space} link set cable up")));
        }
    }

    /// Cuts the power of `a`: no connection is closed. Then an empty machine takes its place.
    fn power_cycle_a(&self, off: Duration, process: Process) {
        let a = self.namespace("a");
        assert!(ip(&format!("-n {a} link set cable down")));
        drop(process);
        assert!(ip(&format!("netns del {a}")));
        // The remains of its connections keep the namespace alive, but not the cable.
        assert!(ip(&format!("-n {} link del cable", self.namespace("b"))));
        assert!(ip(&format!("netns add {a}")));
        self.join();
        // Until it is up, it answers nothing, not even with a reset.
        assert!(ip(&format!("-n {a} route add blackhole 10.9.0.2/32")));
        std::thread::sleep(off);
        assert!(ip(&format!("-n {a} route del blackhole 10.9.0.2/32")));
    }

    /// Starts this program again in a namespace, as the process `child`.
    fn start(&self, end: &str, settings: &str) -> Process {
        let space = self.namespace(end);
        let mut child = Command::new("ip")
            .args(["netns", "exec", &space])
            .arg(std::env::current_exe().unwrap())
            .args(["--exact", "child", "--ignored", "--nocapture"])
            .env("BOWLINE_TEST", settings)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (tell, lines) = mpsc::channel();
        let output = BufReader::new(child.stdout.take().unwrap());
        std::thread::spawn(move || output.lines().try_for_each(|line| tell.send(line.unwrap())));
        let mut process = Process { commands: child.stdin.take().unwrap(), child, lines };
        process.expect("ready");
        process
    }
}

/// A node with one socket in another process; killed when dropped.
struct Process {
    child: Child,
    commands: ChildStdin,
    lines: mpsc::Receiver<String>,
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Process {
    fn send(&mut self, text: &str, to: &str) {
        writeln!(self.commands, "{text} {to}").unwrap();
    }

    /// Waits for a line; the test harness prints some of its own.
    fn expect(&mut self, text: &str) {
        let end = Instant::now() + LIMIT;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let line = self.lines.recv_timeout(left);
            match line {
                Ok(line) if line.ends_with(text) => return,
                Ok(_) => {}
                Err(error) => panic!("the process did not say {text:?}: {error}"),
            }
        }
    }
}

#[test]
#[ignore = "not a test: the process that the tests of this file start"]
fn child() {
    let settings = std::env::var("BOWLINE_TEST").unwrap();
    let mut settings = settings.split(' ');
    let bind = place(settings.next().unwrap());
    let mut builder = Node::builder();
    for setting in settings {
        builder = match setting {
            // As a kernel is: no greeting, one restart looks like any other connection.
            "plain" => builder.end_to_end(false),
            address => match place(address) {
                SocketAddr::V6(at) if at.scope_id() != 0 => {
                    builder.address_on(*at.ip(), at.scope_id())
                }
                at => builder.address(at.ip()),
            },
        };
    }
    let node = builder.build().unwrap();
    let socket = node.bind(bind).unwrap();
    std::thread::scope(|s| {
        s.spawn(|| print_all(&socket));
        println!("ready");
        for line in std::io::stdin().lines() {
            let line = line.unwrap();
            let (text, to) = line.split_once(' ').unwrap();
            socket.send_to(text.as_bytes(), place(to)).unwrap();
        }
        // The test is over.
        std::process::exit(0);
    });
}

/// The port of this file's sockets at an address, which may have a scope behind it: fe80::1%cable.
fn place(text: &str) -> SocketAddr {
    (text, PORT).to_socket_addrs().unwrap().next().unwrap()
}

fn print_all(socket: &Socket) {
    loop {
        let message = socket.recv_message().unwrap();
        let text = String::from_utf8(message.to_vec()).unwrap();
        println!("{} says {text}", message.source().ip());
    }
}

fn talk(a: &mut Process, a_addr: &str, b: &mut Process, b_addr: &str) {
    a.send("hello", b_addr);
    b.expect(&format!("{a_addr} says hello"));
    b.send("welcome", a_addr);
    a.expect(&format!("{b_addr} says welcome"));
}

#[test]
fn nodes_talk_over_ipv6() {
    let Some(cable) = Cable::lay("six") else { return };
    let mut a = cable.start("a", "fd00:9::1 fd00:9::1");
    let mut b = cable.start("b", "fd00:9::2 fd00:9::2");
    talk(&mut a, "fd00:9::1", &mut b, "fd00:9::2");
    // The larger address connects first, to a new peer.
    drop(a);
    let mut a = cable.start("a", "fd00:9::1 fd00:9::1");
    b.send("again", "fd00:9::1");
    a.expect("fd00:9::2 says again");
}

// tests
#[test]
fn link_local_nodes_talk_with_a_scope_said_once() {
    let Some(cable) = Cable::lay("link") else { return };
    for (a_settings, b_settings, to_a, to_b) in [
        ("fe80::9:1 fe80::9:1%cable", "fe80::9:2 fe80::9:2%cable", "fe80::9:1", "fe80::9:2"),
        // Nodes of all addresses know none by its scope before a socket is bound to it.
        ("fe80::9:1%cable", "fe80::9:2%cable", "fe80::9:1%cable", "fe80::9:2"),
        // One address of the two is enough to say the link.
        ("fd00:9::1 fd00:9::1", "fe80::9:2 fe80::9:2%cable", "fd00:9::1", "fe80::9:2%cable"),
        ("fe80::9:1 fe80::9:1%cable", "fd00:9::2 fd00:9::2", "fe80::9:1%cable", "fd00:9::2"),
    ] {
        let mut a = cable.start("a", a_settings);
        let mut b = cable.start("b", b_settings);
        let of = |to: &str| to.split('%').next().unwrap().to_owned();
        a.send("hello", to_b);
        b.expect(&format!("{} says hello", of(to_a)));
        b.send("welcome", to_a);
        a.expect(&format!("{} says welcome", of(to_b)));
    }
}

#[test]
fn nodes_of_all_addresses_talk_over_both_families() {
    for (family, test, wanted) in [("6", "any", true), ("4", "four", false)] {
        let Some(cable) = Cable::lay(test) else { return };
        if !wanted {
            // Without IPv6 a node of all addresses listens on those of IPv4.
            for end in ["a", "b"] {
                let space = cable.namespace(end);
                let off = "sysctl -qw net.ipv6.conf.all.disable_ipv6=1".split(' ');
                let status = Command::new("ip").args(["netns", "exec", &space]).args(off).status();
                assert!(status.unwrap().success(), "switching IPv6 off, family {family}");
            }
        }
        let mut a = cable.start("a", "10.9.0.1");
        let mut b = cable.start("b", "10.9.0.2");
        talk(&mut a, "10.9.0.1", &mut b, "10.9.0.2");
        if wanted {
            drop((a, b));
            let mut a = cable.start("a", "fd00:9::1");
            let mut b = cable.start("b", "fd00:9::2");
            talk(&mut a, "fd00:9::1", &mut b, "fd00:9::2");
        }
    }
}

/// The connections of a machine that lost its power still stand on the other side when it is back.
fn power_cut(test: &str, mode: &str, unacknowledged: bool) {
    let Some(cable) = Cable::lay(test) else { return };
    let (a_settings, b_settings) =
        (format!("10.9.0.1 10.9.0.1{mode}"), format!("10.9.0.2 10.9.0.2{mode}"));
    let mut a = cable.start("a", &a_settings);
    let mut b = cable.start("b", &b_settings);
    talk(&mut a, "10.9.0.1", &mut b, "10.9.0.2");
    if unacknowledged {
        assert!(ip(&format!("-n {} link set cable down", cable.namespace("a"))));
        // For the former machine: the message is not repeated to its successor.
        b.send("unheard", "10.9.0.1");
    }
    cable.power_cycle_a(Duration::from_millis(2500), a);
    let mut a = cable.start("a", &a_settings);
    let start = Instant::now();
    a.send("back", "10.9.0.2");
    b.expect("10.9.0.1 says back");
    b.send("again", "10.9.0.1");
    a.expect("10.9.0.2 says again");
    let took = start.elapsed();
    println!("served again after {took:?}");
    // TCP alone would take longer to find out.
    assert!(took < Duration::from_secs(5), "{took:?}");
}

#[test]
fn a_machine_that_lost_its_power_is_served_again() {
    power_cut("cut", "", false);
    power_cut("cutu", "", true);
}

#[test]
fn a_machine_without_greetings_that_lost_its_power_is_served_again() {
    power_cut("plain", " plain", false);
    power_cut("plainu", " plain", true);
}
