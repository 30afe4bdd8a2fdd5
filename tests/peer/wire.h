// SPDX-License-Identifier: Apache-2.0
/**
 * A cable between two network namespaces that loses, delays, repeats and damages packets, or passes
 * none: two TUN devices, and a process that carries packets from one to the other. Needs root.
 */
#ifndef KV_TEST_WIRE_H
#define KV_TEST_WIRE_H

#include <stdatomic.h>
#include <stdint.h>

#include "index/random.h"

struct wire;

/** How bad a wire is, in thousandths of its packets. May change at any time. */
struct wire_faults {
    atomic_uint lost, repeated, damaged; /* damaged: one bit is another */
    atomic_uint delay_us; /* at most; each packet has its own, so that they overtake */
    atomic_bool cut;
};

/** One end: a namespace with an address. */
struct wire_end {
    int net; /* for setns */
    int tun;
};

/**
 * Move this thread into a new network namespace, in which @address (IPv4) of a /24 is the end of a
 * wire. Returns 0 or a negative errno value: no right, or no such devices here.
 */
int wire_end_open(struct wire_end *end, const char *address);

/**
 * Carry packets between two ends until wire_stop, which frees the wire and closes both. A process of
 * its own does it: the caller may fork others later. Returns NULL without memory.
 */
struct wire *wire_start(const struct wire_end *a, const struct wire_end *b, uint64_t seed);
struct wire_faults *wire_faults(struct wire *wire);
uint64_t wire_carried(const struct wire *wire);
void wire_stop(struct wire *wire);

#endif
