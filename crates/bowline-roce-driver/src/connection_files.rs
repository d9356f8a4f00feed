//! Files that list the established connections of a device. If its process is killed, the next
//! device of the same address reads them and ends these connections [CM-53]. Otherwise a kernel
//! peer notices only after half a minute, and a peer that waits without sending never does.
//!
//! There is one file for each address, since only one process at a time has port 4791 of an
//! address. The file name includes the network namespace, within which that is true. Each
//! connection is one line: local address, remote address, local communication id, remote
//! communication id, remote queue pair. A file is replaced as a whole when connections come and go,
//! and removed on an orderly exit.

use std::fmt::Write;
use std::io;
use std::net::IpAddr;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use bowline_roce::FormerConnection;

/// The files of one device.
#[derive(Debug)]
pub(crate) struct ConnectionFiles {
    files: Vec<(IpAddr, PathBuf)>,
}

impl ConnectionFiles {
    /// Names the files of a device in a directory, or those of a part of its addresses. Each
    /// address comes with the index of its interface if it is link-local.
    pub(crate) fn new(dir: &Path, part: Option<u8>, addrs: &[(IpAddr, u32)]) -> Self {
        let namespace = std::fs::metadata("/proc/self/ns/net").map_or(0, |file| file.ino());
        let part = part.filter(|part| *part != 0).map_or_else(String::new, |n| format!("part{n}-"));
        let file = |(addr, link): &(IpAddr, u32)| {
            let link = if *link == 0 { String::new() } else { format!("%{link}") };
            (*addr, dir.join(format!("roce-{part}{namespace}-{addr}{link}.connections")))
        };
        Self { files: addrs.iter().map(file).collect() }
    }

    /// Reads the connections that earlier processes have left; invalid lines are skipped.
    ///
    /// # Errors
    /// Those of the system; a missing file counts as empty.
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

    /// Replaces all files.
    pub(crate) fn write(&self, connections: &[FormerConnection]) -> io::Result<()> {
        self.files.iter().try_for_each(|(addr, path)| {
            write(path, connections.iter().filter(|connection| connection.local == *addr))
        })
    }
}

/// Replaces a file, or removes it if there are no connections.
fn write<'a>(
    path: &Path,
    connections: impl Iterator<Item = &'a FormerConnection>,
) -> io::Result<()> {
    let mut text = String::new();
    for connection in connections {
        let FormerConnection { local, remote, local_id, remote_id, remote_qpn } = connection;
        // Writing to a string cannot fail.
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

/// Returns the name of a temporary file in the same directory, which is then renamed.
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
    fn written_connections_are_read_back() {
        // tests [CM-53]
        let dir =
            std::env::temp_dir().join(format!("bowline-connection-files-{}", std::process::id()));
        std::fs::create_dir(&dir).unwrap();
        let [first, second] = ["10.0.0.1", "fd00::1"].map(|addr| addr.parse().unwrap());
        let files = ConnectionFiles::new(&dir, None, &[(first, 0), (second, 0)]);
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
        // The next process may have fewer addresses; each address has a file of its own.
        let next = ConnectionFiles::new(&dir, None, &[(second, 0)]);
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
