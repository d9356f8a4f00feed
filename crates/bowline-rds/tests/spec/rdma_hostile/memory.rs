//! Limits of memory.

use super::*;

// tests [SAFE-18], [IB-84]
#[test]
fn a_peer_whose_messages_nobody_reads_waits_and_goes_on_later() {
    let mut config = Config { recv_buffer: 1 << 30, ..Config::default() };
    config.limits.recv_bytes_per_peer = 10_000;
    let mut lab = Lab::with(config);
    let socket = lab.socket(PORT);
    let [link, other] = [lab.connected(LOW), lab.connected(HIGH)];
    lab.feed(link, &fragments(1, &pattern(8000)));
    assert!(lab.side.node.wants_rdma_frames(link));
    lab.feed(link, &fragments(2, &pattern(8000)));
    assert!(!lab.side.node.wants_rdma_frames(link), "receives are not posted again");
    assert!(!lab.side.node.wants_rdma_frames(link), "counted once");
    assert!(lab.side.node.wants_rdma_frames(other), "others are not held up");
    assert_eq!(lab.counter("ib_rx_alloc_limit"), 1);
    // What is posted already is still taken.
    lab.feed(link, &[message(3, b"x")]);
    lab.feed(other, &[message(1, b"y")]);
    assert_eq!(lab.recv(socket).map(|bytes| bytes.len()), Some(8000));
    assert_eq!(lab.resumed, [link]);
    assert!(lab.side.node.wants_rdma_frames(link));
    let rest: Vec<_> = std::iter::from_fn(|| lab.recv(socket)).map(|bytes| bytes.len()).collect();
    assert_eq!(rest, [8000, 1, 1]);
    assert_eq!(lab.resumed, [link]);
    // A connection that ends while it waits is not resumed, nor is its successor held up.
    lab.feed(link, &fragments(4, &pattern(12_000)));
    assert!(!lab.side.node.wants_rdma_frames(link));
    lab.closed(link);
    lab.resumed.clear();
    assert!(lab.recv(socket).is_some());
    assert!(lab.resumed.is_empty());
    let next = lab.connected(LOW);
    assert!(lab.side.node.wants_rdma_frames(next));
}

// tests [SAFE-1]
#[test]
fn messages_that_are_never_finished_take_a_bounded_amount_of_memory() {
    let mut config = Config::default();
    config.limits.partial_bytes_total = 2 << 20;
    let mut lab = Lab::with(config);
    let socket = lab.socket(PORT);
    let whole = Header { len: 1 << 20, ..message(1, b"").header };
    let mut links = Vec::new();
    for at in 1..=5_u8 {
        let from = format!("10.0.9.{at}");
        // Three finish their connection, two do not.
        let link = lab.request(&from).expect("accepted").link;
        if at <= 3 {
            lab.up(link);
        }
        links.push(link);
        lab.now = lab.now + Duration::from_millis(1);
        lab.feed(link, &vec![raw(whole, &[7; 4096]); 200]);
    }
    let closed: Vec<_> = links.iter().map(|link| lab.is_closed(*link)).collect();
    assert_eq!(closed, [true, true, true, false, false], "those that began first");
    assert_eq!(lab.counter("bl_partials_dropped"), 3);
    let told =
        |event: &Event| matches!(event, Event::Refused { why: Refusal::PartialMessages, .. });
    assert_eq!(lab.events.iter().filter(|event| told(event)).count(), 3);
    lab.feed(links[4], &vec![raw(whole, &[7; 4096]); 56]);
    assert_eq!(lab.recv(socket).map(|bytes| bytes.len()), Some(1 << 20));
}

// tests [SAFE-1]
#[test]
fn the_limit_of_messages_over_rdma_is_that_of_a_kernel() {
    let mut lab = Lab::with(Config { max_message: 16 << 20, ..Config::default() });
    let link = lab.connected(LOW);
    lab.feed(link, &[raw(Header { len: (1 << 20) + 1, ..message(1, b"").header }, &[7; 4096])]);
    assert!(lab.is_closed(link));
    let socket = lab.socket(PORT);
    lab.side.node.set_send_buffer(socket, 64 << 20).expect("open");
    let too_long = lab.send_with(socket, LOW, &vec![0; (1 << 20) + 1], &[]);
    assert_eq!(too_long.map_err(|error| error.errno().0), Err(90));
}
