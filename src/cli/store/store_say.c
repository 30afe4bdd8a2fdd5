// SPDX-License-Identifier: Apache-2.0
/* Errors and JSON of `kvasir store`. */
#include <stdio.h>
#include <string.h>

#include "base/core/utf8.h"
#include "cli/store/store.h"
#include "store/backend/store.h"
#include "store/backend/uri.h"

void kc_store_put_text(FILE *f, const char *text)
{
    const char *end = text + strlen(text);

    while (text < end) {
        unsigned char c = (unsigned char)*text;
        int n = kv_utf8_sequence(text, end);
        bool control = c < 0x20 || c == 0x7f || (n == 2 && c == 0xc2 && (text[1] & 0xe0) == 0x80);

        if (n <= 0)
            n = 1;
        else if (!control) {
            fwrite(text, 1, (size_t)n, f);
            text += n;
            continue;
        }
        for (; n > 0; n--)
            fprintf(f, "\\x%02x", (unsigned char)*text++);
    }
}

bool kc_store_tells(const struct kc_store_call *call)
{
    const kv_store_ext *ext = NULL;

    if (call->store)
        kvs_backend(call->store, NULL, &ext);
    return ext || !call->store;
}

bool kc_store_is_limited(const struct kc_store_call *call)
{
    kv_store_stats stats = {.size = sizeof(stats)};

    return call->store && kvs_stats(call->store, &stats) == 0 && stats.limit_bytes > 0 &&
           stats.limit_bytes != UINT64_MAX;
}

static bool is_outage(int rc)
{
    return rc == -ECONNREFUSED || rc == -ECONNRESET || rc == -ETIMEDOUT || rc == -EHOSTUNREACH ||
           rc == -ENETUNREACH || rc == -ENOTCONN || rc == -EHOSTDOWN || rc == -EPIPE;
}

static const char *words(const struct kc_store_call *call, int rc)
{
    switch (-rc) {
    case ENOTSUP:
        return strcmp(call->command, "stats") == 0
                   ? "the backend doesn't offer this: it has no stats"
               : strcmp(call->command, "gc") == 0
                   ? "the backend doesn't offer this: it can't list its objects and delete chunks"
                   : "the backend doesn't offer this: it can't list its objects";
    case EMEDIUMTYPE:
        return "not an object of this program's";
    case ERANGE:
        return "the object doesn't have these bytes";
    case ESTALE:
        return "saved with another fingerprint";
    case EBADMSG:
        return "damaged";
    case ENOENT:
        return kc_store_tells(call) ? "no such object"
                                    : "no such object, or the backend failed (it doesn't tell)";
    case EIO:
        return kc_store_tells(call) ? strerror(EIO) : "the backend failed (it doesn't tell why)";
    case EPROTO:
        return "the plugin broke its contract";
    case ECANCELED:
        return "interrupted";
    default:
        return strerror(-rc);
    }
}

/* Report an error, as JSON where the caller asked for JSON. */
static void tell(struct kc_store_call *call, const char *what, const char *why)
{
    FILE *f = call->data_on_stdout ? stderr : stdout;

    fprintf(stderr, "kvasir store %s: ", call->command);
    if (what) {
        kc_store_put_text(stderr, what);
        fputs(": ", stderr);
    }
    fprintf(stderr, "%s\n", why);
    if (!call->opts.json || call->printed)
        return;
    call->printed = true;
    kv_buf_fini(&call->out);
    kc_store_json_begin(call);
    kc_store_json_str(call, "error", why);
    kv_json_end_object(&call->json);
    fprintf(f, "%s\n", kv_buf_cstr(&call->out));
}

int kc_store_fail(struct kc_store_call *call, const char *what, int rc)
{
    tell(call, what, words(call, rc));
    if (rc == -EBADMSG || rc == -ESTALE)
        return KC_STORE_PROBLEMS;
    if (rc == -ENOENT)
        return KC_STORE_NOT_FOUND;
    if (is_outage(rc))
        return KC_STORE_UNREACHABLE;
    return rc == -ECANCELED ? KC_STORE_INTERRUPTED : KC_STORE_FAILED;
}

int kc_store_fail_file(struct kc_store_call *call, const char *file, int rc)
{
    tell(call, file, rc == -ECANCELED ? "interrupted" : strerror(-rc));
    return rc == -ECANCELED ? KC_STORE_INTERRUPTED : KC_STORE_FAILED;
}

int kc_store_fail_of(struct kc_store_call *call, const char *what, const char *text, int status)
{
    tell(call, what, text);
    return status;
}

int kc_store_fail_as(struct kc_store_call *call, const char *text, int status)
{
    tell(call, NULL, text);
    return status;
}

void kc_store_json_begin(struct kc_store_call *call)
{
    kv_json_writer_init(&call->json, &call->out);
    kv_json_begin_object(&call->json);
    if (call->name)
        kc_store_json_str(call, "name", call->name);
}

void kc_store_json_str(struct kc_store_call *call, const char *key, const char *value)
{
    kv_json_member_str(&call->json, key, value);
}

void kc_store_json_u64(struct kc_store_call *call, const char *key, uint64_t value)
{
    kv_json_member_u64(&call->json, key, value);
}

void kc_store_json_double(struct kc_store_call *call, const char *key, double value)
{
    kv_json_member_double(&call->json, key, value);
}

int kc_store_json_end(struct kc_store_call *call, FILE *f, int status)
{
    kv_json_end_object(&call->json);
    kv_buf_putc(&call->out, '\n');
    call->printed = true;
    if (call->out.error || fwrite(call->out.data, 1, call->out.len, f) != call->out.len ||
        fflush(f) != 0)
        return kc_store_fail(call, "writing JSON", call->out.error ? call->out.error : -EIO);
    return status;
}

const char *kc_store_format_name(enum kvs_format format)
{
    return format == KVS_FORMAT_LLAMA ? "llama" : format == KVS_FORMAT_BYTES ? "bytes" : "auto";
}

/* Report a failed open with advice. The library has logged the exact reason. */
int kc_store_fail_open(struct kc_store_call *call, int rc)
{
    const char *sep = strchr(call->uri, ':');
    struct kvs_uri uri;
    bool plugin = kvs_uri_parse(call->uri, &uri, NULL) == 0 && !uri.path;
    char text[600];

    if (strncmp(call->label, "file:///", 8) == 0)
        snprintf(text, sizeof(text), "a directory is named by its path: %s",
                 call->label + strlen("file://"));
    else if (rc == -ENOENT && plugin)
        snprintf(text, sizeof(text),
                 "no plugin libkv_store_%.*s.so: not in $KV_STORE_LIBRARY_PATH, nor with Kvasir's "
                 "libraries, nor where the loader looks",
                 (int)KV_MIN(sep - call->uri, 64), call->uri);
    else
        snprintf(text, sizeof(text), "can't open the store: %s",
                 rc == -EPROTO          ? "its plugin can't be used"
                 : rc == -EINVAL        ? "its URI can't be used"
                 : rc == -EIO && plugin ? "its plugin refused it; a log line above may say why"
                                        : strerror(-rc));
    return kc_store_fail_of(call, call->label, text, KC_STORE_UNREACHABLE);
}
