//! One node goes on in another's place.

use std::{
    io::{self, Read, Write},
    os::unix::net::UnixStream,
    path::Path,
};

use bowline::rds::Node;
use bowline_base::Errno;
use bowline_host::{HandOver, HostState};

use crate::cli::{
    Failure, Outcome,
    rds::programs::{self, Programs},
};

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

/// Gives all that this node has to its successor.
pub(super) fn send(node: &Node, programs: Programs, successor: UnixStream) -> Outcome {
    say!("handing over to another node");
    let all = || -> io::Result<()> {
        let all = programs.hand_over()?;
        let mut out = all.writer()?;
        node.hand_over(&mut out)?;
        out.flush()?;
        drop(out);
        all.send(successor)
    };
    all().map_err(|error| {
        Failure::failed(format!("cannot hand over: {error}; programs have lost their sockets"))
    })?;
    say!("handed over");
    Ok(())
}
