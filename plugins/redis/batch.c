// SPDX-License-Identifier: Apache-2.0
#include "redis/batch.h"

#define N_SLOTS 16384

static const char asking[] = "*1\r\n$6\r\nASKING\r\n";

void rds_batch_fini(struct rds_batch *batch)
{
    for (size_t i = 0; i < batch->n; i++)
        resp_value_fini(&batch->cmds[i].reply);
    free(batch->cmds);
    kv_buf_fini(&batch->text);
    memset(batch, 0, sizeof(*batch));
}

void rds_batch_begin(struct rds_batch *batch, size_t n_args)
{
    if (batch->error)
        return;
    if (batch->n == batch->capacity) {
        size_t capacity = KV_MAX(2 * batch->capacity, (size_t)16);
        struct rds_cmd *cmds = realloc(batch->cmds, capacity * sizeof(*cmds));

        if (!cmds) {
            batch->error = -ENOMEM;
            return;
        }
        batch->cmds = cmds;
        batch->capacity = capacity;
    }
    batch->cmds[batch->n++] = (struct rds_cmd){.head = batch->text.len, .node = -1};
    kv_buf_putc(&batch->text, '*');
    kv_buf_put_u64(&batch->text, n_args);
    kv_buf_puts(&batch->text, "\r\n");
}

static void put_len(struct rds_batch *batch, size_t len)
{
    kv_buf_putc(&batch->text, '$');
    kv_buf_put_u64(&batch->text, len);
    kv_buf_puts(&batch->text, "\r\n");
}

/* Let the command's head end where the text now does. */
static void extend(struct rds_batch *batch)
{
    struct rds_cmd *cmd = &batch->cmds[batch->n - 1];

    cmd->head_len = batch->text.len - cmd->head;
    if (batch->text.error)
        batch->error = batch->text.error;
}

void rds_batch_arg(struct rds_batch *batch, const void *data, size_t len)
{
    if (batch->error)
        return;
    put_len(batch, len);
    kv_buf_append(&batch->text, data, len);
    kv_buf_puts(&batch->text, "\r\n");
    extend(batch);
}

void rds_batch_word(struct rds_batch *batch, const char *word)
{
    rds_batch_arg(batch, word, strlen(word));
}

void rds_batch_number(struct rds_batch *batch, int64_t number)
{
    struct kv_buf text = KV_BUF_INIT;

    kv_buf_put_i64(&text, number);
    if (text.error)
        batch->error = text.error;
    rds_batch_arg(batch, text.data, text.len);
    kv_buf_fini(&text);
}

void rds_batch_key(struct rds_batch *batch, const void *key, size_t len)
{
    rds_batch_arg(batch, key, len);
    if (!batch->error)
        batch->cmds[batch->n - 1].slot = rds_key_slot(key, len);
}

void rds_batch_payload(struct rds_batch *batch, const void *data, size_t len)
{
    struct rds_cmd *cmd;

    if (batch->error)
        return;
    put_len(batch, len);
    extend(batch);
    cmd = &batch->cmds[batch->n - 1];
    cmd->payload = data;
    cmd->payload_len = len;
}

/* -- bytes on the wire ------------------------------------------------------------------------- */

int rds_batch_pieces(const struct rds_batch *batch, size_t i, size_t offset, struct iovec *iov,
                     int max)
{
    const struct rds_cmd *cmd = &batch->cmds[i];
    struct iovec all[4];
    int n_all = 0, n = 0;

    if (cmd->asking)
        all[n_all++] = (struct iovec){(void *)asking, sizeof(asking) - 1};
    all[n_all++] = (struct iovec){batch->text.data + cmd->head, cmd->head_len};
    if (cmd->payload) {
        all[n_all++] = (struct iovec){(void *)cmd->payload, cmd->payload_len};
        all[n_all++] = (struct iovec){(void *)"\r\n", 2};
    }
    for (int k = 0; k < n_all && n < max; k++) {
        size_t skip = KV_MIN(offset, all[k].iov_len);

        offset -= skip;
        if (skip < all[k].iov_len)
            iov[n++] = (struct iovec){(char *)all[k].iov_base + skip, all[k].iov_len - skip};
    }
    return n;
}

size_t rds_batch_wire_len(const struct rds_batch *batch, size_t i)
{
    const struct rds_cmd *cmd = &batch->cmds[i];

    return (cmd->asking ? sizeof(asking) - 1 : 0) + cmd->head_len +
           (cmd->payload ? cmd->payload_len + 2 : 0);
}

uint16_t rds_key_slot(const void *key, size_t len)
{
    const char *text = key, *open = memchr(text, '{', len), *close;
    unsigned crc = 0;

    if (open) {
        close = memchr(open + 1, '}', len - (size_t)(open + 1 - text));
        if (close && close > open + 1) {
            text = open + 1;
            len = (size_t)(close - text);
        }
    }
    for (size_t i = 0; i < len; i++) {
        crc ^= (unsigned)(unsigned char)text[i] << 8;
        for (int bit = 0; bit < 8; bit++)
            crc = (crc << 1 ^ (crc & 0x8000 ? 0x1021 : 0)) & 0xFFFF;
    }
    return (uint16_t)(crc % N_SLOTS);
}
