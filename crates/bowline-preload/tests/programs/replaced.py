"""Memory that was registered for peers, then unmapped, and something else is mapped in its place by calls that no library
sees: a peer's RDMA neither changes that nor reads it."""

import ctypes
import mmap
import os
import platform
import socket
import struct
import sys
import tempfile

OWN, PEER, SOCKET_OF_PEER = sys.argv[1:4]
SOL_RDS = 276
GET_MR, RECVERR = 2, 5
ARGS, STATUS = 1, 4
WRITE, FENCE, NOTIFY = 1, 2, 0x20
LEN = 3 * 4096
OK, REMOTE_ERROR = 0, 1
MAP_SHARED, MAP_PRIVATE, MAP_FIXED, MAP_ANONYMOUS = 1, 2, 0x10, 0x20
READ, BOTH = mmap.PROT_READ, mmap.PROT_READ | mmap.PROT_WRITE
MUNMAP, MMAP, MREMAP = {"x86_64": (11, 9, 25), "aarch64": (215, 222, 216)}[platform.machine()]
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long


def system(number, *args):
    result = libc.syscall(*[ctypes.c_long(word) for word in (number,) + args])
    assert result != -1, os.strerror(ctypes.get_errno())
    return result


def mapped(flags=MAP_PRIVATE | MAP_ANONYMOUS, at=0, access=BOTH, fd=-1, n=LEN):
    return system(MMAP, at, n, access, flags | (MAP_FIXED if at else 0), fd, 0)


def rds(address, port):
    s = socket.socket(socket.AF_RDS, socket.SOCK_SEQPACKET, 0)
    s.bind((address, port))
    s.settimeout(30)
    return s


def register(s, at, n=LEN):
    cookie = ctypes.c_uint64(0)
    s.setsockopt(SOL_RDS, GET_MR, struct.pack("=4Q", at, n, ctypes.addressof(cookie), 0))
    return cookie.value


def user(s, owner):
    """Writes or reads where it is told, and says how that ended and what it has read."""
    s.setsockopt(SOL_RDS, RECVERR, struct.pack("=i", 1))
    source = ctypes.create_string_buffer(LEN)
    piece = ctypes.create_string_buffer(struct.pack("=QQ", ctypes.addressof(source), LEN))
    s.sendto(b"ready", owner)
    while True:
        key, flags = struct.unpack("=QQ", s.recv(16))
        if key == 0:
            return
        source.raw = b"w" * LEN
        args = struct.pack("=7Q", key, 0, LEN, ctypes.addressof(piece), 1, flags | NOTIFY, 0)
        s.sendmsg([b"done"], [(SOL_RDS, ARGS, args)], 0, owner)
        _, control, _, _ = s.recvmsg(100, 256)
        _, status = struct.unpack("=Qi4x", [value for _, kind, value in control if kind == STATUS][0])
        s.sendto(struct.pack("=i", status) + source.raw[:8], owner)


def asked(s, user, key, flags):
    """What the peer says of an operation: its status, and what it has."""
    s.sendto(struct.pack("=QQ", key, flags), user)
    while True:
        answer = s.recv(100)
        if len(answer) == 12:
            return struct.unpack("=i", answer[:4])[0], answer[4:]
        assert answer == b"done"


def replacements(folder):
    """What may be mapped in place of memory, and what stands there: (name, map at an address, bytes to look at)"""
    path = os.path.join(folder, "file")
    with open(path, "wb") as file:
        file.write(b"f" * LEN)
    fd = os.open(path, os.O_RDWR)

    def filled(flags, access=BOTH, fd=-1):
        def there(at):
            mapped(flags, at, access, fd)
            if fd < 0:
                ctypes.memset(at, ord("f"), LEN)
        return there

    yield "anonymous memory", filled(MAP_PRIVATE | MAP_ANONYMOUS)
    yield "shared memory", filled(MAP_SHARED | MAP_ANONYMOUS)
    yield "a file", filled(MAP_SHARED, BOTH, fd)
    yield "a private file that may be read", filled(MAP_PRIVATE, READ, fd)

    def moved(at):
        # Longer than the hole, or it might be in it.
        other = mapped(n=2 * LEN)
        ctypes.memset(other, ord("f"), LEN)
        system(MREMAP, other, LEN, LEN, 3, at)
    yield "memory moved there", moved


def owner(s, user):
    assert s.recv(100) == b"ready"
    folder = tempfile.mkdtemp()
    for first in MAP_PRIVATE | MAP_ANONYMOUS, MAP_SHARED | MAP_ANONYMOUS:
        for name, replace in replacements(folder):
            if first & MAP_SHARED and name != "a file":
                continue
            # It is not at the end of a mapping, nor is the whole chunk around it something else.
            at = mapped(first, n=LEN + 8192) + 4096
            key = register(s, at)
            assert asked(s, user, key, WRITE) == (OK, b"w" * 8), name
            assert ctypes.string_at(at, LEN) == b"w" * LEN
            system(MUNMAP, at, LEN)
            replace(at)
            assert asked(s, user, key, WRITE)[0] == REMOTE_ERROR, name
            assert ctypes.string_at(at, LEN) == b"f" * LEN, name
            status, read = asked(s, user, key, FENCE)
            assert status == REMOTE_ERROR and b"f" not in read, (name, status, read)
            # what is there now can be registered; the key of before stays without memory
            if name == "anonymous memory":
                register(s, at + LEN, 100)
                assert asked(s, user, key, WRITE)[0] == REMOTE_ERROR, "the page behind it is registered"
                second = register(s, at)
                assert asked(s, user, key, WRITE)[0] == REMOTE_ERROR
                assert ctypes.string_at(at, LEN) == b"f" * LEN
                assert asked(s, user, second, WRITE)[0] == OK
                assert ctypes.string_at(at, LEN) == b"w" * LEN
        with open(os.path.join(folder, "file"), "rb") as file:
            assert file.read() == b"f" * LEN
    # in part
    at = mapped()
    key = register(s, at)
    system(MUNMAP, at + 4096, 4096)
    mapped(MAP_PRIVATE | MAP_ANONYMOUS, at + 4096, n=4096)
    assert asked(s, user, key, WRITE)[0] == REMOTE_ERROR
    assert ctypes.string_at(at + 4096, 4096) == bytes(4096)
    # large blocks of the C library come back at the same address
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    block = libc.malloc(1 << 20)
    inner = (block + 4095) // 4096 * 4096
    key = register(s, inner)
    libc.free(block)
    again = libc.malloc(1 << 20)
    ctypes.memset(again, ord("f"), 1 << 20)
    asked(s, user, key, WRITE)
    assert ctypes.string_at(again, 1 << 20) == b"f" * (1 << 20)
    s.sendto(bytes(16), user)


if SOCKET_OF_PEER == "user":
    user(rds(OWN, 4702), (PEER, 4702))
    sys.exit()
child = os.fork()
if child == 0:
    os.environ["BOWLINE_RDS_SOCKET"] = SOCKET_OF_PEER
    os.execv(sys.executable, [sys.executable, __file__, PEER, OWN, "user"])
owner(rds(OWN, 4702), (PEER, 4702))
assert os.waitpid(child, 0)[1] == 0
