//! What holds for whatever a server sends: checked with random streams here, and by the fuzz target
//! `nbd_server`.

use std::collections::HashMap;

use super::handshake;
use super::replies::{Asked, Replies, Requests};
use super::script::Script;

/// Reads and others in flight, by small cookies.
struct InFlight(HashMap<u64, (Asked, Vec<u8>)>);

impl Requests for InFlight {
    fn find(&mut self, cookie: u64) -> Option<Asked> {
        self.0.get(&cookie).map(|(asked, _)| *asked)
    }

    fn data(&mut self, cookie: u64, at: u32, bytes: &[u8]) {
        let (asked, came) = self.0.get_mut(&cookie).expect("one that is in flight");
        assert!(asked.is_read && !bytes.is_empty());
        for byte in &mut came[at as usize..][..bytes.len()] {
            assert_eq!(*byte, 0, "twice");
            *byte = 1;
        }
    }

    fn ended(&mut self, cookie: u64, error: u32) {
        let (asked, came) = self.0.remove(&cookie).expect("one that is in flight");
        let is_whole = came.iter().all(|byte| *byte == 1);
        assert!(!asked.is_read || error != 0 || is_whole, "bytes that never came");
    }
}

/// Checks a connection: with the first bit of the first byte a handshake comes first, with the
/// second replies are chunks; what follows are replies.
pub(super) fn check_stream(bytes: &[u8]) {
    let Some((&how, rest)) = bytes.split_first() else { return };
    let mut script = Script::new(rest);
    let mut is_structured = how & 2 != 0;
    if how & 1 != 0 {
        let Ok(export) = handshake::run(&mut script, "disk") else { return };
        assert!(export.min_block.is_power_of_two() && export.min_block <= 4096);
        assert!((4096..=32 << 20).contains(&export.max_payload));
        assert!(i64::try_from(export.bytes).is_ok());
        is_structured = export.is_structured;
    }
    let asked = |cookie: u64| {
        let is_read = cookie.is_multiple_of(2);
        let asked = Asked { is_read, offset: cookie << 12, len: 512 * (cookie as u32 + 1) };
        (cookie, (asked, vec![0; if is_read { asked.len as usize } else { 0 }]))
    };
    let mut requests = InFlight((0..8).map(asked).collect());
    let mut replies = Replies::new(is_structured);
    while replies.next(&mut script, &mut requests).is_ok() {}
}

#[cfg(test)]
mod tests {
    use std::io;

    use bowline_base::SplitMix64;

    use super::*;
    use crate::front::nbd::wire;

    /// Replies that are right for the most part.
    struct Random(SplitMix64);

    impl Random {
        fn below(&mut self, n: u64) -> u64 {
            self.0.below(n)
        }

        /// A number that is mostly this one.
        fn mostly(&mut self, number: u64) -> u64 {
            match self.below(12) {
                0 => self.below(u64::MAX) >> self.below(64),
                1 => number.wrapping_add(self.below(3)).wrapping_sub(1),
                _ => number,
            }
        }

        fn simple(&mut self, cookie: u64, out: &mut Vec<u8>) {
            let error = if self.below(4) == 0 { 5 } else { 0 };
            out.extend(wire::SIMPLE_MAGIC.to_be_bytes());
            out.extend((self.mostly(error) as u32).to_be_bytes());
            out.extend(cookie.to_be_bytes());
            if cookie.is_multiple_of(2) && error == 0 {
                out.resize(out.len() + 512 * (cookie as usize % 8 + 1), 9);
            }
        }

        fn chunk(&mut self, cookie: u64, out: &mut Vec<u8>) {
            let (begin, len) = (cookie << 12, 512 * (cookie % 8 + 1));
            let at = self.below(len / 512) * 512;
            let part = if self.below(2) == 0 { len - at } else { 512 };
            let mut data = Vec::new();
            let kind = match self.below(4) {
                0 => wire::NONE,
                1 => {
                    data.extend(self.mostly(begin + at).to_be_bytes());
                    data.resize(8 + part as usize, 9);
                    wire::OFFSET_DATA
                }
                2 => {
                    data.extend(self.mostly(begin + at).to_be_bytes());
                    data.extend((self.mostly(part) as u32).to_be_bytes());
                    wire::OFFSET_HOLE
                }
                _ => {
                    data.extend([0, 0, 0, 5, 0, 0]);
                    wire::ERROR
                }
            };
            out.extend(wire::STRUCTURED_MAGIC.to_be_bytes());
            out.extend((self.below(2) as u16).to_be_bytes());
            out.extend((self.mostly(kind.into()) as u16).to_be_bytes());
            out.extend(cookie.to_be_bytes());
            out.extend((self.mostly(data.len() as u64) as u32).to_be_bytes());
            out.extend(data);
        }
    }

    #[test]
    fn whatever_comes_is_refused_or_whole_and_lies_in_what_was_asked_for() {
        let mut random = Random(SplitMix64::new(0x1234_5678_9abc_def1));
        for _ in 0..20_000 {
            let mut stream = vec![if random.below(2) == 0 { 0 } else { 2 }];
            for _ in 0..random.below(12) {
                let cookie = random.below(8);
                let cookie = random.mostly(cookie);
                if random.below(3) == 0 {
                    random.simple(cookie, &mut stream);
                } else {
                    random.chunk(cookie, &mut stream);
                }
            }
            check_stream(&stream);
        }
    }

    fn chunk(flags: u16, kind: u16, cookie: u64, data: &[u8]) -> Vec<u8> {
        let head = [wire::STRUCTURED_MAGIC.to_be_bytes().to_vec(), flags.to_be_bytes().to_vec()];
        let len = (data.len() as u32).to_be_bytes();
        [&head.concat(), &kind.to_be_bytes()[..], &cookie.to_be_bytes(), &len, data].concat()
    }

    fn at(offset: u64, data: &[u8]) -> Vec<u8> {
        [&offset.to_be_bytes()[..], data].concat()
    }

    /// Reads the replies to a read of 1536 bytes at 8192, with cookie 2; returns what is in flight.
    fn read(stream: &[u8]) -> (io::Result<()>, InFlight) {
        let asked = Asked { is_read: true, offset: 8192, len: 1536 };
        let mut requests = InFlight(HashMap::from([(2, (asked, vec![0; 1536]))]));
        let (mut replies, mut script) = (Replies::new(true), Script::new(stream));
        let mut result = Ok(());
        while result.is_ok() && !script.input.is_empty() {
            result = replies.next(&mut script, &mut requests);
        }
        (result, requests)
    }

    #[test]
    fn a_read_comes_in_any_order_with_holes() {
        let hole = at(8704, &512_u32.to_be_bytes());
        let stream = [
            chunk(0, wire::OFFSET_DATA, 2, &at(9216, &[9; 512])),
            chunk(0, wire::OFFSET_DATA, 2, &at(8192, &[9; 512])),
            chunk(0, wire::OFFSET_HOLE, 2, &hole),
            chunk(wire::DONE, wire::NONE, 2, &[]),
        ];
        let (result, requests) = read(&stream.concat());
        result.unwrap();
        assert!(requests.0.is_empty());
    }

    #[test]
    fn a_server_that_lies_about_a_read_is_found_out() {
        let data =
            |offset, len| chunk(wire::DONE, wire::OFFSET_DATA, 2, &at(offset, &vec![9; len]));
        let twice = chunk(0, wire::OFFSET_DATA, 2, &at(8192, &[9; 1024]));
        let twice = [twice, data(8704, 1024)].concat();
        let hole = chunk(wire::DONE, wire::OFFSET_HOLE, 2, &at(8192, &1537_u32.to_be_bytes()));
        for (stream, wanted) in [
            (data(8192, 1024), "missing"),
            (data(8193, 1536), "not asked for"),
            (data(8191, 1536), "not asked for"),
            (data(u64::MAX, 1536), "not asked for"),
            (twice, "come before"),
            (hole, "not asked for"),
            (chunk(wire::DONE, wire::OFFSET_DATA, 2, &at(8192, &[])), "wrong kind or length"),
            (chunk(wire::DONE, wire::NONE, 2, &[]), "missing"),
            (chunk(0, wire::NONE, 2, &[]), "wrong kind or length"),
            (chunk(wire::DONE, wire::NONE, 3, &[]), "nothing that was asked"),
            (chunk(wire::DONE, wire::ERROR, 2, &[0; 6]), "without a number"),
            (chunk(wire::DONE, 5, 2, &[0; 12]), "wrong kind or length"),
            (vec![0; 20], "not a reply"),
        ] {
            let error = read(&stream).0.unwrap_err().to_string();
            assert!(error.contains(wanted), "{wanted}: {error}");
        }
        // An error of a part is one of the whole, whatever else has come.
        let failed = chunk(0, wire::ERROR_OFFSET, 2, &at(0x1c_0000_0000_0000, &[0; 6]));
        let stream = [failed, data(8192, 1536)].concat();
        let (result, requests) = read(&stream);
        assert!(result.is_ok() && requests.0.is_empty(), "{result:?}");
    }
}
