//! Events of connections, of which a command waits for one kind at a time.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use bowline_base::entropy::random_u64;
use bowline_verbs::{CmEvent, CmId, ConnParam, ConnRequest, Device, Error, RejectReason};

use super::link::Link;
use super::{Ended, SLICE};
use crate::cli::common::stop::Stop;

/// Longest wait until the peer confirms that a connection is over.
const GOODBYE: Duration = Duration::from_secs(3);
/// Most bytes of data in a refusal.
const REFUSAL: usize = 148;

/// What a client is told that is to come again: others are served, and whoever waits may be gone.
const BUSY: &str = "busy with another client; try again";
/// How long a request is kept while others are served.
const KEPT: Duration = Duration::from_secs(1);
/// Longest wait of a server until a client it has accepted says so: the acceptance is sent four
/// times in it.
const ACCEPTED: Duration = Duration::from_secs(3);
/// Longest pause of a client until it tries again.
const PAUSE: Duration = Duration::from_millis(200);

/// Takes the events of a device. Connection requests that come at another time are kept for a
/// while.
///
/// Nothing tells that a client was killed while it waited for others. So those that came last are
/// served first, the others are told to come again, and only who is still there does.
pub(super) struct Arrivals<'a> {
    device: &'a dyn Device,
    stop: &'a Stop,
    /// When each came, oldest first.
    requests: RefCell<VecDeque<(Instant, CmId, ConnRequest)>>,
    /// Events that came while something else was waited for.
    events: RefCell<VecDeque<CmEvent>>,
    /// Somebody was served since nobody waited: those that wait may be gone.
    late: Cell<bool>,
}

/// What becomes of a connection.
enum Answer {
    /// It stands; the private data of the peer's reply.
    Stands(Vec<u8>),
    Busy,
    Silent,
}

/// What a look at a device has brought.
enum Came {
    Event(CmEvent),
    Request,
    Nothing,
}

impl<'a> Arrivals<'a> {
    /// Most requests kept.
    const WAITING: usize = 64;

    pub(super) fn new(device: &'a dyn Device, stop: &'a Stop) -> Self {
        let (requests, events) = (RefCell::default(), RefCell::default());
        Self { device, stop, requests, events, late: Cell::new(false) }
    }

    /// Waits until somebody wants to connect.
    pub(super) fn request(&self) -> Result<(CmId, ConnRequest), Ended> {
        loop {
            if self.late.get() {
                self.meanwhile()?;
            }
            let mut requests = self.requests.borrow_mut();
            let found = if self.late.get() { requests.pop_back() } else { requests.pop_front() };
            drop(requests);
            if let Some((_, id, request)) = found {
                return Ok((id, request));
            }
            self.late.set(false);
            if self.stop.asked() {
                return Err(Ended::Stopped);
            }
            self.next(SLICE)?;
        }
    }

    /// Waits until the client of a request that was accepted has heard of it.
    pub(super) fn accepted(&self, id: CmId, request: &ConnRequest) -> Result<(), Ended> {
        self.late.set(true);
        let peer = request.remote.to_string();
        match self.answered(id, &peer, ACCEPTED)? {
            Answer::Stands(_) => Ok(()),
            Answer::Busy | Answer::Silent => {
                Err(Ended::Failed("it was gone when its turn came".to_owned()))
            }
        }
    }

    /// Connects, with what `make` prepares for each attempt, until the server has time or the limit
    /// is over. Returns what was prepared and the private data of the server's reply.
    pub(super) fn connect<T>(
        &self,
        (local, remote): (SocketAddr, SocketAddr),
        limit: Duration,
        mut make: impl FnMut() -> Result<(Link<'a>, T, ConnParam), Ended>,
    ) -> Result<(Link<'a>, T, CmId, Vec<u8>), Ended> {
        let (peer, end) = (remote.to_string(), Instant::now() + limit);
        let mut busy = false;
        loop {
            let (mut link, made, param) = make()?;
            let id = self.device.connect(Some(local), remote, &param)?;
            link.bind(id);
            let left = end.saturating_duration_since(Instant::now());
            match self.answered(id, &peer, left)? {
                Answer::Stands(data) => return Ok((link, made, id, data)),
                Answer::Busy => busy = true,
                // It has said what it is before, and keeps requests for a while without a word.
                Answer::Silent if busy => {}
                Answer::Silent => {
                    let why = self.device.fault().map_or_else(
                        || "is a RoCE device there, and does UDP port 4791 get through?".to_owned(),
                        |fault| fault.to_string(),
                    );
                    return Err(Ended::Failed(format!("no answer from {peer}; {why}")));
                }
            }
            // Clients that were sent away together come back one by one.
            let random = random_u64() % 128;
            let pause = PAUSE.mul_f64(0.5 + random as f64 / 256.0);
            if Instant::now() + pause >= end {
                let seconds = limit.as_secs_f64();
                return Err(Ended::Failed(format!(
                    "{peer} was busy with other clients for {seconds} s; wait longer with --timeout"
                )));
            }
            if self.stop.wait(Some(pause)) {
                return Err(Ended::Stopped);
            }
        }
    }

    /// Waits for what becomes of a connection.
    fn answered(&self, id: CmId, peer: &str, limit: Duration) -> Result<Answer, Ended> {
        let end = Instant::now() + limit;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            if self.stop.asked() {
                return Err(Ended::Stopped);
            }
            match self.next(left.min(SLICE))? {
                Came::Event(CmEvent::Established { id: of, private_data, .. }) if of == id => {
                    return Ok(Answer::Stands(private_data));
                }
                Came::Event(CmEvent::Rejected { id: of, reason, private_data }) if of == id => {
                    if reason == RejectReason::CONSUMER && text_of(&private_data) == BUSY {
                        return Ok(Answer::Busy);
                    }
                    return Err(Ended::Failed(refusal(peer, reason, &private_data)));
                }
                Came::Event(CmEvent::Unreachable { id: of }) if of == id => {
                    return Ok(Answer::Silent);
                }
                Came::Event(CmEvent::Disconnected { id: of }) if of == id => {
                    return Err(Ended::Left);
                }
                Came::Nothing if left.is_zero() => return Ok(Answer::Silent),
                _ => {}
            }
        }
    }

    /// Waits, not for long, until a connection is over on both sides.
    pub(super) fn disconnected(&self, id: CmId) {
        let end = Instant::now() + GOODBYE;
        while Instant::now() < end {
            match self.next(SLICE) {
                Ok(Came::Event(
                    CmEvent::Disconnected { id: of } | CmEvent::TimewaitExit { id: of },
                )) if of == id => {
                    return;
                }
                Ok(_) => {}
                // The device is closed: there is nothing left to wait for.
                Err(_) => return,
            }
        }
    }

    /// Waits a while for the peer to end a connection; tells whether it has.
    pub(super) fn left(&self, id: CmId, limit: Duration) -> Result<bool, Ended> {
        let end = Instant::now() + limit;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() || self.stop.asked() {
                return Ok(false);
            }
            if let Came::Event(CmEvent::Disconnected { id: of } | CmEvent::TimewaitExit { id: of }) =
                self.next(left.min(SLICE))?
                && of == id
            {
                return Ok(true);
            }
        }
    }

    /// Hands on what a request needs; if that is an error, the peer is refused with its text.
    pub(super) fn or_refuse<T>(&self, id: CmId, got: Result<T, Ended>) -> Result<T, Ended> {
        got.map_err(|ended| match ended {
            Ended::Failed(text) => {
                self.refuse(id, &text);
                Ended::Failed(format!("refused: {text}"))
            }
            ended => {
                self.refuse(id, "");
                ended
            }
        })
    }

    /// Refuses and forgets a request.
    pub(super) fn refuse(&self, id: CmId, text: &str) {
        // It may be gone already, which is as good.
        let _ = self.device.reject(id, fitting(text));
        let _ = self.device.destroy_id(id);
    }

    /// The next event, if one comes in time; requests are put aside, and those that are old are
    /// sent away.
    fn next(&self, limit: Duration) -> Result<Came, Ended> {
        let kept = self.events.borrow_mut().pop_front();
        kept.map_or_else(|| self.look(limit), |event| Ok(Came::Event(event)))
    }

    /// Sees to requests while something else is waited for.
    pub(super) fn meanwhile(&self) -> Result<(), Ended> {
        for _ in 0..Self::WAITING {
            match self.look(Duration::ZERO)? {
                Came::Nothing => break,
                Came::Event(event) => self.events.borrow_mut().push_back(event),
                Came::Request => {}
            }
        }
        Ok(())
    }

    fn look(&self, limit: Duration) -> Result<Came, Ended> {
        let came = self.device.cm_event(limit);
        let now = Instant::now();
        while self.requests.borrow().front().is_some_and(|(since, ..)| now - *since >= KEPT) {
            self.send_oldest_away();
        }
        match came {
            Ok(CmEvent::ConnectRequest { id, request }) => {
                if self.requests.borrow().len() >= Self::WAITING {
                    self.send_oldest_away();
                }
                self.requests.borrow_mut().push_back((now, id, request));
                Ok(Came::Request)
            }
            Ok(event) => Ok(Came::Event(event)),
            Err(Error::TimedOut) => Ok(Came::Nothing),
            Err(error) => Err(error.into()),
        }
    }

    fn send_oldest_away(&self) {
        let oldest = self.requests.borrow_mut().pop_front();
        if let Some((_, id, _)) = oldest {
            self.refuse(id, BUSY);
        }
    }
}

/// As much of a text as a refusal carries.
fn fitting(text: &str) -> &[u8] {
    let bytes = text.as_bytes();
    bytes.get(..REFUSAL).unwrap_or(bytes)
}

/// The text of a refusal, without the zeroes behind it.
fn text_of(data: &[u8]) -> String {
    let end = data.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
    let text = String::from_utf8_lossy(data.get(..end).unwrap_or_default());
    text.chars().filter(|c| !c.is_control()).collect()
}

/// Says why a peer has refused [CM-10].
fn refusal(peer: &str, reason: RejectReason, data: &[u8]) -> String {
    let text = text_of(data);
    match reason {
        RejectReason::INVALID_SERVICE_ID => format!("{peer} refused: nobody listens there"),
        RejectReason::CONSUMER if text.is_empty() => format!("the program at {peer} refused"),
        RejectReason::CONSUMER => format!("the program at {peer} refused: {text}"),
        RejectReason::STALE_CONNECTION => {
            format!(
                "{peer} refused: it knows this queue pair from an earlier connection; try again"
            )
        }
        RejectReason::INVALID_MTU => {
            format!("{peer} refused: the path MTU is too large for it; give a smaller --mtu")
        }
        RejectReason(number) => format!("{peer} refused with reason {number}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_shows_the_text_of_the_peer_without_its_zeroes() {
        let mut data = b"no room\x1b".to_vec();
        data.resize(148, 0);
        let text = refusal("10.0.0.1:7174", RejectReason::CONSUMER, &data);
        assert_eq!(text, "the program at 10.0.0.1:7174 refused: no room");
        let text = refusal("x", RejectReason::CONSUMER, &[0; 148]);
        assert_eq!(text, "the program at x refused");
        assert!(refusal("x", RejectReason(9), &[]).ends_with("reason 9"));
    }

    #[test]
    fn a_long_reason_is_cut_to_what_a_refusal_carries() {
        assert_eq!(fitting("no memory"), b"no memory");
        assert_eq!(fitting(&"x".repeat(149)), [b'x'; 148]);
    }
}
