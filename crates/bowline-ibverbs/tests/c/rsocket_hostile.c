/* Peers of a socket that do not follow its protocol: a queue pair of this process. Each costs its own
 * connection and nothing else. Prints the line of the first thing that is not as it must be. */
#include <arpa/inet.h>
#include <errno.h>
#include <pthread.h>
#include <rdma/rdma_verbs.h>
#include <rdma/rsocket.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "must.h"

static const char *address;
static int listening;
static uint8_t hello[40];
/* Memory that a socket writes to: a table of two windows, and the first window. */
static char given[8192];
static struct ibv_mr *given_mr;

/* An entry of 24 bytes without sense, and the first bytes of it for a window. */
static char entry[24];

struct message {
	enum ibv_wr_opcode opcode;
	uint32_t immediate, len;
	/* Where: 1 the table, 2 the window, 0 nowhere. */
	int place;
};

static const struct message bad[] = {
	{ IBV_WR_SEND, 0, 0, 0 },
	{ IBV_WR_RDMA_WRITE_WITH_IMM, 0x20000000, 0, 0 },
	{ IBV_WR_RDMA_WRITE_WITH_IMM, 0xa0000000, 0, 0 },
	{ IBV_WR_RDMA_WRITE_WITH_IMM, 0xe0000001, 0, 0 },
	{ IBV_WR_RDMA_WRITE_WITH_IMM, 0x00000009, 8, 2 },
	{ IBV_WR_RDMA_WRITE_WITH_IMM, 0x1fffffff, 0, 0 },
	{ IBV_WR_RDMA_WRITE_WITH_IMM, 0x80000001, 16, 1 },
	{ IBV_WR_RDMA_WRITE_WITH_IMM, 0x80000001, 7, 1 },
	{ IBV_WR_RDMA_WRITE_WITH_IMM, 0xc0000000, 24, 2 },
	{ IBV_WR_RDMA_WRITE_WITH_IMM, 0xdfffffff, 24, 2 },
};

static struct rdma_cm_id *endpoint(void)
{
	struct rdma_addrinfo hints = { .ai_port_space = RDMA_PS_TCP }, *found;
	struct ibv_qp_init_attr attr = {
		.cap = { .max_send_wr = 4, .max_recv_wr = 64, .max_send_sge = 1, .max_recv_sge = 1 },
		.qp_type = IBV_QPT_RC,
		.sq_sig_all = 1,
	};
	struct rdma_cm_id *id;
	MUST(rdma_getaddrinfo(address, "7010", &hints, &found) == 0);
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

static int connects(struct rdma_cm_id *id)
{
	struct rdma_conn_param param = {
		.private_data = hello,
		.private_data_len = sizeof hello,
		.rnr_retry_count = 7,
		.retry_count = 7,
	};
	return rdma_connect(id, &param);
}

/* What a peer does to a socket is seen by a read. */
static void *reads(void *of)
{
	char byte;
	int fd = raccept(listening, NULL, NULL);
	MUST(fd >= 0);
	MUST(rrecv(fd, &byte, 1, 0) == -1 && errno == ECONNRESET);
	MUST(rsend(fd, &byte, 1, 0) == -1 && errno == ECONNRESET);
	struct pollfd one = { .fd = fd, .events = POLLIN };
	MUST(rpoll(&one, 1, -1) == 1 && one.revents == (POLLIN | POLLERR | POLLHUP));
	MUST(rclose(fd) == 0);
	return of;
}

static uint64_t number(const uint8_t *at, int len)
{
	uint64_t out = 0;
	while (len--)
		out = out << 8 | *at++;
	return out;
}

static void misbehaves(const struct message *message)
{
	pthread_t thread;
	MUST(pthread_create(&thread, NULL, reads, NULL) == 0);
	struct rdma_cm_id *id = endpoint();
	good_hello(id->pd);
	MUST(connects(id) == 0);
	MUST(id->event->param.conn.private_data_len >= sizeof hello);
	const uint8_t *peer = id->event->param.conn.private_data;
	const uint8_t *place = peer + (message->place == 1 ? 8 : 24);
	struct ibv_mr *mr = ibv_reg_mr(id->pd, entry, sizeof entry, 0);
	struct ibv_sge sge = { (uintptr_t)entry, message->len, mr->lkey };
	struct ibv_send_wr wr = {
		.sg_list = &sge,
		.num_sge = message->len > 0,
		.opcode = message->opcode,
		.imm_data = htonl(message->immediate),
	}, *refused;
	if (message->place) {
		/* The second entry of the table comes first. */
		wr.wr.rdma.remote_addr = number(place, 8) + (message->place == 1 ? 16 : 0);
		wr.wr.rdma.rkey = number(place + 8, 4);
	}
	MUST(ibv_post_send(id->qp, &wr, &refused) == 0);
	pthread_join(thread, NULL);
	MUST(ibv_dereg_mr(mr) == 0);
	rdma_destroy_ep(id);
}

static void *accepts(void *of)
{
	int fd = raccept(listening, NULL, NULL);
	char byte;
	MUST(fd >= 0 && rrecv(fd, &byte, 1, 0) == 1 && byte == 'x' && rclose(fd) == 0);
	return of;
}

int main(int argc, char **argv)
{
	/* Byte and value that make a hello senseless. */
	static const uint8_t wrong[][2] = {
		{ 0, 2 }, { 0, 0 }, { 1, 3 }, { 3, 0 }, { 23, 0 }, { 38, 0 },
	};
	struct sockaddr_in at = { .sin_family = AF_INET, .sin_port = htons(7010) };
	pthread_t thread;
	MUST(argc == 2);
	address = argv[1];
	at.sin_addr.s_addr = inet_addr(address);
	listening = rsocket(AF_INET, SOCK_STREAM, 0);
	MUST(rbind(listening, (void *)&at, sizeof at) == 0 && rlisten(listening, 8) == 0);

	MUST(pthread_create(&thread, NULL, accepts, NULL) == 0);
	for (unsigned i = 0; i < sizeof wrong / sizeof *wrong; i++) {
		struct rdma_cm_id *id = endpoint();
		good_hello(id->pd);
		hello[wrong[i][0]] = wrong[i][1];
		MUST(connects(id) == -1 && errno == ECONNREFUSED);
		rdma_destroy_ep(id);
	}
	/* The thread accepts one that is good. */
	int fd = rsocket(AF_INET, SOCK_STREAM, 0);
	MUST(rconnect(fd, (void *)&at, sizeof at) == 0 && rsend(fd, "x", 1, 0) == 1);
	pthread_join(thread, NULL);
	MUST(rclose(fd) == 0);

	for (unsigned i = 0; i < sizeof bad / sizeof *bad; i++)
		misbehaves(&bad[i]);
	MUST(rclose(listening) == 0);
	return 0;
}
