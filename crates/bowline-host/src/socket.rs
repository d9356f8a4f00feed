//! The node's side of one socket of a program.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;

use bowline_attach::TOKEN_LEN;
use bowline_rds::SocketId;
use rustix::io::Errno as SystemErrno;
use rustix::net::{RecvFlags, SendFlags};

use crate::options::Options;
use crate::rings::Rings;

/// A socket that programs have.
#[derive(Debug)]
pub(crate) struct HostSocket {
    pub(crate) id: SocketId,
    /// The node's end of the pair; the programs have the other.
    end: OwnedFd,
    /// Inode of the programs' end, by which a descriptor that they show is known.
    pub(crate) inode: u64,
    pub(crate) options: Options,
    /// A message was sent or waits: the type of service is settled.
    pub(crate) has_sent: bool,
    /// Channels whose requests wait for room to send, in their order.
    pub(crate) senders: VecDeque<u64>,
    pub(crate) rings: Rings,
    /// It gets a turn in each round.
    pub(crate) active: bool,
    /// Rounds since something happened on it.
    pub(crate) quiet: u32,
}

impl HostSocket {
    pub(crate) fn new(id: SocketId, end: OwnedFd, inode: u64, rings: Rings) -> Self {
        Self {
            id,
            end,
            inode,
            options: Options::default(),
            has_sent: false,
            senders: VecDeque::new(),
            rings,
            active: false,
            quiet: 0,
        }
    }

    /// Makes the programs' end readable, if there is something to receive and it is not.
    pub(crate) fn show_readable(&mut self) {
        let Some(token) = self.rings.token_to_show() else { return };
        let token: [u8; TOKEN_LEN] = token.to_ne_bytes();
        // Without room for it there are tokens enough: the end is readable.
        let _ = rustix::net::send(&self.end, &token, SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
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
