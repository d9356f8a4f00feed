"""RDS over RDMA: the kernel's rds_rdma on rxe in the guest, bowline's node on its soft device on the host side.

The scenarios of RDS over TCP that ask for nothing of TCP run here too, under names that begin with rdma-.
"""
import os
import socket
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from lab.agent import guest_run
from lab.common import HERE, NETNS
from lab.guest import alive, down
from lab.net import cap_start, cap_stop, ipns, tap

from . import scenarios
from .programs import Programs
from .base import MIB, Stream, counter, scenario, want, want_sent
from .endpoint import GuestNode
from .place import copy, install
from .roce import LOSS, check_frames
from .roce_audit import frames
from .scenarios import load, moving
from .speed import AT, ROUNDS, compare
from .world import ip

BOTH = ("k>n", "n>k")
# around the payload of a frame, and the longest
SIZES = (0, 1, 4095, 4096, 4097, 8192, 65537, MIB)
# a RoCE packet that acknowledges; its syndrome that refuses an operation for its key
ACK, ACCESS = 0x11, 0x62
RESTARTS = "the second kernel would start over TCP"
UNLOAD = "rmmod rds_rdma; rmmod rds; rdma link del rxe0; ip link set eth0 mtu 1500"


class Rdma:
    """rxe on the kernel's interface and rds_rdma in place of rds_tcp for the length of a case; all RoCE frames
    at the guest's link are captured and audited."""

    mtu, loss, audited = 1500, False, True
    options = ["--rdma"]
    # a kernel asks for the acknowledgement of every ninth message [IB-68]
    unasked = 8

    def __init__(self, c):
        self.c, self.pcaps = c, []
        self.load = ("ip link set eth0 mtu %d; modprobe -a ib_core ib_cm rdma_cm rdma_rxe rds && "
                     "{ rdma link | grep -q rxe0 || rdma link add rxe0 type rxe netdev eth0; } && modprobe rds_rdma"
                     % self.mtu)
        if self.loss:
            self.load += " && { %s; }" % LOSS

    def begin(self):
        self.links(self.mtu)
        # The kernel's resolver of RDMA misses a neighbour that answers at once, and waits for five seconds.
        self.c.guest("echo > /dev/udp/%s/9; sleep 0.2" % self.c.n_addr)
        self.pcaps.append("%s.roce%d.pcap" % (self.c.log, len(self.pcaps)))
        cap_start("a", self.pcaps[-1], 65535, ["udp", "port", "4791"])

    def rebooted(self):
        self.c.guest("rmmod rds_tcp; rmmod rds; " + self.load)
        self.begin()

    def end(self, failed):
        cap_stop("a", quiet=True)
        for g in self.c.w.guests():
            if alive(g):
                guest_run(g, "tc qdisc del dev eth0 root; tc qdisc del dev eth0 clsact; " + UNLOAD, 60)
        self.links(1500)
        for pcap in self.pcaps if not failed else ():
            if self.audited:
                check_frames(self.c, pcap)
            if not self.c.w.capture:
                os.unlink(pcap)

    def links(self, mtu):
        for g in self.c.w.guests():
            ipns(["link", "set", tap(g, 0), "mtu", str(mtu)])
        ipns(["link", "set", "labbr0", "mtu", str(mtu)])

    def check_conns(self):
        """The kernel has one connection with the node, over RDMA, and it is up."""
        c = self.c
        conns = [x for x in c.k.ask("info")["conns"] if x["peer"] == c.n_addr]
        want(len(conns) == 1, "the kernel has %d connections with the node: %s", len(conns), conns)
        want(conns[0]["transport"] == "infiniband" and conns[0]["up"], "the connection: %s", conns[0])


class Unaudited(Rdma):
    """The frames are of kernels, or of nobody who is captured."""
    audited = False


class Jumbo(Rdma):
    """At path MTU 4096."""
    mtu = 9000


class Lossy(Rdma):
    """1 % of all packets lost in each direction."""
    loss = True


class Unheard(Rdma):
    """No refusal of an operation's key reaches the kernel [RDMA-34]."""

    def __init__(self, c):
        super().__init__(c)
        self.load += (" && modprobe -a sch_ingress cls_u32 act_gact && tc qdisc add dev eth0 clsact && "
                      "tc filter add dev eth0 ingress protocol ip u32 "
                      "match u8 0x%02x 0xff at 28 match u8 0x%02x 0xff at 40 action drop" % (ACK, ACCESS))


def rdma(name, setting=Rdma, **kw):
    return scenario("rdma-" + name, setting=setting, paths=(0,), **kw)


rdma("ping", dirs=BOTH)(scenarios.ping)


@rdma("sizes", dirs=BOTH, timeout=90, ci=("lo",), n=20, ci_n=3)
def sizes(c):
    """Messages of 0 to 1 MiB around the length of a frame, verified, over RDMA; the kernel says so. Every frame's
    ICRC is right."""
    src, src_a, dst, dst_a = c.ends()
    for i, size in enumerate(SIZES):
        s = Stream(src, ip(src_a, 4000 + i), dst, ip(dst_a, 5000 + i), 70 + i, c.scale, low=size, high=size)
        c.messages += s.finish(30)[1]["messages"]
    c.setting.check_conns()
    want(counter(c.k, "ib_rx_total_frags") > 0, "the kernel counts no frames")


@rdma("small", dirs=BOTH, timeout=90, n=5000)
def small(c):
    """Thousands of messages of 16 to 200 bytes, with and without a wait for room."""
    src, src_a, dst, dst_a = c.ends()
    streams = [Stream(src, ip(src_a, 4000 + i), dst, ip(dst_a, 5000 + i), 90 + i, c.scale, mode=mode, low=16, high=200)
               for i, mode in enumerate(("block", "nonblock"))]
    for s in streams:
        c.messages += s.finish(60)[1]["messages"]
    c.setting.check_conns()


rdma("messages", timeout=240, n=4000)(scenarios.messages)
rdma("messages-jumbo", Jumbo, orders=("lo",), timeout=240, n=4000)(scenarios.messages)
rdma("messages-loss", Lossy, timeout=240, n=1000)(scenarios.messages)
rdma("ipv6", families=(6,), n=1000)(scenarios.ipv6)
rdma("congestion", dirs=BOTH, timeout=90)(scenarios.congestion)
rdma("threshold", dirs=BOTH)(scenarios.threshold)
rdma("link-cut", timeout=120)(scenarios.link_cut)
rdma("cancel", dirs=BOTH, timeout=90)(scenarios.cancel)
rdma("node-restart", timeout=180, self_check=RESTARTS)(scenarios.node_restart)
rdma("kernel-reboot", timeout=180)(scenarios.kernel_reboot)
rdma("unreachable", dirs=("n>k",), orders=("lo",))(scenarios.unreachable)

TOOL = os.path.join(HERE, "guest-tools", "rds-rdma.py")


def refusals(c, owner):
    """How many operations this address has refused for their key, by the frames."""
    return sum(f.source == socket.inet_aton(owner) and f.opcode == ACK and f.bth[12:13] == bytes([ACCESS])
               for f in frames(c.setting.pcaps[-1]))


@rdma("operations", dirs=BOTH, timeout=200, ci=("lo",), bare=True, preload=True, self_check="a kernel needs no library")
def operations(c):
    """A program writes to and reads from memory of a program of the other side: of one byte to 1 MiB, unaligned and
    across pages, with keys that are freed, for one use, and in silence; every byte of the memory is looked at. One of
    the two is on the kernel, the other on bowline. An atomic at a kernel's memory fails. By the frames, the owner
    refuses each operation that fails: once the node, twice the kernel."""
    kernel, node = ("use", "own") if c.dir == "k>n" else ("own", "use")
    with Programs(c, options=["--rdma"]) as p:
        here = ["ip", "netns", "exec", NETNS] + p.run(sys.executable, "-B", TOOL, node, c.n_addr, c.k_addr,
                                                      "--kernel", kernel)
        words = "python3 -B /lab/rds-rdma.py %s %s %s --kernel %s" % (kernel, c.k_addr, c.n_addr, kernel)
        own = subprocess.Popen(here, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        there = guest_run("a", words, 150)
        out = own.communicate(timeout=150)[0].decode()
        want(own.returncode == 0 and "complete" in out and there[0] == 0 and "complete" in there[1],
             "the program here: %s; the one in the guest: %s%s", out[-600:], there[1][-600:], there[2][-600:])
        c.messages += out.count("complete") + there[1].count("complete")
        for line in (out + there[1]).splitlines():
            if line.startswith("told "):
                c.note(line)
        owner, bad = (c.n_addr, 1) if c.dir == "k>n" else (c.k_addr, 2)
        # the capture is late by up to a second
        end = time.monotonic() + 10
        while refusals(c, owner) < bad and time.monotonic() < end:
            time.sleep(0.1)
        want(refusals(c, owner) >= bad, "%d operations refused, of %d with a bad key", refusals(c, owner), bad)


rdma("operations-unheard", Unheard, dirs=("k>n",), orders=("lo",), timeout=200, bare=True, preload=True,
     self_check="a kernel needs no library")(operations)

PEER = "/tmp/peer"
AT_B = "10.99.0.12"
RXE = ("modprobe -a ib_core ib_uverbs rdma_ucm ib_cm rdma_cm rdma_rxe && "
       "{ rdma link | grep -q rxe0 || rdma link add rxe0 type rxe netdev eth0; }")


@rdma("rdmacore", Unaudited, dirs=BOTH, orders=("lo",), timeout=240, bare=True, n=200, self_check="needs a node")
def rdmacore(c):
    """bowline's node on rxe0 of a second guest, through rdma-core, against the kernel's rds_rdma of the first and
    against the soft device on the host side: messages of 0 to 1 MiB, verified, to and fro. Then remote reads and
    writes of 64 KiB, verified, between the device and the soft one."""
    if not alive("b"):
        c.w.boot("b")
    try:
        argv = install(c, c.w.peer, PEER, ("b",), "serve --kernel").split()
        rc, out, err = guest_run("b", "rmmod rds_tcp rds; " + RXE, 30)
        want(rc == 0, "rxe in guest b: %s%s", out, err)
        for g, addr in (("a", AT_B), ("b", c.k_addr)):
            guest_run(g, "echo > /dev/udp/%s/9; sleep 0.2" % addr)
        c.start_kernel()
        node = c.n = GuestNode("node", "b", argv + ["serve", "--device", "rxe0", "--address", AT_B],
                               c.log + ".rxe.log")
        soft = c.w.start_node(c, c.log + ".soft.log", [c.n_addr], 0)
        try:
            for n, (there, at) in enumerate(((c.k, c.k_addr), (soft, c.n_addr))):
                (src, src_at), (dst, dst_at) = ((there, at), (node, AT_B))[:: 1 if c.dir == "k>n" else -1]
                streams = [Stream(src, ip(src_at, 4000 + i), dst, ip(dst_at, 5000 + 10 * n + i), 70 + i, c.scale,
                                  low=low, high=high) for i, (low, high) in enumerate(((0, 9000), (16, 200), (0, MIB)))]
                for s in streams:
                    c.messages += s.finish(60)[1]["messages"]
            conns = [x for x in c.k.ask("info")["conns"] if x["peer"] == AT_B]
            want([x["transport"] for x in conns] == ["infiniband"], "the connection: %s", conns)
        finally:
            soft.close()
            node.close()
        stress(c)
    finally:
        if c.n:
            c.n.close()
            c.n = None
        down(["b"])


def stress(c):
    """bowline stress between rxe0 of guest b and the soft device of the host side; one of them is active."""
    there = install(c, c.w.bowline(), "/tmp/bowline", ("b",)) + " stress --rdma=rxe0 -r " + AT_B
    here = ["ip", "netns", "exec", NETNS, c.w.bowline(), "stress", "--rdma", "-r", c.n_addr]
    active = "-t 2 -d 2 -q 1024 -D 65536 -v -T 4 -z".split()
    if c.dir == "k>n":
        passive = subprocess.Popen(here, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        time.sleep(1)
        rc, out, err = guest_run("b", "%s -s %s %s" % (there, c.n_addr, " ".join(active)), 60)
        passive.communicate(timeout=20)
    else:
        with ThreadPoolExecutor(1) as pool:
            later = pool.submit(guest_run, "b", there, 60)
            time.sleep(2)
            p = subprocess.run([*here, "-s", AT_B, *active], stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=60,
                               check=False)
            rc, out, err = p.returncode, p.stdout.decode(), p.stderr.decode()
            later.result()
    moved = [float(x) for x in out.split()[-6:-4]] if rc == 0 else []
    want(rc == 0 and all(moved), "stress: status %d: %s%s", rc, out[-500:], err[-500:])
    c.note("stress: %s" % " ".join(out.splitlines()[-1].split()))


@rdma("rds-speed", Unaudited, orders=("lo",), timeout=400, bare=True, preload=True, self_check="compares with the kernel itself")
def speed(c):
    """The same programs in two guests, over rds_rdma on rxe and over the node on its soft device, in turn: 8 KiB
    messages, round trips, and remote writes of 1 MiB with a message each."""
    if not alive("b"):
        c.w.boot("b")
    try:
        argv = install(c, c.w.peer, PEER, ("a", "b"), "serve --kernel").split()
        load = {True: RXE + " && modprobe rds_rdma", False: "true"}
        compare(c, argv, load, "--rdma")
        written = {True: [], False: []}
        program = install(c, c.w.bowline(), "/tmp/bowline", ("a", "b"))
        library = os.path.join(os.path.dirname(c.w.bowline()), "libbowline_preload.so")
        copy(("a", "b"), library, "/tmp/libbowline_preload.so")
        for _ in range(ROUNDS):
            for kernel in (True, False):
                written[kernel].append(write_rate(c, None if kernel else program, load[kernel]))
        ratio = statistics.median(n / k for n, k in zip(written[False], written[True]))
        c.note("1 MiB written: %.1f MB/s, kernel %.1f (%.2f)" % (
            *(statistics.median(written[k]) / 1e6 for k in (False, True)), ratio))
    finally:
        for g in ("a", "b"):
            if alive(g):
                guest_run(g, UNLOAD, 60)
        down(["b"])


def write_rate(c, program, load):
    """Bytes per second that a program of guest a writes to memory of one of guest b; on kernels without `program`."""
    begin = "{ rmmod rds_rdma rds_tcp rds; rdma link del rxe0; rmmod rdma_rxe; } 2>/dev/null; " + load
    tool, kernel = "python3 -B /lab/rds-rdma.py", "both"
    if program:
        begin += " && { setsid %s node --rdma --address %%s --programs /run/host.sock --no-control > /tmp/node.log 2>&1 " \
                 "< /dev/null & } && sleep 2" % program
        tool, kernel = "%s run --node /run/host.sock %s" % (program, tool), "none"
    for g in ("a", "b"):
        rc, out, err = guest_run(g, begin % AT[g] if program else begin, 30)
        want(rc == 0, "guest %s: %s%s", g, out, err)
    try:
        with ThreadPoolExecutor(1) as pool:
            own = pool.submit(guest_run, "b", "%s pump %s %s --kernel %s" % (tool, AT["b"], AT["a"], kernel), 60)
            time.sleep(1.5)
            rc, out, err = guest_run("a", "%s use %s %s --kernel %s" % (tool, AT["a"], AT["b"], kernel), 60)
            want(rc == 0, "guest a: %s%s", out[-300:], err[-500:])
            rc, out, err = own.result()
            want(rc == 0 and "complete" in out, "guest b: %s%s", out[-300:], err[-500:])
            return float(out.split()[0])
    finally:
        for g in ("a", "b"):
            guest_run(g, "pkill -f 'bowline node'; sleep 0.5; rm -f /run/host.sock", 20)


RACES = 10
GUEST_MAC = "52:54:00:99:00:0b"
GUEST_MORE = ["10.99.0.%d" % x for x in range(60, 60 + RACES)]


@rdma("race", timeout=150, n=10, self_check="needs a node that can drop its connections")
def race(c):
    """Between ten addresses of the kernel and the node's both sides begin to connect while nothing gets through. Then
    the node drops all connections, first while nothing gets through, then without more ado. Each time one
    connection of each pair remains, and all messages come."""
    more = GUEST_MORE[:c.scale]
    c.guest("for a in %s; do ip addr add $a/24 dev eth0; done; sleep 1" % " ".join(more))
    for addr in more:
        ipns(["neigh", "replace", addr, "lladdr", GUEST_MAC, "dev", "labbr0"])
    try:
        cross(c, more, 0, lambda: None)
        c.note("raced: %d at the kernel, %d at the node" % raced(c))
        cross(c, more, 1, lambda: c.n.ask("cut"))
        c.note("stale: %d at the kernel" % counter(c.k, "ib_listen_closed_stale"))
        for n in range(5):
            c.n.ask("cut")
            time.sleep(0.3 * n)
        check_pairs(c, len(more))
        want(raced(c)[0] >= len(more), "only %d of the kernel's connections were raced for", raced(c)[0])
    finally:
        c.link("pass")
        for addr in more:
            ipns(["neigh", "del", addr, "dev", "labbr0"], False)


def raced(c):
    return counter(c.k, "ib_connect_raced"), counter(c.n, "ib_connect_raced")


def cross(c, addrs, seed, cut):
    """Between each of these addresses and the node's, both sides send while nothing gets through."""
    args, ends = dict(n=3, seed=seed, min=100, max=9000), []
    for n, addr in enumerate(addrs):
        for src, at, dst, to in ((c.k, addr, c.n, c.n_addr), (c.n, c.n_addr, c.k, addr)):
            r = dst.job("recv", bind=ip(to, 6000 + 100 * seed + n), idle=60, linger=0.2, **args)
            r.event("ready")
            ends.append((src, ip(at, 7000 + 100 * seed + n), ip(to, 6000 + 100 * seed + n), r))
    c.link("drop")
    cut()
    for src, at, to, _ in ends:
        src.job("send", bind=at, to=to, **args)
    time.sleep(1)
    c.link("pass")
    t = time.monotonic()
    for _, _, _, r in ends:
        c.messages += r.wait(40)["messages"]
    c.note("all came after %.1f s" % (time.monotonic() - t))
    check_pairs(c, len(addrs))


def check_pairs(c, count):
    """The kernel has a queue pair for each of its addresses, and all connections are up."""
    end = time.monotonic() + 30
    while True:
        conns = [x for x in c.k.ask("info")["conns"] if x["peer"] == c.n_addr]
        pairs = c.guest("rdma res show qp link rxe0 | grep -c 'type RC.*state RTS' || true").strip()
        if len(conns) == count and all(x["up"] for x in conns) and pairs == str(count):
            return
        want(time.monotonic() < end, "%s queue pairs for %d connections: %s", pairs, count, conns)
        time.sleep(0.5)


def settle(c, streams):
    """All streams end, complete, exactly once."""
    moving(streams, 40)
    for s in streams:
        c.messages += s.stop(60)[1]["messages"]
    c.setting.check_conns()


@rdma("drop", timeout=120, self_check="only the node can be told to drop its connections")
def drop(c):
    """Under load both ways the node drops its connections, ten times: nothing is lost, nothing comes twice."""
    streams = load(c)
    moving(streams, 20)
    for _ in range(10):
        c.n.ask("cut")
        time.sleep(0.7)
        moving(streams, 20, 1)
    settle(c, streams)


@rdma("device", timeout=150)
def device(c):
    """Under load both ways the kernel loses its RDMA device and gets it back, three times: nothing is lost."""
    streams = load(c)
    moving(streams, 20)
    for _ in range(3):
        c.guest("rdma link del rxe0; sleep 1; rdma link add rxe0 type rxe netdev eth0", 60)
        moving(streams, 40, 5)
    settle(c, streams)


@rdma("modules", timeout=120)
def modules(c):
    """The kernel unloads its transport and loads it again while the node has messages for it, five times; what
    the node sent to nobody waits, and all of it comes."""
    for n in range(5):
        c.k.close()
        c.guest("rmmod rds_rdma", 60)
        j = c.n.job("send", bind=c.at_n(4000), to=c.at_k(4001), n=20, seed=n, min=16, max=65536)
        j.event("sent", 10)
        time.sleep(0.3 * n)
        c.link("drop")
        c.guest("modprobe rds_rdma")
        c.start_kernel()
        r = c.k.job("recv", bind=c.at_k(4001), n=20, seed=n, min=16, max=65536, idle=20, linger=0.2)
        r.event("ready")
        c.link("pass")
        c.messages += r.wait(30)["messages"]
        j.tell("close", flush=5)
        want_sent(j.wait(), c.n)
        s = Stream(c.k, c.at_k(4002), c.n, c.at_n(4003 + n), 9, 50, high=9000)
        c.messages += s.finish(20)[1]["messages"]
        c.setting.check_conns()
