/* A program that lets the system end it at all calls but the few that it makes: filtered ADDRESS HOW */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <malloc.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/shm.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define AF_RDS_ 21
#define ALLOWS(call) BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_##call, 0, 1), BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)

static const char *doing = "";

static void fails(int line) {
    char text[128];
    int n = snprintf(text, sizeof text, "line %d, %s: %d\n", line, doing, errno);
    if (write(2, text, (size_t)n))
        _exit(1);
    _exit(1);
}

#define MUST(what) (doing = #what, (what) ? (void)0 : fails(__LINE__))

static struct sockaddr_in name_of(const char *address, int port) {
    struct sockaddr_in name = {.sin_family = AF_INET, .sin_port = htons(port)};
    inet_pton(AF_INET, address, &name.sin_addr);
    return name;
}

static int bound(struct sockaddr_in name) {
    int fd = socket(AF_RDS_, SOCK_SEQPACKET, 0);
    MUST(fd >= 0);
    MUST(bind(fd, (void *)&name, sizeof name) == 0);
    return fd;
}

/* By the function of libseccomp, and by that of others. */
static void give(struct sock_fprog *program, int by_syscall) {
    MUST(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    if (by_syscall)
        MUST(syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, program) == 0);
    else
        MUST(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program) == 0);
}

static void filter(int by_syscall) {
    struct sock_filter all[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        ALLOWS(sendto), ALLOWS(recvfrom), ALLOWS(sendmsg), ALLOWS(recvmsg), ALLOWS(ppoll),
#ifdef SYS_poll
        ALLOWS(poll),
#endif
        ALLOWS(close), ALLOWS(write), ALLOWS(exit_group), ALLOWS(rt_sigreturn),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS)};
    struct sock_fprog program = {sizeof all / sizeof *all, all};
    give(&program, by_syscall);
}

#define REFUSES(call, error)                                                                      \
    BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_##call, 0, 1), BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | error)

/* A filter that refuses the program's calls on memory, each with an error of its own. Handlers stay
 * what they are. */
static void refuse_memory(int by_syscall) {
    struct sock_filter all[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        REFUSES(mmap, EXDEV), REFUSES(munmap, EDOM), REFUSES(madvise, EILSEQ), REFUSES(mremap, ENOLCK),
        REFUSES(shmat, ENOSTR), BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_rt_sigaction, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS), BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
    struct sock_fprog program = {sizeof all / sizeof *all, all};
    give(&program, by_syscall);
}

#define PIECES 1024
static char large[100000], got[100000];
static struct iovec many[PIECES];

static void exchange(int a, int b, struct sockaddr_in to) {
    struct iovec piece = {got, sizeof got};
    struct msghdr m = {.msg_iov = &piece, .msg_iovlen = 1};
    struct pollfd p = {.fd = b, .events = POLLIN};
    for (int i = 0; i < 20; i++) {
        size_t len = i == 7 ? sizeof large : 1 + (size_t)i * 500;
        large[0] = (char)i;
        MUST(sendto(a, large, len, 0, (void *)&to, sizeof to) == (ssize_t)len);
        if (i % 3 == 0)
            MUST(poll(&p, 1, 5000) == 1);
        if (i % 2)
            MUST(recvmsg(b, &m, 0) == (ssize_t)len);
        else
            MUST(recvfrom(b, got, sizeof got, 0, NULL, NULL) == (ssize_t)len);
        MUST(got[0] == i);
    }
    piece = (struct iovec){large, 10};
    m.msg_name = &to, m.msg_namelen = sizeof to;
    MUST(sendmsg(a, &m, 0) == 10);
    m.msg_name = NULL;
    MUST(recvmsg(b, &m, 0) == 10);
    /* The list of so many pieces takes memory. */
    for (int i = 0; i < PIECES; i++)
        many[i] = (struct iovec){large + i, 1};
    m = (struct msghdr){.msg_name = &to, .msg_namelen = sizeof to, .msg_iov = many, .msg_iovlen = PIECES};
    MUST(sendmsg(a, &m, 0) == PIECES);
    m.msg_name = NULL;
    MUST(recvmsg(b, &m, 0) == PIECES);
    errno = 0;
    MUST(recvfrom(b, got, 1, MSG_DONTWAIT, NULL, NULL) == -1 && errno == EAGAIN);
}

/* What a filter refuses is refused, and the library does what it needs all the same. */
static void has_no_memory(int by_syscall, int a, int b, struct sockaddr_in to) {
    const int access = PROT_READ | PROT_WRITE, kind = MAP_PRIVATE | MAP_ANONYMOUS;
    char *page = mmap(NULL, 8192, access, kind, -1, 0);
    MUST(page != MAP_FAILED);
    *page = 'x';
    for (int i = 0; i < 2; i++)
        refuse_memory(by_syscall);
    MUST(mmap(NULL, 8192, access, kind, -1, 0) == MAP_FAILED && errno == EXDEV);
    MUST(mmap(page, 8192, access, kind | MAP_FIXED, -1, 0) == MAP_FAILED && errno == EXDEV);
    MUST(munmap(page, 8192) == -1 && errno == EDOM);
    MUST(madvise(page, 8192, MADV_DONTNEED) == -1 && errno == EILSEQ);
    MUST(mremap(page, 8192, 4096, 0) == MAP_FAILED && errno == ENOLCK);
    MUST(shmat(1, NULL, 0) == (void *)-1 && errno == ENOSTR);
    MUST(*page == 'x');
    exchange(a, b, to);
}

/* Little is left of the heap, which may not grow under a filter. */
static void use_up_heap(void) {
#ifdef __GLIBC__
    static void *volatile last;
    while (mallinfo2().keepcost > 8 << 10)
        MUST(last = malloc(4 << 10));
#endif
}

/* Calls that end a program under the filter that allows few. */
static void not_allowed(int i) {
    switch (i) {
    case 0: syscall(SYS_getppid); break;
    case 1: open("/dev/null", O_RDONLY); break;
    case 2: mmap(NULL, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0); break;
    case 3: munmap((void *)4096, 4096); break;
    default: madvise((void *)4096, 4096, MADV_DONTNEED);
    }
}

/* A filter that allows few calls, and what comes of all others. */
static void allow_few(int by_syscall, unsigned otherwise) {
    struct sock_filter all[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)), ALLOWS(write), ALLOWS(exit_group),
        ALLOWS(kill), ALLOWS(getpid), ALLOWS(rt_sigreturn), BPF_STMT(BPF_RET | BPF_K, otherwise)};
    struct sock_fprog program = {sizeof all / sizeof *all, all};
    give(&program, by_syscall);
}

static void writes_nowhere(void) { *(volatile char *)8 = 1; }
static void sends_itself(void) { kill(getpid(), SIGSEGV); }
static void returns(int number) {
    static int count;
    if (number != SIGSEGV || ++count > 1)
        _exit(9);
}

/* What ends a program by SIGSEGV does, whatever a filter forbids. */
static void ends(int by_syscall, int is_once, unsigned otherwise, void (*does)(void)) {
    int status;
    pid_t child = fork();
    if (child == 0) {
        alarm(20);
        struct sigaction action = {.sa_handler = returns, .sa_flags = SA_RESETHAND};
        if (is_once)
            MUST(sigaction(SIGSEGV, &action, NULL) == 0);
        allow_few(by_syscall, otherwise);
        does();
        _exit(0);
    }
    MUST(waitpid(child, &status, 0) == child);
    MUST(WIFSIGNALED(status));
    MUST(WTERMSIG(status) == SIGSEGV);
}

/* A program without sockets does not notice the library. */
static void has_no_sockets(int by_syscall) {
    const unsigned refuse = SECCOMP_RET_ERRNO | EPERM, end = SECCOMP_RET_KILL_PROCESS;
    ends(by_syscall, 0, refuse, writes_nowhere);
    ends(by_syscall, 0, end, writes_nowhere);
    ends(by_syscall, 0, refuse, sends_itself);
    ends(by_syscall, 0, end, sends_itself);
    ends(by_syscall, 1, refuse, writes_nowhere);
    ends(by_syscall, 1, end, writes_nowhere);
    pid_t child = fork();
    if (child == 0) {
        uint64_t now[4] = {0};
        struct sock_filter all[] = {BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
        struct sock_fprog program = {1, all};
        MUST(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, mmap(NULL, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) == -1);
        MUST(errno == EFAULT);
        give(&program, by_syscall);
        MUST(syscall(SYS_rt_sigaction, SIGSEGV, NULL, now, 8) == 0 && now[0] == 0);
        MUST(syscall(SYS_rt_sigaction, SIGBUS, NULL, now, 8) == 0 && now[0] == 0);
        _exit(0);
    }
    int status;
    MUST(waitpid(child, &status, 0) == child && status == 0);
}

int main(int argc, char **argv) {
    MUST(argc == 3);
    int by_syscall = !strcmp(argv[2], "syscall");
    struct sockaddr_in names[] = {name_of(argv[1], 4440), name_of(argv[1], 4441)};
    has_no_sockets(by_syscall);
    int a = bound(names[0]), b = bound(names[1]);
    ends(by_syscall, 0, SECCOMP_RET_ERRNO | EPERM, writes_nowhere);
    ends(by_syscall, 1, SECCOMP_RET_ERRNO | EPERM, writes_nowhere);
    /* It is a filter all the same: for what the program does, and for what the library may not. */
    int status;
    for (int i = 0; i < 5; i++) {
        pid_t child = fork();
        if (child == 0) {
            filter(by_syscall);
            not_allowed(i);
            _exit(0);
        }
        MUST(waitpid(child, &status, 0) == child);
        MUST(WIFSIGNALED(status) && WTERMSIG(status) == SIGSYS);
    }
    pid_t child = fork();
    if (child == 0) {
        has_no_memory(by_syscall, a, b, names[1]);
        _exit(0);
    }
    MUST(waitpid(child, &status, 0) == child && status == 0);
    use_up_heap();
    filter(by_syscall);
    exchange(a, b, names[1]);
    MUST(close(a) == 0);
    MUST(close(b) == 0);
    return 0;
}
