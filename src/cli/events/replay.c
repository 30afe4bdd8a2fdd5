// SPDX-License-Identifier: Apache-2.0
/*
 * `kvasir events replay`: recordings, and replay endpoints of engines. play.c publishes recordings.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/core/le.h"
#include "cli/events/ask.h"
#include "cli/events/events.h"
#include "cli/events/record.h"
#include "cli/show/bar.h"

/* -- files ------------------------------------------------------------------------------------- */

/* Read a record into @buf. Returns as kc_record_read does, or an errno of reading. */
static long read_record(FILE *file, struct kv_buf *buf, struct kc_message *ret,
                        const char **ret_why)
{
    uint8_t head[8];
    size_t n = fread(head, 1, sizeof(head), file), more;

    kv_buf_clear(buf);
    kv_buf_append(buf, head, n);
    more = n == sizeof(head) ? KV_MIN(kv_get_le(head, 4), (uint64_t)KC_RECORD_MAX) : 0;
    if (kv_buf_reserve(buf, more) < 0)
        return -ENOMEM;
    if (more)
        buf->len += fread(buf->data + buf->len, 1, more, file);
    return ferror(file) ? -EIO : kc_record_read(buf->data, buf->len, ret, ret_why);
}

static int read_header(FILE *file, const char **ret_why)
{
    uint8_t header[KC_RECORD_HEADER];

    return kc_record_check(header, fread(header, 1, sizeof(header), file), ret_why);
}

int kc_events_read_file(struct kc_events_call *call, FILE *file, kc_message_fn fn, void *arg)
{
    struct kv_buf buf = KV_BUF_INIT;
    const char *why = "can't be read";
    struct kc_message message;
    long n = read_header(file, &why);
    int rc = 0;

    while (n >= 0 && rc == 0 && !kc_bar_interrupted()) {
        n = read_record(file, &buf, &message, &why);
        if (n <= 0)
            break;
        rc = fn(arg, &message);
    }
    kv_buf_fini(&buf);
    if (n < 0)
        return kc_events_fail(call, KC_EVENTS_FAILED, "%s: %s", call->url, why);
    return rc;
}

static int print_file(struct kc_events_call *call, FILE *file)
{
    int rc = kc_events_begin(call);

    if (rc == 0)
        rc = kc_events_read_file(call, file, kc_events_take, call);
    if (rc == 0 && kc_bar_interrupted())
        rc = KC_EVENTS_INTERRUPTED;
    return kc_events_end(call, rc);
}

/* -- replay endpoints -------------------------------------------------------------------------- */

static int replay_url(struct kc_events_call *call)
{
    struct kv_error error = {0};
    int rc = kc_events_begin(call);

    if (rc)
        return rc;
    rc = kc_ask_replays(call->url, call->opts.from, call->opts.timeout_ms, kc_events_take, call,
                        &error);
    if (rc == -EINTR)
        rc = KC_EVENTS_INTERRUPTED;
    else if (rc < 0)
        rc = kc_events_fail(call,
                            rc == -EINVAL                             ? KC_EVENTS_USAGE
                            : rc == -ETIMEDOUT || rc == -ECONNREFUSED ? KC_EVENTS_UNREACHED
                                                                      : KC_EVENTS_FAILED,
                            "%s", error.text);
    return kc_events_end(call, rc);
}

int kc_events_replay(struct kc_events_call *call)
{
    FILE *file;
    int rc;

    if (strstr(call->url, "://")) {
        if (call->opts.to)
            return kc_events_fail(call, KC_EVENTS_USAGE, "--to is for files");
        return replay_url(call);
    }
    if (call->opts.to && (call->opts.record || call->opts.json))
        return kc_events_fail(call, KC_EVENTS_USAGE, "--to prints and records nothing");
    file = strcmp(call->url, "-") == 0 ? stdin : fopen(call->url, "re");
    if (!file)
        return kc_events_fail(call, KC_EVENTS_FAILED, "%s: %s", call->url, strerror(errno));
    rc = call->opts.to ? kc_events_play(call, file) : print_file(call, file);
    if (file != stdin)
        fclose(file);
    return rc;
}
