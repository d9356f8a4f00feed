//! Address strings that name paths: `ip:10.0.0.1@ip:10.0.0.2` [RS-30] [RS-32].

use std::{
    fmt,
    net::{IpAddr, Ipv6Addr},
    str::FromStr,
};

use crate::{
    Errno,
    errno::{EINVAL, ENODEV, EPROTONOSUPPORT},
};

/// A path: where it goes, and where from when that is said.
///
/// Parsing takes `dst`, `src,dst` and `src@dst`; the first comma wins, else the first `@`
/// [RS-30]. An address is `ip:` with an IPv4 or IPv6 address; `gid:` is understood, and leads to
/// no device, because RoCE serves no InfiniBand port space [RS-47]. `Display` is the name of the
/// path's directory [RS-32].
///
/// ```
/// let path: bowline_ctl::PathSpec = "ip:10.0.0.1,ip:10.0.0.2".parse().unwrap();
/// assert_eq!(path.to_string(), "ip:10.0.0.1@ip:10.0.0.2");
/// ```
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct PathSpec {
    /// Local address, or whatever the routing table says.
    pub src: Option<IpAddr>,
    /// Address of the server.
    pub dst: IpAddr,
}

impl FromStr for PathSpec {
    type Err = Errno;

    /// `EINVAL` for what is no address, `EPROTONOSUPPORT` for another prefix, `ENODEV` for a GID.
    fn from_str(text: &str) -> Result<Self, Errno> {
        match text.split_once(',').or_else(|| text.split_once('@')) {
            Some((src, dst)) => Ok(Self { src: Some(address(src)?), dst: address(dst)? }),
            None => Ok(Self { src: None, dst: address(text)? }),
        }
    }
}

fn address(text: &str) -> Result<IpAddr, Errno> {
    if let Some(text) = text.strip_prefix("ip:") {
        // An address with a scope (fe80::1%eth0) belongs to one link; devices here have none.
        text.parse().map_err(|_| EINVAL)
    } else if let Some(text) = text.strip_prefix("gid:") {
        text.parse::<Ipv6Addr>().map_err(|_| EINVAL)?;
        Err(ENODEV)
    } else {
        Err(EPROTONOSUPPORT)
    }
}

/// Returns an address as the tree prints it, with its prefix [RS-32].
pub fn address_text(address: IpAddr) -> String {
    format!("ip:{}", address.to_canonical())
}

impl fmt::Display for PathSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(src) = self.src {
            write!(f, "{}@", address_text(src))?;
        }
        f.write_str(&address_text(self.dst))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<String, Errno> {
        text.parse::<PathSpec>().map(|path| path.to_string())
    }

    #[test]
    fn paths_have_one_or_two_addresses() {
        // tests [RS-30] [RS-32]
        for (text, name) in [
            ("ip:10.99.0.1", "ip:10.99.0.1"),
            ("ip:10.99.0.2@ip:10.99.0.1", "ip:10.99.0.2@ip:10.99.0.1"),
            ("ip:10.99.0.2,ip:10.99.0.1", "ip:10.99.0.2@ip:10.99.0.1"),
            ("ip:FD00:0:0::2@ip:fd00::1", "ip:fd00::2@ip:fd00::1"),
            ("ip:::1", "ip:::1"),
        ] {
            assert_eq!(parse(text).as_deref(), Ok(name), "{text}");
        }
    }

    #[test]
    fn other_texts_are_refused_as_the_kernel_does() {
        // tests [RS-30] [RS-47]
        assert_eq!(parse("tcp:10.0.0.1"), Err(EPROTONOSUPPORT));
        assert_eq!(parse("10.0.0.1"), Err(EPROTONOSUPPORT));
        assert_eq!(parse("gid:0000:0000:0000:0000:0000:ffff:0a63:0001"), Err(ENODEV));
        assert_eq!(parse(""), Err(EPROTONOSUPPORT));
        for text in ["ip:", "ip:10.0.0", "ip:10.0.0.1:99", "gid:x", "ip:1.2.3.4@ip:"] {
            assert_eq!(parse(text), Err(EINVAL), "{text}");
        }
        // A comma before the first @ divides.
        assert_eq!(parse("ip:1.2.3.4@x,ip:1.2.3.4"), Err(EINVAL));
    }
}
