//! Options of the commands for disks, from which the structs of `bowline_node::disks` are made.

use std::{path::PathBuf, time::Duration};

use bowline_node::{
    Outcome,
    disks::{
        DeviceConfig, FrontEndConfig, MapConfig, Route, RouteConfig, ServingConfig,
        values::{access, allowed, block, outage, policy, read_keys},
    },
    values::{mtu, number, number32, some_time},
};
use bowline_rnbd::client::Outage;
use bowline_rtrs_driver::{PORT, Policy, client::ReadKeys, server::AllowRule};
use bowline_verbs::Mtu;
use bowline_wire::rnbd::Access;

use crate::cli::common::known::{MTUS, known};

/// The device that needs no hardware.
const SOFT: &str = "soft";

/// Device options that client and server share.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct DeviceArgs {
    /// The device: soft is RoCE in this process; any other name is one of rdma-core, such as rxe0;
    /// repeat it for several of these
    #[arg(long = "device", value_name = "NAME", default_value = SOFT)]
    providers: Vec<String>,
    /// Port of the server
    #[arg(short, long, value_name = "PORT", default_value_t = PORT, value_parser = clap::value_parser!(u16).range(1..))]
    port: u16,
    /// Time without an answer after which a path is dead (soft device); the last paths of a
    /// kernel's client have half a minute
    #[arg(long, value_name = "TIME", default_value = "3", value_parser = some_time)]
    path_dead: Duration,
    /// Largest path MTU: 256, 512, 1024, 2048 or 4096; without it, that of the interface
    #[arg(short, long, value_name = "BYTES", hide_possible_values = true, value_parser = known(MTUS, mtu))]
    mtu: Option<Mtu>,
    /// Poll for packets and completions without sleeping
    #[arg(long)]
    poll: bool,
    /// Write all packets into a file, pcapng
    #[arg(long, value_name = "FILE")]
    capture: Option<PathBuf>,
}

impl From<&DeviceArgs> for DeviceConfig {
    fn from(args: &DeviceArgs) -> Self {
        Self {
            device: args.providers.clone(),
            port: args.port,
            path_dead: args.path_dead,
            mtu: args.mtu,
            poll: args.poll,
            capture: args.capture.clone(),
        }
    }
}

/// Options of a client's session and its paths.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct RouteArgs {
    /// The server: a host name or address, or with --path the name of the session. Without --path
    /// the session is called HOST_ADDRESS@SERVER, of this machine and its source address
    #[arg(long, value_name = "SERVER")]
    from: Option<String>,
    /// A path: DESTINATION or SOURCE@DESTINATION, link-local ones with their interface, as
    /// fe80::1%eth0; repeat it for more, or leave it out to use the route to the server
    #[arg(long, value_name = "PATH", requires = "from")]
    path: Vec<String>,
}

impl From<&RouteArgs> for RouteConfig {
    fn from(args: &RouteArgs) -> Self {
        Self { from: args.from.clone(), path: args.path.clone() }
    }
}

impl RouteArgs {
    /// Determines the addresses and the name of the session, with further local addresses.
    pub(super) fn route(&self, further: &Further) -> Outcome<Route> {
        let mut route = RouteConfig::from(self).route()?;
        route.add_own(&further.address)?;
        Ok(route)
    }
}

/// The option of a client that has a device of its own.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct Further {
    /// A further local address, for paths that are added later
    #[arg(short = 'I', long = "address", value_name = "ADDRESS")]
    address: Vec<String>,
}

/// Options of mapping a disk.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct MapArgs {
    /// Access mode: ro, rw or migration
    #[arg(long, value_name = "MODE", default_value = "rw", hide_possible_values = true,
          value_parser = known(&["ro", "rw", "migration"], access))]
    access: Access,
    /// What happens to requests while no path is connected: they fail, or wait up to TIME; a forced
    /// unmap and the end of the process end the wait. If the server's machine (not just its
    /// process) goes down during that time, data written and not flushed is lost silently
    #[arg(long, value_name = "fail|TIME", default_value = "30", hide_possible_values = true,
          value_parser = known(&["fail"], outage))]
    outage: Outage,
    /// Time limit of a request; an unmap waits at most twice as long for a server that does not
    /// answer. Without it, no limit. Costs a copy of all data
    #[arg(long, value_name = "TIME", value_parser = some_time)]
    timeout: Option<Duration>,
    /// How a path is chosen: round-robin, min-inflight or min-latency
    #[arg(long, value_name = "POLICY", default_value = "min-inflight", hide_possible_values = true,
          value_parser = known(&["round-robin", "min-inflight", "min-latency"], policy))]
    policy: Policy,
    /// Longest wait for each step of connecting
    #[arg(long, value_name = "TIME", default_value = "30", value_parser = some_time)]
    connect_timeout: Duration,
    /// Attempts to reconnect a lost path, -1 for no limit; can be changed later, as
    /// max_reconnect_attempts
    #[arg(long, value_name = "N", default_value_t = -1, allow_negative_numbers = true,
          value_parser = clap::value_parser!(i16).range(-1..=9999))]
    max_reconnects: i16,
    /// Fixed delay before each of these attempts, as in kernels. Without it, no delay at first,
    /// then 1, 2, 4 .. 30 s, each up to a quarter more or less, and at most about 8 s while no path
    /// is connected
    #[arg(long, value_name = "TIME", value_parser = some_time)]
    reconnect_delay: Option<Duration>,
    /// Time between heartbeats to the server; the path ends after five missed ones. Linux servers
    /// need at least a second
    #[arg(long, value_name = "TIME", default_value = "5", value_parser = some_time)]
    heartbeat: Duration,
    /// Memory that the server can write to: request: only the buffers of reads in flight, each with
    /// its own key; memory: all memory for requests, with one key, which is faster
    #[arg(long, value_name = "request|memory", default_value = "memory", hide_possible_values = true,
          value_parser = known(&["request", "memory"], read_keys))]
    read_keys: ReadKeys,
    /// IO connections of each path; without it, as many as suit the device
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(..4096))]
    connections: Option<u16>,
    /// Do not send requests to write zeroes, which kernels before 5.18 do not know
    #[arg(long)]
    no_write_zeroes: bool,
    /// Send requests to write zeroes without deallocating, instead of data: for bowline servers and
    /// kernels of protocol 2.2; others would deallocate the blocks
    #[arg(long)]
    nounmap: bool,
}

impl From<&MapArgs> for MapConfig {
    fn from(args: &MapArgs) -> Self {
        Self {
            access: args.access,
            outage: args.outage,
            timeout: args.timeout,
            policy: args.policy,
            connect_timeout: args.connect_timeout,
            max_reconnects: args.max_reconnects,
            reconnect_delay: args.reconnect_delay,
            heartbeat: args.heartbeat,
            read_keys: args.read_keys,
            connections: args.connections,
            no_write_zeroes: args.no_write_zeroes,
            nounmap: args.nounmap,
        }
    }
}

/// Options that select the front ends of disks.
#[derive(Clone, Debug, Default, clap::Args)]
pub(super) struct FrontEndArgs {
    /// Serve the disk at this unix socket, with the NBD protocol; the path stays reserved for this
    /// disk, should it be unmapped and mapped again: any other disk that is mapped later gets one
    /// with its local name appended (SOCKET.rnbd1)
    #[arg(long, value_name = "SOCKET")]
    nbd: Option<PathBuf>,
    /// Show the disk as a file in this folder, under its local name (rnbd0); needs FUSE; other
    /// disks as with --nbd (FOLDER.rnbd1/rnbd1). A killed program stays until its request has
    /// ended, which may wait for a lost server as long as --outage says
    #[arg(long, value_name = "FOLDER")]
    fuse: Option<PathBuf>,
    /// Make the disk a block device of this machine, /dev/ublkbN, with the size that it has when it
    /// is mapped; needs Linux 6.4 with ublk_drv, and root. An unmap without force is refused while
    /// it or a partition is mounted or claimed otherwise; a program that merely has it open is not
    /// noticed. When this process is killed the device stays and its users wait, until the disk is
    /// mapped with --ublk again, from the same server or session
    #[arg(long)]
    ublk: bool,
    /// Give the disk to a virtual machine: serve it at this unix socket as a vhost-user-blk device,
    /// for QEMU with -chardev socket,id=c,path=SOCKET,reconnect=1 -device
    /// vhost-user-blk-pci,chardev=c and memory that is shared (-object
    /// memory-backend-memfd,share=on and -machine memory-backend); other disks as with --nbd
    #[arg(long, value_name = "SOCKET")]
    vhost_user: Option<PathBuf>,
}

impl From<&FrontEndArgs> for FrontEndConfig {
    fn from(args: &FrontEndArgs) -> Self {
        Self {
            nbd: args.nbd.clone(),
            fuse: args.fuse.clone(),
            ublk: args.ublk,
            vhost_user: args.vhost_user.clone(),
        }
    }
}

/// Options of the storage behind an export.
#[derive(Clone, Copy, Debug, clap::Args)]
pub(super) struct StorageArgs {
    /// No client may write
    #[arg(long)]
    pub(super) ro: bool,
    /// Go through the page cache of files
    #[arg(long)]
    pub(super) buffered: bool,
    /// Logical block size of exports
    #[arg(long, value_name = "BYTES", default_value = "512", value_parser = block)]
    pub(super) block: u32,
}

/// Options of a server, which all its exports share.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct ServingArgs {
    /// Do not invalidate memory keys while a request is executed: faster, for trusted clients
    #[arg(long)]
    no_invalidate: bool,
    /// Queue depth of a session
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = clap::value_parser!(u16).range(1..))]
    queue_depth: u16,
    /// Largest request in bytes, including its message
    #[arg(long, value_name = "BYTES", default_value = "128k", value_parser = number32)]
    chunk: u32,
    /// Memory for the requests of all sessions together. A session reserves its queue depth times
    /// its largest request, 64 MiB by default, which is allocated as it is used; a session that
    /// does not fit is refused
    #[arg(long, value_name = "BYTES", default_value = "1GiB", value_parser = number)]
    session_memory: u64,
    /// Accept these clients only: an address or a network, with a pattern of session names; may be
    /// repeated. Without it, all clients
    #[arg(long, value_name = "ADDRESS[/BITS][=SESSION]", value_parser = allowed)]
    allow: Vec<AllowRule>,
}

impl From<&ServingArgs> for ServingConfig {
    fn from(args: &ServingArgs) -> Self {
        Self {
            no_invalidate: args.no_invalidate,
            queue_depth: args.queue_depth,
            chunk: args.chunk,
            session_memory: args.session_memory,
            allow: args.allow.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fmt::Debug;

    use clap::{Args, Command};

    use super::*;

    /// Returns what is made of options of which none is given.
    fn made<A: Args, C: for<'a> From<&'a A>>() -> C {
        let matches = A::augment_args(Command::new("none")).get_matches_from(["none"]);
        C::from(&A::from_arg_matches(&matches).expect("defaults"))
    }

    fn is_default<A: Args, C: for<'a> From<&'a A> + Debug + Default>() {
        assert_eq!(format!("{:?}", made::<A, C>()), format!("{:?}", C::default()));
    }

    #[test]
    fn defaults_are_those_of_the_configuration() {
        is_default::<DeviceArgs, DeviceConfig>();
        is_default::<RouteArgs, RouteConfig>();
        is_default::<MapArgs, MapConfig>();
        is_default::<FrontEndArgs, FrontEndConfig>();
        is_default::<ServingArgs, ServingConfig>();
    }
}
