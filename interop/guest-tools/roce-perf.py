#!/usr/bin/env python3
"""The protocol of `bowline perf` over a kernel's RDMA device, both roles, by way of pyverbs.

usage: roce-perf.py server ADDRESS PORT [COUNT]
       roce-perf.py client LOCAL REMOTE PORT OP,MODE,SIZE,ITERATIONS,DEPTH ...

OP: send write read atomic; MODE: bw lat. One connection for each list. Data have a pattern, which the receiving side checks: the
server what was sent or written, the client what was read. COUNT: clients served one after
another. Prints one JSON object per connection. Exit code 0 when all was right.
"""
import json
import os
import struct
import sys
import time

import pyverbs.cm_enums as ce
import pyverbs.enums as e
from pyverbs.cmid import CMID, AddrInfo, CMEvent, CMEventChannel, ConnParam
from pyverbs.cq import CQ
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPCap, QPInitAttr
from pyverbs.wr import SGE, RecvWR, SendWR

OPS, MODES = ("send", "write", "read", "atomic"), ("bw", "lat")
ORDER = struct.Struct("!4sBBBBIQIQI")
ACCESS = (e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE | e.IBV_ACCESS_REMOTE_READ
          | e.IBV_ACCESS_REMOTE_ATOMIC)
LIMIT = 60
# pyverbs does not survive the order in which the collector would take these apart
KEPT = []


class Wrong(Exception):
    pass


def pattern(n):
    """Byte i is 31 i xor (i / 256): no two packets are alike."""
    return bytes((31 * i ^ i >> 8) & 0xFF for i in range(n))


class Link:
    """Queue pair and memory of one connection."""

    def __init__(self, cid, op, mode, size, depth):
        self.cid, self.op, self.mode, self.size, self.depth = cid, op, mode, size, depth
        self.pd = PD(cid.context)
        self.cq = CQ(cid.context, 4 * depth + 64)
        cap = QPCap(max_send_wr=depth + 16, max_recv_wr=2 * depth + 16, max_send_sge=1, max_recv_sge=1)
        self.qp = QP(self.pd, QPInitAttr(qp_type=e.IBV_QPT_RC, scq=self.cq, rcq=self.cq, cap=cap, sq_sig_all=1))
        self.mr = MR(self.pd, max(size, 8), ACCESS)
        self.sends, self.recvs = 0, 0
        self.to(e.IBV_QPS_INIT)

    def to(self, state):
        attr, mask = self.cid.init_qp_attr(state)
        if state == e.IBV_QPS_INIT:
            attr.qp_access_flags = ACCESS
        self.qp.modify(attr, mask)

    def param(self, data):
        p = ConnParam(resources=16, depth=16, retry=7, rnr_retry=7, qp_num=self.qp.qp_num, data_len=len(data))
        p.set_private_data(data)
        return p

    def takes_receives(self):
        return self.op == "send" or (self.op == "write" and self.mode == "lat")

    def receive(self, n):
        size = self.size if self.op == "send" else 0
        for _ in range(n):
            self.qp.post_recv(RecvWR(num_sge=1, sg=[SGE(self.mr.buf, size, self.mr.lkey)]))

    def post(self, op, target):
        wr = SendWR(opcode=op, num_sge=1, sg=[SGE(self.mr.buf, self.size, self.mr.lkey)])
        if op == e.IBV_WR_ATOMIC_FETCH_AND_ADD:
            wr.set_wr_atomic(target[1], target[0], 1, 0)
        elif op != e.IBV_WR_SEND:
            wr.set_wr_rdma(target[1], target[0])
        self.qp.post_send(wr)

    def wait(self, sends, recvs):
        """Until so many have completed in all."""
        end = time.monotonic() + LIMIT
        while self.sends < sends or self.recvs < recvs:
            n, got = self.cq.poll(16)
            for wc in got:
                if wc.status != e.IBV_WC_SUCCESS:
                    raise Wrong("completion with status %d" % wc.status)
                if wc.opcode & e.IBV_WC_RECV:
                    self.recvs += 1
                else:
                    self.sends += 1
            if not n and time.monotonic() > end:
                raise Wrong("nothing for %d s (%d sends, %d receives done)" % (LIMIT, self.sends, self.recvs))

    def put(self, data):
        if data:
            self.mr.write(data, len(data))

    def check(self, wanted):
        got = self.mr.read(self.size, 0) if self.size else b""
        if got != wanted:
            at = next((i for i in range(self.size) if got[i] != wanted[i]), None)
            raise Wrong("byte %s of %d differs" % (at, self.size))


def event(ch, wanted):
    ev = CMEvent(ch)
    while ev.event_type == ce.RDMA_CM_EVENT_TIMEWAIT_EXIT:
        ev.ack_cm_event()
        ev = CMEvent(ch)
    if ev.event_type != wanted:
        text = ev.event_str()
        ev.ack_cm_event()
        raise Wrong("event %s" % text)
    return ev


def client(local, remote, port, op, mode, size, iterations, depth):
    ch = CMEventChannel()
    cid = CMID(creator=ch, port_space=ce.RDMA_PS_TCP)
    cid.resolve_addr(AddrInfo(src=local, dst=remote, dst_service=port, port_space=ce.RDMA_PS_TCP))
    event(ch, ce.RDMA_CM_EVENT_ADDR_RESOLVED).ack_cm_event()
    cid.resolve_route()
    event(ch, ce.RDMA_CM_EVENT_ROUTE_RESOLVED).ack_cm_event()
    depth = 1 if mode == "lat" else depth
    link = Link(cid, op, mode, size, depth)
    KEPT.extend((ch, cid, link))
    if op in ("send", "write"):
        link.put(pattern(size))
    if mode == "lat" and link.takes_receives():
        link.receive(min(2, iterations))
    data = ORDER.pack(b"bwpf", 1, OPS.index(op), MODES.index(mode), 0, size, iterations, depth, link.mr.buf,
                      link.mr.rkey)
    cid.connect(link.param(data))
    ev = event(ch, ce.RDMA_CM_EVENT_CONNECT_RESPONSE)
    magic, addr, key = struct.unpack("!4sQI", bytes(ev.private_data)[:16])
    ev.ack_cm_event()
    if magic != b"bwpf":
        raise Wrong("not a server of bowline perf")
    link.to(e.IBV_QPS_RTR)
    link.to(e.IBV_QPS_RTS)
    cid.establish()
    code = {"send": e.IBV_WR_SEND, "read": e.IBV_WR_RDMA_READ, "atomic": e.IBV_WR_ATOMIC_FETCH_AND_ADD,
            "write": e.IBV_WR_RDMA_WRITE if mode == "bw" else e.IBV_WR_RDMA_WRITE_WITH_IMM}[op]
    t0 = time.monotonic()
    for n in range(iterations):
        link.post(code, (addr, key))
        if mode == "bw":
            link.wait(n + 2 - depth, 0)
        else:
            link.wait(n + 1, n + 1 if link.takes_receives() else 0)
            if link.takes_receives() and n + 2 < iterations:
                link.receive(1)
    link.wait(iterations, 0)
    seconds = time.monotonic() - t0
    if op == "read":
        link.check(pattern(size))
    elif op == "atomic":
        link.post(e.IBV_WR_RDMA_READ, (addr, key))
        link.wait(iterations + 1, 0)
        link.check(struct.pack("=Q", iterations))
    elif mode == "lat":
        link.check(pattern(size))
    cid.disconnect()
    return finish(ch, op, mode, size, iterations, seconds)


def finish(ch, op, mode, size, iterations, seconds):
    ev = CMEvent(ch)
    while ev.event_type != ce.RDMA_CM_EVENT_DISCONNECTED:
        ev.ack_cm_event()
        ev = CMEvent(ch)
    ev.ack_cm_event()
    return dict(op=op, mode=mode, size=size, iterations=iterations, seconds=seconds,
                gigabytes_per_second=size * iterations / seconds / 1e9)


def serve(ch, lid):
    ev = event(ch, ce.RDMA_CM_EVENT_CONNECT_REQUEST)
    magic, version, op, mode, _, size, iterations, depth, addr, key = ORDER.unpack(
        bytes(ev.private_data)[:ORDER.size])
    if magic != b"bwpf" or version != 1:
        raise Wrong("not a client of bowline perf")
    op, mode = OPS[op], MODES[mode]
    cid = CMID(creator=ev, listen_id=lid)
    ev.ack_cm_event()
    link = Link(cid, op, mode, size, depth)
    KEPT.extend((ev, cid, link))
    if op == "read":
        link.put(pattern(size))
    posted = 0
    if link.takes_receives():
        posted = min(2 * depth, iterations)
        link.receive(posted)
    link.to(e.IBV_QPS_RTR)
    link.to(e.IBV_QPS_RTS)
    cid.accept(link.param(struct.pack("!4sQI", b"bwpf", link.mr.buf, link.mr.rkey)))
    event(ch, ce.RDMA_CM_EVENT_ESTABLISHED).ack_cm_event()
    t0 = time.monotonic()
    if link.takes_receives():
        for n in range(iterations):
            link.wait(0, n + 1)
            if posted < iterations:
                link.receive(1)
                posted += 1
            if mode == "lat":
                link.post(e.IBV_WR_SEND if op == "send" else e.IBV_WR_RDMA_WRITE_WITH_IMM, (addr, key))
    done = finish(ch, op, mode, size, iterations, max(time.monotonic() - t0, 1e-9))
    if op in ("send", "write"):
        link.check(pattern(size))
    elif op == "atomic":
        link.check(struct.pack("=Q", iterations))
    cid.disconnect()
    return done


def main(argv):
    if len(argv) > 5 and argv[1] == "client":
        for job in argv[5:]:
            op, mode, *numbers = job.split(",")
            try:
                print(json.dumps(client(*argv[2:5], op, mode, *map(int, numbers))), flush=True)
            except Wrong as error:
                raise Wrong("%s: %s" % (job, error))
        return 0
    if len(argv) > 3 and argv[1] == "server":
        ch = CMEventChannel()
        lid = CMID(creator=ch, port_space=ce.RDMA_PS_TCP)
        lid.bind_addr(AddrInfo(src=argv[2], src_service=argv[3], port_space=ce.RDMA_PS_TCP, flags=ce.RAI_PASSIVE))
        lid.listen()
        for _ in range(int(argv[4]) if len(argv) > 4 else 1):
            print(json.dumps(serve(ch, lid)), flush=True)
        return 0
    sys.stderr.write(__doc__)
    return 2


if __name__ == "__main__":
    try:
        code = main(sys.argv)
    except Wrong as error:
        print(json.dumps({"error": str(error)}), flush=True)
        code = 1
    sys.stderr.flush()
    os._exit(code)
