//! Output lines of commands that run until a stop signal. A separate thread writes them, so that a
//! slow reader delays neither the work nor its end.
//!
//! ```text
//! line -> Queue, bounded -> thread -> Sink -> standard output or standard error
//!         no room: lost               cannot be written: lost
//! ```
//!
//! The number of lost lines is reported as soon as lines can be written again.

use std::{
    collections::VecDeque,
    fs::File,
    io::{self, ErrorKind, Write},
    os::{fd::AsFd, unix::fs::MetadataExt},
    sync::{
        Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

/// Most queued bytes.
const ROOM: usize = 256 << 10;
/// Burst and rate per second of lines that peers may cause.
const BURST: u32 = 100;
const PER_SECOND: u32 = 10;
/// Time between attempts to write after a failure, and between two reports of suppressed lines.
const PAUSE: Duration = Duration::from_secs(1);
/// Longest wait at the end for a slow reader.
const PATIENCE: Duration = Duration::from_secs(1);
/// Longest sleep between checks of the stop flag.
const SLICE: Duration = Duration::from_millis(50);

/// How the output of a command is treated.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Duty {
    /// The lines are results: the command waits for the reader, and ends when the pipe is closed.
    Results,
    /// The lines are a log: the command continues if they cannot be written. A log of JSON contains
    /// only JSON.
    Service {
        /// Whether the lines are JSON.
        json: bool,
    },
}

/// The writer threads of this process, once a command has started them.
static LOG: OnceLock<Log> = OnceLock::new();

/// The writer threads.
pub(super) struct Log {
    out: Arc<Queue>,
    err: Arc<Queue>,
    stop: Arc<AtomicBool>,
}

/// Starts writer threads; once `stop` is set, nothing waits for readers any more.
pub fn begin(duty: Duty, stop: Arc<AtomicBool>) -> io::Result<()> {
    let out = File::from(io::stdout().as_fd().try_clone_to_owned()?);
    let err = File::from(io::stderr().as_fd().try_clone_to_owned()?);
    let file = |of: &File| of.metadata().map(|found| (found.dev(), found.ino())).ok();
    // If both streams are one file, one queue keeps their order.
    let same = file(&out).is_some_and(|found| file(&err) == Some(found));
    let out = Queue::start(out, duty, true)?;
    let err_duty = match duty {
        Duty::Results => duty,
        Duty::Service { .. } => Duty::Service { json: false },
    };
    let err = if same { Arc::clone(&out) } else { Queue::start(err, err_duty, false)? };
    // A command begins once.
    let _ = LOG.set(Log { out, err, stop });
    Ok(())
}

/// The threads, if there are any.
pub(super) fn log() -> Option<&'static Log> {
    LOG.get()
}

impl Log {
    /// Queues text for standard output.
    pub(super) fn out(&self, text: String) {
        self.out.put(text, &self.stop);
    }

    /// Queues text for standard error.
    pub(super) fn err(&self, text: String) {
        self.err.put(text, &self.stop);
    }

    /// Whether one more line that a peer causes may be written: of results all.
    pub(super) fn admits_out(&self) -> bool {
        self.out.duty == Duty::Results || self.out.state().rate.admits(Instant::now())
    }

    /// The same for standard error, where there are no results.
    pub(super) fn admits_err(&self) -> bool {
        self.err.state().rate.admits(Instant::now())
    }

    /// Writes what comes next to other files: `out` in place of standard output, `err` in place of
    /// standard error, each where there is one.
    pub(super) fn turn_to(&self, out: Option<File>, err: Option<File>) {
        for (queue, file) in [(&self.out, out), (&self.err, err)] {
            if let Some(file) = file {
                queue.state().next = Some(file);
                queue.changed.notify_all();
            }
        }
    }

    /// Waits until everything is written; not for long once the command is to stop.
    pub(super) fn finish(&self) {
        // One time limit for both, which may have one reader.
        let mut end = None;
        self.out.finish(&self.stop, &mut end);
        self.err.finish(&self.stop, &mut end);
    }
}

/// The queue of lines to one file.
struct Queue {
    duty: Duty,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    lines: VecDeque<String>,
    bytes: usize,
    /// The thread is writing a line.
    writes: bool,
    /// Number of lines dropped for want of space, not reported yet.
    lost: u64,
    rate: Rate,
    /// The file of further lines, once those that are queued are written.
    next: Option<File>,
}

impl Queue {
    /// Starts the thread that writes to a file.
    fn start(file: File, duty: Duty, results: bool) -> io::Result<Arc<Self>> {
        let rate = Rate::new(Instant::now());
        let state =
            State { lines: VecDeque::new(), bytes: 0, writes: false, lost: 0, rate, next: None };
        let queue = Arc::new(Self { duty, state: Mutex::new(state), changed: Condvar::new() });
        let of = Arc::clone(&queue);
        thread::Builder::new().name("log".into()).spawn(move || of.write(file, results))?;
        Ok(queue)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues text. If the queue is full, results wait until the command is to stop; other text is
    /// dropped.
    fn put(&self, text: String, stop: &AtomicBool) {
        let mut state = self.state();
        while state.bytes > 0 && state.bytes + text.len() > ROOM {
            // Relaxed: the flag publishes nothing but itself.
            if self.duty != Duty::Results || stop.load(Ordering::Relaxed) {
                state.lost += 1;
                return;
            }
            state = self.sleep(state, SLICE);
        }
        state.bytes += text.len();
        state.lines.push_back(text);
        self.changed.notify_all();
    }

    /// Waits until everything is written; once the command is to stop, until the `end` that is set
    /// then.
    fn finish(&self, stop: &AtomicBool, end: &mut Option<Instant>) {
        let mut state = self.state();
        while state.writes || !state.lines.is_empty() {
            let now = Instant::now();
            if self.duty != Duty::Results || stop.load(Ordering::Relaxed) {
                let end = *end.get_or_insert(now + PATIENCE);
                if now >= end {
                    return;
                }
            }
            state = self.sleep(state, SLICE);
        }
    }

    fn sleep<'a>(&self, state: MutexGuard<'a, State>, time: Duration) -> MutexGuard<'a, State> {
        let woken = self.changed.wait_timeout(state, time);
        woken.unwrap_or_else(PoisonError::into_inner).0
    }

    /// Writes lines for as long as the process lives.
    fn write(&self, file: File, results: bool) {
        let mut sink = Sink::new(file, self.duty == Duty::Service { json: true });
        let mut told = Instant::now();
        let mut state = self.state();
        loop {
            let text = state.lines.pop_front();
            sink.lost += std::mem::take(&mut state.lost);
            let now = Instant::now();
            if now - told >= PAUSE {
                sink.left_out += std::mem::take(&mut state.rate.left_out);
                told = now;
            }
            if text.is_none() && !sink.owes() {
                if let Some(next) = state.next.take() {
                    sink.to = next;
                }
                state = match state.rate.left_out {
                    0 => self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
                    _ => self.sleep(state, SLICE),
                };
                continue;
            }
            state.writes = true;
            drop(state);
            let wrote = sink.put(text.as_deref());
            if self.duty == Duty::Results
                && results
                && let Err(error) = wrote
            {
                super::cannot_write(&error);
            }
            state = self.state();
            state.bytes -= text.as_ref().map_or(0, String::len);
            state.writes = false;
            self.changed.notify_all();
            if text.is_none() && sink.owes() {
                state = self.sleep(state, PAUSE);
            }
        }
    }
}

/// Writes lines to one file, and reports how many are missing.
struct Sink<W> {
    to: W,
    json: bool,
    /// Lines that could not be written.
    lost: u64,
    /// Number of suppressed lines that peers caused.
    left_out: u64,
    /// The file ends within a line.
    torn: bool,
}

impl<W: Write> Sink<W> {
    fn new(to: W, json: bool) -> Self {
        Self { to, json, lost: 0, left_out: 0, torn: false }
    }

    /// Returns whether lines are missing that were not reported.
    fn owes(&self) -> bool {
        self.lost > 0 || self.left_out > 0
    }

    /// Writes a text, and before it a report of missing lines.
    fn put(&mut self, text: Option<&str>) -> io::Result<()> {
        let wrote = self.try_put(text);
        if wrote.is_err() && text.is_some() {
            self.lost += 1;
        }
        wrote
    }

    fn try_put(&mut self, text: Option<&str>) -> io::Result<()> {
        if self.lost > 0 {
            self.write(&self.notice(self.lost, "lost", "they could not be written"))?;
            self.lost = 0;
        }
        if self.left_out > 0 {
            let why = format!("peers cause more than {PER_SECOND} a second");
            self.write(&self.notice(self.left_out, "left out", &why))?;
            self.left_out = 0;
        }
        text.map_or(Ok(()), |text| self.write(text))
    }

    fn notice(&self, count: u64, what: &str, why: &str) -> String {
        if self.json {
            return format!("{{\"lines_{}\":{count}}}\n", what.replace(' ', "_"));
        }
        let (lines, were) = if count == 1 { ("line", "was") } else { ("lines", "were") };
        format!("{count} {lines} {were} {what}: {why}\n")
    }

    fn write(&mut self, text: &str) -> io::Result<()> {
        if self.torn {
            self.write_bytes(b"\n")?;
        }
        self.write_bytes(text.as_bytes())
    }

    fn write_bytes(&mut self, bytes: &[u8]) -> io::Result<()> {
        let mut rest = bytes;
        while !rest.is_empty() {
            match self.to.write(rest) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(count) => rest = rest.get(count..).unwrap_or_default(),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                // Another process has set the file to non-blocking.
                Err(error) if error.kind() == ErrorKind::WouldBlock => thread::sleep(SLICE),
                Err(error) => {
                    self.torn |= rest.len() < bytes.len();
                    return Err(error);
                }
            }
        }
        self.torn = false;
        Ok(())
    }
}

/// Rate limit of lines that peers cause.
#[derive(Debug)]
struct Rate {
    /// Number of lines allowed now.
    left: u32,
    since: Instant,
    left_out: u64,
}

impl Rate {
    fn new(now: Instant) -> Self {
        Self { left: BURST, since: now, left_out: 0 }
    }

    /// Returns whether one more line may be written; counts a line that may not.
    fn admits(&mut self, now: Instant) -> bool {
        let each = Duration::from_secs(1) / PER_SECOND;
        let new = (now.saturating_duration_since(self.since).as_nanos() / each.as_nanos())
            .min(u128::from(BURST)) as u32;
        if new > 0 {
            self.left = (self.left + new).min(BURST);
            self.since = if self.left == BURST { now } else { self.since + each * new };
        }
        match self.left.checked_sub(1) {
            Some(left) => {
                self.left = left;
                true
            }
            None => {
                self.left_out += 1;
                false
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    /// A file on a disk with some bytes of room.
    struct Disk {
        room: usize,
        has: Vec<u8>,
    }

    impl Write for Disk {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            match self.room.min(bytes.len()) {
                0 => Err(ErrorKind::StorageFull.into()),
                count => {
                    self.room -= count;
                    self.has.extend_from_slice(&bytes[..count]);
                    Ok(count)
                }
            }
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn lines_that_a_full_disk_loses_are_told_of_when_there_is_room() {
        let mut sink = Sink::new(Disk { room: 9, has: Vec::new() }, false);
        assert!(sink.put(Some("one\n")).is_ok());
        for _ in 0..3 {
            assert!(sink.put(Some("second\n")).is_err());
        }
        assert!(sink.put(None).is_err(), "still full");
        sink.to.room = 1000;
        assert!(sink.put(None).is_ok(), "also when nothing more is said");
        sink.left_out = 7;
        assert!(sink.put(Some("last\n")).is_ok());
        assert!(!sink.owes());
        let wanted = "one\nsecon\n3 lines were lost: they could not be written\n\
                      7 lines were left out: peers cause more than 10 a second\nlast\n";
        assert_eq!(String::from_utf8_lossy(&sink.to.has), wanted);
    }

    #[test]
    fn among_json_everything_is_json() {
        let mut sink = Sink::new(Disk { room: 0, has: Vec::new() }, true);
        assert!(sink.put(Some("{}\n")).is_err());
        sink.to.room = 1000;
        sink.left_out = 2;
        assert!(sink.put(Some("{}\n")).is_ok());
        let wanted = "{\"lines_lost\":1}\n{\"lines_left_out\":2}\n{}\n";
        assert_eq!(String::from_utf8_lossy(&sink.to.has), wanted);
    }

    #[test]
    fn peers_cause_some_lines_at_once_and_few_later() {
        let start = Instant::now();
        let mut rate = Rate::new(start);
        let mut admitted =
            |at: Duration, tries| (0..tries).filter(|_| rate.admits(start + at)).count();
        assert_eq!(admitted(Duration::ZERO, 1000), BURST as usize);
        assert_eq!(admitted(Duration::from_millis(50), 10), 0);
        assert_eq!(admitted(Duration::from_millis(1050), 1000), 10);
        assert_eq!(admitted(Duration::from_secs(3600), 1000), BURST as usize);
        assert_eq!(rate.left_out, 900 + 10 + 990 + 900);
    }

    #[test]
    fn a_pipe_that_nobody_reads_holds_up_no_service_and_no_end() {
        let (reader, writer) = std::os::unix::net::UnixStream::pair().unwrap();
        let file = File::from(std::os::fd::OwnedFd::from(writer));
        let service = Duty::Service { json: false };
        let queue = Queue::start(file, service, true).unwrap();
        let stop = AtomicBool::new(false);
        // More than the queue and the socket hold; that it comes to an end is the point.
        let line = "x".repeat(1023) + "\n";
        for _ in 0..4096 {
            queue.put(line.clone(), &stop);
        }
        queue.finish(&stop, &mut None);
        let (told, hears) = mpsc::channel();
        thread::spawn(move || {
            for line in io::BufRead::lines(io::BufReader::new(reader)).map_while(Result::ok) {
                let _ = told.send(line);
            }
        });
        let limit = Duration::from_secs(60);
        let lines = std::iter::from_fn(|| hears.recv_timeout(limit).ok());
        let found = lines.enumerate().find(|(_, line)| line.contains("lost"));
        let (written, text) = found.expect("what was lost is told of");
        // Those in the queue follow the one that was in hand.
        let lost: usize = text.split(' ').next().unwrap().parse().unwrap();
        assert!(lost > 0 && lost + written <= 4096, "{text} after {written}");
    }

    #[test]
    fn results_wait_for_their_reader_until_the_command_is_to_stop() {
        let (reader, writer) = std::os::unix::net::UnixStream::pair().unwrap();
        let file = File::from(std::os::fd::OwnedFd::from(writer));
        let queue = Queue::start(file, Duty::Results, true).unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let (of, flag) = (Arc::clone(&queue), Arc::clone(&stop));
        let writes = thread::spawn(move || {
            let line = "x".repeat(1023) + "\n";
            (0..4096).for_each(|_| of.put(line.clone(), &flag));
            of.finish(&flag, &mut None);
        });
        let before = Instant::now();
        while queue.state().bytes + 1024 <= ROOM {
            assert!(before.elapsed() < Duration::from_secs(60), "the queue fills");
            thread::sleep(SLICE);
        }
        assert!(!writes.is_finished());
        assert_eq!(queue.state().lost, 0);
        stop.store(true, Ordering::Relaxed);
        writes.join().unwrap();
        // The thread is in the middle of a write still; one that fails ends the process.
        std::mem::forget(reader);
    }
}
