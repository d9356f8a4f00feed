//! A minimal executor for the tests.

use std::collections::VecDeque;
use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::Instant;

use super::PATIENCE;

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Runs a future on this thread, and polls it only when it is woken.
pub(crate) fn block_on<T>(future: impl Future<Output = T>) -> T {
    let mut future = pin!(future);
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    loop {
        if let Poll::Ready(done) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
            return done;
        }
        park();
    }
}

fn park() {
    let start = Instant::now();
    std::thread::park_timeout(PATIENCE);
    assert!(start.elapsed() < PATIENCE, "never woken");
}

type Task<'a> = Pin<Box<dyn Future<Output = ()> + 'a>>;

struct Ready {
    queue: Arc<Mutex<VecDeque<usize>>>,
    task: usize,
    thread: Thread,
}

impl Wake for Ready {
    fn wake(self: Arc<Self>) {
        self.queue.lock().unwrap().push_back(self.task);
        self.thread.unpark();
    }
}

/// Runs tasks on this thread until all have finished. Each is polled only when it is woken.
pub(crate) fn run(mut tasks: Vec<Task<'_>>) {
    let mut left = tasks.len();
    let queue = Arc::new(Mutex::new((0..left).collect::<VecDeque<_>>()));
    let thread = std::thread::current();
    let waker = |task| {
        Waker::from(Arc::new(Ready { queue: Arc::clone(&queue), task, thread: thread.clone() }))
    };
    let wakers: Vec<Waker> = (0..left).map(waker).collect();
    let mut over = vec![false; left];
    while left > 0 {
        let next = queue.lock().unwrap().pop_front();
        let Some(task) = next else {
            park();
            continue;
        };
        if over[task] {
            continue;
        }
        let mut context = Context::from_waker(&wakers[task]);
        if tasks[task].as_mut().poll(&mut context).is_ready() {
            over[task] = true;
            left -= 1;
        }
    }
}

/// Counts how often it is woken.
#[derive(Default)]
pub(crate) struct Woken(AtomicUsize);

impl Woken {
    pub(crate) fn count(&self) -> usize {
        self.0.load(SeqCst)
    }

    /// Polls a future once.
    pub(crate) fn poll<T>(
        self: &Arc<Self>,
        future: &mut (impl Future<Output = T> + Unpin),
    ) -> Option<T> {
        let waker = Waker::from(Arc::clone(self));
        match Pin::new(future).poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(done) => Some(done),
            Poll::Pending => None,
        }
    }
}

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, SeqCst);
    }
}
