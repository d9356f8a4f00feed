//! Jobs of a few messages: fill, echo, rtt, ping.

use super::{Ended, Job, SNDBUF, TICK, wrong};
use crate::backend::Mode;
use crate::generator::{Generator, MAX_MESSAGE};
use std::io::IoSlice;
use std::net::{IpAddr, SocketAddr};
use std::thread::sleep;
use std::time::{Duration, Instant};

impl Job {
    /// Non-blocking sends until one is refused: how many went, and the error.
    pub(super) fn fill(&self) -> Ended {
        let size = self.args.or("size", 1000)?;
        let generator = Generator::new(self.args.or("seed", 0)?, size, size);
        let (to, n): (_, u64) = (self.args.need("to")?, self.args.or("n", 10000)?);
        let socket = self.open(self.args.or("sndbuf", 0)?, 0, Mode::Nonblock)?;
        let mut refused = "null".to_owned();
        while self.messages() < n {
            match socket.send(&generator.parts(self.messages()).slices(), to) {
                Ok(_) => self.count(size),
                Err(e) => {
                    refused = crate::protocol::quote(&e.name());
                    break;
                }
            }
        }
        self.event("sent").num("messages", self.messages()).raw("refused", &refused).emit();
        if self.args.or("zero", 0)? != 0 {
            let end = match socket.send(&[], to) {
                Ok(_) => "null".to_owned(),
                Err(e) => crate::protocol::quote(&e.name()),
            };
            self.event("zero").raw("refused", &end).emit();
        }
        let left = self.wait_close(&*socket)?;
        let done = self.event("done").num("messages", self.messages());
        Ok(done.raw("refused", &refused).num("left", left))
    }

    /// Sends everything back, until stop.
    pub(super) fn echo(&self) -> Ended {
        let socket = self.open(SNDBUF, 0, Mode::Timeout(TICK))?;
        self.ready(&*socket)?;
        let mut buf = vec![0; MAX_MESSAGE];
        while !self.stopped() {
            let (len, source) = match socket.recv(&mut buf) {
                Ok(r) => r,
                Err(e) if e.passing() => continue,
                Err(e) => return Err(e),
            };
            while let Err(e) = socket.send(&[IoSlice::new(&buf[..len])], source) {
                if !e.passing() || self.stopped() {
                    return Err(e);
                }
                sleep(Duration::from_millis(1));
            }
            self.count(len);
        }
        Ok(self.event("done").num("messages", self.messages()))
    }

    /// n round trips of size bytes against an echo job, in microseconds.
    pub(super) fn rtt(&self) -> Ended {
        let (n, size) = (self.args.or("n", 100usize)?, self.args.or("size", 64)?);
        let generator = Generator::new(self.args.or("seed", 0)?, size, size);
        let to: SocketAddr = self.args.need("to")?;
        let wait = Duration::from_secs_f64(self.args.or("wait", 10.0)?);
        let socket = self.open(SNDBUF, 0, Mode::Timeout(wait))?;
        let mut buf = vec![0; MAX_MESSAGE];
        let mut times = Vec::with_capacity(n);
        for i in 0..n as u64 {
            let parts = generator.parts(i);
            let start = Instant::now();
            socket.send(&parts.slices(), to)?;
            let (len, _) = socket.recv(&mut buf)?;
            times.push(start.elapsed().as_secs_f64() * 1e6);
            generator.check(i, len, std::iter::once(&buf[..len]))?;
            self.count(len);
        }
        times.sort_by(f64::total_cmp);
        let at = |q: f64| times.get((times.len() as f64 * q) as usize).copied().unwrap_or(0.0);
        let max = times.last().copied().unwrap_or(0.0);
        let done = self.event("done").num("messages", self.messages()).float("min", at(0.0));
        Ok(done.float("median", at(0.5)).float("p99", at(0.99)).float("max", max))
    }

    /// RDS pings: messages of some bytes to port 0, answered by the node itself without any.
    pub(super) fn ping(&self) -> Ended {
        let n: u64 = self.args.or("n", 3)?;
        let wait = Duration::from_secs_f64(self.args.or("wait", 10.0)?);
        let ip: IpAddr = self.args.need("to")?;
        let to = SocketAddr::new(ip, 0);
        let socket = self.open(0, 0, Mode::Timeout(wait))?;
        let mut times = Vec::new();
        for _ in 0..n {
            let start = Instant::now();
            socket.send(&[IoSlice::new(b"12345")], to)?;
            let (len, source) = socket.recv(&mut [0; 64])?;
            if len != 0 || source != to {
                return Err(wrong(format!("answer of {len} bytes from {source}")));
            }
            times.push(start.elapsed().as_secs_f64() * 1e6);
            self.count(0);
        }
        let first = times.first().copied().unwrap_or(0.0);
        let min = times.iter().copied().fold(f64::INFINITY, f64::min);
        let max = times.iter().copied().fold(0.0, f64::max);
        let done = self.event("done").num("messages", n).float("first", first);
        Ok(done.float("min", min).float("max", max))
    }
}
