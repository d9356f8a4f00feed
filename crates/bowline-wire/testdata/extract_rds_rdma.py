#!/usr/bin/env python3
"""Take whole connections of RDS over RoCE out of packet captures.

usage: extract_rds_rdma.py CAPTURE_DIR

Writes NAME.bin and NAME.txt beside this script for every row of CASES. The .bin holds all RoCE
datagrams back to back, each from the IPv4 header, which tells its length, to the ICRC. The .txt
says what is in them, one message a line, behind the number of its last datagram: what the
connection manager was told, the frames of RDS, and RDMA operations. It is decoded here, by code
that shares nothing with the crate. Reads Ethernet captures (classic pcap); needs nothing but
Python.
"""

import pathlib
import struct
import sys

import extract

CASES = [
    ("rds-ib", "pings, messages of 64 and 10000 bytes both ways, twenty of 16 bytes one way"),
    ("rds-ib-credits", "flow control is switched on, which has no effect (IB-72)"),
    ("rds-ib-rdma", "the second side writes 20000 bytes into the first one, then reads as many"),
]

MTU = 1024
CM_NAMES = {0x10: "REQ", 0x13: "REP", 0x14: "RTU"}
# Offset of the private data in a MAD of the connection manager.
CM_PRIVATE = {0x10: 24 + 140, 0x13: 24 + 36}
# Where the starting PSN is.
CM_PSN = {0x10: 24 + 44, 0x13: 24 + 20}


def datagrams(path):
    """Yields IPv4 packets from the IP header on."""
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


def dotted(raw):
    return ".".join(str(byte) for byte in raw)


def told(mad):
    """What a message of the connection manager says."""
    kind = struct.unpack_from("!H", mad, 16)[0]
    text = CM_NAMES[kind]
    if kind not in CM_PRIVATE:
        return text
    text += " psn 0x%06x" % int.from_bytes(mad[CM_PSN[kind]:CM_PSN[kind] + 3], "big")
    private = mad[CM_PRIVATE[kind]:]
    if kind == 0x10:
        text += " service 0x%x from port %d" % (
            int.from_bytes(mad[32:40], "big"), int.from_bytes(private[2:4], "big"))
        private = private[36:]
    major, minor, mask, tos, ack, credit = struct.unpack_from("!BBHB3xQI", private, 8)
    return text + " | %s to %s version %d.%d minors 0x%x tos %d ack %d credit %d" % (
        dotted(private[:4]), dotted(private[4:8]), major, minor, mask, tos, ack, credit)


def lines(packets):
    frames = {}
    for number, ip in enumerate(packets, 1):
        source, bth, rest = dotted(ip[12:16]), ip[28:40], ip[40:-4]
        opcode, solicited, pad = bth[0], bth[1] >> 7, bth[1] >> 4 & 3
        rest = rest[:len(rest) - pad]
        text = None
        if opcode == 0x64:
            text = told(rest[8:])
        elif opcode in (0, 1, 2, 4):
            if opcode in (0, 4):
                assert source not in frames
                frames[source] = b""
            frames[source] += rest
            if opcode in (2, 4):
                frame = frames.pop(source)
                text = "frame %d%s" % (len(frame), " solicited" if solicited else "")
                text += extract.line(0, frame[:48], None)[1:]
        elif opcode in (6, 10, 12):
            address, key, length = struct.unpack("!QII", rest[:16])
            text = "%s 0x%08x+0x%x len %d" % (
                "read" if opcode == 12 else "write", key, address, length)
        else:
            # The rest of a write, an answer to a read, an acknowledgement.
            assert opcode in (7, 8, 0xD, 0xE, 0xF, 0x11), opcode
        if text:
            yield "%d: %s %s" % (number, source, text)
    assert not frames


def main():
    captures, here = pathlib.Path(sys.argv[1]), pathlib.Path(__file__).parent
    for name, note in CASES:
        packets = list(datagrams(captures / (name + ".pcap")))
        (here / (name + ".bin")).write_bytes(b"".join(packets))
        (here / (name + ".txt")).write_text(
            "# %s\n# from %s.pcap, captured with Linux 6.12.117+deb12-amd64, rdma_rxe\n%s\n"
            % (note, name, "\n".join(lines(packets))))


main()
