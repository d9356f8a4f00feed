#!/usr/bin/env python3
"""A failed case does not fail the cases behind it. Needs no lab: cases and guests are played."""
import contextlib
import io
import os
import sys
import tempfile
import threading
import time
import types
import unittest

sys.dont_write_bytecode = True
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from lab.common import Fail  # noqa: E402
from suite import runner  # noqa: E402
from suite.base import Spec  # noqa: E402


class World:
    """A lab with one guest, in which something may hang or be left behind."""

    self_check = False

    def __init__(self, logs):
        self.logs, self.renewed = logs, 0
        self.fresh()

    def fresh(self):
        self.left, self.gone = [], threading.Event()

    def guests(self):
        return []

    def renew(self):
        self.renewed += 1
        self.gone.set()
        self.fresh()


class Case:
    """As suite.world.Case: what the runner uses of it."""

    def __init__(self, world, spec, variant, scale, dry=False):
        self.w, self.id, self.log = world, spec.name, os.path.join(world.logs, spec.name)
        self.messages, self.notes, self.version, self.k, self.n = 0, [], None, None, None

    def begin(self):
        self.w.case = self.id
        if self.w.left:
            raise Fail("the guest has %s" % self.w.left)

    def end(self, failed):
        pass

    def leftovers(self):
        return []


def passes(c):
    """It does what it should."""


def leaves(c):
    """It fails, and something stays in the guest."""
    c.w.left.append("rxe0")
    raise Fail("a queue pair is left")


def hangs(c):
    """A program of the guest hangs, and the case cleans up when the guest is gone."""
    c.w.left.append("a program")
    c.w.gone.wait()
    time.sleep(0.3)
    c.w.cleaned_during = c.w.case
    raise Fail("the guest went away")


def stays(c):
    """It does not end at all."""
    c.w.end.wait()


class Runner(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.world = World(folder.name)
        before = {x: getattr(runner, x) for x in ("Case", "BEYOND", "CLOSED", "RENEWED")}
        self.addCleanup(lambda: [setattr(runner, x, value) for x, value in before.items()])
        runner.Case = Case
        runner.BEYOND, runner.CLOSED, runner.RENEWED = 0.2, 0.1, 30

    def run_cases(self, *bodies, fail_fast=False):
        todo = []
        for n, body in enumerate(bodies):
            spec = Spec(body, "%d-%s" % (n, body.__name__), timeout=0)
            todo.append((spec, next(spec.variants()), spec.name))
        a = types.SimpleNamespace(subset="all", fail_fast=fail_fast)
        results = []
        with contextlib.redirect_stderr(io.StringIO()):
            runner.run_cases(self.world, a, todo, results)
        return [(r["result"], r["note"]) for r in results]

    def test_what_a_case_left_behind_fails_no_other(self):
        got = self.run_cases(passes, leaves, passes, passes)
        self.assertEqual([r for r, _ in got], ["passed", "FAILED", "passed", "passed"], got)
        self.assertEqual(self.world.renewed, 1)

    def test_a_case_that_hangs_fails_no_other(self):
        got = self.run_cases(hangs, passes, passes)
        self.assertEqual([r for r, _ in got], ["FAILED", "passed", "passed"], got)
        self.assertEqual(got[0][1], "not finished within its time")
        self.assertEqual(self.world.cleaned_during, "0-hangs", "it has its hands in another case")

    def test_nothing_is_set_up_anew_for_nobody(self):
        self.assertEqual(len(self.run_cases(leaves, passes, fail_fast=True)), 1)
        self.run_cases(passes)
        self.world.fresh()
        self.run_cases(passes, leaves)
        self.assertEqual(self.world.renewed, 0)

    def test_a_case_that_never_ends_ends_the_run(self):
        self.world.end = threading.Event()
        self.addCleanup(self.world.end.set)
        runner.RENEWED = 0.2
        with self.assertRaisesRegex(Fail, "0-stays does not end"):
            self.run_cases(stays, passes)

    def test_ci_runs_the_orders_and_directions_it_is_told(self):
        def in_ci(**kw):
            spec = Spec(passes, "x", dirs=("k>n", "n>k"), **kw)
            return [(v["dir"], v["order"]) for v in spec.variants() if spec.in_ci(v)]
        self.assertEqual(in_ci(), [])
        self.assertEqual(len(in_ci(ci=True)), 4)
        self.assertEqual(in_ci(ci=("lo",)), [("k>n", "lo"), ("n>k", "lo")])
        self.assertEqual(in_ci(ci=True, ci_dirs=("n>k",)), [("n>k", "lo"), ("n>k", "hi")])


if __name__ == "__main__":
    unittest.main()
