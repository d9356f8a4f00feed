"""Programs end while their memory goes to a peer: either all of it comes, and then the message, or no message does."""

import ctypes
import os
import socket
import struct
import sys

OWN, PEER, SOCKET_OF_PEER = sys.argv[1:4]
SOL_RDS, ARGS, DEST, MAP = 276, 1, 2, 3
WRITE = 1
LEN = 1 << 20
TIMES = 40

memory = ctypes.create_string_buffer(LEN)
at = ctypes.addressof(memory)
s = socket.socket(socket.AF_RDS, socket.SOCK_SEQPACKET, 0)
s.bind((OWN, 4720 + (int(sys.argv[4]) if len(sys.argv) > 4 else 0)))
s.settimeout(30)

if SOCKET_OF_PEER == "user":
    # writes the memory of the owner, says so, and is gone
    s.sendto(b"begun", (PEER, 4720))
    _, [(_, _, key)], _, _ = s.recvmsg(100, 256)
    memory.raw = b"\x5a" * LEN
    vector = ctypes.create_string_buffer(struct.pack("=QQ", at, LEN))
    args = struct.pack("=7Q", struct.unpack("=Q", key)[0], 0, LEN, ctypes.addressof(vector), 1, WRITE, 0)
    s.sendmsg([b"written"], [(SOL_RDS, ARGS, args)], 0, (PEER, 4720))
    os._exit(0)

whole = 0
for n in range(TIMES):
    child = os.fork()
    if child == 0:
        os.environ["BOWLINE_RDS_SOCKET"] = SOCKET_OF_PEER
        os.execv(sys.executable, [sys.executable, __file__, PEER, OWN, "user", str(1 + n)])
    data, _, _, user = s.recvmsg(100, 256)
    assert data == b"begun", data
    memory.raw = bytes(LEN)
    cookie = ctypes.c_uint64(0)
    s.sendmsg([b"key"], [(SOL_RDS, MAP, struct.pack("=4Q", at, LEN, ctypes.addressof(cookie), WRITE))], 0, user)
    s.settimeout(1)
    try:
        data = s.recv(100)
        assert data == b"written", data
        assert memory.raw == b"\x5a" * LEN, "%d bytes are missing" % memory.raw.count(b"\0")
        whole += 1
    except socket.timeout:
        pass
    s.settimeout(30)
    os.waitpid(child, 0)
assert whole > 0, "no message came at all"
