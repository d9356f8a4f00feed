//! Frames of a channel: what a request and its reply look like, before they mean anything.
//!
//! ```text
//!   0        4      5      6          8         16      20      24            28          32
//!   | length | op   | 0    | name len | value   | a     | b     | control len | 0         |
//!   +--------+------+------+----------+---------+-------+-------+-------------+-----------+
//!   | name (a sockaddr) | control (cmsghdrs) | payload                                     |
//! ```
//!
//! Numbers are in the byte order of the machine, since both sides are on one. `length` is that of
//! the whole frame. What `value`, `a` and `b` are in each, [`Request`](crate::Request) and
//! [`Reply`](crate::Reply) know.

/// Bytes before the name of a frame.
pub const HEAD_LEN: usize = 32;

/// Longest frame in bytes: a message of 16 MiB with its name and control messages.
pub const FRAME_MAX: usize = (16 << 20) + (64 << 10);

/// Longest name in bytes: a `sockaddr_storage`.
pub const NAME_MAX: usize = 128;

/// Longest control messages in bytes.
pub const CONTROL_MAX: usize = 16 << 10;

/// The kind of a request, and of its reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Op {
    /// [`Request::Hello`](crate::Request::Hello).
    Hello = 1,
    /// [`Request::Open`](crate::Request::Open).
    Open = 2,
    /// [`Request::Attach`](crate::Request::Attach).
    Attach = 3,
    /// [`Call::Bind`](crate::Call::Bind).
    Bind = 4,
    /// [`Call::Connect`](crate::Call::Connect).
    Connect = 5,
    /// [`Call::LocalName`](crate::Call::LocalName).
    LocalName = 6,
    /// [`Call::PeerName`](crate::Call::PeerName).
    PeerName = 7,
    /// [`Call::Send`](crate::Call::Send).
    Send = 8,
    /// [`Call::Receive`](crate::Call::Receive).
    Receive = 9,
    /// [`Call::SetOption`](crate::Call::SetOption).
    SetOption = 10,
    /// [`Call::GetOption`](crate::Call::GetOption).
    GetOption = 11,
    /// [`Call::Ioctl`](crate::Call::Ioctl).
    Ioctl = 12,
    /// [`Request::Interrupt`](crate::Request::Interrupt).
    Interrupt = 13,
    /// [`Request::Wake`](crate::Request::Wake).
    Wake = 14,
    /// [`Request::HandOver`](crate::Request::HandOver).
    HandOver = 15,
    /// [`Call::Flush`](crate::Call::Flush).
    Flush = 16,
    /// [`Call::CancelAll`](crate::Call::CancelAll).
    CancelAll = 17,
    /// [`Request::ShowMemory`](crate::Request::ShowMemory).
    Memory = 18,
    /// [`Request::ShowWatch`](crate::Request::ShowWatch).
    Watch = 19,
}

impl Op {
    const ALL: [Self; 19] = [
        Self::Hello,
        Self::Open,
        Self::Attach,
        Self::Bind,
        Self::Connect,
        Self::LocalName,
        Self::PeerName,
        Self::Send,
        Self::Receive,
        Self::SetOption,
        Self::GetOption,
        Self::Ioctl,
        Self::Interrupt,
        Self::Wake,
        Self::HandOver,
        Self::Flush,
        Self::CancelAll,
        Self::Memory,
        Self::Watch,
    ];

    fn of(number: u8) -> Option<Self> {
        Self::ALL.get(usize::from(number).checked_sub(1)?).copied()
    }
}

/// The numbers of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Head {
    /// What is asked, or answered.
    pub op: Op,
    /// The first number.
    pub value: i64,
    /// The second number.
    pub a: i32,
    /// The third number.
    pub b: i32,
}

/// Lengths in bytes of what follows a head.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lengths {
    /// That of the name, at most [`NAME_MAX`].
    pub name: usize,
    /// That of the control messages, at most [`CONTROL_MAX`].
    pub control: usize,
    /// That of the payload.
    pub payload: usize,
}

impl Lengths {
    /// The length of a frame with such parts; `None` if one of them is too long.
    fn frame(self) -> Option<usize> {
        let Self { name, control, payload } = self;
        let len = HEAD_LEN.checked_add(name)?.checked_add(control)?.checked_add(payload)?;
        (name <= NAME_MAX && control <= CONTROL_MAX && len <= FRAME_MAX).then_some(len)
    }
}

impl Head {
    /// A head whose `a` and `b` are 0.
    pub const fn new(op: Op, value: i64) -> Self {
        Self { op, value, a: 0, b: 0 }
    }

    /// Returns the first bytes of a frame with so many bytes of name, control messages and payload.
    /// `None` if one of them is too long.
    pub fn emit(&self, name: usize, control: usize, payload: usize) -> Option<[u8; HEAD_LEN]> {
        let len = Lengths { name, control, payload }.frame()?;
        let mut out = [0; HEAD_LEN];
        out[0..4].copy_from_slice(&(len as u32).to_ne_bytes());
        out[4] = self.op as u8;
        out[6..8].copy_from_slice(&(name as u16).to_ne_bytes());
        out[8..16].copy_from_slice(&self.value.to_ne_bytes());
        out[16..20].copy_from_slice(&self.a.to_ne_bytes());
        out[20..24].copy_from_slice(&self.b.to_ne_bytes());
        out[24..28].copy_from_slice(&(control as u32).to_ne_bytes());
        Some(out)
    }

    /// Reads the first bytes of a frame.
    ///
    /// # Errors
    /// [`Malformed`].
    pub fn parse(head: &[u8; HEAD_LEN]) -> Result<(Self, Lengths), Malformed> {
        let number =
            |at: usize| u32::from_ne_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        let op = Op::of(head[4]).ok_or(Malformed)?;
        let name = usize::from(u16::from_ne_bytes([head[6], head[7]]));
        let control = number(24) as usize;
        let payload = (number(0) as usize).checked_sub(HEAD_LEN + name + control);
        let lengths = Lengths { name, control, payload: payload.ok_or(Malformed)? };
        lengths.frame().ok_or(Malformed)?;
        let value = head.get(8..16).and_then(|b| b.try_into().ok()).map_or(0, i64::from_ne_bytes);
        let (a, b) = (number(16).cast_signed(), number(20).cast_signed());
        Ok((Self { op, value, a, b }, lengths))
    }
}

/// A whole frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frame<'a> {
    /// Its numbers.
    pub head: Head,
    /// A `sockaddr`, or nothing.
    pub name: &'a [u8],
    /// Control messages as `recvmsg` lays them out.
    pub control: &'a [u8],
    /// What is left.
    pub payload: &'a [u8],
}

/// Bytes that are no frame, or no reply: the connection is of no use any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Malformed;

impl<'a> Frame<'a> {
    /// Takes a frame off the front of a stream; returns it and its length. `Ok(None)`: more bytes
    /// are needed.
    ///
    /// # Errors
    /// [`Malformed`].
    pub fn parse(bytes: &'a [u8]) -> Result<Option<(Self, usize)>, Malformed> {
        let Some((head, rest)) = bytes.split_first_chunk() else { return Ok(None) };
        let (head, lengths) = Head::parse(head)?;
        let Lengths { name, control, payload } = lengths;
        let Some(parts) = rest.get(..name + control + payload) else { return Ok(None) };
        let (name, parts) = parts.split_at(name);
        let (control, payload) = parts.split_at(control);
        let len = HEAD_LEN + name.len() + control.len() + payload.len();
        Ok(Some((Self { head, name, control, payload }, len)))
    }
}

#[cfg(test)]
mod tests {
    extern crate std;

    use std::vec::Vec;

    use super::*;

    fn bytes(head: Head, name: &[u8], control: &[u8], payload: &[u8]) -> Vec<u8> {
        let head = head.emit(name.len(), control.len(), payload.len()).expect("it fits");
        [&head, name, control, payload].concat()
    }

    #[test]
    fn a_frame_comes_out_as_it_went_in() {
        let head = Head { op: Op::Send, value: -7, a: i32::MIN, b: 3 };
        let mut stream = bytes(head, b"name", b"control", b"payload");
        let len = stream.len();
        stream.extend(bytes(Head::new(Op::Wake, 1), b"", b"", b""));
        let frame = Frame { head, name: b"name", control: b"control", payload: b"payload" };
        assert_eq!(Frame::parse(&stream), Ok(Some((frame, len))));
        for cut in 0..len {
            assert_eq!(Frame::parse(&stream[..cut]), Ok(None), "{cut}");
        }
        for op in Op::ALL {
            let stream = bytes(Head::new(op, 0), b"", b"", b"");
            assert_eq!(Frame::parse(&stream).map(|f| f.map(|(f, _)| f.head.op)), Ok(Some(op)));
        }
    }

    #[test]
    fn lengths_that_do_not_fit_are_refused() {
        let good = bytes(Head::new(Op::Bind, 0), b"name", b"", b"");
        let with = |at: usize, new: &[u8]| {
            let mut bad = good.clone();
            bad[at..at + new.len()].copy_from_slice(new);
            bad
        };
        for bad in [
            with(0, &31u32.to_ne_bytes()),
            with(0, &(FRAME_MAX as u32 + 1).to_ne_bytes()),
            with(0, &u32::MAX.to_ne_bytes()),
            with(4, &[0]),
            with(4, &[Op::ALL.len() as u8 + 1]),
            with(6, &5u16.to_ne_bytes()),
            with(6, &u16::MAX.to_ne_bytes()),
            with(24, &1u32.to_ne_bytes()),
            with(24, &u32::MAX.to_ne_bytes()),
        ] {
            assert_eq!(Frame::parse(&bad), Err(Malformed), "{bad:?}");
        }
        assert_eq!(Head::new(Op::Bind, 0).emit(NAME_MAX + 1, 0, 0), None);
        assert_eq!(Head::new(Op::Bind, 0).emit(0, CONTROL_MAX + 1, 0), None);
        assert_eq!(Head::new(Op::Bind, 0).emit(0, 0, FRAME_MAX), None);
        assert_eq!(FRAME_MAX, (16 << 20) + (64 << 10), "as SECURITY.md tells");
    }
}
