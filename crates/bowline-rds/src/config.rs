//! Configuration: settings fixed at the creation of a node, and those that change while it runs.

use std::net::{IpAddr, Ipv6Addr};

use crate::error::Error;
use crate::peers::PeerList;

/// Settings of a node, fixed at its creation.
#[derive(Clone, Debug)]
pub struct Config {
    /// Addresses of the node. If empty, the driver names them by
    /// [`Node::add_local`](crate::Node::add_local).
    pub addrs: Vec<IpAddr>,
    /// Interface number of each link-local address of `addrs`. Such an address is bound on its
    /// interface only, and the interface is the scope of destinations given without one.
    pub links: Vec<(Ipv6Addr, u32)>,
    /// Paths to announce, 8 or 1.
    pub paths: u8,
    /// Whether to acknowledge end to end with peers that support it.
    pub end_to_end: bool,
    /// Generation of this process: the same for all peers, a different number at every
    /// start of the node, and not zero.
    pub generation: u32,
    /// Sequence number of the first message of every path.
    pub first_sequence: u64,
    /// Seed of every random choice.
    pub seed: u64,
    /// Effective send buffer of a new socket, bytes.
    pub send_buffer: usize,
    /// Effective receive buffer of a new socket, bytes.
    pub recv_buffer: usize,
    /// Longest message sent or taken, bytes. Above 1 MiB only between bowline nodes.
    pub max_message: u32,
    /// Settings that can change.
    pub sysctl: Sysctl,
    /// Limits of memory and of numbers of objects.
    pub limits: Limits,
    /// Peers that may connect and that are connected to.
    pub peers: PeerList,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            addrs: Vec::new(),
            links: Vec::new(),
            paths: 8,
            end_to_end: true,
            generation: 1,
            first_sequence: 1,
            seed: 1,
            send_buffer: 106_496,
            recv_buffer: 106_496,
            max_message: MAX_MESSAGE_KERNEL,
            sysctl: Sysctl::default(),
            limits: Limits::default(),
            peers: PeerList::default(),
        }
    }
}

/// Longest message of a kernel, bytes.
#[doc(alias = "RDS_MAX_MSG_SIZE")]
pub const MAX_MESSAGE_KERNEL: u32 = 1 << 20;
/// Smallest effective send buffer, bytes.
pub const SEND_BUFFER_MIN: usize = 2304;
/// Smallest effective receive buffer, bytes.
pub const RECV_BUFFER_MIN: usize = 1152;

/// Limits that keep a hostile peer or program from exhausting the node's memory.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Number of sockets.
    pub sockets: usize,
    /// Number of peers (address pairs); idle peers are forgotten to make room.
    pub peers: usize,
    /// Number of peers that have connected but have never sent a whole message.
    pub peers_unproven: usize,
    /// Number of TCP connections that one peer may hold open in addition to those of its paths.
    pub links_extra_per_peer: usize,
    /// Number of messages that a socket may have queued or unacknowledged, empty ones included
    /// [B-21].
    pub send_messages_per_socket: usize,
    /// Bytes of queued and unacknowledged messages of all sockets, where each message counts its
    /// payload and 128 bytes. Beyond this limit each counts so much in its socket's send buffer,
    /// too, so that many short ones do not take more than the buffers of their sockets [B-21].
    pub send_bytes_total: usize,
    /// Number of messages that may wait for the reader of any socket; one with a large receive
    /// buffer may have one for each 64 bytes of it. With more the port is congested [B-33].
    pub recv_messages_per_socket: usize,
    /// Number of pongs queued on one path.
    pub pongs_per_path: usize,
    /// Received bytes of one peer that wait for readers, where each message counts its payload and
    /// 128 bytes. Beyond this limit the peer's connections are not read. The bytes present when a
    /// connection ends are still taken, up to twice this limit or 8 MiB more; so are frames in the
    /// receives of a connection over RDMA, up to twice this limit or as much more as these hold.
    pub recv_bytes_per_peer: usize,
    /// Received bytes of all peers that wait for readers, counted as for `recv_bytes_per_peer`.
    pub recv_bytes_total: usize,
    /// Number of messages, over all peers, that are remembered to recognise repetitions of peers
    /// that acknowledge by TCP alone; about 150 bytes each. Beyond this limit each peer keeps an
    /// equal share.
    pub duplicate_records_total: usize,
    /// Bytes of incomplete messages, over all TCP connections. Beyond this limit and the length of
    /// the longest message, the connection is dropped whose message was begun first.
    pub partial_bytes_total: usize,
    /// Number of regions of memory that peers may use over RDMA [RMR-2].
    pub rdma_regions: usize,
}

/// Default of the memory, in bytes, that all peers together may occupy.
const MEMORY: usize = 1 << 30;
/// Memory of a duplicate record, bytes.
pub(crate) const DUPLICATE_RECORD: usize = 150;

impl Limits {
    /// Default limits, except that all peers together may occupy `bytes` of memory: half for
    /// messages that wait for readers (an eighth for those of one peer), a quarter for incomplete
    /// messages, an eighth to recognise repetitions; the rest is for peers and connections. A
    /// single message may be longer than its share. Programs may have a quarter as much before the
    /// records of their messages count.
    pub fn with_memory(bytes: usize) -> Self {
        Self {
            recv_bytes_per_peer: bytes / 8,
            recv_bytes_total: bytes / 2,
            duplicate_records_total: bytes / 8 / DUPLICATE_RECORD,
            partial_bytes_total: bytes / 4,
            sockets: 65_536,
            peers: 4_096,
            peers_unproven: 1_024,
            links_extra_per_peer: 8,
            send_messages_per_socket: 1 << 17,
            send_bytes_total: bytes / 4,
            recv_messages_per_socket: 1 << 14,
            pongs_per_path: 64,
            rdma_regions: 32_768,
        }
    }
}

impl Default for Limits {
    /// [`with_memory`](Self::with_memory) of 1 GiB.
    fn default() -> Self {
        Self::with_memory(MEMORY)
    }
}

/// The kernel's sysctls [spec section 9].
#[derive(Clone, Debug)]
pub struct Sysctl {
    /// Shortest reconnect delay, milliseconds.
    pub reconnect_min_delay_ms: u64,
    /// Longest reconnect delay, milliseconds.
    pub reconnect_max_delay_ms: u64,
    /// Number of messages between two that ask for an acknowledgement.
    pub max_unacked_packets: i64,
    /// Number of bytes between two messages that ask for an acknowledgement.
    pub max_unacked_bytes: i64,
    /// Whether pings are answered.
    pub ping_enable: bool,
    /// TCP send buffer, bytes; 0 leaves it to TCP.
    pub rds_tcp_sndbuf: u32,
    /// TCP receive buffer, bytes; 0 leaves it to TCP.
    pub rds_tcp_rcvbuf: u32,
    /// Frames that may be outstanding on a connection over RDMA, from the next connection on
    /// [OBS-1].
    pub ib_max_send_wr: u32,
    /// Receives posted on a connection over RDMA, from the next connection on.
    pub ib_max_recv_wr: u32,
    /// Frames over RDMA between two that have a completion.
    pub ib_max_unsignaled_wr: u32,
    /// Flow control by credits over RDMA, from the next connection on: the lowest bit counts.
    pub ib_flow_control: i32,
}

impl Default for Sysctl {
    fn default() -> Self {
        Self {
            reconnect_min_delay_ms: 1,
            reconnect_max_delay_ms: 1000,
            max_unacked_packets: 8,
            max_unacked_bytes: 16 << 20,
            ping_enable: true,
            rds_tcp_sndbuf: 0,
            rds_tcp_rcvbuf: 0,
            ib_max_send_wr: 256,
            ib_max_recv_wr: 1024,
            ib_max_unsignaled_wr: 16,
            ib_flow_control: 0,
        }
    }
}

/// Names of the settings, as under `/proc/sys`; the last two are the manual page's names [D-3].
pub const SYSCTL_NAMES: [&str; 13] = [
    "net.rds.reconnect_min_delay_ms",
    "net.rds.reconnect_max_delay_ms",
    "net.rds.max_unacked_packets",
    "net.rds.max_unacked_bytes",
    "net.rds.ping_enable",
    "net.rds.tcp.rds_tcp_sndbuf",
    "net.rds.tcp.rds_tcp_rcvbuf",
    "net.rds.ib.max_send_wr",
    "net.rds.ib.max_recv_wr",
    "net.rds.ib.max_unsignaled_wr",
    "net.rds.ib.flow_control",
    "net.rds.reconnect_delay_min_ms",
    "net.rds.reconnect_delay_max_ms",
];

/// Action that a change of a setting requires of the node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SysctlEffect {
    None,
    DropLinks,
}

/// Most requests of a queue over RDMA. A kernel takes any number, and the device limits it.
const IB_WR_MAX: u64 = 16_384;

impl Sysctl {
    /// Tells whether flow control by credits is on; only the lowest bit counts [IB-72].
    pub(crate) const fn ib_flow_control(&self) -> bool {
        self.ib_flow_control & 1 != 0
    }

    /// Reads a setting by its name, with or without the leading `net.rds.`.
    pub fn get(&self, name: &str) -> Option<i64> {
        let short = short_name(name);
        Some(match short {
            "reconnect_min_delay_ms" | "reconnect_delay_min_ms" => {
                i64::try_from(self.reconnect_min_delay_ms).ok()?
            }
            "reconnect_max_delay_ms" | "reconnect_delay_max_ms" => {
                i64::try_from(self.reconnect_max_delay_ms).ok()?
            }
            "max_unacked_packets" => self.max_unacked_packets,
            "max_unacked_bytes" => self.max_unacked_bytes,
            "ping_enable" => i64::from(self.ping_enable),
            "rds_tcp_sndbuf" => i64::from(self.rds_tcp_sndbuf),
            "rds_tcp_rcvbuf" => i64::from(self.rds_tcp_rcvbuf),
            "max_send_wr" => i64::from(self.ib_max_send_wr),
            "max_recv_wr" => i64::from(self.ib_max_recv_wr),
            "max_unsignaled_wr" => i64::from(self.ib_max_unsignaled_wr),
            "flow_control" => i64::from(self.ib_flow_control),
            _ => return None,
        })
    }

    /// Changes a setting.
    pub(crate) fn set(&mut self, name: &str, value: i64) -> Result<SysctlEffect, Error> {
        let bad = Error::BadSetting(sysctl_range(name).ok_or(Error::NoSuchOption)?);
        let in_range = |min: u64, max: u64| {
            u64::try_from(value).ok().filter(|v| (min..=max).contains(v)).ok_or(bad)
        };
        match short_name(name) {
            "reconnect_min_delay_ms" | "reconnect_delay_min_ms" => {
                self.reconnect_min_delay_ms = in_range(1, self.reconnect_max_delay_ms)?;
            }
            "reconnect_max_delay_ms" | "reconnect_delay_max_ms" => {
                self.reconnect_max_delay_ms = in_range(self.reconnect_min_delay_ms, 86_400_000)?;
            }
            "max_unacked_packets" => self.max_unacked_packets = value,
            "max_unacked_bytes" => self.max_unacked_bytes = value,
            "ping_enable" => self.ping_enable = in_range(0, 1)? != 0,
            "rds_tcp_sndbuf" => {
                self.rds_tcp_sndbuf = in_range(4608, 1 << 31)? as u32;
                return Ok(SysctlEffect::DropLinks);
            }
            "rds_tcp_rcvbuf" => {
                self.rds_tcp_rcvbuf = in_range(2304, 1 << 31)? as u32;
                return Ok(SysctlEffect::DropLinks);
            }
            "max_send_wr" => self.ib_max_send_wr = in_range(1, IB_WR_MAX)? as u32,
            "max_recv_wr" => self.ib_max_recv_wr = in_range(1, IB_WR_MAX)? as u32,
            "max_unsignaled_wr" => self.ib_max_unsignaled_wr = in_range(1, 64)? as u32,
            "flow_control" => self.ib_flow_control = i32::try_from(value).map_err(|_| bad)?,
            _ => return Err(Error::NoSuchOption),
        }
        Ok(SysctlEffect::None)
    }
}

/// Returns the values that a setting takes, in words; `None` if there is no such setting.
pub fn sysctl_range(name: &str) -> Option<&'static str> {
    Some(match short_name(name) {
        "reconnect_min_delay_ms" | "reconnect_delay_min_ms" => {
            "between 1 and net.rds.reconnect_max_delay_ms"
        }
        "reconnect_max_delay_ms" | "reconnect_delay_max_ms" => {
            "between net.rds.reconnect_min_delay_ms and 86400000"
        }
        "max_unacked_packets" | "max_unacked_bytes" => "a whole number",
        "ping_enable" => "0 or 1",
        "rds_tcp_sndbuf" => "between 4608 and 2147483648",
        "rds_tcp_rcvbuf" => "between 2304 and 2147483648",
        "max_send_wr" | "max_recv_wr" => "between 1 and 16384",
        "max_unsignaled_wr" => "between 1 and 64",
        "flow_control" => "a number of 32 bits",
        _ => return None,
    })
}

/// Returns the name in [`SYSCTL_NAMES`] of a setting that is named with or without `net.rds.` and
/// `tcp.`, if there is such a setting.
pub fn sysctl_name(name: &str) -> Option<&'static str> {
    SYSCTL_NAMES.into_iter().find(|known| short_name(known) == short_name(name))
}

fn short_name(name: &str) -> &str {
    let name = name.strip_prefix("net.rds.").unwrap_or(name);
    name.strip_prefix("tcp.").or_else(|| name.strip_prefix("ib.")).unwrap_or(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_setting_takes_its_range_and_the_error_has_it_in_words() {
        let set = |name, value| Sysctl::default().set(name, value).map(|_| ());
        for name in SYSCTL_NAMES {
            let words = sysctl_range(name).expect("words").split(' ');
            let ends: Vec<i64> = words.filter_map(|word| word.parse().ok()).collect();
            let [first, last] = ends[..] else { continue };
            assert_eq!([first, last].map(|value| set(name, value)), [Ok(()), Ok(())], "{name}");
            for value in [first - 1, last + 1] {
                let error = set(name, value).expect_err(name);
                assert_eq!(error.errno(), bowline_base::Errno::EINVAL, "{name}");
            }
        }
        let error = set("net.rds.ping_enable", 7).expect_err("neither");
        assert_eq!(error.to_string(), "the value is not 0 or 1");
        assert!(SYSCTL_NAMES.iter().all(|name| sysctl_range(name).is_some()));
        assert_eq!(set("net.rds.no_such", 1), Err(Error::NoSuchOption));
    }

    /// The figures of SECURITY.md.
    #[test]
    fn the_usual_limits_are_those_that_are_told() {
        let limits = Limits::default();
        assert_eq!((limits.recv_bytes_per_peer, limits.recv_bytes_total), (128 << 20, 512 << 20));
        assert_eq!((limits.partial_bytes_total, limits.send_bytes_total), (256 << 20, 256 << 20));
        let records = limits.duplicate_records_total * DUPLICATE_RECORD;
        assert!(limits.recv_bytes_total + limits.partial_bytes_total + records <= MEMORY);
        assert_eq!((limits.peers, limits.peers_unproven), (4096, 1024));
        assert_eq!((limits.links_extra_per_peer, limits.pongs_per_path), (8, 64));
        assert_eq!((limits.send_messages_per_socket, limits.rdma_regions), (131_072, 32_768));
        assert_eq!(limits.recv_messages_per_socket, 16_384);
        assert_eq!(Config::default().max_message, 1 << 20);
        assert_eq!(Limits::with_memory(2 * MEMORY).recv_bytes_per_peer, 256 << 20);
    }
}
