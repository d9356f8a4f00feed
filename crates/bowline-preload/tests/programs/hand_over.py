"""Waits in calls while another node takes the place of its node."""

import os
import select
import socket
import struct
import sys
import threading
import time

ONE, OTHER, FOLDER = sys.argv[1:4]


def say(name):
    open(os.path.join(FOLDER, name), "w").close()


def wait_for(name):
    while not os.path.exists(os.path.join(FOLDER, name)):
        time.sleep(0.005)


def sock(address, port):
    s = socket.socket(socket.AF_RDS, socket.SOCK_SEQPACKET, 0)
    s.bind((address, port))
    return s


reader, writer = sock(ONE, 4600), sock(OTHER, 4601)
writer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 7, 5000))

# A reader that sleeps, and options that are kept.
got = []
thread = threading.Thread(target=lambda: got.append(reader.recv(100)))
thread.start()
say("waits0")
wait_for("replaced0")
writer.sendto(b"after", (ONE, 4600))
thread.join()
assert got == [b"after"]
assert writer.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, 16) == struct.pack("ll", 7, 5000)
assert writer.getsockname() == (OTHER, 4601)

# Messages that wait, and a sender that waits for room: congested, and after that all is there.
sent = []
message = b"m" * 8000


def fill():
    for n in range(40):
        writer.sendto(b"%04d" % n + message, (ONE, 4600))
        sent.append(n)


thread = threading.Thread(target=fill)
thread.start()
while True:
    before = len(sent)
    time.sleep(0.2)
    if before and before == len(sent):
        break
assert len(sent) < 40
say("waits1")
wait_for("replaced1")
time.sleep(0.1)
assert len(sent) < 40, "still congested"
for n in range(40):
    assert reader.recv(9000) == b"%04d" % n + message
thread.join()

# A process that got the socket by inheritance, and one that polls.
poll = select.epoll()
poll.register(reader, select.EPOLLIN)
child = os.fork()
if child == 0:
    say("waits2")
    wait_for("replaced2")
    writer.sendto(b"of a child", (ONE, 4600))
    os._exit(0)
assert poll.poll(30) == [(reader.fileno(), select.EPOLLIN)]
assert reader.recv(100) == b"of a child"
assert os.waitpid(child, 0)[1] == 0
