//! Settings of a server: geometry, limits, and who may come.

use core::time::Duration;
use std::net::IpAddr;

use bowline_wire::rtrs::Geometry;

use crate::HbConfig;

/// Settings of a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerConfig {
    /// Chunks of a session, and their size [RT-16], [RS-29].
    pub geometry: Geometry,
    /// A client cannot reach a chunk while the server owns it [RT-65]. Holds for the devices that
    /// can refresh keys; on others it is off.
    pub always_invalidate: bool,
    /// Heartbeats.
    pub heartbeat: HbConfig,
    /// What clients can make the server hold.
    pub limits: ServerLimits,
    /// Who may come; empty: everybody.
    pub allow: Vec<AllowRule>,
    /// Least bytes of a user message: what the upper layer reads before it looks at the length
    /// [RT-67].
    pub usr_min: u16,
}

impl Default for ServerConfig {
    /// 512 chunks of 128 KiB, which the client cannot reach while the server owns them.
    fn default() -> Self {
        let geometry = Geometry::new(512, 126_976, 4096);
        Self {
            geometry: geometry.expect("9 bits of chunks and 17 of bytes are no more than 28"),
            always_invalidate: true,
            heartbeat: HbConfig::default(),
            limits: ServerLimits::default(),
            allow: Vec::new(),
            usr_min: 0,
        }
    }
}

impl ServerConfig {
    /// Bytes of the chunks of a session.
    pub fn session_bytes(&self) -> usize {
        usize::from(self.geometry.queue_depth()) * self.geometry.chunk() as usize
    }

    /// Sessions there may be: as many as have room in [`ServerLimits::memory`], and no more than
    /// [`ServerLimits::sessions`].
    pub fn sessions_max(&self) -> usize {
        self.limits.sessions.min(self.limits.memory / self.session_bytes())
    }
}

/// What clients can make a server hold [RT-66].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServerLimits {
    /// Bytes of the chunks of all sessions. Only what is used of them is really there, but each
    /// session may use all of its own.
    pub memory: usize,
    /// Sessions.
    pub sessions: usize,
    /// Sessions that were begun from one address.
    pub sessions_per_address: usize,
    /// Paths of a session.
    pub paths_per_session: usize,
    /// Connections of a path.
    pub connections_per_path: u16,
    /// Connections of all paths together, promised or made, those included whose end the client has
    /// not confirmed yet. What a device has no room for in its queues is refused besides [RT-28].
    pub connections: usize,
    /// The same of one address, so that none can take them all; as many as one path may have, or
    /// 128 paths with 32 each. A client of more than half of that which comes back from a crash is
    /// refused until the end of its former connections is noticed.
    pub connections_per_address: usize,
    /// Paths of which nothing has proved yet that the client is there. They count for none of the
    /// limits above, and the oldest makes room for the next.
    pub strangers: usize,
    /// Time from the first request of a path until its client has proved that.
    pub prove: Duration,
    /// Time from then on until the client knows the chunks.
    pub establish: Duration,
    /// Requests of a session that wait because their chunk is still in use by another path [RS-9].
    pub waiting: usize,
}

impl Default for ServerLimits {
    fn default() -> Self {
        Self {
            memory: 1 << 30,
            sessions: 1024,
            sessions_per_address: 256,
            paths_per_session: bowline_wire::rtrs::MAX_PATHS,
            connections_per_path: bowline_wire::rtrs::MAX_CONNECTIONS,
            connections: 16_384,
            connections_per_address: bowline_wire::rtrs::MAX_CONNECTIONS.into(),
            strangers: 256,
            prove: Duration::from_secs(10),
            establish: Duration::from_secs(30),
            waiting: 65_536,
        }
    }
}

/// Clients that may come [RT-64].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AllowRule {
    /// Their address, or the network it is in.
    pub addr: IpAddr,
    /// Leading bits of the address that count; more than it has: all.
    pub prefix: u8,
    /// What their session may be called, `*` standing for anything; `None`: as they like.
    pub name: Option<String>,
}

impl AllowRule {
    /// Tells whether the address is one of these.
    pub fn admits(&self, addr: IpAddr) -> bool {
        match (self.addr.to_canonical(), addr.to_canonical()) {
            (IpAddr::V4(own), IpAddr::V4(addr)) => {
                let shift = 32_u32.saturating_sub(self.prefix.into());
                (u32::from(own) ^ u32::from(addr)).checked_shr(shift).is_none_or(|bits| bits == 0)
            }
            (IpAddr::V6(own), IpAddr::V6(addr)) => {
                let shift = 128_u32.saturating_sub(self.prefix.into());
                (u128::from(own) ^ u128::from(addr)).checked_shr(shift).is_none_or(|bits| bits == 0)
            }
            _ => false,
        }
    }

    /// Tells whether the session of such a client may have this name.
    pub fn admits_name(&self, name: &str) -> bool {
        self.name.as_deref().is_none_or(|pattern| name_fits(pattern, name))
    }
}

/// Tells whether the name of a session fits a pattern, in which `*` stands for anything.
pub fn name_fits(pattern: &str, name: &str) -> bool {
    let Some((head, rest)) = pattern.split_once('*') else { return pattern == name };
    let Some(mut name) = name.strip_prefix(head) else { return false };
    let mut parts: Vec<&str> = rest.split('*').collect();
    let tail = parts.pop().unwrap_or_default();
    for part in parts {
        let Some(at) = name.find(part) else { return false };
        name = &name[at + part.len()..];
    }
    name.ends_with(tail)
}

#[cfg(test)]
mod tests {
    use super::*;

    // tests [RT-64]
    #[test]
    fn a_rule_admits_its_network_and_nobody_else() {
        let rule =
            |addr: &str, prefix| AllowRule { addr: addr.parse().unwrap(), prefix, name: None };
        let admits = |rule: &AllowRule, addr: &str| rule.admits(addr.parse().unwrap());
        let net = rule("10.1.2.0", 24);
        assert!(admits(&net, "10.1.2.255") && admits(&net, "::ffff:10.1.2.3"));
        assert!(!admits(&net, "10.1.3.0") && !admits(&net, "::1"));
        assert!(admits(&rule("10.1.2.3", 32), "10.1.2.3"));
        assert!(!admits(&rule("10.1.2.3", 200), "10.1.2.2"));
        assert!(admits(&rule("0.0.0.0", 0), "255.1.2.3"));
        assert!(admits(&rule("fd00::", 8), "fd99::1") && !admits(&rule("fd00::", 8), "fe80::1"));
        assert!(admits(&rule("::", 0), "fe80::1") && !admits(&rule("::", 0), "10.0.0.1"));
    }

    // tests [RT-64]
    #[test]
    fn a_star_stands_for_anything() {
        for (pattern, name) in
            [("a", "a"), ("*", ""), ("*", "x"), ("a*", "a"), ("a*c*e", "abcde"), ("*b*", "abc")]
        {
            assert!(name_fits(pattern, name), "{pattern} {name}");
        }
        for (pattern, name) in
            [("a", "ab"), ("a*", "ba"), ("*a", "ab"), ("a*b*c", "abbd"), ("", "a")]
        {
            assert!(!name_fits(pattern, name), "{pattern} {name}");
        }
        assert!(!name_fits("a*a", "a"), "one letter is not both ends");
    }
}
