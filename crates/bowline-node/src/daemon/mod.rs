//! The daemon: a node that serves peers, programs and disks until it is told to stop.
//!
//! ```text
//! Config -> Settings -> start: devices, node, services, control, programs, metrics
//!                       run:   disks; watch until a signal, or until another node asks for all
//!                       stop:  drain             hand over: to that node, or the service manager
//! ```

mod hand_over;
mod sandbox;
mod services;
mod settings;
mod watch;

use std::{
    fmt,
    os::unix::net::UnixListener,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use bowline::rds::Node;
use bowline_ctl::{Server, fusefs::Mount, passed};
use bowline_host::HostState;
use bowline_wire::rds::TCP_PORT;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use self::{
    hand_over::{InheritedState, Successor},
    sandbox::Places,
    services::{Running, Service},
    settings::{Built, Settings, Started},
    watch::{Watched, watch},
};
use crate::{
    Failure, Outcome,
    config::Config,
    confine::Confinement,
    control::{self, snapshot::NodeFacts, tree::tree},
    disks::HostDisks,
    impair,
    log::Duty,
    metrics,
    mount::mounted,
    over_rdma::SoftPort,
    programs::{self, Programs},
    service_manager::Supervisor,
    signals::{Stop, hangups},
    tentative,
};

/// A node that serves, and what it has from its start to its end.
pub struct Daemon {
    process: Process,
    places: Places,
    serving: Serving,
    /// At the end, programs' sockets are left with the service manager.
    keep_programs: bool,
}

impl fmt::Debug for Daemon {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Daemon").finish_non_exhaustive()
    }
}

/// What stays as it is while nodes of this process come and go.
struct Process {
    settings: Settings,
    confinement: Confinement,
    supervisor: Supervisor,
    stop: Stop,
    hangups: Arc<AtomicBool>,
    /// The listener for programs is a service manager's.
    is_managers: bool,
}

/// A node that was started, and all that serves with it.
struct Serving {
    node: Node,
    port: SoftPort,
    disks: Arc<HostDisks>,
    services: Vec<Running>,
    /// Set when the services are to end.
    over: Arc<AtomicBool>,
    control: Option<Server>,
    disk_control: Option<Server>,
    files: Option<Mount>,
    programs: Option<Programs>,
    metrics: Option<metrics::Server>,
}

/// Lets the node have as many descriptors as it may: each program and each socket takes some.
fn raise_descriptors() {
    let limit = getrlimit(Resource::Nofile);
    // Where it fails, there are fewer.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
}

impl Daemon {
    /// Starts a node: it serves peers and programs, and takes over what another one hands to it. It
    /// confines this process, and takes its signals; a process has one, which it starts before
    /// other threads.
    ///
    /// # Errors
    ///
    /// What of the configuration cannot be had, and what to do.
    pub fn start(config: Config) -> Outcome<Self> {
        // First, before anything else could get its number.
        let passed = passed(&hand_over::STORED).map_err(|error| {
            Failure::failed(format!(
                "cannot use the socket that the service manager passed: {error}"
            ))
        })?;
        raise_descriptors();
        if config.until_unused {
            // So that no signal of the terminal ends the node before its programs. Where this
            // process leads a group, it has left that of the terminal already.
            let _ = rustix::process::setsid();
        }
        let (replace, keep_programs) = (config.replace, config.keep_programs);
        let mut settings = Settings::new(config)?;
        let supervisor = Supervisor::of_this_process();
        // Before a former node waits for this one, and before sockets of devices are made.
        tentative::wait(&settings.addresses);
        let mut inherited = hand_over::stored(passed.stored);
        if inherited.is_none() && replace && settings.programs.is_some() {
            let place = settings.programs.as_ref().and_then(Option::as_deref);
            inherited = hand_over::receive(place)?;
        }
        let listener = passed.listener;
        let is_managers = listener.is_some();
        let mut places = Places::listen(&settings, is_managers, inherited.as_mut())?;
        settings.rdma.make_sockets();
        let confinement = sandbox::enter(&settings);
        let stop = Stop::install_with(Duty::Service { json: false })?;
        let hangups = hangups()?;
        let process = Process { settings, confinement, supervisor, stop, hangups, is_managers };
        inherited.iter().for_each(InheritedState::announce);
        let keep_programs = keep_programs && process.supervisor.is_there();
        let predecessor = inherited.as_ref().and_then(InheritedState::predecessor);
        let serving = process.serve(&mut places, listener, inherited).inspect_err(|_| {
            // The former node resumes with these files.
            if predecessor.is_some() {
                places.leave();
            }
        })?;
        if let Some(predecessor) = predecessor {
            predecessor.release();
        }
        Ok(Self { process, places, serving, keep_programs })
    }

    /// Maps and exports the disks of the configuration, and serves until a signal asks for the end,
    /// or until everything is handed over; then ends.
    ///
    /// # Errors
    ///
    /// Why the disks cannot be had, what could not be handed over, or that peers do not have
    /// everything.
    pub fn run(mut self) -> Outcome {
        loop {
            let Process { supervisor, stop, hangups, .. } = &self.process;
            let started = self.serving.disks.start(stop);
            let mut successor = None;
            if started.is_ok() {
                say!(
                    "ready; ask with `bowline ping` and `bowline info`, stop with SIGINT or SIGTERM"
                );
                let leases = self.places.leases.as_mut();
                successor = watch(&self.serving.watched(), leases, stop, hangups, supervisor)
                    .map(Successor::Node);
                if self.keep_programs && successor.is_none() {
                    successor = Some(Successor::Manager);
                }
            }
            let programs = successor.as_ref().and_then(|_| self.serving.programs.take());
            let (Some(successor), Some(programs)) = (successor, programs) else {
                let stopped = self.stop();
                return started.and(stopped);
            };
            // A hand-over that fails leaves everything here, and the node goes on.
            match self.hand_over(successor, programs)? {
                Some(daemon) => self = daemon,
                None => return Ok(()),
            }
        }
    }

    /// Ends the node, after what peers do not have yet was sent, for a limited time.
    ///
    /// # Errors
    ///
    /// That they do not have everything, or that something of mapped disks was not served.
    pub fn stop(self) -> Outcome {
        let Self { process: Process { settings, supervisor, stop, .. }, serving, .. } = self;
        let patience = settings.drain.as_secs_f64();
        let last = format!("stopping: waiting up to {patience} s for acknowledgements of peers");
        supervisor.stopping(settings.drain + serving.disks.patience(), &last);
        say!("{last}");
        let Serving { node, disks, services, over, programs, .. } = serving;
        over.store(true, Ordering::Relaxed);
        drop(programs);
        let unserved = disks.close(&stop);
        let drained = node.shutdown(settings.drain);
        services.into_iter().for_each(Running::join);
        if drained {
            say!("stopped; peers have acknowledged everything");
            return unserved.outcome();
        }
        Err(Failure::failed(format!(
            "stopped after {patience} s before peers had acknowledged everything; allow more time with --drain"
        )))
    }

    /// Ends the node and sends its state to a successor. If that one does not accept it, another
    /// node of this process resumes.
    fn hand_over(self, successor: Successor, programs: Programs) -> Outcome<Option<Self>> {
        let Self { process, mut places, serving, .. } = self;
        let Process { settings, supervisor, stop, .. } = &process;
        let Serving {
            node,
            port,
            disks,
            services,
            over,
            control,
            disk_control,
            files,
            metrics,
            ..
        } = serving;
        if matches!(successor, Successor::Manager) {
            // Perhaps nobody goes on.
            supervisor.stopping(settings.drain + disks.patience(), "draining");
            node.driver().drain(settings.drain);
        }
        over.store(true, Ordering::Relaxed);
        services.into_iter().for_each(|service| service.close(&node));
        // The next process maps the disks of its file.
        drop((control, disk_control, files, metrics));
        // What was not served is printed; the exit status is that of the hand-over.
        disks.close(stop);
        drop(disks);
        let left = hand_over::send(node, port, programs, &mut places, successor, supervisor)?;
        let Some(left) = left else { return Ok(None) };
        let inherited = hand_over::reclaimed(left)?;
        let serving = process.serve(&mut places, None, Some(inherited))?;
        Ok(Some(Self { process, places, serving, keep_programs: false }))
    }
}

impl Process {
    /// Starts a node, in another's place if there is one, and all that serves with it.
    fn serve(
        &self,
        places: &mut Places,
        mut listener: Option<UnixListener>,
        inherited: Option<InheritedState>,
    ) -> Outcome<Serving> {
        let settings = &self.settings;
        let disks = {
            let is_confined = sandbox::is_wanted(settings);
            let in_use = settings.rdma.soft();
            HostDisks::new(settings.disks.clone(), &settings.addresses, in_use, is_confined)?
        };
        let (former, Built { node, port, of_disks }) =
            match settings.begin(inherited, &self.supervisor)? {
                Started::Fresh(built) => (None, built),
                Started::Resumed(host, built) => (Some(host), built),
                Started::WithListener(lost, built) => {
                    listener = listener.or(lost);
                    (None, built)
                }
            };
        of_disks.into_iter().for_each(|device| disks.share(device));
        let over = Arc::new(AtomicBool::new(false));
        let services = services(settings, &node, &over)?;
        let facts = NodeFacts {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: std::process::id(),
            addresses: settings.addresses.clone(),
        };
        let tree = tree(node.clone(), facts, &disks);
        let control = places.control.as_ref().map(|place| control::serve(place, tree.clone()));
        let control = control.transpose()?;
        let disk_control = places.disks.as_ref().and_then(|place| disks.control(place));
        let files = settings.tree.as_deref().map(|dir| mounted(&tree, dir)).transpose()?;
        let shown = Arc::clone(&disks);
        let metrics = metrics::node(node.clone(), move |out| shown.metrics(out));
        let metrics = settings.metrics.serve(metrics)?;
        // Last: where something fails, a former node resumes with its socket.
        let place = places.programs.take();
        let programs = self.programs(&node, former, listener, place)?;
        if !settings.impairments.is_empty() {
            note!("{}", impair::line(&settings.impairments));
        }
        if let Some(place) = places.verbs.take() {
            let path = place.path().to_owned();
            match place.serve() {
                Ok(()) => say!("RDMA for programs of `bowline run` at {}", path.display()),
                Err(error) => note!("programs get no RDMA: {error}"),
            }
        }
        let serving = Serving {
            node,
            port,
            disks,
            services,
            over,
            control,
            disk_control,
            files,
            programs,
            metrics,
        };
        serving.announce(settings);
        sandbox::announce(&self.confinement);
        Ok(serving)
    }

    /// Serves programs: those of a former node, at the socket of a manager, or at an own place.
    fn programs(
        &self,
        node: &Node,
        former: Option<HostState>,
        listener: Option<UnixListener>,
        place: Option<programs::Place>,
    ) -> Outcome<Option<Programs>> {
        if self.settings.programs.is_none() {
            return Ok(None);
        }
        let (policy, quota) = (self.settings.policy.clone(), self.settings.default_quota);
        let programs = match (former, listener, place) {
            (Some(former), listener, _) => {
                Programs::resume(node, listener, self.is_managers, former, policy, quota)?
            }
            (None, Some(listener), _) => Programs::start_passed(node, listener, policy, quota)?,
            (None, None, Some(place)) => Programs::start(node, place, policy, quota)?,
            (None, None, None) => return Ok(None),
        };
        Ok(Some(programs))
    }
}

/// Starts the services that the settings name, at each address.
fn services(settings: &Settings, node: &Node, over: &Arc<AtomicBool>) -> Outcome<Vec<Running>> {
    let mut services = Vec::new();
    for (ports, service) in [(&settings.echo, Service::Echo), (&settings.sink, Service::Sink)] {
        for port in ports {
            for address in &settings.addresses {
                let (place, send_buffer) = (address.at(*port), settings.send_buffer);
                services.push(Running::start(node, place, service, send_buffer, over)?);
            }
        }
    }
    Ok(services)
}

impl Serving {
    /// Returns what is watched while the node runs.
    fn watched(&self) -> Watched<'_> {
        Watched {
            node: &self.node,
            services: &self.services,
            programs: self.programs.as_ref(),
            disks: &self.disks,
        }
    }

    /// Tells what is served, and where.
    fn announce(&self, settings: &Settings) {
        let port = TCP_PORT;
        if settings.addresses.is_empty() {
            say!("node on every local address, RDS over TCP, port {port}");
            if settings.peers.allow.is_empty() {
                note!(
                    "bowline node: every host that reaches this machine may connect, at every \
                     address: --address or --allow-peer restrict that"
                );
            }
        }
        for address in &settings.addresses {
            let also = if settings.rdma.covers(*address) { "RDMA and " } else { "" };
            say!("node on {address}, RDS over {also}TCP, port {port}");
        }
        for Running { place, service, .. } in &self.services {
            say!("{} on {place}", service.name());
        }
        if let Some(server) = &self.control {
            say!("control socket {}", server.path().display());
        }
        if let Some(files) = &self.files {
            say!("control tree {}", files.dir().display());
        }
        match &self.programs {
            Some(programs) => {
                say!("programs of `bowline run` are served at {}", programs.path().display());
            }
            None if settings.programs.is_some() => {
                let place = programs::default_path();
                say!(
                    "programs of `bowline run` are served by another node, at {}",
                    place.display()
                );
            }
            None => {}
        }
    }
}
