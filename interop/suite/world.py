"""The test world: guests, the node under test, and what is kept of a case."""
import json
import os
import shutil
import time

from lab.agent import guest_run
from lab.cli import parser
from lab.common import HERE, RUN, Fail
from lab.guest import alive, boot, console_tail, down, guests, set_link
from lab.net import cap_start, cap_stop, end_programs, net_up

from .endpoint import GuestNode, HostNode, JobFailed

KERNEL = {4: "10.99.0.11", 6: "fd99::b"}
# the node's addresses below and above the kernel's: on the host side, and in
# the second guest that plays the node in a self-check
NODE = {("lo", 4): "10.99.0.1", ("lo", 6): "fd99::1", ("hi", 4): "10.99.0.250", ("hi", 6): "fd99::fa"}
PEER = {("lo", 4): "10.99.0.5", ("lo", 6): "fd99::5", ("hi", 4): "10.99.0.240", ("hi", 6): "fd99::f0"}
PEER_IP = "10.99.0.5/24,10.99.0.240/24,fd99::5/64,fd99::f0/64"
NOBODY = "10.99.0.77"
VERIFY = ["python3", "-B", "/lab/rds-verify.py", "serve"]


def ip(addr, port):
    return ("[%s]:%d" if ":" in addr else "%s:%d") % (addr, port)


class World:
    """Guests live as long as the run; endpoints as long as a case."""

    def __init__(self, peer, logs, self_check=False, capture=False, kernel_args=(), bowline=None):
        self.peer, self.logs, self.self_check = peer, logs, self_check
        self.command = bowline
        self.capture, self.kernel_args = capture, list(kernel_args)
        self.boots = []
        self.case = None
        os.makedirs(logs, exist_ok=True)

    # -- guests

    def boot(self, name, ip=None, how=("--nics", "1")):
        t0 = time.monotonic()
        argv = ["boot", name] + list(how)
        if ip:
            argv += ["--ip", ip]
        for x in self.kernel_args:
            argv += ["--append", x]
        boot(parser().parse_args(argv))
        self.boots.append(time.monotonic() - t0)

    def up(self):
        net_up()
        for g in self.guests():
            if not alive(g):
                self.boot(g, PEER_IP if g == "b" else None)

    def guests(self):
        return ["a", "b"] if self.self_check else ["a"]

    def cut_power(self, guest):
        """The guest is gone from one moment to the next."""
        down([guest])

    def renew(self):
        """Nothing is left of a case: no guest, no program of the host side, no link. The next one boots anew."""
        down(guests())
        end_programs()
        down(["all"])

    def close(self):
        down(["all"])
        shutil.rmtree(RUN, ignore_errors=True)
        if os.path.exists(RUN + ".lock"):
            os.unlink(RUN + ".lock")

    # -- node under test

    def bowline(self):
        """The bowline command."""
        if not self.command:
            raise Fail("no bowline command; see --bowline")
        return self.command

    def addresses(self):
        return PEER if self.self_check else NODE

    def start_node(self, case, log, addrs, paths):
        if self.self_check:
            if not alive("b"):
                self.boot("b", PEER_IP)
            return GuestNode("node", "b", VERIFY, log)
        argv = [self.peer, "serve"] + (case.setting.options if case.setting else ["--paths", str(paths)])
        for a in addrs:
            argv += ["--address", a]
        return HostNode("node", argv, log)


class Case:
    """One scenario in one variant. Scenarios use nothing else."""

    def __init__(self, world, spec, variant, scale, dry=False):
        self.w, self.spec, self.v, self.scale = world, spec, variant, scale
        self.order, self.paths, self.family = variant["order"], variant["paths"], variant["family"]
        self.dir = variant["dir"]
        self.id = spec.name + "".join(
            "-" + str(x) for x in (self.dir.replace(">", "2") if self.dir != "both" else None, self.order,
                                   "1path" if self.paths == 1 else None, "v6" if self.family == 6 else None)
            if x)
        self.messages, self.notes, self.version = 0, [], None
        self.k = self.n = self.setting = None
        if dry:
            return
        self.k_addr = KERNEL[self.family]
        self.n_addr = world.addresses()[(self.order, self.family)]
        self.log = os.path.join(world.logs, self.id)
        if spec.setting:
            self.setting = spec.setting(self)

    # -- life

    def begin(self):
        for g in self.w.guests():
            if not alive(g):
                self.w.boot(g, PEER_IP if g == "b" else None)
            set_link(g, "pass")
        self.clean_slate()
        for x in os.listdir(self.w.logs):
            if x.startswith(self.id + "."):
                former = os.path.join(self.w.logs, x)
                if os.path.isdir(former):
                    shutil.rmtree(former)
                else:
                    os.unlink(former)
        if self.w.capture:
            cap_start("a", self.log + ".pcap", 9000, ["tcp", "port", "16385"])
        if self.setting:
            self.setting.begin()
        if self.spec.bare:
            return
        self.start_kernel()
        if not self.spec.absent:
            self.start_node()

    def clean_slate(self):
        """Kernels that have never heard of anybody; generations and counters new. A module that a case before has
        left in use goes with its guest."""
        load = self.setting.load if self.setting else "modprobe rds_tcp"
        for g in self.w.guests():
            # a case may forbid a module to be loaded; the next one may need it
            unload = ("dmesg -C; rm -rf /run/modprobe.d; tc qdisc del dev eth0 root 2>/dev/null; "
                      "rmmod rds_tcp; rmmod rds; test ! -e /sys/module/rds")
            if guest_run(g, unload, 30)[0]:
                down([g])
                self.w.boot(g, PEER_IP if g == "b" else None)
            rc, out, err = guest_run(g, load, 30)
            if rc:
                raise Fail("loading the modules of guest %s: %s%s" % (g, out, err))

    def start_kernel(self):
        self.k = GuestNode("kernel", "a", VERIFY, self.log + ".kernel.log")
        self.k.unasked = self.setting.unasked if self.setting else 0
        return self.k

    def start_node(self):
        self.n = self.w.start_node(self, self.log + ".node.log", [self.n_addr], self.paths)
        self.version = self.n.version
        if self.w.self_check:
            self.n.unasked = self.k.unasked
        return self.n

    def kill_node(self):
        """The node is gone; its host is still there."""
        if self.w.self_check:
            self.n.close()
            self.w.cut_power("b")
        else:
            self.n.kill()
        self.n = None

    def reboot_kernel(self):
        self.k.gone = True
        self.w.cut_power("a")
        self.k.close(0)
        self.w.boot("a")
        if self.setting:
            self.setting.rebooted()
        self.start_kernel()

    def end(self, failed):
        """Save counters and logs; leave nothing running."""
        for ep in (self.k, self.n):
            if ep and not ep.gone:
                try:
                    out = ep.ask("info", 10)
                    self.save(ep.name, {k: v for k, v in out.items() if k not in ("id", "ev")})
                except (JobFailed, OSError) as e:
                    self.note("no info from %s: %s" % (ep.name, e))
        for ep in (self.n, self.k):
            if ep:
                ep.close()
        if self.setting:
            self.setting.end(failed)
        if self.w.capture:
            cap_stop("a", quiet=True)
        for g in self.w.guests():
            if alive(g):
                rc, out, _ = guest_run(g, "dmesg", 20)
            else:
                out = console_tail(g, 60)
            with open("%s.dmesg-%s" % (self.log, g), "w") as f:
                f.write(out)
            if "BUG" in out or "Oops" in out or "Call Trace" in out:
                down([g])
                raise Fail("the kernel of guest %s complains; see %s.dmesg-%s" % (g, self.log, g))
        if not failed and not self.w.capture:
            # what a passed case leaves is its counters
            for x in (".kernel.log", ".node.log", ".node.log.stderr"):
                if os.path.exists(self.log + x):
                    os.unlink(self.log + x)

    def leftovers(self):
        """What to look at after a failure."""
        d, base = os.path.split(self.log)
        return [os.path.join(d, x) for x in sorted(os.listdir(d)) if x.startswith(base + ".")]

    def save(self, what, data):
        with open("%s.%s.json" % (self.log, what), "w") as f:
            json.dump(data, f, indent=1)

    # -- used by scenarios

    def note(self, text):
        self.notes.append(text)

    def link(self, state):
        set_link("a", state)

    def guest(self, script, timeout=30):
        rc, out, err = guest_run("a", script, timeout)
        if rc:
            raise Fail("in the guest: %s: %s%s" % (script, out, err))
        return out

    def at_k(self, port):
        return ip(self.k_addr, port)

    def at_n(self, port):
        return ip(self.n_addr, port)

    def ends(self):
        """-> (sender, its address, receiver, its address) by direction"""
        if self.dir == "k>n":
            return self.k, self.k_addr, self.n, self.n_addr
        return self.n, self.n_addr, self.k, self.k_addr


def find_peer(explicit, name="bowline-interop-peer"):
    """The peer program, or another: given, or in the target folder of cargo."""
    root = os.path.dirname(HERE)
    target = os.environ.get("CARGO_TARGET_DIR") or os.path.join(root, "target")
    for p in [explicit] if explicit else [os.path.join(target, t, name) for t in ("release", "debug")]:
        if os.path.exists(p):
            return os.path.abspath(p)
    if explicit:
        raise Fail("no such program: " + explicit)
    if shutil.which("cargo"):
        return None
    raise Fail("no %s in %s and no cargo to build it" % (name, target))

