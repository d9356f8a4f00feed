//! One session of the server and its devices.

use bowline_wire::rnbd::Access;

use super::{ExportId, Ticket};
use crate::Limits;
use crate::id_table::IdTable;

#[derive(Debug)]
pub(super) struct Session {
    pub(super) name: String,
    /// 0 until the peer has said which version it speaks [NB-14].
    pub(super) version: u8,
    pub(super) devices: IdTable<Device>,
}

#[derive(Debug)]
pub(super) struct Device {
    pub(super) export: ExportId,
    pub(super) limits: Limits,
    pub(super) name: Vec<u8>,
    pub(super) access: Access,
    pub(super) life: u32,
    pub(super) in_flight: u32,
    /// Set once it is being closed: it takes no more IO and waits for what it has.
    pub(super) closing: Option<Closing>,
}

#[derive(Debug, Default)]
pub(super) struct Closing {
    /// CLOSE messages to answer.
    pub(super) tickets: Vec<Ticket>,
    /// Whether the id stays taken.
    pub(super) reserve: bool,
}

impl Session {
    pub(super) fn new(name: &str, devices_max: usize) -> Self {
        Self { name: name.to_owned(), version: 0, devices: IdTable::new(devices_max) }
    }

    /// Returns the device that takes IO under this id.
    pub(super) fn device(&mut self, id: u32) -> Option<&mut Device> {
        self.devices.get_mut(id).filter(|device| device.closing.is_none())
    }

    pub(super) fn by_name(&self, name: &[u8]) -> Option<(u32, &Device)> {
        let open = |(_, device): &(u32, &Device)| device.closing.is_none() && device.name == name;
        self.devices.iter().find(open)
    }
}
