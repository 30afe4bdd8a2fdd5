// SPDX-License-Identifier: Apache-2.0
/* The state of a lender: two readers lease, read, renew, release, give up and vanish, in any order, while
 * the owner stores, evicts and updates. lending.h says what must hold. */
#include "lending.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static struct lend l;
    struct lend_input in = {data, data + KV_MIN(size, (size_t)4096)};

    if (!l.agent)
        lend_begin(&l);
    lend_start(&l);
    while (in.at < in.end)
        lend_step(&l, &in);
    lend_hang_up(&l);
    lend_check(&l);
    return 0;
}
