#!/usr/bin/env python3
"""Take RoCE datagrams of real kernels out of packet captures.

usage: extract_roce.py CAPTURE_DIR

Writes roce-frames.hex beside this script: one IPv4 datagram a line, from the IP header to the ICRC.
Takes distinct ones, from every capture in turn and of every opcode and length there first, until
LIMIT characters are full. Reads Ethernet captures (classic pcap); needs nothing but Python.
"""

import pathlib
import struct
import sys

LIMIT = 95_000
MOST = 220
# Datagrams of one opcode and length, and of one acknowledge syndrome, taken from one capture.
ALIKE = 3
NAMES = ["rds-ib", "rds-ib-rdma", "rds-ib-credits", "rtrs-inv-y", "rtrs-inv-n", "rtrs-failover",
         "rnbd-ops"]


def datagrams(path):
    raw = path.read_bytes()
    assert struct.unpack_from("<I", raw)[0] == 0xA1B2C3D4, "not a pcap of this byte order"
    assert struct.unpack_from("<I", raw, 20)[0] == 1, "not Ethernet"
    at = 24
    while at < len(raw):
        taken = struct.unpack_from("<I", raw, at + 8)[0]
        frame = raw[at + 16:at + 16 + taken]
        at += 16 + taken
        ip = frame[14:14 + struct.unpack_from("!H", frame, 16)[0]]
        if frame[12:14] == b"\x08\x00" and ip[9] == 17 and ip[22:24] == b"\x12\xb7":
            yield ip


def main():
    captures, here = pathlib.Path(sys.argv[1]), pathlib.Path(__file__).parent
    kinds = {}
    for name in NAMES:
        for ip in datagrams(captures / (name + ".pcap")):
            kind = (name, ip[28], len(ip), ip[40] if ip[28] == 0x11 else None)
            alike = kinds.setdefault(kind, [])
            if len(alike) < ALIKE and ip not in alike:
                alike.append(ip)
    out, size = {name: [] for name in NAMES}, 0
    for nth in range(ALIKE):
        for (name, *_), alike in sorted(kinds.items(), key=lambda kind: kind[0][2]):
            if nth < len(alike) and sum(map(len, out.values())) < MOST:
                line = alike[nth].hex() + "\n"
                if size + len(line) <= LIMIT:
                    out[name].append(line)
                    size += len(line)
    text = ("# RoCE datagrams of rdma_rxe, Linux 6.12.117+deb12-amd64, from the IPv4 header to the\n"
            "# ICRC; taken from captures of rds, rtrs and rnbd by extract_roce.py.\n")
    for name, lines in out.items():
        text += "# %s.pcap\n%s" % (name, "".join(lines))
    (here / "roce-frames.hex").write_text(text)


main()
