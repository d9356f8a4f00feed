"""The kernel's rxe and rnbd on a bad network, with two kernels beside it: bowline is not slower, and nothing fails that two
kernels do."""
import json
import statistics
import time

from lab.agent import guest_run
from lab.guest import alive, down

from .base import MIB, Wrong, scenario, want
from .disks import CLIENT, P, Q, SERVER, V, Machines
from .place import install
from .roce import NO_SELF_CHECK, background, waiting

# What the network does, in both directions. It is made in the guest of a kernel, which sends and receives single packets: a
# queue of the system takes a burst of bowline's for one packet.
BAD = {
    "1 % loss": "loss 1%",
    "3 % reordered": "delay 1ms reorder 3%",
    "20 ms": "delay 10ms limit 20000",
    "50 Mb/s": "rate 50mbit",
}
# of the ratio to two kernels in the same run: single figures on emulated processors differ by tens of percent
FLOOR = 0.8
A, B, PORT = "10.99.0.11", "10.99.0.12", 7174
# operation, mode, bytes, iterations, depth
JOBS = (("write", "bw", 65536, 30, 8), ("read", "bw", 65536, 30, 8), ("send", "bw", 4096, 100, 32), ("send", "lat", 64, 30, 1))
ROUNDS = 1


def spoil(guest, how):
    """Both directions of eth0 of a guest."""
    clear(guest)
    rc, out, err = guest_run(guest, "modprobe -a sch_netem sch_ingress cls_matchall act_mirred ifb && ip link set ifb0 up && "
                             "tc qdisc add dev eth0 root netem {0} && tc qdisc add dev ifb0 root netem {0} && "
                             "tc qdisc add dev eth0 clsact && tc filter add dev eth0 ingress matchall action mirred egress "
                             "redirect dev ifb0".format(how))
    want(rc == 0, "netem %s: %s%s", how, out, err)


def clear(guest):
    guest_run(guest, "for d in eth0 ifb0; do tc qdisc del dev $d root; done; tc qdisc del dev eth0 clsact")


class End:
    """One of two guests with the protocol of bowline perf, over rxe or by bowline."""

    def __init__(self, guest, address, program=None):
        self.guest, self.address, self.program = guest, address, program

    def device(self, on):
        """The kernel's device; without it the port is bowline's."""
        rc, out, err = guest_run(self.guest, "rdma link del rxe0; rmmod rdma_rxe" if not on else
                                 "modprobe -a ib_uverbs rdma_ucm rdma_cm rdma_rxe && rdma link add rxe0 type rxe netdev eth0")
        want(rc == 0 or not on, "rxe of guest %s: %s%s", self.guest, out, err)

    def serve(self):
        """Starts a server for all jobs."""
        guest_run(self.guest, "rm -f /tmp/served")
        if self.program:
            background(self.guest, "%s perf --server --persistent --address %s --verify" % (self.program, self.address),
                       "/tmp/served")
            ready = "grep -q listening /tmp/served"
        else:
            background(self.guest, "python3 -B /lab/roce-perf.py server %s %d %d" % (self.address, PORT, len(JOBS)), "/tmp/served")
            ready = "rdma resource show cm_id | grep -q LISTEN"
        waiting(self.guest, "for i in 1 2 3 4 5 6 7 8; do %s && exit; sleep 0.3; done; false" % ready)

    def measure(self, peer):
        """All jobs as client. -> operations a second of those that did not fail, and what was said where one did"""
        peer.serve()
        rates, said = [], ""
        if self.program:
            for op, mode, size, count, depth in JOBS:
                rc, out, err = guest_run(
                    self.guest, "timeout 40 %s perf --client %s --address %s --op %s --mode %s --size %d --count %d --depth %d "
                    "--verify --json" % (self.program, peer.address, self.address, op, mode, size, count, depth), 50)
                if rc:
                    said = "status %d: %s%s" % (rc, out, err)
                    break
                r = json.loads(out.splitlines()[-1])
                rates.append(count / (r.get("seconds") or count * r["round_trip_usec"]["median"] / 1e6))
        else:
            rc, out, err = guest_run(self.guest, "timeout 100 python3 -B /lab/roce-perf.py client %s %s %d %s" % (
                self.address, peer.address, PORT, " ".join(",".join(map(str, job)) for job in JOBS)), 110)
            for r in (json.loads(x) for x in out.splitlines() if x.startswith("{")):
                if "error" not in r:
                    rates.append(r["iterations"] / r["seconds"])
            said = "status %d: %s%s" % (rc, out, err) if rc else ""
        served = guest_run(peer.guest, "cat /tmp/served; pkill -f '[r]oce-perf|[b]owline perf'")[1]
        want("differ" not in served + said, "wrong data: %s%s", served[-300:], said[-300:])
        return rates, said and (said + served)[-400:]


def judge(c, got, slower, excused=lambda bad, form: False, unfailing=()):
    """Notes the ratios of bowline to the kernel, of neighbours in time. Jobs of an excused form may fail; those of an unfailing
    one may not, even where two kernels fail."""
    for (bad, job), forms in got.items():
        for form in forms:
            if form.startswith("kernel"):
                continue
            theirs = forms["kernel" + form[form.index(" "):]]
            failed = [sum(rate is None for rate in rates) for rates in (forms[form], theirs)]
            pairs = [ours / rate for ours, rate in zip(forms[form], theirs) if ours and rate]
            ratio = statistics.median(pairs) if pairs else None
            c.note("%s, %s, %s: %s%s" % (bad, job, form, "-" if ratio is None else "%.2f" % ratio,
                                        ", %d failed, of two kernels %d" % tuple(failed) if any(failed) else ""))
            if form in unfailing and failed[0]:
                slower.append(c.notes[-1])
            elif excused(bad, form):
                c.notes[-1] += " (rxe ends queue pairs that send again [RT-82])" if any(failed) else ""
            elif failed[0] > failed[1] or (ratio is not None and ratio < FLOOR):
                slower.append(c.notes[-1])


@scenario("netem-verbs", orders=("lo",), timeout=1200, bare=True, tool=True, self_check=NO_SELF_CHECK)
def netem_verbs(c):
    """Writes, reads, sends and round trips between the kernels of two guests, and between a kernel and bowline in the second
    one, in both roles, while the network loses 1 %, reorders 3 %, delays by 20 ms, or carries 50 Mb/s."""
    if not alive("b"):
        c.w.boot("b")
    try:
        program = install(c, c.w.bowline(), "/tmp/bowline", ("b",), "man /tmp/pages")
        here, theirs, ours = End("a", A), End("b", B), End("b", B, program)
        here.device(True)
        got, errors = {}, []
        for _ in range(ROUNDS):
            for bad, how in BAD.items():
                spoil("a", how)
                for word, there in (("kernel", theirs), ("bowline", ours)):
                    there.device(word == "kernel")
                    for role, (asks, serves) in (("serves", (here, there)), ("asks", (there, here))):
                        rates, error = asks.measure(serves)
                        for at, job in enumerate(JOBS):
                            forms = got.setdefault((bad, "%s %s %d" % job[:3]), {})
                            forms.setdefault("%s %s" % (word, role), []).append(rates[at] if at < len(rates) else None)
                        c.messages += sum(job[3] for job, _ in zip(JOBS, rates))
                        if error:
                            errors.append("%s, %s %s: %s" % (bad, word, role, error))
                        # what there is, should the case not come to its end
                        c.save("rounds", {"%s, %s" % key: forms for key, forms in got.items()})
                        c.save("errors", errors)
                clear("a")
        slower = []
        judge(c, got, slower)
        want(not slower, "worse than two kernels: %s", "; ".join(slower))
    finally:
        clear("a")
        guest_run("a", "rdma link del rxe0; rmmod rdma_rxe ifb")
        down(["b"])


SIZE = 32 * MIB
SECONDS = 4
# Here packets are sent again, so rxe ends loaded queue pairs of a kernel [RT-82]. A kernel's client fails the requests then; bowline's
# sends them again on the next connection.
ENDS = ("1 % loss", "3 % reordered")
# A kernel's client connects again 31 s after it lost its path. Until then its disk fails everything, which says nothing of the next job.
BACK = 60
DISK_JOBS = (("4 KiB random write", "randwrite", "4k", 32), ("4 KiB random read", "randread", "4k", 32),
             ("64 KiB write", "write", "64k", 16), ("64 KiB read", "read", "64k", 16))


def load(machine, disk, job):
    """-> requests a second; None: some failed"""
    _, how, size, depth = job
    try:
        done = machine.fio("--name=j --filename=%s --size=%d --direct=1 --ioengine=libaio --time_based --runtime=%d "
                           "--rw=%s --bs=%s --iodepth=%d" % (disk, SIZE, SECONDS, how, size, depth))[0]
    except Wrong as error:
        return None, str(error)[-300:]
    return done["read"]["iops"] + done["write"]["iops"], None


def back(machine, disk):
    """Waits until a disk has its path again."""
    end = time.monotonic() + BACK
    read = "timeout %d dd if=/dev/%s of=/dev/null bs=4k count=1 iflag=direct" % (BACK, disk)
    while guest_run(machine.name, read, BACK + 10)[0]:
        want(time.monotonic() < end, "disk %s of guest %s is not back on a sound network after %d s", disk, machine.name, BACK)
        time.sleep(0.5)


@scenario("netem-rnbd", orders=("lo",), timeout=1500, bare=True, tool=True, self_check=NO_SELF_CHECK)
def netem_rnbd(c):
    """A kernel's client maps disks of memory of a kernel and of bowline; a kernel and bowline map that of a kernel. The
    network of the one loses 1 %, reorders 3 %, delays by 20 ms, or carries 50 Mb/s. bowline's client fails nothing."""
    try:
        with Machines(c, P, Q, V) as (p, q, v):
            got, errors = {}, []
            for role in ("serves", "asks"):
                v.modules()
                v.run("modprobe ublk_drv")
                if role == "serves":
                    p.modules(*CLIENT)
                    q.modules(*SERVER)
                    q.memory(SIZE)
                    export = v.bowline("rnbd", "export", "--memory", "disk1=%d" % SIZE, "--address", v.address,
                                       "--no-control", ready="export disk1")
                    disks = {"kernel": (p, p.map(q.address, "/dev/ram0", "s1")), "bowline": (p, p.map(v.address, "disk1", "s2"))}
                else:
                    p.modules(*SERVER)
                    p.memory(SIZE)
                    q.modules(*CLIENT)
                    v.run("ping -c 1 -W 5 " + p.address)
                    # The server has both writers only if each of them asks for this mode: the first to come back would keep out one that asks
                    # for rw [NB-19].
                    mapped = v.bowline("rnbd", "map", "/dev/ram0", "--from", "s3", "--path", "%s@%s" % (v.address, p.address),
                                       "--access", "migration", "--ublk", "--no-control", ready="ublk")
                    disks = {"kernel": (q, q.map(p.address, "/dev/ram0", "s4", "migration")), "bowline": (v, "ublkb0")}
                for bad, how in BAD.items():
                    spoil(P, how)
                    for job in DISK_JOBS:
                        for word, (machine, disk) in disks.items():
                            rate, error = load(machine, "/dev/" + disk, job)
                            got.setdefault((bad, job[0]), {}).setdefault("%s %s" % (word, role), []).append(rate)
                            if error:
                                errors.append("%s, %s, %s %s: %s" % (bad, job[0], word, role, error))
                        # what there is, should the case not come to its end
                        c.save("rounds", {"%s, %s" % key: forms for key, forms in got.items()})
                        c.save("errors", errors)
                    clear(P)
                    for machine, disk in disks.values():
                        back(machine, disk)
                if role == "serves":
                    for machine, disk in disks.values():
                        machine.unmap(disk)
                    export.end()
                else:
                    q.unmap(disks["kernel"][1])
                    mapped.end()
            slower = []
            judge(c, got, slower, lambda bad, form: bad in ENDS and form == "bowline serves", ("bowline asks",))
            want(not slower, "worse than two kernels: %s", "; ".join(slower))
    finally:
        down([P, Q, V])
