//! Parsers of arguments: paths, servers, names of sessions, sizes.

use std::net::{IpAddr, Ipv6Addr};

use bowline_ctl::{Errno, PathSpec};
use bowline_node::{
    disks::{no_path, prefixed},
    values::{self, Address, Family},
};

use super::{Refusal, format::Unit};

/// Returns a path as it is sent to a process: a bare address gets its prefix, and keeps its scope.
pub(super) fn path_order(text: &str) -> Result<String, Refusal> {
    // Mistakes are reported before anything is sent.
    path_text(text)?;
    Ok(prefixed(text))
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
    whole.map_err(|errno| no_path(errno, given).into())
}

pub(super) fn address(server: &str) -> Result<Address, Refusal> {
    let bare = server.strip_prefix("ip:").unwrap_or(server);
    values::address(bare, Family::Any).map_err(|_| {
        Refusal::new(Errno::ENXIO, format!("{server} is neither a session nor a host; give a path"))
    })
}

/// Returns the addresses of a server from a session's name: a host, or an address with the dashes
/// that `bowline_node::disks::session_name` puts in.
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
    use bowline_node::disks::session_name;

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
    fn paths_through_infiniband_have_a_canonical_spelling() {
        let gid = "gid:fe80:0000:0000:0000:0000:0000:0000:0001@gid:FE80::2";
        assert_eq!(path_text(gid).unwrap(), "gid:fe80::1@gid:fe80::2");
        assert_eq!(path_text("x").unwrap_err().errno, 22);
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
}
