//! The terminal of views: a screen of its own, keys without echo, and both given back on
//! every way out.

use std::{
    io::{self, IsTerminal, Write},
    os::fd::{AsFd, BorrowedFd},
    thread,
};

use bowline_node::log;
use rustix::termios::{
    OptionalActions, SpecialCodeIndex, Termios, tcgetattr, tcgetwinsize, tcsetattr,
};

use super::Size;

/// To the other screen, without a cursor; and back.
const ENTER: &str = "\x1b[?1049h\x1b[?25l";
const LEAVE: &str = "\x1b[?25h\x1b[?1049l";
/// Cursor home; the rest of a line; the rest of the screen.
const HOME: &str = "\x1b[H";
const CLEAR_LINE: &str = "\x1b[K";
const CLEAR_BELOW: &str = "\x1b[J";

/// The terminal, until it is dropped.
pub(super) struct Screen {
    /// Settings of the keyboard before; `None` when standard input is no terminal.
    before: Option<Termios>,
}

impl Screen {
    /// Takes the terminal over.
    pub(super) fn open() -> io::Result<Self> {
        let before = if io::stdin().is_terminal() {
            let before = tcgetattr(rustix::stdio::stdin())?;
            let mut keys = before.clone();
            keys.make_raw();
            // A read takes what is there.
            keys.special_codes[SpecialCodeIndex::VMIN] = 0;
            keys.special_codes[SpecialCodeIndex::VTIME] = 0;
            // Output goes on as it was.
            keys.output_modes = before.output_modes;
            tcsetattr(rustix::stdio::stdin(), OptionalActions::Now, &keys)?;
            Some(before)
        } else {
            None
        };
        log::text(ENTER);
        Ok(Self { before })
    }

    /// Returns where keys come from, if any do.
    pub(super) fn keys(&self) -> Option<BorrowedFd<'static>> {
        self.before.is_some().then(rustix::stdio::stdin)
    }

    /// Takes the keys that were pressed; `None` at the end of the input.
    pub(super) fn pressed(&mut self) -> Option<Vec<u8>> {
        let mut keys = [0; 64];
        match rustix::io::read(rustix::stdio::stdin(), &mut keys) {
            Ok(0) => None,
            Ok(len) => Some(keys[..len].to_vec()),
            Err(rustix::io::Errno::INTR | rustix::io::Errno::AGAIN) => Some(Vec::new()),
            // The terminal is gone.
            Err(_) => None,
        }
    }

    /// Shows a text in the place of the one before; it gets the room that there is.
    pub(super) fn show(&mut self, text_in: impl FnOnce(Size) -> String) {
        let mut text = String::from(HOME);
        for line in text_in(size()).lines() {
            text.push_str(line);
            text.push_str(CLEAR_LINE);
            text.push('\n');
        }
        // The last line has no end, which would move the others up.
        let end = text.trim_end_matches('\n').len();
        text.truncate(end);
        text.push_str(CLEAR_BELOW);
        log::text(&text);
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        if thread::panicking() {
            // The lines of the queue may not be written any more.
            let _ = io::stdout().lock().write_all(LEAVE.as_bytes());
        } else {
            log::text(LEAVE);
        }
        if let Some(before) = &self.before {
            // A terminal that is gone needs nothing.
            let _ = tcsetattr(rustix::stdio::stdin(), OptionalActions::Now, before);
        }
    }
}

/// Returns the size of the terminal; one that does not say is as large as most were.
fn size() -> Size {
    let found = tcgetwinsize(io::stdout().as_fd()).ok();
    let found = found.filter(|size| size.ws_row > 0 && size.ws_col > 0);
    found.map_or(Size { rows: 24, columns: 80 }, |size| Size {
        rows: size.ws_row.into(),
        columns: size.ws_col.into(),
    })
}
