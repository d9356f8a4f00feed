"""A service manager with a store of descriptors, as systemd has: it starts a node, restarts it twice
under a program that uses it, and stops it.

Arguments: a folder, the command of the node, "--", the command of the program. The program makes the
files "ready" and, once each restart is over and there is a file "again1", "again2", goes on to
"done1", "done2"."""

import array
import fcntl
import os
import socket
import subprocess
import sys
import time

FOLDER = sys.argv[1]
AT = sys.argv.index("--")
NODE, PROGRAM = sys.argv[2:AT], sys.argv[AT + 1 :]
NOTIFY = os.path.join(FOLDER, "notify")
LIMIT = time.monotonic() + 60

notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
notify.bind(NOTIFY)
notify.settimeout(30)
listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
listener.bind(os.path.join(FOLDER, "handed.sock"))
listener.listen(16)
# Name and descriptor of each thing that is kept.
store = []


def path(name):
    return os.path.join(FOLDER, name)


def wait_for(name):
    while not os.path.exists(path(name)):
        assert time.monotonic() < LIMIT, f"no {name}"
        assert program.poll() is None, "the program has ended"
        time.sleep(0.01)


def say(name):
    open(path(name), "w").close()


def hear(what):
    """Takes messages until one that has this line."""
    while True:
        space = socket.CMSG_SPACE(253 * 4)
        text, control, flags, _ = notify.recvmsg(4096, space)
        assert not flags & socket.MSG_CTRUNC
        fds = array.array("i")
        for _, _, data in control:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
        fields = dict(line.partition("=")[::2] for line in text.decode().splitlines())
        if "FDSTORE" in fields:
            store.extend((fields["FDNAME"], fd) for fd in fds)
        else:
            list(map(os.close, fds))
        if "FDSTOREREMOVE" in fields:
            for name, fd in store[:]:
                if name == fields["FDNAME"]:
                    os.close(fd)
                    store.remove((name, fd))
        if what in text.decode().splitlines():
            return


def start():
    passed = [("bowline-node.socket", listener.fileno())] + store
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 500) for _, fd in passed]

    def place():
        for at, fd in enumerate(high):
            os.dup2(fd, 3 + at)

    names = ":".join(name for name, _ in passed)
    env = dict(os.environ, NOTIFY_SOCKET=NOTIFY, LISTEN_FDS=str(len(passed)), LISTEN_FDNAMES=names)
    command = ["sh", "-c", 'LISTEN_PID=$$ exec "$@"', "sh", *NODE]
    node = subprocess.Popen(command, env=env, preexec_fn=place, close_fds=False)
    list(map(os.close, high))
    return node


node = start()
hear("READY=1")
program = subprocess.Popen(PROGRAM)
wait_for("ready")
for n in (1, 2):
    node.terminate()
    # One for what programs have, one for the state.
    hear("BARRIER=1")
    hear("BARRIER=1")
    assert node.wait(30) == 0
    assert [name for name, _ in store].count("bowline-state") == 1
    assert len(store) > 5, store
    node = start()
    hear("READY=1")
    assert not store, "what was taken need not be kept"
    say(f"again{n}")
    wait_for(f"done{n}")
assert program.wait(30) == 0
node.terminate()
node.wait(30)
# Nobody starts it again: what it has left is closed.
print("all kept")
