//! A unix socket that listens before anybody is served at it: for a process that has to have its
//! sockets before it gives up the right to make them.

use std::{
    io,
    os::unix::net::UnixListener,
    path::{Path, PathBuf},
};

use crate::{OwnedFile, Server, Tree, listen};

/// A socket that listens at a path. Who connects waits until it is served. Its file goes with it,
/// if this process may still remove it then; whoever listens there next removes it otherwise.
#[derive(Debug)]
pub struct Place {
    path: PathBuf,
    /// Before the listener: a new socket may get the number of one that is closed.
    /// `None` when it stays.
    file: Option<OwnedFile>,
    listener: UnixListener,
}

impl Place {
    /// Listens at a path: see [`listen`].
    ///
    /// # Errors
    /// Those of [`listen`].
    pub fn listen(path: &Path) -> io::Result<Self> {
        let (listener, file) = listen(path)?;
        Ok(Self { path: path.to_owned(), file: Some(file), listener })
    }

    /// Goes on at a path with the socket by which another process has listened there.
    pub fn resume(path: &Path, listener: UnixListener) -> Self {
        Self { path: path.to_owned(), file: OwnedFile::new(path).ok(), listener }
    }

    /// Returns the path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Answers requests here until the result is dropped; then others can be answered here.
    ///
    /// # Errors
    /// No descriptors or threads left.
    pub fn serve(&self, tree: Tree) -> io::Result<Server> {
        Server::at(self.listener.try_clone()?, self.path.clone(), tree, None)
    }

    /// Returns the socket once more, for a process that goes on with it; `None` if its path leads
    /// to another file by now.
    ///
    /// # Errors
    /// No descriptors left.
    pub fn listener(&self) -> io::Result<Option<UnixListener>> {
        let is_there = self.file.as_ref().is_some_and(OwnedFile::is_there);
        is_there.then(|| self.listener.try_clone()).transpose()
    }

    /// Ends with the file left to the process that goes on with the socket.
    pub fn leave(mut self) {
        self.file = None;
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.file.iter().for_each(OwnedFile::remove);
    }
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        os::unix::{fs::PermissionsExt, net::UnixStream},
    };

    use super::*;
    use crate::{Client, Dir, Op};

    #[test]
    fn a_place_is_served_left_to_another_and_served_again() {
        let name = format!("bowline-place-{}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        fs::create_dir_all(&folder).unwrap();
        let path = folder.join("s.sock");
        let tree = || Tree::new(std::sync::Arc::new(Dir::new()));
        let place = Place::listen(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        let is_served = || {
            let mut client = Client::connect_within(&path, std::time::Duration::from_secs(5))?;
            client.ask(Op::List, "/")
        };
        for _ in 0..2 {
            // Who comes before is served then.
            let early = UnixStream::connect(&path).unwrap();
            let server = place.serve(tree()).unwrap();
            assert!(is_served().unwrap().is_ok());
            drop((server, early));
            assert!(path.exists(), "the end of the service is not that of the place");
            assert!(Place::listen(&path).is_err(), "it listens there");
        }
        let next = Place::resume(&path, place.listener().unwrap().unwrap());
        // The other has not begun, or begins.
        let server = place.serve(tree()).unwrap();
        assert!(is_served().unwrap().is_ok());
        drop(server);
        place.leave();
        let server = next.serve(tree()).unwrap();
        assert!(is_served().unwrap().is_ok());
        drop(server);
        // What is no longer there is of no use to anybody, and what is there is another's.
        fs::remove_file(&path).unwrap();
        let other = Place::listen(&path).unwrap();
        assert!(next.listener().unwrap().is_none());
        drop(next);
        assert!(path.exists());
        drop(other);
        assert!(!path.exists());
        fs::remove_dir(folder).unwrap();
    }
}
