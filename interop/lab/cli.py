"""Command line of the lab."""
import argparse
import fcntl
import json
import os
import shutil
import struct
import subprocess
import sys
import threading
import time

from .agent import ERR, EXIT, OUT, STDIN, Agent, guest_exec, push, to_fd
from .common import BRIDGE, CACHE, CURRENT, HOST, NET4, NETNS, OWN_SERIES, Fail, need_root, say
from .guest import (alive, boot, console_tail, default_accel, down, guests, info, need_guest, set_link)
from .net import cap_start, cap_stop, net_up
from .prepare import prepare
from .qemu import burst_qemu

ABOUT = """kernel-lab: boot a real Linux kernel as the peer of a userspace node.

Guests run in QEMU on Debian's own 6.12 kernel (--kernel 7.2: on one of a newer
suite of the same archive) with its rds, rds_tcp and rdma_rxe modules. Each guest has two network cards on two bridges inside one network
namespace, where the host side has addresses of its own and so can talk to the
guests' kernels. Needs root and a Debian host with apt."""


def as_argv(cmd):
    if cmd[:1] == ["--"]:
        cmd = cmd[1:]
    if not cmd:
        raise Fail("no command given")
    return ["bash", "-c", cmd[0]] if len(cmd) == 1 else cmd


def cmd_exec(a):
    need_guest(a.name)
    kw = {}
    if a.detach:
        log = a.log or "/tmp/job.%d.log" % int(time.time() * 1000)
        kw = {"detach": True, "log": log}
        say("output in the guest's " + log)
    stdin = sys.stdin.buffer if a.stdin else None
    return guest_exec(a.name, as_argv(a.cmd), a.timeout, to_fd(1), to_fd(2), stdin, **kw)


def cmd_push(a):
    need_guest(a.name)
    return push(a.name, a.src, a.dst, a.timeout)


def cmd_pull(a):
    need_guest(a.name)
    tmp = a.dst + ".part"
    with open(tmp, "wb") as f:
        rc = guest_exec(a.name, ["cat", a.src], a.timeout, f.write, to_fd(2))
    if rc:
        os.unlink(tmp)
    else:
        os.rename(tmp, a.dst)
    return rc


def cmd_shell(a):
    need_guest(a.name)
    if not sys.stdin.isatty():
        raise Fail("shell needs a terminal; use exec")
    import termios
    import tty
    rows, cols = struct.unpack("HHHH", fcntl.ioctl(0, termios.TIOCGWINSZ, b"\0" * 8))[:2]
    old = termios.tcgetattr(0)
    rc = 0
    with Agent(a.name) as ag:
        ag.start(["bash", "-i"], tty=True, rows=rows, cols=cols,
                 env={"TERM": os.environ.get("TERM", "vt100"), "PS1": a.name + r":\w# "})
        try:
            tty.setraw(0)
            stop = False

            def pump():
                while not stop:
                    data = os.read(0, 4096)
                    if not data:
                        return
                    ag.send(STDIN, data)
            threading.Thread(target=pump, daemon=True).start()
            for kind, pay in ag.frames(None):
                if kind in (OUT, ERR):
                    os.write(1, pay)
                elif kind == EXIT:
                    rc = struct.unpack("!i", pay)[0]
                    break
            stop = True
        finally:
            termios.tcsetattr(0, termios.TCSADRAIN, old)
    return rc


def cmd_host(a):
    need_root()
    net_up()
    os.execvp("ip", ["ip", "netns", "exec", NETNS] + as_argv(a.cmd))


def cmd_link(a):
    set_link(a.name, a.state, a.nic)
    return 0


def cmd_capture(a):
    if a.file == "stop":
        cap_stop(a.name)
        return 0
    if a.name not in BRIDGE:
        need_guest(a.name)
    cap_start(a.name, os.path.abspath(a.file), a.snaplen, a.filter)
    return 0


def cmd_status(a):
    if os.path.exists(CURRENT):
        with open(CURRENT) as f:
            c = json.load(f)
        print("kernel %s (package version %s), cache %s" % (c["kver"], c["version"], CACHE))
    else:
        print("not prepared, cache %s" % CACHE)
    there = os.path.exists("/run/netns/" + NETNS)
    print("namespace %s: %s" % (NETNS, "present, host is " + " ".join(n % h for n in NET4 for h in HOST)
                                if there else "absent"))
    for n in guests():
        i, pid = info(n), alive(n)
        if not i:
            continue
        ans = ""
        if pid:
            try:
                with Agent(n, wait=1) as ag:
                    ans = "answers" if ag.ping(2) else "silent"
            except (OSError, Fail):
                ans = "busy"
        print("guest %-9s %s mode=%s %s" % (
            n, "pid %d %s" % (pid, ans) if pid else "DEAD", ",".join(i["mode"]),
            " ".join(",".join(x) for x in i["ips"])))
    return 0


def cmd_console(a):
    print(console_tail(a.name, a.lines))
    return 0


def cmd_clean(a):
    for n in guests():
        if alive(n):
            raise Fail("guest %s is running" % n)
    if not os.path.basename(CACHE):
        raise Fail("refusing to remove " + CACHE)
    for n in ("k", "run", "qemu", "qemu.tmp", "root.tmp", "empty-status", "debs" if a.all else ""):
        p = os.path.join(CACHE, n)
        if n and os.path.isdir(p):
            shutil.rmtree(p)
        elif n and os.path.exists(p):
            os.unlink(p)
    for f in os.listdir(CACHE):
        if f.startswith(("root-", "current", "apt-" if a.all else "current")):
            p = os.path.join(CACHE, f)
            shutil.rmtree(p) if os.path.isdir(p) else os.unlink(p)
    return 0


def of_series(q):
    q.add_argument("--kernel", metavar="SERIES", default=OWN_SERIES,
                   help="series of the kernel, e.g. 7.2 (default %s)" % OWN_SERIES)


def parser():
    p = argparse.ArgumentParser(
        prog="kernel-lab", formatter_class=argparse.RawDescriptionHelpFormatter,
        description=ABOUT, epilog="""\
environment:
  BOWLINE_LAB_CACHE   cache folder (default ~/.cache/bowline-lab; about 1 GB)
  BOWLINE_LAB_NETNS   network namespace (default bowline-lab); another name
                      gives an independent lab beside the first
  BOWLINE_LAB_KERNEL  series of the kernel without --kernel

modes of boot (comma separated): none rds rds-tcp rxe rtrs-client rtrs-server rnbd-client rnbd-server
  rxe brings the kernel's soft RoCE up as rxe0 on eth0 (and rxe1 on eth1); the
  last four do so too. Debian's kernel has no rtrs and rnbd: the first use
  compiles them (a download of 150 MB, a minute). Their parameters are kernel
  arguments: --append rtrs_server.always_invalidate=N

example, kernel to kernel:
  kernel-lab boot a; kernel-lab boot b
  kernel-lab exec a -- rds-verify.py ping --to 10.99.0.12
example, two series:
  kernel-lab boot a; kernel-lab boot b --kernel 7.2
example, guests whose cards pass bursts of UDP whole:
  Q=$(kernel-lab qemu) && PATH=$Q:$PATH kernel-lab boot a
  kernel-lab exec a -- ethtool -K eth0 tx-udp-segmentation on
example, userspace to kernel:
  kernel-lab boot a
  kernel-lab host -- ./some-node --address 10.99.0.1
""")
    s = p.add_subparsers(dest="what", metavar="COMMAND")
    s.required = True
    q = s.add_parser("prepare", help="get the kernel and make the guest's root disk")
    q.add_argument("--refresh", action="store_true", help="look for a newer kernel package")
    q.add_argument("--kver", help="this kernel, e.g. 6.12.117+deb12-amd64")
    of_series(q)
    s.add_parser("qemu", help="print the folder of a QEMU whose cards pass bursts of UDP whole (on Linux 6.2 and "
                 "later), fetched from Debian's backports if the host's does not")
    q = s.add_parser("boot", help="start a guest in the background and wait until it answers")
    q.add_argument("name")
    of_series(q)
    q.add_argument("--mode", default="rds-tcp", help="what to load (default rds-tcp)")
    q.add_argument("--ip", metavar="A.B.C.D/24[,..]", help="address of eth0 (default 10.99.0.N/24 "
                   "and fd99::N/64; N is 11 for guest a, 12 for b, ...)")
    q.add_argument("--ip2", metavar="A.B.C.D/24[,..]", help="address of eth1 (default 10.99.1.N/24 "
                   "and fd99:0:0:1::N/64)")
    q.add_argument("--nics", type=int, choices=(1, 2), default=2)
    q.add_argument("--mtu", type=int, default=1500)
    q.add_argument("--mem", type=int, default=768, help="MiB (default 768)")
    q.add_argument("--smp", type=int, default=1)
    # without 16-byte compare-and-exchange, under which QEMU 7.2 loses the guest's flags now and then: its
    # kernel ends with a double fault in the allocator of a loaded rxe
    q.add_argument("--cpu", default="max,-cx16", help="qemu CPU model (default max,-cx16)")
    q.add_argument("--accel", default=default_accel(), choices=("tcg", "kvm"),
                   help="default: BOWLINE_LAB_ACCEL, else tcg")
    q.add_argument("--no-offload", action="store_true",
                   help="no checksum/segmentation offload: packets are captured as on a wire")
    q.add_argument("--append", action="append", default=[], metavar="ARG",
                   help="kernel argument (repeatable)")
    q.add_argument("--share", action="append", default=[], metavar="DIR",
                   help="folder of the host shown read-only at /host (then /host1, ...)")
    q.add_argument("--timeout", type=int, default=120)
    q.add_argument("--no-wait", action="store_true")
    q = s.add_parser("exec", help="run a command in a guest; its output and exit code are returned")
    q.add_argument("-i", "--stdin", action="store_true", help="forward standard input")
    q.add_argument("-d", "--detach", action="store_true", help="leave it running; print its pid")
    q.add_argument("--log", help="with -d: file in the guest for its output")
    q.add_argument("--timeout", type=float, default=300, help="seconds, 0 for none (default 300)")
    q.add_argument("name")
    q.add_argument("cmd", nargs=argparse.REMAINDER, help="-- CMD ARG...; a single word goes to bash -c")
    q = s.add_parser("push", help="copy a file into a guest")
    q.add_argument("--timeout", type=float, default=300)
    q.add_argument("name"), q.add_argument("src"), q.add_argument("dst")
    q = s.add_parser("pull", help="copy a file out of a guest")
    q.add_argument("--timeout", type=float, default=300)
    q.add_argument("name"), q.add_argument("src"), q.add_argument("dst")
    q = s.add_parser("shell", help="interactive shell in a guest")
    q.add_argument("name")
    q = s.add_parser("host", help="run a command of the host inside the lab's namespace")
    q.add_argument("cmd", nargs=argparse.REMAINDER)
    q = s.add_parser("link", help="cut and restore a guest's link")
    q.add_argument("name")
    q.add_argument("state", choices=("off", "on", "drop", "pass"),
                   help="off/on: carrier seen by the guest; drop/pass: silent loss of all packets")
    q.add_argument("--nic", type=int, default=0, choices=(0, 1))
    q = s.add_parser("capture", help="tcpdump of a guest's first link (or labbr0/labbr1) into FILE, "
                     "in the background; end it with: capture NAME stop")
    q.add_argument("--snaplen", type=int, default=262144)
    q.add_argument("name"), q.add_argument("file")
    q.add_argument("filter", nargs="*", help="tcpdump filter")
    q = s.add_parser("console", help="last lines of a guest's console")
    q.add_argument("name"), q.add_argument("--lines", type=int, default=40)
    q = s.add_parser("down", help="end guests (all: also remove the namespace)")
    q.add_argument("names", nargs="+", metavar="NAME|all")
    s.add_parser("status", help="what is there")
    q = s.add_parser("clean", help="remove what prepare built (--all: the packages too)")
    q.add_argument("--all", action="store_true")
    return p


def main():
    p = parser()
    a, rest = p.parse_known_args()
    if rest:
        # a capture's filter may also follow the options
        if a.what != "capture" or any(x.startswith("--") for x in rest):
            p.error("unrecognized arguments: " + " ".join(rest))
        a.filter += rest
    f = {"prepare": lambda: prepare(a.refresh, a.kver) and 0, "qemu": lambda: print(burst_qemu()), "boot": lambda: boot(a),
         "exec": lambda: cmd_exec(a), "push": lambda: cmd_push(a), "pull": lambda: cmd_pull(a),
         "shell": lambda: cmd_shell(a), "host": lambda: cmd_host(a), "link": lambda: cmd_link(a),
         "capture": lambda: cmd_capture(a), "down": lambda: down(a.names),
         "status": lambda: cmd_status(a),
         "console": lambda: cmd_console(a), "clean": lambda: cmd_clean(a)}[a.what]
    try:
        rc = f()
    except Fail as e:
        say(str(e))
        rc = 1
    except subprocess.TimeoutExpired as e:
        say("took too long: %s" % " ".join(map(str, e.cmd)))
        rc = 1
    except KeyboardInterrupt:
        rc = 130
    sys.exit(rc if isinstance(rc, int) else 0)

