"""One side of a stream of messages, over RDS or over TCP with the length before each message.

Speaks with the bench as src/role.rs says.
"""

import os, socket, struct, sys, threading, time

AF_RDS = 21
PORT = 4000
cell = dict(word.split("=", 1) for word in sys.argv[1:])
size = int(cell["size"])
over_rds = cell["subject"] == "host-python"
is_receiver = cell["side"] == "rx"
stopped = False


def say(line):
    print(line, flush=True)


def cpu_ns(pid):
    """CPU time of a process by its clock, as clock_getcpuclockid(3) names it."""
    return time.clock_gettime_ns(~pid << 3 | 2)


def watch():
    global stopped
    for order in sys.stdin:
        if order.strip() != "stop":
            break
        stopped = True
    os._exit(0)


def ready(words=""):
    """Waits for the other side and returns what it said."""
    say("ready " + words)
    order = sys.stdin.readline().split()
    if order[:1] != ["go"]:
        sys.exit(0)
    threading.Thread(target=watch, daemon=True).start()
    return dict(word.split("=", 1) for word in order[1:])


def receive_all(count, receive):
    """Counts messages in a window after a warm-up, reports once, and goes on."""
    warm, window = int(cell["warm_ms"]) * 10**6, int(cell["window_ms"]) * 10**6
    begin, start, n = None, None, 0
    while True:
        message = receive()
        if len(message) != size or struct.unpack_from("<Q", message)[0] != n:
            sys.exit(f"message {n} is not the one that was due")
        n += 1
        if n % 16:
            continue
        now = time.monotonic_ns()
        if begin is None:
            begin = now
        elif start is None and now >= begin + warm:
            start = (now, n, time.process_time_ns(), cpu_ns(count))
        elif start and now >= start[0] + window:
            own, peer = time.process_time_ns() - start[2], cpu_ns(count) - start[3]
            say(f"result n={n - start[1]} ns={now - start[0]} own_cpu={own} peer_cpu={peer} syscalls=0 cc=")
            start, window = (now, n, 0, 0), 1 << 62


def send_all(send):
    message, n = bytearray(size), 0
    while not stopped:
        struct.pack_into("<Q", message, 0, n)
        send(message)
        n += 1
    say(f"done sent={n} syscalls=0 cc=")


def rds(address, port):
    s = socket.socket(AF_RDS, socket.SOCK_SEQPACKET)
    s.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, int(cell["buffer"]))
    s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, int(cell["buffer"]))
    s.bind((address, port))
    return s


def tcp():
    s = socket.socket()
    if cell["cc"]:
        s.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, cell["cc"].encode())
    s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return s


def main():
    pin = cell["rx_pin" if is_receiver else "tx_pin"]
    if pin:
        os.sched_setaffinity(0, {int(pin)})
    if over_rds and is_receiver:
        s = rds(cell["rx_node"], PORT)
        receive_all(int(ready()["pid"]), lambda: s.recv(size + 1))
    elif over_rds:
        s = rds(cell["tx_node"], PORT + 1)
        ready()
        to = (cell["rx_node"], PORT)
        send_all(lambda message: s.sendto(message, to))
    elif is_receiver:
        listener = tcp()
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        peer = ready(f"port={listener.getsockname()[1]}")
        s = listener.accept()[0]

        def receive():
            head = s.recv(4, socket.MSG_WAITALL)
            return s.recv(struct.unpack("<I", head)[0], socket.MSG_WAITALL) if head else sys.exit(0)

        receive_all(int(peer["pid"]), receive)
    else:
        s = tcp()
        s.connect(("127.0.0.1", int(ready()["port"])))
        head = struct.pack("<I", size)
        send_all(lambda message: s.sendall(head + message))


main()
