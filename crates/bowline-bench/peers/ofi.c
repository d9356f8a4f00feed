/* One side of a measurement over libfabric's reliable datagrams (FI_EP_RDM, plain messages):
 * 64 sends and 128 receives outstanding, completion queues polled.
 *
 * A stream is kept within the posted receives by a short message back for every 32 received: its
 * providers over TCP take in whatever comes, and what finds no receive posted goes into memory that
 * grows without bound and makes everything after it tens of times slower. */
#include "common.h"

#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>

#define SENDS 64
#define RECVS 128
#define ACK_EVERY 32

static struct fid_ep *ep;
static struct fid_cq *send_cq, *recv_cq;
static struct fid_domain *domain;
static fi_addr_t peer;
static size_t size, posted_sends;
static unsigned char *send_buf[SENDS], *recv_buf[RECVS];
static struct fi_context send_ctx[SENDS], recv_ctx[RECVS];
static void *send_desc[SENDS], *recv_desc[RECVS];

static void must(ssize_t ret, const char *what) {
    if (ret < 0) die(what, fi_strerror((int)-ret));
}

static unsigned char *buffer(const struct fi_info *info, void **desc, uint64_t key) {
    unsigned char *buf = malloc(size);
    if (!buf) die("malloc", strerror(errno));
    fill_body(buf, size);
    *desc = NULL;
    if (info->domain_attr->mr_mode & FI_MR_LOCAL) {
        struct fid_mr *mr;
        must(fi_mr_reg(domain, buf, size, FI_SEND | FI_RECV, 0, key, 0, &mr, NULL), "fi_mr_reg");
        *desc = fi_mr_desc(mr);
    }
    return buf;
}

static void open_endpoint(void) {
    struct fi_info *hints = fi_allocinfo(), *info;
    struct fid_fabric *fabric;
    struct fid_av *av;
    struct fi_av_attr av_attr = {.type = FI_AV_TABLE};
    struct fi_cq_attr cq_attr = {.format = FI_CQ_FORMAT_MSG, .size = 1024};
    unsigned char addr[512];
    size_t len = sizeof addr;

    hints->ep_attr->type = FI_EP_RDM;
    hints->caps = FI_MSG;
    hints->mode = FI_CONTEXT | FI_CONTEXT2;
    hints->domain_attr->mr_mode = FI_MR_LOCAL;
    hints->domain_attr->threading = FI_THREAD_DOMAIN;
    hints->tx_attr->msg_order = FI_ORDER_SAS;
    hints->rx_attr->msg_order = FI_ORDER_SAS;
    hints->fabric_attr->prov_name = strdup(strcmp(arg("subject"), "ofi-net") ? "tcp;ofi_rxm" : "net");
    must(fi_getinfo(FI_VERSION(1, 11), "127.0.0.1", NULL, FI_SOURCE, hints, &info), "fi_getinfo");
    must(fi_fabric(info->fabric_attr, &fabric, NULL), "fi_fabric");
    must(fi_domain(fabric, info, &domain, NULL), "fi_domain");
    must(fi_endpoint(domain, info, &ep, NULL), "fi_endpoint");
    must(fi_av_open(domain, &av_attr, &av, NULL), "fi_av_open");
    must(fi_cq_open(domain, &cq_attr, &send_cq, NULL), "fi_cq_open");
    must(fi_cq_open(domain, &cq_attr, &recv_cq, NULL), "fi_cq_open");
    must(fi_ep_bind(ep, &av->fid, 0), "fi_ep_bind");
    must(fi_ep_bind(ep, &send_cq->fid, FI_SEND), "fi_ep_bind");
    must(fi_ep_bind(ep, &recv_cq->fid, FI_RECV), "fi_ep_bind");
    must(fi_enable(ep), "fi_enable");
    for (int i = 0; i < SENDS; i++) send_buf[i] = buffer(info, &send_desc[i], 1 + (uint64_t)i);
    for (int i = 0; i < RECVS; i++) recv_buf[i] = buffer(info, &recv_desc[i], 1001 + (uint64_t)i);
    must(fi_getname(&ep->fid, addr, &len), "fi_getname");
    if (arg("cc")[0]) set_all_cc(arg("cc")); /* the listener; what it accepts takes it over */
    ready(addr, len);
    unsigned char theirs[512];
    peer_addr(theirs, sizeof theirs);
    if (fi_av_insert(av, theirs, 1, &peer, 0, NULL) != 1) die("fi_av_insert", "failed");
}

static ssize_t read_queue(struct fid_cq *cq, struct fi_cq_msg_entry *entries, size_t max) {
    ssize_t n = fi_cq_read(cq, entries, max);
    if (n == -FI_EAGAIN) return 0;
    if (n < 0) {
        struct fi_cq_err_entry err = {0};
        if (n == -FI_EAVAIL && fi_cq_readerr(cq, &err, 0) > 0) {
            if (stopping || meter.state == 3) exit(0); /* the other side ended first */
            die("completion", fi_strerror(err.err));
        }
        die("fi_cq_read", fi_strerror((int)-n));
    }
    return n;
}

/* Polls once; returns the number of a receive that completed, or -1. */
static int poll_once(size_t *len) {
    struct fi_cq_msg_entry entries[SENDS];
    posted_sends -= (size_t)read_queue(send_cq, entries, SENDS);
    if (!read_queue(recv_cq, entries, 1)) return -1;
    *len = entries[0].len;
    return (int)((struct fi_context *)entries[0].op_context - recv_ctx);
}

static int early[RECVS];
static size_t early_len[RECVS];
static size_t early_head, early_tail;

/* Polls while a post is refused, keeping what arrives meanwhile. */
static void progress(void) {
    size_t len;
    int at = poll_once(&len);
    if (at >= 0) {
        early[early_head % RECVS] = at;
        early_len[early_head++ % RECVS] = len;
    }
}

static void post_recv(int i) {
    ssize_t ret;
    while ((ret = fi_recv(ep, recv_buf[i], size, recv_desc[i], FI_ADDR_UNSPEC, &recv_ctx[i])) ==
           -FI_EAGAIN)
        progress();
    must(ret, "fi_recv");
}

static void post_send(unsigned char *buf, size_t len, void *desc, void *ctx) {
    ssize_t ret;
    while ((ret = fi_send(ep, buf, len, desc, peer, ctx)) == -FI_EAGAIN) {
        if (stopping) exit(0);
        progress();
    }
    must(ret, "fi_send");
    posted_sends++;
}

static int next_or_none(size_t *len) {
    if (early_tail == early_head) return poll_once(len);
    *len = early_len[early_tail % RECVS];
    return early[early_tail++ % RECVS];
}

static int next_recv(size_t *len) {
    int at;
    do at = next_or_none(len);
    while (at < 0 && !stopping);
    return at;
}

int main(int argc, char **argv) {
    if (argc > 1 && !strcmp(argv[1], "version")) {
        printf("libfabric %u.%u\n", FI_MAJOR(fi_version()), FI_MINOR(fi_version()));
        return 0;
    }
    start(argc, argv);
    size = strtoul(arg("size"), NULL, 10);
    int rx = !strcmp(arg("side"), "rx"), rtt = !strcmp(arg("kind"), "rtt");
    size_t len;
    uint64_t seq = 0, acked = 0;
    open_endpoint();

    for (int i = 0; i < RECVS; i++) post_recv(i);
    if (!rtt && rx) {
        meter_start(size);
        for (;;) {
            int at = next_recv(&len);
            if (at < 0) return 0;
            check(recv_buf[at], len, size);
            meter_add(1);
            post_recv(at);
            if (++seq % ACK_EVERY == 0) {
                int i = (int)(seq / ACK_EVERY % SENDS);
                post_send(send_buf[i], 8, send_desc[i], &send_ctx[i]);
            }
        }
    }
    if (!rtt) {
        int settled = 0;
        for (int i = 0; !stopping; i = (i + 1) % SENDS) {
            while (!stopping && (posted_sends == SENDS || seq - acked >= RECVS)) {
                int at = next_or_none(&len);
                if (at < 0) continue;
                acked += ACK_EVERY;
                post_recv(at);
            }
            stamp(send_buf[i], size, seq++);
            post_send(send_buf[i], size, send_desc[i], &send_ctx[i]);
            if (!settled && seq == SENDS / 2 && arg("cc")[0]) {
                set_all_cc(arg("cc"));
                settled = 1;
            }
        }
        printf("done sent=%llu syscalls=0\n", (unsigned long long)seq);
        fflush(stdout);
        return 0;
    }
    if (rx) {
        for (;;) {
            int at = next_recv(&len);
            if (at < 0) return 0;
            memcpy(send_buf[0], recv_buf[at], size);
            post_recv(at);
            while (posted_sends) progress();
            post_send(send_buf[0], size, send_desc[0], &send_ctx[0]);
        }
    }
    laps_start();
    do {
        while (posted_sends) progress();
        stamp(send_buf[0], size, seq++);
        post_send(send_buf[0], size, send_desc[0], &send_ctx[0]);
        int at = next_recv(&len);
        if (at < 0) return 0;
        check(recv_buf[at], len, size);
        post_recv(at);
        if (seq == 16 && arg("cc")[0]) set_all_cc(arg("cc"));
    } while (!lap());
    return 0;
}
