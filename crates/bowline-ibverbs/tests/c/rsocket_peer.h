/* A peer of a socket over RDMA that is a queue pair of the program. */
#include <rdma/rdma_verbs.h>
#include <stdint.h>
#include <string.h>

/* What it says to a socket. */
static uint8_t hello[40];
/* Memory that a socket writes to: a table of two windows, and the first window. */
static char given[8192];
static struct ibv_mr *given_mr;

/* An endpoint of the rdma_cm on its way to a socket. */
static struct rdma_cm_id *endpoint(const char *address, const char *port)
{
	struct rdma_addrinfo hints = { .ai_port_space = RDMA_PS_TCP }, *found;
	struct ibv_qp_init_attr attr = {
		.cap = { .max_send_wr = 4, .max_recv_wr = 64, .max_send_sge = 1, .max_recv_sge = 1 },
		.qp_type = IBV_QPT_RC,
		.sq_sig_all = 1,
	};
	struct rdma_cm_id *id;
	MUST(rdma_getaddrinfo(address, port, &hints, &found) == 0);
	MUST(rdma_create_ep(&id, found, NULL, &attr) == 0);
	rdma_freeaddrinfo(found);
	struct ibv_recv_wr wr = { 0 }, *refused;
	for (int i = 0; i < 64; i++)
		MUST(ibv_post_recv(id->qp, &wr, &refused) == 0);
	return id;
}

static void put(uint8_t *at, uint64_t number, int len)
{
	while (len--) {
		at[len] = number;
		number >>= 8;
	}
}

/* What a socket that follows the protocol sends. */
static void good_hello(struct ibv_pd *pd)
{
	if (!given_mr)
		given_mr = ibv_reg_mr(pd, given, sizeof given,
				      IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
	MUST(given_mr);
	memset(hello, 0, sizeof hello);
	put(hello, 1, 1);
	put(hello + 1, 2, 1);
	put(hello + 2, 16, 2);
	put(hello + 8, (uintptr_t)given, 8);
	put(hello + 16, given_mr->rkey, 4);
	put(hello + 20, 2, 4);
	put(hello + 24, (uintptr_t)given + 4096, 8);
	put(hello + 32, given_mr->rkey, 4);
	put(hello + 36, 4096, 4);
}

static struct rdma_conn_param parameters(void)
{
	return (struct rdma_conn_param){
		.private_data = hello,
		.private_data_len = sizeof hello,
		.rnr_retry_count = 7,
		.retry_count = 7,
	};
}

static int connects(struct rdma_cm_id *id)
{
	struct rdma_conn_param param = parameters();
	return rdma_connect(id, &param);
}
