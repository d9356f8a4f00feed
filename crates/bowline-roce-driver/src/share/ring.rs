//! Packets from one process to another of the same host, through memory: one writes, one reads.
//!
//! ```text
//!   | tail: bytes written | head: bytes read | asleep: wake the reader | ready: it reads | records |
//!   record: length, segment, tos, from, to | packets, as they would be in a datagram, padded
//! ```
//! Each side takes the other for hostile: it keeps its own position, checks what it reads, and
//! copies packets out before it looks at them.

use core::sync::atomic::{Ordering, fence};
use std::io;
use std::net::{IpAddr, Ipv6Addr};
use std::os::fd::{AsFd, OwnedFd};

use bowline_roce::Burst;
use bowline_verbs::Buffer;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};

const TAIL: usize = 0;
const HEAD: usize = 128;
const ASLEEP: usize = 256;
const READY: usize = 384;
/// Where records begin.
const DATA: usize = 4096;
/// Bytes of records: a few bursts more than what is in flight.
const DATA_LEN: usize = 2 << 20;
const RECORD_HEAD: usize = 48;
/// Records begin at multiples of this.
const ALIGN: usize = 16;
/// Longest burst, as of a datagram.
pub(super) const BURST_MAX: usize = 1 << 16;

/// Makes the memory of a ring, which both sides map.
pub(super) fn memory() -> io::Result<OwnedFd> {
    let file = memfd_create("bowline-ring", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    ftruncate(&file, (DATA + DATA_LEN) as u64)?;
    fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(file)
}

fn map(memory: impl AsFd) -> io::Result<Buffer> {
    let memory = Buffer::from_memfd_within(memory, DATA + DATA_LEN)?;
    if memory.len() < DATA + DATA_LEN {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    Ok(memory)
}

/// Bytes of a record with this many bytes of packets.
const fn record_len(bytes: usize) -> usize {
    (RECORD_HEAD + bytes).next_multiple_of(ALIGN)
}

/// Splits a range of records where it reaches the end of the memory: place, and length of the first
/// part.
fn place(at: u64, len: usize) -> (usize, usize) {
    let offset = at as usize % DATA_LEN; // below the length
    (DATA + offset, len.min(DATA_LEN - offset))
}

fn write(memory: &Buffer, at: u64, bytes: &[u8]) {
    let (offset, first) = place(at, bytes.len());
    let (first, rest) = bytes.split_at(first);
    memory.write(offset, first);
    memory.write(DATA, rest);
}

fn read(memory: &Buffer, at: u64, out: &mut [u8]) {
    let (offset, first) = place(at, out.len());
    let (first, rest) = out.split_at_mut(first);
    memory.read(offset, first);
    memory.read(DATA, rest);
}

/// What has become of a burst.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Put {
    Done,
    /// Done, and the reader sleeps: it is to be woken.
    Wake,
    /// There is no room.
    Full,
}

/// The side that sends.
#[derive(Debug)]
pub(crate) struct Writer {
    memory: Buffer,
    tail: u64,
    /// What the reader has read, as last seen.
    head: u64,
    /// The reader has the ring.
    is_ready: bool,
}

impl Writer {
    pub(super) fn new(memory: impl AsFd) -> io::Result<Self> {
        Ok(Self { memory: map(memory)?, tail: 0, head: 0, is_ready: false })
    }

    /// Tells whether the reader has the ring: it may have had no room for it.
    pub(super) fn is_ready(&mut self) -> bool {
        self.is_ready |= self.memory.load_u64(READY) != 0;
        self.is_ready
    }

    /// Tells whether at least half of the room is free.
    pub(super) fn is_half_empty(&mut self) -> bool {
        self.has_room(DATA_LEN / 2)
    }

    fn has_room(&mut self, len: usize) -> bool {
        let used = |head| self.tail.wrapping_sub(head);
        let fits = |head| used(head).saturating_add(len as u64) <= DATA_LEN as u64;
        if !fits(self.head) {
            // One that claims to have read more than there was gets nothing more.
            self.head = self.memory.load_u64(HEAD);
        }
        fits(self.head)
    }

    /// Writes a burst of packets.
    pub(super) fn put(&mut self, burst: &Burst) -> Put {
        let len = record_len(burst.bytes.len());
        if burst.bytes.len() > BURST_MAX || !self.has_room(len) {
            return Put::Full;
        }
        let mut head = [0; RECORD_HEAD];
        let numbers = [burst.bytes.len() as u32, burst.segment as u32, burst.tos.into()]; // 64 KiB
        for (to, number) in head.chunks_exact_mut(4).zip(numbers) {
            to.copy_from_slice(&number.to_le_bytes());
        }
        let ip = |ip: IpAddr| match ip {
            IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
            IpAddr::V6(ip) => ip.octets(),
        };
        head[16..32].copy_from_slice(&ip(burst.from));
        head[32..].copy_from_slice(&ip(burst.to));
        write(&self.memory, self.tail, &head);
        write(&self.memory, self.tail.wrapping_add(RECORD_HEAD as u64), &burst.bytes);
        self.tail = self.tail.wrapping_add(len as u64);
        self.memory.store_u64(TAIL, self.tail);
        // Paired with the one in `fall_asleep`: the reader sees the record, or this its sleep.
        fence(Ordering::SeqCst);
        let sleeps = self.memory.load_u64(ASLEEP) != 0 && self.memory.update(ASLEEP, |_| 0) != 0;
        if sleeps { Put::Wake } else { Put::Done }
    }
}

/// What came with a burst.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Came {
    pub(crate) from: IpAddr,
    pub(crate) to: IpAddr,
    pub(crate) tos: u8,
    /// Bytes of each packet but the last.
    pub(crate) segment: usize,
    pub(crate) len: usize,
}

/// The side that receives.
#[derive(Debug)]
pub(crate) struct Reader {
    memory: Buffer,
    head: u64,
    is_broken: bool,
    /// Nothing has been read yet: what the writer has sent before may be in a socket still.
    pub(super) is_fresh: bool,
}

impl Reader {
    pub(super) fn new(memory: impl AsFd) -> io::Result<Self> {
        let memory = map(memory)?;
        memory.store_u64(READY, 1);
        Ok(Self { memory, head: 0, is_broken: false, is_fresh: true })
    }

    /// Tells whether there is something to read.
    pub(super) fn has_some(&self) -> bool {
        !self.is_broken && self.memory.load_u64(TAIL) != self.head
    }

    /// Asks to be woken by the next burst; returns whether there is one already.
    pub(super) fn fall_asleep(&self) -> bool {
        self.memory.store_u64(ASLEEP, 1);
        fence(Ordering::SeqCst);
        self.has_some()
    }

    /// Takes the next burst.
    pub(super) fn take(&mut self, out: &mut [u8; BURST_MAX]) -> Option<Came> {
        if !self.has_some() {
            return None;
        }
        let came = self.next(out);
        self.is_broken = came.is_none();
        came
    }

    /// Reads a record; `None`: the writer has written something else.
    fn next(&mut self, out: &mut [u8; BURST_MAX]) -> Option<Came> {
        let there = self.memory.load_u64(TAIL).wrapping_sub(self.head);
        let there = usize::try_from(there).ok().filter(|len| *len <= DATA_LEN)?;
        if there < RECORD_HEAD {
            return None;
        }
        let mut head = [0; RECORD_HEAD];
        read(&self.memory, self.head, &mut head);
        let number = |at: usize| Some(u32::from_le_bytes(*head.get(at..)?.first_chunk()?));
        let ip = |at: usize| Some(Ipv6Addr::from(*head.get(at..)?.first_chunk::<16>()?));
        let (len, segment) = (number(0)? as usize, number(4)? as usize);
        if len == 0 || segment == 0 || record_len(len) > there {
            return None;
        }
        let out = out.get_mut(..len)?;
        read(&self.memory, self.head.wrapping_add(RECORD_HEAD as u64), out);
        self.head = self.head.wrapping_add(record_len(len) as u64);
        self.memory.store_u64(HEAD, self.head);
        let (from, to) = (ip(16)?.to_canonical(), ip(32)?.to_canonical());
        Some(Came { from, to, tos: u8::try_from(number(8)?).ok()?, segment, len })
    }
}

#[cfg(test)]
mod tests {
    use bowline_base::SplitMix64;

    use super::*;

    fn ring() -> (Writer, Reader) {
        let memory = memory().unwrap();
        (Writer::new(&memory).unwrap(), Reader::new(&memory).unwrap())
    }

    fn burst(number: usize, len: usize) -> Burst {
        let mut burst = Burst::new();
        (burst.from, burst.to) = ([10, 0, 0, 1].into(), [0xfe80; 8].into());
        (burst.tos, burst.segment, burst.count) = (2, 1024, len.div_ceil(1024));
        burst.bytes = (0..len).map(|at| (at + number) as u8).collect();
        burst
    }

    #[test]
    fn bursts_come_out_as_they_went_in() {
        let (mut writer, mut reader) = ring();
        let mut out = Box::new([0; BURST_MAX]);
        assert_eq!(reader.take(&mut out), None);
        let (mut sent, mut received) = (0, 0);
        // Several times around, of lengths that end everywhere.
        while received < 3000 {
            let len = |number: usize| 1 + number * 7919 % BURST_MAX;
            while sent < 3000 && writer.put(&burst(sent, len(sent))) != Put::Full {
                sent += 1;
            }
            assert!(sent > received, "there is room for one at least");
            for _ in 0..1 + received % 30 {
                let Some(came) = reader.take(&mut out) else { break };
                let put = burst(received, len(received));
                assert!(out[..came.len] == put.bytes, "{received}");
                let Burst { from, to, tos, segment, .. } = put;
                assert_eq!(came, Came { from, to, tos, segment, len: len(received) });
                received += 1;
            }
        }
    }

    #[test]
    fn only_a_reader_that_sleeps_is_woken() {
        let (mut writer, mut reader) = ring();
        let mut out = Box::new([0; BURST_MAX]);
        assert_eq!(writer.put(&burst(1, 1)), Put::Done);
        assert!(reader.fall_asleep(), "there is something");
        assert_eq!(writer.put(&burst(1, 1)), Put::Wake, "it does not say that it is awake");
        assert_eq!(writer.put(&burst(1, 1)), Put::Done);
        while reader.take(&mut out).is_some() {}
        assert!(!reader.fall_asleep());
        assert_eq!([writer.put(&burst(1, 1)), writer.put(&burst(1, 1))], [Put::Wake, Put::Done]);
    }

    #[test]
    fn what_is_no_record_ends_the_ring() {
        let mut out = Box::new([0; BURST_MAX]);
        let lies: [&dyn Fn(&Buffer); 6] = [
            &|memory| memory.store_u64(TAIL, RECORD_HEAD as u64 - 1),
            &|memory| memory.store_u64(TAIL, DATA_LEN as u64 + 1),
            &|memory| memory.store_u64(TAIL, u64::MAX),
            &|memory| memory.write(DATA, &[0; 4]),
            &|memory| memory.write(DATA, &[0xff; 4]),
            &|memory| memory.write(DATA + 4, &[0; 4]),
        ];
        for (number, lie) in lies.iter().enumerate() {
            let (mut writer, mut reader) = ring();
            assert_eq!(writer.put(&burst(1, 100)), Put::Done);
            lie(&writer.memory);
            assert_eq!(reader.take(&mut out), None, "{number}");
            assert!(!reader.has_some() && reader.take(&mut out).is_none(), "for good");
        }
        // A reader that has read what was not written.
        let (mut writer, _reader) = ring();
        writer.memory.store_u64(HEAD, 1 << 40);
        let mut put = 0;
        while writer.put(&burst(1, BURST_MAX)) != Put::Full {
            put += 1;
        }
        assert_eq!(put, DATA_LEN / record_len(BURST_MAX));
    }

    /// Whatever a writer does to the memory, its reader takes what is within its bounds.
    #[test]
    fn random_memory_harms_nobody() {
        let mut out = Box::new([0; BURST_MAX]);
        let (writer, mut reader) = ring();
        let memory = &writer.memory;
        let mut random = SplitMix64::new(7);
        let mut taken = 0;
        for _ in 0..20_000 {
            reader.is_broken = false;
            let there = random.below(3) * random.below(1 << 18);
            memory.store_u64(TAIL, reader.head.wrapping_add(there));
            let shift = random.below(32);
            let numbers = [random.next_u64() as u32 >> shift, random.next_u64() as u32 >> shift];
            for (number, at) in numbers.iter().zip([reader.head, reader.head + 4]) {
                write(memory, at, &number.to_le_bytes());
            }
            write(memory, reader.head + 8, &[0; 4]);
            if let Some(came) = reader.take(&mut out) {
                assert!(record_len(came.len) as u64 <= there && came.segment > 0);
                taken += 1;
            }
            // A record begins anywhere.
            reader.head += random.below(1 << 17) * ALIGN as u64;
        }
        assert!(taken > 1000, "{taken}");
    }

    #[test]
    fn a_writer_knows_whether_its_reader_has_the_ring() {
        let memory = memory().unwrap();
        let mut writer = Writer::new(&memory).unwrap();
        assert!(!writer.is_ready());
        let mut reader = Reader::new(&memory).unwrap();
        assert!(writer.is_ready() && writer.is_half_empty());
        while writer.put(&burst(1, BURST_MAX)) != Put::Full {}
        let mut out = Box::new([0; BURST_MAX]);
        reader.take(&mut out).unwrap();
        assert!(!writer.is_half_empty());
        while reader.take(&mut out).is_some() {}
        assert!(writer.is_half_empty());
    }

    #[test]
    fn other_memory_is_no_ring() {
        let small = memfd_create("small", MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&small, 4096).unwrap();
        assert!(Reader::new(&small).is_err(), "it may shrink");
        fcntl_add_seals(&small, SealFlags::SHRINK).unwrap();
        assert!(Writer::new(&small).is_err());
    }
}
