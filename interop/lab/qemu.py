"""A QEMU whose network cards pass on bursts of UDP datagrams whole, as cards of today do. The host's taps do so
from Linux 6.2 on."""
import os
import re
import shutil
import subprocess

from .common import CACHE, Fail, locked, say
from .prepare import apt_get, deb_extract, host_tools

PROGRAM = "qemu-system-x86_64"
# the first that takes and gives bursts of UDP (virtio-net's host_uso and guest_uso4)
FIRST = (8, 1)
PACKAGES = ["qemu-system-x86", "qemu-system-common", "qemu-system-data", "seabios"]
KEYS = "/usr/share/keyrings/debian-archive-keyring.gpg"


def version(program):
    r = subprocess.run([program, "--version"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=60)
    m = re.search(r"version (\d+)\.(\d+)", r.stdout.decode(errors="replace"))
    if r.returncode or not m:
        raise Fail("%s does not say its version: %s" % (program, r.stdout.decode(errors="replace").strip()[-300:]))
    return int(m.group(1)), int(m.group(2))


def codename():
    with open("/etc/os-release") as f:
        found = re.search(r'^VERSION_CODENAME="?(\w+)', f.read(), re.M)
    if not found:
        raise Fail("/etc/os-release names no release of Debian")
    return found.group(1)


def burst_qemu():
    """-> the folder of one: the host's, or one from Debian's backports, fetched into the cache"""
    host_tools()
    if version(PROGRAM) >= FIRST:
        return os.path.dirname(shutil.which(PROGRAM))
    at = os.path.join(CACHE, "qemu")
    lock = locked(os.path.join(CACHE, "prepare.lock"), "prepare", 1800)
    try:
        if not os.path.exists(at + "/bin/" + PROGRAM):
            fetch(at)
    finally:
        lock.close()
    return at + "/bin"


def fetch(at):
    tmp = at + ".tmp"
    shutil.rmtree(tmp, ignore_errors=True)
    for folder in ("/lists/partial", "/bin", "/root"):
        os.makedirs(tmp + folder)
    with open(tmp + "/sources.list", "w") as f:
        f.write("deb [signed-by=%s] http://deb.debian.org/debian %s-backports main\n" % (KEYS, codename()))
    # the host's own lists and packages stay as they are
    apart = ["-o", "Dir::Etc::SourceList=%s/sources.list" % tmp, "-o", "Dir::Etc::SourceParts=-",
             "-o", "Dir::State::Lists=%s/lists" % tmp, "-o", "Dir::Cache::pkgcache=", "-o", "Dir::Cache::srcpkgcache="]
    say("getting %s of %s-backports" % (PACKAGES[0], codename()))
    apt_get(apart + ["update"])
    os.makedirs(tmp + "/debs")
    apt_get(apart + ["download"] + PACKAGES, cwd=tmp + "/debs")
    for deb in sorted(os.listdir(tmp + "/debs")):
        deb_extract(os.path.join(tmp, "debs", deb), tmp + "/root")
    share = at + "/root/usr/share/"
    with open(tmp + "/bin/" + PROGRAM, "w") as f:
        f.write('#!/bin/sh\nexec %s/root/usr/bin/%s -L %sseabios -L %sqemu "$@"\n' % (at, PROGRAM, share, share))
    os.chmod(tmp + "/bin/" + PROGRAM, 0o755)
    for done in ("/debs", "/lists"):
        shutil.rmtree(tmp + done)
    shutil.rmtree(at, ignore_errors=True)
    os.rename(tmp, at)
    try:
        found = version(at + "/bin/" + PROGRAM)
        if found < FIRST:
            raise Fail("%s-backports has QEMU %d.%d; bursts of UDP need %d.%d" % (codename(), *found, *FIRST))
    except BaseException:
        shutil.rmtree(at)
        raise
