//! What the tables of the page call targets and what they are compared with.

use crate::targets::{Against, Target};

/// Says what a target is about, for people who do not know the program; slashes separate figures.
pub(super) fn meaning(id: &str) -> Option<&'static str> {
    Some(match id {
        "R1" | "R2" | "R3" => "messages of 64 B: rate",
        "R4" | "R5" => "messages of 1 KiB: rate",
        "R6" | "R7" => "messages of 8 KiB: rate",
        "R8" => "messages of 64 KiB: rate",
        "R9" => "messages of 1 MiB: rate",
        "R10" | "R11" => "round trip of 64 B / 4 KiB, both sides polling: median time",
        "R12" => "round trip of 64 B, both sides sleeping: median time / 99th percentile",
        "R13" => "round trip of 64 B, both sides sleeping: median time",
        "R14" => "16 senders to one receiver, 64 B / 1 KiB / 8 KiB: rate",
        "R15" => "16 senders to one receiver, 1 KiB / 8 KiB: rate",
        "R16" => "16 senders to one receiver, 1 KiB: rate",
        "R17" => "16 sockets over 8 RDS paths, 64 KiB: rate",
        "S1" => "15 pairs of sockets while a 16th receiver never reads: rate",
        "C1" => "system calls per message of 64 B, sender / receiver",
        "C2" => "system calls per message of 8 KiB, sender / receiver",
        "C3" => "system calls per round trip, sleeping",
        "M1" => "bytes of memory of an idle socket",
        "M2" => "bytes of memory of an idle connection",
        "V1" | "V2" => "RDMA WRITE of 1 MiB, MTU 4096: bytes per second",
        "V3" => "RDMA WRITE of 1 MiB, MTU 1024: bytes per second",
        "V4" => "RDMA READ of 1 MiB, MTU 4096: bytes per second",
        "V5" => "SEND of 64 B, 128 outstanding: rate",
        "V6" => "round trip of 64 B by SEND / by WRITE with immediate, polling: median time",
        "V7" => "RDMA WRITE of 1 MiB at 0.1 % / 1 % packet loss: rate",
        "C7" => "system calls per packet of 4 KiB, sender / receiver",
        "C8" => "acknowledgements per packet of 4 KiB",
        "T1" | "T2" => "4 KiB, 32 requests outstanding, read / write: rate",
        "T3" => "4 KiB, 128 outstanding, read / write: rate",
        "T4" => "one read of 4 KiB at a time, both sides polling: median time",
        "T5" => "one read of 4 KiB at a time, both sides sleeping: median time",
        "T6" => "reads of 128 KiB / 1 MiB: bytes per second",
        "T7" => "writes of 128 KiB: bytes per second",
        "T8" => {
            "two paths, 4 KiB, 128 outstanding, reads by round-robin / min-inflight / min-latency; \
             writes likewise: rate"
        }
        "T9" => "keys refreshed after each request, 4 KiB, read / write: rate",
        "N3" => "one of two paths is reset: longest pause in ms / requests that failed",
        "C9" => "system calls per request of 4 KiB, read, client / server; write likewise",
        "C10" => "packets per read of 4 KiB / per write of 2 KiB",
        "N1" | "N2" => "a mapped disk, 4 KiB, 32 outstanding, read / write: rate",
        "N4" => {
            "one write of 4 KiB at a time to a new disk, through its NBD socket / its file (FUSE): \
             99th percentile"
        }
        "N5" => {
            "fio on the NBD socket of a mapped disk, read / write, 4 KiB, 1 outstanding; 32; 128 KiB, \
             16: rate"
        }
        "N6" => "the same on its file (FUSE)",
        _ => return None,
    })
}

/// Names what a target is compared with.
pub(super) fn rival(target: &Target) -> Option<&'static str> {
    Some(match target.against {
        Against::Limit(_) => "counted",
        Against::SameIndex(_) => "keys kept",
        Against::Best(labels) => match labels {
            ["tcpb"] => "TCP, batched",
            ["tcp1"] => "TCP, a call each",
            ["tcpz"] => "TCP, gathered",
            ["tcpb", "tcpz", "tcp1"] => "the best TCP",
            ["zmq"] => "ZeroMQ",
            ["nanomsg"] => "nanomsg",
            ["ofi-net", "ofi-rxm", "ucx"] | ["ofi-net", "ucx"] => "libfabric, UCX",
            ["1-path"] | ["rtrs"] => "one path",
            ["all-awake"] => "all reading",
            ["udp-gso"] => "UDP bursts + CRC",
            ["udp"] | ["rr-udp"] => "UDP",
            ["write"] => "WRITE",
            ["lossless"] => "no loss",
            ["nbdkit"] => "nbdkit",
            ["nbdkit-unbound"] => "nbdkit, unbound",
            ["nbdkit-one-cpu"] => "nbdkit, all on one processor",
            ["nbdkit-as-is"] => "nbdkit as set up",
            ["rtrs", "rtrs-adaptive"] => "RTRS",
            ["qemu-nbd"] => "qemu-nbd",
            ["tgt"] => "tgtd (iSCSI)",
            _ => return None,
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::Suite;
    use crate::targets;

    #[test]
    fn every_target_has_a_meaning_and_a_rival_with_a_name() {
        for target in Suite::ALL.into_iter().flat_map(targets::of) {
            assert!(meaning(target.id).is_some(), "{}", target.id);
            assert!(rival(target).is_some(), "{}: {:?}", target.id, target.against);
        }
    }
}
