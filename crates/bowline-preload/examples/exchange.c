/* Sends a message from one RDS socket to another: exchange ADDRESS OTHER_ADDRESS */
#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdio.h>
#include <string.h>

#include "bowline_rds.h"

static int bound(const char *address, uint16_t port, struct sockaddr_in *name) {
    int fd = socket(AF_RDS, SOCK_SEQPACKET, 0);
    *name = (struct sockaddr_in){.sin_family = AF_INET, .sin_port = htons(port)};
    if (fd < 0 || inet_pton(AF_INET, address, &name->sin_addr) != 1 ||
        bind(fd, (struct sockaddr *)name, sizeof *name) != 0)
        return -1;
    return fd;
}

int main(int argc, char **argv) {
    struct sockaddr_in from, to, sender;
    socklen_t len = sizeof sender;
    char text[64];
    if (argc != 3) {
        fprintf(stderr, "usage: %s ADDRESS OTHER_ADDRESS\n", argv[0]);
        return 2;
    }
    int a = bound(argv[1], 4600, &from), b = bound(argv[2], 4601, &to);
    int transport = 0;
    socklen_t transport_len = sizeof transport;
    if (a < 0 || b < 0 ||
        getsockopt(a, SOL_RDS, BOWLINE_RDS_TRANSPORT, &transport, &transport_len) < 0 ||
        sendto(a, "hello", 5, 0, (struct sockaddr *)&to, sizeof to) != 5) {
        perror(argv[0]);
        return 1;
    }
    ssize_t got = recvfrom(b, text, sizeof text, 0, (struct sockaddr *)&sender, &len);
    if (got != 5 || memcmp(text, "hello", 5) != 0 || sender.sin_port != from.sin_port) {
        fprintf(stderr, "%s: something else came\n", argv[0]);
        return 1;
    }
    printf("%.*s from port %u over transport %d\n", (int)got, text, ntohs(sender.sin_port),
           transport);
    return 0;
}
