//! The node's side of one socket of a program.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;

use bowline_attach::TOKEN_LEN;
use bowline_rds::SocketId;
use rustix::io::Errno as SystemErrno;
use rustix::net::{RecvFlags, SendFlags};

use crate::options::Options;

/// A socket that programs have.
#[derive(Debug)]
pub(crate) struct HostSocket {
    pub(crate) id: SocketId,
    /// The node's end of the pair; the programs have the other.
    end: OwnedFd,
    /// Inode of the programs' end, by which a descriptor that they show is known.
    pub(crate) inode: u64,
    pub(crate) options: Options,
    /// Channels whose requests wait for something to receive, or for room to send, in their order.
    pub(crate) receivers: VecDeque<u64>,
    pub(crate) senders: VecDeque<u64>,
    /// Number of the last token that was sent.
    last_token: u32,
    /// A token that was sent stands for something that is still there.
    is_readable: bool,
}

impl HostSocket {
    pub(crate) fn new(id: SocketId, end: OwnedFd, inode: u64) -> Self {
        Self {
            id,
            end,
            inode,
            options: Options::default(),
            receivers: VecDeque::new(),
            senders: VecDeque::new(),
            last_token: 0,
            is_readable: false,
        }
    }

    /// Makes the programs' end readable, if it is not.
    pub(crate) fn show_readable(&mut self) {
        if self.is_readable {
            return;
        }
        self.last_token = self.last_token.wrapping_add(1).max(1);
        let token: [u8; TOKEN_LEN] = self.last_token.to_ne_bytes();
        // Without room for it there are tokens enough: the end is readable.
        let _ = rustix::net::send(&self.end, &token, SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
        self.is_readable = true;
    }

    /// There is nothing to receive any more. Returns the number of the last token that the program
    /// is to take from its end; 0: there is none.
    pub(crate) fn token_to_take(&mut self) -> u32 {
        self.is_readable = false;
        self.last_token
    }

    /// A program has taken tokens that stand for something.
    pub(crate) fn tokens_are_gone(&mut self) {
        self.is_readable = false;
    }

    /// Takes what programs have sent on their end to make it unwritable. Returns `false` when all
    /// of them have closed it.
    pub(crate) fn make_writable(&mut self) -> bool {
        let mut sink = [0; 64];
        loop {
            match rustix::net::recv(&self.end, &mut sink, RecvFlags::DONTWAIT) {
                Ok((0, _)) => return false,
                Ok(_) | Err(SystemErrno::INTR) => {}
                Err(SystemErrno::AGAIN) => return true,
                Err(_) => return false,
            }
        }
    }
}
