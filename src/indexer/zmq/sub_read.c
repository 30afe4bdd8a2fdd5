// SPDX-License-Identifier: Apache-2.0
/* Bytes of a connection: the memory they are in, and what is read. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/core/error.h"
#include "indexer/zmq/sub_impl.h"

#define KEPT_BYTES 4096u /* memory of its own that a connection keeps between turns */

static const char broke[] = "the publisher broke the protocol or sent too much";
static const char no_room[] = "no memory for a large message: too many at once";
static const char other[] = "no ZMTP is spoken there: is that a ZMQ publisher's port?";
static const char hung_up[] =
    "connected, and cut off before ZMTP was spoken: is that a ZMQ publisher's port?";
static const char strange[] = "the publisher speaks another version of ZMTP, or wants credentials";

/* -- memory ------------------------------------------------------------------------------------ */

/* Change the bytes that count in the limit over all connections from @from to @to. */
static bool reserve(struct ki_sub *sub, size_t from, size_t to)
{
    _Atomic uint64_t *used = &sub->limits->used;
    uint64_t before;

    if (to <= from) {
        atomic_fetch_sub_explicit(used, from - to, memory_order_relaxed);
        return true;
    }
    before = atomic_fetch_add_explicit(used, to - from, memory_order_relaxed);
    if (before + (to - from) <= sub->limits->max_bytes)
        return true;
    atomic_fetch_sub_explicit(used, to - from, memory_order_relaxed);
    return false;
}

/* Use own memory of at least @size bytes for what is unread. */
static int use_own(struct ki_sub *sub, size_t size, uint64_t now_ns)
{
    size_t left = sub->end - sub->start;
    uint8_t *grown;

    if (!reserve(sub, sub->own_capacity, size))
        return -ENOBUFS;
    if (sub->bytes == sub->own && sub->own) {
        memmove(sub->own, sub->own + sub->start, left);
        grown = realloc(sub->own, size);
    } else {
        grown = malloc(size);
        if (grown && sub->bytes)
            memcpy(grown, sub->bytes + sub->start, left);
        if (grown)
            free(sub->own);
    }
    if (!grown) {
        atomic_fetch_add_explicit(&sub->limits->used, sub->own_capacity - size,
                                  memory_order_relaxed);
        return -ENOMEM;
    }
    if (sub->own_capacity <= KI_SUB_READ)
        sub->large_ns = now_ns;
    sub->bytes = sub->own = grown;
    sub->capacity = sub->own_capacity = size;
    sub->start = 0;
    sub->end = left;
    return 0;
}

/*
 * Make room behind the unread bytes, which are those of one incomplete message. Memory grows with
 * what has come, not with what the publisher says will come.
 */
static int make_room(struct ki_sub *sub, uint64_t now_ns)
{
    size_t left = sub->end - sub->start, wanted = sub->zmtp.needed;

    if (sub->capacity - sub->end >= KI_SUB_READ)
        return 0;
    if (sub->start > 0)
        memmove(sub->bytes, sub->bytes + sub->start, left);
    sub->start = 0;
    sub->end = left;
    if (sub->capacity - left >= KI_SUB_READ || (sub->capacity > left && sub->capacity >= wanted))
        return 0;
    return use_own(
        sub, KV_MIN(KV_MAX(wanted, left + KI_SUB_READ), left + KV_MAX(left, (size_t)KI_SUB_READ)),
        now_ns);
}

void ki_sub_begin(struct ki_sub *sub, struct ki_sub_room *room)
{
    size_t left = sub->end - sub->start;

    if (left > KI_SUB_READ) {
        sub->bytes = sub->own;
        sub->capacity = sub->own_capacity;
        return;
    }
    if (left)
        memcpy(room->bytes, sub->own + sub->start, left);
    sub->bytes = room->bytes;
    sub->capacity = sizeof(room->bytes);
    sub->start = 0;
    sub->end = left;
}

void ki_sub_free_own(struct ki_sub *sub)
{
    (void)reserve(sub, sub->own_capacity, 0);
    free(sub->own);
    sub->own = NULL;
    sub->own_capacity = 0;
}

/* Move the unread bytes to memory of their own, which isn't much larger. */
static int keep(struct ki_sub *sub, uint64_t now_ns)
{
    size_t left = sub->end - sub->start, most = KV_MAX(KEPT_BYTES, 4 * left);

    if (sub->bytes != sub->own && (left > sub->own_capacity || sub->own_capacity > most))
        return use_own(sub, KV_MAX(left, (size_t)KEPT_BYTES), now_ns);
    memmove(sub->own, sub->bytes + sub->start, left);
    sub->start = 0;
    sub->end = left;
    if (sub->own_capacity > most)
        return use_own(sub, KV_MAX(left, (size_t)KEPT_BYTES), now_ns);
    return 0;
}

void ki_sub_end(struct ki_sub *sub, uint64_t now_ns)
{
    size_t left;

    if (sub->end > sub->start && keep(sub, now_ns) < 0)
        ki_sub_lose(sub, no_room, false, now_ns);
    left = sub->end - sub->start;
    if (left == 0 && (sub->own_capacity > KEPT_BYTES || sub->state < KI_SUB_SHAKING))
        ki_sub_free_own(sub);
    if (left == 0)
        sub->start = sub->end = 0;
    sub->bytes = NULL;
    sub->capacity = 0;
}

/* -- reading ----------------------------------------------------------------------------------- */

/* Return why a connection is lost whose bytes are an error. */
static const char *fault_of(const struct ki_sub *sub, int rc)
{
    return rc == -EPROTONOSUPPORT ? strange : sub->zmtp.state == KI_ZMTP_GREETS ? other : broke;
}

/* Parse the unread bytes. Returns as ki_zmtp_parse; a connection with an error is lost. */
static int parse(struct ki_sub *sub, struct ki_zmtp_message *ret, uint64_t now_ns)
{
    size_t used;
    int rc = ki_zmtp_parse(&sub->zmtp, sub->bytes + sub->start, sub->end - sub->start, ret, &used);

    sub->start += used;
    if (rc < 0)
        ki_sub_lose(sub, fault_of(sub, rc), true, now_ns);
    else if (KV_UNLIKELY(sub->zmtp.out.len))
        ki_sub_flush(sub);
    return rc;
}

bool ki_sub_next(struct ki_sub *sub, struct ki_zmtp_message *ret, uint64_t now_ns)
{
    if (sub->state != KI_SUB_UP || sub->start == sub->end || parse(sub, ret, now_ns) <= 0)
        return false;
    sub->broken_delay_ns = KI_SUB_BROKEN_DELAY_NS;
    sub->large_ns = now_ns;
    return true;
}

/* Go on with the handshake: greeting and READY of the publisher. */
static void shake(struct ki_sub *sub, uint64_t now_ns)
{
    struct ki_zmtp_message none;
    enum ki_zmtp_state before;

    do {
        before = sub->zmtp.state;
        if (parse(sub, &none, now_ns) < 0)
            return;
    } while (sub->zmtp.state != before && sub->zmtp.state != KI_ZMTP_TALKS);
    if (sub->zmtp.state == KI_ZMTP_TALKS)
        ki_sub_shaken(sub, now_ns);
}

static size_t fill(struct ki_sub *sub, uint64_t now_ns)
{
    size_t room, wanted;
    ssize_t n;

    if (sub->start == sub->end)
        sub->start = sub->end = 0;
    if (make_room(sub, now_ns) < 0) {
        ki_sub_lose(sub, no_room, false, now_ns);
        return 0;
    }
    wanted = KV_MAX(sub->zmtp.needed, sub->end - sub->start) - (sub->end - sub->start);
    room = KV_MIN(sub->capacity - sub->end, KV_MAX(wanted, (size_t)KI_SUB_READ));
    do
        n = recv(sub->fd, sub->bytes + sub->end, room, MSG_DONTWAIT);
    while (n < 0 && errno == EINTR);
    if (n < 0 && errno == EAGAIN)
        return 0;
    if (n <= 0) {
        ki_sub_lose(sub, sub->state == KI_SUB_SHAKING ? hung_up : KI_SUB_WAS_LOST, false, now_ns);
        return 0;
    }
    /* Less than was asked for: the rest of the stream, if any, is reported by epoll. */
    sub->dry = (size_t)n < room && !sub->ended;
    sub->end += (size_t)n;
    sub->heard_ns = now_ns;
    return (size_t)n;
}

size_t ki_sub_fill(struct ki_sub *sub, uint64_t now_ns)
{
    size_t n;

    if (sub->state == KI_SUB_CONNECTING)
        ki_sub_finish_connect(sub, now_ns);
    ki_sub_flush(sub);
    if (sub->state < KI_SUB_SHAKING)
        return 0;
    if (sub->dry) {
        sub->dry = false;
        return 0;
    }
    n = fill(sub, now_ns);
    if (n > 0 && sub->state == KI_SUB_SHAKING)
        shake(sub, now_ns);
    return n;
}
