// SPDX-License-Identifier: Apache-2.0
/* kv-selector: choose the worker for each prompt, and book it. */
#include "selector/selector.h"

int main(int argc, char **argv)
{
    static struct ksel_options options;

    return ki_main(&ksel_program, &ksel_addition, argc, argv, &options.indexer);
}
