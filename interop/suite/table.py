"""The table at the end."""

ORDER = {"lo": "node < kernel", "hi": "node > kernel"}
WAY = {"both": "both ways", "k>n": "kernel to node", "n>k": "node to kernel"}


def table(results, self_check):
    head = ("scenario", "direction", "paths", "addresses", "messages", "result", "seconds", "checklist", "")
    rows = [head]
    for r in results:
        rows.append((r["scenario"], WAY[r["direction"]], str(r["paths"] or "-"),
                     ORDER[r["order"]] + (", IPv6" if r["family"] == 6 else ""), str(r["messages"]),
                     r["result"], "%.1f" % r["seconds"], r["rows"], r["note"][:100]))
    wide = [max(len(x[i]) for x in rows) for i in range(len(head))]
    right = {2, 4, 6}
    out = []
    for n, x in enumerate(rows):
        out.append("  ".join(v.rjust(w) if i in right else v.ljust(w)
                             for i, (v, w) in enumerate(zip(x, wide))).rstrip())
        if n == 0:
            out.append("  ".join("-" * w for w in wide[:-1]))
    if self_check:
        out.insert(0, "self-check: the node is a second kernel")
    return "\n".join(out)
