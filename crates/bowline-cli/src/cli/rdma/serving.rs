//! The server side of these commands: one client after the other, or a single one.

use bowline_node::{Failure, Outcome, log::Duty, signals::Stop};
use bowline_verbs::{CmId, ConnRequest, Device};

use super::Ended;
use super::arrivals::Arrivals;
use super::local::Local;

/// Which side of a connection a command is.
#[derive(Debug, clap::Args)]
pub(super) struct Side {
    /// Serve one client
    #[arg(short, long, conflicts_with = "client")]
    pub(super) server: bool,
    /// Connect to this server
    #[arg(short, long, value_name = "ADDRESS")]
    pub(super) client: Option<String>,
    #[command(flatten)]
    pub(super) local: Local,
}

impl Side {
    /// Refuses a command that is neither side.
    pub(super) fn check(&self) -> Outcome {
        if self.server || self.client.is_some() {
            return Ok(());
        }
        Err(Failure::usage("give one of --server and --client ADDRESS"))
    }
}

/// Options of serving and printing.
#[derive(Debug, clap::Args)]
pub(super) struct ServeOptions {
    /// Serve one client after another. A client that connects while another is served waits, a
    /// bowline client as long as its --timeout
    #[arg(short = 'P', long, conflicts_with = "client")]
    pub(super) persistent: bool,
    /// Print the results as JSON objects, one per line
    #[arg(long)]
    pub(super) json: bool,
}

impl ServeOptions {
    /// Returns how the output of the command is treated.
    pub(super) fn duty(&self) -> Duty {
        if self.persistent { Duty::Service { json: self.json } } else { Duty::Results }
    }
}

/// What follows when a client was served.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Then {
    /// Nothing of this client.
    Next,
    /// The client connects again, with its next order.
    Same,
}

/// Listens, and runs `one` with each client until a stop signal or, unless `persistent`, with the
/// first only. `word` is the name of the command.
pub(super) fn serve_each(
    word: &str,
    local: &Local,
    (persistent, json): (bool, bool),
    stop: &Stop,
    mut one: impl FnMut(&dyn Device, &Arrivals<'_>, CmId, &ConnRequest) -> Result<Then, Ended>,
) -> Outcome {
    let (opened, places) = local.serving()?;
    let device = &opened.device;
    let arrivals = Arrivals::new(&**device, stop);
    opened.listen(&places, json)?;
    let mut limit = None;
    loop {
        let (id, request) = match arrivals.request(limit) {
            Err(Ended::Stopped) => return Ok(()),
            got => got?,
        };
        let text = match one(&**device, &arrivals, id, &request) {
            Ok(Then::Same) => {
                // One that persists waits for anybody.
                limit = (!persistent).then_some(local.timeout);
                continue;
            }
            Ok(Then::Next) if persistent => continue,
            Ok(Then::Next) | Err(Ended::Stopped) => return Ok(()),
            Err(Ended::Left) => "the client left".to_owned(),
            Err(Ended::Failed(text)) => text,
        };
        let peer = request.remote;
        if !persistent {
            return Err(Failure::Failed(format!("{peer}: {text}")));
        }
        note_of_peer!("bowline {word}: {peer}: {text}");
    }
}
