//! Rules about requests to connect.

use bowline_wire::rtrs::{ConReq, PORT, Uuid};

use super::Scene;
use super::client::Outcome;
use crate::rule::{Answer, Rule, deviates};

const ENXIO: u16 = 6;
const ECONNRESET: u16 = 104;
/// A port at which nobody should listen.
const UNUSED: u16 = 64_999;

pub(super) const RULES: [Rule<Scene>; 10] = [
    Rule {
        id: "RT-4",
        asked: "the first connection of a new session",
        expected: |_| "it is accepted with CON_RSP: magic, version 2, numbers that fit together",
        ask: new_session,
    },
    Rule {
        id: "RT-28-magic",
        asked: "another magic number",
        expected: |_| "ECONNRESET",
        ask: |scene| refused(scene, ECONNRESET, |bytes| bytes[2] ^= 1),
    },
    Rule {
        id: "RT-28-major",
        asked: "major version 3",
        expected: |_| "ECONNRESET",
        ask: |scene| refused(scene, ECONNRESET, |bytes| bytes[5] = 3),
    },
    Rule {
        id: "RT-28-minor",
        asked: "minor version 7",
        expected: |_| "it is accepted",
        ask: |scene| accepted(scene, |bytes| bytes[4] = 7),
    },
    Rule {
        id: "RT-28-reserved",
        asked: "reserved bits and bytes that are not 0",
        expected: |_| "it is accepted",
        ask: |scene| {
            accepted(scene, |bytes| {
                bytes[44] |= 0xfe;
                bytes[46..].fill(0x5a);
            })
        },
    },
    Rule {
        id: "RT-28-count",
        asked: "a path of 4097 connections",
        expected: |_| "ECONNRESET",
        ask: |scene| {
            refused(scene, ECONNRESET, |bytes| {
                bytes[8..10].copy_from_slice(&4097_u16.to_le_bytes());
            })
        },
    },
    Rule {
        id: "RT-28-cid",
        asked: "connection 2 of 2",
        expected: |_| "ECONNRESET",
        ask: |scene| refused(scene, ECONNRESET, |bytes| bytes[6] = 2),
    },
    Rule {
        id: "RT-28-first",
        asked: "an unknown session that may not be new",
        expected: |_| "ENXIO",
        ask: |scene| refused(scene, ENXIO, |bytes| bytes[44] = 0),
    },
    Rule {
        id: "RT-28-twice",
        asked: "a connection of a path that it has already",
        expected: |_| "ECONNRESET",
        ask: twice,
    },
    Rule {
        id: "RT-31",
        asked: "a port at which nobody listens",
        expected: |_| "a refusal by the connection manager, reason 8",
        ask: nobody_listens,
    },
];

fn describe(outcome: &Outcome) -> String {
    match outcome {
        Outcome::Accepted(_, rsp) => format!("accepted: {:?}", rsp.geometry),
        Outcome::Refused(errno) => format!("errno {errno}"),
        Outcome::Otherwise(came) => came.clone(),
    }
}

/// Asks with a request that was changed.
fn ask(scene: &mut Scene, edit: impl FnOnce(&mut [u8])) -> Result<Outcome, crate::Other> {
    let mut bytes = scene.client.new_path().emit();
    edit(&mut bytes);
    let outcome = scene.client.connect(PORT, &bytes)?;
    if let Outcome::Accepted(conn, _) = outcome {
        scene.client.leave(&[conn]);
    }
    Ok(outcome)
}

fn accepted(scene: &mut Scene, edit: impl FnOnce(&mut [u8])) -> Answer {
    match ask(scene, edit)? {
        outcome @ Outcome::Accepted(..) => Ok(describe(&outcome)),
        outcome => deviates(describe(&outcome)),
    }
}

fn refused(scene: &mut Scene, errno: u16, edit: impl FnOnce(&mut [u8])) -> Answer {
    match ask(scene, edit)? {
        Outcome::Refused(came) if came == errno => Ok(format!("errno {came}")),
        outcome => deviates(describe(&outcome)),
    }
}

fn new_session(scene: &mut Scene) -> Answer {
    accepted(scene, |_| {})
}

fn twice(scene: &mut Scene) -> Answer {
    let req = scene.client.new_path();
    let (conn, _) = scene.client.accepted(&req)?;
    let other = ConReq { path: Uuid(req.path.0), ..req };
    let outcome = scene.client.connect(PORT, &other.emit())?;
    if let Outcome::Accepted(second, _) = outcome {
        scene.client.leave(&[second]);
    }
    scene.client.leave(&[conn]);
    match outcome {
        Outcome::Refused(ECONNRESET) => Ok(describe(&outcome)),
        outcome => deviates(describe(&outcome)),
    }
}

fn nobody_listens(scene: &mut Scene) -> Answer {
    let req = scene.client.new_path();
    let outcome = scene.client.connect(UNUSED, &req.emit())?;
    let came = describe(&outcome);
    if came.contains("(8)") { Ok(came) } else { deviates(came) }
}
