//! A server that is taken apart, and another that resumes in its place.

use bowline_base::Errno;
use bowline_host_wire::{ChannelId, SocketHandle};
use serde::{Serialize, de::DeserializeOwned};

use super::{Core, Descriptor, Outside, Rds, Set};
use crate::channel::{Channel, SavedChannel};
use crate::socket::{HostSocket, SavedSocket};

/// What programs have of a server that is taken apart, for another that resumes in its place.
pub struct Parts<O: Outside> {
    /// Number of the next channel.
    pub next: ChannelId,
    /// Its channels.
    pub channels: Vec<ChannelPart<O>>,
    /// Its sockets.
    pub sockets: Vec<SocketPart<O>>,
}

/// A channel of a server that is taken apart.
pub struct ChannelPart<O: Outside> {
    pub(crate) number: ChannelId,
    /// The node's end.
    pub stream: O::Descriptor,
    /// What came with a request.
    pub descriptor: Option<O::Descriptor>,
    /// Sockets that it may name.
    pub(crate) known: Set<SocketHandle>,
    pub(crate) state: SavedChannel,
}

/// A socket of a server that is taken apart.
pub struct SocketPart<O: Outside> {
    pub(crate) handle: SocketHandle,
    /// The node's end.
    pub end: O::Descriptor,
    /// Its memory.
    pub memory: O::Memory,
    pub(crate) state: SavedSocket,
}

impl<O: Outside> Parts<O> {
    /// The same after its state was written and read again, as another process gets it; `None` when
    /// that does not succeed.
    #[must_use]
    pub fn copied(self) -> Option<Self> {
        fn copy<T: Serialize + DeserializeOwned>(state: &T) -> Option<T> {
            rmp_serde::from_slice(&rmp_serde::to_vec_named(state).ok()?).ok()
        }
        let mut parts = Self { channels: Vec::new(), sockets: Vec::new(), ..self };
        for part in self.channels {
            parts.channels.push(ChannelPart { state: copy(&part.state)?, ..part });
        }
        for part in self.sockets {
            parts.sockets.push(SocketPart { state: copy(&part.state)?, ..part });
        }
        Some(parts)
    }
}

impl<O: Outside> Core<O> {
    /// Takes apart what programs have of this server.
    pub fn take_apart(mut self) -> Parts<O> {
        let mut parts = Parts { next: self.next, channels: Vec::new(), sockets: Vec::new() };
        for (number, channel) in self.channels {
            let state = channel.saved();
            let (stream, descriptor) = channel.into_descriptors();
            let known = self.known.remove(&number).unwrap_or_default();
            parts.channels.push(ChannelPart { number, stream, descriptor, known, state });
        }
        for (handle, (socket, _)) in self.sockets {
            // Whoever pushes from now on says so in the channel.
            socket.rings.set_asleep(true);
            let state = socket.saved();
            let (end, memory) = socket.into_parts();
            parts.sockets.push(SocketPart { handle, end, memory, state });
        }
        parts
    }

    /// Resumes what another server had. A socket or channel that cannot be taken is closed: its
    /// user may not have it any more, or there is no memory left.
    pub fn resume(&mut self, parts: Parts<O>) {
        self.next = parts.next;
        for part in parts.sockets {
            let id = part.state.id;
            if self.resume_socket(part).is_err() {
                self.rds.close(id);
            }
        }
        for part in parts.channels {
            let number = part.number;
            if self.resume_channel(part).is_err() {
                self.end_channel(number);
            }
        }
        let lost = |channel: &Channel<O::Descriptor>| {
            channel.waiting.is_some_and(|waiting| !self.sockets.contains_key(&waiting.handle))
        };
        let waiting = self.channels.iter().filter(|(_, channel)| lost(channel));
        for number in waiting.map(|(number, _)| *number).collect::<Vec<_>>() {
            if !self.end_wait(number, Errno::EBADF) {
                self.end_channel(number);
            }
        }
        let handles: Vec<SocketHandle> = self.sockets.keys().copied().collect();
        for handle in handles {
            self.activate(handle);
            self.socket_is_ready(handle);
        }
    }

    fn resume_socket(&mut self, part: SocketPart<O>) -> Result<(), Errno> {
        let SocketPart { handle, end, memory, state } = part;
        let (id, user) = (state.id, state.user);
        let end = end.owned_by(Some(user));
        let sizes =
            self.rds.with_core(|core, _| Ok((core.send_buffer(id)?, core.recv_buffer(id)?)));
        let (send, recv) = sizes.map_err(|error: bowline_rds::Error| error.errno())?;
        let charge = self.accounts.open_socket(user, send, recv)?;
        let socket = HostSocket::resume(end, memory, charge, state);
        self.add_socket(handle, socket).map_err(|(errno, charge)| {
            self.accounts.close_socket(&charge);
            errno
        })
    }

    fn resume_channel(&mut self, part: ChannelPart<O>) -> Result<(), Errno> {
        let ChannelPart { number, stream, descriptor, known, state } = part;
        let owner = Some(state.caller().user);
        let (stream, descriptor) =
            (stream.owned_by(owner), descriptor.map(|one| one.owned_by(owner)));
        self.accounts.open_channel(state.caller())?;
        let (user, waiting) = (state.caller().user, state.waiting);
        let watched = Channel::resume(stream, descriptor, state)
            .and_then(|channel| self.watch_channel(number, channel));
        if let Err(errno) = watched {
            self.accounts.close_channel(user, 0);
            return Err(errno);
        }
        self.known.insert(number, known);
        match waiting {
            Some(waiting) => self.resume_wait(number, waiting),
            None => self.resume_requests(number),
        }
        Ok(())
    }
}
