/* A peer of a socket whose process has ended, or so it seems: the connection manager ends the
 * connection, and nothing was said on it. The peer is another process, at another address. Prints the
 * line of the first thing that is not as it must be. */
#include <arpa/inet.h>
#include <poll.h>
#include <rdma/rsocket.h>
#include <sys/wait.h>

#include "must.h"
#include "rsocket_peer.h"

/* What is read together with the end is looked at many times. */
#define TIMES 20

/* Connects and, when the parent has heard of it, ends the connection. */
static void peer(const char *address, int accepted)
{
	char byte;
	alarm(60);
	for (int i = 0; i < TIMES; i++) {
		struct rdma_cm_id *id = endpoint(address, "7011");
		good_hello(id->pd);
		MUST(connects(id) == 0);
		MUST(read(accepted, &byte, 1) == 1);
		MUST(rdma_disconnect(id) == 0);
		rdma_destroy_ep(id);
	}
	exit(0);
}

int main(int argc, char **argv)
{
	struct sockaddr_in at = { .sin_family = AF_INET, .sin_port = htons(7011) };
	int accepted[2], status;
	char byte;
	MUST(argc == 2 && pipe(accepted) == 0);
	pid_t child = fork();
	MUST(child >= 0);
	if (child == 0) {
		MUST(setenv("BOWLINE_VERBS_ADDRS", "127.81.6.11", 1) == 0);
		peer(argv[1], accepted[0]);
	}
	at.sin_addr.s_addr = inet_addr(argv[1]);
	int listening = rsocket(AF_INET, SOCK_STREAM, 0);
	MUST(rbind(listening, (void *)&at, sizeof at) == 0 && rlisten(listening, 8) == 0);
	for (int i = 0; i < TIMES; i++) {
		int fd = raccept(listening, NULL, NULL);
		MUST(fd >= 0);
		struct pollfd one = { .fd = fd, .events = POLLOUT };
		MUST(rpoll(&one, 1, -1) == 1 && one.revents == POLLOUT);
		MUST(write(accepted[1], "x", 1) == 1);
		/* It is read as the end [RSK-8], by whatever call notices it. */
		one.events = POLLIN;
		if (i % 2) {
			ssize_t number;
			while ((number = rrecv(fd, &byte, 1, MSG_DONTWAIT)) == -1)
				MUST(errno == EAGAIN);
			MUST(number == 0);
		} else {
			while (rpoll(&one, 1, 0) == 0)
				;
		}
		MUST(rpoll(&one, 1, 0) == 1 && one.revents == (POLLIN | POLLHUP));
		MUST(rrecv(fd, &byte, 1, 0) == 0);
		MUST(rsend(fd, &byte, 1, 0) == -1 && errno == EPIPE);
		MUST(rclose(fd) == 0);
	}
	MUST(waitpid(child, &status, 0) == child);
	MUST(WIFEXITED(status) && WEXITSTATUS(status) == 0);
	MUST(rclose(listening) == 0);
	return 0;
}
