"""Endpoints: processes that speak the job protocol (see interop/README.md).

A node under test and the kernel's side look the same here: one line per
command in, one JSON object per event out.
"""
import json
import os
import queue
import signal
import struct
import subprocess
import threading
import time

from lab.agent import ERR, EXIT, OUT, STDIN, Agent
from lab.common import NETNS, Fail


class JobFailed(Exception):
    """A job ended with an error, or something asked of it did not come in time."""


class Job:
    """One job of an endpoint."""

    def __init__(self, ep, jid, text):
        self.ep, self.id, self.text = ep, jid, text
        self.events, self.end = [], None
        self.cond = threading.Condition()

    def put(self, ev):
        with self.cond:
            self.events.append(ev)
            if ev["ev"] in ("done", "error", "refused", "gone"):
                self.end = ev
            self.cond.notify_all()

    def event(self, name, timeout=30):
        """The next event of this name, taken out of the list."""
        end = time.monotonic() + timeout
        with self.cond:
            while True:
                for e in self.events:
                    if e["ev"] == name:
                        self.events.remove(e)
                        return e
                if self.end:
                    raise JobFailed("%s: %s instead of %s" % (self, why(self.end), name))
                left = end - time.monotonic()
                if left <= 0:
                    raise JobFailed("%s: no '%s' within %.0f s%s" % (self, name, timeout, self.progress()))
                self.cond.wait(min(left, 1.0))

    def wait(self, timeout=60):
        """Wait for the job's end. -> its result"""
        end = time.monotonic() + timeout
        with self.cond:
            while not self.end:
                left = end - time.monotonic()
                if left <= 0:
                    break
                self.cond.wait(min(left, 1.0))
        if not self.end:
            raise JobFailed("%s: no end within %.0f s%s" % (self, timeout, self.progress()))
        if self.end["ev"] != "done":
            raise JobFailed("%s: %s" % (self, why(self.end)))
        return self.end

    def progress(self):
        try:
            s = self.stat(2)
            return "; %d messages so far" % s["messages"]
        except (JobFailed, OSError, Fail):
            return "; it does not answer"

    def tell(self, what, **args):
        self.ep.write(line(self.id, what, args))

    def stat(self, timeout=10):
        self.tell("stat")
        return self.event("stat", timeout)

    def __str__(self):
        return "%s: %s" % (self.ep.name, self.text)


def why(ev):
    return ev.get("error") or ev["ev"]


def line(jid, verb, args):
    return (" ".join([jid, verb] + ["%s=%s" % kv for kv in args.items() if kv[1] is not None])
            + "\n").encode()


class Endpoint:
    """What a process in a guest and one on the host have in common."""

    # messages at the end of a stream for which no acknowledgement is asked [IB-68]
    unasked = 0

    def __init__(self, name, log):
        self.name, self.jobs, self.n = name, {}, 0
        self.log = open(log, "ab")
        self.hello = queue.Queue()
        self.rest = b""
        self.gone = False
        self.version = None

    def greet(self, timeout):
        try:
            ev = self.hello.get(timeout=timeout)
        except queue.Empty:
            raise JobFailed("%s did not start within %.0f s" % (self.name, timeout))
        if ev is None:
            raise JobFailed("%s ended at once; see %s" % (self.name, self.log.name))
        self.version = ev.get("node")

    def feed(self, data):
        *lines, self.rest = (self.rest + data).split(b"\n")
        for x in lines:
            self.log.write(x + b"\n")
            try:
                ev = json.loads(x)
            except ValueError:
                continue
            if ev.get("ev") == "hello":
                self.hello.put(ev)
            elif ev.get("id") in self.jobs:
                self.jobs[ev["id"]].put(ev)
        self.log.flush()

    def ended(self, what):
        self.gone = True
        self.hello.put(None)
        for j in list(self.jobs.values()):
            if not j.end:
                j.put(dict(ev="gone", error="the process ended (%s)" % what))

    def job(self, verb, **args):
        self.n += 1
        text = line("j%d" % self.n, verb, args)
        j = Job(self, "j%d" % self.n, text.decode().strip().split(" ", 1)[1])
        self.jobs[j.id] = j
        if self.gone:
            raise JobFailed("%s: the process has ended" % j)
        self.log.write(b"> " + text)
        self.write(text)
        return j

    def ask(self, verb, timeout=30, **args):
        """A job that ends by itself. -> its result"""
        return self.job(verb, **args).wait(timeout)


class HostNode(Endpoint):
    """A process on the host side, inside the lab's namespace."""

    def __init__(self, name, argv, log):
        super().__init__(name, log)
        self.err = open(log + ".stderr", "ab")
        self.p = subprocess.Popen(["ip", "netns", "exec", NETNS] + argv, stdin=subprocess.PIPE,
                                  stdout=subprocess.PIPE, stderr=self.err, start_new_session=True)
        threading.Thread(target=self.read, daemon=True).start()
        self.greet(20)

    def read(self):
        while True:
            data = os.read(self.p.stdout.fileno(), 65536)
            if not data:
                break
            self.feed(data)
        self.ended("status %s" % self.p.wait())

    def write(self, data):
        try:
            self.p.stdin.write(data)
            self.p.stdin.flush()
        except (OSError, ValueError) as e:
            raise JobFailed("%s: %s" % (self.name, e))

    def kill(self):
        """The process ends at once, without a word to its peers' sockets."""
        if self.p.poll() is None:
            os.killpg(self.p.pid, signal.SIGKILL)
        self.p.wait()

    def close(self, timeout=5):
        """Let it end by itself; kill it when it does not."""
        try:
            self.p.stdin.close()
        except OSError:
            pass
        try:
            self.p.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            return False
        return True


class GuestNode(Endpoint):
    """A process in a guest, reached over the lab's command channel."""

    def __init__(self, name, guest, argv, log):
        super().__init__(name, log)
        self.ag = Agent(guest)
        self.ag.start(argv)
        threading.Thread(target=self.read, daemon=True).start()
        self.greet(60)

    def read(self):
        status = "channel closed"
        try:
            for kind, pay in self.ag.frames(None):
                if kind == OUT:
                    self.feed(pay)
                elif kind == ERR:
                    self.log.write(pay)
                    self.log.flush()
                elif kind == EXIT:
                    status = "status %d" % struct.unpack("!i", pay)[0]
                    break
        except (OSError, ValueError, Fail):
            pass
        self.ended(status)

    def write(self, data):
        try:
            self.ag.send(STDIN, data)
        except OSError as e:
            raise JobFailed("%s: %s" % (self.name, e))

    def close(self, timeout=5):
        """The agent kills the process when its channel goes."""
        self.gone = True
        try:
            from lab.agent import EOF
            self.ag.send(EOF)
            end = time.monotonic() + timeout
            while time.monotonic() < end and not self.ended_seen():
                time.sleep(0.02)
        except OSError:
            pass
        self.ag.__exit__()

    def ended_seen(self):
        return not self.hello.empty()

    kill = close
