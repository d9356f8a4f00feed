//! RTRS and RNBD: a bowline server keeps every rule, and so does a scripted one that behaves as a
//! 6.12 kernel does; of each mistake of that server the rule it breaks is found.

mod server;

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

use bowline::rnbd::{ExportServer, Exports, ServerConfig};
use bowline::rtrs::{Engine, PORT};
use bowline::verbs::{SoftConfig, SoftDevice};
use bowline_probe::{Finding, Options, Other, Part, Profile, Report, ask_rtrs};

use server::{MISTAKES, Mistake, Server};

/// Longest wait for an answer that comes, on the slowest machine.
const PATIENCE: Duration = Duration::from_secs(10);
/// The same for one that does not come.
const IMPATIENCE: Duration = Duration::from_millis(700);
/// Rules whose mistakes nobody could make: without them nothing else can be asked.
const FIRST: [&str; 3] = ["RT-4", "RT-31", "NB-14-2"];

fn ip(test: u8, number: u8) -> IpAddr {
    Ipv4Addr::new(127, 92, test, number).into()
}

#[test]
fn a_bowline_server_keeps_every_rule() {
    let server = ip(0, 2);
    let mut exports = Exports::new();
    exports.memory("disk0", 1 << 20, 512).expect("a disk");
    let far = Engine::soft([server]).expect("a device");
    let places = [(server, PORT).into()];
    let _server =
        ExportServer::open(&far, &places, ServerConfig::default(), exports).expect("a server");
    let config = SoftConfig { addrs: vec![ip(0, 1)], ..SoftConfig::default() };
    let device = Arc::new(SoftDevice::open(config).expect("a device"));
    let options = Options { patience: PATIENCE, ..Options::default() };
    for (part, rules) in [(Part::Connections, 10), (Part::Paths, 9), (Part::Disks, 13)] {
        let disk = (part == Part::Disks).then_some("disk0");
        let report = ask_rtrs(device.clone(), ip(0, 1), server, part, disk, &options);
        let Report { profile, findings } = report.expect("it is asked");
        assert_eq!((profile, findings.len()), (Profile::Bowline, rules));
        assert!(findings.iter().all(|finding| finding.answer.is_ok()), "{findings:#?}");
    }
}

fn device(addr: IpAddr) -> Arc<SoftDevice> {
    let config = SoftConfig { addrs: vec![addr], ..SoftConfig::default() };
    Arc::new(SoftDevice::open(config).expect("a device"))
}

/// Asks a scripted server with a mistake.
fn ask(test: u8, mistake: Mistake, part: Part, options: &Options) -> Vec<Finding> {
    let stop = AtomicBool::new(false);
    let mut server = Server::new(device(ip(test, 2)), mistake);
    let client = device(ip(test, 1));
    thread::scope(|scope| {
        scope.spawn(|| server.serve(&stop));
        let report = ask_rtrs(client, ip(test, 1), ip(test, 2), part, Some("disk0"), options);
        stop.store(true, Relaxed);
        report.expect("it is asked").findings
    })
}

#[test]
fn a_server_without_a_mistake_keeps_every_rule() {
    let options = Options { patience: IMPATIENCE * 4, ..Options::default() };
    let broken = MISTAKES.map(|(_, _, rule)| rule);
    for part in [Part::Connections, Part::Paths, Part::Disks] {
        for finding in ask(1, Mistake::None, part, &options) {
            assert!(finding.answer.is_ok(), "{finding:?}");
            let id = finding.id;
            assert!(broken.contains(&id) || FIRST.contains(&id), "{id} without its mistake");
        }
    }
}

#[test]
fn each_mistake_is_found() {
    for (at, some) in MISTAKES.chunks(6).enumerate() {
        thread::scope(|scope| {
            for (test, (mistake, part, rule)) in (10 + 6 * at as u8..).zip(some) {
                scope.spawn(move || {
                    let rules = vec![(*rule).to_owned()];
                    let options = Options { patience: IMPATIENCE, rules, ..Options::default() };
                    let findings = ask(test, *mistake, *part, &options);
                    let is_found =
                        findings.iter().any(|f| matches!(f.answer, Err(Other::Deviates(_))));
                    assert!(is_found, "{mistake:?}: {findings:?}");
                });
            }
        });
    }
}
