//! What a node is to be and to do, after its configuration was read and checked.

use std::{os::unix::net::UnixListener, path::PathBuf, sync::Arc, time::Duration};

use bowline::rds::{Limits, Node, Paths, PeerList};
use bowline_host::{HostState, Policy, Quota};
use bowline_roce_driver::Impairments;
use bowline_verbs::{Device, SharedDevice};

use super::{
    hand_over::{self, InheritedState, SavedNode, StateSource},
    sandbox,
    services::ECHO_MESSAGES,
};
use crate::{
    Failure, Outcome,
    config::{Config, Poll, access},
    disks, impair, metrics, node_on,
    over_rdma::{Devices, SoftPort},
    service_manager::Supervisor,
    values::{Address, Size},
};

/// Smallest memory limit for what peers send, in bytes: room for a few messages of the largest
/// size.
const MEMORY_MIN: usize = 16 << 20;
const DRAIN_DEFAULT: f64 = 5.0;

/// Settings of a node.
#[derive(Debug)]
pub(super) struct Settings {
    pub(super) addresses: Vec<Address>,
    pub(super) rdma: Devices,
    pub(super) paths: Option<u8>,
    pub(super) send_buffer: Option<u64>,
    pub(super) recv_buffer: Option<u64>,
    pub(super) max_message: Option<u32>,
    pub(super) poll: Option<Poll>,
    pub(super) congestion_control: Option<String>,
    /// A network that is bad by choice, for RDMA of the node and of programs.
    pub(super) impairments: Impairments,
    pub(super) end_to_end: bool,
    pub(super) sysctl: Vec<(String, i64)>,
    pub(super) echo: Vec<u16>,
    pub(super) sink: Vec<u16>,
    /// There is a control socket, at this path or at the default one.
    pub(super) control: Option<Option<PathBuf>>,
    /// Programs are served at this path, or at the default one.
    pub(super) programs: Option<Option<PathBuf>>,
    /// The node ends when no program is left.
    pub(super) until_unused: bool,
    pub(super) peers: PeerList,
    pub(super) policy: Policy,
    /// Limits and buffers of the node.
    pub(super) limits: Limits,
    pub(super) default_quota: Quota,
    pub(super) tree: Option<PathBuf>,
    pub(super) metrics: metrics::Settings,
    pub(super) drain: Duration,
    /// Whether the node gives up what it does not need.
    pub(super) sandbox: bool,
    pub(super) disks: disks::Settings,
}

impl Settings {
    /// Checks a configuration, and opens the devices of rdma-core that it names.
    pub(super) fn new(config: Config) -> Outcome<Self> {
        let size = |size: Option<Size>| size.map(|size| size.0);
        let mut addresses = config.address;
        let mut seen = Vec::new();
        addresses.retain(|address| {
            let new = !seen.contains(address);
            seen.push(*address);
            new
        });
        let rdma = Devices::new(config.rdma, &mut addresses)?;
        let twice = |a: &Address| addresses.iter().find(|b| a.ip == b.ip && a.link != b.link);
        if let Some((one, other)) = addresses.iter().find_map(|a| Some((a, twice(a)?))) {
            return Err(Failure::usage(format!(
                "{one} and {other} are one address on two links: start one node for each link"
            )));
        }
        let paths = config.paths;
        if paths.is_some_and(|paths| paths != 1 && paths != 8) {
            return Err(Failure::usage("paths must be 8 or 1"));
        }
        let max_message = match size(config.max_message).map(u32::try_from) {
            None => None,
            Some(Ok(bytes)) if bytes > 0 => Some(bytes),
            Some(_) => return Err(Failure::usage("the longest message must be 1 byte to 4 GiB")),
        };
        let memory = match size(config.memory).map(usize::try_from) {
            None => None,
            Some(Ok(bytes)) if bytes >= MEMORY_MIN => Some(bytes),
            Some(_) => return Err(Failure::usage("the memory must be 16 MiB or more")),
        };
        let drain = config.drain.unwrap_or(DRAIN_DEFAULT);
        if !(0.0..=86_400.0).contains(&drain) {
            return Err(Failure::usage("the drain time must be 0 to 86400 seconds"));
        }
        if addresses.is_empty() && !(config.echo.is_empty() && config.sink.is_empty()) {
            return Err(Failure::usage("echo and sink need an address: give the node --address"));
        }
        let peers = access::peers(&config.allow_peer, &config.deny_peer);
        let (send_buffer, recv_buffer) = (size(config.send_buffer), size(config.recv_buffer));
        let mut limits = memory.map_or_else(Limits::default, Limits::with_memory);
        if !config.echo.is_empty() {
            limits.send_messages_per_socket = ECHO_MESSAGES;
        }
        let quota = default_quota(&limits, send_buffer, recv_buffer);
        let policy = config.access.policy(quota)?;
        Ok(Self {
            paths,
            send_buffer,
            recv_buffer,
            max_message,
            peers,
            policy,
            limits,
            default_quota: quota,
            poll: config.poll,
            congestion_control: config.congestion_control,
            impairments: impair::chosen(&config.impair, config.impair_seed)?.unwrap_or_default(),
            end_to_end: config.end_to_end.unwrap_or(true),
            sysctl: config.sysctl.into_iter().chain(config.sysctl_after).collect(),
            echo: config.echo,
            sink: config.sink,
            control: (!config.no_control).then_some(config.control),
            programs: (!config.no_programs).then_some(config.programs),
            until_unused: config.until_unused,
            tree: config.tree,
            metrics: metrics::Settings::of(config.metrics, &config.metrics_host)?,
            drain: Duration::from_secs_f64(drain),
            sandbox: config.sandbox.unwrap_or(true),
            disks: config.disks.map_or_else(disks::Settings::none, Ok)?,
            addresses,
            rdma,
        })
    }

    /// Starts the node, with what was handed over to it.
    fn build(&self, former: Option<SavedNode<'_>>) -> Outcome<Built> {
        let mut builder = Node::builder().end_to_end(self.end_to_end);
        if let Some(paths) = self.paths {
            builder = builder.paths(Paths::try_from(paths)?);
        }
        // Those of programs stay as a kernel's, whatever the longest message is.
        let defaults = bowline_rds::Config::default();
        let bytes = |asked: Option<u64>, default| asked.map_or(default, |bytes| bytes as usize);
        builder = builder
            .default_send_buffer(bytes(self.send_buffer, defaults.send_buffer))
            .default_recv_buffer(bytes(self.recv_buffer, defaults.recv_buffer));
        if let Some(bytes) = self.max_message {
            builder = builder.max_message_bytes(bytes);
        }
        builder = builder.limits(self.limits.clone()).peers(self.peers.clone());
        if let Some(poll) = self.poll {
            builder = builder.poll(poll.into());
        }
        if self.congestion_control.is_some() {
            builder = builder.congestion_control(self.congestion_control.clone());
        }
        // Before anything else is given up for this node.
        let mut trial = bowline_rds::Node::new(bowline_rds::Config::default());
        for (name, value) in &self.sysctl {
            trial.set_sysctl(bowline_rds::Instant::default(), name, *value).map_err(|error| {
                Failure::usage(format!("cannot set {name} to {value}: {error}"))
            })?;
        }
        // A former node has closed its device by now.
        let may_have_disks = !sandbox::is_wanted(self);
        let soft = self.rdma.open_soft(|config| {
            config.impairments = self.impairments.clone();
            if may_have_disks {
                self.disks.configure(config);
            }
        })?;
        let port = SoftPort::of(soft.as_ref());
        let soft = soft.map(|device| device as Arc<dyn Device>);
        let (of_rds, of_disks) = match soft {
            Some(device) if may_have_disks => {
                let [rds, disks] = SharedDevice::split(device);
                (Some(Arc::new(rds) as Arc<dyn Device>), Some(Arc::new(disks) as Arc<dyn Device>))
            }
            soft => (soft, None),
        };
        let builder = self.rdma.add_to(builder, of_rds);
        let node = node_on(builder, &self.addresses, |builder| match former {
            Some(SavedNode { state, listeners, commit }) => {
                builder.resume(state, listeners, commit)
            }
            None => builder.build(),
        })?;
        for (name, value) in &self.sysctl {
            node.set_sysctl(name, *value)?;
        }
        Ok(Built { node, port, of_disks })
    }

    /// Starts the node, with what was taken over. What a manager has kept may be of no use: then
    /// programs have lost their sockets.
    pub(super) fn begin(
        &self,
        inherited: Option<InheritedState>,
        supervisor: &Supervisor,
    ) -> Outcome<Started> {
        let Some(InheritedState { host, listeners, state, source }) =
            inherited.filter(|_| self.programs.is_some())
        else {
            return Ok(Started::Fresh(self.build(None)?));
        };
        if matches!(source, StateSource::Lost) {
            // The listeners of the next one, which has ended, are free.
            drop((listeners, state));
            return Ok(Started::WithListener(host.listener().ok(), self.build(None)?));
        }
        let is_stored = matches!(source, StateSource::FdStore);
        let commit = Box::new(|| source.commit(supervisor));
        let former = SavedNode { state, listeners, commit };
        match self.build(Some(former)) {
            Err(failure) if is_stored => {
                note!("bowline node: programs have lost their sockets: {failure}");
                hand_over::forget(supervisor);
                Ok(Started::WithListener(host.listener().ok(), self.build(None)?))
            }
            node => Ok(Started::Resumed(host, node?)),
        }
    }
}

/// How a node begins.
pub(super) enum Started {
    /// With nothing of another.
    Fresh(Built),
    /// In another's place, with its programs.
    Resumed(HostState, Built),
    /// With no more than the socket at which another served programs.
    WithListener(Option<UnixListener>, Built),
}

/// A node that was started.
pub(super) struct Built {
    pub(super) node: Node,
    pub(super) port: SoftPort,
    /// The share of disks in the soft RDMA device.
    pub(super) of_disks: Option<Arc<dyn Device>>,
}

/// What a user may have of a node with these limits.
fn default_quota(limits: &Limits, send_buffer: Option<u64>, recv_buffer: Option<u64>) -> Quota {
    let mut config = bowline_rds::Config { limits: limits.clone(), ..Default::default() };
    config.send_buffer = send_buffer.map_or(config.send_buffer, |bytes| bytes as usize);
    config.recv_buffer = recv_buffer.map_or(config.recv_buffer, |bytes| bytes as usize);
    Quota::default_for(&config)
}
