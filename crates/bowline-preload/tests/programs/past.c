/* System calls that no library sees: past ADDRESS */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "bowline_rds.h"

#define MUST(what)                                                                                \
    do {                                                                                          \
        if (!(what)) {                                                                            \
            fprintf(stderr, "line %d: %s: %s\n", __LINE__, #what, strerror(errno));               \
            exit(1);                                                                              \
        }                                                                                         \
    } while (0)

/* As a program makes it that has no C library. */
static long call_with(long call, int fd, const void *from, size_t len, void *more) {
#if defined __x86_64__
    long result;
    register void *fourth __asm__("r10") = more;
    __asm__ volatile("syscall"
                     : "=a"(result)
                     : "a"(call), "D"(fd), "S"(from), "d"(len), "r"(fourth)
                     : "rcx", "r11", "memory");
    return result;
#elif defined __aarch64__
    register long number __asm__("x8") = call;
    register long result __asm__("x0") = fd;
    register const void *bytes __asm__("x1") = from;
    register size_t count __asm__("x2") = len;
    register void *fourth __asm__("x3") = more;
    __asm__ volatile("svc 0" : "+r"(result) : "r"(number), "r"(bytes), "r"(count), "r"(fourth) : "memory");
    return result;
#else
    return syscall(call, fd, from, len, more);
#endif
}

static long call_itself(long call, int fd, const void *from, size_t len) {
    return call_with(call, fd, from, len, NULL);
}

static long write_itself(int fd, const void *from, size_t len) {
    return call_itself(SYS_write, fd, from, len);
}

static int bound(const char *address, int port) {
    struct sockaddr_in name = {.sin_family = AF_INET, .sin_port = htons(port)};
    int fd = socket(AF_RDS, SOCK_SEQPACKET, 0);
    MUST(fd >= 0);
    MUST(inet_pton(AF_INET, address, &name.sin_addr) == 1);
    MUST(bind(fd, (struct sockaddr *)&name, sizeof name) == 0);
    MUST(connect(fd, (struct sockaddr *)&name, sizeof name) == 0);
    return fd;
}

/* A socket over UDP, and one that sends to it. */
static void datagrams(int ends[2]) {
    struct sockaddr_in own = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
    socklen_t len = sizeof own;
    MUST((ends[0] = socket(AF_INET, SOCK_DGRAM, 0)) >= 0 && (ends[1] = socket(AF_INET, SOCK_DGRAM, 0)) >= 0);
    MUST(call_itself(SYS_bind, ends[0], &own, len) == 0);
    MUST(call_itself(SYS_getsockname, ends[0], &own, (size_t)&len) == 0);
    MUST(connect(ends[1], (struct sockaddr *)&own, len) == 0);
}

enum ends { PIPE, PAIR, PAIR_ITSELF, DATAGRAMS };

/* The number of a socket that was closed so is something else's. */
static int recycled(const char *address, int ends[2], enum ends kind) {
    int fd = bound(address, 4320);
    MUST(call_itself(SYS_close, fd, NULL, 0) == 0);
    if (kind == DATAGRAMS)
        datagrams(ends);
    else if (kind == PAIR_ITSELF)
        MUST(call_with(SYS_socketpair, AF_UNIX, (void *)SOCK_SEQPACKET, 0, ends) == 0);
    else
        MUST((kind == PAIR ? socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends) : pipe(ends)) == 0);
    MUST(ends[0] == fd);
    /* The node hears of it a moment later. */
    int again;
    while ((again = socket(AF_RDS, SOCK_SEQPACKET, 0)) >= 0) {
        struct sockaddr_in name = {.sin_family = AF_INET, .sin_port = htons(4320)};
        MUST(inet_pton(AF_INET, address, &name.sin_addr) == 1);
        int done = bind(again, (struct sockaddr *)&name, sizeof name);
        close(again);
        if (done == 0)
            break;
        MUST(errno == EADDRINUSE);
        usleep(1000);
    }
    MUST(again >= 0);
    return fd;
}

/* Each call finds out by itself what a number has become. */
static void are_something_else(const char *address) {
    char got[8];
    struct iovec piece = {got, sizeof got};
    struct mmsghdr one = {.msg_hdr = {.msg_iov = &piece, .msg_iovlen = 1}};
    int ends[2], rest[2], waiting;
    for (int many = 0; many < 2; many++) {
        int fd = recycled(address, ends, DATAGRAMS);
        MUST(send(ends[1], "other", 5, 0) == 5);
        if (many)
            MUST(recvmmsg(fd, &one, 1, MSG_ERRQUEUE, NULL) == -1 && errno == EAGAIN);
        else
            MUST(recvmsg(fd, &one.msg_hdr, MSG_ERRQUEUE) == -1 && errno == EAGAIN);
        MUST(recv(fd, got, sizeof got, 0) == 5);
        close(fd), close(ends[1]);
    }
    int fd = recycled(address, ends, PAIR);
    MUST(send(ends[1], "other", 5, 0) == 5);
    MUST(recv(fd, got, sizeof got, 0) == 5);
    close(fd), close(ends[1]);
    fd = recycled(address, ends, PIPE);
    MUST(write(ends[1], "other", 5) == 5);
    MUST(ioctl(fd, FIONREAD, &waiting) == 0 && waiting == 5);
    close(fd), close(ends[1]);
    fd = recycled(address, ends, PIPE);
    MUST(pipe(rest) == 0);
    MUST(write(ends[1], "other", 5) == 5);
    MUST(splice(fd, NULL, rest[1], NULL, 8, SPLICE_F_NONBLOCK) == 5);
    close(fd), close(ends[1]), close(rest[0]), close(rest[1]);
}

/* A pair like those that nodes make is the program's all the same. */
static void is_a_pair(const char *address) {
    char got[8];
    int ends[2];
    for (int i = 0; i < 2; i++) {
        int fd = recycled(address, ends, PAIR_ITSELF);
        MUST((i ? write(fd, "other", 5) : send(fd, "other", 5, 0)) == 5);
        MUST(read(ends[1], got, sizeof got) == 5);
        MUST(send(ends[1], "other", 5, 0) == 5);
        MUST(recv(fd, got, sizeof got, 0) == 5);
        close(fd), close(ends[1]);
    }
}

/* A process that does not trust the user of its node any more has the socket all the same. */
static void trusts_nobody(const char *address) {
    struct sockaddr_in name = {.sin_family = AF_INET, .sin_port = htons(4310)};
    int fd = socket(AF_RDS, SOCK_SEQPACKET, 0), status;
    MUST(inet_pton(AF_INET, address, &name.sin_addr) == 1);
    MUST(fd >= 0 && bind(fd, (struct sockaddr *)&name, sizeof name) == 0);
    pid_t child = fork();
    if (child == 0) {
        static const char map[] = "1000 1000 1";
        /* Only root can become another user; not every system lets users have namespaces. */
        if (setresuid(1000, 1000, 1000) || prctl(PR_SET_DUMPABLE, 1, 0, 0, 0) || unshare(CLONE_NEWUSER))
            _exit(0);
        int file = open("/proc/self/uid_map", O_WRONLY);
        if (file < 0 || write(file, map, sizeof map - 1) != sizeof map - 1)
            _exit(0);
        unsetenv("BOWLINE_RDS_SOCKET");
        MUST(send(fd, "hello", 5, 0) == -1);
        _exit(0);
    }
    char byte;
    MUST(waitpid(child, &status, 0) == child && status == 0);
    MUST(sendto(fd, "x", 1, 0, (struct sockaddr *)&name, sizeof name) == 1);
    MUST(recv(fd, &byte, 1, 0) == 1);
    close(fd);
}

int main(int argc, char **argv) {
    char byte;
    MUST(argc == 2);
    int other = bound(argv[1], 4300);
    static const char lengths[] = {1, 4, 8, 33};
    for (int i = 0; i < (int)sizeof lengths; i++) {
        int fd = bound(argv[1], 4301 + i);
        MUST(send(fd, "before", 6, 0) == 6);
        long written = write_itself(fd, "nothing of this can be sent to anybody", lengths[i]);
        MUST(written == lengths[i]);
        /* The socket is closed, and says so, whatever is tried. */
        struct pollfd p = {.fd = fd};
        MUST(poll(&p, 1, 20000) == 1 && p.revents & POLLHUP);
        MUST(send(fd, "x", 1, 0) < 0 && errno == EIO);
        MUST(connect(fd, NULL, 0) < 0 && errno == EIO);
        MUST(send(fd, "x", 1, MSG_DONTWAIT) < 0);
        close(fd);
    }
    are_something_else(argv[1]);
    is_a_pair(argv[1]);
    trusts_nobody(argv[1]);
    /* A long one fails at once. */
    static char much[8192];
    MUST(write_itself(other, much, sizeof much) < 0);
    /* Others have not noticed. */
    MUST(send(other, "x", 1, 0) == 1);
    MUST(recv(other, &byte, 1, 0) == 1);
    return 0;
}
