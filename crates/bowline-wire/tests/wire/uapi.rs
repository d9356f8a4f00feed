//! The socket interface: numbers of the specification, arguments, and chains of control messages.

use bowline_wire::rds::uapi::*;

const SPEC: [&str; 2] = [
    include_str!("../../../../docs/spec/rds.md"),
    include_str!("../../../../docs/spec/rds-rdma.md"),
];

/// Tells whether a row of a table of the specification has these two cells side by side.
fn says(first: &str, second: &str) -> bool {
    SPEC.iter().any(|text| text.contains(&format!("| {first} | {second}")))
}

#[test]
fn numbers_are_those_of_the_specification() {
    for (name, number) in [
        ("AF_RDS / PF_RDS", AF_RDS),
        ("SOL_RDS", SOL_RDS),
        ("RDS_CANCEL_SENT_TO", RDS_CANCEL_SENT_TO),
        ("RDS_GET_MR", RDS_GET_MR),
        ("RDS_FREE_MR", RDS_FREE_MR),
        ("RDS_RECVERR", RDS_RECVERR),
        ("RDS_CONG_MONITOR", RDS_CONG_MONITOR),
        ("RDS_GET_MR_FOR_DEST", RDS_GET_MR_FOR_DEST),
        ("SO_RDS_TRANSPORT", SO_RDS_TRANSPORT),
        ("SO_RDS_MSG_RXPATH_LATENCY", SO_RDS_MSG_RXPATH_LATENCY),
        ("RDS_CMSG_RDMA_ARGS", RDS_CMSG_RDMA_ARGS),
        ("RDS_CMSG_RDMA_DEST", RDS_CMSG_RDMA_DEST),
        ("RDS_CMSG_RDMA_MAP", RDS_CMSG_RDMA_MAP),
        ("RDS_CMSG_RDMA_STATUS", RDS_CMSG_RDMA_STATUS),
        ("RDS_CMSG_CONG_UPDATE", RDS_CMSG_CONG_UPDATE),
        ("RDS_CMSG_ATOMIC_FADD", RDS_CMSG_ATOMIC_FADD),
        ("RDS_CMSG_ATOMIC_CSWP", RDS_CMSG_ATOMIC_CSWP),
        ("RDS_CMSG_MASKED_ATOMIC_FADD", RDS_CMSG_MASKED_ATOMIC_FADD),
        ("RDS_CMSG_MASKED_ATOMIC_CSWP", RDS_CMSG_MASKED_ATOMIC_CSWP),
        ("RDS_CMSG_RXPATH_LATENCY", RDS_CMSG_RXPATH_LATENCY),
        ("RDS_CMSG_ZCOPY_COOKIE", RDS_CMSG_ZCOPY_COOKIE),
        ("RDS_CMSG_ZCOPY_COMPLETION", RDS_CMSG_ZCOPY_COMPLETION),
        ("RDS_MAX_ZCOOKIES", RDS_MAX_ZCOOKIES as i32),
    ] {
        assert!(says(name, &format!("{number} ")), "{name} is not {number}");
    }
    for (name, number) in [("SIOCRDSSETTOS", SIOCRDSSETTOS), ("SIOCRDSGETTOS", SIOCRDSGETTOS)] {
        assert!(says(name, &format!("0x{number:X} ")), "{name} is not {number:x}");
    }
    for (name, flag) in [
        ("RDS_RDMA_READWRITE", RDS_RDMA_READWRITE),
        ("RDS_RDMA_FENCE", RDS_RDMA_FENCE),
        ("RDS_RDMA_USE_ONCE", RDS_RDMA_USE_ONCE),
        ("RDS_RDMA_NOTIFY_ME", RDS_RDMA_NOTIFY_ME),
        ("RDS_RDMA_SILENT", RDS_RDMA_SILENT),
    ] {
        assert!(says(name, &format!("0x{flag:02x} ")), "{name} is not {flag:x}");
    }
    for (name, len) in [
        ("rds_iovec", RDS_IOVEC_LEN),
        ("rds_get_mr_args", RDS_GET_MR_ARGS_LEN),
        ("rds_get_mr_for_dest_args", RDS_GET_MR_FOR_DEST_ARGS_LEN),
        ("rds_free_mr_args", RDS_FREE_MR_ARGS_LEN),
        ("rds_rdma_args", RDS_RDMA_ARGS_LEN),
        ("rds_rdma_notify", RDS_RDMA_NOTIFY_LEN),
    ] {
        assert!(says(name, &format!("{len} ")), "{name} has not {len} bytes");
    }
    assert_eq!((RDS_ATOMIC_ARGS_LEN, RDS_CMSG_RX_TRACE_LEN), (72, 32));
    assert_eq!((RDS_ZCOPY_COOKIES_LEN, RDS_INFO_COUNTER_LEN), (36, 40));
    assert_eq!((RDS_INFO_FIRST, RDS_INFO_LAST), (10_000, 10_017));
    assert_eq!(cmsg_space(RDS_ZCOPY_COOKIES_LEN), 56, "[ZC-6]");
    assert_eq!(cmsg_space(RDS_RDMA_NOTIFY_LEN), 32, "[RDMA-25]");
}

fn numbered(len: usize) -> Vec<u8> {
    (1..=len as u64 / 8).flat_map(u64::to_ne_bytes).collect()
}

#[test]
fn arguments_lie_where_the_specification_says() {
    let piece = |addr, bytes| RdsIovec { addr, bytes };
    let get = GetMrArgs { addr: 1, bytes: 2, cookie_addr: 3, flags: 4 };
    assert_eq!(GetMrArgs::parse(&numbered(RDS_GET_MR_ARGS_LEN)), Some(get));
    let rdma = RdmaArgs {
        cookie: 1,
        remote_vec: piece(2, 3),
        local_vec_addr: 4,
        nr_local: 5,
        flags: 6,
        user_token: 7,
    };
    assert_eq!(RdmaArgs::parse(&numbered(RDS_RDMA_ARGS_LEN)), Some(rdma));
    let atomic = AtomicArgs {
        cookie: 1,
        local_addr: 2,
        remote_addr: 3,
        operands: [4, 5, 6, 7],
        flags: 8,
        user_token: 9,
    };
    assert_eq!(AtomicArgs::parse(&numbered(RDS_ATOMIC_ARGS_LEN)), Some(atomic));
    // Longer ones are taken, shorter ones are not.
    assert_eq!(GetMrArgs::parse(&numbered(RDS_GET_MR_ARGS_LEN + 8)), Some(get));
    assert_eq!(GetMrArgs::parse(&numbered(RDS_GET_MR_ARGS_LEN)[1..]), None);
    assert_eq!(RdmaArgs::parse(&numbered(RDS_RDMA_ARGS_LEN)[1..]), None);
    assert_eq!(AtomicArgs::parse(&numbered(RDS_ATOMIC_ARGS_LEN)[1..]), None);
    let pieces: Vec<_> = RdsIovec::parse_all(&numbered(40)).collect();
    assert_eq!(pieces, [piece(1, 2), piece(3, 4)]);
    assert_eq!(free_mr_cookie(&numbered(16)), Some(1));
    assert_eq!(free_mr_cookie(&numbered(24)), None);
    assert_eq!(free_mr_cookie(&numbered(8)), None);
}

#[test]
fn a_chain_comes_out_as_it_went_in() {
    let all = [(SOL_RDS, 12, &b"four"[..]), (SOL_SOCKET, 29, b"0123456789abcdef"), (-1, -2, b"")];
    let mut bytes = Vec::new();
    for (level, kind, data) in all {
        assert!(put_cmsg(&mut bytes, usize::MAX, level, kind, data));
    }
    assert_eq!(bytes.len(), all.iter().map(|(.., data)| cmsg_space(data.len())).sum());
    let mut walk = Cmsgs::new(&bytes);
    let read: Vec<_> = walk.by_ref().collect();
    assert_eq!(read, all.map(|(level, kind, data)| Ok(Cmsg { level, kind, data })));
    assert!(walk.rest().is_empty());
    // A program need not fill up the last one.
    assert_eq!(Cmsgs::new(&bytes[..20]).count(), 1);
}

#[test]
fn hostile_chains_end_where_they_lie() {
    let mut good = Vec::new();
    put_cmsg(&mut good, usize::MAX, SOL_RDS, 2, &[7; 8]);
    let first = Ok(Cmsg { level: SOL_RDS, kind: 2, data: &[7; 8] });
    for len in [0, 1, 15, 25, 1 << 32, u64::MAX - 7, u64::MAX] {
        let mut bytes = [&good[..], &good].concat();
        bytes[24..32].copy_from_slice(&len.to_ne_bytes());
        let mut walk = Cmsgs::new(&bytes);
        assert_eq!(walk.next(), Some(first), "{len}");
        assert_eq!(walk.next(), Some(Err(MalformedCmsg)), "{len}");
        assert_eq!(walk.next(), None, "{len}");
    }
    // Too few bytes for a head are no control message, but seen.
    let bytes = [&good[..], &[0; 15]].concat();
    let mut walk = Cmsgs::new(&bytes);
    assert_eq!(walk.by_ref().collect::<Vec<_>>(), [first]);
    assert_eq!(walk.rest(), [0; 15]);
    assert_eq!(Cmsgs::new(b"").next(), None);
    // Heads alone go on: each walk ends.
    let mut heads = Vec::new();
    (0..100).for_each(|_| _ = put_cmsg(&mut heads, usize::MAX, 0, 0, b""));
    assert_eq!(Cmsgs::new(&heads).count(), 100);
}

#[test]
fn what_does_not_fit_is_cut() {
    for (room, len, whole) in
        [(0, 0, false), (15, 0, false), (16, 16, false), (23, 23, false), (24, 24, true)]
    {
        let mut bytes = Vec::new();
        assert_eq!(put_cmsg(&mut bytes, room, SOL_RDS, 5, &[7; 8]), whole, "{room}");
        assert_eq!(bytes.len(), len, "{room}");
        if len > 0 {
            let data = vec![7; len - CMSGHDR_LEN];
            let cut = Cmsg { level: SOL_RDS, kind: 5, data: &data };
            assert_eq!(Cmsgs::new(&bytes).next(), Some(Ok(cut)), "{room}");
        }
    }
    // There is room for the data, and not for what aligns the next.
    let mut bytes = Vec::new();
    assert!(put_cmsg(&mut bytes, 22, SOL_RDS, 12, &[7; 4]));
    assert_eq!(bytes.len(), 22);
}
