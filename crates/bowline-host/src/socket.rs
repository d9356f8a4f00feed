//! The node's side of one socket of a program.

use std::collections::VecDeque;

use bowline_base::{Errno, Instant};
use bowline_host_wire::{ChannelId, OFFER_LEN, WAKE_TOKEN_LEN, offered_version};
use bowline_rds::SocketId;
use serde::{Deserialize, Serialize};

use crate::accounts::Charge;
use crate::caller::{Caller, Credentials};
use crate::core::{Arrival, Descriptor, EDQUOT, Outside};
use crate::options::Options;
use crate::rings::{Rings, SavedRings};

/// A socket that programs have.
pub(crate) struct HostSocket<O: Outside> {
    pub(crate) id: SocketId,
    /// The node's end of the pair; the programs have the other.
    end: O::Descriptor,
    /// The system's number of the programs' end, by which a descriptor that they show is known.
    pub(crate) cookie: u64,
    pub(crate) options: Options,
    /// What it counts for, and for whom.
    pub(crate) charge: Charge,
    /// A send has had a destination to go to: the type of service is settled.
    pub(crate) has_had_route: bool,
    /// Channels whose requests wait for room to send, in their order.
    pub(crate) senders: VecDeque<ChannelId>,
    pub(crate) rings: Rings<O::Memory>,
    pub(crate) schedule: Schedule,
    /// Rounds in which something happened since programs were last shown what there is.
    pub(crate) unshown: u32,
    /// Programs may have sent on their end something that was not taken.
    pub(crate) unread: bool,
    /// Since when what programs send on their end is left there.
    pub(crate) full_since: Option<Instant>,
    /// Who waits to send may try again without anything else happening.
    pub(crate) retry: bool,
}

/// When a socket gets a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Schedule {
    /// When something happens on it.
    Idle,
    /// In each round.
    Active {
        /// Rounds since something happened on it.
        idle_rounds: u32,
    },
}

/// State of a socket beside its descriptors.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct SavedSocket {
    pub(crate) id: SocketId,
    cookie: u64,
    options: Options,
    /// Who opened it.
    pub(crate) user: u32,
    #[serde(rename = "has_sent")] // its name in versions before
    has_had_route: bool,
    senders: VecDeque<ChannelId>,
    rings: SavedRings,
}

impl<O: Outside> HostSocket<O> {
    pub(crate) fn new(
        id: SocketId,
        end: O::Descriptor,
        cookie: u64,
        rings: Rings<O::Memory>,
        charge: Charge,
    ) -> Self {
        Self {
            id,
            end,
            cookie,
            options: Options::default(),
            charge,
            has_had_route: false,
            senders: VecDeque::new(),
            rings,
            schedule: Schedule::Idle,
            unshown: 0,
            unread: true,
            full_since: None,
            retry: false,
        }
    }

    /// What another process needs to resume the socket, beside its descriptors.
    pub(crate) fn saved(&self) -> SavedSocket {
        SavedSocket {
            id: self.id,
            cookie: self.cookie,
            options: self.options.clone(),
            user: self.charge.user,
            has_had_route: self.has_had_route,
            senders: self.senders.clone(),
            rings: self.rings.saved(),
        }
    }

    /// Resumes a socket that another process had; `end` is the node's end of its pair.
    pub(crate) fn resume(
        end: O::Descriptor,
        memory: O::Memory,
        charge: Charge,
        saved: SavedSocket,
    ) -> Self {
        let SavedSocket { id, cookie, options, user: _, has_had_route, senders, rings } = saved;
        let rings = Rings::resume(memory, rings);
        Self { options, has_had_route, senders, ..Self::new(id, end, cookie, rings, charge) }
    }

    /// Closes the socket, with what programs may have sent to it.
    pub(crate) fn close(self) {
        self.end.end();
    }

    /// The node's end of the pair, and the socket's memory.
    pub(crate) fn into_parts(self) -> (O::Descriptor, O::Memory) {
        (self.end, self.rings.into_memory())
    }

    pub(crate) const fn end(&self) -> &O::Descriptor {
        &self.end
    }

    /// Makes the programs' end readable, if there is something to receive and it is not.
    pub(crate) fn show_readable(&mut self) {
        self.unshown = 0;
        let Some(token) = self.rings.wake_token_to_show() else { return };
        let bytes: [u8; WAKE_TOKEN_LEN] = token.to_ne_bytes();
        if self.end.send(&bytes, &[]).is_err() {
            // There are wake tokens enough: the end is readable.
            self.rings.wake_token_not_sent();
        }
    }

    /// Sends another wake token, if the last one was taken by a program that has not said so: it
    /// may have ended.
    pub(crate) fn replace_wake_token(&mut self) {
        if self.end.is_all_read() {
            self.rings.wake_token_is_gone();
        }
        self.show_readable();
    }

    /// The last descriptor of it was closed.
    pub(crate) fn has_ended(&self) -> bool {
        self.end.has_ended()
    }

    /// A program has sent more than what makes its end unwritable: a channel, perhaps.
    pub(crate) fn has_offers(&self) -> bool {
        self.end.unread() >= OFFER_LEN as u64
    }

    /// Takes what programs have sent on their end to make it unwritable, up to what came with
    /// descriptors.
    pub(crate) fn make_writable(&mut self) -> Arrived<O::Descriptor> {
        let mut bytes = [0; 2 * OFFER_LEN];
        self.unread = true;
        // More are left for the next time, since programs may send all the time.
        for _ in 0..64 {
            match self.end.receive(&mut bytes, Some(self.charge.user)) {
                Ok(Arrival { len: 0, descriptors, .. }) if descriptors.is_empty() => {
                    return Arrived::End;
                }
                Ok(Arrival { len, descriptors, sender }) => {
                    let version = bytes.get(..len).and_then(offered_version);
                    if !descriptors.is_empty() {
                        return Arrived::Offer(Offer { version, descriptors, sender });
                    }
                    // An offer without a descriptor is one for which there was none left here.
                    let is_token = |bytes: &[u8]| self.rings.is_fill_token(bytes);
                    if version.is_none() && !bytes.get(..len).is_some_and(is_token) {
                        return Arrived::Writing(sender.map_or(0, |sender| sender.process));
                    }
                }
                Err(Errno::EINTR) => {}
                Err(Errno::EAGAIN) => {
                    // What comes from now on is an event.
                    self.unread = false;
                    return Arrived::Tokens;
                }
                Err(EDQUOT) => return Arrived::Later,
                Err(_) => return Arrived::End,
            }
        }
        Arrived::Tokens
    }
}

/// What programs have sent on a socket itself.
#[derive(Debug)]
pub(crate) enum Arrived<D> {
    /// What made it unwritable, which is gone now.
    Tokens,
    Offer(Offer<D>),
    /// What a process with this number, 0 for an unknown one, takes for sent.
    Writing(i32),
    /// What comes next is of a user of whom nothing is taken now.
    Later,
    /// All of them have closed it.
    End,
}

/// What came on the node's end of a socket with descriptors: a channel, if all is right.
#[derive(Debug)]
pub(crate) struct Offer<D> {
    /// The version that the program speaks; `None` if it was something else.
    version: Option<i32>,
    descriptors: Vec<D>,
    sender: Option<Credentials>,
}

impl<D: Descriptor> Offer<D> {
    /// The end of the channel, who offers it, and the version; `None` for what is no channel.
    pub(crate) fn channel(mut self) -> Option<(D, Caller, i32)> {
        let one = self.descriptors.pop().filter(|_| self.descriptors.is_empty())?;
        let caller = one.offered_by(self.sender?)?;
        Some((one, caller, self.version?))
    }
}
