"""Two sockets that exchange messages while other processes are killed."""

import socket
import sys
import time

ONE, OTHER = sys.argv[1:3]
SECONDS = float(sys.argv[3]) if len(sys.argv) > 3 else 3
a = socket.socket(socket.AF_RDS, socket.SOCK_SEQPACKET, 0)
a.bind((ONE, 4600))
b = socket.socket(socket.AF_RDS, socket.SOCK_SEQPACKET, 0)
b.bind((OTHER, 4601))
end = time.monotonic() + SECONDS
n = 0
while time.monotonic() < end:
    a.sendto(b"%d" % n, (OTHER, 4601))
    assert b.recv(100) == b"%d" % n
    n += 1
assert n > 100
