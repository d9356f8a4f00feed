//! Which cells there are: links, works, and who is measured in each.

use super::args::Options;
use super::scene::Scene;
use crate::cell::{Cell, Kind, Subject, Wait};
use crate::plan::{BUFFER, bytes};

/// What every port of the router is like.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Link {
    pub(crate) name: &'static str,
    /// Bits per second.
    pub(crate) rate: u64,
    /// Bytes that are queued before packets are dropped.
    pub(crate) limit: u32,
}

impl Link {
    /// Bytes per second, headers and all.
    pub(crate) const fn bytes_per_second(&self) -> f64 {
        self.rate as f64 / 8.0
    }
}

/// All links.
pub(crate) const LINKS: [Link; 3] = [
    Link { name: "200m-128k", rate: 200_000_000, limit: 128 << 10 },
    Link { name: "1g-256k", rate: 1_000_000_000, limit: 256 << 10 },
    Link { name: "1g-64k", rate: 1_000_000_000, limit: 64 << 10 },
];
/// The link that is measured unless others are asked for.
pub(crate) const USUAL_LINK: &str = "1g-256k";
/// MTUs of the network.
pub(crate) const MTUS: [u32; 2] = [1500, 9000];
/// Numbers of clients.
pub(crate) const CLIENTS: [usize; 3] = [1, 2, 4];

/// What is done over the network.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Work {
    pub(crate) name: &'static str,
    kind: Kind,
    pub(crate) size: usize,
    pub(crate) depth: usize,
    pub(crate) own: Subject,
    pub(crate) rival: Subject,
    /// What else is measured unless asked otherwise: a TCP flow beside it, busy loops beside it.
    beside: &'static [Beside],
}

const fn rdma(name: &'static str, kind: Kind, size: usize, depth: usize) -> Work {
    let (own, rival) = (Subject::Roce, Subject::Tcpz);
    Work { name, kind, size, depth, own, rival, beside: &[Beside::Nothing] }
}

const fn disk(name: &'static str, kind: Kind, size: usize, depth: usize) -> Work {
    let (own, rival) = (Subject::Rnbd, Subject::Nbdkit);
    Work { name, kind, size, depth, own, rival, beside: &[Beside::Nothing] }
}

/// fio on what other programs see of a mapped disk, beside the same fio on nbdkit.
const fn door(name: &'static str, kind: Kind, size: usize, depth: usize, own: Subject) -> Work {
    Work { own, beside: &[Beside::Nothing, Beside::Busy], ..disk(name, kind, size, depth) }
}

const SOCKET: Subject = Subject::DoorNbd;
const FILE: Subject = Subject::DoorFuse;

const WITH_TCP: &[Beside] = &[Beside::Nothing, Beside::Tcp];
const WITH_ALL: &[Beside] = &Beside::ALL;

/// All works.
pub(crate) const WORKS: [Work; 23] = [
    Work { beside: WITH_TCP, ..rdma("rdma-write/1048576", Kind::Write, 1 << 20, 4) },
    rdma("rdma-read/1048576", Kind::Read, 1 << 20, 4),
    rdma("rdma-write/4096", Kind::Write, 4096, 16),
    rdma("rdma-read/4096", Kind::Read, 4096, 16),
    disk("rnbd-write/131072x16", Kind::IoWrite, 128 << 10, 16),
    disk("rnbd-read/131072x16", Kind::IoRead, 128 << 10, 16),
    Work { beside: WITH_ALL, ..disk("rnbd-write/4096x32", Kind::IoWrite, 4096, 32) },
    disk("rnbd-read/4096x32", Kind::IoRead, 4096, 32),
    disk("rnbd-write/4096x1", Kind::IoWrite, 4096, 1),
    disk("rnbd-read/4096x1", Kind::IoRead, 4096, 1),
    Work {
        name: "rds/65536",
        kind: Kind::Stream,
        size: 64 << 10,
        depth: 0,
        own: Subject::Bowline,
        rival: Subject::Tcpz,
        beside: &[Beside::Nothing],
    },
    door("door-nbd-read/4096x1", Kind::FioRead, 4096, 1, SOCKET),
    door("door-nbd-write/4096x1", Kind::FioWrite, 4096, 1, SOCKET),
    door("door-nbd-read/4096x32", Kind::FioRead, 4096, 32, SOCKET),
    door("door-nbd-write/4096x32", Kind::FioWrite, 4096, 32, SOCKET),
    door("door-nbd-read/131072x16", Kind::FioRead, 128 << 10, 16, SOCKET),
    door("door-nbd-write/131072x16", Kind::FioWrite, 128 << 10, 16, SOCKET),
    door("door-fuse-read/4096x1", Kind::FioRead, 4096, 1, FILE),
    door("door-fuse-write/4096x1", Kind::FioWrite, 4096, 1, FILE),
    door("door-fuse-read/4096x32", Kind::FioRead, 4096, 32, FILE),
    door("door-fuse-write/4096x32", Kind::FioWrite, 4096, 32, FILE),
    door("door-fuse-read/131072x16", Kind::FioRead, 128 << 10, 16, FILE),
    door("door-fuse-write/131072x16", Kind::FioWrite, 128 << 10, 16, FILE),
];

impl Work {
    /// Says whether a disk is read or written.
    pub(crate) const fn is_of_disk(&self) -> bool {
        self.own.is_rnbd()
    }

    /// Says whether fio reads or writes a disk as other programs see it.
    pub(crate) const fn is_by_fio(&self) -> bool {
        self.kind.is_by_fio()
    }

    /// Says whether data go from the server to the clients; all others meet at the server's port.
    pub(crate) fn comes_back(&self) -> bool {
        matches!(self.kind, Kind::IoRead | Kind::FioRead)
    }

    /// Says what is done, for people.
    pub(crate) fn title(&self) -> String {
        let size = bytes(self.size);
        match self.kind {
            Kind::Write => format!("RDMA WRITE of {size}, {} outstanding", self.depth),
            Kind::Read => format!("RDMA READ of {size} by the server, {} outstanding", self.depth),
            Kind::IoWrite => format!("RNBD write of {size}, {} outstanding", self.depth),
            Kind::IoRead => format!("RNBD read of {size}, {} outstanding", self.depth),
            Kind::FioRead | Kind::FioWrite => {
                let how = if self.kind == Kind::FioRead { "reads" } else { "writes" };
                let door = Subject::shown(self.own.name());
                format!("fio: random {how} of {size}, {} outstanding, {door}", self.depth)
            }
            _ => format!("RDS messages of {size}"),
        }
    }
}

/// What goes on meanwhile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Beside {
    Nothing,
    /// A bare TCP flow from the first client to the server, or back where the data come back.
    Tcp,
    /// Loops that never sleep: two, or four where fio asks.
    Busy,
}

impl Beside {
    pub(crate) const ALL: [Self; 3] = [Self::Nothing, Self::Tcp, Self::Busy];

    /// The name on the command line.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Nothing => "nothing",
            Self::Tcp => "tcp",
            Self::Busy => "busy",
        }
    }
}

/// One cell.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NetCell {
    pub(crate) link: &'static Link,
    pub(crate) mtu: u32,
    pub(crate) clients: usize,
    pub(crate) work: &'static Work,
    pub(crate) beside: Beside,
}

impl NetCell {
    /// The name of the cell.
    pub(crate) fn name(&self) -> String {
        let beside = match self.beside {
            Beside::Nothing => String::new(),
            other => format!("+{}", other.name()),
        };
        format!("{}/{}/{}/{}{beside}", self.link.name, self.mtu, self.clients, self.work.name)
    }

    /// Payload bytes per second that the links have room for at most, headers counted as payload.
    pub(crate) fn capacity(&self) -> f64 {
        let ports = if self.work.comes_back() { self.clients } else { 1 };
        self.link.bytes_per_second() * ports as f64
    }

    /// Busy loops that run beside it.
    pub(crate) fn loops(&self) -> usize {
        match self.beside {
            Beside::Busy if self.work.is_by_fio() => 4,
            Beside::Busy => 2,
            _ => 0,
        }
    }

    /// What one client measures, with the server process that is there for it.
    pub(crate) fn client_cell(&self, subject: Subject, client: usize, options: &Options) -> Cell {
        let work = self.work;
        let mtu = if self.mtu < 4200 { 1024 } else { 4096 };
        let kind = if subject == Subject::Tcpz { Kind::Stream } else { work.kind };
        self.cell(subject, kind, work.size, Scene::addresses(client), mtu, options)
    }

    /// The TCP flow beside it.
    pub(crate) fn flow_cell(&self, options: &Options) -> Cell {
        let (server, client) = Scene::addresses(0);
        let nodes = if self.work.comes_back() { (client, server) } else { (server, client) };
        self.cell(Subject::Tcpz, Kind::Stream, 64 << 10, nodes, 0, options)
    }

    fn cell(
        &self,
        subject: Subject,
        kind: Kind,
        size: usize,
        nodes: (std::net::Ipv4Addr, std::net::Ipv4Addr),
        mtu: usize,
        options: &Options,
    ) -> Cell {
        let bowline = subject.has_devices() || subject.is_bowline();
        Cell {
            subject,
            kind,
            size,
            flows: 1,
            wait: if bowline { Wait::Adaptive } else { Wait::Sleep },
            paths: 0,
            policy: bowline_rtrs_driver::Policy::default() as u8,
            path_dead_ms: 0,
            cc: options.cc.clone(),
            congestion: options.congestion,
            pin: None,
            warm_ms: options.warm.as_millis() as u64,
            window_ms: options.window.as_millis() as u64,
            buffer: BUFFER,
            nodes,
            mtu,
            depth: self.work.depth,
            drop_one_in: 0,
            apart: true,
            busy: self.loops(),
        }
    }
}

/// Lays out the cells that the options ask for.
pub(crate) fn plan(options: &Options) -> Vec<NetCell> {
    let mut cells = Vec::new();
    for link in LINKS.iter().filter(|link| options.links.contains(&link.name)) {
        for &mtu in &options.mtus {
            for &clients in &options.clients {
                for work in WORKS.iter().filter(|work| options.wants(work)) {
                    let beside = match &options.beside {
                        Some(chosen) => chosen,
                        None if work.is_by_fio() => work.beside,
                        None if options.is_full() && work.beside != WITH_ALL => WITH_TCP,
                        None => work.beside,
                    };
                    cells.extend(beside.iter().map(|&beside| NetCell {
                        link,
                        mtu,
                        clients,
                        work,
                        beside,
                    }));
                }
            }
        }
    }
    cells
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::args::parsed;

    fn names(line: &str) -> Vec<String> {
        plan(&parsed(line).unwrap()).iter().map(NetCell::name).collect()
    }

    #[test]
    fn the_usual_cells_are_few_and_the_full_ones_all() {
        let usual = names("");
        assert_eq!(usual.len(), 14, "{usual:?}");
        assert!(usual.contains(&"1g-256k/1500/1/rnbd-write/4096x32+busy".to_owned()));
        assert!(usual.iter().all(|name| name.starts_with("1g-256k/1500/1/")), "{usual:?}");
        let full = names("--full");
        assert_eq!(full.len(), 3 * 2 * 3 * (2 * 11 + 1));
    }

    #[test]
    fn cells_are_chosen_by_each_of_their_properties() {
        let some = names("--link 1g-64k,200m-128k --mtu 9000 --clients 4 --only rds --beside tcp");
        assert_eq!(some, ["200m-128k/9000/4/rds/65536+tcp", "1g-64k/9000/4/rds/65536+tcp"]);
    }

    #[test]
    fn doors_are_measured_when_they_are_asked_for() {
        let some = names("--only door --clients 1,4 --link 200m-128k");
        assert_eq!(some.len(), 2 * 12 * 2, "{some:?}");
        assert_eq!(some[0], "200m-128k/1500/1/door-nbd-read/4096x1");
        assert!(some.contains(&"200m-128k/1500/4/door-fuse-write/131072x16+busy".to_owned()));
    }

    #[test]
    fn sides_reach_each_other_by_their_addresses() {
        let options = parsed("").unwrap();
        let find = |name: &str| WORKS.iter().find(|work| work.name == name).unwrap();
        let cell =
            |work| NetCell { link: &LINKS[0], mtu: 9000, clients: 2, work, beside: Beside::Tcp };
        let write = cell(find("rnbd-write/4096x1"));
        let one = write.client_cell(Subject::Rnbd, 1, &options);
        assert_eq!(one.nodes, ([10, 90, 0, 3].into(), [10, 90, 2, 2].into()));
        assert_eq!((one.mtu, one.depth, one.apart), (4096, 1, true));
        assert_eq!(write.flow_cell(&options).nodes.0, std::net::Ipv4Addr::from([10, 90, 0, 2]));
        let read = cell(find("rnbd-read/4096x1"));
        assert_eq!(read.flow_cell(&options).nodes.0, std::net::Ipv4Addr::from([10, 90, 1, 2]));
        assert!((read.capacity() - 50e6).abs() < 1.0 && (write.capacity() - 25e6).abs() < 1.0);
    }
}
