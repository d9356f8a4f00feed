"""Which kernel is used; known before the settings are imported."""
import os
import re
import sys


def choose(argv):
    """Take --kernel SERIES, which both commands have, into the environment, where settings are read from."""
    given = [x[len("--kernel="):] for x in argv if x.startswith("--kernel=")]
    given += [value for word, value in zip(argv, argv[1:]) if word == "--kernel"]
    if not given:
        return
    if not re.match(r"^[0-9]+\.[0-9]+$", given[-1]):
        sys.exit("--kernel: a series of kernels is two numbers, as 7.2, and not %r" % given[-1])
    os.environ["BOWLINE_LAB_KERNEL"] = given[-1]
