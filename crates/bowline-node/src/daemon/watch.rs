//! What a node tells while it runs: to its log, its service manager and its watchdog.

use std::{
    collections::BTreeSet,
    os::unix::net::UnixStream,
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use bowline::rds::Node;
use bowline_rds::{Event, PathState};

use super::services::Running;
use crate::{
    disks::HostDisks, leases::Leases, log::stamp, programs::Programs, service_manager::Supervisor,
    signals::Stop,
};

/// Time between looks at what happened.
const EVENT_PAUSE: Duration = Duration::from_secs(1);

/// What is watched while the node runs.
pub(super) struct Watched<'a> {
    pub(super) node: &'a Node,
    pub(super) services: &'a [Running],
    pub(super) programs: Option<&'a Programs>,
    pub(super) disks: &'a HostDisks,
}

/// Tells of the node until a stop is requested, until no program is left that the node was started
/// for, or until another node asks for its place: returns the connection to it. Reads sizes of
/// exports anew when asked to. The watchdog hears of it after each look, for which the node has to
/// answer: one that is stuck is not kept alive.
pub(super) fn watch(
    watched: &Watched<'_>,
    mut leases: Option<&mut Leases>,
    stop: &Stop,
    hangups: &AtomicBool,
    supervisor: &Supervisor,
) -> Option<UnixStream> {
    let mut shown = watched.status();
    supervisor.ready(&shown);
    loop {
        let time = supervisor.pause(EVENT_PAUSE);
        // What fails here is tried again.
        match (watched.programs, &leases) {
            (Some(programs), Some(leases)) => {
                let _ = stop.wait_for_any([programs.successor_bell(), leases.bell()], time);
            }
            (Some(programs), None) => {
                let _ = stop.wait_for_any([programs.successor_bell()], time);
            }
            (None, _) => {
                stop.wait(Some(time));
            }
        }
        watched.log();
        // A successor comes before the end: else nobody serves the programs.
        if let Some(successor) = watched.programs.and_then(Programs::take_successor) {
            return Some(successor);
        }
        if stop.asked() {
            return None;
        }
        if leases.as_mut().is_some_and(|leases| leases.is_over(watched.has_sockets())) {
            say!("no program is left");
            return None;
        }
        // Relaxed: the flag publishes nothing but itself.
        if hangups.swap(false, Ordering::Relaxed) {
            supervisor.reloading();
            watched.disks.resize();
            supervisor.ready(&shown);
        }
        let status = watched.status();
        if shown != status {
            supervisor.status(&status);
            shown = status;
        }
        supervisor.beat();
    }
}

impl Watched<'_> {
    /// Tells whether programs have sockets.
    fn has_sockets(&self) -> bool {
        !self.node.driver().with_core(|core, _| core.info_without_messages()).sockets.is_empty()
    }

    /// Returns how many peers and disks there are, in one line.
    fn status(&self) -> String {
        let info = self.node.driver().with_core(|core, _| core.info_without_messages());
        let up = info.paths.iter().filter(|path| path.state == PathState::Up);
        let up: BTreeSet<_> = up.map(|path| path.remote).collect();
        let all: BTreeSet<_> = info.paths.iter().map(|path| path.remote).collect();
        let disks = self.disks.status();
        format!("serving; {} of {} peers connected{disks}", up.len(), all.len())
    }

    /// Prints what happened since the last look: to peers, one line for all paths to a peer, and to
    /// disks, and what services dropped.
    fn log(&self) {
        self.disks.log();
        if let Some(programs) = self.programs {
            programs.log();
        }
        for Running { place, service, dropped, .. } in self.services {
            let count = dropped.swap(0, Ordering::Relaxed);
            if count > 0 {
                say!(
                    "{} on {place}: {count} replies dropped: the clients do not read",
                    service.name()
                );
            }
        }
        let mut lines: Vec<(String, u32)> = Vec::new();
        for event in self.node.events() {
            let line = match event {
                Event::PathUp { remote, .. } => format!("peer {remote}: paths up"),
                Event::PathDown { remote, why: Some(why), .. } => {
                    format!("peer {remote}: paths down, {why}")
                }
                Event::PathDown { remote, .. } => format!("peer {remote}: paths down"),
                Event::CannotConnect { remote, why, .. } => {
                    format!("peer {remote}: cannot connect, {why}")
                }
                Event::Misbehaved { remote, what } => format!("peer {remote} broke a rule: {what}"),
                Event::PeerRestarted { remote } => format!("peer {remote} has restarted"),
                Event::PeerEnded { remote, .. } => format!("peer {remote} has shut down"),
                Event::Refused { remote, why } => {
                    format!("peer {remote}: connection refused, {why}")
                }
                _ => continue,
            };
            match lines.iter_mut().find(|(known, _)| *known == line) {
                Some((_, count)) => *count += 1,
                None => lines.push((line, 1)),
            }
        }
        for (line, count) in lines {
            say_of_peer!("{}{line} ({count})", stamp());
        }
    }
}
