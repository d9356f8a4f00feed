//! Connection events of a device: a command waits for one kind at a time, and other kinds are kept.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use bowline_base::entropy::random_u64;
use bowline_node::signals::Stop;
use bowline_verbs::{CmEvent, CmId, ConnParam, ConnRequest, Device, Error, RejectReason};

use super::link::Link;
use super::{Ended, SLICE};

/// A wait for a peer from which on the user is to know of it.
const NOTED_WAIT: Duration = Duration::from_secs(1);
/// Longest wait until the peer confirms that a connection is over.
const GOODBYE: Duration = Duration::from_secs(3);
/// Most bytes of data in a refusal.
const REFUSAL_MAX: usize = 148;

/// Text of a refusal that asks a client to connect again later.
const BUSY: &str = "busy with another client; try again";
/// How long a connection request is kept while another client is served.
const REQUEST_KEPT: Duration = Duration::from_secs(1);
/// Longest wait of a server for the client's RTU. The REP is sent four times in that time.
const RTU_WAIT: Duration = Duration::from_secs(3);
/// Longest pause of a client that was refused as busy, until it connects again.
const RETRY_PAUSE: Duration = Duration::from_millis(200);

/// Takes the events of a device. Connection requests that arrive while a client is served are kept
/// for [`REQUEST_KEPT`].
///
/// Nothing reports that a waiting client was killed. After each served client, therefore, the
/// newest request is served first and older ones are refused as busy: a client that is alive
/// connects again.
pub(super) struct Arrivals<'a> {
    device: &'a dyn Device,
    stop: &'a Stop,
    /// Requests that wait, each with the time of its arrival, oldest first.
    requests: RefCell<VecDeque<(Instant, CmId, ConnRequest)>>,
    /// Events that arrived while a command waited for another kind.
    events: RefCell<VecDeque<CmEvent>>,
    /// A client was served since the queue was last empty: the clients of waiting requests may be
    /// dead.
    newest_first: Cell<bool>,
    /// The user knows already that a peer lets this command wait.
    has_noted: Cell<bool>,
}

/// How an attempt to connect ended.
enum Answer {
    /// Established; holds the private data of the peer's reply.
    Established(Vec<u8>),
    Busy,
    Silent,
}

/// What one poll of the device returned.
enum Polled {
    Event(CmEvent),
    Request,
    Nothing,
}

impl<'a> Arrivals<'a> {
    /// Largest number of waiting requests.
    const REQUESTS_MAX: usize = 64;

    pub(super) fn new(device: &'a dyn Device, stop: &'a Stop) -> Self {
        let (requests, events) = (RefCell::default(), RefCell::default());
        Self {
            device,
            stop,
            requests,
            events,
            newest_first: Cell::new(false),
            has_noted: Cell::new(false),
        }
    }

    /// Waits for a connection request, for at most `limit` if there is one.
    pub(super) fn request(&self, limit: Option<Duration>) -> Result<(CmId, ConnRequest), Ended> {
        let end = limit.map(|limit| Instant::now() + limit);
        loop {
            if self.newest_first.get() {
                self.keep_requests()?;
            }
            let mut requests = self.requests.borrow_mut();
            let found =
                if self.newest_first.get() { requests.pop_back() } else { requests.pop_front() };
            drop(requests);
            if let Some((_, id, request)) = found {
                return Ok((id, request));
            }
            self.newest_first.set(false);
            if self.stop.asked() {
                return Err(Ended::Stopped);
            }
            if end.is_some_and(|end| Instant::now() >= end) {
                return Err(Ended::Failed("the client does not come back".to_owned()));
            }
            self.next(SLICE)?;
        }
    }

    /// Waits for a further connection request of a client that is served, which `is_it` knows by
    /// its data.
    pub(super) fn further(
        &self,
        is_it: impl Fn(&ConnRequest) -> bool,
        limit: Duration,
    ) -> Result<(CmId, ConnRequest), Ended> {
        let end = Instant::now() + limit;
        loop {
            let mut requests = self.requests.borrow_mut();
            let at = requests.iter().position(|(_, _, request)| is_it(request));
            let found = at.and_then(|at| requests.remove(at));
            drop(requests);
            if let Some((_, id, request)) = found {
                return Ok((id, request));
            }
            if self.stop.asked() {
                return Err(Ended::Stopped);
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Ended::Failed("not all of its queue pairs have come".to_owned()));
            }
            self.next(left.min(SLICE))?;
        }
    }

    /// Connects one more queue pair to a server that waits for it.
    pub(super) fn connect_further(
        &self,
        link: &mut Link<'_>,
        (local, remote): (SocketAddr, SocketAddr),
        param: &ConnParam,
        limit: Duration,
    ) -> Result<(), Ended> {
        let id = self.device.connect(Some(local), remote, param)?;
        link.bind_further(param.qpn, id);
        match self.wait_answer(id, &remote.to_string(), limit)? {
            Answer::Established(_) => Ok(()),
            Answer::Busy | Answer::Silent => {
                Err(Ended::Failed(format!("{remote} does not connect all queue pairs")))
            }
        }
    }

    /// Waits until the client confirms an accepted connection.
    pub(super) fn accepted(&self, id: CmId, request: &ConnRequest) -> Result<(), Ended> {
        self.newest_first.set(true);
        let peer = request.remote.to_string();
        match self.wait_answer(id, &peer, RTU_WAIT)? {
            Answer::Established(_) => Ok(()),
            Answer::Busy | Answer::Silent => {
                Err(Ended::Failed("the client had left when its turn came".to_owned()))
            }
        }
    }

    /// Connects, again and again while the server is busy, for at most `limit`. `make` prepares
    /// each attempt. Returns what it prepared and the private data of the server's reply.
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
            match self.wait_answer(id, &peer, left)? {
                Answer::Established(data) => return Ok((link, made, id, data)),
                Answer::Busy => busy = true,
                // The server has refused as busy before: it keeps this request without an answer
                // for now.
                Answer::Silent if busy => {}
                Answer::Silent => {
                    let why = self.device.fault().map_or_else(
                        || {
                            "is a RoCE device there, and does a firewall block UDP port 4791?"
                                .to_owned()
                        },
                        |fault| fault.to_string(),
                    );
                    return Err(Ended::Failed(format!("no answer from {peer}; {why}")));
                }
            }
            // A random pause: clients that were refused together connect again one by one.
            let random = random_u64() % 128;
            let pause = RETRY_PAUSE.mul_f64(0.5 + random as f64 / 256.0);
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

    /// Waits for the end of an attempt to connect.
    fn wait_answer(&self, id: CmId, peer: &str, limit: Duration) -> Result<Answer, Ended> {
        let begun = Instant::now();
        let end = begun + limit;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            if self.stop.asked() {
                return Err(Ended::Stopped);
            }
            if begun.elapsed() >= NOTED_WAIT && !self.has_noted.replace(true) {
                note!("waiting for {peer}, up to {} s", limit.as_secs_f64().ceil());
            }
            match self.next(left.min(SLICE))? {
                Polled::Event(CmEvent::Established { id: of, private_data, .. }) if of == id => {
                    return Ok(Answer::Established(private_data));
                }
                Polled::Event(CmEvent::Rejected { id: of, reason, private_data }) if of == id => {
                    if reason == RejectReason::CONSUMER && text_of(&private_data) == BUSY {
                        return Ok(Answer::Busy);
                    }
                    return Err(Ended::Failed(refusal(peer, reason, &private_data)));
                }
                Polled::Event(CmEvent::Unreachable { id: of }) if of == id => {
                    return Ok(Answer::Silent);
                }
                Polled::Event(CmEvent::Disconnected { id: of }) if of == id => {
                    return Err(Ended::Left);
                }
                Polled::Nothing if left.is_zero() => return Ok(Answer::Silent),
                _ => {}
            }
        }
    }

    /// Waits until a connection is over on both sides, at most [`GOODBYE`].
    pub(super) fn disconnected(&self, id: CmId) {
        let end = Instant::now() + GOODBYE;
        while Instant::now() < end {
            match self.next(SLICE) {
                Ok(Polled::Event(
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
            if let Polled::Event(
                CmEvent::Disconnected { id: of } | CmEvent::TimewaitExit { id: of },
            ) = self.next(left.min(SLICE))?
                && of == id
            {
                return Ok(true);
            }
        }
    }

    /// Returns `got`; on a failure, the peer is refused with its text.
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
        // The request may have ended already; nothing more is to be done then.
        let _ = self.device.reject(id, truncated(text));
        let _ = self.device.destroy_id(id);
    }

    /// Returns the next event that arrives within `limit`. Requests are kept; those older than
    /// [`REQUEST_KEPT`] are refused as busy.
    fn next(&self, limit: Duration) -> Result<Polled, Ended> {
        let kept = self.events.borrow_mut().pop_front();
        kept.map_or_else(|| self.look(limit), |event| Ok(Polled::Event(event)))
    }

    /// Keeps or refuses requests that arrive while a command waits for something else.
    pub(super) fn keep_requests(&self) -> Result<(), Ended> {
        for _ in 0..Self::REQUESTS_MAX {
            match self.look(Duration::ZERO)? {
                Polled::Nothing => break,
                Polled::Event(event) => self.events.borrow_mut().push_back(event),
                Polled::Request => {}
            }
        }
        Ok(())
    }

    fn look(&self, limit: Duration) -> Result<Polled, Ended> {
        let came = self.device.cm_event(limit);
        let now = Instant::now();
        while self.requests.borrow().front().is_some_and(|(since, ..)| now - *since >= REQUEST_KEPT)
        {
            self.refuse_oldest();
        }
        match came {
            Ok(CmEvent::ConnectRequest { id, request }) => {
                if self.requests.borrow().len() >= Self::REQUESTS_MAX {
                    self.refuse_oldest();
                }
                self.requests.borrow_mut().push_back((now, id, request));
                Ok(Polled::Request)
            }
            Ok(event) => Ok(Polled::Event(event)),
            Err(Error::TimedOut) => Ok(Polled::Nothing),
            Err(error) => Err(error.into()),
        }
    }

    fn refuse_oldest(&self) {
        let oldest = self.requests.borrow_mut().pop_front();
        if let Some((_, id, _)) = oldest {
            self.refuse(id, BUSY);
        }
    }
}

/// Cuts a text to what a refusal can carry.
fn truncated(text: &str) -> &[u8] {
    let bytes = text.as_bytes();
    bytes.get(..REFUSAL_MAX).unwrap_or(bytes)
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
                "{peer} refused: it still has an earlier connection of this queue pair; try again"
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
        assert_eq!(truncated("no memory"), b"no memory");
        assert_eq!(truncated(&"x".repeat(149)), [b'x'; 148]);
    }
}
