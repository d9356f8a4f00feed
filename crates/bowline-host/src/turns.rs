//! The part of the service that polls rings: sockets on which something happens get a turn in
//! each round, until they are idle.

use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bowline_base::Instant;
use bowline_host_wire::SocketHandle;
use bowline_rds::Interest;

use crate::core::{Core, Outside, Rds};
use crate::socket::{Arrived, HostSocket, Schedule};

/// Rounds without anything to do after which a socket is idle.
const IDLE_ROUNDS: u32 = 32;
/// How long what programs send on a full socket is left where it is.
const FULL: Duration = Duration::from_secs(10);
/// Offers of one socket that are taken before others get their turn.
const OFFERS: usize = 64;
/// Busy rounds after which `POLLIN` is updated, at the latest.
const POLLIN_UPDATE_ROUNDS: u32 = 4;

impl<O: Outside> Core<O> {
    /// Gives a turn to each socket that is not idle. Returns whether one of them had something to
    /// do.
    pub fn round(&mut self) -> bool {
        let (ready, inspectors) = self.ready.take();
        for handle in ready {
            self.socket_is_ready(handle);
        }
        if !inspectors.is_empty() {
            self.release_taken();
            drop(inspectors);
        }
        let mut busy = false;
        let mut idle = Vec::new();
        let mut next = 0;
        while let Some(handle) = self.active.get(next).copied() {
            let had_work = self.turn(handle);
            busy |= had_work;
            let retry =
                |(socket, _): &mut (HostSocket<O>, Waker)| std::mem::take(&mut socket.retry);
            if had_work | self.sockets.get_mut(&handle).is_some_and(retry) {
                self.resume_senders(handle);
            }
            // A turn may close its socket, which is then not on the list any more.
            let Some((socket, _)) = self.sockets.get_mut(&handle) else { continue };
            next += 1;
            let idle_rounds = match socket.schedule {
                Schedule::Active { idle_rounds } if !had_work => idle_rounds + 1,
                _ => 0,
            };
            socket.schedule = Schedule::Active { idle_rounds };
            socket.unshown += u32::from(had_work);
            if socket.unshown > 0 && (!had_work || socket.unshown >= POLLIN_UPDATE_ROUNDS) {
                socket.show_readable();
            }
            if idle_rounds > IDLE_ROUNDS {
                socket.rings.set_asleep(true);
                self.outside.pause();
                if !socket.rings.has_work() {
                    idle.push(handle);
                }
            }
        }
        for handle in idle {
            self.active.retain(|active| *active != handle);
            if let Some((socket, _)) = self.sockets.get_mut(&handle) {
                socket.schedule = Schedule::Idle;
                socket.show_readable();
            }
        }
        busy
    }

    /// Something has happened on a socket.
    pub(crate) fn activate(&mut self, handle: SocketHandle) {
        let Some((socket, _)) = self.sockets.get_mut(&handle) else { return };
        let was_idle = socket.schedule == Schedule::Idle;
        socket.schedule = Schedule::Active { idle_rounds: 0 };
        if was_idle {
            socket.rings.set_asleep(false);
            self.active.push(handle);
        }
    }

    /// Sends what one socket's programs have pushed, and pushes what has come for them. Returns
    /// whether there was something.
    pub(crate) fn turn(&mut self, handle: SocketHandle) -> bool {
        let Some((socket, waker)) = self.sockets.get_mut(&handle) else { return false };
        let cx = Context::from_waker(waker);
        let sent = socket.rings.run_sends(&self.rds, socket.id, &cx, &mut self.scratch);
        let pushed = socket.rings.push_received(&self.rds, socket.id, &cx);
        match (sent, pushed) {
            (Ok(sent), Ok((lent, released))) => {
                self.moved += sent + lent;
                sent + lent > 0 || released
            }
            // The shared memory is corrupt: the socket is closed.
            _ => {
                self.accounts.count_broken(socket.charge.user);
                self.close(handle);
                true
            }
        }
    }

    /// Sends what is pushed, as far as there is room now.
    pub(crate) fn drain(&mut self, handle: SocketHandle) {
        // So many turns empty a full ring of the shortest messages.
        for _ in 0..64 {
            let has_work = |(socket, _): &(HostSocket<O>, Waker)| socket.rings.has_work();
            if !self.sockets.get(&handle).is_some_and(has_work) {
                return;
            }
            self.turn(handle);
        }
    }

    /// Those who wait to send try again, in their order.
    pub(crate) fn resume_senders(&mut self, handle: SocketHandle) {
        let Some((socket, _)) = self.sockets.get(&handle) else { return };
        // Each once: one that waits for a congested port holds up no other.
        for number in socket.senders.clone() {
            self.try_again(number);
        }
    }

    /// Prepares for sleep: programs see that they have to wake the node, and find what there is to
    /// receive. Returns `false` when something has come meanwhile.
    pub fn fall_asleep(&mut self) -> bool {
        let mut may_sleep = self.ready.sleep();
        for at in 0..self.active.len() {
            let Some((socket, _)) = self.sockets.get_mut(&self.active[at]) else { continue };
            // First of all: a program that runs at once and answers need not wake the node.
            socket.show_readable();
            socket.rings.set_asleep(true);
            self.outside.pause();
            may_sleep &= !socket.rings.has_work();
        }
        if may_sleep {
            self.sends_singly = self.moved <= 1;
            self.moved = 0;
        }
        may_sleep
    }

    /// Tells whether to prepare for sleep after a round, which had something to do or not. After
    /// something, others mostly follow, and a round more is cheaper than to be woken for them; but
    /// not where programs send one message and wait for the answer.
    pub fn may_rest(&self, is_busy: bool) -> bool {
        let is_done = |handle: &SocketHandle| {
            let socket = self.sockets.get(handle).map(|(socket, _)| socket);
            socket.is_none_or(|socket| !socket.retry && !socket.rings.has_taken())
        };
        !is_busy
            || self.sends_singly
                && self.moved <= 1
                && !self.has_requests()
                && self.active.iter().all(is_done)
    }

    /// The node is awake: what is pushed is seen without a request to wake.
    pub fn wake_up(&mut self) {
        self.ready.wake_up();
        for at in 0..self.active.len() {
            if let Some((socket, _)) = self.sockets.get(&self.active[at]) {
                socket.rings.set_asleep(false);
            }
        }
    }

    /// Checks all sockets whose programs may have taken messages or pushed without a request to
    /// wake, or taken a wake token without saying so before they ended.
    pub(crate) fn check_idle(&mut self) {
        let has = |socket: &HostSocket<O>| {
            let rings = &socket.rings;
            rings.has_lent() || rings.has_more() || rings.has_work()
        };
        let idle = self.sockets.iter().filter(|(_, (socket, _))| has(socket));
        let handles: Vec<SocketHandle> = idle.map(|(handle, _)| *handle).collect();
        for handle in handles {
            // A socket that nobody reads stays idle.
            if self.turn(handle) {
                self.activate(handle);
            }
            if let Some((socket, _)) = self.sockets.get_mut(&handle) {
                socket.replace_wake_token();
            }
        }
    }

    /// Releases what programs have taken, which counts as unread until then [R-1011].
    pub(crate) fn release_taken(&mut self) {
        let taken = self.sockets.iter().filter(|(_, (socket, _))| socket.rings.has_taken());
        for handle in taken.map(|(handle, _)| *handle).collect::<Vec<_>>() {
            // No whole turn, which may close the socket and end waits: a request is being handled.
            if let Some((socket, _)) = self.sockets.get_mut(&handle) {
                // One that is broken is closed in its turn.
                let _ = socket.rings.release(&self.rds, socket.id);
            }
            self.activate(handle);
        }
    }

    /// Makes the program's descriptor show what the socket is ready for, and takes the channels
    /// that programs offer on it.
    pub(crate) fn refresh(&mut self, handle: SocketHandle) {
        self.turn(handle);
        let Some((socket, waker)) = self.sockets.get_mut(&handle) else { return };
        let cx = Context::from_waker(waker);
        let ready = self.rds.poll_ready(socket.id, Interest::WRITE, &cx);
        if matches!(ready, Poll::Ready(Ok(_))) {
            socket.rings.renew_credit(&self.rds, socket.id);
        }
        if !socket.unread {
            return;
        }
        if ready.is_ready() || socket.has_offers() {
            self.make_writable(handle);
        } else if socket.full_since.is_none() {
            socket.full_since = Some(self.outside.now());
        }
    }

    /// Takes what programs have sent on a socket. One that is full seems writable then for a
    /// moment, until somebody sends.
    fn make_writable(&mut self, handle: SocketHandle) {
        // Programs may send all the time: what is left is taken the next time.
        for _ in 0..OFFERS {
            let Some((socket, _)) = self.sockets.get_mut(&handle) else { return };
            socket.full_since = None;
            match socket.make_writable() {
                Arrived::Offer(offer) => self.take_offer(handle, offer),
                Arrived::Tokens => return,
                Arrived::Later => {
                    socket.full_since = Some(self.outside.now());
                    return;
                }
                Arrived::Writing(process) => {
                    let user = socket.charge.user;
                    self.accounts.count_writing(user, process);
                    return self.close(handle);
                }
                Arrived::End => return self.close(handle),
            }
        }
    }

    /// Takes what programs have sent on sockets that are full for long: among it may be descriptors
    /// without which these or others would have ended.
    pub(crate) fn check_full(&mut self) {
        let now = self.outside.now();
        let is_long = |since: Instant| now.saturating_since(since) >= FULL;
        let full = self.sockets.iter().filter(|(_, (s, _))| s.full_since.is_some_and(is_long));
        for handle in full.map(|(handle, _)| *handle).collect::<Vec<_>>() {
            self.make_writable(handle);
        }
    }
}
