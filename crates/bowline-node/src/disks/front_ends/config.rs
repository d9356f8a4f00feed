//! Which front ends a disk has, as options and commands say it.

use std::{
    ffi::OsString,
    os::unix::net::UnixListener,
    path::{self, Path, PathBuf},
};

use bowline_ctl::fusefs;
use serde::{Deserialize, Serialize};

use crate::{Failure, Outcome, config::entry::Entry, disks::MapConfig};

/// Which front ends a disk has.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(default, rename_all = "kebab-case")]
pub struct FrontEndConfig {
    /// Unix socket at which the disk is served with the NBD protocol.
    pub nbd: Option<PathBuf>,
    /// Folder in which the disk is a file, by FUSE.
    pub fuse: Option<PathBuf>,
    /// Whether the disk is a block device of this machine.
    pub ublk: bool,
    /// Unix socket at which the disk is served to virtual machines, by vhost-user.
    pub vhost_user: Option<PathBuf>,
}

impl FrontEndConfig {
    /// Returns a place that these front ends and others both want.
    pub fn shared_with(&self, other: &Self) -> Option<&Path> {
        let sockets = |config: &'_ Self| [config.nbd.clone(), config.vhost_user.clone()];
        let theirs = sockets(other);
        let ours = [&self.nbd, &self.vhost_user].into_iter().flatten();
        let socket = ours
            .map(PathBuf::as_path)
            .find(|path| theirs.iter().flatten().any(|other| other == path));
        let folder = self.fuse.as_deref().filter(|folder| other.fuse.as_deref() == Some(folder));
        socket.or(folder)
    }

    /// Returns the same places, whatever the working folder.
    ///
    /// # Errors
    /// A place is empty, or there is no working folder.
    pub fn absolute(&self) -> Outcome<Self> {
        let absolute = |place: &Option<PathBuf>| {
            let made = place.as_ref().map(path::absolute).transpose();
            made.map_err(|error| Failure::usage(format!("the place of a front end: {error}")))
        };
        Ok(Self {
            nbd: absolute(&self.nbd)?,
            fuse: absolute(&self.fuse)?,
            ublk: self.ublk,
            vhost_user: absolute(&self.vhost_user)?,
        })
    }

    /// Removes what a process has left at these places that has had them: a socket at which nobody
    /// listens, a mount that nobody serves. `listener`: nobody will accept what comes there, though
    /// a service manager may have a copy.
    pub fn clear(&self, listener: Option<&UnixListener>) {
        // An error means that it does not listen.
        listener.map(|listener| rustix::net::shutdown(listener, rustix::net::Shutdown::Both));
        if let Some(Ok((_listener, file))) = self.nbd.as_deref().map(bowline_ctl::listen) {
            file.remove();
        }
        self.fuse.as_deref().map(fusefs::unmount);
    }

    /// Returns the front ends of another disk, with its local name appended to each place.
    pub(super) fn beside(&self, name: &str) -> Self {
        let sibling = |path: &PathBuf| sibling_path(path, name);
        Self {
            nbd: self.nbd.as_ref().map(sibling),
            fuse: self.fuse.as_ref().map(sibling),
            ublk: self.ublk,
            vhost_user: self.vhost_user.as_ref().map(sibling),
        }
    }
}

/// Parses the options of a command that says how a disk is mapped [NB-63]; the access mode has a
/// word of its own there.
pub fn map_options(words: &[String]) -> Result<(MapConfig, FrontEndConfig), String> {
    let mut entry = Entry::of_words(words.iter().map(String::as_str))?;
    if entry.has("access") {
        return Err("the access mode is a word of its own: ro, rw or migration".to_owned());
    }
    let options = (entry.group()?, entry.group()?);
    entry.finish().map(|()| options)
}

/// Returns the path of a front end of another disk.
fn sibling_path(path: &Path, name: &str) -> PathBuf {
    let mut text: OsString = path.as_os_str().to_owned();
    text.push(".");
    text.push(name);
    text.into()
}

#[cfg(test)]
mod tests {
    use bowline_rnbd::client::Outage;

    use super::*;

    #[test]
    fn front_ends_of_later_disks_have_sibling_paths() {
        let path = sibling_path(Path::new("/run/disk.sock"), "rnbd1");
        assert_eq!(path, Path::new("/run/disk.sock.rnbd1"));
    }

    #[test]
    fn commands_say_how_a_disk_is_mapped() {
        // tests [NB-63]
        let options = |words: &[&str]| {
            let words: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
            map_options(&words)
        };
        let (how, found) = options(&["nbd=/run/a.sock", "outage=fail", "ublk=true"]).unwrap();
        assert_eq!(how.outage, Outage::FailFast);
        assert_eq!(found.nbd.as_deref(), Some(Path::new("/run/a.sock")));
        assert!(found.ublk && found.fuse.is_none());
        for word in ["nbd", "x=y", "access=ro", "outage=never", "ublk=2"] {
            assert!(options(&[word]).is_err(), "{word}");
        }
    }
}
