//! Trials, step by step, and their judgement.

use bowline_rtrs::PathId;
use bowline_rtrs::client::PathState;
use bowline_rtrs::server::PathState as ServerPath;
use bowline_wire::rtrs::SessionName;

use super::{Phase, World};
use crate::engine::queue::{MS, SEC};
use crate::roce::host::Host;
use crate::rtrs::client::Client;
use crate::rtrs::context::Event;
use crate::rtrs::process::Process;
use crate::rtrs::reach::{self, FaultClass, Misdeed};
use crate::rtrs::server::Server;
use crate::rtrs::trial::{Trial, TrialKind};

/// How late a sign of active may be in nanoseconds: a device goes on sending what its program has
/// posted.
const LATE: u64 = 5 * SEC;
/// Nanoseconds within which a server must have closed, including storage and silent clients.
const CLOSE_MAX: u64 = 120 * SEC;
/// Interval in nanoseconds at which the trial checks that.
const LOOK: u64 = 10 * MS;

/// The state of a trial.
#[derive(Debug)]
pub(crate) enum Step {
    Begins(Trial),
    /// This machine has been silent since `since`, during `boot`; `paths` to it were connected.
    Silent {
        node: usize,
        since: u64,
        boot: u32,
        paths: Vec<Watched>,
    },
    /// The server has been closing since `since`, during `boot`.
    Closing {
        since: u64,
        boot: u32,
        away: u64,
    },
    /// The server's machine starts again, unless the run is over.
    Starts,
}

/// A path to a silent machine, as seen by the machine at its other end, during that machine's
/// `boot`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Watched {
    node: usize,
    boot: u32,
    path: PathId,
}

impl World {
    pub(super) fn begin_trials(&mut self) {
        for trial in self.plan.trials.clone() {
            self.base.schedule(trial.at, Event::Trial(Step::Begins(trial)));
        }
    }

    pub(super) fn trial(&mut self, step: Step) {
        match step {
            Step::Begins(Trial { what: TrialKind::Silence { node }, .. }) => self.fall_silent(node),
            Step::Begins(Trial { what: TrialKind::Restart { away }, .. }) => {
                self.begin_restart(away);
            }
            Step::Begins(Trial { what: TrialKind::Mute { node, device }, .. }) => {
                self.fall_mute(node, device);
            }
            Step::Silent { node, since, boot, paths } => {
                let process = self.process(node);
                if process.alive && process.boot == boot {
                    self.judge_silence(node, since, &paths);
                }
            }
            Step::Closing { since, boot, away } => self.go_on_closing(since, boot, away),
            Step::Starts if self.is_before_end() => self.boot(0),
            Step::Starts => {}
        }
    }

    /// Records the coverage of a fault for the clients that a machine affects.
    fn trial_faults(&mut self, class: FaultClass, node: usize) {
        let mine = |client: &&Client| node == 0 || client.number + 1 == node;
        for client in self.clients.iter().filter(mine) {
            reach::fault(&mut self.base.coverage, class, client);
        }
    }

    /// Longest silence of a peer that is not dead, in nanoseconds [RT-60], [RT-61].
    pub(super) fn patience(&self) -> u64 {
        let (interval, missed_max, _) = self.plan.heartbeat;
        interval * u64::from(missed_max + 2)
    }

    fn fall_silent(&mut self, node: usize) {
        if self.phase != Phase::Active || !self.process(node).alive {
            return;
        }
        let now = self.base.now;
        let patience = self.patience() + LATE;
        self.base.stats.silences += 1;
        self.base.note([40, node as u64, patience], || format!("machine {node} falls silent"));
        let paths = self.paths_to(node);
        self.trial_faults(FaultClass::Silent, node);
        let mut process = std::mem::replace(self.process(node), Process::new(node, 0));
        process.fall_silent(&mut self.base, patience + SEC);
        let boot = process.boot;
        *self.process(node) = process;
        let step = Step::Silent { node, since: now, boot, paths };
        self.base.schedule(patience, Event::Trial(step));
    }

    /// The connected paths to a machine, as its peers see them.
    fn paths_to(&self, node: usize) -> Vec<Watched> {
        let mut paths = Vec::new();
        if let Some(client) = node.checked_sub(1) {
            let Some(running) = &self.server.running else { return paths };
            let name = format!("client-{client}");
            let named = |of: &SessionName| of.as_str() == name;
            let sessions = running.sessions.sessions();
            let sessions = sessions.filter(|session| session.name.as_ref().is_some_and(named));
            let all = sessions.flat_map(|session| session.paths);
            let connected = all.filter(|path| path.state == ServerPath::Connected);
            let boot = self.server.process.boot;
            paths.extend(connected.map(|path| Watched { node: 0, boot, path: path.path }));
            return paths;
        }
        for client in &self.clients {
            let Some(active) = &client.active else { continue };
            let connected = active.session.paths().filter(|p| p.state == PathState::Connected);
            let (node, boot) = (client.number + 1, client.process.boot);
            paths.extend(connected.map(|path| Watched { node, boot, path: path.id }));
        }
        paths
    }

    /// Checks that no machine still has a path to one that was silent for so long, unless it was
    /// stalled itself.
    fn judge_silence(&mut self, silent: usize, since: u64, before: &[Watched]) {
        let now = self.paths_to(silent);
        for &Watched { node, boot, path } in before {
            let same = |one: &Watched| (one.node, one.boot, one.path) == (node, boot, path);
            if now.iter().any(same) && !self.process(node).was_stalled(since) {
                self.base.fail(|| {
                    format!(
                        "machine {node} keeps {path:?} to machine {silent}, silent since {since} ns"
                    )
                });
            }
            self.base.stats.silences_noticed += 1;
            reach::misdeed(&mut self.base.coverage, Misdeed::Noticed);
        }
    }

    /// Makes a device fail without reporting it.
    fn fall_mute(&mut self, node: usize, device: usize) {
        if self.phase != Phase::Active {
            return;
        }
        self.trial_faults(FaultClass::Mute, node);
        let span = self.spans.0[node].clone();
        let host = span.start + device % span.len();
        let count = self.hosts[host].mutes.fall_mute();
        self.base.stats.muted += count as u64;
        self.base.note([42, host as u64, count as u64], || {
            format!("host {host}: {count} queue pairs fall mute")
        });
    }

    fn begin_restart(&mut self, away: u64) {
        if self.phase != Phase::Active || !self.server.process.alive {
            return;
        }
        self.base.stats.restarts += 1;
        reach::misdeed(&mut self.base.coverage, Misdeed::Restart);
        self.base.note([41, away, 0], || "the server closes, to start again".into());
        self.server(Server::close);
        let open = self.server.running.iter().flat_map(|running| running.sessions.sessions());
        let open = open.flat_map(|session| session.paths);
        if let Some(path) = { open }.find(|path| path.state == ServerPath::Connected) {
            self.base.fail(|| format!("the server closes, and keeps {path:?}"));
        }
        let (since, boot) = (self.base.now, self.server.process.boot);
        self.go_on_closing(since, boot, away);
    }

    pub(super) fn is_before_end(&self) -> bool {
        matches!(self.phase, Phase::Active | Phase::Draining)
    }

    /// Waits until the server has closed. If its machine has died meanwhile there is nothing to
    /// wait for; the end of the run checks the rest.
    fn go_on_closing(&mut self, since: u64, boot: u32, away: u64) {
        if !self.is_before_end() || self.server.process.boot != boot {
            return;
        }
        let closed = self.server.running.as_ref().is_none_or(|running| running.closed);
        if !closed {
            if self.base.now - since > CLOSE_MAX {
                self.base.fail(|| "the server does not close, to start again".into());
            }
            return self.base.schedule(LOOK, Event::Trial(Step::Closing { since, boot, away }));
        }
        self.server(Server::end);
        let span = self.spans.0[0].clone();
        self.hosts[span].iter_mut().for_each(Host::stop);
        self.server.process.stop();
        self.base.schedule(away, Event::Trial(Step::Starts));
    }
}
