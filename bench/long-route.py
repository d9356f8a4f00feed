#!/usr/bin/env python3
"""RDS over TCP on a route of 1 Gb/s with a round trip of 20 ms, beside bare TCP.

Two network namespaces with a tap each; this process carries frames from one to the other and holds each for half of the
round trip. The rate is that of a token bucket (tbf) at both taps, whose queue holds a round trip. In each namespace runs a
node with 1 or 8 paths; unmodified AF_RDS programs under `bowline run` send messages of 64 KiB over 1 or 16 sockets for 8 s.
What counts is what arrives in the last 4 s. Needs root, and the command beside its preload library (`cargo build --release
-p bowline-cli -p bowline-preload`).

usage: bench/long-route.py [BOWLINE]
"""
import fcntl
import os
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque

DELAY, RATE, QUEUE = 0.010, "1gbit", "2500k"
HERE, THERE, TCP_PORT, SIZE = "10.78.0.1", "10.78.0.2", 5001, 65536
ROUND, MEASURED = 8, 4
# linux/if_tun.h
TUNSETIFF, TUNSETOFFLOAD, TUNSETVNETHDRSZ = 0x400454CA, 0x400454D0, 0x400454D8
IFF_TAP, IFF_NO_PI, IFF_VNET_HDR, TUN_F_CSUM, TUN_F_TSO4, TUN_F_TSO6 = 2, 0x1000, 0x4000, 1, 2, 4


def tap(name):
    fd = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI | IFF_VNET_HDR))
    fcntl.ioctl(fd, TUNSETVNETHDRSZ, struct.pack("i", 10))
    fcntl.ioctl(fd, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6)
    return fd


def carry(source, to):
    """Passes frames on, each after the delay."""
    held, some = deque(), threading.Condition()

    def read():
        while True:
            frame = os.read(source, 70000)
            with some:
                held.append((time.monotonic() + DELAY, frame))
                some.notify()

    threading.Thread(target=read, daemon=True).start()
    while True:
        with some:
            some.wait_for(lambda: held)
            at, frame = held.popleft()
        time.sleep(max(0, at - time.monotonic()))
        try:
            os.write(to, frame)
        except OSError:
            pass  # the interface is not up yet


class Machine:
    """A namespace with one end of the route."""

    def __init__(self, name, address):
        self.sleeper = subprocess.Popen(["unshare", "-n", "sleep", "600"])
        time.sleep(0.5)
        self.enter = ["nsenter", "-t", str(self.sleeper.pid), "-n"]
        self.address, self.fd = address, tap(name)
        subprocess.run(["ip", "link", "set", name, "netns", str(self.sleeper.pid)], check=True)
        for words in ("ip link set lo up", "ip address add %s/24 dev %s" % (address, name), "ip link set %s up" % name,
                      "tc qdisc add dev %s root tbf rate %s burst 256k limit %s" % (name, RATE, QUEUE)):
            subprocess.run(self.enter + words.split(), check=True)

    def start(self, *words):
        return subprocess.Popen(self.enter + list(words), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def measured(counts):
    """Bytes per second of the last seconds, of a function that tells what has come."""
    time.sleep(ROUND - MEASURED)
    before, at = counts(), time.monotonic()
    time.sleep(MEASURED)
    print("%.1f" % ((counts() - before) / (time.monotonic() - at) / 1e6), flush=True)
    os._exit(0)


def tcp_sink():
    connection, _ = socket.create_server((THERE, TCP_PORT)).accept()
    got, room = [0], bytearray(1 << 20)

    def read():
        while count := connection.recv_into(room):
            got[0] += count

    threading.Thread(target=read, daemon=True).start()
    measured(lambda: got[0])


def tcp_source():
    connection, end = socket.create_connection((THERE, TCP_PORT)), time.monotonic() + ROUND + 1
    while time.monotonic() < end:
        connection.sendall(bytes(1 << 18))


def rds(address, base, number):
    s = socket.socket(socket.AF_RDS, socket.SOCK_SEQPACKET, 0)
    s.bind((address, base + number))
    return s


def rds_sink(count):
    sockets, got = [rds(THERE, 6000, n) for n in range(count)], [0] * count

    def read(n):
        while True:
            got[n] += len(sockets[n].recv(SIZE))

    for n in range(count):
        threading.Thread(target=read, args=(n,), daemon=True).start()
    measured(lambda: sum(got))


def rds_source(count):
    def write(n):
        s = rds(HERE, 7000, n)
        while True:
            s.sendto(bytes(SIZE), (THERE, 6000 + n))

    for n in range(count):
        threading.Thread(target=write, args=(n,), daemon=True).start()
    time.sleep(ROUND + 1)
    os._exit(0)


def main(bowline):
    here, there = Machine("route0", HERE), Machine("route1", THERE)
    try:
        measure(bowline, here, there)
    finally:
        for machine in (here, there):
            machine.sleeper.terminate()


def measure(bowline, here, there):
    """Everything, in turn."""
    threading.Thread(target=carry, args=(here.fd, there.fd), daemon=True).start()
    threading.Thread(target=carry, args=(there.fd, here.fd), daemon=True).start()
    me = ["python3", "-B", os.path.abspath(__file__)]

    def tcp():
        sink = there.start(*me, "tcp_sink")
        time.sleep(0.3)
        return [sink, here.start(*me, "tcp_source")]

    def ends(programs):
        return programs[0].communicate(timeout=60)[0].strip(), programs[1].wait(timeout=60)

    print("MB/s of payload; bare TCP alone: %s" % ends(tcp())[0], flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for buffers in ((), ("--send-buffer", "8m", "--recv-buffer", "8m")):
            for paths in (1, 8):
                nodes, hosts = [], []
                for name, machine in (("here", here), ("there", there)):
                    hosts.append(os.path.join(folder, name + ".host"))
                    nodes.append(machine.start(bowline, "node", "--address", machine.address, "--paths", str(paths), *buffers,
                                               "--programs", hosts[-1], "--control", os.path.join(folder, name)))
                time.sleep(2)
                for count in (1, 16):
                    for beside in (False, True):
                        flow = tcp() if beside else None
                        programs = [there.start(bowline, "run", "--node", hosts[1], *me, "rds_sink", str(count))]
                        time.sleep(0.5)
                        programs.append(here.start(bowline, "run", "--node", hosts[0], *me, "rds_source", str(count)))
                        print("buffers %-8s %d paths, %2d sockets: %6s%s" % (
                            buffers[1] if buffers else "default", paths, count, ends(programs)[0],
                            ", beside a TCP flow of %s" % ends(flow)[0] if flow else ""), flush=True)
                for node in nodes:
                    node.terminate()
                    node.wait(timeout=30)


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] in ("tcp_sink", "tcp_source", "rds_sink", "rds_source"):
        globals()[sys.argv[1]](*map(int, sys.argv[2:]))
    else:
        main(os.path.abspath(sys.argv[1] if len(sys.argv) > 1 else "target/release/bowline"))
