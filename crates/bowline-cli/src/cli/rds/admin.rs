//! `bowline sysctl` and `bowline drop`: change a running node through its control socket.

use std::path::PathBuf;

use bowline_node::{
    Failure, Outcome,
    control::{Client, MANUAL_NAMES},
    values::{Address, setting},
};
use bowline_rds::SYSCTL_NAMES;

/// Show or change settings of a running node, named as the kernel's sysctls.
#[derive(Debug, clap::Args)]
pub(crate) struct SysctlArgs {
    /// NAME to show a setting, NAME=VALUE to change it; without any, show all
    #[arg(value_name = "NAME[=VALUE]", value_parser = wish)]
    settings: Vec<(String, Option<i64>)>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    /// Control socket of the node [default: that of the only node in this network
    /// namespace; a node in the folder of this user comes first]
    #[arg(long, value_name = "PATH")]
    control: Option<PathBuf>,
}

/// Cut the TCP and RDMA connections of a running node; it connects again and loses nothing.
///
/// The node reads what has arrived on a connection, then resets it. Connections are made again, and
/// both ends send unacknowledged messages again; duplicates are dropped. A kernel as the peer may
/// lose or duplicate messages when its connections are reset, because it discards data that it has
/// acknowledged and not read. Between bowline nodes nothing is lost.
#[derive(Debug, clap::Args)]
pub(crate) struct DropArgs {
    /// Peer whose connections are cut; without it, all peers
    peer: Option<Address>,
    /// Control socket of the node [default: that of the only node in this network
    /// namespace; a node in the folder of this user comes first]
    #[arg(long, value_name = "PATH")]
    control: Option<PathBuf>,
}

fn wish(text: &str) -> Result<(String, Option<i64>), String> {
    if text.contains('=') {
        let (name, value) = setting(text)?;
        return Ok((name, Some(value)));
    }
    Ok((text.to_owned(), None))
}

/// Runs `bowline sysctl`; the output has the form of `sysctl`.
pub(crate) fn run_sysctl(args: &SysctlArgs) -> Outcome {
    let mut client = Client::connect(args.control.as_deref())?;
    // Names that only the manual has are further names of others.
    let listed = SYSCTL_NAMES.iter().filter(|name| !MANUAL_NAMES.contains(name));
    let all = || listed.map(|name| ((*name).to_owned(), None)).collect();
    let wishes = if args.settings.is_empty() { all() } else { args.settings.clone() };
    let mut shown = serde_json::Map::new();
    for (name, value) in wishes {
        let value = client.sysctl(&name, value)?;
        if args.json {
            shown.insert(name, value.into());
        } else {
            say!("{name} = {value}");
        }
    }
    if args.json {
        say!("{}", serde_json::Value::Object(shown));
    }
    Ok(())
}

/// Runs `bowline drop`.
pub(crate) fn run_drop(args: &DropArgs) -> Outcome {
    let mut client = Client::connect(args.control.as_deref())?;
    // The peer's address is enough: the node knows which of its own addresses it is connected to.
    if let Some(peer) = args.peer.filter(|peer| peer.link.is_some()) {
        let own = client.snapshot()?.node.addresses;
        if !own.is_empty() && own.iter().all(|address| address.link != peer.link) {
            let own: Vec<String> = own.iter().map(Address::to_string).collect();
            let own = own.join(", ");
            return Err(Failure::usage(format!("{peer} is not on a link of the node, {own}")));
        }
    }
    let dropped = client.drop_connections(args.peer.map(|peer| peer.ip))?;
    match (dropped, args.peer) {
        (0, Some(peer)) => Err(Failure::failed(format!(
            "the node has no connection to {peer}; `bowline info -n` lists those that it has"
        ))),
        _ => {
            say!("{dropped} connections cut");
            Ok(())
        }
    }
}
