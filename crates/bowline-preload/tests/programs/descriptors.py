"""A socket as a descriptor: copies of it, children, and a process that it is handed to."""

import array
import os
import select
import socket
import subprocess
import sys
import time

ONE, OTHER = sys.argv[1:3]
# More than any receive buffer holds while nobody reads.
FLOOD = 500


def new():
    return socket.socket(socket.AF_RDS, socket.SOCK_SEQPACKET, 0)


if len(sys.argv) > 3:
    # A program that was started with a descriptor, and one that was handed one.
    number = int(sys.argv[4])
    if sys.argv[3] == "handed":
        with socket.socket(fileno=number) as pipe:
            _, ancillary, _, _ = pipe.recvmsg(1, socket.CMSG_SPACE(4))
            number = array.array("i", ancillary[0][2])[0]
        # An unbound one does not say of which family it is.
        with socket.socket(socket.AF_RDS, socket.SOCK_SEQPACKET, 0, number) as unbound:
            unbound.bind((OTHER, 4300))
            unbound.sendto(b"bound where it was handed to", (ONE, 4200))
            for n in range(FLOOD):
                unbound.sendto(b"%d " % n + b"x" * 4000, (ONE, 4200))
    else:
        os.fstat(number)
        with socket.socket(fileno=number) as inherited:
            inherited.sendto(b"by the program started", (ONE, 4200))
    sys.exit()

a = new()
a.bind((ONE, 4200))
b = new()
b.bind((OTHER, 4201))

copy = socket.socket(fileno=os.dup(b.fileno()))
third = 100
os.dup2(b.fileno(), third)
b.close()
copy.sendto(b"by a copy", (ONE, 4200))
assert a.recvfrom(100) == (b"by a copy", (OTHER, 4201))
copy.close()
with socket.socket(fileno=third) as last:
    last.sendto(b"by another", (ONE, 4200))
    assert a.recv(100) == b"by another"
    # The number means something else from now on.
    os.dup2(os.open("/dev/null", os.O_RDWR), third)
    assert os.write(third, b"not to a socket") == 15
    assert os.read(third, 10) == b""
try:
    again = new()
    again.bind((OTHER, 4201))
except OSError:
    # The node hears of the last close a moment later.
    time.sleep(0.5)
    again.bind((OTHER, 4201))

# Parent and child use one socket, each by its own channel.
child = os.fork()
if child == 0:
    os.fstat(0)
    for n in range(50):
        again.sendto(b"child", (ONE, 4200))
        assert again.recv(100) == b"for either"
    os._exit(0)
for n in range(50):
    assert a.recv(100) == b"child"
    a.sendto(b"for either", (OTHER, 4201))
assert os.waitpid(child, 0)[1] == 0

# A program that is started keeps a descriptor, and its own children likewise.
program = [sys.executable, __file__, ONE, OTHER]
for more in ({}, {"close_fds": True}):
    number = again.fileno()
    done = subprocess.run([*program, "started", str(number)], pass_fds=[number], **more)
    assert done.returncode == 0
    assert a.recvfrom(100) == (b"by the program started", (OTHER, 4201))

# A process that never made a socket is handed one, and binds it.
here, there = socket.socketpair()
unbound = new()
started = subprocess.Popen([*program, "handed", str(there.fileno())], pass_fds=[there.fileno()])
here.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [unbound.fileno()]))])
assert a.recvfrom(100) == (b"bound where it was handed to", (OTHER, 4300))
# It waits where the system would let a datagram go.
time.sleep(0.3)
for n in range(FLOOD):
    assert select.select([a], [], [], 10)[0], f"message {n} was lost"
    assert a.recv(5000).startswith(b"%d " % n)
assert started.wait() == 0
assert unbound.getsockname() == (OTHER, 4300), "the socket is one for both"
