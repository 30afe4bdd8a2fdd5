// SPDX-License-Identifier: Apache-2.0
#include "indexer/zmq/socket.h"

#include <errno.h>
#include <string.h>
#include <sys/epoll.h>

struct option {
    int name, value;
};

/*
 * libzmq retries a missing service at least every 5 s. TCP reports one that vanished without a
 * word (a network that swallows packets) within 15 s: ZMTP heartbeats are the data that it fails to
 * deliver. Don't wait for answers to heartbeats. libzmq doesn't read while our queue is full, so it
 * would cut a working connection, and then abort (its issue 3937) when a full queue outlives its
 * connection.
 */
static const struct option common_options[] = {
    {ZMQ_LINGER, 0},
    {ZMQ_RECONNECT_IVL, 100},
    {ZMQ_RECONNECT_IVL_MAX, 5000},
    {ZMQ_CONNECT_TIMEOUT, 5000},
    {ZMQ_HANDSHAKE_IVL, 10000},
    {ZMQ_HEARTBEAT_IVL, 5000},
    {ZMQ_HEARTBEAT_TIMEOUT, 24 * 3600 * 1000},
    {ZMQ_HEARTBEAT_TTL, 15000},
    {ZMQ_TCP_KEEPALIVE, 1},
    {ZMQ_TCP_KEEPALIVE_IDLE, 5},
    {ZMQ_TCP_KEEPALIVE_INTVL, 2},
    {ZMQ_TCP_KEEPALIVE_CNT, 3},
    {ZMQ_TCP_MAXRT, 10000},
};

static int set_options(void *socket, const char *endpoint, int queue, int64_t max_message)
{
    int on = 1;

    for (size_t i = 0; i < sizeof(common_options) / sizeof(common_options[0]); i++)
        if (zmq_setsockopt(socket, common_options[i].name, &common_options[i].value, sizeof(int)))
            return -errno;
    if (zmq_setsockopt(socket, ZMQ_RCVHWM, &queue, sizeof(queue)) ||
        zmq_setsockopt(socket, ZMQ_MAXMSGSIZE, &max_message, sizeof(max_message)))
        return -errno;
    /*
     * Enable v6 only for v6 endpoints: with it, libzmq may resolve names to v6 addresses without a
     * server.
     */
    if (strncmp(endpoint, "tcp://[", 7) == 0 && zmq_setsockopt(socket, ZMQ_IPV6, &on, sizeof(on)))
        return -errno;
    return 0;
}

int ki_socket_watch(void *socket, int epoll_fd, uint64_t data)
{
    struct epoll_event event = {.events = EPOLLIN | EPOLLET, .data.u64 = data};
    size_t size = sizeof(int);
    int fd;

    if (zmq_getsockopt(socket, ZMQ_FD, &fd, &size) ||
        epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &event))
        return -errno;
    return 0;
}

int ki_socket_connect(void *socket, const char *endpoint)
{
    return zmq_connect(socket, endpoint) ? -errno : 0;
}

int ki_socket_open(void *zmq, int type, const char *endpoint, int queue, int64_t max_message,
                   int epoll_fd, uint64_t data, void **ret)
{
    void *socket = zmq_socket(zmq, type);
    int rc;

    if (!socket)
        return -errno;
    rc = set_options(socket, endpoint, queue, max_message);
    if (rc == 0 && type == ZMQ_SUB && zmq_setsockopt(socket, ZMQ_SUBSCRIBE, "", 0))
        rc = -errno;
    if (rc == 0)
        rc = ki_socket_watch(socket, epoll_fd, data);
    if (rc < 0) {
        ki_socket_close(socket, epoll_fd);
        return rc;
    }
    *ret = socket;
    return 0;
}

void ki_socket_close(void *socket, int epoll_fd)
{
    size_t size = sizeof(int);
    int fd;

    if (!socket)
        return;
    /* libzmq closes the descriptor later, in another thread: stop watching it before. */
    if (zmq_getsockopt(socket, ZMQ_FD, &fd, &size) == 0)
        epoll_ctl(epoll_fd, EPOLL_CTL_DEL, fd, NULL);
    zmq_close(socket);
}

static void drain(void *socket)
{
    zmq_msg_t frame;
    int more = 1;

    while (more) {
        zmq_msg_init(&frame);
        more = zmq_msg_recv(&frame, socket, ZMQ_DONTWAIT) >= 0 && zmq_msg_more(&frame);
        zmq_msg_close(&frame);
    }
}

int ki_socket_receive(void *socket, struct ki_envelope *ret)
{
    bool more = true;
    int rc;

    ret->n = 0;
    while (more) {
        zmq_msg_t *frame = &ret->frames[ret->n];

        if (ret->n == KVE_MAX_FRAMES) {
            drain(socket);
            ki_envelope_fini(ret);
            return -EPROTO;
        }
        zmq_msg_init(frame);
        if (zmq_msg_recv(frame, socket, ZMQ_DONTWAIT) < 0) {
            rc = -errno;
            zmq_msg_close(frame);
            ki_envelope_fini(ret);
            return rc;
        }
        ret->spans[ret->n++] = (struct kve_span){zmq_msg_data(frame), zmq_msg_size(frame)};
        more = zmq_msg_more(frame);
    }
    return 0;
}

void ki_envelope_fini(struct ki_envelope *e)
{
    for (size_t i = 0; i < e->n; i++)
        zmq_msg_close(&e->frames[i]);
    e->n = 0;
}

int ki_socket_request(void *socket, uint64_t start_sequence)
{
    struct kve_replay_request request;

    kve_replay_request_init(&request, start_sequence);
    for (size_t i = 0; i < 2; i++)
        if (zmq_send(socket, request.frames[i].data, request.frames[i].len,
                     ZMQ_DONTWAIT | (i == 0 ? ZMQ_SNDMORE : 0)) < 0)
            return -errno;
    return 0;
}
