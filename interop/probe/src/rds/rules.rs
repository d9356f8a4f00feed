//! The rules of RDS over TCP that can be asked from outside.

use std::time::{Duration, Instant};

use bowline_wire::rds::{
    Extension, Extensions, Flags, Handshake, Header, MAP_LEN, MapView, PROBE_PORT,
};

use super::{GRACE, Link, Message, Scene, Silence, UNBOUND};
use crate::rule::{Answer, Other, Profile, Rule, deviates};

/// One byte more than a kernel sends.
const TOO_LONG: u32 = (1 << 20) + 1;
/// Between two parts of a message.
const PAUSE: Duration = Duration::from_millis(50);
/// Bytes of the header that over TCP are 0 and not looked at.
const NOT_USED: [std::ops::Range<usize>; 2] = [8..16, 25..32];

pub(super) const RULES: [Rule<Scene>; 24] = [
    Rule {
        id: "R-313",
        asked: "the first message of a connection",
        expected: |_| "the map of the congested ports",
        ask: first_map,
    },
    Rule {
        id: "R-702",
        asked: "the header of that map",
        expected: |_| "8192 bytes, sequence and ports 0, no flag but CONG_BITMAP",
        ask: map_header,
    },
    Rule {
        id: "R-402",
        asked: "a connection from an address that the peer does not know",
        expected: |_| "a probe ping: ports 1 and 0, a number, no payload, its paths",
        ask: probe,
    },
    Rule {
        id: "R-417",
        asked: "the number of paths in that probe",
        expected: |_| "8, or 1",
        ask: paths,
    },
    Rule {
        id: "R-111",
        asked: "the extensions of that probe",
        expected: |profile| match profile {
            Profile::Linux612 => "NPATHS alone",
            Profile::Linux72 => "NPATHS, GEN_NUM, SPORT_IDX",
            Profile::Bowline => "NPATHS, GEN_NUM, SPORT_IDX, BOWLINE",
        },
        ask: probe_extensions,
    },
    Rule {
        id: "R-403",
        asked: "a probe ping of one path",
        expected: |_| "a probe pong with the peer's paths, on the same connection",
        ask: probe_pong,
    },
    Rule {
        id: "R-605",
        asked: "a ping of 100 bytes to port 0",
        expected: |_| "a pong without payload to the port it came from",
        ask: ping,
    },
    Rule {
        id: "R-304",
        asked: "three pings in one write",
        expected: |_| "three pongs in that order, with numbers that follow one another",
        ask: three_pings,
    },
    Rule {
        id: "R-220",
        asked: "a ping in two parts, the second 50 ms later",
        expected: |_| "a pong",
        ask: in_two_parts,
    },
    Rule {
        id: "R-103",
        asked: "a ping with acknowledgement, credit, padding and a wrong checksum",
        expected: |_| "a pong: over TCP nobody looks at them",
        ask: unused_fields,
    },
    Rule {
        id: "R-119",
        asked: "a ping with all flags above RETRANSMITTED",
        expected: |_| "a pong: unknown flags are ignored",
        ask: unknown_flags,
    },
    Rule {
        id: "R-114",
        asked: "a ping with an extension of the unknown type 7",
        expected: |_| "a pong: it is ignored",
        ask: unknown_extension,
    },
    Rule {
        id: "R-113",
        asked: "a ping with an extension that is longer than its area",
        expected: |_| "a pong: the list ends there",
        ask: extension_too_long,
    },
    Rule {
        id: "R-112",
        asked: "a probe ping with two extensions, NPATHS the second",
        expected: |_| "a probe pong",
        ask: two_extensions,
    },
    Rule {
        id: "R-604",
        asked: "a message to a port that nobody has bound",
        expected: |_| "nothing; the connection stays",
        ask: unbound_port,
    },
    Rule {
        id: "R-224",
        asked: "a congestion map of 100 bytes",
        expected: |_| "nothing; the connection stays",
        ask: short_map,
    },
    Rule {
        id: "R-108",
        asked: "a congestion map with a second flag",
        expected: |_| "nothing; the connection stays",
        ask: flagged_map,
    },
    Rule {
        id: "R-603",
        asked: "a ping whose number leaves out a thousand",
        expected: |_| "a pong: gaps are legal",
        ask: gap,
    },
    Rule {
        id: "R-602",
        asked: "a ping with the number of an earlier message, not flagged",
        expected: |_| "a pong: only flagged messages are compared",
        ask: lower_number,
    },
    Rule {
        id: "R-210",
        asked: "a second connection, when one path is agreed",
        expected: |profile| match profile {
            Profile::Linux612 => "it ends, without a byte; the first one serves",
            _ => "no byte on it; the first one serves [R-215]",
        },
        ask: second_connection,
    },
    Rule {
        id: "R-223",
        asked: "a message of 1 MiB and one byte",
        expected: |profile| match profile {
            Profile::Bowline => "the end of the connection",
            _ => "nothing; the connection stays [R-222]",
        },
        ask: too_long,
    },
    Rule {
        id: "R-230",
        asked: "half a message and the end of the connection, then a new one",
        expected: |_| "it serves: the half message is discarded",
        ask: half_message,
    },
    Rule {
        id: "R-102",
        asked: "the headers of all messages of the peer",
        expected: |_| "acknowledgement, credit, padding and checksum 0",
        ask: unused_are_zero,
    },
    Rule {
        id: "R-209",
        asked: "a connection from an address above the peer's",
        expected: |_| "it ends without a byte, and the peer connects in turn",
        ask: knock,
    },
];

/// Waits for a map on the scene's connection, which is kept.
fn map(scene: &mut Scene) -> Result<Message, Other> {
    if let Some(map) = scene.seen.iter().find(|message| message.header.flags == Flags::CONG_BITMAP)
    {
        return Ok(map.clone());
    }
    let mut link = scene.link()?;
    let found = scene.find(&mut link, |message| message.header.is_map());
    scene.link = Some(link);
    found.or_else(|silence| deviates(format!("{} instead of a map", silence.text())))
}

fn first_map(scene: &mut Scene) -> Answer {
    // Nothing was read of the connection by which the peer was reached.
    let mut link = scene.link()?;
    let found = scene.find(&mut link, |_| true);
    scene.link = Some(link);
    match found {
        Ok(first) if first.header.is_map() => Ok(first.line()),
        Ok(first) => deviates(first.line()),
        Err(silence) => deviates(silence.text()),
    }
}

fn map_header(scene: &mut Scene) -> Answer {
    let map = map(scene)?;
    let expected = Header { ack: map.header.ack, csum: map.header.csum, ..Header::map() };
    match MapView::new(&map.payload) {
        Some(_) if map.header == expected => Ok(map.line()),
        _ => deviates(map.line()),
    }
}

/// The peer's first probe.
fn first_probe(scene: &mut Scene) -> Result<Header, Other> {
    if let Some(probe) = scene.probe {
        return Ok(probe);
    }
    let mut link = scene.link()?;
    let found = scene.find(&mut link, Message::is_numbered_probe);
    scene.link = Some(link);
    match found {
        Ok(message) => Ok(message.header),
        Err(Silence::Nothing) if scene.profile() == Profile::Linux612 => Err(Other::Skipped(
            "no probe: such a kernel sends one to an address that it does not know [R-406]".into(),
        )),
        Err(silence) => deviates(format!("{} instead of a probe", silence.text())),
    }
}

fn probe(scene: &mut Scene) -> Answer {
    let probe = first_probe(scene)?;
    let is_right = probe.len == 0 && Handshake::parse(&probe.ext).npaths.is_some();
    if is_right { Ok(probe.to_string()) } else { deviates(probe.to_string()) }
}

fn paths(scene: &mut Scene) -> Answer {
    match Handshake::parse(&first_probe(scene)?.ext).npaths {
        Some(paths @ (1 | 8)) => Ok(paths.to_string()),
        Some(paths) => deviates(paths.to_string()),
        None => deviates("no number"),
    }
}

fn probe_extensions(scene: &mut Scene) -> Answer {
    let probe = first_probe(scene)?;
    let mut extensions = Extensions::new(&probe.ext);
    let names: Vec<&str> = extensions
        .by_ref()
        .map(|extension| match extension {
            Extension::NPaths(_) => "NPATHS",
            Extension::GenNum(_) => "GEN_NUM",
            Extension::SportIdx(_) => "SPORT_IDX",
            Extension::Bowline(_) => "BOWLINE",
            _ => "another",
        })
        .collect();
    let rest = extensions.rest().iter().any(|byte| *byte != 0);
    let came = if rest { format!("{}, unknown bytes", names.join(", ")) } else { names.join(", ") };
    let expected: &[&str] = match scene.profile() {
        Profile::Linux612 => &["NPATHS"],
        Profile::Linux72 => &["NPATHS", "GEN_NUM", "SPORT_IDX"],
        Profile::Bowline => &["NPATHS", "GEN_NUM", "SPORT_IDX", "BOWLINE"],
    };
    if names == expected && !rest { Ok(came) } else { deviates(came) }
}

/// Sends a probe ping with these extensions and waits for its pong.
fn probe_with(scene: &mut Scene, ext: [u8; 16]) -> Result<Message, Other> {
    let mut link = scene.link()?;
    let header = Header { sequence: link.number(), sport: PROBE_PORT, ext, ..Header::default() };
    link.send(&header.to_bytes());
    let found = scene.find(&mut link, |message| message.header.is_probe_pong());
    scene.link = Some(link);
    found.or_else(|silence| deviates(format!("{} instead of a probe pong", silence.text())))
}

fn probe_pong(scene: &mut Scene) -> Answer {
    let ext = Handshake { npaths: Some(1), ..Handshake::default() }.emit();
    let pong = probe_with(scene, ext)?;
    let is_right = pong.header.len == 0 && Handshake::parse(&pong.header.ext).npaths.is_some();
    if is_right { Ok(pong.line()) } else { deviates(pong.line()) }
}

fn two_extensions(scene: &mut Scene) -> Answer {
    // VERSION 3.1, then NPATHS.
    let mut ext = [0; 16];
    ext[..8].copy_from_slice(&[1, 0, 0, 3, 1, 5, 0, 1]);
    probe_with(scene, ext).map(|pong| pong.line())
}

fn ping(scene: &mut Scene) -> Answer {
    let (mut link, port) = (scene.link()?, scene.fresh_port());
    let (sequence, len) = (link.number(), 100);
    let mut bytes = Header { sequence, sport: port, len, ..Header::default() }.to_bytes().to_vec();
    bytes.resize(148, 0x5a);
    link.send(&bytes);
    let found = scene.find(&mut link, |message| message.is_pong(port));
    scene.link = Some(link);
    match found {
        Ok(pong) if pong.header.len == 0 => Ok(pong.line()),
        Ok(pong) => deviates(pong.line()),
        Err(silence) => deviates(silence.text()),
    }
}

fn three_pings(scene: &mut Scene) -> Answer {
    let mut link = scene.link()?;
    let ports: Vec<u16> = (0..3).map(|_| scene.fresh_port()).collect();
    let bytes: Vec<u8> = ports
        .iter()
        .flat_map(|sport| {
            Header { sequence: link.number(), sport: *sport, ..Header::default() }.to_bytes()
        })
        .collect();
    link.send(&bytes);
    let mut pongs = Vec::new();
    while pongs.len() < ports.len() {
        let is_ours = |message: &Message| ports.iter().any(|port| message.is_pong(*port));
        match scene.find(&mut link, is_ours) {
            Ok(pong) => pongs.push((pong.header.dport, pong.header.sequence)),
            Err(silence) => {
                let count = pongs.len();
                return deviates(format!("{} after {count} pongs", silence.text()));
            }
        }
    }
    scene.link = Some(link);
    let in_order = pongs.iter().map(|pong| pong.0).eq(ports.iter().copied());
    let consecutive = pongs.windows(2).all(|pair| pair[1].1 == pair[0].1.wrapping_add(1));
    let numbers: Vec<String> = pongs.iter().map(|pong| pong.1.to_string()).collect();
    let came = format!("numbers {}", numbers.join(", "));
    match (in_order, consecutive) {
        (true, true) => Ok(came),
        (false, _) => deviates(format!("another order, {came}")),
        (true, false) => deviates(came),
    }
}

fn in_two_parts(scene: &mut Scene) -> Answer {
    let (mut link, port) = (scene.link()?, scene.fresh_port());
    let header = Header { sequence: link.number(), sport: port, ..Header::default() };
    let bytes = header.to_bytes();
    let (first, second) = bytes.split_at(20);
    link.send(first);
    // So that the peer reads the parts one by one.
    std::thread::sleep(PAUSE);
    link.send(second);
    let found = scene.find(&mut link, |message| message.is_pong(port));
    scene.link = Some(link);
    match found {
        Ok(pong) => Ok(pong.line()),
        Err(silence) => deviates(silence.text()),
    }
}

/// Sends a ping with a changed header.
fn changed_ping(scene: &mut Scene, edit: impl FnOnce(&mut [u8; 48])) -> Answer {
    let link = scene.link()?;
    scene.ping_with(link, edit).map(|pong| pong.line())
}

fn unused_fields(scene: &mut Scene) -> Answer {
    changed_ping(scene, |bytes| NOT_USED.into_iter().for_each(|range| bytes[range].fill(0x5a)))
}

fn unknown_flags(scene: &mut Scene) -> Answer {
    changed_ping(scene, |bytes| bytes[24] = 0xf8)
}

fn unknown_extension(scene: &mut Scene) -> Answer {
    changed_ping(scene, |bytes| bytes[32] = 7)
}

fn extension_too_long(scene: &mut Scene) -> Answer {
    // VERSION, of which the area has no byte left but its type.
    changed_ping(scene, |bytes| {
        bytes[32..40].copy_from_slice(&[1, 0, 0, 3, 1, 1, 0, 0]);
        bytes[40..].copy_from_slice(&[3, 1, 5, 0, 1, 0, 0, 1]);
    })
}

/// Sends a message, and sees whether the connection still serves.
fn ignored(scene: &mut Scene, header: Header, payload: &[u8]) -> Answer {
    let mut link = scene.link()?;
    link.send(&[&header.to_bytes(), payload].concat());
    scene.serves(link)
}

fn unbound_port(scene: &mut Scene) -> Answer {
    let link = scene.link()?;
    let sequence = link.number();
    scene.link = Some(link);
    let sport = scene.fresh_port();
    let header = Header { sequence, sport, dport: UNBOUND, len: 100, ..Header::default() };
    ignored(scene, header, &[0x5a; 100])
}

fn short_map(scene: &mut Scene) -> Answer {
    ignored(scene, Header { len: 100, ..Header::map() }, &[0; 100])
}

fn flagged_map(scene: &mut Scene) -> Answer {
    let flags = Flags::CONG_BITMAP.with(Flags::RETRANSMITTED);
    ignored(scene, Header { flags, ..Header::map() }, &[0xff; MAP_LEN])
}

fn gap(scene: &mut Scene) -> Answer {
    let link = scene.link()?;
    scene.serves(link)?;
    *scene.next.borrow_mut() += 1000;
    changed_ping(scene, |_| {})
}

fn lower_number(scene: &mut Scene) -> Answer {
    let link = scene.link()?;
    scene.serves(link)?;
    changed_ping(scene, |bytes| bytes[..8].copy_from_slice(&1_u64.to_be_bytes()))
}

fn second_connection(scene: &mut Scene) -> Answer {
    let Some(from) = scene.below else {
        return Err(Other::Skipped("needs a local address below the peer's (-I)".to_owned()));
    };
    // One path is agreed on by now, and it has a connection.
    let first = scene.link()?;
    scene.serves(first)?;
    if let Some(mut second) = scene.dial(from)? {
        // Others than 6.12 may keep it, silent.
        let until = match scene.profile() {
            Profile::Linux612 => scene.until(),
            _ => Instant::now() + GRACE,
        };
        match second.next(until) {
            Err(Silence::Nothing) if scene.profile() == Profile::Linux612 => {
                return deviates("the second one stays open");
            }
            Err(_) => {}
            Ok(message) => return deviates(format!("on the second one, {}", message.line())),
        }
    }
    let first = scene.link()?;
    scene.serves(first).map(|_| "nothing on the second one, the first one serves".to_owned())
}

fn too_long(scene: &mut Scene) -> Answer {
    let mut link = scene.link()?;
    let sport = scene.fresh_port();
    let sequence = link.number();
    let header = Header { sequence, sport, dport: UNBOUND, len: TOO_LONG, ..Header::default() };
    link.send(&header.to_bytes());
    link.send(&vec![0; TOO_LONG as usize]);
    match (scene.serves(link), scene.profile()) {
        (Err(Other::Deviates(came)), Profile::Bowline) if came.starts_with("the end") => {
            Ok("the end of the connection".to_owned())
        }
        (Ok(came), Profile::Bowline) => deviates(came),
        (answer, _) => answer,
    }
}

fn half_message(scene: &mut Scene) -> Answer {
    let mut link = scene.link()?;
    let sport = scene.fresh_port();
    let sequence = link.number();
    let header = Header { sequence, sport, dport: UNBOUND, len: 1000, ..Header::default() };
    link.send(&[&header.to_bytes()[..], &[0x5a; 10]].concat());
    link.finish();
    drop(link);
    let link = scene.open()?;
    scene.serves(link)
}

fn unused_are_zero(scene: &mut Scene) -> Answer {
    if scene.seen.is_empty() {
        let link = scene.link()?;
        scene.serves(link)?;
    }
    let uses = |message: &&Message| {
        NOT_USED.into_iter().any(|range| message.raw[range].iter().any(|byte| *byte != 0))
    };
    match scene.seen.iter().find(uses) {
        None => Ok(format!("{} messages have", scene.seen.len())),
        Some(message) => deviates(message.line()),
    }
}

fn knock(scene: &mut Scene) -> Answer {
    let Some(at) = scene.above else {
        return Err(Other::Skipped("needs a local address above the peer's (-I)".to_owned()));
    };
    let mut link = connected_in_turn(scene, at)?;
    let port = scene.fresh_port();
    let header = Header { sequence: link.number(), sport: port, ..Header::default() };
    link.send(&header.to_bytes());
    match scene.find(&mut link, |message| message.is_pong(port)) {
        Ok(_) => Ok(format!("a connection from its port {}, which serves", link.peer_port())),
        Err(silence) => deviates(format!("it connects, but then {}", silence.text())),
    }
}

fn connected_in_turn(scene: &mut Scene, at: std::net::IpAddr) -> Result<Link, Other> {
    let link = scene.dialled(at)?;
    if link.peer_port() == bowline_wire::rds::TCP_PORT {
        return deviates("a connection from port 16385");
    }
    Ok(link)
}
