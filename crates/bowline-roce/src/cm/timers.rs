//! Timers: messages that are resent until they are answered, and TIMEWAIT.

use std::net::IpAddr;
use std::time::Duration;

use bowline_verbs::{CmEvent, CmId};
use bowline_wire::roce::cm::{Answered, CmMad, CmMessage, Mra};

use super::config::time_of;
use super::conn::{MadBytes, Resend, State};
use super::{Manager, Output, SendMad};
use crate::Instant;
use crate::counters::Counters;

impl Manager {
    /// Returns when [`handle_timeout`](Self::handle_timeout) is due.
    pub(crate) fn poll_timeout(&self) -> Option<Instant> {
        let connections = self.timers.first().map(|(at, _)| *at);
        [connections, self.lookups.poll_timeout()].into_iter().flatten().min()
    }

    /// Runs all timers that are due.
    pub(crate) fn handle_timeout(&mut self, now: Instant, counters: &mut Counters) {
        self.lookups_handle_timeout(now, counters);
        while let Some(&(at, id)) = self.timers.first() {
            if at > now {
                return;
            }
            self.set_timer(id, None);
            self.expire(now, id, counters);
        }
    }

    fn expire(&mut self, now: Instant, id: CmId, counters: &mut Counters) {
        let Some(conn) = self.conns.get_mut(&id) else { return };
        let (State::ReqSent(resend) | State::RepSent(resend) | State::DreqSent(resend)) =
            &mut conn.state
        else {
            // The only other timer is that of TIMEWAIT [CM-45].
            self.event_on(id, CmEvent::TimewaitExit { id });
            self.remove(id);
            return;
        };
        let early = &self.config.first_resends;
        if resend.first_resends_done < early.len() {
            resend.first_resends_done += 1;
        } else if resend.left > 0 {
            resend.left -= 1;
        } else {
            return self.give_up(now, id, counters);
        }
        let next = early.get(resend.first_resends_done).copied().unwrap_or(resend.period);
        let (from, to) = (conn.local.ip(), conn.remote.ip());
        if resend.sends_left > 0 {
            resend.sends_left -= 1;
            let mad = resend.mad.clone();
            counters.cm_resent += 1;
            self.outputs.push_back(Output::Mad(SendMad { from, to, mad }));
        }
        self.set_timer(id, Some(now + next));
    }

    /// Gives up a message whose last repetition was not answered [CM-40] [CM-41] [CM-42]. A peer
    /// that exists after all is told to forget a connection that was never up.
    fn give_up(&mut self, now: Instant, id: CmId, counters: &mut Counters) {
        counters.cm_timeouts += 1;
        let Some(conn) = self.conns.get(&id) else { return };
        if matches!(conn.state, State::DreqSent(_)) {
            self.event_on(id, CmEvent::Disconnected { id });
            return self.enter_timewait(now, id);
        }
        // A peer that received the REP may have sent packets, and these may be late [CM-45]
        // [CM-56].
        let keeps_timewait = matches!(conn.state, State::RepSent(_));
        self.refuse_by_timeout(id);
        self.order_error(id);
        self.event_on(id, CmEvent::Unreachable { id });
        if keeps_timewait {
            self.enter_timewait(now, id);
        } else {
            self.remove(id);
        }
    }

    /// Sends a message, and resends it until [`set_timer`](Self::set_timer) is called.
    pub(super) fn send_until_answered(
        &mut self,
        now: Instant,
        id: CmId,
        mad: MadBytes,
        period: Duration,
        left: u8,
    ) -> Option<Resend> {
        let conn = self.conns.get(&id)?;
        let (from, to) = (conn.local.ip(), conn.remote.ip());
        self.outputs.push_back(Output::Mad(SendMad { from, to, mad: mad.clone() }));
        let first = self.config.first_resends.first().copied().unwrap_or(period);
        self.set_timer(id, Some(now + first));
        let sends_left = u8::MAX;
        Some(Resend { mad, first_resends_done: 0, period, left, sends_left, extended: false })
    }

    /// Handles an MRA: the peer asks for more time. Extends the time until the message is resent,
    /// once per message [CM-43].
    pub(super) fn handle_mra(&mut self, now: Instant, from: IpAddr, mra: &Mra) -> bool {
        let Some(&id) = self.by_comm_id.get(&mra.remote_id) else { return false };
        let Some(conn) = self.conns.get_mut(&id) else { return false };
        if conn.remote.ip() != from {
            return false;
        }
        let known = conn.peer.is_some_and(|peer| peer.comm_id == mra.local_id);
        let wait = time_of(mra.service_timeout) + time_of(conn.ack_timeout);
        match &mut conn.state {
            State::ReqSent(resend) if mra.answered == Answered::REQ && !resend.extended => {
                resend.extended = true;
            }
            State::RepSent(resend)
                if mra.answered == Answered::REP && known && !resend.extended =>
            {
                resend.extended = true;
            }
            _ => return false,
        }
        self.set_timer(id, Some(now + wait));
        true
    }

    /// Sends an MRA: the program has not answered yet, and the peer repeats its message [CM-43]. An
    /// MRA makes the peer wait long, even for a REJ that is lost. So the early repetitions of a
    /// bowline peer are no reason to send one.
    pub(super) fn ask_for_time(&mut self, now: Instant, id: CmId, answered: Answered) {
        let Some(conn) = self.conns.get(&id) else { return };
        if now.saturating_since(conn.since) < time_of(self.config.response_timeout) / 2 {
            return;
        }
        let ids = conn.ids();
        let mra = Mra {
            local_id: ids.local,
            remote_id: ids.remote,
            answered,
            service_timeout: self.config.service_timeout,
        };
        let mad = CmMad { transaction: conn.transaction, message: CmMessage::Mra(mra) };
        let (from, to) = (conn.local.ip(), conn.remote.ip());
        self.send(from, to, &mad);
    }

    /// Sets or clears the timer of a connection, which has only one.
    pub(super) fn set_timer(&mut self, id: CmId, at: Option<Instant>) {
        let Some(conn) = self.conns.get_mut(&id) else { return };
        if let Some(before) = conn.timer.take() {
            self.timers.remove(&(before, id));
        }
        if let Some(at) = at {
            self.timers.insert((at, id));
        }
        conn.timer = at;
    }
}
