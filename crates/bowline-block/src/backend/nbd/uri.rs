//! Addresses of NBD servers, as other NBD tools have them.
//!
//! ```text
//!   nbd://host[:port]/export              nbd+unix:///export?socket=/path
//! ```

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

/// The port that IANA has assigned.
const PORT: u16 = 10_809;
/// Longest name of an export in bytes.
const NAME_MAX: usize = 4096;

/// The address of an export of an NBD server.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct NbdUri {
    pub(super) server: Server,
    export: String,
    text: String,
}

/// Where the server listens.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) enum Server {
    Tcp { host: String, port: u16 },
    Unix(PathBuf),
}

impl NbdUri {
    /// Returns the name of the export, which may be empty: the server's default one.
    pub fn export(&self) -> &str {
        &self.export
    }
}

impl fmt::Display for NbdUri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl FromStr for NbdUri {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (scheme, rest) = text.split_once("://").ok_or_else(|| {
            format!("\"{text}\" is not nbd://HOST[:PORT]/NAME or nbd+unix:///NAME?socket=PATH")
        })?;
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        let export = decoded(path)?;
        if export.len() > NAME_MAX {
            return Err(format!("the export's name is longer than {NAME_MAX} bytes"));
        }
        let server = match scheme {
            "nbd" if query.is_empty() => tcp(authority)?,
            "nbd" => return Err(format!("?{query}: there are no options of nbd://")),
            "nbd+unix" if authority.is_empty() => unix(query)?,
            "nbd+unix" => {
                return Err(format!("nbd+unix://{authority}: a third slash is missing"));
            }
            "nbds" | "nbds+unix" => return Err("NBD over TLS is not supported".to_owned()),
            other => return Err(format!("{other}: is not a kind of NBD server known here")),
        };
        Ok(Self { server, export, text: text.to_owned() })
    }
}

fn tcp(authority: &str) -> Result<Server, String> {
    if authority.contains('@') {
        return Err(format!("{authority}: NBD without TLS knows no users"));
    }
    // An IPv6 address has colons, and brackets around it.
    let (host, port) = match authority.strip_prefix('[') {
        Some(rest) => {
            let (host, port) = rest
                .split_once(']')
                .ok_or_else(|| format!("{authority}: the bracket is not closed"))?;
            (host, port.strip_prefix(':'))
        }
        None => {
            authority.split_once(':').map_or((authority, None), |(host, port)| (host, Some(port)))
        }
    };
    if host.is_empty() {
        return Err("nbd:// without a host".to_owned());
    }
    let port = port.map_or(Ok(PORT), str::parse);
    let port = port.ok().filter(|port| *port > 0).ok_or_else(|| format!("{authority}: no port"))?;
    Ok(Server::Tcp { host: decoded(host)?, port })
}

fn unix(query: &str) -> Result<Server, String> {
    let mut socket = None;
    for option in query.split('&').filter(|option| !option.is_empty()) {
        match option.split_once('=') {
            Some(("socket", path)) => socket = Some(decoded(path)?),
            _ => return Err(format!("?{option}: the only option of nbd+unix:// is socket=PATH")),
        }
    }
    let socket = socket.filter(|path| !path.is_empty());
    socket
        .map(|path| Server::Unix(path.into()))
        .ok_or_else(|| "nbd+unix:// without ?socket=PATH".to_owned())
}

/// Replaces each `%` and two digits by the byte of this number.
fn decoded(text: &str) -> Result<String, String> {
    let mut out = Vec::with_capacity(text.len());
    let mut bytes = text.bytes();
    while let Some(byte) = bytes.next() {
        if byte != b'%' {
            out.push(byte);
            continue;
        }
        let digits = [bytes.next(), bytes.next()];
        let digit = |byte: Option<u8>| char::from(byte?).to_digit(16);
        let number = digit(digits[0]).zip(digit(digits[1])).map(|(high, low)| high * 16 + low);
        let number = number.and_then(|number| u8::try_from(number).ok()).filter(|n| *n != 0);
        out.push(number.ok_or_else(|| format!("{text}: a % without the number of a byte"))?);
    }
    String::from_utf8(out).map_err(|_| format!("{text}: is not UTF-8"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_those_of_other_tools() {
        let parsed = |text: &str| {
            let uri: NbdUri = text.parse().unwrap();
            assert_eq!(uri.to_string(), text);
            (uri.server, uri.export)
        };
        let tcp = |host: &str, port| Server::Tcp { host: host.to_owned(), port };
        let unix = |path: &str| Server::Unix(path.into());
        for (text, server, export) in [
            ("nbd://host", tcp("host", 10_809), ""),
            ("nbd://host:1/a/b", tcp("host", 1), "a/b"),
            ("nbd://[::1]:2/a%20b", tcp("::1", 2), "a b"),
            ("nbd://[fe80::1%25eth0]/", tcp("fe80::1%eth0", 10_809), ""),
            ("nbd+unix:///?socket=/run/a", unix("/run/a"), ""),
            ("nbd+unix:///disk?socket=/run/a%26b", unix("/run/a&b"), "disk"),
        ] {
            assert_eq!(parsed(text), (server, export.to_owned()), "{text}");
        }
        for (text, wanted) in [
            ("/run/a", "is not nbd://"),
            ("nbds://host/", "TLS"),
            ("http://host/", "http"),
            ("nbd:///a", "without a host"),
            ("nbd://host:0/", "no port"),
            ("nbd://host:x/", "no port"),
            ("nbd://[::1/", "bracket"),
            ("nbd://me@host/", "users"),
            ("nbd://host/?tls=1", "no options"),
            ("nbd+unix:///a", "without ?socket"),
            ("nbd+unix:///a?socket=", "without ?socket"),
            ("nbd+unix:///a?socket=/x&y=z", "only option"),
            ("nbd+unix://host/a?socket=/x", "third slash"),
            ("nbd://host/%2", "a %"),
            ("nbd://host/%00", "a %"),
            ("nbd://host/%ff", "UTF-8"),
        ] {
            let error = text.parse::<NbdUri>().unwrap_err();
            assert!(error.contains(wanted), "{text}: {error}");
        }
        let long = format!("nbd://host/{}", "a".repeat(NAME_MAX + 1));
        assert!(long.parse::<NbdUri>().unwrap_err().contains("4096"));
    }
}
