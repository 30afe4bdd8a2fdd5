// SPDX-License-Identifier: Apache-2.0
#include "kvx/log.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>

#include "kvx_ext.h"

/* Held while a line is delivered: after kvx_set_log returns, the old function is never called. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static kvx_log_fn sink;
static void *sink_arg;

void kvx_set_log(kvx_log_fn fn, void *arg)
{
    pthread_mutex_lock(&lock);
    sink = fn;
    sink_arg = arg;
    pthread_mutex_unlock(&lock);
}

void kvx_log(const char *format, ...)
{
    char line[512];
    va_list args;

    va_start(args, format);
    (void)vsnprintf(line, sizeof(line), format, args);
    va_end(args);
    pthread_mutex_lock(&lock);
    if (sink)
        sink(sink_arg, 1, line); /* the library logs warnings only */
    else
        (void)fprintf(stderr, "kvx: %s\n", line);
    pthread_mutex_unlock(&lock);
}
