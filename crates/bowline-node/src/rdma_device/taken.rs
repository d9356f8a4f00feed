//! Who has an address that a command wants, and what to do about that.

use std::{
    fs, io,
    net::IpAddr,
    path::{Path, PathBuf},
    time::Duration,
};

use bowline_ctl::Client;

use super::{Holder, Purpose, holder};
use crate::{namespaces::numbered, values::Address};

/// Longest wait for a place in the queue of a node.
const TIMEOUT: Duration = Duration::from_secs(1);

/// Explains that an address is taken, if this user may see by whom.
pub(super) fn taken(addresses: &[Address], purpose: Purpose) -> Option<String> {
    let found = addresses.iter().find_map(|address| Some((address.ip, holder(address.ip)?)));
    if let Some((address, holder)) = found {
        return Some(explain(address, &holder, control_socket(holder.pid), purpose));
    }
    // A process of another user; its socket can be seen all the same.
    let node = addresses.iter().find_map(|address| Some((address.ip, node_socket(*address)?)));
    node.map(|(address, socket)| {
        let what = match purpose {
            Purpose::Disks => {
                "let it export and map the disks, by [[export]] and [[map]] of its configuration \
                 file; or give another address"
            }
            Purpose::Connections => "give another address",
        };
        format!(
            "UDP port 4791 of {address} is in use, and a node of another user serves that address \
             ({}): {what}",
            socket.display()
        )
    })
}

/// Returns the control socket that a node of an address has if it was not told another one.
fn node_socket(address: Address) -> Option<PathBuf> {
    let usual = address.to_string();
    let names: Vec<_> = numbered(&usual).into_iter().chain([usual]).collect();
    let folders = bowline_ctl::folders();
    let places = folders.iter().filter_map(|folder| folder.parent());
    let mut places =
        places.flat_map(|folder| names.iter().map(|name| folder.join(format!("{name}.sock"))));
    places.find(|place| is_closed_to_us(place))
}

/// Tells whether a socket is one of another user, which nobody else may connect to. Whether it is
/// still in use the system does not tell.
fn is_closed_to_us(place: &Path) -> bool {
    let tried = || Client::connect_within(place, TIMEOUT);
    let is_refused = |error: io::Error| error.kind() == io::ErrorKind::PermissionDenied;
    bowline_ctl::is_socket(place) && tried().is_err_and(is_refused)
}

/// Returns the control socket of a process, which is named after the command and the process.
fn control_socket(pid: u32) -> Option<PathBuf> {
    let end = format!("-{pid}.sock");
    let files = bowline_ctl::folders().into_iter().flat_map(fs::read_dir).flatten().flatten();
    let mut places = files.map(|file| file.path());
    places
        .find(|place| place.file_name().is_some_and(|name| name.to_string_lossy().ends_with(&end)))
}

fn explain(address: IpAddr, holder: &Holder, socket: Option<PathBuf>, purpose: Purpose) -> String {
    let Holder { pid, name } = holder;
    let place = socket.as_deref().map(|socket| socket.display().to_string());
    let word = socket.as_deref().and_then(|socket| socket.file_name()?.to_str());
    let word = word.and_then(|name| name.split('-').next());
    const ONE: &str = "only one process can use an address, so stop that one";
    let (who, what) = match word {
        Some("node") if purpose == Purpose::Connections => ("the node", ONE),
        Some("export") if purpose == Purpose::Connections => ("`rnbd export`", ONE),
        Some("map") if purpose == Purpose::Connections => ("`rnbd map`", ONE),
        Some("node") => (
            "the node",
            "it serves and maps disks there: `bowline rnbd export NAME file=PATH` adds an export to it and `bowline \
             rnbd map DEVICE from SERVER` maps a disk in it, where it was started with --no-sandbox or a [disks] \
             table; [[export]] and [[map]] of its configuration file do so at its start",
        ),
        Some("export") => (
            "`rnbd export`",
            "`bowline rnbd export NAME file=PATH` adds an export to it; to map disks at the same address, let \
             `bowline node` do both",
        ),
        Some("map") => (
            "`rnbd map`",
            "`bowline rnbd map DEVICE from SERVER` maps another disk in it; to export disks at the same \
             address, let `bowline node` do both",
        ),
        _ => (name.as_str(), ONE),
    };
    let place = place.map_or_else(String::new, |place| format!(" at {place}"));
    format!(
        "UDP port 4791 of {address} is in use by process {pid}, {who}{place}: {what}; or give another address"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_to_use_instead_is_named() {
        let text = |name: &str, socket: Option<&str>| {
            let holder = Holder { pid: 12, name: name.to_owned() };
            explain([10, 0, 0, 1].into(), &holder, socket.map(PathBuf::from), Purpose::Disks)
        };
        let node = text("bowline", Some("/run/bowline/rnbd/node-10.0.0.1-12.sock"));
        let begin = "UDP port 4791 of 10.0.0.1 is in use by process 12, the node at \
                     /run/bowline/rnbd/node-10.0.0.1-12.sock: it serves and maps disks there: ";
        assert!(node.starts_with(begin), "{node}");
        assert!(text("bowline", Some("/r/export-12.sock")).contains("export to it; to map disks"));
        assert!(text("bowline", Some("/r/map-12.sock")).contains("disk in it; to export disks"));
        let holder = Holder { pid: 12, name: "bowline".to_owned() };
        let socket = Some(PathBuf::from("/r/node-10.0.0.1-12.sock"));
        let text_of_ping = explain([10, 0, 0, 1].into(), &holder, socket, Purpose::Connections);
        assert!(!text_of_ping.contains("disk"), "{text_of_ping}");
        assert!(text_of_ping.contains("the node at /r/node-10.0.0.1-12.sock: only one process"));
        assert_eq!(
            text("other", None),
            "UDP port 4791 of 10.0.0.1 is in use by process 12, other: only one process can use an address, so \
             stop that one; or give another address"
        );
    }
}
