//! Verified streams: send and recv.

use super::{Ended, Job, SNDBUF, TICK, wrong};
use crate::backend::{Mode, Outcome, Socket};
use crate::generator::{Generator, HEAD, MAX_MESSAGE, Parts};
use crate::protocol::Event;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::thread::sleep;
use std::time::{Duration, Instant};

type Refused = BTreeMap<String, u64>;

impl Job {
    fn generator(&self) -> Result<Generator, String> {
        let (low, high) = (self.args.or("min", 0)?, self.args.or("max", MAX_MESSAGE)?);
        if low > high {
            return Err(format!("min={low} is more than max={high}"));
        }
        Ok(Generator::new(self.args.or("seed", 0)?, low, high))
    }

    /// n messages (0: until stop) of one stream to one destination; `at=A,B`:
    /// waits for go before the messages of these numbers.
    pub(super) fn send(&self) -> Ended {
        let generator = self.generator()?;
        let to = self.args.need("to")?;
        let (n, mut index): (u64, u64) = (self.args.or("n", 0)?, self.args.or("first", 0)?);
        let pause = Duration::from_secs_f64(self.args.or("pause", 0.0)?);
        let limit = Duration::from_secs_f64(self.args.or("limit", 60.0)?);
        let at: Vec<u64> = self
            .args
            .text("at")
            .map(|t| t.split(',').filter_map(|x| x.parse().ok()).collect())
            .unwrap_or_default();
        let mode = match self.args.text("mode") {
            None | Some("block") => Mode::Block,
            Some("timeout") => Mode::Timeout(Duration::from_millis(500)),
            Some("nonblock") => Mode::Nonblock,
            Some(other) => return Err(wrong(format!("no mode {other}"))),
        };
        let socket = self.open(self.args.or("sndbuf", SNDBUF)?, 0, mode)?;
        self.ready(&*socket)?;
        let mut refused = Refused::new();
        let start = Instant::now();
        while (n == 0 || self.messages() < n) && !self.stopped() {
            if at.contains(&self.messages()) {
                self.pause(self.messages());
            }
            let parts = generator.parts(index);
            if !self.send_one(&*socket, &parts, to, mode, limit, &mut refused)? {
                break;
            }
            self.count(generator.size(index));
            index += 1;
            if !pause.is_zero() {
                sleep(pause);
            }
        }
        let seconds = start.elapsed().as_secs_f64();
        let report = |e: Event| {
            e.num("messages", self.messages())
                .num("bytes", self.bytes())
                .float("seconds", seconds)
                .map("refused", refused.iter().map(|(k, v)| (k, *v)))
        };
        report(self.event("sent")).emit();
        let left = self.wait_close(&*socket)?;
        Ok(report(self.event("done")).num("left", left))
    }

    /// Sends one message; false when stopped before it was taken.
    fn send_one(
        &self,
        socket: &dyn Socket,
        parts: &Parts<'_>,
        to: SocketAddr,
        mode: Mode,
        limit: Duration,
        refused: &mut Refused,
    ) -> Outcome<bool> {
        let end = Instant::now() + limit;
        loop {
            let Err(e) = socket.send(&parts.slices(), to) else {
                return Ok(true);
            };
            *refused.entry(e.name()).or_default() += 1;
            if !e.passing() {
                return Err(e);
            }
            if self.stopped() {
                return Ok(false);
            }
            if Instant::now() > end {
                return Err(e);
            }
            if e.errno == libc::ENOBUFS {
                // congestion does not show in readiness
                sleep(Duration::from_millis(2));
            } else if mode == Mode::Nonblock {
                socket.wait(true, Duration::from_millis(100))?;
            }
        }
    }

    /// n messages (0: until stop), those of each source in order and exactly
    /// once; with `gaps=1` some may be missing, with `dups=1` too some may come again.
    pub(super) fn recv(&self) -> Ended {
        let generator = self.generator()?;
        let n: u64 = self.args.or("n", 0)?;
        let gaps = self.args.or("gaps", 0)? != 0;
        let dups = self.args.or("dups", 0)? != 0;
        let idle = Duration::from_secs_f64(self.args.or("idle", 30.0)?);
        let linger = Duration::from_secs_f64(self.args.or("linger", 0.0)?);
        let nonblock = self.args.text("mode") == Some("nonblock");
        let mode = if nonblock { Mode::Nonblock } else { Mode::Timeout(TICK) };
        let socket = self.open(0, self.args.or("rcvbuf", 0)?, mode)?;
        self.ready(&*socket)?;
        if self.args.or("hold", 0)? != 0 {
            self.wait_go();
        }
        let mut buf = vec![0; MAX_MESSAGE + 16];
        let mut sources: BTreeMap<SocketAddr, u64> = BTreeMap::new();
        let (mut missing, mut again) = (0, 0);
        let (mut first, mut last) = (None, Instant::now());
        while n == 0 || self.messages() < n {
            if nonblock {
                socket.wait(false, TICK)?;
            }
            let (len, source) = match socket.recv(&mut buf) {
                Ok(r) => r,
                Err(e) if !e.passing() => return Err(e),
                Err(_) if self.stopped() => break,
                Err(_) if last.elapsed() > idle => {
                    return Err(wrong(format!(
                        "no message for {idle:?}; {} of {n} came, next index by source: {sources:?}",
                        self.messages()
                    )));
                }
                Err(_) => continue,
            };
            last = Instant::now();
            first.get_or_insert(last);
            let next = sources.get(&source).copied();
            let index = match buf.first_chunk::<HEAD>() {
                Some(head) if gaps && len >= HEAD => Generator::index(head),
                _ if gaps => return Err(wrong(format!("gaps=1 needs messages of {HEAD} bytes"))),
                _ => next.unwrap_or(0),
            };
            if let Some(next) = next {
                if index < next && dups {
                    generator.check(index, len, std::iter::once(&buf[..len]))?;
                    again += 1;
                    continue;
                }
                if index < next {
                    let text = format!("message {index} came again or late; {next} was next");
                    return Err(wrong(text));
                }
                missing += index - next;
            }
            let pieces = std::iter::once(&buf[..len]);
            if let Err(e) = generator.check(index, len, pieces) {
                return Err(wrong(format!("from {source}: {e}{}", whose(&buf[..len]))));
            }
            sources.insert(source, index + 1);
            self.count(len);
        }
        if n != 0 && !linger.is_zero() {
            // nothing may follow: a repeated message would come now
            socket.set_mode(Mode::Timeout(linger))?;
            match socket.recv(&mut buf) {
                Ok(_) => return Err(wrong(format!("a message more than the {n} sent"))),
                Err(e) if e.passing() => {}
                Err(e) => return Err(e),
            }
        }
        let seconds = first.map_or(0.0, |f| (last - f).as_secs_f64());
        Ok(self
            .event("done")
            .num("messages", self.messages())
            .num("bytes", self.bytes())
            .float("seconds", seconds)
            .num("missing", missing)
            .num("again", again)
            .map("next", sources.into_iter().map(|(a, i)| (a.to_string(), i))))
    }
}

/// What a message's head says, for reports.
fn whose(message: &[u8]) -> String {
    match message.first_chunk::<HEAD>() {
        Some(head) => {
            let [a, b, c, d, ..] = *head;
            let seed = u32::from_le_bytes([a, b, c, d]);
            format!(" (its head says seed {seed}, index {})", Generator::index(head))
        }
        None => String::new(),
    }
}
