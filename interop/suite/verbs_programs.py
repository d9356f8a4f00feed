"""Debian's programs that speak verbs, as they are: in the guest over the kernel's rxe, on the host over bowline's
libibverbs and librdmacm."""
import os
import shutil
import subprocess
import tempfile
import time

from lab.agent import guest_exec, guest_run
from lab.common import NETNS, Fail

from .base import Wrong, scenario, want
from .roce import NO_SELF_CHECK, RPING_RACE, Roce

LIBRARY = "bowline-ibverbs"
NAMES = ("libibverbs.so.1", "librdmacm.so.1", "libmlx5.so.1", "libefa.so.1")
# tool and options of both sides; {gid} stands for the option that chooses a GID, {server} for the server's address
PINGPONG = ["ibv_%s_pingpong -g {gid} -n 100 -m 1024 -c" % kind for kind in ("rc", "uc", "srq")]
PINGPONG += ["ibv_rc_pingpong -g {gid} -n 100 -m 256 -s 5001 -e", "ibv_ud_pingpong -g {gid} -n 100 -s 1000"]
PERFTEST = ["ib_write_bw -x {gid} -n 100 -m 1024", "ib_read_bw -x {gid} -n 100 -m 1024", "ib_send_bw -x {gid} -n 100 -m 1024",
            "ib_atomic_bw -x {gid} -n 100 -m 1024", "ib_send_lat -x {gid} -n 100 -m 1024 -s 8",
            "ib_send_bw -c UD -x {gid} -n 100 -m 1024 -s 512", "ib_write_bw -c UC -x {gid} -n 100 -m 1024 -s 512"]
# server, client
BY_CM = [("rping -s -a {server} -C 5 -V", "rping -c -a {server} -C 5 -V"),
         ("rping -q -s -a {server} -C 5 -V", "rping -q -c -a {server} -C 5 -V"),
         ("ucmatose -f {family} -b {server} -c 3 -C 4 -S 5000", "ucmatose -f {family} -s {server} -c 3 -C 4 -S 5000"),
         ("udaddy -f {family} -b {server} -c 3 -C 4 -S 500", "udaddy -f {family} -s {server} -c 3 -C 4 -S 500"),
         ("rdma_server -s {server}", "rdma_client -s {server}")]
# sockets over RDMA, the same options at both sides; not -T a: rdma-core's client ends with status 16, between two kernels
# too, when it hears of the end together with the last data
SOCKETS = ["rstream -C 20 -I 5 -S 5000 -T v", "rstream -C 20 -I 5 -S 5000 -T n", "rstream -C 2 -I 2 -S 300000 -T v",
           "rstream -C 1000 -I 2 -S 4 -T b", "riostream -C 20 -I 5 -S 5000 -T v"]
BY_CM += [("%s -b {server}" % x, "%s -s {server}" % x) for x in SOCKETS]
# seconds until a server listens, and has set its options: riostream's come after it listens
STARTING = {"riostream": 2.5}

# receiver, sender
MULTICAST = ("mckey -m 239.99.7.1 -b {server}", "mckey -m 239.99.7.1 -b {client} -s")


class Host:
    """The host side: bowline's libraries come before the system's."""

    def __init__(self, roce):
        self.roce, self.folder, self.p = roce, tempfile.mkdtemp(prefix="bowline-verbs-"), None
        library = os.path.join(os.path.dirname(roce.program), LIBRARY)
        want(os.path.exists(library), "no %s: cargo build --workspace", library)
        for name in NAMES:
            os.symlink(library, os.path.join(self.folder, name))
        self.env = dict(os.environ, LD_LIBRARY_PATH=self.folder, BOWLINE_VERBS_ADDRS=roce.c.n_addr)

    def argv(self, command):
        return ["ip", "netns", "exec", NETNS, "timeout", "60"] + command.split()

    def run(self, command):
        r = subprocess.run(self.argv(command), env=self.env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                           stderr=subprocess.STDOUT)
        return r.returncode, r.stdout.decode(errors="replace")

    def serve(self, command):
        self.log = open(self.roce.log + ".server", "w+")
        self.p = subprocess.Popen(self.argv(command), env=self.env, stdin=subprocess.DEVNULL, stdout=self.log,
                                  stderr=subprocess.STDOUT)

    def served(self):
        try:
            rc = self.p.wait(20)
        except subprocess.TimeoutExpired:
            rc = "none"
        self.end()
        with self.log as log:
            log.seek(0)
            return rc, log.read()

    def is_over(self):
        return self.p.poll() is not None

    def end(self):
        if self.p and self.p.poll() is None:
            self.p.kill()
            self.p.wait()


class Kernel:
    """The guest side: rdma-core over rxe."""

    def run(self, command):
        rc, out, err = guest_run("a", "timeout 60 " + command, 70)
        return rc, out + err

    def serve(self, command):
        self.name = command.split()[0]
        # Before it starts, or the former one's would be taken for this one's.
        guest_run("a", "rm -f /tmp/status")
        line = "timeout 60 %s; echo $? > /tmp/status" % command
        guest_exec("a", ["bash", "-c", line], 30, lambda b: None, lambda b: None, detach=True, log="/tmp/served")

    def is_over(self):
        return guest_run("a", "test -s /tmp/status")[0] == 0

    def served(self):
        for _ in range(40):
            if self.is_over():
                break
            time.sleep(0.5)
        rc, out, _ = guest_run("a", "cat /tmp/served; exit $(cat /tmp/status || echo 1)")
        self.end()
        return rc, out

    def end(self):
        guest_run("a", "pkill -x " + self.name)


def pair(server, client, serves, asks):
    """A server and a client, both of which must succeed. A client that comes before its server listens comes again, and
    so does one that waits for no answer, until the server has heard enough."""
    sends_only = asks.startswith("mckey")
    server.serve(serves)
    try:
        end = time.monotonic() + 30
        time.sleep(STARTING.get(serves.split()[0], 0.5))
        while True:
            rc, said = client.run(asks)
            if rc == 0 and not sends_only or server.is_over() or time.monotonic() > end:
                break
            time.sleep(0.5)
        served, server_said = server.served()
        good = [rc == 0 or RPING_RACE in said, served == 0 or RPING_RACE in server_said]
        want(all(good), "%s: status %s: %s / %s: status %s: %s", asks, rc, said[-300:], serves, served, server_said[-300:])
    finally:
        server.end()


def is_there(command):
    tool = command.split()[0]
    return shutil.which(tool) and guest_run("a", "command -v " + tool)[0] == 0


@scenario("verbs-programs", dirs=("k>n", "n>k"), orders=("lo",), families=(4, 6), timeout=600, bare=True, tool=True,
          self_check=NO_SELF_CHECK)
def verbs_programs(c):
    """Debian's programs that speak verbs, unmodified on both sides: pingpongs, perftest, and those of the rdma_cm, the
    kernel's rxe at one end and bowline's libraries at the other. Over IPv6 those of the rdma_cm alone: pingpongs listen
    on IPv4."""
    with Roce(c) as r:
        ours, theirs = Host(r), Kernel()
        gids = {ours: "0", theirs: "1 -d rxe0"}
        server, client = (ours, theirs) if c.dir == "k>n" else (theirs, ours)
        address, other = (c.n_addr, c.k_addr) if c.dir == "k>n" else (c.k_addr, c.n_addr)
        done, missing, wrong = [], set(), []
        with_port = [(x, "%s %s" % (x, address)) for x in PINGPONG + PERFTEST] if c.family == 4 else []
        without = BY_CM + ([MULTICAST] if c.family == 4 else [])
        family = "ip" if c.family == 4 else "ipv6"
        for n, (serves, asks) in enumerate(with_port + without):
            if not is_there(serves):
                missing.add(serves.split()[0])
                continue
            words = (serves.replace("{gid}", gids[server]), asks.replace("{gid}", gids[client]))
            if n < len(with_port):
                words = [x + " -p %d" % (18600 + n) for x in words]
            try:
                words = [x.replace("{server}", address).replace("{client}", other) for x in words]
                pair(server, client, *[x.replace("{family}", family) for x in words])
                done.append(serves)
                c.messages += 100
            except (Wrong, Fail) as e:
                wrong.append(str(e))
        shutil.rmtree(ours.folder)
        want(not wrong, "%d of %d pairs failed: %s", len(wrong), len(wrong) + len(done), "; ".join(wrong))
        c.note("%d pairs%s" % (len(done), "; not there: " + ", ".join(sorted(missing)) if missing else ""))
