//! Rules of RNBD. Nothing is written; the one disk that is named is opened to be read.

use bowline_wire::rnbd::{
    Access, Io, IoFlags, OP_READ, OPEN_RSP_LEN, OpenRsp, SESS_INFO_LEN, emit_close, emit_open,
    emit_sess_info, parse_sess_info_rsp,
};

use super::Scene;
use super::client::{Client, Path};
use crate::rule::{Answer, Other, Rule, deviates};

const ENOENT: u16 = 2;
const EIO: u16 = 5;
const EINVAL: u16 = 22;
const ENOTCONN: u16 = 107;
/// A disk that no server should have.
const NO_DISK: &str = "bowline-probe-no-such-disk";
/// A number that no server gives a device.
const NO_DEVICE: u32 = 0x7fff_fff0;

pub(super) const RULES: [Rule<Scene>; 13] = [
    Rule {
        id: "NB-14-2",
        asked: "SESS_INFO of version 2",
        expected: |_| "version 2",
        ask: |scene| version(scene, 2, 2),
    },
    Rule {
        id: "NB-14-9",
        asked: "SESS_INFO of version 9",
        expected: |_| "version 2",
        ask: |scene| version(scene, 9, 2),
    },
    Rule {
        id: "NB-14-1",
        asked: "SESS_INFO of version 1",
        expected: |_| "version 1",
        ask: |scene| version(scene, 1, 1),
    },
    Rule {
        id: "NB-22",
        asked: "a message of type 77",
        expected: |_| "errno EINVAL",
        ask: |scene| {
            errno(scene, EINVAL, |client, path| {
                client.write(path, 0, &[77, 0, 0, 0]).map(|r| r.errno)
            })
        },
    },
    Rule {
        id: "NB-17-missing",
        asked: "an OPEN of a disk that does not exist",
        expected: |_| "errno ENOENT",
        ask: |scene| {
            errno(scene, ENOENT, |client, path| {
                open(client, path, NO_DISK, Access::Ro).map(|r| r.0)
            })
        },
    },
    Rule {
        id: "NB-17-dots",
        asked: "an OPEN of ../disk",
        expected: |_| "errno EINVAL",
        ask: |scene| {
            errno(scene, EINVAL, |client, path| {
                open(client, path, "../disk", Access::Ro).map(|r| r.0)
            })
        },
    },
    Rule {
        id: "NB-20",
        asked: "a CLOSE of a device that is not open",
        expected: |_| "success",
        ask: |scene| {
            errno(scene, 0, |client, path| {
                client.write(path, 0, &emit_close(NO_DEVICE)).map(|r| r.errno)
            })
        },
    },
    Rule {
        id: "NB-23-device",
        asked: "a read of a device that is not open",
        expected: |_| "errno ENOTCONN",
        ask: |scene| {
            errno(scene, ENOTCONN, |client, path| read(client, path, NO_DEVICE, 0).map(|r| r.0))
        },
    },
    Rule {
        id: "NB-9",
        asked: "an OPEN of the disk, to read",
        expected: |_| "OPEN_RSP: sectors, blocks of a power of two from 512 on",
        ask: open_rsp,
    },
    Rule {
        id: "NB-17-again",
        asked: "a second OPEN of the disk in the same session",
        expected: |_| "the same device",
        ask: open_twice,
    },
    Rule {
        id: "NB-23-read",
        asked: "a read of the first 4096 bytes of the disk",
        expected: |_| "success, and the data",
        ask: read_disk,
    },
    Rule {
        id: "NB-24",
        asked: "a read behind the end of the disk",
        expected: |_| "errno EIO",
        ask: read_behind,
    },
    Rule {
        id: "NB-19",
        asked: "an OPEN of the disk in access mode 9",
        expected: |_| "errno EINVAL",
        ask: open_strangely,
    },
];

fn version(scene: &mut Scene, ask: u8, expected: u8) -> Answer {
    scene.on_path(|client, path| {
        let reply = client.read(path, 0, &emit_sess_info(ask), SESS_INFO_LEN as u32)?;
        match (reply.errno, parse_sess_info_rsp(&reply.data)) {
            (0, Some(version)) if version == expected => Ok(format!("version {version}")),
            (errno, version) => deviates(format!("errno {errno}, version {version:?}")),
        }
    })
}

/// Runs a request that has to end with an errno.
fn errno(
    scene: &mut Scene,
    expected: u16,
    run: impl FnOnce(&mut Client, &mut Path) -> Result<u16, Other>,
) -> Answer {
    match scene.on_path(run)? {
        errno if errno == expected => Ok(format!("errno {errno}")),
        errno => deviates(format!("errno {errno}")),
    }
}

/// Opens a device; returns the errno, and what the server says of it.
fn open(
    client: &mut Client,
    path: &mut Path,
    name: &str,
    access: Access,
) -> Result<(u16, Option<OpenRsp>), Other> {
    let Some(message) = emit_open(access, name.as_bytes()) else {
        return Err(Other::Skipped(format!("{name:?} is not a name")));
    };
    let reply = client.read(path, 0, &message, OPEN_RSP_LEN as u32)?;
    Ok((reply.errno, OpenRsp::parse(&reply.data)))
}

/// Reads 4096 bytes; returns the errno and the data.
fn read(
    client: &mut Client,
    path: &mut Path,
    device: u32,
    sector: u64,
) -> Result<(u16, Vec<u8>), Other> {
    let io = Io { device, sector, op: OP_READ, flags: IoFlags::SYNC, len: 4096, prio: 0 };
    let reply = client.read(path, 0, &io.emit(), 4096)?;
    Ok((reply.errno, reply.data))
}

/// Runs something with the disk that is named, opened to be read.
fn with_disk(
    scene: &mut Scene,
    run: impl FnOnce(&mut Client, &mut Path, &str, OpenRsp) -> Answer,
) -> Answer {
    let Some(name) = scene.disk.clone() else {
        return Err(Other::Skipped("needs --disk".to_owned()));
    };
    scene.on_path(|client, path| match open(client, path, &name, Access::Ro)? {
        (0, Some(rsp)) => run(client, path, &name, rsp),
        (ENOENT, _) => Err(Other::Skipped(format!("the server has no disk {name}"))),
        (errno, rsp) => deviates(format!("OPEN: errno {errno}, {rsp:?}")),
    })
}

fn open_rsp(scene: &mut Scene) -> Answer {
    with_disk(scene, |_, _, _, rsp| {
        let block = rsp.logical_block_size;
        let came = format!("device {}, {} sectors, blocks of {block}", rsp.device_id, rsp.nsectors);
        let is_right = rsp.nsectors > 0 && block.is_power_of_two() && block >= 512;
        if is_right { Ok(came) } else { deviates(came) }
    })
}

fn open_twice(scene: &mut Scene) -> Answer {
    with_disk(scene, |client, path, name, first| match open(client, path, name, Access::Ro)? {
        (0, Some(second)) if second.device_id == first.device_id => {
            Ok(format!("device {}", second.device_id))
        }
        (errno, second) => deviates(format!("errno {errno}, {second:?}")),
    })
}

fn read_disk(scene: &mut Scene) -> Answer {
    with_disk(scene, |client, path, _, rsp| match read(client, path, rsp.device_id, 0)? {
        (0, data) if data.iter().any(|byte| *byte != 0xee) => Ok("4096 bytes".to_owned()),
        (0, _) => deviates("success, but no data"),
        (errno, _) => deviates(format!("errno {errno}")),
    })
}

fn read_behind(scene: &mut Scene) -> Answer {
    with_disk(scene, |client, path, _, rsp| {
        match read(client, path, rsp.device_id, rsp.nsectors)? {
            (EIO, _) => Ok(format!("errno {EIO}")),
            (errno, _) => deviates(format!("errno {errno}")),
        }
    })
}

fn open_strangely(scene: &mut Scene) -> Answer {
    let Some(name) = scene.disk.clone() else {
        return Err(Other::Skipped("needs --disk".to_owned()));
    };
    // A session of its own: one that has the disk open answers OPEN as before [NB-17].
    if let Some(path) = scene.path.take() {
        scene.client.leave(&path.conns);
    }
    let found = scene.on_path(|client, path| {
        let Some(mut message) = emit_open(Access::Ro, name.as_bytes()) else {
            return Err(Other::Skipped(format!("{name:?} is not a name")));
        };
        message[4] = 9;
        Ok(client.read(path, 0, &message, OPEN_RSP_LEN as u32)?.errno)
    })?;
    match found {
        EINVAL => Ok(format!("errno {EINVAL}")),
        ENOENT => Err(Other::Skipped(format!("the server has no disk {name}"))),
        errno => deviates(format!("errno {errno}")),
    }
}
