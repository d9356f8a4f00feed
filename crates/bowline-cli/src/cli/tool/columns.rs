//! The fields of devices, sessions and paths: keys, headings, defaults [NB-43].

use super::Refusal;

/// A side: client or server.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Mode {
    Client,
    Server,
}

/// A kind of object.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Target {
    Device,
    Session,
    Path,
}

impl Mode {
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Client => "client",
            Self::Server => "server",
        }
    }
}

impl Target {
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Device => "device",
            Self::Session => "session",
            Self::Path => "path",
        }
    }
}

/// A field: its key and its heading.
pub(super) type Column = (&'static str, &'static str);

const DEVICE: [Column; 13] = [
    ("sessname", "Session"),
    ("mapping_path", "Mapping Path"),
    ("devname", "Device"),
    ("devpath", "Device path"),
    ("state", "State"),
    ("access_mode", "Access Mode"),
    ("rx_sect", "RX"),
    ("tx_sect", "TX"),
    ("direction", "Direction"),
    ("hostname", "Hostname"),
    ("errors", "Errors"),
    ("last_error", "Last error"),
    ("storage", "Storage"),
];
const SESSION: [Column; 14] = [
    ("sessname", "Session name"),
    ("path_cnt", "Path cnt"),
    ("act_path_cnt", "Act path cnt"),
    ("state", "State"),
    ("path_uu", "PS"),
    ("mp", "MP Policy"),
    ("mp_short", "MP"),
    ("tx_bytes", "TX"),
    ("rx_bytes", "RX"),
    ("inflights", "Inflights"),
    ("reconnects", "Reconnects"),
    ("direction", "Direction"),
    ("srvname", "Server Name"),
    ("hostname", "Hostname"),
];
const PATH: [Column; 13] = [
    ("sessname", "Sessname"),
    ("pathname", "Path name"),
    ("src_addr", "Client Addr"),
    ("hca_name", "HCA"),
    ("hca_port", "Port"),
    ("dst_addr", "Server Addr"),
    ("state", "State"),
    ("tx_bytes", "TX"),
    ("rx_bytes", "RX"),
    ("inflights", "Inflights"),
    ("reconnects", "Reconnects"),
    ("direction", "Direction"),
    ("hostname", "Hostname"),
];

/// Fields about failures of storage, which a kernel does not have [NB-67]. By default they are
/// shown once a request has failed.
pub(super) const STORAGE: [&str; 3] = ["errors", "last_error", "storage"];

/// Fields that only a client has.
const CLIENT_ONLY: [(Target, &str); 10] = [
    (Target::Device, "state"),
    (Target::Session, "act_path_cnt"),
    (Target::Session, "state"),
    (Target::Session, "path_uu"),
    (Target::Session, "mp"),
    (Target::Session, "mp_short"),
    (Target::Session, "reconnects"),
    (Target::Session, "srvname"),
    (Target::Path, "state"),
    (Target::Path, "reconnects"),
];

/// Returns every field of a kind of object on a side, in the order in which they are printed.
pub(super) fn all(mode: Mode, target: Target) -> Vec<Column> {
    let columns: &[Column] = match target {
        Target::Device => &DEVICE,
        Target::Session => &SESSION,
        Target::Path => &PATH,
    };
    let known =
        |column: &&Column| mode == Mode::Client || !CLIENT_ONLY.contains(&(target, column.0));
    columns.iter().filter(known).copied().collect()
}

fn defaults(mode: Mode, target: Target) -> &'static [&'static str] {
    match (mode, target) {
        (Mode::Client, Target::Device) => {
            &["sessname", "mapping_path", "devname", "state", "access_mode"]
        }
        (Mode::Server, Target::Device) => &["sessname", "mapping_path", "devname", "access_mode"],
        (Mode::Client, Target::Session) => {
            &["sessname", "state", "path_uu", "mp_short", "tx_bytes", "rx_bytes", "reconnects"]
        }
        (Mode::Server, Target::Session) => {
            &["sessname", "path_cnt", "tx_bytes", "rx_bytes", "inflights"]
        }
        (Mode::Client, Target::Path) => {
            &["sessname", "hca_name", "hca_port", "dst_addr", "state", "tx_bytes", "rx_bytes"]
        }
        (Mode::Server, Target::Path) => {
            &["sessname", "hca_name", "hca_port", "src_addr", "tx_bytes", "rx_bytes"]
        }
    }
}

/// A selection of fields: a list, or additions to and removals from the defaults.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) enum Fields {
    All,
    Exactly(Vec<String>),
    Plus(Vec<String>),
    Minus(Vec<String>),
}

impl Fields {
    /// Parses `a,b`, `+a,b`, `-a,b` or `all`.
    pub(super) fn parse(text: &str) -> Result<Self, Refusal> {
        if text == "all" {
            return Ok(Self::All);
        }
        let (make, list): (fn(Vec<String>) -> Self, &str) = match text.split_at_checked(1) {
            Some(("+", list)) => (Self::Plus, list),
            Some(("-", list)) => (Self::Minus, list),
            _ => (Self::Exactly, text),
        };
        let names: Vec<String> = list.split(',').map(str::to_owned).collect();
        let known = |name: &String| {
            [&DEVICE[..], &SESSION, &PATH]
                .iter()
                .any(|list| list.iter().any(|(key, _)| key == name))
        };
        match names.iter().find(|name| !known(name)) {
            Some(name) => {
                Err(Refusal::usage(format!("\"{name}\" is neither an option nor a field")))
            }
            None => Ok(make(names)),
        }
    }
}

/// Returns the fields to print; fields that the kind of object lacks are left out.
pub(super) fn chosen(mode: Mode, target: Target, fields: Option<&Fields>) -> Vec<Column> {
    let all = all(mode, target);
    let find = |name: &str| all.iter().find(|(key, _)| *key == name).copied();
    let base = || defaults(mode, target).iter().filter_map(|name| find(name));
    match fields {
        None => base().collect(),
        Some(Fields::All) => all,
        Some(Fields::Exactly(names)) => names.iter().filter_map(|name| find(name)).collect(),
        Some(Fields::Plus(names)) => {
            let mut list: Vec<Column> = base().collect();
            for column in names.iter().filter_map(|name| find(name)) {
                if !list.contains(&column) {
                    list.push(column);
                }
            }
            list
        }
        Some(Fields::Minus(names)) => {
            base().filter(|(key, _)| !names.iter().any(|name| name == key)).collect()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(mode: Mode, target: Target, text: Option<&str>) -> Vec<&'static str> {
        let fields = text.map(|text| Fields::parse(text).unwrap());
        chosen(mode, target, fields.as_ref()).into_iter().map(|(key, _)| key).collect()
    }

    #[test]
    fn defaults_are_extended_reduced_and_replaced() {
        // tests [NB-41] [NB-43]
        use {
            Mode::{Client, Server},
            Target::{Device, Path, Session},
        };
        assert_eq!(
            keys(Client, Device, None),
            ["sessname", "mapping_path", "devname", "state", "access_mode"]
        );
        assert_eq!(
            keys(Server, Device, Some("+rx_sect,state")),
            ["sessname", "mapping_path", "devname", "access_mode", "rx_sect"]
        );
        assert_eq!(
            keys(Server, Path, Some("-tx_bytes,hca_name")),
            ["sessname", "hca_port", "src_addr", "rx_bytes"]
        );
        assert_eq!(keys(Client, Session, Some("inflights,sessname")), ["inflights", "sessname"]);
        assert_eq!(keys(Client, Session, Some("all")).len(), 14);
        assert_eq!(keys(Server, Session, Some("all")).len(), 7);
        assert!(Fields::parse("sessname,x").is_err());
        assert!(Fields::parse("").is_err());
        for mode in [Client, Server] {
            for target in [Device, Session, Path] {
                let shown = chosen(mode, target, None).len();
                assert_eq!(shown, defaults(mode, target).len());
            }
        }
    }
}
