//! One node goes on in another's place.

use std::{
    io::{self, Read, Write},
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::UnixStream,
    },
    path::Path,
    time::Duration,
};

use bowline::rds::Node;
use bowline_base::Errno;
use bowline_host::{HandOver, HostState};

use crate::cli::{
    Failure, Outcome,
    common::supervisor::Supervisor,
    rds::programs::{self, Programs},
};

/// Names under which descriptors are kept by a service manager.
pub(super) const STORED: [&str; 2] = [STATE, PROGRAMS];
const STATE: &str = "bowline-state";
const PROGRAMS: &str = "bowline-programs";

/// Takes what the node has that serves programs at this place, or at the default one; that node
/// ends. `None`: there is no such node, or no place is given.
pub(super) fn receive(place: Option<Option<&Path>>) -> Outcome<Option<(HostState, impl Read)>> {
    let Some(place) = place else { return Ok(None) };
    let place = place.map_or_else(programs::default_path, Path::to_owned);
    let taken = HandOver::receive(&place).map_err(|error| {
        let what = match error.raw_os_error().map(Errno) {
            Some(Errno::EPROTONOSUPPORT) => {
                "it is of a version that cannot hand over to this one; stop it and start this one, \
                 and start its programs anew"
                    .to_owned()
            }
            Some(Errno::EACCES) => "it belongs to another user".to_owned(),
            _ => error.to_string(),
        };
        Failure::failed(format!("cannot replace the node at {}: {what}", place.display()))
    })?;
    let opened = taken.map(HandOver::open).transpose().map_err(|error| {
        Failure::failed(format!("what the node at {} handed over: {error}", place.display()))
    })?;
    if opened.is_some() {
        say!("taking the place of the node that served programs at {}", place.display());
    }
    Ok(opened)
}

/// Takes what an earlier process of this service has left with its manager; `None`: nothing, or
/// nothing that can be used.
pub(super) fn stored(
    stored: Vec<(String, OwnedFd)>,
    supervisor: &Supervisor,
) -> Option<(HostState, impl Read)> {
    if stored.is_empty() {
        return None;
    }
    supervisor.forget(STATE);
    supervisor.forget(PROGRAMS);
    let (mut states, programs): (Vec<_>, Vec<_>) =
        stored.into_iter().partition(|(name, _)| name == STATE);
    let programs = programs.into_iter().map(|(_, descriptor)| descriptor).collect();
    let opened = match states.pop() {
        Some((_, state)) => HandOver { state, programs }.open(),
        None => Err(io::ErrorKind::NotFound.into()),
    };
    match opened {
        Ok(opened) => {
            say!("going on with the programs of before");
            Some(opened)
        }
        Err(error) => {
            note!("bowline node: programs have lost their sockets: what was kept: {error}");
            None
        }
    }
}

/// Who gets what a node hands over.
pub(super) enum Keeper<'a> {
    /// The node that goes on.
    Node(UnixStream),
    /// The service manager, for the next process of the service.
    Manager(&'a Supervisor),
}

/// Gives all that this node has to a keeper.
pub(super) fn send(node: &Node, programs: Programs, keeper: Keeper<'_>) -> Outcome {
    let to = match keeper {
        Keeper::Node(_) => "another node",
        Keeper::Manager(_) => "the service manager",
    };
    say!("handing over to {to}");
    let all = || -> io::Result<()> {
        let all = programs.hand_over()?;
        let mut out = all.writer()?;
        node.hand_over(&mut out)?;
        out.flush()?;
        drop(out);
        match keeper {
            Keeper::Node(successor) => all.send(successor),
            Keeper::Manager(supervisor) => {
                supervisor.stopping(Duration::ZERO, "handing over");
                let programs: Vec<_> = all.programs.iter().map(AsFd::as_fd).collect();
                supervisor.store(PROGRAMS, &programs)?;
                supervisor.store(STATE, &[all.state.as_fd()])
            }
        }
    };
    all().map_err(|error| {
        Failure::failed(format!("cannot hand over: {error}; programs have lost their sockets"))
    })?;
    say!("handed over");
    Ok(())
}
