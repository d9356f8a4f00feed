//! The outgoing data of a path: a log of encoded frames that is staging area and retransmit copy at
//! once, so that a payload is copied once, from the application into the log.
//!
//! ```text
//!   head                   cursor of the link                      tail
//!    |  started, not acked   |  not started                          |
//!    v                       v                                       v
//!   [chunk 4 KiB][chunk 64 KiB           ][chunk 64 KiB              ]
//! ```
//! Chunks are shared with writes in progress and never changed once shared: an append to a shared
//! chunk starts a new one.
//!
//! Frames in the middle may be dropped. Offsets stay what they are: a chunk without a frame goes,
//! and one that holds little is replaced by copies of what it holds, [as long as
//! that](TxLog::compact).

use std::collections::VecDeque;
use std::io::IoSlice;
use std::sync::Arc;

use bowline_wire::rds::{HEADER_LEN, Header};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

const SMALL: usize = 4 << 10;
const LARGE: usize = 64 << 10;
/// Chunks of each size kept for later.
const KEEP: usize = 64;
/// Memory of a chunk beside its bytes.
const CHUNK_OVERHEAD: usize = 112;
/// Bytes that each message counts beside its payload: its header, and its record in the queue.
pub(crate) const SEND_OVERHEAD: usize = 128;

/// Free chunks of a node, and the sums over all its logs.
#[derive(Debug, Default)]
pub(crate) struct TxPool {
    small: Vec<Arc<Vec<u8>>>,
    large: Vec<Arc<Vec<u8>>>,
    /// Given back while a write still referred to them.
    in_use: Vec<Arc<Vec<u8>>>,
    /// Memory of the chunks of all logs, but for those that applications have lent.
    memory: usize,
    /// Bytes of the messages that the logs are for, [`SEND_OVERHEAD`] included.
    accounted: usize,
}

impl TxPool {
    /// Memory of the chunks of all logs, bytes.
    pub(crate) const fn memory(&self) -> usize {
        self.memory
    }

    /// Bytes of the messages of all logs, with [`SEND_OVERHEAD`] for each.
    pub(crate) const fn accounted(&self) -> usize {
        self.accounted
    }

    /// Counts a message that was appended.
    #[inline]
    pub(crate) fn account(&mut self, len: usize) {
        self.accounted += len + SEND_OVERHEAD;
    }

    /// Counts messages whose bytes are not needed any more.
    #[inline]
    pub(crate) fn discount(&mut self, messages: usize, bytes: usize) {
        self.accounted -= bytes + messages * SEND_OVERHEAD;
    }

    /// Tells whether the logs hold far more memory than their messages need, because of what was
    /// dropped or released around those that stay. Up to `spare` bytes do not matter.
    #[inline]
    pub(crate) const fn is_sparse(&self, spare: usize) -> bool {
        self.memory > spare && self.memory / 4 > self.accounted
    }

    /// Counts the messages and chunks of a log that comes from elsewhere.
    pub(crate) fn adopt(&mut self, log: &TxLog) {
        self.memory += log.chunks.iter().map(Chunk::memory).sum::<usize>();
    }

    fn get(&mut self, large: bool) -> Arc<Vec<u8>> {
        if !self.in_use.is_empty() {
            self.reclaim();
        }
        let (pool, size) = if large { (&mut self.large, LARGE) } else { (&mut self.small, SMALL) };
        pool.pop().unwrap_or_else(|| Arc::new(Vec::with_capacity(size)))
    }

    #[cold]
    fn reclaim(&mut self) {
        for i in (0..self.in_use.len()).rev() {
            if Arc::strong_count(&self.in_use[i]) == 1 {
                let chunk = self.in_use.swap_remove(i);
                self.put(chunk);
            }
        }
    }

    /// Copies a few bytes into a chunk of their own.
    pub(crate) fn copy_to_chunk(&mut self, bytes: &[u8]) -> Arc<Vec<u8>> {
        let mut chunk = self.get(bytes.len() > SMALL);
        match Arc::get_mut(&mut chunk) {
            Some(vec) => vec.extend_from_slice(bytes),
            None => chunk = Arc::new(bytes.to_vec()),
        }
        chunk
    }

    /// Takes back a chunk nobody else refers to.
    pub(crate) fn put(&mut self, mut chunk: Arc<Vec<u8>>) {
        let Some(vec) = Arc::get_mut(&mut chunk) else {
            if self.in_use.len() < KEEP {
                self.in_use.push(chunk);
            }
            return;
        };
        let pool = match vec.capacity() {
            SMALL => &mut self.small,
            LARGE => &mut self.large,
            _ => return,
        };
        vec.clear();
        if pool.len() < KEEP {
            pool.push(chunk);
        }
    }
}

#[derive(Debug)]
struct Chunk {
    base: u64,
    buf: Arc<Vec<u8>>,
    /// The buffer is the application's: nothing is appended to it, and it is not kept for later.
    lent: bool,
    /// Length of the buffer if it was given back.
    given_back: u64,
}

impl Chunk {
    fn end(&self) -> u64 {
        self.base + self.buf.len() as u64 + self.given_back
    }

    /// Memory of this node; a lent buffer is the application's.
    fn memory(&self) -> usize {
        if self.lent { 0 } else { self.buf.capacity() + CHUNK_OVERHEAD }
    }
}

/// An append-only byte log whose front is released.
#[derive(Debug, Default)]
pub(crate) struct TxLog {
    chunks: VecDeque<Chunk>,
    tail: u64,
    /// Bytes between the first chunk and `tail` that are in no chunk.
    gaps: u64,
}

impl Serialize for TxLog {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let start = self.chunks.front().map_or(self.tail, |chunk| chunk.base);
        let mut all = TxBatch::default();
        self.collect(start, self.tail, &mut all);
        let bytes = all.slices().collect::<Vec<_>>().concat();
        (start, serde_bytes::Bytes::new(&bytes)).serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for TxLog {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let (base, bytes) = <(u64, serde_bytes::ByteBuf)>::deserialize(deserializer)?;
        let mut log = Self { tail: base, ..Self::default() };
        log.append(&mut TxPool::default(), &bytes);
        Ok(log)
    }
}

impl TxLog {
    /// Offset at which the next byte will lie.
    pub(crate) const fn tail(&self) -> u64 {
        self.tail
    }

    /// Bytes held from `offset` on, about: less than that if some before it are gone.
    #[inline]
    pub(crate) const fn held_from(&self, offset: u64) -> u64 {
        (self.tail - offset).saturating_sub(self.gaps)
    }

    /// Appends a frame whose payload is `len` bytes in pieces; it begins at the present
    /// [`tail`](Self::tail).
    #[inline]
    pub(crate) fn append_frame(
        &mut self,
        pool: &mut TxPool,
        header: &[u8; HEADER_LEN],
        payload: &[IoSlice<'_>],
        len: usize,
    ) {
        let whole = HEADER_LEN + len;
        let tail = self.tail;
        if let Some(last) = self.chunks.back_mut().filter(|last| !last.lent && last.end() == tail)
            && let Some(vec) = Arc::get_mut(&mut last.buf)
            && whole <= vec.capacity() - vec.len()
        {
            vec.extend_from_slice(header);
            payload.iter().for_each(|piece| vec.extend_from_slice(piece));
            self.tail += whole as u64;
            return;
        }
        self.append(pool, header);
        payload.iter().for_each(|piece| self.append(pool, piece));
    }

    /// Appends a frame whose payload stays in the application's buffer, without copying it.
    pub(crate) fn append_lent(
        &mut self,
        pool: &mut TxPool,
        header: &[u8; HEADER_LEN],
        payload: &Arc<Vec<u8>>,
    ) {
        self.append(pool, header);
        if !payload.is_empty() {
            let buf = Arc::clone(payload);
            self.push(pool, Chunk { base: self.tail, buf, lent: true, given_back: 0 });
            self.tail += payload.len() as u64;
        }
    }

    /// Appends bytes.
    pub(crate) fn append(&mut self, pool: &mut TxPool, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let tail = self.tail;
            if let Some(last) =
                self.chunks.back_mut().filter(|last| !last.lent && last.end() == tail)
                && let Some(vec) = Arc::get_mut(&mut last.buf)
                && vec.len() < vec.capacity()
            {
                let n = bytes.len().min(vec.capacity() - vec.len());
                let (now, later) = bytes.split_at(n);
                vec.extend_from_slice(now);
                self.tail += n as u64;
                bytes = later;
                continue;
            }
            let held = self.chunks.front().map_or(0, |first| self.held_from(first.base));
            let large = held >= 4 * SMALL as u64 || bytes.len() > SMALL;
            let buf = pool.get(large);
            self.push(pool, Chunk { base: self.tail, buf, lent: false, given_back: 0 });
        }
    }

    fn push(&mut self, pool: &mut TxPool, chunk: Chunk) {
        pool.memory += chunk.memory();
        self.chunks.push_back(chunk);
    }

    fn free(pool: &mut TxPool, chunk: Chunk) {
        pool.memory -= chunk.memory();
        if !chunk.lent {
            pool.put(chunk.buf);
        }
    }

    /// Forgets everything before `offset`.
    pub(crate) fn release(&mut self, pool: &mut TxPool, offset: u64) {
        while let Some(front) = self.chunks.front() {
            if front.end() > offset {
                return;
            }
            if let Some(chunk) = self.chunks.pop_front() {
                self.gaps = self.chunks.front().map_or(0, |c| self.gaps - (c.base - chunk.end()));
                Self::free(pool, chunk);
            }
        }
    }

    /// Gives back the buffer of an application that lies from `from` to `to`, if it is one. Nobody
    /// reads these bytes any more.
    pub(crate) fn give_back(&mut self, from: u64, to: u64) {
        let at = self.chunks.partition_point(|chunk| chunk.end() <= from);
        if let Some(chunk) = self.chunks.get_mut(at).filter(|chunk| chunk.lent)
            && chunk.base == from
            && chunk.end() == to
        {
            chunk.given_back = to - from;
            chunk.buf = Arc::default();
        }
    }

    /// Forgets everything but the frames that are named, from offset to offset and in order. A
    /// chunk in which less than half is used gives way to copies. Each byte is copied once at most
    /// for every byte that goes. The last chunk has room for more, which counts as used unless
    /// `whole`.
    pub(crate) fn compact(
        &mut self,
        pool: &mut TxPool,
        frames: impl Iterator<Item = (u64, u64)>,
        whole: bool,
    ) {
        let mut frames = frames.peekable();
        let mut runs: Vec<(u64, u64)> = Vec::new();
        let count = self.chunks.len();
        for at in 1..=count {
            let Some(chunk) = self.chunks.pop_front() else { return };
            runs.clear();
            while let Some((from, to)) = frames.peek().copied() {
                if from >= chunk.end() {
                    break;
                }
                let part = (from.max(chunk.base), to.min(chunk.end()));
                match runs.last_mut() {
                    Some(last) if last.1 == part.0 => last.1 = part.1,
                    _ if part.0 < part.1 => runs.push(part),
                    _ => {}
                }
                if to > chunk.end() {
                    break; // it goes on in the next chunk
                }
                frames.next();
            }
            let used = runs.iter().map(|(from, to)| (to - from) as usize).sum::<usize>();
            let room =
                if at == count && !whole { chunk.buf.capacity() - chunk.buf.len() } else { 0 };
            let needed = used + room + runs.len() * CHUNK_OVERHEAD;
            if runs.is_empty() {
                Self::free(pool, chunk);
            } else if chunk.lent || 2 * needed > chunk.memory() {
                self.chunks.push_back(chunk);
            } else {
                for (from, to) in runs.drain(..) {
                    let part = (from - chunk.base) as usize..(to - chunk.base) as usize;
                    let buf = Arc::new(chunk.buf[part].to_vec());
                    self.push(pool, Chunk { base: from, buf, lent: false, given_back: 0 });
                }
                Self::free(pool, chunk);
            }
        }
        let bytes = self.chunks.iter().map(|chunk| chunk.buf.len() as u64).sum::<u64>();
        self.gaps = self.chunks.front().map_or(0, |first| self.tail - first.base - bytes);
    }

    /// Pushes the bytes from `from` to `to` on a batch.
    pub(crate) fn collect(&self, from: u64, to: u64, batch: &mut TxBatch) {
        let mut at = from;
        let first = self.chunks.partition_point(|c| c.end() <= from);
        for chunk in self.chunks.iter().skip(first) {
            if at >= to {
                break;
            }
            let start = (at - chunk.base) as usize;
            let end = (to.min(chunk.end()) - chunk.base) as usize;
            batch.push(Arc::clone(&chunk.buf), start, end);
            at = chunk.base + end as u64;
        }
        debug_assert!(at >= to, "the log holds what is planned");
    }

    /// Returns the bytes from `from` to `to`, piece by piece.
    pub(crate) fn slices(&self, from: u64, to: u64) -> impl Iterator<Item = &[u8]> {
        let first = self.chunks.partition_point(|c| c.end() <= from);
        self.chunks.range(first..).take_while(move |c| c.base < to).map(move |chunk| {
            let start = from.saturating_sub(chunk.base) as usize;
            let end = (to.min(chunk.end()) - chunk.base) as usize;
            &chunk.buf[start..end]
        })
    }

    /// Returns the header of the frame that begins at `start`.
    pub(crate) fn header(&self, start: u64) -> Header {
        let mut bytes = [0; HEADER_LEN];
        let mut rest = bytes.iter_mut();
        for slice in self.slices(start, start + HEADER_LEN as u64) {
            rest.by_ref().zip(slice).for_each(|(out, byte)| *out = *byte);
        }
        Header::from_bytes(&bytes)
    }

    /// Bytes of memory held, but for what applications have lent.
    pub(crate) fn memory(&self) -> usize {
        self.chunks.iter().map(Chunk::memory).sum()
    }
}

/// Bytes for one write; refers to the log, so that writing needs no lock and no copy.
#[derive(Debug, Default)]
pub struct TxBatch {
    pieces: Vec<(Arc<Vec<u8>>, usize, usize)>,
    len: usize,
}

impl TxBatch {
    /// Bytes in the batch.
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Tells whether there is nothing to write.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Forgets the contents, keeps the memory.
    pub fn clear(&mut self) {
        self.pieces.clear();
        self.len = 0;
    }

    /// The bytes, piece by piece.
    pub fn slices(&self) -> impl Iterator<Item = &[u8]> {
        self.pieces.iter().map(|(buf, start, end)| &buf[*start..*end])
    }

    pub(crate) fn push(&mut self, buf: Arc<Vec<u8>>, start: usize, end: usize) {
        self.len += end - start;
        self.pieces.push((buf, start, end));
    }

    pub(crate) fn pieces(&self) -> usize {
        self.pieces.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_write_in_progress_keeps_its_bytes() {
        let mut pool = TxPool::default();
        let mut log = TxLog::default();
        log.append(&mut pool, b"first");
        let mut batch = TxBatch::default();
        log.collect(0, 5, &mut batch);
        log.append(&mut pool, b"second");
        log.release(&mut pool, 5);
        assert_eq!(batch.slices().collect::<Vec<_>>(), [b"first"]);
        let mut rest = TxBatch::default();
        log.collect(5, 11, &mut rest);
        assert_eq!(rest.slices().collect::<Vec<_>>(), [b"second"]);
    }

    #[test]
    fn a_lent_buffer_is_given_back_unchanged() {
        let mut pool = TxPool::default();
        let mut log = TxLog::default();
        let header = [7; HEADER_LEN];
        let mut spacious = Vec::with_capacity(100_000);
        spacious.extend_from_slice(&[1; 5000]);
        let buf = Arc::new(spacious);
        log.append_frame(&mut pool, &header, &[IoSlice::new(b"before")], 6);
        log.append_lent(&mut pool, &header, &buf);
        let end = log.tail();
        log.append_frame(&mut pool, &header, &[IoSlice::new(b"after")], 5);
        let bytes: Vec<u8> = log.slices(0, log.tail()).flatten().copied().collect();
        let expected = [&header[..], b"before", &header, &buf[..], &header, b"after"].concat();
        assert_eq!(bytes, expected);
        assert_eq!(Arc::strong_count(&buf), 2);
        log.release(&mut pool, end);
        let vec = Arc::try_unwrap(buf).expect("given back");
        assert_eq!(vec, [1; 5000]);
    }

    #[test]
    fn everything_released_leaves_no_memory() {
        let mut pool = TxPool::default();
        let mut log = TxLog::default();
        log.append(&mut pool, &vec![1; 400_000]);
        assert!(log.memory() >= 400_000);
        log.release(&mut pool, 200_000);
        let mut batch = TxBatch::default();
        log.collect(200_000, 400_000, &mut batch);
        assert_eq!(batch.len(), 200_000);
        log.release(&mut pool, 400_000);
        assert_eq!(log.memory(), 0);
    }
}
