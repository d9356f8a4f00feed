/* Comes between the library and the C library: a handler is set, as by another thread, right after
 * the library has looked what there is. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stddef.h>
#include <unistd.h>

typedef int sets(int, const struct sigaction *, struct sigaction *);

void set_between(int number) { _exit(number == SIGSEGV ? 7 : 8); }

int sigaction(int number, const struct sigaction *action, struct sigaction *old) {
    static int is_set;
    int done = ((sets *)dlsym(RTLD_NEXT, "sigaction"))(number, action, old);
    if (number == SIGSEGV && !action && !is_set) {
        is_set = 1;
        struct sigaction other = {.sa_handler = set_between, .sa_flags = SA_NODEFER};
        ((sets *)dlsym(RTLD_DEFAULT, "sigaction"))(number, &other, NULL);
    }
    return done;
}
