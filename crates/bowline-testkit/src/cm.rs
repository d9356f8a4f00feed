//! Messages of connection management, as a peer that is not bowline would send them.

use std::net::SocketAddr;

use bowline_wire::roce::cm::{REQ_PRIVATE_LEN, Req, TRANSPORT_RC};
use bowline_wire::roce::{CMA_HEADER_LEN, CmaHeader, DEFAULT_PKEY, service_id};

/// Returns a request for a connection that a listener accepts, from and to these addresses, with
/// the program's data. Names, queue pair and depths are zero: a test sets those it needs.
///
/// # Panics
/// When there is more data than a request has room for.
pub fn request(from: SocketAddr, to: SocketAddr, data: &[u8]) -> Req {
    let (source, destination) = (from.ip(), to.ip());
    // rdma_cm's header names a port; a forged request need not have that of its packet.
    let header = CmaHeader { source_port: 5, source, destination };
    let mut private_data = [0; REQ_PRIVATE_LEN];
    private_data[..CMA_HEADER_LEN].copy_from_slice(&header.emit());
    private_data[CMA_HEADER_LEN..][..data.len()].copy_from_slice(data);
    Req {
        local_id: 0,
        vendor: 0,
        service_id: service_id(to.port()),
        guid: 0,
        qpn: 0,
        responder_resources: 0,
        initiator_depth: 0,
        remote_timeout: 20,
        transport: TRANSPORT_RC,
        flow_control: false,
        starting_psn: 0,
        local_timeout: 20,
        retry_count: 7,
        pkey: DEFAULT_PKEY,
        mtu: 3,
        rnr_retry_count: 7,
        max_retries: 15,
        srq: false,
        local_lid: 0,
        remote_lid: 0,
        local_gid: source.into(),
        remote_gid: destination.into(),
        flow_label: 0,
        packet_rate: 0,
        traffic_class: 0,
        hop_limit: 64,
        service_level: 0,
        subnet_local: false,
        ack_timeout: 17,
        private_data,
    }
}
