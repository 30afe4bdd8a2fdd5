// SPDX-License-Identifier: Apache-2.0
/**
 * Configuration of a tiered store: its members, in order of speed, and where puts go
 * (docs/kv-store-tiered.md). Programs that move blobs between members read the same file.
 */
#ifndef KV_TIERED_CONFIG_H
#define KV_TIERED_CONFIG_H

#include <stdint.h>

#include "base/core/error.h"

enum { TRD_MEMBERS_MAX = 16, TRD_NAME_MAX = 32 };

/** A member as the file describes it. Strings belong to the configuration. */
struct trd_member_config {
    const char *name, *uri;
    uint64_t capacity;       /* bytes; UINT64_MAX: no limit */
    uint64_t gib_month_nano; /* price of a GiB for a month, in 10^-9 of the currency */
    uint64_t request_nano;   /* price of a request, likewise */
    uint64_t deadline_ms;    /* of a call; 0: the member's own limit */
    bool read_only;
};

struct trd_config {
    struct trd_member_config members[TRD_MEMBERS_MAX]; /* fastest first */
    size_t n_members;
    uint8_t
        puts[TRD_MEMBERS_MAX]; /* indices of the members that take puts, the first choice first */
    size_t n_puts;
    uint8_t manifests; /* index of the member that has all manifests */
    uint64_t linger_ms, places;
    char *text; /* of the file */
};

/**
 * Read the file @path. Returns 0, and the caller ends *@ret with trd_config_fini; -EINVAL, -EFBIG,
 * -ENOMEM or the errno of opening it, with @error: "PATH:LINE: reason". Any thread.
 */
int trd_config_read(const char *path, struct trd_config *ret, struct kv_error *error);
void trd_config_fini(struct trd_config *config);

/** Return the path that a URI "tiered:/x" or "tiered:///x" names; NULL: another URI. */
const char *trd_config_path(const char *uri);

#endif
