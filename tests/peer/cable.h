// SPDX-License-Identifier: Apache-2.0
/**
 * A cable between two network namespaces that loses, delays, repeats and damages packets, or passes
 * none: two TUN devices, and a process that carries packets from one to the other. Needs root.
 */
#ifndef KV_TEST_CABLE_H
#define KV_TEST_CABLE_H

#include <stdatomic.h>
#include <stdint.h>

#include "index/random.h"

struct cable;

/** How bad a cable is, in thousandths of its packets. May change at any time. */
struct cable_faults {
    atomic_uint lost, repeated, damaged; /* damaged: one bit is another */
    atomic_uint delay_us; /* at most; each packet has its own, so that they overtake */
    atomic_bool cut;
};

/** One end: a namespace with an address. */
struct cable_end {
    int net; /* for setns */
    int tun;
};

/**
 * Move this thread into a new network namespace, in which @address (IPv4) of a /24 is the end of a
 * cable. Returns 0 or a negative errno value: no right, or no such devices here.
 */
int cable_end_open(struct cable_end *end, const char *address);

/**
 * Carry packets between two ends until cable_stop, which frees the cable and closes both. A process
 * of its own does it: the caller may fork others later. Returns NULL without memory.
 */
struct cable *cable_start(const struct cable_end *a, const struct cable_end *b, uint64_t seed);
struct cable_faults *cable_faults(struct cable *cable);
uint64_t cable_carried(const struct cable *cable);
void cable_stop(struct cable *cable);

#endif
