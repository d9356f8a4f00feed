//! Memory of this process that a call refers to: the ranges that a node may use, and whether this
//! process itself may write there. The check is needed because the node writes through
//! `/proc/self/mem`, which ignores write protection; a kernel would not.

use core::ffi::c_int;

use bowline_wire::rds::uapi::*;

use crate::agent::own;
use crate::system;

/// Control messages with the time at which a message arrived.
const TIMES: [c_int; 4] = [SO_TIMESTAMP, SO_TIMESTAMPNS, SO_TIMESTAMP_NEW, SO_TIMESTAMPNS_NEW];

/// Longest memory that is checked, in bytes; the node refuses more than 1 MiB.
const LEN_MAX: u64 = 2 << 20;
const PIECES_MAX: u64 = 1024;
/// Most ranges of one call. The node refuses any call with more: a call has at most one operation
/// and one atomic.
const RANGES_MAX: usize = 4096;

/// Access to a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Read.
    Read = 1,
    /// Write.
    Write = 2,
    /// Both.
    Both = 3,
}

impl Access {
    const fn includes(self, other: Self) -> bool {
        self as u8 & other as u8 == other as u8
    }
}

/// How long the node may use a range, unless the socket is closed or the node returns the range
/// before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stays {
    /// As long as the call.
    Call,
    /// Until its key is freed (`RDS_FREE_MR`).
    Region,
    /// Until the operation has ended.
    Operation,
}

/// A range of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// Address of the first byte.
    pub at: u64,
    /// Bytes, at least one; they do not wrap around.
    pub len: u64,
    /// Access that the call gives the node.
    pub access: Access,
    /// How long.
    pub stays: Stays,
}

/// The memory that one call refers to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reach {
    ranges: Vec<Range>,
    /// Where the key of a region is stored; 0 for nowhere.
    key_at: u64,
}

impl Reach {
    /// Returns the memory that an option refers to, if any.
    pub fn for_option(level: c_int, name: c_int, value: &[u8]) -> Option<Self> {
        let args = match (level, name, value.len()) {
            (SOL_RDS, RDS_GET_MR, RDS_GET_MR_ARGS_LEN) => value,
            (SOL_RDS, RDS_GET_MR_FOR_DEST, RDS_GET_MR_FOR_DEST_ARGS_LEN) => {
                value.get(SOCKADDR_STORAGE_LEN..)?
            }
            _ => return None,
        };
        let mut reach = Self::default();
        reach.region(GetMrArgs::parse(args)?);
        Some(reach)
    }

    /// Returns the memory that control messages refer to, if any.
    pub fn for_control(bytes: &[u8]) -> Option<Self> {
        let mut reach = None::<Self>;
        let cmsgs = Cmsgs::new(bytes).map_while(Result::ok);
        for Cmsg { kind, data, .. } in cmsgs.filter(|cmsg| cmsg.level == SOL_RDS) {
            match kind {
                RDS_CMSG_RDMA_MAP => {
                    if let Some(args) = GetMrArgs::parse(data) {
                        reach.get_or_insert_default().region(args);
                    }
                }
                RDS_CMSG_RDMA_ARGS => {
                    if let Some(args) = RdmaArgs::parse(data) {
                        reach.get_or_insert_default().pieces(args);
                    }
                }
                RDS_CMSG_ATOMIC_FADD..=RDS_CMSG_MASKED_ATOMIC_CSWP => {
                    if let Some(AtomicArgs { local_addr, .. }) = AtomicArgs::parse(data) {
                        let reach = reach.get_or_insert_default();
                        reach.add(local_addr, 8, Access::Write, Stays::Operation);
                    }
                }
                _ => {}
            }
        }
        reach
    }

    /// The ranges, none of which is empty or wraps around.
    pub fn ranges(&self) -> &[Range] {
        &self.ranges
    }

    /// Address at which the key of a region is stored, if any.
    pub(crate) fn key_at(&self) -> Option<u64> {
        Some(self.key_at).filter(|at| *at != 0)
    }

    /// Tells whether this process may write to all ranges that the node writes to. Empty ranges,
    /// and ranges so long that the node refuses them, are not checked.
    pub fn is_writable(&self) -> bool {
        let writes = |range: &&Range| range.access.includes(Access::Write);
        self.ranges.iter().filter(writes).all(|range| system::populate(range.at, range.len, true))
    }

    fn add(&mut self, at: u64, len: u64, access: Access, stays: Stays) {
        let is_sound = len != 0 && len <= LEN_MAX && at.checked_add(len).is_some();
        if !is_sound || self.ranges.len() == RANGES_MAX {
            return;
        }
        // Pieces are often neighbours.
        if let Some(last) = self.ranges.last_mut()
            && (last.at + last.len, last.access, last.stays) == (at, access, stays)
        {
            last.len += len;
        } else {
            self.ranges.push(Range { at, len, access, stays });
        }
    }

    /// Memory to register. Peers may read and write a region whatever its flags say [RMR-6].
    fn region(&mut self, args: GetMrArgs) {
        if self.ranges.iter().any(|range| range.stays == Stays::Region) {
            return; // nodes take one in a call, so there is one key
        }
        self.add(args.addr, args.bytes, Access::Both, Stays::Region);
        self.key_at = args.cookie_addr;
        if self.key_at != 0 {
            self.add(self.key_at, 8, Access::Write, Stays::Call);
        }
    }

    /// An operation, with a vector of pieces of memory.
    fn pieces(&mut self, args: RdmaArgs) {
        let RdmaArgs { local_vec_addr: vector, nr_local: count, flags, .. } = args;
        if count == 0 || count > PIECES_MAX {
            return;
        }
        let mut pieces = vec![0; RDS_IOVEC_LEN * count as usize];
        self.add(vector, pieces.len() as u64, Access::Read, Stays::Call);
        if own::read(system::getpid(), vector, &mut pieces).is_err() {
            return; // the node finds no vector
        }
        let writes_to_peer = flags & RDS_RDMA_READWRITE != 0;
        let access = if writes_to_peer { Access::Read } else { Access::Write };
        for RdsIovec { addr, bytes } in RdsIovec::parse_all(&pieces) {
            self.add(addr, bytes, access, Stays::Operation);
        }
    }
}

/// Returns the key of the region that an option frees, if it frees one.
pub(crate) fn freed(level: c_int, name: c_int, value: &[u8]) -> Option<u64> {
    let frees = (level, name) == (SOL_RDS, RDS_FREE_MR);
    free_mr_cookie(value).filter(|cookie| frees && *cookie != 0)
}

/// Tells whether the control messages of a received message are those of RDS. Others, such as
/// descriptors, must not come from a node.
pub(crate) fn is_control_of_rds(bytes: &[u8]) -> bool {
    let is_of_rds = |cmsg: Cmsg<'_>| match cmsg.level {
        SOL_RDS => true,
        SOL_SOCKET => TIMES.contains(&cmsg.kind),
        _ => false,
    };
    let mut all = Cmsgs::new(bytes);
    all.by_ref().all(|cmsg| cmsg.is_ok_and(is_of_rds)) && all.rest().is_empty()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cmsg(kind: c_int, words: &[u64]) -> Vec<u8> {
        let data: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        let mut bytes = Vec::new();
        put_cmsg(&mut bytes, usize::MAX, SOL_RDS, kind, &data);
        bytes
    }

    fn get_mr(words: [u64; 4]) -> Vec<u8> {
        words.iter().flat_map(|word| word.to_ne_bytes()).collect()
    }

    fn option(level: c_int, name: c_int, value: &[u8]) -> bool {
        Reach::for_option(level, name, value).is_none_or(|reach| reach.is_writable())
    }

    fn control(bytes: &[u8]) -> bool {
        Reach::for_control(bytes).is_none_or(|reach| reach.is_writable())
    }

    // tests [RDMA-3] [RDMA-12] [ATOM-4]
    #[test]
    fn memory_that_may_not_be_written_is_seen() {
        static CONSTANT: [u64; 64] = [7; 64];
        let mut own = [0_u64; 64];
        let (own, constant) = ((&raw mut own) as u64, (&raw const CONSTANT) as u64);
        let get = |at, key_at| option(SOL_RDS, RDS_GET_MR, &get_mr([at, 64, key_at, 0]));
        assert!(get(own, 0) && get(own, own) && get(own, own + 128));
        assert!(!get(constant, 0) && !get(own, constant) && !get(4096, 0));
        assert!(option(1, RDS_GET_MR, &[0; 32]) && option(SOL_RDS, RDS_GET_MR, &[0; 31]));
        assert!(control(&cmsg(RDS_CMSG_RDMA_MAP, &[own, 64, 0, 0])));
        assert!(!control(
            &[cmsg(12, &[7]), cmsg(RDS_CMSG_RDMA_MAP, &[constant, 64, 0, 0])].concat()
        ));
        let pieces = [own, 64, constant, 64];
        let vector = (&raw const pieces) as u64;
        let args = |count, flags| cmsg(RDS_CMSG_RDMA_ARGS, &[0, 0, 128, vector, count, flags, 0]);
        assert!(
            control(&args(1, 0)) && !control(&args(2, 0)) && control(&args(2, RDS_RDMA_READWRITE))
        );
        assert!(
            control(&cmsg(RDS_CMSG_RDMA_ARGS, &[0, 0, 128, 4096, 1, 0, 0])),
            "the node finds no vector"
        );
        assert!(!control(&cmsg(7, &[0, constant, 0, 0, 0, 0, 0, 0, 0])));
        assert!(control(&cmsg(7, &[0, own, 0, 0, 0, 0, 0, 0, 0])) && control(b"too short"));
    }

    // tests [RMR-12]
    #[test]
    fn a_call_is_about_the_memory_that_its_arguments_name_and_no_other() {
        use Access::{Both, Read, Write};
        use Stays::{Call, Operation, Region};
        let range = |at, len, access, stays| Range { at, len, access, stays };
        let got = |value: [u64; 4]| Reach::for_option(SOL_RDS, RDS_GET_MR, &get_mr(value)).unwrap();
        let region = [range(0x1234_5000, 100, Both, Region), range(0x9008, 8, Write, Call)];
        assert_eq!(got([0x1234_5000, 100, 0x9008, 0]).ranges(), region);
        assert_eq!(got([0x1234_5000, 100, 0, 0]).ranges(), &region[..1]);
        for (at, len) in [(5, 0), (u64::MAX - 4, 8), (4096, LEN_MAX + 1)] {
            assert_eq!(got([at, len, 0, 0]), Reach::default(), "refused by the node");
        }
        // The node refuses several; a call has one key.
        let map = |at| cmsg(RDS_CMSG_RDMA_MAP, &[at, 100, 0x9008, 0]);
        let two = Reach::for_control(&[map(0x1234_5000), map(0x5678_5000)].concat()).unwrap();
        assert_eq!(two.ranges(), region);

        let dest = [&[7; 128][..], &get_mr([0x1234_5000, 100, 0x9008, 0])].concat();
        let for_dest = Reach::for_option(SOL_RDS, RDS_GET_MR_FOR_DEST, &dest).unwrap();
        assert_eq!(for_dest.ranges(), region);
        assert_eq!(Reach::for_option(SOL_RDS, 3, &[0; 16]), None);
        assert_eq!(Reach::for_control(&cmsg(2, &[7])), None);

        let pieces = [4096_u64, 10, 4106, 20, 9000, 5, 9100, 0, 9200, u64::MAX];
        let vector = (&raw const pieces) as u64;
        let args = |count, flags| {
            Reach::for_control(&cmsg(RDS_CMSG_RDMA_ARGS, &[0, 0, 128, vector, count, flags, 0]))
                .unwrap()
        };
        let expect = |count: u64, access| {
            let vector = range(vector, 16 * count, Read, Call);
            let [first, second] =
                [(4096, 30), (9000, 5)].map(|(at, len)| range(at, len, access, Operation));
            [vector, first, second]
        };
        assert_eq!(args(5, 0).ranges(), expect(5, Write));
        assert_eq!(args(3, RDS_RDMA_READWRITE).ranges(), expect(3, Read));
        assert_eq!(args(1025, RDS_RDMA_READWRITE), Reach::default());
        let atomic = Reach::for_control(&cmsg(6, &[0, 0x7000, 0, 0, 0, 0, 0, 0, 0])).unwrap();
        assert_eq!(atomic.ranges(), [range(0x7000, 8, Write, Operation)]);
    }

    #[test]
    fn a_program_gives_memory_for_what_is_about_memory_only() {
        let option = |level, name, len| Reach::for_option(level, name, &vec![7; len]).is_some();
        assert!(option(SOL_RDS, RDS_GET_MR, 32) && option(SOL_RDS, RDS_GET_MR_FOR_DEST, 160));
        assert!(
            !option(1, RDS_GET_MR, 32)
                && !option(SOL_RDS, 1, 32)
                && !option(SOL_RDS, RDS_GET_MR, 31)
        );
        let control = |bytes: &[u8]| Reach::for_control(bytes).is_some();
        for kind in [RDS_CMSG_RDMA_ARGS, RDS_CMSG_RDMA_MAP, 6, 7, 8, 9] {
            let about = [cmsg(12, &[7]), cmsg(kind, &[0; 9])].concat();
            assert!(control(&about), "{kind}");
        }
        let mut other = cmsg(RDS_CMSG_RDMA_MAP, &[0; 4]);
        other[8] = 1;
        assert!(
            !control(&other)
                && !control(&cmsg(2, &[7]))
                && !control(&cmsg(RDS_CMSG_RDMA_MAP, &[0; 3]))
        );
        assert!(!control(b"") && !control(&[0xff; 64]));
    }

    #[test]
    fn a_key_that_is_freed_is_known() {
        let value = [7_u64.to_ne_bytes(), [0xff; 8]].concat();
        assert_eq!(freed(SOL_RDS, RDS_FREE_MR, &value), Some(7));
        assert_eq!(freed(1, RDS_FREE_MR, &value), None);
        assert_eq!(freed(SOL_RDS, RDS_GET_MR, &value), None);
        assert_eq!(freed(SOL_RDS, RDS_FREE_MR, &value[..15]), None);
        assert_eq!(freed(SOL_RDS, RDS_FREE_MR, &[0; 16]), None, "no key, and all that are unused");
    }

    #[test]
    fn a_node_gives_no_control_messages_but_those_of_rds() {
        let time = |kind: u8| {
            let mut bytes = cmsg(kind.into(), &[0; 2]);
            bytes[8..12].copy_from_slice(&1_u32.to_ne_bytes());
            bytes
        };
        assert!(is_control_of_rds(b"") && is_control_of_rds(&[cmsg(4, &[1]), time(29)].concat()));
        assert!(!is_control_of_rds(&time(1)), "SCM_RIGHTS");
        assert!(!is_control_of_rds(&[cmsg(4, &[1]), time(2)].concat()), "SCM_CREDENTIALS");
        for len in [0_u64, 15, 41, u64::MAX] {
            let mut lies = cmsg(4, &[1, 2, 3]);
            lies[..8].copy_from_slice(&len.to_ne_bytes());
            assert!(!is_control_of_rds(&lies), "{len}");
        }
        assert!(!is_control_of_rds(&[0; 8]));
    }
}
