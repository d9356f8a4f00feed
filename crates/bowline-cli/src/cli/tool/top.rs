//! One view of `rnbd top`: disks and paths of all processes that answer, with rates between two
//! samples, as text and as JSON.

use std::{
    cmp::Reverse,
    collections::{HashMap, HashSet},
    time::Instant,
};

use bowline_ctl::Json;
use bowline_node::{Failure, Outcome, log::shown};
use serde::Serialize;

use super::{
    Place, Refusal,
    columns::{Mode, Target},
    format::Cell,
    inventory::Inventory,
};
use crate::cli::common::watch::{
    Choice, Column, Rate, Size, View, fitted, number, size_text, tables,
};

const SECTOR: u64 = 512;
/// Columns of what is no terminal.
const WIDE: usize = 1 << 16;

/// What all processes answered at one moment.
pub(in crate::cli) struct TopSample {
    at: Instant,
    disks: Vec<Counted>,
    paths: Vec<Path>,
}

/// A disk or an export: where it is, and its counters.
#[derive(Clone, Debug, Default)]
struct Counted {
    /// The process, and the name there.
    key: (String, String),
    side: &'static str,
    path: String,
    session: String,
    state: String,
    storage: String,
    reads: u64,
    read_bytes: u64,
    writes: u64,
    write_bytes: u64,
    busy: u64,
    waiting: u64,
    failed: u64,
    read_times: Times,
    write_times: Times,
}

/// Counts of requests, by the longest time in nanoseconds that each stands for.
#[derive(Clone, Debug, Default)]
struct Times(Vec<(u64, u64)>);

/// A path of a session.
#[derive(Clone, Debug, Serialize)]
struct Path {
    side: &'static str,
    session: String,
    path: String,
    state: String,
    busy: u64,
    failovers: Option<u64>,
    reconnects: Option<u64>,
}

/// A view.
pub(in crate::cli) struct TopView {
    sample: TopSample,
    shown: Shown,
}

#[derive(Debug, Serialize)]
struct Shown {
    /// Seconds that the rates are over; absent in the first view.
    seconds: Option<f64>,
    disks: Vec<Disk>,
    paths: Vec<Path>,
}

#[derive(Debug, Serialize)]
struct Disk {
    name: String,
    side: &'static str,
    path: String,
    session: String,
    state: String,
    /// Whether storage fails: `ok` or `failing`.
    storage: String,
    /// Requests and bytes each second.
    reads: Option<f64>,
    writes: Option<f64>,
    read_bytes: Option<f64>,
    write_bytes: Option<f64>,
    /// Percentiles of the times of requests in nanoseconds, of mapped disks.
    read_p50_ns: Option<u64>,
    read_p99_ns: Option<u64>,
    write_p50_ns: Option<u64>,
    write_p99_ns: Option<u64>,
    busy: u64,
    waiting: u64,
    failed: u64,
}

impl Times {
    fn parse(text: &str) -> Self {
        let pair = |word: &str| {
            let (nanos, count) = word.split_once(':')?;
            Some((nanos.parse().ok()?, count.parse().ok()?))
        };
        Self(text.split_ascii_whitespace().filter_map(pair).collect())
    }

    /// Returns the times counted since; those of a disk that was mapped again are all.
    fn since(&self, then: &Self) -> Self {
        let then: HashMap<u64, u64> = then.0.iter().copied().collect();
        let of = |(nanos, count): &(u64, u64)| {
            let before = then.get(nanos).copied().unwrap_or(0);
            (*nanos, count.checked_sub(before).unwrap_or(*count))
        };
        Self(self.0.iter().map(of).collect())
    }

    /// Returns the time that this share of the requests took at most.
    fn percentile(&self, share: f64) -> Option<u64> {
        let all: u64 = self.0.iter().map(|(_, count)| count).sum();
        let wanted = ((all as f64 * share).ceil() as u64).max(1);
        let mut seen = 0;
        let found = self.0.iter().find(|(_, count)| {
            seen += count;
            seen >= wanted
        });
        found.map(|(nanos, _)| *nanos)
    }
}

fn text<'a>(json: &'a Json, way: &[&str]) -> &'a str {
    let found = way.iter().try_fold(json, |json, name| json.member(name));
    found.and_then(Json::as_str).unwrap_or_default()
}

fn uint(json: &Json, way: &[&str]) -> u64 {
    let found = way.iter().try_fold(json, |json, name| json.member(name));
    found.and_then(Json::as_u64).unwrap_or(0)
}

impl Counted {
    fn of(place: String, side: &'static str, name: &str, block: &Json) -> Self {
        let stat: Vec<u64> = text(block, &["stat"])
            .split_ascii_whitespace()
            .map(|word| word.parse().unwrap_or(0))
            .collect();
        let stat = |at: usize| stat.get(at).copied().unwrap_or(0);
        let is_failing = text(block, &["bowline", "last_failure"]).ends_with(" failing");
        let queue = |name| uint(block, &["bowline", "queue", name]);
        let times = |name| Times::parse(text(block, &["bowline", name]));
        let is_mapped = side == "import";
        Self {
            key: (place, name.to_owned()),
            side,
            // A directory cannot have a slash in its name.
            path: match text(block, &["rnbd", "mapping_path"]) {
                "" => name.replace('!', "/"),
                path => path.to_owned(),
            },
            session: text(block, &["rnbd", "session"]).to_owned(),
            state: text(block, &["rnbd", "state"]).to_owned(),
            storage: if is_failing { "failing" } else { "ok" }.to_owned(),
            reads: stat(0),
            read_bytes: stat(2) * SECTOR,
            writes: stat(4) + stat(11),
            write_bytes: stat(6) * SECTOR,
            busy: if is_mapped { queue("in_flight") } else { stat(8) },
            waiting: queue("waiting"),
            failed: uint(block, &["bowline", "failed_requests"]),
            read_times: times("read_latencies"),
            write_times: times("write_latencies"),
        }
    }
}

impl TopSample {
    /// Asks all processes.
    pub(in crate::cli) fn take(place: Place<'_>) -> Outcome<Self> {
        let inventory = Inventory::collect(place)?;
        if let Some(nothing) = inventory.nothing() {
            return Err(Refusal::missing(nothing).into());
        }
        let at = |source: usize| inventory.place(source).display().to_string();
        let mut disks = Vec::new();
        for row in inventory.rows(Mode::Client, Target::Device) {
            let name = row.item.text("devname");
            if let Some(block) = inventory.part(row.source, &format!("/block/{name}")) {
                disks.push(Counted::of(at(row.source), "import", name, block));
            }
        }
        for source in inventory.of(Mode::Server) {
            for (name, block) in inventory.exports(source) {
                let mut export = Counted::of(at(source), "export", name, block);
                let opens = format!("/class/rnbd-server/ctl/devices/{name}/sessions");
                let opens = inventory.part(source, &opens).map_or(0, |all| all.members().len());
                export.state = format!("{opens} open");
                disks.push(export);
            }
        }
        let mut paths = Vec::new();
        for mode in [Mode::Client, Mode::Server] {
            for row in inventory.rows(mode, Target::Path) {
                let count = |key: &str| match row.item.cell(key) {
                    Cell::Number(count) => Some(*count),
                    _ => None,
                };
                let rdma = inventory.part(row.source, &format!("{}/stats/rdma", row.at));
                let failovers = rdma.and_then(|rdma| rdma.member("failovers"));
                let state = match row.item.text("state") {
                    // A server has the paths that are connected.
                    "" => "connected",
                    state => state,
                };
                paths.push(Path {
                    side: mode.name(),
                    session: row.item.text("sessname").to_owned(),
                    path: row.item.text("pathname").to_owned(),
                    state: state.to_owned(),
                    busy: count("inflights").unwrap_or(0),
                    failovers: failovers.and_then(Json::as_u64),
                    reconnects: count("reconnects"),
                });
            }
        }
        Ok(Self { at: Instant::now(), disks, paths })
    }
}

impl View for TopView {
    type Sample = TopSample;

    fn new(before: Option<&TopSample>, sample: TopSample) -> Self {
        let shown = Shown::of(before, &sample);
        Self { sample, shown }
    }

    fn into_sample(self) -> TopSample {
        self.sample
    }

    fn json(&self) -> Outcome<String> {
        serde_json::to_string(&self.shown)
            .map_err(|error| Failure::failed(format!("cannot write JSON: {error}")))
    }

    const ORDERS: &'static [&'static str] =
        &["state", "reads", "writes", "waiting", "failed", "name"];

    fn text(&self, size: Option<Size>, choice: &Choice) -> String {
        // All but the heading.
        let chosen = |mut lines: Vec<String>| {
            let rows = lines.split_off(1.min(lines.len()));
            lines.extend(rows.into_iter().filter(|line| line.is_empty() || choice.shows(line)));
            lines
        };
        let room = size.map_or(WIDE, |size| size.columns);
        let disks = self.shown.ordered(choice);
        // A path is shown for its own text, and for a shown disk of its session.
        let rows = disk_lines(&disks, WIDE).into_iter().skip(1);
        let shown = disks.iter().zip(rows).filter(|(_, row)| choice.shows(row));
        let sessions: HashSet<&str> = shown.map(|(disk, _)| disk.session.as_str()).collect();
        let rows = path_lines(&self.shown.paths, WIDE).into_iter().skip(1);
        let paths = self.shown.paths.iter().zip(rows);
        let paths = paths
            .filter(|(path, row)| sessions.contains(path.session.as_str()) || choice.shows(row))
            .map(|(path, _)| path.clone());
        let paths = path_lines(&paths.collect::<Vec<_>>(), room);
        tables(self.shown.head(), chosen(disk_lines(&disks, room)), paths, size)
    }
}

impl Shown {
    fn of(before: Option<&TopSample>, sample: &TopSample) -> Self {
        let seconds = before.map(|before| (sample.at - before.at).as_secs_f64());
        let rate = Rate { seconds: seconds.filter(|seconds| *seconds > 0.0) };
        let then = before.map(|before| before.disks.as_slice()).unwrap_or_default();
        let then: HashMap<_, _> = then.iter().map(|disk| ((&disk.key, disk.side), disk)).collect();
        let mut disks: Vec<Disk> = sample
            .disks
            .iter()
            .map(|now| Disk::of(then.get(&(&now.key, now.side)).copied(), now, rate))
            .collect();
        // Lines keep their order among those that are equal, so that they do not jump about.
        disks.sort_by_key(|disk| Reverse((disk.storage == "failing", disk.state == "closed")));
        let mut paths = sample.paths.clone();
        paths.sort_by_key(|path| path.state == "connected");
        Self { seconds: rate.seconds, disks, paths }
    }

    fn ordered(&self, choice: &Choice) -> Vec<&Disk> {
        let mut disks: Vec<&Disk> = self.disks.iter().collect();
        let amount = |value: Option<f64>| Reverse(value.unwrap_or_default() as u64);
        match choice.order() {
            "reads" => disks.sort_by_key(|disk| amount(disk.reads)),
            "writes" => disks.sort_by_key(|disk| amount(disk.writes)),
            "waiting" => disks.sort_by_key(|disk| Reverse(disk.waiting)),
            "failed" => disks.sort_by_key(|disk| Reverse(disk.failed)),
            "name" => disks.sort_by(|a, b| a.name.cmp(&b.name)),
            _ => {}
        }
        if choice.is_reversed() {
            disks.reverse();
        }
        disks
    }

    fn head(&self) -> Vec<String> {
        let sum = |side: &str, of: fn(&Disk) -> Option<f64>| {
            let all = self.disks.iter().filter(|disk| disk.side == side);
            all.map(of).try_fold(0.0, |sum, rate| Some(sum + rate?))
        };
        let line = |side: &str, what: &str| {
            let count = self.disks.iter().filter(|disk| disk.side == side).count();
            (count > 0).then(|| {
                format!(
                    "{count} {what}: reads {}/s, {}/s   writes {}/s, {}/s",
                    number(sum(side, |disk| disk.reads)),
                    size_text(sum(side, |disk| disk.read_bytes)),
                    number(sum(side, |disk| disk.writes)),
                    size_text(sum(side, |disk| disk.write_bytes)),
                )
            })
        };
        let lines = [line("import", "mapped"), line("export", "exported")];
        let mut lines: Vec<String> = lines.into_iter().flatten().collect();
        if lines.is_empty() {
            lines.push("no disks".to_owned());
        }
        lines.push(String::new());
        lines
    }
}

impl Disk {
    fn of(then: Option<&Counted>, now: &Counted, rate: Rate) -> Self {
        let of = |count: fn(&Counted) -> u64| rate.of(then.map(count), count(now));
        let times = |of: fn(&Counted) -> &Times, share| {
            then.and_then(|then| of(now).since(of(then)).percentile(share))
        };
        Self {
            name: now.key.1.clone(),
            side: now.side,
            path: now.path.clone(),
            session: now.session.clone(),
            state: now.state.clone(),
            storage: now.storage.clone(),
            reads: of(|disk| disk.reads),
            writes: of(|disk| disk.writes),
            read_bytes: of(|disk| disk.read_bytes),
            write_bytes: of(|disk| disk.write_bytes),
            read_p50_ns: times(|disk| &disk.read_times, 0.5),
            read_p99_ns: times(|disk| &disk.read_times, 0.99),
            write_p50_ns: times(|disk| &disk.write_times, 0.5),
            write_p99_ns: times(|disk| &disk.write_times, 0.99),
            busy: now.busy,
            waiting: now.waiting,
            failed: now.failed,
        }
    }
}

/// Returns the table of the disks, with the columns that have room.
fn disk_lines(disks: &[&Disk], room: usize) -> Vec<String> {
    let column = |title, width, is_left, cell: &dyn Fn(&Disk) -> String| {
        let cells = disks.iter().map(|disk| cell(disk)).collect();
        Column { title, width, is_left, cells }
    };
    let state = |disk: &Disk| {
        if disk.storage == "failing" { disk.storage.clone() } else { disk.state.clone() }
    };
    let columns = [
        column("DISK", 8, true, &|disk| shown(&disk.name).into_owned()),
        column("SIDE", 6, true, &|disk| disk.side.to_owned()),
        column("EXPORT", 8, true, &|disk| shown(&disk.path).into_owned()),
        column("STATE", 7, true, &state),
        column("R/s", 7, false, &|disk| number(disk.reads)),
        column("W/s", 7, false, &|disk| number(disk.writes)),
        column("RB/s", 9, false, &|disk| size_text(disk.read_bytes)),
        column("WB/s", 9, false, &|disk| size_text(disk.write_bytes)),
        column("R50", 6, false, &|disk| time_text(disk.read_p50_ns)),
        column("R99", 6, false, &|disk| time_text(disk.read_p99_ns)),
        column("W50", 6, false, &|disk| time_text(disk.write_p50_ns)),
        column("W99", 6, false, &|disk| time_text(disk.write_p99_ns)),
        column("BUSY", 4, false, &|disk| disk.busy.to_string()),
        column("WAIT", 4, false, &|disk| disk.waiting.to_string()),
        column("FAILED", 6, false, &|disk| disk.failed.to_string()),
    ];
    let ranks = [
        "DISK", "SIDE", "STATE", "R/s", "W/s", "R99", "W99", "FAILED", "WAIT", "EXPORT", "BUSY",
        "RB/s", "WB/s", "R50", "W50",
    ];
    let mut lines = fitted(&columns, &ranks, room);
    lines.push(String::new());
    lines
}

/// Returns the table of the paths, with the columns that have room.
fn path_lines(paths: &[Path], room: usize) -> Vec<String> {
    let column = |title, width, is_left, cell: &dyn Fn(&Path) -> String| {
        let cells = paths.iter().map(cell).collect();
        Column { title, width, is_left, cells }
    };
    let count = |count: Option<u64>| count.map_or_else(|| "-".to_owned(), |n| n.to_string());
    let columns = [
        column("SIDE", 6, true, &|path| path.side.to_owned()),
        column("SESSION", 8, true, &|path| shown(&path.session).into_owned()),
        column("PATH", 24, true, &|path| shown(&path.path).into_owned()),
        column("STATE", 9, true, &|path| path.state.clone()),
        column("BUSY", 4, false, &|path| path.busy.to_string()),
        column("FAILOVER", 8, false, &|path| count(path.failovers)),
        column("RECONN", 6, false, &|path| count(path.reconnects)),
    ];
    let ranks = ["PATH", "STATE", "SIDE", "RECONN", "BUSY", "FAILOVER", "SESSION"];
    fitted(&columns, &ranks, room)
}

/// Returns a time in the largest unit that leaves something before the point.
fn time_text(nanos: Option<u64>) -> String {
    match nanos {
        None => "-".to_owned(),
        Some(nanos @ ..1_000_000) => format!("{} us", nanos / 1000),
        Some(nanos @ ..1_000_000_000) => format!("{:.1} ms", nanos as f64 / 1e6),
        Some(nanos) => format!("{:.1} s", nanos as f64 / 1e9),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn disk(name: &str, reads: u64, times: &str) -> Counted {
        Counted {
            key: ("a.sock".to_owned(), name.to_owned()),
            side: "import",
            state: "open".to_owned(),
            storage: "ok".to_owned(),
            reads,
            read_times: Times::parse(times),
            ..Counted::default()
        }
    }

    fn sample(at: Instant, disks: Vec<Counted>) -> TopSample {
        TopSample { at, disks, paths: Vec::new() }
    }

    #[test]
    fn rates_and_latencies_are_those_between_two_looks() {
        let start = Instant::now();
        let first = TopView::new(None, sample(start, vec![disk("rnbd0", 100, "1024:100")]));
        assert_eq!((first.shown.seconds, first.shown.disks[0].reads), (None, None));
        assert_eq!(first.shown.disks[0].read_p50_ns, None);
        let before = first.into_sample();
        let times = "1024:100 2048:97 5000000:3";
        let now = sample(start + Duration::from_secs(2), vec![disk("rnbd0", 200, times)]);
        let view = TopView::new(Some(&before), now);
        let shown = &view.shown.disks[0];
        assert_eq!((shown.reads, shown.writes), (Some(50.0), Some(0.0)));
        assert_eq!((shown.read_p50_ns, shown.read_p99_ns), (Some(2048), Some(5_000_000)));
        assert_eq!(shown.write_p99_ns, None);
        let text = view.text(None, &Choice::new(TopView::ORDERS, None, None));
        assert!(text.contains(" 2 us ") && text.contains(" 5.0 ms "), "{text}");
    }

    #[test]
    fn disks_that_fail_come_first_and_a_view_fits_into_its_terminal() {
        let mut disks: Vec<Counted> = (0..50).map(|n| disk(&format!("rnbd{n}"), 0, "")).collect();
        disks[7].storage = "failing".to_owned();
        let view = TopView::new(None, sample(Instant::now(), disks));
        assert_eq!(view.shown.disks[0].name, "rnbd7");
        let text = view
            .text(Some(Size { rows: 20, columns: 60 }), &Choice::new(TopView::ORDERS, None, None));
        assert!(text.lines().count() <= 20, "{text}");
        assert!(text.lines().all(|line| line.chars().count() <= 60), "{text}");
        assert!(text.contains(" more\n") && text.contains(" RECONN"));
    }

    #[test]
    fn a_filter_keeps_the_paths_of_the_disks_that_it_shows() {
        let mut disks = vec![disk("rnbd0", 0, ""), disk("rnbd1", 0, "")];
        (disks[0].session, disks[1].session) = ("s0".to_owned(), "s1".to_owned());
        let path = |session: &str, path: &str| Path {
            side: "client",
            session: session.to_owned(),
            path: path.to_owned(),
            state: "connected".to_owned(),
            busy: 0,
            failovers: None,
            reconnects: None,
        };
        let paths = vec![path("s0", "1.1.1.1@1.1.1.2"), path("s1", "2.2.2.1@2.2.2.2")];
        let view = TopView::new(None, TopSample { at: Instant::now(), disks, paths });
        let text = |filter| view.text(None, &Choice::new(TopView::ORDERS, None, Some(filter)));
        let shown = text("rnbd0");
        assert!(shown.contains("1.1.1.2") && !shown.contains("2.2.2.2"), "{shown}");
        let shown = text("2.2.2.2");
        assert!(shown.contains("2.2.2.2") && !shown.contains("1.1.1.2"), "{shown}");
    }

    #[test]
    fn options_choose_the_order_and_the_rows() {
        let mut disks: Vec<Counted> = ["b", "c", "a"].map(|name| disk(name, 0, "")).into();
        disks[1].waiting = 7;
        let view = TopView::new(None, sample(Instant::now(), disks));
        let names = |order: &str, filter: Option<&str>| -> String {
            let text = view.text(None, &Choice::new(TopView::ORDERS, Some(order), filter));
            let rows = text.lines().filter(|line| line.contains(" import "));
            rows.filter_map(|line| line.chars().next()).collect()
        };
        assert_eq!(names("name", None), "abc");
        assert_eq!(names("waiting", None), "cba");
        assert_eq!(names("waiting", Some("A  ")), "a");
    }
}
