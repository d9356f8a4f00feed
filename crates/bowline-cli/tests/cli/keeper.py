"""A service manager with a store of descriptors, as systemd has: it starts a command again whenever
its main process is killed, with what it has stored, and says what it hears. On SIGTERM it stops that.

Arguments: the path of its socket, the command."""

import array
import ctypes
import fcntl
import os
import select
import signal
import socket
import subprocess
import sys

NOTIFY, COMMAND = sys.argv[1], sys.argv[2:]
PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None)

notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
notify.bind(NOTIFY)
# Name and descriptor of each thing that is kept.
store = []
is_stopping = False


def say(text):
    print(text, flush=True)


def stop(*_):
    global is_stopping
    is_stopping = True
    os.kill(main, signal.SIGTERM)


def lose(*_):
    """What says whose the rest is gets lost."""
    found = [one for one in store if one[0] == "bowline-disk"]
    os.close(found[0][1])
    store.remove(found[0])
    say("lost bowline-disk")


def start():
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 500) for _, fd in store]

    def place():
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        for at, fd in enumerate(high):
            os.dup2(fd, 3 + at)

    env = dict(os.environ, NOTIFY_SOCKET=NOTIFY, FDSTORE="16", LISTEN_FDS=str(len(store)))
    env["LISTEN_FDNAMES"] = ":".join(name for name, _ in store)
    command = ["sh", "-c", 'LISTEN_PID=$$ exec "$@"', "sh", *COMMAND]
    process = subprocess.Popen(command, env=env, preexec_fn=place, close_fds=False, stdout=sys.stderr)
    list(map(os.close, high))
    say(f"started {process.pid}")
    return process


def is_gone(process):
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True


def hear():
    global main
    space = socket.CMSG_SPACE(253 * 4)
    text, control, flags, _ = notify.recvmsg(4096, space, socket.MSG_CMSG_CLOEXEC)
    assert not flags & socket.MSG_CTRUNC
    fds = array.array("i")
    for _, _, data in control:
        fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    fields = dict(line.partition("=")[::2] for line in text.decode().splitlines())
    name = fields.get("FDNAME")
    if "FDSTORE" in fields:
        assert fields["FDPOLL"] == "0"
        store.extend((name, fd) for fd in fds)
        say(f"stored {name}")
    else:
        list(map(os.close, fds))
    if "FDSTOREREMOVE" in fields:
        for found in [one for one in store if one[0] == name]:
            os.close(found[1])
            store.remove(found)
            say(f"removed {name}")
    if "MAINPID" in fields:
        main = int(fields["MAINPID"])
        say(f"continues in {main}")
    if "READY" in fields:
        say("ready")


# Those of before are not passed on: only what the store has.
for fd in range(3, notify.fileno()):
    try:
        os.close(fd)
    except OSError:
        pass
child = start()
main = child.pid
signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGUSR1, lose)
while True:
    if select.select([notify], [], [], 0.005)[0]:
        hear()
    elif is_gone(main):
        # How another process has ended is not known here.
        code = child.wait() if main == child.pid else None
        say(f"ended {code}, has {len(store)}")
        if is_stopping or code is not None and code >= 0:
            sys.exit(code)
        child = start()
        main = child.pid
