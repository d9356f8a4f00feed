//! A connected stream with its queue pair and memory.

use std::sync::Arc;

use bowline_verbs::{
    Access, Buffer, CmId as Number, Completion, ConnParam, CqId, Device as _, Error, MrKeys, PdId,
    QpCap, QpInit, QpType, Qpn, RecvWr, SendFlags, SendOp, SendWr, Sge, Status,
};

use super::options::Options;
use super::stream::{EXTRA_RECEIVES, EXTRA_SENDS, Own, Stream, Update, WINDOWS, Write};
use super::wire::{HELLO_LEN, Hello, MAP_LEN, Region, WINDOW_LEN};
use crate::device::Opened;

/// Completions looked at in one go.
const POLL: usize = 64;
/// Ids of receives; those of sends are 0.
const RECEIVE: u64 = 1;
/// Rights of the rings, of which peers write one.
pub(super) const WRITTEN: Access = Access::LOCAL_WRITE.union(Access::REMOTE_WRITE);
/// Retransmissions, for ever where the peer has no receive posted.
const RETRIES: u8 = 7;

/// Memory that is registered.
#[derive(Debug)]
pub(super) struct Memory {
    opened: &'static Opened,
    pub(super) buffer: Arc<Buffer>,
    pub(super) keys: MrKeys,
}

impl Memory {
    pub(super) fn new(
        opened: &'static Opened,
        pd: PdId,
        buffer: Buffer,
        access: Access,
    ) -> Result<Self, Error> {
        let buffer = Arc::new(buffer);
        let keys = opened.soft.reg_mr(pd, &buffer, 0, buffer.len(), None, access)?;
        Ok(Self { opened, buffer, keys })
    }

    fn region(&self) -> Region {
        let len = self.buffer.len() as u32; // at most `RING_MAX`
        Region { addr: self.buffer.addr(), key: self.keys.rkey, len }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // What is gone with the device needs no end.
        let _ = self.opened.soft.dereg_mr(self.keys.lkey);
    }
}

pub(super) fn buffer(len: usize) -> Result<Buffer, Error> {
    Buffer::new(len).map_err(|error| Error::System {
        what: "memory of a socket".to_owned(),
        errno: bowline_base::Errno::of(&error),
    })
}

/// Makes a queue pair; without one its completion queue goes too.
pub(super) fn create_qp(opened: &Opened, init: &QpInit) -> Result<Qpn, Error> {
    opened.soft.create_qp(init).inspect_err(|_| {
        // Nothing uses it.
        let _ = opened.soft.destroy_cq(init.send_cq);
    })
}

/// A queue pair and its memory, before and after there is a peer.
#[derive(Debug)]
pub(super) struct Connection {
    opened: &'static Opened,
    pub(super) cq: CqId,
    pub(super) qpn: Qpn,
    receive_ring: Memory,
    send_ring: Memory,
    /// Windows, then mappings.
    table: Memory,
    own: Own,
    /// There once the peer's hello has come.
    pub(super) stream: Option<Stream>,
    pub(super) number: Option<Number>,
    /// It has ended by a fault of the network, the peer or the device.
    pub(super) is_broken: bool,
    /// The connection manager has ended it.
    is_disconnected: bool,
    /// Requests have come back that were not executed: the queue pair has been stopped.
    is_flushed: bool,
    polled: Vec<Completion>,
}

impl Connection {
    pub(super) fn new(opened: &'static Opened, pd: PdId, options: &Options) -> Result<Self, Error> {
        let extra = EXTRA_SENDS.max(EXTRA_RECEIVES);
        let options = options.within(&opened.attr, extra);
        let half = options.receive_ring / 2;
        let receive_ring = Memory::new(opened, pd, buffer(half * 2)?, WRITTEN)?;
        let send_ring = Memory::new(opened, pd, buffer(options.send_ring)?, Access::empty())?;
        let table_len = WINDOWS * WINDOW_LEN + usize::from(options.maps) * MAP_LEN;
        // What is read there has to be what the peer has written.
        let table = buffer(table_len)?.without_direct_placement();
        let table = Memory::new(opened, pd, table, WRITTEN)?;
        let (sends, receives) = (options.sends + EXTRA_SENDS, options.receives + EXTRA_RECEIVES);
        let cq = opened.soft.create_cq(sends + receives)?;
        let init = QpInit {
            pd,
            send_cq: cq,
            recv_cq: cq,
            qp_type: QpType::Rc,
            srq: None,
            cap: QpCap {
                max_send_wr: sends,
                max_recv_wr: receives,
                max_send_sge: 2,
                max_recv_sge: 1,
                max_inline: options.inline,
            },
            sq_sig_all: true,
        };
        let qpn = create_qp(opened, &init)?;
        let own = Own {
            sends: options.sends,
            credits: options.receives as u16, // at most `QUEUE_MAX`
            send_ring: options.send_ring,
            inline: options.inline,
            receive_ring: receive_ring.region(),
            table: Region { len: WINDOWS as u32, ..table.region() },
            maps: options.maps,
        };
        let new = Self {
            opened,
            cq,
            qpn,
            receive_ring,
            send_ring,
            table,
            own,
            stream: None,
            number: None,
            is_broken: false,
            is_disconnected: false,
            is_flushed: false,
            polled: Vec::new(),
        };
        let init = bowline_verbs::QpAttr {
            state: Some(bowline_verbs::QpState::Init),
            access: Some(WRITTEN),
            ..Default::default()
        };
        opened.soft.modify_qp(qpn, &init)?;
        for _ in 0..receives {
            new.post_receive()?;
        }
        Ok(new)
    }

    /// What the peer is asked for, or answered [RSK-1], [RSK-2].
    pub(super) fn param(&self) -> ConnParam {
        ConnParam {
            qpn: self.qpn,
            private_data: self.own.hello().bytes()[..HELLO_LEN].to_vec(),
            responder_resources: 0,
            initiator_depth: 0,
            retry_count: RETRIES,
            rnr_retry_count: RETRIES,
            ..ConnParam::default()
        }
    }

    /// Takes in the peer's private data; `false`: it is not of a socket.
    pub(super) fn greet(&mut self, private_data: &[u8]) -> bool {
        let hello = Hello::parse(private_data);
        self.stream = hello.map(|hello| Stream::new(self.own, hello));
        self.stream.is_some()
    }

    /// Messages have no bytes of their own: a receive is only a place for an immediate [RSK-1].
    fn post_receive(&self) -> Result<(), Error> {
        let posted = self.opened.soft.post_recv(self.qpn, &[RecvWr { id: RECEIVE, sges: &[] }]);
        posted.map_err(|(_, error)| error)
    }

    fn breaks(&mut self) {
        self.is_broken = true;
    }

    /// Takes in what has come, and sends what is to be sent because of it; returns whether anything
    /// has changed.
    pub(super) fn progress(&mut self) -> bool {
        let mut has_changed = false;
        loop {
            let mut polled = core::mem::take(&mut self.polled);
            polled.clear();
            let number = self.opened.soft.poll_cq(self.cq, &mut polled, POLL);
            for completion in &polled {
                self.complete(completion);
            }
            has_changed |= !polled.is_empty();
            self.polled = polled;
            match number {
                Ok(POLL) => {}
                Ok(_) => break,
                Err(_) => {
                    self.breaks();
                    break;
                }
            }
        }
        self.send_updates();
        has_changed
    }

    fn complete(&mut self, completion: &Completion) {
        match completion.status {
            Status::Success => {}
            Status::WrFlushErr => {
                self.is_flushed = true;
                return;
            }
            _ => {
                if !self.has_ended() {
                    self.breaks();
                }
                return;
            }
        }
        if completion.wr_id != RECEIVE {
            if let Some(stream) = &mut self.stream {
                stream.on_sent();
            }
            return;
        }
        let table = &self.table.buffer;
        let taken = match (&mut self.stream, completion.imm) {
            (Some(stream), Some(immediate)) => stream
                .on_message(immediate, completion.byte_len, |at, out: &mut [u8]| {
                    table.read(at, out);
                })
                .is_ok(),
            _ => false,
        };
        if !taken || self.post_receive().is_err() {
            self.breaks();
            // A peer that does not follow the protocol has no connection any more [RSK-3].
            if let Some(number) = self.number {
                // One that has ended needs no end.
                let _ = self.opened.soft.disconnect(number);
            }
        }
    }

    /// Tells whether either side has ended the connection: after that all that is posted comes
    /// back.
    fn has_ended(&self) -> bool {
        self.is_disconnected || self.stream.as_ref().is_some_and(Stream::has_peer_gone)
    }

    /// Decides, when all events are taken in, whether requests have come back because of an end or
    /// a fault.
    pub(super) fn judge(&mut self) {
        if self.is_flushed && !self.has_ended() {
            self.breaks();
        }
    }

    /// The connection has ended. What the peer has sent before can be read still, unless that is
    /// what has broken it: then reads must fail, and not see an orderly end.
    pub(super) fn peer_has_gone(&mut self) {
        self.is_disconnected = true;
        self.progress();
        if let Some(stream) = self.stream.as_mut().filter(|_| !self.is_broken) {
            stream.on_gone();
        }
    }

    pub(super) fn shut(&mut self, whole: bool) {
        if let Some(stream) = &mut self.stream {
            stream.shut(whole);
        }
        self.send_updates();
    }

    /// Tells whether everything has arrived that was sent, or never will.
    pub(super) fn is_all_sent(&self) -> bool {
        let is_all_sent = self.stream.as_ref().is_none_or(Stream::is_all_sent);
        is_all_sent || self.is_over()
    }

    /// Tells whether nothing is sent or received any more.
    pub(super) fn is_over(&self) -> bool {
        self.is_broken || self.stream.as_ref().is_none_or(Stream::has_peer_gone)
    }

    pub(super) fn send_updates(&mut self) {
        while !self.is_broken && !self.is_flushed {
            let Some(update) = self.stream.as_mut().and_then(Stream::update) else { return };
            let Update { to, bytes, immediate } = update;
            let op = SendOp::WriteImm(to, immediate);
            self.post(SendWr { id: 0, op, sges: &[], inline: &bytes, flags: SendFlags::INLINE });
        }
    }

    fn post(&mut self, wr: SendWr<'_>) {
        if self.opened.soft.post_send(self.qpn, core::slice::from_ref(&wr)).is_err() {
            self.breaks();
        }
    }

    /// Posts a write of the first of the given bytes; returns how many.
    pub(super) fn write(&mut self, write: &Write, bytes: &[u8]) -> usize {
        let bytes = &bytes[..write.len];
        let op = match write.immediate {
            Some(immediate) => SendOp::WriteImm(write.to, immediate),
            None => SendOp::Write(write.to),
        };
        if write.pieces == [(0, 0); 2] {
            self.post(SendWr { id: 0, op, sges: &[], inline: bytes, flags: SendFlags::INLINE });
            return write.len;
        }
        let mut sges = [Sge::default(); 2];
        let mut done = 0;
        for (sge, (at, len)) in sges.iter_mut().zip(write.pieces) {
            self.send_ring.buffer.write(at, &bytes[done..done + len]);
            done += len;
            let addr = self.send_ring.buffer.addr() + at as u64;
            *sge = Sge { addr, len: len as u32, lkey: self.send_ring.keys.lkey };
        }
        let used = if write.pieces[1].1 == 0 { &sges[..1] } else { &sges[..] };
        self.post(SendWr { id: 0, op, sges: used, inline: &[], flags: SendFlags::empty() });
        write.len
    }

    /// Copies what has come, as far as there is room; returns how much.
    pub(super) fn read(&self, out: &mut [u8]) -> usize {
        let Some(stream) = &self.stream else { return 0 };
        let len = stream.readable().min(out.len());
        let mut done = 0;
        for (at, len) in stream.pieces(len) {
            self.receive_ring.buffer.read(at, &mut out[done..done + len]);
            done += len;
        }
        len
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        let soft = &self.opened.soft;
        // What is gone with the device needs no end.
        if let Some(number) = self.number.take() {
            let _ = soft.destroy_id(number);
        }
        let _ = soft.destroy_qp(self.qpn);
        let _ = soft.destroy_cq(self.cq);
    }
}
