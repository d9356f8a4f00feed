/*
 * What a naive replacement of RDS would be: its sockets are those of UDP. Programs that look at the
 * interface only are content with it; those that need what RDS promises are not.
 */
#define _GNU_SOURCE
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

int socket(int domain, int type, int protocol)
{
	if (domain == 21) {
		domain = AF_INET;
		type = SOCK_DGRAM | (type & (SOCK_CLOEXEC | SOCK_NONBLOCK));
	}
	return (int)syscall(SYS_socket, domain, type, protocol);
}
