"""Functions of the C library that are looked up in it, as other languages call them: looked_up.py OWN PEER"""
import ctypes
import errno
import socket
import struct
import sys

AF_RDS, SEQPACKET = 21, 5
# by the library's own name, past everything that hides its functions
libc = ctypes.CDLL("libc.so.6", use_errno=True)


def name(port):
    return struct.pack("=H", socket.AF_INET) + struct.pack("!H", port) + socket.inet_aton(sys.argv[1]) + bytes(8)


def must(result):
    assert result >= 0, errno.errorcode[ctypes.get_errno()]
    return result


a, b = (must(libc.socket(AF_RDS, SEQPACKET, 0)) for _ in range(2))
must(libc.bind(a, name(4320), 16))
must(libc.bind(b, name(4321), 16))
assert must(libc.sendto(a, b"hello", 5, 0, name(4321), 16)) == 5
got = ctypes.create_string_buffer(16)
assert must(libc.recv(b, got, 16, 0)) == 5 and got.value == b"hello"
assert libc.write(a, b"x", 1) == -1 and ctypes.get_errno() == errno.EOPNOTSUPP
assert libc.dprintf(a, b"%d %s\n", 7, b"x") == -1 and ctypes.get_errno() == errno.EOPNOTSUPP
assert libc.syscall(1, a, b"x", 1) == -1 and ctypes.get_errno() == errno.EOPNOTSUPP
# what is no socket is the library's, with all arguments
with open("/tmp/looked_up.%d" % libc.getpid(), "w+b") as f:
    assert must(libc.dprintf(f.fileno(), b"%d %s %.1f\n", 7, b"x", ctypes.c_double(2.5))) == len("7 x 2.5\n")
    f.seek(0)
    assert f.read() == b"7 x 2.5\n"
must(libc.unlink(b"/tmp/looked_up.%d" % libc.getpid()))
must(libc.close(a))
must(libc.close(b))
