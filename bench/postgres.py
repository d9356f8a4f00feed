#!/usr/bin/env python3
"""PostgreSQL on ext4 on the file of a disk, through bowline and through nbdkit with nbdfuse: transactions of pgbench.

Everything runs on this machine: `rnbd export --memory` and `rnbd map --fuse`; nbdkit's memory over TCP and nbdfuse. Each
file has a loop device, ext4 and a database of its own, and all are there from the beginning to the end. Each round runs
pgbench (TPC-B) on one after the other, with each number of clients. Printed are medians and the ratio to nbdfuse in the
same round. At the end the sums of all accounts, tellers, branches and of the history must be equal, also after the database
was stopped at once (as by a loss of power) and started again; if they are not, the exit status is 1.

As given it takes an hour. Needs root, loop devices, postgresql, postgresql-contrib's pgbench, nbdkit, nbdfuse (libnbd-bin),
e2fsprogs.
"""
import argparse
import contextlib
import glob
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time

EXPORT, MAP, NBDKIT = "127.61.0.1", "127.61.0.2", "127.61.0.3"
PORTS = {"bowline": 54871, "nbdfuse": 54872}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bowline", default="target/release/bowline", help="the command [%(default)s]")
    parser.add_argument("--rounds", type=int, default=7, help="[%(default)s]")
    parser.add_argument("--seconds", type=int, default=120, help="of a run of pgbench [%(default)s]")
    parser.add_argument("--clients", default="1,4", help="numbers of clients [%(default)s]")
    parser.add_argument("--scale", type=int, default=10, help="of pgbench, about 15 MB each [%(default)s]")
    parser.add_argument("--size", default="2G", help="of each disk [%(default)s]")
    return parser.parse_args()


def call(*args, **more):
    done = subprocess.run(args, capture_output=True, text=True, **more)
    if done.returncode != 0:
        sys.exit(f"{' '.join(args)}: {done.stdout}{done.stderr}")
    return done.stdout


def wait(what, ready, child=None):
    end = time.monotonic() + 30
    while not ready():
        if time.monotonic() > end or (child and child.poll() is not None):
            sys.exit(f"{what} is not ready")
        time.sleep(0.05)


def end(child):
    child.send_signal(signal.SIGTERM)
    try:
        child.wait(20)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def background(stack, folder, *args):
    log = open(os.path.join(folder, f"{os.path.basename(args[0])}.log"), "a")
    child = subprocess.Popen(args, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                             env=dict(os.environ, XDG_RUNTIME_DIR=folder))
    stack.callback(end, child)
    return child


def bowline_file(stack, folder, options):
    program = os.path.abspath(options.bowline)
    mount = os.path.join(folder, "bowline-file")
    os.mkdir(mount)
    background(stack, folder, program, "rnbd", "export", "--memory", f"disk={options.size}", "--address", EXPORT)
    child = background(stack, folder, program, "rnbd", "map", "disk", "--from", "postgres", "--path", f"{MAP}@{EXPORT}",
                       "--fuse", mount)
    wait("rnbd map", lambda: os.listdir(mount), child)
    return os.path.join(mount, *os.listdir(mount))


def nbdfuse_file(stack, folder, options):
    file = os.path.join(folder, "nbdfuse-file")
    os.mkdir(file)
    background(stack, folder, "nbdkit", "-f", "-i", NBDKIT, "-p", "10811", "memory", options.size)
    time.sleep(1)
    child = background(stack, folder, "nbdfuse", file, f"nbd://{NBDKIT}:10811")
    wait("nbdfuse", lambda: os.listdir(file), child)
    return os.path.join(file, "nbd")


class Database:
    def __init__(self, stack, name, file, folder, options):
        self.name, self.port = name, PORTS[name]
        self.bin = sorted(glob.glob("/usr/lib/postgresql/*/bin"))[-1]
        device = call("losetup", "--find", "--show", "--direct-io=on", file).strip()
        stack.callback(call, "losetup", "-d", device)
        call("mkfs.ext4", "-q", device)
        mount = os.path.join(folder, f"{name}-data")
        os.mkdir(mount)
        call("mount", device, mount)
        stack.callback(call, "umount", mount)
        self.data = os.path.join(mount, "data")
        os.mkdir(self.data)
        call("chown", "postgres", self.data, folder)
        self.run(f"{self.bin}/initdb", "-D", self.data, "--auth=trust")
        self.folder = folder
        self.start()
        stack.callback(self.stop, "fast")
        self.run("pgbench", "-q", "-i", "-s", str(options.scale), *self.where())

    def run(self, *args):
        return call("runuser", "-u", "postgres", "--", *args, cwd="/")

    def where(self):
        return ["-h", self.folder, "-p", str(self.port), "postgres"]

    def start(self):
        log = os.path.join(self.folder, f"{self.name}-postgres.log")
        settings = f"-p {self.port} -k {self.folder} -c listen_addresses="
        # Its standard output stays open in the server, which would keep a pipe.
        args = ["runuser", "-u", "postgres", "--", f"{self.bin}/pg_ctl", "-s", "-w", "-D", self.data, "-l", log, "-o", settings]
        subprocess.run([*args, "start"], check=True, cwd="/", stdout=subprocess.DEVNULL)

    def stop(self, how):
        self.run(f"{self.bin}/pg_ctl", "-s", "-w", "-m", how, "-D", self.data, "stop")

    def transactions(self, clients, seconds):
        out = self.run("pgbench", "-n", "-c", str(clients), "-j", "2", "-T", str(seconds), *self.where())
        return next(float(line.split()[2]) for line in out.splitlines() if line.startswith("tps"))

    def sums(self):
        query = "select (select sum(abalance) from pgbench_accounts), (select sum(tbalance) from pgbench_tellers), " \
                "(select sum(bbalance) from pgbench_branches), (select coalesce(sum(delta), 0) from pgbench_history)"
        return self.run("psql", "-At", "-c", query, *self.where()).strip().split("|")


def main():
    options = arguments()
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="bowline-postgres-"))
        os.chmod(folder, 0o755)
        files = {"bowline": bowline_file(stack, folder, options), "nbdfuse": nbdfuse_file(stack, folder, options)}
        databases = [Database(stack, name, file, folder, options) for name, file in files.items()]
        for clients in map(int, options.clients.split(",")):
            rates = {database.name: [] for database in databases}
            for number in range(options.rounds):
                for database in databases:
                    rates[database.name].append(database.transactions(clients, options.seconds))
                print(f"{clients} clients, round {number + 1} of {options.rounds}: "
                      + ", ".join(f"{name} {runs[-1]:.0f}/s" for name, runs in rates.items()), flush=True)
            ratio = statistics.median(own / other for own, other in zip(rates["bowline"], rates["nbdfuse"]))
            medians = ", ".join(f"{name} {statistics.median(runs):.0f}/s" for name, runs in rates.items())
            print(f"{clients} clients: {medians}; of nbdfuse {ratio:.2f}", flush=True)
        wrong = False
        for database in databases:
            before = database.sums()
            database.stop("immediate")
            database.start()
            for when, sums in (("at the end", before), ("after it was stopped at once", database.sums())):
                if len(set(sums)) != 1 or sums != before:
                    wrong = True
                    print(f"{database.name}, {when}: accounts, tellers, branches and history differ: {', '.join(sums)}")
        print("sums: wrong" if wrong else "sums: equal, also after the databases were stopped at once")
        return wrong


if __name__ == "__main__":
    sys.exit(main())
