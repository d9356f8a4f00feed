"""The calls of a monitoring agent that reads RDS's tables through ctypes, as PCP's for RDS does: agent.py OWN PEER

It calls `socket` and `getsockopt` of "libc.so.6" itself, asks with a length of 0 first, which fails
with ENOSPC and the length that is needed, and then again with that length.
"""
import ctypes
import errno
import os
import socket
import struct
import sys

AF_RDS, SOL_RDS, COUNTERS, SOCKETS, LAST = 21, 276, 10000, 10006, 10016
libc = ctypes.CDLL("libc.so.6", use_errno=True)


def table(fd, option):
    """-> what the option has, and the size of a record of it"""
    room = ctypes.c_int(0)
    if libc.getsockopt(fd, SOL_RDS, option, None, ctypes.byref(room)) < 0:
        assert ctypes.get_errno() == errno.ENOSPC, errno.errorcode[ctypes.get_errno()]
    value = ctypes.create_string_buffer(max(room.value, 1))
    size = libc.getsockopt(fd, SOL_RDS, option, value, ctypes.byref(room))
    assert size > 0, errno.errorcode[ctypes.get_errno()]
    return value.raw[:room.value], size


def name(port):
    return struct.pack("=H", socket.AF_INET) + struct.pack("!H", port) + socket.inet_aton(sys.argv[1]) + bytes(8)


fd = libc.socket(AF_RDS, socket.SOCK_SEQPACKET, 0)
assert fd >= 0, errno.errorcode[ctypes.get_errno()]
assert libc.bind(fd, name(4650), 16) == 0
counters, size = table(fd, COUNTERS)
names = [counters[n:n + 32].split(b"\0")[0] for n in range(0, len(counters), size)]
assert b"send_queued" in names and b"recv_drop_dead_sock" in names, names
sockets, size = table(fd, SOCKETS)
rows = [sockets[n:n + size] for n in range(0, len(sockets), size)]
inodes = [struct.unpack("=Q", row[20:28])[0] for row in rows if row[4:8] == socket.inet_aton(sys.argv[1])]
assert inodes == [os.fstat(fd).st_ino], (inodes, os.fstat(fd))
assert os.readlink(f"/proc/self/fd/{fd}") == f"socket:[{inodes[0]}]"
for option in range(COUNTERS, LAST + 1):
    room = ctypes.c_int(0)
    got = libc.getsockopt(fd, SOL_RDS, option, None, ctypes.byref(room))
    assert got >= 0 or ctypes.get_errno() in (errno.ENOSPC, errno.ENOPROTOOPT), option
# it measures round trips with port 0
ping = ctypes.create_string_buffer(1)
assert libc.sendto(fd, ping, 0, 0, name(0), 16) == 0
assert libc.recv(fd, ping, 1, 0) == 0
assert libc.close(fd) == 0
