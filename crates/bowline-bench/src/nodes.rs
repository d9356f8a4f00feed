//! Addresses for bowline's nodes on a machine where others may run nodes too.

use std::net::{Ipv4Addr, TcpListener, UdpSocket};

/// TCP port of RDS.
const RDS_PORT: u16 = 16385;
/// UDP port of RoCEv2.
const ROCE_PORT: u16 = 4791;
/// Networks to look through; the cells with many nodes use the one after the node's own.
const NETWORKS: u8 = 100;

/// Returns addresses of receiver and sender that nobody uses now, the default ones if they are
/// free.
pub(crate) fn free() -> (Ipv4Addr, Ipv4Addr) {
    free_pair(|ip| TcpListener::bind((ip, RDS_PORT)).is_ok())
}

/// The same for RDMA devices.
pub(crate) fn free_roce() -> (Ipv4Addr, Ipv4Addr) {
    free_pair(|ip| UdpSocket::bind((ip, ROCE_PORT)).is_ok())
}

fn free_pair(is_free: impl Fn(Ipv4Addr) -> bool) -> (Ipv4Addr, Ipv4Addr) {
    (0..NETWORKS).map(pair).find(|(rx, tx)| is_free(*rx) && is_free(*tx)).unwrap_or_else(|| pair(0))
}

/// Says whether a measurement failed because somebody took an address after it was found free.
pub(crate) fn is_collision(error: &str) -> bool {
    error.contains(&format!(":{RDS_PORT} is in use"))
        || (error.contains(&format!("UDP port {ROCE_PORT} of ")) && error.contains("is in use"))
}

const fn pair(network: u8) -> (Ipv4Addr, Ipv4Addr) {
    (Ipv4Addr::new(127, network, 0, 2), Ipv4Addr::new(127, network, 0, 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_taken_address_is_passed_over() {
        let first = free();
        let taken = TcpListener::bind((first.1, RDS_PORT));
        // Somebody else may have been quicker, which is as good.
        assert_ne!(free(), first, "{taken:?}");
    }

    #[test]
    fn a_devices_complaint_about_a_taken_address_is_known() {
        let taken = UdpSocket::bind((Ipv4Addr::new(127, 202, 0, 1), ROCE_PORT));
        let addrs = vec![Ipv4Addr::new(127, 202, 0, 1).into()];
        let config = bowline_roce_driver::SoftConfig { addrs, ..Default::default() };
        let device = bowline_roce_driver::SoftDevice::open(config);
        let error = device.map(drop).expect_err("the address is taken").to_string();
        assert!(is_collision(&error), "{error} {taken:?}");
    }

    #[test]
    fn the_librarys_complaint_about_a_taken_address_is_known() {
        let taken = TcpListener::bind((Ipv4Addr::new(127, 201, 0, 1), RDS_PORT));
        let node = bowline::rds::Node::builder().address(Ipv4Addr::new(127, 201, 0, 1));
        let error = node.build().map(drop).expect_err("the address is taken").to_string();
        assert!(is_collision(&error), "{error} {taken:?}");
        assert!(!is_collision("message 3 of stream 0 where 2 was due"));
    }
}
