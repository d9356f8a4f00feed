//! The objects on this machine: the trees of all processes that answer, or of files, as rows of
//! fields.

use std::{
    fs, io,
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use bowline_ctl::{Client, Errno, Json, Op, Refused, folders};
use bowline_node::{
    control::{looked_in, none_here},
    log::utc,
    namespaces::Whose,
};

use super::{
    Refusal,
    columns::{Mode, Target},
    format::{Cell, Item},
    sysfs,
};

/// How long a process may take to accept a connection, and to answer a read. Commands may take any
/// time.
const PROBE_TIMEOUT: Duration = Duration::from_secs(2);

/// Which sockets or trees the tools use.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) enum Place<'a> {
    /// The sockets of this user's processes in this network namespace; without any, the kernel's
    /// tree.
    #[default]
    Here,
    /// This socket.
    Socket(&'a Path),
    /// These trees of files.
    Files(&'a [PathBuf]),
}

/// A process that answers, or a tree of files.
#[derive(Debug)]
struct Source {
    place: PathBuf,
    transport: Transport,
    tree: Json,
}

/// Means by which a source is read and written.
#[derive(Debug)]
enum Transport {
    Socket(Client),
    Files,
}

/// A device, a session or a path, and its location.
#[derive(Clone, Debug)]
pub(super) struct Row {
    pub(super) mode: Mode,
    pub(super) item: Item,
    /// Index of the source that has it.
    pub(super) source: usize,
    /// Its directory in that source.
    pub(super) at: String,
}

/// All sources that answer.
#[derive(Debug, Default)]
pub(super) struct Inventory {
    sources: Vec<Source>,
    /// Sockets of processes that run and do not answer.
    unresponsive: Vec<PathBuf>,
    /// Those of other network namespaces.
    elsewhere: Vec<PathBuf>,
}

impl Inventory {
    /// Reads the trees of all sources in a place.
    pub(super) fn collect(place: Place<'_>) -> Result<Self, Refusal> {
        let (mut unresponsive, mut elsewhere) = (Vec::new(), Vec::new());
        let sources = match place {
            Place::Socket(place) => vec![socket(place).map_err(|error| {
                Refusal::system(&error, format!("no process answers on {}", place.display()))
            })?],
            Place::Files(roots) => {
                let all = roots.iter().map(|root| {
                    files(root).map_err(|error| {
                        let root = root.display();
                        Refusal::system(&error, format!("{root} is not a tree like /sys"))
                    })
                });
                all.collect::<Result<_, _>>()?
            }
            Place::Here => here(&mut unresponsive, &mut elsewhere),
        };
        Ok(Self { sources, unresponsive, elsewhere })
    }

    /// Returns the locations of all sources.
    pub(super) fn places(&self) -> impl Iterator<Item = &Path> {
        self.sources.iter().map(|source| source.place.as_path())
    }

    /// Explains where was searched, if no source was found.
    pub(super) fn nothing(&self) -> Option<String> {
        (self.sources.is_empty() && self.unresponsive.is_empty()).then(|| {
            if let Some(text) = self.none_here("server or client of disks") {
                return text;
            }
            format!(
                "nothing runs here (looked in {} and, for the kernel's modules, in {}); start a server with `bowline \
                 rnbd export` or a client with `bowline rnbd map`, or name a socket with --control",
                looked_in(&folders()),
                sysfs::KERNEL
            )
        })
    }

    /// Explains that there is none of some kind here, if processes run in other network namespaces.
    pub(super) fn none_here(&self, what: &str) -> Option<String> {
        (!self.elsewhere.is_empty()).then(|| none_here(what, &self.elsewhere))
    }

    /// Reports whether any source has this side.
    pub(super) fn has(&self, mode: Mode) -> bool {
        (0..self.sources.len()).any(|source| self.is(source, mode))
    }

    fn is(&self, source: usize, mode: Mode) -> bool {
        let class = match mode {
            Mode::Client => "rnbd-client",
            Mode::Server => "rnbd-server",
        };
        self.sources[source].class(class).is_some()
    }

    /// Returns the sources that have a side.
    pub(super) fn of(&self, mode: Mode) -> Vec<usize> {
        (0..self.sources.len()).filter(|source| self.is(*source, mode)).collect()
    }

    /// Returns the socket of a process, or the folder of a tree.
    pub(super) fn place(&self, source: usize) -> &Path {
        &self.sources[source].place
    }

    /// Returns the path of an attribute as shown to the user.
    pub(super) fn shown(&self, source: usize, path: &str) -> String {
        match &self.sources[source] {
            Source { transport: Transport::Socket(_), .. } => path.to_owned(),
            Source { transport: Transport::Files, place, .. } => {
                sysfs::place(place, path).display().to_string()
            }
        }
    }

    /// Returns all objects of a kind on a side.
    pub(super) fn rows(&self, mode: Mode, target: Target) -> Vec<Row> {
        let sources = self.sources.iter().enumerate();
        let mut rows: Vec<Row> =
            sources.flat_map(|(index, source)| source.rows(mode, target, index)).collect();
        rows.sort_by(|a, b| a.item.text("sessname").cmp(b.item.text("sessname")));
        rows
    }

    /// Returns what is shown of a kind: all objects, and the exports of bowline's processes that no
    /// session has open [NB-65]. Commands that change something have no use for these.
    pub(super) fn shown_rows(&self, mode: Mode, target: Target) -> Vec<Row> {
        let mut rows = self.rows(mode, target);
        if (mode, target) == (Mode::Server, Target::Device) {
            for source in 0..self.sources.len() {
                let unopened = self.sources[source].unopened(self.exports(source));
                rows.extend(unopened.map(|(item, at)| Row { mode, item, source, at }));
            }
        }
        rows
    }

    /// Writes to an attribute.
    pub(super) fn write(&mut self, source: usize, path: &str, value: &str) -> Result<(), Refusal> {
        self.ask(source, Op::Write(value), path).map(|_| ())
    }

    /// Returns the text of an attribute.
    pub(super) fn text(&mut self, source: usize, path: &str) -> Result<String, Refusal> {
        self.ask(source, Op::Text, path)
    }

    /// Returns the sources of a side, or all.
    pub(super) fn all(&self, mode: Option<Mode>) -> Vec<usize> {
        mode.map_or_else(|| (0..self.sources.len()).collect(), |mode| self.of(mode))
    }

    /// Returns the folder or value at a path of a source's tree.
    pub(super) fn part(&self, source: usize, path: &str) -> Option<&Json> {
        let names: Vec<&str> = path.split('/').filter(|name| !name.is_empty()).collect();
        // Entries of these two folders are links.
        let way: Vec<&str> = match names.as_slice() {
            ["class", rest @ ..] if !rest.is_empty() => [&["devices", "virtual"], rest].concat(),
            ["block", ..] => [&["devices", "virtual"], &names[..]].concat(),
            _ => names,
        };
        below(&self.sources[source].tree, &way)
    }

    /// Returns the exports of a process, by their names in the tree. A tree of files may be the
    /// kernel's, which has all block devices of the machine at the same place.
    pub(super) fn exports(&self, source: usize) -> impl Iterator<Item = (&str, &Json)> {
        let is_process = matches!(self.sources[source].transport, Transport::Socket(_));
        let blocks = self.part(source, "/block").filter(|_| is_process);
        // A process may have disks of other servers, too.
        objects(blocks).filter(|(_, block)| block.member("rnbd").is_none())
    }

    /// Tells whether a process has an export of this name.
    pub(super) fn has_export(&self, source: usize, name: &str) -> bool {
        // A directory cannot have a slash in its name.
        self.exports(source).any(|(known, _)| known == name.replace('/', "!"))
    }

    /// Returns an unresponsive process of the same kind as this one: a command may be meant for it,
    /// since both use the same names of disks.
    fn rival(&self, source: usize) -> Option<&Path> {
        let word = |place: &Path| {
            let name = place.file_name()?.to_str()?;
            Some(name.split_once('-')?.0.to_owned())
        };
        let own = word(&self.sources[source].place);
        self.unresponsive.iter().map(PathBuf::as_path).find(|place| word(place) == own)
    }

    fn ask(&mut self, source: usize, op: Op<'_>, path: &str) -> Result<String, Refusal> {
        let shown = self.shown(source, path);
        if let (Op::Write(_), Some(other)) = (&op, self.rival(source)) {
            return Err(Refusal::new(
                Errno::ETIMEDOUT,
                format!(
                    "{} does not answer, and may have {shown} too; choose a process with --control",
                    other.display()
                ),
            ));
        }
        let source = &mut self.sources[source];
        let done = match (&mut source.transport, op) {
            (Transport::Files, Op::Write(value)) => {
                sysfs::write(&sysfs::place(&source.place, path), value).map(|()| String::new())
            }
            (Transport::Files, _) => sysfs::read(&sysfs::place(&source.place, path)),
            (Transport::Socket(client), op) => {
                let limit = if matches!(op, Op::Write(_)) { None } else { Some(PROBE_TIMEOUT) };
                let answer = client.set_limit(limit).and_then(|()| client.ask_why(op, path));
                let answer = answer.map_err(|error| {
                    Refusal::system(
                        &error,
                        format!("lost the connection to {}", source.place.display()),
                    )
                })?;
                return answer.map(|json| json.as_str().unwrap_or_default().to_owned()).map_err(
                    |Refused { errno, why }| match why {
                        Some(why) => Refusal::new(errno, format!("{shown}: {why}")),
                        None => Refusal::of(errno, &shown),
                    },
                );
            }
        };
        done.map_err(|error| Refusal::of(Errno::of(&error), &shown))
    }
}

/// Returns the processes of this user in this network namespace; without any, the kernel's tree.
fn here(unresponsive: &mut Vec<PathBuf>, elsewhere: &mut Vec<PathBuf>) -> Vec<Source> {
    let entries = folders().into_iter().flat_map(fs::read_dir).flatten().flatten();
    let mut places: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
    places.retain(|place| place.extension().is_some_and(|extension| extension == "sock"));
    places.sort();
    // Concurrently, so that several processes that hang take no longer than one.
    let looks: Vec<io::Result<Source>> = thread::scope(|scope| {
        let start = |place| {
            let look = move || socket(place);
            thread::Builder::new().spawn_scoped(scope, look)
        };
        let begun: Vec<_> = places.iter().map(PathBuf::as_path).map(start).collect();
        let end = |look: thread::ScopedJoinHandle<'_, io::Result<Source>>| {
            look.join().unwrap_or_else(|_| Err(io::ErrorKind::Other.into()))
        };
        begun.into_iter().map(|look| look.and_then(end)).collect()
    });
    let mut found = Vec::new();
    for (place, look) in places.iter().zip(looks) {
        match look {
            Ok(source) if Whose::of_tree(&source.tree) == Whose::Others => {
                elsewhere.push(source.place);
            }
            Ok(source) => found.push(source),
            // Sockets that killed processes left behind.
            Err(error) if is_nobody(&error) => {}
            // Sockets of another user, in the folder of services.
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {}
            Err(error) => {
                note!("{} does not answer and is skipped: {error}", place.display());
                unresponsive.push(place.clone());
            }
        }
    }
    let kernel = Path::new(sysfs::KERNEL);
    if found.is_empty() && unresponsive.is_empty() && sysfs::is_there(kernel) {
        found.extend(files(kernel));
    }
    found
}

fn is_nobody(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound)
}

fn socket(place: &Path) -> io::Result<Source> {
    let mut client = Client::connect_within(place, PROBE_TIMEOUT)?;
    let tree = client.ask(Op::Dump, "/")?.map_err(io::Error::from)?;
    Ok(Source { place: place.to_owned(), transport: Transport::Socket(client), tree })
}

fn files(root: &Path) -> io::Result<Source> {
    Ok(Source { place: root.to_owned(), transport: Transport::Files, tree: sysfs::snapshot(root)? })
}

fn below<'a>(json: &'a Json, way: &[&str]) -> Option<&'a Json> {
    way.iter().try_fold(json, |json, name| json.member(name))
}

fn objects(json: Option<&Json>) -> impl Iterator<Item = (&str, &Json)> {
    let members = json.map_or(&[][..], Json::members).iter();
    members
        .filter(|(_, value)| !value.members().is_empty() && value.member("link").is_none())
        .map(|(name, value)| (name.as_str(), value))
}

fn text(json: &Json, way: &[&str]) -> Cell {
    below(json, way).and_then(Json::plain).map_or(Cell::Nothing, Cell::Text)
}

fn number(json: &Json, way: &[&str]) -> u64 {
    below(json, way).and_then(Json::plain).and_then(|text| text.parse().ok()).unwrap_or(0)
}

/// Returns one number of a line of numbers: of its text, or of an object that names them.
fn word(json: &Json, way: &[&str], index: usize) -> u64 {
    match below(json, way) {
        Some(Json::Text(text)) => {
            let word = text.split_ascii_whitespace().nth(index);
            word.and_then(|word| word.parse().ok()).unwrap_or(0)
        }
        Some(object) => object.members().get(index).and_then(|(_, n)| n.as_u64()).unwrap_or(0),
        None => 0,
    }
}

/// Positions of numbers in `stats/rdma` and `stats/reconnects` [NB-44].
const RDMA: [&str; 2] = ["stats", "rdma"];
const READ_BYTES: usize = 1;
const WRITE_BYTES: usize = 3;
const INFLIGHT: usize = 4;
const RECONNECTS: [&str; 2] = ["stats", "reconnects"];
const SUCCESSFUL: usize = 0;

/// Returns the name of the peer's machine, if the tree has it [NB-44].
fn hostname(mode: Mode, session: Option<&Json>) -> Cell {
    let file = match mode {
        Mode::Client => "srv_hostname",
        Mode::Server => "clt_hostname",
    };
    session.map_or(Cell::Nothing, |session| text(session, &[file]))
}

fn owned(text: impl Into<String>) -> Cell {
    Cell::Text(text.into())
}

/// Returns the fields about the storage of a block device, if its process has them [NB-67].
fn storage(block: &Json) -> Vec<(&'static str, Cell)> {
    let Some(health) = block.member("bowline") else { return Vec::new() };
    let last = health.member("last_failure").and_then(Json::as_str).unwrap_or_default();
    let words: Vec<&str> = last.split(' ').collect();
    let (error, state) = match words.as_slice() {
        [op, errno, at, state] => {
            let at = at.parse().map(utc).unwrap_or_default();
            (owned(format!("{op} {errno} {at}")), *state)
        }
        _ => (Cell::Nothing, ""),
    };
    let state = if state == "failing" { state } else { "ok" };
    vec![
        ("errors", Cell::Number(number(health, &["failed_requests"]))),
        ("last_error", error),
        ("storage", owned(state)),
    ]
}

impl Source {
    fn class(&self, name: &str) -> Option<&Json> {
        below(&self.tree, &["devices", "virtual", name])
    }

    fn rows(&self, mode: Mode, target: Target, source: usize) -> Vec<Row> {
        let class = match mode {
            Mode::Client => "rtrs-client",
            Mode::Server => "rtrs-server",
        };
        let rows: Vec<(Item, String)> = match (target, mode) {
            (Target::Device, Mode::Client) => self.imports(),
            (Target::Device, Mode::Server) => self.exports(),
            (Target::Session, _) => objects(self.class(class))
                .map(|(name, session)| {
                    (session_item(mode, name, session), format!("/class/{class}/{name}"))
                })
                .collect(),
            (Target::Path, _) => objects(self.class(class))
                .flat_map(|(session, json)| {
                    objects(json.member("paths")).map(move |(name, path)| {
                        let at = format!("/class/{class}/{session}/paths/{name}");
                        let mut item = path_item(mode, session, name, path);
                        item.cells.push(("hostname", hostname(mode, Some(json))));
                        (item, at)
                    })
                })
                .collect(),
        };
        rows.into_iter().map(|(item, at)| Row { mode, item, source, at }).collect()
    }

    /// Sectors read from and written to a block device: fields 3 and 7 of its stat.
    fn traffic(&self, device: &str) -> (Cell, Cell) {
        let stat = below(&self.tree, &["devices", "virtual", "block", device, "stat"]);
        let stat = stat.and_then(Json::as_str).unwrap_or_default();
        let field = |index: usize| {
            let field = stat.split_ascii_whitespace().nth(index);
            field.and_then(|text| text.parse().ok()).map_or(Cell::Nothing, Cell::Sectors)
        };
        (field(2), field(6))
    }

    fn imports(&self) -> Vec<(Item, String)> {
        let blocks = objects(self.class("block"));
        blocks
            .filter_map(|(name, block)| {
                let rnbd = block.member("rnbd")?;
                let (rx, tx) = self.traffic(name);
                // A disk of a process may have the same name as one of the kernel.
                let device = Path::new("/dev").join(name);
                let device = if self.place == Path::new(sysfs::KERNEL) && device.exists() {
                    owned(device.display().to_string())
                } else {
                    Cell::Nothing
                };
                let session = below(rnbd, &["session"]).and_then(Json::as_str).unwrap_or_default();
                let session = self.class("rtrs-client").and_then(|all| all.member(session));
                let cells = vec![
                    ("sessname", text(rnbd, &["session"])),
                    ("mapping_path", text(rnbd, &["mapping_path"])),
                    ("devname", owned(name)),
                    ("devpath", device),
                    ("state", text(rnbd, &["state"])),
                    ("access_mode", text(rnbd, &["access_mode"])),
                    ("rx_sect", rx),
                    ("tx_sect", tx),
                    ("direction", owned("import")),
                    ("hostname", hostname(Mode::Client, session)),
                ];
                let cells = [cells, storage(block)].concat();
                Some((Item { cells, below: Vec::new() }, format!("/block/{name}/rnbd")))
            })
            .collect()
    }

    /// Returns the rows of those of these exports that no session has open.
    fn unopened<'a>(
        &'a self,
        exports: impl Iterator<Item = (&'a str, &'a Json)>,
    ) -> impl Iterator<Item = (Item, String)> {
        let opens = self.opens();
        let unopened =
            exports.filter(move |(name, _)| opens.and_then(|opens| opens.member(name)).is_none());
        unopened.map(|(name, block)| {
            let cells = vec![
                ("sessname", Cell::Nothing),
                // A directory cannot have a slash in its name.
                ("mapping_path", owned(name.replace('!', "/"))),
                ("devname", owned(name)),
                ("direction", owned("export")),
            ];
            let cells = [cells, storage(block)].concat();
            (Item { cells, below: Vec::new() }, format!("/block/{name}"))
        })
    }

    /// Returns the exports that sessions have open.
    fn opens(&self) -> Option<&Json> {
        self.class("rnbd-server").and_then(|class| below(class, &["ctl", "devices"]))
    }

    fn exports(&self) -> Vec<(Item, String)> {
        objects(self.opens())
            .flat_map(|(device, json)| {
                objects(json.member("sessions")).map(move |(session, open)| {
                    let (rx, tx) = self.traffic(device);
                    let of = self.class("rtrs-server").and_then(|all| all.member(session));
                    let block = below(&self.tree, &["devices", "virtual", "block", device]);
                    let cells = vec![
                        ("sessname", owned(session)),
                        ("mapping_path", text(open, &["mapping_path"])),
                        ("devname", owned(device)),
                        ("access_mode", text(open, &["access_mode"])),
                        ("rx_sect", rx),
                        ("tx_sect", tx),
                        ("direction", owned("export")),
                        ("hostname", hostname(Mode::Server, of)),
                    ];
                    let cells = [cells, block.map_or_else(Vec::new, storage)].concat();
                    let at = format!("/class/rnbd-server/ctl/devices/{device}/sessions/{session}");
                    (Item { cells, below: Vec::new() }, at)
                })
            })
            .collect()
    }
}

fn direction(mode: Mode) -> Cell {
    owned(match mode {
        Mode::Client => "outgoing",
        Mode::Server => "incoming",
    })
}

fn connected(path: &Json) -> bool {
    below(path, &["state"]).and_then(Json::as_str) == Some("connected")
}

fn session_item(mode: Mode, name: &str, session: &Json) -> Item {
    let paths: Vec<(&str, &Json)> = objects(session.member("paths")).collect();
    let sum = |way: &[&str], index| paths.iter().map(|(_, path)| word(path, way, index)).sum();
    let up = paths.iter().filter(|(_, path)| connected(path)).count();
    // `min-inflight (MI: 1)`
    let policy = below(session, &["mpath_policy"]).and_then(Json::as_str).unwrap_or_default();
    let (long, rest) = policy.split_once(" (").unwrap_or((policy, ""));
    let short = rest.split(':').next().unwrap_or_default();
    let marks = paths.iter().map(|(_, path)| if connected(path) { 'U' } else { '_' });
    let mut cells = vec![
        ("sessname", owned(name)),
        ("path_cnt", Cell::Number(paths.len() as u64)),
        ("tx_bytes", Cell::Bytes(sum(&RDMA, WRITE_BYTES))),
        ("rx_bytes", Cell::Bytes(sum(&RDMA, READ_BYTES))),
        ("inflights", Cell::Number(sum(&RDMA, INFLIGHT))),
        ("direction", direction(mode)),
        ("hostname", hostname(mode, Some(session))),
    ];
    if mode == Mode::Client {
        let server = name.split_once('@').map_or(Cell::Nothing, |(_, server)| owned(server));
        cells.extend([
            ("act_path_cnt", Cell::Number(up as u64)),
            ("state", owned(if up > 0 { "connected" } else { "disconnected" })),
            ("path_uu", owned(marks.collect::<String>())),
            ("mp", owned(long)),
            ("mp_short", owned(short)),
            ("reconnects", Cell::Number(sum(&RECONNECTS, SUCCESSFUL))),
            ("srvname", server),
        ]);
    }
    let plain = |path: &Json, key: &str| path.member(key).and_then(Json::plain).unwrap_or_default();
    let below = paths.iter().map(|(name, path)| {
        format!("{} {} {name}", plain(path, "hca_name"), plain(path, "hca_port"))
    });
    Item { cells, below: below.collect() }
}

fn path_item(mode: Mode, session: &str, name: &str, path: &Json) -> Item {
    let mut cells = vec![
        ("sessname", owned(session)),
        ("pathname", owned(name)),
        ("src_addr", text(path, &["src_addr"])),
        ("dst_addr", text(path, &["dst_addr"])),
        ("hca_name", text(path, &["hca_name"])),
        ("hca_port", Cell::Number(number(path, &["hca_port"]))),
        ("tx_bytes", Cell::Bytes(word(path, &RDMA, WRITE_BYTES))),
        ("rx_bytes", Cell::Bytes(word(path, &RDMA, READ_BYTES))),
        ("inflights", Cell::Number(word(path, &RDMA, INFLIGHT))),
        ("direction", direction(mode)),
    ];
    if mode == Mode::Client {
        let successful = word(path, &RECONNECTS, SUCCESSFUL);
        cells.extend([("state", text(path, &["state"])), ("reconnects", Cell::Number(successful))]);
    }
    Item { cells, below: Vec::new() }
}
