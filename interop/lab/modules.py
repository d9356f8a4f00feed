"""Kernel modules that Debian's kernel leaves out: rtrs and rnbd.

They are compiled from Debian's own source package of the same version against its headers, in
the cache folder. Only their two folders are unpacked; nothing of them is kept in the repository.
"""
import os
import shutil
import time

from .common import CACHE, SERIES, Fail, locked, need_root, run, say
from .prepare import apt_get, apt_show, deb_extract, fetch_deb

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


def build(c):
    """Compile the modules for the kernel `c` of prepare, unless done. -> their folder."""
    out = os.path.join(CACHE, "k", c["kver"], "rtrs-modules")
    lock = locked(os.path.join(CACHE, "prepare.lock"), "prepare", 1800)
    try:
        if os.path.isdir(out):
            return out
        need_root()
        t0 = time.monotonic()
        headers = "/usr/src/linux-headers-" + c["kver"]
        if not os.path.isdir(headers):
            say("installing the kernel's headers and a compiler")
            apt_get(["install", "-y", "--no-install-recommends", "make", "gcc",
                     "linux-headers-%s=%s" % (c["kver"], c["version"])])
        package = [d for d in apt_show(["linux-source-" + SERIES]) if d["Version"] == c["version"]]
        if not package:
            raise Fail("apt knows no linux-source-%s of version %s" % (SERIES, c["version"]))
        work = out + ".work"
        shutil.rmtree(work, ignore_errors=True)
        os.makedirs(work)
        name = "linux-source-" + SERIES
        deb_extract(fetch_deb(package[0]), work, ["./usr/src/%s.tar.xz" % name])
        run(["tar", "-xJf", "%s/usr/src/%s.tar.xz" % (work, name), "-C", work]
            + ["%s/%s" % (name, d) for d in (RTRS, RNBD)])
        tree = os.path.join(work, name)
        more = ["KBUILD_EXTRA_SYMBOLS=%s/%s/Module.symvers" % (tree, RTRS),
                "KCPPFLAGS=-I%s/%s" % (tree, RTRS)]
        for folder, config in BUILDS:
            run(["make", "-s", "-C", headers, "M=%s/%s" % (tree, folder)] + config
                + (more if folder == RNBD else []) + ["modules"], timeout=1800)
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
        say("modules of rtrs and rnbd ready in %.0f s" % (time.monotonic() - t0))
        return out
    finally:
        lock.close()
