"""The same program in the same guests, over the kernel's RDS and over the node."""
import statistics

from lab.agent import guest_run
from lab.common import Fail
from lab.guest import alive, down

from .endpoint import GuestNode
from .base import scenario, want
from .place import install
from .world import ip

A, B = "10.99.0.11", "10.99.0.12"
AT = {"a": A, "b": B}
PROGRAM = "/tmp/peer"
ROUNDS = 5
RATE_GOAL, TRIP_GOAL = 1.5, 1.0


class Pair:
    """The program in both guests, in one of its two forms."""

    def __init__(self, c, argv, kernel, load, *more):
        self.ends = {}
        for g in ("a", "b"):
            unload = "rmmod rds_rdma rds_tcp rds; rdma link del rxe0; rmmod rdma_rxe; "
            rc, out, err = guest_run(g, "{ %s } 2>/dev/null; %s" % (unload, load), 30)
            if rc:
                raise Fail("modules of guest %s: %s%s" % (g, out, err))
        for g in ("a", "b"):
            how = ["--kernel"] if kernel else ["--address", AT[g], *more]
            self.ends[g] = GuestNode("%s in %s" % ("kernel" if kernel else "node", g), g,
                                     argv + ["serve"] + how, c.log + ".%s.log" % g)

    def close(self):
        for e in self.ends.values():
            e.close()

    def rate(self, size, seconds, batch=None):
        """Messages per second that arrive at b."""
        sink = self.ends["b"].job("sink", bind=ip(B, 4011), seconds=seconds, batch=batch)
        sink.event("ready")
        flood = self.ends["a"].job("flood", bind=ip(A, 4010), to=ip(B, 4011), size=size, seconds=seconds + 0.7,
                                   batch=batch)
        r = sink.event("measured", seconds + 30)
        flood.wait(30)
        sink.tell("stop")
        sink.wait(10)
        return r["messages"] / r["seconds"]

    def trip(self, size, n):
        """Median round trip in microseconds."""
        echo = self.ends["b"].job("echo", bind=ip(B, 4021))
        echo.event("ready")
        out = self.ends["a"].ask("rtt", 60, bind=ip(A, 4020), to=ip(B, 4021), size=size, n=n)
        echo.tell("stop")
        echo.wait(10)
        return out["median"]


def compare(c, argv, load, *more):
    """The program over the kernel and over the node, in turn. -> ratios of the node to the kernel"""
    got = {}
    for _ in range(ROUNDS):
        for kernel in (True, False):
            p = Pair(c, argv, kernel, load[kernel], *more)
            try:
                p.trip(64, 20)  # connect and warm up
                for what, value in (("rate", p.rate(8192, 3)), ("rate, batches", p.rate(8192, 3, 16)),
                                    ("trip 64", p.trip(64, 500)), ("trip 8192", p.trip(8192, 500))):
                    got.setdefault(what, {}).setdefault(kernel, []).append(value)
                if not kernel:
                    c.save("speed", {g: e.ask("info") for g, e in p.ends.items()})
            finally:
                p.close()
    # neighbours in time are compared: the load of the host changes
    ratio = {w: statistics.median(n / k for n, k in zip(g[False], g[True])) for w, g in got.items()}
    c.save("rounds", got)
    for w, g in got.items():
        c.note("%s: %.0f, kernel %.0f (%.2f)" % (w, statistics.median(g[False]), statistics.median(g[True]),
                                                ratio[w]))
    c.messages += ROUNDS * 2040
    return ratio


@scenario("speed", orders=("lo",), timeout=240, bare=True, self_check="compares with the kernel itself")
def speed(c):
    """The same program in two guests, over rds_tcp and over the node: at least 1.5
    times the kernel's 8 KiB messages per second, and its round trip or better."""
    if not alive("b"):
        c.w.boot("b")
    try:
        argv = install(c, c.w.peer, PROGRAM, ("a", "b"), "serve --kernel").split()
        ratio = compare(c, argv, {True: "modprobe rds_tcp", False: "true"})
        want(ratio["rate"] >= RATE_GOAL, "less than %.1f times the kernel's rate; %s", RATE_GOAL, "; ".join(c.notes))
        for w in ("trip 64", "trip 8192"):
            want(ratio[w] <= TRIP_GOAL, "a longer round trip than the kernel's; %s", "; ".join(c.notes))
    finally:
        down(["b"])
