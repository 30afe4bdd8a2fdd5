// SPDX-License-Identifier: Apache-2.0
#include "base/core/ascii.h"

#include <pthread.h>

static locale_t c_locale;

static void make(void)
{
    c_locale = newlocale(LC_ALL_MASK, "C", (locale_t)0);
}

locale_t kv_c_locale(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;

    pthread_once(&once, make);
    return c_locale;
}
