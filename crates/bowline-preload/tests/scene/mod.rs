//! A node of this process for the programs of a test.
#![allow(dead_code, reason = "no test uses all of it")]

use std::io::{BufRead, BufReader, Read};
use std::net::IpAddr;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use bowline_host::{Host, Policy, Quota, Refusal};
use bowline_rds::Config;
use bowline_rds_driver::{Driver, DriverConfig, RdmaDevices};
use bowline_roce_driver::{SoftConfig, SoftDevice};

/// Longest time that a program may take.
pub(crate) const LIMIT: Duration = Duration::from_secs(60);

/// A user who is nobody else.
const OTHER: u32 = 64_321;

/// Makes the calling thread, and no other, that of a user.
fn become_user(user: u32) {
    use rustix::thread::set_thread_res_uid;
    let [kept, user] = [u32::MAX, user].map(rustix::process::Uid::from_raw_unchecked);
    set_thread_res_uid(kept, user, kept).unwrap();
}

/// A node with two addresses that serves programs.
pub(crate) struct Scene {
    pub(crate) driver: Driver,
    host: Option<Host>,
    pub(crate) folder: PathBuf,
    pub(crate) addresses: [String; 2],
}

impl Scene {
    pub(crate) fn new() -> Self {
        let net = Self::next();
        Self::at(net, [1, 2].map(|host| format!("127.78.{net}.{host}")))
    }

    /// A number of a network for a new scene, which the nodes of this machine have no part in.
    pub(crate) fn next() -> u8 {
        bowline_testkit::apart::from_nodes();
        static NEXT: AtomicU8 = AtomicU8::new(1);
        NEXT.fetch_add(1, Ordering::Relaxed)
    }

    /// Two nodes, each with the first of its addresses.
    pub(crate) fn pair() -> [Self; 2] {
        let net = Self::next();
        let addresses = [1, 2].map(|host| format!("127.80.{net}.{host}"));
        [0, 1].map(|n| {
            let addresses = [addresses[n].clone(), addresses[1 - n].clone()];
            let addrs = vec![addresses[0].parse().unwrap()];
            let name = format!("bowline-{}-{net}-{n}", std::process::id());
            let folder = std::env::temp_dir().join(name);
            Self::with(folder, addresses, addrs, RdmaDevices::default(), None)
        })
    }

    pub(crate) fn at(net: u8, addresses: [String; 2]) -> Self {
        let addrs = addresses.iter().map(|a| a.parse().unwrap()).collect();
        let folder = std::env::temp_dir().join(format!("bowline-{}-{net}", std::process::id()));
        Self::with(folder, addresses, addrs, RdmaDevices::default(), None)
    }

    /// Two nodes on a device of software each; for the second both addresses change places.
    pub(crate) fn rdma_pair() -> [Self; 2] {
        Self::rdma_pair_of(None)
    }

    /// The same, of nodes that another user runs; `None` where this test may not be another user.
    pub(crate) fn rdma_pair_of_others() -> Option<[Self; 2]> {
        rustix::process::geteuid().is_root().then(|| Self::rdma_pair_of(Some(OTHER)))
    }

    fn rdma_pair_of(user: Option<u32>) -> [Self; 2] {
        let net = Self::next();
        let addresses = [1, 2].map(|host| format!("127.79.{net}.{host}"));
        [0, 1].map(|n| {
            let addresses = [addresses[n].clone(), addresses[1 - n].clone()];
            let addrs: Vec<IpAddr> = vec![addresses[0].parse().unwrap()];
            let config = SoftConfig { addrs: addrs.clone(), ..SoftConfig::default() };
            let device = SoftDevice::open(config).expect("an address of this machine");
            let name = format!("bowline-{}-{net}-{n}", std::process::id());
            let devices = RdmaDevices(vec![Arc::new(device)]);
            Self::with(std::env::temp_dir().join(name), addresses, addrs, devices, user)
        })
    }

    fn with(
        folder: PathBuf,
        addresses: [String; 2],
        addrs: Vec<IpAddr>,
        rdma: RdmaDevices,
        user: Option<u32>,
    ) -> Self {
        let core = Config { addrs, generation: 78, ..Config::default() };
        let config = DriverConfig { core, rdma, ..DriverConfig::default() };
        let begun = Instant::now();
        let driver = loop {
            match Driver::start(config.clone()) {
                Ok(driver) => break driver,
                // Another test may have the address.
                Err(error) => assert!(begun.elapsed() < LIMIT, "{error}"),
            }
            std::thread::sleep(Duration::from_millis(10));
        };
        std::fs::create_dir(&folder).unwrap();
        let listener = UnixListener::bind(folder.join("host.sock")).unwrap();
        // The node's thread keeps the user of the thread that starts it, and the sockets that it
        // makes are that user's.
        let start =
            || Host::start(driver.clone(), listener, Policy::default(), Quota::NONE).unwrap();
        let host = Some(match user {
            Some(user) => {
                std::os::unix::fs::chown(folder.join("host.sock"), Some(user), None).unwrap();
                become_user(user);
                let host = start();
                become_user(0);
                host
            }
            None => start(),
        });
        Self { driver, host, folder, addresses }
    }

    pub(crate) fn command(&self, program: &str) -> Command {
        let library = library();
        let mut command = Command::new(program);
        command.env("LD_PRELOAD", library).env("BOWLINE_RDS_SOCKET", self.folder.join("host.sock"));
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    pub(crate) fn start(&self, script: &str, more: &[&str]) -> Child {
        let mut command = self.command("python3");
        command
            .arg(self::script(script))
            .args(&self.addresses)
            .args(more)
            .spawn()
            .expect("python3 starts")
    }

    /// Compiles a C program; `None` where there is no compiler for it.
    pub(crate) fn compiles(&self, source: &str, flags: &[&str]) -> Option<PathBuf> {
        let program = self.folder.join(source.trim_end_matches(".c"));
        let mut compiler = Command::new("cc");
        compiler.args(["-Wall", "-Wextra", "-Werror", "-O1", "-pthread", "-I"]);
        compiler.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("include"));
        compiler.args(flags).arg(script(source)).arg("-o").arg(&program);
        let output = compiler.output().ok()?;
        let said = String::from_utf8_lossy(&output.stderr);
        if !output.status.success() && said.contains("cannot find") {
            return None;
        }
        assert!(output.status.success(), "{said}");
        Some(program)
    }

    /// What programs were refused since the last call.
    pub(crate) fn refusals(&self) -> Vec<Refusal> {
        self.host.as_ref().map_or_else(Vec::new, Host::refusals)
    }

    /// Runs a program to its end, which must be a good one.
    pub(crate) fn runs(&self, script: &str) {
        finish(self.start(script, &[]), script);
        self.is_empty_again();
    }

    /// Nothing is left of programs that have ended.
    pub(crate) fn is_empty_again(&self) {
        let begun = Instant::now();
        while !self.driver.with_core(|core, _| core.info()).sockets.is_empty() {
            assert!(begun.elapsed() < LIMIT, "sockets of programs that have ended are left");
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

impl Scene {
    /// Another node serves programs, and knows nothing of those of before.
    pub(crate) fn restart(&mut self) {
        self.host = None;
        let place = self.folder.join("host.sock");
        std::fs::remove_file(&place).unwrap();
        let listener = UnixListener::bind(place).unwrap();
        let driver = self.driver.clone();
        self.host = Some(Host::start(driver, listener, Policy::default(), Quota::NONE).unwrap());
    }

    /// Waits for a file that a program makes.
    pub(crate) fn wait_for(&self, name: &str, program: &mut Child) {
        let begun = Instant::now();
        while !self.folder.join(name).exists() {
            let ended = program.try_wait().unwrap().is_some();
            assert!(!ended && begun.elapsed() < LIMIT, "the program has not come to {name}");
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Makes a file that a program waits for.
    pub(crate) fn say(&self, name: &str) {
        std::fs::write(self.folder.join(name), "").unwrap();
    }

    /// Another node takes over from this one, as a process that starts would.
    pub(crate) fn replace(&mut self) {
        let all = self.host.take().unwrap().hand_over().unwrap();
        let listeners = self.driver.hand_over(all.writer().unwrap()).unwrap();
        let (host, _, node) = all.open().unwrap();
        let core = self.driver.with_core(|core, _| core.config().clone());
        let config = DriverConfig { core, ..DriverConfig::default() };
        self.driver = Driver::resume(config, node, listeners, || Ok(())).unwrap();
        let driver = self.driver.clone();
        let host = Host::resume(driver, host, None, Policy::default(), Quota::NONE);
        self.host = Some(host.unwrap());
    }
}

/// Programs that send to each other for a while, in pairs, as fast as they can.
pub(crate) struct Flows {
    programs: Vec<(BufReader<ChildStdout>, Child)>,
    folder: PathBuf,
}

impl Flows {
    /// Begins flows of `seconds`: own address, address of the other, port; the neighbour of each is
    /// its partner.
    pub(crate) fn begin(seconds: &str, all: &[(&Scene, &str, &str, &str)]) -> Self {
        let folder = all[0].0.folder.clone();
        let start = |&(scene, own, peer, port): &(&Scene, &str, &str, &str)| {
            let mut flow = scene.command("python3");
            flow.arg(script("flow.py")).args([own, peer, port, seconds, "20000"]).arg(&folder);
            let mut flow = flow.spawn().unwrap();
            (BufReader::new(flow.stdout.take().unwrap()), flow)
        };
        let mut programs: Vec<_> = all.iter().map(start).collect();
        for (out, _) in &mut programs {
            assert_eq!(next_line(out), "ready\n");
        }
        std::fs::write(folder.join("go"), "").unwrap();
        Self { programs, folder }
    }

    /// Waits for their ends: each got what its partner has sent, once and in order.
    pub(crate) fn finish(mut self) {
        let counts: Vec<_> =
            self.programs.iter_mut().map(|(out, _)| [next_line(out), next_line(out)]).collect();
        std::fs::write(self.folder.join("end"), "").unwrap();
        for (n, [sent, _]) in counts.iter().enumerate() {
            let got = &counts[n ^ 1][1];
            assert!(sent.len() > 70, "{counts:?}");
            assert_eq!(sent.strip_prefix("sent"), got.strip_prefix("got"), "{counts:?}");
        }
        for (_, mut flow) in self.programs {
            assert!(flow.wait().unwrap().success());
        }
    }
}

fn next_line(out: &mut impl BufRead) -> String {
    let mut line = String::new();
    out.read_line(&mut line).unwrap();
    line
}

impl Drop for Scene {
    fn drop(&mut self) {
        self.host = None;
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

/// The path of a program.
pub(crate) fn script(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs").join(name)
}

/// The library, which cargo does not build for tests.
pub(crate) fn library() -> &'static Path {
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

pub(crate) fn finish(mut child: Child, what: &str) {
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
