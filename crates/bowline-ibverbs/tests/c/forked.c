/* A child of a process that has the device open: it opens one of its own, at another address, and
 * the parent's keeps working. Prints the line of the first thing that is not as it must be. */
#include <arpa/inet.h>
#include <infiniband/verbs.h>
#include <rdma/rdma_cma.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "must.h"

static struct ibv_context *open_at(const char *addr)
{
	MUST(setenv("BOWLINE_VERBS_ADDRS", addr, 1) == 0);
	struct ibv_device **list = ibv_get_device_list(NULL);
	MUST(list && list[0]);
	struct ibv_context *context = ibv_open_device(list[0]);
	MUST(context);
	ibv_free_device_list(list);
	union ibv_gid gid;
	MUST(ibv_query_gid(context, 1, 0, &gid) == 0);
	MUST(memcmp(gid.raw + 12, &(struct in_addr){ inet_addr(addr) }, 4) == 0);
	return context;
}

/* Sends a datagram to itself, at a queue pair of its own. */
static void send_to_self(struct ibv_context *context)
{
	static char bytes[100];
	struct ibv_pd *pd = ibv_alloc_pd(context);
	struct ibv_cq *cq = ibv_create_cq(context, 2, NULL, NULL, 0);
	struct ibv_mr *mr = ibv_reg_mr(pd, bytes, sizeof bytes, IBV_ACCESS_LOCAL_WRITE);
	struct ibv_qp_init_attr init = {
		.send_cq = cq,
		.recv_cq = cq,
		.cap = { .max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1 },
		.qp_type = IBV_QPT_UD,
		.sq_sig_all = 1,
	};
	struct ibv_qp *qp = ibv_create_qp(pd, &init);
	MUST(pd && cq && mr && qp);
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = 7 };
	int given = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY;
	MUST(ibv_modify_qp(qp, &attr, given) == 0);
	attr.qp_state = IBV_QPS_RTR;
	MUST(ibv_modify_qp(qp, &attr, IBV_QP_STATE) == 0);
	attr.qp_state = IBV_QPS_RTS;
	MUST(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN) == 0);

	struct ibv_ah_attr to = { .is_global = 1, .port_num = 1 };
	MUST(ibv_query_gid(context, 1, 0, &to.grh.dgid) == 0);
	struct ibv_ah *ah = ibv_create_ah(pd, &to);
	MUST(ah);
	struct ibv_sge sge = { .addr = (uintptr_t)bytes, .length = sizeof bytes, .lkey = mr->lkey };
	struct ibv_recv_wr receive = { .sg_list = &sge, .num_sge = 1 }, *bad_receive;
	MUST(ibv_post_recv(qp, &receive, &bad_receive) == 0);
	struct ibv_sge from = { .addr = sge.addr, .length = 10, .lkey = mr->lkey };
	struct ibv_send_wr send = {
		.sg_list = &from,
		.num_sge = 1,
		.opcode = IBV_WR_SEND,
		.wr.ud = { .ah = ah, .remote_qpn = qp->qp_num, .remote_qkey = 7 },
	}, *bad;
	MUST(ibv_post_send(qp, &send, &bad) == 0);
	for (int done = 0; done < 2;) {
		struct ibv_wc wc;
		int count = ibv_poll_cq(cq, 1, &wc);
		MUST(count >= 0 && (count == 0 || wc.status == IBV_WC_SUCCESS));
		done += count;
	}
	MUST(ibv_destroy_ah(ah) == 0 && ibv_destroy_qp(qp) == 0 && ibv_dereg_mr(mr) == 0);
	MUST(ibv_destroy_cq(cq) == 0 && ibv_dealloc_pd(pd) == 0);
}

int main(int argc, char **argv)
{
	MUST(argc == 2);
	struct ibv_context *context = open_at(argv[1]);
	/* The rdma_cm has the device open too. */
	struct rdma_event_channel *channel = rdma_create_event_channel();
	MUST(channel);
	pid_t child = fork();
	if (child == 0) {
		alarm(30);
		struct ibv_context *own = open_at("127.81.6.9");
		struct rdma_cm_id *id;
		struct sockaddr_in at = { .sin_family = AF_INET, .sin_addr.s_addr = inet_addr("127.81.6.9") };
		MUST(rdma_create_id(rdma_create_event_channel(), &id, NULL, RDMA_PS_TCP) == 0);
		MUST(rdma_bind_addr(id, (struct sockaddr *)&at) == 0);
		send_to_self(own);
		/* Its copy of the parent's, too. */
		MUST(ibv_close_device(context) == 0);
		MUST(ibv_close_device(own) == 0);
		exit(0);
	}
	int status;
	MUST(waitpid(child, &status, 0) == child);
	MUST(WIFEXITED(status) && WEXITSTATUS(status) == 0);
	send_to_self(context);
	MUST(ibv_close_device(context) == 0);
	return 0;
}
