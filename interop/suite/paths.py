"""Paths of bowline's client under load, as its control socket tells."""
import json
import threading
import time

from .base import want

UP, DOWN = "connected", "disconnected"


class Paths:
    """Those of its session s1, from these addresses to those. order(*words) runs `bowline rnbd` on its control socket."""

    def __init__(self, order, sources, servers):
        self.order, self.pairs = order, list(zip(sources, servers))

    def until(self, *states, seconds=10):
        """They come to these states; None: there is no such path."""
        expected = {"ip:" + server: state for (_, server), state in zip(self.pairs, states) if state}
        end = time.monotonic() + seconds
        while True:
            rows = json.loads(self.order("client", "path", "list", "json"))["outgoing paths"]
            now = {x["dst_addr"]: x["state"] for x in rows}
            if now == expected or time.monotonic() > end:
                break
            time.sleep(0.1)
        want(now == expected, "paths are %s, not %s", now, expected)

    def moved(self):
        """Requests that paths have taken over from others."""
        return sum(int(self.order("get", "class/rtrs-client/s1/paths/ip:%s@ip:%s/stats/rdma" % pair).split()[-1])
                   for pair in self.pairs)

    def lose_each(self, wire, load):
        """One wire after the other is cut silently, until its path is lost and a while longer, and healed; the next one is
        cut when that path is back. The load goes on. -> what there is to note"""
        notes = []
        for i in range(len(self.pairs)):
            time.sleep(2)
            before, t0 = self.moved(), time.monotonic()
            wire(i, "drop")
            self.until(*(DOWN if i == j else UP for j in range(len(self.pairs))))
            t1 = time.monotonic()
            time.sleep(2)
            load.goes_on()
            moved = self.moved() - before
            want(moved or len(self.pairs) == 1, "no request has moved from path %d to another", i)
            wire(i, "pass")
            t2 = time.monotonic()
            self.until(*(UP for _ in self.pairs), seconds=35)
            load.goes_on()
            notes.append("path %d lost after %.1f s, %d requests moved, back after %.1f s" % (
                i, t1 - t0, moved, time.monotonic() - t2))
        return "; ".join(notes)


class Load:
    """What runs while something else happens."""

    def __init__(self, run):
        self.run, self.result, self.error = run, None, None
        self.thread = threading.Thread(target=self.body, daemon=True)
        self.thread.start()

    def body(self):
        try:
            self.result = self.run()
        except Exception as e:
            self.error = e

    def goes_on(self):
        want(self.thread.is_alive(), "the load has ended: %s", self.error or self.result)

    def end(self, seconds=90):
        """-> what it returns, which it does by itself"""
        self.thread.join(seconds)
        want(not self.thread.is_alive(), "the load does not end")
        if self.error:
            raise self.error
        return self.result
