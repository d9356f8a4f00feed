# Calls of the C library with paths of an RDMA device: "there", or "absent".
import ctypes, errno, os, sys

IS_THERE = sys.argv[1] == "there"
DEVICE = b"/sys/class/infiniband/bowline0"
FILE = DEVICE + b"/node_desc"
C = ctypes.CDLL(None, use_errno=True)
room = ctypes.create_string_buffer(4096)
HERE = -100 # AT_FDCWD
pointers = {"fopen", "fopen64", "opendir", "realpath", "__realpath_chk", "canonicalize_file_name"}

def calls(path, is_folder=False):
    """Functions with their arguments, of which the path is one."""
    yield from ((name, path, 0, 0) for name in ["open", "open64", "__open_2", "__open64_2"])
    at = ["openat", "openat64", "__openat_2", "__openat64_2"]
    yield from ((name, HERE, path, 0, 0) for name in at)
    yield from ((name, path, b"r") for name in ["fopen", "fopen64"])
    stats = ["stat", "stat64", "lstat", "lstat64", "statfs", "statfs64", "realpath"]
    yield from ((name, path, room) for name in stats)
    yield from ((name, HERE, path, room, 0) for name in ["fstatat", "fstatat64"])
    old = ["__xstat", "__xstat64", "__lxstat", "__lxstat64"]
    yield from ((name, 1, path, room) for name in old)
    yield from ((name, 1, HERE, path, room, 0) for name in ["__fxstatat", "__fxstatat64"])
    yield ("statx", HERE, path, 0, 0xfff, room)
    yield from ((name, path, os.R_OK) for name in ["access", "eaccess", "euidaccess"])
    yield ("faccessat", HERE, path, os.R_OK, 0)
    yield from ((name, path, room, 4096) for name in ["listxattr", "llistxattr"])
    yield ("__realpath_chk", path, room, ctypes.c_size_t(4096))
    yield ("canonicalize_file_name", path)
    if is_folder:
        found = ctypes.c_void_p()
        yield ("opendir", path)
        for name in ["scandir", "scandir64"]:
            yield (name, path, ctypes.byref(found), None, None)

def called(name, *args):
    """The errno of a call, or 0."""
    try:
        function = getattr(C, name)
    except AttributeError: # this C library has none
        return None
    function.restype = ctypes.c_void_p if name in pointers else ctypes.c_int
    ctypes.set_errno(7)
    result = function(*args)
    failed = result is None if name in pointers else result < 0
    number = ctypes.get_errno()
    # A file that was found at second sight leaves errno alone.
    assert failed or number == 7 or "realpath" in name or "canonical" in name, (name, number)
    return number if failed else 0

def check(wanted, name, *args):
    found = called(name, *args)
    assert found in (wanted, None), (name, args, found, wanted)

for path, is_folder in [(FILE, False), (DEVICE, True), (DEVICE + b"//../bowline0/.", True)]:
    for call in calls(path, is_folder):
        check(0 if IS_THERE else errno.ENOENT, *call)
for path in [DEVICE + b"1", b"/sys/class/infinibandx", DEVICE + b"/" + b"x" * 700]:
    for call in calls(path, True):
        check(errno.ENOENT, *call)
if IS_THERE:
    for path in [DEVICE + b"/.//../bowline0/node_desc", FILE]:
        assert C.realpath(path, room) and room.value == FILE, room.value
    for name in ["readlink", "readlinkat"]:
        check(errno.EINVAL, name, *([HERE] if name.endswith("at") else []), FILE, room, 4096)
    for name in ["getxattr", "lgetxattr"]:
        found = called(name, FILE, b"user.none", room, 4096)
        assert found in (errno.ENODATA, errno.EOPNOTSUPP), found
    # Nothing is written, and the device's own file is not opened.
    check(errno.EACCES, "open", FILE, os.O_RDWR, 0)
    check(errno.EACCES, "open", FILE, os.O_RDONLY | os.O_TRUNC, 0)
    check(errno.EACCES, "fopen", FILE, b"r+")
    check(errno.EACCES, "access", FILE, os.W_OK)
    check(errno.ENODEV, "open", b"/dev/infiniband/uverbs0", os.O_RDWR, 0)
    check(errno.ENODEV, "fopen", b"/dev/infiniband/uverbs0", b"r")
    check(0, "access", b"/dev/infiniband/uverbs0", os.R_OK | os.W_OK)
    check(0, "opendir", b"/dev/infiniband")
    # Out of it by `..` is the system's, also to write.
    check(0, "open", b"/dev/infiniband/../null", os.O_WRONLY, 0)
    check(0, "stat", DEVICE + b"/../../..", room)
    assert C.realpath(DEVICE + b"/../..", room) and room.value == b"/sys/class", room.value
    check(errno.ENOENT, "chdir", DEVICE)
# What is nowhere is the system's to say.
check(errno.EFAULT, "open", None, 0, 0)
check(errno.EFAULT, "access", ctypes.c_void_p(8), 0)
