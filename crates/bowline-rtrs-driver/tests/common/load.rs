//! A load of a fixed depth: each completion begins the next request.

use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use bowline_rtrs_driver::Dir;
use bowline_rtrs_driver::client::{
    Completed, Completer, Done, Permit, PermitKind, Region, Req, Session, Wait,
};

use super::{at, eventually};

/// A load of a given number of requests.
pub(crate) struct Load {
    session: Arc<Session>,
    region: Region,
    permits: Vec<Permit>,
    dir: Dir,
    len: usize,
    me: OnceLock<std::sync::Weak<Load>>,
    /// Number of requests still to begin.
    left: AtomicU64,
    /// Requests whose completion callbacks have not returned. The session stops counting a request
    /// before its callback runs.
    running: AtomicU64,
    pub(crate) done: AtomicU64,
    pub(crate) errors: Mutex<Vec<i32>>,
    /// The longest time between two completions, and the last one.
    pause: Mutex<(Duration, Instant)>,
    again: Mutex<Vec<u64>>,
}

impl Load {
    pub(crate) fn new(session: &Arc<Session>, dir: Dir, depth: usize, len: usize) -> Arc<Self> {
        let take = |_| session.get_permit(PermitKind::Io, Wait::Forever).unwrap();
        let load = Arc::new(Self {
            region: session.region(depth * len).unwrap(),
            session: Arc::clone(session),
            permits: (0..depth).map(take).collect(),
            dir,
            len,
            me: OnceLock::new(),
            left: AtomicU64::new(0),
            running: AtomicU64::new(0),
            done: AtomicU64::new(0),
            errors: Mutex::default(),
            pause: Mutex::new((Duration::ZERO, Instant::now())),
            again: Mutex::new(Vec::with_capacity(depth)),
        });
        load.me.set(Arc::downgrade(&load)).unwrap();
        load
    }

    /// Begins as many requests as the depth allows.
    pub(crate) fn start(&self, count: u64) {
        *self.pause.lock().unwrap() = (Duration::ZERO, Instant::now());
        self.left.store(count, SeqCst);
        let mut all: Vec<u64> = (0..self.permits.len() as u64).collect();
        self.submit(&mut all);
    }

    fn submit(&self, tags: &mut Vec<u64>) {
        let me = self.me.get().and_then(std::sync::Weak::upgrade).unwrap();
        let usr: [u8; 8] = at(0);
        let requests = tags.drain(..).filter_map(|tag| {
            let more = self.left.fetch_update(SeqCst, SeqCst, |left| left.checked_sub(1));
            more.ok()?;
            Some((tag, self.region.piece(tag as usize * self.len, self.len as u32)))
        });
        for (tag, piece) in requests {
            let done = Done { to: Arc::clone(&me) as _, tag };
            let (permit, data) = (&self.permits[tag as usize], [piece]);
            let req = Req { dir: self.dir, permit, usr: &usr, data: &data, done };
            self.running.fetch_add(1, SeqCst);
            if let Err(error) = self.session.request_batch(&mut std::iter::once(req)) {
                self.errors.lock().unwrap().push(error.errno().0);
                self.running.fetch_sub(1, SeqCst);
                self.done.fetch_add(1, SeqCst);
            }
        }
    }

    /// Takes completions until all requests have ended; returns the longest pause.
    pub(crate) fn finish(&self, count: u64, drive: bool) -> Duration {
        let goal = self.done.load(SeqCst).max(count);
        loop {
            let seen = self.session.ended();
            if self.done.load(SeqCst) >= goal {
                break;
            }
            if drive {
                self.session.wait(seen, Some(Duration::from_secs(1)));
            } else {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        self.pause.lock().unwrap().0
    }

    /// Runs some requests, and waits for them.
    pub(crate) fn run(&self, count: u64, drive: bool) -> Duration {
        let goal = self.done.load(SeqCst) + count;
        self.start(count);
        self.finish(goal, drive)
    }

    /// Begins no more requests.
    pub(crate) fn stop(&self) {
        self.left.store(0, SeqCst);
    }

    /// Stops, and waits until the last request has ended: it may be started again.
    pub(crate) fn end(&self) {
        self.stop();
        eventually("all end", || self.running.load(SeqCst) == 0);
    }
}

impl Completer for Load {
    fn completed(&self, done: &[Completed]) {
        {
            let mut pause = self.pause.lock().unwrap();
            pause.0 = pause.0.max(pause.1.elapsed());
            pause.1 = Instant::now();
        }
        for done in done.iter().filter(|done| done.errno != 0) {
            self.errors.lock().unwrap().push(done.errno);
        }
        let mut again = self.again.lock().unwrap();
        again.extend(done.iter().map(|done| done.tag));
        self.submit(&mut again);
        drop(again);
        self.done.fetch_add(done.len() as u64, SeqCst);
        self.running.fetch_sub(done.len() as u64, SeqCst);
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        for permit in self.permits.drain(..) {
            self.session.put_permit(permit);
        }
    }
}
