/* A program for which between.c sets a handler: between_main ADDRESS */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <errno.h>
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
            exit(1);                                                                              \
        }                                                                                         \
    } while (0)

int main(int argc, char **argv) {
    struct sockaddr_in name = {.sin_family = AF_INET, .sin_port = htons(4350)};
    MUST(argc == 2 && inet_pton(AF_INET, argv[1], &name.sin_addr) == 1);
    int fd = socket(AF_RDS, SOCK_SEQPACKET, 0);
    MUST(fd >= 0 && bind(fd, (struct sockaddr *)&name, sizeof name) == 0);
    struct sigaction now;
    MUST(sigaction(SIGSEGV, NULL, &now) == 0);
    MUST((void *)now.sa_handler == dlsym(RTLD_DEFAULT, "set_between"));
    MUST((now.sa_flags & (SA_NODEFER | SA_SIGINFO | SA_ONSTACK)) == SA_NODEFER);
    char *nothing = mmap(NULL, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    MUST(sendto(fd, nothing, 10, 0, (struct sockaddr *)&name, sizeof name) < 0 && errno == EFAULT);
    pid_t child = fork();
    if (child == 0)
        *(volatile char *)nothing = 1;
    int status;
    MUST(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 7);
    return 0;
}
