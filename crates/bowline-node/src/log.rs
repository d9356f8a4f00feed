//! Standard output and standard error: lines, progress, and numbers that people read.

mod stamp;
mod writer;

use std::{
    borrow::Cow,
    env,
    fmt::{self, Write as _},
    fs::File,
    io::{self, IsTerminal, Write},
    os::fd::AsFd,
    process,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use rustix::fs::FileType;

pub use stamp::{stamp, utc};
pub use writer::{Duty, begin};

/// Prints a line on standard output.
#[macro_export]
macro_rules! say {
    ($($arg:tt)*) => { $crate::log::line(format_args!($($arg)*)) };
}

/// Prints a line on standard error.
#[macro_export]
macro_rules! note {
    ($($arg:tt)*) => { $crate::log::error_line(format_args!($($arg)*)) };
}

/// Prints a line that a peer has caused on standard output. Those of a service are bounded in rate,
/// so that peers cannot fill a disk.
#[macro_export]
macro_rules! say_of_peer {
    ($($arg:tt)*) => {
        if $crate::log::admits_line() {
            $crate::say!("{}", $crate::log::shown(&format!($($arg)*)))
        }
    };
}

/// Prints a line that a peer has caused on standard error, under the same bound.
#[macro_export]
macro_rules! note_of_peer {
    ($($arg:tt)*) => {
        if $crate::log::admits_error_line() {
            $crate::note!("{}", $crate::log::shown(&format!($($arg)*)))
        }
    };
}

/// A text that others have chosen, such as the name of a process or of a disk, for one line of a
/// terminal or a log: what would move the cursor, end the line or turn the direction of writing
/// stands as `\n`, or as `\u001b` with the number of the character, which JSON has, too.
pub fn shown(text: &str) -> Cow<'_, str> {
    escaped(text, |_| false)
}

/// The same, but with the ends of lines and the tabs of a text of ours.
fn lines(text: &str) -> Cow<'_, str> {
    escaped(text, |c| matches!(c, '\n' | '\t'))
}

fn escaped(text: &str, is_kept: impl Fn(char) -> bool) -> Cow<'_, str> {
    let moves = |c: char| {
        c.is_control()
            || matches!(c, '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
    };
    if !text.contains(|c| moves(c) && !is_kept(c)) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        match c {
            c if !moves(c) || is_kept(c) => out.push(c),
            '\n' => out.push_str("\\n"),
            '\t' => out.push_str("\\t"),
            '\r' => out.push_str("\\r"),
            // Writing into a String cannot fail.
            c => drop(write!(out, "\\u{:04x}", u32::from(c))),
        }
    }
    Cow::Owned(out)
}

/// Writes what is in a file to standard output, as it is, but for what a terminal would do with it.
pub fn content(text: &str) {
    if io::stdout().is_terminal() {
        return put(lines(text).into_owned());
    }
    put(text.to_owned());
}

/// Writes one line to standard output. The command's [`Duty`] decides what happens if that fails; a
/// command without one ends.
pub fn line(args: fmt::Arguments<'_>) {
    put(format!("{}\n", lines(&args.to_string())));
}

/// Writes text without an end of line to standard output, under the same rule as [`line()`].
pub fn text(text: &str) {
    put(text.to_owned());
}

/// Leaves a standard output and a standard error that somebody may read to their end, pipes and
/// sockets, and writes to `null` in place of them. Files, terminals and the journal stay.
pub(crate) fn leave_readers(null: &File) -> io::Result<()> {
    let out = has_reader(&io::stdout()).then(|| null.try_clone()).transpose()?;
    let err = has_reader(&io::stderr()).then(|| null.try_clone()).transpose()?;
    if let Some(null) = &out {
        rustix::stdio::dup2_stdout(null)?;
    }
    if let Some(null) = &err {
        rustix::stdio::dup2_stderr(null)?;
    }
    if let Some(log) = writer::log() {
        log.turn_to(out, err);
    }
    Ok(())
}

/// Returns whether a stream is a pipe, or a socket that is not the journal's.
fn has_reader(stream: &impl AsFd) -> bool {
    let Ok(found) = rustix::fs::fstat(stream) else { return false };
    match FileType::from_raw_mode(found.st_mode) {
        FileType::Fifo => true,
        // As systemd.exec(5) has it: DEVICE:INODE.
        FileType::Socket => env::var("JOURNAL_STREAM")
            .map_or(true, |journal| journal != format!("{}:{}", found.st_dev, found.st_ino)),
        _ => false,
    }
}

/// Standard output belongs to a command that this process runs. Relaxed, for a flag that publishes
/// nothing but itself.
static IS_LENT: AtomicBool = AtomicBool::new(false);

/// Leaves standard output to a command that this process runs: lines go to standard error from now
/// on.
pub fn lend_output() {
    IS_LENT.store(true, Ordering::Relaxed);
}

fn put(text: String) {
    if IS_LENT.load(Ordering::Relaxed) {
        return error_text(text);
    }
    match writer::log() {
        Some(log) => log.out(text),
        None => {
            let mut out = io::stdout().lock();
            if let Err(error) = out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
                cannot_write(&error);
            }
        }
    }
}

/// Ends a command whose results cannot be written. A closed pipe (`bowline info | head`) is not
/// reported.
fn cannot_write(error: &io::Error) -> ! {
    if error.kind() != io::ErrorKind::BrokenPipe {
        let _ = writeln!(io::stderr().lock(), "bowline: cannot write to standard output: {error}");
    }
    process::exit(1)
}

/// Writes one line to standard error; a failure has nowhere to be reported.
pub fn error_line(args: fmt::Arguments<'_>) {
    let line = format!("{}\n", lines(&args.to_string()));
    let shown = on_screen();
    error_text(if shown.is_empty() { line } else { above(&line, &shown) });
}

/// Returns what writes a line above the progress that a terminal shows.
fn above(line: &str, shown: &str) -> String {
    format!("{}{line}{shown}", blank(shown.chars().count()))
}

/// Returns what removes a line of this width from a terminal.
fn blank(width: usize) -> String {
    format!("\r{:width$}\r", "")
}

/// The progress that a terminal shows.
fn on_screen() -> MutexGuard<'static, String> {
    static TEXT: Mutex<String> = Mutex::new(String::new());
    TEXT.lock().unwrap_or_else(PoisonError::into_inner)
}

fn error_text(text: String) {
    match writer::log() {
        Some(log) => log.err(text),
        None => {
            let mut err = io::stderr().lock();
            let _ = err.write_all(text.as_bytes()).and_then(|()| err.flush());
        }
    }
}

/// Returns whether one more line that a peer causes may go to standard output; counts a line that
/// may not.
pub fn admits_line() -> bool {
    writer::log().is_none_or(writer::Log::admits_out)
}

/// The same for standard error.
pub fn admits_error_line() -> bool {
    writer::log().is_none_or(writer::Log::admits_err)
}

/// Waits until the lines are written; to be called at the end.
pub fn finish() {
    if let Some(log) = writer::log() {
        log.finish();
    }
}

/// A line on standard error that is rewritten while work goes on.
///
/// Shown when standard error is a terminal or the user asked for it, at most ten times a second.
/// Other lines come above it.
#[derive(Debug)]
pub struct Progress {
    mode: Mode,
    shown: Option<Instant>,
    width: usize,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Mode {
    Off,
    Rewrite,
    Lines,
}

impl Progress {
    /// Returns a progress line; `asked` shows it even where standard error is not a terminal.
    pub fn new(asked: bool) -> Self {
        let mode = match (io::stderr().is_terminal(), asked) {
            (true, _) => Mode::Rewrite,
            (false, true) => Mode::Lines,
            (false, false) => Mode::Off,
        };
        Self { mode, shown: None, width: 0 }
    }

    /// Shows the text unless one was shown a moment ago.
    pub fn show(&mut self, text: fmt::Arguments<'_>) {
        let gap = match self.mode {
            Mode::Off => return,
            Mode::Rewrite => Duration::from_millis(100),
            Mode::Lines => Duration::from_secs(1),
        };
        let now = Instant::now();
        if self.shown.is_some_and(|shown| now.duration_since(shown) < gap) {
            return;
        }
        self.shown = Some(now);
        let text = text.to_string();
        let width = self.width;
        self.width = text.chars().count();
        if self.mode == Mode::Lines {
            return error_text(format!("{text}\n"));
        }
        let mut shown = on_screen();
        error_text(format!("\r{text:<width$}"));
        *shown = text;
    }

    /// Removes the line from the terminal, so that results do not mix with it.
    pub fn clear(&mut self) {
        if self.mode == Mode::Rewrite && self.width > 0 {
            let mut shown = on_screen();
            error_text(blank(self.width));
            shown.clear();
            self.width = 0;
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.clear();
    }
}

/// Returns a number of bytes in the largest binary unit that keeps three digits.
pub fn bytes(count: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = count as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{count} B") } else { format!("{value:.1} {}", UNITS[unit]) }
}

/// Returns a count with blanks between groups of three digits.
pub fn count(value: u64) -> String {
    let digits = value.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(' ');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_comes_above_the_progress() {
        assert_eq!(above("path lost\n", "12 requests"), "\r           \rpath lost\n12 requests");
    }

    #[test]
    fn names_of_others_move_no_cursor_and_begin_no_line() {
        assert!(matches!(shown("data 1\\ü"), Cow::Borrowed("data 1\\ü")));
        assert_eq!(shown("a\x1b[2J\nb\r\t\x7f\u{9b}"), r"a\u001b[2J\nb\r\t\u007f\u009b");
        assert_eq!(shown("\u{202e}gpj.exe"), r"\u202egpj.exe");
        assert_eq!(lines("two\n\tlines\x07"), "two\n\tlines\\u0007");
        let json = serde_json::json!({ "name": "a\x1b\u{9b}\x7f" }).to_string();
        let read: serde_json::Value = serde_json::from_str(&lines(&json)).expect("still JSON");
        assert_eq!(read["name"], "a\x1b\u{9b}\x7f");
    }

    #[test]
    fn numbers_are_readable() {
        assert_eq!(bytes(17), "17 B");
        assert_eq!(bytes(1 << 30), "1.0 GiB");
        assert_eq!(count(7), "7");
        assert_eq!(count(1_234_567), "1 234 567");
    }
}
