//! `bowline top`: what a running node does, again and again.
//!
//! ```text
//! node -> Asker, a thread -> Snapshot -> View (rates) -> text -> Screen or lines
//! ```
//!
//! The thread that asks is apart, so that keys and signals are heeded while a node does not answer.

mod screen;
mod view;

use std::{
    io::{self, IsTerminal, Read, Write},
    os::{fd::AsFd, unix::net::UnixStream},
    path::PathBuf,
    sync::mpsc::{self, Receiver, Sender},
    thread,
    time::{Duration, Instant},
};

use bowline_node::{Failure, Outcome, control::Client, log, signals::Stop, values::interval};

use self::{
    screen::Screen,
    view::{Sample, View},
};

/// Shortest time between two looks.
const DELAY_MIN: Duration = Duration::from_millis(100);

/// Watch a running node: connections, rates, queues, sockets and their processes.
///
/// On a terminal the view changes in place; q or Ctrl-C ends it. Elsewhere one view is printed
/// after another. Rates are those since the previous view, so the first view has none. Connections
/// that are not established come first, with the time and the reason of their end.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "\
Columns: OVER tcp or rdma; PATHS in service and agreed; TX/s, RX/s messages; TXB/s, RXB/s bytes with headers; QUEUED bytes of \
messages that the peer has not acknowledged, WAIT those of them not yet given to the transport, UNACK the others, \
both in messages; LOST times that a path lost its connection; LAST when and why one last ended or was not \
made. SENDQ, RECVQ bytes in the queues of a \
socket. A socket without PID is one of the node itself.")]
pub(crate) struct Args {
    /// Time between views
    #[arg(short, long, value_name = "SECONDS", default_value = "1", value_parser = delay)]
    delay: Duration,
    /// End after this number of views
    #[arg(short = 'n', long, value_name = "COUNT", value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,
    /// Print a line of JSON for each view
    #[arg(long)]
    json: bool,
    /// Control socket of the node [default: that of the only node in this network
    /// namespace; a node in the folder of this user comes first]
    #[arg(long, value_name = "PATH")]
    control: Option<PathBuf>,
}

fn delay(text: &str) -> Result<Duration, String> {
    match interval(text)? {
        time if time >= DELAY_MIN => Ok(time),
        _ => Err(format!("\"{text}\" is too short; the minimum is 0.1")),
    }
}

/// Runs the command.
pub(crate) fn run(args: &Args) -> Outcome {
    let client = Client::connect(args.control.as_deref())?;
    let asker = Asker::start(client)?;
    let stop = Stop::install()?;
    let on_terminal = io::stdout().is_terminal() && !args.json;
    let mut screen = on_terminal.then(Screen::open).transpose().map_err(|error| cannot(&error))?;
    watch(args, &asker, &stop, screen.as_mut())
}

fn cannot(error: &io::Error) -> Failure {
    Failure::failed(format!("cannot use the terminal: {error}"))
}

fn watch(args: &Args, asker: &Asker, stop: &Stop, mut screen: Option<&mut Screen>) -> Outcome {
    let mut before = None;
    let mut shown = 0;
    let mut due = Instant::now();
    let mut is_asked = false;
    loop {
        let now = Instant::now();
        if !is_asked && now >= due {
            asker.ask();
            // A look that comes late is not made up for.
            (is_asked, due) = (true, now + args.delay);
        }
        let time = if is_asked { args.delay } else { due - now };
        let keys = screen.as_ref().and_then(|screen| screen.keys());
        let answers = asker.wake.as_fd();
        // Without keys the answers stand in their place: the second look at them changes nothing.
        let ready = stop.wait_for_any([answers, keys.unwrap_or(answers)], time);
        let [answered, pressed] = ready.map_err(|error| cannot(&error))?;
        let has_key = pressed && keys.is_some();
        if stop.asked() || (has_key && screen.as_mut().is_some_and(|screen| screen.is_to_quit())) {
            return Ok(());
        }
        if !answered {
            continue;
        }
        let view = View::new(before.as_ref(), asker.take()?);
        is_asked = false;
        match screen.as_mut() {
            Some(screen) => screen.show(&view),
            None if args.json => say!("{}", view.json()?),
            None => log::text(&view.text(None)),
        }
        before = Some(view.into_sample());
        shown += 1;
        if args.count.is_some_and(|count| shown >= count) {
            return Ok(());
        }
    }
}

/// The thread that asks the node.
struct Asker {
    questions: Sender<()>,
    answers: Receiver<Outcome<Sample>>,
    /// Readable when there is an answer.
    wake: UnixStream,
}

impl Asker {
    fn start(mut client: Client) -> Outcome<Self> {
        let (questions, asked) = mpsc::channel();
        let (told, answers) = mpsc::channel();
        let cannot_start =
            |error: io::Error| Failure::failed(format!("cannot start a thread: {error}"));
        let (wake, ring) = UnixStream::pair().map_err(cannot_start)?;
        let body = move || {
            for () in asked {
                let answer = client.state().map(|snapshot| Sample { at: Instant::now(), snapshot });
                // A command that has ended takes no more answers.
                if told.send(answer).is_err() || (&ring).write_all(&[1]).is_err() {
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
    fn take(&self) -> Outcome<Sample> {
        let gone = || Failure::failed("the thread that asks the node has ended");
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
