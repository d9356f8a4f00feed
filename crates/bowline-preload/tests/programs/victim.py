"""Sends as much as it can, from several sockets, until it is killed."""

import os
import socket
import sys
import threading

ONE, OTHER = sys.argv[1:3]


def flood():
    own = socket.socket(socket.AF_RDS, socket.SOCK_SEQPACKET, 0)
    own.bind((ONE, 0))
    peer = socket.socket(socket.AF_RDS, socket.SOCK_SEQPACKET, 0)
    peer.bind((OTHER, 0))
    while True:
        own.sendto(b"x" * 5000, peer.getsockname())
        peer.recv(6000)


for _ in range(4):
    threading.Thread(target=flood).start()
