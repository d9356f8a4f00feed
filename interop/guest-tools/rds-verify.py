#!/usr/bin/env python3
"""Verifying RDS endpoint for a kernel with AF_RDS: the kernel's side of the
interop scenarios. It speaks the job protocol of interop/README.md on standard
input and output, as the userspace side (interop/peer) does:

  rds-verify.py serve                    jobs from standard input
  rds-verify.py ping --to 10.99.0.1      one job from the command line; any verb,
                                         --key value for key=value
"""
import ctypes
import errno
import ipaddress
import json
import os
import select
import socket
import struct
import sys
import threading
import time

AF_RDS, SOL_RDS = 21, 276
RDS_CANCEL_SENT_TO, RDS_CONG_MONITOR = 1, 6
SO_SNDBUFFORCE, SO_RCVBUFFORCE = 32, 33
INFO_COUNTERS, INFO6_CONNS, INFO6_SEND, INFO6_RETRANS, INFO6_TCP = 10000, 10011, 10012, 10013, 10016
MAX_MESSAGE = 1 << 20
M64 = (1 << 64) - 1
HEAD = struct.Struct("<IQI")  # seed, index, length: the first 16 bytes of a message
libc = ctypes.CDLL(None, use_errno=True)


# ---------------------------------------------------------------- messages

def mix(x):
    """One step of splitmix64."""
    x = (x + 0x9E3779B97F4A7C15) & M64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & M64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & M64
    return x ^ (x >> 31)


class Generator:
    """Sizes and contents of the messages of a stream, from its seed alone."""
    pools = {}

    def __init__(self, seed, low=0, high=MAX_MESSAGE):
        self.seed, self.low, self.high = seed & 0xFFFFFFFF, low, high
        if seed not in self.pools:
            base = b"".join(struct.pack("<Q", mix((self.seed << 20) + i)) for i in range(8192))
            # 33 blocks of 64 KiB, each the first one under another mask
            self.pools[seed] = b"".join(
                base.translate(bytes(b ^ ((k * 37) & 255) for b in range(256))) for k in range(33))
        self.pool = memoryview(self.pools[seed])

    def size(self, i):
        if i == 0:
            return self.low
        if i == 1:
            return self.high
        r = mix((self.seed << 32) ^ i ^ 0x5157)
        # each power of two equally likely, so that small ones come often
        cap = min(self.high - self.low, 1 << ((r & 0xFF) % 21))
        return self.low + (r >> 8) % (cap + 1)

    def parts(self, i, n):
        """-> the pieces that together are message i of n bytes"""
        off = mix((self.seed << 32) ^ i ^ 0xC0DE) & (MAX_MESSAGE - 1)
        if n < HEAD.size:
            return (self.pool[off:off + n],)
        return (HEAD.pack(self.seed, i, n), self.pool[off:off + n - HEAD.size])

    def check(self, i, buf, n):
        """-> None when the n bytes of buf are message i, else what is wrong"""
        want = self.size(i)
        if n != want:
            return "message %d has %d bytes, not %d%s" % (i, n, want, self.whose(buf, n))
        at = 0
        for p in self.parts(i, n):
            if not buf.startswith(p, at):
                return "message %d of %d bytes differs after byte %d%s" % (
                    i, n, at, self.whose(buf, n))
            at += len(p)
        return None

    @staticmethod
    def whose(buf, n):
        if n < HEAD.size:
            return ""
        return " (its head says seed %d, index %d, length %d)" % HEAD.unpack_from(buf)


# ---------------------------------------------------------------- sockets

def split(addr):
    """'10.0.0.1:5' or '[fd99::1]:5', the port being optional -> (host, port)"""
    if addr.startswith("["):
        host, _, port = addr[1:].partition("]")
        return host, int(port[1:] or 0)
    if addr.count(":") > 1:
        return addr, 0
    host, _, port = addr.partition(":")
    return host, int(port or 0)


def join(a):
    return ("[%s]:%d" if ":" in a[0] else "%s:%d") % (a[0], a[1])


def sockaddr(host, port):
    ip = ipaddress.ip_address(host)
    if ip.version == 4:
        return struct.pack("=H", socket.AF_INET) + struct.pack("!H", port) + ip.packed + bytes(8)
    return (struct.pack("=H", socket.AF_INET6) + struct.pack("!HI", port, 0) + ip.packed
            + struct.pack("=I", 0))


def unsockaddr(sa):
    family, port = struct.unpack_from("=H", sa)[0], struct.unpack_from("!H", sa, 2)[0]
    if family == socket.AF_INET6:
        return str(ipaddress.IPv6Address(sa[8:24])), port
    return socket.inet_ntoa(sa[4:8]), port


def call(rc):
    if rc < 0:
        e = ctypes.get_errno()
        raise OSError(e, os.strerror(e))
    return rc


class Rds:
    """An RDS socket. Python knows no sockaddr_in6 for this family, so bind,
    connect and IPv6 receives go through libc, and a sender is connected."""

    def __init__(self, job, sndbuf=0, rcvbuf=0):
        self.s = socket.socket(AF_RDS, socket.SOCK_SEQPACKET, 0)
        if sndbuf:
            self.buffer(SO_SNDBUFFORCE, socket.SO_SNDBUF, sndbuf)
        if rcvbuf:
            self.buffer(SO_RCVBUFFORCE, socket.SO_RCVBUF, rcvbuf)
        self.v6 = ":" in split(job["bind"])[0]
        sa = sockaddr(*split(job["bind"]))
        call(libc.bind(self.s.fileno(), sa, len(sa)))

    def buffer(self, forced, plain, size):
        """As large as asked, or as large as one may have it: a bowline node forces nothing."""
        try:
            self.s.setsockopt(socket.SOL_SOCKET, forced, size)
        except PermissionError:
            self.s.setsockopt(socket.SOL_SOCKET, plain, size)

    def connect(self, to):
        sa = sockaddr(*split(to))
        call(libc.connect(self.s.fileno(), sa, len(sa)))

    def timeouts(self, seconds):
        tv = struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))
        self.s.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, tv)
        self.s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, tv)

    def name(self):
        sa, n = ctypes.create_string_buffer(28), ctypes.c_uint32(28)
        call(libc.getsockname(self.s.fileno(), sa, ctypes.byref(n)))
        return join(unsockaddr(sa.raw))

    def recv_into(self, buf, flags=0):
        """-> (length, (host, port) of the sender)"""
        if not self.v6:
            return self.s.recvfrom_into(buf, 0, flags)
        raw = (ctypes.c_char * len(buf)).from_buffer(buf)
        sa, n = ctypes.create_string_buffer(28), ctypes.c_uint32(28)
        got = call(libc.recvfrom(self.s.fileno(), raw, len(buf), flags, sa, ctypes.byref(n)))
        return got, unsockaddr(sa.raw)

    def close(self):
        self.s.close()


def info(opt):
    """-> the items of an RDS info option"""
    s = socket.socket(AF_RDS, socket.SOCK_SEQPACKET, 0)
    size = 1 << 14
    try:
        while True:
            buf, n = ctypes.create_string_buffer(size), ctypes.c_uint32(size)
            rc = libc.getsockopt(s.fileno(), SOL_RDS, opt, buf, ctypes.byref(n))
            if rc < 0 and ctypes.get_errno() == errno.ENOSPC:
                size = n.value + 4096
                continue
            if rc < 0 and ctypes.get_errno() == errno.ENOPROTOOPT:
                return []  # of a transport that is not loaded
            call(rc)
            return [buf.raw[o:o + rc] for o in range(0, n.value - rc + 1, rc)] if rc else []
    finally:
        s.close()


def counters():
    out = {}
    for e in info(INFO_COUNTERS):
        name, value = struct.unpack("=32sQ", e[:40])
        out[name.split(b"\0")[0].decode()] = value
    return out


def ip6(b):
    a = ipaddress.IPv6Address(b)
    return str(a.ipv4_mapped or a)


def queued(port):
    """-> how many messages the kernel still holds for a local port, sent or not"""
    return sum(struct.unpack("!H", e[44:46])[0] == port
               for opt in (INFO6_SEND, INFO6_RETRANS) for e in info(opt))


# ---------------------------------------------------------------- jobs

class Stop(Exception):
    pass


class Job:
    def __init__(self, jid, verb, args):
        self.id, self.verb, self.args = jid, verb, args
        self.go, self.stopped, self.closing = threading.Event(), threading.Event(), threading.Event()
        self.flush, self.keep = 0.0, 0
        self.count = self.bytes = 0
        self.sock = None

    def __getitem__(self, k):
        if k not in self.args:
            raise ValueError("%s needs %s=" % (self.verb, k))
        return self.args[k]

    def num(self, k, default=0):
        return type(default)(self.args.get(k, default))

    def tell(self, ev, **kw):
        emit(dict(kw, id=self.id, ev=ev))

    def run(self):
        try:
            end = dict(getattr(self, "do_" + self.verb)(), ev="done")
        except Stop:
            end = dict(ev="done", messages=self.count)
        except Exception as e:  # whatever it is, the scenario must see it
            end = dict(ev="error", error="%s: %s" % (type(e).__name__, e), messages=self.count,
                       errno=getattr(e, "errno", None))
        if self.sock:
            self.sock.close()  # before anybody hears of the end
        self.tell(**end)

    def control(self, what, args):
        if what == "go":
            self.go.set()
        elif what == "stop":
            self.stopped.set()
        elif what == "close":
            self.flush, self.keep = float(args.get("flush", 0)), int(args.get("keep", 0))
            self.go.set(), self.stopped.set(), self.closing.set()
        elif what == "stat":
            self.tell("stat", messages=self.count, bytes=self.bytes)
        elif what == "cancel":
            sa = sockaddr(*split(args["to"]))
            self.sock.s.setsockopt(SOL_RDS, RDS_CANCEL_SENT_TO, sa)
            self.tell("cancelled")
        else:
            raise ValueError("unknown: " + what)

    def wait_close(self):
        """Keep the socket, whose unacknowledged messages die with it."""
        self.closing.wait()
        port = split(self.sock.name())[1]
        end = time.monotonic() + self.flush
        left = queued(port)
        while left > self.keep and time.monotonic() < end:
            time.sleep(0.05)
            left = queued(port)
        return left

    def send_one(self, parts, mode, seen, limit):
        """Send one message in the asked manner; False when stopped before."""
        end = time.monotonic() + limit
        while True:
            try:
                self.sock.s.sendmsg(parts, [], socket.MSG_DONTWAIT if mode == "nonblock" else 0)
                return True
            except OSError as e:
                name = errno.errorcode.get(e.errno, str(e.errno))
                seen[name] = seen.get(name, 0) + 1
                if e.errno not in (errno.EAGAIN, errno.ENOBUFS, errno.ETIMEDOUT):
                    raise
                if self.stopped.is_set():
                    return False
                if time.monotonic() > end:
                    raise
                if e.errno == errno.ENOBUFS:
                    time.sleep(0.002)  # poll says writable all the time
                elif mode == "nonblock":
                    p = select.poll()
                    p.register(self.sock.s, select.POLLOUT)
                    p.poll(100)

    def do_send(self):
        """n messages (0: until stop) of one stream to one destination; at=A,B: wait
        for go before the messages of these numbers."""
        g = Generator(self.num("seed"), self.num("min"), self.num("max", MAX_MESSAGE))
        n, mode, pause = self.num("n"), self.args.get("mode", "block"), self.num("pause", 0.0)
        self.sock = Rds(self, self.num("sndbuf", 2 * MAX_MESSAGE))
        self.sock.connect(self["to"])
        if mode == "timeout":
            self.sock.timeouts(0.5)
        self.tell("ready", addr=self.sock.name())
        seen, t0, i = {}, time.monotonic(), self.num("first")
        at = [int(x) for x in self.args.get("at", "").split(",") if x]
        while (not n or self.count < n) and not self.stopped.is_set():
            if self.count in at:
                self.go.clear()
                self.tell("paused", at=self.count)
                self.go.wait()
            size = g.size(i)
            if not self.send_one(g.parts(i, size), mode, seen, self.num("limit", 60.0)):
                break
            i += 1
            self.count += 1
            self.bytes += size
            if pause:
                time.sleep(pause)
        dt = time.monotonic() - t0
        self.tell("sent", messages=self.count, bytes=self.bytes, seconds=dt, refused=seen)
        left = self.wait_close()
        return dict(messages=self.count, bytes=self.bytes, seconds=dt, refused=seen, left=left)

    def do_recv(self):
        """n messages (0: until stop), each source's in order and exactly once."""
        low, high = self.num("min"), self.num("max", MAX_MESSAGE)
        seed = self.num("seed")
        g = Generator(seed, low, high)
        n, gaps, dups, idle = self.num("n"), self.num("gaps"), self.num("dups"), self.num("idle", 30.0)
        nonblock = self.args.get("mode") == "nonblock"
        self.sock = Rds(self, 0, self.num("rcvbuf"))
        self.sock.timeouts(0.25)
        self.tell("ready", addr=self.sock.name())
        if self.num("hold"):
            self.go.wait()
        poll = select.poll()
        poll.register(self.sock.s, select.POLLIN)
        buf = bytearray(MAX_MESSAGE + 16)
        src, missing, again, t0, last = {}, 0, 0, None, time.monotonic()
        while not n or self.count < n:
            try:
                if nonblock:
                    poll.poll(250)
                got, who = self.sock.recv_into(buf, socket.MSG_DONTWAIT if nonblock else 0)
            except OSError as e:
                if e.errno not in (errno.EAGAIN, errno.ETIMEDOUT, errno.EINTR):
                    raise
                if self.stopped.is_set():
                    break
                if time.monotonic() - last > idle:
                    raise TimeoutError("no message for %.0f s; %d of %d came, next index by source: %s"
                                       % (idle, self.count, n, src))
                continue
            last = time.monotonic()
            t0 = t0 or last
            want = src.get(join(who), 0 if not gaps else None)
            if gaps and got >= HEAD.size:
                i = HEAD.unpack_from(buf)[1]
                if want is not None and i < want and dups:
                    again += 1
                    if g.check(i, buf, got):
                        raise ValueError("repeated " + g.check(i, buf, got))
                    continue
                if want is not None and i < want:
                    raise ValueError("message %d came again or late; %d was next" % (i, want))
                missing += i - want if want is not None else 0
            elif want is None:
                raise ValueError("gaps=1 needs messages of at least %d bytes" % HEAD.size)
            else:
                i = want
            bad = g.check(i, buf, got)
            if bad:
                raise ValueError("from %s: %s" % (join(who), bad))
            src[join(who)] = i + 1
            self.count += 1
            self.bytes += got
        if n and self.num("linger", 0.0):
            # nothing may follow: a repeated message would come now
            poll.poll(self.num("linger", 0.0) * 1000)
            try:
                self.sock.recv_into(buf, socket.MSG_DONTWAIT)
                raise ValueError("a message more than the %d sent" % n)
            except OSError as e:
                if e.errno != errno.EAGAIN:
                    raise
        return dict(messages=self.count, bytes=self.bytes, seconds=last - (t0 or last), missing=missing, again=again,
                    next=src)

    def do_fill(self):
        """Non-blocking sends until one is refused: how many went, and the error."""
        g = Generator(self.num("seed"), self.num("size", 1000), self.num("size", 1000))
        self.sock = Rds(self, self.num("sndbuf"))
        self.sock.connect(self["to"])
        out = None
        while self.count < self.num("n", 10000):
            try:
                self.sock.s.sendmsg(g.parts(self.count, g.high), [], socket.MSG_DONTWAIT)
                self.count += 1
            except OSError as e:
                out = errno.errorcode.get(e.errno, str(e.errno))
                break
        self.tell("sent", messages=self.count, refused=out)
        if self.num("zero"):
            try:
                self.sock.s.sendmsg([b""], [], socket.MSG_DONTWAIT)
                self.tell("zero", refused=None)
            except OSError as e:
                self.tell("zero", refused=errno.errorcode.get(e.errno, str(e.errno)))
        left = self.wait_close()
        return dict(messages=self.count, refused=out, left=left)

    def do_echo(self):
        """Send everything back, until stop."""
        self.sock = Rds(self, 2 * MAX_MESSAGE)
        self.sock.timeouts(0.25)
        self.tell("ready", addr=self.sock.name())
        buf = bytearray(MAX_MESSAGE)
        fd = self.sock.s.fileno()
        raw = (ctypes.c_char * MAX_MESSAGE).from_buffer(buf)
        sas = {}
        while not self.stopped.is_set():
            try:
                n, who = self.sock.recv_into(buf)
            except OSError as e:
                if e.errno in (errno.EAGAIN, errno.ETIMEDOUT):
                    continue
                raise
            sa = sas.setdefault(who, sockaddr(who[0], who[1]))
            while libc.sendto(fd, raw, n, 0, sa, len(sa)) < 0:
                e = ctypes.get_errno()
                if e not in (errno.EAGAIN, errno.ENOBUFS, errno.ETIMEDOUT) or self.stopped.is_set():
                    raise OSError(e, os.strerror(e))
                time.sleep(0.001)
            self.count += 1
        raise Stop

    def do_rtt(self):
        """n round trips of size bytes against an echo job, in microseconds."""
        n, size = self.num("n", 100), self.num("size", 64)
        g = Generator(self.num("seed"), size, size)
        self.sock = Rds(self, 2 * MAX_MESSAGE)
        self.sock.connect(self["to"])
        self.sock.timeouts(self.num("wait", 10.0))
        buf, ts = bytearray(MAX_MESSAGE), []
        for i in range(n):
            parts = g.parts(i, size)
            t = time.monotonic()
            self.sock.s.sendmsg(parts)
            got, _ = self.sock.recv_into(buf)
            ts.append((time.monotonic() - t) * 1e6)
            bad = g.check(i, buf, got)
            if bad:
                raise ValueError(bad)
            self.count += 1
        ts.sort()
        return dict(messages=n, min=ts[0], median=ts[n // 2], p99=ts[int(n * .99)], max=ts[-1])

    def do_ping(self):
        """RDS pings: messages of some bytes to port 0, answered by the node itself without any."""
        n = self.num("n", 3)
        self.sock = Rds(self)
        self.sock.timeouts(self.num("wait", 10.0))
        self.sock.connect(join((split(self["to"])[0], 0)))
        ts, buf = [], bytearray(64)
        for _ in range(n):
            t = time.monotonic()
            # a blocking sender would wait for the handshake without limit
            self.sock.s.sendmsg([b"12345"], [], socket.MSG_DONTWAIT)
            got, who = self.sock.recv_into(buf)
            if got or who != (split(self["to"])[0], 0):
                raise ValueError("answer of %d bytes from %s" % (got, join(who)))
            ts.append((time.monotonic() - t) * 1e6)
        return dict(messages=n, first=ts[0], min=min(ts), max=max(ts))

    def do_info(self):
        """Counters that are not 0, and the TCP connections with their states."""
        conns = []
        for e in info(INFO6_CONNS):
            tx, rx, la, fa, tr, fl = struct.unpack("=QQ16s16s16sB", e[:65])
            conns.append(dict(local=ip6(la), peer=ip6(fa), transport=tr.split(b"\0")[0].decode(),
                              up=bool(fl & 4), next_tx=tx, next_rx=rx))
        tcp = []
        for e in info(INFO6_TCP):
            la, lp, fa, fp = struct.unpack("!16sH16sH", e[:36])
            tcp.append([ip6(la), lp, ip6(fa), fp])
        return dict(counters={k: v for k, v in counters().items() if v}, conns=conns, tcp=tcp,
                    queued=len(info(INFO6_SEND)) + len(info(INFO6_RETRANS)))

    def do_sysctl(self):
        """Read net.rds.NAME, or write it when value= is given."""
        path = "/proc/sys/net/rds/" + self["name"].replace(".", "/")
        if "value" in self.args:
            with open(path, "w") as f:
                f.write(self["value"])
        with open(path) as f:
            return dict(value=f.read().strip())


OUT = threading.Lock()


def emit(ev):
    with OUT:
        sys.stdout.write(json.dumps(ev) + "\n")
        sys.stdout.flush()


def local_of(to):
    host = split(to)[0]
    u = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM)
    u.connect((host, 9))
    return u.getsockname()[0]


def serve():
    jobs = {}
    emit(dict(ev="hello", pid=os.getpid(), node="kernel " + os.uname().release))
    for line in sys.stdin:
        w = line.split()
        if not w:
            continue
        jid, verb = w[0], w[1]
        args = dict(x.split("=", 1) for x in w[2:])
        try:
            if hasattr(Job, "do_" + verb):
                jobs[jid] = Job(jid, verb, args)
                threading.Thread(target=jobs[jid].run, daemon=True).start()
            else:
                jobs[jid].control(verb, args)
        except Exception as e:
            emit(dict(id=jid, ev="refused", error="%s: %s" % (type(e).__name__, e)))
    os._exit(0)


def main():
    if sys.argv[1:] == ["serve"]:
        serve()
    if len(sys.argv) < 2 or not hasattr(Job, "do_" + sys.argv[1]):
        sys.exit(__doc__ + "\nverbs: " + " ".join(sorted(n[3:] for n in dir(Job) if n[:3] == "do_")))
    w = sys.argv[2:]
    args = {k.lstrip("-"): v for k, v in zip(w[::2], w[1::2])}
    if "to" in args:
        args.setdefault("bind", local_of(args["to"]))
    j = Job("cli", sys.argv[1], args)
    j.control("close", {"flush": "10"}) if j.verb in ("send", "fill") else None
    j.stopped.clear()
    j.run()


main()
