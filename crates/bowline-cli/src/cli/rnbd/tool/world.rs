//! What runs on this machine: the trees of all processes that answer, as rows of fields.

use std::{
    fs,
    path::{Path, PathBuf},
};

use bowline_ctl::{Client, Errno, Json, Op, folder};

use super::{
    Refusal,
    columns::{Mode, Target},
    format::{Cell, Item},
};

/// A process that answers.
#[derive(Debug)]
struct Source {
    place: PathBuf,
    client: Client,
    tree: Json,
}

/// A device, a session or a path, and where it is.
#[derive(Clone, Debug)]
pub(super) struct Row {
    pub(super) mode: Mode,
    pub(super) item: Item,
    /// Which process has it.
    pub(super) source: usize,
    /// Its directory there.
    pub(super) at: String,
}

/// Everything that answers.
#[derive(Debug, Default)]
pub(super) struct World {
    sources: Vec<Source>,
}

impl World {
    /// Asks the process behind a socket, or all of this user.
    pub(super) fn gather(control: Option<&Path>) -> Result<Self, Refusal> {
        let mut world = Self::default();
        if let Some(place) = control {
            let source = source(place).map_err(|error| {
                Refusal::system(&error, format!("nobody answers on {}", place.display()))
            })?;
            world.sources.push(source);
            return Ok(world);
        }
        let mut places: Vec<PathBuf> = fs::read_dir(folder())
            .map(|entries| entries.flatten().map(|entry| entry.path()).collect())
            .unwrap_or_default();
        places.retain(|place| place.extension().is_some_and(|extension| extension == "sock"));
        places.sort();
        // Sockets that killed processes left behind do not answer.
        world.sources.extend(places.iter().filter_map(|place| source(place).ok()));
        Ok(world)
    }

    /// Reports whether anything of a side runs.
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

    /// Returns the processes of a side.
    pub(super) fn of(&self, mode: Mode) -> Vec<usize> {
        (0..self.sources.len()).filter(|source| self.is(*source, mode)).collect()
    }

    /// Returns the socket of a process.
    pub(super) fn place(&self, source: usize) -> &Path {
        &self.sources[source].place
    }

    /// Returns all things of a kind on a side.
    pub(super) fn rows(&self, mode: Mode, target: Target) -> Vec<Row> {
        let sources = self.sources.iter().enumerate();
        let mut rows: Vec<Row> =
            sources.flat_map(|(index, source)| source.rows(mode, target, index)).collect();
        rows.sort_by(|a, b| a.item.text("sessname").cmp(b.item.text("sessname")));
        rows
    }

    /// Writes to an attribute.
    pub(super) fn write(&mut self, source: usize, path: &str, value: &str) -> Result<(), Refusal> {
        let answer = self.ask(source, Op::Write(value), path)?;
        answer.map(|_| ()).map_err(|errno| Refusal::of(errno, path))
    }

    /// Returns the text of an attribute.
    pub(super) fn text(&mut self, source: usize, path: &str) -> Result<String, Refusal> {
        let answer = self.ask(source, Op::Text, path)?.map_err(|errno| Refusal::of(errno, path))?;
        Ok(answer.as_str().unwrap_or_default().to_owned())
    }

    fn ask(
        &mut self,
        source: usize,
        op: Op<'_>,
        path: &str,
    ) -> Result<Result<Json, Errno>, Refusal> {
        let source = &mut self.sources[source];
        source.client.ask(op, path).map_err(|error| {
            Refusal::system(&error, format!("{} broke off", source.place.display()))
        })
    }
}

fn source(place: &Path) -> std::io::Result<Source> {
    let mut client = Client::connect(place)?;
    let tree = client.ask(Op::Dump, "/")?.map_err(std::io::Error::from_raw_os_error)?;
    Ok(Source { place: place.to_owned(), client, tree })
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
    below(json, way).and_then(Json::as_u64).unwrap_or(0)
}

fn owned(text: impl Into<String>) -> Cell {
    Cell::Text(text.into())
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
                        (path_item(mode, session, name, path), at)
                    })
                })
                .collect(),
        };
        rows.into_iter().map(|(item, at)| Row { mode, item, source, at }).collect()
    }

    /// Sectors that went through a block device: fields 3 and 7 of its stat.
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
                let device = format!("/dev/{name}");
                let device =
                    if Path::new(&device).exists() { Cell::Text(device) } else { Cell::Nothing };
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
                ];
                Some((Item { cells, below: Vec::new() }, format!("/block/{name}/rnbd")))
            })
            .collect()
    }

    fn exports(&self) -> Vec<(Item, String)> {
        let ctl = self.class("rnbd-server").and_then(|class| below(class, &["ctl", "devices"]));
        objects(ctl)
            .flat_map(|(device, json)| {
                objects(json.member("sessions")).map(move |(session, open)| {
                    let (rx, tx) = self.traffic(device);
                    let cells = vec![
                        ("sessname", owned(session)),
                        ("mapping_path", text(open, &["mapping_path"])),
                        ("devname", owned(device)),
                        ("access_mode", text(open, &["access_mode"])),
                        ("rx_sect", rx),
                        ("tx_sect", tx),
                        ("direction", owned("export")),
                    ];
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
    let sum = |way: &[&str]| paths.iter().map(|(_, path)| number(path, way)).sum::<u64>();
    let up = paths.iter().filter(|(_, path)| connected(path)).count();
    // `min-inflight (MI: 1)`
    let policy = below(session, &["mpath_policy"]).and_then(Json::as_str).unwrap_or_default();
    let (long, rest) = policy.split_once(" (").unwrap_or((policy, ""));
    let short = rest.split(':').next().unwrap_or_default();
    let marks = paths.iter().map(|(_, path)| if connected(path) { 'U' } else { '_' });
    let mut cells = vec![
        ("sessname", owned(name)),
        ("path_cnt", Cell::Number(paths.len() as u64)),
        ("tx_bytes", Cell::Bytes(sum(&["stats", "rdma", "write_bytes"]))),
        ("rx_bytes", Cell::Bytes(sum(&["stats", "rdma", "read_bytes"]))),
        ("inflights", Cell::Number(sum(&["stats", "rdma", "inflight"]))),
        ("direction", direction(mode)),
    ];
    if mode == Mode::Client {
        let server = name.split_once('@').map_or(Cell::Nothing, |(_, server)| owned(server));
        cells.extend([
            ("act_path_cnt", Cell::Number(up as u64)),
            ("state", owned(if up > 0 { "connected" } else { "disconnected" })),
            ("path_uu", owned(marks.collect::<String>())),
            ("mp", owned(long)),
            ("mp_short", owned(short)),
            ("reconnects", Cell::Number(sum(&["stats", "reconnects", "successful"]))),
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
        ("tx_bytes", Cell::Bytes(number(path, &["stats", "rdma", "write_bytes"]))),
        ("rx_bytes", Cell::Bytes(number(path, &["stats", "rdma", "read_bytes"]))),
        ("inflights", Cell::Number(number(path, &["stats", "rdma", "inflight"]))),
        ("direction", direction(mode)),
    ];
    if mode == Mode::Client {
        let successful = number(path, &["stats", "reconnects", "successful"]);
        cells.extend([("state", text(path, &["state"])), ("reconnects", Cell::Number(successful))]);
    }
    Item { cells, below: Vec::new() }
}
