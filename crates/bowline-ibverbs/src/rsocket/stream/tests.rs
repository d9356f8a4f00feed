//! Two ends without a network between, and peers that do not follow the protocol.

use super::*;

const RING: u64 = 0x1000_0000;
const TABLE: u64 = 0x2000_0000;

/// An end with its memory.
struct End {
    stream: Stream,
    table: Vec<u8>,
    ring: Vec<u8>,
    /// What the program has given to be sent and has read.
    given: usize,
    got: Vec<u8>,
}

fn own(receive_ring: u32, credits: u16, send_ring: usize) -> Own {
    Own {
        sends: 4,
        credits,
        send_ring,
        inline: 8,
        receive_ring: Region { addr: RING, key: 1, len: receive_ring },
        table: Region { addr: TABLE, key: 2, len: WINDOWS as u32 },
        maps: 2,
    }
}

impl End {
    fn new(own: Own, peer: Own) -> Self {
        let table = vec![0; WINDOWS * WINDOW_LEN + 2 * MAP_LEN];
        let ring = vec![0; own.receive_ring.len as usize];
        let stream = Stream::new(own, peer.hello());
        Self { stream, table, ring, given: 0, got: Vec::new() }
    }

    /// Takes in a write of the peer.
    fn take(&mut self, to: Remote, bytes: &[u8], immediate: u32) -> Result<(), Violation> {
        let (memory, base) = match to.rkey {
            1 => (&mut self.ring, RING),
            2 => (&mut self.table, TABLE),
            _ => (&mut self.ring, to.addr),
        };
        let at = (to.addr - base) as usize;
        memory[at..at + bytes.len()].copy_from_slice(bytes);
        let table = &self.table;
        self.stream.on_message(immediate, bytes.len() as u32, |at, out: &mut [u8]| {
            out.copy_from_slice(&table[at..at + out.len()]);
        })
    }

    fn read(&mut self, most: usize) {
        let len = self.stream.readable().min(most);
        for (at, len) in self.stream.pieces(len) {
            self.got.extend_from_slice(&self.ring[at..at + len]);
        }
        self.stream.consume(len);
    }
}

/// Byte number `n` of what is sent.
fn byte(n: usize) -> u8 {
    (n % 251) as u8
}

/// Carries what one end has to send to the other one; returns whether there was anything.
fn carry(from: &mut End, to: &mut End) -> bool {
    let mut has_sent = false;
    while let Some(Update { to: at, bytes, immediate }) = from.stream.update() {
        to.take(at, &bytes, immediate).unwrap();
        from.stream.on_sent();
        has_sent = true;
    }
    has_sent
}

/// Sends up to `most` bytes.
fn send(from: &mut End, to: &mut End, most: usize) -> usize {
    let mut done = 0;
    while let Some(write) = from.stream.send(most - done) {
        let bytes: Vec<u8> = (from.given..from.given + write.len).map(byte).collect();
        from.given += write.len;
        done += write.len;
        to.take(write.to, &bytes, write.immediate.unwrap()).unwrap();
        from.stream.on_sent();
    }
    done
}

/// [RSK-4], [RSK-5], [RSK-6]: in pieces of all sizes, whatever the sizes of rings and queues are,
/// and further than numbers of 16 bits count.
#[test]
fn a_stream_arrives_whole_and_in_order() {
    for (ring, credits, send_ring, total) in
        [(64, 2, 16, 3000), (4096, 384, 8192, 200_000), (1 << 17, 16, 1 << 17, 3 << 20)]
    {
        let one = own(ring, credits, send_ring);
        let (mut from, mut to) = (End::new(one, one), End::new(one, one));
        let mut size = 1;
        while to.got.len() < total {
            size = size * 7 % 5003 + 1;
            let moved = send(&mut from, &mut to, size);
            to.read(size / 2 + 1);
            let has_news = carry(&mut to, &mut from) | carry(&mut from, &mut to);
            assert!(moved > 0 || has_news || to.stream.readable() > 0, "stuck at {}", to.got.len());
        }
        let wanted: Vec<u8> = (0..to.got.len()).map(byte).collect();
        assert!(to.got == wanted, "ring {ring}, credits {credits}");
    }
}

/// [RSK-6]: as captured, the limit counts on modulo 2^16.
#[test]
fn credits_count_further_than_16_bits() {
    let one = own(4096, 384, 4096);
    let (mut from, mut to) = (End::new(one, one), End::new(one, one));
    for n in 0..70_000 {
        assert_eq!(send(&mut from, &mut to, 1), 1, "message {n}");
        to.read(1);
        carry(&mut to, &mut from);
    }
}

/// [RSK-5], [RSK-6]: what a receiver of 2 x 8192 sends in capture t6 after what it has received and
/// read.
#[test]
fn windows_and_credits_are_announced_when_rdma_core_does_it() {
    let one = own(16384, 384, 1 << 16);
    let mut end = End::new(one, one);
    let entry = |at: u64| Region { addr: RING + at, key: 1, len: 8192 }.entry().to_vec();
    let table = |entry: u64| Remote { addr: TABLE + entry * 16, rkey: 2 };
    let news = |end: &mut End| {
        let update = end.stream.update().map(|update| (update.to, update.bytes, update.immediate));
        end.stream.on_sent();
        update
    };
    let receive = |end: &mut End, len: u32| {
        end.stream.on_message(len, len, |_, _: &mut [u8]| {}).unwrap();
    };
    assert_eq!(news(&mut end), Some((table(1), entry(8192), 0x8000_0180)));
    for len in [2048, 4096, 2048] {
        receive(&mut end, len);
    }
    end.stream.consume(3100);
    assert_eq!(news(&mut end), None);
    receive(&mut end, 8192);
    end.stream.consume(9000);
    assert_eq!(news(&mut end), Some((table(0), entry(0), 0x8000_0184)));
    assert_eq!(news(&mut end), None);
}

/// [RSK-7]: a window is announced to a peer that has given no more credits.
#[test]
fn messages_without_data_take_no_credits() {
    let one = own(64, 2, 64);
    let (mut from, mut to) = (End::new(one, one), End::new(one, one));
    assert_eq!(send(&mut from, &mut to, 1) + send(&mut from, &mut to, 1), 2);
    assert_eq!(send(&mut from, &mut to, 1), 0);
    assert!(carry(&mut from, &mut to));
    to.read(2);
    assert!(carry(&mut to, &mut from));
    assert_eq!(send(&mut from, &mut to, 1), 1);
}

/// [RSK-8]
#[test]
fn an_end_is_sent_once_and_what_was_sent_before_can_be_read() {
    let one = own(64, 8, 64);
    let (mut from, mut to) = (End::new(one, one), End::new(one, one));
    send(&mut from, &mut to, 5);
    from.stream.shut(false);
    assert!(from.stream.is_closed_for_sends() && !from.stream.is_all_sent());
    carry(&mut from, &mut to);
    from.stream.shut(false);
    assert!(!carry(&mut from, &mut to) && from.stream.is_all_sent());
    assert!(!to.stream.is_at_end());
    to.read(5);
    assert!(to.stream.is_at_end() && !to.stream.has_peer_gone());
    assert_eq!(send(&mut to, &mut from, 3), 3);
    to.stream.shut(false);
    let ends: Vec<u32> =
        std::iter::from_fn(|| to.stream.update()).map(|update| update.immediate).collect();
    assert_eq!(ends.last(), Some(&0xe000_0000), "both have ended");
}

/// [RSK-9], [RSK-10]
#[test]
fn mappings_come_before_the_data_behind_them() {
    let one = own(4096, 8, 4096);
    let (mut from, mut to) = (End::new(one, one), End::new(one, one));
    let region = Region { addr: 0x9000, key: 7, len: 100 };
    from.stream.give(1, Map { offset: 1000, region });
    assert!(from.stream.send(1).is_none());
    carry(&mut from, &mut to);
    assert_eq!(send(&mut from, &mut to, 1), 1);
    assert_eq!(to.stream.mapped(1010), Some((Remote { addr: 0x900a, rkey: 7 }, 90)));
    assert_eq!([999, 1100].map(|offset| to.stream.mapped(offset)), [None, None]);
    let write = to.stream.write_mapped(Remote { addr: 0x900a, rkey: 7 }, 20).unwrap();
    assert_eq!((write.len, write.immediate), (20, None));
    // One that is taken back in time is never given.
    from.stream.give(0, Map { offset: 0, region });
    from.stream.take_back(0);
    carry(&mut from, &mut to);
    assert_eq!(to.stream.mapped(0), None);
}

/// [RSK-3] to [RSK-9]: each of these ends the connection.
#[test]
fn a_peer_that_does_not_follow_the_protocol_is_found_out() {
    let one = own(64, 2, 64);
    let zeroes = |_: usize, out: &mut [u8]| out.fill(0);
    let sense = |_: usize, out: &mut [u8]| out.fill(1);
    let fresh = || Stream::new(one, one.hello());
    for (immediate, len, why) in [
        (0x2000_0000, 0, "unknown kind"),
        (0xe000_0001, 0, "unknown control"),
        (0x0000_0004, 5, "another length than said"),
        (0x0000_0021, 0x21, "beyond the window"),
        (0x1fff_ffff, 0x1fff_ffff, "far beyond the window"),
        (0x8000_0001, 15, "no whole window"),
        (0x8000_0001, 16, "a window without memory"),
        (0xc000_0002, 24, "a mapping that the table does not have"),
        (0xdfff_ffff, 24, "a mapping far behind the table"),
        (0xc000_0000, 24, "a mapping without memory"),
        (0xc000_0000, 0, "a mapping that is not written"),
        (0xe000_0000, 1, "an end with bytes"),
    ] {
        assert_eq!(fresh().on_message(immediate, len, zeroes), Err(Violation), "{why}");
    }
    let mut stream = fresh();
    assert_eq!([1, 1, 1].map(|len| stream.on_message(len, len, zeroes)), {
        [Ok(()), Ok(()), Err(Violation)]
    });
    let mut stream = fresh();
    assert_eq!(stream.on_message(0x8000_0001, 16, sense), Ok(()));
    assert_eq!(stream.on_message(0x8000_0001, 16, sense), Err(Violation), "a third window");
    let mut stream = fresh();
    assert_eq!(stream.on_message(0xe000_0002, 0, zeroes), Ok(()));
    assert_eq!(stream.on_message(1, 1, zeroes), Err(Violation), "data after the end");
}

/// Whatever a peer sends, nothing panics, and no more can be read than was written.
#[test]
fn any_messages_at_all_are_survived() {
    let mut state = 7_u64;
    let mut random = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    for _ in 0..2000 {
        let one = own(64, 3, 64);
        let mut stream = Stream::new(one, one.hello());
        let mut written = 0;
        for _ in 0..50 {
            let kind = (random() % 8) as u32;
            let value = (random() % 40) as u32;
            let len = [value, 0, 16, 24][(random() % 4) as usize];
            let seed = random();
            let table = |at: usize, out: &mut [u8]| {
                assert!(at + out.len() <= WINDOWS * WINDOW_LEN + 2 * MAP_LEN);
                out.fill((seed % 3) as u8);
            };
            if stream.on_message(kind << 29 | value, len, table).is_err() {
                break;
            }
            written += len as usize;
            assert!(stream.readable() <= written.min(64));
            let _ = stream.send(random() as usize % 99);
            let _ = stream.update();
            stream.consume(random() as usize % 9);
            stream.on_sent();
            let _ = stream.mapped(random());
        }
    }
}
