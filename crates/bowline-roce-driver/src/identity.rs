//! The node GUID of a device.

use std::net::IpAddr;

/// Derives a node GUID from the machine's identity and the device's addresses: the same in each
/// process, not 0, and marked as locally administered.
pub fn node_guid(addrs: &[IpAddr]) -> u64 {
    let machine = std::fs::read("/etc/machine-id")
        .or_else(|_| std::fs::read("/proc/sys/kernel/hostname"))
        .unwrap_or_default();
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    let mut add = |byte: u8| {
        // FNV-1a, with the bits of a byte spread at once.
        hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3).rotate_left(23);
    };
    machine.iter().copied().for_each(&mut add);
    for addr in addrs {
        match addr {
            IpAddr::V4(addr) => addr.octets().into_iter().for_each(&mut add),
            IpAddr::V6(addr) => addr.octets().into_iter().for_each(&mut add),
        }
    }
    hash & !(1 << 56) | 1 << 57
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guids_are_stable_and_differ() {
        let [a, b] = [1, 2].map(|n| node_guid(&[IpAddr::from([127, 0, 0, n])]));
        assert_ne!(a, b);
        assert_eq!(a, node_guid(&[IpAddr::from([127, 0, 0, 1])]));
        assert_eq!(a.to_be_bytes()[0] & 3, 2, "local and of one device");
    }
}
