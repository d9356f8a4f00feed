//! What joins the connection manager to the device.

use std::net::IpAddr;

use bowline_verbs::Qpn;
use bowline_wire::roce::MAD_LEN;

use super::Device;
use crate::config::Config;
use crate::rng::Rng;
use crate::time::Instant;

/// State of the connection manager.
#[derive(Debug)]
pub(super) struct Glue;

impl Glue {
    pub(super) fn new(_config: &Config, _rng: &mut Rng) -> Self {
        Self
    }
}

impl Device {
    /// Takes a management datagram.
    pub(super) fn handle_mad(
        &mut self,
        _now: Instant,
        _from: IpAddr,
        _to: IpAddr,
        _mad: &[u8; MAD_LEN],
    ) {
        self.shared.counters.drop_mad += 1;
    }

    /// When the connection manager has something to do.
    pub(super) fn cm_timeout(&self) -> Option<Instant> {
        None
    }

    pub(super) fn cm_handle_timeout(&mut self, _now: Instant) {}

    /// Tells whether a connection holds the queue pair.
    pub(super) fn cm_holds(&self, _qpn: Qpn) -> bool {
        false
    }

    /// Tells whether the number must not be given to another queue pair yet.
    pub(super) fn cm_reserves(&self, _qpn: Qpn) -> bool {
        false
    }

    /// A valid packet of a connection has come [CM-50].
    pub(super) fn cm_data_arrived(&mut self, _now: Instant, _qpn: Qpn) {}
}
