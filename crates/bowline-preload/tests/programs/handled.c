/* What handlers of faults find, and what a program is told of them: handled [ADDRESS first|later]
 *
 * With an address it has sockets, made first or when it has a handler already; then calls on them
 * with bad pointers fail, and no handler hears of it. What it prints is to be the same. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "bowline_rds.h"

#define MUST(what)                                                                                \
    do {                                                                                          \
        if (!(what)) {                                                                            \
            fprintf(stderr, "line %d: %s: %s\n", __LINE__, #what, strerror(errno));               \
            exit(1);                                                                              \
        }                                                                                         \
    } while (0)

static const char *address;
static char *nothing, *stack;
static int fd = -1;
static struct sockaddr_in name;
static sigjmp_buf back;
static volatile int calls;
#define STACK (64 << 10)
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

/* What a handler has found. */
static struct {
    int which, number, has_info, is_on_stack, code;
    void *at;
    uint64_t blocked;
} found;

static uint64_t blocked(void) {
    sigset_t set;
    uint64_t word;
    MUST(sigprocmask(SIG_BLOCK, NULL, &set) == 0);
    memcpy(&word, &set, sizeof word);
    return word;
}

static void came(int which, int number, siginfo_t *info) {
    char *here = __builtin_frame_address(0);
    calls++;
    found.which = which, found.number = number, found.has_info = info != NULL;
    found.is_on_stack = here >= stack && here < stack + STACK;
    found.code = info ? info->si_code : 0;
    found.at = info ? info->si_addr : NULL;
    found.blocked = blocked();
}

static void plain(int number) {
    came(1, number, NULL);
    siglongjmp(back, 1);
}

static void other(int number) {
    came(2, number, NULL);
    siglongjmp(back, 1);
}

#define H(n)                                                                                      \
    static void h##n(int number) {                                                                \
        came(100 + n, number, NULL);                                                              \
        siglongjmp(back, 1);                                                                      \
    }
H(0) H(1) H(2) H(3) H(4) H(5) H(6) H(7) H(8) H(9) H(10) H(11) H(12) H(13) H(14) H(15) H(16) H(17) H(18) H(19)
static const sighandler_t others[] = {h0, h1, h2,  h3,  h4,  h5,  h6,  h7,  h8,  h9,
                                      h10, h11, h12, h13, h14, h15, h16, h17, h18, h19};

/* Mends the memory, and goes on. */
static void informed(int number, siginfo_t *info, void *context) {
    came(3, number, info);
    ucontext_t *interrupted = context;
    if (info->si_code <= 0) {
        found.at = NULL;
        return;
    }
    found.at = (void *)(((char *)found.at - nothing) + 0x1000 * !!interrupted->uc_stack.ss_size);
    MUST(mprotect(nothing, 4096, PROT_READ | PROT_WRITE) == 0);
}

static void show(const char *what, struct sigaction *action) {
    const char *handler = action->sa_handler == SIG_DFL ? "default" : action->sa_handler == SIG_IGN ? "ignored" :
        action->sa_handler == plain ? "plain" : action->sa_handler == other ? "other" :
        action->sa_sigaction == informed ? "informed" : "unknown";
    uint64_t mask;
    memcpy(&mask, &action->sa_mask, sizeof mask);
    printf("%s: %s flags %x mask %llx\n", what, handler, action->sa_flags, (unsigned long long)mask);
}

/* A call with a bad pointer, which no handler hears of. */
static void is_guarded(void) {
    if (fd < 0)
        return;
    int before = calls;
    MUST(mprotect(nothing, 4096, PROT_NONE) == 0);
    for (int i = 0; i < 3; i++) {
        MUST(sendto(fd, nothing, 10, 0, (struct sockaddr *)&name, sizeof name) < 0 && errno == EFAULT);
        MUST(sendto(fd, "x", 1, 0, (struct sockaddr *)nothing, sizeof name) < 0 && errno == EFAULT);
        MUST(recvmsg(fd, (struct msghdr *)nothing, MSG_DONTWAIT) < 0 && errno == EFAULT);
    }
    MUST(calls == before);
}

static void make_socket(void) {
    if (!address)
        return;
    fd = socket(AF_RDS, SOCK_SEQPACKET, 0);
    MUST(fd >= 0 && bind(fd, (struct sockaddr *)&name, sizeof name) == 0);
}

/* A fault of the program's own, and what the handler has found. */
static void faults(int is_sent) {
    found.which = 0;
    MUST(mprotect(nothing, 4096, PROT_NONE) == 0);
    if (sigsetjmp(back, 1) == 0) {
        if (is_sent)
            raise(SIGSEGV);
        else
            nothing[8] = 1;
    }
    printf("  %d: handler %d of %d, info %d code %d at %lx, own stack %d, blocked %llx\n", is_sent, found.which,
           found.number, found.has_info, found.code, (long)found.at, found.is_on_stack,
           (unsigned long long)found.blocked);
    MUST(blocked() == 0);
}

static void now(void) {
    struct sigaction action;
    memset(&action, 0, sizeof action);
    MUST(sigaction(SIGSEGV, NULL, &action) == 0);
    show("  now", &action);
}

static void sets(void *handler, int flags, int masked) {
    struct sigaction action, old;
    memset(&action, 0, sizeof action);
    memset(&old, 0, sizeof old);
    action.sa_handler = (sighandler_t)handler, action.sa_flags = flags;
    if (masked)
        sigaddset(&action.sa_mask, masked);
    MUST(sigaction(SIGSEGV, &action, &old) == 0);
    show("set", &action);
    show("  was", &old);
    is_guarded();
    now();
}

/* What becomes of a child. */
static void ends(const char *how, void (*does)(void)) {
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        does();
        fflush(stdout);
        _exit(0);
    }
    int status;
    MUST(waitpid(child, &status, 0) == child);
    printf("%s: %x\n", how, status & 0xff7f);
}

static void fault(void) {
    MUST(mprotect(nothing, 4096, PROT_NONE) == 0);
    nothing[8] = 1;
}
static void handle_it(void) { faults(0); }
static void send_it(void) { kill(getpid(), SIGSEGV); }
/* Signals that the system sends, which come of no instruction that is repeated. */
static void queue_bus(void) {
    siginfo_t info = {.si_signo = SIGBUS, .si_code = 5};
    MUST(syscall(SYS_rt_tgsigqueueinfo, getpid(), getpid(), SIGBUS, &info) == 0);
}
static void has_no_frame(void) {
    stack_t nowhere = {.ss_sp = nothing, .ss_size = 4096};
    struct sigaction action = {.sa_handler = plain, .sa_flags = SA_ONSTACK};
    MUST(sigaction(SIGUSR1, &action, NULL) == 0);
    MUST(mprotect(nothing, 4096, PROT_NONE) == 0 && sigaltstack(&nowhere, NULL) == 0);
    raise(SIGUSR1);
}
static void once(void) {
    sets(plain, SA_RESETHAND, 0);
    faults(0);
    now();
    is_guarded();
    fault();
}
static void overflow(void) {
    struct sigaction action = {.sa_handler = SIG_DFL};
    struct sigaction old;
    action.sa_handler = plain, action.sa_flags = SA_ONSTACK;
    MUST(sigaction(SIGSEGV, &action, &old) == 0);
    volatile char *down = (char *)&action;
    if (sigsetjmp(back, 1) == 0)
        for (;; down -= 1024)
            *down = 1;
    printf("overflow: handler %d, own stack %d\n", found.which, found.is_on_stack);
}

int main(int argc, char **argv) {
    setvbuf(stdout, NULL, _IOFBF, 1 << 16);
    nothing = mmap(NULL, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    stack = malloc(STACK);
    stack_t own = {.ss_sp = stack, .ss_size = STACK};
    MUST(sigaltstack(&own, NULL) == 0);
    name.sin_family = AF_INET, name.sin_port = htons(4340);
    address = argc == 3 ? argv[1] : NULL;
    MUST(!address || inet_pton(AF_INET, address, &name.sin_addr) == 1);
    int is_first = address && !strcmp(argv[2], "first");
    if (is_first)
        make_socket();
    now();
    sets(SIG_DFL, SA_RESTART, SIGUSR1);
    sets(plain, SA_NODEFER, SIGUSR2);
    if (!is_first)
        make_socket();
    is_guarded();
    now();
    faults(0);
    static const int flags[] = {0, SA_ONSTACK, SA_RESTART, SA_NODEFER, SA_ONSTACK | SA_NODEFER | SA_RESTART, SA_RESETHAND,
                                SA_RESETHAND | SA_NODEFER | SA_ONSTACK};
    for (int i = 0; i < (int)(sizeof flags / sizeof *flags); i++) {
        sets(i % 2 ? plain : other, flags[i], i % 3 ? SIGALRM : 0);
        faults(0);
        now();
        sets(informed, flags[i] | SA_SIGINFO, SIGUSR1);
        faults(0);
        now();
        sets(informed, flags[i] | SA_SIGINFO, 0);
        faults(1);
        now();
        sets(SIG_DFL, flags[i], 0);
        ends("by default", fault);
        ends("sent", send_it);
        ends("sent by the system", queue_bus);
        ends("without a frame", has_no_frame);
    }
    static sighandler_t (*const ways[])(int, sighandler_t) = {signal, ssignal, sysv_signal, sigset};
    for (int i = 0; i < (int)(sizeof ways / sizeof *ways); i++) {
        printf("way %d: was plain %d\n", i, ways[i](SIGSEGV, other) == plain);
        now();
        is_guarded();
        faults(0);
        now();
        printf("  was other %d\n", ways[i](SIGSEGV, plain) == other);
        is_guarded();
    }
    siginterrupt(SIGSEGV, 1);
    now();
    is_guarded();
    sets(plain, 0, 0);
    ends("handled", handle_it);
    ends("once", once);
    ends("overflow", overflow);
    sets(SIG_DFL, 0, 0);
    ends("by default", fault);
    ends("sent", send_it);
    signal(SIGSEGV, SIG_IGN);
    now();
    ends("ignored", fault);
    ends("ignored and sent", send_it);
    printf("was ignored %d\n", signal(SIGSEGV, SIG_DFL) == SIG_IGN);
    is_guarded();
    now();
    /* More handlers than the library has places for. */
    for (int i = 0; i < 20; i++) {
        struct sigaction action = {.sa_handler = others[i], .sa_flags = SA_NODEFER}, old;
        MUST(sigaction(SIGSEGV, &action, &old) == 0);
        printf("other %d was right %d\n", i, old.sa_handler == (i ? others[i - 1] : SIG_DFL));
        faults(0);
    }
    sets(plain, 0, 0);
    faults(0);
    return 0;
}
