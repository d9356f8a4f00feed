//! A client of NBD sockets that does as little as a test needs.

use std::{
    io::{Read, Write},
    os::unix::net::UnixStream,
    path::Path,
};

pub(crate) const WRITE: u16 = 1;
pub(crate) const FLUSH: u16 = 3;
pub(crate) const TRIM: u16 = 4;

/// A connection whose requests are answered in their order.
pub(crate) struct Nbd(UnixStream);

impl Nbd {
    pub(crate) fn connect(socket: &Path) -> Self {
        let mut stream = UnixStream::connect(socket).expect("an NBD socket");
        stream.read_exact(&mut [0; 18]).expect("a greeting");
        // No zeroes behind the answer; the export of no name.
        let flags = 3_u32.to_be_bytes();
        let option = [&b"IHAVEOPT"[..], &1_u32.to_be_bytes(), &0_u32.to_be_bytes()].concat();
        stream.write_all(&[&flags[..], &option].concat()).expect("an answer");
        stream.read_exact(&mut [0; 10]).expect("size and flags");
        Self(stream)
    }

    /// Sends a request; a write is of bytes that are all 7.
    pub(crate) fn send(&mut self, command: u16, offset: u64, len: u32) {
        let mut request = 0x2560_9513_u32.to_be_bytes().to_vec();
        request.extend(0_u16.to_be_bytes());
        request.extend(command.to_be_bytes());
        request.extend(offset.to_be_bytes());
        request.extend(offset.to_be_bytes());
        request.extend(len.to_be_bytes());
        if command == WRITE {
            request.resize(request.len() + len as usize, 7);
        }
        self.0.write_all(&request).expect("a request");
    }

    /// Reads the answer to a request, which is an errno.
    pub(crate) fn answer(&mut self) -> u32 {
        let mut answer = [0; 16];
        self.0.read_exact(&mut answer).expect("an answer");
        u32::from_be_bytes(answer[4..8].try_into().expect("four bytes"))
    }

    /// Tells whether the server has hung up, once it has said all.
    pub(crate) fn has_ended(&mut self) -> bool {
        matches!(self.0.read(&mut [0]), Ok(0) | Err(_))
    }

    pub(crate) fn ask(&mut self, command: u16, offset: u64, len: u32) -> u32 {
        self.send(command, offset, len);
        self.answer()
    }
}
