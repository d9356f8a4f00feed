//! The end of a process with disks that are in use: who is cut off, what is finished first, and
//! whether anything was not.

use std::{
    fs,
    path::Path,
    sync::{Arc, mpsc},
    thread,
    time::{Duration, Instant},
};

use bowline_block::{BlockDevice, sync};
use bowline_rnbd::client::State;
use bowline_rnbd_driver::client::Disk;

use super::{client::UNMAP_PATIENCE, front_ends::FrontEnds};
use crate::log::shown;

/// How long requests in flight may take to be answered at the end.
pub(super) const FINISH_PATIENCE: Duration = Duration::from_secs(5);
/// How long the last flush may take.
const FLUSH_PATIENCE: Duration = Duration::from_secs(3);
/// How long all of the end may take, unmapping included.
pub const ENDING_PATIENCE: Duration =
    FINISH_PATIENCE.saturating_add(FLUSH_PATIENCE).saturating_add(UNMAP_PATIENCE);
/// How often it is checked whether requests are still in flight.
const POLL_INTERVAL: Duration = Duration::from_millis(2);

/// A user of a disk, by one of its front ends.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct User {
    pid: u32,
    place: String,
}

impl User {
    /// Returns the name of its process, its id, and where it uses the disk.
    fn text(&self) -> String {
        let name = fs::read_to_string(format!("/proc/{}/comm", self.pid));
        let name = name.map_or_else(|_| "a process".to_owned(), |name| name.trim_end().to_owned());
        format!("{} (pid {}) at {}", shown(&name), self.pid, shown(&self.place))
    }
}

/// Returns who uses a disk by its front ends, as far as the system tells.
pub(super) fn users(name: &str, front_ends: &FrontEnds) -> Vec<User> {
    let at = |kind: &str, path: &Path, pids: Vec<u32>| {
        let place = format!("{kind} {}", path.display());
        pids.into_iter().map(move |pid| User { pid, place: place.clone() })
    };
    let mut all = Vec::new();
    if let Some(nbd) = &front_ends.nbd {
        all.extend(at("nbd", nbd.path(), nbd.peers()));
    }
    if let Some(machines) = &front_ends.vhost_user {
        all.extend(at("vhost-user", machines.path(), machines.peers()));
    }
    if let Some(mount) = front_ends.fuse.as_ref().filter(|mount| mount.opens() > 0) {
        let file = mount.dir().join(name);
        all.extend(at("file", &file, who_has_open(&file)));
    }
    all.dedup();
    all
}

/// Returns the processes that have a file open: those whose descriptors this user may see.
fn who_has_open(file: &Path) -> Vec<u32> {
    let ids = fs::read_dir("/proc").into_iter().flatten().flatten();
    let ids = ids.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let has_open = |id: &u32| {
        let open = fs::read_dir(format!("/proc/{id}/fd")).into_iter().flatten().flatten();
        open.into_iter().any(|entry| fs::read_link(entry.path()).is_ok_and(|to| to == file))
    };
    ids.filter(has_open).collect()
}

/// Says who is cut off from a disk.
pub(super) fn tell(name: &str, users: &[User]) {
    for user in users {
        note!("{name}: cuts off {}", user.text());
    }
}

/// What was not served at the end.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Unserved {
    lines: Vec<String>,
}

impl Unserved {
    /// Tells whether every request was answered, and every write made durable.
    pub const fn is_nothing(&self) -> bool {
        self.lines.is_empty()
    }

    /// Says what was not served.
    pub fn tell(&self) {
        for line in &self.lines {
            note!("{line}");
        }
    }

    /// Makes requests fail that wait for a server that is not connected, and waits until none is in
    /// flight, at most until `end`. What fails of disks that machines have does not count: machines
    /// keep it for the next process.
    pub(super) fn finish(
        &mut self,
        disks: &[Arc<Disk>],
        machines: &[String],
        end: Instant,
        is_in_use: impl Fn() -> bool,
    ) {
        let left =
            |disk: &Arc<Disk>| disk.info().map_or(0, |info| info.in_flight as usize + info.waiting);
        let errors = |disk: &Arc<Disk>| disk.info().map_or(0, |info| info.stats.errors);
        let ended = |disk: &Arc<Disk>| {
            disk.info().map_or(0, |info| {
                let stats = info.stats;
                stats.reads + stats.writes + stats.discards + stats.flushes + stats.errors
            })
        };
        let before: Vec<u64> = disks.iter().map(errors).collect();
        // Users of a file or a block device keep sending: as many as were there have to end.
        let goals: Vec<u64> = disks.iter().map(|disk| ended(disk) + left(disk) as u64).collect();
        let unanswered = |disk: &Arc<Disk>, goal: u64| {
            let late = usize::try_from(goal.saturating_sub(ended(disk))).unwrap_or(usize::MAX);
            late.min(left(disk))
        };
        disks.iter().for_each(|disk| disk.fail_fast());
        let are_left = || disks.iter().zip(&goals).any(|(disk, goal)| unanswered(disk, *goal) > 0);
        while (is_in_use() || are_left()) && Instant::now() < end {
            thread::sleep(POLL_INTERVAL);
        }
        for ((disk, before), goal) in disks.iter().zip(before).zip(&goals) {
            let (name, count) = (disk.local_name(), unanswered(disk, *goal));
            if count > 0 {
                self.lines.push(format!("{name}: requests not answered in time: {count}"));
            }
            let failed = errors(disk).saturating_sub(before);
            if failed > 0 && !machines.iter().any(|disk| disk == name) {
                self.lines.push(format!("{name}: requests that failed at the end: {failed}"));
            }
        }
    }

    /// Makes durable what was written to these disks, if the server answers in time; with
    /// `is_inherited` a process before this one may have written.
    pub(super) fn flush(&mut self, disks: &[Arc<Disk>], is_inherited: bool) {
        let is_written = |disk: &&Arc<Disk>| {
            disk.info().is_some_and(|info| {
                let is_written = info.stats.writes + info.stats.discards > 0;
                info.state == State::Open && (is_written || is_inherited)
            }) && disk.limits().write_cache
        };
        let (sender, ended) = mpsc::channel();
        let mut pending: Vec<String> = Vec::new();
        for disk in disks.iter().filter(is_written) {
            let (sender, flushed) = (sender.clone(), Arc::clone(disk));
            let flush = move || {
                let result = sync::flush(&*flushed);
                // Nobody waits any more when it took too long.
                let _ = sender.send((flushed.local_name().to_owned(), result));
            };
            pending.push(disk.local_name().to_owned());
            // Without a thread it counts as not flushed.
            let _ = thread::Builder::new().name("flush".to_owned()).spawn(flush);
        }
        drop(sender);
        let end = Instant::now() + FLUSH_PATIENCE;
        while !pending.is_empty() {
            let left = end.saturating_duration_since(Instant::now());
            let Ok((name, result)) = ended.recv_timeout(left) else { break };
            pending.retain(|disk| *disk != name);
            if let Err(errno) = result {
                let why = errno.strerror();
                self.lines.push(format!("{name}: what was written was not made durable: {why}"));
            }
        }
        let late = pending.iter().map(|name| {
            format!("{name}: what was written was not made durable: the server does not answer")
        });
        self.lines.extend(late);
    }
}
