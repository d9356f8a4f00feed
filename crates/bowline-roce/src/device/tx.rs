//! Datagrams to send: the schedule of queue pairs, and how packets become bursts.
//!
//! Queue pairs with replies go first, then all others with something to send, each one burst per
//! turn. A queue pair whose burst did not hold all its replies continues in the second group, so
//! that a large READ being answered delays no other queue pair. An acknowledgement joins a burst of
//! requests to the same peer: a packet of its own would cost as much as the whole burst [PERF-6].
//! For this reason, while a program posts to one queue pair after the other, acknowledgements of
//! the other queue pairs are deferred until their turn.

use bowline_base::Instant;
use bowline_verbs::{QpState, Qpn};
use bowline_wire::roce::{AETH_LEN, BTH_LEN, ICRC_LEN};

use super::Device;
use super::marks::ECT;
use super::shared::Shared;
use crate::burst::Burst;
use crate::qp::{Halves, Qp};
use crate::rc::requester::{Outcome, Readiness, Requester, TxCtx};

/// Bytes of an acknowledgement, ICRC included.
const ACK_LEN: usize = BTH_LEN + AETH_LEN + ICRC_LEN;

/// Which half of a queue pair sends.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Half {
    Responder,
    Requester,
}

/// Posts to other queue pairs an acknowledgement may be deferred for.
const ACK_DEFERS_MAX: u8 = 3;

impl Device {
    /// Defers acknowledgements that would be sent alone, of all queue pairs except `but`, until
    /// [`resume_acks`](Self::resume_acks); each a few times at most [RSP-25]. Called after the
    /// program has posted to `but`, because it may post to other queue pairs next. Tells whether
    /// any acknowledgement is deferred.
    pub fn defer_acks(&mut self, now: Instant, but: Qpn) -> bool {
        let Self { shared, qps, .. } = self;
        let Shared { urgent, paths, deferred_acks, .. } = shared;
        urgent.retain(|&qpn| {
            let Some(qp) = qps.get_mut(&qpn).filter(|_| qpn != but.0) else { return true };
            let path = paths.get(qp.path);
            let goes = qp.ack_defers == ACK_DEFERS_MAX || !qp.has_ack_only(now, path);
            if !goes {
                qp.ack_defers += 1;
                deferred_acks.push(qpn);
            }
            goes
        });
        !deferred_acks.is_empty()
    }

    /// Ends the deferral of acknowledgements; tells whether there were any.
    pub fn resume_acks(&mut self) -> bool {
        let any = !self.shared.deferred_acks.is_empty();
        self.shared.urgent.extend(self.shared.deferred_acks.drain(..));
        any
    }

    /// Fills `burst` with the next packets to send; returns `false` if there are none.
    pub fn poll_transmit(&mut self, now: Instant, burst: &mut Burst) -> bool {
        let sent = self.fill_mad(burst)
            || self.fill_cnp(burst)
            || self.fill_carried(now, burst)
            || self.fill_next(now, burst);
        if !self.shared.overrun.is_empty() {
            self.stop_overrun(now);
        }
        if sent {
            let counters = &mut self.shared.counters;
            counters.tx_bursts += 1;
            counters.tx_packets += burst.count as u64;
            counters.tx_bytes += burst.bytes.len() as u64;
            counters.tx_icrc_bytes += burst.take_summed();
        }
        sent
    }

    /// Starts a burst with the packet that did not fit into the previous one.
    fn fill_carried(&mut self, now: Instant, burst: &mut Burst) -> bool {
        let Some(qpn) = self.carry_qpn.take() else { return false };
        let Some(qp) = self.qps.get_mut(&qpn.0) else { return false };
        let route = match qp.route(&self.shared.config) {
            Some(route) if qp.state != QpState::Err => route,
            _ => return false,
        };
        burst.begin(&route);
        burst.bytes.extend_from_slice(&self.carry);
        burst.add(0, &mut self.carry);
        if self.shared.fill_connected(now, qp, burst, &mut self.carry) {
            self.carry_qpn = Some(qpn);
        }
        true
    }

    /// Gives turns to queue pairs in the lines of paths that have room, one of each path: after its
    /// turn the next one follows, if there is still room.
    fn call_in_line(&mut self, now: Instant) {
        while let Some(id) = self.shared.ready_paths.pop() {
            let path = self.shared.paths.get_mut(id);
            while path.allows(now)
                && let Some(qpn) = path.waiting.pop_front()
            {
                let Some(qp) = self.qps.get_mut(&qpn) else { continue };
                qp.in_line = false;
                if qp.requests() {
                    if !std::mem::replace(&mut qp.in_normal, true) {
                        self.shared.normal.push_back(qpn);
                    }
                    break;
                }
            }
            // The rate may have become less since the path's timer was set.
            self.shared.wake_line(now, id);
        }
    }

    fn fill_next(&mut self, now: Instant, burst: &mut Burst) -> bool {
        loop {
            self.call_in_line(now);
            let shared = &mut self.shared;
            let urgent = shared.urgent.pop_front();
            let Some(qpn) = urgent.or_else(|| shared.normal.pop_front()) else { return false };
            let Some(qp) = self.qps.get_mut(&qpn) else { continue };
            if urgent.is_some() {
                qp.in_urgent = false;
            } else {
                qp.in_normal = false;
            }
            if qp.state < QpState::Rtr || qp.state == QpState::Err {
                continue;
            }
            burst.count = 0;
            match (qp.route(&shared.config), &qp.halves) {
                (Some(route), Halves::Rc { .. }) => {
                    burst.begin(&route);
                    if shared.fill_connected(now, qp, burst, &mut self.carry) {
                        self.carry_qpn = Some(qp.qpn);
                    }
                }
                (Some(route), Halves::Uc { .. }) => {
                    burst.begin(&route);
                    shared.fill_messages(now, qp, burst, &mut self.carry);
                }
                (_, Halves::Ud { .. }) => shared.fill_datagram(now, qp, burst, &mut self.carry),
                _ => {}
            }
            if burst.count > 0 {
                return true;
            }
        }
    }
}

impl Shared {
    /// Adds packets of a connected queue pair to a burst that has begun. Returns `true` if one more
    /// packet was made that did not fit and is now in `carry`.
    fn fill_connected(
        &mut self,
        now: Instant,
        qp: &mut Qp,
        burst: &mut Burst,
        carry: &mut Vec<u8>,
    ) -> bool {
        let context = self.qp_context(qp);
        let requests = qp.requests();
        let Halves::Rc { requester, responder } = &mut qp.halves else { return false };
        let gso = self.config.gso && !self.gso_blocklist.contains(burst.to);
        let readiness = requester.readiness(now, self.paths.get(qp.path));
        let may_request = requests && !responder.failed() && readiness == Readiness::Ready;
        // A single acknowledgement can wait for the end of a burst of requests; neither half is
        // passed over twice in a row.
        let no_hurry = gso && responder.has_one_ack();
        let late = responder.has_one_ack() && qp.delayed_ack.deadline(now).is_some();
        let replies = responder.has_reply()
            && !late
            && (!may_request || qp.replies_next || !(qp.requests_next || no_hurry));
        let half = if replies { Half::Responder } else { Half::Requester };
        qp.requests_next = half == Half::Responder;
        let mut outcome = Outcome::Idle;
        let mut carried = false;
        // A single short packet may still end a burst of long packets that has no room for another
        // long one. A pending acknowledgement takes that place instead.
        let short = half == Half::Requester && (!responder.has_one_ack() || late);
        let has_room = |burst: &Burst, requester: &Requester| {
            burst.has_room(gso)
                || short
                    && requester.next_single_len().is_some_and(|len| burst.has_room_for(gso, len))
        };
        while (replies || may_request) && has_room(burst, requester) {
            if half == Half::Requester {
                requester.fill_uniform_run(&mut TxCtx { gso, ..self.tx(now, context) }, burst);
            }
            let start = burst.bytes.len();
            let filled = match half {
                Half::Responder => {
                    let ctx = &mut self.rx(now, context);
                    responder.fill_reply(ctx, context.dest_qpn, burst)
                }
                Half::Requester => {
                    let ctx = &mut TxCtx { gso, ..self.tx(now, context) };
                    outcome = requester.fill(ctx, burst);
                    outcome == Outcome::Packet
                }
            };
            if !filled {
                break;
            }
            if !burst.add(start, carry) {
                carried = true;
                break;
            }
        }
        let waits = late && burst.count == 0;
        let joins = half == Half::Requester && !carried && !waits && outcome != Outcome::Failed;
        let room = burst.count == 0 || burst.has_room_for(gso, ACK_LEN);
        let stays = joins
            && burst.count == 1
            && responder.has_one_ack()
            && qp.delayed_ack.may_defer(now, self.config.ack_delay);
        if joins && room && !stays && responder.has_one_ack() {
            let start = burst.bytes.len();
            if responder.fill_reply(&mut self.rx(now, context), context.dest_qpn, burst) {
                carried = !burst.add(start, carry);
            }
        }
        if !responder.has_reply() {
            qp.delayed_ack.clear(now);
            qp.ack_defers = 0;
        }
        qp.replies_next = half == Half::Requester && !stays && responder.has_reply();
        if half == Half::Requester {
            if self.paths.get(qp.path).takes_marks() {
                burst.tos |= ECT;
            }
            requester.end_burst(burst.count);
        }
        self.after(now, qp, outcome, false);
        carried
    }

    /// Adds packets of an unreliable connection to a burst that has begun [UC-2].
    fn fill_messages(&mut self, now: Instant, qp: &mut Qp, burst: &mut Burst, carry: &mut Vec<u8>) {
        let context = self.qp_context(qp);
        let gso = self.config.gso && !self.gso_blocklist.contains(burst.to);
        let (state, mut outcome) = (qp.state, Outcome::Idle);
        let Halves::Uc { sender, .. } = &mut qp.halves else { return };
        while state == QpState::Rts || state == QpState::Sqd && sender.is_within_message() {
            let fits = |len| burst.has_room_for(gso, len);
            if burst.count > 0 && !sender.next_len().is_some_and(fits) {
                break;
            }
            let start = burst.bytes.len();
            outcome = sender.fill(&mut self.tx(now, context), burst);
            // It fits: a longer packet begins a burst of its own.
            if outcome != Outcome::Packet || !burst.add(start, carry) {
                break;
            }
        }
        if outcome == Outcome::Failed {
            self.counters.qp_errors += 1;
            self.enter_send_error(now, qp);
        } else {
            self.after(now, qp, outcome, false);
        }
    }

    /// Fills a burst with the next datagram of a UD queue pair.
    fn fill_datagram(&mut self, now: Instant, qp: &mut Qp, burst: &mut Burst, carry: &mut Vec<u8>) {
        if qp.state != QpState::Rts {
            return; // the state changed after the queue pair was scheduled [QP-3]
        }
        let context = self.qp_context(qp);
        let Halves::Ud { sender, .. } = &qp.halves else { return };
        let route = sender.next_dest().and_then(|dest| qp.datagram_route(&dest, &self.config));
        let Halves::Ud { sender, .. } = &mut qp.halves else { return };
        let outcome = match route {
            Some(route) => {
                burst.begin(&route);
                let outcome = sender.fill(&mut self.tx(now, context), burst);
                if outcome == Outcome::Packet {
                    burst.add(0, carry);
                }
                outcome
            }
            None => sender.refuse(&mut self.tx(now, context)),
        };
        if outcome == Outcome::Failed {
            self.counters.qp_errors += 1;
            self.enter_send_error(now, qp);
        } else {
            self.after(now, qp, outcome, false);
        }
    }
}
