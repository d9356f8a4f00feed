"""Results and error numbers that a Linux 6.12 kernel was seen to give."""

import ctypes
import errno
import fcntl
import os
import signal
import socket
import struct
import sys

ONE, OTHER = sys.argv[1:3]
SOL_RDS = 276
libc = ctypes.CDLL(None, use_errno=True)
wrong = []


def new():
    return socket.socket(socket.AF_RDS, socket.SOCK_SEQPACKET, 0)


def bound(port=0, address=ONE):
    made = new()
    made.bind((address, port))
    return made


def gives(what, expected, call, *args):
    try:
        got = call(*args)
    except OSError as error:
        # EOPNOTSUPP and ENOTSUP are one number.
        got = errno.errorcode.get(error.errno, error.errno).replace("ENOTSUP", "EOPNOTSUPP")
    if got != expected:
        wrong.append(f"{what}: {got!r}, not {expected!r}")


for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW):
    gives(f"type {kind}", "ESOCKTNOSUPPORT", socket.socket, 21, kind, 0)
gives("protocol 1", "ESOCKTNOSUPPORT", socket.socket, 21, 5, 1)

s = new()
name = ctypes.create_string_buffer(b"\xff" * 32, 32)
length = ctypes.c_uint(32)
gives("getsockname unbound", 0, libc.getsockname, s.fileno(), name, ctypes.byref(length))
gives("its length", 16, lambda: length.value)
gives("its bytes", bytes(16), lambda: name.raw[:16])
gives("getpeername", "ENOTCONN", s.getpeername)
gives("sendto unbound", "ENOTCONN", s.sendto, b"x", (ONE, 5000))
s.setblocking(False)
gives("recv unbound", "EAGAIN", s.recv, 10)
for address in ("0.0.0.0", "255.255.255.255", "224.0.0.1"):
    gives(f"bind {address}", "EINVAL", s.bind, (address, 5000))
gives("bind port 1", "EINVAL", s.bind, (ONE, 1))
gives("bind elsewhere", "EADDRNOTAVAIL", s.bind, ("192.0.2.7", 5000))
gives("transport, unbound", -1, lambda: s.getsockopt(SOL_RDS, 8))
gives("bind", None, s.bind, (ONE, 5000))
gives("second bind", "EINVAL", s.bind, (ONE, 5001))
gives("same address", "EADDRINUSE", bound, 5000)
# A kernel says 3, loopback: to a node its own addresses of 127.0.0.0/8 are like others.
gives("transport, bound", 2, lambda: s.getsockopt(SOL_RDS, 8))
gives("transport again", "EOPNOTSUPP", s.setsockopt, SOL_RDS, 8, 2)
for value in (-1, 3):
    gives(f"transport {value}", "EINVAL", new().setsockopt, SOL_RDS, 8, value)
gives("transport 0", "ENOPROTOOPT", new().setsockopt, SOL_RDS, 8, 0)
gives("transport of 3 bytes", "EINVAL", lambda: new().getsockopt(SOL_RDS, 8, 3))
gives("recverr of 3 bytes", "EINVAL", lambda: new().getsockopt(SOL_RDS, 5, 3))
gives("recverr", 0, lambda: new().getsockopt(SOL_RDS, 5))
gives("get monitor", "ENOPROTOOPT", lambda: new().getsockopt(SOL_RDS, 6))
gives("unknown option", "ENOPROTOOPT", lambda: new().getsockopt(SOL_RDS, 99))
gives("unknown level", "ENOPROTOOPT", lambda: new().getsockopt(6, 1))
for address in ("0.0.0.0", "255.255.255.255"):
    gives(f"send to {address}", "EINVAL", s.sendto, b"x", (address, 5000))
gives("ping with payload", 5, s.sendto, b"12345", (OTHER, 0))
gives("listen", "EOPNOTSUPP", s.listen)
gives("accept", "EOPNOTSUPP", s.accept)
gives("shutdown", "EOPNOTSUPP", s.shutdown, socket.SHUT_RDWR)
s.connect((OTHER, 5001))
gives("write", "EOPNOTSUPP", os.write, s.fileno(), b"x")
gives("writev", "EOPNOTSUPP", os.writev, s.fileno(), [b"x"])
gives("send out of band", "EOPNOTSUPP", s.send, b"x", socket.MSG_OOB)
gives("send with MSG_NOSIGNAL", "EOPNOTSUPP", s.send, b"x", socket.MSG_NOSIGNAL)
gives("recv out of band", b"", s.recv, 10, socket.MSG_OOB)
gives("error queue", "EAGAIN", s.recv, 10, socket.MSG_ERRQUEUE)
gives("SO_SNDBUF", 212992, lambda: s.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF))
gives("SO_RCVBUF", 212992, lambda: s.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF))
s.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 20000)
# beyond the limit of the machine only by force, which not all have
for name, forced in (socket.SO_SNDBUF, 32), (socket.SO_RCVBUF, 33):
    before = s.getsockopt(socket.SOL_SOCKET, name)
    most = int(open("/proc/sys/net/core/%s" % ("wmem_max" if forced == 32 else "rmem_max")).read())
    for asked in 1 << 30, -1:
        s.setsockopt(socket.SOL_SOCKET, name, asked)
        gives("the largest", 2 * most, lambda: s.getsockopt(socket.SOL_SOCKET, name))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        for asked in 20 << 20, -1, 2**31 - 1:
            try:
                other.setsockopt(socket.SOL_SOCKET, forced, asked)
            except PermissionError:
                gives("forced", "EPERM", s.setsockopt, socket.SOL_SOCKET, forced, asked)
            else:
                s.setsockopt(socket.SOL_SOCKET, forced, asked)
                other.setsockopt(socket.SOL_SOCKET, forced, asked)
                gives("forced", other.getsockopt(socket.SOL_SOCKET, name),
                      lambda: s.getsockopt(socket.SOL_SOCKET, name))
    s.setsockopt(socket.SOL_SOCKET, name, before // 2)
with new() as sender, new() as receiver:
    sender.bind((ONE, 5010))
    receiver.bind((OTHER, 5010))
    receiver.settimeout(10)
    # a message is no longer than a MiB
    most = min(most, 1 << 20)
    sender.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, most)
    gives("as long as the buffer", most, sender.sendto, bytes(most), (OTHER, 5010))
    gives("longer", "EMSGSIZE", sender.sendto, bytes(most + 1), (OTHER, 5010))
    gives("all of it", most, lambda: len(receiver.recv(most + 1)))
s.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 20000)
gives("SO_SNDBUF doubled", 40000, lambda: s.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF))
gives("longer than half of it", "EMSGSIZE", s.send, b"x" * 20001)
for request in (0x541B, 0x5411):
    gives(f"ioctl {request:#x}", "ENOTTY", fcntl.ioctl, s.fileno(), request, bytes(8))
with new() as sender:
    # A type of service is set before the first connection, which a message has before what its control messages ask for.
    sender.bind((ONE, 5010))
    key, cookie, unknown = (SOL_RDS, 2, bytes(8)), (SOL_RDS, 12, bytes(3)), (SOL_RDS, 10, b"")
    for early in [unknown], [cookie, unknown], [(SOL_RDS, 1, bytes(55))]:
        gives(f"send with {early}", "EINVAL", sender.sendmsg, [b"x"], early, 0, (OTHER, 5010))
        gives("type of service then", bytes(1), fcntl.ioctl, sender.fileno(), 0x89E0, bytes(1))
    gives("send with a key", "EINVAL", sender.sendmsg, [b"x"], [key], 0, (OTHER, 5010))
    gives("type of service behind it", "EINVAL", fcntl.ioctl, sender.fileno(), 0x89E0, bytes(1))
with new() as sender:
    sender.bind((ONE, 5010))
    gives("send with half a cookie", "EINVAL", sender.sendmsg, [b"x"], [cookie], 0, (OTHER, 5010))
    gives("type of service behind it", "EINVAL", fcntl.ioctl, sender.fileno(), 0x89E0, bytes(1))
gives("SO_REUSEPORT", "EOPNOTSUPP", s.setsockopt, socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
for option in ("SO_REUSEADDR", "SO_KEEPALIVE", "SO_BROADCAST", "SO_PRIORITY", "SO_MARK"):
    number = getattr(socket, option)
    gives(option, None, s.setsockopt, socket.SOL_SOCKET, number, 1)
    gives(f"{option} again", 1, lambda: s.getsockopt(socket.SOL_SOCKET, number))
gives("SO_LINGER", None, s.setsockopt, socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 2))
for option, value in (("TYPE", 5), ("PROTOCOL", 0), ("DOMAIN", 21), ("ERROR", 0), ("ACCEPTCONN", 0)):
    number = getattr(socket, f"SO_{option}")
    gives(f"SO_{option}", value, lambda: s.getsockopt(socket.SOL_SOCKET, number))
gives("cancel, unbound", "ENOTCONN", new().setsockopt, SOL_RDS, 1, bytes(16))
gives("cancel of 15 bytes", "EINVAL", s.setsockopt, SOL_RDS, 1, bytes(15))
gives("GET_MR", "EOPNOTSUPP", s.setsockopt, SOL_RDS, 2, bytes(32))
gives("GET_MR of 31 bytes", "EINVAL", s.setsockopt, SOL_RDS, 2, bytes(31))
gives("FREE_MR", "EINVAL", s.setsockopt, SOL_RDS, 3, bytes(16))
gives("unknown control message", "EINVAL", s.sendmsg, [b"x"], [(SOL_RDS, 10, bytes(16))])
gives("control of another level", 1, s.sendmsg, [b"x"], [(1, 2, bytes(16))])
gives("short RDMA_ARGS", "EINVAL", s.sendmsg, [b"x"], [(SOL_RDS, 1, bytes(55))])
gives("cookie without MSG_ZEROCOPY", "EINVAL", s.sendmsg, [b"x"], [(SOL_RDS, 12, bytes(4))])
gives("MSG_ZEROCOPY without cookie", "EINVAL", s.send, b"x", 0x4000000)
gives("link", True, lambda: os.readlink(f"/proc/self/fd/{s.fileno()}").startswith("socket:["))

# A queue that nobody takes from: below the limit one more is taken, then none, not even an empty one.
s = bound()
s.setblocking(False)
s.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 20000)
for _ in range(2):
    gives("into the queue", 15000, s.sendto, b"x" * 15000, ("192.0.2.9", 5000))
gives("a full queue", "EAGAIN", s.sendto, b"x", ("192.0.2.9", 5000))
gives("an empty message", "EAGAIN", s.sendto, b"", ("192.0.2.9", 5000))
s.setblocking(True)
s.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("qq", 0, 50000))
gives("a limit of time", "ETIMEDOUT", s.sendto, b"x", ("192.0.2.9", 5000))

# Names that are shorter than an address, also of one to which a message has just gone.
s, to = bound(), bound(5900, OTHER)
raw = struct.pack("=H", socket.AF_INET) + struct.pack(">H", 5900) + socket.inet_aton(OTHER) + bytes(8)
for _ in range(3):
    gives("sendto", 1, libc.sendto, s.fileno(), b"x", 1, 0, raw, 16)
    gives("what came", b"x", to.recv, 10)
for length in 1, 2, 8, 15:
    gives(f"sendto of {length} bytes of a name", -1, libc.sendto, s.fileno(), b"x", 1, 0, raw, length)
    gives("why", "EINVAL", lambda: errno.errorcode[ctypes.get_errno()])

# What splice says of the other descriptor: it must not wait for a pipe that is open for the other direction.
signal.alarm(30)
ready, full = os.pipe()
os.write(full, b"some")
null = [os.open("/dev/null", flags) for flags in (os.O_RDWR, os.O_RDONLY, os.O_WRONLY)]
path = os.open("/tmp", os.O_PATH)
for what, expected, other, at, flags, count in (
    ("a pipe of the other direction", "EBADF", (full, ready), None, 0, 10),
    ("that pipe with a place", "ESPIPE", (full, ready), 0, 0, 10),
    ("no bytes", 0, (full, ready), 0, 0x100, 0),
    ("unknown flags", "EINVAL", (full, ready), 0, 0x100, 10),
    ("no pipe", "EINVAL", null[:1] * 2, None, 0, 10),
    ("no pipe, with a place", "EINVAL", null[:1] * 2, 0, 0, 10),
    ("no pipe, of the other direction", "EBADF", (null[2], null[1]), None, 0, 10),
    ("a path", "EBADF", (path, path), None, 0, 10),
    ("nothing", "EBADF", (999, 999), None, 0, 10),
):
    gives(f"splice from {what}", expected, lambda: os.splice(other[0], s.fileno(), count, at, None, flags))
    gives(f"splice to {what}", expected, lambda: os.splice(s.fileno(), other[1], count, None, at, flags))
signal.alarm(0)

if wrong:
    sys.exit("\n".join(wrong))
