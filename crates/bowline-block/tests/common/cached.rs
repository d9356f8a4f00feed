//! A disk with a write cache that executes requests only when the test says so: for tests of
//! what reaches a disk, and when. Tests of other crates include this file by its path. It takes
//! this crate's types from the module around it, since their paths differ in this crate's own
//! tests.
#![allow(dead_code, reason = "not every test uses all of it")]

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::{Backend, BackendDone, BackendIo, BackendResult, IoOp, Limits};

/// Longest wait of a test, on the slowest machine.
const PATIENCE: Duration = Duration::from_secs(20);

/// What a test waits for.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum News {
    /// The disk was asked to write or to flush, and waits for [`Cached::resume`].
    Asked { op: IoOp, offset: u64, len: u32, fua: bool },
    /// A request was answered: its number, and 0 or a negative errno.
    Answered(u64, i32),
}

impl News {
    pub(crate) fn write(offset: u64, len: u32) -> Self {
        Self::Asked { op: IoOp::Write, offset, len, fua: false }
    }

    pub(crate) fn flush() -> Self {
        Self::Asked { op: IoOp::Flush, offset: 0, len: 0, fua: false }
    }
}

/// The disk. Reads are answered at once.
pub(crate) struct Cached {
    limits: Limits,
    state: Mutex<State>,
    more: Condvar,
}

struct State {
    /// Contents that reads return.
    cache: Vec<u8>,
    /// Contents after a loss of power.
    medium: Vec<u8>,
    news: VecDeque<News>,
    held: VecDeque<(BackendIo, Arc<dyn BackendDone>)>,
    /// The test has ended: requests are executed at once.
    holds_nothing: bool,
}

impl Cached {
    pub(crate) fn new(limits: Limits) -> Arc<Self> {
        let bytes = vec![0; limits.bytes as usize];
        let state = State {
            cache: bytes.clone(),
            medium: bytes,
            news: VecDeque::new(),
            held: VecDeque::new(),
            holds_nothing: false,
        };
        Arc::new(Self { limits, state: Mutex::new(state), more: Condvar::new() })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn tell(&self, news: News) {
        self.lock().news.push_back(news);
        self.more.notify_all();
    }

    /// Records an answer.
    pub(crate) fn answered(&self, who: u64, errno: i32) {
        self.tell(News::Answered(who, errno));
    }

    /// Waits for the next event.
    #[track_caller]
    pub(crate) fn news(&self) -> News {
        let end = Instant::now() + PATIENCE;
        let mut state = self.lock();
        loop {
            if let Some(news) = state.news.pop_front() {
                return news;
            }
            let left = end.saturating_duration_since(Instant::now());
            assert!(!left.is_zero(), "neither a request nor an answer");
            let woken = self.more.wait_timeout(state, left);
            state = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Executes the oldest request and answers it, or fails it with a negative errno.
    #[track_caller]
    pub(crate) fn resume(&self, errno: i32) {
        let mut state = self.lock();
        let (io, done) = state.held.pop_front().expect("a request");
        if errno == 0 {
            state.execute(&io);
        }
        drop(state);
        done.done(&[BackendResult { token: io.token, errno, direct: None }]);
    }

    /// Returns the contents after a loss of power now.
    pub(crate) fn durable(&self, offset: u64, len: u32) -> Vec<u8> {
        let at = offset as usize;
        self.lock().medium[at..at + len as usize].to_vec()
    }

    /// From now on executes all requests at once, so that waiting threads end, also when a test
    /// has failed.
    pub(crate) fn hold_nothing(&self) {
        self.lock().holds_nothing = true;
        while !self.lock().held.is_empty() {
            self.resume(0);
        }
    }
}

impl State {
    fn execute(&mut self, io: &BackendIo) {
        let range = io.offset as usize..io.offset as usize + io.len as usize;
        match (io.op, &io.mem) {
            (IoOp::Read, Some(mem)) => mem.buffer.write(mem.offset, &self.cache[range]),
            (IoOp::Write, Some(mem)) => {
                mem.buffer.read(mem.offset, &mut self.cache[range.clone()]);
                if io.fua {
                    self.medium[range.clone()].copy_from_slice(&self.cache[range]);
                }
            }
            (IoOp::Flush, _) => self.medium.copy_from_slice(&self.cache),
            (IoOp::WriteZeroes, _) => self.cache[range].fill(0),
            _ => panic!("nobody asks for that: {io:?}"),
        }
    }
}

impl Backend for Cached {
    fn limits(&self) -> Limits {
        self.limits
    }

    fn submit(&self, ios: &mut Vec<BackendIo>, done: &Arc<dyn BackendDone>) {
        for io in ios.drain(..) {
            let BackendIo { token, op, offset, len, fua, .. } = io;
            let mut state = self.lock();
            if op == IoOp::Read || state.holds_nothing {
                state.execute(&io);
                drop(state);
                done.done(&[BackendResult { token, errno: 0, direct: None }]);
            } else {
                state.held.push_back((io, Arc::clone(done)));
                drop(state);
                self.tell(News::Asked { op, offset, len, fua });
            }
        }
    }

    fn resize(&self) -> std::io::Result<u64> {
        Ok(self.limits.bytes)
    }
}
