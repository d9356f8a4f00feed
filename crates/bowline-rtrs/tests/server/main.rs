//! The server core against a hand-made client: its orders, answers and refusals.

mod accept;
mod chunks;
mod close;
mod hostile;
mod io;
mod notices;
mod random;
mod rig;
mod silence;

// tests [RT-66] [RT-67]: any input leaves the tables consistent and nothing behind
#[test]
fn random_clients_leave_nothing_behind() {
    let mut requests = 0;
    for seed in 1..=2000_u64 {
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let bytes: Vec<u8> = (0..600)
            .map(|_| {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                (state >> 32) as u8
            })
            .collect();
        let played = std::panic::catch_unwind(|| random::play(&bytes));
        requests += played.unwrap_or_else(|_| panic!("seed {seed}"));
    }
    assert!(requests > 5000, "only {requests} requests: the paths do not get far");
}
