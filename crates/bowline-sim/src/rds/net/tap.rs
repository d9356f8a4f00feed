//! Follows a byte stream and finds the message of the workload in each frame.
//!
//! The oracle needs that where the rules allow a loss: for messages in bytes that a TCP
//! acknowledged and no process read, and for messages started on a connection to a process that is
//! gone.

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};

use bowline_wire::rds::{HEADER_LEN, Header};

use crate::rds::oracle::{MessageId, Oracle};
use crate::rds::payload::TAG_LEN;

/// Offsets of the ports in a header.
const SPORT_AT: usize = 20;
const DPORT_AT: usize = 22;

/// Reads frame by frame, however the bytes are split.
#[derive(Debug, Default)]
pub(crate) struct Tap {
    cursor: Cursor,
    frames: VecDeque<(u64, MessageId)>,
    /// Messages offered to TCP that it did not take, as far as they are known; their sender may
    /// count them as started.
    attempted: Vec<MessageId>,
    /// Position in the stream if TCP had taken all bytes offered.
    attempted_cursor: Option<Cursor>,
    /// Offset in the stream at which [`take_stub`](Self::take_stub) last returned a stub.
    stub_at: Option<u64>,
    receiver_died: bool,
    /// Messages excused because the receiver died. A dead machine's connection may be taken for its
    /// successor's and be read.
    gone: Vec<MessageId>,
}

/// A message that was started, with too few bytes written to identify it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stub {
    /// Source and destination port, if that part of the header was written.
    pub(crate) ports: Option<(u16, u16)>,
}

/// Position of the stream within a frame.
#[derive(Clone, Debug, Default)]
struct Cursor {
    /// Header and first payload bytes of the present frame.
    head: Vec<u8>,
    /// Number of bytes of the frame still to come once the head is complete.
    rest: u64,
    offset: u64,
}

impl Cursor {
    /// Follows `bytes`; passes the end of each frame and its message to `found`.
    fn follow(
        &mut self,
        mut bytes: &[u8],
        (local, remote): (IpAddr, IpAddr),
        oracle: &Oracle,
        mut found: impl FnMut(u64, MessageId),
    ) {
        while !bytes.is_empty() {
            if self.rest > 0 {
                let skip = self.rest.min(bytes.len() as u64);
                self.rest -= skip;
                self.offset += skip;
                bytes = &bytes[skip as usize..];
                continue;
            }
            let wanted = match Header::parse(&self.head) {
                Err(_) => HEADER_LEN,
                Ok(header) => HEADER_LEN + TAG_LEN.min(header.len as usize),
            };
            let take = wanted.saturating_sub(self.head.len()).min(bytes.len());
            self.head.extend_from_slice(&bytes[..take]);
            self.offset += take as u64;
            bytes = &bytes[take..];
            let Ok(header) = Header::parse(&self.head) else { continue };
            let tag = &self.head[HEADER_LEN..];
            if tag.len() < TAG_LEN.min(header.len as usize) {
                continue;
            }
            self.rest = u64::from(header.len) - tag.len() as u64;
            let end = self.offset + self.rest;
            if !header.is_map() && header.sport != 0 && header.dport != 0 {
                let source = SocketAddr::new(local, header.sport);
                let target = SocketAddr::new(remote, header.dport);
                if let Some(message) = oracle.identify(source, target, tag) {
                    found(end, message);
                }
            }
            self.head.clear();
        }
    }
}

impl Cursor {
    /// Returns the message in whose head the stream is, if an application sent it.
    fn stub(&self) -> Option<Stub> {
        let head = &self.head;
        let word = |at: usize| Some(u16::from_be_bytes([*head.get(at)?, *head.get(at + 1)?]));
        let ports = word(SPORT_AT).zip(word(DPORT_AT));
        // Maps, probes and answers have a port 0.
        let own = ports.is_some_and(|(sport, dport)| sport.min(dport) == 0);
        (!head.is_empty() && !own).then_some(Stub { ports })
    }
}

impl Tap {
    /// Follows `bytes` that TCP took on connection `connection`; `ends` are the addresses of the
    /// writer and the reader.
    pub(crate) fn feed(
        &mut self,
        bytes: &[u8],
        ends: (IpAddr, IpAddr),
        connection: u32,
        oracle: &mut Oracle,
    ) {
        self.attempted.clear();
        self.attempted_cursor = None;
        let mut cursor = std::mem::take(&mut self.cursor);
        let mut started = Vec::new();
        cursor.follow(bytes, ends, oracle, |end, message| started.push((end, message)));
        self.cursor = cursor;
        for (end, message) in started {
            oracle.started(message, connection);
            if self.receiver_died {
                oracle.excuse(message);
                self.gone.push(message);
            } else {
                self.frames.push_back((end, message));
            }
        }
    }

    /// Follows `bytes` that were offered to TCP and that it did not take.
    pub(crate) fn attempt(&mut self, bytes: &[u8], ends: (IpAddr, IpAddr), oracle: &mut Oracle) {
        let mut messages = Vec::new();
        let mut cursor = self.cursor.clone();
        cursor.follow(bytes, ends, oracle, |_, message| messages.push(message));
        self.attempted_cursor = Some(cursor);
        if self.receiver_died {
            for message in messages {
                oracle.excuse(message);
            }
        } else {
            self.attempted = messages;
        }
    }

    /// Forgets frames that were read whole.
    pub(crate) fn forget(&mut self, read: u64) {
        while self.frames.front().is_some_and(|f| f.0 <= read) {
            self.frames.pop_front();
        }
    }

    /// Returns the messages that were written and not read.
    pub(crate) fn messages(&self) -> impl Iterator<Item = MessageId> {
        self.frames.iter().map(|f| f.1).chain(self.gone.iter().copied())
    }

    /// Returns the messages whose last byte lies after `from` and not after `to`.
    pub(crate) fn messages_ending_in(&self, from: u64, to: u64) -> Vec<MessageId> {
        let inside = |f: &&(u64, MessageId)| f.0 > from && f.0 <= to;
        self.frames.iter().filter(inside).map(|f| f.1).collect()
    }

    /// Notes that the reading process is gone. Returns the messages it had not read; messages
    /// written from now on are excused at once.
    pub(crate) fn receiver_died(&mut self) -> Vec<MessageId> {
        self.receiver_died = true;
        self.gone.extend(self.frames.drain(..).map(|f| f.1));
        self.gone.iter().copied().chain(self.attempted.drain(..)).collect()
    }

    /// Returns the message in whose head a stream to a dead process has ended: its sender counts it
    /// as started from its first byte on.
    pub(crate) fn take_stub(&mut self) -> Option<Stub> {
        if !self.receiver_died {
            return None;
        }
        let cursor = self.attempted_cursor.as_ref().unwrap_or(&self.cursor);
        let stub = cursor.stub().filter(|_| self.stub_at != Some(cursor.offset));
        self.stub_at = Some(cursor.offset);
        stub
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ends() -> (SocketAddr, SocketAddr) {
        (SocketAddr::from(([10, 0, 0, 1], 7)), SocketAddr::from(([10, 0, 0, 2], 9)))
    }

    /// Returns an oracle with two messages of 100 bytes from one socket to another, and their
    /// frames.
    fn two_messages() -> (Oracle, Vec<u8>) {
        let (from, to) = ends();
        let mut oracle = Oracle::default();
        oracle.add_slot(from, true, false, 0);
        oracle.add_slot(to, true, false, 0);
        oracle.opened(0);
        oracle.opened(1);
        let mut stream = Vec::new();
        for sequence in 1..=2 {
            let mut payload = Vec::new();
            oracle.next_payload(0, 1, 100, &mut payload);
            oracle.send_accepted(0, 1, 100);
            let header = Header { sequence, len: 100, sport: 7, dport: 9, ..Header::default() };
            stream.extend_from_slice(&header.to_bytes());
            stream.extend_from_slice(&payload);
        }
        (oracle, stream)
    }

    /// The receiver's machine has failed silently. The sender writes a whole message and some bytes
    /// of the next one on the connection to it; then the connection ends.
    #[test]
    fn a_message_begun_by_less_than_its_name_on_a_dead_machines_connection_may_be_lost() {
        let (from, to) = ends();
        let ips = (from.ip(), to.ip());
        for bytes in [1, 13, 24, 47, 48, 55] {
            let (mut oracle, stream) = two_messages();
            let mut tap = Tap::default();
            tap.receiver_died();
            tap.feed(&stream[..148 + bytes], ips, 3, &mut oracle);
            assert!(oracle.missing().is_some(), "the second one is still owed");
            let stub = tap.take_stub().expect("something was begun");
            assert_eq!(stub.ports, (bytes >= 24).then_some((7, 9)), "{bytes} bytes");
            oracle.excuse_started(ips, stub.ports, 3);
            assert_eq!(oracle.missing(), None, "{bytes} bytes");
            assert_eq!(tap.take_stub(), None, "only one");
        }
    }

    /// An earlier message of the flow was lost with another dead machine's connection. It never
    /// comes, and is not the message that was started here.
    #[test]
    fn messages_lost_before_are_not_taken_for_started_ones() {
        let (from, to) = ends();
        let ips = (from.ip(), to.ip());
        let (mut oracle, stream) = two_messages();
        let mut earlier = Tap::default();
        earlier.receiver_died();
        earlier.feed(&stream[..148], ips, 2, &mut oracle);
        let mut tap = Tap::default();
        tap.receiver_died();
        tap.feed(&stream[148..196], ips, 3, &mut oracle);
        let stub = tap.take_stub().expect("something was begun");
        oracle.excuse_started(ips, stub.ports, 3);
        assert_eq!(oracle.missing(), None);
    }

    #[test]
    fn messages_not_started_on_a_dead_connection_must_come() {
        let (from, to) = ends();
        let ips = (from.ip(), to.ip());
        let (mut oracle, stream) = two_messages();
        let mut tap = Tap::default();
        tap.receiver_died();
        tap.feed(&stream[..148], ips, 3, &mut oracle);
        assert_eq!(tap.take_stub(), None, "it ended between two messages");
        assert!(oracle.missing().is_some());
        let mut alive = Tap::default();
        alive.feed(&stream[..160], ips, 3, &mut oracle);
        assert_eq!(alive.take_stub(), None, "its receiver lives");
        oracle.excuse_started(ips, Some((7, 8)), 3);
        assert!(oracle.missing().is_some(), "another flow's");
    }

    /// TCP takes no bytes, but the sender does not know that yet when the connection ends.
    #[test]
    fn messages_offered_to_tcp_count_as_started() {
        let (from, to) = ends();
        let ips = (from.ip(), to.ip());
        let (mut oracle, stream) = two_messages();
        let mut tap = Tap::default();
        tap.receiver_died();
        tap.feed(&stream[..148], ips, 3, &mut oracle);
        tap.attempt(&stream[148..160], ips, &mut oracle);
        assert_eq!(tap.take_stub(), Some(Stub { ports: None }));
    }

    /// The connection has ended inside a header. Its sender does not know that yet, and offers the
    /// rest.
    #[test]
    fn a_stub_does_not_hide_what_is_offered_after_it() {
        let (from, to) = ends();
        let ips = (from.ip(), to.ip());
        let (mut oracle, stream) = two_messages();
        let mut tap = Tap::default();
        tap.receiver_died();
        tap.feed(&stream[..13], ips, 3, &mut oracle);
        assert_eq!(tap.take_stub(), Some(Stub { ports: None }));
        tap.attempt(&stream[13..], ips, &mut oracle);
        assert_eq!(oracle.missing(), None, "both were begun");
        assert_eq!(tap.take_stub(), None);
    }
}
