// SPDX-License-Identifier: Apache-2.0
/**
 * Allocations that fail at a chosen moment. A unit test that includes this file is linked with
 * starve.c, through which its calls of malloc, calloc, realloc, reallocarray, strdup,
 * posix_memalign and mmap then go, and those of all the project's libraries in it; shared
 * libraries' and cmocka's own do not.
 *
 *     for (long n = 1;; n++) {
 *         starve_at(n);
 *         rc = what_allocates();
 *         if (!starved())
 *             break;             // it got all it asked for
 *         ... rc is -ENOMEM, and nothing has changed ...
 *     }
 *     starve_at(0);
 */
#ifndef KV_TESTS_STARVE_H
#define KV_TESTS_STARVE_H

#include <stdbool.h>

/** From now on: the calling thread's @n-th allocation (1: the next) fails, once. 0: none. */
void starve_at(long n);

/** Whether it has happened since starve_at. */
bool starved(void);

#endif
