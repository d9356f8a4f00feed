//! `--background`: a command starts itself once more, and ends when this other process is ready.
//!
//! ```text
//!   the command                                     the process in the background
//!   starts it with a pipe as its input, waits  -->  takes the pipe, its input is /dev/null
//!   passes signals on                          -->  ends
//!   ends                                       <--  leaves pipes, one byte: it is ready
//! ```
//!
//! A pipe or socket at its standard output or error belongs to somebody who reads to its end, such
//! as a shell's `$(..)`: the process has it until it is ready, and writes to nowhere later.
//!
//! The pipe has no name, and no other program gets it: nobody else can say that the process is
//! ready.

use std::{
    env,
    fs::File,
    io::{self, Read, Write},
    os::{
        fd::AsFd,
        unix::process::{CommandExt, ExitStatusExt},
    },
    process::{self, Child, Command},
    sync::{Mutex, PoisonError},
    thread,
    time::Duration,
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    process::{Pid, Signal, kill_process},
};

use crate::{Failure, Outcome, log, signals::Passed};

/// The option, in place of which the other process gets [`IN_BACKGROUND`].
const OPTION: &str = "--background";
const IN_BACKGROUND: &str = "--in-background";
/// How often the first process checks whether the other one has ended, and whether signals came.
const CHECK_INTERVAL: Duration = Duration::from_millis(50);
/// What a shell adds to the number of a signal for the exit status.
const SIGNALLED: i32 = 128;

/// What a process in the background has until it is ready.
struct Starter {
    /// The end of the pipe.
    pipe: File,
    /// In place of what it leaves; a process that is confined cannot open it.
    null: File,
}

static STARTER: Mutex<Option<Starter>> = Mutex::new(None);

/// What a process in the background is started with.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct InBackground {
    /// Run in the background of a process that waits at standard input (internal)
    #[arg(long, hide = true)]
    in_background: bool,
}

impl InBackground {
    /// Takes the pipe from the standard input of a process in the background. To be called before
    /// other programs are started, which would have it.
    ///
    /// # Errors
    /// Errors of the system.
    pub fn begin(&self) -> Outcome {
        if !self.in_background {
            return Ok(());
        }
        let take = || -> io::Result<Starter> {
            // A program that is started does not get the copy.
            let pipe = io::stdin().as_fd().try_clone_to_owned()?.into();
            let null = File::options().read(true).write(true).open("/dev/null")?;
            rustix::stdio::dup2_stdin(&null)?;
            Ok(Starter { pipe, null })
        };
        let starter =
            take().map_err(|error| Failure::failed(format!("standard input: {error}")))?;
        *STARTER.lock().unwrap_or_else(PoisonError::into_inner) = Some(starter);
        Ok(())
    }
}

/// Says that this process is ready, if it was started in the background; once.
pub(crate) fn ready() {
    let starter = STARTER.lock().unwrap_or_else(PoisonError::into_inner).take();
    if let Some(Starter { mut pipe, null }) = starter {
        if let Err(error) = log::leave_readers(&null) {
            note!("standard output and error stay open: {error}");
        }
        // Who waited no longer cannot be helped.
        let _ = pipe.write_all(&[1]);
    }
}

/// Starts the command line of this process in another one, which has its output but neither its
/// input nor the signals of its terminal, and waits until it is ready; until then signals are
/// passed on. If that process ends before, this one ends with its exit status.
///
/// # Errors
/// The process cannot be started.
pub fn start() -> Outcome {
    let cannot =
        |error: io::Error| Failure::failed(format!("cannot start in the background: {error}"));
    let signals = Passed::install()?;
    let (pipe, other) = io::pipe().map_err(cannot)?;
    let mut command = Command::new(env::current_exe().map_err(cannot)?);
    let mut words = env::args_os();
    // It may be called by another name, as `rnbd`.
    command.arg0(words.next().unwrap_or_default());
    command.args(words.map(|word| if word == OPTION { IN_BACKGROUND.into() } else { word }));
    let mut child = command.stdin(other).process_group(0).spawn().map_err(cannot)?;
    // With it goes this process's copy of the other end.
    drop(command);
    if let Some(status) = wait(&mut child, pipe, &signals).map_err(cannot)? {
        // The other process has said why.
        process::exit(status);
    }
    say!("process {0} runs in the background; `kill {0}` ends it", child.id());
    Ok(())
}

/// Waits until the other process is ready; returns the exit status if it has ended.
fn wait(child: &mut Child, mut pipe: io::PipeReader, signals: &Passed) -> io::Result<Option<i32>> {
    let (mut asked, mut is_open) = (None, true);
    let interval = Timespec::try_from(CHECK_INTERVAL).ok();
    loop {
        for number in signals.take() {
            asked = Some(number);
            if let Some(signal) = Signal::from_named_raw(number) {
                // An error means that it has just ended.
                let _ = kill_process(Pid::from_child(child), signal);
            }
        }
        if !is_open || asked.is_some() {
            // It is about to end.
            thread::sleep(CHECK_INTERVAL);
        } else if poll(&mut [PollFd::new(&pipe, PollFlags::IN)], interval.as_ref()) == Ok(1) {
            match pipe.read(&mut [0]) {
                Ok(1) => return Ok(None),
                // What was asked for in the meantime is seen first.
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                _ => is_open = false,
            }
        }
        if let Some(status) = child.try_wait()? {
            let ended = status.code().or(status.signal().map(|signal| SIGNALLED + signal));
            let asked = asked.map_or(1, |signal| SIGNALLED + signal);
            return Ok(Some(ended.filter(|code| *code != 0).unwrap_or(asked)));
        }
    }
}
