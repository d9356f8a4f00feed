//! The files that tell the next device of an address which connections stood when the process of
//! this one was killed, so that it can end them [CM-53]: else a kernel peer notices after half a
//! minute only, and one that waits without sending never does.
//!
//! There is one for each address, since only one process at a time has port 4791 of it; the name
//! tells the network namespace too, in which that is so. One line for each connection: own address,
//! the peer's, own communication id, the peer's, the peer's queue pair. Replaced as a whole when
//! connections come and go, and removed on orderly exit.

use std::fmt::Write;
use std::io;
use std::net::IpAddr;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use bowline_roce::FormerConnection;

/// The files.
#[derive(Debug)]
pub(crate) struct ConnectionFiles {
    files: Vec<(IpAddr, PathBuf)>,
}

impl ConnectionFiles {
    /// Those of a device with these addresses, each with the number of its interface if it is
    /// link-local, in a directory.
    pub(crate) fn new(dir: &Path, addrs: &[(IpAddr, u32)]) -> Self {
        let namespace = std::fs::metadata("/proc/self/ns/net").map_or(0, |file| file.ino());
        let file = |(addr, link): &(IpAddr, u32)| {
            let link = if *link == 0 { String::new() } else { format!("%{link}") };
            (*addr, dir.join(format!("roce-{namespace}-{addr}{link}.connections")))
        };
        Self { files: addrs.iter().map(file).collect() }
    }

    /// Reads what the former lives have left; lines that make no sense are passed over.
    ///
    /// # Errors
    /// The system's; a file that is not there is an empty one.
    pub(crate) fn read(&self) -> io::Result<Vec<FormerConnection>> {
        let mut connections = Vec::new();
        for (_, path) in &self.files {
            match std::fs::read_to_string(path) {
                Ok(text) => connections.extend(text.lines().filter_map(parse)),
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        Ok(connections)
    }

    /// Replaces the files.
    pub(crate) fn write(&self, connections: &[FormerConnection]) -> io::Result<()> {
        self.files.iter().try_for_each(|(addr, path)| {
            write(path, connections.iter().filter(|connection| connection.local == *addr))
        })
    }
}

/// Replaces a file; without lines there is none.
fn write<'a>(
    path: &Path,
    connections: impl Iterator<Item = &'a FormerConnection>,
) -> io::Result<()> {
    let mut text = String::new();
    for connection in connections {
        let FormerConnection { local, remote, local_id, remote_id, remote_qpn } = connection;
        // Writing to a string does not fail.
        let _ = writeln!(text, "{local} {remote} {local_id:08x} {remote_id:08x} {remote_qpn:06x}");
    }
    if text.is_empty() {
        return match std::fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        };
    }
    let new = beside(path);
    std::fs::write(&new, text)?;
    std::fs::rename(&new, path)
}

/// A name in the same directory, for what is to take the place of the file.
fn beside(path: &Path) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".new");
    path.with_file_name(name)
}

fn parse(line: &str) -> Option<FormerConnection> {
    let mut words = line.split_whitespace();
    let (local, remote) = (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
    let mut number = || u32::from_str_radix(words.next()?, 16).ok();
    let (local_id, remote_id, remote_qpn) = (number()?, number()?, number()?);
    Some(FormerConnection { local, remote, local_id, remote_id, remote_qpn })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_again() {
        // tests [CM-53]
        let dir =
            std::env::temp_dir().join(format!("bowline-connection-files-{}", std::process::id()));
        std::fs::create_dir(&dir).unwrap();
        let [first, second] = ["10.0.0.1", "fd00::1"].map(|addr| addr.parse().unwrap());
        let files = ConnectionFiles::new(&dir, &[(first, 0), (second, 0)]);
        assert_eq!(files.read().unwrap(), []);
        let connection = FormerConnection {
            local: first,
            remote: "10.0.0.2".parse().unwrap(),
            local_id: 0xffff_fff0,
            remote_id: 1,
            remote_qpn: 0x12_3456,
        };
        let other = FormerConnection { local: second, ..connection };
        files.write(&[connection, other]).unwrap();
        assert_eq!(files.read().unwrap(), [connection, other]);
        // The next life may have fewer addresses: each finds its own.
        let next = ConnectionFiles::new(&dir, &[(second, 0)]);
        assert_eq!(next.read().unwrap(), [other]);
        next.write(&[]).unwrap();
        assert_eq!(files.read().unwrap(), [connection]);
        let path = &files.files[0].1;
        std::fs::write(path, "nonsense\n10.0.0.1 10.0.0.2 1 2\n").unwrap();
        assert_eq!(files.read().unwrap(), []);
        files.write(&[]).unwrap();
        files.write(&[]).unwrap();
        assert!(!path.exists());
        std::fs::remove_dir(&dir).unwrap();
    }
}
