"""bowline's disks inside guests, with the kernel's rtrs and rnbd in the same guests and between them."""
import itertools
import json
import time

from lab.agent import guest_exec, guest_run
from lab.common import Fail
from lab.guest import alive, down, set_link

from .base import want
from .place import install

# guests of their own: p has the side under test, q its peer; u and v are there for the comparison of speeds
P, Q, U, V = "p", "q", "u", "v"
AT = {P: "10.99.0.26", Q: "10.99.0.27", U: "10.99.0.31", V: "10.99.0.32"}
BOOT = ("--mode", "rnbd-client,rnbd-server", "--nics", "2", "--mem", "1024")
PROGRAM = "/tmp/bowline"
CTL = "/sys/class/rnbd-client/ctl/map_device"
CLIENT, SERVER = ("rtrs-client", "rnbd-client"), ("rtrs-server", "rnbd-server")
# with chunks whose keys stay as they are
TRUSTING = ("rtrs-server always_invalidate=N", "rnbd-server")
MODULES = "rnbd_client rtrs_client rnbd_server rtrs_server rtrs_core"
# addresses may be asked for here, where the kernel's connecting does not wait for the answer
NEIGHBOUR = "ping -c 1 -W 5 "


class Machine:
    """One of the two guests for the length of a case."""

    def __init__(self, c, name):
        self.c, self.name, self.address = c, name, AT[name]
        # on both wires
        self.addresses = (self.address, self.address.replace("10.99.0.", "10.99.1."))
        self.commands, self.program = [], None
        if not alive(name):
            c.w.boot(name, how=BOOT)
        self.heal()
        self.run("dmesg -C")
        self.modules()

    def heal(self):
        for nic in (0, 1):
            self.wire(nic, "pass")

    def wire(self, nic, state):
        set_link(self.name, state, nic)

    def run(self, script, timeout=60):
        rc, out, err = guest_run(self.name, script, timeout)
        want(rc == 0, "in guest %s: %s: status %d: %s%s", self.name, script, rc, out[-400:], err[-400:])
        return out

    def modules(self, *names, device=False):
        """Only these of the kernel's modules, and rxe0 and rxe1 for them or without them."""
        self.run("rmmod %s 2> /dev/null; for n in 0 1; do rdma link del rxe$n 2> /dev/null; done; "
                 "rmmod rdma_rxe 2> /dev/null; true" % MODULES)
        if names or device:
            self.run("modprobe -a ib_uverbs rdma_ucm rdma_cm rdma_rxe && for n in 0 1; do "
                     "rdma link add rxe$n type rxe netdev eth$n || exit 1; done")
        for name in (("rtrs-core",) + names) if names else ():
            self.run("load-module.sh " + name)

    def memory(self, size):
        """The kernel's disk of memory, filled. -> its name"""
        self.run("rmmod brd 2> /dev/null; modprobe brd rd_nr=1 rd_size=%d && dd if=/dev/urandom of=/dev/ram0 bs=1M "
                 "count=%d 2> /dev/null" % (size >> 10, size >> 20))
        return "/dev/ram0"

    def file(self, size):
        """A disk of the kernel with a cache to flush: a file behind a loop device. -> its name"""
        self.run("modprobe loop; losetup -d /dev/loop5 2> /dev/null; rm -f /tmp/back; truncate -s %d /tmp/back && losetup "
                 "/dev/loop5 /tmp/back" % size)
        return "/dev/loop5"

    def file_md5(self):
        return self.run("md5sum < /tmp/back").split()[0]

    def flushes(self, disk="loop5"):
        """That a disk has done, those for durable writes among them if it has no FUA, as that of file()."""
        return int(self.run("cat /sys/block/%s/stat" % disk).split()[15])

    def memory_md5(self, count="1G"):
        """Of what is stored, not of what was read earlier."""
        return self.run("blockdev --flushbufs /dev/ram0; head -c %s /dev/ram0 | md5sum" % count).split()[0]

    def map(self, server, device, session="s1", access="rw"):
        """The kernel of this guest maps a disk. -> its name"""
        self.run(NEIGHBOUR + server)
        self.run('echo "sessname=%s path=ip:%s@ip:%s device_path=%s access_mode=%s" > %s' % (
            session, self.address, server, device, access, CTL))
        return self.run("basename $(readlink -f %s)" % CTL.replace(
            "map_device", "devices/%s@%s" % (device.replace("/", "!"), session))).strip()

    def unmap(self, disk):
        self.run("echo normal > /sys/block/%s/rnbd/unmap_device" % disk)

    def bowline(self, *words, ready, seconds=40):
        """bowline in the background. -> the command, its first line said"""
        if not self.program:
            self.program = install(self.c, self.c.w.bowline(), PROGRAM, (self.name,))
        command = Command(self, words)
        self.commands.append(command)
        return command.wait(ready, seconds)

    def fio(self, options, timeout=90):
        """-> fio's jobs as it reports them; none of their requests failed"""
        out = self.run("cd /tmp; fio --output-format=json " + options, timeout)
        jobs = json.loads(out[out.index("{"):])["jobs"]
        for job in jobs:
            done = job["read"]["total_ios"] + job["write"]["total_ios"]
            want(job["error"] == 0 and done > 0, "fio's %s: error %s, %d requests", job["jobname"], job["error"], done)
            self.c.messages += done
        return jobs

    def no_leftovers(self):
        """Nothing of RDMA and of block devices is left in the kernel."""
        for _ in range(40):
            out = guest_run(self.name, "rdma res show qp | grep -v 'type GSI'; ls /sys/class/rtrs-client "
                            "/sys/class/rtrs-server/ 2> /dev/null | grep -v : ; ls -d /sys/block/rnbd* /sys/block/ublk* "
                            "/dev/ublk[bc]* 2> /dev/null; cat /sys/block/nbd*/pid 2> /dev/null")[1]
            if not out.strip():
                return
            time.sleep(0.25)
        want(False, "guest %s still has: %s", self.name, out)

    def close(self, failed):
        if not alive(self.name):
            return
        self.heal()
        try:
            if not failed:
                for command in self.commands:
                    if command.running():
                        command.end()
                self.no_leftovers()
        except Exception:
            failed = True
            raise
        finally:
            out = guest_run(self.name, "dmesg", 60)[1]
            with open("%s.dmesg-%s" % (self.c.log, self.name), "w") as f:
                f.write(out)
            if failed:
                # what was killed may have left something to the next case
                down([self.name])
        if not failed:
            self.modules()
            self.run("losetup -d /dev/loop5 2> /dev/null; rm -f /tmp/back")
        want("BUG" not in out and "Call Trace" not in out, "the kernel of guest %s complains; see %s.dmesg-%s", self.name,
             self.c.log, self.name)


class Command:
    """bowline in the background of a guest."""

    # names of its files; an earlier case's, of the same guest, are not to be taken for its own
    numbers = itertools.count()

    def __init__(self, machine, words):
        self.m, self.words, self.ready = machine, " ".join(words), None
        self.log = "/tmp/bowline.%d" % next(self.numbers)
        script = "rm -f {0}.*; {1} {2} > {0}.out 2> {0}.err & echo $! > {0}.pid; wait $!; echo $? > {0}.rc".format(
            self.log, machine.program, self.words)
        guest_exec(machine.name, ["bash", "-c", script], 30, lambda b: None, lambda b: None, detach=True,
                   log=self.log + ".log")

    def wait(self, word, seconds):
        for _ in range(seconds * 4):
            # what follows the last newline is the beginning of a line
            lines = guest_run(self.m.name, "cat %s.out" % self.log)[1].split("\n")[:-1]
            self.ready = next((line for line in lines if word in line), None)
            if self.ready:
                return self
            if not self.running():
                break
            time.sleep(0.25)
        raise Fail("bowline %s in guest %s is not ready: %s" % (self.words, self.m.name, self.said()))

    def said(self):
        return guest_run(self.m.name, "cat %s.out %s.err" % (self.log, self.log))[1].strip()

    def running(self):
        return guest_run(self.m.name, "[ -e %s.rc ]" % self.log)[0] != 0

    def end(self, status="0"):
        """Asks it to end; it ends well, or so."""
        self.m.run("kill -INT $(cat %s.pid)" % self.log)
        self.ends(status)

    def kill(self):
        """It is gone as in an accident."""
        self.m.run("kill -KILL $(cat %s.pid)" % self.log)

    def ends(self, status):
        """It ends so, by itself or soon."""
        rc = self.m.run("for i in $(seq 100); do [ -e {0}.rc ] && break; sleep 0.1; done; cat {0}.rc".format(self.log))
        want(rc.strip() == status, "bowline %s in guest %s: status %s: %s", self.words, self.m.name, rc.strip(), self.said())


class Machines:
    """Some of the guests for the length of a case."""

    def __init__(self, c, *names):
        self.c, self.names, self.all = c, names, []

    def __enter__(self):
        for name in self.names:
            self.all.append(Machine(self.c, name))
        return self.all

    def __exit__(self, kind, error, trace):
        errors = []
        for m in self.all:
            try:
                m.close(kind is not None or errors)
            except Exception as e:
                errors.append(e)
        if errors and kind is None:
            raise errors[0]
