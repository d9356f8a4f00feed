//! The end of a process with disks that are in use: who is cut off, what is finished first, and
//! whether anything was not [NB-73].

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    sync::{Arc, mpsc},
    thread,
    time::{Duration, Instant},
};

use bowline_block::{BlockDevice, sync};
use bowline_rnbd::client::{DevInfo, State};
use bowline_rnbd_driver::client::Disk;

use super::{client::UNMAP_PATIENCE, front_ends::FrontEnds};
use crate::{Failure, Outcome, log::shown};

/// How long requests in flight may take to be answered at the end.
pub(super) const FINISH_PATIENCE: Duration = Duration::from_secs(5);
/// How long all front ends together may take to close, and commands in progress to end: as long as
/// a block device takes to be opened.
pub(super) const CLOSE_PATIENCE: Duration = Duration::from_secs(6);
/// How long the last flush may take.
const FLUSH_PATIENCE: Duration = Duration::from_secs(3);
/// How long all of the end may take, unmapping included.
pub const ENDING_PATIENCE: Duration = FINISH_PATIENCE
    .saturating_add(CLOSE_PATIENCE)
    .saturating_add(FLUSH_PATIENCE)
    .saturating_add(UNMAP_PATIENCE);
/// How often it is checked whether requests are still in flight.
const POLL_INTERVAL: Duration = Duration::from_millis(2);

/// Who uses disks by their front ends.
#[derive(Debug, Default)]
pub(super) struct Users {
    /// Clients of sockets: the disk, where they use it, and their process.
    clients: Vec<(String, String, u32)>,
    /// Files of disks that are open.
    files: Vec<(String, PathBuf)>,
    /// Block devices that are in use: the kernel does not tell by whom.
    devices: Vec<PathBuf>,
}

impl Users {
    /// Adds those of a disk, as far as the front ends know them: it takes no time.
    pub(super) fn add(&mut self, disk: &str, front_ends: &FrontEnds) {
        let mut at = |kind: &str, path: &Path, pids: Vec<u32>| {
            let place = format!("{kind} {}", path.display());
            self.clients.extend(pids.into_iter().map(|pid| (disk.to_owned(), place.clone(), pid)));
        };
        if let Some(nbd) = &front_ends.nbd {
            at("nbd", nbd.path(), nbd.peers());
        }
        if let Some(machines) = &front_ends.vhost_user {
            at("vhost-user", machines.path(), machines.peers());
        }
        if let Some(mount) = front_ends.fuse.as_ref().filter(|mount| mount.opens() > 0) {
            self.files.push((disk.to_owned(), mount.dir().join(disk)));
        }
    }

    /// Adds the users of a block device.
    pub(super) fn add_device(&mut self, device: &Path) {
        self.devices.push(device.to_owned());
    }

    /// Returns a text for each user of a disk: the name of its process and its id, as far as the
    /// system tells, and where it uses the disk. It looks once at the descriptors of all processes,
    /// which takes a while: no lock should be held over it.
    pub(super) fn texts(&self) -> Vec<(String, String)> {
        let files: Vec<&Path> = self.files.iter().map(|(_, file)| file.as_path()).collect();
        let holders = holders(Path::new("/proc"), &files);
        let text = |pid: u32, place: &str| {
            let name = fs::read_to_string(format!("/proc/{pid}/comm"));
            let name =
                name.map_or_else(|_| "a process".to_owned(), |name| name.trim_end().to_owned());
            format!("{} (pid {pid}) at {}", shown(&name), shown(place))
        };
        let clients = self.clients.iter().map(|(disk, place, pid)| (disk, text(*pid, place)));
        let files = holders.into_iter().map(|(pid, at)| {
            let (disk, file) = &self.files[at];
            (disk, text(pid, &format!("file {}", file.display())))
        });
        let mut all: Vec<(String, String)> =
            clients.chain(files).map(|(disk, text)| (disk.clone(), text)).collect();
        all.dedup();
        all
    }

    /// Says who is cut off.
    pub(super) fn tell(&self) {
        for (disk, user) in self.texts() {
            note!("{disk}: cuts off {user}");
        }
    }

    /// Says in one line who uses the disks, as a reason for not changing them.
    pub(super) fn line(&self) -> String {
        let mut all: Vec<String> = self.texts().into_iter().map(|(_, text)| text).collect();
        let files = self.files.iter().map(|(_, file)| file);
        let hidden = files.filter(|file| {
            let place = format!("file {}", file.display());
            !all.iter().any(|text| text.ends_with(&place))
        });
        let hidden: Vec<String> =
            hidden.map(|file| format!("a program at file {}", file.display())).collect();
        all.extend(hidden);
        let devices = self.devices.iter();
        all.extend(devices.map(|path| format!("a program or a mount at {}", path.display())));
        all.join(", ")
    }
}

/// Returns the processes that have one of these files open, each with the index of the file: those
/// whose descriptors this user may see in `proc`, which is looked through once.
fn holders(proc: &Path, files: &[&Path]) -> BTreeSet<(u32, usize)> {
    let mut found = BTreeSet::new();
    if files.is_empty() {
        return found;
    }
    for entry in fs::read_dir(proc).into_iter().flatten().flatten() {
        let id = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok());
        let Some(id) = id else { continue };
        let open = fs::read_dir(entry.path().join("fd")).into_iter().flatten().flatten();
        let targets = open.filter_map(|entry| fs::read_link(entry.path()).ok());
        found.extend(targets.filter_map(|to| {
            let at = files.iter().position(|file| *file == to)?;
            Some((id, at))
        }));
    }
    found
}

/// Returns what is known of a disk if changes of it were answered that no flush has made durable;
/// with `is_inherited`, a process before this one has made some.
fn unflushed_info(disk: &Disk, is_inherited: bool) -> Option<DevInfo> {
    let limits = disk.limits();
    let info = disk.info().filter(|_| limits.write_cache)?;
    let may_be = is_inherited && !limits.read_only && info.stats.flushes == 0;
    (info.is_unflushed || may_be).then_some(info)
}

/// Tells whether changes of a disk were answered that no flush has made durable.
pub(super) fn is_unflushed(disk: &Disk, is_inherited: bool) -> bool {
    unflushed_info(disk, is_inherited).is_some()
}

/// Tells whether all changes that a disk was ever given have ended, and are durable.
pub(super) fn is_durable(disk: &Disk, is_inherited: bool) -> bool {
    disk.info().is_some_and(|info| info.in_flight == 0 && info.waiting == 0)
        && !is_unflushed(disk, is_inherited)
}

/// Returns a line for each disk of which something may be lost if the process ends now.
pub(super) fn unflushed(disks: &[Arc<Disk>], is_inherited: impl Fn(&Disk) -> bool) -> Vec<String> {
    let all = disks.iter().filter(|disk| is_unflushed(disk, is_inherited(disk)));
    let line = |disk: &Arc<Disk>| {
        let name = disk.local_name();
        format!("{name}: what was written was not made durable: a second signal cut off the flush")
    };
    all.map(line).collect()
}

/// What was not served at the end.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Unserved {
    lines: Vec<String>,
    /// Disks that machines have, which outlive this process: they keep what fails here for the next
    /// one, and flush by themselves what they have written.
    machines: Vec<String>,
}

impl Extend<String> for Unserved {
    fn extend<T: IntoIterator<Item = String>>(&mut self, lines: T) {
        self.lines.extend(lines);
    }
}

impl Unserved {
    /// Returns a failure unless every request was answered, and every write made durable.
    ///
    /// # Errors
    /// Something was not served.
    pub fn outcome(&self) -> Outcome {
        if self.lines.is_empty() {
            Ok(())
        } else {
            Err(Failure::failed("not everything was served"))
        }
    }

    /// Says what was not served.
    pub fn tell(&self) {
        for line in &self.lines {
            note!("{line}");
        }
    }

    /// Returns nothing yet, of an end with these disks that machines have.
    pub(super) fn with_machines(machines: Vec<String>) -> Self {
        Self { lines: Vec::new(), machines }
    }

    /// Makes requests fail that wait for a server that is not connected, and waits until none is in
    /// flight and no disk is in use, at most until `end`. What fails of disks that machines have
    /// does not count.
    pub(super) fn finish(
        &mut self,
        disks: &[Arc<Disk>],
        end: Instant,
        is_in_use: impl Fn(&str) -> bool,
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
        // Clients of sockets do not: what is taken from their sockets only now has to end as well.
        let goals: Vec<u64> = disks.iter().map(|disk| ended(disk) + left(disk) as u64).collect();
        let unanswered = |disk: &Arc<Disk>, goal: u64| {
            if is_in_use(disk.local_name()) {
                return left(disk);
            }
            let late = usize::try_from(goal.saturating_sub(ended(disk))).unwrap_or(usize::MAX);
            late.min(left(disk))
        };
        disks.iter().for_each(|disk| disk.fail_fast());
        let are_left = || {
            let mut all = disks.iter().zip(&goals);
            all.any(|(disk, goal)| is_in_use(disk.local_name()) || unanswered(disk, *goal) > 0)
        };
        while are_left() && Instant::now() < end {
            thread::sleep(POLL_INTERVAL);
        }
        for ((disk, before), goal) in disks.iter().zip(before).zip(&goals) {
            let (name, count) = (disk.local_name(), unanswered(disk, *goal));
            if count > 0 {
                self.lines.push(format!("{name}: requests not answered in time: {count}"));
            }
            let failed = errors(disk).saturating_sub(before);
            if failed > 0 && !self.machines.iter().any(|disk| disk == name) {
                self.lines.push(format!("{name}: requests that failed at the end: {failed}"));
            }
        }
    }

    /// Adds what another part of the end has not served.
    pub(super) fn append(&mut self, other: Self) {
        self.lines.extend(other.lines);
    }

    /// Makes durable what was written to these disks, if the server answers in time;
    /// `is_inherited` returns whether a process before this one has written to a disk.
    pub(super) fn flush(&mut self, disks: &[Arc<Disk>], is_inherited: impl Fn(&Disk) -> bool) {
        let (sender, ended) = mpsc::channel();
        let mut pending: Vec<String> = Vec::new();
        for disk in disks {
            let Some(info) = unflushed_info(disk, is_inherited(disk)) else { continue };
            let name = disk.local_name();
            if info.state != State::Open {
                let line = format!(
                    "{name}: what was written was not made durable: its server is not connected"
                );
                if self.machines.iter().any(|disk| disk == name) {
                    note!("{line}; its machine has yet to flush it");
                } else {
                    self.lines.push(line);
                }
                continue;
            }
            let (sender, flushed) = (sender.clone(), Arc::clone(disk));
            let flush = move || {
                let result = sync::flush(&*flushed);
                // Nobody waits any more when it took too long.
                let _ = sender.send((flushed.local_name().to_owned(), result));
            };
            pending.push(name.to_owned());
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

#[cfg(test)]
mod tests;
