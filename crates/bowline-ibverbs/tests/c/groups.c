/* A multicast group of two ids, one of whose queue pairs is destroyed without its id: what that id
 * leaves then is its own membership, and not that of the queue pair which has come to its place. */
#include "must.h"
#include <arpa/inet.h>
#include <netinet/in.h>
#include <rdma/rdma_cma.h>
#include <string.h>

static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_cq *cq;
static struct ibv_mr *mr;
static char bytes[4096];
static struct rdma_event_channel *channel;
static struct sockaddr_in at = { .sin_family = AF_INET }, group = { .sin_family = AF_INET };

static struct rdma_cm_id *bound(void)
{
	struct rdma_cm_id *id;
	MUST(rdma_create_id(channel, &id, NULL, RDMA_PS_UDP) == 0);
	MUST(rdma_bind_addr(id, (struct sockaddr *)&at) == 0);
	/* The context of ids is that of no other calls. */
	context = id->verbs;
	if (!pd) {
		pd = ibv_alloc_pd(context);
		cq = ibv_create_cq(context, 16, NULL, NULL, 0);
		mr = ibv_reg_mr(pd, bytes, sizeof bytes, IBV_ACCESS_LOCAL_WRITE);
		MUST(pd && cq && mr);
	}
	return id;
}

static void give_queue_pair(struct rdma_cm_id *id)
{
	struct ibv_qp_init_attr init = {
		.send_cq = cq,
		.recv_cq = cq,
		.cap = { .max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1 },
		.qp_type = IBV_QPT_UD,
	};
	MUST(rdma_create_qp(id, pd, &init) == 0);
}

/* Joins the group; returns the way to it. */
static struct ibv_ah *join(struct rdma_cm_id *id)
{
	struct rdma_cm_event *event;
	MUST(rdma_join_multicast(id, (struct sockaddr *)&group, NULL) == 0);
	MUST(rdma_get_cm_event(channel, &event) == 0);
	MUST(event->event == RDMA_CM_EVENT_MULTICAST_JOIN && event->id == id);
	struct ibv_ah *way = ibv_create_ah(pd, &event->param.ud.ah_attr);
	MUST(way);
	MUST(rdma_ack_cm_event(event) == 0);
	return way;
}

static struct ibv_wc next(void)
{
	struct ibv_wc wc;
	int count;
	while ((count = ibv_poll_cq(cq, 1, &wc)) == 0)
		;
	MUST(count == 1 && wc.status == IBV_WC_SUCCESS);
	return wc;
}

int main(int count, char **words)
{
	MUST(count == 2 && inet_pton(AF_INET, words[1], &at.sin_addr) == 1);
	MUST(inet_pton(AF_INET, "239.81.6.3", &group.sin_addr) == 1);
	MUST(channel = rdma_create_event_channel());
	struct rdma_cm_id *leaver = bound(), *member = bound(), *sender = bound();
	give_queue_pair(leaver);
	give_queue_pair(sender);
	struct ibv_ah *ways[] = { join(leaver), NULL };

	void *place = leaver->qp;
	MUST(ibv_destroy_qp(leaver->qp) == 0);
	give_queue_pair(member);
	/* The C library gives memory again that was given back last. */
	MUST(member->qp == place);
	ways[1] = join(member);
	MUST(rdma_leave_multicast(leaver, (struct sockaddr *)&group) == 0);

	struct ibv_sge sge = { .addr = (uintptr_t)bytes, .length = 104, .lkey = mr->lkey };
	struct ibv_recv_wr receive = { .wr_id = 1, .sg_list = &sge, .num_sge = 1 }, *bad_receive;
	MUST(ibv_post_recv(member->qp, &receive, &bad_receive) == 0);
	struct ibv_sge from = { .addr = (uintptr_t)bytes + 2048, .length = 64, .lkey = mr->lkey };
	memset(bytes + 2048, 'm', 64);
	struct ibv_send_wr send = {
		.wr_id = 2,
		.sg_list = &from,
		.num_sge = 1,
		.opcode = IBV_WR_SEND,
		.send_flags = IBV_SEND_SIGNALED,
		.wr.ud = { .ah = ways[1], .remote_qpn = 0xffffff, .remote_qkey = RDMA_UDP_QKEY },
	}, *bad;
	MUST(ibv_post_send(sender->qp, &send, &bad) == 0);
	/* The send is done, and the member hears it. */
	MUST((next().wr_id | next().wr_id) == 3);
	MUST(memcmp(bytes + 40, bytes + 2048, 64) == 0);
	MUST(rdma_leave_multicast(member, (struct sockaddr *)&group) == 0);
	MUST(ibv_destroy_ah(ways[0]) == 0 && ibv_destroy_ah(ways[1]) == 0);
	leaver->qp = NULL;
	rdma_destroy_qp(member);
	rdma_destroy_qp(sender);
	MUST(rdma_destroy_id(leaver) == 0 && rdma_destroy_id(member) == 0);
	MUST(rdma_destroy_id(sender) == 0);
	rdma_destroy_event_channel(channel);
	MUST(ibv_dereg_mr(mr) == 0 && ibv_destroy_cq(cq) == 0 && ibv_dealloc_pd(pd) == 0);
	return 0;
}
