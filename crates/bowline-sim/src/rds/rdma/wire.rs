//! What a NIC sees of the frames that one side of a connection sends, and whether the rules allow
//! it. Spec: `docs/spec/rds-rdma.md`, sections 4 and 5.

use std::collections::BTreeSet;

use bowline_wire::rds::{BowlineExt, FRAGMENT_LEN, Flags, Handshake, Header, MAP_LEN, checksum_ok};

use super::Frame;

/// Checks of one side's frames.
#[derive(Debug)]
pub(super) struct WireCheck {
    flow_control: bool,
    /// Messages may have extensions of RDMA.
    operations: bool,
    /// Number of payload bytes of a full frame.
    fragment: usize,
    slots: u64,
    /// Id of the next request.
    next: u64,
    /// Requests with lower ids are complete, as far as the process knows.
    retired: u64,
    /// Header of the message that was begun, and the rest of its length.
    begun: Option<(Header, usize)>,
    last_sequence: u64,
    /// Numbers of the messages that came whole to this side.
    came: BTreeSet<u64>,
    coming: Option<(u64, usize)>,
    /// The farewell was posted.
    over: bool,
}

impl WireCheck {
    pub(super) fn new(flow_control: bool, operations: bool, slots: usize) -> Self {
        Self {
            flow_control,
            operations,
            fragment: FRAGMENT_LEN,
            slots: slots as u64,
            next: 0,
            retired: 0,
            begun: None,
            last_sequence: 0,
            came: BTreeSet::new(),
            coming: None,
            over: false,
        }
    }

    /// Sets the number of payload bytes of a full frame, before any frame.
    pub(super) const fn set_fragment(&mut self, fragment: usize) {
        self.fragment = fragment;
    }

    /// Notes that the process knows of the completion of a request.
    pub(super) fn retired(&mut self, id: u64) {
        self.retired = self.retired.max(id + 1);
    }

    /// Notes a frame that the process of this side takes.
    pub(super) fn taken(&mut self, frame: &Frame) {
        let header = Header::from_bytes(&frame.header);
        if is_ack(&header, frame) {
            return;
        }
        let (sequence, rest) = self.coming.take().unwrap_or((header.sequence, header.len as usize));
        if rest > self.fragment {
            self.coming = Some((sequence, rest - self.fragment));
        } else {
            self.came.insert(sequence);
        }
    }

    /// Checks a request of an operation that is posted.
    pub(super) fn posted_work(&mut self, id: u64) -> Result<(), String> {
        if id != self.next || id == 0 {
            return Err(format!("id {id} of a request, not {}", self.next));
        }
        if self.next - self.retired >= self.slots {
            return Err("more requests outstanding than fit".into());
        }
        if self.begun.is_some() {
            return Err("an operation in the middle of a message [RDMA-17]".into());
        }
        self.next += 1;
        Ok(())
    }

    /// Tells whether a message has come whole.
    pub(super) fn has_come(&self, number: u64) -> bool {
        self.came.contains(&number)
    }

    /// Tells whether the next frame is the first one of a message.
    pub(super) const fn is_between(&self) -> bool {
        self.begun.is_none()
    }

    /// Checks a frame that is posted.
    pub(super) fn posted(&mut self, frame: &Frame) -> Result<(), String> {
        let header = Header::from_bytes(&frame.header);
        let say = |what: &str| Err(format!("{what}: {header:?}, {} bytes", frame.payload.len()));
        if frame.id != self.next {
            return say("ids of requests do not rise by one");
        }
        if self.next - self.retired >= self.slots {
            return say("more requests outstanding than fit");
        }
        let first = self.next == 0;
        self.next += 1;
        if !checksum_ok(&frame.header) {
            return say("wrong checksum [IB-50]");
        }
        let [.., p0, p1, p2, p3] = *frame.header.first_chunk::<30>().unwrap_or(&[0; 30]);
        if self.over {
            return say("a frame behind the farewell [IB-112]");
        }
        self.over = is_ack(&header, frame) && header.ext == farewell();
        let extended = header.ext != [0; 16] && !self.operations && !self.over;
        if [p0, p1, p2, p3] != [0; 4] || extended {
            return say("bytes that are to be zero [IB-50], [IB-52]");
        }
        if header.credit > 0 && !self.flow_control {
            return say("credits without flow control [IB-73]");
        }
        if header.ack > 0 && !self.came.contains(&header.ack) {
            return say("acknowledges what did not come [IB-64]");
        }
        if is_ack(&header, frame) {
            let plain = Header {
                ack: header.ack,
                credit: header.credit,
                csum: header.csum,
                ext: if self.over { farewell() } else { [0; 16] },
                ..Header::default()
            };
            if header != plain || first {
                return say("an acknowledgement with more, or as the first frame [IB-59], [IB-37]");
            }
            return self.ended(frame, &header);
        }
        let rest = match self.begun.take() {
            Some((begun, rest)) => {
                let same = Header { credit: header.credit, csum: header.csum, ..begun } == header;
                if !same {
                    return say("frames of a message differ [IB-54]");
                }
                rest
            }
            None => {
                self.begins(&header, first)?;
                header.len as usize
            }
        };
        if frame.payload.len() != rest.min(self.fragment) {
            return say("wrong length of a frame [IB-53]");
        }
        if rest > self.fragment {
            self.begun = Some((header, rest - self.fragment));
            if frame.solicited && !self.flow_control {
                return say("solicited in the middle [IB-42]");
            }
            return Ok(());
        }
        self.ended(frame, &header)
    }

    /// Checks the first frame of a message.
    fn begins(&mut self, header: &Header, first: bool) -> Result<(), String> {
        let map = Header { len: MAP_LEN as u32, flags: Flags::CONG_BITMAP, ..Header::default() };
        let map = Header { ack: header.ack, credit: header.credit, csum: header.csum, ..map };
        let known = Flags::ACK_REQUIRED.with(Flags::RETRANSMITTED).bits();
        let again = header.flags.contains(Flags::RETRANSMITTED);
        if *header == map {
            return Ok(());
        }
        let what = if first {
            "the first is no map [IB-37]"
        } else if header.sequence <= self.last_sequence {
            "numbers do not rise [IB-62]"
        } else if header.flags.bits() & !known != 0 {
            "unknown flags"
        } else if again && !header.flags.contains(Flags::ACK_REQUIRED) {
            "sent again without a request for an acknowledgement [IB-94]"
        } else {
            self.last_sequence = header.sequence;
            return Ok(());
        };
        Err(format!("{what}: {header:?}"))
    }

    /// Checks the last frame of a message, or an acknowledgement.
    fn ended(&self, frame: &Frame, header: &Header) -> Result<(), String> {
        if frame.solicited && frame.signalled {
            return Ok(());
        }
        Err(format!("the end of a message is not solicited and signalled [IB-42]: {header:?}"))
    }
}

/// The extension area of the last acknowledgement of a node that ends [R-2051].
fn farewell() -> [u8; 16] {
    let bowline = Some(BowlineExt { version: 1, path: 0, max_message: 0 });
    Handshake { bowline, ..Handshake::default() }.emit()
}

/// Tells whether a frame only acknowledges [IB-59].
fn is_ack(header: &Header, frame: &Frame) -> bool {
    header.sport == 0 && header.dport == 0 && frame.payload.is_empty()
}
