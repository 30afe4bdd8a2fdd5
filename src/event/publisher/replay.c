// SPDX-License-Identifier: Apache-2.0
#include "event/publisher/replay.h"

#include <errno.h>
#include <inttypes.h>
#include <string.h>

#include "base/core/clock.h"
#include "base/core/log.h"
#include "event/wire/frames.h"

#define SLICE 32                      /* batches sent to one client before live events get a turn */
#define REQUESTS 64                   /* requests read before live events get a turn */
#define STALL_MS 5                    /* pause before a full client is tried again */
#define GIVE_UP_NS (30 * KV_NS_PER_S) /* time after which a client that stays full is dropped */

void kve_replay_init(struct kve_replay *replay, void *router, struct kve_ring *ring,
                     enum kve_replay_framing framing, const char *topic)
{
    *replay =
        (struct kve_replay){.router = router, .ring = ring, .framing = framing, .topic = topic};
    for (unsigned i = 0; i < KVE_MAX_REPLAYS; i++)
        zmq_msg_init(&replay->jobs[i].peer);
}

void kve_replay_fini(struct kve_replay *replay)
{
    for (unsigned i = 0; i < KVE_MAX_REPLAYS; i++)
        zmq_msg_close(&replay->jobs[i].peer);
}

/* -- requests ---------------------------------------------------------------------------------- */

static bool is_free(struct kve_replay_job *job)
{
    return zmq_msg_size(&job->peer) == 0;
}

static void end_job(struct kve_replay *replay, struct kve_replay_job *job)
{
    zmq_msg_close(&job->peer);
    zmq_msg_init(&job->peer);
    if (job->stalled_ns)
        replay->n_stalled--;
    job->stalled_ns = 0;
    replay->n_jobs--;
}

/*
 * Return the client's own job when it asks again (it has given up on the first), else a free one.
 */
static struct kve_replay_job *job_for(struct kve_replay *replay, zmq_msg_t *peer)
{
    struct kve_replay_job *found = NULL;

    for (unsigned i = 0; i < KVE_MAX_REPLAYS; i++) {
        struct kve_replay_job *job = &replay->jobs[i];

        if (is_free(job)) {
            found = found ? found : job;
        } else if (zmq_msg_size(&job->peer) == zmq_msg_size(peer) &&
                   memcmp(zmq_msg_data(&job->peer), zmq_msg_data(peer), zmq_msg_size(peer)) == 0) {
            end_job(replay, job);
            return job;
        }
    }
    return found;
}

static void start_job(struct kve_replay *replay, zmq_msg_t *peer, uint64_t start, uint64_t stop)
{
    struct kve_replay_job *job = job_for(replay, peer);

    if (!job) {
        kv_log_warn("events", "too many replays at once, a request is left unanswered", NULL);
        return;
    }
    zmq_msg_move(&job->peer, peer);
    job->next = start;
    job->stop = stop;
    replay->n_jobs++;
    replay->requests++;
}

/*
 * Receive one message: routing id, empty frame, start sequence. Returns false when none is waiting.
 * @peer gets the routing id; *@ret_good is true when the rest is a valid request.
 */
static bool receive(void *router, zmq_msg_t *peer, uint64_t *ret_start, bool *ret_good)
{
    zmq_msg_t frame;
    unsigned n;

    if (zmq_msg_recv(peer, router, ZMQ_DONTWAIT) < 0)
        return false;
    *ret_good = true;
    zmq_msg_init(&frame);
    for (n = 1; zmq_msg_more(n == 1 ? peer : &frame); n++) {
        if (zmq_msg_recv(&frame, router, ZMQ_DONTWAIT) < 0)
            break;
        if (n > 2 || zmq_msg_size(&frame) != (n == 1 ? 0 : KVE_SEQUENCE_BYTES))
            *ret_good = false;
        else if (n == 2)
            *ret_start = kve_sequence_get(zmq_msg_data(&frame));
    }
    *ret_good = *ret_good && n == 3;
    zmq_msg_close(&frame);
    return true;
}

void kve_replay_receive(struct kve_replay *replay, uint64_t next_sequence)
{
    zmq_msg_t peer;
    uint64_t start = 0;
    bool good;

    for (unsigned i = 0; replay->router && i < REQUESTS; i++) {
        zmq_msg_init(&peer);
        if (!receive(replay->router, &peer, &start, &good)) {
            zmq_msg_close(&peer);
            return;
        }
        if (good && zmq_msg_size(&peer))
            start_job(replay, &peer, start, next_sequence);
        zmq_msg_close(&peer);
    }
}

/* -- replies ----------------------------------------------------------------------------------- */

/* Send the frames of one reply. Only the first can be refused by a full client. */
static int send_frames(struct kve_replay *replay, struct kve_replay_job *job, const char *topic,
                       uint64_t sequence, zmq_msg_t *payload)
{
    uint8_t bytes[KVE_SEQUENCE_BYTES];
    zmq_msg_t copy;

    if (zmq_send(replay->router, zmq_msg_data(&job->peer), zmq_msg_size(&job->peer),
                 ZMQ_SNDMORE | ZMQ_DONTWAIT) < 0)
        return -errno;
    kve_sequence_put(bytes, sequence);
    zmq_send(replay->router, "", 0, ZMQ_SNDMORE);
    if (replay->framing == KVE_REPLAY_WITH_TOPIC)
        zmq_send(replay->router, topic, strlen(topic), ZMQ_SNDMORE);
    zmq_send(replay->router, bytes, sizeof(bytes), ZMQ_SNDMORE);
    if (!payload) {
        zmq_send(replay->router, "", 0, 0);
        return 0;
    }
    zmq_msg_init(&copy);
    zmq_msg_copy(&copy, payload);
    if (zmq_msg_send(&copy, replay->router, 0) < 0)
        zmq_msg_close(&copy);
    return 0;
}

/*
 * Send the next batch of a job. Returns 1 when a batch was sent, 0 when the job is over, or a
 * negative errno.
 */
static int send_next(struct kve_replay *replay, struct kve_replay_job *job)
{
    struct kve_ring_batch *batch = kve_ring_at_least(replay->ring, job->next);
    int rc;

    if (!batch || batch->sequence >= job->stop)
        return send_frames(replay, job, "", KVE_END_SEQUENCE, NULL);
    rc = send_frames(replay, job, replay->topic, batch->sequence, &batch->payload);
    if (rc)
        return rc;
    job->next = batch->sequence + 1;
    replay->batches++;
    return 1;
}

/*
 * Handle a failed send: wait for a full client up to GIVE_UP_NS, forget one that has disconnected.
 */
static void note_failure(struct kve_replay *replay, struct kve_replay_job *job, int error)
{
    uint64_t now = kv_now_ns();

    if (error != -EAGAIN || (job->stalled_ns && now - job->stalled_ns > GIVE_UP_NS)) {
        kv_log_info("events", "a replay was given up", "next=%" PRIu64 " error=%d", job->next,
                    -error);
        end_job(replay, job);
    } else if (!job->stalled_ns) {
        job->stalled_ns = now;
        replay->n_stalled++;
    }
}

void kve_replay_serve(struct kve_replay *replay)
{
    for (unsigned i = 0; i < KVE_MAX_REPLAYS && replay->n_jobs; i++) {
        struct kve_replay_job *job = &replay->jobs[i];
        int rc = 1;

        if (is_free(job))
            continue;
        for (unsigned sent = 0; sent < SLICE && rc > 0; sent++) {
            rc = send_next(replay, job);
            if (rc >= 0 && job->stalled_ns) {
                job->stalled_ns = 0;
                replay->n_stalled--;
            }
        }
        if (rc == 0)
            end_job(replay, job);
        else if (rc < 0)
            note_failure(replay, job, rc);
    }
}

long kve_replay_timeout_ms(const struct kve_replay *replay)
{
    if (!replay->n_jobs)
        return -1;
    return replay->n_stalled == replay->n_jobs ? STALL_MS : 0;
}
