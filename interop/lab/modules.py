"""Kernel modules that Debian's kernel leaves out: rtrs and rnbd.

They are compiled from Debian's own source package of the same version against its headers, in
the cache folder. Only their two folders are unpacked; nothing of them is kept in the repository.
Those of another suite's kernel are compiled by that suite's compiler, in a folder of its own.
"""
import os
import re
import shutil
import stat
import time

from .common import CACHE, SERIES, Fail, locked, need_root, run, say
from .prepare import apt_apart, apt_get, apt_show, closure, deb_extract, fetch_deb, merged_usr

# what compiles modules for a kernel of another suite, beside what its headers depend on
TOOLS = "binutils make dash bash coreutils sed grep gawk findutils diffutils perl-base".split()
# mode of boot -> modules, in the order of loading
LOADS = {
    "rtrs-client": ["rtrs-core", "rtrs-client"],
    "rtrs-server": ["rtrs-core", "rtrs-server"],
    "rnbd-client": ["rtrs-core", "rtrs-client", "rnbd-client"],
    "rnbd-server": ["rtrs-core", "rtrs-server", "rnbd-server"],
}
RTRS, RNBD = "drivers/infiniband/ulp/rtrs", "drivers/block/rnbd"
BUILDS = [
    (RTRS, ["CONFIG_INFINIBAND_RTRS=m", "CONFIG_INFINIBAND_RTRS_CLIENT=m", "CONFIG_INFINIBAND_RTRS_SERVER=m"]),
    (RNBD, ["CONFIG_BLK_DEV_RNBD=y", "CONFIG_BLK_DEV_RNBD_CLIENT=m", "CONFIG_BLK_DEV_RNBD_SERVER=m"]),
]


def needed(modes):
    """-> names of the modules these modes load, in order, each once."""
    return list(dict.fromkeys(m for mode in modes for m in LOADS.get(mode, [])))


def installed(c):
    """The kernel's headers and a compiler on this machine. -> (command before make, options of make)"""
    headers = "/usr/src/linux-headers-" + c["kver"]
    if not os.path.isdir(headers):
        say("installing the kernel's headers and a compiler")
        apt_get(["install", "-y", "--no-install-recommends", "make", "gcc",
                 "linux-headers-%s=%s" % (c["kver"], c["version"])])
    return [], []


def apart(c, root):
    """The same in a folder for chroot, out of the kernel's suites."""
    shutil.rmtree(root, ignore_errors=True)
    merged_usr(root)
    say("getting and unpacking headers and compiler of " + " and ".join(c["suites"]))
    for deb in closure(apt_apart(c["suites"]), ["linux-headers-%s=%s" % (c["kver"], c["version"])] + TOOLS):
        deb_extract(deb, root, exclude=["./usr/share/doc/*", "./usr/share/man/*", "./usr/share/locale/*",
                                        "./usr/share/info/*"])
    for d in ("dev", "proc", "tmp"):
        os.makedirs(os.path.join(root, d), exist_ok=True)
    os.mknod(root + "/dev/null", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    for link, to in (("sh", "dash"), ("awk", "gawk")):
        if not os.path.lexists("%s/usr/bin/%s" % (root, link)):
            os.symlink(to, "%s/usr/bin/%s" % (root, link))
    run(["ldconfig", "-r", root])
    with open("%s/usr/src/linux-headers-%s/.config" % (root, c["kver"])) as f:
        compiler = re.search(r'CONFIG_CC_VERSION_TEXT="(\S*gcc-\d+)', f.read())
    # objtool reads /proc; BTF of modules would need pahole
    return (["unshare", "-m", "sh", "-c", 'mount --rbind /proc "$0/proc" && exec chroot "$0" "$@"', root],
            ["CC=" + compiler.group(1) if compiler else "CC=gcc", "CONFIG_DEBUG_INFO_BTF_MODULES="])


def build(c):
    """Compile the modules for the kernel `c` of prepare, unless done. -> their folder."""
    out = os.path.join(CACHE, "k", c["kver"], "rtrs-modules")
    lock = locked(os.path.join(CACHE, "prepare.lock"), "prepare", 1800)
    try:
        if os.path.isdir(out):
            return out
        need_root()
        t0 = time.monotonic()
        suites = c.get("suites")
        apt = apt_apart(suites)
        tools = out + ".tools"
        enter, options = apart(c, tools) if suites else installed(c)
        package = [d for d in apt_show(["linux-source-" + SERIES], apt) if d["Version"] == c["version"]]
        if not package:
            raise Fail("apt knows no linux-source-%s of version %s" % (SERIES, c["version"]))
        work = out + ".work"
        shutil.rmtree(work, ignore_errors=True)
        os.makedirs(work)
        name = "linux-source-" + SERIES
        deb_extract(fetch_deb(package[0], apt), work, ["./usr/src/%s.tar.xz" % name])
        top = tools if suites else work
        run(["tar", "-xJf", "%s/usr/src/%s.tar.xz" % (work, name), "-C", top]
            + ["%s/%s" % (name, d) for d in (RTRS, RNBD)])
        tree = os.path.join(top, name)
        # as the compiler sees it
        seen = "/" + name if suites else tree
        more = ["KBUILD_EXTRA_SYMBOLS=%s/%s/Module.symvers" % (seen, RTRS),
                "KCPPFLAGS=-I%s/%s" % (seen, RTRS)]
        for folder, config in BUILDS:
            run([*enter, "make", "-s", "-C", "/usr/src/linux-headers-" + c["kver"], "M=%s/%s" % (seen, folder)] + config
                + options + (more if folder == RNBD else []) + ["modules"], timeout=1800)
        done = out + ".new"
        shutil.rmtree(done, ignore_errors=True)
        os.makedirs(done)
        for m in needed(LOADS):
            at = [os.path.join(tree, d, m + ".ko") for d, _ in BUILDS]
            at = [p for p in at if os.path.exists(p)]
            if not at:
                raise Fail("the build left no " + m + ".ko")
            run(["strip", "-g", "-o", os.path.join(done, m + ".ko"), at[0]])
        os.rename(done, out)
        shutil.rmtree(work)
        shutil.rmtree(tools, ignore_errors=True)
        say("modules of rtrs and rnbd ready in %.0f s" % (time.monotonic() - t0))
        return out
    finally:
        lock.close()
