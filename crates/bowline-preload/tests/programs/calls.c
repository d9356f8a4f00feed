/* Each kind of call on a descriptor, for a C library other than glibc: calls ADDRESS OTHER_ADDRESS */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <sys/uio.h>
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

static struct sockaddr_in named(const char *address, int port) {
    struct sockaddr_in name = {.sin_family = AF_INET, .sin_port = htons(port)};
    MUST(inet_pton(AF_INET, address, &name.sin_addr) == 1);
    return name;
}

static int bound(const char *address, int port) {
    struct sockaddr_in name = named(address, port);
    int fd = socket(AF_RDS, SOCK_SEQPACKET, 0);
    MUST(fd >= 0);
    MUST(bind(fd, (struct sockaddr *)&name, sizeof name) == 0);
    return fd;
}

static void send_to(int fd, const char *text, struct sockaddr_in to) {
    ssize_t len = (ssize_t)strlen(text);
    MUST(sendto(fd, text, len, 0, (struct sockaddr *)&to, sizeof to) == len);
}

static void takes(int fd, const char *text) {
    char got[64] = {0};
    MUST(recv(fd, got, sizeof got, 0) == (ssize_t)strlen(text));
    MUST(strcmp(got, text) == 0);
}

static void names_and_options(int fd, const char *address) {
    struct sockaddr_in name;
    socklen_t len = sizeof name;
    MUST(getsockname(fd, (struct sockaddr *)&name, &len) == 0 && len == sizeof name);
    MUST(name.sin_addr.s_addr == inet_addr(address) && name.sin_port == htons(4700));
    int value = 0;
    len = sizeof value;
    MUST(getsockopt(fd, SOL_SOCKET, SO_TYPE, &value, &len) == 0 && value == SOCK_SEQPACKET);
    MUST(getpeername(fd, (struct sockaddr *)&name, &len) < 0 && errno == ENOTCONN);
    MUST(listen(fd, 1) < 0 && errno == EOPNOTSUPP);
    /* A limit of time, whose number differs between C libraries. */
    struct timeval limit = {.tv_usec = 20000};
    char byte;
    MUST(setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit) == 0);
    MUST(recv(fd, &byte, 1, 0) < 0 && errno == ETIMEDOUT);
    limit = (struct timeval){0};
    MUST(setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit) == 0);
}

static void messages_of_pieces(int a, int b, struct sockaddr_in to) {
    struct iovec parts[] = {{"to", 2}, {"", 0}, {"gether", 6}};
    struct msghdr msg = {
        .msg_name = &to, .msg_namelen = sizeof to, .msg_iov = parts, .msg_iovlen = 3};
    MUST(sendmsg(a, &msg, 0) == 8);
    char front[3], rest[16];
    struct sockaddr_in from;
    struct iovec room[] = {{front, 3}, {rest, sizeof rest}};
    msg = (struct msghdr){
        .msg_name = &from, .msg_namelen = sizeof from, .msg_iov = room, .msg_iovlen = 2};
    MUST(recvmsg(b, &msg, 0) == 8 && msg.msg_flags == 0 && msg.msg_namelen == sizeof from);
    MUST(memcmp(front, "tog", 3) == 0 && memcmp(rest, "ether", 5) == 0);
    struct mmsghdr many[2] = {
        {.msg_hdr = {.msg_name = &to, .msg_namelen = sizeof to, .msg_iov = parts, .msg_iovlen = 1}},
        {.msg_hdr = {.msg_name = &to, .msg_namelen = sizeof to, .msg_iov = parts, .msg_iovlen = 3}}};
    /* The system adds a flag to all but the last that RDS does not take. */
    MUST(sendmmsg(a, many, 2, 0) < 0 && errno == EOPNOTSUPP);
    MUST(sendmmsg(a, many, 1, 0) == 1 && many[0].msg_len == 2);
    MUST(sendmmsg(a, many + 1, 1, 0) == 1 && many[1].msg_len == 8);
    struct mmsghdr got[2] = {
        {.msg_hdr = {.msg_iov = room, .msg_iovlen = 2}}, {.msg_hdr = {.msg_iov = room, .msg_iovlen = 2}}};
    MUST(recvmmsg(b, got, 2, 0, NULL) == 2 && got[0].msg_len == 2 && got[1].msg_len == 8);
}

static void readiness(int a, int b, struct sockaddr_in to) {
    struct pollfd one = {.fd = b, .events = POLLIN | POLLOUT};
    MUST(poll(&one, 1, 0) == 1 && one.revents == POLLOUT);
    int waits = 0;
    MUST(ioctl(b, FIONBIO, &(int){1}) == 0);
    MUST(read(b, &waits, sizeof waits) < 0 && errno == EAGAIN);
    MUST(fcntl(b, F_SETFL, fcntl(b, F_GETFL) & ~O_NONBLOCK) == 0);
    send_to(a, "ready", to);
    fd_set set;
    FD_ZERO(&set);
    FD_SET(b, &set);
    MUST(select(b + 1, &set, NULL, NULL, NULL) == 1 && FD_ISSET(b, &set));
    takes(b, "ready");
}

/* The reader is slow: the writer is refused, and told when it may go on. */
static void congestion(int a, int b, struct sockaddr_in to) {
    int small = 4096, on = 1, sent = 0;
    static char block[2000];
    MUST(setsockopt(b, SOL_SOCKET, SO_RCVBUF, &small, sizeof small) == 0);
    MUST(setsockopt(a, SOL_RDS, BOWLINE_RDS_CONG_MONITOR, &on, sizeof on) == 0);
    for (;;) {
        ssize_t len =
            sendto(a, block, sizeof block, MSG_DONTWAIT, (struct sockaddr *)&to, sizeof to);
        if (len < 0 && errno == ENOBUFS)
            break;
        MUST(len == sizeof block || errno == EAGAIN);
        sent += len > 0;
    }
    while (sent-- > 0)
        MUST(recv(b, block, sizeof block, 0) == sizeof block);
    char room[CMSG_SPACE(sizeof(uint64_t))];
    struct msghdr msg = {.msg_control = room, .msg_controllen = sizeof room};
    MUST(recvmsg(a, &msg, 0) == 0);
    struct cmsghdr *cmsg = CMSG_FIRSTHDR(&msg);
    MUST(cmsg && cmsg->cmsg_level == SOL_RDS && cmsg->cmsg_type == BOWLINE_RDS_CONG_UPDATE);
    MUST(cmsg->cmsg_len == CMSG_LEN(sizeof(uint64_t)));
}

/* Copies of a descriptor, a child, and a process that is handed one. */
static void descriptors(int a, int b, const char *address, struct sockaddr_in to) {
    int copy = dup(b), third = dup2(b, 100);
    MUST(copy >= 0 && third == 100 && close(copy) == 0);
    send_to(a, "to a copy", to);
    takes(third, "to a copy");
    FILE *file = fdopen(third, "r");
    MUST(file && fclose(file) == 0 && recv(third, &copy, 1, 0) < 0 && errno == EBADF);
    int pair[2];
    MUST(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
    pid_t child = fork();
    MUST(child >= 0);
    if (child == 0) {
        MUST(fcntl(0, F_GETFD) >= 0);
        char byte, room[CMSG_SPACE(sizeof(int))];
        struct iovec part = {&byte, 1};
        struct msghdr msg = {
            .msg_iov = &part, .msg_iovlen = 1, .msg_control = room, .msg_controllen = sizeof room};
        MUST(recvmsg(pair[1], &msg, 0) == 1);
        int handed;
        memcpy(&handed, CMSG_DATA(CMSG_FIRSTHDR(&msg)), sizeof handed);
        send_to(handed, "by what was handed", to);
        send_to(a, "by the child", to);
        exit(0);
    }
    int other = bound(address, 4702);
    char byte = 0, room[CMSG_SPACE(sizeof(int))] = {0};
    struct iovec part = {&byte, 1};
    struct msghdr msg = {
        .msg_iov = &part, .msg_iovlen = 1, .msg_control = room, .msg_controllen = sizeof room};
    struct cmsghdr *cmsg = CMSG_FIRSTHDR(&msg);
    cmsg->cmsg_level = SOL_SOCKET;
    cmsg->cmsg_type = SCM_RIGHTS;
    cmsg->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(cmsg), &other, sizeof other);
    MUST(sendmsg(pair[0], &msg, 0) == 1);
    takes(b, "by what was handed");
    takes(b, "by the child");
    int status;
    MUST(waitpid(child, &status, 0) == child && status == 0);
}

int main(int argc, char **argv) {
    MUST(argc == 3);
    int a = bound(argv[1], 4700), b = bound(argv[2], 4701);
    struct sockaddr_in to = named(argv[2], 4701);
    names_and_options(a, argv[1]);
    messages_of_pieces(a, b, to);
    readiness(a, b, to);
    descriptors(a, b, argv[1], to);
    congestion(a, b, to);
    puts("done");
    return 0;
}
