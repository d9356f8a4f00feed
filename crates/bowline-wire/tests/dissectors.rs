//! The dissectors for Wireshark agree with this crate: their tables in `bowline.lua` with what the
//! crate reads and writes, and what tshark shows of captures with what the crate prints.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use bowline_base::Errno;
use bowline_wire::rds::{
    BowlineConnect, ConnectData, EXT_AREA_LEN, Extensions, Flags, HEADER_LEN, Header, MAP_LEN,
    MapView, PROBE_PORT, RDMA_PORT_V4, RDMA_PORT_V6, TCP_PORT, Version,
};
use bowline_wire::rnbd::{self, Access, Io, IoFlags, OpenRsp};
use bowline_wire::rtrs::{
    ConAnswer, ConReq, ConRsp, Desc, Geometry, Imm, MAGIC, READ_HDR_MAX, RkeyRsp, SessionName,
    Uuid, emit_info_req, emit_info_rsp, read_hdr, write_hdr,
};

const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../packaging/wireshark/bowline.lua");
const CAPTURES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/captures");

/// One cell of a table: a number, or a text or name.
#[derive(Clone, Debug, PartialEq)]
enum Cell {
    Number(u64),
    Text(String),
}

impl Cell {
    fn number(&self) -> u64 {
        match self {
            Self::Number(number) => *number,
            Self::Text(text) => panic!("{text:?} instead of a number"),
        }
    }

    fn text(&self) -> &str {
        match self {
            Self::Text(text) => text,
            Self::Number(number) => panic!("{number} instead of a text"),
        }
    }
}

fn script() -> String {
    std::fs::read_to_string(SCRIPT).expect("the dissectors")
}

fn number(text: &str) -> Option<u64> {
    match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16).ok(),
        None => text.parse().ok(),
    }
}

/// The rows of `local NAME = {`, one a line, without what else a label may say.
fn table(name: &str) -> Vec<Vec<Cell>> {
    let script = script();
    let (_, rest) = script.split_once(&format!("local {name} = {{\n")).expect(name);
    let (body, _) = rest.split_once("\n}").expect(name);
    body.lines()
        .map(|line| {
            let row = line.trim().strip_prefix("{ ").and_then(|row| row.strip_suffix(" },"));
            let row = row.unwrap_or_else(|| panic!("{name} has a line {line:?}"));
            // No text of a table that is looked at has a comma but labels, which are not compared.
            row.split(", ")
                .map(|cell| {
                    let text = cell.trim_matches('"');
                    number(cell).map_or_else(|| Cell::Text(text.into()), Cell::Number)
                })
                .collect()
        })
        .collect()
}

/// The number of `local NAME = 5`.
fn constant(name: &str) -> u64 {
    let script = script();
    let (_, rest) = script.split_once(&format!("local {name} = ")).expect(name);
    number(rest.lines().next().expect("a line")).expect(name)
}

/// The rows of a table of values and their names.
fn names(table_name: &str) -> BTreeMap<u64, String> {
    let rows = table(table_name);
    let names: BTreeMap<_, _> =
        rows.iter().map(|row| (row[0].number(), row[1].text().to_owned())).collect();
    assert_eq!(names.len(), rows.len(), "{table_name} has a value twice");
    names
}

fn owned<const N: usize>(pairs: [(u64, &str); N]) -> BTreeMap<u64, String> {
    pairs.into_iter().map(|(value, name)| (value, name.to_owned())).collect()
}

/// What a field has: a number, or bytes. Of text the field may have more, which is zero.
enum Value {
    Int(u64),
    Bytes(Vec<u8>),
}

impl<T: Into<u64>> From<T> for Value {
    fn from(value: T) -> Self {
        Self::Int(value.into())
    }
}

#[derive(Clone, Copy)]
enum Order {
    Big,
    Little,
}

/// Checks that the rows of a layout are those fields, no more and no fewer, and that each finds its
/// value in `bytes`, which this crate has written of such values.
fn layout<const N: usize>(name: &str, order: Order, bytes: &[u8], fields: [(&str, Value); N]) {
    let mut fields: BTreeMap<_, _> = fields.into_iter().collect();
    assert_eq!(fields.len(), N);
    for row in table(name) {
        let (field, at, len) = (row[0].text(), row[1].number() as usize, row[2].number() as usize);
        let value = fields.remove(field).unwrap_or_else(|| panic!("{name} has a row {field}"));
        let found = &bytes[at..at + len];
        match value {
            Value::Bytes(value) => {
                let (head, zeros) = found.split_at(value.len());
                assert_eq!(head, value, "{name}: {field}");
                assert!(zeros.iter().all(|byte| *byte == 0), "{name}: {field} is longer");
            }
            Value::Int(value) => {
                let shift = |sum: u64, byte: &u8| sum << 8 | u64::from(*byte);
                let found = match order {
                    Order::Big => found.iter().fold(0, shift),
                    Order::Little => found.iter().rev().fold(0, shift),
                };
                assert_eq!(found, value, "{name}: {field}");
            }
        }
    }
    let missing: Vec<_> = fields.keys().collect();
    assert!(missing.is_empty(), "{name} has no rows for {missing:?}");
}

#[test]
fn constants_are_those_of_this_crate() {
    for (name, value) in [
        ("RDS_TCP_PORT", TCP_PORT.into()),
        ("RDS_RDMA_PORT_V4", RDMA_PORT_V4.into()),
        ("RDS_RDMA_PORT_V6", RDMA_PORT_V6.into()),
        ("RDS_HEADER_LEN", HEADER_LEN as u64),
        ("RDS_MAP_LEN", MAP_LEN as u64),
        ("RDS_PROBE_PORT", PROBE_PORT.into()),
        ("RTRS_MAGIC", MAGIC.into()),
    ] {
        assert_eq!(constant(name), value, "{name}");
    }
}

#[test]
fn the_header_of_rds_is_read_where_it_is_written() {
    let bytes: [u8; HEADER_LEN] = std::array::from_fn(|at| at as u8 + 0x91);
    let header = Header::from_bytes(&bytes);
    let fields = [
        ("sequence", header.sequence.into()),
        ("ack", header.ack.into()),
        ("len", header.len.into()),
        ("sport", header.sport.into()),
        ("dport", header.dport.into()),
        ("flags", header.flags.bits().into()),
        ("credit", header.credit.into()),
        ("padding", u32::from_be_bytes([bytes[26], bytes[27], bytes[28], bytes[29]]).into()),
        ("csum", header.csum.into()),
        ("ext", Value::Bytes(header.ext.to_vec())),
    ];
    layout("RDS_HEADER", Order::Big, &bytes, fields);
    // The padding is all that this crate does not read.
    let mut other = bytes;
    other[26..30].fill(0);
    assert_eq!(Header::from_bytes(&other), header);
    let covered: u64 = table("RDS_HEADER").iter().map(|row| row[2].number()).sum();
    assert_eq!(covered, HEADER_LEN as u64);
}

#[test]
fn flags_of_rds_have_the_same_names() {
    let named = (0..8).map(|bit| 1 << bit).filter_map(|bit: u8| {
        let name = Flags::from_bits(bit).to_string();
        (!name.starts_with("0x")).then_some((bit.into(), name))
    });
    assert_eq!(names("RDS_FLAGS"), named.collect());
}

#[test]
fn extensions_of_rds_have_the_same_types_names_and_lengths() {
    let mut known = BTreeSet::new();
    for kind in 0..=u8::MAX {
        let mut area = [0; EXT_AREA_LEN];
        area[0] = kind;
        let mut extensions = Extensions::new(&area);
        if let Some(extension) = extensions.next() {
            let name = extension.to_string().split(' ').next().expect("a word").to_owned();
            let len = EXT_AREA_LEN - 1 - extensions.rest().len();
            known.insert((u64::from(kind), name, len as u64));
        }
    }
    let rows = table("RDS_EXTENSIONS");
    let rows = rows.iter().map(|row| (row[0].number(), row[1].text().into(), row[2].number()));
    assert_eq!(rows.collect::<BTreeSet<_>>(), known);
}

#[test]
fn private_data_of_rds_over_rdma_is_read_where_it_is_written() {
    for (address, width) in [("192.0.2.1", 4), ("2001:db8::1", 16)] {
        let address = address.parse().expect("an address");
        let data = ConnectData {
            tos: 0x21,
            ack: 0x3132_3334_3536_3738,
            credit: 0x4142_4344,
            bowline: Some(BowlineConnect { frame_kib: 0x51, max_message: 0x6162 }),
            ..ConnectData::new(address, address, Version { major: 0x71, minor: 0x72 })
        };
        let bytes = data.to_bytes();
        let common = &bytes[2 * width..];
        let fields = [
            ("major", data.version.major.into()),
            ("minor", data.version.minor.into()),
            ("minors", data.minors.into()),
            ("tos", data.tos.into()),
            ("ack", data.ack.into()),
            ("credit", data.credit.into()),
        ];
        layout("RDS_CONNECT", Order::Big, common, fields);
        let mark = ("mark", 0x42_u8.into());
        let fields = [mark, ("frame_kib", 0x51_u8.into()), ("max_message", 0x6162_u16.into())];
        layout("RDS_CONNECT_BOWLINE", Order::Big, common, fields);
    }
}

#[test]
fn types_and_immediates_of_rtrs_have_the_same_numbers() {
    let name = SessionName::new("s").expect("a name");
    let mut info_rsp = Vec::new();
    emit_info_rsp([].into_iter(), &mut info_rsp);
    let mut read = [0; READ_HDR_MAX];
    read_hdr(0, false, None, &mut read);
    let types = [
        (emit_info_req(&name)[0].into(), "INFO_REQ"),
        (info_rsp[0].into(), "INFO_RSP"),
        (write_hdr(0)[0].into(), "WRITE"),
        (read[0].into(), "READ"),
        (RkeyRsp { id: 0, key: 0 }.emit()[0].into(), "RKEY_RSP"),
    ];
    assert_eq!(names("RTRS_TYPES"), owned(types));

    let known = (0..16).filter_map(|kind| {
        let name = match Imm::from_u32(kind << 28) {
            Imm::Request(_) => "request",
            Imm::Done { invalidated: false, .. } => "done",
            Imm::Done { invalidated: true, .. } => "done invalidated",
            Imm::GivenUp(_) => "given up",
            Imm::HbMsg => "heartbeat",
            Imm::HbAck => "heartbeat ack",
            _ => return None,
        };
        Some((kind.into(), name.to_owned()))
    });
    assert_eq!(names("RTRS_IMMEDIATES"), known.collect());
}

#[test]
fn messages_of_rtrs_are_read_where_they_are_written() {
    let [path, session] = [0x10, 0x30].map(|first| std::array::from_fn(|at| first + at as u8));
    let req = ConReq {
        cid: 0x0102,
        cid_num: 0x0304,
        recon_cnt: 0x0506,
        path: Uuid(path),
        session: Uuid(session),
        first: true,
        counts_keys: true,
        gives_notice: true,
    };
    let notices = || ("notices", Value::Bytes(b"gu1".to_vec()));
    let counted_keys = || ("counted_keys", Value::Bytes(b"bowline1".to_vec()));
    let fields = [
        ("magic", MAGIC.into()),
        ("version", 0x0200_u16.into()),
        ("cid", req.cid.into()),
        ("cid_num", req.cid_num.into()),
        ("recon_cnt", req.recon_cnt.into()),
        ("path", Value::Bytes(path.to_vec())),
        ("session", Value::Bytes(session.to_vec())),
        ("first", 1_u8.into()),
        notices(),
        counted_keys(),
    ];
    layout("RTRS_CON_REQ", Order::Little, &req.emit(), fields);

    let geometry = Geometry::new(0x0102, 0x1_edcc, 0x1234).expect("it fits");
    let accepted = ConRsp { geometry, new_rkey: true, counted_keys: true, accepts_notice: true };
    let bytes = ConAnswer::Accepted(accepted).emit();
    let fields = [
        ("magic", MAGIC.into()),
        ("version", 0x0200_u16.into()),
        ("errno", 0_u16.into()),
        ("queue_depth", 0x0102_u16.into()),
        ("max_io", geometry.max_io().into()),
        ("max_hdr", 0x1234_u16.into()),
        ("con_flags", 2_u8.into()),
        notices(),
        counted_keys(),
    ];
    layout("RTRS_CON_RSP", Order::Little, &bytes, fields);
    let refused = ConAnswer::Refused(104).emit();
    assert_eq!(refused[4..6], 104_i16.wrapping_neg().to_le_bytes(), "where `errno` is");

    let name = SessionName::new("a session").expect("a name");
    let fields = [("type", 0_u8.into()), ("name", Value::Bytes(b"a session".to_vec()))];
    layout("RTRS_INFO_REQ", Order::Little, &emit_info_req(&name), fields);

    let desc = Desc { addr: 0x0102_0304_0506_0708, key: 0x1112_1314, len: 0x2122_2324 };
    let mut bytes = Vec::new();
    emit_info_rsp([desc, desc].into_iter(), &mut bytes);
    let fields = [("type", 1_u8.into()), ("sg_cnt", 2_u8.into())];
    layout("RTRS_INFO_RSP", Order::Little, &bytes, fields);
    layout("RTRS_DESC", Order::Little, &bytes[8..24], fields_of(desc));
    layout("RTRS_DESC", Order::Little, &bytes[24..], fields_of(desc));

    let fields = [("type", 2_u8.into()), ("usr_len", 0x0102_u16.into())];
    layout("RTRS_WRITE", Order::Little, &write_hdr(0x0102), fields);
    let mut bytes = [0; READ_HDR_MAX];
    assert_eq!(read_hdr(0x0102, true, Some(desc), &mut bytes), bytes.len());
    let fields = [
        ("type", 3_u8.into()),
        ("usr_len", 0x0102_u16.into()),
        ("flags", 1_u8.into()),
        ("sg_cnt", 1_u8.into()),
    ];
    layout("RTRS_READ", Order::Little, &bytes, fields);
    layout("RTRS_DESC", Order::Little, &bytes[8..], fields_of(desc));

    let rkey = RkeyRsp { id: 0x0102, key: 0x1112_1314 };
    let fields = [("type", 4_u8.into()), ("buf_id", rkey.id.into()), ("key", rkey.key.into())];
    layout("RTRS_RKEY_RSP", Order::Little, &rkey.emit(), fields);
}

fn fields_of(desc: Desc) -> [(&'static str, Value); 3] {
    [("addr", desc.addr.into()), ("key", desc.key.into()), ("desc_len", desc.len.into())]
}

#[test]
fn values_of_rnbd_have_the_same_names() {
    let io = Io { device: 0, sector: 0, op: 0, flags: IoFlags::NONE, len: 0, prio: 0 };
    let types = [
        (rnbd::emit_sess_info(2)[0].into(), "SESS_INFO"),
        (rnbd::emit_sess_info_rsp(2)[0].into(), "SESS_INFO_RSP"),
        (rnbd::emit_open(Access::Ro, b"d").expect("a name")[0].into(), "OPEN"),
        (OpenRsp::default().emit()[0].into(), "OPEN_RSP"),
        (io.emit()[0].into(), "IO"),
        (rnbd::emit_close(0)[0].into(), "CLOSE"),
    ];
    assert_eq!(names("RNBD_TYPES"), owned(types));
    let access =
        (0..=u8::MAX).filter_map(|mode| Some((mode.into(), Access::parse(mode)?.name().into())));
    assert_eq!(names("RNBD_ACCESS"), access.collect());
    let ops = [
        (rnbd::OP_READ.into(), "READ"),
        (rnbd::OP_WRITE.into(), "WRITE"),
        (rnbd::OP_FLUSH.into(), "FLUSH"),
        (rnbd::OP_DISCARD.into(), "DISCARD"),
        (rnbd::OP_SECURE_ERASE.into(), "SECURE_ERASE"),
        (rnbd::OP_WRITE_ZEROES.into(), "WRITE_ZEROES"),
    ];
    assert_eq!(names("RNBD_OPS"), owned(ops));
    let flags = [
        (IoFlags::SYNC.bits().into(), "SYNC"),
        (IoFlags::FUA.bits().into(), "FUA"),
        (IoFlags::PREFLUSH.bits().into(), "PREFLUSH"),
        (IoFlags::NOUNMAP.bits().into(), "NOUNMAP"),
    ];
    assert_eq!(names("RNBD_FLAGS"), owned(flags));
    let cache = [(rnbd::CACHE_FUA.into(), "FUA"), (rnbd::CACHE_WRITE_BACK.into(), "WRITE_BACK")];
    assert_eq!(names("RNBD_CACHE"), owned(cache));
}

#[test]
fn messages_of_rnbd_are_read_where_they_are_written() {
    let fields = [("type", 0_u8.into()), ("ver", 7_u8.into())];
    layout("RNBD_SESS_INFO", Order::Little, &rnbd::emit_sess_info(7), fields);
    let open = rnbd::emit_open(Access::Migration, b"a disk").expect("a name");
    let fields = [
        ("type", 2_u8.into()),
        ("access", 2_u8.into()),
        ("name", Value::Bytes(b"a disk".to_vec())),
    ];
    layout("RNBD_OPEN", Order::Little, &open, fields);
    let rsp = OpenRsp {
        device_id: 0x0102_0304,
        nsectors: 0x1112_1314_1516_1718,
        max_hw_sectors: 0x2122_2324,
        max_write_zeroes_sectors: 0x3132_3334,
        max_discard_sectors: 0x4142_4344,
        discard_granularity: 0x5152_5354,
        discard_alignment: 0x6162_6364,
        physical_block_size: 0x7172,
        logical_block_size: 0x8182,
        max_segments: 0x9192,
        secure_discard: 0xa1a2,
        obsolete_rotational: 0xb1,
        cache_policy: 0xc1,
    };
    let fields = [
        ("type", 3_u8.into()),
        ("device_id", rsp.device_id.into()),
        ("nsectors", rsp.nsectors.into()),
        ("max_hw_sectors", rsp.max_hw_sectors.into()),
        ("max_write_zeroes_sectors", rsp.max_write_zeroes_sectors.into()),
        ("max_discard_sectors", rsp.max_discard_sectors.into()),
        ("discard_granularity", rsp.discard_granularity.into()),
        ("discard_alignment", rsp.discard_alignment.into()),
        ("physical_block_size", rsp.physical_block_size.into()),
        ("logical_block_size", rsp.logical_block_size.into()),
        ("max_segments", rsp.max_segments.into()),
        ("secure_discard", rsp.secure_discard.into()),
        ("obsolete_rotational", rsp.obsolete_rotational.into()),
        ("cache_policy", rsp.cache_policy.into()),
    ];
    layout("RNBD_OPEN_RSP", Order::Little, &rsp.emit(), fields);
    let io = Io {
        device: 0x0102_0304,
        sector: 0x1112_1314_1516_1718,
        op: rnbd::OP_WRITE,
        flags: IoFlags::SYNC,
        len: 0x2122_2324,
        prio: 0x3132,
    };
    let fields = [
        ("type", 4_u8.into()),
        ("device_id", io.device.into()),
        ("sector", io.sector.into()),
        ("rw", 0x101_u16.into()),
        ("len", io.len.into()),
        ("prio", io.prio.into()),
    ];
    layout("RNBD_IO", Order::Little, &io.emit(), fields);
    let fields = [("type", 5_u8.into()), ("device_id", 0x0102_0304_u32.into())];
    layout("RNBD_CLOSE", Order::Little, &rnbd::emit_close(0x0102_0304), fields);
}

#[test]
fn errors_have_the_same_names() {
    let script = script();
    let (_, rest) = script.split_once("local ERRNOS = {\n").expect("the table");
    let (body, _) = rest.split_once("\n}").expect("its end");
    let entries: Vec<_> =
        body.split(',').map(str::trim).filter(|entry| !entry.is_empty()).collect();
    assert!(entries.len() > 20, "{entries:?}");
    for entry in entries {
        let (errno, name) = entry.split_once(" = ").expect("an entry");
        let errno = errno.trim_matches(['[', ']']).parse().expect("a number");
        let expected = if errno == 0 { Some("success") } else { Errno(errno).name() };
        assert_eq!(Some(name.trim_matches('"')), expected, "{errno}");
    }
}

/// What tshark shows of one packet, field by field; of a field that a packet has several times all.
fn dissect(capture: &Path, fields: &[&str]) -> Vec<Vec<Vec<String>>> {
    let mut command = Command::new("tshark");
    // Nothing of the user's own: neither preferences nor plugins.
    command.env("HOME", "/nonexistent").env_remove("XDG_CONFIG_HOME");
    command.args(["-n", "-X", &format!("lua_script:{SCRIPT}"), "-T", "fields"]);
    command.args(["-E", "separator=/t", "-E", "aggregator=;"]).arg("-r").arg(capture);
    for field in fields {
        command.args(["-e", field]);
    }
    let output = command.output().expect("tshark runs");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {said}", capture.display());
    for line in said.lines() {
        let harmless = line.starts_with("Running as user") || line.contains("cut short");
        assert!(harmless, "{}: {line}", capture.display());
    }
    let text = String::from_utf8(output.stdout).expect("text");
    let values = |field: &str| -> Vec<String> {
        field.split(';').filter(|one| !one.is_empty()).map(str::to_owned).collect()
    };
    text.lines().map(|line| line.split('\t').map(values).collect()).collect()
}

fn bytes_of_hex(digits: &str) -> Vec<u8> {
    let digits: Vec<_> = digits.bytes().filter(u8::is_ascii_hexdigit).collect();
    let pairs = digits.chunks(2).map(|pair| std::str::from_utf8(pair).expect("digits"));
    pairs.map(|pair| u8::from_str_radix(pair, 16).expect("digits")).collect()
}

/// Of a folder with captures, by name without what is behind the first `.pcap`.
fn captures(folder: &Path) -> Vec<(String, PathBuf)> {
    let mut found: Vec<_> = std::fs::read_dir(folder)
        .unwrap_or_else(|error| panic!("{}: {error}", folder.display()))
        .map(|entry| entry.expect("an entry").path())
        .filter_map(|path| {
            let name = path.file_name()?.to_str()?;
            let stem = name.strip_suffix(".gz").unwrap_or(name).strip_suffix(".pcap")?;
            Some((stem.to_owned(), path.clone()))
        })
        .collect();
    found.sort();
    found
}

/// How many messages of which kind a capture has: lines `NAME KIND=COUNT ..` of `counts.txt`, where
/// a kind has `-` for a space.
fn expected_counts() -> BTreeMap<String, BTreeMap<String, usize>> {
    let text = std::fs::read_to_string(Path::new(CAPTURES).join("counts.txt")).expect("counts");
    let lines = text.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    lines
        .map(|line| {
            let mut words = line.split(' ');
            let name = words.next().expect("a name").to_owned();
            let counts = words.map(|word| {
                let (kind, count) = word.split_once('=').expect("KIND=COUNT");
                (kind.to_owned(), count.parse().expect("a number"))
            });
            (name, counts.collect())
        })
        .collect()
}

#[test]
#[ignore = "needs tshark: cargo xtask dissect"]
fn captures_are_shown_as_this_crate_reads_them() {
    let folder = std::env::var_os("BOWLINE_CAPTURES").map_or(CAPTURES.into(), PathBuf::from);
    let expected = expected_counts();
    let mut compared = 0;
    let captures = captures(&folder);
    assert!(!captures.is_empty(), "no capture in {}", folder.display());
    for (name, capture) in &captures {
        let fields = [
            "rds.header",
            "rds.summary",
            "rds.payload",
            "rtrs.imm",
            "rtrs.imm.names",
            "_ws.malformed",
            "_ws.lua.error",
            "rds.bad_checksum",
            "rds.bad_map",
            "rds.no_header",
            "rds.kind",
            "rtrs.kind",
        ];
        let mut counts = BTreeMap::<String, usize>::new();
        for (index, packet) in dissect(capture, &fields).iter().enumerate() {
            let place = format!("packet {} of {name}", index + 1);
            let [headers, summaries, payloads, immediates, names, faults @ .., rds, rtrs] =
                &packet[..]
            else {
                panic!("{place}: {packet:?}");
            };
            assert!(faults.iter().all(Vec::is_empty), "{place}: {packet:?}");
            assert_eq!(headers.len(), summaries.len(), "{place}");
            let mut announced = 0;
            for (header, summary) in headers.iter().zip(summaries) {
                let header = Header::parse(&bytes_of_hex(header)).expect("48 bytes");
                assert_eq!(*summary, header.to_string(), "{place}");
                announced += header.len as usize;
            }
            // The bytes that fill a packet up to a multiple of four do not belong to the message.
            let shown: usize = payloads.iter().map(|payload| bytes_of_hex(payload).len()).sum();
            assert!(shown <= announced, "{place}: {shown} of {announced} bytes");
            assert_eq!(immediates.len(), names.len(), "{place}");
            for (immediate, name) in immediates.iter().zip(names) {
                let imm = number(immediate).and_then(|imm| u32::try_from(imm).ok());
                let imm = Imm::from_u32(imm.expect("32 bits"));
                assert_eq!(*name, imm.to_string(), "{place}");
            }
            for kind in rds.iter().chain(rtrs) {
                *counts.entry(kind.replace(' ', "-")).or_default() += 1;
            }
        }
        assert!(!counts.is_empty(), "{name} has no message that was recognised");
        if let Some(expected) = expected.get(name) {
            assert_eq!(counts, *expected, "{name}");
            compared += 1;
        }
        println!("{name}: {counts:?}");
    }
    println!("{} captures, {compared} with known numbers of messages", captures.len());
    assert!(compared > 0, "no capture has known numbers of messages");
}

/// A capture of one TCP connection, in a file of its own that is gone at the end.
struct Written(PathBuf);

impl Written {
    /// Each message travels in segments of at most 1000 bytes.
    fn new(messages: &[Vec<u8>]) -> Self {
        let mut pcap = Vec::new();
        // Of microseconds, version 2.4, up to 64 KiB of each packet, Ethernet.
        [0xa1b2_c3d4, 4 << 16 | 2, 0, 0, 65535, 1_u32]
            .iter()
            .for_each(|word| pcap.extend(word.to_le_bytes()));
        let mut sequence = 1_u32;
        for segment in messages.iter().flat_map(|message| message.chunks(1000)) {
            let mut packet = vec![2; 12];
            packet.extend([8, 0, 0x45, 0]);
            packet.extend((40 + segment.len() as u16).to_be_bytes());
            packet.extend([0, 0, 0, 0, 64, 6, 0, 0, 192, 0, 2, 1, 192, 0, 2, 2]);
            packet.extend(40_000_u16.to_be_bytes());
            packet.extend(TCP_PORT.to_be_bytes());
            packet.extend(sequence.to_be_bytes());
            packet.extend([0, 0, 0, 1, 0x50, 0x18, 255, 255, 0, 0, 0, 0]);
            packet.extend(segment);
            sequence += segment.len() as u32;
            [0, sequence, packet.len() as u32, packet.len() as u32]
                .iter()
                .for_each(|word| pcap.extend(word.to_le_bytes()));
            pcap.extend(packet);
        }
        let path =
            std::env::temp_dir().join(format!("bowline-written-{}.pcap", std::process::id()));
        std::fs::write(&path, pcap).expect("a temporary file");
        Self(path)
    }
}

impl Drop for Written {
    fn drop(&mut self) {
        // The system clears its temporary files where this fails.
        let _ = std::fs::remove_file(&self.0);
    }
}

/// As the dissectors write ports.
fn ranges(map: MapView<'_>) -> String {
    let mut ranges: Vec<(u16, u16)> = Vec::new();
    for port in map.congested_ports() {
        match ranges.last_mut() {
            Some((_, last)) if last.checked_add(1) == Some(port) => *last = port,
            _ => ranges.push((port, port)),
        }
    }
    let texts: Vec<_> = ranges
        .iter()
        .map(|(a, b)| if a == b { a.to_string() } else { format!("{a}-{b}") })
        .collect();
    if texts.is_empty() { "none".into() } else { texts.join(", ") }
}

#[test]
#[ignore = "needs tshark: cargo xtask dissect"]
fn any_message_is_shown_as_this_crate_reads_it() {
    let mut state = 1_u64;
    let mut random = move |below: u32| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        ((state >> 32) as u32) % below
    };
    let (mut messages, mut lines, mut ports) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..400 {
        let mut bytes: [u8; HEADER_LEN] = std::array::from_fn(|_| random(256) as u8);
        bytes[16..20].copy_from_slice(&random(2500).to_be_bytes());
        // Half of them with what there is, in any order; the rest is random.
        let mut at = 32;
        while at < HEADER_LEN && random(8) != 0 {
            bytes[at] = [1, 2, 3, 4, 5, 6, 8, 0x42, 0][random(9) as usize];
            at += [1, 2, 3, 5, 6, 9][random(6) as usize];
        }
        for port in [20, 22] {
            if random(2) == 0 {
                bytes[port..port + 2].copy_from_slice(&[0, random(2) as u8]);
            }
        }
        let is_map = random(8) == 0;
        bytes[24] = if is_map { 1 } else { bytes[24] & 0xfe };
        let header = Header::from_bytes(&bytes);
        let mut message = bytes.to_vec();
        if is_map {
            message[16..20].copy_from_slice(&(MAP_LEN as u32).to_be_bytes());
            let mut map = [0; MAP_LEN];
            for _ in 0..random(5) {
                let (port, many) = (random(65_536), random(20));
                (port..(port + many).min(65_535))
                    .for_each(|port| map[port as usize / 8] |= 1 << (port % 8));
            }
            [0, 65_535].iter().for_each(|port: &usize| map[port / 8] |= 1 << (port % 8));
            message.extend(map);
            ports.push(ranges(MapView::new(&map).expect("a map")));
        } else {
            message.extend((0..header.len).map(|at| at as u8));
        }
        lines.push(Header::parse(&message).expect("a header").to_string());
        messages.push(message);
    }
    let capture = Written::new(&messages);
    let fields = ["rds.summary", "rds.map.ports", "_ws.malformed", "_ws.lua.error"];
    let packets = dissect(&capture.0, &fields);
    assert!(packets.iter().all(|packet| packet[2].is_empty() && packet[3].is_empty()));
    let [shown, shown_ports] = [0, 1].map(|field: usize| {
        packets.iter().flat_map(|packet| packet[field].clone()).collect::<Vec<_>>()
    });
    assert_eq!(shown, lines);
    assert_eq!(shown_ports, ports);
}
