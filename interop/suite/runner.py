"""Choosing, running and reporting."""
import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback

from lab.common import CACHE, HERE, NETNS, SERIES, Fail
from lab.guest import alive
from lab.prepare import prepare

from . import disk_speed, door_speed, machine, netem, probe, programs, rdmacore, rds_rdma, rnbd_guest, roce, rtrs, scenarios
from . import speed, verbs_programs
from .base import ALL, Wrong
from .table import table
from .world import Case, World, find_peer

# seconds that a case has beyond its own time, after its endpoints were closed, and after its guests are gone
BEYOND, CLOSED, RENEWED = 15, 20, 120
# they add their scenarios to ALL
MODULES = (scenarios, probe, programs, roce, verbs_programs, rdmacore, rds_rdma, rtrs, rnbd_guest, machine, disk_speed, door_speed, speed)


def parse(about, argv):
    p = argparse.ArgumentParser(prog="interop/run", description=about,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--list", action="store_true", help="the scenarios and what they show")
    p.add_argument("--only", action="append", default=[], metavar="NAME",
                   help="this scenario, or this case of one (repeatable)")
    p.add_argument("--subset", choices=("ci", "all"), default="all")
    p.add_argument("--kernel", metavar="SERIES", default=SERIES,
                   help="series of the kernel, e.g. 7.2 (default %(default)s)")
    p.add_argument("--self-check", action="store_true",
                   help="a second kernel plays the node: the scenarios against the reference itself")
    p.add_argument("--messages", type=int, metavar="N", help="messages each way in 'messages' (10000; ci 1000)")
    p.add_argument("--json", nargs="?", const="-", metavar="FILE", help="results as JSON, too")
    p.add_argument("--capture", action="store_true", help="keep a packet capture of every case")
    p.add_argument("--logs", metavar="DIR", default=os.path.join(CACHE, "logs"),
                   help="where counters and logs go (default %(default)s)")
    p.add_argument("--peer", metavar="FILE", help="the node's program (default: built with cargo)")
    p.add_argument("--bowline", metavar="FILE", help="the bowline command (default: built with cargo)")
    p.add_argument("--append", action="append", default=[], metavar="ARG", help="kernel argument of the guest")
    p.add_argument("--keep", action="store_true", help="leave the guests running at the end")
    p.add_argument("--repeat", type=int, default=1, metavar="N", help="run every case N times")
    p.add_argument("--fail-fast", action="store_true", help="end after the first failed case")
    return p.parse_args(argv)


def chosen(a):
    out = []
    for spec in ALL:
        for v in spec.variants():
            cid = Case(World.__new__(World), spec, v, 0, dry=True).id
            if a.only and not any(o in (spec.name, cid) for o in a.only):
                continue
            if not a.only and a.subset == "ci" and not spec.in_ci(v):
                continue
            out.append((spec, v, cid))
    names = {s.name for s, _, _ in out} | {cid for _, _, cid in out}
    for o in a.only:
        if o not in names:
            raise Fail("no scenario or case %s; see --list" % o)
    return out


def show_list():
    for s in ALL:
        n = len(list(s.variants()))
        print("%-18s %2d case%s  %s%s\n    %s" % (s.name, n, "s" if n > 1 else " ", "ci  " if s.ci else "",
                                                s.rows, s.about))
    return 0


def build(package, program):
    say("building " + program)
    root = os.path.dirname(HERE)
    r = subprocess.run(["cargo", "build", "--release", "-q", "-p", package], cwd=root)
    if r.returncode:
        raise Fail("cargo build of %s failed" % package)
    return find_peer(None, program)


def built(a, todo):
    """The programs that the chosen cases need. -> the node's, the bowline command"""
    peer = command = None
    if a.self_check:
        return peer, command
    if a.bowline or any(s.tool for s, _, _ in todo):
        command = find_peer(a.bowline) if a.bowline else build("bowline-cli", "bowline")
    if not a.bowline and any(s.preload for s, _, _ in todo):
        # `bowline run` looks for it beside the command
        build("bowline-preload", "libbowline_preload.so")
    if a.peer or any(not s.tool for s, _, _ in todo):
        peer = find_peer(a.peer) if a.peer else build("bowline-interop-peer", "bowline-interop-peer")
    return peer, command


def say(text):
    sys.stderr.write("interop: %s\n" % text)
    sys.stderr.flush()


def run_case(world, spec, v, scale):
    """-> dict of the result, and the thread that may still be in the case; never raises but for an interrupt"""
    c = Case(world, spec, v, scale)
    res = dict(case=c.id, scenario=spec.name, direction=v["dir"], paths=v["paths"], order=v["order"],
               family=v["family"], rows=spec.rows)
    if world.self_check and (v["paths"] == 1 or spec.self_check is not True):
        res.update(result="skipped", seconds=0.0, messages=0, looks=[],
                   note=spec.self_check if spec.self_check is not True else
                   "a kernel cannot be told to use one path")
        return res, None
    t0 = time.monotonic()
    err = []

    def body():
        try:
            c.begin()
            spec.fn(c)
        except Exception as e:
            if not err:
                err.append((e, traceback.format_exc()))

    t = threading.Thread(target=body, daemon=True)
    t.start()
    try:
        t.join(spec.timeout + BEYOND + (30 if scale > 2000 else 0))
    except KeyboardInterrupt:
        for ep in (c.n, c.k):
            if ep:
                ep.kill()
        raise
    if t.is_alive():
        err.insert(0, (Fail("not finished within its time"), ""))
        for ep in (c.n, c.k):
            if ep:
                ep.close(1)
        t.join(CLOSED)
    try:
        c.end(bool(err))
    except Exception as e:
        err.append((e, traceback.format_exc()))
    res.update(seconds=round(time.monotonic() - t0, 1), messages=c.messages, note="; ".join(c.notes),
               node=c.version)
    if err:
        e, tb = err[0]
        res["result"] = "FAILED"
        res["note"] = ("%s" % e if isinstance(e, (Wrong, Fail)) else "%s: %s" % (type(e).__name__, e)).strip()
        with open(c.log + ".error", "w") as f:
            f.write(tb or res["note"])
        res["looks"] = c.leftovers()
    else:
        res["result"], res["looks"] = "passed", []
    return res, t


def renew(world, case, body):
    """After a case that failed: what hangs in a guest, or was left there or on the host side, must not fail the cases
    behind it, which boot what they need."""
    say("the lab is set up anew after " + case)
    world.renew()
    body.join(RENEWED)
    if body.is_alive():
        # it would have its hands in the next cases
        raise Fail("case %s does not end, though its guests are gone" % case)


def run_cases(world, a, todo, results):
    """Adds the result of each case to the results."""
    failed = None
    for i, (spec, v, cid) in enumerate(todo):
        if failed:
            renew(world, *failed)
        r, body = run_case(world, spec, v, spec.ci_n if a.subset == "ci" else spec.n)
        results.append(r)
        say("%3d/%d %-7s %-28s %6.1f s %6d messages  %s" % (
            i + 1, len(todo), r["result"], r["case"], r["seconds"], r["messages"],
            r["note"] if r["result"] != "FAILED" else ""))
        failed = (cid, body) if r["result"] == "FAILED" else None
        if failed:
            report_failure(r)
            if a.fail_fast:
                break
        for g in world.guests():
            if not alive(g):
                say("guest %s is not running any more" % g)


def report_failure(r):
    say("%s FAILED: %s" % (r["case"], r["note"]))
    for x in r["looks"]:
        say("    see %s" % x)
        if x.endswith(".stderr") or ".dmesg" in x:
            with open(x, errors="replace") as f:
                for line in f.read().splitlines()[-6:]:
                    say("        | " + line)


def stop_signals():
    def stop(sig, frame):
        raise KeyboardInterrupt
    # also where the shell left SIGINT ignored, as it does for what runs in the background
    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGHUP, stop)


def main(about, argv=None):
    a = parse(about, argv)
    if a.list:
        return show_list()
    stop_signals()
    results, world = [], None
    t0 = time.monotonic()
    try:
        todo = chosen(a) * a.repeat
        if a.messages:
            for s in ALL:
                if s.name == "messages":
                    s.n = s.ci_n = a.messages
        c = prepare(quiet=True)
        peer, command = built(a, todo)
        prepared = time.monotonic() - t0
        world = World(peer, os.path.abspath(a.logs), a.self_check, a.capture, a.append, command)
        world.up()
        say("kernel %s, %d cases, lab ready after %.0f s (boot %s); logs in %s" % (
            c["kver"], len(todo), time.monotonic() - t0,
            " ".join("%.1f s" % b for b in world.boots), world.logs))
        run_cases(world, a, todo, results)
        code = 1 if any(r["result"] == "FAILED" for r in results) else 0
    except KeyboardInterrupt:
        say("interrupted")
        code = 130
    except Fail as e:
        say(str(e))
        code = 2
    finally:
        # not to be cut short by a second Ctrl-C
        for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(s, signal.SIG_IGN)
        if world and not a.keep:
            world.close()
        elif world:
            say("guests left running in namespace %s; BOWLINE_LAB_NETNS=%s interop/kernel-lab down all"
                % (NETNS, NETNS))
    if results:
        print(table(results, a.self_check))
        n = {k: sum(r["result"] == k for r in results) for k in ("passed", "FAILED", "skipped")}
        print("%d passed, %d failed, %d skipped; %d messages verified; %.0f s (preparation %.0f s)" % (
            n["passed"], n["FAILED"], n["skipped"], sum(r["messages"] for r in results),
            time.monotonic() - t0, prepared))
    if a.json and results:
        text = json.dumps(dict(kernel=c["kver"], self_check=a.self_check, subset=a.subset, results=results),
                          indent=1)
        if a.json == "-":
            print(text)
        else:
            with open(a.json, "w") as f:
                f.write(text + "\n")
    return code
