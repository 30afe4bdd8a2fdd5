// SPDX-License-Identifier: Apache-2.0
/**
 * Instance ids of workers: numbers, or names such as those of pods. A name stands for a number that
 * follows from the name alone, so that all replicas and peers find the same one.
 */
#ifndef KV_BASE_INSTANCE_H
#define KV_BASE_INSTANCE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define KV_INSTANCE_NAME_MAX 253 /* bytes of a name: as long as a DNS name, and so a pod's */

/** Set in the number of each name. Numbers that clients choose usually lack it, or may have it. */
#define KV_INSTANCE_NAMED (UINT64_C(1) << 63)

/** How an instance is called by a client. */
enum kv_instance_kind { KV_INSTANCE_NUMBER, KV_INSTANCE_NAME };

/**
 * Read the id of @len bytes at @text. Digits alone are the number that they spell, without leading
 * zeros. Anything else is a name: 1 to KV_INSTANCE_NAME_MAX bytes of UTF-8 without control
 * characters. Its number is its XXH3-64 with KV_INSTANCE_NAMED set. Returns an enum
 * kv_instance_kind, or -EINVAL with *@ret_why (may be NULL).
 */
int kv_instance_parse(const char *text, size_t len, uint64_t *ret_number, const char **ret_why);

#define KV_INSTANCE_DIGITS 21                             /* room for any number, with its NUL */
#define KV_INSTANCE_QUOTED (2 * KV_INSTANCE_NAME_MAX + 3) /* room for any name by kv_log_quote */

/** Return @name, or (NULL) the number, written to @digits. */
const char *kv_instance_text(uint64_t number, const char *name, char digits[KV_INSTANCE_DIGITS]);

/** Return true when the text is a name, and @number is its number. */
bool kv_instance_is(uint64_t number, const char *text, size_t len);

#endif
