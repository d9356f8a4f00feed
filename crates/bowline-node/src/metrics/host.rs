//! By which names of this host a client may ask for metrics.
//!
//! A web page may have a name of its own lead to an address of this host, after which a browser
//! takes what is served here for the page's own and lets it read that (DNS rebinding). The browser
//! sends the page's name, though, and a name that is not this host's is refused. An address is
//! nobody's name.

use std::net::{IpAddr, Ipv6Addr};

/// Parses a name that a host is known by.
pub fn name(text: &str) -> Result<String, String> {
    let is_part = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    if !text.is_empty() && text.chars().all(is_part) {
        return Ok(text.to_owned());
    }
    Err(format!(
        "\"{text}\" is not the name of a host: give it without a port, as node1.example.com"
    ))
}

/// Names of this host.
#[derive(Debug)]
pub(super) struct Hosts(Vec<String>);

impl Hosts {
    /// That which the system has, localhost, and these.
    pub(super) fn new(more: Vec<String>) -> Self {
        let system = rustix::system::uname().nodename().to_string_lossy().into_owned();
        Self([vec!["localhost".to_owned(), system], more].concat())
    }

    /// Tells whether the header `Host` of a request, a name or an address with or without a port,
    /// means this host.
    pub(super) fn include(&self, header: &[u8]) -> bool {
        let Ok(header) = str::from_utf8(header) else { return false };
        if let Some((address, port)) =
            header.strip_prefix('[').and_then(|rest| rest.split_once(']'))
        {
            return address.parse::<Ipv6Addr>().is_ok() && is_port(port);
        }
        let at = header.find(':').unwrap_or(header.len());
        let (host, port) = header.split_at(at);
        let host = host.strip_suffix('.').unwrap_or(host);
        let is_known = || {
            let known = self.0.iter().map(|name| name.strip_suffix('.').unwrap_or(name));
            !host.is_empty() && known.into_iter().any(|known| known.eq_ignore_ascii_case(host))
        };
        is_port(port) && (host.parse::<IpAddr>().is_ok() || is_known())
    }
}

/// What follows a host: nothing, or a colon and a port, which may be missing.
fn is_port(text: &str) -> bool {
    match text.strip_prefix(':') {
        Some(port) => port.is_empty() || port.parse::<u16>().is_ok(),
        None => text.is_empty(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_and_names_of_this_host_are_known() {
        let hosts = Hosts::new(vec!["Node1.example.com".to_owned()]);
        let own = rustix::system::uname().nodename().to_string_lossy().into_owned();
        for known in [
            "127.0.0.1",
            "127.0.0.1:9465",
            "192.0.2.7:80",
            "[::1]",
            "[fd00::1]:9465",
            "localhost",
            "LOCALHOST:9465",
            "localhost.:9465",
            "node1.EXAMPLE.com:9465",
            &own,
            &format!("{own}:9465"),
        ] {
            assert!(hosts.include(known.as_bytes()), "{known}");
        }
        for other in [
            "",
            ":9465",
            ".",
            "evil.example",
            "localhost.evil.example",
            "node1.example.com.evil.example",
            "node1",
            "example.com",
            "127.0.0.1.evil.example",
            "127.0.0.1:9465:1",
            "127.0.0.1:http",
            "[::1",
            "[::1]x",
            "[evil.example]",
            "localhost/",
            "a@localhost",
            "\u{e9}",
        ] {
            assert!(!hosts.include(other.as_bytes()), "{other}");
        }
        assert!(!hosts.include(b"local\xffhost"));
    }

    #[test]
    fn a_name_is_given_without_a_port() {
        assert_eq!(name("node1.example.com"), Ok("node1.example.com".to_owned()));
        for bad in ["", "*", "node1:9465", "http://node1", "a b", "[::1]"] {
            assert!(name(bad).is_err_and(|text| text.contains(bad)), "{bad}");
        }
    }
}
