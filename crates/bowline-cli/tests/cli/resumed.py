"""Starts a command as a service manager does that has kept a disk's state and the socket of its NBD
server, which a killed process has left.

Arguments: the path of that socket, the state as JSON, the command."""

import fcntl
import os
import socket
import sys

PLACE, STATE, COMMAND = sys.argv[1], sys.argv[2], sys.argv[3:]

listener = socket.socket(socket.AF_UNIX)
listener.bind(PLACE)
listener.listen()
state = os.memfd_create("bowline-disk")
# The file of the disk is not open.
os.write(state, bytes(8) + STATE.encode())
# Out of the way first: one may have the other's number.
high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 500) for fd in (state, listener.fileno())]
for at, fd in enumerate(high):
    os.dup2(fd, 3 + at)
env = dict(os.environ, LISTEN_PID=str(os.getpid()), LISTEN_FDS="2", LISTEN_FDNAMES="bowline-disk:bowline-nbd")
os.execve(COMMAND[0], COMMAND, env)
