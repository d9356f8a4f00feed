"""bowline inside the guest on the kernel's soft RoCE (rxe), through rdma-core's libraries."""
import json

from lab.agent import guest_exec, guest_run
from lab.common import Fail

from .base import scenario, want
from .place import install, run_tests
from .roce import NO_SELF_CHECK, RPING_RACE, Roce, letters

PROGRAM = "/tmp/bowline"
LOG = "/tmp/bowline.log"
SIZES = (23, 64, 4097, 65535)
PINGS = 5
# operation, mode, size of a message, messages
PERF = (("send", "bw", 4097, 200), ("write", "bw", 65536, 100), ("read", "bw", 65536, 100), ("atomic", "bw", 8, 100),
        ("send", "lat", 64, 100), ("write", "lat", 64, 100))


class Guest:
    """The command in the guest, on rxe0."""

    def __init__(self, r):
        self.r, self.c = r, r.c
        self.program = install(r.c, r.c.w.bowline(), PROGRAM)

    def client(self, server, *words):
        """-> its lines"""
        return self.r.kernel("%s %s --client %s --device rxe0 --address %s" % (
            self.program, " ".join(words), server, self.c.k_addr)).splitlines()

    def serve(self, *words):
        command = "exec %s %s --server --device rxe0 --address %s > %s.out 2> %s.err" % (
            self.program, " ".join(words), self.c.k_addr, LOG, LOG)
        guest_run("a", "rm -f %s.out" % LOG)
        guest_exec("a", ["bash", "-c", command], 30, lambda b: None, lambda b: None, detach=True, log=LOG)
        for _ in range(60):
            if "listening" in guest_run("a", "cat %s.out" % LOG)[1]:
                return
        raise Fail("bowline in the guest does not listen: " + self.said())

    def said(self):
        return guest_run("a", "cat %s.err %s" % (LOG, LOG))[1]

    def end(self):
        """Ends the server. -> its lines but the first"""
        guest_run("a", "pkill -INT -f '^[^ ]*%s ' ; for i in 1 2 3 4 5 6 7 8 9; do "
                  "pgrep -f '^[^ ]*%s ' || break; sleep 0.3; done" % (PROGRAM, PROGRAM))
        return guest_run("a", "cat %s.out" % LOG)[1].splitlines()[1:]


def data(lines):
    return [x[len("ping data: "):] for x in lines if x.startswith("ping data: ")]


def pinged(got, size, who):
    want(got == [letters(n, size) for n in range(PINGS)], "size %d: %s printed %d pings, not all as they should be",
         size, who, len(got))


@scenario("rdmacore-rping", dirs=("k>n", "n>k"), orders=("lo",), families=(4, 6), timeout=240, bare=True, tool=True,
          self_check=NO_SELF_CHECK)
def rdmacore_rping(c):
    """bowline in the guest on rxe0 by libibverbs and librdmacm: rping in both roles, with the guest's own
    rping and with bowline's soft device on the host; every byte checked at both ends. Then all
    operations of perf, between the two devices. A refused connection says why."""
    with Roce(c) as r:
        g = Guest(r)
        out = r.kernel(g.program + " devices --json")
        rxe = [d for p in json.loads(out)["providers"] if p["name"] == "rdma-core" for d in p["devices"]]
        want([d["device"] for d in rxe] == ["rxe0"] and rxe[0]["usable"] and c.k_addr in rxe[0]["addresses"]
             and rxe[0]["mtu"] == 1024, "devices: %s", rxe)
        rc, _, err = guest_run("a", "%s rping --client %s --device rxe0 -p 7999 -C 1" % (g.program, c.k_addr), 60)
        want(rc == 1 and "nobody listens" in err, "no listener: status %d: %s", rc, err)
        ping = ["rping", "-C", str(PINGS), "--verify", "--verbose", "--json"]
        if c.dir == "k>n":
            g.serve("rping", "--persistent", "--verify", "--json")
            for size in SIZES:
                out = r.kernel("rping -c -a %s -C %d -S %d -V -v" % (c.k_addr, PINGS, size), pardon=RPING_RACE)
                pinged(data(out.splitlines()), size, "the guest's rping")
                pinged(data(r.client(*ping, "-S", str(size))), size, "the soft device")
                c.messages += 4 * PINGS
            pings = [json.loads(x)["pings"] for x in g.end()]
            want(pings == [PINGS] * (2 * len(SIZES)), "bowline in the guest served %s: %s", pings, g.said())
            g.serve("perf", "--persistent", "--verify", "--json")
        else:
            r.kernel_serves("rping -s -P -a %s -S 65535 -V" % c.k_addr, "/tmp/rping.log")
            soft = r.serve("rping", "--persistent", "--verify", "--json")
            for size in SIZES:
                for server in (c.k_addr, c.n_addr):
                    pinged(data(g.client(server, *ping, "-S", str(size))), size, "bowline in the guest")
                    c.messages += 2 * PINGS
            guest_run("a", "pkill -x rping")
            rc, lines = soft.end(ask=True)
            pings = [json.loads(x)["pings"] for x in lines]
            want(rc == 0 and pings == [PINGS] * len(SIZES), "the soft device served %s, status %d: %s", pings, rc,
                 soft.said())
            soft = r.serve("perf", "--persistent", "--verify", "--json")
        for op, mode, size, count in PERF:
            words = ["perf", "--op", op, "--mode", mode, "--size", str(size), "-n", str(count), "--depth", "16",
                     "--verify", "--json"]
            lines = r.client(*words) if c.dir == "k>n" else g.client(c.n_addr, *words)
            want(json.loads(lines[-1])["op"] == op, "perf: %s", lines)
            c.messages += count
        if c.dir == "k>n":
            g.end()
            want("differs" not in g.said(), "bowline in the guest: %s", g.said())
        else:
            rc, _ = soft.end(ask=True)
            want(rc == 0 and "differs" not in soft.said(), "the soft device: status %d: %s", rc, soft.said())
        left = guest_run("a", "rdma resource show qp; rdma resource show cm_id; rdma resource show mr")[1]
        want("bowline" not in left, "left behind: %s", left)


@scenario("rdmacore-tests", dirs=("k>n",), orders=("lo",), timeout=600, bare=True, tool=True,
          self_check=NO_SELF_CHECK)
def rdmacore_tests(c):
    """The tests of the provider over libibverbs, in the guest on rxe0."""
    c.guest("modprobe -a ib_core ib_uverbs rdma_ucm ib_cm rdma_cm rdma_rxe && rdma link add rxe0 type rxe netdev eth0")
    try:
        run_tests(c, "a", "rdmacore", "device", "BOWLINE_RDMA_DEVICE=rxe0")
        left = guest_run("a", "rdma resource show")[1]
    finally:
        guest_run("a", "rdma link del rxe0")
    # the pair that is left is the kernel's own
    want("qp 1 cm_id 0 mr 0 ctx 0" in left, "left behind: %s", left)
