"""Programs of the host that know nothing of bowline, run by `bowline run` on a node there, against the
kernel's own RDS sockets. Both sides run rds-verify.py, which uses AF_RDS sockets and nothing else."""
import os
import signal
import subprocess
import sys
import tempfile
import time

from lab.agent import guest_run
from lab.common import HERE, NETNS, Fail

from .base import both_ways, check_conns, scenario, want
from .endpoint import HostNode
from .place import copy
from .scenarios import BOTH, congestion, cut_wire, load, moving, reset_end, reset_load
from .world import NOBODY

ERRORS = os.path.join(HERE, "guest-tools", "rds-errors.c")
NO_SELF_CHECK = "a kernel needs no library for its sockets"
VERIFY = os.path.join(HERE, "guest-tools", "rds-verify.py")
HOW = dict(bare=True, preload=True, self_check=NO_SELF_CHECK)
# the longest message; programs may not have larger buffers than a user of a kernel
LONGEST = 65536


class Programs:
    """A node on the host side that serves programs, and the two ends of a case as programs of both sides."""

    def __init__(self, c, addresses=None, options=()):
        self.c, self.bowline = c, c.w.bowline()
        self.folder = tempfile.mkdtemp(prefix="bwl-programs-")
        self.host, self.control = (os.path.join(self.folder, x) for x in ("host.sock", "control.sock"))
        argv = [self.bowline, "node", "--programs", self.host, "--control", self.control, *options]
        for a in [c.n_addr] if addresses is None else addresses:
            argv += ["--address", a]
        self.log = open(c.log + ".bowline.log", "ab")
        self.argv = ["ip", "netns", "exec", NETNS] + argv
        self.node = self.start()
        try:
            for _ in range(200):
                if os.path.exists(self.host) and os.path.exists(self.control):
                    break
                want(self.node.poll() is None, "the node ended at once; see %s", self.log.name)
                time.sleep(0.05)
            else:
                raise Fail("the node does not serve programs")
        except BaseException:
            self.__exit__()
            raise

    def start(self, *more):
        return subprocess.Popen([*self.argv, *more], stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log,
                                start_new_session=True)

    def replace(self):
        """Another process goes on in the node's place."""
        former, self.node = self.node, self.start("--replace")
        want(former.wait(20) == 0, "the node that was replaced ended badly; see %s", self.log.name)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        """The node ends when it is asked to, and its programs before it."""
        if self.c.n:
            self.c.n.close()
        try:
            os.killpg(self.node.pid, signal.SIGTERM)
            self.node.wait(10)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            self.node.kill()
            self.node.wait()
        self.log.close()
        for x in os.listdir(self.folder):
            os.unlink(os.path.join(self.folder, x))
        os.rmdir(self.folder)

    def run(self, *program):
        """-> the words that run a program on the node"""
        return [self.bowline, "run", "--node", self.host, *program]

    def ends(self):
        """Programs at both ends that take jobs."""
        self.c.start_kernel()
        self.c.n = HostNode("node", self.run(sys.executable, "-B", VERIFY, "serve"), self.c.log + ".node.log")

    def ask(self, *words):
        p = subprocess.run([self.bowline, *words, "--control", self.control], stdout=subprocess.PIPE,
                           stderr=subprocess.STDOUT, timeout=20, check=False)
        want(p.returncode == 0, "bowline %s: %s", " ".join(words), p.stdout.decode())
        return p.stdout.decode()

    def done(self):
        """The node has no socket, message or descriptor of programs that have ended."""
        # the counters of both sides are kept, as after other cases
        self.c.save("node", {k: v for k, v in self.c.n.ask("info").items() if k not in ("id", "ev")})
        self.c.n.close()
        end = time.monotonic() + 5
        while True:
            left = [x for x in os.listdir("/proc/%d/fd" % self.node.pid) if self.is_pair(x)]
            if not left or time.monotonic() > end:
                break
            time.sleep(0.05)
        want(not left, "%d descriptors of sockets are left in the node", len(left))

    def is_pair(self, fd):
        try:
            return "memfd:" in os.readlink("/proc/%d/fd/%s" % (self.node.pid, fd))
        except OSError:
            return False


@scenario("programs", dirs=("both",), timeout=240, ci=True, n=4000, ci_n=1000, **HOW)
def programs(c):
    """Verified messages of 0 to 64 KiB both ways at once between programs of `bowline run` and of the kernel, four
    sockets each way, blocking, non-blocking and with a timeout."""
    with Programs(c) as p:
        p.ends()
        t = time.monotonic()
        size = both_ways(c, c.scale, timeout=c.spec.timeout - 20, high=LONGEST)
        c.note("%.0f MB in %.1f s" % (size / 1e6, time.monotonic() - t))
        check_conns(c)
        p.done()


@scenario("programs-cut", dirs=("both",), timeout=120, **HOW)
def programs_cut(c):
    """Under load both ways the wire loses everything for five seconds; nothing is lost, and nothing comes twice."""
    with Programs(c) as p:
        p.ends()
        cut_wire(c, load(c, low=0))
        p.done()


@scenario("programs-drop", dirs=("both",), orders=("lo",), timeout=90, **HOW)
def programs_drop(c):
    """Under load both ways the node's connections are dropped, five times. As in node-cut, what the kernel has sent
    may be lost, and what it receives may come twice: both is the kernel's limit."""
    with Programs(c) as p:
        p.ends()
        back, out = reset_load(c, lossy=True)
        moving(back + out, 20)
        for _ in range(5):
            p.ask("drop")
            time.sleep(0.7)
        moving(back + out, 30)
        reset_end(c, back, out)
        p.done()


@scenario("programs-replace", dirs=("both",), timeout=120, ci=("lo",), **HOW)
def programs_replace(c):
    """Under load both ways another process takes the node's place, three times: programs keep their sockets, and
    nothing is lost."""
    with Programs(c) as p:
        p.ends()
        back, out = reset_load(c, lossy=False)
        moving(back + out, 20)
        for _ in range(3):
            p.replace()
            t = time.monotonic()
            moving(back + out, 30, least=1)
            c.note("moving again after %.1f s" % (time.monotonic() - t))
            time.sleep(0.7)
        reset_end(c, back, out)
        p.done()


@scenario("programs-congestion", dirs=BOTH, orders=("lo",), timeout=90, ci=True, **HOW)
def programs_congestion(c):
    """A program that does not read congests its port only: those that send to it wait or see ENOBUFS, and nothing is
    lost when it reads again."""
    with Programs(c) as p:
        p.ends()
        congestion(c)
        p.done()


# what differs from a kernel on purpose: row, tab, what the kernel gives, tab, what bowline gives, tab, reason
EXPECTED = os.path.join(HERE, "suite", "errors-expected.tsv")
ROWS_LEAST = 200


@scenario("programs-errors", rows="", dirs=("both",), orders=("lo",), timeout=120, ci=True, **HOW)
def programs_errors(c):
    """One program makes each call of tools.md section 8 on the kernel's sockets and on bowline's: results and error
    numbers are equal but for the expected differences, of which each has a reason and none is out of date."""
    with Programs(c, addresses=[]) as p:
        for how, to in (((), c.log + ".errors"), (("-static",), c.log + ".errors-static")):
            subprocess.run(["gcc", "-O1", *how, "-o", to, ERRORS], check=True)
        # the kernel has no RDMA transport either, and does not load one when it is asked for
        c.guest("mkdir -p /run/modprobe.d; echo install rds_rdma /bin/false > /run/modprobe.d/no-rdma.conf")
        c.start_kernel()
        copy(("a",), c.log + ".errors-static", "/tmp/rds-errors")
        rc, out, err = guest_run("a", "/tmp/rds-errors %s %s %s" % (c.k_addr, c.n_addr, NOBODY), 60)
        want(rc == 0, "in the guest: status %d: %s%s", rc, out[-300:], err)
        words = p.run(c.log + ".errors", c.n_addr, c.k_addr, NOBODY)
        here = subprocess.run(["ip", "netns", "exec", NETNS] + words, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                              timeout=60, check=False)
        want(here.returncode == 0, "here: status %d: %s%s", here.returncode, here.stdout.decode()[-300:],
             here.stderr.decode())
        for name, text in (("kernel", out), ("bowline", here.stdout.decode())):
            with open("%s.errors.%s" % (c.log, name), "w") as f:
                f.write(text)
        compare(c, table(out), table(here.stdout.decode()))


WALK = os.path.join(HERE, "..", "crates", "bowline-preload", "tests")


@scenario("programs-walk", rows="", dirs=("both",), orders=("lo",), timeout=1500, **HOW)
def programs_walk(c):
    """Random sequences of calls on descriptors by all that the C library has, in one process and its children, give the
    same on the kernel's sockets and on bowline's, but for what tests/walk/explained.tsv explains. BOWLINE_WALK says which:
    FIRST COUNT STEPS."""
    words = os.environ.get("BOWLINE_WALK", "1001 500 60").split()
    source = os.path.join(WALK, "programs", "walk.c")
    # addresses of this machine with a node of their own: what is on the wire is another matter
    with Programs(c, addresses=["127.45.0.1", "127.45.0.2"]) as p:
        for how, to in (((), c.log + ".walk"), (("-static",), c.log + ".walk-static")):
            subprocess.run(["gcc", "-O1", "-pthread", *how, "-o", to, source], check=True)
        # as in programs-errors
        c.guest("mkdir -p /run/modprobe.d; echo install rds_rdma /bin/false > /run/modprobe.d/no-rdma.conf")
        c.start_kernel()
        copy(("a",), c.log + ".walk-static", "/tmp/rds-walk")
        other = guest_run("a", "ip -4 -o addr show dev eth1 | sed 's/.* inet \\([0-9.]*\\).*/\\1/'", 20)[1].strip()
        rc, out, err = guest_run("a", " ".join(["/tmp/rds-walk", c.k_addr, other, *words]), 1200)
        want(rc == 0, "in the guest: status %d: %s%s", rc, out[-300:], err)
        argv = p.run(c.log + ".walk", "127.45.0.1", "127.45.0.2", *words)
        here = subprocess.run(["ip", "netns", "exec", NETNS] + argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                              timeout=1200, check=False)
        want(here.returncode == 0, "here: status %d: %s", here.returncode, here.stderr.decode())
        files = ["%s.walk.%s" % (c.log, x) for x in ("kernel", "bowline")]
        for name, text in zip(files, (out.encode(errors="replace"), here.stdout)):
            with open(name, "wb") as f:
                f.write(text)
        compared = subprocess.run([sys.executable, "-B", os.path.join(WALK, "programs", "walk.py"),
                                   os.path.join(WALK, "walk", "explained.tsv"), *files],
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
        said = compared.stdout.decode(errors="replace")
        want(compared.returncode == 0, "%s", said[:2000])
        c.messages += len(out.splitlines())
        c.note(said.splitlines()[0])


def table(text):
    """-> results by row, in their order"""
    rows = [line.split("\t") for line in text.splitlines()]
    names = [r[0] for r in rows]
    want(all(len(r) == 2 for r in rows) and len(set(names)) == len(names), "rows are twice there, or none: %s",
         [n for n in names if names.count(n) > 1])
    return dict(rows)


def expected():
    with open(EXPECTED) as f:
        lines = [line.rstrip("\n").split("\t") for line in f if line.strip() and not line.startswith("#")]
    want(all(len(x) == 4 and all(x) for x in lines), "%s: lines of four words, please", EXPECTED)
    return {name: (kernel, ours) for name, kernel, ours, _ in lines}


def compare(c, kernel, ours):
    want(len(kernel) >= ROWS_LEAST, "only %d rows came from the kernel", len(kernel))
    differ = {n: (kernel.get(n, "nothing"), ours.get(n, "nothing"))
              for n in list(kernel) + list(ours) if kernel.get(n) != ours.get(n)}
    known = expected()
    wrong = ["%s: kernel %s, bowline %s" % (n, *v) for n, v in differ.items() if known.get(n) != v]
    gone = ["%s: as expected no more" % n for n in known if n not in differ]
    want(not wrong and not gone, "%d rows: %s", len(wrong) + len(gone), "; ".join(wrong + gone))
    c.messages += len(kernel)
    c.note("%d rows are equal, %d differ as expected" % (len(kernel) - len(differ), len(differ)))
