//! A process of the simulation: a future that takes one step at a time, and may be killed between
//! any two.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use super::kernel::End;
use super::shared::Shared;

type Steps = Pin<Box<dyn Future<Output = ()>>>;

/// What a process waits for.
pub(super) struct Blocked {
    pub(super) what: &'static str,
    /// A socket that it receives on, and waits for.
    pub(super) receives_on: Vec<u32>,
    until: Option<u64>,
    done: Box<dyn Fn() -> bool>,
}

/// A request that the node answers without waiting for anything.
pub(super) struct Asked {
    pub(super) what: &'static str,
    /// Where the answer comes.
    pub(super) stream: Rc<End>,
    /// Rounds of the node when it was sent.
    pub(super) rounds: u64,
}

/// A process.
pub(super) struct Process {
    pub(super) id: u32,
    pub(super) node: usize,
    pub(super) user: u32,
    shared: Rc<Shared>,
    future: RefCell<Option<Steps>>,
    pub(super) blocked: RefCell<Option<Blocked>>,
    steps: Cell<u64>,
    /// After so many steps it is killed.
    dies_at: Cell<Option<u64>>,
    /// Sockets that it has.
    pub(super) sockets: RefCell<BTreeSet<u32>>,
    /// It has asked for a message of this socket, and has no answer yet.
    pub(super) receives: Cell<Option<u32>>,
    pub(super) asked: RefCell<Option<Asked>>,
    /// It waits until a message from one socket to another is sent.
    pub(super) sends: Cell<Option<(u32, u32)>>,
    /// It waits until this socket shows room to send.
    pub(super) writes_on: Cell<Option<u32>>,
    /// When its wait to send is over at the latest.
    pub(super) gives_up: Cell<Option<u64>>,
    /// It receives only, and has nothing else to do.
    pub(super) is_idle: Cell<bool>,
}

impl Process {
    pub(super) fn new(
        (id, node, user): (u32, usize, u32),
        dies_at: Option<u64>,
        shared: Rc<Shared>,
    ) -> Self {
        Self {
            id,
            node,
            user,
            shared,
            future: RefCell::new(None),
            blocked: RefCell::new(None),
            steps: Cell::new(0),
            dies_at: Cell::new(dies_at),
            sockets: RefCell::default(),
            receives: Cell::new(None),
            asked: RefCell::new(None),
            sends: Cell::new(None),
            writes_on: Cell::new(None),
            gives_up: Cell::new(None),
            is_idle: Cell::new(false),
        }
    }

    pub(super) fn begin(&self, steps: impl Future<Output = ()> + 'static) {
        *self.future.borrow_mut() = Some(Box::pin(steps));
    }

    pub(super) fn is_over(&self) -> bool {
        self.future.borrow().is_none()
    }

    pub(super) fn can_run(&self, now: u64) -> bool {
        if self.is_over() {
            return false;
        }
        let blocked = self.blocked.borrow();
        let is_done = |b: &Blocked| (b.done)() || b.until.is_some_and(|until| until <= now);
        blocked.as_ref().is_none_or(is_done)
    }

    /// When it goes on though nothing happens.
    pub(super) fn wakes_at(&self) -> Option<u64> {
        self.blocked.borrow().as_ref().and_then(|blocked| blocked.until)
    }

    pub(super) fn step(&self) {
        let Some(mut future) = self.future.borrow_mut().take() else { return };
        self.steps.set(self.steps.get() + 1);
        let polled = future.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        let is_killed = self.dies_at.get().is_some_and(|at| self.steps.get() >= at);
        match polled {
            Poll::Pending if !is_killed => *self.future.borrow_mut() = Some(future),
            Poll::Pending => {
                self.shared.count(|stats| stats.kills += 1);
                drop(future);
                self.ended(true);
            }
            Poll::Ready(()) => {
                drop(future);
                self.ended(false);
            }
        }
    }

    /// Kills it now.
    pub(super) fn kill(&self) {
        let future = self.future.borrow_mut().take();
        if future.is_some() {
            drop(future);
            self.ended(true);
        }
    }

    fn ended(&self, killed: bool) {
        self.shared.note([90, u64::from(self.id), u64::from(killed)], || {
            let how = if killed { "is killed" } else { "ends" };
            format!("process {} {how}", self.id)
        });
        let blocked = self.blocked.borrow_mut().take();
        if killed {
            self.shared.hit("killed", blocked.map_or("running", |blocked| blocked.what));
        }
        *self.asked.borrow_mut() = None;
        let mut judge = self.shared.judge.borrow_mut();
        for socket in std::mem::take(&mut *self.sockets.borrow_mut()) {
            let record = judge.socket(socket);
            record.holders -= 1;
            record.is_unsure |= killed;
            record.may_lose |= self.receives.get() == Some(socket);
        }
    }

    /// The next thing that happens in this run happens after others had their chance.
    pub(super) fn turn(&self) -> Turn {
        Turn(false)
    }

    /// Waits until something is true, or until a time.
    pub(super) async fn until(
        &self,
        what: &'static str,
        until: Option<u64>,
        done: impl Fn() -> bool + 'static,
    ) {
        self.wait(Blocked { what, receives_on: Vec::new(), until, done: Box::new(done) }).await;
    }

    /// Waits for something to receive on sockets.
    pub(super) async fn until_readable(
        &self,
        what: &'static str,
        receives_on: Vec<u32>,
        until: Option<u64>,
        done: impl Fn() -> bool + 'static,
    ) {
        self.wait(Blocked { what, receives_on, until, done: Box::new(done) }).await;
    }

    async fn wait(&self, blocked: Blocked) {
        *self.blocked.borrow_mut() = Some(blocked);
        self.turn().await;
        *self.blocked.borrow_mut() = None;
    }
}

/// Others may do something before this is ready.
pub(super) struct Turn(bool);

impl Future for Turn {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<()> {
        if std::mem::replace(&mut self.0, true) { Poll::Ready(()) } else { Poll::Pending }
    }
}
