//! Requests of virtio's block device: a header that the device reads, data, and a byte of status
//! that it writes.

use bowline_rnbd::{Errno, IoOp, Limits};

use super::memory::{GuestMemory, Piece};
use super::ring::{Broken, Segment};
use super::wire::RANGES;

const HEADER_LEN: usize = 16;
const RANGE_LEN: usize = 16;
/// Longest name that a guest gets.
const NAME_LEN: usize = 20;
/// Blocks that are made zero may lose their place.
const UNMAP: u32 = 1;

/// The status of a request.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Status {
    Ok = 0,
    IoError = 1,
    Unsupported = 2,
}

impl Status {
    /// Returns the status of a request that ended with 0 or a negative errno.
    pub(super) fn of(errno: i32) -> Self {
        match errno {
            0 => Self::Ok,
            errno if errno == Errno::EOPNOTSUPP.neg() => Self::Unsupported,
            _ => Self::IoError,
        }
    }
}

/// Returns the name of a disk as a guest reads it.
pub(super) fn name_bytes(name: &str) -> [u8; NAME_LEN] {
    let mut bytes = [0; NAME_LEN];
    let len = name.len().min(NAME_LEN);
    bytes[..len].copy_from_slice(&name.as_bytes()[..len]);
    bytes
}

/// A range of the disk without data.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct DiskRange {
    pub(super) offset: u64,
    pub(super) len: u32,
    pub(super) nounmap: bool,
}

/// What a request asks for.
#[derive(Debug, Eq, PartialEq)]
pub(super) enum Wanted {
    /// A read or a write of `len` bytes in these pieces of memory.
    Data {
        op: IoOp,
        offset: u64,
        len: u32,
        pieces: Vec<Piece>,
    },
    /// A discard or a write of zeroes.
    Ranges(IoOp, Vec<DiskRange>),
    Flush,
    /// The name of the disk, in these pieces of memory.
    Name(Vec<Piece>),
    /// It is answered with this.
    Answered(Status),
}

/// A request, and where its status goes.
#[derive(Debug, Eq, PartialEq)]
pub(super) struct Parsed {
    pub(super) wanted: Wanted,
    pub(super) status: Piece,
}

/// Reads a request for a disk with these limits. One without a place for its
/// status cannot be answered, and breaks its ring.
pub(super) fn parse(
    memory: &GuestMemory,
    segments: &[Segment],
    limits: &Limits,
) -> Result<Parsed, Broken> {
    let status = segments.iter().rev().find(|segment| segment.len > 0);
    let status = status.filter(|segment| segment.is_written);
    let status = status.and_then(|last| {
        let mut piece = Vec::new();
        memory.pieces(last.guest.checked_add(u64::from(last.len) - 1)?, 1, &mut piece)?;
        piece.pop()
    });
    let status = status.ok_or(Broken("a request without a place for its status"))?;
    let wanted = parse_body(memory, segments, limits);
    let wanted = wanted.unwrap_or_else(Wanted::Answered);
    Ok(Parsed { wanted, status })
}

fn parse_body(
    memory: &GuestMemory,
    segments: &[Segment],
    limits: &Limits,
) -> Result<Wanted, Status> {
    let mut to_read = pieces(memory, segments, false)?;
    let mut to_write = pieces(memory, segments, true)?;
    // The status is its last byte.
    drop_last_byte(&mut to_write);
    let header: [u8; HEADER_LEN] =
        take_front(memory, &mut to_read, HEADER_LEN).try_into().map_err(|_| Status::IoError)?;
    let [t0, t1, t2, t3, _, _, _, _, s0, s1, s2, s3, s4, s5, s6, s7] = header;
    let kind = u32::from_le_bytes([t0, t1, t2, t3]);
    let sector = u64::from_le_bytes([s0, s1, s2, s3, s4, s5, s6, s7]);
    match kind {
        0 => data(limits, IoOp::Read, sector, to_write),
        1 => data(limits, IoOp::Write, sector, to_read),
        4 => Ok(Wanted::Flush),
        8 => Ok(Wanted::Name(to_write)),
        11 if limits.discard.is_some() => ranges(memory, limits, IoOp::Discard, to_read),
        13 if limits.max_write_zeroes > 0 => ranges(memory, limits, IoOp::WriteZeroes, to_read),
        _ => Err(Status::Unsupported),
    }
}

fn data(limits: &Limits, op: IoOp, sector: u64, pieces: Vec<Piece>) -> Result<Wanted, Status> {
    let len: u64 = pieces.iter().map(|piece| piece.len as u64).sum();
    let offset = check(limits, op, sector, len)?;
    // Checked to be that of one request.
    let len = len as u32;
    if len == 0 {
        return Ok(Wanted::Answered(Status::Ok));
    }
    Ok(Wanted::Data { op, offset, len, pieces })
}

/// Checks a range of the disk; returns its offset in bytes.
fn check(limits: &Limits, op: IoOp, sector: u64, len: u64) -> Result<u64, Status> {
    let offset = sector.checked_mul(512).ok_or(Status::IoError)?;
    let block = u64::from(limits.logical);
    let valid = len <= Limits::IO_MAX.into()
        && offset.is_multiple_of(block)
        && len.is_multiple_of(block)
        && limits.holds(offset, len)
        && !(limits.read_only && op.changes());
    if valid { Ok(offset) } else { Err(Status::IoError) }
}

fn ranges(
    memory: &GuestMemory,
    limits: &Limits,
    op: IoOp,
    mut pieces: Vec<Piece>,
) -> Result<Wanted, Status> {
    let len: usize = pieces.iter().map(|piece| piece.len).sum();
    if len == 0 || len > RANGES * RANGE_LEN || !len.is_multiple_of(RANGE_LEN) {
        return Err(Status::IoError);
    }
    let bytes = take_front(memory, &mut pieces, len);
    let (all, _) = bytes.as_chunks::<RANGE_LEN>();
    let mut ranges = Vec::with_capacity(all.len());
    for [s0, s1, s2, s3, s4, s5, s6, s7, n0, n1, n2, n3, f0, f1, f2, f3] in all {
        let sector = u64::from_le_bytes([*s0, *s1, *s2, *s3, *s4, *s5, *s6, *s7]);
        let sectors = u32::from_le_bytes([*n0, *n1, *n2, *n3]);
        let flags = u32::from_le_bytes([*f0, *f1, *f2, *f3]);
        let known = if op == IoOp::WriteZeroes { UNMAP } else { 0 };
        if flags & !known != 0 {
            return Err(Status::Unsupported);
        }
        let offset = check(limits, op, sector, u64::from(sectors) * 512)?;
        if sectors > 0 {
            // Checked to be that of one request.
            let nounmap = op == IoOp::WriteZeroes && flags & UNMAP == 0;
            ranges.push(DiskRange { offset, len: sectors * 512, nounmap });
        }
    }
    match ranges.is_empty() {
        true => Ok(Wanted::Answered(Status::Ok)),
        false => Ok(Wanted::Ranges(op, ranges)),
    }
}

fn pieces(
    memory: &GuestMemory,
    segments: &[Segment],
    is_written: bool,
) -> Result<Vec<Piece>, Status> {
    let mut pieces = Vec::new();
    for segment in segments.iter().filter(|segment| segment.is_written == is_written) {
        let there = memory.pieces(segment.guest, segment.len.into(), &mut pieces);
        there.ok_or(Status::IoError)?;
    }
    Ok(pieces)
}

fn drop_last_byte(pieces: &mut Vec<Piece>) {
    if let Some(last) = pieces.last_mut() {
        last.len -= 1;
        if last.len == 0 {
            pieces.pop();
        }
    }
}

/// Reads `len` bytes, or as many as there are, and removes them from the front.
fn take_front(memory: &GuestMemory, pieces: &mut Vec<Piece>, len: usize) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(len);
    let mut emptied = 0;
    for piece in pieces.iter_mut() {
        let n = piece.len.min(len - bytes.len());
        memory.append(&Piece { len: n, ..*piece }, &mut bytes);
        (piece.at, piece.len) = (piece.at + n, piece.len - n);
        if piece.len > 0 {
            break;
        }
        emptied += 1;
    }
    pieces.drain(..emptied);
    bytes
}
