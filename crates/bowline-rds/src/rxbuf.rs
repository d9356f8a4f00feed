//! Received bytes: pooled buffers that messages share, so that a payload is copied once, from the
//! read buffer to the application.

use std::sync::Arc;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Capacity of a pooled read buffer, bytes.
pub const RX_BUF_LEN: usize = 256 << 10;
/// Maximum number of pooled buffers in use at once. Bytes read beyond that are copied into buffers
/// of their size, so that slow readers pin at most 16 MiB more than their messages hold.
const POOL_MAX: usize = 64;
/// Number of unused buffers that are kept.
const POOL_KEEP: usize = 4;

/// A buffer that is being filled; only its owner can see it.
#[derive(Debug)]
pub struct RxBufMut {
    buf: Arc<Vec<u8>>,
    pooled: bool,
}

impl RxBufMut {
    /// The empty vector to read into; its spare capacity is [`RX_BUF_LEN`].
    pub fn vec(&mut self) -> &mut Vec<u8> {
        Arc::get_mut(&mut self.buf).expect("a buffer being filled is not shared")
    }
}

/// The bytes of one read.
#[derive(Clone, Debug)]
pub struct RxBuf {
    buf: Arc<Vec<u8>>,
    share: Share,
}

/// Rule by which messages may refer to a read buffer instead of copying from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Share {
    /// Every piece of a message may.
    All,
    /// The first two pieces of a message may. A message that comes in many small reads would
    /// otherwise pin a buffer for each of them.
    Two,
    Nothing,
}

impl RxBuf {
    /// Wraps bytes that come from no pool.
    pub fn from_vec(bytes: Vec<u8>) -> Self {
        Self { buf: Arc::new(bytes), share: Share::Nothing }
    }

    /// Returns the bytes.
    #[inline]
    pub fn bytes(&self) -> &[u8] {
        &self.buf
    }

    /// Returns the buffer, if a message that lies in this buffer alone may refer to it.
    pub(crate) fn shared(&self) -> Option<&Arc<Vec<u8>>> {
        (self.share != Share::Nothing).then_some(&self.buf)
    }
}

/// Sizes in bytes of buffers for reads that brought little.
const CLASSES: [usize; 3] = [1 << 10, 4 << 10, 16 << 10];

/// Buffers of one size.
#[derive(Debug, Default)]
struct Slots {
    slots: Vec<Arc<Vec<u8>>>,
    next: usize,
}

impl Slots {
    /// Takes an empty buffer that no message refers to any more.
    fn take(&mut self) -> Option<Arc<Vec<u8>>> {
        for _ in 0..self.slots.len() {
            self.next = if self.next + 1 < self.slots.len() { self.next + 1 } else { 0 };
            if Arc::strong_count(&self.slots[self.next]) == 1 {
                let mut buf = self.slots.swap_remove(self.next);
                if let Some(vec) = Arc::get_mut(&mut buf) {
                    vec.clear();
                    return Some(buf);
                }
            }
        }
        None
    }

    /// Frees unused buffers, except for a few.
    fn shrink(&mut self) {
        let mut keep = POOL_KEEP;
        self.slots.retain(|buf| {
            if Arc::strong_count(buf) > 1 {
                return true;
            }
            keep = keep.saturating_sub(1);
            keep > 0
        });
        self.next = 0;
    }
}

/// Read buffers that are reused once no message refers to them.
#[derive(Debug, Default)]
pub struct RxPool {
    large: Slots,
    small: [Slots; CLASSES.len()],
}

impl RxPool {
    /// Returns an empty buffer; allocates only when all pooled ones are in use.
    pub fn get(&mut self) -> RxBufMut {
        if let Some(buf) = self.large.take() {
            return RxBufMut { buf, pooled: true };
        }
        let pooled = self.large.slots.len() < POOL_MAX;
        RxBufMut { buf: Arc::new(Vec::with_capacity(RX_BUF_LEN)), pooled }
    }

    /// Makes a filled buffer shareable.
    pub fn freeze(&mut self, buf: RxBufMut) -> RxBuf {
        let RxBufMut { buf, pooled } = buf;
        if !pooled {
            let mut buf = buf;
            if let Some(vec) = Arc::get_mut(&mut buf) {
                vec.shrink_to_fit(); // the buffer may wait for a reader for long
            }
            return RxBuf { buf, share: Share::Nothing };
        }
        let Some(class) = CLASSES.iter().position(|size| buf.len() <= *size) else {
            self.large.slots.push(Arc::clone(&buf));
            return RxBuf { buf, share: Share::All };
        };
        // A buffer that is nearly empty would pin far more memory than it holds. A smaller one
        // takes its place, at the price of a second copy of few bytes.
        let small = self.copy_small(class, &buf);
        self.large.slots.push(buf);
        small
    }

    fn copy_small(&mut self, class: usize, bytes: &[u8]) -> RxBuf {
        let (slots, size) = (&mut self.small[class], CLASSES[class]);
        let mut buf = match slots.take() {
            Some(buf) => buf,
            None if slots.slots.len() < POOL_MAX => Arc::new(Vec::with_capacity(size)),
            // Slow readers hold all pooled buffers: messages take no more memory than they need,
            // and a short one does not keep the others that came with it.
            None => return RxBuf { buf: Arc::new(bytes.to_vec()), share: Share::Nothing },
        };
        match Arc::get_mut(&mut buf) {
            Some(vec) => vec.extend_from_slice(bytes),
            None => buf = Arc::new(bytes.to_vec()),
        }
        slots.slots.push(Arc::clone(&buf));
        RxBuf { buf, share: Share::Two }
    }

    /// Takes back a buffer that was not used.
    pub fn put_back(&mut self, buf: RxBufMut) {
        if buf.pooled {
            self.large.slots.push(buf.buf);
        }
    }

    /// Frees unused buffers, except for a few.
    pub fn shrink(&mut self) {
        self.large.shrink();
        self.small.iter_mut().for_each(Slots::shrink);
    }
}

/// A range of a buffer.
#[derive(Clone, Debug)]
pub(crate) struct Piece {
    pub(crate) buf: Arc<Vec<u8>>,
    pub(crate) start: u32,
    len: u32,
}

impl Piece {
    fn bytes(&self) -> &[u8] {
        let start = self.start as usize;
        &self.buf[start..start + self.len as usize]
    }
}

/// A payload: pieces of the buffers it arrived in.
#[derive(Clone, Debug, Default)]
pub struct Rope {
    first: Option<Piece>,
    /// The second piece has a field because most messages that need several reads come in two.
    second: Option<Piece>,
    rest: Vec<Piece>,
    len: usize,
}

impl Serialize for Rope {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut bytes = vec![0; self.len];
        self.copy_to(&mut bytes);
        serializer.serialize_bytes(&bytes)
    }
}

impl<'de> Deserialize<'de> for Rope {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Ok(Self::from_vec(serde_bytes::ByteBuf::deserialize(deserializer)?.into_vec()))
    }
}

impl Rope {
    /// Length in bytes.
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Tells whether the payload is empty.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the bytes, piece by piece.
    pub fn slices(&self) -> impl Iterator<Item = &[u8]> {
        self.first.iter().chain(&self.second).chain(&self.rest).map(Piece::bytes)
    }

    /// Copies as many bytes as fit; returns their number.
    pub fn copy_to(&self, out: &mut [u8]) -> usize {
        let mut at = 0;
        for slice in self.slices() {
            let n = slice.len().min(out.len() - at);
            out[at..at + n].copy_from_slice(&slice[..n]);
            at += n;
            if at == out.len() {
                break;
            }
        }
        at
    }

    /// Makes a payload of one vector.
    pub fn from_vec(bytes: Vec<u8>) -> Self {
        let mut rope = Self::default();
        if !bytes.is_empty() {
            let len = bytes.len();
            rope.push_piece(Piece {
                buf: Arc::new(bytes),
                start: 0,
                len: u32::try_from(len).expect("a payload is shorter than 4 GiB"),
            });
        }
        rope
    }

    /// Makes a payload of a range of one buffer.
    pub(crate) fn single(buf: Arc<Vec<u8>>, start: u32, len: u32) -> Self {
        let first = Some(Piece { buf, start, len });
        Self { first, second: None, rest: Vec::new(), len: len as usize }
    }

    /// Converts a payload of at most one piece to that piece; returns any other payload as an
    /// error.
    pub(crate) fn into_single(self) -> Result<Option<Piece>, Self> {
        if self.second.is_some() { Err(self) } else { Ok(self.first) }
    }

    fn push_piece(&mut self, piece: Piece) {
        self.len += piece.len as usize;
        if self.first.is_none() {
            self.first = Some(piece);
        } else if self.second.is_none() {
            self.second = Some(piece);
        } else {
            self.rest.push(piece);
        }
    }

    /// Appends bytes of a read buffer. They are shared if that does not pin much more memory than
    /// they need, and copied otherwise. Returns the number of bytes copied.
    pub(crate) fn push(&mut self, from: &RxBuf, start: usize, len: usize) -> usize {
        if len == 0 {
            return 0;
        }
        if from.share == Share::All || from.share == Share::Two && self.second.is_none() {
            // A read buffer is RX_BUF_LEN long, far below 4 GiB.
            self.push_piece(Piece {
                buf: Arc::clone(&from.buf),
                start: start as u32,
                len: len as u32,
            });
            return 0;
        }
        let bytes = &from.bytes()[start..start + len];
        let last = self.rest.last_mut().or(self.second.as_mut()).or(self.first.as_mut());
        if let Some(piece) = last
            && let Some(vec) = Arc::get_mut(&mut piece.buf)
            && piece.start as usize + piece.len as usize == vec.len()
        {
            // Small pieces grow one vector, so that a peer that sends byte by byte costs no more
            // than the bytes it sent.
            vec.extend_from_slice(bytes);
            piece.len += len as u32;
            self.len += len;
        } else {
            let buf = Arc::new(bytes.to_vec());
            self.push_piece(Piece { buf, start: 0, len: len as u32 });
        }
        len
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_is_used_again_once_its_messages_are_gone() {
        let mut pool = RxPool::default();
        let mut buf = pool.get();
        buf.vec().resize(RX_BUF_LEN, 7);
        let at = buf.vec().as_ptr();
        let full = pool.freeze(buf);
        let mut rope = Rope::default();
        assert_eq!(rope.push(&full, 10, 100), 0, "a full buffer is shared");
        drop(full);
        assert_ne!(pool.get().vec().as_ptr(), at, "pinned by the rope");
        drop(rope);
        let again: Vec<_> = (0..2).map(|_| pool.get().vec().as_ptr()).collect();
        assert!(again.contains(&at));
    }

    #[test]
    fn a_short_message_keeps_no_buffer_once_all_are_kept() {
        let mut pool = RxPool::default();
        let mut read = |len: usize| {
            let mut buf = pool.get();
            buf.vec().resize(len, 7);
            pool.freeze(buf)
        };
        for len in [1000, 4000, 16_000, 100_000] {
            let kept: Vec<_> = (0..POOL_MAX).map(|_| read(len)).collect();
            assert!(kept.iter().all(|buf| buf.shared().is_some()));
            assert!(read(len).shared().is_none(), "{len}");
        }
    }

    #[test]
    fn dribbled_bytes_grow_one_vector() {
        let mut rope = Rope::default();
        for i in 0..1000_u32 {
            let one = RxBuf::from_vec(vec![i as u8]);
            assert_eq!(rope.push(&one, 0, 1), 1);
        }
        assert_eq!(rope.slices().count(), 1);
        let mut out = [0; 1001];
        assert_eq!(rope.copy_to(&mut out), 1000);
        assert!(out.iter().take(1000).enumerate().all(|(i, b)| *b == i as u8));
    }
}
