//! SIGINT and SIGTERM: a request to stop, which loops check and which wakes sleepers. SIGHUP: a
//! request to read sizes and files anew, for commands that support it.
//!
//! The first signal asks; a later one ends the process at once, for the case that stopping in good
//! order hangs, and has it say what is left undone. One that comes within half a second of the
//! first is the same request: timeout(1) signals the process and then its group.

use std::{
    fmt,
    io::{self, Read},
    os::{
        fd::{AsFd, BorrowedFd},
        unix::net::UnixStream,
    },
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use signal_hook::{
    consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2},
    flag,
    low_level::{exit, pipe},
};

use crate::log::{self, Duty};
use crate::{Failure, Outcome};

/// How long signals that follow the first one belong to it. A node needs no longer to end in order.
const REPEATED_TIME: Duration = Duration::from_millis(500);

/// Starts to listen for SIGHUP; the flag is set when one comes.
pub fn hangups() -> Outcome<Arc<AtomicBool>> {
    let came = Arc::new(AtomicBool::new(false));
    match flag::register(SIGHUP, Arc::clone(&came)) {
        Ok(_) => Ok(came),
        Err(error) => Err(Failure::failed(format!("cannot install a signal handler: {error}"))),
    }
}

/// Signals that a process passes on to a command that it runs.
#[derive(Debug)]
pub struct Passed(Vec<(i32, Arc<AtomicBool>)>);

impl Passed {
    /// Starts to listen for the signals that ask a command for something.
    pub fn install() -> Outcome<Self> {
        let all = [SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2];
        let listen = |signal| {
            let came = Arc::new(AtomicBool::new(false));
            flag::register(signal, Arc::clone(&came)).map(|_| (signal, came))
        };
        let flags = all.into_iter().map(listen).collect::<io::Result<_>>().map_err(|error| {
            Failure::failed(format!("cannot install a signal handler: {error}"))
        })?;
        Ok(Self(flags))
    }

    /// Returns the signals that have come since the last call.
    pub fn take(&self) -> impl Iterator<Item = i32> {
        // Relaxed: the flags publish nothing but themselves.
        let came = self.0.iter().filter(|(_, came)| came.swap(false, Ordering::Relaxed));
        came.map(|(signal, _)| *signal)
    }
}

/// The user's request to stop the program.
#[derive(Debug)]
pub struct Stop {
    asked: Arc<AtomicBool>,
    /// Signals after the first one are for a command that this process runs.
    passes_on: Arc<AtomicBool>,
    wake: UnixStream,
    last: Arc<LastWords>,
}

/// What is run before a later signal ends the process.
#[derive(Default)]
struct LastWords(Mutex<Option<Box<dyn FnOnce() + Send>>>);

impl LastWords {
    fn set(&self, last: Box<dyn FnOnce() + Send>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(last);
    }

    fn run(&self) {
        let last = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(last) = last {
            last();
        }
    }
}

impl fmt::Debug for LastWords {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LastWords").finish_non_exhaustive()
    }
}

impl Stop {
    /// Starts to listen for SIGINT and SIGTERM, for a command that prints results; call it once.
    pub fn install() -> Outcome<Self> {
        Self::install_with(Duty::Results)
    }

    /// Starts to listen for both signals, and prints lines in a way that does not delay the end.
    pub fn install_with(duty: Duty) -> Outcome<Self> {
        let asked = Arc::new(AtomicBool::new(false));
        let passes_on = Arc::new(AtomicBool::new(false));
        let last = Arc::<LastWords>::default();
        let install = || -> io::Result<UnixStream> {
            let (wake, signalled) = UnixStream::pair()?;
            let (mut first, came) = UnixStream::pair()?;
            let impatient = Arc::new(AtomicBool::new(false));
            let number = Arc::new(AtomicUsize::new(0));
            for signal in [SIGINT, SIGTERM] {
                flag::register_conditional_shutdown(signal, 128 + signal, Arc::clone(&impatient))?;
                flag::register(signal, Arc::clone(&asked))?;
                flag::register_usize(signal, Arc::clone(&number), signal as usize)?;
                pipe::register(signal, signalled.try_clone()?)?;
                pipe::register(signal, came.try_clone()?)?;
            }
            let (last, passes_on) = (Arc::clone(&last), Arc::clone(&passes_on));
            thread::Builder::new().name("stop".into()).spawn(move || {
                if first.read_exact(&mut [0]).is_err() {
                    return;
                }
                thread::sleep(REPEATED_TIME);
                // What came until now belongs to the first signal; an error ends the reading.
                let _ = first.set_nonblocking(true);
                let _ = io::copy(&mut first, &mut io::sink());
                let _ = first.set_nonblocking(false);
                while first.read_exact(&mut [0]).is_ok() {
                    // Relaxed, all: the values publish nothing but themselves. Should the last
                    // words hang, the next signal ends the process in its handler.
                    if passes_on.load(Ordering::Relaxed) {
                        continue;
                    }
                    impatient.store(true, Ordering::Relaxed);
                    last.run();
                    log::finish();
                    exit(128 + number.load(Ordering::Relaxed) as i32);
                }
            })?;
            Ok(wake)
        };
        let wake = install()
            .map_err(|error| Failure::failed(format!("cannot install signal handlers: {error}")))?;
        log::begin(duty, Arc::clone(&asked))
            .map_err(|error| Failure::failed(format!("cannot start to print: {error}")))?;
        Ok(Self { asked, passes_on, wake, last })
    }

    /// Has this run before a later signal ends the process: it says what is left undone, and does
    /// not take long.
    pub fn before_exit(&self, last: impl FnOnce() + Send + 'static) {
        self.last.set(Box::new(last));
    }

    /// While this is so, signals after the first one do not end the process: it passes them on to
    /// a command that it runs.
    pub fn pass_on(&self, passes_on: bool) {
        self.passes_on.store(passes_on, Ordering::Relaxed);
    }

    /// Returns whether a stop was requested.
    pub fn asked(&self) -> bool {
        // Relaxed: the flag publishes nothing but itself.
        self.asked.load(Ordering::Relaxed)
    }

    /// Requests a stop, as a signal does.
    pub fn ask(&self) {
        self.asked.store(true, Ordering::Relaxed);
    }

    /// Returns the flag itself, for threads.
    pub fn flag(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.asked)
    }

    /// Sleeps until a stop is requested or the time is over; returns whether a stop was requested.
    pub fn wait(&self, time: Option<Duration>) -> bool {
        if self.asked() {
            return true;
        }
        // A zero timeout would mean "for ever" to the socket.
        let time = time.map(|time| time.max(Duration::from_micros(1)));
        if self.wake.set_read_timeout(time).is_ok() {
            // Any outcome (a byte, the timeout, EINTR) leads to the flag, which alone decides.
            let _ = (&self.wake).read(&mut [0; 16]);
        }
        self.asked()
    }

    /// Sleeps until an input is readable or at its end, a stop is requested, or the time is over;
    /// returns which inputs are ready.
    pub fn wait_for_any<const N: usize>(
        &self,
        inputs: [BorrowedFd<'_>; N],
        time: Duration,
    ) -> io::Result<[bool; N]> {
        if self.asked() {
            return Ok([false; N]);
        }
        let mut fds: Vec<_> = inputs.iter().map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
        fds.push(PollFd::new(&self.wake, PollFlags::IN));
        match poll(&mut fds, Timespec::try_from(time).ok().as_ref()) {
            Ok(_) => Ok(std::array::from_fn(|at| !fds[at].revents().is_empty())),
            Err(rustix::io::Errno::INTR) => Ok([false; N]),
            Err(error) => Err(error.into()),
        }
    }

    /// Sleeps until the input is readable or at its end, or a stop is requested; returns whether a
    /// stop was requested.
    pub fn wait_for(&self, input: impl AsFd) -> io::Result<bool> {
        while !self.asked() {
            let mut fds =
                [PollFd::new(&input, PollFlags::IN), PollFd::new(&self.wake, PollFlags::IN)];
            match poll(&mut fds, None) {
                Ok(_) if !fds[0].revents().is_empty() => break,
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(self.asked())
    }
}
