/* Sockets over RDMA, both ends in one process. Prints the line of the first thing that is not as it
 * must be. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <rdma/rsocket.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "must.h"
#define FAILS(what, with) MUST((what) == -1 && errno == (with))

#define MANY (1 << 20)

static struct sockaddr_in own;
static char out[MANY], in[MANY];

static struct sockaddr_in at_port(int port)
{
	struct sockaddr_in at = own;
	at.sin_port = htons(port);
	return at;
}

static int listener(int port)
{
	struct sockaddr_in at = at_port(port);
	int fd = rsocket(AF_INET, SOCK_STREAM, 0);
	MUST(fd >= 0);
	MUST(rbind(fd, (void *)&at, sizeof at) == 0);
	MUST(rlisten(fd, 4) == 0);
	return fd;
}

static short ready(int fd, short events, int timeout)
{
	struct pollfd one = { .fd = fd, .events = events };
	int number = rpoll(&one, 1, timeout);
	MUST(number == (one.revents != 0));
	return one.revents;
}

/* A connection; what is set at the listener counts for the accepted end. */
static void connected(int listening, int port, int maps, int buffer, int ends[2])
{
	struct sockaddr_in at = at_port(port), peer, name;
	socklen_t len = sizeof peer;
	int error = 1;
	ends[0] = rsocket(AF_INET, SOCK_STREAM, IPPROTO_TCP);
	int both[2] = { listening, ends[0] };
	for (int i = 0; i < 2; i++) {
		MUST(rsetsockopt(both[i], SOL_RDMA, RDMA_IOMAPSIZE, &maps, sizeof maps) == 0);
		MUST(rsetsockopt(both[i], SOL_SOCKET, SO_RCVBUF, &buffer, sizeof buffer) == 0);
		MUST(rsetsockopt(both[i], SOL_SOCKET, SO_SNDBUF, &buffer, sizeof buffer) == 0);
	}
	MUST(rfcntl(ends[0], F_SETFL, O_NONBLOCK) == 0);
	MUST(rfcntl(ends[0], F_GETFL) & O_NONBLOCK);
	FAILS(rconnect(ends[0], (void *)&at, sizeof at), EINPROGRESS);
	FAILS(rconnect(ends[0], (void *)&at, sizeof at), EALREADY);
	ends[1] = raccept(listening, (void *)&peer, &len);
	MUST(ends[1] >= 0 && len == sizeof peer);
	MUST(ready(ends[0], POLLOUT, -1) == POLLOUT);
	len = sizeof error;
	MUST(rgetsockopt(ends[0], SOL_SOCKET, SO_ERROR, &error, &len) == 0 && error == 0);
	FAILS(rconnect(ends[0], (void *)&at, sizeof at), EISCONN);
	MUST(rfcntl(ends[0], F_SETFL, 0) == 0);
	len = sizeof name;
	MUST(rgetsockname(ends[0], (void *)&name, &len) == 0);
	MUST(memcmp(&name, &peer, 8) == 0);
	len = sizeof name;
	MUST(rgetpeername(ends[0], (void *)&name, &len) == 0);
	MUST(name.sin_port == htons(port) && name.sin_addr.s_addr == own.sin_addr.s_addr);
}

static void refusals(void)
{
	struct sockaddr_in at = at_port(7001), far = at;
	socklen_t len = sizeof at;
	int value = 1;
	FAILS(rsocket(AF_UNIX, SOCK_STREAM, 0), EAFNOSUPPORT);
	FAILS(rsocket(AF_INET, SOCK_RAW, 0), ESOCKTNOSUPPORT);
	FAILS(rsocket(AF_INET, SOCK_STREAM, IPPROTO_UDP), EPROTONOSUPPORT);
	FAILS(rsend(-1, out, 1, 0), EBADF);
	FAILS(rclose(0), EBADF);
	int fd = rsocket(AF_INET, SOCK_STREAM, 0);
	FAILS(rrecv(fd, in, 1, 0), ENOTCONN);
	FAILS(rsend(fd, out, 1, MSG_OOB), EOPNOTSUPP);
	FAILS(rgetpeername(fd, (void *)&at, &len), ENOTCONN);
	FAILS(rshutdown(fd, SHUT_WR), ENOTCONN);
	FAILS(riomap(fd, out, 1, PROT_WRITE, 0, -1), ENOTCONN);
	FAILS(rbind(fd, (void *)&at, 4), EINVAL);
	far.sin_addr.s_addr = inet_addr("192.0.2.1");
	FAILS(rbind(fd, (void *)&far, sizeof far), EADDRNOTAVAIL);
	FAILS(raccept(fd, NULL, NULL), EINVAL);
	FAILS(rsetsockopt(fd, SOL_SOCKET, SO_BROADCAST, &value, sizeof value), EOPNOTSUPP);
	FAILS(rsetsockopt(fd, SOL_SOCKET, SO_RCVBUF, &value, 1), EINVAL);
	FAILS(rgetsockopt(fd, SOL_RDMA, RDMA_ROUTE, &value, &len), EINVAL);
	FAILS(rfcntl(fd, F_DUPFD, 0), EOPNOTSUPP);
	/* Nobody listens. */
	FAILS(rconnect(fd, (void *)&at, sizeof at), ECONNREFUSED);
	MUST(rclose(fd) == 0);
	FAILS(rclose(fd), EBADF);
	int first = listener(7002);
	fd = rsocket(AF_INET, SOCK_STREAM, 0);
	at = at_port(7002);
	MUST(rbind(fd, (void *)&at, sizeof at) == 0);
	FAILS(rlisten(fd, 1), EADDRINUSE);
	MUST(rclose(fd) == 0);
	MUST(rfcntl(first, F_SETFL, O_NONBLOCK) == 0);
	FAILS(raccept(first, NULL, NULL), EAGAIN);
	MUST(rclose(first) == 0);
}

static void transfers(int ends[2])
{
	struct iovec pieces[3] = { { out, 3 }, { out + 3, 0 }, { out + 3, 5 } };
	struct iovec places[2] = { { in, 2 }, { in + 100, 50 } };
	struct msghdr message = { .msg_iov = places, .msg_iovlen = 2 };
	FAILS(rrecv(ends[1], in, 1, MSG_DONTWAIT), EAGAIN);
	MUST(rwritev(ends[0], pieces, 3) == 8);
	MUST(ready(ends[1], POLLIN, -1) == POLLIN);
	MUST(rrecv(ends[1], in, 100, MSG_PEEK) == 8 && memcmp(in, out, 8) == 0);
	memset(in, 0, 200);
	MUST(rrecvmsg(ends[1], &message, 0) == 8);
	MUST(memcmp(in, out, 2) == 0 && memcmp(in + 100, out + 2, 6) == 0);
	MUST(rsend(ends[0], out, 0, 0) == 0);
	/* Lists that no memory has are refused. */
	struct iovec large[3] = { { in, SSIZE_MAX }, { in, SSIZE_MAX }, { in, 3 } };
	FAILS(rreadv(ends[1], large, 2), EINVAL);
	FAILS(rreadv(ends[1], large, 3), EINVAL);
	FAILS(rwritev(ends[0], large, 2), EINVAL);
	message.msg_iov = large;
	FAILS(rrecvmsg(ends[1], &message, MSG_DONTWAIT), EINVAL);
	FAILS(rrecv(ends[1], in, SIZE_MAX, MSG_DONTWAIT), EINVAL);
	/* Of long ones no more is taken in than comes at once. */
	struct iovec sparse[2] = { { in, MANY }, { in + MANY - 1, (size_t)1 << 46 } };
	MUST(rsend(ends[0], out, 8, 0) == 8);
	message.msg_iov = sparse;
	MUST(rrecvmsg(ends[1], &message, 0) == 8 && memcmp(in, out, 8) == 0);
	/* Until nothing more goes; then what was sent is read, and more goes. */
	ssize_t sent = 0, number;
	while ((number = rsend(ends[0], out + sent, MANY - sent, MSG_DONTWAIT)) > 0)
		sent += number;
	MUST(number == -1 && errno == EAGAIN && sent > 0 && sent < MANY);
	MUST(ready(ends[0], POLLOUT, 0) == 0);
	memset(in, 0, MANY);
	MUST(rrecv(ends[1], in, sent, MSG_WAITALL) == sent);
	MUST(memcmp(in, out, sent) == 0);
	MUST(ready(ends[0], POLLOUT, -1) == POLLOUT);
}

static void *echo(void *of)
{
	static char bytes[5000];
	int fd = *(int *)of;
	ssize_t number;
	while ((number = rrecv(fd, bytes, sizeof bytes, 0)) > 0)
		MUST(rsend(fd, bytes, number, 0) == number);
	MUST(number == 0);
	return NULL;
}

static void *sender(void *of)
{
	int fd = *(int *)of;
	MUST(rsend(fd, out, MANY, 0) == MANY);
	MUST(rshutdown(fd, SHUT_WR) == 0);
	return NULL;
}

/* One thread sends and another one receives on a socket: each takes in what the other waits for. */
static void threads(int ends[2])
{
	pthread_t one, two;
	memset(in, 0, MANY);
	MUST(pthread_create(&one, NULL, echo, &ends[1]) == 0);
	MUST(pthread_create(&two, NULL, sender, &ends[0]) == 0);
	/* All of a list, which is more than comes at once. */
	struct iovec places[3] = { { in, 5000 }, { in + 5000, 70001 }, { in + 75001, MANY - 75001 } };
	struct msghdr message = { .msg_iov = places, .msg_iovlen = 3 };
	MUST(rrecvmsg(ends[0], &message, MSG_WAITALL) == MANY);
	MUST(memcmp(in, out, MANY) == 0);
	pthread_join(one, NULL);
	pthread_join(two, NULL);
}

static void *byte_to(void *of)
{
	int *to = of;
	/* The other thread waits by then, or not: both are right. */
	usleep(20000);
	MUST((to[1] ? rsend(to[0], "x", 1, 0) : write(to[0], "x", 1)) == 1);
	return NULL;
}

static void polls(int listening, int ends[2])
{
	int pipes[2];
	pthread_t thread;
	MUST(pipe(pipes) == 0);
	struct pollfd all[] = {
		{ .fd = pipes[0], .events = POLLIN },
		{ .fd = ends[1], .events = POLLIN },
		{ .fd = -1, .events = POLLIN, .revents = 1 },
		{ .fd = listening, .events = POLLIN },
		{ .fd = ends[0], .events = POLLIN },
	};
	MUST(rpoll(all, 5, 0) == 0 && rpoll(all, 5, 10) == 0 && all[2].revents == 0);
	int to[2] = { pipes[1], 0 };
	MUST(pthread_create(&thread, NULL, byte_to, to) == 0);
	MUST(rpoll(all, 5, -1) == 1 && all[0].revents == POLLIN);
	pthread_join(thread, NULL);
	char byte;
	MUST(read(pipes[0], &byte, 1) == 1);
	to[0] = ends[0];
	to[1] = 1;
	MUST(pthread_create(&thread, NULL, byte_to, to) == 0);
	MUST(rpoll(all, 5, -1) == 1 && all[1].revents == POLLIN && all[0].revents == 0);
	pthread_join(thread, NULL);

	fd_set readable, writable;
	struct timeval soon = { .tv_usec = 1000 };
	FD_ZERO(&readable);
	FD_ZERO(&writable);
	FD_SET(pipes[0], &readable);
	FD_SET(ends[0], &readable);
	FD_SET(ends[1], &readable);
	FD_SET(ends[1], &writable);
	MUST(rselect(FD_SETSIZE, &readable, &writable, NULL, NULL) == 2);
	MUST(FD_ISSET(ends[1], &readable) && FD_ISSET(ends[1], &writable));
	MUST(!FD_ISSET(ends[0], &readable) && !FD_ISSET(pipes[0], &readable));
	MUST(rread(ends[1], &byte, 1) == 1);
	FD_ZERO(&readable);
	FD_SET(ends[1], &readable);
	MUST(rselect(ends[1] + 1, &readable, NULL, NULL, &soon) == 0);
	MUST(!FD_ISSET(ends[1], &readable));
	all[0].fd = 12345;
	MUST(rpoll(all, 5, -1) == 1 && all[0].revents == POLLNVAL);
	close(pipes[0]);
	close(pipes[1]);
}

static void mappings(int ends[2])
{
	static char memory[8192];
	off_t offset = riomap(ends[1], memory, sizeof memory, PROT_WRITE, 0, -1);
	MUST(offset == (off_t)memory);
	MUST(riomap(ends[1], memory, 4096, PROT_WRITE, 0, 65536) == 65536);
	FAILS(riomap(ends[1], memory, 4096, PROT_WRITE, 0, 65537), EINVAL);
	FAILS(riomap(ends[1], memory, 4096, PROT_WRITE, 0, 1 << 20), ENOSPC);
	MUST(riomap(ends[1], memory, 16, PROT_NONE, 0, -1) >= 0);
	FAILS(riomap(ends[1], memory, 16, PROT_READ, 0, -1), EINVAL);
	/* What is sent behind the mapping brings it. */
	char byte;
	MUST(rsend(ends[1], "x", 1, 0) == 1 && rrecv(ends[0], &byte, 1, 0) == 1);
	MUST(riowrite(ends[0], out, 8000, offset + 100, 0) == 8000);
	MUST(rsend(ends[0], "x", 1, 0) == 1 && rrecv(ends[1], &byte, 1, 0) == 1);
	MUST(memcmp(memory + 100, out, 8000) == 0 && memory[99] == 0 && memory[8100] == 0);
	/* No further than to the end of a mapping. */
	MUST(riowrite(ends[0], out, 5000, 65536 + 96, 0) == 4000);
	FAILS((ssize_t)riowrite(ends[0], out, 1, 1, 0), EINVAL);
	MUST(riounmap(ends[1], memory, sizeof memory) == 0);
	FAILS(riounmap(ends[1], memory, sizeof memory), EINVAL);
	MUST(riounmap(ends[1], memory, 16) == 0);
}

/* What was sent before an end is read, then the end. */
static void ends_of(int ends[2])
{
	MUST(rsend(ends[0], out, 5, 0) == 5);
	MUST(rshutdown(ends[0], SHUT_WR) == 0);
	FAILS(rsend(ends[0], out, 5, 0), EPIPE);
	MUST(rrecv(ends[1], in, 100, MSG_WAITALL) == 5 && rrecv(ends[1], in, 100, 0) == 0);
	MUST((ready(ends[1], POLLIN | POLLRDHUP, 0) & (POLLIN | POLLHUP | POLLRDHUP)) ==
	     (POLLIN | POLLRDHUP));
	MUST(rsend(ends[1], out, 3000, 0) == 3000);
	MUST(rclose(ends[1]) == 0);
	MUST(rrecv(ends[0], in, 5000, MSG_WAITALL) == 3000 && memcmp(in, out, 3000) == 0);
	MUST(ready(ends[0], POLLIN, -1) == (POLLIN | POLLHUP));
	MUST(rrecv(ends[0], in, 1, 0) == 0);
	FAILS(rsend(ends[0], out, 1, 0), EPIPE);
	MUST(rclose(ends[0]) == 0);
}

static void datagrams(void)
{
	struct sockaddr_in at = at_port(7005), nobody = at_port(7006), from;
	socklen_t len = sizeof from;
	struct iovec place = { in, 4 };
	struct msghdr message = { .msg_iov = &place, .msg_iovlen = 1 };
	int one = rsocket(AF_INET, SOCK_DGRAM, 0), two = rsocket(AF_INET, SOCK_DGRAM, IPPROTO_UDP);
	MUST(rbind(one, (void *)&at, sizeof at) == 0);
	FAILS(rbind(one, (void *)&at, sizeof at), EINVAL);
	FAILS(rbind(two, (void *)&at, sizeof at), EADDRINUSE);
	FAILS(rlisten(one, 1), EOPNOTSUPP);
	FAILS(rsend(two, out, 1, 0), EDESTADDRREQ);
	FAILS(rrecv(one, in, 1, MSG_DONTWAIT), EAGAIN);
	FAILS(rconnect(two, (void *)&nobody, sizeof nobody), ECONNREFUSED);
	/* A lookup is answered by the calls on the other socket. */
	while (rsendto(two, out, 10, MSG_DONTWAIT, (void *)&at, sizeof at) == -1) {
		MUST(errno == EAGAIN);
		MUST((ready(one, POLLIN, 1) & ~POLLIN) == 0);
	}
	MUST(ready(one, POLLIN | POLLOUT, -1) & POLLIN);
	MUST(rrecvfrom(one, in, 100, MSG_PEEK, (void *)&from, &len) == 10);
	MUST(rrecvmsg(one, &message, 0) == 4 && message.msg_flags == MSG_TRUNC);
	MUST(memcmp(in, out, 4) == 0);
	MUST(rsendto(one, out, 0, 0, (void *)&from, sizeof from) == 0);
	MUST(rrecv(two, in, 100, 0) == 0);
	FAILS(rsendto(one, out, 1 << 16, 0, (void *)&from, sizeof from), EMSGSIZE);
	MUST(rconnect(two, (void *)&at, sizeof at) == 0);
	MUST(rsend(two, out, 900, 0) == 900);
	MUST(rrecv(one, in, 4, MSG_TRUNC) == 900);

	/* Connected, it has what its peer sends and nothing of others, before and after. */
	int other = rsocket(AF_INET, SOCK_DGRAM, 0);
	MUST(rsend(two, out, 8, 0) == 8 && ready(one, POLLIN, -1) == POLLIN);
	MUST(rrecvfrom(one, in, 8, 0, (void *)&from, &len) == 8);
	while (rsendto(other, out, 10, MSG_DONTWAIT, (void *)&at, sizeof at) == -1) {
		MUST(errno == EAGAIN);
		MUST((ready(one, POLLIN, 1) & ~POLLIN) == 0);
	}
	MUST(ready(one, POLLIN, -1) == POLLIN);
	MUST(rconnect(one, (void *)&from, sizeof from) == 0);
	MUST(ready(one, POLLIN, 0) == 0);
	/* More of them than the socket has room for. */
	for (int i = 0; i < 300; i++) {
		MUST(rsendto(other, out, 10, 0, (void *)&at, sizeof at) == 10);
		MUST(ready(one, POLLIN, i % 100 == 0) == 0);
	}
	MUST(rsend(two, out, 9, 0) == 9);
	MUST(ready(one, POLLIN, -1) == POLLIN && rrecv(one, in, 100, 0) == 9);
	MUST(rclose(one) == 0 && rclose(two) == 0 && rclose(other) == 0);

	/* Another socket at the same port is found, and after that none. */
	one = rsocket(AF_INET, SOCK_DGRAM, 0);
	two = rsocket(AF_INET, SOCK_DGRAM, 0);
	for (int i = 0; i < 2; i++) {
		MUST(rbind(one, (void *)&at, sizeof at) == 0);
		do {
			rsendto(two, out, 1, MSG_DONTWAIT, (void *)&at, sizeof at);
		} while (!ready(one, POLLIN, 1));
		MUST(rclose(one) == 0);
		one = rsocket(AF_INET, SOCK_DGRAM, 0);
	}
	while (rsendto(two, out, 1, MSG_DONTWAIT, (void *)&at, sizeof at) == 1 || errno == EAGAIN)
		ready(two, POLLIN, 1);
	MUST(errno == ECONNREFUSED);
	MUST(rclose(one) == 0 && rclose(two) == 0);
}

int main(int argc, char **argv)
{
	int ends[2];
	MUST(argc == 2);
	own.sin_family = AF_INET;
	own.sin_addr.s_addr = inet_addr(argv[1]);
	for (int i = 0; i < MANY; i++)
		out[i] = i * 7 + i / 251;
	refusals();
	int listening = listener(7003);
	connected(listening, 7003, 2, 1 << 14, ends);
	transfers(ends);
	polls(listening, ends);
	mappings(ends);
	ends_of(ends);
	connected(listening, 7003, 0, 4096, ends);
	threads(ends);
	MUST(rclose(ends[0]) == 0 && rclose(ends[1]) == 0);
	MUST(rclose(listening) == 0);
	datagrams();
	return 0;
}
