//! A client whose process is killed, and started again.

mod common;

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use bowline_roce::{Config, GiveUp};
use bowline_roce_driver::SoftConfig;
use bowline_rtrs_driver::client::{Session, SessionBuilder};
use bowline_rtrs_driver::server::{Server, ServerConfig};
use bowline_rtrs_driver::{HbConfig, PORT};
use common::{PATIENCE, Store, device, device_with, engine, eventually, ip};

const NET: u8 = 208;
const CLIENT: &str = "BOWLINE_KILLED_CLIENT";
/// The server does not notice by itself that its client is gone.
const NEVER: Duration = Duration::from_secs(600);

/// The client's process: opens the session, and waits to be killed.
fn client() {
    let device = device(&[ip(NET, 1)]);
    let engine = engine(&device);
    let start = Instant::now();
    let session = loop {
        let builder = SessionBuilder::new("killed").unwrap().path(Some(ip(NET, 1)), ip(NET, 101));
        match Session::open(&engine, builder) {
            Err(error) => assert!(start.elapsed() < PATIENCE, "{error}"),
            Ok(session) => break session,
        }
    };
    println!("\nopened");
    std::io::stdin().lines().for_each(drop);
    session.close();
}

/// Starts it, and waits until it has its session.
fn start(run_folder: &Path) -> Child {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["a_client_that_was_killed_comes_back", "--exact", "--nocapture"])
        .env(CLIENT, "1")
        .env("XDG_RUNTIME_DIR", run_folder)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
    assert!(lines.any(|line| line == "opened"), "the session is still refused");
    child
}

/// The server keeps the session and the name of a killed client. The restarted client ends the
/// former connections, which its device has recorded in a file by default.
// tests [RT-92] [RS-48] [roce:CM-53]
#[test]
fn a_client_that_was_killed_comes_back() {
    if std::env::var_os(CLIENT).is_some() {
        return client();
    }
    let core = Config { give_up: GiveUp::After(NEVER), ..Config::default() };
    let device =
        device_with(SoftConfig { addrs: vec![ip(NET, 101)], core, ..SoftConfig::default() });
    let engine = engine(&device);
    let heartbeat = HbConfig { interval: NEVER, probe_interval: NEVER, ..HbConfig::default() };
    let config = ServerConfig { heartbeat, ..ServerConfig::default() };
    let at = [SocketAddr::new(ip(NET, 101), PORT)];
    let server = Server::open(&engine, &at, config, Store::new() as _).unwrap();
    let run_folder = std::env::temp_dir().join(format!("bowline-killed-{}", std::process::id()));
    std::fs::create_dir(&run_folder).unwrap();
    let noted = || {
        let own = std::fs::metadata("/proc/self").unwrap().uid();
        let folder = run_folder.join(format!("bowline/roce-{own}"));
        let files = std::fs::read_dir(folder).into_iter().flatten().flatten();
        files
            .map(|file| std::fs::read_to_string(file.path()).unwrap_or_default())
            .collect::<String>()
    };
    for _ in 0..3 {
        let mut child = start(&run_folder);
        assert_eq!(server.sessions().len(), 1);
        let connections = device.in_use().qps;
        eventually("its connections are noted", || noted().lines().count() == connections);
        child.kill().unwrap();
        child.wait().unwrap();
    }
    server.close();
    std::fs::remove_dir_all(&run_folder).unwrap();
}
