// SPDX-License-Identifier: Apache-2.0
#include "http/linger.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/core/clock.h"
#include "base/core/error.h"
#include "base/thread/thread.h"

#define MAX_FDS 64
#define LIMIT_MS 10000
#define LIMIT_BYTES (UINT64_C(64) << 20)
#define AT_ONCE (1u << 20) /* bytes read from one socket before the others get a turn */

struct lingering {
    int fd;
    uint64_t deadline_ns, bytes;
};

struct kh_linger {
    pthread_mutex_t lock; /* guards fresh */
    struct lingering fresh[MAX_FDS];
    size_t n_fresh;
    struct lingering items[MAX_FDS]; /* used by the thread only */
    size_t n;
    struct kv_wake wake;
    pthread_t thread;
    bool started;
    atomic_bool stop;
};

static void take_fresh(struct kh_linger *linger)
{
    pthread_mutex_lock(&linger->lock);
    for (size_t i = 0; i < linger->n_fresh; i++) {
        if (linger->n < MAX_FDS)
            linger->items[linger->n++] = linger->fresh[i];
        else
            close(linger->fresh[i].fd);
    }
    linger->n_fresh = 0;
    pthread_mutex_unlock(&linger->lock);
}

/* Discard received bytes. False when the socket has ended. */
static bool discard(struct lingering *item)
{
    char data[16384];

    for (size_t got = 0; got < AT_ONCE;) {
        ssize_t n = recv(item->fd, data, sizeof(data), MSG_DONTWAIT);

        if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR))
            return false;
        if (n < 0)
            break;
        got += (size_t)n;
        item->bytes += (uint64_t)n;
    }
    return item->bytes < LIMIT_BYTES;
}

static void *linger_main(void *arg)
{
    struct kh_linger *linger = arg;

    while (!atomic_load_explicit(&linger->stop, memory_order_acquire)) {
        struct pollfd fds[1 + MAX_FDS] = {{.fd = linger->wake.fd, .events = POLLIN}};
        size_t kept = 0;
        uint64_t now;

        for (size_t i = 0; i < linger->n; i++)
            fds[1 + i] = (struct pollfd){.fd = linger->items[i].fd, .events = POLLIN};
        poll(fds, 1 + linger->n, linger->n ? 500 : -1);
        now = kv_now_ns();
        for (size_t i = 0; i < linger->n; i++) {
            struct lingering *item = &linger->items[i];

            if (now < item->deadline_ns && (!fds[1 + i].revents || discard(item)))
                linger->items[kept++] = *item;
            else
                close(item->fd);
        }
        linger->n = kept;
        if (fds[0].revents)
            kv_wake_clear(&linger->wake);
        take_fresh(linger);
    }
    return NULL;
}

int kh_linger_create(struct kh_linger **ret)
{
    struct kh_linger *linger = calloc(1, sizeof(*linger));
    int rc;

    if (!linger)
        return -ENOMEM;
    pthread_mutex_init(&linger->lock, NULL);
    linger->wake.fd = -1;
    rc = kv_wake_open(&linger->wake);
    if (rc == 0)
        rc = kv_thread_start(&linger->thread, "http-linger", linger_main, linger);
    linger->started = rc == 0;
    if (rc < 0) {
        kh_linger_destroy(linger);
        return rc;
    }
    *ret = linger;
    return 0;
}

void kh_linger_destroy(struct kh_linger *linger)
{
    if (!linger)
        return;
    if (linger->started) {
        atomic_store_explicit(&linger->stop, true, memory_order_release);
        kv_wake_signal(&linger->wake);
        pthread_join(linger->thread, NULL);
    }
    for (size_t i = 0; i < linger->n; i++)
        close(linger->items[i].fd);
    for (size_t i = 0; i < linger->n_fresh; i++)
        close(linger->fresh[i].fd);
    kv_wake_close(&linger->wake);
    pthread_mutex_destroy(&linger->lock);
    free(linger);
}

void kh_linger_add(struct kh_linger *linger, int fd)
{
    struct lingering item = {.deadline_ns = kv_now_ns() + LIMIT_MS * KV_NS_PER_MS};
    bool kept = false;

    item.fd = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (item.fd < 0)
        return;
    shutdown(item.fd, SHUT_WR);
    pthread_mutex_lock(&linger->lock);
    if (linger->n_fresh < MAX_FDS) {
        linger->fresh[linger->n_fresh++] = item;
        kept = true;
    }
    pthread_mutex_unlock(&linger->lock);
    if (kept)
        kv_wake_signal(&linger->wake);
    else
        close(item.fd);
}
