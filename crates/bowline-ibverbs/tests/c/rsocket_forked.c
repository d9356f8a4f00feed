/* A child of a process that has sockets over RDMA: what it does with its copies is no matter of the
 * parent's connections, and sockets of its own are at another address. Prints the line of the first
 * thing that is not as it must be. */
#include <arpa/inet.h>
#include <fcntl.h>
#include <rdma/rsocket.h>
#include <sys/wait.h>

#include "must.h"
#define FAILS(what, with) MUST((what) == -1 && errno == (with))

/* A listener, and the two ends of a connection. */
static void connected(const char *address, int fds[3])
{
	struct sockaddr_in at = {
		.sin_family = AF_INET,
		.sin_port = htons(7012),
		.sin_addr.s_addr = inet_addr(address),
	};
	for (int i = 0; i < 2; i++)
		MUST((fds[i] = rsocket(AF_INET, SOCK_STREAM, 0)) >= 0);
	MUST(rbind(fds[0], (void *)&at, sizeof at) == 0 && rlisten(fds[0], 4) == 0);
	MUST(rfcntl(fds[1], F_SETFL, O_NONBLOCK) == 0);
	FAILS(rconnect(fds[1], (void *)&at, sizeof at), EINPROGRESS);
	MUST((fds[2] = raccept(fds[0], NULL, NULL)) >= 0);
	MUST(rfcntl(fds[1], F_SETFL, 0) == 0);
}

static void transfers(int fds[3])
{
	char bytes[6];
	for (int i = 1; i < 3; i++) {
		MUST(rsend(fds[i], "bytes", 6, 0) == 6);
		MUST(rrecv(fds[3 - i], bytes, 6, MSG_WAITALL) == 6 && bytes[4] == 's');
	}
}

static void closed(int fds[3])
{
	for (int i = 0; i < 3; i++) {
		MUST(rclose(fds[i]) == 0);
		MUST(fcntl(fds[i], F_GETFD) == -1 && errno == EBADF);
		FAILS(rclose(fds[i]), EBADF);
	}
}

static void child(int fds[3])
{
	char byte;
	int own[3], again;
	alarm(30);
	FAILS(rsend(fds[1], "x", 1, 0), EBADF);
	FAILS(rrecv(fds[2], &byte, 1, 0), EBADF);
	FAILS(raccept(fds[0], NULL, NULL), EBADF);
	FAILS(rshutdown(fds[1], SHUT_RDWR), EBADF);
	MUST(rclose(fds[1]) == 0);
	FAILS(rclose(fds[1]), EBADF);
	MUST(setenv("BOWLINE_VERBS_ADDRS", "127.81.6.12", 1) == 0);
	connected("127.81.6.12", own);
	transfers(own);
	/* The number of a copy that was closed by another call is used again. */
	MUST(close(fds[2]) == 0);
	do
		MUST((again = rsocket(AF_INET, SOCK_STREAM, 0)) >= 0);
	while (again != fds[2]);
	MUST(rclose(again) == 0);
	closed(own);
	MUST(rclose(fds[0]) == 0);
	exit(0);
}

int main(int argc, char **argv)
{
	int fds[3], status;
	MUST(argc == 2);
	connected(argv[1], fds);
	transfers(fds);
	pid_t pid = fork();
	MUST(pid >= 0);
	if (pid == 0)
		child(fds);
	MUST(waitpid(pid, &status, 0) == pid);
	MUST(WIFEXITED(status) && WEXITSTATUS(status) == 0);
	transfers(fds);
	closed(fds);
	return 0;
}
