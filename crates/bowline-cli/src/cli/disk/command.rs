//! The command of `--run`: it uses what this process serves, and the process ends with it.

use std::{
    ffi::OsString,
    fs::{self, DirBuilder},
    io::{self, IsTerminal},
    os::unix::{
        ffi::OsStrExt,
        fs::DirBuilderExt,
        process::{CommandExt, ExitStatusExt},
    },
    path::{Path, PathBuf},
    process::{self, Child},
    thread,
    time::Duration,
};

use bowline_base::entropy::random_u64;
use bowline_node::{
    Failure, Outcome, log,
    signals::{Passed, Stop},
};
use rustix::process::{Pid, Signal, kill_process, kill_process_group};

/// How often it is checked whether the command has ended.
pub(super) const POLL: Duration = Duration::from_millis(20);
/// What a command that was ended by a signal adds to its number in the exit status of a shell.
const SIGNALLED: i32 = 128;

/// Signals of a terminal, which go to the command, too, when it is in the foreground.
const TERMINAL_SIGNALS: [Signal; 3] = [Signal::HUP, Signal::INT, Signal::QUIT];

/// The command, as it is asked for.
pub(super) struct Wanted<'a> {
    text: &'a str,
    signals: Passed,
}

impl<'a> Wanted<'a> {
    /// Prepares for a command. From now on standard output belongs to it.
    pub(super) fn new(text: &'a str) -> Outcome<Self> {
        let signals = Passed::install()?;
        log::lend_output();
        Ok(Self { text, signals })
    }

    /// Starts the command, as a shell does.
    pub(super) fn start(
        &self,
        variables: impl IntoIterator<Item = (&'static str, OsString)>,
        stop: &Stop,
    ) -> Outcome<Running<'_>> {
        let mut command = process::Command::new("/bin/sh");
        command.arg("-c").arg(self.text).envs(variables);
        // A terminal signals the processes of its foreground. Elsewhere the shell and what it runs
        // are a group, all of which get what this process is sent.
        let is_group = !io::stdin().is_terminal();
        if is_group {
            command.process_group(0);
        }
        stop.pass_on(true);
        let child = command.spawn().map_err(|error| {
            stop.pass_on(false);
            Failure::failed(format!("cannot start /bin/sh: {error}"))
        })?;
        Ok(Running { child, is_group, signals: &self.signals })
    }
}

/// The command, once it runs.
pub(super) struct Running<'a> {
    child: Child,
    is_group: bool,
    signals: &'a Passed,
}

impl Running<'_> {
    /// Passes on signals, and returns the exit status of the command if it has ended; without it,
    /// after a little sleep.
    pub(super) fn ended(&mut self, stop: &Stop) -> Outcome<Option<u8>> {
        for signal in self.signals.take() {
            self.pass(signal);
        }
        let status = self
            .child
            .try_wait()
            .map_err(|error| Failure::failed(format!("cannot wait for the command: {error}")))?;
        let Some(status) = status else {
            thread::sleep(POLL);
            return Ok(None);
        };
        stop.pass_on(false);
        // The rest waits for a server that is gone no longer than after a signal.
        stop.ask();
        let signal = status.signal().map(|signal| SIGNALLED + signal);
        let status = status.code().or(signal).unwrap_or(SIGNALLED);
        Ok(Some(u8::try_from(status).unwrap_or(u8::MAX)))
    }

    fn pass(&self, signal: i32) {
        let signal = Signal::from_named_raw(signal);
        let pid = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw);
        let (Some(signal), Some(pid)) = (signal, pid) else { return };
        // An error means that it has just ended.
        if self.is_group {
            let _ = kill_process_group(pid, signal);
        } else if !TERMINAL_SIGNALS.contains(&signal) {
            let _ = kill_process(pid, signal);
        }
    }
}

/// A folder of this user with a socket for the command; it is removed at the end.
#[derive(Debug)]
pub(super) struct PrivateFolder(PathBuf);

impl PrivateFolder {
    pub(super) fn new() -> Outcome<Self> {
        let name = format!("bowline-map-{}-{:x}", process::id(), random_u64());
        let path = std::env::temp_dir().join(name);
        // Nobody else may have a folder of this name: it would not be private.
        DirBuilder::new().mode(0o700).create(&path).map_err(|error| {
            Failure::failed(format!("cannot make the folder {}: {error}", path.display()))
        })?;
        Ok(Self(path))
    }

    /// The place of the socket.
    pub(super) fn socket(&self) -> PathBuf {
        self.0.join("nbd")
    }
}

impl Drop for PrivateFolder {
    fn drop(&mut self) {
        // What is left there, if anything, is of the command.
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// The address of an NBD server at a unix socket, as NBD tools have it.
pub(super) fn nbd_uri(socket: &Path) -> String {
    let mut uri = String::from("nbd+unix:///?socket=");
    for byte in socket.as_os_str().as_bytes() {
        match byte {
            b'/' | b'-' | b'.' | b'_' | b'~' => uri.push(char::from(*byte)),
            byte if byte.is_ascii_alphanumeric() => uri.push(char::from(*byte)),
            byte => uri.push_str(&format!("%{byte:02X}")),
        }
    }
    uri
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_has_no_characters_of_its_own_in_the_path() {
        let uri = nbd_uri(Path::new("/run/a b&c=%/\u{fc}.sock"));
        assert_eq!(uri, "nbd+unix:///?socket=/run/a%20b%26c%3D%25/%C3%BC.sock");
    }
}
