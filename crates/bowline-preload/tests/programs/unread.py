"""Receive queues as a monitoring agent sees them, while and after a program receives: unread.py OWN PEER

The messages of a socket that the node has pushed to the program's memory are unread all the same.
"""
import ctypes
import errno
import os
import select
import socket
import struct
import sys
import time

AF_RDS, SOL_RDS, COUNTERS, RECEIVED, SOCKETS, RECEIVED_6 = 21, 276, 10000, 10005, 10006, 10014
COUNT, LEN = 5, 100
libc = ctypes.CDLL("libc.so.6", use_errno=True)


def table(option):
    """-> the records of the option"""
    value = ctypes.create_string_buffer(1 << 16)
    room = ctypes.c_int(len(value))
    size = libc.getsockopt(agent.fileno(), SOL_RDS, option, value, ctypes.byref(room))
    assert size > 0, errno.errorcode[ctypes.get_errno()]
    return [value.raw[at:at + size] for at in range(0, room.value, size)]


def unread():
    """-> sender and length of each unread message, the oldest first"""
    rows = [struct.unpack("=QI4s4s", row[:20]) + struct.unpack("!HH", row[20:24]) for row in table(RECEIVED)]
    assert [struct.unpack("=QI", row[:12]) for row in table(RECEIVED_6)] == [row[:2] for row in rows]
    own = [row for row in rows if row[2] == socket.inet_aton(to[0]) and row[4] == to[1]]
    assert own == rows, rows
    return [((socket.inet_ntoa(row[3]), row[5]), row[1]) for row in rows]


def delivered():
    """-> messages delivered, and bytes of them"""
    rows = {row[:32].split(b"\0")[0]: struct.unpack("=Q", row[32:])[0] for row in table(COUNTERS)}
    return rows[b"recv_delivered"], rows[b"copy_to_user"]


agent, sender, receiver = (socket.socket(AF_RDS, socket.SOCK_SEQPACKET, 0) for _ in range(3))
of, to = (sys.argv[1], 4651), (sys.argv[2], 4652)
sender.bind(of)
receiver.bind(to)
assert unread() == []
for n in range(COUNT):
    sender.sendto(bytes([n]) * LEN, to)
# which has the node send what lies in the sender's memory
sender.getsockname()
assert select.select([receiver], [], [], 30)[0]
for _ in range(20):
    assert unread() == [(of, LEN)] * COUNT, unread()
assert delivered() == (0, 0), delivered()
for n in range(COUNT):
    assert receiver.recv(LEN + 1) == bytes([n]) * LEN
    assert unread() == [(of, LEN)] * (COUNT - n - 1), unread()
    assert delivered() == (n + 1, LEN * (n + 1)), delivered()
# what a program takes right before it closes the socket
sender.sendto(bytes(LEN), to)
assert receiver.recv(LEN) == bytes(LEN)
receiver.close()
begun = time.monotonic()
while any(row[4:8] == socket.inet_aton(to[0]) for row in table(SOCKETS)):
    assert time.monotonic() < begun + 30, "the socket is there still"
assert delivered() == (COUNT + 1, LEN * (COUNT + 1)), delivered()
