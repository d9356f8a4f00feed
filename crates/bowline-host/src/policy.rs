//! What programs may do on a node, and how much of it each user may take.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::ops::RangeInclusive;

use bowline_rds::{Config, IpNet};
use rustix::process::{Resource, getrlimit};

use crate::caller::Caller;

/// Users and groups, by their numbers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Principals {
    /// Everybody.
    pub everybody: bool,
    /// Users.
    pub users: BTreeSet<u32>,
    /// Groups: those who are in one of them, also as a supplementary group.
    pub groups: BTreeSet<u32>,
}

impl Principals {
    /// Tells whether nobody is meant.
    pub fn is_nobody(&self) -> bool {
        !self.everybody && self.users.is_empty() && self.groups.is_empty()
    }

    fn includes(&self, caller: &Caller) -> bool {
        self.everybody
            || self.users.contains(&caller.user)
            || caller.groups.iter().any(|group| self.groups.contains(group))
    }
}

/// Where some users may bind.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BindRule {
    /// Whom the rule is for.
    pub who: Principals,
    /// Networks of the addresses; none stands for every address of the node.
    pub addresses: Vec<IpNet>,
    /// Ports; none stands for all.
    pub ports: Vec<RangeInclusive<u16>>,
}

/// Ports to which a caller may bind on an address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Ports {
    All,
    /// Only these; none: no port.
    Only(Vec<RangeInclusive<u16>>),
}

impl Ports {
    pub(crate) fn contain(&self, port: u16) -> bool {
        match self {
            Self::All => true,
            Self::Only(ranges) => ranges.iter().any(|range| range.contains(&port)),
        }
    }
}

/// What the programs of one user may have at a time, all together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quota {
    /// Sockets. Each has 516 KiB of shared memory at most.
    pub sockets: usize,
    /// Channels: connections of processes to the node.
    pub channels: usize,
    /// Send buffers of the sockets, bytes: no more can wait to be sent.
    pub send_bytes: usize,
    /// Receive buffers of the sockets, bytes: with more than these waiting, nobody may send.
    pub recv_bytes: usize,
}

impl Quota {
    /// The quota of root and of the node's own user: none.
    pub const NONE: Self = Self {
        sockets: usize::MAX,
        channels: usize::MAX,
        send_bytes: usize::MAX,
        recv_bytes: usize::MAX,
    };

    /// The quota of a user for whom nothing else is said: 2 048 sockets, 4 096 channels, 256 MiB of
    /// send buffers and half of what the node keeps for readers, 256 MiB. It is less where the
    /// process may have few descriptors, so that two users leave some to others, and more where the
    /// default buffers of a socket are large.
    pub fn default_for(config: &Config) -> Self {
        let descriptors = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        let descriptors = usize::try_from(descriptors).unwrap_or(usize::MAX);
        Self {
            // A socket takes two descriptors, a channel one and one that comes with a request.
            sockets: 2048.min(descriptors / 10).min(config.limits.sockets / 4),
            channels: 4096.min(descriptors / 10),
            send_bytes: (256 << 20).max(SOCKETS_MIN.saturating_mul(config.send_buffer)),
            recv_bytes: (config.limits.recv_bytes_total / 2)
                .max(SOCKETS_MIN.saturating_mul(config.recv_buffer)),
        }
    }
}

/// Every quota allows at least this many sockets with the node's default buffers.
const SOCKETS_MIN: usize = 64;

/// Who may do what. Root and the node's own user may do everything.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Policy {
    /// Who else may have sockets.
    pub attach: Principals,
    /// Who else sees the sockets of others, and their messages, in the tables of `getsockopt`.
    pub inspect: Principals,
    /// Who else may use its memory for RDMA. A program can keep an access to its memory from
    /// ending, and the node with it: only those who are trusted not to.
    pub rdma: Principals,
    /// Where others may bind; without a rule anywhere, as on a kernel.
    pub binds: Vec<BindRule>,
    /// What each of the others may have; `None` stands for [`Quota::default_for`].
    pub quota: Option<Quota>,
    /// Quotas of single users, the node's own among them.
    pub quotas: BTreeMap<u32, Quota>,
}

impl Policy {
    /// Ports of an address to which a caller may bind.
    pub(crate) fn ports(&self, caller: &Caller, address: IpAddr) -> Ports {
        let address = address.to_canonical();
        if self.binds.is_empty() {
            return Ports::All;
        }
        let applies = |rule: &&BindRule| {
            let there = || rule.addresses.iter().any(|network| network.contains(&address));
            rule.who.includes(caller) && (rule.addresses.is_empty() || there())
        };
        let mut all = Vec::new();
        for rule in self.binds.iter().filter(applies) {
            if rule.ports.is_empty() {
                return Ports::All;
            }
            all.extend(rule.ports.iter().cloned());
        }
        Ports::Only(all)
    }

    pub(crate) fn may_attach(&self, caller: &Caller) -> bool {
        self.attach.includes(caller)
    }

    pub(crate) fn may_rdma(&self, caller: &Caller) -> bool {
        self.rdma.includes(caller)
    }

    pub(crate) fn may_inspect(&self, caller: &Caller) -> bool {
        self.inspect.includes(caller)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn caller(user: u32, groups: &[u32]) -> Caller {
        Caller { process: 1, user, groups: groups.to_vec() }
    }

    /// The figures of SECURITY.md.
    #[test]
    fn the_usual_quota_is_the_one_that_is_told() {
        let quota = Quota::default_for(&Config::default());
        assert_eq!((quota.send_bytes, quota.recv_bytes), (256 << 20, 256 << 20));
        // Tests may have few descriptors.
        let descriptors = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        let least = |most: usize| most.min(usize::try_from(descriptors / 10).unwrap_or(most));
        assert_eq!((quota.sockets, quota.channels), (least(2048), least(4096)));
        assert_eq!(bowline_host_wire::AREA_LEN, 516 << 10);
    }

    #[test]
    fn users_and_all_groups_count() {
        let who =
            Principals { users: [7].into(), groups: [20, 21].into(), ..Principals::default() };
        assert!(who.includes(&caller(7, &[])) && who.includes(&caller(8, &[1, 21])));
        assert!(!who.includes(&caller(8, &[7])) && !who.includes(&caller(20, &[])));
        assert!(Principals::default().is_nobody() && !who.is_nobody());
        assert!(Principals { everybody: true, ..Principals::default() }.includes(&caller(9, &[])));
    }

    #[test]
    fn rules_of_a_user_add_up_and_others_get_nothing() {
        let rule = |user, network: &str, ports: &[RangeInclusive<u16>]| BindRule {
            who: Principals { users: [user].into(), ..Principals::default() },
            addresses: vec![network.parse().unwrap()],
            ports: ports.to_vec(),
        };
        let mut policy = Policy::default();
        let there: IpAddr = "10.0.0.1".parse().unwrap();
        assert_eq!(policy.ports(&caller(7, &[]), there), Ports::All, "as on a kernel");
        policy.binds = vec![
            rule(7, "10.0.0.0/24", &[1000..=2000]),
            rule(7, "10.0.0.1/32", &[5..=5]),
            rule(8, "10.0.0.0/24", &[]),
        ];
        let ports = policy.ports(&caller(7, &[]), there);
        for (port, may) in [(5, true), (1000, true), (2000, true), (2001, false), (6, false)] {
            assert_eq!(ports.contain(port), may, "{port}");
        }
        assert!(!policy.ports(&caller(7, &[]), "10.0.1.1".parse().unwrap()).contain(1000));
        assert_eq!(policy.ports(&caller(8, &[]), there), Ports::All);
        assert_eq!(policy.ports(&caller(9, &[]), there), Ports::Only(Vec::new()));
    }
}
