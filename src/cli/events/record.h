// SPDX-License-Identifier: Apache-2.0
/** Files of recorded messages. The format: docs/formats.md, "Recorded events". Thread-confined. */
#ifndef KV_CLI_EVENTS_RECORD_H
#define KV_CLI_EVENTS_RECORD_H

#include <stdio.h>

#include "base/core/error.h"
#include "cli/events/message.h"

#define KC_RECORD_HEADER 16
/** Most bytes of a record behind its first two fields. */
#define KC_RECORD_MAX (64u << 20)

/** Write the file's header. Returns 0, or -EIO and the like. */
int kc_record_begin(FILE *file);
/** Append a message. Returns 0, -EMSGSIZE (too long a message), or another errno. */
int kc_record_write(FILE *file, const struct kc_message *message);

/** Check the header in the @len bytes at @data. Returns 0, or -EPROTO with *@ret_why. */
int kc_record_check(const void *data, size_t len, const char **ret_why);
/**
 * Read the record at @data, of which there are @len bytes. @ret points into them. Returns its bytes; 0:
 * there is none any more; -EPROTO with *@ret_why: it isn't whole, or no record.
 */
long kc_record_read(const void *data, size_t len, struct kc_message *ret, const char **ret_why);

#endif
