//! One node goes on in another's place.

use std::{
    io::{self, Read, Write},
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::UnixStream,
    },
    path::{Path, PathBuf},
    time::Duration,
};

use bowline::rds::Node;
use bowline_base::Errno;
use bowline_host::{HandOver, HostState, Predecessor};
use bowline_node::{
    Failure, Outcome,
    programs::{self, Programs},
    service_manager::Supervisor,
};

use super::sandbox::Places;
use crate::cli::rds::over_rdma::SoftPort;

/// Names under which descriptors are kept by a service manager.
pub(super) const STORED: [&str; 2] = [STATE, PROGRAMS];
const STATE: &str = "bowline-state";
const PROGRAMS: &str = "bowline-programs";

/// What a node has taken over.
pub(super) struct Taken {
    pub(super) host: HostState,
    /// Listeners of the node.
    pub(super) listeners: Vec<OwnedFd>,
    /// State of the node.
    pub(super) state: Box<dyn Read>,
    pub(super) from: From,
}

/// Who has everything until this process begins.
pub(super) enum From {
    /// The node before, which serves programs at this path, and waits.
    Node(Predecessor, PathBuf),
    /// The manager.
    Store,
    /// This process itself.
    Here,
}

impl Taken {
    /// Tells whose place this process takes.
    pub(super) fn announce(&self) {
        match &self.from {
            From::Node(_, place) => {
                say!("replacing the node that served programs at {}", place.display());
            }
            From::Store => say!("resuming with the programs of the previous process"),
            From::Here => {}
        }
    }
}

impl From {
    /// This process begins, so that what the other one has is out of date.
    pub(super) fn commit(self, supervisor: &Supervisor) -> io::Result<()> {
        match self {
            Self::Node(former, _) => former.dismiss(),
            Self::Store => {
                forget(supervisor);
                Ok(())
            }
            Self::Here => Ok(()),
        }
    }
}

/// What a node starts with, and what it calls when it begins.
pub(super) struct FormerNode<'a> {
    pub(super) state: Box<dyn Read>,
    pub(super) listeners: Vec<OwnedFd>,
    pub(super) commit: Box<dyn FnOnce() -> io::Result<()> + 'a>,
}

fn opened(all: HandOver, from: From) -> io::Result<Taken> {
    let (host, listeners, state) = all.open()?;
    Ok(Taken { host, listeners, state: Box::new(state), from })
}

/// Takes what the node has that serves programs at `place`, or at the default one; that node ends
/// when this one begins. `None`: there is no such node.
pub(super) fn receive(place: Option<&Path>) -> Outcome<Option<Taken>> {
    let place = place.map_or_else(programs::default_path, Path::to_owned);
    let received = HandOver::receive(&place).map_err(|error| {
        let what = match error.raw_os_error().map(Errno) {
            Some(Errno::EPROTONOSUPPORT) => {
                "its version cannot hand over to this one; stop it, start this one, and restart \
                 its programs"
                    .to_owned()
            }
            Some(Errno::EACCES) => "it belongs to another user".to_owned(),
            _ => error.to_string(),
        };
        Failure::failed(format!("cannot replace the node at {}: {what}", place.display()))
    })?;
    let Some((all, former)) = received else { return Ok(None) };
    let taken = opened(all, From::Node(former, place.clone())).map_err(|error| {
        Failure::failed(format!("invalid state from the node at {}: {error}", place.display()))
    })?;
    Ok(Some(taken))
}

/// Takes what an earlier process of this service has left with its manager; `None`: nothing, or
/// nothing that can be used.
pub(super) fn stored(stored: Vec<(String, OwnedFd)>) -> Option<Taken> {
    if stored.is_empty() {
        return None;
    }
    let (mut states, programs): (Vec<_>, Vec<_>) =
        stored.into_iter().partition(|(name, _)| name == STATE);
    let programs = programs.into_iter().map(|(_, descriptor)| descriptor).collect();
    let taken = match states.pop() {
        Some((_, state)) => opened(HandOver { state, programs }, From::Store),
        None => Err(io::ErrorKind::NotFound.into()),
    };
    match taken {
        Ok(taken) => Some(taken),
        Err(error) => {
            note!("bowline node: programs have lost their sockets: invalid stored state: {error}");
            None
        }
    }
}

/// The manager need not keep what an earlier process has left.
pub(super) fn forget(supervisor: &Supervisor) {
    STORED.iter().for_each(|name| supervisor.forget(name));
}

/// Takes back what could not be handed over.
pub(super) fn taken_back(all: HandOver) -> Outcome<Taken> {
    opened(all, From::Here).map_err(|error| {
        Failure::failed(format!("cannot resume: {error}; programs have lost their sockets"))
    })
}

/// Who gets what a node hands over.
pub(super) enum Keeper<'a> {
    /// The node that goes on.
    Node(UnixStream),
    /// The service manager, for the next process of the service.
    Manager(&'a Supervisor),
}

/// Gives all that this node has to a keeper; returns it if that one does not take it.
///
/// The soft RDMA device ends before, since its UDP port is for one process at a time: the keeper
/// opens one of its own.
pub(super) fn send(
    node: Node,
    soft: SoftPort,
    programs: Programs,
    places: &mut Places,
    keeper: Keeper<'_>,
) -> Outcome<Option<HandOver>> {
    let to = match keeper {
        Keeper::Node(_) => "another node",
        Keeper::Manager(_) => "the service manager",
    };
    say!("handing over to {to}");
    let all = || -> io::Result<HandOver> {
        // The manager's next process makes its own: until then commands are told that no node runs.
        let others = match keeper {
            Keeper::Node(_) => places.for_successor()?,
            Keeper::Manager(_) => Vec::new(),
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
    let sent = match keeper {
        Keeper::Node(successor) => all.send(&successor).map(|()| places.leave()),
        Keeper::Manager(supervisor) => {
            supervisor.stopping(Duration::ZERO, "handing over");
            let programs: Vec<_> = all.programs.iter().map(AsFd::as_fd).collect();
            supervisor
                .store(PROGRAMS, &programs)
                .and_then(|()| supervisor.store(STATE, &[all.state.as_fd()]))
                .inspect_err(|_| forget(supervisor))
        }
    };
    match sent {
        Ok(()) => {
            say!("handed over");
            Ok(None)
        }
        Err(error) => {
            note!("bowline node: {to} did not take over, this node resumes: {error}");
            Ok(Some(all))
        }
    }
}
