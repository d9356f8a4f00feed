"""Programs of the host inside guests."""
import os
import subprocess

from lab.agent import guest_run, push
from lab.common import Fail

LIBS = "/tmp/lib/"


def install(c, built, to, guests=("a",), trial="--help"):
    """A program in these guests, with this host's C library if theirs is older; the words of the trial
    must run there. -> how it starts"""
    stripped = c.log + ".stripped"
    try:
        subprocess.run(["strip", "-o", stripped, built], check=True)
        built = stripped
    except (OSError, subprocess.CalledProcessError):
        pass
    try:
        copy(guests, built, to)
        if not run(guests[0], to, trial)[0]:
            return to
        c.note("with this host's C library")
        libs = [w for line in os.popen("ldd " + built) for w in line.split() if w.startswith("/")]
        for lib in libs:
            copy(guests, os.path.realpath(lib), LIBS + os.path.basename(lib))
    finally:
        if os.path.exists(stripped):
            os.unlink(stripped)
    loader = next(os.path.basename(x) for x in libs if "ld-linux" in x)
    program = "%s --library-path %s %s" % (LIBS + loader, LIBS, to)
    rc, err = run(guests[0], program, trial)
    if rc:
        raise Fail("%s does not run in the guest: %s" % (to, err))
    return program


def copy(guests, file, to):
    for g in guests:
        if push(g, file, to):
            raise Fail("could not copy %s into guest %s" % (to, g))


def run(guest, program, trial):
    rc, _, err = guest_run(guest, "%s %s < /dev/null" % (program, trial), 20)
    return rc, err
