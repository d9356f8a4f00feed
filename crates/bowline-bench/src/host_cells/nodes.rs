//! The nodes of a measurement, with the settings that `bowline node` has by default. They run in
//! the process of the bench.

use std::net::Ipv4Addr;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::process::Command;

use bowline::rds::Node;
use bowline_host::{Host, Policy, Quota, preload, preload_library};

use crate::cell::Cell;
use crate::role::Side;

/// Nodes and the places at which they serve programs, until this is dropped.
#[derive(Debug)]
pub(crate) struct HostNodes {
    library: PathBuf,
    /// That of the receiver first; of one node for both there is one.
    served: Vec<Served>,
}

#[derive(Debug)]
struct Served {
    place: PathBuf,
    _host: Host,
    _node: Node,
}

impl HostNodes {
    /// Starts as many as the subject has.
    pub(crate) fn start(cell: &Cell) -> Result<Option<Self>, String> {
        let (rx, tx) = cell.nodes;
        let served = match cell.subject.host_nodes() {
            0 => return Ok(None),
            1 => vec![Served::start(cell, &[rx, tx])?],
            _ => vec![Served::start(cell, &[rx])?, Served::start(cell, &[tx])?],
        };
        Ok(Some(Self { library: preload_library()?, served }))
    }

    /// Has one side use its node.
    pub(crate) fn preload(&self, command: &mut Command, side: Side) {
        let served = match side {
            Side::Rx => self.served.first(),
            Side::Tx => self.served.last(),
        };
        if let Some(served) = served {
            preload(command, &self.library, Some(&served.place));
        }
    }
}

impl Served {
    fn start(cell: &Cell, addresses: &[Ipv4Addr]) -> Result<Self, String> {
        let builder = Node::builder()
            .congestion_control(Some(cell.cc.clone()).filter(|cc| !cc.is_empty()))
            .paths(cell.rds_paths());
        let builder = addresses.iter().fold(builder, |builder, ip| builder.address(*ip));
        let node = builder.build().map_err(|error| error.to_string())?;
        // Nobody else has the address now, so nobody else has the name.
        let name = format!("bowline-bench-{}-{}.sock", std::process::id(), addresses[0]);
        let place = std::env::temp_dir().join(name);
        let serve = || {
            let listener = UnixListener::bind(&place)?;
            Host::start(node.driver().clone(), listener, Policy::default(), Quota::NONE)
        };
        match serve() {
            Ok(host) => Ok(Self { place, _host: host, _node: node }),
            Err(error) => Err(format!("serving programs at {}: {error}", place.display())),
        }
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        // A failure needs no report: the receiver has ended already.
        let _ = std::fs::remove_file(&self.place);
    }
}
