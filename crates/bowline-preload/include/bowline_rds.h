/*
 * RDS sockets for C programs that link with bowline instead of being started by `bowline run`:
 *
 *     cc -o program program.c -L/usr/lib/bowline -Wl,-rpath,/usr/lib/bowline -lbowline_preload
 *
 * Sockets are made and used by the C library's functions: socket(AF_RDS, SOCK_SEQPACKET, 0), bind
 * with a sockaddr_in or sockaddr_in6, sendto, sendmsg, recvmsg, poll. They are those of the node
 * that runs on this host (`bowline node`); without one, socket fails with EAFNOSUPPORT. The same
 * program, linked without bowline, uses the kernel's RDS.
 *
 * SPDX-License-Identifier: MIT OR Apache-2.0
 */
#ifndef BOWLINE_RDS_H
#define BOWLINE_RDS_H

#include <stdint.h>
#include <sys/socket.h>

#ifndef AF_RDS
#define AF_RDS 21
#endif
#ifndef PF_RDS
#define PF_RDS AF_RDS
#endif
#ifndef SOL_RDS
#define SOL_RDS 276
#endif

/* Options of level SOL_RDS. */
enum bowline_rds_option {
    /* Set: drops what was sent to a destination (a sockaddr_in or sockaddr_in6) and is not
     * acknowledged; memory of zeroes stands for all destinations. */
    BOWLINE_RDS_CANCEL_SENT_TO = 1,
    /* Set, int: an update of congestion is a control message to receive, and no longer shown to
     * all by poll. */
    BOWLINE_RDS_CONG_MONITOR = 6,
    /* Set before bind and get, int: the transport, one of enum bowline_rds_transport. */
    BOWLINE_RDS_TRANSPORT = 8,
    /* Get: tables of the node, from this number to the last; see the manual page of rds-info. */
    BOWLINE_RDS_INFO_FIRST = 10000,
    BOWLINE_RDS_INFO_LAST = 10017
};

enum bowline_rds_transport { BOWLINE_RDS_TCP = 2 };

/* Types of control messages of level SOL_RDS. */
enum bowline_rds_control {
    /* To receive, uint64_t: bit n is set when congestion has ended of a port whose number ends in
     * the six bits n. */
    BOWLINE_RDS_CONG_UPDATE = 5,
    /* To send with MSG_ZEROCOPY, uint32_t: comes back when the memory is the program's again. */
    BOWLINE_RDS_ZCOPY_COOKIE = 12,
    /* To receive: struct bowline_rds_zcopy_completion. */
    BOWLINE_RDS_ZCOPY_COMPLETION = 13
};

/* Cookies of messages whose memory is the program's again. */
struct bowline_rds_zcopy_completion {
    uint32_t count;
    uint32_t cookies[8];
};

#endif
