//! The tree against files captured from Linux 6.12.

use std::{net::IpAddr, sync::Mutex, time::Duration};

use bowline_ctl::{Sys, Tree};
use bowline_rtrs::Policy;

use super::*;

const CLIENT: &str = include_str!("../../testdata/sysfs-client.txt");
const SERVER: &str = include_str!("../../testdata/sysfs-server.txt");

#[derive(Default)]
struct Fake {
    policy: Mutex<Policy>,
    attempts: Mutex<i16>,
    done: Mutex<Vec<String>>,
}

fn address(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn io() -> IoStats {
    IoStats {
        reads: 261,
        read_bytes: 16_798_184,
        writes: 256,
        write_bytes: 16_785_408,
        inflight: 0,
    }
}

/// The device of the first path tells about the network.
fn way() -> PathStats {
    PathStats {
        peer: address("10.99.0.12"),
        queue_pairs: 2,
        round_trip: Some(Duration::from_micros(125)),
        least_round_trip: Duration::from_nanos(99_900),
        window: Some(65_536),
        in_flight: 4_096,
        rate: None,
        lost_gaps: 5,
        lost_timeouts: 1,
        congestion_losses: 2,
        resent: 7,
        cnps_received: 3,
        cnps_sent: 4,
    }
}

fn id(slot: u16) -> bowline_rtrs::PathId {
    bowline_rtrs::PathId { slot, generation: 0 }
}

impl ClientSession for Fake {
    fn name(&self) -> String {
        "s1".to_owned()
    }

    fn paths(&self) -> Vec<ClientPath> {
        let stats = |io| ClientStats {
            io,
            migration_from: vec![0],
            migration_to: vec![0],
            ..ClientStats::default()
        };
        let path = |slot: u16, latency_ns, io| ClientPath {
            id: id(slot),
            src: address(&format!("10.99.{slot}.11")),
            dst: address(&format!("10.99.{slot}.12")),
            connected: true,
            device: format!("rxe{slot}"),
            port: 1,
            latency_ns,
            stats: stats(io),
            network: (slot == 0).then(way),
        };
        vec![path(0, 3_017_871, io()), path(1, 2_356_179, IoStats::default())]
    }

    fn policy(&self) -> Policy {
        *self.policy.lock().unwrap()
    }

    fn set_policy(&self, policy: Policy) {
        *self.policy.lock().unwrap() = policy;
    }

    fn max_reconnects(&self) -> i16 {
        *self.attempts.lock().unwrap()
    }

    fn set_max_reconnects(&self, attempts: i16) {
        *self.attempts.lock().unwrap() = attempts;
    }

    fn add_path(&self, path: bowline_ctl::PathSpec) -> Result<(), Errno> {
        self.done.lock().unwrap().push(format!("add {path}"));
        Err(Errno::EEXIST)
    }

    fn command(&self, path: bowline_rtrs::PathId, command: PathCommand) -> Result<(), Errno> {
        self.done.lock().unwrap().push(format!("{command:?} {}", path.slot));
        Ok(())
    }

    fn reset(&self, path: bowline_rtrs::PathId, what: Stats) {
        self.done.lock().unwrap().push(format!("reset {what:?} {}", path.slot));
    }
}

impl ServerSessions for Fake {
    fn sessions(&self) -> Vec<ServerSession> {
        let path = |slot: u16, io| ServerPath {
            id: id(slot),
            client: address(&format!("10.99.{slot}.11")),
            server: address(&format!("10.99.{slot}.12")),
            device: format!("rxe{slot}"),
            port: 1,
            io,
            completions: Completions { max: 3, total: 9, calls: 4 },
            network: (slot == 0).then(way),
        };
        let paths = vec![path(0, io()), path(1, IoStats::default())];
        vec![ServerSession { name: "s1".to_owned(), paths }]
    }

    fn disconnect(&self, path: bowline_rtrs::PathId) -> Result<(), Errno> {
        self.done.lock().unwrap().push(format!("close {}", path.slot));
        Ok(())
    }

    fn reset(&self, path: bowline_rtrs::PathId, what: Stats) {
        ClientSession::reset(self, path, what);
    }
}

fn fake() -> Arc<Fake> {
    let fake = Fake::default();
    *fake.attempts.lock().unwrap() = -1;
    Arc::new(fake)
}

fn tree(fake: &Arc<Fake>, files: Files) -> Tree {
    let session: Arc<dyn ClientSession> = Arc::<Fake>::clone(fake);
    let server: Arc<dyn ServerSessions> = Arc::<Fake>::clone(fake);
    let parameters = ServerParameters {
        always_invalidate: true,
        max_chunk_size: 131_072,
        sess_queue_depth: 512,
    };
    Sys::new()
        .class("rtrs-client", client_node(move || vec![Arc::clone(&session)], files))
        .class("rtrs-server", server_node(server, files))
        .module("rtrs_server", Arc::new(parameters))
        .tree()
}

/// Returns a section of a capture, as [`Tree::listing`] prints it.
fn section(capture: &str, name: &str) -> String {
    let start = format!("== /sys{name}\n");
    let lines = capture.split_once(&start).unwrap().1.lines();
    let lines = lines.take_while(|line| !line.starts_with("== "));
    lines.map(|line| line.replace(" /sys/", " /") + "\n").collect()
}

#[test]
fn files_modes_links_and_texts_are_those_of_linux() {
    // tests [RS-32] [RS-33] [RS-36] [RS-40] [RS-41] [RS-43]
    let tree = tree(&fake(), Files::Linux612);
    for (capture, path) in [
        (CLIENT, "/class/rtrs-client"),
        (CLIENT, "/class/rtrs-client/s1"),
        (SERVER, "/class/rtrs-server"),
        (SERVER, "/class/rtrs-server/s1"),
        (SERVER, "/module/rtrs_server/parameters"),
    ] {
        assert_eq!(tree.listing(path).unwrap(), section(capture, path), "{path}");
    }
}

#[test]
fn files_of_older_kernels_stand_beside_them() {
    // tests [RS-44] [RS-46]
    let tree = tree(&fake(), Files::All);
    let path = "/class/rtrs-client/s1/paths/ip:10.99.0.11@ip:10.99.0.12/stats";
    let read = |name: &str| tree.read(&format!("{path}/{name}")).unwrap().to_string();
    let rows = read("rdma_lat");
    let rows: Vec<&str> = rows.lines().collect();
    assert_eq!(rows.len(), 19);
    assert_eq!((rows[0], rows[16]), ("1 ms: 0 0", "65536 ms: 0 0"));
    assert_eq!((rows[17], rows[18]), (">= 65536 ms: 0 0", "maximum ms: 0 0"));
    assert_eq!(read("wc_completion"), "0 0\n");
    assert_eq!(read("cpu_migration"), "from: 0\nto: 0\n");
    let policy = tree.read("/class/rtrs-client/s1/mp_policy").unwrap();
    assert_eq!(policy.to_string(), "min-inflight (MI: 1)\n");
    let path = "/class/rtrs-server/s1/paths/ip:10.99.0.11@ip:10.99.0.12/stats";
    let read = |name: &str| tree.read(&format!("{path}/{name}")).unwrap().to_string();
    assert_eq!(read("rdma"), "261 16798184 256 16785408 0\n");
    assert_eq!(read("wc_completion"), "3 9 4\n");
}

#[test]
fn the_network_is_told_of_where_the_device_knows_it() {
    // tests [RS-50]
    let fake = fake();
    for (files, client_has, server_has) in [(Files::All, 9, 4), (Files::Linux612, 5, 1)] {
        let tree = tree(&fake, files);
        for (class, has) in [("client", client_has), ("server", server_has)] {
            let stats = |slot: u16| {
                format!("/class/rtrs-{class}/s1/paths/ip:10.99.{slot}.11@ip:10.99.{slot}.12/stats")
            };
            let listed = |slot| tree.listing(&stats(slot)).unwrap().matches(" /class").count();
            if files == Files::All {
                let value = tree.read(&format!("{}/network", stats(0))).unwrap();
                assert_eq!(value.to_string(), "125 99 65536 4096 0 5 1 2 7 3 4\n");
                let json = value.to_json().to_string();
                assert!(json.contains(r#""round_trip_usec":125"#), "{json}");
                assert!(json.contains(r#""cnps_sent":4"#), "{json}");
                let write = tree.write(&format!("{}/network", stats(0)), "1");
                assert_eq!(write, Err(Errno::EACCES));
                assert_eq!(listed(1) + 1, listed(0));
            }
            assert!(tree.read(&format!("{}/network", stats(1))).is_err());
            assert_eq!(listed(0), has, "{class} {}", tree.listing(&stats(0)).unwrap());
        }
    }
}

#[test]
fn commands_reach_the_session_and_mistakes_do_not() {
    // tests [RS-33] [RS-34] [RS-35] [RS-36] [RS-37] [RS-38] [RS-39] [RS-40] [RS-41] [RS-43]
    let fake = fake();
    let tree = tree(&fake, Files::All);
    let client = "/class/rtrs-client/s1";
    let write = |name: &str, value: &str| tree.write(&format!("{client}/{name}"), value);
    assert_eq!(write("max_reconnect_attempts", "7\n"), Ok(()));
    assert_eq!(fake.max_reconnects(), 7);
    for (value, errno) in [
        ("-2", Errno::EINVAL),
        ("10000", Errno::EINVAL),
        ("x", Errno::EINVAL),
        ("", Errno::EINVAL),
        (" 7", Errno::EINVAL),
        ("5 ", Errno::EINVAL),
        ("5\n\n", Errno::EINVAL),
        ("4294967296", Errno::ERANGE),
        ("99999999999999999999", Errno::ERANGE),
    ] {
        assert_eq!(write("max_reconnect_attempts", value), Err(errno), "{value}");
    }
    assert_eq!(write("mpath_policy", "rr"), Ok(()));
    assert_eq!(write("mp_policy", "min"), Err(Errno::EINVAL));
    assert_eq!(fake.policy(), Policy::RoundRobin);
    assert_eq!(write("add_path", "ip:10.0.0.1,ip:10.0.0.2\n"), Err(Errno::EEXIST));
    assert_eq!(write("add_path", "tcp:10.0.0.1"), Err(Errno::EINVAL));
    assert_eq!(write("add_path", "gid:fe80::1"), Err(Errno::ENODEV));

    let path = "paths/ip:10.99.1.11@ip:10.99.1.12";
    for name in ["reconnect", "disconnect", "remove_path", "stats/rdma", "stats/reset_all"] {
        assert_eq!(write(&format!("{path}/{name}"), "1\n"), Ok(()), "{name}");
        assert_eq!(write(&format!("{path}/{name}"), "2"), Err(Errno::EINVAL), "{name}");
        assert_eq!(write(&format!("{path}/{name}"), ""), Err(Errno::EINVAL), "{name}");
    }
    assert_eq!(write(&format!("{path}/stats/reset_all"), "0"), Ok(()));
    assert_eq!(write(&format!("{path}/stats/rdma"), "0"), Err(Errno::EINVAL));
    assert_eq!(write(&format!("{path}/state"), "1"), Err(Errno::EACCES));
    let server = "/class/rtrs-server/s1/paths/ip:10.99.0.11@ip:10.99.0.12";
    for side in ["client", "server"] {
        let uevent = format!("/class/rtrs-{side}/s1/uevent");
        assert_eq!(tree.write(&uevent, "add"), Err(Errno::EINVAL), "{side}");
    }
    assert_eq!(tree.write(&format!("{server}/disconnect"), "1"), Ok(()));
    assert_eq!(tree.write(&format!("{server}/disconnect"), "yes"), Err(Errno::EINVAL));
    assert_eq!(tree.write(&format!("{server}/stats/rdma"), "1"), Ok(()));
    assert_eq!(
        *fake.done.lock().unwrap(),
        [
            "add ip:10.0.0.1@ip:10.0.0.2",
            "Reconnect 1",
            "Disconnect 1",
            "Remove 1",
            "reset Rdma 1",
            "reset All 1",
            "reset All 1",
            "close 0",
            "reset Rdma 0",
        ]
    );
}
