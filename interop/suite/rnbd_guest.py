"""bowline's client inside a guest: its disks as block devices of a kernel, and rtrs over rdma-core."""
import errno
import hashlib
import os
import time

from lab.guest import set_link

from .base import MIB, scenario, want
from .disks import CLIENT, P, Q, SERVER, TRUSTING, Machines
from .paths import UP, Load, Paths
from .place import run_tests
from .roce import NO_SELF_CHECK, Tool

SIZE = 32 * MIB
HOST = "10.99.0.1"
TREE = "/usr/lib/python3/dist-packages"
SUMS = "cd %s && find . -type f -exec md5sum {} + | sort"
VERIFY = ("--name=v --filename=%s --size=16m --direct=1 --ioengine=libaio --verify=crc32c --verify_fatal=1 --rw=randrw "
          "--bssplit=512/20:4k/30:64k/30:128k/20 --iodepth=16 --fsync=32 --time_based --runtime=%d")
DURABLE = "--name=v --filename=%s --size=16m --direct=1 --ioengine=libaio --verify=crc32c --verify_fatal=1 --rw=randwrite " \
    "--bs=4k --iodepth=4 --sync=dsync --time_based --runtime=%d"
CONTROL = "/tmp/bowline.control"
# in seconds, where the processors are emulated: what has to be over soon, and what notices that a link is cut
SOON, NOTICED = 15, 60
# seconds in which the wire of each path is cut and healed
CUTS = {1: 25, 2: 32}
COMMON = dict(orders=("lo",), bare=True, tool=True, self_check=NO_SELF_CHECK)


class Export:
    """What a disk in guest p comes from: bowline on the host (k>n), or the kernel of guest q (n>k)."""

    def __init__(self, c, q=None):
        self.c, self.q = c, q
        self.log, self.program, self.tools = c.log, c.w.bowline(), []
        self.file = c.log + ".disk"

    def __enter__(self):
        if self.q:
            self.q.modules(*SERVER)
            self.device, self.address = self.q.memory(SIZE), self.q.address
        else:
            with open(self.file, "wb") as f:
                f.truncate(SIZE)
            Tool(self, "rnbd", "export", "--file", "disk0=" + self.file, "--address", HOST, "--no-control").listening()
            self.device, self.address = "disk0", HOST
        return self

    def __exit__(self, kind, error, trace):
        for t in self.tools:
            if kind is None:
                rc, _ = t.end(ask=True)
                want(rc == 0, "bowline on the host ended with %s: %s", rc, t.said())
            t.kill()
        if kind is None and not self.q:
            os.unlink(self.file)

    def md5(self):
        """Of all that is stored."""
        if self.q:
            return self.q.memory_md5()
        with open(self.file, "rb") as f:
            return hashlib.md5(f.read()).hexdigest()


def map_disk(c, p, e, *words, ready="mapped"):
    """bowline in the guest maps the disk. -> the command, when it has said that word"""
    return p.bowline("rnbd", "map", e.device, "--from", "s1", "--path", "%s@%s" % (p.address, e.address), "--no-control",
                     *words, ready=ready)


def file_system(c, p, disk):
    """A file system is made on a disk, filled with a tree of files, checked, mounted again, compared, and
    checked once more."""
    p.run("mkfs.ext4 -q -F {0} && mount {0} /mnt && cp -a {1} /etc /mnt/ && umount /mnt && fsck.ext4 -fn {0}".format(
        disk, TREE), 150)
    p.run("echo 3 > /proc/sys/vm/drop_caches; mount %s /mnt" % disk)
    there, here = (p.run(SUMS % x, 120) for x in ("/mnt/dist-packages", TREE))
    want(there and there == here, "the files are not the same")
    p.run("rm -r /mnt/etc && umount /mnt && fsck.ext4 -fn %s" % disk, 60)
    c.messages += len(there.splitlines())


def use(c, p, e, disk):
    """What an application does with a block device, compared at the other end."""
    bytes_there = int(p.run("blockdev --getsize64 " + disk))
    want(bytes_there == SIZE, "%s has %d bytes", disk, bytes_there)
    file_system(c, p, disk)
    p.fio(VERIFY % (disk, 8))
    here = p.run("blockdev --flushbufs {0}; md5sum < {0}".format(disk)).split()[0]
    want(here == e.md5(), "the disk reads as something else than what is stored")


@scenario("rnbd-ublk", rows="NB-47 NB-48", dirs=("k>n", "n>k"), timeout=300, **COMMON)
def rnbd_ublk(c):
    """bowline in a guest maps a disk as /dev/ublkbN: of bowline on the host (kernel > node), of the kernel of
    another guest (node > kernel). File system, tree of files, fsck, verified fio; nothing is left behind."""
    guests = (P,) if c.dir == "k>n" else (P, Q)
    with Machines(c, *guests) as all_of, Export(c, *all_of[1:]) as e:
        p = all_of[0]
        p.run("modprobe ublk_drv")
        for turn in range(2):
            m = map_disk(c, p, e, "--ublk", ready="ublk ")
            disk = m.ready.split("ublk ")[1].split()[0]
            if not turn:
                use(c, p, e, disk)
            else:
                # mapped again under the same name: what was there is there
                want(p.run("md5sum < " + disk).split()[0] == e.md5(), "mapped again, it has something else")
            m.end()
            p.no_leftovers()


# longest request in seconds, on a busy machine with emulated processors too: a disk may be lost no longer by default
LONGEST = 30
TURNS = 2
# the load, in seconds
LONG = 30


@scenario("rnbd-ublk-resumes", rows="NB-70 NB-75 RT-92", dirs=("k>n", "n>k"), timeout=300, **COMMON)
def rnbd_ublk_resumes(c):
    """/dev/ublkbN under a verified load while bowline is killed and started again, twice, and then replaced by another
    process, twice, between which a third one takes the device over and cannot serve: the device stays, no request fails, and all
    bytes are compared at the other end."""
    guests = (P,) if c.dir == "k>n" else (P, Q)
    with Machines(c, *guests) as all_of, Export(c, *all_of[1:]) as e:
        p = all_of[0]
        p.run("modprobe ublk_drv")

        words = ("rnbd", "map", e.device, "--from", "s1", "--path", "%s@%s" % (p.address, e.address), "--ublk")

        def mapped(*more):
            return p.bowline(*words, *more, ready="ublk ")

        m = mapped()
        disk = m.ready.split("ublk ")[1].split()[0]

        def longest(change):
            """The longest request of a load during which processes change, in seconds."""
            nonlocal m
            load = Load(lambda: p.fio(VERIFY % (disk, LONG if change else 5)))
            time.sleep(1)
            for _ in range(TURNS if change else 0):
                m = change(m)
                want(m.ready.split("ublk ")[1].split()[0] == disk, "the disk is another device: %s", m.ready)
                time.sleep(1)
            load.goes_on()
            return max(job[kind]["clat_ns"]["max"] for job in load.end() for kind in ("read", "write")) / 1e9

        def killed(former):
            former.kill()
            later = mapped()
            former.ends("137")
            return later

        def replaced(former):
            later = mapped("--replace")
            former.ends("0")
            # There is no such address here.
            said = p.run("! %s %s --replace --metrics 192.0.2.1:9 2>&1" % (p.program, " ".join(words)))
            want("192.0.2.1" in said, "it failed so: %s", said)
            for _ in range(SOON * 4):
                if "this one does" in later.said():
                    return later
                time.sleep(0.25)
            want(False, "the former process does not go on: %s", later.said())

        calm, gaps = longest(None), (longest(killed), longest(replaced))
        c.note("longest request: %.2f s, over a kill %.2f s, over a change of processes %.2f s" % (calm, *gaps))
        want(max(gaps) < LONGEST, "a request took %.2f s", max(gaps))
        here = p.run("blockdev --flushbufs {0}; md5sum < {0}".format(disk)).split()[0]
        want(here == e.md5(), "the disk reads as something else than what is stored")
        m.end()
        p.no_leftovers()
        want(not p.run("ls /run/bowline/rnbd"), "files are left in the folder of control sockets")


SOCKET = "/tmp/map.sock"
# past the page cache until it fails, and through it with nobody who waits; somebody has the device open and does nothing
WRITERS = ("rm -f /tmp/dd.* /tmp/unmap.*; (while dd if=/dev/zero of={0} bs=64k count=64 oflag=direct conv=notrunc,nocreat "
           "2> /tmp/dd.err; do :; done; echo > /tmp/dd.end) > /dev/null 2>&1 & sleep 300 < {0} > /dev/null 2>&1 & "
           "echo $! > /tmp/idle.pid; sleep 1; dd if=/dev/zero of={0} bs=1M count=4 seek=8 conv=notrunc,nocreat 2> /dev/null")


def soon(c, what, work):
    """Does something that must not take long."""
    begin = time.monotonic()
    work()
    took = time.monotonic() - begin
    c.note("%s %.1f s" % (what, took))
    want(took < SOON, "%s took %.1f s", what, took)


@scenario("rnbd-ublk-cut", rows="NB-37 NB-54", dirs=("k>n", "n>k"), timeout=300, **COMMON)
def rnbd_ublk_cut(c):
    """The link is cut for good while /dev/ublkbN is written to, whose requests may wait ten minutes. A forced unmap
    fails them with EIO and returns soon, though the device is open; so it does with those another unmap waits for; and
    that does not keep the process from ending. Nothing is left behind."""
    guests = (P,) if c.dir == "k>n" else (P, Q)
    with Machines(c, *guests) as all_of:
        p = all_of[0]
        p.run("modprobe ublk_drv")
        for turn in ("force", "force later", "end"):
            with Export(c, *all_of[1:]) as e:
                m = p.bowline("rnbd", "map", e.device, "--from", "s1", "--path", "%s@%s" % (p.address, e.address), "--stay",
                              "--ublk", "--outage", "600", "--control", SOCKET, ready="ublk ")
                unmap = "%s rnbd --control %s unmap rnbd0" % (p.program, SOCKET)
                p.run(WRITERS.format(m.ready.split("ublk ")[1].split()[0]))
                set_link(P, "drop")
                m.wait("rnbd0 offline", NOTICED)
                want(not p.run("cat /tmp/dd.end 2> /dev/null || true"), "the load failed before it had to")
                if turn == "force":
                    soon(c, "unmap by force", lambda: p.run(unmap + " force", 2 * SOON))
                else:
                    # that of who knows of no user waits for the writers
                    p.run("(%s > /dev/null 2>&1; echo $? > /tmp/unmap.rc) > /dev/null 2>&1 & sleep 2" % unmap)
                    want(not p.run("cat /tmp/unmap.rc 2> /dev/null || true"), "an unmap did not wait for the writers")
                if turn == "force later":
                    soon(c, "unmap that waited", lambda: p.run(
                        "%s force; [ $? = %d ] && until [ -e /tmp/unmap.rc ]; do sleep 0.1; done && grep -qx 0 /tmp/unmap.rc"
                        % (unmap, 256 - errno.EALREADY), 2 * SOON))
                if turn != "end":
                    # the process is there still
                    p.no_leftovers()
                # which says so when it had to fail requests
                soon(c, "end", lambda: m.end("1" if turn == "end" else "0"))
                p.run("kill $(cat /tmp/idle.pid)")
                p.no_leftovers()
                said = p.run("for i in $(seq 50); do [ -e /tmp/dd.end ] && break; sleep 0.1; done; cat /tmp/dd.end /tmp/dd.err")
                want("Input/output error" in said, "the load ended so: %s", said)
                set_link(P, "pass")


@scenario("ublk-tests", rows="NB-37 NB-52", dirs=("k>n",), timeout=300, **COMMON)
def ublk_tests(c):
    """The tests of the block device door, in a guest whose kernel has ublk, with the programs they use: none is skipped."""
    with Machines(c, P) as (p,):
        p.run("modprobe ublk_drv")
        run_tests(c, P, "block", "ublk")
        p.no_leftovers()


@scenario("rnbd-nbd-kernel", rows="NB-51 NB-53", dirs=("k>n", "n>k"), timeout=300, **COMMON)
def rnbd_nbd_kernel(c):
    """The guest's own nbd client (nbd-client and the nbd module) at the socket of bowline in the same guest;
    the disk is that of the host's bowline or of another kernel. The same load; it disconnects in good order."""
    guests = (P,) if c.dir == "k>n" else (P, Q)
    with Machines(c, *guests) as all_of, Export(c, *all_of[1:]) as e:
        p = all_of[0]
        p.run("modprobe nbd nbds_max=2")
        m = map_disk(c, p, e, "--nbd", "/tmp/disk.sock")
        for turn in range(2):
            p.run("nbd-client -unix /tmp/disk.sock /dev/nbd0")
            if not turn:
                use(c, p, e, "/dev/nbd0")
            else:
                want(p.run("md5sum < /dev/nbd0").split()[0] == e.md5(), "attached again, it has something else")
            p.run("nbd-client -d /dev/nbd0; for i in $(seq 30); do [ -e /sys/block/nbd0/pid ] || exit 0; sleep 0.1; done; "
                  "exit 1")
        m.end()
        p.run("[ ! -e /tmp/disk.sock ] && rmmod nbd")


def whole(c, invalidate):
    """bowline in a guest maps a disk of another kernel, which has a cache, over as many paths as the case has; use, loss
    of paths, unmapping, mapping again."""
    with Machines(c, P, Q) as (p, q):
        q.modules(*(SERVER if invalidate else TRUSTING))
        device = q.file(SIZE)
        routes = [x for pair in list(zip(p.addresses, q.addresses))[:c.paths] for x in ("--path", "%s@%s" % pair)]
        p.run("modprobe ublk_drv")

        def mapped():
            # one path has to be waited for; of two, one is always there
            m = p.bowline("rnbd", "map", device, "--from", "s1", *routes, "--ublk", "--control", CONTROL,
                          *(("--outage", "fail") if c.paths > 1 else ()), ready="ublk ")
            return m, m.ready.split("ublk ")[1].split()[0]

        m, disk = mapped()
        file_system(c, p, disk)
        flushes = [q.flushes()]
        for words in (VERIFY % (disk, 8), DURABLE % (disk, 4)):
            p.fio(words)
            flushes.append(q.flushes())
        want(0 < flushes[0] < flushes[1] < flushes[2], "the kernel's disk has flushed %s times", flushes)
        paths = Paths(lambda *order: p.run(" ".join((p.program, "rnbd", "--control", CONTROL) + order)),
                      p.addresses[:c.paths], q.addresses[:c.paths])
        load = Load(lambda: p.fio(VERIFY % (disk, CUTS[c.paths])))
        c.note(paths.lose_each(q.wire, load))
        load.end()
        paths.until(*[UP] * c.paths)
        same(p, q, disk)
        m.end()
        p.no_leftovers()
        m, disk = mapped()
        same(p, q, disk)
        m.end()
        p.no_leftovers()


def same(p, q, disk):
    """The disk reads as what is stored at the other end."""
    here = p.run("blockdev --flushbufs {0}; md5sum < {0}".format(disk)).split()[0]
    want(here == q.file_md5(), "%s reads as something else than what is stored", disk)


@scenario("rnbd-whole", rows="RT-82 RT-84 RT-91 RS-8 NB-12 NB-13 NB-47 NB-48", dirs=("n>k",), paths=(1, 2), timeout=300,
          **COMMON)
def rnbd_whole(c):
    """What a disk of the kernel is for, with bowline in a guest and /dev/ublkbN, over one path and over two: a file system
    with a tree of files, fsck, blocks of all sizes with flushes, durable writes, each wire cut under load with no request
    that fails; all bytes are compared at the other end, and again when it is mapped again."""
    whole(c, True)


@scenario("rnbd-whole-trust", rows="RT-79 RT-82 RT-84 RT-91 RS-8 NB-12 NB-13 NB-47 NB-48", dirs=("n>k",), paths=(1, 2),
          timeout=300, **COMMON)
def rnbd_whole_trust(c):
    """The same without refreshed keys; kernel to node is in rnbd-fs, rnbd-cut and rnbd-trust."""
    whole(c, False)


# writes of 4 KiB past the page cache, each sent when the one before is answered
WRITE = "dd if=/dev/zero of=%s bs=4k count={0} conv=notrunc,nocreat%s oflag=direct%s 2> /dev/null"
WRITES = 50


@scenario("rnbd-durable", rows="NB-12 NB-13 NB-47", dirs=("k>n",), timeout=300, **COMMON)
def rnbd_durable(c):
    """The kernel of a guest writes to a disk with a cache that bowline exports in another guest, past the page cache there
    and through it. The disk flushes for each flush and each durable write before it is answered, by FUA alone too, and for
    no other."""
    with Machines(c, P, Q) as (p, q):
        q.modules(*CLIENT)
        for words in ((), ("--buffered",)):
            m = p.bowline("rnbd", "export", "--file", "disk0=" + p.file(SIZE), *words, "--address", p.address, "--no-control",
                          ready="export disk0")
            name = q.map(p.address, "disk0")
            disk, write = "/dev/" + name, WRITE.format(WRITES)

            def flushes(script):
                """-> flushes that the script sends, and those of the disk"""
                sent, done = q.flushes(name), p.flushes()
                q.run(script)
                c.messages += WRITES
                return q.flushes(name) - sent, p.flushes() - done

            plain = flushes(write % (disk, "", ""))
            synced = flushes(write % (disk, ",fsync", ""))
            durable = flushes(write % (disk, "", ",dsync"))
            # in a file that is there the kernel writes so with FUA and sends no flush
            q.run("mkfs.ext4 -q -F {0} && mount {0} /mnt && dd if=/dev/zero of=/mnt/x bs=4k count={1} conv=fsync 2> /dev/null && "
                  "sync".format(disk, WRITES))
            fua = flushes(write % ("/mnt/x", "", ",dsync"))
            q.run("umount /mnt")
            c.note("%s: flushes sent and done: plain %s, fsync %s, dsync %s, FUA %s" % (
                " ".join(words) or "direct", plain, synced, durable, fua))
            want(plain == (0, 0), "writes that need not be durable: %s flushes", plain)
            want(0 < synced[0] <= synced[1] < WRITES, "writes and an fsync: %s flushes", synced)
            want(durable[1] >= WRITES, "%d durable writes: %s flushes", WRITES, durable)
            want(fua[0] < WRITES <= fua[1], "%d writes with FUA: %s flushes", WRITES, fua)
            q.unmap(name)
            m.end()
        p.no_leftovers()
        q.no_leftovers()


@scenario("rtrs-rdmacore", rows="RT-22 RT-79", dirs=("k>n", "n>k"), timeout=300, **COMMON)
def rtrs_rdmacore(c):
    """bowline in a guest on rxe0, through libibverbs and librdmacm, and a kernel in another guest: bowline serves
    (kernel > node), or maps (node > kernel). Blocks are written, read and compared, verified load."""
    with Machines(c, P, Q) as (p, q):
        p.modules(device=True)
        if c.dir == "k>n":
            q.modules(*CLIENT)
            p.run("truncate -s %d /tmp/disk" % SIZE)
            m = p.bowline("rnbd", "export", "--file", "disk0=/tmp/disk", "--buffered", "--address", p.address, "--device",
                          "rxe0", "--no-control", ready="export disk0")
            disk = "/dev/" + q.map(p.address, "disk0")
            for bs in ("4k", "64k", "1M"):
                sums = q.run("dd if=/dev/urandom of=/tmp/x bs=1M count=2 2> /dev/null; dd if=/tmp/x of={0} bs={1} oflag=direct "
                             "2> /dev/null; dd if={0} bs={1} count=2M iflag=direct,count_bytes 2> /dev/null | md5sum; "
                             "md5sum < /tmp/x".format(disk, bs)).split()
                want(sums[0] == sums[2], "blocks of %s: read %s, written %s", bs, sums[0], sums[2])
                want(p.run("head -c 2M /tmp/disk | md5sum").split()[0] == sums[0], "blocks of %s: the file has other data", bs)
                c.messages += 1
            q.fio(VERIFY % (disk, 8))
            q.unmap(os.path.basename(disk))
            m.end()
        else:
            q.modules(*SERVER)
            device = q.memory(SIZE)
            p.run("modprobe ublk_drv")
            m = p.bowline("rnbd", "map", device, "--from", "s1", "--path", "%s@%s" % (p.address, q.address), "--device", "rxe0",
                          "--ublk", "--no-control", ready="ublk ")
            disk = m.ready.split("ublk ")[1].split()[0]
            for bs in ("4k", "64k", "1M"):
                sums = p.run("dd if=/dev/urandom of=/tmp/x bs=1M count=2 2> /dev/null; dd if=/tmp/x of={0} bs={1} oflag=direct "
                             "2> /dev/null; dd if={0} bs={1} count=2M iflag=direct,count_bytes 2> /dev/null | md5sum; "
                             "md5sum < /tmp/x".format(disk, bs)).split()
                want(sums[0] == sums[2], "blocks of %s: read %s, written %s", bs, sums[0], sums[2])
                want(q.memory_md5("2M") == sums[0], "blocks of %s: the disk has other data", bs)
                c.messages += 1
            p.fio(VERIFY % (disk, 8))
            m.end()
        p.no_leftovers()
        q.no_leftovers()
