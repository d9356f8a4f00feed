//! Node B of the quickstart: a second process that takes commands as lines on its standard input.
//!
//! ```text
//! A -> B  start | abort | quit (or the end of the input)
//! B -> A  ready | cut PERCENT CONNECTIONS | report {...} | error TEXT
//! ```

use std::{
    io::{BufRead, BufReader},
    net::{IpAddr, SocketAddr},
    process::{Child, ChildStdin, Command, Stdio},
    sync::{Arc, atomic::Ordering, mpsc},
    thread,
    time::Duration,
};

use bowline::rds::Socket;
use bowline_node::{Failure, Outcome};

use super::{
    remote::Server,
    side::{Cut, Cuts, ECHO_PORT, Progress, Report, Side, Work},
};

const QUIT_TIMEOUT: Duration = Duration::from_secs(2);

/// Arguments of the second process.
#[derive(Debug, clap::Args)]
pub(crate) struct PeerArgs {
    #[arg(long)]
    local: IpAddr,
    #[arg(long)]
    remote: IpAddr,
    #[arg(long)]
    bytes: u64,
    #[arg(long)]
    seed: u64,
    #[arg(long)]
    cuts: u32,
    #[arg(long)]
    rdma: bool,
}

/// Runs node B.
pub(crate) fn run_peer(args: &PeerArgs) -> Outcome {
    let node = super::start_node(args.local, args.rdma)?;
    let mut sockets = Some(Side::bind(&node, args.local)?);
    let echo = node.bind(SocketAddr::new(args.local, ECHO_PORT))?;
    thread::spawn(move || answer(&echo));
    if args.rdma {
        let server = Server::bind(&node, args.local)?;
        thread::spawn(move || server.run());
    }
    say!("ready");
    let mut progress: Option<Arc<Progress>> = None;
    for line in std::io::stdin().lock().lines() {
        match line.as_deref() {
            Ok("start") => {
                let Some(sockets) = sockets.take() else { continue };
                let cuts = Cuts::of_b(args.cuts, args.bytes);
                let told = |cut: Cut| say!("cut {} {}", cut.percent, cut.connections);
                let work = Work { remote: args.remote, bytes: args.bytes, seed: args.seed, cuts };
                let started = Side::start(&node, sockets, work, told)?;
                progress = Some(started.progress());
                thread::spawn(move || report(started));
            }
            Ok("abort") => {
                progress.iter().for_each(|side| side.abort.store(true, Ordering::Relaxed));
            }
            _ => break,
        }
    }
    node.shutdown(QUIT_TIMEOUT);
    Ok(())
}

fn answer(echo: &Socket) {
    let mut buffer = [0; 256];
    while let Ok((len, source)) = echo.recv_from(&mut buffer) {
        if echo.send_to(&buffer[..len], source).is_err() {
            return;
        }
    }
}

fn report(side: Side) {
    let report = side.finish();
    match serde_json::to_string(&report) {
        Ok(text) => say!("report {text}"),
        Err(error) => say!("error cannot write the report: {error}"),
    }
}

/// A message of node B.
#[derive(Debug)]
pub(crate) enum Word {
    Ready,
    Cut(Cut),
    Report(Box<Report>),
    /// An error, or the end of the process.
    Lost(String),
}

/// Node B, seen from node A; dropping it ends the process.
#[derive(Debug)]
pub(crate) struct Peer {
    child: Child,
    input: Option<ChildStdin>,
    words: mpsc::Receiver<Word>,
}

impl Peer {
    /// Starts this program once more, as node B.
    pub(crate) fn start(local: IpAddr, remote: IpAddr, work: &Work, rdma: bool) -> Outcome<Self> {
        let failed = |error: std::io::Error| {
            Failure::failed(format!("cannot start the second process: {error}"))
        };
        let mut child = Command::new(std::env::current_exe().map_err(failed)?)
            .arg("quickstart-peer")
            .args(["--local", &local.to_string(), "--remote", &remote.to_string()])
            .args(["--bytes", &work.bytes.to_string(), "--seed", &work.seed.to_string()])
            .args(["--cuts", &work.cuts.all.to_string()])
            .args(rdma.then_some("--rdma"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(failed)?;
        super::pass_on_log(&mut child);
        let (told, words) = mpsc::channel();
        if let Some(output) = child.stdout.take() {
            thread::spawn(move || {
                for line in BufReader::new(output).lines() {
                    let Ok(line) = line else { break };
                    if told.send(understand(&line)).is_err() {
                        return;
                    }
                }
                // The receiver may be gone at the end.
                let _ = told.send(Word::Lost("the second process ended".to_owned()));
            });
        }
        let input = child.stdin.take();
        Ok(Self { child, input, words })
    }

    /// Returns the process number.
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends a line to node B.
    pub(crate) fn tell(&mut self, line: &str) {
        use std::io::Write;
        if let Some(input) = &mut self.input {
            // If the process is gone, its end is reported as a message.
            let _ = writeln!(input, "{line}");
        }
    }

    /// Returns the next message of node B within this time.
    pub(crate) fn listen(&self, time: Duration) -> Option<Word> {
        self.words.recv_timeout(time).ok()
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        drop(self.input.take());
        super::wait_for_exit(&mut self.child);
    }
}

fn understand(line: &str) -> Word {
    let (word, rest) = line.split_once(' ').unwrap_or((line, ""));
    match word {
        "ready" => Word::Ready,
        "cut" => {
            let (percent, connections) = rest.split_once(' ').unwrap_or((rest, ""));
            match (percent.parse(), connections.parse()) {
                (Ok(percent), Ok(connections)) => Word::Cut(Cut { percent, connections }),
                _ => Word::Lost(format!("node B says: {line}")),
            }
        }
        "report" => match serde_json::from_str(rest) {
            Ok(report) => Word::Report(report),
            Err(error) => Word::Lost(format!("node B's report cannot be read: {error}")),
        },
        _ => Word::Lost(format!("node B says: {line}")),
    }
}
