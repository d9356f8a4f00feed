//! `setsockopt` and `getsockopt` of an RDS socket [section 8.4 of `docs/spec/rds.md`].

use std::collections::BTreeMap;
use std::time::Duration;

use bowline_base::{Errno, Instant};
use bowline_host_wire::{NODE_LEVEL, NODE_RECV_BUFFER, NODE_SEND_BUFFER};
use bowline_rds::{InfoTable, LatencyTrace, Node, SocketId};
use bowline_wire::rds::uapi::*;
use serde::{Deserialize, Serialize};

use crate::names;

/// Options that any socket keeps and RDS makes nothing of: on or off. Later kernels refuse those of
/// credentials.
const SWITCHES: [i32; 11] = [
    SO_DEBUG,
    SO_REUSEADDR,
    SO_DONTROUTE,
    SO_BROADCAST,
    SO_KEEPALIVE,
    SO_OOBINLINE,
    SO_NO_CHECK,
    SO_PASSCRED,
    SO_PASSSEC,
    SO_PASSPIDFD,
    SO_RCVMARK,
];
/// The same: numbers.
const NUMBERS: [i32; 5] = [SO_PRIORITY, SO_RCVLOWAT, SO_MARK, SO_BUF_LOCK, SO_TXREHASH];

/// Bits of SO_BUF_LOCK: the program has set the size of a buffer.
const SEND_BUFFER_SET: i32 = 1;
const RECV_BUFFER_SET: i32 = 2;
/// What SO_PEERCRED says where nobody has connected: no process, no user and no group.
const NO_CREDENTIALS: [i32; 3] = [0, -1, -1];

/// Largest buffer that can be forced, bytes: twice that is reported.
const FORCED_MAX: usize = i32::MAX as usize / 2;

/// Largest buffers that a program gets.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Most {
    /// Send and receive buffer by its quota, bytes.
    pub(crate) quota: (usize, usize),
    /// The same by what is set for all sockets: `net.core.wmem_max` and `rmem_max`.
    pub(crate) largest: (usize, usize),
    /// It may go beyond that.
    pub(crate) forces: bool,
}

/// Socket options that the core does not store.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Options {
    kept: BTreeMap<i32, i32>,
    linger: [i32; 2],
    pub(crate) recv_timeout: Option<Duration>,
    pub(crate) send_timeout: Option<Duration>,
    timestamp: bool,
    pub(crate) zerocopy: bool,
}

/// What `getsockopt` gives.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Value {
    /// What the call returns: 0, or the size of a row of a table.
    pub(crate) returned: Result<i32, Errno>,
    pub(crate) bytes: Vec<u8>,
    /// `optlen` to return, if it differs from the length of `bytes`.
    pub(crate) optlen: Option<usize>,
}

impl Value {
    const fn of(bytes: Vec<u8>) -> Self {
        Self { returned: Ok(0), bytes, optlen: None }
    }

    fn int(value: i32, room: usize) -> Self {
        let bytes = value.to_ne_bytes();
        Self::of(bytes[..room.min(4)].to_vec())
    }

    /// A table, or the room that it needs if there is too little.
    pub(crate) fn table(table: InfoTable, room: usize) -> Self {
        if table.bytes.len() > room {
            return Self {
                returned: Err(Errno::ENOSPC),
                bytes: Vec::new(),
                optlen: Some(table.bytes.len()),
            };
        }
        let returned = i32::try_from(table.item_size).unwrap_or(0);
        Self { returned: Ok(returned), bytes: table.bytes, optlen: None }
    }
}

fn int(value: &[u8]) -> Result<i32, Errno> {
    value.first_chunk().map(|v| i32::from_ne_bytes(*v)).ok_or(Errno::EINVAL)
}

fn exact_int(value: &[u8]) -> Result<i32, Errno> {
    value.try_into().map(i32::from_ne_bytes).map_err(|_| Errno::EFAULT)
}

/// A `timeval`; all zeroes stand for no limit.
fn timeout(value: &[u8]) -> Result<Option<Duration>, Errno> {
    let value = value.first_chunk::<16>().ok_or(Errno::EINVAL)?;
    let word = |at: usize| value[at..at + 8].try_into().map_or(0, i64::from_ne_bytes);
    let (seconds, micros) = (word(0), word(8));
    let micros = u32::try_from(micros).ok().filter(|m| *m < 1_000_000).ok_or(Errno::EDOM)?;
    // A negative time is none at all: the call does not wait.
    let Ok(seconds) = u64::try_from(seconds) else { return Ok(Some(Duration::ZERO)) };
    let time = Duration::new(seconds, micros * 1000);
    Ok((time > Duration::ZERO).then_some(time))
}

fn timeval(time: Option<Duration>) -> Vec<u8> {
    let time = time.unwrap_or_default();
    let seconds = i64::try_from(time.as_secs()).unwrap_or(i64::MAX);
    [seconds.to_ne_bytes(), i64::from(time.subsec_micros()).to_ne_bytes()].concat()
}

impl Options {
    /// Sets an option to `value`; the buffers get `most` bytes, as the kernel caps them.
    pub(crate) fn set(
        &mut self,
        core: &mut Node,
        now: Instant,
        id: SocketId,
        (level, name): (i32, i32),
        (value, most): (&[u8], &Most),
    ) -> Result<(), Errno> {
        match level {
            SOL_SOCKET => self.set_general(core, id, name, (value, most)),
            SOL_RDS => self.set_rds(core, now, id, name, value),
            NODE_LEVEL => self.set_whole_buffer(core, id, name, (value, most)),
            _ => Err(Errno::ENOPROTOOPT),
        }
    }

    fn set_general(
        &mut self,
        core: &mut Node,
        id: SocketId,
        name: i32,
        (value, most): (&[u8], &Most),
    ) -> Result<(), Errno> {
        match name {
            SO_RCVTIMEO | SO_RCVTIMEO_NEW => self.recv_timeout = timeout(value)?,
            SO_SNDTIMEO | SO_SNDTIMEO_NEW => self.send_timeout = timeout(value)?,
            SO_LINGER => {
                let value = value.first_chunk::<8>().ok_or(Errno::EINVAL)?;
                let word = |at: usize| value[at..at + 4].try_into().map_or(0, i32::from_ne_bytes);
                self.linger = [i32::from(word(0) != 0), word(4)];
            }
            _ => {
                let bytes_given = value.len();
                let value = int(value)?;
                let Most { quota, largest, forces } = *most;
                // As the kernel has it: a negative number is a very large one, but to be forced.
                let wanted = usize::try_from(value).unwrap_or(usize::MAX);
                let forced = usize::try_from(value).unwrap_or(0).min(FORCED_MAX);
                let rds = |result: Result<(), bowline_rds::Error>| result.map_err(|e| e.errno());
                match name {
                    SO_SNDBUFFORCE | SO_RCVBUFFORCE if !forces => return Err(Errno::EPERM),
                    SO_SNDBUF | SO_SNDBUFFORCE => {
                        let bytes = if name == SO_SNDBUF { wanted.min(largest.0) } else { forced };
                        rds(core.set_send_buffer(id, bytes.min(quota.0)))?;
                        *self.kept.entry(SO_BUF_LOCK).or_default() |= SEND_BUFFER_SET;
                    }
                    SO_RCVBUF | SO_RCVBUFFORCE => {
                        let bytes = if name == SO_RCVBUF { wanted.min(largest.1) } else { forced };
                        rds(core.set_recv_buffer(id, bytes.min(quota.1)))?;
                        *self.kept.entry(SO_BUF_LOCK).or_default() |= RECV_BUFFER_SET;
                    }
                    SO_TIMESTAMP | SO_TIMESTAMP_NEW | SO_TIMESTAMPNS | SO_TIMESTAMPNS_NEW => {
                        self.timestamp = value != 0;
                        // RDS tells microseconds all the same.
                        let is_ns = [SO_TIMESTAMPNS, SO_TIMESTAMPNS_NEW].contains(&name);
                        self.kept.insert(SO_TIMESTAMPNS, i32::from(is_ns && value != 0));
                        rds(core.set_timestamp(id, value != 0))?;
                    }
                    SO_ZEROCOPY if !(0..=1).contains(&value) => return Err(Errno::EINVAL),
                    SO_ZEROCOPY => {
                        self.zerocopy = value != 0;
                        rds(core.set_zerocopy(id, value != 0))?;
                    }
                    SO_REUSEPORT | SO_PEEK_OFF => return Err(Errno::EOPNOTSUPP),
                    // Nobody else may look at what a filter leaves, so filters are refused.
                    SO_ATTACH_FILTER => return Err(Errno::EINVAL),
                    SO_ATTACH_BPF if bytes_given != size_of::<i32>() => return Err(Errno::EINVAL),
                    SO_ATTACH_BPF => return Err(Errno::EBADF),
                    SO_DETACH_FILTER => return Err(Errno::ENOENT),
                    SO_RESERVE_MEM if value < 0 => return Err(Errno::EINVAL),
                    SO_RESERVE_MEM => return Err(Errno::EOPNOTSUPP),
                    SO_BUF_LOCK if value & !(SEND_BUFFER_SET | RECV_BUFFER_SET) != 0 => {
                        return Err(Errno::EINVAL);
                    }
                    SO_TXREHASH if !(-1..=1).contains(&value) => return Err(Errno::EINVAL),
                    // -1 stands for what the machine does otherwise.
                    SO_TXREHASH => {
                        self.kept.insert(name, value.max(0));
                    }
                    SO_RCVLOWAT => {
                        let bytes = if value < 0 { i32::MAX } else { value.max(1) };
                        self.kept.insert(name, bytes);
                    }
                    _ if SWITCHES.contains(&name) => {
                        self.kept.insert(name, i32::from(value != 0));
                    }
                    _ if NUMBERS.contains(&name) => {
                        self.kept.insert(name, value);
                    }
                    _ => return Err(Errno::ENOPROTOOPT),
                }
            }
        }
        Ok(())
    }

    /// Gives a buffer all the bytes that the library asks for, or refuses.
    fn set_whole_buffer(
        &mut self,
        core: &mut Node,
        id: SocketId,
        name: i32,
        (value, most): (&[u8], &Most),
    ) -> Result<(), Errno> {
        let bytes = value.try_into().map(u64::from_ne_bytes).map_err(|_| Errno::EINVAL)?;
        let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
        let quota = match name {
            NODE_SEND_BUFFER => most.quota.0,
            NODE_RECV_BUFFER => most.quota.1,
            _ => return Err(Errno::ENOPROTOOPT),
        };
        if bytes > quota.min(FORCED_MAX) {
            return Err(Errno::ENOBUFS);
        }
        let (set, flag) = match name {
            NODE_SEND_BUFFER => (core.set_send_buffer(id, bytes), SEND_BUFFER_SET),
            _ => (core.set_recv_buffer(id, bytes), RECV_BUFFER_SET),
        };
        set.map_err(|e| e.errno())?;
        *self.kept.entry(SO_BUF_LOCK).or_default() |= flag;
        Ok(())
    }

    fn set_rds(
        &mut self,
        core: &mut Node,
        now: Instant,
        id: SocketId,
        name: i32,
        value: &[u8],
    ) -> Result<(), Errno> {
        let bound = core.local_addr(id).map_err(|e| e.errno())?.is_some_and(|a| a.port() != 0);
        let result = match name {
            RDS_CANCEL_SENT_TO if !bound => return Err(Errno::ENOTCONN),
            RDS_CANCEL_SENT_TO => core.cancel_sent_to(now, id, names::to_cancel(value)?),
            RDS_GET_MR | RDS_GET_MR_FOR_DEST | RDS_FREE_MR => {
                let len = match name {
                    RDS_GET_MR => RDS_GET_MR_ARGS_LEN,
                    RDS_GET_MR_FOR_DEST => RDS_GET_MR_FOR_DEST_ARGS_LEN,
                    _ => RDS_FREE_MR_ARGS_LEN,
                };
                return Err(match (bound, value.len() == len, name) {
                    (_, false, _) | (_, _, RDS_FREE_MR) => Errno::EINVAL,
                    (false, ..) => Errno::ENOTCONN,
                    _ => Errno::EOPNOTSUPP,
                });
            }
            RDS_RECVERR => core.set_recverr(id, int(value)? != 0),
            RDS_CONG_MONITOR => core.set_cong_monitor(id, int(value)? != 0),
            SO_RDS_TRANSPORT => {
                if core.transport(id).map_err(|e| e.errno())?.is_some() {
                    return Err(Errno::EOPNOTSUPP);
                }
                let number = value.try_into().map(i32::from_ne_bytes).map_err(|_| Errno::EINVAL)?;
                core.set_transport(id, number)
            }
            SO_RDS_MSG_RXPATH_LATENCY => {
                let [count, positions @ ..]: [u8; 4] =
                    value.try_into().map_err(|_| Errno::EFAULT)?;
                core.set_latency_trace(id, LatencyTrace { count, positions })
            }
            SO_TIMESTAMP | SO_TIMESTAMP_NEW => {
                self.timestamp = exact_int(value)? != 0;
                core.set_timestamp(id, self.timestamp)
            }
            _ => return Err(Errno::ENOPROTOOPT),
        };
        result.map_err(|e| e.errno())
    }

    fn is_ns(&self) -> bool {
        self.kept.get(&SO_TIMESTAMPNS) == Some(&1)
    }

    pub(crate) fn get(
        &self,
        core: &Node,
        id: SocketId,
        (level, name): (i32, i32),
        room: usize,
    ) -> Result<Value, Errno> {
        match level {
            SOL_SOCKET => self.get_general(core, id, name, room),
            SOL_RDS => get_rds(core, id, name, room),
            _ => Err(Errno::ENOPROTOOPT),
        }
    }

    fn get_general(
        &self,
        core: &Node,
        id: SocketId,
        name: i32,
        room: usize,
    ) -> Result<Value, Errno> {
        let doubled = |bytes: Result<usize, bowline_rds::Error>| {
            let bytes = bytes.map_err(|e| e.errno())?;
            Ok(i32::try_from(2 * bytes).unwrap_or(i32::MAX))
        };
        let value = match name {
            SO_TYPE => SOCK_SEQPACKET,
            SO_DOMAIN => AF_RDS,
            SO_PROTOCOL | SO_ERROR | SO_ACCEPTCONN => 0,
            SO_SNDBUF => doubled(core.send_buffer(id))?,
            SO_RCVBUF => doubled(core.recv_buffer(id))?,
            SO_TIMESTAMP | SO_TIMESTAMP_NEW => i32::from(self.timestamp && !self.is_ns()),
            SO_TIMESTAMPNS | SO_TIMESTAMPNS_NEW => i32::from(self.timestamp && self.is_ns()),
            SO_RESERVE_MEM => 0,
            SO_PEEK_OFF => return Err(Errno::EOPNOTSUPP),
            SO_PEERPIDFD => return Err(Errno::ENODATA),
            SO_ZEROCOPY => i32::from(self.zerocopy),
            SO_REUSEPORT => 0,
            _ if SWITCHES.contains(&name) || NUMBERS.contains(&name) => {
                self.kept.get(&name).copied().unwrap_or(i32::from(name == SO_RCVLOWAT))
            }
            _ => {
                let mut bytes = match name {
                    SO_RCVTIMEO | SO_RCVTIMEO_NEW => timeval(self.recv_timeout),
                    SO_SNDTIMEO | SO_SNDTIMEO_NEW => timeval(self.send_timeout),
                    SO_LINGER => self.linger.map(i32::to_ne_bytes).concat(),
                    SO_PEERCRED => NO_CREDENTIALS.map(i32::to_ne_bytes).concat(),
                    // The length of the filter: no socket has one.
                    SO_ATTACH_FILTER => Vec::new(),
                    SO_PEERNAME => {
                        let name = core.peer_addr(id).map_err(|e| e.errno())?;
                        let name = names::bytes(name);
                        // As the kernel has it: all of the room is to be filled.
                        if name.len() < room {
                            return Err(Errno::EINVAL);
                        }
                        name
                    }
                    _ => return Err(Errno::ENOPROTOOPT),
                };
                bytes.truncate(room);
                return Ok(Value::of(bytes));
            }
        };
        Ok(Value::int(value, room))
    }
}

fn get_rds(core: &Node, id: SocketId, name: i32, room: usize) -> Result<Value, Errno> {
    match name {
        RDS_RECVERR | SO_RDS_TRANSPORT if room < 4 => Err(Errno::EINVAL),
        RDS_RECVERR => Ok(Value::int(core.recverr(id).map_err(|e| e.errno())?.into(), room)),
        SO_RDS_TRANSPORT => {
            let transport = core.transport(id).map_err(|e| e.errno())?;
            Ok(Value::int(transport.map_or(-1, |t| t as i32), room))
        }
        _ => Err(Errno::ENOPROTOOPT),
    }
}

/// The number of the table that an option is, if it is one.
pub(crate) fn table((level, name): (i32, i32)) -> Option<u32> {
    let is_table = level == SOL_RDS && (RDS_INFO_FIRST..=RDS_INFO_LAST).contains(&name);
    is_table.then(|| name.cast_unsigned())
}
