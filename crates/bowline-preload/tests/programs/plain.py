"""Datagrams between two sockets: order, truncation, peeking, vectors, ancillary data, time limits."""

import errno
import os
import socket
import struct
import sys
import time

ONE, OTHER = sys.argv[1:3]
SOL_RDS = 276


def opened(address, port):
    made = socket.socket(socket.AF_RDS, socket.SOCK_SEQPACKET, 0)
    made.bind((address, port))
    return made


a = opened(ONE, 4000)
b = opened(OTHER, 4001)
assert a.getsockname() == (ONE, 4000)
assert a.type == socket.SOCK_SEQPACKET and a.family == socket.AF_RDS
assert a.getsockopt(socket.SOL_SOCKET, socket.SO_DOMAIN) == 21

for n in range(100):
    assert a.sendto(b"message %d" % n, (OTHER, 4001)) == len(b"message %d" % n)
for n in range(100):
    assert b.recvfrom(100) == (b"message %d" % n, (ONE, 4000))

# Any port that is free, and a destination for all that follows.
c = opened(ONE, 0)
assert c.getsockname()[1] > 1
c.connect((OTHER, 4001))
assert c.getpeername() == (OTHER, 4001)
assert c.send(b"connected") == 9
assert os.read(b.fileno(), 100) == b"connected"
c.sendmsg([b"in ", b"three ", b"pieces"])
pieces = [bytearray(4), bytearray(100)]
n, ancillary, flags, source = b.recvmsg_into(pieces)
assert (n, bytes(pieces[0]), bytes(pieces[1][: n - 4])) == (15, b"in t", b"hree pieces")
assert source == (ONE, c.getsockname()[1])

# A long message, a short buffer.
c.send(b"x" * 100_000)
assert b.recv(10, socket.MSG_PEEK) == b"x" * 10
assert b.recv_into(bytearray(10), 10, socket.MSG_PEEK | socket.MSG_TRUNC) == 100_000
data, _, flags, _ = b.recvmsg(1000)
assert len(data) == 1000 and flags & socket.MSG_TRUNC
c.send(b"whole")
assert b.recv(100) == b"whole", "the rest of the long one is lost"
c.send(b"")
assert b.recvfrom(10)[0] == b""

# A message to port 0 is answered by the node, with an empty one.
a.sendto(b"", (OTHER, 0))
assert a.recvfrom(10) == (b"", (OTHER, 0))

# Time stamps.
b.setsockopt(socket.SOL_SOCKET, 29, 1)
c.send(b"when")
data, ancillary, _, _ = b.recvmsg(100, 100)
assert data == b"when" and ancillary[0][:2] == (socket.SOL_SOCKET, 29)
seconds, micros = struct.unpack("qq", ancillary[0][2])
assert abs(seconds + micros / 1e6 - time.time()) < 60

# Limits of time, by poll and by the socket itself.
b.settimeout(0.1)
try:
    b.recv(10)
    sys.exit("there is nothing")
except TimeoutError:
    pass
b.settimeout(None)
b.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("qq", 0, 100_000))
assert struct.unpack("qq", b.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, 16)) == (0, 100_000)
begun = time.monotonic()
try:
    b.recv(10)
    sys.exit("there is nothing")
except OSError as error:
    assert error.errno == errno.ETIMEDOUT, error
assert time.monotonic() - begun > 0.09

# Counters: rows of 40 bytes, of which the call tells the size, as rds-info reads them.
import ctypes

libc = ctypes.CDLL(None, use_errno=True)
room = ctypes.create_string_buffer(1 << 16)
length = ctypes.c_int(0)
assert libc.getsockopt(a.fileno(), SOL_RDS, 10000, room, ctypes.byref(length)) == -1
assert ctypes.get_errno() == errno.ENOSPC and length.value % 40 == 0 and length.value > 400
assert libc.getsockopt(a.fileno(), SOL_RDS, 10000, room, ctypes.byref(length)) == 40
names = [room.raw[at : at + 32].rstrip(b"\0") for at in range(0, length.value, 40)]
assert b"send_queued" in names, names
