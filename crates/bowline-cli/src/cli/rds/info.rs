//! `bowline info`: what a running node knows, in the sections and columns of `rds-info`.

use std::{
    fmt::{Display, Write},
    io::{self, IsTerminal},
    net::IpAddr,
    path::PathBuf,
    time::Duration,
};

use bowline_base::Errno;
use bowline_node::{
    Outcome,
    control::{
        Client,
        snapshot::{MessageRow, RdmaRow, Snapshot},
    },
    log,
    signals::Stop,
    values::{Address, some_time},
};

/// Look inside a running node (as rds-info does).
///
/// Letters may be combined (`-ck`); without any, everything is shown, and the addresses of the node
/// first. Sections always come in the order I T c k n r s t.
#[derive(Clone, Debug, Default, clap::Args)]
#[command(after_help = "Exit status: 0, or 1 when no node answers or an option is wrong.")]
pub(crate) struct Args {
    /// RDMA connections; only of a node with --rdma
    #[arg(short = 'I')]
    rdma: bool,
    /// TCP connections
    #[arg(short = 'T')]
    tcp: bool,
    /// Counters
    #[arg(short = 'c')]
    counters: bool,
    /// RDS sockets
    #[arg(short = 'k')]
    sockets: bool,
    /// Connections
    #[arg(short = 'n')]
    connections: bool,
    /// Receive queues
    #[arg(short = 'r')]
    receive: bool,
    /// Send queues: messages not handed to the transport yet
    #[arg(short = 's')]
    send: bool,
    /// Retransmit queues: messages sent and not acknowledged
    #[arg(short = 't')]
    retransmit: bool,
    /// Paths of every connection
    #[arg(short = 'p', long)]
    paths: bool,
    /// More about RDMA connections
    #[arg(short = 'v')]
    verbose: bool,
    /// Control socket of the node [default: that of the only node in this network
    /// namespace; a node in the folder of this user comes first]
    #[arg(long, value_name = "PATH")]
    control: Option<PathBuf>,
    /// Print one JSON object with everything, whatever letters are given
    #[arg(long)]
    json: bool,
    /// Print what rds-info prints, and nothing else
    #[arg(long, hide = true)]
    original: bool,
    /// Ask again at this interval until interrupted: seconds, or a number with ms or us
    #[arg(short = 'w', long, value_name = "TIME", value_parser = some_time)]
    watch: Option<Duration>,
}

/// Runs the command.
pub(crate) fn run(args: &Args) -> Outcome {
    let mut client = Client::connect(args.control.as_deref())?;
    let Some(pause) = args.watch else {
        return show(args, &mut client);
    };
    let stop = Stop::install()?;
    loop {
        if io::stdout().is_terminal() && !args.json {
            // Cursor home and clear, so that numbers change in place.
            log::text("\x1b[H\x1b[2J");
        }
        show(args, &mut client)?;
        if stop.wait(Some(pause)) {
            return Ok(());
        }
    }
}

fn show(args: &Args, client: &mut Client) -> Outcome {
    let snapshot = client.snapshot()?;
    if args.json {
        let text = serde_json::to_string(&snapshot).map_err(|error| {
            bowline_node::Failure::failed(format!("cannot write JSON: {error}"))
        })?;
        say!("{text}");
        return Ok(());
    }
    let asks_for_rdma = args.rdma || (args.verbose && !args.any_section());
    if asks_for_rdma && snapshot.ib_connections.is_none() {
        // The text of rds-info on a kernel without an RDMA transport.
        note!("bowline info: Unable get statistics: {}", Errno::ENOPROTOOPT.strerror());
    }
    log::text(&render(args, &snapshot));
    Ok(())
}

impl Args {
    fn any_section(&self) -> bool {
        self.rdma
            || self.tcp
            || self.counters
            || self.sockets
            || self.connections
            || self.receive
            || self.send
            || self.retransmit
            || self.paths
    }
}

fn render(args: &Args, snapshot: &Snapshot) -> String {
    let all = !args.any_section();
    let mut text = String::new();
    if all && !args.original {
        node(&mut text, snapshot);
    }
    if let Some(connections) = snapshot.ib_connections.as_ref().filter(|_| args.rdma || all) {
        rdma(&mut text, connections, args.verbose);
    }
    if args.tcp || all {
        tcp(&mut text, snapshot);
    }
    if args.counters || all {
        let mut table = Table::new(&mut text, "Counters", &[("CounterName", 25), ("Value", 16)]);
        for counter in &snapshot.counters {
            table.row(&[&counter.name, &counter.value]);
        }
    }
    if args.sockets || all {
        sockets(&mut text, snapshot);
    }
    if args.connections || all {
        connections(&mut text, snapshot);
    }
    if args.paths {
        paths(&mut text, snapshot);
    }
    for (wanted, title, messages) in [
        (args.receive, "Receive Message Queue", &snapshot.recv_messages),
        (args.send, "Send Message Queue", &snapshot.send_messages),
        (args.retransmit, "Retransmit Message Queue", &snapshot.retrans_messages),
    ] {
        if wanted || all {
            queue(&mut text, title, messages);
        }
    }
    text
}

/// Writes a section: an empty line, the title, the headings, then right-aligned rows.
struct Table<'a> {
    text: &'a mut String,
    columns: &'a [(&'a str, usize)],
}

impl<'a> Table<'a> {
    fn new(text: &'a mut String, title: &str, columns: &'a [(&'a str, usize)]) -> Self {
        text.push('\n');
        text.push_str(title);
        text.push_str(":\n");
        let mut table = Self { text, columns };
        let names: Vec<&dyn Display> =
            columns.iter().map(|(name, _)| name as &dyn Display).collect();
        table.row(&names);
        table
    }

    fn row(&mut self, cells: &[&dyn Display]) {
        self.row_and(cells, "");
    }

    /// Writes a row with a text after its last column.
    fn row_and(&mut self, cells: &[&dyn Display], more: &str) {
        for (index, (cell, (_, width))) in cells.iter().zip(self.columns).enumerate() {
            if index > 0 {
                self.text.push(' ');
            }
            // Addresses and flags ignore the width of a format, so they are converted to text
            // first.
            let cell = cell.to_string();
            // Writing into a String cannot fail.
            let _ = write!(self.text, "{cell:>width$}");
        }
        self.text.push_str(more);
        self.text.push('\n');
    }
}

/// Writes the addresses that the node serves, of which `rds-info` knows nothing.
fn node(text: &mut String, snapshot: &Snapshot) {
    let addresses = &snapshot.node.addresses;
    let shown = match addresses.as_slice() {
        [] => "all of this machine".to_owned(),
        some => some.iter().map(Address::to_string).collect::<Vec<_>>().join(", "),
    };
    let _ = writeln!(text, "\nNode: process {}, addresses: {shown}", snapshot.node.pid);
}

fn rdma(text: &mut String, connections: &[RdmaRow], verbose: bool) {
    let mut table = Table::new(
        text,
        "RDS IB Connections",
        &[
            ("LocalAddr", 15),
            ("RemoteAddr", 15),
            ("Tos", 4),
            ("SL", 3),
            ("LocalDev", 32),
            ("RemoteDev", 32),
        ],
    );
    for row in connections {
        let numbers = format!(
            "  send_wr={}, recv_wr={}, send_sge={}, rdma_mr_max={}, rdma_mr_size={}, cache_allocs={}",
            row.send_wr,
            row.recv_wr,
            row.send_sge,
            row.rdma_mr_max,
            row.rdma_mr_size,
            row.cache_allocs
        );
        let cells: [&dyn Display; 6] =
            [&row.local_addr, &row.remote_addr, &row.tos, &row.sl, &row.local_dev, &row.remote_dev];
        table.row_and(&cells, if verbose { &numbers } else { "" });
    }
}

fn tcp(text: &mut String, snapshot: &Snapshot) {
    let mut table = Table::new(
        text,
        "TCP Connections",
        &[
            ("LocalAddr", 15),
            ("LPort", 5),
            ("RemoteAddr", 15),
            ("RPort", 5),
            ("HdrRemain", 10),
            ("DataRemain", 10),
            ("SentNxt", 10),
            ("ExpectUna", 10),
            ("SeenUna", 10),
        ],
    );
    for row in &snapshot.tcp_sockets {
        table.row(&[
            &row.local_addr,
            &row.local_port,
            &row.remote_addr,
            &row.remote_port,
            &row.hdr_rem,
            &row.data_rem,
            &row.last_sent_nxt,
            &row.last_expected_una,
            &row.last_seen_una,
        ]);
    }
}

fn sockets(text: &mut String, snapshot: &Snapshot) {
    let none = IpAddr::from([0, 0, 0, 0]);
    let mut table = Table::new(
        text,
        "RDS Sockets",
        &[
            ("BoundAddr", 15),
            ("BPort", 5),
            ("ConnAddr", 15),
            ("CPort", 5),
            ("SndBuf", 10),
            ("RcvBuf", 10),
            ("Inode", 8),
        ],
    );
    for row in &snapshot.sockets {
        table.row(&[
            &row.bound_addr.unwrap_or(none),
            &row.bound_port,
            &row.connected_addr.unwrap_or(none),
            &row.connected_port,
            &row.sndbuf,
            &row.rcvbuf,
            &row.inode,
        ]);
    }
}

fn connections(text: &mut String, snapshot: &Snapshot) {
    let mut table = Table::new(
        text,
        "RDS Connections",
        &[
            ("LocalAddr", 15),
            ("RemoteAddr", 15),
            ("Tos", 4),
            ("NextTX", 16),
            ("NextRX", 16),
            ("Flgs", 4),
        ],
    );
    for row in &snapshot.connections {
        table.row(&[
            &row.local_addr,
            &row.remote_addr,
            &row.tos,
            &row.next_tx,
            &row.next_rx,
            &row.flags,
        ]);
    }
}

fn paths(text: &mut String, snapshot: &Snapshot) {
    let mut table = Table::new(
        text,
        "RDS Paths",
        &[
            ("LocalAddr", 15),
            ("RemoteAddr", 15),
            ("Path", 4),
            ("NextTX", 16),
            ("NextRX", 16),
            ("Flgs", 4),
            ("Send", 8),
            ("Retrans", 8),
            ("Resets", 6),
            ("State", 13),
        ],
    );
    for row in &snapshot.paths {
        table.row(&[
            &row.local_addr,
            &row.remote_addr,
            &row.path,
            &row.next_tx,
            &row.next_rx,
            &row.flags,
            &row.send_messages,
            &row.retrans_messages,
            &row.resets,
            &row.state,
        ]);
    }
}

fn queue(text: &mut String, title: &str, messages: &[MessageRow]) {
    let mut table = Table::new(
        text,
        title,
        &[
            ("LocalAddr", 15),
            ("LPort", 5),
            ("RemoteAddr", 15),
            ("RPort", 5),
            ("Tos", 4),
            ("Seq", 16),
            ("Bytes", 10),
        ],
    );
    for row in messages {
        table.row(&[
            &row.local_addr,
            &row.local_port,
            &row.remote_addr,
            &row.remote_port,
            &row.tos,
            &row.seq,
            &row.bytes,
        ]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bowline_node::control::snapshot::{ConnectionRow, Counter, Flags, NodeFacts, TcpRow};

    fn snapshot() -> Snapshot {
        let (local, remote) = (IpAddr::from([10, 0, 0, 1]), IpAddr::from([10, 0, 0, 2]));
        Snapshot {
            node: NodeFacts { version: "0".into(), pid: 1, addresses: vec![local.into()] },
            uptime_ms: 5,
            counters: vec![Counter { name: "conn_reset".into(), value: 7 }],
            sockets: Vec::new(),
            connections: vec![ConnectionRow {
                local_addr: local,
                remote_addr: remote,
                tos: 0,
                next_tx: 3,
                next_rx: 3,
                flags: Flags { connected: true, ..Flags::default() },
                transport: "tcp".into(),
                paths: 8,
                peer: "kernel".into(),
                congested: false,
                sent_messages: 0,
                received_messages: 0,
                sent_bytes: 0,
                received_bytes: 0,
            }],
            paths: Vec::new(),
            recv_messages: Vec::new(),
            send_messages: Vec::new(),
            retrans_messages: Vec::new(),
            tcp_sockets: vec![TcpRow {
                local_addr: local,
                local_port: 60531,
                remote_addr: remote,
                remote_port: 16385,
                hdr_rem: 48,
                data_rem: 0,
                last_sent_nxt: 100_200_300,
                last_expected_una: 100_206_541,
                last_seen_una: 100_206_541,
                path: Some(0),
                received_bytes: 0,
                received_messages: 0,
            }],
            ib_connections: None,
        }
    }

    fn with_rdma() -> Snapshot {
        let mut snapshot = snapshot();
        let gid = |last| std::net::Ipv4Addr::new(10, 0, 0, last).to_ipv6_mapped();
        snapshot.ib_connections = Some(vec![RdmaRow {
            local_addr: IpAddr::from([10, 0, 0, 1]),
            remote_addr: IpAddr::from([10, 0, 0, 2]),
            tos: 0,
            sl: 0,
            local_dev: gid(1),
            remote_dev: gid(2),
            send_wr: 256,
            recv_wr: 1024,
            send_sge: 8,
            rdma_mr_max: 4096,
            rdma_mr_size: 257,
            cache_allocs: 0,
        }]);
        snapshot
    }

    // tests [OBS-4]
    #[test]
    fn rdma_connections_look_like_those_of_rds_info() {
        let wanted = "
RDS IB Connections:
      LocalAddr      RemoteAddr  Tos  SL                         LocalDev                        RemoteDev
       10.0.0.1        10.0.0.2    0   0                  ::ffff:10.0.0.1                  ::ffff:10.0.0.2";
        let mut args = Args { rdma: true, ..Args::default() };
        assert_eq!(render(&args, &with_rdma()), format!("{wanted}\n"));
        args.verbose = true;
        let numbers = "  send_wr=256, recv_wr=1024, send_sge=8, rdma_mr_max=4096, rdma_mr_size=257, \
                       cache_allocs=0";
        assert_eq!(render(&args, &with_rdma()), format!("{wanted}{numbers}\n"));
        let all = render(&Args::default(), &with_rdma());
        let node = "\nNode: process 1, addresses: 10.0.0.1\n";
        let first = all.strip_prefix(node).expect("the node");
        assert!(first.starts_with("\nRDS IB Connections:\n"), "first of all: {all}");
        let original = Args { original: true, ..Args::default() };
        assert_eq!(render(&original, &with_rdma()), first);
        assert_eq!(render(&args, &snapshot()), "");
    }

    #[test]
    fn sections_look_like_those_of_rds_info() {
        let args = Args { connections: true, tcp: true, ..Args::default() };
        let wanted = "
TCP Connections:
      LocalAddr LPort      RemoteAddr RPort  HdrRemain DataRemain    SentNxt  ExpectUna    SeenUna
       10.0.0.1 60531        10.0.0.2 16385         48          0  100200300  100206541  100206541

RDS Connections:
      LocalAddr      RemoteAddr  Tos           NextTX           NextRX Flgs
       10.0.0.1        10.0.0.2    0                3                3 --C-
";
        assert_eq!(render(&args, &snapshot()), wanted);
    }

    #[test]
    fn without_letters_every_section_comes_in_order() {
        let text = render(&Args::default(), &snapshot());
        let titles: Vec<&str> = text.lines().filter(|line| line.ends_with(':')).collect();
        assert_eq!(
            titles,
            [
                "TCP Connections:",
                "Counters:",
                "RDS Sockets:",
                "RDS Connections:",
                "Receive Message Queue:",
                "Send Message Queue:",
                "Retransmit Message Queue:",
            ]
        );
        assert!(text.contains("               conn_reset                7\n"));
    }
}
