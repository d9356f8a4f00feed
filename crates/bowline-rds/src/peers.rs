//! Which peers a node talks to.

use std::net::IpAddr;

pub use ipnet::IpNet;

/// Networks whose addresses may be peers. The list is fixed when the node is made; an empty one
/// permits everybody.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PeerList {
    /// Networks that are permitted; none stands for all.
    pub allow: Vec<IpNet>,
    /// Networks that are not, also if they are in `allow`.
    pub deny: Vec<IpNet>,
}

impl PeerList {
    /// Tells whether an address may be a peer. An IPv4-mapped address counts as the IPv4 address.
    pub fn permits(&self, peer: IpAddr) -> bool {
        let peer = peer.to_canonical();
        let within = |networks: &[IpNet]| networks.iter().any(|network| network.contains(&peer));
        !within(&self.deny) && (self.allow.is_empty() || within(&self.allow))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // tests
    #[test]
    fn deny_wins_and_an_empty_list_permits_everybody() {
        let networks = |all: &[&str]| all.iter().map(|n| n.parse().unwrap()).collect();
        let list = |allow: &[&str], deny: &[&str]| PeerList {
            allow: networks(allow),
            deny: networks(deny),
        };
        let permits = |list: &PeerList, peer: &str| list.permits(peer.parse().unwrap());
        assert!(permits(&PeerList::default(), "10.0.0.1") && permits(&list(&[], &[]), "fd00::1"));
        let some = list(&["10.0.0.0/8", "fd00::/16"], &["10.1.0.0/16"]);
        for (peer, may) in [
            ("10.0.0.1", true),
            ("10.1.0.1", false),
            ("11.0.0.1", false),
            ("fd00::7", true),
            ("fd01::7", false),
            ("::ffff:10.0.0.1", true),
            ("::ffff:10.1.0.1", false),
        ] {
            assert_eq!(permits(&some, peer), may, "{peer}");
        }
        assert!(permits(&list(&[], &["0.0.0.0/0"]), "fd00::1"), "only IPv4 is denied");
    }
}
