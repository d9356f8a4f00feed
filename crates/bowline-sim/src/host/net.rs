//! The network between two nodes: connections that lose nothing, and are slow at most.

use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::rc::Rc;

use bowline_rds::{CloseHow, CloseReason, LinkId, Output, RxBuf, TxBatch};

use super::node::RdsNode;

/// One end of a connection: the place of its node, and the link there.
type Place = (usize, LinkId);

#[derive(Debug)]
enum Arrival {
    Bytes(Vec<u8>),
    End,
}

/// The connections of all nodes.
#[derive(Debug, Default)]
pub(super) struct Net {
    /// The other end of each.
    peers: BTreeMap<Place, Place>,
    /// What comes for each.
    coming: BTreeMap<Place, VecDeque<Arrival>>,
    next_port: u16,
    batch: TxBatch,
}

impl Net {
    /// Does what the nodes ask for; nodes that are not up are `None`. Returns whether there was
    /// anything.
    pub(super) fn carry_out(&mut self, nodes: &[Option<Rc<RdsNode>>]) -> bool {
        let mut any = false;
        for at in 0..nodes.len() {
            let Some(rds) = &nodes[at] else { continue };
            for output in rds.outputs.take() {
                any = true;
                self.one(nodes, at, rds, output);
            }
        }
        any
    }

    fn one(&mut self, nodes: &[Option<Rc<RdsNode>>], at: usize, rds: &RdsNode, output: Output) {
        match output {
            Output::Connect { link, local, remote, port_mod8 } => {
                self.next_port = (self.next_port + 8) % 20_000;
                let port = 40_000 + self.next_port / 8 * 8 + u16::from(port_mod8);
                let from = SocketAddr::new(local, port);
                let to = nodes.iter().position(|node| {
                    let has = |rds: &Rc<RdsNode>| rds.node.borrow().is_local(remote.ip());
                    node.as_ref().is_some_and(has)
                });
                let accepted = to.and_then(|to| {
                    let peer = nodes[to].as_ref()?;
                    let link = peer.call(|node, now| node.handle_accepted(now, remote, from));
                    Some(link.map(|link| (to, link)))
                });
                match accepted {
                    // The system has accepted it, and the node resets it.
                    Some(Err(_)) => {
                        rds.call(|node, now| node.handle_connected(now, link, from));
                        self.coming.entry((at, link)).or_default().push_back(Arrival::End);
                    }
                    Some(Ok(place)) => {
                        self.peers.insert((at, link), place);
                        self.peers.insert(place, (at, link));
                        rds.call(|node, now| node.handle_connected(now, link, from));
                    }
                    None => rds.call(|node, now| {
                        node.handle_closed(now, link, CloseReason::Refused);
                    }),
                }
            }
            Output::Transmit { link } => self.transmit((at, link), rds),
            Output::Close { link, how } => {
                let place = (at, link);
                // What was sent before the end comes before it.
                if matches!(how, CloseHow::Drain | CloseHow::Cut) {
                    for arrival in self.coming.remove(&place).unwrap_or_default() {
                        if let Arrival::Bytes(bytes) = arrival {
                            rds.call(|node, now| {
                                node.handle_data(now, link, RxBuf::from_vec(bytes));
                                node.process(now, None, usize::MAX);
                            });
                        }
                    }
                    rds.call(|node, now| node.handle_closed(now, link, CloseReason::Eof));
                }
                self.end(place);
            }
            Output::CheckAlive { link } => rds.call(|node, now| node.handle_checked(now, link)),
            _ => {}
        }
    }

    fn transmit(&mut self, place: Place, rds: &RdsNode) {
        let link = place.1;
        loop {
            let (batch, mut bytes) = (&mut self.batch, Vec::new());
            let n = rds.call(|node, now| {
                let n = node.poll_transmit(now, link, batch, 65_536);
                batch.slices().for_each(|slice| bytes.extend_from_slice(slice));
                if n > 0 {
                    node.transmitted(now, link, n, false);
                }
                n
            });
            if n == 0 {
                return;
            }
            if let Some(peer) = self.peers.get(&place) {
                self.coming.entry(*peer).or_default().push_back(Arrival::Bytes(bytes));
            }
        }
    }

    /// One end is closed: the other learns of it after what was sent.
    fn end(&mut self, place: Place) {
        self.coming.remove(&place);
        if let Some(peer) = self.peers.remove(&place) {
            self.peers.remove(&peer);
            self.coming.entry(peer).or_default().push_back(Arrival::End);
        }
    }

    /// A node is gone, with its connections.
    pub(super) fn node_ended(&mut self, at: usize) {
        let own: Vec<Place> = self.peers.keys().filter(|place| place.0 == at).copied().collect();
        own.into_iter().for_each(|place| self.end(place));
        self.coming.retain(|place, _| place.0 != at);
    }

    /// Tells whether a connection between two nodes stands.
    pub(super) fn is_connected(&self, one: usize, other: usize) -> bool {
        self.peers.iter().any(|(from, to)| from.0 == one && to.0 == other)
    }

    /// Connections on which something can come now.
    pub(super) fn arrivals(&self, nodes: &[Option<Rc<RdsNode>>]) -> Vec<Place> {
        let can = |(place, queue): (&Place, &VecDeque<Arrival>)| {
            let node = nodes[place.0].as_ref()?;
            let wants = match queue.front()? {
                Arrival::Bytes(_) => node.node.borrow().wants_read(place.1),
                Arrival::End => true,
            };
            wants.then_some(*place)
        };
        self.coming.iter().filter_map(can).collect()
    }

    /// Delivers what comes first on a connection.
    pub(super) fn deliver(&mut self, place: Place, rds: &RdsNode) {
        let Some(queue) = self.coming.get_mut(&place) else { return };
        let arrival = queue.pop_front();
        if queue.is_empty() {
            self.coming.remove(&place);
        }
        match arrival {
            Some(Arrival::Bytes(bytes)) => rds.call(|node, now| {
                node.handle_data(now, place.1, RxBuf::from_vec(bytes));
                node.process(now, None, usize::MAX);
            }),
            Some(Arrival::End) => {
                rds.call(|node, now| node.handle_closed(now, place.1, CloseReason::Eof));
            }
            None => {}
        }
    }
}
