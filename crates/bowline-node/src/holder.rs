//! Which process has a port of this machine: that of a soft RDMA device, or that of a node's RDS.

use std::{
    fs,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    path::Path,
};

use crate::{log::shown, rdma_device::PORT};

/// A process that has bound the port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// Its number.
    pub pid: u32,
    /// The name of its program, as the system shows it.
    pub name: String,
}

/// Tables of the system, by protocol, and what a socket that holds a port has as its state in them.
struct Tables {
    names: [&'static str; 2],
    state: Option<&'static str>,
}

const UDP: Tables = Tables { names: ["/proc/net/udp", "/proc/net/udp6"], state: None };
/// Those that listen.
const TCP: Tables = Tables { names: ["/proc/net/tcp", "/proc/net/tcp6"], state: Some("0A") };

/// The process that has bound RoCE's UDP port of an address, if this user may see it.
pub fn holder(address: IpAddr) -> Option<Holder> {
    owner_among(&UDP.inodes(address, PORT))
}

/// The process that listens at a TCP port of an address, if this user may see it.
pub fn listener(address: IpAddr, port: u16) -> Option<Holder> {
    owner_among(&TCP.inodes(address, port))
}

/// Tells whether a process has bound RoCE's UDP port of an address. Nothing is bound for the
/// answer, so that it disturbs nobody who is about to.
pub fn is_held(address: IpAddr) -> bool {
    !UDP.inodes(address, PORT).is_empty()
}

impl Tables {
    /// Sockets that hold a port of an address.
    fn inodes(&self, address: IpAddr, port: u16) -> Vec<u64> {
        let tables = self.names.map(fs::read_to_string).into_iter().flatten();
        tables.flat_map(|table| holding(&table, (address, port), self.state)).collect()
    }
}

fn owner_among(inodes: &[u64]) -> Option<Holder> {
    if inodes.is_empty() {
        return None;
    }
    let processes = fs::read_dir("/proc").ok()?.flatten();
    processes.filter_map(|process| owner(&process.path(), inodes)).next()
}

/// Tells whether a process, given by its folder in /proc, has one of these sockets open.
fn owner(process: &Path, inodes: &[u64]) -> Option<Holder> {
    let pid = process.file_name()?.to_str()?.parse().ok()?;
    let mut files = fs::read_dir(process.join("fd")).ok()?.flatten();
    files.find(|file| {
        let target = fs::read_link(file.path()).unwrap_or_default();
        let inode = target.to_str().and_then(|text| text.strip_prefix("socket:["));
        let inode = inode.and_then(|text| text.strip_suffix(']')).and_then(|n| n.parse().ok());
        inode.is_some_and(|inode| inodes.contains(&inode))
    })?;
    let name = fs::read_to_string(process.join("comm")).unwrap_or_default();
    Some(Holder { pid, name: shown(name.trim()).into_owned() })
}

/// Sockets of a table of the system that hold a port of an address, or of all addresses.
fn holding(table: &str, (address, port): (IpAddr, u16), state: Option<&str>) -> Vec<u64> {
    let line = |line: &str| {
        let mut words = line.split_whitespace().skip(1);
        let (at, of) = words.next()?.split_once(':')?;
        let is_so = state.is_none_or(|state| words.clone().nth(1) == Some(state));
        let inode = words.nth(7)?.parse().ok()?;
        let at = unhex(at)?;
        // That of IPv6 may stand for all of both families.
        let all = at.is_unspecified() && (at.is_ipv6() || address.is_ipv4());
        let same = at == address || all;
        (same && is_so && u16::from_str_radix(of, 16) == Ok(port)).then_some(inode)
    };
    table.lines().filter_map(line).collect()
}

/// Reads an address of the tables: words of 32 bits in this machine's order.
fn unhex(text: &str) -> Option<IpAddr> {
    let word = |n: usize| {
        let word = u32::from_str_radix(text.get(n * 8..n * 8 + 8)?, 16).ok()?;
        Some(word.to_ne_bytes())
    };
    match text.len() {
        8 => Some(Ipv4Addr::from(word(0)?).into()),
        32 => {
            let mut bytes = [0; 16];
            for (n, to) in bytes.chunks_mut(4).enumerate() {
                to.copy_from_slice(&word(n)?);
            }
            Some(Ipv6Addr::from(bytes).into())
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, UdpSocket};

    use super::*;

    #[test]
    fn the_holder_of_a_port_is_found() {
        let socket = UdpSocket::bind(("127.41.90.1", PORT)).unwrap();
        let me = holder("127.41.90.1".parse().unwrap()).unwrap();
        assert_eq!(me.pid, std::process::id());
        assert!(!me.name.is_empty());
        assert_eq!(holder("127.41.90.2".parse().unwrap()), None);
        let [one, two] = ["127.41.90.1", "127.41.90.2"].map(|at| is_held(at.parse().unwrap()));
        assert_eq!((one, two), (true, false));
        drop(socket);
        assert_eq!(holder("127.41.90.1".parse().unwrap()), None);
    }

    #[test]
    fn who_listens_is_found_and_who_is_connected_is_not() {
        let at = "127.41.90.3".parse().unwrap();
        let socket = TcpListener::bind((at, 0)).unwrap();
        let port = socket.local_addr().unwrap().port();
        assert_eq!(listener(at, port).unwrap().pid, std::process::id());
        assert_eq!(listener("127.41.90.4".parse().unwrap(), port), None);
        let stream = std::net::TcpStream::connect((at, port)).unwrap();
        drop(socket);
        assert_eq!(listener(at, port), None);
        drop(stream);
    }

    #[test]
    #[cfg(target_endian = "little")]
    fn the_tables_of_the_system_are_read() {
        let udp = |table: &str, address| holding(table, (address, PORT), None);
        let table = "   sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode ref pointer drops
  123: 0100007F:12B7 00000000:0000 07 00000000:00000000 00:00000000 00000000     0        0 4711 2 0 0
  124: 00000000:12B7 00000000:0000 07 00000000:00000000 00:00000000 00000000     0        0 4712 2 0 0
  125: 0100007F:12B8 00000000:0000 07 00000000:00000000 00:00000000 00000000     0        0 4713 2 0 0
";
        assert_eq!(udp(table, Ipv4Addr::LOCALHOST.into()), [4711, 4712]);
        assert_eq!(udp(table, Ipv4Addr::new(10, 0, 0, 1).into()), [4712]);
        assert!(udp(table, "fd99::1".parse().unwrap()).is_empty(), "another family");
        let table = "1: 000099FD000000000000000001000000:12B7 0:0 07 0:0 0:0 0 0 0 4714 2 0 0";
        assert_eq!(udp(table, "fd99::1".parse().unwrap()), [4714]);
        assert!(udp("1: 01:12B7", Ipv4Addr::LOCALHOST.into()).is_empty());
    }
}
