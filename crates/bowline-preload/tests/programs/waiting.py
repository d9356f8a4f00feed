"""Senders that wait, each for something else, and a reader with a small buffer."""

import socket
import sys
import threading

ONE, OTHER = sys.argv[1:3]


def bound(address, port, buffer=None):
    made = socket.socket(socket.AF_RDS, socket.SOCK_SEQPACKET, 0)
    if buffer:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    made.bind((address, port))
    return made


# One thread waits for a port that nobody reads; others of the same socket go on.
s = bound(ONE, 4800)
unread = bound(OTHER, 4801, 4000)
read = bound(OTHER, 4802, 4000)


def send(port, count):
    for n in range(count):
        s.sendto(b"%d " % n + b"x" * 1000, (OTHER, port))


threading.Thread(target=send, args=(4801, 1000), daemon=True).start()
threading.Thread(target=send, args=(4802, 200)).start()
for n in range(200):
    assert read.recv(2000).startswith(b"%d " % n)

# The sender hears of the room in a small buffer when there is some, not some time later.
threading.Thread(target=send, args=(4802, 6000)).start()
for n in range(6000):
    assert read.recv(2000).startswith(b"%d " % n)
