//! Channels to a node: requests and their replies.

use core::ffi::c_int;
use core::fmt;
use core::marker::PhantomData;
use core::time::Duration;
use std::time::Instant;

use bowline_host_wire::{
    Features, Greeting, HEAD_LEN, Head, Lengths, LockOwner, Malformed, NONCE_LEN, NodeId, Reply,
    Request, SocketHandle, VERSION, offer,
};

use crate::agent::Given;
use crate::system::{self, Process};
use crate::trust::{self, Place};
use crate::watch;

/// Longest time for a whole greeting, or for the rest of a reply that has begun: longer than a
/// hand-over to another process takes.
const LIMIT: Duration = Duration::from_secs(15);

/// Flag in the word of a channel, beside its descriptor: the node has been given memory over it.
const SHOWN: u32 = 1 << 31;

/// Hooks of a process for the descriptors of its channels.
pub trait Descriptors {
    /// Called for a new channel; returns the descriptor that it uses.
    fn opened(fd: c_int) -> c_int;
    /// Called before the descriptor of a channel is closed.
    fn closes(fd: c_int);
    /// Tells whether channels stay open for the next call. Where not, each call makes one.
    fn are_kept() -> bool {
        true
    }
    /// Called before a wait that may be long, for what comes on the descriptor of a channel; a hook
    /// whose thread ends in it has closed the descriptor.
    ///
    /// # Errors
    /// EINTR when a signal has come.
    fn waits(_fd: c_int) -> Result<(), c_int> {
        Ok(())
    }
}

/// Tells whether an error means that the node refuses a channel to this process.
pub const fn is_refusal(errno: c_int) -> bool {
    matches!(errno, libc::EACCES | libc::EMFILE | libc::ENFILE)
}

/// A connection to a node, used by one call at a time.
pub struct Channel<D: Descriptors> {
    fd: c_int,
    /// The channel's identity in locks; 0 before the greeting.
    owner: LockOwner,
    /// Deadline of the greeting, or of a reply that has begun; `None` while none is due.
    until: Option<Instant>,
    /// The node has been given memory of this process over this channel.
    has_shown: bool,
    /// Memory given to the node for the current call.
    given: Option<Given>,
    descriptors: PhantomData<fn() -> D>,
}

/// The greeting of a node on a new channel.
#[derive(Clone, Copy, Debug)]
pub struct Welcome {
    /// Number of the node.
    pub node: NodeId,
    /// Network namespace of the node, 0 if unknown.
    pub namespace: u64,
    /// Features of the node beyond its version.
    pub features: Features,
    /// The process that sent the greeting.
    pub(crate) greeter: Process,
    nonce: [u8; NONCE_LEN],
}

impl<D: Descriptors> Channel<D> {
    /// Opens a channel to the node of this host: where the environment says, else to the node that
    /// serves the network namespace of the calling thread.
    ///
    /// # Errors
    /// Those of [`open`](Self::open); EAFNOSUPPORT when the only nodes serve other namespaces.
    pub fn open_to_host() -> Result<(Self, Welcome), c_int> {
        let mut failure = libc::ENOENT;
        for place in trust::places() {
            if place.is_left_out() {
                // No wait for a place in its queue: that node may be stuck.
                failure = if failure == libc::ENOENT { libc::EAFNOSUPPORT } else { failure };
                continue;
            }
            match Self::open_at(&place) {
                Ok((channel, welcome)) if place.is_for(&welcome) => return Ok((channel, welcome)),
                Ok(_) => failure = libc::EAFNOSUPPORT,
                Err(libc::ENOENT) => {}
                // The error of a node that refuses this user takes precedence over that of a
                // missing node.
                Err(errno) if !is_refusal(failure) => failure = errno,
                Err(_) => {}
            }
        }
        Err(failure)
    }

    /// Opens a channel to the node at a path, and greets.
    ///
    /// # Errors
    /// Those of `connect(2)`; EACCES as well when whoever listens there is neither root, nor this
    /// user, nor the owner of the file; others that [`is_refusal`] tells; EPROTONOSUPPORT when the
    /// node speaks another version; ETIMEDOUT when it does not greet; ENETDOWN when it ends during
    /// the call.
    pub fn open(path: &[u8]) -> Result<(Self, Welcome), c_int> {
        Self::open_at(&Place::named(path))
    }

    fn open_at(place: &Place) -> Result<(Self, Welcome), c_int> {
        let path = &place.path[..];
        // SAFETY: a structure of integers, for which all zeroes are a value.
        let mut name: libc::sockaddr_un = unsafe { core::mem::zeroed() };
        name.sun_family = libc::AF_UNIX as libc::sa_family_t;
        if path.len() >= name.sun_path.len() {
            return Err(libc::ENAMETOOLONG);
        }
        if path.is_empty() || path.contains(&0) {
            return Err(libc::ENOENT);
        }
        for (at, byte) in name.sun_path.iter_mut().zip(path) {
            *at = libc::c_char::from_ne_bytes([*byte]);
        }
        let believed = place.believed()?;
        let mut channel = Self::new(system::unix_stream()?);
        channel.connect(&name, 2 + path.len())?;
        let listener = system::peer(channel.fd)?.user;
        if Some(listener) != believed && !trust::is_friend(listener) {
            return Err(libc::EACCES);
        }
        system::ask_for_senders(channel.fd, true);
        channel.greet()?;
        let greeter = channel.greeter()?;
        let welcome = channel.welcome(greeter)?;
        believed.into_iter().for_each(trust::found);
        Ok((channel, welcome))
    }

    /// Makes a channel to the node that made a socket, wherever that node is: the socket itself
    /// carries one end to the node. The channel may name this socket.
    ///
    /// # Errors
    /// ENOTSOCK when there is no greeting, or none of a trusted user (a program may have made the
    /// pair and given its other end away); ENETDOWN when the node has ended; EMFILE; those of
    /// [`open`](Self::open) but `connect(2)`'s.
    pub fn offer(socket: c_int) -> Result<(Self, Welcome), c_int> {
        let (ours, theirs) = system::stream_pair()?;
        let mut channel = Self::new(ours);
        // Set before the other side can have written.
        system::ask_for_senders(channel.fd, true);
        system::let_descriptors_come(channel.fd, false);
        let sent = loop {
            match system::send_offer(socket, &offer(VERSION), theirs) {
                Err(libc::EINTR) if !channel.is_late() => {}
                // Other threads are offering channels; the node takes them at once.
                Err(libc::EAGAIN | libc::ETOOMANYREFS) if !channel.is_late() => system::pause(),
                sent => break sent,
            }
        };
        system::close(theirs);
        match sent {
            Ok(()) => {
                let greeter = channel.greeter().map_err(|errno| match errno {
                    libc::ETIMEDOUT => libc::ENOTSOCK,
                    errno => errno,
                })?;
                if !trust::is_trusted(greeter.user) {
                    return Err(libc::ENOTSOCK);
                }
                let welcome = channel.welcome(greeter)?;
                system::let_descriptors_come(channel.fd, true);
                Ok((channel, welcome))
            }
            Err(libc::EMFILE | libc::ENFILE) => Err(libc::EMFILE),
            Err(_) => Err(libc::ENETDOWN),
        }
    }

    /// A channel that waits for its greeting.
    fn new(fd: c_int) -> Self {
        let fd = D::opened(fd);
        let until = Some(Instant::now() + LIMIT);
        Self {
            fd,
            owner: LockOwner(0),
            until,
            has_shown: false,
            given: None,
            descriptors: PhantomData,
        }
    }

    fn left(&self) -> Duration {
        self.until.map_or(LIMIT, |until| until.saturating_duration_since(Instant::now()))
    }

    fn is_late(&self) -> bool {
        self.left().is_zero()
    }

    /// Connects; the node's listen queue may be full for a while.
    fn connect(&self, name: &libc::sockaddr_un, len: usize) -> Result<(), c_int> {
        loop {
            let left = self.left();
            if left.is_zero() {
                return Err(libc::ETIMEDOUT);
            }
            // Zero microseconds would mean no limit.
            system::limit_sends(self.fd, left.max(Duration::from_millis(1)));
            match system::connect(self.fd, name, len) {
                Err(libc::EINTR | libc::EAGAIN) => {}
                done => {
                    system::limit_sends(self.fd, Duration::ZERO);
                    return done;
                }
            }
        }
    }

    fn greet(&mut self) -> Result<(), c_int> {
        let hello = Request::Hello { version: VERSION, features: Features::OWN };
        match self.send(&hello, &[], None) {
            // A node that refuses this process has replied before it closed the channel.
            Ok(()) | Err(libc::ENETDOWN) => Ok(()),
            Err(errno) => Err(errno),
        }
    }

    /// Reads the greeting of a trusted node.
    fn welcome(&mut self, greeter: Process) -> Result<Welcome, c_int> {
        // The buffer for descriptors has room for nothing else.
        system::ask_for_senders(self.fd, false);
        let (reply, lengths) = self.head(false)?;
        let (node, owner, features) = match reply {
            Reply::Failed { errno, .. } => return Err(errno),
            Reply::Welcome { node, owner, features } => (node, owner, features),
            _ => return Err(libc::EPROTO),
        };
        if lengths != (Lengths { payload: Greeting::LEN, ..Lengths::default() }) {
            return Err(libc::EPROTO);
        }
        let greeting = Greeting::parse(&self.take_bytes(Greeting::LEN)?).ok_or(libc::EPROTO)?;
        self.owner = owner;
        let Greeting { nonce, namespace } = greeting;
        Ok(Welcome { node, namespace, features, greeter, nonce })
    }

    /// Waits for the first byte of a greeting; returns the process that sent it.
    fn greeter(&mut self) -> Result<Process, c_int> {
        loop {
            match system::first_sender(self.fd) {
                Ok(sender) => return sender.ok_or(libc::ENETDOWN),
                Err(libc::ECONNRESET) => return Err(libc::ENETDOWN),
                Err(libc::EINTR) => {}
                Err(libc::EAGAIN) => self.wait_for_rest()?,
                Err(errno) => return Err(errno),
            }
        }
    }

    /// The owner word of this channel in the lock of [`bowline_host_wire::Area::push`].
    pub const fn owner(&self) -> LockOwner {
        self.owner
    }

    /// Tells whether the node has been given memory over the channel of a word.
    pub(crate) const fn word_has_shown(word: u64) -> bool {
        word as u32 & SHOWN != 0
    }

    pub(crate) fn from_word(word: u64) -> Option<Self> {
        let owner = LockOwner((word >> 32) as u32);
        let fd = (word as u32 & !SHOWN) as c_int;
        let has_shown = Self::word_has_shown(word);
        // No channel is made for [`NONE`]: dropping it would close a descriptor.
        let (given, until) = (None, None);
        let descriptors = PhantomData;
        (owner != LockOwner(0)).then(|| Self { fd, owner, until, has_shown, given, descriptors })
    }

    pub(crate) fn into_word(self) -> u64 {
        let shown = if self.has_shown { SHOWN } else { 0 };
        let word = u64::from(self.owner.0) << 32 | u64::from(self.fd.cast_unsigned() | shown);
        core::mem::forget(self);
        word
    }
}

impl<D: Descriptors> fmt::Debug for Channel<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Channel").field("fd", &self.fd).field("owner", &self.owner).finish()
    }
}

impl<D: Descriptors> Drop for Channel<D> {
    fn drop(&mut self) {
        D::closes(self.fd);
        system::close(self.fd);
    }
}

impl<D: Descriptors> Channel<D> {
    /// Attaches a socket to this channel by its descriptor; returns the handle, and a descriptor of
    /// the socket's memory.
    pub(crate) fn attach(&mut self, fd: c_int) -> Result<(SocketHandle, c_int), c_int> {
        self.send(&Request::Attach, &[], Some(fd))?;
        match self.reply_with_descriptors()? {
            (Reply::Failed { errno, .. }, _) => Err(errno),
            (Reply::Socket(handle), [memory, _]) => {
                Ok((handle, memory.ok_or(libc::EMFILE)?.into_number()))
            }
            _ => Err(libc::EPROTO),
        }
    }

    /// Lets the node use all memory of this process for RDMA, by a descriptor that gives access to
    /// it. The channel is new, and was made through a socket of that node.
    pub(crate) fn show_memory(&mut self, welcome: &Welcome, memory: c_int) -> Result<(), c_int> {
        // The node reads the nonce there, as a proof of whose memory it is.
        let nonce = welcome.nonce;
        let shown = self.show(0, nonce.as_ptr().expose_provenance() as u64, memory);
        core::hint::black_box(&nonce);
        self.has_shown = shown.is_ok();
        shown
    }

    /// Has the node watch the memory that it was shown, if both can: it is not used any more where
    /// something else is in its place.
    pub(crate) fn show_watch(&mut self, welcome: &Welcome) -> Result<(), c_int> {
        if !welcome.features.include(Features::WATCH) {
            return Ok(());
        }
        let Some(watch) = watch::own::<D>() else { return Ok(()) };
        self.send(&Request::ShowWatch, &[], Some(watch))?;
        let (_, lengths) = self.reply(false)?;
        self.skip(lengths)
    }

    /// Lets the node use the memory given for one call. The channel is as for
    /// [`show_memory`](Self::show_memory), and used for this call only.
    pub(crate) fn show_given(&mut self, given: Given) -> Result<(), c_int> {
        let shown = self.show(given.number(), 0, given.descriptor());
        self.given = Some(given);
        shown
    }

    fn show(&mut self, grant: u64, nonce_at: u64, descriptor: c_int) -> Result<(), c_int> {
        let features = Features::OWN;
        self.send(&Request::ShowMemory { grant, nonce_at, features }, &[], Some(descriptor))?;
        let (reply, lengths) = self.reply(false)?;
        self.skip(lengths)?;
        reply.errno().map_or(Ok(()), Err)
    }

    /// Records that the node has accepted the call for which it was given memory.
    pub(crate) fn accept(&mut self) {
        if let Some(given) = &mut self.given {
            given.accept();
        }
    }

    /// Tells whether the channel is for one call only.
    pub(crate) const fn is_for_one_call(&self) -> bool {
        self.given.is_some()
    }

    /// Wakes the node: the memory of a socket has changed.
    pub(crate) fn wake(&mut self, handle: SocketHandle) -> Result<(), c_int> {
        self.send(&Request::Wake(handle), &[], None)
    }

    /// Sends a request, followed by pieces of a message. After an error the channel cannot be used.
    pub(crate) fn send(
        &mut self,
        request: &Request<'_>,
        pieces: &[libc::iovec],
        descriptor: Option<c_int>,
    ) -> Result<(), c_int> {
        let len = pieces.iter().map(|piece| piece.iov_len).fold(0, usize::saturating_add);
        let request = request.emit(len).ok_or(libc::EMSGSIZE)?;
        let parts = request.parts();
        let piece = |bytes: &[u8]| libc::iovec {
            iov_base: bytes.as_ptr().cast_mut().cast(),
            iov_len: bytes.len(),
        };
        let whole = parts.iter().map(|part| part.len()).sum::<usize>() + len;
        let mut rest: Vec<libc::iovec> =
            parts.iter().map(|part| piece(part)).chain(pieces.iter().copied()).collect();
        let rights =
            |fd: c_int| [20, system::control_kind(libc::SCM_RIGHTS), u64::from(fd.cast_unsigned())];
        let mut rights = descriptor.map(rights);
        let mut sent = 0;
        while sent < whole {
            let control = rights.as_mut().map_or(&mut [][..], |rights| rights);
            let msg = system::message(&mut rest, control);
            match system::sendmsg(self.fd, &msg, libc::MSG_NOSIGNAL) {
                Ok(n) => {
                    sent += n;
                    skip(&mut rest, n);
                    rights = None;
                }
                Err(libc::EINTR) => {}
                Err(libc::EPIPE | libc::ECONNRESET) => return Err(libc::ENETDOWN),
                Err(errno) => return Err(errno),
            }
        }
        Ok(())
    }

    /// Waits until the reply comes; returns whether a signal has ended the wait, after it has asked
    /// the node for an end as well. Until then only the hook of this process has the channel, so
    /// that the thread may end there.
    pub(crate) fn wait_long(self) -> Result<(Self, bool), c_int> {
        if self.is_for_one_call() {
            return Ok((self, false));
        }
        let fd = self.fd;
        let word = self.into_word();
        let waited = D::waits(fd);
        let mut channel = Self::from_word(word).ok_or(libc::ENETDOWN)?;
        let is_interrupted = waited == Err(libc::EINTR);
        if is_interrupted {
            channel.send(&Request::Interrupt, &[], None)?;
        }
        Ok((channel, is_interrupted))
    }

    /// Waits for the reply; returns it with the lengths of its parts. With `may_wait` a signal ends
    /// the wait.
    pub(crate) fn reply(&mut self, may_wait: bool) -> Result<(Reply, Lengths), c_int> {
        self.until = None;
        self.head(may_wait)
    }

    /// Reads the head of a reply.
    fn head(&mut self, may_wait: bool) -> Result<(Reply, Lengths), c_int> {
        let mut head = [0; HEAD_LEN];
        let mut got = 0;
        let mut interrupted = false;
        while got < HEAD_LEN {
            let may_block = got == 0 && self.until.is_none();
            let flags = if may_block { 0 } else { libc::MSG_DONTWAIT };
            match system::recv(self.fd, &mut head[got..], flags) {
                Ok(0) | Err(libc::ECONNRESET) => return Err(libc::ENETDOWN),
                Ok(n) => got += n,
                Err(libc::EAGAIN) => self.wait_for_rest()?,
                Err(libc::EINTR) if may_wait && !interrupted => {
                    interrupted = true;
                    self.send(&Request::Interrupt, &[], None)?;
                }
                Err(libc::EINTR) => {}
                Err(errno) => return Err(errno),
            }
        }
        let (head, lengths) = Head::parse(&head).map_err(|Malformed| libc::EPROTO)?;
        let reply = Reply::parse(&head).map_err(|Malformed| libc::EPROTO)?;
        Ok((reply, lengths))
    }

    /// Waits for the rest of a reply that has begun or is due: a node writes each reply at once.
    /// One time limit covers the whole reply.
    fn wait_for_rest(&mut self) -> Result<(), c_int> {
        self.until.get_or_insert_with(|| Instant::now() + LIMIT);
        loop {
            let left = self.left();
            match system::poll(self.fd, libc::POLLIN, Some(left)) {
                Ok(0) if self.owner == LockOwner(0) => return Err(libc::ETIMEDOUT),
                Ok(0) => return Err(libc::ENETDOWN),
                Err(libc::EINTR) => {}
                done => return done.map(drop),
            }
        }
    }

    /// Reads bytes of a reply into `to`; bytes that do not fit are discarded.
    pub(crate) fn take(&mut self, len: usize, mut to: Vec<libc::iovec>) -> Result<(), c_int> {
        let mut left = len;
        while left > 0 {
            let mut sink = [0u8; 4096];
            limit(&mut to, left);
            if to.is_empty() {
                let n = sink.len().min(left);
                to.push(libc::iovec { iov_base: sink.as_mut_ptr().cast(), iov_len: n });
            }
            let mut msg = system::message(&mut to, &mut []);
            match system::recvmsg(self.fd, &mut msg, libc::MSG_DONTWAIT) {
                Err(libc::EAGAIN) => self.wait_for_rest()?,
                Ok(0) | Err(libc::ECONNRESET) => return Err(libc::ENETDOWN),
                Ok(n) => {
                    left -= n;
                    skip(&mut to, n);
                }
                Err(libc::EINTR) => {}
                Err(errno) => return Err(errno),
            }
        }
        Ok(())
    }

    /// Discards the rest of a reply.
    pub(crate) fn skip(&mut self, lengths: Lengths) -> Result<(), c_int> {
        self.take(lengths.name + lengths.control + lengths.payload, Vec::new())
    }

    /// Reads bytes of a reply.
    pub(crate) fn take_bytes(&mut self, len: usize) -> Result<Vec<u8>, c_int> {
        let mut bytes = vec![0; len];
        let piece = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: len };
        self.take(len, vec![piece])?;
        Ok(bytes)
    }

    /// Waits for a whole reply with at most two descriptors; no node delays such a reply.
    pub(crate) fn reply_with_descriptors(
        &mut self,
    ) -> Result<(Reply, [Option<Descriptor>; 2]), c_int> {
        self.until = None;
        // A head of 16 bytes, and two numbers.
        let mut control = [0; 3];
        // The descriptors come with the first byte, which stays in the queue for the reply.
        let came = loop {
            match system::look_at_first(self.fd, &mut control) {
                Ok(Some(len)) => break Descriptor::from_control(&control, len),
                Ok(None) | Err(libc::ECONNRESET) => return Err(libc::ENETDOWN),
                Err(libc::EAGAIN) => self.wait_for_rest()?,
                Err(libc::EINTR) => {}
                Err(errno) => return Err(errno),
            }
        };
        let (reply, lengths) = self.head(false)?;
        self.skip(lengths)?;
        Ok((reply, came))
    }
}

/// A descriptor that came with a reply; closed when dropped, unless its number was taken.
pub(crate) struct Descriptor(c_int);

impl Descriptor {
    /// Returns the descriptors in `len` bytes of control messages.
    fn from_control(control: &[u64; 3], len: usize) -> [Option<Self>; 2] {
        let [message_len, kind, numbers] = *control;
        let is_some = len >= 20 && kind == system::control_kind(libc::SCM_RIGHTS);
        let bytes = if is_some { (message_len as usize).saturating_sub(16) } else { 0 };
        let one = |n: usize| Self((numbers >> (32 * n)) as u32 as c_int);
        [0, 1].map(|n| (bytes >= 4 * (n + 1)).then(|| one(n)))
    }

    pub(crate) const fn number(&self) -> c_int {
        self.0
    }

    pub(crate) fn into_number(self) -> c_int {
        let number = self.0;
        core::mem::forget(self);
        number
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        system::close(self.0);
    }
}

impl Place {
    /// Tells whether the node at this path serves the namespace that is wanted.
    fn is_for(&self, welcome: &Welcome) -> bool {
        let own = if self.is_default { system::network_namespace() } else { 0 };
        own == 0 || welcome.namespace == 0 || own == welcome.namespace
    }
}

/// Removes the first bytes of pieces.
fn skip(pieces: &mut Vec<libc::iovec>, mut n: usize) {
    let mut whole = 0;
    for piece in pieces.iter_mut() {
        if piece.iov_len > n {
            piece.iov_base = piece.iov_base.wrapping_byte_add(n);
            piece.iov_len -= n;
            break;
        }
        n -= piece.iov_len;
        whole += 1;
    }
    pieces.drain(..whole);
}

/// Keeps the first bytes of pieces only.
fn limit(pieces: &mut Vec<libc::iovec>, mut len: usize) {
    pieces.retain_mut(|piece| {
        piece.iov_len = piece.iov_len.min(len);
        len -= piece.iov_len;
        piece.iov_len > 0
    });
}
