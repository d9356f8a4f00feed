//! Settings of a soft device.

use std::fs;
use std::net::IpAddr;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::PathBuf;
use std::time::Duration;

use bowline_verbs::Mtu;
use bowline_wire::roce::IcrcPolicy;

/// How a thread waits for the network.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PollMode {
    /// Looks for about as long as waking up would cost, then sleeps; on a machine with one
    /// processor it sleeps at once.
    #[default]
    Adaptive,
    /// Never sleeps: lowest latency, one processor per waiting thread.
    Spin,
    /// Sleeps at once.
    Sleep,
}

/// Where a device notes its connections, for the case that its process is killed.
#[doc(alias = "FormerLives")]
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum FormerConnections {
    /// In the folder `bowline` of `$XDG_RUNTIME_DIR` or, without that variable, of `/run`. It is
    /// made when it is not there. Where that fails, and in a folder of another user or one that
    /// others can write to, nothing is noted: a program that is killed and started again may have
    /// to wait until its peers have noticed.
    #[default]
    RunFolder,
    /// In this folder. Nobody else must be able to write there; several devices may share it.
    In(PathBuf),
    /// Nowhere.
    Nowhere,
}

impl FormerConnections {
    /// The folder, if there is one.
    pub(crate) fn folder(self) -> Option<PathBuf> {
        match self {
            Self::RunFolder => run_folder(),
            Self::In(folder) => Some(folder),
            Self::Nowhere => None,
        }
    }
}

fn run_folder() -> Option<PathBuf> {
    let given = std::env::var_os("XDG_RUNTIME_DIR").filter(|dir| !dir.is_empty());
    let folder = given.map_or_else(|| "/run".into(), PathBuf::from).join("bowline");
    fs::DirBuilder::new().recursive(true).mode(0o700).create(&folder).ok()?;
    let (found, own) = (fs::metadata(&folder).ok()?, fs::metadata("/proc/self").ok()?);
    (found.uid() == own.uid() && found.mode() & 0o022 == 0).then_some(folder)
}

/// Everything a device is made of.
#[derive(Clone, Debug)]
pub struct SoftConfig {
    /// Name, as tools show it.
    pub name: String,
    /// Addresses of this machine that are the device's GIDs; at least one.
    pub addrs: Vec<IpAddr>,
    /// Interfaces, by number, that link-local addresses among them are of: the scope that the same
    /// address can have on each of several. One that is not named here is looked up.
    pub links: Vec<(IpAddr, u32)>,
    /// Path MTU of the device's port; `None`: the largest that the interfaces of all addresses
    /// carry [HDR-8].
    pub mtu: Option<Mtu>,
    /// Node GUID; `None`: made of the machine's identity and the addresses, so the same each time.
    pub guid: Option<u64>,
    /// What to do about the ICRC of received packets [ICRC-33].
    pub icrc: IcrcPolicy,
    /// Send several packets at once [ICRC-22]; off for paths that do not count identifications up.
    pub gso: bool,
    /// How threads wait.
    pub poll: PollMode,
    /// How long [`PollMode::Adaptive`] looks before it sleeps.
    pub spin: Duration,
    /// Bytes of the sockets' buffers; the system may allow fewer.
    pub socket_buffer: usize,
    /// For measurements and tests of bad networks: one received packet in so many is thrown away,
    /// at random, before it is looked at.
    pub drop_one_in: Option<u32>,
    /// File that gets all packets, in pcapng form.
    pub capture: Option<PathBuf>,
    /// Where a file of each address tells the next device of it which connections stood when its
    /// process was killed. They are ended before anything else is done [CM-53], so that a peer is
    /// free at once instead of when it notices by itself: an RTRS session of the same name is
    /// refused until then, for seconds.
    #[doc(alias = "former_lives")]
    pub former_connections: FormerConnections,
    /// Limits, window and timers of the core. Its addresses, MTU, GUID, ICRC policy, bursts and
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
            spin: Duration::from_micros(25),
            socket_buffer: 8 << 20,
            drop_one_in: None,
            capture: None,
            former_connections: FormerConnections::default(),
            core: bowline_roce::Config::default(),
        }
    }
}
