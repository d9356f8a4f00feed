/* One side of a measurement over UCX active messages on TCP: up to 64 sends outstanding, the worker
 * polled; large messages that come by rendezvous are received into a buffer of the program's own. */
#include "common.h"

#include <ucp/api/ucp.h>

#define SENDS 64
#define ID 7

static ucp_worker_h worker;
static ucp_ep_h ep;
static size_t size, outstanding, echoes;
static unsigned char *send_buf[SENDS], *recv_buf, *fetch_buf[SENDS];
static int fetching[SENDS];
static int rx, rtt, arrived;

static void must(ucs_status_t status, const char *what) {
    if (status != UCS_OK) die(what, ucs_status_string(status));
}

static void whole(const unsigned char *data, size_t len) {
    if (rtt && rx) {
        if (len != size) die("check", "a message of a wrong length");
        memcpy(send_buf[0], data, len);
        echoes++;
        return;
    }
    check(data, len, size);
    if (rtt)
        arrived = 1;
    else
        meter_add(1);
}

static void fetched(void *request, ucs_status_t status, size_t len, void *user) {
    int at = (int)((int *)user - fetching);
    if (status == UCS_OK) whole(fetch_buf[at], len);
    fetching[at] = 0;
    ucp_request_free(request);
}

static ucs_status_t on_message(void *user, const void *header, size_t header_len, void *data,
                               size_t len, const ucp_am_recv_param_t *param) {
    (void)user, (void)header, (void)header_len;
    if (!(param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV)) {
        /* The bytes are the library's own here; the application copies them out once. */
        if (len > size) die("check", "a message of a wrong length");
        memcpy(recv_buf, data, len);
        whole(recv_buf, len);
        return UCS_OK;
    }
    if (len > size) die("check", "a message of a wrong length");
    int at = 0;
    while (at < SENDS && fetching[at]) at++;
    if (at == SENDS) die("rendezvous", "more messages under way than were sent");
    if (!fetch_buf[at] && !(fetch_buf[at] = malloc(size))) die("malloc", strerror(errno));
    ucp_request_param_t fetch = {
        .op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA,
        .cb.recv_am = fetched,
        .user_data = &fetching[at]};
    slack = SENDS; /* rendezvous completes in any order */
    fetching[at] = 1;
    void *request = ucp_am_recv_data_nbx(worker, data, fetch_buf[at], len, &fetch);
    if (UCS_PTR_IS_ERR(request)) die("ucp_am_recv_data_nbx", ucs_status_string(UCS_PTR_STATUS(request)));
    if (!request) {
        whole(fetch_buf[at], len);
        fetching[at] = 0;
    }
    return UCS_OK;
}

static int busy[SENDS];

static void sent(void *request, ucs_status_t status, void *user) {
    if (status != UCS_OK && !stopping) die("send", ucs_status_string(status));
    *(int *)user = 0;
    outstanding--;
    ucp_request_free(request);
}

static void post(int i) {
    ucp_request_param_t param = {
        .op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA,
        .cb.send = sent,
        .user_data = &busy[i]};
    busy[i] = 1;
    outstanding++;
    void *request = ucp_am_send_nbx(ep, ID, NULL, 0, send_buf[i], size, &param);
    if (UCS_PTR_IS_ERR(request)) die("ucp_am_send_nbx", ucs_status_string(UCS_PTR_STATUS(request)));
    if (!request) {
        busy[i] = 0;
        outstanding--;
    }
}

static void ep_error(void *user, ucp_ep_h which, ucs_status_t status) {
    (void)user, (void)which;
    if (stopping || meter.state == 3 || (rtt && rx)) _exit(0); /* the other side ended first */
    die("endpoint", ucs_status_string(status));
}

static void open_worker(void) {
    ucp_params_t params = {.field_mask = UCP_PARAM_FIELD_FEATURES, .features = UCP_FEATURE_AM};
    ucp_worker_params_t wp = {.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE,
                              .thread_mode = UCS_THREAD_MODE_SINGLE};
    ucp_am_handler_param_t am = {
        .field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB,
        .id = ID,
        .cb = on_message};
    ucp_config_t *config;
    ucp_context_h context;
    ucp_address_t *address;
    size_t len;
    static unsigned char theirs[8192];

    must(ucp_config_read(NULL, NULL, &config), "ucp_config_read");
    must(ucp_config_modify(config, "TLS", "tcp"), "TLS=tcp");
    must(ucp_config_modify(config, "NET_DEVICES", "lo"), "NET_DEVICES=lo");
    must(ucp_init(&params, config, &context), "ucp_init");
    ucp_config_release(config);
    must(ucp_worker_create(context, &wp, &worker), "ucp_worker_create");
    must(ucp_worker_set_am_recv_handler(worker, &am), "ucp_worker_set_am_recv_handler");
    must(ucp_worker_get_address(worker, &address, &len), "ucp_worker_get_address");
    if (arg("cc")[0]) set_all_cc(arg("cc")); /* the listener; what it accepts takes it over */
    ready(address, len);
    peer_addr(theirs, sizeof theirs);
    ucp_ep_params_t ep_params = {
        .field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                      UCP_EP_PARAM_FIELD_ERR_HANDLER,
        .address = (ucp_address_t *)theirs,
        .err_mode = UCP_ERR_HANDLING_MODE_PEER,
        .err_handler.cb = ep_error};
    if (!rx || rtt) must(ucp_ep_create(worker, &ep_params, &ep), "ucp_ep_create");
}

int main(int argc, char **argv) {
    uint64_t seq = 0;
    if (argc > 1 && !strcmp(argv[1], "version")) {
        printf("UCX %s\n", ucp_get_version_string());
        return 0;
    }
    start(argc, argv);
    size = strtoul(arg("size"), NULL, 10);
    rx = !strcmp(arg("side"), "rx");
    rtt = !strcmp(arg("kind"), "rtt");
    recv_buf = malloc(size);
    for (int i = 0; i < SENDS; i++) {
        send_buf[i] = malloc(size);
        if (!send_buf[i] || !recv_buf) die("malloc", strerror(errno));
        fill_body(send_buf[i], size);
    }
    open_worker();
    if (rx && !rtt) {
        meter_start(size);
        while (!stopping) ucp_worker_progress(worker);
        return 0;
    }
    if (!rtt) {
        for (int i = 0; !stopping; i = (i + 1) % SENDS) {
            while (busy[i] && !stopping) ucp_worker_progress(worker);
            stamp(send_buf[i], size, seq++);
            post(i);
            if (seq == SENDS / 2 && arg("cc")[0]) set_all_cc(arg("cc"));
        }
        printf("done sent=%llu syscalls=0\n", (unsigned long long)seq);
        fflush(stdout);
        return 0;
    }
    if (rx) {
        while (!stopping) {
            ucp_worker_progress(worker);
            if (echoes && !busy[0]) {
                echoes--;
                post(0);
            }
        }
        return 0;
    }
    laps_start();
    do {
        while (busy[0] && !stopping) ucp_worker_progress(worker);
        stamp(send_buf[0], size, seq++);
        arrived = 0;
        post(0);
        while (!arrived && !stopping) ucp_worker_progress(worker);
        if (stopping) return 0;
        if (seq == 16 && arg("cc")[0]) set_all_cc(arg("cc"));
    } while (!lap());
    return 0;
}
