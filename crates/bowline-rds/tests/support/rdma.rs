//! Two nodes joined over RDMA in memory.

use std::collections::VecDeque;
use std::net::SocketAddr;

use bowline_rds::{
    CloseReason, Config, Instant, Node, Output, RdmaAccess, RdmaFrame, RdmaLinkId, RdmaPiece,
    RdmaRequest, RdmaShape, RdmaWork, RxBuf,
};

use super::{A, B, ip};

/// What a frame carries, as it would lie in memory after a receive.
#[derive(Clone, Debug)]
pub(crate) struct Sent {
    pub(crate) id: u64,
    pub(crate) header: [u8; 48],
    pub(crate) payload: Vec<u8>,
    pub(crate) signalled: bool,
    pub(crate) solicited: bool,
}

/// A request of an operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Work {
    pub(crate) id: u64,
    pub(crate) access: RdmaAccess,
    pub(crate) remote: u64,
    pub(crate) rkey: u32,
    pub(crate) local: Vec<RdmaPiece>,
    pub(crate) signalled: bool,
}

/// A node and what it asked for.
#[derive(Debug)]
pub(crate) struct Side {
    pub(crate) node: Node,
    /// Attempts to connect that were not answered yet.
    pub(crate) connects: VecDeque<(RdmaLinkId, SocketAddr, SocketAddr, RdmaShape)>,
    /// Connections that the node has ended.
    pub(crate) closed: Vec<RdmaLinkId>,
    /// Connections with something to send.
    pub(crate) ready: VecDeque<RdmaLinkId>,
    /// Requests of operations that were posted, with the first piece of their memory.
    pub(crate) works: Vec<Work>,
    /// Memory that was used, by the driver's numbers.
    pub(crate) used: Vec<u64>,
    /// Memory taken back.
    pub(crate) released: Vec<u64>,
}

impl Side {
    pub(crate) fn new(addr: &str, config: Config) -> Self {
        let mut node = Node::new(Config { addrs: vec![ip(addr)], ..config });
        node.set_rdma_addrs([ip(addr)]);
        Self {
            node,
            connects: VecDeque::new(),
            closed: Vec::new(),
            ready: VecDeque::new(),
            works: Vec::new(),
            used: Vec::new(),
            released: Vec::new(),
        }
    }

    pub(crate) fn collect(&mut self) {
        while let Some(output) = self.node.poll_output() {
            self.took(output);
        }
        self.node.check_invariants();
    }

    /// Notes what the node asked for.
    pub(crate) fn took(&mut self, output: Output) {
        match output {
            Output::RdmaConnect { link, local, remote, shape } => {
                self.connects.push_back((link, local, remote, shape));
            }
            Output::RdmaSend { link } => self.ready.push_back(link),
            Output::RdmaUsed { tag } => self.used.push(tag),
            Output::RdmaRelease { tag } => self.released.push(tag),
            Output::RdmaClose { link } => {
                self.connects.retain(|(of, ..)| *of != link);
                self.closed.push(link);
            }
            _ => {}
        }
    }

    /// Takes all frames that a connection has to send; none of them has completed.
    pub(crate) fn frames(&mut self, now: Instant, link: RdmaLinkId) -> Vec<Sent> {
        let mut frames = Vec::new();
        loop {
            let before = frames.len() + self.works.len();
            self.collect_frames(now, link, &mut frames);
            if frames.len() + self.works.len() == before {
                return frames;
            }
            self.node.handle_rdma_posted(now, link);
        }
    }

    /// The same; the driver does not say that they are posted.
    pub(crate) fn collect_frames(
        &mut self,
        now: Instant,
        link: RdmaLinkId,
        frames: &mut Vec<Sent>,
    ) {
        let works = &mut self.works;
        self.node.poll_rdma_requests(now, link, usize::MAX, |request, payload| {
            let send = match request {
                RdmaRequest::Frame(send) => send,
                RdmaRequest::Work(work) => {
                    let RdmaWork { id, access, remote, rkey, local, signalled } = work;
                    let local = local.to_vec();
                    works.push(Work { id, access, remote, rkey, local, signalled });
                    return;
                }
            };
            let payload = payload.flatten().copied().collect::<Vec<_>>();
            assert_eq!(payload.len(), send.len);
            frames.push(Sent {
                id: send.id,
                header: send.header,
                payload,
                signalled: send.signalled,
                solicited: send.solicited,
            });
        });
    }

    pub(crate) fn take(&mut self, now: Instant, link: RdmaLinkId, frames: &[Sent]) {
        let mut bytes = Vec::new();
        let mut list = Vec::new();
        for frame in frames {
            let start = bytes.len();
            bytes.extend_from_slice(&frame.payload);
            list.push(RdmaFrame { bytes: 48 + frame.payload.len(), header: frame.header, start });
        }
        self.node.handle_rdma_frames(now, link, &RxBuf::from_vec(bytes), &list);
        self.collect();
    }
}

/// Two nodes and at most one connection between them.
#[derive(Debug)]
pub(crate) struct Pair {
    pub(crate) now: Instant,
    pub(crate) sides: [Side; 2],
    pub(crate) links: Option<[RdmaLinkId; 2]>,
    /// Most frames that a side had outstanding at the other.
    pub(crate) most: [usize; 2],
}

impl Pair {
    pub(crate) fn new() -> Self {
        Self::with(Config::default())
    }

    pub(crate) fn with(config: Config) -> Self {
        let sides = [A, B].map(|addr| Side::new(addr, config.clone()));
        Self::of(sides)
    }

    /// Two nodes that may be set up differently.
    pub(crate) fn of(sides: [Side; 2]) -> Self {
        Self { now: Instant::default(), sides, links: None, most: [0; 2] }
    }

    /// Carries out all that the nodes ask for, until they ask for nothing.
    pub(crate) fn run(&mut self) {
        loop {
            self.sides.iter_mut().for_each(Side::collect);
            if let Some(from) = (0..2).find(|at| !self.sides[*at].connects.is_empty()) {
                self.connect(from);
                continue;
            }
            if let Some(from) = (0..2).find(|at| !self.sides[*at].closed.is_empty()) {
                let link = self.sides[from].closed.remove(0);
                if self.links.is_some_and(|links| links[from] == link) {
                    self.cut();
                } else {
                    self.sides[from].node.handle_rdma_closed(self.now, link, CloseReason::Eof);
                }
                continue;
            }
            let Some(from) = (0..2).find(|at| !self.sides[*at].ready.is_empty()) else { return };
            self.transfer(from);
        }
    }

    fn connect(&mut self, from: usize) {
        let Some((link, local, mut remote, shape)) = self.sides[from].connects.pop_front() else {
            return;
        };
        remote.set_port(18_634);
        let to = 1 - from;
        let data = shape.private_data;
        let answer = self.sides[to].node.handle_rdma_request(self.now, remote, local, &data);
        self.sides[to].collect();
        match answer {
            Err(_) => {
                self.sides[from].node.handle_rdma_closed(self.now, link, CloseReason::Refused);
            }
            Ok(accept) => {
                let mut links = [link; 2];
                links[to] = accept.link;
                self.links = Some(links);
                let data = accept.shape.private_data;
                self.sides[from].node.handle_rdma_established(self.now, link, Some(&data));
                self.sides[to].node.handle_rdma_established(self.now, accept.link, None);
            }
        }
    }

    fn transfer(&mut self, from: usize) {
        let Some(link) = self.sides[from].ready.pop_front() else { return };
        let frames = self.sides[from].frames(self.now, link);
        // The device of a machine that has failed may still acknowledge.
        if let Some(links) = self.links.filter(|links| links[from] == link) {
            self.most[from] = self.most[from].max(frames.len());
            self.sides[1 - from].take(self.now, links[1 - from], &frames);
            self.sides[1 - from].node.handle_rdma_receives_posted(links[1 - from], frames.len());
        }
        let frames = frames.iter().filter(|sent| sent.signalled).map(|sent| sent.id);
        let works = self.sides[from].works.iter().filter(|work| work.signalled).map(|w| w.id);
        let mut done: Vec<_> = frames.chain(works).collect();
        done.sort_unstable();
        for id in done {
            self.sides[from].node.handle_rdma_sent(self.now, link, id);
        }
    }

    /// Ends the connection for both sides.
    pub(crate) fn cut(&mut self) {
        let Some(links) = self.links.take() else { return };
        for (side, link) in self.sides.iter_mut().zip(links) {
            side.node.handle_rdma_closed(self.now, link, CloseReason::Reset);
            side.closed.retain(|closed| *closed != link);
        }
    }

    /// Lets time pass, and fires timers.
    pub(crate) fn pass(&mut self, millis: u64) {
        for _ in 0..millis {
            self.now = self.now + std::time::Duration::from_millis(1);
            for side in &mut self.sides {
                side.node.handle_timeout(self.now);
            }
            self.run();
        }
    }
}
