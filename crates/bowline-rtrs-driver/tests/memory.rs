//! What sessions take of memory, as the README states it: no more than queue depth times chunk
//! size, and a little for everything else; nothing of it before it is used, nothing after the end.
//!
//! Server and client are processes of their own, since what counts is what a process has in memory.

mod common;

use std::io::{BufRead, BufReader, Write};
use std::net::{IpAddr, SocketAddr};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bowline_rtrs_driver::client::{Session, SessionBuilder};
use bowline_rtrs_driver::server::{Server, ServerConfig};
use bowline_rtrs_driver::{Dir, HbConfig, PORT};
use bowline_verbs::Buffer;
use common::load::Load;
use common::{PATIENCE, STORE, Store, device, engine, ip};

const NET: u8 = 95;
const SERVER: &str = "BOWLINE_MEMORY_SERVER";
const MIB: usize = 1 << 20;
/// Interval of heartbeats, longer than the test: memory is released without one.
const HEARTBEAT: Duration = Duration::from_secs(600);
/// Depth times chunk size, of the default settings.
const CHUNKS: usize = 512 * 128 * 1024;
/// The stated bound of everything else: code, queues, tables, threads.
const REST: usize = 16 * MIB;
/// What a session that does nothing takes, with registrations of 512 chunks and queues of 2
/// connections.
const IDLE: usize = MIB;

/// What one request takes that is a part of a chunk; less than a large page.
const LITTLE: usize = MIB;
fn heartbeat() -> HbConfig {
    HbConfig { interval: HEARTBEAT, probe_interval: HEARTBEAT, ..HbConfig::default() }
}

/// Bytes of this process that are in memory.
fn resident() -> usize {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: usize = text.split(' ').nth(1).unwrap().parse().unwrap();
    // The pages of the machines this is built for.
    pages * 4096
}

/// Bytes of these that are large pages.
fn large_pages() -> usize {
    let text = std::fs::read_to_string("/proc/self/smaps_rollup").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("AnonHugePages:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB"));
    kib.and_then(|kib| kib.parse::<usize>().ok()).map_or(0, |kib| kib << 10)
}

/// The server's process: reports its resident memory on request.
fn serve() {
    let device = device(&[ip(NET, 101)]);
    let engine = engine(&device);
    let store = Store::new();
    store.memory.write(0, &vec![1; STORE]);
    let at = [SocketAddr::new(ip(NET, 101), PORT)];
    let server = Server::open(
        &engine,
        &at,
        ServerConfig { heartbeat: heartbeat(), ..ServerConfig::default() },
        store as _,
    )
    .unwrap();
    println!("\nready");
    for line in std::io::stdin().lines() {
        let sessions: usize = line.unwrap().parse().unwrap();
        common::eventually("so many sessions", || server.sessions().len() == sessions);
        // Ends of paths have been told, too: registrations go with them.
        common::eventually("nothing else", || device.in_use().qps == 2 * sessions);
        println!("resident {} {}", resident(), large_pages());
    }
    server.close();
}

struct Remote {
    child: Child,
    to: Option<ChildStdin>,
    from: BufReader<ChildStdout>,
}

impl Remote {
    fn start() -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["memory_is_bounded_by_the_chunks", "--exact", "--nocapture"])
            .env(SERVER, "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let from = BufReader::new(child.stdout.take().unwrap());
        let to = child.stdin.take();
        let mut remote = Self { child, to, from };
        remote.line("ready");
        remote
    }

    fn line(&mut self, beginning: &str) -> String {
        loop {
            let mut line = String::new();
            assert!(self.from.read_line(&mut line).unwrap() > 0, "the server has ended");
            if let Some(rest) = line.trim_end().strip_prefix(beginning) {
                return rest.trim().to_owned();
            }
        }
    }

    /// Returns the server's resident memory, as soon as it has this many sessions.
    fn resident(&mut self, sessions: usize) -> usize {
        self.look(sessions).0
    }

    /// The same, and the part of it in large pages.
    fn look(&mut self, sessions: usize) -> (usize, usize) {
        writeln!(self.to.as_mut().unwrap(), "{sessions}").unwrap();
        let line = self.line("resident");
        let (resident, large) = line.split_once(' ').unwrap();
        println!("server: {large} of {resident} bytes are large pages");
        (resident.parse().unwrap(), large.parse().unwrap())
    }
}

/// Tells whether the system makes large pages of memory that is used.
fn has_large_pages() -> bool {
    let before = large_pages();
    let buffer = Buffer::sparse(8 * MIB).unwrap();
    buffer.write(0, &vec![1; buffer.len()]);
    buffer.enlarge_pages(0, buffer.len());
    large_pages() > before
}

impl Drop for Remote {
    fn drop(&mut self) {
        drop(self.to.take());
        let ended = self.child.wait();
        assert!(std::thread::panicking() || ended.unwrap().success());
    }
}

/// Sends requests of full size in all chunks at once, several times. Returns the last load with its
/// memory, and the bytes of that memory.
fn fill(session: &Arc<Session>) -> (Arc<Load>, usize) {
    let attrs = session.attrs().unwrap();
    let (depth, len) = (usize::from(attrs.queue_depth), attrs.max_io as usize);
    let run = |dir| {
        let load = Load::new(session, dir, depth, len);
        load.run(2 * depth as u64, true);
        assert_eq!(*load.errors.lock().unwrap(), Vec::<i32>::new());
        load
    };
    run(Dir::Write);
    // Memory that was read into is resident; memory that was sent from and never written is not.
    (run(Dir::Read), depth * len)
}

/// Waits until this process has at most `to` bytes more than `before`.
fn shrinks(before: usize, to: usize) -> usize {
    let begin = Instant::now();
    loop {
        let now = resident().saturating_sub(before);
        if now < to {
            return now;
        }
        assert!(begin.elapsed() < PATIENCE, "{now} more than before, not {to}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

// tests [RT-66]
#[test]
fn memory_is_bounded_by_the_chunks() {
    if std::env::var_os(SERVER).is_some() {
        return serve();
    }
    let mut server = Remote::start();
    let addrs: Vec<IpAddr> = (1..=8).map(|host| ip(NET, host)).collect();
    let device = device(&addrs);
    let engine = engine(&device);
    let empty = server.resident(0);
    let grown = |now: usize| now.saturating_sub(empty);
    let open = |n: usize| {
        let builder = SessionBuilder::new(&format!("memory{n}")).unwrap().heartbeat(heartbeat());
        Session::open(&engine, builder.path(Some(addrs[n]), ip(NET, 101))).unwrap()
    };

    let sessions: Vec<_> = (0..8).map(open).collect();
    let idle = grown(server.resident(8));
    println!("server: {empty} bytes; 8 idle sessions: {idle} more");
    assert!(idle < 8 * IDLE + REST, "idle sessions: {idle}");

    // Little use takes little memory: one chunk, of which a small page is written.
    Load::new(&sessions[7], Dir::Write, 1, 4096).run(1, true);
    let little = grown(server.resident(8)).saturating_sub(idle);
    println!("server: one request: {little} more");
    assert!(little < LITTLE, "{little} for one request");

    let before = resident();
    for (n, session) in sessions.iter().enumerate().take(3) {
        let (load, regions) = fill(session);
        let used = grown(server.resident(8));
        println!("server: {} used: {used} more", n + 1);
        // Some time after the requests: not one has waited for it.
        if has_large_pages() {
            common::eventually("large pages", || server.look(8).1 > n * CHUNKS + STORE);
        }
        assert!(used > (n + 1) * CHUNKS * 9 / 10, "{used}: not all chunks were used");
        assert!(used <= (n + 1) * CHUNKS + 8 * IDLE + REST, "{used} of {} sessions", n + 1);
        let client = shrinks(before, regions + REST);
        println!("client: {client} more, {regions} of them regions");
        assert!(client > regions * 9 / 10, "{client}: the regions are not in memory");
        // Memory that was sent from is released when nothing can be sent again.
        drop(load);
        println!("client: {} more without them", shrinks(before, REST));
    }

    let mut left = 8;
    for session in sessions {
        session.close();
        left -= 1;
    }
    // A large page that is being made is made first.
    let mut after = 0;
    common::eventually("given back", || {
        after = grown(server.resident(left));
        after < REST
    });
    println!("server: {after} more after the end");
    let client = resident().saturating_sub(before);
    println!("client: {client} more after the end");
    assert!(client < REST, "given back: {client}");
}
