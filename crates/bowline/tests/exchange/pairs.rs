//! The pairs of programs of `examples`, each as processes of their own: what they print is what the
//! guide says.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use bowline::rds::Node;
use bowline_host::{Host, Policy, Quota};
use rustix::process::{Pid, Signal, kill_process};

use crate::common::{addr, builder, ip};

/// Longest wait for a line, on a machine that has other work.
const PATIENCE: Duration = Duration::from_secs(60);

/// A program that runs, and the lines that it has printed; killed when dropped.
struct Program {
    child: Child,
    lines: mpsc::Receiver<String>,
    seen: Vec<String>,
}

impl Drop for Program {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Program {
    /// Starts a program on a node of its own, or at the place of a node that serves programs.
    fn start(name: &str, place: Option<&Path>, args: &[&str]) -> Self {
        // Cargo builds the examples with the tests of a package. This is target/PROFILE/deps/TEST.
        let own = std::env::current_exe().unwrap();
        let program = own.ancestors().nth(2).unwrap().join("examples").join(name);
        assert!(program.exists(), "no {program:?}: `cargo build -p bowline --examples` makes it");
        let mut command = Command::new(program);
        command.args(args).env_remove("BOWLINE_RDS_SOCKET");
        command.envs(place.map(|place| ("BOWLINE_RDS_SOCKET", place)));
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let (send, lines) = mpsc::channel();
        let pipes: [Box<dyn Read + Send>; 2] =
            [Box::new(child.stdout.take().unwrap()), Box::new(child.stderr.take().unwrap())];
        for pipe in pipes {
            let send = send.clone();
            let read = move || BufReader::new(pipe).lines().try_for_each(|l| send.send(l.unwrap()));
            thread::spawn(read);
        }
        Self { child, lines, seen: Vec::new() }
    }

    /// Waits for the next line; `None` at the end of the program.
    fn line(&mut self, end: Instant, wanted: &str) -> Option<&str> {
        match self.lines.recv_timeout(end.saturating_duration_since(Instant::now())) {
            Ok(line) => self.seen.push(line),
            Err(RecvTimeoutError::Disconnected) => return None,
            Err(RecvTimeoutError::Timeout) => panic!("no {wanted:?} after {:#?}", self.seen),
        }
        self.seen.last().map(String::as_str)
    }

    /// Waits until it prints a line with this text.
    fn prints(&mut self, text: &str) {
        let end = Instant::now() + PATIENCE;
        loop {
            match self.line(end, text) {
                Some(line) if line.contains(text) => return,
                Some(_) => {}
                None => panic!("ended without {text:?}: {:#?}", self.seen),
            }
        }
    }

    /// Waits for its end; tells whether it succeeded.
    fn ends(&mut self) -> bool {
        let end = Instant::now() + PATIENCE;
        while self.line(end, "end").is_some() {}
        self.child.wait().unwrap().success()
    }

    fn ends_well(&mut self) {
        assert!(self.ends(), "{:#?}", self.seen);
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Ends it at once, and reads what it has printed until then.
    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.ends();
    }

    fn has(&self, line: &str) -> bool {
        self.seen.iter().any(|seen| seen == line)
    }

    /// The number in the line that has these texts before and after it.
    fn number(&self, before: &str, after: &str) -> u64 {
        let number = |line: &String| {
            let (_, rest) = line.split_once(before)?;
            rest.split_once(after)?.0.trim().parse().ok()
        };
        let found = self.seen.iter().rev().find_map(number);
        found.unwrap_or_else(|| panic!("no {before:?}..{after:?} in {:#?}", self.seen))
    }

    /// The numbers in all lines of this form.
    fn numbers(&self, before: &str, after: &str) -> BTreeSet<u64> {
        let number = |line: &String| line.strip_prefix(before)?.strip_suffix(after)?.parse().ok();
        self.seen.iter().filter_map(number).collect()
    }
}

/// Where the programs of a test run: at addresses of its own.
struct Scene {
    test: u16,
    /// The node that serves them; without it, each has its own.
    host: Option<(Node, Host, PathBuf)>,
}

impl Drop for Scene {
    fn drop(&mut self) {
        if let Some((.., place)) = self.host.take() {
            let _ = std::fs::remove_dir_all(place.parent().unwrap());
        }
    }
}

impl Scene {
    /// Each program has its node. `test` is unique among all tests.
    const fn own_nodes(test: u16) -> Self {
        Self { test, host: None }
    }

    /// All programs share a node, as that of `bowline node`.
    fn host_node(test: u16) -> Self {
        let all = (2..=4).fold(builder(test, 1), |all, number| all.address(ip(test, number)));
        let node = all.build().unwrap();
        let folder = std::env::temp_dir().join(format!("bowline-p{test}-{}", std::process::id()));
        std::fs::create_dir(&folder).unwrap();
        let place = folder.join("host.sock");
        let listener = UnixListener::bind(&place).unwrap();
        let policy = Policy::default();
        let host = Host::start(node.driver().clone(), listener, policy, Quota::NONE).unwrap();
        Self { test, host: Some((node, host, place)) }
    }

    fn place(&self) -> Option<&Path> {
        self.host.as_ref().map(|(.., place)| place.as_path())
    }

    /// Starts the program that others send to, at the first address.
    fn first(&self, name: &str, args: &[&str]) -> Program {
        let own = addr(self.test, 1, 4000).to_string();
        Program::start(name, self.place(), &[&[&*own], args].concat())
    }

    /// Starts one that sends to the first.
    fn other(&self, number: u8, name: &str, args: &[&str]) -> Program {
        let (own, to) = (ip(self.test, number).to_string(), addr(self.test, 1, 4000).to_string());
        Program::start(name, self.place(), &[&[&*own, &*to], args].concat())
    }
}

fn clients_ask_before_the_server_runs(scene: &Scene) {
    let texts = [["a", "b", "c"], ["d", "e", "f"], ["g", "h", "i"]];
    let start = |(number, texts)| scene.other(number, "request_reply_client", texts);
    let mut clients: Vec<_> = (2..).zip(&texts).map(|(n, texts)| start((n, texts))).collect();
    clients.iter_mut().for_each(|client| client.prints("no reply to attempt 1"));
    let mut server = scene.first("request_reply_server", &[]);
    server.prints("answers");
    for (client, texts) in clients.iter_mut().zip(texts) {
        client.ends_well();
        for text in texts {
            let answer = format!("{text}: {}", text.to_uppercase());
            assert!(client.has(&answer), "{:#?}", client.seen);
        }
    }
}

#[test]
fn clients_that_start_first_get_their_own_replies() {
    clients_ask_before_the_server_runs(&Scene::own_nodes(960));
}

#[test]
fn clients_of_the_hosts_node_get_their_own_replies() {
    clients_ask_before_the_server_runs(&Scene::host_node(961));
}

/// The server takes longer than a client waits, so there are replies to each attempt.
#[test]
fn a_late_reply_is_not_taken_for_that_of_another_request() {
    let scene = Scene::own_nodes(962);
    let mut server = scene.first("request_reply_server", &["1200"]);
    server.prints("answers");
    let mut client = scene.other(2, "request_reply_client", &["first", "second"]);
    client.ends_well();
    assert!(client.has("first: FIRST") && client.has("second: SECOND"), "{:#?}", client.seen);
    let ignored = "second: a late reply to another request was ignored";
    assert!(client.has(ignored), "{:#?}", client.seen);
}

/// A message may be longer than the send buffer of who receives it, and so would be its reply.
#[test]
fn a_request_that_is_too_long_to_answer_does_not_end_the_server() {
    let scene = Scene::own_nodes(968);
    let mut server = scene.first("request_reply_server", &[]);
    server.prints("answers");
    let node = builder(968, 2).build().unwrap();
    let socket = node.bind(addr(968, 2, 0)).unwrap();
    socket.set_send_buffer(1 << 20).unwrap();
    socket.send_to(&[b'a'; 200_000], addr(968, 1, 4000)).unwrap();
    server.prints("a reply was dropped");
    let mut client = scene.other(3, "request_reply_client", &["short"]);
    client.ends_well();
    assert!(client.has("short: SHORT"), "{:#?}", client.seen);
}

/// One subscriber is stopped, then slow; the other one gets its updates all the time.
#[test]
fn a_slow_subscriber_misses_updates_and_the_others_do_not() {
    const WANTED: u64 = 200;
    let scene = Scene::own_nodes(963);
    let mut publisher = scene.first("publish_subscribe_publisher", &["20"]);
    publisher.prints("publishes");
    let mut slow = scene.other(2, "publish_subscribe_subscriber", &["60", "25", "2048"]);
    slow.prints("the first update");
    slow.signal(Signal::STOP);
    let wanted = WANTED.to_string();
    let mut quick = scene.other(3, "publish_subscribe_subscriber", &[&wanted, "0", "1000000"]);
    quick.ends_well();
    // More than 0 on a machine that has no time for it during half a second.
    let missed = quick.number(&format!("{WANTED} updates taken,"), "missed");
    assert!(missed <= WANTED / 10, "{missed}");
    slow.signal(Signal::CONT);
    slow.ends_well();
    let missed = slow.number("60 updates taken,", "missed");
    assert!(missed > WANTED / 10, "{missed}");
    let slow = format!("{}:", ip(963, 2));
    loop {
        publisher.prints("leaves");
        if publisher.seen.last().unwrap().starts_with(&slow) {
            break;
        }
    }
    assert!(publisher.number("updates sent,", "dropped") > WANTED / 10, "{:#?}", publisher.seen);
}

/// The receiver is not there, then too slow, then quick enough. What the sender says of each order
/// agrees with what the receivers did.
#[test]
fn what_is_known_of_an_order_after_its_deadline_is_true() {
    let scene = Scene::own_nodes(964);
    let mut sender = scene.other(2, "deadlines_sender", &["1000000", "200"]);
    sender.prints("order 1: cancelled, may arrive or not");
    let mut slow = scene.first("deadlines_receiver", &["700"]);
    sender.prints("at its node, not done yet");
    sender.prints("not sent");
    sender.prints("done, too late");
    slow.kill();
    let mut quick = scene.first("deadlines_receiver", &["0"]);
    // Not one of the first receiver.
    quick.prints("is done");
    loop {
        sender.prints(": done");
        if !sender.seen.last().unwrap().contains("too late") {
            break;
        }
    }
    sender.kill();
    quick.kill();
    let done = |receiver: &Program| receiver.numbers("order ", " is done");
    let done = &done(&slow) | &done(&quick);
    for confirmed in [": done", ": done, too late"] {
        let confirmed = sender.numbers("order ", confirmed);
        assert!(!confirmed.is_empty() && confirmed.is_subset(&done), "{:#?}", sender.seen);
    }
    let not_sent = sender.numbers("order ", ": not sent");
    assert!(!not_sent.is_empty() && not_sent.is_disjoint(&done), "{not_sent:?} {done:?}");
}

fn worker_ends(scene: &Scene, signal: Signal) {
    let mut worker = scene.first("graceful_end_worker", &["5"]);
    worker.prints("works");
    let mut clients = [2, 3].map(|number| scene.other(number, "graceful_end_client", &["60000"]));
    clients.iter_mut().for_each(|client| client.prints("job 20 done"));
    worker.signal(signal);
    let mut known = 0;
    for client in &mut clients {
        client.ends_well();
        known += client.number("has ended:", "jobs done");
    }
    worker.ends_well();
    assert_eq!(worker.seen.last().map(String::as_str), Some("ended"));
    // Each job that was done is known to its client.
    let performed = worker.seen.iter().find_map(|line| line.split_once(" jobs done, the last"));
    assert_eq!(performed.unwrap().0.parse(), Ok(known), "{:#?}", worker.seen);
}

#[test]
fn clients_know_the_jobs_of_a_worker_that_ends_in_good_order() {
    worker_ends(&Scene::own_nodes(965), Signal::TERM);
}

#[test]
fn clients_of_the_hosts_node_know_the_jobs_of_a_worker_that_ends() {
    worker_ends(&Scene::host_node(966), Signal::INT);
}

#[test]
fn a_worker_that_is_killed_is_lost_and_not_ended() {
    let scene = Scene::own_nodes(967);
    let mut worker = scene.first("graceful_end_worker", &["5"]);
    worker.prints("works");
    let mut client = scene.other(2, "graceful_end_client", &["3000"]);
    client.prints("job 20 done");
    worker.kill();
    assert!(!client.ends(), "{:#?}", client.seen);
    let is_lost = client.seen.iter().any(|line| line.contains("is lost: "));
    assert!(is_lost, "{:#?}", client.seen);
}
