//! Settings of a server: geometry, limits, and allowed clients.

use core::time::Duration;
use std::net::IpAddr;

use bowline_wire::rtrs::Geometry;

use crate::HbConfig;

/// Settings of a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerConfig {
    /// Chunks of a session, and their size [RT-16], [RS-29].
    pub geometry: Geometry,
    /// Clients cannot reach a chunk while the server owns it [RT-65]. Applies to devices that can
    /// refresh keys; on others it is off.
    pub always_invalidate: bool,
    /// Heartbeats.
    pub heartbeat: HbConfig,
    /// Limits on the resources that clients can use.
    pub limits: ServerLimits,
    /// Allowed clients; empty: all.
    pub allow: Vec<AllowRule>,
    /// Least bytes of a user message: what the upper layer reads before it checks the length
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

    /// Most sessions: as many as fit in [`ServerLimits::memory`], but at most
    /// [`ServerLimits::sessions`].
    pub fn sessions_max(&self) -> usize {
        self.limits.sessions.min(self.limits.memory / self.session_bytes())
    }
}

/// Limits on the resources that clients can use [RT-66].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServerLimits {
    /// Bytes of the chunks of all sessions. The system provides memory only for chunks that are
    /// used, but each session may use all of its own.
    pub memory: usize,
    /// Sessions.
    pub sessions: usize,
    /// Sessions begun from one address.
    pub sessions_per_address: usize,
    /// Paths of a session.
    pub paths_per_session: usize,
    /// Connections of a path.
    pub connections_per_path: u16,
    /// Connections of all paths together, including requested ones and those whose end the client
    /// has not confirmed yet. A connection for which a device has no queue space is refused too
    /// [RT-28].
    pub connections: usize,
    /// Connections of one address, so that no client can take them all; by default as many as one
    /// path may have, or 128 paths with 32 each. A client with more than half of these that comes
    /// back after a crash is refused until the end of its former connections is noticed.
    pub connections_per_address: usize,
    /// Paths whose client is not proven to exist. They do not count for the limits above, and the
    /// oldest makes room for the next.
    pub strangers: usize,
    /// Time from the first request of a path until its client must be proven to exist.
    pub prove: Duration,
    /// Time from then on until the client must know the chunks.
    pub establish: Duration,
    /// Waiting requests of a session, whose chunks are still used by another path [RS-9].
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

/// A rule that allows clients [RT-64].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AllowRule {
    /// The client's address, or that of its network.
    pub addr: IpAddr,
    /// Number of leading bits of the address that must match; larger than the address: all.
    pub prefix: u8,
    /// Pattern for the names of the client's sessions, `*` matching anything; `None`: any name.
    pub name: Option<String>,
}

impl AllowRule {
    /// Whether the rule allows the address.
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

    /// Whether the rule allows this session name.
    pub fn admits_name(&self, name: &str) -> bool {
        self.name.as_deref().is_none_or(|pattern| name_fits(pattern, name))
    }
}

/// Whether a session name matches a pattern, in which `*` matches anything.
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

    /// The figures of SECURITY.md.
    #[test]
    fn the_usual_limits_of_a_server_are_those_that_are_told() {
        let config = ServerConfig::default();
        let limits = config.limits;
        assert_eq!((limits.sessions, limits.sessions_per_address), (1024, 256));
        assert_eq!((limits.connections, limits.connections_per_address), (16_384, 4096));
        assert_eq!((limits.paths_per_session, limits.strangers), (128, 256));
        assert_eq!((limits.prove.as_secs(), limits.establish.as_secs()), (10, 30));
        assert_eq!((config.session_bytes(), limits.memory), (64 << 20, 1 << 30));
        assert_eq!(config.sessions_max(), 16);
    }

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
