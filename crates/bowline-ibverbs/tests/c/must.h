/* What all programs of this folder begin with. */
#include <errno.h>
#include <infiniband/verbs.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

/* Prints the line of the first thing that is not as it must be, and ends the program. */
#define MUST(what) \
	do { \
		if (!(what)) { \
			printf("line %d: %s: %m\n", __LINE__, #what); \
			exit(1); \
		} \
	} while (0)

/* A program that waits for what does not come is ended. */
__attribute__((constructor)) static void limit(void)
{
	alarm(60);
}

/* Opens the device. */
static inline struct ibv_context *opened(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	MUST(list && list[0] && !list[1]);
	struct ibv_context *context = ibv_open_device(list[0]);
	MUST(context);
	ibv_free_device_list(list);
	return context;
}
