//! What one measurement is: who, what, how large, how; and its form as arguments of a process.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::net::Ipv4Addr;

use bowline_roce::Congestion;

/// Declares an enum whose variants have names: those in arguments, tables and result files.
macro_rules! named {
    ($(#[$about:meta])* $what:ident { $($(#[$doc:meta])* $variant:ident = $name:literal,)+ }) => {
        $(#[$about])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        pub(crate) enum $what {
            $($(#[$doc])* $variant,)+
        }

        impl $what {
            /// All, in the order of the tables.
            pub(crate) const ALL: [Self; [$($name),+].len()] = [$(Self::$variant),+];

            pub(crate) const fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name,)+
                }
            }

            /// Finds one by its name.
            pub(crate) fn parse(name: &str) -> Option<Self> {
                Self::ALL.into_iter().find(|it| it.name() == name)
            }
        }
    };
}

named! {
    /// Who is measured.
    Subject {
        /// bowline, one call per message.
        Bowline = "bowline",
        /// bowline, calls that carry many messages.
        BowlineBatch = "bowline-batch",
        /// bowline, from buffers that it shares with the sender instead of copying.
        BowlineShared = "bowline-shared",
        /// The same as `Bowline` over RDMA, on soft devices.
        BowlineRdma = "bowline-rdma",
        /// A program's plain RDS sockets; each side's are those of a node of its own.
        Host = "host",
        /// The same on one node.
        HostOne = "host-one",
        /// A program in Python on the same sockets, each side on a node of its own.
        HostPython = "host-python",
        /// The same program over TCP, each message with its length.
        TcpPython = "tcp-python",
        /// A word in shared memory that is set, and waited for.
        Futex = "futex",
        /// A pipe within a process.
        Pipe = "pipe",
        /// The same in a process that has the library for RDS sockets loaded.
        PipePreloaded = "pipe-preloaded",
        /// bowline's RDMA verbs over RoCEv2, soft device.
        Roce = "bowline-roce",
        /// bowline's RTRS.
        Rtrs = "rtrs",
        /// The same; clients keep the keys of chunks that the server owns.
        RtrsKept = "rtrs-kept",
        /// bowline's RNBD.
        Rnbd = "rnbd",
        /// The same through the NBD socket of a mapped disk.
        DoorNbd = "door-nbd",
        /// The same through its file (FUSE).
        DoorFuse = "door-fuse",
        /// The same where the kernel asks by io_uring.
        DoorFuseRing = "door-fuse-ring",
        /// Requests and answers over UDP, in bursts: the ceiling of RTRS.
        RrUdp = "rr-udp",
        /// The same with a checksum of each segment, computed and checked.
        RrUdpCrc = "rr-udp-crc",
        /// Requests and answers over TCP, as many in a write as there are.
        RrTcp = "rr-tcp",
        /// nbdkit's memory plugin over TCP.
        Nbdkit = "nbdkit",
        /// qemu-nbd over TCP, with a file in memory.
        QemuNbd = "qemu-nbd",
        /// The file of nbdfuse, which uses nbdkit over TCP.
        Nbdfuse = "nbdfuse",
        /// tgtd over TCP, with a file in memory, and iscsi-perf.
        Tgt = "tgt",
        /// Framed TCP, staged up to 64 KiB: the ceiling of everything that frames over TCP.
        Tcpb = "tcpb",
        /// Framed TCP, gathered by the kernel from the messages themselves.
        Tcpz = "tcpz",
        /// Framed TCP, one write per message.
        Tcp1 = "tcp1",
        /// Framed TCP, one write per message, from a copy that is kept for a retransmission.
        Tcpk = "tcpk",
        /// One UDP datagram per message, unreliable.
        Udp = "udp",
        /// UDP in bursts that the kernel cuts and merges, with checksum, copies, window and
        /// acknowledgements: the ceiling of RoCEv2 in userspace.
        UdpGso = "udp-gso",
        /// Unix sockets that keep message boundaries.
        Seqp = "seqp",
        /// ZeroMQ, DEALER to ROUTER.
        Zmq = "zmq",
        /// nanomsg, PUSH to PULL (PAIR for round trips).
        Nano = "nanomsg",
        /// libfabric reliable datagrams over its `net` provider.
        OfiNet = "ofi-net",
        /// libfabric reliable datagrams over `tcp;ofi_rxm`.
        OfiRxm = "ofi-rxm",
        /// UCX active messages over TCP.
        Ucx = "ucx",
    }
}

impl Subject {
    /// Finds the subject that an entry's label names, however it is bound or set up.
    pub(crate) fn from_label(label: &str) -> Option<Self> {
        let plain =
            ["-unbound", "-as-is", "-one-cpu"].iter().find_map(|end| label.strip_suffix(end));
        Self::parse(plain.unwrap_or(label))
    }

    /// What tables call an entry with this label: disks of bowline by what they are used through.
    pub(crate) fn shown(label: &str) -> String {
        let names = [
            (Self::DoorFuseRing, "file by FUSE, io_uring"),
            (Self::DoorFuse, "file by FUSE"),
            (Self::DoorNbd, "NBD socket"),
            (Self::Rnbd, "rnbd library"),
        ];
        let rest = |(subject, shown): (Self, &'static str)| {
            Some((shown, label.strip_prefix(subject.name())?))
        };
        match names.into_iter().find_map(rest) {
            Some((shown, "")) => shown.to_owned(),
            Some((shown, how)) => format!("{shown}, {}", how.trim_start_matches('-')),
            None => label.to_owned(),
        }
    }

    /// Says whether this is other people's: a message library, or a server of storage.
    pub(crate) const fn is_peer(self) -> bool {
        matches!(self, Self::Zmq | Self::Nano | Self::OfiNet | Self::OfiRxm | Self::Ucx)
            || self.is_peer_of_storage()
    }

    /// Says whether this is a peer whose comparison is on record, which only builds with the
    /// feature `rivals` measure again.
    pub(crate) const fn is_rival(self) -> bool {
        matches!(self, Self::Nano | Self::OfiNet | Self::OfiRxm | Self::Ucx | Self::Tgt)
    }

    /// Says whether this is other people's server of storage.
    pub(crate) const fn is_peer_of_storage(self) -> bool {
        matches!(self, Self::Nbdkit | Self::QemuNbd | Self::Nbdfuse | Self::Tgt)
    }

    /// Says whether this is bowline's RDS.
    pub(crate) const fn is_bowline(self) -> bool {
        matches!(self, Self::Bowline | Self::BowlineBatch | Self::BowlineShared)
    }

    /// Says whether this is measured for the programs of a host alone.
    pub(crate) const fn is_of_host(self) -> bool {
        matches!(self, Self::TcpPython | Self::Futex | Self::Pipe) || self.host_nodes() > 0
    }

    /// How many nodes there are for the sides, which have the library for RDS sockets loaded; 0:
    /// they have no need of it.
    pub(crate) const fn host_nodes(self) -> usize {
        match self {
            Self::Host | Self::HostPython => 2,
            Self::HostOne | Self::PipePreloaded => 1,
            _ => 0,
        }
    }

    /// Says whether the sides are programs in Python.
    pub(crate) const fn is_python(self) -> bool {
        matches!(self, Self::HostPython | Self::TcpPython)
    }

    /// Says whether this reads and writes a store.
    pub(crate) const fn is_block(self) -> bool {
        matches!(self, Self::Rtrs | Self::RtrsKept)
            || self.is_rnbd()
            || matches!(self, Self::RrUdp | Self::RrUdpCrc | Self::RrTcp)
            || self.is_peer_of_storage()
    }

    /// Says whether this has soft devices of its own.
    pub(crate) const fn has_devices(self) -> bool {
        matches!(self, Self::Roce | Self::BowlineRdma) || self.is_rtrs() || self.is_rnbd()
    }

    /// Says whether this is RNBD, by the library or through a front end.
    pub(crate) const fn is_rnbd(self) -> bool {
        matches!(self, Self::Rnbd) || self.is_door()
    }

    /// Says whether this is a disk of bowline as other programs see it.
    pub(crate) const fn is_door(self) -> bool {
        matches!(self, Self::DoorNbd | Self::DoorFuse | Self::DoorFuseRing)
    }

    /// Says whether this is RTRS itself, whose server counts what it serves.
    pub(crate) const fn is_rtrs(self) -> bool {
        matches!(self, Self::Rtrs | Self::RtrsKept)
    }

    /// Says whether this belongs to RoCEv2 alone.
    pub(crate) const fn is_roce(self) -> bool {
        matches!(self, Self::Roce | Self::UdpGso)
    }
}

named! {
    /// What is measured.
    Kind {
        /// Messages one way; `flows` sockets (or connections) send to one.
        Stream = "stream",
        /// Request and answer of the same size.
        Rtt = "rtt",
        /// `flows` pairs of sockets; every receiver reads.
        AllAwake = "all-awake",
        /// `flows` pairs of sockets; the first receiver never reads.
        OneAsleep = "one-asleep",
        /// One socket sends to `flows` sockets of one node in turn.
        Sockets = "sockets",
        /// One socket sends to `flows` nodes in turn.
        Nodes = "nodes",
        /// Memory of `flows` bound sockets that do nothing.
        IdleSockets = "idle-sockets",
        /// Memory of `flows` connections that do nothing.
        IdleConnections = "idle-connections",
        /// RDMA writes, of which some have an immediate.
        Write = "write",
        /// RDMA reads; the receiver asks.
        Read = "read",
        /// Sends.
        Send = "send",
        /// Sends with an immediate.
        SendImm = "send-imm",
        /// Fetch and add of 8 bytes; the receiver asks.
        Atomic = "atomic",
        /// One fetch and add after the other.
        PingAtomic = "ping-atomic",
        /// A send, answered by one.
        PingSend = "ping-send",
        /// A write with immediate, answered by one.
        PingWrite = "ping-write",
        /// Reads of a store; the sender asks and counts.
        IoRead = "io-read",
        /// Writes to a store; the sender asks and counts.
        IoWrite = "io-write",
        /// One read of a store after the other.
        IoPing = "io-ping",
        /// One write after the other to a large store that nobody has written to, by a unix socket
        /// or a file of the sender's machine.
        DoorWrite = "door-write",
        /// Reads of a disk by fio; `flows` processes ask.
        FioRead = "fio-read",
        /// Writes to a disk by fio; `flows` processes ask.
        FioWrite = "fio-write",
        /// Reads of a store over several paths, of which the server resets one.
        IoReset = "io-reset",
        /// The same; one path carries nothing any more, and nobody says so.
        IoCut = "io-cut",
    }
}

impl Kind {
    /// Says whether the sender counts, because it asks.
    pub(crate) fn is_counted_by_sender(self) -> bool {
        self.is_round_trip() || self.is_of_storage() || self == Self::IdleConnections
    }

    /// Says whether a store is read or written, and rates or pauses are what is looked at.
    pub(crate) const fn is_of_storage(self) -> bool {
        matches!(self, Self::IoRead | Self::IoWrite) || self.loses_a_path()
    }

    /// Says whether fio asks, at a disk that is there already.
    pub(crate) const fn is_by_fio(self) -> bool {
        matches!(self, Self::FioRead | Self::FioWrite)
    }

    /// Tells whether one of several paths is lost during the measurement.
    pub(crate) const fn loses_a_path(self) -> bool {
        matches!(self, Self::IoReset | Self::IoCut)
    }

    /// Says whether round trips are timed, by the side that asks.
    pub(crate) const fn is_round_trip(self) -> bool {
        matches!(
            self,
            Self::Rtt
                | Self::PingSend
                | Self::PingWrite
                | Self::PingAtomic
                | Self::IoPing
                | Self::DoorWrite
        )
    }
}

named! {
    /// How a waiting thread waits.
    Wait {
        /// Spins for a while, then sleeps; bowline's default.
        Adaptive = "adaptive",
        /// Never sleeps.
        Spin = "spin",
        /// Sleeps at once.
        Sleep = "sleep",
    }
}

/// One measurement.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Cell {
    pub(crate) subject: Subject,
    pub(crate) kind: Kind,
    /// Payload bytes of a message.
    pub(crate) size: usize,
    /// Sockets, connections or nodes on the many side; queue pairs of RDMA.
    pub(crate) flows: usize,
    pub(crate) wait: Wait,
    /// RDS paths per connection; 0 is bowline's default. Paths of a session of RTRS; 0 is one.
    pub(crate) paths: usize,
    /// Number of the policy by which a session of RTRS chooses among its paths.
    pub(crate) policy: u8,
    /// After how many milliseconds a silent peer of a device is given up; 0: the device's default.
    pub(crate) path_dead_ms: u64,
    /// Congestion control; empty means the subject's own choice.
    pub(crate) cc: String,
    /// What limits the packets that a device has in flight.
    pub(crate) congestion: Congestion,
    /// CPU of the receiver and of the sender.
    pub(crate) pin: Option<(usize, usize)>,
    pub(crate) warm_ms: u64,
    /// 0: the parent says when it begins and ends.
    pub(crate) window_ms: u64,
    /// Send and receive buffer asked of a library, in bytes.
    pub(crate) buffer: usize,
    /// Node addresses of receiver and sender.
    pub(crate) nodes: (Ipv4Addr, Ipv4Addr),
    /// Path MTU of a device; 0 without a device.
    pub(crate) mtu: usize,
    /// Work requests outstanding on each queue pair; 0 without queue pairs.
    pub(crate) depth: usize,
    /// Both sides lose one of this many received packets, at random; 0: none.
    pub(crate) drop_one_in: u32,
    /// The sides are in networks of their own and reach each other by the addresses of `nodes`.
    /// Each request is timed; the store is small, since some have it filled over the network.
    pub(crate) apart: bool,
    /// Loops that never sleep, beside it.
    pub(crate) busy: usize,
}

/// Bytes of the store.
const STORE: usize = 64 << 20;
/// The same where it is filled over a network.
const STORE_APART: usize = 4 << 20;
/// The same where it is not filled: most requests find memory that nobody has touched.
const STORE_FRESH: usize = 2 << 30;

impl Cell {
    /// Bytes of the store.
    pub(crate) const fn store(&self) -> usize {
        match self.kind {
            Kind::DoorWrite => STORE_FRESH,
            _ if self.apart => STORE_APART,
            _ => STORE,
        }
    }

    /// Returns the RDS paths of a connection.
    pub(crate) fn rds_paths(&self) -> bowline::rds::Paths {
        // The number is 1, 8 or 0 for the default.
        u8::try_from(self.paths).ok().and_then(|n| n.try_into().ok()).unwrap_or_default()
    }

    /// Says whether its processes can take turns with those of others: they count until they are
    /// told to end.
    pub(crate) fn takes_turns(&self) -> bool {
        matches!(self.kind, Kind::IoRead | Kind::IoWrite) && self.subject != Subject::Tgt
    }

    /// Writes the measurement as `key=value` words.
    pub(crate) fn to_args(&self) -> Vec<String> {
        let (rx_pin, tx_pin) = self
            .pin
            .map_or((String::new(), String::new()), |(rx, tx)| (rx.to_string(), tx.to_string()));
        vec![
            format!("subject={}", self.subject.name()),
            format!("kind={}", self.kind.name()),
            format!("size={}", self.size),
            format!("flows={}", self.flows),
            format!("wait={}", self.wait.name()),
            format!("paths={}", self.paths),
            format!("policy={}", self.policy),
            format!("path_dead_ms={}", self.path_dead_ms),
            format!("cc={}", self.cc),
            format!("congestion={}", self.congestion),
            format!("rx_pin={rx_pin}"),
            format!("tx_pin={tx_pin}"),
            format!("warm_ms={}", self.warm_ms),
            format!("window_ms={}", self.window_ms),
            format!("buffer={}", self.buffer),
            format!("rx_node={}", self.nodes.0),
            format!("tx_node={}", self.nodes.1),
            format!("mtu={}", self.mtu),
            format!("depth={}", self.depth),
            format!("drop_one_in={}", self.drop_one_in),
            format!("apart={}", u8::from(self.apart)),
            format!("busy={}", self.busy),
        ]
    }

    /// Reads what [`to_args`](Self::to_args) wrote.
    pub(crate) fn from_words(words: &Words) -> Result<Self, String> {
        let pin = match (words.number("rx_pin"), words.number("tx_pin")) {
            (Ok(rx), Ok(tx)) => Some((rx as usize, tx as usize)),
            _ => None,
        };
        let bad = |key: &str| format!("bad role argument {key}={}", words.text(key));
        let node = |key: &str| words.text(key).parse::<Ipv4Addr>().map_err(|_| bad(key));
        Ok(Self {
            subject: Subject::parse(words.text("subject")).ok_or_else(|| bad("subject"))?,
            kind: Kind::parse(words.text("kind")).ok_or_else(|| bad("kind"))?,
            size: words.number("size")? as usize,
            flows: words.number("flows")? as usize,
            wait: Wait::parse(words.text("wait")).ok_or_else(|| bad("wait"))?,
            paths: words.number("paths")? as usize,
            policy: u8::try_from(words.number("policy")?).map_err(|_| bad("policy"))?,
            path_dead_ms: words.number("path_dead_ms")?,
            cc: words.text("cc").to_owned(),
            congestion: words.text("congestion").parse().map_err(|_| bad("congestion"))?,
            pin,
            warm_ms: words.number("warm_ms")?,
            window_ms: words.number("window_ms")?,
            buffer: words.number("buffer")? as usize,
            nodes: (node("rx_node")?, node("tx_node")?),
            mtu: words.number("mtu")? as usize,
            depth: words.number("depth")? as usize,
            drop_one_in: u32::try_from(words.number("drop_one_in")?)
                .map_err(|_| bad("drop_one_in"))?,
            apart: words.number("apart")? == 1,
            busy: words.number("busy")? as usize,
        })
    }
}

/// Words of the form `key=value`, as processes of the bench exchange them.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Words(BTreeMap<String, String>);

impl Words {
    /// Splits words; what has no `=` in it is left out.
    pub(crate) fn parse<'a>(words: impl IntoIterator<Item = &'a str>) -> Self {
        let split = words.into_iter().filter_map(|word| word.split_once('='));
        Self(split.map(|(k, v)| (k.to_owned(), v.to_owned())).collect())
    }

    /// Returns a value, empty when there is none.
    pub(crate) fn text(&self, key: &str) -> &str {
        self.0.get(key).map_or("", String::as_str)
    }

    /// Returns a value as a number.
    pub(crate) fn number(&self, key: &str) -> Result<u64, String> {
        let text = self.text(key);
        text.parse().map_err(|_| format!("{key}={text:?} is not a number"))
    }

    /// Iterates over keys and values.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(k, v)| (k.as_str(), v.as_str()))
    }

    /// Joins the words into a line.
    pub(crate) fn line(&self) -> String {
        self.0.iter().fold(String::new(), |mut line, (k, v)| {
            if !line.is_empty() {
                line.push(' ');
            }
            let _ = write!(line, "{k}={v}"); // writing to a String cannot fail
            line
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cell_survives_the_way_through_arguments() {
        let cell = Cell {
            subject: Subject::OfiRxm,
            kind: Kind::OneAsleep,
            size: 8192,
            flows: 16,
            wait: Wait::Sleep,
            paths: 2,
            policy: 1,
            path_dead_ms: 500,
            cc: "cubic".into(),
            congestion: Congestion::Fixed(64),
            pin: Some((1, 0)),
            warm_ms: 150,
            window_ms: 250,
            buffer: 1 << 23,
            nodes: (Ipv4Addr::new(127, 0, 0, 2), Ipv4Addr::new(127, 0, 0, 1)),
            mtu: 4096,
            depth: 16,
            drop_one_in: 1000,
            apart: true,
            busy: 4,
        };
        let args = cell.to_args();
        let words = Words::parse(args.iter().map(String::as_str));
        assert_eq!(Cell::from_words(&words), Ok(cell.clone()));
        let unpinned = Cell { pin: None, ..cell };
        let args = unpinned.to_args();
        let words = Words::parse(args.iter().map(String::as_str));
        assert_eq!(Cell::from_words(&words), Ok(unpinned));
    }

    #[test]
    fn disks_are_called_by_what_they_are_used_through() {
        let shown = [
            ("rnbd", "rnbd library"),
            ("rnbd-adaptive", "rnbd library, adaptive"),
            ("door-nbd-unbound", "NBD socket, unbound"),
            ("door-fuse", "file by FUSE"),
            ("door-fuse-ring", "file by FUSE, io_uring"),
            ("rtrs", "rtrs"),
        ];
        for (label, wanted) in shown {
            assert_eq!(Subject::shown(label), wanted, "{label}");
        }
    }

    #[test]
    fn every_name_is_read_back() {
        for subject in Subject::ALL {
            assert_eq!(Subject::parse(subject.name()), Some(subject));
        }
        for kind in Kind::ALL {
            assert_eq!(Kind::parse(kind.name()), Some(kind));
        }
        assert_eq!(Wait::parse("spinning"), None);
    }
}
