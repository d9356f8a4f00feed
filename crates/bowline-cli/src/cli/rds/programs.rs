//! Sockets of a node for the programs of its host.

use std::{
    fs,
    io::{self, ErrorKind},
    os::unix::{fs::DirBuilderExt, net::UnixListener},
    path::{Path, PathBuf},
};

use bowline::rds::Node;
use bowline_ctl::OwnedFile;
use bowline_host::Host;

use crate::cli::{Failure, Outcome};

/// Serves programs until it is dropped.
pub(crate) struct Programs {
    path: PathBuf,
    /// The socket's file, where this process has made it.
    file: Option<OwnedFile>,
    _host: Host,
}

impl Programs {
    /// Listens at the socket that the service manager has passed; without one at `path`, or at the
    /// default place. Another node may have that: then this one serves no programs.
    pub(crate) fn start(
        node: &Node,
        passed: Option<UnixListener>,
        path: Option<&Path>,
    ) -> Outcome<Option<Self>> {
        if let Some(listener) = passed {
            return serve_passed(node, listener).map(Some).map_err(|error| {
                Failure::failed(format!("cannot serve programs at the socket passed: {error}"))
            });
        }
        let place = path.map_or_else(default_path, Path::to_owned);
        match listen(node, &place) {
            Ok(programs) => Ok(Some(programs)),
            Err(error) if path.is_none() && error.kind() == ErrorKind::AddrInUse => Ok(None),
            Err(error) => Err(Failure::failed(format!(
                "cannot serve programs at {}: {error}; choose another place with --programs, or \
                 use --no-programs",
                place.display()
            ))),
        }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Programs {
    fn drop(&mut self) {
        if let Some(file) = &self.file {
            file.remove();
        }
    }
}

fn listen(node: &Node, place: &Path) -> io::Result<Programs> {
    if let Some(folder) = place.parent() {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    }
    let (listener, file) = bowline_ctl::listen(place)?;
    let host = Host::start(node.driver().clone(), listener)?;
    Ok(Programs { path: place.to_owned(), file: Some(file), _host: host })
}

/// Serves a socket of the service manager, whose file stays when this process ends: the next
/// program that connects there starts the node again.
fn serve_passed(node: &Node, listener: UnixListener) -> io::Result<Programs> {
    let address = listener.local_addr()?;
    let path = address.as_pathname().unwrap_or(Path::new("(no path)")).to_owned();
    let host = Host::start(node.driver().clone(), listener)?;
    Ok(Programs { path, file: None, _host: host })
}

fn below(runtime: &Path) -> PathBuf {
    runtime.join("bowline/rds/host.sock")
}

/// Where a node of this user serves programs.
pub(crate) fn default_path() -> PathBuf {
    let runtime = std::env::var_os("XDG_RUNTIME_DIR").filter(|dir| !dir.is_empty());
    below(&runtime.map_or_else(|| PathBuf::from("/run"), PathBuf::from))
}

/// Paths at which programs look for a node, in this order.
pub(crate) fn places() -> Vec<PathBuf> {
    let mut all = vec![default_path(), below(Path::new("/run"))];
    all.dedup();
    all
}
