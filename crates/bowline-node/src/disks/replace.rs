//! A process with mapped disks or exports continues in another process: `--replace`.
//!
//! ```text
//!   new: control socket, operation replace: what it wants  -->  old: is it this? may it ask?
//!        <-- yes, or why not (the old one continues)
//!        --> BEGIN: all that can fail without the other one is done
//!        <-- TELLS and what it has, with descriptors; or FAILS and why (the old one continues)
//!        <-- FREE: session, device and sockets are closed
//!        --> READY: all is open here, and clients are left alone
//!        <-- GO: the new one begins                             the old one ends
//!
//!        an end of the connection before READY, or no READY in time; or GO cannot be sent:
//!        <-- NO                                                 the old one takes everything back
//!        an end of the connection behind READY, without NO: the new one begins
//! ```
//!
//! Whether the old one may go back to what it has is decided when it sends GO, by that alone: so at
//! each instant at most one of both may serve clients, whichever is killed.

use std::{
    borrow::Cow,
    collections::BTreeSet,
    io::{self, IoSlice, IoSliceMut, Read, Write},
    mem::MaybeUninit,
    net::{IpAddr, Shutdown},
    os::{
        fd::{BorrowedFd, OwnedFd},
        unix::net::{UnixListener, UnixStream},
    },
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use bowline_block::front::ublk::DeviceId;
use bowline_ctl::{Errno, Peer, Successor, ask_to_replace, folder};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    net::{
        RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
        SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
    },
};
use serde::{Deserialize, Serialize};

use super::{
    FrontEndConfig,
    block_device::{DiskBlockDevice, DiskOrigin},
    kept,
};
use crate::{
    Failure, Outcome,
    service_manager::{Contact, Supervisor},
    signals::Stop,
};

/// Version of all that the two processes say to each other.
const FORMAT: u32 = 5;
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
const READY: u8 = b'R';
const GO: u8 = b'G';
const NO: u8 = b'N';

/// How often a process that waits for its successor shows that it lives.
const BEAT: Duration = Duration::from_millis(50);

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

    /// Ends the front ends of a disk that this process has had and cannot serve any more: its
    /// socket, its mount, and its block device with its record. Users get errors. `listener`: as
    /// [`FrontEndConfig::clear`] takes it; `ublk`: the block device, if this process knows it.
    pub fn end_front_ends(&self, listener: Option<&UnixListener>, ublk: Option<DeviceId>) {
        let Self::Map { device, session, servers, front_ends } = self else { return };
        front_ends.clear(listener);
        if front_ends.ublk {
            let (session, servers) = (session.clone(), servers.clone());
            let origin = DiskOrigin { session, device: device.clone(), servers };
            if let Err(error) = DiskBlockDevice::end(&origin, ublk) {
                note!("the block device of {device} stays: {error}");
            }
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
    /// How long it may need to be ready, in milliseconds.
    ready_within_ms: u64,
    /// It has a service manager of its own.
    has_manager: bool,
}

/// What of a wish is the same in all versions.
#[derive(Deserialize)]
struct Kind {
    format: u32,
    service: Service,
}

/// What comes with the descriptors.
#[derive(Deserialize, Serialize)]
struct Preface<'a> {
    /// What the rest is.
    state: Cow<'a, str>,
    /// The service manager of the process that is replaced.
    manager: Option<Contact>,
}

/// What a process hands over, and keeps until the other one has it.
#[derive(Debug, Default)]
pub struct Packed<'a> {
    /// What the rest is, as JSON.
    pub state: String,
    /// Bytes, in the order that `state` tells.
    pub bytes: Vec<u8>,
    /// Descriptors, likewise.
    pub descriptors: Vec<BorrowedFd<'a>>,
}

/// What a process was given.
#[derive(Debug, Default)]
pub struct Parcel {
    /// What the rest is, as JSON.
    pub state: String,
    /// Bytes, in the order that `state` tells.
    pub bytes: Vec<u8>,
    /// Descriptors, likewise.
    pub descriptors: Vec<OwnedFd>,
    /// The service manager of the process that is replaced, for one that has none.
    pub manager: Option<Contact>,
}

/// The process whose place this one takes.
#[derive(Debug)]
pub struct Predecessor(UnixStream);

impl Predecessor {
    /// Finds the process that does this, behind a control socket or behind any of this user's, and
    /// asks it for its place. This process is ready within a time after it has everything, or never
    /// will be.
    ///
    /// # Errors
    /// There is no such process, or it refuses.
    pub fn find(
        control: Option<&Path>,
        service: Service,
        ready_within: Duration,
        supervisor: &Supervisor,
    ) -> Outcome<Self> {
        let mut failure = None;
        let own = std::process::id();
        let places =
            control.map_or_else(|| sockets(service.word(), own), |place| vec![place.to_owned()]);
        let ready_within_ms = ready_within.as_millis().try_into().unwrap_or(u64::MAX);
        let has_manager = supervisor.is_there();
        let wish = Wish { format: FORMAT, service, ready_within_ms, has_manager };
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
            _ if error.raw_os_error() == Some(Errno::EMFILE.0) => {
                "this process may not open all files that it has: raise the limit of open files \
                 (`ulimit -n`)"
                    .to_owned()
            }
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
        let Preface { state, manager } = serde_json::from_str(&text)?;
        let state = state.into_owned();
        match read_byte(stream)? {
            FREE => Ok(Ok(Parcel { state, bytes, descriptors, manager })),
            _ => Err(io::ErrorKind::InvalidData.into()),
        }
    }

    /// All is open here: asks whether this process may begin. It may, if the other one says so, or
    /// is gone.
    ///
    /// # Errors
    /// The other process has taken everything back, or may do so.
    pub fn lets_begin(&self) -> Outcome {
        // An error is seen by what is read.
        let _ = (&self.0).write_all(&[READY]);
        let mut decided = read_byte(&self.0);
        let is_late = matches!(&decided, Err(error) if error.kind() == io::ErrorKind::WouldBlock);
        if is_late {
            // It can decide no longer; perhaps it just has.
            let _ = self.0.shutdown(Shutdown::Both);
            decided = read_byte(&self.0);
        }
        let why = match decided {
            Ok(GO) => return Ok(()),
            Err(error) if !is_late && is_end(&error) => {
                note!("the process that was replaced has ended by itself");
                return Ok(());
            }
            Ok(NO) => "it continues, since this one was not ready in time".to_owned(),
            _ if is_late => format!("it has not answered for {PATIENCE:?}"),
            Ok(_) => "it says what this one does not know".to_owned(),
            Err(error) => error.to_string(),
        };
        Err(Failure::failed(format!("the process to be replaced: {why}")))
    }
}

/// Tells whether the other process has closed the connection, or is gone.
fn is_end(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset)
}

/// A process that takes the place of this one.
#[derive(Debug)]
pub struct Heir {
    stream: Arc<UnixStream>,
    process: Option<u32>,
    ready_within: Duration,
    has_manager: bool,
}

impl Heir {
    /// Answers a process that asks for the place of this one, which does `service`; returns it if
    /// it may have it. `trouble`: why not now.
    pub fn of(
        asks: Successor,
        service: &Service,
        trouble: impl FnOnce() -> Option<String>,
    ) -> Option<Self> {
        let answer = admit(&asks, service).and_then(|wish| match trouble() {
            Some(why) => Err((Errno::EBUSY, why)),
            None => Ok(wish),
        });
        // One that is gone wants nothing.
        let wish = match answer {
            Ok(wish) => asks.answer(Ok(())).ok().map(|()| wish)?,
            Err((errno, why)) => {
                let _ = asks.answer(Err((errno, &why)));
                return None;
            }
        };
        let stream = asks.stream;
        let process = Peer::at(&stream).ok().and_then(|peer| u32::try_from(peer.process).ok());
        let heir = Self {
            process: process.filter(|id| *id > 0),
            ready_within: Duration::from_millis(wish.ready_within_ms),
            has_manager: wish.has_manager,
            stream,
        };
        let begins = prepare(&heir.stream).and_then(|()| read_byte(&heir.stream));
        (begins.ok()? == BEGIN).then_some(heir)
    }

    /// Tells it why it does not get anything.
    pub fn refuse(&self, why: &str) {
        // One that is gone need not know.
        let _ = (&*self.stream)
            .write_all(&[FAILS])
            .and_then(|()| write_bytes(&self.stream, why.as_bytes()));
    }

    /// Sends it everything.
    ///
    /// # Errors
    /// Those of the connection.
    pub fn send(&self, parcel: &Packed<'_>, supervisor: &Supervisor) -> io::Result<()> {
        let mut stream = &*self.stream;
        let manager = supervisor.contact().filter(|_| !self.has_manager);
        let text = serde_json::to_string(&Preface { state: (&*parcel.state).into(), manager })?;
        stream.write_all(&[TELLS])?;
        write_bytes(stream, text.as_bytes())?;
        write_bytes(stream, &parcel.bytes)?;
        stream.write_all(&(parcel.descriptors.len() as u32).to_le_bytes())?;
        parcel.descriptors.iter().try_for_each(|one| send_descriptor(stream, *one))
    }

    /// Tells it that all is closed here, waits until it is ready, and lets it begin; calls
    /// `waiting` again and again. Returns false if it has ended, or was not ready in time: all is
    /// this process's again. A request to stop changes nothing: who ends this process wants the
    /// other one to serve.
    pub fn begins(&self, waiting: &mut dyn FnMut()) -> bool {
        let mut stream = &*self.stream;
        if stream.write_all(&[FREE]).is_err() {
            return false;
        }
        let end = Instant::now() + self.ready_within;
        while !is_readable(stream, BEAT) {
            waiting();
            if Instant::now() >= end {
                return self.is_late(waiting);
            }
        }
        matches!(read_byte(stream), Ok(READY)) && stream.write_all(&[GO]).is_ok()
    }

    /// This process takes everything back: tells the other one, and waits a while for its end.
    /// Returns false.
    fn is_late(&self, waiting: &mut dyn FnMut()) -> bool {
        note!("the process that replaces this one is not ready after {:?}", self.ready_within);
        // One that is gone need not know.
        let _ = (&*self.stream).write_all(&[NO]);
        let end = Instant::now() + PATIENCE;
        while Instant::now() < end {
            waiting();
            if is_readable(&self.stream, BEAT) && read_byte(&self.stream).is_err() {
                break;
            }
        }
        false
    }

    /// Its service is this one's: the manager is notified, unless the other process has one of its
    /// own or this one was asked to stop, by which the manager may mean the service.
    pub fn succeeds(&self, supervisor: &Supervisor, stop: &Stop) {
        match self.process.filter(|_| !self.has_manager && !stop.asked()) {
            Some(process) if supervisor.is_there() => {
                if let Err(error) = supervisor.main_process(process) {
                    note!("the service manager does not know process {process}: {error}");
                }
            }
            _ => {
                supervisor.stopping(Duration::ZERO, "handed over");
                if supervisor.keeps() {
                    kept::forget(supervisor);
                }
            }
        }
    }
}

/// Waits a while until there is something to read, or the connection has ended.
fn is_readable(stream: &UnixStream, within: Duration) -> bool {
    let within = Timespec::try_from(within).unwrap_or_default();
    poll(&mut [PollFd::new(stream, PollFlags::IN)], Some(&within)).is_ok_and(|count| count > 0)
}

/// Tells whether a process may have the place of this one, or why not.
fn admit(asks: &Successor, service: &Service) -> Result<Wish, (Errno, String)> {
    if !is_ours(&asks.stream) {
        return Err((Errno::EACCES, "it belongs to another user".to_owned()));
    }
    let text = "it is of a version that cannot hand over to this one";
    let other = || (Errno::EPROTONOSUPPORT, text.to_owned());
    let kind: Kind = serde_json::from_str(&asks.wants).map_err(|_| other())?;
    if kind.format != FORMAT {
        return Err(other());
    }
    if !service.is_same(&kind.service) {
        return Err((Errno::ENOENT, format!("it is {}", service.text())));
    }
    // Of another version, the rest may be anything.
    let wish: Wish = serde_json::from_str(&asks.wants).map_err(|_| other())?;
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
        _ => Ok(wish),
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
        let is_cut = match recvmsg(from, &mut pieces, &mut control, RecvFlags::CMSG_CLOEXEC) {
            Err(rustix::io::Errno::INTR) => continue,
            Err(error) => return Err(error.into()),
            // The system has no number for it.
            Ok(received) => received.flags.contains(ReturnFlags::CTRUNC),
        };
        let found = control.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut all) => all.next(),
            _ => None,
        });
        return found.ok_or_else(|| match is_cut {
            true => io::Error::from_raw_os_error(Errno::EMFILE.0),
            false => io::ErrorKind::UnexpectedEof.into(),
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_may_begin_is_what_the_former_process_has_said_last() {
        let pair = || {
            let (one, other) = UnixStream::pair().expect("a pair");
            one.set_read_timeout(Some(Duration::from_millis(50))).expect("a limit");
            (Predecessor(one), other)
        };
        let (next, former) = pair();
        (&former).write_all(&[GO]).expect("sent");
        assert!(next.lets_begin().is_ok());
        assert_eq!(read_byte(&former).expect("a byte"), READY);
        // It is gone, whether it has read anything or not.
        let (next, former) = pair();
        drop(former);
        assert!(next.lets_begin().is_ok());
        for (word, may_begin) in [(GO, true), (NO, false), (b'?', false)] {
            let (next, former) = pair();
            (&next.0).write_all(&[READY]).expect("sent");
            (&former).write_all(&[word]).expect("sent");
            drop(former);
            assert_eq!(next.lets_begin().is_ok(), may_begin, "{word}");
        }
        // It hangs: it can let nobody begin afterwards.
        let (next, former) = pair();
        assert!(next.lets_begin().is_err());
        assert!((&former).write_all(&[GO]).is_err());
    }
}
