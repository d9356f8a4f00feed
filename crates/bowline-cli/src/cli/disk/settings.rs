//! The part of a node's configuration file that is about disks: `[disks]`, `[[export]]`, `[[map]]`.

use std::fmt::Display;

use bowline_node::Failure;
use bowline_rnbd_driver::server::ServerConfig;
use bowline_roce_driver::SoftConfig;
use toml::{Spanned, Table};

use super::{
    exported::{Export, Serving},
    front_ends,
    map::How,
    side::{Side, Towards},
    words,
};

/// What all exports and maps of a node share.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct Shared {
    /// Address of the node's RDMA device; without it, those of the node
    #[arg(long, value_name = "ADDRESS")]
    pub(super) address: Vec<String>,
    #[command(flatten)]
    pub(super) side: Side,
    #[command(flatten)]
    pub(super) serving: Serving,
}

/// A disk that is mapped when the node starts.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct Map {
    /// Name of the disk on the server
    #[arg(long, value_name = "DEVICE", required = true)]
    pub(super) device: String,
    #[command(flatten)]
    pub(super) towards: Towards,
    #[command(flatten)]
    pub(super) how: How,
    #[command(flatten)]
    pub(super) front_ends: front_ends::Options,
    /// Try again until the disk is mapped
    #[arg(long)]
    pub(super) stay: bool,
}

/// What the file says of disks.
#[derive(Clone, Debug)]
pub(in crate::cli) struct Settings {
    /// The file has one of the tables, if only an empty `[disks]`.
    pub(in crate::cli) are_named: bool,
    pub(super) shared: Shared,
    /// Settings of the server, from what is shared.
    pub(super) config: ServerConfig,
    pub(super) exports: Vec<Export>,
    pub(super) maps: Vec<Map>,
}

/// The tables of the file.
#[derive(Debug, Default)]
pub(in crate::cli) struct Tables {
    pub(in crate::cli) disks: Option<Spanned<Table>>,
    pub(in crate::cli) export: Vec<Spanned<Table>>,
    pub(in crate::cli) map: Vec<Spanned<Table>>,
}

/// A mistake: where its table begins in the file, in bytes, and what it is.
type Mistake = (usize, String);

impl Settings {
    /// Parses the tables of a file.
    pub(in crate::cli) fn parse(tables: &Tables) -> Result<Self, Mistake> {
        let at = |table: &Spanned<Table>| table.span().start;
        let empty = Table::new();
        let (begin, table) =
            tables.disks.as_ref().map_or((0, &empty), |table| (at(table), table.get_ref()));
        let (shared, config) = parsed(table)
            .and_then(|shared: Shared| {
                let config = shared.serving.config(shared.side.path_dead);
                config.map(|config| (shared, config)).map_err(|failure| failure.to_string())
            })
            .map_err(|text| (begin, format!("[disks]: {text}")))?;
        let mut exports: Vec<Export> = Vec::new();
        for (number, table) in tables.export.iter().enumerate() {
            let export = parsed(table.get_ref())
                .and_then(|export: Export| export.grants().map(|_| export))
                .and_then(|export| match exports.iter().find(|e| is_same(e, &export)) {
                    Some(_) => Err("another entry has the same name, or also a folder".to_owned()),
                    None => Ok(export),
                })
                .map_err(|text| (at(table), named("export", number, table, "name", text)))?;
            exports.push(export);
        }
        let mut maps: Vec<Map> = Vec::new();
        for (number, table) in tables.map.iter().enumerate() {
            let map = parsed(table.get_ref())
                .and_then(|map: Map| {
                    map.towards.check().map(|()| map).map_err(|failure| failure.to_string())
                })
                .and_then(|map| {
                    let place =
                        maps.iter().find_map(|other| map.front_ends.shared_with(&other.front_ends));
                    match place.map(|place| place.display().to_string()) {
                        Some(place) => Err(format!("another entry uses {place}")),
                        None => Ok(map),
                    }
                })
                .map_err(|text| (at(table), named("map", number, table, "device", text)))?;
            maps.push(map);
        }
        let are_named =
            tables.disks.is_some() || !tables.export.is_empty() || !tables.map.is_empty();
        Ok(Self { are_named, shared, config, exports, maps })
    }

    /// Sets what the file says of the soft device of disks.
    pub(in crate::cli) fn configure(&self, config: &mut SoftConfig) {
        self.shared.side.configure(config);
    }

    /// Returns the settings of a node without a file.
    pub(in crate::cli) fn none() -> Result<Self, Failure> {
        Self::parse(&Tables::default()).map_err(|(_, text)| Failure::Failed(text))
    }
}

/// Tells whether a server can have only one of these: they have one name, or are both folders.
fn is_same(one: &Export, other: &Export) -> bool {
    one.name == other.name
}

fn parsed<T: clap::Args>(table: &Table) -> Result<T, String> {
    words::parse(&words::of_table(table)?)
}

/// Names the entry of a mistake: by its number, and by its name if it has one.
fn named(kind: &str, at: usize, table: &Spanned<Table>, key: &str, text: impl Display) -> String {
    let name = table.get_ref().get(key).and_then(toml::Value::as_str);
    let name = name.map_or_else(String::new, |name| format!(" ({name})"));
    format!("[[{kind}]] number {}{name}: {text}", at + 1)
}
