//! The hand-made peer, each on a device of its own.

use std::net::IpAddr;

use bowline_roce_driver::SoftDevice;
pub(crate) use bowline_testkit::rtrs_peer::{Conn, Ids, Outcome, Path};

use crate::common::device;

pub(crate) type Raw = bowline_testkit::rtrs_peer::Raw<SoftDevice>;

pub(crate) fn raw(ip: IpAddr) -> Raw {
    Raw::on(device(&[ip]), ip)
}
