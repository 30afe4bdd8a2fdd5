// SPDX-License-Identifier: Apache-2.0
/* A whole conversation of the redis plugin with a malicious server, whose answers are the input. */
#include <errno.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "talk.h"

enum { FIRST_FD = 1 << 20, LINES = 64 }; /* no descriptor of the process */

/* A connection of the plugin. */
static struct line {
    bool open, heard, closed;
    const uint8_t *answer; /* the rest of it */
    size_t len;
} lines[LINES];

int __real_close(int fd);
int __real_poll(struct pollfd *fds, nfds_t n, int timeout_ms);
int __wrap_socket(int family, int type, int protocol);
int __wrap_connect(int fd, const struct sockaddr *to, socklen_t len);
int __wrap_close(int fd);
int __wrap_poll(struct pollfd *fds, nfds_t n, int timeout_ms);
ssize_t __wrap_sendmsg(int fd, const struct msghdr *message, int flags);
ssize_t __wrap_recvmsg(int fd, struct msghdr *message, int flags);

static struct line *line_of(int fd)
{
    return fd >= FIRST_FD && fd < FIRST_FD + LINES ? &lines[fd - FIRST_FD] : NULL;
}

int __wrap_socket(int family, int type, int protocol)
{
    (void)family, (void)type, (void)protocol;
    for (int i = 0; i < LINES; i++)
        if (!lines[i].open) {
            lines[i] = (struct line){.open = true};
            return FIRST_FD + i;
        }
    errno = EMFILE;
    return -1;
}

int __wrap_connect(int fd, const struct sockaddr *to, socklen_t len)
{
    (void)to, (void)len;
    return line_of(fd) ? 0 : -1;
}

int __wrap_close(int fd)
{
    if (!line_of(fd))
        return __real_close(fd);
    REQUIRE(line_of(fd)->open);
    line_of(fd)->open = false;
    return 0;
}

ssize_t __wrap_sendmsg(int fd, const struct msghdr *message, int flags)
{
    struct line *line = line_of(fd);
    size_t n = 0;

    (void)flags;
    REQUIRE(line && line->open);
    for (size_t i = 0; i < message->msg_iovlen; i++)
        n += message->msg_iov[i].iov_len;
    if (line->closed) {
        errno = EPIPE;
        return -1;
    }
    line->heard = true;
    return (ssize_t)n;
}

/* Answer a message once its sender listens. */
static void answer(struct line *line)
{
    if (line->len || line->closed || !line->heard)
        return;
    line->heard = false;
    line->closed = !talk_next(&line->answer, &line->len);
}

ssize_t __wrap_recvmsg(int fd, struct msghdr *message, int flags)
{
    struct line *line = line_of(fd);
    size_t done = 0;

    (void)flags;
    REQUIRE(line && line->open);
    answer(line);
    for (size_t i = 0; i < message->msg_iovlen && line->len; i++) {
        size_t n = KV_MIN(message->msg_iov[i].iov_len, line->len);

        memcpy(message->msg_iov[i].iov_base, line->answer, n);
        line->answer += n;
        line->len -= n;
        done += n;
    }
    if (done || line->closed)
        return (ssize_t)done;
    errno = EAGAIN;
    return -1;
}

int __wrap_poll(struct pollfd *fds, nfds_t n, int timeout_ms)
{
    int ready = 0;

    if (n == 0 || !line_of(fds[0].fd))
        return __real_poll(fds, n, timeout_ms);
    for (nfds_t i = 0; i < n; i++) {
        struct line *line = line_of(fds[i].fd);

        REQUIRE(line && line->open);
        fds[i].revents = (short)(fds[i].events & POLLOUT);
        if (line->len || line->closed || line->heard)
            fds[i].revents |= (short)(fds[i].events & POLLIN);
        ready += fds[i].revents != 0;
    }
    if (!ready && timeout_ms > 0)
        atomic_fetch_add(&talk_skipped_ns, (uint64_t)timeout_ms * KV_NS_PER_MS);
    return ready;
}

/* -- memory ------------------------------------------------------------------------------------ */

/* The plugin's pieces of 32 MiB come from one mapping: the address sanitizer takes milliseconds to
 * prepare a new one. */
enum { PIECES = 8 };
#define PIECE ((size_t)32 << 20)

static char *pieces;
static bool taken[PIECES];

void *__real_aligned_alloc(size_t alignment, size_t size);
void __real_free(void *memory);
void *__wrap_aligned_alloc(size_t alignment, size_t size);
void __wrap_free(void *memory);

void *__wrap_aligned_alloc(size_t alignment, size_t size)
{
    if (!pieces)
        pieces = mmap(NULL, PIECE * PIECES, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    for (int i = 0; i < PIECES && size == PIECE && pieces != MAP_FAILED; i++)
        if (!taken[i]) {
            taken[i] = true;
            return pieces + (size_t)i * PIECE;
        }
    return __real_aligned_alloc(alignment, size);
}

void __wrap_free(void *memory)
{
    uintptr_t at = (uintptr_t)memory - (uintptr_t)pieces;

    if (!pieces || at >= PIECE * PIECES) {
        __real_free(memory);
        return;
    }
    REQUIRE(at % PIECE == 0 && taken[at / PIECE]);
    taken[at / PIECE] = false;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    talk(data, size, "redis+unix:///server?timeout_ms=100", "-ERR enough\r\n");
    for (int i = 0; i < LINES; i++)
        REQUIRE(!lines[i].open);
    for (int i = 0; i < PIECES; i++)
        REQUIRE(!taken[i]);
    return 0;
}
