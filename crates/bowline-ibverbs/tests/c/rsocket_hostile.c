/* Peers of a socket that do not follow its protocol: a queue pair of this process. Each costs its own
 * connection and nothing else. Prints the line of the first thing that is not as it must be. */
#include <arpa/inet.h>
#include <errno.h>
#include <pthread.h>
#include <rdma/rsocket.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "must.h"
#include "rsocket_peer.h"

static const char *address;
static int listening;

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

/* Passed twice by each peer and its socket: when the socket is accepted, and when it may read. */
static pthread_barrier_t together;

/* What a peer does to a socket is seen by a read. */
static void *reads(void *of)
{
	char byte;
	int fd = raccept(listening, NULL, NULL);
	MUST(fd >= 0);
	pthread_barrier_wait(&together);
	pthread_barrier_wait(&together);
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

/* A peer that also ends the connection before its message is looked at has not ended it in good order. */
static void misbehaves(const struct message *message, bool ends)
{
	pthread_t thread;
	MUST(pthread_create(&thread, NULL, reads, NULL) == 0);
	struct rdma_cm_id *id = endpoint(address, "7010");
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
	pthread_barrier_wait(&together);
	MUST(ibv_post_send(id->qp, &wr, &refused) == 0);
	if (ends) {
		struct ibv_wc done;
		MUST(rdma_get_send_comp(id, &done) == 1 && done.status == IBV_WC_SUCCESS);
		MUST(rdma_disconnect(id) == 0);
	}
	pthread_barrier_wait(&together);
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

static void event(struct rdma_event_channel *channel, enum rdma_cm_event_type kind)
{
	struct rdma_cm_event *event;
	MUST(rdma_get_cm_event(channel, &event) == 0);
	MUST(event->event == kind && event->status == 0);
	MUST(rdma_ack_cm_event(event) == 0);
}

/* A peer that says nothing after it was answered keeps no other one from being accepted. */
static void falls_silent(struct sockaddr_in *at)
{
	alarm(30);
	struct rdma_event_channel *channel = rdma_create_event_channel();
	struct rdma_cm_id *id;
	MUST(channel && rdma_create_id(channel, &id, NULL, RDMA_PS_TCP) == 0);
	MUST(rdma_resolve_addr(id, NULL, (void *)at, 2000) == 0);
	event(channel, RDMA_CM_EVENT_ADDR_RESOLVED);
	MUST(rdma_resolve_route(id, 2000) == 0);
	event(channel, RDMA_CM_EVENT_ROUTE_RESOLVED);
	/* The rdma_cm leaves the queue pair and the last message of connecting to the program. */
	struct ibv_cq *cq = ibv_create_cq(id->verbs, 8, NULL, NULL, 0);
	struct ibv_qp_init_attr attr = {
		.send_cq = cq,
		.recv_cq = cq,
		.cap = { .max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1 },
		.qp_type = IBV_QPT_RC,
	};
	struct ibv_qp *qp = ibv_create_qp(id->pd, &attr);
	MUST(cq && qp);
	good_hello(id->pd);
	struct rdma_conn_param param = parameters();
	param.qp_num = qp->qp_num;
	MUST(rdma_connect(id, &param) == 0);
	int silent = raccept(listening, NULL, NULL);
	MUST(silent >= 0);
	event(channel, RDMA_CM_EVENT_CONNECT_RESPONSE);
	char byte;
	MUST(rrecv(silent, &byte, 1, MSG_DONTWAIT) == -1 && errno == EAGAIN);

	pthread_t thread;
	MUST(pthread_create(&thread, NULL, accepts, NULL) == 0);
	int fd = rsocket(AF_INET, SOCK_STREAM, 0);
	MUST(rconnect(fd, (void *)at, sizeof *at) == 0 && rsend(fd, "x", 1, 0) == 1);
	pthread_join(thread, NULL);
	MUST(rclose(fd) == 0 && rclose(silent) == 0);
	MUST(rdma_destroy_id(id) == 0 && ibv_destroy_qp(qp) == 0 && ibv_destroy_cq(cq) == 0);
	rdma_destroy_event_channel(channel);
	alarm(60);
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
		struct rdma_cm_id *id = endpoint(address, "7010");
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

	falls_silent(&at);
	MUST(pthread_barrier_init(&together, NULL, 2) == 0);
	for (unsigned i = 0; i < sizeof bad / sizeof *bad; i++) {
		misbehaves(&bad[i], false);
		misbehaves(&bad[i], true);
	}
	MUST(rclose(listening) == 0);
	return 0;
}
