/* A child of vfork names memory to a node that gets parts of it only: visits_memory ADDRESS */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "bowline_rds.h"

#define MUST(what)                                                                                \
    do {                                                                                          \
        if (!(what)) {                                                                            \
            fprintf(stderr, "line %d: %s: %s\n", __LINE__, #what, strerror(errno));               \
            _exit(1);                                                                             \
        }                                                                                         \
    } while (0)

static char memory[4096];
static uint64_t key;

/* Registers bytes of it; returns 0 or an error number. */
static int registers(int fd, uint64_t len) {
    uint64_t args[4] = {(uintptr_t)memory, len, (uintptr_t)&key, 0};
    return setsockopt(fd, 276, 2, args, sizeof args) == 0 ? 0 : errno;
}

int main(int argc, char **argv) {
    struct sockaddr_in name = {.sin_family = AF_INET, .sin_port = htons(4331)};
    MUST(argc == 2 && inet_pton(AF_INET, argv[1], &name.sin_addr) == 1);
    int unbound = socket(AF_RDS, SOCK_SEQPACKET, 0), own = socket(AF_RDS, SOCK_SEQPACKET, 0);
    MUST(bind(own, (struct sockaddr *)&name, sizeof name) == 0);
    memset(memory, 1, sizeof memory);
    for (int n = 0; n < 3; n++) {
        pid_t child = vfork();
        MUST(child >= 0);
        if (child == 0) {
            /* What is wrong with a call is the same for all. */
            MUST(registers(unbound, 100) == ENOTCONN);
            MUST(registers(own, 0) == EINVAL);
            MUST(registers(own, 2 << 20) == EMSGSIZE);
            MUST(registers(own, 100) == EOPNOTSUPP);
            _exit(0);
        }
        int status;
        MUST(waitpid(child, &status, 0) == child && status == 0);
        /* The parent's memory is its to give, whatever the child has tried. */
        MUST(registers(own, 100) == 0 && key != 0);
        key = 0;
    }
    return 0;
}
