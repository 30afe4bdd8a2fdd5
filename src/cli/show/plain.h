// SPDX-License-Identifier: Apache-2.0
/** Text of others for a terminal: it can neither move the cursor nor hide what follows. */
#ifndef KV_CLI_SHOW_PLAIN_H
#define KV_CLI_SHOW_PLAIN_H

#include "base/core/buf.h"

/**
 * Append the @len bytes of @text. Control characters, and those that turn the direction of writing,
 * become \uXXXX; bytes that are no UTF-8 become \xXX. A backslash is doubled, so that nothing else
 * looks like that.
 */
void kc_put_plain(struct kv_buf *out, const char *text, size_t len);

#endif
