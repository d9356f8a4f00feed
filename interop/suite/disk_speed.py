"""The kernel's rnbd over rxe and bowline's in guests of the same kind, under the same load."""
import os
import statistics

from lab.guest import alive, down

from .base import MIB, scenario, want
from .disks import CLIENT, P, Q, SERVER, U, V, Machines
from .roce import NO_SELF_CHECK

SIZE = 32 * MIB
SECONDS = 2
# what the median of neighbours in time may fall short of the kernel's: guests without KVM on a machine that
# has other work
TOLERANCE = 0.95
JOBS = (("4 KiB random read", "randread", "4k", 32), ("4 KiB random write", "randwrite", "4k", 32),
        ("64 KiB read", "read", "64k", 16), ("64 KiB write", "write", "64k", 16),
        ("128 KiB read", "read", "128k", 16), ("128 KiB write", "write", "128k", 16))
SOFT, RXE = "soft", "rxe0"
# what is judged takes more: single rounds differ by tens of percent
ROUNDS = {SOFT: 12, RXE: 3}
KERNEL, SERVES, BOTH = "kernel to kernel", "kernel to bowline", "bowline to bowline"


def load(machine, disk, job):
    """-> requests a second"""
    _, how, size, depth = job
    done = machine.fio("--name=j --filename=%s --size=%d --direct=1 --ioengine=libaio --time_based --runtime=%d "
                       "--rw=%s --bs=%s --iodepth=%d" % (disk, SIZE, SECONDS, how, size, depth))[0]
    return done["read"]["iops"] + done["write"]["iops"]


def ticks(names):
    """Time that the processors of these guests have used, in seconds."""
    total = 0
    for name in names:
        with open("/proc/%d/stat" % alive(name)) as f:
            total += sum(int(x) for x in f.read().rsplit(")", 1)[1].split()[11:13])
    return total / os.sysconf("SC_CLK_TCK")


def pass_bursts(machine):
    """Has the card take bursts of UDP whole, if it can. -> whether it does"""
    machine.run("ethtool -K eth0 tx-udp-segmentation on 2> /dev/null; true")
    return "tx-udp-segmentation: on" in machine.run("ethtool -k eth0")


def compare(c, p, q, u, v, device):
    """Rounds of all jobs, with bowline on one of its devices. -> job -> form -> quartiles of the ratios to the kernel's
    rate"""
    for machine in (u, v):
        machine.modules(device=device != SOFT)
    export = v.bowline("rnbd", "export", "--memory", "disk1=%d" % SIZE, "--memory", "disk2=%d" % SIZE, "--address", v.address,
                       "--device", device, "--no-control", ready="export disk2")
    u.run("modprobe ublk_drv")
    mapped = u.bowline("rnbd", "map", "disk2", "--from", "s3", "--path", "%s@%s" % (u.address, v.address), "--device",
                       device, "--ublk", "--no-control", ready="ublk")
    disks = {KERNEL: (p, p.map(q.address, "/dev/ram0", "s1"), (P, Q)), SERVES: (p, p.map(v.address, "disk1", "s2"), (P, V)),
             BOTH: (u, "ublkb0", (U, V))}
    for machine, disk, _ in disks.values():
        # what was never written may be read without being read
        machine.run("dd if=/dev/urandom of=/dev/%s bs=1M count=%d oflag=direct 2> /dev/null" % (disk, SIZE // MIB))
    got, used = {}, {}
    for turn in range(ROUNDS[device]):
        for job in JOBS:
            # every second round the other way round: whoever comes first is not favoured
            for form, (machine, disk, busy) in list(disks.items())[::1 - turn % 2 * 2]:
                before = ticks(busy)
                rate = load(machine, "/dev/" + disk, job)
                got.setdefault(job[0], {}).setdefault(form, []).append(rate)
                used.setdefault(job[0], {}).setdefault(form, []).append((ticks(busy) - before) / rate / SECONDS)
    c.save("rounds-" + device, dict(rates=got, processor_seconds=used))
    for form in (KERNEL, SERVES):
        p.unmap(disks[form][1])
    mapped.end()
    export.end()
    # neighbours in time are compared: the load of the host changes
    return {what: {form: statistics.quantiles([n / k for n, k in zip(forms[form], forms[KERNEL])], method="inclusive")
                   for form in (SERVES, BOTH)} for what, forms in got.items()}


@scenario("rnbd-speed", orders=("lo",), timeout=1500, bare=True, tool=True, self_check=NO_SELF_CHECK)
def rnbd_speed(c):
    """The same fio on a disk of memory in another guest, in turn: kernel to kernel over rxe, kernel to
    bowline, bowline (ublk) to bowline, each with bowline on its soft device and on rxe0. Two bowlines on the soft
    device are not slower than two kernels; the others are noted."""
    try:
        with Machines(c, P, Q, U, V) as (p, q, u, v):
            whole = [pass_bursts(machine) for machine in (p, q, u, v)]
            c.note("cards %s bursts of UDP" % ("pass" if all(whole) else "cut"))
            q.modules(*SERVER)
            q.memory(SIZE)
            p.modules(*CLIENT)
            ratios = {device: compare(c, p, q, u, v, device) for device in (SOFT, RXE)}
        for what, *_ in JOBS:
            for form in (SERVES, BOTH):
                each = ["%.2f (%.2f - %.2f) on %s" % (half, low, high, device) for device, jobs in ratios.items()
                        for low, half, high in [jobs[what][form]]]
                c.note("%s, %s: %s" % (what, form, ", ".join(each)))
        slower = [what for what, *_ in JOBS if ratios[SOFT][what][BOTH][1] < TOLERANCE]
        want(not slower, "two bowlines are slower than two kernels: %s; %s", "; ".join(slower), "; ".join(c.notes))
    finally:
        down([U, V])
