//! Files that a process has created and removes again.

use std::{
    fs, io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

/// A file that this process has created, such as the socket it listens at. [`remove`](Self::remove)
/// removes it only while its path still leads to the same file, and not to a file that another
/// process has put there. Remove a socket before closing the listener: after that, a new socket may
/// get the same inode number.
#[derive(Debug)]
pub struct OwnedFile {
    path: PathBuf,
    device: u64,
    inode: u64,
}

impl OwnedFile {
    /// Remembers the file that is there now.
    ///
    /// # Errors
    /// Errors of looking up the path.
    pub fn new(path: &Path) -> io::Result<Self> {
        let there = fs::symlink_metadata(path)?;
        Ok(Self { path: path.to_owned(), device: there.dev(), inode: there.ino() })
    }

    /// Returns the path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Tells whether its path leads to it.
    pub(crate) fn is_there(&self) -> bool {
        let ours = |there: fs::Metadata| (there.dev(), there.ino()) == (self.device, self.inode);
        fs::symlink_metadata(&self.path).is_ok_and(ours)
    }

    /// Tells whether another path has led to the same file.
    pub fn is_also(&self, other: &Self) -> bool {
        (self.device, self.inode) == (other.device, other.inode)
    }

    /// Removes it, if it is still there, and if this process may.
    pub fn remove(&self) {
        if self.is_there() {
            // Another process may just have removed it.
            let _ = fs::remove_file(&self.path);
        }
    }
}
