"""Programs of the host inside guests."""
import json
import os
import subprocess

from lab.agent import guest_run, push
from lab.common import HERE, Fail

from .base import want

LIBS = "/tmp/lib/"
# where tests say what they did not test
SKIPS = "/tmp/skips"


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


def run_tests(c, guest, crate, name, env=""):
    """Runs these tests of a crate in a guest, one after the other. All must pass, and none be skipped."""
    program = install(c, tests(crate, name), "/tmp/%s-tests" % crate, (guest,))
    rc, out, err = guest_run(guest, "rm -f {0}; BOWLINE_SKIPS={0} RUST_BACKTRACE=0 {1} timeout 200 {2} --test-threads 1".format(
        SKIPS, env, program), 220)
    with open(c.log + ".tests", "w") as f:
        f.write(out + err)
    skipped = guest_run(guest, "cat " + SKIPS)[1]
    all_run = "test result: ok" in out and "; 0 ignored;" in out and " 0 passed" not in out
    want(rc == 0 and all_run and not skipped, "status %d: %s%s%s", rc, out[-2000:], err[-500:], skipped)
    c.note(next(x for x in out.splitlines() if x.startswith("test result")))


def tests(crate, name):
    """-> the program of these tests of a crate: given, or built"""
    given = os.environ.get("BOWLINE_%s_TESTS" % crate.upper())
    if given:
        return given
    crate = "bowline-" + crate
    # as cargo test --workspace builds it, so that it is built once
    p = subprocess.run(["cargo", "test", "-q", "--workspace", "--all-features", "--test", name, "--no-run",
                        "--message-format", "json"], cwd=os.path.dirname(HERE), stdout=subprocess.PIPE, check=False)
    built = [json.loads(x) for x in p.stdout.decode().splitlines() if x.startswith("{")]
    found = [x["executable"] for x in built
             if x.get("executable") and x["target"]["name"] == name and "/%s/" % crate in x["manifest_path"]]
    if p.returncode or not found:
        raise Fail("cargo did not build the tests of " + crate)
    return found[0]


def copy(guests, file, to):
    for g in guests:
        if push(g, file, to):
            raise Fail("could not copy %s into guest %s" % (to, g))


def run(guest, program, trial):
    rc, _, err = guest_run(guest, "%s %s < /dev/null" % (program, trial), 20)
    return rc, err
