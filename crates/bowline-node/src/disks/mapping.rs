//! How a disk is mapped, and why it could not be.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use bowline_rnbd::{Errno, client::Outage};
use bowline_rnbd_driver::client::{Client, Disk, MapOptions};
use bowline_rtrs_driver::{
    Engine, Policy,
    client::{ReadKeys, Refusal},
};
use bowline_verbs::RejectReason;
use bowline_wire::rnbd::Access;
use serde::Deserialize;

use super::{
    device::{DeviceConfig, Route},
    values::{access, connections, outage, policy, read_keys, reconnects},
};
use crate::{Failure, config::entry::field_parsers, values::some_time};

/// How a disk is mapped.
#[derive(Clone, Debug, Deserialize)]
#[serde(default, rename_all = "kebab-case")]
pub struct MapConfig {
    /// Access mode.
    #[serde(deserialize_with = "access_mode")]
    pub access: Access,
    /// What happens to requests while no path is connected.
    #[serde(deserialize_with = "outage_of_paths")]
    pub outage: Outage,
    /// Longest time of a request.
    #[serde(deserialize_with = "maybe_time")]
    pub timeout: Option<Duration>,
    /// How paths are chosen.
    #[serde(deserialize_with = "choice_of_paths")]
    pub policy: Policy,
    /// Longest wait for each step of connecting.
    #[serde(deserialize_with = "time")]
    pub connect_timeout: Duration,
    /// Attempts to connect a lost path again, -1: for ever.
    #[serde(deserialize_with = "attempts")]
    pub max_reconnects: i16,
    /// Time before each of these attempts; `None`: the default pauses.
    #[serde(deserialize_with = "maybe_time")]
    pub reconnect_delay: Option<Duration>,
    /// Time between heartbeats to the server.
    #[serde(deserialize_with = "time")]
    pub heartbeat: Duration,
    /// Memory that the server can write to.
    #[serde(deserialize_with = "keys")]
    pub read_keys: ReadKeys,
    /// Connections of each path for IO; `None`: as many as suit the device.
    #[serde(deserialize_with = "maybe_connections")]
    pub connections: Option<u16>,
    /// Do not ask the server to write zeroes by itself.
    pub no_write_zeroes: bool,
    /// Have the server itself write zeroes that must keep their space.
    pub nounmap: bool,
}

impl Default for MapConfig {
    fn default() -> Self {
        Self {
            access: Access::Rw,
            outage: Outage::Queue(Duration::from_secs(30)),
            timeout: None,
            policy: Policy::MinInflight,
            connect_timeout: Duration::from_secs(30),
            max_reconnects: -1,
            reconnect_delay: None,
            heartbeat: Duration::from_secs(5),
            read_keys: ReadKeys::LongLived,
            connections: None,
            no_write_zeroes: false,
            nounmap: false,
        }
    }
}

field_parsers! {
    access_mode: Access = access;
    outage_of_paths: Outage = outage;
    choice_of_paths: Policy = policy;
    time: Duration = some_time;
    maybe_time: Option<Duration> = |text| some_time(text).map(Some);
    attempts: i16 = reconnects;
    keys: ReadKeys = read_keys;
    maybe_connections: Option<u16> = |text| connections(text).map(Some);
}

impl MapConfig {
    /// Returns the options of a session without paths.
    pub fn options(&self, session: &str, port: u16) -> MapOptions {
        let mut options = MapOptions::new(session).outage(self.outage);
        options.port = port;
        options.access = self.access;
        options.policy = self.policy;
        options.io.io_timeout = self.timeout;
        options.io.write_zeroes = !self.no_write_zeroes;
        options.io.nounmap = self.nounmap;
        options.connect_timeout = self.connect_timeout;
        options.max_reconnects = self.max_reconnects;
        options.reconnect_delay = self.reconnect_delay;
        options.heartbeat.interval = self.heartbeat;
        // A silent server is probed at least once per heartbeat.
        options.heartbeat.probe_interval = options.heartbeat.probe_interval.min(self.heartbeat);
        options.read_keys = self.read_keys;
        options.io_connections = self.connections;
        options
    }
}

/// Time between attempts to map a disk while its server has a session of before.
const AGAIN: Duration = Duration::from_millis(500);

/// Maps a disk. A server that a machine comes back to after a loss of power has its former
/// session until it notices that nobody answers [RS-48]: that is waited for as long as for a server
/// that does not answer. `sleep` returns whether to continue afterwards.
///
/// # Errors
/// Why it could not be mapped.
pub fn map_patiently(
    client: &Client,
    device: &str,
    options: &MapOptions,
    mut sleep: impl FnMut(Duration) -> bool,
) -> Result<Arc<Disk>, bowline_rnbd_driver::Error> {
    let until = Instant::now() + options.connect_timeout;
    let mut is_noted = false;
    loop {
        let error = match client.map_with(device, options) {
            Ok(disk) => return Ok(disk),
            Err(error) => error,
        };
        if !may_have_former_session(&error) || Instant::now() + AGAIN > until {
            return Err(error);
        }
        if !is_noted {
            is_noted = true;
            note!(
                "{device}: its server does not accept the session {}, perhaps since it has not \
                 noticed yet that an earlier client of this name is gone; trying again for {}",
                options.session,
                seconds(options.connect_timeout)
            );
        }
        if !sleep(AGAIN) {
            return Err(error);
        }
    }
}

/// Tells whether the name of a session may be that of a client of before, whose end the server has
/// not noticed.
fn may_have_former_session(error: &bowline_rnbd_driver::Error) -> bool {
    error.is_of_session()
        && error.errno() == Errno::ECONNRESET
        && matches!(
            error.refusal(),
            None | Some(Refusal::Server(_) | Refusal::Manager(RejectReason::STALE_CONNECTION))
        )
}

/// Explains why a disk could not be mapped, and what to check.
pub fn refused(
    device: &str,
    route: &Route,
    how: &MapConfig,
    side: &DeviceConfig,
    engine: &Engine,
    error: &bowline_rnbd_driver::Error,
) -> Failure {
    let errno = error.errno();
    let servers: Vec<String> = route.paths.iter().map(|(_, dst)| dst.to_string()).collect();
    // If one path cannot be connected, the session is not opened.
    let one_of = if servers.len() > 1 { "one of " } else { "" };
    let (servers, session, port) = (servers.join(", "), &route.session, side.port);
    let text = match errno {
        Errno::ETIMEDOUT => {
            let fault = route.paths.iter().find_map(|(src, dst)| engine.fault((*src)?, *dst));
            let why = fault.map_or_else(
                || "is a server running there, and does a firewall block UDP port 4791?".to_owned(),
                |fault| fault.to_string(),
            );
            format!(
                "no answer from {one_of}{servers} within {}: {why}",
                seconds(how.connect_timeout)
            )
        }
        Errno::ECONNRESET => format!(
            "{one_of}{servers} refused the connection: {}",
            match error.refusal() {
                Some(Refusal::Manager(RejectReason::INVALID_SERVICE_ID)) => {
                    format!("no server on port {port}")
                }
                Some(Refusal::Manager(RejectReason::STALE_CONNECTION)) => {
                    "it still has an earlier connection of this machine; try again".to_owned()
                }
                Some(Refusal::Manager(RejectReason::INVALID_MTU)) => {
                    "the path MTU is too large for it; give a smaller --mtu".to_owned()
                }
                Some(Refusal::Manager(reason)) => reason.to_string(),
                Some(Refusal::Answer(why)) =>
                    format!("port {port} is not an RTRS server of version 2: {why}"),
                Some(Refusal::Server(_)) => format!(
                    "the server on port {port} has not noticed yet that an earlier path of this session is lost, or it \
                     is ending, or it has another protocol version"
                ),
                None => format!(
                    "it does not accept a session {session} from here: it still has one of this name, of a client that \
                     is gone without saying so (try again), or of another one, here or on another machine, which \
                     uses the name (choose another with --from NAME --path {}), or its --allow does not include it",
                    route.path_text()
                ),
            }
        ),
        Errno::ENOENT => format!("{servers} has no disk {device} for session {session}"),
        Errno::EPERM if error.is_of_session() => format!(
            "{one_of}{servers} does not accept clients from the source address of this path: its --allow does not \
             include it"
        ),
        Errno::EPERM => format!(
            "{servers} does not open {device} for {}: another session has it open for writing",
            how.access
        ),
        Errno::EACCES => format!(
            "{servers} does not open {device} for {} to session {session}: it is read-only there, or no --grant \
             allows it{}",
            how.access,
            if how.access == Access::Ro { "" } else { "; try --access ro" }
        ),
        _ => error.to_string(),
    };
    Failure::Errno(errno, text)
}

fn seconds(time: Duration) -> String {
    format!("{} s", time.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::entry::Entry;

    #[test]
    fn reconnecting_and_heartbeats_are_as_said() {
        // tests [RS-10] [RS-13] [RT-63]
        let parse = |words: &str| -> Result<MapConfig, String> {
            Entry::of_words(words.split_ascii_whitespace())?.group()
        };
        let options = |words: &str| parse(words).unwrap().options("s1", 1234);
        let (usual, library) = (options(""), MapOptions::new("s1"));
        assert_eq!((usual.max_reconnects, usual.reconnect_delay), (-1, None));
        assert_eq!(usual.heartbeat, library.heartbeat);
        let said = options("max-reconnects=3 reconnect-delay=2 heartbeat=500ms");
        assert_eq!((said.max_reconnects, said.reconnect_delay), (3, Some(Duration::from_secs(2))));
        assert_eq!(said.heartbeat.interval, Duration::from_millis(500));
        assert_eq!(said.heartbeat.probe_interval, Duration::from_millis(500));
        assert_eq!(options("max-reconnects=-1").max_reconnects, -1);
        for words in ["max-reconnects=-2", "max-reconnects=10000", "heartbeat=0"] {
            assert!(parse(words).is_err(), "{words}");
        }
    }
}
