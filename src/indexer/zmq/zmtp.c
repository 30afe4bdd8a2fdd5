// SPDX-License-Identifier: Apache-2.0
#include "indexer/zmq/zmtp.h"

#include <endian.h>
#include <errno.h>
#include <string.h>

#include "base/core/error.h"

#define MORE 1    /* flag: further frames of the message follow */
#define LONG 2    /* flag: the length has 8 bytes */
#define COMMAND 4 /* flag: a command, which belongs to no message */
#define MAX_CONTEXT 16

/* -- sending ----------------------------------------------------------------------------------- */

/* Append a frame with a body of less than 256 bytes. Without room it is dropped as a whole. */
static void put_frame(struct ki_zmtp_out *out, uint8_t flags, const void *head, size_t head_len,
                      const void *tail, size_t tail_len)
{
    if (2 + head_len + tail_len > sizeof(out->bytes) - out->len)
        return;
    out->bytes[out->len++] = flags;
    out->bytes[out->len++] = (uint8_t)(head_len + tail_len);
    memcpy(out->bytes + out->len, head, head_len);
    out->len += head_len;
    if (tail_len)
        memcpy(out->bytes + out->len, tail, tail_len);
    out->len += tail_len;
}

void ki_zmtp_sent(struct ki_zmtp_out *out, size_t n)
{
    out->len -= n;
    memmove(out->bytes, out->bytes + n, out->len);
}

void ki_zmtp_ping(struct ki_zmtp *zmtp, uint16_t ttl_ds)
{
    uint8_t ttl[2] = {(uint8_t)(ttl_ds >> 8), (uint8_t)ttl_ds};

    put_frame(&zmtp->out, COMMAND, "\4PING", 5, ttl, sizeof(ttl));
}

void ki_zmtp_init(struct ki_zmtp *zmtp, uint64_t max_message)
{
    uint8_t *greeting = zmtp->out.bytes;

    memset(zmtp, 0, sizeof(*zmtp));
    zmtp->max_message = max_message;
    zmtp->needed = 1;
    greeting[0] = 0xff;
    greeting[8] = 1; /* as libzmq fills the padding: older versions take it for a length */
    greeting[9] = 0x7f;
    greeting[10] = 3;
    greeting[11] = 1;
    memcpy(greeting + 12, "NULL", 4);
    zmtp->out.len = KI_ZMTP_GREETING;
}

/* -- handshake --------------------------------------------------------------------------------- */

/*
 * Check the peer's greeting as far as it came: a peer of an old version waits for ours after its
 * first bytes, and sends no more.
 */
static int check_greeting(const uint8_t *data, size_t len)
{
    static const char null_mechanism[20] = "NULL";

    if (len > 0 && data[0] != 0xff)
        return -EPROTO;
    if (len > 9 && !(data[9] & 1))
        return -EPROTO;
    if (len > 10 && data[10] < 3)
        return -EPROTONOSUPPORT;
    if (len >= 32 && memcmp(data + 12, null_mechanism, sizeof(null_mechanism)) != 0)
        return -EPROTONOSUPPORT;
    return 0;
}

static int greet(struct ki_zmtp *zmtp, const uint8_t *data, size_t len, size_t *ret_used)
{
    static const char ready[] = "\5READY\13Socket-Type\0\0\0\3SUB";
    int rc = check_greeting(data, len);

    zmtp->needed = len + 1;
    if (rc < 0 || len < KI_ZMTP_GREETING)
        return rc;
    zmtp->minor = data[10] == 3 ? data[11] : UINT8_MAX;
    zmtp->state = KI_ZMTP_SHAKES;
    zmtp->needed = 1;
    put_frame(&zmtp->out, COMMAND, ready, sizeof(ready) - 1, NULL, 0);
    *ret_used = KI_ZMTP_GREETING;
    return 0;
}

/* Compare a name of ZMTP, which has no case. */
static bool is_name(const uint8_t *data, size_t len, const char *name)
{
    if (len != strlen(name))
        return false;
    for (size_t i = 0; i < len; i++)
        if ((data[i] | 0x20) != (name[i] | 0x20))
            return false;
    return true;
}

/* Check the properties of READY: a publisher's, or none that says otherwise. */
static int check_properties(const uint8_t *p, size_t len)
{
    while (len > 0) {
        size_t name_len = p[0], value_len;
        uint32_t be;

        if (len < 1 + name_len + sizeof(be))
            return -EPROTO;
        memcpy(&be, p + 1 + name_len, sizeof(be));
        value_len = be32toh(be);
        if (value_len > len - 1 - name_len - sizeof(be))
            return -EPROTO;
        if (is_name(p + 1, name_len, "Socket-Type")) {
            const uint8_t *value = p + 1 + name_len + sizeof(be);

            if (!(value_len == 3 && memcmp(value, "PUB", 3) == 0) &&
                !(value_len == 4 && memcmp(value, "XPUB", 4) == 0))
                return -EPROTO;
        }
        p += 1 + name_len + sizeof(be) + value_len;
        len -= 1 + name_len + sizeof(be) + value_len;
    }
    return 0;
}

/* -- frames ------------------------------------------------------------------------------------ */

struct frame {
    uint8_t flags;
    size_t header; /* bytes before the body */
    uint64_t len;  /* bytes of the body */
};

/* Read a frame's header. Returns the bytes it takes; 0: incomplete; -EPROTO. */
static int read_header(const uint8_t *data, size_t len, struct frame *ret)
{
    uint64_t be;

    if (len < 2)
        return len == 1 && data[0] & ~(MORE | LONG | COMMAND) ? -EPROTO : 0;
    ret->flags = data[0];
    if (data[0] & ~(MORE | LONG | COMMAND))
        return -EPROTO;
    if (!(data[0] & LONG)) {
        ret->len = data[1];
        return (int)(ret->header = 2);
    }
    if (len < 1 + sizeof(be))
        return 0;
    memcpy(&be, data + 1, sizeof(be));
    ret->len = be64toh(be);
    return (int)(ret->header = 1 + sizeof(be));
}

/* Return true when the command's body begins with @name. */
static bool is_command(const uint8_t *body, size_t len, const char *name)
{
    size_t name_len = strlen(name);

    return len > name_len && body[0] == name_len && memcmp(body + 1, name, name_len) == 0;
}

/* Carry out the peer's command of the handshake: READY ends it. */
static int shake(struct ki_zmtp *zmtp, const uint8_t *body, size_t len)
{
    static const char subscribe[] = "\11SUBSCRIBE";

    if (!is_command(body, len, "READY") || check_properties(body + 6, len - 6) < 0)
        return -EPROTO;
    zmtp->state = KI_ZMTP_TALKS;
    zmtp->needed = 1;
    if (zmtp->minor >= 1)
        put_frame(&zmtp->out, COMMAND, subscribe, sizeof(subscribe) - 1, NULL, 0);
    else
        put_frame(&zmtp->out, 0, "\1", 1, NULL, 0);
    return 0;
}

/* Carry out a command. Unknown ones are passed over. */
static int obey(struct ki_zmtp *zmtp, const uint8_t *body, size_t len)
{
    if (zmtp->state == KI_ZMTP_SHAKES)
        return shake(zmtp, body, len);
    zmtp->answers |= is_command(body, len, "PONG");
    if (!is_command(body, len, "PING"))
        return 0;
    if (len < 7 || len > 7 + MAX_CONTEXT)
        return -EPROTO;
    zmtp->peer_ttl_ds = (uint16_t)(body[5] << 8 | body[6]);
    put_frame(&zmtp->out, COMMAND, "\4PONG", 5, body + 7, len - 7);
    return 0;
}

/* Parse one frame behind zmtp->scanned. Returns 1: the message is complete; 0: there is more to
 * parse; -EAGAIN: zmtp->needed bytes are needed; another negative errno. */
static int take_frame(struct ki_zmtp *zmtp, const uint8_t *data, size_t len)
{
    struct frame f;
    int header = read_header(data + zmtp->scanned, len - zmtp->scanned, &f);
    size_t at;

    if (header < 0)
        return header;
    if (header == 0) {
        zmtp->needed = len + 1;
        return -EAGAIN;
    }
    if (f.flags & COMMAND ? f.len > KI_ZMTP_MAX_COMMAND : f.len > zmtp->max_message)
        return f.flags & COMMAND ? -EPROTO : -EMSGSIZE;
    if (zmtp->state != KI_ZMTP_TALKS && !(f.flags & COMMAND))
        return -EPROTO;
    at = zmtp->scanned + f.header;
    if (at + f.len > zmtp->max_message + KI_ZMTP_SLACK)
        return -EMSGSIZE;
    if (at + f.len > len) {
        zmtp->needed = at + f.len;
        return -EAGAIN;
    }
    zmtp->scanned = at + f.len;
    if (f.flags & COMMAND)
        return obey(zmtp, data + at, f.len);
    if (zmtp->n_frames < KVE_MAX_FRAMES) {
        zmtp->frames[zmtp->n_frames].at = at;
        zmtp->frames[zmtp->n_frames].len = f.len;
    }
    zmtp->n_frames++;
    return !(f.flags & MORE);
}

static void hand_over(struct ki_zmtp *zmtp, const uint8_t *data, struct ki_zmtp_message *ret)
{
    ret->n_frames = zmtp->n_frames;
    for (size_t i = 0; i < KV_MIN(zmtp->n_frames, (size_t)KVE_MAX_FRAMES); i++)
        ret->spans[i] = (struct kve_span){data + zmtp->frames[i].at, zmtp->frames[i].len};
    zmtp->n_frames = 0;
}

int ki_zmtp_parse(struct ki_zmtp *zmtp, const uint8_t *data, size_t len,
                  struct ki_zmtp_message *ret, size_t *ret_used)
{
    enum ki_zmtp_state before = zmtp->state;
    int rc;

    *ret_used = 0;
    if (zmtp->state == KI_ZMTP_GREETS)
        return greet(zmtp, data, len, ret_used);
    while ((rc = take_frame(zmtp, data, len)) == 0) {
        if (zmtp->n_frames)
            continue;
        *ret_used += zmtp->scanned; /* a command before a message: done with */
        data += zmtp->scanned;
        len -= zmtp->scanned;
        zmtp->scanned = 0;
        if (zmtp->state != before)
            return 0;
    }
    if (rc == -EAGAIN)
        return 0;
    if (rc < 0)
        return rc;
    hand_over(zmtp, data, ret);
    *ret_used += zmtp->scanned;
    zmtp->scanned = 0;
    return 1;
}
