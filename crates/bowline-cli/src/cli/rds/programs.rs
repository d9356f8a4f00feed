//! Sockets of a node for the programs of its host.

use std::{
    fs::{self, Permissions},
    io::{self, ErrorKind},
    os::unix::{
        fs::{DirBuilderExt, MetadataExt, PermissionsExt},
        net::UnixListener,
    },
    path::{Path, PathBuf},
};

use bowline::rds::Node;
use bowline_ctl::OwnedFile;
use bowline_host::{Host, Policy, Quota, Refusal};

use crate::cli::{Failure, Outcome};

/// Serves programs until it is dropped.
pub(crate) struct Programs {
    path: PathBuf,
    /// The socket's file, where this process has made it.
    file: Option<OwnedFile>,
    host: Host,
}

impl Programs {
    /// Listens at the socket that the service manager has passed; without one at `path`, or at the
    /// default place, in a folder that [`create_folder`] has created. Another node may have that
    /// place: then this one serves no programs.
    pub(crate) fn start(
        node: &Node,
        passed: Option<UnixListener>,
        path: Option<&Path>,
        policy: Policy,
        usual: Quota,
    ) -> Outcome<Option<Self>> {
        if let Some(listener) = passed {
            let served = serve_passed(node, listener, policy, usual);
            return served.map(Some).map_err(|error| {
                Failure::failed(format!("cannot serve programs at the socket passed: {error}"))
            });
        }
        let place = path.map_or_else(default_path, Path::to_owned);
        let has_others = !policy.attach.is_nobody();
        if has_others && path.is_none() {
            open_folders(&place);
        }
        let listening = listen(node, &place, policy, usual);
        if has_others && listening.is_ok() {
            note_closed_folders(&place);
        }
        match listening {
            Ok(programs) => Ok(Some(programs)),
            Err(error) if path.is_none() && error.kind() == ErrorKind::AddrInUse => Ok(None),
            Err(error) => Err(cannot_serve(&place, &error)),
        }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Prints what programs were refused since the last call.
    pub(crate) fn log(&self) {
        for Refusal { user, what, count } in self.host.refusals() {
            match user {
                Some(user) => say_of_peer!("programs: user {user} {what} ({count})"),
                None => say_of_peer!("programs: many users, {what} ({count})"),
            }
        }
    }
}

impl Drop for Programs {
    fn drop(&mut self) {
        if let Some(file) = &self.file {
            file.remove();
        }
    }
}

/// Creates the folder of the socket at `path`, or at the default place, if it does not exist, and
/// returns it.
pub(crate) fn create_folder(path: Option<&Path>, policy: &Policy) -> Outcome<PathBuf> {
    let place = path.map_or_else(default_path, Path::to_owned);
    let folder = bowline_ctl::folder_of(&place);
    let mode = if policy.attach.is_nobody() { 0o700 } else { OPEN };
    let created = fs::DirBuilder::new().recursive(true).mode(mode).create(folder);
    created.map_err(|error| cannot_serve(&place, &error))?;
    Ok(folder.to_owned())
}

fn cannot_serve(place: &Path, error: &io::Error) -> Failure {
    Failure::failed(format!(
        "cannot serve programs at {}: {error}; choose another place with --programs, or use \
         --no-programs",
        place.display()
    ))
}

fn listen(node: &Node, place: &Path, policy: Policy, usual: Quota) -> io::Result<Programs> {
    let has_others = !policy.attach.is_nobody();
    let (listener, file) = bowline_ctl::listen(place)?;
    if has_others {
        // The node asks the kernel who connects, and turns away who may not.
        fs::set_permissions(place, Permissions::from_mode(0o666))?;
    }
    let host = Host::start(node.driver().clone(), listener, policy, usual)?;
    Ok(Programs { path: place.to_owned(), file: Some(file), host })
}

/// Serves a socket of the service manager, whose file stays when this process ends: the next
/// program that connects there starts the node again. Its mode is the manager's.
fn serve_passed(
    node: &Node,
    listener: UnixListener,
    policy: Policy,
    usual: Quota,
) -> io::Result<Programs> {
    let address = listener.local_addr()?;
    let path = address.as_pathname().unwrap_or(Path::new("(no path)")).to_owned();
    let host = Host::start(node.driver().clone(), listener, policy, usual)?;
    Ok(Programs { path, file: None, host })
}

/// Mode of folders through which other users reach the node. What is in them has modes of its own.
const OPEN: u32 = 0o711;

/// Lets others through bowline's own folders, which another command may have made for its user.
fn open_folders(place: &Path) {
    for folder in place.ancestors().skip(1).take(2) {
        let Ok(found) = fs::metadata(folder) else { continue };
        let mode = found.mode() & 0o7777 | OPEN & 0o111;
        // Where that is not possible, `note_closed_folders` says so.
        let _ = fs::set_permissions(folder, Permissions::from_mode(mode));
    }
}

fn note_closed_folders(place: &Path) {
    let is_closed = |folder: &&Path| fs::metadata(folder).is_ok_and(|f| f.mode() & 0o001 == 0);
    if let Some(folder) = place.ancestors().skip(1).find(is_closed) {
        note!(
            "bowline node: other users may not reach {}: {} is not open to all; choose another \
             place with --programs",
            place.display(),
            folder.display()
        );
    }
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
