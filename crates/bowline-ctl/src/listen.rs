//! Unix sockets in the file system to listen at: the first process gets the path, and a stale
//! socket of a killed process is replaced.

use std::{
    fs::{self, File},
    io,
    os::unix::{
        fs::{FileTypeExt, MetadataExt},
        net::UnixListener,
    },
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use rustix::{
    fs::{Mode, fchmod},
    net::{self, AddressFamily, SocketAddrUnix, SocketFlags, SocketType},
};

use crate::{OwnedFile, socket::stream_within};

/// Most connections that wait to be accepted.
const BACKLOG: i32 = 128;
/// Timeout of the probe whether a process listens at a socket.
const PROBE_TIMEOUT: Duration = Duration::from_secs(2);
/// Longest wait for other processes that create or sweep sockets in the same folder.
const LOCK_WAIT: Duration = Duration::from_secs(3);
/// Delay between attempts to take the lock of a folder.
const LOCK_PAUSE: Duration = Duration::from_millis(5);

/// Listens at a unix socket that only this user can connect to. A stale socket, at which no process
/// listens any more, is replaced; any other file is not. Of processes that start at the same moment
/// one succeeds.
///
/// # Errors
/// `PermissionDenied` where other users could replace the socket; `AddrInUse` when a process
/// listens there, or the file is not a socket; errors of the system calls.
pub fn listen(path: &Path) -> io::Result<(UnixListener, OwnedFile)> {
    let address = SocketAddrUnix::new(path)?;
    refuse_unsafe_folder(folder_of(path))?;
    let socket =
        net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    // The file that bind creates has the socket's mode, so no other user can connect meanwhile.
    fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
    let _lock = lock(folder_of(path));
    if is_stale(path) {
        // Its process may just have removed it. If it cannot be removed, bind fails.
        let _ = fs::remove_file(path);
    }
    net::bind(&socket, &address)?;
    // Before the lock is released: other processes take a socket without listener for a stale one.
    net::listen(&socket, BACKLOG)?;
    Ok((socket.into(), OwnedFile::new(path)?))
}

/// Removes stale sockets `*.sock` of this user in a folder, which killed processes have left there.
/// Sockets that cannot be removed stay.
pub fn sweep(folder: &Path) {
    let own = rustix::process::geteuid().as_raw();
    let may_sweep = |place: &PathBuf| {
        place.extension().is_some_and(|extension| extension == "sock")
            && fs::symlink_metadata(place).is_ok_and(|meta| meta.uid() == own)
    };
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let stale = entries.map(|entry| entry.path()).filter(may_sweep);
    // A probe may take a while, so the lock is not held meanwhile.
    let stale: Vec<PathBuf> = stale.filter(|place| is_stale(place)).collect();
    let Some(_lock) = (if stale.is_empty() { None } else { lock(folder) }) else { return };
    // Another process may have replaced one since, or have been about to listen there.
    for place in stale.iter().filter(|place| is_stale(place)) {
        let _ = fs::remove_file(place);
    }
}

/// Tells whether the file at a path is a socket.
pub fn is_socket(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|meta| meta.file_type().is_socket())
}

/// Returns the folder in which a file lies.
pub fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Fails where other users could replace files of this user: another user owns the folder, or all
/// users may write there and remove files of others.
///
/// # Errors
/// `PermissionDenied` then; those of `stat(2)`.
pub fn refuse_unsafe_folder(folder: &Path) -> io::Result<()> {
    let found = fs::metadata(folder)?;
    if is_of_friend(&found) && found.mode() & 0o1002 != 0o002 {
        return Ok(());
    }
    let text = format!(
        "others could put a socket of theirs there, because {} belongs to user {} and has mode \
         {:04o}",
        folder.display(),
        found.uid(),
        found.mode() & 0o7777
    );
    Err(io::Error::new(io::ErrorKind::PermissionDenied, text))
}

fn is_of_friend(found: &fs::Metadata) -> bool {
    found.uid() == 0 || found.uid() == rustix::process::geteuid().as_raw()
}

/// Directory of run-time files where `$XDG_RUNTIME_DIR` is not set.
pub(crate) const SYSTEM_RUN_DIR: &str = "/run";

/// Returns a folder of run-time files of this user: `bowline/NAME` below `$XDG_RUNTIME_DIR`. It is
/// below /run where that is not set, or where the folder that it names, or one on the way to it or
/// below it, belongs to another user than root and this one, as after `sudo -E`; nor does a link of
/// another user lead there.
pub fn run_folder(name: &str) -> PathBuf {
    let below = |runtime: &Path| runtime.join("bowline").join(name);
    let given = std::env::var_os("XDG_RUNTIME_DIR").filter(|dir| !dir.is_empty());
    // On the way to it are folders of root, whose number is another one in a user namespace.
    let root = fs::metadata("/").ok().map(|found| found.uid());
    let is_of = |path: &Path, also: Option<u32>| {
        // What is not there is not another's.
        let is_friends = |it: fs::Metadata| is_of_friend(&it) || Some(it.uid()) == also;
        let found = [fs::symlink_metadata(path), fs::metadata(path)];
        found.into_iter().flatten().all(is_friends)
    };
    let is_believed = |folder: &PathBuf| {
        let (mut own, mut around) = (folder.ancestors().take(3), folder.ancestors().skip(3));
        own.all(|path| is_of(path, None)) && around.all(|path| is_of(path, root))
    };
    let own = given.map(|runtime| below(Path::new(&runtime))).filter(is_believed);
    own.unwrap_or_else(|| below(Path::new(SYSTEM_RUN_DIR)))
}

/// Locks a folder until the result is dropped, against other processes that create or sweep sockets
/// there. It is held briefly; a process that holds it for long only delays others.
fn lock(folder: &Path) -> Option<File> {
    let folder = File::open(folder).ok()?;
    let until = Instant::now() + LOCK_WAIT;
    while folder.try_lock().is_err() {
        if Instant::now() >= until {
            return None;
        }
        thread::sleep(LOCK_PAUSE);
    }
    Some(folder)
}

/// Tells whether the file at a path is a stale socket, left by a killed process. Checks that it is
/// a socket, since connecting to any other file is refused with the same error. A stopped process
/// still counts as listening.
fn is_stale(path: &Path) -> bool {
    let refused = |error: &io::Error| error.kind() == io::ErrorKind::ConnectionRefused;
    is_socket(path) && stream_within(path, PROBE_TIMEOUT).is_err_and(|error| refused(&error))
}

#[cfg(test)]
mod tests {
    use std::{
        os::unix::{fs::PermissionsExt, net::UnixStream},
        path::PathBuf,
        sync::atomic::{AtomicBool, Ordering},
    };

    use super::*;

    /// An empty folder for one test.
    fn folder(name: &str) -> PathBuf {
        let of = std::process::id();
        let folder = std::env::temp_dir().join(format!("bowline-listen-{of}-{name}"));
        fs::create_dir_all(&folder).unwrap();
        folder
    }

    #[test]
    fn only_a_stale_socket_is_replaced() {
        let folder = folder("way");
        let path = folder.join("s");
        let taken = || listen(&path).map(drop).unwrap_err().kind();
        let (listener, _) = listen(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        UnixStream::connect(&path).unwrap();
        assert_eq!(taken(), io::ErrorKind::AddrInUse, "somebody listens");
        drop(listener);
        let (_listener, file) = listen(&path).unwrap();
        file.remove();
        assert!(!path.exists());
        fs::write(&path, "precious").unwrap();
        assert_eq!(taken(), io::ErrorKind::AddrInUse, "no socket");
        assert_eq!(fs::read(&path).unwrap(), b"precious");
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn an_unsafe_folder_is_refused() {
        let folder = folder("others");
        let path = folder.join("s");
        let mode = |mode| fs::set_permissions(&folder, fs::Permissions::from_mode(mode)).unwrap();
        let refused = || {
            let error = listen(&path).map(drop).unwrap_err();
            assert!(error.to_string().contains(folder.to_str().unwrap()), "{error}");
            error.kind() == io::ErrorKind::PermissionDenied
        };
        mode(0o777);
        assert!(refused(), "all may write there");
        // As /tmp: users cannot remove files of others.
        mode(0o1777);
        listen(&path).unwrap();
        mode(0o700);
        listen(&path).unwrap();
        if rustix::process::geteuid().is_root() {
            std::os::unix::fs::chown(&folder, Some(65_534), None).unwrap();
            assert!(refused(), "its owner may write there");
        }
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn sockets_of_killed_processes_are_swept() {
        let folder = folder("sweep");
        let place = |name: &str| folder.join(name);
        let (_listener, _file) = listen(&place("alive.sock")).unwrap();
        for name in ["dead.sock", "dead2.sock", "other"] {
            drop(UnixListener::bind(place(name)));
        }
        fs::write(place("plain.sock"), "precious").unwrap();
        std::os::unix::fs::symlink(place("other"), place("link.sock")).unwrap();
        sweep(&folder);
        let mut left: Vec<_> =
            fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        left.sort();
        assert_eq!(left, ["alive.sock", "link.sock", "other", "plain.sock"]);
        sweep(&place("missing"));
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn one_of_many_concurrent_listeners_wins() {
        let folder = folder("once");
        let path = folder.join("s");
        for _ in 0..100 {
            drop(UnixListener::bind(&path));
            let taken: Vec<_> = thread::scope(|scope| {
                let all: Vec<_> = (0..4).map(|_| scope.spawn(|| listen(&path))).collect();
                all.into_iter().map(|one| one.join().unwrap()).collect()
            });
            let (won, lost): (Vec<_>, Vec<_>) = taken.into_iter().partition(Result::is_ok);
            assert_eq!(won.len(), 1, "{lost:?}");
            UnixStream::connect(&path).expect("the one that has the place listens at it");
            won.into_iter().flatten().for_each(|(_, file)| file.remove());
        }
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_process_does_not_remove_the_socket_of_the_next() {
        let folder = folder("leave");
        let path = folder.join("s");
        let stop = AtomicBool::new(false);
        let kept = thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    let Ok((listener, file)) = listen(&path) else { continue };
                    file.remove();
                    drop(listener);
                }
            });
            let come = || loop {
                if let Ok(taken) = listen(&path) {
                    break taken;
                }
            };
            let stay = |_| {
                let (_listener, file) = come();
                thread::yield_now();
                let stays = path.exists();
                file.remove();
                stays
            };
            let kept = (0..300).all(stay);
            stop.store(true, Ordering::Relaxed);
            kept
        });
        assert!(kept);
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_lock_held_forever_only_delays() {
        let folder = folder("kept");
        let kept = File::open(&folder).unwrap();
        kept.lock().unwrap();
        let begun = Instant::now();
        listen(&folder.join("s")).unwrap();
        assert!(begun.elapsed() >= LOCK_WAIT);
        fs::remove_dir_all(folder).unwrap();
    }
}
