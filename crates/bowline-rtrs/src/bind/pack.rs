//! The order in which the sends of a connection are posted, so that bursts are full.
//!
//! The device sends packets of one size together, some 60 KiB with one call; a shorter packet can
//! only be the last of them. An IO is data and a short message that announces it:
//!
//! ```text
//!   core     D1 m1 D2 m2 D3 m3 ...
//!   long     D1 m1 D2 m2 D3 m3 ...                 data of many packets: its own message [REQ-26]
//!   middling D1 D2.. m1 ..D2 D3.. m2 ..D3 ... m3   a message goes where data has filled the burst
//!   short    D1 D2 D3 ... m1 m2 m3                 messages wait together
//!   two      D1' M1' D2' M2' D3' M3' ...           data and message in two packets of one size
//!   uneven   D1' M1' D2' M2' D3' M3' ...           the message takes along what fills no packet
//! ```
//! Long, middling and short data fills packets; "two" is data that fills at most two packets
//! together with its message; "uneven" is any other. The last two are for messages that go to the
//! memory behind their data.
//!
//! Data moves forward, before messages that announce other data. It stays before its own message
//! [RT-47]. Whatever is complete when a signalled request is, in the core's order, is also complete
//! in this order, since only unsignalled requests move. Messages stay in order. At most a few
//! bursts of data go before a message, so that the first request need not wait for the last.

use crate::{Batch, Wr, WrKind};

/// Bursts of data that may go before a message announcing earlier data, or none; beyond that only
/// data that fills the current burst.
const AHEAD: u64 = 4;
/// Data of a multiple of this many bytes fills packets of every MTU.
const EVEN: u64 = 4096;

/// Longer data is sent by the soft device as one message (`PER_PACKET_MAX` of `bowline-roce`). Its
/// announcing message goes right behind it: the first of its packets begins a burst, and the last
/// has room for a short one behind it.
const LONG: u64 = 120 << 10;

/// Bytes that an immediate adds to a packet.
const IMM: u64 = 4;

/// A send work request, or a part of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Part {
    /// Index of the work request in the batch.
    pub(super) wr: u32,
    /// Bytes of it in earlier parts.
    pub(super) skip: u64,
    /// Bytes of it in this part.
    pub(super) len: u64,
    /// Work request whose rest, from this offset on, goes before this part's bytes.
    pub(super) rest: Option<(u32, u64)>,
}

/// Memory reused for every connection.
#[derive(Debug, Default)]
pub(super) struct Packer {
    /// Deferred messages.
    deferred: Vec<Part>,
    pub(super) parts: Vec<Part>,
}

/// Bytes of a work request.
fn bytes(batch: &Batch, wr: &Wr) -> u64 {
    batch.mems_of(wr).iter().map(|mem| u64::from(mem.len)).sum()
}

/// The batching behaviour of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Bursts {
    /// Bytes of data in a burst; 0: the device does not batch.
    pub(super) bytes: u64,
    /// Queue pairs have room for split requests.
    pub(super) split: bool,
    /// Most bytes of data in a packet.
    pub(super) packet: u64,
}

/// Splits data, so that its last bytes go with its message, which must go to the adjacent memory.
/// If two packets hold both, each gets half, so that they have equal size and fill bursts without
/// waiting for others' data. Otherwise the first part is the data that fills whole packets. `None`
/// if that is all of it, or if the message cannot take the rest.
fn split_tail(batch: &Batch, data: Part, message: u32, packet: u64) -> Option<(Part, Part)> {
    let wr = |at: u32| batch.wrs.get(at as usize);
    let (WrKind::Write(to), WrKind::WriteImm(behind, _)) = (wr(data.wr)?.kind, wr(message)?.kind)
    else {
        return None;
    };
    if behind.rkey != to.rkey || behind.addr != to.addr.wrapping_add(data.len) {
        return None;
    }
    let own = bytes(batch, wr(message)?);
    let all = data.len + own;
    let second = all.checked_sub(IMM)? / 2;
    let first = all - second;
    // Including padding; for one remainder modulo 8 there are no such halves.
    let alike = first.next_multiple_of(4) == second.next_multiple_of(4) + IMM;
    let halves = alike && first < data.len && first <= packet;
    let full = data.len - data.len.checked_rem(packet)?;
    let fits = (all - full).next_multiple_of(4) + IMM <= packet;
    let uneven = 0 < full && full < data.len && fits;
    let len = if halves { first } else { full };
    let message = Part { wr: message, skip: 0, len: own, rest: Some((data.wr, len)) };
    (halves || uneven).then_some((Part { len, ..data }, message))
}

impl Packer {
    /// Puts sends in order, given as places in the batch: afterwards `parts` has them.
    pub(super) fn pack(&mut self, batch: &Batch, sends: impl Iterator<Item = u32>, to: Bursts) {
        self.parts.clear();
        // Room in the burst at hand. Data since messages last went, and how many requests' it is.
        let (mut room, mut since, mut data) = (to.bytes, 0, 0);
        // The last data was long, so that no messages wait.
        let mut long = false;
        let mut sends = sends.peekable();
        while let Some(at) = sends.next() {
            let Some(wr) = batch.wrs.get(at as usize) else { continue };
            let len = bytes(batch, wr);
            let whole = Part { wr: at, skip: 0, len, rest: None };
            if to.bytes == 0 {
                self.parts.push(whole);
                continue;
            }
            if !matches!(wr.kind, WrKind::Write(_)) || wr.signal {
                let place = if long { &mut self.parts } else { &mut self.deferred };
                place.push(whole);
                continue;
            }
            long = len > LONG;
            let pair =
                sends.peek().and_then(|message| split_tail(batch, whole, *message, to.packet));
            if long || pair.is_some() {
                self.parts.append(&mut self.deferred);
                if let Some((first, message)) = pair {
                    sends.next();
                    self.parts.extend([first, message]);
                } else {
                    self.parts.push(whole);
                }
                (room, since, data) = (to.bytes, 0, 0);
                continue;
            }
            let even = len.is_multiple_of(EVEN);
            let much = since + len > AHEAD * to.bytes;
            let mut first = 0;
            if !self.deferred.is_empty() && (data == 1 || much) {
                if even && (len == room || len > room && to.split) {
                    first = room;
                    self.parts.push(Part { len: first, ..whole });
                } else if much {
                    room = to.bytes;
                }
                if first > 0 || much {
                    self.parts.append(&mut self.deferred);
                    (since, data) = (0, 0);
                }
            }
            if len > first || len == 0 {
                self.parts.push(Part { skip: first, len: len - first, ..whole });
            }
            since += len - first;
            data += 1;
            room = match len.checked_sub(room) {
                // A packet that is not full ends the burst.
                _ if !even => to.bytes,
                None => room - len,
                Some(more) => to.bytes - more % to.bytes,
            };
        }
        self.parts.append(&mut self.deferred);
    }
}

#[cfg(test)]
mod tests {
    use bowline_verbs::Remote;
    use proptest::prelude::*;

    use super::*;
    use crate::{ConnId, MemRef, PathId, RegionId, Tag};

    const PAGE: u32 = 4096;
    const BURSTS: Bursts = Bursts { bytes: 3 * PAGE as u64, split: true, packet: PAGE as u64 };

    /// IOs of so many pages of data each, and the message that tells of it.
    fn batch(pages: &[u32]) -> Batch {
        let conn = ConnId { path: PathId { slot: 0, generation: 0 }, cid: 1 };
        let mut batch = Batch::default();
        for (io, pages) in (0_u32..).zip(pages) {
            let mem = |len| [MemRef { region: RegionId(1), offset: 0, len }];
            let to = Remote { addr: 0, rkey: io };
            batch.send(conn, Tag(2 * io), WrKind::Write(to), &mem(pages * PAGE), false);
            batch.send(conn, Tag(2 * io + 1), WrKind::WriteImm(to, io), &mem(60), io % 8 == 7);
        }
        batch
    }

    /// Parts as words: `d0:1+2` are pages 1 and 2 of the data of IO 0, `m0` the message.
    fn packed(pages: &[u32], to: Bursts) -> String {
        let batch = batch(pages);
        let mut packer = Packer::default();
        packer.pack(&batch, 0..batch.wrs.len() as u32, to);
        let page = u64::from(PAGE);
        let word = |part: &Part| match part.wr % 2 {
            0 => format!("d{}:{}+{}", part.wr / 2, part.skip / page, part.len / page),
            _ => format!("m{}", part.wr / 2),
        };
        packer.parts.iter().map(word).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn a_message_of_middling_data_goes_where_the_next_fills_a_burst() {
        assert_eq!(packed(&[4, 4, 5], BURSTS), "d0:0+4 d1:0+2 m0 d1:2+2 d2:0+1 m1 d2:1+4 m2");
        assert_eq!(packed(&[3, 3], BURSTS), "d0:0+3 d1:0+3 m0 m1");
        let whole = Bursts { split: false, ..BURSTS };
        assert_eq!(packed(&[4, 4, 5], whole), "d0:0+4 d1:0+4 m0 m1 d2:0+5 m2");
    }

    #[test]
    fn messages_of_short_data_wait_together_but_not_for_ever() {
        assert_eq!(packed(&[1, 1, 1, 1], BURSTS), "d0:0+1 d1:0+1 d2:0+1 d3:0+1 m0 m1 m2 m3");
        let many = packed(&[1; 16], BURSTS);
        let first = many.split(' ').position(|word| word == "m0");
        assert_eq!(first, Some(12), "{many}");
    }

    #[test]
    fn a_device_that_does_not_care_gets_them_as_they_are() {
        let none = Bursts { bytes: 0, split: false, ..BURSTS };
        assert_eq!(packed(&[1, 4], none), "d0:0+1 m0 d1:0+4 m1");
    }

    /// Requests in a row: so many bytes of data, or a message.
    fn row(items: &[Option<u32>]) -> Batch {
        let conn = ConnId { path: PathId { slot: 0, generation: 0 }, cid: 1 };
        let mut batch = Batch::default();
        for (at, len) in (0_u32..).zip(items) {
            let mem = [MemRef { region: RegionId(1), offset: 0, len: len.unwrap_or(60) }];
            let to = Remote { addr: 0, rkey: at };
            let kind = len.map_or(WrKind::WriteImm(to, at), |_| WrKind::Write(to));
            batch.send(conn, Tag(at), kind, &mem, false);
        }
        batch
    }

    /// Pages of data, as words: `d` and page counts as in `packed`, after the place of the request.
    fn packed_row(items: &[Option<u32>], to: Bursts) -> String {
        let batch = row(&items.iter().map(|pages| pages.map(|n| n * PAGE)).collect::<Vec<_>>());
        let mut packer = Packer::default();
        packer.pack(&batch, 0..batch.wrs.len() as u32, to);
        let page = u64::from(PAGE);
        let word = |part: &Part| match items[part.wr as usize] {
            Some(_) => format!("d{}:{}+{}", part.wr, part.skip / page, part.len / page),
            None => format!("m{}", part.wr),
        };
        packer.parts.iter().map(word).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn no_message_waits_for_much_data() {
        let (m, d) = (None, Some);
        assert_eq!(packed_row(&[m, m, d(100), m], BURSTS), "m0 m1 d2:0+100 m3");
        let short = [d(1), m, d(1), m, d(100), m];
        assert_eq!(packed_row(&short, BURSTS), "d0:0+1 d2:0+1 m1 m3 d4:0+100 m5");
        // Of what is not long, some.
        let many = [d(1), m, d(8), m, d(8), m, d(3), m];
        assert_eq!(
            packed_row(&many, BURSTS),
            "d0:0+1 d2:0+2 m1 d2:2+6 d4:0+3 m3 d4:3+5 d6:0+1 m5 d6:1+2 m7"
        );
        let whole = Bursts { split: false, ..BURSTS };
        assert_eq!(packed_row(&many, whole), "d0:0+1 d2:0+8 m1 m3 d4:0+8 d6:0+3 m5 m7");
    }

    #[test]
    fn long_data_is_followed_by_its_message() {
        assert_eq!(
            packed(&[31, 1, 1, 31, 31], BURSTS),
            "d0:0+31 m0 d1:0+1 d2:0+1 m1 m2 d3:0+31 m3 d4:0+31 m4"
        );
    }

    #[test]
    fn data_that_does_not_fill_packets_is_not_split() {
        let [four, uneven] = [4 * PAGE, 5 * PAGE - 100].map(Some);
        let batch = row(&[four, None, uneven, None, four, None]);
        let mut packer = Packer::default();
        packer.pack(&batch, 0..6, BURSTS);
        let parts: Vec<_> = packer.parts.iter().map(|part| (part.wr, part.skip)).collect();
        let page = 4096;
        assert_eq!(parts, [(0, 0), (2, 0), (4, 0), (1, 0), (3, 0), (4, 3 * page), (5, 0)]);
    }

    /// IOs of so many bytes of data and message, which goes to the memory behind the data.
    fn ios(lens: &[(u32, u32)]) -> Batch {
        let conn = ConnId { path: PathId { slot: 0, generation: 0 }, cid: 1 };
        let mut batch = Batch::default();
        for (io, (data, message)) in (0_u32..).zip(lens) {
            let mem = |len| [MemRef { region: RegionId(1), offset: 0, len }];
            let to = |skip: &u32| Remote { addr: 1000 + u64::from(*skip), rkey: io };
            batch.send(conn, Tag(2 * io), WrKind::Write(to(&0)), &mem(*data), false);
            let kind = WrKind::WriteImm(to(data), io);
            batch.send(conn, Tag(2 * io + 1), kind, &mem(*message), io % 8 == 7);
        }
        batch
    }

    /// Parts of IOs: place, bytes skipped and bytes; of a message what goes before it, too.
    fn packed_ios(lens: &[(u32, u32)], to: Bursts) -> Vec<Part> {
        let batch = ios(lens);
        let mut packer = Packer::default();
        packer.pack(&batch, 0..batch.wrs.len() as u32, to);
        packer.parts
    }

    /// [RT-97]
    #[test]
    fn data_of_a_packet_shares_two_of_one_size_with_its_message() {
        let part = |wr, skip, len, rest| Part { wr, skip, len, rest };
        let pair = |io: u32, first, own| {
            [part(2 * io, 0, first, None), part(2 * io + 1, 0, own, Some((2 * io, first)))]
        };
        let parts = packed_ios(&[(4096, 40), (4096, 44)], BURSTS);
        assert_eq!(parts, [pair(0, 2070, 40), pair(1, 2072, 44)].concat());
        // Data of several packets goes before what waits for it, and that before the next pair.
        let parts = packed_ios(&[(8192, 40), (4096, 40)], BURSTS);
        let long = [part(0, 0, 8192, None), part(1, 0, 40, None)];
        assert_eq!(parts, [&long[..], &pair(1, 2070, 40)].concat());
        // Not so if packets are shorter, or the device does not care.
        for other in [Bursts { packet: 2048, ..BURSTS }, Bursts { bytes: 0, ..BURSTS }] {
            let parts = packed_ios(&[(4096, 40)], other);
            assert_eq!(parts, [part(0, 0, 4096, None), part(1, 0, 40, None)]);
        }
        // Nor is it if the message goes elsewhere.
        assert_eq!(packed(&[1], BURSTS), "d0:0+1 m0");
    }

    #[test]
    fn a_message_takes_along_what_fills_no_packet() {
        let part = |wr, skip, len, rest| Part { wr, skip, len, rest };
        let pair = |io: u32, first, own| {
            [part(2 * io, 0, first, None), part(2 * io + 1, 0, own, Some((2 * io, first)))]
        };
        // Also where it has nothing to say but its immediate, and where both fit two packets of one
        // size.
        let ios =
            [(10_240, 40), (10_240, 0), (5120, 0), (100_000, 40), (124_000, 0), (300_001, 40)];
        let parts = packed_ios(&ios, BURSTS);
        let pairs = [(8192, 40), (8192, 0), (2562, 0), (98_304, 40), (122_880, 0), (299_008, 40)];
        let expected = (0..).zip(pairs).map(|(io, (first, own))| pair(io, first, own));
        assert_eq!(parts, expected.collect::<Vec<_>>().concat());
        // Unless it would not fit the packet, its immediate included, or the data fills all of its
        // own.
        let whole = |data, own| [part(0, 0, data, None), part(1, 0, own, None)];
        for (data, own) in [(12_280, 40), (12_285, 0), (8192, 0), (98_304, 40)] {
            assert_eq!(packed_ios(&[(data, own)], BURSTS), whole(data.into(), own.into()));
        }
    }

    fn data() -> impl Strategy<Value = u32> {
        prop_oneof![Just(4096_u32), 1_u32..4097, 4097_u32..40_000, 4097_u32..400_000]
    }

    fn lengths() -> impl Strategy<Value = u32> {
        prop_oneof![(0_u32..60).prop_map(|pages| pages * PAGE), 0_u32..300_000]
    }

    proptest! {
        /// [RT-47]
        #[test]
        fn every_byte_goes_once_and_none_before_too_many(
            items in prop::collection::vec(prop::option::of(lengths()), 0..40),
            bytes in prop::sample::select(vec![512_u64, 4096, 12_288, 62_464]),
            split: bool,
        ) {
            let batch = row(&items);
            let mut packer = Packer::default();
            packer.pack(&batch, 0..batch.wrs.len() as u32, Bursts { bytes, split, ..BURSTS });
            let mut gone = vec![0; items.len()];
            let mut last = None;
            let len = |at: usize| u64::from(items[at].unwrap_or(0));
            for part in &packer.parts {
                let at = part.wr as usize;
                if items[at].is_some() {
                    prop_assert_eq!(part.skip, gone[at]);
                    prop_assert!(part.len == len(at) || split && len(at) % EVEN == 0);
                    gone[at] += part.len;
                    continue;
                }
                prop_assert!(last < Some(at), "messages stay in order");
                last = Some(at);
                let (before, after) = gone.split_at(at);
                prop_assert!(before.iter().enumerate().all(|(at, gone)| *gone == len(at)));
                let ahead: u64 = after.iter().sum();
                prop_assert!(ahead <= (AHEAD + 1) * bytes, "{} bytes", ahead);
            }
            prop_assert!(gone.iter().enumerate().all(|(at, gone)| *gone == len(at)));
        }

        /// [RT-97]
        #[test]
        fn pairs_are_alike_and_whole(lens in prop::collection::vec((data(), 0_u32..300), 0..20)) {
            let mut gone = vec![0; lens.len()];
            let mut next = 0;
            let mut pair = None;
            for part in packed_ios(&lens, BURSTS) {
                let io = (part.wr / 2) as usize;
                let (data, message) = (u64::from(lens[io].0), u64::from(lens[io].1));
                if part.wr % 2 == 0 {
                    prop_assert_eq!(part.skip, gone[io]);
                    gone[io] += part.len;
                    pair = Some((part.wr, part.len));
                    continue;
                }
                prop_assert_eq!((io, part.len), (next, message), "messages stay in order");
                next += 1;
                let (size, packet) = (data + message, BURSTS.packet);
                let over = data % packet;
                if let Some((of, skip)) = part.rest {
                    // Right behind the data it takes a part of.
                    prop_assert_eq!(pair, Some((part.wr - 1, skip)));
                    prop_assert_eq!((of, gone[io]), (part.wr - 1, skip));
                    let second = (size - skip).next_multiple_of(4) + IMM;
                    let alike = skip.next_multiple_of(4) == second && second <= packet;
                    prop_assert!(alike || skip == data - over && second <= packet);
                } else {
                    prop_assert_eq!(gone[io], data);
                    // Only what is longer, is mostly message, or has no such halves is not cut in
                    // two of one size.
                    let halves = size <= 2 * packet - IMM && data >= message + 8 && size % 8 != 5;
                    let rest = (over + message).next_multiple_of(4) + IMM;
                    let fills = over == 0 || data < packet || rest > packet;
                    prop_assert!(!halves && fills, "{} and {}", data, message);
                }
            }
            prop_assert_eq!(next, lens.len());
        }

        /// [RT-47]
        #[test]
        fn every_byte_goes_once_and_before_its_message(
            pages in prop::collection::vec(0_u32..9, 0..40),
            split: bool,
        ) {
            let batch = batch(&pages);
            let mut packer = Packer::default();
            packer.pack(&batch, 0..batch.wrs.len() as u32, Bursts { split, ..BURSTS });
            let mut gone = vec![0; pages.len()];
            let (mut message, mut parts) = (0, vec![0; pages.len()]);
            for part in &packer.parts {
                let io = (part.wr / 2) as usize;
                if part.wr % 2 == 0 {
                    prop_assert_eq!(part.skip, gone[io]);
                    gone[io] += part.len;
                    parts[io] += 1;
                } else {
                    prop_assert_eq!(io, message);
                    prop_assert_eq!(gone[io], u64::from(pages[io] * PAGE));
                    message += 1;
                }
            }
            prop_assert_eq!(message, pages.len());
            prop_assert!(parts.iter().all(|parts| *parts <= 2));
        }
    }
}
