"""Pointers to memory that is not mapped, is read-only, or lies behind the end of a file: EFAULT, the message is neither sent
nor lost, and the signals of other faults do what they do without the library."""

import ctypes
import errno
import mmap
import os
import select
import signal
import socket
import struct
import sys
import tempfile

ONE, OTHER = sys.argv[1:3]
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
for name in "send", "sendto", "sendmsg", "recv", "recvfrom", "recvmsg", "read", "readv":
    getattr(libc, name).restype = ctypes.c_ssize_t
DONTWAIT = socket.MSG_DONTWAIT


def page(access, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, fd=-1):
    return libc.mmap(None, 8192, access, flags, fd, 0)


class Pieces(ctypes.Structure):
    _fields_ = [("at", ctypes.c_void_p), ("len", ctypes.c_size_t)]


class Message(ctypes.Structure):
    _fields_ = [("name", ctypes.c_void_p), ("name_len", ctypes.c_uint), ("pieces", ctypes.c_void_p),
                ("count", ctypes.c_size_t), ("control", ctypes.c_void_p), ("control_len", ctypes.c_size_t),
                ("flags", ctypes.c_int)]


class Messages(ctypes.Structure):
    _fields_ = [("message", Message), ("len", ctypes.c_uint)]


def gives(what, expected, call, *args):
    got = call(*[arg if isinstance(arg, ctypes._Pointer) else ctypes.c_long(arg) if isinstance(arg, int) else arg
                 for arg in args])
    got = got if got >= 0 else errno.errorcode[ctypes.get_errno()]
    assert got == expected, "%s: %r, not %r" % (what, got, expected)


def send(data):
    """Sends, and waits until it is there: the descriptor of a socket with a limit does not wait."""
    sender.send(data)
    assert select.select([receiver], [], [], 10)[0], "nothing came"


sender, receiver = (socket.socket(socket.AF_RDS, socket.SOCK_SEQPACKET, 0) for _ in range(2))
sender.bind((ONE, 5000))
receiver.bind((OTHER, 5000))
sender.connect((OTHER, 5000))
receiver.settimeout(10)
s, r = sender.fileno(), receiver.fileno()
# what is sent through the ring, once there is credit
for _ in range(100):
    sender.send(b"first")
    assert receiver.recv(100) == b"first"

nothing = page(mmap.PROT_READ)
assert libc.munmap(ctypes.c_void_p(nothing), 8192) == 0
secret = page(0)
constant = page(mmap.PROT_READ)
file = tempfile.TemporaryFile()
behind = page(mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, file.fileno())
edge = page(mmap.PROT_READ | mmap.PROT_WRITE)
assert libc.munmap(ctypes.c_void_p(edge + 4096), 4096) == 0
good = ctypes.create_string_buffer(b"good", 200000)
here = ctypes.addressof(good)
size = ctypes.c_uint(128)
KEPT = []


def message(**fields):
    piece = Pieces(here, 4)
    made = Message(None, 0, ctypes.addressof(piece), 1, None, 0, 0)
    for name, value in fields.items():
        setattr(made, name, value)
    KEPT.extend((made, piece))
    return made


def of(structure):
    return ctypes.addressof(structure)


for at in nothing, secret, behind, edge + 4090:
    for n in 10, 5000, 100000:
        gives("send", "EFAULT", libc.send, s, at, n, 0)
        gives("sendto", "EFAULT", libc.sendto, s, at, n, 0, None, 0)
    gives("sendto a name", "EFAULT", libc.sendto, s, here, 4, 0, at, 16)
    gives("sendmsg", "EFAULT", libc.sendmsg, s, at, 0)
    gives("name", "EFAULT", libc.sendmsg, s, of(message(name=at, name_len=16)), 0)
    gives("pieces", "EFAULT", libc.sendmsg, s, of(message(pieces=at)), 0)
    many = (Pieces * 20)(*[Pieces(here, 1)] * 19, Pieces(at, 10))
    gives("a piece", "EFAULT", libc.sendmsg, s, of(message(pieces=of(many), count=20)), 0)
    few = (Pieces * 2)(Pieces(here, 1), Pieces(at, 10))
    gives("one of few", "EFAULT", libc.sendmsg, s, of(message(pieces=of(few), count=2)), 0)
    gives("control", "EFAULT", libc.sendmsg, s, of(message(control=at, control_len=24)), 0)
    gives("sendmmsg", "EFAULT", libc.sendmmsg, s, at, 1, 0)
gives("a name that is not all there", "EFAULT", libc.sendto, s, here, 4, 0, edge + 4088, 16)
sender.send(b"after")
assert receiver.recv(100) == b"after", "nothing of all that was sent"

send(b"stays")
for at in nothing, secret, constant, behind, edge + 4093:
    gives("recv", "EFAULT", libc.recv, r, at, 100, 0)
    gives("recv, and look", "EFAULT", libc.recv, r, at, 100, socket.MSG_PEEK)
    gives("recvfrom", "EFAULT", libc.recvfrom, r, at, 100, 0, None, None)
    gives("read", "EFAULT", libc.read, r, at, 100)
    gives("recvmsg", "EFAULT", libc.recvmsg, r, nothing, 0)
    piece = Pieces(at, 100)
    gives("a piece to fill", "EFAULT", libc.recvmsg, r, of(message(pieces=of(piece))), 0)
    gives("readv", "EFAULT", libc.readv, r, of(piece), 1)
    gives("recvmmsg", "EFAULT", libc.recvmmsg, r, nothing, 1, 0, None)
assert receiver.recv(100) == b"stays"
for where in nothing, constant:
    send(b"lost")
    gives("a sender's name", "EFAULT", libc.recvfrom, r, here, 100, 0, where, of(size))
    send(b"lost")
    gives("its length", "EFAULT", libc.recvfrom, r, here, 100, 0, here + 1000, where)
    send(b"lost")
    gives("a name of recvmsg", "EFAULT", libc.recvmsg, r, of(message(name=where, name_len=16)), 0)
sender.send(b"last")
got = receiver.recv(100)
assert got == b"last", got

# lengths and limits that are none: nothing is received
send(b"stays")
gives("a length below 0", "EINVAL", libc.recvmsg, r, of(message(name=here, name_len=2**32 - 1)), 0)
gives("the same of one to send", "EINVAL", libc.sendmsg, s, of(message(name=nothing, name_len=2**31, pieces=nothing)), 0)
gives("that before all else", "EINVAL", libc.recvmsg, r, of(message(name=here, name_len=2**31, pieces=nothing)), 0)


class Limit(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("rest", ctypes.c_long)]


def limit(*words):
    KEPT.append(Limit(*words))
    return of(KEPT[-1])


one = Messages(message(), 0)
for words in (-1, 0), (0, -1), (0, 10**9), (-1, 10**9), (2**63 - 1, 2**63 - 1), (-(2**63), -(2**63)):
    for count in 0, 1:
        gives("a limit of %r" % (words,), "EINVAL", libc.recvmmsg, r, of(one), count, 0, limit(*words))
for at in nothing, secret, behind, edge + 4090, 1:
    for count in 0, 1:
        gives("a limit", "EFAULT", libc.recvmmsg, r, of(one), count, 0, at)
    gives("where to begin", "EFAULT", libc.sendfile, s, file.fileno(), at, 10)
gives("a place below 0", "EINVAL", libc.sendfile, s, file.fileno(), limit(-1, 0), 10)
left = limit(2**63 - 1, 999999999)
gives("no message", 0, libc.recvmmsg, r, of(one), 0, 0, left)
gives("a long limit", 1, libc.recvmmsg, r, of(one), 1, 0, left)
assert KEPT[-1].seconds > 2**62 and KEPT[-1].rest < 10**9
gives("there is none", "EAGAIN", libc.recvmmsg, r, of(one), 1, DONTWAIT, limit(5, 0))
assert KEPT[-1].seconds == 5, "what is left is told with messages only"
send(b"one")
gives("some time", 1, libc.recvmmsg, r, of(one), 1, 0, limit(5, 0))
assert KEPT[-1].seconds == 4, KEPT[-1].seconds
send(b"lost")
gives("a limit that cannot be told", "EFAULT", libc.recvmmsg, r, of(one), 1, 0, constant)

# room for control messages is looked at when one comes
for at in nothing, secret, constant, behind, edge + 4093, 1, 0, 2**63:
    for n in 100, 2**62, 2**64 - 1:
        send(b"four")
        gives("no control message", 4, libc.recvmsg, r, of(message(control=at, control_len=n, name=here, name_len=200)), 0)
SO_TIMESTAMP = 29
receiver.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMP, 1)
for at in nothing, secret, constant, behind:
    send(b"lost")
    gives("a control message", "EFAULT", libc.recvmsg, r, of(message(control=at, control_len=100)), 0)
receiver.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMP, 0)
for at in nothing, 1, 0:
    gives("control", "EFAULT", libc.sendmsg, s, of(message(control=at, control_len=24)), 0)
    gives("too much of it", "ENOBUFS", libc.sendmsg, s, of(message(control=at, control_len=2**40)), 0)
    gives("pieces first", "EFAULT", libc.sendmsg, s, of(message(pieces=nothing, control=at, control_len=2**40)), 0)
gives("a name before pieces", "EFAULT", libc.sendmsg, s, of(message(name=nothing, name_len=16, count=5000)), 0)
gives("too many pieces", "EMSGSIZE", libc.sendmsg, s, of(message(count=5000, control=here, control_len=2**40)), 0)
send(b"last")
assert receiver.recv(100) == b"last"


class Action(ctypes.Structure):
    _fields_ = [("handler", ctypes.c_void_p), ("rest", ctypes.c_ubyte * 256)]


def action(number):
    found = Action()
    assert libc.sigaction(number, None, ctypes.byref(found)) == 0
    return found.handler, bytes(found.rest)


def ends_by(number, what):
    child = os.fork()
    if child == 0:
        what()
        os._exit(0)
    assert os.waitpid(child, 0)[1] & 0x7F == number, (number, what)


assert action(signal.SIGSEGV) == action(signal.SIGBUS) == (None, bytes(256)), "the program has none"
ends_by(signal.SIGSEGV, lambda: ctypes.string_at(nothing))
ends_by(signal.SIGBUS, lambda: ctypes.string_at(behind))
ends_by(signal.SIGSEGV, lambda: os.kill(os.getpid(), signal.SIGSEGV))


def own_handler():
    """A handler of the program's own is called, and no other."""
    kept = ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda number: os._exit(7))
    libc.signal.restype = ctypes.c_void_p
    assert libc.signal(signal.SIGSEGV, kept) is None
    assert libc.signal(signal.SIGSEGV, kept) == ctypes.cast(kept, ctypes.c_void_p).value
    ctypes.string_at(nothing)


child = os.fork()
if child == 0:
    own_handler()
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


class Filter(ctypes.Structure):
    _fields_ = [("count", ctypes.c_ushort), ("at", ctypes.c_void_p)]


def program(*words):
    KEPT.append(Filter(*words))
    return of(KEPT[-1])


def filtered():
    """A filter is somewhere. Under one the system copies nothing for a child: what it points at is looked at all the same."""
    PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 22, 38
    assert libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    for at in nothing, secret, edge + 4090, 1, 0:
        gives("a filter", "EFAULT", libc.prctl, PR_SET_SECCOMP, 2, at, 0, 0)
    for at in nothing, secret, edge + 4092, 1:
        gives("its instructions", "EFAULT", libc.prctl, PR_SET_SECCOMP, 2, program(1, at), 0, 0)
    allow = ctypes.create_string_buffer(struct.pack("=HBBI", 6, 0, 0, 0x7FFF0000))
    gives("all", 0, libc.prctl, PR_SET_SECCOMP, 2, program(1, of(allow)), 0, 0)
    child = os.fork()
    if child:
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF)
    made = libc.socket(socket.AF_RDS, socket.SOCK_SEQPACKET, 0)
    assert made >= 0
    for at in nothing, secret, behind, edge + 4094, 1:
        gives("bind", "EFAULT", libc.bind, made, at, 16)
        gives("setsockopt", "EFAULT", libc.setsockopt, made, socket.SOL_SOCKET, socket.SO_SNDBUF, at, 4)
        gives("getsockopt", "EFAULT", libc.getsockopt, made, socket.SOL_SOCKET, socket.SO_SNDBUF, here, at)
    for at in nothing, constant, behind:
        gives("getsockname", "EFAULT", libc.getsockname, made, at, of(size))


child = os.fork()
if child == 0:
    try:
        filtered()
    except BaseException as error:
        print(error, file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
# one that is taken back leaves all as it was
signal.signal(signal.SIGSEGV, lambda number, frame: None)
signal.signal(signal.SIGSEGV, signal.SIG_DFL)
gives("send again", "EFAULT", libc.send, s, nothing, 10, 0)
