"""A program writes to memory of others, which are killed meanwhile: each operation ends once, and the next owner of
memory is served as the one before."""

import ctypes
import os
import signal
import socket
import struct
import sys
import time

OWN, PEER, SOCKET_OF_PEER = sys.argv[1:4]
SOL_RDS, ARGS, DEST, MAP, STATUS = 276, 1, 2, 3, 4
WRITE, NOTIFY = 1, 0x20
LEN = 1 << 20
OWNERS = 8

memory = ctypes.create_string_buffer(LEN)
at = ctypes.addressof(memory)
s = socket.socket(socket.AF_RDS, socket.SOCK_SEQPACKET, 0)
s.bind((OWN, 4710))
s.settimeout(30)

if SOCKET_OF_PEER == "owner":
    # announces its memory until it is killed
    cookie = ctypes.c_uint64(0)
    s.sendmsg([b"key"], [(SOL_RDS, MAP, struct.pack("=4Q", at, LEN, ctypes.addressof(cookie), WRITE))], 0, (PEER, 4710))
    while True:
        s.recv(100)

vector = ctypes.create_string_buffer(struct.pack("=QQ", at, LEN))
sent, ended, failed = 0, 0, 0
for n in range(OWNERS):
    child = os.fork()
    if child == 0:
        os.environ["BOWLINE_RDS_SOCKET"] = SOCKET_OF_PEER
        os.execv(sys.executable, [sys.executable, __file__, PEER, OWN, "owner"])
    key = None
    while key is None:
        data, control, _, _ = s.recvmsg(100, 256)
        for _, kind, value in control:
            assert kind == DEST, kind
            [key] = struct.unpack("=Q", value)
    end = time.monotonic() + 0.05 * (n % 3)
    killed = False
    outstanding = 0
    while not killed or outstanding:
        if not killed and time.monotonic() >= end:
            os.kill(child, signal.SIGKILL)
            killed = True
        while not killed and outstanding < 4:
            args = struct.pack("=7Q", key, 0, LEN, ctypes.addressof(vector), 1, WRITE | NOTIFY, sent)
            s.sendmsg([b"written"], [(SOL_RDS, ARGS, args)], 0, (PEER, 4710))
            sent += 1
            outstanding += 1
        if outstanding:
            data, control, _, _ = s.recvmsg(100, 32)
            for _, kind, value in control:
                token, status = struct.unpack("=Qi4x", value)
                assert (kind, token) == (STATUS, ended), (kind, token, ended)
                assert status in (0, 1, 3), status
                ended, outstanding, failed = ended + 1, outstanding - 1, failed + (status != 0)
    os.waitpid(child, 0)
assert sent == ended and sent > OWNERS, (sent, ended)
