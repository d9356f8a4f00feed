//! Who may do what on a node: the part of the configuration file, and what it means.

use std::{collections::BTreeMap, net::IpAddr, ops::RangeInclusive};

use bowline_host::{BindRule, Policy, Principals, Quota};
use bowline_rds::{IpNet, PeerList};
use nix::unistd::{Group, User};
use serde::{Deserialize, de};

use crate::{Failure, Outcome, values::Size};

/// Stands for every user.
const EVERYBODY: &str = "*";

/// The tables `[access]`; what is absent keeps its default.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct Access {
    /// Users whose programs are served.
    pub users: Vec<Name>,
    /// Groups whose programs are served.
    pub groups: Vec<Name>,
    inspect_users: Vec<Name>,
    inspect_groups: Vec<Name>,
    rdma_users: Vec<Name>,
    rdma_groups: Vec<Name>,
    bind: Vec<Bind>,
    quota: Option<Amounts>,
    quotas: BTreeMap<String, Amounts>,
}

/// One table `[[access.bind]]`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
struct Bind {
    users: Vec<Name>,
    groups: Vec<Name>,
    addresses: Vec<Network>,
    ports: Vec<Ports>,
}

/// A quota; what is absent is as usual.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
struct Amounts {
    sockets: Option<usize>,
    channels: Option<usize>,
    send_bytes: Option<Size>,
    recv_bytes: Option<Size>,
}

impl Amounts {
    fn or(self, usual: Quota) -> Quota {
        let bytes = |given: Option<Size>, usual| {
            given.map_or(usual, |size| usize::try_from(size.0).unwrap_or(usize::MAX))
        };
        Quota {
            sockets: self.sockets.unwrap_or(usual.sockets),
            channels: self.channels.unwrap_or(usual.channels),
            send_bytes: bytes(self.send_bytes, usual.send_bytes),
            recv_bytes: bytes(self.recv_bytes, usual.recv_bytes),
        }
    }
}

/// A user or group by its name or number.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq)]
#[serde(untagged)]
pub enum Name {
    /// The number.
    Number(u32),
    /// The name, or `*` for everybody.
    Text(String),
}

impl From<&str> for Name {
    fn from(text: &str) -> Self {
        text.parse().map_or_else(|_| Self::Text(text.to_owned()), Self::Number)
    }
}

/// A network, or an address alone: `10.0.0.0/8`, `fd00::1`.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq)]
#[serde(try_from = "String")]
pub struct Network(pub IpNet);

impl TryFrom<String> for Network {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        network(&text)
    }
}

/// Parses a network or an address.
pub fn network(text: &str) -> Result<Network, String> {
    let address = || text.parse::<IpAddr>().map(IpNet::from);
    let network = text.parse::<IpNet>().or_else(|_| address());
    let network = network.map_err(|_| {
        format!("\"{text}\" is neither an address nor a network such as 10.0.0.0/8 or fd00::/16")
    })?;
    match network.addr() {
        IpAddr::V6(ip) if ip.to_ipv4_mapped().is_some() => {
            Err(format!("\"{text}\" is IPv4-mapped: write it as IPv4"))
        }
        _ => Ok(Network(network)),
    }
}

/// Ports: `4000`, `"4000"` or `"4000-4999"`.
#[derive(Clone, Debug, Eq, PartialEq)]
struct Ports(RangeInclusive<u16>);

impl<'de> Deserialize<'de> for Ports {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = match Name::deserialize(deserializer)? {
            Name::Number(number) => number.to_string(),
            Name::Text(text) => text,
        };
        let (first, last) = text.split_once('-').unwrap_or((&text, &text));
        let range = first.trim().parse().and_then(|first| Ok(first..=last.trim().parse()?));
        range.ok().filter(|range| !range.is_empty()).map(Self).ok_or_else(|| {
            de::Error::custom(format!("\"{text}\" is neither a port nor ports such as 4000-4999"))
        })
    }
}

fn who(users: &[Name], groups: &[Name]) -> Outcome<Principals> {
    let mut who = Principals::default();
    for name in users {
        match name {
            Name::Text(text) if text == EVERYBODY => who.everybody = true,
            Name::Text(text) => drop(who.users.insert(user(text)?)),
            Name::Number(number) => drop(who.users.insert(*number)),
        }
    }
    for name in groups {
        who.groups.insert(match name {
            Name::Number(number) => *number,
            Name::Text(text) => match text.parse() {
                Ok(number) => number,
                Err(_) => match Group::from_name(text) {
                    Ok(Some(group)) => group.gid.as_raw(),
                    _ => return Err(Failure::usage(format!("there is no group \"{text}\""))),
                },
            },
        });
    }
    Ok(who)
}

fn user(text: &str) -> Outcome<u32> {
    if let Ok(number) = text.parse() {
        return Ok(number);
    }
    match User::from_name(text) {
        Ok(Some(user)) => Ok(user.uid.as_raw()),
        _ => Err(Failure::usage(format!("there is no user \"{text}\""))),
    }
}

impl Access {
    /// What the tables mean, with names looked up; `usual` is the quota where nothing else is said.
    pub fn policy(&self, usual: Quota) -> Outcome<Policy> {
        let usual = self.quota.unwrap_or_default().or(usual);
        let bind = |rule: &Bind| {
            let anybody = rule.users.is_empty() && rule.groups.is_empty();
            let who = who(&rule.users, &rule.groups)?;
            Ok(BindRule {
                who: if anybody { Principals { everybody: true, ..who } } else { who },
                addresses: rule.addresses.iter().map(|network| network.0).collect(),
                ports: rule.ports.iter().map(|ports| ports.0.clone()).collect(),
            })
        };
        let quota = |(name, amounts): (&String, &Amounts)| Ok((user(name)?, amounts.or(usual)));
        Ok(Policy {
            attach: who(&self.users, &self.groups)?,
            inspect: who(&self.inspect_users, &self.inspect_groups)?,
            rdma: who(&self.rdma_users, &self.rdma_groups)?,
            binds: self.bind.iter().map(bind).collect::<Outcome<_>>()?,
            quota: Some(usual),
            quotas: self.quotas.iter().map(quota).collect::<Outcome<_>>()?,
        })
    }
}

/// The list of peers of networks to allow and to deny.
pub fn peers(allow: &[Network], deny: &[Network]) -> PeerList {
    let networks = |list: &[Network]| list.iter().map(|network| network.0).collect();
    PeerList { allow: networks(allow), deny: networks(deny) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn networks_are_addresses_too() {
        let parsed = |text: &str| network(text).map(|network| network.0.to_string());
        assert_eq!(parsed("10.0.0.1").as_deref(), Ok("10.0.0.1/32"));
        assert_eq!(parsed("fd00::/16").as_deref(), Ok("fd00::/16"));
        for bad in ["", "10.0.0", "10.0.0.0/33", "host", "::ffff:10.0.0.0/104"] {
            assert!(parsed(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn names_are_looked_up_and_what_is_absent_is_as_usual() {
        let text = "users = [\"root\", \"77001\", 77002]\n\
                    groups = [\"root\"]\n\
                    quota = { sockets = 9 }\n\
                    quotas.77001 = { send-bytes = \"1MiB\" }\n\
                    [[bind]]\n\
                    ports = [\"4000-4999\", 7]\n";
        let access: Access = toml::from_str(text).unwrap();
        let usual = Quota { channels: 5, ..Quota::NONE };
        let policy = access.policy(usual).unwrap();
        assert_eq!(policy.attach.users, [0, 77_001, 77_002].into());
        assert_eq!(policy.attach.groups, [0].into());
        assert_eq!(policy.quota, Some(Quota { sockets: 9, ..usual }));
        let one = Quota { sockets: 9, send_bytes: 1 << 20, ..usual };
        assert_eq!(policy.quotas, [(77_001, one)].into());
        assert!(policy.binds[0].who.everybody);
        assert_eq!(policy.binds[0].ports, [4000..=4999, 7..=7]);
    }

    #[test]
    fn mistakes_are_told() {
        for text in ["[[bind]]\nports = [\"5-4\"]", "[[bind]]\nports = [70000]", "user = []"] {
            assert!(toml::from_str::<Access>(text).is_err(), "{text}");
        }
        let access: Access = toml::from_str("users = [\"no-such-user\"]").unwrap();
        assert!(access.policy(Quota::NONE).is_err());
    }
}
