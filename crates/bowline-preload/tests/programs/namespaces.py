"""Sockets of several network namespaces in one program. Arguments: the namespace of another node,
and an address of each node."""
import array, ctypes, os, socket, sys, threading

AF_RDS = 21
CLONE_NEWNET = 0x40000000
libc = ctypes.CDLL(None, use_errno=True)


def enter(place):
    """The calling thread enters a namespace: that of a file, or a new one."""
    if place is None:
        assert libc.unshare(CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
        return
    with open(place) as file:
        assert libc.setns(file.fileno(), CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())


def in_thread(what):
    """Calls in a thread of its own, whose namespace is its own then."""
    result = []

    def run():
        try:
            result.append(what())
        except OSError as error:
            result.append(error.errno)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return result[0]


def make(address=None, port=0):
    made = socket.socket(AF_RDS, socket.SOCK_SEQPACKET)
    if address:
        made.bind((address, port))
    return made


def echo(one, other):
    """A message from one socket to another, and what is told of them."""
    one.sendto(b"x" * 2000, other.getsockname())
    data, sender = other.recvfrom(3000)
    assert (data, sender) == (b"x" * 2000, one.getsockname())


elsewhere, own, theirs = sys.argv[1:]

# Each thread gets sockets of its own namespace's node, which work in every thread.
here = [make(own, port) for port in (4000, 4001)]
there = in_thread(lambda: (enter(elsewhere), [make(theirs, port) for port in (4000, 4001)])[1])
echo(*here)
echo(*there)
in_thread(lambda: (enter(elsewhere), echo(*here)))
in_thread(lambda: (enter(None), echo(*there), echo(*here)))

# A socket that was made there and is bound here is of there.
unbound = in_thread(lambda: (enter(elsewhere), make())[1])
try:
    unbound.bind((own, 4002))
    raise SystemExit("bound to an address of another namespace")
except OSError as error:
    assert error.errno == 99, error
unbound.bind((theirs, 4002))

# A namespace without a node has no such sockets.
assert in_thread(lambda: (enter(None), make())) == 97
assert in_thread(lambda: (enter(elsewhere), enter(None), make())) == 97
assert in_thread(lambda: (enter(elsewhere), make(theirs))[1].getsockname()[0]) == theirs

# A child makes one elsewhere, and passes it on; a child that goes elsewhere uses what it has.
ours, childs = socket.socketpair()
pid = os.fork()
if pid == 0:
    enter(elsewhere)
    made = make()
    socket.send_fds(childs, [b"x"], [made.fileno()])
    echo(*here)
    enter(None)
    echo(*there)
    os._exit(0)
childs.close()
_, fds, *_ = socket.recv_fds(ours, 1, 1)
passed = socket.socket(AF_RDS, socket.SOCK_SEQPACKET, 0, fds[0])
passed.bind((theirs, 4003))
echo(passed, there[0])
assert os.waitpid(pid, 0)[1] == 0

# An exec in a namespace without a node, of a program that gets a socket, in several threads.
code = """
import socket, sys, threading
one, other = (socket.socket(fileno=int(fd)) for fd in sys.argv[1:])
failed = []
def use():
    try:
        for _ in range(50):
            one.sendto(b"x", other.getsockname())
    except OSError as error:
        failed.append(error)
threads = [threading.Thread(target=use) for _ in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert not failed, failed
for _ in range(400):
    assert other.recv(10) == b"x"
"""
pid = os.fork()
if pid == 0:
    enter(None)
    for one in here:
        os.set_inheritable(one.fileno(), True)
    os.execv(sys.executable, [sys.executable, "-c", code] + [str(one.fileno()) for one in here])
assert os.waitpid(pid, 0)[1] == 0
