//! The send queue: requests that wait to be sent or to be answered.
//!
//! ```text
//!   requests  [send, 2 pieces]     [write, inline]   [read, 1 piece]     first in, first out
//!   sges      [addr len key] [..]                    [addr len key]      of all requests, in order
//!   inline                         [bytes ..]
//! ```
//!
//! Gather lists and inline bytes are stored in rings, so nothing is allocated per request once the
//! rings have grown.

use std::collections::VecDeque;
use std::ops::RangeInclusive;

use bowline_verbs::{
    Access, Completion, Error, FlushOf, InvalidReason, PdId, QpCap, Qpn, RequestPart, SendFlags,
    SendOp, SendWr, Sge, Status, WcOpcode,
};
use bowline_wire::roce::Psn;

use crate::burst::Burst;
use crate::mr::{KeyError, MrTable, Span};

/// Most bytes of a message [HDR-12].
const MESSAGE_MAX: u64 = 1 << 31;

/// Shortest payload, in bytes, that is worth prefetching.
const PREFETCH_MIN: usize = 2048;
/// Bytes to prefetch; the processor's own prefetcher continues from there.
const PREFETCH_LEN: usize = 512;

/// Returns how many bytes of a packet's payload of `len` bytes are prefetched before it is copied.
pub(crate) const fn prefetch_len(len: usize) -> usize {
    match len {
        0..PREFETCH_MIN => 0,
        _ => PREFETCH_LEN,
    }
}

/// A send request.
#[derive(Debug)]
pub(crate) struct Request {
    pub(crate) id: u64,
    pub(crate) op: SendOp,
    pub(crate) flags: SendFlags,
    /// Length of the message in bytes.
    pub(crate) len: u32,
    /// Index of its first element in the ring of gather lists, counted from the first element ever
    /// posted.
    sge_first: u64,
    sge_count: u32,
    /// Index of its first inline byte, counted in the same way.
    inline_first: u64,
    /// First PSN and number of PSNs, once the request has been started.
    pub(crate) first: Psn,
    pub(crate) packets: u32,
    /// Each packet is sent as a message of its own [REQ-26].
    pub(crate) per_packet: bool,
    pub(crate) stage: Stage,
}

/// Progress of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// Not started.
    Waiting,
    /// The request has PSNs and is being sent. A local operation has been executed and must not be
    /// executed again [REQ-20].
    Started,
    /// The request cannot be executed and fails when all requests before it have completed.
    Broken(Status),
}

impl Request {
    pub(crate) const fn is_local(&self) -> bool {
        matches!(self.op, SendOp::RegMr { .. } | SendOp::LocalInv(_) | SendOp::BindMw { .. })
    }

    /// Tells whether the packets of the request carry payload from local memory or inline bytes.
    pub(crate) const fn is_data(&self) -> bool {
        matches!(
            self.op,
            SendOp::Send
                | SendOp::SendImm(_)
                | SendOp::SendInv(_)
                | SendOp::Write(_)
                | SendOp::WriteImm(..)
        )
    }

    pub(crate) const fn is_read(&self) -> bool {
        matches!(self.op, SendOp::Read(_))
    }

    pub(crate) const fn is_atomic(&self) -> bool {
        matches!(self.op, SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. })
    }

    /// Tells whether the request is completed by an empty READ response [HDR-5].
    pub(crate) const fn has_empty_response(&self) -> bool {
        matches!(self.op, SendOp::Flush { .. } | SendOp::AtomicWrite(_))
    }

    /// Tells whether only a response of its own completes the request.
    pub(crate) const fn is_read_or_atomic(&self) -> bool {
        self.is_read() || self.is_atomic() || self.has_empty_response()
    }

    pub(crate) const fn is_started(&self) -> bool {
        matches!(self.stage, Stage::Started)
    }

    fn opcode(&self) -> WcOpcode {
        match self.op {
            SendOp::Send | SendOp::SendImm(_) | SendOp::SendInv(_) | SendOp::Datagram(..) => {
                WcOpcode::Send
            }
            SendOp::Write(_) | SendOp::WriteImm(..) => WcOpcode::RdmaWrite,
            SendOp::Read(_) => WcOpcode::RdmaRead,
            SendOp::CompareSwap { .. } => WcOpcode::CompSwap,
            SendOp::FetchAdd { .. } => WcOpcode::FetchAdd,
            SendOp::RegMr { .. } => WcOpcode::RegMr,
            SendOp::LocalInv(_) => WcOpcode::LocalInv,
            SendOp::BindMw { .. } => WcOpcode::BindMw,
            SendOp::Flush { .. } => WcOpcode::Flush,
            SendOp::AtomicWrite(_) => WcOpcode::AtomicWrite,
        }
    }

    /// Returns the completion of the request [REQ-15].
    pub(crate) fn completion(&self, qpn: Qpn, status: Status) -> Completion {
        Completion {
            wr_id: self.id,
            status,
            opcode: self.opcode(),
            byte_len: self.len,
            qpn,
            ..Completion::default()
        }
    }
}

/// The send queue of a queue pair.
#[derive(Debug, Default)]
pub(crate) struct SendQueue {
    requests: VecDeque<Request>,
    sges: VecDeque<Sge>,
    sges_popped: u64,
    inline: VecDeque<u8>,
    inline_popped: u64,
}

impl SendQueue {
    pub(crate) fn len(&self) -> usize {
        self.requests.len()
    }

    pub(crate) fn get(&self, index: usize) -> Option<&Request> {
        self.requests.get(index)
    }

    pub(crate) fn get_mut(&mut self, index: usize) -> Option<&mut Request> {
        self.requests.get_mut(index)
    }

    /// All requests, oldest first.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Request> {
        self.requests.iter()
    }

    pub(crate) fn front(&self) -> Option<&Request> {
        self.requests.front()
    }

    /// Queues a request, after the checks that need only the request and the queue.
    pub(crate) fn post(&mut self, wr: &SendWr<'_>, cap: &QpCap) -> Result<(), Error> {
        if self.requests.len() >= cap.max_send_wr {
            return Err(Error::QueueFull);
        }
        RequestPart::GatherList.check(wr.sges.len() as u64, cap.max_send_sge as u64)?;
        let inline = wr.flags.contains(SendFlags::INLINE);
        let len = if inline {
            wr.inline.len() as u64
        } else {
            wr.sges.iter().map(|sge| u64::from(sge.len)).sum()
        };
        if inline {
            RequestPart::Inline.check(len, cap.max_inline as u64)?;
        }
        RequestPart::Message.check(len, MESSAGE_MAX)?;
        match &wr.op {
            SendOp::Read(_) | SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. } if inline => {
                return Err(Error::Invalid(InvalidReason::InlineRead));
            }
            // REQ-18
            SendOp::CompareSwap { remote, .. } | SendOp::FetchAdd { remote, .. }
                if len != 8 || !remote.addr.is_multiple_of(8) =>
            {
                return Err(Error::Invalid(InvalidReason::AtomicOperand));
            }
            SendOp::AtomicWrite(remote) if len != 8 || !remote.addr.is_multiple_of(8) => {
                return Err(Error::Invalid(InvalidReason::AtomicOperand));
            }
            SendOp::Flush { placement, of, .. } => {
                if placement.is_empty() || len > 0 {
                    return Err(Error::Invalid(InvalidReason::FlushOperand));
                }
                if let FlushOf::Range(range) = of {
                    RequestPart::Message.check(u64::from(*range), MESSAGE_MAX)?;
                }
            }
            _ => {}
        }
        self.requests.push_back(Request {
            id: wr.id,
            op: wr.op.clone(),
            flags: wr.flags,
            len: len as u32,
            sge_first: self.sges_popped + self.sges.len() as u64,
            sge_count: if inline { 0 } else { wr.sges.len() as u32 },
            inline_first: self.inline_popped + self.inline.len() as u64,
            first: Psn::ZERO,
            packets: 0,
            per_packet: false,
            stage: Stage::Waiting,
        });
        if inline {
            self.inline.extend(wr.inline);
        } else {
            self.sges.extend(wr.sges);
        }
        Ok(())
    }

    /// Removes the newest requests: `len` are left.
    pub(crate) fn truncate(&mut self, len: usize) {
        let Some(first) = self.requests.get(len) else { return };
        self.sges.truncate((first.sge_first - self.sges_popped) as usize);
        self.inline.truncate((first.inline_first - self.inline_popped) as usize);
        self.requests.truncate(len);
    }

    /// Removes the oldest request.
    pub(crate) fn pop(&mut self) -> Option<Request> {
        let request = self.requests.pop_front()?;
        if request.flags.contains(SendFlags::INLINE) {
            self.inline.drain(..request.len as usize);
            self.inline_popped += u64::from(request.len);
        } else {
            self.sges.drain(..request.sge_count as usize);
            self.sges_popped += u64::from(request.sge_count);
        }
        Some(request)
    }

    fn sges(&self, request: &Request) -> impl Iterator<Item = &Sge> {
        let first = (request.sge_first - self.sges_popped) as usize;
        self.sges.range(first..first + request.sge_count as usize)
    }

    /// Copies `len` bytes of a request's message from `offset` on to the end of `out`.
    pub(crate) fn gather(
        &self,
        index: usize,
        mrs: &MrTable,
        pd: PdId,
        offset: u32,
        len: usize,
        out: &mut Burst,
    ) -> Result<(), KeyError> {
        let request = self.requests.get(index).ok_or(KeyError::Unknown)?;
        if request.flags.contains(SendFlags::INLINE) {
            let first = (request.inline_first - self.inline_popped) as usize + offset as usize;
            let (a, b) = self.inline.as_slices();
            let middle = a.len().clamp(first, first + len);
            if middle > first {
                out.bytes.extend_from_slice(&a[first..middle]);
            }
            if middle < first + len {
                out.bytes.extend_from_slice(&b[middle - a.len()..first + len - a.len()]);
            }
            return Ok(());
        }
        let mut done = 0;
        for_each_element(self.sges(request), offset, len, |sge, va, len| {
            done += len;
            mrs.gather(pd, sge.lkey, va, len, out)
        })?;
        if done == len { Ok(()) } else { Err(KeyError::OutOfRange) }
    }

    /// Returns the memory of a request's message from `offset` on, as far as one element of its
    /// gather list covers it: at least `bytes.start()` and at most `bytes.end()` bytes. `None` if
    /// that memory is shorter, or not accessible with the right `need`.
    pub(crate) fn contiguous<'a>(
        &self,
        index: usize,
        mrs: &'a MrTable,
        pd: PdId,
        offset: u32,
        bytes: RangeInclusive<usize>,
        need: Access,
    ) -> Option<Span<'a>> {
        let mut skip = offset;
        let holds = |sge: &&Sge| {
            let holds = skip < sge.len;
            skip -= if holds { 0 } else { sge.len };
            holds
        };
        let sge = self.sges(self.requests.get(index)?).find(holds)?;
        let len = ((sge.len - skip) as usize).min(*bytes.end());
        if len < *bytes.start() {
            return None;
        }
        let va = sge.addr.checked_add(u64::from(skip))?;
        mrs.resolve(pd, sge.lkey, va, len as u64, need).ok()
    }

    /// Prefetches the beginning of what `gather` would copy, if that is long enough to pay.
    pub(crate) fn prefetch(&self, index: usize, mrs: &MrTable, pd: PdId, offset: u32, len: usize) {
        let Some(request) = self.requests.get(index) else { return };
        let len = prefetch_len(len.min(request.len.saturating_sub(offset) as usize));
        if len == 0 || request.sge_count == 0 || !request.is_data() {
            return;
        }
        // Errors are reported when the bytes are copied.
        let _ = for_each_element(self.sges(request), offset, len, |sge, va, len| {
            mrs.prefetch(pd, sge.lkey, va, len);
            Ok(())
        });
    }

    /// Copies bytes of an answer into the memory of a request from `offset` on.
    pub(crate) fn scatter(
        &self,
        index: usize,
        mrs: &MrTable,
        pd: PdId,
        offset: u32,
        bytes: &[u8],
    ) -> Result<(), KeyError> {
        let request = self.requests.get(index).ok_or(KeyError::Unknown)?;
        let mut rest = bytes;
        for_each_element(self.sges(request), offset, bytes.len(), |sge, va, len| {
            let (now, later) = rest.split_at(len);
            rest = later;
            mrs.scatter(pd, sge.lkey, va, now)
        })
    }

    /// Checks that the answer of a request can be stored [MR-4].
    pub(crate) fn check_scatter(
        &self,
        index: usize,
        mrs: &MrTable,
        pd: PdId,
    ) -> Result<(), KeyError> {
        let request = self.requests.get(index).ok_or(KeyError::Unknown)?;
        for_each_element(self.sges(request), 0, request.len as usize, |sge, va, len| {
            mrs.check(pd, sge.lkey, va, len as u64, Access::LOCAL_WRITE)
        })
    }
}

/// Calls `each` with the element, address and length of every part of the `len` bytes from `offset`
/// on.
fn for_each_element<'a>(
    sges: impl Iterator<Item = &'a Sge>,
    offset: u32,
    len: usize,
    mut each: impl FnMut(&Sge, u64, usize) -> Result<(), KeyError>,
) -> Result<(), KeyError> {
    let (mut skip, mut left) = (offset, len);
    for sge in sges {
        if left == 0 {
            break;
        }
        if skip >= sge.len {
            skip -= sge.len;
            continue;
        }
        let take = ((sge.len - skip) as usize).min(left);
        let va = sge.addr.checked_add(u64::from(skip)).ok_or(KeyError::OutOfRange)?;
        each(sge, va, take)?;
        skip = 0;
        left -= take;
    }
    Ok(())
}
