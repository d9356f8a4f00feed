//! Multicast groups of ids.

use core::ffi::{c_int, c_void};
use core::ptr;
use std::net::{IpAddr, SocketAddr};

use bowline_verbs::{AddressVector, Error};

use super::abi::{CmId, JoinAttr};
use super::addr;
use super::events::push_joined;
use super::ids::{complete, is_datagram, opened, refuse};
use crate::abi::AhAttr;
use crate::device::without_signals;
use crate::events::lock;
use crate::queue_pair::address;

/// What `struct rdma_cm_join_mc_attr_ex` has: `enum rdma_cm_join_mc_attr_mask`.
const ATTR_ADDRESS: u32 = 1;
const ATTR_FLAGS: u32 = 1 << 1;
/// `enum rdma_cm_mc_join_flags`.
const FULL_MEMBER: u32 = 0;
const SEND_ONLY: u32 = 1;

/// A group that an id has joined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Joined {
    pub(super) group: IpAddr,
    /// It gets what is sent to the group.
    pub(super) receives: bool,
    /// What the program wants with the event.
    pub(super) context: usize,
}

fn local(id: &CmId) -> Option<IpAddr> {
    addr::of(&id.route.get().src_addr).map(|local| local.ip()).filter(|ip| !ip.is_unspecified())
}

/// The way to a group, for datagrams.
pub(super) fn way(id: &CmId, group: IpAddr) -> Option<AhAttr> {
    let tos = lock(&id.own.state).tos;
    let way = AddressVector { local: local(id)?, remote: group, flow_label: 0, tos };
    Some(address(opened()?, &way))
}

/// Attaches or detaches the queue pair of an id, if it has one.
fn attached(
    id: &CmId,
    change: impl FnOnce(bowline_verbs::Qpn) -> Result<(), Error>,
) -> Result<(), Error> {
    // By its number: a program may have destroyed it without its id.
    let qpn = lock(&id.own.state).qpn;
    qpn.map_or(Ok(()), change)
}

/// The program reads the event of a join: the queue pair gets what is sent to the group from now
/// on. Returns whether it does.
pub(super) fn begin(id: &CmId, joined: &Joined) -> bool {
    let Some(opened) = opened() else { return false };
    // Another thread may have left it since.
    if !lock(&id.own.state).groups.contains(joined) {
        return false;
    }
    !joined.receives || attached(id, |qpn| opened.soft.attach(qpn, joined.group)).is_ok()
}

fn join(id: &CmId, group: SocketAddr, receives: bool, context: *mut c_void) -> c_int {
    let (Some(opened), Some(local)) = (opened(), local(id)) else { return refuse(libc::EINVAL) };
    let group = group.ip().to_canonical();
    let is_good = is_datagram(id) && group.is_multicast() && group.is_ipv4() == local.is_ipv4();
    if !is_good || lock(&id.own.state).groups.iter().any(|known| known.group == group) {
        return refuse(libc::EINVAL);
    }
    if receives && let Err(error) = without_signals(|| opened.soft.join(group, local)) {
        return refuse(error.errno().0);
    }
    let joined = Joined { group, receives, context: context.expose_provenance() };
    lock(&id.own.state).groups.push(joined);
    push_joined(id, joined);
    complete(id)
}

/// Ends a membership, and the event of it that nobody has read.
fn leave(id: &CmId, joined: &Joined) -> Result<(), Error> {
    // SAFETY: a channel is not destroyed before its ids.
    if let Some(channel) = unsafe { id.channel.get().as_ref() } {
        let unread = channel.own.take_back(|event| {
            ptr::eq(event.of.0, id) && event.joined.is_some_and(|of| of.group == joined.group)
        });
        id.own.unacknowledged.acknowledge(unread);
    }
    let (Some(opened), Some(local)) = (opened(), local(id)) else { return Ok(()) };
    if !joined.receives {
        return Ok(());
    }
    // A queue pair that is not attached any more need not be detached.
    let _ = attached(id, |qpn| opened.soft.detach(qpn, joined.group));
    opened.soft.leave(joined.group, local)
}

/// Leaves all groups of an id that goes.
pub(super) fn leave_all(id: &CmId) {
    let all = core::mem::take(&mut lock(&id.own.state).groups);
    // A device that is gone has left them.
    all.iter().for_each(|joined| drop(leave(id, joined)));
}

#[unsafe(no_mangle)]
extern "C" fn rdma_join_multicast(
    id: Option<&CmId>,
    at: *const libc::sockaddr,
    context: *mut c_void,
) -> c_int {
    // SAFETY: as C has it.
    let (Some(id), Some(group)) = (id, unsafe { addr::given(at) }) else {
        return refuse(libc::EINVAL);
    };
    join(id, group, true, context)
}

#[unsafe(no_mangle)]
extern "C" fn rdma_join_multicast_ex(
    id: Option<&CmId>,
    attr: Option<&JoinAttr>,
    context: *mut c_void,
) -> c_int {
    let (Some(id), Some(attr)) = (id, attr) else { return refuse(libc::EINVAL) };
    if attr.comp_mask != ATTR_ADDRESS | ATTR_FLAGS {
        return refuse(libc::EINVAL);
    }
    let receives = match attr.join_flags {
        FULL_MEMBER => true,
        SEND_ONLY => false,
        _ => return refuse(libc::EINVAL),
    };
    // SAFETY: as C has it.
    match unsafe { addr::given(attr.addr) } {
        Some(group) => join(id, group, receives, context),
        None => refuse(libc::EINVAL),
    }
}

#[unsafe(no_mangle)]
extern "C" fn rdma_leave_multicast(id: Option<&CmId>, at: *const libc::sockaddr) -> c_int {
    // SAFETY: as C has it.
    let (Some(id), Some(group)) = (id, unsafe { addr::given(at) }) else {
        return refuse(libc::EINVAL);
    };
    let group = group.ip().to_canonical();
    let mut state = lock(&id.own.state);
    let Some(at) = state.groups.iter().position(|known| known.group == group) else {
        return refuse(libc::EADDRNOTAVAIL);
    };
    let joined = state.groups.remove(at);
    drop(state);
    leave(id, &joined).map_or_else(|error| refuse(error.errno().0), |()| 0)
}
