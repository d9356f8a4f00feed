//! In which order the sends of a connection go out, so that bursts are full.
//!
//! A device that sends packets of one size together, some 60 KiB with one call, sends a short packet along
//! with them, but only behind them. An IO is data that fills packets and a short message that tells of it:
//!
//! ```text
//!   core     D1 m1 D2 m2 D3 m3 ...
//!   long     D1 D2.. m1 ..D2 D3.. m2 ..D3 ... m3     a message goes where the next data has filled the burst
//!   short    D1 D2 D3 ... m1 m2 m3                   messages wait together
//! ```
//! Data moves forward, over messages that tell of other data. Each stays before the message that tells of
//! it [RT-47]; and whatever is complete when a signalled request is, in the core's order, is so in this one,
//! since only unsignalled requests move. Messages stay in order. Data of more than a few bursts does not go
//! before a message: who waits for the first of it should not wait for the last.

use crate::{Batch, Wr, WrKind};

/// Bursts of data that at most go before a message that tells of earlier data, and somewhat more.
const AHEAD: u64 = 4;

/// A send, or a part of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Part {
    /// Its place in the batch.
    pub(super) wr: u32,
    /// Bytes of it in parts before this one.
    pub(super) skip: u64,
    /// Bytes of this part.
    pub(super) len: u64,
}

/// Memory that is used again for every connection.
#[derive(Debug, Default)]
pub(super) struct Packer {
    /// Messages that wait.
    late: Vec<Part>,
    pub(super) parts: Vec<Part>,
}

/// Bytes of a request.
fn len(batch: &Batch, wr: &Wr) -> u64 {
    batch.mems_of(wr).iter().map(|mem| u64::from(mem.len)).sum()
}

/// How a device likes its sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Bursts {
    /// Bytes of data of a burst; 0: it does not care for the order.
    pub(super) bytes: u64,
    /// Queue pairs have room for the parts of requests.
    pub(super) split: bool,
}

impl Packer {
    /// Puts sends in order, given as places in the batch: afterwards `parts` has them.
    pub(super) fn pack(&mut self, batch: &Batch, sends: impl Iterator<Item = u32>, to: Bursts) {
        self.parts.clear();
        // Room in the burst at hand; data since the messages began to wait, and how many requests' it is.
        let (mut room, mut since, mut data) = (to.bytes, 0, 0);
        for at in sends {
            let Some(wr) = batch.wrs.get(at as usize) else { continue };
            let len = len(batch, wr);
            let whole = Part { wr: at, skip: 0, len };
            if to.bytes == 0 {
                self.parts.push(whole);
                continue;
            }
            if !matches!(wr.kind, WrKind::Write(_)) || wr.signal {
                self.late.push(whole);
                continue;
            }
            let due = !self.late.is_empty() && (data == 1 || since >= AHEAD * to.bytes);
            let at_end = len >= room && (to.split || len == room);
            if due && at_end {
                if room > 0 {
                    self.parts.push(Part { len: room, ..whole });
                }
                self.parts.append(&mut self.late);
                if len > room {
                    self.parts.push(Part { skip: room, len: len - room, ..whole });
                }
                (since, data) = (0, 0);
            } else {
                self.parts.push(whole);
            }
            since += len;
            data += 1;
            room = match len.checked_sub(room) {
                None => room - len,
                Some(more) => to.bytes - more % to.bytes,
            };
        }
        self.parts.append(&mut self.late);
    }
}

#[cfg(test)]
mod tests {
    use bowline_verbs::Remote;
    use proptest::prelude::*;

    use super::*;
    use crate::{ConnId, MemRef, PathId, RegionId, Tag};

    const PAGE: u32 = 4096;
    const BURSTS: Bursts = Bursts { bytes: 3 * PAGE as u64, split: true };

    /// IOs of so many pages of data each, and the message that tells of it.
    fn batch(pages: &[u32]) -> Batch {
        let conn = ConnId { path: PathId { slot: 0, life: 0 }, cid: 1 };
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
    fn a_message_of_long_data_goes_where_the_next_fills_a_burst() {
        assert_eq!(packed(&[4, 4, 5], BURSTS), "d0:0+4 d1:0+2 m0 d1:2+2 d2:0+1 m1 d2:1+4 m2");
        assert_eq!(packed(&[3, 3], BURSTS), "d0:0+3 d1:0+3 m0 m1");
        let whole = Bursts { split: false, ..BURSTS };
        assert_eq!(packed(&[4, 4, 5], whole), "d0:0+4 d1:0+4 d2:0+5 m0 m1 m2");
    }

    #[test]
    fn messages_of_short_data_wait_together_but_not_for_ever() {
        assert_eq!(packed(&[1, 1, 1, 1], BURSTS), "d0:0+1 d1:0+1 d2:0+1 d3:0+1 m0 m1 m2 m3");
        let many = packed(&[1; 16], BURSTS);
        let first = many.split(' ').position(|word| word == "m0");
        assert_eq!(first, Some(15), "{many}");
    }

    #[test]
    fn a_device_that_does_not_care_gets_them_as_they_are() {
        let none = Bursts { bytes: 0, split: false };
        assert_eq!(packed(&[1, 4], none), "d0:0+1 m0 d1:0+4 m1");
    }

    proptest! {
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
