//! Views of something that runs, again and again: in their place on a terminal, one after another
//! elsewhere.
//!
//! ```text
//! what is asked -> Asker, a thread -> sample -> View (rates) -> text -> Screen or lines
//! ```
//!
//! The thread that asks is apart, so that keys and signals are heeded while nobody answers.

mod choice;
mod fit;
mod screen;

use std::{
    io::{self, IsTerminal, Read, Write},
    os::{fd::AsFd, unix::net::UnixStream},
    sync::mpsc::{self, Receiver, Sender},
    thread,
    time::{Duration, Instant},
};

use bowline_node::{Failure, Outcome, log, signals::Stop, values::interval};

use self::screen::Screen;
pub(crate) use self::{
    choice::Choice,
    fit::{Column, fitted},
};

/// Shortest time between two looks.
const DELAY_MIN: Duration = Duration::from_millis(100);

/// When views are shown, and how.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Options {
    /// Time between views
    #[arg(short, long, value_name = "SECONDS", default_value = "1", value_parser = delay)]
    delay: Duration,
    /// End after this number of views
    #[arg(short = 'n', long, value_name = "COUNT", value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,
    /// Show only rows with this text, in capitals or not, as the key / does; not of --json
    #[arg(long, value_name = "TEXT", conflicts_with = "json")]
    filter: Option<String>,
    /// Print a line of JSON for each view
    #[arg(long)]
    json: bool,
}

fn delay(text: &str) -> Result<Duration, String> {
    match interval(text)? {
        time if time >= DELAY_MIN => Ok(time),
        _ => Err(format!("\"{text}\" is too short; the minimum is 0.1")),
    }
}

/// Room on a terminal.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Size {
    pub(crate) rows: usize,
    pub(crate) columns: usize,
}

/// What is shown of a sample, compared with the one before.
pub(crate) trait View {
    /// What is known at one moment.
    type Sample: Send + 'static;

    /// Compares a sample with the one before.
    fn new(before: Option<&Self::Sample>, sample: Self::Sample) -> Self;

    /// Gives the sample back.
    fn into_sample(self) -> Self::Sample;

    /// Returns the view as a line of JSON.
    fn json(&self) -> Outcome<String>;

    /// Orders in which rows are shown, the first of which is the default.
    const ORDERS: &'static [&'static str];

    /// Returns the view as lines in the order and with the filter that were chosen; with a size, as
    /// many and as long as fit.
    fn text(&self, size: Option<Size>, choice: &Choice) -> String;
}

/// Returns the first lines of a table, and how many more there are.
pub(crate) fn shortened(mut lines: Vec<String>, room: usize) -> Vec<String> {
    if lines.len() > room && room > 0 {
        let more = lines.len() - (room - 1);
        lines.truncate(room - 1);
        lines.push(format!("  and {more} more"));
    }
    lines.truncate(room);
    lines
}

/// Returns a head and two tables as text; with a size, as many and as long lines as fit.
pub(crate) fn tables(
    head: Vec<String>,
    first: Vec<String>,
    second: Vec<String>,
    size: Option<Size>,
) -> String {
    let mut lines = head;
    match size {
        None => lines.extend(first.into_iter().chain(second).chain([String::new()])),
        Some(size) => {
            let room = size.rows.saturating_sub(lines.len());
            // The shorter table leaves the longer one its room.
            let half = (room / 2).max(room.saturating_sub(second.len()));
            lines.extend(shortened(first, half));
            let room = size.rows.saturating_sub(lines.len());
            lines.extend(shortened(second, room));
            lines.truncate(size.rows);
            for line in &mut lines {
                *line = line.chars().take(size.columns).collect();
            }
        }
    }
    lines.iter().fold(String::new(), |text, line| text + line + "\n")
}

/// The time that rates are over.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rate {
    pub(crate) seconds: Option<f64>,
}

impl Rate {
    /// Returns the growth of a count each second; a count that fell has begun anew.
    pub(crate) fn of(self, then: Option<u64>, now: u64) -> Option<f64> {
        let growth = now.checked_sub(then?).unwrap_or(now);
        Some(growth as f64 / self.seconds?)
    }
}

pub(crate) fn number(value: Option<f64>) -> String {
    value.map_or_else(|| "-".to_owned(), |value| format!("{value:.0}"))
}

pub(crate) fn size_text(value: Option<f64>) -> String {
    value.map_or_else(|| "-".to_owned(), |value| log::bytes(value as u64))
}

/// Shows views of what `ask` returns, until the user has enough of them. `order` is one of the
/// view's.
pub(crate) fn run<V: View>(
    options: &Options,
    order: Option<&str>,
    ask: impl FnMut() -> Outcome<V::Sample> + Send + 'static,
) -> Outcome {
    let asker = Asker::start(ask)?;
    let stop = Stop::install()?;
    let on_terminal = io::stdout().is_terminal() && !options.json;
    let mut screen = on_terminal.then(Screen::open).transpose().map_err(|error| cannot(&error))?;
    let choice = Choice::new(V::ORDERS, order, options.filter.as_deref());
    watch::<V>((options, choice), &asker, &stop, screen.as_mut())
}

fn cannot(error: &io::Error) -> Failure {
    Failure::failed(format!("cannot use the terminal: {error}"))
}

fn watch<V: View>(
    (options, mut choice): (&Options, Choice),
    asker: &Asker<V::Sample>,
    stop: &Stop,
    mut screen: Option<&mut Screen>,
) -> Outcome {
    let mut last: Option<V> = None;
    let mut shown = 0;
    let mut due = Instant::now();
    let mut is_asked = false;
    loop {
        let now = Instant::now();
        if !is_asked && now >= due {
            asker.ask();
            // A look that comes late is not made up for.
            (is_asked, due) = (true, now + options.delay);
        }
        let time = if is_asked { options.delay } else { due - now };
        let keys = screen.as_ref().and_then(|screen| screen.keys());
        let answers = asker.wake.as_fd();
        // Without keys the answers stand in their place: the second look at them changes nothing.
        let ready = stop.wait_for_any([answers, keys.unwrap_or(answers)], time);
        let [answered, pressed] = ready.map_err(|error| cannot(&error))?;
        if stop.asked() {
            return Ok(());
        }
        if pressed
            && keys.is_some()
            && let Some(screen) = screen.as_mut()
        {
            let keys = screen.pressed();
            if keys.is_none_or(|keys| keys.iter().any(|key| choice.is_to_quit(*key))) {
                return Ok(());
            }
            if let Some(view) = &last {
                screen.show(|size| on_screen(view, size, &choice));
            }
        }
        if !answered {
            continue;
        }
        let before = last.take().map(V::into_sample);
        let view = V::new(before.as_ref(), asker.take()?);
        is_asked = false;
        match screen.as_mut() {
            Some(screen) => screen.show(|size| on_screen(&view, size, &choice)),
            None if options.json => say!("{}", view.json()?),
            None => log::text(&view.text(None, &choice)),
        }
        last = Some(view);
        shown += 1;
        if options.count.is_some_and(|count| shown >= count) {
            return Ok(());
        }
    }
}

/// The text of a view, above a line that says what the keys do; or the help.
fn on_screen<V: View>(view: &V, size: Size, choice: &Choice) -> String {
    if choice.shows_help() {
        return choice.help(size);
    }
    let rows = size.rows.saturating_sub(1);
    let text = view.text(Some(Size { rows, ..size }), choice);
    let mut lines: Vec<&str> = text.lines().collect();
    lines.resize(rows, "");
    let state: String = choice.state().chars().take(size.columns).collect();
    lines.push(&state);
    lines.join("\n") + "\n"
}

/// The thread that asks.
struct Asker<S> {
    questions: Sender<()>,
    answers: Receiver<Outcome<S>>,
    /// Readable when there is an answer.
    wake: UnixStream,
}

impl<S: Send + 'static> Asker<S> {
    fn start(mut look: impl FnMut() -> Outcome<S> + Send + 'static) -> Outcome<Self> {
        let (questions, asked) = mpsc::channel();
        let (sender, answers) = mpsc::channel();
        let cannot_start =
            |error: io::Error| Failure::failed(format!("cannot start a thread: {error}"));
        let (wake, ring) = UnixStream::pair().map_err(cannot_start)?;
        let body = move || {
            for () in asked {
                // A command that has ended takes no more answers.
                if sender.send(look()).is_err() || (&ring).write_all(&[1]).is_err() {
                    return;
                }
            }
        };
        thread::Builder::new().name("top".to_owned()).spawn(body).map_err(cannot_start)?;
        Ok(Self { questions, answers, wake })
    }

    fn ask(&self) {
        // The thread lives as long as there are questions.
        let _ = self.questions.send(());
    }

    /// Takes the answer that is there.
    fn take(&self) -> Outcome<S> {
        let gone = || Failure::failed("the thread that asks has ended");
        (&self.wake).read_exact(&mut [0]).map_err(|_| gone())?;
        self.answers.try_recv().map_err(|_| gone())?
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn looks_have_time_between_them() {
        assert_eq!(delay("1"), Ok(Duration::from_secs(1)));
        assert_eq!(delay("100ms"), Ok(DELAY_MIN));
        for text in ["0", "0.01", "-1", "x", ""] {
            assert!(delay(text).is_err(), "{text}");
        }
    }
}
