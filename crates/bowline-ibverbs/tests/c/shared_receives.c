/* Shared receive queues as a program of C has them: calls in the right and the wrong order, and
 * their events. */
#include "must.h"
#include <netinet/in.h>
#include <arpa/inet.h>
#include <rdma/rdma_cma.h>
#include <rdma/rdma_verbs.h>

static struct ibv_context *context;
static char bytes[4096];

static struct ibv_async_event next_event(void)
{
	struct ibv_async_event event;
	MUST(ibv_get_async_event(context, &event) == 0);
	ibv_ack_async_event(&event);
	return event;
}

static void objects(void)
{
	struct ibv_pd *pd = ibv_alloc_pd(context);
	struct ibv_cq *cq = ibv_create_cq(context, 10, NULL, NULL, 0);
	struct ibv_mr *mr = ibv_reg_mr(pd, bytes, sizeof bytes, IBV_ACCESS_LOCAL_WRITE);
	MUST(pd && cq && mr);

	struct ibv_device_attr device;
	MUST(ibv_query_device(context, &device) == 0);
	MUST(device.max_srq > 0 && device.max_srq_wr > 4 && device.max_srq_sge > 1);
	MUST(device.device_cap_flags & IBV_DEVICE_SRQ_RESIZE);

	struct ibv_srq_init_attr large = { .attr = { .max_wr = device.max_srq_wr + 1, .max_sge = 1 } };
	MUST(ibv_create_srq(pd, &large) == NULL && errno == EINVAL);
	struct ibv_srq_init_attr_ex ex = {
		.attr = { .max_wr = 4, .max_sge = 1 },
		.comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD | IBV_SRQ_INIT_ATTR_CQ,
		.srq_type = IBV_SRQT_XRC,
		.pd = pd,
		.cq = cq,
	};
	MUST(ibv_create_srq_ex(context, &ex) == NULL && errno == EOPNOTSUPP);
	ex.comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD;
	ex.srq_type = IBV_SRQT_BASIC;
	ex.srq_context = bytes;
	struct ibv_srq *srq = ibv_create_srq_ex(context, &ex);
	MUST(srq && srq->context == context && srq->pd == pd && srq->srq_context == bytes);
	uint32_t number;
	MUST(ibv_get_srq_num(srq, &number) == EOPNOTSUPP);

	struct ibv_qp_init_attr init = {
		.send_cq = cq,
		.recv_cq = cq,
		.srq = srq,
		.cap = { .max_send_wr = 1, .max_recv_wr = 1 << 30, .max_send_sge = 1 },
		.qp_type = IBV_QPT_RC,
	};
	struct ibv_qp *qp = ibv_create_qp(pd, &init);
	MUST(qp && qp->srq == srq && init.cap.max_recv_wr == 0);
	MUST(ibv_destroy_srq(srq) == EBUSY);
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1 };
	int given = IBV_QP_STATE | IBV_QP_PORT | IBV_QP_PKEY_INDEX | IBV_QP_ACCESS_FLAGS;
	MUST(ibv_modify_qp(qp, &attr, given) == 0);
	struct ibv_qp_init_attr shown;
	MUST(ibv_query_qp(qp, &attr, IBV_QP_STATE, &shown) == 0 && shown.srq == srq);

	struct ibv_sge sge = { .addr = (uintptr_t)bytes, .length = 16, .lkey = mr->lkey };
	struct ibv_recv_wr second = { .wr_id = 2, .sg_list = &sge, .num_sge = 2 }, *bad;
	struct ibv_recv_wr first = { .wr_id = 1, .next = &second, .sg_list = &sge, .num_sge = 1 };
	MUST(ibv_post_recv(qp, &first, &bad) == EINVAL && bad == &first);
	MUST(ibv_post_srq_recv(srq, &first, &bad) == EINVAL && bad == &second);

	struct ibv_srq_attr change = { .max_wr = 8, .srq_limit = 2 };
	MUST(ibv_modify_srq(srq, &change, 4) == EINVAL);
	MUST(ibv_modify_srq(srq, &change, IBV_SRQ_MAX_WR | IBV_SRQ_LIMIT) == 0);
	struct ibv_async_event event = next_event();
	MUST(event.event_type == IBV_EVENT_SRQ_LIMIT_REACHED && event.element.srq == srq);
	MUST(ibv_query_srq(srq, &change) == 0);
	MUST(change.max_wr == 8 && change.max_sge == 1 && change.srq_limit == 0);

	attr.qp_state = IBV_QPS_ERR;
	MUST(ibv_modify_qp(qp, &attr, IBV_QP_STATE) == 0);
	event = next_event();
	MUST(event.event_type == IBV_EVENT_QP_LAST_WQE_REACHED && event.element.qp == qp);

	MUST(ibv_destroy_qp(qp) == 0);
	/* An event that nobody has read goes with its queue. */
	change.srq_limit = 2;
	MUST(ibv_modify_srq(srq, &change, IBV_SRQ_LIMIT) == 0);
	MUST(ibv_destroy_srq(srq) == 0);
	MUST(ibv_dereg_mr(mr) == 0 && ibv_destroy_cq(cq) == 0 && ibv_dealloc_pd(pd) == 0);
}

static void ids(const char *addr)
{
	struct rdma_cm_id *id;
	struct sockaddr_in at = { .sin_family = AF_INET };
	MUST(inet_pton(AF_INET, addr, &at.sin_addr) == 1);
	MUST(rdma_create_id(NULL, &id, NULL, RDMA_PS_TCP) == 0);
	struct ibv_srq_init_attr srq = { .attr = { .max_wr = 4, .max_sge = 1 } };
	MUST(rdma_create_srq(id, NULL, &srq) == -1 && errno == EINVAL);
	MUST(rdma_bind_addr(id, (struct sockaddr *)&at) == 0);
	MUST(rdma_create_srq(id, NULL, &srq) == 0 && id->srq);
	MUST(rdma_create_srq(id, NULL, &srq) == -1 && errno == EINVAL);
	struct ibv_qp_init_attr init = {
		.cap = { .max_send_wr = 1, .max_send_sge = 1 },
		.qp_type = IBV_QPT_RC,
	};
	/* All of its receives may be this queue pair's. */
	MUST(rdma_create_qp(id, NULL, &init) == 0 && id->qp->srq == id->srq);
	MUST(id->recv_cq->cqe >= 4);
	rdma_destroy_qp(id);
	struct ibv_qp_init_attr_ex init_ex = { .cap = init.cap, .qp_type = IBV_QPT_RC };
	MUST(rdma_create_qp_ex(id, &init_ex) == 0 && id->qp->srq == id->srq);
	MUST(id->recv_cq->cqe >= 4);
	struct ibv_mr *mr = rdma_reg_msgs(id, bytes, sizeof bytes);
	MUST(mr && rdma_post_recv(id, NULL, bytes, 16, mr) == 0);
	rdma_destroy_qp(id);
	rdma_destroy_srq(id);
	MUST(id->srq == NULL);
	struct ibv_srq_init_attr_ex ex = { .attr = srq.attr };
	MUST(rdma_create_srq_ex(id, &ex) == 0 && id->srq);
	ex.comp_mask = IBV_SRQ_INIT_ATTR_TYPE;
	ex.srq_type = IBV_SRQT_TM;
	MUST(rdma_create_srq_ex(id, &ex) == -1 && errno == EOPNOTSUPP);
	MUST(rdma_dereg_mr(mr) == 0);
	rdma_destroy_ep(id);
}

int main(int count, char **words)
{
	MUST(count == 2);
	context = opened();
	objects();
	ids(words[1]);
	MUST(ibv_close_device(context) == 0);
	return 0;
}
