//! Watches a byte stream and tells which message of the workload each frame in it carries.
//!
//! The judges need it where the rules allow a loss: which messages were in the bytes that a TCP
//! acknowledged and nobody read, or that were begun on a connection to a process that is gone.

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};

use bowline_wire::rds::{HEADER_LEN, Header};

use crate::oracle::{MessageId, Oracle};
use crate::payload::TAG_LEN;

/// Reads frame by frame, whatever the pieces.
#[derive(Debug, Default)]
pub(crate) struct Tap {
    cursor: Cursor,
    frames: VecDeque<(u64, MessageId)>,
    /// Messages handed to TCP that it did not take, as far as is known; their sender may count
    /// them as begun.
    attempted: Vec<MessageId>,
    receiver_died: bool,
}

/// Where in which frame the stream is.
#[derive(Clone, Debug, Default)]
struct Cursor {
    /// Header and first bytes of the payload of the frame under way.
    head: Vec<u8>,
    /// What of the frame is still to come once the head is known.
    rest: u64,
    offset: u64,
}

impl Cursor {
    /// Follows `bytes`; `found` gets the end of each frame with its message.
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

impl Tap {
    /// Follows `bytes` that TCP took on connection `lane`; `ends` are the writer's and the reader's
    /// address.
    pub(crate) fn feed(
        &mut self,
        bytes: &[u8],
        ends: (IpAddr, IpAddr),
        lane: u32,
        oracle: &mut Oracle,
    ) {
        self.attempted.clear();
        let mut cursor = std::mem::take(&mut self.cursor);
        let mut begun = Vec::new();
        cursor.follow(bytes, ends, oracle, |end, message| begun.push((end, message)));
        self.cursor = cursor;
        for (end, message) in begun {
            oracle.begun(message, lane);
            if self.receiver_died {
                oracle.excuse(message);
            } else {
                self.frames.push_back((end, message));
            }
        }
    }

    /// Looks at `bytes` that TCP was offered and did not take.
    pub(crate) fn attempt(&mut self, bytes: &[u8], ends: (IpAddr, IpAddr), oracle: &mut Oracle) {
        let mut messages = Vec::new();
        self.cursor.clone().follow(bytes, ends, oracle, |_, message| messages.push(message));
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

    /// The messages whose last byte lies after `from` and not after `to`.
    pub(crate) fn messages_ending_in(&self, from: u64, to: u64) -> Vec<MessageId> {
        let inside = |f: &&(u64, MessageId)| f.0 > from && f.0 <= to;
        self.frames.iter().filter(inside).map(|f| f.1).collect()
    }

    /// The process that would have read this is gone: returns what it had not read; what is
    /// written from now on is excused as it comes.
    pub(crate) fn receiver_died(&mut self) -> Vec<MessageId> {
        self.receiver_died = true;
        let unread = self.frames.drain(..).map(|f| f.1);
        unread.chain(self.attempted.drain(..)).collect()
    }
}
