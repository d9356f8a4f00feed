//! The part of a node's configuration file that is about disks: `[disks]`, `[[export]]`, `[[map]]`.

use std::fmt::Display;

use bowline_rnbd_driver::server::ServerConfig;
use bowline_roce_driver::SoftConfig;
use serde::Deserialize;
use toml::{Spanned, Table};

use super::{
    device::{DeviceConfig, RouteConfig},
    exported::{Export, ServingConfig},
    front_ends::FrontEndConfig,
    mapping::MapConfig,
};
use crate::{Failure, config::entry::Entry};

/// What all exports and maps of a node share.
#[derive(Clone, Debug)]
pub(super) struct Shared {
    /// Addresses of the node's RDMA device; none stands for those of the node.
    pub(super) address: Vec<String>,
    pub(super) device: DeviceConfig,
    pub(super) serving: ServingConfig,
}

/// Keys of `[disks]` that are the node's own.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Addresses {
    address: Vec<String>,
}

impl Shared {
    fn of_entry(mut entry: Entry) -> Result<Self, String> {
        let Addresses { address } = entry.group()?;
        let shared = Self { address, device: entry.group()?, serving: entry.group()? };
        entry.finish().map(|()| shared)
    }
}

/// A disk that is mapped when the node starts.
#[derive(Clone, Debug)]
pub(super) struct Map {
    /// Name of the disk on the server.
    pub(super) device: String,
    pub(super) route: RouteConfig,
    pub(super) how: MapConfig,
    pub(super) front_ends: FrontEndConfig,
    /// Try again until the disk is mapped.
    pub(super) stay: bool,
}

/// Keys of `[[map]]` that are the entry's own.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Name {
    device: Option<String>,
}

/// See [`Name`].
#[derive(Default, Deserialize)]
#[serde(default)]
struct Staying {
    stay: bool,
}

impl Map {
    fn of_entry(mut entry: Entry) -> Result<Self, String> {
        let Name { device } = entry.group()?;
        let (route, how, front_ends): (RouteConfig, _, _) =
            (entry.group()?, entry.group()?, entry.group()?);
        let Staying { stay } = entry.group()?;
        entry.finish()?;
        let device = device.ok_or("device is missing")?;
        route.check().map_err(|failure| failure.to_string())?;
        Ok(Self { device, route, how, front_ends, stay })
    }
}

/// What the file says of disks.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The file has one of the tables, if only an empty `[disks]`.
    pub(crate) are_named: bool,
    pub(super) shared: Shared,
    /// Settings of the server, from what is shared.
    pub(super) config: ServerConfig,
    pub(super) exports: Vec<Export>,
    pub(super) maps: Vec<Map>,
}

/// The tables of the file.
#[derive(Debug, Default)]
pub(crate) struct Tables {
    /// `[disks]`.
    pub(crate) disks: Option<Spanned<Table>>,
    /// `[[export]]`.
    pub(crate) export: Vec<Spanned<Table>>,
    /// `[[map]]`.
    pub(crate) map: Vec<Spanned<Table>>,
}

/// A mistake: where its table begins in the file, in bytes, and what it is.
type Mistake = (usize, String);

impl Settings {
    /// Parses the tables of a file.
    pub(crate) fn parse(tables: &Tables) -> Result<Self, Mistake> {
        let at = |table: &Spanned<Table>| table.span().start;
        let empty = Table::new();
        let (begin, table) =
            tables.disks.as_ref().map_or((0, &empty), |table| (at(table), table.get_ref()));
        let (shared, config) = Entry::of_table(table)
            .and_then(Shared::of_entry)
            .and_then(|shared| {
                let config = shared.serving.config(shared.device.path_dead);
                config.map(|config| (shared, config)).map_err(|failure| failure.to_string())
            })
            .map_err(|text| (begin, format!("[disks]: {text}")))?;
        let mut exports: Vec<Export> = Vec::new();
        for (number, table) in tables.export.iter().enumerate() {
            let export = Entry::of_table(table.get_ref())
                .and_then(Export::of_entry)
                .and_then(|export| match exports.iter().find(|e| is_same(e, &export)) {
                    Some(_) => Err("another entry has the same name, or also a folder".to_owned()),
                    None => Ok(export),
                })
                .map_err(|text| (at(table), named("export", number, table, "name", text)))?;
            exports.push(export);
        }
        let mut maps: Vec<Map> = Vec::new();
        for (number, table) in tables.map.iter().enumerate() {
            let map = Entry::of_table(table.get_ref())
                .and_then(Map::of_entry)
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
    pub(crate) fn configure(&self, config: &mut SoftConfig) {
        self.shared.device.configure(config);
    }

    /// Returns the settings of a node without a file.
    pub(crate) fn none() -> Result<Self, Failure> {
        Self::parse(&Tables::default()).map_err(|(_, text)| Failure::Failed(text))
    }
}

/// Tells whether a server can have only one of these: they have one name, or are both folders.
fn is_same(one: &Export, other: &Export) -> bool {
    one.name == other.name
}

/// Names the entry of a mistake: by its number, and by its name if it has one.
fn named(kind: &str, at: usize, table: &Spanned<Table>, key: &str, text: impl Display) -> String {
    let name = table.get_ref().get(key).and_then(toml::Value::as_str);
    let name = name.map_or_else(String::new, |name| format!(" ({name})"));
    format!("[[{kind}]] number {}{name}: {text}", at + 1)
}
