"""Settings of the lab and the helpers that run commands."""
import fcntl
import os
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
CACHE = os.path.abspath(os.path.expanduser(
    os.environ.get("BOWLINE_LAB_CACHE") or "~/.cache/bowline-lab"))
NETNS = os.environ.get("BOWLINE_LAB_NETNS") or "bowline-lab"
RUN = os.path.join(CACHE, "run", NETNS)
DEBS = os.path.join(CACHE, "debs")
# that of which this machine's release has packages, and the one that is used
OWN_SERIES = "6.12"
SERIES = os.environ.get("BOWLINE_LAB_KERNEL") or OWN_SERIES
# its RDS has the changes of 7.x
LATER = not SERIES.startswith("6.")
CURRENT = os.path.join(CACHE, "current%s.json" % ("" if SERIES == OWN_SERIES else "-" + SERIES))

# Inside the lab's namespace: wire 0 and wire 1. The host side has one address
# below and one above every guest's, because the order of the two addresses
# decides who opens RDS over TCP connections.
HOST = (1, 250)
NET4 = ("10.99.0.%d/24", "10.99.1.%d/24")
NET6 = ("fd99::%x/64", "fd99:0:0:1::%x/64")
BRIDGE = ("labbr0", "labbr1")
PORTS = 8  # commands a guest can run at once

os.environ["PATH"] = os.environ.get("PATH", "") + ":/usr/sbin:/sbin:/usr/bin:/bin"


class Fail(Exception):
    pass


def say(msg):
    sys.stderr.write("kernel-lab: %s\n" % msg)


def run(argv, timeout=600, **kw):
    """Run a command; its output is shown only when it fails."""
    kw.setdefault("stdin", subprocess.DEVNULL)
    kw.setdefault("stdout", subprocess.PIPE)
    kw.setdefault("stderr", subprocess.STDOUT)
    try:
        r = subprocess.run(argv, timeout=timeout, **kw)
    except FileNotFoundError:
        raise Fail("%s: command not found" % argv[0])
    except subprocess.TimeoutExpired:
        raise Fail("took longer than %d s: %s" % (timeout, " ".join(argv)))
    out = r.stdout.decode(errors="replace") if r.stdout else ""
    if r.returncode:
        raise Fail("failed (%d): %s\n%s" % (r.returncode, " ".join(argv), out[-4000:]))
    return out


def ok(argv, timeout=60):
    return subprocess.run(argv, timeout=timeout, stdin=subprocess.DEVNULL,
                          stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0


def need_root():
    if os.geteuid() != 0:
        raise Fail("this needs root (network namespaces, tap devices)")


def locked(path, what, wait=900):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    f = open(path, "a")
    end = time.monotonic() + wait
    told = False
    while True:
        try:
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return f
        except BlockingIOError:
            if time.monotonic() > end:
                raise Fail("another %s is under way (waited %d s)" % (what, wait))
            if not told:
                say("waiting for another %s" % what)
                told = True
            time.sleep(0.3)


def gdir(name):
    """A guest's folder: its QEMU's pid, console log and sockets."""
    return os.path.join(RUN, name)
