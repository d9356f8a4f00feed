"""fio in guests on a mapped disk as its machine or its kernel sees it, beside the same fio on nbdkit. Guests are
emulated: what counts is the ratio."""
import json
import os
import shutil
import statistics
import subprocess
import time

from lab.common import CURRENT, NETNS, Fail
from lab.guest import down

from .base import MIB, scenario, want
from .disks import U, Machines
from .machine import CLIENT, HOST, boot, lines, make_guest, until
from .roce import NO_SELF_CHECK, Tool

SIZE = 64 * MIB
ROUNDS, SECONDS = 5, 2
JOBS = (("read", "4k", 1), ("write", "4k", 1), ("read", "4k", 32), ("write", "4k", 32), ("read", "128k", 16), ("write", "128k", 16))
PORT = 10809
OWN, OTHER = "bowline", "nbdkit"
FIO = ("fio --output-format=json --name=j --filename=%s --size=" + str(SIZE) + " --direct=1 --ioengine=libaio --time_based "
       "--runtime=" + str(SECONDS) + " --norandommap --rw=rand%s --bs=%s --iodepth=%d")
# vda is the disk of bowline, vdb that of qemu's NBD client, vdc the root of the lab's guests, which has fio
INIT = """#!/bin/busybox sh
/bin/busybox --install -s /bin
mount -t proc p /proc; mount -t sysfs s /sys; mount -t devtmpfs d /dev
for m in $(cat /mods/order); do insmod /mods/$m; done
echo SIZES $(cat /sys/block/vda/size) $(cat /sys/block/vdb/size)
mkdir /r && mount -t ext4 /dev/vdc /r
mount -t proc p /r/proc; mount -t sysfs s /r/sys; mount -t devtmpfs d /r/dev; mount -t tmpfs t /r/tmp
for disk in vda vdb; do dd if=/dev/urandom of=/dev/$disk bs=1M count=COUNT oflag=direct 2>/dev/null; done
asked() { echo FIO $1 $(chroot /r sh -c "cd /tmp; $2" 2>&1 | tr -d ' \\n'); }
for round in $(seq ROUNDS); do
RUNS
done
poweroff -f
"""


class Server:
    """Export of a disk of memory in the lab's namespace, and nbdkit with one beside it."""

    def __init__(self, c):
        self.c, self.log, self.program, self.tools, self.nbdkit = c, c.log, c.w.bowline(), [], None
        if not shutil.which("nbdkit"):
            raise Fail("nbdkit is not installed; apt-get install nbdkit")
        Tool(self, "rnbd", "export", "--memory", "disk0=%d" % SIZE, "--address", HOST, "--no-control").listening()

    def other(self, address, size):
        """nbdkit, that listens."""
        pid = self.log + ".nbdkit"
        self.nbdkit = subprocess.Popen(["ip", "netns", "exec", NETNS, "nbdkit", "-f", "-P", pid, "-i", address, "-p", str(PORT),
                                        "memory", str(size)], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        # it writes the file when it listens
        end = time.monotonic() + 20
        while not os.path.exists(pid):
            want(self.nbdkit.poll() is None and time.monotonic() < end, "nbdkit does not listen")
            time.sleep(0.05)
        os.unlink(pid)

    def end(self, well):
        if self.nbdkit:
            self.nbdkit.kill()
            self.nbdkit.wait()
        for tool in reversed(self.tools):
            if not well:
                tool.kill()
                continue
            rc, _ = tool.end(ask=True)
            want(rc == 0, "bowline ended with %s: %s", rc, tool.said())


def figures(said):
    """-> requests a second and 99th percentile of what fio has said"""
    job = json.loads(said[said.index("{"):])["jobs"][0]
    side = max(job["read"], job["write"], key=lambda side: side["total_ios"])
    want(job["error"] == 0 and side["total_ios"] > 0, "fio: error %s, %d requests", job["error"], side["total_ios"])
    return side["iops"], side["clat_ns"]["percentile"]["99.000000"]


def note(c, what, got):
    """The medians of the ratios in each round; `got`: of each job, for each of the two, what each round gave."""
    c.save("rounds", {"%s %s x %d" % job: rounds for job, rounds in got.items()})
    for job, rounds in got.items():
        pairs = list(zip(rounds[OWN], rounds[OTHER]))
        want(len(pairs) == ROUNDS, "%s of %s: %d rounds", what, job, len(pairs))
        rate, slow = (statistics.median(own[at] / other[at] for own, other in pairs) for at in (0, 1))
        c.note("%s, %s %s x %d: rate %.2f, p99 %.2f of nbdkit's" % ((what,) + job + (rate, slow)))


@scenario("rnbd-machine-speed", orders=("lo",), timeout=1500, bare=True, tool=True, self_check=NO_SELF_CHECK)
def rnbd_machine_speed(c):
    """The same fio in a virtual machine on two disks, in turn: `rnbd map --vhost-user`, and nbdkit over TCP by qemu's own
    NBD client. The ratios are noted."""
    with open(CURRENT) as f:
        kernel = json.load(f)
    runs = ["  asked %s '%s'" % (disk, FIO % ("/dev/" + disk, *job)) for job in JOBS for disk in ("vda", "vdb")]
    init = INIT.replace("ROUNDS", str(ROUNDS)).replace("COUNT", str(SIZE // MIB)).replace("RUNS", "\n".join(runs))
    initrd = c.log + ".initrd"
    make_guest(initrd, kernel, init)
    server, machine, well = Server(c), None, False
    try:
        server.socket = c.log + ".machine"
        Tool(server, "rnbd", "map", "disk0", "--from", "s1", "--path", CLIENT + "@" + HOST, "--vhost-user", server.socket,
             "--no-control").listening("mapped")
        # of another size, by which the guest tells them apart
        server.other(HOST, SIZE + MIB)
        more = ["-drive", "file=nbd:%s:%d,if=none,id=n,format=raw,cache=none" % (HOST, PORT),
                "-device", "virtio-blk-pci,drive=n,num-queues=2",
                "-drive", "file=%s,if=none,id=root,format=raw,snapshot=on,cache=unsafe" % kernel["root"],
                "-device", "virtio-blk-pci,drive=root"]
        machine, console = boot(c, server, kernel, initrd, "", *more, inside=NETNS)
        until(console, "SIZES", 1, machine, 150)
        want(lines(console, "SIZES") == [[str(SIZE // 512), str((SIZE + MIB) // 512)]], "disks: %s", lines(console, "SIZES"))
        machine.wait(1200)
        got = {job: {OWN: [], OTHER: []} for job in JOBS}
        for at, (disk, said) in enumerate(lines(console, "FIO")):
            got[JOBS[at // 2 % len(JOBS)]][OWN if disk == "vda" else OTHER].append(figures(said))
        note(c, "vhost-user", got)
        well = True
    finally:
        if machine and machine.poll() is None:
            machine.kill()
            machine.wait(10)
        server.end(well)
    os.unlink(initrd)


@scenario("rnbd-ublk-speed", orders=("lo",), timeout=1500, bare=True, tool=True, self_check=NO_SELF_CHECK)
def rnbd_ublk_speed(c):
    """The same fio in a guest on two block devices of its kernel, in turn: `rnbd map --ublk` of a disk on the host, and
    nbd-client with nbdkit there. The ratios are noted."""
    server, well = Server(c), False
    try:
        server.other(HOST, SIZE)
        with Machines(c, U) as (u,):
            u.run("modprobe -a ublk_drv nbd")
            mapped = u.bowline("rnbd", "map", "disk0", "--from", "s1", "--path", "%s@%s" % (u.address, HOST), "--ublk",
                               "--no-control", ready="ublk")
            u.run("nbd-client %s %d /dev/nbd0" % (HOST, PORT))
            disks = {OWN: "/dev/ublkb0", OTHER: "/dev/nbd0"}
            for disk in disks.values():
                u.run("dd if=/dev/urandom of=%s bs=1M count=%d oflag=direct 2> /dev/null" % (disk, SIZE // MIB))
            got = {job: {OWN: [], OTHER: []} for job in JOBS}
            for turn in range(ROUNDS):
                for job in JOBS:
                    # every second round the other way round: whoever comes first is not favoured
                    for who in (OWN, OTHER)[::1 - turn % 2 * 2]:
                        said = u.run("cd /tmp; " + FIO % (disks[who], *job), 120)
                        got[job][who].append(figures(said))
            u.run("nbd-client -d /dev/nbd0")
            mapped.end()
        note(c, "ublk", got)
        well = True
    finally:
        server.end(well)
        down([U])
