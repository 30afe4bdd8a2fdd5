// SPDX-License-Identifier: Apache-2.0
/** log.h: libkvx's few log lines, to the caller's function or standard error. */
#ifndef KVX_LOG_H
#define KVX_LOG_H

__attribute__((format(printf, 1, 2))) void kvx_log(const char *format, ...);

#endif
