"""The command channel of a guest (see guest/agent.py for the frames)."""
import fcntl
import json
import os
import select
import socket
import struct
import threading
import time

from .common import PORTS, Fail, gdir, say

MAGIC = b"BLA1"
HDR = struct.Struct("!4sIBI")
MAXPAY = 16384
START, STDIN, EOF, OUT, ERR, EXIT, PING, PONG, WINCH = range(1, 10)


class Agent:
    """One of a guest's command channels (see guest/agent.py for the frames)."""

    def __init__(self, name, wait=60):
        self.name = name
        self.s = None
        end = time.monotonic() + wait
        while self.s is None:
            for p in range(PORTS):
                lk = open(gdir(name) + "/a%d.lock" % p, "a")
                try:
                    fcntl.flock(lk, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    lk.close()
                    continue
                s = socket.socket(socket.AF_UNIX)
                s.settimeout(5)
                s.connect(gdir(name) + "/a%d" % p)
                self.s, self.lock = s, lk
                break
            else:
                if time.monotonic() > end:
                    raise Fail("all %d command channels of %s are busy" % (PORTS, name))
                time.sleep(0.1)
        self.sid = struct.unpack("!I", os.urandom(4))[0]
        self.buf = bytearray()
        self.first = True

    def __enter__(self):
        return self

    def __exit__(self, *x):
        self.s.close()
        self.lock.close()

    def send(self, kind, pay=b""):
        data = HDR.pack(MAGIC, self.sid, kind, len(pay)) + pay
        if self.first:
            data = b"\0" * (MAXPAY + 64) + data
            self.first = False
        self.s.settimeout(None)
        self.s.sendall(data)

    def frames(self, timeout):
        """Yield frames as they come; returns on timeout or closed channel."""
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            while True:
                at = self.buf.find(MAGIC)
                if at < 0:
                    del self.buf[:max(0, len(self.buf) - 3)]
                    break
                del self.buf[:at]
                if len(self.buf) < HDR.size:
                    break
                _, sid, kind, n = HDR.unpack_from(self.buf)
                if n > MAXPAY or not START <= kind <= WINCH:
                    del self.buf[:1]
                    continue
                if len(self.buf) < HDR.size + n:
                    break
                pay = bytes(self.buf[HDR.size:HDR.size + n])
                del self.buf[:HDR.size + n]
                if sid == self.sid:
                    yield kind, pay
            left = None if end is None else end - time.monotonic()
            if left is not None and left <= 0:
                return
            r, _, _ = select.select([self.s], [], [], left)
            if not r:
                return
            data = self.s.recv(262144)
            if not data:
                raise Fail("guest %s went away" % self.name)
            self.buf += data

    def ping(self, timeout):
        self.send(PING)
        for kind, _ in self.frames(timeout):
            if kind == PONG:
                return True
        return False

    def start(self, argv, **kw):
        pay = json.dumps(dict(kw, argv=argv)).encode()
        if len(pay) > MAXPAY:
            raise Fail("command too long (%d bytes; at most %d)" % (len(pay), MAXPAY))
        for _ in range(6):  # the agent knows a repeated session number
            self.send(START, pay)
            for kind, _p in self.frames(3):
                if kind == PONG:
                    return
        raise Fail("the agent of %s does not answer" % self.name)

    def feed(self, f):
        """Thread: forward a file object to the command's input."""
        try:
            while True:
                data = f.read1(MAXPAY) if hasattr(f, "read1") else f.read(MAXPAY)
                if not data:
                    break
                self.send(STDIN, data)
            self.send(EOF)
        except OSError:
            pass


def guest_exec(name, argv, timeout, out, err, stdin=None, **kw):
    """Run argv in the guest; out/err are called with bytes. -> exit code."""
    with Agent(name) as ag:
        ag.start(argv, **kw)
        if stdin is None:
            ag.send(EOF)
        else:
            threading.Thread(target=ag.feed, args=(stdin,), daemon=True).start()
        end = None if not timeout else time.monotonic() + timeout
        for kind, pay in ag.frames(None if end is None else timeout):
            if kind == OUT:
                out(pay)
            elif kind == ERR:
                err(pay)
            elif kind == EXIT:
                return struct.unpack("!i", pay)[0]
        say("no end within %s s: killed in the guest" % timeout)
        return 124


def guest_run(name, script, timeout=60):
    o, e = bytearray(), bytearray()
    rc = guest_exec(name, ["bash", "-c", script], timeout, o.extend, e.extend)
    return rc, o.decode(errors="replace"), e.decode(errors="replace")


def to_fd(fd):
    def w(data):
        while data:
            data = data[os.write(fd, data):]
    return w


def push(name, src, dst, timeout=300):
    """Copy a file into the guest. -> exit code"""
    mode = os.stat(src).st_mode & 0o777
    script = ('d=$1; [ -d "$d" ] && d=$d/$2; mkdir -p "$(dirname "$d")"; cat > "$d.part" && '
              'chmod %o "$d.part" && mv "$d.part" "$d"' % mode)
    with open(src, "rb") as f:
        return guest_exec(name, ["bash", "-c", script, "push", dst, os.path.basename(src)],
                          timeout, to_fd(1), to_fd(2), f)
