// SPDX-License-Identifier: Apache-2.0
#include "s3/pending.h"

#include <pthread.h>
#include <string.h>

#define MAX_PUTS 256
#define MAX_PUT_BYTES (64u << 20)
#define MAX_GETS 256
#define MAX_GET_BYTES (256u << 20)

struct transfer {
    struct s3_pending *owner;
    struct transfer *next;
    uint8_t hash[S3_MAX_HASH];
    size_t hash_len;
    uint64_t number;
    uint64_t asked; /* when a put was sent, by s3_seen_moment */
    void *copy;
    enum { RUNNING, READY, FAILED } state;
    struct s3_request request;
    struct s3_put_try put; /* of a put: what its looks are judged by */
    struct s3_request look;
    unsigned n_looks;
};

struct s3_pending {
    struct s3_client *client;
    const struct s3_config *config;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct transfer *puts, *gets;
    size_t n_puts, put_bytes, n_gets, get_bytes, n_running_puts;
    size_t usual_len; /* length fetched last: an estimate of how many values fit */
    uint64_t last_number;
    uint64_t n_retries; /* times that all failed puts were begun again */
    struct s3_seen *seen;
};

static struct transfer **find(struct transfer **list, const uint8_t *hash, size_t len)
{
    for (; *list; list = &(*list)->next)
        if ((*list)->hash_len == len && memcmp((*list)->hash, hash, len) == 0)
            break;
    return list;
}

static void free_transfer(struct transfer *transfer)
{
    if (!transfer)
        return;
    s3_request_fini(&transfer->request);
    s3_request_fini(&transfer->look);
    free(transfer->copy);
    free(transfer);
}

static void unlink_transfer(struct transfer **list, struct transfer *transfer)
{
    for (; *list; list = &(*list)->next)
        if (*list == transfer) {
            *list = transfer->next;
            return;
        }
}

static struct transfer *make_transfer(struct s3_pending *pending, const char *method,
                                      const uint8_t *hash, size_t hash_len, s3_done_fn done)
{
    struct transfer *transfer = calloc(1, sizeof(*transfer));

    if (!transfer)
        return NULL;
    transfer->owner = pending;
    memcpy(transfer->hash, hash, hash_len);
    transfer->hash_len = hash_len;
    transfer->request.method = method;
    transfer->request.path = s3_chunk_path(pending->config, hash, hash_len);
    transfer->request.done = done;
    transfer->request.arg = transfer;
    if (!transfer->request.path) {
        free_transfer(transfer);
        return NULL;
    }
    return transfer;
}

/* -- Puts ------------------------------------------------------------------------------------ */

static void end_put(struct transfer *transfer, int error)
{
    struct s3_pending *pending = transfer->owner;

    pthread_mutex_lock(&pending->lock);
    pending->n_running_puts--;
    transfer->request.error = error;
    if (!error) {
        s3_seen_found(pending->seen, transfer->hash, transfer->hash_len, transfer->asked);
        unlink_transfer(&pending->puts, transfer);
        pending->n_puts--;
        pending->put_bytes -= transfer->request.len;
    } else {
        transfer->state = FAILED;
    }
    pthread_cond_broadcast(&pending->changed);
    pthread_mutex_unlock(&pending->lock);
    if (!error)
        free_transfer(transfer);
}

static void send_put(struct transfer *transfer)
{
    s3_request_reset(&transfer->request);
    transfer->request.if_none_match = transfer->put.if_none_match;
    transfer->put.refused = false;
    transfer->put.began_s = s3_client_now_s(transfer->owner->client);
    s3_submit(transfer->owner->client, &transfer->request);
}

static void look_done(void *arg, struct s3_request *head)
{
    struct transfer *transfer = arg;
    int error;

    if (s3_look_again(&transfer->put, head, ++transfer->n_looks)) {
        s3_submit(transfer->owner->client, head);
        return;
    }
    error = s3_is_kept(&transfer->put, head) ? 0 : s3_not_kept(&transfer->put, head);
    if (error == -ENOENT) { /* refused without reason */
        transfer->put.if_none_match = false;
        send_put(transfer);
        return;
    }
    end_put(transfer, error);
}

/* Look for the chunk, now that the server says that it has it. */
static void put_done(void *arg, struct s3_request *request)
{
    struct transfer *transfer = arg;
    struct s3_request *look = &transfer->look;

    transfer->put.refused = request->error == -EEXIST;
    if (request->error && request->error != -EEXIST) {
        end_put(transfer, request->error);
        return;
    }
    s3_request_fini(look);
    *look = (struct s3_request){
        .method = "HEAD", .path = strdup(request->path), .done = look_done, .arg = transfer};
    transfer->n_looks = 0;
    if (look->path)
        s3_submit(transfer->owner->client, look);
    else
        end_put(transfer, -ENOMEM);
}

/* Begin a put. The lock is held; the client's lock always comes after it. */
static void run_put(struct s3_pending *pending, struct transfer *transfer)
{
    transfer->state = RUNNING;
    transfer->asked = s3_seen_moment(pending->seen);
    pending->n_running_puts++;
    send_put(transfer);
}

static bool has_room(const struct s3_pending *pending, size_t len)
{
    return pending->n_puts < MAX_PUTS &&
           (pending->n_puts == 0 || pending->put_bytes + len <= MAX_PUT_BYTES);
}

static void retry_failed(struct s3_pending *pending)
{
    pending->n_retries++;
    for (struct transfer *at = pending->puts; at; at = at->next)
        if (at->state == FAILED)
            run_put(pending, at);
}

/* Wait for room. Where failed puts take all of it, begin them again, since the server may be well
 * by now. Do so once: of threads that wait at the same time, one does it for all. */
static int await_room(struct s3_pending *pending, size_t len)
{
    uint64_t n_retries = pending->n_retries;

    while (!has_room(pending, len)) {
        if (pending->n_running_puts == 0 && pending->n_retries != n_retries)
            return pending->puts->request.error;
        if (pending->n_running_puts == 0)
            retry_failed(pending);
        pthread_cond_wait(&pending->changed, &pending->lock);
    }
    return 0;
}

static int add_put(struct s3_pending *pending, struct transfer *transfer)
{
    int error = await_room(pending, transfer->request.len);
    struct transfer *other;

    other = *find(&pending->puts, transfer->hash, transfer->hash_len);
    if (other) {
        if (other->state == FAILED)
            run_put(pending, other);
        return 1;
    }
    if (error)
        return error;
    transfer->number = ++pending->last_number;
    transfer->next = pending->puts;
    pending->puts = transfer;
    pending->n_puts++;
    pending->put_bytes += transfer->request.len;
    run_put(pending, transfer);
    return 0;
}

int s3_pending_put(struct s3_pending *pending, const uint8_t *hash, size_t hash_len,
                   const void *data, size_t len, bool replace)
{
    struct transfer *transfer = make_transfer(pending, "PUT", hash, hash_len, put_done);
    int ret;

    if (transfer)
        transfer->copy = malloc(len ? len : 1);
    if (!transfer || !transfer->copy) {
        free_transfer(transfer);
        return -ENOMEM;
    }
    if (len)
        memcpy(transfer->copy, data, len);
    transfer->request.body = transfer->copy;
    transfer->request.len = len;
    transfer->put.if_none_match = !replace;
    s3_sum(data, len, transfer->put.sum);
    memcpy(transfer->request.sum, transfer->put.sum, sizeof(transfer->request.sum));
    if (s3_sha256_hex(data, len, transfer->request.sha256)) { /* hashed without the lock */
        free_transfer(transfer);
        return -EIO;
    }
    pthread_mutex_lock(&pending->lock);
    ret = add_put(pending, transfer);
    pthread_mutex_unlock(&pending->lock);
    if (ret)
        free_transfer(transfer);
    return ret;
}

bool s3_pending_has(struct s3_pending *pending, const uint8_t *hash, size_t hash_len)
{
    struct transfer *put;

    pthread_mutex_lock(&pending->lock);
    put = *find(&pending->puts, hash, hash_len);
    if (put && put->state == FAILED)
        run_put(pending, put);
    pthread_mutex_unlock(&pending->lock);
    return put != NULL;
}

/* True when puts up to @number still run; @ret_error gets the error of a failed one. */
static bool runs_until(const struct s3_pending *pending, uint64_t number, int *ret_error)
{
    bool runs = false;

    *ret_error = 0;
    for (const struct transfer *at = pending->puts; at; at = at->next)
        if (at->number <= number && at->state == RUNNING)
            runs = true;
        else if (at->number <= number)
            *ret_error = at->request.error;
    return runs;
}

int s3_pending_flush(struct s3_pending *pending, bool retry)
{
    uint64_t number;
    int error;

    pthread_mutex_lock(&pending->lock);
    number = pending->last_number;
    if (retry)
        retry_failed(pending);
    while (runs_until(pending, number, &error))
        pthread_cond_wait(&pending->changed, &pending->lock);
    pthread_mutex_unlock(&pending->lock);
    return error;
}

/* -- Gets ------------------------------------------------------------------------------------ */

static void drop_get(struct s3_pending *pending, struct transfer *transfer)
{
    unlink_transfer(&pending->gets, transfer);
    pending->n_gets--;
    if (transfer->state == READY)
        pending->get_bytes -= transfer->request.data_len;
}

static void get_done(void *arg, struct s3_request *request)
{
    struct transfer *transfer = arg;
    struct s3_pending *pending = transfer->owner;
    bool keep;

    pthread_mutex_lock(&pending->lock);
    keep = request->error == 0 && pending->get_bytes + request->data_len <= MAX_GET_BYTES;
    if (request->error == 0)
        pending->usual_len = KV_MAX(request->data_len, (size_t)1);
    if (keep) {
        transfer->state = READY;
        pending->get_bytes += request->data_len;
    } else {
        drop_get(pending, transfer);
    }
    pthread_cond_broadcast(&pending->changed);
    pthread_mutex_unlock(&pending->lock);
    if (!keep)
        free_transfer(transfer);
}

/* Make room: drop completed prefetches that no caller has taken. */
static void drop_ready(struct s3_pending *pending)
{
    struct transfer *at = pending->gets, *next;

    for (; at; at = next) {
        next = at->next;
        if (at->state == READY) {
            drop_get(pending, at);
            free_transfer(at);
        }
    }
}

void s3_pending_fetch(struct s3_pending *pending, const uint8_t *hashes, size_t hash_len, size_t n)
{
    pthread_mutex_lock(&pending->lock);
    if (pending->n_gets + n > MAX_GETS || pending->get_bytes > MAX_GET_BYTES / 2)
        drop_ready(pending);
    for (size_t i = 0; i < n; i++) {
        const uint8_t *hash = hashes + i * hash_len;
        struct transfer *transfer;

        if (pending->n_gets >= MAX_GETS ||
            (pending->n_gets + 1) * pending->usual_len > MAX_GET_BYTES)
            break;
        if (*find(&pending->gets, hash, hash_len) || *find(&pending->puts, hash, hash_len))
            continue;
        transfer = make_transfer(pending, "GET", hash, hash_len, get_done);
        if (!transfer)
            break;
        transfer->request.max_body = S3_MAX_BODY;
        transfer->next = pending->gets;
        pending->gets = transfer;
        pending->n_gets++;
        s3_submit(pending->client, &transfer->request);
    }
    pthread_mutex_unlock(&pending->lock);
}

static int copy_put(const struct transfer *put, uint8_t **ret, size_t *ret_len)
{
    uint8_t *copy = malloc(put->request.len ? put->request.len : 1);

    if (!copy)
        return -ENOMEM;
    if (put->request.len)
        memcpy(copy, put->copy, put->request.len);
    *ret = copy;
    *ret_len = put->request.len;
    return 0;
}

int s3_pending_take(struct s3_pending *pending, const uint8_t *hash, size_t hash_len, uint8_t **ret,
                    size_t *ret_len)
{
    struct transfer *transfer;
    int error = -ENOENT;

    pthread_mutex_lock(&pending->lock);
    transfer = *find(&pending->puts, hash, hash_len);
    if (transfer) {
        error = copy_put(transfer, ret, ret_len);
        pthread_mutex_unlock(&pending->lock);
        return error;
    }
    while ((transfer = *find(&pending->gets, hash, hash_len)) && transfer->state == RUNNING)
        pthread_cond_wait(&pending->changed, &pending->lock);
    if (transfer)
        drop_get(pending, transfer);
    pthread_mutex_unlock(&pending->lock);
    /* otherwise the caller asks again and reports */
    if (transfer && s3_is_whole(&transfer->request)) {
        *ret = KV_STEAL(transfer->request.data);
        *ret_len = transfer->request.data_len;
        error = 0;
    }
    free_transfer(transfer);
    return error;
}

static void wait_while_running(struct s3_pending *pending, struct transfer **list,
                               const uint8_t *hash, size_t hash_len)
{
    const struct transfer *transfer;

    while ((transfer = *find(list, hash, hash_len)) && transfer->state == RUNNING)
        pthread_cond_wait(&pending->changed, &pending->lock);
}

void s3_pending_drop(struct s3_pending *pending, const uint8_t *hash, size_t hash_len)
{
    struct transfer *put, *get;

    pthread_mutex_lock(&pending->lock);
    wait_while_running(pending, &pending->gets, hash, hash_len);
    wait_while_running(pending, &pending->puts, hash, hash_len); /* last: nothing waits after it */
    put = *find(&pending->puts, hash, hash_len);
    if (put) {
        unlink_transfer(&pending->puts, put);
        pending->n_puts--;
        pending->put_bytes -= put->request.len;
        pthread_cond_broadcast(&pending->changed);
    }
    get = *find(&pending->gets, hash, hash_len);
    if (get && get->state != RUNNING)
        drop_get(pending, get);
    else
        get = NULL;
    pthread_mutex_unlock(&pending->lock);
    free_transfer(put);
    free_transfer(get);
}

void s3_pending_settle(struct s3_pending *pending, const uint8_t *hash, size_t hash_len)
{
    pthread_mutex_lock(&pending->lock);
    wait_while_running(pending, &pending->puts, hash, hash_len);
    pthread_mutex_unlock(&pending->lock);
}

/* -- Life ------------------------------------------------------------------------------------ */

int s3_pending_create(struct s3_client *client, const struct s3_config *config,
                      struct s3_seen *seen, struct s3_pending **ret)
{
    struct s3_pending *pending = calloc(1, sizeof(*pending));

    if (!pending)
        return -ENOMEM;
    pending->client = client;
    pending->config = config;
    pending->seen = seen;
    pending->usual_len = 1 << 20;
    pthread_mutex_init(&pending->lock, NULL);
    pthread_cond_init(&pending->changed, NULL);
    *ret = pending;
    return 0;
}

void s3_pending_destroy(struct s3_pending *pending)
{
    struct transfer *at;

    if (!pending)
        return;
    while ((at = pending->puts)) {
        pending->puts = at->next;
        free_transfer(at);
    }
    while ((at = pending->gets)) {
        pending->gets = at->next;
        free_transfer(at);
    }
    pthread_cond_destroy(&pending->changed);
    pthread_mutex_destroy(&pending->lock);
    free(pending);
}
