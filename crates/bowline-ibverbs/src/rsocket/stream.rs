//! One end of a connected stream, without input and output: how much may be sent and where to, what
//! has come, and what the peer is to be informed of.
//!
//! ```text
//!   rsend --> send ring --> RDMA write into the peer's window, immediate: bytes   [RSK-4]
//!   receive ring <-- the peer's writes; two windows, a half each
//!        read --> a half is free --> entry of the peer's table, immediate: credits  [RSK-5]
//! ```

use std::collections::VecDeque;

use bowline_verbs::Remote;

use super::wire::{DATA_MAX, Hello, MAP_LEN, Map, Message, Region, WINDOW_LEN};

/// Entries of the own table of windows: the receive ring has two halves.
pub(super) const WINDOWS: usize = 2;
/// Messages without data in flight: they take receives of the peer beyond its credits.
const CONTROL_SENDS: usize = 2;
/// One more, which ends the sending.
pub(super) const EXTRA_SENDS: usize = CONTROL_SENDS + 1;
/// Receives beyond the credits, for messages of the peer without data.
pub(super) const EXTRA_RECEIVES: usize = 16;
/// Most bytes of one write, so that the peer reads the first ones while the next are sent.
const WRITE_MAX: usize = 64 << 10;

/// The peer does not follow the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Violation;

/// Sizes and memory of this end.
#[derive(Clone, Copy, Debug)]
pub(super) struct Own {
    /// Sends of data in flight.
    pub(super) sends: usize,
    /// Messages of data that the peer may send.
    pub(super) credits: u16,
    /// Bytes of the send ring.
    pub(super) send_ring: usize,
    /// Bytes that are copied into the request instead of the ring.
    pub(super) inline: usize,
    /// The receive ring: two halves.
    pub(super) receive_ring: Region,
    /// The table of windows, whose length is in entries; that of mappings is behind it.
    pub(super) table: Region,
    /// Entries of the table of mappings.
    pub(super) maps: u8,
}

impl Own {
    fn half(&self) -> u32 {
        self.receive_ring.len / 2
    }

    pub(super) fn hello(&self) -> Hello {
        let window = Region { len: self.half(), ..self.receive_ring };
        Hello { credits: self.credits, maps: self.maps, table: self.table, window }
    }
}

/// A write of data, from the next bytes of the send ring or inline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Write {
    pub(super) to: Remote,
    /// Offsets and lengths in the ring; both lengths are 0 where the bytes are inline.
    pub(super) pieces: [(usize, usize); 2],
    pub(super) len: usize,
    /// `None`: into a mapping, of which the peer is not notified.
    pub(super) immediate: Option<u32>,
}

/// A message without data, and what it writes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Update {
    pub(super) to: Remote,
    pub(super) bytes: Vec<u8>,
    pub(super) immediate: u32,
}

/// What a send in flight has taken.
#[derive(Clone, Copy, Debug)]
enum Sent {
    /// This many bytes of the ring.
    Data(usize),
    Control,
}

/// How far an end has ended its sending.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ending {
    Open,
    /// The message is to be sent.
    Wanted(Message),
    Sent(Message),
}

#[derive(Debug)]
pub(super) struct Stream {
    own: Own,
    peer: Hello,
    in_flight: VecDeque<Sent>,
    /// Of these, those of data and without.
    data_in_flight: usize,
    control_in_flight: usize,
    /// Bytes of the send ring in use, and where the next one goes.
    ring_used: usize,
    ring_next: usize,
    /// Messages of data sent, and the number up to which they may be.
    sent: u16,
    limit: u16,
    /// Windows of the peer with room.
    targets: VecDeque<Region>,
    /// Entry of the own table that the peer writes next.
    next_entry: usize,
    /// Mappings that the peer has given.
    peer_maps: Vec<Option<Map>>,
    ending: Ending,
    /// Messages of data received, and the number up to which the peer may send.
    received: u16,
    allowed: u16,
    /// Bytes received, read and offered in all.
    filled: u64,
    read: u64,
    offered: u64,
    /// Where windows end that the peer has not filled.
    offers: VecDeque<u64>,
    /// Entry of the peer's table that is written next.
    next_offer: u32,
    /// Mappings that the peer is to be given.
    new_maps: VecDeque<(u8, Map)>,
    has_peer_shut: bool,
    has_peer_gone: bool,
}

impl Stream {
    pub(super) fn new(own: Own, peer: Hello) -> Self {
        let half = u64::from(own.half());
        Self {
            own,
            peer,
            in_flight: VecDeque::new(),
            data_in_flight: 0,
            control_in_flight: 0,
            ring_used: 0,
            ring_next: 0,
            sent: 0,
            limit: peer.credits,
            targets: VecDeque::from([peer.window]),
            next_entry: 1 % WINDOWS,
            peer_maps: vec![None; own.maps.into()],
            ending: Ending::Open,
            received: 0,
            allowed: own.credits,
            filled: 0,
            read: 0,
            offered: half,
            offers: VecDeque::from([half]),
            next_offer: 1 % peer.table.len,
            new_maps: VecDeque::new(),
            has_peer_shut: false,
            has_peer_gone: false,
        }
    }

    /// Takes in a message that has written `len` bytes. `table` reads the own tables.
    pub(super) fn on_message(
        &mut self,
        immediate: u32,
        len: u32,
        table: impl Fn(usize, &mut [u8]),
    ) -> Result<(), Violation> {
        match (Message::parse(immediate).ok_or(Violation)?, len) {
            (Message::Data(bytes), _) => self.on_data(bytes, len),
            (Message::Credits(limit), 0) => {
                self.limit = limit;
                Ok(())
            }
            (Message::Credits(limit), _) if len as usize == WINDOW_LEN => {
                self.limit = limit;
                self.on_window(table)
            }
            (Message::Map(index), _) if len as usize == MAP_LEN => {
                let index = index as usize;
                let place = self.peer_maps.get_mut(index).ok_or(Violation)?;
                let mut entry = [0; MAP_LEN];
                table(WINDOWS * WINDOW_LEN + index * MAP_LEN, &mut entry);
                *place = Some(Map::parse_entry(&entry).ok_or(Violation)?);
                Ok(())
            }
            (Message::Shutdown, 0) => {
                self.has_peer_shut = true;
                Ok(())
            }
            (Message::Disconnect, 0) => {
                self.on_gone();
                Ok(())
            }
            _ => Err(Violation),
        }
    }

    fn on_data(&mut self, bytes: u32, len: u32) -> Result<(), Violation> {
        let end = self.filled + u64::from(bytes);
        let has_room = self.offers.front().is_some_and(|offer| end <= *offer);
        if bytes != len || !has_room || self.received == self.allowed || self.has_peer_shut {
            return Err(Violation);
        }
        self.received = self.received.wrapping_add(1);
        self.filled = end;
        if self.offers.front() == Some(&end) {
            self.offers.pop_front();
        }
        Ok(())
    }

    fn on_window(&mut self, table: impl Fn(usize, &mut [u8])) -> Result<(), Violation> {
        if self.targets.len() >= WINDOWS {
            return Err(Violation);
        }
        let mut entry = [0; WINDOW_LEN];
        table(self.next_entry * WINDOW_LEN, &mut entry);
        self.targets.push_back(Region::parse_entry(&entry).ok_or(Violation)?);
        self.next_entry = (self.next_entry + 1) % WINDOWS;
        Ok(())
    }

    /// The peer has disconnected: what it has sent can be read still.
    pub(super) fn on_gone(&mut self) {
        self.has_peer_shut = true;
        self.has_peer_gone = true;
    }

    /// The oldest send in flight is done.
    pub(super) fn on_sent(&mut self) {
        match self.in_flight.pop_front() {
            Some(Sent::Data(bytes)) => {
                self.ring_used -= bytes;
                self.data_in_flight -= 1;
            }
            Some(Sent::Control) => self.control_in_flight -= 1,
            None => {}
        }
    }

    pub(super) fn is_all_sent(&self) -> bool {
        self.in_flight.is_empty() && !matches!(self.ending, Ending::Wanted(_))
    }

    /// Tells whether the program may not send any more.
    pub(super) fn is_closed_for_sends(&self) -> bool {
        self.has_peer_gone || self.ending != Ending::Open
    }

    /// Tells whether the peer sends nothing more and everything is read.
    pub(super) fn is_at_end(&self) -> bool {
        self.has_peer_shut && self.readable() == 0
    }

    pub(super) fn has_peer_gone(&self) -> bool {
        self.has_peer_gone
    }

    /// Tells whether a send of data would be taken.
    pub(super) fn is_writable(&self) -> bool {
        self.new_maps.is_empty()
            && self.sent != self.limit
            && self.data_in_flight < self.own.sends
            && !self.targets.is_empty()
            && self.ring_used < self.own.send_ring
    }

    /// The next bytes of the ring, at most `want`; none of it for few bytes, which go inline.
    fn take_ring(&mut self, want: usize) -> (usize, [(usize, usize); 2]) {
        self.data_in_flight += 1;
        if want <= self.own.inline {
            self.in_flight.push_back(Sent::Data(0));
            return (want, [(0, 0); 2]);
        }
        let len = want.min(self.own.send_ring - self.ring_used);
        let first = len.min(self.own.send_ring - self.ring_next);
        let pieces = [(self.ring_next, first), (0, len - first)];
        self.ring_next = (self.ring_next + len) % self.own.send_ring;
        self.ring_used += len;
        self.in_flight.push_back(Sent::Data(len));
        (len, pieces)
    }

    /// Sends some of `want` bytes; `None`: not now [RSK-4].
    pub(super) fn send(&mut self, want: usize) -> Option<Write> {
        if want == 0 || !self.is_writable() {
            return None;
        }
        let target = *self.targets.front()?;
        let want = want.min(target.len as usize).min(WRITE_MAX).min(DATA_MAX);
        let (len, pieces) = self.take_ring(want);
        let bytes = len as u32; // at most the window's
        self.sent = self.sent.wrapping_add(1);
        let left =
            Region { addr: target.addr + u64::from(bytes), len: target.len - bytes, ..target };
        match self.targets.front_mut() {
            Some(front) if left.len > 0 => *front = left,
            _ => drop(self.targets.pop_front()),
        }
        let immediate = Some(Message::Data(bytes).immediate());
        Some(Write { to: target.at(0), pieces, len, immediate })
    }

    /// The mapping of the peer in which an offset is, and the bytes from there to its end.
    pub(super) fn mapped(&self, offset: u64) -> Option<(Remote, usize)> {
        self.peer_maps.iter().flatten().find_map(|map| {
            let at = offset.checked_sub(map.offset)?;
            let left = u64::from(map.region.len).checked_sub(at).filter(|left| *left > 0)?;
            Some((map.region.at(at), left as usize)) // of a number of 32 bits
        })
    }

    /// Writes some of `want` bytes, at least one, to a place in a mapping of the peer's; `None`:
    /// not now [RSK-10].
    pub(super) fn write_mapped(&mut self, to: Remote, want: usize) -> Option<Write> {
        let has_room = self.data_in_flight < self.own.sends && self.ring_used < self.own.send_ring;
        if !has_room {
            return None;
        }
        let (len, pieces) = self.take_ring(want.min(WRITE_MAX));
        Some(Write { to, pieces, len, immediate: None })
    }

    /// Bytes that can be read, and where they begin in the receive ring.
    pub(super) fn readable(&self) -> usize {
        (self.filled - self.read) as usize // at most the ring's
    }

    /// The places in the receive ring of the next `len` bytes.
    pub(super) fn pieces(&self, len: usize) -> [(usize, usize); 2] {
        let size = self.own.half() as usize * 2;
        let begin = (self.read % size as u64) as usize;
        let first = len.min(size - begin);
        [(begin, first), (0, len - first)]
    }

    pub(super) fn consume(&mut self, len: usize) {
        self.read += len.min(self.readable()) as u64;
    }

    /// Gives the peer a mapping [RSK-9].
    pub(super) fn give(&mut self, index: u8, map: Map) {
        self.new_maps.retain(|(other, _)| *other != index);
        self.new_maps.push_back((index, map));
    }

    /// Takes back a mapping that the peer has not been given.
    pub(super) fn take_back(&mut self, index: u8) {
        self.new_maps.retain(|(other, _)| *other != index);
    }

    /// Mappings that the peer can be given.
    pub(super) fn peer_has_maps(&self) -> u8 {
        self.peer.maps
    }

    /// Ends the sending; `whole`: the receiving too [RSK-8].
    pub(super) fn shut(&mut self, whole: bool) {
        let message =
            if whole || self.has_peer_shut { Message::Disconnect } else { Message::Shutdown };
        let has_said = match self.ending {
            Ending::Open => false,
            Ending::Wanted(said) | Ending::Sent(said) => {
                said == message || said == Message::Disconnect
            }
        };
        if !has_said && !self.has_peer_gone {
            self.ending = Ending::Wanted(message);
        }
    }

    /// The number of messages up to which the peer may send.
    fn new_limit(&self) -> u16 {
        self.received.wrapping_add(self.own.credits)
    }

    fn window(&mut self) -> Option<Update> {
        let half = u64::from(self.own.half());
        let has_entry = (self.offers.len() as u64) < u64::from(self.peer.table.len);
        if !has_entry || half * 2 - (self.offered - self.read) < half {
            return None;
        }
        let begin = self.offered % (half * 2);
        let region = Region {
            addr: self.own.receive_ring.addr + begin,
            key: self.own.receive_ring.key,
            len: self.own.half(),
        };
        self.offered += half;
        self.offers.push_back(self.offered);
        let to = self.peer.table.at(u64::from(self.next_offer) * WINDOW_LEN as u64);
        self.next_offer = (self.next_offer + 1) % self.peer.table.len;
        Some(self.credits(to, region.entry().to_vec()))
    }

    fn credits(&mut self, to: Remote, bytes: Vec<u8>) -> Update {
        self.allowed = self.new_limit();
        Update { to, bytes, immediate: Message::Credits(self.allowed).immediate() }
    }

    /// The next message without data that is to be sent.
    pub(super) fn update(&mut self) -> Option<Update> {
        if self.has_peer_gone {
            return None;
        }
        let update = self.next_update()?;
        self.in_flight.push_back(Sent::Control);
        self.control_in_flight += 1;
        Some(update)
    }

    fn next_update(&mut self) -> Option<Update> {
        let nowhere = Remote::default();
        if self.control_in_flight < CONTROL_SENDS
            && self.ending == Ending::Open
            && let Some((index, map)) = self.new_maps.pop_front()
        {
            let windows = u64::from(self.peer.table.len) * WINDOW_LEN as u64;
            let to = self.peer.table.at(windows + u64::from(index) * MAP_LEN as u64);
            let immediate = Message::Map(index.into()).immediate();
            return Some(Update { to, bytes: map.entry().to_vec(), immediate });
        }
        let is_over = self.ending == Ending::Sent(Message::Disconnect);
        if self.control_in_flight < CONTROL_SENDS && !self.has_peer_shut && !is_over {
            if let Some(update) = self.window() {
                return Some(update);
            }
            let news = self.new_limit().wrapping_sub(self.allowed);
            if news > 0 && news >= self.own.credits / 2 {
                return Some(self.credits(nowhere, Vec::new()));
            }
        }
        match self.ending {
            Ending::Wanted(message) if self.control_in_flight < EXTRA_SENDS => {
                self.ending = Ending::Sent(message);
                Some(Update { to: nowhere, bytes: Vec::new(), immediate: message.immediate() })
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests;
