// SPDX-License-Identifier: Apache-2.0
/*
 * Leased blocks by a carrier, the owner's side: as fuzz_lender, with readers that connect a carrier and
 * have blocks pushed. The carrier is the fuzzer's: a send ends when a step says so, well or not, also
 * long after its reader has given up or gone. Until then its blocks have the bytes of their keys.
 */
#include "lending.h"
#include "peer/lease/lend_impl.h"

#define MAX_SENDS 32

struct kvbm_carrier_peer {
    bool is_open;
};

struct sending {
    const struct kvbm_carrier_ends *ends; /* NULL: free */
    void *arg;
    struct kvbm_carrier_peer *peer;
    const struct kvbm_carrier_message *messages;
    uint32_t n;
    uint8_t keys[LEND_MOST]; /* as the blocks began */
};

static struct lend l;
static struct sending sends[MAX_SENDS];
static bool refuses;

/* Name the key whose bytes a message has. */
static uint8_t key_of(const struct kvbm_carrier_message *message)
{
    const uint8_t *bytes = message->pieces[0].iov_base;

    REQUIRE(message->n == 1 && message->pieces[0].iov_len == LEND_BLOCK_BYTES);
    for (unsigned key = 1; key <= LEND_KEYS; key++) {
        if (lend_is_block((uint8_t)key, bytes))
            return (uint8_t)key;
    }
    abort();
}

static int peer_create(struct kvbm_carrier_node *node, const void *address, size_t len,
                       struct kvbm_carrier_peer **ret)
{
    (void)node;
    REQUIRE(address && len);
    *ret = calloc(1, sizeof(**ret));
    REQUIRE(*ret);
    (*ret)->is_open = true;
    return 0;
}

/* End a send. The blocks are as they were: nobody has written there. */
static void end_send(struct sending *s, int err)
{
    struct sending was = *s;

    for (uint32_t i = 0; i < was.n; i++)
        REQUIRE(key_of(&was.messages[i]) == was.keys[i]);
    s->ends = NULL;
    was.ends->read(was.arg);
    was.ends->done(was.arg, err);
    fuzz_turns(l.agent);
}

static void peer_close(struct kvbm_carrier_peer *peer)
{
    REQUIRE(peer->is_open);
    for (size_t i = 0; i < MAX_SENDS; i++) {
        if (sends[i].ends && sends[i].peer == peer)
            sends[i].peer = NULL; /* it ends sooner or later */
    }
    free(peer);
}

static int send_blocks(struct kvbm_carrier_peer *peer, uint64_t tag,
                       const struct kvbm_carrier_message *messages, uint32_t n,
                       const struct kvbm_carrier_ends *ends, void *arg)
{
    size_t at = 0;

    (void)tag;
    REQUIRE(peer->is_open && n && n <= LEND_MOST);
    while (at < MAX_SENDS && sends[at].ends)
        at++;
    if (at == MAX_SENDS || refuses)
        return -ENOMEM;
    sends[at] = (struct sending){ends, arg, peer, messages, n, {0}};
    for (uint32_t i = 0; i < n; i++)
        sends[at].keys[i] = key_of(&messages[i]);
    return 0;
}

static void receive_over(struct kvbm_carrier_node *node, uint64_t tag)
{
    (void)node, (void)tag;
}

static const struct kvbm_carrier_abi abi = {.peer_create = peer_create,
                                            .peer_close = peer_close,
                                            .send = send_blocks,
                                            .receive_over = receive_over};

/* ---- steps ---- */

static void say_connect(struct lend_reader *r, struct lend_input *in)
{
    static const uint8_t address[3] = "ab";

    (void)lend_ask(r, KVBM_ASK_NIXL);
    fuzz_frame(l.agent, r->fd, KVBM_ASK_NIXL, r->last_id, address, lend_next(in) % 4 ? 2 : 0);
}

static void say_push(struct lend_reader *r, struct lend_input *in)
{
    struct lend_lease lease = lend_choose(&l, r, in);
    struct lend_asked *asked = lend_ask(r, KVBM_ASK_NIXL_PUSH);
    struct kv_buf bytes = KV_BUF_INIT;
    uint32_t places[LEND_MOST], n = lend_places(&lease, asked, places, in);

    kvbm_pushed_write(&bytes, lease.id, lend_next(in) % 2, r->last_id, places, n);
    lend_say(&l, r, KVBM_ASK_NIXL_PUSH, &bytes);
}

static void step(struct lend_input *in)
{
    uint8_t what = lend_next(in);
    struct lend_reader *r = &l.readers[what >> 4 & 1];
    struct sending *s = &sends[lend_next(in) % MAX_SENDS];

    refuses = what & 0x40;
    switch (what & 7) {
    case 0:
        say_connect(r, in);
        break;
    case 1:
    case 2:
        say_push(r, in);
        break;
    case 3:
        if (s->ends)
            end_send(s, what & 0x20 ? -EPIPE : 0);
        break;
    default: /* an update would wait for the sends */
        if (in->at < in->end && (*in->at & 15) == 12)
            in->at++;
        else
            lend_step(&l, in);
        break;
    }
    lend_hear(&l, r);
}

static void begin(void)
{
    lend_begin(&l);
    l.agent->carriers[KVBM_BY_NIXL].abi = &abi;
    REQUIRE(kvbm_lender_serve_carriers(l.agent->lender) == 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct lend_input in = {data, data + KV_MIN(size, (size_t)4096)};

    if (!l.agent)
        begin();
    lend_start(&l);
    while (in.at < in.end)
        step(&in);
    lend_hang_up(&l);
    for (size_t i = 0; i < MAX_SENDS; i++) {
        if (sends[i].ends)
            end_send(&sends[i], i % 2 ? -EPIPE : 0);
    }
    lend_check(&l);
    return 0;
}
