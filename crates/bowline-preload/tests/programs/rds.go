// A Go program that calls the C library for its sockets, as cgo has it: ADDRESS. The runtime makes its
// own threads, with stacks, signals and system calls of its own.
package main

/*
#include <errno.h>
#include <netinet/in.h>
#include <arpa/inet.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static int bound(const char *address, int port) {
    struct sockaddr_in name = {.sin_family = AF_INET, .sin_port = htons(port)};
    inet_pton(AF_INET, address, &name.sin_addr);
    int fd = socket(21, SOCK_SEQPACKET, 0);
    return fd < 0 || bind(fd, (struct sockaddr *)&name, sizeof name) ? -1 : fd;
}

static long send_to(int fd, const char *address, int port, int number) {
    struct sockaddr_in name = {.sin_family = AF_INET, .sin_port = htons(port)};
    inet_pton(AF_INET, address, &name.sin_addr);
    return sendto(fd, &number, sizeof number, 0, (struct sockaddr *)&name, sizeof name);
}

// The runtime handles faults, but not those of the library.
static int sends_nothing(int fd, const char *address, int port) {
    struct sockaddr_in name = {.sin_family = AF_INET, .sin_port = htons(port)};
    inet_pton(AF_INET, address, &name.sin_addr);
    return sendto(fd, (void *)8192, 4, 0, (struct sockaddr *)&name, sizeof name) == -1 && errno == EFAULT;
}

// A signal of the runtime may end a wait, as on a kernel.
static int receive(int fd) {
    int number = -1;
    long n;
    while ((n = recv(fd, &number, sizeof number, 0)) < 0 && errno == EINTR)
        ;
    return n == sizeof number ? number : -1;
}
*/
import "C"

import (
	"fmt"
	"os"
	"runtime"
	"sync"
)

const pairs, messages = 8, 500

// The fault of the program's own is its own.
func panics() (does bool) {
	defer func() { does = recover() != nil }()
	var nothing *int
	*nothing = 1
	return
}

func main() {
	address := C.CString(os.Args[1])
	var all sync.WaitGroup
	for pair := 0; pair < pairs; pair++ {
		from, to := 4500+2*pair, 4501+2*pair
		a, b := C.bound(address, C.int(from)), C.bound(address, C.int(to))
		if a < 0 || b < 0 {
			fmt.Println("no socket")
			os.Exit(1)
		}
		all.Add(2)
		go func() {
			defer all.Done()
			for n := 0; n < messages; n++ {
				if C.send_to(a, address, C.int(to), C.int(n)) != 4 {
					fmt.Println("not sent", n)
					os.Exit(1)
				}
				if n%50 == 0 {
					runtime.GC()
					if C.sends_nothing(a, address, C.int(to)) == 0 || !panics() {
						fmt.Println("a fault", n)
						os.Exit(1)
					}
				}
			}
		}()
		go func() {
			defer all.Done()
			for n := 0; n < messages; n++ {
				if got := C.receive(b); got != C.int(n) {
					fmt.Println("received", got, "for", n)
					os.Exit(1)
				}
			}
			C.close(b)
		}()
	}
	all.Wait()
}
