"""Virtual machines whose disk bowline serves to them, by vhost-user."""
import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import time

from lab.common import CURRENT
from lab.initrd import cpio_newc

from .base import MIB, scenario, want
from .roce import NO_SELF_CHECK, Tool

SIZE = 64 * MIB
HOST, CLIENT = "10.99.0.1", "10.99.0.250"
# what the guest writes without a file system, behind what the files take, and its length, in MiB
RAW = (40, 8)
ROUNDS = 60
INIT = """#!/bin/busybox sh
/bin/busybox --install -s /bin
mount -t proc p /proc; mount -t sysfs s /sys; mount -t devtmpfs d /dev
for m in $(cat /mods/order); do insmod /mods/$m; done
echo SIZE $(cat /sys/block/vda/size) QUEUES $(ls /sys/block/vda/mq | wc -l)
/sbin/mkfs.ext4 -q -F /dev/vda && mkdir /mnt && mount -t ext4 /dev/vda /mnt || poweroff -f
for i in 1 2 3 4 5 6 7 8; do dd if=/dev/urandom of=/mnt/f$i bs=64k count=16 2>/dev/null & done; wait
mkdir /mnt/d; for i in $(seq 200); do echo $i > /mnt/d/$i; done
(cd /mnt; find . -type f | xargs md5sum > /sums)
umount /mnt; echo 3 > /proc/sys/vm/drop_caches; mount -t ext4 /dev/vda /mnt
echo FILES $(cd /mnt; md5sum -c /sums 2>/dev/null | grep -c ': OK$') of $(wc -l < /sums)
umount /mnt
dd if=/dev/urandom of=/rand bs=64k count=16 2>/dev/null
for i in $(seq ROUNDS); do
  dd if=/rand of=/dev/vda bs=64k seek=$((640 + i % 8 * 16)) oflag=direct 2>/dev/null &&
    dd if=/dev/vda bs=64k skip=$((640 + i % 8 * 16)) count=16 iflag=direct 2>/dev/null | cmp - /rand && echo ROUND $i
  sleep 0.1
done
echo RAW $(dd if=/dev/vda bs=1M skip=SKIP count=COUNT iflag=direct 2>/dev/null | md5sum)
poweroff -f
""".replace("ROUNDS", str(ROUNDS)).replace("SKIP", str(RAW[0])).replace("COUNT", str(RAW[1]))


def make_guest(at, kernel, init=INIT):
    """An initramfs with mkfs.ext4 of this host, that tries its disk and ends, or does something else."""
    entries, folders = [], set()

    def folder(path):
        if path and path not in folders:
            folder(os.path.dirname(path))
            folders.add(path)
            entries.append((path, 0o040755, b""))

    def add(source, to):
        folder(os.path.dirname(to))
        with open(source, "rb") as f:
            entries.append((to, 0o100755, f.read()))
    for path in ("dev", "proc", "sys"):
        folder(path)
    entries.append(("init", 0o100755, init.encode()))
    add(shutil.which("busybox"), "bin/busybox")
    mkfs = shutil.which("mkfs.ext4", path=os.environ["PATH"] + ":/usr/sbin:/sbin")
    add(mkfs, "sbin/mkfs.ext4")
    linked = subprocess.run(["ldd", mkfs], stdout=subprocess.PIPE, check=True, timeout=60).stdout.decode()
    for library in (word for word in linked.split() if word.startswith("/")):
        add(os.path.realpath(library), library[1:])
    for module in os.listdir(kernel["mods"]):
        add(os.path.join(kernel["mods"], module), "mods/" + module)
    with open(at, "wb") as f:
        f.write(cpio_newc(entries))


class Disk:
    """A file of the host, exported, and mapped for a machine."""

    def __init__(self, c):
        self.c, self.log, self.program, self.tools = c, c.log, c.w.bowline(), []
        self.file, self.socket = c.log + ".disk", c.log + ".machine"
        with open(self.file, "wb") as f:
            f.truncate(SIZE)
        Tool(self, "rnbd", "export", "--file", "disk0=" + self.file, "--address", HOST, "--no-control").listening()
        self.map()

    def map(self):
        self.mapped = self.start()

    def start(self, *more):
        words = ["rnbd", "map", "disk0", "--from", "s1", "--path", CLIENT + "@" + HOST, "--vhost-user", self.socket]
        return Tool(self, *words, "--control", self.c.log + ".map", *more).listening("mapped")

    def kill(self):
        """The program is gone as in an accident, and another one comes."""
        os.killpg(self.mapped.p.pid, signal.SIGKILL)
        self.mapped.p.wait(10)
        self.tools.remove(self.mapped)
        self.map()

    def replace(self):
        """Another one takes its place, and it ends by itself."""
        former, self.mapped = self.mapped, self.start("--replace")
        want(former.p.wait(10) == 0, "the program that was replaced ended so: %s", former.said())
        self.tools.remove(former)

    def end(self):
        for tool in reversed(self.tools):
            rc, _ = tool.end(ask=True)
            want(rc == 0, "bowline ended with %s: %s", rc, tool.said())
        want(not os.path.exists(self.socket), "the socket is still there")
        os.unlink(self.file)

    def sum(self):
        with open(self.file, "rb") as f:
            f.seek(RAW[0] * MIB)
            return hashlib.md5(f.read(RAW[1] * MIB)).hexdigest()


class Monitor:
    """Commands to a qemu."""

    def __init__(self, path):
        self.s = socket.socket(socket.AF_UNIX)
        self.s.settimeout(30)
        self.s.connect(path)
        self.f = self.s.makefile("rw")
        self.f.readline()
        self.ask("qmp_capabilities")

    def ask(self, command, **arguments):
        self.f.write(json.dumps({"execute": command, "arguments": arguments}) + "\n")
        self.f.flush()
        while True:
            answer = json.loads(self.f.readline())
            if "event" not in answer:
                want("return" in answer, "%s: %s", command, answer)
                return answer["return"]


def boot(c, disk, kernel, initrd, name, *more, inside=None):
    """Starts a machine with the disk, whose files have this name, in a network namespace if it needs one; returns its
    process and its console."""
    console = "%s.console%s" % (c.log, name)
    with open("%s.qemu%s" % (c.log, name), "wb") as said:
        machine = subprocess.Popen(
            (["ip", "netns", "exec", inside] if inside else []) +
            ["qemu-system-x86_64", "-machine", "pc,memory-backend=m", "-accel", "tcg,thread=multi", "-cpu", "max",
             "-smp", "2", "-m", "256", "-object", "memory-backend-memfd,id=m,size=256M,share=on", "-nodefaults",
             "-no-user-config", "-display", "none", "-no-reboot", "-kernel", kernel["vmlinuz"], "-initrd", initrd,
             "-append", "console=ttyS0 quiet loglevel=4 panic=1 mitigations=off nokaslr random.trust_cpu=on",
             "-serial", "file:" + console, "-chardev", "socket,id=c,reconnect=1,path=" + disk.socket,
             "-device", "vhost-user-blk-pci,chardev=c,num-queues=2"] + list(more),
            stdin=subprocess.DEVNULL, stdout=said, stderr=said)
    return machine, console


def lines(console, word):
    """What a guest has said that begins with a word."""
    if not os.path.exists(console):
        return []
    with open(console, errors="replace") as f:
        return [line.split()[1:] for line in f if line.startswith(word + " ")]


def until(console, word, count, machine, seconds):
    end = time.monotonic() + seconds
    while len(lines(console, word)) < count:
        want(machine.poll() is None, "the machine has ended before %s %d", word, count)
        want(time.monotonic() < end, "the machine does not come to %s %d", word, count)
        time.sleep(0.1)


@scenario("rnbd-machine", orders=("lo",), timeout=300, bare=True, tool=True, self_check=NO_SELF_CHECK)
def rnbd_machine(c):
    """A virtual machine of its own, whose disk `rnbd map --vhost-user` serves: a file system with its files is compared,
    what is written past it is what the server's file has, and the program is killed once and replaced once under writes,
    of which none fails."""
    with open(CURRENT) as f:
        kernel = json.load(f)
    initrd = c.log + ".initrd"
    make_guest(initrd, kernel)
    disk, machine = Disk(c), None
    try:
        machine, console = boot(c, disk, kernel, initrd, "")
        until(console, "ROUND", 5, machine, 150)
        disk.kill()
        until(console, "ROUND", 15, machine, 60)
        disk.replace()
        machine.wait(90)
        want(lines(console, "SIZE") == [[str(SIZE // 512), "QUEUES", "2"]], "the disk is %s", lines(console, "SIZE"))
        want(lines(console, "FILES") == [["208", "of", "208"]], "files: %s", lines(console, "FILES"))
        want(len(lines(console, "ROUND")) == ROUNDS, "writes failed: %s", lines(console, "ROUND"))
        raw = lines(console, "RAW")
        want(raw and raw[0][0] == disk.sum(), "the guest has read %s, the file has %s", raw, disk.sum())
        disk.end()
        os.unlink(initrd)
        c.messages += 208 + ROUNDS
    finally:
        if machine and machine.poll() is None:
            machine.kill()
            machine.wait(10)
        for tool in disk.tools:
            tool.kill()


def moved(monitor, machine):
    """Whether a machine has moved; the reason if it cannot."""
    want(machine.poll() is None, "the machine has ended before it moved")
    state = monitor.ask("query-migrate")
    want(state.get("status") not in ("failed", "cancelled"), "the machine does not move: %s", state)
    return state.get("status") == "completed"


@scenario("rnbd-machine-moves", orders=("lo",), timeout=400, bare=True, tool=True, self_check=NO_SELF_CHECK)
def rnbd_machine_moves(c):
    """A virtual machine moves to another process of qemu while it writes its disk, reads it back and compares, and
    `rnbd map --vhost-user` is killed meanwhile: no write fails, and what is written is what the server's file has."""
    with open(CURRENT) as f:
        kernel = json.load(f)
    initrd, place, monitor = c.log + ".initrd", c.log + ".move", c.log + ".qmp"
    make_guest(initrd, kernel)
    disk, machines = Disk(c), []
    try:
        first, console = boot(c, disk, kernel, initrd, "1", "-qmp", "unix:%s,server=on,wait=off" % monitor)
        machines.append(first)
        until(console, "ROUND", 5, first, 200)
        qemu = Monitor(monitor)
        # Slow enough that the program is killed in the middle of it.
        qemu.ask("migrate-set-parameters", **{"max-bandwidth": 8 * MIB, "downtime-limit": 2000})
        qemu.ask("migrate", uri="exec:cat > '%s'" % place)
        rounds = len(lines(console, "ROUND"))
        until(console, "ROUND", rounds + 2, first, 60)
        want(not moved(qemu, first), "it has moved already")
        disk.kill()
        until(console, "ROUND", rounds + 5, first, 60)
        want(not moved(qemu, first), "it has moved already")
        qemu.ask("migrate-set-parameters", **{"max-bandwidth": 1024 * MIB})
        end = time.monotonic() + 90
        while not moved(qemu, first):
            want(time.monotonic() < end, "the machine does not move: %s", qemu.ask("query-migrate"))
            time.sleep(0.2)
        first.kill()
        first.wait(10)
        before = len(lines(console, "ROUND"))
        # A qemu 7.2 that waits for its machine while the program is killed never uses the disk afterwards, with any back
        # end (decision 0015), so the second one begins now.
        second, console2 = boot(c, disk, kernel, initrd, "2", "-incoming", "exec:cat '%s'" % place)
        machines.append(second)
        second.wait(150)
        after = len(lines(console2, "ROUND"))
        want(0 < before < ROUNDS and before + after >= ROUNDS - 1, "rounds: %d and %d", before, after)
        raw = lines(console2, "RAW")
        want(raw and raw[0][0] == disk.sum(), "the guest has read %s, the file has %s", raw, disk.sum())
        disk.end()
        os.unlink(initrd)
        os.unlink(place)
        c.messages += before + after
    finally:
        for machine in machines:
            if machine.poll() is None:
                machine.kill()
                machine.wait(10)
        for tool in disk.tools:
            tool.kill()
