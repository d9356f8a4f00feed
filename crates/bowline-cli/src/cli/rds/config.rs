//! The configuration file of `bowline node`: TOML, unknown keys refused with their line.

use std::{
    collections::BTreeMap,
    fs,
    net::SocketAddr,
    path::{Path, PathBuf},
};

use bowline::rds::PollMode;
use bowline_node::{
    Failure, Outcome,
    config::access::{Access, Network},
    disks::{Settings, Tables},
    over_rdma::DeviceName,
    values::{Address, Size, own_list},
};
use serde::Deserialize;
use toml::{Spanned, Table};

/// A commented file with every key; `bowline node --example-config` prints it.
pub(crate) const EXAMPLE: &str = include_str!("example.toml");

/// Contents of the file; what is absent keeps its default.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct File {
    #[serde(deserialize_with = "own_list")]
    pub(crate) address: Vec<Address>,
    pub(crate) rdma: Vec<DeviceName>,
    pub(crate) paths: Option<u8>,
    pub(crate) send_buffer: Option<Size>,
    pub(crate) recv_buffer: Option<Size>,
    pub(crate) max_message: Option<Size>,
    pub(crate) memory: Option<Size>,
    pub(crate) poll: Option<Poll>,
    pub(crate) congestion_control: Option<String>,
    pub(crate) end_to_end: Option<bool>,
    pub(crate) echo: Vec<u16>,
    pub(crate) sink: Vec<u16>,
    pub(crate) control: Option<PathBuf>,
    pub(crate) programs: Option<PathBuf>,
    pub(crate) tree: Option<PathBuf>,
    pub(crate) metrics: Option<SocketAddr>,
    pub(crate) metrics_host: Vec<String>,
    pub(crate) drain: Option<f64>,
    pub(crate) sandbox: Option<bool>,
    pub(crate) allow_peer: Vec<Network>,
    pub(crate) deny_peer: Vec<Network>,
    pub(crate) access: Access,
    pub(crate) sysctl: BTreeMap<String, i64>,
    disks: Option<Spanned<Table>>,
    export: Vec<Spanned<Table>>,
    map: Vec<Spanned<Table>>,
    /// What the last three say.
    #[serde(skip)]
    pub(crate) services: Option<Settings>,
}

impl File {
    /// Reads a file.
    ///
    /// # Errors
    ///
    /// A usage failure that names the file and the line.
    pub(crate) fn read(path: &Path) -> Outcome<Self> {
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
            disks: file.disks.take(),
            export: std::mem::take(&mut file.export),
            map: std::mem::take(&mut file.map),
        };
        let services = Settings::parse(&tables).map_err(|(at, text)| (line(at), text))?;
        file.services = Some(services);
        Ok(file)
    }
}

/// How a waiting thread waits.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Poll {
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
        let file = File::parse(EXAMPLE).expect("the example parses");
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
            File::parse(&text).map_err(|(line, why)| format!("{why}, line {line} of {text}"));
        let told = format!("{:?}", file.expect("all are options").services);
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
            let (at, message) = File::parse(text).expect_err(text);
            assert_eq!(at, line, "{text} {message}");
            assert!(message.contains(word), "{text} {message}");
        }
    }
}
