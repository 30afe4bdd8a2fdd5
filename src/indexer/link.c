// SPDX-License-Identifier: Apache-2.0
#include "indexer/link.h"

#include <errno.h>
#include <inttypes.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <zmq.h>

#include "base/clock.h"
#include "base/error.h"
#include "indexer/socket.h"

/* libzmq reports a retry within microseconds of a loss, but its thread may be busy. */
#define FIRST_DELAY_NS KV_NS_PER_S
#define LAST_DELAY_NS (30 * KV_NS_PER_S)

#define EVENTS                                                                     \
    (ZMQ_EVENT_CONNECT_DELAYED | ZMQ_EVENT_CONNECT_RETRIED | ZMQ_EVENT_CONNECTED | \
     ZMQ_EVENT_HANDSHAKE_SUCCEEDED | ZMQ_EVENT_DISCONNECTED)

/*
 * Mind the order: libzmq's I/O thread waits, in the middle of its work, for room in a monitor's
 * queue. The reading socket therefore exists, and takes any number of events, from before the first
 * event until the monitor has stopped.
 */
int ki_link_open(struct ki_link *link, void *zmq, void *socket, int epoll_fd, uint64_t data)
{
    static _Atomic uint64_t number; /* relaxed: names only need to differ */
    int zero = 0, rc = 0;
    char address[48];

    snprintf(address, sizeof(address), "inproc://monitor-%" PRIu64,
             atomic_fetch_add_explicit(&number, 1, memory_order_relaxed));
    link->monitor = zmq_socket(zmq, ZMQ_PAIR);
    if (!link->monitor)
        return -errno;
    if (zmq_setsockopt(link->monitor, ZMQ_RCVHWM, &zero, sizeof(zero)) ||
        zmq_setsockopt(link->monitor, ZMQ_LINGER, &zero, sizeof(zero)) ||
        zmq_socket_monitor(socket, address, EVENTS) || zmq_connect(link->monitor, address))
        rc = -errno;
    if (rc == 0)
        rc = ki_socket_watch(link->monitor, epoll_fd, data);
    if (rc < 0) {
        ki_link_close(link, socket, epoll_fd);
        return rc;
    }
    link->state = KI_LINK_CONNECTING;
    link->tried = false;
    link->problem = NULL;
    if (!link->delay_ns)
        link->delay_ns = FIRST_DELAY_NS;
    return 0;
}

void ki_link_close(struct ki_link *link, void *socket, int epoll_fd)
{
    if (!link->monitor)
        return;
    (void)zmq_socket_monitor(socket, NULL, 0);
    ki_socket_close(link->monitor, epoll_fd);
    link->monitor = NULL;
    link->state = KI_LINK_CONNECTING;
}

static void lost(struct ki_link *link, uint64_t now_ns)
{
    link->state = KI_LINK_LOST;
    link->problem = "the connection was lost";
    link->dead_at_ns = now_ns + link->delay_ns;
}

static void retried(struct ki_link *link)
{
    if (link->state == KI_LINK_CONNECTING)
        link->problem = link->tried ? "no answer: nobody listens there, or it can't be reached"
                                    : "no attempt to connect: does the host name resolve?";
    link->state = KI_LINK_CONNECTING;
    link->tried = false;
}

static void note(struct ki_link *link, uint16_t event, uint64_t now_ns)
{
    switch (event) {
    case ZMQ_EVENT_CONNECT_DELAYED:
        link->tried = true;
        break;
    case ZMQ_EVENT_CONNECTED:
        link->tried = true;
        link->state = KI_LINK_CONNECTING;
        break;
    case ZMQ_EVENT_CONNECT_RETRIED:
        retried(link);
        break;
    case ZMQ_EVENT_HANDSHAKE_SUCCEEDED:
        link->state = KI_LINK_UP;
        link->ups++;
        link->problem = NULL;
        break;
    case ZMQ_EVENT_DISCONNECTED:
        lost(link, now_ns);
        break;
    default:
        break;
    }
}

bool ki_link_read(struct ki_link *link, uint64_t now_ns)
{
    enum ki_link_state state = link->state;
    const char *problem = link->problem;
    uint64_t ups = link->ups;
    struct ki_envelope e;
    uint16_t event;

    while (link->monitor && ki_socket_receive(link->monitor, &e) == 0) {
        if (e.spans[0].len >= sizeof(event)) {
            memcpy(&event, e.spans[0].data, sizeof(event));
            note(link, event, now_ns);
        }
        ki_envelope_fini(&e);
    }
    return state != link->state || problem != link->problem || ups != link->ups;
}

bool ki_link_is_dead(const struct ki_link *link, uint64_t now_ns)
{
    return link->monitor && link->state == KI_LINK_LOST && now_ns >= link->dead_at_ns;
}

void ki_link_back_off(struct ki_link *link)
{
    link->delay_ns = KV_MIN(link->delay_ns * 2, LAST_DELAY_NS);
}

/*
 * Mark a link as well. The monitor has reported the handshake by now, except of very old peers,
 * whose handshake it doesn't report.
 */
bool ki_link_is_well(struct ki_link *link, uint64_t now_ns)
{
    bool changed;

    link->delay_ns = FIRST_DELAY_NS;
    if (link->state == KI_LINK_UP)
        return false;
    changed = ki_link_read(link, now_ns);
    if (link->state != KI_LINK_CONNECTING || !link->tried)
        return changed;
    note(link, ZMQ_EVENT_HANDSHAKE_SUCCEEDED, now_ns);
    return true;
}
