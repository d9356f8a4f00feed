#!/usr/bin/env python3
"""Take the golden frames of this folder out of packet captures.

usage: extract.py CAPTURE_DIR

Writes NAME.bin and NAME.txt beside this script for every row of CASES. The text is decoded here,
by code that shares nothing with the crate, so that the test compares two readings of the bytes.
Reads Ethernet captures (classic pcap) of IPv4; needs nothing but Python.
"""

import pathlib
import struct
import sys

HEADER = struct.Struct("!QQIHHBB4sH16s")
PORT = 16385

# name, capture, what: ("tcp", source, source port, destination port, frames at most)
#                   or ("ib", source, headers at most)
# and a sentence for the reader.
CASES = [
    ("stream-handshake-smaller", "rds-tcp-mprds", ("tcp", "10.99.0.11", 57445, PORT, 4),
     "path 0, smaller side to larger: map, probe ping, a user's ping, probe pong"),
    ("stream-handshake-larger", "rds-tcp-mprds", ("tcp", "10.99.0.12", PORT, 57445, 4),
     "path 0, larger side to smaller: map, probe ping, probe pong, a user's pong"),
    ("stream-data", "rds-tcp-mprds", ("tcp", "10.99.0.11", 49473, PORT, 8),
     "another path: a ping and two data messages of 64 bytes"),
    ("stream-congestion", "rds-tcp-congestion", ("tcp", "10.99.0.12", PORT, 59253, 2),
     "two maps: port 4000 congested, then no port"),
    ("stream-retransmitted", "rds-tcp-reconnect", ("tcp", "10.99.0.11", 38671, PORT, 8),
     "three messages of 300 bytes started on an earlier connection, sent again"),
    ("stream-legacy-peer", "rds-tcp-legacy", ("tcp", "10.99.0.250", PORT, 48089, 8),
     "a hand-made peer, not a kernel: no extensions, acks and checksums filled"),
    ("headers-ib", "rds-ib", ("ib", "10.99.0.11", 12),
     "headers only, over RoCE, where the kernel fills ack and checksum"),
    ("headers-ib-rdma-client", "rds-ib-rdma", ("ib", "10.99.0.11", 12),
     "headers only, over RoCE, with RDMA_DEST extensions"),
    ("headers-ib-rdma-server", "rds-ib-rdma", ("ib", "10.99.0.12", 12),
     "headers only, over RoCE, with RDMA extensions"),
]


def packets(path):
    """Yields (protocol, source address, bytes from the transport header on) of IPv4 packets."""
    raw = path.read_bytes()
    order = {0xA1B2C3D4: "<", 0xD4C3B2A1: ">", 0xA1B23C4D: "<"}[struct.unpack_from("<I", raw)[0]]
    assert struct.unpack_from(order + "I", raw, 20)[0] == 1, "not Ethernet"
    at = 24
    while at < len(raw):
        taken = struct.unpack_from(order + "I", raw, at + 8)[0]
        frame = raw[at + 16:at + 16 + taken]
        at += 16 + taken
        if frame[12:14] != b"\x08\x00":
            continue
        ip = frame[14:]
        total = struct.unpack_from("!H", ip, 2)[0]
        source = ".".join(str(b) for b in ip[12:16])
        yield ip[9], source, ip[(ip[0] & 15) * 4:total]


def tcp_stream(path, source, sport, dport):
    """Puts one direction of one TCP connection together."""
    parts, start = {}, None
    for protocol, src, seg in packets(path):
        if protocol != 6 or src != source or struct.unpack_from("!HH", seg) != (sport, dport):
            continue
        seq = struct.unpack_from("!I", seg, 4)[0]
        if seg[13] & 2:
            start = (seq + 1) & 0xFFFFFFFF
            continue
        data = seg[(seg[12] >> 4) * 4:]
        if data:
            start = seq if start is None else start
            parts.setdefault((seq - start) & 0xFFFFFFFF, data)
    out = b""
    for at in sorted(parts):
        if at <= len(out):
            out += parts[at][len(out) - at:]
    return out


def ib_headers(path, source):
    """Yields the RDS header of every RC SEND_FIRST or SEND_ONLY not to queue pair 1."""
    for protocol, src, seg in packets(path):
        if protocol == 17 and src == source and struct.unpack_from("!H", seg, 2)[0] == 4791:
            bth = seg[8:]
            if bth[0] in (0, 4) and bth[5:8] != b"\0\0\x01" and len(bth) >= 12 + 48 + 4:
                yield bth[12:60]


def extensions(area):
    sizes = {1: 4, 2: 4, 3: 8, 4: 8, 5: 2, 6: 4, 8: 1}
    out, at = [], 0
    while at < 16 and area[at] in sizes and at + 1 + sizes[area[at]] <= 16:
        kind, body = area[at], area[at + 1:at + 1 + sizes[area[at]]]
        number = int.from_bytes(body, "big")
        out.append({
            1: "version %d.%d" % (number >> 8, number & 255),
            2: "rdma 0x%08x" % number,
            3: "rdma-dest 0x%08x+0x%x" % (number >> 32, number & 0xFFFFFFFF),
            4: "rdma-bytes %d" % (number >> 32),
            5: "npaths %d" % number,
            6: "gen 0x%08x" % number,
            8: "sport-idx %d" % number,
        }[kind])
        at += 1 + len(body)
    tail = area[at:].rstrip(b"\0")
    return out + (["? " + tail.hex()] if tail else [])


def line(at, head, payload):
    seq, ack, length, sport, dport, flags, credit, _, csum, ext = HEADER.unpack(head)
    names = [n for b, n in ((1, "CONG_BITMAP"), (2, "ACK_REQUIRED"), (4, "RETRANSMITTED"))
             if flags & b]
    if flags & ~7:
        names.append("0x%02x" % (flags & ~7))
    text = "%d: seq %d %d->%d len %d flags %s" % (at, seq, sport, dport, length,
                                                "|".join(names) or "0")
    if flags == 1:
        text += " map"
    elif (sport, dport) in ((1, 0), (0, 1)):
        text += " probe-ping" if sport else " probe-pong"
    elif sport == 0 and dport or dport == 0 and sport:
        text += " ping" if sport else " pong"
    text += "".join(" %s %s" % (n, v) for n, v in (
        ("ack", ack or ""), ("credit", credit or ""), ("csum", "0x%04x" % csum if csum else ""))
        if v != "")
    found = extensions(ext)
    text += " ext " + ", ".join(found) if found else ""
    if flags == 1 and payload is not None:
        ports = [p for p in range(65536) if payload[p // 8] >> p % 8 & 1]
        text += " | " + {0: "no port congested", 1: "1 port congested:"}.get(
            len(ports), "%d ports congested:" % len(ports))
        text += "".join(" %d" % p for p in ports[:8]) + (" ..." if len(ports) > 8 else "")
    return text


def main():
    captures, here = pathlib.Path(sys.argv[1]), pathlib.Path(__file__).parent
    for name, capture, what, note in CASES:
        path = captures / (capture + ".pcap")
        if what[0] == "tcp":
            stream, at, lines = tcp_stream(path, *what[1:4]), 0, []
            while len(lines) < what[4] and len(stream) - at >= 48:
                end = at + 48 + struct.unpack_from("!I", stream, at + 16)[0]
                if end > len(stream):
                    break
                lines.append(line(at, stream[at:at + 48], stream[at + 48:end]))
                at = end
            data = stream[:at]
            where = "TCP %s:%d to port %d, from the first frame captured" % what[1:4]
        else:
            heads = list(ib_headers(path, what[1]))[:what[2]]
            data = b"".join(heads)
            lines = [line(i * 48, h, None) for i, h in enumerate(heads)]
            where = "RoCE sends of %s, the first 48 bytes of each" % what[1]
        assert lines, name
        (here / (name + ".bin")).write_bytes(data)
        (here / (name + ".txt")).write_text(
            "# %s\n# from %s.pcap, captured with Linux 6.12.117+deb12-amd64; %s\n%s\n"
            % (note, capture, where, "\n".join(lines)))


if __name__ == "__main__":
    main()
