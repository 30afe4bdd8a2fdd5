// SPDX-License-Identifier: Apache-2.0
/* Volumes of a peer: find its session by the agent's name, lease, copy. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/core/clock.h"
#include "base/core/error.h"
#include "peer/lease/ask.h"
#include "tier/volume/volume.h"

#define MAX_SESSIONS 1024

/* Find the session with the agent that lends the volume. Returns a reference, or NULL. */
static struct kvbm_session *find_session(struct kvbm_volume *v)
{
    struct kvbm_session **all = calloc(MAX_SESSIONS, sizeof(struct kvbm_session *)), *found = NULL;
    size_t n = all ? kvbm_sessions_list(v->agent, all, MAX_SESSIONS) : 0;

    for (size_t i = 0; i < n; i++) {
        if (!found && strcmp(kvbm_session_peer(all[i])->name, v->peer) == 0)
            found = all[i];
        else
            kvbm_session_put(all[i]);
    }
    free(all);
    return found;
}

uint64_t kvbm_volume_peer_capacity(struct kvbm_volume *volume)
{
    struct kvbm_session *session = find_session(volume);
    struct kvbm_layout_config config = {.size = sizeof(config)};
    struct kvbm_remote_set *set;
    uint64_t n = 0;

    if (session && kvbm_session_fits(session, volume->set, volume->like, NULL) == 0 &&
        kvbm_remote_set_find(volume->agent, kvbm_session_peer(session)->worker, volume->set,
                             &set) == 0) {
        if (kvbm_remote_set_layout(set, &config) == 0)
            n = config.num_blocks;
        kvbm_remote_set_release(set);
    }
    kvbm_session_put(session);
    return n;
}

/* Copy the @n keys from @first on that a lease covers. Returns 0 or -ENOMEM. */
static int copy(struct kvbm_volume_part *part, struct kvbm_lease *lease, uint32_t first, uint32_t n)
{
    uint8_t ok[KVBM_VOLUME_BATCH / 8] = {0};
    const struct kvbm_lease_read_opts what = {.size = sizeof(what),
                                              .to = part->layout,
                                              .to_blocks = part->blocks + first,
                                              .n = n,
                                              .deadline_ns = part->deadline_ns,
                                              .ok = ok};
    long rc = kvbm_lease_read(lease, &what);

    for (uint32_t i = 0; i < n && rc >= 0; i++)
        if (ok[i / 8] >> (i % 8) & 1)
            part->ok[(first + i) / 8] |= (uint8_t)(1u << ((first + i) % 8));
    return rc == -ENOMEM ? -ENOMEM : 0;
}

int kvbm_volume_get_from_peer(struct kvbm_volume *volume, struct kvbm_volume_part *part)
{
    struct kvbm_session *session = find_session(volume);
    const uint8_t *keys = part->chain.keys;
    int rc = session ? kvbm_session_fits(session, volume->set, volume->like, NULL) : -ENOENT;

    for (uint32_t at = 0; rc == 0 && at < part->n;) {
        struct kvbm_lease *lease = NULL;
        uint32_t n;

        rc = kvbm_session_lease(session, volume->set, part->chain.group,
                                keys + (size_t)at * volume->key_len, part->n - at, 0,
                                part->deadline_ns, &lease);
        if (rc < 0)
            break;
        n = (uint32_t)kvbm_lease_count(lease);
        rc = n ? copy(part, lease, at, n) : -ENOENT;
        kvbm_lease_release(lease);
        at += n;
    }
    kvbm_session_put(session);
    return rc == -ENOMEM ? rc : 0;
}
