//! Files that a process has made and takes away again.

use std::{
    fs, io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

/// A file that this process has made, such as a socket it listens at: it is removed only while it
/// is that file, and not when somebody else has put another one in its place. A socket is removed
/// while it is listened at: after that the next one there may have its number.
#[derive(Debug)]
pub struct OwnFile {
    path: PathBuf,
    device: u64,
    inode: u64,
}

impl OwnFile {
    /// Remembers the file that is there now.
    ///
    /// # Errors
    /// The system's, when it cannot be looked at.
    pub fn new(path: &Path) -> io::Result<Self> {
        let there = fs::symlink_metadata(path)?;
        Ok(Self { path: path.to_owned(), device: there.dev(), inode: there.ino() })
    }

    /// Returns where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Removes it, if it is still there.
    pub fn remove(&self) {
        let ours = |there: fs::Metadata| (there.dev(), there.ino()) == (self.device, self.inode);
        if fs::symlink_metadata(&self.path).is_ok_and(ours) {
            // Somebody may just have removed it.
            let _ = fs::remove_file(&self.path);
        }
    }
}
