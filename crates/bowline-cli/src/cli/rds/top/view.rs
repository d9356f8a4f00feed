//! One view of `bowline top`: rates between two samples of a node, as text and as JSON.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, HashMap},
    fmt::Write,
    fs,
    net::{IpAddr, SocketAddr},
    time::Instant,
};

use bowline_node::{
    Failure, Outcome,
    control::snapshot::{ConnectionRow, EndRow, NodeFacts, Snapshot, SocketRow},
    log,
};
use serde::Serialize;

use crate::cli::common::watch::{
    Choice, Column, Rate, Size, View, fitted, number, size_text, tables,
};

/// State of a path in service, and what stands in the place of it.
const UP: &str = "up";
const CONGESTED: &str = "congested";
/// Transport of connections over RDMA.
const INFINIBAND: &str = "infiniband";
/// Longest text about a process.
const COMMAND_MAX: usize = 40;

/// What a node told at one moment.
pub(super) struct Sample {
    pub(super) at: Instant,
    pub(super) snapshot: Snapshot,
}

/// A view.
pub(super) struct NodeView {
    sample: Sample,
    shown: Shown,
}

#[derive(Debug, Serialize)]
struct Shown {
    node: NodeFacts,
    uptime_ms: u64,
    /// Seconds that the rates are over; absent in the first view.
    seconds: Option<f64>,
    totals: Totals,
    connections: Vec<Connection>,
    sockets: Vec<Socket>,
}

/// Rates of the node, each second.
#[derive(Debug, Serialize)]
struct Totals {
    sent_messages: Option<f64>,
    sent_bytes: Option<f64>,
    received_messages: Option<f64>,
    received_bytes: Option<f64>,
    retransmitted_messages: Option<f64>,
    dropped_messages: Option<f64>,
}

/// One pair of addresses over one transport, over all its paths.
#[derive(Clone, Debug, Serialize)]
struct Connection {
    local_addr: IpAddr,
    remote_addr: IpAddr,
    transport: String,
    tos: u8,
    peer: String,
    paths: u8,
    paths_up: u64,
    congested: bool,
    /// State of the path that is furthest from service.
    state: String,
    last_end: Option<EndRow>,
    /// Messages, and bytes that the transport took and brought, each second.
    sent_messages: Option<f64>,
    received_messages: Option<f64>,
    sent_bytes: Option<f64>,
    received_bytes: Option<f64>,
    queued_bytes: u64,
    send_messages: u64,
    retrans_messages: u64,
    resets: u64,
}

#[derive(Debug, Serialize)]
struct Socket {
    #[serde(flatten)]
    row: SocketRow,
    /// Name and arguments of the process that owns the socket.
    command: Option<String>,
}

impl View for NodeView {
    type Sample = Sample;

    fn new(before: Option<&Sample>, sample: Sample) -> Self {
        let shown = Shown::of(before, &sample);
        Self { sample, shown }
    }

    fn into_sample(self) -> Sample {
        self.sample
    }

    fn json(&self) -> Outcome<String> {
        serde_json::to_string(&self.shown)
            .map_err(|error| Failure::failed(format!("cannot write JSON: {error}")))
    }

    const ORDERS: &'static [&'static str] =
        &["state", "queued", "sent", "received", "lost", "remote"];

    fn text(&self, size: Option<Size>, choice: &Choice) -> String {
        let connections = match size {
            Some(size) => self.shown.connection_table(size.columns, choice),
            None => self.shown.connection_lines(choice),
        };
        tables(self.shown.head(), connections, self.shown.socket_lines(choice), size)
    }
}

impl Shown {
    fn of(before: Option<&Sample>, sample: &Sample) -> Self {
        let now = &sample.snapshot;
        // Another process answers at the same place: its counts have begun anew.
        let before = before.filter(|before| before.snapshot.node.pid == now.node.pid);
        let seconds = before.map(|before| (sample.at - before.at).as_secs_f64());
        let rate = Rate { seconds: seconds.filter(|seconds| *seconds > 0.0) };
        let then = before.map(|before| &before.snapshot);
        let mut commands = HashMap::new();
        let sockets = now.sockets.iter().map(|row| {
            let command = row
                .owner_pid
                .and_then(|pid| commands.entry(pid).or_insert_with(|| command_of(pid)).clone());
            Socket { row: row.clone(), command }
        });
        Self {
            node: now.node.clone(),
            uptime_ms: now.uptime_ms,
            seconds: rate.seconds,
            totals: Totals::of(then, now, rate),
            connections: connections(then, now, rate),
            sockets: sockets.collect(),
        }
    }

    fn head(&self) -> Vec<String> {
        let NodeFacts { version, pid, addresses } = &self.node;
        let addresses: Vec<String> = addresses.iter().map(ToString::to_string).collect();
        let addresses =
            if addresses.is_empty() { "every address".to_owned() } else { addresses.join(", ") };
        let Totals { sent_messages, sent_bytes, received_messages, received_bytes, .. } =
            self.totals;
        vec![
            format!(
                "bowline {version}, process {pid}, up {}: {addresses}",
                time_text(self.uptime_ms)
            ),
            format!(
                "sent {}/s, {}/s   received {}/s, {}/s",
                number(sent_messages),
                size_text(sent_bytes),
                number(received_messages),
                size_text(received_bytes),
            ),
            format!(
                "sent again {}/s   dropped {}/s",
                number(self.totals.retransmitted_messages),
                number(self.totals.dropped_messages),
            ),
            String::new(),
        ]
    }

    fn connection_lines(&self, choice: &Choice) -> Vec<String> {
        let mut lines = vec![format!(
            "{:>15} {:>15} {:4} {:>5} {:10} {:>9} {:>9} {:>10} {:>10} {:>10} {:>6} {:>6} {:>5} {}",
            "LOCAL",
            "REMOTE",
            "OVER",
            "PATHS",
            "STATE",
            "TX/s",
            "RX/s",
            "TXB/s",
            "RXB/s",
            "QUEUED",
            "WAIT",
            "UNACK",
            "LOST",
            "LAST"
        )];
        for row in self.rows(choice) {
            let mut line = format!(
                "{:>15} {:>15} {:4} {:>5} {:10} {:>9} {:>9} {:>10} {:>10} {:>10} {:>6} {:>6} {:>5}",
                row.local_addr.to_string(),
                row.remote_addr.to_string(),
                row.over(),
                format!("{}/{}", row.paths_up, row.paths),
                row.state_text(),
                number(row.sent_messages),
                number(row.received_messages),
                size_text(row.sent_bytes),
                size_text(row.received_bytes),
                log::bytes(row.queued_bytes),
                row.send_messages,
                row.retrans_messages,
                row.resets,
            );
            match row.last_text() {
                Some(last) if row.state == UP => {
                    let _ = write!(line, " {last}");
                    lines.push(line);
                }
                // The reason is what is looked for: it has a line that fits everywhere.
                Some(last) => lines.extend([line, format!("{:16}{last}", "")]),
                None => lines.push(line),
            }
        }
        lines.push(String::new());
        lines
    }

    /// The connections that are shown, in their order.
    fn rows(&self, choice: &Choice) -> Vec<&Connection> {
        let mut rows: Vec<&Connection> =
            self.connections.iter().filter(|row| choice.shows(&row.words())).collect();
        let amount = |value: Option<f64>| Reverse(value.unwrap_or_default() as u64);
        match choice.order() {
            "queued" => rows.sort_by_key(|row| Reverse(row.queued_bytes)),
            "sent" => rows.sort_by_key(|row| amount(row.sent_bytes)),
            "received" => rows.sort_by_key(|row| amount(row.received_bytes)),
            "lost" => rows.sort_by_key(|row| Reverse(row.resets)),
            "remote" => rows.sort_by_key(|row| row.remote_addr),
            _ => {}
        }
        if choice.is_reversed() {
            rows.reverse();
        }
        rows
    }

    /// The same for a terminal: what has no room is left out, least of all the reason of a loss.
    fn connection_table(&self, room: usize, choice: &Choice) -> Vec<String> {
        let rows = self.rows(choice);
        let column = |title, width, is_left, cell: &dyn Fn(&Connection) -> String| {
            let cells = rows.iter().map(|row| cell(row)).collect();
            Column { title, width, is_left, cells }
        };
        let columns = [
            column("LOCAL", 15, false, &|row| row.local_addr.to_string()),
            column("REMOTE", 15, false, &|row| row.remote_addr.to_string()),
            column("OVER", 4, true, &|row| row.over().to_owned()),
            column("PATHS", 5, false, &|row| format!("{}/{}", row.paths_up, row.paths)),
            column("STATE", 10, true, &|row| row.state_text().to_owned()),
            column("TX/s", 7, false, &|row| number(row.sent_messages)),
            column("RX/s", 7, false, &|row| number(row.received_messages)),
            column("TXB/s", 6, false, &|row| short(&size_text(row.sent_bytes))),
            column("RXB/s", 6, false, &|row| short(&size_text(row.received_bytes))),
            column("QUEUED", 6, false, &|row| short(&log::bytes(row.queued_bytes))),
            column("WAIT", 5, false, &|row| row.send_messages.to_string()),
            column("UNACK", 5, false, &|row| row.retrans_messages.to_string()),
            column("LOST", 4, false, &|row| row.resets.to_string()),
            column("LAST", 30, true, &|row| row.last_text().unwrap_or_default()),
        ];
        let ranks = [
            "REMOTE", "STATE", "PATHS", "QUEUED", "LOST", "TXB/s", "RXB/s", "TX/s", "RX/s",
            "LOCAL", "OVER", "WAIT", "UNACK", "LAST",
        ];
        let table = fitted(&columns, &ranks, room);
        let has_last = table.first().is_some_and(|heading| heading.ends_with("LAST"));
        let mut table = table.into_iter();
        let mut lines: Vec<String> = table.next().into_iter().collect();
        for (line, row) in table.zip(&rows) {
            lines.push(line);
            lines.extend(
                row.last_text().filter(|_| !has_last).map(|last| format!("{:16}{last}", "")),
            );
        }
        lines.push(String::new());
        lines
    }

    fn socket_lines(&self, choice: &Choice) -> Vec<String> {
        let mut lines = vec![format!(
            "{:>21} {:9} {:>10} {:>10} {:>8} {:>7} {}",
            "SOCKET", "STATE", "SENDQ", "RECVQ", "MESSAGES", "PID", "COMMAND"
        )];
        let rows = self.sockets.iter().map(|Socket { row, command }| {
            let place = row.bound_addr.map(|addr| SocketAddr::new(addr, row.bound_port));
            format!(
                "{:>21} {:9} {:>10} {:>10} {:>8} {:>7} {}",
                place.map_or_else(|| "-".to_owned(), |place| place.to_string()),
                if row.congested { CONGESTED } else { "" },
                log::bytes(row.send_bytes),
                log::bytes(row.recv_bytes),
                row.recv_messages,
                row.owner_pid.map_or_else(|| "-".to_owned(), |pid| pid.to_string()),
                command.as_deref().unwrap_or("-"),
            )
        });
        lines.extend(rows.filter(|line| choice.shows(line)));
        lines
    }
}

impl Totals {
    fn of(then: Option<&Snapshot>, now: &Snapshot, rate: Rate) -> Self {
        let of = |name: &str| {
            let count = |of: &Snapshot| {
                of.counters.iter().find(|counter| counter.name == name).map(|found| found.value)
            };
            rate.of(then.and_then(count), count(now)?)
        };
        Self {
            sent_messages: of("send_queued"),
            sent_bytes: of("copy_from_user"),
            received_messages: of("recv_queued"),
            received_bytes: of("recv_bytes_added_to_sock"),
            retransmitted_messages: of("bl_retransmits"),
            dropped_messages: of("recv_drop_no_sock"),
        }
    }
}

/// How far a path is from service.
fn distance(state: &str) -> u8 {
    match state {
        UP => 0,
        "connecting" => 1,
        _ => 2,
    }
}

fn connections(then: Option<&Snapshot>, now: &Snapshot, rate: Rate) -> Vec<Connection> {
    let then = then.map(|then| then.connections.as_slice()).unwrap_or_default();
    let key =
        |row: &ConnectionRow| (row.local_addr, row.remote_addr, row.transport.clone(), row.tos);
    let then: HashMap<_, _> = then.iter().map(|row| (key(row), row)).collect();
    let mut all = BTreeMap::new();
    for row in &now.connections {
        let old = then.get(&key(row));
        let of = |count: fn(&ConnectionRow) -> u64| rate.of(old.map(|old| count(old)), count(row));
        all.insert(
            key(row),
            Connection {
                local_addr: row.local_addr,
                remote_addr: row.remote_addr,
                transport: row.transport.clone(),
                tos: row.tos,
                peer: row.peer.clone(),
                paths: row.paths,
                paths_up: 0,
                congested: row.congested,
                state: UP.to_owned(),
                last_end: None,
                sent_messages: of(|row| row.sent_messages),
                received_messages: of(|row| row.received_messages),
                sent_bytes: of(|row| row.sent_bytes),
                received_bytes: of(|row| row.received_bytes),
                queued_bytes: 0,
                send_messages: 0,
                retrans_messages: 0,
                resets: 0,
            },
        );
    }
    for path in &now.paths {
        let key = (path.local_addr, path.remote_addr, path.transport.clone(), path.tos);
        let Some(row) = all.get_mut(&key) else { continue };
        // Paths that were not agreed on are not missed.
        if path.path >= row.paths.max(1) {
            continue;
        }
        row.paths_up += u64::from(path.state == UP);
        row.queued_bytes += path.queued_bytes;
        row.send_messages += path.send_messages;
        row.retrans_messages += path.retrans_messages;
        row.resets += path.resets;
        if distance(&path.state) > distance(&row.state) {
            row.state.clone_from(&path.state);
        }
        if let Some(end) = &path.last_end
            && row.last_end.as_ref().is_none_or(|known| end.ago_ms < known.ago_ms)
        {
            row.last_end = Some(end.clone());
        }
    }
    let mut all: Vec<Connection> = all.into_values().collect();
    // The pairs keep their order among those that are equal, so that lines do not jump about.
    all.sort_by_key(|row| Reverse((distance(&row.state), row.congested)));
    all
}

impl Connection {
    fn over(&self) -> &str {
        if self.transport == INFINIBAND { "rdma" } else { &self.transport }
    }

    /// When and why a path last ended, or was not made.
    fn last_text(&self) -> Option<String> {
        let end = self.last_end.as_ref()?;
        Some(format!("{} ago: {}", time_text(end.ago_ms), end.reason))
    }

    /// What a filter looks at.
    fn words(&self) -> String {
        format!(
            "{} {} {} {} {}",
            self.local_addr,
            self.remote_addr,
            self.over(),
            self.state_text(),
            self.last_text().unwrap_or_default()
        )
    }

    fn state_text(&self) -> &str {
        if self.state == UP && self.congested { CONGESTED } else { &self.state }
    }
}

/// Returns the command line of a process, without what could move the cursor.
fn command_of(pid: u32) -> Option<String> {
    let line = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
    let line = String::from_utf8_lossy(&line);
    let words = line.trim_end_matches('\0').chars();
    let text: String =
        words.map(|c| if c.is_control() { ' ' } else { c }).take(COMMAND_MAX).collect();
    (!text.is_empty()).then_some(text)
}

/// Returns a size without what can be left out of its unit: 1.5M for 1.5 MiB.
fn short(size: &str) -> String {
    size.trim_end_matches('B').trim_end_matches('i').replace(' ', "")
}

/// Returns a time in its two largest units.
fn time_text(ms: u64) -> String {
    let seconds = ms / 1000;
    match seconds {
        0..60 => format!("{seconds} s"),
        60..3600 => format!("{} min {} s", seconds / 60, seconds % 60),
        3600..86_400 => format!("{} h {} min", seconds / 3600, seconds / 60 % 60),
        _ => format!("{} d {} h", seconds / 86_400, seconds / 3600 % 24),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use bowline_node::control::snapshot::{Counter, Flags, PathRow};

    const LOCAL: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 1));

    fn remote(last: u8) -> IpAddr {
        IpAddr::from([10, 0, 0, last])
    }

    fn path(remote_addr: IpAddr, path: u8, state: &str, next_tx: u64) -> PathRow {
        PathRow {
            local_addr: LOCAL,
            remote_addr,
            transport: "tcp".into(),
            tos: 0,
            path,
            next_tx,
            next_rx: 1,
            flags: Flags::default(),
            state: state.to_owned(),
            send_messages: 1,
            retrans_messages: 0,
            resets: 1,
            queued_bytes: 2048,
            last_end: Some(EndRow { ago_ms: 61_000 + u64::from(path), reason: "refused".into() }),
        }
    }

    fn sample(at: Instant, sent: u64, peers: u8) -> Sample {
        let row = |last: u8| ConnectionRow {
            local_addr: LOCAL,
            remote_addr: remote(last),
            tos: 0,
            next_tx: sent,
            next_rx: 1,
            flags: Flags::default(),
            transport: "tcp".into(),
            paths: 2,
            peer: "bowline".into(),
            congested: last == 2,
            sent_messages: sent,
            received_messages: 0,
            sent_bytes: 0,
            received_bytes: 0,
        };
        let state = |last: u8| if last == 3 { "connecting" } else { "up" };
        let peers = 2..2 + peers;
        let paths = peers
            .clone()
            .flat_map(|last| (0..2).map(move |index| path(remote(last), index, state(last), sent)));
        let snapshot = Snapshot {
            node: NodeFacts { version: "1".into(), pid: 7, addresses: vec![LOCAL.into()] },
            uptime_ms: 3_720_000,
            counters: vec![Counter { name: "send_queued".into(), value: 2 * sent }],
            sockets: Vec::new(),
            connections: peers.map(row).collect(),
            paths: paths.collect(),
            recv_messages: Vec::new(),
            send_messages: Vec::new(),
            retrans_messages: Vec::new(),
            tcp_sockets: Vec::new(),
            ib_connections: None,
        };
        Sample { at, snapshot }
    }

    #[test]
    fn rates_are_those_between_two_looks() {
        let start = Instant::now();
        let first = NodeView::new(None, sample(start, 100, 2));
        assert_eq!(first.shown.seconds, None);
        assert_eq!(first.shown.connections[0].sent_messages, None);
        let before = first.into_sample();
        let view = NodeView::new(Some(&before), sample(start + Duration::from_secs(2), 110, 2));
        assert_eq!(view.shown.totals.sent_messages, Some(10.0));
        assert_eq!(view.shown.totals.sent_bytes, None);
        assert_eq!(view.shown.connections[0].sent_messages, Some(5.0));
        // Another process has begun anew.
        let mut other = sample(start + Duration::from_secs(3), 1, 2);
        other.snapshot.node.pid = 8;
        assert_eq!(NodeView::new(Some(&view.into_sample()), other).shown.seconds, None);
    }

    #[test]
    fn what_is_not_in_service_comes_first_with_its_reason() {
        let view = NodeView::new(None, sample(Instant::now(), 1, 3));
        let all = view.shown.connection_lines(&Choice::new(NodeView::ORDERS, None, None));
        assert!(all[1].contains("10.0.0.3") && all[1].contains(" 0/2 "), "{all:?}");
        assert!(all[1].contains(" connecting "), "{all:?}");
        assert_eq!(all[2], "                1 min 1 s ago: refused");
        assert!(all[3].contains("10.0.0.2") && all[3].contains(" congested "), "{all:?}");
        assert!(all[3].ends_with("1 min 1 s ago: refused"), "{all:?}");
        assert!(all[1].contains("4.0 KiB"), "{all:?}");
    }

    #[test]
    fn a_view_fits_into_its_terminal() {
        let view = NodeView::new(None, sample(Instant::now(), 1, 50));
        let choice = Choice::new(NodeView::ORDERS, None, None);
        for rows in [1, 2, 5, 10, 24, 200] {
            let text = view.text(Some(Size { rows, columns: 40 }), &choice);
            assert!(text.lines().count() <= rows, "{rows} rows: {text}");
            assert!(text.lines().all(|line| line.chars().count() <= 40), "{text}");
        }
        let text = view.text(Some(Size { rows: 24, columns: 80 }), &choice);
        assert!(text.contains("  and ") && text.contains("SOCKET"), "{text}");
        assert!(!view.text(None, &choice).contains(" more\n"));
    }

    #[test]
    fn a_common_terminal_has_what_top_is_for() {
        let view = NodeView::new(None, sample(Instant::now(), 1, 2));
        let choice = Choice::new(NodeView::ORDERS, None, None);
        for (columns, more) in [(80, &[][..]), (100, &["LOCAL"]), (200, &["WAIT", "UNACK"])] {
            let text = view.text(Some(Size { rows: 24, columns }), &choice);
            let always =
                ["REMOTE", "STATE", "PATHS", "TX/s", "RX/s", "TXB/s", "RXB/s", "QUEUED", "LOST"];
            for title in always.iter().chain(more) {
                assert!(text.contains(title), "{columns}: no {title}: {text}");
            }
            // Whole, with the time: nothing is cut off.
            assert_eq!(text.matches("1 min 1 s ago: refused\n").count(), 2, "{columns}: {text}");
        }
    }

    #[test]
    fn rows_are_shown_in_the_order_and_with_the_filter_that_were_chosen() {
        let mut one = sample(Instant::now(), 1, 3);
        one.snapshot.paths.iter_mut().filter(|p| p.remote_addr == remote(4)).for_each(|path| {
            path.queued_bytes = 1 << 20;
        });
        let view = NodeView::new(None, one);
        let mut choice = Choice::new(NodeView::ORDERS, None, None);
        let rows = |choice: &Choice| {
            let text = view.text(Some(Size { rows: 40, columns: 80 }), choice);
            let last = |line: &str| {
                line.split_whitespace().next()?.strip_prefix("10.0.0.")?.parse::<u8>().ok()
            };
            text.lines().skip(3).filter_map(last).collect::<Vec<_>>()
        };
        assert_eq!(rows(&choice), [3, 2, 4], "what is not up comes first");
        choice.press("s");
        assert_eq!(rows(&choice)[0], 4, "the most is queued for it");
        choice.press("r");
        assert_eq!(rows(&choice)[2], 4);
        choice.press("/10.0.0.3\n");
        assert_eq!(rows(&choice), [3]);
    }

    #[test]
    fn times_have_two_units() {
        for (seconds, text) in
            [(5, "5 s"), (61, "1 min 1 s"), (7_260, "2 h 1 min"), (90_000, "1 d 1 h")]
        {
            assert_eq!(time_text(seconds * 1000), text);
        }
    }
}
