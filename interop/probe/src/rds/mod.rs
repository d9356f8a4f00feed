//! RDS over TCP: what a node answers to a peer with the smaller address, and how it connects to one
//! with the larger address.

mod link;
mod rules;

use std::cell::RefCell;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::rc::Rc;
use std::time::{Duration, Instant};

use bowline_wire::rds::{Extension, Extensions, Header};

use crate::rule::{Finding, Other, Profile, deviates};
use crate::{Error, Options, Report, capture, rule};
use link::{Events, Link, Message, Silence, listener_at};

/// RDS ports that the probe sends from; answers come to them.
const FIRST_PORT: u16 = 41_000;
/// How long a connection stays that is in service, but on which the peer says nothing.
const GRACE: Duration = Duration::from_millis(300);
/// Between two attempts to connect.
const PAUSE: Duration = Duration::from_millis(20);
/// A port that no program should have bound.
const UNBOUND: u16 = 64_999;

/// What the rules are asked with.
struct Scene {
    peer: IpAddr,
    /// Local addresses below and above the peer's.
    below: Option<IpAddr>,
    above: Option<IpAddr>,
    given: Option<Profile>,
    patience: Duration,
    /// The connection that rules use until it ends.
    link: Option<Link>,
    listener: Option<TcpListener>,
    next: Rc<RefCell<u64>>,
    port: u16,
    events: Events,
    /// Every message of the peer.
    seen: Vec<Message>,
    /// The extensions of the peer's first probe.
    probe: Option<Header>,
}

/// Asks a node's RDS over TCP, from local addresses that no node has.
///
/// # Errors
/// [`Error`] when the node cannot be reached, or a capture not be written.
pub fn ask(peer: IpAddr, locals: &[IpAddr], options: &Options) -> Result<Report, Error> {
    let mut scene = Scene::new(peer, locals, options);
    scene.reach()?;
    let end = |scene: &mut Scene, finding: &Finding| {
        match (&options.capture, &finding.answer) {
            (Some(folder), Err(Other::Deviates(_))) => {
                let path = folder.join(format!("rds-{}.pcap", finding.id));
                // All from the beginning: what came may have been asked for by an earlier rule.
                capture::write(&path, &scene.events.borrow())
                    .map_err(|error| Error::Failed(format!("{}: {error}", path.display())))
            }
            _ => Ok(()),
        }
    };
    let findings = rule::ask(&rules::RULES, options, &mut scene, Scene::profile, end)?;
    Ok(Report { profile: scene.profile(), findings })
}

impl Scene {
    fn new(peer: IpAddr, locals: &[IpAddr], options: &Options) -> Self {
        let one = |below: bool| locals.iter().copied().find(|ip| (*ip < peer) == below);
        Self {
            peer,
            below: one(true),
            above: one(false),
            given: options.profile,
            patience: options.patience,
            link: None,
            listener: None,
            next: Rc::new(RefCell::new(1)),
            port: FIRST_PORT,
            events: Events::default(),
            seen: Vec::new(),
            probe: None,
        }
    }

    /// What is expected of the peer: as the command line says, or as it shows by its first probe.
    fn profile(&self) -> Profile {
        let shown = self.probe.map(|probe| {
            let has = |wanted: fn(&Extension) -> bool| {
                Extensions::new(&probe.ext).any(|extension| wanted(&extension))
            };
            if has(|extension| matches!(extension, Extension::Bowline(_))) {
                Profile::Bowline
            } else if has(|extension| matches!(extension, Extension::GenNum(_))) {
                Profile::Linux72
            } else {
                Profile::Linux612
            }
        });
        self.given.or(shown).unwrap_or(Profile::Linux612)
    }

    /// Sees whether anybody is there at all, before any rule is asked.
    fn reach(&mut self) -> Result<(), Error> {
        match self.open() {
            Ok(link) => {
                self.link = Some(link);
                Ok(())
            }
            Err(Other::Deviates(why) | Other::Skipped(why)) => {
                Err(Error::Failed(format!("{} cannot be asked: {why}", self.peer)))
            }
        }
    }

    fn until(&self) -> Instant {
        Instant::now() + self.patience
    }

    /// Makes a new connection on which the peer is asked. A peer that has not seen the end of the
    /// one before yet may end it at once.
    fn open(&mut self) -> Result<Link, Other> {
        self.link = None;
        let until = self.until();
        loop {
            let link = match (self.below, self.above) {
                (Some(from), _) => self.dial(from)?,
                (None, Some(at)) => Some(self.dialled(at)?),
                (None, None) => return Err(Other::Skipped("no local address".to_owned())),
            };
            if let Some(mut link) = link
                && link.begins(Instant::now() + GRACE)
            {
                return Ok(link);
            }
            if Instant::now() > until {
                return deviates("connections that the peer ends at once");
            }
            // The one before is on its way to its end.
            std::thread::sleep(PAUSE);
        }
    }

    /// Connects from a local address; `None`: the peer has ended the connection before this side
    /// knew that it was made.
    fn dial(&self, from: IpAddr) -> Result<Option<Link>, Other> {
        use std::io::ErrorKind::{BrokenPipe, ConnectionReset, NotConnected};
        let to = listener_at(self.peer);
        let link = Link::dial(SocketAddr::new(from, 0), to, self.patience)
            .and_then(|stream| self.link_of(stream, true));
        match link {
            Ok(link) => Ok(Some(link)),
            Err(error) if matches!(error.kind(), BrokenPipe | ConnectionReset | NotConnected) => {
                Ok(None)
            }
            Err(error) => deviates(format!("no connection from {from} to {to}: {error}")),
        }
    }

    fn link_of(&self, stream: TcpStream, by_us: bool) -> std::io::Result<Link> {
        let (next, events) = (Rc::clone(&self.next), Rc::clone(&self.events));
        Link::new(stream, by_us, self.patience, next, events)
    }

    /// Has the peer connect to a local address, by a knock.
    fn dialled(&mut self, at: IpAddr) -> Result<Link, Other> {
        if self.below.is_none() {
            // One path is agreed on: the peer makes no second connection beside the first.
            self.link = None;
        }
        if self.listener.is_none() {
            let listener = TcpListener::bind(listener_at(at))
                .and_then(|listener| listener.set_nonblocking(true).map(|()| listener));
            self.listener = Some(listener.map_err(|error| {
                Other::Skipped(format!("TCP port 16385 of {at} is not free: {error}"))
            })?);
        }
        let to = listener_at(self.peer);
        // The peer ends it at once, perhaps before this side knows that it is made.
        if let Err(error) = Link::dial(SocketAddr::new(at, 0), to, self.patience)
            && error.kind() == std::io::ErrorKind::ConnectionRefused
        {
            return deviates(format!("no connection from {at} to {to}: {error}"));
        }
        self.accept()
    }

    /// Takes the next connection of the peer.
    fn accept(&self) -> Result<Link, Other> {
        let until = self.until();
        let listener = self.listener.as_ref().ok_or(Other::Skipped("no listener".to_owned()))?;
        loop {
            match listener.accept() {
                Ok((stream, from)) if from.ip() == self.peer => {
                    return stream
                        .set_nonblocking(false)
                        .and_then(|()| self.link_of(stream, false))
                        .or_else(|error| deviates(format!("a connection that failed: {error}")));
                }
                // Somebody else's.
                Ok(_) => {}
                Err(_) if Instant::now() < until => std::thread::sleep(Duration::from_millis(1)),
                Err(_) => return deviates("no connection of the peer"),
            }
        }
    }

    /// The connection of the last rule, or a new one if that has ended.
    fn link(&mut self) -> Result<Link, Other> {
        match self.link.take().filter(|link| !link.has_ended()) {
            Some(link) => Ok(link),
            None => self.open(),
        }
    }

    /// The first message for which `wanted` holds; all are kept.
    fn find(
        &mut self,
        link: &mut Link,
        wanted: impl Fn(&Message) -> bool,
    ) -> Result<Message, Silence> {
        let until = self.until();
        loop {
            let message = link.next(until)?;
            if message.is_numbered_probe() && self.probe.is_none() {
                self.probe = Some(message.header);
            }
            self.seen.push(message.clone());
            if wanted(&message) {
                return Ok(message);
            }
        }
    }

    /// A port that was not used yet.
    fn fresh_port(&mut self) -> u16 {
        self.port += 1;
        self.port
    }

    /// Sends a ping, as `edit` has changed its header, and waits for its answer; the connection is
    /// kept.
    fn ping_with(
        &mut self,
        mut link: Link,
        edit: impl FnOnce(&mut [u8; 48]),
    ) -> Result<Message, Other> {
        let port = self.fresh_port();
        let mut bytes =
            Header { sequence: link.number(), sport: port, ..Header::default() }.to_bytes();
        edit(&mut bytes);
        link.send(&bytes);
        let found = self.find(&mut link, |message| message.is_pong(port));
        self.link = Some(link);
        found.or_else(|silence| deviates(format!("{} instead of a pong", silence.text())))
    }

    /// Checks that a connection still serves: a ping is answered.
    fn serves(&mut self, link: Link) -> Result<String, Other> {
        self.ping_with(link, |_| {}).map(|pong| format!("pong {}", pong.header.sequence))
    }
}
