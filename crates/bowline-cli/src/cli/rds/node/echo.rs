//! The echo service of a node: everything that comes to a socket goes back.
//!
//! ```text
//! message -> room for its sender? -- no --> dropped, counted
//!                 | yes
//!                 v
//!            sent, or kept while its sender is congested; given up when it takes nothing for long
//! ```
//!
//! No send waits, because whoever is served next would wait with it. What a sender does not take
//! uses up only its own share, see [`Shares`]. Where many together use up what all have, whoever
//! keeps most makes way.

use std::{
    collections::{HashMap, VecDeque},
    io::IoSlice,
    net::SocketAddr,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    time::{Duration, Instant},
};

use bowline::rds::{Error, Interest, Message, Node, Socket};

use crate::cli::rds::shares::{Amount, Bounds, Lack, Shares};

/// Messages taken at once.
const BATCH: usize = 256;
/// Most receivers that are tried again in one turn.
const TRIES: usize = 1024;
/// Send buffer of the socket by default, and messages: what is kept for all receivers.
pub(super) const SEND_BUFFER: usize = 256 << 20;
pub(super) const MESSAGES_TOTAL: usize = 1 << 19;
/// One receiver has this part of it, but more of a small one; the receivers of a host have twice as
/// much.
const RECEIVER_PART: usize = 32;
const SMALL_PART: usize = 4;
const SMALL_BYTES: usize = 256 << 10;
/// Receivers that took nothing for this long are given up.
const PATIENCE: Duration = Duration::from_secs(30);
/// Pause until congested receivers are tried again, if nothing tells of them, and until those that
/// take nothing are looked for.
const RETRY_PAUSE: Duration = Duration::from_millis(5);
const TIDY_PAUSE: Duration = Duration::from_millis(250);

/// Answers until `over` is set or the socket is closed; counts the answers that were `dropped`.
pub(super) fn serve(
    node: &Node,
    socket: &Socket,
    over: &AtomicBool,
    dropped: &AtomicU64,
) -> Result<(), Error> {
    socket.set_nonblocking(true);
    // Its notifications wake the service up when a receiver is not congested any more.
    socket.set_cong_monitor(true)?;
    let mut echo = Echo::new(node, socket, dropped, socket.send_buffer()?);
    let mut inbox = Vec::with_capacity(BATCH);
    while !over.load(Ordering::Relaxed) {
        inbox.clear();
        match socket.recv_batch(&mut inbox, BATCH) {
            Ok(_) => {}
            Err(error) if error.is_would_block() => {
                match socket.wait(Interest::READ, echo.pause()) {
                    Err(error) if !error.is_timed_out() => return Err(error),
                    _ => {}
                }
            }
            Err(error) => return Err(error),
        }
        let (now, mut told) = (Instant::now(), false);
        for message in &inbox {
            if message.is_notification() {
                told = true;
            } else {
                echo.answer(message, now)?;
            }
        }
        if told || now.saturating_duration_since(echo.tried) >= RETRY_PAUSE {
            echo.try_again(now);
        }
        echo.tidy(now)?;
    }
    Ok(())
}

struct Echo<'a> {
    node: &'a Node,
    socket: &'a Socket,
    dropped: &'a AtomicU64,
    shares: Shares,
    /// Answers that the node did not take yet.
    waiting: HashMap<SocketAddr, VecDeque<Vec<u8>>>,
    /// Receivers with such answers, in the order in which they are tried.
    turns: VecDeque<SocketAddr>,
    tried: Instant,
    tidied: Instant,
}

/// What became of an attempt to send.
enum Sent {
    Yes,
    NotNow,
    Never,
}

impl<'a> Echo<'a> {
    fn new(node: &'a Node, socket: &'a Socket, dropped: &'a AtomicU64, bytes: usize) -> Self {
        let share = (bytes / RECEIVER_PART).max(SMALL_BYTES.min(bytes / SMALL_PART));
        let messages = MESSAGES_TOTAL / RECEIVER_PART;
        let shares = Shares::new(Bounds {
            receiver: Amount { messages, bytes: share },
            host: Amount { messages: 2 * messages, bytes: 2 * share },
            total: Amount { messages: MESSAGES_TOTAL, bytes },
        });
        let (waiting, turns, now) = (HashMap::new(), VecDeque::new(), Instant::now());
        Self { node, socket, dropped, shares, waiting, turns, tried: now, tidied: now }
    }

    /// How long to wait for the next message.
    fn pause(&self) -> Option<Duration> {
        match (self.waiting.is_empty(), self.shares.is_empty()) {
            (false, _) => Some(RETRY_PAUSE),
            (true, false) => Some(TIDY_PAUSE),
            (true, true) => None,
        }
    }

    fn answer(&mut self, message: &Message, now: Instant) -> Result<(), Error> {
        let (to, bytes) = (message.source(), message.len());
        if !self.shares.has_room(to, bytes) {
            self.make_room(to, bytes, now)?;
            if !self.shares.has_room(to, bytes) {
                self.drop_answers(1);
                return Ok(());
            }
        }
        if !self.waiting.contains_key(&to) {
            let slices: Vec<IoSlice<'_>> = message.slices().map(IoSlice::new).collect();
            match self.send(&slices, to) {
                Sent::Yes => {
                    self.shares.sent(to, bytes, now);
                    return Ok(());
                }
                Sent::NotNow => self.turns.push_back(to),
                Sent::Never => return Ok(()),
            }
        }
        self.shares.waits(to, bytes, now);
        self.waiting.entry(to).or_default().push_back(message.to_vec());
        Ok(())
    }

    fn send(&self, payload: &[IoSlice<'_>], to: SocketAddr) -> Sent {
        match self.socket.send_vectored_to(payload, to) {
            Ok(_) => Sent::Yes,
            Err(error) if error.is_would_block() => Sent::NotNow,
            // This receiver cannot be reached; what concerns the socket, receiving tells as well.
            Err(_) => {
                self.drop_answers(1);
                Sent::Never
            }
        }
    }

    /// Sends answers that had to wait.
    fn try_again(&mut self, now: Instant) {
        self.tried = now;
        for _ in 0..self.turns.len().min(TRIES) {
            let Some(to) = self.turns.pop_front() else { return };
            let Some(mut answers) = self.waiting.remove(&to) else { continue };
            while let Some(answer) = answers.front() {
                if let Sent::NotNow = self.send(&[IoSlice::new(answer)], to) {
                    break;
                }
                // Of one that could not be sent the next look finds that nothing is kept.
                self.shares.moved(to, answer.len(), now);
                answers.pop_front();
            }
            if !answers.is_empty() {
                self.waiting.insert(to, answers);
                self.turns.push_back(to);
            }
        }
    }

    /// Looks what has been taken meanwhile. If it is others that use up the room, those who keep
    /// most make way.
    fn make_room(&mut self, to: SocketAddr, bytes: usize, now: Instant) -> Result<(), Error> {
        self.shares.look(self.socket, now)?;
        match self.shares.lacks(to, bytes) {
            None | Some(Lack::Receiver) => return Ok(()),
            Some(Lack::Host) => {
                let largest = self.shares.largest_on(to.ip()).filter(|largest| *largest != to);
                let Some(largest) = largest else { return Ok(()) };
                self.give_up(largest, now)?;
            }
            Some(Lack::Total) => {
                let host = self.shares.largest_host().filter(|host| *host != to.ip());
                let Some(host) = host else { return Ok(()) };
                for receiver in self.shares.all_on(host) {
                    self.give_up(receiver, now)?;
                }
                // What is behind a message that was begun leaves the node only with its connection.
                self.node.drop_connections(Some(host));
            }
        }
        self.shares.look_now(self.socket, now)
    }

    /// Gives up what is kept for receivers that have taken nothing for long, such as those that
    /// are gone.
    fn tidy(&mut self, now: Instant) -> Result<(), Error> {
        if self.shares.is_empty() || now.saturating_duration_since(self.tidied) < TIDY_PAUSE {
            return Ok(());
        }
        self.tidied = now;
        self.shares.look(self.socket, now)?;
        for to in self.shares.silent_for(PATIENCE, now) {
            self.give_up(to, now)?;
        }
        Ok(())
    }

    fn give_up(&mut self, to: SocketAddr, now: Instant) -> Result<(), Error> {
        let waited = self.waiting.remove(&to).map_or(0, |answers| answers.len());
        self.drop_answers(waited);
        self.shares.cut(to, now);
        self.socket.cancel_sent_to(to)
    }

    fn drop_answers(&self, count: usize) {
        // Relaxed: a statistic that publishes nothing else.
        self.dropped.fetch_add(count as u64, Ordering::Relaxed);
    }
}
