//! Reading the tables of another node, a kernel's or one that serves programs.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use super::info::{ConnInfo, Info, LinkInfo, MessageInfo, RdmaInfo, SocketInfo};
use crate::ids::LinkId;

/// Numbers of the tables, those with addresses of IPv6, and the sizes of their items in bytes.
mod table {
    pub(super) const CONNECTIONS: (u32, usize) = (10_011, 65);
    pub(super) const SEND: (u32, usize) = (10_012, 50);
    pub(super) const RETRANS: (u32, usize) = (10_013, 50);
    pub(super) const RECV: (u32, usize) = (10_014, 50);
    pub(super) const SOCKETS: (u32, usize) = (10_015, 52);
    pub(super) const LINKS: (u32, usize) = (10_016, 64);
    pub(super) const RDMA: (u32, usize) = (10_017, 92);
}

impl Info {
    /// Reads the tables of another node with `read`, which gets the number of an option; an absent
    /// table is `None`. What the tables do not have is empty or 0: paths, the kinds of peers, and
    /// the counts of a connection.
    ///
    /// # Errors
    /// Those of `read`.
    pub fn from_tables<E>(
        mut read: impl FnMut(u32) -> Result<Option<Vec<u8>>, E>,
    ) -> Result<Self, E> {
        let mut rows = |(option, size): (u32, usize)| {
            read(option).map(|bytes| Rows { bytes: bytes.unwrap_or_default(), size })
        };
        // In this order: a message that is started between the two is found twice, and never not
        // at all.
        let (send, retrans) = (rows(table::SEND)?.all(message), rows(table::RETRANS)?.all(message));
        let recv = rows(table::RECV)?.all(message);
        let mut sockets = rows(table::SOCKETS)?.all(socket);
        for socket in &mut sockets {
            let own = |rows: &[MessageInfo]| -> (usize, usize) {
                let rows = rows.iter().filter(|row| Some(row.local) == socket.bound);
                rows.fold((0, 0), |(count, bytes), row| (count + 1, bytes + row.len as usize))
            };
            socket.send_bytes = own(&send).1 + own(&retrans).1;
            (socket.recv_messages, socket.recv_bytes) = own(&recv);
        }
        let connections = rows(table::CONNECTIONS)?.all(connection);
        let mut links = rows(table::LINKS)?.all(link);
        for (number, link) in (0..).zip(&mut links) {
            link.link = LinkId((number, 0));
        }
        let rdma = read(table::RDMA.0)?;
        let rdma = rdma.map(|bytes| Rows { bytes, size: table::RDMA.1 }.all(rdma_connection));
        Ok(Self { sockets, connections, paths: Vec::new(), send, retrans, recv, links, rdma })
    }
}

/// The items of a table.
struct Rows {
    bytes: Vec<u8>,
    size: usize,
}

impl Rows {
    /// Reads all whole items.
    fn all<T>(&self, item: impl Fn(&mut Fields<'_>) -> Option<T>) -> Vec<T> {
        self.bytes.chunks_exact(self.size).filter_map(|row| item(&mut Fields(row))).collect()
    }
}

/// What is left of an item: integers in host order, addresses and ports in network order [R-1004].
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn bytes<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (first, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*first)
    }

    fn u64(&mut self) -> Option<u64> {
        self.bytes().map(u64::from_ne_bytes)
    }

    fn u32(&mut self) -> Option<u32> {
        self.bytes().map(u32::from_ne_bytes)
    }

    fn u8(&mut self) -> Option<u8> {
        self.bytes().map(u8::from_ne_bytes)
    }

    fn port(&mut self) -> Option<u16> {
        self.bytes().map(u16::from_be_bytes)
    }

    fn gid(&mut self) -> Option<Ipv6Addr> {
        self.bytes::<16>().map(Ipv6Addr::from)
    }

    fn addr(&mut self) -> Option<IpAddr> {
        self.gid().map(|addr| addr.to_canonical())
    }

    fn text(&mut self, len: usize) -> Option<&'a [u8]> {
        let (text, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        text.split(|byte| *byte == 0).next()
    }
}

fn message(row: &mut Fields<'_>) -> Option<MessageInfo> {
    let (seq, len) = (row.u64()?, row.u32()?);
    let (local, remote) = (row.addr()?, row.addr()?);
    let (local_port, remote_port) = (row.port()?, row.port()?);
    Some(MessageInfo {
        local: SocketAddr::new(local, local_port),
        remote: SocketAddr::new(remote, remote_port),
        seq,
        len,
    })
}

fn socket(row: &mut Fields<'_>) -> Option<SocketInfo> {
    let send_buffer = row.u32()? as usize;
    let (bound, connected) = (row.addr()?, row.addr()?);
    let (bound_port, connected_port) = (row.port()?, row.port()?);
    let recv_buffer = row.u32()? as usize;
    let name = |ip: IpAddr, port| (port != 0).then(|| SocketAddr::new(ip, port));
    Some(SocketInfo {
        bound: name(bound, bound_port),
        connected: name(connected, connected_port),
        send_buffer,
        recv_buffer,
        send_bytes: 0,
        recv_bytes: 0,
        recv_messages: 0,
        congested: false,
        inode: row.u64()?,
        owner: None,
    })
}

fn connection(row: &mut Fields<'_>) -> Option<ConnInfo> {
    let (next_tx_seq, next_rx_seq) = (row.u64()?, row.u64()?);
    let (local, remote) = (row.addr()?, row.addr()?);
    let transport = match row.text(16)? {
        b"tcp" => "tcp",
        b"infiniband" => "infiniband",
        _ => "loopback",
    };
    Some(ConnInfo {
        local,
        remote,
        transport,
        tos: 0,
        next_tx_seq,
        next_rx_seq,
        flags: row.u8()?,
        npaths: 0,
        peer: "unknown",
        congested: false,
        sent_messages: 0,
        received_messages: 0,
        sent_bytes: 0,
        received_bytes: 0,
    })
}

fn link(row: &mut Fields<'_>) -> Option<LinkInfo> {
    let local = SocketAddr::new(row.addr()?, row.port()?);
    let remote = SocketAddr::new(row.addr()?, row.port()?);
    Some(LinkInfo {
        link: LinkId((0, 0)),
        local,
        remote,
        path: None,
        header_remaining: row.u64()?,
        data_remaining: row.u64()?,
        last_sent_nxt: row.u32()?,
        last_expected_una: row.u32()?,
        last_seen_una: row.u32()?,
        received_bytes: 0,
        received_messages: 0,
    })
}

fn rdma_connection(row: &mut Fields<'_>) -> Option<RdmaInfo> {
    let (local, remote) = (row.addr()?, row.addr()?);
    let (local_gid, remote_gid) = (row.gid()?, row.gid()?);
    let [max_send_wr, max_recv_wr, max_send_sge, rdma_mr_max, rdma_mr_size] =
        [row.u32()?, row.u32()?, row.u32()?, row.u32()?, row.u32()?];
    let [tos, sl, _, _] = row.bytes()?;
    Some(RdmaInfo {
        local,
        remote,
        local_gid,
        remote_gid,
        max_send_wr,
        max_recv_wr,
        max_send_sge,
        rdma_mr_max,
        rdma_mr_size,
        tos,
        sl,
        cache_allocs: row.u32()?,
    })
}
