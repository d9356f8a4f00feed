//! Options of a socket, and the defaults of the administrator.

use core::ffi::c_int;
use std::fs;
use std::path::Path;

use bowline_verbs::DeviceAttr;

/// `SOL_RDMA` and its options.
pub(super) const SOL_RDMA: c_int = 0x10000;
const SQSIZE: c_int = 0;
const RQSIZE: c_int = 1;
const INLINE: c_int = 2;
const IOMAPSIZE: c_int = 3;
const ROUTE: c_int = 4;

/// Folder of the administrator's defaults, a number in each file.
const FOLDER: &str = "/etc/rdma/rsocket";
/// Bytes of a ring: at least two pages, for two halves, and no more than memory is for.
const RING_MIN: usize = 4096;
const RING_MAX: usize = 1 << 30;
/// Requests of a queue.
const QUEUE_MIN: usize = 2;
const QUEUE_MAX: usize = 32767;
/// Least bytes sent inline: what updates the peer's tables goes inline.
const INLINE_MIN: usize = 32;
/// What `TCP_MAXSEG` says: the payload of a packet on most networks.
const MAXSEG: c_int = 1024;

/// Options of a socket.
#[derive(Clone, Copy, Debug)]
pub(super) struct Options {
    pub(super) send_ring: usize,
    pub(super) receive_ring: usize,
    pub(super) sends: usize,
    pub(super) receives: usize,
    pub(super) inline: usize,
    pub(super) maps: u8,
    reuse: bool,
    oob_inline: bool,
    linger: [c_int; 2],
    no_delay: bool,
    v6_only: bool,
    keep_alive: bool,
}

/// A value that is read or written as numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Value {
    One(c_int),
    Two([c_int; 2]),
}

impl Options {
    /// The defaults: those of files of a folder, or the library's [RSK-12].
    fn from_folder(folder: &Path, is_datagram: bool) -> Self {
        let number = |name: &str| {
            let text = fs::read_to_string(folder.join(name)).ok()?;
            text.trim().parse::<usize>().ok()
        };
        let ring = |name| number(name).map_or(1 << 17, |size| size.clamp(RING_MIN, RING_MAX));
        let queue_default = if is_datagram { 64 } else { 384 };
        let queue = |name| number(name).map_or(queue_default, |n| n.clamp(QUEUE_MIN, QUEUE_MAX));
        Self {
            send_ring: ring("wmem_default"),
            receive_ring: ring("mem_default"),
            sends: queue("sqsize_default"),
            receives: queue("rqsize_default"),
            inline: number("inline_default").map_or(64, |size| size.max(INLINE_MIN)),
            maps: number("iomap_size").map_or(0, |maps| maps.min(u8::MAX.into()) as u8),
            reuse: false,
            oob_inline: false,
            linger: [1, 0],
            no_delay: false,
            v6_only: false,
            keep_alive: false,
        }
    }

    pub(super) fn new(is_datagram: bool) -> Self {
        Self::from_folder(Path::new(FOLDER), is_datagram)
    }

    /// The same with no more than a device has.
    pub(super) fn within(mut self, attr: &DeviceAttr, extra: usize) -> Self {
        let most = attr.max_qp_wr.min(attr.max_cqe / 2).saturating_sub(extra).max(QUEUE_MIN);
        self.sends = self.sends.min(most);
        self.receives = self.receives.min(most);
        self.inline = self.inline.clamp(INLINE_MIN, attr.max_inline.max(INLINE_MIN));
        self
    }

    pub(super) fn with_receives(self, receives: usize) -> Self {
        Self { receives, ..self }
    }

    /// Sets an option; `is_open`: no connection has been begun, so that sizes may change.
    ///
    /// # Errors
    /// `EINVAL`, and `EOPNOTSUPP` for what there is not.
    pub(super) fn set(
        &mut self,
        level: c_int,
        name: c_int,
        value: &[c_int],
        is_open: bool,
    ) -> Result<(), c_int> {
        let [one, ..] = *value else { return Err(libc::EINVAL) };
        let flag = one != 0;
        let ring = || usize::try_from(one).map(|size| size.clamp(RING_MIN, RING_MAX));
        let queue = || match usize::try_from(one) {
            Ok(size) if is_open => Ok(size.clamp(QUEUE_MIN, QUEUE_MAX)),
            _ => Err(libc::EINVAL),
        };
        match (level, name) {
            (libc::SOL_SOCKET, libc::SO_REUSEADDR) => self.reuse = flag,
            // Of a connection that there is, the rings are what they are.
            (libc::SOL_SOCKET, libc::SO_RCVBUF | libc::SO_SNDBUF) if !is_open => {}
            // As in the system, which takes twice the number for what it keeps beside the bytes.
            (libc::SOL_SOCKET, libc::SO_RCVBUF) => {
                self.receive_ring = ring().map_err(|_| libc::EINVAL)?.saturating_mul(2);
            }
            (libc::SOL_SOCKET, libc::SO_SNDBUF) => {
                self.send_ring = ring().map_err(|_| libc::EINVAL)?.saturating_mul(2);
            }
            (libc::SOL_SOCKET, libc::SO_LINGER) => match *value {
                [on, seconds, ..] if seconds >= 0 => self.linger = [on, seconds],
                _ => return Err(libc::EINVAL),
            },
            (libc::SOL_SOCKET, libc::SO_KEEPALIVE) => self.keep_alive = flag,
            (libc::SOL_SOCKET, libc::SO_OOBINLINE) => self.oob_inline = flag,
            (libc::IPPROTO_TCP, libc::TCP_NODELAY) => self.no_delay = flag,
            // The size of packets is the path's.
            (libc::IPPROTO_TCP, libc::TCP_MAXSEG) => {}
            (libc::IPPROTO_IPV6, libc::IPV6_V6ONLY) => self.v6_only = flag,
            (SOL_RDMA, SQSIZE) => self.sends = queue()?,
            (SOL_RDMA, RQSIZE) => self.receives = queue()?,
            (SOL_RDMA, INLINE) => self.inline = queue()?.max(INLINE_MIN),
            (SOL_RDMA, IOMAPSIZE) => match u8::try_from(one) {
                Ok(maps) if is_open => self.maps = maps,
                _ => return Err(libc::EINVAL),
            },
            _ => return Err(libc::EOPNOTSUPP),
        }
        Ok(())
    }

    /// Returns an option.
    ///
    /// # Errors
    /// `EINVAL` for a route, of which RoCE has no record, and `EOPNOTSUPP` for what there is not.
    pub(super) fn get(&self, level: c_int, name: c_int) -> Result<Value, c_int> {
        let flag = |flag: bool| Ok(Value::One(flag.into()));
        let size = |size: usize| Ok(Value::One(c_int::try_from(size).unwrap_or(c_int::MAX)));
        match (level, name) {
            (libc::SOL_SOCKET, libc::SO_REUSEADDR) => flag(self.reuse),
            (libc::SOL_SOCKET, libc::SO_RCVBUF) => size(self.receive_ring),
            (libc::SOL_SOCKET, libc::SO_SNDBUF) => size(self.send_ring),
            (libc::SOL_SOCKET, libc::SO_LINGER) => Ok(Value::Two(self.linger)),
            (libc::SOL_SOCKET, libc::SO_KEEPALIVE) => flag(self.keep_alive),
            (libc::SOL_SOCKET, libc::SO_OOBINLINE) => flag(self.oob_inline),
            (libc::IPPROTO_TCP, libc::TCP_NODELAY) => flag(self.no_delay),
            (libc::IPPROTO_TCP, libc::TCP_MAXSEG) => Ok(Value::One(MAXSEG)),
            (libc::IPPROTO_IPV6, libc::IPV6_V6ONLY) => flag(self.v6_only),
            (SOL_RDMA, SQSIZE) => size(self.sends),
            (SOL_RDMA, RQSIZE) => size(self.receives),
            (SOL_RDMA, INLINE) => size(self.inline),
            (SOL_RDMA, IOMAPSIZE) => size(self.maps.into()),
            (SOL_RDMA, ROUTE) => Err(libc::EINVAL),
            _ => Err(libc::EOPNOTSUPP),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// [RSK-12]
    #[test]
    fn what_is_set_is_returned_and_the_rest_is_refused() {
        let mut options = Options::from_folder(Path::new("/nowhere"), false);
        let get = |options: &Options, level, name| options.get(level, name);
        assert_eq!(get(&options, SOL_RDMA, SQSIZE), Ok(Value::One(384)));
        assert_eq!(options.set(SOL_RDMA, SQSIZE, &[16], true), Ok(()));
        assert_eq!(get(&options, SOL_RDMA, SQSIZE), Ok(Value::One(16)));
        assert_eq!(options.set(SOL_RDMA, RQSIZE, &[16], false), Err(libc::EINVAL));
        assert_eq!(options.set(libc::SOL_SOCKET, libc::SO_RCVBUF, &[8192], true), Ok(()));
        assert_eq!(get(&options, libc::SOL_SOCKET, libc::SO_RCVBUF), Ok(Value::One(16384)));
        assert_eq!(options.set(libc::SOL_SOCKET, libc::SO_LINGER, &[1, 3], true), Ok(()));
        assert_eq!(get(&options, libc::SOL_SOCKET, libc::SO_LINGER), Ok(Value::Two([1, 3])));
        assert_eq!(options.set(libc::SOL_SOCKET, libc::SO_LINGER, &[1], true), Err(libc::EINVAL));
        let unknown = options.set(libc::SOL_SOCKET, libc::SO_BROADCAST, &[1], true);
        assert_eq!(unknown, Err(libc::EOPNOTSUPP));
        assert_eq!(get(&options, SOL_RDMA, ROUTE), Err(libc::EINVAL));
        assert_eq!(options.set(SOL_RDMA, IOMAPSIZE, &[256], true), Err(libc::EINVAL));
    }
}
