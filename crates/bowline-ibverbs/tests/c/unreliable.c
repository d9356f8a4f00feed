/* Two unreliable connections of one process, with requests posted one by one, in a list and by the
 * extended calls. */
#include "must.h"
#include <string.h>

static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_cq *cq;
static struct ibv_srq *srq;
static struct ibv_mr *mr;
static char bytes[8192];

static struct ibv_qp *queue_pair(void)
{
	struct ibv_qp_init_attr_ex init = {
		.send_cq = cq,
		.recv_cq = cq,
		.srq = srq,
		.cap = { .max_send_wr = 4, .max_send_sge = 1, .max_inline_data = 64 },
		.qp_type = IBV_QPT_UC,
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
		.pd = pd,
		.send_ops_flags = IBV_QP_EX_WITH_SEND_WITH_IMM | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM,
	};
	struct ibv_qp *qp = ibv_create_qp_ex(context, &init);
	MUST(qp && qp->qp_type == IBV_QPT_UC);
	struct ibv_qp_attr attr = {
		.qp_state = IBV_QPS_INIT,
		.port_num = 1,
		.qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_LOCAL_WRITE,
	};
	int given = IBV_QP_STATE | IBV_QP_PORT | IBV_QP_PKEY_INDEX | IBV_QP_ACCESS_FLAGS;
	MUST(ibv_modify_qp(qp, &attr, given) == 0);
	return qp;
}

static void connect(struct ibv_qp *qp, struct ibv_qp *peer)
{
	struct ibv_qp_attr attr = {
		.qp_state = IBV_QPS_RTR,
		.path_mtu = IBV_MTU_1024,
		.dest_qp_num = peer->qp_num,
		.rq_psn = 5,
		.ah_attr = { .is_global = 1, .port_num = 1 },
	};
	MUST(ibv_query_gid(context, 1, 0, &attr.ah_attr.grh.dgid) == 0);
	int given = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
	MUST(ibv_modify_qp(qp, &attr, given | IBV_QP_MIN_RNR_TIMER) == EINVAL);
	MUST(ibv_modify_qp(qp, &attr, given) == 0);
	attr.qp_state = IBV_QPS_RTS;
	attr.sq_psn = 5;
	MUST(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN) == 0);
}

/* The next completion, which is of a receive or of a send. */
static struct ibv_wc next(int is_recv)
{
	static struct ibv_wc kept[2];
	static int has[2];
	while (!has[is_recv]) {
		struct ibv_wc wc;
		int count = ibv_poll_cq(cq, 1, &wc);
		MUST(count >= 0);
		if (count > 0) {
			int which = (wc.opcode & IBV_WC_RECV) != 0;
			MUST(!has[which]);
			kept[which] = wc;
			has[which] = 1;
		}
	}
	has[is_recv] = 0;
	MUST(kept[is_recv].status == IBV_WC_SUCCESS);
	return kept[is_recv];
}

int main(void)
{
	context = opened();
	pd = ibv_alloc_pd(context);
	cq = ibv_create_cq(context, 16, NULL, NULL, 0);
	int access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
	mr = ibv_reg_mr(pd, bytes, sizeof bytes, access);
	struct ibv_srq_init_attr init = { .attr = { .max_wr = 4, .max_sge = 1 } };
	srq = ibv_create_srq(pd, &init);
	MUST(pd && cq && mr && srq);
	struct ibv_qp *qp = queue_pair(), *peer = queue_pair();
	connect(qp, peer);
	connect(peer, qp);

	struct ibv_sge to = { .addr = (uintptr_t)bytes + 4096, .length = 3000, .lkey = mr->lkey };
	struct ibv_recv_wr receive = { .wr_id = 1, .sg_list = &to, .num_sge = 1 }, *bad_receive;
	for (int n = 0; n < 4; n++)
		MUST(ibv_post_srq_recv(srq, &receive, &bad_receive) == 0);

	memset(bytes, 'a', 3000);
	struct ibv_sge from = { .addr = (uintptr_t)bytes, .length = 3000, .lkey = mr->lkey };
	struct ibv_send_wr read = {
		.wr_id = 9,
		.sg_list = &from,
		.num_sge = 1,
		.opcode = IBV_WR_RDMA_READ,
	}, *bad;
	struct ibv_send_wr send = {
		.wr_id = 2,
		.next = &read,
		.sg_list = &from,
		.num_sge = 1,
		.opcode = IBV_WR_SEND,
		.send_flags = IBV_SEND_SIGNALED,
	};
	MUST(ibv_post_send(qp, &send, &bad) == EINVAL && bad == &read);
	struct ibv_wc wc = next(1);
	MUST(wc.byte_len == 3000 && wc.qp_num == peer->qp_num && wc.wr_id == 1);
	MUST(memcmp(bytes, bytes + 4096, 3000) == 0);
	MUST(next(0).wr_id == 2);

	struct ibv_qp_ex *ex = ibv_qp_to_qp_ex(qp);
	MUST(ex);
	ibv_wr_start(ex);
	ex->wr_id = 3;
	ex->wr_flags = IBV_SEND_SIGNALED;
	ibv_wr_send_imm(ex, htobe32(77));
	ibv_wr_set_inline_data(ex, "short", 5);
	MUST(ibv_wr_complete(ex) == 0);
	wc = next(1);
	MUST(wc.byte_len == 5 && wc.wc_flags == IBV_WC_WITH_IMM && wc.imm_data == htobe32(77));
	MUST(memcmp(bytes + 4096, "short", 5) == 0 && next(0).wr_id == 3);

	ibv_wr_start(ex);
	ex->wr_id = 4;
	ibv_wr_rdma_write_imm(ex, mr->rkey, (uintptr_t)bytes + 4096, htobe32(78));
	ibv_wr_set_sge(ex, mr->lkey, (uintptr_t)bytes, 2000);
	MUST(ibv_wr_complete(ex) == 0);
	wc = next(1);
	MUST(wc.opcode == IBV_WC_RECV_RDMA_WITH_IMM && wc.byte_len == 2000);
	MUST(memcmp(bytes, bytes + 4096, 2000) == 0 && next(0).wr_id == 4);

	ibv_wr_start(ex);
	ibv_wr_rdma_read(ex, mr->rkey, (uintptr_t)bytes);
	ibv_wr_set_sge(ex, mr->lkey, (uintptr_t)bytes, 8);
	MUST(ibv_wr_complete(ex) == EINVAL);

	/* If one request of several is wrong, none is posted. */
	static char many[1000];
	struct ibv_sge two[2] = { from, from };
	for (int wrong = 0; wrong < 4; wrong++) {
		ibv_wr_start(ex);
		ex->wr_id = 5;
		for (int n = 0; n < (wrong == 3 ? 5 : 2); n++) {
			ibv_wr_send_imm(ex, htobe32(79));
			ibv_wr_set_inline_data(ex, "none", 4);
		}
		if (wrong == 0)
			ibv_wr_rdma_read(ex, mr->rkey, (uintptr_t)bytes);
		if (wrong < 3)
			ibv_wr_send_imm(ex, htobe32(79));
		if (wrong == 1)
			ibv_wr_set_inline_data(ex, many, sizeof many);
		if (wrong == 2)
			ibv_wr_set_sge_list(ex, 2, two);
		MUST(ibv_wr_complete(ex) == (wrong == 3 ? ENOMEM : EINVAL));
	}
	ibv_wr_start(ex);
	ex->wr_id = 6;
	ibv_wr_send_imm(ex, htobe32(80));
	ibv_wr_set_inline_data(ex, "whole", 5);
	MUST(ibv_wr_complete(ex) == 0);
	wc = next(1);
	MUST(wc.byte_len == 5 && wc.imm_data == htobe32(80) && next(0).wr_id == 6);
	MUST(memcmp(bytes + 4096, "whole", 5) == 0);

	struct ibv_qp_attr attr;
	struct ibv_qp_init_attr shown;
	MUST(ibv_query_qp(qp, &attr, IBV_QP_STATE, &shown) == 0);
	MUST(attr.qp_state == IBV_QPS_RTS && attr.path_mtu == IBV_MTU_1024 && shown.srq == srq);
	MUST(ibv_destroy_qp(qp) == 0 && ibv_destroy_qp(peer) == 0 && ibv_destroy_srq(srq) == 0);
	MUST(ibv_dereg_mr(mr) == 0 && ibv_destroy_cq(cq) == 0 && ibv_dealloc_pd(pd) == 0);
	MUST(ibv_close_device(context) == 0);
	return 0;
}
