// SPDX-License-Identifier: Apache-2.0
/** Progress lines of the programs that fault tests kill. */
#ifndef KV_TEST_SAY_H
#define KV_TEST_SAY_H

#include <stddef.h>
#include <stdlib.h>
#include <termios.h>
#include <unistd.h>

/* Whole, and where a console's buffer would be lost with its machine, out of it. */
static inline void say(const char *text, size_t len)
{
    while (len) {
        ssize_t n = write(1, text, len);

        if (n < 0)
            exit(2);
        text += n;
        len -= (size_t)n;
    }
    if (isatty(1))
        tcdrain(1);
}

#endif
