"""The scenarios. Each is run once per variant: direction, order of the
addresses, number of paths, address family.

k is the kernel, n the node under test; lo means that the node has the smaller
address (it opens the connections), hi that the kernel has.
"""
import time

from lab.common import LATER

from .base import MIB, PORTS, Stream, Wrong, both_ways, check_conns, counter, quiet, scenario, want, want_sent
from .endpoint import JobFailed
from .world import NOBODY, ip

BOTH = ("k>n", "n>k")


# ---------------------------------------------------------------- connect

@scenario("ping", rows="T-1 T-5 T-6 T-9 T-18", dirs=BOTH, paths=(8, 1), ci=("lo",))
def ping(c):
    """Bind a socket and ping the other side, which has not been heard of."""
    src, src_a, _, dst_a = c.ends()
    r = src.ask("ping", bind=ip(src_a, 0), to=dst_a, n=5, wait=5)
    c.messages += 5
    c.note("first %.0f ms, then %.1f ms" % (r["first"] / 1e3, r["min"] / 1e3))
    if c.dir == "n>k":
        want(counter(c.k, "recv_ping") >= 5, "the kernel's recv_ping counts less than 5 pings")


@scenario("first-message", rows="T-3 T-31", dirs=BOTH, ci=("hi",))
def first_message(c):
    """The first message ever is sent by a blocking socket of each path."""
    src, src_a, dst, dst_a = c.ends()
    # the first socket of a kernel hashes by another number than all later ones
    dummy = c.k.job("recv", bind=c.at_k(99), idle=100)
    dummy.event("ready")
    ports = {20000: 5, 1000: 4, 2: 2, 4000: 1, 10000: 3}
    # to these ports a node takes the same paths: its choice is by the sum of both [R-2040]
    to = (3006, 3004, 3019, 3000, 3043)
    for i, p in enumerate(ports):
        s = Stream(src, ip(src_a, p), dst, ip(dst_a, to[i]), 7 + i, 3, low=100, high=100)
        s.finish(15)
        c.messages += 3
    if c.dir == "k>n" and not c.w.self_check:
        # opened one after the other, paths have the same numbers at both ends; a map
        # has 8240 bytes with its header, and each path may have had a pong
        got = {path: n - size // 8240 for path, n, size in c.n.ask("info")["links"]}
        # what a 7.x kernel sends before it knows how many paths there are goes on path 0
        named = set(ports.values()) - ({ports[20000]} if LATER else set())
        want(len(got) == 8 and {p for p in range(1, 8) if got[p] == got[6] + 3} == named,
             "messages came on other paths than the ports say: %s", got)


@scenario("ping-off", rows="T-19", timeout=100)
def ping_off(c):
    """A kernel with ping_enable=0 answers no probe: everything on one path."""
    c.k.ask("sysctl", name="ping_enable", value=0)
    try:
        p = c.n.job("ping", bind=c.at_n(0), to=c.k_addr, n=1, wait=2)
        try:
            p.wait(10)
        except JobFailed:
            pass
        else:
            raise Wrong("the kernel answered a ping")
        s = Stream(c.n, c.at_n(4000), c.k, c.at_k(4001), 3, 100, mode="nonblock", high=50000)
        t = time.monotonic()
        # a peer that says nothing is not taken for a kernel at once
        s.finish(40, flush=40)
        c.note("acknowledged after %.0f s" % (time.monotonic() - t))
        s = Stream(c.k, c.at_k(4000), c.n, c.at_n(4001), 4, 100, mode="nonblock", high=50000)
        s.finish(30)
        c.messages += 200
    finally:
        c.k.ask("sysctl", name="ping_enable", value=1)


# ---------------------------------------------------------------- messages

@scenario("messages", rows="T-2 T-3", paths=(8, 1), timeout=240, ci=("hi",), n=10000, ci_n=1000)
def messages(c):
    """Verified messages of 0 to 1 MiB both ways at once, four sockets each way,
    blocking, non-blocking and with a timeout; then the connections counted."""
    t = time.monotonic()
    size = both_ways(c, c.scale, timeout=c.spec.timeout - 20)
    c.note("%.0f MB in %.1f s" % (size / 1e6, time.monotonic() - t))
    check_conns(c)


@scenario("ipv6", rows="T-20", families=(6,), ci=True, n=1000, ci_n=200)
def ipv6(c):
    """Ping and verified messages both ways over IPv6."""
    c.k.ask("ping", bind=ip(c.k_addr, 0), to=c.n_addr)
    c.n.ask("ping", bind=ip(c.n_addr, 0), to=c.k_addr)
    both_ways(c, c.scale, ports=PORTS[:2])
    check_conns(c)


@scenario("big", rows="T-28", dirs=BOTH, orders=("lo",), n=200)
def big(c):
    """Messages of 1 MiB only, through a receiver with a small buffer."""
    src, src_a, dst, dst_a = c.ends()
    s = Stream(src, ip(src_a, 4000), dst, ip(dst_a, 4001), 5, c.scale, low=MIB, rcvbuf=4000,
               mode="nonblock")
    s.finish(60)
    c.messages += c.scale


# ---------------------------------------------------------------- congestion

@scenario("congestion", rows="T-11", dirs=BOTH, timeout=90, ci=("hi",))
def congestion(c):
    """A receiver that does not read congests its port only; senders are refused
    or blocked, and get through when it reads again."""
    src, src_a, dst, dst_a = c.ends()
    free = Stream(src, ip(src_a, 4100), dst, ip(dst_a, 4101), 9, 1, low=10, high=10)
    free.finish(20)
    # a small send buffer, or much is on its way before the map comes
    hold = dict(hold=1, rcvbuf=4000, low=1000, high=1000, sndbuf=65536)
    streams = [Stream(src, ip(src_a, 4000), dst, ip(dst_a, 4001), 10, mode="nonblock", **hold),
               Stream(src, ip(src_a, 4002), dst, ip(dst_a, 4003), 11, mode="block", **hold)]
    end = time.monotonic() + 30
    was, since = None, 0
    # a machine that has other work may hold them for a moment, too, but it refuses nobody
    held = False
    while time.monotonic() < since + 1 or not held:
        now = [s.send.stat()["messages"] for s in streams]
        held = counter(src, "cong_send_error") >= 5 and counter(src, "cong_send_blocked") >= 1
        if now != was:
            was, since = now, time.monotonic()
        want(time.monotonic() < end, "nothing refuses one sender and blocks the other; they are at %s", now)
        time.sleep(0.1)
    # another port of the same node is not concerned
    free = Stream(src, ip(src_a, 4200), dst, ip(dst_a, 4201), 12, 50, low=500, high=5000)
    free.finish(15)
    now = [s.send.stat()["messages"] for s in streams]
    want(now == was, "senders went on although the receiver did not read: %s, then %s", was, now)
    for s in streams:
        s.recv.tell("go")
    moving(streams, 20, max(was) + 500)
    c.messages += 51
    for s in streams:
        sent, got = s.stop(30)
        c.messages += got["messages"]
        if s is streams[0]:
            want(sent["refused"].get("ENOBUFS", 0) > 0, "the non-blocking sender never saw ENOBUFS: %s",
                 sent["refused"])
    c.note("held back after %d and %d messages" % tuple(was))


@scenario("threshold", rows="T-12", dirs=BOTH, ci=("lo",))
def threshold(c):
    """The receive buffer may be filled exactly; one byte more congests the port."""
    src, src_a, dst, dst_a = c.ends()
    r = dst.job("recv", bind=ip(dst_a, 4001), n=0, hold=1, rcvbuf=4000)
    r.event("ready")
    # there is a connection; what a socket has not begun to send goes with it
    src.ask("ping", bind=ip(src_a, 0), to=dst_a, n=1, wait=20)

    def fill(port, size):
        j = src.job("fill", bind=ip(src_a, port), to=ip(dst_a, 4001), size=size, n=1)
        refused = j.event("sent")["refused"]
        j.tell("close", flush=5, keep=src.unasked)
        want_sent(j.wait(), src)
        return refused

    want(fill(4010, 4000) is None, "the first 4000 bytes were refused")
    want(fill(4011, 1) is None, "a byte was refused although the buffer was not exceeded")
    # until the map has come, more is accepted
    end = time.monotonic() + 10
    while (refused := fill(4012, 1)) is None and time.monotonic() < end:
        time.sleep(0.1)
    want(refused == "ENOBUFS", "after 4001 bytes %s, not ENOBUFS", refused)
    c.messages += 2
    # the socket goes, and its congestion with it
    r.tell("close")
    r.tell("stop")


# ---------------------------------------------------------------- trouble

def load(c, **kw):
    """Endless streams both ways at a bearable rate."""
    kw = dict(dict(high=65536, pause=0.002, low=16), **kw)
    return [Stream(c.k, c.at_k(4000), c.n, c.at_n(4001), 21, **kw),
            Stream(c.k, c.at_k(20000), c.n, c.at_n(4003), 22, mode="nonblock", **kw),
            Stream(c.n, c.at_n(4000), c.k, c.at_k(4001), 23, **kw),
            Stream(c.n, c.at_n(20000), c.k, c.at_k(4003), 24, mode="nonblock", **kw)]


def moving(streams, timeout, least=20):
    """Every stream gets on by some messages."""
    was = [s.recv.stat()["messages"] for s in streams]
    end = time.monotonic() + timeout
    for s, w in zip(streams, was):
        while s.recv.stat()["messages"] < w + least:
            want(time.monotonic() < end, "%s stands still at %d messages", s.recv, s.recv.stat()["messages"])
            time.sleep(0.1)


def cut_wire(c, streams):
    """The link loses everything for five seconds; the streams go on and lose nothing."""
    moving(streams, 20)
    c.link("drop")
    time.sleep(5)
    c.link("pass")
    t = time.monotonic()
    moving(streams, 40)
    c.note("moving again after %.1f s" % (time.monotonic() - t))
    for s in streams:
        c.messages += s.stop(40)[1]["messages"]
    check_conns(c)


@scenario("link-cut", timeout=120, ci=("lo",))
def link_cut(c):
    """The link loses everything for five seconds under load both ways."""
    cut_wire(c, load(c))


@scenario("carrier", orders=("hi",))
def carrier(c):
    """The kernel's network card loses its carrier for two seconds."""
    streams = load(c)
    moving(streams, 20)
    c.link("off")
    time.sleep(2)
    c.link("on")
    moving(streams, 40)
    for s in streams:
        c.messages += s.stop(40)[1]["messages"]


@scenario("loss", timeout=120)
def loss(c):
    """The kernel's link loses 2 % and delays and reorders its packets."""
    c.guest("modprobe sch_netem; tc qdisc add dev eth0 root netem loss 2% delay 3ms 2ms reorder 5%")
    streams = load(c, pause=0.005)
    time.sleep(8)
    for s in streams:
        c.messages += s.stop(60)[1]["messages"]


@scenario("kernel-reset", timeout=90, self_check="two kernels lose messages here")
def kernel_reset(c):
    """Under load both ways the kernel resets all its connections, five times."""
    streams = load(c)
    moving(streams, 20)
    for i in range(5):
        c.k.ask("sysctl", name="tcp.rds_tcp_sndbuf", value=1048576 + 4096 * i)
        time.sleep(0.7)
    moving(streams, 30)
    for s in streams:
        c.messages += s.stop(40)[1]["messages"]
    check_conns(c)


def reset_load(c, lossy):
    """Load both ways for connections that end by resets. Streams to the kernel may
    have messages twice: it compares numbers per path, and paths change places [R-420].
    lossy: streams to the node may have gaps."""
    kw = dict(high=65536, pause=0.002, low=16)
    back = dict(kw, gaps=1) if lossy else kw
    return ([Stream(c.k, c.at_k(4000), c.n, c.at_n(4001), 21, **back),
             Stream(c.k, c.at_k(20000), c.n, c.at_n(4003), 22, mode="nonblock", **back)],
            [Stream(c.n, c.at_n(4000), c.k, c.at_k(4001), 23, gaps=1, dups=1, **kw),
             Stream(c.n, c.at_n(20000), c.k, c.at_k(4003), 24, gaps=1, dups=1, mode="nonblock", **kw)])


def reset_end(c, back, out):
    again = missing = 0
    for s in back:
        sent, r = s.stop(40, exact=False)
        want(max(r["next"].values()) == sent["messages"], "the last of %d messages did not come: %s",
             sent["messages"], r["next"])
        missing += r["missing"]
        c.messages += r["messages"]
    for s in out:
        r = s.stop(40)[1]
        want(r["missing"] == 0, "%d messages to the kernel are missing", r["missing"])
        c.messages += r["messages"]
        again += r["again"]
    if again:
        c.note("%d messages came again at the kernel" % again)
    if missing:
        c.note("%d messages of the kernel are missing" % missing)
    check_conns(c)


@scenario("sockets-destroyed", rows="T-30", timeout=90, ci=("hi",), self_check="two kernels lose messages here")
def sockets_destroyed(c):
    """Under load both ways the kernel's TCP sockets are destroyed (ss -K): nothing is lost."""
    back, out = reset_load(c, lossy=False)
    moving(back + out, 20)
    for _ in range(3):
        c.guest("modprobe -a tcp_diag; ss -K dst %s > /dev/null" % c.n_addr)
        time.sleep(1)
        moving(back + out, 30)
    reset_end(c, back, out)


@scenario("node-cut", timeout=90, self_check="only the node can be told to cut its connections")
def node_cut(c):
    """Under load both ways the node cuts all its connections with resets, five times.
    Nothing it has sent may be lost. What the kernel has sent is lost where the node's
    TCP had acknowledged it and nobody had read it [R-241]."""
    back, out = reset_load(c, lossy=True)
    moving(back + out, 20)
    for _ in range(5):
        c.n.ask("cut")
        time.sleep(0.7)
    moving(back + out, 30)
    reset_end(c, back, out)


def contiguous(r, what):
    want(r["missing"] == 0, "%s: %d messages are missing in the middle", what, r["missing"])
    want(r["messages"] > 0, "%s: nothing came", what)


@scenario("kernel-reboot", timeout=180)
def kernel_reboot(c):
    """The kernel's machine loses its power under load and comes back; the node's
    socket goes on sending, and new sockets of the kernel are served."""
    kw = dict(low=16, high=65536, pause=0.004)
    out = c.n.job("send", bind=c.at_n(4000), to=c.at_k(4001), n=0, seed=31, min=16, max=65536, pause=0.004,
                  limit=120)
    first = c.k.job("recv", bind=c.at_k(4001), n=0, seed=31, gaps=1, min=16, max=65536, idle=60)
    back = Stream(c.k, c.at_k(4000), c.n, c.at_n(4001), 32, gaps=1, idle=120, **kw)
    first.event("ready")
    end = time.monotonic() + 20
    while min(first.stat()["messages"], back.recv.stat()["messages"]) < 100:
        want(time.monotonic() < end, "no load before the reboot")
        time.sleep(0.1)
    c.messages += first.stat()["messages"]
    c.reboot_kernel()
    t = time.monotonic()
    again = c.k.job("recv", bind=c.at_k(4001), n=0, seed=31, gaps=1, min=16, max=65536, idle=60)
    again.event("ready")
    if c.w.self_check and c.order == "hi":
        # a larger kernel in the node's place knocks once per send only
        c.k.ask("ping", 50, bind=c.at_k(0), to=c.n_addr, n=1, wait=40)
    while again.stat()["messages"] < 50:
        want(time.monotonic() < t + 60, "the node's stream did not come back: %s", again.stat())
        time.sleep(0.1)
    c.note("stream back %.1f s after the boot" % (time.monotonic() - t))
    # the kernel's new sockets reach the node, whose old receiver is still there
    fresh = Stream(c.k, c.at_k(5000), c.n, c.at_n(5001), 33, 200, **kw)
    c.messages += fresh.finish(40)[1]["messages"]
    out.tell("stop")
    sent = out.event("sent", 20)
    out.tell("close", flush=20)
    want_sent(out.wait(30), c.n)
    quiet(again, time.monotonic() + 20)
    again.tell("stop")
    r = again.wait(10)
    contiguous(r, "after the reboot")
    want(max(r["next"].values()) == sent["messages"], "the last of %d messages did not come: %s",
         sent["messages"], r["next"])
    c.messages += r["messages"]
    back.recv.tell("stop")
    contiguous(back.recv.wait(10), "before the reboot")


@scenario("node-restart", timeout=180, ci=("lo",))
def node_restart(c):
    """The node's process is killed under load and started again; the kernel's
    socket goes on sending, and new sockets of the node are served."""
    kw = dict(low=16, high=65536, pause=0.004)
    there = c.k.job("send", bind=c.at_k(4000), to=c.at_n(4001), n=0, seed=41, min=16, max=65536, pause=0.004,
                    limit=120)
    first = c.n.job("recv", bind=c.at_n(4001), n=0, seed=41, gaps=1, min=16, max=65536, idle=60)
    back = Stream(c.n, c.at_n(4000), c.k, c.at_k(4001), 42, gaps=1, idle=120, **kw)
    first.event("ready")
    end = time.monotonic() + 20
    while min(first.stat()["messages"], back.recv.stat()["messages"]) < 100:
        want(time.monotonic() < end, "no load before the kill")
        time.sleep(0.1)
    c.messages += first.stat()["messages"]
    c.kill_node()
    time.sleep(2)
    c.start_node()
    t = time.monotonic()
    again = c.n.job("recv", bind=c.at_n(4001), n=0, seed=41, gaps=1, min=16, max=65536, idle=60)
    again.event("ready")
    if c.order == "lo":
        # the larger kernel knocks once per send, and its sender may be
        # blocked by now: the restarted node has to say something first
        c.n.ask("ping", 50, bind=c.at_n(1000), to=c.k_addr, n=1, wait=40)
    while again.stat()["messages"] < 50:
        want(time.monotonic() < t + 60, "the kernel's stream did not come back: %s", again.stat())
        time.sleep(0.1)
    c.note("stream back after %.1f s" % (time.monotonic() - t))
    fresh = Stream(c.n, c.at_n(5000), c.k, c.at_k(5001), 43, 200, **kw)
    c.messages += fresh.finish(40)[1]["messages"]
    there.tell("stop")
    sent = there.event("sent", 20)
    there.tell("close", flush=20, keep=c.k.unasked)
    want_sent(there.wait(30), c.k)
    quiet(again, time.monotonic() + 20)
    again.tell("stop")
    r = again.wait(10)
    contiguous(r, "after the restart")
    want(max(r["next"].values()) == sent["messages"], "the last of %d messages did not come: %s",
         sent["messages"], r["next"])
    c.messages += r["messages"]
    back.recv.tell("stop")
    contiguous(back.recv.wait(10), "before the kill")


# ---------------------------------------------------------------- cancel, absent

@scenario("cancel", rows="T-14 T-25", dirs=BOTH, ci=("lo",), timeout=90)
def cancel(c):
    """A socket cancels what it has queued: the started messages arrive whole, the
    others never, and what is sent afterwards arrives in order."""
    src, src_a, dst, dst_a = c.ends()
    size = 500000
    s = Stream(src, ip(src_a, 4000), dst, ip(dst_a, 4001), 51, gaps=1, low=size, high=size, at="5,35",
               sndbuf=32 * MIB, mode="nonblock", idle=40)
    s.send.event("paused")
    end = time.monotonic() + 15
    while s.recv.stat()["messages"] < 5:
        want(time.monotonic() < end, "the first five messages did not come")
        time.sleep(0.05)
    c.link("drop")
    s.send.tell("go")
    s.send.event("paused", 20)
    s.send.tell("cancel", to=ip(dst_a, 4001))
    s.send.event("cancelled")
    c.link("pass")
    s.send.tell("go")
    t = time.monotonic()
    while s.send.stat()["messages"] < 45 and time.monotonic() < t + 30:
        time.sleep(0.02)
    sent, got = s.stop(40, exact=False)
    want(max(got["next"].values()) == sent["messages"], "the last of %d messages did not come: %s",
         sent["messages"], got["next"])
    want(15 <= got["missing"] <= 30, "%d of the 30 cancelled messages were not sent", got["missing"])
    want(got["messages"] + got["missing"] == sent["messages"], "%d came, %d are missing, %d were sent",
         got["messages"], got["missing"], sent["messages"])
    c.messages += got["messages"]
    c.note("%d of 30 cancelled in time" % got["missing"])


@scenario("absent-node", rows="T-22 T-23", dirs=("k>n",), absent=True, timeout=90, ci=("lo",))
def absent_node(c):
    """The kernel sends to a node that does not listen until its buffer is full;
    then the node starts and gets all of it."""
    if c.w.self_check:
        c.guest("true")
        from lab.agent import guest_run
        guest_run("b", "rmmod rds_tcp")
    j = c.k.job("fill", bind=c.at_k(4000), to=c.at_n(4001), size=10000, seed=61, sndbuf=106496, zero=1)
    full = j.event("sent")
    want(full["refused"] == "EAGAIN", "full send buffer: %s, not EAGAIN", full["refused"])
    want(full["messages"] == 11, "%d messages of 10000 bytes fit into 106496, not 11", full["messages"])
    want(j.event("zero")["refused"] == "EAGAIN", "an empty message went into a full buffer")
    time.sleep(1)
    c.link("drop")
    if c.w.self_check:
        guest_run("b", "modprobe rds_tcp")
    c.start_node()
    r = c.n.job("recv", bind=c.at_n(4001), n=full["messages"], seed=61, min=10000, max=10000, idle=40, linger=0.3)
    r.event("ready")
    c.link("pass")
    if c.order == "lo":
        # the larger kernel knocks once per send and never by itself
        c.k.ask("ping", 30, bind=c.at_k(0), to=c.n_addr, n=1, wait=20)
    c.messages += r.wait(40)["messages"]
    j.tell("close", flush=5, keep=c.k.unasked)
    want_sent(j.wait(), c.k)


@scenario("absent-kernel", dirs=("n>k",), timeout=90)
def absent_kernel(c):
    """The node sends to a kernel whose transport is not loaded until its buffer
    is full; then the module is loaded and the kernel gets all of it."""
    c.k.close()
    c.guest("rmmod rds_tcp; true")
    j = c.n.job("fill", bind=c.at_n(4000), to=c.at_k(4001), size=10000, seed=62, sndbuf=106496, zero=1)
    full = j.event("sent")
    want(full["refused"] == "EAGAIN", "full send buffer: %s, not EAGAIN", full["refused"])
    want(full["messages"] == 11, "%d messages of 10000 bytes fit into 106496, not 11", full["messages"])
    want(j.event("zero")["refused"] == "EAGAIN", "an empty message went into a full buffer")
    time.sleep(2)
    c.link("drop")
    c.guest("modprobe rds_tcp")
    c.start_kernel()
    r = c.k.job("recv", bind=c.at_k(4001), n=full["messages"], seed=62, min=10000, max=10000, idle=40, linger=0.3)
    r.event("ready")
    c.link("pass")
    if c.w.self_check and c.order == "hi":
        c.k.ask("ping", 30, bind=c.at_k(0), to=c.n_addr, n=1, wait=20)
    c.messages += r.wait(40)["messages"]
    j.tell("close", flush=5)
    want(j.wait()["left"] == 0, "the node still has messages queued")


@scenario("unreachable", dirs=BOTH, orders=("lo",), ci=True)
def unreachable(c):
    """A destination no host has: messages wait, the buffer fills, the errors are
    those of the kernel, and other destinations are served meanwhile. Messages to
    a port without socket vanish without a trace at the sender."""
    src, src_a, dst, dst_a = c.ends()
    j = src.job("fill", bind=ip(src_a, 4000), to=ip(NOBODY, 4001), size=50000, seed=63, sndbuf=106496)
    full = j.event("sent")
    want((full["messages"], full["refused"]) == (3, "EAGAIN"), "%s messages, then %s", full["messages"],
         full["refused"])
    if c.dir == "n>k" and not c.w.self_check:
        # a kernel's sender would wait for the handshake without limit
        t = src.job("send", bind=ip(src_a, 4002), to=ip(NOBODY, 4001), n=5, seed=64, min=50000, max=50000,
                    sndbuf=106496, mode="timeout", limit=0.1)
        end = "it succeeded"
        try:
            t.event("sent", 15)
        except JobFailed as e:
            end = str(e)
        want("110" in end, "a blocking send with a timeout should end in ETIMEDOUT: %s", end)
    s = Stream(src, ip(src_a, 5000), dst, ip(dst_a, 5001), 65, 100, high=50000)
    c.messages += s.finish(20)[1]["messages"]
    j.tell("close")
    want(j.wait()["left"] == 3, "messages for nobody left the queue by themselves")
    s = src.job("send", bind=ip(src_a, 5002), to=ip(dst_a, 5999), n=50, seed=66, max=2000)
    s.event("sent", 10)
    s.tell("close", flush=5, keep=src.unasked)
    want_sent(s.wait(), src)
    if c.dir == "n>k":
        want(counter(c.k, "recv_drop_no_sock") >= 50, "the kernel did not count them as recv_drop_no_sock")
