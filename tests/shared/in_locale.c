// SPDX-License-Identifier: Apache-2.0
/* Preloaded into a test program: it begins in the locale that the environment names, as an engine may
 * that calls setlocale. */
#include <locale.h>
#include <stdio.h>
#include <stdlib.h>

__attribute__((constructor)) static void begin(void)
{
    const char *wanted = getenv("LC_ALL"), *got = setlocale(LC_ALL, "");

    if (!wanted || !got) {
        fprintf(stderr, "in_locale: there is no locale %s\n", wanted ? wanted : "");
        exit(99);
    }
}
