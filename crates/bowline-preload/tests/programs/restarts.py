"""Makes a socket after each start of the node, at the first try."""

import os
import socket
import sys
import time

ADDRESS, FOLDER, TIMES = sys.argv[1], sys.argv[3], int(sys.argv[4])

# One of an earlier node is of no use, and stays so.
first = socket.socket(socket.AF_RDS, socket.SOCK_SEQPACKET, 0)
for n in range(TIMES):
    while not os.path.exists(os.path.join(FOLDER, f"started{n}")):
        time.sleep(0.002)
    s = socket.socket(socket.AF_RDS, socket.SOCK_SEQPACKET, 0)
    s.bind((ADDRESS, 4600))
    s.sendto(b"m", (ADDRESS, 4600))
    assert s.recv(10) == b"m"
    s.close()
    try:
        first.bind((ADDRESS, 4601))
        assert n == 0, "a socket of a node that is gone"
    except OSError:
        assert n > 0
    open(os.path.join(FOLDER, f"used{n}"), "w").close()
