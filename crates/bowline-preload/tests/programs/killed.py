"""Processes that are killed at random moments while they send, from sockets of their own and from
one that all of them share. Of each came what it sent first, whole, once and in order."""

import os
import random
import select
import signal
import socket
import sys
import time

ONE, OTHER = sys.argv[1:3]
KILLS = int(sys.argv[3])
AT_ONCE = 6
LIFE = 0.04
SINK = (OTHER, 4800)
END = b"end"


def new(name):
    made = socket.socket(socket.AF_RDS, socket.SOCK_SEQPACKET, 0)
    made.bind(name)
    return made


def tail(n):
    return b"x" * (n * 997 % 9000)


def sink(own):
    last = {}
    count = ended = 0
    while True:
        if not select.select([own], [], [], 0.3 if ended else 60)[0]:
            break
        message = own.recv(10000)
        if message == END:
            ended = 1
            continue
        kind, process, n, rest = message.split(b" ")
        n = int(n)
        assert rest == tail(n), "not whole"
        assert n == last.get((kind, process), -1) + 1, f"{n} after {last.get((kind, process))}"
        last[kind, process] = n
        count += 1
    assert ended, "nothing comes any more"
    print(f"{count} messages in {len(last)} flows", flush=True)


def victim(shared):
    own = new((ONE, 0))
    back = new((OTHER, 0))
    n = 0
    while True:
        own.sendto(b"own %d %d " % (os.getpid(), n) + tail(n), SINK)
        shared.sendto(b"shared %d %d " % (os.getpid(), n) + tail(n), SINK)
        own.sendto(b"back", back.getsockname())
        back.recv(10)
        n += 1


shared = new((ONE, 4801))
end_of_all = new((ONE, 4802))
own = new(SINK)
reader = os.fork()
if reader == 0:
    sink(own)
    os._exit(0)
own.close()
moments = random.Random()
living = {}
killed = 0
while killed < KILLS:
    while len(living) < AT_ONCE and killed + len(living) < KILLS:
        if (child := os.fork()) == 0:
            try:
                victim(shared)
            except BaseException as error:
                print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
        living[child] = time.monotonic() + moments.uniform(0, LIFE)
    child = min(living, key=living.get)
    time.sleep(max(0, living.pop(child) - time.monotonic()))
    os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    assert status == signal.SIGKILL, f"a process ended by itself: {status}"
    killed += 1
end_of_all.sendto(END, SINK)
assert os.waitpid(reader, 0)[1] == 0
