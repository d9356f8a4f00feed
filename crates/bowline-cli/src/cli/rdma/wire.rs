//! What the commands exchange with their peers: the advertisement of rping, the private data of
//! `perf`, the payload of a ping.

use std::time::Duration;

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

/// Returns the payload of ping `number` as rping builds it: a name, then the characters `A` to `z`
/// repeated, starting one later with each ping, and a zero at the end.
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

/// The verb that `perf` measures.
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

/// What is measured of the verb.
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
/// 0 "bwpf" | 4 version | 5 op | 6 mode | 7 zero | 8 size | 12 count | 20 depth | 24 address
/// 32 key | 36 milliseconds | 40 warm-up | 44 number of queue pairs | 46 index | 48 client
/// ```
/// Version 2 has flags instead of the zero, and what is behind the warm-up: only clients that need
/// these send it, so that a server of before refuses what it does not know.
///
/// All numbers are big-endian; address and key are those of the client's buffer. The milliseconds
/// matter when the count is 0; what is behind the key need not be sent if it is 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Order {
    /// What to do.
    pub(super) op: Op,
    /// How.
    pub(super) mode: Mode,
    /// Bytes of a message.
    pub(super) size: u32,
    /// How many messages, or how long.
    pub(super) length: Length,
    /// Most messages under way.
    pub(super) depth: u32,
    /// The client's buffer, of `size` bytes.
    pub(super) memory: Remote,
    /// Number of messages at the start that are not measured.
    pub(super) warm_up: u32,
    /// The queue pairs.
    pub(super) pairs: Pairs,
    /// The server sends, too, as many or for as long.
    pub(super) both: bool,
    /// Another order follows when this one has been executed.
    pub(super) more: bool,
}

/// The queue pairs of a measurement, each of which has a connection with the same order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Pairs {
    /// Number of them.
    pub(super) count: u16,
    /// Which of them the connection is, from 0.
    pub(super) index: u16,
    /// Random number by which those of one client are known, 0 for a single one.
    pub(super) client: u64,
}

impl Pairs {
    pub(super) const ONE: Self = Self { count: 1, index: 0, client: 0 };
}

/// When a measurement ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Length {
    /// After so many messages.
    Count(u64),
    /// After this time, when the client leaves.
    Time(Duration),
}

impl Length {
    /// Most messages there can be.
    pub(super) const fn limit(self) -> u64 {
        match self {
            Self::Count(count) => count,
            Self::Time(_) => u64::MAX,
        }
    }
}

const MAGIC: &[u8; 4] = b"bwpf";
const VERSION: u8 = 1;
/// Version with flags and queue pairs.
const VERSION_MORE: u8 = 2;
/// Bytes of an [`Order`], of the second version.
const ORDER: usize = 56;
/// Flags of the second version.
const BOTH: u8 = 1;
const MORE: u8 = 2;

impl Order {
    /// Largest message.
    pub(super) const SIZE_MAX: u32 = 64 << 20;
    /// Most messages under way.
    pub(super) const DEPTH_MAX: u32 = 4096;
    /// Longest measurement.
    /// Most queue pairs.
    pub(super) const PAIRS_MAX: u16 = 64;
    pub(super) const TIME_MAX: Duration = Duration::from_secs(30 * 86_400);

    /// The private data.
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(ORDER);
        out.extend_from_slice(MAGIC);
        let flags = if self.both { BOTH } else { 0 } | if self.more { MORE } else { 0 };
        let is_plain = flags == 0 && self.pairs == Pairs::ONE;
        let version = if is_plain { VERSION } else { VERSION_MORE };
        out.extend_from_slice(&[version, self.op as u8, self.mode as u8, flags]);
        out.extend_from_slice(&self.size.to_be_bytes());
        let (count, time) = match self.length {
            Length::Count(count) => (count, Duration::ZERO),
            Length::Time(time) => (0, time),
        };
        out.extend_from_slice(&count.to_be_bytes());
        out.extend_from_slice(&self.depth.to_be_bytes());
        out.extend_from_slice(&self.memory.addr.to_be_bytes());
        out.extend_from_slice(&self.memory.rkey.to_be_bytes());
        out.extend_from_slice(&u32::try_from(time.as_millis()).unwrap_or(u32::MAX).to_be_bytes());
        out.extend_from_slice(&self.warm_up.to_be_bytes());
        if !is_plain {
            out.extend_from_slice(&self.pairs.count.to_be_bytes());
            out.extend_from_slice(&self.pairs.index.to_be_bytes());
            out.extend_from_slice(&self.pairs.client.to_be_bytes());
        }
        out
    }

    /// Reads the private data; the error is the text that the client is refused with.
    pub(super) fn decode(bytes: &[u8]) -> Result<Self, String> {
        let mut reader = Reader(bytes);
        if reader.take::<4>().as_ref() != Some(MAGIC) {
            return Err("not a client of bowline perf".to_owned());
        }
        let Some([version, op, mode, flags]) = reader.take::<4>() else {
            return Err("the request is too short".to_owned());
        };
        if ![VERSION, VERSION_MORE].contains(&version) {
            return Err(format!(
                "unknown version {version} of the request; this side has {VERSION} and {VERSION_MORE}"
            ));
        }
        let flags = if version == VERSION { 0 } else { flags };
        let op = [Op::Send, Op::Write, Op::Read, Op::Atomic].into_iter().find(|o| *o as u8 == op);
        let mode = [Mode::Bw, Mode::Lat].into_iter().find(|m| *m as u8 == mode);
        let (Some(op), Some(mode)) = (op, mode) else {
            return Err("unknown operation".to_owned());
        };
        let read = |reader: &mut Reader<'_>| {
            let size = u32::from_be_bytes(reader.take()?);
            let count = u64::from_be_bytes(reader.take()?);
            let depth = u32::from_be_bytes(reader.take()?);
            let addr = u64::from_be_bytes(reader.take()?);
            let memory = Remote { addr, rkey: u32::from_be_bytes(reader.take()?) };
            let [millis, warm_up] = [(); 2].map(|()| reader.take().map_or(0, u32::from_be_bytes));
            let length = match count {
                0 => Length::Time(Duration::from_millis(millis.into())),
                count => Length::Count(count),
            };
            let pairs = match version {
                VERSION => Pairs::ONE,
                _ => Pairs {
                    count: u16::from_be_bytes(reader.take()?),
                    index: u16::from_be_bytes(reader.take()?),
                    client: u64::from_be_bytes(reader.take()?),
                },
            };
            let (both, more) = (flags & BOTH != 0, flags & MORE != 0);
            Some(Self { op, mode, size, length, depth, memory, warm_up, pairs, both, more })
        };
        let order = read(&mut reader).ok_or("the request is too short")?;
        order.check()?;
        Ok(order)
    }

    /// Returns what is wrong with the order, if anything.
    pub(super) fn check(&self) -> Result<(), String> {
        let Self { op, size, depth, length, pairs, .. } = *self;
        if pairs.count == 0 || pairs.count > Self::PAIRS_MAX || pairs.index >= pairs.count {
            let (count, most) = (pairs.count, Self::PAIRS_MAX);
            return Err(format!("{count} queue pairs are not between 1 and {most}"));
        }
        if self.mode == Mode::Lat && (self.both || pairs.count > 1) {
            return Err("latency is measured in one direction, with one queue pair".to_owned());
        }
        if size > Self::SIZE_MAX {
            return Err(format!("size {size} is above {}", Self::SIZE_MAX));
        }
        if op == Op::Atomic && size != 8 {
            return Err(format!("size {size}: atomics have 8 bytes"));
        }
        if depth == 0 || depth > Self::DEPTH_MAX {
            return Err(format!("depth {depth} is not between 1 and {}", Self::DEPTH_MAX));
        }
        match length {
            Length::Count(count) if count > 0 && count <= u64::from(self.warm_up) => {
                Err(format!("a count of {count} is not more than the warm-up"))
            }
            Length::Count(0) => Err("a count of 0: there is nothing to measure".to_owned()),
            // The order carries whole milliseconds.
            Length::Time(time) if time < Duration::from_millis(1) => {
                Err("neither a count nor a time of at least 1 ms".to_owned())
            }
            Length::Time(time) if time > Self::TIME_MAX => {
                Err(format!("{} s is longer than 30 days", time.as_secs()))
            }
            Length::Count(_) | Length::Time(_) => Ok(()),
        }
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
        Order {
            op,
            mode,
            size: 65_536,
            length: Length::Count(1000),
            depth: 16,
            memory,
            warm_up: 7,
            pairs: Pairs::ONE,
            both: false,
            more: false,
        }
    }

    #[test]
    fn an_order_of_several_queue_pairs_and_both_directions_is_of_the_second_version() {
        let pairs = Pairs { count: 4, index: 3, client: 0x0123_4567_89ab_cdef };
        let wanted = Order { mode: Mode::Bw, warm_up: 0, pairs, both: true, more: true, ..order() };
        let mut bytes = wanted.encode();
        assert_eq!((bytes.len(), bytes[4], bytes[7]), (ORDER, 2, 3));
        assert_eq!(Order::decode(&bytes), Ok(wanted));
        assert!(Order::decode(&bytes[..ORDER - 1]).is_err());
        bytes[47] = 4;
        assert!(Order::decode(&bytes).unwrap_err().contains("queue pairs"));
        let error = Order::decode(&Order { mode: Mode::Lat, ..wanted }.encode()).unwrap_err();
        assert!(error.contains("one direction"), "{error}");
    }

    #[test]
    fn an_order_comes_out_as_it_went_in() {
        let mut bytes = order().encode();
        assert_eq!((bytes.len(), bytes[4], bytes[7]), (44, 1, 0), "as all servers know it");
        bytes.resize(56, 0);
        assert_eq!(Order::decode(&bytes), Ok(order()));
        let timed = Order { length: Length::Time(Duration::from_millis(2500)), ..order() };
        assert_eq!(Order::decode(&timed.encode()), Ok(timed));
        assert_eq!(timed.length.limit(), u64::MAX);
        // A client with a message count may leave out the milliseconds.
        let cold = Order { warm_up: 0, ..order() };
        assert_eq!(Order::decode(&order().encode()[..36]), Ok(cold));
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
        assert!(change(4, 3).contains("version 3"));
        assert!(change(5, 9).contains("unknown"));
        assert!(change(5, Op::Atomic as u8).contains("8 bytes"));
        assert!(change(8, 0xff).contains("above"));
        assert!(change(20, 1).contains("depth"));
        for len in 0..36 {
            assert!(Order::decode(&order().encode()[..len]).is_err(), "{len}");
        }
        let error = Order::decode(&Order { warm_up: 1000, ..order() }.encode()).unwrap_err();
        assert!(error.contains("warm-up"), "{error}");
        for (length, word) in [
            (Length::Count(0), "at least 1 ms"),
            (Length::Time(Duration::ZERO), "at least 1 ms"),
            (Length::Time(Duration::MAX), "30 days"),
        ] {
            let error = Order::decode(&Order { length, ..order() }.encode()).unwrap_err();
            assert!(error.contains(word), "{error}");
        }
    }
}
