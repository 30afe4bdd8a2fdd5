// SPDX-License-Identifier: Apache-2.0
/* A loop: one thread that serves its connections, their deadlines, and what other threads post. */
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/core/clock.h"
#include "grpc/impl.h"

#define TICK_NS (KV_NS_PER_S / 2)
#define BEGIN_NS (10 * KV_NS_PER_S)  /* from a connection to the client's SETTINGS */
#define STUCK_NS (60 * KV_NS_PER_S)  /* without progress of bytes to send */
#define GOAWAY_NS (KV_NS_PER_S / 10) /* from the announcement of GOAWAY to GOAWAY */
#define N_EVENTS 64

int kg_loop_create(struct kg_server *server, uint32_t index, struct kg_loop **ret)
{
    struct kg_loop *loop = calloc(1, sizeof(*loop));
    struct epoll_event event = {.events = EPOLLIN};

    if (!loop)
        return -ENOMEM;
    loop->server = server;
    loop->index = index;
    loop->wake.fd = -1;
    loop->posts_end = &loop->posts;
    loop->deadline_ns = UINT64_MAX;
    pthread_mutex_init(&loop->lock, NULL);
    loop->epoll = epoll_create1(EPOLL_CLOEXEC);
    int rc = loop->epoll < 0 ? -errno : kv_wake_open(&loop->wake);

    event.data.ptr = &loop->wake;
    if (rc == 0 && epoll_ctl(loop->epoll, EPOLL_CTL_ADD, loop->wake.fd, &event) < 0)
        rc = -errno;
    event.data.ptr = server;
    if (rc == 0 && index == 0 &&
        epoll_ctl(loop->epoll, EPOLL_CTL_ADD, server->listener, &event) < 0)
        rc = -errno;
    if (rc < 0) {
        kg_loop_destroy(loop);
        return rc;
    }
    *ret = loop;
    return 0;
}

static struct kg_call *find_call(struct kg_loop *loop, uint64_t number)
{
    struct kg_call *call = loop->table[number / KG_MAX_LOOPS % KG_BUCKETS];

    while (call && call->number != number)
        call = call->next;
    return call;
}

static void run_posts(struct kg_loop *loop)
{
    struct kg_post *post;

    pthread_mutex_lock(&loop->lock);
    post = KV_STEAL(loop->posts);
    loop->posts_end = &loop->posts;
    pthread_mutex_unlock(&loop->lock);
    while (post) {
        struct kg_post *next = post->next;

        post->fn(post, find_call(loop, post->number));
        post = next;
    }
}

void kg_loop_destroy(struct kg_loop *loop)
{
    if (!loop)
        return;
    while (loop->conns)
        kg_conn_destroy(loop->conns);
    run_posts(loop);
    kv_wake_close(&loop->wake);
    if (loop->epoll >= 0)
        close(loop->epoll);
    pthread_mutex_destroy(&loop->lock);
    free(loop);
}

void kg_loop_mark(struct kg_conn *conn)
{
    if (conn->dirty)
        return;
    conn->dirty = true;
    conn->next_dirty = conn->loop->dirty;
    conn->loop->dirty = conn;
}

static void post_to(struct kg_loop *loop, struct kg_post *post)
{
    post->next = NULL;
    pthread_mutex_lock(&loop->lock);
    *loop->posts_end = post;
    loop->posts_end = &post->next;
    pthread_mutex_unlock(&loop->lock);
    kv_wake_signal(&loop->wake);
}

void kg_server_post(struct kg_server *server, struct kg_post *post)
{
    post_to(server->loops[post->number % KG_MAX_LOOPS], post);
}

/* An accepted connection on its way to its loop. */
struct arrival {
    struct kg_post post;
    struct kg_loop *loop;
    int fd;
};

static void take_over(struct kg_post *post, struct kg_call *call)
{
    struct arrival *arrival = (struct arrival *)(void *)post;
    struct epoll_event event = {.events = EPOLLIN};
    struct kg_loop *loop = arrival->loop;
    struct kg_conn *conn;
    int fd = arrival->fd;

    (void)call;
    free(arrival);
    if (atomic_load_explicit(&loop->server->stop, memory_order_acquire)) {
        close(fd);
        return;
    }
    if (kg_conn_create(loop, fd, kv_now_ns(), &conn) < 0)
        return;
    event.data.ptr = conn;
    conn->broken = epoll_ctl(loop->epoll, EPOLL_CTL_ADD, fd, &event) < 0;
}

/* Hand an accepted connection to a loop. */
static void hand_over(struct kg_loop *loop, int fd)
{
    struct arrival *arrival = calloc(1, sizeof(*arrival));

    if (!arrival) {
        close(fd);
        return;
    }
    arrival->post.fn = take_over;
    arrival->loop = loop;
    arrival->fd = fd;
    post_to(loop, &arrival->post);
}

static void accept_some(struct kg_server *server)
{
    for (int i = 0; i < N_EVENTS; i++) {
        int fd = accept4(server->listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        int on = 1;
        unsigned timeout_ms = 30000;

        if (fd < 0)
            return;
        if (atomic_load_explicit(&server->connections, memory_order_relaxed) >=
            server->opts.max_connections) {
            close(fd);
            continue;
        }
        (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
        (void)setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on));
        (void)setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &timeout_ms, sizeof(timeout_ms));
        hand_over(server->loops[server->turn++ % server->n_loops], fd);
    }
}

/* End the calls whose deadline has passed, and find the next deadline. */
static void end_late(struct kg_loop *loop, uint64_t now_ns)
{
    if (now_ns < loop->deadline_ns)
        return;
    loop->deadline_ns = UINT64_MAX;
    for (size_t i = 0; i < KG_BUCKETS; i++) {
        for (struct kg_call *call = loop->table[i]; call; call = call->next) {
            if (call->reply == KG_REPLY_FINISHED)
                continue;
            if (call->deadline_ns <= now_ns)
                kg_call_finish(call, KG_DEADLINE, "deadline exceeded");
            else
                loop->deadline_ns = KV_MIN(loop->deadline_ns, call->deadline_ns);
        }
    }
}

static void tick(struct kg_loop *loop, uint64_t now_ns)
{
    for (struct kg_conn *conn = loop->conns; conn; conn = conn->next) {
        /* A connection may be younger than now_ns. */
        bool stuck = conn->out_at < conn->out.len && now_ns > conn->progress_ns + STUCK_NS;

        if (stuck || (!conn->begun && now_ns > conn->opened_ns + BEGIN_NS)) {
            conn->broken = true;
            kg_loop_mark(conn);
        }
    }
    loop->ticked_ns = now_ns;
}

/*
 * Stop in two steps, as RFC 9113 6.8 has it: GOAWAY without a limit, and GOAWAY with the last stream
 * a little later, so that no call that is on its way is lost.
 */
static void say_goodbye(struct kg_loop *loop, uint64_t now_ns)
{
    bool last = loop->stopping == 1;

    if (loop->stopping == 0)
        loop->stop_ns = now_ns;
    for (struct kg_conn *conn = loop->conns; conn; conn = conn->next) {
        if (last)
            nghttp2_submit_goaway(conn->session, NGHTTP2_FLAG_NONE,
                                  nghttp2_session_get_last_proc_stream_id(conn->session),
                                  NGHTTP2_NO_ERROR, NULL, 0);
        else
            nghttp2_submit_shutdown_notice(conn->session);
        kg_loop_mark(conn);
    }
    loop->stopping++;
}

/* Returns true when the loop is over. */
static bool stop_step(struct kg_loop *loop, uint64_t now_ns)
{
    if (!atomic_load_explicit(&loop->server->stop, memory_order_acquire))
        return false;
    if (loop->stopping == 0 || (loop->stopping == 1 && now_ns - loop->stop_ns >= GOAWAY_NS))
        say_goodbye(loop, now_ns);
    if (loop->stopping < 2)
        return !loop->conns;
    return loop->n_calls == 0 ||
           now_ns - loop->stop_ns >= loop->server->opts.drain_ms * KV_NS_PER_MS;
}

static void flush_dirty(struct kg_loop *loop, uint64_t now_ns)
{
    while (loop->dirty) {
        struct kg_conn *conn = loop->dirty;

        loop->dirty = conn->next_dirty;
        conn->dirty = false;
        kg_conn_flush(conn, now_ns);
        if (conn->broken)
            kg_conn_destroy(conn);
    }
}

static int wait_ms(const struct kg_loop *loop, uint64_t now_ns)
{
    uint64_t next = KV_MIN(loop->deadline_ns, now_ns + TICK_NS);

    if (loop->stopping)
        next = KV_MIN(next, now_ns + GOAWAY_NS / 4);
    return (int)kv_ms_until(next, now_ns);
}

static void take_event(struct kg_loop *loop, const struct epoll_event *event)
{
    struct kg_conn *conn = event->data.ptr;

    if (event->data.ptr == loop->server) {
        accept_some(loop->server);
    } else if (event->data.ptr == &loop->wake) {
        kv_wake_clear(&loop->wake);
    } else {
        if (event->events & (EPOLLIN | EPOLLHUP | EPOLLERR))
            kg_conn_read(conn);
        kg_loop_mark(conn);
    }
}

void *kg_loop_run(void *arg)
{
    struct kg_loop *loop = arg;
    struct epoll_event events[N_EVENTS];
    uint64_t now_ns = kv_now_ns();

    while (!stop_step(loop, now_ns)) {
        flush_dirty(loop, now_ns);
        int n = epoll_wait(loop->epoll, events, N_EVENTS, wait_ms(loop, now_ns));

        now_ns = kv_now_ns();
        /* Connections are freed by flush_dirty alone, so all events are of living ones. */
        for (int i = 0; i < n; i++)
            take_event(loop, &events[i]);
        run_posts(loop);
        end_late(loop, now_ns);
        if (now_ns - loop->ticked_ns >= TICK_NS)
            tick(loop, now_ns);
    }
    flush_dirty(loop, now_ns); /* statuses of the last calls */
    while (loop->conns)
        kg_conn_destroy(loop->conns);
    return NULL;
}
