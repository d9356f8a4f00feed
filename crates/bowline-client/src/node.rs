//! A node, and channels to it.

use core::ffi::c_int;
use core::fmt;
use core::marker::PhantomData;
use core::sync::atomic::{AtomicU64, Ordering};

use bowline_attach::{Head, NAME_PREFIX, Op};

use crate::channel::{Channel, Descriptors, is_refusal};
use crate::system;

/// Channels of a node that are kept for the next call.
const IDLE_MAX: usize = 32;
const NONE: u64 = 0;

/// A node, and channels to it that are not in use.
pub struct Node<D: Descriptors> {
    /// 0: none yet.
    number: AtomicU64,
    /// Number of the channel above 32 bits of its descriptor.
    idle: [AtomicU64; IDLE_MAX],
    channels: PhantomData<fn() -> D>,
}

/// A socket that a node has made. Its descriptors are the caller's to close.
#[derive(Clone, Copy, Debug)]
pub struct Opened {
    /// What the node calls the socket.
    pub handle: u64,
    /// Descriptor of the socket, which is closed at an `exec`.
    pub fd: c_int,
    /// Descriptor of its memory.
    pub memory: c_int,
}

impl<D: Descriptors> Node<D> {
    /// A place for a node.
    pub const fn vacant() -> Self {
        let idle = [const { AtomicU64::new(NONE) }; IDLE_MAX];
        Self { number: AtomicU64::new(0), idle, channels: PhantomData }
    }

    /// Tells whether this is the node with a number; a vacant place becomes its.
    pub fn claim(&self, number: u64) -> bool {
        let known = self.number.compare_exchange(0, number, Ordering::AcqRel, Ordering::Acquire);
        known.map_or_else(|known| known == number, |_| true)
    }

    /// Takes a channel that is not in use, or makes one.
    ///
    /// # Errors
    /// ENETDOWN when the node is gone, whatever the system says of its socket; errors that
    /// [`is_refusal`] tells.
    pub fn channel(&self) -> Result<Channel<D>, c_int> {
        for idle in &self.idle {
            if idle.load(Ordering::Relaxed) != NONE
                && let Some(channel) = Channel::of_word(idle.swap(NONE, Ordering::AcqRel))
            {
                return Ok(channel);
            }
        }
        let number = self.number.load(Ordering::Acquire);
        let mut name = [0; NAME_PREFIX.len() + 16];
        let (prefix, digits) = name.split_at_mut(NAME_PREFIX.len());
        prefix.copy_from_slice(NAME_PREFIX);
        for (at, digit) in digits.iter_mut().enumerate() {
            *digit = b"0123456789abcdef"[(number >> (60 - 4 * at)) as usize & 15];
        }
        match Channel::open(&name) {
            Ok((channel, found)) if found == number => Ok(channel),
            Err(errno) if is_refusal(errno) => Err(errno),
            _ => Err(libc::ENETDOWN),
        }
    }

    /// Gives a channel back.
    pub fn keep(&self, channel: Channel<D>) {
        let mut word = channel.into_word();
        for idle in &self.idle {
            if idle.load(Ordering::Relaxed) == NONE {
                word = idle.swap(word, Ordering::AcqRel);
                if word == NONE {
                    return;
                }
            }
        }
        drop(Channel::<D>::of_word(word));
    }

    /// Asks the node which of its sockets a descriptor is; returns its handle, and a descriptor of
    /// its memory.
    ///
    /// # Errors
    /// ENOTSOCK when it is none; those of [`channel`](Self::channel).
    pub fn attach(&self, fd: c_int) -> Result<(u64, c_int), c_int> {
        let mut channel = self.channel()?;
        let attached = channel.attach(fd)?;
        self.keep(channel);
        Ok(attached)
    }

    /// Asks the node for a socket.
    ///
    /// # Errors
    /// What the node says; EMFILE when there are no descriptors left; those of
    /// [`channel`](Self::channel).
    pub fn open(&self) -> Result<Opened, c_int> {
        let mut channel = self.channel()?;
        let head = Head { op: Op::Open, value: 0, a: libc::SOCK_SEQPACKET, b: 0 };
        let sent = channel.send(head, &[], &[], &[], None);
        let answer = sent.and_then(|()| channel.answer_with_descriptors());
        let (answer, [fd, memory]) = match answer {
            Ok(answer) => answer,
            Err(errno) => {
                // A node that was started anew has ended the others as well.
                drop(channel);
                self.forget_channels();
                return Err(errno);
            }
        };
        self.keep(channel);
        if answer.value < 0 {
            return Err(-answer.value as c_int);
        }
        if fd < 0 || memory < 0 {
            [fd, memory].into_iter().filter(|fd| *fd >= 0).for_each(system::close);
            return Err(libc::EMFILE);
        }
        Ok(Opened { handle: answer.value.cast_unsigned(), fd, memory })
    }

    /// The node may be another one by now.
    pub fn forget_channels(&self) {
        for idle in &self.idle {
            drop(Channel::<D>::of_word(idle.swap(NONE, Ordering::AcqRel)));
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
