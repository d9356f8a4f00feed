"""RDMA between the kernel's soft RoCE (rxe) and bowline's, over RoCEv2 in userspace."""
import ipaddress
import json
import os
import re
import signal
import statistics
import subprocess
import threading

from lab.agent import guest_exec, guest_run
from lab.common import NETNS, Fail
from lab.guest import alive, down
from lab.net import cap_start, cap_stop, ipns, tap

from .base import MIB, Wrong, scenario, want
from .place import install
from .roce_audit import audit, dissect

NO_SELF_CHECK = "two kernels need no bowline"
# what rping takes; around path MTUs of 1024 and 4096
SIZES = (23, 64, 1023, 1024, 1025, 4095, 4096, 4097, 16384, 65535)
PORT = 7174
# what the program of rdma-core sometimes ends with, its own thread having closed the channel
RPING_RACE = "rdma_get_cm_event: Bad file descriptor"
LOSS = ("modprobe -a sch_netem sch_ingress cls_matchall act_gact; "
        "tc qdisc add dev eth0 root netem loss 1% && tc qdisc add dev eth0 clsact && "
        "tc filter add dev eth0 ingress matchall action pass random netrand drop 100")


class Tool:
    """A command of bowline on the host side, inside the lab's namespace."""

    def __init__(self, roce, *words):
        self.words = " ".join(words)
        self.err = open(roce.log + ".bowline.err", "ab")
        self.at = self.err.tell()
        self.lines = []
        self.p = subprocess.Popen(["ip", "netns", "exec", NETNS, roce.program] + list(words),
                                  stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=self.err,
                                  start_new_session=True)
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()
        roce.tools.append(self)

    def read(self):
        for line in self.p.stdout:
            self.lines.append(line.decode(errors="replace").rstrip("\n"))

    def said(self):
        with open(self.err.name, errors="replace") as f:
            f.seek(self.at)
            return f.read()

    def listening(self, word="listening", seconds=10):
        """Waits for the first line, which says that the command is ready."""
        for _ in range(seconds * 20):
            if self.lines and word in self.lines[0]:
                del self.lines[0]
                return self
            if self.p.poll() is not None:
                break
            threading.Event().wait(0.05)
        raise Fail("bowline %s is not ready: %s" % (self.words, self.said()))

    def end(self, timeout=30, ask=False):
        """-> exit status and lines"""
        if ask and self.p.poll() is None:
            os.killpg(self.p.pid, signal.SIGINT)
        try:
            self.p.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise Fail("bowline %s did not end within %d s: %s" % (self.words, timeout, self.said()))
        self.reader.join(5)
        return self.p.returncode, self.lines

    def kill(self):
        if self.p.poll() is None:
            os.killpg(self.p.pid, signal.SIGKILL)
            self.p.wait()


def check_frames(c, pcap):
    """Nothing is wrong with any frame of a capture."""
    mine, theirs, bad = audit(pcap, ipaddress.ip_address(c.n_addr).packed)
    opinion = dissect(pcap)
    bad += opinion or []
    want(not bad, "%d frames are wrong, first: %s", len(bad), "; ".join(bad[:3]))
    want(mine and theirs, "nothing captured: %d frames of ours, %d of the kernel", mine, theirs)
    c.note("%d frames sent, %d received, ICRCs right%s" % (mine, theirs, "" if opinion is None else ", tshark content"))


class Roce:
    """rxe on the guest's interface for the length of a case; a capture and its audit, unless a rate is measured."""

    def __init__(self, c, mtu=1500, loss=False, audited=True):
        self.c, self.mtu, self.loss, self.audited = c, mtu, loss, audited
        self.log, self.program, self.tools = c.log, c.w.bowline(), []
        self.pcap = c.log + ".roce.pcap"

    def __enter__(self):
        self.links(self.mtu)
        self.c.guest("ip link set eth0 mtu %d; modprobe -a ib_core ib_uverbs rdma_ucm ib_cm rdma_cm rdma_rxe "
                     "&& rdma link add rxe0 type rxe netdev eth0" % self.mtu)
        if self.loss:
            self.c.guest(LOSS)
        # at the guest's link a batch has become frames
        if self.audited:
            cap_start("a", self.pcap, 65535, ["udp", "port", "4791"])
        return self

    def __exit__(self, kind, error, trace):
        for t in self.tools:
            t.kill()
        if self.audited:
            cap_stop("a", quiet=True)
        guest_run("a", "tc qdisc del dev eth0 root; tc qdisc del dev eth0 clsact; rdma link del rxe0; "
                  "ip link set eth0 mtu 1500")
        self.links(1500)
        if kind is None and self.audited:
            self.check()
            if not self.c.w.capture:
                os.unlink(self.pcap)

    def links(self, mtu):
        ipns(["link", "set", tap("a", 0), "mtu", str(mtu)])
        ipns(["link", "set", "labbr0", "mtu", str(mtu)])

    def check(self):
        check_frames(self.c, self.pcap)

    # -- the two programs

    def serve(self, *words):
        c = self.c
        return Tool(self, *words, "--server", "--address", c.n_addr).listening()

    def client(self, *words, timeout=60):
        """bowline as client. -> its lines"""
        c = self.c
        t = Tool(self, *words, "--client", c.k_addr, "--address", c.n_addr)
        rc, lines = t.end(timeout)
        want(rc == 0, "bowline %s: status %s: %s", t.words, rc, t.said().strip().replace("\n", "; "))
        return lines

    def kernel(self, command, timeout=60, pardon=None):
        """A program in the guest; it must succeed. -> its output"""
        rc, out, err = guest_run("a", "timeout %d %s" % (timeout, command), timeout + 10)
        want(rc == 0 or (pardon and pardon in err), "in the guest: %s: status %d: %s%s", command, rc, out[-300:],
             err[-300:])
        return out

    def kernel_serves(self, command, log):
        guest_exec("a", ["bash", "-c", "exec " + command], 30, lambda b: None, lambda b: None, detach=True, log=log)
        for _ in range(60):
            if "LISTEN" in guest_run("a", "rdma resource show cm_id")[1]:
                return
        raise Fail("the guest's server does not listen: " + guest_run("a", "cat " + log)[1])


def letters(number, size):
    """The data of a ping as rping prints them."""
    text = "rdma-ping-%d: " % number
    room = size - 1 - len(text)
    return text + "".join(chr(65 + (number + i) % 58) for i in range(room))


def rping(c, mtu, sizes, count, loss=False):
    with Roce(c, mtu, loss) as r:
        if c.dir == "k>n":
            server = r.serve("rping", "--persistent", "--verify", "--json")
            for size in sizes:
                out = r.kernel("rping -c -a %s -C %d -S %d -V -v" % (c.n_addr, count, size),
                               pardon=RPING_RACE)
                got = [x[len("ping data: "):] for x in out.splitlines() if x.startswith("ping data: ")]
                want(got == [letters(n, size) for n in range(count)], "size %d: the kernel's rping printed %d "
                     "pings, not all as they should be", size, len(got))
                c.messages += 2 * count
            rc, lines = server.end(ask=True)
            pings = [json.loads(x)["pings"] for x in lines]
            want(rc == 0 and pings == [count] * len(sizes), "bowline served %s pings, status %d: %s", pings, rc,
                 server.said())
        else:
            r.kernel_serves("rping -s -P -a %s -S 65535 -V" % c.k_addr, "/tmp/rping.log")
            for size in sizes:
                lines = r.client("rping", "-C", str(count), "-S", str(size), "--verify", "--verbose", "--json")
                got = [x[len("ping data: "):] for x in lines if x.startswith("ping data: ")]
                want(got == [letters(n, size) for n in range(count)], "size %d: %d pings, not all as they should "
                     "be", size, len(got))
                want(json.loads(lines[-1])["pings"] == count, "size %d: %s", size, lines[-1])
                c.messages += 2 * count
            guest_run("a", "pkill -x rping")


JOBS = [(op, "bw", size) for size in (0, 1, 1023, 1024, 1025, 4095, 4096, 4097, MIB + 3)
        for op in ("send", "write", "read")]
JOBS += [(op, "lat", size) for size in (0, 1, 1025, 4097) for op in ("send", "write", "read")]
JOBS += [("atomic", "bw", 8), ("atomic", "lat", 8)]


def iterations(mode, size):
    return 3 if size >= MIB else 20


def verbs(c, mtu, loss=False):
    """Sends, writes, reads and atomics against the kernel, data checked at the receiving side."""
    # rxe answers a READ of no bytes once only: where its answer is lost, nothing helps [RSP-3].
    once = loss and c.dir == "n>k"
    todo = [x for x in JOBS if not (once and (x[0], x[2]) == ("read", 0))]
    with Roce(c, mtu, loss) as r:
        if c.dir == "k>n":
            server = r.serve("perf", "--persistent", "--verify", "--json")
            jobs = " ".join("%s,%s,%d,%d,8" % (op, mode, size, iterations(mode, size)) for op, mode, size in todo)
            out = r.kernel("python3 -B /lab/roce-perf.py client %s %s %d %s" % (c.k_addr, c.n_addr, PORT, jobs), 150)
            done = [json.loads(x) for x in out.splitlines()]
            rc, lines = server.end(ask=True)
            want(rc == 0 and "bowline perf: %s" % c.k_addr not in server.said(), "bowline: %s", server.said())
        else:
            r.kernel_serves("python3 -B /lab/roce-perf.py server %s %d %d" % (c.k_addr, PORT, len(todo)), "/tmp/perf")
            done = []
            for op, mode, size in todo:
                try:
                    lines = r.client("perf", "--op", op, "--mode", mode, "--size", str(size), "--depth", "8", "--verify",
                                     "--count", str(iterations(mode, size)), "--json")
                except Wrong as error:
                    want(False, "%s; the kernel's side: %s", error, guest_run("a", "tail -c 300 /tmp/perf")[1])
                done.append(json.loads(lines[-1]))
            out = c.guest("for i in 1 2 3 4 5; do pgrep -f roce-perf >/dev/null || break; sleep 0.5; done; cat /tmp/perf")
            wrong = [x for x in out.splitlines() if "error" in x or not x.startswith("{")]
            want(not wrong and len(out.splitlines()) == len(todo), "the kernel's side: %s", wrong or out[-300:])
        want(len(done) == len(todo), "%d of %d done", len(done), len(todo))
        c.messages += sum(x["iterations"] for x in done)


@scenario("verbs", dirs=("k>n", "n>k"), orders=("lo",), families=(4, 6), timeout=240, bare=True, tool=True,
          self_check=NO_SELF_CHECK)
def verbs_1024(c):
    """Send, write, read and atomics of sizes from 0 to 1 MiB + 3, many at a time and one at a time,
    to and from the kernel at path MTU 1024; the receiving side checks the data."""
    verbs(c, 1500)


@scenario("verbs-jumbo", dirs=("k>n", "n>k"), orders=("lo",), families=(4, 6), timeout=240, bare=True, tool=True,
          self_check=NO_SELF_CHECK)
def verbs_4096(c):
    """The same at path MTU 4096."""
    verbs(c, 9000)


@scenario("verbs-loss", dirs=("k>n", "n>k"), orders=("lo",), families=(4,), timeout=240, bare=True, tool=True,
          self_check=NO_SELF_CHECK)
def verbs_loss(c):
    """The same with 1 % of all packets lost in each direction."""
    verbs(c, 1500, loss=True)


FIXED, SWIFT = "fixed:240", "swift"
# the window between hosts, and others to compare with; in turn, since the load of the host changes
CONTROLLERS = (FIXED, "delay", "cubic")
CONTROLLER_ROUNDS, WRITES = 7, 300
# What each of them must have of the fixed window's rate. For delay that the window moves at all: it has 0.6 on a quiet
# machine, 0.14 with a dozen programs on the emulated processor's (bench/notes/2026-11-29-controllers-compared.md).
CONTROLLER_GOALS = {"delay": 0.1, "cubic": 0.5}
REPAIRS = ("timeouts", "packets_resent")


def write_rate(r, how):
    """Writes of 64 KiB, eight at a time, to the kernel. -> MB/s, and what was sent again or dropped"""
    lines = r.client("perf", "--op", "write", "--size", "65536", "--depth", "8", "--count", str(WRITES),
                     "--congestion", how, "--json")
    done = json.loads(lines[-1])
    return dict(rate=done["gigabytes_per_second"] * 1000, window=done["peers"][0]["window"],
                **{name: done["counters"][name] for name in REPAIRS})


def dropped(c):
    """Datagrams that the kernel's sockets had no room for."""
    return int(c.guest("nstat -asz UdpRcvbufErrors | awk '/Udp/ { print $2 }'"))


@scenario("controllers", dirs=("n>k",), orders=("lo",), timeout=240, bare=True, tool=True, self_check=NO_SELF_CHECK)
def controllers(c):
    """Writes of 64 KiB, eight at a time, to the kernel's rxe with each congestion controller: rates beside that of the
    fixed window, time-outs, and packets sent again. The kernel's processor is the bottleneck, and its sockets drop
    nothing."""
    got = {how: [] for how in CONTROLLERS}
    with Roce(c, audited=False) as r:
        before = dropped(c)
        r.kernel_serves("python3 -B /lab/roce-perf.py server %s %d %d"
                        % (c.k_addr, PORT, CONTROLLER_ROUNDS * len(CONTROLLERS)), "/tmp/perf")
        for _ in range(CONTROLLER_ROUNDS):
            for how in CONTROLLERS:
                got[how].append(write_rate(r, how))
                c.messages += WRITES
        # Swift's target is below what this processor adds: it may not even end.
        r.kernel_serves("python3 -B /lab/roce-perf.py server %s %d" % (c.k_addr, PORT), "/tmp/perf")
        try:
            got[SWIFT] = [write_rate(r, SWIFT)]
        except Wrong:
            c.note("swift: nothing arrives")
        lost = dropped(c) - before
    c.save("rounds", got)
    slow = []
    for how, rounds in got.items():
        ratio = statistics.median(x["rate"] / fixed["rate"] for x, fixed in zip(rounds, got[FIXED]))
        c.note("%s: %.1f MB/s (%.2f), %s time-outs, %s packets sent again" % (
            how, statistics.median(x["rate"] for x in rounds), ratio,
            *("/".join(str(x[name]) for x in rounds) for name in REPAIRS)))
        if ratio < CONTROLLER_GOALS.get(how, 0):
            slow.append(how)
    want(lost == 0, "%d datagrams dropped by the kernel; %s", lost, "; ".join(c.notes))
    want(not slow, "too slow beside the fixed window: %s; %s", ", ".join(slow), "; ".join(c.notes))


@scenario("rping", dirs=("k>n", "n>k"), orders=("lo",), families=(4, 6), timeout=90, bare=True, ci=True, tool=True,
          self_check=NO_SELF_CHECK, n=len(SIZES), ci_n=2)
def rping_1024(c):
    """The kernel's rping and bowline's, both roles, path MTU 1024, sizes 23 to 65535: every
    byte checked at both ends; every frame's ICRC, and tshark's opinion."""
    rping(c, 1500, SIZES[::-(len(SIZES) // c.scale)], 5)


@scenario("rping-jumbo", dirs=("k>n", "n>k"), orders=("lo",), families=(4, 6), timeout=90, bare=True, tool=True,
          self_check=NO_SELF_CHECK)
def rping_4096(c):
    """The same at path MTU 4096."""
    rping(c, 9000, SIZES, 5)


@scenario("rping-loss", dirs=("k>n", "n>k"), orders=("lo",), families=(4, 6), timeout=180, bare=True, tool=True,
          self_check=NO_SELF_CHECK, n=40)
def rping_loss(c):
    """1 % of all packets are lost in each direction: the same pings, the same data."""
    rping(c, 1500, (64, 4097, 65535), c.scale, loss=True)


@scenario("rdma-core", dirs=("k>n", "n>k"), orders=("lo",), families=(4, 6), timeout=120, bare=True, tool=True,
          self_check=NO_SELF_CHECK)
def rdma_core(c):
    """ucmatose, with the connection manager, and ibv_rc_pingpong, without it, of rdma-core."""
    with Roce(c) as r:
        gid = 1 if c.family == 4 else 2
        for size in (100, 4099):
            n, port = 30, str(7471)
            words = ["rdma-core", "ucmatose", "--port", port, "--size", str(size), "-n", str(n)]
            theirs = "ucmatose -p %s -C %d -S %d -f %s" % (port, n, size, "ip" if c.family == 4 else "ipv6")
            if c.dir == "k>n":
                t = r.serve(*words)
                r.kernel("%s -s %s" % (theirs, c.n_addr))
                rc, lines = t.end()
                want(rc == 0, "ucmatose: %s", t.said())
            else:
                r.kernel_serves("%s -b %s" % (theirs, c.k_addr), "/tmp/ucmatose")
                r.client(*words)
                out = c.guest("sleep 1; cat /tmp/ucmatose")
                want("return status 0" in out, "the kernel's ucmatose: %s", out)
            c.messages += 2 * n
        if c.dir == "n>k" and c.family == 6:
            c.note("no ibv_rc_pingpong: as a server it listens on IPv4 only")
            return
        for size, mtu in ((4096, 1024), (1, 512), (5001, 256)):
            n, port = 100, "18515"
            words = ["rdma-core", "pingpong", "--port", port, "--size", str(size), "-n", str(n), "--mtu", str(mtu)]
            theirs = "ibv_rc_pingpong -d rxe0 -g %d -n %d -s %d -m %d" % (gid, n, size, mtu)
            if c.dir == "k>n":
                t = r.serve(*words)
                out = r.kernel("%s %s" % (theirs, c.n_addr))
                rc, lines = t.end()
                want(rc == 0, "ibv_rc_pingpong: %s", t.said())
            else:
                guest_exec("a", ["bash", "-c", "exec " + theirs], 30, lambda b: None, lambda b: None, detach=True,
                           log="/tmp/pingpong")
                c.guest("for i in 1 2 3 4 5 6 7 8 9; do ss -Hltn 'sport = 18515' | grep -q LISTEN && break; sleep 0.2; done")
                r.client(*words)
                out = c.guest("sleep 1; cat /tmp/pingpong")
            want("%d iters in" % n in out, "the kernel's ibv_rc_pingpong: %s", out)
            c.messages += 2 * n


A, B = "10.99.0.11", "10.99.0.12"
SPEED_ROUNDS = 3
# what, perftest's program and options, options of bowline perf
SPEED = (
    ("write 64 KiB", "ib_write_bw -s 65536 -n 400", "--op write --mode bw --size 65536 --count 400"),
    ("read 64 KiB", "ib_read_bw -s 65536 -n 400", "--op read --mode bw --size 65536 --count 400"),
    ("send 64 KiB", "ib_send_bw -s 65536 -n 400", "--op send --mode bw --size 65536 --count 400"),
    ("send 64 B, half round trip", "ib_send_lat -s 64 -n 1000", "--op send --mode lat --size 64 --count 1000"),
)


def last_row(text):
    """Numbers of the last line of perftest's table."""
    rows = [x.split() for x in text.splitlines() if re.match(r"^ *[0-9]+ +[0-9]+ +[0-9.]+", x)]
    want(rows, "no table from perftest: %s", text[-300:])
    return [float(x) for x in rows[-1]]


def background(guest, command, log):
    guest_exec(guest, ["bash", "-c", "exec " + command], 30, lambda b: None, lambda b: None, detach=True, log=log)


def in_guest(guest, command, timeout=90):
    rc, out, err = guest_run(guest, "timeout %d %s" % (timeout, command), timeout + 10)
    want(rc == 0, "in guest %s: %s: status %d: %s%s", guest, command, rc, out[-300:], err[-300:])
    return out


def waiting(guest, what):
    for _ in range(40):
        if guest_run(guest, what)[0] == 0:
            return
    raise Fail("in guest %s nobody listens (%s)" % (guest, what))


@scenario("rdma-speed", orders=("lo",), timeout=400, bare=True, tool=True, self_check="compares with the kernel itself")
def rdma_speed(c):
    """The same two guests over rxe with perftest and over bowline: no slower than the kernel."""
    if not alive("b"):
        c.w.boot("b")
    try:
        program = install(c, c.w.bowline(), "/tmp/bowline", ("a", "b"), "man /tmp/pages")
        got = {}
        for _ in range(SPEED_ROUNDS):
            for g in ("a", "b"):
                in_guest(g, "bash -c 'modprobe -a ib_uverbs rdma_ucm rdma_cm rdma_rxe && rdma link add rxe0 type rxe "
                         "netdev eth0'")
            for what, theirs, _ in SPEED:
                background("b", "%s -d rxe0 -x 1" % theirs, "/tmp/perftest")
                waiting("b", "ss -Hltn 'sport = 18515' | grep -q LISTEN")
                row = last_row(in_guest("a", "%s -d rxe0 -x 1 %s" % (theirs, B)))
                # size, iterations, then peak and average MB/s, or minimum, maximum and typical us
                value = row[4] if "_lat" in theirs else row[3] * 1.048576
                got.setdefault(what, {}).setdefault("kernel", []).append(value)
            for g in ("a", "b"):
                in_guest(g, "bash -c 'rdma link del rxe0; rmmod rdma_rxe'")
            for what, _, ours in SPEED:
                background("b", "%s perf --server --address %s" % (program, B), "/tmp/perf")
                waiting("b", "grep -q listening /tmp/perf")
                out = in_guest("a", "%s perf --client %s --address %s %s --json" % (program, B, A, ours))
                r = json.loads(out.splitlines()[-1])
                value = (r["round_trip_usec"]["median"] / 2 if r["mode"] == "lat"
                         else r["gigabytes_per_second"] * 1000)
                got.setdefault(what, {}).setdefault("bowline", []).append(value)
        c.save("rounds", got)
        slower = []
        for what, g in got.items():
            ours, theirs = statistics.median(g["bowline"]), statistics.median(g["kernel"])
            unit = "us" if "trip" in what else "MB/s"
            c.note("%s: %.1f %s, rxe %.1f" % (what, ours, unit, theirs))
            if ours > theirs if unit == "us" else ours < theirs:
                slower.append(what)
        want(not slower, "slower than rxe: %s; %s", ", ".join(slower), "; ".join(c.notes))
    finally:
        # What was cut off must not stay in the way of the cases that follow.
        guest_run("a", "pkill ib_; rdma link del rxe0; rmmod rdma_rxe")
        down(["b"])
