"""The lab's network namespace: two bridges with addresses of the host side."""
import json
import os
import signal
import subprocess
import time

from .common import BRIDGE, HOST, NET4, NET6, NETNS, RUN, Fail, need_root, ok, run, say


def ipns(args, check=True):
    argv = ["ip", "-n", NETNS] + args
    return run(argv, timeout=30) if check else ok(argv, 30)


def net_up():
    need_root()
    if not os.path.exists("/run/netns/" + NETNS) and not os.path.exists("/var/run/netns/" + NETNS):
        run(["ip", "netns", "add", NETNS], 30)
    ipns(["link", "set", "lo", "up"])
    for i, br in enumerate(BRIDGE):
        if not ipns(["link", "show", br], False):
            # a fixed MAC, or the bridge takes that of its lowest port and changes
            ipns(["link", "add", br, "address", "52:54:00:99:%02x:01" % i, "type", "bridge",
                  "stp_state", "0", "forward_delay", "0", "mcast_snooping", "0"])
            run(["ip", "netns", "exec", NETNS, "sh", "-c",
                 "for k in accept_ra=0 accept_dad=0 router_solicitations=0; do "
                 "echo ${k#*=} > /proc/sys/net/ipv6/conf/%s/${k%%=*}; done; "
                 "for c in all %s; do echo 1 > /proc/sys/net/ipv4/conf/$c/arp_ignore; "
                 "echo 2 > /proc/sys/net/ipv4/conf/$c/arp_announce; "
                 "echo 0 > /proc/sys/net/ipv4/conf/$c/rp_filter; done" % (br, br)], 30)
        # one address below every guest's and one above: who opens RDS over
        # TCP connections depends on the order of the addresses
        for h in HOST:
            ipns(["addr", "replace", NET4[i] % h, "dev", br])
            ipns(["-6", "addr", "replace", NET6[i] % h, "dev", br, "nodad"])
        ipns(["link", "set", br, "up"])


def end_programs():
    """Ends what still runs on the host side of the lab."""
    for _ in range(100):
        left = run(["ip", "netns", "pids", NETNS]).split() if ok(["ip", "netns", "pids", NETNS]) else []
        if not left:
            return
        for pid in left:
            try:
                os.kill(int(pid), signal.SIGKILL)
            except ProcessLookupError:
                pass
        time.sleep(0.1)
    raise Fail("programs in namespace %s do not end: %s" % (NETNS, " ".join(left)))


def tap(name, nic):
    return "t-%s-%d" % (name, nic)


def cap_file(name):
    return os.path.join(RUN, "cap-" + name)


def cap_stop(name, quiet=False):
    p = cap_file(name)
    if not os.path.exists(p):
        if not quiet:
            raise Fail("no capture of %s is running" % name)
        return
    with open(p) as f:
        c = json.load(f)
    try:
        with open("/proc/%d/cmdline" % c["pid"], "rb") as f:
            mine = b"tcpdump" in f.read()
    except OSError:
        mine = False
    if mine:
        time.sleep(1.1)  # the kernel holds frames back for up to a second
        os.kill(c["pid"], signal.SIGINT)
        for _ in range(100):
            try:
                # our own child is there until we have asked for it
                os.waitpid(c["pid"], os.WNOHANG)
            except ChildProcessError:
                pass
            if not os.path.exists("/proc/%d" % c["pid"]):
                break
            time.sleep(0.05)
    os.unlink(p)
    if not quiet:
        say("capture of %s is in %s" % (name, c["file"]))


def cap_start(name, path, snaplen=262144, filt=()):
    """tcpdump of a guest's first link, or of a bridge, in the background."""
    need_root()
    dev = name if name in BRIDGE else tap(name, 0)
    if os.path.exists(cap_file(name)):
        cap_stop(name, quiet=True)
    argv = ["ip", "netns", "exec", NETNS, "tcpdump", "-i", dev, "-w", path, "-U", "-n",
            "-s", str(snaplen), "-Z", "root"] + list(filt)
    with open(cap_file(name) + ".log", "w") as log:
        p = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                             start_new_session=True)
    with open(cap_file(name), "w") as f:
        json.dump({"pid": p.pid, "file": path}, f)
    for _ in range(100):
        with open(cap_file(name) + ".log") as f:
            text = f.read()
        if "listening on" in text:
            return
        if p.poll() is not None:
            break
        time.sleep(0.05)
    os.unlink(cap_file(name))
    raise Fail("tcpdump did not start: " + text)
