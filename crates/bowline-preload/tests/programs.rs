//! Python programs that know nothing of bowline, run on a node of this process: plain use of the
//! socket module, and what happens to descriptors.

use std::io::Read;
use std::net::IpAddr;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

use bowline_host::Host;
use bowline_rds::Config;
use bowline_rds_driver::{Driver, DriverConfig};
use bowline_testkit::skipped;

/// Longest time that a program may take.
const LIMIT: Duration = Duration::from_secs(60);

/// A node with two addresses that serves programs.
struct Scene {
    driver: Driver,
    host: Option<Host>,
    folder: PathBuf,
    addresses: [String; 2],
}

impl Scene {
    fn new() -> Self {
        let net = Self::next();
        Self::at(net, [1, 2].map(|host| format!("127.78.{net}.{host}")))
    }

    fn next() -> u8 {
        static NEXT: AtomicU8 = AtomicU8::new(1);
        NEXT.fetch_add(1, Ordering::Relaxed)
    }

    fn at(net: u8, addresses: [String; 2]) -> Self {
        let addrs: Vec<IpAddr> = addresses.iter().map(|a| a.parse().unwrap()).collect();
        let core = Config { addrs, generation: 78, ..Config::default() };
        let begun = Instant::now();
        let driver = loop {
            match Driver::start(DriverConfig { core: core.clone(), ..DriverConfig::default() }) {
                Ok(driver) => break driver,
                // Another test may have the address.
                Err(error) => assert!(begun.elapsed() < LIMIT, "{error}"),
            }
            std::thread::sleep(Duration::from_millis(10));
        };
        let folder = std::env::temp_dir().join(format!("bowline-{}-{net}", std::process::id()));
        std::fs::create_dir(&folder).unwrap();
        let listener = UnixListener::bind(folder.join("host.sock")).unwrap();
        let host = Some(Host::start(driver.clone(), listener).unwrap());
        Self { driver, host, folder, addresses }
    }

    fn command(&self, program: &str) -> Command {
        let library = library();
        let mut command = Command::new(program);
        command.env("LD_PRELOAD", library).env("BOWLINE_RDS_SOCKET", self.folder.join("host.sock"));
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    fn start(&self, script: &str, more: &[&str]) -> Child {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs").join(script);
        let mut command = self.command("python3");
        command.arg(path).args(&self.addresses).args(more).spawn().expect("python3 starts")
    }

    /// Runs a program to its end, which must be a good one.
    fn runs(&self, script: &str) {
        finish(self.start(script, &[]), script);
        self.is_empty_again();
    }

    /// Nothing is left of programs that have ended.
    fn is_empty_again(&self) {
        let begun = Instant::now();
        while !self.driver.with_core(|core, _| core.info()).sockets.is_empty() {
            assert!(begun.elapsed() < LIMIT, "sockets of programs that have ended are left");
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        self.host = None;
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

/// The library, which cargo does not build for tests.
fn library() -> &'static Path {
    static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    LIBRARY.get_or_init(|| {
        // This program is in target/PROFILE/deps.
        let own = std::env::current_exe().unwrap();
        let folder = own.parent().and_then(Path::parent).unwrap();
        let mut cargo = Command::new(env!("CARGO"));
        cargo.args(["build", "--quiet", "--package", "bowline-preload", "--target-dir"]);
        cargo.arg(folder.parent().unwrap());
        if folder.ends_with("release") {
            cargo.arg("--release");
        }
        let status = cargo.current_dir(env!("CARGO_MANIFEST_DIR")).status().unwrap();
        assert!(status.success(), "cargo builds the library");
        folder.join("libbowline_preload.so")
    })
}

fn finish(mut child: Child, what: &str) {
    let begun = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if begun.elapsed() > LIMIT {
            child.kill().unwrap();
            panic!("{what} takes too long");
        }
        std::thread::sleep(Duration::from_millis(2));
    };
    let mut text = String::new();
    child.stdout.take().unwrap().read_to_string(&mut text).unwrap();
    child.stderr.take().unwrap().read_to_string(&mut text).unwrap();
    assert!(status.success(), "{what}: {status}\n{text}");
}

#[test]
fn a_program_sends_receives_and_waits_as_on_a_kernel() {
    Scene::new().runs("plain.py");
}

// tests section 8 of tools.md: results and error numbers that a kernel was seen to give
#[test]
fn calls_fail_as_on_a_kernel() {
    Scene::new().runs("errors.py");
}

#[test]
fn a_descriptor_survives_fork_exec_dup_and_passing() {
    Scene::new().runs("descriptors.py");
}

#[test]
fn poll_and_epoll_show_what_the_socket_is_ready_for() {
    Scene::new().runs("readiness.py");
}

#[test]
fn a_slow_reader_holds_back_those_who_send_to_it_and_loses_nothing() {
    Scene::new().runs("congestion.py");
}

#[test]
fn four_processes_share_an_address_and_lose_nothing() {
    Scene::new().runs("shared.py");
}

#[test]
fn killed_processes_leave_nothing_and_hold_up_nobody() {
    let scene = Scene::new();
    let steady = scene.start("steady.py", &[]);
    for n in 0..20 {
        let mut victim = scene.start("victim.py", &[]);
        std::thread::sleep(Duration::from_millis(50 + 17 * n % 90));
        victim.kill().unwrap();
        victim.wait().unwrap();
    }
    finish(steady, "steady.py");
    scene.is_empty_again();
}

/// CPython's own tests of RDS sockets, which come with it or in a package of its tests.
#[test]
fn the_tests_of_cpython_pass() {
    if !Command::new("python3")
        .args(["-c", "import test.test_socket"])
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
    {
        return skipped::because("python3 has no module test.test_socket");
    }
    let scene = Scene::at(Scene::next(), ["127.0.0.1", "127.0.0.2"].map(str::to_owned));
    let mut command = scene.command("python3");
    let tests = ["test.test_socket.BasicRDSTest", "test.test_socket.RDSTest"];
    let output = command.args(["-m", "unittest", "-v"]).args(tests).output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{text}");
    assert!(!text.contains("skipped"), "{text}");
    scene.is_empty_again();
}
