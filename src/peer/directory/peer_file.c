// SPDX-License-Identifier: Apache-2.0
/* Directories without a server: a list of endpoints, or a file with one a line. */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/core/error.h"
#include "base/core/log.h"
#include "peer/directory/directory.h"

#define MAX_FILE (1u << 20)

int peer_file_read(const char *path, size_t max, struct kv_buf *ret)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK), err = fd < 0 ? -errno : 0;
    ssize_t n = 1;

    kv_buf_clear(ret);
    ret->limit = max + 1;
    while (err == 0 && n > 0) {
        err = kv_buf_reserve(ret, KV_MIN((size_t)4096, max + 1 - ret->len));
        if (err == 0) {
            n = read(fd, ret->data + ret->len, KV_MIN((size_t)4096, max + 1 - ret->len));
            if (n < 0)
                err = -errno;
            else
                ret->len += (size_t)n;
        }
        if (err == 0 && ret->len > max)
            err = -EFBIG;
    }
    if (fd >= 0)
        close(fd);
    return err;
}

static bool is_self(const struct kvbm_directory *d, const char *endpoint)
{
    for (uint32_t i = 0; d->has_self && i < d->self.n_endpoints; i++) {
        if (strcmp(d->self.endpoints[i], endpoint) == 0)
            return true;
    }
    return false;
}

/* Put one endpoint. @line is 0 in a list. Returns false when it is none. */
static bool put_endpoint(struct kvbm_directory *d, const char *text, size_t len, unsigned line)
{
    struct kvbm_directory_peer peer = {.size = sizeof(peer), .n_endpoints = 1};
    char endpoint[KVBM_MAX_PEER_ENDPOINT + 2], quoted[512];
    const char *why;

    snprintf(endpoint, sizeof(endpoint), "%.*s", (int)KV_MIN(len, sizeof(endpoint)), text);
    if (!peer_endpoint_is_valid(endpoint, &why)) {
        kv_log_error("kvbm", "not an endpoint of a peer", "%s=%s line=%u why=\"%s\"",
                     line ? "file" : "list", kv_log_quote(quoted, sizeof(quoted), d->where), line,
                     why);
        return false;
    }
    memcpy(peer.endpoints[0], endpoint, sizeof(peer.endpoints[0]));
    if (!is_self(d, endpoint) && peer_list_put(&d->peers, endpoint, &peer) == -ENOMEM)
        d->peers.left_out++;
    return true;
}

static void read_list(struct kvbm_directory *d)
{
    static const char between[] = ", \t";
    const char *p = d->where + strspn(d->where, between);

    peer_list_begin(&d->peers);
    while (*p) {
        size_t len = strcspn(p, between);

        d->peers.left_out += !put_endpoint(d, p, len, 0);
        p += len + strspn(p + len, between);
    }
    peer_list_end(&d->peers);
}

/* Put the endpoints of the file's text, and log lines that hold none. */
static void put_lines(struct kvbm_directory *d, const char *text, size_t len)
{
    const char *p = text, *end = text + len;

    peer_list_begin(&d->peers);
    for (unsigned line = 1; p < end; line++) {
        const char *newline = memchr(p, '\n', (size_t)(end - p));
        const char *last = newline ? newline : end;
        const char *comment = memchr(p, '#', (size_t)(last - p));
        const char *stop = comment ? comment : last;

        while (p < stop && strchr(" \t\r", *p))
            p++;
        while (stop > p && strchr(" \t\r", stop[-1]))
            stop--;
        if (stop > p)
            d->peers.left_out += !put_endpoint(d, p, (size_t)(stop - p), line);
        p = last + 1;
    }
    peer_list_end(&d->peers);
}

/* Texts of a file: the one whose lines are known, and a newer one that was read once. */
struct texts {
    struct kv_buf known, newer;
    bool has_known, has_newer;
};

static bool equal(const struct kv_buf *a, const struct kv_buf *b)
{
    return a->len == b->len && (!a->len || memcmp(a->data, b->data, a->len) == 0);
}

/* Read the file. A change counts when two looks see the same: a program may be writing the file. */
static void read_file(struct kvbm_directory *d, struct texts *texts)
{
    struct kv_buf text = KV_BUF_INIT;
    int err = peer_file_read(d->where, MAX_FILE, &text);

    if (err < 0) { /* the peers of the last look stay */
        directory_failed(d, d->where, strerror(-err));
        directory_is(d, false, false, d->peers.left_out);
        kv_buf_fini(&text);
        return;
    }
    if (!texts->has_known || (texts->has_newer && equal(&text, &texts->newer))) {
        put_lines(d, text.data, text.len);
        kv_buf_fini(&texts->known);
        texts->known = text;
        texts->has_known = true;
        texts->has_newer = false;
    } else {
        texts->has_newer = !equal(&text, &texts->known);
        kv_buf_fini(&texts->newer);
        texts->newer = text;
    }
    if (!texts->has_newer)
        directory_is(d, true, false, d->peers.left_out);
}

void peer_file_run(struct kvbm_directory *d)
{
    struct pollfd stop = {.fd = d->wake.fd, .events = POLLIN};
    struct texts texts = {0};

    if (d->kind == DIRECTORY_LIST) {
        read_list(d);
        directory_is(d, true, false, d->peers.left_out);
    }
    while (!atomic_load_explicit(&d->stop, memory_order_acquire)) {
        if (d->kind == DIRECTORY_FILE)
            read_file(d, &texts);
        (void)poll(&stop, 1, d->kind == DIRECTORY_FILE ? (int)d->reread_ms : -1);
    }
    kv_buf_fini(&texts.known);
    kv_buf_fini(&texts.newer);
}
