//! Raw costs of the machine: they explain the tables, and betray a machine in a slow state.

use std::hint::black_box;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream, UdpSocket};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use serde_json::{Value, json};

use crate::sys;

/// One cost.
#[derive(Clone, Debug)]
pub(crate) struct Cost {
    pub(crate) name: &'static str,
    pub(crate) value: f64,
    /// The value that one in a hundred exceeds, where the cost varies.
    pub(crate) p99: Option<f64>,
    pub(crate) unit: &'static str,
}

/// Measures every cost; takes about a third of a second.
pub(crate) fn measure() -> Vec<Cost> {
    let mut costs = Vec::new();
    for (name, size) in [
        ("memcpy 64 B", 64),
        ("memcpy 4 KiB", 4 << 10),
        ("memcpy 64 KiB", 64 << 10),
        ("memcpy 1 MiB", 1 << 20),
    ] {
        costs.push(Cost { name, value: memcpy(size), p99: None, unit: "GB/s" });
    }
    let packet = vec![1u8; 4096];
    let ns = per_call(|| {
        black_box(bowline_crc::update(0, black_box(&packet)));
    });
    costs.push(Cost {
        name: match bowline_crc::algorithm() {
            bowline_crc::Algorithm::Wide => "CRC-32 4 KiB, 64 bytes at once",
            bowline_crc::Algorithm::Crc32Fast => "CRC-32 4 KiB, crc32fast",
            bowline_crc::Algorithm::Tables => "CRC-32 4 KiB, tables",
        },
        value: packet.len() as f64 / ns,
        p99: None,
        unit: "GB/s",
    });
    costs.push(plain(
        "read the clock",
        per_call(|| {
            black_box(sys::now_ns());
        }),
    ));
    costs.push(plain("empty system call", per_call(sys::empty_syscall)));
    if let Some(ns) = tcp_pass() {
        costs.push(plain("TCP write and read 64 B, one thread", ns));
    }
    if let Some(ns) = udp_pass() {
        costs.push(plain("UDP send and receive 64 B, one thread", ns));
    }
    let cpus = sys::allowed_cpus();
    if let [a, b, ..] = cpus[..] {
        costs.push(spread("wake a sleeping thread, one way", futex_wake(a, b)));
        costs.push(spread("cache line to the other core, one way", line_hop(a, b)));
        let ns = write_again(a, b).max(1);
        let value = REWRITTEN as f64 / ns as f64;
        let name = "write 256 KiB that the other core has read";
        costs.push(Cost { name, value, p99: None, unit: "GB/s" });
    }
    costs
}

fn plain(name: &'static str, value: f64) -> Cost {
    Cost { name, value, p99: None, unit: "ns" }
}

fn spread(name: &'static str, mut ns: Vec<u64>) -> Cost {
    ns.sort_unstable();
    let last = ns.len().saturating_sub(1);
    let at = |p: f64| ns.get((p * last as f64) as usize).copied().unwrap_or(0) as f64;
    Cost { name, value: at(0.5), p99: Some(at(0.99)), unit: "ns" }
}

/// Runs `f` for some milliseconds, several times over, and returns the best time of one call.
fn per_call(mut f: impl FnMut()) -> f64 {
    (0..5)
        .map(|_| {
            let start = sys::now_ns();
            let mut n = 0u64;
            while sys::now_ns() - start < 4_000_000 {
                for _ in 0..16 {
                    f();
                }
                n += 16;
            }
            (sys::now_ns() - start) as f64 / n as f64
        })
        .fold(f64::MAX, f64::min)
}

fn memcpy(size: usize) -> f64 {
    // Above the caches' size the copies walk through memory, as a stream of messages does.
    let span = if size >= 1 << 20 { 64 << 20 } else { size };
    let from = vec![1u8; span];
    let mut to = vec![0u8; span];
    let mut at = 0;
    let ns = per_call(|| {
        black_box(&mut to)[at..at + size].copy_from_slice(&black_box(&from)[at..at + size]);
        at = if at + 2 * size > span { 0 } else { at + size };
    });
    size as f64 / ns
}

fn tcp_pass() -> Option<f64> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).ok()?;
    let mut a = TcpStream::connect(listener.local_addr().ok()?).ok()?;
    let (mut b, _) = listener.accept().ok()?;
    a.set_nodelay(true).ok()?;
    let mut buf = [0u8; 64];
    let mut ok = true;
    let ns = per_call(|| ok &= a.write_all(&buf).and_then(|()| b.read_exact(&mut buf)).is_ok());
    ok.then_some(ns)
}

fn udp_pass() -> Option<f64> {
    let a = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).ok()?;
    let b = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).ok()?;
    a.connect(b.local_addr().ok()?).ok()?;
    b.set_read_timeout(Some(Duration::from_secs(1))).ok()?;
    let mut buf = [0u8; 64];
    let mut ok = true;
    let ns = per_call(|| ok &= a.send(&buf).and_then(|_| b.recv(&mut buf)).is_ok());
    ok.then_some(ns)
}

/// How often the two-thread costs are taken.
const WAKES: u32 = 200;
const HOPS: u32 = 4000;
const REWRITES: u32 = 60;
/// Bytes that are written again and again.
const REWRITTEN: usize = 256 << 10;

fn futex_wake(a: usize, b: usize) -> Vec<u64> {
    let (word, sent) = (AtomicU32::new(0), AtomicU64::new(0));
    let (word, sent) = (&word, &sent);
    std::thread::scope(|scope| {
        let sleeper = scope.spawn(move || {
            // Without the binding the figure is that of wherever the threads were put.
            let _ = sys::pin(b);
            (1..=WAKES)
                .map(|turn| {
                    while word.load(Ordering::Acquire) < turn {
                        sys::futex_wait(word, turn - 1);
                    }
                    sys::now_ns().saturating_sub(sent.load(Ordering::Relaxed))
                })
                .collect()
        });
        scope.spawn(move || {
            let _ = sys::pin(a); // as above
            for turn in 1..=WAKES {
                // Long enough for the other thread to fall asleep.
                let until = sys::now_ns() + 150_000;
                while sys::now_ns() < until {}
                sent.store(sys::now_ns(), Ordering::Relaxed);
                word.store(turn, Ordering::Release); // pairs with the load above
                sys::futex_wake(word);
            }
        });
        sleeper.join().unwrap_or_default()
    })
}

fn line_hop(a: usize, b: usize) -> Vec<u64> {
    let word = AtomicU32::new(0);
    let word = &word;
    let wait = |until: u32| {
        let start = sys::now_ns();
        let mut spins = 0u32;
        while word.load(Ordering::Acquire) < until {
            spins += 1;
            // With one core for both threads, somebody has to let the other run.
            if spins.is_multiple_of(1024) && sys::now_ns() - start > 1_000_000 {
                std::thread::yield_now();
            }
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let _ = sys::pin(b); // without the binding it is the cost of wherever the threads were put
            for turn in 0..HOPS {
                wait(2 * turn + 1);
                word.store(2 * turn + 2, Ordering::Release); // pairs with the load in `wait`
            }
        });
        let timer = scope.spawn(move || {
            let _ = sys::pin(a); // as above
            (0..HOPS)
                .map(|turn| {
                    let start = sys::now_ns();
                    word.store(2 * turn + 1, Ordering::Release); // pairs with the load in `wait`
                    wait(2 * turn + 2);
                    (sys::now_ns() - start) / 2
                })
                .collect()
        });
        timer.join().unwrap_or_default()
    })
}

/// Returns the median time of writing memory that another CPU has just read, as a sender does with
/// the pages of sockets' buffers once a receiver on another CPU has emptied them.
fn write_again(a: usize, b: usize) -> u64 {
    let pages: Vec<AtomicU64> = (0..REWRITTEN as u64 / 8).map(AtomicU64::new).collect();
    let turn = AtomicU32::new(0);
    let (pages, turn) = (&pages, &turn);
    // With one core for both threads, somebody has to let the other run.
    let wait = |until: u32| {
        let mut spins = 0u32;
        while turn.load(Ordering::Acquire) < until {
            spins += 1;
            if spins.is_multiple_of(1 << 16) {
                std::thread::yield_now();
            }
        }
    };
    let mut times: Vec<u64> = std::thread::scope(|scope| {
        scope.spawn(move || {
            let _ = sys::pin(b); // without the binding it is the cost of wherever the threads were put
            for k in 0..REWRITES {
                wait(2 * k + 1);
                black_box(pages.iter().fold(0, |sum, word| sum ^ word.load(Ordering::Relaxed)));
                turn.store(2 * k + 2, Ordering::Release); // pairs with the load in `wait`
            }
        });
        let writer = scope.spawn(move || {
            let _ = sys::pin(a); // as above
            let times = (0..REWRITES).map(|k| {
                let start = sys::now_ns();
                for word in pages {
                    word.store(k.into(), Ordering::Relaxed);
                }
                let ns = sys::now_ns() - start;
                turn.store(2 * k + 1, Ordering::Release); // pairs with the load in `wait`
                wait(2 * k + 2);
                ns
            });
            times.collect()
        });
        writer.join().unwrap_or_default()
    });
    times.sort_unstable();
    times.get(times.len() / 2).copied().unwrap_or(0)
}

/// The costs for a result file.
pub(crate) fn json(costs: &[Cost]) -> Value {
    let one = |cost: &Cost| {
        json!({
            "name": cost.name,
            "value": cost.value,
            "p99": cost.p99,
            "unit": cost.unit,
        })
    };
    costs.iter().map(one).collect()
}
