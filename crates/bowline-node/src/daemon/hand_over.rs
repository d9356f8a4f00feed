//! One node goes on in another's place.

use std::{
    io::{self, Read, Write},
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::UnixStream,
    },
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use bowline::rds::Node;
use bowline_base::Errno;
use bowline_host::{HandOver, HostState, Predecessor, Sent};

use super::sandbox::Places;
use crate::{
    Failure, Outcome,
    over_rdma::SoftPort,
    programs::{self, Programs},
    service_manager::Supervisor,
};

/// Names under which descriptors are kept by a service manager.
pub(super) const STORED: [&str; 2] = [STATE, PROGRAMS];
const STATE: &str = "bowline-state";
const PROGRAMS: &str = "bowline-programs";

/// State that this process inherits from another node, or from itself.
pub(super) struct InheritedState {
    pub(super) host: HostState,
    /// Listeners of the node.
    pub(super) listeners: Vec<OwnedFd>,
    /// State of the node.
    pub(super) state: Box<dyn Read>,
    pub(super) source: StateSource,
}

/// Where the state comes from; that copy is dropped at [`commit`](Self::commit).
pub(super) enum StateSource {
    /// A running node that serves programs at this path, and waits.
    OtherNode(Predecessor, PathBuf),
    /// The service manager's store of descriptors.
    FdStore,
    /// This process: a hand-over failed.
    Reclaimed,
    /// This process: the next node has begun with the state, and has ended before it served.
    Lost,
}

impl InheritedState {
    /// Logs whose place this process takes.
    pub(super) fn announce(&self) {
        match &self.source {
            StateSource::OtherNode(_, place) => {
                say!("replacing the node that served programs at {}", place.display());
            }
            StateSource::FdStore => say!("going on with the programs of before"),
            StateSource::Reclaimed | StateSource::Lost => {}
        }
    }

    /// The node whose place this process takes, which is to hear when this one serves.
    pub(super) fn predecessor(&self) -> Option<Predecessor> {
        match &self.source {
            StateSource::OtherNode(predecessor, _) => Some(predecessor.clone()),
            _ => None,
        }
    }
}

impl StateSource {
    /// Drops the source's copy, since this process begins to change the state.
    pub(super) fn commit(self, supervisor: &Supervisor) -> io::Result<()> {
        match self {
            Self::OtherNode(predecessor, _) => predecessor.dismiss(),
            Self::FdStore => {
                forget(supervisor);
                Ok(())
            }
            Self::Reclaimed | Self::Lost => Ok(()),
        }
    }
}

/// Saved state that a node starts with, and what it calls when it begins.
pub(super) struct SavedNode<'a> {
    pub(super) state: Box<dyn Read>,
    pub(super) listeners: Vec<OwnedFd>,
    pub(super) commit: Box<dyn FnOnce() -> io::Result<()> + 'a>,
}

fn opened(all: HandOver, source: StateSource) -> io::Result<InheritedState> {
    let (host, listeners, state) = all.open()?;
    Ok(InheritedState { host, listeners, state: Box::new(state), source })
}

/// How long a node may listen that ends each connection.
const END_TIME: Duration = Duration::from_secs(2);
const END_PAUSE: Duration = Duration::from_millis(20);

/// Asks the node at a place for everything. If that one ends first, its place is free.
fn asked(place: &Path) -> io::Result<Option<(HandOver, Predecessor)>> {
    let (mut is_gone, until) = (false, Instant::now() + END_TIME);
    loop {
        match HandOver::receive(place) {
            Err(error) if HandOver::is_gone(&error) && Instant::now() < until => {
                is_gone = true;
                thread::sleep(END_PAUSE);
            }
            Ok(None) if is_gone => {
                note!(
                    "bowline node: the node at {} has ended before it handed over; its programs \
                     have lost their sockets",
                    place.display()
                );
                return Ok(None);
            }
            received => return received,
        }
    }
}

/// Receives the state of the node that serves programs at `place`, or at the default one; that node
/// ends when this one begins. `None`: there is no such node, or none any more.
pub(super) fn receive(place: Option<&Path>) -> Outcome<Option<InheritedState>> {
    let place = place.map_or_else(programs::default_path, Path::to_owned);
    let received = asked(&place).map_err(|error| {
        let what = match error.raw_os_error().map(Errno) {
            Some(Errno::EPROTONOSUPPORT) => {
                "it is of a version that cannot hand over to this one; stop it and start this one, \
                 and start its programs anew"
                    .to_owned()
            }
            Some(Errno::EACCES) => "it belongs to another user".to_owned(),
            Some(Errno::EALREADY) => "it is handing over to another one".to_owned(),
            Some(Errno::EAGAIN) => "it has not answered for 10 s".to_owned(),
            _ => error.to_string(),
        };
        Failure::failed(format!("cannot replace the node at {}: {what}", place.display()))
    })?;
    let Some((all, predecessor)) = received else { return Ok(None) };
    let inherited =
        opened(all, StateSource::OtherNode(predecessor, place.clone())).map_err(|error| {
            Failure::failed(format!("what the node at {} handed over: {error}", place.display()))
        })?;
    Ok(Some(inherited))
}

/// Takes what an earlier process of this service has left with its manager; `None`: nothing, or
/// nothing that can be used.
pub(super) fn stored(stored: Vec<(String, OwnedFd)>) -> Option<InheritedState> {
    if stored.is_empty() {
        return None;
    }
    let (mut states, programs): (Vec<_>, Vec<_>) =
        stored.into_iter().partition(|(name, _)| name == STATE);
    let programs = programs.into_iter().map(|(_, descriptor)| descriptor).collect();
    let inherited = match states.pop() {
        Some((_, state)) => opened(HandOver { state, programs }, StateSource::FdStore),
        None => Err(io::ErrorKind::NotFound.into()),
    };
    match inherited {
        Ok(inherited) => Some(inherited),
        Err(error) => {
            note!("bowline node: programs have lost their sockets: what was kept: {error}");
            None
        }
    }
}

/// The manager need not keep what an earlier process has left.
pub(super) fn forget(supervisor: &Supervisor) {
    STORED.iter().for_each(|name| supervisor.forget(name));
}

/// What is left of a hand-over that has failed: this process resumes.
pub(super) fn reclaimed((all, source): (HandOver, StateSource)) -> Outcome<InheritedState> {
    opened(all, source).map_err(|error| {
        Failure::failed(format!("cannot go on: {error}; programs have lost their sockets"))
    })
}

/// Who receives the state of a node that ends.
pub(super) enum Successor {
    /// Another node.
    Node(UnixStream),
    /// The service manager, for the next process of the service.
    Manager,
}

/// Sends the state of this node to its successor; returns it if that one does not serve with it.
///
/// The soft RDMA device ends before, since its UDP port is for one process at a time: the successor
/// opens one of its own.
pub(super) fn send(
    node: Node,
    soft: SoftPort,
    programs: Programs,
    places: &mut Places,
    successor: Successor,
    supervisor: &Supervisor,
) -> Outcome<Option<(HandOver, StateSource)>> {
    let to = match successor {
        Successor::Node(_) => "another node",
        Successor::Manager => "the service manager",
    };
    say!("handing over to {to}");
    let all = || -> io::Result<HandOver> {
        // The manager's next process makes its own: until then commands are told that no node runs.
        let others = match successor {
            Successor::Node(_) => places.for_successor()?,
            Successor::Manager => Vec::new(),
        };
        let mut all = programs.hand_over(others)?;
        let mut out = all.writer()?;
        let listeners = node.hand_over(&mut out)?;
        out.flush()?;
        drop((out, node));
        soft.wait_until_free();
        all.programs.extend(listeners);
        Ok(all)
    };
    let all = all().map_err(|error| {
        Failure::failed(format!("cannot hand over: {error}; programs have lost their sockets"))
    })?;
    let sent = match successor {
        Successor::Node(node) => all.send(&node).inspect(|sent| {
            if matches!(sent, Sent::Taken) {
                places.leave();
            }
        }),
        Successor::Manager => {
            supervisor.stopping(Duration::ZERO, "handing over");
            let programs: Vec<_> = all.programs.iter().map(AsFd::as_fd).collect();
            supervisor
                .store(PROGRAMS, &programs)
                .and_then(|()| supervisor.store(STATE, &[all.state.as_fd()]))
                .map(|()| Sent::Taken)
                .inspect_err(|_| forget(supervisor))
        }
    };
    match sent {
        Ok(Sent::Taken) => {
            say!("handed over");
            Ok(None)
        }
        Ok(Sent::Lost) => {
            note!(
                "bowline node: {to} has ended before it served, and this node continues; programs \
                 have lost their sockets"
            );
            Ok(Some((all, StateSource::Lost)))
        }
        Err(error) => {
            note!("bowline node: {to} has not taken over, and this node continues: {error}");
            Ok(Some((all, StateSource::Reclaimed)))
        }
    }
}
