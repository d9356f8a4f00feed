//! What only bowline shows of a block device [NB-67]: failures of its storage, and what its
//! requests wait for.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use bowline_base::clock;
use bowline_ctl::{AttrDef, Errno, Node, Value};
use bowline_rnbd::{Failures, IoOp, Latencies};

use super::{DiskInfo, show, text};

/// The folder `bowline` of a block device.
pub(super) struct Health {
    pub(super) failures: Failures,
    /// The rest, which is known of mapped disks.
    pub(super) disk: Option<DiskInfo>,
}

impl Health {
    /// Returns the folders of a block device with this one.
    pub(super) fn folder(self) -> (String, Arc<dyn Node>) {
        ("bowline".to_owned(), Arc::new(self))
    }
}

impl Node for Health {
    fn attrs(&self) -> &'static [AttrDef] {
        const COMMON: [AttrDef; 2] = [show("failed_requests"), show("last_failure")];
        const MAPPED: [AttrDef; 5] = [
            show("failed_requests"),
            show("last_failure"),
            show("queue"),
            show("read_latencies"),
            show("write_latencies"),
        ];
        if self.disk.is_some() { &MAPPED } else { &COMMON }
    }

    fn read(&self, name: &str) -> Result<Value, Errno> {
        match (name, &self.disk) {
            ("failed_requests", _) => Ok(Value::Uint(self.failures.count)),
            ("last_failure", _) => text(last(&self.failures)),
            ("queue", Some(DiskInfo { queue, .. })) => {
                Ok(Value::Words(vec![("in_flight", queue.in_flight), ("waiting", queue.waiting)]))
            }
            ("read_latencies", Some(disk)) => text(counts(&disk.read_latencies)),
            ("write_latencies", Some(disk)) => text(counts(&disk.write_latencies)),
            _ => Err(Errno::ENOENT),
        }
    }
}

/// Returns `OPERATION ERRNO SECONDS failing|over`, with the time since 1970; `none` before the
/// first failure.
fn last(failures: &Failures) -> String {
    let Some(last) = failures.last else { return "none".to_owned() };
    let now = clock::now();
    let at = SystemTime::now() - now.saturating_since(last.at);
    let at = at.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let errno = last.errno.name().map_or_else(|| last.errno.0.to_string(), str::to_owned);
    let state = if failures.is_failing(now) { "failing" } else { "over" };
    format!("{} {errno} {at} {state}", op_name(last.op))
}

/// Returns the name of an operation in texts.
const fn op_name(op: IoOp) -> &'static str {
    match op {
        IoOp::Read => "read",
        IoOp::Write => "write",
        IoOp::Flush => "flush",
        IoOp::Discard => "discard",
        IoOp::WriteZeroes => "write-zeroes",
        IoOp::SecureErase => "secure-erase",
    }
}

/// Returns `NANOSECONDS:COUNT ..`: how many requests took at most so long, and longer than the
/// entry before says.
fn counts(latencies: &Latencies) -> String {
    let all = latencies.counted().map(|(longest, count)| format!("{}:{count}", longest.as_nanos()));
    all.collect::<Vec<_>>().join(" ")
}
