//! Output of a stream. A separate thread writes it, so that a reader that takes nothing does not
//! delay the end of the command.
//!
//! ```text
//! messages -> thread -> pipe or file
//!          <- written, or why not
//! ```

use std::{
    fs::File,
    io::{self, BufWriter, Write},
    sync::mpsc::{self, Receiver, RecvTimeoutError, Sender},
    thread,
    time::{Duration, Instant},
};

use bowline::rds::Message;
use bowline_node::signals::Stop;

use super::SLICE;

/// Largest number of bytes in one write.
const TOGETHER: usize = 64 << 10;
/// Longest wait for a slow reader, once the command was asked to stop.
const PATIENCE: Duration = Duration::from_secs(1);

/// Writes messages, some at a time.
pub(super) struct Output {
    messages: Sender<Vec<Message>>,
    written: Receiver<io::Result<()>>,
    /// The thread has messages to write.
    writes: bool,
}

impl Output {
    /// Starts the thread that writes to a file.
    pub(super) fn start(file: File) -> io::Result<Self> {
        let (messages, work) = mpsc::channel::<Vec<Message>>();
        let (tell, written) = mpsc::channel();
        let write = move || {
            let mut to = BufWriter::with_capacity(TOGETHER, file);
            for messages in work {
                // The receiver is gone when the command ends.
                if tell.send(put(&mut to, &messages)).is_err() {
                    return;
                }
            }
        };
        thread::Builder::new().name("output".into()).spawn(write)?;
        Ok(Self { messages, written, writes: false })
    }

    /// Waits until the thread has written the messages before, and hands it these. Returns false if
    /// the command was asked to stop before that.
    pub(super) fn put(&mut self, messages: Vec<Message>, stop: &Stop) -> io::Result<bool> {
        while self.writes {
            self.look(SLICE)?;
            if self.writes && stop.asked() {
                return Ok(false);
            }
        }
        self.messages.send(messages).map_err(|_| io::ErrorKind::BrokenPipe)?;
        self.writes = true;
        Ok(true)
    }

    /// Tells whether everything was written.
    pub(super) fn is_idle(&self) -> bool {
        !self.writes
    }

    /// Waits until everything is written, with a time limit once the command was asked to stop.
    /// Returns whether it is.
    pub(super) fn finish(&mut self, stop: &Stop) -> io::Result<bool> {
        let mut end = None;
        while self.writes {
            self.look(SLICE)?;
            if stop.asked() && Instant::now() >= *end.get_or_insert(Instant::now() + PATIENCE) {
                break;
            }
        }
        Ok(!self.writes)
    }

    /// Waits up to `time` for the thread to finish a write, and returns its result.
    pub(super) fn look(&mut self, time: Duration) -> io::Result<()> {
        if !self.writes {
            return Ok(());
        }
        match self.written.recv_timeout(time) {
            Ok(written) => {
                self.writes = false;
                written
            }
            Err(RecvTimeoutError::Timeout) => Ok(()),
            // The thread panicked, which was printed when it happened.
            Err(RecvTimeoutError::Disconnected) => Err(io::ErrorKind::BrokenPipe.into()),
        }
    }
}

fn put(to: &mut BufWriter<File>, messages: &[Message]) -> io::Result<()> {
    for message in messages {
        for slice in message.slices() {
            to.write_all(slice)?;
        }
    }
    to.flush()
}
