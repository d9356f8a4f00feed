//! Random histories of a client and a server that answers anything: each request ends once, each
//! message lies within the disk and the limits the server sent last, and in the end everything can
//! be unmapped. Used by the test on random bytes and by the fuzz target `rnbd_client`.

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use bowline_base::Instant;
use bowline_rnbd::client::{
    Config, Core, DevId, DiskRequest, Event, Outage, SendIo, ServiceMessage, State, Token,
};
use bowline_rnbd::{Errno, IoOp, Limits, SessionLimits};
use bowline_wire::rnbd::{
    self as wire, Access, Io, IoFlags, OPEN_RSP_LEN, OpenRsp, Request, SESS_INFO_LEN, parse,
};
use common::Bytes;

const NAMES: [&str; 4] = ["a", "b", "c", "d"];
const OPS: [IoOp; 6] =
    [IoOp::Read, IoOp::Write, IoOp::Flush, IoOp::Discard, IoOp::WriteZeroes, IoOp::SecureErase];
/// The region of requests, and that of zeroes.
const DATA: u32 = 7;
const ZEROES: u32 = 9;
const ZEROES_LEN: u32 = 8192;
/// Bytes of one read or write, of sessions.
const MAX_IO: [u32; 12] =
    [8192, 8192, 8192, 8192, 126_976, 126_976, 4096, 12_800, 513, 511, 0, u32::MAX];
const ERRORS: [i32; 14] =
    [-107, -107, -103, -103, -104, -5, -28, -95, -110, -4096, 107, 5, i32::MIN, i32::MAX];

/// The last limits of a disk that the server has sent.
struct KnownLimits {
    rsp: OpenRsp,
    /// Or the size set by a local resize.
    bytes: u64,
}

struct Play {
    core: Core<u32>,
    config: Config,
    slots: u16,
    zeroes: bool,
    now: Instant,
    up: bool,
    session: SessionLimits,
    /// Service messages that were not answered.
    pending: Vec<ServiceMessage>,
    tokens: BTreeSet<Token>,
    in_flight: BTreeMap<u16, SendIo>,
    devices: BTreeMap<DevId, (&'static str, Access)>,
    known: BTreeMap<DevId, KnownLimits>,
    /// Devices reported online.
    online: BTreeSet<DevId>,
    /// Requests that were not answered, and requests answered late that have not ended.
    waiting: BTreeSet<u32>,
    late: BTreeSet<u32>,
    next: u32,
    sent: u64,
}

impl Play {
    fn new(input: &mut Bytes<'_>) -> Self {
        let second = Duration::from_secs(1);
        let config = Config {
            outage: input.of(&[Outage::FailFast, Outage::Queue(second * 3)]),
            io_timeout: input.of(&[None, Some(second * 2)]),
            reopen_delay: second,
            nounmap: input.of(&[false, true]),
            write_zeroes: input.of(&[true, true, false]),
        };
        let slots = 1 + input.below(6) as u16;
        let mut core = Core::new(config, slots);
        let zeroes = input.of(&[true, false]);
        if zeroes {
            core.set_zeroes(ZEROES, ZEROES_LEN);
        }
        let session = SessionLimits { max_io: 0, max_segments: 0 };
        Self {
            core,
            config,
            slots,
            zeroes,
            now: Instant::from_nanos(1),
            up: false,
            session,
            pending: Vec::new(),
            tokens: BTreeSet::new(),
            in_flight: BTreeMap::new(),
            devices: BTreeMap::new(),
            known: BTreeMap::new(),
            online: BTreeSet::new(),
            waiting: BTreeSet::new(),
            late: BTreeSet::new(),
            next: 0,
            sent: 0,
        }
    }

    fn step(&mut self, input: &mut Bytes<'_>) {
        match input.byte() % 64 {
            0 if self.up => self.down(input),
            0..=4 if !self.up => self.link_up(input),
            0..=2 => self.map(input),
            // The state of the device may forbid these.
            3 => self.with_device(input, |play, dev, _| _ = play.core.unmap(dev)),
            4 | 5 => self.with_device(input, |play, dev, _| _ = play.core.remap(play.now, dev)),
            6 => self.with_device(input, Self::resize),
            7..=10 => self.pass(input),
            11 => self.answer_anything(input),
            12..=19 => self.answer_order(input),
            20..=37 => self.answer_io(input),
            38 => self.fail_to_send(input),
            _ => self.with_device(input, Self::submit),
        }
        self.look();
    }

    fn with_device(
        &mut self,
        input: &mut Bytes<'_>,
        act: impl FnOnce(&mut Self, DevId, &mut Bytes<'_>),
    ) {
        let all: Vec<_> = self.devices.keys().copied().collect();
        if !all.is_empty() {
            let dev = input.of(&all);
            act(self, dev, input);
        }
    }

    /// The session comes up, perhaps with unusable limits.
    fn link_up(&mut self, input: &mut Bytes<'_>) {
        let max_io = input.of(&MAX_IO);
        self.session = SessionLimits { max_io, max_segments: input.of(&[128, 0, u16::MAX]) };
        self.up = true;
        self.core.link_up(self.now, self.session);
    }

    /// The session is lost and all IO in flight is answered, reported in either order.
    fn down(&mut self, input: &mut Bytes<'_>) {
        if input.byte().is_multiple_of(2) {
            self.core.link_down(self.now);
        }
        while !self.in_flight.is_empty() || !self.pending.is_empty() {
            self.fail_all();
            self.orders();
        }
        self.up = false;
        self.core.link_down(self.now);
    }

    fn fail_all(&mut self) {
        for slot in std::mem::take(&mut self.in_flight).into_keys() {
            self.core.io_answer(self.now, slot, Errno::ECONNABORTED.neg());
        }
        for order in std::mem::take(&mut self.pending) {
            self.core.service_answer(self.now, order.token, Errno::ECONNABORTED.neg(), &[]);
        }
    }

    fn map(&mut self, input: &mut Bytes<'_>) {
        let (name, access) = (input.of(&NAMES), input.of(&[Access::Rw, Access::Ro]));
        let there = self.devices.values().any(|(known, _)| *known == name);
        match self.core.map(name, access) {
            Ok(dev) => {
                assert!(!there, "mapped twice");
                self.devices.insert(dev, (name, access));
            }
            Err(errno) => assert!(there && errno == Errno::EEXIST, "{errno}"),
        }
    }

    fn resize(&mut self, dev: DevId, input: &mut Bytes<'_>) {
        let bytes = input.of(&[0, 4096, 1 << 20, 1 << 63, u64::MAX, 5000]);
        if self.core.resize(dev, bytes) == Ok(()) {
            let known = self.known.get_mut(&dev).expect("it is open");
            known.bytes = bytes;
        }
    }

    fn pass(&mut self, input: &mut Bytes<'_>) {
        let ms = input.of(&[0, 1, 10, 100, 1000, 2500]);
        self.now = self.now + Duration::from_millis(ms);
        if let Some(next) = self.core.poll_timeout().filter(|_| input.byte().is_multiple_of(4)) {
            self.now = self.now.max(next);
        }
        self.core.handle_timeout(self.now);
    }

    fn submit(&mut self, dev: DevId, input: &mut Bytes<'_>) {
        let op = input.of(&OPS);
        let offset = match input.byte() % 8 {
            0 => u64::from(input.word()) << 32 | u64::from(input.word()),
            1 => (1 << 20) - 4096,
            _ => u64::from(input.byte()) * 4096,
        };
        let len = match input.byte() % 8 {
            0 => input.word(),
            1 => Limits::IO_MAX,
            _ => u32::from(input.byte()) * 512,
        };
        let len = if op == IoOp::Flush { 0 } else { len };
        let mem = (op.has_data() && !input.byte().is_multiple_of(16)).then_some((DATA, 100));
        let (fua, nounmap) = (input.byte().is_multiple_of(4), input.byte().is_multiple_of(4));
        let done = self.next;
        self.next += 1;
        self.waiting.insert(done);
        let request = DiskRequest { op, offset, len, fua, nounmap, mem, done };
        self.core.submit(self.now, dev, request);
    }

    /// The answer to an OPEN: sane, a little off, or noise.
    fn rsp(input: &mut Bytes<'_>) -> Vec<u8> {
        let wild = [0, 1, 7, 8, 2048, 8_388_607, 8_388_608, u32::MAX];
        let mut rsp = OpenRsp {
            device_id: input.of(&[0, 0, 1, 2, 3, u32::MAX]),
            nsectors: 2048,
            max_hw_sectors: 248,
            max_write_zeroes_sectors: input.of(&[0, 16, 2048]),
            max_discard_sectors: input.of(&[0, 16, 2048]),
            discard_granularity: 4096,
            discard_alignment: 0,
            physical_block_size: 4096,
            logical_block_size: 512,
            max_segments: 128,
            secure_discard: input.of(&[0, 1]),
            obsolete_rotational: 0,
            cache_policy: input.byte() % 4,
        };
        for _ in 0..input.of(&[0, 0, 0, 0, 0, 1, 1, 3]) {
            match input.byte() % 10 {
                0 => rsp.nsectors = input.of(&[0, 7, 8, 64, 1 << 54, (1 << 54) - 1, u64::MAX]),
                1 => rsp.max_hw_sectors = input.of(&wild),
                2 => rsp.max_write_zeroes_sectors = input.of(&wild),
                3 => rsp.max_discard_sectors = input.of(&wild),
                4 => rsp.discard_granularity = input.of(&[0, 1, 777, 3 << 20, 1 << 31, u32::MAX]),
                5 => rsp.discard_alignment = input.of(&wild),
                6 => rsp.physical_block_size = input.of(&[0, 1, 513, u16::MAX]),
                7 => rsp.logical_block_size = input.of(&[0, 4096, 4096, 4096, 1024, 768, 8192]),
                8 => rsp.max_segments = input.of(&[0, u16::MAX]),
                _ => rsp.secure_discard = u16::MAX,
            }
        }
        let mut bytes = rsp.emit().to_vec();
        match input.byte() % 32 {
            0 => bytes.truncate(input.below(OPEN_RSP_LEN + 1)),
            1 => bytes[0] = input.byte(),
            2 => bytes = wire::emit_sess_info_rsp(input.byte()).to_vec(),
            3 => bytes = (0..input.below(80)).map(|_| input.byte()).collect(),
            _ => {}
        }
        bytes
    }

    fn answer_order(&mut self, input: &mut Bytes<'_>) {
        if self.pending.is_empty() {
            return;
        }
        let order = self.pending.swap_remove(input.below(self.pending.len()));
        let errno = if input.byte().is_multiple_of(8) { input.of(&ERRORS) } else { 0 };
        let data = match parse(&order.usr) {
            Ok(Request::Open { .. }) => Self::rsp(input),
            _ => (0..input.below(48)).map(|_| input.byte()).collect(),
        };
        self.answer(&order, errno, &data);
    }

    fn answer(&mut self, order: &ServiceMessage, errno: i32, data: &[u8]) {
        let name = match parse(&order.usr) {
            Ok(Request::Open { name, .. }) => Some(name),
            _ => None,
        };
        let dev = self.devices.iter().find(|(_, (known, _))| Some(known.as_bytes()) == name);
        let dev = dev.map(|(dev, _)| *dev);
        self.core.service_answer(self.now, order.token, errno, data);
        let open = dev.filter(|dev| self.core.state(*dev) == Some(State::Open));
        if let Some(dev) = open {
            // Only a well-formed success maps a disk.
            let rsp = OpenRsp::parse(data).filter(|_| errno == 0).expect("opened by nothing");
            let bytes = rsp.nsectors.checked_mul(512).expect("more than there is");
            self.known.insert(dev, KnownLimits { rsp, bytes });
        }
    }

    /// Answers with unknown tokens, or a second time.
    fn answer_anything(&mut self, input: &mut Bytes<'_>) {
        let token = Token(input.word());
        if !self.pending.iter().any(|order| order.token == token) {
            self.core.service_answer(self.now, token, 0, &Self::rsp(input));
        }
        let slot = input.of(&[0, 1, 2, self.slots, u16::MAX]);
        if !self.in_flight.contains_key(&slot) {
            self.core.io_answer(self.now, slot, input.of(&[0, -5, -107]));
        }
    }

    fn any_slot(&mut self, input: &mut Bytes<'_>) -> Option<u16> {
        let slots: Vec<_> = self.in_flight.keys().copied().collect();
        let slot = *slots.get(input.below(slots.len()))?;
        self.in_flight.remove(&slot);
        Some(slot)
    }

    fn answer_io(&mut self, input: &mut Bytes<'_>) {
        if let Some(slot) = self.any_slot(input) {
            let errno = if input.byte().is_multiple_of(8) { input.of(&ERRORS) } else { 0 };
            self.core.io_answer(self.now, slot, errno);
        }
    }

    fn fail_to_send(&mut self, input: &mut Bytes<'_>) {
        if let Some(slot) = self.any_slot(input) {
            let errno = input.of(&[Errno::EAGAIN, Errno::ENOMEM, Errno::ECOMM, Errno::EINVAL]);
            self.core.send_failed(self.now, slot, errno);
        }
    }

    /// Takes all output, and checks it.
    fn look(&mut self) {
        self.core.check_invariants();
        self.orders();
        let mut sends = Vec::new();
        self.core.take_sends(&mut sends);
        self.events();
        for send in sends {
            self.sent(send);
        }
        let mut done = Vec::new();
        self.core.take_done(&mut done);
        for io in done {
            assert!(self.waiting.remove(&io.done), "answered twice");
            assert!((-4095..=0).contains(&io.errno), "{}", io.errno);
            self.late.extend(io.late);
        }
        let mut ended = Vec::new();
        self.core.take_ended(&mut ended);
        for number in ended {
            assert!(self.late.remove(&number), "over twice");
        }
        self.core.check_invariants();
        self.states();
    }

    fn orders(&mut self) {
        while let Some(order) = self.core.poll_service_message() {
            self.ordered(order);
        }
    }

    fn ordered(&mut self, order: ServiceMessage) {
        assert!(self.tokens.insert(order.token), "a token twice");
        match parse(&order.usr).expect("a message") {
            Request::SessInfo { ver } => {
                assert_eq!((ver, order.room as usize), (2, SESS_INFO_LEN));
            }
            Request::Open { name, .. } => {
                assert_eq!(order.room as usize, OPEN_RSP_LEN);
                let same = |order: &&ServiceMessage| matches!(parse(&order.usr), Ok(Request::Open { name: other, .. }) if other == name);
                assert!(
                    !self.pending.iter().any(|order| same(&order)),
                    "two of one device at once"
                );
            }
            Request::Close { .. } => assert_eq!(order.room, 0),
            Request::Io(io) => panic!("{io:?} on the service connection"),
        }
        self.pending.push(order);
        assert!(self.pending.len() < 1000, "more and more is pending");
    }

    /// Checks that a message lies within the disk and the limits of the session.
    fn sent(&mut self, send: SendIo) {
        self.sent += 1;
        assert!(self.up, "sent to nobody");
        assert!(send.slot < self.slots, "{}", send.slot);
        let Ok(Request::Io(io)) = parse(&send.usr) else { panic!("{:?}", send.usr) };
        let open = self.known.iter().filter(|(dev, known)| {
            known.rsp.device_id == io.device && self.core.state(**dev) == Some(State::Open)
        });
        let open: Vec<_> = open.map(|(dev, _)| *dev).collect();
        let [dev] = open[..] else { panic!("{} disks have id {}", open.len(), io.device) };
        self.within(dev, &io, &send);
        assert!(self.in_flight.insert(send.slot, send).is_none(), "a slot twice");
    }

    fn within(&self, dev: DevId, io: &Io, send: &SendIo) {
        let (KnownLimits { rsp, bytes }, (_, access)) = (&self.known[&dev], self.devices[&dev]);
        let has_data = matches!(io.op, wire::OP_READ | wire::OP_WRITE);
        assert_eq!(send.data.is_some(), has_data, "{io:?}");
        if io.op == wire::OP_FLUSH {
            assert_eq!((io.sector, io.len), (u64::MAX, 0));
            return;
        }
        assert!(io.op == wire::OP_READ || access == Access::Rw, "{io:?} of a disk to be read");
        let unit = u64::from(rsp.logical_block_size);
        let (from, len) = (io.sector.checked_mul(512).expect("a byte"), u64::from(io.len));
        assert!(len > 0 && len.is_multiple_of(unit) && from.is_multiple_of(unit), "{io:?}");
        assert!(from.checked_add(len).is_some_and(|end| end <= *bytes), "{io:?} of {bytes}");
        let most = match io.op {
            wire::OP_READ | wire::OP_WRITE => u64::from(self.session.max_io),
            wire::OP_DISCARD => u64::from(rsp.max_discard_sectors) * 512,
            wire::OP_SECURE_ERASE if rsp.secure_discard == 0 => 0,
            wire::OP_SECURE_ERASE => u64::from(rsp.max_discard_sectors) * 512,
            wire::OP_WRITE_ZEROES if !self.config.write_zeroes => 0,
            wire::OP_WRITE_ZEROES => u64::from(rsp.max_write_zeroes_sectors) * 512,
            other => panic!("operation {other}"),
        };
        assert!(len <= most, "{io:?}, at most {most}");
        if io.flags.contains(IoFlags::FUA) {
            assert_eq!((io.op, rsp.cache_policy & 3), (wire::OP_WRITE, 3), "{io:?}");
        }
        assert!(self.config.nounmap || !io.flags.contains(IoFlags::NOUNMAP));
        if let Some(data) = send.data {
            assert_eq!(data.len, io.len);
            let of_zeroes = self.zeroes && data.region == ZEROES;
            assert!(data.region == DATA || of_zeroes, "{data:?}");
            assert!(!of_zeroes || data.offset == 0 && data.len <= ZEROES_LEN, "{data:?}");
            let end = 100 + u64::from(Limits::IO_MAX);
            assert!(of_zeroes || (100..end).contains(&data.offset), "{data:?}");
        }
    }

    fn events(&mut self) {
        while let Some(event) = self.core.poll_event() {
            match event {
                Event::Mapped { dev, result: Ok(()) } => assert!(self.online.insert(dev)),
                Event::Mapped { dev, result: Err(errno) } => {
                    assert!((1..4096).contains(&errno.0), "{errno}");
                    assert!(self.devices.remove(&dev).is_some(), "gone twice");
                }
                Event::Online { dev } => assert!(self.online.insert(dev), "online twice"),
                Event::Offline { dev } => assert!(self.online.remove(&dev), "offline twice"),
                Event::Unmapped { dev } => {
                    assert!(self.devices.remove(&dev).is_some(), "gone twice");
                    self.online.remove(&dev);
                    self.known.remove(&dev);
                }
                Event::Resized { bytes, .. } => assert!(bytes <= Limits::BYTES_MAX),
                Event::Remapped { .. } | Event::Gone { .. } => {}
                other => panic!("{other:?}"),
            }
        }
    }

    /// Checks that devices have the reported states, and sane limits.
    fn states(&self) {
        let infos = self.core.infos();
        assert_eq!(infos.len(), self.devices.len());
        let pieces: u32 = infos.iter().map(|info| info.in_flight).sum();
        assert_eq!(pieces as usize, self.in_flight.len());
        let works: usize = infos.iter().map(|info| info.waiting).sum();
        // Pieces that failed wait one by one, and are cut again for sessions with smaller limits.
        let most = usize::from(self.slots) * NAMES.len() * 8;
        assert!(works <= self.waiting.len() + self.late.len() + most, "{works} wait");
        for info in infos {
            let known = self.online.contains(&info.id);
            assert!(info.state == State::Unmapped || (info.state == State::Open) == known);
            let Some(limits) = info.limits else { continue };
            let unit = limits.logical;
            assert!(unit.is_power_of_two() && (512..=4096).contains(&unit), "{limits:?}");
            assert!(limits.physical.is_power_of_two() && limits.physical >= unit, "{limits:?}");
            assert!(limits.bytes <= Limits::BYTES_MAX, "{limits:?}");
            assert!(limits.bytes.is_multiple_of(unit.into()), "{limits:?}");
            assert!(limits.max_io > 0 && limits.max_io.is_multiple_of(unit), "{limits:?}");
            assert!(limits.max_write_zeroes.is_multiple_of(unit), "{limits:?}");
            assert!(!limits.fua || limits.write_cache, "{limits:?}");
            assert!(!limits.secure_erase || limits.discard.is_some(), "{limits:?}");
            if let Some(discard) = limits.discard {
                assert!(discard.max_bytes > 0, "{limits:?}");
                assert!(discard.max_bytes <= Limits::IO_MAX.into(), "{limits:?}");
                assert!(discard.max_bytes.is_multiple_of(unit.into()), "{limits:?}");
                assert!(discard.granularity.is_multiple_of(unit), "{limits:?}");
                assert!(discard.granularity > discard.alignment, "{limits:?}");
            }
        }
    }

    /// The program unmaps everything: all of it ends, whatever the server answered.
    fn end(mut self) -> u64 {
        for dev in self.devices.keys().copied().collect::<Vec<_>>() {
            // Some devices are being unmapped already.
            let _ = self.core.unmap(dev);
            self.look();
        }
        while !self.in_flight.is_empty() || !self.pending.is_empty() {
            self.fail_all();
            self.look();
        }
        assert_eq!(self.core.infos(), []);
        assert!(self.waiting.is_empty(), "{:?} never answered", self.waiting);
        assert!(self.late.is_empty(), "{:?} never over", self.late);
        self.sent
    }
}

/// Plays an input. Returns how many IO messages were sent.
pub(crate) fn play(input: &[u8]) -> u64 {
    let mut input = Bytes(input);
    let mut play = Play::new(&mut input);
    play.link_up(&mut input);
    play.look();
    for _ in 0..2 {
        play.map(&mut input);
        play.look();
    }
    while !input.0.is_empty() {
        play.step(&mut input);
    }
    play.end()
}

// tests [NB-9] [NB-16] [NB-27] [NB-30] [NB-32] [NB-51] [NB-54] [NB-55] [NB-59]
#[test]
fn random_servers_end_each_request_once_within_the_disk() {
    let mut sent = 0;
    for seed in 0..4000 {
        // Shown when it fails.
        println!("seed {seed}");
        sent += play(&common::noise(seed, 2000));
    }
    assert!(sent > 50_000, "{sent}");
}
