/*
 * What calls on an RDS socket give: one line for each row of section 8 of tools.md, its name, a tab,
 * and the result or the name of the error. It runs on a kernel's sockets and, preloaded, on those of
 * a bowline node; suite/programs.py compares.
 *
 * rds-errors OWN PEER NOBODY
 *   OWN     an address of this machine other than 127.x
 *   PEER    an address of another machine that answers
 *   NOBODY  an address that no machine has, on the same wire
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#define AF_RDS_ 21
#define SOL_RDS_ 276
#define LIMIT 4 /* seconds that a call may take */

static const char *own, *peer, *nobody;

/* A limit of this machine in bytes, by its name below net.core; machines that are compared differ in it. */
static int net_core(const char *name)
{
	char path[64];
	int bytes = -1;
	snprintf(path, sizeof(path), "/proc/sys/net/core/%s", name);
	FILE *f = fopen(path, "r");
	if (!f || fscanf(f, "%d", &bytes) != 1)
		bytes = -1;
	if (f)
		fclose(f);
	return bytes;
}

static const char *name_of(int e)
{
	static char other[16];
	switch (e) {
#define N(x) case x: return #x;
	N(EPERM) N(EINTR) N(EIO) N(EBADF) N(EAGAIN) N(ENOMEM) N(EACCES) N(EFAULT) N(EINVAL) N(EMFILE) N(ENOTTY)
	N(ENOSPC) N(EPIPE) N(EDOM) N(ENOTSOCK) N(EDESTADDRREQ) N(EMSGSIZE) N(EPROTOTYPE) N(ENOPROTOOPT)
	N(EPROTONOSUPPORT) N(ESOCKTNOSUPPORT) N(EOPNOTSUPP) N(EAFNOSUPPORT) N(EADDRINUSE) N(EADDRNOTAVAIL)
	N(ENETDOWN) N(ENETUNREACH) N(ECONNRESET) N(ENOBUFS) N(EISCONN) N(ENOTCONN) N(ETIMEDOUT) N(ECONNREFUSED)
	N(EHOSTUNREACH) N(EALREADY) N(EINPROGRESS)
#undef N
	}
	snprintf(other, sizeof other, "errno %d", e);
	return other;
}

static void row(const char *name, long result, int e)
{
	if (result < 0 && e)
		printf("%s\t%s\n", name, name_of(e));
	else
		printf("%s\t%ld\n", name, result);
	fflush(stdout);
}

/* A call and its row. What takes too long is interrupted. */
#define ROW(name, call) do { \
	alarm(LIMIT); errno = 0; \
	long r_ = (call); int e_ = errno; \
	alarm(0); row(name, r_, e_); \
} while (0)
/* A value and its row. */
#define SAYS(name, value) row(name, (long)(value), 0)
/* What is done before a row can be; its failure is a row of its own. */
#define MUST(call) do { if ((call) < 0) { printf("line %d\t%s\n", __LINE__, name_of(errno)); fflush(stdout); } } while (0)

static void on_alarm(int sig) { (void)sig; }

static struct sockaddr_in at(const char *address, int port)
{
	struct sockaddr_in a = { .sin_family = AF_INET, .sin_port = htons(port) };
	inet_pton(AF_INET, address, &a.sin_addr);
	return a;
}

static int new(void) { return socket(AF_RDS_, SOCK_SEQPACKET, 0); }

static long do_bind(int s, const char *address, int port)
{
	struct sockaddr_in a = at(address, port);
	return bind(s, (void *)&a, sizeof a);
}

static long do_bind6(int s, const char *address, int port)
{
	struct sockaddr_in6 a = { .sin6_family = AF_INET6, .sin6_port = htons(port) };
	inet_pton(AF_INET6, address, &a.sin6_addr);
	return bind(s, (void *)&a, sizeof a);
}

static long do_connect(int s, const char *address, int port)
{
	struct sockaddr_in a = at(address, port);
	return connect(s, (void *)&a, sizeof a);
}

static int bound(const char *address, int port)
{
	int s = new();
	MUST(do_bind(s, address, port));
	return s;
}

static long to(int s, const char *address, int port, size_t len, int flags)
{
	static char data[1 << 21];
	struct sockaddr_in a = at(address, port);
	return sendto(s, data, len, flags, (void *)&a, sizeof a);
}

static long set(int s, int level, int name, int value) { return setsockopt(s, level, name, &value, sizeof value); }

static long set_bytes(int s, int name, size_t len)
{
	static char zeros[256];
	return setsockopt(s, SOL_RDS_, name, zeros, len);
}

/* -> the value, or -1 with errno */
static long get(int s, int level, int name)
{
	int value = -99;
	socklen_t len = sizeof value;
	errno = 0;
	return getsockopt(s, level, name, &value, &len) < 0 ? -1 : (errno = 0, value);
}

static long get_len(int s, int level, int name, socklen_t len)
{
	char value[64];
	return getsockopt(s, level, name, value, &len);
}

static void limit(int s, int name, int ms)
{
	struct timeval tv = { ms / 1000, ms % 1000 * 1000 };
	MUST(setsockopt(s, SOL_SOCKET, name, &tv, sizeof tv));
}

static long with_control(int s, int level, int type, const void *data, size_t len, int flags, const char *address, int port)
{
	char control[256] __attribute__((aligned(8))) = { 0 };
	struct sockaddr_in a = at(address, port);
	struct iovec v = { "x", 1 };
	struct msghdr m = { .msg_name = &a, .msg_namelen = sizeof a, .msg_iov = &v, .msg_iovlen = 1,
			    .msg_control = control, .msg_controllen = CMSG_SPACE(len) };
	struct cmsghdr *c = CMSG_FIRSTHDR(&m);
	c->cmsg_level = level, c->cmsg_type = type, c->cmsg_len = CMSG_LEN(len);
	memcpy(CMSG_DATA(c), data, len);
	return sendmsg(s, &m, flags | MSG_DONTWAIT);
}

#define PAUSE 5000 /* microseconds between looks */
#define LOOKS (LIMIT * 1000000 / PAUSE)

/* Waits until there is something to receive. A poll would end when a port somewhere is congested, too. */
static void comes(int s)
{
	char byte;
	for (int i = 0; i < LOOKS && recv(s, &byte, 1, MSG_PEEK | MSG_DONTWAIT) < 0; i++)
		usleep(PAUSE);
}

static struct msghdr got;
static char got_control[512] __attribute__((aligned(8)));

/* recvmsg; -> its result. What came is in got. */
static long take(int s, size_t len, int flags)
{
	static char data[4096], name[32];
	static struct iovec v;
	v = (struct iovec){ data, len };
	got = (struct msghdr){ .msg_name = name, .msg_namelen = sizeof name, .msg_iov = &v, .msg_iovlen = 1,
			       .msg_control = got_control, .msg_controllen = sizeof got_control };
	long n;
	for (int i = 0; (n = recvmsg(s, &got, flags | MSG_DONTWAIT)) < 0 && errno == EAGAIN && i < LOOKS - 100; i++)
		usleep(PAUSE);
	return n;
}

/* Rows about the first control message that came. */
static void control_rows(const char *name)
{
	char text[100];
	struct cmsghdr *c = CMSG_FIRSTHDR(&got);
	snprintf(text, sizeof text, "%s: level", name), SAYS(text, c ? c->cmsg_level : -1);
	snprintf(text, sizeof text, "%s: type", name), SAYS(text, c ? c->cmsg_type : -1);
	snprintf(text, sizeof text, "%s: length", name), SAYS(text, c ? (long)(c->cmsg_len - CMSG_LEN(0)) : -1);
}

/* Runs a function in a child; a row that a signal ended says so. */
static void in_child(const char *name, long (*f)(int), int s)
{
	int pipes[2], status;
	long answer[2] = { 0, 0 };
	MUST(pipe(pipes));
	pid_t child = fork();
	if (!child) {
		alarm(LIMIT);
		errno = 0;
		answer[0] = f(s), answer[1] = errno;
		_exit(write(pipes[1], answer, sizeof answer) < 0);
	}
	close(pipes[1]);
	waitpid(child, &status, 0);
	if (read(pipes[0], answer, sizeof answer) != sizeof answer)
		printf("%s\tsignal %d\n", name, WTERMSIG(status)), fflush(stdout);
	else
		row(name, answer[0], (int)answer[1]);
	close(pipes[0]);
}

static long low_port(int s)
{
	(void)s;
	if (setgid(65534) || setuid(65534))
		return -1;
	int made = new();
	return made < 0 ? made : do_bind(made, own, 23);
}

static long unwritable(int s)
{
	void *nothing = mmap(NULL, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	return recv(s, nothing, 100, MSG_DONTWAIT);
}

static long unreadable(int s)
{
	void *nothing = mmap(NULL, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	struct sockaddr_in a = at(own, 4100);
	return sendto(s, nothing, 100, MSG_DONTWAIT, (void *)&a, sizeof a);
}

static long sends_ten(int s) { return to(s, own, 4000, 10, 0); }

static void calls(void)
{
	char text[64], data[4096];
	ROW("type 1", socket(AF_RDS_, 1, 0));
	ROW("type 2", socket(AF_RDS_, 2, 0));
	ROW("type 3", socket(AF_RDS_, 3, 0));
	ROW("protocol 1", socket(AF_RDS_, 5, 1));
	ROW("socketpair", socketpair(AF_RDS_, 5, 0, (int[2]){ 0, 0 }));

	int s = new();
	unsigned char name[32];
	socklen_t len = sizeof name;
	memset(name, 0xff, sizeof name);
	ROW("getsockname unbound", getsockname(s, (void *)name, &len));
	SAYS("getsockname unbound: length", len);
	int zeros = 1;
	for (int i = 0; i < 16; i++)
		zeros &= !name[i];
	SAYS("getsockname unbound: all zeros", zeros);
	len = sizeof name;
	ROW("getpeername unconnected", getpeername(s, (void *)name, &len));
	ROW("sendto unbound", to(s, peer, 4000, 1, MSG_DONTWAIT));
	ROW("send unbound, unconnected", send(s, "x", 1, MSG_DONTWAIT));
	ROW("recv unbound", recv(s, data, 10, MSG_DONTWAIT));
	struct pollfd p = { .fd = s, .events = POLLIN | POLLOUT };
	/* the first one may tell of congestion that was before */
	poll(&p, 1, 0);
	ROW("poll unbound", poll(&p, 1, 0));
	SAYS("poll unbound: events", p.revents);
	ROW("bind 0.0.0.0", do_bind(s, "0.0.0.0", 4000));
	ROW("bind broadcast", do_bind(s, "255.255.255.255", 4000));
	ROW("bind multicast", do_bind(s, "224.0.0.1", 4000));
	ROW("bind port 1", do_bind(s, own, 1));
	ROW("bind elsewhere", do_bind(s, "192.0.2.7", 4000));
	struct sockaddr_in a = at(own, 4000);
	ROW("bind with 15 bytes", bind(s, (void *)&a, 15));
	a.sin_family = AF_UNIX;
	ROW("bind of another family", bind(s, (void *)&a, sizeof a));
	ROW("SO_RDS_TRANSPORT unbound", get(s, SOL_RDS_, 8));
	ROW("bind", do_bind(s, own, 4000));
	ROW("second bind", do_bind(s, own, 4001));
	ROW("same address", do_bind(new(), own, 4000));
	ROW("poll bound", poll(&p, 1, 0));
	SAYS("poll bound: events", p.revents);
	ROW("bind ::1", do_bind6(new(), "::1", 4002));
	ROW("bind ::ffff:127.0.0.1", do_bind6(new(), "::ffff:127.0.0.1", 4003));
	in_child("unprivileged bind to port 23", low_port, -1);

	int local = bound("127.0.0.1", 4004);
	ROW("SO_RDS_TRANSPORT on 127.x", get(local, SOL_RDS_, 8));
	ROW("SO_RDS_TRANSPORT on TCP", get(s, SOL_RDS_, 8));
	ROW("SO_RDS_TRANSPORT after bind", set(s, SOL_RDS_, 8, 2));
	for (int value = -1; value <= 4; value++) {
		snprintf(text, sizeof text, "SO_RDS_TRANSPORT to %d", value);
		int fresh = new();
		ROW(text, set(fresh, SOL_RDS_, 8, value));
		if (value == 2)
			ROW("SO_RDS_TRANSPORT twice", set(fresh, SOL_RDS_, 8, value));
		close(fresh);
	}
	ROW("SO_RDS_TRANSPORT of 3 bytes", get_len(s, SOL_RDS_, 8, 3));
	ROW("RDS_RECVERR of 3 bytes", get_len(s, SOL_RDS_, 5, 3));
	ROW("RDS_RECVERR", get(s, SOL_RDS_, 5));
	ROW("RDS_CONG_MONITOR", get(s, SOL_RDS_, 6));
	ROW("RDS_CONG_MONITOR to 1", set(new(), SOL_RDS_, 6, 1));
	ROW("option 99 of SOL_RDS", get(s, SOL_RDS_, 99));
	ROW("set option 99 of SOL_RDS", set(s, SOL_RDS_, 99, 1));
	ROW("option 1 of SOL_TCP", get(s, 6, 1));
	ROW("set option 1 of SOL_TCP", set(s, 6, 1, 1));
	ROW("RDS_CANCEL_SENT_TO unbound", set_bytes(new(), 1, 16));
	ROW("RDS_CANCEL_SENT_TO of 15 bytes", set_bytes(s, 1, 15));

	ROW("send to 0.0.0.0", to(s, "0.0.0.0", 4000, 1, 0));
	ROW("send to broadcast", to(s, "255.255.255.255", 4000, 1, 0));
	ROW("send to multicast", to(s, "224.0.0.1", 4000, 1, MSG_DONTWAIT));
	ROW("send unconnected", send(s, "x", 1, 0));
	ROW("send to port 0", to(s, peer, 0, 5, MSG_DONTWAIT));
	ROW("its answer", take(s, 100, 0));
	ROW("listen", listen(s, 1));
	ROW("accept", accept(s, NULL, NULL));
	ROW("accept4", accept4(s, NULL, NULL, SOCK_CLOEXEC));
	ROW("shutdown", shutdown(s, SHUT_RDWR));
	ROW("connect to 0.0.0.0", do_connect(s, "0.0.0.0", 4000));
	ROW("connect to broadcast", do_connect(s, "255.255.255.255", 4000));
	ROW("connect to multicast", do_connect(s, "224.0.0.1", 4000));
	a = at(own, 4000);
	ROW("connect with 15 bytes", connect(s, (void *)&a, 15));
	ROW("connect", do_connect(s, own, 4000));
	len = sizeof name;
	ROW("getpeername", getpeername(s, (void *)name, &len));
	SAYS("getpeername: length", len);
	ROW("write", write(s, "x", 1));
	struct iovec v[2] = { { data, 4 }, { data + 4, 6 } };
	ROW("writev", writev(s, v, 2));
	ROW("send", send(s, "0123456789", 10, 0));
	comes(s);
	ROW("read", read(s, data, 100));
	ROW("send again", send(s, "0123456789", 10, 0));
	comes(s);
	ROW("readv", readv(s, v, 2));
	ROW("send with MSG_OOB", send(s, "x", 1, MSG_OOB));
	ROW("send with MSG_NOSIGNAL", send(s, "x", 1, MSG_NOSIGNAL));
	ROW("send with MSG_MORE", send(s, "x", 1, MSG_MORE | MSG_DONTWAIT));
	ROW("send with MSG_EOR", send(s, "x", 1, MSG_EOR));
	for (int i = 0; i < 60; i++, usleep(PAUSE))
		recv(s, data, 100, MSG_DONTWAIT);
	ROW("recv with MSG_OOB", recv(s, data, 10, MSG_OOB));
	ROW("recv with MSG_ERRQUEUE", recv(s, data, 10, MSG_ERRQUEUE | MSG_DONTWAIT));
	ROW("recv of an empty queue", recv(s, data, 10, MSG_DONTWAIT));
	limit(s, SO_RCVTIMEO, 100);
	ROW("recv with SO_RCVTIMEO", recv(s, data, 10, 0));
	limit(s, SO_RCVTIMEO, 0);

	MUST(to(s, own, 4000, 10, 0));
	comes(s);
	in_child("recv into unwritable memory", unwritable, s);
	ROW("recv after it", recv(s, data, 100, MSG_DONTWAIT));
	in_child("send from unreadable memory", unreadable, s);
	ROW("recv of no memory", recv(s, NULL, 10, MSG_DONTWAIT));
	ROW("send of no memory", to(s, own, 4000, 0, 0));
	ROW("an empty message", take(s, 100, 0));
	MUST(to(s, own, 4000, 10, 0));
	ROW("truncated recvmsg", take(s, 4, 0));
	SAYS("truncated recvmsg: flags", got.msg_flags);
	SAYS("truncated recvmsg: name length", got.msg_namelen);
	MUST(to(s, own, 4000, 10, 0));
	ROW("with MSG_TRUNC and MSG_PEEK, no room", take(s, 0, MSG_TRUNC | MSG_PEEK));
	ROW("with MSG_PEEK", take(s, 4, MSG_PEEK));
	ROW("with MSG_TRUNC", take(s, 4, MSG_TRUNC));
	SAYS("with MSG_TRUNC: flags", got.msg_flags);

	ROW("SO_SNDBUF", get(s, SOL_SOCKET, SO_SNDBUF));
	ROW("SO_RCVBUF", get(s, SOL_SOCKET, SO_RCVBUF));
	int b = bound(own, 4010);
	ROW("SO_SNDBUF to 1000000000", set(b, SOL_SOCKET, SO_SNDBUF, 1000000000));
	SAYS("SO_SNDBUF, capped: twice wmem_max", get(b, SOL_SOCKET, SO_SNDBUF) == 2 * net_core("wmem_max"));
	ROW("SO_SNDBUF to 1", set(b, SOL_SOCKET, SO_SNDBUF, 1));
	ROW("SO_SNDBUF, least", get(b, SOL_SOCKET, SO_SNDBUF));
	ROW("SO_RCVBUF to 1000000000", set(b, SOL_SOCKET, SO_RCVBUF, 1000000000));
	SAYS("SO_RCVBUF, capped: twice rmem_max", get(b, SOL_SOCKET, SO_RCVBUF) == 2 * net_core("rmem_max"));
	ROW("SO_RCVBUF to 1", set(b, SOL_SOCKET, SO_RCVBUF, 1));
	ROW("SO_RCVBUF, least", get(b, SOL_SOCKET, SO_RCVBUF));
	ROW("SO_SNDBUFFORCE", set(b, SOL_SOCKET, 32, 500000));
	ROW("SO_RCVBUFFORCE", set(b, SOL_SOCKET, 33, 500000));
	ROW("SO_SNDBUF to 20000", set(b, SOL_SOCKET, SO_SNDBUF, 20000));
	ROW("SO_SNDBUF, doubled", get(b, SOL_SOCKET, SO_SNDBUF));
	ROW("send of 20001", to(b, own, 4000, 20001, MSG_DONTWAIT));
	ROW("into a queue, 1", to(b, nobody, 4000, 15000, MSG_DONTWAIT));
	ROW("into a queue, 2", to(b, nobody, 4000, 15000, MSG_DONTWAIT));
	ROW("into a full queue", to(b, nobody, 4000, 1, MSG_DONTWAIT));
	ROW("nothing into a full queue", to(b, nobody, 4000, 0, MSG_DONTWAIT));
	p = (struct pollfd){ .fd = b, .events = POLLOUT };
	ROW("poll of a full queue", poll(&p, 1, 0));

	/* a receiver that does not read: its port is congested */
	int full = bound(own, 4020), sender = bound(own, 4021);
	MUST(set(full, SOL_SOCKET, SO_RCVBUF, 4000));
	int n = 0;
	for (; n < 100 && to(sender, own, 4020, 2500, MSG_DONTWAIT) == 2500; n++)
		usleep(20000);
	SAYS("messages of 2500 into 4000", n);
	ROW("send to a congested port", to(sender, own, 4020, 1, MSG_DONTWAIT));
	limit(sender, SO_SNDTIMEO, 100);
	ROW("send with SO_SNDTIMEO", to(sender, own, 4020, 1, 0));
	limit(sender, SO_SNDTIMEO, 0);
	p = (struct pollfd){ .fd = sender, .events = POLLOUT };
	ROW("poll while congested", poll(&p, 1, 0));
	ROW("another port meanwhile", to(sender, own, 4000, 1, MSG_DONTWAIT));
	take(s, 100, 0);

	unsigned char tos[8] = { 1 };
	ROW("SIOCRDSSETTOS unbound", ioctl(new(), 0x89E0, tos));
	ROW("SIOCRDSSETTOS on 127.x", ioctl(local, 0x89E0, tos));
	int quiet = bound(own, 4030);
	ROW("SIOCRDSSETTOS on TCP", ioctl(quiet, 0x89E0, tos));
	tos[0] = 9;
	ROW("SIOCRDSGETTOS", ioctl(quiet, 0x89E1, tos));
	SAYS("SIOCRDSGETTOS: tos", tos[0]);
	MUST(to(quiet, peer, 4999, 1, MSG_DONTWAIT));
	ROW("SIOCRDSSETTOS after a send", ioctl(quiet, 0x89E0, tos));
	ROW("FIONREAD", ioctl(s, 0x541B, data));
	ROW("SIOCOUTQ", ioctl(s, 0x5411, data));
	ROW("ioctl 0x1234", ioctl(s, 0x1234, data));

	static const struct { const char *name; int number; } options[] = {
		{ "SO_REUSEPORT", 15 }, { "SO_REUSEADDR", 2 }, { "SO_KEEPALIVE", 9 }, { "SO_BROADCAST", 6 },
		{ "SO_PRIORITY", 12 }, { "SO_ZEROCOPY", 60 }, { "SO_MARK", 36 }, { "SO_DONTROUTE", 5 }, { "SO_OOBINLINE", 10 },
		{ "SO_DEBUG", 1 }, { "SO_RCVLOWAT", 18 }, { "SO_TIMESTAMP", 29 }, { "SO_TIMESTAMPNS", 35 },
		{ "SO_PASSCRED", 16 }, { "SO_BINDTOIFINDEX", 62 }, { "SO_INCOMING_CPU", 49 }, { "SO_NO_CHECK", 11 },
		{ "SO_TYPE", 3 }, { "SO_PROTOCOL", 38 }, { "SO_DOMAIN", 39 }, { "SO_ERROR", 4 }, { "SO_ACCEPTCONN", 30 },
	};
	int o = bound(own, 4040);
	for (unsigned i = 0; i < sizeof options / sizeof *options; i++) {
		snprintf(text, sizeof text, "%s", options[i].name);
		ROW(text, get(o, SOL_SOCKET, options[i].number));
		snprintf(text, sizeof text, "%s to 1", options[i].name);
		ROW(text, set(o, SOL_SOCKET, options[i].number, 1));
		snprintf(text, sizeof text, "%s, then", options[i].name);
		ROW(text, get(o, SOL_SOCKET, options[i].number));
	}
	struct linger linger = { 1, 2 };
	ROW("SO_LINGER", setsockopt(o, SOL_SOCKET, SO_LINGER, &linger, sizeof linger));
	ROW("SO_RCVTIMEO of 3 bytes", setsockopt(o, SOL_SOCKET, SO_RCVTIMEO, data, 3));

	for (int level = 0; level < 2; level++) {
		int t = bound(own, 4050 + level);
		const char *what = level ? "SO_TIMESTAMP at SOL_RDS" : "SO_TIMESTAMP at SOL_SOCKET";
		ROW(what, set(t, level ? SOL_RDS_ : SOL_SOCKET, 29, 1));
		MUST(to(t, own, 4050 + level, 5, 0));
		take(t, 100, 0);
		control_rows(what);
	}
	int l = bound(own, 4060);
	unsigned char trace[4] = { 1, 0, 1, 2 };
	ROW("RXPATH_LATENCY", setsockopt(l, SOL_RDS_, 10, trace, 4));
	ROW("RXPATH_LATENCY of 3 bytes", setsockopt(l, SOL_RDS_, 10, trace, 3));
	trace[0] = 9;
	ROW("RXPATH_LATENCY of 9 positions", setsockopt(l, SOL_RDS_, 10, trace, 4));
	MUST(to(l, own, 4060, 5, 0));
	take(l, 100, 0);
	control_rows("RXPATH_LATENCY");

	int c = bound(own, 4070);
	char zero[80] = { 0 };
	ROW("control message 10", with_control(c, SOL_RDS_, 10, zero, 16, 0, peer, 4999));
	ROW("control message 1 of another level", with_control(c, SOL_SOCKET, 2, zero, 16, 0, peer, 4999));
	ROW("RDMA_ARGS too short", with_control(c, SOL_RDS_, 1, zero, 55, 0, peer, 4999));
	ROW("RDMA_ARGS", with_control(c, SOL_RDS_, 1, zero, 56, 0, peer, 4999));
	ROW("RDMA_DEST, empty", with_control(c, SOL_RDS_, 2, zero, 0, 0, peer, 4999));
	ROW("RDMA_MAP", with_control(c, SOL_RDS_, 3, zero, 32, 0, peer, 4999));
	ROW("atomic with a bad pointer", with_control(c, SOL_RDS_, 6, zero, 72, 0, peer, 4999));
	uint32_t cookie = 77;
	ROW("ZCOPY_COOKIE without MSG_ZEROCOPY", with_control(c, SOL_RDS_, 12, &cookie, 4, 0, peer, 4999));
	int z = bound(own, 4080);
	ROW("MSG_ZEROCOPY without SO_ZEROCOPY", to(z, peer, 4999, 10, MSG_ZEROCOPY | MSG_DONTWAIT));
	MUST(set(z, SOL_SOCKET, SO_ZEROCOPY, 1));
	ROW("MSG_ZEROCOPY without cookie", to(z, peer, 4999, 10, MSG_ZEROCOPY | MSG_DONTWAIT));
	ROW("MSG_ZEROCOPY", with_control(z, SOL_RDS_, 12, &cookie, 4, MSG_ZEROCOPY, peer, 4999));
	ROW("its completion", take(z, 100, 0));
	control_rows("its completion");
	struct cmsghdr *h = CMSG_FIRSTHDR(&got);
	SAYS("its completion: cookies", h ? ((uint32_t *)CMSG_DATA(h))[0] : 0);
	SAYS("its completion: cookie", h ? ((uint32_t *)CMSG_DATA(h))[1] : 0);
	ROW("RDS_GET_MR", set_bytes(c, 2, 32));
	ROW("RDS_GET_MR of 31 bytes", set_bytes(c, 2, 31));
	ROW("RDS_GET_MR unbound", set_bytes(new(), 2, 32));
	ROW("RDS_GET_MR_FOR_DEST", set_bytes(c, 7, 160));
	ROW("RDS_FREE_MR", set_bytes(c, 3, 16));
	ROW("RDS_FREE_MR of 15 bytes", set_bytes(c, 3, 15));

	in_child("a child sends", sends_ten, s);
	ROW("what it sent", take(s, 100, 0));
	int copy = dup(c);
	ROW("a copy sends", to(copy, own, 4000, 20, 0));
	close(c);
	ROW("what it sent by a copy", take(s, 100, 0));
	ROW("the other copy sends", to(copy, own, 4000, 30, 0));
	ROW("what that sent", take(s, 100, 0));
	char path[40], link[64] = "";
	snprintf(path, sizeof path, "/proc/self/fd/%d", s);
	MUST(readlink(path, link, sizeof link - 1));
	SAYS("link is socket:[N]", !strncmp(link, "socket:[", 8));

	static const int infos[] = { 9999, 10000, 10001, 10002, 10003, 10004, 10005, 10006, 10007, 10008, 10009, 10010,
				     10011, 10012, 10013, 10014, 10015, 10016, 10017, 10018 };
	for (unsigned i = 0; i < sizeof infos / sizeof *infos; i++) {
		static char table[1 << 16];
		socklen_t room = sizeof table;
		snprintf(text, sizeof text, "info %d", infos[i]);
		ROW(text, getsockopt(s, SOL_RDS_, infos[i], table, &room));
	}
	len = 0;
	ROW("info 10000 without room", getsockopt(s, SOL_RDS_, 10000, NULL, &len));
	ROW("closed", close(s));
	ROW("close again", close(s));
	ROW("send on a closed one", to(s, own, 4000, 1, 0));
}

int main(int argc, char **argv)
{
	if (argc != 4)
		return fprintf(stderr, "usage: rds-errors OWN PEER NOBODY\n"), 2;
	own = argv[1], peer = argv[2], nobody = argv[3];
	struct sigaction act = { .sa_handler = on_alarm };
	sigaction(SIGALRM, &act, NULL);
	calls();
	return 0;
}
