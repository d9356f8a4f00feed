//! Serde definitions for types of other crates, which do not depend on serde.

use bowline_rtrs::Policy;
use bowline_rtrs::client::ReadKeys;
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize)]
#[serde(remote = "Policy")]
pub(crate) enum PolicyDef {
    RoundRobin,
    MinInflight,
    MinLatency,
}

#[derive(Serialize, Deserialize)]
#[serde(remote = "ReadKeys")]
pub(crate) enum ReadKeysDef {
    LongLived,
    PerRequest,
}
