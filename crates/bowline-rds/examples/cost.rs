//! Cost of the core per message, without any system call: what one side spends on sending and
//! what the other spends on receiving.
use std::io::IoSlice;
use std::time::Instant as Clock;

use bowline_rds::{Config, Instant, Node, Output, RxPool, SendMsg, TxBatch};

fn main() {
    let sizes: Vec<usize> = std::env::args().skip(1).filter_map(|a| a.parse().ok()).collect();
    for size in if sizes.is_empty() { vec![64, 1024, 8192, 65_536] } else { sizes } {
        run(size);
    }
}

fn run(size: usize) {
    let now = Instant::from_nanos(1);
    let config = |addr: &str, generation| Config {
        addrs: vec![addr.parse().expect("an address")],
        generation,
        paths: 1,
        send_buffer: 8 << 20,
        recv_buffer: 8 << 20,
        ..Config::default()
    };
    let mut a = Node::new(config("10.0.0.1", 1));
    let mut b = Node::new(config("10.0.0.2", 2));
    let from = a.socket().expect("a socket");
    a.bind(from, "10.0.0.1:4000".parse().expect("an address")).expect("bound");
    let to = b.socket().expect("a socket");
    b.bind(to, "10.0.0.2:4000".parse().expect("an address")).expect("bound");
    let payload = vec![7; size];
    let slices = [IoSlice::new(&payload)];
    let name = Some("10.0.0.2:4000".parse().expect("an address"));
    let msg = SendMsg { name, payload: &slices, ..SendMsg::default() };
    a.send(now, from, &msg).expect("sent");
    let mut link = None;
    while let Some(out) = a.poll_output() {
        if let Output::Connect { link: l, .. } = out {
            link = Some(l);
        }
    }
    let link = link.expect("a connection is wanted");
    a.handle_connected(now, link, "10.0.0.1:40000".parse().expect("an address"));
    let back = b
        .handle_accepted(
            now,
            "10.0.0.2:16385".parse().expect("an address"),
            "10.0.0.1:40000".parse().expect("an address"),
        )
        .expect("accepted");
    let (mut pool_a, mut pool_b) = (RxPool::default(), RxPool::default());
    let mut batch = TxBatch::default();
    let mut out = vec![0; size];
    let (mut sending, mut moving, mut receiving, mut count) = (0, 0, 0, 0_u64);
    let total = 2_000_000_u64.min((4 << 30) / size as u64);
    while count < total {
        let t0 = Clock::now();
        let mut n = 0;
        while n < 65_536 {
            match a.send(now, from, &msg) {
                Ok(sent) => {
                    n = n.max(sent.queued_bytes).max(if sent.link.is_none() { 65_536 } else { 0 });
                }
                Err(_) => break,
            }
        }
        let t1 = Clock::now();
        sending += t1.duration_since(t0).as_nanos();
        for (x, y, xl, yl, pool) in [(&mut a, &mut b, link, back, &mut pool_b)] {
            loop {
                let n = x.poll_transmit(now, xl, &mut batch, 256 << 10);
                if n == 0 {
                    break;
                }
                let t = Clock::now();
                let mut buf = pool.get();
                batch.slices().for_each(|s| buf.vec().extend_from_slice(s));
                let buf = pool.freeze(buf);
                moving += t.elapsed().as_nanos();
                let t = Clock::now();
                x.transmitted(now, xl, n, false);
                sending += t.elapsed().as_nanos();
                let t = Clock::now();
                y.handle_data(now, yl, buf);
                loop {
                    let more = y.process(now, Some(to), usize::MAX);
                    while let Ok(got) = y.recv_into(now, to, &mut out) {
                        if let Some(data) = got.data {
                            data.copy_to(&mut out);
                        }
                        count += 1;
                    }
                    if !more {
                        break;
                    }
                }
                y.idle(now);
                receiving += t.elapsed().as_nanos();
            }
        }
        while a.poll_output().is_some() {}
        while b.poll_output().is_some() {}
        let t = Clock::now();
        let n = b.poll_transmit(now, back, &mut batch, 256 << 10);
        if n > 0 {
            let mut buf = pool_a.get();
            batch.slices().for_each(|s| buf.vec().extend_from_slice(s));
            let buf = pool_a.freeze(buf);
            b.transmitted(now, back, n, false);
            a.handle_data(now, link, buf);
            a.process(now, None, usize::MAX);
        }
        sending += t.elapsed().as_nanos();
    }
    let per = |ns: u128| ns as f64 / count as f64;
    println!(
        "{size:6} B: send {:7.1} ns, receive {:7.1} ns, (stand-in for TCP {:7.1} ns)",
        per(sending),
        per(receiving),
        per(moving)
    );
}
