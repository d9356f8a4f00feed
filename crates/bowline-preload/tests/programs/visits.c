/* Children of vfork that do more than they should, while a thread uses the sockets: visits ADDRESS */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
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
            _exit(1);                                                                             \
        }                                                                                         \
    } while (0)

static struct sockaddr_in name;
static int own, null_file;
static atomic_int ends;

static int bound(int port) {
    int fd = socket(AF_RDS, SOCK_SEQPACKET, 0);
    MUST(fd >= 0);
    name.sin_port = htons(port);
    MUST(bind(fd, (struct sockaddr *)&name, sizeof name) == 0);
    return fd;
}

static void *exchanges(void *unused) {
    struct sockaddr_in to = name;
    char got[8];
    while (!ends) {
        MUST(sendto(own, "message", 7, 0, (struct sockaddr *)&to, sizeof to) == 7);
        MUST(recv(own, got, sizeof got, 0) == 7);
    }
    return unused;
}

static void visit(int n) {
    char byte;
    switch (n % 4) {
    case 0:
        MUST(close(own) == 0);
        MUST(recv(own, &byte, 1, MSG_DONTWAIT) < 0 && errno == EBADF);
        break;
    case 1:
        MUST(dup2(null_file, own) == own);
        MUST(write(own, "x", 1) == 1);
        MUST(read(own, &byte, 1) == 0);
        break;
    case 2: {
        int fd = socket(AF_RDS, SOCK_SEQPACKET, 0);
        MUST(fd >= 0);
        struct sockaddr_in to = name;
        to.sin_port = htons(4399);
        MUST(bind(fd, (struct sockaddr *)&to, sizeof to) == 0);
        MUST(sendto(fd, "visitor", 7, 0, (struct sockaddr *)&to, sizeof to) == 7);
        char got[8];
        MUST(recv(fd, got, sizeof got, 0) == 7);
        break;
    }
    default: MUST(close_range(3, ~0U, 0) == 0);
    }
    _exit(0);
}

/* A child is the first to use the library: it leaves its parent nothing. */
static void comes_first(void) {
    pid_t child = vfork();
    MUST(child >= 0);
    if (child == 0)
        visit(2);
    int status;
    MUST(waitpid(child, &status, 0) == child && status == 0);
    /* Numbers that the child has put out of the way are the parent's. */
    for (int fd = 900; fd < 910; fd++) {
        MUST(fcntl(null_file, F_DUPFD, fd) == fd);
        MUST(write(fd, "x", 1) == 1);
    }
    for (int fd = 900; fd < 910; fd++)
        MUST(close(fd) == 0);
    void *nothing = mmap(NULL, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    own = bound(4330);
    MUST(sendto(own, nothing, 10, 0, (struct sockaddr *)&name, sizeof name) < 0 && errno == EFAULT);
    /* Channels are closed with the rest, and made again. */
    MUST(dup2(own, 10) == 10);
    own = 10;
    MUST(close_range(11, ~0U, 0) == 0);
    for (int fd = 900; fd < 910; fd++)
        MUST(fcntl(null_file, F_DUPFD, fd) == fd);
    char got[8];
    MUST(sendto(own, "parent", 6, 0, (struct sockaddr *)&name, sizeof name) == 6);
    MUST(recv(own, got, sizeof got, 0) == 6);
}

/* A child gives the system a filter: its parent has none, and the system copies for it as ever. */
static void gives_filter(void) {
    struct sock_filter all[] = {BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
    struct sock_fprog program = {1, all};
    pid_t child = vfork();
    MUST(child >= 0);
    if (child == 0) {
        MUST(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
        MUST(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0);
        _exit(0);
    }
    int status;
    MUST(waitpid(child, &status, 0) == child && status == 0);
    void *nothing = mmap(NULL, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    sigset_t set;
    sigemptyset(&set), sigaddset(&set, SIGSEGV);
    MUST(sigprocmask(SIG_BLOCK, &set, NULL) == 0);
    MUST(setsockopt(own, SOL_SOCKET, SO_SNDBUF, nothing, 4) == -1 && errno == EFAULT);
    MUST(sigprocmask(SIG_UNBLOCK, &set, NULL) == 0);
}

/* A process that the C library has not seen made, and which has children of its own at once. */
static void is_made_past_the_library(void) {
    int status;
    pid_t made = (pid_t)syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
    MUST(made >= 0);
    if (made == 0) {
        pid_t child = vfork();
        MUST(child >= 0);
        if (child == 0)
            visit(1);
        MUST(waitpid(child, &status, 0) == child && status == 0);
        char got[8];
        MUST(sendto(own, "message", 7, 0, (struct sockaddr *)&name, sizeof name) == 7);
        MUST(recv(own, got, sizeof got, 0) == 7);
        _exit(0);
    }
    MUST(waitpid(made, &status, 0) == made && status == 0);
}

int main(int argc, char **argv) {
    name.sin_family = AF_INET;
    MUST(argc == 2 && inet_pton(AF_INET, argv[1], &name.sin_addr) == 1);
    null_file = open("/dev/null", O_RDWR);
    comes_first();
    gives_filter();
    is_made_past_the_library();
    pthread_t thread;
    MUST(pthread_create(&thread, NULL, exchanges, NULL) == 0);
    for (int n = 0; n < 200; n++) {
        pid_t child = vfork();
        MUST(child >= 0);
        if (child == 0)
            visit(n);
        int status;
        MUST(waitpid(child, &status, 0) == child && status == 0);
        /* The number that a child's socket had is a file's now. */
        int fd = open("/dev/null", O_RDWR);
        MUST(write(fd, "x", 1) == 1);
        close(fd);
    }
    ends = 1;
    pthread_join(thread, NULL);
    return 0;
}
