"""Four processes send from one address to one socket that four others receive from."""

import hashlib
import os
import socket
import sys

ONE, OTHER = sys.argv[1:3]
MESSAGES = 2000
PROCESSES = 4

sink = socket.socket(socket.AF_RDS, socket.SOCK_SEQPACKET, 0)
sink.bind((OTHER, 4500))
back = socket.socket(socket.AF_RDS, socket.SOCK_SEQPACKET, 0)
back.bind((ONE, 4501))
children = []

for sender in range(PROCESSES):
    if (child := os.fork()) == 0:
        own = socket.socket(socket.AF_RDS, socket.SOCK_SEQPACKET, 0)
        own.bind((ONE, 4510 + sender))
        for n in range(MESSAGES):
            own.sendto(b"%d %d " % (sender, n) + b"x" * (n % 700), (OTHER, 4500))
        os._exit(0)
    children.append(child)

for receiver in range(PROCESSES):
    if (child := os.fork()) == 0:
        last = [-1] * PROCESSES
        # Ends with an empty message, of which there is one for each.
        while message := sink.recv(4000):
            sender, n, rest = message.split(b" ")
            sender, n = int(sender), int(n)
            assert len(rest) == n % 700
            assert last[sender] < n, "one after the other"
            last[sender] = n
            back.sendto(b"%d %d" % (sender, n), (ONE, 4501))
        os._exit(0)
    children.append(child)

got = set()
while len(got) < PROCESSES * MESSAGES:
    message = back.recv(100)
    assert message not in got, "twice"
    got.add(message)
for _ in range(PROCESSES):
    back.sendto(b"", (OTHER, 4500))
for child in children:
    assert os.waitpid(child, 0)[1] == 0
