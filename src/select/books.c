// SPDX-License-Identifier: Apache-2.0
/*
 * Bookings. A booking has two legs: the worker that serves the request, and the one that computes its
 * prompt, often the same. Until the first token the prompt's uncovered tokens wait at the second leg.
 * Of a pair the second leg is free after the first token.
 */
#include "base/core/clock.h"
#include "base/core/log.h"
#include "select/impl.h"

static struct kvsel_book *book_of(struct kvsel_name *name)
{
    return (struct kvsel_book *)name; /* its first member */
}

static bool is_pair(const struct kvsel_book *book)
{
    return book->worker != book->prefill;
}

/* Count a leg of @book at @slot. */
static void enter(struct kvsel *s, const struct kvsel_book *book, uint32_t slot)
{
    size_t fresh =
        kvsel_claims_add(&s->claims, KVSEL_RUNNING, slot, book->chain->hashes, book->chain->n);

    s->slots[slot].n_bookings++;
    s->requests[slot]++;
    s->context[slot] += (double)(book->tokens + book->output);
    s->blocks[slot] += (double)fresh * s->opts.stride + book->tail;
}

static void leave(struct kvsel *s, const struct kvsel_book *book, uint32_t slot)
{
    size_t last =
        kvsel_claims_take(&s->claims, KVSEL_RUNNING, slot, book->chain->hashes, book->chain->n);

    s->requests[slot]--;
    s->context[slot] -= (double)(book->tokens + book->output);
    s->blocks[slot] -= (double)last * s->opts.stride + book->tail;
    if (s->slots[slot].n_bookings-- == 1)
        kvsel_slot_drop(s, slot);
}

/* Take the uncovered tokens from those that wait. */
static void end_wait(struct kvsel *s, const struct kvsel_book *book)
{
    kvsel_slot_wait(s, book->prefill, -book->uncovered);
    s->queued[book->prefill]--;
}

static void destroy(struct kvsel *s, struct kvsel_book *book, enum kvsel_end end)
{
    if (!book->first_token)
        end_wait(s, book);
    for (int i = 0; i < 2; i++) {
        if (book->soon[i] && end == KVSEL_LOST)
            kvsel_soon_end(s, book->soon[i]);
        else if (book->soon[i])
            book->soon[i]->owner = NULL;
    }
    kvsel_names_remove(&s->books, &book->name);
    if (is_pair(book))
        leave(s, book, book->prefill);
    leave(s, book, book->worker);
    kvsel_chain_drop(book->chain);
    free(book);
}

/* ---- sessions ---- */

static void forget_session(struct kvsel *s, struct kvsel_session *session)
{
    kvsel_names_remove(&s->sessions, &session->name);
    free(session);
}

static void note_session(struct kvsel *s, const char *text, uint32_t slot, uint64_t now_ns)
{
    size_t len = strlen(text);
    struct kvsel_session *session =
        (struct kvsel_session *)kvsel_names_find(&s->sessions, text, len);

    if (session) {
        kvsel_names_touch(&s->sessions, &session->name);
    } else {
        session = malloc(sizeof(*session) + len + 1);
        if (!session)
            return; /* the session stays without a place */
        memcpy(session + 1, text, len + 1);
        session->name = (struct kvsel_name){.text = (char *)(session + 1), .len = len};
        kvsel_names_add(&s->sessions, &session->name);
        if (s->sessions.n > s->opts.max_sessions)
            forget_session(s, (struct kvsel_session *)s->sessions.oldest);
    }
    session->holder = s->slots[slot].holder;
    session->used_ns = now_ns;
}

uint32_t kvsel_session_slot(struct kvsel *s, const char *text, uint64_t now_ns)
{
    struct kvsel_session *session;

    while (s->sessions.oldest) { /* those whose time is over */
        session = (struct kvsel_session *)s->sessions.oldest;
        if (now_ns < session->used_ns || now_ns - session->used_ns < s->opts.session_ns)
            break;
        forget_session(s, session);
    }
    session = (struct kvsel_session *)kvsel_names_find(&s->sessions, text, strlen(text));
    return session ? kvsel_slot_find(s, session->holder) : KVSEL_NO_SLOT;
}

/* ---- calls ---- */

/* Make a booking of @id whose prompt is s->strided. */
static struct kvsel_book *make(const struct kvsel *s, const char *id, size_t id_len)
{
    struct kvsel_book *book = malloc(sizeof(*book) + id_len);

    if (!book)
        return NULL;
    *book = (struct kvsel_book){.name = {.text = (char *)(book + 1), .len = id_len}};
    if (id_len)
        memcpy(book + 1, id, id_len);
    book->chain = kvsel_chain_make(s->strided, s->n_strided);
    if (!book->chain) {
        free(book);
        return NULL;
    }
    return book;
}

/* Note what follows from a booking and may be left undone: predictions, adapters, its session. */
static void follow(struct kvsel *s, struct kvsel_book *book, const struct kvsel_request *r,
                   uint64_t now_ns)
{
    uint64_t until = now_ns + KV_MIN(s->opts.predict_ns, UINT64_MAX - now_ns);
    int rc = 0;

    if (s->opts.predict_ns != UINT64_MAX && book->chain->n > 0) {
        rc |= kvsel_soon_add(s, book->worker, book->chain, until, &book->soon[0]);
        if (is_pair(book))
            rc |= kvsel_soon_add(s, book->prefill, book->chain, until, &book->soon[1]);
    }
    if (r->lora && *r->lora) {
        rc |= kvsel_lora_use(s, book->worker, r->lora);
        if (is_pair(book))
            rc |= kvsel_lora_use(s, book->prefill, r->lora);
    }
    if (r->session && s->opts.session_ns)
        note_session(s, r->session, book->worker, now_ns);
    if (rc < 0)
        kv_log_warn("select", "no memory: a booking has no prediction", NULL);
}

/* Find or make the slots of both legs. A slot that was made in vain is dropped again. */
static int make_slots(struct kvsel *s, const struct kvsel_choice *choice, struct kvsel_book *book)
{
    int rc = kvsel_slot_make(s, choice->worker, &book->worker);

    if (rc < 0)
        return rc;
    book->prefill = book->worker;
    if (choice->paired)
        rc = kvsel_slot_make(s, choice->prefill, &book->prefill);
    if (rc < 0)
        kvsel_slot_drop(s, book->worker);
    return rc;
}

int kvsel_book(struct kvsel *s, const char *id, size_t id_len, const struct kvsel_request *request,
               const struct kvsel_choice *choice, uint64_t now_ns)
{
    struct kvsel_choice c = {0};
    struct kvsel_book *book;
    struct kvsel_ask ask;
    uint64_t blocks;
    int rc = kvsel_ask(s, request, now_ns, &ask);

    if (rc < 0 || !id || !kv_sized(choice, "kvsel_choice"))
        return -EINVAL;
    KVSEL_READ(&c, choice);
    if (kvsel_names_find(&s->books, id, id_len)) {
        s->stats.duplicates++;
        return -EEXIST;
    }
    if (s->books.n >= s->opts.max_bookings)
        return -ENOSPC;
    if (kvsel_stride(s, &ask.r) < 0 || kvsel_claims_reserve(&s->claims, 2 * s->n_strided) < 0)
        return -ENOMEM;
    book = make(s, id, id_len);
    if (!book)
        return -ENOMEM;
    rc = make_slots(s, &c, book);
    if (rc < 0) {
        kvsel_chain_drop(book->chain);
        free(book);
        return rc;
    }
    book->tokens = ask.r.tokens;
    book->uncovered = (double)KV_MIN(c.uncovered, ask.r.tokens);
    blocks = (ask.r.tokens + s->opts.block_size - 1) / s->opts.block_size;
    book->tail = (double)(blocks - (uint64_t)book->chain->n * s->opts.stride);
    book->created_ns = book->progress_ns = now_ns;
    book->origin = ask.r.origin;
    book->stamp = ask.r.stamp;
    enter(s, book, book->worker);
    if (is_pair(book))
        enter(s, book, book->prefill);
    s->queued[book->prefill]++;
    kvsel_slot_wait(s, book->prefill, book->uncovered);
    book->ahead = s->waiting[book->prefill];
    kvsel_names_add(&s->books, &book->name);
    follow(s, book, &ask.r, now_ns);
    s->stats.booked++;
    return 0;
}

static struct kvsel_book *find(struct kvsel *s, const char *id, size_t id_len)
{
    struct kvsel_name *name = id ? kvsel_names_find(&s->books, id, id_len) : NULL;

    s->stats.unknown += !name;
    return name ? book_of(name) : NULL;
}

static void progress(struct kvsel *s, struct kvsel_book *book, uint64_t now_ns)
{
    book->progress_ns = KV_MAX(book->progress_ns, now_ns);
    kvsel_names_touch(&s->books, &book->name);
}

/* Learn the speed of the worker that computed the prompt. */
static void learn(struct kvsel *s, const struct kvsel_book *book, uint64_t now_ns)
{
    struct kvsel_speed *speed = &s->slots[book->prefill].speed;
    double seconds =
        now_ns > book->created_ns ? (double)(now_ns - book->created_ns) / (double)KV_NS_PER_S : 0;

    if (!s->opts.equal_speed && kvsel_speed_sample(speed, book->ahead, seconds, &s->fleet_speed))
        s->factor[book->prefill] = kvsel_speed_factor(speed, s->fleet_speed);
}

int kvsel_first_token(struct kvsel *s, const char *id, size_t id_len, uint64_t now_ns)
{
    struct kvsel_book *book = find(s, id, id_len);

    if (!book)
        return -ENOENT;
    progress(s, book, now_ns);
    if (book->first_token)
        return 0;
    learn(s, book, now_ns);
    end_wait(s, book);
    book->first_token = true;
    if (is_pair(book)) {
        uint32_t prefill = book->prefill;

        book->prefill = book->worker;
        leave(s, book, prefill);
    }
    return 0;
}

int kvsel_output(struct kvsel *s, const char *id, size_t id_len, uint64_t n, uint64_t now_ns)
{
    struct kvsel_book *book = find(s, id, id_len);

    if (!book)
        return -ENOENT;
    progress(s, book, now_ns);
    n = KV_MIN(n, UINT32_MAX - KV_MIN(book->output, UINT32_MAX));
    book->output += n;
    s->context[book->worker] += (double)n;
    if (is_pair(book))
        s->context[book->prefill] += (double)n;
    return 0;
}

int kvsel_free(struct kvsel *s, const char *id, size_t id_len, enum kvsel_end end, uint64_t now_ns)
{
    struct kvsel_book *book = find(s, id, id_len);

    (void)now_ns;
    if (!book)
        return -ENOENT;
    s->stats.freed++;
    s->stats.lost += end == KVSEL_LOST;
    destroy(s, book, end);
    return 0;
}

static struct kvsel_booking booking_of(const struct kvsel *s, const struct kvsel_book *book)
{
    return (struct kvsel_booking){.size = sizeof(struct kvsel_booking),
                                  .id = book->name.text,
                                  .id_len = book->name.len,
                                  .worker = s->slots[book->worker].holder,
                                  .prefill = s->slots[book->prefill].holder,
                                  .paired = is_pair(book),
                                  .first_token = book->first_token,
                                  .tokens = book->tokens,
                                  .uncovered = (uint64_t)book->uncovered,
                                  .output = book->output,
                                  .created_ns = book->created_ns,
                                  .progress_ns = book->progress_ns,
                                  .hashes = book->chain->hashes,
                                  .n_hashes = book->chain->n,
                                  .origin = book->origin,
                                  .stamp = book->stamp};
}

int kvsel_get_booking(const struct kvsel *s, const char *id, size_t id_len,
                      struct kvsel_booking *ret)
{
    struct kvsel_booking booking;
    struct kvsel_name *name;

    if (!kv_sized(ret, "kvsel_booking") || !id)
        return -EINVAL;
    name = kvsel_names_find(&s->books, id, id_len);
    if (!name)
        return -ENOENT;
    booking = booking_of(s, book_of(name));
    KV_GIVE(ret, &booking);
    return 0;
}

size_t kvsel_each_booking(const struct kvsel *s, kvsel_booking_fn fn, void *arg)
{
    for (struct kvsel_name *at = s->books.oldest; at; at = at->newer) {
        struct kvsel_booking booking = booking_of(s, book_of(at));

        fn(arg, &booking);
    }
    return s->books.n;
}

size_t kvsel_expire(struct kvsel *s, uint64_t now_ns, kvsel_booking_fn fn, void *arg)
{
    size_t n = 0;

    kvsel_soon_expire(s, now_ns);
    for (; s->books.oldest; n++) {
        struct kvsel_book *book = book_of(s->books.oldest);
        struct kvsel_booking booking = booking_of(s, book);

        if (now_ns < book->progress_ns || now_ns - book->progress_ns < s->opts.expiry_ns)
            break;
        if (fn)
            fn(arg, &booking);
        destroy(s, book, KVSEL_DONE);
    }
    s->stats.expired += n;
    return n;
}

void kvsel_books_fini(struct kvsel *s)
{
    while (s->books.oldest)
        destroy(s, book_of(s->books.oldest), KVSEL_DONE);
    while (s->sessions.oldest)
        forget_session(s, (struct kvsel_session *)s->sessions.oldest);
}
