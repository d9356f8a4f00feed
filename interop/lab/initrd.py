"""The initramfs of a guest: busybox, boot modules and the lab's own files."""
import os
import shutil

from .common import HERE, Fail


def cpio_newc(entries):
    """entries: (name, mode, bytes) -> one newc archive."""
    out = bytearray()
    for ino, (name, mode, data) in enumerate(entries + [("TRAILER!!!", 0, b"")], 1):
        n = name.encode() + b"\0"
        out += b"070701" + b"".join(b"%08X" % v for v in (
            ino, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(n), 0)) + n
        out += b"\0" * (-len(out) % 4)
        out += data
        out += b"\0" * (-len(out) % 4)
    return bytes(out)


def make_initrd(c, path, modules=()):
    """modules: files of kernel modules that the guest finds beside the lab's own."""
    ent = []
    for d in ("bin", "dev", "proc", "sys", "mods", "newroot", "lab"):
        ent.append((d, 0o040755, b""))

    def add(src, dst, mode=0o100755):
        with open(src, "rb") as f:
            ent.append((dst, mode, f.read()))
    bb = shutil.which("busybox")
    with open(bb, "rb") as f:
        # the name of a dynamic loader stands near the start of a linked program
        if b"/ld-linux" in f.read(4096):
            raise Fail("%s is not static; install busybox-static" % bb)
    add(bb, "bin/busybox")
    add(HERE + "/guest/initrd-init.sh", "init")
    for m in sorted(os.listdir(c["mods"])):
        add(os.path.join(c["mods"], m), "mods/" + m, 0o100644)
    for f in ("init.sh", "agent.py", "load-module.sh"):
        add(HERE + "/guest/" + f, "lab/" + f)
    for m in modules:
        add(m, "lab/" + os.path.basename(m), 0o100644)
    tools = HERE + "/guest-tools"
    for f in sorted(os.listdir(tools)) if os.path.isdir(tools) else []:
        if os.path.isfile(os.path.join(tools, f)) and os.path.getsize(os.path.join(tools, f)) < 1 << 20:
            add(os.path.join(tools, f), "lab/" + f)
    with open(path, "wb") as f:
        f.write(cpio_newc(ent))
