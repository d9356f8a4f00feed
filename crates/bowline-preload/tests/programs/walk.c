/* A random walk over the calls that a program can make on RDS sockets and their descriptors.
 *
 *     walk OWN OTHER FIRST COUNT STEPS
 *
 * OWN and OTHER are addresses of this machine; the walk makes COUNT sequences from number FIRST on,
 * of STEPS calls each, and prints a line for each call: sequence, step, the call in words, its
 * result, and what came. The same number gives the same calls everywhere, so the lines of a
 * kernel's sockets and those of bowline's are to be equal: walk.rs compares them.
 *
 * Which call comes next depends on the numbers of the sequence and of the step alone, and on what
 * the walk believes of its descriptors. It waits where a message that was sent is to arrive, as it
 * does at once over a kernel's loopback, and nowhere else.
 *
 * With WALK_NAMESPACE, the path of a network namespace, or WALK_NODE, the place of a node, in the
 * environment, sockets are those of two machines: OTHER is an address of the second one. Messages
 * are then some time on their way, so that one at most waits at a socket.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/io_uring.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/select.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>

#define AF_RDS_ 21
#define SOL_RDS_ 276
#define COUNT(a) (int)(sizeof(a) / sizeof *(a))
#define PORTS 6
#define SLOTS 10
#define NUMBERS 64 /* descriptors that a sequence may have */
#define SECONDS_MAX 20

/* What the walk believes of its sockets, and of its descriptors. */
struct sock {
    int port;     /* index, or -1 */
    int connected; /* index of the port, or -1 */
    int waiting;   /* messages that wait to be received */
    int slots;
};
enum kind { NONE, RDS, PAST };
struct slot {
    enum kind kind;
    int fd, sock;
};

static const char *addresses[2], *own_name;
static struct sock socks[SLOTS];
static struct slot slots[SLOTS];
static unsigned sequence, step, messages;
static int waiting_max = 16; /* messages at a socket */
static int maker = -1; /* of sockets of the other machine */
static uint64_t dice;
static int temp_file, null_file, pipe_in, pipe_out, pair[2];
#define WORDS_MAX 512
static char *words; /* shared with children, who may be ended by a signal */

static int are_two(void) { return getenv("WALK_NAMESPACE") || getenv("WALK_NODE"); }

/* What the sequence before has sent comes to none of this one's ports. */
static int first_port(void) { return 4100 + (int)(sequence % 400) * 10; }

static unsigned below(unsigned n) {
    dice = dice * 6364136223846793005u + 1442695040888963407u;
    return (unsigned)(dice >> 33) % n;
}

#define ONE_OF(a) (a)[below(COUNT(a))]

static void dice_of(unsigned of, unsigned at) {
    dice = ((uint64_t)of << 32 | at) * 0x9e3779b97f4a7c15u + 99;
    for (int i = 0; i < 4; i++)
        below(2);
}

static const char *error_name(int error) {
    const char *name = strerrorname_np(error);
    return name ? name : "no error";
}

/* The call of this step, in words. */
static void call(const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(words, WORDS_MAX, format, args);
    va_end(args);
}

/* Prints what a call has given; `more` is what came. */
static void gave_with(long result, int error, const char *format, ...) {
    char more[512] = "";
    va_list args;
    va_start(args, format);
    vsnprintf(more, sizeof more, format, args);
    va_end(args);
    printf("%u.%u\t%s\t", sequence, step, words);
    if (result < 0)
        printf("%s", error_name(error));
    else
        printf("%ld", result);
    printf(*more ? "\t%s\n" : "\n", more);
}

#define GAVE(result) gave_with(result, errno, "%s", "")
#define TRY(result_name, expression) (errno = 0, result_name = (expression))

/* Some bytes in short: their length, the first of them, and a sum. */
static const char *shown(const void *bytes, long len) {
    static char out[4][64];
    static int next;
    char *to = out[next++ % 4];
    const unsigned char *from = bytes;
    if (len < 0)
        return "";
    unsigned sum = 0;
    for (long i = 0; i < len; i++)
        sum = sum * 31 + from[i];
    int n = snprintf(to, 64, "%ld:", len);
    for (long i = 0; i < len && i < 8; i++)
        n += snprintf(to + n, 64 - n, from[i] > 32 && from[i] < 127 ? "%c" : "<%02x>", from[i]);
    snprintf(to + n, 64 - n, ":%08x", sum);
    return to;
}

static struct sockaddr_in address_of(int which, int port) {
    struct sockaddr_in name = {.sin_family = AF_INET, .sin_port = htons(first_port() + port)};
    inet_pton(AF_INET, addresses[which], &name.sin_addr);
    return name;
}

/* Ports with even numbers are of the one address, the others of the other. */
static struct sockaddr_in place_of(int port) { return address_of(port & 1, port); }

static const char *name_of(const void *bytes, socklen_t len) {
    static char out[128];
    char text[64];
    const struct sockaddr_in *name = bytes;
    if (len < sizeof *name || name->sin_family != AF_INET)
        return shown(bytes, len);
    inet_ntop(AF_INET, &name->sin_addr, text, sizeof text);
    const char *known = text;
    for (int i = 0; i < 2; i++)
        if (!strcmp(text, addresses[i]))
            known = i ? "OTHER" : "OWN";
    int port = ntohs(name->sin_port) - first_port();
    if (port >= 0 && port < 1000)
        snprintf(out, sizeof out, "%s:%d/%d", known, port, (int)len);
    else
        snprintf(out, sizeof out, "%s:(%s)/%d", known, name->sin_port ? "some port" : "no port", (int)len);
    return out;
}

/* Descriptors that the walk opens of its own are far above those that it walks over. */
static int aside(int fd) {
    int moved = fcntl(fd, F_DUPFD_CLOEXEC, 200);
    close(fd);
    return moved;
}

static struct sock *at_port(int port) {
    for (int i = 0; i < SLOTS; i++)
        if (socks[i].slots && socks[i].port == port)
            return &socks[i];
    return NULL;
}

static int free_slot(void) {
    for (int i = 0; i < SLOTS; i++)
        if (slots[i].kind == NONE)
            return i;
    return -1;
}

static int free_sock(void) {
    for (int i = 0; i < SLOTS; i++)
        if (!socks[i].slots)
            return i;
    return -1;
}

/* A descriptor of a socket. */
static struct slot *some(void) {
    struct slot *all[SLOTS];
    int n = 0;
    for (int i = 0; i < SLOTS; i++)
        if (slots[i].kind == RDS)
            all[n++] = &slots[i];
    unsigned dice_now = below(1 << 16);
    return n ? all[dice_now % n] : NULL;
}

static void slot_gone(int i) {
    if (slots[i].kind != NONE)
        socks[slots[i].sock].slots--;
    slots[i].kind = NONE;
}

/* A number means something else, or nothing, from now on. */
static void number_gone(int fd) {
    for (int i = 0; i < SLOTS; i++)
        if (slots[i].kind == RDS && slots[i].fd == fd)
            slot_gone(i);
}

static void slot_is(int fd, int sock) {
    number_gone(fd);
    int i = free_slot();
    if (i < 0) {
        close(fd);
        return;
    }
    slots[i] = (struct slot){RDS, fd, sock};
    socks[sock].slots++;
}

/* Waits until what was sent to a socket is there. */
static void settle_fd(int fd) {
    char byte;
    int kept = errno;
    for (int i = 0; i < 2000; i++) {
        if (recv(fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT) >= 0 || errno != EAGAIN)
            break;
        usleep(500);
    }
    /* A look that found nothing at first may have taken what wakes others: the node sends that again, at once if it has a
       processor. A kernel's sockets are not polled here: the first poll may tell of congestion. */
    struct pollfd p = {.fd = fd, .events = POLLIN};
    for (int i = 0; getenv("LD_PRELOAD") && i < 150 && !(poll(&p, 1, 0) > 0 && (p.revents & POLLIN)); i++)
        usleep(1000);
    errno = kept;
}

static void settle(struct slot *s) {
    if (socks[s->sock].waiting > 0)
        settle_fd(s->fd);
}

/* The first poll after congestion has changed anywhere tells of that, which is a matter of time. */
static void settle_congestion(int fd) {
    struct pollfd p = {.fd = fd, .events = POLLIN};
    poll(&p, 1, 0);
}

static void settle_all(void) {
    for (int i = 0; i < SLOTS; i++)
        if (slots[i].kind == RDS)
            settle(&slots[i]);
}

static void was_sent(long result, int port) {
    struct sock *to = result >= 0 && port >= 0 ? at_port(port) : NULL;
    if (to)
        to->waiting++;
}

/* Tells whether a message may be sent there: what is full is another matter. */
static int has_room(int port) {
    struct sock *to = port >= 0 ? at_port(port) : NULL;
    return !to || to->waiting < waiting_max;
}

static char data[1 << 17];

static void *message(unsigned len) {
    unsigned id = sequence * 1000 + messages++;
    for (unsigned i = 0; i < len; i++)
        data[i] = (char)('a' + (id + i * 7) % 26);
    return data;
}

static const unsigned lengths[] = {0, 1, 5, 20, 100, 1000, 5000};

struct flag {
    int value;
    const char *name;
};
#define F(x) {x, #x}
static const struct flag send_flags[] = {
    {0, "0"}, {0, "0"}, {0, "0"}, {0, "0"}, {0, "0"}, F(MSG_DONTWAIT), F(MSG_DONTWAIT), F(MSG_NOSIGNAL), F(MSG_OOB), F(MSG_MORE),
    F(MSG_EOR), F(MSG_DONTROUTE), F(MSG_CONFIRM), F(MSG_ZEROCOPY), F(MSG_PROXY), F(MSG_TRUNC), F(MSG_PEEK), F(MSG_FASTOPEN),
    F(MSG_ERRQUEUE), F(MSG_WAITALL), F(MSG_CMSG_CLOEXEC), {0x100, "0x100"}, {0x8000000, "0x8000000"}, {0x40000000 >> 6, "0x1000000"}};
static const struct flag recv_flags[] = {
    {0, "0"}, {0, "0"}, {0, "0"}, F(MSG_PEEK), F(MSG_TRUNC), {MSG_PEEK | MSG_TRUNC, "MSG_PEEK|MSG_TRUNC"}, F(MSG_WAITALL),
    F(MSG_OOB), F(MSG_ERRQUEUE), F(MSG_CMSG_CLOEXEC), F(MSG_NOSIGNAL), F(MSG_WAITFORONE), F(MSG_DONTROUTE), F(MSG_EOR),
    {0x1000000, "0x1000000"}};

/* ---- sockets and names ---- */

/* A process of the other machine makes its sockets, and passes them: type and protocol are asked for. */
static void make_for(int asks) {
    int asked[2];
    while (read(asks, asked, sizeof asked) == sizeof asked) {
        int fd = socket(AF_RDS_, asked[0], asked[1]), error = fd < 0 ? errno : 0;
        char control[CMSG_SPACE(sizeof(int))] __attribute__((aligned(8))) = {0};
        struct iovec piece = {&error, sizeof error};
        struct msghdr m = {.msg_iov = &piece, .msg_iovlen = 1};
        if (fd >= 0) {
            m.msg_control = control, m.msg_controllen = sizeof control;
            struct cmsghdr *c = CMSG_FIRSTHDR(&m);
            c->cmsg_level = SOL_SOCKET, c->cmsg_type = SCM_RIGHTS, c->cmsg_len = CMSG_LEN(sizeof fd);
            memcpy(CMSG_DATA(c), &fd, sizeof fd);
        }
        if (sendmsg(asks, &m, 0) < 0)
            break;
        close(fd);
    }
    _exit(0);
}

/* A socket of one machine or the other. */
static int socket_of(int machine, int type, int protocol) {
    if (!machine)
        return socket(AF_RDS_, type, protocol);
    int asked[2] = {type, protocol}, error = EPIPE, fd = -1;
    char control[CMSG_SPACE(sizeof(int))] __attribute__((aligned(8)));
    struct iovec piece = {&error, sizeof error};
    struct msghdr m = {.msg_iov = &piece, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    if (write(maker, asked, sizeof asked) < 0 || recvmsg(maker, &m, type & SOCK_CLOEXEC ? MSG_CMSG_CLOEXEC : 0) < 0)
        return -1;
    if (m.msg_controllen)
        memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&m)), sizeof fd);
    errno = error;
    return fd;
}

static void do_socket(void) {
    static const struct flag types[] = {
        F(SOCK_SEQPACKET), F(SOCK_SEQPACKET), F(SOCK_SEQPACKET), F(SOCK_SEQPACKET), F(SOCK_SEQPACKET),
        {SOCK_SEQPACKET | SOCK_NONBLOCK, "SOCK_SEQPACKET|SOCK_NONBLOCK"},
        {SOCK_SEQPACKET | SOCK_CLOEXEC, "SOCK_SEQPACKET|SOCK_CLOEXEC"},
        F(SOCK_STREAM), F(SOCK_DGRAM), F(SOCK_RAW), F(SOCK_RDM), F(SOCK_PACKET), {77, "77"}, {SOCK_SEQPACKET | 0x100, "5|0x100"}};
    struct flag type = below(3) ? types[0] : ONE_OF(types);
    int protocol = below(20) ? 0 : (int)below(3) * 17, fd;
    if (free_slot() < 0 || free_sock() < 0)
        return;
    int machine = are_two() ? (int)below(2) : 0;
    TRY(fd, socket_of(machine, type.value, protocol));
    call("socket(AF_RDS, %s, %d)%s", type.name, protocol, machine ? " of the other" : "");
    GAVE(fd);
    if (fd >= 0) {
        int sock = free_sock();
        socks[sock] = (struct sock){-1, -1, 0, 0};
        slot_is(fd, sock);
    }
}

static void do_bind(void) {
    struct slot *s = some();
    if (!s)
        return;
    int port = (int)below(PORTS), how = (int)below(24), r;
    struct sockaddr_in name = place_of(port);
    socklen_t len = sizeof name;
    const char *what = "";
    switch (how) {
    case 0: len = 15, what = " of 15 bytes"; break;
    case 1: len = 200, what = " of 200 bytes"; break;
    case 2: name.sin_family = AF_UNIX, what = " as AF_UNIX"; break;
    case 3: name.sin_addr.s_addr = 0, what = " at 0.0.0.0"; break;
    case 4: name.sin_addr.s_addr = 0xffffffff, what = " at 255.255.255.255"; break;
    case 5: name.sin_addr.s_addr = inet_addr("224.0.0.1"), what = " at 224.0.0.1"; break;
    case 6: name.sin_addr.s_addr = inet_addr("192.0.2.7"), what = " at 192.0.2.7"; break;
    case 7: name.sin_port = htons(1), what = " at port 1"; break;
    case 8: len = 2, what = " of 2 bytes"; break;
    case 9: len = 0, what = " of no bytes"; break;
    case 10: len = 28, what = " of 28 bytes"; break;
    }
    call("bind(%d, port %d%s)", s->fd, port, what);
    TRY(r, bind(s->fd, (void *)&name, len));
    GAVE(r);
    if (r == 0)
        socks[s->sock].port = port;
}

static void do_connect(void) {
    struct slot *s = some();
    if (!s)
        return;
    int port = (int)below(PORTS), how = (int)below(24), r;
    struct sockaddr_in name = place_of(port);
    socklen_t len = sizeof name;
    const char *what = "";
    switch (how) {
    case 0: len = 15, what = " of 15 bytes"; break;
    case 1: name.sin_family = AF_UNSPEC, what = " as AF_UNSPEC"; break;
    case 2: name.sin_family = AF_UNIX, what = " as AF_UNIX"; break;
    case 3: name.sin_addr.s_addr = 0, what = " at 0.0.0.0"; break;
    case 4: name.sin_addr.s_addr = 0xffffffff, what = " at 255.255.255.255"; break;
    case 5: name.sin_addr.s_addr = inet_addr("224.0.0.1"), what = " at 224.0.0.1"; break;
    case 6: len = 0, what = " of no bytes"; break;
    }
    call("connect(%d, port %d%s)", s->fd, port, what);
    TRY(r, connect(s->fd, (void *)&name, len));
    GAVE(r);
    if (r == 0)
        socks[s->sock].connected = port;
}

static void do_name(void) {
    struct slot *s = some();
    if (!s)
        return;
    static const int rooms[] = {128, 128, 16, 28, 8, 2, 0, -1};
    int peer = (int)below(2), r;
    char name[128];
    memset(name, 0xee, sizeof name);
    socklen_t len = (socklen_t)ONE_OF(rooms);
    call("get%sname(%d, room %d)", peer ? "peer" : "sock", s->fd, (int)len);
    TRY(r, (peer ? getpeername : getsockname)(s->fd, (void *)name, &len));
    gave_with(r, errno, "%s", r < 0 ? "" : name_of(name, len > 128 ? 128 : len));
}

static void do_server(void) {
    struct slot *s = some();
    if (!s)
        return;
    int r, fds[2];
    switch (below(5)) {
    case 0: call("listen(%d, 1)", s->fd), TRY(r, listen(s->fd, 1)); break;
    case 1: call("accept(%d)", s->fd), TRY(r, accept(s->fd, NULL, NULL)); break;
    case 2: call("accept4(%d)", s->fd), TRY(r, accept4(s->fd, NULL, NULL, SOCK_CLOEXEC)); break;
    case 3: {
        int how = (int)below(4);
        call("shutdown(%d, %d)", s->fd, how), TRY(r, shutdown(s->fd, how));
        break;
    }
    default: call("socketpair(AF_RDS)"), TRY(r, socketpair(AF_RDS_, SOCK_SEQPACKET, 0, fds)); break;
    }
    GAVE(r);
}

/* ---- sending ---- */

static void do_send(void) {
    struct slot *s = some();
    if (!s)
        return;
    struct sock *sock = &socks[s->sock];
    int port = (int)below(PORTS), way = (int)below(6);
    struct flag flag = below(2) ? send_flags[0] : ONE_OF(send_flags);
    unsigned len = ONE_OF(lengths);
    struct sockaddr_in name = place_of(port);
    int to = way == 0 ? sock->connected : port;
    if (!has_room(to) || (are_two() && (way == 5 || flag.value == MSG_ZEROCOPY)))
        return;
    void *bytes = message(len);
    struct iovec pieces[3] = {{bytes, len / 3}, {NULL, 0}, {(char *)bytes + len / 3, len - len / 3}};
    struct msghdr m = {.msg_name = &name, .msg_namelen = sizeof name, .msg_iov = pieces, .msg_iovlen = 3};
    struct mmsghdr many[2] = {{m, 0}, {m, 0}};
    long r;
    switch (way) {
    case 0:
        call("send(%d, %u, %s)", s->fd, len, flag.name);
        TRY(r, send(s->fd, bytes, len, flag.value));
        break;
    case 1:
    case 2:
        call("sendto(%d, %u, %s, port %d)", s->fd, len, flag.name, port);
        TRY(r, sendto(s->fd, bytes, len, flag.value, (void *)&name, sizeof name));
        break;
    case 3:
    case 4:
        call("sendmsg(%d, %u, %s, port %d)", s->fd, len, flag.name, port);
        TRY(r, sendmsg(s->fd, &m, flag.value));
        break;
    default:
        call("sendmmsg(%d, 2 of %u, %s, port %d)", s->fd, len, flag.name, port);
        TRY(r, sendmmsg(s->fd, many, 2, flag.value));
        gave_with(r, errno, "%u %u", r > 0 ? many[0].msg_len : 0, r > 1 ? many[1].msg_len : 0);
        for (long i = 0; i < r; i++)
            was_sent(0, to);
        return;
    }
    GAVE(r);
    was_sent(r, to);
}

static void do_send_oddly(void) {
    struct slot *s = some();
    if (!s)
        return;
    int port = (int)below(PORTS);
    struct sockaddr_in name = place_of(port);
    socklen_t len = sizeof name;
    const char *what = "";
    long r;
    switch (below(9)) {
    case 0: len = 15, what = "of 15 bytes"; break;
    case 1: name.sin_family = AF_UNSPEC, what = "as AF_UNSPEC"; break;
    case 2: name.sin_family = AF_UNIX, what = "as AF_UNIX"; break;
    case 3: name.sin_addr.s_addr = 0, what = "at 0.0.0.0"; break;
    case 4: name.sin_addr.s_addr = 0xffffffff, what = "at 255.255.255.255"; break;
    case 5: name.sin_addr.s_addr = inet_addr("224.0.0.1"), what = "at 224.0.0.1"; break;
    case 6: len = 0, what = "of no bytes"; break;
    case 7: len = 28, what = "of 28 bytes"; break;
    case 8: len = 200, what = "of 200 bytes"; break;
    }
    call("sendto(%d, 3, 0, port %d %s)", s->fd, port, what);
    if (!has_room(port) || !has_room(socks[s->sock].connected))
        return;
    TRY(r, sendto(s->fd, message(3), 3, MSG_DONTWAIT, (void *)&name, len));
    GAVE(r);
    was_sent(r, len ? port : socks[s->sock].connected);
}

static void do_control(void) {
    struct slot *s = some();
    if (!s)
        return;
    struct sock *sock = &socks[s->sock];
    static const struct {
        int level, type;
        unsigned len;
    } kinds[] = {{SOL_RDS_, 1, 16}, {SOL_RDS_, 1, 48},  {SOL_RDS_, 2, 8},         {SOL_RDS_, 2, 0},          {SOL_RDS_, 3, 24},
                 {SOL_RDS_, 4, 8},  {SOL_RDS_, 5, 8},   {SOL_RDS_, 6, 72},        {SOL_RDS_, 10, 4},         {SOL_RDS_, 12, 4},
                 {SOL_RDS_, 13, 4}, {SOL_RDS_, 99, 4},  {SOL_SOCKET, 1, 4},       {SOL_SOCKET, 2, 12},       {IPPROTO_IP, 8, 12},
                 {6, 1, 4},         {SOL_RDS_, 12, 3},  {SOL_SOCKET, SO_MARK, 4}, {SOL_SOCKET, 37, 4}};
    unsigned which = below(COUNT(kinds)), broken = below(6), port = below(PORTS);
    if (!has_room((int)port))
        return;
    struct sockaddr_in name = place_of((int)port);
    char control[128] __attribute__((aligned(8))) = {0};
    struct iovec piece = {message(4), 4};
    struct msghdr m = {.msg_name = &name, .msg_namelen = sizeof name, .msg_iov = &piece, .msg_iovlen = 1,
                       .msg_control = control, .msg_controllen = CMSG_SPACE(kinds[which].len)};
    struct cmsghdr *c = CMSG_FIRSTHDR(&m);
    c->cmsg_level = kinds[which].level, c->cmsg_type = kinds[which].type, c->cmsg_len = CMSG_LEN(kinds[which].len);
    const char *how = "";
    switch (broken) {
    case 0: c->cmsg_len = 5, how = ", length of 5"; break;
    case 1: c->cmsg_len += 64, how = ", beyond the end"; break;
    case 2: m.msg_controllen = 9, how = ", 9 bytes of room"; break;
    }
    /* What a pointer into nowhere does is another matter. */
    if (kinds[which].level == SOL_SOCKET && kinds[which].type == 1)
        *(int *)CMSG_DATA(c) = null_file;
    long r;
    call("sendmsg(%d, 4, port %u, control %d/%d of %u%s)", s->fd, port, kinds[which].level, kinds[which].type,
         kinds[which].len, how);
    TRY(r, sendmsg(s->fd, &m, MSG_DONTWAIT));
    GAVE(r);
    was_sent(r, (int)port);
    (void)sock;
}

/* Writes on the descriptor by whatever the C library has. */
static void do_write(void) {
    struct slot *s = some();
    if (!s || !has_room(socks[s->sock].connected))
        return;
    unsigned len = ONE_OF(lengths), way = below(26);
    void *bytes = message(len);
    struct iovec pieces[2] = {{bytes, len / 2}, {(char *)bytes + len / 2, len - len / 2}};
    int fd = s->fd;
    long r;
    off_t at = 0;
    loff_t at64 = 0;
    lseek(temp_file, 0, SEEK_SET);
    switch (way) {
    case 0: call("write(%d, %u)", fd, len), TRY(r, write(fd, bytes, len)); break;
    case 1: call("writev(%d, %u)", fd, len), TRY(r, writev(fd, pieces, 2)); break;
    case 2: call("pwrite(%d, %u, 0)", fd, len), TRY(r, pwrite(fd, bytes, len, 0)); break;
    case 3: call("pwrite64(%d, %u, 7)", fd, len), TRY(r, pwrite64(fd, bytes, len, 7)); break;
    case 4: call("pwritev(%d, %u, 0)", fd, len), TRY(r, pwritev(fd, pieces, 2, 0)); break;
    case 5: call("pwritev2(%d, %u, -1, 0)", fd, len), TRY(r, pwritev2(fd, pieces, 2, -1, 0)); break;
    case 6: call("pwritev2(%d, %u, 0, 0)", fd, len), TRY(r, pwritev2(fd, pieces, 2, 0, 0)); break;
    case 7: call("pwritev2(%d, %u, -1, RWF_NOWAIT)", fd, len), TRY(r, pwritev2(fd, pieces, 2, -1, RWF_NOWAIT)); break;
    case 8: call("sendfile(%d, file, NULL, %u)", fd, len), TRY(r, sendfile(fd, temp_file, NULL, len)); break;
    case 9: call("sendfile64(%d, file, 0, %u)", fd, len), TRY(r, sendfile64(fd, temp_file, &at64, len)); break;
    case 10: call("sendfile(file, %d, NULL, %u)", fd, len), TRY(r, sendfile(temp_file, fd, NULL, len)); break;
    case 11:
        if (write(pipe_out, "pipe", 4) < 0)
            return;
        call("splice(pipe of 4, %d, %u)", fd, len);
        TRY(r, splice(pipe_in, NULL, fd, NULL, len, SPLICE_F_NONBLOCK));
        break;
    case 12: call("vmsplice(%d, %u)", fd, len), TRY(r, vmsplice(fd, pieces, 2, 0)); break;
    case 13: call("tee(pipe, %d, %u)", fd, len), TRY(r, tee(pipe_in, fd, len, SPLICE_F_NONBLOCK)); break;
    case 14: call("tee(%d, pipe, %u)", fd, len), TRY(r, tee(fd, pipe_out, len, SPLICE_F_NONBLOCK)); break;
    case 15: call("copy_file_range(file, %d, %u)", fd, len), TRY(r, copy_file_range(temp_file, &at64, fd, NULL, len, 0)); break;
    case 16: call("copy_file_range(%d, file, %u)", fd, len), TRY(r, copy_file_range(fd, NULL, temp_file, &at64, len, 0)); break;
    case 17: call("dprintf(%d, 5 bytes)", fd), TRY(r, dprintf(fd, "hello")); break;
    case 18: {
        int copy = aside(dup(fd)), closed;
        FILE *file = fdopen(copy, "w");
        call("fputs and fflush of fdopen(%d)", fd);
        int put = fputs("hello", file);
        TRY(r, fflush(file));
        int error = errno;
        closed = fclose(file);
        gave_with(r, error, "put %s, closed %d", put < 0 ? "nothing" : "it", closed);
        return;
    }
    case 19: call("syscall(SYS_write, %d, %u)", fd, len), TRY(r, syscall(SYS_write, fd, bytes, len)); break;
    case 20: call("syscall(SYS_writev, %d, %u)", fd, len), TRY(r, syscall(SYS_writev, fd, pieces, 2)); break;
    case 21: call("syscall(SYS_pwrite64, %d, %u)", fd, len), TRY(r, syscall(SYS_pwrite64, fd, bytes, len, 0)); break;
    case 22: call("syscall(SYS_sendfile, %d, %u)", fd, len), TRY(r, syscall(SYS_sendfile, fd, temp_file, NULL, len)); break;
    case 23:
        call("syscall(SYS_sendto, %d, %u)", fd, len);
        TRY(r, syscall(SYS_sendto, fd, bytes, len, MSG_DONTWAIT, NULL, 0));
        GAVE(r);
        was_sent(r, socks[s->sock].connected);
        return;
    case 24: call("write(%d, NULL, 0)", fd), TRY(r, write(fd, NULL, 0)); break;
    default: call("syscall(SYS_pwritev2, %d, %u)", fd, len), TRY(r, syscall(SYS_pwritev2, fd, pieces, 2, -1L, -1L, 0)); break;
    }
    (void)at;
    GAVE(r);
    if (way == 11) /* what the call has left there */
        while (read(pipe_in, data, 4096) > 0)
            ;
}

/* ---- receiving ---- */

static void taken(struct slot *s, long r, int flags) {
    struct sock *sock = &socks[s->sock];
    if (r >= 0 && !(flags & (MSG_PEEK | MSG_OOB | MSG_ERRQUEUE)) && sock->waiting > 0)
        sock->waiting--;
}

static const unsigned rooms[] = {0, 1, 10, 200, 9000, 9000, 9000};

static void do_recv(void) {
    struct slot *s = some();
    if (!s)
        return;
    settle(s);
    static char to[16384];
    unsigned room = ONE_OF(rooms), way = below(6);
    struct flag flag = below(2) ? recv_flags[0] : ONE_OF(recv_flags);
    /* With something to receive, a call that may wait does not. */
    int wait = socks[s->sock].waiting > 0 && below(2) ? 0 : MSG_DONTWAIT;
    char name[128], control[256] __attribute__((aligned(8)));
    socklen_t len = below(4) ? sizeof name : 8;
    memset(name, 0xee, sizeof name);
    memset(to, 0xee, sizeof to);
    struct iovec pieces[3] = {{to, room / 3}, {NULL, 0}, {to + room / 3, room - room / 3}};
    struct msghdr m = {.msg_name = way == 4 ? NULL : name, .msg_namelen = len, .msg_iov = pieces, .msg_iovlen = 3,
                       .msg_control = control, .msg_controllen = sizeof control};
    struct mmsghdr many[3] = {{m, 0}, {m, 0}, {m, 0}};
    long r;
    const char *waits = wait ? "|MSG_DONTWAIT" : "";
    switch (way) {
    case 0:
        call("recv(%d, room %u, %s%s)", s->fd, room, flag.name, waits);
        TRY(r, recv(s->fd, to, room, flag.value | wait));
        gave_with(r, errno, "%s", shown(to, r < (long)room ? r : (long)room));
        break;
    case 1:
    case 2:
        call("recvfrom(%d, room %u, %s%s, name of %d)", s->fd, room, flag.name, waits, (int)len);
        TRY(r, recvfrom(s->fd, to, room, flag.value | wait, (void *)name, &len));
        gave_with(r, errno, "%s from %s", shown(to, r < (long)room ? r : (long)room),
                  r < 0 ? "nobody" : name_of(name, len > 128 ? 128 : len));
        break;
    case 3:
    case 4:
        call("recvmsg(%d, room %u, %s%s%s)", s->fd, room, flag.name, waits, way == 4 ? ", no name" : "");
        TRY(r, recvmsg(s->fd, &m, flag.value | wait));
        if (r < 0) {
            GAVE(r);
            break;
        }
        struct cmsghdr *c = m.msg_controllen ? CMSG_FIRSTHDR(&m) : NULL;
        gave_with(r, errno, "%s from %s, flags %#x, control %zu (%d/%d)", shown(to, r < (long)room ? r : (long)room),
                  m.msg_name ? name_of(name, m.msg_namelen > 128 ? 128 : m.msg_namelen) : "?", m.msg_flags,
                  (size_t)m.msg_controllen, c ? c->cmsg_level : 0, c ? c->cmsg_type : 0);
        break;
    default: {
        unsigned count = socks[s->sock].waiting > 1 && below(2) ? 1 : 3;
        call("recvmmsg(%d, %u of room %u, %s%s)", s->fd, count, room, flag.name, waits);
        if (count > 1)
            wait = MSG_DONTWAIT;
        int want = socks[s->sock].waiting;
        if (flag.value & (MSG_PEEK | MSG_OOB | MSG_ERRQUEUE) || (want > 1 && count > 1)) {
            /* How many have come is a matter of time. */
            count = 1;
            call("recvmmsg(%d, %u of room %u, %s%s)", s->fd, count, room, flag.name, waits);
        }
        TRY(r, recvmmsg(s->fd, many, count, flag.value | wait, NULL));
        gave_with(r, errno, "%u %s", r > 0 ? many[0].msg_len : 0, shown(to, r > 0 ? (many[0].msg_len < room ? many[0].msg_len : room) : 0));
        for (long i = 0; i < r; i++)
            taken(s, 0, flag.value);
        return;
    }
    }
    taken(s, r, flag.value);
}

static void do_read(void) {
    struct slot *s = some();
    if (!s)
        return;
    static char to[16384];
    settle(s);
    unsigned room = ONE_OF(rooms), way = below(15);
    int is_nonblocking = fcntl(s->fd, F_GETFL) & O_NONBLOCK;
    memset(to, 0xee, sizeof to);
    struct iovec pieces[2] = {{to, room / 2}, {to + room / 2, room - room / 2}};
    int fd = s->fd, never = 0;
    long r;
    /* Those that may wait are made only where they do not. */
    if (socks[s->sock].waiting == 0 && !is_nonblocking && way != 4 && way != 5)
        way = 2;
    switch (way) {
    case 0: call("read(%d, %u)", fd, room), TRY(r, read(fd, to, room)); break;
    case 1: call("readv(%d, %u)", fd, room), TRY(r, readv(fd, pieces, 2)); break;
    case 2: call("pread(%d, %u, 0)", fd, room), never = 1, TRY(r, pread(fd, to, room, 0)); break;
    case 3: call("pread64(%d, %u, 9)", fd, room), never = 1, TRY(r, pread64(fd, to, room, 9)); break;
    case 4: call("preadv(%d, %u, 0)", fd, room), never = 1, TRY(r, preadv(fd, pieces, 2, 0)); break;
    case 5: call("preadv2(%d, %u, -1, RWF_NOWAIT)", fd, room), TRY(r, preadv2(fd, pieces, 2, -1, RWF_NOWAIT)); break;
    case 6: call("preadv2(%d, %u, -1, 0)", fd, room), TRY(r, preadv2(fd, pieces, 2, -1, 0)); break;
    case 7: call("preadv2(%d, %u, 0, 0)", fd, room), never = 1, TRY(r, preadv2(fd, pieces, 2, 0, 0)); break;
    case 8: call("syscall(SYS_read, %d, %u)", fd, room), TRY(r, syscall(SYS_read, fd, to, room)); break;
    case 9: call("syscall(SYS_readv, %d, %u)", fd, room), TRY(r, syscall(SYS_readv, fd, pieces, 2)); break;
    case 10: call("syscall(SYS_pread64, %d, %u)", fd, room), never = 1, TRY(r, syscall(SYS_pread64, fd, to, room, 0)); break;
    case 11:
        call("syscall(SYS_recvfrom, %d, %u)", fd, room);
        TRY(r, syscall(SYS_recvfrom, fd, to, room, 0, NULL, NULL));
        break;
    case 12: {
        call("splice(%d, pipe, %u)", fd, room);
        TRY(r, splice(fd, NULL, pipe_out, NULL, room, SPLICE_F_NONBLOCK));
        int error = errno;
        long n = read(pipe_in, to, sizeof to);
        gave_with(r, error, "%s", shown(to, n > 0 ? n : 0));
        taken(s, r, 0);
        return;
    }
    case 13: {
        int copy = aside(dup(fd));
        FILE *file = fdopen(copy, "r");
        setvbuf(file, NULL, _IOFBF, 8192);
        call("fread(%u) of fdopen(%d)", 10, fd);
        /* one message, at most; what is more would wait */
        int c = fgetc(file), error = errno;
        gave_with(c == EOF ? -1 : c, error, "end %d, error %d", feof(file) != 0, ferror(file) != 0);
        fclose(file);
        taken(s, c == EOF && !is_nonblocking ? 0 : c, 0);
        return;
    }
    default: call("syscall(SYS_preadv2, %d, %u)", fd, room), TRY(r, syscall(SYS_preadv2, fd, pieces, 2, -1L, -1L, 0)); break;
    }
    gave_with(r, errno, "%s", shown(to, r));
    /* A read of no bytes takes nothing where the call ends before the socket. */
    if (!never && !(room == 0 && (way == 0 || way == 8) && r == 0 && 0))
        taken(s, r, 0);
}

/* ---- options ---- */

struct option {
    int level, name;
    const char *words;
};
#define O(x) {SOL_SOCKET, x, #x}
static const struct option options[] = {
    O(SO_DEBUG), O(SO_REUSEADDR), O(SO_TYPE), O(SO_ERROR), O(SO_DONTROUTE), O(SO_BROADCAST), O(SO_SNDBUF), O(SO_RCVBUF),
    O(SO_KEEPALIVE), O(SO_OOBINLINE), O(SO_NO_CHECK), O(SO_PRIORITY), O(SO_LINGER), O(SO_BSDCOMPAT), O(SO_REUSEPORT),
    O(SO_PASSCRED), O(SO_PEERCRED), O(SO_RCVLOWAT), O(SO_SNDLOWAT), O(SO_RCVTIMEO), O(SO_SNDTIMEO), O(SO_BINDTODEVICE),
    O(SO_ATTACH_FILTER), O(SO_DETACH_FILTER), O(SO_PEERNAME), O(SO_TIMESTAMP), O(SO_ACCEPTCONN), O(SO_PEERSEC), O(SO_PASSSEC),
    O(SO_TIMESTAMPNS), O(SO_MARK), O(SO_TIMESTAMPING), O(SO_PROTOCOL), O(SO_DOMAIN), O(SO_RXQ_OVFL), O(SO_WIFI_STATUS),
    O(SO_PEEK_OFF), O(SO_NOFCS), O(SO_LOCK_FILTER), O(SO_SELECT_ERR_QUEUE), O(SO_BUSY_POLL), O(SO_MAX_PACING_RATE),
    O(SO_BPF_EXTENSIONS), O(SO_INCOMING_CPU), O(SO_ATTACH_BPF), O(SO_INCOMING_NAPI_ID), O(SO_ZEROCOPY), O(SO_TXTIME),
    O(SO_BINDTOIFINDEX), {SOL_SOCKET, 69, "SO_PREFER_BUSY_POLL"}, {SOL_SOCKET, 70, "SO_BUSY_POLL_BUDGET"},
    {SOL_SOCKET, 72, "SO_BUF_LOCK"}, {SOL_SOCKET, 73, "SO_RESERVE_MEM"}, {SOL_SOCKET, 74, "SO_TXREHASH"},
    {SOL_SOCKET, 75, "SO_RCVMARK"}, {SOL_SOCKET, 76, "SO_PASSPIDFD"}, {SOL_SOCKET, 77, "SO_PEERPIDFD"},
    {SOL_SOCKET, 999, "999"}, {SOL_SOCKET, 0, "0"}, {SOL_SOCKET, -1, "-1"},
    {SOL_RDS_, 1, "RDS_CANCEL_SENT_TO"}, {SOL_RDS_, 2, "RDS_GET_MR"}, {SOL_RDS_, 3, "RDS_FREE_MR"}, {SOL_RDS_, 5, "RDS_RECVERR"},
    {SOL_RDS_, 6, "RDS_CONG_MONITOR"}, {SOL_RDS_, 7, "RDS_GET_MR_FOR_DEST"}, {SOL_RDS_, 8, "SO_RDS_TRANSPORT"},
    {SOL_RDS_, 10, "SO_RDS_MSG_RXPATH_LATENCY"}, {SOL_RDS_, 99, "99"}, {SOL_RDS_, SO_TIMESTAMP, "SO_TIMESTAMP"},
    {SOL_RDS_, 4, "4"}, {SOL_RDS_, 9, "9"}, {SOL_RDS_, -5, "-5"},
    {IPPROTO_IP, 1, "1"}, {IPPROTO_TCP, 1, "1"}, {IPPROTO_UDP, 1, "1"}, {IPPROTO_IPV6, 26, "26"}, {SOL_PACKET, 1, "1"}, {12345, 1, "1"}};

static void do_get_option(void) {
    struct slot *s = some();
    if (!s)
        return;
    static const int lens[] = {4, 4, 4, 8, 16, 64, 1, 3, 0, -1};
    struct option option = ONE_OF(options);
    unsigned char value[64];
    memset(value, 0xee, sizeof value);
    socklen_t len = (socklen_t)ONE_OF(lens);
    int r;
    call("getsockopt(%d, %d, %s, room %d)", s->fd, option.level, option.words, (int)len);
    TRY(r, getsockopt(s->fd, option.level, option.name, value, &len));
    if (r >= 0 && option.level == SOL_SOCKET && option.name == SO_PEERCRED)
        memset(value, 0, 4);
    /* The address differs from machine to machine. */
    if (r >= 0 && option.level == SOL_SOCKET && option.name == SO_PEERNAME)
        memset(value + 4, 0, sizeof value - 4);
    if (r >= 0 && option.level == SOL_SOCKET && option.name == SO_INCOMING_CPU)
        memset(value, 0, 4);
    gave_with(r, errno, "%s", r < 0 ? "" : shown(value, len > 64 ? 64 : len));
}

static void do_set_option(void) {
    struct slot *s = some();
    if (!s)
        return;
    static const int lens[] = {4, 4, 4, 4, 8, 16, 1, 3, 0, -1};
    static const int values[] = {0, 1, 1, 2, 100, -1, 3, 0x7fffffff};
    struct option option = ONE_OF(options);
    int name = option.name, level = option.level, r;
    int value[16] = {ONE_OF(values)};
    int len = ONE_OF(lens);
    if (level == SOL_SOCKET && (name == SO_RCVTIMEO || name == SO_SNDTIMEO))
        value[0] = value[0] == 1 ? 5 : value[0], len = len == 4 ? 16 : len, value[2] = value[0] == 2 ? 5000 : value[0] == 3 ? 1000001 : 0;
    if (level == SOL_SOCKET && (name == SO_RCVBUF || name == SO_SNDBUF))
        value[0] = 120000 + (int)below(4) * 30000;
    /* Addresses that are looked at are such as there are. */
    if (level == SOL_RDS_ && (name == 2 || name == 7 || name == 3 || name == 1))
        value[0] = 0;
    call("setsockopt(%d, %d, %s, %d of %d)", s->fd, level, option.words, value[0], len);
    TRY(r, setsockopt(s->fd, level, name, value, (socklen_t)len));
    GAVE(r);
}

static void do_ioctl(void) {
    struct slot *s = some();
    if (!s)
        return;
    static const struct {
        unsigned long number;
        const char *name;
    } requests[] = {
        {FIONREAD, "FIONREAD"}, {0x5411, "SIOCOUTQ"}, {0x8905, "SIOCATMARK"}, {0x89e0, "SIOCRDSSETTOS"}, {0x89e1, "SIOCRDSGETTOS"},
        {FIONBIO, "FIONBIO"}, {FIOASYNC, "FIOASYNC"}, {FIOCLEX, "FIOCLEX"}, {FIONCLEX, "FIONCLEX"}, {TCGETS, "TCGETS"},
        {0x8904, "SIOCGPGRP"}, {0x8903, "FIOGETOWN"}, {0x8906, "SIOCGSTAMP"}, {0x8907, "SIOCGSTAMPNS"}, {TIOCGWINSZ, "TIOCGWINSZ"},
        {0x5450 + 0x10, "FIOQSIZE"}, {2, "FIGETBSZ"}, {0x894b, "SIOCOUTQNSD"}, {0x894c, "SIOCGSKNS"}, {0x1234, "0x1234"}, {0, "0"},
        {0x8938, "0x8938"}, {0x894e, "0x894e"}, {0x660b, "0x660b"}, {0x890b, "0x890b"},
        {0x8913, "SIOCGIFFLAGS"}, {0x8933, "SIOCGIFINDEX"}, {0x8921, "SIOCGIFMTU"}};
    unsigned which = below(COUNT(requests));
    long value[8] = {(long)below(2)};
    /* A name, where one is wanted. */
    if (requests[which].number > 0x8912 && requests[which].number <= 0x8933 && value[0])
        memcpy(value, "lo", 3);
   
    int r;
    call("ioctl(%d, %s, %ld)", s->fd, requests[which].name, value[0]);
    TRY(r, ioctl(s->fd, requests[which].number, value));
    if (requests[which].number == 0x894c) {
        if (r >= 0)
            close(r), r = 0;
    }
    gave_with(r, errno, "%s", r < 0 ? "" : shown(value, 8));
}

/* ---- what descriptors have ---- */

static void do_fcntl(void) {
    struct slot *s = some();
    if (!s)
        return;
    int fd = s->fd, r;
    struct flock lock = {.l_type = F_WRLCK};
    switch (below(17)) {
    case 0: call("fcntl(%d, F_GETFD)", fd), TRY(r, fcntl(fd, F_GETFD)); break;
    case 1: call("fcntl(%d, F_SETFD, 1)", fd), TRY(r, fcntl(fd, F_SETFD, 1)); break;
    case 2: call("fcntl(%d, F_SETFD, 0)", fd), TRY(r, fcntl(fd, F_SETFD, 0)); break;
    case 3: call("fcntl(%d, F_GETFL)", fd), TRY(r, fcntl(fd, F_GETFL)); break;
    case 4: call("fcntl(%d, F_SETFL, O_NONBLOCK)", fd), TRY(r, fcntl(fd, F_SETFL, O_NONBLOCK)); break;
    case 5: call("fcntl(%d, F_SETFL, 0)", fd), TRY(r, fcntl(fd, F_SETFL, 0)); break;
    case 6: call("fcntl(%d, F_SETFL, O_APPEND)", fd), TRY(r, fcntl(fd, F_SETFL, O_APPEND)); break;
    case 7: call("fcntl(%d, F_SETFL, O_DIRECT)", fd), TRY(r, fcntl(fd, F_SETFL, O_DIRECT)); break;
    case 8: call("fcntl(%d, F_GETOWN)", fd), TRY(r, fcntl(fd, F_GETOWN)); break;
    case 9: call("fcntl(%d, F_SETLK)", fd), TRY(r, fcntl(fd, F_SETLK, &lock)); break;
    case 10: call("fcntl(%d, F_GETPIPE_SZ)", fd), TRY(r, fcntl(fd, F_GETPIPE_SZ)); break;
    case 11: call("fcntl(%d, F_GET_SEALS)", fd), TRY(r, fcntl(fd, F_GET_SEALS)); break;
    case 12: call("fcntl(%d, F_GETLEASE)", fd), TRY(r, fcntl(fd, F_GETLEASE)); break;
    case 13: call("fcntl(%d, F_GETSIG)", fd), TRY(r, fcntl(fd, F_GETSIG)); break;
    case 14: call("fcntl(%d, 9999)", fd), TRY(r, fcntl(fd, 9999)); break;
    case 15: call("fcntl(%d, F_SETFL, O_NOATIME)", fd), TRY(r, fcntl(fd, F_SETFL, O_NOATIME)); break;
    default: call("fcntl(%d, F_SETLEASE, F_RDLCK)", fd), TRY(r, fcntl(fd, F_SETLEASE, F_RDLCK)); break;
    }
    GAVE(r);
}

static void do_as_file(void) {
    struct slot *s = some();
    if (!s)
        return;
    int fd = s->fd;
    long r;
    struct stat st;
    struct termios t;
    char link[64], path[64];
    switch (below(22)) {
    case 0:
        call("fstat(%d)", fd), TRY(r, fstat(fd, &st));
        gave_with(r, errno, "%o size %ld", st.st_mode, (long)st.st_size);
        return;
    case 1: call("lseek(%d)", fd), TRY(r, lseek(fd, 0, SEEK_CUR)); break;
    case 2: call("ftruncate(%d)", fd), TRY(r, ftruncate(fd, 0)); break;
    case 3: call("fsync(%d)", fd), TRY(r, fsync(fd)); break;
    case 4: call("fdatasync(%d)", fd), TRY(r, fdatasync(fd)); break;
    case 5: call("mmap(%d)", fd), TRY(r, mmap(NULL, 4096, PROT_READ, MAP_SHARED, fd, 0) == MAP_FAILED ? -1 : 0); break;
    case 6: call("posix_fadvise(%d)", fd), r = posix_fadvise(fd, 0, 0, 0); break;
    case 7: call("posix_fallocate(%d)", fd), r = posix_fallocate(fd, 0, 10); break;
    case 8: call("fallocate(%d)", fd), TRY(r, fallocate(fd, 0, 0, 10)); break;
    case 9: call("isatty(%d)", fd), TRY(r, isatty(fd) - 1); break;
    case 10: call("flock(%d)", fd), TRY(r, flock(fd, LOCK_EX | LOCK_NB)); break;
    case 11: call("fchdir(%d)", fd), TRY(r, fchdir(fd)); break;
    case 12: call("readahead(%d)", fd), TRY(r, readahead(fd, 0, 10)); break;
    case 13: call("sync_file_range(%d)", fd), TRY(r, sync_file_range(fd, 0, 0, 0)); break;
    case 14: call("tcgetattr(%d)", fd), TRY(r, tcgetattr(fd, &t)); break;
    case 15: call("openat(%d, x)", fd), TRY(r, openat(fd, "x", O_RDONLY)); break;
    case 16:
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
        call("readlink of %d", fd), TRY(r, readlink(path, link, sizeof link));
        gave_with(r < 0 ? r : 0, errno, "%.8s", link);
        return;
    case 17:
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
        call("open of /proc/self/fd/%d", fd), TRY(r, open(path, O_RDWR));
        break;
    case 18: call("lockf(%d)", fd), TRY(r, lockf(fd, F_TLOCK, 0)); break;
    case 19: call("fchmod(%d)", fd), TRY(r, fchmod(fd, 0777)); break;
    case 20: call("syncfs(%d)", fd), TRY(r, syncfs(fd)); break;
    default: {
        struct stat a, b;
        struct slot *other = some();
        call("same file %d %d", fd, other->fd), TRY(r, fstat(fd, &a) | fstat(other->fd, &b));
        gave_with(r, errno, "%d", a.st_ino == b.st_ino && a.st_dev == b.st_dev);
        return;
    }
    }
    GAVE(r);
}

static void do_copy(void) {
    struct slot *s = some();
    if (!s || free_slot() < 0)
        return;
    int fd = s->fd, sock = s->sock, to = 3 + (int)below(20), r;
    switch (below(8)) {
    case 0: call("dup(%d)", fd), TRY(r, dup(fd)); break;
    case 1: call("dup2(%d, %d)", fd, to), TRY(r, dup2(fd, to)); break;
    case 2: call("dup3(%d, %d, O_CLOEXEC)", fd, to), TRY(r, dup3(fd, to, O_CLOEXEC)); break;
    case 3: call("dup3(%d, %d, 7)", fd, to), TRY(r, dup3(fd, to, 7)); break;
    case 4: call("fcntl(%d, F_DUPFD, %d)", fd, to), TRY(r, fcntl(fd, F_DUPFD, to)); break;
    case 5: call("fcntl(%d, F_DUPFD_CLOEXEC, %d)", fd, to), TRY(r, fcntl(fd, F_DUPFD_CLOEXEC, to)); break;
    case 6: call("syscall(SYS_dup, %d)", fd), TRY(r, (int)syscall(SYS_dup, fd)); break;
    default: call("syscall(SYS_dup3, %d, %d)", fd, to), TRY(r, (int)syscall(SYS_dup3, fd, to, 0)); break;
    }
    GAVE(r);
    if (r >= 0 && r != fd) {
        socks[sock].slots++; /* stays, whatever the number was */
        number_gone(r);
        slot_is(r, sock);
        socks[sock].slots--;
    }
}

/* Something else takes the number of a socket. */
static void do_replace(void) {
    struct slot *s = some();
    if (!s)
        return;
    int fd = s->fd, r;
    switch (below(3)) {
    case 0: call("dup2(null, %d)", fd), TRY(r, dup2(null_file, fd)); break;
    case 1: call("syscall(SYS_dup2, null, %d)", fd), TRY(r, (int)syscall(SYS_dup2, null_file, fd)); break;
    default: call("dup3(null, %d, 0)", fd), TRY(r, dup3(null_file, fd, 0)); break;
    }
    GAVE(r);
    char byte;
    socklen_t len = 1;
    call("getsockname(null at %d)", fd), TRY(r, getsockname(fd, (void *)&byte, &len)), GAVE(r);
    call("read(null at %d)", fd), TRY(r, (int)read(fd, &byte, 1)), GAVE(r);
    call("write(null at %d)", fd), TRY(r, (int)write(fd, &byte, 1)), GAVE(r);
    close(fd);
    number_gone(fd);
}

static void do_close(void) {
    struct slot *s = some();
    if (!s)
        return;
    int fd = s->fd, r;
    switch (below(8)) {
    default: call("close(%d)", fd), TRY(r, close(fd)); break;
    case 3: call("close_range(%d, %d, 0)", fd, fd), TRY(r, close_range(fd, fd, 0)); break;
    case 4: call("syscall(SYS_close, %d)", fd), TRY(r, (int)syscall(SYS_close, fd)); break;
    case 5: call("syscall(SYS_close_range, %d)", fd), TRY(r, (int)syscall(SYS_close_range, fd, fd, 0)); break;
    case 6: {
        FILE *file = fdopen(fd, "r");
        call("fclose(fdopen(%d))", fd), TRY(r, file ? fclose(file) : -1);
        break;
    }
    case 7: {
        FILE *file = fdopen(fd, "r+");
        call("freopen(/dev/null, fdopen(%d))", fd);
        file = file ? freopen("/dev/null", "r", file) : NULL;
        TRY(r, file ? fileno(file) : -1);
        GAVE(r);
        call("fclose of it"), TRY(r, file ? fclose(file) : -1);
        break;
    }
    }
    GAVE(r);
    int is_open = fcntl(fd, F_GETFD) >= 0;
    char byte;
    call("recv(%d) after it", fd), TRY(r, (int)recv(fd, &byte, 1, MSG_DONTWAIT)), gave_with(r, errno, "open %d", is_open);
    number_gone(fd);
}

static void do_pass(void) {
    struct slot *s = some();
    if (!s || free_slot() < 0)
        return;
    char byte = 'p', control[CMSG_SPACE(sizeof(int))] __attribute__((aligned(8))) = {0};
    struct iovec piece = {&byte, 1};
    struct msghdr m = {.msg_iov = &piece, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    struct cmsghdr *c = CMSG_FIRSTHDR(&m);
    c->cmsg_level = SOL_SOCKET, c->cmsg_type = SCM_RIGHTS, c->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(c), &s->fd, sizeof(int));
    int closes = below(3) == 0, fd = s->fd, sock = s->sock, raw = below(3) == 0, r, got = -1;
    call("passing %d%s%s", fd, closes ? ", which is closed" : "", raw ? ", by system calls" : "");
    TRY(r, (int)(raw ? syscall(SYS_sendmsg, pair[0], &m, 0) : sendmsg(pair[0], &m, 0)));
    if (r == 1) {
        socks[sock].slots++;
        if (closes)
            close(fd), number_gone(fd);
        m.msg_controllen = sizeof control;
        TRY(r, (int)(raw ? syscall(SYS_recvmsg, pair[1], &m, 0) : recvmsg(pair[1], &m, 0)));
        if (r == 1)
            memcpy(&got, CMSG_DATA(CMSG_FIRSTHDR(&m)), sizeof got);
    }
    gave_with(r, errno, "%d", got);
    if (got >= 0)
        slot_is(got, sock);
    socks[sock].slots--;
}

/* Passes descriptors in ways that leave nothing behind. */
static void do_rights(void) {
    struct slot *s = some();
    if (!s)
        return;
    unsigned way = below(5);
    char byte = 'r', control[CMSG_SPACE(2 * sizeof(int))] __attribute__((aligned(8))) = {0};
    struct iovec piece = {&byte, 1};
    struct msghdr m = {.msg_iov = &piece, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    struct cmsghdr *c = CMSG_FIRSTHDR(&m);
    int both[2] = {s->fd, s->fd}, got[2] = {-1, -1}, flags = 0;
    c->cmsg_level = SOL_SOCKET, c->cmsg_type = SCM_RIGHTS, c->cmsg_len = CMSG_LEN(sizeof both);
    memcpy(CMSG_DATA(c), both, sizeof both);
    static const char *const ways[] = {"", ", peeked at first", ", room for one", ", close-on-exec", ", to a child"};
    long r;
    call("passing %d twice%s", s->fd, ways[way]);
    TRY(r, sendmsg(pair[0], &m, 0));
    if (r != 1) {
        GAVE(r);
        return;
    }
    fflush(stdout);
    pid_t child = way == 4 ? fork() : -1;
    if (child > 0) {
        waitpid(child, NULL, 0);
        return;
    }
    for (int again = way == 1; again >= 0; again--) {
        m.msg_controllen = way == 2 ? CMSG_SPACE(sizeof(int)) - 4 : sizeof control;
        TRY(r, recvmsg(pair[1], &m, (again ? MSG_PEEK : 0) | (way == 3 ? MSG_CMSG_CLOEXEC : 0)));
        int error = errno, n = 0;
        c = r == 1 ? CMSG_FIRSTHDR(&m) : NULL;
        if (c)
            n = (int)((c->cmsg_len - CMSG_LEN(0)) / sizeof(int)), memcpy(got, CMSG_DATA(c), (size_t)n * sizeof(int));
        for (int i = 0; i < n; i++) {
            struct sockaddr_in name;
            socklen_t len = sizeof name;
            flags = fcntl(got[i], F_GETFD);
            if (getsockname(got[i], (void *)&name, &len))
                flags += 100;
            close(got[i]);
        }
        gave_with(r, error, "%d came, flags %#x, %d", n, m.msg_flags, flags);
    }
    if (child == 0) {
        fflush(stdout);
        _exit(0);
    }
}

/* ---- waiting ---- */

static void do_poll(void) {
    struct slot *s = some();
    if (!s)
        return;
    settle_all();
    settle_congestion(s->fd);
    int fd = s->fd, r, way = (int)below(5);
    static const short kinds[] = {POLLIN, POLLOUT, POLLIN | POLLOUT, POLLPRI, POLLRDNORM, POLLWRNORM, POLLRDBAND, POLLRDHUP, 0, 0x7fff};
    short events = ONE_OF(kinds);
    struct pollfd p = {.fd = fd, .events = events};
    struct timespec none = {0, 0};
    fd_set in, out, except;
    FD_ZERO(&in);
    FD_ZERO(&out);
    FD_ZERO(&except);
    FD_SET(fd, &in);
    FD_SET(fd, &out);
    FD_SET(fd, &except);
    struct timeval now = {0, 0};
    switch (way) {
    case 0:
        call("poll(%d, %#x)", fd, events), TRY(r, poll(&p, 1, 0));
        gave_with(r, errno, "%#x", p.revents);
        break;
    case 1:
        call("ppoll(%d, %#x)", fd, events), TRY(r, ppoll(&p, 1, &none, NULL));
        gave_with(r, errno, "%#x", p.revents);
        break;
    case 2:
        call("select(%d)", fd), TRY(r, select(fd + 1, &in, &out, &except, &now));
        gave_with(r, errno, "%d%d%d", FD_ISSET(fd, &in), FD_ISSET(fd, &out), FD_ISSET(fd, &except));
        break;
    case 3:
        call("pselect(%d)", fd), TRY(r, pselect(fd + 1, &in, &out, &except, &none, NULL));
        gave_with(r, errno, "%d%d%d", FD_ISSET(fd, &in), FD_ISSET(fd, &out), FD_ISSET(fd, &except));
        break;
    default: {
        int epoll = aside(epoll_create1(EPOLL_CLOEXEC)), edge = below(2) ? (int)EPOLLET : 0;
        struct epoll_event event = {.events = (uint32_t)((events & 0x7ff) | edge)};
        call("epoll_ctl(%d, %#x%s)", fd, events & 0x7ff, edge ? ", edge" : "");
        TRY(r, epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event)), GAVE(r);
        call("epoll_wait(%d)", fd), TRY(r, epoll_wait(epoll, &event, 1, 0));
        gave_with(r, errno, "%#x", r > 0 ? event.events : 0);
        call("epoll_wait(%d) again", fd), TRY(r, epoll_wait(epoll, &event, 1, 0));
        gave_with(r, errno, "%#x", r > 0 ? event.events : 0);
        close(epoll);
    }
    }
}

static void on_alarm(int signal) { (void)signal; }

/* Calls that wait and are ended by a signal, or by the socket's limit. */
static void do_wait(void) {
    struct slot *s = some();
    if (!s || socks[s->sock].waiting || below(2) || fcntl(s->fd, F_GETFL) & O_NONBLOCK)
        return;
    struct timeval old, limit = {0, 10000}, none = {0, 0};
    socklen_t len = sizeof old;
    long r;
    char byte;
    if (getsockopt(s->fd, SOL_SOCKET, SO_RCVTIMEO, &old, &len) < 0)
        return;
    if (below(2)) {
        setsockopt(s->fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
        call("recv(%d) with SO_RCVTIMEO", s->fd), TRY(r, recv(s->fd, &byte, 1, 0)), GAVE(r);
    } else {
        struct sigaction action = {.sa_handler = on_alarm, .sa_flags = 0}, before;
        struct itimerval timer = {{0, 10000}, {0, 10000}}, off = {{0, 0}, {0, 0}};
        setsockopt(s->fd, SOL_SOCKET, SO_RCVTIMEO, &none, sizeof none);
        sigaction(SIGALRM, &action, &before);
        setitimer(ITIMER_REAL, &timer, NULL);
        call("recv(%d) with a signal", s->fd), TRY(r, recv(s->fd, &byte, 1, 0));
        setitimer(ITIMER_REAL, &off, NULL);
        sigaction(SIGALRM, &before, NULL);
        alarm(SECONDS_MAX);
        GAVE(r);
    }
    setsockopt(s->fd, SOL_SOCKET, SO_RCVTIMEO, &old, sizeof old);
}

static void *cancelled(void *fd) {
    char byte;
    recv(*(int *)fd, &byte, 1, 0);
    return NULL;
}

static void do_cancel(void) {
    struct slot *s = some();
    if (!s || socks[s->sock].waiting || fcntl(s->fd, F_GETFL) & O_NONBLOCK || below(3))
        return;
    pthread_t thread;
    void *end = NULL;
    struct timespec until;
    struct timeval none = {0, 0};
    setsockopt(s->fd, SOL_SOCKET, SO_RCVTIMEO, &none, sizeof none);
    call("pthread_cancel in recv(%d)", s->fd);
    if (pthread_create(&thread, NULL, cancelled, &s->fd))
        return;
    usleep(5000);
    pthread_cancel(thread);
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += 2;
    int r = pthread_timedjoin_np(thread, &end, &until);
    gave_with(r, r, "%s", r ? error_name(r) : end == PTHREAD_CANCELED ? "cancelled" : "returned");
}

/* ---- full queues ---- */

#define FILL_LEN 1000
#define FILL_MAX 200

struct blocked {
    int fd, port;
};

static long send_full(int fd, int port, int flags) {
    struct sockaddr_in name = place_of(port);
    return sendto(fd, data, FILL_LEN, flags, (void *)&name, sizeof name);
}

static void *cancelled_send(void *of) {
    struct blocked *blocked = of;
    send_full(blocked->fd, blocked->port, 0);
    return NULL;
}

static void cancel_send(struct blocked *blocked) {
    pthread_t thread;
    void *end = NULL;
    struct timespec until;
    call("pthread_cancel in sendto(%d), full", blocked->fd);
    if (pthread_create(&thread, NULL, cancelled_send, blocked))
        return;
    usleep(20000);
    pthread_cancel(thread);
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += 2;
    int r = pthread_timedjoin_np(thread, &end, &until);
    gave_with(r, r, "%s", r ? error_name(r) : end == PTHREAD_CANCELED ? "cancelled" : "returned");
}

/* A limit of time is none for who waits for room at another socket: the signal comes later. */
static void interrupt_send(struct blocked *blocked, int limited) {
    struct sigaction action = {.sa_handler = on_alarm, .sa_flags = 0}, before;
    struct itimerval timer = {{0, 10000}, {0, limited ? 60000 : 10000}}, off = {{0, 0}, {0, 0}};
    struct timeval limit = {0, 10000}, none = {0, 0};
    long r;
    if (limited)
        setsockopt(blocked->fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
    sigaction(SIGALRM, &action, &before);
    setitimer(ITIMER_REAL, &timer, NULL);
    call("sendto(%d), full, with a signal%s", blocked->fd, limited ? " and SO_SNDTIMEO" : "");
    TRY(r, send_full(blocked->fd, blocked->port, 0));
    setitimer(ITIMER_REAL, &off, NULL);
    sigaction(SIGALRM, &before, NULL);
    setsockopt(blocked->fd, SOL_SOCKET, SO_SNDTIMEO, &none, sizeof none);
    alarm(SECONDS_MAX);
    GAVE(r);
}

/* Receives `count` messages; returns how many were as they were sent. */
static int drained(int fd, int count) {
    static char got[2 * FILL_LEN];
    int good = 0;
    for (int i = 0; i < count; i++) {
        settle_fd(fd);
        int n = -1;
        if (recv(fd, got, sizeof got, MSG_DONTWAIT) == FILL_LEN)
            memcpy(&n, got, sizeof n);
        good += n == i && !memcmp(got + sizeof n, data + sizeof n, FILL_LEN - sizeof n);
    }
    return good;
}

/* Takes what RDS_CONG_MONITOR has to tell, which a kernel does not of addresses of its own. */
static void settle_monitor(struct slot *s) {
    char control[64] __attribute__((aligned(8)));
    struct msghdr m = {.msg_control = control, .msg_controllen = sizeof control};
    usleep(2000);
    settle_congestion(s->fd);
    if (!socks[s->sock].waiting)
        recvmsg(s->fd, &m, MSG_DONTWAIT);
}

/* A port of a socket of these, or -1. */
static int some_bound(void) {
    int first = (int)below(SLOTS);
    for (int i = 0; i < SLOTS; i++) {
        struct sock *one = &socks[(first + i) % SLOTS];
        if (one->slots && one->port >= 0 && !one->waiting)
            return one->port;
    }
    return -1;
}

static void do_fill(void) {
    struct slot *s = some();
    int port = some_bound(), way = (int)below(4), buffer = 4000 << below(3);
    struct sock *to = port < 0 ? NULL : at_port(port);
    struct timeval old, none = {0, 0};
    socklen_t len = sizeof old;
    if (!s || !to || socks[s->sock].port < 0)
        return;
    int fd = -1, flags = fcntl(s->fd, F_GETFL), count = 0, error = 0;
    for (int i = 0; i < SLOTS; i++)
        if (slots[i].kind == RDS && &socks[slots[i].sock] == to)
            fd = slots[i].fd;
    long r;
    TRY(r, setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &buffer, sizeof buffer));
    call("setsockopt(%d, SO_RCVBUF, %d) to be filled", fd, buffer), GAVE(r);
    getsockopt(s->fd, SOL_SOCKET, SO_SNDTIMEO, &old, &len);
    setsockopt(s->fd, SOL_SOCKET, SO_SNDTIMEO, &none, sizeof none);
    /* When it tells of congestion is a matter of time. */
    int off = 0;
    setsockopt(s->fd, SOL_RDS_, 6, &off, sizeof off);
    message(FILL_LEN);
    for (; count < FILL_MAX; count++) {
        memcpy(data, &count, sizeof count);
        if (send_full(s->fd, port, MSG_DONTWAIT) < 0) {
            error = errno;
            break;
        }
    }
    /* How many are on their way is a matter of time. */
    call("filling port %d from %d", port, s->fd), gave_with(count ? -1 : 0, error, "%s", count == FILL_MAX ? "all went" : "");
    /* Between two addresses of one machine a kernel holds nobody back. */
    int is_held = (port & 1) == (socks[s->sock].port & 1) || are_two();
    if (count && error && is_held && !(flags & O_NONBLOCK)) {
        struct blocked blocked = {s->fd, port};
        switch (way) {
        case 0: cancel_send(&blocked); break;
        case 1:
        case 2: interrupt_send(&blocked, way == 2); break;
        }
    }
    setsockopt(s->fd, SOL_SOCKET, SO_SNDTIMEO, &old, len);
    int good = drained(fd, count);
    char byte;
    call("draining %d", fd), gave_with(good == count ? 0 : good, 0, "%s", good == count ? "all came" : "");
    call("recv(%d), drained", fd), TRY(r, recv(fd, &byte, 1, MSG_DONTWAIT)), GAVE(r);
    buffer = 100000;
    setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &buffer, sizeof buffer);
    /* Who is told that there is room again, and when, is a matter of time. */
    struct pollfd p = {.fd = s->fd, .events = POLLOUT};
    for (int i = 0; i < 2000 && !(poll(&p, 1, 0) > 0 && p.revents & POLLOUT); i++)
        usleep(500);
    for (int i = 0; i < SLOTS; i++)
        if (slots[i].kind == RDS)
            settle_monitor(&slots[i]);
    call("poll(%d) with room again", s->fd), gave_with(0, 0, "%#x", p.revents & POLLOUT);
}

/* A small buffer for sending: what is larger is refused. */
static void do_small(void) {
    struct slot *s = some();
    int small = (int[]){0, 1, 2000, 4000, 8000}[below(5)], got = 0, usual = 200000;
    unsigned len = ONE_OF(lengths);
    int port = (int)below(PORTS);
    socklen_t room = sizeof got;
    struct sockaddr_in name = place_of(port);
    if (!s || !has_room(port))
        return;
    long r;
    call("setsockopt(%d, SO_SNDBUF, %d)", s->fd, small), TRY(r, setsockopt(s->fd, SOL_SOCKET, SO_SNDBUF, &small, sizeof small)), GAVE(r);
    TRY(r, getsockopt(s->fd, SOL_SOCKET, SO_SNDBUF, &got, &room));
    call("getsockopt(%d, SO_SNDBUF)", s->fd), gave_with(r, errno, "%d", got);
    call("sendto(%d, %u, port %d), small", s->fd, len, port);
    TRY(r, sendto(s->fd, message(len), len, 0, (void *)&name, sizeof name)), GAVE(r);
    was_sent(r, port);
    setsockopt(s->fd, SOL_SOCKET, SO_SNDBUF, &usual, sizeof usual);
}

/* ---- signals ---- */

static volatile sig_atomic_t signals;
static void on_io(int signal) { signals += signal == SIGIO; }

static void do_signal(void) {
    struct slot *s = some();
    int port = some_bound(), way = (int)below(3);
    struct sock *to = port < 0 ? NULL : at_port(port);
    if (!s || (way == 0 && (!to || socks[s->sock].port < 0)))
        return;
    long r;
    if (way == 0) {
        /* What tells of an arrival by a signal. */
        struct sockaddr_in name = place_of(port);
        struct sigaction action = {.sa_handler = on_io, .sa_flags = SA_RESTART}, before;
        int fd = -1, flags;
        for (int i = 0; i < SLOTS; i++)
            if (slots[i].kind == RDS && &socks[slots[i].sock] == to)
                fd = slots[i].fd;
        flags = fcntl(fd, F_GETFL);
        sigaction(SIGIO, &action, &before);
        signals = 0;
        call("fcntl(%d, F_SETOWN)", fd), TRY(r, fcntl(fd, F_SETOWN, getpid())), GAVE(r);
        call("fcntl(%d, F_SETFL, O_ASYNC)", fd), TRY(r, fcntl(fd, F_SETFL, flags | O_ASYNC)), GAVE(r);
        call("sendto(%d, 3, port %d), asynchronous", s->fd, port);
        TRY(r, sendto(s->fd, message(3), 3, MSG_DONTWAIT, (void *)&name, sizeof name)), GAVE(r);
        was_sent(r, port);
        if (r >= 0)
            settle_fd(fd);
        fcntl(fd, F_SETFL, flags);
        fcntl(fd, F_SETOWN, 0);
        call("SIGIO of %d", fd), gave_with(signals != 0, 0, "%s", "");
        sigaction(SIGIO, &before, NULL);
        return;
    }
    if (socks[s->sock].waiting)
        return;
    /* Waiting for what does not come, with a mask of signals or without. */
    struct sigaction action = {.sa_handler = on_alarm, .sa_flags = way == 1 ? SA_RESTART : 0}, before;
    struct itimerval timer = {{0, 10000}, {0, 10000}}, off = {{0, 0}, {0, 0}};
    /* Two machines tell each other of congestion at any time. */
    struct pollfd p = {.fd = s->fd, .events = are_two() ? 0 : POLLIN};
    struct timespec limit = {5, 0};
    settle_congestion(s->fd);
    sigset_t none;
    sigemptyset(&none);
    sigaction(SIGALRM, &action, &before);
    setitimer(ITIMER_REAL, &timer, NULL);
    call("%s(%d) with a signal", way == 1 ? "poll" : "ppoll", s->fd);
    TRY(r, way == 1 ? poll(&p, 1, 5000) : ppoll(&p, 1, &limit, &none));
    setitimer(ITIMER_REAL, &off, NULL);
    sigaction(SIGALRM, &before, NULL);
    alarm(SECONDS_MAX);
    gave_with(r, errno, "%#x", p.revents);
}

/* ---- io_uring, on sockets that nothing else is asked of ---- */

struct ring {
    int fd;
    char *rings;
    struct io_uring_sqe *entries;
    struct io_uring_params p;
};

static int ring_opens(struct ring *ring) {
    memset(ring, 0, sizeof *ring);
    int fd = (int)syscall(SYS_io_uring_setup, 4, &ring->p);
    if (fd < 0)
        return 0;
    ring->fd = aside(fd);
    ring->rings = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_SHARED, ring->fd, IORING_OFF_SQ_RING);
    ring->entries = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, ring->fd, IORING_OFF_SQES);
    return ring->rings != MAP_FAILED && ring->entries != MAP_FAILED;
}

static int ring_does(struct ring *ring, struct io_uring_sqe *entry) {
    unsigned *tail = (void *)(ring->rings + ring->p.sq_off.tail), *array = (void *)(ring->rings + ring->p.sq_off.array);
    unsigned *head = (void *)(ring->rings + ring->p.cq_off.head);
    struct io_uring_cqe *done = (void *)(ring->rings + ring->p.cq_off.cqes);
    ring->entries[0] = *entry;
    array[*tail & 3] = 0;
    __atomic_store_n(tail, *tail + 1, __ATOMIC_RELEASE);
    struct timespec limit = {0, 500000000};
    struct io_uring_getevents_arg wait = {.ts = (uintptr_t)&limit};
    int flags = IORING_ENTER_GETEVENTS | IORING_ENTER_EXT_ARG;
    if (syscall(SYS_io_uring_enter, ring->fd, 1, 1, flags, &wait, sizeof wait) != 1)
        return -errno;
    if (__atomic_load_n((unsigned *)(void *)(ring->rings + ring->p.cq_off.tail), __ATOMIC_ACQUIRE) == *head)
        return -ETIME;
    int r = done[*head & (ring->p.cq_entries - 1)].res;
    __atomic_store_n(head, *head + 1, __ATOMIC_RELEASE);
    return r;
}

static void do_ring(void) {
    static const struct {
        int op, receives;
        const char *name;
    } ops[] = {{IORING_OP_NOP, 0, "NOP"},     {IORING_OP_SEND, 0, "SEND"},       {IORING_OP_SENDMSG, 0, "SENDMSG"},
               {IORING_OP_WRITE, 0, "WRITE"}, {IORING_OP_WRITEV, 0, "WRITEV"},   {IORING_OP_RECV, 1, "RECV"},
               {IORING_OP_READ, 1, "READ"},   {IORING_OP_RECVMSG, 1, "RECVMSG"}, {IORING_OP_POLL_ADD, 1, "POLL_ADD"},
               {IORING_OP_FSYNC, 0, "FSYNC"}, {IORING_OP_CLOSE, 0, "CLOSE"},     {IORING_OP_SHUTDOWN, 0, "SHUTDOWN"},
               {IORING_OP_ACCEPT, 0, "ACCEPT"}};
    unsigned which = below(COUNT(ops));
    struct sockaddr_in names[2] = {place_of(6), place_of(8)};
    struct ring ring;
    if (!ring_opens(&ring))
        return;
    int a = socket(AF_RDS_, SOCK_SEQPACKET | SOCK_NONBLOCK, 0), b = socket(AF_RDS_, SOCK_SEQPACKET | SOCK_NONBLOCK, 0);
    a = aside(a), b = aside(b);
    bind(a, (void *)&names[0], sizeof names[0]);
    bind(b, (void *)&names[1], sizeof names[1]);
    connect(a, (void *)&names[1], sizeof names[1]);
    char bytes[32] = "ring";
    struct iovec piece = {bytes, 4};
    struct msghdr m = {.msg_name = &names[1], .msg_namelen = sizeof names[1], .msg_iov = &piece, .msg_iovlen = 1};
    struct io_uring_sqe entry = {.opcode = (uint8_t)ops[which].op, .fd = ops[which].receives ? b : a,
                                 .addr = (uintptr_t)bytes, .len = 4};
    if (ops[which].op == IORING_OP_SENDMSG || ops[which].op == IORING_OP_RECVMSG)
        m.msg_namelen = ops[which].receives ? 0 : sizeof names[1], m.msg_name = ops[which].receives ? NULL : &names[1],
        entry.addr = (uintptr_t)&m, entry.len = 1;
    if (ops[which].op == IORING_OP_WRITEV)
        entry.addr = (uintptr_t)&piece, entry.len = 1;
    if (ops[which].op == IORING_OP_POLL_ADD)
        entry.addr = 0, entry.len = 0, entry.poll32_events = POLLIN;
    if (ops[which].op == IORING_OP_FSYNC || ops[which].op == IORING_OP_CLOSE || ops[which].op == IORING_OP_ACCEPT)
        entry.addr = 0, entry.len = 0;
    if (ops[which].op == IORING_OP_SHUTDOWN)
        entry.addr = 0, entry.len = 2;
    long r;
    if (ops[which].receives) {
        call("sendto for a ring"), TRY(r, sendto(a, "came", 4, 0, (void *)&names[1], sizeof names[1])), GAVE(r);
        settle_fd(b);
        memset(bytes, 0, sizeof bytes);
    }
    call("ring: %s%s", ops[which].name, ops[which].receives ? " of what came" : "");
    r = ring_does(&ring, &entry);
    gave_with(r < 0 ? -1 : r, (int)-r, "%s", ops[which].receives && r >= 0 ? shown(bytes, 4) : "");
    munmap(ring.rings, 8192);
    munmap(ring.entries, 4096);
    close(ring.fd);
    usleep(2000);
    call("ring: recv after %s", ops[which].name), TRY(r, recv(b, bytes, sizeof bytes, MSG_DONTWAIT)), GAVE(r);
    call("ring: sendto after %s", ops[which].name), TRY(r, sendto(a, "on", 2, 0, (void *)&names[1], sizeof names[1])), GAVE(r);
    close(a), close(b);
}

/* ---- limits, and pointers to nowhere ---- */

/* As few numbers as there are, and one or two more. */
static void do_few(void) {
    struct slot *s = some();
    if (!s)
        return;
    struct rlimit old, few;
    int room = (int)below(3), fresh[3], n, way = (int)below(3), error;
    /* A channel that is made now has a number that the program would have, and keeps it. */
    if (are_two() && way == 0)
        way = 1;
    long r = 0;
    int next = dup(null_file);
    close(next);
    getrlimit(RLIMIT_NOFILE, &old);
    few = (struct rlimit){(rlim_t)(next + room), old.rlim_max};
    setrlimit(RLIMIT_NOFILE, &few);
    for (n = 0; n < 3; n++) {
        TRY(r, way == 0 ? socket(AF_RDS_, SOCK_SEQPACKET, 0) : way == 1 ? dup(s->fd) : fcntl(s->fd, F_DUPFD, next));
        error = errno;
        if (r < 0)
            break;
        fresh[n] = (int)r;
    }
    setrlimit(RLIMIT_NOFILE, &old);
    call("%s with room for %d", way == 0 ? "socket()" : way == 1 ? "dup" : "F_DUPFD", room);
    gave_with(r, error, "%d made", n);
    while (n)
        close(fresh[--n]);
}


static void do_limit(void) {
    struct slot *s = some();
    if (!s)
        return;
    struct rlimit old, few = {3, 0};
    getrlimit(RLIMIT_NOFILE, &old);
    few.rlim_max = old.rlim_max;
    setrlimit(RLIMIT_NOFILE, &few);
    int r;
    if (below(2))
        TRY(r, socket(AF_RDS_, SOCK_SEQPACKET, 0)), call("socket() with a limit of 3");
    else
        TRY(r, dup(s->fd)), call("dup(%d) with a limit of 3", s->fd);
    int error = errno;
    setrlimit(RLIMIT_NOFILE, &old);
    gave_with(r, error, "%s", "");
    if (r >= 0)
        close(r);
    struct sockaddr_in name;
    socklen_t len = sizeof name;
    setrlimit(RLIMIT_NOFILE, &few);
    TRY(r, getsockname(s->fd, (void *)&name, &len)), call("getsockname(%d) with a limit of 3", s->fd);
    error = errno;
    setrlimit(RLIMIT_NOFILE, &old);
    gave_with(r, error, "%s", "");
}

static long bad_call(int fd, unsigned way, void *nowhere, int port) {
    struct sockaddr_in name = place_of(port);
    socklen_t len = sizeof name;
    struct iovec piece = {nowhere, 10};
    struct msghdr m = {.msg_name = &name, .msg_namelen = sizeof name, .msg_iov = &piece, .msg_iovlen = 1};
    long r = 0;
    char byte[16];
    switch (way) {
    case 0: call("sendto(%d, nowhere, port %d)", fd, port), TRY(r, sendto(fd, nowhere, 10, MSG_DONTWAIT, (void *)&name, len)); break;
    case 1: call("recv(%d, nowhere)", fd), TRY(r, recv(fd, nowhere, 10, MSG_DONTWAIT | MSG_PEEK)); break;
    case 2: call("sendmsg(%d, pieces nowhere, port %d)", fd, port), m.msg_iov = nowhere, TRY(r, sendmsg(fd, &m, MSG_DONTWAIT)); break;
    case 3: call("sendmsg(%d, nowhere)", fd), TRY(r, sendmsg(fd, nowhere, MSG_DONTWAIT)); break;
    case 4: call("recvmsg(%d, nowhere)", fd), TRY(r, recvmsg(fd, nowhere, MSG_DONTWAIT)); break;
    case 5: call("bind(%d, nowhere)", fd), TRY(r, bind(fd, nowhere, len)); break;
    case 6: call("connect(%d, nowhere)", fd), TRY(r, connect(fd, nowhere, len)); break;
    case 7: call("getsockname(%d, nowhere)", fd), TRY(r, getsockname(fd, nowhere, &len)); break;
    case 8: call("getsockname(%d, length nowhere)", fd), TRY(r, getsockname(fd, (void *)&name, nowhere)); break;
    case 9: call("setsockopt(%d, SO_SNDBUF, nowhere)", fd), TRY(r, setsockopt(fd, SOL_SOCKET, SO_SNDBUF, nowhere, 4)); break;
    case 10: len = 4, call("getsockopt(%d, SO_SNDBUF, nowhere)", fd), TRY(r, getsockopt(fd, SOL_SOCKET, SO_SNDBUF, nowhere, &len)); break;
    case 11: call("getsockopt(%d, length nowhere)", fd), TRY(r, getsockopt(fd, SOL_SOCKET, SO_SNDBUF, byte, nowhere)); break;
    case 12: call("ioctl(%d, SIOCRDSGETTOS, nowhere)", fd), TRY(r, ioctl(fd, 0x89e1, nowhere)); break;
    case 13: call("sendto(%d, 1, name nowhere)", fd), TRY(r, sendto(fd, "x", 1, MSG_DONTWAIT, nowhere, len)); break;
    case 14: call("recvfrom(%d, 1, name nowhere)", fd), TRY(r, recvfrom(fd, byte, 1, MSG_DONTWAIT | MSG_PEEK, nowhere, &len)); break;
    case 15: call("sendmmsg(%d, nowhere)", fd), TRY(r, sendmmsg(fd, nowhere, 1, MSG_DONTWAIT)); break;
    case 16: call("recvmmsg(%d, nowhere)", fd), TRY(r, recvmmsg(fd, nowhere, 1, MSG_DONTWAIT, NULL)); break;
    default: call("setsockopt(%d, SOL_RDS 5, nowhere)", fd), TRY(r, setsockopt(fd, SOL_RDS_, 5, nowhere, 4)); break;
    }
    return r;
}

static void do_nowhere(void) {
    struct slot *s = some();
    if (!s)
        return;
    settle(s);
    static char *nothing;
    if (!nothing)
        nothing = mmap(NULL, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    static const char *const kinds[] = {"unmapped memory", "NULL", "memory of the kernel"};
    void *const nowhere[] = {nothing, NULL, (void *)0xffff800000000000};
    unsigned way = below(18), which = below(3), port = below(PORTS);
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        signal(SIGSEGV, SIG_DFL);
        long r = bad_call(s->fd, way, nowhere[which], (int)port);
        gave_with(r, errno, "%s", kinds[which]);
        fflush(stdout);
        _exit(r >= 0 && (way == 0 || way == 13));
    }
    int status;
    waitpid(child, &status, 0);
    if (WIFSIGNALED(status))
        gave_with(0, 0, "signal %d", WTERMSIG(status));
    else if (WEXITSTATUS(status))
        was_sent(0, way == 0 ? (int)port : socks[s->sock].connected);
}

/* ---- other processes ---- */

/* What another process does with a descriptor: prints it; returns 1 for a message that was taken,
 * and 2 for one that was sent. */
static int act(int fd, unsigned what, int port, const char *where) {
    struct sockaddr_in name = place_of(port);
    socklen_t len = sizeof name;
    char bytes[64] = "";
    long r;
    struct pollfd p = {.fd = fd, .events = are_two() ? POLLOUT : POLLIN | POLLOUT};
    switch (what) {
    case 0:
        call("%s: getsockname(%d)", where, fd), TRY(r, getsockname(fd, (void *)&name, &len));
        gave_with(r, errno, "%s", r < 0 ? "" : name_of(&name, len));
        return 0;
    case 1:
        call("%s: recv(%d)", where, fd), TRY(r, recv(fd, bytes, sizeof bytes, MSG_DONTWAIT));
        gave_with(r, errno, "%s", shown(bytes, r));
        return r >= 0;
    case 2:
        call("%s: sendto(%d, 3, port %d)", where, fd, port), TRY(r, sendto(fd, "act", 3, MSG_DONTWAIT, (void *)&name, len));
        GAVE(r);
        return r >= 0 ? 2 : 0;
    case 3: call("%s: write(%d)", where, fd), TRY(r, write(fd, "x", 1)); break;
    case 4: call("%s: close(%d)", where, fd), TRY(r, close(fd)); break;
    case 5: call("%s: dup(%d)", where, fd), TRY(r, dup(fd)), r = r < 0 ? r : close((int)r); break;
    case 6:
        settle_congestion(fd);
        call("%s: poll(%d)", where, fd), TRY(r, poll(&p, 1, 0));
        gave_with(r, errno, "%#x", p.revents);
        return 0;
    case 7: {
        int fresh;
        call("%s: socket and bind(port %d)", where, port);
        TRY(fresh, socket(AF_RDS_, SOCK_SEQPACKET, 0));
        r = fresh;
        if (fresh >= 0)
            TRY(r, bind(fresh, (void *)&name, len));
        break;
    }
    default:
        call("%s: recv(%d, MSG_PEEK)", where, fd), TRY(r, recv(fd, bytes, sizeof bytes, MSG_DONTWAIT | MSG_PEEK));
        gave_with(r, errno, "%s", shown(bytes, r));
        return 0;
    }
    GAVE(r);
    return 0;
}

static int act_twice(int fd, unsigned acts, int port, const char *where) {
    unsigned first = acts % 9, second = acts / 9 % 9;
    int done = act(fd, first, port, where);
    if (done & 2)
        usleep(20000); /* perhaps to itself */
    /* One message at most is taken or sent. */
    if (!done || (second != 1 && second != 2))
        done |= act(fd, second, port, where);
    return done;
}

struct job {
    int fd, port;
    unsigned acts;
    const char *where;
};

static int clone_main(void *of) {
    struct job *job = of;
    int done = act_twice(job->fd, job->acts, job->port, job->where);
    fflush(stdout);
    _exit(done);
}

static void *thread_main(void *of) {
    struct job *job = of;
    return (void *)(intptr_t)act_twice(job->fd, job->acts, job->port, job->where);
}

static void *forking_main(void *of) {
    pid_t child = fork();
    if (!child)
        clone_main(of);
    return (void *)(intptr_t)child;
}

/* What `act` has done. */
static void finished(struct slot *s, int port, int done) {
    if (done & 1)
        taken(s, 0, 0);
    else if (done & 2)
        was_sent(0, port);
}

extern char **environ;

static void do_process(void) {
    struct slot *s = some();
    if (!s)
        return;
    settle(s);
    int port = (int)below(PORTS);
    if (!has_room(port))
        return;
    struct job job = {s->fd, port, below(81), NULL};
    unsigned way = below(16);
    char fd[16], acts[16], ports[16], sequences[16], steps[16];
    snprintf(fd, sizeof fd, "%d", s->fd), snprintf(acts, sizeof acts, "%u", job.acts);
    snprintf(ports, sizeof ports, "%d", port), snprintf(sequences, sizeof sequences, "%u", sequence);
    snprintf(steps, sizeof steps, "%u", step);
    char *argv[] = {(char *)own_name, "act", (char *)addresses[0], (char *)addresses[1], fd, acts, ports, sequences, steps, NULL};
    int cloexec = fcntl(s->fd, F_GETFD), status = 0;
    pid_t child = -1;
    static char stack[1 << 18] __attribute__((aligned(16)));
    fflush(stdout);
    posix_spawn_file_actions_t actions;
    switch (way) {
    case 0: job.where = "fork"; if (!(child = fork())) clone_main(&job); break;
    case 1: job.where = "_Fork"; if (!(child = _Fork())) clone_main(&job); break;
    case 2: job.where = "vfork"; if (!(child = vfork())) clone_main(&job); break;
    case 3: job.where = "syscall(SYS_clone)"; if (!(child = (pid_t)syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0))) clone_main(&job); break;
    case 4: job.where = "clone"; child = clone(clone_main, stack + sizeof stack, SIGCHLD, &job); break;
    case 5: job.where = "clone(CLONE_VM|CLONE_VFORK)"; child = clone(clone_main, stack + sizeof stack, CLONE_VM | CLONE_VFORK | SIGCHLD, &job); break;
    case 6: if (!(child = fork())) execv(own_name, argv), _exit(99); break;
    case 7: if (!(child = vfork())) execve(own_name, argv, environ), _exit(99); break;
    case 8:
        posix_spawn_file_actions_init(&actions);
        posix_spawn_file_actions_adddup2(&actions, s->fd, 50);
        if (s->fd != 50)
            posix_spawn_file_actions_addclose(&actions, s->fd);
        argv[4] = "50";
        cloexec = 0;
        if (posix_spawn(&child, own_name, &actions, NULL, argv, environ))
            child = -1;
        posix_spawn_file_actions_destroy(&actions);
        break;
    case 9:
        posix_spawn_file_actions_init(&actions);
        posix_spawn_file_actions_addopen(&actions, 51, "/dev/null", O_RDWR, 0);
        posix_spawn_file_actions_adddup2(&actions, s->fd, 52);
        posix_spawn_file_actions_adddup2(&actions, 51, s->fd);
        posix_spawn_file_actions_addclosefrom_np(&actions, 53);
        argv[4] = (char *)(below(2) ? "52" : fd);
        cloexec = 0;
        if (posix_spawn(&child, own_name, &actions, NULL, argv, environ))
            child = -1;
        posix_spawn_file_actions_destroy(&actions);
        break;
    case 10: {
        struct clone_args {
            uint64_t flags, pidfd, child_tid, parent_tid, exit_signal, more[6];
        } args = {.exit_signal = SIGCHLD};
        job.where = "syscall(SYS_clone3)";
        if (!(child = (pid_t)syscall(SYS_clone3, &args, 64)))
            clone_main(&job);
        break;
    }
    case 11: {
        int self = open(own_name, O_RDONLY | O_CLOEXEC);
        if (!(child = fork()))
            fexecve(self, argv, environ), _exit(99);
        close(self);
        break;
    }
    case 12:
        /* A grandchild, whose parent has ended. */
        job.where = "fork of a fork";
        if (!(child = fork())) {
            int grandchild = fork();
            if (!grandchild)
                clone_main(&job);
            waitpid(grandchild, &status, 0);
            _exit(WIFEXITED(status) ? WEXITSTATUS(status) : 98);
        }
        break;
    case 13: {
        pthread_t thread;
        void *done = NULL;
        job.where = "thread";
        if (pthread_create(&thread, NULL, thread_main, &job) || pthread_join(thread, &done))
            return;
        finished(s, port, (int)(intptr_t)done);
        if (fcntl(s->fd, F_GETFD) < 0)
            number_gone(s->fd);
        return;
    }
    case 14: {
        /* A thread makes the process. */
        pthread_t thread;
        void *made = NULL;
        job.where = "fork of a thread";
        if (pthread_create(&thread, NULL, forking_main, &job) || pthread_join(thread, &made))
            return;
        child = (pid_t)(intptr_t)made;
        break;
    }
    default:
        if (posix_spawnp(&child, own_name, NULL, NULL, argv, environ))
            child = -1;
        break;
    }
    if (child < 0) {
        call("process %u", way), GAVE(-1);
        return;
    }
    waitpid(child, &status, 0);
    call("process %u%s", way, cloexec ? ", closed by exec" : "");
    if (WIFSIGNALED(status))
        gave_with(0, 0, "signal %d", WTERMSIG(status));
    int done = WIFEXITED(status) ? WEXITSTATUS(status) : 0;
    if (done == 99)
        gave_with(0, 0, "no exec");
    else
        finished(s, port, done);
}

/* ---- the walk ---- */

static const struct {
    void (*run)(void);
    unsigned weight;
    const char *name;
} kinds[] = {
    {do_socket, 6, "socket"},       {do_bind, 10, "bind"},     {do_connect, 5, "connect"},  {do_name, 4, "name"},
    {do_server, 1, "server"},       {do_send, 16, "send"},     {do_send_oddly, 2, "oddly"}, {do_control, 4, "control"},
    {do_write, 8, "write"},         {do_recv, 14, "recv"},     {do_read, 8, "read"},        {do_get_option, 8, "get"},
    {do_set_option, 8, "set"},      {do_ioctl, 4, "ioctl"},    {do_fcntl, 5, "fcntl"},      {do_as_file, 4, "file"},
    {do_copy, 6, "copy"},           {do_replace, 2, "replace"}, {do_close, 5, "close"},     {do_pass, 4, "pass"},
    {do_poll, 8, "poll"},           {do_wait, 2, "wait"},      {do_cancel, 1, "cancel"},    {do_limit, 1, "limit"},
    {do_nowhere, 3, "nowhere"},     {do_process, 7, "process"}, {do_fill, 2, "fill"},       {do_small, 2, "small"},
    {do_signal, 3, "signal"},       {do_ring, 2, "ring"},      {do_few, 2, "few"},          {do_rights, 3, "rights"}};

static unsigned weight_of(int kind, const char *only) {
    return !only || strstr(only, kinds[kind].name) ? kinds[kind].weight : 0;
}

static void walk(unsigned steps) {
    const char *only = getenv("WALK_ONLY");
    unsigned all = 0;
    for (int i = 0; i < COUNT(kinds); i++)
        all += weight_of(i, only);
    signal(SIGPIPE, SIG_IGN);
    alarm(SECONDS_MAX);
    for (step = 0; step < steps; step++) {
        dice_of(sequence, step);
        unsigned at = below(all);
        int kind = 0;
        while (at >= weight_of(kind, only))
            at -= weight_of(kind++, only);
        if (step < 2)
            do_socket();
        else if (step < 4)
            do_bind();
        else
            kinds[kind].run();
        fflush(stdout);
    }
    settle_all();
}

static void start_maker(void) {
    int asks[2];
    const char *space = getenv("WALK_NAMESPACE"), *node = getenv("WALK_NODE");
    if (socketpair(AF_UNIX, SOCK_SEQPACKET, 0, asks))
        _exit(2);
    if (!fork()) {
        close(asks[0]);
        if (node)
            setenv("BOWLINE_RDS_SOCKET", node, 1);
        if (space && setns(open(space, O_RDONLY), CLONE_NEWNET))
            _exit(2);
        make_for(asks[1]);
    }
    close(asks[1]);
    maker = aside(asks[0]);
}

/* Two machines tell each other of congestion when they are connected, which is before the walk. */
static void connect_machines(void) {
    struct sockaddr_in names[2] = {address_of(0, -20), address_of(1, -19)};
    int fds[2];
    for (int i = 0; i < 2; i++) {
        fds[i] = socket_of(i, SOCK_SEQPACKET, 0);
        bind(fds[i], (void *)&names[i], sizeof names[i]);
    }
    for (int i = 0; i < 4; i++) {
        sendto(fds[i & 1], "hello", 5, 0, (void *)&names[!(i & 1)], sizeof names[0]);
        settle_fd(fds[!(i & 1)]);
        recv(fds[!(i & 1)], data, 5, MSG_DONTWAIT);
    }
    close(fds[0]), close(fds[1]);
    usleep(300000);
}

int main(int argc, char **argv) {
    words = mmap(NULL, WORDS_MAX, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (argc == 9 && !strcmp(argv[1], "act")) {
        own_name = argv[0];
        addresses[0] = argv[2], addresses[1] = argv[3];
        sequence = (unsigned)atoi(argv[7]), step = (unsigned)atoi(argv[8]);
        int done = act_twice(atoi(argv[4]), (unsigned)atoi(argv[5]), atoi(argv[6]), "exec");
        fflush(stdout);
        _exit(done);
    }
    if (argc != 6) {
        fprintf(stderr, "walk OWN OTHER FIRST COUNT STEPS\n");
        return 2;
    }
    /* Numbers are to be the same everywhere. */
    close_range(3, ~0U, 0);
    static char name[4096];
    if (readlink("/proc/self/exe", name, sizeof name - 1) < 0)
        return 2;
    own_name = name;
    addresses[0] = argv[1], addresses[1] = argv[2];
    if (are_two()) {
        waiting_max = 1;
        start_maker();
        connect_machines();
    }
    unsigned first = (unsigned)atoi(argv[3]), count = (unsigned)atoi(argv[4]);
    char text[] = "/tmp/walk-XXXXXX";
    int ends[2];
    temp_file = aside(mkstemp(text));
    unlink(text);
    if (write(temp_file, lengths, sizeof lengths) < 0 || ftruncate(temp_file, 10000) || pipe2(ends, O_NONBLOCK))
        return 2;
    null_file = aside(open("/dev/null", O_RDWR));
    pipe_in = aside(ends[0]), pipe_out = aside(ends[1]);
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair))
        return 2;
    pair[0] = aside(pair[0]), pair[1] = aside(pair[1]);
    for (sequence = first; sequence < first + count; sequence++) {
        fflush(stdout);
        pid_t child = fork();
        if (child == 0) {
            walk((unsigned)atoi(argv[5]));
            fflush(stdout);
            _exit(0);
        }
        int status;
        waitpid(child, &status, 0);
        if (WIFSIGNALED(status))
            printf("%u.end\tthe sequence\tsignal %d\n", sequence, WTERMSIG(status));
    }
    fflush(stdout);
    return 0;
}
