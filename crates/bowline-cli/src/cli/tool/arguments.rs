//! Parsers of arguments: paths, servers, names of sessions, sizes.

use std::{
    fs,
    net::{IpAddr, Ipv6Addr},
};

use bowline_ctl::{Errno, PathSpec};
use bowline_node::values::{self, Address, Family};
use bowline_wire::rtrs::SessionName;

use super::{Refusal, format::Unit};

/// Most bytes of a session's name [RT-68].
const NAME_MAX: usize = 254;

/// Parses a path; a bare address gets its prefix.
pub(super) fn path_spec(text: &str) -> Result<PathSpec, Refusal> {
    path_order(text)?.parse().map_err(|errno| no_path(errno, text))
}

/// Returns a path as it is sent to a process: a bare address gets its prefix, and keeps its scope.
pub(super) fn path_order(text: &str) -> Result<String, Refusal> {
    // Mistakes are reported before anything is sent.
    path_text(text)?;
    Ok(prefixed(text))
}

/// Puts the prefix before bare addresses.
fn prefixed(text: &str) -> String {
    let one = |part: &str| {
        let address = part.split_once('%').map_or(part, |(address, _)| address);
        match address.parse::<IpAddr>() {
            Ok(_) => format!("ip:{part}"),
            Err(_) => part.to_owned(),
        }
    };
    match text.split_once(',').or_else(|| text.split_once('@')) {
        Some((src, dst)) => format!("{}@{}", one(src), one(dst)),
        None => one(text),
    }
}

/// Returns the canonical spelling of a path, as in its name: without scopes. Also of a path through
/// InfiniBand, which a kernel may have.
pub(super) fn path_text(text: &str) -> Result<String, Refusal> {
    let given = text;
    let text = &prefixed(text);
    // A destination with an interface implies a source, which is used if no other is given.
    let normal =
        |part: &str, alone: bool| match part.strip_prefix("gid:").map(str::parse::<Ipv6Addr>) {
            Some(Ok(gid)) => Ok(format!("gid:{gid}")),
            _ => part.parse::<PathSpec>().map(|path| {
                let src = path.src.filter(|_| alone);
                PathSpec { src, ..path }.to_string()
            }),
        };
    let whole = match text.split_once(',').or_else(|| text.split_once('@')) {
        Some((src, dst)) => {
            normal(src, false).and_then(|src| Ok(format!("{src}@{}", normal(dst, false)?)))
        }
        None => normal(text, true),
    };
    whole.map_err(|errno| no_path(errno, given))
}

/// Every mistake in a path has the error number that a kernel's tree gives for it [RS-34].
fn no_path(errno: Errno, text: &str) -> Refusal {
    let errno = if errno == Errno::ENODEV { errno } else { Errno::EINVAL };
    Refusal::new(errno, format!("\"{text}\" is not a path such as ip:10.0.0.1@ip:10.0.0.2"))
}

pub(super) fn address(server: &str) -> Result<Address, Refusal> {
    let bare = server.strip_prefix("ip:").unwrap_or(server);
    values::address(bare, Family::Any).map_err(|_| {
        Refusal::new(Errno::ENXIO, format!("{server} is neither a session nor a host; give a path"))
    })
}

/// Returns the addresses of a server from a session's name: a host, or an address with the dashes
/// that [`session_name`] puts in.
pub(super) fn addresses(server: &str) -> Result<Vec<IpAddr>, Refusal> {
    if server.is_empty() {
        return Err(Refusal::new(Errno::ENXIO, "it has no @"));
    }
    let with = |separator: &str| server.replace('-', separator).parse::<IpAddr>().ok();
    if let Some(address) = with(".").or_else(|| with(":")) {
        return Ok(vec![address]);
    }
    let found = std::net::ToSocketAddrs::to_socket_addrs(&(server, 0))
        .map_err(|error| Refusal::new(Errno::ENXIO, format!("cannot look up {server}: {error}")))?;
    let mut all: Vec<IpAddr> = found.map(|address| address.ip()).collect();
    all.sort();
    all.dedup();
    Ok(all)
}

/// Returns the default name of a session with a server. A server accepts one session of a name, and
/// cloned machines share their host name; so the source address of the first path is part of it.
/// Names of sessions have neither dots nor slashes, and 254 bytes at most [RS-24] [RT-68].
pub(crate) fn session_name(server: &str, from: Option<IpAddr>) -> String {
    let bare = server.strip_prefix("ip:").unwrap_or(server);
    // The interface has a meaning on this machine only.
    let bare = bare.split('%').next().unwrap_or(bare);
    let from = from.map(|from| format!("_{}", from.to_canonical())).unwrap_or_default();
    let name = format!("{}{from}@{bare}", own_name()).replace(['.', ':', '/'], "-");
    let ends = name.char_indices().map(|(at, c)| at + c.len_utf8());
    let end = ends.take_while(|end| *end <= NAME_MAX).last();
    name[..end.unwrap_or(0)].to_owned()
}

/// Refuses a text that cannot be the name of a session [RT-68], such as a server's address given
/// together with paths.
pub(crate) fn no_address(name: &str) -> Result<(), Refusal> {
    SessionName::new(name).map(drop).map_err(|error| {
        Refusal::usage(format!(
            "{error}: together with a path, give a session name instead of the server, without . and /, such as \
             {}@{}",
            own_name(),
            name.replace(['.', ':', '/'], "-")
        ))
    })
}

fn own_name() -> String {
    let name = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    name.trim().split('.').next().filter(|name| !name.is_empty()).unwrap_or("localhost").to_owned()
}

/// Returns a size in sectors, from a number of bytes or of a unit, which may follow without a
/// blank.
pub(super) fn sectors(size: &str, unit: &str) -> Result<u64, Refusal> {
    let bad = || Refusal::usage(format!("\"{size}{unit}\" is not a size such as 512M"));
    let end = size.find(|c: char| !c.is_ascii_digit()).unwrap_or(size.len());
    let (digits, glued) = size.split_at(end);
    let word = match (glued, unit) {
        ("", "") => "b",
        (word, "") | ("", word) => word,
        _ => return Err(bad()),
    };
    let unit = Unit::of(word).ok_or_else(bad)?;
    let number: u64 = digits.parse().map_err(|_| bad())?;
    let bytes = number.checked_mul(unit.bytes()).ok_or_else(bad)?;
    if !bytes.is_multiple_of(512) {
        let (below, above) = (bytes - bytes % 512, (bytes - bytes % 512).checked_add(512));
        let above = above.map(|above| format!(" and {above}")).unwrap_or_default();
        let text = format!(
            "{bytes} bytes are not a multiple of 512; the nearest sizes are {below}{above}"
        );
        return Err(Refusal::usage(text));
    }
    Ok(bytes / 512)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_bytes_or_have_a_unit() {
        // tests [NB-42]
        for (size, unit, number) in
            [("1024", "", 2), ("0", "", 0), ("2", "G", 4 << 20), ("1k", "", 2), ("3", "m", 6144)]
        {
            assert_eq!(sectors(size, unit), Ok(number));
        }
        for (size, unit) in
            [("", ""), ("k", ""), ("1k", "k"), ("1", "kb"), ("-1", ""), ("99999999", "E")]
        {
            assert_eq!(sectors(size, unit).map_err(|refusal| refusal.errno), Err(Errno::EINVAL));
        }
        for (size, nearest) in
            [("513B", "512 and 1024"), ("4294967297", "4294967296 and 4294967808")]
        {
            let refusal = sectors(size, "").unwrap_err();
            assert_eq!(refusal.errno, 22);
            assert!(refusal.to_string().ends_with(nearest), "{refusal}");
        }
    }

    #[test]
    fn paths_may_be_bare_addresses() {
        for text in ["10.0.0.1,10.0.0.2", "ip:10.0.0.1@10.0.0.2", "ip:10.0.0.1,ip:10.0.0.2"] {
            assert_eq!(path_spec(text).unwrap().to_string(), "ip:10.0.0.1@ip:10.0.0.2");
        }
        let scoped = "ip:fe80::2%eth0@ip:fe80::1%7";
        for text in ["fe80::2%eth0@fe80::1%7", "ip:fe80::2%eth0,fe80::1%7", scoped] {
            assert_eq!(prefixed(text), scoped);
        }
        let gid = "gid:fe80:0000:0000:0000:0000:0000:0000:0001@gid:FE80::2";
        assert_eq!(path_text(gid).unwrap(), "gid:fe80::1@gid:fe80::2");
        assert_eq!(path_spec(gid).unwrap_err().errno, 19);
        // tests [RS-34]: not EPROTONOSUPPORT, which parsing alone would give.
        assert_eq!(path_spec("x").unwrap_err().errno, 22);
        assert_eq!(path_spec("ip:x").unwrap_err().errno, 22);
    }

    #[test]
    fn servers_are_found_again_in_names_of_sessions() {
        for address in ["10.0.0.1", "fe80::1", "2001:db8::a:1"] {
            let name = session_name(address, Some(IpAddr::from([10, 0, 0, 7])));
            let server = name.split_once('@').unwrap().1;
            assert_eq!(addresses(server), Ok(vec![address.parse().unwrap()]), "{name}");
        }
        assert_eq!(addresses("").unwrap_err().errno, Errno::ENXIO);
    }

    #[test]
    fn machines_of_one_name_have_sessions_of_their_own() {
        // tests [RT-68] [NB-42]
        let name = |server: &str, from: &str| session_name(server, Some(from.parse().unwrap()));
        let host = own_name();
        assert_eq!(session_name("store", None), format!("{host}@store"));
        assert_eq!(name("ip:10.0.0.1", "10.0.0.7"), format!("{host}_10-0-0-7@10-0-0-1"));
        assert_ne!(name("store", "10.0.0.7"), name("store", "10.0.0.8"));
        assert_eq!(name("store", "::ffff:10.0.0.7"), name("store", "10.0.0.7"));
        let long = name(&"x".repeat(300), "fe80::1");
        assert!(SessionName::new(&long).is_ok() && long.starts_with(&format!("{host}_fe80--1@x")));
    }
}
