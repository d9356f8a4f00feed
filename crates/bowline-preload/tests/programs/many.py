"""Many processes with many sockets each, all of them open at once; each socket sends to another."""

import os
import resource
import socket
import sys

ONE, OTHER = sys.argv[1:3]
PROCESSES, SOCKETS = int(sys.argv[3]), int(sys.argv[4])
# The limit is what most systems give a program; the node has a higher one.
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
ready_in, ready_out = os.pipe()
end_in, end_out = os.pipe()


def work():
    sockets = []
    for n in range(SOCKETS):
        made = socket.socket(socket.AF_RDS, socket.SOCK_SEQPACKET, 0)
        made.bind(((ONE, OTHER)[n % 2], 0))
        sockets.append(made)
    names = [made.getsockname() for made in sockets]
    for turn in range(3):
        for n, made in enumerate(sockets):
            made.sendto(b"%d %d %d" % (os.getpid(), turn, n), names[n - 1 - turn])
        for n, made in enumerate(sockets):
            sender = (n + 1 + turn) % SOCKETS
            assert made.recvfrom(100) == (b"%d %d %d" % (os.getpid(), turn, sender), names[sender])
    os.write(ready_out, b"x")
    os.close(end_out)
    os.read(end_in, 1)


for _ in range(PROCESSES):
    if os.fork() == 0:
        try:
            work()
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os.write(ready_out, b"f")
        os._exit(0)
os.close(end_in)
came = b""
while len(came) < PROCESSES:
    came += os.read(ready_in, 1000)
print("all" if came == b"x" * PROCESSES else "failed", flush=True)
# Until there is nobody to tell.
sys.stdin.readline()
os.close(end_out)
