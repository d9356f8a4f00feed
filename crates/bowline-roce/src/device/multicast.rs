//! Multicast groups: a datagram to a group is delivered to every queue pair attached to it [RX-14].

use std::collections::BTreeMap;
use std::net::IpAddr;

use bowline_base::Instant;
use bowline_verbs::{Error, InvalidReason, Object, QpType, Qpn, Resource};
use bowline_wire::roce::{DEFAULT_PKEY, Outer, Packet, Service};

use super::rx::{check_icrc, refusal};
use super::{Device, IdentHint};
use crate::ud::network_header;

/// Most attachments of all queue pairs together.
const ATTACHMENTS_MAX: usize = 1 << 16;

/// Attached queue pairs by group, in the order in which they were attached.
#[derive(Debug, Default)]
pub(super) struct Groups {
    by_addr: BTreeMap<IpAddr, Vec<Qpn>>,
    attachments: usize,
}

impl Groups {
    pub(super) fn has(&self, group: IpAddr) -> bool {
        self.by_addr.contains_key(&group)
    }

    /// Removes all attachments of a queue pair.
    pub(super) fn forget(&mut self, qp: Qpn) {
        if self.attachments == 0 {
            return;
        }
        self.by_addr.retain(|_, attached| {
            let before = attached.len();
            attached.retain(|other| *other != qp);
            self.attachments -= before - attached.len();
            !attached.is_empty()
        });
    }
}

impl Device {
    /// Delivers datagrams to a multicast group to a queue pair. One that is attached already stays
    /// so: it gets each datagram once.
    ///
    /// # Errors
    /// [`Error::NoSuch`], [`Error::Limit`]; [`Error::Invalid`] for another address, or a queue pair
    /// of another type.
    pub fn attach(&mut self, qp: Qpn, group: IpAddr) -> Result<(), Error> {
        let group = group.to_canonical();
        if !group.is_multicast() {
            return Err(Error::Invalid(InvalidReason::NotMulticast(group)));
        }
        let found = self.qps.get(&qp.0).ok_or(Error::NoSuch(Object::QueuePair))?;
        if found.init.qp_type != QpType::Ud {
            return Err(Error::Invalid(InvalidReason::TypeToAttach));
        }
        if self.groups.attachments >= ATTACHMENTS_MAX {
            return Err(Error::Limit(Resource::MulticastGroups));
        }
        let attached = self.groups.by_addr.entry(group).or_default();
        if !attached.contains(&qp) {
            attached.push(qp);
            self.groups.attachments += 1;
        }
        Ok(())
    }

    /// Ends what [`attach`](Self::attach) has begun.
    ///
    /// # Errors
    /// [`Error::NoSuch`] for a queue pair that is not attached to the group.
    pub fn detach(&mut self, qp: Qpn, group: IpAddr) -> Result<(), Error> {
        let group = group.to_canonical();
        let none = Error::NoSuch(Object::QueuePair);
        let attached = self.groups.by_addr.get_mut(&group).ok_or(none.clone())?;
        let at = attached.iter().position(|other| *other == qp).ok_or(none)?;
        attached.remove(at);
        let is_last = attached.is_empty();
        self.groups.attachments -= 1;
        if is_last {
            self.groups.by_addr.remove(&group);
        }
        Ok(())
    }

    /// Handles a packet to a group. A queue pair does not get what it has sent itself.
    pub(super) fn handle_multicast(
        &mut self,
        now: Instant,
        outer: &Outer,
        ident: IdentHint,
        packet: &Packet<'_>,
        (bytes, icrc): (&[u8], u32),
    ) {
        let counters = &mut self.shared.counters;
        let Some(deth) = packet.deth.filter(|_| packet.opcode.service() == Service::Ud) else {
            counters.drop_transport += 1;
            return;
        };
        // RX-7
        if packet.bth.pkey | 0x8000 != DEFAULT_PKEY {
            counters.drop_pkey += 1;
            return;
        }
        let checked = check_icrc(&mut self.icrc, counters, outer, ident, (bytes, icrc));
        let Some(identification) = checked else { return };
        let len = bytes.len() + size_of_val(&icrc);
        let header = || network_header(outer.from, outer.to, identification, len);
        let is_own = self.shared.config.addrs.contains(&outer.from);
        for qpn in self.groups.by_addr.get(&outer.to).into_iter().flatten() {
            let Some(qp) = self.qps.get_mut(&qpn.0) else { continue };
            if is_own && deth.source_qpn == qpn.0 {
                continue;
            }
            let counters = &mut self.shared.counters;
            if refusal(qp, outer, packet).is_some() {
                counters.drop_state += 1;
            } else if qp.attr.qkey != Some(deth.qkey) {
                counters.drop_qkey += 1; // RX-8
            } else {
                self.shared.hand_to(now, qp, packet, header);
            }
        }
    }
}
