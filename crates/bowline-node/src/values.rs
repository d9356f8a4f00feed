//! Parsers of argument values that several commands share.

use std::{
    fmt,
    net::{IpAddr, SocketAddr, SocketAddrV6, ToSocketAddrs, UdpSocket},
    str::FromStr,
    time::Duration,
};

use bowline_verbs::Mtu;
use serde::{Deserialize, Deserializer, Serialize, de};

use crate::{Failure, Outcome};

/// Parses a whole number as the original tools do: decimal, `0x` hexadecimal, `0` octal, then an
/// optional k, m, g or t in steps of 1024; `KiB`, `MiB` and so on mean the same.
pub fn number(text: &str) -> Result<u64, String> {
    let lower = text.trim().to_ascii_lowercase();
    let (digits, radix) = match lower.strip_prefix("0x") {
        Some(rest) => (rest, 16),
        None if lower.len() > 1 && lower.starts_with('0') => (&lower[1..], 8),
        None => (lower.as_str(), 10),
    };
    let end = digits.find(|c: char| !c.is_digit(radix)).unwrap_or(digits.len());
    let (digits, suffix) = digits.split_at(end);
    let steps = match suffix.trim_start() {
        "" | "b" if radix != 16 => 0,
        "" => 0,
        "k" | "kb" | "kib" => 1,
        "m" | "mb" | "mib" => 2,
        "g" | "gb" | "gib" => 3,
        "t" | "tb" | "tib" => 4,
        _ => return Err(bad_number(text)),
    };
    // "0" and "0k" leave no digit after the octal prefix.
    let value = match digits {
        "" if radix == 8 => 0,
        "" => return Err(bad_number(text)),
        digits => u64::from_str_radix(digits, radix).map_err(|_| bad_number(text))?,
    };
    value.checked_mul(1 << (10 * steps)).ok_or_else(|| format!("{text} is too large"))
}

fn bad_number(text: &str) -> String {
    format!("\"{text}\" is not a number such as 512, 64k, 1m or 2GiB")
}

/// A number of bytes: `4096` or `"4KiB"`.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Size(
    /// The bytes.
    pub u64,
);

impl<'de> Deserialize<'de> for Size {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl de::Visitor<'_> for Visitor {
            type Value = Size;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a size such as 65536 or \"64KiB\"")
            }

            fn visit_i64<E: de::Error>(self, value: i64) -> Result<Size, E> {
                u64::try_from(value)
                    .map(Size)
                    .map_err(|_| E::invalid_value(de::Unexpected::Signed(value), &self))
            }

            fn visit_u64<E: de::Error>(self, value: u64) -> Result<Size, E> {
                Ok(Size(value))
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Size, E> {
                number(text).map(Size).map_err(E::custom)
            }
        }
        deserializer.deserialize_any(Visitor)
    }
}

/// Parses a [`number`] that must fit 32 bits.
pub fn number32(text: &str) -> Result<u32, String> {
    u32::try_from(number(text)?).map_err(|_| format!("{text} is too large"))
}

/// Parses a path MTU.
pub fn mtu(text: &str) -> Result<Mtu, String> {
    let bytes = number(text)?;
    let found = Mtu::ALL.into_iter().find(|mtu| mtu.bytes() as u64 == bytes);
    found.ok_or_else(|| format!("\"{text}\" is not 256, 512, 1024, 2048 or 4096"))
}

/// Parses a length of time: seconds with an optional fraction, or a number with `ms`, `msec`,
/// `us`, `usec` or `s`.
pub fn interval(text: &str) -> Result<Duration, String> {
    let bad = || format!("\"{text}\" is not a time such as 0.5, 20ms or 100us");
    let text = text.trim();
    let end = text.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(text.len());
    let (digits, unit) = text.split_at(end);
    let scale = match unit {
        "" | "s" | "sec" => 1.0,
        "ms" | "msec" => 1e-3,
        "us" | "usec" => 1e-6,
        _ => return Err(bad()),
    };
    let value: f64 = digits.trim().parse().map_err(|_| bad())?;
    if !(0.0..=1e9).contains(&value) {
        return Err(bad());
    }
    Ok(Duration::from_secs_f64(value * scale))
}

/// Parses a time above zero.
pub fn some_time(text: &str) -> Result<Duration, String> {
    match interval(text)? {
        Duration::ZERO => Err("the time must be greater than 0".to_owned()),
        time => Ok(time),
    }
}

/// An address, and for a link-local one its scope: the index of its interface, if given.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Ord, PartialEq, PartialOrd, Serialize)]
#[serde(try_from = "String", into = "String")]
pub struct Address {
    /// The address itself.
    pub ip: IpAddr,
    /// Index of the interface of a link-local one.
    pub link: Option<u32>,
}

impl Address {
    /// Returns the socket address with a port.
    pub fn at(self, port: u16) -> SocketAddr {
        match self.ip {
            IpAddr::V4(ip) => SocketAddr::from((ip, port)),
            IpAddr::V6(ip) => SocketAddrV6::new(ip, port, 0, self.link.unwrap_or(0)).into(),
        }
    }

    /// Tells whether `other`, which may lack its interface, can be this address.
    pub fn covers(self, other: Self) -> bool {
        self.ip == other.ip && (self.link == other.link || other.link.is_none())
    }
}

/// Parses an address, not a host name; the interface may be a name or a number.
impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.contains('%') {
            return scoped(text);
        }
        let ip = text.parse::<IpAddr>().map_err(|error| format!("\"{text}\": {error}"))?;
        Ok(ip.into())
    }
}

impl TryFrom<String> for Address {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<Address> for String {
    fn from(address: Address) -> Self {
        address.to_string()
    }
}

/// Parses a link-local address with its interface.
fn scoped(text: &str) -> Result<Address, String> {
    let (ip, interface) = text.split_once('%').unwrap_or((text, ""));
    let ip: IpAddr = ip.parse().map_err(|error| format!("\"{ip}\": {error}"))?;
    if !is_link_local(ip) {
        return Err(format!("{ip} is not link-local: leave out %{interface}"));
    }
    let found = (text, 0).to_socket_addrs().ok().and_then(|mut found| found.next());
    found
        .map(Address::from)
        .filter(|address| address.link.is_some())
        .ok_or_else(|| format!("{text}: there is no interface {interface}; see `ip link`"))
}

/// Parses a local address that a node is to serve.
pub fn own(text: &str) -> Result<Address, String> {
    let address: Address = text.parse()?;
    with_link(address)
}

/// Refuses a link-local address without its interface.
pub fn with_link(address: Address) -> Result<Address, String> {
    if is_link_local(address.ip) && address.link.is_none() {
        return Err(format!("{address} is link-local: name the interface, as in {address}%eth0"));
    }
    Ok(address)
}

/// Deserializes a list of local addresses.
pub fn own_list<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<Address>, D::Error> {
    let addresses = Vec::<Address>::deserialize(deserializer)?;
    addresses.into_iter().map(with_link).collect::<Result<_, _>>().map_err(de::Error::custom)
}

impl From<IpAddr> for Address {
    fn from(ip: IpAddr) -> Self {
        Self { ip, link: None }
    }
}

impl From<SocketAddr> for Address {
    fn from(at: SocketAddr) -> Self {
        let link = match at {
            SocketAddr::V6(at) if at.ip().is_unicast_link_local() => at.scope_id(),
            _ => 0,
        };
        Self { ip: at.ip(), link: (link != 0).then_some(link) }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.ip)?;
        self.link.map_or(Ok(()), |link| write!(f, "%{link}"))
    }
}

/// Parses an address, with a scope or without, or looks a host name up; the first answer of the
/// wanted family counts.
pub fn address(text: &str, family: Family) -> Outcome<Address> {
    let found: Vec<Address> = match text.parse::<IpAddr>() {
        Ok(ip) => vec![ip.into()],
        Err(_) => (text, 0)
            .to_socket_addrs()
            .map_err(|error| {
                Failure::failed(format!("cannot look up {text}: {error}; give an address"))
            })?
            .map(Address::from)
            .collect(),
    };
    found
        .into_iter()
        .find(|address| family.allows(address.ip))
        .ok_or_else(|| Failure::failed(format!("{text} has no {} address", family.name())))
}

/// Gives both addresses of a path the same interface, if only one has it.
pub fn joined(local: &mut Address, remote: &mut Address) -> Outcome {
    if let (Some(one), Some(other)) = (local.link, remote.link)
        && one != other
    {
        return Err(Failure::usage(format!("{local} and {remote} are on different links")));
    }
    let link = local.link.or(remote.link);
    for address in [local, remote] {
        if is_link_local(address.ip) {
            address.link = link;
        }
    }
    Ok(())
}

fn is_link_local(ip: IpAddr) -> bool {
    matches!(ip, IpAddr::V6(ip) if ip.is_unicast_link_local())
}

/// Which addresses a command accepts.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Family {
    /// IPv4 only, as the control protocol of rds-stress needs.
    V4,
    /// IPv6 only.
    V6,
    /// Either; the first answer counts.
    Any,
}

impl Family {
    fn allows(self, address: IpAddr) -> bool {
        match self {
            Self::V4 => address.is_ipv4(),
            Self::V6 => address.is_ipv6(),
            Self::Any => true,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::V4 => "IPv4",
            Self::V6 => "IPv6",
            Self::Any => "usable",
        }
    }
}

/// Returns the local address from which the routing table would reach `remote`. Sends nothing.
pub fn route_to(remote: impl Into<Address>) -> Outcome<Address> {
    let remote = remote.into();
    let any: IpAddr = match remote.ip {
        IpAddr::V4(_) => std::net::Ipv4Addr::UNSPECIFIED.into(),
        IpAddr::V6(_) => std::net::Ipv6Addr::UNSPECIFIED.into(),
    };
    let at = match remote.ip {
        IpAddr::V4(ip) => SocketAddr::from((ip, 1)),
        IpAddr::V6(ip) => SocketAddrV6::new(ip, 1, 0, remote.link.unwrap_or(0)).into(),
    };
    let local = UdpSocket::bind((any, 0))
        .and_then(|socket| socket.connect(at).and_then(|()| socket.local_addr()));
    match local {
        Ok(local) => Ok(local.into()),
        Err(_) if is_link_local(remote.ip) && remote.link.is_none() => {
            Err(Failure::failed(format!(
                "no route to {remote}, which is link-local: name the interface, as in {remote}%eth0, or the local \
                 address with -I"
            )))
        }
        Err(error) => Err(Failure::failed(format!(
            "no route to {remote}: {error}; give the local address with -I"
        ))),
    }
}

/// Parses an address and a port, `10.0.0.1:4000`, `[2001:db8::1]:4000` or `[fe80::1%eth0]:4000`.
pub fn endpoint(text: &str) -> Result<SocketAddr, String> {
    let inner = text.strip_prefix('[').and_then(|rest| rest.rsplit_once("]:"));
    if let Some((address, port)) = inner
        && address.contains('%')
        && let Ok(port) = port.parse()
    {
        return Ok(scoped(address)?.at(port));
    }
    text.parse().map_err(|_| format!("\"{text}\" is not ADDRESS:PORT such as 10.0.0.1:4000"))
}

/// Parses a local address and a port.
pub fn own_endpoint(text: &str) -> Result<SocketAddr, String> {
    let place = endpoint(text)?;
    with_link(place.into())?;
    Ok(place)
}

/// Parses an address with or without a port, `10.0.0.1`, `10.0.0.1:4000` or `[2001:db8::1]:4000`.
pub fn sender(text: &str) -> Result<(Address, Option<u16>), String> {
    if let Ok(ip) = text.parse::<IpAddr>() {
        return Ok((ip.into(), None));
    }
    if text.contains('%') && !text.starts_with('[') {
        return Ok((scoped(text)?, None));
    }
    let place =
        endpoint(text).map_err(|error| error.replace("ADDRESS:PORT", "ADDRESS or ADDRESS:PORT"))?;
    Ok((place.into(), Some(place.port())))
}

/// Gives the destination of a socket the interface of the socket's local address.
pub fn towards(local: SocketAddr, remote: SocketAddr) -> Outcome<SocketAddr> {
    let (mut own, mut to) = (Address::from(local), Address::from(remote));
    joined(&mut own, &mut to)?;
    with_link(to).map_err(Failure::usage)?;
    Ok(to.at(remote.port()))
}

/// Parses `NAME=VALUE` with a whole number.
pub fn setting(text: &str) -> Result<(String, i64), String> {
    let parts = text.split_once('=').and_then(|(name, value)| {
        let value = value.trim().parse().ok()?;
        Some((name.trim().to_owned(), value))
    });
    parts.ok_or_else(|| format!("\"{text}\" is not NAME=VALUE with a whole number"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_the_prefixes_and_suffixes_of_the_original_tools() {
        for (text, value) in [
            ("0", 0),
            ("0k", 0),
            ("17", 17),
            ("4k", 4096),
            ("1M", 1 << 20),
            ("2g", 2 << 30),
            ("0x10", 16),
            ("0x10k", 16 << 10),
            ("010", 8),
            ("64MiB", 64 << 20),
            ("1 GiB", 1 << 30),
        ] {
            assert_eq!(number(text), Ok(value), "{text}");
        }
        for text in ["", "k", "-1", "1x", "0x", "1.5", "99999999999999999999", "99999999999g"] {
            assert!(number(text).is_err(), "{text}");
        }
    }

    #[test]
    fn path_mtus_are_those_of_the_protocol() {
        assert_eq!(mtu("4k"), Ok(Mtu::M4096));
        assert!(mtu("1500").is_err());
    }

    #[test]
    fn some_time_is_longer_than_nothing() {
        assert_eq!(some_time("1ms"), Ok(Duration::from_millis(1)));
        for text in ["0", "0ms", "1e-12", "-1", "x"] {
            assert!(some_time(text).is_err(), "{text}");
        }
    }

    #[test]
    fn times_have_units() {
        assert_eq!(interval("1"), Ok(Duration::from_secs(1)));
        assert_eq!(interval("0.25"), Ok(Duration::from_millis(250)));
        assert_eq!(interval("20ms"), Ok(Duration::from_millis(20)));
        assert_eq!(interval("100usec"), Ok(Duration::from_micros(100)));
        for text in ["", "x", "-1", "1h", "nan", "inf"] {
            assert!(interval(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_sender_is_an_address_with_or_without_a_port() {
        let address = |text: &str| text.parse::<Address>().expect("an address");
        assert_eq!(sender("10.0.0.1"), Ok((address("10.0.0.1"), None)));
        assert_eq!(sender("10.0.0.1:7"), Ok((address("10.0.0.1"), Some(7))));
        assert_eq!(sender("fd00::1"), Ok((address("fd00::1"), None)));
        assert_eq!(sender("[fd00::1]:7"), Ok((address("fd00::1"), Some(7))));
        assert_eq!(sender("fe80::1%lo"), Ok((address("fe80::1%1"), None)));
        assert_eq!(sender("[fe80::1%lo]:7"), Ok((address("fe80::1%1"), Some(7))));
        for text in ["", "10.0.0.1:", "10.0.0.1:70000", "host"] {
            assert!(sender(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_host_must_have_the_family_asked_for() {
        assert!(address("127.0.0.1", Family::V6).is_err());
        assert_eq!(address("::1", Family::V6).ok(), "::1".parse().ok());
    }

    #[test]
    fn a_scope_stays_with_its_address() {
        let ip: IpAddr = "fe80::1".parse().unwrap();
        let of = |link| Address { ip, link };
        for text in ["fe80::1%lo", "fe80::1%1"] {
            assert_eq!(address(text, Family::Any).ok(), Some(of(Some(1))), "{text}");
            assert_eq!(text.parse(), Ok(of(Some(1))), "{text}");
            let place = endpoint(&format!("[{text}]:7")).unwrap();
            assert_eq!((Address::from(place), place.port()), (of(Some(1)), 7), "{text}");
        }
        for text in ["fe80::1%no-such-link", "fe80::1%", "fd00::1%lo", "10.0.0.1%lo", "fe80::1"] {
            assert!(own(text).is_err(), "{text}");
            assert!(own_endpoint(&format!("[{text}]:7")).is_err(), "{text}");
        }
        assert_eq!(of(Some(3)).to_string(), "fe80::1%3");
        let (mut local, mut remote) = (of(None), of(Some(2)));
        joined(&mut local, &mut remote).unwrap();
        assert_eq!((local, remote), (of(Some(2)), of(Some(2))));
        assert!(joined(&mut of(Some(2)), &mut of(Some(3))).is_err());
        let mut global = Address::from(IpAddr::from([10, 0, 0, 1]));
        joined(&mut global, &mut of(Some(2))).unwrap();
        assert_eq!(global.link, None);
        let place = |text: &str| text.parse::<SocketAddr>().unwrap();
        let to = |local, remote| towards(place(local), place(remote)).ok();
        assert_eq!(to("[fe80::1%2]:5", "[fe80::2]:6"), Some(place("[fe80::2%2]:6")));
        assert_eq!(to("[fe80::1%2]:5", "[fe80::2%3]:6"), None);
        assert_eq!(to("[fd00::1]:5", "[fe80::2%3]:6"), Some(place("[fe80::2%3]:6")));
        assert_eq!(to("[fd00::1]:5", "[fe80::2]:6"), None);
    }
}
