//! Throughput: flood and sink. Bounded in time; contents are not verified.

use super::{Ended, Job, SNDBUF, TICK};
use crate::backend::Mode;
use crate::generator::{Generator, MAX_MESSAGE};
use std::io::IoSlice;
use std::thread::sleep;
use std::time::{Duration, Instant};

impl Job {
    /// Messages of one size for some seconds, as fast as they are taken.
    pub(super) fn flood(&self) -> Ended {
        let (to, size) = (self.args.need("to")?, self.args.or("size", 8192)?);
        let generator = Generator::new(self.args.or("seed", 0)?, size, size);
        let time = Duration::from_secs_f64(self.args.or("seconds", 5.0f64)?.min(60.0));
        let batch: usize = self.args.or("batch", 1)?;
        let sndbuf = self.args.or("sndbuf", SNDBUF)?;
        let socket = self.open(sndbuf, 0, Mode::Timeout(TICK))?;
        self.ready(&*socket)?;
        let message =
            generator.parts(0).slices().iter().flat_map(|s| s.to_vec()).collect::<Vec<u8>>();
        let start = Instant::now();
        let mut refused = 0;
        while start.elapsed() < time && !self.stopped() {
            let sent = if batch > 1 {
                socket.send_many(&message, batch, to)
            } else {
                socket.send(&[IoSlice::new(&message)], to).map(|_| 1)
            };
            match sent {
                Ok(n) => (0..n).for_each(|_| self.count(size)),
                Err(e) if e.passing() => {
                    refused += 1;
                    if e.errno == libc::ENOBUFS {
                        sleep(Duration::from_micros(200));
                    }
                }
                Err(e) => return Err(e),
            }
        }
        let seconds = start.elapsed().as_secs_f64();
        let done = self.event("done").num("messages", self.messages()).num("refused", refused);
        Ok(done.float("seconds", seconds))
    }

    /// Counts what comes in some seconds after the first message, says so with
    /// `measured`, and goes on reading until stop: a congested sender would wait.
    pub(super) fn sink(&self) -> Ended {
        let time = Duration::from_secs_f64(self.args.or("seconds", 5.0f64)?.min(60.0));
        let many = self.args.or("batch", 1)? > 1;
        let rcvbuf = self.args.or("rcvbuf", 4_000_000)?;
        let socket = self.open(0, rcvbuf, Mode::Timeout(TICK))?;
        self.ready(&*socket)?;
        let mut buf = vec![0; MAX_MESSAGE];
        let mut start: Option<Instant> = None;
        let mut measured = false;
        let (mut messages, mut bytes) = (0, 0);
        while !self.stopped() {
            let got = if many {
                socket.recv_many(&mut buf)
            } else {
                socket.recv(&mut buf).map(|(n, _)| (1, n as u64))
            };
            match (got, start) {
                (Ok(_), None) => start = Some(Instant::now()),
                (Ok(_), Some(_)) if measured => {}
                (Ok((m, b)), Some(start)) => {
                    (messages, bytes) = (messages + m, bytes + b);
                    if start.elapsed() >= time {
                        measured = true;
                        self.event("measured")
                            .num("messages", messages)
                            .num("bytes", bytes)
                            .float("seconds", start.elapsed().as_secs_f64())
                            .emit();
                    }
                }
                (Err(e), _) if !e.passing() => return Err(e),
                (Err(_), _) => {}
            }
        }
        Ok(self.event("done"))
    }
}
