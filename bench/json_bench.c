// SPDX-License-Identifier: Apache-2.0
/* Reading arrays of token ids and of block hashes: GB/s of JSON text per second of the thread's CPU
 * time, so that other load on the machine matters little. Yardsticks of the same run: memcpy of the
 * text, and a simple loop around strtoul. Every result is compared with the numbers that the text
 * was made from. */
#include <inttypes.h>
#include <stdio.h>

#include "base/core/clock.h"
#include "base/json/json.h"
#include "support.h"

enum { ROUNDS = 21 };
static const uint64_t round_ns = 10 * KV_NS_PER_MS;

struct input {
    const char *name;
    struct kv_buf text;
    uint64_t *values;
    size_t n;
    bool hashes;
    struct kv_buf out;
};

static uint64_t next_random(uint64_t *state)
{
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    return *state * UINT64_C(2685821657736338717);
}

/* Make an input as in a request: an object with the array in it. */
static void make_input(struct input *input, const char *name, size_t n, bool hashes,
                       const char *separator)
{
    uint64_t state = 88172645463325252;

    *input = (struct input){.name = name, .n = n, .hashes = hashes};
    input->values = malloc(n * sizeof(*input->values));
    if (!input->values)
        abort();
    kv_buf_puts(&input->text, "{\"token_ids\":[");
    for (size_t i = 0; i < n; i++) {
        input->values[i] = hashes ? next_random(&state) : 1 + next_random(&state) % 200000;
        kv_buf_puts(&input->text, i ? separator : "");
        kv_buf_put_u64(&input->text, input->values[i]);
    }
    kv_buf_puts(&input->text, "]}");
}

static void read_ours(struct input *input)
{
    struct kv_json j;
    struct kv_str key;
    size_t n = 0;

    kv_buf_clear(&input->out);
    kv_json_init(&j, input->text.data, input->text.len);
    kv_json_object(&j);
    while (kv_json_next_key(&j, &key))
        n = input->hashes ? kv_json_bits64_array(&j, &input->out)
                          : kv_json_u32_array(&j, &input->out);
    if (kv_json_finish(&j) < 0 || n != input->n)
        abort();
}

static void read_naive(struct input *input)
{
    const char *p = strchr(kv_buf_cstr(&input->text), '[') + 1;

    kv_buf_clear(&input->out);
    for (;;) {
        char *end;
        unsigned long value = strtoul(p, &end, 10);

        if (input->hashes) {
            kv_buf_append(&input->out, &(uint64_t){value}, sizeof(uint64_t));
        } else {
            kv_buf_append(&input->out, &(uint32_t){(uint32_t)value}, sizeof(uint32_t));
        }
        if (*end != ',')
            break;
        p = end + 1;
    }
}

static void copy(struct input *input)
{
    kv_buf_clear(&input->out);
    kv_buf_append(&input->out, input->text.data, input->text.len);
    __asm__ volatile("" ::"r"(input->out.data) : "memory");
}

static void check(const struct input *input)
{
    for (size_t i = 0; i < input->n; i++) {
        uint64_t wide;
        uint32_t narrow;

        memcpy(&wide, input->out.data + (input->hashes ? i * 8 : 0), sizeof(wide));
        memcpy(&narrow, input->out.data + (input->hashes ? 0 : i * 4), sizeof(narrow));
        if ((input->hashes ? wide : narrow) != input->values[i])
            abort();
    }
}

static double measure(struct input *input, void (*fn)(struct input *))
{
    double rates[ROUNDS];
    size_t batch = 1 + 200000 / input->text.len; /* reading the clock is a system call */

    for (int round = 0; round < ROUNDS; round++) {
        uint64_t begin = kv_clock_ns_(CLOCK_THREAD_CPUTIME_ID), now;
        size_t times = 0;

        do {
            for (size_t i = 0; i < batch; i++)
                fn(input);
            times += batch;
            now = kv_clock_ns_(CLOCK_THREAD_CPUTIME_ID);
        } while (now - begin < round_ns);
        rates[round] = (double)(times * input->text.len) / (double)(now - begin);
    }
    qsort(rates, ROUNDS, sizeof(rates[0]), bench_by_value);
    return rates[ROUNDS / 2];
}

static void run(const char *name, size_t n, bool hashes, const char *separator)
{
    struct input input;
    double ours, naive, copied;

    make_input(&input, name, n, hashes, separator);
    ours = measure(&input, read_ours);
    check(&input);
    naive = measure(&input, read_naive);
    check(&input);
    copied = measure(&input, copy);
    bench_line("json",
               "'figure':'%s','values':%zu,'separator':'%s','bytes':%zu,'gb_per_s':%.2f,'ns_per_"
               "value':%.2f,'strtoul_gb_per_s':%.2f,'memcpy_gb_per_s':%.2f,'median_of':%d",
               name, n, separator, input.text.len, ours, (double)input.text.len / ours / (double)n,
               naive, copied, ROUNDS);
    kv_buf_fini(&input.text);
    kv_buf_fini(&input.out);
    free(input.values);
}

int main(int argc, char **argv)
{
    static const size_t sizes[] = {16, 512, 8192, 1000000};

    bench_usage(argc, argv, NULL);
    for (size_t i = 0; i < KV_COUNT(sizes); i++) {
        run("token_ids", sizes[i], false, ",");
        run("token_ids", sizes[i], false, ", ");
        run("block_hashes", sizes[i], true, ",");
        run("block_hashes", sizes[i], true, ", ");
    }
    return 0;
}
