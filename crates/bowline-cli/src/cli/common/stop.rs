//! SIGINT and SIGTERM: a request to stop, that loops ask about and sleepers wake up for. SIGHUP: a
//! request to look at things again, of commands that do so.
//!
//! The first signal asks; a second one ends the process at once, for the case that stopping in
//! good order hangs.

use std::{
    io::{self, Read},
    os::{fd::AsFd, unix::net::UnixStream},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use rustix::event::{PollFd, PollFlags, poll};
use signal_hook::{
    consts::{SIGHUP, SIGINT, SIGTERM},
    flag,
    low_level::pipe,
};

use super::out::{self, Duty};
use crate::cli::{Failure, Outcome};

/// Starts to listen for SIGHUP; the flag is set when one comes.
pub(crate) fn hangups() -> Outcome<Arc<AtomicBool>> {
    let came = Arc::new(AtomicBool::new(false));
    match flag::register(SIGHUP, Arc::clone(&came)) {
        Ok(_) => Ok(came),
        Err(error) => Err(Failure::failed(format!("cannot install a signal handler: {error}"))),
    }
}

/// The wish of the user that the program ends.
#[derive(Debug)]
pub(crate) struct Stop {
    asked: Arc<AtomicBool>,
    wake: UnixStream,
}

impl Stop {
    /// Starts to listen for SIGINT and SIGTERM, for a command that prints results; call it once.
    pub(crate) fn install() -> Outcome<Self> {
        Self::install_with(Duty::Results)
    }

    /// Starts to listen, and has lines printed in a way that does not hold up the end.
    pub(crate) fn install_with(duty: Duty) -> Outcome<Self> {
        let asked = Arc::new(AtomicBool::new(false));
        let install = || -> io::Result<UnixStream> {
            let (wake, signalled) = UnixStream::pair()?;
            for signal in [SIGINT, SIGTERM] {
                // The order matters: the shutdown looks at the flag before this signal sets it.
                flag::register_conditional_shutdown(signal, 128 + signal, Arc::clone(&asked))?;
                flag::register(signal, Arc::clone(&asked))?;
                pipe::register(signal, signalled.try_clone()?)?;
            }
            Ok(wake)
        };
        let wake = install()
            .map_err(|error| Failure::failed(format!("cannot install signal handlers: {error}")))?;
        out::begin(duty, Arc::clone(&asked))
            .map_err(|error| Failure::failed(format!("cannot start to print: {error}")))?;
        Ok(Self { asked, wake })
    }

    /// Returns whether somebody asked to stop.
    pub(crate) fn asked(&self) -> bool {
        // Relaxed: the flag publishes nothing but itself.
        self.asked.load(Ordering::Relaxed)
    }

    /// Returns the flag itself, for threads.
    pub(crate) fn flag(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.asked)
    }

    /// Sleeps until somebody asks to stop or the time is over; returns whether somebody asked.
    pub(crate) fn wait(&self, time: Option<Duration>) -> bool {
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

    /// Sleeps until there is something to read, be it the end, or somebody asks to stop; returns
    /// whether somebody asked.
    pub(crate) fn wait_for(&self, input: impl AsFd) -> io::Result<bool> {
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
