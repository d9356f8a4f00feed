/* What is changed after it was made, and calls of the manual pages that take what others refuse.
 * Prints the line of the first thing that is not as it must be. */
#include <arpa/inet.h>
#include <errno.h>
#include <infiniband/verbs.h>
#include <rdma/rdma_cma.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "must.h"

static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_cq *cq;
static char bytes[2][4096];

static struct ibv_qp *queue_pair(void)
{
	struct ibv_qp_init_attr init = {
		.send_cq = cq,
		.recv_cq = cq,
		.cap = { .max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1 },
		.qp_type = IBV_QPT_RC,
		.sq_sig_all = 1,
	};
	return ibv_create_qp(pd, &init);
}

/* Leads a queue pair from RESET to RTS, to another of this device. */
static void lead(struct ibv_qp *qp, uint32_t to)
{
	struct ibv_qp_attr attr = {
		.qp_state = IBV_QPS_INIT,
		.port_num = 1,
		.qp_access_flags = IBV_ACCESS_REMOTE_WRITE,
	};
	MUST(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
				      IBV_QP_ACCESS_FLAGS) == 0);
	attr = (struct ibv_qp_attr){
		.qp_state = IBV_QPS_RTR,
		.path_mtu = IBV_MTU_1024,
		.dest_qp_num = to,
		.ah_attr = { .is_global = 1, .port_num = 1 },
		.min_rnr_timer = 1,
		.max_dest_rd_atomic = 1,
		.timeout = 14,
		.retry_cnt = 7,
		.rnr_retry = 7,
		.max_rd_atomic = 1,
	};
	MUST(ibv_query_gid(context, 1, 0, &attr.ah_attr.grh.dgid) == 0);
	MUST(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
				      IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
				      IBV_QP_MIN_RNR_TIMER) == 0);
	attr.qp_state = IBV_QPS_RTS;
	MUST(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT |
				      IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
				      IBV_QP_MAX_QP_RD_ATOMIC) == 0);
}

static struct ibv_wc next(void)
{
	struct ibv_wc wc;
	int count;
	while ((count = ibv_poll_cq(cq, 1, &wc)) == 0)
		;
	MUST(count == 1);
	return wc;
}

/* Writes to a key of the other side. */
static enum ibv_wc_status write_to(struct ibv_qp *qp, struct ibv_mr *from, void *at, uint32_t rkey)
{
	struct ibv_sge sge = { .addr = (uintptr_t)from->addr, .length = 10, .lkey = from->lkey };
	struct ibv_send_wr send = {
		.sg_list = &sge,
		.num_sge = 1,
		.opcode = IBV_WR_RDMA_WRITE,
		.wr.rdma = { .remote_addr = (uintptr_t)at, .rkey = rkey },
	}, *bad;
	MUST(ibv_post_send(qp, &send, &bad) == 0);
	return next().status;
}

static void regions_and_windows(void)
{
	struct ibv_qp *qp = queue_pair(), *peer = queue_pair();
	MUST(qp && peer);
	lead(qp, peer->qp_num);
	lead(peer, qp->qp_num);
	int local = IBV_ACCESS_LOCAL_WRITE, both = local | IBV_ACCESS_REMOTE_WRITE;
	struct ibv_mr *from = ibv_reg_mr(pd, bytes[0], sizeof bytes[0], local);
	struct ibv_mr *mr = ibv_reg_mr(pd, bytes[0], sizeof bytes[0], local);
	MUST(from && mr);

	/* A region that is registered again keeps its keys, which a peer may have. */
	uint32_t lkey = mr->lkey, rkey = mr->rkey;
	MUST(ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, both) == 0);
	MUST(mr->lkey == lkey && mr->rkey == rkey);
	memcpy(bytes[0], "something.", 10);
	MUST(write_to(qp, from, bytes[0] + 100, rkey) == IBV_WC_SUCCESS);
	MUST(memcmp(bytes[0] + 100, "something.", 10) == 0);
	MUST(ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_TRANSLATION, NULL, bytes[1], 100, 0) == 0);
	MUST(mr->lkey == lkey && mr->rkey == rkey && mr->addr == bytes[1] && mr->length == 100);
	MUST(write_to(qp, from, bytes[1], rkey) == IBV_WC_SUCCESS);
	MUST(memcmp(bytes[1], "something.", 10) == 0);
	MUST(ibv_rereg_mr(mr, 0, NULL, NULL, 0, 0) == IBV_REREG_MR_ERR_INPUT);
	MUST(ibv_dereg_mr(mr) == 0);

	/* A window's rights may name the local one, as a region's do. */
	mr = ibv_reg_mr(pd, bytes[1], sizeof bytes[1], local | IBV_ACCESS_MW_BIND);
	struct ibv_mw *mw = ibv_alloc_mw(pd, IBV_MW_TYPE_1);
	MUST(mr && mw);
	struct ibv_mw_bind bind = {
		.send_flags = IBV_SEND_SIGNALED,
		.bind_info = { .mr = mr, .addr = (uintptr_t)bytes[1], .length = 50, .mw_access_flags = both },
	};
	MUST(ibv_bind_mw(peer, mw, &bind) == 0);
	MUST(next().status == IBV_WC_SUCCESS);
	MUST(ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, both) != 0 && errno == EBUSY);
	MUST(write_to(qp, from, bytes[1] + 20, mw->rkey) == IBV_WC_SUCCESS);
	MUST(memcmp(bytes[1] + 20, "something.", 10) == 0);
	MUST(ibv_dealloc_mw(mw) == 0 && ibv_dereg_mr(mr) == 0);

	/* What a queue pair that is reset has left behind is not taken for something new. */
	struct ibv_sge sge = { .addr = (uintptr_t)bytes[0], .length = 10, .lkey = from->lkey };
	struct ibv_recv_wr receive = { .wr_id = 5, .sg_list = &sge, .num_sge = 1 }, *bad;
	MUST(ibv_post_recv(qp, &receive, &bad) == 0);
	MUST(write_to(qp, from, bytes[1], rkey) == IBV_WC_REM_ACCESS_ERR);
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_RESET };
	MUST(ibv_modify_qp(qp, &attr, IBV_QP_STATE) == 0);
	struct ibv_wc wc;
	MUST(ibv_poll_cq(cq, 1, &wc) == 0);
	MUST(ibv_destroy_qp(qp) == 0 && ibv_destroy_qp(peer) == 0 && ibv_dereg_mr(from) == 0);
}

static void queues(void)
{
	struct ibv_device_attr device;
	MUST(ibv_query_device(context, &device) == 0);
	MUST(device.vendor_id != 0);
	struct ibv_cq *one = ibv_create_cq(context, 1, NULL, NULL, 0);
	MUST(one && ibv_resize_cq(one, 7) == 0 && one->cqe >= 7);
	MUST(ibv_resize_cq(one, 0) == EINVAL && ibv_resize_cq(one, device.max_cqe + 1) == EINVAL);
	MUST(one->cqe >= 7 && ibv_destroy_cq(one) == 0);

	struct ibv_gid_entry entry;
	MUST(ibv_query_gid_table(context, &entry, 1, 0) == 1);
	MUST(ibv_query_gid_table(context, &entry, 0, 0) == -EINVAL);

	/* Importing is refused, but what programs duplicate for it is there. */
	int fd = dup(context->cmd_fd);
	MUST(fd >= 0);
	MUST(ibv_import_device(fd) == NULL && errno == EOPNOTSUPP);
	MUST(close(fd) == 0);
}

static void addresses(void)
{
	struct sockaddr_in group = { .sin_family = AF_INET, .sin_addr.s_addr = inet_addr("230.1.2.3") };
	struct rdma_addrinfo hints = {
		.ai_family = AF_INET,
		.ai_port_space = RDMA_PS_UDP,
		.ai_qp_type = IBV_QPT_UD,
		.ai_src_len = sizeof group,
		.ai_src_addr = (struct sockaddr *)&group,
	}, *found;
	/* Without a name the hints are the answer. */
	MUST(rdma_getaddrinfo(NULL, NULL, &hints, &found) == 0);
	MUST(found->ai_family == AF_INET && found->ai_port_space == RDMA_PS_UDP && !found->ai_dst_addr);
	MUST(found->ai_src_len == sizeof group && found->ai_src_addr != hints.ai_src_addr);
	MUST(memcmp(found->ai_src_addr, &group, sizeof group) == 0);
	rdma_freeaddrinfo(found);
	/* A program may say how much room its address has: the answer says what there is. */
	struct sockaddr_storage room = { 0 };
	memcpy(&room, &group, sizeof group);
	hints.ai_src_addr = (struct sockaddr *)&room;
	hints.ai_src_len = sizeof room;
	hints.ai_dst_len = sizeof room;
	MUST(rdma_getaddrinfo(NULL, NULL, &hints, &found) == 0);
	MUST(found->ai_src_len <= sizeof(struct sockaddr_in6) && found->ai_dst_len == 0);
	MUST(memcmp(found->ai_src_addr, &room, found->ai_src_len) == 0);
	rdma_freeaddrinfo(found);
	MUST(rdma_getaddrinfo("127.0.0.1", NULL, &hints, &found) == 0);
	MUST(found->ai_src_len <= sizeof(struct sockaddr_in6) && found->ai_dst_len == sizeof group);
	MUST(memcmp(found->ai_src_addr, &room, found->ai_src_len) == 0);
	rdma_freeaddrinfo(found);
	MUST(rdma_getaddrinfo(NULL, NULL, NULL, &found) == -1 && errno == EINVAL);
}

int main(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	MUST(list && list[0]);
	context = ibv_open_device(list[0]);
	MUST(context);
	ibv_free_device_list(list);
	pd = ibv_alloc_pd(context);
	cq = ibv_create_cq(context, 16, NULL, NULL, 0);
	MUST(pd && cq);
	regions_and_windows();
	queues();
	addresses();
	MUST(ibv_destroy_cq(cq) == 0 && ibv_dealloc_pd(pd) == 0 && ibv_close_device(context) == 0);
	return 0;
}
