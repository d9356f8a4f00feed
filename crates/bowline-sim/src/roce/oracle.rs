//! The oracle: completions and events must match what happened, once and in order.
//!
//! The two sides of a connection are compared with each other and with the memory. A request that
//! succeeded has done its work at the peer. A request that failed had a reason, and has done its
//! work wholly, in part or not at all, and nothing else. After the first failure of a queue all
//! later requests are flushed.

use bowline_verbs::{Completion, Status, WcOpcode};

use super::memory::{Purpose, part};
use super::side::{
    Announcement, FailureCauses, Fast, FastStep, Message, Receive, Request, Side, SideId, Stage,
    Statuses,
};

/// Work of a program after a completion.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Verdict {
    /// The completion was the first failure of its queue.
    pub(crate) failed: bool,
    /// The kind of the request that completed, if it was a request.
    pub(crate) request: Option<WcOpcode>,
    /// A receive was consumed.
    pub(crate) received: bool,
    pub(crate) bytes: u64,
}

/// Purposes of all memory that a peer may have changed or may have been changing.
pub(crate) const ALL: [Purpose; 7] = [
    Purpose::Source,
    Purpose::Receive,
    Purpose::Sink,
    Purpose::Target,
    Purpose::Constant,
    Purpose::Words,
    Purpose::Fast,
];

/// Statuses of receives that a misbehaving peer causes [RSP-18].
const PEER_MISUSE: Statuses = Statuses::only(Status::LocLenErr)
    .and(Status::LocQpOpErr)
    .and(Status::LocProtErr)
    .and(Status::RemInvReqErr)
    .and(Status::RemAccessErr);

/// Notes a reason for failures on both ends of a connection.
pub(crate) fn note_cause(sides: &mut [Side], id: SideId, what: FailureCauses) {
    sides[id].failure_causes.add(what);
    if let Some(peer) = sides[id].peer {
        sides[peer].failure_causes.add(what);
    }
}

/// Checks one entry of a completion queue.
pub(crate) fn completed(
    sides: &mut [Side],
    id: SideId,
    entry: &Completion,
) -> Result<Verdict, String> {
    if entry.qpn != sides[id].qpn {
        return Err(format!("side {id} was told about {:?}", entry.qpn));
    }
    let verdict = match entry.is_recv() {
        true => receive_completed(sides, id, entry)?,
        false => send_completed(sides, id, entry)?,
    };
    if verdict.failed {
        note_cause(sides, id, FailureCauses::FAILED);
    }
    Ok(verdict)
}

fn send_completed(sides: &mut [Side], id: SideId, entry: &Completion) -> Result<Verdict, String> {
    let side = &mut sides[id];
    let number = entry.wr_id;
    let Some(at) = side.requests.iter().position(|r| r.number == number) else {
        return Err(format!("side {id}: request {number} completed twice or was never posted"));
    };
    for _ in 0..at {
        let side = &mut sides[id];
        let Some(before) = side.requests.pop_front() else { break };
        if before.signalled || side.send_failed {
            let before = before.number;
            return Err(format!("side {id}: request {number} completed before {before}"));
        }
        succeeded(sides, id, &before)?;
    }
    let side = &mut sides[id];
    let Some(request) = side.requests.pop_front() else { return Ok(Verdict::default()) };
    if entry.status == Status::Success {
        if side.send_failed {
            return Err(format!("side {id}: request {number} succeeded after one had failed"));
        }
        if !request.signalled {
            return Err(format!("side {id}: request {number} was not to be told about"));
        }
        let right = entry.opcode == request.opcode;
        let local =
            matches!(request.opcode, WcOpcode::RegMr | WcOpcode::LocalInv | WcOpcode::BindMw);
        if !right || !local && entry.byte_len != request.len {
            let Request { opcode, len, .. } = request;
            return Err(format!(
                "side {id}: {opcode:?} {number} of {len} bytes completed as {entry:?}"
            ));
        }
        succeeded(sides, id, &request)?;
        let (request, bytes) = (Some(request.opcode), request.len.into());
        return Ok(Verdict { request, bytes, ..Verdict::default() });
    }
    let first = !std::mem::replace(&mut side.send_failed, true);
    let status = entry.status;
    if first {
        look_ahead(sides, id);
    }
    let side = &mut sides[id];
    let allowed = match status {
        Status::WrFlushErr => !first || side.failure_causes.any() || side.recv_failed,
        _ if !first => false,
        Status::RetryExcErr => side.failure_causes.any(),
        Status::RnrRetryExcErr => request.message && request.may.has(status),
        _ => request.may.has(status),
    };
    if !allowed {
        let Request { opcode, may, .. } = request;
        let (causes, when) = (side.failure_causes, if first { "first" } else { "after a failure" });
        return Err(format!(
            "side {id}: {opcode:?} {number} failed with {status:?} {when}, it may {may:?}, \
             {causes:?}"
        ));
    }
    if let Some(source) = request.source {
        side.memory.release(source);
    }
    Ok(Verdict { failed: first, request: Some(request.opcode), ..Verdict::default() })
}

/// Notes that a receive which is going to fail may have failed before its program polls it.
fn look_ahead(sides: &mut [Side], id: SideId) {
    let side = &sides[id];
    let Some(peer) = side.peer else { return };
    let mut pairs = side.receives.iter().zip(&sides[peer].outgoing);
    if pairs.any(|(r, m)| m.bad_key || !m.write && m.len > r.len) {
        note_cause(sides, id, FailureCauses::MISUSE);
    }
}

/// Applies the effects of a request that succeeded.
fn succeeded(sides: &mut [Side], id: SideId, request: &Request) -> Result<(), String> {
    let number = request.number;
    if request.must_fail {
        return Err(format!("side {id}: request {number} succeeded, which was wrong"));
    }
    let side = &mut sides[id];
    if let Some(source) = request.source {
        side.memory.release(source);
    }
    if let Some(sink) = request.sink {
        let result = side.memory.done(sink, number);
        side.memory.release(sink);
        result.map_err(|e| format!("side {id}: request {number}: {e}"))?;
    }
    match (request.fast, side.fast) {
        (FastStep::Invalidate, Fast::Ending(key)) => side.fast = Fast::Free(key),
        (FastStep::Invalidate, _) => return Err(format!("side {id}: nothing was invalidated")),
        _ => {}
    }
    side.succeeded += u64::from(request.message);
    let succeeded = side.succeeded;
    let Some(peer) = side.peer else {
        return match request.fast {
            FastStep::None => Err(format!("side {id}: request {number} succeeded without a peer")),
            _ => Ok(()),
        };
    };
    let peer = &mut sides[peer];
    if peer.dead {
        return Ok(());
    }
    if let Some(target) = request.target.filter(|_| !request.is_read()) {
        peer.memory
            .done(target, number)
            .map_err(|e| format!("side {id}: request {number} at the peer: {e}"))?;
    }
    if request.message && peer.stage >= Stage::Drained && succeeded > peer.received {
        return Err(format!("side {id}: message {number} succeeded, the peer did not receive it"));
    }
    Ok(())
}

fn receive_completed(
    sides: &mut [Side],
    id: SideId,
    entry: &Completion,
) -> Result<Verdict, String> {
    let number = entry.wr_id;
    let peer = sides[id].peer;
    let Some(receive) = sides[id].receives.pop_front() else {
        return Err(format!("side {id}: a receive completed and none was posted: {entry:?}"));
    };
    if receive.number != number {
        let due = receive.number;
        return Err(format!("side {id}: receive {number} completed, {due} was due"));
    }
    let message = peer.and_then(|peer| sides[peer].outgoing.front());
    let too_long = message.is_some_and(|m| !m.write && m.len > receive.len);
    let bad_key = message.is_some_and(|m| m.bad_key);
    if entry.status == Status::Success {
        if sides[id].recv_failed {
            return Err(format!("side {id}: receive {number} succeeded after one had failed"));
        }
        let message = peer.and_then(|peer| sides[peer].outgoing.pop_front());
        let Some(message) = message else {
            return Err(format!("side {id}: received what nobody sent: {entry:?}"));
        };
        if too_long || bad_key {
            return Err(format!("side {id}: receive {number} succeeded, which was wrong"));
        }
        let side = &mut sides[id];
        let at = (receive.area, receive.pieces.as_slice());
        delivered(side, at, &message, entry)
            .map_err(|e| format!("side {id}: receive {number}, message {}: {e}", message.number))?;
        let bytes = message.len as u64;
        apply_announcement(side, message.announcement, message.invalidates);
        return Ok(Verdict { received: true, bytes, ..Verdict::default() });
    }
    let first = !sides[id].recv_failed;
    if first {
        begun(sides, id, &receive);
    }
    sides[id].recv_failed = true;
    let status = entry.status;
    let side = &sides[id];
    let allowed = match status {
        Status::WrFlushErr => !first || side.failure_causes.any() || side.send_failed,
        _ if !first => false,
        Status::LocLenErr => too_long,
        Status::RemInvReqErr if bad_key => true,
        _ => side.failure_causes.has(FailureCauses::MISUSE) && PEER_MISUSE.has(status),
    };
    if !allowed {
        let (causes, when) = (side.failure_causes, if first { "first" } else { "after a failure" });
        return Err(format!(
            "side {id}: receive {number} failed with {status:?} {when}, {causes:?}"
        ));
    }
    if status == Status::RemInvReqErr && bad_key {
        // The message was delivered all the same, and may have been acknowledged [RSP-18].
        sides[id].received += 1;
    }
    if too_long || bad_key {
        note_cause(sides, id, FailureCauses::MISUSE);
    }
    Ok(Verdict { failed: first, ..Verdict::default() })
}

/// Notes that any part of the next message may lie in the memory of a receive that failed.
fn begun(sides: &mut [Side], id: SideId, receive: &Receive) {
    let message = sides[id].peer.and_then(|peer| sides[peer].outgoing.front());
    let Some(message) = message.filter(|m| !m.write && m.len.min(receive.len) > 0) else { return };
    let len = message.len.min(receive.len);
    let (number, bytes) = (message.number, message.bytes[..len].to_vec());
    sides[id].memory.expect(receive.area, number, part(&receive.pieces, 0, len), bytes);
}

/// Notes that a side is removed with all posted requests.
pub(crate) fn abandoned(sides: &mut [Side], id: SideId) -> Result<(), String> {
    if let Some(receive) = sides[id].receives.pop_front() {
        begun(sides, id, &receive);
    }
    drained(sides, id)
}

/// Checks that a message is the next one, and complete.
fn delivered(
    side: &mut Side,
    (area, pieces): (usize, &[(usize, usize)]),
    message: &Message,
    entry: &Completion,
) -> Result<(), String> {
    let opcode = if message.write { WcOpcode::RecvRdmaWithImm } else { WcOpcode::Recv };
    let same = entry.opcode == opcode
        && entry.byte_len as usize == message.len
        && entry.imm == message.imm
        && entry.invalidated == message.invalidates;
    if !same {
        let Message { len, imm, invalidates, .. } = message;
        return Err(format!(
            "{opcode:?} of {len} bytes, {imm:?}, {invalidates:?} came as {entry:?}"
        ));
    }
    side.received += 1;
    side.memory.received(area, pieces, &message.bytes)?;
    side.memory.release(area);
    side.memory.placed_up_to(message.number)
}

/// Applies the announcement in a message.
fn apply_announcement(side: &mut Side, announcement: Announcement, invalidated: Option<u32>) {
    match announcement {
        Announcement::Nothing => {}
        Announcement::Grant(grant) => side.grant = Some(grant),
        Announcement::Release => {
            if let Fast::Granted(key) = side.fast {
                side.fast = Fast::Released(key);
            }
        }
    }
    if let (Some(key), Fast::Granted(granted)) = (invalidated, side.fast)
        && key == granted
    {
        side.fast = Fast::Free(key);
    }
}

/// Notes that both queues of a side are flushed, so that its memory no longer changes.
pub(crate) fn drained(sides: &mut [Side], id: SideId) -> Result<(), String> {
    let side = &mut sides[id];
    side.memory.settle(&ALL).map_err(|e| format!("side {id}: {e}"))?;
    side.memory.check_all().map_err(|e| format!("side {id}: {e}"))?;
    let (received, peer) = (side.received, side.peer);
    if let Some(peer) = peer.map(|peer| &sides[peer])
        && peer.succeeded > received
    {
        let sent = peer.succeeded;
        return Err(format!("side {id} received {received} messages, {sent} succeeded"));
    }
    Ok(())
}

/// Notes that the peer may not use the shared region any more: requests under way may fail.
pub(crate) fn revoked(sides: &mut [Side], id: SideId) -> Result<(), String> {
    note_cause(sides, id, FailureCauses::MISUSE);
    let side = &mut sides[id];
    side.revoked = true;
    let shared = [Purpose::Target, Purpose::Words];
    side.memory.settle(&shared).map_err(|e| format!("side {id}: {e}"))?;
    if let Some(peer) = side.peer {
        for request in &mut sides[peer].requests {
            if request.target.is_some() {
                request.may = request.may.and(Status::RemAccessErr);
            }
        }
    }
    Ok(())
}
