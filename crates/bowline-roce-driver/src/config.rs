//! Settings of a soft device.

use std::fs;
use std::net::IpAddr;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use bowline_verbs::Mtu;
use bowline_wire::roce::IcrcPolicy;

use crate::{EarlySockets, Impairments};

/// How a thread waits for the network.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PollMode {
    /// Polls for about as long as a wake-up would cost, then sleeps. On a machine with one
    /// processor, sleeps at once.
    #[default]
    Adaptive,
    /// Never sleeps: lowest latency, one processor per waiting thread.
    Spin,
    /// Sleeps at once.
    Sleep,
}

/// Where a device records its connections, in case its process is killed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum FormerConnections {
    /// In a folder of the user, `bowline/roce-UID` in `$XDG_RUNTIME_DIR` or, without that variable,
    /// in `/run`. The folder is created if necessary. If that fails, or if the folder belongs to
    /// another user or is writable by others, nothing is recorded: a program that is killed and
    /// restarted may have to wait until its peers have noticed.
    #[default]
    RunFolder,
    /// In this folder. No other user must be able to write to it; several devices may share it.
    In(PathBuf),
    /// Not at all.
    Nowhere,
}

impl FormerConnections {
    /// Returns the folder, made if necessary, if there is one.
    pub fn folder(self) -> Option<PathBuf> {
        match self {
            Self::RunFolder => run_folder(),
            Self::In(folder) => Some(folder),
            Self::Nowhere => None,
        }
    }
}

fn run_folder() -> Option<PathBuf> {
    let own = own_user()?;
    // Not in a folder that another user could exchange, as after `sudo -E`.
    let is_safe = |dir: &PathBuf| {
        fs::metadata(dir).map_or(true, |found| found.uid() == own || found.uid() == 0)
    };
    let given = std::env::var_os("XDG_RUNTIME_DIR").filter(|dir| !dir.is_empty());
    let given = given.map(PathBuf::from).filter(is_safe);
    own_folder(&given.unwrap_or_else(|| "/run".into()).join("bowline"))
}

fn own_user() -> Option<u32> {
    Some(fs::metadata("/proc/self").ok()?.uid())
}

/// Returns a folder of this user alone. Services of several users share the one around it, which
/// their group may write.
fn own_folder(shared: &Path) -> Option<PathBuf> {
    let own = own_user()?;
    let folder = shared.join(format!("roce-{own}"));
    fs::DirBuilder::new().recursive(true).mode(0o700).create(&folder).ok()?;
    let found = fs::symlink_metadata(&folder).ok()?;
    (found.is_dir() && found.uid() == own && found.mode() & 0o022 == 0).then_some(folder)
}

/// Settings of a soft device.
#[derive(Clone, Debug)]
pub struct SoftConfig {
    /// Name, as tools show it.
    pub name: String,
    /// Addresses of this machine that are the device's GIDs; at least one.
    pub addrs: Vec<IpAddr>,
    /// Interface index of link-local addresses among `addrs`. Several interfaces can have the same
    /// link-local address. An address without an entry is looked up.
    pub links: Vec<(IpAddr, u32)>,
    /// Path MTU of the device's port; `None`: the largest one that the interfaces of all addresses
    /// carry [HDR-8].
    pub mtu: Option<Mtu>,
    /// Node GUID; `None`: derived from the machine's identity and the addresses, so the same in
    /// each process.
    pub guid: Option<u64>,
    /// How the ICRC of received packets is checked [ICRC-33].
    pub icrc: IcrcPolicy,
    /// Send several packets with one call [ICRC-22]. Turn off for paths that do not count
    /// identifications up.
    pub gso: bool,
    /// How threads wait for the network.
    pub poll: PollMode,
    /// How long [`PollMode::Adaptive`] polls before it sleeps.
    pub spin: Duration,
    /// Size of the sockets' buffers in bytes; the system may allow less.
    pub socket_buffer: usize,
    /// Sockets that were made before; none: they are made when the device is opened.
    pub early_sockets: EarlySockets,
    /// For measurements and tests: a network that is bad by choice. Memory for a packet that is
    /// late or changed is taken from the heap.
    pub impairments: Impairments,
    /// File to which all packets are written, in pcapng format.
    pub capture: Option<PathBuf>,
    /// Where files, one per address, list the established connections for the next device of that
    /// address, in case this process is killed. That device ends them before it does anything else
    /// [CM-53], so that a peer is free at once instead of when it notices by itself: until then,
    /// for seconds, an RTRS session of the same name is refused.
    pub former_connections: FormerConnections,
    /// Limits, window and timers of the core. Addresses, MTU, GUID, ICRC policy, bursts and the
    /// source port, which is always 4791, are set by the driver.
    pub core: bowline_roce::Config,
}

impl Default for SoftConfig {
    fn default() -> Self {
        Self {
            name: "bowline0".to_owned(),
            addrs: Vec::new(),
            links: Vec::new(),
            mtu: None,
            guid: None,
            icrc: IcrcPolicy::default(),
            gso: true,
            poll: PollMode::Adaptive,
            spin: Duration::from_micros(100),
            socket_buffer: 8 << 20,
            early_sockets: EarlySockets::default(),
            impairments: Impairments::default(),
            capture: None,
            former_connections: FormerConnections::default(),
            core: bowline_roce::Config::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn connections_are_noted_in_a_folder_of_the_user_alone() {
        let shared = std::env::temp_dir().join(format!("bowline-own-{}", std::process::id()));
        fs::create_dir(&shared).unwrap();
        let allow = |path: &Path, mode| {
            fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
        };
        // As the folder of services, in which several users make sockets.
        allow(&shared, 0o1775);
        let own = own_folder(&shared).unwrap();
        assert_eq!(own.parent(), Some(&*shared));
        assert_eq!(own_folder(&shared), Some(own.clone()));
        allow(&own, 0o777);
        assert_eq!(own_folder(&shared), None, "others could put files there");
        fs::remove_dir(&own).unwrap();
        std::os::unix::fs::symlink("/tmp", &own).unwrap();
        assert_eq!(own_folder(&shared), None, "it leads elsewhere");
        fs::remove_dir_all(&shared).unwrap();
    }
}
