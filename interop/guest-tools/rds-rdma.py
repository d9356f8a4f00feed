#!/usr/bin/env python3
"""Remote reads and writes between two programs on AF_RDS sockets, one on a kernel.

  rds-rdma.py own OWN PEER      registers memory, has it read and written, looks at every byte
  rds-rdma.py use OWN PEER      reads and writes as it is told
  rds-rdma.py pump OWN PEER     as the owner: how fast 1 MiB after the other is written to its memory
  --kernel own|use|both|none    which of them is on a kernel, whose limits are kept to:
                                it registers memory by RDS_CMSG_RDMA_MAP only, once a connection is up;
                                its regions take no atomics, and it can carry out none over rxe
"""
import argparse
import ctypes
import errno
import socket
import struct
import sys
import time

SOL_RDS = 276
FREE_MR = 3
ARGS, DEST, MAP, STATUS, FADD = 1, 2, 3, 4, 6
WRITE, FENCE, INVALIDATE, USE_ONCE, NOTIFY, SILENT = 1, 2, 4, 8, 0x20, 0x40
SIZE, MIB = (1 << 20) + 16384, 1 << 20
# where a region begins in the memory, and its length: unaligned, across pages, one byte, the longest
REGIONS = ((100, 1), (4095, 2), (0, 4096), (8191, 4098), (123, 100000), (4000, MIB))
PORT = 4700
BOUND = "bound"
# seconds; an emulated processor of a loaded machine takes its time
PATIENCE = 60

memory = ctypes.create_string_buffer(SIZE + 4096)
BASE = (ctypes.addressof(memory) + 4095) & ~4095
whole = (ctypes.c_char * SIZE).from_address(BASE)


def pattern(seed, n):
    block = bytes((i * 31 ^ i >> 8 ^ seed * 97) & 0xFF for i in range(65536))
    return (block * (n // 65536 + 1))[:n]


def args(cookie, offset, n, at, flags, token=0):
    """An operation on n bytes at an address of this process, in two pieces where that can be."""
    pieces = [(at, n)] if n < 2 else [(at, n // 2), (at + n // 2, n - n // 2)]
    vector = ctypes.create_string_buffer(b"".join(struct.pack("=QQ", *p) for p in pieces))
    data = struct.pack("=7Q", cookie, offset, n, ctypes.addressof(vector), len(pieces), flags, token)
    return [(SOL_RDS, ARGS, data)], vector


class Side:
    def __init__(self, own, peer):
        self.s = socket.socket(21, socket.SOCK_SEQPACKET, 0)
        self.s.bind((own, PORT))
        self.s.settimeout(PATIENCE)
        self.peer = (peer, PORT)
        self.statuses = []

    def send(self, text, control=(), flags=0):
        data = [text.encode()] if text else []
        for _ in range(200):
            try:
                return self.s.sendmsg(data, control, flags, self.peer)
            except OSError as e:
                # a kernel registers memory when a connection is up, and not sooner
                if e.errno != errno.EAGAIN:
                    raise
                time.sleep(0.05)
        raise SystemExit("EAGAIN for ten seconds: " + text)

    def take(self):
        """-> text and keys of a message; what is told of operations is kept"""
        while True:
            data, control, _, _ = self.s.recvmsg(100, 4096)
            told = [struct.unpack("=Qi", x[:12]) for _, kind, x in control if kind == STATUS]
            self.statuses += told
            if not told:
                return data.decode(), [struct.unpack("=Q", x)[0] for _, kind, x in control if kind == DEST]

    def told(self, token):
        """How an operation ended."""
        while not self.statuses:
            _, control, _, _ = self.s.recvmsg(100, 4096)
            self.statuses += [struct.unpack("=Qi", x[:12]) for _, kind, x in control if kind == STATUS]
        got, status = self.statuses.pop(0)
        assert got == token, "told of %d, not of %d" % (got, token)
        return status

    def expect(self, text):
        got, keys = self.take()
        # the user says it again until it is answered
        while got == BOUND != text:
            got, keys = self.take()
        assert got == text, "%r came, not %r" % (got, text)
        return keys


def own(side, kernel):
    cookie = ctypes.c_uint64(0)
    store = ctypes.addressof(cookie)

    def announce(text, at, n, flags):
        side.send(text, [(SOL_RDS, MAP, struct.pack("=4Q", BASE + at, n, store, flags | WRITE | INVALIDATE))])
        return cookie.value

    def free(key):
        side.s.setsockopt(SOL_RDS, FREE_MR, struct.pack("=QQ", key, INVALIDATE))

    side.expect(BOUND)
    for seed, (at, n) in enumerate(REGIONS):
        whole[:] = pattern(50 + seed, SIZE)
        key = announce("write %d %d" % (seed, n), at, n, 0)
        side.expect("written")
        before = pattern(50 + seed, SIZE)
        assert whole[at : at + n] == pattern(seed, n), "region %d has not what was written" % seed
        assert (whole[:at], whole[at + n :]) == (before[:at], before[at + n :]), "beside region %d" % seed
        whole[at : at + n] = pattern(20 + seed, n)
        side.send("read")
        side.expect("was read")
        free(key)
    # a key that is none any more; other messages come all the same
    side.send("freed")
    side.expect("failed")
    # for one use
    key = announce("once", 100, 5000, USE_ONCE)
    side.expect("used")
    assert whole[100:5100] == pattern(40, 5000), "memory for one use has not what was written"
    try:
        free(key)
        raise SystemExit("memory for one use is not used up")
    except OSError as e:
        assert e.errno == errno.EINVAL, e
    # an operation of which nothing is told
    key = announce("silent", 8000, 5000, 0)
    side.expect("behind it")
    assert whole[8000:13000] == pattern(41, 5000), "nothing was written in silence"
    free(key)
    if not kernel:
        side.send("end")
        side.expect("ended")
        return
    # an atomic at a kernel's region fails, and takes the connection with it; the kernel takes no other one until
    # this socket is closed [SAFE-8], also when the region is freed before
    announce("atomic", 0, 4096, 0)
    time.sleep(2)


OUTSTANDING = 4
WRITES = 30


def pump(side):
    """Takes so many messages of which each says that 1 MiB was written. Bytes per second from the first on."""
    cookie = ctypes.c_uint64(0)
    side.expect(BOUND)
    side.send("pump", [(SOL_RDS, MAP, struct.pack("=4Q", BASE, MIB, ctypes.addressof(cookie), WRITE | INVALIDATE))])
    for n in range(WRITES + 1):
        side.expect("x")
        if n == 0:
            begun = time.monotonic()
    print("%.0f bytes per second" % (WRITES * MIB / (time.monotonic() - begun)), flush=True)
    assert whole[:MIB] == pattern(60, MIB), "not what was written"
    side.send("end")
    side.expect("ended")


def begin(side):
    """Tells the owner that this side is there. What is sent before the owner is there is lost without a word.
    -> its answer"""
    side.s.settimeout(1)
    for _ in range(30):
        side.send(BOUND)
        try:
            answer = side.take()
            side.s.settimeout(PATIENCE)
            return answer
        except TimeoutError:
            pass
    raise SystemExit("the owner does not answer")


def use(side, kernel):
    answer = begin(side)
    key = 0
    while True:
        text, keys = answer or side.take()
        answer = None
        key = (keys or [key])[0]
        if text.startswith("write"):
            seed, n = (int(x) for x in text.split()[1:])
            whole[:n] = pattern(seed, n)
            control, _vector = args(key, 0, n, BASE, WRITE | NOTIFY, 1000 + seed)
            side.send("written", control)
            assert side.told(1000 + seed) == 0
        elif text == "read":
            whole[:] = bytes(SIZE)
            control, _vector = args(key, 0, n, BASE + 77, FENCE | NOTIFY, 2000 + seed)
            side.send("was read", control)
            assert side.told(2000 + seed) == 0
            assert whole[77 : 77 + n] == pattern(20 + seed, n), "region %d was read wrongly" % seed
            assert not any(whole[:77]) and not any(whole[77 + n :]), "beside what was read"
        elif text == "freed":
            control, _vector = args(key, 0, 1, BASE, WRITE | NOTIFY, 7)
            side.send("not to come", control)
            status = side.told(7)
            # a kernel that hears of the end of the connection first does not know why the operation failed [RDMA-34]
            assert status == 1 or kernel and status == 3, "status %d" % status
            print("told %d of a bad key" % status, flush=True)
            side.send("failed")
        elif text == "pump":
            whole[:MIB] = pattern(60, MIB)
            left, out = WRITES + 1, 0
            while left or out:
                if left and out < OUTSTANDING:
                    control, _vector = args(key, 0, MIB, BASE, WRITE | NOTIFY, 3)
                    side.send("x", control)
                    left, out = left - 1, out + 1
                else:
                    assert side.told(3) == 0
                    out -= 1
        elif text == "once":
            whole[:5000] = pattern(40, 5000)
            control, _vector = args(key, 0, 5000, BASE, WRITE)
            side.send("used", control)
        elif text == "silent":
            whole[:5000] = pattern(41, 5000)
            control, _vector = args(key, 0, 5000, BASE, WRITE | SILENT | NOTIFY, 8)
            side.send("", control)
            # a kernel tells of it when a later message has come
            if not kernel:
                assert side.told(8) == 0
            side.send("behind it")
            if kernel:
                assert side.told(8) == 0
        elif text == "atomic":
            data = struct.pack("=9Q", key, BASE, 8, 5, 0, 0, 0, NOTIFY, 9)
            side.send("not to come", [(SOL_RDS, FADD, data)])
            status = side.told(9)
            assert status == 1, "status %d" % status
            return
        else:
            assert text == "end", text
            side.send("ended")
            return


def main():
    p = argparse.ArgumentParser()
    p.add_argument("what", choices=("own", "use", "pump"))
    p.add_argument("own")
    p.add_argument("peer")
    p.add_argument("--kernel", choices=("own", "use", "both", "none"), required=True)
    a = p.parse_args()
    side = Side(a.own, a.peer)
    if a.what == "pump":
        pump(side)
    elif a.what == "own":
        own(side, a.kernel == "own")
    else:
        use(side, a.kernel == "use")
    time.sleep(0.5)  # the last message goes out
    print("complete", flush=True)


if __name__ == "__main__":
    sys.exit(main())
