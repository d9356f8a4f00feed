/* System calls that no library sees: past ADDRESS */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
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
static long write_itself(int fd, const void *from, size_t len) {
#if defined __x86_64__
    long result;
    __asm__ volatile("syscall"
                     : "=a"(result)
                     : "a"(SYS_write), "D"(fd), "S"(from), "d"(len)
                     : "rcx", "r11", "memory");
    return result;
#elif defined __aarch64__
    register long number __asm__("x8") = SYS_write;
    register long result __asm__("x0") = fd;
    register const void *bytes __asm__("x1") = from;
    register size_t count __asm__("x2") = len;
    __asm__ volatile("svc 0" : "+r"(result) : "r"(number), "r"(bytes), "r"(count) : "memory");
    return result;
#else
    return syscall(SYS_write, fd, from, len);
#endif
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
    /* A long one fails at once. */
    static char much[8192];
    MUST(write_itself(other, much, sizeof much) < 0);
    /* Others have not noticed. */
    MUST(send(other, "x", 1, 0) == 1);
    MUST(recv(other, &byte, 1, 0) == 1);
    return 0;
}
