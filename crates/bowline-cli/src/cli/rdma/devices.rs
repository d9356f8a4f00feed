//! `bowline devices`: the RDMA devices that programs on this machine can use.

use std::net::IpAddr;

use bowline_node::{
    Outcome,
    rdma_device::{Holder, PORT, addresses, holder, is_held},
};
use bowline_rdmacore::{Listed, list};
use bowline_roce_driver::{EarlySockets, SoftConfig, interface, machine_addrs, node_guid};
use bowline_verbs::{DeviceAttr, Mtu};
use serde_json::{Value, json};

use super::verbs_programs::View;

/// List the RDMA devices of this machine, and that of programs of `bowline run`.
///
/// First the device that verbs programs see under `bowline run`, with its GIDs, the node that has
/// their addresses, and the addresses that are left out. Then what bowline's own commands can use.
/// Nothing is started for it, and no node opens an address.
///
/// The exit status is 1 where verbs programs would get no device, with the reason and what to do.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "The provider soft needs no hardware: each address of this machine whose UDP \
    port 4791 is free is a device. Use a device of rdma-core with --device NAME."
)]
pub(crate) struct Args {
    /// Print a JSON object
    #[arg(long)]
    json: bool,
}

/// An address that the soft provider could serve.
struct Row {
    address: IpAddr,
    /// Bytes of the path MTU.
    mtu: Option<usize>,
    /// The node GUID it would have.
    guid: Option<u64>,
    /// Bytes of the receive buffer that its socket gets.
    receive_buffer: Option<usize>,
    /// Why it cannot be used now; `None`: it can.
    trouble: Option<String>,
    /// Process that has bound its UDP port.
    holder: Option<Holder>,
}

/// Runs the command.
pub(crate) fn run(args: &Args) -> Outcome {
    let programs = View::new();
    let rows: Vec<Row> = addresses().into_iter().map(look).collect();
    if args.json {
        let devices: Vec<Value> = rows.iter().map(object).collect();
        let soft = json!({ "name": "soft", "devices": devices });
        let providers = json!([soft, rdma_core_object()]);
        say!("{}", json!({ "verbs_programs": programs.object(), "providers": providers }));
        return programs.outcome();
    }
    programs.show();
    say!("provider soft: RoCEv2 over UDP, no hardware needed");
    let wide = rows.iter().map(|row| row.address.to_string().len()).max().unwrap_or(0).max(7);
    say!("  {:wide$}  {:>8}  {:>14}  UDP port {PORT}", "address", "path MTU", "receive buffer");
    for row in &rows {
        let mtu = row.mtu.map_or_else(|| "-".to_owned(), |mtu| mtu.to_string());
        let state = match (&row.trouble, &row.holder) {
            (None, _) => "free".to_owned(),
            (Some(_), Some(Holder { pid, name })) => format!("held by process {pid} ({name})"),
            (Some(text), None) => text.clone(),
        };
        let buffer = row.receive_buffer.map_or_else(|| "-".to_owned(), kib);
        say!("  {:wide$}  {mtu:>8}  {buffer:>14}  {state}", row.address.to_string());
    }
    let least = rows.iter().filter_map(|row| row.receive_buffer).min();
    if let Some(text) = least.and_then(|least| small_buffer(least, wanted())) {
        say!("  {text}");
    }
    say!("provider rdma-core: RDMA devices of this machine");
    match list() {
        Err(error) => say!("  none: {error}"),
        Ok(devices) => devices.iter().for_each(show),
    }
    programs.outcome()
}

/// Bytes of the receive buffer that the soft provider asks for.
fn wanted() -> usize {
    SoftConfig::default().socket_buffer
}

/// What to do about a receive buffer that is smaller than wanted [CC-9].
fn small_buffer(bytes: usize, wanted: usize) -> Option<String> {
    (bytes < wanted).then(|| {
        format!(
            "receive buffers have {} instead of {}; packets that arrive while one is full are lost \
             and sent again. Raise the limit with: sysctl -w net.core.rmem_max={wanted}",
            kib(bytes),
            kib(wanted)
        )
    })
}

fn kib(bytes: usize) -> String {
    format!("{} KiB", bytes >> 10)
}

/// Prints a device of rdma-core.
fn show(device: &Listed) {
    match &device.attr {
        Ok(attr) => say!(
            "  {}  path MTU {}  {}",
            device.name,
            attr.mtu.bytes(),
            attr.addrs.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ")
        ),
        Err(error) => say!("  {}  {error}", device.name),
    }
}

/// The provider rdma-core: its devices, or why there are none.
fn rdma_core_object() -> Value {
    let object = |device: &Listed| {
        let attr = device.attr.as_ref().ok();
        let addresses = |attr: &DeviceAttr| -> Vec<String> {
            attr.addrs.iter().map(ToString::to_string).collect()
        };
        json!({
            "device": device.name,
            "addresses": attr.map(addresses),
            "mtu": attr.map(|attr| attr.mtu.bytes()),
            "guid": attr.map(|attr| format!("{:016x}", attr.guid)),
            "usable": device.attr.is_ok(),
            "trouble": device.attr.as_ref().err().map(ToString::to_string),
        })
    };
    match list() {
        Ok(devices) => {
            let devices: Vec<Value> = devices.iter().map(object).collect();
            json!({ "name": "rdma-core", "devices": devices })
        }
        Err(error) => json!({ "name": "rdma-core", "devices": [], "trouble": error.to_string() }),
    }
}

fn object(row: &Row) -> Value {
    json!({
        "address": row.address.to_string(),
        "mtu": row.mtu,
        "guid": row.guid.map(|guid| format!("{guid:016x}")),
        "receive_buffer": row.receive_buffer,
        "receive_buffer_wanted": wanted(),
        "usable": row.trouble.is_none(),
        "trouble": row.trouble,
        "holder": row.holder.as_ref().map(|Holder { pid, name }| json!({ "pid": pid, "name": name })),
    })
}

/// Looks at an address without a socket there: a node that begins at this moment would find the
/// port taken, and leave the address out for as long as it runs.
fn look(address: IpAddr) -> Row {
    if is_held(address) {
        let trouble = Some(format!("UDP port {PORT} of {address} is in use"));
        let holder = holder(address);
        return Row { address, mtu: None, guid: None, receive_buffer: None, trouble, holder };
    }
    let link = machine_addrs().into_iter().find(|(of, _)| *of == address).map(|(_, link)| link);
    let bytes = link.and_then(interface).map(|(_, bytes)| bytes);
    let mtu = bytes.and_then(Mtu::for_interface);
    let trouble = match (bytes, mtu) {
        (Some(bytes), None) => Some(format!("packets of {bytes} bytes are too short for RoCEv2")),
        _ => None,
    };
    Row {
        address,
        mtu: mtu.map(Mtu::bytes),
        guid: Some(node_guid(&[address])),
        receive_buffer: EarlySockets::receive_buffer(wanted()).ok(),
        trouble,
        holder: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_receive_buffer_is_told_with_its_remedy() {
        assert_eq!(small_buffer(8 << 20, 8 << 20), None);
        let text = small_buffer(212_992, 8 << 20).unwrap();
        assert!(text.contains("208 KiB instead of 8192 KiB"), "{text}");
        assert!(text.ends_with("sysctl -w net.core.rmem_max=8388608"), "{text}");
    }
}
