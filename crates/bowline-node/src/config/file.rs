//! The configuration file of `bowline node`: TOML, unknown keys refused with their line.

use std::{
    collections::BTreeMap,
    fs,
    net::SocketAddr,
    path::{Path, PathBuf},
};

use bowline::rds::PollMode;
use bowline_roce_driver::Impairment;
use serde::Deserialize;
use toml::{Spanned, Table};

use super::access::{Access, Network};
use crate::{
    Failure, Outcome,
    disks::{Settings, Tables},
    over_rdma::DeviceName,
    values::{Address, Size, own_list},
};

/// A commented file with every key; `bowline node --example-config` prints it.
pub const EXAMPLE: &str = include_str!("example.toml");

/// Contents of the file, over which options are laid; what is absent keeps its default.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct Config {
    /// Addresses to serve; none stands for every local one.
    #[serde(deserialize_with = "own_list")]
    pub address: Vec<Address>,
    /// Devices over which RDS is spoken, beside TCP.
    pub rdma: Vec<DeviceName>,
    /// Paths to a peer, 8 or 1.
    pub paths: Option<u8>,
    /// Send buffer of a new socket.
    pub send_buffer: Option<Size>,
    /// Receive buffer of a new socket.
    pub recv_buffer: Option<Size>,
    /// Longest message.
    pub max_message: Option<Size>,
    /// Memory that peers together may make the node take.
    pub memory: Option<Size>,
    /// How a waiting thread waits.
    pub poll: Option<Poll>,
    /// TCP congestion control.
    pub congestion_control: Option<String>,
    /// What a bad network does to packets of RDMA.
    #[serde(deserialize_with = "crate::impair::texts")]
    pub impair: Vec<Impairment>,
    /// What chooses the packets.
    pub impair_seed: Option<u64>,
    /// Acknowledge end to end.
    pub end_to_end: Option<bool>,
    /// Ports of echo services.
    pub echo: Vec<u16>,
    /// Ports of sinks.
    pub sink: Vec<u16>,
    /// Place of the control socket.
    pub control: Option<PathBuf>,
    /// Place at which programs are served.
    pub programs: Option<PathBuf>,
    /// Folder below which the node is shown as files.
    pub tree: Option<PathBuf>,
    /// Where metrics are served.
    pub metrics: Option<SocketAddr>,
    /// Names by which clients may ask for metrics.
    pub metrics_host: Vec<String>,
    /// Longest wait at the end, in seconds.
    pub drain: Option<f64>,
    /// Give up what the node does not need.
    pub sandbox: Option<bool>,
    /// Peers that may connect and be sent to; none stands for all.
    pub allow_peer: Vec<Network>,
    /// Peers that may not.
    pub deny_peer: Vec<Network>,
    /// Who may do what.
    pub access: Access,
    /// Settings by the names of the kernel's sysctls.
    pub sysctl: BTreeMap<String, i64>,
    #[serde(rename = "disks")]
    disk_table: Option<Spanned<Table>>,
    #[serde(rename = "export")]
    export_tables: Vec<Spanned<Table>>,
    #[serde(rename = "map")]
    map_tables: Vec<Spanned<Table>>,
    /// What the last three say.
    #[serde(skip)]
    pub disks: Option<Settings>,
    /// What only options say: further settings, after those of the file.
    #[serde(skip)]
    pub sysctl_after: Vec<(String, i64)>,
    /// Have no control socket.
    #[serde(skip)]
    pub no_control: bool,
    /// Serve no programs.
    #[serde(skip)]
    pub no_programs: bool,
    /// Go on in the place of the node that serves programs at the same place.
    #[serde(skip)]
    pub replace: bool,
    /// At the end, leave programs' sockets with the service manager.
    #[serde(skip)]
    pub keep_programs: bool,
    /// End when no program is left, in a session of its own: see [`leases`](crate::leases).
    #[serde(skip)]
    pub until_unused: bool,
}

impl Config {
    /// Reads a file.
    ///
    /// # Errors
    ///
    /// A usage failure that names the file and the line.
    pub fn read(path: &Path) -> Outcome<Self> {
        let text = fs::read_to_string(path)
            .map_err(|error| Failure::usage(format!("cannot read {}: {error}", path.display())))?;
        Self::parse(&text).map_err(|(line, text)| {
            Failure::usage(format!(
                "{}:{line}: {text}; see `bowline node --example-config`",
                path.display()
            ))
        })
    }

    fn parse(text: &str) -> Result<Self, (usize, String)> {
        let line = |at: usize| {
            let before = &text.as_bytes()[..at.min(text.len())];
            1 + before.iter().filter(|byte| **byte == b'\n').count()
        };
        let mut file: Self = toml::from_str(text).map_err(|error| {
            let at = error.span().map_or(0, |span| span.start);
            (line(at), error.message().replace('\n', " "))
        })?;
        let tables = Tables {
            disks: file.disk_table.take(),
            export: std::mem::take(&mut file.export_tables),
            map: std::mem::take(&mut file.map_tables),
        };
        let disks = Settings::parse(&tables).map_err(|(at, text)| (line(at), text))?;
        file.disks = Some(disks);
        Ok(file)
    }
}

/// How a waiting thread waits.
#[cfg_attr(feature = "options", derive(clap::ValueEnum))]
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq)]
#[serde(rename_all = "lowercase")]
pub enum Poll {
    /// Spin for about one wake-up, then sleep
    Adaptive,
    /// Never sleep
    Spin,
    /// Never spin
    Sleep,
}

impl From<Poll> for PollMode {
    fn from(poll: Poll) -> Self {
        match poll {
            Poll::Adaptive => Self::Adaptive,
            Poll::Spin => Self::Spin,
            Poll::Sleep => Self::Sleep,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_example_is_a_valid_file() {
        let file = Config::parse(EXAMPLE).expect("the example parses");
        assert_eq!(file.paths, Some(8));
        assert_eq!(file.rdma, []);
        assert_eq!(file.max_message, Some(Size(1 << 20)));
        assert_eq!(file.memory, Some(Size(1 << 30)));
        assert_eq!(file.allow_peer, []);
        let policy = file.access.policy(bowline_host::Quota::NONE).expect("known names");
        assert!(policy.attach.is_nobody() && policy.binds.is_empty(), "as without the file");
        assert_eq!(file.sysctl["net.rds.max_unacked_packets"], 8);
    }

    #[test]
    fn the_exports_and_disks_of_the_example_are_valid() {
        let (_, disks) = EXAMPLE.split_once("\n# [disks]\n").expect("the table");
        let is_value = |text: &str| {
            text.starts_with("[[")
                || text.split_once(" = ").is_some_and(|(key, _)| !key.contains(' '))
        };
        let plain = |line: &str| match line.strip_prefix("# ").filter(|text| is_value(text)) {
            Some(text) => format!("{text}\n"),
            None => format!("{line}\n"),
        };
        let text: String = disks.lines().map(plain).collect();
        let text = format!("[disks]\n{text}");
        let file =
            Config::parse(&text).map_err(|(line, why)| format!("{why}, line {line} of {text}"));
        let told = format!("{:?}", file.expect("all are options").disks);
        for wanted in ["\"scratch\"", "1073741824", "\"disk0\"", "Queue(30s)", "\"/srv/disks\""] {
            assert!(told.contains(wanted), "{wanted} in {told}");
        }
    }

    #[test]
    fn mistakes_are_reported_with_their_line() {
        for (text, line, word) in [
            ("paths = 8\nadress = []\n", 2, "adress"),
            ("\n\nsend-buffer = \"many\"\n", 3, "many"),
            ("recv-buffer = -1\n", 1, "-1"),
            ("poll = \"never\"\n", 1, "never"),
            ("paths = 8\npaths = 1\n", 2, "duplicate"),
            ("address = [\"10.0.0\"]\n", 1, "IP"),
            ("paths = 8\nrdma = [\"soft\", \"10.0.0.1\"]\n", 2, "10.0.0.1"),
        ] {
            let (at, message) = Config::parse(text).expect_err(text);
            assert_eq!(at, line, "{text} {message}");
            assert!(message.contains(word), "{text} {message}");
        }
    }
}
