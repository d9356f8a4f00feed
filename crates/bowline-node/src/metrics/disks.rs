//! Metrics of RTRS sessions and of RNBD disks and exports.

use std::sync::Arc;

use bowline_base::clock;
use bowline_rnbd_driver::{
    server::ExportServer,
    tree::{DiskState, Disks, Exports, Traffic},
};
use bowline_rtrs_driver::{
    Engine,
    client::Session,
    tree::{ClientPath, ClientSession, IoStats, LATENCY_ROWS, ServerSessions},
};

use super::{
    Source, counters,
    exposition::{
        Exposition,
        Kind::{self, Counter, Gauge, Histogram},
    },
    process, rdma,
};

/// Returns the metrics of a server of disks.
pub fn exports(engine: Arc<Engine>, server: Arc<ExportServer>) -> Source {
    process::begin();
    Box::new(move |out| {
        process::write(out);
        self::engine(out, &engine);
        exports_of(out, &server);
    })
}

/// Returns the metrics of a client of disks.
pub fn mapped(
    engine: Arc<Engine>,
    sessions: impl Fn() -> Vec<Arc<Session>> + Send + 'static,
    disks: Arc<dyn Disks>,
) -> Source {
    process::begin();
    Box::new(move |out| {
        process::write(out);
        self::engine(out, &engine);
        disks_of(out, &sessions(), &*disks);
    })
}

/// Writes the metrics of the devices and the driver below a server or client.
pub fn engine(out: &mut Exposition, engine: &Engine) {
    rdma::write(out, engine.devices());
    counters(out, "bowline_rtrs_driver", &[], engine.stats().described());
}

/// Writes the metrics of a server.
pub fn exports_of(out: &mut Exposition, server: &ExportServer) {
    let rtrs = server.rtrs();
    counters(out, "bowline_rtrs_server", &[], rtrs.counters().described());
    server_paths(out, &**rtrs);
    export_families(out, server);
}

/// Writes the metrics of a client: its sessions and its disks.
pub fn disks_of(out: &mut Exposition, sessions: &[Arc<Session>], disks: &dyn Disks) {
    client_paths(out, sessions);
    disk_families(out, disks);
}

type FamilyOf<T> = (&'static str, Kind, &'static str, fn(&T) -> u64);

/// Writes families of a table, one sample for each row of it.
fn families<T, const N: usize>(
    out: &mut Exposition,
    prefix: &str,
    names: [&str; N],
    rows: &[([String; N], T)],
    all: &[FamilyOf<T>],
) {
    for (name, kind, help, value) in all {
        let mut family = out.family(&format!("{prefix}_{name}"), *kind, help);
        for (labels, row) in rows {
            let labels: [_; N] = std::array::from_fn(|at| (names[at], labels[at].as_str()));
            family.sample(&labels, value(row));
        }
    }
}

const IO: [FamilyOf<IoStats>; 5] = [
    ("reads_total", Counter, "Reads.", |io| io.reads),
    ("read_bytes_total", Counter, "Bytes of reads, with their messages.", |io| io.read_bytes),
    ("writes_total", Counter, "Writes.", |io| io.writes),
    ("written_bytes_total", Counter, "Bytes of writes, with their messages.", |io| io.write_bytes),
    ("inflight_requests", Gauge, "Requests without an answer yet.", |io| io.inflight),
];

const CLIENT_PATH: [FamilyOf<ClientPath>; 5] = [
    ("connected", Gauge, "Whether the path carries requests.", |path| path.connected.into()),
    ("failovers_total", Counter, "Requests taken over from paths that failed.", |path| {
        path.stats.failovers
    }),
    ("reconnects_total", Counter, "Reconnections that succeeded.", |path| path.stats.reconnects),
    ("failed_reconnects_total", Counter, "Reconnections that failed.", |path| {
        path.stats.reconnects_failed
    }),
    ("completions_total", Counter, "Work completions.", |path| path.stats.completions.total),
];

fn client_paths(out: &mut Exposition, sessions: &[Arc<Session>]) {
    const PREFIX: &str = "bowline_rtrs_client_path";
    const LABELS: [&str; 3] = ["session", "source", "destination"];
    let rows: Vec<([String; 3], ClientPath)> = sessions
        .iter()
        .flat_map(|session| {
            let name = ClientSession::name(&**session);
            let paths = ClientSession::paths(&**session).into_iter();
            paths
                .map(move |path| ([name.clone(), path.src.to_string(), path.dst.to_string()], path))
        })
        .collect();
    families(out, PREFIX, LABELS, &rows, &CLIENT_PATH);
    let io: Vec<_> = rows.iter().map(|(labels, path)| (labels.clone(), path.stats.io)).collect();
    families(out, PREFIX, LABELS, &io, &IO);

    let name = format!("{PREFIX}_heartbeat_seconds");
    let mut family = out.family(&name, Gauge, "Round trip of the last heartbeat.");
    for ([session, source, destination], path) in &rows {
        let labels =
            [("session", session.as_str()), ("source", source), ("destination", destination)];
        family.sample(&labels, path.latency_ns as f64 / 1e9);
    }
    let name = format!("{PREFIX}_request_duration_seconds");
    let mut family = out.family(&name, Histogram, "Time from the start of a request to its end.");
    for ([session, source, destination], path) in &rows {
        let sum = path.stats.latency_sum;
        for (direction, column, sum) in [("read", 0, sum.0), ("write", 1, sum.1)] {
            let labels = [
                ("session", session.as_str()),
                ("source", source),
                ("destination", destination),
                ("direction", direction),
            ];
            family.histogram(&labels, &buckets(path, column), sum.as_secs_f64());
        }
    }
}

/// Returns the upper bounds in seconds and the numbers of requests of a path.
fn buckets(path: &ClientPath, column: usize) -> [(f64, u64); LATENCY_ROWS] {
    std::array::from_fn(|at| {
        let (reads, writes) = path.stats.latency[at];
        let last = at + 1 == LATENCY_ROWS;
        let bound = if last { f64::INFINITY } else { f64::from(1_u32 << at) / 1000.0 };
        (bound, if column == 0 { reads } else { writes })
    })
}

fn server_paths(out: &mut Exposition, server: &dyn ServerSessions) {
    let sessions = server.sessions();
    out.family("bowline_rtrs_server_sessions", Gauge, "Sessions with a name.")
        .sample(&[], sessions.len());
    let rows: Vec<([String; 3], IoStats)> = sessions
        .iter()
        .flat_map(|session| {
            session.paths.iter().map(|path| {
                ([session.name.clone(), path.client.to_string(), path.server.to_string()], path.io)
            })
        })
        .collect();
    families(out, "bowline_rtrs_server_path", ["session", "client", "server"], &rows, &IO);
}

const TRAFFIC: [FamilyOf<Traffic>; 8] = [
    ("reads_completed_total", Counter, "Reads.", |traffic| traffic.reads),
    ("read_bytes_total", Counter, "Bytes read.", |traffic| traffic.read_bytes),
    ("writes_completed_total", Counter, "Writes.", |traffic| traffic.writes),
    ("written_bytes_total", Counter, "Bytes written.", |traffic| traffic.write_bytes),
    ("discards_completed_total", Counter, "Discards.", |traffic| traffic.discards),
    ("discarded_bytes_total", Counter, "Bytes discarded.", |traffic| traffic.discard_bytes),
    ("flush_requests_total", Counter, "Flushes.", |traffic| traffic.flushes),
    ("io_now", Gauge, "Requests without an answer yet.", |traffic| traffic.inflight),
];

fn disk_families(out: &mut Exposition, disks: &dyn Disks) {
    const PREFIX: &str = "bowline_rnbd_disk";
    const LABELS: [&str; 3] = ["device", "session", "path"];
    let rows: Vec<_> = disks
        .disks()
        .into_iter()
        .map(|disk| ([disk.name.clone(), disk.session.clone(), disk.mapping_path.clone()], disk))
        .collect();
    families(
        out,
        PREFIX,
        LABELS,
        &rows,
        &[
            ("open", Gauge, "Whether the disk can be used now.", |disk| {
                (disk.state == DiskState::Open).into()
            }),
            ("size_bytes", Gauge, "Size of the disk.", |disk| disk.bytes),
            (
                "failed_requests_total",
                Counter,
                "Requests that the server's storage failed.",
                |disk| disk.failures.count,
            ),
            ("failing", Gauge, "Whether the server's storage fails requests now.", |disk| {
                disk.failures.is_failing(clock::now()).into()
            }),
            ("waiting_requests", Gauge, "Requests that wait for a slot or for a path.", |disk| {
                disk.queue.waiting
            }),
        ],
    );
    let traffic: Vec<_> = rows.into_iter().map(|(labels, disk)| (labels, disk.traffic)).collect();
    families(out, PREFIX, LABELS, &traffic, &TRAFFIC);
}

fn export_families(out: &mut Exposition, exports: &dyn Exports) {
    const PREFIX: &str = "bowline_rnbd_export";
    const LABELS: [&str; 1] = ["export"];
    let all = exports.exports().into_iter();
    let rows: Vec<_> = all.map(|export| ([export.name.clone()], export)).collect();
    families(
        out,
        PREFIX,
        LABELS,
        &rows,
        &[
            ("size_bytes", Gauge, "Size of the export.", |export| export.bytes),
            ("read_only", Gauge, "Whether clients may only read.", |export| {
                export.read_only.into()
            }),
            ("open_sessions", Gauge, "Sessions that have the export open.", |export| {
                export.opens.len() as u64
            }),
            ("failed_requests_total", Counter, "Requests that storage failed.", |export| {
                export.failures.count
            }),
            ("failing", Gauge, "Whether storage fails requests now.", |export| {
                export.failures.is_failing(clock::now()).into()
            }),
        ],
    );
    let traffic: Vec<_> =
        rows.into_iter().map(|(labels, export)| (labels, export.traffic)).collect();
    families(out, PREFIX, LABELS, &traffic, &TRAFFIC);
}
