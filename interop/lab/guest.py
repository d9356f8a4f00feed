"""Guests: QEMU machines that run the real kernel."""
import ipaddress
import json
import os
import re
import shutil
import signal
import socket
import time

from .agent import Agent, guest_run
from .common import (BRIDGE, CACHE, NET4, NET6, NETNS, PORTS, RUN, Fail, gdir, locked, need_root, ok,
                     run, say)
from .initrd import make_initrd
from .modules import LOADS, build, needed
from .net import cap_stop, ipns, net_up, tap
from .prepare import prepare

MODES = ["none", "rds", "rds-tcp", "rxe"] + list(LOADS)


def info(name):
    try:
        with open(gdir(name) + "/info.json") as f:
            return json.load(f)
    except (OSError, ValueError):
        return None


def alive(name):
    """-> pid of the guest's QEMU, or None."""
    try:
        with open(gdir(name) + "/pid") as f:
            pid = int(f.read())
        with open("/proc/%d/cmdline" % pid, "rb") as f:
            cmd = f.read()
    except (OSError, ValueError):
        return None
    return pid if b"qemu-system" in cmd and gdir(name).encode() + b"/" in cmd else None


def guests():
    return sorted(n for n in os.listdir(RUN) if os.path.isdir(gdir(n))) if os.path.isdir(RUN) else []


def check_name(name):
    if not re.match(r"^[a-z][a-z0-9]{0,8}$", name):
        raise Fail("a guest's name is 1 to 9 of a-z and 0-9, a letter first: %r" % name)


def need_guest(name):
    check_name(name)
    if not alive(name):
        raise Fail("no guest %s is running (see: kernel-lab status)" % name)


def default_accel():
    return os.environ.get("BOWLINE_LAB_ACCEL") or "tcg"


def boot(a):
    need_root()
    check_name(a.name)
    modes = [m for m in a.mode.split(",") if m]
    for m in modes:
        if m not in MODES:
            raise Fail("unknown mode %s; known: %s" % (m, " ".join(MODES)))
    c = prepare(quiet=True)
    modules = needed(modes)
    folder = build(c) if modules else None
    lock = locked(os.path.join(CACHE, "run", NETNS + ".lock"), "boot", 300)
    if alive(a.name):
        raise Fail("guest %s is already running" % a.name)
    d = gdir(a.name)
    if len(d) > 90:
        raise Fail("the cache path is too long for unix sockets: " + d)
    shutil.rmtree(d, ignore_errors=True)
    os.makedirs(d)
    used = {i["idx"] for i in (info(n) for n in guests() if alive(n)) if i}
    # guest a is always .11, b .12, ...; longer names take what is free from .41
    idx = 11 + ord(a.name) - ord("a") if len(a.name) == 1 else 0
    if not idx or idx in used:
        idx = next(i for i in range(41, 250) if i not in used)
    ips = []
    for n in range(a.nics):
        given = (a.ip, a.ip2)[n]
        ips.append([given] if given else [NET4[n] % idx, NET6[n] % idx])
        for x in ips[n]:
            for one in x.split(","):
                try:
                    ipaddress.ip_interface(one)
                except ValueError:
                    raise Fail("not an address with prefix length: %s" % one)
    net_up()
    for n in range(a.nics):
        t = tap(a.name, n)
        ipns(["link", "del", t], False)
        ipns(["tuntap", "add", t, "mode", "tap"])
        ipns(["link", "set", t, "mtu", str(a.mtu), "master", BRIDGE[n]])
        run(["ip", "netns", "exec", NETNS, "sh", "-c",
             "echo 1 > /proc/sys/net/ipv6/conf/%s/disable_ipv6" % t], 30)
        ipns(["link", "set", t, "up"])
    make_initrd(c, d + "/initrd", [os.path.join(folder, m + ".ko") for m in modules])
    app = ["console=ttyS0", "quiet", "loglevel=4", "panic=1", "mitigations=off", "nokaslr",
           "tsc=reliable", "random.trust_cpu=on", "net.ifnames=0", "audit=0", "selinux=0",
           "apparmor=0", "init_on_alloc=0", "cryptomgr.notests", "no_timer_check",
           "lab.name=" + a.name, "lab.nics=%d" % a.nics, "lab.mode=" + ",".join(modes),
           "lab.modules=" + ",".join(modules),
           "lab.mtu=%d" % a.mtu, "lab.offload=%d" % (0 if a.no_offload else 1)]
    app += ["lab.ip%d=%s" % (n, ",".join(x)) for n, x in enumerate(ips)]
    app += a.append
    argv = ["ip", "netns", "exec", NETNS, "qemu-system-x86_64", "-name", a.name,
            "-machine", "pc", "-accel", a.accel + (",thread=multi" if a.accel == "tcg" else ""),
            "-cpu", a.cpu, "-smp", str(a.smp), "-m", str(a.mem), "-nodefaults", "-no-user-config",
            "-display", "none", "-no-reboot", "-kernel", c["vmlinuz"], "-initrd", d + "/initrd",
            "-append", " ".join(app), "-serial", "file:%s/console.log" % d,
            "-qmp", "unix:%s/qmp,server=on,wait=off" % d,
            "-drive", "file=%s,if=none,id=root,format=raw,snapshot=on,cache=unsafe" % c["root"],
            "-device", "virtio-blk-pci,drive=root",
            "-device", "virtio-serial-pci,max_ports=%d" % (PORTS + 1)]
    for p in range(PORTS):
        argv += ["-chardev", "socket,id=a%d,path=%s/a%d,server=on,wait=off" % (p, d, p),
                 "-device", "virtserialport,chardev=a%d,name=lab.%d" % (p, p)]
    for n in range(a.nics):
        argv += ["-netdev", "tap,id=n%d,ifname=%s,script=no,downscript=no" % (n, tap(a.name, n)),
                 "-device", "virtio-net-pci,netdev=n%d,mac=52:54:00:99:%02x:%02x,romfile=%s"
                 % (n, n, idx, ",csum=off,gso=off,guest_csum=off,guest_tso4=off,guest_tso6=off,"
                    "guest_ecn=off,guest_ufo=off" if a.no_offload else "")]
    for s, share in enumerate(a.share):
        if not os.path.isdir(share):
            raise Fail("no such folder: " + share)
        argv += ["-virtfs", "local,path=%s,mount_tag=host%d,security_model=none,readonly=on"
                 % (os.path.abspath(share).replace(",", ",,"), s)]
    argv += ["-daemonize", "-pidfile", d + "/pid"]
    t0 = time.monotonic()
    env = dict(os.environ, TMPDIR=d)
    run(argv, 60, env=env)
    with open(d + "/info.json", "w") as f:
        json.dump({"name": a.name, "idx": idx, "ips": ips, "mode": modes, "nics": a.nics,
                   "mtu": a.mtu, "kver": c["kver"], "accel": a.accel}, f)
    lock.close()
    if a.no_wait:
        return
    end = t0 + a.timeout
    while True:
        if not alive(a.name):
            raise Fail("guest %s ended while booting; console:\n%s" % (a.name, console_tail(a.name)))
        try:
            with Agent(a.name, wait=1) as ag:
                if ag.ping(1.0):
                    break
        except (OSError, Fail):
            pass
        if time.monotonic() > end:
            raise Fail("guest %s did not answer within %d s; console:\n%s"
                       % (a.name, a.timeout, console_tail(a.name)))
        time.sleep(0.1)
    for s in range(len(a.share)):
        at = "/host" if s == 0 else "/host%d" % s
        guest_run(a.name, "mkdir -p %s; modprobe 9pnet_virtio; mount -t 9p -o trans=virtio,ro,"
                  "msize=262144,cache=mmap host%d %s" % (at, s, at))
    say("guest %s is up after %.1f s: %s" % (a.name, time.monotonic() - t0,
                                             " ".join(",".join(x) for x in ips)))


def console_tail(name, n=25):
    try:
        with open(gdir(name) + "/console.log", errors="replace") as f:
            return "\n".join(f.read().splitlines()[-n:])
    except OSError:
        return "(no console log)"


def down(names):
    need_root()
    if names == ["all"]:
        names = guests()
        last = True
    else:
        last = False
    for n in names:
        check_name(n)
        cap_stop(n, quiet=True)
        pid = alive(n)
        if pid:
            os.kill(pid, signal.SIGTERM)
            for i in range(100):
                if not alive(n):
                    break
                time.sleep(0.05)
            else:
                os.kill(pid, signal.SIGKILL)
                time.sleep(0.2)
        i = info(n)
        for nic in range(2):
            ipns(["link", "del", tap(n, nic)], False)
        shutil.rmtree(gdir(n), ignore_errors=True)
        if pid or i:
            say("guest %s is down" % n)
        elif not last:
            say("no guest %s" % n)
    if last and ok(["ip", "netns", "pids", NETNS]):
        left = run(["ip", "netns", "pids", NETNS]).split()
        if left:
            say("namespace %s kept: processes %s live in it" % (NETNS, " ".join(left)))
        else:
            ok(["ip", "netns", "del", NETNS])


def qmp(name, *cmds):
    s = socket.socket(socket.AF_UNIX)
    s.settimeout(10)
    s.connect(gdir(name) + "/qmp")
    f = s.makefile("rw")
    f.readline()
    out = []
    for cmd in [{"execute": "qmp_capabilities"}] + list(cmds):
        f.write(json.dumps(cmd) + "\n")
        f.flush()
        while True:
            r = json.loads(f.readline())
            if "return" in r or "error" in r:
                break
        if "error" in r:
            raise Fail("qemu: %s" % r["error"].get("desc"))
        out.append(r["return"])
    s.close()
    return out[1:]


def set_link(name, state, nic=0):
    """off/on: the guest sees its carrier drop. drop/pass: packets are lost silently."""
    need_guest(name)
    t = tap(name, nic)
    if state in ("off", "on"):
        qmp(name, {"execute": "set_link", "arguments": {"name": "n%d" % nic, "up": state == "on"}})
    elif state == "drop":
        ipns(["link", "set", t, "nomaster"])
    else:
        ipns(["link", "set", t, "master", BRIDGE[nic]])
