//! The socket interface of RDS as programs have it, by the names of the public header
//! `linux/rds.h`: numbers of options and control messages, their arguments, and a chain of control
//! messages. With them, the numbers of `linux/socket.h` and its like that RDS sockets take. Spec:
//! `docs/spec/rds.md`, sections 6.5 and 8, and `docs/spec/rds-rdma.md`, sections 9 to 11.
//!
//! All numbers are in the byte order of the machine, and the layouts are those of 64-bit machines.

use alloc::vec::Vec;

/// Address family of RDS.
pub const AF_RDS: i32 = 21;
/// The one type of RDS sockets.
pub const SOCK_SEQPACKET: i32 = 5;

/// Level of options and control messages of any socket.
pub const SOL_SOCKET: i32 = 1;
/// Level of options and control messages of RDS.
pub const SOL_RDS: i32 = 276;

/// Option: drops what was sent to an address and is not acknowledged.
pub const RDS_CANCEL_SENT_TO: i32 = 1;
/// Option: lets peers use memory; [`GetMrArgs`].
pub const RDS_GET_MR: i32 = 2;
/// Option: takes memory back; [`RDS_FREE_MR_ARGS_LEN`] bytes, of which the first 8 are the cookie.
pub const RDS_FREE_MR: i32 = 3;
/// Option: notifies also of operations that have failed.
pub const RDS_RECVERR: i32 = 5;
/// Option: notifies of ports that are not congested any more.
pub const RDS_CONG_MONITOR: i32 = 6;
/// Option: [`RDS_GET_MR`] for one peer; its name of [`SOCKADDR_STORAGE_LEN`] bytes comes first.
pub const RDS_GET_MR_FOR_DEST: i32 = 7;
/// Option: the transport.
pub const SO_RDS_TRANSPORT: i32 = 8;
/// Option: which times of a message's way are measured.
pub const SO_RDS_MSG_RXPATH_LATENCY: i32 = 10;

/// Option: the table of counters.
pub const RDS_INFO_COUNTERS: i32 = 10_000;
/// Option: the table of messages that the transport has not got, with addresses of IPv6.
pub const RDS6_INFO_SEND_MESSAGES: i32 = 10_012;
/// Option: the table of messages that it has got and the peer has not acknowledged.
pub const RDS6_INFO_RETRANS_MESSAGES: i32 = 10_013;
/// The first of the options that are tables.
pub const RDS_INFO_FIRST: i32 = RDS_INFO_COUNTERS;
/// The last of the options that are tables.
pub const RDS_INFO_LAST: i32 = 10_017;

/// Control message, sent: [`RdmaArgs`].
pub const RDS_CMSG_RDMA_ARGS: i32 = 1;
/// Control message, sent and received: the cookie of memory that the receiver may use.
pub const RDS_CMSG_RDMA_DEST: i32 = 2;
/// Control message, sent: [`GetMrArgs`] of memory whose cookie goes to the receiver.
pub const RDS_CMSG_RDMA_MAP: i32 = 3;
/// Control message, received: how an operation has ended, [`RDS_RDMA_NOTIFY_LEN`] bytes.
pub const RDS_CMSG_RDMA_STATUS: i32 = 4;
/// Control message, received: which groups of ports are not congested any more.
pub const RDS_CMSG_CONG_UPDATE: i32 = 5;
/// Control message, sent: [`AtomicArgs`] of a fetch-and-add.
pub const RDS_CMSG_ATOMIC_FADD: i32 = 6;
/// Control message, sent: [`AtomicArgs`] of a compare-and-swap.
pub const RDS_CMSG_ATOMIC_CSWP: i32 = 7;
/// Control message, sent: [`AtomicArgs`] of a fetch-and-add with a mask.
pub const RDS_CMSG_MASKED_ATOMIC_FADD: i32 = 8;
/// Control message, sent: [`AtomicArgs`] of a compare-and-swap with masks.
pub const RDS_CMSG_MASKED_ATOMIC_CSWP: i32 = 9;
/// Control message, received: times of a message's way, [`RDS_CMSG_RX_TRACE_LEN`] bytes.
pub const RDS_CMSG_RXPATH_LATENCY: i32 = 11;
/// Control message, sent: the cookie of a zero-copy message.
pub const RDS_CMSG_ZCOPY_COOKIE: i32 = 12;
/// Control message, received: cookies of finished zero-copy messages, [`RDS_ZCOPY_COOKIES_LEN`]
/// bytes.
pub const RDS_CMSG_ZCOPY_COMPLETION: i32 = 13;

/// Bytes of a `sockaddr_storage`.
pub const SOCKADDR_STORAGE_LEN: usize = 128;
/// Bytes of `rds_get_mr_args`.
pub const RDS_GET_MR_ARGS_LEN: usize = 32;
/// Bytes of `rds_get_mr_for_dest_args`.
pub const RDS_GET_MR_FOR_DEST_ARGS_LEN: usize = SOCKADDR_STORAGE_LEN + RDS_GET_MR_ARGS_LEN;
/// Bytes of `rds_free_mr_args`.
pub const RDS_FREE_MR_ARGS_LEN: usize = 16;
/// Bytes of `rds_iovec`: address and length.
pub const RDS_IOVEC_LEN: usize = 16;
/// Bytes of `rds_rdma_args`.
pub const RDS_RDMA_ARGS_LEN: usize = 56;
/// Bytes of `rds_atomic_args`.
pub const RDS_ATOMIC_ARGS_LEN: usize = 72;
/// Bytes of `rds_rdma_notify`.
pub const RDS_RDMA_NOTIFY_LEN: usize = 16;
/// Bytes of `rds_cmsg_rx_trace`.
pub const RDS_CMSG_RX_TRACE_LEN: usize = 32;
/// Most cookies in one `rds_zcopy_cookies`.
pub const RDS_MAX_ZCOOKIES: usize = 8;
/// Bytes of `rds_zcopy_cookies`.
pub const RDS_ZCOPY_COOKIES_LEN: usize = 4 + 4 * RDS_MAX_ZCOOKIES;
/// Bytes of `rds_info_counter`: a name of 32 bytes, and a number.
pub const RDS_INFO_COUNTER_LEN: usize = 40;
/// Bytes of `rds6_info_message`.
pub const RDS6_INFO_MESSAGE_LEN: usize = 50;

/// Flag of [`RdmaArgs`]: the operation writes to the peer, and reads from it otherwise.
pub const RDS_RDMA_READWRITE: u64 = 0x01;
/// Flag of [`RdmaArgs`]: after all operations before it.
pub const RDS_RDMA_FENCE: u64 = 0x02;
/// Flag of [`GetMrArgs`]: the memory is taken back after the first use of it.
pub const RDS_RDMA_USE_ONCE: u64 = 0x08;
/// Flag of operations: their end is reported.
pub const RDS_RDMA_NOTIFY_ME: u64 = 0x20;
/// Flag of operations: no message goes to the peer.
pub const RDS_RDMA_SILENT: u64 = 0x40;

/// `ioctl` that sets the type of service.
pub const SIOCRDSSETTOS: i32 = 0x89e0;
/// `ioctl` that tells the type of service.
pub const SIOCRDSGETTOS: i32 = 0x89e1;

/// Option of any socket.
pub const SO_DEBUG: i32 = 1;
/// Option of any socket.
pub const SO_REUSEADDR: i32 = 2;
/// Option of any socket: its type.
pub const SO_TYPE: i32 = 3;
/// Option of any socket: the error that is kept for it.
pub const SO_ERROR: i32 = 4;
/// Option of any socket.
pub const SO_DONTROUTE: i32 = 5;
/// Option of any socket.
pub const SO_BROADCAST: i32 = 6;
/// Option of any socket: the send buffer.
pub const SO_SNDBUF: i32 = 7;
/// Option of any socket: the receive buffer.
pub const SO_RCVBUF: i32 = 8;
/// Option of any socket.
pub const SO_KEEPALIVE: i32 = 9;
/// Option of any socket.
pub const SO_OOBINLINE: i32 = 10;
/// Option of any socket.
pub const SO_NO_CHECK: i32 = 11;
/// Option of any socket.
pub const SO_PRIORITY: i32 = 12;
/// Option of any socket.
pub const SO_LINGER: i32 = 13;
/// Option of any socket.
pub const SO_REUSEPORT: i32 = 15;
/// Option of any socket.
pub const SO_PASSCRED: i32 = 16;
/// Option of any socket.
pub const SO_RCVLOWAT: i32 = 18;
/// Option of any socket: how long a receive waits.
pub const SO_RCVTIMEO: i32 = 20;
/// Option of any socket: how long a send waits.
pub const SO_SNDTIMEO: i32 = 21;
/// Option of any socket, and its control message: a `timeval` of when a message came.
pub const SO_TIMESTAMP: i32 = 29;
/// Option of any socket: whether it listens.
pub const SO_ACCEPTCONN: i32 = 30;
/// Option of any socket: [`SO_SNDBUF`] beyond the limit.
pub const SO_SNDBUFFORCE: i32 = 32;
/// Option of any socket: [`SO_RCVBUF`] beyond the limit.
pub const SO_RCVBUFFORCE: i32 = 33;
/// Option of any socket, and its control message: a `timespec` of when a message came.
pub const SO_TIMESTAMPNS: i32 = 35;
/// Option of any socket.
pub const SO_MARK: i32 = 36;
/// Option of any socket: its protocol.
pub const SO_PROTOCOL: i32 = 38;
/// Option of any socket: its address family.
pub const SO_DOMAIN: i32 = 39;
/// Option of any socket: messages may be sent without a copy.
pub const SO_ZEROCOPY: i32 = 60;
/// [`SO_TIMESTAMP`] with seconds of 64 bits.
pub const SO_TIMESTAMP_NEW: i32 = 63;
/// [`SO_TIMESTAMPNS`] with seconds of 64 bits.
pub const SO_TIMESTAMPNS_NEW: i32 = 64;
/// [`SO_RCVTIMEO`] with seconds of 64 bits.
pub const SO_RCVTIMEO_NEW: i32 = 66;
/// [`SO_SNDTIMEO`] with seconds of 64 bits.
pub const SO_SNDTIMEO_NEW: i32 = 67;

/// Option of any socket: a filter of what comes; as one to get, the filter.
pub const SO_ATTACH_FILTER: i32 = 26;
/// Option of any socket: no filter any more.
pub const SO_DETACH_FILTER: i32 = 27;
/// Option of any socket: the name of what it is connected to.
pub const SO_PEERNAME: i32 = 28;
/// Option of any socket: who was at the other end when it was connected.
pub const SO_PEERCRED: i32 = 17;
/// Option of any socket: control messages with the sender's label of security.
pub const SO_PASSSEC: i32 = 34;
/// Option of any socket: where the next look at what is there begins.
pub const SO_PEEK_OFF: i32 = 42;
/// Option of any socket: a filter of what comes, as a program.
pub const SO_ATTACH_BPF: i32 = 50;
/// Option of any socket: which buffers have a size that the program has set.
pub const SO_BUF_LOCK: i32 = 72;
/// Option of any socket: memory that is kept for it.
pub const SO_RESERVE_MEM: i32 = 73;
/// Option of any socket: another path after a loss.
pub const SO_TXREHASH: i32 = 74;
/// Option of any socket: control messages with the mark of what comes.
pub const SO_RCVMARK: i32 = 75;
/// Option of any socket: control messages with a descriptor of the sending process.
pub const SO_PASSPIDFD: i32 = 76;
/// Option of any socket: a descriptor of the process at the other end.
pub const SO_PEERPIDFD: i32 = 77;
/// Flag of a call: out-of-band data, which RDS does not have.
pub const MSG_OOB: i32 = 0x01;
/// Flag of a call: the message stays.
pub const MSG_PEEK: i32 = 0x02;
/// Flag of a message: its control messages had not enough room.
pub const MSG_CTRUNC: i32 = 0x08;
/// Flag of a message: it had not enough room.
pub const MSG_TRUNC: i32 = 0x20;
/// Flag of a call: it does not wait.
pub const MSG_DONTWAIT: i32 = 0x40;
/// Flag of a call: it is about the queue of errors, which is always empty.
pub const MSG_ERRQUEUE: i32 = 0x2000;
/// Flag of a call: the message is sent without a copy.
pub const MSG_ZEROCOPY: i32 = 0x400_0000;

/// Bytes of a `cmsghdr`: length with these bytes, level and type.
pub const CMSGHDR_LEN: usize = 16;

/// Room that a control message takes with so many bytes of data: `CMSG_SPACE`.
pub const fn cmsg_space(len: usize) -> usize {
    CMSGHDR_LEN.saturating_add(len).saturating_add(7) & !7
}

/// A control message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cmsg<'a> {
    /// `cmsg_level`.
    pub level: i32,
    /// `cmsg_type`.
    pub kind: i32,
    /// What follows the head.
    pub data: &'a [u8],
}

/// A control message whose length is shorter than its head, or longer than what there is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MalformedCmsg;

/// Walks over a chain of control messages, up to the first that is malformed.
#[derive(Clone, Debug)]
pub struct Cmsgs<'a> {
    rest: &'a [u8],
}

impl<'a> Cmsgs<'a> {
    /// Control messages as `sendmsg` takes them, and `recvmsg` lays them out.
    pub const fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes }
    }

    /// What there is behind those that were walked over. At the end of the walk, bytes that are too
    /// few for a head.
    pub const fn rest(&self) -> &'a [u8] {
        self.rest
    }
}

impl<'a> Iterator for Cmsgs<'a> {
    type Item = Result<Cmsg<'a>, MalformedCmsg>;

    fn next(&mut self) -> Option<Self::Item> {
        let all = self.rest;
        let [len, kinds] = words(all)?;
        let len = usize::try_from(len).unwrap_or(usize::MAX);
        let Some(data) = all.get(CMSGHDR_LEN..len) else {
            self.rest = &[];
            return Some(Err(MalformedCmsg));
        };
        // The last one may come without the bytes that align the next.
        self.rest = all.get(cmsg_space(data.len())..).unwrap_or_default();
        let [level, kind] = halves(kinds);
        Some(Ok(Cmsg { level: level.cast_signed(), kind: kind.cast_signed(), data }))
    }
}

/// Appends a control message to `out`, which is to have at most `room` bytes. Returns whether it
/// fits; what does not is cut, as by a kernel.
pub fn put_cmsg(out: &mut Vec<u8>, room: usize, level: i32, kind: i32, data: &[u8]) -> bool {
    let Some(data_room) = room.saturating_sub(out.len()).checked_sub(CMSGHDR_LEN) else {
        return false;
    };
    let cut = data.get(..data_room).unwrap_or(data);
    out.extend_from_slice(&((CMSGHDR_LEN + cut.len()) as u64).to_ne_bytes());
    out.extend_from_slice(&level.to_ne_bytes());
    out.extend_from_slice(&kind.to_ne_bytes());
    out.extend_from_slice(cut);
    out.resize(room.min(out.len().next_multiple_of(8)), 0);
    cut.len() == data.len()
}

/// `rds_get_mr_args`: memory that peers are to use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GetMrArgs {
    /// Its address.
    pub addr: u64,
    /// Its length in bytes.
    pub bytes: u64,
    /// Address at which the cookie is to be stored; 0 for none.
    pub cookie_addr: u64,
    /// Flags, `RDS_RDMA_`.
    pub flags: u64,
}

impl GetMrArgs {
    /// Reads the first [`RDS_GET_MR_ARGS_LEN`] bytes; `None` if there are fewer.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let [addr, bytes, cookie_addr, flags] = words(bytes)?;
        Some(Self { addr, bytes, cookie_addr, flags })
    }
}

/// `rds_iovec`: a piece of a program's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RdsIovec {
    /// Its address.
    pub addr: u64,
    /// Its length in bytes.
    pub bytes: u64,
}

impl RdsIovec {
    /// Reads a vector of pieces; bytes at the end that are none are left out.
    pub fn parse_all(bytes: &[u8]) -> impl Iterator<Item = Self> {
        bytes
            .chunks_exact(RDS_IOVEC_LEN)
            .filter_map(words)
            .map(|[addr, bytes]| Self { addr, bytes })
    }
}

/// `rds_rdma_args`: an RDMA operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RdmaArgs {
    /// What the peer's memory is called.
    pub cookie: u64,
    /// Where in it the operation begins, and how many bytes it is.
    pub remote_vec: RdsIovec,
    /// Address of the vector of pieces of local memory.
    pub local_vec_addr: u64,
    /// Pieces of that vector.
    pub nr_local: u64,
    /// Flags, `RDS_RDMA_`.
    pub flags: u64,
    /// What the program calls the operation.
    pub user_token: u64,
}

impl RdmaArgs {
    /// Reads the first [`RDS_RDMA_ARGS_LEN`] bytes; `None` if there are fewer.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let [cookie, addr, bytes, local_vec_addr, nr_local, flags, user_token] = words(bytes)?;
        let remote_vec = RdsIovec { addr, bytes };
        Some(Self { cookie, remote_vec, local_vec_addr, nr_local, flags, user_token })
    }
}

/// `rds_atomic_args`: an atomic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AtomicArgs {
    /// What the peer's memory is called.
    pub cookie: u64,
    /// Where the former value is stored.
    pub local_addr: u64,
    /// Where in the peer's memory the number is.
    pub remote_addr: u64,
    /// What depends on the kind [ATOM-1].
    pub operands: [u64; 4],
    /// Flags, `RDS_RDMA_`.
    pub flags: u64,
    /// What the program calls the operation.
    pub user_token: u64,
}

impl AtomicArgs {
    /// Reads the first [`RDS_ATOMIC_ARGS_LEN`] bytes; `None` if there are fewer.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let [cookie, local_addr, remote_addr, a, b, c, d, flags, user_token] = words(bytes)?;
        let operands = [a, b, c, d];
        Some(Self { cookie, local_addr, remote_addr, operands, flags, user_token })
    }
}

/// The cookie of `rds_free_mr_args`, of exactly its length.
pub fn free_mr_cookie(bytes: &[u8]) -> Option<u64> {
    let is_whole = bytes.len() == RDS_FREE_MR_ARGS_LEN;
    words(bytes).filter(|_| is_whole).map(|[cookie]| cookie)
}

/// The first numbers of 8 bytes.
fn words<const N: usize>(bytes: &[u8]) -> Option<[u64; N]> {
    let (chunks, _) = bytes.as_chunks::<8>();
    chunks.first_chunk::<N>().map(|chunks| chunks.map(u64::from_ne_bytes))
}

/// The numbers of 4 bytes in one of 8, in the order in which they lie in memory.
fn halves(word: u64) -> [u32; 2] {
    let [a, b, c, d, e, f, g, h] = word.to_ne_bytes();
    [[a, b, c, d], [e, f, g, h]].map(u32::from_ne_bytes)
}
