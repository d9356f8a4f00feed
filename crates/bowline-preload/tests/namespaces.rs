//! Nodes of several network namespaces in one folder, and programs that have sockets of each.

mod scene;

use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc;
use std::thread;

use bowline_host::{Host, Policy, Quota};
use bowline_rds::Config;
use bowline_rds_driver::{Driver, DriverConfig};
use bowline_testkit::skipped;
use scene::{finish, library, script};

/// A thread in a network namespace of its own, and what it has made there.
struct Elsewhere {
    end: mpsc::Sender<()>,
    thread: thread::JoinHandle<()>,
    place: PathBuf,
}

/// A node with an address that serves programs of this thread's namespace.
fn node(address: &str, place: &Path) -> Host {
    let core = Config { addrs: vec![address.parse().unwrap()], ..Config::default() };
    let driver = Driver::start(DriverConfig { core, ..DriverConfig::default() }).unwrap();
    let listener = UnixListener::bind(place).unwrap();
    Host::start(driver, listener, Policy::default(), Quota::NONE).unwrap()
}

/// The number that the system gives to the namespace of this thread.
fn namespace() -> u64 {
    bowline_host::network_namespace()
}

impl Elsewhere {
    fn new(address: &'static str, folder: &Path) -> Option<Self> {
        let folder = folder.to_owned();
        let (tell, told) = mpsc::channel();
        let (end, ended) = mpsc::channel();
        let thread = thread::spawn(move || {
            use rustix::thread::{UnshareFlags, unshare_unsafe};
            // SAFETY: of what threads share, descriptors and memory stay.
            if let Err(error) = unsafe { unshare_unsafe(UnshareFlags::NEWNET) } {
                return drop(tell.send(Err(error)));
            }
            let up = Command::new("ip").args(["link", "set", "lo", "up"]).status();
            assert!(up.is_ok_and(|up| up.success()), "ip sets the loopback up");
            let host = node(address, &folder.join(format!("host-{}.sock", namespace())));
            let process = rustix::process::getpid().as_raw_nonzero();
            let place = format!(
                "/proc/{process}/task/{}/ns/net",
                rustix::thread::gettid().as_raw_nonzero()
            );
            tell.send(Ok(PathBuf::from(place))).unwrap();
            let _ = ended.recv();
            drop(host);
        });
        match told.recv().unwrap() {
            Ok(place) => Some(Self { end, thread, place }),
            Err(error) => {
                skipped::because(format_args!("no network namespace can be made: {error}"));
                None
            }
        }
    }

    fn ends(self) {
        self.end.send(()).unwrap();
        self.thread.join().unwrap();
    }
}

#[test]
fn sockets_belong_to_the_namespace_of_their_thread_and_work_everywhere() {
    if Command::new("ip").arg("-V").output().is_err() {
        return skipped::without("ip");
    }
    bowline_testkit::apart::from_nodes();
    let runtime = std::env::temp_dir().join(format!("bowline-namespaces-{}", std::process::id()));
    let folder = runtime.join("bowline/rds");
    std::fs::create_dir_all(&folder).unwrap();
    if let Some(elsewhere) = Elsewhere::new("127.78.240.2", &folder) {
        let host = node("127.78.240.1", &folder.join("host.sock"));
        let mut program = Command::new("python3");
        program.env("LD_PRELOAD", library()).env("XDG_RUNTIME_DIR", &runtime);
        program.env_remove("BOWLINE_RDS_SOCKET");
        program.arg(script("namespaces.py")).arg(&elsewhere.place);
        program.args(["127.78.240.1", "127.78.240.2"]);
        program.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
        finish(program.spawn().expect("python3 starts"), "namespaces.py");
        drop(host);
        elsewhere.ends();
    }
    std::fs::remove_dir_all(runtime).unwrap();
}
