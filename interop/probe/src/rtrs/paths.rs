//! Rules of RTRS on a path.

use bowline_wire::rtrs::{Imm, SessionName, emit_info_req, write_hdr};

use super::Scene;
use crate::rule::{Answer, Profile, Rule, deviates};

const EINVAL: u16 = 22;
/// A type of user message that RNBD does not have.
const NO_MESSAGE: [u8; 8] = [99, 0, 0, 0, 0, 0, 0, 0];
/// An immediate of a type that nobody uses.
const UNASSIGNED: u32 = 0x5000_0001;

pub(super) const RULES: [Rule<Scene>; 9] = [
    Rule {
        id: "RT-9",
        asked: "INFO_REQ on a path with all its connections",
        expected: |_| "INFO_RSP, whose descriptors cover all chunks",
        ask: info,
    },
    Rule {
        id: "RT-20-name",
        asked: "a session name with a slash",
        expected: |_| "the end of the path",
        ask: bad_name,
    },
    Rule {
        id: "RT-20-early",
        asked: "INFO_REQ before the last connection",
        expected: |_| "the end of the path",
        ask: early_info,
    },
    Rule {
        id: "RT-6",
        asked: "an INFO_REQ of 100 bytes",
        expected: |_| "the end of the path",
        ask: short_info,
    },
    Rule {
        id: "RT-62",
        asked: "a heartbeat",
        expected: |_| "its acknowledgement, on the same connection",
        ask: heartbeat,
    },
    Rule {
        id: "RT-14",
        asked: "an immediate of the unassigned type 5",
        expected: |_| "nothing; the path stays",
        ask: unassigned,
    },
    Rule {
        id: "RT-46",
        asked: "a request with a message that RNBD does not know",
        expected: |_| "errno EINVAL, with the chunk's new key where keys are refreshed",
        ask: unknown_message,
    },
    Rule {
        id: "RT-44-type",
        asked: "a header of type 9",
        expected: |_| "the end of the path",
        ask: unknown_header,
    },
    Rule {
        id: "RT-45",
        asked: "a header whose message is longer than what is before it",
        expected: |profile| match profile {
            Profile::Bowline => "the end of the path",
            _ => "nothing",
        },
        ask: long_message,
    },
];

fn info(scene: &mut Scene) -> Answer {
    scene.on_path(|_, path| {
        let Some(first) = path.chunks.first() else { return deviates("no chunk") };
        Ok(format!("{} chunks, the first at {:#x}", path.chunks.len(), first.0))
    })
}

/// Makes the connections of a path that the server is to end when INFO_REQ comes.
fn ended_by(scene: &mut Scene, cid_num: u16, made: u16, req: &[u8]) -> Answer {
    let first = bowline_wire::rtrs::ConReq { cid_num, ..scene.client.new_path() };
    let (conn, rsp) = scene.client.accepted(&first)?;
    let mut conns = vec![conn];
    for cid in 1..made {
        let next = bowline_wire::rtrs::ConReq { cid, first: true, ..first };
        conns.push(scene.client.accepted(&next)?.0);
    }
    let answer = scene.client.info(&conns, &rsp, req);
    scene.client.leave(&conns);
    match answer? {
        None => Ok("the end of the path".to_owned()),
        Some(bytes) => deviates(format!("{} bytes of INFO_RSP", bytes.len())),
    }
}

/// An INFO_REQ with any name.
fn named(name: &str) -> Result<Vec<u8>, crate::Other> {
    let honest = SessionName::new("n").map_err(|error| crate::Other::Skipped(error.to_string()))?;
    let mut bytes = emit_info_req(&honest).to_vec();
    for (to, from) in bytes.iter_mut().skip(2).zip(name.bytes()) {
        *to = from;
    }
    Ok(bytes)
}

fn bad_name(scene: &mut Scene) -> Answer {
    ended_by(scene, 2, 2, &named("a/b")?)
}

fn early_info(scene: &mut Scene) -> Answer {
    ended_by(scene, 2, 1, &named("early")?)
}

fn short_info(scene: &mut Scene) -> Answer {
    let whole = named("short")?;
    ended_by(scene, 2, 2, whole.get(..100).unwrap_or_default())
}

fn heartbeat(scene: &mut Scene) -> Answer {
    scene.on_path(|client, path| {
        let Some(conn) = path.conns.first().copied() else { return deviates("no connection") };
        client.imm(conn, Imm::HbMsg.to_u32())?;
        client.immediate(conn, |imm| imm == Imm::HbAck).map(|(imm, _)| imm.to_string())
    })
}

fn unassigned(scene: &mut Scene) -> Answer {
    scene.on_path(|client, path| {
        let Some(conn) = path.conns.first().copied() else { return deviates("no connection") };
        client.imm(conn, UNASSIGNED)?;
        client.imm(conn, Imm::HbMsg.to_u32())?;
        let acked = client.immediate(conn, |imm| imm == Imm::HbAck);
        acked.map(|_| "a heartbeat behind it is acknowledged".to_owned())
    })
}

fn unknown_message(scene: &mut Scene) -> Answer {
    scene.on_path(|client, path| {
        let reply = client.write(path, 0, &NO_MESSAGE)?;
        if reply.errno == EINVAL {
            Ok("errno 22".into())
        } else {
            deviates(format!("errno {}", reply.errno))
        }
    })
}

/// Sends a request that ends its path, and tells whether it does.
fn ends(scene: &mut Scene, off: u32, bytes: &[u8]) -> Result<bool, crate::Other> {
    let path = scene.path()?;
    scene.client.write_request(&path, 0, off, bytes)?;
    let ended = match path.conns.last() {
        Some(conn) => scene.client.ends(*conn),
        None => false,
    };
    scene.client.leave(&path.conns);
    Ok(ended)
}

fn unknown_header(scene: &mut Scene) -> Answer {
    let bytes = [&NO_MESSAGE[..], &[9, 0, 8, 0]].concat();
    match ends(scene, 8, &bytes)? {
        true => Ok("the end of the path".to_owned()),
        false => deviates("the path stays"),
    }
}

fn long_message(scene: &mut Scene) -> Answer {
    let bytes = [&NO_MESSAGE[..], &write_hdr(100)].concat();
    match (ends(scene, 8, &bytes)?, scene.profile) {
        (true, Profile::Bowline) => Ok("the end of the path".to_owned()),
        (false, Profile::Linux612 | Profile::Linux72) => Ok("nothing".to_owned()),
        (true, _) => deviates("the end of the path"),
        (false, _) => deviates("nothing"),
    }
}
