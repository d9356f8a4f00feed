//! Address strings that name paths: `ip:10.0.0.1@ip:10.0.0.2` [RS-30] [RS-32].

use std::{
    fmt, fs,
    net::{IpAddr, Ipv6Addr},
    str::FromStr,
};

use crate::Errno;

/// File in which the kernel lists its IPv6 addresses.
const LINKS: &str = "/proc/net/if_inet6";

/// A path: destination, and source if given.
///
/// Parsing accepts `dst`, `src,dst` and `src@dst`; the first comma wins, else the first `@`
/// [RS-30]. An address is `ip:` with an IPv4 or IPv6 address; `gid:` is recognised, and names no
/// device, because RoCE serves no InfiniBand port space [RS-47]. A link-local address may be
/// followed by its interface, by name or number, as `ip:fe80::1%eth0`: without a source, the
/// link-local address of that interface is used, and both addresses must be of one interface.
/// `Display` is the name of the path's directory [RS-32], without the interface.
///
/// ```
/// let path: bowline_ctl::PathSpec = "ip:10.0.0.1,ip:10.0.0.2".parse().unwrap();
/// assert_eq!(path.to_string(), "ip:10.0.0.1@ip:10.0.0.2");
/// ```
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct PathSpec {
    /// Local address; `None`: chosen by the routing table.
    pub src: Option<IpAddr>,
    /// Address of the server.
    pub dst: IpAddr,
    /// Index of the interface of link-local addresses, if one was named.
    pub link: Option<u32>,
}

impl PathSpec {
    /// Returns the path between two addresses.
    pub fn new(src: Option<IpAddr>, dst: IpAddr) -> Self {
        Self { src, dst, link: None }
    }
}

impl FromStr for PathSpec {
    type Err = Errno;

    /// `EINVAL` for an invalid address, for an interface that does not exist, or for two different
    /// interfaces; `EPROTONOSUPPORT` for another prefix, `ENODEV` for a GID.
    fn from_str(text: &str) -> Result<Self, Errno> {
        match text.split_once(',').or_else(|| text.split_once('@')) {
            Some((src, dst)) => {
                let (src, dst) = (address(src)?, address(dst)?);
                let link = match (src.link, dst.link) {
                    (Some(one), Some(other)) if one != other => return Err(Errno::EINVAL),
                    (one, other) => one.or(other),
                };
                Ok(Self { src: Some(src.ip), dst: dst.ip, link })
            }
            None => address(text).map(|dst| Self { src: dst.own, dst: dst.ip, link: dst.link }),
        }
    }
}

/// An address, and the interface of its scope.
struct Scoped {
    ip: IpAddr,
    link: Option<u32>,
    /// Local link-local address of that interface.
    own: Option<IpAddr>,
}

fn address(text: &str) -> Result<Scoped, Errno> {
    if let Some(text) = text.strip_prefix("ip:") {
        let Some((address, scope)) = text.split_once('%') else {
            return text
                .parse()
                .map(|ip| Scoped { ip, link: None, own: None })
                .map_err(|_| Errno::EINVAL);
        };
        let address: Ipv6Addr = address.parse().map_err(|_| Errno::EINVAL)?;
        let links = fs::read_to_string(LINKS).unwrap_or_default();
        let own = own_address(&links, scope).filter(|_| address.is_unicast_link_local());
        let (link, own) = own.ok_or(Errno::EINVAL)?;
        Ok(Scoped { ip: address.into(), link: Some(link), own: Some(own.into()) })
    } else if let Some(text) = text.strip_prefix("gid:") {
        text.parse::<Ipv6Addr>().map_err(|_| Errno::EINVAL)?;
        Err(Errno::ENODEV)
    } else {
        Err(Errno::EPROTONOSUPPORT)
    }
}

/// Returns the number and the link-local address of an interface in the lines of [`LINKS`]:
/// address, number, length of the prefix, scope, flags, name; the numbers in hexadecimal.
fn own_address(links: &str, scope: &str) -> Option<(u32, Ipv6Addr)> {
    let number: Option<u32> = scope.parse().ok();
    links.lines().find_map(|line| {
        let mut words = line.split_ascii_whitespace();
        let address = Ipv6Addr::from_bits(u128::from_str_radix(words.next()?, 16).ok()?);
        let index = u32::from_str_radix(words.next()?, 16).ok()?;
        let is_meant = Some(index) == number || words.nth(3) == Some(scope);
        (is_meant && address.is_unicast_link_local()).then_some((index, address))
    })
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
    fn link_local_addresses_name_their_link() {
        // tests [RS-30]
        let links = "00000000000000000000000000000001 01 80 10 80       lo\n\
                     fd000000000000000000000000000002 04 40 00 82     eth0\n\
                     fe8000000000000000fc00fffe000001 04 40 20 80     eth0\n\
                     fe800000000000000000000000000009 0c 40 20 80     eth1\n";
        let own = |scope| own_address(links, scope).map(|(_, own)| own.to_string());
        assert_eq!(own("eth0").as_deref(), Some("fe80::fc:ff:fe00:1"));
        assert_eq!(own("12").as_deref(), Some("fe80::9"));
        assert_eq!((own("lo"), own("eth"), own("0c"), own("")), (None, None, None, None));
        for text in ["ip:fe80::1%no-such-link", "ip:fe80::1%", "ip:fd00::1%lo", "ip:1.2.3.4%lo"] {
            assert_eq!(parse(text), Err(Errno::EINVAL), "{text}");
        }
        let links = fs::read_to_string(LINKS).unwrap_or_default();
        let Some(name) = links.lines().find(|line| line.starts_with("fe80")) else {
            bowline_testkit::skipped::because("no link-local address here");
            return;
        };
        let name = name.split_ascii_whitespace().last().unwrap();
        let (link, own) = own_address(&links, name).unwrap();
        let of = |text: String| text.parse::<PathSpec>().map(|path| path.link);
        assert_eq!(of(format!("ip:fe80::5,ip:fe80::77%{name}")), Ok(Some(link)));
        assert_eq!(of(format!("ip:fe80::5%{name}@ip:fe80::77")), Ok(Some(link)));
        assert_eq!(of(format!("ip:fe80::5%{name}@ip:fe80::77%{link}")), Ok(Some(link)));
        let to = format!("ip:fe80::77%{name}");
        assert_eq!(parse(&to), Ok(format!("ip:{own}@ip:fe80::77")));
        assert_eq!(parse(&format!("ip:fe80::5,{to}")).as_deref(), Ok("ip:fe80::5@ip:fe80::77"));
    }

    #[test]
    fn other_texts_are_refused_as_the_kernel_does() {
        // tests [RS-30] [RS-47]
        assert_eq!(parse("tcp:10.0.0.1"), Err(Errno::EPROTONOSUPPORT));
        assert_eq!(parse("10.0.0.1"), Err(Errno::EPROTONOSUPPORT));
        assert_eq!(parse("gid:0000:0000:0000:0000:0000:ffff:0a63:0001"), Err(Errno::ENODEV));
        assert_eq!(parse(""), Err(Errno::EPROTONOSUPPORT));
        for text in ["ip:", "ip:10.0.0", "ip:10.0.0.1:99", "gid:x", "ip:1.2.3.4@ip:"] {
            assert_eq!(parse(text), Err(Errno::EINVAL), "{text}");
        }
        // A comma before the first @ divides.
        assert_eq!(parse("ip:1.2.3.4@x,ip:1.2.3.4"), Err(Errno::EINVAL));
    }
}
