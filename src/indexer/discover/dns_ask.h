// SPDX-License-Identifier: Apache-2.0
/**
 * Questions to name servers by c-ares, and the last answer to each. A server that fails leaves the last
 * answer as it is; "there is no such name" and "there are no such records" are answers.
 */
#ifndef KV_INDEXER_DISCOVER_DNS_ASK_H
#define KV_INDEXER_DISCOVER_DNS_ASK_H

#include "indexer/discover/source.h"

enum ki_dns_type { KI_DNS_A = 1, KI_DNS_TXT = 16, KI_DNS_AAAA = 28, KI_DNS_SRV = 33 };

/** A record of an answer. */
struct ki_dns_record {
    char text[256]; /* address, or target of a SRV without its last dot */
    uint32_t port;  /* of a SRV */
};

/** A question, its last answer, and how asking went. */
struct ki_dns_question {
    struct ki_dns_question *next;
    char name[256];
    enum ki_dns_type type;
    bool wanted;        /* asked in this look; others are forgotten at its end */
    bool pending;       /* of this look: not answered yet */
    bool failed;        /* of this look */
    const char *why;    /* of failed: a fixed phrase */
    uint32_t ttl_s;     /* of the last answer: of its records, or of their absence; 0: none yet */
    struct kv_buf data; /* of the last answer: struct ki_dns_record; of TXT the text */
    char chosen[64];    /* of A: the address by which the target is reached now; "": none */
};

struct ki_dns {
    struct ki_source *source;
    const char *servers; /* "ADDRESS[:PORT],..."; NULL: the system's */
    struct ki_dns_question *questions;
};

/** Find a question, or make it, and mark it as wanted. NULL: out of memory. */
struct ki_dns_question *ki_dns_want(struct ki_dns *dns, const char *name, enum ki_dns_type type);
/**
 * Ask all wanted questions that are pending, and wait for the answers. Returns 0, -ECANCELED (the source
 * was stopped), or -EIO with *@ret_why (no name servers).
 */
int ki_dns_ask(struct ki_dns *dns, const char **ret_why);
/** Begin a look: all questions are to be wanted again. */
void ki_dns_begin(struct ki_dns *dns);
/** End a look: forget the questions that it didn't want. */
void ki_dns_end(struct ki_dns *dns);
void ki_dns_fini(struct ki_dns *dns);

/**
 * Return the least time to live of the records in an answer's message, in seconds: of its answers, or
 * without any of the authority that tells of their absence. @fallback when the message makes no sense.
 */
uint32_t ki_dns_ttl(const unsigned char *message, size_t len, uint32_t fallback);

#endif
