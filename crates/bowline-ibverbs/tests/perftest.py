#!/usr/bin/env python3
"""Runs perftest's programs in pairs over bowline's libraries, with each of their options, and says which pairs do not
end as expected. By hand, as root: it takes half an hour, and makes network namespaces.

    perftest.py                      each option, between two addresses
    perftest.py --few one two ...    the usual ones, in these places
    perftest.py --only 'send_bw UD' --mode '-b'
"""
import argparse
import os
import re
import subprocess
import sys
import tempfile
import time

NAMES = ("libibverbs.so.1", "librdmacm.so.1", "libmlx5.so.1", "libefa.so.1")
NO_RIGHTS = "setpriv --reuid=65534 --regid=65534 --clear-groups --bounding-set=-all --inh-caps=-all --no-new-privs".split()
TOOLS = {"ib_send": ("RC", "UC", "UD"), "ib_write": ("RC", "UC"), "ib_read": ("RC",), "ib_atomic": ("RC",)}
FEW = ["", "-R", "-e", "-D 2", "-z", "-b", "-q 4", "-q 4 -R", "--use-srq"]
ALL = """-R|-e|-e -R|-a|-D 2|-m 256|-m 512|-m 1024|-m 2048|-m 4096|-n 5|-z|-S 3|-r 8 -t 8|-Q 1|-T 32 -R|-u 18|--tclass=64
--pkey_index=0|--use_old_post_send|--mr_per_qp|--inline_recv=64|-d bowline0|-X 0 -e|-F|--force-link=Ethernet|--ipv6
--out_json --out_json_file=/dev/null|--wait_destroy=1|--retry_count=3 -R|-s 1|-s 8388608|--disable_pcie_relaxed
--odp|-W counters/port_xmit_data|-x 9|-i 2|-c XRC|-c DC|-c SRD"""
BW = """-b|-b -R|-q 4|-q 4 -R|-q 4 -b -e|-l 4|-l 4 -q 4|--report_gbits|-N|-b --report-both|--cpu_util -D 2|--perform_warm_up
-y 1|-w 0.001|--rate_limit=1 --rate_limit_type=SW|--rate_limit=1 --rate_limit_type=HW|-O|--reversed"""
LAT = "-C|-H|-U|--latency_gap=10"
OF = {"ib_send": "--use-srq|--use-srq -q 4|--use-srq -R|-I 64|-I 0|--recv_post_list=4", "ib_write": "-I 64|-I 220",
      "ib_read": "-o 1|-o 16", "ib_atomic": "-A CMP_AND_SWAP|-A FETCH_AND_ADD -o 1"}
# What a tool says when it does not take an option itself, and when the device refuses: both end at once.
OWN = "not supported in librdmacm|not available on|can be only 1|cannot be |only available|avavilible|in BW tests only|cann't be|greater than MTU"
REFUSED = "Failed to create QP|XRC domain|create MR|query port 2|rate limit is not|performance counters|parameters"
# They do not work with the kernel's rxe at both ends, either; or the tool posts too few receives for what may be lost.
OTHERWISE = [("ib_send_lat RC", "-e"), ("ib_send_lat RC", "-e -R"), ("ib_send_lat RC", "-X 0 -e"), ("", "--perform_warm_up"),
             ("ib_send_bw U", "-q 4 -b -e"), ("ib_send_bw U", "-r 8 -t 8"), ("ib_send_bw UC", "-s 8388608"),
             ("ib_send_bw UC", "-a"), ("ib_send_bw UC", "--use-srq -q 4")]
# The server ends without ending its connections, which only a node says for it.
OTHERWISE += [("ib_atomic_lat RC", mode) for mode in ("-R", "-e -R", "-T 32 -R", "--retry_count=3 -R")]
BEFORE_ITS_SERVER = "Couldn't connect|refused|Unexpected CM event|REJECTED|UNREACHABLE"


class Place:
    """Where the two sides of a pair run. `to` is where the client finds the server."""

    def __init__(self, server, client, to=None, prefix=((), ()), by_node=False):
        self.addrs, self.to, self.prefix, self.by_node = (server, client), to or server, prefix, by_node


IN_NAMESPACES = (["ip", "netns", "exec", "verbs-a"], ["ip", "netns", "exec", "verbs-b"])
PLACES = {
    "two": Place("127.50.1.1", "127.50.1.2"),
    "one": Place("127.0.0.1", "127.0.0.1", by_node=True),
    "nobody": Place("127.50.2.1", "127.50.2.2", prefix=(NO_RIGHTS, NO_RIGHTS)),
    "namespaces": Place("10.77.0.1", "10.77.0.2", prefix=IN_NAMESPACES),
    # The tool takes names for IPv4 only.
    "ipv6": Place("fd77::1", "fd77::2", "10.77.0.1", IN_NAMESPACES),
    "link-local": Place("fe80::77:1", "fe80::77:2", "10.77.0.1", IN_NAMESPACES),
}


def make_namespaces():
    for line in """ip link set lo up|mount -t tmpfs run /run|mkdir /run/netns|ip netns add verbs-a|ip netns add verbs-b
ip link add va netns verbs-a type veth peer name vb netns verbs-b""".replace("\n", "|").split("|"):
        subprocess.run(line.split(), check=True)
    for name, n in (("a", 1), ("b", 2)):
        for addr in ("10.77.0.%d/24" % n, "fd77::%d/64" % n, "fe80::77:%d/64" % n):
            argv = ["ip", "-n", "verbs-" + name, "addr", "add", addr, "dev", "v" + name]
            subprocess.run(argv + (["nodad"] if ":" in addr else []), check=True)
        for link in ("lo", "v" + name):
            subprocess.run(["ip", "-n", "verbs-" + name, "link", "set", link, "up"], check=True)


def pair(n, place, tool, conn, mode, opts):
    """-> statuses of client and server (None: still waits) and what they said"""
    words = [tool, "-p", str(20000 + n)] + mode.split()
    words += [] if conn == "RC" or "-c " in mode else ["-c", conn]
    words += [] if re.search(r"-[nD] ", mode) else ["-n", "100"]
    words += [] if place.by_node or "-x " in mode else ["-x", "0"]
    if not re.search(r"-[sa]\b", mode) and conn != "RC":
        words += ["-s", "200" if conn == "UD" else "2048"]
    logs = [tempfile.TemporaryFile("w+") for _ in "sc"]

    def start(side):
        env, argv = dict(os.environ), [*place.prefix[side], "timeout", "-k", "2", str(opts.patience)]
        if place.by_node:
            argv += [opts.target + "/bowline", "run", "--"]
        else:
            env.update(LD_LIBRARY_PATH=opts.names, BOWLINE_VERBS_ADDRS=place.addrs[side])
        logs[side].seek(0), logs[side].truncate()
        return subprocess.Popen(argv + words + [place.to] * side, env=env, stdin=subprocess.DEVNULL, stdout=logs[side],
                                stderr=subprocess.STDOUT)

    def said(side):
        logs[side].seek(0)
        return logs[side].read()

    server = start(0)
    for _ in range(20):
        time.sleep(0.3)
        status = start(1).wait()
        if status == 0 or server.poll() is not None or not re.search(BEFORE_ITS_SERVER, said(1)):
            break
    try:
        served = server.wait(5)
    except subprocess.TimeoutExpired:
        server.terminate()
        served = server.wait() and None
    return status, served, said(1) + said(0)


def modes(tool, conn, few):
    kind = tool.rsplit("_", 1)[1]
    texts = [ALL, BW if kind == "bw" else LAT, OF[tool.rsplit("_", 1)[0]]]
    every = [""] + [mode for text in texts for line in text.splitlines() for mode in line.split("|")]
    return [mode for mode in FEW if mode in every] if few else every


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="target/debug", help="folder with bowline and bowline-ibverbs")
    parser.add_argument("--only", default="", help="tools and kinds of connection, as 'send_bw UD'; an expression")
    parser.add_argument("--mode", help="this option only")
    parser.add_argument("--few", action="store_true")
    parser.add_argument("--patience", type=int, default=60, help="seconds for a program")
    parser.add_argument("places", nargs="*", default=["two"], choices=list(PLACES))
    opts = parser.parse_args()
    inside = "BOWLINE_PERFTEST_INSIDE"
    if inside not in os.environ:
        os.execvpe("unshare", ["unshare", "-mn", sys.executable] + sys.argv, dict(os.environ, **{inside: "1"}))
    make_namespaces()
    opts.target, opts.names = os.path.abspath(opts.target), tempfile.mkdtemp(prefix="bowline-perftest-")
    os.chmod(opts.names, 0o755)
    for name in NAMES:
        os.symlink(opts.target + "/bowline-ibverbs", opts.names + "/" + name)
    count = {"works": 0, "not taken": 0, "refused": 0, "known": 0, "WRONG": 0}
    n = 0
    for place in opts.places:
        for tool, conn in [(b + k, c) for b, conns in TOOLS.items() for k in ("_bw", "_lat") for c in conns]:
            for mode in modes(tool, conn, opts.few):
                if not re.search(opts.only, tool + " " + conn) or opts.mode not in (None, mode):
                    continue
                if PLACES[place].to not in PLACES[place].addrs and re.search("-[Rz]", mode):
                    continue  # the rdma_cm takes the address that the tool has looked up
                n += 1
                status, served, text = pair(n, PLACES[place], tool, conn, mode, opts)
                if status == served == 0:
                    outcome = "works"
                elif re.search(OWN, text):
                    outcome = "not taken"
                elif status == served == 1 and re.search(REFUSED, text):
                    outcome = "refused"
                elif any((tool + " " + conn).startswith(t) and mode == m for t, m in OTHERWISE):
                    outcome = "known"
                else:
                    outcome = "WRONG"
                count[outcome] += 1
                print("%-10s %-9s %-13s %s %s" % (place, outcome, tool, conn, mode), flush=True)
                if outcome == "WRONG":
                    print("  status %s, server %s: %s" % (status, served, " | ".join(text.split("\n"))[-600:]), flush=True)
    print(", ".join("%s: %d" % pair for pair in count.items()))
    return 1 if count["WRONG"] else 0


if __name__ == "__main__":
    sys.exit(main())
