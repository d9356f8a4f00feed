#!/usr/bin/env python3
"""fio on the doors of a disk (NBD socket, file by FUSE, the same by io_uring), beside the same fio on nbdkit and qemu-nbd over TCP.

What people get who attach fio, a machine or a database to a mapped disk; `bowline bench rnbd` measures the library instead.
Everything runs on this machine: `rnbd export --memory`, `rnbd map`, nbdkit's memory, a file in /dev/shm for qemu-nbd. Each
round runs every door once, a cell after the other. Printed are medians: requests a second, latency, the ratio of the rate
and of the 99th percentile to nbdkit's in the same round, and the processors' time of each process a request. Needs fio with
its engine nbd, nbdkit, for --doors fuse root or fusermount3, for fuse-ring root and Linux 6.14, for qemu-nbd qemu-utils.
"""
import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time

CELLS = ["read:4k:1", "write:4k:1", "read:4k:32", "write:4k:32", "read:128k:16", "write:128k:16"]
EXPORT, NBDKIT, QEMU = "127.60.0.1", "127.60.0.3", "127.60.0.4"
MAP, MAP_FUSE, MAP_RING = "127.60.0.2", "127.60.0.5", "127.60.0.6"
# Tells the kernel's module to offer io_uring to who mounts.
RING = "/sys/module/fuse/parameters/enable_uring"
QEMU_FILE = "/dev/shm/bowline-bench-doors.img"
TICKS = os.sysconf("SC_CLK_TCK")


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bowline", default="target/release/bowline", help="the command [%(default)s]")
    parser.add_argument("--doors", default="nbd,fuse,qemu-nbd,nbdkit", help="which, nbdkit among them [%(default)s]")
    parser.add_argument("--cells", default=",".join(CELLS), help="OPERATION:SIZE:DEPTH of random requests [%(default)s]")
    parser.add_argument("--rounds", type=int, default=5, help="[%(default)s]")
    parser.add_argument("--seconds", type=float, default=2, help="of a run [%(default)s]")
    parser.add_argument("--clients", type=int, default=1, help="processes of fio at a time [%(default)s]")
    parser.add_argument("--busy", type=int, default=0, help="busy loops beside [%(default)s]")
    parser.add_argument("--size", default="1G", help="of the disk [%(default)s]")
    return parser.parse_args()


class Process:
    """A process that runs in the background, and the processors' time of it and its threads."""

    def __init__(self, folder, args, ready):
        self.log = open(os.path.join(folder, f"{os.path.basename(args[0])}-{args[1]}.log"), "w+")
        env = dict(os.environ, XDG_RUNTIME_DIR=folder)
        self.child = subprocess.Popen(args, stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log, env=env)
        end = time.monotonic() + 20
        while not ready():
            if self.child.poll() is not None or time.monotonic() > end:
                self.end()
                self.log.seek(0)
                sys.exit(f"{' '.join(args)} is not ready: {self.log.read()}")
            time.sleep(0.05)

    def microseconds(self):
        with open(f"/proc/{self.child.pid}/stat") as file:
            words = file.read().rpartition(")")[2].split()
        return (int(words[11]) + int(words[12])) * 1_000_000 / TICKS

    def end(self):
        self.child.send_signal(signal.SIGTERM)
        try:
            self.child.wait(15)
        except subprocess.TimeoutExpired:
            self.child.kill()


def listens(address, port):
    wanted = f"{int.from_bytes(bytes(map(int, address.split('.'))), 'little'):08X}:{port:04X}"
    with open("/proc/net/tcp") as file:
        return any(line.split()[1] == wanted and line.split()[3] == "0A" for line in file.readlines()[1:])


def start(options, doors, folder, running):
    """Starts what the doors need; returns for each door its processes and what fio has to be told."""

    def run(args, ready):
        running.append(Process(folder, args, ready))
        return running[-1]

    all_doors = {}
    if {"nbd", "fuse", "fuse-ring"} & set(doors):
        bowline = os.path.abspath(options.bowline)
        disks = [word for name in ("nbd", "fuse", "fuse-ring") if name in doors for word in ("--memory", f"{name}={options.size}")]
        export = run([bowline, "rnbd", "export", *disks, "--address", EXPORT], lambda: True)

        def mapped(address, name):
            mount, sock = os.path.join(folder, name), os.path.join(folder, f"{name}.sock")
            os.mkdir(mount)
            words = ["rnbd", "map", name, "--from", name, "--path", f"{address}@{EXPORT}", "--nbd", sock]
            words += ["--fuse", mount] if "fuse" in name else []
            process = run([bowline] + words, lambda: os.path.exists(sock) and ("fuse" not in name or os.listdir(mount)))
            file = os.path.join(mount, *os.listdir(mount))
            return [export, process], sock, [f"--filename={file}", "--ioengine=libaio", "--direct=1"]

        if "nbd" in doors:
            processes, sock, _ = mapped(MAP, "nbd")
            all_doors["nbd"] = (processes, ["--ioengine=nbd", f"--uri=nbd+unix:///?socket={sock}"])
        if "fuse" in doors:
            processes, _, where = mapped(MAP_FUSE, "fuse")
            all_doors["fuse"] = (processes, where)
        if "fuse-ring" in doors:
            with open(RING, "r+") as ring:
                before = ring.read()
                ring.write("Y")
                ring.flush()
                processes, _, where = mapped(MAP_RING, "fuse-ring")
                ring.write(before)
            all_doors["fuse-ring"] = (processes, where)
    if "nbdkit" in doors:
        args = ["nbdkit", "-f", "-i", NBDKIT, "-p", "10809", "memory", options.size]
        server = run(args, lambda: listens(NBDKIT, 10809))
        all_doors["nbdkit"] = ([server], ["--ioengine=nbd", f"--uri=nbd://{NBDKIT}:10809"])
    if "qemu-nbd" in doors:
        subprocess.run(["truncate", "-s", options.size, QEMU_FILE], check=True)
        args = ["qemu-nbd", "-t", "-f", "raw", "-b", QEMU, "-p", "10810", "-e", "16", QEMU_FILE]
        server = run(args, lambda: listens(QEMU, 10810))
        all_doors["qemu-nbd"] = ([server], ["--ioengine=nbd", f"--uri=nbd://{QEMU}:10810"])
    return all_doors


def fio(options, door, operation, size, depth, seconds):
    """One run; returns rate, latencies, and the processors' time of each process a request."""
    processes, where = door
    before = [process.microseconds() for process in processes]
    args = ["fio", "--name=door", f"--size={options.size}", f"--rw={operation}", f"--bs={size}", f"--iodepth={depth}"]
    args += [f"--runtime={seconds}", "--time_based", "--norandommap", "--output-format=json"]
    args += [f"--numjobs={options.clients}", "--group_reporting"] + where
    done = subprocess.run(args, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(done.stdout + done.stderr)
    job = json.loads(done.stdout[done.stdout.index("{"):])["jobs"][0]
    side = job["read" if "read" in operation else "write"]
    count, percentile = side["total_ios"], side["clat_ns"]["percentile"]
    own = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] * 1000
    spent = [process.microseconds() - earlier for process, earlier in zip(processes, before)] + [own]
    return {
        "rate": side["iops"],
        "p50": percentile["50.000000"] / 1000,
        "p99": percentile["99.000000"] / 1000,
        "spent": [microseconds / count for microseconds in spent],
    }


def report(cell, runs):
    for door, of_door in runs.items():
        def median(what):
            return statistics.median(map(what, of_door))

        line = f"{cell:14} {door:9} {median(lambda run: run['rate']):9.0f}/s"
        line += f"  p50 {median(lambda run: run['p50']):8.1f}  p99 {median(lambda run: run['p99']):8.1f} us"
        if "nbdkit" in runs:
            def ratio(what):
                return statistics.median(run[what] / other[what] for run, other in zip(of_door, runs["nbdkit"]))

            line += f"  of nbdkit {ratio('rate'):5.2f}, p99 {ratio('p99'):5.2f}"
        spent = [median(lambda run: run["spent"][at]) for at in range(len(of_door[0]["spent"]))]
        line += f"  processors {' + '.join(f'{one:.1f}' for one in spent)} = {sum(spent):.1f} us a request"
        print(line, flush=True)


def main():
    options = arguments()
    doors = options.doors.split(",")
    running, busy = [], []
    with tempfile.TemporaryDirectory(prefix="bowline-doors-") as folder:
        try:
            all_doors = start(options, doors, folder, running)
            # Memory that nobody has touched is another matter.
            for door in all_doors.values():
                fio(options, door, "write", "128k", 8, 2)
            busy = [subprocess.Popen(["sh", "-c", "while :; do :; done"]) for _ in range(options.busy)]
            for cell in options.cells.split(","):
                operation, size, depth = cell.split(":")
                runs = {door: [] for door in doors}
                for _ in range(options.rounds):
                    for door in doors:
                        runs[door].append(fio(options, all_doors[door], f"rand{operation}", size, depth, options.seconds))
                report(cell, runs)
        finally:
            for loop in busy:
                loop.kill()
            for process in reversed(running):
                process.end()
            if os.path.exists(QEMU_FILE):
                os.unlink(QEMU_FILE)


if __name__ == "__main__":
    main()
