// SPDX-License-Identifier: Apache-2.0
/**
 * Records of a test's queries, to compare the answers of two builds (tools/compare-answers.py).
 * KV_TEST_RECORD names the file, to which each query appends four bytes; without it, none is written.
 */
#ifndef KV_TESTS_MODELS_RECORD_H
#define KV_TESTS_MODELS_RECORD_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

struct recorded {
    uint8_t query;   /* check value: two builds whose queries differ can't be compared */
    uint8_t claimed; /* the indexer's answer */
    uint8_t truth;   /* the right one */
    uint8_t partial; /* 1: the view was partial */
};

static inline FILE *record_file(void)
{
    static FILE *file;
    const char *name = file ? NULL : getenv("KV_TEST_RECORD");

    if (name && !(file = fopen(name, "ab")))
        abort();
    return file;
}

static inline void record_answer(uint64_t query, size_t claimed, size_t truth, bool partial)
{
    struct recorded r = {(uint8_t)query, (uint8_t)claimed, (uint8_t)truth, partial};
    FILE *file = record_file();

    if (file && fwrite(&r, sizeof(r), 1, file) != 1)
        abort();
}

#endif
