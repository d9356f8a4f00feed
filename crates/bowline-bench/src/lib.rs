//! `bowline bench`: measures bowline beside bare sockets and other message libraries, in one run on
//! one machine, and says whether the ratios that must be reached are reached. There are four
//! suites: `rds` for messages, `roce` for RDMA verbs over RoCEv2 in userspace, `rtrs` and `rnbd`
//! for remote storage over these. They measure what processors can do over loopback; a fifth,
//! `net`, measures what is made of a network with slow ports.
//!
//! ```text
//!   bench (parent) --starts--> receiver (CPU 1)  <--- messages ---  sender (CPU 0)
//!     |  ready / go / stop         |  result: messages and CPU time of one window
//!     '--- /proc/stat: what did others use meanwhile?
//! ```
//!
//! A *cell* is one figure at one size, a *round* measures everything once: bare sockets first,
//! bowline, the other libraries, and the bare sockets again. Ratios are formed within a round, so
//! that a machine that is slow today is slow for everybody. Rates of remote storage are taken in
//! turns of some milliseconds, so that a machine that is slow for a second is slow for everybody.
//!
//! [`run`] runs in the process of `bowline bench`, or of the small program `bowline-bench`, which
//! the tests and `cargo xtask bench` run. Both sides of a measurement are further processes of the
//! same program. Other message libraries are opened when they are installed, and only here: no
//! other command of bowline does.

mod anchors;
mod args;
mod block_cells;
mod bowline_cells;
mod cell;
mod costs;
mod doors;
mod engine;
mod head;
mod host_cells;
mod json;
mod net;
mod nodes;
mod page;
mod payload;
mod peers;
mod plan;
mod recorded;
mod report;
mod results;
mod roce_cells;
mod role;
mod run;
mod stats;
mod svg;
mod sys;
mod targets;
mod turns;

use std::path::Path;

pub use args::Args;
use args::{Job, Options, PeerChoice, Suite};
use cell::{Cell, Subject};
use peers::{Found, Peers};
use plan::Setting;
use role::{Side, Sides};

/// The argument that makes this program one side of a measurement.
pub(crate) const ROLE_ARGUMENT: &str = "__role";

/// Runs `bowline bench` and returns the exit status: 0 when every target is met, 1 when one is not,
/// 3 when some are undecided, 2 when the run was not possible.
///
/// The program starts itself again as the sides of a measurement, so its `main` must call [`side`].
pub fn run(args: Args) -> i32 {
    let done = args.job().and_then(|job| match job {
        Job::Suite(suite, options) => run_suite(suite, &options),
        Job::Net(options) => net::run(&options),
        Job::Report(options) => page::run(&options),
    });
    done.unwrap_or_else(|why| {
        eprintln!("bowline bench: {why}");
        2
    })
}

/// Is one side of a measurement, if this process was started as one, and returns the exit status.
pub fn side() -> Option<i32> {
    // As a part of the command, the bench is reached by the argument `bench`.
    let mut words = std::env::args_os().skip(1).skip_while(|word| word == "bench");
    let is_side = words.next().is_some_and(|word| word == ROLE_ARGUMENT);
    let words = is_side.then(|| words.map(|word| word.to_string_lossy().into_owned()));
    words.map(|words| role_main(&words.collect::<Vec<_>>()))
}

fn role_main(args: &[String]) -> i32 {
    let result = role::Role::start(args).and_then(|role| {
        let (subject, kind) = (role.cell.subject, role.cell.kind);
        match (sides(&role.cell), role.side) {
            (Some(Sides(rx, _)), Side::Rx) => rx(role),
            (Some(Sides(_, tx)), Side::Tx) => tx(role),
            (None, _) => Err(format!("{} has no cell {}", subject.name(), kind.name())),
        }
    });
    match result {
        Ok(()) => 0,
        Err(why) => {
            role::say(&format!("error {why}"));
            1
        }
    }
}

/// The sides of a cell, if its subject has such a one.
fn sides(cell: &Cell) -> Option<Sides> {
    match cell.subject {
        subject if subject.is_bowline() => bowline_cells::sides(cell),
        Subject::BowlineRdma => bowline_cells::sides(cell),
        Subject::Zmq | Subject::Nano => peers::sides(cell),
        Subject::Futex => anchors::sides(cell),
        subject if subject.is_of_host() => host_cells::sides(cell),
        Subject::Roce => roce_cells::sides(cell),
        subject if subject.is_block() => block_cells::sides(cell),
        _ => anchors::sides(cell),
    }
}

fn find_peers(suite: Suite, options: &Options) -> Peers {
    let mut peers = match &options.peers {
        PeerChoice::Auto => Peers::find(|s| suite.has_peer(s)),
        PeerChoice::List(list) => Peers::find(|s| list.contains(&s)),
    };
    if suite == Suite::Doors {
        peers.add_doors();
    }
    peers
}

fn run_suite(suite: Suite, options: &Options) -> Result<i32, String> {
    if options.host {
        bowline_host::preload_library()?;
    }
    let head = head::Head::look();
    let [anchor_cc, bowline_cc] = Setting::congestion(options, &head.system_cc, &head.available_cc);
    if !head.available_cc.is_empty() && !head.available_cc.contains(&anchor_cc) {
        let known = head.available_cc.join(", ");
        return Err(format!("--cc {anchor_cc}: this kernel has {known}"));
    }
    let peers = find_peers(suite, options);
    let setting = Setting {
        anchor_cc,
        bowline_cc,
        system_cc: head.system_cc.clone(),
        peers: Subject::ALL.into_iter().filter(|s| peers.has(*s)).collect(),
        nodes: nodes::free(),
    };
    if suite == Suite::Doors && setting.peers.is_empty() {
        println!("nothing can be measured:");
        peer_notes(&peers).iter().for_each(|line| println!("{line}"));
        return Ok(0);
    }
    let blocks = plan::plan(suite, options, &setting);
    if options.list {
        blocks.iter().for_each(|block| println!("{:18} {}", block.id, block.title));
        return Ok(0);
    }
    if blocks.is_empty() {
        return Err("no cell has this name; see --list".into());
    }

    head.lines().iter().for_each(|line| println!("{line}"));
    let mut notes = match suite {
        Suite::Rds => conditions(options, &setting),
        Suite::Roce => roce_conditions(options, &setting),
        Suite::Rtrs | Suite::Rnbd => block_conditions(options, &setting),
        Suite::Doors => door_conditions(options, &head.system_cc),
    };
    notes.extend(peer_notes(&peers));
    notes.iter().for_each(|line| println!("{line}"));
    let costs = costs::measure();
    print!("{}", report::costs_table(&costs));

    if suite == Suite::Doors {
        doors::keep_mounts();
    }
    let launcher = run::Launcher::new()?;
    let engine = engine::Engine::new(options, &launcher, &peers, &head.system_cc);
    let outcome = engine.run(&blocks);
    if outcome.rounds < options.rounds {
        let line = format!("stopped after {} rounds: the time was up", outcome.rounds);
        println!("\n{line}");
        notes.push(line);
    }
    notes.extend(outcome.notes.iter().map(|note| format!("best way of {note}")));
    for block in &blocks {
        print!("{}", report::block_table(block, &outcome.results));
        print!("{}", report::wire_table(block, &outcome.results));
        print!("{}", report::requests_table(block, &outcome.results));
    }
    print!("{}", report::legend(&blocks));
    outcome.notes.iter().for_each(|note| println!("  best way of {note}"));
    let missing = |label: &str| match Subject::from_label(label) {
        Some(s) if s.is_peer() || s.is_door() => peers.missing(s).map(str::to_owned),
        _ => None,
    };
    if let Some(warning) = report::warning(&outcome.results) {
        println!("\n{warning}");
    }
    let targets = match options.as_targets_say() {
        true => targets::of(suite),
        false => &[],
    };
    let verdicts = targets::judge(targets, &outcome.results, &missing);
    if !targets.is_empty() {
        print!("{}", report::targets_table(&verdicts));
    }

    let page = || svg::page(&head, &notes, &blocks, &outcome.results, &verdicts);
    let data = || {
        let all = report::json(&head, &costs, &notes, &outcome.results, &verdicts);
        json::lines(&all, 2) + "\n"
    };
    if let Some(path) = &options.json {
        write(path, &data())?;
    }
    if let Some(path) = &options.svg {
        write(path, &page())?;
    }
    if let Some(dir) = &options.save {
        std::fs::create_dir_all(dir).map_err(|e| format!("creating {}: {e}", dir.display()))?;
        let name = recorded::file_name(suite, &head.date, &head.commit);
        write(&dir.join(name), &data())?;
    }
    Ok(targets::exit_status(verdicts.iter().map(|o| &o.verdict)))
}

fn write(path: &Path, text: &str) -> Result<(), String> {
    if path == Path::new("-") {
        print!("{text}");
        return Ok(());
    }
    std::fs::write(path, text).map_err(|e| format!("writing {}: {e}", path.display()))?;
    println!("wrote {}", path.display());
    Ok(())
}

fn pinning(options: &Options) -> String {
    match options.pin {
        Some((rx, tx)) => format!("receiver on CPU {rx}, sender on CPU {tx}"),
        None => "not bound to CPUs".into(),
    }
}

/// The settings of RoCEv2 and its anchors.
fn roce_conditions(options: &Options, setting: &Setting) -> Vec<String> {
    let cc = &setting.anchor_cc;
    let (rx, tx) = nodes::free_roce();
    let mut lines = vec![
        format!(
            "anchors: {cc}; {}; window {:?}; {}",
            pinning(options),
            options.window,
            anchors::gso_abilities(),
        ),
        format!(
            "bowline: soft devices {rx} and {tx}, poll {}, at most {} packets unacknowledged, \
             as the UDP anchor",
            options.poll.name(),
            anchors::gso_window(),
        ),
        "C11, passes of the checksum per byte: one a side, as the ordinary tests assert".into(),
    ];
    if let Some(mtu) = options.mtu {
        lines.push(format!("all cells at path MTU {mtu}"));
    }
    if options.drop_one_in > 0 {
        lines.push(format!("each side loses one packet in {} it receives", options.drop_one_in));
    }
    if !options.as_targets_say() {
        lines.push("targets are not judged: they are for other settings".into());
    }
    if cc == "bbr" {
        lines.push(
            "V2: the anchor runs with bbr, which slows it here; V2 should be 0.9 then".into(),
        );
    }
    lines
}

/// The settings of reads and writes of a store.
fn block_conditions(options: &Options, setting: &Setting) -> Vec<String> {
    let (rx, tx) = nodes::free_roce();
    let settings = format!(
        "{}; window {:?}, requests per second in turns of which {:?} count",
        pinning(options),
        options.window,
        turns::COUNTED
    );
    vec![
        format!(
            "everybody: {settings}; the store is memory, filled beforehand; rr-tcp: {}",
            setting.anchor_cc
        ),
        format!("bowline: soft devices {rx} and {tx}, default settings but for the polling"),
        format!("bowline, requests larger than a default chunk: {}", block_cells::large_chunks()),
    ]
}

/// The settings of fio and of what shows it a disk.
fn door_conditions(options: &Options, system_cc: &str) -> Vec<String> {
    vec![format!(
        "everybody: not bound to CPUs, default settings; TCP: {system_cc}; fio asks for {:?} at random \
         places of a disk of {} in memory that was written before",
        options.window,
        plan::bytes(options.disk as usize),
    )]
}

/// The settings everybody runs with.
fn conditions(options: &Options, setting: &Setting) -> Vec<String> {
    let pin = pinning(options);
    let bowline_cc = match setting.bowline_cc.as_str() {
        "" => "its own choice",
        name => name,
    };
    let (rx, tx) = setting.nodes;
    let mut lines = vec![
        format!("anchors: {}; {pin}; window {:?}", setting.anchor_cc, options.window),
        format!(
            "bowline: nodes {rx} and {tx}, congestion control {bowline_cc}, poll {}, paths {}, \
             send and receive buffer {}",
            options.poll.name(),
            if options.paths == 0 { "default".to_owned() } else { options.paths.to_string() },
            plan::bytes(plan::BUFFER),
        ),
    ];
    if options.host {
        let nodes = "nodes in this process, not bound to CPUs, poll adaptive";
        lines.push(format!(
            "programs: {nodes}; buffers of 8 MiB as bowline, but host-one has those it finds"
        ));
    }
    lines
}

fn peer_notes(peers: &Peers) -> Vec<String> {
    let note = |(subject, found): &(Subject, Found)| match found {
        Found::Inside { version } | Found::Program { version, .. } => {
            format!("peer {}: {version}", subject.name())
        }
        Found::Missing { why } => format!("peer {}: skipped, {why}", subject.name()),
    };
    peers.list().iter().map(note).collect()
}
