"""Compares what programs/walk.c has printed over a kernel's sockets and over bowline's.

walk.py EXPLAINED KERNEL BOWLINE

KERNEL may be compressed, and may have more sequences than BOWLINE. For each sequence the first
difference is told that EXPLAINED, tests/walk/explained.tsv, does not explain.
"""
import fnmatch
import gzip
import sys


def read(path):
    """-> lines by sequence, in their order: a step that is printed twice has two of them"""
    with (gzip.open if path.endswith(".gz") else open)(path, "rt", errors="replace") as f:
        lines = [line.rstrip("\n").split("\t", 2) for line in f]
    sequences = {}
    for step, call, result in lines:
        known = sequences.setdefault(step.partition(".")[0], {})
        n = 0
        while (step, n) in known:
            n += 1
        known[step, n] = (call, result)
    return sequences


def explanations(path):
    """-> patterns of a call and of both results"""
    with open(path) as f:
        lines = [line.rstrip("\n").split("|") for line in f if line.strip() and not line.startswith("#")]
    for line in lines:
        if len(line) != 4 or not all(x.strip() for x in line):
            raise SystemExit("%s: four words in each line, please: %s" % (path, line))
    return [[x.strip() for x in line[:3]] for line in lines]


def matches(pattern, text):
    return fnmatch.fnmatchcase(text, pattern.replace("[", "[[]"))


def is_explained(known, kernel, ours):
    """`kernel` and `ours` are a call and its result; None for none"""
    call = (kernel or ours)[0]
    results = [pair[1].replace("\t", " ") if pair else "nothing" for pair in (kernel, ours)]
    return any(matches(c, call) and matches(k, results[0]) and matches(o, results[1]) for c, k, o in known)


def compare(known, kernel, ours):
    """-> lines that tell of differences, and how many of them are explained"""
    told, explained = [], 0
    for sequence in ours:
        one, other = kernel.get(sequence, {}), ours[sequence]
        for place in list(one) + [p for p in other if p not in one]:
            a, b = one.get(place), other.get(place)
            if a == b:
                continue
            if is_explained(known, a, b):
                explained += 1
                continue
            told.append("%s\n  kernel   %s\n  bowline  %s" % (place[0], "\t".join(a or ("nothing",)), "\t".join(b or ("nothing",))))
            break
    return told, explained


def main():
    known = explanations(sys.argv[1])
    kernel, ours = read(sys.argv[2]), read(sys.argv[3])
    missing = [s for s in ours if s not in kernel]
    if missing or not ours:
        raise SystemExit("sequences that the kernel has not walked: %s" % missing[:5])
    told, explained = compare(known, kernel, ours)
    print("%d sequences, %d differences are explained, %d are not" % (len(ours), explained, len(told)))
    print("\n".join(told))
    raise SystemExit(bool(told))


if __name__ == "__main__":
    main()
