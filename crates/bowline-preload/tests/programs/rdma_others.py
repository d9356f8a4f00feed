"""What becomes of memory that a node of another user was given, on the program's side: descriptors that are copied and
closed, a fork, many regions, and a program that is stopped."""

import ctypes
import os
import signal
import socket
import struct
import sys
import time

OWN, PEER, SOCKET_OF_PEER = sys.argv[1:4]
SOL_RDS = 276
GET_MR, FREE_MR, RECVERR = 2, 3, 5
ARGS, DEST, STATUS = 1, 2, 4
WRITE, NOTIFY = 1, 0x20
LEN = 4096
OK, REMOTE_ERROR = 0, 1


def rds(address, port):
    s = socket.socket(socket.AF_RDS, socket.SOCK_SEQPACKET, 0)
    s.bind((address, port))
    s.settimeout(30)
    return s


class Memory:
    def __init__(self, s, n=LEN):
        self.bytes = ctypes.create_string_buffer(n)
        self.at = ctypes.addressof(self.bytes)
        cookie = ctypes.c_uint64(0)
        s.setsockopt(SOL_RDS, GET_MR, struct.pack("=4Q", self.at, n, ctypes.addressof(cookie), 0))
        self.key = cookie.value

    def free(self, s):
        s.setsockopt(SOL_RDS, FREE_MR, struct.pack("=QQ", self.key, 0))


def user(s, owner):
    """Writes where it is told, and says how that ended."""
    s.setsockopt(SOL_RDS, RECVERR, struct.pack("=i", 1))
    source = ctypes.create_string_buffer(b"w" * LEN, LEN)
    piece = ctypes.create_string_buffer(struct.pack("=QQ", ctypes.addressof(source), LEN))
    s.sendto(b"ready", owner)
    while True:
        key, = struct.unpack("=Q", s.recv(8))
        if key == 0:
            return
        args = struct.pack("=7Q", key, 0, LEN, ctypes.addressof(piece), 1, WRITE | NOTIFY, 0)
        s.sendmsg([b"written"], [(SOL_RDS, ARGS, args)], 0, owner)
        _, control, _, _ = s.recvmsg(100, 256)
        _, status = struct.unpack("=Qi4x", [value for _, kind, value in control if kind == STATUS][0])
        s.sendto(b"ended %d" % status, owner)


if SOCKET_OF_PEER == "user":
    user(rds(OWN, 4701), (PEER, 4701))
    sys.exit()
child = os.fork()
if child == 0:
    os.environ["BOWLINE_RDS_SOCKET"] = SOCKET_OF_PEER
    os.execv(sys.executable, [sys.executable, __file__, PEER, OWN, "user"])
s, peer = rds(OWN, 4701), (PEER, 4701)
assert s.recv(100) == b"ready"


def is_written(memory):
    """Has the peer write; tells how that ended, and whether the bytes have come."""
    memory.bytes.raw = bytes(len(memory.bytes))
    s.sendto(struct.pack("=Q", memory.key), peer)
    said = s.recv(100)
    if said == b"written":
        said = s.recv(100)
    return int(said.split()[1]), memory.bytes.raw[:LEN] == b"w" * LEN


def descriptors():
    return len(os.listdir("/proc/self/fd"))


memory = Memory(s)
assert is_written(memory) == (OK, True)
# a socket is closed with its last descriptor
copy = s.dup()
s.close()
s = copy
assert is_written(memory) == (OK, True)
other = rds(OWN, 4702)
of_other = Memory(other)
assert is_written(of_other) == (OK, True)
other.close()
assert is_written(of_other) == (REMOTE_ERROR, False)
assert is_written(memory) == (OK, True)
# the child of a fork gives memory of its own, and that of its parent is its parent's
grandchild = os.fork()
if grandchild == 0:
    own = rds(OWN, 4703)
    of_child = Memory(own)
    ok = is_written(of_child) == (OK, True)
    # whoever has the socket may have the peer write to the parent's memory, and does not see it
    ok = ok and is_written(memory) == (OK, False)
    os._exit(0 if ok else 1)
assert os.waitpid(grandchild, 0)[1] == 0
assert memory.bytes.raw[:LEN] == b"w" * LEN
assert is_written(memory) == (OK, True)
# many regions at once, each its own, and no descriptor for each
before = descriptors()
many = [Memory(s) for _ in range(1000)]
assert descriptors() == before
assert is_written(many[500]) == (OK, True)
assert all(m.bytes.raw == bytes(LEN) for n, m in enumerate(many) if n != 500)
for m in many:
    m.free(s)
assert is_written(many[500]) == (REMOTE_ERROR, False)
# the node waits for a program that is stopped, but not for long: others go on, and it may give memory again
stopped = os.fork()
if stopped == 0:
    own = rds(OWN, 4704)
    of_child = Memory(own)
    own.sendto(struct.pack("=Q", of_child.key), (OWN, 4701))
    signal.pause()
key, = struct.unpack("=Q", s.recv(8))
os.kill(stopped, signal.SIGSTOP)
assert os.waitpid(stopped, os.WUNTRACED)[0] == stopped
begun = time.monotonic()
s.sendto(struct.pack("=Q", key), peer)
said = s.recv(100)
assert said == b"ended %d" % REMOTE_ERROR, said
assert time.monotonic() - begun < 10, "the limit is a quarter of a second"
assert is_written(memory) == (OK, True)
os.kill(stopped, signal.SIGKILL)
os.waitpid(stopped, 0)
assert is_written(memory) == (OK, True)
memory.free(s)
assert is_written(memory) == (REMOTE_ERROR, False)
s.sendto(bytes(8), peer)
assert os.waitpid(child, 0)[1] == 0
