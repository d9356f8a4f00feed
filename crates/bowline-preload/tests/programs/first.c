/* Threads of which each is the first to use the library, in many processes: first ADDRESS */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
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

#define ROUNDS 60
#define THREADS 8
static struct sockaddr_in name;
static void *nothing;
static pthread_barrier_t all;

static void handler(int number) { _exit(number == SIGSEGV ? 7 : 8); }

static void sets_handler(void) {
    struct sigaction action = {.sa_handler = handler};
    MUST(sigaction(SIGSEGV, &action, NULL) == 0);
    MUST(sigaction(SIGSEGV, NULL, &action) == 0 && action.sa_handler == handler);
}

static void child(pid_t made) {
    if (made == 0)
        _exit(socket(AF_RDS, SOCK_SEQPACKET, 0) < 0);
    int status;
    MUST(waitpid(made, &status, 0) == made && status == 0);
}

static void exchanges(int port) {
    struct sockaddr_in own = name;
    own.sin_port = htons(port);
    struct sockaddr *to = (struct sockaddr *)&own;
    int fd = socket(AF_RDS, SOCK_SEQPACKET, 0);
    MUST(fd >= 0 && bind(fd, to, sizeof own) == 0);
    for (int i = 0; i < 20; i++) {
        char byte;
        MUST(sendto(fd, nothing, 10, 0, to, sizeof own) < 0 && errno == EFAULT);
        MUST(sendto(fd, "x", 1, 0, to, sizeof own) == 1);
        MUST(recv(fd, &byte, 1, 0) == 1 && byte == 'x');
    }
    close(fd);
}

static void *begins(void *number) {
    int n = (int)(long)number;
    pthread_barrier_wait(&all);
    switch (n) {
    case 0: sets_handler(); break;
    case 1: child(fork()); break;
    case 2: child(vfork()); break;
    default: exchanges(4360 + n);
    }
    return NULL;
}

static void process(void) {
    pthread_t threads[THREADS];
    MUST(pthread_barrier_init(&all, NULL, THREADS) == 0);
    for (long n = 0; n < THREADS; n++)
        MUST(pthread_create(&threads[n], NULL, begins, (void *)n) == 0);
    for (int n = 0; n < THREADS; n++)
        pthread_join(threads[n], NULL);
    /* The handler is there, and has heard of nothing. */
    *(volatile char *)nothing = 1;
}

int main(int argc, char **argv) {
    name.sin_family = AF_INET;
    MUST(argc == 2 && inet_pton(AF_INET, argv[1], &name.sin_addr) == 1);
    nothing = mmap(NULL, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    for (int i = 0; i < ROUNDS; i++) {
        pid_t made = fork();
        if (made == 0) {
            process();
            _exit(1);
        }
        int status;
        MUST(waitpid(made, &status, 0) == made && WIFEXITED(status) && WEXITSTATUS(status) == 7);
    }
    return 0;
}
