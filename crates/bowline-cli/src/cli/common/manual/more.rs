//! What manual pages say that options do not: examples, files, environment, related pages.

/// A term and what it means.
pub(super) type Entry = (&'static str, &'static str);

/// Additional sections of a page.
#[derive(Debug, Default)]
pub(super) struct More {
    /// Command lines, and what they do. A test parses all of them.
    pub(super) examples: &'static [Entry],
    pub(super) files: &'static [Entry],
    pub(super) environment: &'static [Entry],
    /// Pages of section 1, without their `bowline-`.
    pub(super) see_also: &'static [&'static str],
}

const RUNTIME: Entry = (
    "XDG_RUNTIME_DIR",
    "Folder of this user's sockets, below which bowline has a folder of its own; /run without it, \
     or where it, a folder around it, or bowline's folder in it, belongs to neither root nor the user. Commands that ask a process look in /run/bowline, too, where services have their sockets.",
);
const NOTIFY: Entry = (
    "NOTIFY_SOCKET, WATCHDOG_USEC, WATCHDOG_PID",
    "Set by a service manager, such as systemd for Type=notify and WatchdogSec=. The process sends it \
     READY=1 when it serves everything, WATCHDOG=1 while it makes progress, STATUS, and STOPPING=1.",
);
const CONTROL: Entry =
    ("/run/bowline/*.sock", "Control sockets of nodes that are services, one for each node.");
const DISKS: Entry = (
    "/run/bowline/rnbd/*.sock",
    "Control sockets of exports and clients of disks that are services.",
);

/// Returns the additional sections of the page `bowline-<name>`, or of `bowline` itself.
pub(super) fn more(name: &str) -> More {
    match name {
        "bowline" => More {
            examples: &[
                ("bowline quickstart", "Show on this machine that nothing is lost."),
                ("bowline node --address 127.0.0.1", "Run a node."),
                ("bowline ping 127.0.0.1", "Ping it, in another terminal."),
            ],
            files: &[
                (
                    "/usr/lib/bowline/bin",
                    "Links rds-info, rds-ping, rds-stress and rnbd, under which this command has the \
                     options of the tools with these names. Put the folder first in PATH to use \
                     them.",
                ),
                CONTROL,
            ],
            environment: &[RUNTIME],
            see_also: &["node", "run", "ping", "info", "rnbd"],
        },
        "node" => NODE,
        "run" => RUN,
        "info" | "sysctl" | "drop" => More {
            examples: match name {
                "info" => INFO,
                "sysctl" => SYSCTL,
                _ => DROP,
            },
            files: &[CONTROL],
            environment: &[RUNTIME],
            see_also: &["node"],
        },
        "ping" => More {
            examples: &[
                ("bowline ping 192.0.2.2", "Send a request each second, until SIGINT."),
                (
                    "bowline ping -c 3 -I 192.0.2.1 192.0.2.2",
                    "Send three requests from an address.",
                ),
            ],
            files: &[CONTROL],
            environment: &[RUNTIME],
            see_also: &["node", "info"],
        },
        "probe" => More {
            examples: &[
                ("bowline probe rds 192.0.2.2", "Ask a node's RDS over TCP."),
                (
                    "bowline probe rnbd --disk disk0 --json 192.0.2.2",
                    "Ask an RNBD server, which has a disk for that; print the findings for programs.",
                ),
                (
                    "bowline probe rds --rule R-103 --capture /tmp/probe 192.0.2.2",
                    "Ask one rule, and write a capture if it is not kept.",
                ),
            ],
            see_also: &["ping", "rnbd"],
            ..More::default()
        },
        "probe-cm" | "probe-rds" | "probe-rnbd" | "probe-rtrs" => {
            More { see_also: &["probe"], ..More::default() }
        }
        "stress" => More {
            examples: &[
                ("bowline stress", "Wait for the other side, at every address of this machine."),
                (
                    "bowline stress -s 192.0.2.2 -r 192.0.2.1 -p 4000 -q 8192 -T 10",
                    "Be the other side: 10 s of messages of 8 KiB.",
                ),
            ],
            see_also: &["ping"],
            ..More::default()
        },
        "perf" => More {
            examples: &[
                ("bowline perf --server", "Wait for one client, at every address."),
                ("bowline perf --client 192.0.2.1 --all", "Measure all sizes against it."),
                (
                    "bowline perf --client 192.0.2.1 --both --qps 4 --duration 5",
                    "Measure both directions at once, with four queue pairs, for 5 s.",
                ),
            ],
            see_also: &["rping", "devices"],
            ..More::default()
        },
        "devices" => More {
            examples: &[
                ("bowline devices", "Print what verbs programs will see, and what can be used."),
                ("bowline devices --json", "The same for programs."),
            ],
            environment: &[RUNTIME],
            see_also: &["run", "rping", "perf"],
            ..More::default()
        },
        "send" | "recv" => More {
            examples: &[
                ("bowline recv -s 192.0.2.2:4000 --once", "Receive to standard output."),
                ("bowline send -s 192.0.2.1:4000 -d 192.0.2.2:4000", "Send standard input there."),
            ],
            see_also: &["send", "recv", "node"],
            ..More::default()
        },
        "rnbd" | "rtrs" => More {
            examples: if name == "rnbd" { RNBD } else { RTRS },
            files: &[DISKS],
            environment: &[RUNTIME],
            see_also: &["rnbd-export", "rnbd-map", "rnbd-verify"],
        },
        "rnbd-export" => EXPORT,
        "rnbd-map" => MAP,
        _ => More { see_also: &["node", "rnbd"], ..More::default() },
    }
}

const INFO: &[Entry] = &[
    ("bowline info -c", "Print the counters."),
    ("bowline info -n", "Print the connections."),
    ("bowline info --json", "Print everything, for programs."),
];

const SYSCTL: &[Entry] = &[
    ("bowline sysctl", "Print all settings."),
    ("bowline sysctl net.rds.ping_enable=0", "Change one."),
];

const DROP: &[Entry] = &[
    ("bowline drop 192.0.2.2", "Cut the connections to a peer; they come back."),
    ("bowline drop", "Cut all."),
];

const RNBD: &[Entry] = &[
    ("bowline rnbd exports", "Print the exports of this machine and who has them open."),
    ("bowline rnbd top", "Watch the disks of this machine: rates, latencies, paths."),
    ("bowline rnbd list", "Print the disks of all processes of this machine."),
    ("bowline rnbd unmap rnbd0", "Unmap one."),
    (
        "bowline rnbd map data from 192.0.2.1 nbd=/run/bowline/data.sock",
        "Map one in the node that runs here.",
    ),
    ("bowline rnbd export data file=/srv/data.img", "Add an export to it."),
    ("bowline rnbd unexport data", "Remove it, unless a session has it open."),
];

const RTRS: &[Entry] = &[
    ("bowline rtrs list", "Print sessions and their paths."),
    ("bowline rtrs tree", "Print the whole control tree as JSON."),
];

const NODE: More = More {
    examples: &[
        ("bowline node --example-config", "Print a configuration file with all settings."),
        ("bowline node --config /etc/bowline/node.toml", "Run as the service does."),
        (
            "bowline node --address 192.0.2.1 --echo 4000",
            "Run with a socket that sends everything back.",
        ),
        ("bowline node --address 192.0.2.1 --rdma", "Speak RDS over RDMA, without hardware."),
        ("bowline node --rdma=rxe0", "The same over a device of rdma-core, at its addresses."),
    ],
    files: &[
        (
            "/usr/bin/bowline-node",
            "The node alone, with the same options: what the service bowline-node.service starts.",
        ),
        ("/etc/bowline/node.toml", "Configuration of the service bowline-node.service."),
        CONTROL,
        (
            "/run/bowline/rnbd/node-ADDRESS-PID.sock",
            "Control socket of the node's disks, for the rnbd commands.",
        ),
        (
            "/run/bowline/rds/host.sock",
            "Socket of a node that is a service for programs of `bowline run`. \
             bowline-node.socket listens there, and starts the node at the first connection.",
        ),
    ],
    environment: &[
        RUNTIME,
        NOTIFY,
        (
            "LISTEN_FDS, LISTEN_PID",
            "Set by a service manager that passes a socket: programs are served there.",
        ),
    ],
    see_also: &["run", "info", "ping", "sysctl", "drop", "rnbd"],
};

const RUN: More = More {
    examples: &[
        (
            "bowline run rds-app --its-option",
            "Run a program of RDS on the node of this machine, or where none runs, on one that \
             ends with its programs.",
        ),
        ("bowline run --node=require rds-app", "Fail where no node runs."),
        ("bowline run ibv_devinfo", "Run a verbs program, on a machine without an RDMA device."),
        ("bowline run --node /run/bowline/rds/host.sock sh", "Run a shell, and what it starts."),
    ],
    files: &[
        (
            "/usr/lib/bowline/libbowline_preload.so",
            "The library that intercepts system calls. It is searched for next to the command, \
             too.",
        ),
        (
            "/usr/lib/bowline/libbowline_preload-musl.so",
            "The same for programs of musl. No package has it: `cargo xtask preload-musl` builds it.",
        ),
        (
            "/usr/lib/bowline/bowline-ibverbs",
            "The library of verbs programs: libibverbs and librdmacm. It is searched for next to \
             the command, too.",
        ),
        (
            "$XDG_RUNTIME_DIR/bowline/verbs",
            "Names of that library, and the files that programs find in /sys/class/infiniband, \
             where the machine has no RDMA device.",
        ),
        ("/run/bowline/rds/host.sock", "Socket for programs of a node that is a service."),
        (
            "$XDG_RUNTIME_DIR/bowline/rds/host-NUMBER.log",
            "What a node has said that was started by `bowline run`; below /run without that \
             variable, and in $TMPDIR/bowline-USER where this user may make no folder there, or \
             others could exchange the files in it.",
        ),
    ],
    environment: &[
        RUNTIME,
        ("LD_PRELOAD", "The library is put first in this list."),
        (
            "BOWLINE_RDS_SOCKET",
            "Set for the program: path of the node's socket. With it and LD_PRELOAD a program \
             needs no `bowline run`.",
        ),
        (
            "LD_LIBRARY_PATH",
            "The folder of the names of the verbs library is put first in this list.",
        ),
        (
            "BOWLINE_VERBS_NODE, BOWLINE_VERBS_FILES",
            "Set for the program: the node's socket for verbs, and the folder of the device's files.",
        ),
        ("PATH", "Where the program is searched for."),
    ],
    see_also: &["node", "devices"],
};

const EXPORT: More = More {
    examples: &[
        (
            "bowline rnbd export --file data=/srv/data.img -I 192.0.2.1",
            "Serve a file at one address.",
        ),
        (
            "bowline rnbd export --memory scratch=1GiB --allow 192.0.2.0/24",
            "Serve memory to a network.",
        ),
        (
            "bowline rnbd export --nbd-backend data=nbd+unix:///?socket=/run/data.sock",
            "Serve an image of any format, which an NBD server has at this socket, as: qemu-nbd -t \
             --shared 0 -f qcow2 -k /run/data.sock data.qcow2",
        ),
        (
            "bowline rnbd export --memory test=64MiB --filter error=1%,delay-read=5ms",
            "Serve a disk that fails one request of a hundred, and is slow to read.",
        ),
    ],
    files: &[
        (
            "/etc/bowline/export/NAME.conf",
            "Options of the service bowline-export@NAME.service, as OPTIONS=\"..\"",
        ),
        DISKS,
    ],
    environment: &[RUNTIME, NOTIFY],
    see_also: &["rnbd", "rnbd-map"],
};

const MAP: More = More {
    examples: &[
        (
            "bowline rnbd map data --from 192.0.2.1 --nbd /run/data.sock",
            "Serve a disk as an NBD server does.",
        ),
        (
            "bowline rnbd map data --from 192.0.2.1 --vhost-user /run/data-machine.sock",
            "Give a disk to a virtual machine of this user, as: qemu-system-x86_64 -m 2G \
             -object memory-backend-memfd,id=m,size=2G,share=on -machine q35,memory-backend=m \
             -chardev socket,id=c,path=/run/data-machine.sock,reconnect=1 \
             -device vhost-user-blk-pci,chardev=c,num-queues=2",
        ),
        (
            "bowline rnbd map data --from disks --path 192.0.2.9@192.0.2.1 \
             --path 198.51.100.9@198.51.100.1 --outage 600",
            "Use two paths, and wait ten minutes for a server that is started again.",
        ),
        (
            "bowline rnbd map data --from 192.0.2.1 --run ./backup.sh",
            "Map a disk for as long as a script, which has its address as $uri, for nbdcopy, \
             qemu-img and fio; its exit status is that of the map. A command of several words \
             stands in quotes, as: --run 'qemu-img info \"$uri\"'",
        ),
    ],
    files: &[
        (
            "/etc/bowline/map/NAME.conf",
            "Options of the service bowline-map@NAME.service, as OPTIONS=\"..\". It is started when \
             the disk is there, so mounts can be ordered after it.",
        ),
        DISKS,
    ],
    environment: &[RUNTIME, NOTIFY],
    see_also: &["rnbd", "rnbd-export", "rnbd-verify"],
};
