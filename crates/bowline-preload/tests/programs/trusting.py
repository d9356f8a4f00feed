"""A program that is run with the library, and meets somebody who is not what he seems to be."""
import array, ctypes, os, random, signal, socket, struct, sys, threading, time

AF_RDS, SOL_RDS = 21, 276
SECRET = b"a secret of this program"


def say(text):
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def serve(kind, path):
    """A server that has nothing to do with RDS: it sends back what comes."""
    listener = socket.socket(socket.AF_UNIX, kind)
    listener.bind(path)
    os.chmod(path, 0o666)
    listener.listen()
    say("listening")
    while True:
        client, _ = listener.accept()
        answer(client)
        client.close()


def answer(client):
    """All that programs ask of a descriptor, then an answer."""
    client.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE)
    client.getpeername()
    if client.type == socket.SOCK_STREAM:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65536)
    came = client.recv(100)
    client.send(came)
    try:
        client.setsockopt(SOL_RDS, 2, bytes(32))
    except OSError:
        pass


def take(channel):
    """Uses descriptors that somebody passes."""
    say("listening")
    while True:
        fds = array.array("i")
        came, control, *_ = channel.recvmsg(100, socket.CMSG_SPACE(4))
        if not came:
            return
        for _, _, data in control:
            fds.frombytes(data[:4])
        passed = socket.socket(fileno=fds[0])
        answer(passed)
        passed.close()


def make():
    """Makes a socket."""
    try:
        made = socket.socket(AF_RDS, socket.SOCK_SEQPACKET)
        made.bind(("127.0.0.1", 0))
        say("made")
    except OSError as error:
        say("errno %d" % error.errno)


def pair():
    """One end of a pair has a name as a node gives, and nobody reads there."""
    libc = ctypes.CDLL(None)
    ends = (ctypes.c_int * 2)()
    assert libc.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, ends) == 0
    other = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, os.dup(ends[1]))
    other.bind("\0bowline-rds/%x" % os.getpid())
    other.send(b"hello")
    got = ctypes.create_string_buffer(100)
    n = libc.recv(ends[0], got, 100, socket.MSG_DONTWAIT)
    say(got.raw[:n].decode() if n > 0 else "errno %d" % ctypes.get_errno())


def use(seconds):
    """All calls, whatever they answer, until time is up. A call that waits is interrupted."""
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.2, 0.2)
    begun, counts = time.monotonic(), [0, 0]
    memory = ctypes.create_string_buffer(SECRET, 8192)
    sockets = []
    me = ("127.0.0.1", 4000)
    while time.monotonic() - begun < seconds:
        try:
            if len(sockets) < 3:
                sockets.append(socket.socket(AF_RDS, socket.SOCK_SEQPACKET))
            one = random.choice(sockets)
            one.setblocking(False)
            what = random.randrange(14)
            if what == 0:
                sockets.remove(one)
                one.close()
            elif what == 1:
                one.bind(me)
            elif what == 2:
                one.connect(me)
            elif what == 3:
                one.getsockname()
            elif what == 4:
                one.getpeername()
            elif what == 5:
                assert one.sendto(b"x" * random.choice([1, 100, 70000]), me) <= 70000
            elif what == 6:
                assert len(one.recv(1000)) <= 1000
            elif what == 7:
                data, control, *_ = one.recvmsg(1000, 1000)
                assert len(data) <= 1000
                kinds = {(level, kind) for level, kind, _ in control}
                assert all(level == SOL_RDS or kind != 1 for level, kind in kinds), kinds
            elif what == 8:
                assert len(one.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64)) <= 64
            elif what == 9:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 100000)
            elif what == 10:
                assert len(one.getsockopt(SOL_RDS, 10000, 1000)) <= 1000
            elif what == 11:
                at = ctypes.addressof(memory)
                key_at = random.choice([0, at + 4096])
                one.setsockopt(SOL_RDS, 2, struct.pack("QQQQ", at, 4096, key_at, 0))
            elif what == 12:
                one.sendmsg([b"y" * 50], [], 0, me)
            else:
                one.recvfrom(10)
            counts[0] += 1
        except OSError:
            counts[1] += 1
    signal.setitimer(signal.ITIMER_REAL, 0)
    say("used %d %d" % tuple(counts))


# Bytes of a segment of shared memory.
SEGMENT = 64 << 10


def close_as_file(by):
    """Closes a descriptor by a function of C's files."""
    def close(fd):
        libc = ctypes.CDLL(None)
        libc.fdopen.restype = ctypes.c_void_p
        libc.fdopen.argtypes = [ctypes.c_int, ctypes.c_char_p]
        file = ctypes.c_void_p(libc.fdopen(fd, b"r"))
        by(libc, file)
    return close


def close_copies(fd):
    """The last one is a copy that nobody has used."""
    copy = os.dup(fd)
    os.close(fd)
    os.close(copy)


CLOSES = {
    "close": os.close,
    "copies": close_copies,
    "dup2": lambda fd: os.dup2(1, fd),
    "close_range": lambda fd: ctypes.CDLL(None).close_range(fd, fd, 0),
    "fclose": close_as_file(lambda libc, file: libc.fclose(file)),
    "freopen": close_as_file(lambda libc, file: libc.freopen(b"/dev/null", b"r", file)),
}


def close_while_giving(fd, args):
    """Threads give the same memory for sockets that are closed at that moment."""
    libc = ctypes.CDLL(None)
    os.close(fd)
    for _ in range(200):
        fd = socket.socket(AF_RDS, socket.SOCK_SEQPACKET).detach()
        gives = threading.Thread(target=libc.setsockopt, args=(fd, SOL_RDS, 2, args, len(args)))
        gives.start()
        time.sleep(random.random() / 1000)
        os.close(fd)
        gives.join()


def keep_errno():
    """Calls that go well leave errno as it is, whatever the library does for them."""
    libc = ctypes.CDLL(None, use_errno=True)
    fd = libc.open(b"/dev/null", os.O_RDWR)
    for call in (lambda: libc.write(fd, b"x", 1), lambda: libc.dup2(1, fd), lambda: libc.close(fd)):
        ctypes.set_errno(77)
        assert call() >= 0
        assert ctypes.get_errno() == 77, ctypes.get_errno()


def attached():
    """A segment of shared memory with the secret; nobody else has it."""
    libc = ctypes.CDLL(None)
    libc.shmat.restype = ctypes.c_void_p
    segment = libc.shmget(0, SEGMENT, 0o1600)
    at = libc.shmat(segment, None, 0)
    libc.shmctl(segment, 0, None)
    ctypes.memmove(at, SECRET, len(SECRET))
    return at


def detach(at, replaces):
    """Detaches it, and puts something like it there by a call that the library does not see."""
    libc = ctypes.CDLL(None)
    assert libc.shmdt(ctypes.c_void_p(at)) == 0
    if replaces:
        call = {"x86_64": 9, "aarch64": 222}[os.uname().machine]
        libc.syscall.restype = ctypes.c_void_p
        words = call, at, SEGMENT, 3, 0x32, -1, 0
        assert libc.syscall(*[ctypes.c_long(word) for word in words]) == at
        ctypes.memmove(at, SECRET, len(SECRET))


def give(way):
    """Lets a node use memory, and takes it back in one way. Says each step, and waits after it."""
    made = socket.socket(AF_RDS, socket.SOCK_SEQPACKET)
    memory = ctypes.create_string_buffer(SECRET, 4096)
    at = attached() if way.startswith("detach") else ctypes.addressof(memory)
    key, errno = ctypes.c_uint64(0), 0
    args = struct.pack("QQQQ", at, 4096, ctypes.addressof(key), 0)
    try:
        made.setsockopt(SOL_RDS, 2, args)
    except OSError as error:
        errno = error.errno
    say("%d %d" % (at, errno))
    sys.stdin.readline()
    free = struct.pack("QQ", key.value, 0)
    if way == "free":
        made.setsockopt(SOL_RDS, 3, free)
    elif way == "free-by-copy":
        made.dup().setsockopt(SOL_RDS, 3, free)
    elif way == "race":
        close_while_giving(made.detach(), args)
    elif way == "errno":
        keep_errno()
    elif way == "detach":
        detach(at, True)
    elif way == "detach-other":
        # Below it.
        detach(next(one for one in (attached() for _ in range(100)) if one < at), False)
    elif way in CLOSES:
        CLOSES[way](made.detach())
    say("done")
    sys.stdin.readline()


def both():
    """A socket that it was given, and one that it makes."""
    assert ctypes.CDLL(None).listen(0, 1) == -1
    say("used")
    make()


what, *rest = sys.argv[1:]
if what == "serve":
    serve(socket.SOCK_STREAM, rest[0])
elif what == "serve-packets":
    serve(socket.SOCK_SEQPACKET, rest[0])
elif what == "take":
    take(socket.socket(fileno=0))
elif what == "stdin":
    answer(socket.socket(fileno=0))
elif what == "make":
    make()
elif what == "stay":
    make()
    sys.stdin.readline()
elif what == "pair":
    pair()
elif what == "give":
    give(rest[0])
elif what == "both":
    both()
elif what == "use":
    use(float(rest[0]))
