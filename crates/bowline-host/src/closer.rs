//! Closing descriptors that programs had a hand in, in threads that serve nobody.
//!
//! A `close` can take as long as who made the descriptor wants: of a TCP socket that lingers, of a
//! file whose file system a program serves; and with a unix socket all go that wait in its queue.

use std::collections::{HashMap, VecDeque};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Condvar, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Most threads that close what one user has sent; one that is stuck has given its number back.
const THREADS_MAX: usize = 8;
/// Descriptors of a user that wait to be closed, from which on nothing is taken of the user's: no
/// new channels, and no more of what there is, since more may come with it.
const BEHIND: usize = 1024;
/// How long a thread waits for more.
const PATIENCE: Duration = Duration::from_millis(500);
const STACK: usize = 64 << 10;

/// Whose descriptors they are: a user's who is admitted, or all strangers' together.
pub(crate) type Owner = Option<u32>;

/// What this process has to close, whichever of its nodes took it.
static ALL: LazyLock<Mutex<Closer>> = LazyLock::new(Mutex::default);

fn all() -> MutexGuard<'static, Closer> {
    ALL.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Closes descriptors, soon.
pub(crate) fn close(owner: Owner, descriptors: impl IntoIterator<Item = OwnedFd>) {
    let mut descriptors = descriptors.into_iter().peekable();
    if descriptors.peek().is_some() {
        all().close(owner, descriptors);
    }
}

/// Tells whether a user sends what cannot be closed as fast.
pub(crate) fn is_behind(owner: Owner) -> bool {
    all().is_behind(owner)
}

/// Forgets users who have sent nothing for a while.
pub(crate) fn tidy() {
    all().tidy();
}

#[derive(Debug, Default)]
struct Closer {
    lanes: HashMap<Owner, Arc<Lane>>,
}

/// What one user has sent, and the threads that close it.
#[derive(Debug, Default)]
struct Lane {
    state: Mutex<State>,
    more: Condvar,
}

#[derive(Debug, Default)]
struct State {
    queue: VecDeque<OwnedFd>,
    threads: usize,
    idle: usize,
}

impl Lane {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn work(&self) {
        let mut state = self.state();
        loop {
            while let Some(next) = state.queue.pop_front() {
                drop(state);
                drop(next);
                state = self.state();
            }
            state.idle += 1;
            let waited = self.more.wait_timeout_while(state, PATIENCE, |s| s.queue.is_empty());
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
            state.idle -= 1;
            if state.queue.is_empty() {
                state.threads -= 1;
                return;
            }
        }
    }
}

impl Closer {
    fn close(&mut self, owner: Owner, descriptors: impl IntoIterator<Item = OwnedFd>) {
        let lane = self.lanes.entry(owner).or_default();
        let mut state = lane.state();
        state.queue.extend(descriptors);
        if state.idle > 0 || state.threads == THREADS_MAX {
            lane.more.notify_one();
            return;
        }
        let of_thread = Arc::clone(lane);
        let thread = std::thread::Builder::new().name("bowline-close".into()).stack_size(STACK);
        match thread.spawn(move || of_thread.work()) {
            Ok(_) => state.threads += 1,
            // One that is there comes to it; without any there is no other way than this.
            Err(_) if state.threads > 0 => {}
            Err(_) => state.queue.clear(),
        }
    }

    fn is_behind(&self, owner: Owner) -> bool {
        self.lanes.get(&owner).is_some_and(|lane| lane.state().queue.len() >= BEHIND)
    }

    fn tidy(&mut self) {
        self.lanes.retain(|_, lane| {
            let state = lane.state();
            state.threads > 0 || !state.queue.is_empty()
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::os::unix::net::UnixStream;
    use std::time::Instant;

    /// A socket whose close waits: it lingers, and its peer reads nothing.
    fn lingering() -> (OwnedFd, TcpStream) {
        let listener = TcpListener::bind("127.79.250.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let peer = listener.accept().unwrap().0;
        let limit = Some(Duration::from_secs(60));
        rustix::net::sockopt::set_socket_linger(&stream, limit).unwrap();
        stream.set_nonblocking(true).unwrap();
        while (&stream).write(&[0; 65_536]).is_ok() {}
        stream.set_nonblocking(false).unwrap();
        (stream.into(), peer)
    }

    #[test]
    fn what_cannot_be_closed_holds_up_nobody_else() {
        let begun = Instant::now();
        let mut closer = Closer::default();
        let mut peers = Vec::new();
        for _ in 0..2 * THREADS_MAX {
            let (descriptor, peer) = lingering();
            closer.close(Some(1), [descriptor]);
            peers.push(peer);
        }
        assert!(!closer.is_behind(Some(1)) && !closer.is_behind(Some(2)));
        let fill = (0..BEHIND).map(|_| OwnedFd::from(UnixStream::pair().unwrap().0));
        closer.close(Some(1), fill);
        // Another user's is closed meanwhile.
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        closer.close(Some(2), [theirs.into()]);
        assert_eq!(ours.read(&mut [0]).unwrap(), 0);
        assert!(closer.is_behind(Some(1)) && !closer.is_behind(Some(2)));
        closer.tidy();
        assert!(closer.lanes.contains_key(&Some(1)));
        // The ends of the peers are the ends of the waits.
        drop(peers);
        while closer.is_behind(Some(1)) || !closer.lanes.is_empty() {
            assert!(begun.elapsed() < Duration::from_secs(50), "a close still waits");
            std::thread::sleep(Duration::from_millis(5));
            closer.tidy();
        }
    }
}
