//! Closing descriptors that programs had a hand in, in threads that serve nobody.
//!
//! A `close` can take as long as who made the descriptor wants: of a TCP socket that lingers, of a
//! file whose file system a program serves; and with a unix socket all go that wait in its queue.
//! So each user has a lane of threads of its own for what it has sent, whoever has opened the
//! channel or socket on which it came.

#![allow(unsafe_code, reason = "a descriptor is taken out of what is being dropped")]

use std::collections::{HashMap, HashSet, VecDeque};
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, LazyLock, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use rustix::net::{Shutdown, shutdown};

use crate::arrivals;
use crate::policy::Principals;

/// Most threads that close what one user has sent; one that is stuck has given its number back.
const THREADS_MAX: usize = 8;
/// Descriptors of a user that wait to be closed, from which on nothing is taken of the user's: no
/// new channels, and nothing that it sends, since more may come with it.
const BEHIND: usize = 1024;
/// How long a thread waits for more.
const PATIENCE: Duration = Duration::from_millis(500);
const STACK: usize = 64 << 10;

/// Whose descriptors they are: a user's who is known here, or all strangers' together.
pub type Owner = Option<u32>;

/// What this process has to close, whichever of its nodes took it.
static ALL: LazyLock<Arc<Closer>> = LazyLock::new(Arc::default);

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Root and the user of this process.
pub(crate) fn is_trusted(user: u32) -> bool {
    user == 0 || user == rustix::process::geteuid().as_raw()
}

/// Tells whether nothing is to be taken of a user, who sends what cannot be closed as fast.
pub(crate) fn is_behind(owner: Owner) -> bool {
    is_any_behind() && ALL.is_behind(owner)
}

/// Tells whether there is such a user.
pub(crate) fn is_any_behind() -> bool {
    // Relaxed: a hint, which the lock of a lane confirms.
    ALL.behind.load(Ordering::Relaxed) > 0
}

/// Whose lane it is for what a user has sent. Strangers have one together: a user may have many
/// numbers of users (`/etc/subuid`).
pub(crate) fn owner_of(user: u32) -> Owner {
    ALL.owner_of(user)
}

/// Forgets users who have sent nothing for a while, and tries again where no thread could be made.
pub(crate) fn tidy() {
    ALL.tidy();
}

/// A descriptor that programs have a hand in. When it is dropped, another thread closes it.
#[derive(Debug)]
pub(crate) struct Passed {
    descriptor: ManuallyDrop<OwnedFd>,
    owner: Owner,
}

impl Passed {
    pub(crate) fn new(owner: Owner, descriptor: impl Into<OwnedFd>) -> Self {
        Self { descriptor: ManuallyDrop::new(descriptor.into()), owner }
    }

    pub(crate) fn into_inner(self) -> OwnedFd {
        let mut this = ManuallyDrop::new(self);
        // SAFETY: nothing uses it afterwards; it is not dropped.
        unsafe { ManuallyDrop::take(&mut this.descriptor) }
    }

    /// The same, as another's.
    pub(crate) fn owned_by(self, owner: Owner) -> Self {
        Self::new(owner, self.into_inner())
    }

    /// Ends a connection of this node to programs, which learn of it at once. What others than its
    /// owner have sent, and nobody has read, is theirs to wait for.
    pub(crate) fn end(self) {
        let owner = self.owner;
        let descriptor = self.into_inner();
        let _ = shutdown(&descriptor, Shutdown::Both);
        // Nothing can come any more: without anything in its queue closing it takes no time.
        if let Some(sender) = arrivals::waiting(&descriptor, owner) {
            let lane = ALL.lane_for(owner, owner, sender);
            ALL.put(lane, Job { descriptor, ends: Some(owner) });
        }
    }
}

impl AsFd for Passed {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

impl Drop for Passed {
    fn drop(&mut self) {
        // SAFETY: nothing uses it afterwards.
        let descriptor = unsafe { ManuallyDrop::take(&mut self.descriptor) };
        ALL.put(self.owner, Job { descriptor, ends: None });
    }
}

/// Those who are no strangers to a node: on its list by their number, or by a group and there.
#[derive(Debug)]
pub(crate) struct Guests {
    who: Principals,
    present: Mutex<HashSet<u32>>,
}

impl Guests {
    /// They are known until this is dropped.
    pub(crate) fn new(who: Principals) -> Arc<Self> {
        let guests = Arc::new(Self { who, present: Mutex::default() });
        let mut lists = locked(&ALL.lists);
        lists.retain(|list| list.strong_count() > 0);
        lists.push(Arc::downgrade(&guests));
        guests
    }

    /// A user has a channel, or none any more.
    pub(crate) fn set(&self, user: u32, is_present: bool) {
        let mut present = locked(&self.present);
        if is_present {
            present.insert(user);
        } else {
            present.remove(&user);
        }
    }

    fn include(&self, user: u32) -> bool {
        self.who.everybody
            || self.who.users.contains(&user)
            || locked(&self.present).contains(&user)
    }
}

#[derive(Debug, Default)]
struct Closer {
    lanes: Mutex<HashMap<Owner, Arc<Lane>>>,
    /// Lanes that are behind.
    behind: AtomicUsize,
    lists: Mutex<Vec<Weak<Guests>>>,
}

/// What one user has sent, and the threads that close it.
#[derive(Debug)]
struct Lane {
    owner: Owner,
    state: Mutex<State>,
    more: Condvar,
}

#[derive(Debug, Default)]
struct State {
    queue: VecDeque<Job>,
    threads: usize,
    idle: usize,
}

#[derive(Debug)]
struct Job {
    descriptor: OwnedFd,
    /// It is a connection of this owner's that has ended, and what is in its queue goes first.
    ends: Option<Owner>,
}

impl Closer {
    fn owner_of(&self, user: u32) -> Owner {
        let is_guest = || {
            let lists = locked(&self.lists);
            lists.iter().any(|list| list.upgrade().is_some_and(|list| list.include(user)))
        };
        (is_trusted(user) || is_guest()).then_some(user)
    }

    fn put(self: &Arc<Self>, owner: Owner, job: Job) {
        let mut lanes = locked(&self.lanes);
        let new = || Arc::new(Lane { owner, state: Mutex::default(), more: Condvar::new() });
        let lane = lanes.entry(owner).or_insert_with(new);
        let mut state = locked(&lane.state);
        state.queue.push_back(job);
        if state.queue.len() == BEHIND {
            self.behind.fetch_add(1, Ordering::Relaxed);
        }
        self.see_to(lane, &mut state);
    }

    /// Has a thread look at what there is. Where none can be made, it waits until one can.
    fn see_to(self: &Arc<Self>, lane: &Arc<Lane>, state: &mut State) {
        // One that was woken for another job, and has not taken it yet, counts as idle.
        if state.idle >= state.queue.len() || state.threads == THREADS_MAX {
            lane.more.notify_one();
            return;
        }
        let (closer, of_thread) = (Arc::clone(self), Arc::clone(lane));
        let thread = std::thread::Builder::new().name("bowline-close".into()).stack_size(STACK);
        if thread.spawn(move || closer.work(&of_thread)).is_ok() {
            state.threads += 1;
        }
    }

    fn work(self: &Arc<Self>, lane: &Lane) {
        let mut state = locked(&lane.state);
        loop {
            while let Some(next) = state.queue.pop_front() {
                if state.queue.len() == BEHIND - 1 {
                    self.behind.fetch_sub(1, Ordering::Relaxed);
                }
                drop(state);
                self.finish(lane.owner, next);
                state = locked(&lane.state);
            }
            state.idle += 1;
            let waited = lane.more.wait_timeout_while(state, PATIENCE, |s| s.queue.is_empty());
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
            state.idle -= 1;
            if state.queue.is_empty() {
                state.threads -= 1;
                return;
            }
        }
    }

    /// Closes it, as far as that is this lane's to wait for.
    fn finish(self: &Arc<Self>, lane: Owner, job: Job) {
        let Some(owner) = job.ends else { return };
        while let Some(sender) = arrivals::waiting(&job.descriptor, owner) {
            let next = self.lane_for(lane, owner, sender);
            if next != lane {
                return self.put(next, job);
            }
            arrivals::discard(&job.descriptor);
        }
    }

    /// The lane for a connection that has ended, by who has sent what comes next: his own, unless
    /// he is behind, and its owner one of many who may be his accomplice.
    fn lane_for(&self, lane: Owner, owner: Owner, sender: Owner) -> Owner {
        let may_be = sender == lane || owner.is_some_and(is_trusted) || !self.is_behind(sender);
        if may_be { sender } else { owner }
    }

    fn is_behind(&self, owner: Owner) -> bool {
        let lanes = locked(&self.lanes);
        lanes.get(&owner).is_some_and(|lane| locked(&lane.state).queue.len() >= BEHIND)
    }

    fn tidy(self: &Arc<Self>) {
        locked(&self.lanes).retain(|_, lane| {
            let mut state = locked(&lane.state);
            if state.threads == 0 && !state.queue.is_empty() {
                self.see_to(lane, &mut state);
            }
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
        let closer = Arc::<Closer>::default();
        let close = |owner, descriptor| closer.put(owner, Job { descriptor, ends: None });
        let mut peers = Vec::new();
        for _ in 0..2 * THREADS_MAX {
            let (descriptor, peer) = lingering();
            close(Some(1), descriptor);
            peers.push(peer);
        }
        assert!(!closer.is_behind(Some(1)) && !closer.is_behind(Some(2)));
        (0..BEHIND).for_each(|_| close(Some(1), UnixStream::pair().unwrap().0.into()));
        // Another user's is closed meanwhile.
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        close(Some(2), theirs.into());
        assert_eq!(ours.read(&mut [0]).unwrap(), 0);
        assert!(closer.is_behind(Some(1)) && !closer.is_behind(Some(2)));
        closer.tidy();
        assert!(locked(&closer.lanes).contains_key(&Some(1)));
        // The ends of the peers are the ends of the waits.
        drop(peers);
        while closer.is_behind(Some(1)) || !locked(&closer.lanes).is_empty() {
            assert!(begun.elapsed() < Duration::from_secs(50), "a close still waits");
            std::thread::sleep(Duration::from_millis(5));
            closer.tidy();
        }
    }

    /// What waits in a connection that ends is closed in the lane of whoever has sent it, or of the
    /// connection's owner, who may be an accomplice of somebody who has enough already.
    #[test]
    fn an_ended_connection_goes_to_who_has_sent_what_is_in_it() {
        let closer = Arc::<Closer>::default();
        let (root, anna, bert) = (Some(0), Some(77_001), Some(77_002));
        for sender in [anna, bert, None] {
            assert_eq!(closer.lane_for(anna, anna, sender), sender);
        }
        let lane = Lane { owner: bert, state: Mutex::default(), more: Condvar::new() };
        let job = || Job { descriptor: UnixStream::pair().unwrap().0.into(), ends: None };
        locked(&lane.state).queue.extend((0..BEHIND).map(|_| job()));
        locked(&closer.lanes).insert(bert, Arc::new(lane));
        assert_eq!(closer.lane_for(anna, anna, bert), anna);
        assert_eq!(closer.lane_for(bert, anna, bert), bert, "it is there already");
        assert_eq!(closer.lane_for(root, root, bert), bert, "nobody locks root out");
    }

    #[test]
    fn strangers_have_one_lane_and_guests_one_each() {
        let (listed, by_group) = (77_011, 77_012);
        let who =
            Principals { users: [listed].into(), groups: [77_100].into(), ..Principals::default() };
        let guests = Guests::new(who);
        assert_eq!([0, listed, by_group].map(owner_of), [Some(0), Some(listed), None]);
        guests.set(by_group, true);
        assert_eq!(owner_of(by_group), Some(by_group));
        guests.set(by_group, false);
        assert_eq!(owner_of(by_group), None);
        drop(guests);
        assert_eq!(owner_of(listed), None, "its node is gone");
    }
}
