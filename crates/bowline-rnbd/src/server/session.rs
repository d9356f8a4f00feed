//! One session of the server and its devices.

use std::collections::BTreeMap;

use bowline_wire::rnbd::Access;

use super::{ExportId, Ticket};
use crate::Limits;

#[derive(Debug)]
pub(super) struct Session {
    pub(super) name: String,
    /// Protocol version of the peer; 0 until it has sent SESS_INFO [NB-14].
    pub(super) version: u8,
    pub(super) devices: BTreeMap<u32, Device>,
}

#[derive(Debug)]
pub(super) struct Device {
    pub(super) export: ExportId,
    pub(super) limits: Limits,
    pub(super) name: Vec<u8>,
    pub(super) access: Access,
    pub(super) in_flight: u32,
    /// Set while the device is being closed: the CLOSE messages to answer. It accepts no more IO
    /// and waits for the IO it has.
    pub(super) closing: Option<Vec<Ticket>>,
}

impl Session {
    pub(super) fn new(name: &str) -> Self {
        Self { name: name.to_owned(), version: 0, devices: BTreeMap::new() }
    }

    /// Returns the device of this id, unless it is being closed.
    pub(super) fn device(&mut self, id: u32) -> Option<&mut Device> {
        self.devices.get_mut(&id).filter(|device| device.closing.is_none())
    }

    pub(super) fn by_name(&self, name: &[u8]) -> Option<(u32, &Device)> {
        let open = |device: &Device| device.closing.is_none() && device.name == name;
        self.devices.iter().find(|(_, device)| open(device)).map(|(&id, device)| (id, device))
    }
}
