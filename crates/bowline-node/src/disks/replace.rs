//! A process with mapped disks or exports continues in another process: `--replace`.
//!
//! ```text
//!   new: control socket, operation replace: what it wants  -->  old: is it this? may it ask?
//!        <-- yes, or why not (the old one continues)
//!        --> BEGIN: all that can fail without the other one is done
//!        <-- TELLS and what it has, with descriptors; or FAILS and why (the old one continues)
//!        <-- FREE: session, device and sockets are closed
//!        --> SERVES                                             the old one ends
//!        an end of the connection before this                   the old one takes everything back
//! ```

use std::{
    collections::BTreeSet,
    io::{self, IoSlice, IoSliceMut, Read, Write},
    mem::MaybeUninit,
    net::IpAddr,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
    path::{Path, PathBuf},
    time::Duration,
};

use bowline_ctl::{Errno, Peer, Successor, ask_to_replace, folder};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use serde::{Deserialize, Serialize};

use super::FrontEndConfig;
use crate::{Failure, Outcome, signals::Stop};

/// Version of all that the two processes say to each other.
const FORMAT: u32 = 4;
/// How long the other process may take for each step.
const PATIENCE: Duration = Duration::from_secs(10);
/// Most bytes of a state: those of 64 clients, each with the largest requests.
const BYTES_MAX: u64 = 16 << 30;
/// How long the addresses and the session of a process that was replaced may take to be free.
pub const FREE_WAIT: Duration = Duration::from_secs(3);
/// How often it is tried whether they are.
pub const FREE_POLL: Duration = Duration::from_millis(5);
/// Most descriptors.
const DESCRIPTORS_MAX: u32 = 1 << 16;

const BEGIN: u8 = b'B';
const TELLS: u8 = b'T';
const FAILS: u8 = b'E';
const FREE: u8 = b'F';
const SERVES: u8 = b'S';

/// What a process does, by which the one to be replaced is found.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Service {
    /// Maps a disk.
    Map {
        /// The disk.
        device: String,
        /// Name of the session.
        session: String,
        /// Addresses of its server.
        servers: BTreeSet<IpAddr>,
        /// Its front ends.
        front_ends: FrontEndConfig,
    },
    /// Serves exports.
    Export {
        /// Where it listens.
        places: Vec<String>,
    },
}

impl Service {
    /// The word of the command, and of its control socket.
    const fn word(&self) -> &'static str {
        match self {
            Self::Map { .. } => "map",
            Self::Export { .. } => "export",
        }
    }

    /// Tells whether another service has the same task, if perhaps in another way.
    fn is_same(&self, other: &Self) -> bool {
        match (self, other) {
            (
                Self::Map { device, session, .. },
                Self::Map { device: others, session: theirs, .. },
            ) => device == others && session == theirs,
            (Self::Export { places }, Self::Export { places: theirs }) => {
                places.iter().any(|place| theirs.contains(place))
            }
            _ => false,
        }
    }

    fn text(&self) -> String {
        match self {
            Self::Map { device, session, .. } => {
                format!("`rnbd map` of {device} with the session {session}")
            }
            Self::Export { places } => format!("`rnbd export` at {}", places.join(", ")),
        }
    }
}

#[derive(Deserialize, Serialize)]
struct Wish {
    format: u32,
    service: Service,
}

/// What a process hands over.
#[derive(Debug, Default)]
pub struct Parcel {
    /// What the rest is, as JSON.
    pub state: String,
    /// Bytes, in the order that `state` tells.
    pub bytes: Vec<u8>,
    /// Descriptors, likewise.
    pub descriptors: Vec<OwnedFd>,
}

/// The process whose place this one takes.
#[derive(Debug)]
pub struct Predecessor(UnixStream);

impl Predecessor {
    /// Finds the process that does this, behind a control socket or behind any of this user's, and
    /// asks it for its place.
    ///
    /// # Errors
    /// There is no such process, or it refuses.
    pub fn find(control: Option<&Path>, service: Service) -> Outcome<Self> {
        let mut failure = None;
        let own = std::process::id();
        let places =
            control.map_or_else(|| sockets(service.word(), own), |place| vec![place.to_owned()]);
        let wish = Wish { format: FORMAT, service };
        let wants = serde_json::to_string(&wish)
            .map_err(|error| Failure::usage(format!("--replace: {error}")))?;
        for place in places {
            let at = place.display();
            match ask_to_replace(&place, &wants, PATIENCE) {
                Ok(Ok(stream)) => {
                    // What it sends is believed.
                    if is_ours(&stream) && prepare(&stream).is_ok() {
                        return Ok(Self(stream));
                    }
                    failure = Some(format!("the process at {at} belongs to another user"));
                }
                // It does something else, or has ended.
                Ok(Err((Errno::ENOENT, _))) => {}
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused
                    ) => {}
                Ok(Err((_, why))) => failure = Some(format!("the process at {at}: {why}")),
                // Others that run here may be of any version.
                Err(error) if control.is_none() && error.kind() == io::ErrorKind::InvalidData => {}
                Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                    failure = Some(format!(
                        "the process at {at} cannot hand over, or is of a version that cannot: end it and start this \
                         one without --replace"
                    ));
                }
                Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                    failure = Some(format!("the process at {at} belongs to another user"));
                }
                Err(error) => failure = Some(format!("the process at {at}: {error}")),
            }
        }
        Err(match failure {
            Some(why) => Failure::failed(format!("cannot replace {}: {why}", wish.service.text())),
            None => Failure::Errno(
                Errno::ENOENT,
                format!(
                    "nothing to replace: {} does not run here, has --no-control or is of a version that cannot hand \
                     over; leave out --replace to start",
                    wish.service.text()
                ),
            ),
        })
    }

    /// Takes what the other process has; its session, device and sockets are closed then.
    ///
    /// # Errors
    /// Why the other process continues.
    pub fn take(&self) -> Outcome<Parcel> {
        let received = self.receive().map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => "it has ended, or could not do it".to_owned(),
            io::ErrorKind::WouldBlock => format!("it has not answered for {PATIENCE:?}"),
            _ => error.to_string(),
        });
        match received {
            Ok(Ok(parcel)) => Ok(parcel),
            Ok(Err(why)) | Err(why) => {
                Err(Failure::failed(format!("the process to be replaced: {why}")))
            }
        }
    }

    fn receive(&self) -> io::Result<Result<Parcel, String>> {
        let mut stream = &self.0;
        stream.write_all(&[BEGIN])?;
        let kind = read_byte(stream)?;
        let text = String::from_utf8_lossy(&read_bytes(stream)?).into_owned();
        match kind {
            TELLS => {}
            FAILS => return Ok(Err(text)),
            _ => return Err(io::ErrorKind::InvalidData.into()),
        }
        let bytes = read_bytes(stream)?;
        let mut count = [0; 4];
        stream.read_exact(&mut count)?;
        let count = u32::from_le_bytes(count);
        if count > DESCRIPTORS_MAX {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let descriptors = (0..count).map(|_| receive_descriptor(stream));
        let descriptors = descriptors.collect::<io::Result<Vec<_>>>()?;
        match read_byte(stream)? {
            FREE => Ok(Ok(Parcel { state: text, bytes, descriptors })),
            _ => Err(io::ErrorKind::InvalidData.into()),
        }
    }

    /// This process serves, and the other one ends. That one takes everything back only when this
    /// one is gone: if it is gone itself, it has been stopped or killed since.
    ///
    /// # Errors
    /// Those of the connection: who serves is not known.
    pub fn dismiss(&self) -> Outcome {
        match (&self.0).write_all(&[SERVES]) {
            Ok(()) => Ok(()),
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset
                ) =>
            {
                note!("the process that was replaced has ended by itself");
                Ok(())
            }
            Err(error) => Err(Failure::failed(format!("the process to be replaced: {error}"))),
        }
    }
}

/// A process that takes the place of this one.
#[derive(Debug)]
pub struct Heir(UnixStream);

impl Heir {
    /// Answers a process that asks for the place of this one, which does `service`; returns it if
    /// it may have it. `trouble`: why not now.
    pub fn of(
        asks: Successor,
        service: &Service,
        trouble: impl FnOnce() -> Option<String>,
    ) -> Option<Self> {
        let answer = admit(&asks, service).and_then(|()| match trouble() {
            Some(why) => Err((Errno::EBUSY, why)),
            None => Ok(()),
        });
        let sent = match &answer {
            Ok(()) => asks.answer(Ok(())),
            Err((errno, why)) => asks.answer(Err((*errno, why))),
        };
        let heir = Self(asks.stream);
        let begins = || -> io::Result<bool> {
            sent?;
            prepare(&heir.0)?;
            Ok(answer.is_ok() && read_byte(&heir.0)? == BEGIN)
        };
        // One that is gone wants nothing.
        begins().is_ok_and(|begins| begins).then_some(heir)
    }

    /// Tells it why it does not get anything.
    pub fn refuse(&self, why: &str) {
        // One that is gone need not know.
        let _ = (&self.0).write_all(&[FAILS]).and_then(|()| write_bytes(&self.0, why.as_bytes()));
    }

    /// Sends it everything.
    ///
    /// # Errors
    /// Those of the connection.
    pub fn send(&self, parcel: &Parcel) -> io::Result<()> {
        let mut stream = &self.0;
        stream.write_all(&[TELLS])?;
        write_bytes(stream, parcel.state.as_bytes())?;
        write_bytes(stream, &parcel.bytes)?;
        stream.write_all(&(parcel.descriptors.len() as u32).to_le_bytes())?;
        parcel.descriptors.iter().try_for_each(|one| send_descriptor(stream, one.as_fd()))
    }

    /// Tells it that all is closed here, and waits until it serves. Returns false if it has ended
    /// before: all is this process's again.
    pub fn serves(&self, stop: &Stop) -> bool {
        if (&self.0).write_all(&[FREE]).is_err() {
            return false;
        }
        match stop.wait_for(&self.0) {
            Ok(false) => matches!(read_byte(&self.0), Ok(SERVES)),
            // Whoever ends this process wants the other one to serve.
            Ok(true) => true,
            Err(_) => false,
        }
    }
}

/// Tells whether a process may have the place of this one, or why not.
fn admit(asks: &Successor, service: &Service) -> Result<(), (Errno, String)> {
    if !is_ours(&asks.stream) {
        return Err((Errno::EACCES, "it belongs to another user".to_owned()));
    }
    let wish: Wish = serde_json::from_str(&asks.wants).map_err(|_| {
        (Errno::EPROTONOSUPPORT, "it is of a version that cannot hand over to this one".to_owned())
    })?;
    if wish.format != FORMAT {
        let text = "it is of a version that cannot hand over to this one".to_owned();
        return Err((Errno::EPROTONOSUPPORT, text));
    }
    if !service.is_same(&wish.service) {
        return Err((Errno::ENOENT, format!("it is {}", service.text())));
    }
    match (service, &wish.service) {
        (Service::Map { front_ends, .. }, Service::Map { front_ends: wanted, .. })
            if front_ends != wanted =>
        {
            let text =
                "it has other front ends: give the same --nbd, --fuse, --ublk and --vhost-user";
            Err((Errno::EINVAL, text.to_owned()))
        }
        (Service::Map { servers, .. }, Service::Map { servers: wanted, .. })
            if servers.is_disjoint(wanted) =>
        {
            Err((Errno::EINVAL, "it has a server at other addresses".to_owned()))
        }
        (Service::Export { places }, Service::Export { places: wanted }) if places != wanted => {
            let text =
                format!("it listens at {}: give the same addresses and port", places.join(", "));
            Err((Errno::EINVAL, text))
        }
        _ => Ok(()),
    }
}

/// Tells whether the process there is this user's, or root's, and so trusted with everything.
fn is_ours(stream: &UnixStream) -> bool {
    let is_trusted = |user| user == 0 || user == rustix::process::geteuid().as_raw();
    Peer::at(stream).is_ok_and(|peer| is_trusted(peer.user))
}

fn prepare(stream: &UnixStream) -> io::Result<()> {
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))
}

/// Returns the control sockets of processes of this kind, but that of this one.
fn sockets(word: &str, own: u32) -> Vec<PathBuf> {
    let is_one = |path: &PathBuf| {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let number = name.strip_prefix(word).and_then(|rest| rest.strip_prefix('-'));
        let number = number.and_then(|rest| rest.strip_suffix(".sock"));
        number.and_then(|number| number.parse::<u32>().ok()).is_some_and(|number| number != own)
    };
    let entries = std::fs::read_dir(folder()).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).filter(is_one).collect()
}

fn read_byte(mut stream: &UnixStream) -> io::Result<u8> {
    let mut byte = [0];
    stream.read_exact(&mut byte)?;
    Ok(byte[0])
}

fn read_bytes(mut stream: &UnixStream) -> io::Result<Vec<u8>> {
    let mut len = [0; 8];
    stream.read_exact(&mut len)?;
    let len = u64::from_le_bytes(len);
    if len > BYTES_MAX {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut bytes = Vec::new();
    stream.take(len).read_to_end(&mut bytes)?;
    let is_whole = bytes.len() as u64 == len;
    if is_whole { Ok(bytes) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
}

fn write_bytes(mut stream: &UnixStream, bytes: &[u8]) -> io::Result<()> {
    stream.write_all(&(bytes.len() as u64).to_le_bytes())?;
    stream.write_all(bytes)
}

fn send_descriptor(to: &UnixStream, one: BorrowedFd<'_>) -> io::Result<()> {
    loop {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let fds = [one];
        control.push(SendAncillaryMessage::ScmRights(&fds));
        match sendmsg(to, &[IoSlice::new(&[TELLS])], &mut control, SendFlags::NOSIGNAL) {
            Err(rustix::io::Errno::INTR) => {}
            sent => return Ok(sent.map(drop)?),
        }
    }
}

fn receive_descriptor(from: &UnixStream) -> io::Result<OwnedFd> {
    loop {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut byte = [0];
        let mut pieces = [IoSliceMut::new(&mut byte)];
        match recvmsg(from, &mut pieces, &mut control, RecvFlags::CMSG_CLOEXEC) {
            Err(rustix::io::Errno::INTR) => continue,
            Err(error) => return Err(error.into()),
            Ok(_) => {}
        }
        let found = control.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut all) => all.next(),
            _ => None,
        });
        return found.ok_or_else(|| io::ErrorKind::UnexpectedEof.into());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_is_gone_has_nothing_back() {
        let (one, other) = UnixStream::pair().expect("a pair");
        drop(other);
        assert!(Predecessor(one).dismiss().is_ok());
        let (one, other) = UnixStream::pair().expect("a pair");
        assert!(Predecessor(one).dismiss().is_ok());
        assert_eq!(read_byte(&other).expect("a byte"), SERVES);
    }
}
