/* What the peer programs share: the lines they exchange with the bench, the payload and its check,
 * the meter, and the collection of round trip times. The rules are those of role.rs and payload.rs. */
#ifndef BOWLINE_BENCH_COMMON_H
#define BOWLINE_BENCH_COMMON_H

#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define STREAM_SHIFT 48
#define BODY_EVERY 64

static volatile int stopping;
static char arg_line[4096], go_line[16384], ready_line[16384];

static void die(const char *what, const char *why) {
    printf("error %s: %s\n", what, why);
    fflush(stdout);
    exit(1);
}

/* Finds the value of `key` in a line of key=value words; empty when there is none. */
static void word(const char *line, const char *key, char *to, size_t room) {
    size_t len = strlen(key);
    to[0] = 0;
    for (const char *p = line; (p = strstr(p, key)); p += len) {
        if ((p == line || p[-1] == ' ') && p[len] == '=') {
            size_t n = strcspn(p + len + 1, " \n");
            if (n >= room) die("word too long", key);
            memcpy(to, p + len + 1, n);
            to[n] = 0;
            return;
        }
    }
}

static const char *arg(const char *key) {
    static char value[8][256];
    static int at;
    at = (at + 1) % 8;
    word(arg_line, key, value[at], sizeof value[at]);
    return value[at];
}

static uint64_t now_ns(clockid_t id) {
    struct timespec ts = {0, 0};
    clock_gettime(id, &ts);
    return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

static uint64_t cpu_of(pid_t pid) {
    clockid_t id;
    return clock_getcpuclockid(pid, &id) == 0 ? now_ns(id) : 0;
}

static void set_all_cc(const char *name) {
    DIR *dir = opendir("/proc/self/fd");
    struct dirent *e;
    while (dir && (e = readdir(dir))) {
        int fd = atoi(e->d_name), proto = 0;
        socklen_t len = sizeof proto;
        if (getsockopt(fd, SOL_SOCKET, SO_PROTOCOL, &proto, &len) == 0 && proto == IPPROTO_TCP)
            setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name, (socklen_t)strlen(name));
    }
    if (dir) closedir(dir);
}

static void cc_in_use(char *to, size_t room) {
    DIR *dir = opendir("/proc/self/fd");
    struct dirent *e;
    to[0] = 0;
    while (dir && (e = readdir(dir))) {
        int fd = atoi(e->d_name), proto = 0, listening = 0;
        char name[32] = "";
        socklen_t len = sizeof proto;
        if (getsockopt(fd, SOL_SOCKET, SO_PROTOCOL, &proto, &len) || proto != IPPROTO_TCP) continue;
        len = sizeof listening;
        if (getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listening, &len) || listening) continue;
        len = sizeof name - 1;
        if (getsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name, &len) || strstr(to, name)) continue;
        if (strlen(to) + strlen(name) + 2 > room) break;
        if (to[0]) strcat(to, ",");
        strcat(to, name);
    }
    if (dir) closedir(dir);
}

static void *watch(void *unused) {
    char line[64];
    (void)unused;
    if (fgets(line, sizeof line, stdin) && !strcmp(line, "stop\n")) {
        stopping = 1;
        usleep(300000);
    }
    _exit(0);
}

static void start(int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        if (strlen(arg_line) + strlen(argv[i]) + 2 > sizeof arg_line) die("start", "too many words");
        strcat(arg_line, argv[i]);
        strcat(arg_line, " ");
    }
    const char *pin = arg(strcmp(arg("side"), "rx") ? "tx_pin" : "rx_pin");
    if (pin[0]) {
        cpu_set_t set;
        CPU_ZERO(&set);
        CPU_SET(atoi(pin), &set);
        if (sched_setaffinity(0, sizeof set, &set)) die("sched_setaffinity", strerror(errno));
    }
}

/* Says that this side can be reached with `addr`, and waits for the other side's words. */
static void ready(const void *addr, size_t len) {
    size_t at = (size_t)sprintf(ready_line, "ready addr=");
    pthread_t thread;
    if (2 * len + at + 2 > sizeof ready_line) die("ready", "address too long");
    for (size_t i = 0; i < len; i++)
        at += (size_t)sprintf(ready_line + at, "%02x", ((const unsigned char *)addr)[i]);
    printf("%s\n", ready_line);
    fflush(stdout);
    if (!fgets(go_line, sizeof go_line, stdin) || strncmp(go_line, "go ", 3)) exit(0);
    if (pthread_create(&thread, NULL, watch, NULL)) die("pthread_create", strerror(errno));
}

/* Reads the other side's address out of its words; returns its length. */
static size_t peer_addr(unsigned char *to, size_t room) {
    static char hex[16384];
    size_t n = 0;
    word(go_line, "addr", hex, sizeof hex);
    for (; hex[2 * n] && hex[2 * n + 1] && n < room; n++) {
        unsigned byte;
        if (sscanf(hex + 2 * n, "%2x", &byte) != 1) break;
        to[n] = (unsigned char)byte;
    }
    return n;
}

static pid_t peer_pid(void) {
    char text[32];
    word(go_line, "pid", text, sizeof text);
    return (pid_t)atoi(text);
}

/* ---- payload: one stream, number 0 ---- */

static void fill_body(unsigned char *buf, size_t size) {
    for (size_t i = 0; i < size; i++) buf[i] = (unsigned char)((i * 131) ^ ((i >> 8) * 17));
}

static inline void stamp(unsigned char *buf, size_t size, uint64_t seq) {
    uint64_t tail = ~seq;
    memcpy(buf, &seq, 8);
    if (size >= 24) memcpy(buf + size - 8, &tail, 8);
}

static uint64_t next_seq;
static uint64_t slack; /* how far out of order a message may complete; 0 where order is promised */
static unsigned char *body;

static inline void check(const unsigned char *buf, size_t len, size_t size) {
    uint64_t seq = 0, tail = 0;
    if (len != size) die("check", "a message of a wrong length");
    memcpy(&seq, buf, 8);
    if (seq + slack < next_seq || seq > next_seq + slack) die("check", "a message out of order");
    next_seq++;
    if (size >= 24) {
        memcpy(&tail, buf + size - 8, 8);
        if (tail != ~seq) die("check", "a wrong tail");
    }
    if (seq % BODY_EVERY == 0) {
        size_t end = size >= 24 ? size - 8 : size;
        if (!body) {
            body = malloc(size);
            if (!body) die("malloc", strerror(errno));
            fill_body(body, size);
        }
        if (memcmp(buf + 8, body + 8, end - 8)) die("check", "a damaged body");
    }
}

/* ---- meter ---- */

static struct {
    uint64_t count, next, every, until, at, count0, own, peer, warm, window;
    int state; /* 0 idle, 1 warming up, 2 in the window, 3 over */
    pid_t pid;
} meter;

static void meter_start(size_t size) {
    meter.every = 65536 / size < 1 ? 1 : 65536 / size > 64 ? 64 : 65536 / size;
    meter.next = 1;
    meter.warm = strtoull(arg("warm_ms"), NULL, 10) * 1000000;
    meter.window = strtoull(arg("window_ms"), NULL, 10) * 1000000;
    meter.pid = peer_pid();
}

static void meter_look(void) {
    uint64_t now = now_ns(CLOCK_MONOTONIC);
    meter.next = meter.count + meter.every;
    if (meter.state == 0) {
        meter.until = now + meter.warm;
        meter.state = 1;
    } else if (meter.state == 1 && now >= meter.until) {
        meter.at = now;
        meter.count0 = meter.count;
        meter.own = now_ns(CLOCK_PROCESS_CPUTIME_ID);
        meter.peer = cpu_of(meter.pid);
        meter.state = 2;
    } else if (meter.state == 2 && now >= meter.at + meter.window) {
        char cc[128];
        uint64_t own = now_ns(CLOCK_PROCESS_CPUTIME_ID) - meter.own, peer = cpu_of(meter.pid);
        cc_in_use(cc, sizeof cc);
        printf("result n=%llu ns=%llu own_cpu=%llu peer_cpu=%llu syscalls=0 cc=%s\n",
               (unsigned long long)(meter.count - meter.count0), (unsigned long long)(now - meter.at),
               (unsigned long long)own, (unsigned long long)(peer - meter.peer), cc);
        fflush(stdout);
        meter.state = 3;
        meter.next = UINT64_MAX;
    }
}

static inline void meter_add(uint64_t n) {
    meter.count += n;
    if (meter.count >= meter.next) meter_look();
}

/* ---- round trips ---- */

static struct {
    uint64_t until, window, start, last, own, peer, n;
    uint32_t *ns;
    pid_t pid;
} laps;

#define LAPS_MAX (1u << 22)

static void laps_start(void) {
    laps.pid = peer_pid();
    laps.window = strtoull(arg("window_ms"), NULL, 10) * 1000000;
    laps.until = now_ns(CLOCK_MONOTONIC) + strtoull(arg("warm_ms"), NULL, 10) * 1000000;
    laps.ns = malloc(LAPS_MAX * sizeof *laps.ns);
    if (!laps.ns) die("malloc", strerror(errno));
}

static int lap_order(const void *a, const void *b) {
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return x < y ? -1 : x > y;
}

/* Notes the end of a round trip; true when the window is over and the result was said. */
static int lap(void) {
    static const double at[] = {0, .10, .25, .50, .75, .90, .95, .99, .999, .9999, 1};
    uint64_t now = now_ns(CLOCK_MONOTONIC);
    if (!laps.start) {
        if (now >= laps.until) {
            laps.start = now;
            laps.own = now_ns(CLOCK_PROCESS_CPUTIME_ID);
            laps.peer = cpu_of(laps.pid);
            now = now_ns(CLOCK_MONOTONIC);
        }
        laps.last = now;
        return 0;
    }
    laps.ns[laps.n++] = (uint32_t)(now - laps.last);
    laps.last = now;
    if (now < laps.start + laps.window && laps.n < LAPS_MAX) return 0;
    char cc[128];
    uint64_t own = now_ns(CLOCK_PROCESS_CPUTIME_ID) - laps.own, peer = cpu_of(laps.pid) - laps.peer;
    cc_in_use(cc, sizeof cc);
    qsort(laps.ns, laps.n, sizeof *laps.ns, lap_order);
    printf("result n=%llu ns=%llu own_cpu=%llu peer_cpu=%llu syscalls=0 cc=%s lat=",
           (unsigned long long)laps.n, (unsigned long long)(now - laps.start), (unsigned long long)own,
           (unsigned long long)peer, cc);
    for (size_t i = 0; i < sizeof at / sizeof *at; i++)
        printf("%s%u", i ? "," : "", laps.ns[(uint64_t)(at[i] * (double)(laps.n - 1) + 0.5)]);
    printf("\n");
    fflush(stdout);
    return 1;
}

#endif
