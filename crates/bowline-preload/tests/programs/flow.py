"""One of two programs that send to each other for a while, each through a node of its own.

It says that it is ready, waits for the file "go", tells what it has sent and what it got: how many
messages, and the sum over all of them in their order. It ends when there is the file "end"."""

import hashlib
import os
import random
import socket
import sys
import threading
import time

OWN, PEER, PORT, SECONDS, LONGEST, FOLDER = sys.argv[1:7]
PORT, LONGEST = int(PORT), int(LONGEST)
END = b"e"

s = socket.socket(socket.AF_RDS, socket.SOCK_SEQPACKET, 0)
s.bind((OWN, PORT))


def wait_for(name):
    while not os.path.exists(os.path.join(FOLDER, name)):
        time.sleep(0.01)


print("ready", flush=True)
wait_for("go")


def add(total, message):
    total.update(len(message).to_bytes(4, "big"))
    total.update(message)


def send():
    numbers = random.Random(f"{OWN} {PORT}")
    pool = numbers.randbytes(2 * LONGEST)
    total = hashlib.sha256()
    count = 0
    end = time.monotonic() + float(SECONDS)
    while True:
        at = numbers.randrange(LONGEST)
        # Short ones are as frequent as long ones; an empty one now and then.
        size = numbers.choice((0, 1, 100, 4000, LONGEST - 1)) * numbers.randrange(1, 101) // 100
        message = END if time.monotonic() > end else b"m" * (size > 0) + pool[at : at + size]
        s.sendto(message, (PEER, PORT))
        add(total, message)
        count += 1
        if message == END:
            break
    return f"sent {count} {total.hexdigest()}"


sent = []
sender = threading.Thread(target=lambda: sent.append(send()))
sender.start()
total = hashlib.sha256()
count = 0
message = None
while message != END:
    message, source = s.recvfrom(LONGEST + 1)
    assert source == (PEER, PORT)
    add(total, message)
    count += 1
sender.join()
# A receive, because a socket may be readable once too often: of a message that was taken already.
s.settimeout(0.5)
try:
    extra, source = s.recvfrom(LONGEST + 1)
    raise AssertionError(f"one too many: {len(extra)} bytes from {source}, {extra[:40]}")
except TimeoutError:
    pass
print(sent[0])
print(f"got {count} {total.hexdigest()}", flush=True)
# The socket stays until the other one has everything.
wait_for("end")
