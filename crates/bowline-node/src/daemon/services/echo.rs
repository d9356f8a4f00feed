//! The echo service of a node: everything that comes to a socket goes back.
//!
//! ```text
//! message -> room for its sender? -- no --> dropped, counted
//!                 | yes
//!                 v
//!            sent, or kept while its sender is congested; given up when it takes nothing for long
//! ```
//!
//! No send blocks, because the messages of all other senders would wait too. What a sender does not
//! receive counts against its own share, see [`Shares`]. When all shares together are used up, the
//! answers of the largest user are dropped.

use std::{
    collections::{HashMap, VecDeque},
    io::IoSlice,
    net::SocketAddr,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    time::{Duration, Instant},
};

use bowline::rds::{Error, Interest, Message, Node, Socket};

use crate::shares::{Amount, Bounds, Lack, Shares};

/// Messages taken at once.
const BATCH: usize = 256;
/// Largest number of receivers retried in one turn.
const TRIES: usize = 1024;
/// Default send buffer of the socket in bytes, and number of messages: what is kept for all
/// receivers.
pub(super) const SEND_BUFFER: usize = 256 << 20;
pub(in crate::daemon) const MESSAGES_TOTAL: usize = 1 << 19;
/// One receiver's share is this fraction of the send buffer, with a minimum; the receivers of one
/// host share twice as much.
const RECEIVER_PART: usize = 32;
const SMALL_PART: usize = 4;
const SMALL_BYTES: usize = 256 << 10;
/// A receiver that has taken nothing for this long is given up.
const PATIENCE: Duration = Duration::from_secs(30);
/// Interval of retries of congested receivers without a notification, and of the search for
/// receivers that take nothing.
const RETRY_PAUSE: Duration = Duration::from_millis(5);
const TIDY_PAUSE: Duration = Duration::from_millis(250);

/// Answers messages until `over` is set or the socket is closed; counts dropped answers in
/// `dropped`.
pub(super) fn serve(
    node: &Node,
    socket: &Socket,
    over: &AtomicBool,
    dropped: &AtomicU64,
) -> Result<(), Error> {
    socket.set_nonblocking(true);
    // Congestion notifications wake the service when a receiver is no longer congested.
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

/// Outcome of an attempt to send.
enum Sent {
    Yes,
    NotNow,
    Never,
}

/// What is kept, with a send buffer of so many bytes.
fn bounds(bytes: usize) -> Bounds {
    let share = (bytes / RECEIVER_PART).max(SMALL_BYTES.min(bytes / SMALL_PART));
    let messages = MESSAGES_TOTAL / RECEIVER_PART;
    Bounds {
        receiver: Amount { messages, bytes: share },
        host: Amount { messages: 2 * messages, bytes: 2 * share },
        total: Amount { messages: MESSAGES_TOTAL, bytes },
    }
}

impl<'a> Echo<'a> {
    fn new(node: &'a Node, socket: &'a Socket, dropped: &'a AtomicU64, bytes: usize) -> Self {
        let shares = Shares::new(bounds(bytes));
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
            // This receiver cannot be reached. Errors of the socket itself show when it receives.
            Err(_) => {
                self.drop_answers(1);
                Sent::Never
            }
        }
    }

    /// Sends answers that are kept.
    fn try_again(&mut self, now: Instant) {
        self.tried = now;
        for _ in 0..self.turns.len().min(TRIES) {
            let Some(to) = self.turns.pop_front() else { return };
            let Some(mut answers) = self.waiting.remove(&to) else { continue };
            while let Some(answer) = answers.front() {
                if let Sent::NotNow = self.send(&[IoSlice::new(answer)], to) {
                    break;
                }
                // An answer that could not be sent is not counted as kept at the next update.
                self.shares.moved(to, answer.len(), now);
                answers.pop_front();
            }
            if !answers.is_empty() {
                self.waiting.insert(to, answers);
                self.turns.push_back(to);
            }
        }
    }

    /// Updates what receivers have taken. If other receivers use up the room, the answers of the
    /// largest users are dropped.
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
                // Messages queued after a partly sent one leave the node only when its connection
                // ends.
                self.node.drop_connections(Some(host));
            }
        }
        self.shares.look_now(self.socket, now)
    }

    /// Gives up what is kept for receivers that have taken nothing for long, for example because
    /// they ended.
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
        self.waiting.remove(&to);
        let given_up = self.shares.cut(to, now);
        self.drop_answers(given_up);
        self.socket.cancel_sent_to(to)
    }

    fn drop_answers(&self, count: usize) {
        // Relaxed: a statistic that publishes nothing else.
        self.dropped.fetch_add(count as u64, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The figures of SECURITY.md.
    #[test]
    fn what_is_usually_kept_is_what_is_told() {
        let Bounds { receiver, host, total } = bounds(SEND_BUFFER);
        assert_eq!((receiver.bytes, receiver.messages), (8 << 20, 16_384));
        assert_eq!((host.bytes, host.messages), (16 << 20, 32_768));
        assert_eq!((total.bytes, total.messages), (256 << 20, 524_288));
    }
}
