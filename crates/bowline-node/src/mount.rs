//! The control tree as files.

use std::{io, path::Path};

use bowline_ctl::{Tree, fusefs};

use crate::{Failure, Outcome};

/// Shows a tree as files below a folder until the result is dropped.
pub fn mounted(tree: &Tree, dir: &Path) -> Outcome<fusefs::Mount> {
    fusefs::mount(tree.clone(), dir).map_err(|error| Failure::failed(no_mount(dir, &error)))
}

/// Explains why mounting failed, and what it needs.
pub(crate) fn no_mount(dir: &Path, error: &io::Error) -> String {
    let text = format!("cannot mount {}: {error}", dir.display());
    // A folder that cannot be used has nothing to do with FUSE.
    if error.kind() != io::ErrorKind::ResourceBusy && dir.is_dir() {
        format!("{text}; FUSE needs /dev/fuse, and for users other than root fusermount3")
    } else {
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fuse_is_named_where_the_folder_is_there() {
        let error = io::Error::from_raw_os_error(2);
        assert!(no_mount(Path::new("/"), &error).contains("; FUSE needs /dev/fuse"));
        let text = "cannot mount /nowhere/x: No such file or directory (os error 2)";
        assert_eq!(no_mount(Path::new("/nowhere/x"), &error), text);
    }
}
