//! Address handles: where datagrams go.

use core::ffi::c_int;
use core::mem::MaybeUninit;

use bowline_verbs::AddressVector;

use crate::abi::{Ah, AhAttr, Context, GlobalRoute, Grh, Pd, Wc};
use crate::device;
use crate::queue_pair::route;
use crate::{fails, made, none};

/// `IBV_WC_GRH`.
const WC_GRH: u32 = 1;

/// What is kept for an address handle.
#[derive(Debug)]
pub(crate) struct Own {
    pub(crate) to: AddressVector,
}

#[unsafe(no_mangle)]
extern "C" fn ibv_create_ah(pd: Option<&Pd>, attr: Option<&AhAttr>) -> *mut Ah {
    let (Some(pd), Some(attr)) = (pd, attr) else { return none(libc::EINVAL) };
    match route(&pd.own.opened, attr) {
        Some(to) => made(Ah { context: pd.context, pd, handle: 0, own: Own { to } }),
        None => none(libc::EINVAL),
    }
}

#[unsafe(no_mangle)]
extern "C" fn ibv_destroy_ah(ah: *mut Ah) -> c_int {
    if ah.is_null() {
        return fails(libc::EINVAL);
    }
    // SAFETY: made by `ibv_create_ah`, and given back once.
    drop(unsafe { Box::from_raw(ah) });
    0
}

/// The way back to who has sent a datagram: `None` if its header has no addresses.
fn back(context: &Context, port: u8, wc: &Wc, grh: Option<&Grh>) -> Option<AhAttr> {
    let header = &grh.filter(|_| wc.wc_flags & WC_GRH != 0)?.0;
    let v4 = |at: usize| {
        let bytes = header[at..at + 4].first_chunk::<4>()?;
        Some(std::net::IpAddr::from(*bytes))
    };
    let v6 = |at: usize| {
        let bytes = header[at..at + 16].first_chunk::<16>()?;
        Some(std::net::IpAddr::from(*bytes))
    };
    // A header of IPv4 stands at the end of the 40 bytes.
    let is_v6 = header[0] >> 4 == 6;
    let (from, to) = if is_v6 { (v6(8)?, v6(24)?) } else { (v4(32)?, v4(36)?) };
    let gids = &context.own.opened.gids;
    let index = gids.iter().position(|at| at.addr == to.to_canonical())?;
    let traffic_class = if is_v6 { header[0] << 4 | header[1] >> 4 } else { header[21] };
    Some(AhAttr {
        grh: GlobalRoute {
            dgid: device::gid(from),
            flow_label: 0,
            sgid_index: u8::try_from(index).ok()?,
            hop_limit: 0xff,
            traffic_class,
        },
        sl: wc.sl,
        is_global: 1,
        port_num: port,
        ..AhAttr::default()
    })
}

#[unsafe(no_mangle)]
extern "C" fn ibv_init_ah_from_wc(
    context: Option<&Context>,
    port: u8,
    wc: Option<&Wc>,
    grh: Option<&Grh>,
    out: Option<&mut MaybeUninit<AhAttr>>,
) -> c_int {
    let (Some(context), Some(wc), Some(out)) = (context, wc, out) else {
        fails(libc::EINVAL);
        return -1;
    };
    match back(context, port, wc, grh) {
        Some(attr) => {
            out.write(attr);
            0
        }
        None => {
            fails(libc::EINVAL);
            -1
        }
    }
}

#[unsafe(no_mangle)]
extern "C" fn ibv_create_ah_from_wc(
    pd: Option<&Pd>,
    wc: Option<&Wc>,
    grh: Option<&Grh>,
    port: u8,
) -> *mut Ah {
    let (Some(at), Some(wc)) = (pd, wc) else { return none(libc::EINVAL) };
    // SAFETY: a context is closed after its objects are destroyed.
    let context = unsafe { &*at.context };
    match back(context, port, wc, grh) {
        Some(attr) => ibv_create_ah(pd, Some(&attr)),
        None => none(libc::EINVAL),
    }
}

/// There is no Ethernet header to fill in.
#[unsafe(no_mangle)]
extern "C" fn ibv_resolve_eth_l2_from_gid(
    _context: Option<&Context>,
    _attr: Option<&AhAttr>,
    _mac: Option<&mut [u8; 6]>,
    _vlan: Option<&mut u16>,
) -> c_int {
    fails(libc::EOPNOTSUPP)
}
