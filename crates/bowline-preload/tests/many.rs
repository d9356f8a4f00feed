//! Many sockets, many processes and many that are killed: what each needs is there, and nothing of
//! them is left. Tests run one after the other, since they count what this process has.

mod scene;

use std::collections::HashSet;
use std::io::{BufRead, BufReader, Read};
use std::process::Stdio;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bowline_testkit::skipped;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use scene::{Flows, Scene, finish};

/// Time after which what programs had must be gone.
const GONE: Duration = Duration::from_secs(10);
const PROCESSES: usize = 200;
/// Sockets of each process, and how many there are at least where descriptors are few.
const SOCKETS: [usize; 2] = [50, 20];
/// Descriptors that the node needs beyond two for each socket: channels of each process.
const CHANNELS: usize = 4 * PROCESSES;
/// Processes that are killed in a default run, and in a long one.
const KILLS: [&str; 2] = ["400", "1000"];

fn alone() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    ONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Descriptors and threads of this process, but for TCP connections of the node, which it keeps,
/// and threads that close what programs had, which end soon.
fn possessions() -> [usize; 2] {
    let all = std::fs::read_dir("/proc/self/task").unwrap();
    let names = all.filter_map(|one| std::fs::read_to_string(one.ok()?.path().join("comm")).ok());
    [descriptors().len(), names.filter(|name| name.trim() != "bowline-close").count()]
}

/// What the descriptors of this process are.
fn descriptors() -> Vec<String> {
    let all = std::fs::read_dir("/proc/self/fd").unwrap();
    let links = all.filter_map(|one| std::fs::read_link(one.ok()?.path()).ok());
    let names: Vec<String> = links.map(|link| link.display().to_string()).collect();
    let tcp = std::fs::read_to_string("/proc/self/net/tcp").unwrap();
    let inodes: HashSet<&str> = tcp.lines().filter_map(|l| l.split_whitespace().nth(9)).collect();
    let is_tcp = |name: &str| {
        let inode = name.strip_prefix("socket:[").and_then(|rest| rest.strip_suffix(']'));
        inode.is_some_and(|inode| inodes.contains(inode))
    };
    names.into_iter().filter(|name| !is_tcp(name)).collect()
}

/// What programs had is gone. There may be less than before: descriptors of a program that ended
/// then may have been open still.
fn has_no_more_than(before: [usize; 2]) {
    let begun = Instant::now();
    loop {
        let now = possessions();
        if now.iter().zip(&before).all(|(now, before)| now <= before) {
            return;
        }
        let late = begun.elapsed() > GONE;
        assert!(
            !late,
            "descriptors and threads: {now:?}, more than {before:?}: {:?}",
            descriptors()
        );
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Raises the limit of descriptors; returns how many there may be.
fn may_have(descriptors: usize) -> usize {
    let now = getrlimit(Resource::Nofile);
    let wanted = Some(descriptors as u64);
    for maximum in [wanted.max(now.maximum), now.maximum] {
        let current = wanted.min(maximum);
        if setrlimit(Resource::Nofile, Rlimit { current, maximum }).is_ok() {
            break;
        }
    }
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    usize::try_from(limit).unwrap_or(usize::MAX)
}

#[test]
fn ten_thousand_sockets_of_two_hundred_processes() {
    let _alone = alone();
    let limit = may_have(2 * PROCESSES * SOCKETS[0] + CHANNELS);
    let each = SOCKETS[0].min((limit.saturating_sub(CHANNELS)) / 2 / PROCESSES);
    if each < SOCKETS[0] {
        skipped::because(format!("{each} sockets for each process: {limit} descriptors at most"));
    }
    if each < SOCKETS[1] {
        return;
    }
    let scene = Scene::new();
    scene.runs("plain.py");
    let before = possessions();
    let numbers = [PROCESSES, each].map(|n| n.to_string());
    let mut program = scene.command("python3");
    program.arg(scene::script("many.py")).args(&scene.addresses).args(&numbers);
    let mut program = program.stdin(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    let mut out = BufReader::new(program.stdout.take().unwrap());
    out.read_line(&mut line).unwrap();
    let sockets = scene.driver.with_core(|core, _| core.info()).sockets.len();
    drop((program.stdin.take(), out));
    let mut errors = String::new();
    program.stderr.take().unwrap().read_to_string(&mut errors).unwrap();
    assert!(program.wait().unwrap().success() && line == "all\n", "{line}{errors}");
    assert_eq!(sockets, PROCESSES * each);
    scene.is_empty_again();
    has_no_more_than(before);
    scene.runs("plain.py");
}

fn processes_are_killed(kills: &str, seconds: &str) {
    let scene = Scene::new();
    scene.runs("plain.py");
    let before = possessions();
    // Those that nothing may happen to: one by one, and as fast as they can.
    let steady = scene.start("steady.py", &[seconds]);
    let [one, other] = &scene.addresses;
    let flows =
        [(one, other, "4900"), (other, one, "4900"), (one, other, "4901"), (other, one, "4901")]
            .map(|(own, peer, port)| (&scene, &**own, &**peer, port));
    let flows = Flows::begin(seconds, &flows);
    finish(scene.start("killed.py", &[kills]), "killed.py");
    finish(steady, "steady.py");
    flows.finish();
    scene.is_empty_again();
    has_no_more_than(before);
    scene.runs("plain.py");
}

#[test]
fn killed_senders_lose_nothing_of_others_and_leave_nothing() {
    let _alone = alone();
    processes_are_killed(KILLS[0], "6");
}

#[test]
#[ignore = "half a minute"]
fn a_thousand_killed_senders_lose_nothing_of_others_and_leave_nothing() {
    let _alone = alone();
    processes_are_killed(KILLS[1], "20");
}
