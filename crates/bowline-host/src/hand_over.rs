//! What a node hands over to another process of its host, which resumes in its place: programs keep
//! their sockets and channels and notice nothing.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::FileExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bowline_base::Errno;
use bowline_host_wire::{
    ChannelId, HAND_OVER_VERSION, HEAD_LEN, Head, NodeId, Op, Reply, Request, SocketHandle, VERSION,
};
use bowline_rds::SAVED_FORMAT;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::net::sockopt::{socket_acceptconn, socket_cookie, socket_domain, socket_type};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketType, recvmsg, sendmsg,
};
use serde::{Deserialize, Serialize};

use crate::arrivals;
use crate::caller::Credentials;
use crate::channel::SavedChannel;
use crate::closer::Passed;
use crate::core::{ChannelPart, Core, Outside, Parts, Set, SocketPart};
use crate::memory::{self, Memory};
use crate::namespace::{connect_within, network_namespace};
use crate::service::Service;
use crate::socket::SavedSocket;

/// What two nodes must have in common: the versions, and the format of the node's own state.
const WANTED: (i32, i32, i64) = (VERSION, HAND_OVER_VERSION, SAVED_FORMAT as i64);
/// Most descriptors in one message; the kernel takes 253.
const BATCH: usize = 250;
/// How long the node that hands over may take, and how long the one that takes over.
const PATIENCE: Duration = Duration::from_secs(10);

/// What the two nodes say to each other, a byte each, after the reply to the request: the former
/// one with each batch of descriptors, the next one that it is ready, the former one that all is
/// the other's, the next one that it begins, and that it serves. Nodes of before send `PLAIN`,
/// and end the connection instead of saying the last two; whoever sends `TELLS` says these, and
/// that it has taken everything back. So its silent end is that of its process.
const PLAIN: u8 = 0;
const TELLS: u8 = 1;
const TAKEN_BACK: u8 = 2;
const BEGINS: u8 = 3;
const SERVES: u8 = 4;

/// How a hand-over has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sent {
    /// The other process serves.
    Taken,
    /// The other process has begun to change what it was given, and then ended: what programs had
    /// is lost, but [`HostState::listener`] of what was sent is still there.
    Lost,
}
/// Attempts to send a message, a millisecond apart, while the kernel has too many descriptors of
/// this user on their way.
const ATTEMPTS: u32 = 2000;

/// All that a node hands over.
#[derive(Debug)]
pub struct HandOver {
    /// A file in memory with the state of host and node.
    pub state: OwnedFd,
    /// Listeners of host and node, channels, and sockets with their memory, in any order.
    pub programs: Vec<OwnedFd>,
}

/// What a descriptor is, by which its receiver finds it: nothing that programs can give to another,
/// and nothing that the system uses again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
enum Identity {
    /// The system's number of a socket.
    Socket(u64),
    /// The number in the name of a socket's memory.
    Memory(u64),
}

impl Identity {
    fn of(descriptor: &OwnedFd) -> io::Result<Self> {
        match socket_cookie(descriptor) {
            Ok(cookie) => Ok(Self::Socket(cookie)),
            Err(rustix::io::Errno::NOTSOCK) => Ok(Self::Memory(memory::number_of(descriptor)?)),
            Err(errno) => Err(errno.into()),
        }
    }
}

/// Tells whether a descriptor is a socket at which a node listens for peers.
fn is_listener(descriptor: &OwnedFd) -> bool {
    let domain = socket_domain(descriptor);
    matches!(domain, Ok(AddressFamily::INET | AddressFamily::INET6))
        && socket_type(descriptor) == Ok(SocketType::STREAM)
        && socket_acceptconn(descriptor) == Ok(true)
}

#[derive(Debug, Serialize, Deserialize)]
struct SavedHost {
    /// [`VERSION`] and [`HAND_OVER_VERSION`].
    versions: (i32, i32),
    /// Number of the node, and of the next channel.
    number: NodeId,
    next: ChannelId,
    /// The network namespace in which it is.
    namespace: u64,
    listener: Identity,
    /// Other sockets at which the process listens, by the bytes of their names. A node of before
    /// has none.
    #[serde(default)]
    others: Vec<(Vec<u8>, Identity)>,
    channels: Vec<ChannelPlace>,
    sockets: Vec<SocketPlace>,
}

#[derive(Debug, Serialize, Deserialize)]
struct ChannelPlace {
    number: ChannelId,
    stream: Identity,
    /// A socket that came with a request.
    descriptor: Option<Identity>,
    /// Sockets that it may name.
    known: Set<SocketHandle>,
    state: SavedChannel,
}

#[derive(Debug, Serialize, Deserialize)]
struct SocketPlace {
    handle: SocketHandle,
    end: Identity,
    memory: Identity,
    state: SavedSocket,
}

impl HandOver {
    /// An empty state, for the host and then the node to write to.
    pub(crate) fn new() -> io::Result<Self> {
        let state = memfd_create("bowline-node", MemfdFlags::CLOEXEC)?;
        Ok(Self { state, programs: Vec::new() })
    }

    fn keep(&mut self, descriptor: OwnedFd) -> io::Result<Identity> {
        let identity = Identity::of(&descriptor)?;
        self.programs.push(descriptor);
        Ok(identity)
    }

    /// Where the node writes its state, after the host's.
    ///
    /// # Errors
    /// Errors of the system: no descriptors left.
    pub fn writer(&self) -> io::Result<impl Write> {
        Ok(io::BufWriter::new(File::from(self.state.try_clone()?)))
    }

    /// Sends everything to the process that has asked for it, and waits until it serves. With an
    /// error it does not, and [`open`](Self::open) takes everything back.
    ///
    /// # Errors
    /// Those of the connection; `TimedOut`.
    pub fn send(&self, to: &UnixStream) -> io::Result<Sent> {
        self.offer(to).inspect_err(|_| {
            // Who is gone need not know.
            let _ = say(to, TAKEN_BACK);
        })
    }

    fn offer(&self, to: &UnixStream) -> io::Result<Sent> {
        to.set_nonblocking(false)?;
        to.set_write_timeout(Some(PATIENCE))?;
        to.set_read_timeout(Some(PATIENCE))?;
        let reply = Reply::HandOver(self.programs.len() + 1);
        let head = reply.emit(Op::HandOver).emit(0, 0, 0);
        (&*to).write_all(&head.ok_or(io::ErrorKind::InvalidData)?)?;
        let all: Vec<_> =
            std::iter::once(&self.state).chain(&self.programs).map(AsFd::as_fd).collect();
        all.chunks(BATCH).try_for_each(|batch| send_batch(to, batch))?;
        let tells = heard(to)? == TELLS;
        // From here on it is the other's.
        say(to, PLAIN)?;
        if !tells {
            return Ok(Sent::Taken);
        }
        // One that takes too long is there, and has everything.
        let is_late = |error: &io::Error| error.kind() == io::ErrorKind::WouldBlock;
        match heard(to) {
            Ok(_) => {}
            Err(error) if is_late(&error) => return Ok(Sent::Taken),
            Err(error) => return Err(error),
        }
        match heard(to) {
            Err(error) if !is_late(&error) => Ok(Sent::Lost),
            _ => Ok(Sent::Taken),
        }
    }

    /// Asks the node that serves programs at `place` to hand over, and takes what it has; `None`:
    /// nobody listens there. The other node ends.
    ///
    /// # Errors
    /// `EACCES` when one of the two processes is of another user than the other and root,
    /// `EPROTONOSUPPORT` when the other node
    /// is of a version that cannot hand over to this one, `EALREADY` when it hands over to
    /// somebody else; `TimedOut` when it does not accept; [`is_gone`](Self::is_gone) tells those
    /// of a node that ends before.
    pub fn receive(place: &Path) -> io::Result<Option<(Self, Predecessor)>> {
        let from = match connect_within(place, PATIENCE) {
            Ok(from) => from,
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused
                ) =>
            {
                return Ok(None);
            }
            Err(error) => return Err(error),
        };
        // The state is not validated, so only root and our own user may send it.
        let user = Credentials::of_peer(&from)?.user;
        if user != 0 && user != rustix::process::geteuid().as_raw() {
            return Err(rustix::io::Errno::ACCESS.into());
        }
        from.set_read_timeout(Some(PATIENCE))?;
        from.set_write_timeout(Some(PATIENCE))?;
        let (version, hand_over_version, state_format) = WANTED;
        let request = Request::HandOver { version, hand_over_version, state_format };
        let request = request.emit(0).ok_or(io::ErrorKind::InvalidData)?;
        (&from).write_all(&request.parts().concat())?;
        let mut head = [0; HEAD_LEN];
        (&from).read_exact(&mut head)?;
        let reply = match Head::parse(&head) {
            Ok((head, _)) if head.op == Op::HandOver => Reply::parse(&head),
            _ => return Err(io::ErrorKind::InvalidData.into()),
        };
        let count = match reply {
            Ok(Reply::HandOver(count)) => count,
            Ok(Reply::Failed { errno, .. }) => return Err(io::Error::from_raw_os_error(errno)),
            _ => return Err(io::ErrorKind::InvalidData.into()),
        };
        let (mut all, mut tells) = (Vec::new(), false);
        while all.len() < count {
            tells = receive_batch(&from, &mut all)? == TELLS;
        }
        let programs = all.split_off(1.min(all.len()));
        let state = all.pop().ok_or(io::ErrorKind::InvalidData)?;
        let predecessor = Predecessor { stream: Arc::new(from), tells };
        Ok(Some((Self { state, programs }, predecessor)))
    }

    /// Tells whether this error of [`receive`](Self::receive) is that of a node which has ended
    /// before it had handed over.
    pub fn is_gone(error: &io::Error) -> bool {
        matches!(
            error.kind(),
            io::ErrorKind::UnexpectedEof
                | io::ErrorKind::ConnectionReset
                | io::ErrorKind::BrokenPipe
        )
    }

    /// Reads the host's part of the state; the node's is what is left of the returned reader, and
    /// its listeners.
    ///
    /// # Errors
    /// `InvalidData` for what is not of this version; errors of the system.
    pub fn open(self) -> io::Result<(HostState, Vec<OwnedFd>, impl Read)> {
        let mut state = io::BufReader::new(FromStart { file: File::from(self.state), at: 0 });
        let mut len = [0; 8];
        state.read_exact(&mut len)?;
        let mut bytes = Vec::new();
        (&mut state).take(u64::from_le_bytes(len)).read_to_end(&mut bytes)?;
        let invalid = |text: String| io::Error::new(io::ErrorKind::InvalidData, text);
        let saved: SavedHost =
            rmp_serde::from_slice(&bytes).map_err(|error| invalid(error.to_string()))?;
        if saved.versions != (VERSION, HAND_OVER_VERSION) {
            let text = "a node of another version has handed it over";
            return Err(invalid(text.into()));
        }
        let own = network_namespace();
        if own != 0 && saved.namespace != 0 && own != saved.namespace {
            let text = "the node is in another network namespace: start this one there";
            return Err(invalid(text.into()));
        }
        let mut programs = HashMap::<Identity, Vec<Passed>>::new();
        let mut listeners = Vec::new();
        for descriptor in self.programs {
            if is_listener(&descriptor) {
                listeners.push(descriptor);
            } else {
                let identity = Identity::of(&descriptor)?;
                programs.entry(identity).or_default().push(Passed::new(None, descriptor));
            }
        }
        Ok((HostState { saved, programs }, listeners, state))
    }
}

/// The node that hands over, which takes everything back unless it is told otherwise.
#[derive(Clone, Debug)]
pub struct Predecessor {
    stream: Arc<UnixStream>,
    /// It says when it takes everything back.
    tells: bool,
}

impl Predecessor {
    /// This process is ready to resume, and the other node is to end; one that was killed has
    /// ended, too.
    ///
    /// # Errors
    /// The other node has taken everything back, or perhaps has.
    pub fn dismiss(&self) -> io::Result<()> {
        // The other has perhaps said something before it closed the connection.
        let _ = say(&self.stream, TELLS);
        match heard(&self.stream) {
            Ok(PLAIN) => {}
            Err(error) if self.tells && HandOver::is_gone(&error) => {}
            Ok(_) => return Err(io::Error::other("it has taken everything back")),
            Err(error) => return Err(error),
        }
        let _ = say(&self.stream, BEGINS);
        Ok(())
    }

    /// This process serves: the other one need not resume in its place.
    pub fn release(&self) {
        let _ = say(&self.stream, SERVES);
    }
}

fn say(mut to: &UnixStream, word: u8) -> io::Result<()> {
    to.write_all(&[word])
}

fn heard(mut from: &UnixStream) -> io::Result<u8> {
    let mut word = [0];
    from.read_exact(&mut word)?;
    Ok(word[0])
}

/// Reads a file that other processes may read as well.
struct FromStart {
    file: File,
    at: u64,
}

impl Read for FromStart {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        let n = self.file.read_at(to, self.at)?;
        self.at += n as u64;
        Ok(n)
    }
}

fn send_batch(to: &UnixStream, batch: &[BorrowedFd<'_>]) -> io::Result<()> {
    for _ in 0..ATTEMPTS {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(BATCH))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        control.push(SendAncillaryMessage::ScmRights(batch));
        match sendmsg(to, &[IoSlice::new(&[TELLS])], &mut control, SendFlags::NOSIGNAL) {
            Err(rustix::io::Errno::TOOMANYREFS) => std::thread::sleep(Duration::from_millis(1)),
            Err(rustix::io::Errno::INTR) => {}
            sent => return Ok(sent.map(drop)?),
        }
    }
    Err(rustix::io::Errno::TOOMANYREFS.into())
}

fn receive_batch(from: &UnixStream, to: &mut Vec<OwnedFd>) -> io::Result<u8> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(BATCH))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    let mut pieces = [IoSliceMut::new(&mut byte)];
    let got = loop {
        match recvmsg(from, &mut pieces, &mut control, RecvFlags::CMSG_CLOEXEC) {
            Err(rustix::io::Errno::INTR) => {}
            got => break got?,
        }
    };
    let before = to.len();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(descriptors) = message {
            to.extend(descriptors);
        }
    }
    // Without descriptors left in this process, some of a message are missing.
    if got.bytes == 0 || to.len() == before {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(byte[0])
}

/// The host's part of what was handed over.
#[derive(Debug)]
pub struct HostState {
    saved: SavedHost,
    /// What is not taken of it, other threads close: programs have a hand in all of it.
    programs: HashMap<Identity, Vec<Passed>>,
}

impl HostState {
    fn take(&mut self, identity: Identity) -> io::Result<Passed> {
        let found = self.programs.get_mut(&identity).and_then(Vec::pop);
        found.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "a descriptor is missing"))
    }

    pub(crate) fn number(&self) -> NodeId {
        self.saved.number
    }

    /// Returns the listener for programs once more, for a node that cannot resume with them.
    ///
    /// # Errors
    /// `InvalidData` when it was not handed over; no descriptors left.
    pub fn listener(&self) -> io::Result<UnixListener> {
        let found = self.programs.get(&self.saved.listener).and_then(|all| all.first());
        let found = found.ok_or(io::ErrorKind::InvalidData)?;
        Ok(found.as_fd().try_clone_to_owned()?.into())
    }

    /// Takes another socket at which the process has listened, by the name that it was given.
    pub fn take_other(&mut self, name: &Path) -> Option<UnixListener> {
        let is_it = |(of, _): &(Vec<u8>, Identity)| of == name.as_os_str().as_bytes();
        let at = self.saved.others.iter().position(is_it)?;
        let (_, identity) = self.saved.others.swap_remove(at);
        self.listening(identity).ok()
    }

    /// The listener for programs.
    pub(crate) fn take_listener(&mut self) -> io::Result<UnixListener> {
        self.listening(self.saved.listener)
    }

    fn listening(&mut self, identity: Identity) -> io::Result<UnixListener> {
        let listener = self.take(identity)?;
        let listens = socket_domain(&listener) == Ok(AddressFamily::UNIX)
            && socket_acceptconn(&listener) == Ok(true);
        if !listens {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "what listens does not"));
        }
        Ok(listener.into_inner().into())
    }
}

/// The process to which a node is asked to hand over.
#[derive(Debug)]
pub(crate) struct Successor {
    stream: Mutex<Option<UnixStream>>,
    bell: OwnedFd,
}

impl Successor {
    pub(crate) fn new() -> io::Result<Self> {
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { stream: Mutex::new(None), bell })
    }

    /// A descriptor that is readable once there is one.
    pub(crate) fn bell(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }

    pub(crate) fn take(&self) -> Option<UnixStream> {
        self.stream.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Returns `false` if there was one.
    fn put(&self, stream: UnixStream) -> bool {
        let mut place = self.stream.lock().unwrap_or_else(PoisonError::into_inner);
        let is_first = place.is_none();
        if is_first {
            *place = Some(stream);
            // It is written to once.
            let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
        }
        is_first
    }
}

impl<O: Outside> Core<O> {
    /// Another node asks for everything. On success the stream leaves the channel table and carries
    /// the hand-over.
    pub(crate) fn name_successor(
        &mut self,
        number: ChannelId,
        asked: (i32, i32, i64),
    ) -> Result<(), Errno> {
        let channel = self.channels.get(&number).ok_or(Errno::EBADF)?;
        if !self.accounts.is_trusted(channel.caller.user) {
            return Err(Errno::EACCES);
        }
        self.outside.name_successor(channel.stream(), asked)
    }
}

/// What another node asks of this one.
pub(crate) fn name_successor(
    successor: &Successor,
    stream: impl AsFd,
    asked: (i32, i32, i64),
) -> Result<(), Errno> {
    if asked != WANTED {
        return Err(Errno::EPROTONOSUPPORT);
    }
    let stream = stream.as_fd().try_clone_to_owned().map_err(|_| Errno::ENFILE)?;
    if successor.put(stream.into()) { Ok(()) } else { Err(Errno::EALREADY) }
}

impl Service {
    /// Takes apart what programs have of this node, for another process.
    pub(crate) fn hand_over(self, others: Vec<(PathBuf, UnixListener)>) -> io::Result<HandOver> {
        let mut all = HandOver::new()?;
        let others = others.into_iter().map(|(name, listener)| {
            Ok((name.into_os_string().into_vec(), all.keep(listener.into())?))
        });
        let others = others.collect::<io::Result<_>>()?;
        let (number, namespace) = (self.core.number, self.core.namespace);
        let parts = self.core.take_apart();
        let mut saved = SavedHost {
            versions: (VERSION, HAND_OVER_VERSION),
            number,
            next: parts.next,
            namespace,
            listener: all.keep(self.listener.into())?,
            others,
            channels: Vec::new(),
            sockets: Vec::new(),
        };
        for ChannelPart { number, stream, descriptor, known, state } in parts.channels {
            let of_node = descriptor.filter(|one| arrivals::may_be_socket_of_node(one));
            saved.channels.push(ChannelPlace {
                number,
                stream: all.keep(stream.into_inner())?,
                descriptor: of_node.map(|one| all.keep(one.into_inner())).transpose()?,
                known,
                state,
            });
        }
        for SocketPart { handle, end, memory, state } in parts.sockets {
            let memory = memory.descriptor().try_clone_to_owned()?;
            let (end, memory) = (all.keep(end.into_inner())?, all.keep(memory)?);
            saved.sockets.push(SocketPlace { handle, end, memory, state });
        }
        let bytes = rmp_serde::to_vec_named(&saved).map_err(io::Error::other)?;
        let mut out = all.writer()?;
        out.write_all(&(bytes.len() as u64).to_le_bytes())?;
        out.write_all(&bytes)?;
        out.flush()?;
        drop(out);
        Ok(all)
    }

    /// Resumes what another process had. A socket or channel that cannot be taken is closed.
    pub(crate) fn resume(&mut self, mut state: HostState) {
        let mut lost = Vec::new();
        let mut parts = Parts { next: state.saved.next, channels: Vec::new(), sockets: Vec::new() };
        for SocketPlace { handle, end, memory, state: socket } in
            std::mem::take(&mut state.saved.sockets)
        {
            let id = socket.id;
            let taken = state.take(end).and_then(|end| Ok((end, state.take(memory)?)));
            match taken.and_then(|(end, memory)| Ok((end, Memory::resume(memory.into_inner())?))) {
                Ok((end, memory)) => {
                    parts.sockets.push(SocketPart { handle, end, memory, state: socket });
                }
                Err(_) => self.core.rds.close(id),
            }
        }
        for ChannelPlace { number, stream, descriptor, known, state: channel } in
            std::mem::take(&mut state.saved.channels)
        {
            let taken = state.take(stream).and_then(|stream| {
                Ok((stream, descriptor.map(|one| state.take(one)).transpose()?))
            });
            match taken {
                Ok((stream, descriptor)) => {
                    let state = channel;
                    parts.channels.push(ChannelPart { number, stream, descriptor, known, state });
                }
                Err(_) => lost.push(number),
            }
        }
        self.core.resume(parts);
        lost.into_iter().for_each(|number| self.core.end_channel(number));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    /// Nodes from before have written them so.
    #[test]
    fn ids_are_handed_over_as_numbers() {
        let saved = (SocketHandle(7), ChannelId(1 << 40), HashSet::from([SocketHandle(3)]));
        let bytes = rmp_serde::to_vec_named(&saved).expect("bytes");
        assert_eq!(bytes, rmp_serde::to_vec_named(&(7, 1_u64 << 40, [3])).expect("bytes"));
        assert_eq!(
            rmp_serde::from_slice::<(u64, u64, [u64; 1])>(&bytes).ok(),
            Some((7, 1 << 40, [3]))
        );
        let read =
            rmp_serde::from_slice::<(SocketHandle, ChannelId, HashSet<SocketHandle>)>(&bytes);
        assert_eq!(read.ok(), Some(saved));
    }
}
