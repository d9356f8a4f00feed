#!/usr/bin/env python3
"""Take RTRS and RNBD messages of real kernels out of packet captures.

usage: extract_rtrs.py CAPTURE_DIR

Prints lines `KIND HEX` for rtrs-messages.txt, every distinct message once, at most ALIKE of one
kind and length: con-req, con-rsp and con-rej (private data of the connection manager), info-req and
info-rsp, `request-IMMEDIATE` (what follows the data in the chunk: user message and header),
`done-IMMEDIATE` (what came with it), `answer` (SESS_INFO_RSP or OPEN_RSP). Reads
Ethernet captures (classic pcap); needs nothing but Python. The test adds what it reads in them.
"""

import pathlib
import struct
import sys

ALIKE = 2
NAMES = ["rtrs-inv-y", "rtrs-inv-n", "rnbd-ops"]
FIRST, MIDDLE, LAST = {0, 6}, {1, 7}, {2, 3, 4, 5, 8, 9, 10, 11, 0x16, 0x17}
WRITES, IMM, RETH, IETH = set(range(6, 12)), {3, 5, 9, 11}, {6, 10, 11}, {0x16, 0x17}


def packets(path):
    raw = path.read_bytes()
    assert struct.unpack_from("<I", raw)[0] == 0xA1B2C3D4, "not a pcap of this byte order"
    at = 24
    while at < len(raw):
        taken = struct.unpack_from("<I", raw, at + 8)[0]
        frame = raw[at + 16:at + 16 + taken]
        at += 16 + taken
        ip = frame[14:14 + struct.unpack_from("!H", frame, 16)[0]]
        if frame[12:14] == b"\x08\x00" and ip[9] == 17 and ip[22:24] == b"\x12\xb7":
            yield ip[28:-4]


def messages(path):
    open_writes = {}
    for ib in packets(path):
        opcode, pad = ib[0], ib[1] >> 4 & 3
        to = ib[5:8]
        if opcode == 0x64:
            mad = ib[20:]
            kind = struct.unpack_from("!H", mad, 16)[0]
            if kind in (0x10, 0x12, 0x13):
                yield {0x10: ("con-req", mad[200:256]), 0x12: ("con-rej", mad[108:164]),
                       0x13: ("con-rsp", mad[60:116])}[kind]
            continue
        if opcode not in FIRST | MIDDLE | LAST:
            continue
        at = 12 + 16 * (opcode in RETH) + 4 * (opcode in IMM) + 4 * (opcode in IETH)
        body = ib[at:len(ib) - pad]
        start = ib[12:28] if opcode in RETH else b""
        if opcode in FIRST:
            open_writes[to] = bytearray()
        whole = bytes(open_writes.setdefault(to, bytearray()) + body)
        if opcode not in LAST:
            open_writes[to] += body
            continue
        del open_writes[to]
        imm = struct.unpack_from("!I", ib, at - 4)[0] if opcode in IMM else None
        if imm is None and opcode in WRITES:
            if len(whole) in (36, 56):
                yield "answer", whole
        elif imm is None and len(whole) == 272:
            yield "info-req", whole
        elif imm is None and whole:
            yield "info-rsp", whole
        elif imm is not None and imm >> 28:
            yield "done-%08x" % imm, whole
        elif imm is not None:
            # the header says how long the user message before it is
            off = imm & 0x7ffff
            for size in (24, 8, 4):
                kind, usr = struct.unpack_from("<HH", whole, len(whole) - size) if len(whole) >= size else (0, 0)
                if (kind == 2 and size == 4) or (kind == 3 and size > 4 and usr in (36, 264, 32)):
                    break
            yield "request-%08x" % imm, whole[-(usr + size):]


def main():
    seen, alike = set(), {}
    for name in NAMES:
        print("# %s.pcap" % name)
        for kind, body in messages(pathlib.Path(sys.argv[1]) / (name + ".pcap")):
            key = (kind[:6], len(body), body[:1] + body[16:20] if kind[:4] == "requ" else b"", name)
            if (kind, body) in seen or alike.get(key, 0) >= ALIKE:
                continue
            seen.add((kind, body))
            alike[key] = alike.get(key, 0) + 1
            print(kind, body.hex())


main()
