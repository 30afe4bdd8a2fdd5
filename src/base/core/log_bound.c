// SPDX-License-Identifier: Apache-2.0
#include "base/core/log_bound.h"

#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "base/core/clock.h"

#define WINDOW_NS (10 * KV_NS_PER_S)
#define BURST 10u
#define SLOTS 256u /* kinds remembered; a new one takes the place of another */
#define NEAR 4u    /* slots where a kind may be */

struct kind {
    uint64_t hash; /* 0: none */
    uint64_t begin_ns;
    unsigned n;             /* lines in the window */
    bool floods;            /* there were too many in the window before */
    unsigned long left_out; /* since a line of the kind passed */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct kind kinds[SLOTS];

/* Hash the value of @key in @line, which is key=value or "key":value; nothing when it has none. */
static uint64_t add_value(uint64_t hash, const char *line, const char *key)
{
    char plain[40], quoted[40];
    const char *at;
    bool in_quotes;

    snprintf(plain, sizeof(plain), " %s=", key);
    snprintf(quoted, sizeof(quoted), "\"%s\":", key);
    at = strstr(line, plain);
    if (at) {
        at += strlen(plain);
    } else {
        at = strstr(line, quoted);
        if (!at)
            return hash;
        at += strlen(quoted);
    }
    in_quotes = *at == '"';
    for (at += in_quotes; *at && (in_quotes ? *at != '"' : !strchr(" ,}", *at)); at++) {
        if (*at == '\\' && at[1])
            at++;
        hash = (hash ^ (unsigned char)*at) * UINT64_C(0x100000001b3); /* FNV-1a */
    }
    return (hash ^ '/') * UINT64_C(0x100000001b3);
}

static uint64_t kind_of(const char *line)
{
    static const char *const parts[] = {"component", "msg",    "store",  "dir",     "directory",
                                        "volume",    "server", "bucket", "uri",     "object",
                                        "worker",    "peer",   "model",  "endpoint"};
    uint64_t hash = UINT64_C(0xcbf29ce484222325);

    for (size_t i = 0; i < sizeof(parts) / sizeof(parts[0]); i++)
        hash = add_value(hash, line, parts[i]);
    return hash ? hash : 1;
}

/* Find the slot of a kind, or the one among its places that has been quiet longest. */
static struct kind *find(uint64_t hash)
{
    struct kind *oldest = NULL;

    for (unsigned i = 0; i < NEAR; i++) {
        struct kind *at = &kinds[(hash + i) % SLOTS];

        if (at->hash == hash)
            return at;
        if (!oldest || at->begin_ns < oldest->begin_ns)
            oldest = at;
    }
    *oldest = (struct kind){.hash = hash};
    return oldest;
}

bool kv_log_bound(const char *line, unsigned long *ret_left_out)
{
    uint64_t hash = kind_of(line), now = kv_now_ns();
    struct kind *kind;
    bool passes;

    pthread_mutex_lock(&lock);
    kind = find(hash);
    if (!kind->begin_ns || now - kind->begin_ns >= WINDOW_NS) {
        kind->floods = kind->left_out > 0 && now - kind->begin_ns < 2 * WINDOW_NS;
        kind->begin_ns = now;
        kind->n = 0;
    }
    passes = kind->n < (kind->floods ? 1 : BURST);
    if (passes) {
        kind->n++;
        *ret_left_out = kind->left_out;
        kind->left_out = 0;
    } else {
        kind->left_out++;
    }
    pthread_mutex_unlock(&lock);
    return passes;
}
