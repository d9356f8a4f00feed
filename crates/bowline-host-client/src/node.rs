//! A node, and channels to it.

use core::ffi::c_int;
use core::fmt;
use core::marker::PhantomData;
use core::sync::atomic::{AtomicU64, Ordering};

use bowline_host_wire::{NodeId, Reply, Request, SocketHandle};

use crate::channel::{Channel, Descriptors, Welcome, is_refusal};
use crate::trust;

/// Largest number of idle channels kept for later calls.
const IDLE_MAX: usize = 32;
const NONE: u64 = 0;

/// A node, and idle channels to it. A node is identified by its number, from its greeting, and by
/// the user that it runs as, from the kernel: a node of another user could claim the same number.
pub struct Node<D: Descriptors> {
    /// 0: none yet.
    number: AtomicU64,
    /// The user, plus one; 0: none yet.
    user: AtomicU64,
    /// Number of the channel above 32 bits of its descriptor.
    idle: [AtomicU64; IDLE_MAX],
    channels: PhantomData<fn() -> D>,
}

/// A socket that a node has made. Its descriptors are the caller's to close.
#[derive(Clone, Copy, Debug)]
pub struct Opened {
    /// The node's handle of the socket.
    pub handle: SocketHandle,
    /// Descriptor of the socket, close-on-exec.
    pub fd: c_int,
    /// Descriptor of its memory.
    pub memory: c_int,
}

impl<D: Descriptors> Node<D> {
    /// An entry without a node.
    pub const fn vacant() -> Self {
        let idle = [const { AtomicU64::new(NONE) }; IDLE_MAX];
        let (number, user) = (AtomicU64::new(0), AtomicU64::new(0));
        Self { number, user, idle, channels: PhantomData }
    }

    /// Tells whether this is the node of this greeting; a vacant entry becomes that node.
    pub fn claim(&self, welcome: &Welcome) -> bool {
        let is = |word: &AtomicU64, wanted: u64| {
            // Number and user pair with themselves: each is written once, and means nothing else.
            let known = word.compare_exchange(0, wanted, Ordering::AcqRel, Ordering::Acquire);
            known.map_or_else(|known| known == wanted, |_| true)
        };
        is(&self.number, welcome.node.0) && is(&self.user, u64::from(welcome.greeter.user) + 1)
    }

    fn is_of(&self, user: u32) -> bool {
        u64::from(user) + 1 == self.user.load(Ordering::Acquire)
    }

    /// Tells whether this is the node of this greeting, or a process of root that has taken it
    /// over.
    pub(crate) fn resumes_as(&self, welcome: &Welcome) -> bool {
        let user = welcome.greeter.user;
        (user == 0 || self.is_of(user))
            && welcome.node == NodeId(self.number.load(Ordering::Acquire))
    }

    /// Takes an idle channel, or makes one through `socket`, a socket of this node.
    ///
    /// # Errors
    /// ENETDOWN when the node has ended, whatever error its socket gives; errors of [`is_refusal`].
    pub fn channel(&self, socket: c_int) -> Result<Channel<D>, c_int> {
        self.idle_channel().map_or_else(|| self.new_channel(socket).map(|(new, _)| new), Ok)
    }

    /// Takes a channel that is not in use.
    pub fn idle_channel(&self) -> Option<Channel<D>> {
        self.idle_where(|_| true)
    }

    /// Takes an idle channel over which the node has been given memory.
    pub(crate) fn idle_channel_that_has_shown(&self) -> Option<Channel<D>> {
        self.idle_where(Channel::<D>::word_has_shown)
    }

    fn idle_where(&self, wanted: impl Fn(u64) -> bool) -> Option<Channel<D>> {
        if !D::are_kept() {
            return None;
        }
        for idle in &self.idle {
            // Relaxed: a hint. The exchange pairs with that in `keep`, for what the channel's last
            // user has done with it.
            let word = idle.load(Ordering::Relaxed);
            if word != NONE
                && wanted(word)
                && let Some(channel) = Channel::from_word(idle.swap(NONE, Ordering::AcqRel))
            {
                return Some(channel);
            }
        }
        None
    }

    /// Makes a channel through `socket`.
    ///
    /// # Errors
    /// As [`channel`](Self::channel).
    pub(crate) fn new_channel(&self, socket: c_int) -> Result<(Channel<D>, Welcome), c_int> {
        match Channel::offer(socket) {
            Ok((channel, welcome)) if self.resumes_as(&welcome) => Ok((channel, welcome)),
            Err(errno) if is_refusal(errno) => Err(errno),
            _ => Err(libc::ENETDOWN),
        }
    }

    /// Returns a channel to the idle ones.
    pub fn keep(&self, channel: Channel<D>) {
        if channel.is_for_one_call() || !D::are_kept() {
            return;
        }
        let mut word = channel.into_word();
        for idle in &self.idle {
            // Relaxed: a hint. The exchange pairs with that in `idle_where`.
            if idle.load(Ordering::Relaxed) == NONE {
                word = idle.swap(word, Ordering::AcqRel);
                if word == NONE {
                    return;
                }
            }
        }
        drop(Channel::<D>::from_word(word));
    }

    /// Asks the node which of its sockets a descriptor is; returns the handle, and a descriptor of
    /// the socket's memory.
    ///
    /// # Errors
    /// ENOTSOCK when the descriptor is not a socket of the node; those of
    /// [`channel`](Self::channel).
    pub fn attach(&self, fd: c_int) -> Result<(SocketHandle, c_int), c_int> {
        let mut channel = self.channel(fd)?;
        let attached = channel.attach(fd)?;
        self.keep(channel);
        Ok(attached)
    }

    /// Opens a socket over a channel to the node; the channel is kept.
    ///
    /// # Errors
    /// The node's error; EMFILE when there are no descriptors left; EPROTO for an invalid reply;
    /// ENETDOWN when the node has ended.
    pub fn open(&self, mut channel: Channel<D>) -> Result<Opened, c_int> {
        let request = Request::Open { kind: libc::SOCK_SEQPACKET, protocol: 0 };
        let asked = channel.send(&request, &[], None);
        let reply = asked.and_then(|()| channel.reply_with_descriptors());
        let (reply, came) = match reply {
            Ok(reply) => reply,
            Err(errno) => {
                // A restarted node has ended the other channels as well.
                drop(channel);
                self.forget_channels();
                return Err(errno);
            }
        };
        self.keep(channel);
        let handle = match reply {
            Reply::Failed { errno, .. } => return Err(errno),
            Reply::Socket(handle) => handle,
            _ => return Err(libc::EPROTO),
        };
        let [Some(fd), Some(memory)] = came else { return Err(libc::EMFILE) };
        let maker = trust::maker(fd.number()).ok_or(libc::EPROTO)?;
        if !trust::is_trusted(maker.user) && !self.is_of(maker.user) {
            return Err(libc::EPROTO);
        }
        Ok(Opened { handle, fd: fd.into_number(), memory: memory.into_number() })
    }

    /// The node may be another one by now.
    pub fn forget_channels(&self) {
        for idle in &self.idle {
            drop(Channel::<D>::from_word(idle.swap(NONE, Ordering::AcqRel)));
        }
    }
}

impl<D: Descriptors> Drop for Node<D> {
    fn drop(&mut self) {
        self.forget_channels();
    }
}

impl<D: Descriptors> fmt::Debug for Node<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Node").field("number", &self.number).finish_non_exhaustive()
    }
}
