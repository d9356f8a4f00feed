/* Endpoints whose calls wait, where a call fails. Prints the line of the first thing that is not as it
 * must be. */
#include <pthread.h>
#include <rdma/rdma_verbs.h>
#include <string.h>

#include "must.h"

static const char *address;

static struct rdma_cm_id *endpoint(int flags, const char *port, int requests)
{
	struct rdma_addrinfo hints = { .ai_port_space = RDMA_PS_TCP, .ai_flags = flags }, *found;
	struct ibv_qp_init_attr attr = {
		.cap = {
			.max_send_wr = requests,
			.max_recv_wr = 4,
			.max_send_sge = 1,
			.max_recv_sge = 1,
		},
		.qp_type = IBV_QPT_RC,
	};
	struct rdma_cm_id *id;
	MUST(rdma_getaddrinfo(address, port, &hints, &found) == 0);
	MUST(rdma_create_ep(&id, found, NULL, &attr) == 0);
	rdma_freeaddrinfo(found);
	return id;
}

static void *accepts(void *of)
{
	struct rdma_cm_id *listener = of, *id;
	MUST(rdma_get_request(listener, &id) == 0 && rdma_accept(id, NULL) == 0);
	return id;
}

static void *fails(void *of)
{
	struct rdma_cm_id *listener = of, *id;
	MUST(rdma_get_request(listener, &id) == -1 && errno != 0 && errno != EAGAIN);
	return NULL;
}

/* No event comes of what is not connected: nothing is waited for. */
static void disconnects(void)
{
	struct rdma_cm_id *id = endpoint(0, "7020", 4);
	MUST(rdma_connect(id, NULL) == -1 && errno == ECONNREFUSED);
	MUST(rdma_disconnect(id) == 0);
	rdma_destroy_ep(id);

	pthread_t thread;
	void *peer;
	struct rdma_cm_id *listener = endpoint(RAI_PASSIVE, "7021", 4);
	MUST(rdma_listen(listener, 4) == 0);
	MUST(pthread_create(&thread, NULL, accepts, listener) == 0);
	id = endpoint(0, "7021", 4);
	MUST(rdma_connect(id, NULL) == 0);
	pthread_join(thread, &peer);
	for (int i = 0; i < 4; i++)
		MUST(rdma_disconnect(id) == 0 && rdma_disconnect(peer) == 0);
	rdma_destroy_ep(id);
	rdma_destroy_ep(peer);
	rdma_destroy_ep(listener);
}

/* The peer of a request that the program does not get is refused. */
static void refuses(void)
{
	pthread_t thread;
	struct rdma_cm_id *listener = endpoint(RAI_PASSIVE, "7022", 1 << 24);
	MUST(rdma_listen(listener, 4) == 0);
	for (int i = 0; i < 2; i++) {
		MUST(pthread_create(&thread, NULL, fails, listener) == 0);
		struct rdma_cm_id *id = endpoint(0, "7022", 4);
		MUST(rdma_connect(id, NULL) == -1 && errno == ECONNREFUSED);
		pthread_join(thread, NULL);
		rdma_destroy_ep(id);
	}
	rdma_destroy_ep(listener);
}

int main(int argc, char **argv)
{
	MUST(argc == 2);
	address = argv[1];
	alarm(30);
	disconnects();
	alarm(30);
	refuses();
	return 0;
}
