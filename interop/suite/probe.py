"""`bowline probe` against the kernel: it keeps every rule that can be asked from outside."""
import json
import subprocess

from lab.common import LATER, NETNS

from .base import scenario, want
from .world import NODE

# what the probe expects of the series: of 7.3 the same as of 7.2
PROFILE = "linux-7.2" if LATER else "linux-6.12"


@scenario("probe", orders=("lo",), families=(4, 6), ci=True, timeout=120, bare=True, tool=True,
          self_check="the command is one side of it")
def probe(c):
    """`bowline probe rds` asks the kernel every rule, from an address below its own and one above."""
    folder = c.log + ".captures"
    argv = ["ip", "netns", "exec", NETNS, c.w.bowline(), "probe", "rds", c.k_addr, "--json", "-W", "10",
            "--profile", PROFILE, "--capture", folder]
    for order in ("lo", "hi"):
        argv += ["-I", NODE[(order, c.family)]]
    p = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=100, check=False)
    text = p.stdout.decode()
    want(p.returncode in (0, 1) and text.startswith("{"), "bowline probe: %s", text)
    found = json.loads(text)
    others = [r for r in found["rules"] if r["verdict"] != "agrees"]
    want(not others, "%s; captures in %s", others, folder)
    want(p.returncode == 0, "every rule is kept, but the exit status is %d", p.returncode)
    c.note("%d rules" % found["agrees"])
