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
#ifndef KV_INDEXER_HTTP_BUDGET_H
#define KV_INDEXER_HTTP_BUDGET_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct ki_budget;

struct ki_client {
    struct ki_client *next; /* next client in the bucket */
    uint8_t address[16];    /* IPv4 as ::ffff:0:0/96 */
    _Atomic uint32_t connections;
    size_t bytes; /* guarded by the budget's lock */
};

int ki_budget_create(size_t bytes, struct ki_budget **ret);
/* After all clients have left; NULL is a no-op. */
void ki_budget_destroy(struct ki_budget *budget);

/** Add a connection of @address (IPv4 mapped). Returns its client, NULL when out of memory. */
struct ki_client *ki_budget_join(struct ki_budget *budget, const uint8_t address[16]);
/** End a connection of @client. The last one frees @client. */
void ki_budget_leave(struct ki_budget *budget, struct ki_client *client);

/** Take @n bytes. Returns false when the client would hold more than would stay free. */
bool ki_budget_take(struct ki_budget *budget, struct ki_client *client, size_t n);
void ki_budget_give(struct ki_budget *budget, struct ki_client *client, size_t n);

size_t ki_budget_used(struct ki_budget *budget);
uint32_t ki_budget_clients(struct ki_budget *budget);

#endif
