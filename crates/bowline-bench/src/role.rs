//! One side of a measurement: a process that the bench started.
//!
//! The sides talk to the parent in lines of text: the side says `ready key=value...` when it can be
//! reached, hears `go key=value...` with the other side's words and process number, and the
//! counting side says `result ...` once. `stop` asks a sender to come to an end and say `done ...`;
//! `quit`, or the end of the input, ends the process at once. The programs under `peers/` speak the
//! same.
//!
//! Where several cells take turns the parent says when one begins: the counting side says `warm`
//! when it could begin, hears `turn` for each, says `over` when its window is over, and the
//! `result` of all of them after `end`.

use std::io::{BufRead, Write};
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use crate::cell::{Cell, Words};
use crate::{sys, turns};

static STOP: AtomicBool = AtomicBool::new(false);
/// How many turns the parent has given this side.
static TURNS: AtomicU64 = AtomicU64::new(0);
/// There are no more turns.
static ENDED: AtomicBool = AtomicBool::new(false);

/// Says whether the parent asked this side to come to an end.
#[inline]
pub(crate) fn stopping() -> bool {
    // Pairs with the store in `watch`; nothing else is published by it.
    STOP.load(Ordering::Relaxed)
}

/// The key by which a side tells the number of a process that it started: a program of others,
/// whose CPU time counts as the side's own.
pub(crate) const PROGRAM: &str = "program";

/// The CPU clocks of the other side.
pub(crate) struct PeerClock(Vec<u32>);

impl PeerClock {
    /// CPU time so far, in nanoseconds.
    pub(crate) fn now(&self) -> u64 {
        self.0.iter().filter_map(|pid| sys::cpu_ns(*pid)).sum()
    }
}

/// Which side of a measurement a process is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    /// Receives, or answers.
    Rx,
    /// Sends, or asks.
    Tx,
}

/// The receiving and the sending side of a cell.
pub(crate) struct Sides(
    pub(crate) fn(Role) -> Result<(), String>,
    pub(crate) fn(Role) -> Result<(), String>,
);

/// A started side.
#[derive(Debug)]
pub(crate) struct Role {
    pub(crate) cell: Cell,
    pub(crate) side: Side,
    peer: Words,
}

impl Role {
    /// Reads the arguments of a side and binds the process to its CPU.
    pub(crate) fn start(args: &[String]) -> Result<Self, String> {
        let words = Words::parse(args.iter().map(String::as_str));
        let cell = Cell::from_words(&words)?;
        let side = match words.text("side") {
            "rx" => Side::Rx,
            "tx" => Side::Tx,
            other => return Err(format!("bad role argument side={other}")),
        };
        if let Some((rx, tx)) = cell.pin {
            let cpu = if side == Side::Rx { rx } else { tx };
            sys::pin(cpu).map_err(|e| format!("binding to CPU {cpu}: {e}"))?;
        }
        Ok(Self { cell, side, peer: Words::default() })
    }

    /// Tells the parent how to reach this side, waits for the other and begins to obey orders.
    pub(crate) fn ready(&mut self, words: &str) -> Result<(), String> {
        say(&format!("ready {words}"));
        let mut line = String::new();
        std::io::stdin().lock().read_line(&mut line).map_err(|e| e.to_string())?;
        let mut parts = line.split_whitespace();
        match parts.next() {
            Some("go") => self.peer = Words::parse(parts),
            _ => std::process::exit(0), // the parent gave up on this cell
        }
        std::thread::spawn(watch);
        Ok(())
    }

    /// What the other side said it can be reached by.
    pub(crate) fn peer(&self, key: &str) -> &str {
        self.peer.text(key)
    }

    /// CPU time that the other side has used, in nanoseconds: of its process, and of the program of
    /// others that it started.
    pub(crate) fn peer_clock(&self) -> PeerClock {
        let pids = ["pid", PROGRAM].map(|key| self.peer.number(key).unwrap_or(0) as u32);
        PeerClock(pids.into_iter().filter(|pid| *pid != 0).collect())
    }

    /// Where the receiver's plain sockets listen.
    pub(crate) fn peer_addr(&self) -> Result<SocketAddr, String> {
        let port = self.peer.number("port")?;
        let port = u16::try_from(port).map_err(|_| format!("port {port} from the other side"))?;
        Ok((self.plain_ip(), port).into())
    }

    /// Address of the receiver's plain sockets.
    pub(crate) const fn plain_ip(&self) -> Ipv4Addr {
        if self.cell.apart { self.cell.nodes.0 } else { Ipv4Addr::LOCALHOST }
    }

    /// Starts counting what arrives.
    pub(crate) fn meter(&self) -> Meter {
        let every = (65536 / self.cell.size.max(1)).clamp(1, 64) as u64;
        Meter {
            warm_ns: self.cell.warm_ms * 1_000_000,
            window_ns: self.cell.window_ms * 1_000_000,
            every,
            next: 1,
            peer_clock: self.peer_clock(),
            count: 0,
            syscalls: 0,
            state: State::Idle,
            sum: Reading::default(),
            turns: 0,
            probe: None,
            spans: None,
        }
    }
}

fn watch() {
    // An error is like the end of the input: there is no parent left to obey.
    for order in std::io::stdin().lock().lines().map_while(Result::ok) {
        let mut words = order.split_whitespace();
        match words.next() {
            // Nothing else is published by these.
            Some("turn") => _ = TURNS.fetch_add(1, Ordering::Relaxed),
            Some("end") => ENDED.store(true, Ordering::Relaxed),
            Some("stop") => {
                STOP.store(true, Ordering::Relaxed);
                // A side that hangs in a blocking call has this long to come back.
                std::thread::spawn(|| {
                    std::thread::sleep(Duration::from_secs(2));
                    std::process::exit(0);
                });
            }
            _ => break,
        }
    }
    std::process::exit(0);
}

/// Says one line to the parent.
pub(crate) fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    // A parent that is gone takes the process with it by the end of the input.
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}

/// Tells the parent what a sender did in all.
pub(crate) fn done(sent: u64, syscalls: u64) {
    say(&format!(
        "done sent={sent} syscalls={syscalls} cc={}",
        sys::congestion_controls().join(",")
    ));
}

/// Tells the parent what the side that does not count did in all, by its counters.
pub(crate) fn done_with(messages: u64, counters: &[(&'static str, u64)]) {
    say(&format!("done sent={messages}{}", words(counters)));
}

/// Named counters read at both ends of the window.
pub(crate) type Probe = Box<dyn Fn() -> Vec<(&'static str, u64)>>;

/// By how much counters grew.
fn since(before: &[(&'static str, u64)], probe: Option<&Probe>) -> Vec<(&'static str, u64)> {
    let after = probe.map_or_else(Vec::new, |probe| probe());
    let pairs = before.iter().zip(&after);
    pairs.map(|((name, from), (_, to))| (*name, to.saturating_sub(*from))).collect()
}

/// Writes them as words `key=value`.
fn words(counters: &[(&'static str, u64)]) -> String {
    counters.iter().map(|(name, n)| format!(" {name}={n}")).collect()
}

enum State {
    Idle,
    Warm {
        until: u64,
    },
    /// Waits for a turn.
    Ready,
    /// The beginning of a turn, which does not count.
    Lead {
        until: u64,
    },
    Run {
        start: Reading,
        until: u64,
    },
    Over,
}

fn nanos(time: Duration) -> u64 {
    time.as_nanos() as u64
}

/// What the clocks and counters show, or by how much they have moved.
#[derive(Default)]
struct Reading {
    at: u64,
    count: u64,
    syscalls: u64,
    own_cpu: u64,
    peer_cpu: u64,
    probe: Vec<(&'static str, u64)>,
}

impl Reading {
    /// Adds what lies between two readings.
    fn add(&mut self, start: &Self, end: &Self, probe: Vec<(&'static str, u64)>) {
        self.at += end.at - start.at;
        self.count += end.count - start.count;
        self.syscalls += end.syscalls - start.syscalls;
        self.own_cpu += end.own_cpu.saturating_sub(start.own_cpu);
        self.peer_cpu += end.peer_cpu.saturating_sub(start.peer_cpu);
        if self.probe.is_empty() {
            self.probe = probe;
        } else {
            self.probe.iter_mut().zip(probe).for_each(|((_, sum), (_, n))| *sum += n);
        }
    }
}

/// Counts messages, and reports the count of a window after a warm-up, or of a window in each turn.
pub(crate) struct Meter {
    warm_ns: u64,
    /// 0: there is one in each turn.
    window_ns: u64,
    every: u64,
    next: u64,
    peer_clock: PeerClock,
    count: u64,
    /// System calls the side made so far; kept by the side itself.
    pub(crate) syscalls: u64,
    state: State,
    /// Of the windows so far.
    sum: Reading,
    /// Turns begun.
    turns: u64,
    probe: Option<Probe>,
    spans: Option<Spans>,
}

impl Meter {
    /// Has more counters read at both ends of the window.
    pub(crate) fn set_probe(&mut self, probe: Probe) {
        self.probe = Some(probe);
    }

    /// Has each of up to `depth` requests timed.
    pub(crate) fn time_requests(&mut self, depth: usize) {
        self.spans = Some(Spans { asked: vec![0; depth], ..Spans::default() });
    }

    /// Notes that a request is made, where each is timed.
    #[inline]
    pub(crate) fn asked(&mut self, slot: usize) {
        if let Some(at) = self.spans.as_mut().and_then(|spans| spans.asked.get_mut(slot)) {
            *at = sys::now_ns();
        }
    }

    /// Notes that a request was answered, where each is timed.
    #[inline]
    pub(crate) fn answered(&mut self, slot: usize) {
        if let Some(spans) = &mut self.spans {
            spans.answered(slot, matches!(self.state, State::Run { .. }));
        }
    }

    /// Counts `n` messages; the first one starts the warm-up.
    #[inline]
    pub(crate) fn add(&mut self, n: u64) {
        self.count += n;
        if self.count >= self.next {
            self.look();
        }
    }

    /// Looks at the clock though nothing arrived, unless nothing ever did.
    pub(crate) fn look_if_started(&mut self) {
        if !matches!(self.state, State::Idle | State::Over) {
            self.look();
        }
    }

    fn read(&self, at: u64) -> Reading {
        Reading {
            at,
            count: self.count,
            syscalls: self.syscalls,
            own_cpu: sys::own_cpu_ns(),
            peer_cpu: self.peer_clock.now(),
            probe: Vec::new(),
        }
    }

    fn begin(&mut self, at: u64, until: u64) {
        let probe = self.probe.as_ref().map_or_else(Vec::new, |probe| probe());
        self.state = State::Run { start: Reading { probe, ..self.read(at) }, until };
    }

    #[cold]
    fn look(&mut self) {
        self.look_at(sys::now_ns());
    }

    fn look_at(&mut self, now: u64) {
        self.next = self.count + self.every;
        match &self.state {
            State::Idle => self.state = State::Warm { until: now + self.warm_ns },
            State::Warm { until } if now >= *until => {
                if self.window_ns > 0 {
                    self.begin(now, now + self.window_ns);
                } else {
                    say("warm");
                    self.state = State::Ready;
                }
            }
            State::Ready => self.look_for_turn(now),
            State::Lead { until } if now >= *until => self.begin(now, now + nanos(turns::COUNTED)),
            // On a machine that stood still the window lasts until something arrives.
            State::Run { start, until } if now >= *until && self.count > start.count => {
                let probe = since(&start.probe, self.probe.as_ref());
                let end = self.read(now);
                self.sum.add(start, &end, probe);
                if self.window_ns > 0 {
                    self.report();
                } else {
                    self.state = State::Ready;
                    say("over");
                }
            }
            State::Warm { .. } | State::Lead { .. } | State::Run { .. } | State::Over => {}
        }
    }

    /// Begins the turn there is, if it is a new one.
    fn look_for_turn(&mut self, now: u64) {
        // Nothing else is published by these.
        let given = TURNS.load(Ordering::Relaxed);
        if given > self.turns {
            self.turns = given;
            self.state = State::Lead { until: now + nanos(turns::LEAD) };
        } else if ENDED.load(Ordering::Relaxed) {
            self.report();
        }
    }

    fn report(&mut self) {
        say(&format!(
            "result n={} ns={} own_cpu={} peer_cpu={} syscalls={} cc={}{}{}",
            self.sum.count,
            self.sum.at,
            self.sum.own_cpu,
            self.sum.peer_cpu,
            self.sum.syscalls,
            sys::congestion_controls().join(","),
            words(&self.sum.probe),
            self.spans.as_mut().map_or_else(String::new, Spans::words),
        ));
        self.state = State::Over;
        self.next = u64::MAX;
    }
}

impl std::fmt::Debug for Laps {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Laps").field("count", &self.laps.len()).finish_non_exhaustive()
    }
}

impl std::fmt::Debug for Meter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Meter").field("count", &self.count).finish_non_exhaustive()
    }
}

/// The percentiles of a round trip that are kept, in order, as fractions.
pub(crate) const PERCENTILES: [f64; 11] =
    [0.0, 0.10, 0.25, 0.50, 0.75, 0.90, 0.95, 0.99, 0.999, 0.9999, 1.0];

/// Sorts times and writes their percentiles.
fn percentiles(times: &mut [u32]) -> String {
    times.sort_unstable();
    let last = times.len().saturating_sub(1);
    let at = |p: f64| times.get((p * last as f64).round() as usize).copied().unwrap_or(0);
    let all: Vec<String> = PERCENTILES.iter().map(|p| at(*p).to_string()).collect();
    all.join(",")
}

/// How long each of several requests that are on their way together takes, from the moment it is
/// asked for, and the longest time in which none is answered.
#[derive(Default)]
struct Spans {
    /// Of each slot, when its request was made.
    asked: Vec<u64>,
    taken: Vec<u32>,
    last: u64,
    pause: u64,
}

impl Spans {
    fn answered(&mut self, slot: usize, counts: bool) {
        let now = sys::now_ns();
        let asked = self.asked.get(slot).copied().unwrap_or(now);
        if counts {
            self.taken.push(u32::try_from(now - asked).unwrap_or(u32::MAX));
            self.pause = self.pause.max(now - self.last);
        }
        self.last = now;
    }

    fn words(&mut self) -> String {
        format!(" lat={} pause_ns={}", percentiles(&mut self.taken), self.pause)
    }
}

/// Collects the times of round trips and reports their percentiles after the window.
pub(crate) struct Laps {
    warm_until: u64,
    window_ns: u64,
    peer_clock: PeerClock,
    start: u64,
    own_cpu: u64,
    peer_cpu: u64,
    last: u64,
    laps: Vec<u32>,
    probe: Option<Probe>,
    before: Vec<(&'static str, u64)>,
}

impl Laps {
    /// Starts the warm-up.
    pub(crate) fn new(role: &Role) -> Self {
        let now = sys::now_ns();
        Self {
            warm_until: now + role.cell.warm_ms * 1_000_000,
            window_ns: role.cell.window_ms * 1_000_000,
            peer_clock: role.peer_clock(),
            start: 0,
            own_cpu: 0,
            peer_cpu: 0,
            last: now,
            laps: Vec::with_capacity(1 << 20),
            probe: None,
            before: Vec::new(),
        }
    }

    /// Has counters read at both ends of the window.
    pub(crate) fn set_probe(&mut self, probe: Probe) {
        self.probe = Some(probe);
    }

    /// Notes the end of one round trip and the beginning of the next; true when the window is over.
    #[inline]
    pub(crate) fn lap(&mut self) -> bool {
        let now = sys::now_ns();
        if self.start == 0 {
            if now >= self.warm_until {
                self.start = now;
                self.before = self.probe.as_ref().map_or_else(Vec::new, |probe| probe());
                self.own_cpu = sys::own_cpu_ns();
                self.peer_cpu = self.peer_clock.now();
                self.last = sys::now_ns();
                return false;
            }
        } else {
            self.laps.push(u32::try_from(now - self.last).unwrap_or(u32::MAX));
            if now >= self.start + self.window_ns {
                self.report(now);
                return true;
            }
        }
        self.last = now;
        false
    }

    fn report(&mut self, now: u64) {
        let own = sys::own_cpu_ns().saturating_sub(self.own_cpu);
        let peer = self.peer_clock.now().saturating_sub(self.peer_cpu);
        say(&format!(
            "result n={} ns={} own_cpu={own} peer_cpu={peer} syscalls=0 cc={} lat={}{}",
            self.laps.len(),
            now - self.start,
            sys::congestion_controls().join(","),
            percentiles(&mut self.laps),
            words(&since(&self.before, self.probe.as_ref())),
        ));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn meter(window_ns: u64) -> Meter {
        Meter {
            warm_ns: 0,
            window_ns,
            every: 1,
            next: 1,
            peer_clock: PeerClock(Vec::new()),
            count: 0,
            syscalls: 0,
            state: State::Idle,
            sum: Reading::default(),
            turns: 0,
            probe: None,
            spans: None,
        }
    }

    #[test]
    fn windows_of_turns_add_up_and_standing_still_costs_time() {
        const MS: u64 = 1_000_000;
        let (lead, counted) = (nanos(turns::LEAD), nanos(turns::COUNTED));
        let mut meter = meter(0);
        let mut add = |at, n| {
            meter.count += n;
            meter.look_at(at);
            (meter.sum.count, meter.sum.at)
        };
        assert_eq!([add(1, 1), add(2, 1), add(3, 100)], [(0, 0); 3], "nobody's turn yet");
        let turn = |from| {
            TURNS.fetch_add(1, Ordering::Relaxed);
            (from, from + lead + MS)
        };
        let (heard, begun) = turn(10 * MS);
        add(heard, 1000);
        add(heard + lead - 1, 1000);
        add(begun, 1000);
        add(begun + MS, 5);
        assert_eq!(add(begun + counted + 1, 7), (12, counted + 1));
        assert_eq!(add(begun + counted + 2, 1000), (12, counted + 1), "once only");
        // Nothing comes for longer than the window is.
        let (heard, begun) = turn(200 * MS);
        add(heard, 1);
        add(begun, 1);
        assert_eq!(add(begun + 2 * counted, 0), (12, counted + 1), "not over without an answer");
        assert_eq!(add(begun + 3 * counted, 8), (20, 4 * counted + 1), "and its time counts");
        ENDED.store(true, Ordering::Relaxed);
        add(begun + 4 * counted, 1);
        assert!(matches!(meter.state, State::Over));
    }

    #[test]
    fn a_window_of_its_own_ends_by_itself() {
        let mut meter = meter(20);
        for (at, n) in [(1, 1), (2, 1), (3, 4), (22, 2)] {
            meter.count += n;
            meter.look_at(at);
        }
        assert!(matches!(meter.state, State::Over));
        assert_eq!((meter.sum.count, meter.sum.at), (6, 20));
    }
}
