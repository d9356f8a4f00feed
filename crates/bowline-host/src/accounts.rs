//! What each user has of the node at this time, and what was refused.

use std::cell::Cell;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bowline_base::Errno;

use crate::caller::Caller;
use crate::closer::{Guests, Owner};
use crate::policy::{Policy, Ports, Quota};

/// Most kinds of refusals that are kept apart until somebody asks.
const KINDS_MAX: usize = 64;

/// Most bytes of memory for requests and answers of all channels of a user, beside what some
/// channels have anyway: some of the largest requests.
const HELD_MAX: usize = 64 << 20;
/// The same of root and the node's own user together.
const HELD_MAX_TRUSTED: usize = 512 << 20;
/// What a channel may have anyway, and how many channels of a user.
const HELD_ANYWAY: usize = 512 << 10;
const CHANNELS_ANYWAY: usize = 128;

/// What a program was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Refused {
    /// To have sockets of the node (EACCES).
    Attach,
    /// To bind to an address and port (EACCES).
    Bind,
    /// One more channel than its quota (EMFILE).
    Channels,
    /// One more socket than its quota (EMFILE).
    Sockets,
    /// Buffers beyond its quota (ENOBUFS).
    Buffers,
    /// More of unfinished requests and of answers that it does not take: the channel ends.
    Requests,
    /// To use its memory for RDMA (EPERM).
    Rdma,
    /// To keep a socket in whose shared memory there was what cannot be.
    Broken,
    /// To keep a socket to which a process has written by a system call that its library did not
    /// see, and which it takes for sent.
    Writing {
        /// The process; 0 if the node sees no number of it.
        process: i32,
    },
}

impl Refused {
    fn errno(self) -> Errno {
        match self {
            Self::Attach | Self::Bind => Errno::EACCES,
            Self::Channels | Self::Sockets => Errno::EMFILE,
            Self::Buffers | Self::Requests => Errno::ENOBUFS,
            Self::Rdma => Errno::EPERM,
            Self::Broken | Self::Writing { .. } => Errno::EBADF,
        }
    }
}

impl std::fmt::Display for Refused {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Attach => "may not have sockets",
            Self::Bind => "may not bind there",
            Self::Channels => "has its quota of channels",
            Self::Sockets => "has its quota of sockets",
            Self::Buffers => "has its quota of buffers",
            Self::Requests => "has too much of unfinished requests",
            Self::Rdma => "may not use its memory for RDMA",
            Self::Broken => "wrote invalid data to the shared memory of a socket, which was closed",
            Self::Writing { process } => {
                return write!(
                    f,
                    "wrote to the descriptor of a socket past the library; such bytes are not sent, \
                     and the socket was closed: process {process}"
                );
            }
        })
    }
}

/// How often programs of a user were refused something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The user; `None` stands for several who were too many to be told apart.
    pub user: Option<u32>,
    /// What it was.
    pub what: Refused,
    /// How often.
    pub count: u64,
}

/// Refusals since the last look.
#[derive(Debug, Default)]
pub(crate) struct Refusals(Mutex<Vec<Refusal>>);

impl Refusals {
    fn list(&self) -> MutexGuard<'_, Vec<Refusal>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, user: u32, what: Refused) {
        let mut list = self.list();
        let full = list.len() >= KINDS_MAX;
        let known = |list: &[Refusal], user| {
            list.iter().position(|one| one.user == user && one.what == what)
        };
        let place = known(&list, Some(user)).or_else(|| known(&list, None).filter(|_| full));
        match place {
            Some(place) => list[place].count += 1,
            None => {
                let user = (!full).then_some(user);
                list.push(Refusal { user, what, count: 1 });
            }
        }
    }

    pub(crate) fn take(&self) -> Vec<Refusal> {
        std::mem::take(&mut self.list())
    }
}

/// What a user has.
#[derive(Clone, Copy, Debug, Default)]
struct Usage {
    sockets: usize,
    channels: usize,
    send_bytes: usize,
    recv_bytes: usize,
    /// Bytes of requests and answers.
    held: usize,
}

/// What a socket counts for, with the user who opened it.
#[derive(Debug)]
pub(crate) struct Charge {
    pub(crate) user: u32,
    send_bytes: usize,
    recv_bytes: usize,
}

/// The policy, and what it is compared with.
#[derive(Debug)]
pub(crate) struct Accounts {
    policy: Policy,
    /// The node's user.
    own: u32,
    default_quota: Quota,
    usage: HashMap<u32, Usage>,
    guests: Arc<Guests>,
    refusals: Arc<Refusals>,
    /// Refusals that the node's counter does not have yet.
    uncounted: Cell<u64>,
}

impl Accounts {
    /// Those of a node that runs as the user `own`.
    pub(crate) fn new(
        own: u32,
        policy: Policy,
        default_quota: Quota,
        refusals: Arc<Refusals>,
    ) -> Self {
        let default_quota = policy.quota.unwrap_or(default_quota);
        let guests = Guests::new(policy.attach.clone());
        let usage = HashMap::new();
        Self { policy, own, default_quota, usage, guests, refusals, uncounted: Cell::new(0) }
    }

    /// Whose lane it is for what a caller has sent, who may not have a channel.
    pub(crate) fn owner(&self, caller: &Caller) -> Owner {
        let is_guest = self.is_trusted(caller.user) || self.policy.may_attach(caller);
        is_guest.then_some(caller.user)
    }

    /// Root and the node's own user.
    pub(crate) fn is_trusted(&self, user: u32) -> bool {
        user == 0 || user == self.own
    }

    fn quota(&self, user: u32) -> Quota {
        let default_quota = if self.is_trusted(user) { Quota::NONE } else { self.default_quota };
        self.policy.quotas.get(&user).copied().unwrap_or(default_quota)
    }

    /// Counts a refusal; returns the error that stands for it.
    fn refuse(&self, user: u32, what: Refused) -> Errno {
        self.refusals.add(user, what);
        self.uncounted.set(self.uncounted.get() + 1);
        what.errno()
    }

    /// Takes the number of refusals since the last call.
    pub(crate) fn take_uncounted(&self) -> u64 {
        self.uncounted.take()
    }

    /// A process has connected.
    pub(crate) fn open_channel(&mut self, caller: &Caller) -> Result<(), Errno> {
        let user = caller.user;
        if !self.is_trusted(user) && !self.policy.may_attach(caller) {
            return Err(self.refuse(user, Refused::Attach));
        }
        let quota = self.quota(user);
        let usage = self.usage.entry(user).or_default();
        if usage.channels >= quota.channels {
            return Err(self.refuse(user, Refused::Channels));
        }
        usage.channels += 1;
        self.guests.set(user, true);
        Ok(())
    }

    /// A channel that held `before` bytes has ended.
    pub(crate) fn close_channel(&mut self, user: u32, before: usize) {
        self.change(user, |usage| {
            usage.held -= before;
            usage.channels -= 1;
        });
        if self.usage.get(&user).is_none_or(|usage| usage.channels == 0) {
            self.guests.set(user, false);
        }
    }

    /// A channel that had memory of `before` bytes for requests and answers has `now`. Returns
    /// `false` when that is more, and all channels of the user have too much.
    pub(crate) fn hold(&mut self, user: u32, before: usize, now: usize) -> bool {
        let usage = self.usage.entry(user).or_default();
        usage.held = usage.held - before + now;
        if now <= before {
            return true;
        }
        let mut of = *usage;
        let mut most = HELD_MAX;
        if self.is_trusted(user) {
            most = HELD_MAX_TRUSTED;
            let other = if user == 0 { self.own } else { 0 };
            if let Some(other) = self.usage.get(&other).filter(|_| other != user) {
                of.held += other.held;
                of.channels += other.channels;
            }
        }
        of.held <= most + of.channels.min(CHANNELS_ANYWAY) * HELD_ANYWAY
    }

    /// A channel ends because those of its user have too much memory.
    pub(crate) fn refuse_request(&self, user: u32) {
        self.refuse(user, Refused::Requests);
    }

    /// A program wants a socket with buffers of these sizes.
    pub(crate) fn open_socket(
        &mut self,
        user: u32,
        send_bytes: usize,
        recv_bytes: usize,
    ) -> Result<Charge, Errno> {
        let quota = self.quota(user);
        let usage = self.usage.entry(user).or_default();
        if usage.sockets >= quota.sockets {
            return Err(self.refuse(user, Refused::Sockets));
        }
        let (send, recv) = (usage.send_bytes + send_bytes, usage.recv_bytes + recv_bytes);
        if send > quota.send_bytes || recv > quota.recv_bytes {
            return Err(self.refuse(user, Refused::Buffers));
        }
        usage.sockets += 1;
        (usage.send_bytes, usage.recv_bytes) = (send, recv);
        Ok(Charge { user, send_bytes, recv_bytes })
    }

    pub(crate) fn close_socket(&mut self, charge: &Charge) {
        self.change(charge.user, |usage| {
            usage.sockets -= 1;
            usage.send_bytes -= charge.send_bytes;
            usage.recv_bytes -= charge.recv_bytes;
        });
    }

    /// Largest send and receive buffer that a socket may have, bytes; never less than it has.
    pub(crate) fn most(&self, charge: &Charge) -> (usize, usize) {
        let quota = self.quota(charge.user);
        let usage = self.usage.get(&charge.user).copied().unwrap_or_default();
        let most = |quota: usize, used: usize, own: usize| quota.saturating_sub(used) + own;
        (
            most(quota.send_bytes, usage.send_bytes, charge.send_bytes.min(usage.send_bytes)),
            most(quota.recv_bytes, usage.recv_bytes, charge.recv_bytes.min(usage.recv_bytes)),
        )
    }

    /// A socket has buffers of other sizes now.
    pub(crate) fn resize(&mut self, charge: &mut Charge, send_bytes: usize, recv_bytes: usize) {
        self.change(charge.user, |usage| {
            usage.send_bytes = usage.send_bytes - charge.send_bytes + send_bytes;
            usage.recv_bytes = usage.recv_bytes - charge.recv_bytes + recv_bytes;
        });
        (charge.send_bytes, charge.recv_bytes) = (send_bytes, recv_bytes);
    }

    /// Ports of an address to which a caller may bind.
    pub(crate) fn ports(&self, caller: &Caller, address: std::net::IpAddr) -> Ports {
        if self.is_trusted(caller.user) {
            return Ports::All;
        }
        self.policy.ports(caller, address)
    }

    pub(crate) fn refuse_bind(&self, caller: &Caller) -> Errno {
        self.refuse(caller.user, Refused::Bind)
    }

    /// A socket of a user was closed because of what was in its shared memory.
    pub(crate) fn count_broken(&self, user: u32) {
        self.refuse(user, Refused::Broken);
    }

    /// A socket of a user was closed because a process has written to its descriptor.
    pub(crate) fn count_writing(&self, user: u32, process: i32) {
        self.refuse(user, Refused::Writing { process });
    }

    /// Tells whether the node may touch memory of a caller.
    pub(crate) fn check_rdma(&self, caller: &Caller) -> Result<(), Errno> {
        if self.is_trusted(caller.user) || self.policy.may_rdma(caller) {
            return Ok(());
        }
        Err(self.refuse(caller.user, Refused::Rdma))
    }

    /// A caller sees the sockets of all.
    pub(crate) fn may_inspect(&self, caller: &Caller) -> bool {
        self.is_trusted(caller.user) || self.policy.may_inspect(caller)
    }

    /// What users have, in the order of their numbers.
    pub(crate) fn usage(&self) -> Vec<(u32, [usize; 5])> {
        let of = |usage: &Usage| {
            let Usage { sockets, channels, send_bytes, recv_bytes, held } = *usage;
            [sockets, channels, send_bytes, recv_bytes, held]
        };
        let mut all: Vec<_> = self.usage.iter().map(|(user, usage)| (*user, of(usage))).collect();
        all.sort_unstable();
        all
    }

    fn change(&mut self, user: u32, change: impl FnOnce(&mut Usage)) {
        let Some(usage) = self.usage.get_mut(&user) else { return };
        change(usage);
        if usage.sockets == 0 && usage.channels == 0 {
            self.usage.remove(&user);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN: u32 = 77_000;
    const OTHER: u32 = 77_001;

    fn accounts(quota: Quota) -> Accounts {
        let policy = Policy { quota: Some(quota), ..Policy::default() };
        Accounts::new(OWN, policy, Quota::NONE, Arc::default())
    }

    #[test]
    fn buffers_grow_up_to_the_quota_and_come_back() {
        let quota = Quota { sockets: 2, channels: 1, send_bytes: 100, recv_bytes: 50 };
        let mut accounts = accounts(quota);
        let mut first = accounts.open_socket(OTHER, 40, 20).unwrap();
        assert_eq!(accounts.most(&first), (100, 50));
        let second = accounts.open_socket(OTHER, 40, 20).unwrap();
        assert_eq!(accounts.most(&first), (60, 30));
        accounts.resize(&mut first, 60, 30);
        assert_eq!(accounts.open_socket(OTHER, 1, 1).unwrap_err(), Errno::EMFILE);
        accounts.close_socket(&second);
        assert_eq!(accounts.open_socket(OTHER, 41, 1).unwrap_err(), Errno::ENOBUFS);
        assert_eq!(accounts.open_socket(OTHER, 1, 21).unwrap_err(), Errno::ENOBUFS);
        accounts.open_socket(OTHER + 1, 100, 50).expect("another user has a quota of its own");
        accounts.open_socket(0, 1000, 1000).expect("root has none");
        accounts.close_socket(&first);
        assert!(!accounts.usage.contains_key(&OTHER), "nothing is kept of who has nothing");
        let [sockets, buffers] = accounts.refusals.take()[..] else { panic!("two kinds") };
        assert_eq!((sockets.what, sockets.count), (Refused::Sockets, 1));
        assert_eq!((buffers.what, buffers.count), (Refused::Buffers, 2));
        assert_eq!(buffers.user, Some(OTHER));
    }

    // Root and the node's user have a share together, each other user one of its own.
    #[test]
    fn requests_of_everybody_are_bounded() {
        let mut accounts = accounts(Quota::NONE);
        let (mib, own) = (1 << 20, accounts.own);
        accounts.policy.attach.users.extend([OTHER, OTHER + 1]);
        for user in [0, own, OTHER, OTHER + 1] {
            let caller = Caller { user, ..Caller::default() };
            (0..3).for_each(|_| accounts.open_channel(&caller).unwrap());
        }
        for user in [OTHER, OTHER + 1] {
            assert!(accounts.hold(user, 0, 65 * mib), "64 MiB, and half of one for each channel");
            assert!(!accounts.hold(user, 0, mib));
            assert!(accounts.hold(user, mib, 0), "less is never refused");
        }
        assert!(accounts.hold(0, 0, 300 * mib) && accounts.hold(own, 0, 200 * mib));
        assert!(!accounts.hold(0, 0, 20 * mib) && accounts.hold(0, 20 * mib, 0));
        assert!(!accounts.hold(own, 0, 20 * mib));
        // Beyond 128 channels more of them do not let a user have more.
        let caller = Caller { user: OTHER, ..Caller::default() };
        (0..297).for_each(|_| accounts.open_channel(&caller).unwrap());
        accounts.hold(OTHER, 65 * mib, 0);
        assert!(accounts.hold(OTHER, 0, 128 * mib) && !accounts.hold(OTHER, 0, mib));
    }

    #[test]
    fn refusals_of_many_users_take_little_memory() {
        let refusals = Refusals::default();
        (0..1000).for_each(|user| refusals.add(user, Refused::Attach));
        let list = refusals.take();
        assert_eq!(list.len(), KINDS_MAX + 1);
        assert_eq!(list.iter().map(|one| one.count).sum::<u64>(), 1000);
        assert_eq!(list.last().unwrap().user, None);
        assert!(refusals.take().is_empty());
    }
}
