// SPDX-License-Identifier: Apache-2.0
/**
 * Memory for request bodies and large replies, shared out among clients.
 *
 * A client is an IPv4 address, or an IPv6 network of 64 bits, since one machine may use any address
 * of it. A client may hold as much as is free: alone, half of the budget; beside a client that has
 * its half, half of the rest. Whatever one client takes, the next one finds room.
 *
 * Thread-safe.
 */
#ifndef KV_INDEXER_BUDGET_H
#define KV_INDEXER_BUDGET_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct ki_budget;

struct ki_client {
    struct ki_client *next; /* in its bucket */
    uint8_t address[16];    /* IPv4 as ::ffff:0:0/96 */
    _Atomic uint32_t connections;
    size_t bytes; /* guarded by the budget's lock */
};

int ki_budget_create(size_t bytes, struct ki_budget **ret);
void ki_budget_destroy(struct ki_budget *budget); /* all clients have left; NULL is a no-op */

/** A connection of @address (IPv4 mapped) has come. NULL when out of memory. */
struct ki_client *ki_budget_join(struct ki_budget *budget, const uint8_t address[16]);
/** Note that a connection of @client has ended. The last one frees @client. */
void ki_budget_leave(struct ki_budget *budget, struct ki_client *client);

/** Take @n bytes. False: the client would hold more than would be left. */
bool ki_budget_take(struct ki_budget *budget, struct ki_client *client, size_t n);
void ki_budget_give(struct ki_budget *budget, struct ki_client *client, size_t n);

size_t ki_budget_used(struct ki_budget *budget);
uint32_t ki_budget_clients(struct ki_budget *budget);

#endif
