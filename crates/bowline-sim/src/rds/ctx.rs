//! State that all parts of a run share: the clock, the queue of events, the random generator, the
//! network, the trace and the oracle.

use std::collections::VecDeque;

use super::bowline::RdmaWork;
use super::net::{EndId, Net, NetEvent, Notice};
use super::ops::Ops;
use super::oracle::Oracle;
use super::rdma::{Fabric, QpId, RdmaEvent, RdmaNotice};
use super::stats::Stats;
use crate::engine::base::{Base, has_base};
use crate::engine::rng::Rng;
use crate::engine::trace::Trace;

/// Index of a host.
pub(crate) type HostId = usize;

/// An event that is due at some virtual time.
#[derive(Debug)]
pub(crate) enum Event {
    /// A packet arrives or a TCP timer is due.
    Net(NetEvent),
    /// The same of queue pairs.
    Rdma(RdmaEvent),
    /// Work of a host; ignored if the host was restarted since.
    Host { host: HostId, boot: u32, what: HostEvent },
    /// An event of the workload.
    App(AppEvent),
    /// The next fault of one kind.
    Fault { kind: usize },
    /// A fault ends.
    Heal(Heal),
}

/// Work of a host.
#[derive(Clone, Copy, Debug)]
pub(crate) enum HostEvent {
    /// Reads a TCP connection.
    Read(EndId),
    /// Continues to parse bytes that were read.
    Process,
    /// The timer armed as number `.0` is due.
    Timer(u64),
    /// Writes gathered messages.
    Flush(EndId),
    /// Reports an earlier write.
    FinishWrite(EndId),
    /// Asks TCP how many bytes are acknowledged.
    TcpAcks,
    /// A drained connection took too long.
    DrainLimit(EndId),
    /// A node that ends has had its time to tell its peers.
    EndLimit,
    /// Takes a connection from the listener.
    Accept,
    /// Work for a queue pair.
    Rdma(RdmaWork),
    /// Kernel peer: transmits on a path that has waited for path 0.
    TryPath {
        conn: usize,
        path: usize,
    },
    /// Kernel peer: finishes the shutdown of a path.
    Shutdown {
        conn: usize,
        path: usize,
    },
    /// Kernel peer: connects a path.
    Connect {
        conn: usize,
        path: usize,
    },
    /// Kernel peer: the same of a connection over RDMA.
    IbShutdown {
        conn: usize,
    },
    IbConnect {
        conn: usize,
    },
}

/// Events of the workload.
#[derive(Clone, Copy, Debug)]
pub(crate) enum AppEvent {
    /// A sender continues.
    Send(usize),
    /// The reader of a socket continues.
    Read(usize),
    /// A socket is opened again.
    Reopen(usize),
    /// A stopped reader continues.
    ResumeReader(usize),
    /// A kernel peer tries waiting messages again.
    RetryWaiting(HostId),
    /// Checks whether all work is done.
    Check,
    /// The faulty part of the run ends.
    Calm,
}

/// The end of a fault.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Heal {
    /// Packets from one host reach the other again.
    Route { from: HostId, to: HostId },
    /// A host comes up.
    Boot(HostId),
    /// A node that was shut down, or hands over, has ended.
    Ended(HostId),
    /// A process goes on with what another one had.
    TakenOver(HostId),
    /// A stalled process continues.
    Resume(HostId),
    /// An address is back at its host.
    Address { host: HostId, index: usize },
    /// Delays are normal again.
    Delay,
    /// No end yet: the connections that peers have made to a host break once more.
    Crowd { host: HostId, until: u64 },
}

/// The shared state of a run.
pub(crate) struct Ctx {
    pub(crate) base: Base<Event, Stats>,
    pub(crate) net: Net,
    pub(crate) rdma: Fabric,
    pub(crate) ops: Ops,
    pub(crate) oracle: Oracle,
    /// Reports of TCP to hosts; empty again before the step ends.
    pub(crate) notices: VecDeque<(EndId, Notice)>,
    /// The same of queue pairs.
    pub(crate) rdma_notices: VecDeque<(HostId, QpId, RdmaNotice)>,
    /// Sockets that are ready and have waiting users, as (slot, readable, writable).
    pub(crate) wakes: VecDeque<(usize, bool, bool)>,
}

has_base!(Ctx, Event, Stats);

impl Ctx {
    pub(crate) fn new(rng: Rng, net: Net, trace: Trace) -> Self {
        Self {
            base: Base::new(rng, trace),
            net,
            rdma: Fabric::default(),
            ops: Ops::default(),
            oracle: Oracle::default(),
            notices: VecDeque::new(),
            rdma_notices: VecDeque::new(),
            wakes: VecDeque::new(),
        }
    }

    /// Schedules work of a host, valid for its present boot.
    pub(crate) fn schedule_host(&mut self, delay: u64, host: HostId, what: HostEvent) {
        let boot = self.net.hosts[host].boot;
        self.schedule(delay, Event::Host { host, boot, what });
    }
}
