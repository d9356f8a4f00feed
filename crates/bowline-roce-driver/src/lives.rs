//! The file that tells the next life of this process which connections stood when it was killed, so
//! that it can end them [CM-53]: else a kernel peer notices after half a minute only.
//!
//! One line for each: own address, the peer's, own communication id, the peer's, the peer's queue
//! pair. Replaced as a whole when connections come and go, and removed on orderly exit.

use std::fmt::Write;
use std::io;
use std::path::{Path, PathBuf};

use bowline_roce::FormerLife;

/// The file.
#[derive(Debug)]
pub(crate) struct Lives {
    path: PathBuf,
}

impl Lives {
    pub(crate) fn new(path: PathBuf) -> Self {
        Self { path }
    }

    /// Reads what the former life has left; lines that make no sense are passed over.
    ///
    /// # Errors
    /// The system's; a file that is not there is an empty one.
    pub(crate) fn read(&self) -> io::Result<Vec<FormerLife>> {
        match std::fs::read_to_string(&self.path) {
            Ok(text) => Ok(text.lines().filter_map(parse).collect()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
            Err(error) => Err(error),
        }
    }

    /// Replaces the file.
    pub(crate) fn write(&self, lives: &[FormerLife]) -> io::Result<()> {
        if lives.is_empty() {
            return match std::fs::remove_file(&self.path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
                _ => Ok(()),
            };
        }
        let mut text = String::new();
        for life in lives {
            let FormerLife { local, remote, local_id, remote_id, remote_qpn } = life;
            // Writing to a string does not fail.
            let _ =
                writeln!(text, "{local} {remote} {local_id:08x} {remote_id:08x} {remote_qpn:06x}");
        }
        let new = beside(&self.path);
        std::fs::write(&new, text)?;
        std::fs::rename(&new, &self.path)
    }
}

/// A name in the same directory, for what is to take the place of the file.
fn beside(path: &Path) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".new");
    path.with_file_name(name)
}

fn parse(line: &str) -> Option<FormerLife> {
    let mut words = line.split_whitespace();
    let (local, remote) = (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
    let mut number = || u32::from_str_radix(words.next()?, 16).ok();
    let (local_id, remote_id, remote_qpn) = (number()?, number()?, number()?);
    Some(FormerLife { local, remote, local_id, remote_id, remote_qpn })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_again() {
        // tests [CM-53]
        let path = std::env::temp_dir().join(format!("bowline-lives-{}", std::process::id()));
        let lives = Lives::new(path.clone());
        assert_eq!(lives.read().unwrap(), []);
        let life = FormerLife {
            local: "10.0.0.1".parse().unwrap(),
            remote: "10.0.0.2".parse().unwrap(),
            local_id: 0xffff_fff0,
            remote_id: 1,
            remote_qpn: 0x12_3456,
        };
        let other = FormerLife { local: "fd00::1".parse().unwrap(), ..life };
        lives.write(&[life, other]).unwrap();
        assert_eq!(lives.read().unwrap(), [life, other]);
        std::fs::write(&path, "nonsense\n10.0.0.1 10.0.0.2 1 2\n").unwrap();
        assert_eq!(lives.read().unwrap(), []);
        lives.write(&[]).unwrap();
        lives.write(&[]).unwrap();
        assert!(!path.exists());
    }
}
