//! The service manager that started this process, by the protocol of sd_notify(3): it is told what
//! the process does. A process without a manager tells nobody anything.

use std::{
    env,
    ffi::OsString,
    io::{self, IoSlice},
    mem::MaybeUninit,
    os::{
        fd::{AsFd, BorrowedFd},
        linux::net::SocketAddrExt,
        unix::{
            ffi::OsStrExt,
            net::{SocketAddr, UnixDatagram, UnixStream},
        },
    },
    process,
    time::{Duration, Instant},
};

use serde::{Deserialize, Serialize};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg},
    time::{ClockId, clock_gettime},
};

use crate::background;

/// A watchdog is told this often within its time, so that one late message does no harm.
const BEATS: u32 = 3;
/// Most descriptors in one message; the kernel takes 253.
const BATCH: usize = 250;
/// How long the manager may take to store descriptors.
const STORE_TIME: Duration = Duration::from_secs(5);
/// Time for the end of a service beside what it waits for.
const END_TIME: Duration = Duration::from_secs(10);

/// Where a manager listens, and how often it wants to hear from this process.
///
/// The socket is connected from the start, since a process that is confined reaches no abstract
/// name that it is not connected to.
#[derive(Debug)]
pub struct Supervisor {
    to: Option<(UnixDatagram, SocketAddr)>,
    beat: Option<Duration>,
    /// It keeps descriptors.
    keeps: bool,
}

/// Where a manager listens, and what it expects, for another process of its service.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub struct Contact {
    /// As in `NOTIFY_SOCKET`.
    socket: String,
    /// As in `WATCHDOG_USEC`.
    watchdog_usec: Option<u64>,
    /// It keeps descriptors.
    keeps: bool,
}

/// Shows a watchdog that a process makes progress which waits in a loop.
#[derive(Debug)]
pub struct Beats<'a> {
    supervisor: &'a Supervisor,
    last: Option<Instant>,
}

impl Beats<'_> {
    /// To be called in the loop, as often as it likes.
    pub fn tick(&mut self) {
        let Some(beat) = self.supervisor.beat else { return };
        if self.last.is_none_or(|last| last.elapsed() >= beat) {
            self.last = Some(Instant::now());
            self.supervisor.beat();
        }
    }
}

impl Supervisor {
    /// Returns the manager that the environment names, if it names one.
    pub fn of_this_process() -> Self {
        Self::named(|name| env::var_os(name))
    }

    fn named(variable: impl Fn(&str) -> Option<OsString>) -> Self {
        let number = |name| variable(name)?.to_str()?.parse::<u64>().ok();
        let address = variable("NOTIFY_SOCKET").and_then(|place| address(&place));
        let to = address.and_then(|address| Some((UnixDatagram::unbound().ok()?, address)));
        if let Some((socket, address)) = &to {
            // Where nobody listens yet, somebody may later.
            let _ = socket.connect_addr(address);
        }
        let is_ours = variable("WATCHDOG_PID").is_none()
            || number("WATCHDOG_PID") == Some(process::id().into());
        let watchdog = number("WATCHDOG_USEC").filter(|micros| is_ours && *micros > 0);
        let beat = watchdog.map(|micros| Duration::from_micros(micros) / BEATS);
        let keeps = to.is_some() && number("FDSTORE").is_some_and(|count| count > 0);
        Self { beat: beat.filter(|_| to.is_some()), to, keeps }
    }

    /// Tells whether it keeps descriptors for the next process of the service, as far as it says so
    /// (`FDSTORE`, systemd 254).
    pub const fn keeps(&self) -> bool {
        self.keeps
    }

    /// The start of the service takes this long from now on, or less.
    pub fn extend(&self, wait: Duration, status: &str) {
        let micros = wait.as_micros();
        self.tell(&format!("EXTEND_TIMEOUT_USEC={micros}\nSTATUS={status}"));
    }

    /// Returns the manager of another process, in whose service this one is to be.
    pub fn of(contact: &Contact) -> Self {
        Self::named(|name| match name {
            "NOTIFY_SOCKET" => Some(contact.socket.clone().into()),
            "FDSTORE" => contact.keeps.then(|| "1".into()),
            "WATCHDOG_USEC" => contact.watchdog_usec.map(|micros| micros.to_string().into()),
            _ => None,
        })
    }

    /// Returns what another process needs to be in this service.
    pub fn contact(&self) -> Option<Contact> {
        let (_, address) = self.to.as_ref()?;
        let socket = match (address.as_pathname(), address.as_abstract_name()) {
            (Some(path), _) => path.to_str()?.to_owned(),
            (_, Some(name)) => format!("@{}", std::str::from_utf8(name).ok()?),
            _ => return None,
        };
        let watchdog = self.beat.map(|beat| beat * BEATS);
        let watchdog_usec = watchdog.and_then(|time| time.as_micros().try_into().ok());
        Some(Contact { socket, watchdog_usec, keeps: self.keeps })
    }

    /// Begins a loop that shows the watchdog that it makes progress.
    pub const fn beats(&self) -> Beats<'_> {
        Beats { supervisor: self, last: None }
    }

    /// Another process is the main one of the service from now on, and this one is about to end.
    /// Returns once the manager knows it.
    ///
    /// # Errors
    /// `NotFound` without a manager, `TimedOut` for one that does not listen; errors of the system.
    pub fn main_process(&self, process: u32) -> io::Result<()> {
        self.tell(&format!("MAINPID={process}\nSTATUS=another process continues"));
        self.barrier()
    }

    /// Tells whether there is one.
    pub fn is_there(&self) -> bool {
        self.to.is_some()
    }

    /// Tells that the service does its work from now on; also who has started this process with
    /// `--background`.
    pub fn ready(&self, status: &str) {
        background::ready();
        self.tell(&format!("READY=1\nSTATUS={status}"));
    }

    /// Tells people what the service does, in one line.
    pub fn status(&self, status: &str) {
        self.tell(&format!("STATUS={status}"));
    }

    /// Tells that the service begins to read its settings anew; [`Self::ready`] ends that.
    pub fn reloading(&self) {
        let now = clock_gettime(ClockId::Monotonic);
        let micros = now.tv_sec * 1_000_000 + now.tv_nsec / 1000;
        self.tell(&format!("RELOADING=1\nMONOTONIC_USEC={micros}"));
    }

    /// Tells that the service ends, for which it waits up to this long.
    pub fn stopping(&self, wait: Duration, status: &str) {
        let micros = (wait + END_TIME).as_micros();
        self.tell(&format!("STOPPING=1\nEXTEND_TIMEOUT_USEC={micros}\nSTATUS={status}"));
    }

    /// Leaves descriptors with the manager, which passes them to the next process of this service
    /// under the name. Returns once it has them.
    ///
    /// # Errors
    /// `NotFound` without a manager, `TimedOut` for one that does not take them; errors of the
    /// system.
    pub fn store(&self, name: &str, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
        self.store_as(&format!("FDSTORE=1\nFDNAME={name}"), descriptors)
    }

    /// As [`store`](Self::store); the manager does not wait for the other ends to be closed. It
    /// would be woken with each request of a mount.
    ///
    /// # Errors
    /// Those of [`store`](Self::store).
    pub fn store_unpolled(&self, name: &str, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
        self.store_as(&format!("FDSTORE=1\nFDPOLL=0\nFDNAME={name}"), descriptors)
    }

    fn store_as(&self, state: &str, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
        descriptors.chunks(BATCH).try_for_each(|batch| self.tell_with(state, batch))?;
        self.barrier()
    }

    /// Waits until the manager has read all messages.
    ///
    /// # Errors
    /// `NotFound` without a manager, `TimedOut` for one that does not read; errors of the system.
    pub fn barrier(&self) -> io::Result<()> {
        // The manager closes the other end when it has read all before it.
        let (ours, theirs) = UnixStream::pair()?;
        self.tell_with("BARRIER=1", &[theirs.as_fd()])?;
        drop(theirs);
        let patience = Timespec::try_from(STORE_TIME).unwrap_or_default();
        loop {
            match poll(&mut [PollFd::new(&ours, PollFlags::IN)], Some(&patience)) {
                Ok(0) => return Err(io::ErrorKind::TimedOut.into()),
                Ok(_) => return Ok(()),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// The manager need not keep the descriptors of this name any longer.
    pub fn forget(&self, name: &str) {
        self.tell(&format!("FDSTOREREMOVE=1\nFDNAME={name}"));
    }

    fn tell_with(&self, state: &str, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
        let (socket, address) = self.to.as_ref().ok_or(io::ErrorKind::NotFound)?;
        let mut is_anew = false;
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(BATCH))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        control.push(SendAncillaryMessage::ScmRights(descriptors));
        let text = [IoSlice::new(state.as_bytes())];
        loop {
            match sendmsg(socket, &text, &mut control, SendFlags::NOSIGNAL) {
                Err(rustix::io::Errno::INTR) => {}
                Err(_) if !is_anew => {
                    socket.connect_addr(address)?;
                    is_anew = true;
                }
                sent => return Ok(sent.map(drop)?),
            }
        }
    }

    /// Tells the watchdog that the service makes progress; to be called by what shows that it does.
    pub fn beat(&self) {
        if self.beat.is_some() {
            self.tell("WATCHDOG=1");
        }
    }

    /// Returns how long a loop may sleep that calls [`Self::beat`], at most `longest`.
    pub fn pause(&self, longest: Duration) -> Duration {
        self.beat.map_or(longest, |beat| beat.min(longest))
    }

    fn tell(&self, state: &str) {
        if let Some((socket, address)) = &self.to {
            let sent = socket.send(state.as_bytes());
            // It may listen anew. A manager that does not listen cannot be helped.
            if sent.is_err() && socket.connect_addr(address).is_ok() {
                let _ = socket.send(state.as_bytes());
            }
        }
    }
}

/// Returns the address of a path, or of an abstract name, which begins with `@`.
fn address(place: &OsString) -> Option<SocketAddr> {
    match place.as_bytes() {
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name).ok(),
        [] => None,
        _ => SocketAddr::from_pathname(place).ok(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(variables: &[(&str, &str)]) -> Supervisor {
        Supervisor::named(|name| {
            let found = variables.iter().find(|(known, _)| *known == name);
            found.map(|(_, value)| OsString::from(value))
        })
    }

    #[test]
    fn a_watchdog_is_told_several_times_within_its_time() {
        let second = Duration::from_secs(1);
        let other = (process::id() + 1).to_string();
        let own = process::id().to_string();
        let to = ("NOTIFY_SOCKET", "@bowline-nobody");
        assert_eq!(named(&[to]).pause(second), second);
        assert_eq!(named(&[to, ("WATCHDOG_USEC", "30000000")]).pause(second), second);
        let soon = Duration::from_millis(200);
        assert_eq!(named(&[to, ("WATCHDOG_USEC", "600000")]).pause(second), soon);
        let pid = |pid| named(&[to, ("WATCHDOG_USEC", "600000"), ("WATCHDOG_PID", pid)]);
        assert_eq!(pid(&own).pause(second), soon);
        assert_eq!(pid(&other).pause(second), second, "it is another process that is watched");
        assert_eq!(named(&[("WATCHDOG_USEC", "600000")]).pause(second), second, "nobody listens");
    }

    #[test]
    fn without_a_manager_nothing_is_told() {
        for place in ["", "relative\0"] {
            assert!(named(&[("NOTIFY_SOCKET", place)]).to.is_none(), "{place:?}");
        }
        named(&[]).ready("alone");
    }
}
