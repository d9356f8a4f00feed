//! A unix socket that listens before anybody is served at it: for a process that has to have its
//! sockets before it gives up the right to make them.

use std::{
    fs, io,
    os::unix::net::UnixListener,
    path::{Path, PathBuf},
};

use crate::{OwnedFile, Server, Tree, listen};

/// A socket that listens at a path. Who connects waits until it is served. Its file goes with it.
#[derive(Debug)]
pub struct Place {
    path: PathBuf,
    /// Before the listener: a new socket may get the number of one that is closed.
    file: OwnedFile,
    listener: UnixListener,
}

impl Place {
    /// Listens at a path: see [`listen`].
    ///
    /// # Errors
    /// Those of [`listen`].
    pub fn listen(path: &Path) -> io::Result<Self> {
        let (listener, file) = listen(path)?;
        Ok(Self { path: path.to_owned(), file, listener })
    }

    /// Returns the path, though the file may have been [set aside](Self::set_aside).
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Answers requests here until the result is dropped; then others can be answered here.
    ///
    /// # Errors
    /// No descriptors or threads left.
    pub fn serve(&self, tree: Tree) -> io::Result<Server> {
        Server::at(self.listener.try_clone()?, self.path.clone(), tree)
    }

    /// Leaves the path to another process, which then can listen there.
    ///
    /// # Errors
    /// Those of renaming the file.
    pub fn set_aside(&mut self) -> io::Result<()> {
        let name = self.path.file_name().unwrap_or_default().to_string_lossy();
        let aside = self.path.with_file_name(format!(".{name}.{}", std::process::id()));
        self.rename(&aside)
    }

    /// Takes the path back, also from a process that was killed and has left a socket there.
    ///
    /// # Errors
    /// Those of renaming the file.
    pub fn put_back(&mut self) -> io::Result<()> {
        self.rename(&self.path.clone())
    }

    fn rename(&mut self, to: &Path) -> io::Result<()> {
        if self.file.path() != to {
            fs::rename(self.file.path(), to)?;
            self.file = OwnedFile::new(to)?;
        }
        Ok(())
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.file.remove();
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::{fs::PermissionsExt, net::UnixStream};

    use super::*;
    use crate::{Client, Dir, Op};

    #[test]
    fn a_place_is_served_left_to_another_and_served_again() {
        let name = format!("bowline-place-{}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        fs::create_dir_all(&folder).unwrap();
        let path = folder.join("s.sock");
        let list = || {
            let left = fs::read_dir(&folder).unwrap();
            left.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect::<Vec<_>>()
        };
        let mut place = Place::listen(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        let is_served = || {
            let mut client = Client::connect_within(&path, std::time::Duration::from_secs(5))?;
            client.ask(Op::List, "/")
        };
        for _ in 0..2 {
            // Who comes before is served then.
            let early = UnixStream::connect(&path).unwrap();
            let server = place.serve(Tree::new(std::sync::Arc::new(Dir::new()))).unwrap();
            assert!(is_served().unwrap().is_ok());
            drop((server, early));
            assert_eq!(list(), ["s.sock"], "the end of the service is not that of the place");
            place.set_aside().unwrap();
            let other = Place::listen(&path).unwrap();
            assert!(listen(&path).is_err(), "it listens there");
            drop(other);
            assert!(!path.exists());
            // A process that was killed has left its socket.
            drop(UnixListener::bind(&path));
            place.put_back().unwrap();
        }
        place.set_aside().unwrap();
        drop(place);
        assert!(list().is_empty(), "{:?}", list());
        fs::remove_dir(folder).unwrap();
    }
}
