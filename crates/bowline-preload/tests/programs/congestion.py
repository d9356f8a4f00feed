"""A reader that does not read: those who send to it are refused, others are not, and nothing is
lost."""

import errno
import hashlib
import select
import socket
import sys
import threading
import time

ONE, OTHER = sys.argv[1:3]


def new(address, port):
    made = socket.socket(socket.AF_RDS, socket.SOCK_SEQPACKET, 0)
    made.bind((address, port))
    return made


reader = new(OTHER, 4700)
free = new(OTHER, 4701)
reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 20000)
sender = new(ONE, 4702)
sender.setblocking(False)
sent = hashlib.sha256()
count = 0


def message(n):
    return b"%d " % n + b"x" * (n * 37 % 3000)


def send_until_refused(most):
    """-> the error"""
    global count
    for _ in range(most):
        try:
            sender.sendto(message(count), (OTHER, 4700))
        except OSError as error:
            return error.errno
        sent.update(message(count))
        count += 1
    return None


# Not at once: the map of congested ports is on its way while the first ones go.
end = time.monotonic() + 20
refused = set()
while errno.ENOBUFS not in refused:
    assert time.monotonic() < end and count < 20000, f"{count} messages, refused: {refused}"
    refused.add(send_until_refused(100))
    time.sleep(0.01)

# Other ports of the same address are not concerned.
sender.sendto(b"free", (OTHER, 4701))
assert select.select([free], [], [], 5)[0] and free.recv(10) == b"free"

# One that waits goes on when the reader reads.
waiter = new(ONE, 4703)
done = threading.Event()


def wait():
    waiter.sendto(b"waited", (OTHER, 4700))
    done.set()


threading.Thread(target=wait, daemon=True).start()
assert not done.wait(0.2), "it was to wait"

got = hashlib.sha256()
came = 0
waited = False
while came < count or not waited:
    assert select.select([reader], [], [], 10)[0], f"{came} of {count} came"
    data, source = reader.recvfrom(4000)
    if source == (ONE, 4703):
        assert data == b"waited" and not waited
        waited = True
        continue
    got.update(data)
    came += 1
assert done.wait(10)
assert got.digest() == sent.digest(), "once, whole and in order"
reader.setblocking(False)
try:
    reader.recv(10)
    sys.exit("one too many")
except BlockingIOError:
    pass
