//! Serde definitions, for kept plans, of types in crates that do not use serde.

use std::time::Duration;

use bowline_roce::GiveUp;
use bowline_verbs::Mtu;
use bowline_wire::roce::IcrcPolicy;
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize)]
#[serde(remote = "Mtu")]
pub(crate) enum MtuDef {
    M256,
    M512,
    M1024,
    M2048,
    M4096,
}

#[derive(Serialize, Deserialize)]
#[serde(remote = "IcrcPolicy")]
pub(crate) enum IcrcPolicyDef {
    Off,
    Solve,
    Strict,
}

#[derive(Serialize, Deserialize)]
#[serde(remote = "GiveUp")]
pub(crate) enum GiveUpDef {
    RetryCount,
    RetryCountSevenForever,
    After(Duration),
}
