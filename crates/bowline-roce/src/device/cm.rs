//! Binding between the connection manager and the device: the program's calls, MADs in and out
//! through queue pair 1 [CMA-17], and the manager's orders for queue pairs.
//!
//! A queue pair belongs to a connection from the connect or accept until the connection is refused,
//! unreachable or disconnected; meanwhile it cannot be removed. Its number is not reused until
//! TIMEWAIT is over [CM-45] [QP-6].

use std::net::{IpAddr, SocketAddr};

use bowline_base::Instant;
use bowline_verbs::{
    CmId, ConnParam, Error, InvalidReason, Object, QpAttr, QpState, QpType, Qpn, RejectReason,
};
use bowline_wire::roce::MAD_LEN;

use super::{Device, Event};
use crate::cm::{FormerConnection, Manager, Output, Port, QpOrder, SendMad};
use crate::config::Config;
use crate::rng::Rng;

/// State of the connection manager.
#[derive(Debug)]
pub(super) struct CmState {
    manager: Manager,
    /// Why the last awaited order failed.
    failed: Option<Error>,
}

impl CmState {
    pub(super) fn new(config: &Config, rng: &mut Rng) -> Self {
        let port = Port {
            guid: config.guid,
            mtu: config.mtu,
            max_rd_atomic: config.limits.rd_atomic,
            part: config.part,
        };
        let mut seed = [0; 32];
        for word in seed.chunks_exact_mut(4) {
            word.copy_from_slice(&rng.next_u32().to_le_bytes());
        }
        Self { manager: Manager::new(config.cm.clone(), port, Rng::new(&seed)), failed: None }
    }
}

impl Device {
    /// Listens for connections to a port of an address of this device, or of all addresses with an
    /// unspecified one. Port 0 selects a free port; see [`local_addr`](Self::local_addr).
    ///
    /// # Errors
    /// [`Error::AddrInUse`], [`Error::AddrNotAvailable`], [`Error::Limit`].
    pub fn listen(&mut self, at: SocketAddr) -> Result<CmId, Error> {
        let at = self.place_to_listen(at)?;
        self.cm.manager.listen(at)
    }

    /// Listens for lookups of the datagram service of a port, as [`listen`](Self::listen) does for
    /// connections: their requests are answered by [`answer`](Self::answer).
    ///
    /// # Errors
    /// As [`listen`](Self::listen).
    pub fn listen_datagrams(&mut self, at: SocketAddr) -> Result<CmId, Error> {
        let at = self.place_to_listen(at)?;
        self.cm.manager.listen_datagrams(at)
    }

    fn place_to_listen(&self, at: SocketAddr) -> Result<SocketAddr, Error> {
        let at = SocketAddr::new(at.ip().to_canonical(), at.port());
        if !at.ip().is_unspecified() && !self.is_own(at.ip()) {
            return Err(Error::AddrNotAvailable);
        }
        Ok(at)
    }

    /// Looks up the datagram service of a port, with at most 180 bytes of data; the outcome is an
    /// event. A local address is chosen as by [`connect`](Self::connect).
    ///
    /// # Errors
    /// [`Error::Invalid`], [`Error::AddrNotAvailable`], [`Error::Limit`].
    pub fn look_up(
        &mut self,
        now: Instant,
        local: Option<SocketAddr>,
        remote: SocketAddr,
        private_data: &[u8],
    ) -> Result<CmId, Error> {
        let (local, remote) = self.both_ends(local, remote)?;
        let id = self.cm.manager.look_up(now, local, remote, private_data)?;
        self.cm_drain_outputs(now);
        Ok(id)
    }

    /// Answers a lookup with a queue pair and its queue key, and at most 136 bytes of data. The
    /// lookup is over then.
    ///
    /// # Errors
    /// [`Error::Invalid`], [`Error::NoSuch`].
    pub fn answer(
        &mut self,
        now: Instant,
        id: CmId,
        qpn: Qpn,
        qkey: u32,
        private_data: &[u8],
    ) -> Result<(), Error> {
        self.cm.manager.answer_lookup(now, id, qpn, qkey, private_data)?;
        self.cm_drain_outputs(now);
        Ok(())
    }

    /// The ends of what is asked, with the chosen local address.
    fn both_ends(
        &self,
        local: Option<SocketAddr>,
        remote: SocketAddr,
    ) -> Result<(SocketAddr, SocketAddr), Error> {
        let remote = SocketAddr::new(remote.ip().to_canonical(), remote.port());
        let port = local.map_or(0, |local| local.port());
        let given = local.map(|local| local.ip().to_canonical()).filter(|ip| !ip.is_unspecified());
        let ip = match given {
            Some(ip) if self.is_own(ip) => ip,
            Some(_) => return Err(Error::AddrNotAvailable),
            None => self.nearest(remote.ip()).ok_or(Error::AddrNotAvailable)?,
        };
        Ok((SocketAddr::new(ip, port), remote))
    }

    /// Returns the address of a listener, or this side's address of a connection.
    ///
    /// # Errors
    /// [`Error::NoSuch`].
    pub fn local_addr(&self, id: CmId) -> Result<SocketAddr, Error> {
        self.cm.manager.local_addr(id).ok_or(Error::NoSuch(Object::CmId))
    }

    /// Connects; the outcome is an event. Without a local address, the one with the longest prefix
    /// in common with the remote address is used.
    ///
    /// # Errors
    /// [`Error::Invalid`], [`Error::NoSuch`], [`Error::AddrNotAvailable`], [`Error::Limit`];
    /// [`Error::Busy`] when the queue pair belongs to another connection.
    pub fn connect(
        &mut self,
        now: Instant,
        local: Option<SocketAddr>,
        remote: SocketAddr,
        param: &ConnParam,
    ) -> Result<CmId, Error> {
        let (local, remote) = self.both_ends(local, remote)?;
        self.check_connectable(param)?;
        let id = self.cm.manager.connect(now, local, remote, param)?;
        self.cm_drain_outputs(now);
        Ok(id)
    }

    /// Accepts a connection request. The queue pair is ready when this returns.
    ///
    /// # Errors
    /// [`Error::Invalid`], [`Error::NoSuch`]; [`Error::Busy`] when the queue pair belongs to
    /// another connection. After an error the request can be answered again. A parameter may turn
    /// out to be invalid only while the queue pair is made ready; in that case the queue pair is in
    /// ERR, and its posted requests are flushed.
    pub fn accept(&mut self, now: Instant, id: CmId, param: &ConnParam) -> Result<(), Error> {
        self.check_connectable(param)?;
        self.cm.manager.accept(id, param)?;
        self.cm_drain_outputs(now);
        self.cm.failed.take().map_or(Ok(()), Err)
    }

    /// Refuses a connection request, with at most 148 bytes of data.
    ///
    /// # Errors
    /// [`Error::Invalid`], [`Error::NoSuch`].
    pub fn reject(&mut self, now: Instant, id: CmId, private_data: &[u8]) -> Result<(), Error> {
        self.cm.manager.reject(now, id, private_data)?;
        self.cm_drain_outputs(now);
        Ok(())
    }

    /// Refuses a connection request, or the answer to a connect whose queue pair the program leads,
    /// for this reason.
    ///
    /// # Errors
    /// [`Error::Invalid`], [`Error::NoSuch`].
    pub fn reject_for(
        &mut self,
        now: Instant,
        id: CmId,
        reason: RejectReason,
        private_data: &[u8],
    ) -> Result<(), Error> {
        self.cm.manager.reject_for(now, id, reason, private_data)?;
        self.cm_drain_outputs(now);
        Ok(())
    }

    /// Returns the attributes of the transition to INIT, RTR or RTS of a connection's queue pair
    /// that the program leads.
    ///
    /// # Errors
    /// [`Error::NoSuch`]; [`Error::Invalid`] for other states, and for RTR and RTS before the
    /// peer's values are known.
    pub fn connection_attr(&self, id: CmId, to: QpState) -> Result<QpAttr, Error> {
        self.cm.manager.connection_attr(id, to)
    }

    /// Completes a connect that the peer has accepted and whose queue pair the program has made
    /// ready.
    ///
    /// # Errors
    /// [`Error::NoSuch`]; [`Error::Invalid`] in another state.
    pub fn establish(&mut self, now: Instant, id: CmId) -> Result<(), Error> {
        self.cm.manager.establish(id)?;
        self.cm_drain_outputs(now);
        Ok(())
    }

    /// Notes that a message has arrived on the queue pair of an accepted request: its connection is
    /// established. Returns whether this was news.
    ///
    /// # Errors
    /// [`Error::NoSuch`]; [`Error::Invalid`] before the request is accepted.
    pub fn note_established(&mut self, now: Instant, id: CmId) -> Result<bool, Error> {
        let is_news = self.cm.manager.note_established(id)?;
        self.cm_drain_outputs(now);
        Ok(is_news)
    }

    /// Ends a connection: its queue pair goes to ERR and everything posted on it is flushed. A
    /// connection that has ended already is left as it is.
    ///
    /// # Errors
    /// [`Error::NoSuch`]; [`Error::Invalid`] before the connection is established: use
    /// [`destroy_id`](Self::destroy_id) then.
    pub fn disconnect(&mut self, now: Instant, id: CmId) -> Result<(), Error> {
        self.cm.manager.disconnect(now, id)?;
        self.cm_drain_outputs(now);
        Ok(())
    }

    /// Removes a listener, rejecting its unanswered requests, or a connection, ending it if
    /// necessary. No further events of it are reported.
    ///
    /// # Errors
    /// [`Error::NoSuch`], for an id that was never issued.
    pub fn destroy_id(&mut self, now: Instant, id: CmId) -> Result<(), Error> {
        self.cm.manager.destroy_id(now, id)?;
        self.cm_drain_outputs(now);
        Ok(())
    }

    /// Returns what a later process needs to end the connections that are established now, or whose
    /// peers have not confirmed that they have ended, if this process cannot [CM-53].
    pub fn former_connections(&self) -> Vec<FormerConnection> {
        self.cm.manager.former_connections().collect()
    }

    /// Ends a connection of an earlier process with one unconfirmed DREQ.
    ///
    /// # Errors
    /// [`Error::AddrNotAvailable`].
    pub fn end_former_connection(
        &mut self,
        now: Instant,
        former: &FormerConnection,
    ) -> Result<(), Error> {
        if !self.is_own(former.local) {
            return Err(Error::AddrNotAvailable);
        }
        self.cm.manager.end_former_connection(former);
        self.cm_drain_outputs(now);
        Ok(())
    }

    /// Handles a management datagram.
    pub(super) fn handle_mad(
        &mut self,
        now: Instant,
        from: IpAddr,
        to: IpAddr,
        mad: &[u8; MAD_LEN],
    ) {
        self.cm.manager.handle_mad(now, from, to, mad, &mut self.shared.counters);
        self.cm_drain_outputs(now);
    }

    /// Returns when the connection manager has something to do.
    pub(super) fn cm_timeout(&self) -> Option<Instant> {
        self.cm.manager.poll_timeout()
    }

    pub(super) fn cm_handle_timeout(&mut self, now: Instant) {
        self.cm.manager.handle_timeout(now, &mut self.shared.counters);
        self.cm_drain_outputs(now);
    }

    /// Tells whether a connection holds the queue pair.
    pub(super) fn cm_holds(&self, qpn: Qpn) -> bool {
        self.cm.manager.holds(qpn)
    }

    /// Tells whether the number must not be given to another queue pair yet.
    pub(super) fn cm_reserves(&self, qpn: Qpn) -> bool {
        self.cm.manager.reserves(qpn)
    }

    /// Returns the number of listeners, and of connections including TIMEWAIT.
    pub(super) fn cm_counts(&self) -> (usize, usize) {
        self.cm.manager.counts()
    }

    /// Notes that a valid packet of a connection has arrived [CM-50].
    pub(super) fn cm_data_arrived(&mut self, now: Instant, qpn: Qpn) {
        if self.cm.manager.awaits_data() {
            self.cm.manager.data_arrived(qpn);
            self.cm_drain_outputs(now);
        }
    }

    /// Executes the manager's outputs in order: a queue pair is ready before the message that says
    /// so is sent.
    fn cm_drain_outputs(&mut self, now: Instant) {
        while let Some(output) = self.cm.manager.poll_output() {
            match output {
                Output::Mad(SendMad { from, to, mad }) => self.send_mad(from, to, mad),
                Output::Event(event) => self.shared.events.push_back(Event::Cm(event)),
                Output::Order(order) => self.execute_order(now, &order),
            }
        }
    }

    fn execute_order(&mut self, now: Instant, order: &QpOrder) {
        let steps = order.steps.iter().try_for_each(|step| {
            let in_state = self.qps.get(&order.qpn.0).map(|qp| qp.state);
            if in_state.is_some() && in_state == step.state {
                return Ok(());
            }
            self.modify_qp(now, order.qpn, step)
        });
        if order.gap_reports && steps.is_ok() {
            // The queue pair exists, since it has made the steps.
            let _ = self.report_gaps(order.qpn);
        }
        // An order that is not awaited may fail: the queue pair may be gone, or in ERR already.
        if order.awaited {
            self.cm.manager.order_done(now, order.id, steps.is_ok());
            self.cm.failed = steps.err();
        }
    }

    fn is_own(&self, ip: IpAddr) -> bool {
        self.shared.config.addrs.contains(&ip)
    }

    /// Returns the local address with the longest prefix in common with `remote`.
    fn nearest(&self, remote: IpAddr) -> Option<IpAddr> {
        let bits = |ip: IpAddr| match ip {
            IpAddr::V4(ip) => u128::from(ip.to_bits()) << 96,
            IpAddr::V6(ip) => ip.to_bits(),
        };
        let same = |ip: &&IpAddr| ip.is_ipv4() == remote.is_ipv4();
        let own = self.shared.config.addrs.iter().filter(same);
        own.min_by_key(|ip| bits(**ip) ^ bits(remote)).copied()
    }

    /// Checks that a queue pair can be connected: in RESET, or in INIT with receives posted. One
    /// that the program leads is its own affair.
    fn check_connectable(&self, param: &ConnParam) -> Result<(), Error> {
        let qpn = param.qpn;
        if param.is_led {
            return Ok(());
        }
        let qp = self.qps.get(&qpn.0).ok_or(Error::NoSuch(Object::QueuePair))?;
        if qp.init.qp_type != QpType::Rc {
            return Err(Error::Invalid(InvalidReason::TypeToConnect));
        }
        if qp.state > QpState::Init && !self.cm_reserves(qpn) {
            return Err(Error::Invalid(InvalidReason::StateToConnect(qp.state)));
        }
        Ok(())
    }
}
