"""What scenarios are made of: their registry and verified streams."""
import time

MIB = 1 << 20
ALL = []
# local ports whose sockets a sender with eight paths puts on different paths: a kernel by the port, a
# node by the sum of this port and the next
PORTS = (1000, 2000, 4000, 10000)


class Wrong(Exception):
    """A scenario saw something else than it should."""


class Spec:
    def __init__(self, fn, name, rows="", dirs=("both",), orders=("lo", "hi"), paths=(8,), families=(4,),
                 timeout=60, ci=False, ci_dirs=None, absent=False, bare=False, self_check=True, n=0, ci_n=0, tool=False, preload=False,
                 setting=None):
        self.fn, self.name, self.rows = fn, name, rows
        self.dirs, self.orders, self.paths, self.families = dirs, orders, paths, families
        self.timeout, self.absent, self.bare, self.self_check = timeout, absent, bare, self_check
        # needs the bowline command; and the library that it preloads
        self.tool, self.preload = tool or preload, preload
        # over something else than TCP: a class, made for each case (see rds_rdma.py)
        self.setting = setting
        # in CI: not at all, or in these orders, and in these directions if not in all
        self.ci = (orders if ci is True else ci) or ()
        self.ci_dirs = ci_dirs or dirs
        self.n, self.ci_n = n, ci_n or n
        self.about = " ".join(fn.__doc__.split())

    def in_ci(self, variant):
        return variant["order"] in self.ci and variant["dir"] in self.ci_dirs

    def variants(self):
        for family in self.families:
            for paths in self.paths:
                for d in self.dirs:
                    for order in self.orders:
                        yield dict(dir=d, order=order, paths=paths, family=family)


def scenario(name, **kw):
    def add(fn):
        ALL.append(Spec(fn, name, **kw))
        return fn
    return add


def want(ok, text, *args):
    if not ok:
        raise Wrong(text % args)


def want_sent(end, ep):
    """The sender's queue is empty at the end of its job, but for what its kernel has not asked to be acknowledged."""
    want(end["left"] <= ep.unasked, "%s messages still queued at the sender", end["left"])


def quiet(recv, end, seconds=2):
    """Nothing has come for a while."""
    was, since = None, time.monotonic()
    while time.monotonic() < min(end, since + seconds):
        now = recv.stat()["messages"]
        if now != was:
            was, since = now, time.monotonic()
        time.sleep(0.1)


class Stream:
    """A verified stream from one endpoint to the other."""

    def __init__(self, src, src_at, dst, dst_at, seed, n=0, gaps=0, dups=None, rcvbuf=None, hold=None,
                 mode="block", rmode=None, low=0, high=MIB, idle=60, **send):
        self.n = n
        self.recv = dst.job("recv", bind=dst_at, n=n, seed=seed, gaps=gaps, dups=dups, min=low, max=high, mode=rmode,
                            rcvbuf=rcvbuf, hold=hold, idle=idle, linger=0.2 if n else None)
        self.recv.event("ready")
        self.send = src.job("send", bind=src_at, to=dst_at, n=n, seed=seed, min=low, max=high, mode=mode,
                            limit=idle, **send)

    def finish(self, timeout, flush=5):
        """Both ends of a stream of n messages. -> results of sender and receiver"""
        end = time.monotonic() + timeout
        r = self.recv.wait(timeout)
        self.send.event("sent", max(1, end - time.monotonic()))
        self.send.tell("close", flush=flush, keep=self.send.ep.unasked)
        s = self.send.wait(flush + 10)
        want(r["messages"] == s["messages"] == self.n, "%s messages sent, %s came", s["messages"],
             r["messages"])
        want_sent(s, self.send.ep)
        return s, r

    def stop(self, timeout, exact=True):
        """End an endless stream: all that was sent must have come."""
        end = time.monotonic() + timeout
        self.send.tell("stop")
        sent = self.send.event("sent", timeout)
        while True:
            got = self.recv.stat()["messages"]
            if not exact or got >= sent["messages"] or time.monotonic() > end:
                break
            time.sleep(0.05)
        if self.send.ep.unasked and not exact:
            # what is not acknowledged may be on its way still
            quiet(self.recv, end)
        self.send.tell("close", flush=max(5, end - time.monotonic()), keep=self.send.ep.unasked)
        s = self.send.wait(max(10, end - time.monotonic()))
        self.recv.tell("stop")
        r = self.recv.wait(10)
        if exact:
            want(r["messages"] == s["messages"], "%s messages sent, %s came", s["messages"], r["messages"])
        want_sent(s, self.send.ep)
        return s, r


def both_ways(c, total, seed=100, ports=PORTS, timeout=120, **kw):
    """total messages each way, over several sockets, senders of all kinds."""
    modes = ("block", "nonblock", "timeout", "block")
    each = max(1, total // len(ports))
    streams = []
    for i, p in enumerate(ports):
        rmode = "nonblock" if i % 2 else "block"
        streams.append(Stream(c.k, c.at_k(p), c.n, c.at_n(p + 1), seed + i, each, mode=modes[i % 4],
                              rmode=rmode, **kw))
        streams.append(Stream(c.n, c.at_n(p), c.k, c.at_k(p + 1), seed + 50 + i, each, mode=modes[i % 4],
                              rmode=rmode, **kw))
    size = 0
    end = time.monotonic() + timeout
    for s in streams:
        s, r = s.finish(end - time.monotonic())
        c.messages += r["messages"]
        size += r["bytes"]
    return size


def kernel_conns(c):
    """The kernel's TCP connections with the node: (local port, peer port)"""
    tcp = c.k.ask("info")["tcp"]
    return [(lp, pp) for la, lp, pa, pp in tcp if pa == c.n_addr]


def check_conns(c, paths=None):
    """As many connections as paths, all opened by the smaller address."""
    if c.setting:
        return c.setting.check_conns()
    paths = paths or c.paths
    for _ in range(20):
        conns = kernel_conns(c)
        if len(conns) == paths:
            break
        time.sleep(0.1)
    want(len(conns) == paths, "the kernel has %d connections with the node, not %d", len(conns), paths)
    for lp, pp in conns:
        opened = "node" if lp == 16385 else "kernel"
        want(opened == ("node" if c.order == "lo" else "kernel"),
             "the larger address opened a connection (%d to %d)", lp, pp)


def counter(ep, *names):
    got = ep.ask("info")["counters"]
    return sum(got.get(n, 0) for n in names)
