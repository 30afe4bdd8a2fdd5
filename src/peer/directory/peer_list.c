// SPDX-License-Identifier: Apache-2.0
/* The peers that a directory knows: a bounded, sorted array; changes go to the callback. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/core/error.h"
#include "peer/directory/directory.h"
#include "peer/session/endpoints.h"

struct peer_slot {
    char key[KVBM_MAX_PEER_KEY + 1];
    uint64_t look; /* the last one that has seen the peer */
    struct kvbm_directory_peer peer;
};

void peer_list_init(struct peer_list *list, size_t max, kvbm_directory_fn changed, void *arg)
{
    *list = (struct peer_list){.max = max, .changed = changed, .arg = arg};
}

void peer_list_fini(struct peer_list *list)
{
    for (size_t i = 0; i < list->n; i++)
        free(list->slots[i]);
    free(list->slots);
    *list = (struct peer_list){0};
}

/* Return the first place whose key isn't below @key. */
static size_t place_of(const struct peer_list *list, const char *key)
{
    size_t low = 0, high = list->n;

    while (low < high) {
        size_t middle = low + (high - low) / 2;

        if (strcmp(list->slots[middle]->key, key) < 0)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static bool is_at(const struct peer_list *list, size_t at, const char *key)
{
    return at < list->n && strcmp(list->slots[at]->key, key) == 0;
}

static bool same(const struct kvbm_directory_peer *a, const struct kvbm_directory_peer *b)
{
    bool equal = strcmp(a->name, b->name) == 0 && a->worker == b->worker &&
                 a->incarnation == b->incarnation && a->n_endpoints == b->n_endpoints;

    for (uint32_t i = 0; i < a->n_endpoints && equal; i++)
        equal = strcmp(a->endpoints[i], b->endpoints[i]) == 0;
    return equal;
}

/* Make room for one more slot at @at. */
static int insert(struct peer_list *list, size_t at, const char *key)
{
    struct peer_slot **more, *slot;

    more = reallocarray(list->slots, list->n + 1, sizeof(*more));
    if (!more)
        return -ENOMEM;
    list->slots = more;
    slot = calloc(1, sizeof(*slot));
    if (!slot)
        return -ENOMEM;
    snprintf(slot->key, sizeof(slot->key), "%s", key);
    memmove(&more[at + 1], &more[at], (list->n - at) * sizeof(*more));
    more[at] = slot;
    list->n++;
    return 0;
}

int peer_list_put(struct peer_list *list, const char *key, const struct kvbm_directory_peer *peer)
{
    size_t at = place_of(list, key);
    bool known = is_at(list, at, key);
    struct peer_slot *slot;
    int err = 0;

    /* a look may bring as many as there is room for, before those that are gone are removed */
    if (list->looking ? list->n_look == list->max : !known && list->n == list->max) {
        list->left_out++;
        return -ENOSPC;
    }
    if (!known)
        err = insert(list, at, key);
    if (err < 0)
        return err;
    slot = list->slots[at];
    list->n_look += slot->look != list->look;
    slot->look = list->look;
    if (known && same(&slot->peer, peer))
        return 0;
    slot->peer = *peer;
    list->changed(list->arg, &slot->peer, true);
    return 0;
}

static void remove_at(struct peer_list *list, size_t at)
{
    struct peer_slot *slot = list->slots[at];

    list->n--;
    memmove(&list->slots[at], &list->slots[at + 1], (list->n - at) * sizeof(*list->slots));
    list->changed(list->arg, &slot->peer, false);
    free(slot);
}

void peer_list_remove(struct peer_list *list, const char *key)
{
    size_t at = place_of(list, key);

    if (is_at(list, at, key))
        remove_at(list, at);
}

void peer_list_begin(struct peer_list *list)
{
    list->look++;
    list->looking = true;
    list->n_look = 0;
    list->left_out = 0;
}

void peer_list_end(struct peer_list *list)
{
    for (size_t at = list->n; at-- > 0;) {
        if (list->slots[at]->look != list->look)
            remove_at(list, at);
    }
    list->looking = false;
}

bool peer_endpoint_is_valid(const char *text, const char **why)
{
    struct kvbm_endpoint endpoint;
    const char *ignored = NULL;

    why = why ? why : &ignored;
    *why = "too long";
    if (strlen(text) > KVBM_MAX_PEER_ENDPOINT)
        return false;
    *why = "unix:/PATH or tcp:HOST:PORT is expected";
    for (const char *p = text; *p; p++) {
        if (*p <= ' ' || *p >= 0x7f)
            return false;
    }
    if (kvbm_endpoint_read(text, &endpoint, why) < 0)
        return false;
    *why = "nobody can connect to it";
    return endpoint.is_unix || (!endpoint.tcp.wildcard && !endpoint.tcp.any_port);
}
