//! Metrics of RDMA devices that live in this process.
//!
//! What InfiniBand ports count has the names of Prometheus' node_exporter, so that dashboards made
//! for real devices show these too; all counters have names of bowline's own beside them. Devices
//! of the system, which rdma-core opens, are node_exporter's.

use std::{collections::BTreeMap, sync::Arc};

use bowline_base::count::Described;
use bowline_verbs::Device;

use super::{
    counter_name,
    exposition::{Exposition, Kind},
};

/// Devices have one port.
const PORT: &str = "1";

type PortFamily = (&'static str, &'static str, &'static [&'static str]);

/// Name and meaning in node_exporter, and the counters whose sum it is.
const PORT_FAMILIES: [PortFamily; 11] = [
    (
        "port_data_received_bytes",
        "Bytes received, from the first header to the ICRC.",
        &["rx_bytes"],
    ),
    (
        "port_data_transmitted_bytes",
        "Bytes sent, from the first header to the ICRC.",
        &["tx_bytes"],
    ),
    ("port_packets_received", "Packets received, those with errors included.", &["rx_packets"]),
    ("port_packets_transmitted", "Packets sent.", &["tx_packets"]),
    (
        "port_errors_received",
        "Packets received with an error in their headers or their checksum.",
        &["drop_malformed", "drop_header", "drop_icrc"],
    ),
    ("duplicate_requests_packets", "Requests received again.", &["requests_duplicate"]),
    (
        "out_of_sequence_packets_received",
        "Requests that came after a gap.",
        &["requests_discarded", "requests_kept"],
    ),
    ("out_of_buffer_drops", "Requests for which no receive was posted.", &["rnr_naks_sent"]),
    ("packet_sequence_errors", "Sequence NAKs received.", &["naks_sequence_received"]),
    ("local_ack_timeout_errors", "Expired retransmission timers.", &["timeouts"]),
    ("rnr_nak_retry_packets", "RNR NAKs received.", &["rnr_naks_received"]),
];

/// Writes the metrics of devices.
pub(super) fn write(out: &mut Exposition, devices: &[Arc<dyn Device>]) {
    let all = devices.iter().map(|device| (device.attr().name, device.counts()));
    let all: Vec<_> = all.filter(|(_, counts)| !counts.is_empty()).collect();
    if all.is_empty() {
        return;
    }
    for (name, help, of) in PORT_FAMILIES {
        let name = format!("node_infiniband_{name}_total");
        let mut family = out.family(&name, Kind::Counter, help);
        for (device, counts) in &all {
            let counts = counts.iter().filter(|count| of.contains(&count.name));
            let value: u64 = counts.map(|count| count.value).sum();
            family.sample(&[("device", device), ("port", PORT)], value);
        }
    }
    let mut families: BTreeMap<&str, Vec<(&str, &Described)>> = BTreeMap::new();
    for (device, counts) in &all {
        for count in counts {
            families.entry(count.name).or_default().push((device, count));
        }
    }
    for (name, samples) in families {
        let name = format!("bowline_roce_{}", counter_name(name));
        let help = samples.first().map_or("", |(_, count)| count.meaning);
        let mut family = out.family(&name, Kind::Counter, help);
        for (device, count) in samples {
            family.sample(&[("device", device)], count.value);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn ports_count_what_a_device_has() {
        let counts = bowline_roce::Counters::default();
        let known: HashSet<&str> = counts.described().map(|count| count.name).collect();
        let named: Vec<&str> =
            PORT_FAMILIES.iter().flat_map(|(_, _, of)| of.iter().copied()).collect();
        assert!(named.iter().all(|name| known.contains(name)), "{named:?}");
    }
}
