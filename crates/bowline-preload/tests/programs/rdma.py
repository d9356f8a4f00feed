"""Remote reads, writes and atomics between two programs, each on a node of its own: the owner of memory, and the user
of it, which the owner starts."""

import ctypes
import errno
import mmap
import os
import socket
import struct
import sys
import time

OWN, PEER, SOCKET_OF_PEER = sys.argv[1:4]
SOL_RDS = 276
GET_MR, FREE_MR, RECVERR, GET_MR_FOR_DEST = 2, 3, 5, 7
ARGS, DEST, MAP, STATUS, FADD, CSWP, MASKED_FADD, MASKED_CSWP = 1, 2, 3, 4, 6, 7, 8, 9
WRITE, FENCE, INVALIDATE, USE_ONCE, NOTIFY, SILENT = 1, 2, 4, 8, 0x20, 0x40
LEN = 1 << 20
MAP_NORESERVE = 0x4000


def rds(address, port):
    s = socket.socket(socket.AF_RDS, socket.SOCK_SEQPACKET, 0)
    s.bind((address, port))
    s.settimeout(30)
    return s


def gives(what, name, call, *args):
    try:
        call(*args)
    except OSError as e:
        assert e.errno == getattr(errno, name), "%s: %s" % (what, e)
    else:
        raise AssertionError("%s: no %s" % (what, name))


def pattern(seed, n):
    return bytes((i * 31 ^ i >> 8 ^ seed * 97) & 0xFF for i in range(n))


KEPT = []


def vector(*pieces):
    """Pieces of memory, which stay where they are."""
    KEPT.append(ctypes.create_string_buffer(b"".join(struct.pack("=QQ", *piece) for piece in pieces)))
    return KEPT[-1]


def operation(cookie, offset, n, local, flags, token=0):
    return [(SOL_RDS, ARGS, struct.pack("=7Q", cookie, offset, n, ctypes.addressof(local), len(local) // 16, flags,
                                        token))]


def atomic(kind, cookie, at, offset, numbers, flags=NOTIFY, token=0):
    numbers = (list(numbers) + [0] * 4)[:4]
    return [(SOL_RDS, kind, struct.pack("=9Q", cookie, at, offset, *numbers, flags, token))]


def told(s, count=1):
    """The ends of operations: (number, status)"""
    ends = []
    while len(ends) < count:
        data, control, _, who = s.recvmsg(100, 256)
        assert data == b"" and who is None, (data, who)
        for level, kind, value in control:
            assert (level, kind, len(value)) == (SOL_RDS, STATUS, 16)
            ends.append(struct.unpack("=Qi4x", value))
    return ends


def read_only():
    """A page that may be read only."""
    KEPT.append(mmap.mmap(-1, 4096))
    at = ctypes.addressof(ctypes.c_char.from_buffer(KEPT[-1]))
    libc = ctypes.CDLL(None)
    assert libc.mprotect(ctypes.c_void_p(at), ctypes.c_size_t(4096), mmap.PROT_READ) == 0
    return at


def owner(s, user):
    memory = ctypes.create_string_buffer(LEN + 8192)
    at = ctypes.addressof(memory)
    cookie = ctypes.c_uint64(0)
    store = ctypes.addressof(cookie)

    def get(where, n, flags=0, store=store):
        return struct.pack("=4Q", where, n, store, flags)

    unbound = socket.socket(socket.AF_RDS, socket.SOCK_SEQPACKET, 0)
    gives("unbound", "ENOTCONN", unbound.setsockopt, SOL_RDS, GET_MR, get(at, 100))

    def option(name, value):
        s.setsockopt(SOL_RDS, name, value)

    gives("short", "EINVAL", option, GET_MR, get(at, 100)[:31])
    gives("nothing", "EINVAL", option, GET_MR, get(at, 0))
    gives("wrapping", "EINVAL", option, GET_MR, get(2**64 - 10, 100))
    gives("4 GiB", "EINVAL", option, GET_MR, get(at, 1 << 32))
    gives("2 MiB", "EMSGSIZE", option, GET_MR, get(at, 2 << 20))
    gives("no memory", "EFAULT", option, GET_MR, get(4096, 100))
    gives("nowhere to store", "EFAULT", option, GET_MR, get(at, 100, 0, 8))
    constant = read_only()
    gives("memory that may not be written", "EFAULT", option, GET_MR, get(constant, 100))
    gives("a store that may not be written", "EFAULT", option, GET_MR, get(at, 100, 0, constant))
    gives("unknown key", "EINVAL", option, FREE_MR, struct.pack("=QQ", 12345, 0))
    option(FREE_MR, struct.pack("=QQ", 0, 0))
    # what may be announced is this socket's memory only
    gives("foreign key", "EINVAL", s.sendmsg, [b"x"], [(SOL_RDS, DEST, struct.pack("=Q", 12345))], 0, user)
    gives("map of nothing", "EINVAL", s.sendmsg, [b"x"], [(SOL_RDS, MAP, get(at, 0))], 0, user)
    gives("short map", "EINVAL", s.sendmsg, [b"x"], [(SOL_RDS, MAP, get(at, 9)[:31])], 0, user)

    assert s.recv(100) == b"bound"
    # a write and a read of a MiB that begins within a page, and nothing beside it
    part = at + 100
    option(GET_MR, get(part, LEN))
    key = cookie.value
    assert key != 0
    s.sendmsg([b"write"], [(SOL_RDS, DEST, struct.pack("=Q", key))], 0, user)
    assert s.recv(100) == b"written"
    assert memory.raw == bytes(100) + pattern(1, LEN) + bytes(8192 - 100)
    ctypes.memmove(part, pattern(2, LEN), LEN)
    s.sendto(b"read", user)
    assert s.recv(100) == b"was read"
    # what is there at the time of the read is read: this was registered long before
    ctypes.memmove(part, pattern(3, 5000), 5000)
    s.sendto(b"read pieces", user)
    assert s.recv(100) == b"were read"
    # atomics
    word = ctypes.c_uint64.from_address(part + 4)
    assert ctypes.addressof(word) % 8 == 0
    word.value = 100
    s.sendto(b"atomics", user)
    assert s.recv(100) == b"counted"
    assert word.value == 7
    option(FREE_MR, struct.pack("=QQ", key, INVALIDATE))
    gives("freed twice", "EINVAL", option, FREE_MR, struct.pack("=QQ", key, 0))
    s.sendto(b"freed", user)
    assert s.recv(100) == b"failed"

    # memory that a message registers, for one use
    control = [(SOL_RDS, MAP, get(at, 4096, USE_ONCE | WRITE))]
    s.sendmsg([b"once"], control, 0, user)
    once = cookie.value
    assert once not in (0, key)
    assert s.recv(100) == b"used"
    assert memory.raw[:4096] == pattern(4, 4096)
    gives("used up", "EINVAL", option, FREE_MR, struct.pack("=QQ", once, 0))
    # for a destination, as its other form
    dest = struct.pack("=HH", socket.AF_INET, 0) + socket.inet_aton(user[0])
    option(GET_MR_FOR_DEST, dest.ljust(128, b"\0") + get(at + 8192, 4096))
    control = [(SOL_RDS, DEST, struct.pack("=Q", cookie.value))]
    other = (user[0] + "9", 4000)
    gives("for another", "EINVAL", s.sendmsg, [b"x"], control, 0, other)
    s.sendmsg([b"silent"], control, 0, user)
    assert s.recv(100) == b"behind it"
    assert memory.raw[8192 : 8192 + 4096] == pattern(5, 4096)
    s.sendto(b"end", user)


def user(s, owner):
    memory = ctypes.create_string_buffer(LEN)
    at = ctypes.addressof(memory)
    # tools look whether memory can be used at all
    s.setsockopt(SOL_RDS, FREE_MR, struct.pack("=QQ", 0, 0))
    s.setsockopt(SOL_RDS, RECVERR, struct.pack("=i", 1))

    def expect(text):
        data, control, _, _ = s.recvmsg(100, 256)
        assert data == text, (text, data, control)
        return [struct.unpack("=Q", value)[0] for _, kind, value in control if kind == DEST]

    s.sendto(b"bound", owner)
    [key] = expect(b"write")
    send = lambda control: s.sendmsg([b"refused"], control, 0, owner)
    all_of_it = vector((at, LEN))
    gives("no pieces", "EINVAL", send, operation(key, 0, LEN, vector(), WRITE))
    gives("too many", "EMSGSIZE", send, operation(key, 0, LEN, vector(*[(at, 1)] * 1025), WRITE))
    gives("an empty piece", "EINVAL", send, operation(key, 0, LEN, vector((at, 0)), WRITE))
    gives("no such piece", "EFAULT", send, operation(key, 0, LEN, vector((4096, 9)), WRITE))
    much = mmap.mmap(-1, 8 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    vast = ctypes.addressof(ctypes.c_char.from_buffer(much))
    begun = time.monotonic()
    gives("4 GiB", "EINVAL", send, operation(key, 0, 100, vector((vast, 2**32 - 1)), WRITE))
    gives("as often as may be", "EINVAL", send, operation(key, 0, 100, vector(*[(vast, 2**32 - 1)] * 1024), WRITE))
    assert time.monotonic() - begun < 1, "the node looks at memory that is too long"
    constant = read_only()
    gives("a read to memory that may not be written", "EFAULT", send,
          operation(key, 0, 9, vector((at, 1), (constant, 8)), 0))
    gives("an atomic's result there", "EFAULT", send, atomic(FADD, key, constant, 4, [1]))
    gives("map and operation", "EINVAL", send,
          [(SOL_RDS, MAP, bytes(32))] + operation(key, 0, 9, vector((at, 9)), WRITE))
    gives("no such vector", "EFAULT", send, [(SOL_RDS, ARGS, struct.pack("=7Q", key, 0, 9, 4096, 1, WRITE, 0))])
    gives("more than there is room for", "EINVAL", send, operation(key, 0, 10, vector((at, 11)), WRITE))
    gives("more than a MiB", "EMSGSIZE", send, operation(key, 0, LEN + 1, all_of_it, WRITE))
    # It is looked at before local memory is.
    for number, local in enumerate([vector(), vector((at, 0)), vector(*[(at, 1)] * 1025)]):
        gives(f"the same, nonsense {number}", "EMSGSIZE", send, operation(key, 0, LEN + 1, local, WRITE))
    gives("two", "EINVAL", send, operation(key, 0, 9, vector((at, 9)), WRITE) * 2)
    gives("short", "EINVAL", send, [(SOL_RDS, ARGS, bytes(55))])
    gives("misaligned", "EFAULT", send, atomic(FADD, key, at + 4, 4, [1]))
    gives("misaligned there", "EINVAL", send, atomic(FADD, key, at, 3, [1]))
    gives("masks", "EOPNOTSUPP", send, atomic(MASKED_FADD, key, at, 4, [1, 1]))
    gives("short atomic", "EINVAL", send, [(SOL_RDS, FADD, bytes(71))])

    memory.raw = pattern(1, LEN)
    s.sendmsg([b"written"], operation(key, 0, LEN, all_of_it, WRITE | NOTIFY, 77), 0, owner)
    assert told(s) == [(77, 0)]
    expect(b"read")
    s.sendmsg([b"was read"], operation(key, 0, LEN, all_of_it, FENCE | NOTIFY, 2**64 - 1), 0, owner)
    assert told(s) == [(2**64 - 1, 0)]
    assert memory.raw == pattern(2, LEN)
    expect(b"read pieces")
    memory.raw = bytes(LEN)
    pieces = vector(*[(at + 5000 - 100 * (n + 1), 100) for n in range(50)])
    s.sendmsg([b"were read"], operation(key, 0, 5000, pieces, FENCE | NOTIFY, 5), 0, owner)
    assert told(s) == [(5, 0)]
    whole = pattern(3, 5000)
    assert memory.raw[:5000] == b"".join(whole[at : at + 100] for at in reversed(range(0, 5000, 100)))
    expect(b"atomics")
    # Atomics are of 8 aligned bytes of the region, which begins 4 bytes before the word.
    results = (ctypes.c_uint64 * 4).from_address(at)
    for n, (kind, numbers) in enumerate([(FADD, [5]), (MASKED_FADD, [1, 0]), (CSWP, [3, 9]),
                                         (MASKED_CSWP, [106, 7, 2**64 - 1, 2**64 - 1])]):
        s.sendmsg([], atomic(kind, key, at + 8 * n, 4, numbers, NOTIFY | SILENT, n), 0, owner)
        assert told(s) == [(n, 0)]
    assert list(results) == [100, 105, 106, 106]
    s.sendto(b"counted", owner)

    # memory that was taken back: the connection ends, nothing is lost but the operation's message
    expect(b"freed")
    s.sendmsg([b"lost"], operation(key, 0, 10, vector((at, 10)), WRITE | NOTIFY, 8), 0, owner)
    assert told(s) == [(8, 1)]
    s.sendmsg([b"failed"], [], 0, owner)
    [once] = expect(b"once")
    memory.raw = pattern(4, LEN)
    s.sendmsg([b"used"], operation(once, 0, 4096, vector((at, 4096)), WRITE), 0, owner)
    [key] = expect(b"silent")
    memory.raw = pattern(5, LEN)
    for n in range(12):
        s.sendmsg([], operation(key, 0, 4096, vector((at, 4096)), WRITE | SILENT | NOTIFY, n), 0, owner)
    # as many ends as there is room for, and no more are taken
    data, control, flags, _ = s.recvmsg(100, 32)
    assert (data, len(control), flags & socket.MSG_CTRUNC) == (b"", 1, 0)
    assert struct.unpack("=Qi4x", control[0][2]) == (0, 0)
    assert told(s, 11) == [(n, 0) for n in range(1, 12)]
    s.sendto(b"behind it", owner)
    expect(b"end")


def check_threads():
    """A node of another user has memory given by a thread; any other needs none."""
    names = [open("/proc/self/task/%s/comm" % task).read().strip() for task in os.listdir("/proc/self/task")]
    assert ("bowline-memory" in names) == ("BOWLINE_TEST_AGENT" in os.environ), names


if SOCKET_OF_PEER == "user":
    user(rds(OWN, 4700), (PEER, 4700))
    check_threads()
    sys.exit()
child = os.fork()
if child == 0:
    # what this process asks for goes to the node of the peer
    os.environ["BOWLINE_RDS_SOCKET"] = SOCKET_OF_PEER
    os.execv(sys.executable, [sys.executable, __file__, PEER, OWN, "user"])
owner(rds(OWN, 4700), (PEER, 4700))
check_threads()
assert os.waitpid(child, 0)[1] == 0
