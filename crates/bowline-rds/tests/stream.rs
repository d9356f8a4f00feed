//! The node on random calls and bytes; how the stream is cut does not matter.

mod checks;
mod support;

use proptest::prelude::*;
use support::*;

/// A small generator, so that a failure is repeated by its seed.
fn random_bytes(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..len)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 32) as u8
        })
        .collect()
}

// tests that no order of calls and no bytes break the node
#[test]
fn random_calls_and_bytes() {
    let seeds = std::env::var("STREAM_SEEDS").ok().and_then(|n| n.parse().ok()).unwrap_or(1500);
    for seed in 0..seeds {
        let bytes = random_bytes(seed, 300 + (seed as usize % 7) * 200);
        let result = std::panic::catch_unwind(|| checks::stream(&bytes));
        assert!(result.is_ok(), "seed {seed}");
    }
}

// tests [SAFE-1], [SAFE-3], [SAFE-4], [SAFE-11]: no order of calls and no frames break the node
#[test]
fn random_calls_and_frames_over_rdma() {
    let seeds = std::env::var("STREAM_SEEDS").ok().and_then(|n| n.parse().ok()).unwrap_or(3000);
    for seed in 0..seeds {
        let bytes = random_bytes(seed + 1_000_000, 300 + (seed as usize % 7) * 200);
        let result = std::panic::catch_unwind(|| checks::rdma(&bytes));
        assert!(result.is_ok(), "seed {seed}");
    }
}

fn frame() -> impl Strategy<Value = Frame> {
    prop_oneof![
        4 => (0..60_u64, 0..3000_usize, any::<u8>(), any::<bool>()).prop_map(|(seq, len, fill, again)| {
            let frame = data(seq, 9, 5000, &vec![fill; len]);
            if again { flagged(frame) } else { frame }
        }),
        1 => any::<u16>().prop_map(|port| map_of(&[port])),
        1 => (2..100_u64).prop_map(|seq| data(seq, 77, 0, b"ping")),
        1 => (2..100_u64).prop_map(|seq| ping_with(seq, npaths_ext(1))),
    ]
}

/// What a stream cut at these places delivers and is answered with.
fn outcome(stream: &[u8], cuts: &[usize]) -> (Vec<Vec<u8>>, u64, u64) {
    let (mut lab, s, link) = at(B, 5000).kernel(1);
    let mut at = 0;
    for cut in cuts.iter().copied().chain([stream.len()]) {
        if cut > at {
            lab.feed(link, &stream[at..cut]);
            at = cut;
        }
    }
    (lab.recv_all(s), lab.counter("recv_ping"), lab.counter("cong_update_received"))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..Default::default() })]

    // tests
    #[test]
    fn segmentation_changes_nothing(
        frames in prop::collection::vec(frame(), 1..12),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..40),
    ) {
        let stream: Vec<u8> = frames.iter().flat_map(Frame::bytes).collect();
        let mut cuts: Vec<_> = cuts.iter().map(|c| c.index(stream.len())).collect();
        cuts.sort_unstable();
        prop_assert_eq!(outcome(&stream, &cuts), outcome(&stream, &[]));
    }
}

// tests: the worst segmentation
#[test]
fn byte_by_byte() {
    let frames = [
        data(2, 9, 5000, b"one"),
        map_of(&[7]),
        data(3, 9, 5000, b""),
        data(4, 9, 5000, &[5; 300]),
    ];
    let stream: Vec<u8> = frames.iter().flat_map(Frame::bytes).collect();
    let every: Vec<_> = (0..stream.len()).collect();
    let got = outcome(&stream, &every);
    assert_eq!(got, outcome(&stream, &[]));
    assert_eq!(got.0, [b"one".to_vec(), vec![], vec![5; 300]]);
}
