//! Names of sessions, and paths as people write them.

use std::{fs, net::IpAddr};

use bowline_ctl::{Errno, PathSpec};
use bowline_wire::rtrs::SessionName;

use super::Trouble;

/// Most bytes of a session's name [RT-68].
const NAME_MAX: usize = 254;

/// Parses a path such as `ip:10.0.0.1@ip:10.0.0.2`; a bare address gets its prefix.
pub fn path_spec(text: &str) -> Result<PathSpec, Trouble> {
    prefixed(text).parse().map_err(|errno| no_path(errno, text))
}

/// Puts the prefix before bare addresses.
pub fn prefixed(text: &str) -> String {
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

/// Every mistake in a path has the error number that a kernel's tree gives for it [RS-34].
pub fn no_path(errno: Errno, text: &str) -> Trouble {
    let errno = if errno == Errno::ENODEV { errno } else { Errno::EINVAL };
    Trouble::new(format!("\"{text}\" is not a path such as ip:10.0.0.1@ip:10.0.0.2"), errno)
}

/// Returns the default name of a session with a server. A server accepts one session of a name, and
/// cloned machines share their host name; so the source address of the first path is part of it.
/// Names of sessions have neither dots nor slashes, and 254 bytes at most [RS-24] [RT-68].
pub fn session_name(server: &str, from: Option<IpAddr>) -> String {
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
pub fn no_address(name: &str) -> Result<(), Trouble> {
    SessionName::new(name).map(drop).map_err(|error| {
        let text = format!(
            "{error}: together with a path, give a session name instead of the server, without . and /, such as \
             {}@{}",
            own_name(),
            name.replace(['.', ':', '/'], "-")
        );
        Trouble::new(text, Errno::EINVAL)
    })
}

fn own_name() -> String {
    let name = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    name.trim().split('.').next().filter(|name| !name.is_empty()).unwrap_or("localhost").to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

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
        assert_eq!(path_spec(gid).unwrap_err().errno, 19);
        // tests [RS-34]: not EPROTONOSUPPORT, which parsing alone would give.
        assert_eq!(path_spec("x").unwrap_err().errno, 22);
        assert_eq!(path_spec("ip:x").unwrap_err().errno, 22);
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
