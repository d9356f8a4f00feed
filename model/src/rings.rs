//! Programs and a node on the two rings of one socket. The rings and the programs' side of wake
//! tokens are those of `bowline-host-wire`. The node's loop is full of system calls; a short one
//! stands in its place, whose steps carry the names of those of `bowline-host`. The calls of
//! programs are those of `Socket` in `bowline-host-client`, without flags.

use std::collections::VecDeque;
use std::mem::take;
use std::sync::atomic::Ordering;

use crate::area::{Area, Place, at};
use crate::cells::Cells;
use crate::hook;
use crate::ids::LockOwner;
use crate::receives::Receives;
use crate::sends::{Piece, Pushed, Sends};
use crate::sync::{Condvar, Mutex, MutexGuard};
use crate::tokens::ProgramEnd;
use crate::{WAKE_TOKEN_LEN, message};

/// Name of the destination that programs send to.
const NAME: &[u8] = b"to";

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Mistake {
    None,
    /// The node does not look for sends after it has said that it sleeps.
    SleepsUnseen,
    /// The node looks for sends before it says that it sleeps, and not after.
    LooksTooSoon,
    /// A program that has set the sleep to rest does not wake the node.
    WakesNobody,
    /// The node shows that there is something to receive before it is in the ring.
    ShowsTooSoon,
    /// The node publishes nothing beside the ring.
    HidesMore,
    /// A program that takes a wake token leaves what else is there to itself.
    KeepsToken,
    /// The node does not ask to be woken when half of the ring is taken.
    AsksForNoNotice,
    /// The node sleeps behind a round without looking for what was taken during it.
    RestsUnseen,
    /// A program does not wake the node that has asked for it.
    IgnoresNotice,
    /// The node gives credit for what is under way once more.
    GivesCreditTwice,
    /// The node does not send what was pushed before it sends what it is asked to.
    SendsAskedFirst,
    /// The node gives away what does not fit into the ring before what is in it.
    ReceivesAskedFirst,
    /// The node leaves the lock of a process that has ended.
    LeavesLock,
    /// The node leaves what a process that has ended has pushed.
    LeavesPushed,
    /// The node believes that a process which has ended has the wake token.
    LeavesToken,
    /// The node looks for lost tokens of sockets only that have messages in their ring.
    LooksAtRingsOnly,
}

/// What wakes the node.
enum Event {
    /// There is something new in the memory.
    Wake,
    /// A message has come from the network.
    Arrived(u8),
    /// A program asks for what does not go through the ring: a message to send, or to receive.
    Send(u32, u8),
    Receive(u32),
    /// The channel of a program has ended.
    Gone(u32),
    /// It is time to look at sockets on which nothing happens.
    Look,
    /// Everything has been received.
    Done,
}

#[derive(Default)]
struct Kernel {
    /// Wake tokens that nobody has taken.
    tokens: VecDeque<u32>,
    events: VecDeque<Event>,
    /// By program. The one of a receive is a message, if there is one.
    answers: [Option<Option<u8>>; 4],
    /// What each program has received.
    received: [Vec<u8>; 4],
    /// Everything was received, of which there are so many.
    expected: usize,
    closed: bool,
}

/// One socket, with what the kernel has of it.
pub(crate) struct Socket {
    area: Area,
    kernel: Mutex<Kernel>,
    for_node: Condvar,
    for_programs: Condvar,
    mistake: Mistake,
    _cells: Box<Cells>,
}

impl Socket {
    pub(crate) fn new(mistake: Mistake) -> Self {
        let cells = Cells::new();
        // SAFETY: they are dropped with the socket, which has the area.
        let area = unsafe { Area::new(cells.base()) };
        Self {
            area,
            kernel: Mutex::new(Kernel::default()),
            for_node: Condvar::new(),
            for_programs: Condvar::new(),
            mistake,
            _cells: cells,
        }
    }

    fn kernel(&self) -> MutexGuard<'_, Kernel> {
        self.kernel.lock().unwrap()
    }

    fn tell(&self, event: Event) {
        self.kernel().events.push_back(event);
        self.for_node.notify_all();
    }

    /// A message comes from the network.
    pub(crate) fn arrive(&self, message: u8) {
        self.tell(Event::Arrived(message));
    }

    /// A process has ended; the node sees its channel end.
    pub(crate) fn end_channel(&self, owner: u32) {
        self.tell(Event::Gone(owner));
    }

    /// It is time to look.
    pub(crate) fn look(&self) {
        self.tell(Event::Look);
    }

    /// Programs that wait do so no longer.
    pub(crate) fn close(&self) {
        self.kernel().closed = true;
        self.for_programs.notify_all();
    }

    /// What a program has received.
    pub(crate) fn received(&self, owner: u32) -> Vec<u8> {
        self.kernel().received[owner as usize].clone()
    }

    /// Tells whether nobody has the lock.
    pub(crate) fn is_unlocked(&self) -> bool {
        self.area.u32(at::LOCK).load(Ordering::Relaxed) == 0
    }

    /// Asks the node, and waits for its answer.
    fn ask(&self, owner: u32, request: Event) -> Option<u8> {
        if !hook::acts() {
            return None;
        }
        self.tell(request);
        let mut kernel = self.kernel();
        loop {
            if let Some(answer) = kernel.answers[owner as usize].take() {
                return answer;
            }
            if kernel.closed {
                return None;
            }
            kernel = self.for_programs.wait(kernel).unwrap();
        }
    }

    /// Sends a message.
    pub(crate) fn send(&self, owner: u32, n: u8) {
        let payload = message(n);
        let (front, back) = payload.split_at(payload.len() / 16 * 4);
        let pieces = [front, back].map(|piece| Piece { base: piece.as_ptr(), len: piece.len() });
        // SAFETY: slices are readable.
        match unsafe { self.area.push(LockOwner(owner), NAME, &pieces) } {
            Pushed::Done => {}
            Pushed::Wake if self.mistake == Mistake::WakesNobody => {}
            Pushed::Wake => self.end(owner).wake_node(),
            Pushed::Ask => _ = self.ask(owner, Event::Send(owner, n)),
        }
    }

    fn end(&self, owner: u32) -> End<'_> {
        End { socket: self, owner }
    }

    /// Receives so many messages, unless the socket is closed or the process ends before.
    /// `waits`: the call waits, and not `poll`.
    pub(crate) fn receive(&self, owner: u32, messages: usize, waits: bool) {
        let mut left = messages;
        while left > 0 && !hook::is_dead() {
            if !waits && !self.wait_until_readable() {
                return;
            }
            match self.end(owner).receive(waits) {
                Ok(n) => {
                    self.note(owner, n);
                    left -= 1;
                }
                Err(NoToken::Closed) => return,
                Err(NoToken::None) => {}
            }
        }
    }

    fn note(&self, owner: u32, n: u8) {
        let mut kernel = self.kernel();
        kernel.received[owner as usize].push(n);
        kernel.expected -= 1;
        if kernel.expected == 0 {
            kernel.events.push_back(Event::Done);
            self.for_node.notify_all();
        }
    }

    /// `poll`. Returns `false` when the socket is closed.
    fn wait_until_readable(&self) -> bool {
        let mut kernel = self.kernel();
        while kernel.tokens.is_empty() && !kernel.closed {
            kernel = self.for_programs.wait(kernel).unwrap();
        }
        !kernel.closed
    }
}

/// Why there is no wake token.
#[derive(Clone, Copy)]
enum NoToken {
    None,
    Closed,
}

/// The end of a program.
struct End<'a> {
    socket: &'a Socket,
    owner: u32,
}

impl ProgramEnd for End<'_> {
    type Error = NoToken;

    fn take_token(&self, waits: bool) -> Result<[u8; WAKE_TOKEN_LEN], NoToken> {
        if !hook::acts() {
            return Err(NoToken::None);
        }
        let mut kernel = self.socket.kernel();
        loop {
            if let Some(token) = kernel.tokens.pop_front() {
                return Ok(token.to_ne_bytes());
            }
            if kernel.closed || !waits {
                return Err(if kernel.closed { NoToken::Closed } else { NoToken::None });
            }
            kernel = self.socket.for_programs.wait(kernel).unwrap();
        }
    }

    fn wake_node(&self) {
        if hook::acts() && self.socket.mistake != Mistake::KeepsToken {
            self.socket.tell(Event::Wake);
        }
    }
}

impl End<'_> {
    fn receive(&self, waits: bool) -> Result<u8, NoToken> {
        let area = self.socket.area;
        let mut token = None;
        while !hook::is_dead() {
            let mut bytes = Vec::new();
            let copy = |place: Place, len: usize| {
                bytes.resize(len, 0);
                area.copy_out(place, &mut bytes);
            };
            let taken = area.take(false, copy);
            assert!(taken.is_ok() || hook::is_dead(), "honest memory is not refused");
            let wants_token = area.needs_wake_token(token.take());
            let may_notice = self.socket.mistake != Mistake::IgnoresNotice;
            if wants_token || may_notice && matches!(&taken, Ok(Some(taken)) if taken.notice) {
                self.wake_node();
            }
            if let Ok(Some(_)) = taken {
                let n = bytes[0];
                assert_eq!(bytes, message(n), "a message is whole");
                area.received(self);
                return Ok(n);
            }
            if area.has_more() {
                match self.receive_from_node() {
                    None if area.has_message() || !area.has_more() => continue,
                    None => {}
                    Some(n) => {
                        area.received(self);
                        return Ok(n);
                    }
                }
            }
            match self.take_token(waits) {
                Err(NoToken::None) if area.has_message() => {}
                taken => token = Some(taken?),
            }
        }
        Err(NoToken::Closed)
    }

    fn receive_from_node(&self) -> Option<u8> {
        self.socket.ask(self.owner, Event::Receive(self.owner))
    }
}

/// The node.
pub(crate) struct Node<'a> {
    socket: &'a Socket,
    sends: Sends,
    receives: Receives,
    /// Bytes that a program may have under way.
    room: usize,
    popped_bytes: u64,
    /// A socket on which nothing happens gets no turn.
    idles: bool,
    active: bool,
    unshown: bool,
    more: bool,
    /// What the core has for programs; so many of it and of what is lent have room.
    queue: VecDeque<u8>,
    buffer: usize,
    /// What has come and has no room.
    backlog: VecDeque<u8>,
    lent: VecDeque<(u64, u8)>,
    /// What was sent.
    pub(crate) sent: Vec<u8>,
    /// Channels that have ended.
    pub(crate) gone: usize,
    /// Everything was received.
    pub(crate) is_done: bool,
}

impl<'a> Node<'a> {
    pub(crate) fn new(socket: &'a Socket, room: usize, idles: bool) -> Self {
        let mut node = Self {
            socket,
            sends: Sends::new(socket.area),
            receives: Receives::new(socket.area),
            room,
            popped_bytes: 0,
            idles,
            active: false,
            unshown: false,
            more: false,
            queue: VecDeque::new(),
            buffer: usize::MAX,
            backlog: VecDeque::new(),
            lent: VecDeque::new(),
            sent: Vec::new(),
            gone: 0,
            is_done: false,
        };
        node.activate();
        node
    }

    /// Programs have asked for the destination before.
    pub(crate) fn knows_destination(mut self) -> Self {
        self.allow();
        self
    }

    /// What comes for programs, and for how many of it there is room.
    pub(crate) fn receives(mut self, messages: usize, backlog: &[u8], buffer: usize) -> Self {
        self.backlog.extend(backlog);
        self.buffer = buffer;
        self.socket.kernel().expected = messages;
        self
    }

    pub(crate) fn run(&mut self, is_over: impl Fn(&Self) -> bool) {
        while !is_over(self) {
            let rests = self.may_rest();
            let may_sleep = rests && self.fall_asleep() && !is_over(self);
            let events = self.wait(may_sleep);
            if rests && self.active {
                self.sends.set_asleep(false);
            }
            events.into_iter().for_each(|event| self.handle(event));
        }
    }

    /// Goes on until there is nothing to wake up for.
    fn settle(&mut self) {
        loop {
            let may_sleep = self.may_rest() && self.fall_asleep();
            let events = self.wait(false);
            if may_sleep && events.is_empty() {
                return;
            }
            events.into_iter().for_each(|event| self.handle(event));
        }
    }

    fn wait(&self, may_sleep: bool) -> VecDeque<Event> {
        let mut kernel = self.socket.kernel();
        while may_sleep && kernel.events.is_empty() {
            kernel = self.socket.for_node.wait(kernel).unwrap();
        }
        take(&mut kernel.events)
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Wake => self.activate(),
            Event::Arrived(n) => {
                self.backlog.push_back(n);
                self.activate();
                self.turn();
            }
            Event::Send(owner, n) => {
                if self.socket.mistake != Mistake::SendsAskedFirst {
                    self.turn(); // `drain`
                }
                self.sent.push(n);
                self.allow();
                self.activate();
                self.answer(owner, None);
            }
            Event::Receive(owner) => {
                let answer = self.receive();
                self.answer(owner, answer);
            }
            Event::Gone(owner) => self.remove_channel(owner),
            Event::Look => self.check_idle(),
            Event::Done => self.is_done = true,
        }
    }

    fn answer(&self, owner: u32, answer: Option<u8>) {
        self.socket.kernel().answers[owner as usize] = Some(answer);
        self.socket.for_programs.notify_all();
    }

    fn round(&mut self) -> bool {
        if !self.active {
            return false;
        }
        let had_work = self.turn();
        self.unshown |= had_work;
        if self.unshown && !had_work {
            self.show_readable();
        }
        if !had_work && self.idles {
            self.sends.set_asleep(true);
            if self.socket.mistake == Mistake::SleepsUnseen || !self.has_work() {
                self.active = false;
                self.show_readable();
            }
        }
        had_work
    }

    fn activate(&mut self) {
        if !self.active {
            self.sends.set_asleep(false);
            self.active = true;
        }
    }

    fn fall_asleep(&mut self) -> bool {
        if !self.active {
            return true;
        }
        self.show_readable();
        let early = self.has_work();
        self.sends.set_asleep(true);
        let has_work = match self.socket.mistake {
            Mistake::SleepsUnseen => false,
            Mistake::LooksTooSoon => early,
            _ => self.has_work(),
        };
        !has_work
    }

    /// Takes a round, behind which the node mostly sleeps at once.
    fn may_rest(&mut self) -> bool {
        let is_busy = self.round();
        !is_busy || self.socket.mistake == Mistake::RestsUnseen || !self.receives.has_taken()
    }

    fn has_work(&self) -> bool {
        !self.sends.is_empty()
    }

    fn turn(&mut self) -> bool {
        self.run_sends() | self.push_received()
    }

    fn run_sends(&mut self) -> bool {
        if hook::LOOKS {
            self.check_credit();
        }
        let mut any = false;
        while let Some(queued) = self.sends.peek().expect("honest memory is not refused") {
            assert!(queued.has_credit, "an honest program has credit");
            let mut bytes = vec![0; queued.len];
            self.socket.area.copy_out(queued.payload, &mut bytes);
            assert_eq!(bytes, message(bytes[0]), "a message is whole");
            self.sent.push(bytes[0]);
            self.sends.pop(&queued);
            self.popped_bytes += queued.len as u64;
            any = true;
        }
        if any {
            self.set_credit();
        }
        any
    }

    fn set_credit(&mut self) {
        let more = if self.socket.mistake == Mistake::GivesCreditTwice { self.room } else { 0 };
        self.sends.set_credit(self.room + more);
        self.sends.set_credit_to(0, Some(self.room));
    }

    fn allow(&mut self) {
        let is_known = self.socket.area.u32(at::destination(0) + 16);
        let is_known = is_known.load(Ordering::Relaxed) != 0;
        if is_known || self.sends.set_destination(0, NAME) {
            self.set_credit();
        }
    }

    fn push_received(&mut self) -> bool {
        let released = self.release();
        let room = self.buffer.saturating_sub(self.queue.len() + self.lent.len());
        self.queue.extend(self.backlog.drain(..room.min(self.backlog.len())));
        assert!(self.queue.len() + self.lent.len() <= self.buffer, "room is given back once");
        let shows_too_soon = self.socket.mistake == Mistake::ShowsTooSoon;
        if shows_too_soon && !self.queue.is_empty() {
            self.show_token();
        }
        let mut lent_any = false;
        while let Some(n) = self.queue.front() {
            let bytes = message(*n);
            let Some(end) = self.receives.push(b"", bytes.len(), std::iter::once(&bytes[..]))
            else {
                break;
            };
            self.lent.push_back((end, *n));
            self.queue.pop_front();
            lent_any = true;
        }
        let more = !self.queue.is_empty() && self.socket.mistake != Mistake::HidesMore;
        if lent_any || more != self.more {
            self.more = more;
            self.receives.publish(more);
        }
        if lent_any || released {
            self.set_notice();
        }
        lent_any || released
    }

    fn release(&mut self) -> bool {
        let head = self.receives.reclaim().expect("honest memory is not refused");
        let taken = self.lent.iter().take_while(|(end, _)| *end <= head).count();
        self.lent.drain(..taken);
        taken > 0
    }

    fn set_notice(&mut self) {
        let enough = (self.buffer / 4).max(1);
        let many = self.lent.len() >= enough && self.socket.mistake != Mistake::AsksForNoNotice;
        let middle = self.lent.get(self.lent.len().saturating_sub(1) / 2).filter(|_| many);
        self.receives.notice_at(middle.map(|(end, _)| *end));
    }

    /// What does not go through the ring; what is in it comes first.
    fn receive(&mut self) -> Option<u8> {
        self.turn();
        let is_first = self.receives.is_empty();
        if !is_first && self.socket.mistake != Mistake::ReceivesAskedFirst {
            return None;
        }
        let n = self.queue.pop_front();
        self.turn();
        n
    }

    fn show_readable(&mut self) {
        self.unshown = false;
        let shows = self.socket.mistake != Mistake::ShowsTooSoon;
        if shows && (self.more || !self.receives.is_empty()) {
            self.show_token();
        }
    }

    fn show_token(&mut self) {
        if let Some(token) = self.receives.next_wake_token() {
            self.socket.kernel().tokens.push_back(token);
            self.socket.for_programs.notify_all();
        }
    }

    fn replace_wake_token(&mut self) {
        let unread = self.socket.kernel().tokens.len();
        if unread == 0
            && self.receives.has_wake_token()
            && self.socket.mistake != Mistake::LeavesToken
        {
            self.receives.wake_token_is_gone();
        }
        self.show_readable();
    }

    fn remove_channel(&mut self, owner: u32) {
        if self.socket.mistake != Mistake::LeavesLock {
            self.sends.owner_is_gone(LockOwner(owner));
        }
        self.replace_wake_token();
        if self.socket.mistake != Mistake::LeavesPushed {
            self.activate();
        }
        self.gone += 1;
    }

    fn check_idle(&mut self) {
        let more = self.more && self.socket.mistake != Mistake::LooksAtRingsOnly;
        if !self.lent.is_empty() || self.has_work() || more {
            if self.turn() {
                self.activate();
            }
            self.replace_wake_token();
        }
    }

    /// Checks that no more is under way than there is room for.
    fn check_credit(&self) {
        let number = |at| self.socket.area.u64(at).load(Ordering::Relaxed);
        let under_way = number(at::SENT_BYTES).wrapping_sub(self.popped_bytes);
        assert!(under_way <= self.room as u64, "credit is given once");
    }

    /// Nothing is left of what was received, and programs may send as much as at first.
    pub(crate) fn check_end(&mut self, are_all_alive: bool) {
        self.settle();
        assert!(self.sends.is_empty(), "nothing is left in the ring");
        self.turn();
        assert!(self.lent.is_empty() && self.queue.is_empty(), "all room came back");
        let number = |at| self.socket.area.u64(at).load(Ordering::Relaxed);
        if are_all_alive {
            assert_eq!(number(at::SENT_BYTES), self.popped_bytes, "all credit came back");
        }
        self.check_credit();
    }
}
