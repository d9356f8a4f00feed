//! The kernel's requests by /dev/fuse: one read each, and one write for its answer. Several threads
//! have a clone of the descriptor each.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;

use bowline_rnbd::Errno;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags};

use super::bytes::{Data, Hold, MAX_IO};
use super::file::{Answers, DiskFile, Out, To};
use super::hand_over::Gate;
use super::wire::{self, Call, HEADER, Header, WRITE_ARGS};
use crate::front::sys::{self, Piece};
use crate::front::turns::Turns;

/// What is read apart from the data of a write.
const FIRST: usize = HEADER + WRITE_ARGS;
/// Writes of this size and more keep the memory that they were read into; copying smaller ones
/// costs less than taking new memory.
const WORTH_KEEPING: usize = 32 << 10;
const WRITE: u32 = 16;
/// Makes a new descriptor one of a mount that another serves (`FUSE_DEV_IOC_CLONE`).
const CLONE: libc::Ioctl = 0x8004_e500_u32 as libc::Ioctl;

/// A descriptor of /dev/fuse. What is read from one has to be answered by the same.
pub(super) struct Device {
    pub(super) fd: OwnedFd,
}

impl Device {
    /// Another descriptor of the same mount, whose requests are its own.
    pub(super) fn another(&self) -> io::Result<Self> {
        let fd = rustix::fs::open("/dev/fuse", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
        let of = self.fd.as_raw_fd() as u32;
        // SAFETY: this command reads one number from there.
        let done = unsafe { libc::ioctl(fd.as_raw_fd(), CLONE, &raw const of) };
        if done < 0 { Err(io::Error::last_os_error()) } else { Ok(Self { fd }) }
    }

    /// Reads a request: its first bytes, and what follows.
    fn read(&self, first: &mut [u8; FIRST], rest: Piece) -> io::Result<usize> {
        let pieces = [Piece { iov_base: first.as_mut_ptr().cast(), iov_len: FIRST }, rest];
        // SAFETY: `first` is there for as long; `rest` is memory of a buffer that the caller holds,
        // to whose bytes nothing has references.
        let n = unsafe { libc::readv(self.fd.as_raw_fd(), pieces.as_ptr(), 2) };
        usize::try_from(n).map_err(|_| io::Error::last_os_error())
    }
}

impl Answers for Device {
    fn answer(&self, to: To, result: Result<Out<'_>, Errno>) {
        let (data, len) = match &result {
            Ok(Out::Bytes(bytes)) => (sys::piece_of_bytes(bytes), bytes.len()),
            Ok(Out::Mem(mem)) => (sys::piece_of_mem(mem), mem.len),
            Err(_) => (sys::NOTHING, 0),
        };
        let header = wire::answer_header(to.unique, result.map(|_| len));
        let pieces = [sys::piece_of_bytes(&header), data];
        // SAFETY: the header is there for as long, and what `result` borrows; it is only read.
        // An answer that the kernel does not want any more has nobody who waits for it.
        let _ = unsafe { libc::writev(self.fd.as_raw_fd(), pieces.as_ptr(), 2) };
    }
}

/// Body of a thread: serves the file until it is unmounted, or left to another process. `own` is
/// memory for the largest write that this thread alone uses, so that it can always take a request.
pub(super) fn serve(device: &Arc<Device>, file: &DiskFile, own: usize, gate: &Gate) {
    let answers: Arc<dyn Answers> = Arc::clone(device) as _;
    let (mut turns, mut batch) = (Turns::default(), Vec::new());
    let mut taken = None;
    let mut first = [0; FIRST];
    let bytes = &file.bytes;
    loop {
        if gate.is_closed() && !gate.park() {
            break;
        }
        // A large write stays where it is read to.
        taken = taken.or_else(|| bytes.try_allocate(MAX_IO));
        let at = taken.unwrap_or(own);
        let mem = bytes.mem(at, MAX_IO);
        let n = match device.read(&mut first, sys::piece_of_mem(&mem)) {
            Ok(n) => n,
            // A request that was taken back, or a signal.
            Err(error) if [libc::ENOENT, libc::EINTR, libc::EAGAIN].contains(&errno(&error)) => {
                continue;
            }
            Err(_) => break,
        };
        let Some(header) = Header::parse(&first[..n.min(FIRST)]) else { break };
        let behind = n.saturating_sub(FIRST);
        let mut long = Vec::new();
        let mut args = &first[HEADER..n.min(FIRST)];
        let mut data = None;
        if header.opcode == WRITE {
            let mut hold = Hold::Passing;
            if behind >= WORTH_KEEPING && taken.take().is_some() {
                bytes.shrink(at, MAX_IO, behind);
                hold = Hold::Own;
            }
            data = Some(Data { at, len: behind, hold });
        } else if behind > 0 {
            long.extend_from_slice(args);
            mem.buffer.append_to(mem.offset, behind, &mut long);
            args = &long;
        }
        file.serve(&header, Call::parse(&header, args), data, 0, &answers, &mut batch);
        bytes.send(&mut batch);
        // Answers requests in this thread until the kernel has another one, or none are left: one
        // that is waited for is then answered without a hand-over.
        loop {
            if !bytes.are_pending() || gate.is_closed() {
                bytes.leave(&mut turns);
                break;
            }
            // It looks here first, since all that is there is submitted together.
            let mut fds = [PollFd::from_borrowed_fd(device.fd.as_fd(), PollFlags::IN)];
            if poll(&mut fds, Some(&Timespec::default())).is_ok_and(|count| count > 0) {
                break;
            }
            if bytes.turn(&mut turns, device.fd.as_fd()).is_none() {
                break;
            }
        }
    }
    bytes.leave(&mut turns);
    bytes.take_back(taken.map(|at| Data { at, len: MAX_IO, hold: Hold::Own }));
}

fn errno(error: &io::Error) -> i32 {
    error.raw_os_error().unwrap_or(0)
}
