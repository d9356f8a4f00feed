//! tgtd over TCP with a file in memory, asked by iscsi-perf: random reads only, for whole seconds,
//! and its own count of them.

use std::net::{Ipv4Addr, TcpListener};
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use super::server::{command, serve as serve_until_the_end, start};
use super::{SECTOR, memory_file};
use crate::peers::private_dir;
use crate::role::{Role, say};
use crate::sys;

const TARGET: &str = "iqn.2026-11.example.bowline:bench";
/// How long the server may take to start.
const PATIENCE: Duration = Duration::from_secs(20);

pub(super) fn serve(role: Role) -> Result<(), String> {
    let (_file, path) = memory_file(role.cell.store())?;
    let dir = private_dir()?;
    let ready = prepare(&dir, &path);
    // Left behind it is removed by the next run.
    let _ = std::fs::remove_dir_all(&dir);
    let (server, port) = ready?;
    serve_until_the_end(role, server, &format!("port={port}"))
}

/// Starts the server and gives it its disk.
fn prepare(dir: &Path, path: &str) -> Result<(std::process::Child, u16), String> {
    let free = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).and_then(|socket| socket.local_addr());
    let port = free.map_err(|e| format!("bind: {e}"))?.port();
    let orders = dir.join("orders");
    let mut tgtd = command("tgtd");
    tgtd.args(["--foreground", "--iscsi", &format!("portal=127.0.0.1:{port}")]);
    tgtd.env("TGT_IPC_SOCKET", &orders).stdin(Stdio::null()).stderr(Stdio::null());
    let server = start(&mut tgtd).map_err(|e| format!("tgtd: {e}"))?;
    let order = |words: &str, value: &str| {
        let mut tgtadm = command("tgtadm");
        tgtadm.args(["--lld", "iscsi", "--tid", "1", "--mode"]).args(words.split(' ')).arg(value);
        tgtadm.env("TGT_IPC_SOCKET", &orders).stdin(Stdio::null());
        let out = tgtadm.output().map_err(|e| format!("tgtadm: {e}"))?;
        let said = String::from_utf8_lossy(&out.stderr);
        if out.status.success() { Ok(()) } else { Err(format!("tgtadm: {}", said.trim())) }
    };
    let begun = Instant::now();
    while let Err(why) = order("target --op new --targetname", TARGET) {
        if begun.elapsed() > PATIENCE {
            return Err(why);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    order("logicalunit --op new --lun 1 --backing-store", path)?;
    order("target --op bind --initiator-address", "ALL")?;
    Ok((server, port))
}

pub(super) fn ask(mut role: Role) -> Result<(), String> {
    role.ready("")?;
    let (cell, server) = (&role.cell, role.peer_clock());
    let seconds = cell.window_ms.div_ceil(1000).max(1);
    let before = (sys::children_cpu_ns(), server.now());
    let out = command("iscsi-perf")
        .args(["-m", &cell.depth.to_string(), "-b", &(cell.size / SECTOR).to_string()])
        .args(["-t", &seconds.to_string(), "-r"])
        .arg(format!("iscsi://{}/{TARGET}/1", role.peer_addr()?))
        .stdin(Stdio::null())
        .output()
        .map_err(|e| format!("iscsi-perf: {e}"))?;
    let said = String::from_utf8_lossy(&out.stdout);
    let rate = average(&said)
        .ok_or_else(|| format!("iscsi-perf: {}", String::from_utf8_lossy(&out.stderr).trim()))?;
    say(&format!(
        "result n={} ns={} own_cpu={} peer_cpu={}",
        rate * seconds,
        seconds * 1_000_000_000,
        sys::children_cpu_ns() - before.0,
        server.now() - before.1,
    ));
    crate::role::done(rate * seconds, 0);
    Ok(())
}

/// The last average that iscsi-perf wrote.
fn average(said: &str) -> Option<u64> {
    said.rsplit("iops average ").next()?.split(' ').next()?.parse().ok().filter(|_| {
        // Where the text is not split, it says no average.
        said.contains("iops average ")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_average_counts() {
        let said = "iscsi-perf version 0.1\n\n\
                    \r00:00:01 - lba 32506, iops current 39714 (155 MB/s), iops average 39714 (155 MB/s)\
                    \riops average 40146 (156 MB/s)   \n\nfinished.\n";
        assert_eq!(average(said), Some(40_146));
        assert_eq!(average("17 no such word"), None);
    }
}
