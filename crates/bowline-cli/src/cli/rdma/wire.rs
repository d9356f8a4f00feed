//! What the commands say to their peers besides the data: the advertisement of rping, the private
//! data of `perf`, the letters of a ping.

use bowline_verbs::Remote;

/// Bytes of an advertisement, and of rping's other messages.
pub(super) const ADVERT: usize = 16;

/// Where the client's buffer is, as rping's client says it in a SEND: address, key and length, all
/// big-endian. The server's messages are as long and mean nothing but "go on".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Advert {
    /// The buffer.
    pub(super) memory: Remote,
    /// Its bytes.
    pub(super) len: u32,
}

impl Advert {
    /// The bytes of the message.
    pub(super) fn encode(self) -> [u8; ADVERT] {
        let mut out = [0; ADVERT];
        out[..8].copy_from_slice(&self.memory.addr.to_be_bytes());
        out[8..12].copy_from_slice(&self.memory.rkey.to_be_bytes());
        out[12..].copy_from_slice(&self.len.to_be_bytes());
        out
    }

    /// Reads a message.
    pub(super) fn decode(bytes: [u8; ADVERT]) -> Self {
        let [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p] = bytes;
        let addr = u64::from_be_bytes([a, b, c, d, e, f, g, h]);
        let memory = Remote { addr, rkey: u32::from_be_bytes([i, j, k, l]) };
        Self { memory, len: u32::from_be_bytes([m, n, o, p]) }
    }
}

/// The data of ping `number` as rping makes them: a name, letters from `A` to `z` over and over, each
/// ping beginning one letter later, and a zero at the end.
pub(super) fn ping_data(number: u64, size: usize) -> Vec<u8> {
    const LETTERS: usize = (b'z' - b'A' + 1) as usize;
    let mut data = format!("rdma-ping-{number}: ").into_bytes();
    let first = (number % LETTERS as u64) as usize;
    let letters = (0..LETTERS).map(|n| b'A' + n as u8).cycle().skip(first);
    let room = size.saturating_sub(1).saturating_sub(data.len());
    data.extend(letters.take(room));
    data.truncate(size.saturating_sub(1));
    data.resize(size, 0);
    data
}

/// What a verb of `perf` is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
#[repr(u8)]
pub(super) enum Op {
    /// Send to a posted receive
    Send = 0,
    /// RDMA write (for latency: with immediate, so that the peer sees it and answers)
    Write = 1,
    /// RDMA read
    Read = 2,
    /// Fetch and add of 8 bytes
    Atomic = 3,
}

impl Op {
    /// Name on the command line and in results.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Send => "send",
            Self::Write => "write",
            Self::Read => "read",
            Self::Atomic => "atomic",
        }
    }
}

/// What of it is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
#[repr(u8)]
pub(super) enum Mode {
    /// Bandwidth: as many as the depth allows are under way
    Bw = 0,
    /// Latency: one at a time
    Lat = 1,
}

/// The order a client of `perf` gives its server, in the private data of the connection request.
///
/// ```text
/// 0 "bwpf" | 4 version | 5 op | 6 mode | 7 zero | 8 size | 12 iterations | 20 depth | 24 address | 32 key
/// ```
/// All numbers are big-endian; address and key are those of the client's buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Order {
    /// What to do.
    pub(super) op: Op,
    /// How.
    pub(super) mode: Mode,
    /// Bytes of a message.
    pub(super) size: u32,
    /// Messages.
    pub(super) iterations: u64,
    /// Most messages under way.
    pub(super) depth: u32,
    /// The client's buffer, of `size` bytes.
    pub(super) memory: Remote,
}

const MAGIC: &[u8; 4] = b"bwpf";
const VERSION: u8 = 1;
/// Bytes of an [`Order`].
const ORDER: usize = 36;

impl Order {
    /// Largest message.
    pub(super) const SIZE_MAX: u32 = 64 << 20;
    /// Most messages under way.
    pub(super) const DEPTH_MAX: u32 = 4096;

    /// The private data.
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(ORDER);
        out.extend_from_slice(MAGIC);
        out.extend_from_slice(&[VERSION, self.op as u8, self.mode as u8, 0]);
        out.extend_from_slice(&self.size.to_be_bytes());
        out.extend_from_slice(&self.iterations.to_be_bytes());
        out.extend_from_slice(&self.depth.to_be_bytes());
        out.extend_from_slice(&self.memory.addr.to_be_bytes());
        out.extend_from_slice(&self.memory.rkey.to_be_bytes());
        out
    }

    /// Reads the private data; the error is the text that the client is refused with.
    pub(super) fn decode(bytes: &[u8]) -> Result<Self, String> {
        let mut reader = Reader(bytes);
        if reader.take::<4>().as_ref() != Some(MAGIC) {
            return Err("not a client of bowline perf".to_owned());
        }
        let Some([version, op, mode, _]) = reader.take::<4>() else {
            return Err("a short order".to_owned());
        };
        if version != VERSION {
            return Err(format!("version {version} of the order; known is {VERSION}"));
        }
        let op = [Op::Send, Op::Write, Op::Read, Op::Atomic].into_iter().find(|o| *o as u8 == op);
        let mode = [Mode::Bw, Mode::Lat].into_iter().find(|m| *m as u8 == mode);
        let (Some(op), Some(mode)) = (op, mode) else {
            return Err("an unknown operation".to_owned());
        };
        let read = |reader: &mut Reader<'_>| {
            let size = u32::from_be_bytes(reader.take()?);
            let iterations = u64::from_be_bytes(reader.take()?);
            let depth = u32::from_be_bytes(reader.take()?);
            let addr = u64::from_be_bytes(reader.take()?);
            let memory = Remote { addr, rkey: u32::from_be_bytes(reader.take()?) };
            Some(Self { op, mode, size, iterations, depth, memory })
        };
        let order = read(&mut reader).ok_or("a short order")?;
        order.check()?;
        Ok(order)
    }

    /// Tells what is wrong with it, if something is.
    pub(super) fn check(&self) -> Result<(), String> {
        let Self { op, size, depth, iterations, .. } = *self;
        if size > Self::SIZE_MAX {
            return Err(format!("size {size} is above {}", Self::SIZE_MAX));
        }
        if op == Op::Atomic && size != 8 {
            return Err(format!("size {size}: atomics are of 8 bytes"));
        }
        if depth == 0 || depth > Self::DEPTH_MAX {
            return Err(format!("depth {depth} is not between 1 and {}", Self::DEPTH_MAX));
        }
        if iterations == 0 {
            return Err("no iterations".to_owned());
        }
        Ok(())
    }
}

/// The server's buffer, in the private data of its reply: `"bwpf"`, address, key.
pub(super) fn encode_offer(memory: Remote) -> Vec<u8> {
    let mut out = MAGIC.to_vec();
    out.extend_from_slice(&memory.addr.to_be_bytes());
    out.extend_from_slice(&memory.rkey.to_be_bytes());
    out
}

/// Reads the private data of a server's reply.
pub(super) fn decode_offer(bytes: &[u8]) -> Option<Remote> {
    let mut reader = Reader(bytes);
    if &reader.take::<4>()? != MAGIC {
        return None;
    }
    let addr = u64::from_be_bytes(reader.take()?);
    Some(Remote { addr, rkey: u32::from_be_bytes(reader.take()?) })
}

/// Bytes not read yet.
struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*head)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_advertisement_is_what_rping_sends() {
        // As the kernel's rping 3001 bytes long sent it.
        let bytes = [0, 0, 0x55, 0xe3, 0x22, 0xab, 0x61, 0xc0, 0, 0, 0x0d, 0x2f, 0, 0, 0x0b, 0xb9];
        let advert = Advert::decode(bytes);
        let memory = Remote { addr: 0x55e3_22ab_61c0, rkey: 0xd2f };
        assert_eq!(advert, Advert { memory, len: 3001 });
        assert_eq!(advert.encode(), bytes);
    }

    #[test]
    fn pings_have_the_letters_of_rping() {
        let text = |number, size| String::from_utf8(ping_data(number, size)).unwrap();
        let first = "rdma-ping-0: ABCDEFGHIJKLMNOPQRSTUVWXYZ[\\]^_`abcdefghijklmnopqr\0";
        assert_eq!(text(0, 64), first);
        assert_eq!(text(57, 40), "rdma-ping-57: zABCDEFGHIJKLMNOPQRSTUVWX\0");
        assert_eq!(text(129, 40), "rdma-ping-129: NOPQRSTUVWXYZ[\\]^_`abcde\0");
        assert_eq!(text(1234, 4), "rdm\0");
        assert_eq!(text(0, 0), "");
    }

    fn order() -> Order {
        let memory = Remote { addr: 0x1122_3344_5566_7788, rkey: 0x99aa_bbcc };
        let (op, mode) = (Op::Write, Mode::Lat);
        Order { op, mode, size: 65_536, iterations: 1000, depth: 16, memory }
    }

    #[test]
    fn an_order_comes_out_as_it_went_in() {
        let mut bytes = order().encode();
        assert_eq!(bytes.len(), ORDER);
        bytes.resize(56, 0);
        assert_eq!(Order::decode(&bytes), Ok(order()));
        let offer = Remote { addr: 7, rkey: 9 };
        assert_eq!(decode_offer(&encode_offer(offer)), Some(offer));
        assert_eq!(decode_offer(b"bwpf1234"), None);
    }

    #[test]
    fn bad_orders_are_refused_with_a_reason() {
        let change = |at: usize, to: u8| {
            let mut bytes = order().encode();
            bytes[at] = to;
            Order::decode(&bytes).unwrap_err()
        };
        assert!(change(0, b'x').contains("not a client"));
        assert!(change(4, 2).contains("version 2"));
        assert!(change(5, 9).contains("unknown"));
        assert!(change(5, Op::Atomic as u8).contains("8 bytes"));
        assert!(change(8, 0xff).contains("above"));
        assert!(change(20, 1).contains("depth"));
        for len in 0..ORDER {
            assert!(Order::decode(&order().encode()[..len]).is_err(), "{len}");
        }
    }
}
