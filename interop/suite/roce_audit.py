"""Checks every RoCEv2 frame of a capture, independently of the program that sent it."""
import json
import re
import shutil
import struct
import subprocess
import zlib

PORT = 4791
# of RC, UC and UD
OPCODES = {0x64, 0x65} | set(range(0x15)) | {0x16, 0x17} | set(range(0x20, 0x2C))


class Frame:
    """An Ethernet frame that carries UDP to RoCE's port."""

    def __init__(self, number, ip, udp, bth):
        self.number, self.ip, self.udp, self.bth = number, ip, udp, bth
        six = ip[0] >> 4 == 6
        self.source = ip[8:24] if six else ip[12:16]
        self.opcode = bth[0] if bth else None

    def icrc(self):
        """[ICRC-1] to [ICRC-5]: what its last four bytes should be."""
        ip, udp, bth = bytearray(self.ip), bytearray(self.udp), bytearray(self.bth[:-4])
        if ip[0] >> 4 == 6:
            ip[0] |= 0x0F
            ip[1:4] = b"\xff" * 3
            ip[7] = 0xFF
        else:
            ip[1] = ip[8] = 0xFF
            ip[10:12] = b"\xff\xff"
        udp[6:8] = b"\xff\xff"
        bth[4] = 0xFF
        return struct.pack("<I", zlib.crc32(b"\xff" * 8 + ip + udp + bth))

    def wrong(self):
        """What is not as the specification has it, or None."""
        ip, udp, bth = self.ip, self.udp, self.bth
        if len(bth) < 16:
            return "shorter than a header and its CRC"
        if struct.unpack("!H", udp[4:6])[0] != 8 + len(bth):
            return "UDP length is not that of the packet [OUT-9]"
        if self.icrc() != bth[-4:]:
            return "wrong ICRC: %s instead of %s" % (bth[-4:].hex(), self.icrc().hex())
        if ip[0] >> 4 == 4 and (ip[0] != 0x45 or ip[6:8] != b"\x40\x00"):
            return "IPv4 options, fragment or no DF [OUT-5]"
        if self.opcode not in OPCODES:
            return "opcode 0x%02x" % self.opcode
        if bth[1] & 0x0F or bth[4] or bth[8] & 0x7F:
            return "version or reserved bits are not zero [HDR-1]"
        if bth[2:4] != b"\xff\xff":
            return "partition key %s" % bth[2:4].hex()
        if (len(bth) - 16) % 4:
            return "not a multiple of four bytes long [HDR-3]"
        port = struct.unpack("!H", udp[:2])[0]
        if port < 0xC000 and port != PORT:
            return "source port %d: neither flow entropy [OUT-2] nor RoCE's own" % port
        return None


def frames(path):
    """The RoCE frames of a pcap file."""
    with open(path, "rb") as f:
        data = f.read()
    order = {b"\xd4\xc3\xb2\xa1": "<", b"\xa1\xb2\xc3\xd4": ">"}[data[:4]]
    at, number = 24, 0
    while at + 16 <= len(data):
        _, _, kept, full = struct.unpack(order + "IIII", data[at:at + 16])
        frame, at, number = data[at + 16:at + 16 + kept], at + 16 + kept, number + 1
        if kept < full or len(frame) < 42:
            continue
        kind = frame[12:14]
        if kind == b"\x08\x00" and frame[23] == 17:
            head = 14 + (frame[14] & 15) * 4
            end = 14 + struct.unpack("!H", frame[16:18])[0]
        elif kind == b"\x86\xdd" and frame[20] == 17:
            head, end = 54, 54 + struct.unpack("!H", frame[18:20])[0]
        else:
            continue
        if frame[head + 2:head + 4] == struct.pack("!H", PORT):
            yield Frame(number, frame[14:head], frame[head:head + 8], frame[head + 8:end])


def audit(path, ours):
    """Checks all frames. ours: address in bytes.
    -> (frames we sent, frames of the peer, list of what is wrong)"""
    mine, theirs, bad = 0, 0, []
    for f in frames(path):
        text = f.wrong()
        if f.source == ours:
            mine += 1
            who = "our"
        else:
            theirs += 1
            who = "the peer's"
        if text:
            bad.append("%s frame %d: %s" % (who, f.number, text))
    return mine, theirs, bad


def dissect(path):
    """Wireshark's opinion. -> list of what is wrong, or None without tshark"""
    if not shutil.which("tshark"):
        return None
    # protocols that are guessed from the payload of sends and writes
    off = [x for p in ("rpcordma", "iser", "smb_direct", "nvme-rdma", "smc") for x in ("--disable-protocol", p)]
    r = subprocess.run(["tshark", "-n", "-o", "udp.ignore_ipv6_zero_checksum:TRUE", "-r", path] + off + [
        "-Y", "udp.port == %d && (!infiniband || _ws.malformed || _ws.expert.severity == error)" % PORT,
        "-T", "fields", "-e", "frame.number", "-e", "_ws.col.Info", "-e", "_ws.expert.message"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=300)
    if r.returncode:
        return ["tshark: " + r.stderr.decode(errors="replace").strip()[-300:]]
    return ["tshark, frame " + re.sub(r"\s+", " ", x) for x in r.stdout.decode(errors="replace").splitlines()]


if __name__ == "__main__":
    import ipaddress
    import sys
    mine, theirs, bad = audit(sys.argv[1], ipaddress.ip_address(sys.argv[2]).packed)
    bad += dissect(sys.argv[1]) or []
    print(json.dumps({"ours": mine, "theirs": theirs, "wrong": bad[:20], "wrong_count": len(bad)}, indent=1))
    sys.exit(bool(bad))
