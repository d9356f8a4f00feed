"""What select, poll and epoll show, with and without something to receive and room to send."""

import os
import select
import socket
import sys
import threading
import time

ONE, OTHER = sys.argv[1:3]


def bound(address, port):
    made = socket.socket(socket.AF_RDS, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK, 0)
    made.bind((address, port))
    return made


def shows(fd, events=select.POLLIN | select.POLLOUT, wait=0):
    poll = select.poll()
    poll.register(fd, events)
    return dict(poll.poll(wait)).get(fd.fileno(), 0)


def becomes(fd, expected, limit=5):
    end = time.monotonic() + limit
    while (now := shows(fd)) != expected:
        assert time.monotonic() < end, (now, expected)
        time.sleep(0.001)


a = bound(ONE, 4400)
b = bound(OTHER, 4401)
assert shows(b) == select.POLLOUT
a.sendto(b"one", (OTHER, 4401))
a.sendto(b"two", (OTHER, 4401))
becomes(b, select.POLLIN | select.POLLOUT)
assert b.recv(10) == b"one"
# The other may still be on its way.
becomes(b, select.POLLIN | select.POLLOUT)
assert b.recv(10) == b"two"
assert shows(b) == select.POLLOUT
try:
    b.recv(10)
    sys.exit("there is nothing")
except BlockingIOError:
    pass

# A sleeper is woken.
def later():
    time.sleep(0.05)
    a.sendto(b"later", (OTHER, 4401))


threading.Thread(target=later).start()
assert shows(b, select.POLLIN, 5000) == select.POLLIN
assert b.recv(10) == b"later"

# Edges: one for each time that something comes to an empty queue.
epoll = select.epoll()
epoll.register(b, select.EPOLLIN | select.EPOLLET)
epoll.poll(0)
for n in range(100):
    a.sendto(b"edge", (OTHER, 4401))
    assert epoll.poll(5) == [(b.fileno(), select.EPOLLIN)], n
    assert b.recv(10) == b"edge"
    try:
        b.recv(10)
        sys.exit("there is nothing")
    except BlockingIOError:
        pass

# No room to send, until what is queued is cancelled.
far = ("192.0.2.1", 5000)
a.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 10000)
assert a.sendto(b"x" * 10000, far) == 10000
assert shows(a) == 0
try:
    a.sendto(b"x", far)
    sys.exit("there is no room")
except BlockingIOError:
    pass
name = bytes([2, 0, 5000 >> 8, 5000 & 255, 192, 0, 2, 1]) + bytes(8)
threading.Timer(0.05, lambda: a.setsockopt(276, 1, name)).start()
assert shows(a, select.POLLOUT, 5000) == select.POLLOUT
assert a.sendto(b"x", (OTHER, 4401)) == 1
becomes(b, select.POLLIN | select.POLLOUT)
assert b.recv(10) == b"x"

# A call that waits is ended by a signal whose handler raises.
import signal


class Rung(Exception):
    pass


def ring(*_):
    raise Rung


signal.signal(signal.SIGALRM, ring)
b.setblocking(True)
signal.setitimer(signal.ITIMER_REAL, 0.05)
try:
    b.recv(10)
    sys.exit("there is nothing")
except Rung:
    pass
a.sendto(b"after the signal", (OTHER, 4401))
assert b.recv(100) == b"after the signal"
