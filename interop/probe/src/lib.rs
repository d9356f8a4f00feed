//! Asks a peer what the specifications say it does, rule by rule: `bowline probe`.
//!
//! ```text
//!   rds/, rtrs/   tables of rules, and by hand what a peer sends
//!        |
//!        v
//!   rule.rs       each is asked -> findings
//!        |
//!        v        where the peer does otherwise
//!   capture.rs    a file for Wireshark
//! ```
//! A rule is one entry of a table: its number in `docs/spec`, what is asked, what is to be seen,
//! and a function that asks. Nothing is asked that harms a kernel: no RDMA_DEST over TCP [R-118],
//! and no backing device is opened by two names [NB-58].

#![forbid(unsafe_code)]

mod capture;
mod rds;
mod rtrs;
mod rule;

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

pub use rds::ask as ask_rds;
pub use rtrs::{Part, ask as ask_rtrs};
pub use rule::{Answer, Finding, Other, Profile};

/// How a peer is asked.
#[derive(Clone, Debug)]
pub struct Options {
    /// Whose behaviour is expected; `None`: that which the peer shows.
    pub profile: Option<Profile>,
    /// Longest wait for one answer.
    pub patience: Duration,
    /// Rules to be asked; none: all.
    pub rules: Vec<String>,
    /// Folder for captures: of RDS over TCP one for each rule that the peer does not keep, with all
    /// that came before.
    pub capture: Option<PathBuf>,
}

impl Default for Options {
    fn default() -> Self {
        let patience = Duration::from_secs(2);
        Self { profile: None, patience, rules: Vec::new(), capture: None }
    }
}

/// What was found, in the order of the table.
#[derive(Debug)]
pub struct Report {
    /// Whose behaviour was expected.
    pub profile: Profile,
    /// One finding for each rule.
    pub findings: Vec<Finding>,
}

/// Why a peer was not asked.
#[derive(Debug)]
#[non_exhaustive]
pub enum Error {
    /// There is no rule of this name; those that there are.
    NoRule(String, Vec<&'static str>),
    /// The peer cannot be reached, or a capture not be written.
    Failed(String),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoRule(name, known) => {
                write!(f, "no rule {name}; there are {}", known.join(", "))
            }
            Self::Failed(why) => f.write_str(why),
        }
    }
}

impl std::error::Error for Error {}
