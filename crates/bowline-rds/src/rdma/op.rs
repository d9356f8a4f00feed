//! RDMA operations of messages: remote reads and writes, and atomics. Spec:
//! `docs/spec/rds-rdma.md`, sections 9 and 10.

use std::any::Any;
use std::fmt;
use std::net::Ipv6Addr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::ids::SocketId;

/// Longest operation, bytes [RDMA-11].
#[doc(alias = "RDS_MAX_MSG_SIZE")]
pub const RDMA_MAX: u64 = 1 << 20;
/// Most pieces of local memory of an operation [RDMA-32].
#[doc(alias = "UIO_MAXIOV")]
pub const RDMA_PIECES_MAX: usize = 1024;
/// Most pieces of local memory of all operations that wait on one socket; some MiB of the node.
const OP_PIECES_MAX: usize = 1 << 16;
/// Most ends of operations of one socket that are not received.
pub(crate) const STATUSES_MAX: usize = 1 << 16;
/// Pieces of local memory of one request [IB-89].
#[doc(alias = "RDS_IB_MAX_SGE")]
pub const RDMA_PIECES: usize = 8;

/// A piece of local memory, as the driver's device knows it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RdmaPiece {
    /// Address in the region.
    pub addr: u64,
    /// Bytes.
    pub len: u32,
    /// Local key of the region.
    pub lkey: u32,
}

/// Keeps local memory in place until no request touches it any more [RDMA-19].
#[derive(Clone)]
pub struct RdmaHold(pub Arc<dyn Any + Send + Sync>);

impl fmt::Debug for RdmaHold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("RdmaHold")
    }
}

/// What an operation does with the peer's memory. Atomics are those without masks [ATOM-3].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RdmaAccess {
    /// Writes local memory there.
    Write,
    /// Reads it to local memory.
    Read,
    /// Atomically: if the 8 bytes there are `compare`, they become `swap`. The value before is
    /// stored in local memory.
    CompareSwap {
        /// Expected value.
        compare: u64,
        /// New value.
        swap: u64,
    },
    /// Atomically adds to the 8 bytes there. The value before is stored in local memory.
    FetchAdd(u64),
}

impl RdmaAccess {
    /// Makes the compare-and-swap that has these masks: the bits of `compare_mask` are compared,
    /// and those of `swap_mask` are swapped [ATOM-3].
    ///
    /// # Errors
    /// [`Error::NotSupported`] unless all bits are compared, and all are swapped or none changes:
    /// only then does every device know the operation [ATOM-6].
    pub const fn masked_compare_swap(
        compare: u64,
        swap: u64,
        compare_mask: u64,
        swap_mask: u64,
    ) -> Result<Self, Error> {
        match (compare_mask, swap_mask) {
            (u64::MAX, u64::MAX) => Ok(Self::CompareSwap { compare, swap }),
            // What is there either differs, or is swapped for itself.
            (_, 0) => Ok(Self::FetchAdd(0)),
            // The bits that are kept are those that were compared.
            (u64::MAX, _) => {
                let swap = compare & !swap_mask | swap & swap_mask;
                Ok(Self::CompareSwap { compare, swap })
            }
            _ => Err(Error::NotSupported),
        }
    }

    /// Makes the addition that has this mask: no carry leaves a bit of `nocarry_mask` [ATOM-3].
    ///
    /// # Errors
    /// [`Error::NotSupported`] unless the mask changes nothing: it has no bit but the highest, from
    /// which a carry is lost in any case, or nothing is added [ATOM-6].
    pub const fn masked_fetch_add(add: u64, nocarry_mask: u64) -> Result<Self, Error> {
        if nocarry_mask & !(1 << 63) == 0 || add == 0 {
            Ok(Self::FetchAdd(add))
        } else {
            Err(Error::NotSupported)
        }
    }

    /// Tells whether this is an atomic.
    pub const fn is_atomic(self) -> bool {
        matches!(self, Self::CompareSwap { .. } | Self::FetchAdd(_))
    }
}

/// An RDMA operation that is carried out before its message is sent.
#[derive(Clone, Debug)]
pub struct RdmaOp {
    /// What it does.
    pub access: RdmaAccess,
    /// The peer's memory, as the peer announced it [RDMA-1].
    pub cookie: u64,
    /// Offset in that memory, bytes.
    pub offset: u64,
    /// Bytes of that memory; as many as the local memory has are transferred.
    pub len: u64,
    /// Local memory.
    pub local: Vec<RdmaPiece>,
    /// The message is not sent before a read has ended [RDMA-17].
    pub fence: bool,
    /// A message without payload is not sent at all [RDMA-24].
    pub silent: bool,
    /// Number by which its end is reported.
    pub token: u64,
    /// Every end is reported. If not, a failure is, to a socket that asks for that [RDMA-28].
    pub notify: bool,
    /// Kept until the operation is over.
    pub hold: Option<RdmaHold>,
}

impl RdmaOp {
    /// Returns the number by which every end is reported; `None` if only failures are.
    pub(crate) fn token_if_notified(&self) -> Option<u64> {
        self.notify.then_some(self.token)
    }

    /// Key of the peer's memory.
    pub(crate) const fn rkey(&self) -> u32 {
        self.cookie as u32
    }

    /// Address in the peer's memory; `None` if there is no such address [RDMA-2].
    pub(crate) fn remote(&self) -> Option<u64> {
        let at = self.offset.checked_add(self.cookie >> 32)?;
        at.checked_add(self.len).map(|_| at)
    }

    /// Bytes that are transferred; `None` if there is no such number.
    pub(crate) fn local_len(&self) -> Option<u64> {
        self.local.iter().try_fold(0_u64, |sum, piece| sum.checked_add(u64::from(piece.len)))
    }

    /// Number of requests.
    pub(crate) fn requests(&self) -> usize {
        self.local.len().div_ceil(RDMA_PIECES)
    }
}

/// How an operation ended, with the kernel's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[repr(i32)]
pub enum RdmaStatus {
    /// It was carried out.
    #[doc(alias = "RDS_RDMA_SUCCESS")]
    Success = 0,
    /// The peer did not allow it.
    #[doc(alias = "RDS_RDMA_REMOTE_ERROR")]
    RemoteError = 1,
    /// Its message was cancelled. It may have been carried out.
    #[doc(alias = "RDS_RDMA_CANCELED")]
    Cancelled = 2,
    /// The connection ended. It may have been carried out, wholly or in part, and is not repeated.
    #[doc(alias = "RDS_RDMA_DROPPED")]
    Dropped = 3,
    /// It failed in another way.
    #[doc(alias = "RDS_RDMA_OTHER_ERROR")]
    OtherError = 4,
}

/// A request of an operation.
#[derive(Clone, Copy, Debug)]
pub struct RdmaWork<'a> {
    /// Id of the request.
    pub id: u64,
    /// What it does.
    pub access: RdmaAccess,
    /// Address in the peer's memory.
    pub remote: u64,
    /// Key of the peer's memory.
    pub rkey: u32,
    /// Local memory.
    pub local: &'a [RdmaPiece],
    /// The request has a completion.
    pub signalled: bool,
}

/// An operation of a queued message.
#[derive(Debug)]
pub(crate) struct Part {
    pub(crate) op: RdmaOp,
    /// Id of its last request, once posted.
    pub(crate) last: u64,
    /// It is over.
    pub(crate) done: bool,
    /// It failed in this way.
    pub(crate) failed: Option<RdmaStatus>,
}

/// Pieces of local memory that the operations of queued messages have, each operation with one more
/// for itself.
#[derive(Clone, Debug, Default)]
pub(crate) struct OpLoad(Arc<AtomicUsize>);

/// The part of it that one message has, until this is dropped.
#[derive(Debug)]
pub(crate) struct OpShare {
    load: OpLoad,
    pieces: usize,
}

impl OpLoad {
    fn of(ops: &[RdmaOp]) -> usize {
        ops.iter().map(|op| op.local.len() + 1).sum()
    }

    /// Tells whether these may be queued, too: an empty queue takes any.
    pub(crate) fn takes(&self, ops: &[RdmaOp]) -> bool {
        let load = self.0.load(Ordering::Relaxed);
        ops.is_empty() || load == 0 || load + Self::of(ops) <= OP_PIECES_MAX
    }

    pub(crate) fn share(&self, ops: &[RdmaOp]) -> OpShare {
        let pieces = Self::of(ops);
        self.0.fetch_add(pieces, Ordering::Relaxed);
        OpShare { load: self.clone(), pieces }
    }
}

impl Drop for OpShare {
    fn drop(&mut self) {
        self.load.0.fetch_sub(self.pieces, Ordering::Relaxed);
    }
}

/// The operations of a queued message.
#[derive(Debug)]
pub(crate) struct TxOps {
    /// What they count for at the socket.
    pub(crate) _share: Option<OpShare>,
    pub(crate) socket: SocketId,
    /// The socket wants to be told of failures even of operations without a number.
    pub(crate) recverr: bool,
    pub(crate) parts: Vec<Part>,
    /// Its requests are given to the driver.
    pub(crate) posted: bool,
    /// The message has left the queue, or was cancelled.
    pub(crate) gone: Option<Gone>,
}

/// Why a message left the queue before its operations were over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Gone {
    /// The peer acknowledged it.
    Acknowledged,
    /// The sender cancelled it.
    Cancelled,
}

impl TxOps {
    pub(crate) fn requests(&self) -> usize {
        self.parts.iter().map(|part| part.op.requests()).sum()
    }

    pub(crate) fn is_done(&self) -> bool {
        self.parts.iter().all(|part| part.done)
    }

    pub(crate) fn fence(&self) -> bool {
        self.parts.iter().any(|part| part.op.fence)
    }
}

/// Memory of a socket that peers may use.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Region {
    /// Number by which the driver knows it.
    pub(crate) tag: u64,
    /// The only peer that may use it [SAFE-12]; `None`: all.
    pub(crate) peer: Option<Ipv6Addr>,
    /// It is released when a message says that it was used [RDMA-31].
    pub(crate) use_once: bool,
    /// It has at most two pages.
    pub(crate) small: bool,
}

impl Region {
    /// Tells whether this peer may use it.
    pub(crate) fn is_for(&self, peer: Ipv6Addr) -> bool {
        self.peer.is_none_or(|only| only == peer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a masked compare-and-swap makes of a value, bit by bit [ATOM-3].
    fn swapped(old: u64, [compare, swap, compare_mask, swap_mask]: [u64; 4]) -> u64 {
        if (old ^ compare) & compare_mask == 0 { old & !swap_mask | swap & swap_mask } else { old }
    }

    /// What a masked addition makes of a value, bit by bit [ATOM-3].
    fn added(old: u64, add: u64, nocarry_mask: u64) -> u64 {
        let (mut sum, mut carry) = (0, 0);
        for bit in 0..64 {
            let [a, b, stops] = [old, add, nocarry_mask].map(|n| n >> bit & 1);
            sum |= (a ^ b ^ carry) << bit;
            carry = ((a + b + carry) >> 1) & (stops ^ 1);
        }
        sum
    }

    /// What the operation that every device knows makes of a value.
    fn plain(access: RdmaAccess, old: u64) -> u64 {
        match access {
            RdmaAccess::CompareSwap { compare, swap } if old == compare => swap,
            RdmaAccess::FetchAdd(add) => old.wrapping_add(add),
            _ => old,
        }
    }

    const VALUES: [u64; 6] = [0, 1, 0xff, 0xffff_0000, 1 << 63, u64::MAX];

    // tests [ATOM-3], [ATOM-6]
    #[test]
    fn a_masked_compare_and_swap_is_a_plain_one_or_refused() {
        let mut made = 0;
        for compare_mask in VALUES {
            for swap_mask in VALUES {
                for [compare, swap] in [[0, 5], [0xff, 0xff00], [u64::MAX, 0], [1, u64::MAX]] {
                    let new =
                        RdmaAccess::masked_compare_swap(compare, swap, compare_mask, swap_mask);
                    let Ok(access) = new else {
                        assert_eq!(new, Err(Error::NotSupported));
                        assert!(compare_mask != u64::MAX && swap_mask != 0);
                        continue;
                    };
                    made += 1;
                    for old in VALUES.into_iter().chain([compare, swap]) {
                        let wanted = swapped(old, [compare, swap, compare_mask, swap_mask]);
                        assert_eq!(plain(access, old), wanted, "{compare_mask:x} {swap_mask:x}");
                    }
                }
            }
        }
        assert_eq!(made, 4 * (6 + 5));
    }

    // tests [ATOM-3], [ATOM-6]
    #[test]
    fn a_masked_addition_is_a_plain_one_or_refused() {
        let mut made = 0;
        for mask in VALUES {
            for add in VALUES {
                let new = RdmaAccess::masked_fetch_add(add, mask);
                let Ok(access) = new else {
                    assert_eq!(new, Err(Error::NotSupported));
                    continue;
                };
                made += 1;
                for old in VALUES {
                    assert_eq!(plain(access, old), added(old, add, mask), "{old:x} {mask:x}");
                }
            }
        }
        assert_eq!(made, 2 * 6 + 4, "two masks that stop no carry, and nothing added");
    }
}
