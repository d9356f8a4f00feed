"""A program whose node is restarted by a service manager: see manager.py."""

import os
import socket
import sys
import threading
import time

FOLDER, ADDRESS = sys.argv[1:3]


def path(name):
    return os.path.join(FOLDER, name)


def sock(port):
    s = socket.socket(socket.AF_RDS, socket.SOCK_SEQPACKET, 0)
    s.bind((ADDRESS, port))
    return s


a, b = sock(5000), sock(5001)
a.sendto(b"unread", (ADDRESS, 5001))
open(path("ready"), "w").close()
for n in (1, 2):
    got = []
    # It sleeps in its call while the node is away.
    thread = threading.Thread(target=lambda: got.append(a.recvfrom(100)))
    thread.start()
    while not os.path.exists(path(f"again{n}")):
        time.sleep(0.01)
    assert b.recvfrom(100) == (b"unread", (ADDRESS, 5000))
    b.sendto(b"back", (ADDRESS, 5000))
    thread.join()
    assert got == [(b"back", (ADDRESS, 5001))], got
    a.sendto(b"unread", (ADDRESS, 5001))
    open(path(f"done{n}"), "w").close()
