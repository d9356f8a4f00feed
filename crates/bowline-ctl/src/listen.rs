//! Places to listen at, in the file system: whoever comes first has one, and what a process that
//! was killed has left there makes way.

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

use crate::{OwnFile, socket::stream_within};

/// Most connections that wait to be accepted.
const BACKLOG: i32 = 128;
/// How long is waited to learn whether somebody answers in this place.
const NEIGHBOUR_WAIT: Duration = Duration::from_secs(2);
/// How long is waited for others that take a place in the same folder.
const LOCK_WAIT: Duration = Duration::from_secs(3);
/// How often it is looked whether they are done.
const LOCK_PAUSE: Duration = Duration::from_millis(5);

/// Listens at a unix socket that only this user can connect to. A socket at which nobody listens
/// any more makes way; nothing else does. Of processes that start at the same moment one has the
/// place.
///
/// # Errors
/// `PermissionDenied` where other users could put another socket in its place; `AddrInUse` when
/// somebody listens there, or something else than a socket is there; the system's.
pub fn listen(path: &Path) -> io::Result<(UnixListener, OwnFile)> {
    let address = SocketAddrUnix::new(path)?;
    refuse_folder_of_others(folder_of(path))?;
    let socket =
        net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    // The file that bind makes has the socket's mode, so nobody else gets in between.
    fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
    let _lock = lock(folder_of(path));
    if is_left_behind(path) {
        // Its process may just have removed it; what cannot be removed is told by bind.
        let _ = fs::remove_file(path);
    }
    net::bind(&socket, &address)?;
    // Before the lock goes: to others a socket that nobody listens at is one that was left behind.
    net::listen(&socket, BACKLOG)?;
    Ok((socket.into(), OwnFile::new(path)?))
}

/// Takes away the sockets in a folder, `*.sock`, that processes of this user which were killed have
/// left there. What cannot be taken away stays.
pub fn sweep(folder: &Path) {
    let own = rustix::process::geteuid().as_raw();
    let ours = |place: &PathBuf| {
        place.extension().is_some_and(|extension| extension == "sock")
            && fs::symlink_metadata(place).is_ok_and(|meta| meta.uid() == own)
    };
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let left = entries.map(|entry| entry.path()).filter(ours);
    // To learn that somebody is there may take a while, so the lock is not held meanwhile.
    let left: Vec<PathBuf> = left.filter(|place| is_left_behind(place)).collect();
    let Some(_lock) = (if left.is_empty() { None } else { lock(folder) }) else { return };
    // Another may have taken one of the places since, or have been about to listen there.
    for place in left.iter().filter(|place| is_left_behind(place)) {
        let _ = fs::remove_file(place);
    }
}

/// Tells whether a socket is there.
pub fn is_socket(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|meta| meta.file_type().is_socket())
}

fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Fails where files of this user are not safe from other users: these own the folder, or all may
/// write there and remove what is not theirs.
fn refuse_folder_of_others(folder: &Path) -> io::Result<()> {
    let (own, found) = (rustix::process::geteuid().as_raw(), fs::metadata(folder)?);
    let (of_others, mode) = (found.uid() != own && found.uid() != 0, found.mode() & 0o7777);
    if !of_others && mode & 0o1002 != 0o002 {
        return Ok(());
    }
    let text = format!(
        "others could put a socket of theirs there, because {} belongs to user {} and has mode \
         {mode:04o}",
        folder.display(),
        found.uid()
    );
    Err(io::Error::new(io::ErrorKind::PermissionDenied, text))
}

/// Keeps others out who take a place in this folder, until it is dropped. Nobody keeps it for
/// long; whoever does so on purpose delays others and no more.
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

/// Reports whether a socket is there that a process which was killed has left. To connect to a file
/// of any other kind is refused with the same error, and a process that is stopped is there all the
/// same.
fn is_left_behind(path: &Path) -> bool {
    let refused = |error: &io::Error| error.kind() == io::ErrorKind::ConnectionRefused;
    is_socket(path) && stream_within(path, NEIGHBOUR_WAIT).is_err_and(|error| refused(&error))
}

#[cfg(test)]
mod tests {
    use std::{
        os::unix::{fs::PermissionsExt, net::UnixStream},
        path::PathBuf,
        sync::atomic::{AtomicBool, Ordering},
    };

    use super::*;

    /// A folder of its own, with nothing in it.
    fn folder(name: &str) -> PathBuf {
        let of = std::process::id();
        let folder = std::env::temp_dir().join(format!("bowline-listen-{of}-{name}"));
        fs::create_dir_all(&folder).unwrap();
        folder
    }

    #[test]
    fn only_what_nobody_listens_at_makes_way() {
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
    fn a_folder_of_others_is_refused() {
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
        // As /tmp is: nobody removes what is not his.
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
    fn what_killed_processes_left_is_swept_away() {
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
    fn one_of_many_that_come_at_once_has_the_place() {
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
    fn one_that_leaves_does_not_take_the_next_ones_place_away() {
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
    fn a_lock_that_somebody_keeps_delays_and_no_more() {
        let folder = folder("kept");
        let kept = File::open(&folder).unwrap();
        kept.lock().unwrap();
        let begun = Instant::now();
        listen(&folder.join("s")).unwrap();
        assert!(begun.elapsed() >= LOCK_WAIT);
        fs::remove_dir_all(folder).unwrap();
    }
}
