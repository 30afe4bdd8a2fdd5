// SPDX-License-Identifier: Apache-2.0
/**
 * Share the memory for request bodies and large replies among clients.
 *
 * A client is an IPv4 address, or an IPv6 network of 64 bits, since one machine may use any address
 * in it. A client may hold as much as is free: alone, half of the budget; beside a client that has
 * its half, half of the rest. However much one client takes, the next one finds room.
 *
 * Thread-safe.
 */
#ifndef KV_HTTP_BUDGET_H
#define KV_HTTP_BUDGET_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct kh_budget;

struct kh_client {
    struct kh_client *next; /* next client in the bucket */
    uint8_t address[16];    /* IPv4 as ::ffff:0:0/96 */
    _Atomic uint32_t connections;
    size_t bytes; /* guarded by the budget's lock */
};

int kh_budget_create(size_t bytes, struct kh_budget **ret);
/* After all clients have left; NULL is a no-op. */
void kh_budget_destroy(struct kh_budget *budget);

/** Add a connection of @address (IPv4 mapped). Returns its client, NULL when out of memory. */
struct kh_client *kh_budget_join(struct kh_budget *budget, const uint8_t address[16]);
/** End a connection of @client. The last one frees @client. */
void kh_budget_leave(struct kh_budget *budget, struct kh_client *client);

/** Take @n bytes. Returns false when the client would hold more than would stay free. */
bool kh_budget_take(struct kh_budget *budget, struct kh_client *client, size_t n);
void kh_budget_give(struct kh_budget *budget, struct kh_client *client, size_t n);

size_t kh_budget_used(struct kh_budget *budget);
uint32_t kh_budget_clients(struct kh_budget *budget);

#endif
