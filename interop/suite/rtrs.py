"""Block devices: the kernel's rtrs and rnbd over rxe against `bowline rnbd`."""
import errno
import hashlib
import ipaddress
import json
import os
import subprocess
import threading
import time

from lab.agent import guest_exec, guest_run
from lab.common import BRIDGE, NETNS
from lab.guest import alive, down, set_link
from lab.net import cap_start, cap_stop, ipns, tap

from .base import MIB, scenario, want
from .paths import DOWN, UP, Load, Paths
from .roce import NO_SELF_CHECK, Tool
from .roce_audit import audit, dissect, frames

GUEST = "s"
BOOT = ("--mode", "rnbd-client,rnbd-server", "--nics", "2", "--mem", "1024")
# addresses of kernel and node on the two wires
# a further address of the node on the first wire, for a second command beside one that runs
OTHER = "10.99.0.250"
KERNEL = {4: ("10.99.0.29", "10.99.1.29"), 6: ("fd99::1d", "fd99:0:0:1::1d")}
NODE = {4: ("10.99.0.1", "10.99.1.1"), 6: ("fd99::1", "fd99:0:0:1::1")}
SIZE = 32 * MIB
DISK = "disk0"
CTL = "/sys/class/rnbd-client/ctl/map_device"
WRITE_ONLY, WRITE_ONLY_IMM = 0x0A, 0x0B
MODULES = "rnbd_client rtrs_client rnbd_server rtrs_server rtrs_core"
# seconds in which each of two wires is cut and healed
CUTS = 30
# seconds for which all are cut at once: longer than a path that is one of several is waited for, shorter than the last one
OUTAGE = 6
COMMON = dict(dirs=("k>n", "n>k"), orders=("lo",), bare=True, tool=True, self_check=NO_SELF_CHECK)
# what verifies: blocks of all sizes, flushes and writes that are durable at once
FIO = ("fio --name=v --filename=/dev/rnbd0 --size=16m --direct=1 --ioengine=libaio --verify=crc32c --verify_fatal=1 "
       "--time_based --output-format=json ")
MIXED = "--rw=randrw --bssplit=512/20:4k/30:64k/30:256k/20 --iodepth=16 --fsync=16 --runtime=%d"
DURABLE = "--rw=randwrite --bs=4k --iodepth=4 --sync=dsync --runtime=%d"


class Rnbd:
    """A guest with rtrs and rnbd on both wires for the length of a case; captures and their audit."""

    def __init__(self, c, paths=1, invalidate=True, dissect=True, mtu=1500):
        """dissect=False: the data look like anything to tshark, which guesses what they are."""
        self.c, self.invalidate, self.dissect, self.mtu = c, invalidate, dissect, mtu
        self.log, self.program, self.tools = c.log, c.w.bowline(), []
        self.k = KERNEL[c.family][:paths]
        self.n = NODE[c.family][:paths]
        self.pcaps = {BRIDGE[i]: "%s.wire%d.pcap" % (c.log, i) for i in range(paths)}
        self.file = c.log + ".disk"
        self.socket = c.log + ".nbd"
        self.audited, self.fences = True, False

    def __enter__(self):
        if not alive(GUEST):
            self.c.w.boot(GUEST, how=BOOT)
        for nic in (0, 1):
            set_link(GUEST, "pass", nic)
        if self.mtu > 1500:
            self.links(self.mtu)
        # kernels that have never heard of anybody
        self.guest("dmesg -C; rmmod %s; for m in rtrs-core rtrs-client rnbd-client; do load-module.sh $m; done; "
                   "load-module.sh rtrs-server always_invalidate=%s && load-module.sh rnbd-server" % (
                       MODULES, "Y" if self.invalidate else "N"))
        # the kernel's resolution of addresses may take longer than rtrs waits when no neighbour is known
        for k, n in zip(self.k, self.n):
            self.guest("ping -c 1 -W 5 -I %s %s" % (k, n))
        for bridge, path in self.pcaps.items():
            cap_start(bridge, path, 65535, ["udp", "port", "4791"])
        with open(self.file, "wb") as f:
            f.truncate(SIZE)
        return self

    def __exit__(self, kind, error, trace):
        for nic in (0, 1):
            set_link(GUEST, "pass", nic)
        if kind is None:
            for t in self.tools:
                if t.p.poll() is None:
                    t.end(ask=True)
            self.no_leftovers()
        _, out, _ = guest_run(GUEST, "pkill -x fio; umount /mnt 2>/dev/null; losetup -d /dev/loop5 2>/dev/null; for d in /sys/block/rnbd*/rnbd/unmap_device; "
                              "do [ -e $d ] && echo force > $d; done; dmesg", 60)
        for t in self.tools:
            t.kill()
        for bridge in self.pcaps:
            cap_stop(bridge, quiet=True)
        if self.mtu > 1500:
            self.links(1500)
            # the next case has one whose MTU was never another
            down([GUEST])
        with open(self.log + ".dmesg-s", "w") as f:
            f.write(out)
        if os.path.exists(self.socket):
            os.unlink(self.socket)
        if kind is None:
            want("BUG" not in out and "Call Trace" not in out, "the guest's kernel complains; see %s.dmesg-s", self.log)
            if self.audited:
                self.check()
            os.unlink(self.file)
            if not self.c.w.capture:
                for path in self.pcaps.values():
                    os.unlink(path)

    def links(self, mtu):
        for nic in range(len(self.k)):
            for name in (tap(GUEST, nic), BRIDGE[nic]):
                ipns(["link", "set", name, "mtu", str(mtu)])
            self.guest("ip link set eth%d mtu %d" % (nic, mtu))

    def count(self, test):
        """Frames of the node in its captures for which this is so."""
        ours = [ipaddress.ip_address(n).packed for n in self.n]
        return sum(f.source in ours and test(f) for path in self.pcaps.values() for f in frames(path))

    def check(self):
        ours, theirs, bad, seen = 0, 0, [], False
        for i, path in enumerate(self.pcaps.values()):
            mine, peers, wrong = audit(path, ipaddress.ip_address(self.n[i]).packed)
            opinion = dissect(path) if self.dissect else None
            seen = seen or opinion is not None
            ours, theirs, bad = ours + mine, theirs + peers, bad + wrong + (opinion or [])
        want(not bad, "%d frames are wrong, first: %s", len(bad), "; ".join(bad[:3]))
        want(ours and theirs, "nothing captured: %d frames of ours, %d of the kernel", ours, theirs)
        if self.mtu > 1500 and self.c.dir == "n>k":
            halves = self.count(lambda f: f.opcode == WRITE_ONLY_IMM and len(f.bth) > 2048)
            want(halves > 100, "%d writes with an immediate have data", halves)
            self.c.note("%d writes in halves" % halves)
        if self.fences:
            # address, key and length are 0
            fences = self.count(lambda f: f.opcode == WRITE_ONLY and not any(f.bth[12:28]))
            want(fences, "no write of no bytes asks for the end of what was sent")
            self.c.note("%d fences" % fences)
        self.c.note("%d frames sent, %d received, all right%s" % (ours, theirs, ", tshark content" if seen else ""))

    def no_leftovers(self):
        """The kernel has no queue pair, session or device any more."""
        for _ in range(40):
            out = guest_run(GUEST, "rdma res show qp | grep -v 'type GSI'; ls /sys/class/rtrs-client "
                            "/sys/class/rtrs-server/ 2>/dev/null | grep -v : ; ls -d /sys/block/rnbd* 2>/dev/null")[1]
            if not out.strip():
                return
            time.sleep(0.25)
        want(False, "the kernel still has: %s", out)

    # -- the guest

    def guest(self, script, timeout=60):
        rc, out, err = guest_run(GUEST, script, timeout)
        want(rc == 0, "in the guest: %s: status %d: %s%s", script, rc, out[-400:], err[-400:])
        return out

    def errno(self, script, timeout=60):
        """-> status and error text of a command that may fail"""
        rc, out, err = guest_run(GUEST, script, timeout)
        return rc, (out + err).strip()

    def background(self, command, log):
        guest_exec(GUEST, ["bash", "-c", command], 30, lambda b: None, lambda b: None, detach=True, log=log)

    def fio(self, options, timeout=90):
        """-> fio's job as it reports it; none of its requests failed"""
        out = self.guest("cd /tmp; " + FIO + options, timeout)
        return self.fio_result(out)

    def fio_result(self, out):
        job = json.loads(out[out.index("{"):])["jobs"][0]
        want(job["error"] == 0, "fio: error %d", job["error"])
        done = job["read"]["total_ios"] + job["write"]["total_ios"]
        want(done > 0, "fio did nothing")
        self.c.messages += done
        return job

    # -- the kernel as client

    def export(self, *words, former=None):
        at = [x for a in self.n for x in ("--address", a)]
        more = [] if self.invalidate else ["--no-invalidate"]
        disk = words or ("--file", "%s=%s" % (DISK, self.file))
        t = Tool(self, "rnbd", "export", *at, *more, "--no-control", *disk)
        return t.listening()

    def map_words(self, device=DISK, access="rw", session="s1"):
        paths = " ".join("path=ip:%s@ip:%s" % x for x in zip(self.k, self.n))
        return "sessname=%s %s device_path=%s access_mode=%s" % (session, paths, device, access)

    def map(self, **kw):
        """The kernel maps the node's disk."""
        self.guest('echo "%s" > %s' % (self.map_words(**kw), CTL))

    def reconnect(self, i):
        """The kernel connects a path again, once it has noticed that the wire is back."""
        self.guest("for i in $(seq 30); do echo 1 > /sys/class/rtrs-client/s1/paths/ip:%s@ip:%s/reconnect 2> /dev/null && "
                   "exit 0; sleep 0.5; done; exit 1" % (self.k[i], self.n[i]))
        want(self.state(i) == UP, "path %d is not back", i)

    def state(self, i):
        """Of a path, as the kernel says."""
        return self.guest("cat /sys/class/rtrs-client/s1/paths/ip:%s@ip:%s/state" % (self.k[i], self.n[i])).strip()

    def unmap(self, n=0):
        self.guest("echo normal > /sys/block/rnbd%d/rnbd/unmap_device" % n)

    # -- the kernel as server

    def serve(self, file=False):
        """A disk of the kernel: memory, or a file behind a loop device, which can discard and has a cache to flush."""
        if file:
            self.guest("modprobe loop; rm -f /tmp/back; truncate -s %d /tmp/back; losetup /dev/loop5 /tmp/back" % SIZE)
            return "/dev/loop5"
        self.guest("modprobe -r brd; modprobe brd rd_nr=1 rd_size=%d && blockdev --flushbufs /dev/ram0" % (SIZE // 1024))
        return "/dev/ram0"

    def flushes(self):
        """That the kernel's loop device has done, those for durable writes among them."""
        return int(self.guest("cat /sys/block/loop5/stat").split()[15])

    def routes(self):
        paths = ["%s@%s" % x for x in zip(self.n, self.k)]
        return ["--from", "s1"] + [x for p in paths for x in ("--path", p)]

    def attach(self, device, *words):
        """bowline maps a disk of the kernel and offers it at a socket."""
        t = Tool(self, "rnbd", "map", device, *self.routes(), "--nbd", self.socket, "--no-control", *words)
        return t.listening("mapped", 40)

    def attach_ordered(self, device, *words, paths=None):
        """The same with the paths, or these of them, at a control socket. -> orders for it"""
        socket = ["--control", self.log + ".control"]
        routes = ["--from", "s1"] + [x for p in paths for x in ("--path", p)] if paths else self.routes()
        Tool(self, "rnbd", "map", device, *routes, "--nbd", self.socket, *socket, *words).listening("mapped", 40)
        return lambda *order: self.host(self.program, "rnbd", *socket, *order)

    def nbd_load(self, seconds, *words):
        """fio on the host at that socket."""
        result = self.log + ".fio.json"

        def run():
            self.host("fio", "--name=v", "--ioengine=nbd", "--uri=" + self.nbd(), "--size=8m", "--rw=randrw", "--iodepth=16",
                      "--bssplit=512/20:4k/30:64k/30:256k/20", "--verify=crc32c", "--verify_fatal=1",
                      "--verify_state_save=0", "--time_based", "--runtime=%d" % seconds, "--output-format=json",
                      "--output=" + result, *words)
            with open(result) as f:
                out = f.read()
            os.unlink(result)
            return self.fio_result(out)
        return Load(run)

    def verify(self, device, *words, timeout=90):
        """bowline loads a disk of the kernel and compares. -> what it reports"""
        t = Tool(self, "rnbd", "verify", device, *self.routes(), "--json", *words)
        rc, lines = t.end(timeout)
        want(rc == 0 and lines, "bowline %s: status %s: %s %s", t.words, rc, " ".join(lines)[-300:],
             t.said().strip()[-300:])
        return json.loads(lines[-1])

    def nbd(self):
        return "nbd+unix:///?socket=" + self.socket

    def host(self, *argv, timeout=90):
        r = subprocess.run(["ip", "netns", "exec", NETNS] + list(argv), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                           stderr=subprocess.STDOUT, timeout=timeout)
        out = r.stdout.decode(errors="replace")
        want(r.returncode == 0, "%s: status %d: %s", " ".join(argv), r.returncode, out[-400:])
        return out

    def wire(self, nic, state):
        set_link(GUEST, state, nic)


def report(c, got):
    """What `bowline rnbd verify` has found, and that it is nothing bad: in the end all paths are there."""
    want(got["pass"] and got["failed"] == 0 and got["damaged_blocks"] == 0, "%s", got)
    want(all(p["state"] == "connected" for p in got["paths"]), "paths are %s", got["paths"])
    c.messages += got["operations"]
    c.note("%.0f IO/s, longest pause %d ms, %d requests moved" % (got["iops"], got["longest_pause_ms"], got["failovers"]))


def longest(job):
    """-> seconds of the longest request of fio's"""
    return max(job[w]["lat_ns"].get("max", 0) for w in ("read", "write")) / 1e9


def md5(path, size=None):
    with open(path, "rb") as f:
        return hashlib.md5(f.read() if size is None else f.read(size)).hexdigest()


def file_system(r):
    """In the kernel a file system is made on its disk, filled with a tree of files, unmounted, checked, mounted again
    and compared."""
    sums = "cd %s && find . -type f -exec md5sum {} + | sort"
    packages = "/usr/lib/python3/dist-packages"
    r.guest("mkfs.ext4 -q -F /dev/rnbd0 && mount /dev/rnbd0 /mnt && cp -a %s /etc /mnt/ && umount /mnt && "
            "fsck.ext4 -fn /dev/rnbd0" % packages, 150)
    r.guest("echo 3 > /proc/sys/vm/drop_caches; mount /dev/rnbd0 /mnt")
    there, here = (r.guest(sums % x, 120) for x in ("/mnt/dist-packages", packages))
    want(there and there == here, "the files are not the same")
    r.guest("rm -r /mnt/etc && fstrim /mnt && umount /mnt", 60)
    r.c.messages += len(there.splitlines())


def cut_under_load(r):
    """While the kernel's fio writes and compares, a wire is cut silently, and healed when it has ended; then the other.
    The kernel notices in a second what it has sent and nobody acknowledges; when it waits for answers alone, by its
    heartbeat, after half a minute."""
    took = []
    for nic in (0, 1):
        r.background("cd /tmp; %s --rw=randwrite --bs=4k --iodepth=8 --runtime=12 > /tmp/fio.json" % FIO, "/tmp/fio.log")
        time.sleep(4)
        r.wire(nic, "drop")
        r.guest("while pgrep -x fio > /dev/null; do sleep 0.5; done", 100)
        want(r.state(nic) == DOWN, "the cut of wire %d was not noticed", nic)
        r.wire(nic, "pass")
        took.append(longest(r.fio_result(r.guest("cat /tmp/fio.json"))))
        want(took[-1] < 45, "a request took %.1f s, longer than the heartbeat needs", took[-1])
        r.reconnect(nic)
    moved = r.guest("cat /sys/class/rtrs-client/s1/paths/*/stats/rdma").split()[5::6]
    want(all(int(x) for x in moved), "requests moved to the paths: %s", moved)
    r.c.note("longest IO %.1f and %.1f s, %s IOs moved to another path" % (*took, "+".join(moved)))


def cut_client(r):
    """bowline's client with one wire cut and healed, then the other, while fio writes and compares: nothing waits for a
    path here, so each request has to move."""
    order = r.attach_ordered(r.serve(file=True), "--outage", "fail")
    paths = Paths(order, r.n, r.k)
    load = r.nbd_load(CUTS, "--fsync=16")
    r.c.note(paths.lose_each(r.wire, load))
    r.c.note("longest IO %.1f s" % longest(load.end()))
    paths.until(UP, UP)
    want(r.flushes(), "the kernel has never flushed its disk")


def map_once(c, paths, invalidate):
    """Map, write, read back, compare at the other end, unmap."""
    with Rnbd(c, paths, invalidate) as r:
        if c.dir == "k>n":
            r.export()
            r.map()
            want(r.guest("cat /sys/block/rnbd0/rnbd/state").strip() == "open", "the device is not open")
            for bs in ("512", "4k", "64k", "1M"):
                sums = r.guest("dd if=/dev/urandom of=/tmp/x bs=1M count=1 2>/dev/null; dd if=/tmp/x of=/dev/rnbd0 bs=%s "
                               "oflag=direct 2>/dev/null; dd if=/dev/rnbd0 bs=%s count=1M iflag=direct,count_bytes "
                               "2>/dev/null | md5sum; md5sum < /tmp/x" % (bs, "64k" if bs == "512" else bs)).split()
                want(sums[0] == sums[2], "blocks of %s: read %s, written %s", bs, sums[0], sums[2])
                want(md5(r.file, MIB) == sums[0], "blocks of %s: the file has something else", bs)
                c.messages += 1
            r.unmap()
        else:
            # clients of the socket that end leave more than may wait for a heartbeat
            r.fences = True
            device = r.serve()
            r.attach(device)
            data = c.log + ".data"
            with open(data, "wb") as f:
                f.write(os.urandom(SIZE))
            try:
                r.host("nbdcopy", data, r.nbd())
                sum_there = r.guest("md5sum < /dev/ram0").split()[0]
                want(sum_there == md5(data), "the kernel's disk has something else than what was written")
                back = r.host("nbdcopy", r.nbd(), data + ".back")
                want(md5(data + ".back") == sum_there, "read back is something else: %s", back)
            finally:
                for x in (data, data + ".back"):
                    if os.path.exists(x):
                        os.unlink(x)
            c.messages += 2


@scenario("rnbd-map", rows="RT-83 RT-98 NB-2 NB-9 NB-14 NB-17", families=(4, 6), timeout=120, ci=True, **COMMON)
def rnbd_map(c):
    """A disk is mapped over one path, written and read in blocks of four sizes, compared at the other
    end and unmapped; keys are refreshed. Nothing is left of it in the kernel."""
    map_once(c, 1, True)


@scenario("rnbd-map-trust", rows="RT-79", timeout=120, **COMMON)
def rnbd_map_trust(c):
    """The same without refreshed keys."""
    map_once(c, 1, False)


@scenario("rnbd-map-paths", rows="RT-76 RS-22", families=(4, 6), timeout=120, **COMMON)
def rnbd_map_paths(c):
    """The same over two paths."""
    map_once(c, 2, True)


@scenario("rnbd-map-mixed", rows="RT-28 RT-29", timeout=120, **COMMON)
def rnbd_map_mixed(c):
    """One path over IPv4 and one over IPv6: bowline takes the kernel's; a 6.12 server refuses any path of another
    family than the first, and bowline, whose session is all or nothing, says what it was told."""
    r = Rnbd(c, 2, dissect=False)
    r.k, r.n = ((x[4][0], x[6][1]) for x in (KERNEL, NODE))
    with r:
        if c.dir == "k>n":
            r.export()
            r.map()
            sums = r.guest("dd if=/dev/urandom of=/tmp/x bs=1M count=4 2>/dev/null; dd if=/tmp/x of=/dev/rnbd0 bs=64k "
                           "oflag=direct 2>/dev/null; md5sum < /tmp/x; cat /sys/class/rtrs-client/s1/paths/*/state").split()
            want(sums[2:] == ["connected"] * 2, "paths are %s", sums[2:])
            want(md5(r.file, 4 * MIB) == sums[0], "the file has something else")
            r.unmap()
        else:
            r.audited = False
            t = Tool(r, "rnbd", "map", r.serve(), *r.routes(), "--no-control")
            rc, _ = t.end(40)
            want(rc == 256 - errno.EEXIST and "of which Linux servers take one kind" in t.said(), "status %s: %s", rc,
                 t.said())
            c.note(t.said().strip())
        c.messages += 1


@scenario("rnbd-load", rows="RT-77 RT-78 NB-12 NB-13", timeout=180, ci=True, ci_dirs=("n>k",), n=10, ci_n=4, **COMMON)
def rnbd_load(c):
    """Random reads and writes of 512 bytes to 256 KiB, many at a time, flushes and durable writes
    between them: every block is compared. The kernel with fio, bowline with its own load."""
    with Rnbd(c, 2, dissect=c.dir == "k>n") as r:
        if c.dir == "k>n":
            r.export()
            r.map()
            for more in (MIXED % c.scale, "--rw=randwrite --bs=4k --iodepth=32 --runtime=%d" % c.scale, DURABLE % (c.scale // 2)):
                r.fio(more)
            r.unmap()
        else:
            got = r.verify(r.serve(file=True), "--time", str(c.scale * 3 // 2), "--span", "16MiB")
            report(c, got)
            flushes = r.flushes()
            want(got["durable_writes"] and got["flushes"] and flushes, "the kernel has flushed %d times: %s", flushes, got)
            c.note("%d durable writes, %d flushes; the kernel flushed %d times" % (
                got["durable_writes"], got["flushes"], flushes))


# data go both ways in either direction
@scenario("rnbd-jumbo", rows="RT-97 RT-39 REQ-26", timeout=180, n=2, **COMMON)
def rnbd_jumbo(c):
    """The same at path MTU 4096, over one path, with refreshed keys, and without, which CI leaves out: bowline's writes
    of 4 KiB are halves of one size."""
    for invalidate in (True, False)[:c.scale]:
        with Rnbd(c, 1, invalidate, dissect=c.dir == "k>n", mtu=9000) as r:
            if c.dir == "k>n":
                r.export()
                r.map()
                r.fio(MIXED % 8)
                r.fio("--rw=randwrite --bs=4k --iodepth=32 --runtime=5")
                r.unmap()
            else:
                report(c, r.verify(r.serve(file=True), "--time", str(5 * c.scale), "--span", "16MiB"))


@scenario("rnbd-keys", rows="RT-42 RT-43 RT-47 RT-48 RT-54", timeout=240, dirs=("n>k",), orders=("lo",), bare=True,
          tool=True, self_check=NO_SELF_CHECK)
def rnbd_keys(c):
    """bowline reads as kernels do, with a key for each request that the kernel invalidates with its answer,
    over two paths of three connections; with refreshed keys of chunks and without. Then a wire is cut and healed
    meanwhile: its requests move to the other path, and its path comes back."""
    for invalidate in (True, False):
        with Rnbd(c, 2, invalidate, dissect=False) as r:
            device = r.serve()
            words = ("--read-keys", "request", "--connections", "3", "--reads", "70", "--span", "8MiB")
            report(c, r.verify(device, "--time", "8", *words))

            def wire():
                time.sleep(4)
                r.wire(0, "drop")
                time.sleep(6)
                r.wire(0, "pass")
            cutter = threading.Thread(target=wire, daemon=True)
            cutter.start()
            got = r.verify(device, "--time", "16", "--depth", "8", "--outage", "fail", *words, timeout=120)
            cutter.join()
            want(got["failovers"], "no request has moved to the other path: %s", got)
            report(c, got)


@scenario("rnbd-fs", rows="RT-79 NB-12 NB-13 NB-47 NB-48", paths=(1, 2), timeout=240, dirs=("k>n",), orders=("lo",),
          bare=True, tool=True, self_check=NO_SELF_CHECK)
def rnbd_fs(c):
    """bowline's disk in the kernel over one path and over two, with refreshed keys and without: blocks of all sizes,
    flushes and durable writes, compared; then a file system is made, filled with a tree of files, unmounted,
    checked, mounted again and compared, and checked at the other end."""
    for invalidate in (True, False):
        with Rnbd(c, c.paths, invalidate, dissect=False) as r:
            r.export()
            r.map()
            r.fio(MIXED % 8)
            r.fio(DURABLE % 4)
            file_system(r)
            r.unmap()
            c.note(r.host("e2fsck", "-fn", r.file).strip().splitlines()[-1].replace(r.file, "the file"))


@scenario("rnbd-ops", rows="NB-17 NB-19 NB-20 NB-24 NB-26 NB-35 NB-58", timeout=150, ci=True, **COMMON)
def rnbd_ops(c):
    """Flush, discard, write zeroes; disks that are read-only, missing, open elsewhere or mapped twice:
    the errors are those a kernel gives."""
    with Rnbd(c) as r:
        if c.dir == "k>n":
            t = r.export()
            r.map()
            r.guest("dd if=/dev/urandom of=/dev/rnbd0 bs=1M count=4 oflag=direct 2>/dev/null; sync /dev/rnbd0")
            before = md5(r.file)
            r.guest("blkdiscard -o 1M -l 1M /dev/rnbd0 && blkdiscard -z -o 2M -l 64k /dev/rnbd0; blockdev --flushbufs "
                    "/dev/rnbd0; dd if=/dev/zero of=/dev/rnbd0 bs=4k count=1 seek=1000 oflag=direct,dsync 2>/dev/null")
            with open(r.file, "rb") as f:
                data = f.read()
            want(md5(r.file) != before and data[2 * MIB:2 * MIB + 65536] == bytes(65536), "zeroes were not written")
            want(data[MIB:2 * MIB] == bytes(MIB), "nothing was discarded")
            zeroes = r.guest("dd if=/dev/rnbd0 bs=64k skip=32 count=1 iflag=direct 2>/dev/null | tr -d '\\0' | wc -c")
            want(zeroes.strip() == "0", "zeroes read back as something else")
            rc, text = r.errno('echo "%s" > %s' % (r.map_words(), CTL))
            want(rc and "File exists" in text, "mapped twice: %s", text)
            rc, text = r.errno('echo "%s" > %s' % (r.map_words(device="nothere"), CTL))
            want(rc and "No such file" in text, "a disk that is not there: %s", text)
            rc, text = r.errno('echo "%s" > %s' % (r.map_words(device="../etc"), CTL))
            want(rc and "Invalid argument" in text, "a name with two dots: %s", text)
            rc, text = r.errno('echo "%s" > %s' % (r.map_words(session="s2"), CTL))
            want(rc and "Operation not permitted" in text, "a second writer: %s", text)
            r.map(session="s2", access="migration")
            rc, text = r.errno('echo "%s" > %s' % (r.map_words(session="s3", access="migration"), CTL))
            want(rc and "Operation not permitted" in text, "a third writer: %s", text)
            r.map(session="s3", access="ro")
            rc, text = r.errno("dd if=/dev/zero of=/dev/rnbd2 bs=4k count=1 oflag=direct")
            want(rc, "a read-only disk was written")
            r.guest("dd if=/dev/rnbd2 of=/dev/null bs=64k count=4 iflag=direct 2>/dev/null")
            for n in (2, 1, 0):
                r.unmap(n)
            rc, lines = t.end(ask=True)
            want(rc == 0, "bowline ended with %s", rc)
            r.audited = True
        else:
            device = r.serve(file=True)
            r.attach(device)
            io = ["qemu-io", "-f", "raw", "-d", "unmap", r.nbd()]
            out = r.host(*io, "-c", "write -P 0xa5 0 4M", "-c", "flush", "-c", "write -z 1M 64k", "-c", "discard 2M 1M",
                         "-c", "write -f -P 0x5a 3M 4k", "-c", "read -P 0xa5 0 1M", "-c", "read -P 0 1M 64k",
                         "-c", "read -P 0 2M 1M", "-c", "read -P 0x5a 3M 4k", "-c", "read -P 0xa5 3076k 1020k")
            want("verification failed" not in out and "error" not in out.lower(), "%s", out[-400:])
            sums = r.guest("head -c 1M /tmp/back | tr -d '\\245' | wc -c; head -c 3M /tmp/back | tail -c 1M | tr -d '\\0' | "
                           "wc -c").split()
            want(sums == ["0", "0"], "the kernel's file has something else: %s", sums)
            for name, why in (("/dev/nothere", errno.ENOENT), ("/tmp/back", errno.ENOTBLK)):
                t = Tool(r, "rnbd", "map", name, "--from", "other", "--path", "%s@%s" % (OTHER, r.k[0]), "--no-control")
                rc, _ = t.end(30)
                want(rc == 256 - why and name in t.said(), "%s: status %s: %s", name, rc, t.said())
            r.tools[0].end(ask=True)
        c.messages += 1


# the other direction is a part of rnbd-trust
@scenario("rnbd-cut", rows="RT-82 RT-84 RT-91 RS-8", timeout=240, ci=True, ci_dirs=("n>k",), **COMMON)
def rnbd_cut(c):
    """Two paths under verified load; first one wire is cut silently, healed after a while, then the
    other: requests move to the other path, none fails, no byte is wrong, and each path comes back before the next is cut."""
    with Rnbd(c, 2, dissect=False) as r:
        if c.dir == "k>n":
            r.export()
            r.map()
            cut_under_load(r)
            r.unmap()
        else:
            cut_client(r)


# bowline's client loses each wire in rnbd-cut; that it waits without any is what the simulator and cargo test show
@scenario("rnbd-cut-all", rows="RT-60 RT-88 RT-93 NB-54", timeout=240, **COMMON)
def rnbd_cut_all(c):
    """All wires of two paths are cut at once for six seconds, and healed. The kernel's client, which would fail its IO if
    it were dropped, is not: it notices nothing. bowline's client waits under verified load until a path is back; no
    request fails."""
    with Rnbd(c, 2, dissect=False) as r:
        if c.dir == "k>n":
            r.export()
            r.map()
            write = "dd if=/dev/urandom of=/tmp/x bs=1M count=4 2> /dev/null; dd if=/tmp/x of=/dev/rnbd0 bs=64k " \
                "oflag=direct 2> /dev/null"
            r.guest(write)
            reconnects = "cat /sys/class/rtrs-client/s1/paths/*/stats/reconnects"
            before = r.guest(reconnects)
            cut_all(r)
            # what would end a path does so within seconds, once it can be heard
            time.sleep(8)
            r.guest(write)
            sums = r.guest("dd if=/dev/rnbd0 bs=64k count=4M iflag=direct,count_bytes 2> /dev/null | md5sum; md5sum < /tmp/x").split()
            want(sums[0] == sums[2] == md5(r.file, 4 * MIB), "read %s, written %s", sums[0], sums[2])
            want([r.state(i) for i in (0, 1)] == [UP, UP], "paths were lost")
            want(r.guest(reconnects) == before, "paths were lost and are back: %s", r.guest(reconnects))
            want("lost" not in r.tools[-1].said(), "the server has given up paths: %s", r.tools[-1].said())
            c.messages += 2
            r.unmap()
        else:
            load = Load(lambda: r.verify(r.serve(file=True), "--time", "40", "--span", "8MiB", timeout=180))
            time.sleep(15)
            load.goes_on()
            cut_all(r)
            report(c, load.end(180))


def cut_all(r):
    for state in ("drop", "pass"):
        for nic in (0, 1):
            r.wire(nic, state)
        if state == "drop":
            time.sleep(OUTAGE)


@scenario("rnbd-cut-trust", rows="RT-79 RT-82 RT-84 RT-91 RS-8", timeout=240, dirs=("n>k",), orders=("lo",), bare=True,
          tool=True, self_check=NO_SELF_CHECK)
def rnbd_cut_trust(c):
    """The same without refreshed keys; kernel to node is in rnbd-trust."""
    with Rnbd(c, 2, invalidate=False, dissect=False) as r:
        cut_client(r)


@scenario("rnbd-trust", rows="RT-79 RT-82 RT-84 NB-47", timeout=300, dirs=("k>n",), orders=("lo",), bare=True, tool=True,
          self_check=NO_SELF_CHECK)
def rnbd_trust(c):
    """What a disk is for, all of it without refreshed keys: over two paths a file system with a tree of files, blocks
    of all sizes that are compared, then each wire cut under load, with no request that fails."""
    with Rnbd(c, 2, invalidate=False, dissect=False) as r:
        r.export()
        r.map()
        file_system(r)
        r.fio(MIXED % 8)
        cut_under_load(r)
        r.unmap()


@scenario("rnbd-paths", rows="RT-84 RS-37 RS-38 RS-39", timeout=180, dirs=("n>k",), orders=("lo",), bare=True, tool=True, ci=True,
          self_check=NO_SELF_CHECK)
def rnbd_paths(c):
    """A disk of the kernel under verified load, while its paths are changed by order: one is added, disconnected,
    connected again, removed and added again; then the first one goes for good. No request fails."""
    with Rnbd(c, 2, dissect=False) as r:
        device = r.serve()
        first, second = ("%s@%s" % x for x in zip(r.n, r.k))
        order = r.attach_ordered(device, "--address", r.n[1], paths=(first,))
        paths, load = Paths(order, r.n, r.k), r.nbd_load(30)
        for words, *states in (
                (("path", "add", "s1", second), UP, UP),
                (("client", "path", "disconnect", second), UP, DOWN),
                (("client", "path", "reconnect", second), UP, UP),
                (("client", "path", "disconnect", first), DOWN, UP),
                (("client", "path", "reconnect", first), UP, UP),
                (("path", "delete", "s1", second), UP, None),
                (("path", "add", "s1", second), UP, UP),
                (("path", "delete", "s1", first), None, UP)):
            order(*words)
            # the load goes on over them
            paths.until(*states)
            time.sleep(1.5)
            load.goes_on()
        at = r.guest("ls /sys/class/rtrs-server/s1/paths").split()
        want(at == ["ip:%s@ip:%s" % (r.n[1], r.k[1])], "the kernel has the paths %s", at)
        c.note("longest IO %.1f s" % longest(load.end()))


def cycles(c, invalidate):
    """Map, read and unmap as often as that."""
    with Rnbd(c, c.paths, invalidate) as r:
        r.audited = False
        if c.dir == "k>n":
            r.export()
            # the next disk gets another number when the kernel has not let go of the last one yet
            out = r.guest("for i in $(seq %d); do echo '%s' > %s || exit 1; d=$(basename $(readlink -f %s)); dd if=/dev/$d "
                          "of=/dev/null bs=64k count=1 iflag=direct 2>/dev/null || exit 2; echo normal > "
                          "/sys/block/$d/rnbd/unmap_device || exit 3; done; echo done" % (
                              c.scale, r.map_words(), CTL, CTL.replace("map_device", "devices/%s@s1" % DISK)), 280)
            want("done" in out, "%s", out)
        else:
            device = r.serve()
            for _ in range(c.scale):
                r.attach(device)
                r.tools[-1].end(ask=True)
        c.messages += c.scale


@scenario("rnbd-cycles", rows="RT-92 NB-32 NB-38", paths=(1, 2), timeout=300, n=100, **COMMON)
def rnbd_cycles(c):
    """Map and unmap again and again, over one path and over two: every time works, nothing stays behind."""
    cycles(c, True)


@scenario("rnbd-cycles-trust", rows="RT-79 RT-92 NB-32 NB-38", paths=(1, 2), timeout=300, n=100, **COMMON)
def rnbd_cycles_trust(c):
    """The same without refreshed keys."""
    cycles(c, False)


@scenario("rnbd-restart", rows="RT-92 RS-48 NB-61 NB-62", timeout=180, ci=True, **COMMON)
def rnbd_restart(c):
    """bowline is killed and started again at once. As server: the kernel's device closes at once and
    works again after a reconnect. As client: its session's name is free at once."""
    with Rnbd(c, 1) as r:
        if c.dir == "k>n":
            r.export()
            r.map()
            r.guest("dd if=/dev/urandom of=/tmp/x bs=64k count=16 2>/dev/null; dd if=/tmp/x of=/dev/rnbd0 bs=64k "
                    "oflag=direct,dsync 2>/dev/null")
            r.tools[-1].kill()
            r.export()
            path = "/sys/class/rtrs-client/s1/paths/ip:%s@ip:%s/" % (r.k[0], r.n[0])
            state = r.guest("for i in $(seq 20); do s=$(cat /sys/block/rnbd0/rnbd/state); [ $s = closed ] && break; sleep "
                            "0.1; done; echo $s").strip()
            want(state == "closed", "the kernel did not learn of the restart: %s", state)
            r.guest("echo 1 > %sreconnect; for i in $(seq 30); do s=$(cat /sys/block/rnbd0/rnbd/state); [ $s = open ] && "
                    "break; sleep 0.1; done; [ $s = open ]" % path)
            sums = r.guest("dd if=/dev/rnbd0 bs=64k count=16 iflag=direct 2>/dev/null | md5sum; md5sum < /tmp/x").split()
            want(sums[0] == sums[2], "what was durable before is gone")
            r.unmap()
        else:
            device = r.serve()
            r.attach(device)
            r.host("qemu-io", "-f", "raw", r.nbd(), "-c", "write -P 0x77 0 1M", "-c", "flush")
            r.tools[-1].kill()
            os.unlink(r.socket)
            t0 = time.monotonic()
            r.attach(device)
            c.note("mapped again under the same name after %.1f s" % (time.monotonic() - t0))
            out = r.host("qemu-io", "-f", "raw", r.nbd(), "-c", "read -P 0x77 0 1M")
            want("failed" not in out, "%s", out)
        c.messages += 1


@scenario("rtrs-hostile", rows="RT-28 RT-31", timeout=60, dirs=("n>k",), orders=("lo",), bare=True, tool=True, ci=True,
          self_check=NO_SELF_CHECK)
def rtrs_hostile(c):
    """Nobody listens, or a session with that name has another server: the client says so."""
    with Rnbd(c) as r:
        r.audited = False
        device = r.serve()
        t = Tool(r, "rnbd", "map", device, "--from", "x", "--path", "%s@%s" % (OTHER, r.k[0]), "--port", "4444",
                 "--no-control")
        rc, _ = t.end(40)
        want(rc not in (0, None) and t.said(), "a port where nobody listens: status %s", rc)
        c.note(t.said().strip())
        r.attach(device)
        t = Tool(r, "rnbd", "map", device, "--from", "s1", "--path", "%s@%s" % (OTHER, r.k[0]), "--no-control")
        rc, _ = t.end(40)
        want(rc not in (0, None) and t.said(), "a name in use: status %s", rc)
        c.note(t.said().strip())
        c.messages += 1
