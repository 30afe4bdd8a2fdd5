// SPDX-License-Identifier: Apache-2.0
/** reason.h: log hook of the Python package, and the reason of the calling thread's last failure. */
#ifndef KVASIR_REASON_H
#define KVASIR_REASON_H

#include "kv_types.h"

/** Take a log line (kv_log_fn). Lines within a call become its reason; others go to stderr. */
KV_API void kvpy_log(void *arg, int level, const char *line);

/** Print lines up to @level to stderr: -1 none, 0 errors, 1 warnings (default), 2 info, 3 debug. */
KV_API void kvpy_show(int level);

/** Begin a call on this thread: forget the reason, keep lines instead of printing them. */
KV_API void kvpy_begin(void);

/** End the call. Returns its last error or warning, "" without one; valid until the next call. */
KV_API const char *kvpy_end(int failed);

#endif
