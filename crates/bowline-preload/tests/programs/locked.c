/* A program that locks all its memory, as far as a user may: locked ADDRESS */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include "bowline_rds.h"

int main(int argc, char **argv) {
    struct rlimit limit = {8 << 20, 8 << 20};
    struct sockaddr_in name = {.sin_family = AF_INET, .sin_port = htons(4310)};
    if (argc != 2 || setrlimit(RLIMIT_MEMLOCK, &limit))
        return perror("setrlimit"), 1;
    int fd = socket(AF_RDS, SOCK_SEQPACKET, 0);
    inet_pton(AF_INET, argv[1], &name.sin_addr);
    if (bind(fd, (struct sockaddr *)&name, sizeof name))
        return perror("bind"), 1;
    /* Root may lock without limit. */
    if (geteuid() == 0 && setuid(65534))
        return perror("setuid"), 1;
    if (mlockall(MCL_CURRENT))
        return perror("mlockall"), 1;
    if (sendto(fd, "x", 1, 0, (struct sockaddr *)&name, sizeof name) != 1)
        return perror("sendto"), 1;
    char byte;
    if (recv(fd, &byte, 1, 0) != 1)
        return perror("recv"), 1;
    return 0;
}
