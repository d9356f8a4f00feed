//! Events of connections, of which a command waits for one kind at a time.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use bowline_verbs::{CmEvent, CmId, ConnRequest, Device, Error, RejectReason};

use super::{Ended, SLICE};
use crate::cli::stop::Stop;

/// Longest wait until the peer confirms that a connection is over.
const GOODBYE: Duration = Duration::from_secs(3);
/// Most bytes of data in a refusal.
const REFUSAL: usize = 148;

/// Takes the events of a device. Connection requests that come at another time are kept.
pub(super) struct Arrivals<'a> {
    device: &'a dyn Device,
    stop: &'a Stop,
    requests: VecDeque<(CmId, ConnRequest)>,
}

impl<'a> Arrivals<'a> {
    /// Most requests kept; later ones are refused until these are served.
    const WAITING: usize = 64;

    pub(super) fn new(device: &'a dyn Device, stop: &'a Stop) -> Self {
        Self { device, stop, requests: VecDeque::new() }
    }

    /// Waits until somebody wants to connect.
    pub(super) fn request(&mut self) -> Result<(CmId, ConnRequest), Ended> {
        loop {
            if let Some(request) = self.requests.pop_front() {
                return Ok(request);
            }
            if self.stop.asked() {
                return Err(Ended::Stopped);
            }
            self.next(SLICE)?;
        }
    }

    /// Waits until a connection stands; returns the private data of the peer's reply.
    pub(super) fn established(&mut self, id: CmId, peer: &str) -> Result<Vec<u8>, Ended> {
        loop {
            if self.stop.asked() {
                return Err(Ended::Stopped);
            }
            match self.next(SLICE)? {
                Some(CmEvent::Established { id: of, private_data, .. }) if of == id => {
                    return Ok(private_data);
                }
                Some(CmEvent::Rejected { id: of, reason, private_data }) if of == id => {
                    return Err(Ended::Failed(refusal(peer, reason, &private_data)));
                }
                Some(CmEvent::Unreachable { id: of }) if of == id => {
                    return Err(Ended::Failed(format!(
                        "no answer from {peer}; is a RoCE device there, and does UDP port 4791 get through?"
                    )));
                }
                Some(CmEvent::Disconnected { id: of }) if of == id => return Err(Ended::Left),
                _ => {}
            }
        }
    }

    /// Waits, not for long, until a connection is over on both sides.
    pub(super) fn disconnected(&mut self, id: CmId) {
        let end = Instant::now() + GOODBYE;
        while Instant::now() < end {
            match self.next(SLICE) {
                Ok(Some(CmEvent::Disconnected { id: of } | CmEvent::TimewaitExit { id: of }))
                    if of == id =>
                {
                    return;
                }
                Ok(_) => {}
                // The device is closed: there is nothing left to wait for.
                Err(_) => return,
            }
        }
    }

    /// Waits a while for the peer to end a connection; tells whether it has.
    pub(super) fn left(&mut self, id: CmId, limit: Duration) -> Result<bool, Ended> {
        let end = Instant::now() + limit;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() || self.stop.asked() {
                return Ok(false);
            }
            if let Some(CmEvent::Disconnected { id: of } | CmEvent::TimewaitExit { id: of }) =
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

    /// The next event, if one comes in time; requests are put aside.
    fn next(&mut self, limit: Duration) -> Result<Option<CmEvent>, Ended> {
        match self.device.cm_event(limit) {
            Ok(CmEvent::ConnectRequest { id, request }) => {
                if self.requests.len() < Self::WAITING {
                    self.requests.push_back((id, request));
                } else {
                    self.refuse(id, "too many are waiting");
                }
                Ok(None)
            }
            Ok(event) => Ok(Some(event)),
            Err(Error::TimedOut) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }
}

/// As much of a text as a refusal carries.
fn fitting(text: &str) -> &[u8] {
    let bytes = text.as_bytes();
    bytes.get(..REFUSAL).unwrap_or(bytes)
}

/// Says why a peer has refused [CM-10].
fn refusal(peer: &str, reason: RejectReason, data: &[u8]) -> String {
    let end = data.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
    let text = String::from_utf8_lossy(data.get(..end).unwrap_or_default());
    let text = text.chars().filter(|c| !c.is_control()).collect::<String>();
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
